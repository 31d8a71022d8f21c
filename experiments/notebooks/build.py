"""Notebooks from their sources: each NN_name.py (jupytext's percent format) becomes NN_name.ipynb, without outputs.

    python experiments/notebooks/build.py           # writes the notebooks whose source has changed
    python experiments/notebooks/build.py --check   # says which are stale, and writes nothing

The sources are what people edit and what diffs show. The first code cell of all notebooks is that of `install.py`.
"""
import os
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent
MARK = "# %% tags=[\"install\"]\n"


def sources() -> list[pathlib.Path]:
    """The sources of all notebooks, in order."""
    return sorted(FOLDER.glob("[0-9][0-9]_*.py"))


def with_install(text: str) -> str:
    """A source whose install cell is what install.py says now."""
    before, _, rest = text.partition(MARK)
    after = rest[rest.index("\n# %%"):]
    return before + MARK + (FOLDER / "install.py").read_text(encoding="utf-8").rstrip() + "\n" + after


def notebook(path: pathlib.Path) -> str:
    """The notebook of a source, the same text for the same source: cells are numbered, not named at random."""
    import jupytext
    import nbformat

    made = jupytext.read(path)
    made.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
                     "language_info": {"name": "python"}}
    for number, cell in enumerate(made.cells):
        cell["id"] = f"cell-{number}"
    return nbformat.writes(made, version=4) + "\n"


def stale() -> dict[pathlib.Path, str]:
    """{notebook: its text as it should be} of all that are not."""
    made = {path.with_suffix(".ipynb"): notebook(path) for path in sources()}
    return {path: text for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text}


def replace(path: pathlib.Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def main() -> None:
    if "--check" in sys.argv[1:]:
        old = [path.name for path in stale()]
        sys.exit(f"stale: {', '.join(old)}; run python experiments/notebooks/build.py" if old else 0)
    for path in sources():
        text = path.read_text(encoding="utf-8")
        if with_install(text) != text:
            replace(path, with_install(text))
    for path, text in stale().items():
        replace(path, text)
        print(f"written: {path}")


if __name__ == "__main__":
    main()
