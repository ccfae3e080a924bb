"""grpo_rlhf.py as a newcomer meets it: the command line, presets, prompts and rewards, files that are broken."""

import ast
import collections
import itertools
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.setting("grpo_rlhf")
INF, NAN = float("inf"), float("nan")
TEMPLATE = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}={% endif %}"
PAPERS = {  # what each --preset must set: arXiv 2402.03300, 2402.14740, 2503.20783, 2503.14476, 2507.18071, 2506.13585
    "grpo": dict(clip_high=0.2, aggregation="sequence", kl_coef=0.04, kl_form="k3"),
    "rloo": dict(advantage="rloo", surrogate="reinforce", aggregation="constant", kl_coef=0.05, kl_form="reward",
                 num_minibatches=1),
    "drgrpo": dict(advantage="drgrpo", clip_high=0.2, aggregation="constant"),
    "dapo": dict(sampling_rounds=4, overlong_buffer=0.2),
    "gspo": dict(surrogate="gspo", clip_low=3e-4, clip_high=4e-4, aggregation="sequence"),
    "cispo": dict(surrogate="cispo"),
}  # fmt: skip


def run(script, cwd, *flags, **env):
    command = [sys.executable, str(script.path), *map(str, flags)]
    env = {**os.environ, "COLUMNS": "200", "HF_HUB_OFFLINE": "1", **env}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=env, timeout=300)


def write(path, *rows):
    """A .jsonl file; text goes in as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def edit(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture(scope="session")
def lab(script, tmp_path_factory):
    """Folders of a tiny model: whole, and damaged in one way each; and rows of the built-in task."""
    folder = tmp_path_factory.mktemp("lab")
    torch.manual_seed(0)
    tokenizer = script.digit_tokenizer()
    model = script.tiny_model(tokenizer)
    for name in ("whole", "cut", "shape", "chat", "unset", "endless"):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    weights = folder / "cut/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    edit(folder / "shape/config.json", hidden_size=64)
    edit(folder / "unset/config.json", model_type="nosuch")
    (folder / "chat/chat_template.jinja").write_text(TEMPLATE)
    for file in ("config.json", "generation_config.json"):
        edit(folder / "endless" / file, eos_token_id=None)
    edit(folder / "endless/tokenizer_config.json", eos_token=None)
    (folder / "empty").mkdir()
    model.resize_token_embeddings(10)
    model.save_pretrained(folder / "small")
    model = script.tiny_model(tokenizer)
    model.lm_head.weight.data.fill_(NAN)
    model.save_pretrained(folder / "nan")
    for name in ("small", "nan"):
        tokenizer.save_pretrained(folder / name)
    write(folder / "rows.jsonl", *script.sort_rows(40, np.random.default_rng(0)))
    return folder


@pytest.fixture
def train(script, lab, tmp_path, monkeypatch):
    """Trains the tiny model in this process and an empty folder, with two steps and without a KL term."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(lab / "rows.jsonl", tmp_path)
    quick = dict(
        dataset="rows.jsonl", num_eval=4, total_steps=2, num_prompts=4, group_size=2, max_new_tokens=8
    )
    quick |= dict(eval_samples=0, learning_rate=1e-3, device="cpu")

    def train(model="whole", **flags):
        if "resume" in flags:
            return script.main(script.command_line(script.words(**flags)))
        return script.main(script.Args(**quick | {"model": str(lab / model)} | flags))

    return train


@pytest.fixture
def refused(script, train, tmp_path):
    """Trains, expects one sentence with these words, and no folder of a run unless `started`."""

    def refused(words, started=False, **flags):
        with pytest.raises(script.UsageError) as error:
            train(**flags)
        assert words in str(error.value) and "\n" not in str(error.value)
        assert started or not (tmp_path / "runs").exists()

    return refused


RULES = [  # flags, wrong values, what is said
    ("num_eval total_steps num_prompts max_new_tokens sampling_rounds update_epochs num_minibatches save_every batch_tokens",
     (0, -5), "must be at least 1"),
    ("group_size", (1, 0), "must be at least 2: a group of one has no baseline"),
    ("temperature learning_rate max_grad_norm importance_cap cispo_max", (0.0, -1.0, INF, NAN), "must be positive and finite"),
    ("clip_low overlong_buffer vllm_memory", (-0.1, 2.0, INF, NAN), "must lie in [0, 1]"),
    ("clip_high kl_coef", (-0.1, INF, NAN), "must not be negative"),
    ("lora_rank row_tokens eval_every eval_samples warmup_steps", (-1,), "must not be negative"),
    ("seed", (-1, 2**63), "must lie in [0, 2**63)"),
]  # fmt: skip


def test_wrong_values_are_named(script):
    """A value outside its range is refused before any work with the flag, the value and the rule; no number goes
    unchecked; the ends of the ranges are taken."""
    numbers = {name for name, value in vars(script.Args()).items() if type(value) in (int, float)}
    assert not script.own or numbers == set(" ".join(names for names, *_ in RULES).split())
    for names, values, rule in RULES:
        for name, value in itertools.product(filter(script.has_flag, names.split()), values):
            with pytest.raises(script.UsageError) as error:
                script.Args(**{name: value})
            assert str(error.value) == f"--{name.replace('_', '-')} {value} {rule}"
    for edge in (0.0, 1.0):
        script.Args(clip_low=edge, overlong_buffer=edge, kl_coef=edge, clip_high=3 * edge)
    script.Args(
        num_prompts=1, group_size=2, row_tokens=0, eval_every=0, eval_samples=0, warmup_steps=0, seed=0
    )


