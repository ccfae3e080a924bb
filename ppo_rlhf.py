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
      and template, at the last real token.
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
import functools
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
import weakref
import zlib
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

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


class UsageError(ValueError):
    """A fault of the command line, a file, an environment or a model, told in one sentence."""


@dataclass
class Args:
    """Proximal policy optimisation of a language model against a reward model or function, in one file."""

    policy: str | None = None
    """causal language model to start from, a folder or a hub name; default: a small world made here"""
    prompts: str | None = None
    """FILE.jsonl with "prompt" (text, or chat messages) and any other fields"""
    eval_prompts: str | None = None
    """held-out FILE.jsonl; default: the last --num-eval rows of --prompts, which are never trained on"""
    num_eval: int = 256
    """held-out prompts used"""
    reward: str | None = None
    """FILE.py:FUNCTION (prompts, completions, rows) -> list of float or None; joined by +, they are added"""
    reward_model: str | None = None
    """sequence classifier with one output, read with its own tokenizer at the last real token"""
    train_reward_model: str | None = None
    """PAIRS.jsonl with "prompt", "chosen", "rejected": train --reward-model (or --policy) on it first"""
    num_pairs: int = 2000
    """preference pairs of the small world"""
    reward_epochs: int = 1
    """passes over the preference pairs"""
    reward_learning_rate: float = 1e-5
    """AdamW's step size for the reward model"""
    chat_template: bool = True
    """put a text prompt into the tokenizer's chat template, if it has one"""
    stop: str | None = None
    r"""one more token that ends a response, such as "\n"; the stop ids of tokenizer and model always do"""
    total_steps: int = 200
    """training steps: batches of sampled responses"""
    num_prompts: int = 128
    """prompts, with one response each, a step, over all processes"""
    max_new_tokens: int = 53
    """longest response, in tokens"""
    temperature: float = 0.7
    """of sampling and of every log-probability"""
    missing_eos_penalty: float = 1.0
    """taken from the score of a response that does not end by itself"""
    normalize_scores: int = 256
    """responses of the starting policy whose scores get mean 0 and deviation 1; 0: scores as they are"""
    kl_coef: float = 0.05
    """weight of the KL penalty against the starting policy, per token in the reward; 0: no reference"""
    kl_target: float | None = None
    """adapt --kl-coef to this KL divergence, in nats a response"""
    kl_horizon: int = 10_000
    """responses over which the coefficient adapts"""
    gamma: float = 1.0
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation"""
    clip_coef: float = 0.2
    """epsilon of the clipped surrogate"""
    importance_cap: float = 2.0
    """largest weight that corrects the sampler's error (trainer over sampler probability of a token)"""
    value_clip: float | None = 0.2
    """clip the value loss around the batch's values; None: off"""
    vf_coef: float = 0.1
    """weight of the value loss"""
    update_epochs: int = 4
    """passes over a batch"""
    num_minibatches: int = 8
    """optimiser steps a pass"""
    learning_rate: float = 1.5e-6
    """AdamW's step size for the policy"""
    value_learning_rate: float = 1e-5
    """and for the value model"""
    warmup_steps: int = 5
    """training steps over which the learning rates grow to their values"""
    anneal_lr: bool = True
    """decay the learning rates linearly to zero"""
    max_grad_norm: float = 1.0
    """largest norm of a gradient, of policy and value model apart"""
    target_kl: float | None = None
    """end an update before the step at which the approximate KL of a token exceeds this"""
    lora_rank: int = 0
    """train low-rank adapters on all linear layers of the policy (needs peft); 0: all weights"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast over float32 weights, sampling from a bfloat16 copy"""
    rollout: Literal["torch", "vllm"] = "torch"
    """what samples responses: the loop in this file, or vLLM (pip install vllm) with weights of --dtype"""
    vllm_memory: float = 0.3
    """share of the device's memory that vLLM takes, its weights included"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, more time"""
    batch_tokens: int = 8192
    """most tokens of a micro-batch, padding included"""
    eval_every: int = 20
    """training steps between two evaluations; 0: only before and after"""
    save_every: int = 25
    """training steps between two checkpoints"""
    self_checks: bool = True
    """check the first batch: sampled against scored log-probabilities, reference, stop token"""
    seed: int = 1
    """seed of all random streams"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the models live; auto takes cuda if there is one"""
    run_name: str | None = None
    """folder under runs/; default: task, script, seed and time"""
    resume: Path | None = None
    """continue the run in this folder, with its flags"""
    track: bool = False
    """log to Weights & Biases as well (WANDB_MODE=offline needs no network)"""
    wandb_project_name: str = "ppo-verified"
    """W&B project (the team comes from WANDB_ENTITY)"""

    def __post_init__(self):
        natural = (
            "num_eval num_pairs total_steps num_prompts max_new_tokens kl_horizon update_epochs save_every"
        )
        natural += " num_minibatches batch_tokens reward_epochs"
        for name, value in vars(self).items():
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                continue
            rule, holds = "must not be negative", 0 <= value < math.inf
            if name in natural.split():
                rule, holds = "must be at least 1", value >= 1
            elif name == "seed":
                rule, holds = "must lie in [0, 2**63)", 0 <= value < 2**63
            elif name in ("gamma", "gae_lambda", "vllm_memory"):
                rule, holds = "must lie in [0, 1]", 0 <= value <= 1
            elif name == "normalize_scores":
                rule, holds = "must be 0 or at least 2", value == 0 or value >= 2
            elif name.endswith("_rate") or name in (
                "temperature", "clip_coef", "value_clip", "max_grad_norm", "target_kl", "kl_target",
                "importance_cap",
            ):  # fmt: skip
                rule, holds = "must be positive and finite", 0 < value < math.inf
            if not holds:
                raise UsageError(f"--{name.replace('_', '-')} {value} {rule}")
        if self.num_prompts % self.num_minibatches:
            parts = f"--num-minibatches {self.num_minibatches}"
            raise UsageError(f"--num-prompts {self.num_prompts} do not divide into {parts}")
        if (self.policy is None) != (self.prompts is None):
            raise UsageError(f"--policy {self.policy} and --prompts {self.prompts} need each other")
        sources = (self.reward, self.reward_model or self.train_reward_model)
        if self.policy is not None and sum(source is not None for source in sources) != 1:
            raise UsageError(
                "--policy needs one source of scores: --reward, --reward-model or --train-reward-model"
            )
        if self.policy is None and any(source is not None for source in sources):
            raise UsageError(
                "the small world has a reward of its own: --reward and --reward-model need --policy"
            )
        if self.kl_target is not None and self.kl_coef == 0:
            raise UsageError(f"--kl-target {self.kl_target} needs a --kl-coef to start from")
        if self.kl_target is not None and 0.2 * self.num_prompts >= self.kl_horizon:
            raise UsageError(
                f"--kl-horizon {self.kl_horizon} is too short for --num-prompts {self.num_prompts}"
            )
        if self.run_name is not None and Path(self.run_name).name != self.run_name:
            raise UsageError(f"--run-name {self.run_name} must be the name of a folder under runs/")
        if self.rollout == "vllm" and self.policy is None:
            raise UsageError("--rollout vllm needs --policy")
        if self.rollout == "vllm" and self.lora_rank:
            raise UsageError(f"--rollout vllm takes whole weights, not those of --lora-rank {self.lora_rank}")
        if self.rollout == "vllm" and importlib.util.find_spec("vllm") is None:
            raise UsageError("--rollout vllm needs: pip install vllm")
        if self.track and importlib.util.find_spec("wandb") is None:
            raise UsageError("--track needs: pip install wandb")
        if self.run_name is not None and self.resume is not None:
            raise UsageError(f"--run-name {self.run_name} contradicts --resume {self.resume}")

    group_size = 1  # one response a prompt,
    row_tokens = 0  # in a row of its own: what `pack` needs to know

    @property
    def task_name(self) -> str:
        return "world" if self.prompts is None else re.sub(r"\W+", "-", Path(self.prompts).stem)


