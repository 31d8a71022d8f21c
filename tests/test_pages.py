"""The pages of the operators are what their docstrings say now, and say what a reader needs."""

import inspect
import pathlib

import pytest

from tvjax.merging import METHODS, pages

FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "operators"


def test_pages_are_current():
    made = pages.pages()
    assert {path.name for path in FOLDER.iterdir()} == set(made)
    stale = [name for name, text in made.items() if (FOLDER / name).read_text() != text]
    assert not stale, "run python -m tvjax.merging.pages docs/operators"


@pytest.mark.parametrize("name", METHODS)
def test_every_option_is_explained(name):
    known = pages.explained(METHODS[name])
    assert [option for option in inspect.signature(METHODS[name]).parameters if not known.get(option)] == []


@pytest.mark.parametrize("name", METHODS)
def test_every_page_has_an_example_that_is_run(name):
    assert "## Example" in pages.page(name) and ">>> " in pages.example(METHODS[name])


def test_options_are_found_in_prose():
    found = pages.entries("a, b: shares in [0, 1]. c: see `top`; it is 3. Data: none. d: last.", ["a", "b", "c", "d"])
    assert found == [(["a", "b"], "shares in [0, 1]."), (["c"], "see `top`; it is 3."), (["d"], "last.")]


def test_writing_pages(tmp_path):
    pages.write(tmp_path / "pages")
    assert (tmp_path / "pages" / "ties.md").read_text() == pages.page("ties")
    assert len(list((tmp_path / "pages").iterdir())) == len(METHODS) + 1
