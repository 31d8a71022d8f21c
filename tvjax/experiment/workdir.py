"""The folder of an experiment: whose it is, and files that are either whole or not there.

`config.json` says whose; what a change of it would make incomparable (`OWN`) may not change, the rest may.
"""
import json
import pathlib
from collections.abc import Iterator

from tvjax import checkpoints, results

OWN = ("name", "model", "suite", "tasks", "examples", "finetune", "finetuned")


def check_owner(workdir, config: dict) -> None:
    """Raises ValueError where the folder holds another experiment or is not one; writes nothing."""
    workdir = pathlib.Path(workdir)
    if workdir.exists() and not workdir.is_dir():
        raise ValueError(f"{workdir} is a file: choose another --workdir")
    path = workdir / "config.json"
    if not path.exists():
        if workdir.exists() and any(workdir.iterdir()):
            raise ValueError(f"{workdir} holds other files and no config.json: choose another --workdir")
        return
    try:
        theirs = json.loads(path.read_text())
    except ValueError:
        raise ValueError(f"{path} is not JSON: choose another --workdir") from None
    if changed := list(differences(theirs, config)):
        raise ValueError(f"{workdir} belongs to another config ({'; '.join(changed[:3])}): choose another --workdir")


def differences(theirs: dict, ours: dict) -> Iterator[str]:
    """The fields of `OWN` in which two configs differ, as clauses.

    >>> list(differences({"name": "a", "finetune": {"lr": 1}}, {"name": "a", "finetune": {"lr": 2}}))
    ['finetune.lr 1 there, 2 here']
    """
    for name in OWN:
        a, b = theirs.get(name), ours.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from (f"{name}.{k} {a.get(k)} there, {b.get(k)} here" for k in {**a, **b} if a.get(k) != b.get(k))
        elif a != b:
            yield f"{name} {_short(a)} there, {_short(b)} here"


def _short(value, most: int = 60) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= most else text[:most - 1] + "…"


def write_text(path, text: str) -> None:
    """Writes a text file whole or not at all."""
    checkpoints.replace({pathlib.Path(path): checkpoints.text_writer(text)})


def write_rows(path, rows, **hashes) -> None:
    """A results file of these rows under one header, whole or not at all."""
    for row in rows:
        if missing := [name for name in results.FIELDS if name not in row]:
            raise ValueError(f"a result needs {', '.join(missing)}; the row has {', '.join(row)}")
    lines = [{"header": {**results.environment(), "hashes": hashes}}, *rows]
    write_text(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