# What the small world needs; the command line goes over it.
BUILT_IN = dict(
    total_steps=100, max_new_tokens=20, temperature=1.0, missing_eos_penalty=3.0, num_pairs=2000,
    reward_epochs=5, reward_learning_rate=5e-4, kl_target=5.0, kl_horizon=2000, update_epochs=2,
    num_minibatches=4, learning_rate=2e-4, value_learning_rate=5e-4, anneal_lr=False,
)  # fmt: skip


def command_line(argv: list[str] | None = None) -> Args:
    """The command line, over the small world's settings if there is no --policy."""
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--policy", "--resume"):
        peek.add_argument(flag, nargs="?")
    given, _ = peek.parse_known_args(argv)
    defaults = BUILT_IN if given.policy is None and given.resume is None else {}
    return tyro.cli(Args, args=argv, default=Args(**defaults))


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
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        config = transformers.AutoConfig.from_pretrained(name)
        for key, value in config.to_dict().items():
            if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
                setattr(config, key, 0.0)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=torch.float32, attn_implementation="sdpa"
        )
    except Exception as error:  # each file format has exceptions of its own
        where = "" if Path(name).is_dir() else ", which is no folder here,"
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UsageError(f"{name}{where} cannot be loaded: {reason}") from error
    return tokenizer, model


def tokens_of(tokenizer, text: str, **settings) -> list[int]:
    """Token ids of a text; some tokenizers have none for some texts."""
    try:
        return tokenizer(text, **settings).input_ids
    except Exception as error:
        raise UsageError(f"the tokenizer cannot take the text {text!r}: {error}") from error


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
    try:
        import peft
    except ImportError as error:
        raise UsageError(f"--lora-rank {rank} needs: pip install peft") from error
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


@contextlib.contextmanager
def adapter_off(model):
    """The starting policy of a model with adapters: the same weights without them."""
    with model.disable_adapter():
        yield model


def bfloat16_copy(model, sampler=None):
    """A copy of the model with bfloat16 parameters (its buffers stay), or `sampler` brought up to date."""
    sampler = copy.deepcopy(model).requires_grad_(False) if sampler is None else sampler
    for copied, parameter in zip(sampler.parameters(), model.parameters()):
        copied.data = parameter.detach().bfloat16()
    return sampler


