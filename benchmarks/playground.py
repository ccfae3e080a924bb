"""One page to play with: the clipped objective, a policy that is updated, and what the KL leash is for.

    python benchmarks/playground.py    # some seconds; writes report/playground.html, the same bytes each time

Every number is computed here by the functions of ppo_continuous.py, over a grid, or read from the committed
runs of ppo_rlhf.py's small world; the page looks its numbers up and draws lines between them, and needs
nothing from elsewhere. The end of its address sets the sliders: playground.html#ratio=1.3&adv=0.8&eps=0.2.
The still:

    chromium --headless --no-sandbox --hide-scrollbars --window-size=1000,834 \\
      --screenshot=benchmarks/report/playground.png benchmarks/report/playground.html
"""

import argparse
import html
import importlib.util
import itertools
import json
import math
import sys
from pathlib import Path

import language
import numpy as np

HERE = Path(__file__).resolve().parent
RATIOS = [i / 100 for i in range(1, 201)]
ADVANTAGES = [i / 10 for i in range(-20, 21)]
CLIPS = [*(i / 20 for i in range(1, 11)), math.inf]  # the last is no clip
RATES = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28]
BETAS = [0.0, 0.01, 0.03, 0.1, 0.3, 1.0]  # the first is no penalty
EPOCHS, MINIBATCHES, SAMPLES = 4, 8, 128
WORTH = [1.0, 0.2, -0.4, -0.8]  # of the four actions; an advantage is that and noise of half a unit
METRICS = {"score": "eval/score", "truth": "eval/true_preference", "kl": "eval/kl"}


def functions():
    """ppo_continuous.py as a module, from where it stands."""
    if "ppo_continuous" not in sys.modules:
        path = HERE.parent / "ppo_continuous.py"
        spec = importlib.util.spec_from_file_location(path.stem, path)
        sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
        spec.loader.exec_module(sys.modules[path.stem])
    return sys.modules["ppo_continuous"]


# ---- the numbers ----


def compact(x: float, digits=4) -> float | int:
    x = round(float(x), digits)
    return int(x) if x == int(x) else x


def corners(curve: list[list]) -> list[list]:
    """Without the rows that a line between their neighbours replaces exactly: few are left of a bent line."""
    bent = np.abs(np.diff(curve, 2, axis=0)).max(1) > 1e-6
    return [row for row, keep in zip(curve, [True, *bent, True]) if keep]


def objective_curves() -> list:
    """[epsilon][advantage] -> rows of ratio, objective, its derivative by log pi, is the sample clipped."""
    import torch

    ppo, axes = functions(), [torch.tensor(x, dtype=torch.float64) for x in (CLIPS, ADVANTAGES, RATIOS)]
    eps, adv, ratio = torch.meshgrid(*axes, indexing="ij")
    # A hair below each ratio of the grid, so that no corner is decided by the rounding of exp and log.
    logp, old = (ratio.log() - 1e-9).requires_grad_(), torch.zeros_like(ratio)
    value = -ppo.policy_loss(logp, old, adv, eps, eps)
    (slope,) = torch.autograd.grad(value.sum(), logp)
    flat = [x.detach().flatten() for x in (logp, old, adv, eps, eps)]
    clipped = torch.vmap(ppo.clip_fraction)(*flat).view_as(ratio)
    table = torch.stack([ratio, value.detach(), slope, clipped], -1).tolist()
    return [[corners([[compact(x) for x in row] for row in curve]) for curve in curves] for curves in table]


