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
    ("advantages are not normalised", "B13", "(whiten(adv) if norm_adv", "(adv if norm_adv", "test_every_sample"),
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

# functions that every script has
R = "ratio = torch.exp(logp - old_logp)\n    return -torch.min"  # fmt: skip
PL = "return -torch.min(ratio * adv, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * adv)"  # fmt: skip
CF = "clipped = ((adv > 0) & (ratio > 1.0 + clip_high)) | ((adv < 0) & (ratio < 1.0 - clip_low))"  # fmt: skip
KL = '{"k1": lambda: -d, "k2": lambda: d.square() / 2, "k3": lambda: torch.expm1(d) - d}[kind]()'  # fmt: skip
MB = "torch.randperm(n, generator=generator, device=generator.device).tensor_split(num)"  # fmt: skip

MUTANTS += [
    # linear_schedule, minibatches
    ("annealing ends at zero", "B25, rlevo #324", "return 1.0 - step / total", "return 1.0 - (step + 1) / total", "test_linear_schedule"),
    ("annealing over one update too few", "B25", "return 1.0 - step / total", "return 1.0 - step / max(total - 1, 1)", "test_linear_schedule"),
    ("annealing is a staircase", "B25, purejaxrl #6", "return 1.0 - step / total", "return 1.0 - (20 * step // total) / 20", "test_linear_schedule"),
    ("annealing by integer division is none", "B25", "return 1.0 - step / total", "return 1.0 - step // total", "test_linear_schedule"),
    ("annealing turned round", "B25", "return 1.0 - step / total", "return step / total", "test_linear_schedule"),
    ("the remainder is in no minibatch", "B26, SB3 #270", MB, MB.replace(".tensor_split(num)", "[: n // num * num].split(n // num)"), "test_minibatches_are"),
    ("minibatches of rounded up size, too few", "B26, trl #563", MB, MB.replace("tensor_split(num)", "split(-(-n // num))"), "test_minibatches_are"),
    ("a small last minibatch", "B26, SB3 #265", MB, MB.replace("tensor_split(num)", "split(max(1, n // num))"), "test_minibatches_are"),
    ("the last sample is in no minibatch", "B32, cleanrl bf884ac3", MB, MB.replace("(num)", "(num)").replace(".tensor_split", "[:-1].tensor_split"), "test_minibatches_are"),
    ("minibatches drawn with replacement", "B26", MB, "torch.randint(n, (n,), generator=generator, device=generator.device).tensor_split(num)", "test_minibatches_are"),
    ("minibatches in the order of collection", "B29", MB, "torch.arange(n, device=generator.device).tensor_split(num)", "test_minibatches_"),
    ("whole blocks are shuffled, not samples", "B29", MB, "[torch.arange(n).tensor_split(num)[i] for i in torch.randperm(num, generator=generator)]", "test_minibatches_shuffle"),
    ("the order is rotated, not shuffled", "B29", MB, "torch.arange(n).roll(int(torch.randint(n, (), generator=generator))).tensor_split(num)", "test_minibatches_shuffle"),
    ("shuffling draws from the global stream", "B29, cleanrl #238", MB, MB.replace("generator=generator, ", ""), "test_minibatches_draw"),
    ("the same shuffle at each call", "B29", MB, "torch.randperm(n, generator=torch.Generator().manual_seed(0)).tensor_split(num)", "test_minibatches_draw"),
    # policy_loss
    ("the larger of the two surrogates", "B16, baselines #1156", "return -torch.min(", "return -torch.max(", "test_policy_loss"),
    ("the smaller negative surrogate", "B16", PL, "return torch.min(-ratio * adv, -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * adv)", "test_policy_loss"),
    ("min of the ratios, then times the advantage", "B14, takuseno/ppo #3", PL, "return -torch.min(ratio, ratio.clamp(1.0 - clip_low, 1.0 + clip_high)) * adv", "test_policy_loss"),
    ("the clipped surrogate only", "B14", PL, "return -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * adv", "test_policy_loss"),
    ("the unclipped surrogate only", "B14", PL, "return -ratio * adv", "test_policy_loss"),
    ("the surrogate is minimised", "B16", PL, PL.replace("-torch", "torch"), "test_policy_loss"),
    ("the clip has no upper end", "B14", PL, PL.replace("1.0 - clip_low, 1.0 + clip_high", "min=1.0 - clip_low"), "test_policy_loss"),
    ("the clip has no lower end", "B14", PL, PL.replace("1.0 - clip_low, 1.0 + clip_high", "max=1.0 + clip_high"), "test_policy_loss"),
    ("low and high clip exchanged", "B14", PL, PL.replace("1.0 - clip_low, 1.0 + clip_high", "1.0 - clip_high, 1.0 + clip_low"), "test_policy_loss"),
    ("the high clip on both sides", "B14", PL, PL.replace("clip_low", "clip_high"), "test_policy_loss"),
    ("the lower end is the inverse of the upper", "B14", PL, PL.replace("1.0 - clip_low", "1.0 / (1.0 + clip_low)"), "test_policy_loss"),
    ("the log-ratio is clipped", "B14", PL, "return -torch.min(ratio * adv, (logp - old_logp).clamp(-clip_low, clip_high).exp() * adv)", "test_policy_loss"),
    ("dual clip for both signs", "B17, tianshou #433", PL, "return -torch.max(torch.min(ratio * adv, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * adv), 3.0 * adv)", "test_policy_loss"),
    ("the advantage is whitened between the surrogates", "B13, pytorch/rl #1033", PL, "one = ratio * adv\n    adv = (adv - adv.mean()) / (adv.std(correction=0) + 1e-8)\n    return -torch.min(one, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * adv)", "test_policy_loss"),
    ("the ratio upside down", "B01", R, R.replace("logp - old_logp", "old_logp - logp"), "test_policy_loss"),
    ("the ratio of exponentials", "B110", R, R.replace("torch.exp(logp - old_logp)", "torch.exp(logp) / torch.exp(old_logp)"), "test_policy_loss"),
    ("the ratio of the logarithms", "B01", R, R.replace("torch.exp(logp - old_logp)", "logp / old_logp"), "test_policy_loss"),
    ("the ratio to first order", "B01", R, R.replace("torch.exp(logp - old_logp)", "1.0 + (logp - old_logp)"), "test_policy_loss"),
    ("the ratio of the policy to itself", "B112, trl #3493", R, R.replace("old_logp)", "logp.detach())"), "test_policy_loss"),
    ("no gradient through the ratio", "B112", R, R.replace("(logp -", "(logp.detach() -"), "test_policy_loss"),
    ("the product of all ratios", "B110, hands-on-modern-rl #75", R, R.replace("(logp - old_logp)", "((logp - old_logp).sum().expand_as(logp))"), "test_policy_loss"),
    ("all pairs of samples", "B38, ReinforcementLearningZoo.jl #169", R, R.replace("logp - old_logp", "logp[..., None] - old_logp"), "test_policy_loss"),
    ("the loss is reduced too early", "B38", PL, PL + ".mean()", "test_policy_loss"),
    ("the sign of the advantage is lost", "B14", PL, "adv = adv.abs()\n    " + PL, "test_policy_loss"),
    ("the log-ratio is cut at 2", "B14", R, R.replace("(logp - old_logp)", "((logp - old_logp).clamp(-2.0, 2.0))"), "test_policy_loss"),
    # approx_kl
    ("policy and reference exchanged", "B74", "    d = ref_logp - logp\n", "    d = logp - ref_logp\n", "test_approx_kl"),
    ("k1 with the wrong sign", "B74, pytorch/rl #2908", "lambda: -d,", "lambda: d,", "test_approx_kl"),
    ("k1 without a sign", "B74, trl #235", "lambda: -d,", "lambda: d.abs(),", "test_approx_kl"),
    ("k1 cut at zero", "B74", "lambda: -d,", "lambda: (-d).clamp(min=0.0),", "test_approx_kl"),
    ("k1 is k2", "B100, open-instruct #534", "lambda: -d,", "lambda: d.square() / 2,", "test_approx_kl"),
    ("k2 without the half", "B100", "d.square() / 2", "d.square()", "test_approx_kl"),
    ("k3 cancels near zero", "B101, rlhf-book #525", "torch.expm1(d) - d", "torch.exp(d) - 1 - d", "test_approx_kl_k3"),
    ("k3 in the other direction", "B101", "torch.expm1(d) - d", "torch.expm1(-d) + d", "test_approx_kl"),
    ("k3 with the sign of its last term", "B101", "torch.expm1(d) - d", "torch.expm1(d) + d", "test_approx_kl"),
    ("k3 without its control variate", "B101", "torch.expm1(d) - d", "torch.expm1(d)", "test_approx_kl"),
    ("k3 forgets the 1", "B101", "torch.expm1(d) - d", "torch.exp(d) - d", "test_approx_kl"),
    ("k3 is k2", "B101", "torch.expm1(d) - d", "d.square() / 2", "test_approx_kl"),
    ("k3 of bounded differences", "B101", "    d = ref_logp - logp\n", "    d = (ref_logp - logp).clamp(-2.0, 2.0)\n", "test_approx_kl"),
    ("no gradient through the estimate", "B100", "    d = ref_logp - logp\n", "    d = ref_logp - logp.detach()\n", "test_approx_kl"),
    ("an unknown kind is k1", "B95", KL, KL.replace("[kind]()", '.get(kind, lambda: -d)()'), "test_approx_kl"),
    ("the estimate is averaged too early", "B38", KL, KL + ".mean()", "test_approx_kl"),
    # clip_fraction
    ("clip fraction without the advantage", "B22, trl #3175", CF, "clipped = (ratio > 1.0 + clip_high) | (ratio < 1.0 - clip_low)", "test_clip_fraction"),
    ("clip fraction of the other side", "B22", CF, "clipped = ((adv < 0) & (ratio > 1.0 + clip_high)) | ((adv > 0) & (ratio < 1.0 - clip_low))", "test_clip_fraction"),
    ("clip fraction of the upper end only", "B22", CF, "clipped = (adv > 0) & (ratio > 1.0 + clip_high)", "test_clip_fraction"),
    ("clip fraction of the lower end only", "B22", CF, "clipped = (adv < 0) & (ratio < 1.0 - clip_low)", "test_clip_fraction"),
    ("clip fraction with one clip", "B22", CF, CF.replace("clip_high", "clip_low"), "test_clip_fraction"),
    ("clip fraction with clips exchanged", "B22", CF, CF.replace("clip_high", "x").replace("clip_low", "clip_high").replace("+ x", "+ clip_low"), "test_clip_fraction"),
    ("both conditions at once", "B22", CF, CF.replace(") | (", ") & ("), "test_clip_fraction"),
    ("the mean ratio is reported as clip fraction", "B22, pytorch/rl #2021", "return clipped.float().mean()", "return ratio.clamp(1.0 - clip_low, 1.0 + clip_high).mean()", "test_clip_fraction"),
    ("the share that is not clipped", "B22", "return clipped.float().mean()", "return 1.0 - clipped.float().mean()", "test_clip_fraction"),
    ("clip fraction by the log-ratio", "B22", "ratio = torch.exp(logp - old_logp)\n    clipped", "ratio = 1.0 + (logp - old_logp)\n    clipped", "test_clip_fraction"),
    # streams
    ("all streams are one", "B29, cleanrl #238", "return np.random.SeedSequence(seed).spawn(4)", "return [np.random.SeedSequence(seed)] * 4", "test_streams"),
    ("streams of neighbouring seeds overlap", "B29", "return np.random.SeedSequence(seed).spawn(4)", "return [np.random.SeedSequence(seed + i) for i in range(4)]", "test_streams"),
]  # fmt: skip

