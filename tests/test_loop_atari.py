"""The loop of ppo_atari.py: what it really passes to the functions, on games where all is known, and on ALE."""

import copy
import itertools
import json
import math
import os
import signal
from pathlib import Path

import numpy as np
import probes_atari
import pytest
import torch
from probes_atari import Probe

pytestmark = pytest.mark.setting("ppo_atari")
# 15 steps is the limit: about half of the probe's games, three lives of 2 to 10 steps, are cut off by it
SMALL = dict(
    env_id="ALE/Breakout-v5", num_envs=2, num_steps=20, num_minibatches=4, update_epochs=2, max_frames=60,
    eval_episodes=0, compile=False, device="cpu",
)  # fmt: skip
FIRE = 1


@pytest.fixture
def tiny(script, monkeypatch):
    """A small network in place of the script's, unless it is called otherwise: its own is then used, slowly."""
    if probes_atari.can_be_replaced(script.find("Agent")):
        monkeypatch.setattr(script.module, "Agent", probes_atari.tiny(script.find("Agent")))


@pytest.fixture
def probe(script, monkeypatch):
    """The games of probes_atari in place of ALE's, and an empty log."""
    script.watch("AtariVectorEnv")
    monkeypatch.setattr(script.module, "AtariVectorEnv", Probe)
    Probe.log, Probe.made = [], []


@pytest.fixture
def run(script, tmp_path):
    """run(**flags): main in a scratch folder; fails (ours) or skips (a copy) if a flag is gone."""

    def start(**flags):
        os.chdir(tmp_path)
        Probe.log, Probe.made = [], []
        flags = {**SMALL, **flags}
        flags.setdefault("total_timesteps", 3 * flags["num_steps"] * flags["num_envs"])
        return script.main(script.Args(**script.flags(**flags)))

    return start


@pytest.fixture
def train(probe, tiny, run):
    """`run` on the probe's games with the small network."""
    return run


def some_games(script, num, seed, **flags):
    return script.Games(script.Args(**script.flags(**flags)), np.random.SeedSequence(seed).spawn(num))


