"""Small environments whose every transition is known, registered as Probe/... for the loop layer."""

import gymnasium as gym
import numpy as np


class Probe(gym.Env):
    """Episodes of random length that end by termination, time limit, both at once, as the seed decides.

    Observations are unique, so that a value can be traced to its state; `log` holds every transition as
    (environment, obs, action, reward, terminated, truncated, state reached).
    """

    log: list = []
    action_space = gym.spaces.Box(-2.0, 0.5, (2,), np.float32)
    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)

    def __init__(self, nan_at: int | None = None):
        self.nan_at, self.steps = nan_at, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length, self.ending = self.np_random.integers(1, 9), self.np_random.integers(3)
        self.t, self.obs = 0, self.np_random.normal(3.0, 2.0, 3)
        return self.obs, {}

    def step(self, action):
        before, self.t, self.steps = self.obs, self.t + 1, self.steps + 1
        self.obs = self.np_random.normal(3.0, 2.0, 3)
        reward = float(self.np_random.normal(1.0, 5.0) * (200.0 if self.np_random.random() < 0.03 else 1.0))
        reward = np.nan if self.steps == self.nan_at else reward
        over = self.t >= self.length
        ends = bool(over and self.ending != 1), bool(over and self.ending != 0)
        Probe.log.append((id(self), before, np.array(action), reward, *ends, self.obs))
        return self.obs, reward, *ends, {}


class Seen(gym.Wrapper):
    """Around all that a copy puts around its environment: the log then holds what the loop was given."""

    def reset(self, **kwargs):
        self.before, info = self.env.reset(**kwargs)
        return self.before, info

    def step(self, action):
        first, before = len(Probe.log), self.before
        self.before, *rest = self.env.step(action)
        if isinstance(self.unwrapped, Probe):
            Probe.log[first:] = [(id(self.unwrapped), before, np.array(action), *rest[:3], self.before)]
        return self.before, *rest


class Target(gym.Env):
    """Reach a known optimum: one step, reward -(a - obs / 2)^2 in units of the bounds (0.4), best return 0."""

    action_space = gym.spaces.Box(-0.4, 0.4, (1,), np.float32)
    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.obs, {}

    def step(self, action):
        return self.obs, -float((action[0] / 0.4 - self.obs[0] / 2) ** 2), True, False, {}


class DictSpace(Probe):
    observation_space = gym.spaces.Dict({"x": gym.spaces.Box(-1, 1, (1,))})


class Wide(Probe):
    """No bounds on the action, and observations that are not flat."""

    action_space = gym.spaces.Box(-np.inf, np.inf, (2, 1), np.float32)
    observation_space = gym.spaces.Box(-np.inf, np.inf, (3, 1), np.float64)

    def reset(self, **kwargs):
        return super().reset(**kwargs)[0][:, None], {}

    def step(self, action):
        assert action.shape == (2, 1)
        obs, *rest = super().step(action)
        return obs[:, None], *rest


class Endless(Probe):
    """Ends by the time limit that gymnasium puts around it, and never by itself."""

    def step(self, action):
        obs, reward, _, _, info = super().step(action)
        return obs, reward, False, False, info


for name, entry in {"Plain": Probe, "Target": Target, "Dict": DictSpace, "Wide": Wide}.items():
    gym.register(f"Probe/{name}-v0", entry, disable_env_checker=True)
gym.register("Probe/NaN-v0", Probe, kwargs={"nan_at": 150}, disable_env_checker=True)
gym.register("Probe/Endless-v0", Endless, max_episode_steps=7, disable_env_checker=True)
