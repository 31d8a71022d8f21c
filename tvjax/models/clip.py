"""CLIP (Radford et al., 2021, arXiv:2103.00020) in Flax: logits = exp(s) · cos(visual(image), text(prompt)).

The parameter tree is that of `transformers.CLIPModel`: a leaf's dotted path is its key in `model.safetensors`, its
layout the file's. Published weights, masks and recipes apply as they are.

>>> import jax
>>> model = CLIP(Spec(vision=VisionSpec(8, 16, 1, 2, image_size=4, patch=2), text=None, projection_dim=4))
>>> params = init(model, jax.random.key(0))
>>> image_features(model)(params, jax.numpy.ones((3, 4, 4, 3))).shape
(3, 4)
"""
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tvjax.models import files, folders, open_clip
from tvjax.models.clip_network import CLIP, Spec, TextSpec, VisionSpec, spec
from tvjax.models.files import Pretrained, save_pretrained

__all__ = ["CLIP", "Pretrained", "Spec", "TextSpec", "VisionSpec", "from_pretrained", "image_features", "init",
           "logits", "merge_visual", "save_pretrained", "spec", "text_features", "visual"]

Params = dict[str, Any]
VISUAL = ("vision_model", "visual_projection")
TOWERS = (*VISUAL, "text_model", "text_projection", "logit_scale")


def init(model: CLIP, key: Array) -> Params:
    """Random float32 parameters, drawn as transformers draws them (normal weights, zero biases)."""
    s = model.config
    pixels = jax.ShapeDtypeStruct((1, s.vision.image_size, s.vision.image_size, s.vision.channels), jnp.float32)
    ids = () if s.text is None else (jax.ShapeDtypeStruct((1, s.text.positions), jnp.int32),)
    return dict(model.lazy_init(key, pixels, *ids)["params"])


@functools.cache
def image_features(model: CLIP) -> Callable[[Params, Array], Array]:
    """(params, pixels (batch, height, width, 3)) -> (batch, projection_dim), not normalised.

    `params` may be the whole tree or its visual part alone. A model always gives the same function: `jit` caches hold.
    """
    def apply(params, pixels):
        _check(params, VISUAL, "image features")
        return _run(model, "image_features", params, pixels)
    return apply


@functools.cache
def text_features(model: CLIP) -> Callable[..., Array]:
    """(params, input_ids (prompts, tokens), attention_mask or None) -> (prompts, projection_dim), not normalised."""
    def apply(params, input_ids, attention_mask=None):
        _check(params, ("text_model", "text_projection"), "text features")
        return _run(model, "text_features", params, input_ids, attention_mask)
    return apply


@functools.cache
def logits(model: CLIP) -> Callable[..., Array]:
    """(params, pixels, input_ids, attention_mask or None) -> exp(logit_scale) · cosines, (images, prompts)."""
    def apply(params, pixels, input_ids, attention_mask=None):
        _check(params, (*VISUAL, "text_model", "text_projection", "logit_scale"), "logits")
        return _run(model, "__call__", params, pixels, input_ids, attention_mask)
    return apply


def _run(model: CLIP, method: str, params: Params, *inputs) -> Any:
    return model.apply({"params": params}, *inputs, method=method)


def _check(params: Params, needed: tuple[str, ...], what: str) -> None:
    missing = [name for name in needed if name not in params]
    if missing:
        held = ", ".join(sorted(params)) or "nothing"
        raise ValueError(f"{what} need {', '.join(missing)}, but params hold only {held}.")


def visual(params: Params) -> Params:
    """The subtree that is fine-tuned: {vision_model, visual_projection}, as far as `params` hold it."""
    return {name: params[name] for name in VISUAL if name in params}


def merge_visual(params: Params, visual: Params) -> Params:
    """The whole tree with its visual part (or as much of it as `visual` holds) replaced."""
    strange = sorted(set(visual) - set(VISUAL))
    if strange:
        raise ValueError(f"The visual part holds {', '.join(VISUAL)}; you gave {', '.join(strange)} too.")
    return {**params, **visual}


def _adopt(weights: dict[str, Any], config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Folders of a CLIPVisionModel name their leaves without the tower."""
    if any(name.partition(".")[0] in TOWERS for name in weights):
        return weights, {}
    return {f"vision_model.{name}": leaf for name, leaf in weights.items()}, {}


FAMILY = files.Family("CLIP", {"clip": "CLIPConfig", "clip_vision_model": "CLIPVisionConfig"},
                      lambda config, names: CLIP(config), init, _adopt, TOWERS, tokenizer="CLIPTokenizer",
                      processor="CLIPImageProcessorPil")
OPEN_CLIP = FAMILY._replace(adopt=open_clip.adopt, processor=open_clip.processor, read_config=open_clip.read_config,
                            weights="open_clip_model.safetensors", pickle="open_clip_pytorch_model.bin",
                            config_file=folders.OPEN_CLIP)


def from_pretrained(path_or_hub_id: str | os.PathLike, *, revision: str | None = None) -> Pretrained:
    """The CLIP in a folder, or of that name on the hub (from the local cache where HF_HUB_OFFLINE=1).

    Folders of a vision tower alone (CLIPVisionModel, with or without projection) give params with only that part;
    folders of open_clip's vision transformers give params under Hugging Face names, and are saved as transformers
    keeps them. Leaves keep the file's dtype. Errors: a ValueError that says what is missing, strange or of the wrong
    shape.
    """
    folder = folders.find(path_or_hub_id, revision, FAMILY)
    if not folders.only_open_clip(folder):
        return files.from_pretrained(folder, FAMILY)
    found = files.from_pretrained(path_or_hub_id, OPEN_CLIP, revision=revision)
    return found._replace(family=FAMILY)