def same(a, b):
    """Equal to the bit, however deep the tensors lie."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def detached(x):
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


@pytest.fixture
def record(script, monkeypatch, tiny):
    """record(name) replaces a function by one that notes (inputs, result) of every call, and the weights then."""
    agents, make_agent = [], script.find("Agent")
    monkeypatch.setattr(
        script.module, "Agent", lambda *a, **k: agents.append(make_agent(*a, **k)) or agents[-1]
    )

    def start(name):
        calls, function = [], script.watch(name)

        def recorder(*inputs, **named):
            result = function(*inputs, **named)
            given = script.as_ours(function, inputs, named)
            calls.append(
                (
                    [detached(x) for x in given],
                    detached(result),
                    copy.deepcopy(agents[-1]) if agents else None,
                )
            )
            return result

        monkeypatch.setattr(script.module, name, recorder)
        return calls

    return start


@pytest.fixture
def batches(script, monkeypatch):
    """The batch of every rollout, and the weights that acted."""
    kept, rollout = [], script.watch("play_rollout")

    def recorder(agent, *rest, **named):
        before = copy.deepcopy(agent)
        result = rollout(agent, *rest, **named)
        kept.append(({name: detached(value) for name, value in result[0].items()}, before))
        return result

    monkeypatch.setattr(script.module, "play_rollout", recorder)
    return kept


def column(rows, name):
    """(T, N, ...) of one field of the log."""
    return torch.tensor(np.array([[getattr(row, name) for row in step] for step in rows]))


def scores_of(rows):
    """[(step, score, length)] of whole games: over all lives, until the last or the limit."""
    scores, running = [], {}
    for t, step in enumerate(rows):
        for i, row in enumerate(step):
            running.setdefault(i, []).append(row.reward)
            if row.over:
                rewards = running.pop(i)
                scores.append((t, sum(rewards), len(rewards)))
    return scores


def lines(out):
    """metrics.jsonl, the lines of one step joined, without the numbers that depend on the clock."""
    rows = {}
    for row in map(json.loads, open(f"{out['folder']}/metrics.jsonl")):
        rows[row["step"]] = rows.get(row["step"], {}) | row
    return [{k: v for k, v in row.items() if k not in ("charts/SPS", "time/cpu")} for row in rows.values()]


# ---- rollout ----


@pytest.mark.parametrize("num_envs", [1, 3])
def test_rollout_is_what_the_games_did(record, train, num_envs):
    """Signs of rewards, endings and values reach compute_gae as the games gave them: a lost life and a lost game stop
    the bootstrap, the limit of frames does not, and its value is that of the picture really reached, also at the end
    of a rollout; no step is one that a reset swallowed (B04, B05, B07, B08, B10, B26, B32, B52)."""
    calls = record("compute_gae")
    train(num_envs=num_envs, num_steps=60, gamma=0.9, gae_lambda=0.8)
    rows = probes_atari.steps()
    assert len(calls) == 3 and len(rows) == 180
    for k, (inputs, _, agent) in enumerate(calls):
        part = rows[60 * k : 60 * (k + 1)]
        assert not column(part, "ignored").any()
        truncated, terminated, lost = (column(part, n) for n in ("truncated", "terminated", "life_lost"))
        assert truncated.any() and (lost & ~column(part, "over")).any()  # the test is about these
        for name, given, real in (
            ("rewards", inputs[0], column(part, "reward").sign().float()),
            ("terminated", inputs[3], terminated),
            ("done", inputs[4], terminated | truncated),
        ):
            assert torch.equal(given, real), (
                f"{name} differs at (step, game) {(given != real).nonzero().tolist()}"
            )
        values, following = (
            agent(column(part, name).flatten(0, 1))[1].detach().view(60, num_envs)
            for name in ("before", "reached")
        )
        torch.testing.assert_close(inputs[1], values, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(inputs[2][~terminated], following[~terminated], atol=1e-4, rtol=1e-4)
        assert inputs[5:] == [0.9, 0.8]


def test_value_after_the_rollout_is_that_of_the_next_state(record, train):
    """The last row bootstraps from the picture after the last step, not from the one before it (B04)."""
    calls = record("compute_gae")
    train(num_steps=10, total_timesteps=160, learning_rate=1e-12)
    followed = 0
    for (before, *_), (after, *_) in zip(calls, calls[1:]):
        goes_on = ~before[4][-1]
        followed += goes_on.sum()
        torch.testing.assert_close(before[2][-1][goes_on], after[1][0][goes_on], atol=1e-4, rtol=1e-4)
        assert ((before[2][-1] - before[1][-1]).abs() > 1e-3)[goes_on].all()
    assert followed > 5


def test_a_life_lost_on_the_last_frame_ends_the_game(train):
    """ALE tells a life that is lost at the limit of frames as `terminated` with lives left, and resets that game by
    itself all the same: unless the script resets it, a step is ignored and the score runs on (B10, B50)."""
    train(num_envs=3, num_steps=200, num_minibatches=1, update_epochs=1, total_timesteps=600)
    rows = probes_atari.steps()
    both = [row for step in rows for row in step if row.over and row.terminated and row.life_lost]
    assert len(both) > 3
    assert not column(rows, "ignored").any()


def test_scores_are_raw_and_of_whole_games(train):
    """The score counts raw rewards over all lives, and starts again after a lost game and after the limit of frames
    alike (B50); rewards are signs for the learner only."""
    out = train(num_envs=3, num_steps=40, seed=2)
    games = scores_of(probes_atari.steps())
    ends = {(row.truncated, row.terminated) for step in probes_atari.steps() for row in step if row.over}
    assert {(True, False), (False, True)} <= ends and max(abs(score) for _, score, _ in games) > 5
    for k, line in enumerate(lines(out)):
        now = [game for game in games if 40 * k <= game[0] < 40 * (k + 1)]
        assert line["charts/episodes"] == len(now) > 0
        assert line["charts/episodic_return"] == pytest.approx(np.mean([score for _, score, _ in now]))
        assert line["charts/episodic_length"] == pytest.approx(np.mean([length for _, _, length in now]))
        upto = [score for t, score, _ in games if t < 40 * (k + 1)][-100:]
        assert line["charts/episodic_return_100"] == pytest.approx(np.mean(upto))


@pytest.mark.parametrize("env_id", ["ALE/Breakout-v5", "ALE/Freeway-v5"])
@pytest.mark.parametrize("life_loss", [True, False])
def test_fire_is_executed_after_a_lost_life_and_never_else(train, batches, env_id, life_loss):
    """In the step after each lost life FIRE is executed, in no other one (not after a lost game, which ALE starts),
    nowhere in a game without FIRE or with --no-life-loss; the batch keeps the agent's own action, scored by the
    weights that acted, and the picture that it saw (B01, B43)."""
    train(env_id=env_id, life_loss=life_loss, num_steps=60, num_minibatches=1, update_epochs=2)
    rows, fired = probes_atari.steps(), 0
    for k, (batch, agent) in enumerate(batches):
        part = rows[60 * k : 60 * (k + 1)]
        before = [rows[60 * k - 1] if k else None, *part[:-1]]
        expected = batch["actions"].clone()
        for t, step in enumerate(before):
            for i, row in enumerate(step or ()):
                if life_loss and "Breakout" in env_id and row.life_lost and not row.over:
                    fired += int(expected[t, i] != FIRE)
                    expected[t, i] = FIRE
        differs = (column(part, "action") != expected).nonzero().tolist()
        assert not differs, f"executed another action than due at (step, game) {differs}"
        assert torch.equal(batch["obs"], column(part, "before"))
        logps = torch.distributions.Categorical(logits=agent(batch["obs"].flatten(0, 1))[0]).log_prob
        own = logps(batch["actions"].flatten()).view(60, 2)
        torch.testing.assert_close(batch["logps"], own.detach(), atol=1e-4, rtol=1e-4)
        if not life_loss:
            assert torch.equal(batch["terminated"], column(part, "over") & column(part, "terminated"))
    assert (fired > 3) == (life_loss and "Breakout" in env_id)


def test_flags_reach_the_games(train):
    """--no-life-loss is the protocol of Machado et al. (2018): no no-ops (B58), no FIRE, 25 % sticky actions, lives
    unseen; else no sticky actions, up to 30 no-ops; the score is never of clipped rewards."""
    for flags, expected in (
        ({}, (True, 30, 0.0, True)),
        ({"life_loss": False}, (False, 0, 0.25, False)),
        ({"sticky": 0.1}, (True, 30, 0.1, True)),
        ({"life_loss": False, "sticky": 0.0}, (False, 0, 0.0, False)),
    ):
        train(total_timesteps=40, eval_episodes=3, max_frames=44, **flags)
        for env in Probe.made:
            names = ("life_loss_info", "noop_max", "repeat_action_probability", "use_fire_reset")
            assert tuple(env.options.get(name, True) for name in names) == expected
            assert env.options["max_num_frames_per_episode"] == 44 and not env.options["reward_clipping"]
            assert not env.options["episodic_life"]


def test_frames_are_limited_by_truncation(record, train):
    """--max-frames 28 cuts games after 7 steps, which is `done` but not `terminated`."""
    calls = record("compute_gae")
    train(max_frames=28, life_loss=False, num_steps=70, num_minibatches=1, total_timesteps=140)
    rows, (inputs, _, _) = probes_atari.steps(), calls[0]
    cut = column(rows, "truncated")
    assert cut.sum() > 10 and torch.equal(inputs[4] & ~inputs[3], cut)
    assert max(length for _, _, length in scores_of(rows)) == 7


def test_sampled_actions_follow_the_scored_distribution(train, batches):
    """Actions are drawn from the softmax of the logits, afresh for each step and each game (B29, B43): counts by
    chi-square, by confidence of the policy, and between the games."""
    T, N = 300, 3
    train(num_envs=N, num_steps=T, total_timesteps=T * N, update_epochs=1, life_loss=False)
    batch, agent = batches[0]
    with torch.no_grad():
        parts = batch["obs"].flatten(0, 1).split(250)
        probs = torch.cat([agent(part)[0] for part in parts]).softmax(-1).double()
    chosen = torch.nn.functional.one_hot(batch["actions"].flatten(), 4).double()
    assert probs.max() > 0.8  # else another temperature would not show
    order, rank = probs.max(-1).values.argsort(), probs.argsort(-1)  # by action, and by likelihood
    ranked = probs.gather(-1, rank), chosen.gather(-1, rank)
    for (p, seen), part in itertools.product(((probs, chosen), ranked), (order, *order.tensor_split(3))):
        p, seen = p[part], seen[part].sum(0)
        covariance = torch.diag(p.sum(0)) - p.T @ p
        gap = (seen - p.sum(0))[:3]
        assert gap @ torch.linalg.solve(covariance[:3, :3], gap) < 21.1  # chi-square, 3 degrees, 1e-4
    probs, chosen = probs.view(T, N, 4), chosen.view(T, N, 4)
    for other_p, other in ((probs.roll(1, 0), chosen.roll(1, 0)), (probs.roll(1, 1), chosen.roll(1, 1))):
        expected, same = (probs * other_p).sum(-1), (chosen * other).sum(-1)
        assert abs((same - expected).sum()) < 4.5 * (expected * (1 - expected)).sum().sqrt()


def test_a_wrong_action_never_reaches_the_games(script, probe, tmp_path):
    """ALE waits for ever for an action that a game does not have: such an action raises before (both sides)."""
    games = some_games(script, 2, 1, **SMALL)
    games.reset()
    for action in (4, -1):
        with pytest.raises((ValueError, IndexError)):
            games.step(np.array([0, action]))
    assert not Probe.log
    games.step(np.array([0, 3]))


# ---- update ----


def test_ratio_is_one_before_the_first_step(record, train):
    """The first minibatch of every update sees the weights that acted: ratio 1 for each sample (B01, B112)."""
    calls = record("policy_loss")
    train(learning_rate=0.01)
    assert len(calls) == 3 * 8
    for k, (inputs, _, _) in enumerate(calls):
        if k % 8 == 0:
            torch.testing.assert_close(inputs[0], inputs[1], atol=1e-4, rtol=1e-4)
        else:
            assert (inputs[0] - inputs[1]).abs().max() > 1e-3  # later ones do move (B113)


def test_every_sample_once_an_epoch_and_paired(record, train):
    """Each epoch visits each row once, in a new order, and the row's advantage, value and return stay together
    (B11, B26, B32, B82, B83); advantages are normalised within the minibatch, before the surrogate (B13)."""
    gae, policy, value = record("compute_gae"), record("policy_loss"), record("value_loss")
    train(num_steps=40, norm_adv=True)
    for k in range(3):
        (_, values, *_), (adv, ret), _ = gae[k]
        table = {
            round(v.item(), 5): (a.item(), r.item())
            for v, a, r in zip(values.flatten(), adv.flatten(), ret.flatten())
        }
        assert len(table) == 80
        orders = []
        for epoch in range(2):
            order = []
            for call in range(8 * k + 4 * epoch, 8 * k + 4 * epoch + 4):
                old_v, returns = value[call][0][1], value[call][0][2]
                keys = [round(v, 5) for v in old_v.tolist()]
                order += keys
                raw = torch.tensor([table[key][0] for key in keys])
                torch.testing.assert_close(returns, torch.tensor([table[key][1] for key in keys]))
                normal = (raw - raw.mean()) / raw.std(correction=0)
                torch.testing.assert_close(policy[call][0][2], normal, atol=1e-3, rtol=1e-3)
            assert sorted(order) == sorted(table)
            orders.append(order)
        assert orders[0] != orders[1]


def test_actions_and_pictures_stay_with_their_row(record, train, batches):
    """The actions that the update scores are those of its own rows, on the rows' own pictures (B82, B83)."""
    scored, value = record("categorical_logp_entropy"), record("value_loss")
    train(total_timesteps=40)
    batch, agent = batches[0]
    rows = {round(v, 5): k for k, v in enumerate(batch["values"].flatten().tolist())}
    logits = agent(batch["obs"].flatten(0, 1))[0].detach()
    order = [rows[round(v, 5)] for v in value[0][0][1].tolist()]
    given, action = scored[-len(value)][0]  # the update's come last
    assert torch.equal(action, batch["actions"].flatten()[order])
    torch.testing.assert_close(given, logits[order], atol=1e-4, rtol=1e-4)


