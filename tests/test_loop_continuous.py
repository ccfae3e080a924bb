"""The loop of ppo_continuous.py: what it really passes to the functions, on environments where all is known."""

import copy
import json
import math
import os
import signal

import numpy as np
import probes
import pytest
import torch

pytestmark = pytest.mark.setting("ppo_continuous")
SMALL = dict(
    env_id="Probe/Plain-v0", num_steps=40, num_minibatches=4, update_epochs=2, eval_episodes=0, compile=False
)


def train(script, tmp_path, **flags):
    """Run main in a scratch folder; fails (ours) or skips (a copy) if a flag is gone."""
    os.chdir(tmp_path)
    probes.Probe.log.clear()
    flags = {**SMALL, "device": "cpu", **flags}
    flags.setdefault("total_timesteps", 3 * flags["num_steps"] * flags.get("num_envs", 1))
    return script.main(script.Args(**script.flags(**flags)))


@pytest.fixture(autouse=True)
def seen_from_the_loop(script, monkeypatch):
    """The probes' log is taken outside of the copy's own wrappers: which there are is its choice."""
    if make := getattr(script.module, "Env", None):

        def make_seen(*given, **named):
            env = make(*given, **named)
            if hasattr(env, "env"):
                env.env = probes.Seen(env.env)
            return env

        monkeypatch.setattr(script.module, "Env", make_seen)


def detached(x):
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


@pytest.fixture
def record(script, monkeypatch):
    """record(name) replaces a function by one that notes (inputs, result) of every call, and the weights then."""
    agents, make_agent = [], script.find("Agent")
    monkeypatch.setattr(
        script.module, "Agent", lambda *a, **k: agents.append(make_agent(*a, **k)) or agents[-1]
    )

    def start(name):
        calls, function = [], script.watch(name)

        def recorder(*inputs, **named):
            result = function(*inputs, **named)
            weights = copy.deepcopy(agents[-1])
            given = script.as_ours(function, inputs, named)
            calls.append(([detached(x) for x in given], detached(result), weights))
            return result

        monkeypatch.setattr(script.module, name, recorder)
        return calls

    return start


def reference_rollout(log, num_envs, num_steps, gamma):
    """Normalised observations, states reached, scaled rewards and endings, from the environments' own log."""
    ids = list(dict.fromkeys(entry[0] for entry in log))
    rows = [[entry for entry in log if entry[0] == i] for i in ids]
    seen, returns, running = [], [], [0.0] * num_envs
    obs, reached, rewards, terminated, truncated = [], [], [], [], []
    for t in range(num_steps):
        now = [rows[i][t] for i in range(num_envs)]
        seen += [entry[1] for entry in now]
        normal = [
            lambda x, s=np.array(seen): np.clip((x - s.mean(0)) / (s.std(0) if len(s) > 1 else 1), -10, 10)
        ]
        obs.append([normal[0](entry[1]) for entry in now])
        reached.append([normal[0](entry[6]) for entry in now])
        rewards.append([])
        for i, (_, _, _, reward, ended, cut, _) in enumerate(now):
            running[i] = running[i] * gamma + reward
            returns.append(running[i])
            rewards[-1].append(np.clip(reward / (np.std(returns) if len(returns) > 1 else 1.0), -10, 10))
            running[i] = 0.0 if ended or cut else running[i]
        terminated.append([entry[4] for entry in now])
        truncated.append([entry[5] for entry in now])
    obs, reached, terminated, truncated = (np.array(x) for x in (obs, reached, terminated, truncated))
    done = terminated | truncated
    reached[:-1][~done[:-1]] = obs[1:][~done[:-1]]  # a state acted on is normalised when it is acted on
    return [torch.tensor(x, dtype=torch.float32) for x in (obs, reached, np.array(rewards))] + [
        torch.tensor(terminated), torch.tensor(done)]  # fmt: skip


