"""Results as rows: one JSON line each, appended and never changed, under a header that says what computed them.

Every table and figure is drawn from such a file. A line that was cut off by a crash is passed over when reading and
removed when the next row is appended.
"""
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import statistics
from typing import Any, NamedTuple

import jax

from tvjax import tree

FIELDS = ("metric", "value", "method", "task", "split", "seed", "suite", "model")
PACKAGES = ("tvjax", "jax", "jaxlib", "flax", "optax", "numpy")


def append(path, row):
    """Appends a result to the file, after a header where the file is new; the folder is made.

    `row` holds at least the fields of `FIELDS`; others (hyper-parameters, seconds, denominators) are free. `value` is a
    finite number, or None for a run that gave none.

    Raises:
      ValueError: where a field lacks or the value is neither.
    """
    missing = [name for name in FIELDS if name not in row]
    if missing:
        raise ValueError(f"a result needs {', '.join(missing)}; the row has {', '.join(row) or 'nothing'}")
    value = row["value"]
    if value is not None and (isinstance(value, str) or not math.isfinite(value)):
        raise ValueError(f"value must be a finite number, or None for a run that gave none; got {value!r}")
    if not read_lines(path):
        start(path)
    append_line(path, row)


def start(path, **hashes):
    """Appends a header: time, versions, platform, device, and the `hashes` of data and weights that are given."""
    append_line(path, {"header": {**environment(), "hashes": hashes}})


def environment():
    """What computed a result: the time, the packages' versions, Python, the platform, the device."""
    device = jax.devices()[0]
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **versions(),
        "python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count(),
        "device": f"{jax.device_count()} x {device.device_kind}",
    }


def versions():
    """{package: version} of those on which numbers may depend."""
    return {name: _version(name) for name in PACKAGES}


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def read(path):
    """The rows of a file, headers left out; an empty list where there is no file."""
    return [line for line in read_lines(path) if "header" not in line]


def headers(path):
    """The headers of a file, one for each session that wrote to it by `start`."""
    return [line["header"] for line in read_lines(path) if "header" in line]


def read_lines(path):
    """All lines of a JSON-lines file but a last one that was cut off; an empty list where there is no file.

    Raises:
      ValueError: naming the line, where one that is complete isn't JSON.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return []
    *lines, tail = path.read_bytes().split(b"\n")
    if _is_json(tail):
        lines.append(tail)  # only its end of line is lost
    for number, line in enumerate(lines, 1):
        if not _is_json(line):
            raise ValueError(f"line {number} of {path} is not JSON: {line[:40].decode(errors='replace')!r}")
    return [json.loads(line) for line in lines]


def _is_json(line):
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def append_line(path, line):
    """Appends a mapping as one line of JSON, on disk when this returns; repairs a last line that was cut off."""
    text = json.dumps(line, allow_nan=False, default=_plain).encode() + b"\n"
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        _lock(file)
        _repair(file)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _lock(file):
    """Keeps other processes from writing until the file is closed, where the system can."""
    try:
        import fcntl
        fcntl.flock(file, fcntl.LOCK_EX)
    except (ImportError, OSError):  # Windows; some network file systems
        pass


def _repair(file):
    """Ends the file with a whole line."""
    file.seek(0)
    whole, newline, tail = file.read().rpartition(b"\n")
    if tail and _is_json(tail):
        file.write(b"\n")
    elif tail:
        file.truncate(len(whole) + len(newline))


def _plain(x):
    """Numbers and arrays of numpy and jax as Python's own."""
    if hasattr(x, "tolist"):
        return x.tolist()
    if isinstance(x, os.PathLike):
        return os.fspath(x)
    raise ValueError(f"a result can't hold {x!r}")


