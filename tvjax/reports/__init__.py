"""The page of a job that studies something: its sections, each with words, tables and figures, drawn from rows alone.

A module `tvjax.reports.<job>` has `sections(run) -> list[Section]`; `write` makes of them report.html, tables.md,
tables.tex and figures/, each figure with its data beside it as CSV.
"""
import dataclasses
import functools
import html
import importlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from tvjax import checkpoints, plotting, results
from tvjax.reports import pieces


class Run(NamedTuple):
    """A run as its folder tells it; `command` is what made it."""

    config: dict[str, Any]
    header: dict[str, Any]
    rows: list[dict]
    command: str


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page. `tables` maps a caption to a table, whose numbers are shown times `scale` to `digits` places.

    `figures` maps a caption to a figure; `words` come before them, `notes` in small print after, `alarms` in red.
    """

    title: str
    words: str = ""
    tables: Mapping[str, results.Table] = dataclasses.field(default_factory=dict)
    figures: Mapping[str, Figure] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()
    alarms: Sequence[str] = ()
    scale: float = 100.0
    digits: int = 1


def read(folder, *, command: str) -> Run:
    """The run in a folder; ValueError where it holds no results."""
    folder = pathlib.Path(folder)
    path = folder / "results.jsonl"
    rows = results.read(path)
    if not rows:
        raise ValueError(f"{path} holds no results to report")
    return Run(json.loads((folder / "config.json").read_text()), results.headers(path)[-1], rows, command)


def write(folder, *, command: str) -> list[pathlib.Path]:
    """Writes the report of the job that `folder`/config.json names; returns the paths, all written or none."""
    run = read(folder, command=command)
    return put(folder, run, _sections(run))


def _sections(run: Run) -> Sequence[Section]:
    return importlib.import_module(f"tvjax.reports.{run.config['job']}").sections(run)


def first_table(folder, *, command: str) -> str:
    """The first table of the report of the job in `folder`, as Markdown; "" where it has none."""
    for section in _sections(read(folder, command=command)):
        for table in section.tables.values():
            return results.markdown(table, scale=section.scale, digits=section.digits)
    return ""


def put(folder, run: Run, sections: Sequence[Section]) -> list[pathlib.Path]:
    """Writes a report of these sections."""
    folder = pathlib.Path(folder)
    drawn = {(i, caption): (f"{i + 1}_{name(caption)}", figure)
             for i, section in enumerate(sections) for caption, figure in section.figures.items()}
    pictures = {where: (title, plotting.png(figure)) for where, (title, figure) in drawn.items()}
    files = {folder / "figures" / f"{title}.png": body for title, body in pictures.values()}
    files |= {folder / "figures" / f"{title}.csv": plotting.data(figure).encode() for title, figure in drawn.values()}
    files[folder / "tables.md"] = markdown(run, sections).encode()
    files[folder / "tables.tex"] = latex(sections).encode()
    files[folder / "report.html"] = page(run, sections, pictures).encode()
    return replace(files)


def replace(files: Mapping[pathlib.Path, bytes]) -> list[pathlib.Path]:
    """Writes all files before any is put in its place; returns their paths."""
    checkpoints.replace({path: functools.partial(_write, body) for path, body in files.items()})
    return list(files)


def _write(body: bytes, path: pathlib.Path) -> None:
    path.write_bytes(body)


def name(caption: str) -> str:
    """A caption's first words as the name of a file.

    >>> name("ξ over α₁ and α₂: greek, braille (seed 0)")
    'over-and-greek-braille-seed'
    """
    kept = "".join(c if c.isascii() and c.isalnum() else " " for c in caption.lower()).split()
    return "-".join(kept[:5]) or "figure"


def markdown(run: Run, sections: Sequence[Section]) -> str:
    """Words and tables as Markdown."""
    parts = [f"# {run.config['name']}", f"`{run.command}`"]
    for section in sections:
        parts += [f"## {section.title}", *(f"**{alarm}**" for alarm in section.alarms)]
        parts += [section.words] if section.words else []
        for caption, table in section.tables.items():
            parts += [caption, results.markdown(table, scale=section.scale, digits=section.digits)]
        parts += section.notes
    return "\n\n".join(parts) + "\n"


def latex(sections: Sequence[Section]) -> str:
    """All tables as LaTeX, each under a comment that names it."""
    return "\n".join(f"% {section.title}: {caption}\n"
                     f"{results.latex(table, scale=section.scale, digits=section.digits)}\n"
                     for section in sections for caption, table in section.tables.items())


def page(run: Run, sections: Sequence[Section], pictures: Mapping[tuple[int, str], tuple[str, bytes]]) -> str:
    """The report as one HTML document that needs nothing beside it."""
    parts = [f"<h1>{html.escape(run.config['name'])}</h1>"]
    for i, section in enumerate(sections):
        parts += [f"<h2>{html.escape(section.title)}</h2>"]
        parts += [pieces.paragraphs(alarm, "alarm") for alarm in section.alarms]
        parts.append(pieces.paragraphs(section.words))
        for caption, table in section.tables.items():
            parts += [f"<h3>{html.escape(caption)}</h3>",
                      pieces.numbers(table, scale=section.scale, digits=section.digits)]
        parts += [pieces.picture(*pictures[i, caption], caption) for caption in section.figures]
        parts += [pieces.paragraphs(note, "note") for note in section.notes]
    parts += ["<h2>To reproduce</h2>", f"<pre>{html.escape(run.command)}</pre>",
              pieces.folded("Config", run.config), pieces.folded("Versions and hashes", run.header)]
    return pieces.page(run.config["name"], parts)
