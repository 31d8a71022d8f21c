"""Where learned coefficients are large: by kind of tensor, by depth, by task vector (arXiv:2407.02880, figure 10)."""
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tvjax import tree

KINDS = (("attention", ("self_attn", "attention", "attn", "q_proj", "k_proj", "v_proj", "out_proj")),
         ("norm", ("norm", "ln_", "layrnorm")),
         ("mlp", ("mlp", "fc1", "fc2", "intermediate", "output.dense", "c_fc", "c_proj")),
         ("embedding", ("embedding", "embeddings")))


class Summary(NamedTuple):
    """Five numbers of a group of coefficients, their mean magnitude, and how many they are."""

    least: float
    lower: float
    median: float
    upper: float
    greatest: float
    magnitude: float
    count: int


def kind(name: str) -> str:
    """What a tensor is part of, and whether it is a weight or a bias.

    >>> kind("encoder.layers.3.self_attn.q_proj.bias"), kind("encoder.layers.3.layer_norm1.weight")
    ('attention bias', 'norm weight')
    """
    part = next((kind for kind, words in KINDS if any(word in name.lower() for word in words)), "other")
    return f"{part} {'bias' if name.endswith('bias') else 'weight'}"


def depth(name: str) -> str:
    """The number of the block that a tensor is in, "outside" of any.

    >>> depth("encoder.layers.11.mlp.fc1.weight"), depth("visual_projection.weight")
    ('11', 'outside')
    """
    found = tree.block(name)
    return "outside" if found is None else str(found[1])


def summaries(coefficients: Mapping[str, Any], *, by: str) -> dict[str, Summary]:
    """{group: five numbers of its coefficients}; by: "kind", "depth" or "vector" (its index)."""
    groups: dict[str, list] = {}
    for group, values in _pieces(coefficients, by):
        groups.setdefault(group, []).append(np.asarray(values, np.float64).ravel())
    order = sorted(groups, key=tree.natural)
    return {group: _summary(np.concatenate(groups[group])) for group in order}


def _pieces(coefficients: Mapping[str, Any], by: str) -> Iterable[tuple[str, Any]]:
    if by not in ("kind", "depth", "vector"):
        raise ValueError(f"coefficients are grouped by kind, depth or vector; got {by!r}")
    for name, c in coefficients.items():
        if by == "vector":
            yield from ((str(i), row) for i, row in enumerate(np.asarray(c)))
        else:
            yield {"kind": kind, "depth": depth}[by](name), c


def _summary(values) -> Summary:
    least, lower, median, upper, greatest = (float(x) for x in np.quantile(values, (0, 0.25, 0.5, 0.75, 1)))
    return Summary(least, lower, median, upper, greatest, float(np.abs(values).mean()), int(values.size))
