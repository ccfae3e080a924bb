"""Reward files, data sets and models that other people bring: each test is a public report, and relatives of it."""

import contextlib
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

pytestmark = pytest.mark.setting("grpo_rlhf", "ppo_rlhf")
GRPO, PPO = pytest.mark.setting("grpo_rlhf"), pytest.mark.setting("ppo_rlhf")
CHATML = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[{{ 'fast' if enable_thinking is defined and not enable_thinking else 'slow' }}]{% endif %}"
)
TALK = [{"role": "user", "content": "1+1="}]


def says(text):
    return [{"role": "assistant", "content": text}]


def own(script, *names):
    """Whether the script is of one of these; a test about the other one's flags has nothing to say."""
    return script.setting in names


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Random models over bytes: one that speaks (with a chat template and without) and judges of one and two outputs."""
    folder = tmp_path_factory.mktemp("lab")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    size = dict(
        vocab_size=260, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    size |= dict(max_position_embeddings=256, bos_token_id=None, eos_token_id=256, pad_token_id=257)
    for name, kind, template, outputs in (
        ("plain", transformers.AutoModelForCausalLM, None, 1),
        ("chat", transformers.AutoModelForCausalLM, CHATML, 1),
        ("judge", transformers.AutoModelForSequenceClassification, CHATML, 1),
        ("two", transformers.AutoModelForSequenceClassification, CHATML, 2),
        ("three", transformers.AutoModelForSequenceClassification, None, 3),
    ):
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=bytewise, eos_token="<eos>", pad_token="<pad>"
        )
        tokenizer.chat_template = template
        torch.manual_seed(0)
        kind.from_config(transformers.LlamaConfig(**size, num_labels=outputs)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def train(script, lab, tmp_path, monkeypatch):
    """Trains a step of 4 prompts in an empty folder, on 40 additions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", sys.modules)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(8)]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("even.py").write_text(
        "def f(prompts, completions, rows):\n    return [len(t) % 2 for t in completions]\n"
    )
    quick = dict(total_steps=1, num_prompts=4, max_new_tokens=6, num_eval=4, device="cpu", num_minibatches=1)
    quick |= dict(reward="even.py:f", learning_rate=1e-2)
    grpo = dict(model=str(lab / "plain"), dataset="data.jsonl", group_size=2, eval_samples=0)
    ppo = dict(policy=str(lab / "plain"), prompts="data.jsonl", normalize_scores=0)
    quick |= grpo if own(script, "grpo_rlhf") else ppo
    policy, data = ("model", "dataset") if own(script, "grpo_rlhf") else ("policy", "prompts")

    def train(model=None, data_file=None, **flags):
        flags |= {} if model is None else {policy: str(model)}
        flags |= {} if data_file is None else {data: data_file}
        return script.main(script.Args(**script.flags(**(quick | flags))))

    return train


