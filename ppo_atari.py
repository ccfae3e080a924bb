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
import signal
import sys
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import ale_py  # registers the games
import gymnasium as gym
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


class UsageError(ValueError):
    """A fault of the command line, a file, an environment or a model, told in one sentence."""


@dataclass
class Args:
    """Proximal policy optimisation for Atari games from pixels, in one file."""

    env_id: str = "ALE/Breakout-v5"
    """gymnasium id of an Atari game; how it is played is set by the flags below, not by the id's version"""
    total_timesteps: int = 10_000_000
    """agent steps (of 4 frames) over all games, rounded up to whole iterations"""
    num_envs: int = 8
    """games played side by side"""
    num_steps: int = 128
    """steps of each game in a rollout"""
    num_minibatches: int = 4
    """minibatches an epoch"""
    update_epochs: int = 4
    """passes over a rollout"""
    learning_rate: float = 2.5e-4
    """Adam's step size"""
    anneal_lr: bool = True
    """decay the learning rate linearly to zero"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation"""
    clip_coef: float = 0.1
    """epsilon of the clipped surrogate, and of the clipped value loss"""
    clip_vloss: bool = True
    """clip the value loss around the rollout's values"""
    norm_adv: bool = True
    """normalise advantages within a minibatch"""
    ent_coef: float = 0.01
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """largest norm of a minibatch's gradient"""
    target_kl: float | None = None
    """end an update before the step at which the approximate KL (nats) exceeds this"""
    life_loss: bool = True
    """a lost life is terminal to the learner (the game goes on), games start with up to 30 no-ops and FIRE;
    --no-life-loss: neither, the protocol of Machado et al."""
    sticky: float | None = None
    """probability that ALE repeats the last action instead; default: 0, with --no-life-loss 0.25"""
    max_frames: int = 108_000
    """frames after which a game is cut off"""
    bf16: bool = False
    """run the convolutions in bfloat16 (weights, heads, losses and optimiser stay float32)"""
    seed: int = 1
    """seed of all random streams"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the networks live; auto takes cuda if there is one"""
    compile: bool = True
    """compile the minibatch gradient (falls back to eager mode without a C++ compiler)"""
    eval_every: int = 0
    """evaluate every so many steps; 0: only at the end"""
    eval_episodes: int = 10
    """games of an evaluation: sampled actions, own seeds; 0: none"""
    save_every: int = 100
    """iterations between two checkpoints"""
    run_name: str | None = None
    """folder under runs/; default: game, script, seed and time"""
    resume: Path | None = None
    """continue the run in this folder, with its flags"""
    eval_checkpoint: Path | None = None
    """do not train: evaluate this checkpoint.pt"""
    video: Path | None = None
    """film the evaluation of --eval-checkpoint into this .gif or .mp4"""
    track: bool = False
    """log to Weights & Biases as well (WANDB_MODE=offline needs no network)"""
    wandb_project_name: str = "ppo-verified"
    """W&B project (the team comes from WANDB_ENTITY)"""

    def __post_init__(self):
        at_least_one = "total_timesteps num_envs num_steps num_minibatches update_epochs save_every".split()
        for name, value in vars(self).items():
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                continue
            rule, holds = "must not be negative", 0 <= value < math.inf
            if name in at_least_one:
                rule, holds = "must be at least 1", value >= 1
            elif name == "max_frames":
                rule, holds = "must lie between 1 and 2**31 - 1", 1 <= value < 2**31
            elif name in ("learning_rate", "clip_coef", "max_grad_norm", "target_kl"):
                rule, holds = "must be positive and finite", 0 < value < math.inf
            elif name in ("gamma", "gae_lambda", "sticky"):
                rule, holds = "must lie in [0, 1]", 0 <= value <= 1
            if not holds:
                raise UsageError(f"--{name.replace('_', '-')} {value} {rule}")
        if self.batch_size % self.num_minibatches:
            raise UsageError(
                f"--num-envs {self.num_envs} x --num-steps {self.num_steps} = {self.batch_size} samples "
                f"do not divide into --num-minibatches {self.num_minibatches}"
            )
        if self.norm_adv and self.batch_size == self.num_minibatches:
            raise UsageError("minibatches of one sample cannot be normalised: use fewer, or --no-norm-adv")
        if self.video is not None and self.eval_checkpoint is None:
            raise UsageError(f"--video {self.video} needs --eval-checkpoint")
        if self.video is not None and Path(self.video).suffix not in (".gif", ".mp4"):
            raise UsageError(f"--video {self.video} must end in .gif or .mp4")
        if self.run_name is not None and Path(self.run_name).name != self.run_name:
            raise UsageError(f"--run-name {self.run_name} must be the name of a folder under runs/")
        if self.track and importlib.util.find_spec("wandb") is None:
            raise UsageError("--track needs: pip install wandb")
        if self.run_name is not None and self.resume is not None:
            raise UsageError(f"--run-name {self.run_name} contradicts --resume {self.resume}")

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def task_name(self) -> str:
        return self.env_id.replace("/", "-")

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
    """The network of Mnih et al. (2015), a policy and a value head on it. Change the network only here."""

    def __init__(self, num_actions: int, bf16: bool):
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


