"""What a safetensors file says of itself, read without its tensors and believed only where it fits the file.

A file is eight bytes (the header's length, little-endian), the header (JSON: name to dtype, shape and offsets) and the
tensors' bytes, end to end.
"""
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tvjax import tree

LIMIT = 100 << 20  # bytes of a header, as in the reference implementation
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2), "I64": np.dtype(np.int64), "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16), "I8": np.dtype(np.int8), "U64": np.dtype(np.uint64), "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16), "U8": np.dtype(np.uint8), "BOOL": np.dtype(np.bool_), "C64": np.dtype(np.complex64)}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """One tensor of a file; its bytes are begin:end, counted from the file's start."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    entries: dict[str, Entry]
    metadata: dict[str, str]


class Index(NamedTuple):
    """A shard index: the files, in the order of their names, and what it promises to be where."""

    shards: list[Path]
    where: dict[str, str]


def read_header(path: str | os.PathLike) -> Header:
    """The header of a safetensors file, checked against the file's size.

    Raises ValueError naming the file and the first thing that cannot be: a header beyond the file, a name given twice,
    offsets that overlap, leave holes or exceed the file, a size other than that of shape and dtype.
    """
    path = Path(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(size - 8, LIMIT):
            raise _broken(path, f"its header would be {length:,} bytes long, the file is {size:,}")
        raw = file.read(length)
    header = _parse(path, raw)
    about = header.pop("__metadata__", {})
    if not isinstance(about, dict) or not all(isinstance(value, str) for value in about.values()):
        raise _broken(path, "its __metadata__ does not map strings to strings")
    entries = {name: _entry(path, name, given, 8 + length) for name, given in header.items()}
    _check_layout(path, entries, 8 + length, size)
    return Header(entries, about)


def _broken(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is not a whole safetensors file: {why}")


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header cannot be read ({_short(error)})") from None
    if not isinstance(header, dict):
        raise _broken(path, "its header is not an object of names")
    return header


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)[:200]} is there more than once")
    return found


def _entry(path: Path, name: str, given: Any, start: int) -> Entry:
    if not isinstance(given, dict) or not {"dtype", "shape", "data_offsets"} <= set(given):
        raise _broken(path, f"{_short(name)} lacks its dtype, shape or data_offsets")
    code, shape, offsets = given["dtype"], given["shape"], given["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise ValueError(f"{path}: {_short(name)} is of dtype {_short(code)}; readable are {', '.join(DTYPES)}")
    if not _counts(shape) or math.prod(max(n, 1) for n in shape) >= 1 << 62:
        raise _broken(path, f"{_short(name)} has the shape {_short(shape)}")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _broken(path, f"{_short(name)} has the data_offsets {_short(offsets)}")
    dtype, (begin, end) = DTYPES[code], offsets
    needed = math.prod(shape) * dtype.itemsize
    if end - begin != needed:
        raise _broken(path, f"{_short(name)} has {end - begin:,} bytes, but {code} {shape} takes {needed:,}")
    return Entry(dtype, tuple(shape), start + begin, start + end)


def _counts(numbers: Any) -> bool:
    fine = isinstance(numbers, list) and len(numbers) <= 64
    return fine and all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)


def _check_layout(path: Path, entries: Mapping[str, Entry], start: int, size: int) -> None:
    at, before = start, "the header"
    for name, entry in sorted(entries.items(), key=lambda pair: (pair[1].begin, pair[1].end)):
        if entry.begin != at:
            kind = "overlaps" if entry.begin < at else "leaves a hole behind"
            raise _broken(path, f"{_short(name)} {kind} {_short(before)}")
        at, before = entry.end, name
    if at != size:
        more = "cut off" if at > size else "followed by other bytes"
        raise _broken(path, f"its tensors end at byte {at:,}, the file at {size:,}: it was {more}")


def _short(what: Any, most: int = 120) -> str:
    text = " ".join(str(what).split())
    return text if len(text) <= most else text[:most] + "…"


def encode_header(tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file that holds `tensors` (name to dtype and shape) in this order; a multiple of 8 long."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_index(path: str | os.PathLike) -> Index:
    """The shards of a checkpoint from its `….index.json`; each is a file in the index's own folder."""
    path = Path(path)
    try:
        given = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
        where = given["weight_map"]
        names = sorted(set(where.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is not a shard index: it needs a weight_map from names to files") from None
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path} is not a shard index: its weight_map names no files")
    for name in names:  # by letters, not by resolving: the hub's cache keeps files as links that lead out of the folder
        if os.path.isabs(name) or re.match("[A-Za-z]:", name) or ".." in re.split(r"[/\\]", name) or "\0" in name:
            raise ValueError(f"the index {path} points to {_short(name)!r}, outside of its own folder")
    if missing := [name for name in names if not os.path.isfile(path.parent / name)]:
        raise ValueError(f"the index {path} names files that are missing: {tree.listing(missing)}")
    return Index([path.parent / name for name in names], dict(where))


def read_headers(path: str | os.PathLike) -> tuple[dict[str, tuple[Path, Entry]], dict[str, str]]:
    """({name: (file, entry)}, metadata) of one safetensors file or of all shards of an index."""
    path = Path(path)
    index = read_index(path) if path.suffix == ".json" else Index([path], {})
    found: dict[str, tuple[Path, Entry]] = {}
    metadata: dict[str, str] = {}
    for shard in index.shards:
        header = read_header(shard)
        if twice := [name for name in header.entries if name in found]:
            raise ValueError(f"{shard} holds {tree.listing(twice)} once more than another shard of {path}")
        found |= {name: (shard, entry) for name, entry in header.entries.items()}
        metadata |= header.metadata
    if missing := [name for name in index.where if name not in found]:
        raise ValueError(f"the index {path} promises {tree.listing(missing)}, but no shard holds it")
    for name, shard in index.where.items():
        if found[name][0] != path.parent / shard:
            raise ValueError(f"the index {path} says that {name} is in {shard}; it is in {found[name][0].name}")
    return found, metadata
