"""The scripts are copies of one text where they do the same: who has read a function once has read it everywhere."""

import ast
from pathlib import Path

import pytest

import conftest

OWN_WORDS = {"main", "Args", "Agent", "build", "command_line"}  # every script has its own
CAPS = {  # lines above the rule, below it, of main
    "ppo_continuous": (650, 200, 60), "ppo_atari": (660, 250, 60), "grpo_rlhf": (1200, 250, 80), "ppo_rlhf": (1400, 250, 95),
}  # fmt: skip
SOURCES = {name: (conftest.ROOT / f"{name}.py") for name in conftest.EVERY}
SOURCES = {name: path.read_text() for name, path in SOURCES.items() if path.exists()}


def definitions(source: str) -> dict[str, str]:
    """Top-level functions and classes, decorators included."""
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def test_a_name_means_one_text():
    """A function or class of the same name is byte-identical in every script, so a mend cannot miss a copy."""
    texts: dict[str, dict[str, list[str]]] = {}
    for script, source in SOURCES.items():
        for name, text in definitions(source).items():
            texts.setdefault(name, {}).setdefault(text, []).append(script)
    differ = {name: list(copies.values()) for name, copies in texts.items() if len(copies) > 1}
    assert {name: where for name, where in differ.items() if name not in OWN_WORDS} == {}


def test_the_contract_is_kept():
    """Each function of the contract stands in each script that must have it."""
    for name, scripts in conftest.CONTRACT.items():
        for script in scripts:
            if script in SOURCES:
                assert name in definitions(SOURCES[script]), f"{script} has no {name}"


@pytest.mark.parametrize("name", SOURCES)
def test_a_script_stands_alone(name):
    """No script imports another, and the sections come in one order, ruled at 110 columns."""
    source = SOURCES[name]
    imported = {
        alias.name.split(".")[0]
        for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for alias in node.names
    } | {node.module.split(".")[0] for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}  # fmt: skip
    assert not imported & {path.stem for path in Path(conftest.ROOT).glob("*.py")}
    rules = [line for line in source.splitlines() if line.startswith("# ---- ")]
    assert [rule.split()[2] for rule in rules] == [*(f"{i}." for i in range(1, 8)), "Nothing"]
    assert {len(rule) for rule in rules} == {110}
    assert source.count(f'SCRIPT = "{name}"') == 1


@pytest.mark.parametrize("name", SOURCES)
def test_a_script_is_short_enough_to_be_read_to_the_end(name):
    """The algorithm, what is not the algorithm, main, every other function and its parameters keep their caps."""
    above, rule, below = SOURCES[name].partition("\n# ---- Nothing below is the algorithm")
    most_above, most_below, most_main = CAPS[name]
    assert rule and above.count("\n") <= most_above and below.count("\n") <= most_below
    functions = [node for node in ast.walk(ast.parse(SOURCES[name])) if isinstance(node, ast.FunctionDef)]
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in functions}
    assert lengths.pop("main") <= most_main
    assert {name: length for name, length in lengths.items() if length > 60} == {}
    names = {
        node.name: [a.arg for a in (*node.args.args, *node.args.kwonlyargs) if a.arg != "self"]
        for node in functions
    }
    assert {name: given for name, given in names.items() if len(given) > 8} == {}
