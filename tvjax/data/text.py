"""Sentence classification from files: JSON or CSV, plain or gzipped, one file a task.

JSON: {"labels": [class descriptions], "train": [[label, text] …], "test": […], "val": … where there is one}; a label is
the index of a class or its description. CSV: the columns text and label, and split where a file holds more than one.
A validation split that is not there is taken from the training one by the rule of `tvjax.data.splits`.
"""
import csv
import glob
import gzip
import io
import json
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from tvjax.data import splits

ENDINGS = (".json.gz", ".json", ".csv.gz", ".csv")
TEMPLATES = ("{}", "this is {}", "this text is about {}")
SPLITS = {"train": "train", "val": "val", "validation": "val", "dev": "val", "test": "test"}


class Sentences(NamedTuple):
    texts: list[str]
    labels: np.ndarray  # (N,) int32


class Texts(NamedTuple):
    """A task; `splits` maps train, val and test to `Sentences`, `source` says where it is from and how it was split."""
    classnames: tuple[str, ...]
    splits: dict[str, Sentences]
    source: str


def files(sources: Iterable[str]) -> dict[str, pathlib.Path]:
    """{task: file} of sources: "task=file", a file, a folder, or a pattern with stars; "text_trec.json.gz" is trec.

    >>> files(["trec=there/other.csv"])["trec"].name
    'other.csv'
    """
    found: dict[str, pathlib.Path] = {}
    for source in sources:
        name, equals, path = source.partition("=")
        pairs = [(name, pathlib.Path(path))] if equals else [(task_name(p), p) for p in _matching(source)]
        for task, path in pairs:
            if task in found and found[task] != path:
                raise ValueError(f"two files hold the task {task!r}: {found[task]} and {path}; name one as 'task=file'")
            found[task] = path
    return found


def _matching(source: str) -> list[pathlib.Path]:
    if os.path.isdir(source):
        paths = [path for path in sorted(pathlib.Path(source).iterdir()) if path.name.endswith(ENDINGS)]
        if not paths:
            raise ValueError(f"{source} holds no file of sentences ({', '.join(ENDINGS)})")
        return paths
    paths = [pathlib.Path(path) for path in sorted(glob.glob(source))]
    if not paths:
        raise ValueError(f"there is no file {source}: name the files of sentences ({', '.join(ENDINGS)}) in sources")
    return paths


def task_name(path: pathlib.Path) -> str:
    """The task that a file's name says.

    >>> task_name(pathlib.Path("data/text_trec.json.gz"))
    'trec'
    """
    return re.sub(r"\.(json|csv)(\.gz)?$", "", path.name).removeprefix("text_")


def read(path) -> Texts:
    """The task in a file; ValueError that says what is missing, strange or out of range, and where."""
    path = pathlib.Path(path)
    if not path.name.endswith(ENDINGS):
        raise ValueError(f"{path} is none of {', '.join(ENDINGS)}")
    body = _decoded(path)
    classnames, rows = _from_csv(body, path) if ".csv" in path.name else _from_json(body, path)
    found = {split: _sentences(some, classnames, f"{path}, {split}") for split, some in rows.items()}
    return Texts(classnames, *_with_val(found, path))


def _decoded(path: pathlib.Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.name.endswith(".gz") else raw).decode("utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text ({error})") from None


def _from_json(body: str, path) -> tuple[tuple[str, ...], dict[str, list]]:
    try:
        whole = json.loads(body)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from None
    if not isinstance(whole, dict) or not {"labels", "train", "test"} <= set(whole):
        held = ", ".join(whole) if isinstance(whole, dict) else type(whole).__name__
        raise ValueError(f"{path} needs the fields labels, train and test; it holds {held}")
    for split in ("train", "test"):
        if bad := next((row for row in whole[split] if not isinstance(row, list) or len(row) != 2), None):
            raise ValueError(f"{path}, {split}: an example is [label, text]; got {bad!r}")
    return tuple(map(str, whole["labels"])), {SPLITS[name]: whole[name] for name in SPLITS if name in whole}


def _from_csv(body: str, path) -> tuple[tuple[str, ...], dict[str, list]]:
    reader = csv.DictReader(io.StringIO(body))
    columns = [name.strip().lower() for name in reader.fieldnames or []]
    reader.fieldnames = columns
    if missing := [name for name in ("text", "label", "split") if name not in columns]:
        raise ValueError(f"{path} lacks the column {missing[0]!r}; it has {', '.join(columns) or 'none'}")
    rows: dict[str, list] = {}
    for line in reader:
        split = SPLITS.get((line["split"] or "").strip().lower())
        if split is None:
            raise ValueError(f"{path}, line {reader.line_num}: split is {line['split']!r}; "
                             f"there are {', '.join(SPLITS)}")
        rows.setdefault(split, []).append([line["label"], line["text"]])
    if missing := [split for split in ("train", "test") if split not in rows]:
        raise ValueError(f"{path} has no examples whose split is {missing[0]!r}")
    return tuple(sorted({label for some in rows.values() for label, _ in some})), rows


def _sentences(rows: list, classnames: tuple[str, ...], where: str) -> Sentences:
    index: dict[Any, int] = {name: i for i, name in enumerate(classnames)}
    labels = np.zeros(len(rows), np.int32)
    for i, (label, sentence) in enumerate(rows):
        found = label if isinstance(label, int) and not isinstance(label, bool) else index.get(label)
        if found is None or not 0 <= found < len(classnames):
            raise ValueError(f"{where}, example {i}: the label {label!r} is none of the {len(classnames)} classes")
        if not isinstance(sentence, str):
            raise ValueError(f"{where}, example {i} has no text but {sentence!r}")
        labels[i] = found
    if not rows:
        raise ValueError(f"{where} holds no examples")
    return Sentences([sentence for _, sentence in rows], labels)


def _with_val(found: dict[str, Sentences], path) -> tuple[dict[str, Sentences], str]:
    if "val" in found:
        return found, f"{path} (its own validation split)"
    train, val = splits.train_val(len(found["train"].labels))
    whole = found["train"]
    take = lambda rows: Sentences([whole.texts[i] for i in rows], whole.labels[rows])
    said = f"{path} (validation: {len(val)} of {len(whole.labels)} training examples, {splits.index_hash(val)})"
    return {"train": take(train), "val": take(val), "test": found["test"]}, said
