# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.13", "transformers>=5.24", "numpy>=2", "tqdm", "tyro>=1.0", "wandb", "peft"]
# ///
"""Proximal policy optimisation of a language model against a reward model or function, in one file.

The classic pipeline from top to bottom: supervised start, reward model, and PPO with four models (policy,
value model, frozen reward model, frozen reference). Nothing is imported from the other scripts;
`pytest --script my_copy.py` verifies a changed copy.

    python ppo_rlhf.py                                    # all three stages in a small world, some minutes
    python ppo_rlhf.py --policy MODEL --prompts prompts.jsonl --reward my_file.py:my_reward
    python ppo_rlhf.py --policy MODEL --prompts prompts.jsonl --reward-model CLASSIFIER --dtype bfloat16
    torchrun --nproc-per-node 8 ppo_rlhf.py ...           # the same batch and update, shared by 8 processes

Papers: PPO (Schulman et al. 2017, arXiv 1707.06347, eq. 7 and 9), GAE (Schulman et al. 2015, arXiv
1506.02438, eq. 16), fine-tuning from preferences (Ziegler et al. 2019, arXiv 1909.08593, eq. 1 and 2, section
2.2), learning to summarise (Stiennon et al. 2020, arXiv 2009.01325), the details of both (Huang et al. 2024,
arXiv 2403.17031), KL estimators (Schulman 2020, http://joschu.net/blog/kl-approx.html).

Differs from TRL's last PPOTrainer and from summarize_from_feedback_details in:
 [D1] The score is added at the last token of the response, not at the first padding after it.
 [D2] Advantages are whitened over all valid tokens of the batch of all processes, with the population
      variance.
 [D3] The value model is a model of its own, with its own learning rate and gradient norm.
 [D4] Losses are divided by the token count of the whole optimiser step: the cut into micro-batches and
      processes is free.
 [D5] The sampling loop is here: no generation config of a checkpoint (top-k, penalties) can bend the sampled
      distribution away from the scored one; temperature is the only setting, and it divides both.
 [D6] A response ends at any stop id of tokenizer and model; the stop token is trained on; an unfinished
      response gets none, and its score is reduced by --missing-eos-penalty; masks never come from a pad id.
 [D7] The reward is any Python function of the texts; a reward model reads the texts with its own tokenizer
      and template, at the last real token. A completion without a score (None or NaN) leaves the batch.
 [D8] Logits exist at response tokens only, in micro-batches by a budget of tokens, with float32 log-softmax.
 [D9] The KL coefficient is fixed, or adaptive with a target in nats a response (not a token), and is resumed.
[D10] Prompts, tokens, shuffling and evaluation draw from random streams of their own; each process draws
      other tokens.
[D11] The first batch is checked: scored equal to sampled log-probabilities, KL to the reference exactly 0.
"""

import argparse
import collections
import contextlib
import copy
import dataclasses
import hashlib
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import signal
import sys
import time
import traceback
import typing
import weakref
import zlib
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import transformers
import tyro
from tqdm import tqdm

SCRIPT = "ppo_rlhf"

# ---- 1. Arguments ------------------------------------------------------------------------------------------


class UsageError(Exception):
    """A fault of the command line, a file, an environment or a model, told in one sentence."""


class told(contextlib.AbstractContextManager):
    """A context in which whatever is raised becomes one sentence: the fault, what was raised, and where."""

    def __init__(self, fault: str):
        self.fault = fault

    def __exit__(self, kind, error, trace):
        if isinstance(error, Exception) and not isinstance(error, (UsageError, FloatingPointError)):
            frames, libraries = traceback.extract_tb(trace), (sys.prefix, sys.base_prefix, __file__)
            place = ([f for f in frames if not f.filename.startswith(libraries)] or frames)[-1]
            words = f"{kind.__name__}: {' '.join(str(error).split())[:400]}"
            raise UsageError(f"{self.fault}: {words} ({Path(place.filename).name}:{place.lineno})") from error


Natural = Annotated[int, "must be at least 1", lambda x: x >= 1]
NotNegative = Annotated[int, "must not be negative", lambda x: x >= 0]
NotOne = Annotated[int, "must be 0 or at least 2", lambda x: x == 0 or x >= 2]
Seed = Annotated[int, "must lie in [0, 2**63)", lambda x: 0 <= x < 2**63]
Weight = Annotated[float, "must not be negative", lambda x: 0 <= x < math.inf]
Positive = Annotated[float, "must be positive and finite", lambda x: 0 < x < math.inf]
Fraction = Annotated[float, "must lie in [0, 1]", lambda x: 0 <= x <= 1]


def check_flags(args) -> None:
    """The rule in each flag's type, and the rules that all scripts share."""
    for field in dataclasses.fields(args):
        value, flag = getattr(args, field.name), f"--{field.name.replace('_', '-')}"
        for kind in (field.type, *typing.get_args(field.type)):
            rule, holds = getattr(kind, "__metadata__", ("", lambda x: True))
            if value is not None and not holds(value):
                raise UsageError(f"{flag} {value} {rule}")
        if field.name in ("run_name", "start_from") and None not in (value, args.resume):
            raise UsageError(f"{flag} {value} contradicts --resume {args.resume}")
    if args.run_name is not None and Path(args.run_name).name != args.run_name:
        raise UsageError(f"--run-name {args.run_name} must be the name of a folder under runs/")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: there is no CUDA device")
    if args.track and importlib.util.find_spec("wandb") is None:
        raise UsageError("--track needs: pip install wandb")


@dataclass
class Args:
    """Proximal policy optimisation of a language model against a reward model or function, in one file."""

    policy: str | None = None  # causal language model, folder or hub name; default: a small world made here
    prompts: str | None = None  # FILE.jsonl with "prompt" (text, or chat messages) and any other fields
    eval_prompts: str | None = None  # held-out FILE.jsonl; default: the last --num-eval rows of --prompts
    num_eval: Natural = 256  # held-out prompts used; none of them is trained on
    reward: str | None = None  # FILE.py:FUNCTION (prompts, completions, rows) -> list of float; + adds more
    reward_model: str | None = None  # sequence classifier with one output, read with its own tokenizer
    train_reward_model: str | None = None  # PAIRS.jsonl with "prompt", "chosen", "rejected" to train one on
    num_pairs: Natural = 2000  # preference pairs of the small world
    reward_epochs: Natural = 1  # passes over the preference pairs
    reward_learning_rate: Positive = 1e-5  # AdamW's step size for the reward model
    chat_template: bool = True  # put a text prompt into the tokenizer's chat template, if it has one
    chat_template_kwargs: str = "{}"  # what it takes beside, as JSON, such as '{"enable_thinking": false}'
    stop: str | None = None  # one more token that ends a response, such as "\n"; stop ids always do
    total_steps: Natural = 200  # training steps: batches of sampled responses
    num_prompts: Natural = 128  # prompts, with one response each, a step, over all processes
    max_new_tokens: Natural = 53  # longest response, in tokens
    temperature: Positive = 0.7  # of sampling and of every log-probability
    missing_eos_penalty: Weight = 1.0  # taken from the score of a response that does not end by itself
    normalize_scores: NotOne = 256  # first responses, whose scores get mean 0 and deviation 1; 0: as they are
    kl_coef: Weight = 0.05  # weight of each token's KL penalty against --policy; 0: no reference
    kl_target: Positive | None = None  # adapt --kl-coef to this KL divergence, in nats a response
    kl_horizon: Natural = 10_000  # responses over which the coefficient adapts
    gamma: Fraction = 1.0  # discount factor
    gae_lambda: Fraction = 0.95  # lambda of generalised advantage estimation
    clip_coef: Positive = 0.2  # epsilon of the clipped surrogate
    importance_cap: Positive = 2.0  # largest weight that corrects the sampler's error (see update_models)
    value_clip: Positive | None = 0.2  # clip the value loss around the batch's values; None: off
    vf_coef: Weight = 0.1  # weight of the value loss
    update_epochs: Natural = 4  # passes over a batch
    num_minibatches: Natural = 8  # optimiser steps a pass
    learning_rate: Positive = 1.5e-6  # AdamW's step size for the policy
    value_learning_rate: Positive = 1e-5  # and for the value model
    warmup_steps: NotNegative = 5  # training steps over which the learning rates grow to their values
    anneal_lr: bool = True  # decay the learning rates linearly to zero
    max_grad_norm: Positive = 1.0  # largest norm of a gradient, of policy and value model apart
    target_kl: Positive | None = None  # end an update before the step where a token's mean KL exceeds it
    lora_rank: NotNegative = 0  # train low-rank adapters of the policy (needs peft); 0: all weights
    dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16: autocast, sampling from a bfloat16 copy
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time
    batch_tokens: Natural = 8192  # most tokens of a micro-batch, padding included
    eval_every: NotNegative = 20  # training steps between two evaluations; 0: only before and after
    save_every: Natural = 25  # training steps between two checkpoints
    self_checks: bool = True  # check the first batch: log-probabilities, reference, stop token
    seed: Seed = 1  # seed of all random streams
    device: Literal["auto", "cpu", "cuda"] = "auto"  # where the models live; auto takes cuda if there is one
    run_name: str | None = None  # folder under runs/; default: task, script, seed and time
    resume: Path | None = None  # go on with the run in this folder, which only --total-steps may change
    start_from: Path | None = None  # begin a new run with the weights and statistics of this checkpoint
    track: bool = False  # log to Weights & Biases as well (WANDB_MODE=offline needs no network)
    wandb_project_name: str = "ppo-verified"  # W&B project (the team comes from WANDB_ENTITY)

    def __post_init__(self):
        check_flags(self)
        with told(f"--chat-template-kwargs {self.chat_template_kwargs} is no JSON object"):
            dict(**json.loads(self.chat_template_kwargs))
        if self.num_prompts % self.num_minibatches:
            parts = f"--num-minibatches {self.num_minibatches}"
            raise UsageError(f"--num-prompts {self.num_prompts} do not divide into {parts}")
        if (self.policy is None) != (self.prompts is None):
            raise UsageError(f"--policy {self.policy} and --prompts {self.prompts} need each other")
        sources = (self.reward, self.reward_model or self.train_reward_model)
        given = sum(source is not None for source in sources)
        if self.policy is not None and given != 1:
            flags = "--reward, --reward-model or --train-reward-model"
            raise UsageError(f"--policy needs one source of scores: {flags}")
        if self.policy is None and given:
            words = "--reward and --reward-model need --policy"
            raise UsageError(f"the small world has a reward of its own: {words}")
        if self.kl_target is not None and self.kl_coef == 0:
            raise UsageError(f"--kl-target {self.kl_target} needs a --kl-coef to start from")
        if self.kl_target is not None and 0.2 * self.num_prompts >= self.kl_horizon:
            few = f"--kl-horizon {self.kl_horizon} is too short"
            raise UsageError(f"{few} for --num-prompts {self.num_prompts}")
        if self.lora_rank and importlib.util.find_spec("peft") is None:
            raise UsageError(f"--lora-rank {self.lora_rank} needs: pip install peft")

    group_size = 1  # one response a prompt,
    row_tokens = 0  # in a row of its own: what `pack` needs to know

    @property
    def task_name(self) -> str:
        return "world" if self.prompts is None else Path(self.prompts).stem