def reference_update(script, agent, batch, epochs, num, clip, ent, vf, norm, lr):
    """The update once more, with torch's own Categorical, clip_grad_norm_ and Adam on separate parameters."""
    value_clip = clip if script.has_flag("clip_vloss") else math.inf
    generator = torch.Generator().manual_seed(int(script.streams(1)[2].generate_state(1)[0]))
    optimizer = torch.optim.Adam(agent.parameters(), lr=lr, eps=1e-5)
    obs, actions, logps, adv, ret, old = batch
    for _ in range(epochs):
        for mb in torch.randperm(len(obs), generator=generator).tensor_split(num):
            logits, v = agent(obs[mb])
            policy = torch.distributions.Categorical(logits=logits)
            ratio = (policy.log_prob(actions[mb]) - logps[mb]).exp()
            a = adv[mb]
            a = (a - a.mean()) / (a.var(correction=0) + 1e-8).sqrt()
            surrogate = torch.min(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
            near = old[mb] + (v - old[mb]).clamp(-value_clip, value_clip)
            error = torch.max((v - ret[mb]) ** 2, (near - ret[mb]) ** 2)
            loss = -surrogate.mean() + vf * 0.5 * error.mean() - ent * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(agent.parameters(), norm)
            optimizer.step()


@pytest.mark.parametrize("norm", [0.05, 1e6])
def test_update_equals_the_textbook(script, monkeypatch, train, batches, norm):
    """All steps of an update together (sign and weight of each term, clipping of the norm, Adam's epsilon, number
    of epochs, B02, B16, B19, B31) move the weights as an independent implementation does, with the weights of terms
    that are new in a copy (flags named ..._coef) at 0."""
    steps = spy_on_adam(script, monkeypatch)
    flags = dict(ent_coef=0.1, vf_coef=0.7, clip_coef=0.15, max_grad_norm=norm, learning_rate=2e-3)
    flags |= script.new_terms_off()
    out = train(num_steps=40, total_timesteps=80, update_epochs=4, seed=1, **flags)
    uses_adam(script, steps)
    batch, agent = batches[0]
    names = ("obs", "actions", "logps", "advantages", "returns", "values")
    batch = [batch[name].flatten(0, 1) for name in names]
    for parameter in agent.parameters():
        parameter.data = parameter.data.clone()  # no longer views of one vector
    reference_update(script, agent, batch, 4, 4, 0.15, 0.1, 0.7, norm, 2e-3)
    trained = torch.load(f"{out['folder']}/checkpoint.pt", weights_only=True)["parts"]["agent"]
    for name, weight in agent.state_dict().items():
        torch.testing.assert_close(
            trained[name], weight, atol=5e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_flags_reach_the_functions(record, train):
    """--clip-coef, --no-clip-vloss and --no-norm-adv are obeyed, in both losses (B14, B20, B35)."""
    gae, policy, value = record("compute_gae"), record("policy_loss"), record("value_loss")
    train(clip_coef=0.37, clip_vloss=False, norm_adv=False)
    assert all(inputs[3:] == [0.37, 0.37] for inputs, _, _ in policy)
    assert all(inputs[3] is None for inputs, _, _ in value)
    raw = torch.cat([inputs[2] for inputs, _, _ in policy[:4]])
    torch.testing.assert_close(raw.sort().values, gae[0][1][0].flatten().sort().values)
    train(clip_coef=0.37, total_timesteps=40)
    assert value[-1][0][3] == 0.37


def spy_on_adam(script, monkeypatch):
    """The learning rate of every optimiser step, by torch's function or its class."""
    rates, by_class = [], torch.optim.Adam.step
    monkeypatch.setattr(
        torch.optim.Adam,
        "step",
        lambda self, *a: rates.append(self.param_groups[0]["lr"]) or by_class(self, *a),
    )
    if by_function := getattr(script.module, "adam", None):
        monkeypatch.setattr(
            script.module, "adam", lambda *a, lr, **k: rates.append(lr) or by_function(*a, lr=lr, **k)
        )
    return rates


def uses_adam(script, steps):
    if not steps:
        script.gone("takes no step of torch's Adam: the optimiser is its own")


@pytest.mark.parametrize("anneal", [True, False])
def test_learning_rate_of_every_step(script, monkeypatch, train, anneal):
    """The first update uses the full rate, the last one a positive one, a line between them (B25)."""
    rates = spy_on_adam(script, monkeypatch)
    out = train(total_timesteps=160, learning_rate=4e-3, anneal_lr=anneal)
    uses_adam(script, rates)
    expected = [4e-3, 3e-3, 2e-3, 1e-3] if anneal else [4e-3] * 4
    np.testing.assert_allclose(rates, np.repeat(expected, 8))
    np.testing.assert_allclose([line.get("charts/learning_rate") for line in lines(out)], expected)


def test_target_kl_stops_before_the_step_that_is_too_far(script, monkeypatch, record, train):
    """Above --target-kl no further step is taken in this update, in no loop, and the next rollout goes on (B23)."""
    steps = spy_on_adam(script, monkeypatch)
    calls = record("policy_loss")
    # larger than what rounding makes of a ratio of 1, smaller than what one step does
    out = train(target_kl=1e-7, learning_rate=0.01)
    uses_adam(script, steps)
    assert len(steps) == 3 and len(calls) == 6  # one step at ratio 1, then a look that ends the update
    assert out["step"] == 120
    steps.clear()
    train(target_kl=1e9)
    assert len(steps) == 24


def test_budget_is_rounded_up_and_used(train, capsys):
    """No collected step is dropped, and the rounding is said (B26)."""
    out = train(total_timesteps=121, num_envs=3)
    assert len(Probe.log) == 180 == out["step"] and "121 rounded up to 180" in capsys.readouterr().out


def test_metrics_are_means_over_minibatches(script, record, train, record_property):
    """Logged losses are means over all minibatches, the clip fraction is signed (B22)."""
    policy, value, clipped = record("policy_loss"), record("value_loss"), record("clip_fraction")
    gae, scored = record("compute_gae"), record("categorical_logp_entropy")
    out = train(num_steps=40, total_timesteps=80, learning_rate=0.05)
    means = {name: torch.stack([result.mean() for _, result, _ in calls]).mean().item()
             for name, calls in (("policy_loss", policy), ("value_loss", value), ("clipfrac", clipped))}  # fmt: skip
    log_ratio = torch.cat([inputs[0] - inputs[1] for inputs, _, _ in policy])
    entropies = [torch.distributions.Categorical(logits=inputs[0]).entropy().mean()
                 for inputs, _, _ in scored[-len(value) :]]  # the update's come last  # fmt: skip
    values, returns = gae[0][0][1], gae[0][1][1]
    means |= {
        "approx_kl": (torch.expm1(log_ratio) - log_ratio).mean().item(),
        "old_approx_kl": -log_ratio.mean().item(),
        "entropy": torch.stack(entropies).mean().item(),
        "explained_variance": 1 - ((returns - values).var() / returns.var()).item(),
    }
    assert len(entropies) == 8 == len(policy) and means["clipfrac"] > 0
    for name, mean in means.items():
        if not script.own and f"losses/{name}" not in out:
            record_property("unverified", f"there is no metric losses/{name}")
            continue
        assert out[f"losses/{name}"] == pytest.approx(mean, rel=1e-3, abs=1e-6), name


# ---- network ----


def network(script, num_actions, bf16):
    """The script's own network, or not if it is called otherwise or returns other things than ours."""
    if not probes_atari.can_be_replaced(script.find("Agent")):
        script.gone(
            "has an Agent that is not called with (number of actions, bf16) or returns not (logits, value)"
        )
    torch.manual_seed(0)
    return script.module.Agent(num_actions, bf16)


def picture(rows=3):
    """uint8 pictures that change when they are mirrored, transposed or their frames are exchanged."""
    y, x = torch.meshgrid(torch.arange(84), torch.arange(84), indexing="ij")
    frames = [(2 * y + x + 20 * k) % 256 for k in range(4)]
    frames[1][:20, 50:] = 255
    return torch.stack([torch.stack(frames).roll(7 * k, -1) for k in range(rows)]).to(torch.uint8)


def seen_by_first_layers(script, agent, obs):
    """What every convolution on four frames gets to see when the network looks at `obs`, and what it returns."""
    seen, hooks = [], []
    for layer in agent.modules():
        if isinstance(layer, torch.nn.Conv2d) and layer.in_channels == 4:
            hooks.append(layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].float())))
    if not hooks:
        script.gone("has no convolution on four frames: another network")
    with torch.no_grad():
        logits, values = agent(obs)
    for hook in hooks:
        hook.remove()
    return seen, logits, values


