"""Environments of other people's kinds in ppo_continuous.py: what they send, what they take, how they fail."""

import json
import os

import gymnasium as gym
import numpy as np
import pytest
import torch

pytestmark = pytest.mark.setting("ppo_continuous")


class Odd(gym.Env):
    """Sends whatever `kind` says; an episode of 5 steps counts 0.5, 1.5, ... in its observations."""

    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    kinds = {
        "first integers": lambda t: np.array([0, 0]) if t == 0 else np.array([t + 0.5, -t - 0.5]),
        "first float32": lambda t: np.full(2, t + 1e-9, np.float32 if t == 0 else np.float64),
        "lists": lambda t: [t + 0.5, 2],
        "tuples of numpy numbers": lambda t: (np.float32(t + 0.5), np.int8(2)),
        "float16": lambda t: np.array([t + 0.5, 2], np.float16),
        "booleans": lambda t: np.array([t % 2 == 0, True]),
        "read only": lambda t: np.broadcast_to(np.float64(t), 2),
        "one number": lambda t: float(t),
        "a column": lambda t: np.full((2, 1), t),
        "one more": lambda t: np.zeros(3),
        "text": lambda t: np.array(["a", "b"]),
        "nothing": lambda t: None,
    }
    seen: list = []

    def __init__(self, kind="lists", raises=None, at=3, length=5):
        self.kind, self.raises, self.at, self.length, self.total = kind, raises, at, length, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.kinds[self.kind](0), {}

    def step(self, action):
        self.t += 1
        self.total += 1
        Odd.seen.append(np.array(action))
        obs, last = self.kinds[self.kind](self.t), self.t == self.length
        if self.raises and self.total == self.at:
            return {
                "exception": lambda: 1 / 0,
                "four values": lambda: (obs, 0.0, last, {}),
                "no reward": lambda: (obs, None, last, False, {}),
                "a reward of two": lambda: (obs, np.zeros(2), last, False, {}),
                "no value": lambda: None,
                "exit": lambda: open("/no/such/file"),
                "library": lambda: json.loads("{"),
            }[self.raises]()
        return obs, 1.0, last, False, {}


class Bounded(Odd):
    """Actions of which each side has its own truth."""

    low = np.array([0.0, -np.inf, -np.inf, -2.0, -1e8, 1.0], np.float32)
    high = np.array([np.inf, 0.5, np.inf, 0.5, 1e8, 3.0], np.float32)
    action_space = gym.spaces.Box(low, high)


gym.register("Odd/Odd-v0", Odd, disable_env_checker=True)
gym.register("Odd/Bounded-v0", Bounded, disable_env_checker=True)


def train(script, tmp_path, env_id="Odd/Odd-v0", kwargs=None, **flags):
    os.chdir(tmp_path)
    Odd.seen.clear()
    small = dict(
        num_steps=20, num_minibatches=2, update_epochs=1, total_timesteps=40, eval_episodes=2, run_name="x"
    )
    flags = (
        dict(env_id=env_id, env_kwargs=json.dumps(kwargs or {}), compile=False, device="cpu") | small | flags
    )
    return script.main(script.Args(**script.flags(**flags)))


@pytest.mark.parametrize("kind", Odd.kinds)
def test_observations_of_any_type(script, monkeypatch, tmp_path, kind):
    """Observations are read as the float64 numbers that they are, in training and evaluation, whatever type the
    first one had; one of another shape than the space's is a sentence, not a broadcast."""
    given, update = [], script.RunningNorm.update
    monkeypatch.setattr(
        script.module.RunningNorm, "update", lambda self, x: (given.append(np.array(x)), update(self, x))
    )
    if kind in ("one number", "a column", "one more", "text", "nothing"):
        with pytest.raises(
            script.UsageError, match="Odd/Odd-v0: (ValueError|TypeError): .*test_own|Odd/Odd-v0: "
        ):
            train(script, tmp_path, kwargs={"kind": kind})
        return
    out = train(script, tmp_path, kwargs={"kind": kind})
    rows = [x[0] for x in given if x.shape == (1, 2)][:20]
    expected = [np.array(Odd.kinds[kind](t % 5), np.float64) for t in range(20)]
    np.testing.assert_array_equal(rows, expected)
    assert out["eval/episodic_length"] == 5


