# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch>=2.13", "gymnasium>=1.4", "ale-py>=0.12.1", "imageio", "numpy>=2", "tqdm", "tyro>=1.0", "wandb",
# ]
# ///
"""Proximal policy optimisation for Atari games from pixels, in one file.

The whole algorithm from top to bottom: mathematics, network, games, rollout, update, training loop.
Nothing is imported from the other scripts; `pytest --script my_copy.py` verifies a changed copy.

    python ppo_atari.py                                         # Breakout, hours on a CPU
    python ppo_atari.py --env-id ALE/Pong-v5 --bf16 --track     # another game, faster, logged to W&B

Papers: PPO (Schulman et al. 2017, arXiv 1707.06347, eq. 7 and 9), GAE (Schulman et al. 2015, arXiv
1506.02438, eq. 16), network and preprocessing (Mnih et al. 2015, doi 10.1038/nature14236), time limits
(Pardo et al. 2018, arXiv 1712.00378), evaluation protocols (Machado et al. 2018, arXiv 1709.06009), KL
estimators (Schulman 2020, http://joschu.net/blog/kl-approx.html).

Differs from CleanRL's ppo_atari.py in:
 [D1] The limit of 108,000 frames is not a terminal state: the advantage goes on with the value of the
      state really reached.
 [D2] Games run and are preprocessed inside ALE; an ended game is reset at once, with a seed of its own.
 [D3] After a lost life FIRE is executed in place of the agent's next action, as a step of the rollout
      (CleanRL: two steps, FIRE and another, outside the data).
 [D4] A game's first stack holds three black frames (CleanRL: the first frame four times).
 [D5] Values and log-probabilities are computed in large batches after the rollout, with the weights that
      acted.
 [D6] Advantages are normalised with the population variance.
 [D7] --target-kl is checked before every optimiser step and ends the whole update, not one epoch.
 [D8] The step budget is rounded up to whole iterations (and says so); nothing collected is dropped.
 [D9] Metrics are means over all minibatches; the clip fraction counts removed gradients only.
[D10] Games, actions, shuffling and evaluation draw from random streams of their own.
"""

import collections
import contextlib
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
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

import ale_py  # registers the games
import gymnasium as gym
import imageio
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from ale_py.vector_env import AtariVectorEnv
from torch.optim.adam import adam
from tqdm import tqdm

