"""Views of images, drawn on the device: a random resized crop and, where the task allows it, a flip.

Crop of a share of the area in [least, 1] and a ratio of sides in [3/4, 4/3], resized to the old size with cubic
weights (the augmentation of Tip-Adapter and of arXiv:2407.02880). Inputs that are no images pass as they are.
"""
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

KINDS = ("none", "crop", "crop and flip")
RATIO = (3 / 4, 4 / 3)


@functools.cache
def view(kind: str, *, least: float = 0.5) -> Callable | None:
    """(key, images (N, height, width, channels)) -> float32 images in the range of the given ones; None for "none".

    kind: "none", "crop" (where a mirror image is another class: characters, arrows) or "crop and flip".
    """
    if kind not in KINDS:
        raise ValueError(f"a view is one of {', '.join(map(repr, KINDS))}; got {kind!r}")
    if not 0 < least <= 1:
        raise ValueError(f"the least share of the area is above 0 and at most 1; got {least}")
    if kind == "none":
        return None
    flip = 0.5 if kind == "crop and flip" else 0.0

    def draw(key, images):
        if images.ndim != 4:
            raise ValueError(f"a view needs images (N, height, width, channels); got shape {images.shape}")
        keys = jax.random.split(key, images.shape[0])
        made = jax.vmap(functools.partial(_one, least=least, flip=flip))(keys, images.astype(jnp.float32))
        return jnp.clip(made, 0, 255) if jnp.issubdtype(images.dtype, jnp.integer) else made
    return draw


def _one(key, image, *, least, flip):
    """A random crop of one image, stretched over its whole frame."""
    size, ratio, place, mirror = jax.random.split(key, 4)
    share = jax.random.uniform(size, minval=least, maxval=1.0)
    stretch = jnp.exp(0.5 * jax.random.uniform(ratio, minval=math.log(RATIO[0]), maxval=math.log(RATIO[1])))
    sides = jnp.minimum(jnp.sqrt(share) * jnp.stack([1 / stretch, stretch]), 1.0)  # of height and width
    corner = jax.random.uniform(place, (2,)) * (1 - sides)
    shape = jnp.array(image.shape[:2], jnp.float32)
    crop = jax.image.scale_and_translate(image, image.shape, (0, 1), 1 / sides, -corner * shape / sides,
                                         method="cubic", antialias=False)
    return jnp.where(jax.random.uniform(mirror) < flip, crop[:, ::-1], crop)
