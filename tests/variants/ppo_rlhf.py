"""Honest changes of ppo_rlhf.py, none of them a mistake: (what, words that the report must say, edits)."""

VARIANTS = [
    ("another loss with a weight of its own", "edited: Args", [
        ("    vf_coef: Weight = 0.1", "    pull_coef: Weight = 0.1  # weight of the log-probabilities' size\n    vf_coef: Weight = 0.1"),
        ("            pg_loss.backward()\n", "            if args.pull_coef:\n                pg_loss = pg_loss + args.pull_coef * masked_mean(logp.square(), mask, count)\n            pg_loss.backward()\n")]),
    ("another optimiser", "has another optimiser, NAdam", [("torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-5, weight_decay=0.0, fused=True)", "torch.optim.NAdam(groups, betas=(0.9, 0.99), eps=1e-5)")]),
    ("token_advantages has another name", "per_token looks like it", [("token_advantages", "per_token")]),
    ("other defaults", "other defaults: ", [("gamma: Fraction = 1.0", "gamma: Fraction = 0.99"), ("gae_lambda: Fraction = 0.95", "gae_lambda: Fraction = 0.9"),
        ("value_clip: Positive | None = 0.2", "value_clip: Positive | None = None"), ("kl_coef: Weight = 0.05", "kl_coef: Weight = 0.1"),
        ("clip_coef: Positive = 0.2", "clip_coef: Positive = 0.3"), ("temperature: Positive = 0.7", "temperature: Positive = 1.0"), ("seed: Seed = 1 ", "seed: Seed = 3 ")]),
    ("one metric more", "edited: sample_batch", [('        "charts/score": raw.mean().item(),\n', '        "charts/score": raw.mean().item(),\n        "charts/score_max": raw.max().item(),\n')]),
]  # fmt: skip
