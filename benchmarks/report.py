"""Tables and learning curves from the results that run.py and speed.py wrote; language.py has some of them.

    python benchmarks/report.py                             # benchmarks/report/: a page and its figures
    python benchmarks/report.py --readme README.md          # renew the tables of the README
    python benchmarks/report.py --readme README.md --check  # exit 1 if they are not what the results say

A table of the README stands between `<!-- table:NAME -->` and `<!-- end -->`; the names are those of TABLES.
Reads results/<script>/<task>/<variant->seed<k>.csv and results/speed/*.csv; what is missing does not appear.
"""

import argparse
import functools
import json
import re
import statistics
import sys
from pathlib import Path

import language
import numpy as np
from language import STYLE, markdown, read
from scipy.stats import bootstrap, trim_mean
from speed import summary

HERE = Path(__file__).resolve().parent
OURS, DEFAULT, CLEANRL = "ppo_continuous", "logstd-1", "logstd0"  # variants: our default, CleanRL's value
MAIN = ["HalfCheetah-v5", "Hopper-v5", "Walker2d-v5"]
GROUPS = {  # name: tasks, {label: (script, variant)}
    "main": (MAIN, {"default": (OURS, DEFAULT), "--log-std-init 0": (OURS, CLEANRL)}),
    "peer": (MAIN, {"--log-std-init 0": (OURS, f"{CLEANRL}-150k"), "SB3": ("peer_sb3", "")}),
    "time_limit": (MAIN[:1], {
        "time limit bootstraps": (OURS, CLEANRL), "time limit ends": ("time_limit_ends", CLEANRL)}),
    "log_std": ([*MAIN, "Ant-v5", "Swimmer-v5", "InvertedDoublePendulum-v5"], {
        f"log std {value}": (OURS, f"logstd{value}") for value in ("0", "-0.5", "-1")}),
    "atari": (["ALE-Pong-v5", "ALE-Breakout-v5"], {"--bf16": ("ppo_atari", "bf16")}),
}  # fmt: skip
# CleanRL, docs/benchmark/ppo_continuous_action.md: gymnasium's v4 tasks, 1M steps, 3 seeds.
PUBLISHED = {"HalfCheetah": "1442.64 ± 46.03", "Hopper": "2382.86 ± 271.74", "Walker2d": "2287.95 ± 571.78"}
# Mean return of random actions, 20 episodes (gymnasium 1.4.0, mujoco 4.0.0): env.action_space.seed(0), then
# for k in range(20): env.reset(seed=k) and env.action_space.sample() to the end of the episode.
RANDOM = {"HalfCheetah-v5": -260.8, "Hopper-v5": 24.8, "Walker2d-v5": 2.2, "Ant-v5": -19.5,
          "Swimmer-v5": -3.1, "InvertedDoublePendulum-v5": 52.4}  # fmt: skip
COLUMNS = {"step": "step", "training": "charts/episodic_return_100", "evaluation": "eval/episodic_return"}
KEYS = ("training", "evaluation")
iqm = functools.partial(trim_mean, proportiontocut=0.25, axis=0)  # interquartile mean


def variant_of(path: Path) -> str:
    return re.sub(r"-?seed\d+$", "", path.stem)


def load(folder: Path, variant: str) -> list[dict]:
    """The runs of one task and variant, as arrays of step, training and evaluation return."""
    tables = [read(path) for path in sorted(folder.glob("*seed*.csv")) if variant_of(path) == variant]
    return [{key: np.array([float(row[column] or "nan") for row in rows]) for key, column in COLUMNS.items()}
            for rows in tables if rows]  # fmt: skip


def collect(results: Path, tasks: list[str], series: dict) -> dict[str, dict[str, list[dict]]]:
    """Task -> label -> runs. A run of another length than the task's first is no comparison and left out."""
    found = {}
    for task in tasks:
        for label, (script, variant) in series.items():
            runs = load(results / script / task, variant)
            if task in found:
                length = next(iter(found[task].values()))[0]["step"][-1]
                runs = [run for run in runs if abs(run["step"][-1] / length - 1) < 0.02]
            if runs:
                found.setdefault(task, {})[label] = runs
    return found


def final(runs: list[dict], key: str) -> np.ndarray:
    """The last value of each run that has one."""
    return np.array([x[np.isfinite(x)][-1] for x in (run[key] for run in runs) if np.isfinite(x).any()])


def number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}"


def steps(runs: list[dict]) -> str:
    return f"{runs[0]['step'][-1] / 1e6:.2g}M"


def estimate(values: np.ndarray, statistic) -> str:
    """Statistic and its 95 % bootstrap interval (percentile); below five seeds, their number and range."""
    if not len(values):
        return "-"
    text = number(statistic(values, axis=0))
    if len(values) < 5:
        extent = f", {number(min(values))} to {number(max(values))}" if len(values) > 1 else ""
        return f"{text} (n = {len(values)}{extent if statistic is np.mean else ''})"
    interval = bootstrap((values,), statistic, method="percentile", rng=0).confidence_interval
    return f"{text} [{number(interval.low)}, {number(interval.high)}]"


