"""The playground's page is that of the scripts and results, and shows their numbers wherever its sliders stand.

The committed page runs in a real browser: opened at addresses, and in a copy whose sliders are moved.
"""

import csv
import html
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PAGE = BENCHMARKS / "report" / "playground.html"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
FLAGS += "--disable-component-update --disable-sync --dump-dom"
browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: the page is not opened")

# Moves the sliders to each state, as a hand does, and leaves what the page then says.
MOVE = """<script>
const seen = STATES.map(state => {
  for (const [id, text] of Object.entries(state)) {
    $(id).value = values($(id)).indexOf(text);
    $(id).dispatchEvent(new Event("input", {bubbles: true}));
    $(id).dispatchEvent(new Event("change", {bubbles: true}));
  }
  const said = Object.fromEntries([...document.querySelectorAll("td[id]")].map(cell => [cell.id, cell.textContent]));
  return {...said, verdict: $("verdict").textContent, address: location.hash};
});
document.body.innerHTML = "<pre></pre>";
document.querySelector("pre").textContent = JSON.stringify(seen);
</script>"""


@pytest.fixture(scope="module")
def playground():
    pytest.importorskip("scipy")  # language.py
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import playground
    finally:
        sys.path.remove(str(BENCHMARKS))
    return playground


def opened(address: str, profile: Path) -> str:
    """The page as the browser has it once its script has run."""
    command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={profile}", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip(f"{CHROMIUM} does not start here: {done.stderr[-200:]}")
    return done.stdout


def moved(states: list[dict], folder: Path) -> list[dict]:
    path = folder / "moved.html"
    path.write_text(
        PAGE.read_text("utf-8").replace("</body>", MOVE.replace("STATES", json.dumps(states))), "utf-8"
    )
    return json.loads(
        html.unescape(re.search(r"<pre>(.*)</pre>", opened(path.as_uri(), folder / "profile"))[1])
    )


def number(text: str) -> float:
    return float(text.replace("−", "-").replace("∞", "inf"))


def stops(name: str) -> list[str]:
    """What a slider can say."""
    return re.search(rf'id="{name}"[^>]* data-values="([^"]*)"', PAGE.read_text("utf-8"))[1].split()


def test_page_is_that_of_the_scripts_and_results(playground):
    fresh = playground.page(BENCHMARKS / "results")
    assert fresh == PAGE.read_text("utf-8"), "not as committed: python benchmarks/playground.py"


def test_page_needs_nothing_from_elsewhere():
    text = PAGE.read_text("utf-8")
    assert len(text.encode()) < 1_000_000
    assert not re.search(r"https?:|src=|@import|url\(|fetch\(|import\(", text)


@browser
def test_address_sets_the_sliders_and_the_drawing_agrees(tmp_path):
    """The table, and the dots and the ends of the lines as read off the axis, by hand for two addresses."""
    cases = {  # objective and derivative without and with clip, there and at ratio 2
        "": [(1.04, 0.96, 1.04, 0), (1.6, 0.96, 1.6, 0)],
        "#ratio=0.5&adv=-2&eps=0.3&lr=7": [(-1, -1.4, -1, 0), (-4, -4, -4, -4)],
    }
    for i, (address, (here, end)) in enumerate(cases.items()):
        dom = opened(PAGE.as_uri() + address, tmp_path / str(i))
        said = dict(re.findall(r'<td id="([\w-]+)">([^<]+)</td>', dom))
        names = ["plain-value", "clip-value", "plain-slope", "clip-slope"]
        assert [number(said[name]) for name in names] == list(here)
        assert said["plain-ratio"] == "1.89"  # there is no learning rate of 7
        dots, ends = [], []
        for chart in ("objective", "slope"):
            drawn = re.search(rf'<svg id="{chart}".*?</svg>', dom, re.DOTALL)[0]
            axis = re.findall(r'y="([\d.]+)" dy[^>]*>([^<]+)<', drawn)
            pixels, ticks = zip(*sorted((float(y), number(value)) for y, value in axis))
            assert (pixels[0], pixels[-1]) == (10, 206)
            value = lambda y: np.interp(float(y), pixels, ticks)  # noqa: B023
            dots += map(value, re.findall(r'cy="([\d.]+)"', drawn))
            ends += map(value, re.findall(r'class="line[^>]* ([\d.]+)"', drawn))
        assert dots == pytest.approx(here, abs=0.003) and ends == pytest.approx(end, abs=0.003)