# What the small world needs; the command line goes over it.
BUILT_IN = dict(
    total_steps=100, max_new_tokens=20, temperature=1.0, missing_eos_penalty=3.0, num_pairs=2000,
    reward_epochs=5, reward_learning_rate=5e-4, kl_target=5.0, kl_horizon=2000, update_epochs=2,
    num_minibatches=4, learning_rate=2e-4, value_learning_rate=5e-4, anneal_lr=False,
)  # fmt: skip


def command_line(argv: list[str] | None = None) -> Args:
    """The command line, over the small world's settings if there is no --policy."""
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    peek.add_argument("--policy", nargs="?")
    given, _ = peek.parse_known_args(argv)
    return parse_args(argv, BUILT_IN if given.policy is None else None)


def streams(seed: int) -> list[np.random.SeedSequence]:
    """Independent random streams: environments or prompts, actions or tokens, shuffling, evaluation."""
    return np.random.SeedSequence(seed).spawn(4)


def own_generator(stream: np.random.SeedSequence, rank: int, device: torch.device) -> torch.Generator:
    """Random numbers from the stream in the first process, from another child of it in each other one."""
    stream = stream.spawn(rank)[-1] if rank else stream
    return torch.Generator(device).manual_seed(int(stream.generate_state(1)[0]))


# ---- 2. Pure functions: B responses, L tokens, V vocabulary, (T, N) for GAE over tokens, M any shape -------


def linear_schedule(step: int, total: int) -> float:
    """Fraction of the initial value at update `step` of `total`, counted from 0: 1 first, 1 / total last."""
    return 1.0 - step / total


def minibatches(n, num, generator):
    """A fresh random partition of range(n) into `num` index tensors; nothing is dropped."""
    return torch.randperm(n, generator=generator, device=generator.device).tensor_split(num)


def token_logps(logits, tokens, temperature):
    """Log-probability of each token, softmax(logits / temperature), float32. (B, L, V), (B, L) -> (B, L)."""
    logits = logits.float() / temperature
    return -F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view_as(tokens)


def response_mask(tokens, eos_ids):
    """True up to and with the first stop id, everywhere if there is none. (B, L) -> (B, L)."""
    stop = torch.isin(tokens, torch.as_tensor(eos_ids, device=tokens.device)).long()
    return stop.cumsum(1) - stop == 0


def masked_mean(x, mask, denom=None):
    """Sum of x where `mask` is True over `denom` (default: their number); 0 if none is. M -> scalar."""
    denom = mask.sum() if denom is None else torch.as_tensor(denom)
    return x.masked_fill(~mask, 0.0).sum() / denom.clamp(min=1)


def shape_rewards(score, logp, ref_logp, mask, kl_coef):
    """Reward of each token: -kl_coef (logp - ref_logp), and the score at the last token of the response.

    (B,) and (B, L) -> (B, L), zero outside the mask (Ziegler et al. 2019, eq. 2, token by token). [D1]
    """
    penalty = -kl_coef * approx_kl(logp, ref_logp, "k1")
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return (penalty + score[:, None] * last).masked_fill(~mask, 0.0)


def compute_gae(rewards, values, next_values, terminated, done, gamma, lam):
    """Generalised advantage estimation (Schulman et al. 2015, eq. 16) and the returns it implies, all (T, N).

    next_values[t] is the value of the state that step t really reached, also where the episode ended there;
    `terminated` stops the bootstrap, `done` (terminated or truncated) cuts the lambda-chain.
    """
    delta = rewards + gamma * next_values.masked_fill(terminated, 0.0) - values  # (T, N)
    decay = gamma * lam * (~done).to(delta.dtype)  # (T, N)
    advantages = torch.empty_like(delta, device="cpu")
    delta, decay, out = delta.cpu().numpy(), decay.cpu().numpy(), advantages.numpy()  # row by row, 10x faster
    advantage = 0.0
    for t in reversed(range(len(delta))):
        out[t] = advantage = delta[t] + decay[t] * advantage
    advantages = advantages.to(values.device)
    return advantages, advantages + values


def token_advantages(rewards, values, mask, gamma, lam):
    """GAE over the tokens of each response, which ends there, also when cut off. (B, L) -> (B, L), (B, L)."""
    after = F.pad(values[:, 1:], (0, 1)) * F.pad(mask[:, 1:], (0, 1))  # 0 after the last token
    last = ~F.pad(mask[:, 1:], (0, 1))
    advantages, returns = compute_gae(rewards.T, values.T, after.T, last.T, last.T, gamma, lam)
    return advantages.T.masked_fill(~mask, 0.0), returns.T.masked_fill(~mask, 0.0)


def whiten(x, mask=None, shift_mean=True):
    """Divide by the deviation (population) of the entries where `mask` is True; zero elsewhere. M -> M.

    shift_mean=True also moves the mean to 0; shift_mean=False divides only.
    """
    mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
    x = x.masked_fill(~mask, 0.0)
    count = mask.sum().clamp(min=1)
    centred = (x - x.sum() / count).masked_fill(~mask, 0.0)
    return (centred if shift_mean else x) * torch.rsqrt(centred.square().sum() / count + 1e-8)


def policy_loss(logp, old_logp, adv, clip_low, clip_high):
    """Clipped surrogate (Schulman et al. 2017, eq. 7), negated to be minimised, per sample. M -> M."""
    ratio = torch.exp(logp - old_logp)
    return -torch.min(ratio * adv, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * adv)


def value_loss(v, old_v, ret, clip):
    """Half the squared error, or the larger of it and the error of `v` clipped around `old_v`. M -> M."""
    loss = (v - ret).square()
    if clip is not None:
        loss = torch.max(loss, (old_v + (v - old_v).clamp(-clip, clip) - ret).square())
    return 0.5 * loss


def approx_kl(logp, ref_logp, kind):
    """Per-sample estimate of KL(policy || reference), the samples being of the policy of `logp`. M -> M.

    With d = ref_logp - logp (Schulman 2020): k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d.
    """
    d = ref_logp - logp
    return {"k1": lambda: -d, "k2": lambda: d.square() / 2, "k3": lambda: torch.expm1(d) - d}[kind]()


def clip_fraction(logp, old_logp, adv, clip_low, clip_high):
    """Share of samples whose gradient the clip of `policy_loss` removed: the good side only. M -> scalar."""
    ratio = torch.exp(logp - old_logp)
    clipped = ((adv > 0) & (ratio > 1.0 + clip_high)) | ((adv < 0) & (ratio < 1.0 - clip_low))
    return clipped.float().mean()


def explained_variance(pred, target):
    """1 - Var(target - pred) / Var(target); NaN if the target is constant. M, M -> scalar."""
    explained = 1.0 - (target - pred).var(correction=0) / target.var(correction=0)
    return torch.where(target.max() > target.min(), explained, math.nan)


class KLController:
    """Adaptive KL coefficient (Ziegler et al. 2019, section 2.2); fixed if `target` is None. [D9]"""

    def __init__(self, coef, target, horizon):
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl, n):
        """kl: mean KL of a response to the reference, in nats; n: responses that it was measured on."""
        if self.target is not None:
            error = min(max(kl / self.target - 1.0, -0.2), 0.2)
            self.coef *= 1.0 + error * n / self.horizon


def preference_loss(difference):
    """-log sigmoid(score of the chosen - score of the rejected) (Ziegler et al. 2019, eq. 1). M -> M."""
    return -F.logsigmoid(difference)


