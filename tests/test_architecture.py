"""The house: which module may import which, how long files are, and names that say nothing."""
import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "tvjax"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)

# Each may import what stands to its right; members of one group may not import each other.
ORDER = (
    {"run"},
    {"report"},
    {"reports"},
    {"experiment", "report_words"},
    {"plotting"},
    {"learning"},
    {"training", "evaluation"},
    {"results", "data", "trackers"},
    {"calibration"},
    {"adapters", "models", "disk", "compression"},
    {"checkpoints", "counterparts"},
    {"state", "merging", "tangent"},
    {"vectors", "sharding"},
    {"tree"},
)
ALLOWED = {("compression", "disk"), ("adapters", "disk")}  # beside the order: both are read as files are
LEAST = {  # stricter than the order: all that a part may import of tvjax
    "merging": {"vectors", "tree"},
    "data": set(),
    "models": {"checkpoints", "counterparts", "tree"},  # files alone; networks import models.layers
    "tree": set(),
    "vectors": {"tree"},
}


def part(path):
    """The name by which the order knows a file."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    """The parts of tvjax that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("tvjax."))
        elif isinstance(node, ast.ImportFrom) and node.module == "tvjax":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tvjax."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"{path} imports relatively")


def packages(path):
    """The top-level packages that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (name.partition(".")[0] for name in names)


def rank(name):
    return next(i for i, group in enumerate(ORDER) if name in group)


def faults(files):
    """Imports against the order, as sentences."""
    for path in files:
        mine = part(path)
        for other in sorted(set(imported(path)) - {mine}):
            if rank(other) <= rank(mine) and (mine, other) not in ALLOWED:
                yield f"{path.relative_to(PACKAGE)} imports {other}, which does not stand to its right"
            if mine in LEAST and other not in LEAST[mine]:
                yield f"{path.relative_to(PACKAGE)} imports {other}; {mine} has {sorted(LEAST[mine])}"


def test_every_part_has_a_place():
    known = set().union(*ORDER)
    assert not {part(path) for path in FILES} - known - {"__init__"}, "give the new part a place in ORDER"


def test_imports_follow_the_order():
    assert not list(faults(path for path in FILES if part(path) != "__init__"))


def test_the_check_sees_a_fault(tmp_path, monkeypatch):
    wrong = tmp_path / "merging" / "wrong.py"
    wrong.parent.mkdir()
    wrong.write_text("def f():\n    from tvjax.models import clip\n    return clip\n")
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    assert len(list(faults([wrong]))) == 2


def test_data_knows_no_jax():
    for path in (PACKAGE / "data").rglob("*.py"):
        assert not {"jax", "jaxlib", "flax", "optax"} & set(packages(path)), path


def test_merging_knows_no_networks():
    for path in (PACKAGE / "merging").rglob("*.py"):
        assert not {"flax", "transformers", "safetensors"} & set(packages(path)), path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_are_readable(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 300, "split it"
    assert path.stem not in ("utils", "util", "helpers", "common", "misc"), "say what is in it"
    classes = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    assert not [name for name in classes if name.endswith(("Manager", "Helper", "Handler"))]
    assert not text or ast.get_docstring(ast.parse(text)), "begin with a docstring that says what the module is"


def test_only_run_has_flags():
    for path in FILES:
        assert path.name == "run.py" or "absl" not in set(packages(path)), path
