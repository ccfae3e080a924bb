"""The functions of the language-model scripts: tables, definitions, gradients and exact enumeration."""

import math
import statistics
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

# Tests with @given take `*, script`: hypothesis probes a first positional argument as if it were `self`.
SURROGATES, ADVANTAGES = ("clip", "gspo", "cispo", "reinforce"), ("grpo", "rloo", "drgrpo")
F64, BOOL, LONG = torch.float64, torch.bool, torch.long
JUNK = st.sampled_from([math.nan, math.inf, -math.inf, 1e30, 7.0])
REFUSED = (LookupError, ValueError, NotImplementedError, AssertionError)


def tensor(draw, element, *shape, dtype=F64):
    size = math.prod(shape)
    return torch.tensor(draw(st.lists(element, min_size=size, max_size=size)), dtype=dtype).reshape(shape)


def gradient(function, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x).sum(), x)[0]


@st.composite
def batches(draw):
    """log-probabilities, advantages, a mask of leading tokens and clips: ratios and their geometric means never
    meet a clip, because 0.05 (k + 1/2) never multiply to a power of 0.05 n."""
    rows, slots = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ratio = tensor(draw, st.integers(5, 40).map(lambda k: 0.05 * k + 0.025), rows, slots)
    old_logp = tensor(draw, st.floats(-5, 0), rows, slots)
    adv = tensor(draw, st.sampled_from([-2, -0.5, 1, 3]), rows)
    mask = torch.arange(slots) < tensor(draw, st.integers(1, slots), rows, 1, dtype=LONG)
    clips = [0.05 * draw(st.integers(*ends)) for ends in ((1, 15), (1, 15), (10, 30))]
    return old_logp + ratio.log(), old_logp, adv, mask, *clips


@st.composite
def groups(draw):
    """Rewards in quarters, some of them NaN, and the size of their groups."""
    size, number = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    quarters = st.integers(-8, 8).map(lambda k: k / 4) | st.sampled_from([0.0, 1.0])
    return tensor(draw, quarters | st.just(math.nan), number * size, dtype=torch.float32), size


@pytest.mark.functions("token_logps")
@pytest.mark.parametrize(
    "logits, tokens, temperature, right",
    [
        ([[2, 1, 0]], [1], 0.5, [-2.1429]),  # B59: untempered it is -1.4076
        ([[2, 1, 0]], [1], 1.0, [-1.4076]),
        ([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]], [1, 2], None, [-1.6094, -0.2231]),  # B64, of probabilities
        ([[2, 1, -math.inf, -math.inf]], [0], 1.0, [-0.3133]),  # B61: a support of two
        ([[2, 1, 0, -1]], [0], 1.0, [-0.4402]),  # less by the log of the mass 0.8808 of these two
        ([[1e4, 0, -1e4]] * 2, [0, 2], 0.5, [0, -4e4]),
        ([[3e30, 3e30, 0, -3e30]] * 2, [1, 3], 1.0, [-0.6931, -6e30]),
    ],
)
def test_token_logps_table(script, logits, tokens, temperature, right):
    """Divided by T, and finite for huge logits or closed tokens (B59, OpenRLHF/OpenRLHF #857; B61,
    huggingface/trl #235; B64, lucidrains/PaLM-rlhf-pytorch #31: a token's logits stand at its own slot here)."""
    logits = torch.tensor([logits], dtype=torch.float32)
    logits = logits.log() if temperature is None else logits
    value = lambda x: script.token_logps(x, torch.tensor([tokens]), temperature or 1.0)
    assert_close(value(logits), torch.tensor([right], dtype=torch.float32), rtol=1e-4, atol=5e-5)
    assert gradient(value, logits).isfinite().all()


@pytest.mark.functions("token_logps")
@given(data=st.data(), temperature=st.sampled_from([0.25, 0.7, 1.0, 1.7]), exact=st.booleans())
def test_token_logps_is_its_definition(data, temperature, exact, *, script):
    """log softmax(logits / T) in float32, from bfloat16 logits too, with the gradient (onehot - softmax) / T;
    slices as callers cut them, inputs unchanged (B59, huggingface/trl #3029, verl-project/verl #3133)."""
    rows, slots, vocab = (data.draw(st.integers(1, top)) for top in (3, 4, 5))
    dtype = torch.float32 if exact else torch.bfloat16
    logits = tensor(data.draw, st.floats(-9, 9, width=32), rows, slots + 1, vocab, dtype=dtype)[:, :-1]
    tokens = tensor(data.draw, st.integers(0, vocab - 1), rows, slots + 1, dtype=LONG)[:, 1:]
    weight = torch.arange(1.0, 1 + rows * slots).view(rows, slots)
    before = logits.clone(), tokens.clone()
    value, right, slope = script.token_logps(logits, tokens, temperature), [], torch.zeros(logits.shape)
    for b, t in product(range(rows), range(slots)):
        scaled = [float(x) / temperature for x in logits[b, t]]
        total, token = sum(map(math.exp, scaled)), int(tokens[b, t])
        right.append(scaled[token] - math.log(total))
        for v in range(vocab):
            slope[b, t, v] = weight[b, t] * ((v == token) - math.exp(scaled[v]) / total) / temperature
    assert value.dtype == torch.float32
    assert_close(value, torch.tensor(right).view(rows, slots), rtol=1e-4, atol=2e-5)
    grad = gradient(lambda x: weight * script.token_logps(x, tokens, temperature), logits)
    assert_close(grad.float(), slope, rtol=1e-4 if exact else 1e-2, atol=1e-4 if exact else 1e-2)
    assert torch.equal(logits, before[0]) and torch.equal(tokens, before[1])


