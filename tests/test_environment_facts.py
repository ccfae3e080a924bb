"""What the scripts rely on in gymnasium and MuJoCo, so that an upgrade that changes it fails here first."""

import gymnasium as gym
import numpy as np
import pytest


def episode(env, seed, policy):
    obs, _ = env.reset(seed=seed)
    rows = [obs]
    while True:
        obs, reward, terminated, truncated, _ = env.step(policy(len(rows)))
        rows.append(obs)
        if terminated or truncated:
            return rows, terminated, truncated


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Hopper-v5"])
def test_an_episode_repeats_from_its_seed_and_actions(env_id):
    """Resuming replays the episode: the same seed and actions must give the same states, to the bit."""
    env, rng = gym.make(env_id), np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (1001, *env.action_space.shape)).astype(np.float32)
    first, second = (episode(env, 7, lambda t: actions[t])[0] for _ in range(2))
    assert len(first) == len(second) and np.array_equal(first, second)
    assert not np.array_equal(first[0], env.reset(seed=8)[0])


def test_time_limits_truncate():
    """HalfCheetah ends at 1000 steps by truncation alone; a shorter limit can be asked for."""
    env = gym.make("HalfCheetah-v5")
    rows, terminated, truncated = episode(env, 0, lambda t: np.zeros(6, np.float32))
    assert (len(rows), terminated, truncated) == (1001, False, True)
    assert (
        len(episode(gym.make("HalfCheetah-v5", max_episode_steps=5), 0, lambda t: np.zeros(6, np.float32))[0])
        == 6
    )


def test_both_flags_can_come_together():
    """The time limit is reported also where the episode terminates on that step."""
    env = gym.make("Hopper-v5")
    falls = len(episode(env, 0, lambda t: np.ones(3, np.float32))[0]) - 1
    rows, terminated, truncated = episode(
        gym.make("Hopper-v5", max_episode_steps=falls), 0, lambda t: np.ones(3, np.float32)
    )
    assert (len(rows) - 1, terminated, truncated) == (falls, True, True)


def test_observations_are_new_float64_arrays():
    """A returned observation is not overwritten by the next step."""
    env = gym.make("HalfCheetah-v5")
    first, _ = env.reset(seed=0)
    kept = first.copy()
    env.step(np.ones(6, np.float32))
    assert first.dtype == np.float64 and np.array_equal(first, kept)


@pytest.mark.parametrize(
    "env_id, bound", [("HalfCheetah-v5", 1.0), ("Humanoid-v5", 0.4), ("InvertedPendulum-v5", 3.0)]
)
def test_action_bounds(env_id, bound):
    """Bounds differ between tasks, so the policy acts in units of them."""
    space = gym.make(env_id).action_space
    np.testing.assert_allclose(
        (space.low, space.high), (np.full(space.shape, -bound), np.full(space.shape, bound))
    )


def test_action_cost_is_of_the_raw_action():
    """MuJoCo charges for actions beyond the bounds, so they are clipped before the environment sees them."""
    env = gym.make("HalfCheetah-v5")
    costs = []
    for size in (1.0, 5.0):
        env.reset(seed=0)
        costs.append(env.step(np.full(6, size, np.float32))[4]["reward_ctrl"])
    assert costs[1] == pytest.approx(25 * costs[0])