@pytest.mark.parametrize("bf16", [False, True])
def test_network_sees_the_picture_upright_and_once_divided(script, bf16):
    """Pixels are divided by 255 exactly once (B56); neither head sees height and width exchanged, or mirrored (B55);
    one row's result depends on its own picture only, and the heads are float32."""
    agent, obs = network(script, 5, bf16), picture()
    seen, logits, values = seen_by_first_layers(script, agent, obs)
    assert seen and logits.shape == (3, 5) and values.shape == (3,)
    assert logits.dtype == values.dtype == torch.float32
    for given in seen:
        torch.testing.assert_close(given, obs.float() / 255, atol=4e-3 if bf16 else 1e-6, rtol=0)
    bright = torch.full((1, 4, 84, 84), 255, dtype=torch.uint8)
    for given in seen_by_first_layers(script, agent, bright)[0]:
        assert given.max() == 1.0
    for k in range(3):
        _, one, value = seen_by_first_layers(script, agent, obs[k : k + 1])
        close = dict(atol=2e-2, rtol=2e-2) if bf16 else dict(atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(one[0], logits[k], **close)
        torch.testing.assert_close(value[0], values[k], **close)
    assert torch.distributions.Categorical(logits=logits).entropy().min() > 0.9 * math.log(5)


def test_network_is_that_of_the_paper(script):
    """Convolutions 32 x 8 x 8 / 4, 64 x 4 x 4 / 2, 64 x 3 x 3 / 1, 512 hidden units, all with ReLU (Mnih et al. 2015),
    and two heads on them."""
    agent, obs = network(script, 6, False), picture()
    weights = list(agent.parameters())
    if [tuple(w.shape) for w in weights] != [
        tuple(w.shape) for w in script.original.Agent(6, False).parameters()
    ]:
        script.gone("has another network")
    layers, x = list(zip(weights[::2], weights[1::2])), obs / 255
    for (weight, bias), stride in zip(layers[:3], (4, 2, 1)):
        x = torch.relu(torch.nn.functional.conv2d(x, weight, bias, stride))
    x = torch.relu(x.flatten(1) @ layers[3][0].T + layers[3][1])
    logits, values = agent(obs)
    heads = [x @ weight.T + bias for weight, bias in layers[4:]]
    for head in heads:
        expected = values if head.shape[1] == 1 else logits
        torch.testing.assert_close(head.view_as(expected), expected, atol=1e-5, rtol=1e-4)


def a_batch(agent, n=48):
    """What the update learns from: pictures, and numbers near those of the network."""
    obs = picture(n)
    with torch.no_grad():
        logits, values = agent(obs)
    actions = torch.arange(n) % logits.shape[1]
    logps = torch.log_softmax(logits, -1)[torch.arange(n), actions]
    noise = torch.Generator().manual_seed(3)
    batch = {"obs": obs, "actions": actions, "logps": logps + 0.03 * torch.randn(n, generator=noise)}
    batch["advantages"], values = torch.randn(n, generator=noise), values.clone()
    return batch | {"values": values, "returns": values + torch.randn(n, generator=noise)}


def test_compiled_and_eager_gradient_agree(script, tiny, capsys):
    """torch.compile changes the speed, not the numbers, and sees flags that change between calls (B35)."""
    agent = network(script, 4, False)
    batch, compiled = a_batch(agent), script.compile_or_eager(script.pixel_gradient)
    for mb, flags in (
        (torch.arange(24), dict(clip_coef=0.2, ent_coef=0.1, vf_coef=0.5)),
        (torch.arange(24, 48), dict(clip_coef=0.1, ent_coef=0.0, vf_coef=0.9)),
        (torch.arange(24, 48), dict(clip_vloss=False, norm_adv=False)),
    ):
        args = script.Args(**script.flags(**flags))
        for a, b in zip(compiled(agent, batch, mb, args), script.pixel_gradient(agent, batch, mb, args)):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)
    if "running uncompiled" in capsys.readouterr().out:
        pytest.skip("there is no C++ compiler: nothing was compiled")