def test_each_side_of_an_action_has_its_own_truth(script, tmp_path):
    """A side that is bounded is kept, whatever the other one is; both bounds are the units, of any size; a side
    that is open is not scaled."""
    train(script, tmp_path, env_id="Odd/Bounded-v0", num_steps=500, total_timesteps=500, log_std_init=1.0)
    sent = np.array(Odd.seen[:500])
    assert (sent >= Bounded.low).all() and (sent <= Bounded.high).all() and np.isfinite(sent).all()
    for i, share in ((0, 0.5), (1, 0.43)):  # of a standard deviation of e
        side = (Bounded.low, Bounded.high)[i][i]
        assert (sent[:, i] == side).mean() == pytest.approx(share, abs=0.08)
        assert abs(sent[:, i]).max() > 4
    assert sent[:, 2].std() == pytest.approx(np.e, rel=0.15)
    for i in (3, 4, 5):
        assert {Bounded.low[i], Bounded.high[i]} <= set(sent[:, i])


@pytest.mark.parametrize(
    "raises", ["exception", "four values", "no reward", "a reward of two", "no value", "exit", "library"]
)
def test_a_fault_of_the_environment_is_a_sentence(script, tmp_path, raises):
    """What an environment does wrong is told with what was raised, file and line, step and last good checkpoint."""
    with pytest.raises(script.UsageError) as error:
        train(script, tmp_path, kwargs={"raises": raises, "at": 33}, save_every=1)
    said = str(error.value)
    assert said.startswith("stopped at step 40: --env-id Odd/Odd-v0: ") and "\n" not in said
    assert said.endswith("last good checkpoint: runs/x/checkpoint.pt, step 20") and "Error: " in said
    place = {
        "exception": "division by zero (test_own",
        "exit": "No such file or directory: '/no/such/file' (test_own",
        "library": "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1) (test_own",
    }
    assert place.get(raises, ".py:") in said
    assert torch.load("runs/x/checkpoint.pt", weights_only=True)["step"] == 20


def test_an_evaluation_has_an_end(script, monkeypatch, tmp_path, capsys):
    """An environment without an end is evaluated for so many steps, and that is said."""
    monkeypatch.setattr(script.module, "LONGEST_EVALUATION", 30)
    out = train(script, tmp_path, kwargs={"length": 1000})
    assert out["eval/episodic_length"] == 30
    assert "an episode of the evaluation was cut off after 30 steps" in capsys.readouterr().out


def test_the_last_evaluation_loses_nothing(script, monkeypatch, tmp_path):
    """The last step is in the checkpoint before the last evaluation, which may fail."""
    with pytest.raises(script.UsageError, match="last good checkpoint: runs/x/checkpoint.pt, step 40"):
        train(script, tmp_path, kwargs={"raises": "exception", "at": 1000}, eval_episodes=300, save_every=100)
    assert torch.load("runs/x/checkpoint.pt", weights_only=True)["step"] == 40


def test_module_and_arguments_of_an_environment(script, monkeypatch, tmp_path):
    """--env-id module:NAME finds a module in the current folder, --env-kwargs reaches it, and what is made from the
    name (run folder, W&B id) has no colon; the checkpoint brings both to its evaluation."""
    (tmp_path / "my_env_of_a_test.py").write_text(
        "import gymnasium, test_own_environments as t\n"
        "gymnasium.register('Mine-v0', t.Odd, disable_env_checker=True)\n"
    )
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    out = train(script, tmp_path, env_id="my_env_of_a_test:Mine-v0", kwargs={"length": 4}, run_name=None)
    assert out["eval/episodic_length"] == 4 and out["folder"].startswith("runs/my_env_of_a_test-Mine-v0__")
    again = script.main(script.parse_args(["--eval-checkpoint", out["folder"], "--device", "cpu"]))
    assert again["eval/episodic_return"] == out["eval/episodic_return"]
