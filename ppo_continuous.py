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
[D11] The policy starts with a standard deviation of exp(-1), not 1 (study: benchmarks/README.md).
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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import gymnasium as gym
import imageio
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
Weight = Annotated[float, "must not be negative", lambda x: 0 <= x < math.inf]
Positive = Annotated[float, "must be positive and finite", lambda x: 0 < x < math.inf]
Fraction = Annotated[float, "must lie in [0, 1]", lambda x: 0 <= x <= 1]
LogStd = Annotated[float, "must lie in [-20, 20]", lambda x: -20 <= x <= 20]


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
    """Proximal policy optimisation for continuous control, in one file."""

    env_id: str = "HalfCheetah-v5"  # gymnasium environment with a Box action space, or module:NAME
    env_kwargs: str = "{}"  # arguments of the environment, as JSON: '{"forward_reward_weight": 2}'
    total_timesteps: Natural = 1_000_000  # environment steps of all environments, rounded up to iterations
    num_envs: Natural = 1  # environments stepped in turn
    num_steps: Natural = 2048  # steps of each environment in a rollout
    num_minibatches: Natural = 32  # minibatches an epoch
    update_epochs: Natural = 10  # passes over a rollout
    learning_rate: Positive = 3e-4  # Adam's step size
    anneal_lr: bool = True  # decay the learning rate linearly to zero
    gamma: Fraction = 0.99  # discount factor
    gae_lambda: Fraction = 0.95  # lambda of generalised advantage estimation
    clip_coef: Positive = 0.2  # epsilon of the clipped surrogate, and of the clipped value loss
    clip_vloss: bool = True  # clip the value loss around the rollout's values
    norm_adv: bool = True  # normalise advantages within a minibatch
    ent_coef: Weight = 0.0  # weight of the entropy bonus (of the Gaussian, before any squashing)
    vf_coef: Weight = 0.5  # weight of the value loss
    max_grad_norm: Positive = 0.5  # largest norm of a minibatch's gradient
    target_kl: Positive | None = None  # end an update before the step where the approximate KL exceeds it
    log_std_init: LogStd = -1.0  # initial log deviation, in units of the action bounds (CleanRL, SB3: 0)
    action_bounds: Literal["clip", "tanh"] = "clip"  # the environment gets the clipped, or a squashed, sample
    seed: NotNegative = 1  # seed of all random streams
    device: Literal["auto", "cpu", "cuda"] = "auto"  # of the networks; auto takes cuda if there is one
    compile: bool = True  # compile the minibatch gradient (eager mode without a C++ compiler)
    eval_every: NotNegative = 0  # evaluate every so many steps; 0: only at the end
    eval_episodes: NotNegative = 10  # episodes of an evaluation: mean action, frozen statistics; 0: none
    save_every: Natural = 25  # iterations between two checkpoints
    run_name: str | None = None  # folder under runs/; default: environment, script, seed and time
    resume: Path | None = None  # go on with the run in this folder, which only --total-timesteps may change
    start_from: Path | None = None  # begin a new run with the weights and statistics of this checkpoint
    eval_checkpoint: Path | None = None  # do not train: evaluate this checkpoint
    video: Path | None = None  # film the first episode of --eval-checkpoint into this .gif
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
    """Separate actor and critic, and the policy's distribution: a Gaussian whose deviation does not depend on
    the state, squashed by tanh if asked. Change network and distribution only here."""

    def __init__(self, obs_dim: int, action_dim: int, log_std_init: float = 0.0, squashed: bool = False):
        super().__init__()
        self.squashed = squashed
        self.critic = nn.Sequential(
            layer_init(nn.Linear(obs_dim, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh(),
            layer_init(nn.Linear(64, 1), 1.0),
        )  # fmt: skip
        self.actor = nn.Sequential(
            layer_init(nn.Linear(obs_dim, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh(),
            layer_init(nn.Linear(64, action_dim), 0.01),
        )  # fmt: skip
        self.log_std = nn.Parameter(torch.full((action_dim,), log_std_init))  # [D11]

    def acting(self, rng=None, num_steps: int = 0, num_envs: int = 1):
        """The policy with its present weights, a function of numpy arrays: obs (N, obs_dim) -> sample to be
        stored, and action for the environment in units of its bounds [D4], (N, A) each.

        The noise of all steps is drawn from `rng` at once; without it the sample is the mean.
        """
        mean, std = numpy_forward(self.actor), self.log_std.detach().exp().cpu().numpy()
        size = (num_steps, num_envs, len(std))
        noise = None if rng is None else iter(rng.standard_normal(size, dtype=np.float32))

        def act(obs):
            sample = mean(obs) if noise is None else mean(obs) + std * next(noise)
            return sample, np.tanh(sample) if self.squashed else sample

        return act

    def evaluate(self, obs, sample):
        """Log-probability and entropy of stored samples, and values. (M, obs_dim), (M, A) -> (M,) each."""
        logp, entropy = gaussian_logp_entropy(self.actor(obs), self.log_std, sample)
        if self.squashed:
            logp = logp - tanh_log_det(sample)
        return logp, entropy, self.value(obs)

    def value(self, obs):
        """(M, obs_dim) -> (M,)."""
        return self.critic(obs).squeeze(-1)


def numpy_forward(net: nn.Module):
    """`net` with its present weights as a function of numpy arrays: a stack of Linear and Tanh runs in numpy,
    which saves torch's cost of a call (10x for one observation) and a wait for the GPU; others in torch."""
    device, kinds = next(net.parameters()).device, {type(layer) for layer in net.children()}
    if type(net) is not nn.Sequential or kinds - {nn.Linear, nn.Tanh}:
        return lambda x: net(torch.as_tensor(x, device=device)).detach().cpu().numpy()
    weights = []
    for layer in net:
        weight, bias, *_ = [p.detach().cpu().numpy() for p in layer.parameters()] + [None, 0.0]
        weights.append(None if weight is None else (weight.T, bias))

    def forward(x):
        for layer in weights:
            x = np.tanh(x) if layer is None else x @ layer[0] + layer[1]
        return x

    return forward


# ---- 4. Environment ----------------------------------------------------------------------------------------


class Env:
    """One environment with its seeds, score and episode so far; observations are flat and float64.

    Every episode has a seed of its own, so a checkpoint can restore the simulator by replaying the episode.
    """

    def __init__(self, args: Args, seed: np.random.SeedSequence):
        self.rng, self.fault = np.random.default_rng(seed), told(f"--env-id {args.env_id}")
        sys.path += [] if os.getcwd() in sys.path else [os.getcwd()]  # where module:NAME is looked for
        with self.fault:
            render = {} if args.video is None else {"render_mode": "rgb_array"}
            if render and "DISPLAY" not in os.environ:
                os.environ.setdefault("MUJOCO_GL", "egl")  # renders without a screen
            self.env = gym.make(args.env_id, **json.loads(args.env_kwargs), **render)
        space = self.env.action_space
        for name, which in (("action", space), ("observation", self.env.observation_space)):
            if not isinstance(which, gym.spaces.Box):
                raise UsageError(f"--env-id {args.env_id}: its {name} space is {which}, not a Box")
        self.low, self.high = space.low.astype(float), space.high.astype(float)
        bounded = np.isfinite(self.low) & np.isfinite(self.high)
        if args.action_bounds == "tanh" and not bounded.all():
            raise UsageError(f"--action-bounds tanh needs finite bounds, {args.env_id} has {space}")
        self.center, self.half = np.zeros(space.shape), np.ones(space.shape)  # where a side is open
        self.center[bounded] = (self.low[bounded] + self.high[bounded]) / 2
        self.half[bounded] = (self.high[bounded] - self.low[bounded]) / 2
        self.obs_dim, self.action_dim = self.env.observation_space.low.size, space.low.size

    def read(self, obs):
        """An observation, of whatever type, as the flat float64 vector that its space promises."""
        obs = np.asarray(obs, np.float64)
        if obs.shape != self.env.observation_space.shape:
            raise ValueError(f"an observation has shape {obs.shape}, its space {self.env.observation_space}")
        return obs.ravel()

    def reset(self, seed: int | None = None):
        self.episode_seed = int(self.rng.integers(2**31)) if seed is None else seed
        self.actions, self.score, self.discounted = [], 0.0, 0.0
        with self.fault:
            self.obs = self.read(self.env.reset(seed=self.episode_seed)[0])

    def step(self, action):
        """An action in units of the bounds; returns reward, terminated, truncated. [D2]

        The state really reached is in `obs` until `reset`.
        """
        action = self.center + self.half * action.reshape(self.center.shape)
        action = np.minimum(np.maximum(action, self.low), self.high).astype(self.env.action_space.dtype)
        with self.fault:
            obs, reward, terminated, truncated, _ = self.env.step(action)
            self.obs, reward = self.read(obs), float(reward)
        self.actions.append(action)
        self.score += reward
        return reward, bool(terminated), bool(truncated)

    def state_dict(self):
        rng, episode = json.dumps(self.rng.bit_generator.state), (self.score, self.discounted)
        actions, obs = (torch.from_numpy(np.array(x)) for x in (self.actions, self.obs))
        return {"rng": rng, "seed": self.episode_seed, "actions": actions, "obs": obs, "episode": episode}

    def load_state_dict(self, state):
        self.rng.bit_generator.state = json.loads(state["rng"])
        self.reset(state["seed"])
        for action in state["actions"].numpy():
            with self.fault:
                self.obs = self.read(self.env.step(action)[0])
            self.actions.append(action)
        self.score, self.discounted = state["episode"]
        if not np.array_equal(self.obs, state["obs"].numpy()):
            print("the environment does not repeat an episode from its seed: resuming with a new episode")
            self.reset()


LONGEST_EVALUATION = 100_000  # steps, for an environment without an end


@torch.no_grad()
def evaluate(agent: Agent, obs_norm: RunningNorm, env: Env, args: Args) -> dict:
    """Mean action, frozen statistics, raw rewards, the same seeds each time; films the first episode."""
    act, scores, lengths, film = agent.acting(), [], [], []
    for seed in streams(args.seed)[3].generate_state(args.eval_episodes):
        env.reset(int(seed))
        done = False
        while not done and len(env.actions) < LONGEST_EVALUATION:
            if args.video is not None and not scores and len(env.actions) % 2 == 0:
                film.append(env.env.render())
            _, terminated, truncated = env.step(act(obs_norm.normalize(env.obs[None]))[1][0])
            done = terminated or truncated
        if not done:
            print(f"an episode of the evaluation was cut off after {LONGEST_EVALUATION:,} steps")
        scores.append(env.score)
        lengths.append(len(env.actions))
    if args.video is not None:
        with told(f"--video {args.video}"):
            imageio.mimsave(args.video, film, fps=env.env.metadata.get("render_fps", 30) / 2)
    means = float(np.mean(scores)), float(np.std(scores)), float(np.mean(lengths))
    names = "eval/episodic_return", "eval/episodic_return_std", "eval/episodic_length"
    tqdm.write(", ".join(f"{name} {value:.1f}" for name, value in zip(names, means)))
    return dict(zip(names, means))


# ---- 5. Rollout --------------------------------------------------------------------------------------------


@torch.no_grad()
def rollout(agent, envs, obs_norm, return_norm, rng, args):
    """T steps of N environments: a dict of (T, N, ...) tensors, and (score, length) of the ended episodes."""
    T, N = args.num_steps, len(envs)
    act, samples, episodes = agent.acting(rng, T, N), [], []
    raw = np.stack([env.obs for env in envs])  # (N, obs_dim)
    obs = np.empty((T + 1, *raw.shape), np.float32)
    next_obs = np.empty_like(obs[1:])
    rewards = np.empty((T, N), np.float32)
    terminated, truncated = np.empty((T, N), bool), np.empty((T, N), bool)
    for t in range(T):
        obs_norm.update(raw)
        obs[t] = obs_norm.normalize(raw)
        sample, action = act(obs[t])
        samples.append(sample)
        for i, env in enumerate(envs):
            reward, terminated[t, i], truncated[t, i] = env.step(action[i])
            env.discounted = env.discounted * args.gamma + reward
            return_norm.update([env.discounted])
            rewards[t, i] = reward / return_norm.std
            if terminated[t, i] or truncated[t, i]:
                next_obs[t, i] = obs_norm.normalize(env.obs)  # reached, but not acted on [D1]
                episodes.append((env.score, len(env.actions)))
                env.reset()
            raw[i] = env.obs
    obs[T] = obs_norm.normalize(raw)
    done = terminated | truncated
    batch = {
        "obs": obs[:-1],
        "next_obs": np.where(done[..., None], next_obs, obs[1:]),
        "actions": np.stack(samples),
        "rewards": np.clip(rewards, -10.0, 10.0),
        "terminated": terminated,
        "done": done,
    }
    for name, value in batch.items():
        if not np.isfinite(value).all():
            raise FloatingPointError(f"the {name} of the rollout are not finite")
    device = next(agent.parameters()).device
    batch = {name: torch.as_tensor(value, device=device) for name, value in batch.items()}
    batch["logps"], _, batch["values"] = agent.evaluate(batch["obs"], batch["actions"])  # [D5]
    batch["advantages"], batch["returns"] = compute_gae(
        batch["rewards"], batch["values"], agent.value(batch["next_obs"]),
        batch["terminated"], batch["done"], args.gamma, args.gae_lambda,
    )  # fmt: skip
    return batch, episodes


# ---- 6. Update ---------------------------------------------------------------------------------------------

STATS = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


def minibatch_gradient(agent, batch, mb, args):
    """Gradient of the PPO loss (eq. 9) on the samples `mb` as one vector, and STATS. One compiled graph."""
    b = {name: value[mb] for name, value in batch.items()}
    logp, entropy, values = agent.evaluate(b["obs"], b["actions"])
    adv = whiten(b["advantages"]) if args.norm_adv else b["advantages"]  # [D6]
    pg_loss = policy_loss(logp, b["logps"], adv, args.clip_coef, args.clip_coef).mean()
    value_clip = args.clip_coef if args.clip_vloss else None
    v_loss = value_loss(values, b["values"], b["returns"], value_clip).mean()
    loss = pg_loss + args.vf_coef * v_loss - args.ent_coef * entropy.mean()
    gradients = torch.autograd.grad(loss, list(agent.parameters()))
    kl1, kl3 = (approx_kl(b["logps"], logp, kind).mean() for kind in ("k1", "k3"))
    clipped = clip_fraction(logp, b["logps"], adv, args.clip_coef, args.clip_coef)
    stats = torch.stack([pg_loss, v_loss, entropy.mean(), kl1, kl3, clipped])
    return torch.cat([g.reshape(-1) for g in gradients]), stats.detach()


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
    torch.set_num_threads(1)  # networks this small run slower on more
    if importlib.util.find_spec("mujoco"):  # whose deprecated models, gymnasium's, are no news to a user
        importlib.import_module("mujoco").set_mju_user_warning(lambda x: "deprecated" in x or print(x))
    env_stream, action_stream, shuffle_stream, eval_stream = streams(args.seed)  # [D10]
    bits, eval_env = np.random.PCG64(action_stream), Env(args, eval_stream)
    generator = torch.Generator().manual_seed(int(shuffle_stream.generate_state(1)[0]))
    torch.manual_seed(args.seed)  # initial weights
    obs_norm, return_norm = RunningNorm(eval_env.obs_dim), RunningNorm(())
    squashed = args.action_bounds == "tanh"
    agent = Agent(eval_env.obs_dim, eval_env.action_dim, args.log_std_init, squashed).to(device)
    learnt = {"agent": agent, "obs_norm": obs_norm, "return_norm": return_norm}
    if args.eval_checkpoint is not None:
        load_parts(learnt, load_checkpoint(args.eval_checkpoint))
        return evaluate(agent, obs_norm, eval_env, args)

    envs = [Env(args, stream) for stream in env_stream.spawn(args.num_envs)]
    for env in envs:
        env.reset()
    optimizer, recent = Adam(agent), collections.deque(maxlen=100)
    gradient = compile_or_eager(minibatch_gradient) if args.compile else minibatch_gradient
    run = Run(args, args.env_id, args.num_iterations, args.batch_size)
    run.learnt, run.parts = learnt, {"optimizer": optimizer} | {f"env{i}": env for i, env in enumerate(envs)}
    run.parts["recent"] = Saved(lambda: list(recent), recent.extend)
    run.parts["shuffle"] = Saved(generator.get_state, generator.set_state)
    run.parts["actions"] = Saved(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if run.total != args.total_timesteps:
        print(f"--total-timesteps {args.total_timesteps:,} rounded up to {run.total:,}, whole iterations")
    print(f"{args.env_id} on {device}, {len(optimizer.weights):,} parameters, writing {run.folder}")
    with run:
        run.bar.set_postfix_str("compiling" if args.compile else "")
        for iteration in run:
            left = linear_schedule(iteration, args.num_iterations) if args.anneal_lr else 1.0
            lr = args.learning_rate * left
            batch, episodes = rollout(agent, envs, obs_norm, return_norm, np.random.Generator(bits), args)
            losses = update(agent, optimizer, lr, gradient, batch, generator, args)

            charts = {"charts/learning_rate": lr, "charts/episodes": len(episodes)}
            recent.extend(score for score, _ in episodes)
            if episodes:
                means = np.mean(episodes, 0).tolist()
                charts |= dict(zip(("charts/episodic_return", "charts/episodic_length"), means))
            if recent:
                charts["charts/episodic_return_100"] = float(np.mean(recent))  # of the last 100 episodes
            run.log(losses | charts, {"return": charts.get("charts/episodic_return_100")})
            if args.eval_episodes and run.due(args.eval_every):
                run.log(evaluate(agent, obs_norm, eval_env, args))
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
