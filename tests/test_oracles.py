"""Independent oracles: where a well-kept library computes the same thing, do the two agree?

The other tests check the functions against our own reading of the papers; here somebody else has read them.
Where a library differs on purpose the docstring says how, and the test takes the difference out, so that it
is checked too. Where we hold that it is wrong, the docstring says that, and the inputs keep away from it.
What is not installed is skipped: torch, scipy and gymnasium come with the suite, the others agreed as
stable-baselines3 2.9.2, torchrl 0.14.1, trl 1.12.0 (1.16.0 without its PPO functions) and verl 0.9.1.
"""

import math
from collections import defaultdict
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, settings
from hypothesis import strategies as st
from test_gae import rollouts
from test_gaussian import gaussians
from test_lm_functions import batches, groups, tensor
from test_losses import critics, policies
from torch import nn
from torch.distributions import Categorical, Independent, Normal, TanhTransform, TransformedDistribution
from torch.distributions import kl_divergence as exact_kl
from torch.testing import assert_close

# Tests with @given take `*, script`: hypothesis probes a first positional argument as if it were `self`.
SEEDS = st.integers(0, 2**32 - 1)
TRL_PPO = "trl.experimental.ppo.ppo_trainer"
MASKED = pytest.mark.parametrize("module", ["verl.utils.torch_functional", TRL_PPO])


def given(**strategies):
    """Fewer examples than elsewhere: two implementations rarely agree by accident."""
    return lambda test: settings(max_examples=20)(hypothesis.given(**strategies)(test))


def need(module):
    """A module of an optional library, or the test is skipped."""
    package = module.split(".")[0]
    pytest.importorskip(package, reason=f"no {package} to compare with", exc_type=ImportError)
    return pytest.importorskip(module, reason=f"no {module} in this {package}", exc_type=ImportError)


def close(ours, theirs, tolerance=1e-5):
    assert_close(ours, torch.as_tensor(theirs).to(ours.dtype), rtol=tolerance, atol=tolerance)


def same(ours, theirs, *inputs, tolerance=1e-5):
    """Two scalar functions have the same value and the same gradients."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    values = ours(*inputs), theirs(*inputs)
    grads = [torch.autograd.grad(value, inputs) for value in values]
    close(values[0], values[1].detach(), tolerance)
    for grad, their_grad in zip(*grads):
        close(grad, their_grad, tolerance)


@st.composite
def responses(draw, number=3, shortest=1):
    """Some (B, L) tensors of normals and the mask of each response's tokens."""
    rows, slots = draw(st.integers(1, 4)), draw(st.integers(2, 6))
    rng = np.random.default_rng(draw(SEEDS))
    mask = torch.arange(slots) < torch.tensor(rng.integers(shortest, slots + 1, size=(rows, 1)))
    return [torch.tensor(x) for x in rng.normal(size=(number, rows, slots))], mask


# ---- Advantages --------------------------------------------------------------------------------------------


@pytest.mark.functions("compute_gae")
@given(rollout=rollouts())
def test_gae_is_a_filter_of_scipy(rollout, *, script):
    """The advantages are a first-order filter of the TD errors, run backwards over each episode (B05,
    Toni-SM/skrl #449: a chain that is not cut)."""
    signal = need("scipy.signal")
    (rewards, values, next_values, terminated, done), gamma, lam = rollout
    delta = (rewards + gamma * torch.where(terminated, 0, next_values) - values).numpy()
    right = np.zeros_like(delta)
    for n in range(delta.shape[1]):
        for steps in np.split(np.arange(len(delta)), np.flatnonzero(done[:, n]) + 1):
            if len(steps):
                right[steps, n] = signal.lfilter([1], [1, -gamma * lam], delta[steps, n][::-1])[::-1]
    close(script.compute_gae(*rollout[0], gamma, lam)[0], right, 1e-4)


@pytest.mark.functions("compute_gae")
@given(rollout=rollouts())
def test_gae_is_that_of_stable_baselines3(rollout, *, script):
    """Two ways to say the same. Its buffer has no successor values and one flag a step: `episode_starts[t +
    1]` is our `done[t]`, the next row stands for the successor, and the caller adds gamma V(last state) to
    the reward where a time limit cut the episode: what callers of such a buffer forget is B07 (pytorch/rl
    #3771) and B08 (DexForce/EmbodiChain #612)."""
    buffers, spaces = need("stable_baselines3.common.buffers"), need("gymnasium.spaces")
    (rewards, values, next_values, terminated, done), gamma, lam = rollout
    (T, N), box = rewards.shape, spaces.Box(-1, 1, (1,))
    buffer = buffers.RolloutBuffer(T, box, box, gae_lambda=lam, gamma=gamma, n_envs=N)
    paid = rewards + gamma * torch.where(done & ~terminated, next_values, 0)
    starts = torch.cat([torch.ones(1, N, dtype=torch.bool), done[:-1]])
    for t in range(T):
        blank = np.zeros((N, 1), np.float32)
        buffer.add(blank, blank, paid[t].numpy(), starts[t].numpy(), values[t], torch.zeros(N))
    buffer.compute_returns_and_advantage(next_values[-1], done[-1].numpy())
    advantages, returns = script.compute_gae(*rollout[0], gamma, lam)
    close(advantages, buffer.advantages, 1e-4)
    close(returns, buffer.returns, 1e-4)


