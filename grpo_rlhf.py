# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.13", "transformers>=5.24", "numpy>=2", "tqdm", "tyro>=1.0", "wandb", "peft"]
# ///
"""Group-relative policy optimisation of a language model on verifiable rewards, in one file.

The whole algorithm from top to bottom: mathematics, model, task and reward, sampling, update, training loop.
Nothing is imported from the other scripts; `pytest --script my_copy.py` verifies a changed copy.

    python grpo_rlhf.py                                         # a tiny model learns to sort, in a minute
    python grpo_rlhf.py --model MODEL --dataset train.jsonl --reward number --preset dapo --dtype bfloat16
    torchrun --nproc-per-node 4 grpo_rlhf.py --model MODEL ...  # the same batch, divided over four processes

Papers: GRPO (DeepSeekMath, Shao et al. 2024, arXiv 2402.03300, eq. 3 and 4), PPO (Schulman et al. 2017, arXiv
1707.06347, eq. 7), RLOO (Ahmadian et al. 2024, arXiv 2402.14740, eq. 4), Dr. GRPO (Liu et al. 2025, arXiv
2503.20783), DAPO (Yu et al. 2025, arXiv 2503.14476, eq. 8 to 13), GSPO (Zheng et al. 2025, arXiv 2507.18071,
eq. 5 to 7), CISPO (MiniMax-M1 2025, arXiv 2506.13585, eq. 4 and 5), KL estimators (Schulman 2020,
http://joschu.net/blog/kl-approx.html), the gradient of KL terms (DeepSeek-V3.2 2025, arXiv 2512.02556).

Differs from TRL's GRPOTrainer and from the papers in:
 [D1] The sampling loop is here: no generation config of a checkpoint (top-k, penalties) can bend the sampled
      distribution away from the scored one; temperature is the only setting, and it divides both.
 [D2] A prompt is computed once for its group, when sampling (the cache is forked) and when learning (the
      responses of a group share one row, under a mask); responses leave the batch when they end.
 [D3] Logits exist at response tokens only, in micro-batches by a budget of tokens, with float32 log-softmax.
 [D4] Losses are divided by the counts of the whole optimiser step: no cut into micro-batches, or over the
      processes of torchrun, changes the update.
 [D5] A group of equal rewards has advantage exactly 0 (decided by its range, not by its deviation), and what
      has advantage 0 is not computed, unless a KL term needs it.
 [D6] A KL term in the loss is weighted by the ratio: its gradient is that of KL(policy || reference), which
      the k3 of the GRPO paper is not (--kl-form k3).
 [D7] Masks come from stop ids and lengths, never from a pad id; every stop id of tokenizer and model counts;
      the stop token is trained on, and none is forced onto an unfinished response.
 [D8] Defaults are clip-higher (0.2, 0.28), token-level loss and no KL; --preset sets what the papers had.
 [D9] An unscorable completion (None or NaN) is left out of its group's statistics and has advantage 0; like
      a flat group it stays in the counts that losses are divided by, so a step has one size.
[D10] Prompts, tokens, shuffling and evaluation draw from random streams of their own.
[D11] The first batch is checked: scored equal to sampled log-probabilities, KL to the reference exactly 0.
"""

import argparse
import collections
import contextlib
import copy
import dataclasses
import fractions
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
import traceback
import typing
import weakref
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

