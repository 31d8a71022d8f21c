"""The names of CLIP's vision transformers in OpenAI's and open_clip's files, and their counterparts of Hugging Face.

One tensor there may be several here (q, k and v are one `in_proj_weight`), and projections are transposed.
"""
import math
import re
from typing import NamedTuple

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