@pytest.mark.functions("response_mask")
@pytest.mark.parametrize(
    "tokens, eos_ids, right",
    [
        ([7, 3, 8, 9], [2, 3], [1, 1, 0, 0]),  # B103
        ([7, 2, 8, 3], [2, 3], [1, 1, 0, 0]),
        ([7, 3, 8, 9], [2], [1, 1, 1, 1]),
        ([7, 2, 2, 2], [2], [1, 1, 0, 0]),  # the pad is the stop id
        ([2, 7, 8, 9], [2], [1, 0, 0, 0]),
        ([7, 8, 9, 2], [2], [1, 1, 1, 1]),
        ([0, 0, 1, 0], [1], [1, 1, 1, 0]),  # an id 0 is a token
    ],
)
def test_response_mask_table(script, tokens, eos_ids, right):
    """The first of any stop id is the last that counts (B103, verl-project/verl #213)."""
    mask = script.response_mask(torch.tensor([tokens]), eos_ids)
    assert mask.dtype == BOOL and mask.int().tolist() == [right]


@pytest.mark.functions("response_mask")
@given(data=st.data(), eos_ids=st.lists(st.integers(0, 4), min_size=1, max_size=3))
def test_response_mask_is_its_definition(data, eos_ids, *, script):
    """A token counts unless a stop id stands before it in its row (B103, GRPO-Zero a3a8963)."""
    shape = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    tokens = tensor(data.draw, st.integers(0, 6), *shape, dtype=LONG)
    before = tokens.clone()
    right = [[not set(row[:t]) & set(eos_ids) for t in range(len(row))] for row in tokens.tolist()]
    assert script.response_mask(tokens, eos_ids).tolist() == right
    assert torch.equal(tokens, before)


@pytest.mark.functions("masked_mean")
@given(data=st.data())
def test_masked_mean_is_its_definition(data, *, script):
    """What stands in masked slots changes neither value nor gradient; no slot at all gives 0 and a gradient of
    0; `denom` replaces the count (B85, verl-project/verl #2377 and #782)."""
    shape = data.draw(st.sampled_from([(1,), (5,), (2, 3)]))
    mask = tensor(data.draw, st.booleans(), *shape, dtype=BOOL)
    x = torch.where(mask, tensor(data.draw, st.floats(-5, 5), *shape), tensor(data.draw, JUNK, *shape))
    before, kept = x.clone(), x[mask].tolist()
    for denom in (None, len(kept) + 3, torch.tensor(7)):
        count = max(len(kept), 1) if denom is None else float(denom)
        value = script.masked_mean(x, mask, denom)
        assert value.shape == () and float(value) == pytest.approx(math.fsum(kept) / count)
        assert_close(gradient(lambda x, d=denom: script.masked_mean(x, mask, d), x), mask.double() / count)
    assert torch.equal(x.nan_to_num(5.5), before.nan_to_num(5.5))


@pytest.mark.functions("masked_mean")
def test_masked_mean_literals(script):
    """NaN outside the mask, and nothing inside it (B85, verl-project/verl #2377 and #782)."""
    x, mask = torch.tensor([1, 3, math.nan]), torch.tensor([True, True, False])
    assert script.masked_mean(x, mask) == 2 and script.masked_mean(x, mask, 8) == 0.5
    assert script.masked_mean(x, mask & False) == 0 and script.masked_mean(x, mask & False, 0) == 0


