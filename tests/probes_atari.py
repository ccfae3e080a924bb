"""ALE's vector environment without ALE: small games whose every transition is known and logged."""

from types import SimpleNamespace
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch

ale_py = pytest.importorskip("ale_py")
ACTIONS = {"freeway": "NOOP UP DOWN"}  # game -> its action set, as in ALE; FOUR in all others
FOUR = "NOOP FIRE RIGHT LEFT"


class Row(NamedTuple):
    """One step of one game. `over`: ALE will reset this game by itself; `ignored`: it did so in this step."""

    env: int
    before: np.ndarray
    action: int
    reward: int
    terminated: bool
    truncated: bool
    reached: np.ndarray
    life_lost: bool
    over: bool
    ignored: bool


class Game:
    """Three lives of random length. Pictures are unique and depend on the seed and on all actions so far."""

    def __init__(self, num_actions, options):
        self.num_actions, self.options = num_actions, options

    def picture(self, action):
        blocks = (self.rng.integers(0, 256, (6, 6)) + 40 * action) % 256
        return blocks.astype(np.uint8).repeat(14, 0).repeat(14, 1)

    def reward(self, action):
        return int(self.rng.choice([-5, -1, 0, 0, 1, 3, 7]))

    def reset(self, seed):
        if seed is None or seed >= 0:  # a negative seed goes on with the random numbers of the last game
            self.rng = np.random.default_rng(seed)
        self.over = False
        self.noops = (
            int(self.rng.integers(1, 1 + self.options["noop_max"])) if self.options["noop_max"] else 0
        )
        self.frames, self.lives, self.last_action, self.left = self.noops, 3, 0, int(self.rng.integers(2, 11))
        self.obs = np.concatenate([np.zeros((3, 84, 84), np.uint8), self.picture(0)[None]])

    def step(self, action):
        if self.over:  # the action is ignored
            self.reset(-1)
            return 0, False, False, False, True
        if self.rng.random() < self.options["repeat_action_probability"]:
            action = self.last_action
        self.last_action, limit = action, self.noops + self.options["max_num_frames_per_episode"]
        reward = self.reward(action)
        self.obs = np.concatenate([self.obs[1:], self.picture(action)[None]])
        self.frames, self.left = min(self.frames + 4, limit), self.left - 1
        if life_lost := self.left == 0:
            self.lives, self.left = self.lives - 1, int(self.rng.integers(2, 11))
        told = life_lost and (self.options["life_loss_info"] or self.options["episodic_life"])
        terminated = self.lives == 0 or told
        truncated = self.frames >= limit and not terminated  # as ALE: a life lost there hides the limit
        self.over = self.lives == 0 or self.frames >= limit or life_lost and self.options["episodic_life"]
        return reward, terminated, truncated, life_lost, False


