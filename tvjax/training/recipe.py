"""The fine-tuning recipe shared by the task-vector papers: AdamW, clipped gradients, linear warm-up, half a cosine.

lr(s) = lr·(s + 1)/W for s < W, then lr·½(1 + cos(π (s − W)/(S − W))), with W warm-up steps out of S.
Constants: Ortiz-Jimenez et al., 2023 (arXiv:2305.12827) and the code of the papers that build on it.
"""
import dataclasses
import functools
import math

import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The numbers of one fine-tuning run.

    `steps` counts updates of the weights. `batch` is the number of examples in one update; they pass through the model
    in `accumulation` equal parts, so batch=128, accumulation=2 needs the memory of 64 and gives the gradient of 128.

    >>> Recipe(steps=100, warmup=10).lr
    1e-05
    >>> Recipe(steps=100, warmup=100)
    Traceback (most recent call last):
    ...
    ValueError: warmup must be at least 0 and below steps; got warmup=100, steps=100
    """

    steps: int = 2000
    batch: int = 128
    lr: float = 1e-5
    warmup: int = 500
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    clip: float = 1.0
    label_smoothing: float = 0.0
    accumulation: int = 1
    seed: int = 0

    def __post_init__(self):
        for name in ("steps", "batch", "accumulation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {name}={getattr(self, name)}")
        for name in ("lr", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive; got {name}={getattr(self, name)}")
        if not 0 <= self.warmup < self.steps:
            raise ValueError(f"warmup must be at least 0 and below steps; got warmup={self.warmup}, steps={self.steps}")
        if self.batch % self.accumulation:
            raise ValueError(f"accumulation={self.accumulation} must divide batch={self.batch}")


EPOCHS = {
    "cars": 35, "dtd": 76, "eurosat": 12, "gtsrb": 11, "mnist": 5, "resisc45": 15, "sun397": 14, "svhn": 4,
    "cifar10": 6, "cifar100": 6, "stl10": 60, "food101": 4, "flowers102": 147, "fer2013": 10, "pcam": 1, "pets": 82,
    "renderedsst2": 39, "emnist": 2, "fashionmnist": 5, "kmnist": 5,
}
"""Epochs for each vision task, chosen by the papers so that a run takes about 2000 steps of 128 images."""


def epochs_to_steps(epochs, *, examples, batch):
    """The number of updates in `epochs` passes over `examples`, the last one of a pass counted as full.

    >>> epochs_to_steps(EPOCHS["mnist"], examples=55000, batch=128)
    2150
    """
    return epochs * math.ceil(examples / batch)


def schedule(recipe):
    """Learning rate as a function of the step, counted from 0.

    >>> f"{schedule(Recipe())(0):.1e} {schedule(Recipe())(500):.1e} {schedule(Recipe())(1250):.1e}"
    '2.0e-08 1.0e-05 5.0e-06'
    """
    lr, warmup, steps = recipe.lr, recipe.warmup, recipe.steps

    def rate(step):
        step = jnp.asarray(step, jnp.float32)
        # ½(1 + cos(π − x)) = sin²(x/2): the left side loses its digits towards the end, where x is small
        cosine = jnp.square(jnp.sin(0.5 * math.pi * (steps - step) / (steps - warmup)))
        return lr * jnp.where(step < warmup, (step + 1) / max(warmup, 1), cosine)

    return rate


@functools.lru_cache
def optimizer(recipe):
    """The recipe as an optax transformation: clip by the global norm, then AdamW under `schedule`.

    Weight decay acts on every parameter, biases and norms included, as in the papers' code. Accumulation is not in
    here: `fit` averages the gradient over the parts before this sees it. Equal recipes give the same object, so that a
    step compiled for one run serves the next.
    """
    return optax.chain(optax.clip_by_global_norm(recipe.clip), adamw(recipe))


@functools.lru_cache
def adamw(recipe):
    """AdamW under the recipe's `schedule`, without the clipping."""
    return optax.adamw(schedule(recipe), recipe.b1, recipe.b2, recipe.eps, weight_decay=recipe.weight_decay)