@pytest.mark.functions("group_advantages")
@pytest.mark.parametrize(
    "rewards, size, kind, right",
    [
        ([1, 0, 0, 1, 1, 1, 1, 0], 4, "grpo", [0.8659, -0.8659, -0.8659, 0.8659, *[0.4999] * 3, -1.4997]),
        ([1, 0, 0, 1, 1, 1, 1, 0], 4, "drgrpo", [0.5, -0.5, -0.5, 0.5, *[0.25] * 3, -0.75]),
        ([1, 0, 0, 1, 1, 1, 1, 0], 4, "rloo", [2 / 3, -2 / 3, -2 / 3, 2 / 3, *[1 / 3] * 3, -1]),
        ([1, 0, math.nan], 3, "grpo", [0.7070, -0.7070, 0]),  # B97; as zero it is [1.1545, -0.5773, -0.5773]
        ([1, 0, math.nan], 3, "drgrpo", [0.5, -0.5, 0]),
        ([1, 0, math.nan], 3, "rloo", [1, -1, 0]),
        ([0, 0.001], 2, "grpo", [-0.6195, 0.6195]),  # the 1e-4 beside the deviation
        *(([3.0], 1, kind, [0]) for kind in ADVANTAGES),  # B94
        *(([math.nan, 1, math.nan, math.nan], 2, kind, [0] * 4) for kind in ADVANTAGES),
    ],
)
def test_group_advantages_table(script, rewards, size, kind, right):
    """Within the group, by the kind that was asked for (B92, XU-YIJIE/grpo-flat #2; B94, huggingface/trl #4662;
    B95, huggingface/trl #3991; B97, huggingface/trl #5773)."""
    value = script.group_advantages(torch.tensor(rewards, dtype=torch.float32), size, kind)
    assert_close(value, torch.tensor(right, dtype=torch.float32), rtol=1e-4, atol=1e-4)


