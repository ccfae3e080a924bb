# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.13", "gymnasium[mujoco]>=1.4", "numpy>=2", "tqdm", "tyro>=1.0", "wandb"]
# ///
"""Proximal policy optimisation for continuous control, in one file.

The whole algorithm from top to bottom: mathematics, network, environment, rollout, update, training loop.
Nothing is imported from the other scripts; `pytest --script my_copy.py` verifies a changed copy.

    python ppo_continuous.py                                          # HalfCheetah-v5, a few minutes on a CPU
    python ppo_continuous.py --env-id Hopper-v5 --seed 2 --track      # another task, logged to W&B

Papers: PPO (Schulman et al. 2017, arXiv 1707.06347, eq. 7 and 9), GAE (Schulman et al. 2015, arXiv
1506.02438, eq. 16), time limits (Pardo et al. 2018, arXiv 1712.00378), initial deviation (Andrychowicz et
al. 2020, arXiv 2006.05990), KL estimators (Schulman 2020, http://joschu.net/blog/kl-approx.html).

Differs from CleanRL's ppo_continuous_action.py in:
 [D1] A time limit is not a terminal state: the advantage goes on with the value of the state really reached.
 [D2] Every row is a real transition: an ended episode is reset at once, no row stands for the reset.
 [D3] Running statistics are float64, see each acted-on observation once, restart the return at every
      episode end, are saved and frozen at evaluation; the deviation is 1 until two samples are seen.
 [D4] Actions are in units of the bounds (-1 is low, +1 is high), so every action scale starts alike.
 [D5] Values and log-probabilities are computed in one batch after the rollout, with the weights that acted.
 [D6] Advantages are normalised with the population variance.
 [D7] --target-kl is checked before every optimiser step and ends the whole update, not one epoch.
 [D8] The step budget is rounded up to whole iterations (and says so); nothing collected is dropped.
 [D9] Metrics are means over all minibatches; the clip fraction counts removed gradients only.
[D10] Environments, actions, shuffling and evaluation draw from random streams of their own.
[D11] The policy starts with a standard deviation of exp(-1), not 1 (README: the initial standard deviation).
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

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.optim.adam import adam
from tqdm import tqdm

SCRIPT = "ppo_continuous"

# ---- 1. Arguments ------------------------------------------------------------------------------------------


class UsageError(ValueError):
    """A fault of the command line, a file, an environment or a model, told in one sentence."""


@dataclass
class Args:
    """Proximal policy optimisation for continuous control, in one file."""

    env_id: str = "HalfCheetah-v5"
    """gymnasium environment with a Box action space"""
    total_timesteps: int = 1_000_000
    """environment steps over all environments, rounded up to whole iterations"""
    num_envs: int = 1
    """environments stepped in turn"""
    num_steps: int = 2048
    """steps of each environment in a rollout"""
    num_minibatches: int = 32
    """minibatches an epoch"""
    update_epochs: int = 10
    """passes over a rollout"""
    learning_rate: float = 3e-4
    """Adam's step size"""
    anneal_lr: bool = True
    """decay the learning rate linearly to zero"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation"""
    clip_coef: float = 0.2
    """epsilon of the clipped surrogate, and of the clipped value loss"""
    clip_vloss: bool = True
    """clip the value loss around the rollout's values"""
    norm_adv: bool = True
    """normalise advantages within a minibatch"""
    ent_coef: float = 0.0
    """weight of the entropy bonus (entropy of the Gaussian, before any squashing)"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """largest norm of a minibatch's gradient"""
    target_kl: float | None = None
    """end an update before the step at which the approximate KL (nats) exceeds this"""
    log_std_init: float = -1.0
    """initial log standard deviation of the policy, in units of the action bounds (CleanRL and SB3: 0)"""
    action_bounds: Literal["clip", "tanh"] = "clip"
    """clip: the environment receives the clipped sample; tanh: the policy itself is squashed"""
    seed: int = 1
    """seed of all random streams"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the networks live; auto takes cuda if there is one"""
    compile: bool = True
    """compile the minibatch gradient (falls back to eager mode without a C++ compiler)"""
    eval_every: int = 0
    """evaluate every so many steps; 0: only at the end"""
    eval_episodes: int = 10
    """episodes of an evaluation: deterministic mean action, frozen statistics, own seeds; 0: none"""
    save_every: int = 25
    """iterations between two checkpoints"""
    run_name: str | None = None
    """folder under runs/; default: environment, script, seed and time"""
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
            elif name in ("learning_rate", "clip_coef", "max_grad_norm", "target_kl"):
                rule, holds = "must be positive and finite", 0 < value < math.inf
            elif name in ("gamma", "gae_lambda"):
                rule, holds = "must lie in [0, 1]", 0 <= value <= 1
            elif name == "log_std_init":
                rule, holds = "must lie in [-20, 20]", -20 <= value <= 20
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