@pytest.mark.parametrize("num_envs", [1, 3])
def test_rollout_is_what_the_environments_did(script, record, tmp_path, num_envs, record_property):
    """Rewards, endings and values reach compute_gae as the simulator gave them; the value of a cut-off episode is
    that of the state really reached, also at the end of the rollout (B04, B07, B08, B10, B26, B29, B44, B46, B49)."""
    calls = record("compute_gae")
    train(script, tmp_path, num_envs=num_envs, gamma=0.9, gae_lambda=0.8)
    obs, reached, rewards, terminated, done = reference_rollout(probes.Probe.log, num_envs, 120, 0.9)
    assert (terminated & done).any() and (done & ~terminated).any() and done[39::40].any()
    for k, (inputs, _, agent) in enumerate(calls):
        part = slice(40 * k, 40 * (k + 1))
        raw = torch.tensor([entry[3] for entry in probes.Probe.log]).view(120, num_envs)[part].float()
        if not script.own and torch.allclose(inputs[0], raw):
            record_property("unverified", "rewards are not scaled: there is no scaling to check")
        else:
            torch.testing.assert_close(inputs[0], rewards[part], atol=1e-4, rtol=1e-4)
        for name, given, real in (
            ("terminated", inputs[3], terminated[part]),
            ("done", inputs[4], done[part]),
        ):
            assert torch.equal(given, real), (
                f"{name} differs at (step, environment) {(given != real).nonzero().tolist()}"
            )
        critic = lambda x, agent=agent: agent.evaluate(x, torch.zeros(*x.shape[:-1], 2))[2].detach()  # noqa: E731
        torch.testing.assert_close(inputs[1], critic(obs[part]), atol=1e-5, rtol=1e-5)
        last = ~done[part][-1]  # these states are normalised once more, by the next rollout
        inputs[2][-1, last], expected = 0.0, critic(reached[part])
        expected[-1, last] = 0.0
        torch.testing.assert_close(inputs[2], expected, atol=1e-4, rtol=1e-4)
        assert inputs[5:] == [0.9, 0.8]
    assert len(calls) == 3 and len(probes.Probe.log) == 120 * num_envs


def test_value_after_the_rollout_is_that_of_the_next_state(script, record, tmp_path):
    """The last row bootstraps from the state after the last step, not from the one before it (B04)."""
    calls = record("compute_gae")
    train(script, tmp_path, total_timesteps=80, num_steps=20, learning_rate=1e-12)
    for (before, *_), (after, *_) in zip(calls, calls[1:]):
        if not before[4][-1, 0]:
            assert abs(before[2][-1, 0] - after[1][0, 0]) < 0.1 * (before[2].std() + 1e-3)
            assert abs(before[2][-1, 0] - before[1][-1, 0]) > 1e-3


def test_the_time_limit_of_the_task_is_kept(script, record, tmp_path):
    """gymnasium's TimeLimit stays around the environment and ends episodes by truncation alone (B49)."""
    calls = record("compute_gae")
    out = train(
        script, tmp_path, env_id="Probe/Endless-v0", num_steps=70, num_minibatches=5, total_timesteps=70
    )
    terminated, done = calls[0][0][3:5]
    assert (
        not terminated.any() and done[6::7].all() and done.sum() == 10 and out["charts/episodic_length"] == 7
    )


@pytest.mark.parametrize("bounds", ["clip", "tanh"])
def test_ratio_is_one_before_the_first_step(script, record, tmp_path, bounds):
    """The first minibatch of every update sees the weights that acted: ratio 1 for each sample (B01, B40, B41)."""
    calls = record("policy_loss")
    train(script, tmp_path, action_bounds=bounds, log_std_init=0.5, learning_rate=0.01)
    assert len(calls) == 3 * 8
    for k, (inputs, _, _) in enumerate(calls):
        if k % 8 == 0:
            torch.testing.assert_close(inputs[0], inputs[1], atol=2e-5, rtol=1e-5)
        else:
            assert (inputs[0] - inputs[1]).abs().max() > 1e-3  # later ones do move (B113)


