"""ppo_continuous.py as a newcomer meets it: the command line, real processes, files that are broken."""

import json
import os
import signal
import subprocess
import sys
import time

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
        (dict(video="film.gif"), "needs --eval-checkpoint"),
        (dict(video="film.png", eval_checkpoint="x.pt"), "must end in .gif or .mp4"),
        (dict(run_name="a/b"), "--run-name a/b"),
        (dict(run_name="a", resume="runs/a"), "--run-name a contradicts --resume runs/a"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_wrong_flags_are_named(script, flags, words):
    """A wrong flag or combination is refused before any work, naming flag and value."""
    with pytest.raises(ValueError) as error:
        script.Args(**flags)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "flags, words",
    [
        (dict(env_id="NoSuchTask-v5"), "NoSuchTask"),
        (dict(env_id="CartPole-v1"), "action space is Discrete(2), this script needs a Box"),
        (dict(env_id="Probe/Dict-v0"), "observation space is Dict"),
        (dict(env_id="Probe/Wide-v0", action_bounds="tanh"), "--action-bounds tanh needs finite bounds"),
        (dict(resume="runs/none"), "there is no checkpoint runs/none/checkpoint.pt"),
        (dict(eval_checkpoint="none.pt"), "there is no checkpoint none.pt"),
        (dict(eval_checkpoint="half.pt"), "half.pt is not a whole checkpoint"),
        (dict(eval_checkpoint="other.pt"), "other.pt is not a whole checkpoint"),
        (dict(run_name="taken"), "runs/taken exists"),
        (dict(resume="runs/taken"), "this run is finished, at step 64"),
        (dict(resume="runs/taken", gamma=0.5), "--gamma 0.5 differs from the 0.99"),
        (dict(resume="runs/taken", env_id="Walker2d-v5"), "--env-id Walker2d-v5 differs"),
        (dict(eval_checkpoint="shape.pt"), "the checkpoint does not fit"),
        (dict(resume="runs/shape"), "the checkpoint does not fit"),
    ],
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else "",
)
def test_wrong_files_and_tasks_are_named(script, tmp_path, monkeypatch, flags, words):
    """An environment, checkpoint or folder that cannot be used ends in one sentence and nothing is overwritten."""
    import probes  # noqa: F401

    monkeypatch.chdir(tmp_path)
    quick = dict(
        num_steps=64, num_minibatches=4, total_timesteps=64, eval_episodes=0, compile=False, device="cpu"
    )
    out = script.main(script.Args(env_id="Hopper-v5", run_name="taken", **quick))
    whole = (tmp_path / "runs/taken/checkpoint.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(whole[: len(whole) // 2])
    torch.save({"script": "ppo_atari"}, tmp_path / "other.pt")
    state = torch.load(f"{out['folder']}/checkpoint.pt", weights_only=True)
    state["args"]["env_id"], state["step"] = "Walker2d-v5", 0
    (tmp_path / "runs/shape").mkdir()
    for name in ("shape.pt", "runs/shape/checkpoint.pt"):
        torch.save(state, tmp_path / name)
    flags = {k: tmp_path.__class__(v) if k in ("resume", "eval_checkpoint") else v for k, v in flags.items()}
    with pytest.raises(ValueError) as error:
        script.main(script.Args(**{**({} if "resume" in flags else quick), "compile": False, **flags}))
    assert words in str(error.value) and "\n" not in str(error.value)
    assert (tmp_path / "runs/taken/checkpoint.pt").read_bytes() == whole


def test_help_and_errors_of_the_real_command(script, tmp_path):
    """--help explains every flag; faults end in one sentence, a non-zero code and no traceback."""
    text = run(script, tmp_path, "--help")
    assert text.returncode == 0 and all(
        f"--{name.replace('_', '-')}" in text.stdout for name in vars(script.Args())
    )
    for flags, words in (
        (["--env-id", "CartPole-v1"], "needs a Box"),
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
    rest = run(script, tmp_path, *script.words(resume="runs/cut", compile=False))
    assert rest.returncode == 0, rest.stderr
    rows = [[{k: v for k, v in json.loads(line).items() if k != "charts/SPS"} for line in open(tmp_path / f"runs/{name}/metrics.jsonl")]
            for name in ("whole", "cut")]  # fmt: skip
    assert rows[0] == rows[1] and len(rows[0]) == 100
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
