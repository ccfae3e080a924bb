"""Time grpo_rlhf.py against TRL's GRPOTrainer: seconds a step and peak memory, interleaved, on one core.

    python benchmarks/speed_grpo.py tiny --trl-python TRL/bin/python
    python benchmarks/speed_grpo.py smollm2 --folder FOLDER --trl-python TRL/bin/python

TRL is an environment as peer_trl.py tells, FOLDER what smollm2.py makes. Both sides load one folder, draw the
same prompts in the same order, stop at the same ids, and make as many optimiser updates of as many sequences.
A round runs each contender once, in a process of its own, with the round as seed; its number is the median
from one step's end to the next, the first two dropped (start-up, self-checks): reward, decoding and logging
count, evaluation and saving do not. Ratios are of CPU seconds, which hardly feel a busy machine, paired by
round; on a quiet one they are wall seconds. The other contenders are ours with a row for each response in
place of shared prompts (update only), without skipping what has advantage 0, and without both. "bare" is what
the model alone reaches on padded rows of one response, forward and backward (and forward, for old
log-probabilities, if there is more than one update); "tok/s" is what learning reaches on what is not skipped.
Writes results/speed/grpo-SETTING.json and prints a table.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SETTINGS = {
    "tiny": {"--steps": 25, "--num-prompts": 32, "--num-minibatches": 4, "--learning-rate": 1e-4,
             "--dtype": "float32", "--reward": "exact"},
    "smollm2": {"--steps": 6, "--num-prompts": 16, "--num-minibatches": 1, "--learning-rate": 1e-5,
                "--dtype": "bfloat16", "--reward": "number"},
}  # fmt: skip
COMMON = {"--group-size": 8, "--max-new-tokens": 8, "--num-eval": 8}
MICRO = {"tiny": 64, "smollm2": 32}  # sequences of a micro-batch, for TRL and for the floor
PLAIN = {"--eval-samples": 0, "--eval-every": 0, "--save-every": 10**6, "--device": "cpu"}  # ours
NAMES = {"ours": {}, "TRL": {}, "row a response": {"--row-tokens": 0}, "no skipping": {"skip": "no-skip"},
         "neither": {"--row-tokens": 0, "skip": "no-skip"}}  # fmt: skip
OURS = """
import json, resource, sys, time
import torch
import grpo_rlhf as grpo
out, skip, *flags = sys.argv[1:]
torch.set_num_threads(1)
if skip == "no-skip":  # too small to change a weight, but not zero
    advantages = grpo.group_advantages
    grpo.group_advantages = lambda *given: (found := advantages(*given)).where(found != 0, 1e-20)
log, ends, lines, peak = grpo.Run.log, [], [], []
def noted(run, metrics, shown=None):
    if "charts/TPS" in metrics:  # not an evaluation
        ends.append((time.perf_counter(), time.process_time()))
        lines.append(metrics)
        peak.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    log(run, metrics, shown)
grpo.Run.log = noted
grpo.main(grpo.command_line(flags))
seconds, cpu = ([after - before for before, after in zip(x, x[1:])] for x in zip(*ends))
result = {"seconds": seconds, "cpu": cpu, "peak_mb": round(peak[-1], 1)}
names = {"reward": "charts/reward", "length": "charts/response_length", "flat": "charts/flat_groups",
         "rollout": "time/rollout", "score": "time/score", "update": "time/update"}
result |= {key: [metrics[name] for metrics in lines] for key, name in names.items()}
result["versions"] = {name: sys.modules[name].__version__ for name in ("torch", "transformers")}
open(out, "w").write(json.dumps(result))
"""
FLOOR = """
import json, sys, time
import torch
import grpo_rlhf as grpo
out, model, dataset, dtype, rows, new = sys.argv[1:]
torch.set_num_threads(1)
tokenizer, model = grpo.load_model(model)
prompts = [grpo.encode(tokenizer, row["prompt"], False) for row in grpo.load_rows(dataset, 0, 0)[:256]]
width, new = max(map(len, prompts)), int(new)
ids = torch.randint(3, model.config.vocab_size, (int(rows), width + new - 1))
def forward():
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        logits = model(ids, use_cache=False, logits_to_keep=torch.arange(width - 1, width + new - 1)).logits
    return grpo.token_logps(logits, ids[:, -new:], 1.0).sum()
