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


def extent(values: list[float], form: str) -> str:
    """The value of one seed; mean and range of several."""
    text = f"{np.mean(values):{form}}"
    return text + (f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else "")


def change(pairs: list[tuple], form=".3f") -> str:
    """Before → after, of the seeds that have both."""
    known = [pair for pair in pairs if np.isfinite(pair).all()]
    return " → ".join(extent(values, form) for values in zip(*known)) or "-"


def by_seed(header: list[str], runs: list[dict], cells) -> str:
    """A row a seed, and one of all if they are several; `cells` makes those of a list of runs."""
    rows = [[str(run["seed"]), *cells([run])] for run in runs]
    return markdown(["seed", *header], rows + [["mean (range)", *cells(runs)]] * (len(runs) > 1))


def sort_table(results: Path, script: str) -> str:
    def cells(runs):
        ends = [[run[name][1][[0, -1]] for run in runs if run[name].size] for name in EVALUATIONS]
        steps = sorted({f"{run['step'][1][-1]:.0f}" for run in runs})
        return [*map(change, ends), " or ".join(steps), extent([run["seconds"] for run in runs], ".0f")]

    header = [f"{name}, before → after" for name in EVALUATIONS.values()]
    return by_seed([*header, "steps", "seconds"], load(results / script / "sort"), cells)


def paired(before: np.ndarray, after: np.ndarray) -> tuple[float, float, float, float]:
    """Difference of two paired shares, its 95 % interval (Agresti and Min 2005), exact McNemar p value."""
    gained, lost, n = int((after & ~before).sum()), int((before & ~after).sum()), len(before)
    center = (gained - lost) / (n + 2)
    half = 1.96 * np.sqrt(((gained + lost + 1) / (n + 2) - center**2) / (n + 2))
    p = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    return (gained - lost) / n, max(center - half, -1.0), min(center + half, 1.0), p


def judge(run: dict) -> dict:
    """Of a run of chain_sum: n, the paired difference and, under "parts", what it consists of."""
    steps = sorted({int(row["step"]) for row in run["said"]})
    ends = [[row for row in run["said"] if int(row["step"]) == step] for step in steps]
    answers = [[row["answer"] for row in rows] for rows in ends]
    if run["args"]["reward"] != "number" or len(ends) != 2 or answers[0] != answers[1]:
        raise SystemExit(f"language.py: seed {run['seed']}: not --reward number on the same prompts twice")
    right, strict, bare = np.array([
        [(float(row["reward"] or 0) >= 1, row["completion"].strip() == row["answer"].strip(),
          re.fullmatch(r"\s*-?[0-9]+\s*", row["completion"]) is not None) for row in rows] for rows in ends
    ]).transpose(2, 0, 1)  # fmt: skip
    test = data()[1][: len(answers[0])]  # tells the digits, if these are its problems
    digits = np.array([row["digits"] if answers[0] == [x["answer"] for x in test] else 0 for row in test])
    parts = {"exactly the answer": strict.mean(1), "a bare integer": bare.mean(1)}
    chosen = {"bare both times": bare.all(0), "1 digit": digits == 1, "2 digits": digits == 2}
    for name, which in chosen.items():
        parts[f"accuracy, {name}"] = right[:, which].mean(1) if which.any() else (np.nan, np.nan)
    for name, column in {"tokens": "charts/response_length", "entropy": "losses/entropy"}.items():
        values = run[column][1]  # of the sampled responses, over the first and the last tenth of the run
        tenth = -(-len(values) // 10)
        parts[f"{name}, sampled"] = values[:tenth].mean(), values[-tenth:].mean()
    counts = {"n": right.shape[1], "bare": int(bare.all(0).sum())}
    return counts | {"seed": run["seed"], "right": right.mean(1), "paired": paired(*right), "parts": parts}


def smollm2_table(results: Path, script: str) -> str:
    """Two tables: the difference, and its parts. The seeds share their prompts: no test over all of them."""
    runs = [judge(run) for run in load(results / script / "chain_sum", completions=True)]

    def total(runs):
        difference, low, high, p = zip(*(run["paired"] for run in runs))
        interval, most = ("", "≤ ") if len(runs) > 1 else (f" [{low[0]:+.3f}, {high[0]:+.3f}]", "")
        cells = [extent(difference, "+.3f") + interval, f"{most}{max(p):.2g}"]
        return [extent([run["n"] for run in runs], ".0f"), change([run["right"] for run in runs]), *cells]

    def parts(runs):
        cells = [change([run["parts"][name] for run in runs]) for name in runs[0]["parts"]]
        return [*cells[:3], extent([run["bare"] for run in runs], ".0f"), *cells[3:]]

    if not runs:
        return markdown([], [])
    names = list(runs[0]["parts"])
    header = ["n", "accuracy, before → after", "difference [95 %]", "McNemar p"]
    return f"{by_seed(header, runs, total)}\n{by_seed([*names[:3], 'n of these', *names[3:]], runs, parts)}"


def speed_table(results: Path, script: str) -> str:
    """Every contender of every setting, from the summaries of speed_grpo.py; the floor is the bare model."""
    rows, notes = [], ""
    for path in sorted((results / "speed").glob(f"{script.removesuffix('_rlhf')}-*.json")):
        found = json.loads(path.read_text())
        for name, r in found["summary"].items():
            ratio = f"{r['over_ours']:.2f} ({r['range'][0]:.2f} to {r['range'][1]:.2f})"
            cells = [f"{r['seconds']:.2f}", ratio, f"{r['peak_mb']:.0f}", *["-"] * 4]
            if "update" in r:
                cells[3:5] = [f"{x:.2f}" for x in (r["rollout"], r["score"] + r["update"])]
                cells[5:] = [f"{r[key]:.0f}" for key in ("learn_tps", "floor_tps")]
            rows.append([found["setting"], name, *cells])
        notes += f"\n{found['setting']}: medians of {len(found['rounds'])} interleaved rounds, one core"
        notes += f" ({found['cpu']}).\n"
    header = ["setting", "", "s a step", "its time / ours (range)", "peak memory, MB", "generating, s"]
    header += ["learning, s", "learning, tokens/s", "the same by the bare model, tokens/s"]
    return markdown(header, rows) + notes


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
    axis.set(title=f"SmolLM2-135M, chain_sum, {len(runs)} seeds", ylabel="accuracy")


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