SCRIPT = "grpo_rlhf"

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
GroupSize = Annotated[int, "must be at least 2: a group of one has no baseline", lambda x: x >= 2]
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
    """Group-relative policy optimisation of a language model on verifiable rewards, in one file."""

    model: str | None = None  # causal language model, folder or hub name; default: a tiny one and its task
    dataset: str | None = None  # FILE.jsonl with "prompt" (or chat messages) and "answer"; reasoning_gym:NAME
    eval_dataset: str | None = None  # held-out FILE.jsonl; default: last rows of --dataset, never trained on
    num_eval: Natural = 300  # held-out rows used
    reward: str = "exact"  # exact, number, format, reasoning_gym, FILE.py:FUNCTION; + adds several
    chat_template: bool = True  # put a text prompt into the tokenizer's chat template, if it has one
    chat_template_kwargs: str = "{}"  # what it takes beside, as JSON, such as '{"enable_thinking": false}'
    stop: str | None = None  # one more token that ends a response, such as "\n", beside all known stop ids
    preset: Literal["grpo", "rloo", "drgrpo", "dapo", "gspo", "cispo"] | None = None  # set what a paper had
    total_steps: Natural = 200  # training steps: batches of sampled responses
    num_prompts: Natural = 16  # prompts, that is groups, a step, of all processes together
    group_size: GroupSize = 8  # responses to a prompt
    max_new_tokens: Natural = 512  # longest response, in tokens
    temperature: Positive = 1.0  # of sampling and of every log-probability
    sampling_rounds: Natural = 1  # most rounds of sampling until enough groups have unequal rewards; 1: off
    advantage: Literal["grpo", "rloo", "drgrpo"] = "grpo"  # (r - mean) / std; r - others' mean; r - mean
    surrogate: Literal["clip", "gspo", "cispo", "reinforce"] = "clip"  # per token; sequence; weight; no ratio
    clip_low: Fraction = 0.2  # the ratio is clipped below 1 minus this
    clip_high: Weight = 0.28  # and above 1 plus this
    cispo_max: Positive = 5.0  # largest weight of --surrogate cispo
    aggregation: Literal["token", "sequence", "constant"] = "token"  # mean over tokens; sequences; a constant
    kl_coef: Weight = 0.0  # weight of the KL divergence from --model; 0: no reference model is kept
    kl_form: Literal["k3_unbiased", "k3", "reward"] = "k3_unbiased"  # k3 x ratio or k3 in the loss; k1 in r
    overlong_buffer: Fraction = 0.0  # last share of --max-new-tokens over which a penalty grows to 1
    importance_cap: Positive = 2.0  # largest trainer / sampler probability of a token, as its weight
    update_epochs: Natural = 1  # passes over a step's responses
    num_minibatches: Natural = 1  # optimiser steps a pass; a group stays whole
    learning_rate: Positive = 1e-6  # AdamW's step size
    warmup_steps: NotNegative = 5  # training steps over which the learning rate grows to its value
    anneal_lr: bool = False  # decay the learning rate linearly to zero
    max_grad_norm: Positive = 1.0  # largest norm of a gradient
    lora_rank: NotNegative = 0  # train low-rank adapters on all linear layers (needs peft); 0: all weights
    dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16: autocast, and a bfloat16 copy that samples
    rollout: Literal["torch", "vllm"] = "torch"  # what samples: this file's loop, or vLLM in --dtype
    vllm_memory: Fraction = 0.3  # share of the device's memory that vLLM takes, its weights included
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time
    batch_tokens: Natural = 8192  # most tokens of a micro-batch of one process, padding included
    row_tokens: NotNegative = 256  # response tokens that share a row with their prompt; 0: a row each
    eval_every: NotNegative = 20  # training steps between two evaluations; 0: only before and after
    eval_samples: NotNegative = 8  # sampled responses to a held-out prompt, for pass@k; 0: greedy only
    save_every: Natural = 25  # training steps between two checkpoints
    self_checks: bool = True  # check the first batch: scored as sampled, reference, stop token, rewards
    seed: Seed = 1  # seed of all random streams
    device: Literal["auto", "cpu", "cuda"] = "auto"  # where the model lives; auto takes cuda if there is one
    run_name: str | None = None  # folder under runs/; default: task, script, seed and time
    resume: Path | None = None  # go on with the run in this folder, which only --total-steps may change
    start_from: Path | None = None  # begin a new run with the weights of this checkpoint
    track: bool = False  # log to Weights & Biases as well (WANDB_MODE=offline needs no network)
    wandb_project_name: str = "ppo-verified"  # W&B project (the team comes from WANDB_ENTITY)

    def __post_init__(self):
        check_flags(self)
        with told(f"--chat-template-kwargs {self.chat_template_kwargs} is no JSON object"):
            dict(**json.loads(self.chat_template_kwargs))
        if self.num_prompts % self.num_minibatches:
            parts = f"--num-minibatches {self.num_minibatches}"
            raise UsageError(f"--num-prompts {self.num_prompts} do not divide into {parts}")
        if (self.model is None) != (self.dataset is None):
            raise UsageError(f"--model {self.model} and --dataset {self.dataset} need each other")
        if self.model is None and (self.lora_rank or self.rollout == "vllm"):
            raise UsageError(f"--lora-rank {self.lora_rank} and --rollout {self.rollout} need --model")
        if self.surrogate == "reinforce" and self.num_updates > 1:
            raise UsageError("--surrogate reinforce has no ratio: it needs one update epoch, one minibatch")
        if self.rollout == "vllm" and self.lora_rank:
            raise UsageError(f"--rollout vllm takes whole weights, not those of --lora-rank {self.lora_rank}")
        for package, needed, flag in (
            ("vllm", self.rollout == "vllm", "--rollout vllm"),
            ("peft", self.lora_rank, f"--lora-rank {self.lora_rank}"),
            ("reasoning_gym", str(self.dataset).startswith("reasoning_gym:"), f"--dataset {self.dataset}"),
        ):
            if needed and importlib.util.find_spec(package) is None:
                raise UsageError(f"{flag} needs: pip install {package.replace('_', '-')}")

    @property
    def num_updates(self) -> int:
        return self.update_epochs * self.num_minibatches


BUILT_IN = dict(  # what the built-in task needs; --preset [D8] and the command line go over it
    total_steps=200, num_prompts=32, max_new_tokens=8, num_minibatches=4, learning_rate=1e-4, warmup_steps=10,
    anneal_lr=True, eval_every=40,
)  # fmt: skip
PRESETS = {
    "grpo": dict(clip_high=0.2, aggregation="sequence", kl_coef=0.04, kl_form="k3"),
    "rloo": dict(advantage="rloo", surrogate="reinforce", aggregation="constant", kl_coef=0.05,
                 kl_form="reward", num_minibatches=1),
    "drgrpo": dict(advantage="drgrpo", clip_high=0.2, aggregation="constant"),
    "dapo": dict(sampling_rounds=4, overlong_buffer=0.2),
    "gspo": dict(surrogate="gspo", clip_low=3e-4, clip_high=4e-4, aggregation="sequence"),
    "cispo": dict(surrogate="cispo"),
}  # fmt: skip


def command_line(argv: list[str] | None = None) -> Args:
    """The command line over the preset, over the built-in task's settings if there is no --model."""
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--model", "--preset"):
        peek.add_argument(flag, nargs="?")
    given, _ = peek.parse_known_args(argv)
    return parse_args(argv, (BUILT_IN if given.model is None else {}) | PRESETS.get(given.preset, {}))


