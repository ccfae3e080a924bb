"""Honest changes of ppo_continuous.py, none of them a mistake: (what, words that the report must say, edits).

An edit is (old, new); every place where the old text stands is changed. The suite must raise no false alarm.
"""

LOSS = "loss = pg_loss + vf_coef * v_loss - ent_coef * entropy.mean()"
FLAT = "return env if len(env.observation_space.shape) == 1 else gym.wrappers.FlattenObservation(env)"
NETWORKS = """        self.critic = nn.Sequential(
            layer_init(nn.Linear(obs_dim, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh(),
            layer_init(nn.Linear(64, 1), 1.0),
        )  # fmt: skip
        self.actor = nn.Sequential(
            layer_init(nn.Linear(obs_dim, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh(),
            layer_init(nn.Linear(64, action_dim), 0.01),
        )  # fmt: skip
"""
SHARED = """        self.trunk = nn.Sequential(layer_init(nn.Linear(obs_dim, 96)), nn.LayerNorm(96), nn.SiLU())
        self.critic = nn.Sequential(self.trunk, layer_init(nn.Linear(96, 1), 1.0))
        self.actor = nn.Sequential(self.trunk, layer_init(nn.Linear(96, action_dim), 0.01))
"""
SEES_MORE = """
    space = gym.spaces.Box(-np.inf, np.inf, (env.observation_space.shape[0] + 1,))
    return gym.wrappers.TransformObservation(env, lambda x: np.append(x, np.square(x).mean()), space)"""
MONTE_CARLO = '''def discounted_returns(rewards, values, next_values, terminated, done, gamma):
    """Monte-Carlo returns, with the value of the last state where an episode is cut short."""
    after, returns = next_values.masked_fill(terminated, 0.0), torch.empty_like(rewards)
    running = after[-1]
    for t in reversed(range(len(rewards))):
        running = returns[t] = rewards[t] + gamma * torch.where(done[t], after[t], running)
    return returns - values, returns


def whiten('''

VARIANTS = [
    ("a wider network with ReLU", "", [("nn.Linear(64, 64)", "nn.Linear(64, 128)"), ("nn.Linear(64, 1)", "nn.Linear(128, 1)"),
        ("nn.Linear(64, action_dim)", "nn.Linear(128, action_dim)"), ("nn.Tanh()", "nn.ReLU()")]),
    ("one trunk with LayerNorm for both heads", "edited: Agent", [(NETWORKS, SHARED)]),
    ("another loss with a weight of its own", "edited: Args", [
        ("    vf_coef: float = 0.5\n", '    smooth_coef: float = 0.01\n    """weight of the actions\' size"""\n    vf_coef: float = 0.5\n'),
        ("vf_coef, own=None):", "vf_coef, own=None, smooth_coef=0.0):"), (LOSS, LOSS + " + smooth_coef * mean.square().mean()"),
        ("mb, *settings)", "mb, *settings, None, args.smooth_coef)"), ("*settings, own)", "*settings, own, args.smooth_coef)")]),
    ("the policy sees one number more", "edited: make_env", [(FLAT, FLAT.replace("return env", "env = env") + SEES_MORE)]),
    ("another reward by a wrapper", "edited: make_env", [(FLAT, FLAT.replace("return env", "env = env") + "\n    return gym.wrappers.TransformReward(env, lambda r: 0.5 * r + 0.001)")]),
    ("rewards as they are", "rewards are not scaled", [("reward / return_norm.std", "reward"), ("np.clip(rewards, -10.0, 10.0)", "rewards")]),
    ("Monte-Carlo returns are called, compute_gae stays", "no longer calls compute_gae", [("def whiten(", MONTE_CARLO),
        ('= compute_gae(', "= discounted_returns("), ('batch["done"], args.gamma, args.gae_lambda,', 'batch["done"], args.gamma,')]),
    ("compute_gae has another name", "gae looks like it", [("compute_gae", "gae")]),
    ("other defaults", "other defaults: ", [('= "HalfCheetah-v5"', '= "Walker2d-v5"'), ("num_steps: int = 2048", "num_steps: int = 1024"),
        ("learning_rate: float = 3e-4", "learning_rate: float = 1e-3"), ("gamma: float = 0.99", "gamma: float = 0.995"),
        ("clip_coef: float = 0.2", "clip_coef: float = 0.1"), ("anneal_lr: bool = True", "anneal_lr: bool = False"),
        ("clip_vloss: bool = True", "clip_vloss: bool = False"), ("norm_adv: bool = True", "norm_adv: bool = False"), ("seed: int = 1\n", "seed: int = 7\n")]),
    ("AdamW", "no step of torch's Adam", [("from torch.optim.adam import adam\n", "from torch.optim.adamw import adamw\n"),
        ("    adam(*state", "    adamw(*state"), ("weight_decay=0.0", "weight_decay=0.01")]),
    ("no clipping of values", "has another value_loss", [("def value_loss(v, old_v, ret, clip):", "def value_loss(v, ret):"),
        ("    if clip is not None:\n        loss = torch.max(loss, (old_v + (v - old_v).clamp(-clip, clip) - ret).square())\n", ""),
        ('    clip_vloss: bool = True\n    """clip the value loss around the rollout\'s values"""\n', ""), (', b["values"], b["returns"], clip_coef if clip_vloss else None)', ', b["returns"])'),
        ("clip_coef, clip_vloss, norm_adv", "clip_coef, norm_adv"), ("args.clip_coef, args.clip_vloss, args.norm_adv", "args.clip_coef, args.norm_adv")]),
    ("no films", "has no flag video", [('    video: Path | None = None\n    """film the evaluation of --eval-checkpoint into this .gif or .mp4"""\n', ""),
        ("if self.video is not None", "if False"), ("args.video is not None", "False"), ("None if args.video is None else ", "None and ")]),
    ("one metric more, one less", "no metric losses/old_approx_kl", [
        ('{"charts/learning_rate": lr,', '{"charts/deviation": float(agent.log_std.exp().mean()), "charts/learning_rate": lr,'),
        ("value for name, value in losses.items()}", 'value for name, value in losses.items() if name != "old_approx_kl"}')]),
]  # fmt: skip
