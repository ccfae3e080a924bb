"""ppo_continuous.py as a newcomer meets it: the command line, real processes, files that are broken."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.setting("ppo_continuous")
QUICK = dict(
    env_id="Hopper-v5",
    num_steps=128,
    num_minibatches=4,
    update_epochs=2,
    compile=False,
    eval_episodes=1,
    device="cpu",
)


def run(script, cwd, *flags, **env):
    command = [sys.executable, str(script.path), *map(str, flags)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env={**os.environ, **env}, timeout=300
    )


@pytest.mark.parametrize(
    "flags, words",
    [
        (dict(num_envs=0), "--num-envs 0 must be at least 1"),
        (dict(total_timesteps=-5), "--total-timesteps -5"),
        (dict(num_steps=2047), "2047 samples do not divide into --num-minibatches 32"),
        (dict(num_steps=4, num_minibatches=4), "minibatches of one sample"),
        (dict(learning_rate=0.0), "--learning-rate 0.0"),
        (dict(learning_rate=float("nan")), "--learning-rate nan"),
        (dict(gamma=1.5), "--gamma 1.5"),
        (dict(gae_lambda=-0.1), "--gae-lambda -0.1"),
        (dict(clip_coef=-0.2), "--clip-coef -0.2"),
        (dict(max_grad_norm=0.0), "--max-grad-norm 0.0"),
        (dict(ent_coef=-1.0), "--ent-coef -1.0"),
        (dict(target_kl=0.0), "--target-kl 0.0"),
        (dict(log_std_init=50.0), "--log-std-init 50.0"),
        (dict(update_epochs=0), "--update-epochs 0"),
        (dict(seed=-1), "--seed -1"),
        (dict(video=Path("film.gif")), "needs --eval-checkpoint"),
        (dict(video=Path("film.mp4"), eval_checkpoint=Path("x.pt")), "must end in .gif"),
        (dict(video=Path("none/film.gif"), eval_checkpoint=Path("x.pt")), "there is no folder none"),
        (dict(eval_checkpoint=Path("x.pt"), eval_episodes=0), "--eval-episodes of at least 1"),
        (dict(run_name="a/b"), "--run-name a/b"),
        (dict(run_name="a", resume=Path("runs/a")), "--run-name a contradicts --resume runs/a"),
        (dict(start_from=Path("b"), resume=Path("runs/a")), "--start-from b contradicts --resume runs/a"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_wrong_flags_are_named(script, flags, words):
    """A wrong flag or combination is refused before any work, naming flag and value."""
    with pytest.raises(script.UsageError) as error:
        script.Args(**flags)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "flags, words",
    [
        (dict(env_id="NoSuchTask-v5"), "NoSuchTask"),
        (dict(env_id="CartPole-v1"), "action space is Discrete(2), not a Box"),
        (dict(env_id="Probe/Dict-v0"), "observation space is Dict"),
        (dict(env_id="Probe/Wide-v0", action_bounds="tanh"), "--action-bounds tanh needs finite bounds"),
        (dict(env_id="no_such_module:Task-v0"), "--env-id no_such_module:Task-v0: ModuleNotFoundError"),
        (dict(env_kwargs="{"), "--env-id Hopper-v5: JSONDecodeError"),
        (dict(env_kwargs='{"no_such": 1}'), "unexpected keyword argument 'no_such'"),
        (dict(resume="runs/none"), "there is no checkpoint runs/none"),
        (dict(start_from="none.pt"), "there is no checkpoint none.pt"),
        (dict(eval_checkpoint="none.pt"), "there is no checkpoint none.pt"),
        (dict(eval_checkpoint="half.pt"), "half.pt is not a whole checkpoint"),
        (
            dict(eval_checkpoint="other.pt"),
            "other.pt is a checkpoint of ppo_atari.py, not of ppo_continuous.py",
        ),
        (dict(run_name="taken"), "runs/taken exists"),
        (dict(resume="runs/taken"), "runs/taken is finished, at step 64: a larger total goes on"),
        (dict(resume="runs/taken", gamma=0.5), "--gamma 0.5 differs from the 0.9"),
        (dict(resume="runs/taken", gamma=0.99), "--gamma 0.99 differs from the 0.9"),
        (dict(resume="runs/taken", total_timesteps=32), "--total-timesteps 32 differs from the 64"),
        (dict(resume="runs/taken", env_id="Walker2d-v5"), "--env-id Walker2d-v5 differs"),
        (dict(eval_checkpoint="shape.pt"), "shape.pt does not fit, in its part agent"),
        (dict(start_from="shape.pt"), "shape.pt does not fit, in its part obs_norm"),
        (dict(resume="runs/shape"), "does not fit, in its part agent"),
    ],
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else "",
)
def test_wrong_files_and_tasks_are_named(script, tmp_path, monkeypatch, flags, words):
    """An environment, checkpoint or folder that cannot be used ends in one sentence and nothing is overwritten; a
    flag that differs from the resumed run's is noticed, also where the user typed the script's default."""
    import probes  # noqa: F401

    monkeypatch.chdir(tmp_path)
    quick = dict(env_id="Hopper-v5", num_steps=64, num_minibatches=4, total_timesteps=64, eval_episodes=0)
    here = dict(compile=False, device="cpu")
    out = script.main(script.Args(run_name="taken", gamma=0.9, **quick, **here))
    whole = (tmp_path / "runs/taken/checkpoint.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(whole[: len(whole) // 2])
    torch.save({"script": "ppo_atari"}, tmp_path / "other.pt")
    state = torch.load(f"{out['folder']}/checkpoint.pt", weights_only=True)
    state["args"] |= {"env_id": "Walker2d-v5", "eval_episodes": 1}
    state["step"] = 0
    state["parts"]["agent"].popitem()
    state["parts"]["obs_norm"].pop("mean")
    (tmp_path / "runs/shape").mkdir()
    for name in ("shape.pt", "runs/shape/checkpoint.pt"):
        torch.save(state, tmp_path / name)
    if "start_from" in flags:
        state["parts"]["agent"] = torch.load("runs/taken/checkpoint.pt", weights_only=True)["parts"]["agent"]
        torch.save(state, tmp_path / "shape.pt")
    flags = ({} if {"resume", "eval_checkpoint"} & flags.keys() else quick) | here | flags
    with pytest.raises(script.UsageError) as error:
        script.main(script.parse_args(script.words(**flags)))
    assert words in str(error.value) and "\n" not in str(error.value)
    assert (tmp_path / "runs/taken/checkpoint.pt").read_bytes() == whole


@pytest.mark.parametrize("resume", ["runs/x", "runs/x/checkpoint.pt", "x"])
def test_a_finished_run_can_be_trained_longer(script, tmp_path, monkeypatch, capsys, resume):
    """--resume with a larger total goes on where the run ended, at the rate that the longer schedule has there, and
    says so; a run that was longer from the start has the same learning rates from there on."""
    monkeypatch.chdir(tmp_path)
    flags = dict(
        num_steps=64, num_minibatches=4, env_id="Hopper-v5", eval_episodes=0, compile=False, device="cpu"
    )
    script.main(script.Args(**flags, total_timesteps=128, run_name="x"))
    script.main(script.Args(**flags, total_timesteps=256, run_name="y"))
    words = ["--resume", resume, "--total-timesteps", "256", "--no-compile", "--device", "cpu"]
    out = script.main(script.parse_args(words))
    assert "128 steps become 256: schedules are of the longer run" in capsys.readouterr().out
    x, y = ([json.loads(line) for line in open(f"runs/{name}/metrics.jsonl")] for name in "xy")
    assert [row["step"] for row in x] == [64, 128, 192, 256] and out["step"] == 256
    rate = "charts/learning_rate"
    assert [r[rate] for r in x[2:]] == [r[rate] for r in y[2:]] and x[1][rate] == pytest.approx(1.5e-4)


def test_a_new_run_starts_from_trained_weights(script, tmp_path, monkeypatch):
    """--start-from takes weights and statistics of a checkpoint, and nothing else: steps, optimiser, schedule and
    random numbers are those of a new run."""
    monkeypatch.chdir(tmp_path)
    flags = dict(
        num_steps=64, num_minibatches=4, env_id="Hopper-v5", eval_episodes=1, compile=False, device="cpu"
    )
    script.main(script.Args(**flags, total_timesteps=256, run_name="old"))
    flags |= dict(total_timesteps=64, learning_rate=1e-12)
    new = script.main(script.Args(**flags, run_name="new", start_from=Path("old")))
    script.main(script.Args(**flags, run_name="other"))
    a, b, c = (
        torch.load(f"runs/{x}/checkpoint.pt", weights_only=True)["parts"] for x in ("old", "new", "other")
    )
    for name, weight in b["agent"].items():
        torch.testing.assert_close(weight, a["agent"][name], atol=1e-9, rtol=0)
    assert b["obs_norm"]["count"] == a["obs_norm"]["count"] + 64 and b["optimizer"]["step"] == 40
    assert torch.equal(b["shuffle"], c["shuffle"]) and b["actions"] == c["actions"]
    assert new["step"] == 64 and new["eval/episodic_length"] > 0


def test_help_and_errors_of_the_real_command(script, tmp_path):
    """--help explains every flag; faults end in one sentence, a non-zero code and no traceback."""
    text = run(script, tmp_path, "--help")
    assert text.returncode == 0 and all(
        f"--{name.replace('_', '-')}" in text.stdout for name in vars(script.Args())
    )
    for flags, words in (
        (["--env-id", "CartPole-v1"], "not a Box"),
        (["--gamma", "2"], "--gamma 2.0 must lie in [0, 1]"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--num-envs", "many"], "--num-envs"),
        (["--device", "cuda"], "no CUDA device"),
    ):
        if "cuda" in flags and torch.cuda.is_available():
            continue
        failed = run(script, tmp_path, *flags)
        assert failed.returncode != 0 and words in failed.stderr + failed.stdout
        assert "Traceback" not in failed.stderr
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs").write_text("a file, so the folder cannot be made")
    failed = run(script, tmp_path, *script.words(**QUICK))
    assert (
        failed.returncode != 0 and "cannot write runs/" in failed.stderr and "Traceback" not in failed.stderr
    )


def test_import_runs_nothing(script, tmp_path):
    """Importing a script prints nothing, writes nothing and does not load W&B."""
    code = f"import runpy, sys; runpy.run_path({str(script.path)!r}, run_name='imported'); assert 'wandb' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and not list(tmp_path.iterdir())


@pytest.mark.flags("resume")
def test_kill_and_resume_a_real_process(script, tmp_path):
    """kill leaves a checkpoint and says how to go on; doing so ends the run with the same numbers as one run."""
    flags = script.words(**QUICK, total_timesteps=12800)
    whole = run(script, tmp_path, *flags, "--run-name", "whole")
    assert whole.returncode == 0, whole.stderr
    process = subprocess.Popen([sys.executable, script.path, *flags, "--run-name", "cut"], cwd=tmp_path,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
    metrics = tmp_path / "runs/cut/metrics.jsonl"
    for _ in range(600):
        if metrics.exists() and len(metrics.read_text().splitlines()) >= 3:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM and "--resume runs/cut" in said
    rest = run(script, tmp_path, *script.words(resume="runs/cut", compile=False, device="cpu"))
    assert rest.returncode == 0, rest.stderr
    clock = ("charts/SPS", "time/cpu")
    rows = [[{k: v for k, v in json.loads(line).items() if k not in clock} for line in open(tmp_path / f"runs/{name}/metrics.jsonl")]
            for name in ("whole", "cut")]  # fmt: skip
    assert rows[0] == rows[1] and len(rows[0]) == 101 and "eval/episodic_return" in rows[0][-1]
    config = json.loads((tmp_path / "runs/cut/config.json").read_text())
    assert config["args"]["env_id"] == "Hopper-v5" and config["versions"]["torch"] == torch.__version__
    assert len(config["sha256"]) == 64


@pytest.mark.flags("compile")
def test_without_a_compiler_it_runs_eager_and_says_so(script, tmp_path):
    """A machine without a C++ compiler trains with the uncompiled function and is told once."""
    flags = script.words(**QUICK | {"compile": True})
    env = dict(
        CXX=str(tmp_path / "none"),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
        TORCHINDUCTOR_FX_GRAPH_CACHE="0",
    )
    done = run(script, tmp_path, *flags, "--total-timesteps", "256", **env)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("running uncompiled, since torch.compile failed") == 1


@pytest.mark.flags("video", "eval_checkpoint")
def test_video_of_a_trained_policy(script, tmp_path):
    """--eval-checkpoint with --video films without a screen."""
    out = run(script, tmp_path, *script.words(**QUICK, total_timesteps=128, run_name="x"))
    assert out.returncode == 0, out.stderr
    flags = ["--eval-checkpoint", "runs/x/checkpoint.pt", "--eval-episodes", 1, "--video", "x.gif"]
    film = run(script, tmp_path, *flags)
    if film.returncode and "GL" in film.stderr:
        pytest.skip("this machine cannot render: no EGL")
    assert film.returncode == 0, film.stderr
    assert (tmp_path / "x.gif").stat().st_size > 1000
