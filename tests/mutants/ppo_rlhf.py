"""Public bugs and their neighbours as small edits of ppo_rlhf.py: (what, where it was public, old, new, check).

`check` is the beginning of the name of the test that must fail. B numbers are those of the tests' docstrings.
"""

NUMBERS, PAIR, TEXTBOOK = "test_every_response", "test_minibatches_pair", "test_update_equals"
CUT, READ, RESUME = "test_gradient_of_a_step", "test_the_score_is_read", "test_stopped_and_resumed"
LAST = "last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)"
AFTER = "after = F.pad(values[:, 1:], (0, 1)) * F.pad(mask[:, 1:], (0, 1))"
NORMED = 'scores = (raw - learner.norm["mean"]) / learner.norm["std"]'
PENALTY = 'scores = scores - args.missing_eos_penalty * ~batch["finished"]'
REFERENCE = "        with self.model.disable_adapter():\n            return self.model(**inputs)"
FIRST = "sampler.respond(prompts(0, args.normalize_scores, order), 1, args.temperature)"
BEGIN = "        sampler.refresh()\n        if run.step == 0 and"
EVALUATION = """            run.log(losses | charts, shown | {"tok/s": f"{charts['charts/TPS']:.0f}"})
            if run.due(args.eval_every):
                keep_completions(run, *evaluate_policy(learner, sampler, args, rank, size))
"""
ENDS = "ends = torch.tensor([len(ids[i]) - 1 for i in part], device=model.device)"
WHITEN = 'batch["advantages"] = whiten(advantages, mask)'

