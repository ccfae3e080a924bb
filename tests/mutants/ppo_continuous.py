"""Public bugs and their neighbours as small edits of ppo_continuous.py: (what, where it was public, old, new, check).

`check` is the beginning of the name of the test that must fail. B numbers are those of the tests' docstrings.
"""

GAE = 'batch["terminated"], batch["done"], args.gamma'
ACT = "samples.append(sample)"
NOISE = "rng.standard_normal(size, dtype=np.float32)"
ENDED = "return reward, bool(terminated), bool(truncated)"
SAMPLE = "mean(obs) + std * next(noise)"
EVALUATE = "logp = logp - tanh_log_det(sample)"
BOUNDS = "np.minimum(np.maximum(action, self.low), self.high)"
NEXT = "np.where(done[..., None], next_obs, obs[1:])"
LOSS = 'policy_loss(logp, b["logps"], adv, args.clip_coef, args.clip_coef)'

MUTANTS = [
    # rollout and advantages
    ("a time limit ends the bootstrap", "cleanrl #198", GAE, 'batch["done"], batch["done"], args.gamma', "test_rollout_is"),
    ("termination does not end the bootstrap", "B05", GAE, 'batch["done"] & False, batch["done"], args.gamma', "test_rollout_is"),
    ("the chain runs on over a time limit", "B05", GAE, 'batch["terminated"], batch["terminated"], args.gamma', "test_rollout_is"),
    ("bootstrap from the reset state", "B07, pytorch/rl #3771", NEXT, "obs[1:]", "test_rollout_is"),
    ("bootstrap from the state before the action", "B08", NEXT, "np.where(done[..., None], obs[:-1], obs[1:])", "test_rollout_is"),
    ("value after the rollout is the one before it", "B04, SB3 #183", "obs[T] = obs_norm", "obs[T] = obs[T - 1]; _ = obs_norm", "test_value_after"),
    ("the task's time limit is removed", "B49, cleanrl 9f1832ed", "        space = self.env.action_space\n", "        self.env = self.env.unwrapped\n        space = self.env.action_space\n", "test_the_time_limit"),
    ("environments share one random stream", "B29, cleanrl #238", "Env(args, stream) for stream", "Env(args, streams(1)[0]) for stream", "test_same_seed"),
    ("one noise for the whole rollout", "B29", NOISE, NOISE + ".repeat(num_steps, 0)", "test_stored_logp"),
    # actions and log-probabilities
    ("the clipped action is stored", "B40, tianshou #312", ACT, "samples.append(np.clip(sample, -1, 1))", "test_stored_logp"),
    ("drawn with another deviation than scored", "B43, cleanrl 50ea896c", SAMPLE, "mean(obs) + 2 * std * next(noise)", "test_stored_logp"),
    ("tanh correction in the update only", "B41, Mighty #118", EVALUATE, "logp = logp - tanh_log_det(sample) * torch.is_grad_enabled()", "test_ratio_is_one"),
    ("tanh correction with the wrong sign", "B41", EVALUATE, EVALUATE.replace(" - ", " + "), "test_stored_logp"),
    ("actions beyond the bounds reach the simulator", "B40", BOUNDS, "action", "test_stored_logp"),
    ("asymmetric bounds are centred at zero", "", "self.center + self.half * action", "self.half * action", "test_stored_logp"),
    # running statistics
    ("the return goes on over episode ends", "B44, Gymnasium #760", "self.actions, self.score, self.discounted = [], 0.0, 0.0", "self.actions, self.score, self.discounted = [], 0.0, getattr(self, 'discounted', 0.0)", "test_rollout_is"),
    ("reward scaling has a discount of its own", "B46, cleanrl #209", "env.discounted * args.gamma", "env.discounted * 0.99", "test_rollout_is"),
    ("rewards are centred", "B44", "reward / return_norm.std", "(reward - return_norm.mean) / return_norm.std", "test_rollout_is"),
    ("scaled rewards are not bounded", "", "np.clip(rewards, -10.0, 10.0)", "rewards", "test_rollout_is"),
    ("the first observation is not counted", "B32", "        obs_norm.update(raw)\n", "        obs_norm.update(raw) if t else None\n", "test_rollout_is"),
    ("evaluation moves the statistics", "", "env.step(act(obs_norm", "obs_norm.update(env.obs[None]); _, terminated, truncated = env.step(act(obs_norm", "test_evaluation_changes"),
    # losses
    ("the clip has no lower side", "B14", LOSS, LOSS.replace("args.clip_coef)", "1.0)"), "test_flags_reach"),
    ("the value loss learns advantages", "B11, cleanrl #337", 'b["values"], b["returns"]', 'b["values"], b["advantages"]', "test_every_sample"),
    ("advantages are not normalised", "B13", 'whiten(b["advantages"]) if args.norm_adv', 'b["advantages"] if args.norm_adv', "test_every_sample"),
    ("log-probability is a mean over the action", "B37, tianshou #40", "return logp.sum(-1)", "return logp.mean(-1)", "test_gaussian"),
    # the loop
    ("episodes are one step short", "B34, Gymnasium #1624", "episodes.append((env.score, len(env.actions)))", "episodes.append((env.score, len(env.actions) - 1))", "test_metrics_are"),
    ("the score is the last reward", "", "self.score += reward", "self.score = reward", "test_metrics_are"),
    # checkpoints
    ("no statistics in the checkpoint", "cleanrl's evaluation", '"obs_norm": obs_norm, "return_norm": return_norm}', '"return_norm": return_norm}', "test_stopped_and"),
    ("NaN goes on", "", "if not np.isfinite(value).all():", "if False:", "test_nan_stops"),
]  # fmt: skip

