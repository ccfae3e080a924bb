"""gaussian_logp_entropy and tanh_log_det against torch.distributions, autograd and integration."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Independent, Normal
from torch.testing import assert_close

# Tests with @given take `*, script`: hypothesis probes a first positional argument as if it were `self`.
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


@st.composite
def gaussians(draw):
    """mean (M, A), log_std (A,), action (M, A)."""
    M, A = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    mean, noise = torch.randn(2, M, A, dtype=dtype, generator=generator)
    log_std = torch.tensor(draw(st.lists(st.floats(-3, 2), min_size=A, max_size=A)), dtype=dtype)
    return mean, log_std, mean + 2 * log_std.exp() * noise


@pytest.mark.functions("gaussian_logp_entropy")
@given(args=gaussians())
def test_gaussian_is_torchs_normal(args, *, script):
    """Log-density and entropy, with their gradients, are those of independent normals summed over the action,
    one number a sample (B37, thu-ml/tianshou #40; B38, allenai/allenact #226; B19, cleanrl a3391a03)."""
    inputs = [x.clone().requires_grad_() for x in args]
    mean, log_std, action = inputs
    normal = Independent(Normal(mean, log_std.exp()), 1)
    rights = normal.log_prob(action), normal.entropy()
    for out, right in zip(script.gaussian_logp_entropy(*inputs), rights, strict=True):
        assert_close(out, right, rtol=1e-4, atol=1e-4)  # shape (M,) and dtype as well
        grads, right_grads = (
            torch.autograd.grad(x.sum(), inputs, retain_graph=True, allow_unused=True, materialize_grads=True)
            for x in (out, right)
        )
        for grad, right_grad in zip(grads, right_grads):
            assert_close(grad, right_grad, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(x, y) for x, y in zip(inputs, args))


@BOTH
@pytest.mark.functions("gaussian_logp_entropy")
@pytest.mark.parametrize(
    "mean, new_mean, std, action, right",
    [
        ([0.0, 0.0, 0.0], [0.1, 0.1, 0.1], 1.0, [0.5, -1.0, 2.0], 1.1445),  # B37
        ([0.9], [1.0], 0.5, [1.7], 1.3499),  # B40: 3.5966 with a clipped action
        ([0.9], [0.9], 0.5, [1.7], 1.0),  # B01
    ],
)
def test_gaussian_ratio_literals(script, mean, new_mean, std, action, right, dtype):
    """One ratio for a whole action, of the action as given: not clipped, not drawn anew (B37 and B40,
    thu-ml/tianshou #162 and #312; B01, vwxyzjn/cleanrl a3391a03)."""
    mean, new_mean, action = (torch.tensor([x], dtype=dtype) for x in (mean, new_mean, action))
    log_std = torch.full_like(mean[0], std).log()
    old, new = (script.gaussian_logp_entropy(m, log_std, action)[0] for m in (mean, new_mean))
    assert_close(torch.exp(new - old), torch.tensor([right], dtype=dtype), rtol=1e-4, atol=0)


@pytest.mark.functions("gaussian_logp_entropy", "tanh_log_det")
@pytest.mark.parametrize("mean, log_std", [(0.0, 0.0), (0.4, -1.0), (-1.0, 0.5)])
def test_densities_integrate_to_one(script, mean, log_std):
    """exp(logp) over the line and exp(logp - log_det) over the image of tanh are densities, and the entropy
    is the mean of -logp: the correction is subtracted (B41, automl/Mighty #118; B19, cleanrl a3391a03)."""
    u = (mean + math.exp(log_std) * torch.linspace(-9, 9, 20001, dtype=torch.float64))[:, None]
    log_std = torch.tensor([log_std], dtype=torch.float64)
    logp, entropy = script.gaussian_logp_entropy(torch.full_like(u, mean), log_std, u)
    squashed = torch.exp(logp - script.tanh_log_det(u))
    assert float(torch.trapezoid(logp.exp(), u[:, 0])) == pytest.approx(1, abs=1e-6)
    assert float(torch.trapezoid(-logp * logp.exp(), u[:, 0])) == pytest.approx(float(entropy[0]), abs=1e-6)
    assert float(torch.trapezoid(squashed, u[:, 0].tanh())) == pytest.approx(1, abs=1e-4)


@BOTH
@pytest.mark.functions("tanh_log_det")
@given(u=st.lists(st.floats(-3, 3), min_size=1, max_size=4))
def test_tanh_log_det_is_that_of_the_jacobian(u, *, script, dtype):
    """log |det d tanh(u) / du|, summed over the action (B41, automl/Mighty #118; B37, tianshou #40)."""
    u = torch.tensor(u, dtype=torch.float64)
    right = torch.linalg.slogdet(torch.autograd.functional.jacobian(torch.tanh, u)).logabsdet
    out = script.tanh_log_det(torch.stack([u, -u]).to(dtype))
    assert_close(out, torch.stack([right, right]).to(dtype), rtol=1e-4, atol=1e-5)


@BOTH
@pytest.mark.functions("tanh_log_det")
def test_tanh_log_det_is_stable(script, dtype):
    """Saturated actions stay finite, with gradients, where 1 - tanh^2 rounds to 0 (B41: 14.1541 at u = 2)."""
    u = torch.tensor([[2.0], [50.0], [-50.0], [0.0]], dtype=dtype, requires_grad=True)
    out, far = script.tanh_log_det(u), 2 * math.log(2) - 100
    assert_close(out, torch.tensor([-math.log(14.1541), far, far, 0], dtype=dtype), rtol=1e-5, atol=1e-6)
    out.sum().backward()
    assert_close(u.grad, -2 * u.detach().tanh())