@pytest.mark.parametrize("bounds", ["clip", "tanh"])
def test_stored_logp_scores_the_action_that_was_sampled(script, record, tmp_path, bounds):
    """The stored sample is unclipped, drawn from the scored Gaussian, and reaches the environment through the
    bounds only; with tanh the stored log-probability is the density of the environment's action (B40, B41, B43)."""
    scored, losses = record("gaussian_logp_entropy"), record("policy_loss")
    train(script, tmp_path, num_steps=2000, total_timesteps=2000, action_bounds=bounds, log_std_init=-0.3)
    (mean, log_std, action), _, agent = scored[0]
    mean, action = mean.reshape(-1, 2), action.reshape(-1, 2)
    z = ((action - mean) / math.exp(-0.3)).flatten().double()
    assert abs(z.mean()) < 0.06 and abs(z.std() - 1) < 0.04
    assert abs((z.abs() < 0.6745).double().mean() - 0.5) < 0.03
    assert abs(torch.corrcoef(z.reshape(-1, 2).T)[0, 1]) < 0.08
    low, high = torch.tensor([-2.0, -2.0]), torch.tensor([0.5, 0.5])
    squashed = action.tanh() if bounds == "tanh" else action.clamp(-1, 1)
    sent = torch.tensor(np.array([entry[2] for entry in probes.Probe.log]))
    torch.testing.assert_close(sent, low + (squashed + 1) / 2 * (high - low), atol=1e-5, rtol=1e-5)
    if bounds == "clip":
        assert (action.abs() > 1).any()  # stored as drawn
    normal = torch.distributions.Normal(mean, log_std.exp())
    expected = normal.log_prob(action).sum(-1)
    if bounds == "tanh":
        expected = expected - torch.log1p(-action.double().tanh().square()).sum(-1).float()
    stored = torch.cat([inputs[1] for inputs, _, _ in losses[:4]])
    torch.testing.assert_close(stored.sort().values, expected.sort().values, atol=1e-3, rtol=1e-4)


def test_every_sample_once_an_epoch_and_paired(script, record, tmp_path):
    """Each epoch visits each row once, in a new order, and the row's advantage, value and return stay together
    (B11, B26, B32, B83); advantages are normalised within the minibatch, before the surrogate (B13)."""
    script.value_loss  # noqa: B018  a copy may have another
    gae, policy, value = record("compute_gae"), record("policy_loss"), record("value_loss")
    train(script, tmp_path, num_envs=2, norm_adv=True)
    for k in range(3):
        (_, values, *_), (adv, ret), _ = gae[k]
        table = {
            v.item(): (a.item(), r.item()) for v, a, r in zip(values.flatten(), adv.flatten(), ret.flatten())
        }
        if len(table) < 80 and not script.own:
            script.gone("gives two states of a rollout one value: samples cannot be told apart")
        assert len(table) == 80
        orders = []
        for epoch in range(2):
            order = []
            for call in range(8 * k + 4 * epoch, 8 * k + 4 * epoch + 4):
                old_v, returns = value[call][0][1], value[call][0][2]
                keys = old_v.tolist()
                order += keys
                raw = torch.tensor([table[key][0] for key in keys])
                torch.testing.assert_close(returns, torch.tensor([table[key][1] for key in keys]))
                normal = (raw - raw.mean()) / raw.std(correction=0)
                torch.testing.assert_close(policy[call][0][2], normal, atol=1e-3, rtol=1e-3)
            assert sorted(order) == sorted(table)
            orders.append(order)
        assert orders[0] != orders[1]