def load_classifier(name: str, new_head: bool = False):
    """Tokenizer and sequence classifier with one output, float32 weights, without dropout."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        config = transformers.AutoConfig.from_pretrained(name, num_labels=1)
        for key, value in config.to_dict().items():
            if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
                setattr(config, key, 0.0)
        model, found = transformers.AutoModelForSequenceClassification.from_pretrained(
            name, config=config, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
        )
        assert hasattr(model, "score"), "it has no score head that reads a causal model"
        assert new_head or not found["missing_keys"], "it has no weights for a score head"
    except Exception as error:  # each file format has exceptions of its own
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UsageError(f"{name} cannot be loaded as a classifier with one output: {reason}") from error
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
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # templates raise what they like
        reason = str(error).splitlines()[0]
        raise UsageError(f"the reward model's chat template cannot take {messages!r}: {reason}") from error
    return tokens_of(tokenizer, text, add_special_tokens=False)


def read_texts(model, tokenizer, prompts, completions, batch_tokens):
    """The reward model's score of each text, read at its last real token [D7]. -> (B,)."""
    ids = []
    for prompt, completion in zip(prompts, completions):
        ids.append(conversation(tokenizer, prompt, completion))
    order, scores = sorted(range(len(ids)), key=lambda i: -len(ids[i])), [None] * len(ids)
    size = max(1, batch_tokens // len(ids[order[0]]))
    for part in (order[first : first + size] for first in range(0, len(order), size)):
        width = len(ids[part[0]])
        rows = torch.tensor([ids[i] + [0] * (width - len(ids[i])) for i in part], device=model.device)
        ends = torch.tensor([len(ids[i]) - 1 for i in part], device=model.device)
        found = scalars(
            model, {"input_ids": rows, "use_cache": False}
        )  # causal: padding on the right is unseen
        for i, value in zip(part, found.gather(1, ends[:, None])[:, 0]):
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
        maybe = lambda kind, p: [kind] if rng.random() < p else []
        kinds = [
            "D",
            *maybe("A", 1.0 if first else 0.5),
            "N",
            "V",
            "D",
            *maybe("A", 0.5),
            "N",
            *maybe("R", 0.3),
        ]
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


def prompts_of(args: Args, rng) -> tuple[list[dict], list[dict]]:
    """Prompts to train on and held-out prompts, none in both; in the small world first words of sentences."""
    if args.prompts is None:
        texts = {" " + " ".join(sentence(rng).split()[:PROMPT_WORDS]) for _ in range(20_000)}
        rows, held_out = [], []
        for text in sorted(texts):
            (held_out if is_held_out(text) else rows).append({"prompt": text})
        held_out = [held_out[i] for i in rng.permutation(len(held_out))]
    else:
        rows, held_out = load_prompts(args.prompts), []
        if args.eval_prompts is None:
            rows, held_out = rows[: -args.num_eval], rows[-args.num_eval :]
    if args.eval_prompts is not None:
        held_out = load_prompts(args.eval_prompts)
    held_out = held_out[: args.num_eval]
    seen = {str(row["prompt"]) for row in held_out}
    rows = [row for row in rows if str(row["prompt"]) not in seen]
    if len(rows) < args.num_prompts or not held_out:
        raise UsageError(
            f"there are {len(held_out)} held-out prompts and {len(rows)} others to train on, "
            f"fewer than --num-prompts {args.num_prompts}"
        )
    return rows, held_out


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


def sample_pairs(model, tokenizer, rows, count, eos_ids, generator, rng, args):
    """Two responses of the starting policy to each of `count` prompts. The hidden preference says which is
    chosen, with noise: P(the first is) = sigmoid(difference). The data of the small world's reward model."""
    rows = [rows[i] for i in rng.integers(len(rows), size=count)]
    functions, pairs = {"preference": hidden_preference}, []
    for part in (rows[first : first + 256] for first in range(0, count, 256)):
        batch, texts = respond(
            model, tokenizer, part, 2, args.temperature, eos_ids, functions, generator, args
        )
        scores = batch["rewards"].view(-1, 2).tolist()
        for row, one, two, (a, b) in zip(part, texts[::2], texts[1::2], scores):
            if one != two:
                if rng.random() > 1 / (1 + math.exp(b - a)):
                    one, two, a, b = two, one, b, a
                pairs.append({"prompt": row["prompt"], "chosen": one, "rejected": two, "truth": a - b})
    return pairs


def load_prompts(source: str, fields=("prompt",)) -> list[dict]:
    """Rows of a .jsonl file that have the fields, none of them empty."""
    try:
        lines = Path(source).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {source}: {error}") from error
    rows = []
    for number, line in enumerate(lines if lines[-1] else lines[:-1], 1):
        try:
            rows.append(json.loads(line))
            empty = [
                name for name in fields if not rows[-1][name] or not isinstance(rows[-1][name], (str, list))
            ]
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            raise UsageError(f"{source}, line {number}: not an object with {', '.join(fields)}") from error
        if empty:
            raise UsageError(
                f"{source}, line {number}: {empty[0]} must be a text or chat messages, not empty"
            )
    return rows


def load_pairs(source: str, tokenizer) -> list[dict]:
    """Rows with "prompt", "chosen" and "rejected" of a .jsonl file."""
    pairs = load_prompts(source, ("prompt", "chosen", "rejected"))
    for number, pair in enumerate(pairs, 1):
        if pair["chosen"] == pair["rejected"]:
            raise UsageError(f"{source}, line {number}: chosen and rejected are the same")
        for side in ("chosen", "rejected"):
            if not isinstance(pair[side], str):
                raise UsageError(f"{source}, line {number}: {side} must be a text")
            try:
                conversation(tokenizer, pair["prompt"], pair[side])
            except UsageError as error:
                raise UsageError(f"{source}, line {number}: {error}") from error
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
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.reward_learning_rate, weight_decay=0.0, eps=1e-5
    )
    size = min(64, len(pairs))
    steps = max(1, args.reward_epochs * len(pairs) // size)

    def difference(part):
        texts = [pair[side] for side in ("chosen", "rejected") for pair in part]
        scores = read_texts(model, tokenizer, [pair["prompt"] for pair in part] * 2, texts, args.batch_tokens)
        return scores[: len(part)] - scores[len(part) :]

    for step in tqdm(range(steps), desc="reward model", unit=" steps"):
        chosen = prompt_indices(step * size, size, len(pairs), args.seed)
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


def encode(tokenizer, prompt, chat_template: bool) -> list[int]:
    """Token ids of a text or of chat messages; an assistant's last message is left open, to be continued."""
    if isinstance(prompt, str) and not (chat_template and tokenizer.chat_template):
        ids = tokens_of(tokenizer, prompt)
        return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids  # some tokenizers close every text
    if isinstance(prompt, str) and any(token in prompt for token in tokenizer.all_special_tokens):
        raise UsageError(f"a prompt has special tokens already, use --no-chat-template: {prompt[:60]!r}")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        left_open = messages[-1]["role"] == "assistant"
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, continue_final_message=left_open, add_generation_prompt=not left_open
        )
    except Exception as error:  # templates raise what they like
        raise UsageError(f"the chat template cannot take the prompt {messages!r}: {error}") from error
    return tokens_of(tokenizer, text, add_special_tokens=False)


REWARDS = {}  # names for --reward beside FILE.py:FUNCTION


def load_rewards(names: str) -> dict:
    """The reward functions of --reward by name: (prompts, completions, rows) -> list of float or None."""
    functions = {}
    for name in names.split("+"):
        path, _, attribute = name.rpartition(":")
        if name not in REWARDS and not path:
            raise UsageError(f"--reward {name} is neither FILE.py:FUNCTION nor one of {list(REWARDS)}")
        try:
            if path:
                spec = importlib.util.spec_from_file_location(Path(path).stem, path)
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
            functions[name] = getattr(module, attribute) if path else REWARDS[name]
        except Exception as error:
            raise UsageError(f"--reward {name} cannot be loaded: {error}") from error
    return functions


def score_texts(functions: dict, prompts, completions, rows) -> torch.Tensor:
    """Sum of the rewards of each completion, NaN where one is None. (B,), float32."""
    total = torch.zeros(len(completions))
    for name, function in functions.items():
        try:
            rewards = list(function(prompts, completions, rows))
            rewards = torch.tensor([math.nan if r is None else float(r) for r in rewards])
        except Exception as error:
            raise UsageError(f"--reward {name} raised {type(error).__name__}: {error}") from error
        if len(rewards) != len(completions):
            raise UsageError(f"--reward {name} returned {len(rewards)} for {len(completions)} completions")
        if rewards.isinf().any():
            raise UsageError(f"--reward {name} returned an infinite reward")
        total += rewards
    return total


