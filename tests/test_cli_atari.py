"""ppo_atari.py as a newcomer meets it: the command line, real processes, files that are broken."""

import ast
import contextlib
import dataclasses
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import typing
from pathlib import Path

import gymnasium as gym
import pytest
import torch

pytest.importorskip("ale_py")
pytestmark = pytest.mark.setting("ppo_atari")
TINY = dict(
    env_id="ALE/SpaceInvaders-v5", num_envs=2, num_steps=8, num_minibatches=2, update_epochs=1,
    total_timesteps=32, eval_episodes=0, max_frames=200, compile=False, device="cpu",
)  # fmt: skip
HERE = dict(compile=False, device="cpu")  # not taken from a checkpoint


def environment(**more) -> dict:
    """For a real process: the same arithmetic as in this one, and the progress bar shown."""
    shown = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}
    return {**shown, "OMP_NUM_THREADS": "1", **more}


def run(script, cwd, *flags, **env):
    command = [sys.executable, str(script.path), *map(str, flags)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env=environment(**env), timeout=300
    )


@pytest.fixture
def command(script, monkeypatch, capsys):
    """Runs the script as a program, in this process, which saves loading torch: (exit code, stdout, stderr)."""

    def call(*flags):
        monkeypatch.setattr(sys, "argv", [str(script.path), *map(str, flags)])
        capsys.readouterr()
        code = 0
        try:
            runpy.run_path(str(script.path), run_name="__main__")
        except SystemExit as stopped:  # its text is what Python would print
            code = stopped.code
        said = capsys.readouterr()
        text = code if isinstance(code, str) else ""
        return (1 if text else code or 0), said.out, said.err + text

    return call


def unboxed(text: str) -> str:
    """Help and parse errors stand in boxes as wide as the terminal."""
    return " ".join(re.sub(r"[─│╭╮╰╯]", " ", text).split())


def rows(folder) -> list[dict]:
    """The metrics of a run, the lines of one step joined, but for its speed."""
    found = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        found[line["step"]] = found.get(line["step"], {}) | line
    return [{k: v for k, v in row.items() if k not in ("charts/SPS", "time/cpu")} for row in found.values()]


