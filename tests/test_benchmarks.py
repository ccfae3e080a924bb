"""The benchmark harness keeps what a run did; the pages say what the results say, and what they show works."""

import ast
import csv
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
PAGES = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "benchmarks/README.md", "benchmarks/scaling.md", "tests/README.md")
}
SCRIPTS = ("ppo_continuous", "ppo_atari", "grpo_rlhf", "ppo_rlhf")


def test_harness_keeps_a_run_and_names_a_failure(tmp_path):
    """run.py writes one CSV and one config a run, does not repeat a finished run, and fails when a run fails."""
    script = BENCHMARKS.parent / "ppo_continuous.py"
    command = [
        sys.executable,
        BENCHMARKS / "run.py",
        script,
        "--results",
        tmp_path,
        "--variant",
        "v",
        "--seeds",
        "3",
        "--tasks",
    ]
    flags = [
        "--",
        "--no-compile",
        "--total-timesteps",
        "4096",
        "--update-epochs",
        "1",
        "--eval-episodes",
        "1",
    ]
    done = subprocess.run([*command, "Hopper-v5", "NoTask-v5", *flags], capture_output=True, text=True)
    assert done.returncode != 0 and "NoTask-v5 seed 3: exit 1" in done.stderr
    stem = tmp_path / "ppo_continuous" / "Hopper-v5" / "v-seed3"
    rows = list(csv.DictReader(stem.with_suffix(".csv").open()))
    assert [row["step"] for row in rows] == ["2048", "4096"] and float(rows[-1]["eval/episodic_return"])
    config = json.loads(stem.with_suffix(".json").read_text())
    assert config["args"]["seed"] == 3 and config["args"]["update_epochs"] == 1 and config["seconds"] > 0
    before = stem.with_suffix(".csv").stat().st_mtime_ns
    again = subprocess.run([*command, "Hopper-v5", *flags], capture_output=True, text=True)
    assert again.returncode == 0 and stem.with_suffix(".csv").stat().st_mtime_ns == before


def test_tables_are_those_of_the_results():
    """Each number of a table of the pages comes from a committed result file."""
    pytest.importorskip("scipy")
    command = [sys.executable, BENCHMARKS / "report.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("alias", ["grpo", "ppo"])
def test_benchmarks_call_what_the_scripts_have(alias):
    """A function that was renamed is renamed in the benchmarks too, also in the text that they run elsewhere."""
    source = (BENCHMARKS.parent / f"{alias}_rlhf.py").read_text()
    defined = {getattr(node, "name", None) for node in ast.parse(source).body}
    used = {
        path.name: set(re.findall(rf"\b{alias}\.(\w+)", path.read_text())) for path in BENCHMARKS.glob("*.py")
    }
    assert any(used.values())
    assert {name: names - defined for name, names in used.items() if names - defined} == {}


def test_readme_is_short_enough_to_be_read():
    assert PAGES["README.md"].count("\n") <= 260


def anchors(text: str) -> set[str]:
    """The links that a page's headings can be reached by."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_what_exists(name):
    """Files and headings; also the files that a page names between backticks."""
    folder = (ROOT / name).parent
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[name]):
        path, _, anchor = link.partition("#")
        if not path.startswith("http"):
            target = (folder / path).resolve() if path else ROOT / name
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link
    for word in re.findall(r"`((?:tests|benchmarks)/[\w./*]+|test_\w+\.py)`", PAGES[name]):
        assert list(ROOT.glob(word)) or list((ROOT / "tests").glob(word)), word


def flags_of(script: str) -> set[str]:
    """The flags of one of our scripts, or of a tool of benchmarks/."""
    source = next(p for p in (ROOT / script, BENCHMARKS / Path(script).name) if p.exists()).read_text()
    given = set(re.findall(r"""add_argument\(\s*"(?:-\w", ")?(--[\w-]+)""", source))
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            names = [
                field.target.id.replace("_", "-") for field in node.body if isinstance(field, ast.AnnAssign)
            ]
            given |= {f"--{no}{name}" for name in names for no in ("", "no-")}
    return given | {"--help"}


COPIES = {"time_limit_ends": SCRIPTS[0], "fire_left_to_the_policy": SCRIPTS[1], "my_ppo": SCRIPTS[0]}


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))


