"""Tables and figures of the language scripts, from what run.py and the speed_*.py wrote; for report.py.

Reads results/<script>/<task>/<variant->seed<k>.csv, .json and .completions.csv, results/speed/grpo-*.json.
"Before" and "after" are the evaluations at step 0 and at the last step, on the same held-out prompts.
A further table or figure is one more entry of TABLES or FIGURES at the end.
"""

import csv
import functools
import json
import random
import re
from pathlib import Path

import numpy as np
import sentiment
from scipy.stats import binomtest
from smollm2 import data

VARIANTS = {"leash": "", "free": "free-"}  # of ppo_rlhf.py's world: the default, and --kl-coef 1e-9
EVALUATIONS = {"eval/greedy": "greedy", "eval/pass@1": "pass@1", "eval/pass@8": "pass@8"}
STYLE = {"svg.hashsalt": "ppo", "svg.fonttype": "none", "font.size": 9, "axes.grid": True,
         "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False}  # fmt: skip


def read(path: Path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) if rows else "No results yet.\n"


def load(folder: Path, completions=False, variant="") -> list[dict]:
    """The runs of a task by seed: config, (steps, values) of each metric and, if asked for, completions."""
    runs, form = [], f"{variant}seed"
    for path in (p for p in folder.glob(f"{form}*.csv") if re.fullmatch(rf"{form}\d+", p.stem)):
        config, said = path.with_suffix(".json"), path.with_suffix(".completions.csv")
        if config.exists() and (said.exists() or not completions):
            run, rows = {"seed": int(path.stem[len(form) :]), **json.loads(config.read_text())}, read(path)
            run["variant"] = variant
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
    names = {"row a response": "each answer in a row of its own", "no skipping": "nothing is skipped",
             "neither": "own rows, nothing is skipped"}  # fmt: skip
    rows, notes = [], ""
    for path in sorted((results / "speed").glob(f"{script.removesuffix('_rlhf')}-*.json")):
        found = json.loads(path.read_text())
        for name, r in found["summary"].items():
            ratio = "{:.2f} ({:.2f} to {:.2f})".format(r["over_ours"], *r["over_ours_range"])
            cells = [f"{r['seconds']:.2f}", f"{r['cpu']:.2f}", ratio, f"{r['peak_mb']:.0f}", "-", "-", "-"]
            if "update" in r:
                cells[4:] = [f"{r['rollout']:.2f}", f"{r['score'] + r['update']:.2f}"]
                cells.append(f"{r['learn_tps']:.0f} / {r['floor_tps']:.0f}")
            rows.append([found["setting"], names.get(name, name), *cells])
        rounds, cpu = len(found["rounds"]), found["cpu"]
        notes += f"\n{found['setting']}: medians of {rounds} interleaved rounds, one core ({cpu}).\n"
    header = "setting||s a step|CPU s|its CPU time / ours (range)|peak memory, MB|generating, s|learning, s"
    return markdown([*header.split("|"), "learning / bare model, tokens/s"], rows) + notes


def ppo_speed_table(results: Path, script: str) -> str:
    """ppo_rlhf.py beside TRL's PPOTrainer, from speed_ppo_rlhf.py."""
    path, rows = results / "speed" / f"{script}.json", []
    for name, r in (json.loads(path.read_text())["summary"] if path.exists() else {}).items():
        ratio = f"{r['over_ours']:.2f} ({r['range'][0]:.2f} to {r['range'][1]:.2f})"
        numbers = [f"{r['cpu']:.2f}", ratio, f"{r['peak_mb']:.0f}", f"{r['length']:.1f}"]
        rows.append([*name.split(", "), *numbers])
    return markdown(
        ["setting", "", "CPU s a step", "it / ours (range)", "peak MB", "tokens a response"], rows
    )


def ends(run: dict, name: str) -> np.ndarray:
    """(before, after) of an evaluated metric."""
    return run[name][1][[0, -1]]


def world_table(results: Path, script: str) -> str:
    """The reward model's accuracy on held-out pairs, by noisy labels and by the true preference; then PPO."""
    runs = load(results / script / "world")
    for run in runs:
        names = ("reward_model/accuracy", "reward_model/noiseless")
        run["reward model right: noisy labels / true ones"] = [run[name][1][0] for name in names]
        run["true preference, before → after"] = ends(run, "eval/true_preference")
        run["gain"] = np.diff(ends(run, "eval/true_preference"))[0]
        run["reward-model score, before → after"] = ends(run, "eval/score")
        run["KL, nats"] = run["eval/kl"][1][-1]
        run["distinct sentences, before → after"] = ends(run, "eval/distinct")
    two, columns = functools.partial(change, form=".2f"), {}
    columns["reward model right: noisy labels / true ones"] = lambda pairs: two(pairs).replace("→", "/")
    columns["true preference, before → after"] = two
    columns["gain"] = functools.partial(extent, form="+.2f")
    columns["reward-model score, before → after"] = two
    columns["KL, nats"] = functools.partial(extent, form=".1f")
    return by_seed(runs, columns | {"distinct sentences, before → after": two})


def leashed(results: Path, script: str) -> list[list[dict]]:
    """The runs of world of each of VARIANTS; the same seed is the same world, reward model and prompts."""
    groups = [load(results / script / "world", variant=variant) for variant in VARIANTS.values()]
    free = ("kl_coef", "kl_target", "seed", "run_name")
    settings = [{k: v for k, v in run["args"].items() if k not in free}
                for runs in groups for run in runs]  # fmt: skip
    if any(other != settings[0] for other in settings):
        raise SystemExit("language.py: leash and free differ in more than the KL flags and --seed")
    return groups


def leash_table(results: Path, script: str) -> str:
    """Ends of the runs; the third row is of the differences by seed. The test is the exact sign test.

    The best step is chosen by the true preference of the same evaluation, so its value is somewhat flattered.
    Entropy: of the sampled tokens, mean of the last 10 steps.
    """
    groups = leashed(results, script)
    for run in (run for runs in groups for run in runs):
        steps, truth = run["eval/true_preference"]
        run["reward-model score"], run["true preference"] = run["eval/score"][1][-1], truth[-1]
        run["at its best step"], run["best step"] = truth.max(), steps[truth.argmax()]
        run["KL, nats"], run["distinct sentences"] = run["eval/kl"][1][-1], run["eval/distinct"][1][-1]
        run["entropy"] = run["losses/entropy"][1][-10:].mean()
    names = ("reward-model score", "true preference", "at its best step", "best step", "KL, nats",
             "distinct sentences", "entropy")  # fmt: skip
    forms = [".0f" if name == "best step" else ".1f" if name == "KL, nats" else ".2f" for name in names]
    leash, free = ({run["seed"]: run for run in runs} for runs in groups)
    if not (both := sorted(leash.keys() & free.keys())):
        return markdown([], [])
    rows = [[label, str(len(runs)), *(extent([run[name] for run in runs], form)
            for name, form in zip(names, forms))] for label, runs in zip(VARIANTS, groups)]  # fmt: skip
    gaps = {name: np.array([leash[seed][name] - free[seed][name] for seed in both]) for name in names}
    cells = [extent(gaps[name], f"+{form}") for name, form in zip(names, forms)]
    rows.append(["leash − free, by seed", str(len(both)), *cells])
    truth = gaps["true preference"]
    more, unequal = int((truth > 0).sum()), int((truth != 0).sum())
    p = binomtest(more, unequal).pvalue if unequal else 1.0
    note = f"\nTrue preference at the end, leash − free, seeds {', '.join(map(str, both))}: "
    note += ", ".join(f"{x:+.2f}" for x in truth)
    note += f". Higher with the leash in {more} of {len(both)} seeds (exact sign test, p = {p:.2g}).\n"
    return markdown(["", "seeds", *names], rows) + note


def flipped(gain: np.ndarray, draws=9999) -> float:
    """Two-sided p value of a mean of paired differences: random signs; the observed ones count as a draw."""
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (draws, len(gain)))
    return ((np.abs(signs @ gain) >= abs(gain.sum()) - 1e-9).sum() + 1) / (draws + 1)