def reference_update(script, agent, batch, epochs, num, clip, ent, vf, norm, lr):
    """The update once more, with torch's own Normal, clip_grad_norm_ and Adam on separate parameters."""
    value_clip = clip if script.has_flag("clip_vloss") else math.inf
    generator = torch.Generator().manual_seed(int(script.streams(1)[2].generate_state(1)[0]))
    optimizer = torch.optim.Adam(agent.parameters(), lr=lr, eps=1e-5)
    obs, actions, logps, adv, ret, old = batch
    for _ in range(epochs):
        for mb in torch.randperm(len(obs), generator=generator).tensor_split(num):
            mean, log_std, v = agent.actor(obs[mb]), agent.log_std, agent.critic(obs[mb]).squeeze(-1)
            normal = torch.distributions.Normal(mean, log_std.exp().expand_as(mean))
            ratio = (normal.log_prob(actions[mb]).sum(-1) - logps[mb]).exp()
            a = adv[mb]
            a = (a - a.mean()) / (a.var(correction=0) + 1e-8).sqrt()
            surrogate = torch.min(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
            near = old[mb] + (v - old[mb]).clamp(-value_clip, value_clip)
            error = torch.max((v - ret[mb]) ** 2, (near - ret[mb]) ** 2)
            loss = -surrogate.mean() + vf * 0.5 * error.mean() - ent * normal.entropy().sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(agent.parameters(), norm)
            optimizer.step()


@pytest.mark.parametrize("norm", [0.05, 1e6])
def test_update_equals_the_textbook(script, monkeypatch, tmp_path, norm):
    """All steps of an update together (sign and weight of each term, clipping of the norm, Adam's epsilon, number
    of epochs, B02, B16, B31) move the weights as an independent implementation does, with the weights of terms that
    are new in a copy (flags named ..._coef) at 0."""
    rollout, kept, steps = script.find("rollout"), {}, spy_on_adam(script, monkeypatch)

    def recorder(agent, *rest, **named):
        kept["agent"], (kept["batch"], episodes) = copy.deepcopy(agent), rollout(agent, *rest, **named)
        return kept["batch"], episodes

    monkeypatch.setattr(script.module, "rollout", recorder)
    flags = dict(ent_coef=0.1, vf_coef=0.7, clip_coef=0.15, max_grad_norm=norm, learning_rate=2e-3)
    flags |= script.new_terms_off()
    out = train(script, tmp_path, num_steps=80, total_timesteps=80, update_epochs=4, seed=1, **flags)
    uses_adam(script, steps)
    names = ("obs", "actions", "logps", "advantages", "returns", "values")
    batch = [kept["batch"][name].flatten(0, 1) for name in names]
    reference_update(script, kept["agent"], batch, 4, 4, 0.15, 0.1, 0.7, norm, 2e-3)
    trained = torch.load(f"{out['folder']}/checkpoint.pt", weights_only=True)["parts"]["agent"]
    weights = kept["agent"].state_dict()
    off = {n: (trained[n] - w).abs() > 2e-5 + 1e-4 * w.abs() for n, w in weights.items()}
    share = torch.cat([x.flatten() for x in off.values()]).float().mean().item()
    # Adam divides by a root: where a gradient is all but 0, as with ReLU, rounding may decide on its direction.
    assert share < 0.01, (
        f"{share:.0%} of the weights are off, in {', '.join(n for n, x in off.items() if x.any())}"
    )


@pytest.mark.flags("clip_coef", "clip_vloss", "norm_adv")
def test_flags_reach_the_functions(script, record, tmp_path):
    """--clip-coef, --no-clip-vloss and --no-norm-adv are obeyed, in both losses (B20, B35)."""
    gae, policy, value = record("compute_gae"), record("policy_loss"), record("value_loss")
    train(script, tmp_path, clip_coef=0.37, clip_vloss=False, norm_adv=False)
    assert all(inputs[3:] == [0.37, 0.37] for inputs, _, _ in policy)
    assert all(inputs[3] is None for inputs, _, _ in value)
    raw = torch.cat([inputs[2] for inputs, _, _ in policy[:4]])
    torch.testing.assert_close(raw.sort().values, gae[0][1][0].flatten().sort().values)
    train(script, tmp_path, clip_coef=0.37)
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
def test_learning_rate_of_every_step(script, monkeypatch, tmp_path, anneal):
    """The first update uses the full rate, the last one a positive one, a line between them (B25)."""
    rates = spy_on_adam(script, monkeypatch)
    train(script, tmp_path, total_timesteps=160, learning_rate=4e-3, anneal_lr=anneal)
    uses_adam(script, rates)
    expected = [4e-3, 3e-3, 2e-3, 1e-3] if anneal else [4e-3] * 4
    np.testing.assert_allclose(rates, np.repeat(expected, 8))


def test_target_kl_stops_before_the_step_that_is_too_far(script, monkeypatch, record, tmp_path):
    """Above --target-kl no further step is taken in this update, in no loop, and the next rollout goes on (B23)."""
    steps = spy_on_adam(script, monkeypatch)
    calls = record("policy_loss")
    out = train(script, tmp_path, target_kl=1e-9, learning_rate=0.01)
    uses_adam(script, steps)
    assert len(steps) == 3 and len(calls) == 6  # one step at ratio 1, then a look that ends the update
    assert out["step"] == 120
    steps.clear()
    train(script, tmp_path, target_kl=1e9)
    assert len(steps) == 24


def test_budget_is_rounded_up_and_used(script, tmp_path, capsys):
    """No collected step is dropped, and the rounding is said (B26)."""
    out = train(script, tmp_path, total_timesteps=241, num_envs=3)
    assert len(probes.Probe.log) == 360 == out["step"] and "241 rounded up to 360" in capsys.readouterr().out


def test_metrics_are_means_over_minibatches(script, record, tmp_path, record_property):
    """Logged losses are means over all minibatches, returns are raw and whole, the clip fraction is signed (B22, B34)."""
    policy, value, clipped = record("policy_loss"), record("value_loss"), record("clip_fraction")
    out = train(script, tmp_path, num_envs=2, total_timesteps=80, learning_rate=0.05)
    means = {name: torch.stack([result.mean() for _, result, _ in calls]).mean().item()
             for name, calls in (("policy_loss", policy), ("value_loss", value), ("clipfrac", clipped))}  # fmt: skip
    log_ratio = torch.cat([inputs[0] - inputs[1] for inputs, _, _ in policy])
    means |= {
        "approx_kl": (torch.expm1(log_ratio) - log_ratio).mean().item(),
        "old_approx_kl": -log_ratio.mean().item(),
    }
    expected = {f"losses/{name}": (mean, 1e-3, 1e-6) for name, mean in means.items()}
    scores, running = [], {}
    for env, _, _, reward, terminated, truncated, _ in probes.Probe.log:
        running.setdefault(env, []).append(reward)
        if terminated or truncated:
            scores.append(running.pop(env))
    expected["charts/episodic_return"] = np.mean([sum(s) for s in scores]), 1e-6, 0
    expected["charts/episodic_length"] = np.mean([len(s) for s in scores]), 1e-6, 0
    expected["charts/episodes"] = len(scores), 0, 0
    for name in () if script.own else expected.keys() - out.keys():
        record_property("unverified", f"there is no metric {name}")
        del expected[name]
    for name, (value, rel, abs) in expected.items():
        assert out[name] == pytest.approx(value, rel=rel, abs=abs), name


@pytest.mark.parametrize("bounds", ["clip", "tanh"])
def test_acting_is_what_is_evaluated(script, bounds):
    """The numpy road of the rollout agrees with the torch module, before and after a step, for any network: the
    mean without noise, a sample with the density that `evaluate` gives it, and the squashed action."""
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    torch.manual_seed(0)
    for bias in (True, False):
        agent = script.Agent(3, 2, 0.3, bounds == "tanh")
        other = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=bias), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        for net in (agent.actor, other):
            agent.actor = net
            for _ in range(2):
                mean = net(torch.tensor(x)).detach()
                np.testing.assert_allclose(agent.acting()(x)[0], mean.numpy(), atol=1e-5)
                act = agent.acting(np.random.default_rng(1), 4, 5)
                noise = np.random.default_rng(1).standard_normal((4, 5, 2), dtype=np.float32)
                for t in range(4):
                    sample, action = act(x)
                    std = agent.log_std.detach().exp().numpy()
                    np.testing.assert_allclose((sample - mean.numpy()) / std, noise[t], atol=1e-5)
                    np.testing.assert_allclose(action, np.tanh(sample) if bounds == "tanh" else sample)
                normal = torch.distributions.Normal(mean, agent.log_std.exp().expand_as(mean))
                expected = normal.log_prob(torch.tensor(sample)).sum(-1)
                if bounds == "tanh":
                    expected = (
                        expected - torch.log1p(-torch.tensor(sample).double().tanh().square()).sum(-1).float()
                    )
                logp, entropy, value = agent.evaluate(torch.tensor(x), torch.tensor(sample))
                torch.testing.assert_close(logp, expected, atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(entropy, normal.entropy().sum(-1))
                torch.testing.assert_close(value, agent.critic(torch.tensor(x)).squeeze(-1))
                with torch.no_grad():
                    for p in agent.parameters():
                        p.add_(torch.randn_like(p), alpha=0.3)


def test_adam_is_torchs(script, monkeypatch):
    """Every weight of the module is a part of the one vector, in the order of the gradient's parts, and moves as
    torch's Adam moves it; a state that was saved goes on where it was."""
    a, b = (torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)) for _ in range(2))
    b.load_state_dict(a.state_dict())
    ours, theirs, steps = (
        script.Adam(a),
        torch.optim.Adam(b.parameters(), eps=1e-5),
        spy_on_adam(script, monkeypatch),
    )
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


