"""Public bugs and their neighbours as small edits of ppo_continuous.py: (what, where it was public, old, new, check).

`check` is the beginning of the name of the test that must fail. B numbers are those of the tests' docstrings.
"""

GAE = 'batch["terminated"], batch["done"], args.gamma'
ACT = "actions[t] = act(obs[t]) + std * noise[t]"
NEXT = "np.where(done[..., None], next_obs, obs[1:])"
CLIP = "(args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)"
ONE = "minibatches(args.batch_size, args.num_minibatches, generator)"
STOP = "            break  # ends the update: one loop holds all epochs [D7]\n"
LOSS = 'policy_loss(logp, b["logps"], adv, clip_coef, clip_coef)'

MUTANTS = [
    # rollout and advantages
    ("a time limit ends the bootstrap", "cleanrl #198", GAE, 'batch["done"], batch["done"], args.gamma', "test_rollout_is"),
    ("termination does not end the bootstrap", "B05", GAE, 'batch["done"] & False, batch["done"], args.gamma', "test_rollout_is"),
    ("the chain runs on over a time limit", "B05", GAE, 'batch["terminated"], batch["terminated"], args.gamma', "test_rollout_is"),
    ("bootstrap from the reset state", "B07, pytorch/rl #3771", NEXT, "obs[1:]", "test_rollout_is"),
    ("bootstrap from the state before the action", "B08", NEXT, "np.where(done[..., None], obs[:-1], obs[1:])", "test_rollout_is"),
    ("value after the rollout is the one before it", "B04, SB3 #183", "obs[T] = obs_norm", "obs[T] = obs[T - 1]; _ = obs_norm", "test_value_after"),
    ("lambda is ignored", "", "args.gamma, args.gae_lambda,", "args.gamma, 0.95,", "test_rollout_is"),
    ("the task's time limit is removed", "B49, cleanrl 9f1832ed", "env if len(env.obs", "env.unwrapped if len(env.obs", "test_the_time_limit"),
    ("environments share one random stream", "B29, cleanrl #238", "Env(args, stream) for stream", "Env(args, streams(1)[0]) for stream", "test_same_seed"),
    ("one noise for the whole rollout", "B29", ACT, ACT.replace("noise[t]", "noise[0]"), "test_stored_logp"),
    # actions and log-probabilities
    ("the clipped action is stored", "B40, tianshou #312", ACT, "actions[t] = np.clip(act(obs[t]) + std * noise[t], -1, 1)", "test_stored_logp"),
    ("drawn with another deviation than scored", "B43, cleanrl 50ea896c", "+ std * noise", "+ 2 * std * noise", "test_stored_logp"),
    ("tanh correction in the update only", "B41, Mighty #118", 'batch["actions"])[0] - batch["log_det"]', 'batch["actions"])[0]', "test_ratio_is_one"),
    ("tanh correction with the wrong sign", "B41", 'logp = logp - b["log_det"]', 'logp = logp + b["log_det"]', "test_ratio_is_one"),
    ("actions beyond the bounds reach the simulator", "B40", "np.minimum(np.maximum(action, -self.limit), self.limit)", "action", "test_stored_logp"),
    ("asymmetric bounds are centred at zero", "", "self.center + self.half * action", "self.half * action", "test_stored_logp"),
    # running statistics
    ("the return goes on over episode ends", "B44, Gymnasium #760", "self.actions, self.score, self.discounted = [], 0.0, 0.0", "self.actions, self.score, self.discounted = [], 0.0, getattr(self, 'discounted', 0.0)", "test_rollout_is"),
    ("reward scaling has a discount of its own", "B46, cleanrl #209", "env.discounted * args.gamma", "env.discounted * 0.99", "test_rollout_is"),
    ("rewards are centred", "B44", "reward / return_norm.std", "(reward - return_norm.mean) / return_norm.std", "test_rollout_is"),
    ("scaled rewards are not bounded", "", "np.clip(rewards, -10.0, 10.0)", "rewards", "test_rollout_is"),
    ("the first observation is not counted", "B32", "        obs_norm.update(raw)\n", "        obs_norm.update(raw) if t else None\n", "test_rollout_is"),
    ("evaluation moves the statistics", "", "env.step(act(obs_norm", "obs_norm.update(env.obs[None]); _, terminated, truncated = env.step(act(obs_norm", "test_evaluation_changes"),
    # losses
    ("the clip has no lower side", "B14", LOSS, 'policy_loss(logp, b["logps"], adv, clip_coef, 1.0)', "test_flags_reach"),
    ("the larger of the surrogates", "B16, baselines #1156", "-torch.min(", "-torch.max(", "test_policy_loss"),
    ("the smaller of the value errors", "B02, cleanrl #15", "loss = torch.max(loss", "loss = torch.min(loss", "test_value_loss"),
    ("value clipping around the current value", "B20", 'value_loss(values, b["values"]', "value_loss(values, values.detach()", "test_every_sample"),
    ("the value loss learns advantages", "B11, cleanrl #337", 'b["values"], b["returns"]', 'b["values"], b["advantages"]', "test_every_sample"),
    ("the value loss has no weight", "", "vf_coef * v_loss", "v_loss", "test_update_equals"),
    ("entropy is punished", "", "- ent_coef * entropy", "+ ent_coef * entropy", "test_update_equals"),
    ("advantages are not normalised", "B13", 'whiten(b["advantages"]) if norm_adv', 'b["advantages"] if norm_adv', "test_every_sample"),
    ("the loss is a sum", "", "clip_coef, clip_coef).mean()\n    v_loss", "clip_coef, clip_coef).sum()\n    v_loss", "test_update_equals"),
    ("log-probability is a mean over the action", "B37, tianshou #40", "return logp.sum(-1)", "return logp.mean(-1)", "test_gaussian"),
    # the loop
    ("small gradients are blown up to the norm", "", CLIP, "(args.max_grad_norm / (norm + 1e-6))", "test_update_equals"),
    ("gradients are not clipped", "", "grad *= " + CLIP, "pass", "test_update_equals"),
    ("Adam's epsilon", "", "eps=1e-5, weight", "eps=1e-3, weight", "test_update_equals"),
    ("one epoch too few", "", "range(args.update_epochs)", "range(args.update_epochs - 1)", "test_every_sample"),
    ("the same minibatches in every epoch", "", ONE, "minibatches(args.batch_size, args.num_minibatches, torch.Generator().manual_seed(3))", "test_every_sample"),
    ("advantages in another order than samples", "B82", "value.flatten(0, 1) for key", 'value.transpose(0, 1).flatten() if key == "advantages" else value.flatten(0, 1) for key', "test_every_sample"),
    ("KL is looked at after the step", "B23, SB3 #419", "        if args.target_kl is not None and", "        optimizer_step(flat, grad, moments, lr)\n        if args.target_kl is not None and", "test_target_kl"),
    ("the KL stop does nothing", "B23, cleanrl #520", STOP, "            continue\n", "test_target_kl"),
    ("learning rate is read one update late", "B25, rlevo #324", "linear_schedule(iteration, args", "linear_schedule(iteration + 1, args", "test_learning_rate"),
    ("the rest of the budget is dropped", "B26, SB3 #265", "-(-self.total_timesteps // self.batch_size)", "max(1, self.total_timesteps // self.batch_size)", "test_budget"),
    ("metrics of the last minibatch", "B22", "torch.stack(stats).mean(0)", "stats[-1]", "test_metrics_are"),
    ("KL with exchanged roles", "", 'approx_kl(b["logps"], logp, kind)', 'approx_kl(logp, b["logps"], kind)', "test_metrics_are"),
    ("clip fraction without the sign", "B22, trl #3175", "clipped = ((adv > 0) & (ratio > 1.0 + clip_high)) | ((adv < 0) & (ratio < 1.0 - clip_low))", "clipped = (ratio - 1.0).abs() > clip_high", "test_clip_fraction"),
    ("episodes are one step short", "B34, Gymnasium #1624", "episodes.append((env.score, len(env.actions)))", "episodes.append((env.score, len(env.actions) - 1))", "test_metrics_are"),
    ("the score is the last reward", "", "self.score += float(reward)", "self.score = float(reward)", "test_metrics_are"),
    # checkpoints
    ("no statistics in the checkpoint", "cleanrl's evaluation", '"obs_norm": obs_norm, "return_norm": return_norm}', '"return_norm": return_norm}', "test_evaluation_changes"),
    ("no optimiser in the checkpoint", "", 'moment.copy_(state["moments"][name])', "pass", "test_stopped_and"),
    ("the action stream starts again", "", '        rng.bit_generator.state = json.loads(state["actions"])\n', "", "test_stopped_and"),
    ("shuffling starts again", "", '        generator.set_state(state["shuffle"])\n', "", "test_stopped_and"),
    ("the checkpoint is overwritten in place", "", 'open(path.with_suffix(".tmp"), "wb")', 'open(path, "wb")', "test_half_written"),
    ("NaN goes on", "", "if not np.isfinite(value).all():", "if False:", "test_nan_stops"),
]  # fmt: skip