MUTANTS = [
    (
        "score at the first padding",
        "B67, huggingface/trl #3750",
        LAST,
        "last = F.pad(mask, (1, 0))[:, :-1] & ~mask",
        NUMBERS,
    ),
    (
        "score at the last slot of the row",
        "B67",
        LAST,
        "last = torch.zeros_like(mask); last[:, -1] = True",
        NUMBERS,
    ),
    ("score at every token", "B67", LAST, "last = mask", NUMBERS),
    (
        "KL penalty with the wrong sign",
        "B74, pytorch/rl #2908",
        "penalty = -kl_coef *",
        "penalty = kl_coef *",
        NUMBERS,
    ),
    (
        "KL penalty k3 instead of k1",
        "B74",
        'approx_kl(logp, ref_logp, "k1")\n',
        'approx_kl(logp, ref_logp, "k3")\n',
        NUMBERS,
    ),
    (
        "values of the token itself, not before it",
        "B65, huggingface/trl #44",
        "values = scalars(model, inputs)[row, column]",
        "values = scalars(model, inputs)[row, (column + 1).clamp(max=inputs['input_ids'].shape[1] - 1)]",
        NUMBERS,
    ),
    (
        "values shifted by one to the left",
        "B65",
        "values = scalars(model, inputs)[row, column]",
        "values = scalars(model, inputs)[row, (column - 1).clamp(min=0)]",
        NUMBERS,
    ),
    ("the score misses the normalisation", "B80", NORMED, "scores = raw", NUMBERS),
    ("the normalisation divides only", "B80", NORMED, 'scores = raw / learner.norm["std"]', NUMBERS),
    (
        "finished responses pay the penalty",
        "huggingface/trl #6357",
        PENALTY,
        PENALTY.replace("~batch", "batch"),
        NUMBERS,
    ),
    (
        "a stop token in the last slot counts as none",
        "meta-pytorch/torchtune",
        '"finished": stop.any(1)',
        '"finished": stop[:, :-1].any(1)',
        NUMBERS,
    ),
    (
        "the penalty replaces the score",
        "allenai/open-instruct",
        PENALTY,
        'scores = torch.where(batch["finished"], scores, -args.missing_eos_penalty)',
        NUMBERS,
    ),
    (
        "advantages whitened with the padding",
        "B79, verl-project/verl #1527",
        WHITEN,
        'batch["advantages"] = whiten(advantages).masked_fill(~mask, 0.0)',
        NUMBERS,
    ),
    (
        "advantages not masked after whitening",
        "B79",
        "centred = (x - x.sum() / count).masked_fill(~mask, 0.0)",
        "centred = x - x.sum() / count",
        NUMBERS,
    ),
    (
        "advantages scaled only",
        "B80, THUDM/slime #1369",
        WHITEN,
        'batch["advantages"] = whiten(advantages, mask, False)',
        NUMBERS,
    ),
    ("advantages not whitened", "B79", WHITEN, 'batch["advantages"] = advantages', NUMBERS),
    (
        "returns from whitened advantages",
        "B79",
        WHITEN,
        WHITEN + '\n    batch["returns"] = batch["advantages"] + batch["values"]',
        NUMBERS,
    ),
    (
        "advantage from the immediate reward",
        "B76, natolambert/rlhf-book #216",
        "decay = gamma * lam * (~done).to(delta.dtype)",
        "decay = 0.0 * lam * (~done).to(delta.dtype)",
        NUMBERS,
    ),
    (
        "the chain crosses into the padding's bootstrap",
        "B91",
        "last = ~F.pad(mask[:, 1:], (0, 1))",
        "last = torch.zeros_like(mask)",
        NUMBERS,
    ),
    ("next value is the own value", "B65", AFTER, "after = values", NUMBERS),
    (
        "gamma is not passed on",
        "B76",
        'rewards, batch["values"], mask, args.gamma, args.gae_lambda',
        'rewards, batch["values"], mask, 1.0, args.gae_lambda',
        NUMBERS,
    ),
    (
        "lambda and gamma swapped",
        "B76",
        "args.gamma, args.gae_lambda",
        "args.gae_lambda, args.gamma",
        NUMBERS,
    ),
    (
        "the reference is the policy that is trained",
        "B88, huggingface/trl #1340",
        "else copy.deepcopy(model).requires_grad_(False)\n\n\nclass Weights",
        "else model\n\n\nclass Weights",
        NUMBERS,
    ),
    (
        "the reference keeps its adapters",
        "B88, huggingface/trl #495",
        REFERENCE,
        "        return self.model(**inputs)",
        NUMBERS,
    ),
    (
        "adapters are loaded, the critic is not trained",
        "B88",
        'trained |= {f"critic.{name}": p for name, p in critic.named_parameters()}',
        "",
        NUMBERS,
    ),
    (
        "temperature missing in the scored log-probabilities",
        "B59, OpenRLHF/OpenRLHF #857",
        "tokens[mask][None], args.temperature)[0]",
        "tokens[mask][None], 1.0)[0]",
        NUMBERS,
    ),
    (
        "rows of for_all in the order of the packing",
        "B82, verl-project/verl #1440",
        "out[[i for row in rows for i in row]] = function(model, batch, rows, args)",
        "part = function(model, batch, rows, args)\n        done = int((out.abs().sum(1) != 0).sum())\n        out[done : done + len(part)] = part",
        NUMBERS,
    ),
    (
        "the controller counts steps",
        "B77",
        'controller.update(charts["losses/kl"], len(batch["tokens"]))',
        'controller.update(charts["losses/kl"], 1)',
        NUMBERS,
    ),
    (
        "the controller is never updated",
        "B77",
        'controller.update(charts["losses/kl"], len(batch["tokens"]))',
        "pass",
        NUMBERS,
    ),
    (
        "the controller's error is not clipped below",
        "B77",
        "min(max(kl / self.target - 1.0, -0.2), 0.2)",
        "min(kl / self.target - 1.0, 0.2)",
        "test_kl_controller",
    ),
    (
        "the controller's error is not clipped above",
        "B77",
        "min(max(kl / self.target - 1.0, -0.2), 0.2)",
        "max(kl / self.target - 1.0, -0.2)",
        "test_kl_controller",
    ),
    (
        "the coefficient falls if the KL is too large",
        "B77",
        "self.coef *= 1.0 + error",
        "self.coef *= 1.0 - error",
        "test_kl_controller",
    ),
    (
        "normalisation on held-out prompts",
        "B89, huggingface/trl #1534",
        FIRST,
        "sampler.respond([task.held_out[i % len(task.held_out)] for i in range(args.normalize_scores)], 1, args.temperature)",
        NUMBERS,
    ),
    (
        "advantages of other rows",
        "B82, verl-project/verl #1440",
        "logp = score(policy, batch, rows, args)\n            weight",
        "adv = batch['advantages'][samples[: len(chosen)]]\n            logp = score(policy, batch, rows, args)\n            weight",
        PAIR,
    ),
    (
        "old values of the first rows",
        "B83, vwxyzjn/lm-human-preference-details",
        "values = values_of(critic, batch, rows, args)\n            v_loss",
        "old_values = batch['values'][: len(chosen)]\n            values = values_of(critic, batch, rows, args)\n            v_loss",
        PAIR,
    ),
    (
        "returns of the first rows",
        "B83",
        "values = values_of(critic, batch, rows, args)\n            v_loss",
        "ret = batch['returns'][: len(chosen)]\n            values = values_of(critic, batch, rows, args)\n            v_loss",
        PAIR,
    ),
    (
        "each epoch in the same order",
        "B25",
        'minibatches(len(batch["tokens"]), args.num_minibatches, generator) for _ in range(args.update_epochs)',
        "parts for parts in [minibatches(len(batch['tokens']), args.num_minibatches, generator)] * args.update_epochs",
        PAIR,
    ),
    (
        "the clip of the value is that of the policy",
        "B83",
        "value_loss(values, old_values, ret, args.value_clip)",
        "value_loss(values, old_values, ret, args.clip_coef)",
        PAIR,
    ),
    (
        "one norm for both gradients",
        "huggingface/trl",
        "norms.append([clip(policy), clip(critic)])  # [D3]",
        "both = [*policy.parameters(), *critic.parameters()]\n        norms.append([nn.utils.clip_grad_norm_(both, args.max_grad_norm).item()] * 2)",
        TEXTBOOK,
    ),
    (
        "the value model's gradient is not clipped",
        "huggingface/trl",
        "norms.append([clip(policy), clip(critic)])",
        "norms.append([clip(policy), 1.0])",
        TEXTBOOK,
    ),
    (
        "one learning rate for both",
        "B31",
        "rates = args.learning_rate * factor, args.value_learning_rate * factor",
        "rates = [args.learning_rate * factor] * 2",
        TEXTBOOK,
    ),
    (
        "the value model's learning rate does not decay",
        "B31",
        "rates = args.learning_rate * factor, args.value_learning_rate * factor",
        "rates = args.learning_rate * factor, args.value_learning_rate",
        TEXTBOOK,
    ),
    ("vf_coef is not obeyed", "B31", "(args.vf_coef * v_loss).backward()", "v_loss.backward()", TEXTBOOK),
    (
        "the micro-batch's own token count",
        "B107",
        "masked_mean(pg_loss, mask, count)",
        "masked_mean(pg_loss, mask)",
        CUT,
    ),
    (
        "the value loss over the micro-batch's own tokens",
        "B107",
        "value_loss(values, old_values, ret, args.value_clip), mask, count)",
        "value_loss(values, old_values, ret, args.value_clip), mask)",
        CUT,
    ),
    ("gradients of minibatches add up", "B116", "optimizer.zero_grad()\n        part", "part", CUT),
    (
        "target_kl ends the epoch only after the step",
        "B25",
        "break  # ends the update",
        "optimizer.step(); norms.append([0.0, 0.0]); break  # ends the update",
        "test_target_kl",
    ),
    (
        "target_kl skips a step, not the rest",
        "B25",
        "break  # ends the update",
        "continue  # ends the update",
        "test_target_kl",
    ),
    (
        "kl_coef 0 keeps a reference",
        "neighbour",
        "    if not args.kl_coef:\n        return None\n",
        "",
        "test_without_a_kl",
    ),
    (
        "the score is read at the last slot",
        "B70, huggingface/trl #2778",
        ENDS,
        "ends = torch.full((len(part),), width - 1, device=model.device)",
        READ,
    ),
    (
        "the reward model's texts padded on the left",
        "B70",
        "rows = torch.tensor([ids[i] + [0] * (width - len(ids[i])) for i in part], device=model.device)",
        "rows = torch.tensor([[0] * (width - len(ids[i])) + ids[i] for i in part], device=model.device)",
        READ,
    ),
    (
        "scores come back in the order of their lengths",
        "B82",
        "            scores[i] = value\n",
        "            scores[scores.index(None)] = value\n",
        READ,
    ),
    (
        "the reward model's chat template is not used",
        "B73, huggingface/trl #1979",
        "    if not tokenizer.chat_template and isinstance(prompt, str):",
        "    if isinstance(prompt, str):",
        READ,
    ),
    (
        "score at the first stop token in the text",
        "B71, huggingface/transformers #35352",
        ENDS,
        "ends = torch.tensor([(ids[i] + [tokenizer.eos_token_id]).index(tokenizer.eos_token_id) - 1 for i in part], device=model.device)",
        READ,
    ),
    (
        "the policy's tokenizer reads for the reward model",
        "B73",
        "return read_texts(classifier, tokenizer, prompts,",
        "return read_texts(classifier, policy_tokenizer, prompts,",
        NUMBERS,
    ),
    (
        "the value model shares the reward model's weights",
        "B82",
        "return copy.deepcopy(classifier).requires_grad_(True)",
        "return classifier.requires_grad_(True)",
        NUMBERS,
    ),
    (
        "the value head starts at random",
        "neighbour",
        "    nn.init.zeros_(model.score.weight)\n",
        "",
        "test_where_the_value",
    ),
    (
        "the value model starts with a random backbone",
        "neighbour",
        "    model.base_model.load_state_dict(policy.base_model.state_dict())\n",
        "",
        "test_where_the_value",
    ),
    (
        "a reward model of another architecture becomes the value model",
        "B73",
        "same = type(classifier.base_model) is type(policy.base_model)",
        "same = True",
        "test_where_the_value",
    ),
    (
        "Bradley-Terry turned round",
        "B74",
        "return scores[: len(part)] - scores[len(part) :]",
        "return scores[len(part) :] - scores[: len(part)]",
        "test_the_reward_model_learns",
    ),
    (
        "a pair held out and, turned round, trained on",
        "",
        "    pairs = [pair for pair in pairs if key(pair) not in known]\n",
        "",
        "test_duplicate_pairs",
    ),
    (
        "noise-free labels",
        "neighbour",
        "if rng.random() > 1 / (1 + math.exp(b - a)):",
        "if b > a:",
        "test_pairs_of",
    ),
    (
        "labels the wrong way",
        "B74",
        "if rng.random() > 1 / (1 + math.exp(b - a)):",
        "if rng.random() > 1 / (1 + math.exp(a - b)):",
        "test_pairs_of",
    ),
    (
        "held-out prompts are trained on",
        "neighbour",
        'rows = [row for row in rows if str(row["prompt"]) not in seen]',
        "pass",
        "test_held_out_prompts",
    ),
    (
        "the coefficient is not resumed",
        "B77",
        'lambda coef: setattr(controller, "coef", coef)',
        "lambda coef: None",
        RESUME,
    ),
    (
        "the normalisation is not resumed",
        "neighbour",
        "Saved(lambda: dict(norm), norm.update)",
        "Saved(lambda: dict(norm), lambda state: None)",
        RESUME,
    ),
    (
        "the random stream is not resumed",
        "neighbour",
        "of_each_process(generator.get_state, generator.set_state, rank)",
        "of_each_process(generator.get_state, lambda state: None, rank)",
        RESUME,
    ),
    (
        "the optimiser is not resumed",
        "neighbour",
        'run.parts = {"optimizer": optimizer,',
        'run.parts = {"optimizer": Saved(optimizer.state_dict, lambda state: None),',
        RESUME,
    ),
    # arguments, functions, tasks, messages
    (
        "a new flag without a rule for zero",
        "",
        "value_clip: Positive | None",
        "value_clip: float | None",
        "test_wrong_values",
    ),
    (
        "the small world's settings for every run",
        "",
        "BUILT_IN if given.policy is None else None",
        "BUILT_IN",
        "test_flags_win",
    ),
    ("two sources of scores at once", "", "given != 1", "not given", "test_wrong_combinations"),
    (
        "a coefficient of zero adapts",
        "B77, OpenRLHF/OpenRLHF #1289",
        "if self.kl_target is not None and self.kl_coef == 0:",
        "if False:",
        "test_wrong_combinations",
    ),
    (
        "the KL penalty has the wrong sign",
        "B74, pytorch/rl #2908",
        "penalty = -kl_coef *",
        "penalty = kl_coef *",
        "test_shape_rewards",
    ),
    (
        "the score stands in the last slot",
        "B67, huggingface/trl #3750",
        "last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)",
        "last = torch.arange(mask.shape[1]) == mask.shape[1] - 1",
        "test_shape_rewards",
    ),
    (
        "the score stands at every token",
        "B67",
        "score[:, None] * last)",
        "score[:, None] * mask)",
        "test_shape_rewards",
    ),
    (
        "rewards are multiplied by the mask",
        "B85, verl-project/verl #2377",
        "(penalty + score[:, None] * last).masked_fill(~mask, 0.0)",
        "(penalty + score[:, None] * last) * mask",
        "test_shape_rewards",
    ),
    (
        "the controller grows without limit",
        "B77",
        "min(max(kl / self.target - 1.0, -0.2), 0.2)",
        "kl / self.target - 1.0",
        "test_kl_controller",
    ),
    (
        "the controller counts updates, not responses",
        "B77, CarperAI/trlx #361",
        "1.0 + error * n / self.horizon",
        "1.0 + error / self.horizon",
        "test_kl_controller",
    ),
    (
        "the preference loss is unstable",
        "",
        "return -F.logsigmoid(difference)",
        "return -torch.log(torch.sigmoid(difference))",
        "test_preference_loss",
    ),
    (
        "the rejected text is preferred",
        "",
        "return -F.logsigmoid(difference)",
        "return -F.logsigmoid(-difference)",
        "test_preference_loss",
    ),
    (
        "the value after the end is read",
        "B67",
        "* F.pad(mask[:, 1:], (0, 1))  # 0 after the last token\n    last = ~F.pad(mask[:, 1:], (0, 1))",
        "\n    last = torch.zeros_like(mask)",
        "test_token_advantages",
    ),
    (
        "whitening over the padding",
        "B79, verl-project/verl #1527",
        "count = mask.sum().clamp(min=1)",
        "count = x.numel()",
        "test_whitening_of_a_batch",
    ),
    (
        "whitening row by row",
        "B80",
        "centred = (x - x.sum() / count)",
        "centred = (x - x.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1))",
        "test_whitening_of_a_batch",
    ),
    (
        "the words of the prompt earn",
        "",
        "for kind in kinds[len(prompt.split()) :])",
        "for kind in kinds)",
        "test_hidden_preference",
    ),
    (
        "what is said again costs nothing",
        "",
        "score -= 2 * (len(moods) - len(set(moods)))",
        "pass",
        "test_hidden_preference",
    ),
    ("a part of a sentence is one", "", "SENTENCE.fullmatch(", "SENTENCE.match(", "test_hidden_preference"),
    (
        "an empty line shifts the numbers",
        "",
        "for number, line in enumerate(lines if lines[-1] else lines[:-1], 1):",
        "for number, line in enumerate(filter(None, lines), 1):",
        "test_broken_files",
    ),
    ("pairs of equal sides", "", 'if pair["chosen"] == pair["rejected"]:', "if False:", "test_broken_files"),
    (
        "the reward model learns the wrong side",
        "",
        'for side in ("chosen", "rejected") for pair in part]',
        'for side in ("rejected", "chosen") for pair in part]',
        "test_train_reward_model",
    ),
    (
        "the reward model does not learn",
        "",
        '        optimizer.param_groups[0]["lr"] = args.reward_learning_rate * linear_schedule(step, steps)\n        optimizer.step()\n',
        "",
        "test_train_reward_model",
    ),
    ("an infinite reward is taken", "", "if rewards.isinf().any():", "if False:", "test_a_reward_of_its_own"),
    (
        "a closing stop token stays in the prompt",
        "",
        "return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids",
        "return ids",
        "test_prompts_that_a_tokenizer",
    ),
    (
        "the reward model is trained again by a resumed run",
        "",
        "elif new and trains:",
        "elif rank == 0 and trains:",
        "test_train_reward_model",
    ),
    (
        "the reward model is not saved",
        "",
        'classifier.save_pretrained(run.folder / "reward_model")\n        pairs',
        "pairs",
        "test_train_reward_model",
    ),
    (
        "the value model reads another vocabulary",
        "B73, huggingface/trl #1979",
        "same = same and tokenizer.get_vocab() == policy_tokenizer.get_vocab()",
        "pass",
        "test_reward_model_reads_the_text",
    ),
    (
        "the reward model gets the policy's tokenizer",
        "B73, huggingface/trl #3595",
        "return read_texts(classifier, tokenizer, prompts",
        "return read_texts(classifier, policy_tokenizer, prompts",
        "test_reward_model_reads_the_text",
    ),
    (
        "scores are not put back in order",
        "B82, verl-project/verl #1440",
        "for i, value in zip(part, found",
        "for i, value in zip(sorted(part), found",
        "test_reward_model_reads",
    ),
    (
        "the value head is random",
        "",
        "    nn.init.zeros_(model.score.weight)\n",
        "",
        "test_reward_model_reads_the_text",
    ),
    (
        "the value model is the frozen reward model",
        "",
        "return copy.deepcopy(classifier).requires_grad_(True)",
        "return classifier",
        "test_reward_model_reads_the_text",
    ),
    (
        "the coefficient starts anew after a resume",
        "B77",
        'lambda coef: setattr(controller, "coef", coef)',
        "lambda coef: None",
        "test_resume_gives",
    ),
    (
        "the normalisation starts anew after a resume",
        "",
        "Saved(lambda: dict(norm), norm.update)",
        "Saved(lambda: dict(norm), lambda state: None)",
        "test_resume_gives",
    ),
    (
        "the prompts start anew after a resume",
        "",
        "rows = prompts(step * args",
        "rows = prompts((step - run.begun) * args",
        "test_resume_gives",
    ),
    (
        "the shuffling starts anew after a resume",
        "",
        "Saved(shuffle.get_state, shuffle.set_state)",
        "Saved(shuffle.get_state, lambda state: None)",
        "test_resume_gives",
    ),
    (
        "the controller is fed with the KL of a token",
        "B77",
        'controller.update(charts["losses/kl"], len',
        'controller.update(charts["losses/kl_per_token"], len',
        "test_resume_gives",
    ),
    (
        "half a line stays after a crash",
        "",
        'keepends=True) if line.endswith("\\n")]',
        "keepends=True)]",
        "test_resume_and_run_name",
    ),
    (
        "a failure does not name the checkpoint",
        "",
        "if ended or isinstance(error, (UsageError, FloatingPointError)):",
        "if ended or isinstance(error, FloatingPointError):",
        "test_a_failure_names",
    ),
    (
        "held-out prompts are trained on in part",
        "",
        "text.split()[:PROMPT_WORDS]).encode()",
        "text.split()).encode()",
        "test_sentences",
    ),
    (
        "duplicates of held-out prompts are trained on",
        "",
        'rows = [row for row in rows if str(row["prompt"]) not in seen]\n',
        "rows = list(rows)\n",
        "test_prompts_are_split",
    ),
    ("three pairs are enough", "", "if len(pairs) < 20:", "if len(pairs) < 2:", "test_broken_files"),
    (
        "the accuracy is that of the rejected",
        "",
        "(difference(held_out) > 0)",
        "(difference(held_out) < 0)",
        "test_train_reward_model",
    ),
    (
        "scores keep their mean",
        "",
        NORMED,
        'scores = raw / learner.norm["std"]',
        "test_scores_are_normalised",
    ),
    ("held-out prompts take a third", "", "% 10 == 0", "% 3 == 0", "test_sentences"),
    ("a resume reads other flags", "", "if now != before and", "if False and", "test_resume_and_run"),
    (
        "resumed flags must all be given",
        "",
        "default=Args(**saved)",
        "default=Args(**(defaults or {}))",
        "test_resume_and_run",
    ),
    (
        "rates are not warmed up",
        "",
        "factor = min(1.0, (step + 1) / max(args.warmup_steps, 1))",
        "factor = 1.0",
        "test_resume_gives",
    ),
]

