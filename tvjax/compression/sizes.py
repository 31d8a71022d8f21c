"""How many bits a collection of fine-tuned models takes, by the formulas of arXiv:2405.07813, in closed form.

P counts the parameters that fine-tuning moves, F those it leaves alone (kept once), T the tasks. Heads count where they
are given. Numbers are of 32 bits.
"""
from collections.abc import Callable
from typing import NamedTuple

from tvjax import tree

FLOAT = 32


class Counts(NamedTuple):
    """P, F, T, and the entries of all tasks' heads."""

    trained: int
    frozen: int
    tasks: int
    heads: int = 0


def _finetuned(c: Counts) -> int:
    return FLOAT * (c.tasks * c.trained + c.frozen)


def _single(c: Counts) -> int:
    return FLOAT * (c.trained + c.frozen)


def _masks(c: Counts) -> int:
    return (2 * FLOAT + c.tasks) * c.trained + FLOAT * c.frozen


def _emr(c: Counts) -> int:
    return _masks(c) + FLOAT * c.tasks


FORMULAS: dict[str, Callable[[Counts], int]] = {
    "finetuned": _finetuned, "single": _single, "tall": _masks, "magnitude masking": _masks, "emr": _emr,
}


def formula(method: str, counts: Counts) -> int:
    """The bits of "finetuned" (T full models), "single" (one merged model), "tall", "magnitude masking" or "emr".

    θ0 is in all of them but "finetuned". Heads are kept in full by all.

    >>> round(gigabits(formula("tall", Counts(87_849_216, 25_599_489, 20))), 2)
    8.2
    """
    if method not in FORMULAS:
        raise ValueError(f"no formula for {method!r}; {tree.did_you_mean(method, list(FORMULAS))}")
    return FORMULAS[method](counts) + FLOAT * counts.heads


def of_state(bits: int, counts: Counts) -> int:
    """The bits of a whole collection: θ0, the frozen part, heads, and a codec's state of so many bits."""
    return FLOAT * (counts.trained + counts.frozen + counts.heads) + bits


def per_weight(bits: int, counts: Counts) -> float:
    """Bits for each trained weight and task, of a codec's state alone (θ0 left out).

    >>> per_weight((32 + 8) * 100, Counts(100, 0, 8))
    5.0
    """
    return bits / (counts.trained * counts.tasks)


def gigabits(bits: int) -> float:
    """Bits in units of 10⁹."""
    return bits / 1e9


VISUAL = {"ViT-B/32": (87_849_216, 25_599_489), "ViT-B/16": (86_192_640, 25_599_489),
          "ViT-L/14": (303_966_208, 38_595_841)}
"""(P, F) of the CLIP image towers as OpenCLIP keeps them: F is what is left of the text tower in published files."""
