"""CLIP models with the names of open_clip and OpenAI, seen under those of Hugging Face.

One tensor there may be several here (q, k and v are one `in_proj_weight`), and projections are transposed. Nothing is
copied: pieces are read where they lie.
"""
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tvjax import tree
from tvjax.counterparts import BLOCK, NUMBERS, TEXT, VISUAL, Part, counterparts
from tvjax.disk.readers import VIEWS, Opened, TensorInfo

MARK = "visual.conv1.weight"


class Renamed:
    """An `Opened` whose tensors are parts of another's."""

    def __init__(self, inner: Opened, parts: Mapping[str, Part]):
        self.inner, self.parts, self.where = inner, parts, inner.where
        self.tensors = {name: TensorInfo(part.shape, inner.tensors[part.name].dtype) for name, part in parts.items()}
        self.config, self.side, self.identity = inner.config, inner.side, inner.identity

    def read(self, name, start, stop):
        part = self.parts[name]
        if part.turned:
            return self.whole(name).reshape(-1)[start:stop]
        return self.inner.read(part.name, part.start + start, part.start + stop)

    def whole(self, name):
        part = self.parts[name]
        if part.turned:
            return np.ascontiguousarray(self.inner.whole(part.name).T)
        return self.read(name, 0, math.prod(part.shape)).reshape(part.shape)

    def close(self) -> None:
        self.inner.close()


def seen(opened: Any, base: Any = None) -> Any:
    """`opened` under Hugging Face names if it holds a vision transformer of open_clip or OpenAI, else as it is.

    Raises ValueError if only part of its names have counterparts, or if a counterpart is missing.
    """
    marks = [name for name in opened.tensors if name == MARK or name.endswith(f".{MARK}")]
    prefix = marks[0].removesuffix(MARK) if len(marks) == 1 else ""
    if len(marks) != 1 or f"{prefix}visual.class_embedding" not in opened.tensors:
        return opened  # another family: residual networks have no class embedding
    parts, alien = {}, []
    for name, info in opened.tensors.items():
        theirs = name.removeprefix(prefix)
        if theirs not in NUMBERS:
            found = counterparts(theirs, name, info.shape) if name.startswith(prefix) else {}
            parts |= found
            alien += [] if found else [name]
    missing = sorted(_complete(parts) - set(parts), key=tree.natural)
    if alien or missing:
        why = "have no Hugging Face name" if alien else "would be missing"
        raise ValueError(f"{opened.where} has names of open_clip, but only part of them fits its vision transformer: "
                         f"{tree.listing(alien or missing)} {why}; convert it with transformers first")
    return Renamed(opened, parts)


def _complete(parts: Mapping[str, Part]) -> set[str]:
    """What the towers of which there is a part consist of."""
    wanted = set(VISUAL.values())
    wanted |= set(TEXT.values()) if any(name.startswith("text_model") for name in parts) else set()
    modules = [*BLOCK.values(), *(f"self_attn.{letter}_proj" for letter in "qkv")]
    layers = {found[0] for name in parts if (found := re.match(r"^.*\.layers\.\d+", name))}
    kinds = ("weight", "bias")
    return wanted | {f"{layer}.{module}.{kind}" for layer in layers for module in modules for kind in kinds}


VIEWS.append(seen)