# functions that every script has

MUTANTS += [
    # linear_schedule, minibatches
    # policy_loss
    # approx_kl
    # clip_fraction
    # streams
]  # fmt: skip

# functions of the PPO scripts
VL = "loss = torch.max(loss, (old_v + (v - old_v).clamp(-clip, clip) - ret).square())"  # fmt: skip

MUTANTS += [
    # compute_gae
    # value_loss
    ("old values of another row", "B83, lm-human-preference-details 9825ce0", VL, VL.replace("old_v + (v - old_v)", "old_v.flip(0) + (v - old_v.flip(0))"), "test_update_equals"),
    # whiten
    # explained_variance
]  # fmt: skip

# what both language-model scripts have
CDF = "cdf = p.cumsum(-1, dtype=torch.float64)"  # fmt: skip
DROP = 'if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):\n                setattr(config, key, 0.0)\n        settings = dict(config=config'  # fmt: skip

MUTANTS += [
    # token_logps
    # response_mask
    # masked_mean
    # pack
    # generate, score
    ("the stop token may not come first", "B61, trl #7269", CDF, CDF.replace("p.", "(p.index_fill(1, stop, 0.0) if t == 0 else p)."), "test_sampled_frequencies"),
    ("the numbers of all rows are one", "B29, B118, trl #2824", "u = torch.rand(len(p), 1, generator", "u = torch.rand(1, 1, generator", "test_sampled_logps"),
    ("tokens are drawn from the global stream", "B29", "u = torch.rand(len(p), 1, generator=generator, ", "u = torch.rand(len(p), 1, ", "test_same_seed"),
    ("entropy of the sampled token only", "B19, cleanrl a3391a03", "entropies[alive, t] = torch.special.entr(p).sum(-1)", "entropies[alive, t] = -(p * every).gather(1, token)[:, 0]", "test_sampled_logps"),
    ("the stop token is not trained on", "B67, trl #3750", "mask = response_mask(tokens, self.task.stops)\n        stop", "mask = response_mask(tokens, self.task.stops)\n        mask = mask & ~torch.isin(tokens, torch.tensor(self.task.stops)) | (torch.arange(mask.shape[1]) == 0)\n        stop", "test_every_response"),
    ("the texts keep what follows the stop token", "B103", "zip(tokens, mask & ~stop)", "zip(tokens, ~torch.isin(tokens, torch.tensor(self.task.stops)))", "test_every_response"),
    ("rewards of other prompts", "B82", "asked = [row for row in rows for _ in range(copies)]", "asked = rows * copies if copies > 1 else rows[::-1]", "test_every_response"),
    ("rewards come in another order", "B82, verl #1440", '"rewards": rewards.to', '"rewards": rewards.flip(0).to', "test_every_response"),
    ("scores of tokens in another order", "B82", "masked_scatter(mask, logps)", "masked_scatter(mask, logps.flip(0))", "test_every_response"),
    # model
    ("dropout stays in the attention", "B86, verl #4708", DROP, DROP.replace('("dropout" in key or key.endswith("pdrop"))', '"dropout" in key'), "test_dropout"),
    ("adapters stay off after the reference was asked", "B88", REFERENCE, "        self.model.base_model.disable_adapter_layers()\n        return self.model(**inputs)", "test_every_response"),
]  # fmt: skip

