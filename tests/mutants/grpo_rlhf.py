"""Public bugs and their neighbours as small edits of grpo_rlhf.py: (what, where it was public, old, new, check).

`check` is the beginning of the name of the test that must fail. B numbers are those of the tests' docstrings.
"""

AHEAD = "range(len(prompt), len(prompt) + len(inputs))"
SEES = "sees = causal & ((owners[:, None] == 0) | (owners[:, None] == owners[..., None]))"
CDF = "cdf = p.cumsum(-1, dtype=torch.float64)"
COUNTS = "counts = lengths[samples].sum(), len(samples), args.max_new_tokens"
OLD = 'old = batch["old_logps"][chosen] if "old_logps" in batch else now'

MUTANTS = [
    # model: section 3
    (
        "only the tokenizer's stop id counts",
        "B103, verl-project/verl #213",
        'known = [tokenizer.eos_token_id, model.config.eos_token_id]\n    known.append(getattr(model.generation_config, "eos_token_id", None))',
        "known = [tokenizer.eos_token_id]",
        "test_every_stop_id",
    ),
    (
        "--stop is not obeyed",
        "B103",
        "        ids.update(extra)\n",
        "        ids.update(extra[1:])\n",
        "test_every_stop_id",
    ),
    (
        "dropout stays as the checkpoint has it",
        "B86, verl-project/verl #4708",
        "setattr(config, key, 0.0)",
        "pass",
        "test_dropout_is_off",
    ),
    (
        "the reference is the model that is trained",
        "B88, huggingface/trl #1340",
        "frozen = copy.deepcopy(model).requires_grad_(False)",
        "frozen = model",
        "test_reference_is",
    ),
    (
        "the reference keeps its adapters",
        "B88, huggingface/trl #495",
        "    with model.disable_adapter():\n        yield model",
        "    yield model",
        "test_reference_is",
    ),
    (
        "base weights are trained beside the adapters",
        "B88",
        "return peft.get_peft_model(model, config)",
        "return peft.get_peft_model(model, config).requires_grad_(True)",
        "test_reference_is",
    ),
    (
        "the bfloat16 copy is not brought up to date",
        "B112",
        "        copied.data = parameter.detach().bfloat16()\n",
        "        copied.data = copied.detach().bfloat16()\n",
        "test_the_bfloat16_sampler",
    ),
    (
        "the supervised start teaches the wrong token",
        "B64",
        "logits[:, len(prompt) - 1 :], ids[:, len(prompt) :]",
        "logits[:, len(prompt) :], ids[:, len(prompt) : -1]",
        "test_the_built_in",
    ),
    # rollout: section 5
    (
        "left padding without positions",
        "B62, OpenRLHF/OpenRLHF #217",
        "position = (mask.cumsum(1) - 1).clamp(min=0)",
        "position = torch.arange(width, device=device).expand(len(prompts), -1)",
        "test_sampled_logps",
    ),
    (
        "positions do not advance",
        "B62, huggingface/trl #469",
        "F.pad(mask, (0, 1), value=True), position + 1",
        "F.pad(mask, (0, 1), value=True), position",
        "test_sampled_logps",
    ),
    (
        "padding is attended to",
        "B62",
        "attention_mask=mask.long(), position_ids=position, use_cache=True, logits",
        "attention_mask=torch.ones_like(mask).long(), position_ids=position, use_cache=True, logits",
        "test_sampled_logps",
    ),
    (
        "padding is found by its id",
        "huggingface/trl #6357",
        "mask = torch.arange(width, device=device) >= width - lengths[:, None]",
        "mask = ids != 2",
        "test_sampled_logps",
    ),
    (
        "rows of the cache and of the batch part",
        "B82",
        "out.cache.batch_select_indices(keep)",
        "out.cache.batch_select_indices(keep.flip(0))",
        "test_sampled_logps",
    ),
    (
        "the mask of rows that stay is another's",
        "B82",
        "(x[keep] for x in (alive, token, mask, position, ended))",
        "(x[keep] for x in (alive, token, mask.flip(0), position, ended))",
        "test_sampled_logps",
    ),
    (
        "copies of prompts in another order",
        "B118, huggingface/trl #2824",
        "x.repeat_interleave(copies, 0) for x in (out",
        "x.repeat(copies, *[1] * (x.dim() - 1)) for x in (out",
        "test_sampled_logps",
    ),
    (
        "a group holds copies of one response",
        "B118, huggingface/trl #2824",
        "u = torch.rand(len(p), 1,",
        "u = torch.rand(1, 1,",
        "test_sampled_logps",
    ),
    (
        "log-probabilities before temperature",
        "B59, B115, huggingface/trl #4159",
        "logps[alive, t] = every.gather(1, token)[:, 0]",
        "logps[alive, t] = logits[:, -1].float().log_softmax(-1).gather(1, token)[:, 0]",
        "test_sampled_logps",
    ),
    (
        "sampled without temperature",
        "B59, huggingface/trl #3029",
        CDF,
        CDF.replace("p.", "logits[:, -1].softmax(-1)."),
        "test_sampled_frequencies",
    ),
    (
        "top-k sampling, full scoring",
        "B61, huggingface/trl #235",
        CDF,
        CDF.replace("p.", "p.where(p >= p.topk(5).values[:, -1:], 0.0)."),
        "test_sampled_frequencies",
    ),
    (
        "the stop token is held back at first",
        "B61, huggingface/trl #1017",
        CDF,
        CDF.replace("p.", "p.index_fill(1, stop, 0.0 if t == 0 else 1e-3)."),
        "test_sampled_frequencies",
    ),
    (
        "greedy takes a sample",
        "",
        "token = every.argmax(-1, keepdim=True)",
        "token = torch.multinomial(every.exp(), 1, generator=generator)",
        "test_greedy",
    ),
    (
        "a stop token is forced onto the end",
        "B68, OpenRLHF/OpenRLHF #238",
        "    return tokens, logps, entropies\n",
        "    tokens[:, -1] = eos_ids[0]\n    return tokens, logps, entropies\n",
        "test_sampled_logps",
    ),
    (
        "completions keep the stop token",
        "",
        "zip(tokens, mask & ~stop)",
        "zip(tokens, mask)",
        "test_every_stop_id",
    ),
    (
        "the stop token is not trained",
        "B67, huggingface/trl #3750",
        '    out = {"tokens": tokens, "mask": mask,',
        '    mask = mask & ~stop | ~mask.any(1, keepdim=True)\n    out = {"tokens": tokens, "mask": mask,',
        "test_every_stop_id",
    ),
    (
        "the same rows in every step",
        "",
        "rows[i] for i in prompt_indices(drawn,",
        "rows[i] for i in prompt_indices(0 * drawn,",
        "test_held_out",
    ),
    (
        "filtering drops rows, not groups",
        "NVIDIA-NeMo/RL #3469",
        "samples = keep.repeat_interleave(args.group_size)",
        "samples = keep.repeat_interleave(args.group_size) & (new['rewards'] != 0)",
        "test_dynamic_sampling",
    ),
    (
        "the reward is reported after the filter",
        "",
        '"charts/reward": (reward / (responses - unscored)).item()',
        '"charts/reward": new["rewards"][~flat.repeat_interleave(args.group_size)].mean().item()',
        "test_dynamic_sampling",
    ),
    (
        "dynamic sampling never stops early",
        "",
        "        if found >= args.num_prompts:\n            break\n",
        "",
        "test_dynamic_sampling",
    ),
    (
        "prompts of dropped groups stay",
        "B82",
        "for row, kept in zip(chosen, keep.tolist()) if kept]",
        "for row, kept in zip(chosen, keep.tolist())]",
        "test_dynamic_sampling",
    ),
    (
        "no length penalty",
        "",
        'new["rewards"] += overlong_penalty(',
        'new["rewards"] + overlong_penalty(',
        "test_overlong",
    ),
    (
        "the length penalty is a reward",
        "",
        'new["rewards"] += overlong',
        'new["rewards"] -= overlong',
        "test_overlong",
    ),
    (
        "evaluation draws from the training stream",
        "",
        "greedy, texts = respond(",
        "torch.manual_seed(0); args.seed += 1; greedy, texts = respond(",
        "test_same_seed",
    ),
    (
        "evaluation draws other numbers each time",
        "",
        "generator = own_generator(streams(args.seed)[3], rank, device)",
        "generator = torch.Generator(device).manual_seed(time.time_ns() % 2**31)",
        "test_stopped_and_resumed",
    ),
    # update: section 6
    (
        "log-probabilities of the token itself",
        "B64, lucidrains/PaLM-rlhf-pytorch #31",
        "(len(prompt) - 1, *range(start, start + len(inputs)))",
        "(len(prompt), *range(start + 1, start + 1 + len(inputs)))",
        "test_scores",
    ),
    ("a response sees the one before it", "", SEES, "sees = causal.expand(len(ids), -1, -1)", "test_scores"),
    (
        "a response does not see the prompt",
        "",
        SEES,
        "sees = causal & (owners[:, None] == owners[..., None])",
        "test_scores",
    ),
    (
        "positions run on over a row",
        "B62",
        "positions[-1] += " + AHEAD,
        "positions[-1] += range(start, start + len(inputs))",
        "test_scores",
    ),
    (
        "scored without temperature",
        "B59, OpenRLHF/OpenRLHF #857",
        "token_logps(logits[None], tokens[mask][None], args.temperature)",
        "token_logps(logits[None], tokens[mask][None], 1.0)",
        "test_scores",
    ),
    (
        "scores of a micro-batch in another order",
        "B82",
        "logps[[i for row in rows for i in row]] = score",
        "logps[sorted(i for row in rows for i in row)] = score",
        "test_scores",
    ),
    (
        "counts of the micro-batch",
        "B104, huggingface/trl #2647",
        "aggregate(loss, mask, args.aggregation, *counts)\n    sums",
        "aggregate(loss, mask, args.aggregation, mask.sum(), len(chosen), args.max_new_tokens)\n    sums",
        "test_gradient_of_a_step",
    ),
    (
        "counts of the whole batch",
        "B107, huggingface/trl #6024",
        COUNTS,
        "counts = lengths.sum(), len(lengths), args.max_new_tokens",
        "test_gradient_of_a_step",
    ),
    (
        "counts without flat groups",
        "B104",
        COUNTS,
        "samples = samples[needed[samples]]; " + COUNTS,
        "test_gradient_of_a_step",
    ),
    (
        "the counts hold the batch's width",
        "B109",
        "len(samples), args.max_new_tokens  #",
        'len(samples), batch["mask"].sum(1).float().mean().item()  #',
        "test_gradient_of_a_step",
    ),
    (
        "the gradient is cleared in every micro-batch",
        "B104",
        "            loss.backward()\n",
        "            optimizer.zero_grad(); loss.backward()\n",
        "test_gradient_of_a_step",
    ),
    (
        "the gradient is never cleared",
        "",
        "        optimizer.zero_grad()\n        for rows",
        "        for rows",
        "test_update_equals",
    ),
    (
        "old log-probabilities are the new ones",
        "B112, huggingface/trl #3493",
        OLD,
        "old = now",
        "test_every_response",
    ),
    (
        "old log-probabilities are the sampler's",
        "B115, B116",
        OLD,
        'old = batch["sampled"][chosen]',
        "test_gradient_of_a_step",
    ),
    (
        "no correction of the sampler's rounding",
        "B116, huggingface/trl #3867",
        "loss = weight * surrogate(",
        "loss = surrogate(",
        "test_gradient_of_a_step",
    ),
    (
        "correction without a cap",
        "B116",
        "weight = torch.exp(old - sampled).clamp(max=args.importance_cap)",
        "weight = torch.exp(old - sampled)",
        "test_gradient_of_a_step",
    ),
    (
        "the correction is upside down",
        "B116",
        "torch.exp(old - sampled)",
        "torch.exp(sampled - old)",
        "test_gradient_of_a_step",
    ),
    (
        "advantages of other responses",
        "B82, verl-project/verl #1440",
        '(batch[name][chosen] for name in ("mask", "advantages", "sampled"))',
        '(batch[name][sorted(chosen) if name == "advantages" else chosen] for name in ("mask", "advantages", "sampled"))',
        "test_every_response",
    ),
    (
        "KL is subtracted from the loss",
        "verl-project/verl #179",
        "loss + args.kl_coef * pull",
        "loss - args.kl_coef * pull",
        "test_gradient_of_a_step",
    ),
    ("KL has no weight", "", "loss + args.kl_coef * pull", "loss + pull", "test_gradient_of_a_step"),
    (
        "reference and policy swapped",
        "natolambert/rlhf-book #489",
        "kl_loss(args.kl_form, logp, old, ref)",
        "kl_loss(args.kl_form, ref, old, logp)",
        "test_gradient_of_a_step",
    ),
    ("KL form is ignored", "", "kl_loss(args.kl_form, logp", 'kl_loss("k3", logp', "test_gradient_of_a_step"),
    (
        "KL only where there is an advantage",
        "",
        'batch["needed"] = torch.ones_like(batch["needed"])',
        "pass",
        "test_reference_is",
    ),
    (
        "KL in the reward is a mean",
        "",
        "args.kl_coef * k1.sum(1)",
        "args.kl_coef * k1.mean(1)",
        "test_reference_is",
    ),
    (
        "KL in the reward has the wrong sign",
        "",
        "rewards = rewards - args.kl_coef",
        "rewards = rewards + args.kl_coef",
        "test_reference_is",
    ),
    (
        "KL in the reward and in the loss",
        "",
        'if args.kl_form != "reward":\n            pull',
        "if True:\n            pull",
        "test_gradient_of_a_step",
    ),
    (
        "one epoch too few",
        "B113",
        "for _ in range(args.update_epochs))\n",
        "for _ in range(max(1, args.update_epochs - 1)))\n",
        "test_every_response",
    ),
    (
        "the same minibatches in every epoch",
        "B11",
        "minibatches(num_groups, args.num_minibatches, generator) for",
        "minibatches(num_groups, args.num_minibatches, torch.Generator().manual_seed(3)) for",
        "test_update_equals",
    ),
    (
        "weights move after the last minibatch only",
        "B113, tenstorrent/tt-blacksmith #731",
        "        optimizer.step()\n    model.eval()",
        "    optimizer.step()\n    model.eval()",
        "test_every_response",
    ),
    (
        "minibatches of samples that split groups",
        "B82",
        "samples = (groups[:, None] * args.group_size + members).flatten()",
        "samples = (groups[:, None] + members * (len(batch['prompts']))).flatten()",
        "test_every_response",
    ),
    (
        "gradients are not clipped",
        "B31",
        "model.parameters(), args.max_grad_norm).item()",
        "model.parameters(), 1e9).item()",
        "test_update_equals",
    ),
    (
        "a step on momentum alone",
        "",
        "            continue  # nothing to learn",
        "            pass  # nothing to learn",
        "test_equal_rewards",
    ),
    (
        "NaN gradients are stepped on",
        "B85",
        "        if not math.isfinite(norms[-1]):\n",
        "        if False:\n",
        "test_nan_stops",
    ),
    (
        "checkpointing is never switched on",
        "",
        "model.train(args.gradient_checkpointing)",
        "model.eval()",
        "test_dropout_is_off",
    ),
    (
        "the model samples in training mode",
        "B86",
        "    model.eval()\n    names =",
        "    names =",
        "test_gradient_of_a_step",
    ),
    (
        "self-check of log-probabilities is gone",
        "",
        'raise UsageError(f"{told}; {hint}")',
        "pass",
        "test_self_check",
    ),
    ("self-check of the reference is gone", "B88", "if distance > 1e-4:", "if False:", "test_self_check"),
    # runs and main: sections 7 and 8
    ("a checkpoint is written in place", "", 'path.with_suffix(".tmp")', "path", "test_half_written"),
    (
        "token stream is not restored",
        "",
        '    generator.set_state(state["tokens"][rank].clone())  # torch crashes on a view\n',
        "",
        "test_stopped_and_resumed",
    ),
    (
        "shuffle stream is not restored",
        "",
        '    shuffle.set_state(state["shuffle"])\n',
        "",
        "test_stopped_and_resumed",
    ),
    (
        "optimiser is not restored",
        "",
        '    optimizer.load_state_dict(state["optimizer"])\n',
        "",
        "test_stopped_and_resumed",
    ),
    (
        "weights are not restored",
        "",
        "        parameter.data.copy_(weights[name])\n",
        "        pass\n",
        "test_stopped_and_resumed",
    ),
    (
        "prompts start anew after a resume",
        "",
        'args.resume, state["step"], state["drawn"]',
        'args.resume, state["step"], 0',
        "test_stopped_and_resumed",
    ),
    (
        "later lines stay after a resume",
        "",
        'if json.loads(line)["step"] <= step)',
        "if True)",
        "test_stopped_and_resumed",
    ),
    (
        "the reference is the resumed policy",
        "B88",
        "build(args, rows, rng, device)\n",
        'build(args, rows, rng, device)\n    if state: model.load_state_dict(state["model"], strict=False); reference = reference and (lambda m=copy.deepcopy(model): contextlib.nullcontext(m))\n',
        "test_stopped_and_resumed",
    ),
    (
        "the exit code of a kill is 0",
        "",
        "raise SystemExit(128 + signum)",
        "raise SystemExit(0)",
        "test_stopped_and_resumed",
    ),
    (
        "the learning rate ends at zero",
        "B25",
        "linear_schedule(step - 1, args.total_steps)",
        "linear_schedule(step, args.total_steps)",
        "test_update_equals",
    ),
    ("no warm-up", "B25", "min(1.0, step / max(args.warmup_steps, 1))", "1.0", "test_update_equals"),
    (
        "weight decay",
        "",
        "weight_decay=0.0, fused=True",
        "weight_decay=0.1, fused=True",
        "test_update_equals",
    ),
    ("AdamW's betas", "", "betas=(0.9, 0.99)", "betas=(0.9, 0.999)", "test_update_equals"),
    (
        "two streams are one",
        "",
        "own_generator(shuffle_stream, 0, device)",
        "own_generator(token_stream, 0, device)",
        "test_update_equals",
    ),
    (
        "held-out prompts are trained on too",
        "",
        'rows = [row for row in rows if str(row["prompt"]) not in seen]',
        "pass",
        "test_held_out",
    ),
    (
        "clip-higher is not obeyed",
        "B35",
        "clips = args.clip_low, args.clip_high\n",
        "clips = args.clip_low, args.clip_low\n",
        "test_every_response",
    ),
    (
        "the start is saved, not the end",
        "",
        'model.save_pretrained(folder / "model")',
        'load_model(args.model)[1].save_pretrained(folder / "model")',
        "test_saved_model",
    ),
    (
        "an unscored response has reward 0",
        "B85",
        "torch.tensor([math.nan if r is None else float(r) for r in rewards])",
        "torch.tensor([0.0 if r is None else float(r) for r in rewards])",
        "test_unscored",
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

# what both language-model scripts have

MUTANTS += [
    # token_logps
    # response_mask
    # masked_mean
    # pack
    # generate, score
    ("the mask ends before the first padding", "B62", "mask = torch.arange(width, device=device) >= width - lengths[:, None]", "mask = torch.arange(width, device=device) > width - lengths[:, None]", "test_sampled_logps"),
    ("positions jump after the prompt", "B62, OpenRLHF #218", "position + 1\n        out = model(token", "(position + 1).clamp(min=width)\n        out = model(token", "test_sampled_logps"),
    ("padding is attended to after the prompt", "B62", "out = model(token, attention_mask=mask.long(),", "out = model(token, attention_mask=torch.ones_like(mask).long(),", "test_sampled_logps"),
    ("new tokens are hidden from later ones", "B62", "F.pad(mask, (0, 1), value=True)", "F.pad(mask, (0, 1), value=False)", "test_sampled_logps"),
    ("the new slot is at the wrong end of the mask", "B82", "F.pad(mask, (0, 1), value=True)", "F.pad(mask, (1, 0), value=True)", "test_sampled_logps"),
    ("the cache keeps another order", "B82, verl #1440", "out.cache.batch_select_indices(keep)", "out.cache.batch_select_indices(keep.roll(1))", "test_sampled_logps"),
    ("sampled log-probabilities after the end", "B79", "logps.masked_fill(~mask, 0.0)", "logps", "test_packed_rows"),
    # model
    ("the model's own stop ids are unknown", "B103, verl #213", '    known.append(getattr(model.generation_config, "eos_token_id", None))\n', "", "test_every_stop"),
    ("the first of several stop ids", "B103", "for i in (entry if isinstance(entry, list) else [entry]) if i is not None}", "for i in (entry[:1] if isinstance(entry, list) else [entry]) if i is not None}", "test_every_stop"),
]  # fmt: skip

# grpo_rlhf.py
FG = "return ~(high - low > 1e-6 * torch.maximum(high.abs(), low.abs()).clamp(min=1.0))"  # fmt: skip
GV = "groups = rewards.view(-1, group_size)\n    scored"  # fmt: skip
MEAN = "mean = groups.nansum(1, keepdim=True) / n.clamp(min=1)"  # fmt: skip
CEN = "centred = (groups - mean).masked_fill(~scored | flat_groups(rewards, group_size)[:, None], 0.0)"  # fmt: skip
GSTD = '"grpo": lambda: 1.0 / ((centred.square().sum(1, keepdim=True) / (n - 1).clamp(min=1)).sqrt() + 1e-4),'  # fmt: skip
GR = "return (centred * scale).flatten()"  # fmt: skip
OV = "return -((lengths - (max_length - buffer)) / max(buffer, 1e-9)).clamp(0.0, 1.0)"  # fmt: skip
W = "weight = torch.exp(old - sampled).clamp(max=args.importance_cap)"  # fmt: skip
REFS = 'batch["ref_logps"] = score_all(frozen, batch, every, args)'  # fmt: skip

MUTANTS += [
    # group_advantages, flat_groups, overlong_penalty
    ("statistics of the whole batch", "B92, grpo-flat #2", "mean = groups.nansum(1, keepdim=True) / n.clamp(min=1)\n", "mean = (groups.nansum() / n.sum().clamp(min=1)).expand(len(groups), 1)\n", "test_group_advantages"),
    ("deviation of the whole batch", "B92, trl #3991", GSTD, '"grpo": lambda: 1.0 / (centred.square().sum().div((scored.sum() - 1).clamp(min=1)).sqrt() + 1e-4),', "test_group_advantages"),
    ("groups by columns", "B92, d1 #19", GV, GV.replace("rewards.view(-1, group_size)", "rewards.view(group_size, -1).T"), "test_group_advantages"),
    ("advantages come back by columns", "B92", GR, "return (centred * scale).T.flatten()", "test_group_advantages"),
    ("population deviation of a group", "B94", GSTD, GSTD.replace("(n - 1).clamp(min=1)", "n.clamp(min=1)"), "test_group_advantages"),
    ("variance in place of the deviation", "B95", GSTD, GSTD.replace(".sqrt()", ""), "test_group_advantages"),
    ("the group's epsilon is 1e-8", "B94, NVIDIA-NeMo/RL #1518", GSTD, GSTD.replace("1e-4", "1e-8"), "test_group_advantages"),
    ("the group's epsilon is under the root", "B94", GSTD, GSTD.replace(").sqrt() + 1e-4)", " + 1e-4).sqrt())"), "test_group_advantages"),
    ("a group of one is not a number", "B94, trl #4662", GSTD, GSTD.replace("(n - 1).clamp(min=1)", "(n - 1)").replace("1.0 / (", "0.0 * n + 1.0 / ("), "test_group_advantages"),
    ("kinds of advantage exchanged", "B95, trl #3991", '"drgrpo": lambda: 1.0,\n    }[kind]', '"drgrpo": lambda: 1.0,\n    }[{"grpo": "drgrpo", "drgrpo": "grpo"}.get(kind, kind)]', "test_group_advantages"),
    ("leave-one-out is the mean of the group", "B95", '"rloo": lambda: n / (n - 1).clamp(min=1),', '"rloo": lambda: 1.0,', "test_group_advantages"),
    ("leave-one-out with the inverse factor", "B95", '"rloo": lambda: n / (n - 1).clamp(min=1),', '"rloo": lambda: (n - 1) / n.clamp(min=1),', "test_group_advantages"),
    ("no baseline", "B76", CEN, CEN.replace("(groups - mean)", "groups"), "test_group_advantages"),
    ("the baseline is added", "B76", CEN, CEN.replace("(groups - mean)", "(groups + mean)"), "test_group_advantages"),
    ("bad answers are preferred", "B76", CEN, CEN.replace("(groups - mean)", "(mean - groups)"), "test_group_advantages"),
    ("the baseline is the best of the group", "B92", MEAN, "mean = groups.nan_to_num(nan=-1e9).amax(1, keepdim=True)", "test_group_advantages"),
    ("the baseline is the median", "B92", MEAN, "mean = groups.nanmedian(1, keepdim=True).values", "test_group_advantages"),
    ("an unscored reward counts as 0", "B97, trl #5773", GV, "rewards = rewards.nan_to_num(0.0)\n    " + GV, "test_group_advantages"),
    ("an unscored reward spoils its group", "B97, trl #5775", MEAN, MEAN.replace("nansum", "sum"), "test_group_advantages"),
    ("an unscored reward counts in the mean", "B97", MEAN, MEAN.replace("n.clamp(min=1)", "group_size"), "test_group_advantages"),
    ("a reward of 0 counts as unscored", "B97, OpenRLHF #1219", "scored = ~groups.isnan()", "scored = ~groups.isnan() & (groups != 0)", "test_group_advantages"),
    ("an unscored reward has an advantage", "B97", CEN, "centred = (groups.nan_to_num(0.0) - mean).masked_fill(flat_groups(rewards, group_size)[:, None], 0.0)", "test_group_advantages"),
    ("flat groups are divided by rounding", "B94", CEN, CEN.replace(" | flat_groups(rewards, group_size)[:, None]", ""), "test_flat_groups"),
    ("advantages are cut to 1", "B13", GR, "return (centred * scale).clamp(-1.0, 1.0).flatten()", "test_group_advantages"),
    ("advantages are whitened over the batch too", "B92", GR, "out = (centred * scale).flatten()\n    return out / (out.std() + 1e-4)", "test_group_advantages"),
    ("a group with one unscored reward is flat", "B97", FG, "return ~(high - low > 1e-6 * torch.maximum(high.abs(), low.abs()).clamp(min=1.0)) | groups.isnan().any(1)", "test_flat_groups"),
    ("a group of zeros only is flat", "B97", FG, "return (groups.nan_to_num(0.0) == 0).all(1)", "test_flat_groups"),
    ("a small difference is flat", "B94", FG, FG.replace("1e-6", "1e-3"), "test_flat_groups"),
    ("rounding is a difference", "B94", FG, "return ~(high - low > 0)", "test_flat_groups"),
    ("an unscored reward is a low one", "B97", "low = groups.nan_to_num(nan=math.inf, posinf=math.inf).amin(1)", "low = groups.nan_to_num(nan=0.0).amin(1)", "test_flat_groups"),
    ("an unscored reward is a high one", "B97", "high = groups.nan_to_num(nan=-math.inf, neginf=-math.inf).amax(1)", "high = groups.nan_to_num(nan=0.0).amax(1)", "test_flat_groups"),
    ("the length penalty has the wrong sign", "B74", OV, OV.replace("return -", "return "), "test_overlong"),
    ("the length penalty begins with the buffer's length", "", OV, OV.replace("(max_length - buffer)", "buffer"), "test_overlong"),
    ("the length penalty is a step", "", OV, "return -(lengths > max_length - buffer).float()", "test_overlong"),
    ("the length penalty is over the whole length", "", OV, OV.replace("max(buffer, 1e-9)", "max_length"), "test_overlong"),
    ("the length penalty has no end", "", OV, OV.replace(".clamp(0.0, 1.0)", ".clamp(min=0.0)"), "test_overlong"),
    ("short answers are paid", "", OV, OV.replace(".clamp(0.0, 1.0)", ".clamp(max=1.0)"), "test_overlong"),
    # sequence_logps, surrogate, kl_loss, aggregate
    ("the clips of the surrogate exchanged", "B14", "return policy_loss(logp, old_logp, adv, clip_low, clip_high)\n    weight", "return policy_loss(logp, old_logp, adv, clip_high, clip_low)\n    weight", "test_surrogate"),
    ("token mean of each micro-batch", "B104, trl #2647", "return masked_mean(loss, mask, denom)", "return masked_mean(loss, mask)", "test_aggregate"),
    # what a batch is made of
    ("entropy over the padding", "B119, trl #3715", 'new["entropies"].masked_fill(~new["mask"], 0.0).sum()', 'new["entropies"].sum()', "test_metrics"),
    # prepare
    ("the reference is scored without temperature", "B59, B115", REFS, REFS.replace("every, args)", "every, dataclasses.replace(args, temperature=1.0))"), "test_reference_is"),
    ("old log-probabilities keep their graph", "", "@torch.no_grad()\ndef score_all", "def score_all", "test_every_stop"),
    ("old log-probabilities in one epoch of many minibatches are skipped", "B112, trl #3725", "if args.num_updates > 1 and", "if args.update_epochs > 1 and", "test_stale"),
    ("old log-probabilities in many epochs of one minibatch are skipped", "B112, trl #3493", "if args.num_updates > 1 and", "if args.num_minibatches > 1 and", "test_stale"),
    # a micro-batch
    ("the old policy has a gradient", "B112", "now = logp.detach()\n", "now = logp\n", "test_the_only_update"),
    ("the cap of the rounding is ignored", "B116", W, W.replace("args.importance_cap", "2.0"), "test_the_cap"),
    # several processes
    ("counts of one's own part", "B107", COUNTS, 'counts = batch["mask"][[i - first for i in samples.tolist() if first <= i < first + len(batch["mask"])]].sum(), len(samples), args.max_new_tokens', "test_processes_make_the_update"),
    ("all processes draw the same tokens", "B29", "stream = stream.spawn(rank)[-1] if rank else stream", "pass", "test_processes_sample"),
    # ---- vLLM ----
    ("a long prompt is never shared", "", "max(prompts, default=0) + args.row_tokens", "args.row_tokens", "test_a_row_is_limited"),
    ("rows are shared where they must not be", "", "args.row_tokens and max(prompts", "max(prompts", "test_a_row_is_limited"),
]  # fmt: skip