@pytest.mark.flags("bf16")
def test_gradient_in_bf16_is_close_to_float32(script):
    """--bf16 rounds to 8 bits within the convolutions only: the gradient keeps its direction (cosine above 0.99) and
    its length (within 5 %), and it, the losses and the weights are float32."""
    gradients = []
    for bf16 in (False, True):
        agent = network(script, 4, bf16)
        batch = gradients[0][2] if bf16 else a_batch(agent)
        grad, stats = script.pixel_gradient(agent, batch, torch.arange(48), script.Args())
        assert grad.dtype == stats.dtype == torch.float32
        assert all(w.dtype == torch.float32 for w in agent.parameters())
        gradients.append((grad, stats, batch))
    (a, stats, _), (b, stats_b, _) = gradients
    assert not torch.equal(a, b)  # it was used
    assert torch.cosine_similarity(a, b, 0) > 0.99 and abs(b.norm() / a.norm() - 1) < 0.05
    torch.testing.assert_close(stats_b, stats, atol=0.02, rtol=0.02)


@pytest.mark.flags("bf16")
def test_bf16_run_keeps_float32_weights_and_optimiser(script, probe, run, batches):
    """A whole iteration with --bf16: weights, moments, values, log-probabilities and returns are float32, and the
    acting weights' ratio to themselves is 1 up to bfloat16's rounding."""
    out = run(bf16=True, num_steps=8, total_timesteps=16, update_epochs=1, num_minibatches=2)
    parts = torch.load(f"{out['folder']}/checkpoint.pt", weights_only=True)["parts"]
    moments = list(parts["optimizer"].values()) if script.own else [*parts.get("optimizer", {}).values()]
    for tensor in [*parts["agent"].values(), *moments]:
        assert tensor.dtype == torch.float32
    assert all(
        batches[0][0][name].dtype == torch.float32 for name in ("logps", "values", "returns", "advantages")
    )
    assert math.isfinite(out["losses/grad_norm"]) and abs(out["losses/approx_kl"]) < 1e-3


@pytest.mark.parametrize("num_envs, own", [(3, slice(None)), (6, slice(1, 4))])
def test_acting_is_what_is_evaluated(script, num_envs, own):
    """Actions are samples by the noise of the games' own places among all, one row a step in whatever blocks it is
    drawn; `evaluate` gives them the log-probability, entropy and value that torch gives for the same weights."""
    network(script, 5, False)  # of ours or of another shape
    agent, obs = probes_atari.tiny(script.module.Agent)(5), picture()
    with torch.no_grad():
        noise = np.random.default_rng(1).gumbel(size=(7, num_envs, 5))[:, own].astype(np.float32)
        logits, values = agent(obs)
        expected = (logits + torch.tensor(noise)).argmax(-1)
        for num_steps in (7, 2, 1):
            act = agent.acting(np.random.default_rng(1), num_steps, num_envs, own)
            assert torch.equal(torch.stack([act(obs) for _ in range(7)]), expected)
        again = agent.acting(np.random.default_rng(1), 7, num_envs, own)(obs.numpy())
        assert torch.equal(again, expected[0]) and len(expected.unique()) > 2
        policy = torch.distributions.Categorical(logits=logits)
        for given, right in zip(
            agent.evaluate(obs, again), (policy.log_prob(again), policy.entropy(), values), strict=True
        ):
            torch.testing.assert_close(given, right)


def test_adam_is_torchs(script, monkeypatch):
    """Every weight of the module is a part of the one vector, in the order of the gradient's parts, and moves as
    torch's Adam moves it; a state that was saved goes on where it was."""
    a, b = (torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)) for _ in range(2))
    b.load_state_dict(a.state_dict())
    ours, theirs = script.Adam(a), torch.optim.Adam(b.parameters(), eps=1e-5)
    steps = spy_on_adam(script, monkeypatch)
    for step in range(6):
        if step == 3:
            state = {name: x.clone() for name, x in ours.state_dict().items()}
            ours = script.Adam(a)
            ours.load_state_dict(state)
        grads = [torch.randn_like(p) for p in b.parameters()]
        ours.step(torch.cat([g.flatten() for g in grads]), 1e-2 / (step + 1))
        uses_adam(script, steps)
        theirs.param_groups[0]["lr"] = 1e-2 / (step + 1)
        for p, g in zip(b.parameters(), grads):
            p.grad = g
        theirs.step()
        for p, q in zip(a.parameters(), b.parameters()):
            torch.testing.assert_close(p, q, atol=1e-7, rtol=1e-6)
    assert torch.equal(ours.weights, torch.cat([p.detach().flatten() for p in a.parameters()]))