# ppo_rlhf.py
SH = "return (penalty + score[:, None] * last).masked_fill(~mask, 0.0)"  # fmt: skip
PEN = 'penalty = -kl_coef * approx_kl(logp, ref_logp, "k1")'  # fmt: skip
LAST_2 = "last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)"  # fmt: skip
CO = "self.coef *= 1.0 + error * n / self.horizon"  # fmt: skip
ERR = "error = min(max(kl / self.target - 1.0, -0.2), 0.2)"  # fmt: skip
AFTER_2 = "after = F.pad(values[:, 1:], (0, 1)) * F.pad(mask[:, 1:], (0, 1))"  # fmt: skip
TLAST = "last = ~F.pad(mask[:, 1:], (0, 1))"  # fmt: skip
TG = "compute_gae(rewards.T, values.T, after.T, last.T, last.T, gamma, lam)"  # fmt: skip
TR = "return advantages.T.masked_fill(~mask, 0.0), returns.T.masked_fill(~mask, 0.0)"  # fmt: skip
WHITEN_2 = 'batch["advantages"] = whiten(advantages, mask)'  # fmt: skip
REF = 'batch["ref_logps"] = for_all(score, learner.reference, batch, args)'  # fmt: skip
FIVE = 'batch[name][chosen]\n                for name in ("mask", "sampled", "logps", "advantages", "returns", "values")'  # fmt: skip
ANN = "factor *= linear_schedule(step, args.total_steps) if args.anneal_lr else 1.0"  # fmt: skip


