"""What a merge did to each tensor, a line of JSON each, written as it goes; an interrupted merge continues from it.

The first line says whose ledger it is, the second which statistics hold. A tensor's line is written after its bytes,
and counts only while the bytes in the file have the hash that it says.
"""
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tvjax.disk.readers import Opened
from tvjax.disk.writers import Shard

NAME = "ledger.jsonl"
BLOCK = 1 << 18  # bytes that are hashed at a time


class Past(NamedTuple):
    """An earlier beginning: the ledger's first line, the hash of its statistics, and the lines of tensors.

    parts: the lines of the entries start:stop of tensors that several processes write, by (tensor, start, stop).
    inputs: what is known of the hashes of such tensors' inputs.
    """

    head: dict[str, Any]
    statistics: str
    tensors: dict[str, dict[str, Any]]
    parts: dict[tuple[str, int, int], dict[str, Any]] = {}
    inputs: dict[str, dict[str, str]] = {}


class Ledger:
    """A file to which lines are added, each at once."""

    def __init__(self, path: Path, lines: Iterable[Mapping[str, Any]]):
        partial = path.with_name(f".{path.name}.partial")
        with open(partial, "w", encoding="utf-8") as file:
            file.writelines(map(as_text, lines))
        os.replace(partial, path)
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def add(self, line: Mapping[str, Any]) -> None:
        self.file.write(as_text(line))
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def as_text(line: Mapping[str, Any]) -> str:
    """A line of the file."""
    return json.dumps(line, ensure_ascii=False) + "\n"


def read(path: Path) -> Past | None:
    """The ledger at `path` up to its last whole line; None where there is none that begins as it should."""
    lines = []
    try:
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            lines.append(json.loads(text))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        pass  # the line that was being written when the process ended, or another kind of file
    if not lines or not isinstance(lines[0], dict) or "merge" not in lines[0]:
        return None
    rest = [line for line in lines[1:] if isinstance(line, dict)]
    statistics = next((line["statistics"] for line in rest if "statistics" in line), "")
    written = [line for line in rest if "tensor" in line and "sha256" in line]
    return Past(lines[0], statistics, {line["tensor"]: line for line in written if "part" not in line},
                {(line["tensor"], *line["part"]): line for line in written if "part" in line},
                _inputs((line["hashed"], line["inputs"]) for line in rest if "hashed" in line))


def lines(folder: Path) -> list[dict[str, Any]]:
    """All whole lines of a folder's ledger, as they were written."""
    return [json.loads(text) for text in (folder / NAME).read_text(encoding="utf-8").splitlines()]


def parts(folder: Path) -> list[Path]:
    """The ledgers of the processes that share a merge, but the first's."""
    return sorted(folder.glob("ledger-*.jsonl"))


def read_all(folder: Path) -> Past | None:
    """All ledgers in a folder as one; None where the first process has begun none."""
    first = read(folder / NAME)
    if first is None:
        return None
    same = lambda past: past is not None and (past.head["merge"], past.statistics) == (first.head["merge"],
                                                                                        first.statistics)
    every = [first, *(past for past in map(read, parts(folder)) if past and same(past))]
    joined = lambda field: {name: line for past in every for name, line in getattr(past, field).items()}
    inputs = _inputs(pair for past in every for pair in past.inputs.items())
    return first._replace(tensors=joined("tensors"), parts=joined("parts"), inputs=inputs)


def _inputs(found: Iterable[tuple[str, dict[str, str]]]) -> dict[str, dict[str, str]]:
    """{tensor: {input: its hash}} of all that are known."""
    made: dict[str, dict[str, str]] = {}
    for name, hashes in found:
        made.setdefault(name, {}).update(hashes)
    return made


def still_there(past: Past, folder: Path, files: Sequence[Shard],
                spans: Mapping[str, tuple[int, int]]) -> dict[str, dict[str, Any]]:
    """The lines of those tensors whose bytes are in `folder` as the ledger says.

    spans: of tensors of which no more than these entries are asked for.
    """
    found = {}
    for shard in files:
        path = next((p for p in (folder / f".{shard.name}.partial", folder / shard.name) if p.exists()), None)
        if path is None or path.stat().st_size != shard.size:
            continue
        with open(path, "rb") as file:
            if file.read(len(shard.header)) != shard.header:
                continue
            for name, info in shard.tensors.items():
                whole, size = past.tensors.get(name), info.dtype.itemsize
                start, stop = (0, info.size) if whole else spans.get(name, (0, info.size))
                line = whole or past.parts.get((name, start, stop))
                if line and _hash_of(file, shard.begins[name] + start * size, (stop - start) * size) == line["sha256"]:
                    found[name] = line
    return found