@pytest.mark.functions("compute_gae")
@pytest.mark.parametrize("name", ["generalized_advantage_estimate", "vec_generalized_advantage_estimate"])
@given(rollout=rollouts())
def test_gae_is_that_of_torchrl(rollout, *, script, name):
    """The same inputs with the same meaning, by a loop and by a convolution. It multiplies the value of a
    terminal state by 0, so that a NaN there stays; ours is masked, which is right (B85, verl-project/verl
    #2377). The convolution raises an error where gamma lambda is next to nothing, which has a well-defined
    answer: left out."""
    estimate = getattr(need("torchrl.objectives.value.functional"), name)
    (rewards, values, next_values, terminated, done), gamma, lam = rollout
    assume(gamma * lam > 1e-3 or not name.startswith("vec"))
    theirs = estimate(gamma, lam, values, next_values, rewards, done, terminated)
    for x, y in zip(script.compute_gae(*rollout[0], gamma, lam), theirs, strict=True):
        close(x, y, 1e-4)


@pytest.mark.functions("compute_gae")
@given(rollout=rollouts())
def test_returns_are_the_lambda_returns_of_torchrl(rollout, *, script):
    """Advantage + value is the lambda-return, which torchrl builds from successor values alone, without the
    values that were subtracted (B11, vwxyzjn/cleanrl #337)."""
    functional = need("torchrl.objectives.value.functional")
    (rewards, _, next_values, terminated, done), gamma, lam = rollout
    theirs = functional.td_lambda_return_estimate(gamma, lam, next_values, rewards, done, terminated)
    close(script.compute_gae(*rollout[0], gamma, lam)[1], theirs, 1e-4)


@pytest.mark.functions("token_advantages", "whiten")
@given(args=responses(2, shortest=2), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_token_advantages_are_those_of_verl(args, gamma, lam, *, script):
    """GAE over the tokens of a response, whose last one has no successor. After the end verl leaves numbers
    where we have 0; it whitens with the sample's deviation, we with the population's (B76,
    natolambert/rlhf-book #216; B79, verl-project/verl #1527)."""
    core, ((rewards, values), mask) = need("verl.trainer.ppo.core_algos"), args
    white, their_returns = core.compute_gae_advantage_return(rewards, values, mask.long(), gamma, lam)
    advantages, returns = script.token_advantages(rewards, values, mask, gamma, lam)
    close(returns[mask], their_returns[mask])
    n = int(mask.sum())
    close(math.sqrt((n - 1) / n) * script.whiten(advantages, mask)[mask], white[mask], 1e-4)


@MASKED
@pytest.mark.functions("whiten")
@given(seed=SEEDS, offset=st.floats(-10, 10))
def test_whiten_is_masked_whiten(seed, offset, *, script, module):
    """verl and TRL divide by the sample's deviation, and with shift_mean=False they add the mean again after
    the division, which leaves rewards of 10 and 14 at 11.3 and 12.7. Ours divides by the population's (a
    factor of sqrt(1 - 1 / n), for n tokens) and without shift_mean it only divides, as the name and the
    reason for it - not to change the sign of a reward - ask for (B80, THUDM/slime #1369)."""
    library, rng = need(module), np.random.default_rng(seed)
    x, mask = torch.tensor(rng.normal(offset, 3, size=(3, 5))), torch.tensor(rng.random((3, 5)) < 0.6)
    mask[0, :2] = True
    n, mean, std = int(mask.sum()), x[mask].mean(), x[mask].std()
    factor = math.sqrt(1 - 1 / n)
    close(factor * script.whiten(x, mask, True)[mask], library.masked_whiten(x, mask.double(), True)[mask])
    plain = library.masked_whiten(x, mask.double(), False)[mask]
    close(factor * script.whiten(x, mask, False)[mask], plain - mean + mean / std)


@MASKED
@pytest.mark.functions("masked_mean")
@given(args=responses(1))
def test_masked_mean_is_masked_mean(args, *, script, module):
    """The mean over all tokens that count. Of none it is 0 here and in verl and NaN in TRL; what stands in
    masked slots can spoil TRL's (B85, verl-project/verl #2377)."""
    (x,), mask = args
    close(script.masked_mean(x, mask), need(module).masked_mean(x, mask.double()))


@pytest.mark.functions("group_advantages")
@pytest.mark.parametrize(
    "kind, name, options",
    [
        ("grpo", "compute_grpo_outcome_advantage", {"epsilon": 1e-4}),
        ("grpo", "compute_grpo_vectorized_outcome_advantage", {"epsilon": 1e-4}),
        ("drgrpo", "compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": False}),
        ("rloo", "compute_rloo_outcome_advantage", {}),
        ("rloo", "compute_rloo_vectorized_outcome_advantage", {}),
    ],
)
@given(args=groups(), seed=SEEDS)
def test_group_advantages_are_those_of_verl(args, seed, *, script, kind, name, options):
    """The sample's deviation, and the others' mean in rloo. verl finds a group by an index, wherever its
    responses stand, and adds 1e-6 to the deviation unless told otherwise. It has no answer to a reward of
    NaN; it gives a response without a group its reward as advantage (the vectorised rloo does not), where
    ours is 0, because there is nothing to compare with (B94, huggingface/trl #4662); and equal rewards that
    round, such as eight times 0.7, have an advantage of 0.056 there, where ours is 0."""
    estimate = getattr(need("verl.trainer.ppo.core_algos"), name)
    rewards, size = args[0].nan_to_num(0.25), args[1]
    assume(size > 1)
    rng = np.random.default_rng(seed)
    order, mask = rng.permutation(len(rewards)), torch.tensor([1.0, 1.0, 0.0])
    index = np.array([f"prompt {i // size}" for i in order], dtype=object)
    tokens = rewards[order, None] * torch.tensor([0.0, 1.0, 0.0])
    theirs, _ = estimate(tokens, mask.expand_as(tokens), index, **options)
    close(script.group_advantages(rewards, size, kind)[order, None] * mask, theirs, 1e-4)