def first(name):
    return FIVE.replace("batch[name][chosen]", f'batch[name][: len(chosen)] if name == "{name}" else batch[name][chosen]')  # fmt: skip


MUTANTS += [
    # shape_rewards, KLController, preference_loss, token_advantages
    ("the score at the first token", "B67", LAST_2, "last = mask & (mask.cumsum(1) == 1)", "test_shape_rewards"),
    ("the score one token too early", "B67, trl #1893", LAST_2, "last = mask & (mask.flip(1).cumsum(1).flip(1) == 2)", "test_shape_rewards"),
    ("the score at the first padding", "B67, trl #3750", "return (penalty + score[:, None] * last).masked_fill(~mask, 0.0)", "return penalty.masked_fill(~mask, 0.0) + score[:, None] * F.pad(last, (1, 0))[:, :-1]", "test_shape_rewards"),
    ("the score is lost to the mask", "B67", SH, "return (penalty + score[:, None] * F.pad(last, (1, 0))[:, :-1]).masked_fill(~mask, 0.0)", "test_shape_rewards"),
    ("the score is shared among the tokens", "B67", SH, SH.replace("score[:, None] * last", "score[:, None] / mask.sum(1, keepdim=True)"), "test_shape_rewards"),
    ("scores of other responses", "B82", SH, SH.replace("score[:, None]", "score.flip(0)[:, None]"), "test_shape_rewards"),
    ("no penalty at the last token", "B74", SH, "return torch.where(last, score[:, None], penalty).masked_fill(~mask, 0.0)", "test_shape_rewards"),
    ("the penalty at the last token only", "B74", SH, SH.replace("penalty +", "penalty * last +"), "test_shape_rewards"),
    ("the penalty is a mean over the response", "B74", SH, SH.replace("penalty +", "penalty.masked_fill(~mask, 0.0) / mask.sum(1, keepdim=True) +"), "test_shape_rewards"),
    ("the penalty is k2", "B74, B100", PEN, PEN.replace('"k1"', '"k2"'), "test_shape_rewards"),
    ("the penalty is never a reward", "B74, trl #235", PEN, PEN + ".clamp(min=0.0)", "test_shape_rewards"),
    ("the penalty has no coefficient", "B74", PEN, PEN.replace("-kl_coef *", "-1.0 *"), "test_shape_rewards"),
    ("the penalty from reference to policy", "B74", PEN, PEN.replace("logp, ref_logp", "ref_logp, logp"), "test_shape_rewards"),
    ("the coefficient is divided", "B77", CO, "self.coef /= 1.0 + error * n / self.horizon", "test_kl_controller"),
    ("the coefficient grows by a sum", "B77", CO, "self.coef += error * n / self.horizon", "test_kl_controller"),
    ("the horizon multiplies", "B77", CO, "self.coef *= 1.0 + error * n * self.horizon", "test_kl_controller"),
    ("the error is absolute", "B77", ERR, ERR.replace("kl / self.target - 1.0", "kl - self.target"), "test_kl_controller"),
    ("the error is upside down", "B77", ERR, ERR.replace("kl / self.target", "self.target / max(kl, 1e-9)"), "test_kl_controller"),
    ("the error is cut at one", "B77", ERR, ERR.replace("0.2", "1.0"), "test_kl_controller"),
    ("the coefficient only grows", "B77", ERR, ERR.replace("-0.2", "0.0"), "test_kl_controller"),
    ("the preference loss of a hinge", "", "return -F.logsigmoid(difference)", "return (1.0 - difference).clamp(min=0.0)", "test_preference_loss"),
    ("the preference loss is a probability", "", "return -F.logsigmoid(difference)", "return 1.0 - torch.sigmoid(difference)", "test_preference_loss"),
    ("the preference loss is reduced too early", "B38", "return -F.logsigmoid(difference)", "return -F.logsigmoid(difference).mean()", "test_preference_loss"),
    ("values are shifted the other way", "B65, trl #44", AFTER_2, AFTER_2.replace("F.pad(values[:, 1:], (0, 1))", "F.pad(values[:, :-1], (1, 0))"), "test_token_advantages"),
    ("the response ends one token early", "B91", TLAST, "last = ~F.pad(mask[:, 2:], (0, 2))", "test_token_advantages"),
    ("the response ends one token late", "B91", TLAST, "last = ~mask", "test_token_advantages"),
    ("the last slot ends all responses", "B91", TLAST, "last = torch.arange(mask.shape[1]).expand_as(mask) == mask.shape[1] - 1", "test_token_advantages"),
    ("tokens and responses exchanged", "B82", TG, "compute_gae(rewards, values, after, last, last, gamma, lam)", "test_token_advantages"),
    ("gamma and lambda exchanged in GAE over tokens", "B76", "compute_gae(rewards.T, values.T, after.T, last.T, last.T, gamma, lam)", "compute_gae(rewards.T, values.T, after.T, last.T, last.T, lam, gamma)", "test_token_advantages"),
    ("lambda is one", "B76", TG, TG.replace("gamma, lam)", "gamma, 1.0)"), "test_token_advantages"),
    ("gamma is one", "B76", TG, TG.replace("gamma, lam)", "1.0, lam)"), "test_token_advantages"),
    ("advantages after the end", "B79", TR, TR.replace("advantages.T.masked_fill(~mask, 0.0)", "advantages.T"), "test_token_advantages"),
    ("returns after the end", "B79", TR, TR.replace("returns.T.masked_fill(~mask, 0.0)", "returns.T"), "test_token_advantages"),
    ("returns are the rewards", "B76, rlhf-book #216", TR, "return advantages.T.masked_fill(~mask, 0.0), rewards.masked_fill(~mask, 0.0)", "test_token_advantages"),
    ("advantages and returns exchanged", "B11", TR, "return returns.T.masked_fill(~mask, 0.0), advantages.T.masked_fill(~mask, 0.0)", "test_token_advantages"),
    # a batch
    ("the score is normalised within each batch", "B28, B80", NORMED, "scores = (raw - raw.mean()) / (raw.std() + 1e-6)", NUMBERS),
    ("the reference is scored without temperature", "B59", REF, REF.replace("batch, args)", "batch, dataclasses.replace(args, temperature=1.0))"), NUMBERS),
    ("advantages whitened row by row", "B80", WHITEN_2, "count = mask.sum(1, keepdim=True).clamp(min=1)\n    centred = (advantages - advantages.sum(1, keepdim=True) / count).masked_fill(~mask, 0.0)\n    batch['advantages'] = centred * torch.rsqrt(centred.square().sum(1, keepdim=True) / count + 1e-8)", NUMBERS),
    ("entropy over the padding", "B119, trl #3715", 'masked_mean(batch["entropies"], mask).item()', 'batch["entropies"].mean().item()', "test_metrics"),
    ("explained variance with the padding", "B22", 'explained_variance(batch["values"][mask], batch["returns"][mask])', 'explained_variance(batch["values"], batch["returns"])', "test_metrics"),
    ("explained variance with arguments exchanged", "B22", 'explained_variance(batch["values"][mask], batch["returns"][mask])', 'explained_variance(batch["returns"][mask], batch["values"][mask])', "test_metrics"),
    ("the normalisation has two copies of a prompt", "", FIRST, "sampler.respond(prompts(0, args.normalize_scores, order)[::2], 2, args.temperature)", NUMBERS),
    # the update
    *((f"{name} of the first rows", "B83, lm-human-preference-details 9825ce0", FIVE, first(key), PAIR) for name, key in (("old log-probabilities", "logps"), ("advantages", "advantages"), ("returns", "returns"), ("old values", "values"))),
    ("the target KL may be half as much again", "B23", '> args.target_kl:', '> 1.5 * args.target_kl:', "test_the_kl_limit"),
    ("the policy stays in training mode", "B86, verl #4708", "    policy.eval()\n    critic.eval()\n", "    critic.eval()\n", CUT),
    ("the value model stays in training mode", "B86", "    policy.eval()\n    critic.eval()\n", "    policy.eval()\n", CUT),
    # main
    ("the rate is annealed in any case", "B25", ANN, "factor *= linear_schedule(step, args.total_steps)", "test_random_streams"),
    ("tokens and shuffling share a stream", "B29", "own_generator(shuffle_stream, 0, device)", "own_generator(token_stream, 0, device)", "test_random_streams"),
    ("prompts are drawn with replacement", "", "order[epoch] = np.random.default_rng([seed, epoch]).permutation(size)", "order[epoch] = np.random.default_rng([seed, epoch]).integers(size, size=size)", "test_every_prompt"),
    ("the value model's weights are the policy's", "B82", "model.base_model.load_state_dict(policy.base_model.state_dict())", "setattr(model, model.base_model_prefix, policy.base_model)", "test_where_the_value"),
    ("NaN gradients are stepped on", "B85", "        if not np.isfinite(norms[-1]).all():\n", "        if False:\n", "test_nan_stops"),
    ("NaN of the value model is stepped on", "B85", "        if not np.isfinite(norms[-1]).all():\n", "        if not np.isfinite(norms[-1][0]):\n", "test_nan_stops"),
    ("a missing score counts as 0", "B97", 'scored = ~batch["rewards"].isnan()', 'batch["rewards"] = batch["rewards"].nan_to_num(0.0)\n    scored = ~batch["rewards"].isnan()', "test_a_missing_score"),
    ("only the tokenizer's stop id counts", "B103, verl #213", 'known = [tokenizer.eos_token_id, model.config.eos_token_id]\n    known.append(getattr(model.generation_config, "eos_token_id", None))', "known = [tokenizer.eos_token_id]", NUMBERS),
    ("a stop token is forced onto the end", "B68, OpenRLHF #238", "        return tokens, logps, entropies\n\n    def respond", "        tokens[:, -1] = stops[0]\n        return tokens, logps, entropies\n\n    def respond", NUMBERS),
    # reward model
    ("dropout stays in the classifier", "B86, trl #3234", 'config = transformers.AutoConfig.from_pretrained(name, num_labels=1)\n        for key, value in config.to_dict().items():\n            if isinstance(value, float)', 'config = transformers.AutoConfig.from_pretrained(name, num_labels=1)\n        for key, value in config.to_dict().items():\n            if False and isinstance(value, float)', "test_classifiers"),
    ("gradients of the reward model add up", "B31", "        optimizer.zero_grad()\n        preference_loss", "        preference_loss", "test_the_reward_model_s"),
    # evaluation
    ("evaluation says the policy's KL to itself", "B89, trl #1534", "for model in (learner.policy, learner.reference)", "for model in (learner.policy, learner.policy)", "test_evaluation_of"),
    ("evaluation's KL has the wrong sign", "B77", 'sums["eval/kl"] += approx_kl(logps, ref_logps,', 'sums["eval/kl"] += approx_kl(ref_logps, logps,', "test_evaluation_of"),
    ("evaluation of the starting policy", "B89, trl #1534", "    rows, sums = sampler.task.held_out,", "    first = evaluate_policy.first = getattr(evaluate_policy, 'first', None) or copy.deepcopy(sampler.source)\n    sampler = copy.copy(sampler)\n    sampler.source = first\n    rows, sums = sampler.task.held_out,", "test_evaluation_of"),
    # several processes
    ("all processes draw the same tokens", "B29", "stream = stream.spawn(rank)[-1] if rank else stream", "pass", "test_samples_differ"),
    ("a run goes on with fewer processes", "", "if len(states) != (size := len(collect(None))):", "if len(states) < (size := len(collect(None))):", "test_another_number"),
    # runs
    ("--start-from takes no weights", "", "        elif self.state is not None:\n            load_parts(self.learnt, self.state)\n", "", "test_a_new_run_starts"),
    ("--start-from takes the optimiser too", "", 'run.learnt = {"model": Weights(trained),', 'run.learnt = {"model": Weights(trained), "optimizer": optimizer,', "test_a_new_run_starts"),
    ("--start-from takes the coefficient", "B77", 'run.parts["kl_coef"]', 'run.learnt["kl_coef"]', "test_a_new_run_starts"),
    ("--start-from measures the scores anew", "", "args.normalize_scores and args.start_from is None", "args.normalize_scores", "test_a_new_run_starts"),
    ("the reference is what --start-from gives", "B88", BEGIN, BEGIN.replace("        if", "        learner.reference = copy.deepcopy(learner.policy)\n        if"), "test_a_new_run_starts"),
    ("a longer run has the schedule of the shorter one", "B25", "linear_schedule(step, args.total_steps)", 'linear_schedule(step, json.loads((run.folder / "config.json").read_text())["args"]["total_steps"])', "test_a_finished_run"),
    ("the evaluation comes before the step is saved", "", EVALUATION, "            found = evaluate_policy(learner, sampler, args, rank, size) if run.due(args.eval_every) else None\n            run.log(losses | charts, shown)\n            if found:\n                keep_completions(run, *found)\n", "test_a_failure_names"),
    # the sampler's error
    ("the sampler's error is not weighed", "B116, trl #3867", "pg_loss = weight * policy_loss", "pg_loss = policy_loss", "test_gradient_of_a_step"),
    ("weighed the other way round", "B116", "torch.exp(old - sampled)", "torch.exp(sampled - old)", "test_gradient_of_a_step"),
    ("the weight has no cap", "B116", ".clamp(max=args.importance_cap)", "", "test_gradient_of_a_step"),
    ("the weight is of the policy as it is now", "B116", "weight = torch.exp(old - sampled)", "weight = torch.exp(logp - sampled)", "test_gradient_of_a_step"),
    ("sampler's log-probabilities of the first rows", "B83", FIVE, first("sampled"), "test_gradient_of_a_step"),
    ("the value loss is weighed too", "B116", "v_loss = masked_mean(value_loss", "v_loss = masked_mean(weight * value_loss", "test_gradient_of_a_step"),
]  # fmt: skip
