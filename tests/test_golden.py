"""Golden outputs of the authors' own code, and the exact examples of the papers' definitions."""
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import merging
from tvjax.merging.masks import needed

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "merging.npz")
T = np.array([[4, -2, 1, 0, 3, -5], [3, 3, -1, 0, -2, 2], [-1, 1, 2, 0, 3, 1]], np.float32) / 8

METHODS = {
    "tsvm": merging.tsv_m(rank="official"),
    "isoc": merging.iso_c(rank="official"),
    "ties_mean": merging.ties(trim="official"),
    "ties_sum": merging.ties(trim="official", reduce="sum"),
    "ties_max": merging.ties(trim="official", reduce="max"),
    "consensus": merging.consensus(lam=0.4, k=2, scale=1.0),
    "emr_u": merging.emr(),
    "pcb": merging.pcb(density=0.1),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("jit", [False, True])
def test_the_authors_numbers(name, jit):
    with jax.enable_x64(True):
        taus = {"w": jnp.asarray(GOLDEN["W"]), "b": jnp.asarray(GOLDEN["B"])}
        merged = (jax.jit(METHODS[name]) if jit else METHODS[name])(taus)
    for leaf in ("w", "b"):
        if f"{name}.{leaf}" in GOLDEN:
            np.testing.assert_allclose(merged[leaf], GOLDEN[f"{name}.{leaf}"], rtol=1e-12, atol=1e-14)


def test_emr_masks_and_factors():
    taus = {"w": jnp.asarray(GOLDEN["W"], jnp.float32), "b": jnp.asarray(GOLDEN["B"], jnp.float32)}
    unified = {leaf: jnp.asarray(GOLDEN[f"emr_u.{leaf}"], jnp.float32) for leaf in taus}
    np.testing.assert_array_equal(merging.emr_mask(taus, unified)["w"], GOLDEN["emr_mask_w"])
    np.testing.assert_allclose(merging.emr_rescale(taus, unified), GOLDEN["emr_resc"], rtol=1e-6)


def merge(operator):
    return np.asarray(operator({"w": T})["w"]).tolist()


def test_ties_untrimmed():
    assert merge(merging.ties(density=1.0)) == [0.4375, 0.25, 0.1875, 0, 0.375, -0.625]
    assert merge(merging.ties(density=1.0, reduce="sum")) == [0.875, 0.5, 0.375, 0, 0.75, -0.625]


def test_ties_exact_top_three():
    # ties at the threshold are kept, so the equal magnitudes of rows 1 and 2 are broken by hand, as a stable sort would
    exact = np.array([[4, 0, 0, 0, 3, -5], [3, 3, 0, 0, -2, 0], [-1, 0, 2, 0, 3, 0]], np.float32) / 8
    untrimmed = lambda reduce: np.asarray(merging.ties(density=1.0, reduce=reduce)({"w": exact})["w"]).tolist()
    assert untrimmed("mean") == [0.4375, 0.375, 0.25, 0, 0.375, -0.625]
    assert untrimmed("sum") == [0.875, 0.375, 0.25, 0, 0.75, -0.625]


def test_ties_official_half():
    kept = (np.asarray(merging.top(density=0.5, extra=1)({"w": T})["w"]) != 0).sum(1)
    assert kept.tolist() == [4, 4, 5]
    assert merge(merging.ties(density=0.5, trim="official")) == [0.4375, 0.25, 0.25, 0, 0.375, -0.625]
    assert merge(merging.ties(density=0.5, trim="official", reduce="sum")) == [0.875, 0.5, 0.25, 0, 0.75, -0.625]


MASKS = {
    (1.0, ">="): [[1, 0, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0], [0, 1, 1, 1, 1, 0]],
    (1.0, ">"): [[1, 0, 0, 0, 1, 1], [0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 1, 0]],
    (0.5, ">="): [[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 1], [0, 1, 1, 1, 1, 0]],
    (0.5, ">"): [[1, 0, 1, 0, 1, 1], [1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 1, 0]],
}


@pytest.mark.parametrize("lam, comparator", MASKS)
def test_tall_masks(lam, comparator):
    assert np.asarray(needed(T, T.sum(0), lam, comparator)).astype(int).tolist() == MASKS[lam, comparator]


@pytest.mark.parametrize("k, comparator, expected", [
    (2, ">=", [0.75, 0.25, 0.25, 0, 0.5, 0]), (1, ">", [0.75, 0.25, 0.25, 0, 0.5, -0.25]),
    (2, ">", [0, 0, 0, 0, 0.5, 0]), (0, ">", [0.75, 0.25, 0.25, 0, 0.5, -0.25]),
    (4, ">=", [0] * 6)])
def test_consensus(k, comparator, expected):
    assert merge(merging.consensus(lam=1.0, k=k, scale=1.0, comparator=comparator)) == expected