# ---- runs ----


def test_same_seed_same_numbers(train):
    """Two runs of one seed agree to the bit; another seed, and the games among themselves and one after another,
    differ (B29)."""
    a, b = (train(run_name=name) for name in "ab")
    seeds = [seed for _, seed in Probe.made[0].resets if seed >= 0]
    pictures = [row.before.tobytes() for row in Probe.log]
    first = [row.before.tobytes() for row in Probe.log[:2]]
    c = train(run_name="c", seed=2)
    assert lines(a) == lines(b) != lines(c)
    assert first[0] != first[1] and Probe.log[0].before.tobytes() not in first
    assert len(set(seeds)) == len(seeds) >= 2 and len(set(pictures)) == len(pictures)


def test_evaluation_changes_nothing(script, train):
    """Evaluations use games, seeds and streams of their own: training is the same to the bit with them (B53)."""
    a = train(run_name="a", num_steps=20)
    b = train(run_name="b", num_steps=20, eval_every=40, eval_episodes=3)
    evaluated = lines(b)
    assert all("eval/episodic_return" in row for row in evaluated)
    assert lines(a) == [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in evaluated]
    trained, *own = Probe.made
    seeds, others = (
        {seed for env in envs for _, seed in env.resets if seed >= 0} for envs in ([trained], own)
    )
    assert seeds and others and not seeds & others
    for checkpoint in ("runs/b/checkpoint.pt", "runs/b", "b"):
        again = script.main(script.parse_args(["--eval-checkpoint", checkpoint, "--device", "cpu"]))
        assert again["eval/episodic_return"] == b["eval/episodic_return"]  # what it scored in the run


def test_evaluation_is_over_whole_games(train):
    """Raw scores of the first whole game of each copy, across its lives (B53), with the same seeds each time."""
    out = train(eval_episodes=64, eval_every=40, learning_rate=1e-12, sticky=0.0, max_frames=400)
    envs = [env for env in Probe.made if env.num_envs == 64]
    rows, firsts = probes_atari.steps(envs[-1]), []
    rows = rows[-(len(rows) * len(envs) // 3) :]  # of the last evaluation, if all have the same games
    for i in range(64):
        game = [step[i] for step in rows]
        end = next(k for k, row in enumerate(game) if row.over)
        firsts.append((sum(row.reward for row in game[: end + 1]), end + 1))
        assert sum(row.life_lost for row in game[: end + 1]) in (1, 2, 3) or game[end].truncated
    scores, lengths = zip(*firsts)
    ends = [sum(step[i].over for step in rows) for i in range(64)]
    assert max(ends) > 1, (lengths, ends)  # some end once more before the last has ended
    assert out["eval/episodic_return"] == pytest.approx(np.mean(scores))
    assert out["eval/episodic_return_std"] == pytest.approx(np.std(scores))
    assert out["eval/episodic_length"] == pytest.approx(np.mean(lengths))
    results = [[row[k] for k in sorted(row) if k.startswith("eval/")] for row in lines(out)]
    assert results[0] == results[1] == results[2]


def stop_and_resume(script, monkeypatch, run, tmp_path, sent, capsys, **flags):
    whole = run(run_name="whole", **flags)
    rollout, calls = script.watch("play_rollout"), []

    def interrupted(*inputs, **named):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), sent)
        return rollout(*inputs, **named)

    monkeypatch.setattr(script.module, "play_rollout", interrupted)
    with pytest.raises(SystemExit) as stop:
        run(run_name="cut", **flags)
    assert stop.value.code == 128 + sent and len(calls) == 2
    with open("runs/cut/metrics.jsonl", "a") as file:
        file.write('{"step": 99999}\n')  # a line written after the checkpoint must go
    resumed = script.main(script.parse_args(["--resume", "runs/cut", "--no-compile", "--device", "cpu"]))
    assert "do not repeat" not in capsys.readouterr().out
    assert lines(resumed) == lines(whole)
    a, b = (torch.load(f"runs/{name}/checkpoint.pt", weights_only=True)["parts"] for name in ("whole", "cut"))
    assert a.keys() == b.keys() and {"agent", "games"} <= a.keys()
    for part in a:
        assert same(a[part], b[part]), part


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("sticky", [0.0, 0.25])
def test_stopped_and_resumed_equals_uninterrupted(script, monkeypatch, train, tmp_path, capsys, sent, sticky):
    """Ctrl-C or kill leave a checkpoint from which the run goes on as if nothing had been, to the bit: weights,
    optimiser, streams, running scores, and the games themselves, played again from their seeds."""
    monkeypatch.setattr(script.find("Games"), "RESEED", 40, raising=False)  # steps between two seeds
    flags = dict(num_envs=3, num_steps=22, total_timesteps=66 * 5, num_minibatches=2, sticky=sticky)
    stop_and_resume(script, monkeypatch, train, tmp_path, sent, capsys, **flags)


def test_ale_stopped_and_resumed_equals_uninterrupted(script, monkeypatch, tiny, run, tmp_path, capsys):
    """The same with ALE and sticky actions, whose random numbers come from the game's seed as well."""
    flags = dict(
        life_loss=False, sticky=0.25, num_steps=40, total_timesteps=320, max_frames=200, env_id="ALE/Pong-v5"
    )
    stop_and_resume(script, monkeypatch, run, tmp_path, signal.SIGTERM, capsys, **flags)


def test_games_that_do_not_repeat_are_started_anew(script, train, tmp_path, capsys):
    """Emulators that do not repeat (another version of ALE) are noticed: the run goes on with new games, and says so."""
    train(run_name="x", total_timesteps=200)
    path = tmp_path / "runs/x/checkpoint.pt"
    state = torch.load(path, weights_only=True)
    try:
        state["parts"]["games"][1]["obs"][0, 0, 0] += 1
    except (KeyError, IndexError, TypeError):
        script.gone("keeps its games in another way")
    torch.save(state, path)
    words = ["--resume", "runs/x", "--total-timesteps", "400", "--no-compile", "--device", "cpu"]
    out = script.main(script.parse_args(words))
    assert out["step"] == 400 and "do not repeat" in capsys.readouterr().out


