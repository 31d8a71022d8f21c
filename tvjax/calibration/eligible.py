"""Which tensors are scored, and so may be selected: convolutions, attention, linear layers and norms.

Never the embeddings (of classes, positions, tokens), the projections into the joint space, or a head.
"""
import re
from typing import Any

from tvjax import tree
from tvjax.merging import HEADS

EMBEDDINGS = (r"(^|\.)(class_embedding|positional_embedding|position_embeddings?|token_embedding|word_embeddings"
              r"|token_type_embeddings|embed_tokens|shared|relative_attention_bias|wte|wpe|cls_token)(\.|$)")
PROJECTIONS = r"(^|\.)(visual_projection|text_projection|proj|logit_scale)(\.|$)"
ATTENTION = r"(^|\.)(self_attn|attn|attention|SelfAttention|EncDecAttention|attnpool)\."
BIASES = r"(^|[._])bias$"  # what BitFit tunes (arXiv:2106.10199)


def is_scored(name: str) -> bool:
    """Whether a leaf of that name is scored.

    >>> [is_scored(name) for name in ("layers.0.self_attn.q_proj.weight", "visual_projection.weight", "wte.weight")]
    [True, False, False]
    """
    return not any(re.search(pattern, name) for pattern in (EMBEDDINGS, PROJECTIONS, HEADS))


def scored(params: Any, within: str = "") -> list[str]:
    """The names of the scored leaves, those that contain the regular expression `within` alone.

    Raises:
      ValueError: where there is none.

    >>> scored({"classifier": {"weight": 0.0}, "fc": {"weight": 0.0, "bias": 0.0}}, within="weight$")
    ['fc.weight']
    """
    names = [name for name in tree.flatten(params) if is_scored(name) and re.search(within, name)]
    if not names:
        raise ValueError(f"no scored leaf matches {within!r}; there are {tree.listing(list(tree.flatten(params)))}")
    return names


KINDS = {  # the first pattern that a name contains
    "patches": r"(^|\.)(patch_embedding|conv\d)(\.|$)",
    "embedding": EMBEDDINGS,
    "LN": r"(^|\.)([a-z_]*layer_?norm\d?|LayerNorm|pre_layrnorm|[a-z]*ln_?[a-z0-9]*|norm\d?|bn\d)(\.|$)",
    "Q": r"(^|\.)(q_proj|query|q)(\.|$)",
    "K": r"(^|\.)(k_proj|key|k)(\.|$)",
    "V": r"(^|\.)(v_proj|value|v)(\.|$)",
    "QKV": r"(^|\.)(c_attn|in_proj_weight|in_proj_bias)(\.|$)",
    "O": r"(^|\.)(out_proj|o|attention\.output\.dense|attn\.c_proj)(\.|$)",
    "MLP": r"(^|\.)(mlp|fc\d|intermediate|output|DenseReluDense)(\.|$)",
}


def kind(name: str) -> str:
    """What a leaf is in a transformer: Q, K, V (or QKV in one), O, MLP, LN, embedding, or "other".

    >>> [kind(f"layers.0.{name}.weight") for name in ("attn.q_proj", "mlp.fc1", "layer_norm1", "attn.out_proj")]
    ['Q', 'MLP', 'LN', 'O']
    """
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")