def flatten_parameters(module: nn.Module) -> torch.Tensor:
    """Move all parameters into one vector of which they become views: one norm, one step, one all-reduce."""
    flat = nn.utils.parameters_to_vector(module.parameters()).detach()
    nn.utils.vector_to_parameters(flat, module.parameters())
    return flat


# ---- 4. Environment ----------------------------------------------------------------------------------------


def make_games(args: Args, num: int, **options) -> AtariVectorEnv:
    """ALE's vector environment: `num` games, 4 stacked frames of 84 x 84 grey, each the larger of two."""
    try:
        game = gym.spec(args.env_id).kwargs
    except gym.error.Error as error:
        raise UsageError(f"--env-id {args.env_id}: {error}") from error
    if "game" not in game or game.get("obs_type") == "ram":
        raise UsageError(f"--env-id {args.env_id} is not an Atari game on pixels, such as ALE/Pong-v5")
    sticky = args.sticky if args.sticky is not None else 0.0 if args.life_loss else 0.25
    envs = AtariVectorEnv(
        game["game"], num, life_loss_info=args.life_loss, use_fire_reset=args.life_loss,
        noop_max=30 if args.life_loss else 0, repeat_action_probability=sticky, reward_clipping=False,
        max_num_frames_per_episode=args.max_frames, **options,
    )  # fmt: skip
    if not isinstance(envs.single_action_space, gym.spaces.Discrete):
        raise UsageError(f"--env-id {args.env_id}: this script needs Discrete actions")
    return envs


def fire_action(env_id: str) -> int | None:
    """The id of FIRE among the game's actions; None if it has none."""
    ale = ale_py.ALEInterface()
    ale.loadROM(ale_py.roms.get_rom_path(gym.spec(env_id).kwargs["game"]))
    actions = ale.getMinimalActionSet()
    return actions.index(ale_py.Action.FIRE) if ale_py.Action.FIRE in actions else None


class Games:
    """N games side by side, each with its score so far, and with a seed and the actions since then.

    A checkpoint restores the emulators by playing on from their seeds. ALE would reset an ended game in the
    step after it; all are reset before that, so every step is real. [D2]
    """

    RESEED = 5000  # steps between two seeds: with a seed ALE loads the game anew, which takes 15 resets' time

    def __init__(self, args: Args, streams: list[np.random.SeedSequence]):
        self.num = num = len(streams)
        self.envs, self.rngs = make_games(args, num), [np.random.default_rng(stream) for stream in streams]
        self.life_loss, self.max_frames = args.life_loss, args.max_frames
        self.fire = fire_action(args.env_id) if args.life_loss else None
        self.num_actions = int(self.envs.single_action_space.n)
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
        over = terminated & (info["lives"] == 0) if self.life_loss else terminated
        late = info["episode_frame_number"] - self.first_frame >= self.max_frames
        self.over = over | truncated | late  # ALE does not tell the limit when a life is lost at it
        self.fire_next = terminated & ~self.over & (self.fire is not None)
        return rewards, terminated, truncated

    def state_dict(self):
        """A list, so that the games of several processes can be put together."""
        return [
            {"rng": json.dumps(rng.bit_generator.state), "seed": int(seed), "obs": torch.tensor(obs),
             "actions": torch.tensor(actions, dtype=torch.uint8)}
            for rng, seed, obs, actions in zip(self.rngs, self.seeds, self.obs, self.actions)
        ]  # fmt: skip

    def load_state_dict(self, states):
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
            rng.bit_generator.state = json.loads(state["rng"])
        if any(not np.array_equal(obs, state["obs"].numpy()) for obs, state in zip(self.obs, states)):
            print("the games do not repeat from their seeds: resuming with new games")
            self.reset(seeds=[rng.integers(2**31) for rng in self.rngs])