def sentiment_table(results: Path, script: str) -> str:
    """Mean difference of the same prompts, its standard error, and the p value of a paired permutation test.

    The test flips the signs of the differences 9,999 times, so the smallest p is 0.0001. The seeds share
    their prompts: no test over all of them.
    """
    runs = load(results / script / "sentiment", completions=True)
    for run in runs:
        steps = sorted({int(row["step"]) for row in run["said"]})
        scores = [np.array([float(r["score"]) for r in run["said"] if int(r["step"]) == s]) for s in steps]
        if len(scores) != 2 or len(scores[0]) != len(scores[1]):
            raise SystemExit(f"language.py: sentiment, seed {run['seed']}: not the same prompts twice")
        gain = scores[1] - scores[0]
        run["n"], run["score, before → after"] = len(gain), [x.mean() for x in scores]
        if not np.allclose(run["score, before → after"], ends(run, "eval/score"), atol=1e-4):
            raise SystemExit(f"language.py: sentiment, seed {run['seed']}: its two files differ in the score")
        run["difference ± standard error"] = gain.mean(), gain.std(ddof=1) / np.sqrt(len(gain))
        run["permutation p"], run["KL, nats"] = flipped(gain), run["eval/kl"][1][-1]
        run["distinct responses, before → after"] = ends(run, "eval/distinct")
        run["distinct-2, before → after"] = ends(run, "eval/distinct_2")
    columns = {"n": extent, "score, before → after": change, "difference ± standard error": with_error}
    columns["permutation p"] = lambda values: f"{'≤ ' * (len(values) > 1)}{max(values):.2g}"
    columns["KL, nats"] = functools.partial(extent, form=".1f")
    names = "distinct responses, before → after|distinct-2, before → after"
    text = by_seed(runs, columns | dict.fromkeys(names.split("|"), functools.partial(change, form=".2f")))
    path = results / script / "sentiment" / "best_of_n.json"
    if path.exists():
        best = {n: r for n, r in json.loads(path.read_text()).items() if n.startswith("best")}
        parts = [
            f"{n} {r['score']:.3f} ± {r['se']:.3f} (at most {r['kl']:.2f} nats)" for n, r in best.items()
        ]
        text += f"\nWithout training, of the starting policy's samples: {', '.join(parts)}.\n"
    return text