# ---- 2. Pure functions: T steps, N environments, M any shape, A action dimensions --------------------------


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


def gaussian_logp_entropy(mean, log_std, action):
    """Log-density and entropy (nats) of a diagonal Gaussian. (M, A), (A,), (M, A) -> (M,), (M,)."""
    log_std = log_std.expand_as(mean)
    logp = -0.5 * ((action - mean) * torch.exp(-log_std)).square() - log_std - 0.5 * math.log(2 * math.pi)
    return logp.sum(-1), (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def tanh_log_det(u):
    """log |d tanh(u) / du|, summed over the action. (M, A) -> (M,)."""
    return (2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))).sum(-1)


class RunningNorm:
    """Running mean and variance in float64 (Welford): equal to numpy's on all samples together. [D3]"""

    def __init__(self, shape):
        self.count, self.mean, self.m2 = 0, np.zeros(shape)[()], np.zeros(shape)[()]  # () makes a number

    def update(self, x):
        """Add the samples x, (n, *shape)."""
        for row in x:
            self.count += 1
            delta = row - self.mean
            self.mean += delta / self.count
            self.m2 += delta * (row - self.mean)

    @property
    def std(self):
        return np.sqrt(self.m2 / self.count + 1e-8) if self.count > 1 else np.ones_like(self.m2)[()]

    def normalize(self, x):
        """(x - mean) / std, clipped to [-10, 10]; does not update. (n, *shape) -> float32."""
        return np.minimum(np.maximum((x - self.mean) / self.std, -10.0), 10.0).astype(np.float32)

    def moments(self):
        """Count, sum and sum of squares, in one vector."""
        total, square = self.count * self.mean, self.m2 + self.count * self.mean**2
        return np.concatenate([[self.count], np.ravel(total), np.ravel(square)])

    def merge(self, before):
        """Add what the other processes saw since all had the moments `before`."""
        if dist.is_initialized():
            new = sum_over_processes(torch.from_numpy(self.moments() - before)).numpy() + before
            self.count = int(new[0])
            mean, square = (x.reshape(np.shape(self.mean))[()] / self.count for x in np.split(new[1:], 2))
            self.mean, self.m2 = mean, (square - mean**2) * self.count

    def state_dict(self):
        return {"count": self.count, "mean": torch.tensor(self.mean), "m2": torch.tensor(self.m2)}

    def load_state_dict(self, state):
        self.count = state["count"]
        self.mean, self.m2 = (state[name].numpy().copy()[()] for name in ("mean", "m2"))


# ---- 3. Model ----------------------------------------------------------------------------------------------


def layer_init(layer: nn.Module, gain: float = math.sqrt(2)) -> nn.Module:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Separate actor and critic; the deviation does not depend on the state. Change the network only here."""

    def __init__(self, obs_dim: int, action_dim: int, log_std_init: float):
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(obs_dim, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh(),
            layer_init(nn.Linear(64, 1), 1.0),
        )  # fmt: skip
        self.actor = nn.Sequential(
            layer_init(nn.Linear(obs_dim, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh(),
            layer_init(nn.Linear(64, action_dim), 0.01),
        )  # fmt: skip
        self.log_std = nn.Parameter(torch.full((action_dim,), log_std_init))  # [D11]

    def value(self, obs):
        """(M, obs_dim) -> (M,)."""
        return self.critic(obs).squeeze(-1)

    def forward(self, obs):
        """(M, obs_dim) -> mean (M, A), log_std (A,), value (M,)."""
        return self.actor(obs), self.log_std, self.value(obs)


def numpy_forward(net: nn.Module):
    """`net` as a function of numpy arrays. A stack of Linear and Tanh on the CPU runs in numpy on the same
    memory, which saves torch's cost of a call (10x for one observation); other networks run in torch."""
    device, kinds = next(net.parameters()).device, {type(layer) for layer in net.children()}
    if device.type != "cpu" or type(net) is not nn.Sequential or kinds - {nn.Linear, nn.Tanh}:
        return lambda x: net(torch.as_tensor(x, device=device)).cpu().numpy()
    weights = []
    for layer in net:
        weight, bias, *_ = [p.detach().numpy() for p in layer.parameters()] + [None, 0.0]
        weights.append(None if weight is None else (weight.T, bias))

    def forward(x):
        for layer in weights:
            x = np.tanh(x) if layer is None else x @ layer[0] + layer[1]
        return x

    return forward


