"""What `pytest --script my_copy.py` says at the end: what holds, what could not be checked, what is broken and where."""

import ast
import collections
import difflib
import functools
import inspect
import itertools
import re
import textwrap
from pathlib import Path

from bugs import BUGS

WIDTH, SHOWN = 110, 12
LAYERS = ("mathematics", "loop", "command line")


# ---- notes on a test, made before it runs ----


def describe(item, script) -> list[tuple[str, str]]:
    """What the report needs to know of a test; strings, since with xdist they travel between processes."""
    function = getattr(getattr(item.function, "hypothesis", None), "inner_test", item.function)
    marked = [name for marker in item.iter_markers("functions") for name in marker.args]
    words = re.findall(r"\w+", inspect.getsource(function))
    named = [
        name
        for name in dict.fromkeys(words)
        if name in definitions(script.path) and name not in ("main", "Args")
    ]
    layer = next(
        (layer for key, layer in (("_loop_", "loop"), ("_cli_", "command line")) if key in item.path.name),
        None,
    )
    return [
        ("copy", str(script.path)),
        ("rule", " ".join((item.function.__doc__ or item.name).split())),
        ("layer", layer or "mathematics"),
        ("functions", " ".join(marked or named)),
    ]


# ---- the copy beside our script ----


@functools.cache
def definitions(path: Path) -> dict:
    """Top-level functions and classes of a script."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name: node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def text(node, name=True) -> str:
    """A definition without comments, documentation and, if wanted, its own name."""
    node = ast.parse(ast.unparse(node)).body[0]
    if ast.get_docstring(node) and not (isinstance(node, ast.ClassDef) and node.name == "Args"):
        node.body = node.body[1:]
    node.name = node.name if name else "_"
    return ast.unparse(node)


class Edits:
    """How a copy differs from our script."""

    def __init__(self, script):
        self.name, self.here = script.path.name, definitions(script.path)
        ours = definitions(Path(script.original.__file__)) if script.original else self.here
        common = [name for name in self.here if name in ours]
        self.changed = [name for name in common if text(self.here[name]) != text(ours[name])]
        self.new = [name for name in self.here if name not in ours]
        self.gone = [name for name in ours if name not in self.here]
        self.renamed = {}
        for name in self.gone:
            old, bodies = (
                text(ours[name], name=False),
                {new: text(self.here[new], name=False) for new in self.new},
            )
            likeness = {
                new: difflib.SequenceMatcher(None, old, body, autojunk=False).ratio()
                for new, body in bodies.items()
            }
            if likeness and max(likeness.values()) > 0.9:
                self.renamed[name] = max(likeness, key=likeness.get)

    def place(self, name: str) -> str:
        return f"{name} ({self.name}:{self.here[name].lineno})"

    def suspects(self, names: list[str], layer: str) -> list[str]:
        """Where a failed test says to look: what it names and, for the loop, who calls that; edited places first."""
        callers = [
            caller for caller, node in self.here.items()
            if any(isinstance(x, ast.Name) and x.id in names for x in ast.walk(node))
        ]  # fmt: skip
        found = list(dict.fromkeys([*names, *(callers if layer != "mathematics" else [])])) or [
            "main",
            "Args",
        ]
        found = [name for name in found if name in self.here]
        if edited := [name for name in found if name in self.changed + self.new and name != "Args"]:
            return edited[:4]
        return (
            found[:3]
            if layer == "mathematics" or not self.changed
            else [*[name for name in self.changed if name != "Args"][:3], *found[:1]]
        )


# ---- the report ----


def paragraph(first: str, words: str) -> list[str]:
    return textwrap.wrap(words, WIDTH, initial_indent=first, subsequent_indent=" " * len(first)) or [
        first.rstrip()
    ]


def in_words(layer: str, notes: list[dict]) -> str:
    """What was checked: the functions of the mathematics, elsewhere the tests by their names, which are sentences."""
    if layer == "mathematics":
        names = [name for note in notes for name in note["functions"].split()]
    else:
        names = [note["test"].removeprefix("test_").replace("_", " ") for note in notes]
    names = list(dict.fromkeys(names))
    more = "" if len(names) <= SHOWN else f"; and {len(names) - SHOWN} more"
    return (", " if layer == "mathematics" else "; ").join(
        names if layer == "mathematics" else names[:SHOWN]
    ) + (more if layer != "mathematics" else "")


def counterexample(report) -> list[str]:
    """The numbers of a failure: what was asserted, its message, and the smallest example that hypothesis found."""
    text = report.longreprtext.splitlines()
    asserted = [line[1:].strip() for line in text if line.startswith(">")][-1:]
    said = [line[1:].rstrip() for line in text if re.match(r"E( |$)", line)]
    indent = min((len(line) - len(line.lstrip()) for line in said if line.strip()), default=0)
    said = [line[indent:] for line in said if line.strip()]
    start = next(
        (i for i, line in enumerate(said) if re.search("alsifying example|ailing test case", line)), len(said)
    )
    message = [line for line in said[:start] if not re.match(r" *[-+?] |Greatest relative|Relative", line)]
    example = [line.strip() for line in itertools.takewhile(lambda line: line[:1] == " ", said[start + 1 :])]
    example = [line for line in example if not line.startswith("script=")]
    example[:1] = [f"smallest example: {line}" for line in example[:1]]
    return [line[: WIDTH - 16] for line in [*asserted, *message[:4], *example[:7]] or text[-1:]]


def resembles(rule: str) -> list[str]:
    """The public bugs that a rule names, each with its title."""
    known = [number for number in dict.fromkeys(re.findall(r"\bB\d+\b", rule)) if number in BUGS]
    lines = [f"{number} {BUGS[number][0]} ({BUGS[number][1]})" for number in known[:3]]
    return lines + ([f"and {', '.join(known[3:])}"] if known[3:] else [])


def lines(script, stats):
    """The whole report of one copy."""
    outcomes = {key: [] for key in ("passed", "failed", "skipped", "error")}
    for outcome, reports in stats.items():
        for report in reports:
            note = dict(getattr(report, "user_properties", ()))
            if note.get("copy") == str(script.path) and outcome in outcomes:
                note |= {"test": re.split(r"::|\[", report.nodeid)[1], "report": report}
                outcomes[outcome].append(note)
    edits = Edits(script)
    yield from edited(script, edits)
    broken = outcomes["failed"] + outcomes["error"]
    for layer in LAYERS:
        held = [note for note in outcomes["passed"] if note["layer"] == layer]
        if held:
            yield from paragraph(f"  {layer}: ", f"{len(held)} checks hold: {in_words(layer, held)}")
    yield from unverified(script, outcomes, edits)
    tests = collections.defaultdict(list)
    for note in broken:
        tests[note["test"]].append(note)
    for number, notes in enumerate(tests.values(), 1):
        yield from failure(number, notes, edits)
    held, lost = len(outcomes["passed"]), len(outcomes["skipped"])
    rules = f"{len(tests)} rule{'s' * (len(tests) > 1)}"
    verdict = (
        f"{len(broken)} fail{'s' * (len(broken) == 1)} and break{'s' * (len(broken) == 1)} {rules}"
        if broken
        else "none fails"
    )
    yield ""
    yield f"{script.path.name}: {held} checks hold, {verdict}, {lost} could not be made."
    if broken:
        yield "Tracebacks: --tb=short. One rule alone: -k NAME. Meant so? Leave a rule out: -k 'not NAME'."


def edited(script, edits):
    yield f"{script.path.name} is a copy of {script.setting}.py."
    if edits.changed or edits.new:
        places = [edits.place(name) for name in edits.changed] + [
            f"new: {edits.place(name)}" for name in edits.new
        ]
        yield from paragraph("  edited: ", ", ".join(places))
    if script.other_defaults:
        shown = ", ".join(f"{name} {value}" for name, value in script.other_defaults.items())
        yield from paragraph("  other defaults: ", f"{shown} (not judged: the checks ran with ours)")


def unverified(script, outcomes, edits):
    notes = [note["unverified"] for note in outcomes["passed"] if "unverified" in note]
    for note in dict.fromkeys(notes):
        yield from paragraph("  not verified: ", note)
    reasons = collections.Counter(
        note["report"].longrepr[2].removeprefix("Skipped: ") for note in outcomes["skipped"]
    )
    for reason, count in sorted(reasons.items(), key=lambda item: script.path.name not in item[0]):
        name = re.search(r"has no (\w+)$", reason)
        if name and name[1] in edits.renamed:
            reason += f"; {edits.renamed[name[1]]} looks like it: the suite finds functions by name"
        kind = "not verified" if script.path.name in reason else "not checked on this machine"
        yield from paragraph(f"  {kind}: ", f"{reason} ({count} check{'s' * (count > 1)})")


def failure(number, notes, edits):
    note, report = notes[0], notes[0]["report"]
    case = re.search(r"\[(.*)\]$", report.nodeid)
    case = "" if case is None else case[1].replace(f"{Path(note['copy']).stem}", "").strip("-")
    count = (
        f" ({len(notes)} cases" + (f", the first is {case})" if case else ")")
        if len(notes) > 1
        else f" ({case})" * bool(case)
    )
    yield ""
    yield f"{number}. {note['test']}{count}"
    rule = re.sub(r"[\s:;,]*\([^()]*\bB\d+\b[^()]*\)", "", note["rule"])
    yield from paragraph("   the rule:    ", rule)
    for i, line in enumerate(counterexample(report)):
        yield f"   {'it gave:' if i == 0 else '':13}{line}"
    places = edits.suspects(note["functions"].split(), note["layer"])
    yield from paragraph("   look at:     ", ", ".join(map(edits.place, places)))
    for i, line in enumerate(resembles(note["rule"])):
        yield from paragraph(f"   {'as in:' if i == 0 else '':13}", line)
