"""Masks by exact global thresholds over rounds, their ablations and eligible tensors; numbers of the specification."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import calibration, tree
from tvjax.calibration import masks
from tvjax.models import clip

pytestmark = pytest.mark.usefixtures("quick_compilation")
SCORES = {"a": jnp.array([0.1, 0.9, 0.3, 0.7, 0.5]), "b": jnp.array([[0.2, 0.8, 0.4, 0.6, 1.0]])}
RNG = np.random.default_rng(0)


def places(mask):
    return np.flatnonzero(np.concatenate([np.ravel(x) for x in jax.tree.leaves(mask)])).tolist()


def test_densities_of_four_rounds():
    np.testing.assert_allclose(calibration.densities(sparsity=0.9), [0.562341, 0.316228, 0.177828, 0.1], atol=5e-7)
    np.testing.assert_allclose(calibration.densities(sparsity=0.99), [0.316228, 0.1, 0.031623, 0.01], atol=5e-7)


def test_k_of_each_round_on_a_vit_b_32():
    kept = [int(density * 87_417_856) for density in calibration.densities(sparsity=0.9)]
    assert kept == [49_158_672, 27_643_953, 15_545_337, 8_741_785]


def test_rounds_on_fixed_scores():
    """{0,2,4,5,7} → {0,2,5} → {0} → {0}: k = ⌊d·N⌋, within 1 … active − 1."""
    active, found = calibration.full(SCORES), []
    for density in calibration.densities(sparsity=0.9):
        active = calibration.narrowed(SCORES, active, density=density)
        found.append(places(active))
    assert found == [[0, 2, 4, 5, 7], [0, 2, 5], [0], [0]]


@pytest.mark.parametrize("keep", masks.KEEP)
@pytest.mark.parametrize("density", [0.03, 0.1, 0.5, 0.9])
def test_threshold_is_the_sorted_one_over_all_tensors(density, keep):
    scores = {"a": RNG.random((7, 13)).astype(np.float32), "b": RNG.random(50).astype(np.float32)}
    flat = np.concatenate([np.ravel(x) for x in jax.tree.leaves(scores)])
    k = max(1, int(density * flat.size))
    wanted = np.argsort(flat if keep == "lowest" else -flat)[:k]
    assert places(calibration.by_score(scores, density=density, keep=keep)) == sorted(wanted)


def test_ties_at_the_threshold_are_kept():
    assert places(calibration.by_score({"a": jnp.array([0.2, 0.1, 0.2, 0.3])}, density=0.5)) == [0, 1, 2]


def test_what_is_out_stays_out_and_scores_that_do_not_change_give_the_mask_of_one_round():
    scores = {"a": jnp.asarray(RNG.random(1000), jnp.float32)}
    active = calibration.full(scores)
    for density in calibration.densities(sparsity=0.95):
        before, active = active, calibration.narrowed(scores, active, density=density)
        assert set(places(active)) <= set(places(before))
    assert places(active) == places(calibration.by_score(scores, density=0.05))
    lower = {"a": jnp.where(active["a"], 2.0, scores["a"])}  # entries outside now score lowest
    assert set(places(calibration.narrowed(lower, active, density=0.01))) <= set(places(active))


def test_a_share_of_ten_is_one_although_0_1_is_not_in_binary():
    assert calibration.count(calibration.by_score({"a": jnp.arange(1.0, 21.0)}, density=1 - 0.9)) == 2


def test_ablations_differ_and_have_as_many_entries():
    params = {"a": jnp.asarray(RNG.normal(size=200), jnp.float32)}
    scores = {"a": jnp.asarray(RNG.random(200), jnp.float32)}
    found = [calibration.by_score(scores, density=0.1), calibration.by_score(scores, density=0.1, keep="highest"),
             calibration.at_random(params, density=0.1), calibration.at_random(params, density=0.1, seed=1),
             calibration.by_magnitude(params, density=0.1),
             calibration.by_magnitude(params, density=0.1, keep="lowest"),
             calibration.lota({"a": params["a"] * scores["a"]}, density=0.1)]
    assert {calibration.count(mask) for mask in found} == {20}
    assert len({tuple(places(mask)) for mask in found}) == len(found)


def test_lota_keeps_what_moved_most():
    tau = {"a": jnp.array([0.1, -3.0, 0.0]), "b": jnp.array([2.0])}
    assert jax.tree.map(lambda x: x.tolist(), calibration.lota(tau, density=0.5)) == {
        "a": [False, True, False], "b": [True]}


def test_random_masks_differ_between_tensors_of_one_shape():
    mask = calibration.at_random({"a": jnp.ones(64), "b": jnp.ones(64)}, density=0.5)
    assert not np.array_equal(mask["a"], mask["b"])


@pytest.mark.parametrize("sparsity", [0.0, 1.0, -0.1, float("nan")])
def test_sparsity_outside_of_its_range(sparsity):
    with pytest.raises(ValueError, match="between 0 and 1; got"):
        calibration.densities(sparsity=sparsity)


@pytest.mark.parametrize("scores, active, sentence", [
    ({"a": jnp.zeros(3)}, {"a": jnp.ones(3, bool)}, "all scores are zero"),
    ({"a": jnp.ones(3)}, {"b": jnp.ones(3, bool)}, "the mask and the scores differ: only in the mask: b"),
    ({"a": jnp.ones(3)}, {"a": jnp.ones(3)}, "holds flags; not so in a"),
])
def test_scores_that_give_no_mask(scores, active, sentence):
    with pytest.raises(ValueError, match=sentence):
        calibration.narrowed(scores, active, density=0.5)


def test_eligible_entries_of_a_vit_b_32():
    """The specification's 87,417,856 counts 1,024 of a text tower's unused norm too."""
    vision = clip.VisionSpec(768, 3072, 12, 12, image_size=224, patch=32)
    model = clip.CLIP(clip.Spec(vision=vision, text=None, projection_dim=512))
    params = jax.eval_shape(lambda: clip.init(model, jax.random.key(0)))
    names, flat = calibration.scored(params), tree.flatten(params)
    entries = lambda names: sum(int(np.prod(flat[name].shape)) for name in names)
    assert entries(names) == 87_417_856 - 1024
    left = [name for name in flat if name not in names]
    assert entries(left) == 432_384
    assert {name.split(".")[-1 if "class" in name else -2] for name in left} == {
        "class_embedding", "position_embedding", "visual_projection"}
    attention = calibration.scored(params, within=calibration.ATTENTION)
    assert entries(attention) == 12 * 4 * (768 * 768 + 768)


@pytest.mark.parametrize("name", [
    "bert.embeddings.word_embeddings.weight", "shared.weight", "encoder.embed_tokens.weight", "transformer.wte.weight",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "lm_head.weight", "classifier.weight",
    "visual.proj", "visual.positional_embedding", "text_projection.weight", "logit_scale"])
def test_tensors_that_are_never_scored(name):
    assert not calibration.is_scored(name)


@pytest.mark.parametrize("name, kind", [
    ("vision_model.encoder.layers.0.self_attn.k_proj.bias", "K"), ("layers.0.self_attn.out_proj.weight", "O"),
    ("vision_model.pre_layrnorm.weight", "LN"), ("vision_model.embeddings.patch_embedding.weight", "patches"),
    ("bert.encoder.layer.3.attention.self.query.weight", "Q"), ("encoder.layer.3.attention.output.dense.bias", "O"),
    ("encoder.layer.3.output.dense.bias", "MLP"), ("encoder.layer.3.output.LayerNorm.bias", "LN"),
    ("encoder.block.0.layer.0.SelfAttention.q.weight", "Q"), ("encoder.block.0.layer.0.layer_norm.weight", "LN"),
    ("encoder.block.0.layer.1.DenseReluDense.wi_0.weight", "MLP"), ("h.0.attn.c_attn.weight", "QKV"),
    ("h.0.attn.c_proj.weight", "O"), ("h.0.mlp.c_proj.weight", "MLP"), ("h.0.ln_1.weight", "LN"), ("ln_f.bias", "LN"),
    ("visual.transformer.resblocks.0.attn.in_proj_weight", "QKV"), ("wte.weight", "embedding"), ("odd", "other")])
def test_kinds_of_tensors(name, kind):
    assert calibration.kind(name) == kind


def test_no_scored_tensor_matches():
    with pytest.raises(ValueError, match="no scored leaf matches 'q_proj'; there are fc.weight"):
        calibration.scored({"fc": {"weight": jnp.ones(1)}}, within="q_proj")