@browser
def test_clip_panel_says_what_policy_loss_says(playground, tmp_path):
    """The contract's table by hand, and 300 other places of the sliders by the functions and their gradient."""
    ppo, draw = playground.functions(), random.Random(0)
    by_hand = {("0.50", "2.0"): 1, ("1.00", "2.0"): 2, ("1.50", "2.0"): 2.4}
    by_hand |= {("0.50", "−2.0"): -1.6, ("1.00", "−2.0"): -2, ("1.50", "−2.0"): -3}
    states = [{"ratio": ratio, "adv": adv, "eps": "0.20"} for ratio, adv in by_hand]
    states += [{name: draw.choice(stops(name)) for name in ("ratio", "adv", "eps")} for _ in range(300)]
    seen = moved(states, tmp_path)
    assert [number(said["clip-value"]) for said in seen[: len(by_hand)]] == list(by_hand.values())
    taken = set()
    for state, said in zip(states, seen):
        ratio, adv, eps = (torch.tensor(number(text), dtype=torch.float64) for text in state.values())
        corner = min(abs(ratio - 1 - eps), abs(ratio - 1 + eps)) < 1e-6  # there is no derivative
        for kind, width in (("plain", torch.inf), ("clip", eps)):
            logp = ratio.log().requires_grad_()
            value = -ppo.policy_loss(logp, torch.zeros_like(logp), adv, width, width)
            assert number(said[f"{kind}-value"]) == pytest.approx(value.item(), abs=6e-4), state
            (slope,) = torch.autograd.grad(value, logp)
            assert corner or number(said[f"{kind}-slope"]) == pytest.approx(slope.item(), abs=6e-4), state
        clipped = ppo.clip_fraction(ratio.log(), torch.zeros_like(ratio), adv, eps, eps).item() == 1
        nothing = number(said["clip-slope"]) == 0 != number(said["plain-slope"])
        assert corner or ("takes" in said["verdict"]) == clipped == nothing, state
        taken.add(clipped)
    assert taken == {True, False}


@browser
def test_update_and_leash_say_what_functions_and_runs_say(playground, tmp_path):
    """A few updates again, one setting at a time, and each evaluated step of the committed runs."""
    settings = [
        ("0.08", "0.20", "0.01"),
        ("0.64", "0.10", "1.00"),
        ("0.16", "∞", "0.30"),
        ("1.28", "0.50", "0.00"),
    ]
    steps = stops("step")
    states = [dict(zip(("lr", "clip", "beta"), setting)) for setting in settings] + [
        {"step": x} for x in steps
    ]
    seen = moved(states, tmp_path)
    assert [said["address"] for said in seen[:2]] == ["", "#lr=0.64&clip=0.10&beta=1.00"]
    for setting, said in zip(settings, seen):
        rate, eps, beta = map(number, setting)
        kinds = {"plain": (torch.inf, 0), "clip": (eps, 0), "penalty": (torch.inf, beta), "both": (eps, beta)}
        for kind, expected in ((kind, update(playground, rate, *kinds[kind])) for kind in kinds):
            shown = [number(said[f"{kind}-{name}"]) for name in ("ratio", "kl", "share")]
            assert shown == pytest.approx(expected, abs=0.006), (setting, kind)
    for step, said in zip(steps, seen[len(settings) :]):
        for kind, prefix in (("leash", ""), ("free", "free-")):
            for name, metric in {"score": "score", "truth": "true_preference", "kl": "kl"}.items():
                shown = [number(x) for x in re.findall(r"[−\d.]+", said[f"{kind}-{name}"])]
                found = evaluated(prefix, step, f"eval/{metric}")
                expected = [np.mean(found), min(found), max(found)]
                assert shown == pytest.approx(expected[: len(shown)], abs=0.006), (step, kind, name)


def update(playground, rate: float, eps: float, beta: float) -> list[float]:
    """Ratio of the best action, KL, and share clipped in the last epoch, as in the textbook."""
    ppo, (actions, adv, order) = playground.functions(), playground.batch()
    assert torch.equal(torch.cat(order).bincount(), torch.full((len(actions),), playground.EPOCHS))
    logits, shares = torch.zeros(4, dtype=torch.float64, requires_grad=True), []
    old = logits.detach().log_softmax(-1)
    for mb in order:
        policy = torch.distributions.Categorical(logits=logits)
        logp, old_logp = policy.log_prob(actions[mb]), old[actions[mb]]
        shares.append(ppo.clip_fraction(logp, old_logp, adv[mb], eps, eps).item())
        kl = torch.distributions.kl_divergence(policy, torch.distributions.Categorical(logits=old))
        loss = ppo.policy_loss(logp, old_logp, adv[mb], eps, eps).mean() + beta * kl
        (gradient,) = torch.autograd.grad(loss, logits)
        logits = (logits - rate * gradient).detach().requires_grad_()
    logps = logits.detach().log_softmax(-1)
    kl = (logps.exp() * (logps - old)).sum().item()
    return [(logps - old).exp()[0].item(), kl, float(np.mean(shares[-playground.MINIBATCHES :]))]


def evaluated(prefix: str, step: str, metric: str) -> list[float]:
    folder = BENCHMARKS / "results" / "ppo_rlhf" / "world"
    paths = [path for path in folder.glob(f"{prefix}seed*.csv") if path.name.count(".") == 1]
    rows = itertools.chain.from_iterable(csv.DictReader(path.open()) for path in paths)
    return [float(row[metric]) for row in rows if row["step"] == step and row[metric]]