def write(path, *rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- reward files ----

DATACLASS = """
from __future__ import annotations
from dataclasses import dataclass, field
@dataclass
class Rule:
    weight: float = 0.5
    words: list[str] = field(default_factory=list)
"""


@pytest.mark.parametrize("name, files", [
    ("dataclass", {"own.py": DATACLASS + "def f(p, c, r): return [Rule().weight] * len(c)"}),
    ("neighbour", {"own.py": "import own_helper\ndef f(p, c, r): return [own_helper.half()] * len(c)",
                   "own_helper.py": "def half(): return 0.5"}),
    ("late neighbour", {"own.py": "def f(p, c, r):\n    import own_late\n    return [own_late.HALF] * len(c)", "own_late.py": "HALF = 0.5"}),
    ("pickled", {"own.py": "import pickle\ndef half(): return 0.5\ndef f(p, c, r): return [pickle.loads(pickle.dumps(half))()] * len(c)"}),
    ("pool", {"own.py": "from concurrent.futures import ProcessPoolExecutor as Pool\ndef half(t): return 0.5\n"
              "def f(p, c, r):\n    with Pool(1) as pool: return list(pool.map(half, c))"}),
    ("named as a library", {"json.py": "def half(): return 0.5\ndef f(p, c, r): return [half()] * len(c)"}),
])  # fmt: skip
def test_a_reward_file_is_a_module(script, tmp_path, monkeypatch, name, files):
    """Postponed annotations, files beside it, pickling and process pools work; another module of its name stays."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in ("own", "own_", "own_helper", "own_late"):
        sys.modules.pop(module, None)
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    function = script.load_rewards(f"{tmp_path / next(iter(files))}:f")
    assert script.score_texts(function, ["a", "b"], ["c", "d"], [{}, {}]).tolist() == [0.5, 0.5]
    assert sys.modules["json"] is json


def test_two_functions_of_a_file_are_of_one_module(script, tmp_path, monkeypatch):
    """The file is run once; a file of the same name in another folder is another module."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "other").mkdir()
    text = "seen = []\ndef f(p, c, r): seen.append(1); return [{}] * len(c)\ndef g(p, c, r): return [float(len(seen))] * len(c)"
    (tmp_path / "twice.py").write_text(text.format("1.0"))
    (tmp_path / "other/twice.py").write_text(text.format("5.0"))
    both = script.load_rewards(f"{tmp_path}/twice.py:f+{tmp_path}/twice.py:g+{tmp_path}/other/twice.py:f")
    assert script.score_texts(both, [""], [""], [{}]).tolist() == [7.0]


@pytest.mark.parametrize("body, raised", [
    ("(p, c, rows):\n    return [row['truth'] for row in rows]", "KeyError: 'truth' (own.py:2)"),
    ("(p, c, rows):\n    return [helper(row) for row in rows]\ndef helper(row):\n    return row.truth", "(own.py:4)"),
    ("(completions, answer):\n    return [0.0]", "takes 2 positional arguments but 3 were given"),
    ("(p, c, *, rows):\n    return [0.0]", "takes 2 positional arguments but 3 were given"),
])  # fmt: skip
def test_a_fault_of_a_reward_says_what_it_is_given(script, tmp_path, monkeypatch, body, raised):
    """The arguments, the fields of the rows (those of the file, not ours), what was raised, and the line."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own.py").write_text(f"def f{body}\n")
    rows = [{"prompt": "a", "solution": 1, "ids": [1]}]
    with pytest.raises(script.UsageError) as error:
        script.score_texts(script.load_rewards(f"{tmp_path}/own.py:f"), ["a"], ["b"], rows)
    assert "own.py:f failed with (prompts, completions, rows), each row with prompt, solution: " in str(
        error.value
    )
    assert raised in str(error.value)


# ---- files ----


def test_a_byte_order_mark_is_no_fault(script, train):
    """A file as Windows writes it: a mark at its beginning, both ends of line."""
    text = Path("data.jsonl").read_text().replace("\n", "\r\n")
    Path("marked.jsonl").write_bytes(text.encode("utf-8-sig"))
    assert train(data_file="marked.jsonl")["step"] == 1


@pytest.mark.parametrize("line, words", [
    ('{"question": "1+1=", "answer": "2"}', ": it has question, answer"), ("{}", ": it has nothing"),
    ('{"Prompt": "1", "answer": "2"}', ": it has Prompt, answer"), ('["prompt", "answer"]', "TypeError"), ('"prompt"', "TypeError"),
])  # fmt: skip
def test_a_refused_line_names_its_fields(script, train, line, words):
    """What the line has and what is wanted, not the same sentence for every fault."""
    Path("bad.jsonl").write_text(Path("data.jsonl").read_text() + line + "\n")
    with pytest.raises(script.UsageError) as error:
        train(data_file="bad.jsonl")
    assert "bad.jsonl, line 41: not an object with prompt" in str(error.value) and words in str(error.value)


@PPO
@pytest.mark.parametrize("pair", [
    {"chosen": TALK + says("2"), "rejected": TALK + says("3")},  # TRL: the prompt is in both
    {"prompt": TALK, "chosen": says("2"), "rejected": says("3")},  # TRL: the prompt by itself
    {"prompt": "1+1=", "chosen": TALK + says("2"), "rejected": TALK + says("3")},  # ultrafeedback_binarized
    {"prompt": TALK, "chosen": TALK + says("2"), "rejected": TALK + says("3")},
    {"prompt": "1+1=", "chosen": says("2"), "rejected": says("3")},
    {"prompt": TALK[:0], "chosen": TALK + says("2"), "rejected": TALK + says("3"), "score_chosen": 1.0},
], ids=range(6))  # fmt: skip
def test_conversational_pairs(script, lab, tmp_path, pair):
    """Pairs of messages are those of texts, as the reward model reads them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(lab / "judge")
    if not pair.get("prompt", True):
        pair = {name: value for name, value in pair.items() if name != "prompt"}
    write(tmp_path / "pairs.jsonl", *[pair] * 20)
    (found, *_) = script.load_pairs(str(tmp_path / "pairs.jsonl"), tokenizer)
    assert (found["chosen"], found["rejected"]) == ("2", "3")
    read = script.conversation(tokenizer, found["prompt"], found["chosen"])
    assert tokenizer.decode(read) == "[user]1+1=[assistant]2"


@PPO
@pytest.mark.parametrize("pair, words", [
    ({"chosen": "a", "rejected": "b"}, "it has chosen, rejected"),
    ({"question": "x", "chosen": "a"}, "not an object with chosen, rejected: it has question, chosen"),
    ({"chosen": says("a"), "rejected": says("b")}, "prompt must be a text or messages, not empty"),
    ({"chosen": TALK + says("a"), "rejected": TALK * 2 + says("b")}, "must differ in the last message alone"),
    ({"chosen": TALK + says("a"), "rejected": TALK * 2}, "must differ in the last message alone"),
    ({"prompt": "x", "chosen": says("a"), "rejected": "b"}, "as texts or messages: it has prompt, chosen, rejected"),
])  # fmt: skip
def test_pairs_that_are_none_are_named(script, lab, tmp_path, pair, words):
    tokenizer = transformers.AutoTokenizer.from_pretrained(lab / "judge")
    write(tmp_path / "pairs.jsonl", pair)
    with pytest.raises(script.UsageError) as error:
        script.load_pairs(str(tmp_path / "pairs.jsonl"), tokenizer)
    assert "pairs.jsonl, line 1: " in str(error.value) and words in str(error.value)


@pytest.mark.parametrize("wanted, held_out", [(30, 20), (20, 20), (4, 4), (1000, 20)])
def test_at_most_half_of_a_file_is_held_out(script, train, capsys, wanted, held_out):
    """--num-eval above half of the rows is half of them, and a line says so."""
    folder = train(num_eval=wanted, run_name="x")["folder"]
    rows = [json.loads(line) for line in open(f"{folder}/completions.jsonl")]
    assert len([row for row in rows if row["step"] == 0]) == held_out
    assert (f"--num-eval {wanted}: only 20, half of the 40 rows" in capsys.readouterr().out) == (wanted > 20)


# ---- models ----


def test_what_a_run_with_adapters_leaves(script, lab, train, monkeypatch, tmp_path):
    """model/ is whole: transformers reads it from anywhere, our own script trains on from it; adapters/ is beside it."""
    peft = pytest.importorskip("peft")
    folder = Path(train(lora_rank=2, learning_rate=0.1, run_name="x")["folder"]).resolve()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    assert not [path for path in (folder / "model").iterdir() if path.name.startswith("adapter")]
    base = transformers.AutoModelForCausalLM.from_pretrained(lab / "plain").eval()
    ids = torch.tensor([[50, 60, 70]])
    with torch.no_grad():
        start, merged = base(ids).logits.clone(), model(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, folder / "adapters")(ids).logits
    torch.testing.assert_close(merged, adapted, atol=1e-5, rtol=1e-4)
    assert (merged - start).abs().max() > 1e-3
    monkeypatch.chdir(tmp_path)
    assert train(folder / "model", run_name="on")["step"] == 1
    assert train(folder / "model", run_name="more", lora_rank=2)["step"] == 1


@PPO
@pytest.mark.parametrize("name, outputs", [("two", 2), ("three", 3)])
def test_a_reward_model_with_more_outputs(script, lab, name, outputs):
    """The sentence says how many it has, and nothing of a flag that does not exist."""
    with pytest.raises(script.UsageError) as error:
        script.load_classifier(str(lab / name))
    assert f"has {outputs} outputs" in str(error.value) and "ignore_mismatched" not in str(error.value)


def test_settings_of_the_chat_template(script, lab, train):
    """--chat-template-kwargs reaches the template; without it nothing changes; what is no object is refused."""
    seen, encode_rows = [], script.encode_rows
    tokenizer, model = script.load_model(str(lab / "chat"))
    for words, end in (
        ("{}", "[slow]"),
        ('{"enable_thinking": false}', "[fast]"),
        ('{"enable_thinking": true}', "[slow]"),
    ):
        args = script.Args(**script.flags(chat_template_kwargs=words, max_new_tokens=4))
        (row,) = encode_rows([{"prompt": "1+1="}], tokenizer, model, args)
        seen.append(tokenizer.decode(row["ids"]))
        assert seen[-1] == f"[user]1+1={end}"
    for words in ("[]", "enable_thinking=false", "1", "null", "{"):
        with pytest.raises(script.UsageError, match="--chat-template-kwargs .* is no JSON object"):
            script.Args(chat_template_kwargs=words)


def test_an_output_that_cannot_encode(script, lab, tmp_path):
    """Completions of random bytes on an ASCII output, of a file with a name beyond it, do not end a run."""
    (tmp_path / "été.jsonl").write_text(
        "".join(json.dumps({"prompt": f"é{i}", "answer": "ü"}) + "\n" for i in range(16))
    )
    (tmp_path / "r.py").write_text(
        "def f(prompts, completions, rows): return [len(t) % 2 for t in completions]"
    )
    flags = dict(
        total_steps=1,
        num_prompts=4,
        num_minibatches=1,
        max_new_tokens=6,
        num_eval=4,
        device="cpu",
        reward="r.py:f",
    )
    if own(script, "grpo_rlhf"):
        flags |= dict(model=lab / "plain", dataset="été.jsonl", group_size=2, eval_samples=0)
    else:
        flags |= dict(policy=lab / "plain", prompts="été.jsonl", normalize_scores=0)
    command = [sys.executable, str(script.path), *script.words(**flags)]
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-500:]
    assert b"\\xe9" in done.stdout


