"""Honest changes of grpo_rlhf.py, none of them a mistake: (what, words that the report must say, edits)."""

TRACK = "    track: bool = False  # log to Weights & Biases as well (WANDB_MODE=offline needs no network)\n"
CHECK = """    if args.track and importlib.util.find_spec("wandb") is None:
        raise UsageError("--track needs: pip install wandb")
"""

VARIANTS = [
    ("another loss with a weight of its own", "edited: Args", [
        ("    kl_coef: Weight = 0.0 ", "    pull_coef: Weight = 0.1  # weight of the log-probabilities' size\n    kl_coef: Weight = 0.0 "),
        ('    sums = {"policy_loss": loss.item(), "tokens"', '    if args.pull_coef:\n        loss = loss + args.pull_coef * masked_mean(logp.square(), mask, counts[0])\n    sums = {"policy_loss": loss.item(), "tokens"')]),
    ("another optimiser", "has another optimiser, NAdam", [("betas=(0.9, 0.99), weight_decay=0.0, fused=True)", "betas=(0.9, 0.99))"),
        ("torch.optim.AdamW(trained", "torch.optim.NAdam(trained")]),
    ("group_advantages has another name", "advantages_of looks like it", [("group_advantages", "advantages_of")]),
    ("other defaults", "other defaults: ", [("group_size: GroupSize = 8", "group_size: GroupSize = 16"), ("num_prompts: Natural = 16", "num_prompts: Natural = 24"),
        ('surrogate: Literal["clip", "gspo", "cispo", "reinforce"] = "clip"', 'surrogate: Literal["clip", "gspo", "cispo", "reinforce"] = "gspo"'),
        ("clip_high: Weight = 0.28", "clip_high: Weight = 0.2"), ("temperature: Positive = 1.0", "temperature: Positive = 0.9"), ("seed: Seed = 1 ", "seed: Seed = 5 "),
        ("max_grad_norm: Positive = 1.0", "max_grad_norm: Positive = 0.3")]),
    ("one more reward function and one more metric", "", [('    "exact": exact_match, "number"', '    "short": lambda prompts, completions, rows: [-float(len(text)) for text in completions],\n    "exact": exact_match, "number"'),
        ('"losses/entropy": (entropy', '"charts/best": new["rewards"].nan_to_num(-9.0).amax().item(),\n            "losses/entropy": (entropy')]),
    ("no W&B", "has no flag track", [(TRACK, ""), (CHECK, ""), ("self.args.track", "False")]),
]  # fmt: skip
