"""Tensors that lie in files with any strides (PyTorch's storages, .npy members), read piece by piece.

Entry i of a flattened tensor lies at begin + itemsize · Σ_k stride_k · index_k(i).
"""
import math
import os
import weakref
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tvjax.disk.readers import TensorInfo, _close, _identity, _read_at, read_config, side_files

LOCAL = 30  # bytes of a local header of a zip file, before the name


class Span(NamedTuple):
    """Where a tensor lies: file, byte of its first entry, dtype, shape, strides in entries."""

    file: Path
    begin: int
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def reach(self) -> int:
        """Entries from the first to behind the last."""
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)) if self.size else 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Strided:
    """An `Opened` over spans of files."""

    def __init__(self, path: Path, where: str, spans: Mapping[str, Span]):
        self.where, self.spans = where, spans
        self.tensors = {name: TensorInfo(span.shape, span.dtype) for name, span in spans.items()}
        self.side = side_files(path.parent)
        self.config = read_config(self.side)
        files = sorted({span.file for span in spans.values()} | ({path} if path.suffix != ".json" else set()))
        self._files = {file: os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0)) for file in files}
        self.identity = {file.name: _identity(number) for file, number in self._files.items()}
        self.close = weakref.finalize(self, _close, list(self._files.values()))

    def read(self, name, start, stop):
        span = self.spans[name]
        if start >= stop:
            return np.empty(0, span.dtype)
        if all(n == 1 or a == b for n, a, b in zip(span.shape, span.strides, contiguous(span.shape), strict=True)):
            return self._entries(name, start, stop)
        index = np.unravel_index(np.arange(start, stop), span.shape)
        at = sum((i * step for i, step in zip(index, span.strides, strict=True)), np.zeros(stop - start, np.int64))
        first = int(at.min())
        return self._entries(name, first, int(at.max()) + 1)[at - first]

    def _entries(self, name: str, first: int, last: int) -> np.ndarray:
        """Entries first:last of the memory behind a tensor."""
        span = self.spans[name]
        out = np.empty(last - first, span.dtype)
        view, at = out.view(np.uint8).data, span.begin + first * span.dtype.itemsize
        while view:
            count = _read_at(self._files[span.file], view, at)
            if count == 0:
                raise ValueError(f"{span.file} ended while {name} was read: it was cut off or replaced meanwhile")
            view, at = view[count:], at + count
        return out

    def whole(self, name):
        span = self.spans[name]
        if span.size and span.reach <= span.size:  # all of its memory, once, in its own order
            memory = self._entries(name, 0, span.reach)
            steps = [step * span.dtype.itemsize for step in span.strides]
            return np.ascontiguousarray(np.lib.stride_tricks.as_strided(memory, span.shape, steps))
        return self.read(name, 0, span.size).reshape(span.shape)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in entries, of a tensor whose rows follow each other.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def members(path: Path, what: str) -> dict[str, zipfile.ZipInfo]:
    """The members of a zip file by name; ValueError where it is none, cut off, encrypted, or has a name twice."""
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, OverflowError) as error:
        raise ValueError(f"{path} is not a whole {what}: {' '.join(str(error).split())[:200]}") from None
    found = {info.filename: info for info in infos}
    if len(found) < len(infos) or any(info.flag_bits & 1 for info in infos):
        raise ValueError(f"{path} is not a whole {what}: a member is there more than once, or encrypted")
    return found


def data_begin(path: Path, info: zipfile.ZipInfo, what: str) -> int:
    """The byte at which the content of an uncompressed member begins."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, info.header_offset))
        header = file.read(LOCAL)
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    begin = info.header_offset + LOCAL + name + extra
    fine = header[:4] == b"PK\3\4" and len(header) == LOCAL and info.header_offset >= 0
    if not fine or begin + info.file_size > size or info.file_size != info.compress_size:
        raise ValueError(f"{path} is not a whole {what}: its member {info.filename[:100]} lies beyond the file")
    return begin