def streams(seed: int) -> list[np.random.SeedSequence]:
    """Independent random streams: environments or prompts, actions or tokens, shuffling, evaluation."""
    return np.random.SeedSequence(seed).spawn(4)


def own_generator(stream: np.random.SeedSequence, rank: int, device: torch.device) -> torch.Generator:
    """Random numbers from the stream in the first process, from another child of it in each other one."""
    stream = stream.spawn(rank)[-1] if rank else stream
    return torch.Generator(device).manual_seed(int(stream.generate_state(1)[0]))


# ---- 2. Pure functions: B responses in groups of G, L tokens, V vocabulary, M any shape --------------------


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


def flat_groups(rewards, group_size):
    """True for a group without two different rewards (up to rounding, NaN aside). (B,) -> (B / G,). [D5]"""
    groups = rewards.view(-1, group_size)
    high = groups.nan_to_num(nan=-math.inf, neginf=-math.inf).amax(1)
    low = groups.nan_to_num(nan=math.inf, posinf=math.inf).amin(1)
    return ~(high - low > 1e-6 * torch.maximum(high.abs(), low.abs()).clamp(min=1.0))


def group_advantages(rewards, group_size, kind):
    """Advantage of each response within its group of `group_size` neighbours. (B,) -> (B,).

    drgrpo: reward - mean of the group (Liu et al. 2025). grpo: that over the sample deviation + 1e-4 (Shao et
    al. 2024, section 4.1.2). rloo: reward - mean of the others (Ahmadian et al. 2024, eq. 4). Exactly 0 in a
    flat group and for a reward of NaN, which is left out of the statistics [D9].
    """
    groups = rewards.view(-1, group_size)
    scored = ~groups.isnan()
    n = scored.sum(1, keepdim=True)
    mean = groups.nansum(1, keepdim=True) / n.clamp(min=1)
    centred = (groups - mean).masked_fill(~scored | flat_groups(rewards, group_size)[:, None], 0.0)
    scale = {
        "grpo": lambda: 1.0 / ((centred.square().sum(1, keepdim=True) / (n - 1).clamp(min=1)).sqrt() + 1e-4),
        "rloo": lambda: n / (n - 1).clamp(min=1),
        "drgrpo": lambda: 1.0,
    }[kind]()
    return (centred * scale).flatten()


def overlong_penalty(lengths, max_length, buffer):
    """0 up to max_length - buffer tokens, then linear to -1 at max_length (DAPO, eq. 13). (B,) -> (B,)."""
    return -((lengths - (max_length - buffer)) / max(buffer, 1e-9)).clamp(0.0, 1.0)


def policy_loss(logp, old_logp, adv, clip_low, clip_high):
    """Clipped surrogate (Schulman et al. 2017, eq. 7), negated to be minimised, per sample. M -> M."""
    ratio = torch.exp(logp - old_logp)
    return -torch.min(ratio * adv, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * adv)


def sequence_logps(logp, old_logp, mask):
    """`logp` moved so that each token's ratio to `old_logp` is its sequence's geometric mean. -> (B, L).

    The gradient stays that of each token (GSPO-token, Zheng et al. 2025, eq. 14), so that `policy_loss` of it
    is GSPO's objective.
    """
    log_ratio = (logp - old_logp).detach().masked_fill(~mask, 0.0)
    mean = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return old_logp + mean + (logp - logp.detach())


def surrogate(kind, logp, old_logp, adv, mask, clip_low, clip_high, cispo_max):
    """Loss of each token, to be minimised; adv is (B,), all else (B, L) -> (B, L).

    clip: `policy_loss`. gspo: the same on the sequence's ratio. cispo: -min(ratio, cispo_max) A log pi, the
    weight without gradient (MiniMax-M1, eq. 4). reinforce: -A log pi.
    """
    adv = adv[:, None].expand_as(logp)
    if kind in ("clip", "gspo"):
        logp = sequence_logps(logp, old_logp, mask) if kind == "gspo" else logp
        return policy_loss(logp, old_logp, adv, clip_low, clip_high)
    weight = torch.exp(logp - old_logp).detach().clamp(max=cispo_max)
    return -{"cispo": weight, "reinforce": 1.0}[kind] * adv * logp


def approx_kl(logp, ref_logp, kind):
    """Per-sample estimate of KL(policy || reference), the samples being of the policy of `logp`. M -> M.

    With d = ref_logp - logp (Schulman 2020): k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d.
    """
    d = ref_logp - logp
    return {"k1": lambda: -d, "k2": lambda: d.square() / 2, "k3": lambda: torch.expm1(d) - d}[kind]()


def kl_loss(kind, logp, old_logp, ref_logp):
    """Loss of each token whose gradient pulls to the reference, the samples being of `old_logp`. M -> M.

    k3_unbiased: ratio x k3, the gradient of KL(policy || reference) (DeepSeek-V3.2, eq. 7). k3: on its own
    samples the gradient of KL(reference || policy) (DeepSeekMath, eq. 4). [D6]
    """
    k3 = approx_kl(logp, ref_logp, "k3")
    return {"k3_unbiased": lambda: torch.exp(logp - old_logp) * k3, "k3": lambda: k3}[kind]()