def batch():
    """The samples of the second panel: actions of a uniform policy, whitened advantages, and their order."""
    import torch

    ppo, generator = functions(), torch.Generator().manual_seed(0)
    actions = torch.arange(len(WORTH)).repeat(SAMPLES // len(WORTH))
    noise = 0.5 * torch.randn(SAMPLES, generator=generator, dtype=torch.float64)
    adv = ppo.whiten(torch.tensor(WORTH, dtype=torch.float64)[actions] + noise)
    epochs = (ppo.minibatches(SAMPLES, MINIBATCHES, generator) for _ in range(EPOCHS))
    return actions, adv, list(itertools.chain.from_iterable(epochs))


def policy_updates() -> list:
    """[rate][epsilon][beta] -> ratio of the best action and KL after each minibatch, share clipped.

    Gradient descent on the mean of policy_loss plus beta KL(pi || pi_old), all settings side by side.
    """
    import torch

    ppo, (actions, adv, order) = functions(), batch()
    settings = torch.tensor(list(itertools.product(RATES, CLIPS, BETAS)), dtype=torch.float64)
    rate, eps, beta = settings.T.unsqueeze(-1)
    logits = torch.zeros(len(settings), len(WORTH), dtype=torch.float64)  # a row a setting
    old = logits.log_softmax(-1)
    share = torch.vmap(ppo.clip_fraction, in_dims=(0, 0, None, 0, 0))
    ratios, kls, clipped = [torch.ones(len(settings))], [torch.zeros(len(settings))], []
    for mb in order:
        logits.requires_grad_()
        logps = logits.log_softmax(-1)
        kl = (logps.exp() * ppo.approx_kl(logps, old, "k1")).sum(-1)  # its expectation: exact
        logp, old_logp = logps[:, actions[mb]], old[:, actions[mb]]
        loss = ppo.policy_loss(logp, old_logp, adv[mb], eps, eps).mean(-1) + beta[:, 0] * kl
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
        clipped.append(share(logp.detach(), old_logp, adv[mb], eps, eps))
        logits = logits.detach() - rate * gradient
        logps = logits.log_softmax(-1)
        ratios.append((logps - old).exp()[:, 0])
        kls.append((logps.exp() * ppo.approx_kl(logps, old, "k1")).sum(-1))
    clipped = torch.stack(clipped[-MINIBATCHES:]).mean(0).tolist()
    paths = zip(torch.stack(ratios, 1).tolist(), torch.stack(kls, 1).tolist(), clipped)
    rows = [[[compact(x) for x in ratio], [compact(x) for x in kl], compact(c)] for ratio, kl, c in paths]
    cut = lambda rows, size: [rows[i : i + size] for i in range(0, len(rows), size)]
    return cut(cut(rows, len(BETAS)), len(CLIPS))


def leash(results: Path) -> tuple[list[int], dict, list[list[str]]]:
    """Evaluated steps; variant -> metric -> rows of step, mean, least, most; sentences by seed."""
    curves, sentences = {}, {}
    for variant, runs in zip(language.VARIANTS, language.leashed(results, language.PPO)):
        curves[variant] = {}
        for name, metric in METRICS.items():
            steps = runs[0][metric][0]
            values = np.array([run[metric][1] for run in runs if (run[metric][0] == steps).all()])
            if len(values) != len(runs):
                raise SystemExit("playground.py: the runs were not evaluated at the same steps")
            rows = zip(steps, values.mean(0), values.min(0), values.max(0))
            curves[variant][name] = [[compact(x, 6) for x in row] for row in rows]
        for run in runs:
            name = f"{language.VARIANTS[variant]}seed{run['seed']}.completions.csv"
            said = language.read(results / language.PPO / "world" / name)
            last = next(row["completion"] for row in said if float(row["step"]) == steps[-1])
            sentences.setdefault(run["seed"], [str(run["seed"])]).append(last.strip())
    return [int(step) for step in steps], curves, list(sentences.values())


# ---- the page ----


def text(x: float, digits: int) -> str:
    return "∞" if x == math.inf else f"{x:.{digits}f}".replace("-", "−")


def slider(name: str, label: str, values: list, start: float, digits: int) -> str:
    """A slider over the places of a list; its values are text, so that what is shown is what is looked up."""
    shown = " ".join(text(x, digits) for x in values)
    place = min(range(len(values)), key=lambda i: abs(values[i] - start))
    return (
        f'<label>{label} <output for="{name}"></output><input type="range" id="{name}" min="0" '
        f'max="{len(values) - 1}" value="{place}" data-values="{shown}"></label>'
    )


def figures(charts: dict) -> str:
    """An empty figure a chart: id -> caption."""
    return "\n".join(
        f'<figure><figcaption id="{name}-title">{caption}</figcaption>'
        f'<svg id="{name}" viewBox="0 0 360 230" role="img" aria-labelledby="{name}-title"></svg></figure>'
        for name, caption in charts.items()
    )


def legend(caption: str, columns: list[str], rows: dict) -> str:
    """The table of what the lines show, which is also their key: class of the line -> label."""
    names = [column.split("|") for column in columns]  # id|heading
    head = "".join(f'<th scope="col">{heading}</th>' for _, heading in names)
    body = "".join(
        f'<tr><th scope="row"><svg class="key" viewBox="0 0 30 8" aria-hidden="true">'
        f'<path class="line {kind}" d="M1 4H29"/></svg> {label}</th>'
        + "".join(f'<td id="{kind}-{name}"></td>' for name, _ in names)
        + "</tr>\n"
        for kind, label in rows.items()
    )
    return f"<table><caption>{caption}</caption><tr><td></td>{head}</tr>\n{body}</table>"


def one_a_line(rows: list) -> str:
    """JSON of a list, in lines that a diff can show."""
    return "[" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "]"


def page(results: Path) -> str:
    steps, curves, sentences = leash(results)
    data = {
        "curves": one_a_line(objective_curves()),
        "updates": one_a_line(policy_updates()),
        "leash": json.dumps(curves),
        "bounds": json.dumps([[compact(1 - e), compact(1 + e)] if e < math.inf else None for e in CLIPS]),
        "epochs": json.dumps([i * MINIBATCHES for i in range(EPOCHS + 1)]),
        "steps": json.dumps(steps),
    }
    said = "".join(
        f'<tr><th scope="row">{seed}</th><td>{html.escape(leashed)}</td><td>{html.escape(free)}</td></tr>\n'
        for seed, leashed, free in sentences
    )
    parts = {
        "SLIDERS_1": slider("ratio", "Ratio π / π<sub>old</sub>", RATIOS, 1.3, 2)
        + slider("adv", "Advantage", ADVANTAGES, 0.8, 1)
        + slider("eps", "Clip range ε", CLIPS, 0.2, 2),
        "FIGURES_1": figures({
            "objective": "Objective over the ratio; shaded: 1 ± ε",
            "slope": "Its derivative by log π: how hard the sample pushes"}),
        "TABLE_1": legend("One sample at this ratio", ["value|objective", "slope|derivative"], {
            "plain": "ratio × advantage", "clip": "clipped"}),
        "SLIDERS_2": slider("lr", "Learning rate", RATES, 0.08, 2)
        + slider("clip", "Clip range ε", CLIPS, 0.2, 2)
        + slider("beta", "KL penalty β", BETAS, 0.01, 2),
        "FIGURES_2": figures({
            "path": "Ratio of the best action, minibatch by minibatch; shaded: 1 ± ε",
            "drift": "KL(π ‖ π<sub>old</sub>), nats"}),
        "TABLE_2": legend(
            f"After {EPOCHS} epochs of {MINIBATCHES} minibatches",
            ["ratio|ratio", "kl|KL, nats", "share|clipped, last epoch"],
            {"plain": "neither", "clip": "clip", "penalty": "KL penalty", "both": "clip and KL penalty"}),
        "SLIDERS_3": slider("step", "Training step", steps, steps[-1], 0),
        "FIGURES_3": figures({
            "score": "Reward-model score", "truth": "True preference",
            "kl": "KL to the starting policy, nats a response"}),
        "TABLE_3": legend(
            f"Mean of {len(sentences)} seeds (least to most)",
            ["score|reward-model score", "truth|true preference", "kl|KL, nats"],
            {"leash": "with the KL leash", "free": "without"}),
        "SENTENCES": said,
        "DATA": "{" + ",\n".join(f'"{name}": {value}' for name, value in data.items()) + "}",
    }  # fmt: skip
    filled = PAGE
    for name, value in parts.items():
        filled = filled.replace(f"[{name}]", value)
    return filled


PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>PPO playground</title>
<link rel="icon" href="data:,">
<style>
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1f23; --soft: #5b626b; --rule: #d9dde2;
  --shade: #eef3fa; --warm: #c2410c; --blue: #1d4ed8; --violet: #7e22ce; --green: #0f766e; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e7e9ec; --soft: #a0a8b2;
  --rule: #363c44; --shade: #202a38; --warm: #fb923c; --blue: #7fb0ff; --violet: #cf9bff;
  --green: #2dd4bf; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1rem 3rem; max-width: 62rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; }
h2 { font-size: 1.2rem; margin: 0 0 .3rem; }
section { border-top: 1px solid var(--rule); margin-top: 1.4rem; padding-top: 1.1rem; }
p { margin: 0 0 .8rem; max-width: 46rem; }
.soft, figcaption, caption, thead, th { color: var(--soft); }
a { color: var(--blue); }
.sliders { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .4rem 1.5rem; }
.one { max-width: 20rem; }
label { display: block; }
output { float: right; font-weight: 600; font-variant-numeric: tabular-nums; }
input { width: 100%; height: 1.6rem; margin: 0; accent-color: var(--blue); }
.figures { display: grid; gap: 0 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(19rem, 100%), 1fr)); }
.figures.three { grid-template-columns: repeat(auto-fit, minmax(min(17rem, 100%), 1fr)); }
figure { margin: .7rem 0 .2rem; }
figcaption { font-size: .9rem; }
figure svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
.three svg text { font-size: 13px; }
.grid { stroke: var(--rule); stroke-width: 1; }
.mark { stroke: var(--soft); stroke-width: 1; }
.band { fill: var(--shade); }
.line { fill: none; stroke: currentColor; stroke-width: 2.2; stroke-linejoin: round; }
.range { fill: currentColor; opacity: .14; }
.dot { fill: currentColor; }
.plain, .free { color: var(--warm); stroke-dasharray: 7 4; }
.clip { color: var(--blue); }
.penalty { color: var(--violet); stroke-dasharray: 2 3; }
.both { color: var(--green); stroke-dasharray: 9 4 2 4; }
.leash { color: var(--green); }
sub { line-height: 0; }
#verdict { margin-top: .5rem; }
.key { width: 30px; height: 8px; margin-right: .3rem; vertical-align: middle; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin-top: .4rem; }
caption { text-align: left; font-size: .9rem; }
th, td { padding: .15rem 1.1rem .15rem 0; text-align: left; vertical-align: top; font-weight: 400; }
tr { border-top: 1px solid var(--rule); }
th[scope=row] { color: var(--ink); }
th[scope=col] { font-size: .9rem; }
@media (max-width: 32rem) { th, td { padding-right: .6rem; font-size: .9rem; } }
</style>
</head>
<body>
<h1>PPO playground</h1>
<p class="soft">All numbers were computed by the scripts' own functions or are those of their runs. The
address keeps where the sliders stand; <a href="#">back to the start</a>.</p>

