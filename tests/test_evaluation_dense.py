"""Dense prediction: mean IoU by hand, tokens of an encoder, pixels from patches, scenes of glyphs."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import adapters, tangent
from tvjax.data import glyph_scenes
from tvjax.evaluation import dense
from tvjax.models import clip

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_mean_iou_is_the_mean_of_each_classes_own():
    rng = np.random.default_rng(0)
    predicted, labels = rng.integers(0, 4, (2, 5, 7)), rng.integers(0, 4, (2, 5, 7))
    by_hand = [np.sum((predicted == c) & (labels == c)) / np.sum((predicted == c) | (labels == c)) for c in range(4)]
    assert dense.mean_iou(dense.confusion(predicted, labels, classes=4)) == pytest.approx(np.mean(by_hand))


def test_a_class_that_never_occurs_does_not_count():
    assert dense.mean_iou(dense.confusion([0, 0], [0, 0], classes=3)) == 1
    with pytest.raises(ValueError, match="no pixel"):
        dense.mean_iou(np.zeros((2, 2)))
    with pytest.raises(ValueError, match="2 predictions and 3 labels"):
        dense.confusion([0, 0], [0, 0, 0], classes=2)
    with pytest.raises(ValueError, match="from 0 to 1"):
        dense.confusion([2], [0], classes=2)


def test_pixels_come_from_their_patches():
    """A head that copies features: pixel (r, c) shows the feature of its place inside of its patch."""
    features = jnp.arange(4 * 4, dtype=jnp.float32).reshape(1, 4, 4)  # 2 × 2 patches of 2 × 2 pixels, one class
    picture = dense.unfold(features, jnp.eye(4), patch=2)[0, :, :, 0]
    assert picture.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


def test_tokens_of_an_encoder_take_adapters():
    model = clip.CLIP(clip.Spec(clip.VisionSpec(8, 16, 1, 2, image_size=8, patch=4), None, projection_dim=4))
    apply, theta0 = clip.image_features(model), clip.init(model, jax.random.key(0))
    encode, x = dense.tokens(apply, "vision_model.encoder", skip=1), jnp.ones((2, 8, 8, 3))
    assert encode(theta0, x).shape == (2, 4, 8)
    method = adapters.Lora(rank=2)
    phi0 = adapters.start(method, adapters.find(encode, theta0, x))
    phi = jax.tree.map(lambda x: x + 0.1, phi0)
    moved = jax.jit(adapters.linearised(encode, method, "network"))(theta0, phi0, phi, x)
    value, slope = jax.jvp(lambda p: adapters.adapted(encode, method)(theta0, p, x), (phi0,),
                           (tangent.difference(phi, phi0),))
    np.testing.assert_allclose(moved, value + slope, atol=1e-5)
    with pytest.raises(ValueError, match="calls no module 'decoder'"):
        dense.tokens(apply, "decoder")(theta0, x)


def test_the_ridge_head_reads_pixels_that_tokens_tell():
    labels = np.random.default_rng(0).integers(0, 3, (20, 4, 4))
    tokens = np.eye(3)[labels].reshape(20, 2, 2, 2, 2, 3).transpose(0, 1, 3, 2, 4, 5).reshape(20, 4, 12)
    head = dense.ridge_head(tokens, labels, classes=3, patch=2, ridge=1e-3)
    logits = dense.unfold(jnp.asarray(tokens, jnp.float32), head, patch=2)
    assert (np.asarray(logits).argmax(-1) == labels).all()


def test_words_are_the_same_each_time_and_all_occur():
    one, again = (glyph_scenes.words("val", count=60) for _ in range(2))
    np.testing.assert_array_equal(one.images, again.images)
    assert set(one.labels.tolist()) == set(range(len(glyph_scenes.WORDS)))
    assert not np.array_equal(one.images, glyph_scenes.words("train", count=60).images)
    with pytest.raises(ValueError, match="no split"):
        glyph_scenes.words("all", count=1)


def test_scenes_are_the_same_each_time_and_splits_differ():
    first, again = (glyph_scenes.load("greek scenes", "train", count=3) for _ in range(2))
    np.testing.assert_array_equal(first.images, again.images)
    other = glyph_scenes.load("greek scenes", "test", count=3)
    assert (first.labels != other.labels).any() and set(np.unique(first.labels)) <= set(range(4))
    assert glyph_scenes.classes("cyrillic scenes") == 4
    ink = first.images[first.labels > 0].mean(0)
    assert np.abs(ink / 255 - glyph_scenes.TASKS["greek scenes"].ink).max() < 0.1
    with pytest.raises(ValueError, match="no task of scenes"):
        glyph_scenes.load("x", "train", count=1)
    with pytest.raises(ValueError, match="no split"):
        glyph_scenes.load("greek scenes", "dev", count=1)
