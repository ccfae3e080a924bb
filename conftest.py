"""Loads the scripts under test: our own, or a user's copy with `pytest --script my_copy.py` (repeatable).

It stands here and not in tests/ because pytest looks for options beside the file that the command line names;
for a copy in another folder write `--script=PATH`, with the equals sign.

A test names what it needs: `@pytest.mark.functions("compute_gae")` runs on each script that should have it,
`@pytest.mark.setting("ppo_continuous")` on the scripts of that setting, `@pytest.mark.flags("video")` on
those with the flag. In our own scripts what is missing fails; in a copy it is skipped and reported, since the
user may have replaced it on purpose. tests/report_of_a_copy.py writes the report at the end of such a run.
"""

import ast
import collections
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import hypothesis
import pytest
import torch

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tests"))
import report_of_a_copy  # noqa: E402

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
    "categorical_logp_entropy": ("ppo_atari",),
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
    "fixed", derandomize=True, deadline=None, max_examples=60, database=None, report_multiple_bugs=False,
    suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip
hypothesis.settings.load_profile("fixed")


# ---- a script and the one that it descends from ----


def load(path: Path):
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_under_test"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise pytest.UsageError(f"--script: {path.name} cannot be imported: {said}") from error
    return module


@functools.cache
def original(setting: str):
    """Our own script of a setting, loaded once; None where it does not stand beside this file."""
    path = ROOT / f"{setting}.py"
    return load(path) if path.exists() else None


def names_of(path: Path) -> set[str]:
    """Everything that a script defines at its top level, and the flags of its Args."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = getattr(node, "targets", [])
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            names |= {f"--{field.target.id}" for field in node.body if isinstance(field, ast.AnnAssign)}
    return names


def recognise(path: Path, module) -> str:
    """The setting of a copy, whatever it is called: the one with which it shares most.

    A name counts the more the fewer of our scripts have it; the constant SCRIPT counts as ten of them.
    """
    ours = {setting: {name for name, where in CONTRACT.items() if setting in where} for setting in EVERY}
    for setting in EVERY:
        if (ROOT / f"{setting}.py").exists():
            ours[setting] |= names_of(ROOT / f"{setting}.py")
    shared = names_of(path)
    if not shared & set(CONTRACT):
        raise pytest.UsageError(
            f"--script: {path.name} is no copy of {', '.join(EVERY)}: it has none of the functions that the "
            f"suite knows by name ({', '.join(list(CONTRACT)[:3])}, …)"
        )
    known = collections.Counter(name for names in ours.values() for name in names)
    said = getattr(module, "SCRIPT", None)
    return max(EVERY, key=lambda s: 10 * (said == s) + sum(1 / known[name] for name in shared & ours[s]))


def positional(signature: inspect.Signature) -> list[str]:
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]


def takes(function, ours: list[str]) -> bool:
    """Can be called as the suite calls our function: so many arguments by position, in our order."""
    signature = inspect.signature(function)
    try:
        signature.bind(*ours)
    except TypeError:
        return False
    known = [name for name in positional(signature) if name in ours]
    return known == [name for name in ours if name in known]


class Script:
    """A loaded script. Asking for a name that it does not have fails (ours) or skips (a user's copy)."""

    def __init__(self, path: Path):
        self.path, self.own = path, path.parent == ROOT and path.stem in EVERY
        self.module = original(path.stem) if self.own else load(path)
        self.setting = path.stem if self.own else recognise(path, self.module)
        self.original = original(self.setting)
        self.signatures = {  # ours, kept before a test puts something in a function's place
            name: inspect.signature(thing)
            for name, thing in vars(self.original or self.module).items()
            if inspect.isroutine(thing) or inspect.isclass(thing) and not issubclass(thing, Exception)
            if getattr(thing, "__module__", None) == (self.original or self.module).__name__
            and name != "Args"
        }
        self.other_defaults = {} if self.own else self.take_our_defaults()

    def gone(self, what: str):
        """The copy no longer has what the test is about."""
        (pytest.fail if self.own else pytest.skip)(f"{self.path.name} {what}")

    def find(self, name: str):
        """A function of the script, to be watched or replaced while the loop runs."""
        if not hasattr(self.module, name):
            self.gone(f"has no {name}")
        return getattr(self.module, name)

    def watch(self, name: str):
        """`find`, for a test of what the loop passes to the function: it must still be used."""
        function, tree = self.find(name), ast.parse(self.path.read_text(encoding="utf-8"))
        if name not in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}:
            self.gone(f"no longer calls {name}")
        return function

    def __getattr__(self, name):
        if (
            name.startswith(("_", "hypothesis")) or "module" not in self.__dict__
        ):  # tools that look at every object
            raise AttributeError(name)
        found, ours = self.find(name), self.signatures.get(name)
        if ours and not takes(found, positional(ours)):
            self.gone(f"has another {name}{inspect.signature(found)}; ours is {name}{ours}")
        return found

    def as_ours(self, function, inputs, named) -> list:
        """The arguments of a call in the order of our function, however given; others are left out."""
        given = inspect.signature(function).bind(*inputs, **named).arguments
        ours = positional(self.signatures.get(function.__name__, inspect.signature(function)))
        if set(given) >= set(ours[: len(inputs)]):
            return [given[parameter] for parameter in ours if parameter in given]
        return [*inputs, *named.values()][: len(ours)]

    def has_flag(self, name: str) -> bool:
        return name in self.find("Args").__dataclass_fields__

    def flags(self, **flags) -> dict:
        """Flags for a run in a test. One that is switched off may be gone, others are what it is about."""
        missing = [name for name, value in flags.items() if not self.has_flag(name) and value]
        if missing:
            self.gone(f"has no flag {', '.join(sorted(missing))}")
        return {name: value for name, value in flags.items() if self.has_flag(name)}

    def words(self, **flags) -> list[str]:
        """The same for the command line, where a copy's own defaults would count; a resumed run has them."""
        ours = () if "resume" in flags else self.other_defaults
        ours = {name: getattr(self.original.Args(), name) for name in ours}
        flags = {name: value for name, value in ours.items() if value is not None} | flags
        words = []
        for name, value in self.flags(**flags).items():
            name = name.replace("_", "-")
            words += (
                [f"--{name}" if value else f"--no-{name}"]
                if isinstance(value, bool)
                else [f"--{name}", str(value)]
            )
        return words

    def new_terms_off(self) -> dict:
        """The weights of terms that only the copy has, at 0: without them its loss must be the textbook's."""
        fields = self.find("Args").__dataclass_fields__
        return {
            name: 0.0 for name in fields if name.endswith("_coef") and not hasattr(self.original.Args, name)
        }

    def take_our_defaults(self) -> dict:
        """Let the copy's Args default to our values while the suite runs: its expectations are made for them.

        Which defaults are best is not its question. Returns {flag: the copy's default} for the report.
        """
        args, changed = getattr(self.module, "Args", None), {}
        if not dataclasses.is_dataclass(args) or self.original is None:
            return changed
        ours = {field.name: field.default for field in dataclasses.fields(self.original.Args)}
        for field in dataclasses.fields(args):
            if field.name in ours and dataclasses.MISSING not in (field.default, ours[field.name]):
                if field.default != ours[field.name]:
                    changed[field.name] = field.default
                    field.default = ours[field.name]
                    setattr(args, field.name, field.default)
        named = [p for p in inspect.signature(args.__init__).parameters.values() if p.default is not p.empty]
        args.__init__.__defaults__ = tuple(ours[p.name] if p.name in changed else p.default for p in named)
        return changed

    def __repr__(self):
        return self.path.stem