def test_compiled_and_eager_gradient_agree(script):
    """torch.compile changes the speed, not the numbers, and sees flags that change between calls (B35)."""
    torch.manual_seed(0)
    agent = script.Agent(3, 2, 0.0)
    batch = {name: torch.randn(40) for name in ("logps", "advantages", "returns", "values")}
    batch |= {"obs": torch.randn(40, 3), "actions": torch.randn(40, 2)}
    compiled = script.compile_or_eager(script.minibatch_gradient)
    for mb, args in (
        (torch.arange(20), script.Args(clip_coef=0.2, ent_coef=0.1, vf_coef=0.5)),
        (torch.arange(20, 40), script.Args(clip_coef=0.1, ent_coef=0.0, vf_coef=0.9)),
        (torch.arange(20, 40), script.Args(clip_vloss=False, norm_adv=False)),
    ):
        for a, b in zip(compiled(agent, batch, mb, args), script.minibatch_gradient(agent, batch, mb, args)):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def lines(out):
    """metrics.jsonl, the lines of one step joined, without the numbers that depend on the clock."""
    rows = {}
    for row in map(json.loads, open(f"{out['folder']}/metrics.jsonl")):
        rows[row["step"]] = rows.get(row["step"], {}) | row
    return [{k: v for k, v in row.items() if k not in ("charts/SPS", "time/cpu")} for row in rows.values()]


