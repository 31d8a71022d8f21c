"""Checkpoints of arrays: .npz files whose members have dotted names, and directories that Orbax wrote.

Members of an .npz are read in pieces where numpy.savez wrote them. What can be had whole only (members that
numpy.savez_compressed wrote, Orbax's arrays) is, and the last few are kept.
"""
import functools
import io
import threading
import weakref
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tvjax import tree
from tvjax.disk.readers import OPENERS, TensorInfo, read_config, side_files
from tvjax.disk.strided import Span, Strided, contiguous, data_begin, members

KEPT = 2  # arrays that are kept of those which can be had whole only
WHAT = ".npz file"
HEADER = 1 << 16  # bytes of an array's description
NUMBERS = "fiub"
PARAMS = "params."  # where Flax's training states have them


def npz_file(path: Path) -> Path | None:
    """The .npz file that `path` is or holds."""
    if path.is_dir():
        alone = sorted(path.glob("*.npz"))
        return alone[0] if len(alone) == 1 else None
    return path if path.suffix == ".npz" and path.is_file() else None


class Npz(Strided):
    """An `Opened` over one .npz file; nothing pickled is read."""

    def __init__(self, path: Path, where: str):
        self.file, self.packed = path, {}
        spans = {}
        for member, info in members(path, WHAT).items():
            if not member.endswith(".npy"):
                raise ValueError(f"{path} holds {member[:100]}, which is no array")
            name = member.removesuffix(".npy")
            spans[name] = self._span(name, info)
            if info.compress_type != zipfile.ZIP_STORED:
                self.packed[name] = info
        super().__init__(path, where, spans)
        self._kept = functools.lru_cache(KEPT)(functools.partial(_unpacked, path))

    def _span(self, name: str, info: zipfile.ZipInfo) -> Span:
        shape, fortran, dtype, length = _described(self.file, name, info)
        strides = contiguous(shape[::-1])[::-1] if fortran else contiguous(shape)
        begin = data_begin(self.file, info, WHAT) + length if info.compress_type == zipfile.ZIP_STORED else 0
        span = Span(self.file, begin, dtype, shape, strides)
        if span.size * dtype.itemsize != info.file_size - length:
            raise ValueError(f"{self.file} is not a whole {WHAT}: {name[:100]} has another size than its shape tells")
        return span

    def whole(self, name):
        return self._kept(self.packed[name]) if name in self.packed else super().whole(name)

    def read(self, name, start, stop):
        return self.whole(name).reshape(-1)[start:stop] if name in self.packed else super().read(name, start, stop)


def _described(path: Path, name: str, info: zipfile.ZipInfo) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """(shape, whether columns come first, dtype, bytes before the entries) of an .npy member."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(info) as member:
            head = io.BytesIO(member.read(HEADER))
        version = np.lib.format.read_magic(head)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(head)
    except Exception as error:  # zipfile's, zlib's, numpy's parser's
        said = " ".join(str(error).split())[:150]
        raise ValueError(f"{path} is not a whole {WHAT}: {name[:100]} cannot be read ({said})") from None
    if dtype.kind not in NUMBERS or not dtype.isnative:
        what = "pickled objects" if dtype.hasobject else f"dtype {dtype.str}"
        raise ValueError(f"{path}: {name[:100]} is of {what}; readable are native floats, integers and flags (bfloat16 "
                         "and others are kept by safetensors)")
    if any(n < 0 for n in shape):
        raise ValueError(f"{path} is not a whole {WHAT}: {name[:100]} has the shape {shape}")
    return shape, fortran, dtype, head.tell()


def _unpacked(path: Path, info: zipfile.ZipInfo) -> np.ndarray:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(info) as member:
            return np.ascontiguousarray(np.lib.format.read_array(member, allow_pickle=False))
    except Exception as error:
        raise ValueError(f"{path} is not a whole {WHAT}: {info.filename[:100]} cannot be read "
                         f"({' '.join(str(error).split())[:150]})") from None


# ---------------------------------------------------------------- Orbax
def orbax_directory(path: Path) -> Path | None:
    """`path` if Orbax wrote it."""
    marks = ("_CHECKPOINT_METADATA", "_METADATA", "orbax.checkpoint")
    return path if path.is_dir() and any((path / mark).exists() for mark in marks) else None


class Orbax:
    """An `Opened` over a directory of Orbax: a tree of arrays, named by their dotted paths; `params.` is left away."""

    def __init__(self, path: Path, where: str):
        self.where, self.path = where, path.resolve()
        self.tree = _metadata(self.path)
        self.names = self._named(tree.flatten(self.tree))
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(tuple(about.shape), np.dtype(about.dtype)) for name, (_, about) in self.names.items()}
        self.side = side_files(path)
        self.config = read_config(self.side)
        files = sorted(file for file in self.path.rglob("*") if file.is_file())
        self.identity = {str(file.relative_to(self.path)): [file.stat().st_size, file.stat().st_mtime_ns]
                         for file in files}
        self.lock, self._kept = threading.Lock(), functools.lru_cache(KEPT)(self._load)
        self.close = weakref.finalize(self, lambda: None)

    def _named(self, flat: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
        for name, about in flat.items():
            if not hasattr(about, "shape") or not hasattr(about, "dtype"):
                raise ValueError(f"{self.where} holds {name[:100]}, which is no array: save the parameters alone")
        inside = len(PARAMS) if flat and all(name.startswith(PARAMS) for name in flat) else 0
        return {name[inside:]: (name, about) for name, about in flat.items()}

    def _load(self, name: str) -> np.ndarray:
        from orbax.checkpoint import v1

        info, stored = self.tensors[name], self.names[name][0]
        flat: dict[str, Any] = dict.fromkeys(tree.flatten(self.tree), v1.PLACEHOLDER)
        flat[stored] = np.broadcast_to(np.zeros((), info.dtype), info.shape)
        try:
            loaded = v1.load(str(self.path), tree.rebuild(self.tree, flat))
        except Exception as error:  # tensorstore's and orbax's, of many kinds
            raise ValueError(f"{name} of {self.where} cannot be read: {' '.join(str(error).split())[:200]}") from None
        return np.ascontiguousarray(tree.flatten(loaded, is_leaf=lambda x: x is v1.PLACEHOLDER)[stored])

    def whole(self, name):
        with self.lock:
            return self._kept(name)

    def read(self, name, start, stop):
        return self.whole(name).reshape(-1)[start:stop]


def _metadata(path: Path) -> Any:
    from orbax.checkpoint import v1

    try:
        return v1.metadata(str(path)).metadata
    except Exception as error:
        raise ValueError(f"{path} cannot be read by Orbax: {' '.join(str(error).split())[:200]}") from None


OPENERS += [(npz_file, Npz), (orbax_directory, Orbax)]
