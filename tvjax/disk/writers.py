"""Checkpoints written in pieces: which shard holds which tensor, files that grow under a temporary name, the index."""
import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from tvjax import tree
from tvjax.disk.headers import encode_header
from tvjax.disk.readers import TensorInfo

STEM = "model"
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
NOTHING: Mapping[str, str] = MappingProxyType({})
METADATA = {"format": "pt"}  # without it, transformers refuses a file


class Shard(NamedTuple):
    """A file to write; `begins` says at which byte each of its tensors begins."""

    name: str
    tensors: dict[str, TensorInfo]
    header: bytes
    begins: dict[str, int]

    @property
    def size(self) -> int:
        return len(self.header) + sum(info.nbytes for info in self.tensors.values())


def size_in_bytes(text: int | str) -> int:
    """A size such as 5GB (powers of ten) in bytes.

    >>> size_in_bytes("5GB")
    5000000000
    """
    number, unit = (text, "") if isinstance(text, int) else (text[:-2], text[-2:].upper())
    try:
        size = int(float(number) * UNITS[unit]) if unit else int(number)
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size <= 0:
        raise ValueError(f"a size is a number with {', '.join(UNITS)}, such as 5GB; got {text!r}")
    return size


def shards(tensors: Mapping[str, TensorInfo], most: int, stem: str = STEM,
           about: Mapping[str, str] = NOTHING) -> list[Shard]:
    """The files for these tensors, each of at most `most` bytes of tensors unless a single one is larger.

    Tensors stay in natural order from file to file; inside a file wider dtypes come first, so that all are aligned.
    stem: of the files' names. about: metadata of each file.
    """
    groups: list[dict[str, TensorInfo]] = [{}]
    room = most
    for name in sorted(tensors, key=tree.natural):
        if groups[-1] and tensors[name].nbytes > room:
            groups.append({})
            room = most
        groups[-1][name] = tensors[name]
        room -= tensors[name].nbytes
    alone = len(groups) == 1
    names = [f"{stem}{'' if alone else f'-{i + 1:05}-of-{len(groups):05}'}.safetensors" for i in range(len(groups))]
    return [_shard(name, group, {**about, **METADATA}) for name, group in zip(names, groups, strict=True)]


def _shard(name: str, group: dict[str, TensorInfo], about: dict[str, str]) -> Shard:
    ordered = dict(sorted(group.items(), key=lambda pair: -pair[1].dtype.itemsize))  # stable: natural order inside
    header = encode_header({key: (info.dtype, info.shape) for key, info in ordered.items()}, about)
    begins, at = {}, len(header)
    for key, info in ordered.items():
        begins[key] = at
        at += info.nbytes
    return Shard(name, ordered, header, begins)


def index(files: list[Shard]) -> str:
    """The text of the shard index."""
    where = {name: shard.name for shard in files for name in shard.tensors}
    total = sum(info.nbytes for shard in files for info in shard.tensors.values())
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}, indent=2) + "\n"


class Growing:
    """A shard being written: under a temporary name until `finish`, then under its own."""

    def __init__(self, folder: Path, shard: Shard):
        self.shard, self.path, self.partial = shard, folder / shard.name, folder / f".{shard.name}.partial"
        if self.path.exists() and not self.partial.exists():
            with contextlib.suppress(FileNotFoundError):  # another process that writes into it has done so
                os.replace(self.path, self.partial)  # a tensor of it is to be written anew
        self.file = os.open(self.partial, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        try:
            _reserve(self.file, shard.size)
            os.ftruncate(self.file, shard.size)
            self.write(0, np.frombuffer(shard.header, np.uint8))
        except BaseException:
            os.close(self.file)
            raise

    def write(self, at: int, data: np.ndarray) -> None:
        """Writes the bytes of a contiguous array at a place of the file."""
        view = np.atleast_1d(data).view(np.uint8).reshape(-1).data
        while view:
            count = os.pwrite(self.file, view, at)
            view, at = view[count:], at + count

    def close(self) -> None:
        os.close(self.file)

    def leave(self) -> None:
        """Closes the file once its bytes are on the disk; others still write into it."""
        os.fsync(self.file)
        os.close(self.file)

    def finish(self) -> None:
        """Gives the file its name, once its bytes are on the disk."""
        self.leave()
        name_whole(self.path.parent, self.shard)


def name_whole(folder: Path, shard: Shard) -> None:
    """Gives a file that all have written its name."""
    os.replace(folder / f".{shard.name}.partial", folder / shard.name)


def _reserve(file: int, size: int) -> None:
    """Takes the room on the disk now, so that a full disk is found out at the start."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, 0, size)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise


def _cannot() -> tuple[int, ...]:
    import errno

    return errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS


_CANNOT = _cannot()


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk where `folder` is, or will be."""
    while not folder.exists():
        folder = folder.parent
    found = shutil.disk_usage(folder)
    return found.free if found.total else 1 << 62  # some file systems do not count


def sync_folder(folder: Path) -> None:
    """Makes new names in a folder survive a power cut, where the system can."""
    if os.name == "posix":
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
