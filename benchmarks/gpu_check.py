"""All four scripts for a few updates on a GPU: do they run, agree with the CPU, how fast, how much memory.

    bash benchmarks/gpu_check.sh                    # 8 minutes at most, no network; results/gpu/<device>.json
    DEVICE=cpu bash benchmarks/gpu_check.sh         # the same on a CPU, to try the check itself

A variant that fails is a result too: its error stands in the file. A CleanRL checkout (--cleanrl, with the
python of its own environment) is timed beside ppo_atari.py and ppo_continuous.py.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
BUDGET = 480  # seconds for everything
AGREE = ("policy_loss", "value_loss", "entropy", "approx_kl", "grad_norm")  # of the first update, CPU and GPU
PEAK = (
    "import atexit, runpy, sys, torch; sys.argv = sys.argv[1:];"
    "torch.cuda.is_available() and atexit.register(lambda:"
    " print('peak', torch.cuda.max_memory_allocated(), flush=True));"
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
QUIET = ["--eval-episodes", "0"]
VARIANTS = {  # script: flags of every run, flags of one update, {variant: flags}
    "ppo_continuous": (
        ["--total-timesteps", "40960", *QUIET],
        ["--total-timesteps", "2048", "--num-minibatches", "1", "--update-epochs", "1", *QUIET],
        {"compiled": [], "eager": ["--no-compile"]},
    ),
    "ppo_atari": (
        ["--total-timesteps", "20480", *QUIET],
        ["--total-timesteps", "1024", "--num-minibatches", "1", "--update-epochs", "1", *QUIET],
        {"fp32 compiled": [], "fp32 eager": ["--no-compile"], "bf16 compiled": ["--bf16"],
         "bf16 eager": ["--bf16", "--no-compile"]},
    ),
    "grpo_rlhf": (
        ["--total-steps", "20", "--num-eval", "32", "--eval-samples", "0"], None,
        {"float32": [], "bfloat16": ["--dtype", "bfloat16"]},
    ),
    "ppo_rlhf": (
        ["--total-steps", "10", "--num-eval", "32"], None,
        {"float32": [], "bfloat16": ["--dtype", "bfloat16"]},
    ),
}  # fmt: skip


def run(script: str, flags: list[str], device: str, name: str, scratch: str, left: float) -> dict:
    """One run: seconds, peak memory of the device, rows of its metrics; or its error."""
    command = [sys.executable, "-c", PEAK, str(HERE.parent / f"{script}.py"), *flags]
    command += ["--device", device, "--run-name", name]
    start = time.perf_counter()
    try:
        env = os.environ | {"TQDM_MININTERVAL": "30"}
        done = subprocess.run(command, cwd=scratch, env=env, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        return {"error": "no time left"}
    found = {"seconds": round(time.perf_counter() - start, 1)}
    peaks = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("peak ")]
    if peaks:
        found["peak_mb"] = int(peaks[-1]) // 2**20
    if done.returncode:
        return found | {"error": done.stderr.strip()[-500:].replace(str(HERE.parent), ".")}
    lines = (Path(scratch) / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return found | {"rows": [json.loads(line) for line in lines]}


def steady(rows: list[dict]) -> dict:
    """Speed over the second half of a run, as the script itself measures it."""
    if "charts/TPS" in rows[-1]:
        half = sorted(row["charts/TPS"] for row in rows[len(rows) // 2 :])
        return {"tokens_per_second": round(half[len(half) // 2])}
    middle, last = rows[(len(rows) - 1) // 2], rows[-1]
    seconds = last["step"] / last["charts/SPS"] - middle["step"] / middle["charts/SPS"]
    return {"steps_per_second": round((last["step"] - middle["step"]) / seconds)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scripts", nargs="+", default=list(VARIANTS))
    parser.add_argument("--cleanrl", type=Path, help="checkout of CleanRL")
    parser.add_argument("--cleanrl-python", help="python of an environment with gymnasium 0.29.1")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_check.py: there is no CUDA device")
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    end = time.perf_counter() + BUDGET
    result = {"device": name, "torch": torch.__version__, "cores": os.cpu_count(), "scripts": {}}
    with tempfile.TemporaryDirectory() as scratch:
        for script in args.scripts:
            flags, one_update, variants = VARIANTS[script]
            found = result["scripts"][script] = {}
            if one_update is not None:
                pair = []
                for i, device in enumerate(("cpu", args.device)):
                    flags_now, left = [*one_update, "--no-compile"], end - time.perf_counter()
                    pair.append(run(script, flags_now, device, f"{script}-first-{i}", scratch, left))
                errors = [p["error"] for p in pair if "error" in p]
                found["first update"] = errors or {
                    key: [p["rows"][0][f"losses/{key}"] for p in pair] for key in AGREE
                }
            for variant, extra in variants.items():
                place = f"{script}-{variant.replace(' ', '-')}"
                part = run(script, [*flags, *extra], args.device, place, scratch, end - time.perf_counter())
                rows = part.pop("rows", None)
                found[variant] = part | (steady(rows) if rows else {})
                print(script, variant, found[variant], flush=True)
            if script.endswith(("atari", "continuous")) and args.cleanrl and args.cleanrl_python:
                found["CleanRL"] = cleanrl(args, script, flags[1], scratch, end - time.perf_counter())
                print(script, "CleanRL", found["CleanRL"], flush=True)
    path = HERE / "results" / "gpu" / f"{name.replace(' ', '-')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path.relative_to(HERE.parent)}")


def cleanrl(args, script: str, steps: str, scratch: str, left: float) -> dict:
    """CleanRL's script, unmodified, on the same device: the speed that it prints last."""
    file = {"ppo_atari": "ppo_atari.py", "ppo_continuous": "ppo_continuous_action.py"}[script]
    start = (
        "import ale_py, runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [args.cleanrl_python, *(["-c", start] if script == "ppo_atari" else [])]
    command += [str(args.cleanrl.resolve() / "cleanrl" / file), "--total-timesteps", steps]
    command += ["--cuda" if args.device == "cuda" else "--no-cuda"]
    env = os.environ | {"PYTHONPATH": str(args.cleanrl.resolve())}
    try:
        done = subprocess.run(command, cwd=scratch, env=env, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        return {"error": "no time left"}
    speeds = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("SPS:")]
    return {"steps_per_second": int(speeds[-1])} if speeds else {"error": done.stderr.strip()[-300:]}


if __name__ == "__main__":
    main()
