"""Codecs by name, as configurations call them; what depends on the number of tasks follows from it."""
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tvjax import tree
from tvjax.compression.codec import Codec
from tvjax.compression.lowrank import tsv_c
from tvjax.compression.quantised import bitdelta, emr_codec, rtvq, tvq
from tvjax.compression.sparse import matched_density, t_switch, top_k, ultra_delta
from tvjax.compression.tall import magnitude_masking, tall_codec


def magnitude_pruning(*, tasks: int, positions: str = "free") -> Codec:
    """The baseline of arXiv:2405.07813: the largest magnitudes, as many as cost what TALL-masks of so many tasks do.

    positions: "free" (the paper's: only values count, so it takes more than TALL-masks in truth) or "counted".
    """
    return top_k(density=matched_density(tasks, positions=positions))


CODECS: dict[str, Callable[..., Codec]] = {
    "tall": tall_codec,
    "magnitude_masking": magnitude_masking,
    "magnitude_pruning": magnitude_pruning,
    "emr": emr_codec,
    "tsv_c": tsv_c,
    "bitdelta": bitdelta,
    "tvq": tvq,
    "rtvq": rtvq,
    "top_k": top_k,
    "t_switch": t_switch,
    "ultra_delta": ultra_delta,
}


def build_codec(name: str, options: Mapping[str, Any] | None = None, *, tasks: int) -> Codec:
    """The codec of this name for so many tasks; slips are answered by what there is.

    TSV-C takes 1/tasks as its density where none is given.

    >>> build_codec("tvq", {"width": 3}, tasks=8).name
    'tvq 3 bits'
    """
    if name not in CODECS:
        raise ValueError(f"no codec called {name!r}; {tree.did_you_mean(name, list(CODECS))}")
    known = [option for option in inspect.signature(CODECS[name]).parameters if option not in ("tasks", "merging")]
    options = dict(options or {})
    if unknown := [option for option in options if option not in known]:
        raise ValueError(f"{name} takes {', '.join(known) or 'no options'}; got {', '.join(unknown)}")
    if name == "tsv_c":
        options.setdefault("density", 1 / tasks)
    return CODECS[name](**options, **({"tasks": tasks} if name == "magnitude_pruning" else {}))
