"""The feature table is honest: every feature once, and a feature that counts as done names tests that exist and run."""
import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
TABLE = ROOT / "experiments" / "acceptance.md"
SPECIFICATION = ROOT.parent / "shared" / "spec" / "seed_systems.md"
SYSTEMS = {"B": (24, "base"), "S": (23, "TaLoS"), "A": (26, "aTLAS"), "R": (16, "TATR"), "L": (15, "L-LoRA"),
           "M": (16, "TALL|Consensus"), "X": (3, "all")}


def rows(text):
    """The lines of the table as lists of cells."""
    lines = [line for line in text.splitlines() if re.match(r"\| [A-Z]\d", line)]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


ROWS = rows(TABLE.read_text(encoding="utf-8"))
DONE = [row for row in ROWS if row[5] == "done"]


def nodes(cell):
    return re.findall(r"`([^`]+)`", cell)


@functools.cache
def functions(file):
    """{name: its definition} of the tests in a file, and what the file marks all of them with."""
    module = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name: node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)}


def marks(node):
    """The decorators of a test as text."""
    return [ast.unparse(decorator) for decorator in node.decorator_list]


def skips(file):
    """Whether a file skips all its tests where something is missing, on its top level."""
    module = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    tops = [node for node in module.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return any(word in ast.unparse(node) for node in tops for word in ("pytest.skip(", "mark.skip", "mark.xfail"))


def fault(node):
    """Why a node cannot show a feature; None where it can."""
    file, _, name = node.partition("::")
    name = name.partition("[")[0]
    if not file.startswith("tests/") or not (ROOT / file).is_file():
        return f"there is no file {file}"
    if not name.startswith("test_") or name not in functions(file):
        return f"{file} has no test {name}"
    if skips(file) or any("skip" in mark or "xfail" in mark for mark in marks(functions(file)[name])):
        return f"{node} may be skipped"
    return None


def test_every_feature_is_there_once():
    ids = [row[0] for row in ROWS]
    assert len(set(ids)) == len(ids)
    for letter, (count, systems) in SYSTEMS.items():
        mine = [row for row in ROWS if row[0].startswith(letter)]
        assert {int(re.sub(r"\D", "", row[0])) for row in mine} == set(range(1, count + 1))
        assert {row[1] for row in mine} <= set(systems.split("|"))


def test_states_are_done_or_open():
    for row in ROWS:
        assert len(row) == 7, row
        assert row[4] in tuple("UPTG") and row[5] in ("done", "open"), row
        assert bool(nodes(row[6])) == (row[5] == "done"), row


@pytest.mark.parametrize("row", DONE, ids=lambda row: row[0])
def test_what_is_done_is_shown_by_tests_that_run(row):
    faults = [found for found in map(fault, nodes(row[6])) if found]
    assert not faults


def test_the_check_sees_what_does_not_count():
    assert fault("tests/nowhere.py::test_x") and fault("tests/test_acceptance.py::test_missing")
    assert fault("tests/test_acceptance.py::rows")
    assert fault("tests/test_acceptance.py::test_the_features_are_those_of_the_specification")  # may be skipped
    assert fault("tests/test_acceptance.py::test_every_feature_is_there_once") is None


@pytest.mark.skipif(not SPECIFICATION.exists(), reason="the specification is not part of the project")
def test_the_features_are_those_of_the_specification():
    theirs = SPECIFICATION.read_text(encoding="utf-8").partition("# 9. Feature table")[2]
    assert [row[:5] for row in ROWS] == rows(theirs)
