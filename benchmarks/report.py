"""Tables and learning curves from the results that run.py and speed.py wrote; language.py has some of them.

    python benchmarks/report.py            # renew the tables of PAGES and the figures in benchmarks/report/
    python benchmarks/report.py --check    # change nothing; exit 1 if a table is not what the results say

A table of a page stands between `<!-- table:NAME -->` and `<!-- end -->`; the names are those of TABLES.
Reads results/<script>/<task>/<variant->seed<k>.csv and .json, and results/speed/*. What is missing there does
not appear.
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
PAGES = [HERE.parent / "README.md", HERE / "README.md", HERE / "scaling.md"]
OURS, DEFAULT, CLEANRL = "ppo_continuous", "logstd-1", "logstd0"  # variants: our default, CleanRL's value
GAMES, ENDS, FIRE = "ppo_atari", "time_limit_ends", "fire_left_to_the_policy"
MAIN = ["HalfCheetah-v5", "Hopper-v5", "Walker2d-v5"]
GROUPS = {  # name: tasks, {label: (script, variant)}
    "main": (MAIN, {
        "default": (OURS, DEFAULT), "--log-std-init 0": (OURS, CLEANRL), "SB3": ("peer_sb3", "1M")}),
    "peer": (MAIN, {"--log-std-init 0": (OURS, f"{CLEANRL}-150k"), "SB3": ("peer_sb3", "")}),
    "time_limit": (MAIN[:1], {
        "time limit bootstraps": (OURS, CLEANRL), "time limit ends": (ENDS, CLEANRL)}),
    "log_std": ([*MAIN, "Ant-v5", "Swimmer-v5", "InvertedDoublePendulum-v5"], {
        f"log std {value}": (OURS, f"logstd{value}") for value in ("0", "-0.5", "-1")}),
    "atari": (["ALE-Pong-v5", "ALE-Breakout-v5"], {"--bf16": (GAMES, "bf16")}),
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
    return [
        {key: np.array([float(row.get(name) or "nan") for row in rows]) for key, name in COLUMNS.items()}
        for rows in tables
        if rows
    ]


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


def atari_table(results: Path) -> str:
    """Training score at the end and at its best on the way, and the evaluation."""
    rows, (tasks, series) = [], GROUPS["atari"]
    for task, labels in collect(results, tasks, series).items():
        for label, runs in labels.items():
            best = [np.nanargmax(run["training"]) for run in runs]
            values = [run["training"][at] for run, at in zip(runs, best)]
            scores = [final(runs, "training"), values, final(runs, "evaluation")]
            cells = [language.extent(list(found), ".2f") for found in scores]
            cells[1] += ", at " + ", ".join(f"{run['step'][at] / 1e6:.2f}M" for run, at in zip(runs, best))
            rows.append([task, label, steps(runs), str(len(runs)), *cells])
    return markdown(["task", "run", "steps", "seeds", "training", "training, best", "evaluation"], rows)


def breakout_table(results: Path) -> str:
    """Training scores of three runs at the same steps, each with the step at which its file has them.

    The last two were stopped: the last rows are where their files end.
    """
    ours = f"`{GAMES}.py --bf16`"
    sources = {ours: (GAMES, "ALE-Breakout-v5", "bf16"),
               f"{ours}, FIRE left to the policy": (FIRE, "ALE-Breakout-v5", "bf16-stopped"),
               "CleanRL": ("peer_cleanrl", "BreakoutNoFrameskip-v4", "stopped")}  # fmt: skip
    runs, rows = {}, []
    for name, (script, task, variant) in sources.items():
        found = load(results / script / task, variant)
        runs |= {name: found[0]} if found else {}
    for wanted in sorted({50_000, 100_000, *(int(run["step"][-1]) for run in [*runs.values()][1:])}):
        cells = []
        for run in runs.values():
            at = np.abs(run["step"] - wanted).argmin()
            near = abs(run["step"][at] / wanted - 1) < 0.1
            cells.append(f"{run['training'][at]:.2f} at {run['step'][at] / 1e3:.0f}k" if near else "stopped")
        rows.append([f"{wanted / 1e3:.0f}k", *cells])
    return markdown(["steps", *runs], rows if len(runs) > 1 else [])


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


def medians(results: Path, script: str) -> dict[str, dict]:
    """The medians of a script's speed table by contender; empty if it was not timed."""
    paths = sorted((results / "speed").glob(f"{script}-*.csv"))
    return {r["contender"]: r for r in summary(read(paths[0]))} if paths else {}


def processes_table(results: Path) -> str:
    """One core's time to an optimiser step, beside the time in which two processes sum its gradients.

    The sums of the language models are those of a piece of SmolLM2-135M, times the number of pieces.
    """
    paths = [results / name for name in ("all_reduce.json", "speed/grpo-smollm2.json")]
    games = medians(results, GAMES)
    if not (games and all(path.exists() for path in paths)):
        return markdown([], [])
    sums, learning = (json.loads(path.read_text()) for path in paths)
    step = lambda contender: f"{64 / games[contender]['steady'] * 1e3:.0f} ms"  # 64 new samples a minibatch
    atari, piece = sums["ppo_atari"], sums["an eighth of SmolLM2-135M"]
    whole = lambda models: (
        f"{8 * models * piece['mb']:.0f} MB: {8 * models * piece['milliseconds'] / 1e3:.1f} s"
    )
    update = learning["summary"]["ours"]["update"] + learning["summary"]["ours"]["score"]
    pixels = f"{atari['mb']:.1f} MB: {atari['milliseconds']:.0f} ms"
    rows = [
        [f"`{GAMES}.py`", f"{step(GAMES)}, with `--bf16` {step(f'{GAMES} --bf16')}", pixels],
        ["`grpo_rlhf.py`, 135M parameters", f"{update:.0f} s (128 answers)", whole(1)],
        ["`ppo_rlhf.py`, two models of 135M", "not measured", whole(2)],
    ]
    return markdown(["", "one core, to an optimiser step", "sum of the gradients, two processes"], rows)