@pytest.mark.functions("group_advantages")
@given(args=groups())
def test_group_deviation_is_that_of_trl(args, *, script):
    """TRL too leaves a reward of NaN out of mean and deviation, and what it cannot compute becomes 0. It
    divides equal rewards that round, we do not (B94, huggingface/trl #4662; B97, huggingface/trl #5773)."""
    utils, (rewards, size) = need("trl.trainer.utils"), args
    table = rewards.view(-1, size)
    centred = table - table.nanmean(1, keepdim=True)
    theirs = (centred / (utils.nanstd(table, dim=1, keepdim=True) + 1e-4)).nan_to_num(0)
    close(script.group_advantages(rewards, size, "grpo"), theirs.flatten(), 1e-4)


@pytest.mark.functions("overlong_penalty")
@given(max_length=st.integers(1, 30), data=st.data())
def test_overlong_penalty_is_that_of_trl(max_length, data, *, script):
    """Where the slope starts, and -1 beyond the limit (DAPO, eq. 13)."""
    other, buffer = need("trl.rewards"), data.draw(st.integers(0, max_length))
    theirs = other.get_soft_overlong_punishment(max_length, buffer)
    lengths = torch.arange(1, max_length + 5)
    close(script.overlong_penalty(lengths, max_length, buffer), theirs([[0] * n for n in lengths.tolist()]))


# ---- Losses ------------------------------------------------------------------------------------------------


def actor_config(**clips):
    """verl's settings of a loss, without the dual clip of Ye et al. 2020."""
    config = need("verl.workers.config").ActorConfig
    needed = dict(strategy="fsdp", rollout_n=1, ppo_mini_batch_size=1, ppo_micro_batch_size_per_gpu=1)
    return config(**needed, clip_ratio_c=1e9, **clips)


@pytest.mark.functions("policy_loss", "clip_fraction")
@given(args=policies())
def test_policy_loss_is_that_of_verl(args, *, script):
    """Value, gradient and share of clipped samples, the two clips apart. By default verl also cuts the loss
    of a negative advantage at a ratio of 3 (the dual clip), which eq. 7 of the paper does not: it is off
    here."""
    loss = need("verl.trainer.ppo.core_algos").get_policy_loss_fn("vanilla")
    logp, old_logp, adv = (x.double().reshape(1, -1) for x in args[:3])
    low, high = args[3:]
    config, everything = actor_config(clip_ratio_low=low, clip_ratio_high=high), torch.ones_like(adv)
    theirs = lambda x: loss(old_logp, x, adv, everything, config=config)
    same(lambda x: script.policy_loss(x, old_logp, adv, low, high).mean(), lambda x: theirs(x)[0], logp)
    share = script.clip_fraction(logp, old_logp, adv, low, high)
    assert float(share) == pytest.approx(theirs(logp)[1]["actor/pg_clipfrac"])


