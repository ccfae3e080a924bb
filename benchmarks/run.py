"""Run a script over tasks and seeds in parallel processes and keep one small CSV and one config a run.

    python benchmarks/run.py ppo_continuous.py --tasks HalfCheetah-v5 Hopper-v5 --seeds 1 2 3 4 5 --workers 2
    python benchmarks/run.py my_copy.py --variant mine --tasks HalfCheetah-v5 --seeds 1 2 3 -- --gamma 0.98
    python benchmarks/run.py grpo_rlhf.py --tasks sort

Everything after `--` goes to the script. A task is the script's --env-id; for a script without that flag it
only names the folder of the results, and the completions of the first and last evaluation are kept too.
A finished run is not repeated; a failed one is named at the end. A text of this repository that differs from
its commit is refused: its results could not be traced. Results:
benchmarks/results/<script>/<task>/<variant->seed<k>.csv, and .json with flags, versions, file hash, commit.
"""

import argparse
import concurrent.futures
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
COLUMNS = (
    "step", "charts/episodic_return_100", "charts/episodic_return", "eval/episodic_return", "charts/SPS",
    "losses/approx_kl", "losses/entropy", "losses/explained_variance", "time/cpu",
)  # fmt: skip
LANGUAGE_COLUMNS = (  # those that a script has
    "step", "charts/reward", "eval/greedy", "eval/pass@1", "eval/pass@8", "charts/flat_groups",
    "charts/score", "charts/objective", "eval/score", "eval/true_preference", "eval/kl", "eval/distinct",
    "eval/distinct_2", "losses/kl", "charts/kl_coef", "losses/explained_variance", "reward_model/accuracy",
    "reward_model/noiseless", "charts/response_length", "charts/eos_share", "losses/entropy",
    "losses/approx_kl", "losses/clipfrac", "losses/mismatch", "losses/grad_norm", "charts/TPS",
    "time/rollout", "time/score", "time/update",
)  # fmt: skip
ROWS = 100  # kept of a run, evenly spaced, the last one always


def metrics_of(folder: Path) -> list[dict]:
    """A run's metrics.jsonl, the lines of one step joined: its evaluation comes after its checkpoint."""
    rows = {}
    for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        rows[row["step"]] = rows.get(row["step"], {}) | row
    return list(rows.values())


def thin(rows: list[dict]) -> list[dict]:
    """About ROWS rows, evenly spaced, with the last one and every evaluation."""
    stride = max(1, len(rows) // ROWS)
    evaluated = {"eval/episodic_return", "eval/greedy", "eval/score"}
    return [r for i, r in enumerate(rows, 1) if i % stride == 0 or i == len(rows) or evaluated & r.keys()]


def commit_of(script: Path) -> str | None:
    """The commit that holds this text of the script; None for a file that git does not track."""
    git = lambda *words: subprocess.run(
        ["git", "-C", script.parent, *words], capture_output=True, text=True
    ).stdout.strip()
    if shutil.which("git") is None or not git("ls-files", script):
        return None
    if git("status", "--porcelain", script):
        sys.exit(f"{script.name} differs from its commit: commit it, or copy it to another name")
    return git("log", "-1", "--format=%H", "--", script)


def run(
    script: Path, results: Path, task: str, seed: int, variant: str, flags: list[str], commit
) -> str | None:
    """Run one seed in a scratch folder; returns an error text, or None."""
    stem = results / script.stem / task.replace("/", "-") / f"{variant + '-' if variant else ''}seed{seed}"
    if stem.with_name(stem.name + ".csv").exists():
        return None
    with tempfile.TemporaryDirectory() as scratch:
        gymnasium = "env_id" in script.read_text()
        command = [sys.executable, str(script), "--seed", str(seed), "--run-name", "run", *flags]
        command += ["--env-id", task] if gymnasium else []
        start = time.perf_counter()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_MININTERVAL": "30"}
        done = subprocess.run(command, cwd=scratch, env=env, capture_output=True, text=True)
        seconds = time.perf_counter() - start
        if done.returncode:
            return f"{task} seed {seed}: exit {done.returncode}: {done.stderr[-500:]}"
        folder = Path(scratch) / "runs" / "run"
        rows = metrics_of(folder)
        config = (folder / "config.json").read_text().replace(str(Path.cwd()), ".")
        flags = [flag.replace(str(Path.cwd()), ".") for flag in flags]
        config = {**json.loads(config), "flags": flags, "seconds": round(seconds, 1), "commit": commit}
        completions = folder / "completions.jsonl"
        said = [json.loads(x) for x in completions.read_text().splitlines()] if completions.exists() else []
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_name(stem.name + ".json").write_text(json.dumps(config, indent=1) + "\n")
    columns = COLUMNS if gymnasium else [c for c in LANGUAGE_COLUMNS if any(c in row for row in rows)]
    write_csv(stem.with_name(stem.name + ".csv"), columns, thin(rows))
    if said:
        write_csv(
            stem.with_name(stem.name + ".completions.csv"),
            [c for c in ("step", "answer", "completion", "reward", "score", "ended") if c in said[0]],
            [row for row in said if row["step"] in (0, rows[-1]["step"])],
        )
    last = {name: rows[-1].get(name) for name in columns[1:4]}
    print(f"{stem.parent.name}/{stem.name}: {last}, {seconds:.0f} s", flush=True)


def write_csv(path: Path, columns, rows: list[dict]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            values = ("" if row.get(c) is None else row[c] for c in columns)
            values = (f"{v:.6g}" if isinstance(v, float) else str(v) for v in values)
            writer.writerow(v.replace("\r", "\\r") for v in values)  # csv does not quote it


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", type=Path)
    parser.add_argument("--tasks", nargs="+", required=True, help="--env-id of each run")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--variant", default="", help="prefix of the result files")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, flags = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    script, results = args.script.resolve(), args.results.resolve()
    commit = commit_of(script)
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        runs = [(task, seed) for seed in args.seeds for task in args.tasks]
        jobs = [
            pool.submit(run, script, results, *task_seed, args.variant, flags, commit) for task_seed in runs
        ]
        errors = [error for job in jobs if (error := job.result())]
    if errors:
        sys.exit("\n".join(errors))


if __name__ == "__main__":
    main()
