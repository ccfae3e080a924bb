"""All four scripts for a few updates on a GPU: do they run, agree with the CPU, how fast, how much memory.

    bash benchmarks/gpu_check.sh                    # 8 minutes at most, no network; results/gpu/<device>.json
    bash benchmarks/gpu_check.sh --scripts ppo_atari ppo_continuous      # in parts; the others' results stay
    DEVICE=cpu bash benchmarks/gpu_check.sh         # the same on a CPU, to try the check itself

A variant that fails is a result too: its error stands in the file. Checkouts of CleanRL and LeanRL
(--cleanrl, --leanrl, each with the python of its own environment) are timed beside ppo_atari.py and
ppo_continuous.py; vLLM beside the language scripts' own sampling, where it is installed.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from run import metrics_of
from speed import WITH_ALE

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
GRAPHS = "TORCHINDUCTOR_CUDAGRAPHS=1"  # torch's own switch: compiled functions are replayed as CUDA graphs
VARIANTS = {  # script: flags of every run, flags of one update, {variant: flags and environment}
    "ppo_continuous": (
        ["--total-timesteps", "40960", *QUIET],
        ["--total-timesteps", "2048", "--num-minibatches", "1", "--update-epochs", "1", *QUIET],
        {"compiled": [], "CUDA graphs": [GRAPHS], "eager": ["--no-compile"]},
    ),
    "ppo_atari": (
        ["--total-timesteps", "20480", *QUIET],
        ["--total-timesteps", "1024", "--num-minibatches", "1", "--update-epochs", "1", *QUIET],
        {
            "fp32 compiled": [], "fp32 CUDA graphs": [GRAPHS], "fp32 eager": ["--no-compile"],
            "bf16 compiled": ["--bf16"], "bf16 CUDA graphs": ["--bf16", GRAPHS],
        },
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
# vLLM wants a model in a folder: the one that the float32 run leaves, with prompts of the same kind.
ENGINE = {
    "grpo_rlhf": (
        "--model runs/grpo_rlhf-float32/model --dataset sort.jsonl --num-prompts 32 --num-minibatches 4 "
        "--max-new-tokens 8"
    ).split(),
    "ppo_rlhf": (
        "--policy runs/ppo_rlhf-float32/model --prompts world.jsonl --reward short.py:short --temperature 1 "
        "--max-new-tokens 20 --update-epochs 2 --num-minibatches 4"
    ).split(),
}
PEERS = {  # name: folder in its checkout, {script: file, flags}
    "CleanRL": ("cleanrl", {"ppo_atari": ["ppo_atari.py"], "ppo_continuous": ["ppo_continuous_action.py"]}),
    "LeanRL": ("leanrl", {
        "ppo_atari": ["ppo_atari_envpool_torchcompile.py", "--compile", "--cudagraphs"],
        "ppo_continuous": ["ppo_continuous_action_torchcompile.py", "--compile", "--cudagraphs"],
    }),
}  # fmt: skip


def run(script: str, flags: list[str], device: str, name: str, scratch: str, left: float) -> dict:
    """One run: seconds, peak memory of the device, rows of its metrics; or its error."""
    settings = dict(flag.split("=") for flag in flags if re.fullmatch(r"[A-Z_]+=\w+", flag))
    flags = [flag for flag in flags if flag.partition("=")[0] not in settings]
    command = [sys.executable, "-c", PEAK, str(HERE.parent / f"{script}.py"), *flags]
    command += ["--device", device, "--run-name", name]
    start = time.perf_counter()
    try:
        env = os.environ | {"TQDM_MININTERVAL": "30"} | settings
        done = subprocess.run(command, cwd=scratch, env=env, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        return {"error": "no time left"}
    found = {"seconds": round(time.perf_counter() - start, 1)}
    peaks = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("peak ")]
    if peaks:
        found["peak_mb"] = int(peaks[-1]) // 2**20
    if done.returncode:
        return found | {"error": done.stderr.strip()[-500:].replace(str(HERE.parent), ".")}
    return found | {"rows": metrics_of(Path(scratch) / "runs" / name)}


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
    for peer in PEERS:
        parser.add_argument(f"--{peer.lower()}", type=Path, help=f"checkout of {peer}")
        parser.add_argument(f"--{peer.lower()}-python", help="python of an environment with its requirements")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_check.py: there is no CUDA device")
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    end = time.perf_counter() + BUDGET
    result = {"device": name, "torch": torch.__version__, "cores": os.cpu_count(), "scripts": {}}
    with tempfile.TemporaryDirectory() as scratch:
        for file, text in files().items():
            (Path(scratch) / file).write_text(text)
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
            if script in ENGINE and importlib.util.find_spec("vllm"):
                vllm = [*ENGINE[script], "--rollout", "vllm"]
                variants = variants | {"vLLM": vllm, "vLLM bfloat16": [*vllm, "--dtype", "bfloat16"]}
            for variant, extra in variants.items():
                place = f"{script}-{variant.replace(' ', '-')}"
                part = run(script, [*flags, *extra], args.device, place, scratch, end - time.perf_counter())
                rows = part.pop("rows", None)
                found[variant] = part | (steady(rows) if rows else {})
                print(script, variant, found[variant], flush=True)
            for peer in PEERS if one_update is not None else ():
                checkout, python = (getattr(args, peer.lower() + kind) for kind in ("", "_python"))
                if checkout and python:
                    left = end - time.perf_counter()
                    found[peer] = beside(peer, checkout, python, script, flags[1], args.device, scratch, left)
                    print(script, peer, found[peer], flush=True)
    path = HERE / "results" / "gpu" / f"{name.replace(' ', '-')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        result["scripts"] = json.loads(path.read_text())["scripts"] | result["scripts"]
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path.relative_to(HERE.parent)}")


def files() -> dict[str, str]:
    """What the runs with vLLM read: prompts of the two built-in tasks, and a reward."""
    sys.path.insert(0, str(HERE.parent))
    import grpo_rlhf as grpo
    import ppo_rlhf as ppo

    rng = np.random.default_rng(0)
    rows = {"sort.jsonl": grpo.sort_rows(1500, rng), "world.jsonl": ppo.prompts_of(ppo.Args(), rng)[0][:1500]}
    found = {name: "".join(json.dumps(row) + "\n" for row in part) for name, part in rows.items()}
    return found | {
        "short.py": "def short(prompts, texts, rows): return [-float(len(text)) for text in texts]\n"
    }


def beside(peer, checkout, python, script, steps, device, scratch, left) -> dict:
    """A peer's script, unmodified, on the same device: the speed that it prints last."""
    folder, scripts = PEERS[peer]
    file, *flags = scripts[script]
    command = [python, *(["-c", WITH_ALE] if script == "ppo_atari" and peer == "CleanRL" else [])]
    command += [str(checkout.resolve() / folder / file), "--total-timesteps", steps, *flags]
    command += ["--cuda" if device == "cuda" else "--no-cuda"]
    env = os.environ | {"PYTHONPATH": str(checkout.resolve()), "WANDB_MODE": "disabled"}
    try:
        done = subprocess.run(command, cwd=scratch, env=env, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        return {"error": "no time left"}
    speeds = re.findall(r"(?:SPS|speed): *([0-9.]+)", done.stdout + done.stderr)
    return {"steps_per_second": round(float(speeds[-1]))} if speeds else {"error": done.stderr.strip()[-300:]}


if __name__ == "__main__":
    main()
