"""The benchmark harness keeps what a run did, and the README says what the committed results say."""

import ast
import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


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


def test_readme_tables_are_those_of_the_results():
    """Each number of a README table comes from a committed result file."""
    pytest.importorskip("scipy")
    command = [
        sys.executable,
        BENCHMARKS / "report.py",
        "--readme",
        BENCHMARKS.parent / "README.md",
        "--check",
    ]
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