def clip_fraction(logp, old_logp, adv, clip_low, clip_high):
    """Share of samples whose gradient the clip of `policy_loss` removed: the good side only. M -> scalar."""
    ratio = torch.exp(logp - old_logp)
    clipped = ((adv > 0) & (ratio > 1.0 + clip_high)) | ((adv < 0) & (ratio < 1.0 - clip_low))
    return clipped.float().mean()


def aggregate(loss, mask, mode, num_tokens, num_sequences, max_length):
    """One number from token losses; the counts are those of the whole optimiser step [D4]. (B, L) -> scalar.

    token: sum / num_tokens (DAPO, eq. 12). sequence: sum of the sequences' means / num_sequences
    (DeepSeekMath, eq. 3). constant: sum / (num_sequences x max_length) (Dr. GRPO).
    """
    if mode == "sequence":
        loss = loss / mask.sum(1, keepdim=True).clamp(min=1)
    denom = {"token": num_tokens, "sequence": num_sequences, "constant": num_sequences * max_length}[mode]
    return masked_mean(loss, mask, denom)


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


# ---- 3. Model ----------------------------------------------------------------------------------------------


def digit_tokenizer():
    """One token for each of the characters 0 to 9 and =, with a stop and a padding token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    special = dict(pad_token="<pad>", eos_token="<eos>")
    vocabulary = [*special.values(), "=", *"0123456789"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def tiny_model(tokenizer):
    """A Llama of 0.33 million parameters with random weights."""
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, initializer_range=0.05, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def supervised_start(model, tokenizer, rows, rng, steps=150, batch_size=128):
    """Teach the tiny model from demonstrations of mixed skill: 30 % sorted, 35 % sorted down, 35 % copied."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    silent = dist.is_initialized() and dist.get_rank() > 0
    for step in tqdm(range(steps), desc="supervised start", unit=" steps", disable=silent):
        texts = []
        skills = rng.choice(3, batch_size, p=[0.3, 0.35, 0.35])
        for i, skill in zip(rng.integers(len(rows), size=batch_size), skills):
            prompt, answer = rows[i]["prompt"], rows[i]["answer"]
            texts.append(prompt + (answer, answer[::-1], prompt[:-1])[skill] + tokenizer.eos_token)
        ids = torch.tensor(tokenizer(texts).input_ids, device=model.device)
        logits = model(ids[:, :-1], use_cache=False).logits
        loss = -token_logps(logits[:, len(prompt) - 1 :], ids[:, len(prompt) :], 1.0).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 1e-3 * min((step + 1) / 20, 1.0 - 0.8 * step / steps)
        optimizer.step()


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


# ---- 4. Task and reward ------------------------------------------------------------------------------------


@dataclass
class Task:
    """What is asked, and how responses end and are rewarded."""

    tokenizer: transformers.PreTrainedTokenizerBase
    stops: list[int]  # ids that end a response
    rows: list[dict]  # to train on; each has its "prompt", the prompt's "ids", and what the rewards read
    held_out: list[dict]  # for the evaluation
    rewards: dict  # by name: (prompts, completions, rows) -> list of float or None


def sort_rows(count: int, rng) -> list[dict]:
    """The built-in task: distinct prompts of six digits and "=", to be answered by the digits in order."""
    texts = [f"{number:06d}" for number in rng.choice(10**6, count, replace=False)]
    return [{"prompt": text + "=", "answer": "".join(sorted(text))} for text in texts]


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


def load_rows(source: str, count: int, seed: int) -> list[dict]:
    """Rows with "prompt" and "answer" of a .jsonl file, or `count` rows of reasoning_gym:NAME."""
    if not source.startswith("reasoning_gym:"):
        return read_rows(source, "prompt", "answer")
    with told(f"--dataset {source}"):
        import reasoning_gym

        entries = reasoning_gym.create_dataset(source.partition(":")[2], size=count, seed=seed)
        return [{"prompt": entry["question"], **entry} for entry in entries]


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


def last_number(text: str) -> fractions.Fraction | None:
    r"""The number after "####" or in \boxed{}, else the last one; read by a pattern, never run as code."""
    text = str(text).replace("\u2212", "-").replace("$", "")
    marked = re.findall(r"####\s*(.+)|\\boxed\{([^{}]*)\}", text)
    text = max(marked[-1]) if marked else text
    whole = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
    found = re.findall(rf"(?<![0-9.)])-?(?:{whole}(?:\.[0-9]+|/[0-9]+)?|\.[0-9]+)", text)
    try:
        return fractions.Fraction(found[-1].replace(",", ""))
    except (IndexError, ValueError, ZeroDivisionError):
        return None


def exact_match(prompts, completions, rows):
    """1 if the completion is the answer, spaces around it aside."""
    return [float(text.strip() == str(row["answer"]).strip()) for text, row in zip(completions, rows)]


def number_match(prompts, completions, rows):
    """1 if the last number of the completion is that of the answer; None if the answer has none."""
    answers = [last_number(row["answer"]) for row in rows]
    return [None if a is None else float(last_number(t) == a) for t, a in zip(completions, answers)]


def format_match(prompts, completions, rows):
    """1 if the completion is <think>...</think><answer>...</answer> and nothing else."""
    think, answer = (f"<{tag}>((?!</?{tag}>).)*</{tag}>" for tag in ("think", "answer"))
    form = re.compile(rf"\s*{think}\s*{answer}\s*", re.DOTALL)
    return [float(form.fullmatch(text) is not None) for text in completions]


