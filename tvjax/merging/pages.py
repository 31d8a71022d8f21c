"""A page for each merging method, made from its docstring and from the tables of what other tools call it.

    python -m tvjax.merging.pages docs/operators

writes them; a test keeps the files what this module makes. Docstrings are prose in which `name: text` says what an
option is; an option that a docstring leaves to a step ("see `top`") is looked up there.
"""

import inspect
import os
import pathlib
import re
import sys

from tvjax import merging
from tvjax.merging import compat, plan
from tvjax.merging.peers import NONE, ROWS

COMMON = {  # what several docstrings leave to the reader's sense
    "scale": "multiplies the result.",
    "normalize": "whether the sum is divided by the sum of the weights.",
    "scope": 'where shares and norms are taken: the whole model ("global"), each "layer" or each "leaf".',
    "solver": '"svd", "gram" (several times faster) or "auto", which takes "gram" where it loses nothing.',
    "comparator": '">" (the authors\' code) or ">=" (the paper); they differ where a task vector is zero in all tasks.',
    "density": 'kept share of each task vector if `base` is "ties", in (0, 1].',
    "trim": 'see `ties`, if `base` is "ties".',
    "t": "from 0, the first task vector, to 1, the second.",
    "ties": 'whose entry is taken among equals: the "first" task\'s or the "last" one\'s.',
    "base": "the merge whose result is calibrated; Σ τ by default.",
    "rho": "most that the greatest singular value is of the least, ≥ 1, for linear smoothing.",
    "where": "which leaves are solved for, as a function of name and shape.",
}
TITLES = {"mergekit": "mergekit 0.1.5", "fusionbench": "FusionBench 0.2.33", "peft": "PEFT 0.21.2"}
EVERYWHERE = "Every method also takes `exclude`, `averaged`, `weights` and `truncate` (see `merging.build`)."


def pages() -> dict[str, str]:
    """{file name: text} of all pages and their index."""
    made = {f"{name}.md": page(name) for name in merging.METHODS}
    return {"index.md": index(), **made}


def page(name: str) -> str:
    """The page of a method, in Markdown."""
    method = merging.METHODS[name]
    parts = [f"# {name}", summary(method), called(name, method), options(method), data(name, method), example(method)]
    return "\n\n".join(part for part in [*parts, source(method), elsewhere(name)] if part) + "\n"


def index() -> str:
    """The list of methods, with their first sentences and what other tools call them."""
    rows = ["| method | what it computes | elsewhere |", "| --- | --- | --- |"]
    for name, method in merging.METHODS.items():
        tools = ", ".join(TITLES[tool].split()[0] for tool in compat.called(name))
        rows.append(f"| [{name}]({name}.md) | {cell(summary(method))} | {tools} |")
    return (
        "\n".join(["# Merging methods", "", "Made by `python -m tvjax.merging.pages docs/operators`.", "", *rows])
        + "\n"
    )


# ---------------------------------------------------------------- parts of a page
def summary(method) -> str:
    """The first paragraph of the docstring, on one line."""
    return joined(paragraphs(method)[0])


def called(name, method) -> str:
    signature = ", ".join(f"{p.name}={p.default!r}" for p in parameters(method) if not callable(p.default))
    return (
        f"```python\nmerging.{name}({signature})\nmerging.build({name!r}, {{…}})  # the same from a configuration\n```"
    )


def options(method) -> str:
    if not parameters(method):
        return ""
    known = explained(method)
    rows = [f"| `{p.name}` | `{default(p)}` | {cell(known.get(p.name, ''))} |" for p in parameters(method)]
    return "\n".join(
        ["## Options", "", "| option | default | what it is |", "| --- | --- | --- |", *rows, "", EVERYWHERE]
    )


def data(name, method) -> str:
    wanted = sorted(plan.wanted(method()))
    if not wanted:
        return "## Data\n\nNone: it works on task vectors alone."
    names = [p.name for p in parameters(method)]
    texts = [entries(joined(p), [*names, "Data"]) for p in paragraphs(method)]
    found = [text for part in texts for group, text in part if group == ["Data"]]
    return f"## Data\n\nGiven at the call, `{name}(…)(taus, {wanted[0]}=tree)`. " + " ".join(found)


def example(method) -> str:
    lines = [line for line in docstring(method).split("\n\n") if line.startswith(">>> ")]
    return "## Example\n\n```python\n" + "\n\n".join(lines) + "\n```" if lines else ""


