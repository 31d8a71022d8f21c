"""Checkpoints opened for reading in pieces: what tensors there are, from headers alone, and their entries on demand.

`open_checkpoint` picks the format. Another format needs an object like `Opened` and one entry in `OPENERS`.
"""
import math
import os
import re
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from tvjax import checkpoints, tree
from tvjax.disk.headers import Entry, read_headers

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "diffusion_pytorch_model.safetensors",
           "diffusion_pytorch_model.safetensors.index.json")
SIDE = re.compile(r"(.*\.(json|txt|jinja|model|md|py|tiktoken)|vocab\..*|LICENSE.*|NOTICE.*)$", re.IGNORECASE)
FROM_HUB = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.md", "LICENSE*"]


class TensorInfo(NamedTuple):
    """A tensor, known from its header."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@runtime_checkable
class Opened(Protocol):
    """A checkpoint whose tensors can be read piece by piece; reading is safe from several threads at once."""

    where: str  # as the user named it
    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]  # config.json, {} without one
    side: Mapping[str, Path]  # the files beside the weights, by name
    identity: Mapping[str, Any]  # what tells whether the files are still the same; JSON

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Entries start:stop of the flattened tensor, in the file's dtype; no more memory than these entries."""
        ...

    def whole(self, name: str) -> np.ndarray:
        """The tensor, in the file's dtype."""
        ...

    def close(self) -> None: ...


class Safetensors:
    """An `Opened` over one safetensors file, or over the shards of an index."""

    def __init__(self, path: Path, where: str | None = None):
        self.where = where or str(path)
        self.entries, self.metadata = read_headers(path)
        self.tensors = {name: TensorInfo(entry.shape, entry.dtype) for name, (_, entry) in self.entries.items()}
        self.side = side_files(path.parent)
        self.config = read_config(self.side)
        files = sorted({file for file, _ in self.entries.values()})
        self._files = {file: os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0)) for file in files}
        self.identity = {file.name: _identity(number) for file, number in sorted(self._files.items())}
        self.close = weakref.finalize(self, _close, list(self._files.values()))

    def read(self, name, start, stop):
        out = np.empty(stop - start, self.tensors[name].dtype)
        self.read_into(name, start, out)
        return out

    def read_into(self, name: str, start: int, out: np.ndarray) -> None:
        """Fills `out`, one-dimensional and of the file's dtype, with the entries from `start` on.

        Read, not mapped: a file cut off meanwhile is an error here, not a crash, and its pages are not this process's.
        """
        file, entry = self.entries[name]
        view, at = out.view(np.uint8).data, entry.begin + start * entry.dtype.itemsize
        while view:
            count = _read_at(self._files[file], view, at)
            if count == 0:
                raise ValueError(f"{file} ended while {name} was read: it was cut off or replaced meanwhile")
            view, at = view[count:], at + count

    def whole(self, name):
        info = self.tensors[name]
        return self.read(name, 0, info.size).reshape(info.shape)


def _read_at(number: int, view: memoryview, at: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(number, [view[: 1 << 30]], at)
    part = os.pread(number, min(len(view), 1 << 30), at)
    view[: len(part)] = part
    return len(part)


def _identity(number: int) -> list[int]:
    status = os.fstat(number)
    return [status.st_size, status.st_mtime_ns]


def _close(numbers: list[int]) -> None:
    for number in numbers:
        os.close(number)


# ---------------------------------------------------------------- which format
OPENERS: list[tuple[Callable[[Path], Path | None], Callable[[Path, str], Any]]] = []
"""(what to open of a path, None where it is another format; how to open that), asked in order."""
VIEWS: list[Callable[[Any, Any], Any]] = []
"""What an opened checkpoint is seen through, given it and the merge's base if known: other names, an adapter fused."""


def weights_file(path: Path) -> Path | None:
    """The safetensors file or index that `path` is or holds."""
    if path.is_dir():
        named = next((path / name for name in WEIGHTS if (path / name).is_file()), None)
        alone = sorted(path.glob("*.safetensors"))
        return named or (alone[0] if len(alone) == 1 else None)
    if path.name.endswith((".safetensors", ".safetensors.index.json")) and path.is_file():
        return path
    return None


OPENERS.append((weights_file, Safetensors))


def open_checkpoint(where: str | os.PathLike, *, revision: str | None = None, base: Opened | None = None) -> Any:
    """The checkpoint at `where`: a directory, a weights file or a shard index, or a hub id `owner/name[@revision]`.

    Weights are safetensors, PyTorch's (no code in them runs), .npz, Orbax's, or a LoRA adapter. Nothing but headers is
    read. base: what an adapter is fused with; by default the model that it names itself. Raises ValueError with one
    sentence where there is none, or a broken one.
    """
    path = Path(where)
    if not path.exists():
        path = _from_hub(str(where), revision)
    for find, opener in OPENERS:
        if (found := find(path)) is not None:
            return _seen(opener(found, str(where)), base)
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir())
        raise ValueError(f"{path} holds no {WEIGHTS[0]}; it holds {tree.listing(names, 5) or 'nothing'}")
    raise ValueError(f"{path} is no checkpoint: give a directory, a .safetensors, .bin, .pt or .npz file, or a shard "
                     "index")


def _seen(opened: Any, base: Opened | None) -> Any:
    try:
        for view in VIEWS:
            opened = view(opened, base)
    except BaseException:
        opened.close()
        raise
    return opened


def _from_hub(where: str, revision: str | None) -> Path:
    name, _, at = where.partition("@")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) or os.path.exists(os.path.dirname(where)):
        raise ValueError(f"there is no file or directory {where}{_near(Path(where))}")
    try:
        from huggingface_hub import snapshot_download

        fetch = lambda patterns: Path(snapshot_download(name, revision=revision or at or None, allow_patterns=patterns))
        found = fetch(FROM_HUB)
        return found if any(found.glob("*.safetensors")) else fetch([*FROM_HUB, "*.bin"])
    except Exception as error:  # the hub's client raises a dozen kinds; all mean that the model isn't to be had
        said = " ".join(str(error).split())[:300]
        raise ValueError(f"there is no directory {where}, and the hub gives no such model: {said}") from None


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; the folder {path.parent} doesn't exist either"
    names = sorted(p.name for p in path.parent.iterdir() if not p.name.startswith("."))
    return f"; {tree.did_you_mean(path.name, names[:50])}" if names else ""


# ---------------------------------------------------------------- what lies beside the weights
def side_files(folder: Path) -> dict[str, Path]:
    """Configurations, tokenizer, processor, licence …, by name: what is no weights in a folder with a config.json."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and SIDE.match(path.name))
    if "config.json" not in names:
        return {}
    return {name: folder / name for name in names if not name.endswith(".index.json") and not name.startswith(".")}


def read_config(side: Mapping[str, Path]) -> dict[str, Any]:
    """config.json as a dict; {} where there is none."""
    return checkpoints.fields_of(side["config.json"]) if "config.json" in side else {}


__all__ = ["OPENERS", "VIEWS", "Entry", "Opened", "Safetensors", "TensorInfo", "open_checkpoint", "read_config",
           "side_files"]