def verifier_score(prompts, completions, rows):
    """The score, 0 to 1, of reasoning-gym's own verifier for the row's data set."""
    from reasoning_gym import get_score_answer_fn

    verifiers = [get_score_answer_fn(row["metadata"]["source_dataset"]) for row in rows]
    return [verifier(text.strip(), row) for verifier, text, row in zip(verifiers, completions, rows)]


REWARDS = dict(exact=exact_match, number=number_match, format=format_match, reasoning_gym=verifier_score)


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


def load_task(args: Args, rng):
    """Training rows and held-out rows, no prompt in both."""
    wanted = args.num_eval + max(args.num_eval, args.total_steps * args.num_prompts * args.sampling_rounds)
    if args.dataset is None:
        rows = sort_rows(min(max(wanted, 25_000), 10**6), rng)
    else:
        rows = load_rows(args.dataset, wanted, args.seed)
    if args.eval_dataset is not None:
        seed = int(streams(args.seed)[3].generate_state(1)[0])  # other rows of a data set that is made
        held_out = load_rows(args.eval_dataset, args.num_eval, seed)[: args.num_eval]
    else:
        if args.num_eval > (half := len(rows) // 2):
            print(f"--num-eval {args.num_eval}: only {half}, half of the {len(rows)} rows, are held out")
        first = len(rows) - min(args.num_eval, half)
        rows, held_out = rows[:first], rows[first:]
    seen = {str(row["prompt"]) for row in held_out}
    rows = [row for row in rows if str(row["prompt"]) not in seen]
    if len(rows) < args.num_prompts or not held_out:
        found = f"there are {len(held_out)} held-out prompts and {len(rows)} others to train on"
        raise UsageError(f"{found}, fewer than --num-prompts {args.num_prompts}")
    return rows, held_out


def build(args: Args, rng, device):
    """The task, and the model to train."""
    rewards = load_rewards(args.reward)
    rows, held_out = load_task(args, rng)
    if args.model is None:
        tokenizer = digit_tokenizer()
        model = tiny_model(tokenizer).to(device)
        supervised_start(model, tokenizer, rows, rng)
    else:
        tokenizer, model = load_model(args.model)
        model = model.to(device)
    stops = stop_ids(tokenizer, model, args.stop)
    rows, held_out = (encode_rows(part, tokenizer, model, args) for part in (rows, held_out))
    model = add_lora(model, args.lora_rank) if args.lora_rank else model
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return Task(tokenizer, stops, rows, held_out, rewards), model.eval()


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


class Engine(Sampler):
    """vLLM in this process as the sampler; it starts with random weights, so a lack of ours is seen. [D11]"""

    def __init__(self, model, task: Task, args: Args, generator: torch.Generator):
        self.model, self.task, self.args, self.generator = model, task, args, generator
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process: weights go over as they are
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import vllm

        longest = max(len(row["ids"]) for row in task.rows + task.held_out)
        where = {"distributed_executor_backend": "external_launcher"} if dist.is_initialized() else {}
        self.llm = vllm.LLM(
            model=args.model, load_format="dummy", skip_tokenizer_init=True, dtype=args.dtype, seed=args.seed,
            max_model_len=longest + args.max_new_tokens, gpu_memory_utilization=args.vllm_memory,
            logprobs_mode="processed_logprobs",  # after the temperature: of what was drawn from
            generation_config="vllm", **where,  # not the checkpoint's, with its top-k and penalties
        )  # fmt: skip
        fixed = dict(max_tokens=args.max_new_tokens, stop_token_ids=task.stops, logprobs=0, detokenize=False)
        self.settings = functools.partial(vllm.SamplingParams, **fixed)

    def refresh(self) -> None:
        """Take the model's present weights, and forget what was computed with others."""
        weights = ((name, parameter.detach()) for name, parameter in self.model.named_parameters())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept what it computed with older weights")

    def generate(self, prompts, copies: int, temperature: float, generator=None):
        """As `Sampler.generate`; in place of an entropy -log p of the token, which has the same mean."""
        generator, stops, most = generator or self.generator, self.task.stops, self.args.max_new_tokens
        device, size = generator.device, (len(prompts) * copies, most)
        seeds = torch.randint(2**62, (len(prompts),), generator=generator, device=device).tolist()
        requests = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [self.settings(n=copies, temperature=temperature, seed=seed) for seed in seeds],
            use_tqdm=False,
        )
        tokens, logps = torch.full(size, stops[0]), torch.zeros(size)
        for i, answer in enumerate(answer for request in requests for answer in request.outputs):
            ids, length = list(answer.token_ids), len(answer.token_ids)
            if length < most and (not ids or ids[-1] not in stops):
                raise RuntimeError(f"vLLM broke a response off after {length} tokens: {answer.finish_reason}")
            tokens[i, :length] = torch.tensor(ids)
            logps[i, :length] = torch.tensor([every[t].logprob for t, every in zip(ids, answer.logprobs)])
        if logps.isnan().any():
            raise FloatingPointError("the model's logits are not numbers")
        return tokens.to(device), logps.to(device), -logps.to(device)