def source(method) -> str:
    own = re.findall(r"arXiv:(\d{4}\.\d{4,5})", docstring(method))
    of_module = re.findall(r"arXiv:(\d{4}\.\d{4,5})", inspect.getmodule(method).__doc__ or "")
    found = own or (of_module if len(of_module) == 1 else [])
    links = ", ".join(f"[arXiv:{number}](https://arxiv.org/abs/{number})" for number in dict.fromkeys(found))
    return f"## Source\n\n{links}" if links else ""


def elsewhere(name) -> str:
    """What other tools call the method, its options and their defaults."""
    found = [(tool, key, row) for tool, rows in ROWS.items() for key, row in rows.items() if row.ours == name]
    others = [(tool, key, why) for tool in NONE for key, (ours, why) in NONE[tool].items() if name in ours]
    if not found:
        near = " ".join(f"Near it is {TITLES[tool]}'s `{key}`: {why}." for tool, key, why in others)
        return f"## In other tools\n\nNeither mergekit, FusionBench nor PEFT gives the same numbers. {near}".rstrip()
    rows = [
        "## In other tools",
        "",
        "| tool | there | options there → here | its defaults, here |",
        "| --- | --- | --- | --- |",
    ]
    for tool, key, row in found:
        renamed = ", ".join(f"`{theirs}` → `{getattr(f, 'ours', theirs)}`" for theirs, f in row.takes.items())
        preset = ", ".join(f"`{k}={v!r}`" for k, v in row.preset.items())
        rows.append(f"| {TITLES[tool]} | `{key}` ({row.acts}) | {renamed} | {preset} |")
    tools = [tool for tool in compat.called(name)]
    closing = f'`merging.build("{name}", {{…}}, compat="{tools[0]}")` takes the defaults of that tool.'
    return "\n".join([*rows, "", closing])


# ---------------------------------------------------------------- docstrings
def docstring(method) -> str:
    return inspect.cleandoc(method.__doc__ or "")


def paragraphs(method) -> list[str]:
    return [p for p in docstring(method).split("\n\n") if not p.startswith(">>> ")]


def joined(paragraph: str) -> str:
    return " ".join(paragraph.split())


def cell(text: str) -> str:
    """Text inside a table."""
    return text.replace("|", "\\|")


def parameters(method) -> list[inspect.Parameter]:
    return list(inspect.signature(method).parameters.values())


def default(parameter: inspect.Parameter) -> str:
    return parameter.default.__name__ if callable(parameter.default) else repr(parameter.default)


def explained(method) -> dict[str, str]:
    """{option: text} for all options, from the docstrings, or from what is common to several methods."""
    names = [p.name for p in parameters(method)]
    found = described(method, names)
    return found | {n: COMMON[n] for n in names if n in COMMON and re.fullmatch(r"(see `\w+`\.?)?", found.get(n, ""))}


def described(method, names: list[str], seen: tuple = ()) -> dict[str, str]:
    """{option: text} for the options that the docstring describes, or that of a step or method that it refers to."""
    found = {}
    for text in map(joined, paragraphs(method)[1:]):
        for group, what in entries(text, names):
            found |= {name: what for name in group if name not in found}
    referred = [getattr(merging, word, None) for word in re.findall(r"`(\w+)`", docstring(method))]
    for other in referred:
        missing = [name for name in names if name not in found or re.match(r"see `\w+`", found[name])]
        if inspect.isfunction(other) and other not in seen and missing:
            there = described(other, missing, (*seen, method))
            found |= {name: text for name, text in there.items() if name in missing}
    return found


def entries(text: str, names: list[str]) -> list[tuple[list[str], str]]:
    """The pieces "a, b: what they are" of a paragraph, for options among `names`."""
    one = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    label = re.compile(rf"(?:^|(?<=[.;] )|(?<=, and ))((?:{one})(?:(?:, | and )(?:{one}))*): ")
    other = re.compile(r"(?<=[.;] )(?:The rest|(?:[A-Za-z_]+(?:, | and ))*[A-Za-z_]+): ")
    marks = list(label.finditer(text))
    stops = sorted({m.start() for m in other.finditer(text)} | {m.start() for m in marks} | {len(text)})
    cut = lambda mark: text[mark.end() : min(s for s in stops if s > mark.start())].strip()
    return [(re.split(r", | and ", mark.group(1)), cut(mark)) for mark in marks]


def write(folder) -> None:
    """Writes all pages into a folder, each by a temporary file in it."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        beside = folder / f".{name}.part"
        beside.write_text(text)
        os.replace(beside, folder / name)


if __name__ == "__main__":
    write(sys.argv[1])