def flatten_parameters(module: nn.Module) -> torch.Tensor:
    """Move all parameters into one vector of which they become views: one norm, one step, one all-reduce."""
    flat = nn.utils.parameters_to_vector(module.parameters()).detach()
    nn.utils.vector_to_parameters(flat, module.parameters())
    return flat


# ---- 4. Environment ----------------------------------------------------------------------------------------


def make_env(env_id: str, render_mode: str | None = None) -> gym.Env:
    """The environment with flat Box observations and Box actions, its time limit kept."""
    try:
        env = gym.make(env_id, **({} if render_mode is None else {"render_mode": render_mode}))
    except (gym.error.Error, ImportError) as error:
        raise UsageError(f"--env-id {env_id}: {error}") from error
    for name, space in (("action", env.action_space), ("observation", env.observation_space)):
        if not isinstance(space, gym.spaces.Box):
            raise UsageError(f"--env-id {env_id}: its {name} space is {space}, this script needs a Box")
    return env if len(env.observation_space.shape) == 1 else gym.wrappers.FlattenObservation(env)


class Env:
    """One environment with its seeds, score and episode so far.

    Every episode has a seed of its own, so a checkpoint can restore the simulator by replaying the episode.
    """

    def __init__(self, args: Args, seed: np.random.SeedSequence, render_mode: str | None = None):
        self.env, self.rng = make_env(args.env_id, render_mode), np.random.default_rng(seed)
        space, self.tanh = self.env.action_space, args.action_bounds == "tanh"
        bounded = np.maximum(np.abs(space.low), np.abs(space.high)) < 1e6
        if self.tanh and not bounded.all():
            raise UsageError(f"--action-bounds tanh needs finite bounds, {args.env_id} has {space}")
        low, high = np.where(bounded, space.low, -1.0).ravel(), np.where(bounded, space.high, 1.0).ravel()
        self.center, self.half = (low + high) / 2, (high - low) / 2
        self.limit = np.where(bounded, 1.0, np.inf).ravel()

    def reset(self, seed: int | None = None):
        self.episode_seed = int(self.rng.integers(2**31)) if seed is None else seed
        self.actions, self.score, self.discounted = [], 0.0, 0.0
        self.obs, _ = self.env.reset(seed=self.episode_seed)

    def to_env(self, action):
        """Policy units to environment units [D4]; the stored sample is never changed. (A,) -> (A,)."""
        action = np.tanh(action) if self.tanh else np.minimum(np.maximum(action, -self.limit), self.limit)
        return (self.center + self.half * action).astype(np.float32).reshape(self.env.action_space.shape)

    def step(self, action):
        """Returns reward, terminated, truncated; the state really reached is in `obs` until `reset`. [D2]"""
        action = self.to_env(action)
        self.obs, reward, terminated, truncated, _ = self.env.step(action)
        self.actions.append(action)
        self.score += float(reward)
        return float(reward), bool(terminated), bool(truncated)

    def state_dict(self):
        actions, obs = torch.from_numpy(np.array(self.actions, np.float32)), torch.tensor(self.obs)
        rng, episode = json.dumps(self.rng.bit_generator.state), (self.score, self.discounted)
        return {"rng": rng, "seed": self.episode_seed, "actions": actions, "obs": obs, "episode": episode}

    def load_state_dict(self, state):
        self.rng.bit_generator.state = json.loads(state["rng"])
        self.reset(state["seed"])
        for action in state["actions"].numpy():
            self.obs, *_ = self.env.step(action)
            self.actions.append(action)
        self.score, self.discounted = state["episode"]
        if not np.array_equal(self.obs, state["obs"].numpy()):
            print("the environment does not repeat an episode from its seed: resuming with a new episode")
            self.reset()


