"""Writes the table of methods into README.md, from the names and docstrings of `tvjax.merging.METHODS`.

    python experiments/methods_table.py
"""
import inspect
import os
import pathlib
import re

from tvjax import merging

README = pathlib.Path(__file__).parents[1] / "README.md"
START, END = "<!-- methods -->\n", "<!-- end of methods -->"


def table() -> str:
    """One line a method: name, what its docstring says first, its papers."""
    return "\n".join(["| name | what it does | paper |", "| --- | --- | --- |", *map(line, merging.METHODS)]) + "\n"


def line(name: str) -> str:
    text = inspect.getdoc(merging.METHODS[name]) or ""
    papers = dict.fromkeys(re.findall(r"arXiv:(\d{4}\.\d{4,5})", text))
    links = ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in papers) or "–"
    first = " ".join(text.partition("\n\n")[0].split())
    first = re.sub(r",? arXiv:[\d.]+\b", "", re.sub(r" ?\(arXiv:[^)]*\)", "", first))
    first = re.split(r"(?<=[\w)`])\.( |$)", first)[0].rstrip(".")
    return f"| `{name}` | {first.replace('|', '&#124;')} | {links} |"


def updated(text: str) -> str:
    """README's text with the table as it is now."""
    before, rest = text.split(START)
    return before + START + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    partial = README.with_name(".README.md.partial")
    partial.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")
    os.replace(partial, README)
