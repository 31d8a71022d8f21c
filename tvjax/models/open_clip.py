"""Folders of open_clip: a vision transformer's configuration, weights and image processor as transformers has them.

Names are those of Hugging Face from then on (`tvjax.counterparts`); residual networks keep theirs.
"""
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tvjax.counterparts import NUMBERS, counterparts
from tvjax.models import files, folders

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
KNOWN = {"model_cfg": ("embed_dim", "vision_cfg", "text_cfg", "quick_gelu", "init_logit_scale"),
         "vision_cfg": ("image_size", "layers", "width", "patch_size", "head_width", "mlp_ratio"),
         "text_cfg": ("context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio")}


def read_config(folder: Path) -> Any:
    """The transformers.CLIPConfig of a vision transformer in open_clip_config.json; a ValueError for others."""
    import transformers

    about = folders.open_clip_config(folder)["model_cfg"]
    vision, text = _part(about, "vision_cfg", folder), _part(about, "text_cfg", folder)
    _known(about, "model_cfg", folder)
    if isinstance(vision["layers"], list):
        raise ValueError(f"{folder} holds a residual network: tvjax.models.clip_resnet reads it.")
    act = "quick_gelu" if about.get("quick_gelu") else "gelu"
    words = text.get("vocab_size", 49408)
    tower = lambda part, heads: dict(hidden_size=part["width"], num_hidden_layers=part["layers"], hidden_act=act,
                                     num_attention_heads=heads, projection_dim=about["embed_dim"],
                                     intermediate_size=int(part["width"] * part.get("mlp_ratio", 4.0)))
    return transformers.CLIPConfig(
        vision_config=dict(**tower(vision, vision["width"] // vision.get("head_width", 64)),
                           image_size=vision.get("image_size", 224), patch_size=vision["patch_size"]),
        text_config=dict(**tower(text, text["heads"]), vocab_size=words, eos_token_id=words - 1,
                         bos_token_id=words - 2, max_position_embeddings=text.get("context_length", 77)),
        projection_dim=about["embed_dim"])


def _part(about: Mapping[str, Any], name: str, folder: Path) -> Mapping[str, Any]:
    part = about.get(name, {})
    needed = ("width", "layers", "patch_size") if name == "vision_cfg" else ("width", "layers", "heads")
    missing = [key for key in needed if key not in part]
    if missing and not isinstance(part.get("layers"), list):
        raise ValueError(f"{folder / folders.OPEN_CLIP} says nothing of {', '.join(missing)} in {name}; this reads "
                         "open_clip's own vision transformers and text towers.")
    _known(part, name, folder)
    return part


def _known(part: Mapping[str, Any], name: str, folder: Path) -> None:
    strange = [key for key, value in part.items() if key not in KNOWN[name] and value not in (None, False)]
    if strange:
        raise ValueError(f"{folder / folders.OPEN_CLIP} sets {', '.join(strange)} in {name}, which changes the network "
                         "in a way that is not supported.")


def adopt(weights: files.Flat, config: Any) -> tuple[files.Flat, files.Flat]:
    """Weights under Hugging Face names, cut and turned; names without a counterpart are kept, to be complained of."""
    made: files.Flat = {}
    for name, leaf in weights.items():
        if name in NUMBERS:
            continue
        parts = counterparts(name, name, leaf.shape)
        for ours, part in parts.items():
            flat = leaf.T if part.turned else leaf.reshape(-1)[part.start:part.start + math.prod(part.shape)]
            made[ours] = np.ascontiguousarray(flat).reshape(part.shape)
        made |= {} if parts else {name: leaf}
    return made, {}


def processor(folder: Path) -> Any:
    """The image processor that a configuration of open_clip asks for."""
    import transformers

    about = folders.open_clip_config(folder)
    side, looks = about["model_cfg"]["vision_cfg"].get("image_size", 224), about.get("preprocess_cfg", {})
    return transformers.CLIPImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side},
        image_mean=list(looks.get("mean", MEAN)), image_std=list(looks.get("std", STD)))
