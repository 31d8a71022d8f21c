"""Golden outputs, in float64, of the authors' code (Iso-CTS, SVC, SWUDI, ASWUDI) and of merge-and-rebase (CART,
DC-Merge, WUDI and ACTMat in
closed form); TSV-M and Iso-C are in test_golden.py."""

import pathlib

import jax
import numpy as np
import pytest

from tvjax import merging

pytestmark = pytest.mark.usefixtures("quick_compilation")

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "merging.npz")

METHODS = {
    "isocts": merging.iso_cts(rank="official"),
    "svc_ta": merging.svc(merging.task_arithmetic(scale=0.3)),
    "wudi_cf": merging.wudi(units="absolute"),
    "actmat": merging.actmat(units="absolute"),
    "swudi": merging.swudi(),
    "aswudi": merging.aswudi(),
    "cart": merging.cart(),
    "dc": merging.dc_merge(rank="official"),
}
TOLERANCE = {"svc_ta": 1e-7}  # the authors calibrate in float32


@pytest.mark.parametrize("name", METHODS)
def test_the_authors_numbers(name):
    with jax.enable_x64(True):
        taus = {"w": GOLDEN["W"], "b": GOLDEN["B"]}
        merged = METHODS[name](taus)
        jitted = jax.jit(METHODS[name])(taus)
    start = {"w": GOLDEN["P0"], "b": GOLDEN["B0"]} if name == "cart" else {"w": 0, "b": 0}  # whose file holds θ
    for leaf in ("w", "b"):
        if f"{name}.{leaf}" in GOLDEN:
            expected = GOLDEN[f"{name}.{leaf}"] - start[leaf]
            atol = TOLERANCE.get(name, 1e-12) * np.abs(expected).max()
            np.testing.assert_allclose(merged[leaf], expected, rtol=0, atol=atol)
            np.testing.assert_allclose(jitted[leaf], expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", ["iso_cts", "dc_merge", "tsv_m", "iso_c"])
def test_full_rank_deltas_make_ranks_the_same(name):
    """Nothing is cut then; the last bit may differ, since the compiler divides otherwise by a count that it knows."""
    with jax.enable_x64(True):
        merge = lambda rank: merging.METHODS[name](rank=rank)({"w": GOLDEN["W"]})["w"]
        made = {rank: merge(rank) for rank in ("numerical", "official")}
    atol = 4 * np.finfo(np.float64).eps * np.abs(made["official"]).max()
    np.testing.assert_allclose(made["numerical"], made["official"], rtol=0, atol=atol)
