"""whiten, explained_variance, RunningNorm, minibatches and linear_schedule."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

# Tests with @given take `*, script`: hypothesis probes a first positional argument as if it were `self`.
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
SEEDS = st.integers(0, 2**32 - 1)
NAN, INF = math.nan, math.inf


@BOTH
@pytest.mark.functions("whiten")
@pytest.mark.parametrize(
    "x, mask, shift_mean, right",
    [
        ([1, 2, 3, 0, 0], [1, 1, 1, 0, 0], True, [-1.224745, 0, 1.224745, 0, 0]),  # B79
        ([1, 2, 3, 9, -9], [1, 1, 1, 0, 0], False, [1.224745, 2.44949, 3.674235, 0, 0]),
        ([10, 14], None, False, [5, 7]),  # B80: subtracting the mean and adding it again gives [11, 13]
        ([10, 14], None, True, [-1, 1]),  # the unbiased deviation gives 0.7071
        ([1, 3, NAN], [1, 1, 0], True, [-1, 1, 0]),  # B85
        ([1, 3, INF], [1, 1, 0], False, [1, 3, 0]),
        ([5, NAN], [1, 0], True, [0, 0]),
        ([5, NAN], [0, 0], True, [0, 0]),
        ([5, INF], [0, 0], False, [0, 0]),
        ([4, 4, 4], None, True, [0, 0, 0]),
    ],
)
def test_whiten_literals(script, x, mask, shift_mean, right, dtype):
    """Population moments of the counted entries; zero elsewhere, whatever stood there (B79 and B85,
    verl-project/verl #1527 and #2377; B80, THUDM/slime #1369)."""
    x, right = torch.tensor(x, dtype=dtype), torch.tensor(right, dtype=dtype)
    before, mask = x.clone(), None if mask is None else torch.tensor(mask, dtype=torch.bool)
    assert_close(script.whiten(x, mask, shift_mean), right, rtol=1e-4, atol=1e-6)
    assert torch.equal(x.nan_to_num(), before.nan_to_num())


@BOTH
@pytest.mark.functions("whiten")
@given(seed=SEEDS, scale=st.floats(0.5, 50), offset=st.floats(-1000, 1000), shift_mean=st.booleans())
def test_whiten_is_numpy_on_the_counted_entries(seed, scale, offset, shift_mean, *, script, dtype):
    """Equal to numpy on the counted entries, all together and not by rows, also in float32 far from zero;
    anything elsewhere changes nothing (B79; B80, OpenRLHF/OpenRLHF #1250; B91, radixark/miles #1827)."""
    rng = np.random.default_rng(seed)
    x, mask = rng.normal(offset, scale, size=(4, 5)), rng.random((4, 5)) < 0.6
    mask[0, :2], x[0, :2] = True, (offset - scale, offset + scale)
    junked = np.where(mask, x, rng.choice([NAN, INF, 1e30], size=x.shape))
    for values, counted, argument in ((junked, mask, torch.tensor(mask)), (x, np.full((4, 5), True), None)):
        mean, std = x[counted].mean() * shift_mean, x[counted].std()
        right = torch.tensor(np.where(counted, (x - mean) / std, 0), dtype=dtype)
        out = script.whiten(torch.tensor(values, dtype=dtype), argument, shift_mean)
        assert_close(out, right, rtol=1e-3, atol=2e-3)


@BOTH
@pytest.mark.functions("explained_variance")
@pytest.mark.parametrize(
    "pred, right",
    [
        ([1, 2, 3, 4], 1),  # perfect
        ([6, 7, 8, 9], 1),  # a constant off: variance, not squared error
        ([2, 2, 2, 2], 0),  # says nothing
        ([1, 2, 3, 5], 0.85),
        ([-1, -2, -3, -4], -3),  # worse than nothing
    ],
)
def test_explained_variance_literals(script, pred, right, dtype):
    """1 - Var(target - pred) / Var(target) over all entries, arguments not exchanged (the kind of B22)."""
    pred, target = torch.tensor([pred, [1, 2, 3, 4]], dtype=dtype)
    for shape in ((4,), (2, 2)):
        value = script.explained_variance(pred.reshape(shape), target.reshape(shape))
        assert float(value) == pytest.approx(right, abs=1e-6)


@BOTH
@pytest.mark.functions("explained_variance")
@pytest.mark.parametrize("constant", [0.0, 3.0, 0.1, -123.456])
def test_explained_variance_of_a_constant_target_is_nan(script, constant, dtype):
    """NaN, and not a number near -1e16 where the mean of equal targets rounds (the kind of B22)."""
    target = torch.full((100,), constant, dtype=dtype)
    for pred in (target, torch.arange(100, dtype=dtype)):
        assert math.isnan(script.explained_variance(pred, target))


@pytest.mark.functions("RunningNorm")
@given(
    seed=SEEDS, cuts=st.lists(st.integers(1, 12), min_size=2, max_size=6), shape=st.sampled_from([(), (3,)])
)
def test_running_norm_is_numpy_on_everything(seed, cuts, shape, *, script):
    """For any cut into batches mean and variance are numpy's on all samples, also at an offset that float32
    and sums of squares do not survive (B47, vwxyzjn/cleanrl fc5f80c8)."""
    data = np.random.default_rng(seed).normal(1e6, 1.0, size=(sum(cuts), *shape))
    norm, before = script.RunningNorm(shape), data.copy()
    for batch in np.split(data, np.cumsum(cuts)[:-1]):
        norm.update(batch)
    assert np.shape(norm.mean) == np.shape(norm.std) == shape and np.array_equal(data, before)
    np.testing.assert_allclose(norm.mean, data.mean(0), rtol=1e-12)
    np.testing.assert_allclose(np.square(norm.std), data.var(0), rtol=1e-5, atol=1e-7)


@pytest.mark.functions("RunningNorm")
def test_running_norm_axis_and_normalize(script):
    """Every dimension has its own statistics (B47, vwxyzjn/cleanrl fc5f80c8: 101 for both); normalize clips
    to +-10, returns float32 and learns nothing from what it sees."""
    norm = script.RunningNorm((2,))
    norm.update(np.array([[1, 100], [3, 300]], np.float32))
    x = np.array([[2.5, 150.0], [11.0, -700.0], [1e9, -1e9]])
    for _ in range(2):
        np.testing.assert_allclose(norm.mean, [2, 200])
        np.testing.assert_allclose(np.square(norm.std), [1, 10000], rtol=1e-6)
        out = norm.normalize(x)
        assert out.dtype == np.float32
        np.testing.assert_allclose(out, [[0.5, -0.5], [9, -9], [10, -10]], rtol=1e-6)


@pytest.mark.functions("RunningNorm")
@pytest.mark.parametrize("shape", [(), (3,)], ids=str)
def test_running_norm_before_there_is_a_deviation(script, shape):
    """The deviation is 1 until two samples are seen; a constant gives no NaN or infinity (B80: n = 1)."""
    norm, x = script.RunningNorm(shape), np.full((1, *shape), 5.0)
    np.testing.assert_array_equal(norm.normalize(x), x)
    norm.update(x)
    np.testing.assert_array_equal(norm.normalize(x + 2), np.full_like(x, 2))
    norm.update(np.concatenate([x, x]))
    np.testing.assert_array_equal(norm.normalize(x), np.zeros_like(x))
    assert np.isfinite(norm.normalize(x + 1e-3)).all()


@pytest.mark.functions("RunningNorm")
@pytest.mark.parametrize("shape", [(), (3,)], ids=str)
def test_running_norm_state_dict(script, shape):
    """A restored copy goes on exactly as the original, and shares no memory with it or with the state (the
    kind of B35, vwxyzjn/lm-human-preference-details dc2f18b)."""
    one, two, x = np.random.default_rng(1).normal(3, 2, size=(3, 7, *shape))
    norm, restored, again = (script.RunningNorm(shape) for _ in range(3))
    norm.update(one)
    state, frozen = norm.state_dict(), norm.normalize(x)
    restored.load_state_dict(state)
    norm.update(two)
    assert np.array_equal(restored.normalize(x), frozen)
    restored.update(two)
    assert np.array_equal(restored.mean, norm.mean) and np.array_equal(restored.std, norm.std)
    again.load_state_dict(state)
    assert np.array_equal(again.normalize(x), frozen) and not np.array_equal(norm.normalize(x), frozen)


@pytest.mark.functions("minibatches")
@given(n=st.integers(1, 200), share=st.floats(0, 1), seed=SEEDS)
def test_minibatches_are_a_partition(n, share, seed, *, script):
    """Every sample once, none dropped, sizes differ by at most 1 (B26, DLR-RM/stable-baselines3 #265)."""
    num = 1 + int(share * (n - 1))
    parts = list(script.minibatches(n, num, torch.Generator().manual_seed(seed)))
    sizes = [len(part) for part in parts]
    assert len(parts) == num and max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(n))


