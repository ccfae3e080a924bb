"""ppo_rlhf.py as a newcomer meets it: the command line, prompts, pairs, rewards and reward models that are broken."""

import ast
import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.setting("ppo_rlhf")
INF, NAN = float("inf"), float("nan")


def run(script, cwd, *flags, **env):
    command = [sys.executable, str(script.path), *map(str, flags)]
    env = {**os.environ, "COLUMNS": "200", "HF_HUB_OFFLINE": "1", **env}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=env, timeout=300)


def write(path, *rows):
    """A .jsonl file; text goes in as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def edit(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def steps(name):
    """metrics.jsonl of a run: the lines of a step joined, without what depends on the clock."""
    rows = {}
    for row in lines(f"runs/{name}/metrics.jsonl"):
        rows[row["step"]] = rows.get(row["step"], {}) | row
    clock = ("time/", "charts/TPS", "charts/SPS")
    return [{k: v for k, v in row.items() if not k.startswith(clock)} for row in rows.values()]


def parts(name):
    """The parts of a run's checkpoint."""
    return torch.load(f"runs/{name}/checkpoint.pt", weights_only=True)["parts"]


@pytest.fixture(scope="session")
def lab(script, tmp_path_factory):
    """Folders of a tiny policy and of reward models, whole or wrong in one way each; prompts and pairs."""
    folder = tmp_path_factory.mktemp("lab")
    torch.manual_seed(0)
    tokenizer, rng = script.word_tokenizer(), np.random.default_rng(0)
    policy = script.tiny_model(tokenizer)
    policy.config.num_labels = 2
    classifier = script.transformers.LlamaForSequenceClassification
    models = dict.fromkeys(("whole", "endless", "closing", "cut", "half"), policy)
    models |= {"two": classifier(policy.config)}
    for name in ("judge", "foreign"):
        models[name] = script.classifier_of(policy)
        models[name].score.weight.data.normal_()
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    weights = folder / "cut/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    edit(folder / "half/config.json", dtype="bfloat16", attention_dropout=0.5)
    for file in ("config.json", "generation_config.json"):
        edit(folder / "endless" / file, eos_token_id=None)
    edit(folder / "endless/tokenizer_config.json", eos_token=None)
    known = json.loads((folder / "foreign/tokenizer.json").read_text())  # the same words, other ids
    vocabulary = known["model"]["vocab"]
    words = [word for word in vocabulary if word.startswith(" ")]
    vocabulary |= {word: vocabulary[other] for word, other in zip(words, words[7:] + words[:7])}
    (folder / "foreign/tokenizer.json").write_text(json.dumps(known))
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A <eos>", special_tokens=[("<pad>", pad), ("<eos>", eos)]
    )
    tokenizer.save_pretrained(folder / "closing")
    texts = sorted({" ".join(script.sentence(rng).split()[:5]) for _ in range(60)})[:40]
    assert len(texts) == 40
    write(folder / "prompts.jsonl", *({"prompt": f" {text}"} for text in texts))
    sides = [script.sentence(rng).split() for _ in range(40)]
    good, bad = script.WORDS["A+"].split()[0], script.WORDS["A-"].split()[0]
    tail = lambda word, side: "".join(f" {x}" for x in [word, *side[5:]])
    write(folder / "pairs.jsonl", *(
        {"prompt": f" {text}", "chosen": tail(good, side), "rejected": tail(bad, side)}
        for text, side in zip(texts, sides)))  # fmt: skip
    return folder


CALLS = "import itertools\ncalls = itertools.count()\ndef f(prompts, completions, rows):\n    call = next(calls)\n    "
SKILL = "return [float(len(c) % 3) for c in completions]\n"


@pytest.fixture
def train(script, lab, tmp_path, monkeypatch):
    """Trains the tiny policy for two steps in this process and an empty folder, on a reward of its own."""
    monkeypatch.chdir(tmp_path)
    for name in ("prompts.jsonl", "pairs.jsonl"):
        shutil.copy(lab / name, tmp_path)
    (tmp_path / "r.py").write_text(CALLS + SKILL)
    quick = dict(prompts="prompts.jsonl", num_eval=4, total_steps=2, num_prompts=4, num_minibatches=2)
    quick |= dict(max_new_tokens=6, update_epochs=1, normalize_scores=8, reward_epochs=1, device="cpu")

    def train(policy="whole", **flags):
        sources = {"reward", "reward_model", "train_reward_model"} & set(flags)
        reward = {} if sources else {"reward": "r.py:f"}
        if "resume" in flags:
            return script.main(script.parse_args(script.words(**flags)))
        return script.main(script.Args(**quick | reward | {"policy": str(lab / policy)} | flags))

    return train


@pytest.fixture
def refused(script, train, tmp_path):
    """Trains, expects one sentence with these words, and no folder of a run unless `started`."""

    def refused(words, started=False, **flags):
        with pytest.raises((script.UsageError, FloatingPointError)) as error:
            train(**flags)
        assert words in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 600
        assert started or not (tmp_path / "runs").exists(), "a folder is left behind"
        return str(error.value)

    return refused