@torch.no_grad()
def evaluate(agent: Agent, obs_norm: RunningNorm, env: Env, args: Args, frames: list | None = None) -> dict:
    """Mean action, frozen statistics, raw rewards, the same seeds each time. Appends pictures to `frames`."""
    act, scores, lengths = numpy_forward(agent.actor), [], []
    for seed in streams(args.seed)[3].generate_state(args.eval_episodes):
        env.reset(int(seed))
        terminated = truncated = False
        while not (terminated or truncated):
            if frames is not None:
                frames.append(env.env.render())
            _, terminated, truncated = env.step(act(obs_norm.normalize(env.obs[None]))[0])
        scores.append(env.score)
        lengths.append(len(env.actions))
    return {
        "eval/episodic_return": float(np.mean(scores)),
        "eval/episodic_return_std": float(np.std(scores)),
        "eval/episodic_length": float(np.mean(lengths)),
    }


# ---- 5. Rollout --------------------------------------------------------------------------------------------


@torch.no_grad()
def rollout(agent, envs, obs_norm, return_norm, rng, args, device, own=slice(None)):
    """T steps of N environments: a dict of (T, N, ...) tensors, and (score, length) of the ended episodes."""
    T, N, act = args.num_steps, len(envs), numpy_forward(agent.actor)
    std = agent.log_std.exp().cpu().numpy()
    before = [norm.moments() for norm in (obs_norm, return_norm)]
    noise = rng.standard_normal((T, args.num_envs, len(std)), dtype=np.float32)[:, own]
    obs = np.empty((T + 1, N, obs_norm.mean.size), np.float32)
    next_obs = np.empty_like(obs[1:])
    actions = np.empty_like(noise)
    rewards = np.empty((T, N), np.float32)
    terminated, truncated = np.empty((T, N), bool), np.empty((T, N), bool)
    raw, episodes = np.stack([env.obs for env in envs]), []  # (N, obs_dim)
    for t in range(T):
        obs_norm.update(raw)
        obs[t] = obs_norm.normalize(raw)
        actions[t] = act(obs[t]) + std * noise[t]
        for i, env in enumerate(envs):
            reward, terminated[t, i], truncated[t, i] = env.step(actions[t, i])
            env.discounted = env.discounted * args.gamma + reward
            return_norm.update([env.discounted])
            rewards[t, i] = reward / return_norm.std
            if terminated[t, i] or truncated[t, i]:
                next_obs[t, i] = obs_norm.normalize(env.obs)  # reached, but not acted on [D1]
                episodes.append((env.score, len(env.actions)))
                env.reset()
            raw[i] = env.obs
    obs[T] = obs_norm.normalize(raw)
    for norm, moments in zip((obs_norm, return_norm), before):
        norm.merge(moments)
    done = terminated | truncated
    batch = {
        "obs": obs[:-1],
        "next_obs": np.where(done[..., None], next_obs, obs[1:]),
        "actions": actions,
        "rewards": np.clip(rewards, -10.0, 10.0),
        "terminated": terminated,
        "done": done,
    }
    for name, value in batch.items():
        if not np.isfinite(value).all():
            raise FloatingPointError(f"the {name} of the rollout are not finite")
    batch = {name: torch.as_tensor(value, device=device) for name, value in batch.items()}
    mean, log_std, batch["values"] = agent(batch["obs"])  # [D5]
    batch["log_det"] = torch.zeros_like(batch["values"])
    if args.action_bounds == "tanh":
        batch["log_det"] = tanh_log_det(batch["actions"])
    batch["logps"] = gaussian_logp_entropy(mean, log_std, batch["actions"])[0] - batch["log_det"]
    batch["advantages"], batch["returns"] = compute_gae(
        batch["rewards"], batch["values"], agent.value(batch["next_obs"]),
        batch["terminated"], batch["done"], args.gamma, args.gae_lambda,
    )  # fmt: skip
    return batch, episodes


# ---- 6. Update ---------------------------------------------------------------------------------------------

LEARNT_FROM = ("obs", "actions", "logps", "log_det", "returns", "values")
STATS = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