# ---- completions without a score ----


@PPO
def test_unscored_completions_leave_the_batch(script, train, monkeypatch):
    """What PPO learns from and measures is of the scored completions alone; their share is a metric."""
    Path("some.py").write_text(
        "def f(prompts, completions, rows):\n"
        "    return [None if i == 1 else float('nan') if i == 2 else float(len(t) % 3) for i, t in enumerate(completions)]\n"
    )
    batches, sample = [], script.sample_batch
    monkeypatch.setattr(script.module, "sample_batch", lambda *a: batches.append(sample(*a)) or batches[-1])
    out = train(reward="some.py:f", normalize_scores=4, num_prompts=8, num_minibatches=8, total_steps=2)
    for batch, charts in batches:
        assert {len(x) for x in batch.values()} == {6} and charts["charts/unscored"] == 0.25
        assert torch.isfinite(batch["advantages"]).all() and charts["charts/tokens"] == batch["mask"].sum()
        assert batch["advantages"][batch["mask"]].mean().abs() < 1e-5
    assert all(math.isfinite(value) for name, value in out.items() if name.startswith(("losses/", "eval/")))
    rows = [json.loads(line) for line in open(f"{out['folder']}/completions.jsonl")]
    assert [row["score"] is None for row in rows[:4]] == [False, True, True, False]