def test_nan_stops_the_run_and_keeps_the_good_checkpoint(script, monkeypatch, train):
    """A NaN ends the run with the step and the last good checkpoint, which is still whole."""
    rollout, calls = script.watch("play_rollout"), []

    def poisoned(*inputs, **named):
        batch, episodes = rollout(*inputs, **named)
        calls.append(1)
        if len(calls) == 4:
            batch["advantages"][0, 0] = math.nan
        return batch, episodes

    monkeypatch.setattr(script.module, "play_rollout", poisoned)
    with pytest.raises(
        FloatingPointError, match=r"stopped at step 160: .* checkpoint: .*runs/x/checkpoint.pt, step 120"
    ):
        train(total_timesteps=400, save_every=1, run_name="x")
    state = torch.load("runs/x/checkpoint.pt", weights_only=True)
    assert state["step"] == 120 and all(w.isfinite().all() for w in state["parts"]["agent"].values())
    monkeypatch.setattr(script.module, "play_rollout", rollout)
    with pytest.raises(
        FloatingPointError, match="stopped at step 40: the gradient is not finite; .* none yet"
    ):
        train(total_timesteps=400, learning_rate=1e38, max_grad_norm=1e30, run_name="y")


def test_half_written_checkpoint_never_replaces_a_good_one(script, monkeypatch, train, tmp_path):
    """A write that dies halfway leaves the old checkpoint as it was."""
    train(run_name="x", total_timesteps=40)
    path, good = tmp_path / "runs/x/checkpoint.pt", (tmp_path / "runs/x/checkpoint.pt").read_bytes()

    def dies(state, file):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", dies)
    longer = ["--resume", "runs/x", "--total-timesteps", "80", "--no-compile", "--device", "cpu"]
    with pytest.raises(script.UsageError, match="cannot write runs/x/checkpoint.pt: OSError: disk full"):
        script.main(script.parse_args(longer))
    assert path.read_bytes() == good and not list(path.parent.glob("*.tmp"))


def test_checkpoint_loads_without_pickle(script, train):
    """A checkpoint holds tensors and plain numbers only, also when games have ended: torch loads it safely, and the
    script reads what it wrote."""
    out = train(run_name="x")
    assert out["charts/episodes"] > 0
    for path in ("runs/x/checkpoint.pt", "runs/x", "x"):
        assert script.load_checkpoint(Path(path))["step"] == out["step"]
    torch.load("runs/x/checkpoint.pt", weights_only=True)


def test_learns_a_game_whose_optimum_is_known(script, monkeypatch, run):
    """Network, games and loop together: the bright column of the picture is the right action, 8 points a game at best
    and 2 by chance."""
    script.watch("AtariVectorEnv")
    monkeypatch.setattr(script.module, "AtariVectorEnv", probes_atari.Shown)
    flags = dict(num_envs=8, num_steps=16, total_timesteps=128 * 10, update_epochs=3, gamma=0.5)
    out = run(learning_rate=1e-3, anneal_lr=False, eval_episodes=16, **flags)
    assert out["eval/episodic_return"] > 7 and out["losses/entropy"] < 1


# ---- ALE ----


class Played:
    """ALE's own account of what a script's Games did: (obs before, actions, obs after, rewards, ends, info) a step."""

    def __init__(self, script, monkeypatch, num=2, seed=5, **flags):
        self.games = some_games(script, num, seed, **{**SMALL, "max_frames": 108_000, **flags})
        self.rows, inner = [], self.games.envs.step

        def step(actions):
            before, result = self.games.obs.copy(), inner(actions)
            self.rows.append((before, actions.copy(), *[np.copy(x) for x in result[:4]], dict(result[4])))
            return result

        monkeypatch.setattr(self.games.envs, "step", step)
        self.games.reset()
        self.rng, self.scores = np.random.default_rng(seed), []

    def play(self, steps, actions=None, reset=True):
        for t in range(steps):
            chosen = (
                self.rng.integers(self.games.num_actions, size=self.games.num)
                if actions is None
                else actions[t]
            )
            self.games.step(np.array(chosen))
            over = self.games.over.copy()
            self.scores += [(len(self.rows) - 1, i, self.games.score[i]) for i in np.flatnonzero(over)]
            if over.any() and reset:
                self.games.reset(over)
        return self


def test_ale_lives(script, monkeypatch):
    """A lost life is `terminated` and the game goes on: the stack of frames and the score too; the game is over when
    no life is left, and the score of a game is the sum of its raw rewards over all lives."""
    played = Played(script, monkeypatch, num=4).play(420)
    rows, lost, over, running, scores = played.rows, 0, 0, np.zeros(4), []
    for t, (before, _, after, rewards, terminated, truncated, info) in enumerate(rows):
        running += rewards
        for i in range(4):
            if terminated[i] and info["lives"][i]:
                lost += 1
                assert np.array_equal(after[i, :3], before[i, 1:])
                if t + 1 < len(rows):
                    assert np.array_equal(rows[t + 1][0][i], after[i])
                    assert rows[t + 1][6]["episode_frame_number"][i] == info["episode_frame_number"][i] + 4
            elif terminated[i]:
                over += 1
                scores.append((t, i, running[i]))
                running[i] = 0
        assert not truncated.any()
    assert lost > 8 and over > 3 and scores == played.scores and max(score for *_, score in scores) > 0


@pytest.mark.flags("life_loss")
def test_ale_fire_launches_the_ball(script, monkeypatch):
    """Breakout stands still until FIRE: an agent that never moves loses all its lives, since FIRE is pressed for it in
    each; with --no-life-loss nobody does, and no no-op is played before (B58)."""
    played = Played(script, monkeypatch, num=1).play(250, np.zeros((250, 1), int))
    lost = [t for t, row in enumerate(played.rows) if row[4][0]]
    assert len(lost) > 5 and len(played.scores) > 0  # five lives, and on
    for t in lost:
        if played.rows[t][6]["lives"][0] and t + 12 < len(played.rows):
            assert played.rows[t + 1][1][0] == FIRE
            frames = [row[2][0, 3].astype(int) for row in played.rows[t + 5 : t + 12]]
            assert any((a != b).any() for a, b in zip(frames, frames[1:]))  # the ball moves
    still = Played(script, monkeypatch, num=2, life_loss=False, sticky=0.0)
    start = still.games.obs.copy()
    still.play(40, np.zeros((40, 2), int))
    assert np.array_equal(start[0], start[1]) and still.rows[0][6]["episode_frame_number"].max() == 4
    assert not np.any([row[4] for row in still.rows]) and np.array_equal(still.games.obs[0, 0], start[0, 3])


def test_ale_no_ops(script, monkeypatch):
    """Games start after up to 30 frames of no-ops, as many as their seed says."""
    played = Played(script, monkeypatch, num=12, env_id="ALE/Pong-v5").play(1)
    frames = played.rows[0][6]["episode_frame_number"] - 4
    assert len(set(frames.tolist())) > 5 and frames.min() < 12 and 18 < frames.max() <= 31


