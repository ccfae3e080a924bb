"""categorical_logp_entropy against torch.distributions, autograd and enumeration of the actions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Categorical
from torch.testing import assert_close

# Tests with @given take `*, script`: hypothesis probes a first positional argument as if it were `self`.
pytestmark = pytest.mark.functions("categorical_logp_entropy")
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


@st.composite
def categoricals(draw):
    """logits (..., A), action (...): any leading shape, also the script's own (T, N) and one of no sample."""
    leading = draw(st.sampled_from([(), (1,), (5,), (3, 2), (2, 1, 4), (0,)]))
    A, scale = draw(st.integers(1, 18)), draw(st.sampled_from([0.0, 0.01, 1.0, 5.0]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    logits = scale * torch.randn(*leading, A, dtype=dtype, generator=generator)
    return logits, torch.randint(A, leading, generator=generator)


@given(args=categoricals())
def test_categorical_is_torchs(args, *, script):
    """Log-probability and entropy, with their gradients, are torch's, one number a sample in the logits' dtype;
    the inputs stay as they were (B01 and B19, cleanrl a3391a03; B38, ReinforcementLearningZoo.jl #169)."""
    (logits, action), kept = args, [x.clone() for x in args]
    logits = logits.clone().requires_grad_()
    right = Categorical(logits=logits, validate_args=False)  # which stumbles over no samples
    for out, wanted in zip(
        script.categorical_logp_entropy(logits, action),
        (right.log_prob(action), right.entropy()),
        strict=True,
    ):
        assert_close(out, wanted, rtol=1e-4, atol=1e-5)  # shape and dtype as well
        grads = [torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (out, wanted)]
        assert_close(*grads, rtol=1e-4, atol=1e-5)
    assert torch.equal(logits.detach(), kept[0]) and torch.equal(action, kept[1])


@given(args=categoricals(), shift=st.sampled_from([-1e4, -3.0, 7.5, 1e4]))
def test_categorical_ignores_a_common_shift(args, shift, *, script):
    """Only differences of logits count: raw logits are not taken for log-probabilities. Of a shift of 1e4 a float
    keeps what its spacing there allows, so the unshifted logits are rounded to that too."""
    logits, action = args
    shifted = logits + shift
    for out, wanted in zip(
        script.categorical_logp_entropy(shifted, action),
        script.categorical_logp_entropy(shifted - shift, action),
    ):
        assert_close(out, wanted, rtol=1e-4, atol=1e-4)


@given(args=categoricals())
def test_categorical_entropy_is_the_mean_over_all_actions(args, *, script):
    """Enumerating the actions, exp(logp) sums to 1 and -p log p to the entropy, which lies in [0, log A] and is the
    same whichever action was taken (B19, cleanrl a3391a03: -p log p of the taken action only)."""
    logits, action = args
    A = logits.shape[-1]
    each = [script.categorical_logp_entropy(logits, torch.full_like(action, a)) for a in range(A)]
    logps, entropies = (torch.stack(x, -1) for x in zip(*each))  # (..., A)
    p = logps.double().exp()
    assert_close(p.sum(-1), torch.ones_like(p[..., 0]), rtol=0, atol=1e-5)
    right = -(p * logps).sum(-1, keepdim=True).expand(p.shape)
    assert_close(entropies.double(), right, rtol=1e-4, atol=1e-5)
    assert ((entropies > -1e-5) & (entropies < math.log(A) + 1e-5)).all()


@BOTH
@pytest.mark.parametrize(
    "logits, action, logp, entropy",
    [
        ([0.0, 0.0, 0.0, 0.0], 2, math.log(1 / 4), math.log(4)),
        ([math.log(3), 0.0], 0, math.log(3 / 4), math.log(4) - 3 / 4 * math.log(3)),
        ([math.log(3), 0.0], 1, math.log(1 / 4), math.log(4) - 3 / 4 * math.log(3)),
        ([math.log(0.5), math.log(0.25), math.log(0.25)], 1, math.log(0.25), 1.5 * math.log(2)),
        ([2.0], 0, 0.0, 0.0),
    ],
)
def test_categorical_literals(script, logits, action, logp, entropy, dtype):
    """Natural logarithms, no base 2; probabilities of the softmax, not of the logits (B19: 0.2158 for the second)."""
    out = script.categorical_logp_entropy(torch.tensor([logits], dtype=dtype), torch.tensor([action]))
    right = (torch.tensor([x], dtype=dtype) for x in (logp, entropy))
    for x, wanted in zip(out, right, strict=True):
        assert_close(x, wanted, rtol=1e-5, atol=1e-6)


@BOTH
def test_categorical_is_stable(script, dtype):
    """Logits of 1e4 give exact log-probabilities and no NaN, forward or backward, where a softmax that is formed
    before its logarithm gives log 0."""
    logits = torch.tensor([[1e4, -1e4, 0.0]], dtype=dtype).expand(3, 3).clone().requires_grad_()
    logp, entropy = script.categorical_logp_entropy(logits, torch.arange(3))
    assert_close(logp, torch.tensor([0.0, -2e4, -1e4], dtype=dtype))
    assert_close(entropy, torch.zeros(3, dtype=dtype))
    (logp + entropy).sum().backward()
    p = torch.tensor([1.0, 0.0, 0.0], dtype=dtype)
    assert_close(logits.grad, torch.eye(3, dtype=dtype) - p)


def test_categorical_samples_do_not_mix(script):
    """A sample's numbers come from its own row: the batch changes nothing (B38: (N, 1) against (N,))."""
    generator = torch.Generator().manual_seed(0)
    logits, action = torch.randn(6, 4, generator=generator), torch.tensor([3, 0, 1, 1, 2, 0])
    whole = script.categorical_logp_entropy(logits, action)
    rows = [script.categorical_logp_entropy(logits[i : i + 1], action[i : i + 1]) for i in range(6)]
    for out, parts in zip(whole, zip(*rows)):
        assert_close(out, torch.cat(parts))