@pytest.mark.parametrize("flags, words", [
    (dict(num_prompts=10, num_minibatches=4), "--num-prompts 10 do not divide into --num-minibatches 4"),
    (dict(model="m"), "--model m and --dataset None need each other"),
    (dict(dataset="d.jsonl"), "--model None and --dataset d.jsonl need each other"),
    (dict(surrogate="reinforce", update_epochs=2), "--surrogate reinforce has no ratio"),
    (dict(surrogate="reinforce", num_minibatches=2), "--surrogate reinforce has no ratio"),
    (dict(run_name="a/b"), "--run-name a/b must be the name of a folder"),
    (dict(run_name="a", resume=Path("runs/a")), "--run-name a contradicts --resume runs/a"),
    (dict(start_from=Path("b"), resume=Path("runs/a")), "--start-from b contradicts --resume runs/a"),
])  # fmt: skip
def test_wrong_combinations_are_named(script, flags, words):
    """Flags that do not go together are refused before any work."""
    with pytest.raises(script.UsageError) as error:
        script.Args(**flags)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.flags("preset")
@pytest.mark.parametrize("name", PAPERS)
def test_preset_sets_what_the_paper_had(script, name):
    """--preset sets these flags and no other, over the built-in task's settings if there is no --model."""
    own = dict(model="m", dataset="d.jsonl")
    wanted = vars(script.Args(**own)) | PAPERS[name] | {"preset": name}
    assert vars(script.command_line(["--preset", name, "--model", "m", "--dataset", "d.jsonl"])) == wanted
    wanted = vars(script.Args()) | script.BUILT_IN | PAPERS[name] | {"preset": name}
    assert vars(script.command_line(["--preset", name])) == wanted


@pytest.mark.parametrize(
    "argv, wanted",
    [
        ("", "BUILT_IN"),
        ("--model m --dataset d", dict(model="m", dataset="d")),
        ("--preset gspo --clip-high 0.28 --model m --dataset d", dict(clip_high=0.28, clip_low=3e-4)),
        ("--preset grpo --kl-coef 0 --aggregation token", dict(kl_coef=0.0, aggregation="token", clip_high=0.2)),
        ("--preset dapo --sampling-rounds 1 --overlong-buffer 0.0", dict(sampling_rounds=1, overlong_buffer=0.0)),
        ("--num-prompts 16 --no-anneal-lr --eval-every 20 --learning-rate 1e-6",
         dict(num_prompts=16, anneal_lr=False, eval_every=20, learning_rate=1e-6, max_new_tokens=8)),
        ("--num-minibatches 32", dict(num_prompts=32, num_minibatches=32)),  # 32 prompts are the built-in task's
    ],
)  # fmt: skip
def test_flags_win_over_preset_and_built_in(script, argv, wanted):
    """A flag that is given wins, also where it equals the class default; BUILT_IN is for runs without --model."""
    wanted = script.BUILT_IN if wanted == "BUILT_IN" else wanted
    args = vars(script.command_line(argv.split()))
    assert {name: args[name] for name in wanted} == wanted
    if argv.startswith("--model"):
        assert args == vars(script.Args(**wanted))


