"""Time a script against its peers, in interleaved runs on one core.

    python benchmarks/speed.py ppo_continuous.py --steps 40960 --rounds 3 \\
        --sb3-python SB3_ENVIRONMENT/bin/python \\
        --cleanrl CHECKOUT --cleanrl-python CLEANRL_ENVIRONMENT/bin/python
    python benchmarks/speed.py ppo_atari.py --steps 8192 \\
        --cleanrl CHECKOUT --cleanrl-python CLEANRL_ENVIRONMENT/bin/python

Each round runs each contender twice as a whole process, over a few rollouts and over --steps environment
steps. Their difference is the steady state, free of start-up and compilation; CPU time hardly feels a busy
machine:

    steady = (long - short) / (CPU seconds of long - CPU seconds of short)
    1M steps = CPU seconds of short + (1e6 - short) / steady

A first run of each, on an empty compile cache, warms up. CleanRL's script runs unmodified, gymnasium 0.29.1;
a peer without paths is skipped. The floor is the environment alone with random actions. ppo_atari.py is also
timed with --bf16.
Writes results/speed/<script>-<env>.csv, a row a contender and round, and .json: machine, commands, versions.
"""

import argparse
import csv
import hashlib
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
MILLION = 1_000_000
SETTINGS = {  # script: steps of a rollout (CleanRL drops what exceeds whole ones), environment, CleanRL's
    "ppo_continuous": (2048, "HalfCheetah-v5", "ppo_continuous_action.py", "HalfCheetah-v4"),
    "ppo_atari": (1024, "ALE/Breakout-v5", "ppo_atari.py", "BreakoutNoFrameskip-v4"),
}
WITH_ALE = """
import ale_py, runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
COLUMNS = "round steps_short steps_long cpu_short wall_short cpu_long wall_long steady_sps".split()
FLOOR = """
import sys, gymnasium, numpy
env, steps = gymnasium.make(sys.argv[1]), int(sys.argv[2])
low, high, dtype = env.action_space.low, env.action_space.high, env.action_space.dtype
env.reset(seed=int(sys.argv[3]))
for action in numpy.random.default_rng(0).uniform(low, high, (steps, *low.shape)).astype(dtype):
    _, _, terminated, truncated, _ = env.step(action)
    (terminated or truncated) and env.reset()
"""
FLOOR_ATARI = """
import sys, numpy, gymnasium, ale_py.vector_env
game, steps = gymnasium.spec(sys.argv[1]).kwargs["game"], int(sys.argv[2]) // 8
env = ale_py.vector_env.AtariVectorEnv(game, 8, life_loss_info=True, reward_clipping=False)
env.reset(seed=int(sys.argv[3]))
for action in numpy.random.default_rng(0).integers(env.single_action_space.n, size=(steps, 8)):
    env.step(action)
"""
VERSIONS = """
import importlib.metadata, platform
names = "torch numpy gymnasium mujoco ale-py stable_baselines3".split()
found = sorted(f"{d.name} {d.version}" for d in importlib.metadata.distributions() if d.name in names)
print(f"python {platform.python_version()}", *found, sep=", ", end="")
"""


def interpreter(path: str) -> str:
    """Absolute, as runs start in other folders; not resolved, as a virtual environment's python is a link."""
    return os.path.abspath(shutil.which(path) or sys.exit(f"speed.py: there is no interpreter {path}"))


def contenders(args) -> dict[str, tuple[list[str], str]]:
    """Name -> command, with {steps} and {seed} to fill in, and environment; the script itself comes first."""
    flags = ["--total-timesteps", "{steps}", "--seed", "{seed}", "--env-id"]
    plain, atari = [*flags, args.env_id, "--eval-episodes", "0"], args.setting == "ppo_atari"
    command = [sys.executable, str(args.script.resolve()), *plain]
    found = {args.script.stem: (command, args.env_id)}
    if atari:
        found[f"{args.script.stem} --bf16"] = [*command, "--bf16"], args.env_id
    if args.sb3_python and not atari:
        found["SB3"] = [interpreter(args.sb3_python), str(HERE / "peer_sb3.py"), *plain], args.env_id
    if args.cleanrl and args.cleanrl_python:
        script = str(args.cleanrl.resolve() / "cleanrl" / SETTINGS[args.setting][2])
        start = [interpreter(args.cleanrl_python), *(["-c", WITH_ALE] if atari else []), script]
        found["CleanRL"] = [*start, *flags, args.cleanrl_env_id], args.cleanrl_env_id
    for name in (name for name in ("SB3", "CleanRL") if name not in found):
        print(
            f"{name} is skipped: "
            + ("only for MuJoCo." if name == "SB3" and atari else "no paths are given.")
        )
    for command, _ in found.values():
        if not Path(script := script_of(command)).is_file():
            sys.exit(f"speed.py: there is no script {script}")
    floor = [sys.executable, "-c", FLOOR_ATARI if atari else FLOOR, args.env_id, "{steps}", "{seed}"]
    return found | {"environment alone": (floor, args.env_id)}


def script_of(command: list[str]) -> str:
    return command[3] if command[1] == "-c" else command[1]