def same(a, b):
    """Two states hold equal numbers, to the bit."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
    if isinstance(a, (dict, list, tuple)):
        for key in a if isinstance(a, dict) else range(len(a)):
            same(a[key], b[key])
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_same_seed_same_numbers(script, tmp_path):
    """Two runs of one seed agree to the bit; another seed, and the environments among themselves, differ (B29)."""
    a, b = (train(script, tmp_path, num_envs=2, run_name=name) for name in "ab")
    first = [entry[1].tolist() for entry in probes.Probe.log[:2]]
    c = train(script, tmp_path, num_envs=2, run_name="c", seed=2)
    assert lines(a) == lines(b) != lines(c)
    assert first[0] != first[1] and probes.Probe.log[0][1].tolist() not in first


def test_evaluation_changes_nothing(script, tmp_path):
    """Evaluations use frozen statistics, own seeds and streams: training is the same to the bit with them (B53)."""
    a = train(script, tmp_path, run_name="a")
    b = train(script, tmp_path, run_name="b", eval_every=40, eval_episodes=3)
    evaluated = lines(b)
    assert all("eval/episodic_return" in row for row in evaluated)
    assert lines(a) == [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in evaluated]
    for checkpoint in ("runs/b/checkpoint.pt", "runs/b", "b"):
        again = script.main(script.parse_args(["--eval-checkpoint", checkpoint, "--device", "cpu"]))
        assert again["eval/episodic_return"] == b["eval/episodic_return"]  # what it scored in the run


@pytest.mark.parametrize("env_id", ["Probe/Plain-v0", "Hopper-v5"])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_stopped_and_resumed_equals_uninterrupted(script, monkeypatch, tmp_path, env_id, sent):
    """Ctrl-C or kill leave a checkpoint from which the run goes on as if nothing had been, to the bit."""
    flags = dict(env_id=env_id, num_envs=2, num_steps=100, total_timesteps=800, update_epochs=2)
    whole = train(script, tmp_path, run_name="whole", **flags)
    rollout, calls = script.find("rollout"), []

    def interrupted(*inputs, **named):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), sent)
        return rollout(*inputs, **named)

    monkeypatch.setattr(script.module, "rollout", interrupted)
    with pytest.raises(SystemExit) as stop:
        train(script, tmp_path, run_name="cut", **flags)
    assert stop.value.code == 128 + sent and len(calls) == 2
    with open("runs/cut/metrics.jsonl", "a") as file:
        file.write('{"step": 99999}\n')  # a line written after the checkpoint must go
    resumed = script.main(script.parse_args(["--resume", "runs/cut", "--no-compile", "--device", "cpu"]))
    assert lines(resumed) == lines(whole)
    a, b = (torch.load(f"runs/{name}/checkpoint.pt", weights_only=True) for name in ("whole", "cut"))
    same(a["parts"], b["parts"])


def test_nan_stops_the_run_and_keeps_the_good_checkpoint(script, tmp_path):
    """A NaN from the environment ends the run with the step and the last good checkpoint, which is still whole."""
    with pytest.raises(
        FloatingPointError,
        match=r"stopped at step 160: .*rewards.* checkpoint: .*runs/x/checkpoint.pt, step 120",
    ):
        train(script, tmp_path, env_id="Probe/NaN-v0", total_timesteps=400, save_every=1, run_name="x")
    state = torch.load("runs/x/checkpoint.pt", weights_only=True)
    assert state["step"] == 120 and all(w.isfinite().all() for w in state["parts"]["agent"].values())
    with pytest.raises(
        FloatingPointError, match="stopped at step 40: the gradient is not finite; .* none yet"
    ):
        train(script, tmp_path, total_timesteps=400, learning_rate=1e30, run_name="y")


def test_half_written_checkpoint_never_replaces_a_good_one(script, monkeypatch, tmp_path):
    """A write that dies halfway leaves the old checkpoint as it was."""
    train(script, tmp_path, run_name="x")
    path, good = tmp_path / "runs/x/checkpoint.pt", (tmp_path / "runs/x/checkpoint.pt").read_bytes()

    def dies(state, file):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", dies)
    longer = ["--resume", "runs/x", "--total-timesteps", "240", "--no-compile", "--device", "cpu"]
    with pytest.raises(script.UsageError, match="cannot write runs/x/checkpoint.pt: OSError: disk full"):
        script.main(script.parse_args(longer))
    assert path.read_bytes() == good and not list(path.parent.glob("*.tmp"))


@pytest.mark.parametrize("bounds", ["clip", "tanh"])
def test_learns_a_task_whose_optimum_is_known(script, tmp_path, bounds):
    """The whole loop together: the mean action finds the optimum of a one-step task, far above chance (-0.4)."""
    flags = dict(
        num_steps=256, total_timesteps=256 * 40, num_minibatches=4, update_epochs=6, learning_rate=3e-3
    )
    out = train(
        script,
        tmp_path,
        env_id="Probe/Target-v0",
        log_std_init=0.0,
        eval_episodes=100,
        action_bounds=bounds,
        **flags,
    )
    assert out["eval/episodic_return"] > -0.01 and out["losses/explained_variance"] < 1
    state = torch.load(f"{out['folder']}/checkpoint.pt", weights_only=True)
    if script.own or "log_std" in state["parts"]["agent"]:
        assert state["parts"]["agent"]["log_std"].item() < -0.3  # a settled policy explores less


@pytest.mark.parametrize("env_id", ["Probe/Wide-v0", "Humanoid-v5", "InvertedPendulum-v5"])
def test_action_scales_and_shapes(script, tmp_path, env_id):
    """Unbounded, column-shaped, +-0.4 and +-3 actions all reach the environment in its own shape and scale."""
    out = train(script, tmp_path, env_id=env_id, total_timesteps=40)
    assert out["step"] == 40 and math.isfinite(out["losses/grad_norm"])


def test_track_offline(script, monkeypatch, tmp_path):
    """W&B needs neither account nor network."""
    pytest.importorskip("wandb").teardown()  # it keeps the folder of a run before it in this process
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train(script, tmp_path, track=True)
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
