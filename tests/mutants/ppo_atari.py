"""Public bugs and their neighbours as small edits of ppo_atari.py: (what, where it was public, old, new, check).

`check` is the beginning of the name of the test that must fail. B numbers are those of the tests' docstrings.
"""

GAE = 'batch["terminated"], batch["done"], args.gamma'
NEXT = "values[1:].clone()"
NOISE = "rng.gumbel(size=size)[:, own]"
EVALUATED = "torch.cat(parts).view(T + 1, N)"
FIRE = "self.fire_next = terminated & ~self.over & (self.fire is not None)"
EXECUTED = "np.where(self.fire_next, self.fire or 0, actions)"
LIVES = 'terminated & (info["lives"] == 0) if self.args.life_loss else terminated'
INPUT = "obs.contiguous(memory_format=torch.channels_last) / 255.0"
LOSS = 'policy_loss(logp, b["logps"], adv, args.clip_coef, args.clip_coef)'
RESET = "            games.reset(games.over)\n"
SCORED = "categorical_logp_entropy(logits, actions), values"
HEADS = "return self.actor(hidden), self.critic(hidden).squeeze(-1)"

MUTANTS = [
    # rollout and advantages
    ("the limit of frames ends the bootstrap", "cleanrl #198", GAE, 'batch["done"], batch["done"], args.gamma', "test_rollout_is"),
    ("a lost game does not end the bootstrap", "B05", GAE, 'batch["done"] & False, batch["done"], args.gamma', "test_rollout_is"),
    ("the chain runs on over the limit of frames", "B05, skrl #449", GAE, 'batch["terminated"], batch["terminated"], args.gamma', "test_rollout_is"),
    ("bootstrap from the first picture of the next game", "B07, pytorch/rl #3771", "    if cut:  # [D1]", "    if False:", "test_rollout_is"),
    ("bootstrap from the picture before the action", "B08, EmbodiChain #612", "cut += [games.obs[i].copy() for", "cut += [obs[t, i].numpy().copy() for", "test_rollout_is"),
    ("pictures at the limit in another order", "B82", 'np.stack(cut)', 'np.stack(cut[::-1])', "test_rollout_is"),
    ("value after the rollout is the one before it", "B04, SB3 #183", "obs[T] = torch.from_numpy(games.obs)", "obs[T] = obs[T - 1]", "test_value_after"),
    ("every value is its own successor", "B04", NEXT, "values[:-1].clone()", "test_rollout_is"),
    ("gamma is ignored", "B46", "args.gamma, args.gae_lambda,", "0.99, args.gae_lambda,", "test_rollout_is"),
    ("an ended game is left to ALE, whose reset eats a step", "B10, cleanrl #475", RESET, "", "test_rollout_is"),
    ("returns of advantages alone", "B11, cleanrl #337", "return advantages, advantages + values", "return advantages, advantages", "test_gae"),
    ("values of other weights than acted", "B112", "= logps[:-1], values[:-1]", "= logps[:-1], values[:-1] * 1.01", "test_rollout_is"),
    ("values by game, then by step", "B82", EVALUATED, "torch.cat(parts).view(N, T + 1).T", "test_rollout_is"),
    # rewards and scores
    ("rewards are raw", "Mnih et al.", "np.sign(rewards)", "rewards", "test_rollout_is"),
    ("negative rewards are dropped", "", "np.sign(rewards)", "(rewards > 0).astype(np.float32)", "test_rollout_is"),
    ("rewards are cut at 1, not at -1", "", "np.sign(rewards)", "np.minimum(rewards, 1)", "test_rollout_is"),
    ("scores of clipped rewards", "ALE's default", "reward_clipping=False", "reward_clipping=True", "test_scores_are"),
    ("the score is of signs", "", "self.score += rewards", "self.score += np.sign(rewards)", "test_scores_are"),
    ("the score goes on over the limit of frames", "B50, envpool #299", RESET, "            kept = games.score * truncated[t]\n            games.reset(games.over)\n            games.score += kept\n", "test_scores_are"),
    ("a game is a life", "B53, SB3 #2170", LIVES, "terminated", "test_scores_are"),
    ("a lost life starts a new game", "B53", "noop_max=30 if", "episodic_life=args.life_loss, noop_max=30 if", "test_flags_reach_the_games"),
    ("games are one step short", "B34", "games.length[games.over].tolist()", "(games.length[games.over] - 1).tolist()", "test_scores_are"),
    ("the score is the last reward", "", "self.score += rewards", "self.score = rewards + 0.0", "test_scores_are"),
    ("the score starts at the last game's", "B50", "self.score[which], self.length[which], self.fire_next[which] = 0.0, 0, False", "self.length[which], self.fire_next[which] = 0, False", "test_scores_are"),
    # FIRE
    ("nobody fires", "Gymnasium #781", FIRE, "self.fire_next = terminated & False", "test_fire_is"),
    ("FIRE at the first step of a new game", "", "self.score[which], self.length[which], self.fire_next[which] = 0.0, 0, False", "self.score[which], self.length[which], self.fire_next[which] = 0.0, 0, self.fire is not None", "test_fire_is"),
    ("FIRE is due once and stays so", "", FIRE, "self.fire_next = (self.fire_next | terminated) & ~self.over & (self.fire is not None)", "test_fire_is"),
    ("no-ops where the game has no FIRE", "", FIRE, "self.fire_next = terminated & ~self.over", "test_fire_is"),
    ("FIRE is action 2", "", EXECUTED, "np.where(self.fire_next, 2, actions)", "test_fire_is"),
    ("FIRE is action 0", "", "actions.index(fire)", "0 * actions.index(fire)", "test_fire_is"),
    ("FIRE is scored as the agent's action", "B43", "        rewards[t], terminated[t]", "        actions[t][torch.as_tensor(games.fire_next)] = games.fire or 0\n        rewards[t], terminated[t]", "test_fire_is"),
    ("a replay does not step as the run did", "", "                self.step(np.array([actions[-left]", "                self.obs, *_ = self.envs.step(np.array([actions[-left]", "test_ale_replay"),
    # games
    ("lives are not told", "", "life_loss_info=args.life_loss", "life_loss_info=False", "test_fire_is"),
    ("lives are told in every protocol", "Machado et al.", "life_loss_info=args.life_loss", "life_loss_info=True", "test_fire_is"),
    ("no no-ops asked for, no-ops played", "B58, envpool #234", "noop_max=30 if args.life_loss else 0", "noop_max=30", "test_ale_fire"),
    ("all games start alike", "B58", "noop_max=30 if args.life_loss else 0", "noop_max=0", "test_ale_no_ops"),
    ("FIRE at the start in every protocol", "B58", "use_fire_reset=args.life_loss", "use_fire_reset=True", "test_flags_reach_the_games"),
    ("sticky actions are forgotten", "Machado et al.", "repeat_action_probability=sticky", "repeat_action_probability=0.0", "test_flags_reach_the_games"),
    ("sticky actions in both protocols", "", "0.0 if args.life_loss else 0.25", "0.25", "test_flags_reach_the_games"),
    ("the flag --sticky 0 is taken for none", "falsy zero", "args.sticky if args.sticky is not None else", "args.sticky or", "test_flags_reach_the_games"),
    ("the limit of frames is ALE's own", "B49", "max_num_frames_per_episode=args.max_frames, ", "", "test_flags_reach_the_games"),
    ("the limit counts steps", "B49", "max_num_frames_per_episode=args.max_frames", "max_num_frames_per_episode=4 * args.max_frames", "test_frames_are"),
    ("pictures are resized to another size", "", "reward_clipping=False,", "reward_clipping=False, maxpool=False,", "test_ale_pictures"),
    ("every second frame", "", "reward_clipping=False,", "reward_clipping=False, frameskip=2,", "test_ale_pictures"),
    ("an action that the game has not reaches ALE", "ALE hangs", "(actions >= 0) & (actions < self.num_actions)", "(actions >= 0) & (actions <= self.num_actions)", "test_a_wrong_action"),
    ("a negative action reaches ALE", "ALE hangs", "(actions >= 0) & (actions < self.num_actions)", "actions < self.num_actions", "test_a_wrong_action"),
    ("all games have one seed", "B29, cleanrl #238", "np.random.default_rng(stream) for stream in streams[own]]", "np.random.default_rng(1) for stream in streams[own]]", "test_same_seed"),
    ("a reset of one game resets all", "ale #673", 'options={"reset_mask": which})', 'options={"reset_mask": which | True}) if which.all() else self.envs.reset(seed=self.seeds, options={"reset_mask": which | True})', "test_ale_masked"),
    # network
    ("pixels are not divided", "B56, cleanrl #108", INPUT, INPUT.replace("/ 255.0", "* 1.0"), "test_network_sees"),
    ("pixels are divided twice", "B56", INPUT, INPUT + " / 255.0", "test_network_sees"),
    ("pixels are divided by 256", "B56", INPUT, INPUT.replace("255.0", "256.0"), "test_network_sees"),
    ("height and width are exchanged", "B55, cleanrl 7dc0baef", INPUT, INPUT.replace("obs.", "obs.transpose(2, 3)."), "test_network_sees"),
    ("the value head sees another picture", "B55", HEADS, "return self.actor(hidden), self.critic(torch.relu(self.trunk(obs.transpose(2, 3) / 255.0))).squeeze(-1)", "test_network_sees"),
    ("frames in another order", "", INPUT, INPUT.replace("obs.", "obs.flip(1)."), "test_network_sees"),
    ("the value keeps an axis", "B38, ReinforcementLearningZoo.jl #169", HEADS, "return self.actor(hidden), self.critic(hidden)", "test_network_sees"),
    ("an activation is missing", "", "nn.Linear(64 * 7 * 7, 512)), nn.ReLU(),", "nn.Linear(64 * 7 * 7, 512)),", "test_network_is"),
    ("the policy starts peaked", "", "num_actions), 0.01)", "num_actions), 30.0)", "test_network_sees"),
    ("bf16 does nothing", "", "enabled=self.bf16", "enabled=False", "test_gradient_in"),
    ("weights are bf16", "", "agent = Agent(games.num_actions, args.bf16).to(device)", "agent = Agent(games.num_actions, args.bf16).to(device, torch.bfloat16 if args.bf16 else torch.float32)", "test_bf16_run"),
    # actions and log-probabilities
    ("the most likely action", "", " + next(noise)", "", "test_sampled"),
    ("drawn at another temperature than scored", "B43, cleanrl 50ea896c", " + next(noise)", " + 2 * next(noise)", "test_sampled"),
    ("one noise for the whole rollout", "B29", NOISE, NOISE + "[:1].repeat(num_steps, 0)", "test_sampled"),
    ("one noise for all games", "B29", NOISE, "rng.gumbel(size=size)[:, :1].repeat(num_envs, 1)[:, own]", "test_sampled"),
    ("normal noise", "B43", NOISE, NOISE.replace("gumbel", "normal"), "test_sampled"),
    ("log-probability of the greedy action", "B01", SCORED, SCORED.replace("actions)", "logits.argmax(-1))"), "test_fire_is"),
    ("log-probabilities are a row late", "B64", "= logps[:-1], values", "= logps[1:], values", "test_ratio_is_one"),
    ("log-probability without normaliser", "B01", "logps = torch.log_softmax(logits, -1)\n    entropy", "logps = logits\n    entropy", "test_fire_is"),
    # losses
    ("the clip has no lower side", "B14", LOSS, LOSS.replace("args.clip_coef)", "1.0)"), "test_flags_reach_the_functions"),
    ("the value loss learns rewards", "B11, cleanrl #337", 'b["values"], b["returns"]', 'b["values"], b["logps"]', "test_every_sample"),
    ("entropy of the action that was drawn", "B19, cleanrl a3391a03", "entropy = -(logps.exp() * logps).sum(-1)", "entropy = -(logps.exp() * logps).gather(-1, action.unsqueeze(-1)).squeeze(-1)", "test_update_equals"),
    ("advantages are not normalised", "B13", "whiten(adv) if args.norm_adv", "adv if args.norm_adv", "test_every_sample"),
    ("advantages of all, not of the minibatch, are normalised", "B13", "adv = batch[\"advantages\"][mb]", "adv = whiten(batch[\"advantages\"])[mb]", "test_flags_reach_the_functions"),
    ("value clipping cannot be switched off", "B35", "args.clip_coef if args.clip_vloss else None", "args.clip_coef", "test_flags_reach_the_functions"),
    ("the stored action is scored in the wrong row", "B83", 'agent.evaluate(b["obs"], b["actions"])', 'agent.evaluate(b["obs"], b["actions"].flip(0))', "test_actions_and"),
    # the loop
    ("KL estimated from the last minibatch", "B23, SB3 #1229", 'stat[STATS.index("approx_kl")] > args.target_kl', 'len(stats) % args.num_minibatches == 0 and stat[STATS.index("approx_kl")] > args.target_kl', "test_target_kl"),
    ("the last minibatch is dropped", "B26, SB3 #270", "epochs):\n", "epochs):\n        if len(stats) % args.num_minibatches == args.num_minibatches - 1: stats.append(stats[0]); norms.append(norms[0]); continue\n", "test_every_sample"),
    # evaluation and checkpoints
    ("evaluation plays the training's games", "B53", "games.reset(seeds=game_stream.generate_state(games.num) // 2)", "games.rngs = [np.random.default_rng(s) for s in streams(args.seed)[0].spawn(games.num)]\n    games.reset()", "test_evaluation_changes"),
    ("evaluation starts the training's games anew", "B53", "evaluate_games(agent, args) if rank == 0", "(games.reset() or evaluate_games(agent, args)) if rank == 0", "test_evaluation_changes"),
    ("evaluation has other games each time", "", "streams(args.seed)[3].spawn(2)", "np.random.SeedSequence().spawn(2)", "test_evaluation_is"),
    ("evaluation counts lives", "B53, SB3 #2170", "ended = games.over & (lengths == 0)", "ended = (games.over | games.fire_next) & (lengths == 0)", "test_evaluation_is"),
    ("evaluation stops with the first game", "", "while not lengths.all():", "while not lengths.any():", "test_evaluation_is"),
    ("evaluation counts the later games", "", "ended = games.over & (lengths == 0)", "ended = games.over", "test_evaluation_is"),
    ("the replay plays the agent's actions, not FIRE", "", "self.actions[i].append(int(action))", "self.actions[i].append(0)", "test_ale_replay"),
    ("games replay from one seed", "", "self.reset(starts, seeds)", "self.reset(starts, [seeds[0]] * self.num)", "test_ale_replay"),
    ("the games' streams start again", "", '            rng.bit_generator.state = state["rng"]\n', "            pass\n", "test_stopped_and"),
    ("the running score is lost", "", "        if any(not np.array_equal(obs, state", "        self.score[:] = 0.0\n        if any(not np.array_equal(obs, state", "test_stopped_and"),
    ("the last 100 scores are lost", "", "Saved(lambda: list(recent), recent.extend)", "Saved(lambda: list(recent), len)", "test_stopped_and"),
    ("games that do not repeat go on", "", "if any(not np.array_equal(obs", "if False and any(not np.array_equal(obs", "test_games_that"),
    ("NaN goes on", "", 'if not (math.isfinite(means["grad_norm"]) and optimizer.weights.isfinite().all()):', "if False:", "test_nan_stops"),
    # several processes
    ("all processes play the same games", "B29, cleanrl #238", "for stream in streams[own]]", "for stream in streams[: len(streams[own])]]", "test_any_number"),
    ("all processes draw the same noise", "B29", "agent.acting(rng, T, args.num_envs, games.own)", "agent.acting(rng, T, N)", "test_any_number"),
    ("only the first process's games are saved", "", "return sum(collect(own), [])", "return own", "test_any_number"),
    ("each process resumes the first games", "", "states = states[self.own]", "states = states[: self.num]", "test_any_number"),
    ("a signal to one process stops only that one", "", "(signals := sum(collect(self.received), []))", "(signals := self.received)", "test_any_number"),
    ("scores of the first process's games only", "", "return batch, sum(collect(episodes), [])", "return batch, episodes", "test_any_number"),
    ("whitened with the process's own statistics", "B28, THUDM/slime #2235", "(whiten(adv) if args.norm_adv else adv)[places]", "whiten(adv[places]) if args.norm_adv else adv[places]", "test_the_update_is_that"),
    ("unequal parts of a minibatch weigh the same", "B28", " * (len(rows) / len(mb))", " / dist.get_world_size()", "test_the_update_is_that"),
    ("gradients are not summed over processes", "", "sum_over_processes(part).split(", "part.split(", "test_the_update_is_that"),
    ("advantages of other processes are 0", "B28", "return sum_over_processes(whole)", "return whole", "test_the_update_is_that"),
]  # fmt: skip
