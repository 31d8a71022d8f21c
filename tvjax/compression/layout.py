"""How a store lies on disk: `store.json`, the shared vector, a file of packed masks for each task, and perhaps θ0.

Everything but `store.json` is safetensors. Files are written under other names and renamed; `store.json` comes last,
so that a task is there when its line is. What belongs together is tied by hashes of θ0, shared vector and tree.
"""
import contextlib
import hashlib
import json
import math
import os
import urllib.parse
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tvjax import checkpoints, tree
from tvjax.compression import bits as packed
from tvjax.disk.headers import encode_header
from tvjax.disk.readers import TensorInfo

INDEX, BASE, SHARED, MASKS = "store.json", "base.safetensors", "shared.safetensors", "masks"
FORMAT = 1
FIELDS = ("kind", "bit_order", "base", "shared", "tree", "entries", "tasks")
CHUNK = 1 << 18  # entries that are copied or hashed at once
UNKNOWN = "0" * 64  # in place of a hash until it is known


class Held:
    """A tree in memory as something that is read piece by piece, like an opened checkpoint."""

    def __init__(self, params: Any):
        self.flat = tree.flatten(params)
        self.tensors = {name: TensorInfo(tuple(np.shape(x)), np.dtype(x.dtype)) for name, x in self.flat.items()}

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Entries start:stop of the flattened leaf."""
        return np.ascontiguousarray(np.asarray(self.flat[name]).reshape(-1)[start:stop])


def pieces(size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of all chunks of so many entries."""
    return ((at, min(at + CHUNK, size)) for at in range(0, size, CHUNK))


def content_hash(opened: Any) -> str:
    """`checkpoints.content_hash` of an opened checkpoint, a chunk in memory at a time."""
    digest = hashlib.sha256()
    for name, info in sorted(opened.tensors.items()):
        start_leaf(digest, name, info.dtype, info.shape)
        for start, stop in pieces(info.size):
            digest.update(opened.read(name, start, stop).view(np.uint8).data)
    return digest.hexdigest()


def start_leaf(digest: Any, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """What a content hash says of a leaf before its bytes."""
    digest.update(json.dumps([name, str(np.dtype(dtype)), list(shape)]).encode())


def tree_hash(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """A hash of the names and shapes of the masked leaves."""
    pairs = sorted((name, list(shape)) for name, shape in shapes.items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def mask_file(task: str) -> str:
    """The file of a task's masks, below the store.

    >>> mask_file("sun397/hard")
    'masks/sun397%2Fhard.safetensors'
    """
    return f"{MASKS}/{urllib.parse.quote(task, safe='')}.safetensors"


def mask_metadata(about: Mapping[str, Any], task: str) -> dict[str, str]:
    """What a file of masks says of itself; `about` is the store's index."""
    return {"tvjax": "masks", "task": task, "bit_order": packed.ORDER, "base": about["base"]["hash"],
            "shared": about["shared"]["hash"], "tree": about["tree"]}


def mask_tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """The tensors of a file of masks: the packed bytes of every leaf."""
    return {name: (np.dtype(np.uint8), (packed.size(math.prod(shape)),)) for name, shape in shapes.items()}


# ---------------------------------------------------------------- writing
def append(file: Any, array: np.ndarray) -> None:
    """Writes an array's bytes at the end of a file of tensors."""
    file.write(np.ascontiguousarray(array).view(np.uint8).data)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path` that gets its name once the block is done, and vanishes where the block fails."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is there already: choose another folder, or add tasks to that store")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    partial.mkdir()
    try:
        yield partial
        os.replace(partial, path)
    finally:
        if partial.exists():  # made here, by this very call
            import shutil
            shutil.rmtree(partial, ignore_errors=True)


def write_tensors(path: Path, tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]], metadata: Mapping[str, str],
                  fill: Callable[[Any], None]) -> None:
    """A safetensors file whose bytes `fill(file)` appends in the order of `tensors`; whole or not at all."""
    def write(partial: Path) -> None:
        with open(partial, "wb") as file:
            file.write(encode_header(tensors, metadata))
            fill(file)
            file.flush()
            os.fsync(file.fileno())
    checkpoints.replace({path: write})


def copy_base(opened: Any, path: Path, hash_: str) -> None:
    """All tensors of θ0 in one file, a chunk in memory at a time."""
    def fill(file: Any) -> None:
        for name, info in opened.tensors.items():
            for start, stop in pieces(info.size):
                append(file, opened.read(name, start, stop))
    tensors = {name: (info.dtype, info.shape) for name, info in opened.tensors.items()}
    write_tensors(path, tensors, {"tvjax": "base", "hash": hash_, "format": "pt"}, fill)


def write_index(folder: Path, about: Mapping[str, Any]) -> None:
    """`store.json`, whole or not at all."""
    text = json.dumps({"tvjax": "store", "format": FORMAT, **about}, indent=1) + "\n"
    checkpoints.replace({folder / INDEX: checkpoints.text_writer(text)})


# ---------------------------------------------------------------- reading
def said_by(path: Path, absent: str) -> dict[str, Any]:
    """What an index file says; ValueError with the sentence `absent` where it is not there, or where it is not JSON."""
    if not path.is_file():
        raise ValueError(absent)
    return checkpoints.fields_of(path)


def check_fields(path: Path, about: Mapping[str, Any], fields: Iterable[str]) -> None:
    """Raises ValueError where an index lacks a field."""
    if missing := [name for name in fields if name not in about]:
        raise ValueError(f"{path} lacks {', '.join(missing)}")


def read_index(folder: Path) -> dict[str, Any]:
    """What `store.json` says, checked; one sentence where there is no store, a broken or a newer one."""
    path = folder / INDEX
    about = said_by(path, f"{folder} is no store: it holds no {INDEX}")
    if about.get("tvjax") != "store":
        raise ValueError(f"{path} is not the index of a store of task vectors")
    if about.get("format") != FORMAT:
        raise ValueError(f"{path} has format {about.get('format')}; this version reads {FORMAT}")
    check_fields(path, about, FIELDS)
    if about["bit_order"] != packed.ORDER:
        raise ValueError(f"{path}: its masks are of {about['bit_order']!r} bit order; readable is {packed.ORDER!r}")
    return about