@pytest.mark.functions("minibatches")
def test_minibatches_shuffle_single_samples(script):
    """Any two samples meet equally often, anywhere: no blocks, strides or rotations (the kind of B29)."""
    generator, together, where = torch.Generator().manual_seed(1), torch.zeros(12, 12), torch.zeros(3, 12)
    for _ in range(1000):
        for i, part in enumerate(script.minibatches(12, 3, generator)):
            together[part[:, None], part] += 1e-3
            where[i, part] += 1e-3
    assert (together - 3 / 11)[~torch.eye(12, dtype=torch.bool)].abs().max() < 0.07
    assert (where - 1 / 3).abs().max() < 0.08


@pytest.mark.functions("minibatches")
def test_minibatches_draw_from_their_generator_only(script):
    """Fresh at every call, the same again from the same seed, apart from the global streams (B29,
    vwxyzjn/cleanrl #238)."""

    def order(generator):
        return torch.cat(list(script.minibatches(50, 5, generator)))

    torch.manual_seed(1)
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    generator = torch.Generator().manual_seed(5)
    first, second = order(generator), order(generator)
    assert torch.equal(torch.get_rng_state(), state) and np.array_equal(np.random.get_state()[1], numpy_state)
    torch.manual_seed(2)
    assert torch.equal(order(torch.Generator().manual_seed(5)), first)
    assert not torch.equal(first, second)
    assert not torch.equal(order(torch.Generator().manual_seed(6)), first)


@pytest.mark.functions("linear_schedule")
def test_linear_schedule(script):
    """The first update has the full rate, the last one is not 0, and the line has no steps (B25,
    anthonytorlucci/rlevo #324, luchris429/purejaxrl #6)."""
    assert [script.linear_schedule(step, 4) for step in range(4)] == [1, 0.75, 0.5, 0.25]
    assert script.linear_schedule(0, 1) == 1
    np.testing.assert_allclose(np.diff([script.linear_schedule(step, 977) for step in range(977)]), -1 / 977)