@PPO
def test_the_normalisation_is_of_what_has_a_score(script):
    nan = math.nan
    assert script.normalisation(torch.tensor([nan, 1.0, 3.0])) == {"mean": 2.0, "std": pytest.approx(2**0.5)}
    assert script.normalisation(torch.tensor([nan, 4.0])) == {"mean": 4.0, "std": 1.0}
    with pytest.raises(script.UsageError, match="none of 2 completions has a score"):
        script.normalisation(torch.tensor([nan, nan]))


@GRPO
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_unscored_responses_stay_in_the_counts(script, train, monkeypatch, aggregation):
    """Losses are divided by the counts of all responses of a step, those without a score or advantage too."""
    Path("some.py").write_text(
        "def f(prompts, completions, rows):\n"
        "    return [None if i % 4 == 1 else 0.5 if i < 4 else float(i % 2) for i, t in enumerate(completions)]\n"
    )
    seen, loss = [], script.micro_batch_loss
    monkeypatch.setattr(script.module, "micro_batch_loss", lambda *a: seen.append(a) or loss(*a))
    train(reward="some.py:f", group_size=4, aggregation=aggregation)
    assert seen
    for _, batch, rows, (tokens, sequences, _), _ in seen:
        assert batch["rewards"].isnan().sum() == 4 and (batch["advantages"][:4] == 0).all()
        assert tokens == batch["mask"].sum() and sequences == len(batch["mask"]) == 16
        assert not {i for row in rows for i in row} & {0, 1, 2, 3, 5, 9, 13}