def encode_rows(rows, tokenizer, model, args) -> list[dict]:
    """Add the prompts' token ids; every prompt must fit the model, with room for the response."""
    size = model.get_input_embeddings().num_embeddings
    longest = getattr(model.config, "max_position_embeddings", None) or math.inf
    for number, row in enumerate(rows, 1):
        row["ids"] = encode(tokenizer, row["prompt"], args.chat_template)
        if not row["ids"]:
            raise UsageError(f"prompt {number} has no tokens: {row['prompt']!r}")
        if max(row["ids"]) >= size:
            raise UsageError(f"the tokenizer gives id {max(row['ids'])}, the model has {size} tokens")
        if len(row["ids"]) + args.max_new_tokens > longest:
            raise UsageError(
                f"prompt {number} has {len(row['ids'])} tokens: with --max-new-tokens {args.max_new_tokens} "
                f"that is beyond the model's {longest}"
            )
    return rows


# ---- 5. Rollout --------------------------------------------------------------------------------------------


class Engine:
    """vLLM in this process, an engine a device, as the sampler (--rollout vllm).

    It starts with random weights and is given all of ours, so that the check of the first batch sees any that
    did not arrive.
    """

    def __init__(self, name, longest, args):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
            "0"  # in this process: weights are handed over as they are
        )
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import vllm

        where = {"distributed_executor_backend": "external_launcher"} if dist.is_initialized() else {}
        self.llm = vllm.LLM(
            model=name, load_format="dummy", skip_tokenizer_init=True, dtype=args.dtype, seed=args.seed,
            max_model_len=longest, gpu_memory_utilization=args.vllm_memory,
            logprobs_mode="processed_logprobs",  # after the temperature: of what was drawn from
            generation_config="vllm", **where,  # not the checkpoint's, with its top-k and penalties
        )  # fmt: skip
        self.settings = functools.partial(vllm.SamplingParams, logprobs=0, detokenize=False)

    def load(self, model):
        """Take the model's weights as they are now, and forget what was computed with others."""
        weights = ((name, parameter.detach()) for name, parameter in model.named_parameters())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept what it computed with older weights")

    def generate(self, prompts, copies, max_new_tokens, temperature, eos_ids, generator):
        """As `generate` below; in place of an entropy -log p of the token, which has the same mean."""
        device, stops = generator.device, list(eos_ids)
        settings = dict(n=copies, temperature=temperature, max_tokens=max_new_tokens, stop_token_ids=stops)
        seeds = torch.randint(2**62, (len(prompts),), generator=generator, device=device).tolist()
        requests = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [self.settings(seed=seed, **settings) for seed in seeds],
            use_tqdm=False,
        )
        answers = [answer for request in requests for answer in request.outputs]
        tokens = torch.full((len(answers), max_new_tokens), stops[0])
        logps = torch.zeros(tokens.shape)
        for i, answer in enumerate(answers):
            ids, length = list(answer.token_ids), len(answer.token_ids)
            if length < max_new_tokens and (not ids or ids[-1] not in stops):
                raise RuntimeError(f"vLLM broke a response off after {length} tokens: {answer.finish_reason}")
            tokens[i, :length] = torch.tensor(ids)
            logps[i, :length] = torch.tensor([every[t].logprob for t, every in zip(ids, answer.logprobs)])
        if logps.isnan().any():
            raise FloatingPointError("the model's logits are not numbers")
        return tokens.to(device), logps.to(device), -logps.to(device)


def new_sampler(model, name, rows, args):
    """What responses are sampled from: the model itself, its bfloat16 copy, or vLLM (--rollout)."""
    if args.rollout == "vllm":
        return Engine(name, max(len(row["ids"]) for row in rows) + args.max_new_tokens, args)
    return model if args.dtype == "float32" else bfloat16_copy(model)


def refresh(sampler, model) -> None:
    """Give the sampler the model's weights."""
    if isinstance(sampler, Engine):
        sampler.load(model)
    elif sampler is not model:
        bfloat16_copy(model, sampler)


@torch.no_grad()
def generate(model, prompts, copies, max_new_tokens, temperature, eos_ids, generator):
    """Sample `copies` responses to each prompt (temperature 0: the likeliest tokens).

    Returns tokens (B, max_new_tokens), arbitrary after the stop token, their log-probabilities and the
    entropies of the distributions that they were drawn from; B = prompts x copies,
    the copies of a prompt side by side.
    """
    if isinstance(model, Engine):
        return model.generate(prompts, copies, max_new_tokens, temperature, eos_ids, generator)
    device, size, width = generator.device, len(prompts) * copies, max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)  # left-padded
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    mask = torch.arange(width, device=device) >= width - lengths[:, None]
    position = (mask.cumsum(1) - 1).clamp(min=0)
    last = torch.tensor([width - 1], device=device)  # an index: a slice would copy the head for each prompt
    out = model(ids, attention_mask=mask.long(), position_ids=position, use_cache=True, logits_to_keep=last)
    out.cache.batch_repeat_interleave(copies)  # each prompt is computed once
    logits, mask, position = (x.repeat_interleave(copies, 0) for x in (out.logits, mask, position[:, -1:]))
    tokens = torch.full((size, max_new_tokens), eos_ids[0], device=device)
    logps, entropies = torch.zeros(2, size, max_new_tokens, device=device)
    stop, alive = torch.tensor(eos_ids, device=device), torch.arange(size, device=device)
    ended = torch.zeros(size, dtype=torch.bool, device=device)
    for t in range(max_new_tokens):
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
        if ended.all() or t + 1 == max_new_tokens:
            break
        if ended.float().mean() > 0.25:  # let those go that have ended
            keep = (~ended).nonzero()[:, 0]
            out.cache.batch_select_indices(keep)
            alive, token, mask, position, ended = (x[keep] for x in (alive, token, mask, position, ended))
        mask, position = F.pad(mask, (0, 1), value=True), position + 1
        out = model(token, attention_mask=mask.long(), position_ids=position, cache=out.cache, use_cache=True)
        logits = out.logits
    return tokens, logps, entropies