def minibatch_gradient(agent, batch, mb, clip_coef, clip_vloss, norm_adv, ent_coef, vf_coef, own=None):
    """Gradient of the PPO loss (eq. 9) on the samples `mb` as one vector, and STATS. One compiled graph.

    `own` restricts it to the rows and places in `mb` that this process has; advantages are of all processes.
    """
    rows, places = (mb, slice(None)) if own is None else own
    b = {name: batch[name][rows] for name in LEARNT_FROM}
    mean, log_std, values = agent(b["obs"])
    logp, entropy = gaussian_logp_entropy(mean, log_std, b["actions"])
    logp = logp - b["log_det"]
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


def replay(args: Args) -> dict:
    """--eval-checkpoint: evaluate a trained policy on the environment it was trained on, and film it."""
    state = load_checkpoint(args.eval_checkpoint)
    args = dataclasses.replace(args, **{name: state["args"][name] for name in ("env_id", "action_bounds")})
    if args.video is not None and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # renders without a screen
    env = Env(args, streams(args.seed)[3], None if args.video is None else "rgb_array")
    obs_norm, frames = RunningNorm(env.env.observation_space.shape), None if args.video is None else []
    agent = Agent(obs_norm.mean.size, env.half.size, 0.0)
    load_state(agent, state["agent"])
    obs_norm.load_state_dict(state["obs_norm"])
    metrics = evaluate(agent, obs_norm, env, args, frames)
    print(
        f"{args.env_id}, step {state['step']:,}: " + ", ".join(f"{k[5:]} {v:.1f}" for k, v in metrics.items())
    )
    if args.video is not None:
        import imageio

        try:
            imageio.mimsave(args.video, frames, fps=env.env.metadata.get("render_fps", 30))
        except (OSError, ValueError, ImportError) as error:  # a codec that is not installed
            raise UsageError(f"--video {args.video}: {str(error).splitlines()[0]}") from error
    return metrics


def main(args: Args) -> dict:
    """Train, or evaluate, as `args` say; returns the final metrics."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: there is no CUDA device")
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # networks this small run slower on more
    if args.eval_checkpoint is not None:
        return replay(args)
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
    envs = [Env(args, stream) for stream in env_stream.spawn(args.num_envs)[own]]
    eval_env = Env(args, eval_stream)
    obs_norm, return_norm = RunningNorm(envs[0].env.observation_space.shape), RunningNorm(())
    agent = Agent(obs_norm.mean.size, envs[0].half.size, args.log_std_init).to(device)
    flat = flatten_parameters(agent)
    moments = {name: torch.zeros_like(flat) for name in ("exp_avg", "exp_avg_sq")}
    moments["step"] = torch.zeros((), device=device)
    gradient = compile_or_eager(minibatch_gradient) if args.compile else minibatch_gradient
    recent, first, metrics, run = collections.deque(maxlen=100), 0, {}, None
    parts = {"agent": agent, "obs_norm": obs_norm, "return_norm": return_norm}
    parts |= {f"env{i}": env for i, env in enumerate(envs, own.start)}

    if state is None:
        folder = collect(open_run(args, device) if rank == 0 else None)[0]
        for env in envs:
            env.reset()
    else:
        folder, first = args.resume, state["step"] // args.batch_size
        if first == args.num_iterations:
            raise UsageError(f"--resume {folder}: this run is finished, at step {state['step']:,}")
        for name, part in parts.items():
            load_state(part, state[name])
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
                batch, episodes = rollout(agent, envs, obs_norm, return_norm, rng, args, device, own)
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
                    metrics |= evaluate(agent, obs_norm, eval_env, args)
                if rank == 0:
                    write_metrics(folder / "metrics.jsonl", step, metrics)
                if run:
                    run.log(metrics, step=step)
                bar.update(args.batch_size)
                if final or signals or (iteration + 1) % args.save_every == 0:
                    state = {"script": SCRIPT, "args": json.loads(json.dumps(vars(args), default=str))}
                    state |= {"step": step, "shuffle": generator.get_state(), "recent": list(recent)}
                    state |= {"actions": json.dumps(rng.bit_generator.state), "moments": moments}
                    for states in collect({name: part.state_dict() for name, part in parts.items()}):
                        state |= states
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