@pytest.mark.functions("value_loss")
@given(args=critics())
def test_value_loss_is_that_of_verl(args, *, script):
    """Half the larger squared error, clipped around the old value, in value and gradient (B20 and B83,
    vwxyzjn/lm-human-preference-details 36b8f56 and 9825ce0)."""
    core = need("verl.trainer.ppo.core_algos")
    v, old_v, ret = (x.double().reshape(1, -1) for x in args[:3])
    theirs = lambda x: core.compute_value_loss(x, ret, old_v, torch.ones_like(ret), args[3])[0]
    same(lambda x: script.value_loss(x, old_v, ret, args[3]).mean(), theirs, v)


class Fixed(nn.Module):
    """A network whose outputs are its parameters: torchrl wants networks, we have what comes out."""

    def __init__(self, *outputs):
        super().__init__()
        self.outputs = nn.ParameterList(outputs)

    def forward(self, _):
        first, *rest = self.outputs
        return (first, rest[0].exp().expand_as(first)) if rest else first


@pytest.mark.functions("gaussian_logp_entropy", "policy_loss", "clip_fraction")
@pytest.mark.functions("value_loss", "explained_variance")
@given(args=gaussians(), seed=SEEDS, low=st.floats(0.05, 0.5), high=st.floats(0.05, 0.5))
def test_the_whole_loss_is_that_of_torchrl(args, seed, low, high, *, script):
    """ClipPPOLoss: log-density, clipped surrogate, clipped value loss and entropy, with the gradients of all.
    Its value loss has no factor of a half. Its clip fraction counts every ratio outside the range, also where
    the gradient flows on; ours counts the samples without gradient (B22, pytorch/rl #2021)."""
    need("torchrl.objectives")
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule
    from torchrl.modules import ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss

    mean, log_std, action = (x.double() for x in args)
    normals = torch.randn(5, len(mean), dtype=mean.dtype, generator=torch.Generator().manual_seed(seed))
    noise, adv, old_v, move, ret = normals
    logp, entropy = script.gaussian_logp_entropy(mean, log_std, action)
    old_logp, v, clip = logp + 0.4 * noise, old_v + 0.4 * move, 0.2
    network = Fixed(mean.clone(), log_std.clone())
    critic = Fixed(v[:, None].clone())
    loss = ClipPPOLoss(
        ProbabilisticActor(
            TensorDictModule(network, ["observation"], ["loc", "scale"]), ["loc", "scale"],
            distribution_class=lambda loc, scale: Independent(Normal(loc, scale), 1), return_log_prob=True,
        ),
        ValueOperator(critic, in_keys=["observation"]), clip_epsilon=(low, high), clip_value=clip,
        loss_critic_type="l2", entropy_coeff=1.0, critic_coeff=1.0,
        normalize_advantage=False, reduction="none",
    )  # fmt: skip
    columns = {"advantage": adv, "value_target": ret, "state_value": old_v}
    batch = {"observation": mean, "action": action, "action_log_prob": old_logp}
    batch |= {name: x[:, None] for name, x in columns.items()}
    out = loss(TensorDict(batch, [len(mean)]))

    inputs = [x.clone().requires_grad_() for x in (mean, log_std, v[:, None])]
    logp, entropy = script.gaussian_logp_entropy(inputs[0], inputs[1], action)
    ours = {
        "loss_objective": script.policy_loss(logp, old_logp, adv, low, high),
        "loss_critic": 2 * script.value_loss(inputs[2][:, 0], old_v, ret, clip),
        "loss_entropy": -entropy,
    }
    for name, x in ours.items():
        close(x.detach(), out[name].detach(), 1e-4)
    theirs = [*network.outputs, *critic.outputs]
    sums = sum(x.sum() for x in ours.values()), sum(out[name].sum() for name in ours)
    for x, y in zip(torch.autograd.grad(sums[0], inputs), torch.autograd.grad(sums[1], theirs)):
        close(x, y, 1e-4)
    ratio, share = (logp - old_logp).exp(), float(script.clip_fraction(logp, old_logp, adv, low, high))
    harmless = ((adv < 0) & (ratio > 1 + high)) | ((adv > 0) & (ratio < 1 - low))
    assert share + float(harmless.double().mean()) == pytest.approx(float(out["clip_fraction"]))
    if len(mean) > 1:
        close(script.explained_variance(v, ret), out["explained_variance"].squeeze(), 1e-4)


@pytest.mark.functions("approx_kl")
@given(args=responses(2))
def test_approx_kl_is_that_of_verl(args, *, script):
    """k1, k2 and k3 with their gradients. verl cuts k3 at 10, and its gradient with it, which takes the pull
    from those who strayed farthest: no estimate of the KL any more, so that the distances here stay below."""
    core, ((logp, move), _) = need("verl.trainer.ppo.core_algos"), args
    ref_logp = logp + move.clamp(-2, 2)
    for kind in ("k1", "k2", "k3"):
        theirs = lambda x, k=kind: core.kl_penalty(x, ref_logp, k).sum()
        same(lambda x, k=kind: script.approx_kl(x, ref_logp, k).sum(), theirs, logp)


