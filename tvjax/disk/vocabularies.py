"""Models with other tokens than the base: one vocabulary of all, and every embedding seen in its order.

The base's tokens keep their rows, others follow (into the base's padding first). A model that lacks a token is given
the base's row for it, or where the base lacks it the mean of those models that have it: its task vector is 0 there.
"""
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tvjax.disk.deltas import widened
from tvjax.disk.match import INPUTS, OUTPUTS
from tvjax.disk.readers import Opened, TensorInfo
from tvjax.tree import wide

FILE = "tokenizer.json"


class Union(NamedTuple):
    """The base and the models in the common vocabulary, the files beside the weights that change, and a hash of all."""

    base: Opened
    models: dict[str, Opened]
    side: dict[str, bytes]
    hash: str
    notes: list[str]


def union(base: Opened, models: Mapping[str, Opened]) -> Union:
    """All of them in the vocabulary of all; ValueError where one cannot be told."""
    tables, size = _embeddings(base, "the base"), 0
    tokenizer = _tokenizer(base, "the base")
    if tokenizer is None:
        raise ValueError(f"vocabulary=union needs {FILE} beside the base's weights: save its fast tokenizer there")
    ours, theirs, notes = tokenizer.get_vocab(), {}, []
    for label, model in models.items():
        other = _tokenizer(model, label)
        if other is None:
            notes.append(f"{label} has no {FILE}: its tokens are taken to be the base's")
        theirs[label] = dict(ours) if other is None else other.get_vocab()
        _add(tokenizer, other)
    vocabulary = tokenizer.get_vocab()
    size = max(max(vocabulary.values()) + 1, max(base.tensors[name].shape[0] for name in tables.values()))
    rows = {label: _rows(vocabulary, own, size) for label, own in {"": ours, **theirs}.items()}
    padding = np.setdiff1d(np.arange(_height(base, tables)), list(vocabulary.values()))
    rows[""][padding] = padding  # rows of no token stay what they are
    every = {"": base, **models}
    made = {label: Aligned(one, label, rows, every, size) for label, one in every.items()}
    if added := len(vocabulary) - len(ours):
        notes.append(f"{added} tokens that the base lacks are in the vocabulary; they match as whole words")
    made[""].config = _sized(base.config, size) if base.config else base.config
    side = {FILE: tokenizer.to_str(pretty=True).encode()}
    digest = hashlib.sha256(side[FILE] + b"".join(row.tobytes() for row in rows.values())).hexdigest()
    return Union(made.pop(""), dict(made), side, digest, notes)


def _tokenizer(opened: Opened, label: str) -> Any:
    """The fast tokenizer beside the weights; None where there is none."""
    from tokenizers import Tokenizer

    if FILE not in opened.side:
        return None
    try:
        return Tokenizer.from_str(opened.side[FILE].read_text(encoding="utf-8"))
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{FILE} of {label} is no tokenizer: {' '.join(str(error).split())[:150]}") from None


def _add(tokenizer: Any, other: Any) -> None:
    """Adds the tokens of another tokenizer, in the order of their numbers, special ones as such."""
    if other is None:
        return
    known, special = tokenizer.get_vocab(), other.get_added_tokens_decoder()
    for token, number in sorted(other.get_vocab().items(), key=lambda pair: pair[1]):
        if token in known:
            continue
        as_it_is = special.get(number, token)
        add = tokenizer.add_special_tokens if getattr(as_it_is, "special", False) else tokenizer.add_tokens
        add([as_it_is])


def _rows(vocabulary: Mapping[str, int], own: Mapping[str, int], size: int) -> np.ndarray:
    """For each row of the common vocabulary the model's own, −1 where it has none."""
    found = np.full(size, -1, np.int64)
    for token, number in vocabulary.items():
        found[number] = own.get(token, -1)
    return found


def _embeddings(opened: Opened, label: str) -> dict[str, str]:
    """{"in", "out": the tensor} of a model's embeddings."""
    found = {}
    for kind, pattern in (("in", INPUTS), ("out", OUTPUTS)):
        names = [name for name, info in opened.tensors.items() if pattern.search(name) and len(info.shape) == 2]
        if len(names) > 1:
            raise ValueError(f"vocabulary=union: {label} has several embeddings ({', '.join(names)}), and which of "
                             "them is whose cannot be told")
        if names:
            found[kind] = names[0]
    if "in" not in found:
        raise ValueError(f"vocabulary=union: {label} has no embedding of tokens")
    return found