def examples_table(results: Path, script: str, count=3) -> str:
    """The first held-out prompts of the first seed, and its completions before and after."""
    runs = load(results / script / "sentiment", completions=True)
    if not runs:
        return markdown([], [])
    steps = sorted({int(row["step"]) for row in runs[0]["said"]})
    said = [[r["completion"] for r in runs[0]["said"] if int(r["step"]) == s] for s in steps]
    about = things_to_describe()[-len(said[0]) :]
    return markdown(["prompt", "before", "after"], [list(row) for row in zip(about, *said)][:count])


def things_to_describe() -> list[str]:
    """What the prompts of sentiment.py are about, in the order of its file."""
    pairs = [(kind, thing) for kind in sentiment.KINDS for thing in sentiment.THINGS]
    random.Random(0).shuffle(pairs)
    return [f"{'an' if kind[0] in 'aeo' else 'a'} {kind} {thing}" for kind, thing in pairs]


def with_error(found: list[tuple]) -> str:
    return extent([x[0] for x in found], "+.3f") + (f" ± {found[0][1]:.3f}" if len(found) == 1 else "")


def headlines(results: Path, at: str) -> list[list[str]]:
    """Rows of the README's table: sums with SmolLM2, and the leash; `at` is where all results are."""
    rows, speed = [], results / "speed" / "grpo-smollm2.json"
    runs = [judge(run) for run in load(results / GRPO / "chain_sum", completions=True)]
    times = json.loads(speed.read_text())["summary"] if speed.exists() else {}
    if runs and {"ours", "TRL"} <= times.keys():
        cpu = {name: f"{times[name]['cpu']:.1f} CPU seconds a step" for name in ("ours", "TRL")}
        answers = change([run["accuracy, before → after"] for run in runs])
        what = f"[SmolLM2-135M]({at}sums-with-smollm2-135m-instruct) learns sums, {len(runs)} seeds: accuracy"
        rows.append([what, f"{answers}; {cpu['ours']}", f"TRL's GRPOTrainer: {cpu['TRL']}"])
    leash, free = leashed(results, PPO)
    if leash and free:
        last = lambda name, runs: [ends(run, f"eval/{name}")[1] for run in runs]
        score = lambda runs: (f"true preference {extent(last('true_preference', runs), '.2f')}, "
                              f"reward model {extent(last('score', runs), '.2f')}")  # fmt: skip
        what = f"[PPO against a learnt reward model]({at}what-the-leash-is-for), {len(leash)} seeds: scores"
        rows.append([what, score(leash), f"without the KL penalty: {score(free)}"])
    return rows


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