@pytest.mark.functions("kl_loss")
@given(data=st.data())
def test_unbiased_kl_loss_is_that_of_verl(data, *, script):
    """`k3+` has the value of k3 and the gradient of k2: another estimator of the same gradient as our ratio x
    k3, equal in the mean over the policy's own samples (B98, verl-project/verl #179)."""
    core = need("verl.trainer.ppo.core_algos")
    logits, ref_logits = tensor(data.draw, st.floats(-1, 1), 2, data.draw(st.integers(2, 5)))
    now, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    ours = lambda x: (now.exp() * script.kl_loss("k3_unbiased", x.log_softmax(-1), now, ref_logp)).sum()
    same(ours, lambda x: (now.exp() * core.kl_penalty(x.log_softmax(-1), ref_logp, "k3+")).sum(), logits)


@pytest.mark.functions("approx_kl")
@given(data=st.data())
def test_approx_kl_in_the_mean_is_torchs(data, *, script):
    """Over the policy's own samples k1 and k3 have the mean KL(policy || reference), not of the reverse (B74,
    pytorch/rl #2908; B77, CarperAI/trlx #361)."""
    logits, ref_logits = tensor(data.draw, st.floats(-3, 3), 2, data.draw(st.integers(2, 5)))
    policy, reference = Categorical(logits=logits), Categorical(logits=ref_logits)
    for kind in ("k1", "k3"):
        estimate = script.approx_kl(policy.logits, reference.logits, kind)
        close((policy.probs * estimate).sum(), exact_kl(policy, reference))


@pytest.mark.functions("surrogate", "aggregate")
@pytest.mark.parametrize("kind", ["clip", "gspo", "cispo"])
@given(args=batches())
def test_surrogates_are_those_of_verl(args, *, script, kind):
    """Value and gradient of the whole loss. verl's cispo has a lower clip of the weight as well, which is set
    to 0 here: MiniMax-M1, eq. 4, has none in its experiments."""
    logp, old_logp, adv, mask, low, high, cap = args
    loss = need("verl.trainer.ppo.core_algos").get_policy_loss_fn("vanilla" if kind == "clip" else kind)
    clips = {"cispo": (1.0, cap - 1)}.get(kind, (low, high))
    config = actor_config(clip_ratio_low=clips[0], clip_ratio_high=clips[1])
    for mode, their_mode in (("token", "token-mean"), ("sequence", "seq-mean-token-mean")):

        def ours(x, mode=mode):
            losses = script.surrogate(kind, x, old_logp, adv, mask, low, high, cap)
            return script.aggregate(losses, mask, mode, int(mask.sum()), len(mask), 1)

        def theirs(x, mode=their_mode):
            return loss(old_logp, x, adv[:, None].expand_as(x), mask.double(), mode, config)[0]

        same(ours, theirs, logp)


class Trainer(SimpleNamespace):
    """What TRL's loss asks of its trainer; if a later version asks for more, there is nothing to compare."""

    def __getattr__(self, name):
        pytest.skip(f"the loss of this TRL also needs {name}")


