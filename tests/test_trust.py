"""TATR as steps of the algebra: worked numbers, a plain double loop, degenerate regions, chunks, transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import merging
from tvjax.merging import trust

pytestmark = pytest.mark.usefixtures("quick_compilation")

T = np.array([[4, -2, 1, 0, 3, -5], [3, 3, -1, 0, -2, 2], [-1, 1, 2, 0, 3, 1]], np.float32) / 8
G = np.array([[2, 0, 5, 8, 1, 4], [1, 6, 2, 8, 0, 3], [3, 1, 1, 8, 2, 2]], np.float32) / 16
OMEGA = [0.265625, 0.1796875, 0.1796875, 0.0, 0.1171875, 0.34375]
RNG = np.random.default_rng(0)


def stacks(tasks=4, entries=300):
    draw = lambda *shape: (RNG.standard_normal((tasks, *shape)) * RNG.random((tasks, *shape)) ** 2).astype(np.float32)
    tree = lambda: {"layers": {"0": {"weight": draw(entries, 5)}, "1": {"bias": draw(7)}}, "head": draw(3, 4)}
    return tree(), tree()


def flat(x):
    return np.concatenate([np.asarray(leaf).reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(x)], 1)


def plain(taus, slopes, quantile):
    """Ω by the double loop, ε by a sort, in float64."""
    taus, slopes = flat(taus).astype(np.float64), np.abs(flat(slopes)).astype(np.float64)
    omega = sum(slopes[j] * np.abs(taus[i]) for i in range(len(taus)) for j in range(len(taus)) if i != j)
    return omega, omega < np.sort(omega)[min(int(quantile * omega.size), omega.size - 1)]


def test_omega_is_the_sum_over_pairs_and_its_short_form_agrees():
    made = merging.conflicts()({"w": T}, gradients={"w": G})["w"]
    np.testing.assert_array_equal(made, OMEGA)
    short = np.abs(G).sum(0) * np.abs(T).sum(0) - (np.abs(G) * np.abs(T)).sum(0)
    np.testing.assert_array_equal(made, short)
    np.testing.assert_array_equal(merging.conflicts(by="vectors")({"w": T})["w"],
                                  [0.59375, 0.34375, 0.15625, 0, 0.65625, 0.53125])


@pytest.mark.parametrize("quantile, merged", [(0.5, [0, 0, 0, 0, 0.15, 0]), (0.99, [0.225, 0.075, 0.075, 0, 0.15, 0])])
def test_worked_merges(quantile, merged):
    """Both entries tied at ε are dropped; the last entry is dropped at any quantile."""
    run = lambda taus, gradients: merging.tatr(quantile=quantile)(taus, gradients=gradients)["w"]
    for go in (run, jax.jit(run)):
        np.testing.assert_allclose(go({"w": T}, {"w": G}), merged, atol=1e-7)
    region = merging.trust_region(quantile=quantile)
    again = (region | merging.task_arithmetic(scale=0.3))({"w": T}, gradients={"w": -G})["w"]
    np.testing.assert_allclose(again, merged, atol=1e-7)  # magnitudes of gradients, whatever their signs


def test_zero_shot_worked_mask():
    kept = merging.trust_region(quantile=0.5, by="vectors")({"w": T})["w"]
    np.testing.assert_array_equal(kept, np.where([0, 1, 1, 1, 0, 0], T, 0))
    np.testing.assert_allclose(merging.tatr_zero_shot(quantile=0.5, scale=1.0)({"w": T})["w"], kept.sum(0))


@pytest.mark.parametrize("quantile", [0.3, 0.99, 1.0])
@pytest.mark.parametrize("by", ["gradients", "vectors"])
def test_both_engines_are_the_plain_loop(by, quantile):
    taus, gradients = stacks()
    data = {"gradients": gradients} if by == "gradients" else {}
    _, keep = plain(taus, gradients if data else taus, quantile)
    run = lambda taus, data: merging.trust_region(quantile=quantile, by=by)(taus, **data)
    for made in (run(taus, data), jax.jit(run)(taus, data)):
        np.testing.assert_array_equal(flat(made), np.where(keep[None], flat(taus), 0))


def test_chunks_and_large_streams_change_nothing(monkeypatch):
    taus, gradients = stacks(entries=3000)
    one = merging.trust_region(quantile=0.9)(taus, gradients=gradients)
    monkeypatch.setattr("tvjax.merging.pieces.SIZES", (1 << 10,))
    monkeypatch.setattr("tvjax.merging.ranking.SMALL", 64)  # ranks by bracket and passes, as for large models
    jax.tree.map(np.testing.assert_array_equal, one, merging.trust_region(quantile=0.9)(taus, gradients=gradients))


def test_disjoint_and_single_task_vectors_are_kept_whole():
    """Ω is 0 everywhere: the region falls back to ≤ and the merge to that without it."""
    apart = {"w": np.array([[1.0, 0.0, 2.0, 0.0], [0.0, 3.0, 0.0, 0.0]], np.float32)}
    for taus in (apart, {"w": T[:1]}):
        np.testing.assert_array_equal(merging.tatr_zero_shot(scale=1.0)(taus)["w"], taus["w"].sum(0))
        silent = {"w": np.zeros_like(taus["w"])}
        np.testing.assert_array_equal(merging.tatr(scale=1.0)(taus, gradients=silent)["w"], taus["w"].sum(0))
    np.testing.assert_array_equal(merging.tatr(scale=1.0)({"w": T[:1]}, gradients={"w": G[:1]})["w"], T[0])


def test_quantile_towards_one_drops_the_greatest_alone():
    taus, gradients = stacks()
    omega, _ = plain(taus, gradients, 1.0)
    made = flat(merging.trust_region(quantile=1.0)(taus, gradients=gradients))
    np.testing.assert_array_equal(made, np.where(omega == omega.max(), 0, flat(taus)))


def test_scopes_take_quantiles_of_their_own():
    taus, gradients = stacks()
    made = merging.trust_region(quantile=0.5, scope="leaf")(taus, gradients=gradients)
    for leaf, whole, slope in zip(*map(jax.tree.leaves, (made, taus, gradients)), strict=True):
        _, keep = plain([whole], [slope], 0.5)
        np.testing.assert_array_equal(flat([leaf]), np.where(keep[None], flat([whole]), 0))


@pytest.mark.parametrize("merge", [
    merging.ties(density=0.5), merging.consensus(), merging.tsv_m(), merging.on(merging.matrix, merging.iso_c(),
                                                                               merging.mean())])
def test_goes_in_front_of_any_merge(merge):
    taus, gradients = stacks(entries=6)
    together = merging.trust_region(quantile=0.8) | merge
    kept = merging.trust_region(quantile=0.8)(taus, gradients=gradients)
    whole = jax.jit(lambda taus, gradients: together(taus, gradients=gradients))(taus, gradients)
    parts = jax.jit(merge)(kept)
    if merge.stages[0].leaf.__name__ != "_total":  # Consensus compares with the task vectors as they came in
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), whole, parts)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(whole))


def test_the_quantile_is_traced_and_swept():
    sweep = jax.jit(jax.vmap(lambda q: merging.tatr_zero_shot(quantile=q, scale=1.0)({"w": T})["w"]))
    made = sweep(jnp.array([0.5, 0.99]))
    for row, quantile in zip(made, (0.5, 0.99), strict=True):
        np.testing.assert_array_equal(row, merging.tatr_zero_shot(quantile=quantile, scale=1.0)({"w": T})["w"])


# ---------------------------------------------------------------- ablations
def test_pairs_intersect_one_region_each():
    taus, gradients = stacks(tasks=3)
    x, g = flat(taus), np.abs(flat(gradients))
    keep = np.ones(x.shape[1], bool)
    for i in range(3):
        for j in range(3):
            if i != j:
                score = (g[j] * np.abs(x[i])).astype(np.float32)
                keep &= score < np.sort(score)[int(0.9 * score.size)]
    run = lambda taus, gradients: merging.trust_pairs(quantile=0.9)(taus, gradients=gradients)
    for made in (run(taus, gradients), jax.jit(run)(taus, gradients)):
        np.testing.assert_array_equal(flat(made), np.where(keep[None], x, 0))
    np.testing.assert_array_equal(merging.trust_pairs()({"w": T[:1]}, gradients={"w": G[:1]})["w"], T[:1])


def test_sign_scaling_keeps_what_descends():
    g = G * np.array([1, -1, 1], np.float32)[:, None]
    signed = sum(g[j] * T[i] for i in range(3) for j in range(3) if i != j)
    made = merging.scale_descent(by=0.5)({"w": T}, gradients={"w": g})["w"]
    np.testing.assert_array_equal(made, np.where(signed < 0, 0.5 * T, 0))
    spec = sum(G[j] * T[i] for i in range(3) for j in range(3) if i != j)
    np.testing.assert_array_equal(spec, [0.21875, -0.0390625, 0.0859375, 0, 0.0234375, -0.046875])
    np.testing.assert_array_equal(merging.scale_descent()({"w": T}, gradients={"w": G})["w"], np.where(spec < 0, T, 0))


def test_removal_by_magnitude_is_tails():
    made = merging.tails(gamma=0.2, scope="global")({"w": T})["w"]
    np.testing.assert_array_equal(made[0], np.where(np.abs(T[0]) > np.sort(np.abs(T[0]))[-2], 0, T[0]))


def test_localize_and_stitch():
    taus, _ = stacks(tasks=3)
    x = flat(taus)
    kept = np.stack([np.where(np.abs(row) >= np.sort(np.abs(row))[-int(0.1 * row.size)], row, 0) for row in x])
    stitched = kept.sum(0) / np.maximum((kept != 0).sum(0), 1)
    made = merging.localize_and_stitch(density=0.1)(taus)
    np.testing.assert_allclose(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(made)]), stitched, atol=1e-6)


# ---------------------------------------------------------------- one sentence
@pytest.mark.parametrize("build, message", [
    (lambda: merging.trust_region(quantile=0.0), r"quantile lies in \(0, 1\]; got 0"),
    (lambda: merging.trust_region(by="gradient"), "no by 'gradient'; did you mean 'gradients'?"),
    (lambda: merging.trust_region(scope="model"), "no scope 'model'"),
    (lambda: merging.tatr()({"w": T}), r"needs gradients: call it as operator\(taus, gradients=tree\)"),
    (lambda: merging.tatr()({"w": T}, gradients={"v": G}), "gradients has nothing for the leaf w; it has v"),
    (lambda: merging.tatr()({"w": T}, gradients={"w": G[:2]}), "gradients have the shape of the stack"),
    (lambda: merging.build("tatr", {"quantil": 0.9}), "did you mean 'quantile'"),
])
def test_slips_get_one_sentence(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_by_name_with_a_merge_inside():
    made = merging.build("tatr_zero_shot", {"quantile": 0.5, "scale": 1.0, "inner": {"name": "ties", "density": 1.0}})
    expected = (trust.trust_region(quantile=0.5, by="vectors") | merging.ties(density=1.0))({"w": T})["w"]
    np.testing.assert_array_equal(made({"w": T})["w"], expected)