# ---- every pair, every seed ----


@PPO
@pytest.mark.parametrize("pairs, epochs", [(100, 1), (72, 3), (71, 1), (30, 2)])
def test_every_pair_is_trained_on(script, lab, monkeypatch, pairs, epochs):
    """Each pair as often as there are epochs, the rest of the last batch too."""
    tokenizer, judge = script.load_classifier(str(lab / "judge"))
    rows = [{"prompt": f"{i}", "chosen": "a", "rejected": "b"} for i in range(pairs)]
    seen, read = [], script.read_texts
    note = lambda *a: seen.extend(a[2][: len(a[2]) // 2] if torch.is_grad_enabled() else ()) or read(*a)
    monkeypatch.setattr(script.module, "read_texts", note)
    args = script.Args(**script.flags(reward_epochs=epochs))
    with contextlib.redirect_stderr(io.StringIO()):
        script.fit_reward_model(judge, tokenizer, rows, args)
    assert sorted(seen) == sorted([row["prompt"] for row in rows[pairs // 10 :]] * epochs)


def test_no_seed_draws_what_the_next_one_draws(script, train, monkeypatch):
    """Made held-out data (GRPO) and prompts of the normalisation (PPO) are not those that seed + 1 trains on."""
    if own(script, "grpo_rlhf"):
        asked = []
        rows = lambda source, count, seed: (
            asked.append(seed) or script.sort_rows(count, script.np.random.default_rng(seed))
        )
        monkeypatch.setattr(script.module, "load_rows", rows)
        args = script.Args(
            model="m", dataset="made", eval_dataset="made", num_prompts=2, total_steps=1, num_eval=3, seed=5
        )
        script.load_task(args, None)
        assert asked[0] == 5 and not set(asked[1:]) & set(range(5, 1000))
    else:
        asked, indices = [], script.prompt_indices
        monkeypatch.setattr(script.module, "prompt_indices", lambda *a: asked.append(a[3]) or indices(*a))
        train(seed=5, normalize_scores=4)
        assert asked[1] == 5 and not set(asked[:1]) & set(range(5, 1000))