@torch.no_grad()
def evaluate_games(agent, games: Games, args: Args, device: torch.device, frames: list | None = None) -> dict:
    """Whole games, sampled actions, raw scores, the same seeds each time. Films the first into `frames`."""
    game_stream, action_stream = streams(args.seed)[3].spawn(2)
    rng = np.random.default_rng(action_stream)
    games.reset(seeds=game_stream.generate_state(games.num) // 2)  # below 2**31
    if frames is not None:  # the same game once more, in colour
        camera = make_games(args, 1, img_height=210, img_width=160, grayscale=False, stack_num=1)
        camera.reset(seed=games.seeds[:1])
    scores, lengths = np.zeros(games.num), np.zeros(games.num, int)
    while not lengths.all():
        noise = torch.as_tensor(rng.gumbel(size=(games.num, games.num_actions)), device=device)
        logits = agent(torch.as_tensor(games.obs, device=device))[0]
        games.step((logits + noise).argmax(-1).cpu().numpy())
        if frames is not None and not lengths[0]:
            frames.append(camera.step(np.array(games.actions[0][-1:]))[0][0, 0])
        ended = games.over & (lengths == 0)  # only the first game of each counts
        scores[ended], lengths[ended] = games.score[ended], games.length[ended]
    return {
        "eval/episodic_return": float(np.mean(scores)),
        "eval/episodic_return_std": float(np.std(scores)),
        "eval/episodic_length": float(np.mean(lengths)),
    }


# ---- 5. Rollout --------------------------------------------------------------------------------------------


@torch.no_grad()
def play_rollout(agent, games, rng, args, device, own=slice(None)):
    """T steps of N games: a dict of (T, N, ...) tensors, and (score, length) of the ended games."""
    T, N = args.num_steps, games.num
    noise = rng.gumbel(size=(T, args.num_envs, games.num_actions))[:, own]
    noise = torch.as_tensor(noise, dtype=torch.float32, device=device)
    obs = torch.empty((T + 1, *games.obs.shape), dtype=torch.uint8, device=device)
    actions = torch.empty((T, N), dtype=torch.int64, device=device)
    rewards = np.empty((T, N), np.float32)
    terminated, truncated = np.empty((T, N), bool), np.empty((T, N), bool)
    cut, episodes = [], []
    for t in range(T):
        obs[t] = torch.from_numpy(games.obs)
        actions[t] = (agent(obs[t])[0] + noise[t]).argmax(-1)  # a sample: the Gumbel-max trick
        rewards[t], terminated[t], truncated[t] = games.step(actions[t].cpu().numpy())
        cut += [games.obs[i].copy() for i in np.flatnonzero(truncated[t])]  # reached, but not acted on
        if games.over.any():
            episodes += zip(games.score[games.over].tolist(), games.length[games.over].tolist())
            games.reset(games.over)
    obs[T] = torch.from_numpy(games.obs)
    batch = {
        "obs": obs[:-1],
        "actions": actions,
        "rewards": torch.as_tensor(np.sign(rewards), device=device),  # the score counts, its size does not
        "terminated": torch.as_tensor(terminated, device=device),
        "done": torch.as_tensor(terminated | truncated, device=device),
    }
    chunks = obs.flatten(0, 1).split(args.batch_size // args.num_minibatches)
    logits, values = (torch.cat(parts) for parts in zip(*(agent(chunk) for chunk in chunks)))  # [D5]
    values = values.view(T + 1, N)
    next_values = values[1:].clone()
    if cut:  # [D1]
        next_values[torch.as_tensor(truncated)] = agent(torch.as_tensor(np.stack(cut), device=device))[1]
    batch["values"] = values[:-1]
    batch["logps"] = categorical_logp_entropy(logits[:-N].view(T, N, -1), actions)[0]
    batch["advantages"], batch["returns"] = compute_gae(
        batch["rewards"], batch["values"], next_values,
        batch["terminated"], batch["done"], args.gamma, args.gae_lambda,
    )  # fmt: skip
    return batch, episodes


# ---- 6. Update ---------------------------------------------------------------------------------------------

LEARNT_FROM = ("obs", "actions", "logps", "returns", "values")
STATS = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


def pixel_gradient(agent, batch, mb, clip_coef, clip_vloss, norm_adv, ent_coef, vf_coef, own=None):
    """Gradient of the PPO loss (eq. 9) on the samples `mb` as one vector, and STATS. One compiled graph.

    `own` restricts it to the rows and places in `mb` that this process has; advantages are of all processes.
    """
    rows, places = (mb, slice(None)) if own is None else own
    b = {name: batch[name][rows] for name in LEARNT_FROM}
    logits, values = agent(b["obs"])
    logp, entropy = categorical_logp_entropy(logits, b["actions"])
    adv = batch["advantages"][mb]
    adv = (whiten(adv) if norm_adv else adv)[places]  # [D6]
    pg_loss = policy_loss(logp, b["logps"], adv, clip_coef, clip_coef).mean()
    v_loss = value_loss(values, b["values"], b["returns"], clip_coef if clip_vloss else None).mean()
    loss = pg_loss + vf_coef * v_loss - ent_coef * entropy.mean()
    gradients = torch.autograd.grad(loss, list(agent.parameters()))
    kl1, kl3 = (approx_kl(b["logps"], logp, kind).mean() for kind in ("k1", "k3"))
    clipped = clip_fraction(logp, b["logps"], adv, clip_coef, clip_coef)
    stats = torch.stack([pg_loss, v_loss, entropy.mean(), kl1, kl3, clipped])
    return torch.cat([g.reshape(-1) for g in gradients]), stats.detach()


def compile_or_eager(function):
    """torch.compile; where that fails (no C++ compiler), the same function uncompiled, said once."""
    torch._dynamo.config.trace_autograd_ops = True
    compiled = torch.compile(function, fullgraph=True, options={"cpp_wrapper": not torch.cuda.is_available()})

    def call(*inputs):
        nonlocal compiled
        try:
            return compiled(*inputs)
        except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as error:
            print(f"running uncompiled, since torch.compile failed: {str(error).splitlines()[0]}")
            compiled = function
            return function(*inputs)

    return call


def optimizer_step(flat, grad, moments, lr):
    """torch.optim.Adam's step (Kingma & Ba 2015) by its function: the class costs twice as much a call."""
    state = [flat], [grad], [moments["exp_avg"]], [moments["exp_avg_sq"]], [], [moments["step"]]
    constants = dict(beta1=0.9, beta2=0.999, eps=1e-5, weight_decay=0.0, amsgrad=False, maximize=False)
    adam(*state, lr=lr, **constants, fused=True)


def all_columns(x, total):
    """(T, own) of this process to (T, total) of all, in the order of their ranks."""
    if not dist.is_initialized():
        return x
    whole = x.new_zeros(len(x), total)
    whole[:, share_of(total, dist.get_rank(), dist.get_world_size())] = x
    return sum_over_processes(whole)


def own_samples(mb, total):
    """Of the samples `mb` of (T * total), this process's: rows in its own (T * own), and places in `mb`."""
    own = share_of(total, dist.get_rank(), dist.get_world_size())
    t, column = mb // total, mb % total
    places = ((column >= own.start) & (column < own.stop)).nonzero().squeeze(-1)
    return t[places] * (own.stop - own.start) + column[places] - own.start, places


def update(flat, moments, lr, agent, gradient, batch, generator, args):
    """Epochs of minibatch steps on one rollout. Returns the means of the STATS and the gradient norm.

    The minibatches are the same in all processes; each computes the part of which it has the samples.
    """
    b = {key: value.flatten(0, 1) for key, value in batch.items()}  # (T * N, ...)
    everyone = {
        key: all_columns(batch[key], args.num_envs).flatten() for key in ("advantages", "values", "returns")
    }
    b["advantages"] = everyone["advantages"]
    settings = (args.clip_coef, args.clip_vloss, args.norm_adv, args.ent_coef, args.vf_coef)
    stats, norms = [], []
    epochs = (
        minibatches(args.batch_size, args.num_minibatches, generator) for _ in range(args.update_epochs)
    )
    for mb in itertools.chain.from_iterable(epochs):
        if dist.is_initialized():
            own = own_samples(mb, args.num_envs)
            part = flat.new_zeros(len(flat) + len(STATS))
            if len(own[0]):
                part = torch.cat(gradient(agent, b, mb, *settings, own)) * (len(own[0]) / len(mb))
            grad, stat = sum_over_processes(part).split([len(flat), len(STATS)])
        else:
            grad, stat = gradient(agent, b, mb, *settings)
        norm = torch.linalg.vector_norm(grad)
        stats.append(stat.clone())  # a CUDA graph would write the next ones over it
        norms.append(norm)
        if args.target_kl is not None and stat[STATS.index("approx_kl")] > args.target_kl:
            break  # ends the update: one loop holds all epochs [D7]
        grad *= (args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        optimizer_step(flat, grad, moments, lr)
    means = dict(zip(STATS, torch.stack(stats).mean(0).tolist()), grad_norm=torch.stack(norms).mean().item())
    means["explained_variance"] = explained_variance(everyone["values"], everyone["returns"]).item()
    return means


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


def load_state(part, state: dict) -> None:
    try:
        part.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"the checkpoint does not fit: {str(error).splitlines()[-1].strip()}") from error


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


def replay_games(args: Args, device: torch.device) -> dict:
    """--eval-checkpoint: evaluate a trained policy on the game it was trained on, and film its first game."""
    state = load_checkpoint(args.eval_checkpoint)
    kept = ("env_id", "life_loss", "sticky", "max_frames", "bf16")
    args = dataclasses.replace(args, **{name: state["args"][name] for name in kept})
    games = Games(args, streams(args.seed)[3].spawn(max(args.eval_episodes, 1)))
    agent, frames = Agent(games.num_actions, args.bf16).to(device), None if args.video is None else []
    load_state(agent, state["agent"])
    metrics = evaluate_games(agent, games, args, device, frames)
    print(
        f"{args.env_id}, step {state['step']:,}: " + ", ".join(f"{k[5:]} {v:.1f}" for k, v in metrics.items())
    )
    if args.video is not None:
        import imageio

        try:
            imageio.mimsave(args.video, frames, fps=15)  # 60 frames a second, of which 4 are one step
        except (OSError, ValueError, ImportError) as error:  # a codec that is not installed
            raise UsageError(f"--video {args.video}: {str(error).splitlines()[0]}") from error
    return metrics


def main(args: Args) -> dict:
    """Train, or evaluate, as `args` say; returns the final metrics."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: there is no CUDA device")
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    if args.eval_checkpoint is not None:
        return replay_games(args, device)
    rank, size = join_processes(device)
    state = None
    if args.resume is not None:
        state = load_checkpoint(args.resume / "checkpoint.pt")
        args = resumed_args(args, state["args"])
    if size > args.num_envs:
        raise UsageError(f"--num-envs {args.num_envs} is fewer than the {size} processes")
    own = share_of(args.num_envs, rank, size)

    env_stream, action_stream, shuffle_stream, eval_stream = streams(args.seed)  # [D10]
    rng = np.random.default_rng(action_stream)
    generator = torch.Generator(device).manual_seed(int(shuffle_stream.generate_state(1)[0]))
    torch.manual_seed(args.seed)  # initial weights
    games, eval_games = Games(args, env_stream.spawn(args.num_envs)[own]), None
    if args.eval_episodes and rank == 0:
        eval_games = Games(args, eval_stream.spawn(args.eval_episodes))
    agent = Agent(games.num_actions, args.bf16).to(device)
    flat = flatten_parameters(agent)
    moments = {name: torch.zeros_like(flat) for name in ("exp_avg", "exp_avg_sq")}
    moments["step"] = torch.zeros((), device=device)
    gradient = compile_or_eager(pixel_gradient) if args.compile else pixel_gradient
    recent, first, metrics, run = collections.deque(maxlen=100), 0, {}, None

    if state is None:
        folder = collect(open_run(args, device) if rank == 0 else None)[0]
        games.reset()
    else:
        folder, first = args.resume, state["step"] // args.batch_size
        if first == args.num_iterations:
            raise UsageError(f"--resume {folder}: this run is finished, at step {state['step']:,}")
        load_state(agent, state["agent"])
        games.load_state_dict(state["games"][own])
        for name, moment in moments.items():
            moment.copy_(state["moments"][name])
        rng.bit_generator.state = json.loads(state["actions"])
        generator.set_state(state["shuffle"])
        recent.extend(state["recent"])
        if rank == 0:
            cut_log(folder / "metrics.jsonl", state["step"])
    if size > 1:
        dist.broadcast(flat, 0)
    check_weights([flat])
    if args.track and rank == 0:
        run = start_tracking(args, folder)
    total = args.num_iterations * args.batch_size
    if total != args.total_timesteps:
        print(f"--total-timesteps {args.total_timesteps:,} rounded up to {total:,}, whole iterations")
    print(f"{args.env_id} on {device}, {flat.numel():,} parameters, writing {folder}")

    start = time.perf_counter()
    shown, begun = sys.stdout if rank else sys.stderr, first * args.batch_size
    with stop_signals() as stopped, tqdm(total=total, initial=begun, unit=" steps", file=shown) as bar:
        try:
            for iteration in range(first, args.num_iterations):
                lr = args.learning_rate * (
                    linear_schedule(iteration, args.num_iterations) if args.anneal_lr else 1.0
                )
                step = (iteration + 1) * args.batch_size
                batch, episodes = play_rollout(agent, games, rng, args, device, own)
                losses = update(flat, moments, lr, agent, gradient, batch, generator, args)
                if not (math.isfinite(losses["grad_norm"]) and flat.isfinite().all()):
                    raise FloatingPointError("the gradient is not finite")
                episodes, signals = (sum(lists, []) for lists in zip(*collect((episodes, stopped))))
                recent.extend(score for score, _ in episodes)
                metrics = {f"losses/{name}": value for name, value in losses.items()}
                metrics |= {"charts/learning_rate": lr, "charts/episodes": len(episodes)}
                metrics["charts/SPS"] = (step - first * args.batch_size) / (time.perf_counter() - start)
                if episodes:
                    metrics["charts/episodic_return"], metrics["charts/episodic_length"] = np.mean(
                        episodes, 0
                    ).tolist()
                if recent:
                    metrics["charts/episodic_return_100"] = float(np.mean(recent))  # of the last 100 episodes
                    bar.set_postfix({"return": f"{metrics['charts/episodic_return_100']:.1f}"}, refresh=False)
                final = iteration + 1 == args.num_iterations
                due = (
                    args.eval_every and step // args.eval_every > (step - args.batch_size) // args.eval_every
                )
                if args.eval_episodes and (final or due) and rank == 0:
                    metrics |= evaluate_games(agent, eval_games, args, device)
                if rank == 0:
                    write_metrics(folder / "metrics.jsonl", step, metrics)
                if run:
                    run.log(metrics, step=step)
                bar.update(args.batch_size)
                if final or signals or (iteration + 1) % args.save_every == 0:
                    state = {"script": SCRIPT, "args": json.loads(json.dumps(vars(args), default=str))}
                    state |= {"step": step, "shuffle": generator.get_state(), "recent": list(recent)}
                    state |= {"actions": json.dumps(rng.bit_generator.state), "moments": moments}
                    state |= {"agent": agent.state_dict(), "games": sum(collect(games.state_dict()), [])}
                    check_weights([flat])
                    if rank == 0:
                        save_checkpoint(folder / "checkpoint.pt", state)
                    collect(None)  # nobody leaves before it is written: torchrun ends all when one has left
                if signals and not final:
                    bar.close()
                    leave(signals[0], step, size, folder)
        except (FloatingPointError, RuntimeError) as error:
            name_last_checkpoint(error, step, folder)
    if run:
        run.finish()
    shown = [name for name in ("charts/episodic_return_100", "eval/episodic_return") if name in metrics]
    print("; ".join([*(f"{name} {metrics[name]:.1f}" for name in shown), str(folder / "checkpoint.pt")]))
    return metrics | {"step": total, "folder": str(folder)}


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except (UsageError, FloatingPointError, OSError) as error:
        sys.exit(f"{SCRIPT}.py: {error}")