RULES = [  # flags, wrong values, what is said
    ("num_eval num_pairs total_steps num_prompts max_new_tokens kl_horizon update_epochs num_minibatches save_every "
     "batch_tokens reward_epochs", (0, -5), "must be at least 1"),
    ("temperature clip_coef value_clip max_grad_norm target_kl kl_target learning_rate value_learning_rate "
     "reward_learning_rate importance_cap",
     (0.0, -1.0, INF, NAN), "must be positive and finite"),
    ("gamma gae_lambda", (-0.1, 1.1, INF, NAN), "must lie in [0, 1]"),
    ("missing_eos_penalty kl_coef vf_coef", (-0.1, INF, NAN), "must not be negative"),
    ("lora_rank warmup_steps eval_every", (-1,), "must not be negative"),
    ("normalize_scores", (1, -1), "must be 0 or at least 2"),
    ("seed", (-1, 2**63), "must lie in [0, 2**63)"),
]  # fmt: skip


def test_wrong_values_are_named(script):
    """A value outside its range is refused before any work with the flag, the value and the rule; no number goes
    unchecked; the ends of the ranges are taken."""
    hints = typing.get_type_hints(script.Args)  # without the rules
    numbers = {name for name, kind in hints.items() if {int, float} & {kind, *typing.get_args(kind)}}
    assert not script.own or numbers == set(" ".join(names for names, *_ in RULES).split())
    for names, values, rule in RULES:
        for name, value in itertools.product(filter(script.has_flag, names.split()), values):
            with pytest.raises(script.UsageError) as error:
                script.Args(**{name: value})
            assert str(error.value) == f"--{name.replace('_', '-')} {value} {rule}"
    for edge in (0.0, 1.0):
        script.Args(gamma=edge, gae_lambda=edge, kl_coef=edge, vf_coef=edge, missing_eos_penalty=edge)
    script.Args(num_prompts=1, num_minibatches=1, normalize_scores=0, eval_every=0, warmup_steps=0, seed=0)
    script.Args(normalize_scores=2, value_clip=None, target_kl=None, kl_target=None, seed=2**63 - 1)


OWN = dict(policy="m", prompts="p.jsonl")
SOURCE = "--policy needs one source of scores"


@pytest.mark.parametrize("flags, words", [
    (dict(num_prompts=10, num_minibatches=4), "--num-prompts 10 do not divide into --num-minibatches 4"),
    (dict(policy="m"), "--policy m and --prompts None need each other"), (dict(prompts="d.jsonl"), "--policy None and --prompts d.jsonl"),
    (OWN, SOURCE), (OWN | dict(reward="r", reward_model="x"), SOURCE), (OWN | dict(reward="r", train_reward_model="x"), SOURCE),
    *((dict([(name, "x")]), "the small world has a reward of its own") for name in ("reward", "reward_model", "train_reward_model")),
    (dict(kl_target=6.0, kl_coef=0.0), "--kl-target 6.0 needs a --kl-coef"),
    (dict(kl_target=6.0, kl_horizon=20), "--kl-horizon 20"),  # x (1 - 0.2 x 128 / 20): a negative coefficient pays for KL (B74)
    (dict(run_name="a/b"), "--run-name a/b must be the name of a folder"),
    (dict(run_name="a", resume=Path("runs/a")), "--run-name a contradicts --resume runs/a"),
    (dict(start_from=Path("b"), resume=Path("runs/a")), "--start-from b contradicts --resume runs/a"),
])  # fmt: skip
def test_wrong_combinations_are_named(script, flags, words):
    """Flags that do not go together are refused before any work."""
    with pytest.raises(script.UsageError) as error:
        script.Args(**flags)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("argv, wanted", [
    ("", "BUILT_IN"),
    ("--policy m --prompts p --reward r.py:f", dict(policy="m", prompts="p", reward="r.py:f")),
    ("--policy=m --prompts=p --reward-model=c", dict(policy="m", prompts="p", reward_model="c")),
    ("--temperature 0.7 --kl-target None --anneal-lr --num-prompts 64 --seed 3",
     dict(temperature=0.7, kl_target=None, anneal_lr=True, num_prompts=64, seed=3)),
    ("--policy m --prompts p --reward r --temperature 1.0 --value-clip None", dict(temperature=1.0, value_clip=None, anneal_lr=True)),
])  # fmt: skip
def test_flags_win_over_built_in(script, argv, wanted):
    """A flag that is given wins, also where it equals the class default; BUILT_IN is for runs without --policy."""
    wanted = script.BUILT_IN if wanted == "BUILT_IN" else wanted
    args = vars(script.command_line(argv.split()))
    assert {name: args[name] for name in wanted} == wanted
    if "policy" in wanted:
        assert args == vars(script.Args(**wanted))
    elif "--policy" not in argv:
        assert args == vars(script.Args()) | script.BUILT_IN | wanted