SCRIPT = "ppo_atari"

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
Frames = Annotated[int, "must lie between 1 and 2**31 - 1", lambda x: 1 <= x < 2**31]
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
    """Proximal policy optimisation for Atari games from pixels, in one file."""

    env_id: str = "ALE/Breakout-v5"  # id of an Atari game; how it is played say the flags, not its version
    total_timesteps: Natural = 10_000_000  # agent steps (4 frames) of all games, rounded up to iterations
    num_envs: Natural = 8  # games played side by side
    num_steps: Natural = 128  # steps of each game in a rollout
    num_minibatches: Natural = 4  # minibatches an epoch
    update_epochs: Natural = 4  # passes over a rollout
    learning_rate: Positive = 2.5e-4  # Adam's step size
    anneal_lr: bool = True  # decay the learning rate linearly to zero
    gamma: Fraction = 0.99  # discount factor
    gae_lambda: Fraction = 0.95  # lambda of generalised advantage estimation
    clip_coef: Positive = 0.1  # epsilon of the clipped surrogate, and of the clipped value loss
    clip_vloss: bool = True  # clip the value loss around the rollout's values
    norm_adv: bool = True  # normalise advantages within a minibatch
    ent_coef: Weight = 0.01  # weight of the entropy bonus
    vf_coef: Weight = 0.5  # weight of the value loss
    max_grad_norm: Positive = 0.5  # largest norm of a minibatch's gradient
    target_kl: Positive | None = None  # end an update before the step where the approximate KL exceeds it
    life_loss: bool = True  # a lost life is terminal; no-ops and FIRE at the start (Machado et al.: neither)
    sticky: Fraction | None = None  # chance that the last action repeats; default 0, --no-life-loss 0.25
    max_frames: Frames = 108_000  # frames after which a game is cut off
    bf16: bool = False  # convolutions in bfloat16 (weights, heads, losses and optimiser stay float32)
    seed: NotNegative = 1  # seed of all random streams
    device: Literal["auto", "cpu", "cuda"] = "auto"  # of the networks; auto takes cuda if there is one
    compile: bool = True  # compile the minibatch gradient (eager mode without a C++ compiler)
    eval_every: NotNegative = 0  # evaluate every so many steps; 0: only at the end
    eval_episodes: NotNegative = 10  # games of an evaluation: sampled actions, own seeds; 0: none
    save_every: Natural = 100  # iterations between two checkpoints
    run_name: str | None = None  # folder under runs/; default: game, script, seed and time
    resume: Path | None = None  # go on with the run in this folder, which only --total-timesteps may change
    start_from: Path | None = None  # begin a new run with the weights of this checkpoint
    eval_checkpoint: Path | None = None  # do not train: evaluate this checkpoint
    video: Path | None = None  # film the first game of --eval-checkpoint into this .gif
    track: bool = False  # log to Weights & Biases as well (WANDB_MODE=offline needs no network)
    wandb_project_name: str = "ppo-verified"  # W&B project (the team comes from WANDB_ENTITY)

    def __post_init__(self):
        check_flags(self)
        if self.batch_size % self.num_minibatches:
            raise UsageError(
                f"--num-envs {self.num_envs} x --num-steps {self.num_steps} = {self.batch_size} samples "
                f"do not divide into --num-minibatches {self.num_minibatches}"
            )
        if self.norm_adv and self.batch_size == self.num_minibatches:
            raise UsageError("minibatches of one sample cannot be normalised: use fewer, or --no-norm-adv")
        if self.video is not None and (self.eval_checkpoint is None or self.video.suffix != ".gif"):
            raise UsageError(f"--video {self.video} must end in .gif and needs --eval-checkpoint")
        if self.video is not None and not self.video.parent.is_dir():
            raise UsageError(f"--video {self.video}: there is no folder {self.video.parent}")
        if self.eval_checkpoint is not None and not self.eval_episodes:
            raise UsageError("--eval-checkpoint needs --eval-episodes of at least 1")

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return -(-self.total_timesteps // self.batch_size)  # [D8]


def streams(seed: int) -> list[np.random.SeedSequence]:
    """Independent random streams: environments or prompts, actions or tokens, shuffling, evaluation."""
    return np.random.SeedSequence(seed).spawn(4)


# ---- 2. Pure functions: T steps, N games, M any shape, A actions -------------------------------------------


def linear_schedule(step: int, total: int) -> float:
    """Fraction of the initial value at update `step` of `total`, counted from 0: 1 first, 1 / total last."""
    return 1.0 - step / total


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


def minibatches(n, num, generator):
    """A fresh random partition of range(n) into `num` index tensors; nothing is dropped."""
    return torch.randperm(n, generator=generator, device=generator.device).tensor_split(num)


def categorical_logp_entropy(logits, action):
    """Log-probability and entropy (nats) of a categorical policy. (M, A), (M,) -> (M,), (M,)."""
    logps = torch.log_softmax(logits, -1)
    entropy = -(logps.exp() * logps).sum(-1)
    return logps.gather(-1, action.unsqueeze(-1)).squeeze(-1), entropy


# ---- 3. Model ----------------------------------------------------------------------------------------------


def layer_init(layer: nn.Module, gain: float = math.sqrt(2)) -> nn.Module:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """The network of Mnih et al. (2015), a policy and a value head on it, and the policy's distribution: a
    categorical one. Change network and distribution only here."""

    def __init__(self, num_actions: int, bf16: bool = False):
        super().__init__()
        self.bf16 = bf16
        self.trunk = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)), nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU(),
            nn.Flatten(), layer_init(nn.Linear(64 * 7 * 7, 512)), nn.ReLU(),
        )  # fmt: skip
        self.critic = layer_init(nn.Linear(512, 1), 1.0)
        self.actor = layer_init(nn.Linear(512, num_actions), 0.01)

    def forward(self, obs):
        """uint8 (M, 4, 84, 84) -> logits (M, A), value (M,), float32."""
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            hidden = self.trunk(obs.contiguous(memory_format=torch.channels_last) / 255.0)  # (M, 512)
        hidden = hidden.float()
        return self.actor(hidden), self.critic(hidden).squeeze(-1)

    def acting(self, rng, num_steps: int, num_envs: int, own=slice(None), dtype=torch.float32):
        """The policy as a function: obs (N, 4, 84, 84) -> sampled actions (N,), by the Gumbel-max trick.

        The noise of `num_envs` games is drawn from `rng`, `num_steps` steps at once, and used in games `own`.
        """
        device, size = self.actor.weight.device, (num_steps, num_envs, self.actor.out_features)

        def draw():
            while True:
                yield from torch.as_tensor(rng.gumbel(size=size)[:, own], dtype=dtype, device=device)

        noise = draw()
        return lambda obs: (self(torch.as_tensor(obs, device=device))[0] + next(noise)).argmax(-1)

    def evaluate(self, obs, actions):
        """Log-probability and entropy of actions, and values. (M, 4, 84, 84), (M,) -> (M,) each."""
        logits, values = self(obs)
        return *categorical_logp_entropy(logits, actions), values

    def value(self, obs):
        """(M, 4, 84, 84) -> (M,)."""
        return self(obs)[1]