def _height(opened: Opened, tables: Mapping[str, str]) -> int:
    return min(opened.tensors[name].shape[0] for name in tables.values())


def _sized(config: Mapping[str, Any], size: int) -> dict[str, Any]:
    """A configuration with its vocab_size, wherever that stands."""
    inner = config.get("text_config")
    made = {**config, "text_config": {**inner, "vocab_size": size}} if isinstance(inner, dict) else dict(config)
    made |= {"vocab_size": size} if "vocab_size" in config or not isinstance(inner, dict) else {}
    return made


class Aligned:
    """An `Opened` whose embeddings have a row for each token of a common vocabulary.

    rows: for each model ("" is the base) the row of each token, −1 where it has none. every: these models.
    """

    def __init__(self, inner: Opened, label: str, rows: Mapping[str, np.ndarray], every: Mapping[str, Opened],
                 size: int):
        self.inner, self.label, self.every = inner, label, every
        self.where, self.config, self.side, self.identity = inner.where, inner.config, inner.side, inner.identity
        self.tables = {one: _embeddings(opened, one or "the base") for one, opened in every.items()}
        self.kinds = {name: kind for kind, name in self.tables[label].items()}
        self.rows = {one: _within(own, _height(every[one], self.tables[one])) for one, own in rows.items()}
        self.tensors = {name: TensorInfo((size, info.shape[1]), info.dtype) if name in self.kinds else info
                        for name, info in inner.tensors.items()}
        self.close = inner.close

    def read(self, name, start, stop):
        if name not in self.kinds or start >= stop:
            return self.inner.read(name, start, stop)
        width = self.tensors[name].shape[1]
        first, last = start // width, -(-stop // width)
        out = np.concatenate([self._run(name, at, to) for at, to in _runs(self.rows[self.label][first:last], first)])
        return out.reshape(-1)[start - first * width : stop - first * width]

    def whole(self, name):
        info = self.tensors[name]
        return self.read(name, 0, info.size).reshape(info.shape)

    def _run(self, name: str, at: int, to: int) -> np.ndarray:
        """Rows at:to, which follow each other in the file too, or one row that it lacks."""
        width, own = self.tensors[name].shape[1], int(self.rows[self.label][at])
        if own >= 0:
            return self.inner.read(name, own * width, (own + to - at) * width).reshape(-1, width)
        kind, dtype = self.kinds[name], self.tensors[name].dtype
        held = [one for one, rows in self.rows.items() if rows[at] >= 0 and kind in self.tables[one]]
        held = [""] if "" in held else held
        if not held:
            return np.zeros((1, width), dtype)
        found = [self._row(one, kind, int(self.rows[one][at]), width) for one in held]
        return (sum(found[1:], start=found[0]) / len(found)).astype(dtype)[None]

    def _row(self, one: str, kind: str, row: int, width: int) -> np.ndarray:
        opened = self.every[one]
        name = self.tables[one][kind]
        return widened(opened.read(name, row * width, (row + 1) * width), np.dtype(wide(opened.tensors[name].dtype)))


def _within(rows: np.ndarray, height: int) -> np.ndarray:
    """Rows that the tensor has; tokens beyond it count as missing."""
    return np.where(rows < height, rows, -1)


def _runs(rows: np.ndarray, first: int) -> Sequence[tuple[int, int]]:
    """Parts of rows that follow each other; each missing row alone.

    >>> _runs(np.array([4, 5, -1, -1, 9]), 10)
    [(10, 12), (12, 13), (13, 14), (14, 15)]
    """
    ends = np.flatnonzero((np.diff(rows) != 1) | (rows[1:] < 0) | (rows[:-1] < 0)) + 1
    edges = [0, *ends.tolist(), len(rows)]
    return [(first + a, first + b) for a, b in zip(edges[:-1], edges[1:], strict=True)]