def trl_loss(logp, old_logp, ref_logp, adv, mask, loss_type, level, clips, beta, unbiased, max_length):
    """TRL's GRPO loss of these log-probabilities, and its metrics."""
    identity = lambda x, *_, **__: x
    trainer = Trainer(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
        loss_type=loss_type, importance_sampling_level=level, beta=beta,
        epsilon_low=clips[0], epsilon_high=clips[1],
        args=Trainer(use_bias_correction_kl=unbiased, delta=None),
        accelerator=Trainer(num_processes=1, gather=identity, reduce=identity),
        model=Trainer(training=False), max_completion_length=max_length,
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
        _entropy_bonus_enabled=False, _metrics={"eval": defaultdict(list)},
    )  # fmt: skip
    ids = torch.zeros(mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask.long(),
        "advantages": adv, "old_per_token_logps": old_logp, "ref_per_token_logps": ref_logp,
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    loss = need("trl.trainer.grpo_trainer").GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss, trainer._metrics["eval"]


@pytest.mark.functions("surrogate", "aggregate", "kl_loss", "clip_fraction")
@pytest.mark.parametrize(
    "loss_type, level, kind, mode",
    [
        ("grpo", "token", "clip", "sequence"),
        ("dapo", "token", "clip", "token"),
        ("dr_grpo", "token", "clip", "constant"),
        ("cispo", "token", "cispo", "token"),
        ("grpo", "sequence", "gspo", "sequence"),
    ],
)
@given(args=batches(), beta=st.sampled_from([0.0, 0.1]), unbiased=st.booleans(), seed=SEEDS)
def test_the_whole_loss_is_that_of_trl(args, beta, unbiased, seed, *, script, loss_type, level, kind, mode):
    """GRPOTrainer's loss with its KL term, in value and gradient, and its clip ratio. In a sequence-level run
    it weights the unbiased KL by the sequence's ratio; we stay with the token's, which makes the mean of k3
    the KL: not compared. All on one micro-batch: over several, TRL's grpo and dr_grpo take the mean of their
    means, which is ours only if they are of one size, since ours gets the counts of the whole step (B104,
    huggingface/trl #2647)."""
    logp, old_logp, adv, mask, low, high, cap = args
    unbiased = unbiased and level == "token"
    noise = torch.randn(logp.shape, dtype=logp.dtype, generator=torch.Generator().manual_seed(seed))
    ref_logp, max_length = logp + 0.5 * noise, logp.shape[1] + 2
    clips = (low, cap if kind == "cispo" else high)

    def ours(x):
        losses = script.surrogate(kind, x, old_logp, adv, mask, low, high, cap)
        losses = losses + beta * script.kl_loss("k3_unbiased" if unbiased else "k3", x, old_logp, ref_logp)
        return script.aggregate(losses, mask, mode, int(mask.sum()), len(mask), max_length)

    theirs = lambda x: trl_loss(
        x, old_logp, ref_logp, adv, mask, loss_type, level, clips, beta, unbiased, max_length
    )
    same(ours, lambda x: theirs(x)[0], logp)
    if kind == "clip":
        each = (x[mask] for x in (logp, old_logp, adv[:, None].expand_as(logp)))
        share = script.clip_fraction(*each, low, high)
        assert float(share) == pytest.approx(theirs(logp)[1]["clip_ratio/region_mean"][0])


@pytest.mark.functions("aggregate")
@given(args=responses(1, shortest=0), counts=st.tuples(*[st.integers(1, 30)] * 3))
def test_aggregate_is_that_of_verl(args, counts, *, script):
    """With the counts of the whole step given. Left to itself verl counts the tokens and the sequences of the
    micro-batch and leaves empty sequences out; and NaN in a masked slot goes through the sequence modes (B85,
    verl-project/verl #2377)."""
    core, ((loss,), mask), (tokens, sequences, length) = need("verl.trainer.ppo.core_algos"), args, counts
    whole = {"global_batch_size": sequences}
    for mode, their_mode, step in (
        ("token", "token-mean", {"batch_num_tokens": tokens}),
        ("sequence", "seq-mean-token-mean", whole),
        ("constant", "seq-mean-token-sum-norm", whole | {"loss_scale_factor": length}),
    ):
        theirs = lambda x, mode=their_mode, s=step: core.agg_loss(x, mask.double(), mode, **s)
        same(lambda x, mode=mode: script.aggregate(x, mask, mode, *counts), theirs, loss)


@pytest.mark.functions("preference_loss")
@given(data=st.data())
def test_preference_loss_is_torchs_cross_entropy(data, *, script):
    """The label 1 for the chosen one."""
    x = tensor(data.draw, st.floats(-40, 40), 5)
    same(
        lambda x: script.preference_loss(x).sum(),
        lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x), reduction="sum"),
        x,
    )


# ---- Distributions, statistics and schedules ---------------------------------------------------------------


@pytest.mark.functions("gaussian_logp_entropy", "tanh_log_det")
@given(args=gaussians())
def test_gaussians_are_those_of_stable_baselines3(args, *, script):
    """Log-density and entropy, plain and squashed. It adds 1e-6 inside the logarithm of the Jacobian, because
    its 1 - tanh^2 is 0 in float32 from 9 on: a dimension's correction ends at 13.8 nats, without a gradient.
    Ours goes on as 2 |u| - 2 log 2, which is right (B41, automl/Mighty #118). The 1e-6 is off here."""
    library = need("stable_baselines3.common.distributions")
    mean, log_std, action = (x.double() for x in args)
    normal = library.DiagGaussianDistribution(mean.shape[1]).proba_distribution(mean, log_std)
    logp, entropy = script.gaussian_logp_entropy(mean, log_std, action)
    close(logp, normal.log_prob(action))
    close(entropy, normal.entropy())
    u = action.clamp(-6, 6)
    squashed = library.SquashedDiagGaussianDistribution(mean.shape[1], epsilon=0.0)
    squashed.proba_distribution(mean, log_std)
    logp, _ = script.gaussian_logp_entropy(mean, log_std, u)
    close(logp - script.tanh_log_det(u), squashed.log_prob(u.tanh(), u))