def both():
    model.zero_grad()
    forward().backward()
def timed(function, repeats=5):
    seconds = []
    for _ in range(repeats + 1):
        start = time.process_time()
        function()
        seconds.append(time.process_time() - start)
    return sorted(seconds[1:])[repeats // 2]
result = {"rows": int(rows), "width": ids.shape[1], "both": timed(both)}
with torch.no_grad():
    result["forward"] = timed(forward)
open(out, "w").write(json.dumps(result))
"""
TINY = """
import json, sys
import numpy as np, torch
import grpo_rlhf as grpo
torch.manual_seed(1)
rng, tokenizer = np.random.default_rng(1), grpo.digit_tokenizer()
model, rows = grpo.tiny_model(tokenizer), grpo.sort_rows(25_000, rng)
grpo.supervised_start(model, tokenizer, rows, rng)
for part in (model, tokenizer):
    part.save_pretrained(sys.argv[1] + "/model")
with open(sys.argv[1] + "/train.jsonl", "w") as file:
    file.writelines(json.dumps(row) + "\\n" for row in rows)
"""


def call(command: list, scratch: Path) -> None:
    """Run it on this process's core; the parent stays small, as a child's peak starts from its parent's."""
    env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = str(scratch)  # holds a copy of grpo_rlhf.py: all runs see one version
    command = [str(part) for part in command]
    done = subprocess.run(command, cwd=scratch, env=os.environ | env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"speed_grpo.py: {command[:2]} ended with {done.returncode}: {done.stderr.strip()[-500:]}")


def command(name: str, args, folder: Path, out: Path, seed: int) -> list:
    """What runs a contender; ours makes one step more, as its last one evaluates."""
    flags = SETTINGS[args.setting] | COMMON | {"--seed": seed}
    flags |= {"--model": folder / "model", "--dataset": folder / "train.jsonl"}
    steps, newline = args.steps or flags["--steps"], args.setting == "smollm2"
    if name == "TRL":
        flags |= {"--steps": steps, "--micro-batch": MICRO[args.setting], "--out": out}
        start = [args.trl_python, HERE / "peer_trl.py", "--no-chat-template", *["--stop-newline"] * newline]
    else:
        del flags["--steps"]
        flags |= PLAIN | {"--total-steps": steps + 1} | ({"--stop": "\\n"} if newline else {}) | NAMES[name]
        start = [sys.executable, "-c", OURS, out, flags.pop("skip", "skip"), "--no-chat-template"]
    return [*start, *(part for pair in flags.items() for part in pair)]


def typical(run: dict, key: str) -> float:
    return statistics.median(run[key][1:])


def summary(rounds: list[dict], floor: dict, setting: dict) -> dict:
    """Medians over the rounds of a contender; ratios of its time to that of ours, paired by round."""
    result, sequences = {}, setting["--num-prompts"] * COMMON["--group-size"]
    for name in rounds[0]:
        runs = [contenders[name] for contenders in rounds]
        row = {key: statistics.median(typical(run, key) for run in runs) for key in ("seconds", "cpu")}
        for key, label in (("cpu", "over_ours"), ("seconds", "wall_over_ours")):
            ratios = [typical(run, key) / typical(r["ours"], key) for run, r in zip(runs, rounds)]
            row |= {label: statistics.median(ratios), f"{label}_range": [min(ratios), max(ratios)]}
        row["peak_mb"] = statistics.median(run["peak_mb"] for run in runs)
        for key in ("length", "reward", "flat", "rollout", "score", "update"):
            if key in runs[0]:
                row[key] = statistics.median(statistics.mean(run[key][2:]) for run in runs)
        if "update" in row:  # the learning of as many sequences, by the bare model
            passes = floor["both"] + floor["forward"] * (setting["--num-minibatches"] > 1)
            used = sequences if NAMES[name].get("skip") else sequences * (1 - row["flat"])
            busy = row["cpu"] / row["seconds"]  # the split is of wall seconds
            row["learn_tps"] = used * row["length"] / (row["update"] + row["score"]) / busy
            row["floor_tps"] = floor["rows"] * row["length"] / passes
        result[name] = row
    return result


def show(table: dict) -> None:
    print(f"{'':15} {'s a step':>8} {'CPU s':>6} {'/ ours':>17} {'peak MB':>8} {'tokens':>6} "
          f"{'reward':>6} {'flat':>5} {'generate':>9} {'learn':>6} {'tok/s':>6} {'bare':>6}")  # fmt: skip
    for name, row in table.items():
        ratio = "{:.2f} ({:.2f}-{:.2f})".format(row["over_ours"], *row["over_ours_range"])
        line = f"{name:15} {row['seconds']:8.2f} {row['cpu']:6.2f} {ratio:>17} {row['peak_mb']:8.0f} "
        line += f"{row['length']:6.2f} {row['reward']:6.2f} {row['flat']:5.2f}"
        if "update" in row:
            line += f" {row['rollout']:9.2f} {row['update'] + row['score']:6.2f}"
            line += f" {row['learn_tps']:6.0f} {row['floor_tps']:6.0f}"
        print(line)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("setting", choices=SETTINGS)
    parser.add_argument("--trl-python", default="python", help="of an environment with TRL")
    parser.add_argument("--folder", type=Path, help="what benchmarks/smollm2.py made")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of a run, 4 at least")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), help="beside ours")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the results")
    args = parser.parse_args()
    if args.rounds < 1 or args.steps is not None and args.steps < 4:
        sys.exit("speed_grpo.py: --rounds must be at least 1 and --steps at least 4")
    if (args.setting == "smollm2") != (args.folder is not None):
        sys.exit("speed_grpo.py: smollm2 needs --folder, tiny makes its own")
    if shutil.which(args.trl_python) is None:
        sys.exit(f"speed_grpo.py: there is no interpreter {args.trl_python}")
    args.trl_python = os.path.abspath(shutil.which(args.trl_python))
    return args


