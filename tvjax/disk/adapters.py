"""LoRA adapters as models: W + s·B·A, multiplied in float32 piece by piece, s = α/r (or α/√r).

A directory of PEFT (adapter_config.json, adapter_model.safetensors) is read whole or refused: each of its tensors must
have a place in the base.
"""
import functools
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tvjax import tree
from tvjax.disk.deltas import BLOCK, widened
from tvjax.disk.loraconfig import Config, read_lora_config
from tvjax.disk.match import NARROW, PREFIXES, is_float, ties
from tvjax.disk.readers import OPENERS, VIEWS, WEIGHTS, Opened, TensorInfo, open_checkpoint

CONFIG = "adapter_config.json"
FILES = ("adapter_model.safetensors", "adapter_model.bin")
KEY = re.compile(r"^(?:base_model\.model\.)?(.+)\.lora_(embedding_)?([AB])(\.weight)?$")
KEPT = 8  # pairs of factors that are kept


class Pair(NamedTuple):
    """The tensors A and B of a module, and how its weight is made of them."""

    a: str
    b: str
    scale: float
    turned: bool  # the weight is (in, out): Aᵀ·Bᵀ


def adapter_folder(path: Path) -> Path | None:
    """`path` if it holds an adapter and no model."""
    model = any((path / name).exists() for name in WEIGHTS)
    return path if path.is_dir() and (path / CONFIG).is_file() and not model else None


class Adapter:
    """An adapter before it meets a base: its configuration and its own tensors."""

    def __init__(self, path: Path, where: str):
        self.where, self.path = where, path
        self.config: Config = read_lora_config(path / CONFIG)
        file = next((path / name for name in FILES if (path / name).is_file()), None)
        if file is None:
            raise ValueError(f"{path} has an {CONFIG} but no {FILES[0]}")
        self.inner = open_checkpoint(file)
        self.tensors = self.inner.tensors
        self.close = self.inner.close


def fused(opened: Any, base: Opened | None) -> Any:
    """An adapter as a model, upon `base` or the model that it names; anything else as it is."""
    if not isinstance(opened, Adapter):
        return opened
    if base is not None:
        return Fused(opened, base)
    if not opened.config.base:
        raise ValueError(f"{opened.where} is an adapter that names no base model: give it as a model beside its base")
    own = open_checkpoint(opened.config.base)
    try:
        return Fused(opened, own, own=True)
    except BaseException:
        own.close()
        raise