@pytest.mark.functions("gaussian_logp_entropy", "tanh_log_det")
@given(args=gaussians())
def test_squashed_gaussian_is_torchs(args, *, script):
    """The density of tanh(u) with its gradients, far from 0 too (B41, automl/Mighty #118)."""
    mean, log_std, u = args
    tanh = TanhTransform(cache_size=1)  # or it would invert the tanh, which cannot be done at 1

    def theirs(mean, log_std):
        squashed = TransformedDistribution(Independent(Normal(mean, log_std.exp()), 1), tanh)
        return squashed.log_prob(tanh(u)).sum()

    ours = lambda m, s: (script.gaussian_logp_entropy(m, s, u)[0] - script.tanh_log_det(u)).sum()
    same(ours, theirs, mean, log_std, tolerance=1e-4)
    same(lambda x: script.tanh_log_det(x).sum(), lambda x: tanh.log_abs_det_jacobian(x, x.tanh()).sum(), u)


@pytest.mark.functions("token_logps")
@pytest.mark.parametrize(
    "module, name",
    [
        ("torch.distributions", None),
        ("verl.utils.torch_functional", "logprobs_from_logits_naive"),
        ("verl.utils.torch_functional", "logprobs_from_logits_v2"),
        ("trl.trainer.utils", "selective_log_softmax"),
    ],
)
@given(args=responses(1), temperature=st.sampled_from([0.5, 1.0, 1.7]))
def test_token_logps_are_those_of_libraries(args, temperature, *, script, module, name):
    """Of float32 logits, scaled beforehand. Of bfloat16 ones the libraries answer in bfloat16, two or three
    digits of a number whose differences the ratio is made of; ours are float32 (B59, huggingface/trl #3029).
    """
    library, (x, _) = need(module), args
    logits = 3 * x[0].float()[:, :-1, None] * torch.tensor([1.0, -0.5, 0.1, 0.7])
    tokens = torch.arange(logits[..., 0].numel()).view(logits.shape[:2]) % 4
    weight = torch.arange(1.0, tokens.numel() + 1).view_as(tokens)
    logprob = (lambda x, y: Categorical(logits=x).log_prob(y)) if name is None else getattr(library, name)
    theirs = lambda x: (weight * logprob(x / temperature, tokens)).sum()
    ours = lambda x: (weight * script.token_logps(x, tokens, temperature)).sum()
    same(ours, theirs, logits, tolerance=1e-4)


@pytest.mark.functions("explained_variance")
@given(seed=SEEDS, n=st.integers(2, 30), fit=st.floats(-2, 2))
def test_explained_variance_is_that_of_stable_baselines3(seed, n, fit, *, script):
    """NaN for a constant target in both. It asks whether the variance is 0, which that of a hundred times 0.1
    is not after rounding (it says -1e36); ours asks whether there are two different targets (the kind of
    B22)."""
    utils, rng = need("stable_baselines3.common.utils"), np.random.default_rng(seed)
    target = rng.normal(size=n)
    pred = fit * target + rng.normal(size=n)
    ours = script.explained_variance(torch.tensor(pred), torch.tensor(target))
    close(ours, utils.explained_variance(pred, target))
    constant = np.full(n, 3.0)
    assert math.isnan(script.explained_variance(torch.tensor(pred), torch.tensor(constant)))
    assert math.isnan(utils.explained_variance(pred, constant))


@pytest.mark.functions("RunningNorm")
@pytest.mark.parametrize("module", ["gymnasium.wrappers.utils", "stable_baselines3.common.running_mean_std"])
@given(
    seed=SEEDS, cuts=st.lists(st.integers(1, 9), min_size=2, max_size=5), shape=st.sampled_from([(), (3,)])
)
def test_running_norm_is_a_running_mean_std(seed, cuts, shape, *, script, module):
    """Merged batches against ours one by one. Theirs start from a sample of weight 1e-4 with mean 0 and
    variance 1 unless told otherwise, which adds the squared mean times 1e-4 / n to the variance of n samples;
    ours are the moments of the data, as numpy says (B47, vwxyzjn/cleanrl fc5f80c8)."""
    library, data = need(module), np.random.default_rng(seed).normal(30, 2, size=(sum(cuts), *shape))
    ours = script.RunningNorm(shape)
    theirs, default = (library.RunningMeanStd(epsilon=e, shape=shape) for e in (0.0, 1e-4))
    for batch in np.split(data, np.cumsum(cuts)[:-1]):
        for statistics in (ours, theirs, default):
            statistics.update(batch)
    mean, var = ours.mean, np.square(ours.std) - 1e-8
    np.testing.assert_allclose(mean, theirs.mean, rtol=1e-9)
    np.testing.assert_allclose(var, theirs.var, rtol=1e-6)
    n, e = len(data), 1e-4
    np.testing.assert_allclose(mean * n / (n + e), default.mean, rtol=1e-9)
    shifted = (n * var + e + np.square(mean) * n * e / (n + e)) / (n + e)
    np.testing.assert_allclose(shifted, default.var, rtol=1e-6)