def pack(prompt_lengths, lengths, samples, group_size, row_tokens, batch_tokens):
    """Micro-batches of rows of samples: [[[sample, ...] of one prompt, ...], ...]; each sample once.

    A row holds its prompt once and as many responses to it as row_tokens allow (one at least); a micro-batch
    holds rows of similar length, batch_tokens with their padding at most (one row at least).
    """
    rows = []  # (tokens, samples)
    for group, members in itertools.groupby(samples, lambda i: i // group_size):
        used = math.inf
        for i in members:
            if used + lengths[i] - 1 > row_tokens:
                used = prompt_lengths[group]
                rows.append([used, []])
            used += lengths[i] - 1  # the last token of a response is never an input
            rows[-1][0] = used
            rows[-1][1].append(i)
    batches = []
    for tokens, row in sorted(rows, key=lambda row: -row[0]):
        if not batches or (len(batches[-1][1]) + 1) * batches[-1][0] > batch_tokens:
            batches.append((tokens, []))
        batches[-1][1].append(row)
    return [rows for _, rows in batches]


# ---- 3. Models ---------------------------------------------------------------------------------------------


def load_model(name: str):
    """Tokenizer and causal language model, float32 weights, without dropout: all passes see one policy."""
    where = "" if Path(name).is_dir() else ", which is no folder here,"
    with told(f"{name}{where} cannot be loaded"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        config = transformers.AutoConfig.from_pretrained(name)
        for key, value in config.to_dict().items():
            if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
                setattr(config, key, 0.0)
        settings = dict(config=config, dtype=torch.float32, attn_implementation="sdpa")
        model = transformers.AutoModelForCausalLM.from_pretrained(name, **settings)
    return tokenizer, model


def tokens_of(tokenizer, text: str, **settings) -> list[int]:
    """Token ids of a text; some tokenizers have none for some texts."""
    with told(f"the tokenizer cannot take the text {text!r}"):
        return tokenizer(text, **settings).input_ids


def stop_ids(tokenizer, model, stop: str | None) -> list[int]:
    """Every id that ends a response: of the tokenizer, of the model's configurations, and --stop."""
    known = [tokenizer.eos_token_id, model.config.eos_token_id]
    known.append(getattr(model.generation_config, "eos_token_id", None))
    ids = {i for entry in known for i in (entry if isinstance(entry, list) else [entry]) if i is not None}
    if stop is not None:
        extra = tokens_of(tokenizer, stop.replace("\\n", "\n"), add_special_tokens=False)
        if len(extra) != 1:
            raise UsageError(f"--stop {stop!r} is {len(extra)} tokens of this tokenizer, not one")
        ids.update(extra)
    size = model.get_input_embeddings().num_embeddings
    if not ids or max(ids) >= size:
        raise UsageError(f"the stop ids {sorted(ids)} are none, or not among the model's {size} tokens")
    return sorted(ids)


def add_lora(model, rank: int):
    """The model with trainable low-rank adapters (Hu et al. 2021, arXiv 2106.09685); it starts unchanged."""
    import peft

    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


class WithoutAdapters:
    """The starting policy of a model with adapters: the same weights without them."""

    def __init__(self, model):
        self.model = model

    def __call__(self, **inputs):
        with self.model.disable_adapter():
            return self.model(**inputs)


def reference_of(model, args):
    """What `model` is now, frozen: the policy that KL terms measure from (None without such a term)."""
    if not args.kl_coef:
        return None
    return WithoutAdapters(model) if args.lora_rank else copy.deepcopy(model).requires_grad_(False)


class Weights:
    """The trained parameters as a part of a checkpoint; they must be the same in all processes."""

    def __init__(self, parameters: dict):
        self.parameters = parameters  # by name

    def state_dict(self):
        check_weights(self.parameters.values())
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def load_state_dict(self, state):
        if {n: p.shape for n, p in state.items()} != {n: p.shape for n, p in self.parameters.items()}:
            raise ValueError("the model has other parameters")
        for name, parameter in self.parameters.items():
            parameter.data.copy_(state[name])


def load_classifier(name, new_head: bool = False):
    """Tokenizer and sequence classifier with one output, float32 weights, without dropout."""
    with told(f"{name} cannot be loaded as a classifier with one output"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        config = transformers.AutoConfig.from_pretrained(name, num_labels=1)
        for key, value in config.to_dict().items():
            if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
                setattr(config, key, 0.0)
        model, found = transformers.AutoModelForSequenceClassification.from_pretrained(
            name, config=config, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True,
            ignore_mismatched_sizes=True,
        )  # fmt: skip
        assert hasattr(model, "score"), "it has no score head that reads a causal model"
        wrong = [f"its {weight} has {saved[0]} outputs" for weight, saved, _ in found["mismatched_keys"]]
        assert not wrong, wrong[0]
        assert new_head or not found["missing_keys"], "it has no weights for a score head"
    return tokenizer, model.eval()


def scalars(model, inputs):
    """The classifier's output at every token. -> (rows, width), float32."""
    hidden = model.base_model(**inputs).last_hidden_state
    return model.score(hidden).squeeze(-1).float()


def conversation(tokenizer, prompt, completion: str) -> list[int]:
    """Token ids of a prompt and its completion, as a reward model reads them."""
    if not tokenizer.chat_template and isinstance(prompt, str):
        return tokens_of(tokenizer, prompt + completion)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if messages[-1:] and messages[-1].get("role") == "assistant":  # continued, as by `encode`
        messages[-1] = messages[-1] | {"content": messages[-1]["content"] + completion}
    else:
        messages.append({"role": "assistant", "content": completion})
    with told(f"the reward model's chat template cannot take {messages!r}"):
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    return tokens_of(tokenizer, text, add_special_tokens=False)


def read_texts(model, tokenizer, prompts, completions, batch_tokens):
    """The reward model's score of each text, read at its last real token [D7]. -> (B,)."""
    ids = [conversation(tokenizer, *texts) for texts in zip(prompts, completions)]
    order, scores = sorted(range(len(ids)), key=lambda i: -len(ids[i])), [None] * len(ids)
    size = max(1, batch_tokens // len(ids[order[0]]))
    for part in (order[first : first + size] for first in range(0, len(order), size)):
        width = len(ids[part[0]])
        rows = torch.tensor([ids[i] + [0] * (width - len(ids[i])) for i in part], device=model.device)
        ends = torch.tensor([len(ids[i]) - 1 for i in part], device=model.device)
        inputs = {"input_ids": rows, "use_cache": False}  # causal: padding on the right is unseen
        found = scalars(model, inputs).gather(1, ends[:, None])[:, 0]
        for i, value in zip(part, found):
            scores[i] = value
    return torch.stack(scores)


def classifier_of(policy, classifier=None):
    """A classifier with one output: a copy of the reward model, or policy's backbone and a head of zeros."""
    if classifier is not None:
        return copy.deepcopy(classifier).requires_grad_(True)
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    model = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa")
    model.base_model.load_state_dict(policy.base_model.state_dict())
    nn.init.zeros_(model.score.weight)
    return model.to(policy.device).eval()


@dataclass
class Learner:
    """The two models that learn, and what their rewards are measured by."""

    policy: nn.Module
    critic: nn.Module  # the value model [D3]
    reference: object  # the frozen starting policy, called like a model; None without a KL penalty
    controller: KLController  # has the coefficient of the penalty
    norm: dict  # "mean" and "std" of the starting policy's scores


def build(policy, classifier, args: Args):
    """The learner of a policy, its optimiser, and the weights that are trained, by name."""
    critic = classifier_of(policy, classifier)
    policy = add_lora(policy, args.lora_rank) if args.lora_rank else policy
    for parameter in (*policy.parameters(), *critic.parameters()) if dist.is_initialized() else ():
        dist.broadcast(parameter.data, 0)
    controller = KLController(args.kl_coef, args.kl_target, args.kl_horizon)
    norm = {"mean": 0.0, "std": 1.0}
    learner = Learner(policy.eval(), critic, reference_of(policy, args), controller, norm)
    for model in (policy, critic) if args.gradient_checkpointing else ():
        model.activation_checkpointing_enable({"use_reentrant": False})
    trained = {f"policy.{name}": p for name, p in policy.named_parameters() if p.requires_grad}
    trained |= {f"critic.{name}": p for name, p in critic.named_parameters()}
    groups = [[p for name, p in trained.items() if name.startswith(kind)] for kind in ("policy", "critic")]
    groups = [{"params": group} for group in groups]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-5, weight_decay=0.0, fused=True)
    return learner, optimizer, trained


# ---- 4. Tasks, preferences, reward model -------------------------------------------------------------------

WORDS = {  # of the small world; A adjective, V verb, R adverb, pleasant +, unpleasant - or neither
    "D": "the a this every", "N": "farmer king child dog baker sailor teacher doctor cat judge painter queen",
    "A+": "kind brave honest gentle bright cheerful", "A-": "cruel bitter rude angry gloomy mean",
    "A": "old young tall small quiet famous", "V+": "helps thanks praises comforts",
    "V-": "hurts insults blames scares", "V": "sees meets follows calls", "R+": "warmly gladly",
    "R-": "coldly badly", "R": "today slowly", "C": "and but while", ".": ".",
}  # fmt: skip
KIND = {word: kind for kind, words in WORDS.items() for word in words.split()}
CLAUSE = "DA?NVDA?NR?"
SENTENCE = re.compile(rf"{CLAUSE}(C{CLAUSE})?\.")
PROMPT_WORDS = 5


def word_tokenizer():
    """One token for each word of the small world, its leading space included, with stop and padding."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = ["<pad>", "<eos>", *(f" {word}" for word in KIND)]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[^ <]+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )


def tiny_model(tokenizer):
    """A Llama of 0.33 million parameters with random weights."""
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, initializer_range=0.05, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def sentence(rng) -> str:
    """A sentence of the grammar, as often pleasant as unpleasant; its first noun has an adjective."""

    def word(kind):
        mood = ("+", "-", "")[rng.choice(3, p=[0.4, 0.4, 0.2])] if kind in "AVR" else ""
        return rng.choice(WORDS[kind + mood].split())

    def clause(first):
        maybe = lambda kind, p: kind if rng.random() < p else ""
        kinds = "D" + maybe("A", 1.0 if first else 0.5) + "NVD" + maybe("A", 0.5) + "N" + maybe("R", 0.3)
        return [word(kind) for kind in kinds]

    words = clause(True) + ([word("C"), *clause(False)] if rng.random() < 0.5 else [])
    return "".join(f" {w}" for w in [*words, "."])


def hidden_preference(prompts, completions, rows):
    """What the labels of the small world follow: pleasant minus unpleasant words of the completion, -2 for
    each word of mood that the sentence says again, -3 if it is no sentence of the grammar."""
    scores = []
    for prompt, completion in zip(prompts, completions):
        words = (prompt + completion).split()
        kinds = [KIND.get(word, "?") for word in words]
        moods = [word for word, kind in zip(words, kinds) if kind[-1] in "+-"]
        score = sum({"+": 1, "-": -1}.get(kind[-1], 0) for kind in kinds[len(prompt.split()) :])
        score -= 2 * (len(moods) - len(set(moods)))
        scores.append(float(score - 3 * (SENTENCE.fullmatch("".join(kind[0] for kind in kinds)) is None)))
    return scores


def is_held_out(text: str) -> bool:
    """A tenth of all first words that a sentence can have."""
    return zlib.crc32(" ".join(text.split()[:PROMPT_WORDS]).encode()) % 10 == 0


def read_rows(source: str, *fields: str) -> list[dict]:
    """Rows of a .jsonl file, all with the fields; a prompt is never empty."""
    rows, wanted = [], f"not an object with {', '.join(fields)}"
    with told(f"cannot read {source}"):
        lines = Path(source).read_text(encoding="utf-8-sig").split("\n")
    for number, line in enumerate(lines if lines[-1] else lines[:-1], 1):
        place = f"{source}, line {number}"
        with told(f"{place}: {wanted}"):
            rows.append({**json.loads(line)})
        if not set(fields) <= set(rows[-1]):
            raise UsageError(f"{place}: {wanted}: it has {', '.join(rows[-1]) or 'nothing'}")
        if not rows[-1].get("prompt", True) or not isinstance(rows[-1].get("prompt", []), (str, list)):
            raise UsageError(f"{place}: the prompt must be a text or chat messages, not empty")
    return rows


def prompts_of(args: Args, rng) -> tuple[list[dict], list[dict]]:
    """Prompts to train on and held-out prompts, none in both; in the small world first words of sentences."""
    if args.prompts is None:
        texts = {" " + " ".join(sentence(rng).split()[:PROMPT_WORDS]) for _ in range(20_000)}
        rows, held_out = [], []
        for text in sorted(texts):
            (held_out if is_held_out(text) else rows).append({"prompt": text})
        held_out = [held_out[i] for i in rng.permutation(len(held_out))]
    else:
        rows, held_out = read_rows(args.prompts, "prompt"), []
        if args.eval_prompts is None:
            if args.num_eval > (half := len(rows) // 2):
                print(f"--num-eval {args.num_eval}: only {half}, half of the {len(rows)} rows, are held out")
            first = len(rows) - min(args.num_eval, half)
            rows, held_out = rows[:first], rows[first:]
    if args.eval_prompts is not None:
        held_out = read_rows(args.eval_prompts, "prompt")
    held_out = held_out[: args.num_eval]
    seen = {str(row["prompt"]) for row in held_out}
    rows = [row for row in rows if str(row["prompt"]) not in seen]
    if len(rows) < args.num_prompts or not held_out:
        raise UsageError(
            f"there are {len(held_out)} held-out prompts and {len(rows)} others to train on, "
            f"fewer than --num-prompts {args.num_prompts}"
        )
    return rows, held_out


def encode(tokenizer, prompt, chat_template: bool, **settings) -> list[int]:
    """Token ids of a text or of chat messages; an assistant's last message is left open, to be continued."""
    if isinstance(prompt, str) and not (chat_template and tokenizer.chat_template):
        ids = tokens_of(tokenizer, prompt)
        return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids  # some tokenizers close every text
    if isinstance(prompt, str) and any(token in prompt for token in tokenizer.all_special_tokens):
        raise UsageError(f"a prompt has special tokens already, use --no-chat-template: {prompt[:60]!r}")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    with told(f"the chat template cannot take the prompt {messages!r}"):
        left_open = messages[-1]["role"] == "assistant"
        settings |= dict(continue_final_message=left_open, add_generation_prompt=not left_open)
        text = tokenizer.apply_chat_template(messages, tokenize=False, **settings)
    return tokens_of(tokenizer, text, add_special_tokens=False)


def encode_rows(rows, tokenizer, model, args) -> list[dict]:
    """Add the prompts' token ids; every prompt must fit the model, with room for the response."""
    size = model.get_input_embeddings().num_embeddings
    longest = getattr(model.config, "max_position_embeddings", None) or math.inf
    extra = json.loads(args.chat_template_kwargs)
    for number, row in enumerate(rows, 1):
        row["ids"] = encode(tokenizer, row["prompt"], args.chat_template, **extra)
        if not row["ids"]:
            raise UsageError(f"prompt {number} has no tokens: {row['prompt']!r}")
        if max(row["ids"]) >= size:
            raise UsageError(f"the tokenizer gives id {max(row['ids'])}, the model has {size} tokens")
        if len(row["ids"]) + args.max_new_tokens > longest:
            words = f"with --max-new-tokens {args.max_new_tokens} that is beyond the model's {longest}"
            raise UsageError(f"prompt {number} has {len(row['ids'])} tokens: {words}")
    return rows


REWARDS = {}  # names for --reward beside FILE.py:FUNCTION


def load_rewards(names: str) -> dict:
    """The reward functions of --reward by name: (prompts, completions, rows) -> list of float or None."""
    functions, modules = {}, {}
    for name in names.split("+"):
        path, _, attribute = name.rpartition(":")
        if name not in REWARDS and not path:
            raise UsageError(f"--reward {name} is neither FILE.py:FUNCTION nor one of {list(REWARDS)}")
        with told(f"--reward {name} cannot be loaded"):
            if path and path not in modules:  # as `import` does it, once: the files beside it are found
                sys.path.insert(0, str(Path(path).resolve().parent))
                stem = Path(path).stem + "_" * (Path(path).stem in sys.modules)
                spec = importlib.util.spec_from_file_location(stem, path)
                modules[path] = sys.modules[stem] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(modules[path])
            functions[name] = getattr(modules[path], attribute) if path else REWARDS[name]
    return functions


def score_texts(functions: dict, prompts, completions, rows) -> torch.Tensor:
    """Sum of the rewards of each completion, NaN where one is None. (B,), float32."""
    total, fields = torch.zeros(len(completions)), ", ".join(sorted(set().union(*rows) - {"ids"}))
    for name, function in functions.items():
        with told(f"--reward {name} failed with (prompts, completions, rows), each row with {fields}"):
            rewards = list(function(prompts, completions, rows))
            rewards = torch.tensor([math.nan if r is None else float(r) for r in rewards])
        if len(rewards) != len(completions):
            raise UsageError(f"--reward {name} returned {len(rewards)} for {len(completions)} completions")
        if rewards.isinf().any():
            raise UsageError(f"--reward {name} returned an infinite reward")
        total += rewards
    return total


@dataclass
class Task:
    """What is asked, and how responses end and are rewarded."""

    tokenizer: transformers.PreTrainedTokenizerBase
    stops: list[int]  # ids that end a response
    rows: list[dict]  # to train on; each has its "prompt", the prompt's "ids", and what the rewards read
    held_out: list[dict]  # for the evaluation
    rewards: dict  # by name: (prompts, completions, rows) -> list of float or None


def read_task(tokenizer, model, rows, held_out, args):
    """The task with the prompts' token ids; its rewards come later."""
    rows, held_out = (encode_rows(part, tokenizer, model, args) for part in (rows, held_out))
    return Task(tokenizer, stop_ids(tokenizer, model, args.stop), rows, held_out, {})


def supervised_finetune(model, tokenizer, rng, steps=200, batch_size=64):
    """Stage 1 in the small world: next words of sentences of the grammar, none with a held-out prompt."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step in tqdm(range(steps), desc="supervised start", unit=" steps"):
        texts = [text for text in (sentence(rng) for _ in range(batch_size)) if not is_held_out(text)]
        ids = [tokenizer(text).input_ids + [tokenizer.eos_token_id] for text in texts]
        width = max(map(len, ids))
        mask = torch.tensor([[1] * len(x) + [0] * (width - len(x)) for x in ids]).bool().to(model.device)
        ids = torch.tensor([x + [0] * (width - len(x)) for x in ids], device=model.device)
        logps = token_logps(model(ids[:, :-1], use_cache=False).logits, ids[:, 1:], 1.0)
        optimizer.zero_grad()
        (-masked_mean(logps, mask[:, 1:])).backward()
        optimizer.param_groups[0]["lr"] = 1e-3 * min((step + 1) / 20, 1.0 - 0.8 * step / steps)
        optimizer.step()


def sample_pairs(sampler, rng, args):
    """Two responses of the starting policy to each of --num-pairs prompts. The hidden preference says which
    is chosen, with noise: P(the first is) = sigmoid(difference). What the reward model of the small world
    learns from."""
    rows, pairs = sampler.task.rows, []
    rows = [rows[i] for i in rng.integers(len(rows), size=args.num_pairs)]
    for part in (rows[first : first + 256] for first in range(0, len(rows), 256)):
        batch, texts = sampler.respond(part, 2, args.temperature)
        scores = batch["rewards"].view(-1, 2).tolist()
        for row, one, two, (a, b) in zip(part, texts[::2], texts[1::2], scores):
            if one != two:
                if rng.random() > 1 / (1 + math.exp(b - a)):
                    one, two, a, b = two, one, b, a
                pairs.append({"prompt": row["prompt"], "chosen": one, "rejected": two, "truth": a - b})
    return pairs


def as_texts(pair: dict) -> dict:
    """The pair with the last answers as texts; they may come as messages, with what was said before them."""
    if all(isinstance(pair[side], str) for side in ("chosen", "rejected")):
        return pair | {"prompt": pair["prompt"]}
    (*before, better), (*same, worse) = pair["chosen"], pair["rejected"]
    if before != same or {better["role"], worse["role"]} != {"assistant"}:
        raise ValueError("chosen and rejected must differ in the last message alone, the assistant's")
    prompt = pair.get("prompt", [])
    if isinstance(prompt, list) and before[: len(prompt)] != prompt:  # goes on where the prompt ends
        before = prompt + before
    return pair | {"prompt": before or prompt, "chosen": better["content"], "rejected": worse["content"]}


def load_pairs(source: str, tokenizer) -> list[dict]:
    """Rows with "prompt", "chosen" and "rejected" of a .jsonl file; answers may be messages, as in TRL."""
    pairs = read_rows(source, "chosen", "rejected")
    for number, pair in enumerate(pairs, 1):
        place = f"{source}, line {number}"
        has = f"it has {', '.join(pair)}"
        with told(f"{place}: not an object with prompt, chosen, rejected, as texts or messages: {has}"):
            pair |= as_texts(pair)
        for name in ("prompt", "chosen", "rejected"):
            if not pair[name] or name != "prompt" and not isinstance(pair[name], str):
                raise UsageError(f"{place}: {name} must be a text or messages, not empty")
        if pair["chosen"] == pair["rejected"]:
            raise UsageError(f"{place}: chosen and rejected are the same")
        try:
            conversation(tokenizer, pair["prompt"], pair["chosen"])
            conversation(tokenizer, pair["prompt"], pair["rejected"])
        except UsageError as error:
            raise UsageError(f"{place}: {error}") from error
    if len(pairs) < 20:
        raise UsageError(f"{source} has {len(pairs)} pairs: too few, a tenth is held out")
    return pairs


def fit_reward_model(model, tokenizer, pairs, args) -> dict:
    """Stage 2: Bradley-Terry on preference pairs, a tenth held out. Returns the held-out accuracies."""
    if len(pairs) < 20:
        raise UsageError(f"there are {len(pairs)} preference pairs: too few, a tenth is held out")
    held_out, pairs = pairs[: len(pairs) // 10], pairs[len(pairs) // 10 :]
    key = lambda pair: (str(pair["prompt"]), *sorted((pair["chosen"], pair["rejected"])))
    known = {key(pair) for pair in held_out}
    pairs = [pair for pair in pairs if key(pair) not in known]
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, eps=1e-5)
    size = min(64, len(pairs))
    total = args.reward_epochs * len(pairs)
    steps = math.ceil(total / size)

    def difference(part):
        texts = [pair[side] for side in ("chosen", "rejected") for pair in part]
        scores = read_texts(model, tokenizer, [pair["prompt"] for pair in part] * 2, texts, args.batch_tokens)
        return scores[: len(part)] - scores[len(part) :]

    for step in tqdm(range(steps), desc="reward model", unit=" steps"):
        chosen = prompt_indices(step * size, min(size, total - step * size), len(pairs), args.seed)
        optimizer.zero_grad()
        preference_loss(difference([pairs[i] for i in chosen])).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.param_groups[0]["lr"] = args.reward_learning_rate * linear_schedule(step, steps)
        optimizer.step()
    with torch.no_grad():
        right = (difference(held_out) > 0).float().tolist()
    metrics = {"reward_model/accuracy": float(np.mean(right)), "reward_model/pairs": len(pairs)}
    truths = [pair.get("truth", 0.0) for pair in held_out]
    if any(truths):  # against the preference without its noise
        metrics["reward_model/noiseless"] = float(np.mean([r == (t > 0) for r, t in zip(right, truths) if t]))
    return metrics


def small_world(args: Args, folder: Path, rows, generator, rng) -> dict:
    """Stages 1 and 2 of the small world, kept in the run's folder. Returns the reward model's accuracies."""
    tokenizer = word_tokenizer()
    policy = tiny_model(tokenizer).to(generator.device)
    supervised_finetune(policy, tokenizer, rng)
    task = read_task(tokenizer, policy.eval(), rows, [], args)
    task.rewards = {"preference": hidden_preference}
    sampler = Sampler(policy, task, dataclasses.replace(args, dtype="float32"), generator)
    pairs, classifier = sample_pairs(sampler, rng, args), classifier_of(policy)
    metrics = fit_reward_model(classifier, tokenizer, pairs, args)
    for name, model in (("start", policy), ("reward_model", classifier)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return metrics


def scoring(args: Args, folder: Path, policy, policy_tokenizer, device):
    """The reward functions; and the reward model, if it reads the policy's tokens, for the value model."""
    if args.reward is not None:
        return load_rewards(args.reward), None
    trained = args.policy is None or args.train_reward_model is not None
    tokenizer, classifier = load_classifier(folder / "reward_model" if trained else args.reward_model)
    classifier = classifier.to(device).requires_grad_(False)

    def read(prompts, completions, rows):
        with torch.no_grad():
            return read_texts(classifier, tokenizer, prompts, completions, args.batch_tokens).tolist()

    same = type(classifier.base_model) is type(policy.base_model)
    same = same and tokenizer.get_vocab() == policy_tokenizer.get_vocab()
    return {"reward_model": read}, classifier if same else None


def stages(args: Args, rows, held_out, rng, generator, rank):
    """What comes before PPO; the first process trains. All that can be refused is, before there is a folder.

    Returns the run, task, policy, the reward model if it reads the policy's tokens, and its accuracies.
    """
    device, new = generator.device, rank == 0 and args.resume is None
    trains = args.policy is None or args.train_reward_model is not None  # a reward model in this run
    if args.policy is not None:
        tokenizer, policy = load_model(args.policy)
        task = read_task(tokenizer, policy, rows, held_out, args)
    if not trains:
        task.rewards, classifier = scoring(args, None, policy, tokenizer, device)
    elif args.policy is not None and args.resume is None:
        name = args.reward_model or args.policy
        pairs_tokenizer, classifier = load_classifier(name, new_head=args.reward_model is None)
        pairs = load_pairs(args.train_reward_model, pairs_tokenizer)
    run, accuracies = Run(args, args.task_name, args.total_steps), {}
    if dist.is_initialized():  # training a reward model takes longer than a collective may
        waiting = dist.new_group(backend="gloo", timeout=timedelta(days=30))
    if new and args.policy is None:
        accuracies = small_world(args, run.folder, rows, generator, rng)
    elif new and trains:
        accuracies = fit_reward_model(classifier.to(device), pairs_tokenizer, pairs, args)
        classifier.save_pretrained(run.folder / "reward_model")
        pairs_tokenizer.save_pretrained(run.folder / "reward_model")
    if dist.is_initialized():
        dist.barrier(waiting)
    if args.policy is None:
        tokenizer, policy = load_model(str(run.folder / "start"))
        task = read_task(tokenizer, policy, rows, held_out, args)
    if trains:
        task.rewards, classifier = scoring(args, run.folder, policy, tokenizer, device)
    return run, task, policy.to(device), classifier, accuracies


# ---- 5. Rollout --------------------------------------------------------------------------------------------


class Sampler:
    """Samples responses from a model; with --dtype bfloat16 from a copy of it with such parameters."""

    def __init__(self, model, task: Task, args: Args, generator: torch.Generator):
        self.model, self.task, self.args, self.generator = model, task, args, generator
        self.source = model if args.dtype == "float32" else copy.deepcopy(model).requires_grad_(False)
        self.refresh()

    def refresh(self) -> None:
        """Take the model's present weights; buffers stay as they are."""
        if self.source is not self.model:
            for copied, parameter in zip(self.source.parameters(), self.model.parameters()):
                copied.data = parameter.detach().bfloat16()

    @torch.no_grad()
    def generate(self, prompts, copies: int, temperature: float, generator=None):
        """Sample `copies` responses to each prompt, lists of ids (temperature 0: the likeliest tokens).

        Returns tokens (B, max_new_tokens), arbitrary after the stop token, their log-probabilities and the
        entropies of what they were drawn from; B = prompts x copies, the copies of a prompt side by side.
        """
        generator, stops, most = generator or self.generator, self.task.stops, self.args.max_new_tokens
        device, size, width = generator.device, len(prompts) * copies, max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)  # left-padded
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        mask = torch.arange(width, device=device) >= width - lengths[:, None]
        position = (mask.cumsum(1) - 1).clamp(min=0)
        inputs = dict(attention_mask=mask.long(), position_ids=position, use_cache=True)
        last = torch.tensor([width - 1], device=device)  # an index: a slice would copy the head each time
        out = self.source(ids, **inputs, logits_to_keep=last)
        out.cache.batch_repeat_interleave(copies)  # each prompt is computed once
        kept = out.logits, mask, position[:, -1:]
        logits, mask, position = (x.repeat_interleave(copies, 0) for x in kept)
        tokens = torch.full((size, most), stops[0], device=device)
        logps, entropies = torch.zeros(2, size, most, device=device)
        stop, alive = torch.tensor(stops, device=device), torch.arange(size, device=device)
        ended = torch.zeros(size, dtype=torch.bool, device=device)
        for t in range(most):
            every = (logits[:, -1].float() / (temperature or 1.0)).log_softmax(-1)  # (alive, V)
            if every[:, 0].isnan().any():
                raise FloatingPointError("the model's logits are not numbers")
            p = every.exp()
            if temperature == 0:
                token = every.argmax(-1, keepdim=True)
            else:  # the inverse of the distribution function: 5x faster than torch.multinomial
                cdf = p.cumsum(-1, dtype=torch.float64)
                u = torch.rand(len(p), 1, generator=generator, dtype=torch.float64, device=device)
                token = torch.searchsorted(cdf, u * cdf[:, -1:], right=True)
            tokens[alive, t] = token[:, 0]
            logps[alive, t] = every.gather(1, token)[:, 0]
            entropies[alive, t] = torch.special.entr(p).sum(-1)
            ended = ended | torch.isin(token[:, 0], stop)
            if ended.all() or t + 1 == most:
                break
            if ended.float().mean() > 0.25:  # let those go that have ended
                keep = (~ended).nonzero()[:, 0]
                out.cache.batch_select_indices(keep)
                alive, token, mask, position, ended = (x[keep] for x in (alive, token, mask, position, ended))
            mask, position = F.pad(mask, (0, 1), value=True), position + 1
            inputs = dict(attention_mask=mask.long(), position_ids=position, use_cache=True)
            out = self.source(token, **inputs, cache=out.cache)
            logits = out.logits
        return tokens, logps, entropies

    def respond(self, rows, copies: int, temperature: float, generator=None):
        """Responses to `rows` and their rewards: a dict of (B, ...) tensors; the completions as texts."""
        prompts = [row["ids"] for row in rows]
        tokens, logps, entropies = self.generate(prompts, copies, temperature, generator)
        mask = response_mask(tokens, self.task.stops)
        stop = mask & torch.isin(tokens, torch.tensor(self.task.stops, device=tokens.device))
        shown = [ids[keep].tolist() for ids, keep in zip(tokens, mask & ~stop)]
        texts = self.task.tokenizer.batch_decode(shown, skip_special_tokens=True)
        asked = [row for row in rows for _ in range(copies)]
        rewards = score_texts(self.task.rewards, [row["prompt"] for row in asked], texts, asked)
        out = {"tokens": tokens, "mask": mask, "sampled": logps.masked_fill(~mask, 0.0)}
        out |= {"entropies": entropies, "finished": stop.any(1), "rewards": rewards.to(tokens.device)}
        return out, texts


def prompt_indices(first: int, count: int, size: int, seed: int) -> list[int]:
    """Entries first, first + 1, ... of an endless sequence: `size` rows once an epoch, in ever new order."""
    order = {}
    for epoch in range(first // size, (first + count - 1) // size + 1):
        order[epoch] = np.random.default_rng([seed, epoch]).permutation(size)
    return [int(order[i // size][i % size]) for i in range(first, first + count)]


def lay_out(batch, rows, group_size):
    """The inputs of one micro-batch of `pack`, and the (row, column) before each response token.

    A row is a prompt and then, one after another, responses to it, each at the positions after the prompt and
    seeing the prompt and itself only.
    """
    chosen, device = [i for row in rows for i in row], batch["tokens"].device
    mask, tokens = batch["mask"][chosen], batch["tokens"][chosen]
    texts = iter([ids[:n] for ids, n in zip(tokens.tolist(), mask.sum(1).tolist())])
    ids, positions, owners, places = [], [], [], []
    for number, row in enumerate(rows):
        prompt = batch["prompts"][row[0] // group_size]
        ids.append(list(prompt))
        positions.append(list(range(len(prompt))))
        owners.append([0] * len(prompt))
        for owner, response in enumerate(itertools.islice(texts, len(row)), 1):
            inputs, start = response[:-1], len(ids[-1])
            places += [(number, at) for at in (len(prompt) - 1, *range(start, start + len(inputs)))]
            ids[-1] += inputs
            positions[-1] += range(len(prompt), len(prompt) + len(inputs))
            owners[-1] += [owner] * len(inputs)
    width = max(map(len, ids))
    padded = lambda rows: torch.tensor([x + [0] * (width - len(x)) for x in rows], device=device)
    ids, owners = padded(ids), padded(owners)
    furthest = max(map(max, positions))  # padding goes on from the row, within the model's positions
    positions = torch.tensor([x + list(range(len(x), width)) for x in positions], device=device)
    positions = positions.clamp(max=furthest)
    sees = None  # one response a row, padded on the right: the model's own causal mask is enough
    if len(chosen) > len(rows):
        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        sees = causal & ((owners[:, None] == 0) | (owners[:, None] == owners[..., None]))
        sees = sees[:, None]  # (rows, 1, width, width)
    inputs = {"input_ids": ids, "attention_mask": sees, "position_ids": positions, "use_cache": False}
    return inputs, *torch.tensor(places, device=device).T


def score(model, batch, rows, args):
    """Log-probabilities of the responses in one micro-batch of `pack`, 0 outside the mask. -> (n, L)."""
    chosen = [i for row in rows for i in row]
    mask, tokens = batch["mask"][chosen], batch["tokens"][chosen]
    inputs, row, column = lay_out(batch, rows, args.group_size)
    columns, column = column.unique(return_inverse=True)
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
        logits = model(**inputs, logits_to_keep=columns).logits[row, column]  # of response tokens only
    logps = token_logps(logits[None], tokens[mask][None], args.temperature)[0]
    return torch.zeros(mask.shape, device=tokens.device).masked_scatter(mask, logps)


def values_of(model, batch, rows, args):
    """Values before each response token, 0 outside the mask, for one micro-batch of `pack`. -> (n, L)."""
    mask = batch["mask"][[i for row in rows for i in row]]
    inputs, row, column = lay_out(batch, rows, args.group_size)
    with torch.autocast(mask.device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
        values = scalars(model, inputs)[row, column]
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, values)


def micro_batches(batch, samples, args):
    """`pack` for some samples of a batch."""
    prompts, lengths = list(map(len, batch["prompts"])), batch["mask"].sum(1).tolist()
    row = args.row_tokens and max(prompts, default=0) + args.row_tokens
    return pack(prompts, lengths, samples, args.group_size, row, args.batch_tokens)


@torch.no_grad()
def for_all(function, model, batch, args):
    """`score` or `values_of` for the whole batch. (B, L)."""
    out = torch.zeros_like(batch["sampled"])
    for rows in micro_batches(batch, list(range(len(out))), args):
        out[[i for row in rows for i in row]] = function(model, batch, rows, args)
    return out


def whole_batch(batch: dict) -> dict:
    """Local to global: the batches of all processes, of equal widths, as one, in the order of the ranks."""
    device = batch["tokens"].device
    parts = collect({name: x.cpu() if torch.is_tensor(x) else x for name, x in batch.items()})
    join = lambda xs: torch.cat(xs).to(device) if torch.is_tensor(xs[0]) else sum(xs, [])
    return {name: join([part[name] for part in parts]) for name in batch}


def sample_batch(learner, sampler, rows, args):
    """Responses to `rows`, this process's share, with all that PPO learns from, joined to the global batch:
    a dict of (B, L) tensors, and metrics, equal on all processes."""
    batch, texts = sampler.respond(rows, 1, args.temperature)  # [D5]
    width = max(collect(int(batch["mask"].sum(1).max())))
    batch = {name: x[:, :width] if x.dim() > 1 else x for name, x in batch.items()}
    batch |= {"prompts": [row["ids"] for row in rows], "texts": texts}
    batch["logps"] = batch["ref_logps"] = for_all(score, learner.policy, batch, args)  # [D8]
    if learner.reference is not None:
        batch["ref_logps"] = for_all(score, learner.reference, batch, args)
    batch["values"] = for_all(values_of, learner.critic, batch, args)
    batch = whole_batch(batch)
    scored = ~batch["rewards"].isnan()  # the others leave the batch, and all that is measured on it [D7]
    if not scored.any():
        raise UsageError(f"none of {len(scored)} completions has a score: all are None or NaN")
    keep = lambda x: x[scored] if torch.is_tensor(x) else list(itertools.compress(x, scored.tolist()))
    batch = {name: keep(x) for name, x in batch.items()}
    texts, mask, raw = batch.pop("texts"), batch["mask"], batch["rewards"]
    scores = (raw - learner.norm["mean"]) / learner.norm["std"]
    scores = scores - args.missing_eos_penalty * ~batch["finished"]  # [D6]
    rewards = shape_rewards(scores, batch["logps"], batch["ref_logps"], mask, learner.controller.coef)
    advantages, batch["returns"] = token_advantages(
        rewards, batch["values"], mask, args.gamma, args.gae_lambda
    )
    batch["advantages"] = whiten(advantages, mask)  # over the whole batch [D2]
    length, kl = mask.sum(1), approx_kl(batch["logps"], batch["ref_logps"], "k1").sum(1)
    return batch, {
        "charts/score": raw.mean().item(),
        "charts/unscored": (~scored).float().mean().item(),
        "charts/objective": rewards.sum(1).mean().item(),
        "charts/response_length": length.float().mean().item(),
        "charts/eos_share": batch["finished"].float().mean().item(),
        "charts/distinct": len(set(texts)) / len(texts),
        "charts/tokens": length.sum().item(),
        "losses/kl": kl.mean().item(),  # nats a response, of the policy to the reference
        "losses/kl_per_token": (kl.sum() / length.sum()).item(),
        "losses/entropy": masked_mean(batch["entropies"], mask).item(),
        "losses/mismatch": (batch["logps"] - batch["sampled"]).abs().sum().item() / length.sum().item(),
        "losses/explained_variance": explained_variance(batch["values"][mask], batch["returns"][mask]).item(),
    }  # fmt: skip


def normalisation(scores) -> dict:
    """Mean and deviation of the scores; 1 if all are equal, and there is nothing to divide by. (B,)"""
    if scores.isnan().all():
        raise UsageError(f"none of {len(scores)} completions has a score: all are None or NaN")
    scores = scores[~scores.isnan()]
    mean, std = scores.mean().item(), scores.std().item() if len(scores) > 1 else 0.0
    return {"mean": mean, "std": std if std > 1e-6 else 1.0}


@torch.no_grad()
def evaluate_policy(learner, sampler, args, rank=0, size=1):
    """One sample for each held-out prompt, the same random numbers each time, each process for its share.
    Returns metrics and records, global, equal on all processes."""
    rows, sums = sampler.task.held_out, collections.defaultdict(list)
    generator = own_generator(streams(args.seed)[3], rank, sampler.generator.device)
    mine, width = rows[share_of(len(rows), rank, size)], args.num_prompts // size
    for part in (mine[first : first + width] for first in range(0, len(mine), width)):
        batch, said = sampler.respond(part, 1, args.temperature, generator)
        batch["prompts"] = [row["ids"] for row in part]
        sums["texts"] += said
        sums["eval/score"] += batch["rewards"].tolist()
        sums["eval/eos_share"] += batch["finished"].float().tolist()
        sums["eval/response_length"] += batch["mask"].sum(1).tolist()
        if learner.reference is not None:
            logps, ref_logps = (
                for_all(score, model, batch, args) for model in (learner.policy, learner.reference)
            )
            sums["eval/kl"] += approx_kl(logps, ref_logps, "k1").sum(1).tolist()
        for ids, mask in zip(batch["tokens"], batch["mask"]):
            sums["pairs"] += itertools.pairwise(ids[mask].tolist())
    parts, prompts = collect(sums), [row["prompt"] for row in rows]
    names = dict.fromkeys(name for part in parts for name in part)
    sums = {name: sum((part[name] for part in parts), []) for name in names}
    texts, pairs = sums.pop("texts"), sums.pop("pairs")
    if args.policy is None:
        sums["eval/true_preference"] = hidden_preference(prompts, texts, rows)
    if np.isnan(sums["eval/score"]).all():
        raise UsageError(f"none of {len(rows)} held-out completions has a score: all are None or NaN")
    metrics = {name: float(np.nanmean(values)) for name, values in sums.items()}  # of what has a score
    metrics |= {
        "eval/distinct": len(set(texts)) / len(texts),
        "eval/distinct_2": len(set(pairs)) / max(len(pairs), 1),
    }
    records = zip(prompts, texts, (None if math.isnan(x) else x for x in sums["eval/score"]))
    return metrics, [{"prompt": p, "completion": text, "score": score} for p, text, score in records]


def keep_completions(run, metrics: dict, records: list[dict]) -> None:
    """Log an evaluation, keep its completions in the run's folder, show some."""
    if run.writes:
        with open(run.folder / "completions.jsonl", "a") as file:
            file.writelines(json.dumps({"step": run.step, **record}) + "\n" for record in records)
    tqdm.write(f"step {run.step}: " + ", ".join(f"{name} {value:.3f}" for name, value in metrics.items()))
    for record in records[:3]:
        tqdm.write(f"    {record}")
    run.log(metrics)


# ---- 6. Update ---------------------------------------------------------------------------------------------


def sum_gradients(parameters) -> None:
    """Sum the gradients over all processes, in one go; who has no samples takes part with zeros."""
    parameters = [p for p in parameters if p.requires_grad]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = sum_over_processes(torch.cat([gradient.flatten() for gradient in gradients]))
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad = part.view_as(p)


def update_models(learner, optimizer, batch, generator, args, rank=0, size=1):
    """Epochs of optimiser steps on policy and value model (Schulman et al. 2017, eq. 9). Returns metrics.

    `batch`, `generator` and the metrics are global; each process works on its share of each minibatch. A
    token is weighed by the trainer's over the sampler's probability: not 1 if the sampler is a rounded copy.
    """
    policy, critic, sums, norms = learner.policy, learner.critic, collections.Counter(), []
    names = ("policy_loss", "value_loss", "approx_kl", "clipfrac")
    epochs = (
        minibatches(len(batch["tokens"]), args.num_minibatches, generator) for _ in range(args.update_epochs)
    )
    policy.train(args.gradient_checkpointing)  # there is no dropout
    critic.train(args.gradient_checkpointing)
    for samples in itertools.chain.from_iterable(epochs):
        count = batch["mask"][samples].sum()  # of the whole optimiser step, over all processes [D4]
        if not count:
            continue  # fewer scored responses than minibatches: no step on momentum alone
        mine = samples[share_of(len(samples), rank, size)]
        optimizer.zero_grad()
        part = collections.Counter()
        for rows in micro_batches(batch, mine.tolist(), args):
            chosen = [i for row in rows for i in row]
            mask, sampled, old, adv, ret, old_values = (
                batch[name][chosen]
                for name in ("mask", "sampled", "logps", "advantages", "returns", "values")
            )
            logp = score(policy, batch, rows, args)
            weight = torch.exp(old - sampled).clamp(max=args.importance_cap)
            pg_loss = weight * policy_loss(logp, old, adv, args.clip_coef, args.clip_coef)
            pg_loss = masked_mean(pg_loss, mask, count)
            pg_loss.backward()
            values = values_of(critic, batch, rows, args)
            v_loss = masked_mean(value_loss(values, old_values, ret, args.value_clip), mask, count)
            (args.vf_coef * v_loss).backward()
            part["policy_loss"] += pg_loss.item()
            part["value_loss"] += v_loss.item()
            part["approx_kl"] += masked_mean(approx_kl(old, logp.detach(), "k3"), mask, count).item()
            share = clip_fraction(logp.detach()[mask], old[mask], adv[mask], args.clip_coef, args.clip_coef)
            part["clipfrac"] += share.item() * mask.sum().item() / count.item()
        part = torch.tensor([part[name] for name in names], dtype=torch.float64, device=count.device)
        part = dict(zip(names, sum_over_processes(part).tolist()))
        if args.target_kl is not None and part["approx_kl"] > args.target_kl:
            break  # ends the update: one loop holds all epochs
        if size > 1:  # here the gradient of the step is complete: the one place to sum it
            sum_gradients([*policy.parameters(), *critic.parameters()])
        sums.update(part)
        clip = lambda model: nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm).item()
        norms.append([clip(policy), clip(critic)])  # [D3]
        if not np.isfinite(norms[-1]).all():
            raise FloatingPointError("the gradient is not finite")
        optimizer.step()
    policy.eval()
    critic.eval()
    metrics = {f"losses/{name}": sums[name] / max(len(norms), 1) for name in names}
    means = np.mean(norms, 0).tolist() if norms else (0.0, 0.0)
    metrics |= dict(zip(("losses/grad_norm", "losses/value_grad_norm"), means))
    return metrics | {"charts/updates": len(norms)}


def check_first_batch(batch, metrics, args) -> None:
    """What must hold before the first update, in any changed copy too. [D11]"""
    error = (batch["logps"] - batch["sampled"])[batch["mask"]].abs()
    if error.mean() > 0.3 or args.dtype == "float32" and error.max() > 1e-3:  # bfloat16 rounds logits to 0.1
        words = "log-probabilities as sampled and as scored differ by up to"
        raise UsageError(f"self-check: {words} {error.max():.2g}")
    distance = (batch["logps"] - batch["ref_logps"]).abs().max()
    if distance > 1e-4 and args.start_from is None:
        raise UsageError(f"self-check: before the first update the reference differs by {distance:.2g}")
    if metrics["charts/eos_share"] == 0:
        tqdm.write("self-check: no response ended by a stop token: a larger --max-new-tokens, or --stop?")


# ---- 7. Main -----------------------------------------------------------------------------------------------


def main(args: Args) -> dict:
    """Train as `args` say; returns the last metrics. Numbers of prompts are of all processes together."""
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rank, size = join_processes(device)
    for name in ("num_prompts", "normalize_scores"):
        if 0 < getattr(args, name) < size:
            flag = f"--{name.replace('_', '-')} {getattr(args, name)}"
            raise UsageError(f"{flag}: that is less than one for each of the {size} processes")
    if args.policy is None:
        torch.set_num_threads(1)  # a model this small runs slower on more
    prompt_stream, token_stream, shuffle_stream, _ = streams(args.seed)  # [D10]
    generator, shuffle = own_generator(token_stream, rank, device), own_generator(shuffle_stream, 0, device)
    torch.manual_seed(args.seed)  # initial weights
    rng = np.random.default_rng(prompt_stream)
    run, task, policy, classifier, accuracies = stages(args, *prompts_of(args, rng), rng, generator, rank)
    learner, optimizer, trained = build(policy, classifier, args)
    sampler = Sampler(learner.policy, task, args, generator)

    controller, norm = learner.controller, learner.norm
    run.learnt = {"model": Weights(trained), "norm": Saved(lambda: dict(norm), norm.update)}
    run.parts = {"optimizer": optimizer, "shuffle": Saved(shuffle.get_state, shuffle.set_state)}
    run.parts["tokens"] = of_each_process(generator.get_state, generator.set_state, rank)
    run.parts["kl_coef"] = Saved(lambda: controller.coef, lambda coef: setattr(controller, "coef", coef))
    count = sum(p.numel() for p in trained.values())
    print(f"{args.task_name} on {device}, {count:,} trained parameters, writing {run.folder}")

    def prompts(first: int, count: int, seed: int) -> list[dict]:
        """This process's share of the next prompts."""
        chosen = prompt_indices(first, count, len(task.rows), seed)
        return [task.rows[i] for i in chosen[share_of(count, rank, size)]]

    with run:
        check_weights(trained.values())
        sampler.refresh()
        if run.step == 0 and args.normalize_scores and args.start_from is None:
            order = int(prompt_stream.generate_state(1)[0])  # not that of training
            first, _ = sampler.respond(prompts(0, args.normalize_scores, order), 1, args.temperature)
            norm |= normalisation(whole_batch(first)["rewards"])
        if run.step == 0:
            metrics, records = evaluate_policy(learner, sampler, args, rank, size)
            keep_completions(run, accuracies | metrics, records)
        for step in run:
            factor = min(1.0, (step + 1) / max(args.warmup_steps, 1))
            factor *= linear_schedule(step, args.total_steps) if args.anneal_lr else 1.0
            rates = args.learning_rate * factor, args.value_learning_rate * factor
            for group, lr in zip(optimizer.param_groups, rates):
                group["lr"] = lr
            begun = time.perf_counter()
            rows = prompts(step * args.num_prompts, args.num_prompts, args.seed)
            batch, charts = sample_batch(learner, sampler, rows, args)
            if step == 0 and args.self_checks:
                check_first_batch(batch, charts, args)
            sampled = time.perf_counter()
            losses = update_models(learner, optimizer, batch, shuffle, args, rank, size)
            ended = time.perf_counter()
            sampler.refresh()

            charts |= {"charts/learning_rate": rates[0], "charts/kl_coef": controller.coef}
            charts |= {"charts/TPS": charts["charts/tokens"] / (ended - begun)}
            charts |= {"time/rollout": sampled - begun, "time/update": ended - sampled}
            controller.update(charts["losses/kl"], len(batch["tokens"]))
            shown = {"score": f"{charts['charts/score']:.2f}", "KL": f"{charts['losses/kl']:.2f}"}
            run.log(losses | charts, shown | {"tok/s": f"{charts['charts/TPS']:.0f}"})
            if run.due(args.eval_every):
                keep_completions(run, *evaluate_policy(learner, sampler, args, rank, size))
    save_model(run, learner.policy, task.tokenizer)
    return run.metrics


# ---- Nothing below is the algorithm ------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None, defaults: dict | None = None) -> Args:
    """The command line over `defaults`, or over the flags of the run that is resumed or evaluated."""
    args = tyro.cli(Args, args=argv, default=Args(**(defaults or {})))
    if (path := args.resume or getattr(args, "eval_checkpoint", None)) is None:
        return args
    free = "resume eval_checkpoint start_from run_name device compile track wandb_project_name".split()
    saved = {n: value for n, value in load_checkpoint(path)["args"].items() if n not in free}
    args = tyro.cli(Args, args=argv, default=Args(**saved))
    for name, before in saved.items() if args.resume else ():
        now, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if now != before and not (name.startswith("total_") and now > before):  # it may become longer
            raise UsageError(f"{flag} {now} differs from the {before} of the run that --resume continues")
    return args


def collect(x) -> list:
    """The objects of all processes in the order of their ranks."""
    found = [x] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(found, x)
    return found


def join_processes(device: torch.device) -> tuple[int, int]:
    """This process's rank and the number of processes: torchrun's, or 0 and 1. Only the first one prints."""
    if "RANK" not in os.environ:
        return 0, 1
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(hours=2))  # others wait while the first evaluates
        # an exit hook that runs after that of vLLM, which may have done the same
        weakref.finalize(dist, lambda: dist.is_initialized() and dist.destroy_process_group())
    if dist.get_rank():
        sys.stdout = open(os.devnull, "w")
    return dist.get_rank(), dist.get_world_size()


def share_of(total: int, rank: int, size: int) -> slice:
    """Which of `total` items in a row belong to process `rank` of `size`."""
    return slice(total * rank // size, total * (rank + 1) // size)


def sum_over_processes(x: torch.Tensor) -> torch.Tensor:
    """Sum over all processes, in place; `x` as it is where there is one process."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def check_weights(parameters) -> None:
    """All processes must hold the same weights: compared by their sums, at start and at each checkpoint."""
    sums = collect([p.detach().double().sum().item() for p in parameters])
    if any(other != sums[0] for other in sums):
        raise RuntimeError("the weights of the processes differ")


def of_each_process(get, put, rank: int):
    """A part whose state each process has for itself: all are saved, and each takes its own back."""

    def load(states):
        if len(states) != (size := len(collect(None))):
            raise UsageError(f"--resume goes on with a run of {len(states)} processes, not of {size}")
        put(states[rank])

    return Saved(lambda: collect(get()), load)


def save_model(run, model, tokenizer) -> None:
    """Keep the trained model in the run's folder; say what the first and the last evaluation found."""
    if run.writes:
        if hasattr(model, "merge_and_unload"):
            model.save_pretrained(run.folder / "adapters")
            model = model.merge_and_unload()
        model.save_pretrained(run.folder / "model")
        tokenizer.save_pretrained(run.folder / "model")
        before = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[0])
        for name in (name for name in run.metrics if name.startswith("eval/")):
            print(f"{name}: {before.get(name, math.nan):.3f} before, {run.metrics[name]:.3f} after")
        print(f"the model is in {run.folder / 'model'}")


Saved = collections.namedtuple("Saved", "state_dict load_state_dict")  # a part that is two functions


def load_checkpoint(path: Path) -> dict:
    """A checkpoint, by its file or by the folder or the name of its run; with its "file"."""
    for file in (path, path / "checkpoint.pt", "runs" / path / "checkpoint.pt"):
        if file.is_file():
            with told(f"{file} is not a whole checkpoint of {SCRIPT}.py"):
                state = torch.load(file, map_location="cpu", weights_only=True) | {"file": file}
                if state["script"] != SCRIPT:
                    raise UsageError(f"{file} is a checkpoint of {state['script']}.py, not of {SCRIPT}.py")
                return state
    raise UsageError(f"there is no checkpoint {path}")


def load_parts(parts: dict, state: dict) -> None:
    """Give each part what a checkpoint holds for it."""
    for name, part in parts.items():
        with told(f"{state['file']} does not fit, in its part {name}"):
            part.load_state_dict(state["parts"][name])


class Run:
    """A run without its algorithm: folder, config.json, metrics.jsonl, bar, W&B, signals, checkpoints.

    What is saved and restored goes into `learnt` (weights and statistics: with them --start-from begins) and
    `parts` (all else) before `with`: by name, whatever has state_dict and load_state_dict.
    """

    def __init__(self, args: Args, task: str, iterations: int, size: int = 1):
        self.args, self.size, self.total = args, size, iterations * size  # each is of `size` steps
        self.learnt, self.parts, self.metrics, self.received, self.step = {}, {}, {}, [], 0
        self.writes = not (dist.is_initialized() and dist.get_rank())  # the first process does
        self.state = load_checkpoint(path) if (path := args.resume or args.start_from) else None
        if args.resume is None:
            self.folder = collect(self.new_folder(task) if self.writes else None)[0]
        else:
            self.folder, self.step = self.state["file"].parent, self.state["step"]
        if self.step >= self.total:
            raise UsageError(f"{self.folder} is finished, at step {self.step:,}: a larger total goes on")
        self.begun = self.saved = self.step

    def new_folder(self, task: str) -> Path:
        """runs/<name> with config.json; an existing folder is never touched."""
        default = f"{task}__{SCRIPT}__{self.args.seed}__{time.time_ns() // 10**6}"
        folder = Path("runs") / (self.args.run_name or re.sub(r"[^\w.-]+", "-", default))
        packages = ("torch", "numpy", "gymnasium", "mujoco", "ale_py", "transformers")
        versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in packages}
        config = {
            "args": vars(self.args),
            "versions": {"python": platform.python_version(), **versions},
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
            "processes": int(os.environ.get("WORLD_SIZE", 1)),
            "sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        }
        if folder.exists():
            raise UsageError(f"{folder} exists: choose another --run-name, or --resume {folder}")
        with told(f"cannot write {folder}"):
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps(config, indent=1, default=str) + "\n")
        return folder

    def __enter__(self):
        if self.args.resume is not None:
            load_parts(self.learnt | self.parts, self.state)
            for path in self.folder.glob("*.jsonl") if self.writes else ():
                lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
                path.write_text("".join(line for line in lines if json.loads(line)["step"] <= self.step))
            if self.state["total"] != self.total:
                print(f"{self.state['total']:,} steps become {self.total:,}: schedules are of the longer run")
        elif self.state is not None:
            load_parts(self.learnt, self.state)
        self.state = self.wandb = None
        if self.args.track and self.writes:
            import wandb

            settings = dict(project=self.args.wandb_project_name, config=vars(self.args), resume="allow")
            self.wandb = wandb.init(name=self.folder.name, id=self.folder.name, **settings)
        self.bar = tqdm(total=self.total, initial=self.step, unit=" steps", disable=not self.writes)
        self.before = {s: signal.signal(s, self.receive) for s in (signal.SIGINT, signal.SIGTERM)}
        self.start = time.perf_counter()
        return self

    def receive(self, signum, frame):
        """Ctrl-C and kill ask for an end after the current iteration; a second one ends at once."""
        self.received.append(signum)
        signal.signal(signum, self.before[signum])

    def __iter__(self):
        for iteration in range(self.step // self.size, self.total // self.size):
            self.step = (iteration + 1) * self.size
            yield iteration
            self.bar.update(self.size)
            if (signals := sum(collect(self.received), [])) and self.step < self.total:  # all leave together
                self.save()
                self.bar.write(f"stopped at step {self.step:,}; {sys.argv[0]} --resume {self.folder} goes on")
                raise SystemExit(128 + signals[0])

    def due(self, every: int) -> bool:
        """Each time that another `every` steps are full (0: never), and after the last step."""
        return self.step == self.total or bool(every) and self.step % every < self.size

    def log(self, metrics: dict, shown: dict | None = None) -> None:
        """A line of metrics.jsonl (readers join those of one step), and what the bar shows.

        Then the parts are saved if that is due: what follows in this step cannot lose them.
        """
        if self.metrics.get("step") != self.step:
            seconds = time.perf_counter() - self.start
            metrics |= {"charts/SPS": (self.step - self.begun) / seconds, "time/cpu": time.process_time()}
            self.metrics = {"step": self.step, "folder": str(self.folder)}
        self.metrics |= metrics
        if self.writes:
            finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"step": self.step} | finite) + "\n")
        if self.wandb:
            self.wandb.log(metrics, step=self.step)
        self.bar.set_postfix(shown or {}, refresh=False)
        if self.due(self.args.save_every * self.size):
            self.save()

    def save(self) -> None:
        """Write beside, then rename: a half-written file never replaces a good one."""
        if self.saved == self.step:
            return
        state = {"script": SCRIPT, "step": self.step, "total": self.total}
        state["args"] = json.loads(json.dumps(vars(self.args), default=str))
        state["parts"] = {name: part.state_dict() for name, part in (self.learnt | self.parts).items()}
        if self.writes:
            good, half = self.folder / "checkpoint.pt", self.folder / "checkpoint.tmp"
            with told(f"cannot write {good}"), contextlib.ExitStack() as last:
                last.callback(half.unlink, missing_ok=True)
                with open(half, "wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(half, good)
        self.saved = self.step
        collect(None)  # nobody leaves before it is written: torchrun ends all when one has left

    def __exit__(self, kind, error, trace):
        for signum, handler in self.before.items():
            signal.signal(signum, handler)
        self.bar.close()
        if self.wandb:
            self.wandb.finish()
        if kind is None:
            print(f"finished: {self.folder / 'checkpoint.pt'}")
        ended = isinstance(error, RuntimeError) and dist.is_initialized()  # another process did
        if ended or isinstance(error, (UsageError, FloatingPointError)):
            kept = f"{self.folder / 'checkpoint.pt'}, step {self.saved:,}" if self.saved else "none yet"
            text = f"stopped at step {self.step:,}: {error}; last good checkpoint: {kept}"
            raise (ConnectionError if ended else kind)(text) from error


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # a text that it cannot encode must not end the run
    try:
        main(command_line())
    except (UsageError, FloatingPointError, OSError, KeyboardInterrupt) as error:
        sys.exit(f"{Path(__file__).name}: {str(error) or 'interrupted'}")