@pytest.mark.functions("group_advantages", "flat_groups")
@given(args=groups())
def test_group_advantages_are_their_definition(args, *, script):
    """Loops over the scored rewards of a group: the rest is left out and 0 is a score (B97, huggingface/trl
    #5775, OpenRLHF/OpenRLHF #1219); the deviation is that of the sample and never of the others only
    (NVIDIA-NeMo/RL #1518); a flat group is 0 (B92, B94, B95)."""
    rewards, size = args
    before, right = rewards.clone(), {kind: [] for kind in ADVANTAGES}
    rows = [[r for r in row if not math.isnan(r)] for row in rewards.view(-1, size).tolist()]
    for reward, scored in ((r, rows[i // size]) for i, r in enumerate(rewards.tolist())):
        flat = math.isnan(reward) or len(set(scored)) < 2
        centred = 0.0 if flat else reward - statistics.fmean(scored)
        right["drgrpo"].append(centred)
        right["grpo"].append(centred and centred / (statistics.stdev(scored) + 1e-4))
        right["rloo"].append(0.0 if flat else reward - (sum(scored) - reward) / (len(scored) - 1))
    for kind in ADVANTAGES:
        value = script.group_advantages(rewards, size, kind)
        assert_close(value, torch.tensor(right[kind], dtype=torch.float32), rtol=1e-4, atol=1e-5)
    flat = script.flat_groups(rewards, size)
    assert flat.dtype == BOOL and flat.tolist() == [len(set(row)) < 2 for row in rows]
    assert torch.equal(rewards.nan_to_num(5.5), before.nan_to_num(5.5))
    with pytest.raises(REFUSED):
        script.group_advantages(rewards, size, "none")


@pytest.mark.functions("group_advantages")
@pytest.mark.parametrize("kind", ADVANTAGES)
@given(args=groups(), data=st.data())
def test_group_advantages_invariances(args, data, *, script, kind):
    """Sum 0 in each group, whatever is added to all rewards of a group; responses and groups may change places;
    an unscored one might as well not be there (B92, XU-YIJIE/grpo-flat #2; B97, huggingface/trl #5773)."""
    rewards, size = args
    table, advantages = rewards.view(-1, size), lambda x: script.group_advantages(x.flatten(), size, kind)
    value = advantages(table).view(-1, size)
    assert_close(value.sum(1), torch.zeros(len(table)), rtol=0, atol=1e-4)
    shift = tensor(data.draw, st.integers(-9, 9), len(table), 1, dtype=torch.float32)
    assert_close(advantages(table + shift), value.flatten(), rtol=1e-4, atol=1e-4)
    inner, outer = (data.draw(st.permutations(range(n))) for n in (size, len(table)))
    assert_close(advantages(table[outer][:, inner]), value[outer][:, inner].flatten(), rtol=1e-4, atol=1e-5)
    for row, advantage in zip(table, value):
        scored = ~row.isnan()
        assert (advantage[~scored] == 0).all()
        if scored.any():
            alone = script.group_advantages(row[scored], int(scored.sum()), kind)
            assert_close(alone, advantage[scored], rtol=1e-4, atol=1e-5)


@pytest.mark.functions("flat_groups")
def test_flat_groups_table(script):
    """An unscored reward is neither a high nor a low one (B97, huggingface/trl #5773)."""
    nan = math.nan
    flat = [[-1, nan, -1], [1, 1, nan], [nan, nan, nan], [nan, -2, nan]]
    rewards = torch.tensor([*flat, [-1, nan, -2], [1, 2, nan], [0, 0, 1]]).flatten()
    assert script.flat_groups(rewards, 3).tolist() == [True] * 4 + [False] * 3


@pytest.mark.functions("group_advantages", "flat_groups")
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 1 / 3, -0.7, 0.0, -1234.5, 3e5])
def test_flat_groups_have_exactly_no_advantage(script, reward):
    """Eight copies of 0.7 have a deviation of 6e-8 in float32 and an advantage of 0.81 if divided by it; so do
    rewards that differ by rounding (the kind of B94, huggingface/trl #4662; NVIDIA-NeMo/RL #1518)."""
    for size, kind in product(range(1, 65), ADVANTAGES):
        assert (script.group_advantages(torch.full((2 * size,), reward), size, kind) == 0).all()
    rewards = torch.full((12,), reward)
    rewards[1:3] = torch.nextafter(rewards[0], torch.tensor(math.inf))
    rewards[9] += 1e-4 * max(1, abs(reward))  # small and real
    assert script.flat_groups(rewards, 4).tolist() == [True, True, False]
    assert script.flat_groups(-rewards, 4).tolist() == [True, True, False]
    for kind in ADVANTAGES:
        advantages = script.group_advantages(rewards, 4, kind).view(3, 4)
        assert (advantages[:2] == 0).all() and advantages[2, 1] > 0 > advantages[2, 0]


@pytest.mark.functions("overlong_penalty")
@given(max_length=st.integers(1, 40), data=st.data())
def test_overlong_penalty_is_its_definition(max_length, data, *, script):
    """0, then falling by 1 / buffer a token to -1 at the limit, without a jump; a buffer of 0 is off."""
    buffer, lengths = data.draw(st.integers(0, max_length)), torch.arange(1, max_length + 1)
    start = max_length - buffer
    right = [0.0 if n <= start else (start - n) / buffer for n in lengths.tolist()]
    for given_lengths in (lengths, lengths.float()):
        penalty = script.overlong_penalty(given_lengths, max_length, buffer)
        assert_close(penalty, torch.tensor(right))
    assert torch.equal(lengths, torch.arange(1, max_length + 1))
    longest = script.overlong_penalty(torch.tensor([max_length, max_length + 5]), max_length, max(buffer, 1))
    assert longest.tolist() == [-1, -1]


@pytest.mark.functions("overlong_penalty")
def test_overlong_penalty_literal(script):
    """The numbers of DAPO: 16384 tokens and a buffer of 4096."""
    lengths = torch.tensor([1, 16384, 18432, 20480])
    assert_close(script.overlong_penalty(lengths, 20480, 4096), torch.tensor([0, 0, -0.5, -1]))


@pytest.mark.functions("surrogate")
@pytest.mark.parametrize(
    "kind, right, slope",
    [
        ("clip", [[-1, -2, -2.56], [1.6, 2, 3]], [[-1, -2, 0], [0, 2, 3]]),
        ("gspo", [[-1.8171] * 3, [1.6] * 3], [[-1.8171] * 3, [0] * 3]),  # 0.75 ** (1 / 3), 0.5 ** (1 / 2)
        ("cispo", [[1.6931, 2, 1.4269], [-1.6931, -2, -1.4269]], [[-1, -2, -2.4], [1, 2, 2.4]]),
        ("reinforce", [[3.3863, 2, 1.1891], [-3.3863, -2, -1.1891]], [[-2] * 3, [2] * 3]),
    ],
)
def test_surrogate_table(script, kind, right, slope):
    """Ratios 0.5, 1, 1.5, advantages 2 and -2, the last slot masked, clips 0.2, 0.28 and 1.2 (B112,
    huggingface/trl #3493 and B113: stale samples have a ratio; B14, takuseno/ppo #3: both signs)."""
    mask, adv = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool(), torch.tensor([2.0, -2.0])
    old_logp = torch.full((2, 3), -1.0)
    logp = old_logp + torch.tensor([0.5, 1, 1.5]).log()
    loss = lambda x: script.surrogate(kind, x, old_logp, adv, mask, 0.2, 0.28, 1.2)[mask]
    assert_close(loss(logp), torch.tensor(right)[mask], rtol=1e-4, atol=1e-4)
    assert_close(gradient(loss, logp)[mask], torch.tensor(slope).float()[mask], rtol=1e-4, atol=1e-4)


@pytest.mark.functions("surrogate")
@pytest.mark.parametrize("kind", SURROGATES)
@given(args=batches(), data=st.data())
def test_surrogate_is_its_definition(args, data, *, script, kind):
    """Loss and gradient of each token, by loops; cispo's weight has no gradient and its own is never 0; the two
    clips are kept apart; masked slots change nothing in the others (B85, verl-project/verl #2377; B110,
    walkinglabs/hands-on-modern-rl #75; B112, huggingface/trl #3493)."""
    logp, old_logp, adv, mask, low, high, cap = args
    right, slope = torch.zeros_like(logp), torch.zeros_like(logp)
    for i, A in enumerate(adv.tolist()):
        logs = (logp - old_logp)[i, mask[i]].tolist()
        for t, log in enumerate(logs):
            ratio = math.exp(statistics.fmean(logs) if kind == "gspo" else log)
            removed = ratio > 1 + high if A > 0 else ratio < 1 - low
            clipped = (1 + high if A > 0 else 1 - low) if removed else ratio
            weight = {"cispo": min(ratio, cap), "reinforce": 1.0}.get(kind)
            right[i, t] = -clipped * A if weight is None else -weight * A * logp[i, t]
            slope[i, t] = -(ratio * (not removed) if weight is None else weight) * A
    before, junk = [x.clone() for x in args[:4]], tensor(data.draw, JUNK, *logp.shape)
    spoilt = torch.where(mask, logp, junk), torch.where(mask, old_logp, junk.flip(1))
    for x, old in ((logp, old_logp), spoilt):
        loss = lambda x, old=old: script.surrogate(kind, x, old, adv, mask, low, high, cap)
        assert loss(x).shape == logp.shape
        assert_close(loss(x)[mask], right[mask])
        grad = gradient(lambda x, loss=loss: loss(x)[mask], x)[mask]
        assert_close(grad, slope[mask])
        assert kind in ("clip", "gspo") or (grad != 0).all()
    assert all(torch.equal(x, y) for x, y in zip(args, before))
    with pytest.raises(REFUSED):
        script.surrogate("ppo", *args)


@pytest.mark.functions("surrogate")
@given(args=batches())
def test_surrogates_agree_on_policy(args, *, script):
    """With old_logp == logp all have the gradient -A, none of it lost in a tie at the ratio 1 (B16,
    openai/baselines #1156)."""
    logp, _, adv, mask, low, high, _ = args
    for kind in SURROGATES:
        grad = gradient(lambda x, k=kind: script.surrogate(k, x, logp, adv, mask, low, high, 1.5)[mask], logp)
        assert_close(grad, -adv[:, None] * mask)


@pytest.mark.functions("sequence_logps")
@given(args=batches(), data=st.data())
def test_sequence_logps_are_their_definition(args, data, *, script):
    """Each token's ratio is the geometric mean of its sequence's, never their product: log-ratios 0.1, 0.1,
    -0.05 give 1.0513, not 1.1618 (B110, walkinglabs/hands-on-modern-rl #75); the gradient stays its own."""
    logp, old_logp, _, mask, *_ = args
    junk = tensor(data.draw, JUNK, *logp.shape)
    x, old = torch.where(mask, logp, junk), torch.where(mask, old_logp, junk.flip(1))
    value = script.sequence_logps(x, old, mask)
    for i, row in enumerate((value - old_logp).exp()):
        ratios = (logp - old_logp)[i, mask[i]].exp().tolist()
        assert_close(row[mask[i]], torch.full((len(ratios),), statistics.geometric_mean(ratios), dtype=F64))
    assert_close(gradient(lambda x: script.sequence_logps(x, old, mask)[mask], x), mask.double())
    logp = torch.tensor([[0.1, 0.1, -0.05, 9], [1, 2, 3, 4]])
    mask = torch.tensor([[True] * 3 + [False], [False] * 4])
    ratio = script.sequence_logps(logp, torch.zeros(2, 4), mask).exp()
    assert_close(ratio[0, :3], torch.full((3,), 1.0513), rtol=1e-4, atol=0)
    assert ratio.isfinite().all()  # an empty sequence too


@pytest.mark.functions("surrogate", "aggregate")
@given(args=batches())
def test_gspo_is_its_objective(args, *, script):
    """Value and gradient of mean_i min(s_i A_i, clip(s_i) A_i), s_i = exp(mean log-ratio) (B110)."""
    logp, old_logp, adv, mask, low, high, cap = args

    def direct(logp):
        s = torch.stack([row[m].mean() for row, m in zip(logp - old_logp, mask)]).exp()
        return -torch.minimum(s * adv, s.clip(1 - low, 1 + high) * adv).mean()

    def ours(logp):
        loss = script.surrogate("gspo", logp, old_logp, adv, mask, low, high, cap)
        return script.aggregate(loss, mask, "sequence", int(mask.sum()), len(mask), mask.shape[1])

    assert_close(ours(logp), direct(logp))
    assert_close(gradient(ours, logp), gradient(direct, logp))


@pytest.mark.functions("kl_loss", "approx_kl")
@given(data=st.data())
def test_kl_gradients_by_enumeration(data, *, script):
    """Expectations over a softmax, weighted by the policy that sampled. k3_unbiased: gradient and value of
    KL(policy || reference), on and off policy. k3: on policy the gradient of KL(reference || policy). k1 as a
    loss: none; in the reward: that of KL(policy || reference). All of them towards the reference (B98,
    verl-project/verl #179; B100, allenai/open-instruct #534; B101, natolambert/rlhf-book #525)."""
    logits, *others = tensor(data.draw, st.floats(-3, 3), 3, data.draw(st.integers(2, 5)))
    old_logp, ref_logp = (x.log_softmax(-1) for x in others)
    now = logits.log_softmax(-1)
    kl = lambda p, q: (p.exp() * (p - q)).sum()
    reverse = gradient(lambda x: kl(x.log_softmax(-1), ref_logp), logits)
    forward = gradient(lambda x: kl(ref_logp, x.log_softmax(-1)), logits)
    for old in (old_logp, now):
        tokens = lambda x, kind, old=old: script.kl_loss(kind, x.log_softmax(-1), old, ref_logp)
        expected = lambda x, kind, old=old, tokens=tokens: (old.exp() * tokens(x, kind)).sum()
        assert_close(expected(logits, "k3_unbiased"), kl(now, ref_logp))
        assert_close(gradient(lambda x, f=expected: f(x, "k3_unbiased"), logits), reverse)
    assert_close(gradient(lambda x: expected(x, "k3"), logits), forward)
    k1 = lambda x: script.approx_kl(x.log_softmax(-1), ref_logp, "k1")
    assert_close(gradient(lambda x: now.exp() * k1(x), logits), torch.zeros_like(logits))
    assert_close(gradient(lambda x: now.exp() * k1(logits) * x.log_softmax(-1), logits), reverse)
    ratio, d = (now - old_logp).exp(), ref_logp - now
    assert_close(script.kl_loss("k3", now, old_logp, ref_logp), d.exp() - 1 - d)
    assert_close(script.kl_loss("k3_unbiased", now, old_logp, ref_logp), ratio * (d.exp() - 1 - d))
    with pytest.raises(REFUSED):
        script.kl_loss("k1", now, old_logp, ref_logp)


@pytest.mark.functions("kl_loss")
@pytest.mark.parametrize("kind, right", [("k3_unbiased", 0.1175), ("k3", 0.1225)])
def test_kl_loss_literal(script, kind, right):
    """The policy softmax([0.5, 0]) against a uniform reference (B100, allenai/open-instruct #534)."""
    logits, ref_logp = torch.tensor([0.5, 0]), torch.tensor([0.5, 0.5]).log()
    now = logits.log_softmax(-1)
    grad = gradient(lambda x: now.exp() * script.kl_loss(kind, x.log_softmax(-1), now, ref_logp), logits)
    assert_close(grad, torch.tensor([right, -right]), rtol=1e-3, atol=0)


@pytest.mark.functions("aggregate")
@pytest.mark.parametrize("mode, right", [("token", 3.4), ("sequence", 2.5), ("constant", 1.7)])
def test_aggregate_literal(script, mode, right):
    """Two tokens of loss 1 and eight of 4, at most ten: three modes, three numbers, whatever the padding (B106,
    verl-project/verl #5366; B109, verl-project/verl #931)."""
    for slots in (8, 9):
        mask = torch.arange(slots) < torch.tensor([[2], [8]])
        loss = torch.where(mask, torch.tensor([[1.0], [4.0]]), math.nan)
        for counts in ((10, 2, 10), (torch.tensor(10), torch.tensor(2), 10)):
            value = script.aggregate(loss, mask, mode, *counts)
            assert value.shape == () and float(value) == pytest.approx(right)


@pytest.mark.functions("aggregate")
@pytest.mark.parametrize("mode", ["token", "sequence", "constant"])
@given(data=st.data())
def test_aggregate_is_its_definition(data, *, script, mode):
    """Loops over the tokens that count, and the same sum, in value and gradient, from any cut of the sequences
    into micro-batches or ranks, each padded to its own longest; masked slots may hold anything (B85; B104,
    huggingface/trl #2647; B106, verl-project/verl #5366; B107, huggingface/trl #6024)."""
    rows, slots = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    mask = torch.arange(slots) < tensor(data.draw, st.integers(0, slots), rows, 1, dtype=LONG)
    loss = tensor(data.draw, st.floats(-5, 5), rows, slots)
    loss = torch.where(mask, loss, tensor(data.draw, JUNK, rows, slots))
    counts = [data.draw(st.integers(*ends)) for ends in ((rows * slots, 99), (rows, 30), (slots, 30))]
    before, right, slope = loss.clone(), 0.0, torch.zeros_like(loss)
    for i, t in mask.nonzero().tolist():
        factor = {"token": counts[0], "sequence": int(mask[i].sum()), "constant": counts[2]}[mode]
        own = factor if mode == "token" else factor * counts[1]
        right, slope[i, t] = right + float(loss[i, t]) / own, 1 / own
    whole = lambda x: script.aggregate(x, mask, mode, *counts)
    assert float(whole(loss)) == pytest.approx(right)
    assert_close(gradient(whole, loss), slope)
    part = tensor(data.draw, st.integers(0, 2), rows, dtype=LONG)

    def parts(x):
        cut = [(part == k, max(int(mask[part == k].sum(1).max()), 1)) for k in part.unique()]
        return sum(script.aggregate(x[rows, :end], mask[rows, :end], mode, *counts) for rows, end in cut)

    assert float(parts(loss)) == pytest.approx(right)
    assert_close(gradient(parts, loss), slope)
    assert torch.equal(loss.nan_to_num(5.5), before.nan_to_num(5.5))
    with pytest.raises(REFUSED):
        script.aggregate(loss, mask, "mean", *counts)


@pytest.mark.functions("pack")
@given(data=st.data(), group_size=st.integers(1, 4), row_tokens=st.integers(0, 30))
def test_pack_is_a_partition_within_the_budgets(data, group_size, row_tokens, *, script):
    """Every sample that was asked for once, beside others of its prompt only; a row of several and a micro-batch
    of several keep their budgets, and what fits is put together; the same again when asked again."""
    prompts = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    lengths = tensor(data.draw, st.integers(1, 9), len(prompts) * group_size, dtype=LONG).tolist()
    batch_tokens = data.draw(st.integers(1, 90))
    samples = sorted(data.draw(st.sets(st.sampled_from(range(len(lengths))))))
    args = prompts, lengths, samples, group_size, row_tokens, batch_tokens
    before = [list(x) for x in args[:3]]
    packed = script.pack(*args)
    assert packed == script.pack(*args) and [list(x) for x in args[:3]] == before
    rows = [row for batch in packed for row in batch]
    assert sorted(i for row in rows for i in row) == samples and all(rows) and all(packed)
    assert all(len({i // group_size for i in row}) == 1 for row in rows)
    width = lambda row: prompts[row[0] // group_size] + sum(lengths[i] - 1 for i in row)
    assert all(len(row) == 1 or width(row) <= row_tokens for row in rows)
    assert all(len(batch) == 1 or len(batch) * max(map(width, batch)) <= batch_tokens for batch in packed)
    assert row_tokens or len(rows) == len(samples)
    for prompt in {i // group_size for i in samples}:
        mine = [i for i in samples if i // group_size == prompt]
        number = sum(row[0] // group_size == prompt for row in rows)
        room, needed = row_tokens - prompts[prompt], sum(lengths[i] - 1 for i in mine)
        assert number == 1 or needed > room  # and never twice the rows that are needed:
        assert room <= 0 or number <= 2 * math.ceil(needed / room) or number == 1
    assert len(packed) <= 1 or len(rows) * max(map(width, rows)) > batch_tokens
    ends = sorted((min(map(width, batch)), max(map(width, batch))) for batch in packed)
    assert all(high <= low for (_, high), (low, _) in zip(ends, ends[1:]))  # rows of similar length


@pytest.mark.functions("pack")
@pytest.mark.parametrize(
    "row_tokens, batch_tokens, right",
    [
        (10, 20, [[7, 8], [9, 10]]),
        (10, 16, [[7, 8], [9], [10]]),
        (10, 15, [[7], [8], [9], [10]]),
        (9, 45, [[7, 7, 7, 8, 9]]),
        (0, 48, [[6, 6, 7, 7, 7, 8]]),
    ],
)
def test_pack_table(script, row_tokens, batch_tokens, right):
    """Widths of the rows of each micro-batch, prompts of 4 and 3 tokens with three responses each: the last token
    of a response is never an input, and a budget may be met exactly."""
    prompts, lengths = [4, 3], [4, 4, 4, 4, 4, 6]
    packed = script.pack(prompts, lengths, range(6), 3, row_tokens, batch_tokens)
    width = lambda row: prompts[row[0] // 3] + sum(lengths[i] - 1 for i in row)
    assert sorted(sorted(map(width, batch)) for batch in packed) == right


@pytest.mark.setting("grpo_rlhf")
@pytest.mark.parametrize("prompt", [3, 700])
@pytest.mark.parametrize("length, limit, shared", [(100, 256, 2), (20, 256, 8), (300, 256, 1), (100, 0, 1)])
def test_a_row_is_limited_by_its_responses(script, prompt, length, limit, shared):
    """--row-tokens counts the tokens of the responses that share a row, whatever the length of their prompt: a long one
    is what is worth sharing."""
    mask = torch.arange(300) < torch.full((8, 1), length)
    batch = {"prompts": [[5] * prompt], "mask": mask}
    args = script.Args(row_tokens=limit, group_size=8)
    rows = [row for part in script.micro_batches(batch, range(8), args) for row in part]
    assert sorted(map(len, rows), reverse=True) == [shared] * (8 // shared)
    if not limit:  # none is shared, beside whatever other prompt
        batch = {"prompts": [[5] * prompt, [5] * 2000], "mask": mask.repeat(2, 1)}
        assert all(len(row) == 1 for part in script.micro_batches(batch, range(16), args) for row in part)


PREFIXES = [y for n in range(3) for y in product((1, 2), repeat=n)]
RESPONSES = [(*y, a) for y in PREFIXES for a in range(3) if a == 0 or len(y) == 2]


@st.composite
def trees(draw):
    """Logits after each prefix, twice, and a reward for each of the 15 responses of at most three tokens, 0
    being the stop token and the pad."""
    logits, old_logits = tensor(draw, st.floats(-2, 2), 2, len(PREFIXES), 3)
    return logits, old_logits, tensor(draw, st.integers(-8, 8).map(lambda k: k / 4), len(RESPONSES))


def tree_logps(logits):
    """Log-probability of each token of each response, and the mask. -> (15, 3), (15, 3)."""
    mask = torch.tensor([[t < len(y) for t in range(3)] for y in RESPONSES])
    at = [[(PREFIXES.index(y[:t]), y[t]) if t < len(y) else (0, 0) for t in range(3)] for y in RESPONSES]
    prefix, token = torch.tensor(at).unbind(-1)
    return logits.log_softmax(-1)[prefix, token], mask


def probability(logits):
    logp, mask = tree_logps(logits)
    return torch.where(mask, logp, 0).sum(1).exp()


def expected_loss(script, kind, mode, logits, old_logits, weight, adv, index=slice(None), clip=0.2, cap=5.0):
    (logp, mask), (old_logp, _) = tree_logps(logits), tree_logps(old_logits)
    args = logp[index], old_logp[index], adv, mask[index], clip, clip, cap
    return script.aggregate(script.surrogate(kind, *args) * weight[:, None], mask[index], mode, 1, 1, 1)


@pytest.mark.functions("surrogate", "aggregate")
@pytest.mark.parametrize("kind", SURROGATES)
@given(tree=trees())
def test_policy_gradient_by_enumeration(tree, *, script, kind):
    """On policy the expected gradient over all responses is that of the expected reward; with the mean over a
    sequence it is that of the expected reward / length (Liu et al. 2025: its bias against long right ones)."""
    logits, _, reward = tree
    p, length = probability(logits), tree_logps(logits)[1].sum(1)
    for mode, target in (("token", reward), ("constant", reward), ("sequence", reward / length)):
        right = gradient(lambda x, r=target: -(probability(x) * r), logits)
        ours = lambda x, m=mode: expected_loss(script, kind, m, x, logits, p, reward)
        assert_close(gradient(ours, logits), right)


@pytest.mark.functions("surrogate", "aggregate")
@pytest.mark.parametrize("kind", ["clip", "cispo"])
@given(tree=trees())
def test_off_policy_gradient_by_enumeration(tree, *, script, kind):
    """Without clips the expected gradient is that of sum_s d(s) sum_a policy(a | s) Q(s, a), d and Q those of
    the policy that sampled (Schulman et al. 2015, eq. 3), which is not yet that of the expected reward."""
    logits, old_logits, reward = tree
    p = probability(old_logits)

    def local(x):
        total = 0.0
        for k, prefix in enumerate(PREFIXES):
            for a in range(3):
                below = torch.tensor([y[: len(prefix) + 1] == (*prefix, a) for y in RESPONSES])
                through = (p * reward)[below].sum() / old_logits.log_softmax(-1)[k, a].exp()  # d(s) Q(s, a)
                total = total - x.log_softmax(-1)[k, a].exp() * through
        return total

    ours = lambda x: expected_loss(script, kind, "constant", x, old_logits, p, reward, clip=1e9, cap=1e9)
    assert_close(gradient(ours, logits), gradient(local, logits))


@pytest.mark.functions("group_advantages", "surrogate", "aggregate")
@pytest.mark.parametrize("kind, scale", [("rloo", 1.0), ("drgrpo", 0.5)])
@given(tree=trees())
def test_group_gradient_by_enumeration(tree, *, script, kind, scale):
    """Over all pairs of responses the mean of the others leaves the policy gradient as it is, and the mean of
    the whole group scales it by (G - 1) / G."""
    logits, _, reward = tree
    p, pairs = probability(logits), torch.tensor(list(product(range(len(RESPONSES)), repeat=2)))
    weight, index = (p[pairs].prod(1) / 2).repeat_interleave(2), pairs.flatten()
    adv = script.group_advantages(reward[index], 2, kind)
    ours = lambda x: expected_loss(script, "clip", "constant", x, logits, weight, adv, index)
    right = gradient(lambda x: -(probability(x) * reward), logits)
    assert_close(gradient(ours, logits), scale * right)