@pytest.fixture(scope="module")
def folder(script, tmp_path_factory):
    """runs/taken, a finished run, and checkpoints that are broken in several ways; nobody writes into it."""
    path = tmp_path_factory.mktemp("runs_of_ppo_atari")
    with contextlib.chdir(path):
        flags = TINY | {"eval_episodes": 2, "gamma": 0.9, "run_name": "taken"}
        out = script.main(script.Args(**script.flags(**flags)))
    (path / "metrics.json").write_text(json.dumps(out))
    whole = (path / "runs/taken/checkpoint.pt").read_bytes()
    (path / "half.pt").write_bytes(whole[: len(whole) // 2])
    (path / "empty.pt").write_bytes(b"")
    torch.save({"script": "ppo_continuous", "args": {}}, path / "other.pt")
    torch.save([1, 2], path / "list.pt")
    state = torch.load(path / "runs/taken/checkpoint.pt", weights_only=True)
    state["args"]["env_id"], state["step"] = "ALE/Freeway-v5", 0  # of three actions instead of six
    (path / "runs/shape").mkdir()
    for name in ("shape.pt", "runs/shape/checkpoint.pt"):
        torch.save(state, path / name)
    return path


# ---- flags ----


@pytest.mark.parametrize(
    "flags, words",
    [
        (dict(num_envs=0), "--num-envs 0 must be at least 1"),
        (dict(num_steps=0), "--num-steps 0 must be at least 1"),
        (dict(total_timesteps=-5), "--total-timesteps -5 must be at least 1"),
        (dict(num_minibatches=0), "--num-minibatches 0 must be at least 1"),
        (dict(update_epochs=0), "--update-epochs 0 must be at least 1"),
        (dict(max_frames=0), "--max-frames 0 must lie between 1 and 2**31 - 1"),
        (dict(save_every=0), "--save-every 0 must be at least 1"),
        (dict(learning_rate=0.0), "--learning-rate 0.0 must be positive and finite"),
        (dict(clip_coef=0.0), "--clip-coef 0.0 must be positive and finite"),
        (dict(max_grad_norm=0.0), "--max-grad-norm 0.0 must be positive and finite"),
        (dict(target_kl=0.0), "--target-kl 0.0 must be positive and finite"),
        (dict(gamma=1.5), "--gamma 1.5 must lie in [0, 1]"),
        (dict(gae_lambda=1.1), "--gae-lambda 1.1 must lie in [0, 1]"),
        (dict(sticky=1.25), "--sticky 1.25 must lie in [0, 1]"),
        (dict(num_steps=127), "--num-envs 8 x --num-steps 127 = 1016 samples do not divide into --num-minibatches 5"),
        (dict(num_steps=2, num_minibatches=16), "minibatches of one sample"),
        (dict(video=Path("film.gif")), "--video film.gif must end in .gif and needs --eval-checkpoint"),
        (dict(video=Path("film.mp4"), eval_checkpoint=Path("x.pt")), "--video film.mp4 must end in .gif"),
        (dict(video=Path("none/film.gif"), eval_checkpoint=Path("x.pt")), "there is no folder none"),
        (dict(eval_checkpoint=Path("x.pt"), eval_episodes=0), "--eval-checkpoint needs --eval-episodes of at least 1"),
        (dict(run_name="a/b"), "--run-name a/b must be the name of a folder"),
        (dict(run_name="/tmp"), "--run-name /tmp must be the name of a folder"),
        (dict(run_name="."), "--run-name . must be the name of a folder"),
        (dict(run_name="a", resume=Path("runs/a")), "--run-name a contradicts --resume runs/a"),
        (dict(start_from=Path("b"), resume=Path("runs/a")), "--start-from b contradicts --resume runs/a"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)  # fmt: skip
def test_wrong_flags_are_named(script, flags, words):
    """A wrong flag or combination is refused before any work, naming flag and value."""
    if flags == dict(num_steps=127):
        flags = dict(num_steps=127, num_minibatches=5)
    with pytest.raises(script.UsageError) as error:
        script.Args(**script.flags(**flags))
    assert words in str(error.value) and "\n" not in str(error.value)


def bare(kind) -> set:
    """The types that a flag may have, without their ranges."""
    inner = {t for part in typing.get_args(kind) for t in bare(part)} if typing.get_args(kind) else {kind}
    return {t for t in inner if isinstance(t, type)}


def test_no_numeric_flag_takes_nonsense(script):
    """Every number on the command line has its range: negative, NaN and infinite values are refused by name."""
    fields = dataclasses.fields(script.original.Args)
    numbers = {f: kind for f in fields for kind in bare(f.type) if kind in (int, float)}
    assert len(numbers) == 19 and int in numbers.values() and float in numbers.values()
    for field, kind in numbers.items():
        for value in [-1] if kind is int else [-1.0, math.nan, math.inf, -math.inf]:
            with pytest.raises(script.UsageError) as error:
                script.Args(**script.flags(**{field.name: value}))
            assert f"--{field.name.replace('_', '-')} {value}" in str(error.value)


def test_the_ends_of_the_ranges_are_allowed(script):
    """What is switched off by 0, and probabilities of 0 and 1, are values like any other."""
    flags = dict(gamma=1.0, gae_lambda=0.0, sticky=1.0, ent_coef=0.0, vf_coef=0.0, seed=0, eval_episodes=0)
    args = script.Args(**script.flags(**flags, eval_every=0, num_envs=1, num_steps=2, num_minibatches=1))
    assert args.gamma == 1.0
    script.Args(**script.flags(num_envs=1, num_steps=1, num_minibatches=1, norm_adv=False))


def test_help_explains_every_flag(script, command):
    """--help gives every flag with its sentence and default."""
    code, out, said = command("--help")
    shown = unboxed(out).replace(" ", "")  # lines end anywhere
    source = script.path.read_text(encoding="utf-8")
    args = next(x for x in ast.parse(source).body if isinstance(x, ast.ClassDef) and x.name == "Args")
    assert code == 0 and not said
    for flag, following in zip(args.body, args.body[1:]):
        if not isinstance(flag, ast.AnnAssign):
            continue
        name, line = flag.target.id.replace("_", "-"), source.splitlines()[flag.end_lineno - 1]
        text = line.encode()[flag.end_col_offset :].decode().strip().removeprefix("#")
        if isinstance(following, ast.Expr):  # a copy may explain it in a string below
            text = following.value.value
        assert text, f"--{name} is not explained"
        assert f"--{name}" in shown and "".join(text.split()) in shown, name
    assert shown.count("(default:") == len(dataclasses.fields(script.Args))


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--no-such-flag"], "--no-such-flag"),
        (["--num-step", 5], "--num-steps"),
        (["--num-envs", "many"], "--num-envs"),
        (["--device", "tpu"], "--device"),
        (["--gamma", 2], "--gamma 2.0 must lie in [0, 1]"),
        (["--video", "x.gif"], "--video x.gif must end in .gif and needs --eval-checkpoint"),
        (["--num-envs", 3, "--num-steps", 3, "--num-minibatches", 2], "= 9 samples do not divide into --num-minibatches 2"),
    ],
    ids=lambda x: "".join(map(str, x)) if isinstance(x, list) else "",
)  # fmt: skip
def test_errors_of_the_parser(script, command, tmp_path, monkeypatch, flags, words):
    """What cannot be parsed is said on stderr with the flag's name, a non-zero code and nothing written."""
    monkeypatch.chdir(tmp_path)
    code, out, said = command(*script.words(**TINY), *flags)  # tiny, lest it is not refused
    assert code not in (0, None) and words in unboxed(said) and not out
    assert not list(tmp_path.iterdir())


# ---- games, files and folders ----


@pytest.mark.parametrize(
    "flags, words",
    [
        (dict(env_id="ALE/Breakot-v5"), "--env-id ALE/Breakot-v5: NameNotFound: Environment `Breakot` doesn't exist in namespace ALE. Did you mean: `Breakout`?"),
        (dict(env_id="NoSuchGame-v5"), "--env-id NoSuchGame-v5: NameNotFound: Environment `NoSuchGame` doesn't exist"),
        (dict(env_id="ALE/Breakout-v3"), "Please use `ALE/Breakout-v5` instead"),
        (dict(env_id="Breakout"), "--env-id Breakout: Error: No registered env"),
        (dict(env_id="a game"), "--env-id a game: "),
        (dict(env_id="CartPole-v1"), "--env-id CartPole-v1 is not an Atari game on pixels, such as ALE/Pong-v5"),
        (dict(env_id="HalfCheetah-v5"), "--env-id HalfCheetah-v5 is not an Atari game on pixels"),
        (dict(env_id="ALE/Pong-ram-v5"), "--env-id ALE/Pong-ram-v5: NameNotFound: Environment `Pong-ram` doesn't exist"),
        (dict(env_id="Probe/Ram-v0"), "--env-id Probe/Ram-v0 is not an Atari game on pixels"),
        (dict(max_frames=2**40), "--max-frames 1099511627776"),
        (dict(device="cuda"), "--device cuda: there is no CUDA device"),
        (dict(run_name="taken"), "runs/taken exists: choose another --run-name, or --resume runs/taken"),
        (dict(run_name=".."), "--run-name"),
        (dict(resume="runs/none"), "there is no checkpoint runs/none"),
        (dict(resume="runs/taken"), "runs/taken is finished, at step 32: a larger total goes on"),
        (dict(resume="runs/taken", gamma=0.5), "--gamma 0.5 differs from the 0.9 of the run"),
        (dict(resume="runs/taken", gamma=0.99), "--gamma 0.99 differs from the 0.9 of the run"),
        (dict(resume="runs/taken", total_timesteps=16), "--total-timesteps 16 differs from the 32 of the run"),
        (dict(resume="runs/taken", env_id="ALE/Pong-v5"), "--env-id ALE/Pong-v5 differs from the ALE/SpaceInvaders-v5"),
        (dict(resume="runs/taken", num_envs=4, num_minibatches=2), "--num-envs 4 differs from the 2"),
        (dict(resume="runs/taken", life_loss=False), "--life-loss False differs from the True"),
        (dict(resume="runs/taken", sticky=0.25), "--sticky 0.25 differs from the None"),
        (dict(resume="runs/shape"), "runs/shape/checkpoint.pt does not fit, in its part agent"),
        (dict(start_from="none.pt"), "there is no checkpoint none.pt"),
        (dict(start_from="shape.pt", env_id="ALE/Freeway-v5"), "shape.pt does not fit, in its part agent"),
        (dict(eval_checkpoint="none.pt"), "there is no checkpoint none.pt"),
        (dict(eval_checkpoint="runs"), "there is no checkpoint runs"),
        (dict(eval_checkpoint="half.pt"), "half.pt is not a whole checkpoint of ppo_atari.py"),
        (dict(eval_checkpoint="empty.pt"), "empty.pt is not a whole checkpoint"),
        (dict(eval_checkpoint="other.pt"), "other.pt is a checkpoint of ppo_continuous.py, not of ppo_atari.py"),
        (dict(eval_checkpoint="list.pt"), "list.pt is not a whole checkpoint"),
        (dict(eval_checkpoint="shape.pt"), "shape.pt does not fit, in its part agent"),
    ],
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else "",
)  # fmt: skip
def test_wrong_files_and_games_are_named(script, folder, monkeypatch, flags, words):
    """A game, checkpoint, folder or device that cannot be used ends in one sentence before the first step is
    played, and nothing is overwritten; a flag that differs from the resumed run's is noticed, also where the user
    typed the script's default."""
    if flags == dict(device="cuda") and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    if "Probe" in flags.get("env_id", ""):
        registry = {**gym.registry}
        gym.register("Probe/Ram-v0", entry_point="x:y", kwargs={"game": "pong", "obs_type": "ram"})
        monkeypatch.setitem(registry, "Probe/Ram-v0", gym.registry.pop("Probe/Ram-v0"))
        monkeypatch.setattr(gym.envs.registration, "registry", registry)

    def played(*_):
        pytest.fail("a step was played")

    monkeypatch.setattr(script.module, "play_rollout", played, raising=False)
    monkeypatch.chdir(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    base = HERE if {"resume", "eval_checkpoint"} & flags.keys() else TINY
    with pytest.raises(script.UsageError) as error:
        script.main(script.parse_args(script.words(**base | flags)))
    assert words in str(error.value) and "\n" not in str(error.value)
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    if flags.get("start_from") == "shape.pt":  # that it does not fit shows when the run begins
        after = {path: time for path, time in after.items() if path in before} | {
            folder / "runs": before[folder / "runs"]
        }
    assert after == before


def test_a_folder_that_cannot_be_written(script, tmp_path, monkeypatch):
    """No rights, or a file in the way, are found before the first step, not at the first checkpoint."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file, so the folder cannot be made")
    monkeypatch.setattr(
        script.module, "play_rollout", lambda *_: pytest.fail("a step was played"), raising=False
    )
    with pytest.raises(script.UsageError, match="cannot write runs/x: ") as error:
        script.main(script.Args(**script.flags(**TINY, run_name="x")))
    assert "\n" not in str(error.value)
    (tmp_path / "runs").unlink()
    (tmp_path / "runs").mkdir(mode=0o500)
    if os.access(tmp_path / "runs", os.W_OK):
        return  # root may write everywhere
    with pytest.raises(script.UsageError, match="cannot write runs/x: PermissionError"):
        script.main(script.Args(**script.flags(**TINY, run_name="x")))


def test_errors_of_the_real_command(script, tmp_path):
    """From the shell: one line on stderr, code 1, no traceback, no folder."""
    failed = run(script, tmp_path, *script.words(**TINY | {"env_id": "ALE/Breakot-v5"}))
    lines = failed.stderr.strip().splitlines()
    assert failed.returncode == 1 and not failed.stdout and len(lines) == 1
    assert lines[0].startswith(f"{script.path.name}: --env-id ALE/Breakot-v5: ") and "`Breakout`?" in lines[0]
    assert not list(tmp_path.iterdir())


def test_import_runs_nothing(script, tmp_path):
    """Importing the script prints and writes nothing, opens no window and no device, and does not load W&B."""
    code = f"""import os, runpy, sys
os.environ.pop("DISPLAY", None)
runpy.run_path({str(script.path)!r}, run_name="imported")
import torch
assert not torch.cuda.is_initialized()
assert not {{"wandb", "pygame", "tkinter", "matplotlib"}} & set(sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and not list(tmp_path.iterdir())


# ---- runs ----


def test_files_of_a_run(script, folder):
    """config.json tells how to repeat the run, metrics.jsonl has a line an iteration, the checkpoint all of it."""
    config = json.loads((folder / "runs/taken/config.json").read_text())
    assert {k: config["args"][k] for k in script.flags(**TINY) if k != "eval_episodes"} == {
        k: v for k, v in script.flags(**TINY).items() if k != "eval_episodes"
    }
    versions = config["versions"]
    assert versions["torch"] == torch.__version__ and versions["gymnasium"] == gym.__version__
    assert versions["ale_py"] == sys.modules["ale_py"].__version__ and versions["python"] in sys.version
    assert len(config["sha256"]) == 64 and config["device"]
    lines = rows(folder / "runs/taken")
    assert [line["step"] for line in lines] == [16, 32]
    assert all(math.isfinite(line["losses/policy_loss"]) for line in lines)
    assert "eval/episodic_return" in lines[1] and "eval/episodic_return" not in lines[0]
    state = torch.load(folder / "runs/taken/checkpoint.pt", weights_only=True)
    assert state["step"] == 32 and state["args"]["env_id"] == TINY["env_id"]
    assert {path.name for path in (folder / "runs/taken").iterdir()} == {
        "config.json", "metrics.jsonl", "checkpoint.pt",
    }  # fmt: skip
    assert not (folder / "wandb").exists()


def test_the_default_folder_is_new_and_readable(script, command, tmp_path, monkeypatch):
    """Two runs never share a folder; its name has no slash of the game's id; a budget that is no multiple of the
    rollout is rounded up and says so (B26)."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        code, out, said = command(*script.words(**TINY | {"total_timesteps": 10}))
        assert code == 0, said
        assert "--total-timesteps 10 rounded up to 16, whole iterations" in out
    names = [path.name for path in (tmp_path / "runs").iterdir()]
    assert len(names) == 2 and all(name.startswith("ALE-SpaceInvaders-v5__ppo_atari__1__") for name in names)


@pytest.mark.flags("eval_checkpoint", "eval_episodes", "video")
def test_film_and_numbers_of_the_run_again(script, folder, tmp_path, monkeypatch, capsys):
    """--eval-checkpoint plays the games of the run's own evaluation again, with the run's flags, and --video films
    the first of them: one colour picture of the screen a step, of what the agent saw, in the game's own time."""
    imageio, cv2 = pytest.importorskip("imageio"), pytest.importorskip("cv2")
    monkeypatch.chdir(tmp_path)
    saved, seen, film, save, step = [], [], tmp_path / "x.gif", imageio.mimsave, script.find("Games").step
    monkeypatch.setattr(imageio, "mimsave", lambda *a, **k: (saved.append(a[1]), save(*a, **k)))

    def watched(games, actions):
        out = step(games, actions)
        seen.append(games.obs[0, 3].copy())
        return out

    monkeypatch.setattr(script.module.Games, "step", watched)
    whole = json.loads((folder / "metrics.json").read_text())
    words = ["--eval-checkpoint", str(folder / "runs/taken"), "--video", str(film), "--device", "cpu"]
    capsys.readouterr()
    again = script.main(script.parse_args(words))
    said = capsys.readouterr().out
    wanted = {k: v for k, v in whole.items() if k.startswith("eval/")}
    assert len(wanted) == 3 and {k: again[k] for k in wanted} == wanted
    assert f"episodic_return {again['eval/episodic_return']:.1f}" in said

    frames = saved[0]
    assert len(frames) == again["eval/episodic_length"] == TINY["max_frames"] / 4
    assert all(frame.shape == (210, 160, 3) for frame in frames)
    assert any((frame.max(-1) != frame.min(-1)).any() for frame in frames)
    for frame, grey in zip(frames, seen):
        small = cv2.resize(cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY), (84, 84), interpolation=cv2.INTER_AREA)
        assert (abs(small.astype(int) - grey) > 16).mean() < 0.001
    from PIL import Image

    with Image.open(film) as picture:  # equal pictures in a row are one, shown for longer
        assert picture.size == (160, 210) and picture.n_frames > len(frames) / 2
        shown = 0
        for k in range(picture.n_frames):
            picture.seek(k)
            shown += picture.info["duration"]
    assert shown == pytest.approx(1000 * len(frames) / 15, rel=0.15)


@pytest.mark.flags("eval_checkpoint", "eval_episodes")
def test_number_of_games_of_an_evaluation(script, folder, command, monkeypatch, tmp_path):
    """--eval-episodes sets how many games --eval-checkpoint plays, and nothing is written without --video."""
    monkeypatch.chdir(tmp_path)
    deviations = []
    for episodes in (1, 12):
        code, out, said = command("--eval-checkpoint", folder / "runs/taken", "--eval-episodes", episodes)
        assert code == 0 and out.count("\n") == 1, said
        deviations.append(float(re.search(r"episodic_return_std ([\d.]+)", out)[1]))
    assert deviations[0] == 0.0 < deviations[1]
    assert not list(tmp_path.iterdir())


@pytest.mark.flags("eval_checkpoint", "video")
@pytest.mark.parametrize("fault", ["folder", "disk"])
def test_a_film_that_cannot_be_written(script, folder, monkeypatch, tmp_path, fault):
    """A missing folder or a full disk is one sentence too, also where imageio explains itself over several lines."""
    imageio = pytest.importorskip("imageio")

    def full(*_, **__):
        raise OSError("Could not write\nBased on the extension:\n  the disk is full")

    if fault == "disk":
        monkeypatch.setattr(imageio, "mimsave", full)
    film = tmp_path / ("none/x.gif" if fault == "folder" else "x.gif")
    words = ["--eval-checkpoint", str(folder / "runs/taken"), "--eval-episodes", "1", "--video", str(film)]
    with pytest.raises(script.UsageError) as error:
        script.main(script.parse_args([*words, "--device", "cpu"]))
    assert str(error.value).startswith(f"--video {film}: ") and "\n" not in str(error.value)


LONG = TINY | {"total_timesteps": 384}


@pytest.fixture(scope="module")
def uninterrupted(script, tmp_path_factory):
    path = tmp_path_factory.mktemp("uninterrupted")
    with contextlib.chdir(path):
        script.main(script.Args(**script.flags(**LONG, run_name="x")))
    return rows(path / "runs/x")


@pytest.mark.flags("resume")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "kill"])
def test_a_stopped_process_can_be_resumed(script, uninterrupted, tmp_path, monkeypatch, signum):
    """Ctrl-C and kill leave a checkpoint and say how to go on; doing so ends with the numbers of one run. The
    progress bar meanwhile shows steps, speed and the return of the ended games."""
    process = subprocess.Popen(
        [sys.executable, script.path, *script.words(**LONG, run_name="cut")], cwd=tmp_path, env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    metrics = tmp_path / "runs/cut/metrics.jsonl"
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_text().count("\n") >= 8:  # games have ended
            break
        time.sleep(0.02)
    process.send_signal(signum)
    said, shown = process.communicate(timeout=120)
    assert process.returncode == 128 + signum, shown
    assert f"{script.path} --resume runs/cut goes on" in said and "Traceback" not in shown
    step = rows(tmp_path / "runs/cut")[-1]["step"]
    assert f"stopped at step {step:,}" in said and 128 <= step < 384
    assert f"{step}/384" in shown and "steps/s" in shown and "return=" in shown
    monkeypatch.chdir(tmp_path)
    out = script.main(script.parse_args(["--resume", "runs/cut", "--no-compile", "--device", "cpu"]))
    assert out["step"] == 384 and rows(tmp_path / "runs/cut") == uninterrupted and len(uninterrupted) == 24


@pytest.mark.flags("resume")
@pytest.mark.parametrize("resume", ["runs/x", "runs/x/checkpoint.pt", "x"])
def test_a_finished_run_can_be_trained_longer(script, tmp_path, monkeypatch, capsys, resume):
    """--resume with a larger total goes on where the run ended, at the rate that the longer schedule has there, and
    says so; a run that was longer from the start has the same learning rates from there on."""
    monkeypatch.chdir(tmp_path)
    for name, total in (("x", 32), ("y", 64)):
        script.main(script.Args(**script.flags(**TINY | {"total_timesteps": total}, run_name=name)))
    words = ["--resume", resume, "--total-timesteps", "64", "--no-compile", "--device", "cpu"]
    out = script.main(script.parse_args(words))
    assert "32 steps become 64: schedules are of the longer run" in capsys.readouterr().out
    x, y = (rows(tmp_path / "runs" / name) for name in "xy")
    assert [row["step"] for row in x] == [16, 32, 48, 64] and out["step"] == 64
    rates = [[row["charts/learning_rate"] for row in run] for run in (x, y)]
    assert rates[0][2:] == rates[1][2:] and rates[0][1] == pytest.approx(1.25e-4)


@pytest.mark.flags("start_from")
def test_a_new_run_starts_from_trained_weights(script, folder, tmp_path, monkeypatch):
    """--start-from takes the weights of a checkpoint and nothing else: steps, optimiser, schedule, games and random
    numbers are those of a new run."""
    monkeypatch.chdir(tmp_path)
    flags = script.flags(**TINY | {"total_timesteps": 16, "learning_rate": 1e-12})
    taken = folder / "runs/taken/checkpoint.pt"
    new = script.main(script.Args(**flags, run_name="new", start_from=taken))
    script.main(script.Args(**flags, run_name="other"))
    a, b, c = (
        torch.load(path, weights_only=True)["parts"]
        for path in (taken, "runs/new/checkpoint.pt", "runs/other/checkpoint.pt")
    )
    for name, weight in b["agent"].items():
        torch.testing.assert_close(weight, a["agent"][name], atol=1e-9, rtol=0)
        assert not torch.allclose(weight, c["agent"][name], atol=1e-6, rtol=0) or "bias" not in name
    assert new["step"] == 16 and (not script.own or b["optimizer"]["step"] == 2)
    assert torch.equal(b["shuffle"], c["shuffle"]) and b["actions"] == c["actions"]
    assert [game["seed"] for game in b["games"]] == [game["seed"] for game in c["games"]]


@pytest.mark.flags("track")
def test_tracking_without_a_network(script, tmp_path):
    """--track with WANDB_MODE=offline needs no account and writes the metrics beside the run's own files."""
    pytest.importorskip("wandb")
    env = dict(WANDB_MODE="offline", WANDB_DIR=str(tmp_path), WANDB_SILENT="true", HOME=str(tmp_path))
    done = run(script, tmp_path, *script.words(**TINY, run_name="x", track=True), **env)
    assert done.returncode == 0, done.stderr
    logs = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(logs) == 1 and b"losses/policy_loss" in logs[0].read_bytes()
    assert len(rows(tmp_path / "runs/x")) == 2
