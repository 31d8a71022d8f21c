"""SCE and truncation beyond the golden numbers of test_compat: entries that do not vary, low-rank leaves, slips."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import merging

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_sce_counts_among_entries_that_vary():
    x = np.array([[1.0, 5.0, 2.0, 0.0, 3.0], [1.0, 4.0, -2.0, 0.0, 3.0]], np.float32)
    kept = lambda density: np.nonzero(np.asarray(merging.sce(density=density)({"w": x})["w"]))[0].tolist()
    assert kept(1.0) == [0, 1, 2, 4] and kept(0.5) == [2] and kept(0.4) == []


def test_sce_of_equal_tasks_is_the_task():
    x = np.array([[1.0, -5.0, 0.0]] * 3, np.float32)
    np.testing.assert_allclose(merging.sce()({"w": x})["w"], x[0], rtol=1e-6)


def test_both_engines_agree():
    taus = {"w": np.random.default_rng(0).standard_normal((3, 6, 4)).astype(np.float32)}
    for operator in (merging.sce(density=0.5), merging.total() | merging.truncate(rank=2)):
        np.testing.assert_allclose(operator(taus)["w"], jax.jit(operator)(taus)["w"], rtol=1e-5, atol=1e-6)


def test_truncation_is_the_nearest_matrix_of_its_rank():
    w = np.random.default_rng(0).standard_normal((1, 6, 4)).astype(np.float32)
    taus = {"w": w, "b": np.ones((1, 3), np.float32)}
    made = (merging.total() | merging.truncate(rank=2))(taus)
    U, s, Vt = np.linalg.svd(taus["w"][0])
    np.testing.assert_allclose(made["w"], (U[:, :2] * s[:2]) @ Vt[:2], rtol=1e-5, atol=1e-6)
    assert made["b"].tolist() == [1, 1, 1]


def test_adapters_are_cut_without_their_product():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    taus = [{"w": merging.LowRank(draw(12, 2), draw(2, 10))} for _ in range(2)]
    made = (merging.total() | merging.truncate(rank=3))(taus)["w"]
    assert isinstance(made, merging.LowRank) and made.A.shape[0] <= 3
    U, s, Vt = np.linalg.svd(sum(np.asarray(tau["w"].dense()) for tau in taus))
    np.testing.assert_allclose(made.dense(), (U[:, :3] * s[:3]) @ Vt[:3], rtol=1e-4, atol=1e-4)


def test_ranks_beyond_a_matrix_are_all_of_it():
    taus = {"w": np.random.default_rng(0).standard_normal((2, 6, 4)).astype(np.float32)}
    for beyond, whole in ((merging.tsv_m(per_task=99), merging.tsv_m(per_task=4)),
                          (merging.dc_merge(per_task=99), merging.dc_merge(per_task=4)),
                          (merging.total() | merging.truncate(rank=99), merging.total())):
        np.testing.assert_allclose(beyond(taus)["w"], whole(taus)["w"], rtol=1e-5, atol=1e-5)


def test_slips():
    with pytest.raises(ValueError, match="rank is a whole number of at least 1; got 0"):
        merging.truncate(rank=0)
    with pytest.raises(ValueError, match=r"density lies in \(0, 1\]; got 2"):
        merging.sce(density=2.0)
