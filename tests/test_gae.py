"""compute_gae: its O(T^2) definition, hand-computed rollouts, and what advantages must not depend on."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

# Tests with @given take `*, script`: hypothesis probes a first positional argument as if it were `self`.
pytestmark = pytest.mark.functions("compute_gae")
R4, V4, RIGHT4 = [1, 2, 3, 4], [0.5, 1, 1.5, 2], [2.12, 1, 6.36, 4.25]
JUNK = 7.0  # what a critic may say of a terminal state


@st.composite
def rollouts(draw):
    """(rewards, values, next_values, terminated, done), gamma, lam. A step ends in one of four ways;
    next_values is the next row's value inside an episode, its own where the episode or the rollout ends."""
    T, N = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rewards, values, next_values = rng.normal(size=(3, T, N))
    terminated, truncated = rng.random((2, T, N)) < draw(st.sampled_from([0.0, 0.25, 0.8]))
    done = terminated | truncated
    next_values[:-1] = np.where(done[:-1], next_values[:-1], values[1:])
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    floats = (torch.tensor(x, dtype=dtype) for x in (rewards, values, next_values))
    inputs = (*floats, torch.tensor(terminated), torch.tensor(done))
    return inputs, draw(st.floats(0, 1)), draw(st.floats(0, 1))


def definition(rewards, values, next_values, terminated, done, gamma, lam):
    """A_t = sum over k >= t, up to the end of the episode, of (gamma lam)^(k - t) delta_k (eq. 16)."""
    delta = rewards + gamma * np.where(terminated, 0, next_values) - values
    advantages = np.zeros_like(delta)
    for t, n in np.ndindex(delta.shape):
        for k in range(t, len(delta)):
            advantages[t, n] += (gamma * lam) ** (k - t) * delta[k, n]
            if done[k, n]:
                break
    return advantages


def close(actual, expected):
    assert_close(actual, torch.as_tensor(expected).to(actual.dtype), rtol=1e-4, atol=1e-4)


def equal(some, others):
    return all(torch.equal(x, y) for x, y in zip(some, others, strict=True))