# functions of the PPO scripts
DELTA = "delta = rewards + gamma * next_values.masked_fill(terminated, 0.0) - values  # (T, N)"  # fmt: skip
DECAY = "decay = gamma * lam * (~done).to(delta.dtype)  # (T, N)"  # fmt: skip
STEP = "out[t] = advantage = delta[t] + decay[t] * advantage"  # fmt: skip
RET = "return advantages, advantages + values"  # fmt: skip
VL = "loss = torch.max(loss, (old_v + (v - old_v).clamp(-clip, clip) - ret).square())"  # fmt: skip
WH = "centred = (x - x.sum() / count).masked_fill(~mask, 0.0)"  # fmt: skip
WR = "return (centred if shift_mean else x) * torch.rsqrt(centred.square().sum() / count + 1e-8)"  # fmt: skip
EV = "explained = 1.0 - (target - pred).var(correction=0) / target.var(correction=0)"  # fmt: skip

MUTANTS += [
    # compute_gae
    ("GAE: a time limit ends the bootstrap", "B07, cleanrl #198", DELTA, DELTA.replace("(terminated,", "(done,"), "test_gae"),
    ("GAE: nothing ends the bootstrap", "B05", DELTA, DELTA.replace(".masked_fill(terminated, 0.0)", ""), "test_gae"),
    ("GAE: terminal values are multiplied by 0", "B85, verl #2377", DELTA, DELTA.replace(".masked_fill(terminated, 0.0)", " * (~terminated)"), "test_gae_ignores"),
    ("GAE: the flag of the next row ends the bootstrap", "B05", DELTA, DELTA.replace("(terminated,", "(terminated.roll(-1, 0),"), "test_gae"),
    ("GAE: the flag of the row before ends the bootstrap", "B05", DELTA, DELTA.replace("(terminated,", "(terminated.roll(1, 0),"), "test_gae"),
    ("GAE: the chain runs on over a time limit", "B05, skrl #224", DECAY, DECAY.replace("~done", "~terminated"), "test_gae"),
    ("GAE: the chain is never cut", "B05, skrl #449", DECAY, DECAY.replace("(~done)", "(done | ~done)"), "test_gae"),
    ("GAE: the chain is cut one row early", "B05", DECAY, DECAY.replace("(~done)", "(~done.roll(-1, 0))"), "test_gae"),
    ("GAE: the chain is cut one row late", "B05", DECAY, DECAY.replace("(~done)", "(~done.roll(1, 0))"), "test_gae"),
    ("GAE: an ended episode in one environment cuts all", "B82", DECAY, DECAY.replace("(~done)", "(~done.any(1, keepdim=True).expand_as(done))"), "test_gae"),
    ("GAE: the next row's value is the next state's", "B07, pytorch/rl #3771", DELTA, "next_values = torch.cat([values[1:], next_values[-1:]])\n    " + DELTA, "test_gae"),
    ("GAE: the last bootstrap is the value before it", "B04, SB3 #183", DELTA, "next_values = torch.cat([next_values[:-1], values[-1:]])\n    " + DELTA, "test_gae"),
    ("GAE: bootstrap from the acting state", "B08, EmbodiChain #612", DELTA, DELTA.replace("next_values.masked", "values.masked"), "test_gae"),
    ("GAE: no bootstrap after the last row", "B04", DELTA, "next_values = torch.cat([next_values[:-1], 0 * next_values[-1:]])\n    " + DELTA, "test_gae"),
    ("GAE: gamma is missing beside the bootstrap", "B76", DELTA, DELTA.replace("gamma * ", ""), "test_gae"),
    ("GAE: gamma squared beside the bootstrap", "B76", DELTA, DELTA.replace("gamma * ", "gamma * gamma * "), "test_gae"),
    ("GAE: gamma on the reward too", "B76", DELTA, DELTA.replace("rewards + gamma * next", "gamma * (rewards + next").replace(", 0.0)", ", 0.0))"), "test_gae"),
    ("GAE: lambda beside the bootstrap", "B05, cleanrl #494", DELTA, DELTA.replace("gamma * ", "gamma * lam * "), "test_gae"),
    ("GAE: gamma is missing in the chain", "B76", DECAY, DECAY.replace("gamma * lam", "lam"), "test_gae"),
    ("GAE: lambda is missing in the chain", "B76", DECAY, DECAY.replace("gamma * lam", "gamma"), "test_gae"),
    ("GAE: one minus lambda", "B76", DECAY, DECAY.replace("gamma * lam", "gamma * (1.0 - lam)"), "test_gae"),
    ("GAE: powers of gamma by the row", "B76", STEP, STEP.replace("decay[t] *", "decay[t] ** (t + 1) *"), "test_gae"),
    ("GAE: advantage from the immediate reward", "B76, rlhf-book #216", STEP, "out[t] = delta[t]", "test_gae"),
    ("GAE: the chain runs forwards", "B76", "for t in reversed(range(len(delta))):", "for t in range(len(delta)):", "test_gae"),
    ("GAE: the last row is dropped", "B32, cleanrl bf884ac3", "for t in reversed(range(len(delta))):", "out[-1:] = 0.0\n    for t in reversed(range(len(delta) - 1)):", "test_gae"),
    ("GAE: the first row is dropped", "B32", "for t in reversed(range(len(delta))):", "out[:1] = 0.0\n    for t in reversed(range(1, len(delta))):", "test_gae"),
    ("GAE: the decay of the row before", "B05", STEP, STEP.replace("decay[t]", "decay[t - 1]"), "test_gae"),
    ("GAE: the value is added", "B76", DELTA, DELTA.replace("- values", "+ values"), "test_gae"),
    ("GAE: no value is subtracted", "B76", DELTA, DELTA.replace(" - values", ""), "test_gae"),
    ("GAE: returns are the advantages", "B11, cleanrl #337", RET, "return advantages, advantages.clone()", "test_gae"),
    ("GAE: returns are rewards plus bootstrap", "B76", RET, "return advantages, rewards + gamma * next_values.masked_fill(terminated, 0.0)", "test_gae"),
    ("GAE: returns with the next value", "B65", RET, "return advantages, advantages + next_values", "test_gae"),
    ("GAE: returns of normalised advantages", "B13", RET, "advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)\n    " + RET, "test_gae"),
    ("GAE: rewards are changed in place", "B11", DELTA, "rewards += gamma * next_values.masked_fill(terminated, 0.0)\n    delta = rewards - values", "test_gae"),
    ("GAE: rewards are cut at 1", "B13", DELTA, DELTA.replace("rewards +", "rewards.clamp(-1.0, 1.0) +"), "test_gae"),
    ("GAE: environments share the chain", "B82", STEP, "advantage = delta[t] + decay[t] * advantage\n        out[t] = advantage = advantage * 0 + advantage.mean()", "test_gae"),
    # value_loss
    ("the smaller of the two value errors", "B02, cleanrl #15", VL, VL.replace("torch.max", "torch.min"), "test_value_loss"),
    ("the clipped value error only", "B02, ray #2233", VL, VL.replace("torch.max(loss, (", "((").replace(".square())", ".square())"), "test_value_loss"),
    ("the mean of both value errors", "B02", VL, VL.replace("torch.max(loss, ", "0.5 * (loss + "), "test_value_loss"),
    ("the value clip around the value itself", "B20, lm-human-preference-details 36b8f56", VL, "loss = torch.max(loss, (torch.max(torch.min(v, v + clip), v - clip) - ret).square())", "test_value_loss"),
    ("the value clip around a detached copy", "B20", VL, "loss = torch.max(loss, (v.detach() + (v - v.detach()).clamp(-clip, clip) - ret).square())", "test_value_loss"),
    ("the value clip around the return", "B20, tensorflow/agents #352", VL, "loss = torch.max(loss, (ret + (v - ret).clamp(-clip, clip) - ret).square())", "test_value_loss"),
    ("the value clip is relative", "B20", VL, VL.replace("(v - old_v).clamp(-clip, clip)", "((v / old_v - 1).clamp(-clip, clip)) * old_v"), "test_value_loss"),
    ("the value clip has no lower end", "B20", VL, VL.replace("-clip, clip", "max=clip"), "test_value_loss"),
    ("the value clip has no upper end", "B20", VL, VL.replace("-clip, clip", "min=-clip"), "test_value_loss"),
    ("the value clip has lost its minus", "B20", VL, VL.replace("(-clip, clip)", "(clip, clip)"), "test_value_loss"),
    ("the value moves away from the old one", "B20", VL, VL.replace("old_v + (v", "old_v - (v"), "test_value_loss"),
    ("a value clip of 0 is off", "B20", "if clip is not None:", "if clip:", "test_value_loss"),
    ("the value clip is never used", "B20", "if clip is not None:", "if False:", "test_value_loss"),
    ("value loss without the half", "B02", "return 0.5 * loss", "return loss", "test_value_loss"),
    ("value loss of absolute errors", "B02", "loss = (v - ret).square()", "loss = (v - ret).abs()", "test_value_loss"),
    ("value loss of all pairs", "B38, allenact #226", "loss = (v - ret).square()", "loss = (v[..., None] - ret).square().mean(-1) if v.dim() else (v - ret).square()", "test_value_loss"),
    ("value loss is reduced too early", "B38", "return 0.5 * loss", "return 0.5 * loss.mean()", "test_value_loss"),
    ("the gradient goes through the return", "B11", "loss = (v - ret).square()", "loss = (v.detach() - ret).square()", "test_value_loss"),
    # whiten
    ("whitening counts what is masked", "B79, verl #1527", "count = mask.sum().clamp(min=1)", "count = x.numel()", "test_whiten"),
    ("whitening is not masked again", "B79", WH, "centred = x - x.sum() / count", "test_whiten"),
    ("whitening with the sample variance", "B80", WR, WR.replace("/ count", "/ (count - 1).clamp(min=1)"), "test_whiten"),
    ("scale only takes the mean out and puts it back", "B80, slime #1369", WR, "mean = x.sum() / count\n    scaled = centred * torch.rsqrt(centred.square().sum() / count + 1e-8)\n    return scaled if shift_mean else (scaled + mean).masked_fill(~mask, 0.0)", "test_whiten"),
    ("shift_mean turned round", "B80", WR, WR.replace("(centred if shift_mean else x)", "(x if shift_mean else centred)"), "test_whiten"),
    ("shift_mean is ignored", "B80", WR, WR.replace("(centred if shift_mean else x)", "centred"), "test_whiten"),
    ("whitening by rows", "B80, OpenRLHF #1250", WH, "centred = (x - x.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).masked_fill(~mask, 0.0)", "test_whiten"),
    ("whitening by the root mean square", "B80", WR, WR.replace("centred.square()", "x.square()"), "test_whiten"),
    ("whitening divides by the variance", "B80", WR, WR.replace("torch.rsqrt(", "torch.reciprocal("), "test_whiten"),
    ("whitening multiplies by the deviation", "B80", WR, WR.replace("torch.rsqrt(", "torch.sqrt("), "test_whiten"),
    ("whitening does not scale", "B80", WR, "return centred if shift_mean else x", "test_whiten"),
    ("whitening of a constant is not finite", "B80", WR, WR.replace(" + 1e-8", ""), "test_whiten"),
    ("whitening with a large epsilon", "B80", WR, WR.replace("1e-8", "1e-1"), "test_whiten"),
    ("the mask multiplies", "B85, verl #2377", "x = x.masked_fill(~mask, 0.0)\n    count", "x = x * mask\n    count", "test_whiten"),
    ("whitening of nothing is not finite", "B85, verl #782", "count = mask.sum().clamp(min=1)", "count = mask.sum()", "test_whiten"),
    ("the mask is turned round", "B79", "x = x.masked_fill(~mask, 0.0)\n    count", "mask = ~mask\n    x = x.masked_fill(~mask, 0.0)\n    count", "test_whiten"),
    # explained_variance
    ("explained variance of exchanged arguments", "B22", EV, EV.replace("target.var(", "pred.var("), "test_explained"),
    ("explained variance of squared errors", "B22", EV, EV.replace("(target - pred).var(correction=0)", "(target - pred).square().mean()"), "test_explained"),
    ("unexplained variance", "B22", EV, EV.replace("1.0 - ", ""), "test_explained"),
    ("explained variance of a constant is a number", "B22", "torch.where(target.max() > target.min(), explained, math.nan)", "explained.nan_to_num(0.0)", "test_explained"),
    ("explained variance by columns", "B80", EV, "explained = (1.0 - (target - pred).var(0, correction=0) / target.var(0, correction=0)).mean()", "test_explained"),
]  # fmt: skip

