"""Loads the scripts under test: our own, or a user's copy with `pytest --script my_copy.py` (repeatable).

It stands here and not in tests/ because pytest looks for options beside the file that the command line names;
for a copy in another folder write `--script=PATH`, with the equals sign.

A test names what it needs: `@pytest.mark.functions("compute_gae")` runs on each script that should have it,
`@pytest.mark.setting("ppo_continuous")` on the scripts of that setting. In our own scripts a missing function
fails; in a user's copy it is skipped and reported, because the copy may have replaced it on purpose.
"""

import importlib.util
import sys
from pathlib import Path

import hypothesis
import pytest
import torch

ROOT = Path(__file__).parent
PPO = ("ppo_continuous", "ppo_atari", "ppo_rlhf")
EVERY = ("ppo_continuous", "ppo_atari", "grpo_rlhf", "ppo_rlhf")
LANGUAGE = ("grpo_rlhf", "ppo_rlhf")
CONTRACT = {  # function -> the scripts that must have it
    "policy_loss": EVERY,
    "approx_kl": EVERY,
    "clip_fraction": EVERY,
    "linear_schedule": EVERY,
    "minibatches": EVERY,
    "compute_gae": PPO,
    "value_loss": PPO,
    "explained_variance": PPO,
    "whiten": PPO,
    "gaussian_logp_entropy": ("ppo_continuous",),
    "tanh_log_det": ("ppo_continuous",),
    "RunningNorm": ("ppo_continuous",),
    "token_logps": LANGUAGE,
    "response_mask": LANGUAGE,
    "masked_mean": LANGUAGE,
    "pack": LANGUAGE,
    "shape_rewards": ("ppo_rlhf",),
    "KLController": ("ppo_rlhf",),
    "preference_loss": ("ppo_rlhf",),
    "token_advantages": ("ppo_rlhf",),
    "group_advantages": ("grpo_rlhf",),
    "flat_groups": ("grpo_rlhf",),
    "overlong_penalty": ("grpo_rlhf",),
    "sequence_logps": ("grpo_rlhf",),
    "surrogate": ("grpo_rlhf",),
    "kl_loss": ("grpo_rlhf",),
    "aggregate": ("grpo_rlhf",),
}

hypothesis.settings.register_profile(
    "fixed", derandomize=True, deadline=None, max_examples=60, database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip
hypothesis.settings.load_profile("fixed")


class Script:
    """A loaded script. Asking for a name that it does not have fails (ours) or skips (a user's copy)."""

    def __init__(self, path: Path):
        self.path, self.own = path, path.parent == ROOT and path.stem in EVERY
        spec = importlib.util.spec_from_file_location(path.stem, path)
        self.module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = self.module  # dataclasses look their module up
        spec.loader.exec_module(self.module)
        self.setting = max(EVERY, key=lambda s: (s == path.stem, sum(
            hasattr(self.module, name) for name, where in CONTRACT.items() if where == (s,))))  # fmt: skip

    def __getattr__(self, name):
        if name.startswith(("_", "hypothesis")):  # asked for by tools that look at every object
            raise AttributeError(name)
        try:
            return getattr(self.module, name)
        except AttributeError:
            (pytest.fail if self.own else pytest.skip)(f"{self.path.name} has no {name}")

    def __repr__(self):
        return self.path.stem


def pytest_addoption(parser):
    parser.addoption("--script", action="append", help="verify this copy instead of our scripts (repeatable)")


def pytest_configure(config):
    torch.set_num_threads(1)
    paths = config.getoption("--script") or [
        ROOT / f"{name}.py" for name in EVERY if (ROOT / f"{name}.py").exists()
    ]
    missing = [str(path) for path in paths if not Path(path).is_file()]
    if missing:
        raise pytest.UsageError(f"--script: no such file: {', '.join(missing)}")
    config.scripts = [Script(Path(path).resolve()) for path in paths]
    config.addinivalue_line("markers", "functions(*names): runs on each script that must have them")
    config.addinivalue_line("markers", "setting(*names): runs on each script of these settings")


def pytest_generate_tests(metafunc):
    if "script" not in metafunc.fixturenames:
        return
    scripts = metafunc.config.scripts
    for marker in metafunc.definition.iter_markers("functions"):
        scripts = [s for s in scripts if all(s.setting in CONTRACT[name] for name in marker.args)]
    for marker in metafunc.definition.iter_markers("setting"):
        scripts = [s for s in scripts if s.setting in marker.args]
    metafunc.parametrize("script", scripts, ids=repr, scope="session")


def pytest_collection_modifyitems(items):
    """Drop the tests that apply to none of the scripts (pytest would report them as skipped)."""
    parameters = lambda item: getattr(item, "callspec", None) and item.callspec.params
    items[:] = [
        item for item in items
        if "script" not in item.fixturenames or isinstance((parameters(item) or {}).get("script"), Script)
    ]  # fmt: skip


def pytest_runtest_setup(item):
    rule = " ".join((item.function.__doc__ or item.name).split())
    item.user_properties.append(("rule", rule))
    for marker in item.iter_markers("functions"):
        for name in marker.args:
            getattr(item.callspec.params["script"], name)


def pytest_terminal_summary(terminalreporter, config):
    """For a user's copy: what was verified, what could not be, and the rule behind each failure."""
    if not config.getoption("--script"):
        return
    passed, failed, skipped = (terminalreporter.stats.get(key, []) for key in ("passed", "failed", "skipped"))
    terminalreporter.section("verification")
    terminalreporter.line(f"{len(passed)} checks hold, {len(failed)} are broken")
    for reason in sorted({report.longrepr[2].removeprefix("Skipped: ") for report in skipped}):
        terminalreporter.line(f"not verified: {reason}")
    for rule in dict.fromkeys(dict(report.user_properties).get("rule", report.nodeid) for report in failed):
        terminalreporter.line(f"broken: {rule}")
