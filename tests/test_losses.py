"""policy_loss, clip_fraction, value_loss and approx_kl: tables, definitions and gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

# Tests with @given take `*, script`: hypothesis probes a first positional argument as if it were `self`.
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def tensors(draw, *elements):
    """One tensor for each of the elements, all of the same shape and dtype."""
    shape = draw(st.sampled_from([(), (1,), (6,), (2, 3), (2, 1, 2)]))
    dtype, n = draw(st.sampled_from([torch.float32, torch.float64])), math.prod(shape)
    columns = [draw(st.lists(element, min_size=n, max_size=n)) for element in elements]
    return [torch.tensor(column, dtype=dtype).reshape(shape) for column in columns]


@st.composite
def policies(draw):
    """Arguments of policy_loss: clips are multiples of 0.05 or huge, ratios halfway between two."""
    ratios, sizes = st.integers(0, 60).map(lambda k: 0.05 * k + 0.025), st.floats(0.1, 3.0)
    ratio, old_logp, adv = tensors(draw, ratios, st.floats(-5, 5), sizes | sizes.map(lambda size: -size))
    low, high = draw(st.integers(1, 19) | st.just(10**9)), draw(st.integers(1, 40) | st.just(10**9))
    return old_logp + ratio.log(), old_logp, adv, 0.05 * low, 0.05 * high


@st.composite
def critics(draw):
    """Arguments of value_loss: no value at an end of the clip range, no tie of the two errors."""
    old_v, move, target = tensors(draw, st.floats(-5, 5), st.integers(-20, 20), st.integers(-40, 40))
    return old_v + 0.1 * move + 0.05, old_v, old_v + 0.05 * target + 0.0125, 0.1 * draw(st.integers(0, 15))


def gradient(function, x, *rest):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x, *rest).sum(), x)[0]


@BOTH
@pytest.mark.functions("policy_loss")
def test_policy_loss_table(script, dtype):
    """The pessimistic side is kept for both signs of the advantage, in value and gradient, also at a ratio of
    exactly 1 (B14, takuseno/ppo #3; B16, openai/baselines #1156; B17, thu-ml/tianshou #433)."""
    ratio, adv = torch.tensor([[0.5, 1.0, 1.5, 0.5, 1.0, 1.5, 10.0], [2, 2, 2, -2, -2, -2, -2]], dtype=dtype)
    args = ratio.log(), torch.zeros_like(adv), adv, 0.2, 0.2
    right = torch.tensor([1.0, 2.0, 2.4, -1.6, -2.0, -3.0, -20.0], dtype=dtype)
    assert_close(-script.policy_loss(*args), right)
    flows = torch.tensor([1, 1, 0, 0, 1, 1, 1], dtype=dtype)
    assert_close(gradient(script.policy_loss, *args), -adv * ratio * flows)


@pytest.mark.functions("policy_loss")
@given(args=policies())
def test_policy_loss_is_its_definition(args, *, script):
    """min(r A, clip(r, 1 - low, 1 + high) A) sample by sample: the clips are kept apart, nothing is reduced,
    paired or normalised (B13, pytorch/rl #1033; B14, takuseno/ppo #3; B38, allenai/allenact #226)."""
    logp, old_logp, adv, low, high = args
    before = [x.clone() for x in args[:3]]
    ratio = torch.exp(logp - old_logp)
    objective = torch.minimum(ratio * adv, torch.clip(ratio, 1 - low, 1 + high) * adv)
    assert_close(script.policy_loss(*args), -objective)
    assert all(torch.equal(x, y) for x, y in zip(args, before))


@pytest.mark.functions("policy_loss")
@given(args=policies())
def test_policy_loss_gradient(args, *, script):
    """Exactly 0 where a good move went too far and -A r everywhere else: a move in the wrong direction is
    never masked (B14, ray-project/ray #37334; B16, openai/baselines #1156; B17, thu-ml/tianshou #433)."""
    logp, old_logp, adv, low, high = args
    ratio, grad = torch.exp(logp - old_logp), gradient(script.policy_loss, *args)
    removed = ((adv > 0) & (ratio > 1 + high)) | ((adv < 0) & (ratio < 1 - low))
    assert (grad[removed] == 0).all()
    assert_close(grad[~removed], (-adv * ratio)[~removed])
    logp, old_logp, adv = (x.double() for x in args[:3])
    above, below = (script.policy_loss(logp + h, old_logp, adv, low, high) for h in (1e-6, -1e-6))
    assert_close(grad.double(), (above - below) / 2e-6, rtol=1e-4, atol=1e-4)


@BOTH
@pytest.mark.functions("policy_loss")
def test_policy_loss_forms_the_ratio_in_log_space(script, dtype):
    """The log-probability of a long response underflows exp, the difference of two does not (the kind of
    B110, walkinglabs/hands-on-modern-rl #75)."""
    logp, old_logp, adv = torch.tensor([[-1000.0, -1000.0], [-1000.1, -1000.1], [1, -1]], dtype=dtype)
    loss = script.policy_loss(logp, old_logp, adv, 0.2, 0.2)
    assert_close(loss, -adv * math.exp(0.1), rtol=1e-3, atol=0)
    old_logp = torch.tensor([-1070.0, -930.0], dtype=dtype)  # ratios e^70 and e^-70, both on the good side
    assert (gradient(script.policy_loss, logp, old_logp, adv, 0.2, 0.2) == 0).all()


@BOTH
@pytest.mark.functions("clip_fraction")
def test_clip_fraction_literal(script, dtype):
    """Only samples on the good side count, not every ratio outside the range (B22, huggingface/trl #3175)."""
    ratio, adv = torch.tensor([[1.5, 0.5, 1.5, 0.5], [1, 1, -1, -1]], dtype=dtype)
    fraction = script.clip_fraction(ratio.log(), torch.zeros_like(adv), adv, 0.2, 0.2)
    assert fraction.shape == () and float(fraction) == 0.5


@pytest.mark.functions("policy_loss", "clip_fraction")
@given(args=policies())
def test_clip_fraction_is_the_share_of_zero_gradients(args, *, script):
    """The metric tells of the loss really used (B22, huggingface/trl #3175, pytorch/rl #2021)."""
    share = (gradient(script.policy_loss, *args) == 0).double().mean()
    assert float(script.clip_fraction(*args)) == pytest.approx(float(share))


@BOTH
@pytest.mark.functions("value_loss")
@pytest.mark.parametrize(
    "v, old_v, ret, clip, right",
    [
        (1.5, 1.0, 2.0, 0.2, 0.32),  # the smaller error, or a clip around v itself, gives 0.125
        (0.5, 1.0, 0.0, 0.2, 0.32),  # the same below
        (1.5, 1.0, 0.0, 0.2, 1.125),  # moved away from the return: the unclipped error is larger
        (1.1, 1.0, 2.0, 0.2, 0.405),  # inside the range
        (1.5, 1.0, 2.0, None, 0.125),  # off
        (1.5, 1.0, 2.0, 0.0, 0.5),  # a clip of 0 is not off
        (9.1, [0.0, 5.0, 9.0][2], 10.0, 0.2, 0.405),  # B83
    ],
)
def test_value_loss_literals(script, v, old_v, ret, clip, right, dtype):
    """Half the larger squared error, clipped around the rollout's value (B02, vwxyzjn/cleanrl #15; B20 and
    B83, vwxyzjn/lm-human-preference-details 36b8f56 and 9825ce0)."""
    v, old_v, ret, right = (torch.tensor([x], dtype=dtype) for x in (v, old_v, ret, right))
    assert_close(script.value_loss(v, old_v, ret, clip), right)


@pytest.mark.functions("value_loss")
@given(args=critics())
def test_value_loss_is_its_definition(args, *, script):
    """Never below the plain loss; the gradient is exactly 0 where the clip was reached and its error is the
    larger, v - return everywhere else (B02, ray-project/ray #2233; B20, tensorflow/agents #352; B38)."""
    v, old_v, ret, clip = args
    before = [x.clone() for x in args[:3]]
    bounded = torch.minimum(torch.maximum(v, old_v - clip), old_v + clip)
    held = ((v - old_v).abs() > clip) & ((bounded - ret).abs() > (v - ret).abs())
    loss, grad = script.value_loss(*args), gradient(script.value_loss, *args)
    assert_close(loss, 0.5 * torch.where(held, bounded - ret, v - ret) ** 2, rtol=1e-5, atol=1e-5)
    assert (grad[held] == 0).all()
    assert_close(grad[~held], (v - ret)[~held], rtol=1e-5, atol=1e-5)
    assert all(torch.equal(x, y) for x, y in zip(args, before))
    plain = script.value_loss(v, old_v, ret, None)
    assert (loss >= plain - 1e-5).all()
    assert_close(plain, 0.5 * (v - ret) ** 2)
    assert_close(script.value_loss(v, old_v, ret, 1e3), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.functions("approx_kl")
@given(data=st.data())
def test_approx_kl_is_its_definition(data, *, script):
    """With d = reference - policy, sample by sample: k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d, the last two
    never negative, and their slopes (B74, pytorch/rl #2908: the sign; B100, allenai/open-instruct #534: as a
    loss k1 has the slope 1, whatever the reference; B38, allenai/allenact #226)."""
    logp, ref_logp = tensors(data.draw, st.floats(-8, 0), st.floats(-8, 0))
    before, d = [logp.clone(), ref_logp.clone()], ref_logp - logp
    value = {"k1": -d, "k2": d**2 / 2, "k3": torch.exp(d) - 1 - d}
    slope = {"k1": torch.ones_like(d), "k2": -d, "k3": 1 - torch.exp(d)}
    for kind in value:
        estimate = script.approx_kl(logp, ref_logp, kind)
        assert_close(estimate, value[kind], rtol=1e-5, atol=1e-5)
        assert_close(gradient(script.approx_kl, logp, ref_logp, kind), slope[kind], rtol=1e-5, atol=1e-5)
        assert kind == "k1" or (estimate >= 0).all()
    assert torch.equal(logp, before[0]) and torch.equal(ref_logp, before[1])
    with pytest.raises((LookupError, ValueError, NotImplementedError, AssertionError)):
        script.approx_kl(logp, ref_logp, "k4")


@BOTH
@pytest.mark.functions("approx_kl")
@given(logits=st.lists(st.tuples(st.floats(-4, 4), st.floats(-4, 4)), min_size=2, max_size=6))
def test_approx_kl_expectation(logits, *, script, dtype):
    """Under the policy k1 and k3 have the expectation KL(policy || reference) (B77, CarperAI/trlx #361)."""
    logp, ref_logp = torch.tensor(logits, dtype=dtype).T.log_softmax(-1)
    kl = (logp.exp() * (logp - ref_logp)).sum()
    for kind in ("k1", "k3"):
        estimate = script.approx_kl(logp, ref_logp, kind)
        assert_close((logp.exp() * estimate).sum(), kl, rtol=1e-4, atol=1e-5)


@BOTH
@pytest.mark.functions("approx_kl")
def test_approx_kl_k3_is_accurate_near_zero(script, dtype):
    """k3 of nearly equal policies keeps its digits in float32 (B101, natolambert/rlhf-book #525: 1.7e-8)."""
    d = torch.tensor([1e-3, 1e-4, -1e-4, 0.0], dtype=dtype)
    assert_close(script.approx_kl(torch.zeros_like(d), d, "k3"), d**2 / 2 + d**3 / 6, rtol=1e-2, atol=0)
