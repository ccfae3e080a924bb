"""The suite is held against the bugs it is meant to catch: `pytest -m mutants`, some minutes, not in a default run."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.mutants
NAMES = sorted(path.stem for path in (HERE / "mutants").glob("*.py"))


def load(name):
    spec = importlib.util.spec_from_file_location(f"mutants_{name}", HERE / "mutants" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [(name, *mutant) for mutant in module.MUTANTS]


def verify(copy, checks):
    """Run the checks on a copy as a user would; returns the exit code and the names of the failed tests."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        f"--script={copy}",
        "-k",
        checks,
    ]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True)
    return done.returncode, re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.M), done.stdout


@pytest.mark.parametrize(
    "name, what, public, old, new, check",
    [mutant for name in NAMES for mutant in load(name)],
    ids=lambda x: x if " " in x else "",
)
def test_the_bug_is_caught_by_the_right_check(tmp_path, name, what, public, old, new, check):
    """An edit that reproduces a public bug, or its neighbour, makes the check fail that is there for it."""
    source = (HERE.parent / f"{name}.py").read_text()
    assert source.count(old) >= 1, "the edit no longer fits the script"
    copy = tmp_path / f"{name}.py"
    copy.write_text(source.replace(old, new))
    code, failed, output = verify(copy, check)
    assert code == 1 and any(test.startswith(check) for test in failed), output[-2000:]


@pytest.mark.parametrize("name", NAMES)
def test_the_unedited_copy_passes_the_same_checks(tmp_path, name):
    """No false alarm: every check that catches a mutant holds for the script itself."""
    copy = tmp_path / f"{name}.py"
    copy.write_text((HERE.parent / f"{name}.py").read_text())
    code, failed, output = verify(copy, " or ".join({mutant[-1] for mutant in load(name)}))
    assert code == 0, output[-2000:]