<section aria-labelledby="h1">
<h2 id="h1">1. The clip</h2>
<p>The clipped objective follows ratio × advantage until the ratio has moved by ε to the side that the
advantage asks for; from there it is flat, and the sample pushes no more. On the other side nothing is cut: a
move in the wrong direction is always pushed back, however far it went (try a negative advantage here).</p>
<div class="sliders">[SLIDERS_1]</div>
<div class="figures">[FIGURES_1]</div>
[TABLE_1]
<p id="verdict"></p>
</section>

<section aria-labelledby="h2">
<h2 id="h2">2. An update</h2>
<p>The same 128 samples of four actions, equally likely before, are used four times: the plain gradient makes
the best action ever more likely, the clip ends that near 1 + ε, and the KL penalty only slows it, unless β is
nearly as large as the advantages. The clip stops a push but pulls nothing back, so at a large learning rate
the first steps leap over the edge.</p>
<div class="sliders">[SLIDERS_2]</div>
<div class="figures">[FIGURES_2]</div>
[TABLE_2]
</section>

<section aria-labelledby="h3">
<h2 id="h3">3. The leash</h2>
<p>A small language model follows a reward model that learnt a hidden preference from noisy labels, the same
seeds with the KL penalty and without: both reach about the same score. What the score stands for is gained
only on the leash; without it the policy walks away to sentences that please nobody but the reward model.</p>
<div class="sliders one">[SLIDERS_3]</div>
<div class="figures three">[FIGURES_3]</div>
[TABLE_3]
<table><caption>The first held-out sentence of each seed, as the trained policy ends it</caption>
<tr><th scope="col">seed</th><th scope="col">with the leash</th><th scope="col">without</th></tr>
[SENTENCES]</table>
</section>

