"""Draw your own runs: return or reward, KL, entropy, clip fraction, explained variance, as far as they go.

    python benchmarks/plot.py runs/a runs/b                     # writes runs.svg
    python benchmarks/plot.py runs/*Hopper* --over time/cpu -o hopper.png

Runs that differ in their seed alone are one line, the mean, in a band from the lowest to the highest.
"""

import argparse
import json
import sys
from pathlib import Path

try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
except ImportError as error:
    sys.exit(f"plot.py: {error}: pip install -r benchmarks/requirements.txt")
import numpy as np
from run import metrics_of

PANELS = {  # title: metrics, of which a run has one
    "return or reward": ("charts/episodic_return_100", "charts/reward", "charts/score"),
    "evaluation": ("eval/episodic_return", "eval/greedy", "eval/score"),
    "KL to the start, nats a response": ("losses/kl", "losses/ref_kl"),
    "approximate KL of an update": ("losses/approx_kl",),
    "entropy": ("losses/entropy",),
    "clip fraction": ("losses/clipfrac",),
    "explained variance": ("losses/explained_variance",),
}
NOT_SETTINGS = ("seed", "run_name", "resume", "device", "track", "wandb_project_name")


def load(folder: Path) -> dict:
    """A run: its settings without the seed, and its rows."""
    try:
        config = json.loads((folder / "config.json").read_text())
        rows = metrics_of(folder)
    except (OSError, json.JSONDecodeError) as error:
        sys.exit(f"plot.py: {folder} is no folder of a run: {error}")
    args = {name: value for name, value in config["args"].items() if name not in NOT_SETTINGS}
    return {"name": folder.name, "args": args, "text": config["sha256"], "rows": rows}


def groups(runs: list[dict]) -> dict[str, list[dict]]:
    """Runs that differ in their seed alone, under a name that says what the groups differ in."""
    found = []
    for run in runs:
        same = [g for g in found if (g[0]["args"], g[0]["text"]) == (run["args"], run["text"])]
        same[0].append(run) if same else found.append([run])
    first, named = found[0][0]["args"], {}
    for group in found:
        args = group[0]["args"]
        differ = [
            f"{n} {args.get(n)}" for n in args if any(args.get(n) != g[0]["args"].get(n) for g in found)
        ]
        name = ", ".join(differ) if args.keys() == first.keys() and len(found) > 1 else ""
        name = name if name and len(name) < 60 else group[0]["name"]
        name += f" ({len(group)} seeds)" if len(group) > 1 else ""
        named[name if name not in named else group[0]["name"]] = group
    return named


def curve(run: dict, names: tuple, over: str) -> tuple[np.ndarray, np.ndarray]:
    """Where the run was measured, and what; empty if it was not."""
    name = next((name for name in names if any(row.get(name) is not None for row in run["rows"])), None)
    rows = [row for row in run["rows"] if row.get(name) is not None and row.get(over) is not None]
    return np.array([row[over] for row in rows]), np.array([row[name] for row in rows])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders under runs/")
    parser.add_argument("--over", default="step", help="the horizontal axis, such as step or time/cpu")
    parser.add_argument("-o", "--out", type=Path, default=Path("runs.svg"))
    args = parser.parse_args()
    named = groups([load(folder) for folder in args.runs])
    curves = {}
    for title, names in PANELS.items():
        lines = {name: [curve(run, names, args.over) for run in group] for name, group in named.items()}
        curves[title] = {name: [line for line in found if len(line[0])] for name, found in lines.items()}
    curves = {title: found for title, found in curves.items() if any(found.values())}
    if not curves:
        sys.exit(f"plot.py: the runs have no metrics over {args.over}")
    figure, axes = plt.subplots(1, len(curves), figsize=(4.2 * len(curves), 3.2), squeeze=False)
    for axis, (title, found) in zip(axes[0], curves.items()):
        for color, (name, lines) in enumerate(found.items()):
            if not lines:
                continue
            x = np.unique(np.concatenate([x for x, _ in lines]))
            x = x[(x >= max(x[0] for x, _ in lines)) & (x <= min(x[-1] for x, _ in lines))]  # all have
            y = np.array([np.interp(x, *line) for line in lines])
            marker = "o" if len(x) == 1 else None
            axis.plot(x, y.mean(0), color=f"C{color}", label=name, marker=marker, linewidth=1.4)
            axis.fill_between(x, y.min(0), y.max(0), color=f"C{color}", alpha=0.2, linewidth=0)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(args.over, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    try:
        figure.savefig(args.out, dpi=120)
    except (OSError, ValueError) as error:
        sys.exit(f"plot.py: cannot write {args.out}: {error}")
    print(f"{args.out}: {', '.join(named)}")


if __name__ == "__main__":
    main()