def test_help_explains_every_flag(script, capsys, monkeypatch):
    """--help names each flag with its text."""
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        script.command_line(["--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    source = script.path.read_text()
    (body,) = (x.body for x in ast.parse(source).body if getattr(x, "name", "") == "Args")
    told = {
        x.target.id: source.splitlines()[x.end_lineno - 1].partition("  # ")[2]
        for x in body
        if isinstance(x, ast.AnnAssign)
    }
    assert end.value.code == 0 and (
        not script.own or set(told) == set(vars(script.Args())) and all(told.values())
    )
    for name, words in told.items():
        assert f"--{name.replace('_', '-')}" in shown and " ".join(words.split()[:4]) in shown


@pytest.mark.parametrize("argv, words", [
    (["--num-prompts", "many"], "--num-prompts"), (["--preset", "ppo"], "'ppo'"), (["--no-such-flag"], "--no-such-flag"),
    (["--group-size"], "--group-size"), (["--advantage", "gae"], "'gae'"),
])  # fmt: skip
def test_wrong_words_on_the_command_line(script, capsys, argv, words):
    """An unknown flag, a value of the wrong type or none of the choices is told, with code 2."""
    with pytest.raises(SystemExit) as end:
        script.command_line(argv)
    assert end.value.code == 2 and words in "".join(capsys.readouterr())


def test_a_value_outside_its_range_on_the_command_line(script):
    """What is of the right type and out of range is told in the script's own sentence, without a box around it."""
    with pytest.raises(script.UsageError, match="^--clip-low 2.0 must lie in"):
        script.command_line(["--clip-low", "2"])


def test_errors_of_the_real_command(script, lab, tmp_path):
    """Faults end in one sentence, a non-zero code, no traceback and no folder."""
    for flags, words in (
        ("--temperature 0", "--temperature 0.0 must be positive and finite"),
        (f"--model nobody/none --dataset {lab / 'rows.jsonl'} --num-eval 4",
         f"{script.SCRIPT}.py: nobody/none, which is no folder here, cannot be loaded: "),
    ):  # fmt: skip
        failed = run(script, tmp_path, *flags.split())
        assert failed.returncode != 0 and words in failed.stderr + failed.stdout
        assert "Traceback" not in failed.stderr and not list(tmp_path.iterdir())


def test_every_kind_of_fault_ends_in_a_sentence(script, lab, train, monkeypatch, tmp_path):
    """A file that is none, a model of no numbers and a wrong reward, run as a command in this process."""
    train(run_name="x", save_every=1)
    state = torch.load("runs/x/checkpoint.pt", weights_only=True)
    torch.save({**state, "step": 1}, "runs/x/checkpoint.pt")
    Path("runs/x/completions.jsonl").unlink()
    Path("runs/x/completions.jsonl").mkdir()
    task = "--dataset rows.jsonl --num-eval 4 --num-prompts 4 --max-new-tokens 8 --device cpu"
    for flags, words in (
        ("--resume runs/x", "completions.jsonl"),
        (f"--model {lab / 'nan'} {task}", "the model's logits are not numbers"),
        (f"--model {lab / 'whole'} {task} --reward no", "--reward no is neither"),
    ):
        monkeypatch.setattr(sys, "argv", ["grpo_rlhf.py", *flags.split()])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(script.path), run_name="__main__")
        assert str(end.value).startswith(f"{script.SCRIPT}.py: ") and words in str(end.value)


def test_import_runs_nothing(script, tmp_path):
    """Importing a script prints nothing, writes nothing and does not load W&B."""
    code = f"import runpy, sys; runpy.run_path({str(script.path)!r}, run_name='imported'); assert 'wandb' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and not list(tmp_path.iterdir())


@pytest.mark.flags("track")
def test_track_offline(script, lab, tmp_path):
    """--track logs to W&B, which needs no network or account with WANDB_MODE=offline."""
    pytest.importorskip("wandb")
    flags = f"--model {lab / 'whole'} --dataset {lab / 'rows.jsonl'} --num-eval 4 --total-steps 1 --num-prompts 4 --run-name x"
    flags = [*flags.split(), "--max-new-tokens", 8, "--device", "cpu", "--track"]
    done = run(script, tmp_path, *flags, WANDB_MODE="offline", WANDB_SILENT="true")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb")) and (tmp_path / "runs/x/model").is_dir()


def test_without_wandb(train, refused, monkeypatch):
    """W&B is imported for --track only, and is asked for in a sentence if it is not installed."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    train(run_name="x")
    refused("--track needs", started=True, track=True)


ROW = {"prompt": "1=", "answer": 1}
FORM = "not an object with prompt, answer"
EMPTY = "line 1: the prompt must be a text or chat messages, not empty"


def twenty(prompt):
    return [{"prompt": prompt(i), "answer": 1} for i in range(20)]


@pytest.mark.parametrize("rows, words", [
    (None, "cannot read data.jsonl: "), ([], "fewer than --num-prompts 4"),
    (twenty("{}=".format)[:6], "3 held-out prompts and 3 others to train on"),
    ([ROW] * 20, "4 held-out prompts and 0 others to train on"),
    ([ROW, ROW, '{"prompt": "1=", "ans'], f"data.jsonl, line 3: {FORM}"), ([ROW, "", ROW], f"data.jsonl, line 2: {FORM}"),
    ([{"prompt": "1="}], f"line 1: {FORM}"), ([{"answer": 1}], f"line 1: {FORM}"), ([["1=", 1]], FORM), (["7"], FORM),
    *(([{"prompt": bad, "answer": 1}], EMPTY) for bad in ("", [], 5, None, {"role": "user"})),
    (twenty("{:057d}".format), "has 57 tokens: with --max-new-tokens 8 that is beyond the model's 64"),
    (twenty("{} words".format), "words"),  # no token for letters
    (twenty(lambda i: [{"role": "user", "content": f"{i}"}]), "the chat template cannot take"),
    (twenty(lambda i: [f"{i}"]), "the chat template cannot take"),
], ids=lambda x: json.dumps(x)[:40] if isinstance(x, list) else "")  # fmt: skip
def test_broken_datasets_are_named(refused, tmp_path, rows, words):
    """A data set that cannot be used is named with the line, before there is a folder of a run."""
    if rows is not None:
        write(tmp_path / "data.jsonl", *rows)
    refused(words, dataset="data.jsonl")


@pytest.mark.parametrize("flags, words", [
    (dict(model="gone/x/y"), "gone/x/y, which is no folder here, cannot be loaded: "), (dict(model="empty"), "cannot be loaded: "),
    (dict(model="cut"), "cannot be loaded: "), (dict(model="shape"), "cannot be loaded: "), (dict(model="unset"), "cannot be loaded: "),
    (dict(model="endless"), "the stop ids [] are none"), (dict(model="small"), ", the model has 10 tokens"),
    (dict(model="small", stop="9"), "the stop ids [1, 12] are none, or not among the model's 10 tokens"),
    (dict(stop="12"), "--stop '12' is 2 tokens"), (dict(stop=""), "--stop '' is 0 tokens"), (dict(stop="x"), "the tokenizer cannot take the text 'x'"),
    (dict(eval_dataset="none.jsonl"), "cannot read none.jsonl"), (dict(seed=2**64), "--seed 18446744073709551616"),
    (dict(reward="nosuch"), "--reward nosuch is neither FILE.py:FUNCTION nor one of ['exact', 'number', 'format', 'reasoning_gym']"),
    (dict(reward="exact+"), "--reward  is neither"), (dict(reward="gone.py:f"), "--reward gone.py:f cannot be loaded: "),
    (dict(reward="r.py:f"), "--reward r.py:f cannot be loaded: "), (dict(reward="bad.py:f"), "--reward bad.py:f cannot be loaded: "),
    (dict(reward="rows.jsonl:f"), "--reward rows.jsonl:f cannot be loaded: "),
], ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else "")  # fmt: skip
def test_wrong_models_and_files_are_named(script, refused, tmp_path, flags, words):
    """A model, stop token or reward that cannot be used ends in one sentence, before there is a folder."""
    (tmp_path / "r.py").write_text("def g(prompts, completions, rows): return [0.0] * len(rows)")
    (tmp_path / "bad.py").write_text("def f(:")
    refused(words if script.own else words.partition("'exact'")[0], **flags)  # a copy may have more rewards


def test_reasoning_gym(script, refused):
    """reasoning_gym:NAME gives rows that its own verifier scores; an unknown name is told."""
    pytest.importorskip("reasoning_gym")
    refused("--dataset reasoning_gym:unknown_name: ", dataset="reasoning_gym:unknown_name")
    rows = script.load_rows("reasoning_gym:chain_sum", 12, 3)
    other = script.load_rows("reasoning_gym:chain_sum", 12, 4)
    assert len({row["prompt"] for row in rows}) == 12 and rows != other
    score = lambda texts: script.score_texts(script.load_rewards("reasoning_gym"), [], texts, rows)
    assert (score([f" {row['answer']}\n" for row in rows]) == 1).all() and (score(["no"] * 12) < 1).all()


@pytest.mark.parametrize("body, words", [
    ("raise RuntimeError('boom')", ": RuntimeError: boom (r.py:2)"), ("return [0.0]", "returned 1 for 4 completions"),
    ("return [float('inf')] * len(rows)", "returned an infinite reward"), ("return [-1e39] * len(rows)", "returned an infinite reward"),
    ("return [None] * len(rows)", "scored none of 4 held-out completions"), ("return ['good'] * len(rows)", ": ValueError: "),
    ("return None", ": TypeError: "),
])  # fmt: skip
def test_a_reward_of_its_own_that_fails(refused, tmp_path, body, words):
    """What a user's reward function does wrong is told in one sentence with its name."""
    (tmp_path / "r.py").write_text(f"def f(prompts, completions, rows):\n    {body}\n")
    if words.startswith(": "):  # what was raised, after what the function is called with
        words = f"failed with (prompts, completions, rows), each row with answer, prompt{words}"
    refused(f"--reward r.py:f {words}", started=True, reward="r.py:f")


CALLS = "import itertools\ncalls = itertools.count()\ndef f(prompts, completions, rows):\n    call = next(calls)\n    "
SKILL = "return [float(len(c) % 2) for c in completions]\n"


def test_single_rewards_of_none_go_on(train, tmp_path):
    """None and NaN are left out and counted; all the rest is learnt from."""
    body = "return [None, float('nan')] + [i / 7 for i in range(len(rows) - 2)]"
    (tmp_path / "r.py").write_text(CALLS + body)
    out = train(reward="r.py:f")
    assert out["charts/unscored"] == 2 / 8 and out["charts/reward"] == pytest.approx(15 / 42)
    assert out["losses/grad_norm"] > 0


def test_one_unscorable_held_out_row_goes_on(train, tmp_path):
    """Also where it stands alone in the last of the parts that the held-out rows are cut into."""
    (tmp_path / "r.py").write_text(CALLS + "return [None] if len(rows) == 1 else [0.0] * len(rows)")
    assert train(reward="r.py:f", num_eval=9)["eval/greedy"] == 0


@pytest.mark.parametrize("every, last", [(0, 2), (2, 2)])
def test_a_failure_names_the_last_good_checkpoint(script, train, refused, tmp_path, every, last):
    """A failure in the middle of a run, in training or evaluation, names a checkpoint that continues the run; the
    step that an evaluation follows is saved before it."""
    fault = f"if call == 3: raise OSError('the disk is full')\n    {SKILL}"
    (tmp_path / "r.py").write_text(CALLS + fault)
    words = "--reward r.py:f failed with (prompts, completions, rows), each row with answer, prompt: OSError: the disk is full (r.py:5); last good checkpoint: "
    words = f"stopped at step {2 if every else 3}: {words}runs/x/checkpoint.pt, step {last}"
    refused(words, started=True, reward="r.py:f", run_name="x", total_steps=4, save_every=1, eval_every=every)
    assert script.load_checkpoint(Path("runs/x/checkpoint.pt"))["step"] == last
    (tmp_path / "r.py").write_text(CALLS + SKILL)
    assert train(resume=Path("runs/x"))["step"] == 4
    (tmp_path / "r.py").write_text(CALLS + fault.replace("== 3", "== 1"))
    refused("stopped at step 1: --reward r.py:f failed with (prompts, completions, rows), each row with answer, prompt: OSError: the disk is full (r.py:5); last good checkpoint: none yet",
            started=True, reward="r.py:f")  # fmt: skip


def test_kill_and_resume(script, train, tmp_path, capsys):
    """kill ends the run after its step and says how to go on; doing so gives the same numbers as one run."""
    (tmp_path / "r.py").write_text(CALLS + SKILL)
    flags = dict(reward="r.py:f", total_steps=4, num_minibatches=2, update_epochs=2, kl_coef=0.1, anneal_lr=True)  # fmt: skip
    train(run_name="whole", **flags)
    killed = f"import os\n{CALLS}if call == 2: os.kill(os.getpid(), {int(signal.SIGTERM)})\n    {SKILL}"
    (tmp_path / "r.py").write_text(killed)
    handlers = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(SystemExit) as end:
        train(run_name="cut", **flags)
    assert handlers == [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    assert end.value.code == 128 + signal.SIGTERM
    assert f"stopped at step 2; {sys.argv[0]} --resume runs/cut goes on" in "".join(capsys.readouterr())
    for name in ("metrics.jsonl", "completions.jsonl"):  # a crash leaves more lines, the last in part
        with open(tmp_path / "runs/cut" / name, "a") as file:
            file.write('{"step": 3, "losses/grad_norm": 1.0}\n{"step": 3, "lo')
    (tmp_path / "r.py").write_text(CALLS + SKILL)
    train(resume=Path("runs/cut"))
    read = lambda path: [json.loads(line) for line in path.read_text().splitlines()]
    whole, cut = ({name: [{k: v for k, v in row.items() if not k.startswith(("time/", "charts/TPS", "charts/SPS"))}
                          for row in read(Path("runs") / run / f"{name}.jsonl")] for name in ("metrics", "completions")}
                  for run in ("whole", "cut"))  # fmt: skip
    assert whole == cut and [row["step"] for row in whole["metrics"]] == [0, 1, 2, 3, 4, 4]
    assert len({row["losses/grad_norm"] for row in whole["metrics"][1:5]}) == 4
    rates = [row["charts/learning_rate"] for row in whole["metrics"][1:5]]
    assert rates == pytest.approx([2e-4, 3e-4, 3e-4, 2e-4])  # warm-up over five steps, annealed over four
    config = json.loads(Path("runs/cut/config.json").read_text())
    assert config["args"]["group_size"] == 2 and config["versions"]["torch"] == torch.__version__
    assert len(config["sha256"]) == 64


def test_resume_and_run_name_refuse_what_does_not_fit(script, lab, train, refused, tmp_path):
    """Missing, foreign, cut, finished or changed runs, and flags that contradict them, are named; nothing is
    overwritten."""
    train(run_name="done", save_every=1, clip_high=0.3)
    good = tmp_path / "runs/done/checkpoint.pt"
    whole, state = good.read_bytes(), torch.load(good, weights_only=True)
    half = {**state, "step": 1}
    edits = dict(foreign={**state, "script": "ppo_atari"}, part=half, swapped=half, other=[1])
    edits["swapped"] = half | {"args": state["args"] | {"model": str(lab / "small"), "dataset": "low.jsonl"}}
    write(tmp_path / "low.jsonl", *({"prompt": f"{i % 7}{i // 7}", "answer": 1} for i in range(40)))
    for name, content in edits.items():
        shutil.copytree(tmp_path / "runs/done", tmp_path / "runs" / name)
        torch.save(content, tmp_path / "runs" / name / "checkpoint.pt")
    (tmp_path / "runs/cut").mkdir()
    (tmp_path / "runs/cut/checkpoint.pt").write_bytes(whole[: len(whole) // 2])
    for name, words in dict(
        none="there is no checkpoint runs/none", done="runs/done is finished, at step 2: a larger total goes on",
        foreign="is a checkpoint of ppo_atari.py", other="is not a whole checkpoint", cut="is not a whole checkpoint",
        swapped="does not fit, in its part model: ValueError: the model has other parameters",
    ).items():  # fmt: skip
        refused(words, started=True, resume=Path("runs") / name)
    part = Path("runs/part")
    refused("--group-size 4 differs from the 2 of the run", started=True, resume=part, group_size=4)
    refused("--reward number differs from the exact", started=True, resume=part, reward="number")
    refused(
        "--clip-high 0.28 differs from the 0.3", started=True, resume=part, clip_high=0.28
    )  # the script's default
    refused("--total-steps 1 differs from the 2", started=True, resume=part, total_steps=1)
    refused("there is no checkpoint none.pt", started=True, start_from=Path("none.pt"), run_name="new")
    refused("exists: choose another --run-name, or --resume runs/done", started=True, run_name="done")
    assert good.read_bytes() == whole
    out = train(resume=part, group_size=2, clip_high=0.3, device="cpu")  # values may be repeated
    assert out["step"] == 2 and out["folder"] == "runs/part"


@pytest.mark.parametrize("resume", ["runs/x", "runs/x/checkpoint.pt", "x"])
def test_a_finished_run_can_be_trained_longer(train, capsys, resume):
    """--resume with a larger total goes on where the run ended, with the prompts and at the rate that a run of that
    length has there, and says so."""
    flags = dict(anneal_lr=True, warmup_steps=0, eval_every=0)
    train(run_name="x", **flags)
    train(run_name="y", total_steps=4, **flags)
    out = train(resume=Path(resume), total_steps=4, device="cpu")
    assert "2 steps become 4: schedules are of the longer run" in capsys.readouterr().out
    x, y = ([json.loads(line) for line in open(f"runs/{name}/metrics.jsonl")] for name in "xy")
    assert [row["step"] for row in x] == [0, 1, 2, 2, 3, 4, 4] and out["step"] == 4
    rates = [row["charts/learning_rate"] for row in x if "charts/learning_rate" in row]
    assert rates == pytest.approx([1e-3, 5e-4, 5e-4, 2.5e-4])
    assert [row["charts/learning_rate"] for row in y[1:5]][2:] == rates[2:]
    drawn = [torch.load(f"runs/{name}/checkpoint.pt", weights_only=True)["parts"]["memory"] for name in "xy"]
    assert drawn[0]["drawn"] == drawn[1]["drawn"] == 16


def test_steps_without_anything_to_learn_are_counted_over_a_resume(train, tmp_path, capsys):
    """Ten steps in which all rewards of each group were equal are told once, however the run was cut."""
    (tmp_path / "r.py").write_text("def f(prompts, completions, rows): return [1.0] * len(rows)")
    train(run_name="x", total_steps=6, reward="r.py:f")
    words = "nothing is learnt: for 10 steps"
    assert words not in "".join(capsys.readouterr())
    train(resume="runs/x", total_steps=12, device="cpu")
    assert "".join(capsys.readouterr()).count(words) == 1


@pytest.mark.parametrize("rank", [0, 2])
def test_a_new_run_starts_from_trained_weights(script, train, tmp_path, rank):
    """--start-from takes the weights of a checkpoint and nothing else: steps, optimiser, schedule and random numbers
    are those of a new run, the reference is --model; the first evaluation is of these weights."""
    pytest.importorskip("peft") if rank else None
    (tmp_path / "r.py").write_text(
        "def f(prompts, completions, rows): return [float(c.count('7')) for c in completions]"
    )
    flags = dict(kl_coef=0.1, lora_rank=rank, eval_samples=0, num_eval=12, reward="r.py:f")
    old = train(run_name="old", total_steps=6, **flags | dict(learning_rate=0.02 if rank else 0.003))
    new = train(run_name="new", start_from=Path("old"), **flags | dict(learning_rate=1e-12))
    train(run_name="other", **flags | dict(learning_rate=1e-12))
    a, b, c = (
        torch.load(f"runs/{x}/checkpoint.pt", weights_only=True)["parts"] for x in ("old", "new", "other")
    )
    for name, weight in b["model"].items():
        torch.testing.assert_close(weight, a["model"][name], atol=1e-9, rtol=0)
    assert any(not torch.equal(b["model"][name], c["model"][name]) for name in c["model"])
    assert b["optimizer"]["state"][0]["step"] == 2 and torch.equal(b["shuffle"], c["shuffle"])
    assert (
        b["memory"]["drawn"] == c["memory"]["drawn"] == 8 and new["step"] == 2 and new["losses/ref_kl"] != 0
    )
    lines = [json.loads(line) for line in open("runs/new/completions.jsonl")]
    first, last = ([(x["prompt"], x["completion"]) for x in lines if x["step"] == step] for step in (0, 2))
    trained = [json.loads(line) for line in open("runs/old/completions.jsonl")]
    assert first == last == [(x["prompt"], x["completion"]) for x in trained if x["step"] == 6]
    assert new["eval/greedy"] == old["eval/greedy"]


def test_a_folder_that_cannot_be_made(refused, tmp_path):
    """runs/ that is a file, or that may not be written to, is told."""
    (tmp_path / "runs").write_text("a file")
    refused("cannot write runs/", started=True)
    if os.getuid():
        (tmp_path / "runs").unlink()
        (tmp_path / "runs").mkdir(mode=0o500)
        refused("cannot write runs/", started=True)


def test_the_built_in_task_runs(script, tmp_path, monkeypatch):
    """Without --model a tiny model and its task are made here; its folder is named after them."""
    monkeypatch.chdir(tmp_path)
    taught = []
    monkeypatch.setattr(script.module, "supervised_start", lambda *given: taught.append(given))
    monkeypatch.setattr(script.module, "load_task", lambda args, rng: (script.sort_rows(9, rng),) * 2)
    sizes = dict(num_prompts=2, group_size=2, total_steps=1, max_new_tokens=8, eval_samples=2, device="cpu")
    out = script.main(script.Args(**sizes, run_name=None))
    assert len(taught) == 1 and out["folder"].startswith(f"runs/sort__{script.SCRIPT}__1__")
    tokenizer, model = script.load_model(out["folder"] + "/model")
    assert script.stop_ids(tokenizer, model, None) == [1] and model.dtype == torch.float32


NUMBERS = [
    ("1,234.50", "1234.5"), ("-7", "-7"), ("\u22127", "-7"), ("$5", "5"), ("-$5", "-5"), ("1,2345", "2345"), ("$1,000,000 in all.", "1000000"),
    ("#### 42\nI had 7 apples", "42"), ("#### 1\nno: #### 2\nthen 3", "2"), (r"\boxed{3} of 4", "3"),
    (r"\boxed{1} and \boxed{-2.5}, 9", "-2.5"), ("5-3=2", "2"), ("5-3", "3"), ("(5)-3", "3"), ("3/4", "3/4"),
    ("0.75", "3/4"), ("-3/4", "-3/4"), ("1/0", None), ("", None), ("no number", None), ("1, 2", "2"), ("1,23", "23"),
    ("It is 12.", "12"), (".5", "1/2"), ("007", "7"), ("9" * 400, "9" * 400), ("٣", None), ("¹²", None),
    ("9" * 9999, None), (r"\boxed{}", None), ("#### none, not 5", "5"), ("#### none", None), (42, "42"), (2.5, "5/2"),
    ("__import__('os').system('touch x')", None), ("2**10", "10"), ("2,000 - 1,500 = 500", "500"),
]  # fmt: skip


@pytest.mark.parametrize("text, right", NUMBERS, ids=lambda x: str(x)[:20])
def test_last_number_table(script, tmp_path, monkeypatch, text, right):
    """The number after #### or in a box, else the last one, exact; text is never run."""
    monkeypatch.chdir(tmp_path)
    assert script.last_number(text) == (None if right is None else Fraction(right))
    assert not list(tmp_path.iterdir())


@given(text=st.text() | st.text(alphabet="0123456789.,-/$# =\\boxed{}\n\u2212e%()", max_size=40))
def test_last_number_takes_any_text(text, *, script):
    """A fraction or None, for any text."""
    assert isinstance(script.last_number(text), Fraction | None)


@given(n=st.integers(-(10**12), 10**12), d=st.integers(1, 999), words=st.sampled_from(["", "so 3 and ", "= "]))  # fmt: skip
def test_last_number_reads_back_what_was_written(n, d, words, *, script):
    """Integers with and without separators, decimals, fractions; before a full stop and in a box."""
    forms = {f"{n}": n, f"{n:,}": n, f"{n}/{d}": Fraction(n, d), f"{n}.{d}": Fraction(f"{n}.{d}")}
    for text, value in forms.items():
        for form in ("{0}{1}", "{0}{1}.", "{0}\\boxed{{{1}}} for 3", "4 #### {1}\n5"):
            whole = form.format(words, text)
            assert script.last_number(whole) == value


def test_exact_and_number_match(script):
    """exact: spaces around aside; number: equal values in any form, None where the answer has no number."""
    answers = [dict(answer=x) for x in ("12", " 12\n", "1 2", 12, "Yes")]
    assert script.exact_match([], [" 12", "12", "12", "12", "yes"], answers) == [1, 1, 0, 1, 0]
    answers = [dict(answer=x) for x in ("so\n#### 1,200", "3/4", "7", "none", 8)]
    assert script.number_match([], ["1200.0 $", "0.75", "no", "1", "8"], answers) == [1, 1, 0, None, 1]


GOOD = "<think>a</think><answer>b</answer>"


@pytest.mark.parametrize("text, right", [
    (GOOD, 1), (f"\n {GOOD} \n", 1), ("<think>\na\n</think>\n\n<answer>b\nc</answer>", 1), ("<think></think><answer></answer>", 1),
    ("<think>1 < 2 <b></think><answer>b</answer>", 1), (GOOD + GOOD, 0), ("so " + GOOD, 0), (GOOD + " so", 0), (GOOD[:-9], 0),
    ("<think>a<think>b</think></think><answer>c</answer>", 0), ("<think>a</think>b<answer>c</answer>", 0), ("", 0), ("b", 0),
    ("<think>a</think></think><answer>b</answer>", 0),
    ("<answer>b</answer><think>a</think>", 0), ("<answer>b</answer>", 0), ("<think>a</think><answer>b</answer></answer>", 0),
    ("<think>a</think><answer>b</answer><answer>c</answer>", 0), ("<think>a</think><answer><answer>b</answer></answer>", 0),
    ("<THINK>a</THINK><answer>b</answer>", 0), ("<think>" + "a" * 10**5, 0), ("<think>" * 5000, 0),
])  # fmt: skip
def test_format_match_is_not_fooled(script, text, right):
    """Each tag once, in order, nothing around."""
    assert script.format_match([], [text], [{}]) == [right]


def test_rewards_add_and_none_is_nan(script, tmp_path):
    """Rewards joined by + are added, a file's among them; None in one makes the sum NaN."""
    body = "return [len(p) + r['x'] for p, r in zip(prompts, rows)]"
    (tmp_path / "r.py").write_text(CALLS + body)
    functions = script.load_rewards(f"number+format+{tmp_path}/r.py:f")
    rows = [dict(answer=x, x=i) for i, x in enumerate(["3", "3", "4", "?"])]
    texts = ["<think>1</think><answer>3</answer>", "3", "<think>4</think><answer>5</answer>", GOOD]
    total = script.score_texts(functions, ["a", "bb", "c", "d"], texts, rows)
    assert total.dtype == torch.float32 and total[:3].tolist() == [3.0, 4.0, 4.0] and total[3].isnan()
    assert script.score_texts(script.load_rewards("exact"), [], ["3"] * 4, rows).tolist() == [1, 1, 0, 0]


def test_encode(script, lab, tmp_path):
    """The chat template if there is one, an assistant's last message left open; plain text is never closed."""
    plain, chat = (script.load_model(str(lab / name))[0] for name in ("whole", "chat"))
    one, two, three, equal, eos = (plain.convert_tokens_to_ids(x) for x in ("1", "2", "3", "=", "<eos>"))
    assert script.encode(plain, "12", True) == [one, two] == script.encode(chat, "12", False)
    assert script.encode(chat, "12", True) == [one, two, eos, equal]
    talk = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "3"}]
    assert script.encode(chat, talk[:1], False) == [one, two, eos, equal]
    assert script.encode(chat, talk, True) == [one, two, eos, three]
    assert script.encode(chat, [*talk, talk[0]], True) == [one, two, eos, three, eos, one, two, eos, equal]
    with pytest.raises(script.UsageError, match="chat template cannot take"):
        script.encode(plain, talk, True)
    with pytest.raises(script.UsageError, match="--no-chat-template"):  # it would be wrapped a second time
        script.encode(chat, "12<eos>3", True)
    assert script.encode(chat, "12<eos>3", False) == [one, two, eos, three]
    from tokenizers.processors import TemplateProcessing

    closing, pad = script.digit_tokenizer(), plain.pad_token_id
    closing.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A <eos>", special_tokens=[("<pad>", pad), ("<eos>", eos)]
    )
    assert closing("12").input_ids == [pad, one, two, eos]
    assert script.encode(closing, "12", True) == [pad, one, two]
    closing.chat_template = TEMPLATE
    assert script.encode(closing, "12", True) == [one, two, eos, equal]  # the template writes its own


def test_stop_ids_and_limits(script, lab):
    """Stop ids of tokenizer, model and generation config, and --stop; a prompt may fill the model to the end."""
    tokenizer, model = script.load_model(str(lab / "whole"))
    model.config.eos_token_id, model.generation_config.eos_token_id = [1, 5], 7
    assert script.stop_ids(tokenizer, model, None) == [1, 5, 7]
    assert script.stop_ids(tokenizer, model, "9") == [1, 5, 7, 12]
    tokenizer.add_tokens(["\n"])
    model.resize_token_embeddings(len(tokenizer))
    assert script.stop_ids(tokenizer, model, r"\n") == [1, 5, 7, 13]
    args = script.Args(max_new_tokens=8)
    assert len(script.encode_rows([{"prompt": "1" * 56}], tokenizer, model, args)[0]["ids"]) == 56
    with pytest.raises(script.UsageError, match="prompt 1 has 57 tokens"):
        script.encode_rows([{"prompt": "1" * 57}], tokenizer, model, args)
    with pytest.raises(script.UsageError, match="prompt 2 has no tokens"):
        script.encode_rows([{"prompt": "1"}, {"prompt": "<eos>"}], tokenizer, model, args)


def test_dropout_is_switched_off(script, lab, tmp_path):
    """A checkpoint trained with dropout is loaded without: sampling and scoring see one policy."""
    shutil.copytree(lab / "whole", tmp_path / "m")
    edit(tmp_path / "m/config.json", attention_dropout=0.5, dtype="bfloat16")
    _, model = script.load_model(str(tmp_path / "m"))
    assert model.config.attention_dropout == 0 and model.dtype == torch.float32


def test_load_task(script, tmp_path):
    """No prompt is both held out and trained on, duplicates included; a file's split is the same for all seeds."""
    rows = [{"prompt": f"{i % 30}", "answer": str(i)} for i in range(50)]  # 0 to 19 twice
    write(tmp_path / "d.jsonl", *rows)
    write(tmp_path / "e.jsonl", *rows[5:9])
    common = dict(model="m", dataset=str(tmp_path / "d.jsonl"), num_prompts=4)
    tasks = [
        script.load_task(script.Args(**common, num_eval=5, seed=s), np.random.default_rng(s)) for s in (1, 2)
    ]
    assert tasks[0] == tasks[1] and tasks[0][1] == rows[-5:]
    assert tasks[0][0] == [row for row in rows if int(row["prompt"]) not in range(15, 20)]
    args = script.Args(**common, eval_dataset=str(tmp_path / "e.jsonl"), num_eval=3)
    train, held_out = script.load_task(args, None)
    assert held_out == rows[5:8] and train == [row for row in rows if row["prompt"] not in "567"]
    small = script.Args(num_prompts=4, total_steps=2, num_eval=7)
    train, held_out = script.load_task(small, np.random.default_rng(1))
    assert len(held_out) == 7 and len(train) == 25_000 - 7
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert script.load_task(small, np.random.default_rng(1)) == (train, held_out)
    assert all(
        row["answer"] == "".join(sorted(row["prompt"][:-1])) and len(row["prompt"]) == 7 for row in train
    )


def test_rows_with_line_separators_inside_a_text(script, tmp_path):
    """A line of .jsonl ends at a newline only: JSON texts may hold U+2028 or U+0085 as they are."""
    rows = [{"prompt": f"a{c}b", "answer": "1"} for c in "\u2028\u2029\x85"]
    write(tmp_path / "d.jsonl", *(json.dumps(row, ensure_ascii=False) for row in rows))
    assert script.load_rows(str(tmp_path / "d.jsonl"), 9, 1) == rows


@given(
    size=st.integers(1, 9), cuts=st.lists(st.integers(1, 12), min_size=1, max_size=6), seed=st.integers(0, 99)
)
def test_prompt_indices(size, cuts, seed, *, script):
    """Each row once an epoch, in an order of the epoch and the seed, however the calls are cut."""
    total, parts = sum(cuts), []
    for count in cuts:
        parts += script.prompt_indices(len(parts), count, size, seed)
    assert (
        parts
        == script.prompt_indices(0, total, size, seed)
        == [script.prompt_indices(i, 1, size, seed)[0] for i in range(total)]
    )
    for first in range(0, total, size):
        assert max(collections.Counter(parts[first : first + size]).values()) == 1
    epochs = [
        script.prompt_indices(40 * e, 40, 40, s) for e, s in ((0, seed), (1, seed), (2, seed), (0, seed + 1))
    ]
    assert len(set(map(tuple, epochs))) == 4 and all(sorted(epoch) == [*range(40)] for epoch in epochs)