<script type="application/json" id="data">[DATA]</script>
<script>
"use strict";
const $ = id => document.getElementById(id), data = JSON.parse($("data").textContent);
const inputs = [...document.querySelectorAll("input")], values = input => input.dataset.values.split(" ");
const place = id => Number($(id).value), number = text => Number(text.replace("−", "-"));
const shown = id => values($(id))[place(id)], put = (id, text) => { $(id).textContent = text; };
const fixed = (x, digits) => x.toFixed(digits).replace("-", "−");

function at(points, x) {  // on the line through the stored points
  const i = Math.max(1, points.findIndex(p => p[0] >= x)), [a, b] = [points[i - 1], points[i]];
  return a[1] + (b[1] - a[1]) * (x - a[0]) / (b[0] - a[0]);
}

function ticks(low, high) {  // round numbers around low and high
  const rough = (high - low) / 5 || 1, unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find(k => k * unit >= rough * 0.999);
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  return Array.from({length: last - first + 1}, (_, i) => +((first + i) * step).toFixed(6));
}

// lines: class and points [x, y] or [x, y, low, high]; mark: an x, with a dot on each line
function chart(id, xs, lines, {base = 0, vertical, horizontal, mark} = {}) {
  const [left, right, top, bottom] = [38, 346, 10, 206];
  const all = [base, ...(horizontal || []), ...lines.flatMap(l => l.points.flatMap(p => p.slice(1)))];
  const ys = ticks(Math.min(...all), Math.max(...all)), x0 = xs[0], y0 = ys[0];
  const x = v => (left + (right - left) * (v - x0) / (xs.at(-1) - x0)).toFixed(1);
  const y = v => (bottom - (bottom - top) * (v - y0) / (ys.at(-1) - y0)).toFixed(1);
  const box = (a, b, c, d) => `<rect class="band" x="${a}" y="${b}" width="${c - a}" height="${d - b}"/>`;
  const path = (kind, points) => `<path class="${kind}" d="M${points.join("L")}`;
  let out = "";
  if (vertical) out += box(x(vertical[0]), top, x(vertical[1]), bottom);
  if (horizontal) out += box(left, y(horizontal[1]), right, y(horizontal[0]));
  for (const v of ys) out += `<path class="grid" d="M${left} ${y(v)}H${right}"/>
    <text x="${left - 6}" y="${y(v)}" dy=".35em" text-anchor="end">${String(v).replace("-", "−")}</text>`;
  for (const v of xs) out += `<path class="grid" d="M${x(v)} ${bottom}v4"/>
    <text x="${x(v)}" y="${bottom + 17}" text-anchor="middle">${v}</text>`;
  if (mark !== undefined) out += `<path class="mark" d="M${x(mark)} ${top}V${bottom}"/>`;
  const along = (points, column) => points.map(p => `${x(p[0])} ${y(p[column])}`);
  for (const {kind, points} of lines) if (points[0].length === 4) {
    out += path(`range ${kind}`, [...along(points, 2), ...along(points, 3).reverse()]) + 'Z"/>';
  }
  for (const {kind, points} of lines) {
    out += path(`line ${kind}`, along(points, 1)) + '"/>';
    if (mark === undefined) continue;
    out += `<circle class="dot ${kind}" cx="${x(mark)}" cy="${y(at(points, mark))}" r="4"/>`;
  }
  $(id).innerHTML = out;
}

