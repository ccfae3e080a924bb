"""Tables and figures of the language-model scripts, from what run.py and speed_grpo.py wrote; for report.py.

Reads results/<script>/<task>/seed<k>.csv, .json and .completions.csv, and results/speed/grpo-*.json. "Before"
and "after" are the evaluations at step 0 and at the last step, on the same held-out prompts.
A further script of this kind is one more entry of SCRIPTS.
"""

import csv
import functools
import json
import re
from pathlib import Path

import numpy as np
from scipy.stats import binomtest
from smollm2 import data

SCRIPTS = {"grpo": "grpo_rlhf"}  # the names of its tables begin with: script
EVALUATIONS = {"eval/greedy": "greedy", "eval/pass@1": "pass@1", "eval/pass@8": "pass@8"}
STYLE = {"svg.hashsalt": "ppo", "svg.fonttype": "none", "font.size": 9, "axes.grid": True,
         "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False}  # fmt: skip


def read(path: Path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) if rows else "No results yet.\n"


def load(folder: Path, completions=False) -> list[dict]:
    """The runs of a task by seed: config, (steps, values) of each metric and, if asked for, completions."""
    runs = []
    for path in (path for path in folder.glob("seed*.csv") if re.fullmatch(r"seed\d+", path.stem)):
        config, said = path.with_suffix(".json"), path.with_suffix(".completions.csv")
        if config.exists() and (said.exists() or not completions):
            run, rows = {"seed": int(path.stem[4:]), **json.loads(config.read_text())}, read(path)
            for name in rows[0]:
                found = [(float(row["step"]), float(row[name])) for row in rows if row[name]]
                run[name] = np.array(found).reshape(-1, 2).T
            runs.append(run | {"said": read(said) if completions else []})
    return sorted(runs, key=lambda run: run["seed"])


def extent(values: list[float], form=".0f") -> str:
    """Mean and range, or the one value that all seeds have."""
    mean, low, high = (f"{statistic(values):{form}}" for statistic in (np.mean, min, max))
    return mean if low == high else f"{mean} ({low} to {high})"


def change(pairs: list[tuple], form=".3f") -> str:
    """Before → after, of the seeds that have both."""
    known = [pair for pair in pairs if np.isfinite(pair).all()]
    return " → ".join(extent(values, form) for values in zip(*known)) or "-"


def by_seed(runs: list[dict], columns: dict) -> str:
    """A row a seed, and one of all if they are several; `columns`: name -> what makes values a text."""
    groups = {str(run["seed"]): [run] for run in runs} | ({"mean (range)": runs} if len(runs) > 1 else {})
    rows = [[key, *(text([run[name] for run in group]) for name, text in columns.items())]
            for key, group in groups.items()]  # fmt: skip
    return markdown(["seed", *columns], rows)


def sort_table(results: Path, script: str) -> str:
    columns = {f"{name}, before → after": change for name in EVALUATIONS.values()}
    runs = load(results / script / "sort")
    for run in runs:
        values = [run[name][1] for name in EVALUATIONS]
        run |= zip(columns, [x[[0, -1]] if x.size else (np.nan, np.nan) for x in values])
        run["steps"] = run["step"][1][-1]
    return by_seed(runs, columns | {"steps": extent, "seconds": extent})


def paired(before: np.ndarray, after: np.ndarray) -> tuple[float, float, float, float]:
    """Difference of two paired shares, its 95 % interval (Agresti and Min 2005), exact McNemar p value."""
    gained, lost, n = int((after & ~before).sum()), int((before & ~after).sum()), len(before)
    center = (gained - lost) / (n + 2)
    half = 1.96 * np.sqrt(((gained + lost + 1) / (n + 2) - center**2) / (n + 2))
    p = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    return (gained - lost) / n, max(center - half, -1.0), min(center + half, 1.0), p


def judge(run: dict) -> dict:
    """Of a run of chain_sum, what its tables show: numbers and (before, after)."""
    steps = sorted({int(row["step"]) for row in run["said"]})
    ends = [[row for row in run["said"] if int(row["step"]) == step] for step in steps]
    answers = [[row["answer"] for row in rows] for rows in ends]
    if run["args"]["reward"] != "number" or len(ends) != 2 or answers[0] != answers[1]:
        raise SystemExit(f"language.py: seed {run['seed']}: not --reward number on the same prompts twice")
    right, strict, bare = np.array([
        [(float(row["reward"] or 0) >= 1, row["completion"].strip() == row["answer"].strip(),
          re.fullmatch(r"\s*-?[0-9]+\s*", row["completion"]) is not None) for row in rows] for rows in ends
    ]).transpose(2, 0, 1)  # fmt: skip
    n, always, test = len(answers[0]), bare.all(0), data()[1]
    known = answers[0] == [row["answer"] for row in test[:n]]  # the problems of smollm2.py: these have digits
    digits = np.array([row["digits"] for row in test[:n]] if known else [0] * n)
    found = {"seed": run["seed"], "n": n, "n of these": always.sum(), "exactly the answer": strict.mean(1)}
    *found["difference [95 %]"], found["McNemar p"] = paired(*right)
    found |= {"accuracy, before → after": right.mean(1), "a bare integer": bare.mean(1)}
    for name, chosen in {"bare both times": always, "1 digit": digits == 1, "2 digits": digits == 2}.items():
        found[f"accuracy, {name}"] = right[:, chosen].mean(1) if chosen.any() else (np.nan, np.nan)
    for name, column in {"tokens": "charts/response_length", "entropy": "losses/entropy"}.items():
        tenths = np.array_split(run[column][1], min(10, run[column][1].size))  # of the run: responses sampled
        found[f"{name}, sampled"] = tenths[0].mean(), tenths[-1].mean()
    return found


def difference(found: list[tuple]) -> str:
    interval = f" [{found[0][1]:+.3f}, {found[0][2]:+.3f}]" if len(found) == 1 else ""
    return extent([x[0] for x in found], "+.3f") + interval


def smollm2_table(results: Path, script: str) -> str:
    """Two tables: the difference, and its parts. The seeds share their prompts: no test over all of them."""
    runs = [judge(run) for run in load(results / script / "chain_sum", completions=True)]
    total = {"n": extent, "accuracy, before → after": change, "difference [95 %]": difference}
    total["McNemar p"] = lambda values: f"{'≤ ' * (len(values) > 1)}{max(values):.2g}"
    names = "exactly the answer|a bare integer|accuracy, bare both times|n of these|accuracy, 1 digit|"
    names += "accuracy, 2 digits|tokens, sampled|entropy, sampled"
    parts = dict.fromkeys(names.split("|"), change) | {"n of these": extent}
    return by_seed(runs, total) + ("\n" + by_seed(runs, parts) if runs else "")


def speed_table(results: Path, script: str) -> str:
    """Every contender of every setting, from the summaries of speed_grpo.py; the floor is the bare model."""
    rows, notes = [], ""
    for path in sorted((results / "speed").glob(f"{script.removesuffix('_rlhf')}-*.json")):
        found = json.loads(path.read_text())
        for name, r in found["summary"].items():
            ratio = "{:.2f} ({:.2f} to {:.2f})".format(r["over_ours"], *r["over_ours_range"])
            cells = [f"{r['seconds']:.2f}", f"{r['cpu']:.2f}", ratio, f"{r['peak_mb']:.0f}", "-", "-", "-"]
            if "update" in r:
                cells[4:] = [f"{r['rollout']:.2f}", f"{r['score'] + r['update']:.2f}"]
                cells.append(f"{r['learn_tps']:.0f} / {r['floor_tps']:.0f}")
            rows.append([found["setting"], name, *cells])
        rounds, cpu = len(found["rounds"]), found["cpu"]
        notes += f"\n{found['setting']}: medians of {rounds} interleaved rounds, one core ({cpu}).\n"
    header = "setting||s a step|CPU s|its CPU time / ours (range)|peak memory, MB|generating, s|learning, s"
    return markdown([*header.split("|"), "learning / bare model, tokens/s"], rows) + notes


def band(axis, runs: list[dict], name: str, color: str, label: str) -> None:
    """Mean and range over the seeds."""
    if lines := [run[name] for run in runs if run[name].size]:
        grid = lines[0][0]
        grid = grid[(grid >= max(x[0] for x, _ in lines)) & (grid <= min(x[-1] for x, _ in lines))]
        values = np.array([np.interp(grid, *line) for line in lines])
        axis.plot(grid, values.mean(0), color=color, label=label)
        axis.fill_between(grid, values.min(0), values.max(0), color=color, alpha=0.2, lw=0)


def sort_panels(runs: list[dict], left, right) -> None:
    for color, (name, label) in zip(("C0", "C1", "C2"), EVALUATIONS.items()):
        band(left, runs, name, color, label)
    band(right, runs, "charts/reward", "C0", "training reward")
    left.set(title=f"sort, {len(runs)} seeds", ylabel="held-out accuracy")
    right.set(title="sampled responses", ylabel="training reward")


def smollm2_panels(runs: list[dict], axis) -> None:
    """The seeds' evaluations stand beside one another."""
    band(axis, runs, "charts/reward", "C0", "training reward")
    for place, run in enumerate(runs):
        steps, share = run["eval/greedy"]
        error = np.sqrt(share * (1 - share) / (len(run["said"]) / 2))
        steps = steps + (place - (len(runs) - 1) / 2) * steps[-1] / 150
        label = "held-out, greedy ± standard error" if place == 0 else None
        axis.errorbar(steps, share, error, fmt="o", ms=3, lw=1, color="C1", label=label)
    axis.set(title=f"SmolLM2-135M, sums, {len(runs)} seeds", ylabel="accuracy")


def curves(script: str, task: str, count: int, draw, results: Path, path: Path) -> bool:
    """Draw a figure of `count` panels, the same bytes each time; False if there is nothing to draw."""
    if not (runs := load(results / script / task, completions=task == "chain_sum")):
        return False
    import matplotlib.pyplot as plt  # here, as the tables do without it

    plt.rcParams |= STYLE
    figure, axes = plt.subplots(1, count, figsize=(4.2 * count, 2.9), squeeze=False)
    draw(runs, *axes[0])
    for axis in axes[0]:
        axis.set(xlabel="steps")
        if len(axis.get_legend_handles_labels()[1]) > 1:
            axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return True


TABLES, FIGURES = {}, {}
for prefix, script in SCRIPTS.items():
    for name, table in {"sort": sort_table, "smollm2": smollm2_table, "speed": speed_table}.items():
        TABLES[f"{prefix}_{name}"] = functools.partial(table, script=script)
    for name, how in {"sort": ("sort", 2, sort_panels), "smollm2": ("chain_sum", 1, smollm2_panels)}.items():
        FIGURES[f"{prefix}_{name}"] = functools.partial(curves, script, *how)