@pytest.mark.functions("RunningNorm")
@given(seed=SEEDS, n=st.integers(2, 20))
def test_normalize_is_that_of_stable_baselines3(seed, n, *, script):
    """Minus the mean, over the square root of the variance + 1e-8, clipped at 10, float32."""
    envs, gym = need("stable_baselines3.common.vec_env"), need("gymnasium")
    statistics = need("stable_baselines3.common.running_mean_std")
    data = np.random.default_rng(seed).normal(5, 2, size=(n, 3))
    theirs = envs.VecNormalize(envs.DummyVecEnv([lambda: gym.make("Pendulum-v1")]))
    theirs.obs_rms, ours = statistics.RunningMeanStd(epsilon=0.0, shape=(3,)), script.RunningNorm((3,))
    for x in (theirs.obs_rms, ours):
        x.update(data)
    x = np.concatenate([data, [[1e3, -1e3, 5.0]]])
    np.testing.assert_allclose(ours.normalize(x), theirs.normalize_obs(x), rtol=1e-5, atol=1e-5)
    assert ours.normalize(x).dtype == theirs.normalize_obs(x).dtype


@pytest.mark.functions("linear_schedule")
@pytest.mark.parametrize("total", [1, 2, 7, 50])
def test_linear_schedule_is_torchs(script, total):
    """The rate of each update when torch's schedule is stepped after it."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total)
    for step in range(total):
        assert script.linear_schedule(step, total) == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()


# ---- Rewards of tokens, ends of responses, the KL coefficient ----------------------------------------------


@pytest.mark.functions("response_mask")
@given(data=st.data(), eos_ids=st.lists(st.integers(0, 4), min_size=1, max_size=3))
def test_response_mask_is_that_of_verl(data, eos_ids, *, script):
    """The first of any stop id is the last token that counts (B103, verl-project/verl #213)."""
    functional = need("verl.utils.torch_functional")
    tokens = tensor(data.draw, st.integers(0, 6), 3, data.draw(st.integers(1, 6)), dtype=torch.long)
    theirs = functional.get_response_mask(tokens, eos_ids)
    assert torch.equal(script.response_mask(tokens, eos_ids), theirs.bool())


@pytest.mark.functions("response_mask")
@given(data=st.data())
def test_response_mask_is_that_of_trl(data, *, script):
    """`truncate_response` writes the pad after the first stop id. TRL then takes for the end what stands
    before the first pad, so that with a pad which is the stop id the stop token is lost (the kind of B103,
    verl-project/verl #213); ours never asks for the pad."""
    ppo = need(TRL_PPO)
    tokens = tensor(data.draw, st.integers(0, 4), 3, data.draw(st.integers(1, 6)), dtype=torch.long)
    assert torch.equal(script.response_mask(tokens, [2]), ppo.truncate_response(2, -1, tokens) != -1)


@pytest.mark.functions("shape_rewards")
@given(args=responses(3), coef=st.sampled_from([0.0, 0.05, 1.0]))
def test_shape_rewards_are_those_of_verl(args, coef, *, script):
    """Each token pays -coef (logp - ref_logp) (B74, pytorch/rl #2908: the sign). verl's caller puts the score
    at the last token, as we do; TRL's PPO puts it one later, at the pad, if there is one (B67,
    huggingface/trl #3750)."""
    core, ((logp, ref_logp, scores), mask) = need("verl.trainer.ppo.core_algos"), args
    score, last = scores[:, 0], F.one_hot(mask.sum(1) - 1, mask.shape[1])
    theirs = core.compute_rewards(score[:, None] * last, logp, ref_logp, coef) * mask
    close(script.shape_rewards(score, logp, ref_logp, mask, coef), theirs)


@pytest.mark.functions("KLController")
@given(
    kls=st.lists(st.floats(0, 30), min_size=1, max_size=6), n=st.integers(1, 500), target=st.floats(0.1, 20)
)
def test_kl_controller_is_that_of_verl(kls, n, target, *, script):
    """The error in proportion to the target, cut at a fifth, n responses of the horizon (B77, CarperAI/trlx
    #361)."""
    core = need("verl.trainer.ppo.core_algos")
    ours, theirs = script.KLController(0.1, target, 10_000), core.AdaptiveKLController(0.1, target, 10_000)
    for kl in kls:
        ours.update(kl, n)
        theirs.update(kl, n)
        assert ours.coef == pytest.approx(float(theirs.value), rel=1e-12)