function clip() {
  const ratio = number(shown("ratio")), bounds = data.bounds[place("eps")], xs = [0, 0.5, 1, 1.5, 2];
  const rows = {plain: data.curves.at(-1)[place("adv")], clip: data.curves[place("eps")][place("adv")]};
  const column = (kind, i) => rows[kind].map(row => [row[0], row[i]]);
  for (const [id, name, i] of [["objective", "value", 1], ["slope", "slope", 2]]) {
    const lines = Object.keys(rows).map(kind => ({kind, points: column(kind, i)}));
    chart(id, xs, lines, {vertical: bounds && [Math.max(0, bounds[0]), bounds[1]], mark: ratio});
    for (const {kind, points} of lines) put(`${kind}-${name}`, fixed(at(points, ratio), 3));
  }
  const removed = at(column("clip", 3), ratio) > 0.5;
  put("verdict", removed ? "The clip takes this sample's gradient." : "The clip leaves this sample alone.");
}

function update() {
  const [runs, eps, beta] = [data.updates[place("lr")], place("clip"), place("beta")];
  const [free, kept] = [runs.at(-1), runs[eps]];
  const kinds = Object.entries({plain: free[0], clip: kept[0], penalty: free[beta], both: kept[beta]});
  const lines = i => kinds.map(([kind, run]) => ({kind, points: run[i].map((y, x) => [x, y])}));
  chart("path", data.epochs, lines(0), {base: 1, horizontal: data.bounds[eps]});
  chart("drift", data.epochs, lines(1));
  for (const [kind, [ratio, kl, share]] of kinds) {
    put(`${kind}-ratio`, fixed(ratio.at(-1), 2));
    put(`${kind}-kl`, fixed(kl.at(-1), 3));
    put(`${kind}-share`, fixed(share, 2));
  }
}