def prompt_indices(first: int, count: int, size: int, seed: int) -> list[int]:
    """Entries first, first + 1, ... of an endless sequence: `size` rows once an epoch, in ever new order."""
    order = {}
    for epoch in range(first // size, (first + count - 1) // size + 1):
        order[epoch] = np.random.default_rng([seed, epoch]).permutation(size)
    return [int(order[i // size][i % size]) for i in range(first, first + count)]


def respond(sampler, tokenizer, rows, copies, temperature, eos_ids, functions, generator, args):
    """Responses to `rows` and their rewards: a dict of (B, ...) tensors; the completions as texts."""
    tokens, logps, entropies = generate(
        sampler, [row["ids"] for row in rows], copies, args.max_new_tokens, temperature, eos_ids, generator
    )
    mask = response_mask(tokens, eos_ids)
    stop = mask & torch.isin(tokens, torch.tensor(eos_ids, device=tokens.device))
    shown = [ids[keep].tolist() for ids, keep in zip(tokens, mask & ~stop)]
    texts = tokenizer.batch_decode(shown, skip_special_tokens=True)
    repeated = [row for row in rows for _ in range(copies)]
    rewards = score_texts(functions, [row["prompt"] for row in repeated], texts, repeated).to(tokens.device)
    out = {"tokens": tokens, "mask": mask, "sampled": logps.masked_fill(~mask, 0.0), "rewards": rewards}
    return out | {"entropies": entropies, "finished": stop.any(1)}, texts


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
    ids, owners = (
        torch.tensor([x + [0] * (width - len(x)) for x in y], device=device) for y in (ids, owners)
    )
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


def token_advantages(rewards, values, mask, gamma, lam):
    """GAE over the tokens of each response, which ends there, also when cut off. (B, L) -> (B, L), (B, L)."""
    after = F.pad(values[:, 1:], (0, 1)) * F.pad(mask[:, 1:], (0, 1))  # 0 after the last token
    last = ~F.pad(mask[:, 1:], (0, 1))
    advantages, returns = compute_gae(rewards.T, values.T, after.T, last.T, last.T, gamma, lam)
    return advantages.T.masked_fill(~mask, 0.0), returns.T.masked_fill(~mask, 0.0)


def whole_batch(batch: dict) -> dict:
    """Local to global: the batches of all processes, of equal widths, as one, in the order of the ranks."""
    device = batch["tokens"].device
    parts = collect({name: x.cpu() if torch.is_tensor(x) else x for name, x in batch.items()})
    join = lambda xs: torch.cat(xs).to(device) if torch.is_tensor(xs[0]) else sum(xs, [])
    return {name: join([part[name] for part in parts]) for name in batch}


def sample_batch(
    sampler, policy, reference, critic, tokenizer, rows, eos_ids, functions, norm, coef, generator, args
):
    """Responses to `rows`, this process's share, with all that PPO learns from, joined to the global batch:
    a dict of (B, L) tensors, and metrics, equal on all processes."""
    batch, texts = respond(sampler, tokenizer, rows, 1, args.temperature, eos_ids, functions, generator, args)
    width = max(collect(int(batch["mask"].sum(1).max())))
    batch = {name: x[:, :width] if x.dim() > 1 else x for name, x in batch.items()}
    batch |= {"prompts": [row["ids"] for row in rows], "texts": texts}
    batch["logps"] = batch["ref_logps"] = for_all(score, policy, batch, args)
    if reference is not None:
        with reference() as frozen:
            batch["ref_logps"] = for_all(score, frozen, batch, args)
    batch["values"] = for_all(values_of, critic, batch, args)
    batch = whole_batch(batch)
    texts, mask, raw = batch.pop("texts"), batch["mask"], batch["rewards"]
    if raw.isnan().any():
        raise UsageError("PPO needs a score for every completion, and one was None or NaN")
    scores = (raw - norm["mean"]) / norm["std"] - args.missing_eos_penalty * ~batch["finished"]
    rewards = shape_rewards(scores, batch["logps"], batch["ref_logps"], mask, coef)
    advantages, batch["returns"] = token_advantages(
        rewards, batch["values"], mask, args.gamma, args.gae_lambda
    )
    batch["advantages"] = whiten(advantages, mask)  # over the whole batch [D2]
    length, kl = mask.sum(1), approx_kl(batch["logps"], batch["ref_logps"], "k1").sum(1)
    return batch, {
        "charts/score": raw.mean().item(),
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
    mean, std = scores.mean().item(), scores.std().item()
    if not math.isfinite(mean):
        raise UsageError("PPO needs a score for every completion, and one was None or NaN")
    return {"mean": mean, "std": std if std > 1e-6 else 1.0}


@torch.no_grad()
def evaluate_policy(
    sampler, policy, reference, tokenizer, rows, eos_ids, functions, truth, args, device, rank=0, size=1
):
    """One sample for each held-out prompt, the same random numbers each time, each process for its share of
    `rows`. Returns metrics and records, global, equal on all processes."""
    generator, sums = own_generator(streams(args.seed)[3], rank, device), collections.defaultdict(list)
    mine, width = rows[share_of(len(rows), rank, size)], args.num_prompts // size
    for part in (mine[first : first + width] for first in range(0, len(mine), width)):
        batch, said = respond(
            sampler, tokenizer, part, 1, args.temperature, eos_ids, functions, generator, args
        )
        batch["prompts"] = [row["ids"] for row in part]
        sums["texts"] += said
        sums["eval/score"] += batch["rewards"].tolist()
        sums["eval/eos_share"] += batch["finished"].float().tolist()
        sums["eval/response_length"] += batch["mask"].sum(1).tolist()
        if reference is not None:
            with reference() as frozen:
                ref = for_all(score, frozen, batch, args)
            sums["eval/kl"] += approx_kl(for_all(score, policy, batch, args), ref, "k1").sum(1).tolist()
        for ids, mask in zip(batch["tokens"], batch["mask"]):
            sums["pairs"] += itertools.pairwise(ids[mask].tolist())
    parts, prompts = collect(sums), [row["prompt"] for row in rows]
    names = dict.fromkeys(name for part in parts for name in part)
    sums = {name: sum((part[name] for part in parts), []) for name in names}
    texts, pairs = sums.pop("texts"), sums.pop("pairs")
    if truth is not None:
        sums["eval/true_preference"] = truth(prompts, texts, rows)
    metrics = {name: float(np.mean(values)) for name, values in sums.items()}
    metrics |= {
        "eval/distinct": len(set(texts)) / len(texts),
        "eval/distinct_2": len(set(pairs)) / max(len(pairs), 1),
    }
    records = zip(prompts, texts, sums["eval/score"])
    return metrics, [{"prompt": p, "completion": text, "score": score} for p, text, score in records]


# ---- 6. Update ---------------------------------------------------------------------------------------------


def sum_gradients(parameters) -> None:
    """Sum the gradients over all processes, in one go; who has no samples takes part with zeros."""
    parameters = [p for p in parameters if p.requires_grad]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = sum_over_processes(torch.cat([gradient.flatten() for gradient in gradients]))
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad = part.view_as(p)


def update_models(policy, critic, optimizer, batch, generator, args, rank=0, size=1):
    """Epochs of optimiser steps on policy and value model (Schulman et al. 2017, eq. 9). Returns metrics.

    `batch`, `generator` and the metrics are global; each process works on its share of each minibatch.
    """
    sums, norms, steps = collections.Counter(), [], 0
    names = ("policy_loss", "value_loss", "approx_kl", "clipfrac")
    epochs = (
        minibatches(len(batch["tokens"]), args.num_minibatches, generator) for _ in range(args.update_epochs)
    )
    policy.train(args.gradient_checkpointing)  # there is no dropout
    critic.train(args.gradient_checkpointing)
    for samples in itertools.chain.from_iterable(epochs):
        count = batch["mask"][samples].sum()  # of the whole optimiser step, over all processes [D4]
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
        # Here the gradient of the step is complete: the one place to sum it over processes.
        if dist.is_initialized() and dist.get_world_size() > 1:  # vLLM has a group of one
            sum_gradients([*policy.parameters(), *critic.parameters()])
        steps += 1
        sums.update(part)
        clip = lambda model: nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm).item()
        norms.append([clip(policy), clip(critic)])  # [D3]
        if not np.isfinite(norms[-1]).all():
            raise FloatingPointError("the gradient is not finite")
        optimizer.step()
    policy.eval()
    critic.eval()
    metrics = {f"losses/{name}": sums[name] / max(steps, 1) for name in names}
    grad_norm, value_grad_norm = np.mean(norms, 0).tolist() if norms else (0.0, 0.0)
    return metrics | {
        "losses/grad_norm": grad_norm,
        "losses/value_grad_norm": value_grad_norm,
        "charts/updates": steps,
    }


def check_first_batch(batch, metrics, args) -> None:
    """What must hold before the first update, in any changed copy too. [D11]"""
    error = (batch["logps"] - batch["sampled"])[batch["mask"]].abs()
    exact = args.dtype == "float32" and args.rollout == "torch"  # bfloat16 rounds logits to 0.1
    if error.mean() > 0.3 or exact and error.max() > 1e-3:
        hint = "; vLLM has not taken all weights" if args.rollout == "vllm" else ""
        raise UsageError(
            f"self-check: log-probabilities as sampled and as scored differ by up to {error.max():.2g}{hint}"
        )
    distance = (batch["logps"] - batch["ref_logps"]).abs().max()
    if distance > 1e-4:
        raise UsageError(f"self-check: before the first update the reference differs by {distance:.2g}")
    if metrics["charts/eos_share"] == 0:
        tqdm.write("self-check: no response ended by a stop token: a larger --max-new-tokens, or --stop?")


# ---- 7. Runs: processes, folder, checkpoint, signals -------------------------------------------------------


def join_processes(device: torch.device) -> tuple[int, int]:
    """This process's rank and the number of processes: torchrun's, or 0 and 1. Only the first one prints."""
    if "RANK" not in os.environ:
        return 0, 1
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
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


def collect(x) -> list:
    """The objects of all processes in the order of their ranks."""
    found = [x] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(found, x)
    return found


def check_weights(parameters) -> None:
    """All processes must hold the same weights: compared by their sums, at start and at each checkpoint."""
    sums = collect([p.detach().double().sum().item() for p in parameters])
    if any(other != sums[0] for other in sums):
        raise RuntimeError("the weights of the processes differ")


def save_checkpoint(path: Path, state: dict) -> None:
    """Write beside, then rename: a half-written file never replaces a good one."""
    with open(path.with_suffix(".tmp"), "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path.with_suffix(".tmp"), path)


def load_checkpoint(path: Path) -> dict:
    if not path.is_file():
        raise UsageError(f"there is no checkpoint {path}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        assert state["script"] == SCRIPT
    except Exception as error:
        raise UsageError(f"{path} is not a whole checkpoint of {SCRIPT}.py") from error
    return state


def resumed_args(args: Args, saved: dict) -> Args:
    """The flags of the interrupted run; another value given now is an error."""
    free, default = ("resume", "run_name", "device", "compile", "track", "wandb_project_name"), Args()
    kept = {name: value for name, value in saved.items() if name not in free}
    for name, value in kept.items():
        if getattr(args, name) not in (getattr(default, name), value):
            flag = f"--{name.replace('_', '-')} {getattr(args, name)}"
            raise UsageError(f"{flag} differs from the {value} of the run that --resume continues")
    return dataclasses.replace(args, **kept)


@contextlib.contextmanager
def stop_signals():
    """Ctrl-C and kill ask for an end after the current iteration; a second one ends at once."""
    received = []

    def handle(signum, frame):
        received.append(signum)
        signal.signal(signum, before[signum])

    before = {signum: signal.signal(signum, handle) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def open_run(args: Args, device: torch.device) -> Path:
    """A new folder runs/<name> with config.json; an existing one is never touched."""
    default = f"{args.task_name}__{SCRIPT}__{args.seed}__{time.time_ns() // 10**6}"
    folder = Path("runs") / (args.run_name or default)
    packages = ("torch", "numpy", "gymnasium", "mujoco", "ale_py", "transformers")
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in packages}
    config = {
        "args": dataclasses.asdict(args),
        "versions": {"python": platform.python_version(), **versions},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu",
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
        "sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
    }
    try:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1, default=str) + "\n")
    except FileExistsError:
        raise UsageError(f"{folder} exists: choose another --run-name, or --resume {folder}") from None
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}") from error
    return folder


def write_metrics(path: Path, step: int, metrics: dict) -> None:
    """One line of JSON; NaN becomes null."""
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    with open(path, "a") as file:
        file.write(json.dumps({"step": step, **finite}) + "\n")


def cut_log(path: Path, step: int) -> None:
    """Drop the lines of a resumed run that are later than its checkpoint, or half written."""
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    path.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))


def restore(folder, state, weights, trained, optimizer, generator, shuffle, rank) -> None:
    """Bring the trained weights, the optimiser, the random streams and the logs back to a checkpoint."""
    if {n: p.shape for n, p in weights.items()} != {n: p.shape for n, p in trained.items()}:
        raise UsageError("the checkpoint does not fit: the model has other parameters")
    for name, parameter in trained.items():
        parameter.data.copy_(weights[name])
    optimizer.load_state_dict(state["optimizer"])
    generator.set_state(state["tokens"][rank].clone())  # torch crashes on a view
    shuffle.set_state(state["shuffle"])
    for name in ("metrics.jsonl", "completions.jsonl") if rank == 0 else ():
        cut_log(folder / name, state["step"])


def start_tracking(args: Args, folder: Path):
    """The run in Weights & Biases; a resumed run goes on there."""
    import wandb

    settings = dict(name=folder.name, id=folder.name, resume="allow", config=vars(args))
    return wandb.init(project=args.wandb_project_name, **settings)


def leave(signum: int, step: int, size: int, folder: Path) -> None:
    """End as the signal asks, after a word on how to go on."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    nodes = f" --nnodes {size // local} ..." if size > local else ""
    launch = f"torchrun --nproc-per-node {local}{nodes}" if size > 1 else "python"
    print(f"stopped at step {step:,}; continue with: {launch} {SCRIPT}.py --resume {folder}")
    raise SystemExit(128 + signum)


def name_last_checkpoint(error: Exception, step: int, folder: Path) -> None:
    """Raise `error` again with its step and what is left; another process's end is a ConnectionError."""
    if isinstance(error, RuntimeError) and not dist.is_initialized():
        raise error
    good = folder / "checkpoint.pt"
    kept = f"{good}, step {load_checkpoint(good)['step']:,}" if good.exists() else "none yet"
    text = f"stopped at step {step:,}: {error}; last good checkpoint: {kept}"
    raise (ConnectionError if isinstance(error, RuntimeError) else type(error))(text) from error


# ---- 8. Main -----------------------------------------------------------------------------------------------


def small_world(args: Args, folder: Path, rows, generator, rng) -> dict:
    """Stages 1 and 2 of the small world, kept in the run's folder. Returns the reward model's accuracies."""
    tokenizer = word_tokenizer()
    policy = tiny_model(tokenizer).to(generator.device)
    supervised_finetune(policy, tokenizer, rng)
    policy.eval()
    eos_ids = stop_ids(tokenizer, policy, None)
    rows = encode_rows(rows, tokenizer, policy, args)
    pairs = sample_pairs(policy, tokenizer, rows, args.num_pairs, eos_ids, generator, rng, args)
    classifier = classifier_of(policy)
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


def stages(args: Args, rows, held_out, rng, generator, device, rank):
    """What comes before PPO; the first process trains. All that can be refused is, before there is a folder.

    Returns the run's folder, tokenizer, policy, stop ids, prompts, reward functions, the reward model if it
    reads the policy's tokens, and its accuracies.
    """
    if args.policy is not None:
        tokenizer, policy = load_model(args.policy)
        eos_ids = stop_ids(tokenizer, policy, args.stop)
        rows, held_out = (encode_rows(part, tokenizer, policy, args) for part in (rows, held_out))
    if args.policy is not None and args.train_reward_model is None:
        functions, classifier = scoring(args, None, policy, tokenizer, device)
    elif args.train_reward_model is not None and args.resume is None:
        pairs_tokenizer, classifier = load_classifier(
            args.reward_model or args.policy, new_head=args.reward_model is None
        )
        pairs = load_pairs(args.train_reward_model, pairs_tokenizer)
    folder = args.resume or collect(open_run(args, device) if rank == 0 else None)[0]
    if dist.is_initialized():  # training a reward model takes longer than a collective may
        waiting = dist.new_group(backend="gloo", timeout=timedelta(days=30))
    new, reward_metrics = rank == 0 and args.resume is None, {}
    if new and args.policy is None:
        reward_metrics = small_world(args, folder, rows, generator, rng)
    elif new and args.train_reward_model is not None:
        reward_metrics = fit_reward_model(classifier.to(device), pairs_tokenizer, pairs, args)
        classifier.save_pretrained(folder / "reward_model")
        pairs_tokenizer.save_pretrained(folder / "reward_model")
    if dist.is_initialized():
        dist.barrier(waiting)
    if args.policy is None:
        tokenizer, policy = load_model(str(folder / "start"))
        eos_ids = stop_ids(tokenizer, policy, args.stop)
        rows, held_out = (encode_rows(part, tokenizer, policy, args) for part in (rows, held_out))
    if args.policy is None or args.train_reward_model is not None:
        functions, classifier = scoring(args, folder, policy, tokenizer, device)
    return (
        folder, tokenizer, policy.to(device), eos_ids, rows, held_out, functions, classifier, reward_metrics
    )  # fmt: skip


def with_reference(policy, args: Args):
    """The policy to train, and a context that gives the frozen starting policy (None without KL)."""
    if args.lora_rank:
        policy = add_lora(policy, args.lora_rank)
        return policy, lambda: adapter_off(policy)
    frozen = copy.deepcopy(policy).requires_grad_(False) if args.kl_coef else None
    return policy, (lambda: contextlib.nullcontext(frozen)) if args.kl_coef else None


def main(args: Args) -> dict:
    """Train as `args` say; returns the final metrics. Numbers of prompts are of all processes together."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: there is no CUDA device")
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    rank, size = join_processes(device)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    state = None
    if args.resume is not None:
        state = load_checkpoint(args.resume / "checkpoint.pt")
        args = resumed_args(args, state["args"])
        if state["step"] == args.total_steps:
            raise UsageError(f"--resume {args.resume}: this run is finished, at step {state['step']:,}")
        if (number := len(state["tokens"])) != size:
            raise UsageError(f"--resume {args.resume}: this is a run of {number} processes, not of {size}")
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
    rows, held_out = prompts_of(args, rng)
    folder, tokenizer, policy, eos_ids, rows, held_out, functions, classifier, reward_metrics = stages(
        args, rows, held_out, rng, generator, device, rank
    )
    critic = classifier_of(policy, classifier)
    policy, reference = with_reference(policy, args)
    for model in (policy, critic) if args.gradient_checkpointing else ():
        model.activation_checkpointing_enable({"use_reentrant": False})
    policy.eval()
    trained = {f"policy.{name}": p for name, p in policy.named_parameters() if p.requires_grad}
    trained |= {f"critic.{name}": p for name, p in critic.named_parameters()}
    for parameter in trained.values() if size > 1 else ():
        dist.broadcast(parameter.data, 0)
    rates = {"policy": args.learning_rate, "critic": args.value_learning_rate}
    groups = [
        {"params": [p for n, p in trained.items() if n.startswith(k)], "lr": lr} for k, lr in rates.items()
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-5, weight_decay=0.0, fused=True)
    controller = KLController(args.kl_coef, args.kl_target, args.kl_horizon)
    first, drawn, norm, metrics, run = 0, 0, {"mean": 0.0, "std": 1.0}, {}, None

    if state is not None:
        first, drawn, norm, controller.coef = (state[name] for name in ("step", "drawn", "norm", "kl_coef"))
        restore(folder, state, state["models"], trained, optimizer, generator, shuffle, rank)
    sampler = new_sampler(policy, args.policy, rows + held_out, args)
    refresh(sampler, policy)
    if state is None and args.normalize_scores:
        chosen = prompt_indices(0, args.normalize_scores, len(rows), args.seed + 1)
        chosen = [rows[i] for i in chosen[share_of(args.normalize_scores, rank, size)]]
        sample, _ = respond(
            sampler, tokenizer, chosen, 1, args.temperature, eos_ids, functions, generator, args
        )
        norm = normalisation(whole_batch(sample)["rewards"])
    check_weights(trained.values())
    if args.track and rank == 0:
        run = start_tracking(args, folder)
    count = sum(p.numel() for p in trained.values())
    print(f"{args.task_name} on {device}, {count:,} trained parameters, writing {folder}")
    if reward_metrics:
        print(", ".join(f"{name} {value:.3g}" for name, value in reward_metrics.items()))
    truth = hidden_preference if args.policy is None else None

    def look(step: int) -> dict:
        """Evaluate, keep the completions, show some."""
        found, records = evaluate_policy(
            sampler, policy, reference, tokenizer, held_out, eos_ids, functions, truth, args, device,
            rank, size,
        )  # fmt: skip
        with open(folder / "completions.jsonl" if rank == 0 else os.devnull, "a") as file:
            file.writelines(json.dumps({"step": step, **record}) + "\n" for record in records)
        tqdm.write(f"step {step}: " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))
        for record in records[:3]:
            tqdm.write(f"    {record['prompt']!r} -> {record['completion']!r} (score {record['score']:.2f})")
        return found

    lines = folder / "metrics.jsonl" if rank == 0 else Path(os.devnull)
    shown = dict(unit=" steps", file=sys.stdout if rank else sys.stderr)
    with stop_signals() as stopped, tqdm(total=args.total_steps, initial=first, **shown) as bar:
        if state is None:
            write_metrics(lines, 0, reward_metrics | look(0))
        try:
            for step in range(first + 1, args.total_steps + 1):
                factor = min(1.0, step / max(args.warmup_steps, 1))
                factor *= linear_schedule(step - 1, args.total_steps) if args.anneal_lr else 1.0
                for group, lr in zip(optimizer.param_groups, rates.values()):
                    group["lr"] = lr * factor
                begun = time.perf_counter()
                chosen = prompt_indices(drawn, args.num_prompts, len(rows), args.seed)
                chosen = [rows[i] for i in chosen[share_of(args.num_prompts, rank, size)]]
                drawn += args.num_prompts
                batch, charts = sample_batch(
                    sampler, policy, reference, critic, tokenizer, chosen, eos_ids, functions, norm,
                    controller.coef, generator, args,
                )  # fmt: skip
                if step == 1 and args.self_checks:
                    check_first_batch(batch, charts, args)
                sampled = time.perf_counter()
                losses = update_models(policy, critic, optimizer, batch, shuffle, args, rank, size)
                ended = time.perf_counter()
                refresh(sampler, policy)

                metrics = losses | charts | {"charts/learning_rate": args.learning_rate * factor}
                metrics |= {
                    "charts/kl_coef": controller.coef,
                    "charts/TPS": charts["charts/tokens"] / (ended - begun),
                }
                metrics |= {"time/rollout": sampled - begun, "time/update": ended - sampled}
                controller.update(charts["losses/kl"], args.num_prompts)
                final = step == args.total_steps
                if final or args.eval_every and step % args.eval_every == 0:
                    metrics |= look(step)
                write_metrics(lines, step, metrics)
                if run:
                    run.log(metrics, step=step)
                shown = {"score": f"{charts['charts/score']:.2f}", "KL": f"{charts['losses/kl']:.2f}"}
                bar.set_postfix(shown | {"tok/s": f"{metrics['charts/TPS']:.0f}"}, refresh=False)
                bar.update()
                signals = sum(collect(stopped), [])  # all leave after the same step
                if final or signals or step % args.save_every == 0:
                    check_weights(trained.values())
                    state = {"script": SCRIPT, "args": json.loads(json.dumps(vars(args), default=str))}
                    state |= {"step": step, "drawn": drawn, "norm": norm, "kl_coef": controller.coef}
                    state |= {"tokens": torch.stack(collect(generator.get_state()))}  # of each process
                    state |= {"shuffle": shuffle.get_state(), "optimizer": optimizer.state_dict()}
                    state["models"] = {name: p.detach() for name, p in trained.items()}
                    if rank == 0:
                        save_checkpoint(folder / "checkpoint.pt", state)
                    collect(None)  # nobody leaves before it is written: torchrun ends all when one has left
                if signals and not final:
                    bar.close()
                    leave(signals[0], step, size, folder)
        except (FloatingPointError, UsageError, RuntimeError) as error:
            name_last_checkpoint(error, step, folder)
    if run:
        run.finish()
    if rank == 0:
        policy.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        before = json.loads(lines.read_text().splitlines()[0])
        for name in (name for name in metrics if name.startswith("eval/")):
            print(f"{name}: {before[name]:.3f} before, {metrics[name]:.3f} after")
        print(f"the policy is in {folder / 'model'}")
    return metrics | {"step": args.total_steps, "folder": str(folder)}


if __name__ == "__main__":
    try:
        main(command_line())
    except (UsageError, FloatingPointError, OSError) as error:
        sys.exit(f"{SCRIPT}.py: {error}")