class Fused:
    """An `Opened` whose tensors are the base's, those that the adapter changes in float32."""

    def __init__(self, adapter: Adapter, base: Opened, *, own: bool = False):
        self.adapter, self.base, self.own, self.where = adapter, base, own, adapter.where
        self.pairs = pairs(adapter, base)
        self.tensors = {name: _changed(info) if name in self.pairs else info for name, info in base.tensors.items()}
        card = adapter.path / "README.md"
        self.config, self.side = base.config, {**base.side, **({card.name: card} if card.is_file() else {})}
        status = os.stat(adapter.path / CONFIG)
        self.identity = {CONFIG: [status.st_size, status.st_mtime_ns], **adapter.inner.identity,
                         **({f"base/{name}": about for name, about in base.identity.items()} if own else {})}
        self._factors = functools.lru_cache(KEPT)(self._read_factors)

    def _read_factors(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(rows, r) and (r, the rest), whose product is the change of the tensor without its scale."""
        pair = self.pairs[name]
        a, b = (widened(self.adapter.inner.whole(one), self.tensors[name].dtype) for one in (pair.a, pair.b))
        a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)  # convolutions: (r, in·h·w) and (out, r·1·1)
        return (np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)) if pair.turned else (b, a)

    def read(self, name, start, stop):
        origin = self.base.read(name, start, stop)
        if name not in self.pairs or start >= stop:
            return origin
        left, right = self._factors(name)
        columns = right.shape[1]
        step = max(1, BLOCK // columns)  # rows multiplied at once: the same ones for all pieces, so the same rounding
        first, last = start // columns // step * step, -(-stop // columns)
        change = np.concatenate([left[row : row + step] @ right for row in range(first, last, step)])
        change = change.reshape(-1)[start - first * columns : stop - first * columns]
        dtype = self.tensors[name].dtype
        return widened(origin, dtype) + change * dtype.type(self.pairs[name].scale)

    def whole(self, name):
        info = self.tensors[name]
        return self.read(name, 0, info.size).reshape(info.shape)

    def close(self) -> None:
        self.adapter.close()
        if self.own:
            self.base.close()


def _changed(info: TensorInfo) -> TensorInfo:
    return TensorInfo(info.shape, np.dtype(tree.wide(info.dtype)))


# ---------------------------------------------------------------- which tensor goes where
def pairs(adapter: Adapter, base: Opened) -> dict[str, Pair]:
    """{the base's tensor: its pair}; ValueError unless each tensor of the adapter has its place."""
    halves: dict[str, dict[str, str]] = {}
    kinds: dict[str, bool] = {}
    alien = [name for name in adapter.tensors if not KEY.match(name)]
    if alien:
        raise ValueError(f"{adapter.where} holds {tree.listing(alien)}, which are no LoRA factors: merge it into its "
                         "base with peft's merge_and_unload, and give that")
    for name in adapter.tensors:
        module, embedding, side, _ = KEY.match(name).groups()  # type: ignore[union-attr]
        halves.setdefault(module, {})[side] = name
        kinds[module] = bool(embedding)
    if lonely := [module for module, found in halves.items() if len(found) < 2]:
        raise ValueError(f"{adapter.where} has only one of the two factors of {tree.listing(lonely)}")
    rename = _renaming(adapter, base, list(halves))
    return {rename[module]: _pair(adapter, base, module, rename[module], found, kinds[module])
            for module, found in halves.items()}


def _renaming(adapter: Adapter, base: Opened, modules: list[str]) -> dict[str, str]:
    """{module: the base's tensor}, under the prefix with which most modules are in the base."""
    ways = [lambda name: name]
    ways += [lambda name, prefix=prefix: prefix + name for prefix in PREFIXES]
    ways += [lambda name, prefix=prefix: name.removeprefix(prefix) for prefix in PREFIXES]
    named = [{module: f"{way(module)}.weight" for module in modules} for way in ways]
    best = max(named, key=lambda names: sum(name in base.tensors for name in names.values()))  # the first of equals
    if missing := [module for module, name in best.items() if name not in base.tensors]:
        tied = " (it ties embeddings: untie them and save it anew)" if ties(base) else ""
        raise ValueError(f"{adapter.where} changes {tree.listing(missing)}, which {base.where} lacks{tied}")
    return best


def _pair(adapter: Adapter, base: Opened, module: str, name: str, found: Mapping[str, str], embedding: bool) -> Pair:
    info, a, b = base.tensors[name], adapter.tensors[found["A"]], adapter.tensors[found["B"]]
    for whose, what, one in ((base.where, name, info), (adapter.where, found["A"], a), (adapter.where, found["B"], b)):
        if not is_float(one) or one.dtype.name in NARROW:
            raise ValueError(f"{what} of {whose} is quantised ({one.dtype.name}): load it dequantised and save it in "
                             "bfloat16 first")
    rank, scale = adapter.config.of(module)
    if len(a.shape) < 2 or len(a.shape) != len(b.shape) or b.shape[1] != a.shape[0] or math.prod(b.shape[2:]) != 1:
        raise ValueError(f"{module} of {adapter.where}: A {list(a.shape)} and B {list(b.shape)} are no pair of factors")
    if a.shape[0] != rank:
        raise ValueError(f"{module} of {adapter.where} has rank {a.shape[0]}, its {CONFIG} says {rank}")
    made = (b.shape[0], *a.shape[1:])
    turned = embedding or adapter.config.turned if made == made[::-1] and len(made) == 2 else made != info.shape
    if info.shape != (made[::-1] if turned else made) or (turned and len(made) != 2):
        raise ValueError(f"{module} of {adapter.where} is made for a weight {list(made)}, the base's is "
                         f"{list(info.shape)}: another base, or a resized vocabulary")
    return Pair(found["A"], found["B"], scale, turned)


OPENERS.insert(0, (adapter_folder, Adapter))
VIEWS.append(fused)