def test_help_explains_every_flag(script, capsys, monkeypatch):
    """--help names each flag with its text."""
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        script.command_line(["--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    source = script.path.read_text()
    (body,) = (x.body for x in ast.parse(source).body if getattr(x, "name", "") == "Args")
    fields = {a.target.id: source.splitlines()[a.lineno - 1] for a in body if isinstance(a, ast.AnnAssign)}
    told = {name: line.partition("  # ")[2] for name, line in fields.items() if "  # " in line}
    assert end.value.code == 0
    assert not script.own or set(told) == {field.name for field in dataclasses.fields(script.Args)}
    for name, words in told.items():
        assert f"--{name.replace('_', '-')}" in shown and " ".join(words.split()[:4]) in shown


@pytest.mark.parametrize("argv, words", [
    (["--num-prompts", "many"], "--num-prompts"), (["--no-such-flag"], "--no-such-flag"), (["--policy"], "--policy"),
    (["--dtype", "float16"], "'float16'"),
])  # fmt: skip
def test_wrong_words_on_the_command_line(script, capsys, argv, words):
    """An unknown flag, a value of the wrong type or none of the choices is told, with code 2."""
    with pytest.raises(SystemExit) as end:
        script.command_line(argv)
    assert end.value.code == 2 and words in "".join(capsys.readouterr())
    with pytest.raises(script.UsageError, match=r"^--gamma 2.0 must lie in \[0, 1\]$"):
        script.command_line(["--gamma", "2"])


def test_an_error_of_the_real_command(script, lab, tmp_path):
    """A fault ends in one sentence that names a flag of this script, a non-zero code and no folder."""
    flags = (
        f"--policy nobody/none --prompts {lab / 'prompts.jsonl'} --num-eval 4 --num-prompts 8 --reward r.py:f"
    )
    failed = run(script, tmp_path, *flags.split())
    assert failed.returncode == 1 and not list(tmp_path.iterdir())
    assert failed.stderr.startswith(f"{script.path.name}: ") and len(failed.stderr.splitlines()) == 1
    assert "nobody/none, which is no folder here, cannot be loaded: " in failed.stderr
    assert "--model " not in failed.stderr, "there is no such flag"


def test_import_runs_nothing(script, tmp_path):
    """Importing the script prints nothing, writes nothing and does not load W&B."""
    code = f"import runpy, sys; runpy.run_path({str(script.path)!r}, run_name='imported'); assert 'wandb' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and not list(tmp_path.iterdir())


@pytest.mark.flags("track")
def test_track_offline(script, lab, tmp_path):
    """--track logs to W&B, which needs no network or account with WANDB_MODE=offline."""
    pytest.importorskip("wandb")
    (tmp_path / "r.py").write_text(CALLS + SKILL)
    flags = f"--policy {lab / 'whole'} --prompts {lab / 'prompts.jsonl'} --num-eval 4 --total-steps 1 --num-prompts 8"
    flags += " --run-name x --max-new-tokens 6 --normalize-scores 0 --device cpu --reward r.py:f --track"
    done = run(script, tmp_path, *flags.split(), WANDB_MODE="offline", WANDB_SILENT="true")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb")) and (tmp_path / "runs/x/model").is_dir()


def test_without_wandb(refused, monkeypatch):
    """W&B is asked for in a sentence if it is not installed."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused("--track needs: pip install wandb", track=True)


ROW, FIELDS = {"prompt": " x"}, "not an object with prompt"
EMPTY = "line 1: the prompt must be a text or chat messages, not empty"


def test_a_good_run_and_what_it_leaves(script, train, capsys):
    """The folder of a run: configuration, one line of metrics a step, completions, checkpoint, model."""
    out = train(run_name="x")
    assert out["folder"] == "runs/x" and out["step"] == 2
    assert "eval/score: " in (said := capsys.readouterr().out) and "the model is in runs/x/model" in said
    assert [row["step"] for row in lines("runs/x/metrics.jsonl")] == [0, 1, 2, 2]
    assert [row["step"] for row in lines("runs/x/completions.jsonl")] == [0] * 4 + [2] * 4
    config = json.loads(Path("runs/x/config.json").read_text())
    assert config["args"]["num_prompts"] == 4 and config["versions"]["torch"] == torch.__version__
    assert len(config["sha256"]) == 64
    tokenizer, model = script.load_model("runs/x/model")
    assert script.stop_ids(tokenizer, model, None) == [tokenizer.eos_token_id]
    held_out = [row["prompt"] for row in lines("prompts.jsonl")[-4:]]
    assert [row["prompt"] for row in lines("runs/x/completions.jsonl")[:4]] == held_out


def pair(**values):
    return {
        "prompt": "<pad>",
        "chosen": "<pad>",
        "rejected": "<eos>",
    } | values  # words that the tokenizer has


@pytest.mark.parametrize("flag, rows, words", [
    ("prompts", None, "cannot read data.jsonl: "), ("prompts", [], "fewer than --num-prompts 4"),
    ("prompts", [{"prompt": f"{i}"} for i in range(6)], "3 held-out prompts and 3 others to train on"),
    ("prompts", [ROW] * 20, "4 held-out prompts and 0 others to train on"),
    ("prompts", [ROW, ROW, '{"prompt": " x'], f"data.jsonl, line 3: {FIELDS}"), ("prompts", [ROW, "", ROW], f"line 2: {FIELDS}"),
    ("prompts", [{"question": " x"}], f"line 1: {FIELDS}"), ("prompts", [[" x"]], FIELDS), ("prompts", ["7"], FIELDS),
    *(("prompts", [{"prompt": bad}], EMPTY) for bad in ("", [], 5, None, {"role": "user"})),
    ("eval_prompts", None, "cannot read data.jsonl: "), ("eval_prompts", [], "there are 0 held-out prompts"),
    ("eval_prompts", [ROW, "{"], f"line 2: {FIELDS}"),
    ("train_reward_model", None, "cannot read data.jsonl: "), ("train_reward_model", [pair()] * 19, "data.jsonl has 19 pairs: too few"),
    ("train_reward_model", [], "data.jsonl has 0 pairs: too few"),
    ("train_reward_model", [pair(), pair(chosen="<eos>")], "data.jsonl, line 2: chosen and rejected are the same"),
    ("train_reward_model", [pair(), {"prompt": "<pad>", "chosen": "<pad>"}], "line 2: not an object with chosen, rejected: it has prompt, chosen"),
    ("train_reward_model", [pair(rejected="")], "line 1: rejected must be a text"), ("train_reward_model", ["{"], "line 1: not an object"),
], ids=lambda x: json.dumps(x)[:40] if isinstance(x, list) else x)  # fmt: skip
def test_broken_files_are_named(refused, tmp_path, flag, rows, words):
    """A file that cannot be used is named with the line, before there is a folder of a run."""
    if rows is not None:
        write(tmp_path / "data.jsonl", *rows)
    refused(words, **{flag: "data.jsonl"})


@pytest.mark.parametrize("change, words", [
    (lambda x: x * 13, "tokens: with --max-new-tokens 6 that is beyond the model's 64"), (lambda x: "nosuch", "nosuch"),
    (lambda x: [{"role": "user", "content": x}], "the chat template cannot take"),
], ids=["long", "unknown", "chat"])  # fmt: skip
def test_prompts_that_do_not_fit_the_policy(refused, tmp_path, change, words):
    """Prompts beyond the context, of unknown words, or chat messages without a template, before there is a
    folder."""
    rows = lines(tmp_path / "prompts.jsonl")
    write(tmp_path / "data.jsonl", *rows[:-4], *({"prompt": change(row["prompt"])} for row in rows[-4:]))
    refused(words, prompts="data.jsonl")


@pytest.mark.parametrize("flags, words", [
    (dict(policy="gone/x/y"), "gone/x/y, which is no folder here, cannot be loaded: "), (dict(policy="cut"), "cannot be loaded: "),
    (dict(policy="endless"), "the stop ids [] are none"), (dict(stop="<pad><eos>"), "is 2 tokens of this tokenizer, not one"),
    (dict(stop="nosuch"), "the tokenizer cannot take the text"),
    (dict(reward="gone.py:f"), "--reward gone.py:f cannot be loaded: "), (dict(reward="r.py:g"), "--reward r.py:g cannot be loaded: "),
    (dict(reward="bad.py:f"), "--reward bad.py:f cannot be loaded: "), (dict(reward="exact"), "--reward exact is "),
    (dict(reward_model="gone/x/y"), "gone/x/y cannot be loaded as a classifier with one output: "),
    (dict(reward_model="two"), "two cannot be loaded as a classifier with one output: "),
    (dict(reward_model="whole"), "whole cannot be loaded as a classifier with one output: "),
    (dict(reward_model="cut"), "cut cannot be loaded as a classifier with one output: "),
], ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else "")  # fmt: skip
def test_wrong_models_and_rewards_are_named(refused, lab, tmp_path, flags, words):
    """A policy, stop token, reward or reward model that cannot be used ends in one sentence, before there is a
    folder. A model without a trained score head is no reward model: its scores would be noise."""
    (tmp_path / "bad.py").write_text("def f(:")
    if (lab / flags.get("reward_model", "none")).is_dir():
        flags = {"reward_model": str(lab / flags["reward_model"])}
    refused(words, **flags)


@pytest.mark.parametrize("body, words", [
    ("raise RuntimeError('boom')", ": RuntimeError: boom"), ("return [0.0]", "returned 1 for "),
    ("return [float('inf')] * len(rows)", "returned an infinite reward"), ("return ['good'] * len(rows)", ": ValueError: "),
    ("return None", ": TypeError: "),
])  # fmt: skip
def test_a_reward_of_its_own_that_fails(refused, tmp_path, body, words):
    """What a user's reward function does wrong is told in one sentence with its name."""
    (tmp_path / "r.py").write_text(f"def f(prompts, completions, rows):\n    {body}\n")
    if words.startswith(": "):  # what was raised, after what the function is called with
        words = f"failed with (prompts, completions, rows), each row with prompt{words}"
    refused(f"--reward r.py:f {words}", started=True)


@pytest.mark.parametrize("call", [0, 1, 2])
@pytest.mark.parametrize("value", ["None", "float('nan')"])
def test_no_completion_with_a_score(refused, tmp_path, value, call):
    """Where no completion has a score, in the normalisation, the evaluation or training, a sentence says so."""
    (tmp_path / "r.py").write_text(CALLS + f"return [{value} if call == {call} else 0.5] * len(rows)")
    refused("completions has a score: all are None or NaN", started=True)


def test_scores_that_are_all_equal_at_first(script, train, tmp_path):
    """A reward that the starting policy never earns has no deviation to divide by: the first one that is earned
    must not count a million times."""
    (tmp_path / "r.py").write_text(CALLS + "return [float(call > 1)] * len(rows)")
    out = train(run_name="x", missing_eos_penalty=0.0, kl_coef=0.0)
    assert out["charts/score"] == 1 and abs(out["charts/objective"]) < 10


def test_scores_are_normalised_once(script, train, tmp_path):
    """Mean and deviation of N responses of the starting policy, kept in the checkpoint; N = 0 leaves the scores
    as they are; evaluation shows them as they are in both."""
    body = "return [100.0 + 10 * (i % 2) for i in range(len(rows))]"
    (tmp_path / "r.py").write_text(CALLS + body)
    quiet = dict(missing_eos_penalty=0.0, kl_coef=0.0)
    out = train(run_name="x", **quiet)
    norm = parts("x")["norm"]
    assert norm["mean"] == 105 and norm["std"] == pytest.approx(5, rel=0.1)
    assert out["charts/score"] == out["eval/score"] == 105 and out["charts/objective"] == pytest.approx(0, abs=1e-4)  # fmt: skip
    assert train(normalize_scores=0, **quiet)["charts/objective"] == pytest.approx(105)


def test_responses_of_one_token(train):
    """A response may be one token long."""
    out = train(max_new_tokens=1)
    assert out["charts/response_length"] == 1 == out["eval/response_length"] and out["charts/tokens"] == 4
    assert out["losses/grad_norm"] > 0
    assert train(max_new_tokens=1, num_prompts=1, num_minibatches=1)["charts/tokens"] == 1


def test_prompts_that_a_tokenizer_closes(script, train, monkeypatch):
    """A tokenizer that ends every text with the stop token: the response goes on from the text."""
    seen, sampler = [], script.find("Sampler")
    generate = sampler.generate
    monkeypatch.setattr(sampler, "generate", lambda self, prompts, *a: [seen.extend(prompts), generate(self, prompts, *a)][1])  # fmt: skip
    train("closing")
    tokenizer = script.word_tokenizer()
    known = [[tokenizer.pad_token_id, *tokenizer(row["prompt"]).input_ids] for row in lines("prompts.jsonl")]
    assert seen and all(ids in known for ids in seen)


def test_a_policy_saved_in_bfloat16(script, train, monkeypatch):
    """Policy and value model are float32 and without dropout, whatever the checkpoint says."""
    made, classifier_of = [], script.classifier_of
    monkeypatch.setattr(script.module, "classifier_of", lambda *a: made.append(classifier_of(*a)) or made[-1])
    train("half", run_name="x")
    assert {x.dtype for x in parts("x")["model"].values()} == {torch.float32}
    (critic,) = made
    assert critic.config.attention_dropout == 0 and not critic.training


def test_reward_model_reads_the_text(script, lab, train, monkeypatch):
    """The reward model reads the texts with its own tokenizer (B73, huggingface/trl #1979 and #3595), at the last
    real token, and the order of the texts stays (B70, B82); the value model is its copy where both read the same
    tokens, else one with the policy's backbone and a head of zeros."""
    tokenizer, policy = script.load_model(str(lab / "whole"))
    made, classifier_of = [], script.classifier_of
    monkeypatch.setattr(script.module, "classifier_of", lambda *a: made.append(classifier_of(*a)) or made[-1])
    texts = [" " + " ".join(script.sentence(np.random.default_rng(i)).split()) for i in range(7)]
    prompts, ends = zip(*((text[: 5 + i], text[5 + i :]) for i, text in enumerate(texts)))
    found = {}
    for name in ("judge", "foreign"):
        args = script.Args(**OWN, reward_model=str(lab / name), batch_tokens=60)
        functions, classifier = script.scoring(args, Path("none"), policy, tokenizer, torch.device("cpu"))
        found[name] = script.score_texts(functions, prompts, ends, [{}] * 7)
        own, judge = script.load_classifier(str(lab / name))
        with torch.no_grad():
            right = [judge.score(judge.model(torch.tensor([own(text).input_ids])).last_hidden_state[:, -1]).item() for text in texts]  # fmt: skip
        assert found[name].tolist() == pytest.approx(right, abs=1e-4)
        out = train(reward_model=str(lab / name), run_name=name)
        assert out["losses/grad_norm"] > 0 and out["losses/value_grad_norm"] > 0
        same = name == "judge"
        assert (classifier is not None) == same == bool(made[-1].score.weight.abs().sum() > 1)
        start = judge if same else policy
        wanted = start.base_model.layers[0].mlp.up_proj.weight
        assert_near = (made[-1].base_model.layers[0].mlp.up_proj.weight - wanted).abs().max()
        assert assert_near < 1e-3 and all(p.requires_grad for p in made[-1].parameters())
    assert (found["judge"] - found["foreign"]).abs().min() > 1e-3


def test_reward_model_reads_conversations(script, lab):
    """A template of the reward model is used, without another start or end; a prompt whose last message is the
    assistant's is continued, as `encode` has it; a stop token within the prompt is nothing special (B71,
    huggingface/transformers #35352)."""
    tokenizer, judge = script.load_classifier(str(lab / "judge"))
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    text = script.sentence(np.random.default_rng(0))
    one, two, three = (" " + " ".join(text.split()[a:b]) for a, b in ((0, 2), (2, 4), (4, None)))
    user, assistant = {"role": "user", "content": one}, {"role": "assistant", "content": two}
    prompts = [one, [user], [user, assistant, user], [user, assistant]]
    shown = [f"{one}<eos>{three}<eos>"] * 2
    shown += [f"{one}<eos>{two}<eos>{one}<eos>{three}<eos>", f"{one}<eos>{two}{three}<eos>"]
    with torch.no_grad():
        scores = script.read_texts(judge, tokenizer, prompts, [three] * 4, 50)
        right = [script.scalars(judge, {"input_ids": torch.tensor([tokenizer(x).input_ids])})[0, -1] for x in shown]  # fmt: skip
    assert scores.tolist() == pytest.approx([x.item() for x in right], abs=1e-4)
    assert prompts[3] == [user, {"role": "assistant", "content": two}]


def test_train_reward_model(script, lab, train, monkeypatch, capsys):
    """--train-reward-model learns the pairs, saves the reward model, reports its held-out accuracy and goes on;
    a resumed run reads it and does not train it again."""
    flags = dict(train_reward_model="pairs.jsonl", reward_epochs=8, reward_learning_rate=3e-3)
    out = train(run_name="x", **flags, save_every=1)
    first = lines("runs/x/metrics.jsonl")[0]
    assert first["reward_model/accuracy"] == 1 and first["reward_model/pairs"] == 36
    assert "reward_model/accuracy 1" in capsys.readouterr().out and out["step"] == 2
    tokenizer, judge = script.load_classifier("runs/x/reward_model")
    pairs = lines("pairs.jsonl")
    read = lambda side: script.read_texts(judge, tokenizer, [x["prompt"] for x in pairs], [x[side] for x in pairs], 999)  # fmt: skip
    with torch.no_grad():
        assert (read("chosen") > read("rejected")).all()
    state = torch.load("runs/x/checkpoint.pt", weights_only=True)
    torch.save(state | {"step": 1}, "runs/x/checkpoint.pt")
    monkeypatch.setattr(script.module, "fit_reward_model", lambda *a: pytest.fail("trained again"))
    before = Path("runs/x/reward_model/model.safetensors").read_bytes()
    assert train(resume="runs/x")["step"] == 2
    assert before == Path("runs/x/reward_model/model.safetensors").read_bytes()


def test_a_reward_model_is_trained_on(script, lab, train, monkeypatch):
    """With --reward-model beside it, --train-reward-model starts from that model and not from the policy."""
    begun, fit = [], script.fit_reward_model
    monkeypatch.setattr(script.module, "fit_reward_model", lambda model, *a: [begun.append(model.score.weight.detach().clone()), fit(model, *a)][1])  # fmt: skip
    train(train_reward_model="pairs.jsonl", reward_model=str(lab / "judge"))
    assert torch.equal(begun[0], script.load_classifier(str(lab / "judge"))[1].score.weight)


@pytest.mark.parametrize("field", ["prompt", "chosen", "rejected"])
def test_pairs_of_chat_messages_without_a_template(refused, tmp_path, field):
    """What the tokenizer cannot read is told in a sentence, before there is a folder."""
    rows = lines(tmp_path / "pairs.jsonl")
    write(
        tmp_path / "data.jsonl", *(row | {field: [{"role": "user", "content": row[field]}]} for row in rows)
    )
    refused("", train_reward_model="data.jsonl")


def test_pairs_of_unknown_words(refused, tmp_path):
    """The same for words that the tokenizer does not have."""
    rows = lines(tmp_path / "pairs.jsonl")
    write(tmp_path / "data.jsonl", *rows[:-1], rows[-1] | {"rejected": " nosuch ."})
    refused("the tokenizer cannot take the text", train_reward_model="data.jsonl")


@pytest.mark.parametrize("every, step", [(0, 3), (2, 2)])
def test_a_failure_names_the_last_good_checkpoint(script, train, refused, tmp_path, every, step):
    """A failure in the middle of a run, in training or evaluation, names a checkpoint that continues the run; the step
    that is evaluated is saved before."""
    fault = f"if call == 4: raise OSError('the disk is full')\n    {SKILL}"
    (tmp_path / "r.py").write_text(CALLS + fault)
    words = "the disk is full"
    said = refused(words, started=True, run_name="x", total_steps=4, save_every=1, eval_every=every)
    assert said.startswith(
        f"stopped at step {step}: --reward r.py:f failed with (prompts, completions, rows)"
    )
    assert said.endswith("; last good checkpoint: runs/x/checkpoint.pt, step 2")
    (tmp_path / "r.py").write_text(CALLS + SKILL)
    assert train(resume="runs/x")["step"] == 4
    (tmp_path / "r.py").write_text(CALLS + fault.replace("== 4", "== 2"))
    said = refused("; last good checkpoint: none yet", started=True)
    assert said.startswith("stopped at step 1: --reward r.py:f failed with (prompts, ")


def test_a_learning_rate_that_is_far_too_large(refused):
    """Weights that are not numbers any more end the run in a sentence."""
    said = refused("stopped at step 2: ", started=True, learning_rate=1e30, num_minibatches=1, warmup_steps=0, save_every=1)  # fmt: skip
    assert "not finite" in said or "not numbers" in said
    assert "last good checkpoint: runs/" in said


def test_resume_and_run_name_refuse_what_does_not_fit(script, lab, train, refused, tmp_path):
    """Missing, foreign, cut, finished or changed runs, and flags that contradict them, are named; nothing is
    overwritten."""
    train(run_name="done", save_every=1, clip_coef=0.3)
    good = tmp_path / "runs/done/checkpoint.pt"
    whole, state = good.read_bytes(), torch.load(good, weights_only=True)
    half = {**state, "step": 1}
    edits = dict(foreign={**state, "script": "grpo_rlhf"}, part=half, other=[1])
    weights = {name: x[:1] for name, x in state["parts"]["model"].items()}
    edits["swapped"] = half | {"parts": state["parts"] | {"model": weights}}
    for name, content in edits.items():
        shutil.copytree(tmp_path / "runs/done", tmp_path / "runs" / name)
        torch.save(content, tmp_path / "runs" / name / "checkpoint.pt")
    (tmp_path / "runs/cut").mkdir()
    (tmp_path / "runs/cut/checkpoint.pt").write_bytes(whole[: len(whole) // 2])
    for name, words in dict(
        none="there is no checkpoint runs/none", done="runs/done is finished, at step 2: a larger total goes on",
        foreign=f"is a checkpoint of grpo_rlhf.py, not of {script.SCRIPT}.py", other="is not a whole checkpoint", cut="is not a whole checkpoint",
        swapped="runs/swapped/checkpoint.pt does not fit, in its part model",
    ).items():  # fmt: skip
        refused(words, started=True, resume=f"runs/{name}")
    part = Path("runs/part")
    refused("--kl-coef 0.3 differs from the 0.05 of the run", started=True, resume=part, kl_coef=0.3)
    refused("--gamma 0.5 differs from the 1.0", started=True, resume=part, gamma=0.5)
    refused(
        "--clip-coef 0.2 differs from the 0.3", started=True, resume=part, clip_coef=0.2
    )  # the script's default
    refused("--total-steps 1 differs from the 2", started=True, resume=part, total_steps=1)
    refused("exists: choose another --run-name, or --resume runs/done", started=True, run_name="done")
    assert good.read_bytes() == whole
    for name in ("metrics.jsonl", "completions.jsonl"):  # a crash leaves more lines, the last in part
        with open(part / name, "a") as file:
            file.write('{"step": 2, "losses/grad_norm": 1.0}\n{"step": 3, "lo')
    out = train(resume=part, clip_coef=0.3, device="cpu")  # values may be repeated
    assert out["step"] == 2 and out["folder"] == "runs/part"
    assert [row["step"] for row in lines(part / "metrics.jsonl")] == [0, 1, 2, 2]


def test_resume_gives_the_numbers_of_one_run(script, train, tmp_path, monkeypatch):
    """A run that was stopped goes on with the same prompts, tokens, shuffling, coefficient and rates."""
    flags = dict(total_steps=4, num_minibatches=2, update_epochs=2, kl_target=0.1, kl_horizon=20, learning_rate=1e-3)  # fmt: skip
    train(run_name="whole", **flags, save_every=2, eval_every=0)
    shutil.copytree("runs/whole", "runs/cut")
    (tmp_path / "r.py").write_text(CALLS + f"if call == 5: raise OSError('gone')\n    {SKILL}")
    with pytest.raises(script.UsageError, match="last good checkpoint: runs/again/checkpoint.pt, step 2"):
        train(run_name="again", **flags, save_every=2, eval_every=0)
    (tmp_path / "r.py").write_text(CALLS + SKILL)
    train(resume="runs/again")
    whole, again = steps("whole"), steps("again")
    assert whole == again and len({row["charts/kl_coef"] for row in whole[1:]}) > 1
    coef, right = 0.05, []
    for row in whole[1:]:
        right.append(coef)
        coef *= 1 + max(-0.2, min(0.2, row["losses/kl"] / 0.1 - 1)) * 4 / 20
    assert [row["charts/kl_coef"] for row in whole[1:]] == pytest.approx(right)
    assert [row["charts/learning_rate"] for row in whole[1:]] == pytest.approx([2e-4, 3e-4, 3e-4, 2e-4])


@pytest.mark.parametrize("resume", ["runs/x", "runs/x/checkpoint.pt", "x"])
def test_a_finished_run_can_be_trained_longer(script, train, capsys, resume):
    """--resume with a larger total goes on where the run ended, at the rates that the longer schedule has there, and
    says so; nothing is measured or trained again that comes before PPO."""
    flags = dict(kl_target=0.1, kl_horizon=20, learning_rate=1e-3, warmup_steps=1)
    train(run_name="x", **flags)
    before = parts("x")
    train(run_name="y", **flags, total_steps=4)
    out = train(resume=resume, total_steps=4)
    assert "2 steps become 4: schedules are of the longer run" in capsys.readouterr().out and out["step"] == 4
    x, y = steps("x"), steps("y")
    rate = "charts/learning_rate"
    assert [row["step"] for row in x] == [0, 1, 2, 3, 4] and x[0] == y[0]
    assert [row[rate] for row in x[3:]] == [row[rate] for row in y[3:]] and x[2][rate] == pytest.approx(5e-4)
    assert parts("x")["norm"] == before["norm"] and parts("x")["kl_coef"] != before["kl_coef"]
    assert x[3]["charts/kl_coef"] == before["kl_coef"] and "eval/score" in x[4]
    prompts = [row["prompt"] for row in lines("runs/x/completions.jsonl")]
    assert len(prompts) == 3 * 4 and Path("runs/x/model").is_dir()


def test_a_new_run_starts_from_trained_weights(script, train, refused, lab, capsys):
    """--start-from takes the weights of policy and value model and the score normalisation of a checkpoint, and nothing
    else: optimiser, coefficient, steps and random numbers are those of a new run, and the KL is still to --policy."""
    train(run_name="old", learning_rate=1e-2, warmup_steps=0, kl_target=0.1, kl_horizon=20, total_steps=4)
    still = dict(learning_rate=1e-12, value_learning_rate=1e-12)
    for start_from in ("old", "runs/old", "runs/old/checkpoint.pt"):
        new = train(run_name=f"new-{start_from.count('/')}", start_from=Path(start_from), **still, seed=2)
    train(run_name="other", **still, seed=2)
    old, found, other = parts("old"), parts("new-0"), parts("other")
    for name, weight in found["model"].items():
        torch.testing.assert_close(weight, old["model"][name], atol=1e-9, rtol=0)
    assert found["norm"] == old["norm"] != other["norm"]
    assert found["kl_coef"] == 0.05 != old["kl_coef"] and torch.equal(found["shuffle"], other["shuffle"])
    assert {float(x["step"]) for x in found["optimizer"]["state"].values()} == {4.0}
    first = steps("new-0")[0]
    assert (
        first["step"] == 0 and new["step"] == 2 and first["eval/kl"] > 0.1 > abs(steps("other")[0]["eval/kl"])
    )
    assert steps("new-0")[1]["losses/kl"] != 0 and steps("new-0") == steps("new-1") == steps("new-2")
    refused("there is no checkpoint nowhere", started=True, start_from=Path("nowhere"))
    refused("does not fit, in its part model", started=True, start_from=Path("old"), lora_rank=2)


def test_a_folder_that_cannot_be_made(refused, tmp_path):
    """runs/ that is a file is told."""
    (tmp_path / "runs").write_text("a file")
    refused("cannot write runs/", started=True)


def test_prompts_are_split(script, train, tmp_path):
    """No prompt is both held out and trained on, duplicates included; a file of its own takes their place."""
    rows = [{"prompt": f" {i % 30}", "extra": i} for i in range(50)]
    write(tmp_path / "d.jsonl", *rows)
    write(tmp_path / "e.jsonl", *rows[5:9])
    common = dict(policy="m", prompts="d.jsonl", reward="r", num_prompts=4, num_minibatches=4)
    rest, held_out = script.prompts_of(script.Args(**common, num_eval=5), None)
    assert held_out == rows[-5:] and rest == [row for row in rows if int(row["prompt"]) not in range(15, 20)]
    rest, held_out = script.prompts_of(script.Args(**common, num_eval=3, eval_prompts="e.jsonl"), None)
    assert held_out == rows[5:8] and rest == [row for row in rows if int(row["prompt"]) not in (5, 6, 7)]


def test_the_small_world_runs(script, tmp_path, monkeypatch):
    """Without --policy all is made here and kept: start, reward model, policy; its folder is named after it."""
    monkeypatch.chdir(tmp_path)
    split, taught = script.prompts_of, []
    draw, rng = script.sentence, np.random.default_rng(0)
    few = [draw(rng) for _ in range(300)]
    monkeypatch.setattr(script.module, "sentence", lambda rng: few[rng.integers(300)])
    rows, held_out = split(script.Args(num_eval=8, num_prompts=4, num_minibatches=4), rng)
    assert len(held_out) == 8 and all(script.is_held_out(row["prompt"]) for row in held_out)
    assert rows and not any(script.is_held_out(row["prompt"]) for row in rows)
    assert all(len(row["prompt"].split()) == script.PROMPT_WORDS for row in rows)
    monkeypatch.setattr(script.module, "prompts_of", lambda *a: (rows, held_out))
    monkeypatch.setattr(script.module, "supervised_finetune", lambda *a: taught.append(a))
    monkeypatch.setattr(script.module, "hidden_preference", lambda p, c, r: [float(len(x) % 3) for x in c])
    sizes = dict(num_prompts=4, num_minibatches=2, total_steps=1, max_new_tokens=6, num_pairs=40, normalize_scores=8)  # fmt: skip
    out = script.main(script.Args(**sizes, device="cpu"))
    folder = Path(out["folder"])
    assert len(taught) == 1 and out["folder"].startswith(f"runs/world__{script.SCRIPT}__1__")
    first = lines(folder / "metrics.jsonl")[0]
    assert {"reward_model/accuracy", "reward_model/pairs", "reward_model/noiseless"} <= set(first)
    assert "eval/true_preference" in first and "eval/true_preference" in out
    for name in ("start", "model", "reward_model"):
        assert (folder / name / "tokenizer.json").is_file() and (
            folder / name / "model.safetensors"
        ).is_file()
