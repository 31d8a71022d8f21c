"""Notebooks are what their sources say, short, without outputs, and begin with a cell that says what to do.

That they run to the end: `pytest --nbmake experiments/notebooks/*.ipynb`.
"""
import json
import pathlib
import re
import subprocess

import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "experiments" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
INSTALL = (FOLDER / "install.py").read_text(encoding="utf-8")


def cells(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def test_every_source_has_its_notebook():
    assert NOTEBOOKS and {path.stem for path in NOTEBOOKS} == {path.stem for path in FOLDER.glob("[0-9][0-9]_*.py")}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path):
    found = cells(path)
    assert 4 <= len(found) <= 12 and found[0]["cell_type"] == "markdown"
    assert not [cell for cell in found if cell.get("outputs") or cell.get("execution_count")], "strip the outputs"
    assert INSTALL.strip() in ["".join(cell["source"]) for cell in found], "python experiments/notebooks/build.py"
    source = percent(path.with_suffix(".py").read_text(encoding="utf-8"))
    assert list(source) == [(cell["cell_type"], "".join(cell["source"])) for cell in found], "it is not its source's"


def percent(text):
    """(kind, text) of the cells of a source in the percent format."""
    parts = re.split(r"^# %%(.*)\n", text, flags=re.MULTILINE)[1:]
    for head, body in zip(parts[::2], parts[1::2], strict=True):
        markdown, body = "[markdown]" in head, body.strip("\n")
        lines = [line.removeprefix("#").removeprefix(" ") for line in body.splitlines()] if markdown else []
        yield ("markdown", "\n".join(lines)) if markdown else ("code", body)


def run_install(monkeypatch, tmp_path, *, where, package, pip=0, version=(3, 12, 0)):
    """Runs the install cell in a folder, with or without the package, with a pip that answers so."""
    monkeypatch.chdir(where)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))  # else the cell sets it for all tests that follow
    asked = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if package else None)
    monkeypatch.setattr("subprocess.run", lambda command, **_: asked.append(command) or
                        subprocess.CompletedProcess(command, pip))
    monkeypatch.setattr("sys.version_info", version)
    monkeypatch.setattr("shutil.which", lambda name: None)
    held = {}
    exec(compile(INSTALL, "install.py", "exec"), held)
    return asked, held


def test_install_cell_says_what_to_do(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="in a clone of the repository"):
        run_install(monkeypatch, tmp_path, where=tmp_path, package=True)
    with pytest.raises(SystemExit, match="choose another runtime"):
        run_install(monkeypatch, tmp_path, where=FOLDER, package=True, version=(3, 10, 0))
    with pytest.raises(SystemExit, match="Without network"):
        run_install(monkeypatch, tmp_path, where=FOLDER, package=False, pip=1)


def test_install_cell_installs_once(monkeypatch, tmp_path, capsys):
    asked, held = run_install(monkeypatch, tmp_path, where=FOLDER, package=False)
    assert [command[-1] for command in asked] == [str(held["ROOT"])] and "results go to" in capsys.readouterr().out
    assert run_install(monkeypatch, tmp_path, where=FOLDER, package=True)[0] == []