function leash() {
  const step = number(shown("step"));
  for (const name of ["score", "truth", "kl"]) {
    const lines = Object.entries(data.leash).map(([kind, found]) => ({kind, points: found[name]}));
    chart(name, data.steps, lines, {mark: step});
    for (const {kind, points} of lines) {
      const [mean, low, high] = points.find(p => p[0] === step).slice(1).map(x => fixed(x, 2));
      put(`${kind}-${name}`, low === high ? mean : `${mean} (${low} to ${high})`);
    }
  }
}

function draw() {
  for (const input of inputs) {
    input.setAttribute("aria-valuetext", shown(input.id));
    document.querySelector(`output[for=${input.id}]`).textContent = shown(input.id);
  }
  clip();
  update();
  leash();
}

function follow() {  // the address: name=value of sliders, the others as at the start
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const input of inputs) {
    const said = wanted.get(input.id)?.replace("-", "−");
    const i = values(input).findIndex(text => text === said || said && number(text) === number(said));
    input.value = i < 0 ? input.defaultValue : i;
  }
  draw();
}

addEventListener("hashchange", follow);
addEventListener("input", draw);
addEventListener("change", () => {  // a slider let go: browsers refuse an address that changes all the time
  const moved = inputs.filter(i => i.value !== i.defaultValue);
  const said = moved.map(i => [i.id, shown(i.id).replace("−", "-")]);
  history.replaceState(null, "", "#" + new URLSearchParams(said));
});
follow();
</script>
</body>
</html>
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--out", type=Path, default=HERE / "report" / "playground.html")
    args = parser.parse_args()
    args.out.write_text(page(args.results), encoding="utf-8", newline="\n")