# ---- 4. Environment ----------------------------------------------------------------------------------------


def make_games(args: Args, num: int, **options) -> AtariVectorEnv:
    """ALE's vector environment: `num` games, 4 stacked frames of 84 x 84 grey, each the larger of two."""
    game = gym.spec(args.env_id).kwargs
    if "game" not in game or game.get("obs_type") == "ram":
        raise UsageError(f"--env-id {args.env_id} is not an Atari game on pixels, such as ALE/Pong-v5")
    sticky = args.sticky if args.sticky is not None else 0.0 if args.life_loss else 0.25
    return AtariVectorEnv(
        game["game"], num, life_loss_info=args.life_loss, use_fire_reset=args.life_loss,
        noop_max=30 if args.life_loss else 0, repeat_action_probability=sticky, reward_clipping=False,
        max_num_frames_per_episode=args.max_frames, **options,
    )  # fmt: skip


class Games:
    """N games side by side, each with its score so far, and with a seed and the actions since then.

    A checkpoint restores the emulators by playing on from their seeds. ALE would reset an ended game in the
    step after it; all are reset before that, so every step is real. [D2]
    """

    RESEED = 5000  # steps between two seeds: with a seed ALE loads the game anew, which takes 15 resets' time

    def __init__(self, args: Args, streams: list[np.random.SeedSequence], own=slice(None)):
        self.own, self.rngs = own, [np.random.default_rng(stream) for stream in streams[own]]
        self.num = num = len(self.rngs)
        with told(f"--env-id {args.env_id}"):
            self.envs = make_games(args, num)
        actions, fire = list(self.envs.ale.get_action_set()), ale_py.Action.FIRE
        self.fire = actions.index(fire) if args.life_loss and fire in actions else None
        self.args, self.num_actions = args, len(actions)
        self.seeds, self.actions = np.full(num, -1), [[] for _ in range(num)]
        self.score, self.length, self.fire_next = np.zeros(num), np.zeros(num, int), np.zeros(num, bool)
        self.first_frame = np.zeros(num, int)

    def reset(self, which: np.ndarray | None = None, seeds=None):
        """New games where `which` (N,) is True, all without it; `seeds` (N,) instead of the streams' own."""
        which, now = np.ones(self.num, bool) if which is None else which, np.full(self.num, -1)
        for i in np.flatnonzero(which):
            if seeds is not None or self.seeds[i] < 0 or len(self.actions[i]) >= self.RESEED:
                now[i] = self.seeds[i] = self.rngs[i].integers(2**31) if seeds is None else seeds[i]
                self.actions[i] = []
        self.score[which], self.length[which], self.fire_next[which] = 0.0, 0, False
        self.obs, info = self.envs.reset(seed=now[which], options={"reset_mask": which})
        self.first_frame[which] = info["episode_frame_number"][which]

    def step(self, actions: np.ndarray):
        """Raw rewards, terminated, truncated, (N,) each; `obs` holds the states reached until `reset`."""
        if not ((actions >= 0) & (actions < self.num_actions)).all():  # ALE would wait for ever
            raise ValueError(f"actions {actions.tolist()}: this game has {self.num_actions}")
        actions = np.where(self.fire_next, self.fire or 0, actions)  # a new life waits for FIRE [D3]
        self.obs, rewards, terminated, truncated, info = self.envs.step(actions)
        for i, action in enumerate(actions):
            self.actions[i].append(int(action))
        self.score += rewards
        self.length += 1
        over = terminated & (info["lives"] == 0) if self.args.life_loss else terminated
        late = info["episode_frame_number"] - self.first_frame >= self.args.max_frames
        self.over = over | truncated | late  # ALE does not tell the limit when a life is lost at it
        self.fire_next = terminated & ~self.over & (self.fire is not None)
        return rewards, terminated, truncated

    def state_dict(self):
        """The games of all processes in a row."""
        own = [
            {"rng": rng.bit_generator.state, "seed": int(seed), "obs": torch.tensor(obs),
             "actions": torch.tensor(actions, dtype=torch.uint8)}
            for rng, seed, obs, actions in zip(self.rngs, self.seeds, self.obs, self.actions)
        ]  # fmt: skip
        return sum(collect(own), [])

    def load_state_dict(self, states):
        states = states[self.own]
        seeds, played = [state["seed"] for state in states], [state["actions"].tolist() for state in states]
        lengths = np.array([len(actions) for actions in played])
        self.reset(seeds=seeds)
        for left in range(lengths.max(), -1, -1):  # steps to go: all games end together
            if (starts := lengths == left).any():
                self.reset(starts, seeds)
            if left:
                self.step(np.array([actions[-left] if len(actions) >= left else 0 for actions in played]))
                if self.over.any():
                    self.reset(self.over)
        for rng, state in zip(self.rngs, states):
            rng.bit_generator.state = state["rng"]
        if any(not np.array_equal(obs, state["obs"].numpy()) for obs, state in zip(self.obs, states)):
            print("the games do not repeat from their seeds: resuming with new games")
            self.reset(seeds=[rng.integers(2**31) for rng in self.rngs])


