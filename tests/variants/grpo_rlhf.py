"""Honest changes of grpo_rlhf.py, none of them a mistake: (what, words that the report must say, edits)."""

TRACK = '''    track: bool = False
    """log to Weights & Biases as well (WANDB_MODE=offline needs no network)"""
'''
CHECK = """        if self.track and importlib.util.find_spec("wandb") is None:
            raise UsageError("--track needs: pip install wandb")
"""

VARIANTS = [
    ("another loss with a weight of its own", "edited: Args", [
        ("    kl_coef: float = 0.0\n", '    pull_coef: float = 0.1\n    """weight of the log-probabilities\' size"""\n    kl_coef: float = 0.0\n'),
        ('    sums = {"policy_loss": loss.item(), "tokens"', '    if args.pull_coef:\n        loss = loss + args.pull_coef * masked_mean(logp.square(), mask, counts[0])\n    sums = {"policy_loss": loss.item(), "tokens"')]),
    ("another optimiser", "has another optimiser, NAdam", [("optimizer = torch.optim.AdamW(\n        trained.values(), lr=args.learning_rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True\n",
        "optimizer = torch.optim.NAdam(\n        trained.values(), lr=args.learning_rate, betas=(0.9, 0.99)\n")]),
    ("group_advantages has another name", "advantages_of looks like it", [("group_advantages", "advantages_of")]),
    ("other defaults", "other defaults: ", [("group_size: int = 8", "group_size: int = 16"), ("num_prompts: int = 16", "num_prompts: int = 24"),
        ('surrogate: Literal["clip", "gspo", "cispo", "reinforce"] = "clip"', 'surrogate: Literal["clip", "gspo", "cispo", "reinforce"] = "gspo"'),
        ("clip_high: float = 0.28", "clip_high: float = 0.2"), ("temperature: float = 1.0", "temperature: float = 0.9"), ("seed: int = 1\n", "seed: int = 5\n"),
        ("max_grad_norm: float = 1.0", "max_grad_norm: float = 0.3")]),
    ("one more reward function and one more metric", "", [('    "exact": exact_match, "number"', '    "short": lambda prompts, completions, rows: [-float(len(text)) for text in completions],\n    "exact": exact_match, "number"'),
        ('"losses/entropy": (entropy', '"charts/best": new["rewards"].nan_to_num(-9.0).amax().item(),\n            "losses/entropy": (entropy')]),
    ("no W&B", "has no flag track", [(TRACK, ""), ("args.track", "False"), (CHECK, "")]),
]  # fmt: skip