# functions that every script has

MUTANTS += [
    # linear_schedule, minibatches
    # policy_loss
    # approx_kl
    # clip_fraction
    # streams
]  # fmt: skip

# functions of the PPO scripts

MUTANTS += [
    # compute_gae
    # value_loss
    # whiten
    # explained_variance
]  # fmt: skip

# ppo_continuous.py
GL = "return logp.sum(-1), (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)"  # fmt: skip
DISC = "env.discounted = env.discounted * args.gamma + reward"  # fmt: skip
RUPD = "return_norm.update([env.discounted])"  # fmt: skip
RSC = "rewards[t, i] = reward / return_norm.std"  # fmt: skip
ENDS = "            if terminated[t, i] or truncated[t, i]:"  # fmt: skip
GAE_2 = 'batch["rewards"], batch["values"], agent.value(batch["next_obs"]),'  # fmt: skip
KLS = 'if args.target_kl is not None and stat[STATS.index("approx_kl")] > args.target_kl:'  # fmt: skip
EVSTEP = "_, terminated, truncated = env.step(act(obs_norm.normalize(env.obs[None]))[1][0])"  # fmt: skip

MUTANTS += [
    # gaussian_logp_entropy, tanh_log_det
    ("the action's log-probability is a product", "B37", "return logp.sum(-1), (", "return logp.prod(-1), (", "test_gaussian"),
    ("a log-probability for each joint", "B37, tianshou #162", GL, "return logp, (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)", "test_gaussian"),
    ("the axis of the action stays", "B38, ReinforcementLearningZoo.jl #169", "return logp.sum(-1), (", "return logp.sum(-1, keepdim=True), (", "test_gaussian"),
    ("summed over the batch", "B37", "return logp.sum(-1), (", "return logp.sum(0), (", "test_gaussian"),
    ("log-probability of the first joint", "B37", "return logp.sum(-1), (", "return logp[..., 0], (", "test_gaussian"),
    ("entropy is a mean over the action", "B37, on-policy #101", "* math.e)).sum(-1)", "* math.e)).mean(-1)", "test_gaussian"),
    ("entropy as p log p of the action", "B19, cleanrl a3391a03", GL, "logp = logp.sum(-1)\n    return logp, -logp.exp() * logp", "test_gaussian"),
    ("entropy as -log p of the action", "B19", GL, "return logp.sum(-1), -logp.sum(-1)", "test_gaussian"),
    ("entropy without the e", "B19", "math.pi * math.e)", "math.pi)", "test_gaussian"),
    ("entropy with the wrong sign", "B19", "(log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)", "-(log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)", "test_gaussian"),
    ("entropy has no gradient", "B19", "(log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)", "(log_std.detach() + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)", "test_gaussian"),
    ("the deviation is taken for the variance", "B43", "torch.exp(-log_std)).square()", "torch.exp(-0.5 * log_std)).square()", "test_gaussian"),
    # environment
    ("tanh is not applied", "B41", "np.tanh(sample) if self.squashed else sample", "sample", "test_stored_logp"),
    ("tanh and clip", "B41", "np.tanh(sample) if self.squashed else sample", "np.tanh(sample)", "test_stored_logp"),
    ("tanh in the mean of the policy", "B43", "gaussian_logp_entropy(self.actor(obs), self", "gaussian_logp_entropy(self.actor(obs).tanh(), self", "test_the_policy_that_acts"),
    ("the stored sample is the bounded one", "B40, cleanrl #240", "        action = self.center", "        action[...] = np.clip(action, -1, 1)\n        action = self.center", "test_stored_logp"),
    ("the squashed sample is stored", "B41", ACT, "samples.append(action)", "test_stored_logp"),
    ("observations are not normalised", "B47", "obs[t] = obs_norm.normalize(raw)", "obs[t] = raw", "test_rollout_is"),
    ("states reached are not normalised", "B07", "next_obs[t, i] = obs_norm.normalize(env.obs)", "next_obs[t, i] = env.obs", "test_rollout_is"),
    ("the state reached is read after the reset", "B07, envpool #33", "                next_obs[t, i] = obs_norm.normalize(env.obs)  # reached, but not acted on [D1]\n                episodes.append((env.score, len(env.actions)))\n                env.reset()\n", "                episodes.append((env.score, len(env.actions)))\n                env.reset()\n                next_obs[t, i] = obs_norm.normalize(env.obs)\n", "test_rollout_is"),
    ("all observations are the last one", "aliased buffer", "obs[t] = obs_norm.normalize(raw)", "obs[:] = obs_norm.normalize(raw)", "test_rollout_is"),
    ("the buffer of observations is not copied", "aliased buffer", "self.obs, reward = self.read(obs), float(reward)", "self.obs[...], reward = self.read(obs), float(reward)", "test_rollout_is"),
    ("the observation is that of the step before", "B04, SB3 #183", "            raw[i] = env.obs\n", "            raw[i], env.late = getattr(env, 'late', env.obs), env.obs.copy()\n", "test_rollout_is"),
    ("one environment is stepped for all", "B29", "env.step(action[i])", "env.step(action[0])", "test_the_policy_that_acts"),
    ("environments share their noise", "B29", NOISE, NOISE + "[:, :1].repeat(num_envs, 1)", "test_noise"),
    ("one noise for all dimensions", "B43", NOISE, NOISE + "[..., :1].repeat(len(std), 2)", "test_stored_logp"),
    ("uniform noise", "B43", NOISE, "rng.uniform(-1.73, 1.73, size).astype(np.float32)", "test_stored_logp"),
    ("the noise is the same in each rollout", "B29", NOISE, "np.random.default_rng(0).standard_normal(size, dtype=np.float32)", "test_noise"),
    ("actions are the mean", "B43", SAMPLE, "mean(obs)", "test_stored_logp"),
    ("the variance scales the noise", "B43", "self.log_std.detach().exp()", "(2 * self.log_std.detach()).exp()", "test_stored_logp"),
    ("the logarithm scales the noise", "B43", "self.log_std.detach().exp()", "self.log_std.detach()", "test_stored_logp"),
    ("every environment has the same seeds", "B29, Metta #814", "int(self.rng.integers(2**31)) if seed is None", "12345 if seed is None", "test_same_seed"),
    ("every episode starts alike", "B29", "int(self.rng.integers(2**31)) if seed is None", "getattr(self, 'episode_seed', int(self.rng.integers(2**31))) if seed is None", "test_every_episode"),
    ("a time limit does not end the episode", "B49", ENDS, "            if terminated[t, i]:", "test_rollout_is"),
    ("a termination does not end the episode", "B10", ENDS, "            if truncated[t, i]:", "test_rollout_is"),
    ("time limits are terminations", "B07, cleanrl #198", ENDED, "return reward, bool(terminated or truncated), bool(truncated)", "test_rollout_is"),
    ("terminations are time limits", "B05", ENDED, "return reward, False, bool(terminated or truncated)", "test_rollout_is"),
    ("truncation beside termination hides it", "B05", ENDED, "return reward, bool(terminated and not truncated), bool(truncated)", "test_rollout_is"),
    ("done is terminated only", "B05", "done = terminated | truncated\n", "done = terminated\n", "test_rollout_is"),
    ("done is both at once", "B05", "done = terminated | truncated\n", "done = terminated & truncated\n", "test_rollout_is"),
    ("flags of the step before", "B05", "done = terminated | truncated\n    batch", "done = np.roll(terminated | truncated, 1, 0)\n    batch", "test_rollout_is"),
    ("the reward of the next step", "B32", '"rewards": np.clip(rewards, -10.0, 10.0)', '"rewards": np.roll(np.clip(rewards, -10.0, 10.0), -1, 0)', "test_rollout_is"),
    # reward scaling
    ("the return restarts at 1", "B44, cleanrl 94dd01c0", DISC, "env.discounted = env.discounted * args.gamma + reward * (len(env.actions) > 1)", "test_rollout_is"),
    ("the return goes on over time limits", "B44, Gymnasium #760", "                env.reset()\n            raw", "                kept = env.discounted * (not terminated[t, i])\n                env.reset()\n                env.discounted = kept\n            raw", "test_rollout_is"),
    ("the return goes on over terminations", "B44, baselines #538", "                env.reset()\n            raw", "                kept = env.discounted * bool(terminated[t, i])\n                env.reset()\n                env.discounted = kept\n            raw", "test_rollout_is"),
    ("the return is 0 before the last reward", "B44, Gymnasium 1.4", DISC, "env.discounted = env.discounted * args.gamma * (not terminated[t, i]) + reward", "test_rollout_is"),
    ("the return is not discounted", "B46", DISC, "env.discounted = env.discounted + reward", "test_rollout_is"),
    ("the return is discounted by lambda too", "B46", DISC, DISC.replace("args.gamma", "args.gamma * args.gae_lambda"), "test_rollout_is"),
    ("the gamma of the reward scale is 0.99", "B46, cleanrl cd2011cf", DISC, DISC.replace("args.gamma", "0.99"), "test_rollout_is"),
    ("the new reward is discounted", "B46", DISC, "env.discounted = (env.discounted + reward) * args.gamma", "test_rollout_is"),
    ("statistics of rewards, not of returns", "B44", RUPD, "return_norm.update([reward])", "test_rollout_is"),
    ("returns are counted at the end only", "B44", RUPD, "return_norm.update([env.discounted] if terminated[t, i] or truncated[t, i] else [])", "test_rollout_is"),
    ("returns of the first environment", "B44", RUPD, "return_norm.update([envs[0].discounted])", "test_rollout_is"),
    ("rewards are divided by the variance", "B44", RSC, "rewards[t, i] = reward / return_norm.std**2", "test_rollout_is"),
    ("rewards are not scaled", "B44", RSC, "rewards[t, i] = reward", "test_rollout_is"),
    ("the return is learnt in place of the reward", "B44", RSC, "rewards[t, i] = env.discounted / return_norm.std", "test_rollout_is"),
    ("rewards are cut to 1", "", '"rewards": np.clip(rewards, -10.0, 10.0)', '"rewards": np.clip(rewards, -1.0, 1.0)', "test_rollout_is"),
    ("rewards are cut before they are scaled", "", RSC, "rewards[t, i] = np.clip(reward, -10.0, 10.0) / return_norm.std", "test_rollout_is"),
    ("all states reached are counted", "B47", "            raw[i] = env.obs\n", "            obs_norm.update(env.obs[None])\n            raw[i] = env.obs\n", "test_rollout_is"),
    ("statistics are updated after they are used", "B47", "        obs_norm.update(raw)\n        obs[t] = obs_norm.normalize(raw)\n", "        obs[t] = obs_norm.normalize(raw)\n        obs_norm.update(raw)\n", "test_rollout_is"),
    ("observations of the first environment only", "B47", "        obs_norm.update(raw)\n", "        obs_norm.update(raw[:1])\n", "test_rollout_is"),
    # advantages, old values
    ("values and next values exchanged", "B65", GAE_2, 'batch["rewards"], agent.value(batch["next_obs"]), batch["values"],', "test_rollout_is"),
    # the update
    ("Adam starts anew in each update", "B31", "    stats, norms = [], []\n", "    stats, norms = [], []\n    for m in moments.values():\n        m.zero_()\n", "test_adam"),
    ("KL may be half as much again", "B23, SB3 #1229", KLS, KLS.replace("> args.target_kl", "> 1.5 * args.target_kl"), "test_the_kl_limit"),
    ("KL is looked at in the first epoch only", "B23", KLS, KLS.replace("if args.target_kl", "if len(stats) <= args.num_minibatches and args.target_kl"), "test_the_kl_limit"),
    ("the limit is the clip fraction's", "B23", KLS, KLS.replace('"approx_kl"', '"clipfrac"'), "test_the_kl_limit"),
    # metrics, main
    ("explained variance of the advantages", "B22", 'explained_variance(b["values"], b["returns"])', 'explained_variance(b["values"], b["advantages"])', "test_explained_variance"),
    ("explained variance with arguments exchanged", "B22", 'explained_variance(b["values"], b["returns"])', 'explained_variance(b["returns"], b["values"])', "test_explained_variance"),
    ("clip fraction of raw advantages", "B22", 'clip_fraction(logp, b["logps"], adv, args', 'clip_fraction(logp, b["logps"], b["advantages"], args', "test_the_clip_fraction_logged"),
    ("initial weights do not follow the seed", "B29", "torch.manual_seed(args.seed)  # initial weights", "torch.manual_seed(0)  # initial weights", "test_initial_weights"),
    # evaluation
    ("evaluation samples", "B53", EVSTEP, EVSTEP.replace("[0])", "[0] + np.exp(-0.3) * np.random.standard_normal(env.action_dim))"), "test_evaluation"),
    ("evaluation without statistics", "cleanrl's evaluation", EVSTEP, EVSTEP.replace("obs_norm.normalize(env.obs[None])", "env.obs[None].astype(np.float32)"), "test_evaluation"),
    ("evaluation counts one episode too few", "B53", "generate_state(args.eval_episodes)", "generate_state(max(1, args.eval_episodes - 1))", "test_evaluation_is"),
    ("evaluation of one episode again and again", "B53", "env.reset(int(seed))", "env.reset(7)", "test_evaluation_is"),
    ("evaluation on training seeds", "B53", "for seed in streams(args.seed)[3].generate_state(args.eval_episodes):\n        env.reset(int(seed))", "for _ in range(args.eval_episodes):\n        env.reset()", "test_evaluation"),
    ("evaluation reports the last reward", "B53", "scores.append(env.score)", "scores.append(env.score / len(env.actions))", "test_evaluation_is"),
    ("evaluation on the training environment", "B53", "evaluate(agent, obs_norm, eval_env, args)", "evaluate(agent, obs_norm, envs[0], args)", "test_evaluation"),
    ("evaluation learns rewards", "B34", "scores.append(env.score)", "obs_norm.update(env.obs[None])\n        scores.append(env.score)", "test_evaluation"),
    # checkpoints
    ("no reward statistics in the checkpoint", "", '"obs_norm": obs_norm, "return_norm": return_norm}', '"obs_norm": obs_norm}', "test_stopped_and"),
    ("no environments in the checkpoint", "", ' | {f"env{i}": env for i, env in enumerate(envs)}', '', "test_stopped_and"),
    ("the discounted return is not resumed", "B44", 'self.score, self.discounted = state["episode"]', 'self.score, _ = state["episode"]', "test_stopped_and"),
    ("the score is not resumed", "B50", 'self.score, self.discounted = state["episode"]', '_, self.discounted = state["episode"]', "test_stopped_and"),
    ("the seeds of episodes start again", "B29", '        self.rng.bit_generator.state = json.loads(state["rng"])\n', "", "test_stopped_and"),
    ("the step count of Adam starts again", "", "moment.copy_(state[name])", 'moment.copy_(state[name] * (name != "step"))', "test_stopped_and"),
    ("the schedule starts again", "B25", "linear_schedule(iteration, args", "linear_schedule(iteration - run.begun // args.batch_size, args", "test_stopped_and"),
    ("recent scores are forgotten", "", "Saved(lambda: list(recent), recent.extend)", "Saved(lambda: list(recent), len)", "test_stopped_and"),
    ("advantages in another order than samples", "B82", "for name in names}  # (T * N, ...)\n", 'for name in names}\n    b["advantages"] = batch["advantages"].T.flatten()\n', "test_every_sample"),
    # one's own environment
    ("observations take the dtype of the first one seen", "", "obs = np.asarray(obs, np.float64)", "obs = np.asarray(obs)\n        self.kind = getattr(self, 'kind', obs.dtype)\n        obs = obs.astype(self.kind)", "test_observations_of_any_type"),
    ("a wrong shape is read all the same", "", "if obs.shape != self.env.observation_space.shape:", "if False:", "test_observations_of_any_type"),
    ("a half open side is not clipped", "", "self.low, self.high = space.low.astype(float), space.high.astype(float)", "self.low, self.high = (np.where(np.isfinite(space.low) & np.isfinite(space.high), x, y).astype(float) for x, y in ((space.low, -np.inf), (space.high, np.inf)))", "test_each_side_of_an_action"),
    ("large bounds count as none", "", "bounded = np.isfinite(self.low) & np.isfinite(self.high)", "bounded = np.maximum(np.abs(self.low), np.abs(self.high)) < 1e6", "test_each_side_of_an_action"),
    ("a fault of the simulator is a traceback", "", "        with self.fault:\n            obs, reward", "        if True:\n            obs, reward", "test_a_fault_of_the_environment"),
    ("an endless episode is evaluated without an end", "", "while not done and len(env.actions) < LONGEST_EVALUATION:", "while not done:", "test_an_evaluation_has_an_end"),
    ("nothing is saved before the last evaluation", "", "        if self.due(self.args.save_every * self.size):\n            self.save()\n", "        if self.step < self.total and self.due(self.args.save_every * self.size):\n            self.save()\n", "test_the_last_evaluation_loses_nothing"),
    ("a run that is trained longer keeps the old schedule", "", "args = tyro.cli(Args, args=argv, default=Args(**saved))\n", "args = tyro.cli(Args, args=argv, default=Args(**saved))\n    args.__dict__['total_timesteps'] = saved['total_timesteps']\n", "test_a_finished_run"),
    ("a new run takes the optimiser too", "", "load_parts(self.learnt, self.state)", "load_parts(self.learnt | self.parts, self.state)", "test_a_new_run_starts"),
    ("a new run starts from weights without statistics", "", "load_parts(self.learnt, self.state)", "load_parts({'agent': self.learnt['agent']}, self.state)", "test_a_new_run_starts"),
    ("the class default as a value goes unnoticed", "", "if now != before and not", "if now not in (before, getattr(Args, name)) and not", "test_wrong_files"),
]  # fmt: skip