# ---- pytest ----


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
    config.addinivalue_line("markers", "flags(*names): about these flags of the command line")


def pytest_generate_tests(metafunc):
    if "script" not in metafunc.fixturenames:
        return
    scripts = metafunc.config.scripts
    for marker in metafunc.definition.iter_markers("functions"):
        scripts = [s for s in scripts if all(s.setting in CONTRACT[name] for name in marker.args)]
    for marker in metafunc.definition.iter_markers("setting"):
        scripts = [s for s in scripts if s.setting in marker.args]
    metafunc.parametrize("script", scripts, ids=repr, scope="session")


def pytest_collection_modifyitems(config, items):
    """Drop the tests that apply to none of the scripts (pytest would report them as skipped).

    For a copy also those that are about our own files.
    """

    def applies(item):
        if "script" not in item.fixturenames:
            return not config.getoption("--script")
        return isinstance(script_of(item), Script)

    items[:] = [item for item in items if applies(item)]


def script_of(item) -> Script | None:
    return getattr(getattr(item, "callspec", None), "params", {}).get("script")


@contextlib.contextmanager
def flags_may_be_gone(item):
    """A flag that the copy no longer has is no fault of it, wherever the test needs the flag."""
    try:
        yield
    except TypeError as error:
        flag = re.search(r"Args\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
        if flag and script_of(item):
            script_of(item).gone(f"has no flag {flag[1]}")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    if script := script_of(item):
        item.user_properties += report_of_a_copy.describe(item, script)
        for marker in item.iter_markers("functions"):
            for name in marker.args:
                getattr(script, name)
        for marker in item.iter_markers("flags"):
            script.flags(**dict.fromkeys(marker.args, True))
    with flags_may_be_gone(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with flags_may_be_gone(item):
        return (yield)


def pytest_sessionfinish(session):
    if session.config.getoption("--script") and session.config.option.tbstyle == "auto":
        session.config.option.tbstyle = "no"  # the report has the gist; --tb=short shows the tracebacks


def pytest_terminal_summary(terminalreporter, config):
    """For a user's copy: what was verified, what could not be, and the rule behind each failure."""
    if config.getoption("--script"):
        terminalreporter.section("verification")
        for script in config.scripts:
            for line in report_of_a_copy.lines(script, terminalreporter.stats):
                terminalreporter.line(line)
