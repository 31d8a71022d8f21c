"""One course of learning: epochs of steps, the model judged after each, the best epoch kept, the start included.

Since the start competes, what is learned is never worse than it on the split that judges: for task vectors that start
is the pretrained model itself, λ = 0.
"""
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from tvjax import training
from tvjax.learning.ways import Way, model

DECAYS = ("constant", "cosine")


@dataclasses.dataclass(frozen=True)
class Course:
    """The numbers of a course; the defaults are those of task addition.

    lr: the rate of AdamW, `decay` its course over all steps, without a warm-up. clip: the largest global norm.
    """

    epochs: int = 20
    batch: int = 128
    lr: float = 1e-3
    weight_decay: float = 0.1
    decay: str = "constant"
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if self.decay not in DECAYS:
            raise ValueError(f"decay is one of {', '.join(DECAYS)}; got {self.decay!r}")
        for name in ("epochs", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        for name in ("lr", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")


class Verdict(NamedTuple):
    """What a judge says of a model: its value, larger being better, −∞ where it may not be chosen; whether to stop."""

    value: float
    stop: bool = False
    told: tuple = ()


class Learned(NamedTuple):
    """`params` of the best epoch (0 is the start), its verdict, those of all epochs, and what the course took."""

    params: Any
    epoch: int
    verdict: Verdict
    trace: tuple[Verdict, ...]
    losses: np.ndarray
    seconds: float


def learn(loss, way: Way, feed, course: Course, *, steps: int, extras: Any = (), judge: Callable | None = None,
          transform=None) -> Learned:
    """Trains `way.start` for `course.epochs` epochs of `steps` steps.

    loss: (params, batch, key, (way.frozen, extras)) -> scalar or (scalar, aux); the same object for the same way, so
      that it compiles once.
    feed: batches, as `training.fit` takes them. judge: (point, epoch) -> `Verdict`; None keeps the last epoch.
    transform: an optax transformation in place of the course's AdamW, the same object for equal courses.

    Raises ValueError where the judge allows no epoch, the start included.
    """
    recipe = training.Recipe(steps=course.epochs * steps, batch=course.batch, lr=course.lr, warmup=0,
                             weight_decay=course.weight_decay, clip=course.clip, seed=course.seed)
    kept: list = [jax.device_get(way.start), 0]
    trace = [judge(model(way, way.start), 0)] if judge else []

    def watch(params, done):
        if judge is None:
            return False
        verdict = judge(model(way, params), done // steps)
        if verdict.value > max(one.value for one in trace):
            kept[:] = [jax.device_get(params), done // steps]
        trace.append(verdict)
        return verdict.stop

    fitted = training.fit(loss, way.start, feed, recipe, frozen=(way.frozen, extras), progress=False, log_every=steps,
                          transform=transform or _transform(course, recipe.steps), watch=watch, watch_every=steps)
    if judge is None:
        return Learned(jax.device_get(fitted.params), course.epochs, Verdict(float("nan")), (), fitted.losses,
                       fitted.seconds)
    best = trace[kept[1]]
    if not best.value > -np.inf:
        raise ValueError("no epoch may be chosen, not even the start: the judge excludes all of them")
    return Learned(kept[0], kept[1], best, tuple(trace), fitted.losses, fitted.seconds)


def _transform(course: Course, steps: int):
    return adamw(course.lr, course.weight_decay, course.decay, course.clip, steps)


@functools.lru_cache
def adamw(lr: float, weight_decay: float, decay: str, clip: float, steps: int):
    """Clipped AdamW at a constant rate, or on half a cosine over `steps`."""
    rate = optax.cosine_decay_schedule(lr, steps) if decay == "cosine" else lr
    return optax.chain(optax.clip_by_global_norm(clip), optax.adamw(rate, weight_decay=weight_decay))


def epoch_steps(sizes, batch: int) -> int:
    """Steps of an epoch that ends with the shortest of several data sets: ⌈least size/batch⌉.

    >>> epoch_steps([250, 100], 16)
    7
    """
    return max(1, -(-min(sizes) // batch))