def measure(name: str, command: list[str], steps: int, seed: int, cache: str, path="") -> tuple[float, float]:
    """CPU and wall seconds of one process, with its children, in a scratch folder of its own."""
    command = [part.replace("{steps}", str(steps)).replace("{seed}", str(seed)) for part in command]
    env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TQDM_MININTERVAL": "30", "TMPDIR": cache}
    env |= {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as scratch:
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, cwd=scratch, env=os.environ | env, capture_output=True, text=True)
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"speed.py: {name} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def summary(rows: list[dict]) -> list[dict]:
    """Medians over the rounds of each contender; `ratios` to the first one are paired by round."""
    by_name, result = {}, []
    for row in rows:
        short, cpu, steady = int(row["steps_short"]), float(row["cpu_short"]), float(row["steady_sps"])
        numbers = (steady, cpu - short / steady, cpu + (MILLION - short) / steady)
        by_name.setdefault((row["contender"], row["env"]), []).append(numbers)
    ours = next(iter(by_name.values()))
    for (name, env), values in by_name.items():
        medians = dict(zip(("steady", "start", "million"), map(statistics.median, zip(*values))))
        ratios = sorted(a[0] / b[0] for a, b in zip(ours, values))
        result.append({"contender": name, "env": env, "ratios": ratios} | medians)
    return result


def describe(command: list[str]) -> dict:
    """Command without this machine's folders, hash of the script, versions."""
    floor = command[1] == "-c" and command[2] != WITH_ALE
    script = Path(__file__ if floor else script_of(command))
    flags = command[3:] if floor else command[command.index(str(script)) + 1 :]
    return {"command": " ".join(["python", "-c FLOOR" if floor else script.name, *flags]),
            "sha256": hashlib.sha256(script.read_bytes()).hexdigest(),
            "versions": subprocess.check_output([command[0], "-c", VERSIONS], text=True)}  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("script", type=Path)
    parser.add_argument("--env-id", help="default: HalfCheetah-v5, for an Atari script ALE/Breakout-v5")
    parser.add_argument("--steps", type=int, help="length of the long run; default: 20 rollouts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sb3-python", help="python of an environment with requirements.txt")
    parser.add_argument("--cleanrl", type=Path, help="checkout of CleanRL")
    parser.add_argument("--cleanrl-python", help="python of an environment with gymnasium 0.29.1")
    parser.add_argument("--cleanrl-env-id", help="default: HalfCheetah-v4, BreakoutNoFrameskip-v4")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the results")
    args = parser.parse_args()
    if not args.script.is_file():
        sys.exit(f"speed.py: there is no script {args.script}")
    args.setting = "ppo_atari" if "AtariVectorEnv" in args.script.read_text() else "ppo_continuous"
    rollout, env_id, _, cleanrl_env_id = SETTINGS[args.setting]
    args.env_id, args.cleanrl_env_id = args.env_id or env_id, args.cleanrl_env_id or cleanrl_env_id
    args.short, args.steps = 2 * rollout, args.steps or 20 * rollout
    if args.steps % rollout or args.steps <= args.short or args.rounds < 1:
        sys.exit(f"speed.py: --steps must be a multiple of {rollout} over {args.short}, --rounds at least 1")
    return args


def main():
    args = parse()
    found, rows = contenders(args), []
    described = {name: describe(command) for name, (command, _) in found.items()}
    model = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2].partition("\n")[0]
    machine = {"cpu": model or platform.machine(), "cores": os.cpu_count(), "cores_used": 1,
               "load_average": os.getloadavg()[0], "contenders": described}  # fmt: skip
    path = str(args.cleanrl.resolve()) if args.cleanrl else ""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # inherited by every run
    with tempfile.TemporaryDirectory() as cache:
        for name, (command, _) in found.items():
            cpu, wall = measure(name, command, args.short, 0, cache, path)
            described[name] |= {"first_cpu": round(cpu, 2), "first_wall": round(wall, 2)}
        for seed in range(1, args.rounds + 1):
            for name, (command, env_id) in found.items():
                both = (args.short, args.steps)
                short, long = (measure(name, command, steps, seed, cache, path) for steps in both)
                steady = (args.steps - args.short) / (long[0] - short[0])
                rows.append({"contender": name, "env": env_id, "versions": described[name]["versions"]})
                numbers = (seed, args.short, args.steps, *(round(x, 3) for x in (*short, *long, steady)))
                rows[-1] |= zip(COLUMNS, numbers)
                print(f"round {seed}, {name}: {steady:.0f} steps/s", flush=True)
    stem = args.results / "speed" / f"{args.script.stem}-{args.env_id.replace('/', '-')}"
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_name(stem.name + ".json").write_text(json.dumps(machine, indent=1) + "\n")
    with open(stem.with_name(stem.name + ".csv"), "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([rows[0], *(row.values() for row in rows)])
    table = summary(rows)
    print(f"{'medians':18} {'steps/s':>8} {'ours / it':>18} {'start, s':>9} {'1M steps, s':>12}")
    for r in table:
        ratio = f"{statistics.median(r['ratios']):.2f} ({r['ratios'][0]:.2f}-{r['ratios'][-1]:.2f})"
        print(f"{r['contender']:18} {r['steady']:8.0f} {ratio:>18} {r['start']:9.1f} {r['million']:12.0f}")
    cold = described[args.script.stem]["first_cpu"] - args.short / table[0]["steady"]
    print(f"{args.script.stem} starts in {cold:.1f} s (CPU) with an empty compile cache")


if __name__ == "__main__":
    main()