def leash_panels(runs: list[dict], *axes) -> None:
    panels = {"eval/score": "reward-model score", "eval/true_preference": "true preference",
              "eval/kl": "KL, nats a response", "eval/distinct": "distinct sentences, share",
              "losses/entropy": "entropy, nats a token"}  # fmt: skip
    for axis, (name, title) in zip(axes, panels.items()):
        for color, (label, variant) in zip(("C0", "C1"), VARIANTS.items()):
            chosen = [run for run in runs if run["variant"] == variant]
            band(axis, chosen, name, color, label if axis is axes[0] else None)
        axis.set(title=title)


def sentiment_panels(runs: list[dict], axis) -> None:
    band(axis, runs, "charts/score", "C0", "training prompts")
    band(axis, runs, "eval/score", "C1", "held-out prompts")
    axis.set(title=f"SmolLM2-135M, sentiment, {len(runs)} seeds", ylabel="VADER score")


def curves(script, task, count, draw, results: Path, path: Path, variants=("",), width=4.2) -> bool:
    """Draw a figure of `count` panels, the same bytes each time; False if there is nothing to draw."""
    folder, completions = results / script / task, task == "chain_sum"
    groups = [load(folder, completions, variant) for variant in variants]
    if not all(groups):
        return False
    import matplotlib.pyplot as plt  # here, as the tables do without it

    plt.rcParams |= STYLE
    figure, axes = plt.subplots(1, count, figsize=(width * count, 2.9), squeeze=False)
    draw([run for runs in groups for run in runs], *axes[0])
    for axis in axes[0]:
        axis.set(xlabel="steps")
        if len(axis.get_legend_handles_labels()[1]) > 1:
            axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return True


GRPO, PPO = "grpo_rlhf", "ppo_rlhf"
TABLES = {name: functools.partial(table, script=script) for name, script, table in (
    ("grpo_sort", GRPO, sort_table), ("grpo_smollm2", GRPO, smollm2_table), ("grpo_speed", GRPO, speed_table),
    ("ppo_world", PPO, world_table), ("ppo_leash", PPO, leash_table), ("ppo_sentiment", PPO, sentiment_table),
    ("ppo_examples", PPO, examples_table), ("ppo_speed", PPO, ppo_speed_table),
)}  # fmt: skip
FIGURES = {
    "grpo_sort": functools.partial(curves, GRPO, "sort", 2, sort_panels),
    "grpo_smollm2": functools.partial(curves, GRPO, "chain_sum", 1, smollm2_panels),
    "ppo_leash": functools.partial(
        curves, PPO, "world", 5, leash_panels, variants=tuple(VARIANTS.values()), width=2.6
    ),
    "ppo_sentiment": functools.partial(curves, PPO, "sentiment", 1, sentiment_panels),
}