def main():
    args = parse()
    os.sched_setaffinity(0, {args.core})  # inherited by every run
    cpu = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2].partition("\n")[0]
    found = {"setting": args.setting, "cpu": cpu or platform.machine(), "load_average": [os.getloadavg()[0]]}
    found["sha256"] = {name: hashlib.sha256((HERE / name).read_bytes()).hexdigest()
                       for name in ("../grpo_rlhf.py", "peer_trl.py", "speed_grpo.py")}  # fmt: skip
    setting, rounds = SETTINGS[args.setting], []
    names = [name for name in NAMES if name == "ours" or name in args.only]
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        shutil.copy(HERE.parent / "grpo_rlhf.py", scratch)
        out, folder = scratch / "out.json", scratch if args.folder is None else args.folder.resolve()
        if args.folder is None:
            call([sys.executable, "-c", TINY, scratch], scratch)
        bare = [folder / "model", folder / "train.jsonl", setting["--dtype"], MICRO[args.setting]]
        call([sys.executable, "-c", FLOOR, out, *bare, COMMON["--max-new-tokens"]], scratch)
        found["floor"] = json.loads(out.read_text())
        lines = {name: command(name, args, Path("FOLDER"), Path("OUT"), 1) for name in names}
        found["commands"] = {name: " ".join(["python", *("OURS" if part == OURS else str(part) for part in
                             line[1:])]).replace(f"{HERE}/", "") for name, line in lines.items()}  # fmt: skip
        for seed in range(1, args.rounds + 1):
            rounds.append({})
            for name in names:
                call(command(name, args, folder, out, seed), scratch)
                rounds[-1][name] = json.loads(out.read_text())
                found.setdefault("versions", {}).setdefault(name, rounds[-1][name].pop("versions", {}))
                cpu = typical(rounds[-1][name], "cpu")
                print(f"round {seed}, {name}: {cpu:.2f} CPU seconds a step", flush=True)
            found["load_average"].append(os.getloadavg()[0])
    found |= {"summary": summary(rounds, found["floor"], setting), "rounds": rounds}
    path = args.results / "speed" / f"grpo-{args.setting}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    show(found["summary"])


if __name__ == "__main__":
    main()
