"""Overlap and occupancy of masks, pruning, noise, localisation against gradients, sparse files."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import calibration, checkpoints, vectors
from tvjax.calibration import analysis, sparse_files

pytestmark = pytest.mark.usefixtures("quick_compilation")
RNG = np.random.default_rng(0)
PARAMS = {"a": {"q_proj": RNG.normal(size=(4, 3)).astype(np.float32)},
          "fc1": RNG.normal(size=(2, 4)).astype(np.float32)}
MASK = {"a": {"q_proj": jnp.array(RNG.random((4, 3)) < 0.5)}}


def test_iou_of_the_specifications_masks():
    """λ = 0.5, ≥: the overlaps 2/3, 2/3, 1/3; two empty masks are equal."""
    rows = [[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 1], [0, 1, 1, 1, 1, 0]]
    found = analysis.iou([{"w": jnp.array(row, bool)} for row in rows])
    np.testing.assert_allclose(found[np.triu_indices(3, 1)], [2 / 3, 2 / 3, 1 / 3], rtol=1e-6)
    np.testing.assert_array_equal(analysis.iou([{"w": jnp.zeros(3, bool)}] * 2), np.ones((2, 2)))


def test_random_masks_overlap_by_chance():
    ones = {"w": jnp.ones(40_000)}
    found = analysis.iou([calibration.at_random(ones, density=0.1, seed=seed) for seed in (0, 1)])
    assert abs(found[0, 1] - analysis.chance(0.1)) < 0.01


@pytest.mark.parametrize("by", ["kind", "layer", "leaf"])
def test_occupancy_sums_to_the_mask(by):
    mask = {"layers": {str(i): {"self_attn": {"q_proj": {"weight": jnp.array(RNG.random((3, 3)) < 0.5)}},
                                "layer_norm1": {"bias": jnp.array(RNG.random(3) < 0.5)}} for i in range(2)}}
    found = analysis.occupancy(mask, by=by)
    assert sum(kept for kept, _ in found.values()) == calibration.count(mask)
    assert sum(entries for _, entries in found.values()) == 24
    assert set(found) == {"kind": {"Q", "LN"}, "layer": {"layers.0", "layers.1"}}.get(by, set(found))
    np.testing.assert_allclose(sum(analysis.shares(mask, by=by).values()), 1)


def test_an_unknown_grouping():
    with pytest.raises(ValueError, match="did you mean 'layer'"):
        analysis.occupancy(MASK, by="layers")


def test_pruning_zeroes_the_masks_entries_alone():
    found, mask = analysis.pruned(PARAMS, MASK), np.asarray(MASK["a"]["q_proj"])
    np.testing.assert_array_equal(found["a"]["q_proj"], np.where(mask, 0, PARAMS["a"]["q_proj"]))
    np.testing.assert_array_equal(found["fc1"], PARAMS["fc1"])


def test_noise_has_twice_the_deviation_of_what_it_disturbs():
    params = {"w": jnp.asarray(RNG.normal(size=50_000) * 0.02 + 0.01, jnp.float32), "v": jnp.ones(3)}
    mask = {"w": jnp.arange(50_000) % 2 == 0}
    found = analysis.noised(params, mask, jax.random.key(0))
    held = np.asarray(params["w"])[::2]
    np.testing.assert_allclose([found.mean, found.std], [np.abs(held).mean(), held.std()], rtol=1e-4)
    added = np.asarray(found.params["w"] - params["w"])
    np.testing.assert_allclose(added[::2].std(), 2 * held.std(), rtol=0.02)
    assert not added[1::2].any() and found.params["v"].tolist() == [1, 1, 1]


def test_localisation_is_the_product_with_the_gradient():
    head = RNG.normal(size=(2, 3)).astype(np.float32)
    x = RNG.normal(size=(5, 3)).astype(np.float32)
    logits = lambda params, image, head: jnp.tanh(params["a"]["q_proj"] @ image) @ params["fc1"].T @ head
    tau = {"a": {"q_proj": RNG.normal(size=(4, 3)).astype(np.float32)}, "fc1": np.zeros((2, 4), np.float32)}
    slopes = [jax.jacrev(logits)(PARAMS, image, head) for image in x]
    want = np.mean([[abs(float(jnp.vdot(tau["a"]["q_proj"], one["a"]["q_proj"][c]))) for c in range(2)]
                    for one in slopes])
    found = analysis.localisation(logits, PARAMS, tau, x, head, classes=2, chunk=3)
    np.testing.assert_allclose(found, want, rtol=1e-5)
    assert analysis.localisation(logits, PARAMS, jax.tree.map(np.zeros_like, tau), x, head, classes=2, chunk=3) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sparse_files_keep_the_bits(tmp_path, dtype):
    mask = np.asarray(MASK["a"]["q_proj"])
    tau = {"a": {"q_proj": np.where(mask, PARAMS["a"]["q_proj"], 0)}, "fc1": np.zeros((2, 4), np.float32),
           "s": np.float32(-0.0).reshape(())}
    tau = jax.tree.map(lambda x: np.asarray(jnp.asarray(x, dtype)), tau)
    sparse_files.save_sparse(tau, tmp_path / "tau.safetensors", base="abc")
    found = sparse_files.load_sparse(tmp_path / "tau.safetensors")
    assert isinstance(found, vectors.TaskVector) and checkpoints.content_hash(found) == checkpoints.content_hash(tau)


def test_sparse_files_are_small(tmp_path):
    tau = {"w": np.zeros(10_000, np.float32), "v": np.zeros(10_000, np.float32)}
    tau["w"][:100] = 1
    sparse_files.save_sparse(tau, tmp_path / "sparse.safetensors")
    assert (tmp_path / "sparse.safetensors").stat().st_size < 10_000 / 8 + 400 + 1000
    sparse_files.save_sparse({"v": tau["v"]}, tmp_path / "none.safetensors")
    assert not sparse_files.load_sparse(tmp_path / "none.safetensors")["v"].any()


def test_another_file_is_no_sparse_task_vector(tmp_path):
    checkpoints.save_task_vector({"w": np.ones(2, np.float32)}, tmp_path / "tau.safetensors")
    with pytest.raises(ValueError, match="no sparse task vector"):
        sparse_files.load_sparse(tmp_path / "tau.safetensors")
