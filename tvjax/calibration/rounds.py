"""Calibration of a TaLoS mask: in each of R rounds the active entries are scored anew and the most sensitive leave.

Round r takes examples of its own, scores the entries at θ0 and keeps the d_r·N lowest scores among those still active,
d_r = (1 − s)^(r/R) (arXiv:2504.02620). What has left stays at θ0 in later rounds' forward passes or, in the authors'
code, at 0.1·θ0.
"""
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import tree
from tvjax.calibration import masks
from tvjax.calibration.gradients import BUDGET, count_examples
from tvjax.calibration.scores import sensitivity

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"score": "fisher", "soft": 1.0, "batches_per_round": 10, "embeddings": "frozen", "moments": "chosen",
              "norm": "chosen"},
    "official": {"score": "logit_sq", "soft": 0.1, "batches_per_round": None, "embeddings": "dense", "moments": "all",
                 "norm": "all"},
}
"""Where paper and released code differ. The last three are training's: what becomes of tensors that are not scored
(the code trains them whole), and what Adam's moments and the clip norm see (`training.masked_adamw`)."""
CALIBRATION = ("score", "soft", "batches_per_round")  # what of a preset `calibrate` takes


class Calibrated(NamedTuple):
    """`mask` over the scored tensors; `kept` entries and `examples` after and in each round; wall `seconds`."""

    mask: Any
    kept: tuple[int, ...]
    examples: tuple[int, ...]
    seconds: float


def calibrate(logits: Callable, params: Any, examples: Any, *shared, sparsity: float = 0.9, rounds: int = 4,
              score: str = "fisher", samples: int = 1, batches_per_round: int | None = 10, batch: int = 128,
              soft: float = 1.0, keep: str = "lowest", seed: int = 0, budget: int = BUDGET,
              devices=None) -> Calibrated:
    """The mask of the (1 − sparsity) share of `params` to which the model's output is least sensitive.

    logits: (params, example, *shared) -> (classes,), see `sensitivity`. params: the scored tensors (`eligible.scored`)
    alone. examples: a tree of arrays, of the validation split. batches_per_round: how many batches of `batch` examples
    a round draws at random, without putting back (all examples where there are fewer); None: every round takes all.
    soft: the factor of excluded weights in the forward pass. keep: "lowest", or "highest" for the opposite mask, an
    ablation. The mask follows from the seed: a round's examples and the classes drawn for them depend on (seed, round)
    alone.

    Raises:
      ValueError: for a sparsity outside of (0, 1), no examples, scores that are all zero or not finite (the tensors
        are named), a budget that does not hold the gradient of one example.
    """
    if not 0 <= soft <= 1:
        raise ValueError(f"soft is the factor of excluded weights, from 0 to 1; got {soft}")
    begun, active, kept, seen = time.perf_counter(), masks.full(params), [], []
    for number, density in enumerate(masks.densities(sparsity=sparsity, rounds=rounds)):
        chosen = round_examples(count_examples(examples), number, batches=batches_per_round, batch=batch, seed=seed)
        part = jax.tree.map(lambda x, chosen=chosen: x[chosen], examples)
        found = sensitivity(logits, softened(params, active, soft), part, *shared, score=score, samples=samples,
                            seed=round_seed(seed, number), budget=budget, devices=devices)
        active = masks.narrowed(found, active, density=density, keep=keep)
        kept.append(masks.count(active))
        seen.append(len(chosen))
    return Calibrated(active, tuple(kept), tuple(seen), time.perf_counter() - begun)


def round_examples(count: int, number: int, *, batches: int | None, batch: int, seed: int) -> np.ndarray:
    """The places of the examples of round `number`, in rising order; all of them where `batches` is None.

    >>> [len(round_examples(count, 0, batches=2, batch=100, seed=0)) for count in (1000, 50)]
    [200, 50]
    """
    if batches is None:
        return np.arange(count)
    if batches < 1 or batch < 1:
        raise ValueError(f"a round takes at least one batch of one example; got {batches} batches of {batch}")
    drawn = np.random.default_rng((seed, number)).permutation(count)
    return np.sort(drawn[:batches * batch])


def round_seed(seed: int, number: int) -> int:
    """A seed of its own for each round."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0] >> 1)


@jax.jit
def softened(params, active, soft):
    """θ0 with the entries outside of the mask multiplied by `soft`; the same bits where `soft` is 1.

    >>> softened({"w": jnp.array([1.0, 1.0])}, {"w": jnp.array([True, False])}, 0.5)["w"].tolist()
    [1.0, 0.5]
    """
    return jax.tree.map(lambda x, a: jnp.where(a, x, (soft * x).astype(x.dtype)), params, active)


def preset(name: str) -> dict[str, Any]:
    """The options of a preset, "paper" or "official"; ValueError with the nearest name where there is none.

    >>> preset("official")["soft"]
    0.1
    """
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; {tree.did_you_mean(str(name), list(PRESETS))}")
    return PRESETS[name]
