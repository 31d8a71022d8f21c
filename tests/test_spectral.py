"""Spectral steps: what a null space must not change, solvers that agree, gradients, low-rank leaves and edges."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import merging, tree
from tvjax.merging import factors, spectral
from tvjax.merging.lowrank import LowRank

pytestmark = pytest.mark.usefixtures("quick_compilation")

RNG = np.random.default_rng(0)
FULL = RNG.standard_normal((3, 12, 15)).astype(np.float32)


def low_rank(rank=1, tasks=3, rows=12, columns=15, seed=0):
    rng = np.random.default_rng(seed)
    B, A = rng.standard_normal((tasks, rows, rank)), rng.standard_normal((tasks, rank, columns))
    return LowRank(jnp.asarray(B, jnp.float32), jnp.asarray(A, jnp.float32))


def merge(operator, x):
    return np.asarray(operator({"w": x})["w"])


def distance(a, b):
    return float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b)))


# ---------------------------------------------------------------- the null space
def rotated_null(exact, seed=3):
    """The same SVD but for another basis of the null space, which is as good."""

    def svd(x, k):
        U, s, V = exact(x, min(x.shape))
        null = (s <= 1e-5 * s.max()).astype(x.dtype)
        R = jax.random.normal(jax.random.key(seed), (len(s), len(s)), x.dtype) * null[:, None] * null[None]
        turned = lambda W: jnp.linalg.qr(W * (1 - null)[None] + W @ R)[0]
        mixed = lambda W: jnp.where(null[None] > 0, turned(W), W)
        return mixed(U)[:, :k], s[:k], mixed(V)[:, :k]

    return svd


def tsv_by_hand(x, rank):
    f = spectral._share_factors(x, rank, "svd", None)
    return np.asarray(factors.build(spectral._whiten(f, rank, "svd")))


def iso_by_hand(x, rank):
    return np.asarray(spectral._flatten_spectrum(x.sum(0), rank, "svd"))


@pytest.mark.parametrize("merged", [tsv_by_hand, iso_by_hand])
def test_a_rotated_null_basis_moves_the_official_merge_only(merged, monkeypatch):
    x = low_rank().dense()
    one = {rank: merged(x, rank) for rank in factors.RANKS}
    monkeypatch.setattr(factors, "_exact", rotated_null(factors._exact))
    other = {rank: merged(x, rank) for rank in factors.RANKS}
    assert distance(other["numerical"], one["numerical"]) < 1e-5
    assert distance(other["official"], one["official"]) > 0.2


@pytest.mark.parametrize("method", [merging.tsv_m, merging.iso_c, merging.iso_cts, merging.dc_merge])
def test_turned_deltas_of_low_rank_merge_to_the_turned_merge(method):
    x = np.asarray(low_rank(2).dense())
    Q, R = (np.linalg.qr(RNG.standard_normal((n, n)))[0].astype(np.float32) for n in (12, 15))
    turned = lambda rank: distance(merge(method(rank=rank), Q @ x @ R), Q @ merge(method(rank=rank), x) @ R)
    assert turned("numerical") < 2e-5  # float32, a few products
    assert turned("official") > 1e-3


def test_orthogonal_low_rank_tasks_merge_to_their_sum():
    U, V = (np.linalg.qr(RNG.standard_normal((n, 3)))[0].T.astype(np.float32) for n in (12, 15))
    x = U[:, :, None] * V[:, None, :] * np.array([1.0, 2.0, 3.0], np.float32)[:, None, None]
    np.testing.assert_allclose(merge(merging.tsv_m(), x), x.sum(0), atol=2e-6)
    assert distance(merge(merging.tsv_m(rank="official"), x), x.sum(0)) > 0.05


# ---------------------------------------------------------------- solvers
def falling(rows, columns, power, tasks=4, seed=0):
    rng = np.random.default_rng(seed)
    basis = lambda n, k: np.linalg.qr(rng.standard_normal((n, k)))[0]
    k = min(rows, columns)
    s = np.arange(1, k + 1) ** -power
    return np.stack([basis(rows, k) * s @ basis(columns, k).T for _ in range(tasks)]).astype(np.float32)


@pytest.mark.parametrize("shape", [(72, 80), (72, 200), (200, 72)])
@pytest.mark.parametrize(
    "method", [merging.tsv_m, merging.iso_c, merging.iso_cts, functools.partial(merging.svc, None)]
)
def test_solvers_agree(shape, method):
    """Within 1e-4: a Gram matrix squares the condition number, and singular values down to 1/120 of the largest are
    trusted in float32."""
    x = falling(*shape, 0.5)
    exact = merge(method(solver="svd"), x)
    assert distance(merge(method(solver="auto"), x), exact) < 1e-4
    with jax.enable_x64(True):
        double = merge(method(solver="svd"), x.astype(np.float64))
    assert distance(exact, double) < 1e-4 and distance(merge(method(solver="auto"), x), double) < 1e-4


def test_steep_spectra_fall_back_to_double_precision(monkeypatch):
    monkeypatch.setattr(factors, "QUICK", 64)  # these small ones go as large ones do
    steep, gentle = falling(72, 80, 4.0)[0], falling(72, 80, 0.3)[0]
    thin = lambda x, solver: jax.jit(lambda x: factors.svd(x, k=18, solver=solver))(x)
    assert bool(factors._trusted(factors._by_quick_gram(gentle, 18)[1])) and not bool(
        factors._trusted(factors._by_quick_gram(steep, 18)[1])
    )
    U, s, Vt = np.linalg.svd(steep.astype(np.float64), full_matrices=False)
    found = thin(steep, "auto")
    count = int((np.asarray(found.s) > 0).sum())
    assert count == int((np.asarray(thin(steep, "svd").s) > 0).sum())
    np.testing.assert_allclose(found.s[:count], s[:count], rtol=1e-6)
    for mine, theirs in ((found.U, U), (found.V, Vt.T)):
        np.testing.assert_allclose(abs(theirs.T[:count] @ mine[:, :count]), np.eye(count), atol=2e-6)
    both = jax.jit(jax.vmap(lambda x: factors.svd(x, k=18)))(np.stack([steep, gentle]))
    for i, x in enumerate((steep, gentle)):
        U, s, _ = np.linalg.svd(x.astype(np.float64), full_matrices=False)
        there = np.asarray(both.s[i]) > 0
        np.testing.assert_allclose(both.s[i], np.where(there, s[:18], 0), atol=1e-6)
        np.testing.assert_allclose(abs(U.T[:18] @ both.U[i]), np.diag(there * 1.0), atol=1e-4)


def test_null_directions_do_not_send_a_gram_matrix_back():
    x = np.asarray(low_rank(3, rows=72, columns=80, tasks=1).dense())[0]
    found = factors._by_quick_gram(jnp.asarray(x), 18)
    assert bool(factors._trusted(found[1]))
    assert int(factors.kept(factors.svd(x, k=18).s).sum()) == 3


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 3.0])
def test_polar_factors(power):
    a = falling(200, 72, power)[0]
    U, _, Vt = np.linalg.svd(a.astype(np.float64), full_matrices=False)
    found = {solver: np.asarray(factors.polar(jnp.asarray(a), solver=solver)) for solver in ("auto", "svd")}
    tolerance = 2e-6 * 72**power  # the condition number times a few ε, as the library's own
    assert distance(found["auto"], U @ Vt) < 10 * tolerance and distance(found["svd"], U @ Vt) < 10 * tolerance
    np.testing.assert_allclose(factors.polar(jnp.asarray(a.T)), np.asarray(factors.polar(jnp.asarray(a))).T, atol=1e-6)


# ---------------------------------------------------------------- gradients
SMOOTH = {
    "tsv_m": merging.tsv_m(),
    "iso_c": merging.iso_c(),
    "iso_cts": merging.iso_cts(),
    "cart": merging.cart(fraction=0.3),
    "svc": merging.svc(),
    "dc_merge": merging.dc_merge(),
    "knots": merging.knots(inner=merging.total()),
    "wudi": merging.wudi(),
    "swudi": merging.swudi(),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_are_finite_and_right_on_full_rank(name):
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(5).standard_normal((2, 4, 5)))
        along, target = jnp.asarray(RNG.standard_normal(x.shape)), jnp.asarray(RNG.standard_normal((4, 5)))
        loss = jax.jit(lambda x: (SMOOTH[name]({"w": x})["w"] * target).sum())
        gradient = jax.jit(jax.grad(loss))(x)
        slope = (loss(x + 1e-6 * along) - loss(x - 1e-6 * along)) / 2e-6
        assert np.isfinite(gradient).all()
        np.testing.assert_allclose((gradient * along).sum(), slope, rtol=1e-4, atol=1e-7)


def test_iso_c_has_gradients_where_singular_values_are_equal():
    loss = lambda x: (merging.iso_c()({"w": x})["w"] ** 2).sum()
    gradient = jax.grad(loss)(jnp.stack([jnp.eye(4), jnp.eye(4)]))
    np.testing.assert_allclose(
        gradient, 4 * jnp.stack([jnp.eye(4), jnp.eye(4)]), atol=1e-5
    )  # Σσ = 8, d/dx of 4·(Σσ/4)²


# ---------------------------------------------------------------- low-rank leaves
DENSE = {
    "sum": merging.total(),
    "mean": merging.mean(),
    "scaled": merging.task_arithmetic(scale=0.5),
    "weighed": merging.weigh(weights=[1.0, 2.0, -1.0]) | merging.total(),
    "tsv_m": merging.tsv_m(per_task=2),
    "iso_c": merging.iso_c(),
    "svc": merging.svc(),
    "svc of tsv_m": merging.svc(merging.tsv_m(per_task=2), alpha=1.0),
    "dc_merge": merging.dc_merge(per_task=2),
}


@pytest.mark.parametrize("name", DENSE)
def test_low_rank_leaves_merge_as_dense_ones_do(name):
    x = low_rank(2)
    made = DENSE[name]({"w": x})["w"]
    assert isinstance(made, LowRank) and made.shape == (12, 15)
    np.testing.assert_allclose(made.dense(), merge(DENSE[name], np.asarray(x.dense())), atol=2e-5)
    np.testing.assert_allclose(jax.jit(DENSE[name])({"w": x})["w"].dense(), made.dense(), atol=2e-5)


def test_ranks_may_differ_between_tasks():
    one, two = low_rank(1, tasks=1), low_rank(3, tasks=1, seed=1)
    made = merging.tsv_m(per_task=3)([{"w": one[0]}, {"w": two[0]}])["w"]
    dense = np.concatenate([one.dense(), two.dense()])
    np.testing.assert_allclose(made.dense(), merge(merging.tsv_m(per_task=3), dense), atol=2e-5)


@pytest.mark.parametrize(
    "operator", [merging.ties(), merging.nonzero_mean(), merging.consensus(), merging.wudi(), merging.cart()]
)
def test_steps_that_need_dense_matrices_say_so(operator):
    with pytest.raises(ValueError, match="dense matrices.*core_space"):
        operator({"w": low_rank(2)})
    with pytest.raises(ValueError, match="dense matrices.*core_space"):
        jax.jit(operator)({"w": low_rank(2)})


# ---------------------------------------------------------------- edges
METHODS = [
    "tsv_m",
    "iso_c",
    "iso_cts",
    "cart",
    "svc",
    "dc_merge",
    "knots",
    "core_space",
    "wudi",
    "actmat",
    "swudi",
    "aswudi",
]
EDGES = {
    "zeros": np.zeros((3, 6, 4), np.float32),
    "one zero task": np.concatenate([FULL[:2, :6, :4], np.zeros((1, 6, 4), np.float32)]),
    "identical": np.stack([FULL[0, :6, :4]] * 3),
    "single": FULL[:1, :6, :4],
    "more tasks than rows": RNG.standard_normal((6, 4, 3)).astype(np.float32),
    "one row": FULL[:, :1, :5],
    "one entry": FULL[:, :1, :1],
}


@pytest.mark.parametrize("name", METHODS)
def test_edges_have_results(name):
    for edge, x in EDGES.items():
        made = merge(merging.METHODS[name](), x)
        assert made.shape == x.shape[1:] and np.isfinite(made).all(), edge
        assert edge != "zeros" or not made.any()


def test_identical_tasks_add_up_nowhere():
    """Equal tasks have equal leading triplets, which whitening shares out; the spectrum of their sum is flattened."""
    x = EDGES["identical"]
    U, s, Vt = np.linalg.svd(x[0])
    np.testing.assert_allclose(merge(merging.tsv_m(), x), s[0] * np.outer(U[:, 0], Vt[0]), atol=1e-5)
    np.testing.assert_allclose(merge(merging.iso_c(), x), 3 * s.mean() * U[:, :4] @ Vt, atol=1e-5)


def test_more_triplets_than_the_matrix_has_are_all_of_them():
    x = EDGES["single"]
    np.testing.assert_allclose(merge(merging.tsv_m(per_task=9), x), x[0], atol=1e-5)
    np.testing.assert_allclose(merge(merging.cart(fraction=1.0), FULL), FULL.mean(0), atol=1e-5)


def test_the_share_of_the_common_space():
    x = RNG.standard_normal((2, 6, 7)).astype(np.float32)
    states = {
        common: spectral._split_common(jnp.asarray(x), "numerical", "svd", common) for common in (0.0, 0.5, 0.8, 1.0)
    }
    sums = np.linalg.svd(x.sum(0))[1]
    for common, shared in {0.0: 0, 0.5: 2, 0.8: 4, 1.0: 6}.items():  # round((6 − int(6·share)) / 2) each
        s = np.asarray(states[common].s)
        assert s.shape == (6,)
        np.testing.assert_allclose(s[6 - shared :], sums[:shared], rtol=1e-5)


def test_buckets_share_a_program_and_other_leaves_are_averaged():
    taus = {"a": {"w": FULL, "b": FULL[:, :, 0]}, "c": {"w": FULL[:, ::-1].copy(), "k": FULL.reshape(3, 2, 6, 15)}}
    made = jax.jit(merging.tsv_m(scale=2.0))(taus)
    for name, x in tree.flatten(merging.tsv_m(scale=2.0)(taus)).items():
        np.testing.assert_allclose(tree.flatten(made)[name], x, atol=2e-5)
    np.testing.assert_allclose(made["a"]["b"], 2 * FULL[:, :, 0].mean(0), rtol=1e-5)
    np.testing.assert_allclose(made["c"]["k"], 2 * FULL.reshape(3, 2, 6, 15).mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(made["a"]["w"], 2 * merge(merging.tsv_m(), FULL), atol=2e-5)


def test_numbers_are_traced():
    sweep = jax.jit(jax.vmap(lambda alpha: merging.svc(alpha=alpha)({"w": FULL})["w"]))(jnp.array([0.1, 1.0]))
    for made, alpha in zip(sweep, (0.1, 1.0), strict=True):
        np.testing.assert_allclose(made, merge(merging.svc(alpha=alpha), FULL), atol=2e-5)


def test_svc_leaves_a_lone_task_alone_and_shrinks_what_tasks_share():
    np.testing.assert_allclose(merge(merging.svc(), FULL[:1]), FULL[0], atol=1e-5)
    shared = np.stack([FULL[0]] * 3)
    np.testing.assert_allclose(
        merge(merging.svc(), shared), FULL[0], atol=1e-5
    )  # each share is 3: the sum comes back to one


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: merging.tsv_m(rank="exact"), "no rank 'exact'"),
        (lambda: merging.iso_c(solver="eigh"), "no solver 'eigh'"),
        (lambda: merging.tsv_m(per_task=0), "per_task is a whole number of at least 1; got 0"),
        (lambda: merging.iso_cts(common=1.2), r"common lies in \[0, 1\]; got 1.2"),
        (lambda: merging.cart(fraction=0.0), r"fraction lies in \(0, 1\]"),
        (lambda: merging.svc(alpha=0.0), r"alpha lies in \(0, inf\]; got 0.0"),
        (lambda: merging.svc(merging.weigh(weights=1.0))({"w": FULL}), "must reduce over tasks"),
        (lambda: merging.tsv_m(rank="official")({"w": low_rank(2)}), "null space, which a low-rank leaf does not have"),
    ],
)
def test_slips_get_one_sentence(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_factors_are_put_together_again():
    f = factors.svd(jnp.asarray(FULL))
    np.testing.assert_allclose(factors.build(f), FULL, atol=1e-5)
    np.testing.assert_allclose(factors.build(dataclasses.replace(f, s=2 * f.s)), 2 * FULL, atol=2e-5)