@torch.no_grad()
def evaluate_games(agent: Agent, args: Args) -> dict:
    """Whole games, sampled actions, raw scores, the same seeds each time; films the first one."""
    game_stream, action_stream = streams(args.seed)[3].spawn(2)
    games, film = Games(args, game_stream.spawn(args.eval_episodes)), []
    games.reset(seeds=game_stream.generate_state(games.num) // 2)  # below 2**31
    act = agent.acting(np.random.default_rng(action_stream), 1, games.num, dtype=torch.float64)
    if args.video is not None:  # the same game once more, in colour
        camera = make_games(args, 1, img_height=210, img_width=160, grayscale=False, stack_num=1)
        camera.reset(seed=games.seeds[:1])
    scores, lengths = np.zeros(games.num), np.zeros(games.num, int)
    while not lengths.all():
        games.step(act(games.obs).cpu().numpy())
        if args.video is not None and not lengths[0]:
            film.append(camera.step(np.array(games.actions[0][-1:]))[0][0, 0])
        ended = games.over & (lengths == 0)  # only the first game of each counts
        scores[ended], lengths[ended] = games.score[ended], games.length[ended]
    if args.video is not None:
        with told(f"--video {args.video}"):
            imageio.mimsave(args.video, film, fps=15)  # 60 frames a second, of which 4 are one step
    means = float(np.mean(scores)), float(np.std(scores)), float(np.mean(lengths))
    names = "eval/episodic_return", "eval/episodic_return_std", "eval/episodic_length"
    tqdm.write(", ".join(f"{name} {value:.1f}" for name, value in zip(names, means)))
    return dict(zip(names, means))


# ---- 5. Rollout --------------------------------------------------------------------------------------------


@torch.no_grad()
def play_rollout(agent, games, rng, args):
    """T steps of N games: a dict of (T, N, ...) tensors, and (score, length) of the ended games.

    Values, advantages and returns are those of the games of all processes, the rest of this one's own.
    """
    T, N, device = args.num_steps, games.num, next(agent.parameters()).device
    act = agent.acting(rng, T, args.num_envs, games.own)
    obs = torch.empty((T + 1, *games.obs.shape), dtype=torch.uint8, device=device)
    actions = torch.zeros((T + 1, N), dtype=torch.int64, device=device)  # none in the last row
    rewards = np.empty((T, N), np.float32)
    terminated, truncated = np.empty((T, N), bool), np.empty((T, N), bool)
    cut, episodes = [], []
    for t in range(T):
        obs[t] = torch.from_numpy(games.obs)
        actions[t] = act(obs[t])
        rewards[t], terminated[t], truncated[t] = games.step(actions[t].cpu().numpy())
        cut += [games.obs[i].copy() for i in np.flatnonzero(truncated[t])]  # reached, but not acted on
        if games.over.any():
            episodes += zip(games.score[games.over].tolist(), games.length[games.over].tolist())
            games.reset(games.over)
    obs[T] = torch.from_numpy(games.obs)
    batch = {
        "obs": obs[:-1],
        "actions": actions[:-1],
        "rewards": torch.as_tensor(np.sign(rewards), device=device),  # the score counts, its size does not
        "terminated": torch.as_tensor(terminated, device=device),
        "done": torch.as_tensor(terminated | truncated, device=device),
    }
    chunks = (x.flatten(0, 1).split(args.batch_size // args.num_minibatches) for x in (obs, actions))
    evaluated = zip(*map(agent.evaluate, *chunks))  # [D5]
    logps, _, values = (torch.cat(parts).view(T + 1, N) for parts in evaluated)
    next_values = values[1:].clone()
    if cut:  # [D1]
        next_values[torch.as_tensor(truncated)] = agent.value(torch.as_tensor(np.stack(cut), device=device))
    batch["logps"], batch["values"] = logps[:-1], values[:-1]
    batch["advantages"], batch["returns"] = compute_gae(
        batch["rewards"], batch["values"], next_values,
        batch["terminated"], batch["done"], args.gamma, args.gae_lambda,
    )  # fmt: skip
    for name in ("values", "advantages", "returns"):
        batch[name] = all_columns(batch[name], games.own, args.num_envs)
    return batch, sum(collect(episodes), [])


def all_columns(x, own, total):
    """(T, own) of this process to (T, total) of all, in the order of their ranks."""
    whole = x.new_zeros(len(x), total)
    whole[:, own] = x
    return sum_over_processes(whole)


# ---- 6. Update ---------------------------------------------------------------------------------------------

STATS = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


def pixel_gradient(agent, batch, mb, args, own=None):
    """Gradient of the PPO loss (eq. 9) on the samples `mb` as one vector, and STATS. One compiled graph.

    `own` restricts it to the rows, and their places in `mb`, that this process has the pictures of.
    """
    rows, places = (mb, slice(None)) if own is None else own
    b = {name: batch[name][rows] for name in ("obs", "actions", "logps")}
    b |= {name: batch[name][mb][places] for name in ("values", "returns")}
    logp, entropy, values = agent.evaluate(b["obs"], b["actions"])
    adv = batch["advantages"][mb]
    adv = (whiten(adv) if args.norm_adv else adv)[places]  # [D6]
    pg_loss = policy_loss(logp, b["logps"], adv, args.clip_coef, args.clip_coef).mean()
    value_clip = args.clip_coef if args.clip_vloss else None
    v_loss = value_loss(values, b["values"], b["returns"], value_clip).mean()
    loss = pg_loss + args.vf_coef * v_loss - args.ent_coef * entropy.mean()
    gradients = torch.autograd.grad(loss, list(agent.parameters()))
    kl1, kl3 = (approx_kl(b["logps"], logp, kind).mean() for kind in ("k1", "k3"))
    clipped = clip_fraction(logp, b["logps"], adv, args.clip_coef, args.clip_coef)
    stats = torch.stack([pg_loss, v_loss, entropy.mean(), kl1, kl3, clipped])
    return torch.cat([g.reshape(-1) for g in gradients]), stats.detach()


def gradient_of_all(gradient, own):
    """`gradient` over processes: each computes the part of which it has the samples, and all get the sum."""

    def total(agent, batch, mb, args):
        step, game = mb // args.num_envs, mb % args.num_envs
        places = ((game >= own.start) & (game < own.stop)).nonzero().squeeze(-1)
        rows = step[places] * (own.stop - own.start) + game[places] - own.start
        part = batch["values"].new_zeros(sum(p.numel() for p in agent.parameters()) + len(STATS))
        if len(rows):
            part = torch.cat(gradient(agent, batch, mb, args, (rows, places))) * (len(rows) / len(mb))
        return sum_over_processes(part).split([len(part) - len(STATS), len(STATS)])

    return total


class Adam:
    """torch's Adam (Kingma & Ba 2015) on one vector, of which all weights become views: one norm, one step.

    By torch's function, as a call of its class takes twice as long.
    """

    def __init__(self, module: nn.Module):
        self.weights = nn.utils.parameters_to_vector(module.parameters()).detach()
        nn.utils.vector_to_parameters(self.weights, module.parameters())
        self.moments = {name: torch.zeros_like(self.weights) for name in ("exp_avg", "exp_avg_sq")}
        self.moments["step"] = torch.zeros((), device=self.weights.device)

    def step(self, grad, lr):
        mean, square, step = ([x] for x in self.moments.values())
        constants = dict(beta1=0.9, beta2=0.999, eps=1e-5, weight_decay=0.0, amsgrad=False, maximize=False)
        adam([self.weights], [grad], mean, square, [], step, lr=lr, **constants, fused=True)

    def state_dict(self):
        return self.moments

    def load_state_dict(self, state):
        for name, moment in self.moments.items():
            moment.copy_(state[name])


def update(agent, optimizer, lr, gradient, batch, generator, args):
    """Epochs of minibatch steps on one rollout. Returns the means of the STATS and the gradient norm."""
    names = ("obs", "actions", "logps", "advantages", "returns", "values")
    b = {name: batch[name].flatten(0, 1) for name in names}  # (T * N, ...)
    stats, norms = [], []
    epochs = (
        minibatches(args.batch_size, args.num_minibatches, generator) for _ in range(args.update_epochs)
    )
    for mb in itertools.chain.from_iterable(epochs):
        grad, stat = gradient(agent, b, mb.to(b["obs"].device), args)
        norm = torch.linalg.vector_norm(grad)
        stats.append(stat.clone())  # a CUDA graph would write the next ones over it
        norms.append(norm)
        if args.target_kl is not None and stat[STATS.index("approx_kl")] > args.target_kl:
            break  # ends the update: one loop holds all epochs [D7]
        grad *= (args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        optimizer.step(grad, lr)
    means = dict(zip(STATS, torch.stack(stats).mean(0).tolist()), grad_norm=torch.stack(norms).mean().item())
    if not (math.isfinite(means["grad_norm"]) and optimizer.weights.isfinite().all()):
        raise FloatingPointError("the gradient is not finite")
    means["explained_variance"] = explained_variance(b["values"], b["returns"]).item()
    return {f"losses/{name}": value for name, value in means.items()}


# ---- 7. Main -----------------------------------------------------------------------------------------------


def main(args: Args) -> dict:
    """Train, or evaluate a checkpoint, as `args` say; returns the last metrics."""
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    rank, size = join_processes(device)
    if size > args.num_envs:
        raise UsageError(f"--num-envs {args.num_envs} is fewer than the {size} processes")
    env_stream, action_stream, shuffle_stream, _ = streams(args.seed)  # [D10]
    bits = np.random.PCG64(action_stream)
    generator = torch.Generator().manual_seed(int(shuffle_stream.generate_state(1)[0]))
    torch.manual_seed(args.seed)  # initial weights
    games = Games(args, env_stream.spawn(args.num_envs), share_of(args.num_envs, rank, size))
    agent = Agent(games.num_actions, args.bf16).to(device)
    if args.eval_checkpoint is not None:
        load_parts({"agent": agent}, load_checkpoint(args.eval_checkpoint))
        return evaluate_games(agent, args)

    games.reset()
    optimizer, recent = Adam(agent), collections.deque(maxlen=100)
    gradient = compile_or_eager(pixel_gradient) if args.compile else pixel_gradient
    gradient = gradient if size == 1 else gradient_of_all(gradient, games.own)
    run = Run(args, args.env_id, args.num_iterations, args.batch_size)
    checked = lambda: check_weights(agent.parameters()) or agent.state_dict()
    run.learnt = {"agent": Saved(checked, agent.load_state_dict)}
    run.parts = {"optimizer": optimizer, "games": games}
    run.parts["recent"] = Saved(lambda: list(recent), recent.extend)
    run.parts["shuffle"] = Saved(generator.get_state, generator.set_state)
    run.parts["actions"] = Saved(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if run.total != args.total_timesteps:
        print(f"--total-timesteps {args.total_timesteps:,} rounded up to {run.total:,}, whole iterations")
    print(f"{args.env_id} on {device}, {len(optimizer.weights):,} parameters, writing {run.folder}")
    with run:
        run.bar.set_postfix_str("compiling" if args.compile else "")
        if size > 1:
            dist.broadcast(optimizer.weights, 0)
        check_weights(agent.parameters())
        for iteration in run:
            left = linear_schedule(iteration, args.num_iterations) if args.anneal_lr else 1.0
            lr = args.learning_rate * left
            batch, episodes = play_rollout(agent, games, np.random.Generator(bits), args)
            losses = update(agent, optimizer, lr, gradient, batch, generator, args)

            charts = {"charts/learning_rate": lr, "charts/episodes": len(episodes)}
            recent.extend(score for score, _ in episodes)
            if episodes:
                means = np.mean(episodes, 0).tolist()
                charts |= dict(zip(("charts/episodic_return", "charts/episodic_length"), means))
            if recent:
                charts["charts/episodic_return_100"] = float(np.mean(recent))  # of the last 100 episodes
            run.log(losses | charts, {"return": np.mean(recent)} if recent else {})
            if args.eval_episodes and run.due(args.eval_every):
                run.log(collect(evaluate_games(agent, args) if rank == 0 else None)[0])
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


def compile_or_eager(function):
    """torch.compile; where that fails (no C++ compiler), the same function uncompiled, said once."""
    torch._dynamo.config.trace_autograd_ops = True
    how = dict(fullgraph=True, options={"cpp_wrapper": not torch.cuda.is_available()})
    try:
        torch.compile(torch.sin, **how)(torch.ones(1))
    except Exception as error:
        print(f"running uncompiled, since torch.compile failed: {' '.join(str(error).split())[:400]}")
        return function
    return torch.compile(function, **how)


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
    try:
        main(parse_args())
    except (UsageError, FloatingPointError, OSError, KeyboardInterrupt) as error:
        sys.exit(f"{Path(__file__).name}: {str(error) or 'interrupted'}")
