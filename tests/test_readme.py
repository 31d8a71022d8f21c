"""The README is true: its code runs, its table lists the methods that there are, its commands are the project's."""
import doctest
import pathlib
import re
import tomllib

from tvjax import merging

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_code_runs():
    code = "\n".join(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
    test = doctest.DocTestParser().get_doctest(code, {}, "README.md", "README.md", 0)
    assert len(test.examples) >= 8
    assert doctest.DocTestRunner().run(test).failed == 0


def test_its_table_lists_every_method():
    table = TEXT.split("<!-- methods -->")[1].split("<!-- end of methods -->")[0]
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert listed == list(merging.METHODS), "run python experiments/methods_table.py"
    assert "https://arxiv.org/abs/2306.01708" in table


def test_its_extras_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for group in re.findall(r'"\.\[([\w,]+)\]"', TEXT) for name in group.split(",")}
    assert named and named <= set(extras)


def test_its_configs_exist():
    named = re.findall(r"--config=(configs/\w+\.py)", TEXT)
    assert named and all((ROOT / name).is_file() for name in named)


def test_it_speaks_of_the_project_alone():
    assert not re.search(r"/(work|opt|tmp|home)/", TEXT)