@pytest.mark.parametrize("name", PAGES)
def test_commands_have_flags_that_exist(name):
    """A command of a page gives a script flags that it has; what the text calls a flag is one of some script."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", PAGES[name], re.DOTALL)).replace("\\\n", " ")
    for command in re.split(r"\n|&&|;", re.sub(r"\s#.*", "", blocks)):
        own, _, behind = command.partition(" -- ")
        found = re.findall(r"[\w/]+\.py", own)
        if found and not re.search("pip|pytest|CHECKOUT/", own.partition(found[0])[0] + found[0]):
            called = [COPIES.get(Path(script).stem, script.removesuffix(".py")) + ".py" for script in found]
            assert flags_in(own.partition(found[0])[2]) <= flags_of(called[0]), command
            assert not behind or flags_in(behind) <= flags_of(called[1]), command
    known = {"--script", "--nproc-per-node"}  # of pytest and torchrun
    known |= {"--cuda", "--exp-name", "--capture-video"}  # CleanRL's, which the README translates
    scripts = [f"{script}.py" for script in SCRIPTS] + [path.name for path in BENCHMARKS.glob("*.py")]
    known |= set().union(*map(flags_of, scripts))
    text = re.sub(r"```.*?```", "", PAGES[name], flags=re.DOTALL)
    assert flags_in(" ".join(re.findall(r"`([^`\n]+)`", text))) <= known


def test_readme_explains_metrics_that_exist():
    """Each metric of its tables is one that a script logs."""
    sources = "".join((ROOT / f"{script}.py").read_text(encoding="utf-8") for script in SCRIPTS)
    named = re.findall(r"`((?:charts|losses|eval|time|reward_model)/[\w@]+)`", PAGES["README.md"])
    assert len(set(named)) > 15
    missing = [
        name
        for name in named
        if not re.search(rf"\b{re.escape(name.partition('/')[2].rstrip('0123456789'))}", sources)
    ]
    assert missing == []


def python_block(name: str) -> str:
    """The one block of Python in the README that has this text."""
    (block,) = [x for x in re.findall(r"```python\n(.*?)```", PAGES["README.md"], re.DOTALL) if name in x]
    return block


def test_the_environment_of_the_readme_runs(tmp_path):
    """Saved as it says and run by the command that it gives, shortened."""
    (tmp_path / "my_env.py").write_text(python_block("class Hold"))
    (words,) = re.findall(
        r"^python ppo_continuous\.py (--env-id my_env:.*)$", PAGES["README.md"], re.MULTILINE
    )
    command = [sys.executable, ROOT / "ppo_continuous.py", *shlex.split(words)]
    command += "--total-timesteps 4096 --no-compile --device cpu --eval-episodes 1 --run-name x".split()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs/x/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["eval/episodic_length"] == 200
    assert json.loads((tmp_path / "runs/x/config.json").read_text())["args"]["env_kwargs"] == '{"push": 0.5}'


def test_the_reward_and_the_lines_of_the_readme_are_right():
    """The function marks what it says, and the lines of data are what the scripts read."""
    names = {}
    exec(python_block("def brief"), names)
    rows = [json.loads(line) for line in re.findall(r'`(\{"prompt".*?\})`', PAGES["README.md"])]
    assert [sorted(row) for row in rows] == [["answer", "prompt"], ["chosen", "prompt", "rejected"]]
    answers = ["Lima", "Lima. " * 30, "Cusco"]
    assert names["brief"]([rows[0]["prompt"]] * 3, answers, [rows[0]] * 3) == [1.0, 0.0, 0.0]


def test_the_failing_example_of_the_readme_is_what_the_suite_says(tmp_path):
    """The slip of the README, made by its own command, is told in the words that it shows."""
    (edit,) = re.findall(r"^sed -i 's/(-torch.*)/(-torch.*)/' my_ppo.py", PAGES["README.md"], re.MULTILINE)
    copy = tmp_path / "my_ppo.py"
    copy.write_text((ROOT / "ppo_continuous.py").read_text(encoding="utf-8").replace(*edit))
    (shown,) = re.findall(r"```text\n\d\. (.*?)```", PAGES["README.md"], re.DOTALL)
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", f"--script={copy}"]
    command += ["-k", "test_policy_loss_gradient", ROOT / "tests" / "test_losses.py"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "COLUMNS": "100"}
    )
    said = re.sub(r":\d+\)", ":N)", done.stdout)
    assert done.returncode == 1
    for line in re.sub(r":\d+\)", ":N)", shown).splitlines():
        words = re.sub(r"^ *(the rule|it gave|look at|as in): *", "", line).strip()
        assert words in said, (words, said)
