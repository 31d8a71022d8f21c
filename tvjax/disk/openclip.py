"""CLIP models with the names of open_clip and OpenAI, seen under those of Hugging Face.

One tensor there may be several here (q, k and v are one `in_proj_weight`), and projections are transposed. Nothing is
copied: pieces are read where they lie.
"""
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tvjax import tree
from tvjax.disk.readers import VIEWS, Opened, TensorInfo

MARK = "visual.conv1.weight"
BLOCK = {"ln_1": "layer_norm1", "ln_2": "layer_norm2", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2",
         "attn.out_proj": "self_attn.out_proj"}
VISUAL = {"visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
          "visual.class_embedding": "vision_model.embeddings.class_embedding",
          "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
          "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",  # sic
          "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
          "visual.ln_post.weight": "vision_model.post_layernorm.weight",
          "visual.ln_post.bias": "vision_model.post_layernorm.bias", "visual.proj": "visual_projection.weight"}
TEXT = {"token_embedding.weight": "text_model.embeddings.token_embedding.weight",
        "positional_embedding": "text_model.embeddings.position_embedding.weight",
        "ln_final.weight": "text_model.final_layer_norm.weight", "ln_final.bias": "text_model.final_layer_norm.bias",
        "text_projection": "text_projection.weight"}
TURNED = ("visual.proj", "text_projection")
SAME = {"logit_scale": "logit_scale"}
NUMBERS = ("input_resolution", "context_length", "vocab_size", "attn_mask")  # what OpenAI's files hold besides
TOWERS = {"visual.transformer": "vision_model.encoder", "transformer": "text_model.encoder"}
RESBLOCK = re.compile(r"^(visual\.transformer|transformer)\.resblocks\.(\d+)\.(.+?)[._](weight|bias)$")


class Part(NamedTuple):
    """Entries of another tensor: from which on, and with rows and columns exchanged or not."""

    name: str
    start: int
    shape: tuple[int, ...]
    turned: bool


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


def counterparts(theirs: str, name: str, shape: tuple[int, ...]) -> dict[str, Part]:
    """{Hugging Face name: part} of one tensor; {} where it has no counterpart.

    >>> list(counterparts("visual.transformer.resblocks.2.attn.in_proj_bias", "", (6,)))[0]
    'vision_model.encoder.layers.2.self_attn.q_proj.bias'
    """
    if ours := (VISUAL | TEXT | SAME).get(theirs):
        turned = theirs in TURNED and len(shape) == 2
        return {ours: Part(name, 0, shape[::-1] if turned else shape, turned)}
    match = RESBLOCK.match(theirs)
    if match is None:
        return {}
    tower, layer, module, kind = match.groups()
    where = f"{TOWERS[tower]}.layers.{layer}"
    if module == "attn.in_proj" and shape and shape[0] % 3 == 0:
        third = (shape[0] // 3, *shape[1:])
        return {f"{where}.self_attn.{letter}_proj.{kind}": Part(name, i * math.prod(third), third, False)
                for i, letter in enumerate("qkv")}
    return {f"{where}.{BLOCK[module]}.{kind}": Part(name, 0, shape, False)} if module in BLOCK else {}


def _complete(parts: Mapping[str, Part]) -> set[str]:
    """What the towers of which there is a part consist of."""
    wanted = set(VISUAL.values())
    wanted |= set(TEXT.values()) if any(name.startswith("text_model") for name in parts) else set()
    modules = [*BLOCK.values(), *(f"self_attn.{letter}_proj" for letter in "qkv")]
    layers = {found[0] for name in parts if (found := re.match(r"^.*\.layers\.\d+", name))}
    kinds = ("weight", "bias")
    return wanted | {f"{layer}.{module}.{kind}" for layer in layers for module in modules for kind in kinds}


VIEWS.append(seen)