def stratified(strata: list[np.ndarray]) -> str:
    """IQM over all tasks and seeds, and its 95 % interval from resampling the seeds of each task."""
    rng = np.random.default_rng(0)
    samples = np.concatenate([rng.choice(x, (10_000, len(x))) for x in strata], axis=1)
    low, high = np.percentile(iqm(samples, axis=1), [2.5, 97.5])
    return f"{iqm(np.concatenate(strata)):.2f} [{low:.2f}, {high:.2f}]"


def score_rows(results: Path, tasks: list[str], series: dict, published=False) -> list[list[str]]:
    rows = []
    for task, labels in collect(results, tasks, series).items():
        for label, runs in labels.items():
            cells = [estimate(final(runs, key), statistic) for key in KEYS for statistic in (np.mean, iqm)]
            rows.append([task, label, steps(runs), str(len(runs)), *cells])
        name = task.removesuffix("-v5")
        if published and name in PUBLISHED:
            rows.append([f"{name}-v4", "CleanRL, published", "1M", "3", PUBLISHED[name], "-", "-", "-"])
    return rows


def score_table(rows: list[list[str]]) -> str:
    columns = [f"{key}, {name}" for key in KEYS for name in ("mean", "IQM")]
    return markdown(["task", "run", "steps", "seeds", *columns], rows)


def all_rows(results: Path) -> list[list[str]]:
    """Every task and variant, whatever its length."""
    rows = []
    for script in (OURS, "time_limit_ends", "peer_sb3", "ppo_atari"):
        for task, name in {(p.parent.name, variant_of(p)) for p in (results / script).glob("*/*seed*.csv")}:
            rows += score_rows(results, [task], {f"{script} {name}".strip(): (script, name)})
    return sorted(rows)


def log_std_table(results: Path) -> str:
    """Means per task and value; below, the IQM of scores scaled to random = 0, best value of the task = 1."""
    tasks, series = GROUPS["log_std"]
    found = {t: [f.get(label, []) for label in series] for t, f in collect(results, tasks, series).items()}
    complete = [t for t in found if all(len(final(runs, key)) for runs in found[t] for key in KEYS)]
    seeds = {t: "/".join(str(len(runs)) for runs in found[t]) for t in found}
    rows = [[t, steps(next(filter(None, found[t]))), seeds[t]] for t in found]
    last = ["IQM, scaled", "", f"{len(complete)} tasks"]
    for key in KEYS:
        scores = {t: [final(runs, key) for runs in found[t]] for t in found}
        means = {t: [x.mean() if len(x) else np.nan for x in scores[t]] for t in found}
        for row, t in zip(rows, found):
            row += [f"**{number(x)}**" if x == np.nanmax(means[t]) else number(x) for x in means[t]]
        scaled = {t: [(x - RANDOM[t]) / (max(means[t]) - RANDOM[t]) for x in scores[t]] for t in complete}
        last += [stratified(strata) for strata in zip(*scaled.values())]
    header = [f"{key}, {label}" for key in KEYS for label in series]
    return markdown(["task", "steps", "seeds", *header], rows + [last] * bool(complete))


def speed_table(results: Path, script: str) -> str:
    rows, notes = [], ""
    for path in sorted((results / "speed").glob(f"{script}-*.csv")):
        records, machine = read(path), json.loads(path.with_suffix(".json").read_text())
        table = summary(records)
        for r in table:
            ratio = "{:.2f} ({:.2f} to {:.2f})" if max(r["ratios"]) < 5 else "{:.1f} ({:.1f} to {:.1f})"
            ratio = ratio.format(statistics.median(r["ratios"]), r["ratios"][0], r["ratios"][-1])
            cells = [f"{r['steady']:.0f}", ratio, f"{r['start']:.1f}", f"{r['million'] / 60:.1f}"]
            rows.append([r["contender"], r["env"], *cells])
        name, steady = table[0]["contender"], table[0]["steady"]
        cold = machine["contenders"][name]["first_cpu"] - int(records[0]["steps_short"]) / steady
        notes += (
            f"\n{name}, {table[0]['env']}: medians of {records[-1]['round']} interleaved rounds, CPU time "
        )
        notes += f"of one core ({machine['cpu']}); {cold:.0f} s of start with an empty compile cache.\n"
    header = ["", "environment", "steps/s", "ours / it (range)", "start, s", "1M steps with start, min"]
    return markdown(header, rows) + notes


def engine_table(results: Path) -> str:
    path = results / "engine.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    rows = [[r["dtype"], r["rollout"], f"{r['mismatch']:.2g}", f"{r['rollout_seconds']:.1f}"] for r in runs]
    return markdown(
        ["weights", "--rollout", "sampler and trainer apart, nats a token", "sampling, s a step"], rows
    )


