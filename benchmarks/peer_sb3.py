"""Stable-Baselines3's PPO with the hyperparameters of CleanRL's ppo_continuous_action.py: a peer to measure.

    python benchmarks/peer_sb3.py --env-id HalfCheetah-v5 --seed 1 --total-timesteps 1000000
    python benchmarks/run.py benchmarks/peer_sb3.py --tasks Hopper-v5 --seeds 1 2 -- --total-timesteps 1000000

Writes runs/<run-name>/metrics.jsonl and config.json as benchmarks/run.py reads them. SB3 bootstraps at a time
limit; its value loss takes the clipped error alone and has no factor 1/2 (hence vf_coef 0.25 for 0.5).
"""

import argparse
import collections
import hashlib
import importlib.metadata
import json
import platform
import sys
import time
from pathlib import Path

try:
    import gymnasium as gym
    import numpy as np
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
except ImportError as error:
    sys.exit(f"peer_sb3.py: {error}: pip install -r benchmarks/requirements.txt")

BATCH, LEARNING_RATE, GAMMA = 2048, 3e-4, 0.99
POLICY = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": torch.nn.Tanh, "ortho_init": True,
          "log_std_init": 0.0, "optimizer_kwargs": {"eps": 1e-5}}  # fmt: skip
PACKAGES = ("stable-baselines3", "torch", "numpy", "gymnasium", "mujoco")


class Record(BaseCallback):
    """A row of metrics after each rollout and update."""

    def __init__(self):
        super().__init__()
        self.rows, self.scores, self.recent = [], [], collections.deque(maxlen=100)
        self.start = self.cpu = None

    def _on_step(self) -> bool:
        self.scores += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        return True

    def _on_rollout_start(self):  # comes after the update of the rollout before
        self.start, self.cpu = self.start or time.perf_counter(), self.cpu or time.process_time()
        if self.num_timesteps:
            self._on_training_end()

    def _on_training_end(self):
        self.recent.extend(self.scores)
        step, seconds = self.num_timesteps, time.perf_counter() - self.start
        scores = {"charts/episodic_return": self.scores, "charts/episodic_return_100": self.recent}
        means = {key: float(np.mean(values)) for key, values in scores.items() if values}
        cpu = {"time/cpu": time.process_time() - self.cpu}
        self.rows.append({"step": step, "charts/SPS": step / seconds} | cpu | means)
        self.scores = []


def evaluate(model: PPO, norm: VecNormalize, env_id: str, seed: int, episodes: int) -> dict:
    """Deterministic actions, frozen statistics, raw rewards."""
    env, scores = gym.make(env_id), []
    for seq in np.random.SeedSequence(seed).generate_state(episodes):
        (obs, _), score, done = env.reset(seed=int(seq)), 0.0, False
        while not done:
            action, _ = model.predict(norm.normalize_obs(obs), deterministic=True)
            obs, reward, terminated, truncated, _ = env.step(action)
            score, done = score + float(reward), terminated or truncated
        scores.append(score)
    return {"eval/episodic_return": float(np.mean(scores))} if scores else {}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env-id", default="HalfCheetah-v5")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-timesteps", type=int, default=1_000_000, help="rounded up to rollouts")
    parser.add_argument("--run-name", help="folder under runs/")
    parser.add_argument("--eval-episodes", type=int, default=10)
    args = parser.parse_args()
    if args.total_timesteps < 1:
        sys.exit(f"peer_sb3.py: --total-timesteps {args.total_timesteps} must be at least 1")
    torch.set_num_threads(1)
    total = -(-args.total_timesteps // BATCH) * BATCH
    folder = Path("runs") / (args.run_name or f"peer_sb3__{args.seed}__{time.time_ns() // 10**6}")
    try:
        env = VecNormalize(DummyVecEnv([lambda: Monitor(gym.make(args.env_id))]), gamma=GAMMA, clip_obs=10.0)
        folder.mkdir(parents=True)
    except (gym.error.Error, OSError) as error:
        sys.exit(f"peer_sb3.py: {error}")
    versions = {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in PACKAGES}
    config = {"args": vars(args), "versions": versions, "device": "cpu"}
    config["sha256"] = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    model = PPO(  # the learning rate as in CleanRL: full at the first update
        "MlpPolicy", env, learning_rate=lambda left: LEARNING_RATE * (left + BATCH / total), n_steps=BATCH,
        batch_size=64, n_epochs=10, gamma=GAMMA, gae_lambda=0.95, clip_range=0.2, clip_range_vf=0.2,
        ent_coef=0.0, vf_coef=0.25, max_grad_norm=0.5, policy_kwargs=POLICY, seed=args.seed, device="cpu",
    )  # fmt: skip
    record = Record()
    model.learn(total, callback=record)
    record.rows[-1] |= evaluate(model, env, args.env_id, args.seed, args.eval_episodes)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in record.rows))


if __name__ == "__main__":
    main()
