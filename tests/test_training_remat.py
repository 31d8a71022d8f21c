"""Blocks that are computed again: the same numbers, and less to keep."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import training
from tvjax.models import clip

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_the_same_gradient_with_less_kept():
    model = clip.CLIP(clip.Spec(clip.VisionSpec(8, 16, 3, 2, image_size=8, patch=2), text=None, projection_dim=4))
    params, apply = clip.init(model, jax.random.key(0)), clip.image_features(model)
    images = jax.random.normal(jax.random.key(1), (2, 8, 8, 3))
    again = training.rematerialised(apply)
    assert again is training.rematerialised(apply)
    loss = lambda f: lambda params, images: jnp.sum(f(params, images) ** 2)
    one, other = (jax.jit(jax.grad(loss(f)))(params, images) for f in (apply, again))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, other)
    assert training.held_bytes(loss(again), params, images) < 0.5 * training.held_bytes(loss(apply), params, images)
