"""Honest changes of ppo_continuous.py, none of them a mistake: (what, words that the report must say, edits).

An edit is (old, new); every place where the old text stands is changed. The suite must raise no false alarm.
"""

LOSS = "loss = pg_loss + args.vf_coef * v_loss - args.ent_coef * entropy.mean()"
MAKE = "            self.env = gym.make(args.env_id, **json.loads(args.env_kwargs), **render)\n"
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
SEES_MORE = """            space = gym.spaces.Box(-np.inf, np.inf, (self.env.observation_space.shape[0] + 1,))
            self.env = gym.wrappers.TransformObservation(self.env, lambda x: np.append(x, np.square(x).mean()), space)
"""
OTHER_REWARD = "            self.env = gym.wrappers.TransformReward(self.env, lambda r: 0.5 * r + 0.001)\n"
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
        ("    vf_coef: Weight = 0.5", "    smooth_coef: Weight = 0.01  # weight of the actions' size\n    vf_coef: Weight = 0.5"),
        (LOSS, LOSS + '\n    loss = loss + args.smooth_coef * agent.actor(b["obs"]).square().mean()')]),
    ("the policy sees one number more", "edited: Env", [(MAKE, MAKE + SEES_MORE)]),
    ("another reward by a wrapper", "edited: Env", [(MAKE, MAKE + OTHER_REWARD)]),
    ("rewards as they are", "rewards are not scaled", [("reward / return_norm.std", "reward"), ("np.clip(rewards, -10.0, 10.0)", "rewards")]),
    ("Monte-Carlo returns are called, compute_gae stays", "no longer calls compute_gae", [("def whiten(", MONTE_CARLO),
        ('= compute_gae(', "= discounted_returns("), ('batch["done"], args.gamma, args.gae_lambda,', 'batch["done"], args.gamma,')]),
    ("compute_gae has another name", "gae looks like it", [("compute_gae", "gae")]),
    ("other defaults", "other defaults: ", [('= "HalfCheetah-v5"', '= "Walker2d-v5"'), ("num_steps: Natural = 2048", "num_steps: Natural = 1024"),
        ("learning_rate: Positive = 3e-4", "learning_rate: Positive = 1e-3"), ("gamma: Fraction = 0.99", "gamma: Fraction = 0.995"),
        ("clip_coef: Positive = 0.2", "clip_coef: Positive = 0.1"), ("anneal_lr: bool = True", "anneal_lr: bool = False"),
        ("clip_vloss: bool = True", "clip_vloss: bool = False"), ("norm_adv: bool = True", "norm_adv: bool = False"), ("seed: NotNegative = 1", "seed: NotNegative = 7")]),
    ("AdamW", "no step of torch's Adam", [("from torch.optim.adam import adam\n", "from torch.optim.adamw import adamw\n"),
        ("        adam([self", "        adamw([self"), ("weight_decay=0.0", "weight_decay=0.01")]),
    ("no clipping of values", "has another value_loss", [("def value_loss(v, old_v, ret, clip):", "def value_loss(v, ret):"),
        ("    if clip is not None:\n        loss = torch.max(loss, (old_v + (v - old_v).clamp(-clip, clip) - ret).square())\n", ""),
        ("    clip_vloss: bool = True  # clip the value loss around the rollout's values\n", ""),
        ("    value_clip = args.clip_coef if args.clip_vloss else None\n", ""), (', b["values"], b["returns"], value_clip)', ', b["returns"])')]),
    ("no films", "has no flag video", [("    video: Path | None = None  # film the first episode of --eval-checkpoint into this .gif\n", ""),
        ("self.video is not None", "False"), ("args.video is not None", "False"), ("if args.video is None else", "if True else")]),
    ("one metric more, one less", "no metric losses/old_approx_kl", [
        ('{"charts/learning_rate": lr,', '{"charts/deviation": float(agent.log_std.exp().mean()), "charts/learning_rate": lr,'),
        ("value for name, value in means.items()}", 'value for name, value in means.items() if name != "old_approx_kl"}')]),
]  # fmt: skip