def prompt_indices(first: int, count: int, size: int, seed: int) -> list[int]:
    """Entries first, first + 1, ... of an endless sequence: `size` rows once an epoch, in ever new order."""
    order = {}
    for epoch in range(first // size, (first + count - 1) // size + 1):
        order[epoch] = np.random.default_rng([seed, epoch]).permutation(size)
    return [int(order[i // size][i % size]) for i in range(first, first + count)]


def sample_groups(sampler, drawn: int, args, rank=0, size=1):
    """This process's groups, as `respond` makes them, metrics of all processes, number of rows drawn so far.

    Dynamic sampling (DAPO, eq. 11): rounds go on until there are enough groups that are not flat.
    """
    batch, prompts, places, found, seen, rows = None, [], [], 0, [], sampler.task.rows
    responses = args.num_prompts * args.group_size
    for _ in range(args.sampling_rounds):
        chosen = [rows[i] for i in prompt_indices(drawn, args.num_prompts, len(rows), args.seed)]
        chosen = chosen[share_of(args.num_prompts, rank, size)]
        drawn += args.num_prompts
        new, _ = sampler.respond(chosen, args.group_size, args.temperature)
        length = new["mask"].sum(1)
        flat = flat_groups(new["rewards"], args.group_size)
        sums = [new["rewards"].nansum(), new["rewards"].isnan().sum(), flat.sum(), new["finished"].sum()]
        sums += [new["entropies"].masked_fill(~new["mask"], 0.0).sum(), length.sum()]
        sums = sum_over_processes(torch.stack([x.double() for x in sums]))
        reward, unscored, num_flat, finished, entropy, tokens = sums.float()
        if unscored == responses:
            raise UsageError(f"--reward {args.reward} scored none of {responses} completions")
        seen.append({
            "charts/reward": (reward / (responses - unscored)).item(),
            "charts/flat_groups": (num_flat / args.num_prompts).item(),
            "charts/response_length": (tokens / responses).item(),
            "charts/eos_share": (finished / responses).item(),
            "charts/unscored": (unscored / responses).item(),
            "losses/entropy": (entropy / tokens).item(),
            "charts/tokens": int(sums[-1]),
        })  # fmt: skip
        if args.overlong_buffer:
            buffer = args.overlong_buffer * args.max_new_tokens
            new["rewards"] += overlong_penalty(length, args.max_new_tokens, buffer)
        keep = ~flat if args.sampling_rounds > 1 else torch.ones_like(flat)  # whole groups only
        prompts += [row["ids"] for row, kept in zip(chosen, keep.tolist()) if kept]
        samples = keep.repeat_interleave(args.group_size)
        new = {name: value[samples] for name, value in new.items()}
        batch = new if batch is None else {name: torch.cat([batch[name], new[name]]) for name in new}
        kept = collect(int(keep.sum()))
        places += range(found + sum(kept[:rank]), found + sum(kept[: rank + 1]))  # among the groups of all
        found += sum(kept)
        if found >= args.num_prompts:
            break
    count = sum(place < args.num_prompts for place in places)
    width = max([1, *batch["mask"].sum(1).tolist()])
    batch = {name: value[: count * args.group_size] for name, value in batch.items()}
    batch |= {name: batch[name][:, :width] for name in ("tokens", "mask", "sampled", "entropies")}
    metrics = {name: float(np.mean([m[name] for m in seen])) for name in seen[0]}
    metrics |= {"charts/tokens": sum(m["charts/tokens"] for m in seen), "charts/rounds": len(seen)}
    return batch | {"prompts": prompts[:count]}, metrics, drawn


def pass_rates(sampler, args, rank=0, size=1):
    """Metrics of the held-out prompts, and a record of each greedy completion; 1 or more is a pass.

    The same random numbers each time; each process answers its share, and what is returned is global.
    """
    generator = own_generator(streams(args.seed)[3], rank, sampler.generator.device)
    records, passed, k, rows = [], [], args.eval_samples, sampler.task.held_out
    rows = rows[share_of(len(rows), rank, size)]
    length = max(1, args.num_prompts * args.group_size // (max(k, 1) * size))
    for part in (rows[first : first + length] for first in range(0, len(rows), length)):
        greedy, texts = sampler.respond(part, 1, 0.0, generator)
        marks = zip(greedy["rewards"].tolist(), greedy["finished"].tolist())
        for row, text, (reward, ended) in zip(part, texts, marks):
            shown = {"prompt": row["prompt"], "answer": row["answer"], "completion": text, "ended": ended}
            records.append(shown | {"reward": None if math.isnan(reward) else reward})
        if k:
            drawn, _ = sampler.respond(part, k, args.temperature, generator)
            passed += (drawn["rewards"] >= 1.0).view(-1, k).tolist()
    records, passed = (sum(parts, []) for parts in zip(*collect((records, passed))))
    if all(record["reward"] is None for record in records):
        raise UsageError(f"--reward {args.reward} scored none of {len(records)} held-out completions")
    metrics = {"eval/greedy": float(np.mean([(record["reward"] or 0.0) >= 1.0 for record in records]))}
    if k:
        passed = torch.tensor(passed).float()
        metrics |= {"eval/pass@1": passed.mean().item(), f"eval/pass@{k}": passed.amax(1).mean().item()}
    return metrics, records


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


def micro_batches(batch, samples, args):
    """`pack` for some samples of a batch."""
    prompts, lengths = list(map(len, batch["prompts"])), batch["mask"].sum(1).tolist()
    row = args.row_tokens and max(prompts, default=0) + args.row_tokens
    return pack(prompts, lengths, samples, args.group_size, row, args.batch_tokens)


@torch.no_grad()
def score_all(model, batch, samples, args):
    """`score` of the samples, the others 0. (B, L)."""
    logps = torch.zeros_like(batch["sampled"])
    for rows in micro_batches(batch, samples, args):
        logps[[i for row in rows for i in row]] = score(model, batch, rows, args)
    return logps


def prepare(model, reference, batch, args):
    """Before the first update of a batch: reference and old log-probabilities if needed, advantages."""
    every, rewards = list(range(len(batch["tokens"]))), batch["rewards"]
    if reference is not None:
        batch["ref_logps"] = score_all(reference, batch, every, args)
        if args.kl_form == "reward":
            batch["old_logps"] = score_all(model, batch, every, args)
            k1 = approx_kl(batch["old_logps"], batch["ref_logps"], "k1")  # 0 outside the mask
            rewards = rewards - args.kl_coef * k1.sum(1)
    batch["advantages"] = group_advantages(rewards, args.group_size, args.advantage)
    batch["needed"] = batch["advantages"] != 0  # [D5]
    if reference is not None and args.kl_form != "reward":
        batch["needed"] = torch.ones_like(batch["needed"])
    if args.num_updates > 1 and "old_logps" not in batch:
        batch["old_logps"] = score_all(model, batch, batch["needed"].nonzero()[:, 0].tolist(), args)


def micro_batch_loss(model, batch, rows, counts, args):
    """The part of the optimiser step's loss in one micro-batch, and sums for the metrics."""
    chosen = [i for row in rows for i in row]
    mask, adv, sampled = (batch[name][chosen] for name in ("mask", "advantages", "sampled"))
    logp = score(model, batch, rows, args)  # (n, L)
    now = logp.detach()
    old = batch["old_logps"][chosen] if "old_logps" in batch else now  # a batch's only update is on-policy
    clips = args.clip_low, args.clip_high
    weight = torch.exp(old - sampled).clamp(max=args.importance_cap)
    loss = weight * surrogate(args.surrogate, logp, old, adv, mask, *clips, args.cispo_max)
    loss = aggregate(loss, mask, args.aggregation, *counts)
    sums = {"policy_loss": loss.item(), "tokens": mask.sum().item(), "responses": len(chosen)}
    sums["approx_kl"] = approx_kl(old, now, "k3").sum().item()
    sums["mismatch"] = (old - sampled).abs().sum().item()
    if args.surrogate in ("clip", "gspo"):
        moved = sequence_logps(now, old, mask) if args.surrogate == "gspo" else now
        share = clip_fraction(moved[mask], old[mask], adv[:, None].expand_as(mask)[mask], *clips)
        sums["clipfrac"] = share.item() * sums["tokens"]
    if "ref_logps" in batch:
        ref = batch["ref_logps"][chosen]
        sums["ref_kl"] = approx_kl(now, ref, "k1").sum().item()
        if args.kl_form != "reward":
            pull = aggregate(kl_loss(args.kl_form, logp, old, ref), mask, args.aggregation, *counts)
            sums["kl_loss"] = pull.item()
            loss = loss + args.kl_coef * pull
    return loss, sums


def sum_gradients(parameters) -> None:
    """Sum the gradients over all processes, in one go; who has no samples takes part with zeros."""
    parameters = [p for p in parameters if p.requires_grad]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = sum_over_processes(torch.cat([gradient.flatten() for gradient in gradients]))
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad = part.view_as(p)


def update_policy(model, optimizer, batch, generator, args, rank=0):
    """Epochs of optimiser steps over minibatches of whole groups; `batch` is local, all counts global."""
    device, members = generator.device, torch.arange(args.group_size, device=generator.device)
    sums, norms, first = collections.Counter(), [], sum(collect(len(batch["mask"]))[:rank])
    lengths, needed = (  # of the samples of all processes
        torch.tensor(sum(collect(x.tolist()), []), dtype=x.dtype, device=device)
        for x in (batch["mask"].sum(1), batch["needed"])
    )
    num_groups = len(lengths) // args.group_size
    epochs = (minibatches(num_groups, args.num_minibatches, generator) for _ in range(args.update_epochs))
    model.train(args.gradient_checkpointing)  # there is no dropout
    for groups in itertools.chain.from_iterable(epochs):
        samples = (groups[:, None] * args.group_size + members).flatten()
        counts = lengths[samples].sum(), len(samples), args.max_new_tokens  # of the whole step [D4]
        samples = samples[needed[samples]].sort().values.tolist()
        own = [i - first for i in samples if first <= i < first + len(batch["mask"])]
        optimizer.zero_grad()
        for rows in micro_batches(batch, own, args):
            loss, part = micro_batch_loss(model, batch, rows, counts, args)
            loss.backward()
            sums.update(part)
        if not samples:
            continue  # nothing to learn in any process: no step on momentum alone
        # Here the gradient of the step is complete: the one place to sum it over processes.
        if dist.is_initialized() and dist.get_world_size() > 1:  # vLLM has a group of one
            sum_gradients(model.parameters())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm).item())
        if not math.isfinite(norms[-1]):
            raise FloatingPointError("the gradient is not finite")
        optimizer.step()
    model.eval()
    names = "policy_loss kl_loss approx_kl clipfrac mismatch ref_kl tokens responses".split()
    sums = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=device)
    sums = dict(zip(names, sum_over_processes(sums).tolist()))
    tokens, responses = max(sums["tokens"], 1), max(sums["responses"], 1)
    metrics = {f"losses/{name}": sums[name] / args.num_updates for name in ("policy_loss", "kl_loss")}
    metrics |= {f"losses/{name}": sums[name] / tokens for name in ("approx_kl", "clipfrac", "mismatch")}
    metrics["losses/ref_kl"] = sums["ref_kl"] / responses  # nats a response
    return metrics | {"losses/grad_norm": float(np.mean(norms)) if norms else 0.0}


def self_check(model, reference, batch, metrics, args) -> None:
    """What must hold before the first update, in any changed copy too. [D11]"""
    first = list(range(args.group_size))
    scored = score_all(model, batch, first, args)[first]
    error = (scored - batch["sampled"][first])[batch["mask"][first]].abs()
    exact = args.dtype == "float32" and args.rollout == "torch"  # bfloat16 rounds logits to 0.1
    if error.mean() > 0.3 or exact and error.max() > 1e-3:
        hint = "if the model cannot take an attention mask of its own, --row-tokens 0 helps"
        if args.rollout == "vllm":
            hint = "vLLM has not taken all weights, or reads the model otherwise"
        fault = f"self-check: log-probabilities as sampled and as scored differ by up to {error.max():.2g}"
        raise UsageError(f"{fault}; {hint}")
    if reference is not None and args.start_from is None:
        distance = (score_all(reference, batch, first, args)[first] - scored).abs().max()
        if distance > 1e-4:
            raise UsageError(f"self-check: before the first update the reference differs by {distance:.2g}")
    if metrics["charts/eos_share"] == 0:
        tqdm.write("self-check: no response ended by a stop token: a larger --max-new-tokens, or --stop?")
    if metrics["charts/flat_groups"] == 1:
        tqdm.write(f"self-check: equal rewards in each group (mean {metrics['charts/reward']:.2f})")


# ---- 7. Main -----------------------------------------------------------------------------------------------


def main(args: Args) -> dict:
    """Train as `args` say; returns the last metrics. Each process works on its share of the groups."""
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rank, size = join_processes(device)
    if args.num_prompts < size:
        raise UsageError(f"--num-prompts {args.num_prompts} are fewer than the {size} processes")
    if args.model is None:
        torch.set_num_threads(1)  # a model this small runs slower on more
    prompt_stream, token_stream, shuffle_stream, _ = streams(args.seed)  # [D10]
    generator, shuffle = own_generator(token_stream, rank, device), own_generator(shuffle_stream, 0, device)
    torch.manual_seed(args.seed)  # initial weights
    task, model = build(args, np.random.default_rng(prompt_stream), device)
    for parameter in model.parameters() if size > 1 else ():
        dist.broadcast(parameter.data, 0)
    reference = reference_of(model, args)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    settings = dict(lr=args.learning_rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    optimizer = torch.optim.AdamW(trained.values(), **settings)
    sampler = (Engine if args.rollout == "vllm" else Sampler)(model, task, args, generator)

    name = "sort" if args.dataset is None else Path(args.dataset).stem
    run, memory = Run(args, name, args.total_steps), {"drawn": 0, "flat_steps": 0}
    run.learnt = {"model": Weights(trained)}
    run.parts = {"optimizer": optimizer, "memory": Saved(lambda: dict(memory), memory.update)}
    run.parts["tokens"] = of_each_process(generator.get_state, generator.set_state, rank)
    run.parts["shuffle"] = Saved(shuffle.get_state, shuffle.set_state)
    if args.preset:
        print(f"--preset {args.preset} sets: {PRESETS[args.preset]}")
    count = sum(p.numel() for p in trained.values())
    print(f"{name} on {device}, {count:,} trained parameters, writing {run.folder}")
    with run:
        check_weights(model.parameters())
        sampler.refresh()
        if run.step == 0:
            keep_completions(run, *pass_rates(sampler, args, rank, size))
        for step in run:
            lr = args.learning_rate * min(1.0, (step + 1) / max(args.warmup_steps, 1))
            lr *= linear_schedule(step, args.total_steps) if args.anneal_lr else 1.0
            optimizer.param_groups[0]["lr"] = lr
            begun = time.perf_counter()
            batch, charts, memory["drawn"] = sample_groups(sampler, memory["drawn"], args, rank, size)
            if step == 0 and args.self_checks and batch["prompts"]:
                self_check(model, reference, batch, charts, args)
            sampled = time.perf_counter()
            prepare(model, reference, batch, args)
            scored = time.perf_counter()
            losses = update_policy(model, optimizer, batch, shuffle, args, rank)
            ended = time.perf_counter()
            sampler.refresh()

            memory["flat_steps"] = memory["flat_steps"] + 1 if charts["charts/flat_groups"] == 1 else 0
            if memory["flat_steps"] == 10:
                tqdm.write("nothing is learnt: for 10 steps all rewards of each group were equal")
            charts |= {"charts/learning_rate": lr, "charts/TPS": charts["charts/tokens"] / (ended - begun)}
            charts |= {"time/rollout": sampled - begun, "time/score": scored - sampled}
            charts |= {"time/update": ended - scored}
            shown = {"reward": f"{charts['charts/reward']:.3f}", "tok/s": f"{charts['charts/TPS']:.0f}"}
            run.log(losses | charts, shown)
            if run.due(args.eval_every):
                keep_completions(run, *pass_rates(sampler, args, rank, size))
    save_model(run, model, task.tokenizer)
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
