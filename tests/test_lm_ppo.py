"""What only ppo_rlhf.py has: rewards and advantages of tokens, the KL controller, preferences, the small world."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

# Tests with @given take `*, script`: hypothesis probes a first positional argument as if it were `self`.
F64 = torch.float64
SMALL_WORLD = pytest.mark.setting("ppo_rlhf")
JUNK = st.sampled_from([math.nan, math.inf, -math.inf, 1e30, 7.0])


def tensor(draw, element, *shape, dtype=F64):
    size = math.prod(shape)
    return torch.tensor(draw(st.lists(element, min_size=size, max_size=size)), dtype=dtype).reshape(shape)


@st.composite
def responses(draw, junk=JUNK):
    """Two (B, L) tensors with anything after the end of each response, the mask and the lengths."""
    rows, slots = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    lengths = tensor(draw, st.integers(1, slots), rows, dtype=torch.long)
    mask = torch.arange(slots) < lengths[:, None]
    one, two = (
        torch.where(mask, tensor(draw, st.floats(-5, 5), rows, slots), tensor(draw, junk, rows, slots))
        for _ in range(2)
    )
    return one, two, mask, lengths.tolist()


@pytest.mark.functions("shape_rewards")
@pytest.mark.parametrize(
    "lengths, right",
    [
        ([1, 3], [[0.95, 0, 0], [-0.05, -0.05, 1.95]]),  # B74, a length of one and of all slots
        ([2, 2], [[-0.05, 0.95, 0], [-0.05, 1.95, 0]]),  # B67: the score at the last token, nothing after it
        ([3, 1], [[-0.05, -0.05, 0.95], [1.95, 0, 0]]),
    ],
)
def test_shape_rewards_table(script, lengths, right):
    """Each token pays for its distance to the reference, the last one gets the score (B67, huggingface/trl
    #3750; B74, pytorch/rl #2908: with the other sign 0.95 is 1.05)."""
    logp, score = torch.full((2, 3), -1.0), torch.tensor([1.0, 2.0])
    mask = torch.arange(3) < torch.tensor(lengths)[:, None]
    assert_close(script.shape_rewards(score, logp, logp - 0.5, mask, 0.1), torch.tensor(right))
    only = script.shape_rewards(score, logp, logp - 0.5, mask, 0.0)
    assert only.sum(1).tolist() == [1, 2] and (only != 0).sum() == 2


@pytest.mark.functions("shape_rewards")
@given(args=responses(), data=st.data(), coef=st.sampled_from([0.0, 0.05, 1.0]))
def test_shape_rewards_is_its_definition(args, data, coef, *, script):
    """Sum over tokens = score - coef x KL of the response (k1); zero after the end, whatever stands there (B67,
    B74, B85); inputs unchanged."""
    logp, ref_logp, mask, lengths = args
    score = tensor(data.draw, st.floats(-9, 9), len(lengths))
    before = [x.clone() for x in (score, logp, ref_logp, mask)]
    value = script.shape_rewards(score, logp, ref_logp, mask, coef)
    right = torch.zeros_like(logp)
    for b, n in enumerate(lengths):
        for t in range(n):
            right[b, t] = -coef * (logp[b, t] - ref_logp[b, t]) + (score[b] if t == n - 1 else 0)
        kl = float((logp[b, :n] - ref_logp[b, :n]).sum())
        assert float(value[b].sum()) == pytest.approx(float(score[b]) - coef * kl, abs=1e-9)
    assert_close(value, right)
    assert (value[~mask] == 0).all()
    for x, kept in zip((score, logp, ref_logp, mask), before):
        assert torch.equal(x.nan_to_num(5.5), kept.nan_to_num(5.5))


@pytest.mark.functions("KLController")
@pytest.mark.parametrize(
    "coef, target, horizon, kl, n, right",
    [
        (0.2, 6, 10_000, 12, 256, 0.201024),  # B77; fed with the KL to the old policy it is 0.198976
        (0.2, 6, 10_000, 0.5, 256, 0.198976),
        (0.2, 6, 10_000, 6, 256, 0.2),
        (0.2, 6, 10_000, 6.6, 1000, 0.202),  # 10 per cent too much, within the clip
        (0.2, 6, 10_000, 5.4, 1000, 0.198),
        (0.2, 6, 10_000, 7.2, 1000, 0.204),
        (0.2, 6, 10_000, 1e9, 1000, 0.204),
        (0.2, 6, 10_000, -1e9, 1000, 0.196),
        (0.2, None, 10_000, 12, 256, 0.2),
        (0.0, None, 1, 12, 256, 0.0),
    ],
)
def test_kl_controller_table(script, coef, target, horizon, kl, n, right):
    """Grows by the relative error, cut at a fifth, in proportion to the responses; fixed without a target (B77,
    CarperAI/trlx #361)."""
    controller = script.KLController(coef, target, horizon)
    assert controller.coef == coef
    controller.update(kl, n)
    assert controller.coef == pytest.approx(right, rel=1e-12)


@pytest.mark.functions("KLController")
@given(kls=st.lists(st.floats(0, 50), min_size=1, max_size=5), n=st.integers(1, 500), target=st.floats(0.1, 20))  # fmt: skip
def test_kl_controller_is_a_product(kls, n, target, *, script):
    """Updates multiply; twice n responses at once move it twice as far (B77, CarperAI/trlx #361)."""
    controller, right = script.KLController(0.1, target, 10_000), 0.1
    for kl in kls:
        controller.update(kl, n)
        right *= 1 + max(-0.2, min(0.2, kl / target - 1)) * n / 10_000
    assert controller.coef == pytest.approx(right)
    twice, once = (script.KLController(1.0, target, 10_000) for _ in range(2))
    twice.update(kls[0], 2 * n)
    once.update(kls[0], n)
    assert twice.coef - 1 == pytest.approx(2 * (once.coef - 1), abs=1e-12)


@pytest.mark.functions("preference_loss")
@given(data=st.data())
def test_preference_loss_is_its_definition(data, *, script):
    """-log sigmoid(chosen - rejected), elementwise, with the gradient -sigmoid(rejected - chosen)."""
    difference = tensor(data.draw, st.floats(-20, 20), 2, 3).requires_grad_()
    loss = script.preference_loss(difference)
    right = [math.log1p(math.exp(-x)) for x in difference.flatten().tolist()]
    assert_close(loss.flatten(), torch.tensor(right, dtype=F64))
    slope = torch.autograd.grad(loss.sum(), difference)[0]
    assert_close(slope, -1 / (1 + difference.detach().exp()))


@pytest.mark.functions("preference_loss")
def test_preference_loss_literals(script):
    """log 2 at a tie; stable where the sigmoid is 0 or 1 in float32."""
    difference = torch.tensor([0.0, 1e4, -1e4, 100.0, -100.0], requires_grad=True)
    loss = script.preference_loss(difference)
    assert_close(loss, torch.tensor([math.log(2), 0, 1e4, 0, 100]))
    loss.sum().backward()
    assert_close(difference.grad, torch.tensor([-0.5, 0, -1, 0, -1]))


@pytest.mark.functions("token_advantages", "shape_rewards")
@pytest.mark.parametrize(
    "lam, right",
    [
        (0.95, [0.751, 0.58, 0.4]),  # B67; [0.7059, 0.5325, 0.35] at the pad, [-0.1515, -0.37, -0.6] if lost
        (1.0, [0.8, 0.6, 0.4]),  # B76; [-0.2, -0.4, 0.4] from the immediate reward
        (0.0, [0.2, 0.2, 0.4]),
    ],
)
@pytest.mark.parametrize("pads", [0, 1, 3])
def test_token_advantages_table(script, lam, right, pads):
    """A score of 1 after three tokens, the values of which are .2, .4 and .6, however long the other rows are
    (B67, huggingface/trl #3750 and #1893; B76, natolambert/rlhf-book #216)."""
    values = torch.tensor([[0.2, 0.4, 0.6] + [0.0] * pads, [0.5] * (3 + pads)])
    mask = torch.arange(3 + pads) < torch.tensor([[3], [3 + pads]])
    logp = torch.zeros_like(values)
    rewards = script.shape_rewards(torch.ones(2), logp, logp, mask, 0.05)
    advantages, returns = script.token_advantages(rewards, values, mask, 1.0, lam)
    assert_close(advantages[0], torch.tensor(right + [0.0] * pads))
    assert_close(returns[0, :3], advantages[0, :3] + values[0, :3])


@pytest.mark.functions("token_advantages")
@given(
    args=responses(st.sampled_from([1e6, -7.0, 0.0])),
    gamma=st.sampled_from([1.0, 0.9, 0.0]),
    lam=st.sampled_from([0.95, 0.5, 0.0, 1.0]),
)
def test_token_advantages_are_their_definition(args, gamma, lam, *, script):
    """A_t = sum over k of (gamma lam)^k delta_{t+k}, up to the last token of the response, after which there is
    no value; zero and without influence after it; the same as for each response alone (B67, B76, B85)."""
    rewards, values, mask, lengths = args
    before = [x.clone() for x in (rewards, values, mask)]
    advantages, returns = script.token_advantages(rewards, values, mask, gamma, lam)
    right = torch.zeros_like(values)
    for b, n in enumerate(lengths):
        r, v = rewards[b, :n].tolist(), [*values[b, :n].tolist(), 0.0]
        for t in range(n):
            right[b, t] = sum((gamma * lam) ** (k - t) * (r[k] + gamma * v[k + 1] - v[k]) for k in range(t, n))  # fmt: skip
        one = slice(b, b + 1)
        alone = script.token_advantages(rewards[one, :n], values[one, :n], mask[one, :n], gamma, lam)
        assert_close(alone[0][0], advantages[b, :n])
        assert_close(alone[1][0], returns[b, :n])
    assert_close(advantages, right)
    assert_close(returns, (right + values).masked_fill(~mask, 0.0))
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()
    for x, kept in zip((rewards, values, mask), before):
        assert torch.equal(x, kept)


@pytest.mark.functions("token_advantages")
@given(args=responses(st.just(0.0)))
def test_token_advantages_with_lambda_one(args, *, script):
    """gamma = lambda = 1: the rewards that are still to come, less the value (B76)."""
    rewards, values, mask, _ = args
    advantages, returns = script.token_advantages(rewards, values, mask, 1.0, 1.0)
    to_come = rewards.flip(1).cumsum(1).flip(1).masked_fill(~mask, 0.0)
    assert_close(returns, to_come)
    assert_close(advantages, (to_come - values).masked_fill(~mask, 0.0))


@pytest.mark.functions("whiten", "token_advantages")
@given(args=responses())
def test_whitening_of_a_batch_of_responses(args, *, script):
    """Over all tokens of the batch, not row by row, with the population variance, zero after the end; more
    padding changes nothing (B79, verl-project/verl #1527; B80, OpenRLHF/OpenRLHF #1250)."""
    x, _, mask, _ = args
    white = script.whiten(x, mask)
    kept = x[mask]
    right = (kept - kept.mean()) / (kept.var(correction=0) + 1e-8).sqrt()
    assert_close(white[mask], right)
    assert (white[~mask] == 0).all()
    wide = [torch.nn.functional.pad(y, (0, 2), value=v) for y, v in ((x, math.nan), (mask, False))]
    assert_close(script.whiten(*wide)[:, :-2], white)


def say(script, kinds):
    """Words of these kinds, `A+` the first of its kind, `A+1` the one after it."""
    words = []
    for kind in kinds.split():
        which = int(kind[-1]) if kind[-1].isdigit() else 0
        known = script.WORDS.get(kind.rstrip("0123456789"))
        words.append(known.split()[which] if known else kind)
    return "".join(f" {word}" for word in words)


PLAIN = "D A N V D"


@SMALL_WORLD
@pytest.mark.parametrize(
    "prompt, completion, right",
    [
        (PLAIN, "N .", 0), (PLAIN, "A+ N .", 1), (PLAIN, "A- N .", -1), (PLAIN, "A+ N R+ .", 2), (PLAIN, "A- N R- .", -2),
        (PLAIN, "A+ N R- .", 0), (PLAIN, "N R .", 0), (PLAIN, "N C D N V+ D A+ N R+ .", 3), (PLAIN, "N C D N V- D N .", -1),
        ("D A+ N V+ D", "N .", 0), ("D A- N V- D", "A+ N .", 1),  # only the completion earns
        ("D A+ N V D", "A+ N .", -1), ("D A+ N V D", "A+1 N .", 1), ("D A- N V D", "A- N .", -3),  # says it again
        ("D A+ N V D", "A+ N C D A+ N V D N .", -2), ("D A N V D", "A N C D A N V D N .", 0),  # neutral words may come again
        ("D N V+ D N C D", "N V+ D N .", -1), ("D A+ N V D", "A+ N", -4),
        (PLAIN, "", -3), (PLAIN, "N", -3), (PLAIN, ".", -3), (PLAIN, "A+ .", -2), (PLAIN, "N . N", -3), (PLAIN, "N . .", -3),
        (PLAIN, "A+ A- N .", -3), (PLAIN, "N R R1 .", -3), (PLAIN, "N C .", -3), (PLAIN, "N C D N .", -3), (PLAIN, "V D N .", -3),
        (PLAIN, "N C D N V D N C D N V D N .", -3), (PLAIN, "A+ nosuch .", -2), (PLAIN, "N<eos> .", -3), ("", "D A+ N V D N .", 1),
    ],
)  # fmt: skip
def test_hidden_preference_table(script, prompt, completion, right):
    """Pleasant less unpleasant words of the completion, -2 for each one that is said again, -3 if the whole is
    no sentence of the grammar."""
    prompt, completion = say(script, prompt), say(script, completion)
    assert script.hidden_preference([prompt], [completion], [{}]) == [right]
    both = script.hidden_preference([prompt, say(script, PLAIN)], [completion, say(script, "A+ N .")], [{}] * 2)  # fmt: skip
    assert both == [right, 1] and all(type(x) is float for x in both)


@SMALL_WORLD
@pytest.mark.parametrize("kinds", ["DNVDN.", "DANVDN.", "DNVDANR.", "DANVDANRCDANVDANR.", "DNVDNCDNVDN."])
def test_the_grammar_accepts(script, kinds):
    """A clause or two: determiner, adjective or none, noun, verb, the same again, adverb or none, full stop; and
    nothing with one word less, more or exchanged, unless that is such a sentence too."""
    short = "D A? N V D A? N R?".split()

    def clause(kinds):  # by hand: the rest after a clause, or None
        for part in short:
            if kinds[:1] == part[0]:
                kinds = kinds[1:]
            elif "?" not in part:
                return None
        return kinds

    def grammatical(kinds):
        rest = clause(kinds)
        rest = clause(rest[1:]) if rest and rest[0] == "C" else rest
        return rest == "."

    assert grammatical(kinds) and script.SENTENCE.fullmatch(kinds)
    for i, new in product(range(len(kinds)), ["", *"DANVRC.?"]):
        for other in (kinds[:i] + new + kinds[i + 1 :], kinds[:i] + new + kinds[i:]):
            assert bool(script.SENTENCE.fullmatch(other)) == grammatical(other)


@SMALL_WORLD
def test_sentences_of_the_small_world(script):
    """Always grammatical; the prompt, its first words, decides what is held out; neither mood is preferred; no
    word has two kinds, and each is one token that comes back as it was."""
    rng = np.random.default_rng(0)
    texts = [script.sentence(rng) for _ in range(1500)]
    assert texts[:20] == [script.sentence(r) for r in [np.random.default_rng(0)] for _ in range(20)]
    tokenizer, moods, clauses = script.word_tokenizer(), {"+": 0, "-": 0}, set()
    for text in texts:
        words = text.split()
        kinds = [script.KIND[word] for word in words]
        shape = "".join(kind[0] for kind in kinds)
        assert script.SENTENCE.fullmatch(shape) and shape.startswith("DANVD")
        felt = [word for word, kind in zip(words, kinds) if kind[-1] in "+-"]
        again = len(felt) - len(set(felt))
        score = sum({"+": 1, "-": -1}[script.KIND[word][-1]] for word in felt) - 2 * again
        assert script.hidden_preference([""], [text], [{}]) == [score]
        clauses.add(shape.count("C"))
        for kind in kinds:
            moods[kind[-1]] = moods.get(kind[-1], 0) + 1
        ids = tokenizer(text).input_ids
        assert len(ids) == len(words) and tokenizer.decode(ids) == text
        prompt = " " + " ".join(words[: script.PROMPT_WORDS])
        assert script.is_held_out(prompt) == script.is_held_out(text)
        assert tokenizer(prompt).input_ids == ids[: script.PROMPT_WORDS]
    assert clauses == {0, 1} and 0.8 < moods["+"] / moods["-"] < 1.25
    assert len(script.KIND) == sum(len(words.split()) for words in script.WORDS.values())
    held_out = np.mean([script.is_held_out(text) for text in texts])
    assert 0.05 < held_out < 0.2