def of_parts(past: Past, folder: Path, shard: Shard, name: str, at: Sequence[int]) -> dict[str, Any]:
    """The line of a tensor that several processes have written, cut at the entries `at`."""
    lines = [past.parts[name, *span] for span in itertools.pairwise(at)]
    with open(folder / shard.name, "rb") as file:
        whole = _hash_of(file, shard.begins[name], shard.tensors[name].nbytes)
    line = {key: value for key, value in lines[0].items() if key not in ("part", "sums")} | {"sha256": whole}
    if "sums" in lines[0]:
        line |= told(functools.reduce(Sums.__add__, [Sums(*map(_array, part["sums"])) for part in lines]))
    inputs = dict(past.inputs.get(name, {}))
    return line | ({"base_sha256": inputs.pop(""), "model_sha256": inputs} if inputs else {})


def _array(x: Any) -> Any:
    return np.array(x) if isinstance(x, list) else x


def _hash_of(file, begin: int, count: int) -> str:
    digest = hashlib.sha256()
    file.seek(begin)
    while count and (part := file.read(min(count, BLOCK))):
        digest.update(part)
        count -= len(part)
    return digest.hexdigest()


def tensor_hash(checkpoint: Opened, name: str) -> str:
    """SHA-256 of a tensor's bytes in its file."""
    digest = hashlib.sha256()
    info, read_into = checkpoint.tensors[name], getattr(checkpoint, "read_into", None)
    held = np.empty(max(1, min(BLOCK // info.dtype.itemsize, info.size)), info.dtype)
    for start in range(0, info.size, len(held)):
        part = held[: min(len(held), info.size - start)]
        if read_into is None:
            part = checkpoint.read(name, start, start + len(part))
        else:
            read_into(name, start, part)
        digest.update(part.view(np.uint8).data)
    return digest.hexdigest()


def hash_of_values(values: Any) -> str:
    """SHA-256 of a merge's statistics."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(values):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------- what is told of a merged tensor
class Sums(NamedTuple):
    """Sums over some entries of a tensor, from which `told` makes its line: products of all pairs, and counts."""

    gram: np.ndarray  # (tasks, tasks), <tau_s, tau_t>
    shares: np.ndarray  # (tasks,), <tau_t, delta>
    square: float  # <delta, delta>
    conflicts: int
    kept: int
    entries: int

    def __add__(self, other):  # type: ignore[override]
        return Sums(*[a + b for a, b in zip(self, other, strict=True)])

    @property
    def plain(self) -> list:
        """As JSON holds it."""
        return [x.tolist() if isinstance(x, np.ndarray) else x for x in self]


def sums(taus: np.ndarray, delta: np.ndarray, block: int = 1 << 14) -> Sums:
    """The sums over one piece, taus (tasks, entries) and delta (entries,); in blocks that a cache holds."""
    tasks, found = len(taus), []
    with np.errstate(all="ignore"):  # where what is not finite is allowed
        for start in range(0, delta.size, block):
            x, d = taus[:, start : start + block], delta[start : start + block]
            apart = (x.max(0) > 0) & (x.min(0) < 0)
            found.append((x @ x.T, x @ d, d @ d, np.count_nonzero(apart), np.count_nonzero(d)))
    if not found:
        return Sums(np.zeros((tasks, tasks)), np.zeros(tasks), 0.0, 0, 0, 0)
    summed = (np.sum(np.stack(part).astype(np.float64), 0) for part in zip(*found, strict=True))
    gram, shares, square, conflicts, kept = summed
    return Sums(gram, shares, float(square), int(conflicts), int(kept), delta.size)


def told(sums_: Sums) -> dict[str, Any]:
    """Norms and cosines of the task vectors, the step's norm, the share of entries where signs conflict, the share that
    the step changes, and the coefficients of its projection on the task vectors (least squares)."""
    with np.errstate(all="ignore"):
        return _told(sums_)


def _told(sums_: Sums) -> dict[str, Any]:
    norms = np.sqrt(np.diagonal(sums_.gram))
    lengths = np.maximum(norms[:, None] * norms[None, :], np.finfo(np.float64).tiny)
    finite = np.isfinite(sums_.gram).all() and np.isfinite(sums_.shares).all()
    inverse = np.linalg.pinv(sums_.gram, rcond=1e-7, hermitian=True) if finite else sums_.gram * np.nan
    coefficients = inverse @ sums_.shares
    count = max(sums_.entries, 1)
    return {"norms": _numbers(norms), "cosines": [_numbers(row) for row in sums_.gram / lengths],
            "step_norm": _number(np.sqrt(sums_.square)), "sign_conflicts": sums_.conflicts / count,
            "kept": sums_.kept / count, "coefficients": _numbers(coefficients)}


def _numbers(row) -> list[float | None]:
    return [_number(x) for x in row]


def _number(x) -> float | None:
    return float(f"{x:.7g}") if np.isfinite(x) else None
