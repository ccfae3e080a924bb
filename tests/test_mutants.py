"""The suite is held against the bugs it is meant to catch: `pytest -m mutants`, not in a default run.

Each mutant is verified in a forked child, so that torch and the tests are imported once; apart from that it is
`pytest --script=COPY -k CHECK`.
"""

import importlib.util
import itertools
import os
import re
import signal
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.mutants,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="mutants are tried in forked processes"),
]
NAMES = sorted(path.stem for path in (HERE / "mutants").glob("*.py") if path.stem != "shared")
TESTS = {path: path.read_text() for path in HERE.glob("test_*.py") if path.name != "test_mutants.py"}


def edits(name):
    """A file of tests/mutants as a module."""
    spec = importlib.util.spec_from_file_location(f"mutants_{name}", HERE / "mutants" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(name):
    """The edits of a script: its own, and those of functions that stand in others too."""
    common = (mutants for scripts, mutants in edits("shared").SHARED.items() if name in scripts)
    return [(name, *mutant) for mutant in itertools.chain(edits(name).MUTANTS, *common)]


def verify(copy, checks):
    """Run the checks on a copy; returns the exit code, the names of the failed tests and the output."""
    out = copy.with_suffix(".out")
    files = [str(path) for path, text in TESTS.items() if any(f"def {check}" in text for check in checks)]
    child = os.fork()
    if not child:
        code = 70
        try:
            signal.alarm(600)  # a mutant may never end
            os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
            os.dup2(1, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            options = [
                "-n",
                "0",
                "-p",
                "no:cacheprovider",
                "-m",
                "not mutants and not variants",
                "--tb=short",
            ]
            code = int(pytest.main([*options, f"--script={copy}", "-k", " or ".join(checks), *files]))
            sys.stdout.flush()
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    output = out.read_text()
    return os.waitstatus_to_exitcode(status), re.findall(r"^FAILED \S+::(\w+)", output, re.M), output


@pytest.mark.parametrize(
    "name, what, public, old, new, check",
    [mutant for name in NAMES for mutant in load(name)],
    ids=lambda x: x if " " in x or x in NAMES else "",
)
def test_the_bug_is_caught_by_the_right_check(tmp_path, name, what, public, old, new, check):
    """An edit that reproduces a public bug, or its neighbour, makes the check fail that is there for it."""
    source = (HERE.parent / f"{name}.py").read_text()
    assert source.count(old) >= 1, "the edit no longer fits the script"
    copy = tmp_path / f"{name}.py"
    copy.write_text(source.replace(old, new))
    code, failed, output = verify(copy, [check])
    assert code == 1 and any(test.startswith(check) for test in failed), output[-2000:]


@pytest.mark.parametrize("name", NAMES)
def test_the_unedited_copy_passes_the_same_checks(tmp_path, name):
    """No false alarm: every check that catches a mutant holds for the script itself."""
    copy = tmp_path / f"{name}.py"
    copy.write_text((HERE.parent / f"{name}.py").read_text())
    code, failed, output = verify(copy, sorted({mutant[-1] for mutant in load(name)}))
    assert code == 0, output[-2000:]