@given(rollout=rollouts())
def test_gae_is_its_definition(rollout, *, script):
    """The recursion equals the sum it stands for with any pattern of endings (B05, Toni-SM/skrl #449), and
    the returns are these advantages plus the values (B11, vwxyzjn/cleanrl #337)."""
    inputs, gamma, lam = rollout
    before = [x.clone() for x in inputs]
    advantages, returns = script.compute_gae(*inputs, gamma, lam)
    close(advantages, definition(*(x.numpy() for x in inputs), gamma, lam))
    assert_close(returns, advantages + inputs[1])
    assert advantages.dtype == returns.dtype == inputs[1].dtype and advantages.device == inputs[1].device
    assert equal(inputs, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(
    "rewards, values, next_values, ends, gamma, lam, right",
    [
        (R4, V4, [1, JUNK, 2, 2.5], {1: "terminated"}, 0.9, 0.8, RIGHT4),
        (R4, V4, [1, 3, 2, 2.5], {1: "truncated"}, 0.9, 0.8, [4.064, 3.7, 6.36, 4.25]),
        (R4, V4, [1, 3, 2, 2.5], {1: "terminated truncated"}, 0.9, 0.8, RIGHT4),
        (R4, V4, [1, 1.5, 2, 2.5], {}, 0.9, 0.8, [6.389024, 6.9292, 6.36, 4.25]),
        ([1, 2, 4], [0.5, 1, 2], [1, JUNK, 2.5], {1: "terminated"}, 0.9, 0.8, [2.12, 1, 4.25]),
        ([0, 0, 1], [0.2, 0.4, 0.6], [0.4, 0.6, JUNK], {2: "terminated"}, 1, 0.95, [0.751, 0.58, 0.4]),
        ([0, 0, 1], [0.2, 0.4, 0.6], [0.4, 0.6, JUNK], {2: "terminated"}, 1, 1, [0.8, 0.6, 0.4]),
        ([0, 1], [0.5, 0.6], [0.6, JUNK], {1: "terminated"}, 1, 0.95, [0.48, 0.4]),
        ([1], [2], [3], {0: "truncated"}, 0.9, 0.8, [1.7]),
    ],
    ids=["B04-B05-terminated", "B07-B08-truncated", "both", "neither", "B10", "B67", "B76", "B91", "T=1"],
)
def test_gae_literals(script, rewards, values, next_values, ends, gamma, lam, right, dtype):
    """Rollouts with a public wrong answer: B04 DLR-RM/stable-baselines3 #183 (stale bootstrap), B05
    Toni-SM/skrl #449 (chain not cut), B07 pytorch/rl #3771 (value of the reset state), B08
    DexForce/EmbodiChain #612 (of the acting state), B10 vwxyzjn/cleanrl #475 (fake row), B67 huggingface/trl
    #3750 (score after the end), B76 natolambert/rlhf-book #216 (immediate reward), B91 radixark/miles #1827
    (tool tokens take part)."""
    steps = range(len(rewards))
    terminated = torch.tensor([["terminated" in ends.get(t, "")] for t in steps])
    done = torch.tensor([[t in ends] for t in steps])
    floats = [torch.tensor(x, dtype=dtype)[:, None] for x in (rewards, values, next_values)]
    advantages, returns = script.compute_gae(*floats, terminated, done, gamma, lam)
    close(advantages[:, 0], right)
    close(returns[:, 0], np.add(right, values))


@given(rollout=rollouts())
def test_gae_at_lambda_zero_and_one(rollout, *, script):
    """0 is the TD error (B08, DexForce/EmbodiChain #612); 1 is the episode's discounted return minus the
    value, with the value of the last state where it was cut short (B76, natolambert/rlhf-book #216)."""
    (rewards, values, next_values, terminated, done), gamma, _ = rollout
    bootstrap = torch.where(terminated, 0, next_values)
    advantages, _ = script.compute_gae(*rollout[0], gamma, 0.0)
    close(advantages, rewards + gamma * bootstrap - values)
    _, returns = script.compute_gae(*rollout[0], gamma, 1.0)
    expected = bootstrap[-1]
    for t in reversed(range(len(rewards))):
        expected = rewards[t] + gamma * torch.where(done[t], bootstrap[t], expected)
        close(returns[t], expected)


@given(rollout=rollouts(), junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_gae_ignores_the_value_of_terminal_states(rollout, junk, *, script):
    """A terminal state has no value, whatever the critic says: it is masked, not multiplied by 0 (B85,
    verl-project/verl #2377)."""
    (rewards, values, next_values, terminated, done), *settings = rollout
    junked = rewards, values, next_values.masked_fill(terminated, junk), terminated, done
    assert equal(script.compute_gae(*junked, *settings), script.compute_gae(*rollout[0], *settings))


@given(rollout=rollouts(), t=st.integers(0, 7), terminal=st.booleans())
def test_gae_never_crosses_the_end_of_an_episode(rollout, t, terminal, *, script):
    """Nothing after a termination or a truncation changes anything before it (B05, Toni-SM/skrl #224; the
    kind of B44, openai/baselines #538)."""
    inputs, *settings = rollout
    t = min(t, len(inputs[0]) - 1)
    inputs[3][t], inputs[4][t] = terminal, True
    other = [x.clone() for x in inputs]
    for x, new in zip(other, (100.0, -50.0, 30.0, True, True)):
        x[t + 1 :] = new
    one, two = script.compute_gae(*inputs, *settings), script.compute_gae(*other, *settings)
    assert equal((x[: t + 1] for x in one), (x[: t + 1] for x in two))


@given(rollout=rollouts())
def test_gae_environments_do_not_mix(rollout, *, script):
    """Every column is an environment of its own, in any memory layout (B82, verl-project/verl #1440)."""
    inputs, *settings = rollout
    right = script.compute_gae(*inputs, *settings)
    transposed = script.compute_gae(*(x.T.contiguous().T for x in inputs), *settings)
    columns = [
        script.compute_gae(*(x[:, n : n + 1] for x in inputs), *settings) for n in range(inputs[0].shape[1])
    ]
    for i in range(2):
        close(transposed[i], right[i])
        close(torch.cat([column[i] for column in columns], 1), right[i])


@given(rollout=rollouts(), seed=st.integers(0, 2**32 - 1), scale=st.floats(-10, 10))
def test_gae_is_linear(rollout, seed, scale, *, script):
    """Rewards and values of two tasks add up, so a scale or a constant more reward goes straight through:
    nothing is clipped or normalised inside (B13, pytorch/rl #1033)."""
    (*floats, terminated, done), *settings = rollout
    generator = torch.Generator().manual_seed(seed)
    others = torch.randn(3, *done.shape, dtype=floats[0].dtype, generator=generator)
    sums = [x + scale * y for x, y in zip(floats, others)]
    one, two, both = (script.compute_gae(*x, terminated, done, *settings)[0] for x in (floats, others, sums))
    close(both, one + scale * two)