def texts_table(results: Path) -> str:
    """Which text of its script made each result: the beginning of its SHA-256, and the commit if recorded."""
    found = {}  # (script, text) -> task and variant -> seeds
    for path in sorted(results.glob("*/*/*seed*.json")):
        config, seed = json.loads(path.read_text()), re.search(r"\d+$", path.stem)[0]
        text = f"`{config['sha256'][:8]}`"
        text += f", commit {config['commit'][:7]}" if config.get("commit") else ""
        what = " ".join([path.parent.name, variant_of(path)]).strip()
        found.setdefault((path.parent.parent.name, text), {}).setdefault(what, []).append(seed)
    for path in sorted((results / "speed").glob("*.json")):
        config, script = json.loads(path.read_text()), path.stem.partition("-")[0]
        script = script if script.startswith("ppo_") else f"{script}_rlhf"
        text = config["contenders"][script]["sha256"] if "contenders" in config else config["sha256"]
        text = text if isinstance(text, str) else text[f"../{script}.py"]
        found.setdefault((script, f"`{text[:8]}`"), {})[f"speed/{path.stem}"] = []
    rows = []
    for (script, text), results_of in sorted(found.items()):
        names = [
            f"{what}{': ' * bool(seeds)}{', '.join(sorted(seeds, key=int))}"
            for what, seeds in results_of.items()
        ]
        rows.append([f"`{script}`", text, "; ".join(names)])
    return markdown(["script", "text", "results and their seeds"], rows)


def headline_table(results: Path) -> str:
    """What README.md shows of the results, with links to all of them."""
    task, at, rows = MAIN[0], "benchmarks/README.md#", []
    run = {name: load(results / script / task, variant) for name, (script, variant) in
           {"ours": (OURS, DEFAULT), "start": (OURS, CLEANRL), "ends": (ENDS, CLEANRL)}.items()}  # fmt: skip
    minutes = {name: f"{r['million'] / 60:.1f}" for name, r in medians(results, OURS).items()}
    if all(run.values()) and {OURS, "CleanRL"} <= minutes.keys():
        score = {name: estimate(final(runs, "training"), np.mean) for name, runs in run.items()}
        what = f"[{task}]({at}the-default), {steps(run['ours'])} steps, {len(run['ours'])} seeds: return"
        beside = (
            f"{score['start']} with CleanRL's initial deviation, {score['ends']} if a time limit counts as "
        )
        beside += f"an end too; CleanRL takes {minutes['CleanRL']} minutes"
        rows.append([what, f"{score['ours']} in {minutes[OURS]} minutes of one core", beside])
    return markdown(["", "here", "beside it"], rows + language.headlines(results, at))


TABLES = {
    name: lambda results, name=name: score_table(score_rows(results, *GROUPS[name], name == "main"))
    for name in ("main", "peer", "time_limit")
} | language.TABLES
TABLES |= {
    "headline": headline_table, "log_std": log_std_table, "atari": atari_table, "breakout": breakout_table,
    "speed": functools.partial(speed_table, script=OURS),
    "atari_speed": functools.partial(speed_table, script=GAMES),
    "processes": processes_table, "scaling": scaling_table, "engine": engine_table, "texts": texts_table,
}  # fmt: skip


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


def draw(results: Path, out: Path) -> None:
    """Every figure of the pages that has results."""
    out.mkdir(parents=True, exist_ok=True)
    for name, (tasks, series) in GROUPS.items():
        if found := collect(results, tasks, series):
            curves(found, series, out / f"curves_{name}.svg")
    for name, figure in language.FIGURES.items():
        figure(results, out / f"curves_{name}.svg")


def renew(text: str, results: Path) -> str:
    """A page with each marked table replaced."""

    def table(match):
        if match[2] not in TABLES:
            sys.exit(f"report.py: there is no table {match[2]}, only {', '.join(TABLES)}")
        return f"{match[1]}\n{TABLES[match[2]](results)}{match[3]}"

    marked = r"(<!-- table:(\S+) -->\n)(?:(?!<!-- table:).)*?(<!-- end -->)"
    new, count = re.subn(marked, table, text, flags=re.DOTALL)
    if count != text.count("<!-- table:"):
        sys.exit("report.py: a `<!-- table:NAME -->` of a page has no `<!-- end -->`")
    return new


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--out", type=Path, default=HERE / "report", help="folder of the figures")
    parser.add_argument(
        "--pages", type=Path, nargs="+", default=PAGES, help="the pages whose tables are renewed"
    )
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if a table differs")
    args = parser.parse_args()
    if missing := [str(page) for page in args.pages if not page.is_file()]:
        sys.exit(f"report.py: there is no page {', '.join(missing)}")
    texts = {page: page.read_text() for page in args.pages}
    new = {page: renew(text, args.results) for page, text in texts.items()}
    changed = [page for page in texts if new[page] != texts[page]]
    if args.check:
        names = ", ".join(str(page) for page in changed)
        sys.exit(f"report.py: tables of {names} differ: run report.py" if changed else 0)
    for page in changed:
        page.write_text(new[page])
    draw(args.results, args.out)


if __name__ == "__main__":
    main()