def select(rows, **equals):
    """The rows whose fields equal what is given; a list, tuple or set stands for any of its members.

    >>> select([{"task": "a", "value": 1}, {"task": "b", "value": 2}], task=["b", "c"])
    [{'task': 'b', 'value': 2}]
    """
    known = {name: None for row in rows for name in row}
    for name in equals:
        if rows and name not in known:
            raise ValueError(f"no row has a field {name!r}; {tree.did_you_mean(name, list(known))}")
    fits = lambda have, want: have in want if isinstance(want, (list, tuple, set)) else have == want
    return [row for row in rows if all(name in row and fits(row[name], want) for name, want in equals.items())]


class Table(NamedTuple):
    """`columns` are the heads, the first that of the names; each of `lines` is (name, cell, …), None where empty."""

    columns: tuple
    lines: tuple


def pivot(rows, *, index="method", columns="task", value="value", reduce=statistics.fmean):
    """A table of `value` by two fields, both in order of first appearance.

    `reduce` makes one cell of the values that fall into it (several seeds): the mean, or for instance `mean_std`.

    >>> pivot([{"method": "ties", "task": "a", "value": 1}, {"method": "ties", "task": "a", "value": 2}]).lines
    (('ties', 1.5),)
    """
    cells: dict[Any, list] = {}
    for row in rows:
        cells.setdefault((row[index], row[columns]), []).append(row[value])
    names, heads = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    known = {key: [x for x in found if x is not None] for key, found in cells.items()}
    cell = lambda name, head: reduce(known[name, head]) if known.get((name, head)) else None
    return Table((index, *heads), tuple((name, *(cell(name, head) for head in heads)) for name in names))


def mean_std(values):
    """(mean, sample standard deviation), the latter 0 for a single value; tables show it as mean ± std.

    >>> mean_std([1.0, 3.0])
    (2.0, 1.4142135623730951)
    """
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def markdown(table, *, scale=1.0, digits=1):
    """The table as Markdown; numbers times `scale` (100 for percent) to `digits` places, "–" where empty.

    >>> print(markdown(Table(("method", "mnist"), (("ties", 0.5),)), scale=100))
    | method | mnist |
    | --- | ---: |
    | ties | 50.0 |
    """
    escape = lambda text: str(text).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
    lines = [map(escape, table.columns), ["---"] + ["---:"] * (len(table.columns) - 1)]
    lines += [[escape(name), *(escape(cell(x, scale=scale, digits=digits)) for x in cells)]
              for name, *cells in table.lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def latex(table, *, scale=1.0, digits=1):
    r"""The table as a LaTeX tabular with booktabs' rules; special characters of names are escaped.

    >>> print(latex(Table(("method", "a_b"), (("ties", 0.5),)), scale=100))
    \begin{tabular}{lr}
    \toprule
    method & a\_b \\
    \midrule
    ties & 50.0 \\
    \bottomrule
    \end{tabular}
    """
    body = [[_tex(name), *(_tex_cell(x, scale, digits) for x in cells)] for name, *cells in table.lines]
    line = lambda cells: " & ".join(cells) + r" \\"
    return "\n".join([rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}", r"\toprule",
                      line(map(_tex, table.columns)), r"\midrule", *map(line, body), r"\bottomrule", r"\end{tabular}"])


def cell(x, *, scale=1.0, digits=1):
    """A cell as words: a number, (mean, deviation), words as they are, "–" for None.

    >>> cell((0.5, 0.01), scale=100), cell(None), cell("none")
    ('50.0 ± 1.0', '–', 'none')
    """
    if x is None or isinstance(x, str):
        return x or "–"
    return " ± ".join(f"{scale * part:.{digits}f}" for part in (x if isinstance(x, tuple) else (x,)))


def _tex_cell(x, scale, digits):
    words = cell(x, scale=scale, digits=digits)
    return _tex(words) if isinstance(x, str) else words.replace("±", r"$\pm$").replace("–", "--")


_TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
        ">": r"\textgreater{}", **{c: "\\" + c for c in "&%$#_{}"}}


def _tex(text):
    return re.sub(r"[\\~^<>&%$#_{}]", lambda found: _TEX[found[0]], str(text))