def test_ale_truncation_shows_the_state_really_reached(script, monkeypatch):
    """The picture at the limit of frames is the one that the game shows there without a limit, and the first step of
    the new game is a real one: 4 frames on, its action obeyed, the stack black but for one frame (B07, B10)."""
    actions = np.random.default_rng(0).integers(2, 4, (60, 2))
    cut = Played(script, monkeypatch, max_frames=80, env_id="ALE/Pong-v5").play(60, actions)
    free = Played(script, monkeypatch, env_id="ALE/Pong-v5").play(20, actions)
    for t, (a, b) in enumerate(zip(cut.rows, free.rows)):
        assert np.array_equal(a[2][:, :3], b[2][:, :3])
        # ALE stops before it takes the last picture, so at the limit the newest one is some frames old
        assert (a[2] != b[2]).mean() < 0.01 and (t == 19 or np.array_equal(a[2], b[2]))
        assert a[5].all() == (t == 19) and not a[4].any()
    for start in (20, 40):
        fresh, frames = cut.rows[start][0], cut.rows[start][6]["episode_frame_number"]
        assert not fresh[:, :3].any() and fresh[:, 3].any(axis=(1, 2)).all()
        assert (frames <= 35).all() and np.array_equal(cut.rows[start][2][:, 2], fresh[:, 3])
        assert (cut.rows[start + 1][6]["episode_frame_number"] == frames + 4).all()
    a, b = (
        Played(script, monkeypatch, max_frames=80, env_id="ALE/Pong-v5").play(20, actions) for _ in range(2)
    )
    for played, action in ((a, 2), (b, 3)):
        played.play(3, np.full((3, 2), action))
    assert np.array_equal(a.rows[20][0], b.rows[20][0]) and not np.array_equal(a.games.obs, b.games.obs)


def test_ale_a_life_lost_on_the_last_frame_ends_the_game(script, monkeypatch):
    """ALE reports it as terminated, not truncated, with lives left, and would reset the game in the next step, which
    it would ignore: the game must be over for the script too (B10, B50)."""
    free = Played(script, monkeypatch, num=1).play(60)
    lost = next(t for t, row in enumerate(free.rows) if row[4][0])
    assert free.rows[lost][6]["lives"][0] == 4
    played = Played(script, monkeypatch, num=1, max_frames=4 * (lost + 1)).play(lost + 3)
    assert played.rows[lost][4][0] and not played.rows[lost][5][0]
    assert [t for t, *_ in played.scores] == [lost]
    following = [int(row[6]["episode_frame_number"][0]) for row in played.rows[lost + 1 :]]
    assert following[1] == following[0] + 4 and following[0] >= 4


def test_ale_masked_reset_leaves_the_others_alone(script, monkeypatch):
    """A new game in one place changes nothing in the others, and two sets of games do not disturb each other."""
    actions = np.random.default_rng(1).integers(0, 4, (60, 3))
    plain, other = Played(script, monkeypatch, num=3), Played(script, monkeypatch, num=3)
    before = other.games.obs
    for t in range(60):
        plain.play(1, actions[t : t + 1])
        if t == 30:
            other.games.reset(np.array([False, True, False]))
            assert not other.games.obs[1, :3].any() and np.array_equal(other.games.obs[::2], before[::2])
        other.play(1, actions[t : t + 1])
        before = other.games.obs.copy()
        assert np.array_equal(plain.games.obs[::2], other.games.obs[::2])
        assert np.array_equal(plain.games.obs[1], other.games.obs[1]) == (t < 30)


@pytest.mark.parametrize("env_id", ["ALE/Breakout-v5", "ALE/SpaceInvaders-v5"])
def test_ale_pictures_are_those_of_gymnasium(script, monkeypatch, env_id):
    """Grey, 84 x 84, the larger of two frames, every fourth (Mnih et al. 2015): to the bit what AtariPreprocessing
    gives, over 220 steps, and the rewards are the game's own."""
    gym, _ = pytest.importorskip("gymnasium"), pytest.importorskip("cv2")
    played = Played(script, monkeypatch, num=1, env_id=env_id, life_loss=False, sticky=0.0)
    game = gym.make(env_id, frameskip=1, repeat_action_probability=0.0)
    theirs = gym.wrappers.AtariPreprocessing(game, noop_max=0, frame_skip=4)
    obs, _ = theirs.reset(seed=0)
    stack = [np.zeros_like(obs)] * 3 + [obs]
    for t in range(221):
        assert np.array_equal(played.games.obs[0], np.stack(stack)), t
        played.play(1, reset=False)
        obs, reward, terminated, _, _ = theirs.step(played.rows[-1][1][0])
        stack = stack[1:] + [obs]
        assert reward == played.rows[-1][3][0] and terminated == played.rows[-1][4][0]
        if terminated:
            break
    assert t > 100


@pytest.mark.parametrize("sticky", [0.0, 0.4])
def test_ale_replay_restores_the_emulators(script, monkeypatch, capsys, tmp_path, sticky):
    """Games at different points, with lives lost, played again from their seeds: the pictures, the score, a FIRE that
    is due, and what follows are the same."""
    monkeypatch.setattr(script.find("Games"), "RESEED", 60, raising=False)  # steps between two seeds
    played = Played(script, monkeypatch, num=3, sticky=sticky).play(150)
    while not played.games.fire_next.any():
        played.play(1)
    assert len({len(actions) for actions in played.games.actions}) > 1
    torch.save(played.games.state_dict(), tmp_path / "games.pt")
    again = Played(script, monkeypatch, num=3, seed=99, sticky=sticky)
    again.games.load_state_dict(torch.load(tmp_path / "games.pt", weights_only=True))
    assert "do not repeat" not in capsys.readouterr().out
    assert np.array_equal(again.games.score, played.games.score)
    actions = np.random.default_rng(2).integers(0, 4, (120, 3))
    k, m = len(played.rows), len(again.rows)
    played.play(120, actions)
    again.play(120, actions)
    for a, b in zip(played.rows[k:], again.rows[m:]):
        assert all(np.array_equal(x, y) for x, y in zip(a[:6], b[:6]))
    assert played.scores[-1][2] == again.scores[-1][2]


def test_ale_whole_run(script, run):
    """ppo_atari as it is launched, with its own network: a few iterations and an evaluation to the limit of frames."""
    out = run(num_steps=8, total_timesteps=32, max_frames=40, eval_episodes=2, compile=False)
    assert out["step"] == 32 and math.isfinite(out["losses/grad_norm"]) and out["eval/episodic_length"] == 10


def test_track_offline(monkeypatch, train, tmp_path):
    """W&B needs neither account nor network."""
    pytest.importorskip("wandb").teardown()  # it keeps the folder of a run before it in this process
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train(track=True, total_timesteps=40)
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