class Probe:
    """The interface of ale_py.vector_env.AtariVectorEnv, with its defaults and its traps."""

    log: list[Row] = []
    made: list["Probe"] = []
    game_class = Game

    def __init__(self, game, num_envs, **options):
        if str(getattr(options.get("autoreset_mode"), "value", "NextStep")) != "NextStep":
            pytest.skip("the games reset themselves in another mode than the probe")
        defaults = dict(noop_max=30, life_loss_info=False, episodic_life=False, reward_clipping=True)
        defaults |= dict(repeat_action_probability=0.0, max_num_frames_per_episode=108_000)
        self.name, self.num_envs, self.options = game, num_envs, defaults | options
        self.actions = [getattr(ale_py.Action, name) for name in ACTIONS.get(game, FOUR).split()]
        self.ale = SimpleNamespace(get_action_set=lambda: self.actions)
        self.single_action_space = gym.spaces.Discrete(len(self.actions))
        self.single_observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.games = [self.game_class(self.single_action_space.n, self.options) for _ in range(num_envs)]
        self.resets: list[tuple[int, int]] = []  # (game, seed) of every reset that was asked for
        Probe.made.append(self)

    def info(self):
        frames = np.array([game.frames for game in self.games], np.int32)
        lives = np.array([game.lives for game in self.games], np.int32)
        number = np.arange(self.num_envs, dtype=np.int32)
        return {
            "env_id": number,
            "lives": lives,
            "frame_number": frames,
            "episode_frame_number": frames.copy(),
        }

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        assert mask.dtype == bool and mask.shape == (self.num_envs,)
        which = np.flatnonzero(mask)
        seeds = np.random.default_rng().integers(2**31, size=len(which)) if seed is None else seed
        seeds = np.arange(seed, seed + len(which)) if isinstance(seed, int) else seeds
        assert len(seeds) == len(which)
        for i, one in zip(which, seeds):
            self.games[i].reset(None if one < 0 and not hasattr(self.games[i], "rng") else int(one))
            self.resets.append((int(i), int(one)))
        return np.stack([game.obs for game in self.games]), self.info()

    def step(self, actions):
        assert isinstance(actions, np.ndarray) and actions.dtype in (np.int32, np.int64)
        assert actions.shape == (self.num_envs,)
        assert ((actions >= 0) & (actions < self.single_action_space.n)).all(), "ALE would wait for ever"
        results = []
        for game, action in zip(self.games, actions.tolist()):
            before = game.obs
            reward, terminated, truncated, life_lost, ignored = game.step(action)
            told = int(np.sign(reward)) if self.options["reward_clipping"] else reward
            results.append((told, terminated, truncated))
            ends = bool(terminated), bool(truncated)
            last = bool(life_lost), bool(game.over), ignored
            Probe.log.append(Row(id(self), before, action, reward, *ends, game.obs, *last))
        rewards, *flags = (np.array(column) for column in zip(*results))
        obs = np.stack([game.obs for game in self.games])
        return obs, rewards.astype(np.int32), *(flag.astype(bool) for flag in flags), self.info()

    def close(self):
        pass


def steps(env=None):
    """The log of one environment, the first that was made without a name: a tuple of rows for every step."""
    env = Probe.made[0] if env is None else env
    rows = [row for row in Probe.log if row.env == id(env)]
    return [tuple(rows[k : k + env.num_envs]) for k in range(0, len(rows), env.num_envs)]


class ShownGame(Game):
    """A game of 8 steps whose picture shows the right action, as the column of four that is bright: best score 8."""

    def reset(self, seed):
        super().reset(seed)
        self.lives, self.left = 1, 8

    def reward(self, action):
        return int(action == self.right)

    def picture(self, action):
        self.right, frame = int(self.rng.integers(self.num_actions)), np.zeros((84, 84), np.uint8)
        frame[:, 21 * self.right : 21 * self.right + 21] = 255
        return frame


class Shown(Probe):
    game_class = ShownGame


def tiny(agent_class):
    """A network a hundred times faster than that of a script, and peaked from the start: for the loop's tests.

    It sees one pixel of each square of 14 x 14, of which the probe's pictures are made. The distribution, and what
    else the class can do, is the script's own.
    """

    class Tiny(agent_class):
        def __init__(self, num_actions, *rest, **named):
            torch.nn.Module.__init__(self)
            self.body = torch.nn.Linear(144, 32)
            self.actor, self.critic = torch.nn.Linear(32, num_actions), torch.nn.Linear(32, 1)
            with torch.no_grad():
                self.body.weight *= 4.0
                self.actor.weight *= 4.0

        def forward(self, obs):
            hidden = self.body(obs[..., 7::14, 7::14].flatten(1) / 255.0 - 0.5).tanh()
            return self.actor(hidden), self.critic(hidden).squeeze(-1)

    return Tiny


def can_be_replaced(agent_class) -> bool:
    """Is called as ours, returns logits and values, and acts with any such network: `tiny` can stand for it."""
    obs, actions = torch.zeros(2, 4, 84, 84, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    try:
        with torch.no_grad():
            for agent in (agent_class(3, False), tiny(agent_class)(3, False)):
                (logits, value), told = agent(obs), agent.evaluate(obs, actions)
                act = agent.acting(np.random.default_rng(0), 1, 2)
                if logits.shape != (2, 3) or {x.numel() for x in (value, *told, act(obs))} != {2}:
                    return False
        return True
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False