def scaling_table(results: Path) -> str:
    path, rows = results / "scaling.json", []
    for r in json.loads(path.read_text()) if path.exists() else []:
        steps, sampled, learnt = (
            r.get(f"{kind}_per_second") for kind in ("steps", "rollout_tokens", "update_tokens")
        )
        speed = f"{steps} steps/s" if steps else f"sampling {sampled}, learning {learnt} tokens/s"
        rows.append([f"`{r['script']}.py`", r["setting"], speed])
    return markdown(["script", "setting", "speed"], rows)


TABLES = {
    name: lambda results, name=name: score_table(score_rows(results, *GROUPS[name], name == "main"))
    for name in ("main", "peer", "time_limit", "atari")
} | {"log_std": log_std_table, "engine": engine_table, "scaling": scaling_table, **language.TABLES}
TABLES |= {
    name: lambda results, script=script: speed_table(results, script)
    for name, script in (("speed", OURS), ("atari_speed", "ppo_atari"))
}


def curves(found: dict, series: dict, path: Path) -> None:
    """Training return over steps: a panel a task, mean and range over the seeds; the same bytes each time."""
    import matplotlib.pyplot as plt  # here, as the tables do without it

    plt.rcParams |= STYLE
    width, height = min(3, len(found)), -(-len(found) // 3)
    figure, handles = plt.figure(figsize=(3.6 * width, 2.6 * height + 0.4)), {}
    for place, (task, labels) in enumerate(found.items(), 1):
        axis = figure.add_subplot(height, width, place)
        for color, label in zip(("C0", "C1", "C2"), series):
            finite = [(run, np.isfinite(run["training"])) for run in labels.get(label, [])]
            lines = [(run["step"][ok] / 1e6, run["training"][ok]) for run, ok in finite if ok.any()]
            if lines:
                grid = np.linspace(max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines), 60)
                scores = np.array([np.interp(grid, *line) for line in lines])
                (handles[label],) = axis.plot(grid, scores.mean(0), color=color)
                axis.fill_between(grid, scores.min(0), scores.max(0), color=color, alpha=0.2, lw=0)
        seeds = " or ".join(sorted({str(len(runs)) for runs in labels.values()}))
        axis.set(title=f"{task}, {seeds} seeds", xlabel="million steps", ylabel="training return")
    figure.legend(handles.values(), handles, loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.35 / figure.get_figheight(), 1, 1))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def write_report(results: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    page = (
        f"# {OURS}: results\n\nWritten by benchmarks/report.py. Training: last 100 episodes. Evaluation: 10 "
    )
    page += "episodes, mean action, frozen statistics. Figures: mean and range over the seeds.\n"
    for name, table in TABLES.items():
        page += f"\n## {name}\n\n{table(results)}"
        if found := collect(results, *GROUPS.get(name, ([], {}))):
            curves(found, GROUPS[name][1], out / f"curves_{name}.svg")
            page += f"\n![{name}](curves_{name}.svg)\n"
        if name in language.FIGURES and language.FIGURES[name](results, out / f"curves_{name}.svg"):
            page += f"\n![{name}](curves_{name}.svg)\n"
    (out / f"{OURS}.md").write_text(f"{page}\n## all runs\n\n{score_table(all_rows(results))}")


def renew(text: str, results: Path) -> str:
    """The README with each marked table replaced."""

    def table(match):
        if match[2] not in TABLES:
            sys.exit(f"report.py: there is no table {match[2]}, only {', '.join(TABLES)}")
        return f"{match[1]}\n{TABLES[match[2]](results)}{match[3]}"

    marked = r"(<!-- table:(\S+) -->\n)(?:(?!<!-- table:).)*?(<!-- end -->)"
    new, count = re.subn(marked, table, text, flags=re.DOTALL)
    if count != text.count("<!-- table:"):
        sys.exit("report.py: a `<!-- table:NAME -->` of the README has no `<!-- end -->`")
    return new


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--out", type=Path, default=HERE / "report", help="folder of the page and figures")
    parser.add_argument("--readme", type=Path, help="renew the tables of this file instead")
    parser.add_argument("--check", action="store_true", help="only compare --readme, exit 1 if it differs")
    args = parser.parse_args()
    if args.readme is None and not args.check:
        return write_report(args.results, args.out)
    if args.readme is None or not args.readme.is_file():
        sys.exit(f"report.py: --readme {args.readme} is no file")
    old = args.readme.read_text()
    new = renew(old, args.results)
    if not args.check:
        args.readme.write_text(new)
    elif new != old:
        sys.exit(f"report.py: the tables of {args.readme} differ: run report.py --readme {args.readme}")


if __name__ == "__main__":
    main()
