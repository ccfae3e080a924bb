"""Honest changes raise no false alarm: `pytest -m variants`, some minutes each; a default run has one quick one."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bugs import BUGS

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in (HERE / "variants").glob("*.py"))
KEYS = ("policy_loss", "value_loss", "whiten")


def load(name):
    spec = importlib.util.spec_from_file_location(f"variants_{name}", HERE / "variants" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [(name, *variant) for variant in module.VARIANTS]


def edited(folder, name, edits):
    """A copy of a script under another name, as a user would make it."""
    source = (HERE.parent / f"{name}.py").read_text()
    for old, new in edits:
        assert old in source, f"the edit no longer fits the script: {old}"
        source = source.replace(old, new)
    copy = folder / "my_own.py"
    copy.write_text(source)
    return copy


def verify(copy, *options):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        f"--script={copy}",
        *options,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "COLUMNS": "100"}
    return subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, env=env)


def holds(done, name, said):
    """Nothing failed, and the report says what was checked and accounts for all that was not."""
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    report = " ".join(done.stdout.partition("= verification =")[2].split())
    assert f"my_own.py is a copy of {name}.py." in report and said in report, report
    held, lost = re.search(
        r"my_own.py: (\d+) checks hold, none fails, (\d+) could not be made", report
    ).groups()
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    skipped = sum(map(int, re.findall(r"(\d+) skipped", done.stdout)))
    assert (int(held), int(lost)) == (int(passed), skipped)
    assert sum(map(int, re.findall(r"\((\d+) checks?\)", report))) == skipped
    assert sum(map(int, re.findall(r"(?:mathematics|loop|command line): (\d+) checks hold", report))) == int(
        held
    )


@pytest.mark.variants
@pytest.mark.parametrize(
    "name, what, said, edits",
    [v for name in NAMES for v in load(name)],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_an_honest_change_raises_no_false_alarm(tmp_path, name, what, said, edits):
    """A change that a user may make on purpose fails no test; what can no longer be checked is said."""
    holds(verify(edited(tmp_path, name, edits)), name, said)


def test_a_renamed_function_is_said_and_the_rest_verified(tmp_path):
    """The mathematics alone, of a copy without compute_gae: quick enough for every run."""
    copy = edited(
        tmp_path,
        "ppo_continuous",
        [("compute_gae", "gae"), ('SCRIPT = "ppo_continuous"', 'SCRIPT = "my_own"')],
    )
    done = verify(copy, "-k", "gae_literals or policy_loss_table or linear_schedule")
    holds(
        done,
        "ppo_continuous",
        "my_own.py has no compute_gae; gae looks like it: the suite finds functions by name",
    )


def test_a_mistake_is_told_with_numbers_place_and_public_bug(tmp_path):
    """The report of a broken copy: rule, counterexample, file and line, and the bug that it resembles."""
    copy = edited(tmp_path, "ppo_continuous", [("-torch.min(", "-torch.max(")])
    done = verify(copy, "-k", "test_policy_loss_table or test_policy_loss_is")
    report = done.stdout.partition("= verification =")[2]
    line = (
        copy.read_text().splitlines().index("def policy_loss(logp, old_logp, adv, clip_low, clip_high):") + 1
    )
    assert done.returncode == 1 and "/" + copy.parent.name not in report.partition("short test summary")[0]
    for words in ("The pessimistic side is kept", f"policy_loss (my_own.py:{line})", "smallest example: args=(", "Expected",
                  f"B16 {BUGS['B16'][0]}", "break 2 rules"):  # fmt: skip
        assert words in report, (words, report)


@pytest.mark.parametrize(
    "text, words",
    [
        ("print('hello')\n", "my_own.py is no copy of ppo_continuous"),
        ("def policy_loss(:\n", "my_own.py cannot be imported: SyntaxError"),
        ("import no_such_module\n", "my_own.py cannot be imported: ModuleNotFoundError"),
    ],
    ids=["stranger", "syntax", "import"],
)
def test_what_is_no_copy_ends_in_a_sentence(tmp_path, text, words):
    """A file that the suite cannot verify is refused in one line."""
    (tmp_path / "my_own.py").write_text(text)
    done = verify(tmp_path / "my_own.py")
    assert done.returncode == 4 and words in done.stderr and "Traceback" not in done.stderr + done.stdout


def test_every_bug_that_a_test_names_has_a_title():
    """The report can say what public bug a failure resembles."""
    named = {
        b for path in HERE.glob("test_*.py") for b in re.findall(r"(?<!noqa: )\bB\d+\b", path.read_text())
    }
    assert named <= set(BUGS)
