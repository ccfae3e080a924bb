"""Honest changes of ppo_atari.py, none of them a mistake: (what, words that the report must say, edits)."""

LOSS = "loss = pg_loss + args.vf_coef * v_loss - args.ent_coef * entropy.mean()"

VARIANTS = [
    ("a wider network with LayerNorm and SiLU", "edited: Agent", [("nn.ReLU()", "nn.SiLU()"), ("nn.Linear(64 * 7 * 7, 512)), nn.SiLU(),", "nn.Linear(64 * 7 * 7, 640)), nn.LayerNorm(640), nn.SiLU(),"),
        ("nn.Linear(512, 1)", "nn.Linear(640, 1)"), ("nn.Linear(512, num_actions)", "nn.Linear(640, num_actions)")]),
    ("a network of its own for the values", "edited: Agent", [
        ("        self.critic = layer_init(nn.Linear(512, 1), 1.0)\n", "        self.critic = nn.Sequential(\n            nn.AvgPool2d(4), nn.Flatten(), layer_init(nn.Linear(4 * 21 * 21, 64)), nn.Tanh(), layer_init(nn.Linear(64, 1), 1.0)\n        )\n"),
        ("self.critic(hidden).squeeze(-1)", "self.critic(obs / 255.0).squeeze(-1)")]),
    ("another loss with a weight of its own", "edited: Args", [
        ("    vf_coef: Weight = 0.5", "    logit_coef: Weight = 0.01  # weight of the logits' size\n    vf_coef: Weight = 0.5"),
        (LOSS, LOSS + '\n    loss = loss + args.logit_coef * agent(b["obs"])[0].square().mean()')]),
    ("another game and other defaults", "other defaults: ", [('= "ALE/Breakout-v5"', '= "ALE/Seaquest-v5"'), ("num_envs: Natural = 8", "num_envs: Natural = 16"), ("learning_rate: Positive = 2.5e-4", "learning_rate: Positive = 1e-4"),
        ("life_loss: bool = True", "life_loss: bool = False"), ("max_frames: Frames = 108_000", "max_frames: Frames = 18_000"), ("norm_adv: bool = True", "norm_adv: bool = False"), ("seed: NotNegative = 1", "seed: NotNegative = 4")]),
    ("categorical_logp_entropy has another name", "logp_and_entropy looks like it", [("categorical_logp_entropy", "logp_and_entropy")]),
    ("a metric more", "", [('{"charts/learning_rate": lr,', '{"charts/longest_game": float(games.length.max()), "charts/learning_rate": lr,')]),
]  # fmt: skip