# ppo_continuous.py
GL = "return logp.sum(-1), (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)"  # fmt: skip
ACT_2 = "actions[t] = act(obs[t]) + std * noise[t]"  # fmt: skip
DISC = "env.discounted = env.discounted * args.gamma + reward"  # fmt: skip
RUPD = "return_norm.update([env.discounted])"  # fmt: skip
RSC = "rewards[t, i] = reward / return_norm.std"  # fmt: skip
ENDS = "            if terminated[t, i] or truncated[t, i]:"  # fmt: skip
GAE_2 = 'batch["rewards"], batch["values"], agent.value(batch["next_obs"]),'  # fmt: skip
KLS = 'if args.target_kl is not None and stat[STATS.index("approx_kl")] > args.target_kl:'  # fmt: skip
EVSTEP = "_, terminated, truncated = env.step(act(obs_norm.normalize(env.obs[None]))[0])"  # fmt: skip

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
    ("tanh is not applied", "B41", "action = np.tanh(action) if self.tanh else", "action = ", "test_stored_logp"),
    ("tanh and clip", "B41", "np.minimum(np.maximum(action, -self.limit), self.limit)", "np.tanh(action)", "test_stored_logp"),
    ("tanh in the mean of the policy", "B43", "return self.actor(obs), self.log_std, self.value(obs)", "return self.actor(obs).tanh(), self.log_std, self.value(obs)", "test_the_policy_that_acts"),
    ("the stored sample is the bounded one", "B40, cleanrl #240", "action = self.to_env(action)\n        self.obs", "action[...] = np.clip(action, -1, 1)\n        action = self.to_env(action)\n        self.obs", "test_stored_logp"),
    ("the squashed sample is stored", "B41", ACT_2, ACT_2 + "\n        if args.action_bounds == 'tanh':\n            actions[t] = np.tanh(actions[t])", "test_stored_logp"),
    ("observations are not normalised", "B47", "obs[t] = obs_norm.normalize(raw)", "obs[t] = raw", "test_rollout_is"),
    ("states reached are not normalised", "B07", "next_obs[t, i] = obs_norm.normalize(env.obs)", "next_obs[t, i] = env.obs", "test_rollout_is"),
    ("the state reached is read after the reset", "B07, envpool #33", "                next_obs[t, i] = obs_norm.normalize(env.obs)  # reached, but not acted on [D1]\n                episodes.append((env.score, len(env.actions)))\n                env.reset()\n", "                episodes.append((env.score, len(env.actions)))\n                env.reset()\n                next_obs[t, i] = obs_norm.normalize(env.obs)\n", "test_rollout_is"),
    ("all observations are the last one", "aliased buffer", "obs[t] = obs_norm.normalize(raw)", "obs[:] = obs_norm.normalize(raw)", "test_rollout_is"),
    ("the buffer of observations is not copied", "aliased buffer", "self.obs, reward, terminated, truncated, _ = self.env.step(action)", "obs, reward, terminated, truncated, _ = self.env.step(action)\n        self.obs[...] = obs", "test_rollout_is"),
    ("the observation is that of the step before", "B04, SB3 #183", "            raw[i] = env.obs\n", "            raw[i], env.late = getattr(env, 'late', env.obs), env.obs.copy()\n", "test_rollout_is"),
    ("one environment is stepped for all", "B29", "env.step(actions[t, i])", "env.step(actions[t, 0])", "test_the_policy_that_acts"),
    ("environments share their noise", "B29", "rng.standard_normal((T, args.num_envs, len(std)), dtype=np.float32)", "np.repeat(rng.standard_normal((T, 1, len(std)), dtype=np.float32), N, 1)", "test_noise"),
    ("one noise for all dimensions", "B43", "rng.standard_normal((T, args.num_envs, len(std)), dtype=np.float32)", "np.repeat(rng.standard_normal((T, N, 1), dtype=np.float32), len(std), 2)", "test_stored_logp"),
    ("uniform noise", "B43", "rng.standard_normal((T, args.num_envs, len(std)), dtype=np.float32)", "rng.uniform(-1.73, 1.73, (T, N, len(std))).astype(np.float32)", "test_stored_logp"),
    ("the noise is the same in each rollout", "B29", "noise = rng.standard_normal(", "noise = np.random.default_rng(0).standard_normal(", "test_noise"),
    ("actions are the mean", "B43", ACT_2, "actions[t] = act(obs[t])", "test_stored_logp"),
    ("the variance scales the noise", "B43", "std = agent.log_std.exp()", "std = (2 * agent.log_std).exp()", "test_stored_logp"),
    ("the logarithm scales the noise", "B43", "std = agent.log_std.exp()", "std = agent.log_std", "test_stored_logp"),
    ("every environment has the same seeds", "B29, Metta #814", "int(self.rng.integers(2**31)) if seed is None", "12345 if seed is None", "test_same_seed"),
    ("every episode starts alike", "B29", "int(self.rng.integers(2**31)) if seed is None", "getattr(self, 'episode_seed', int(self.rng.integers(2**31))) if seed is None", "test_every_episode"),
    ("a time limit does not end the episode", "B49", ENDS, "            if terminated[t, i]:", "test_rollout_is"),
    ("a termination does not end the episode", "B10", ENDS, "            if truncated[t, i]:", "test_rollout_is"),
    ("time limits are terminations", "B07, cleanrl #198", "return float(reward), bool(terminated), bool(truncated)", "return float(reward), bool(terminated or truncated), bool(truncated)", "test_rollout_is"),
    ("terminations are time limits", "B05", "return float(reward), bool(terminated), bool(truncated)", "return float(reward), False, bool(terminated or truncated)", "test_rollout_is"),
    ("truncation beside termination hides it", "B05", "return float(reward), bool(terminated), bool(truncated)", "return float(reward), bool(terminated and not truncated), bool(truncated)", "test_rollout_is"),
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
    ("explained variance of the advantages", "B22", 'explained_variance(everyone["values"], everyone["returns"])', 'explained_variance(b["values"], b["advantages"])', "test_explained_variance"),
    ("explained variance with arguments exchanged", "B22", 'explained_variance(everyone["values"], everyone["returns"])', 'explained_variance(b["returns"], b["values"])', "test_explained_variance"),
    ("clip fraction of raw advantages", "B22", "clipped = clip_fraction(logp, b[\"logps\"], adv, clip_coef", "clipped = clip_fraction(logp, b[\"logps\"], b[\"advantages\"], clip_coef", "test_the_clip_fraction_logged"),
    ("initial weights do not follow the seed", "B29", "torch.manual_seed(args.seed)  # initial weights", "torch.manual_seed(0)  # initial weights", "test_initial_weights"),
    # evaluation
    ("evaluation samples", "B53", EVSTEP, EVSTEP.replace("[0])", "[0] + np.exp(-0.3) * np.random.standard_normal(env.half.size))"), "test_evaluation"),
    ("evaluation without statistics", "cleanrl's evaluation", EVSTEP, EVSTEP.replace("obs_norm.normalize(env.obs[None])", "env.obs[None].astype(np.float32)"), "test_evaluation"),
    ("evaluation counts one episode too few", "B53", "generate_state(args.eval_episodes)", "generate_state(max(1, args.eval_episodes - 1))", "test_evaluation_is"),
    ("evaluation of one episode again and again", "B53", "env.reset(int(seed))", "env.reset(7)", "test_evaluation_is"),
    ("evaluation on training seeds", "B53", "for seed in streams(args.seed)[3].generate_state(args.eval_episodes):\n        env.reset(int(seed))", "for _ in range(args.eval_episodes):\n        env.reset()", "test_evaluation"),
    ("evaluation reports the last reward", "B53", "scores.append(env.score)", "scores.append(env.score / len(env.actions))", "test_evaluation_is"),
    ("evaluation on the training environment", "B53", "evaluate(agent, obs_norm, eval_env, args)", "evaluate(agent, obs_norm, envs[0], args)", "test_evaluation"),
    ("evaluation learns rewards", "B34", "scores.append(env.score)", "obs_norm.update(env.obs[None])\n        scores.append(env.score)", "test_evaluation"),
    # checkpoints
    ("no reward statistics in the checkpoint", "", 'parts = {"agent": agent, "obs_norm": obs_norm, "return_norm": return_norm}', 'parts = {"agent": agent, "obs_norm": obs_norm}', "test_stopped_and"),
    ("no environments in the checkpoint", "", 'parts |= {f"env{i}": env for i, env in enumerate(envs, own.start)}', "pass\n    for env in envs:\n        env.reset()", "test_stopped_and"),
    ("the discounted return is not resumed", "B44", 'self.score, self.discounted = state["episode"]', 'self.score, _ = state["episode"]', "test_stopped_and"),
    ("the score is not resumed", "B50", 'self.score, self.discounted = state["episode"]', '_, self.discounted = state["episode"]', "test_stopped_and"),
    ("the seeds of episodes start again", "B29", '        self.rng.bit_generator.state = json.loads(state["rng"])\n', "", "test_stopped_and"),
    ("the step count of Adam starts again", "", 'for name, moment in moments.items():\n            moment.copy_(state["moments"][name])', 'for name, moment in moments.items():\n            moment.copy_(state["moments"][name] * (name != "step"))', "test_stopped_and"),
    ("the schedule starts again", "B25", 'folder, first = args.resume, state["step"] // args.batch_size\n', 'folder, first = args.resume, state["step"] // args.batch_size - 1\n', "test_stopped_and"),
    ("recent scores are forgotten", "", '        recent.extend(state["recent"])\n', "", "test_stopped_and"),
    # several processes
    ("whitened with the process's own statistics", "B28, THUDM/slime #2235", "(whiten(adv) if norm_adv else adv)[places]", "whiten(adv[places]) if norm_adv else adv[places]", "test_the_update_is_that"),
    ("unequal parts of a minibatch weigh the same", "B28", " * (len(own[0]) / len(mb))", " / dist.get_world_size()", "test_the_update_is_that"),
    ("gradients are not summed over processes", "", "sum_over_processes(part).split(", "part.split(", "test_the_update_is_that"),
    ("explained variance of one's own part", "B28", 'explained_variance(everyone["values"], everyone["returns"])', 'explained_variance(b["values"], b["returns"])', "test_the_update_is_that"),
    ("weights of the processes are not compared", "", "if any(other != sums[0] for other in sums):", "if False:", "test_processes_whose_weights"),
    ("statistics stay those of one process", "", "        norm.merge(moments)\n", "        pass\n", "test_a_process_that_dies"),
    ("what all had before is counted again", "", "torch.from_numpy(self.moments() - before)).numpy() + before", "torch.from_numpy(self.moments())).numpy()", "test_running_statistics"),
]  # fmt: skip
