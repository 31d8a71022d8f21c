"""Merging in shared bases: KnOTS, core space and DC-Merge, on dense and on low-rank leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import merging
from tvjax.merging import cores
from tvjax.merging.lowrank import LowRank

pytestmark = pytest.mark.usefixtures("quick_compilation")

TASKS, RANK = 3, 2
RNG = np.random.default_rng(0)
DENSE = {
    "a": RNG.standard_normal((TASKS, 5, 7)).astype(np.float32),
    "b": RNG.standard_normal((TASKS, 8, 3)).astype(np.float32),
}


def adapters(rows=12, columns=15, rank=RANK, seed=1):
    rng = np.random.default_rng(seed)
    return LowRank(
        jnp.asarray(rng.standard_normal((TASKS, rows, rank)), jnp.float32),
        jnp.asarray(rng.standard_normal((TASKS, rank, columns)), jnp.float32),
    )


def close(made, expected, atol=3e-5):
    np.testing.assert_allclose(made, expected, atol=atol)


def trim_elect_mean(cores_of_all, density):
    """TIES over the cores of all matrices, entry by entry."""
    rows = np.concatenate([core.reshape(TASKS, -1) for core in cores_of_all], 1).astype(np.float64)
    kept = int(density * rows.shape[1])
    trimmed = np.where(abs(rows) >= np.sort(abs(rows), 1)[:, -kept][:, None], rows, 0)
    agreeing = np.where(trimmed * np.sign(trimmed.sum(0)) > 0, trimmed, 0)
    return agreeing.sum(0) / np.maximum((agreeing != 0).sum(0), 1)


# ---------------------------------------------------------------- KnOTS
@pytest.mark.parametrize("low_rank", [False, True])
def test_knots_is_ties_over_the_right_parts_of_one_svd(low_rank):
    """As in the authors' code: one SVD of [X_1 … X_T], S V_tᵀ of all matrices trimmed together, U in front."""
    taus = {"a": adapters(), "b": adapters(9, 10, seed=2)} if low_rank else DENSE
    dense = {name: np.asarray(x.dense()) if low_rank else x for name, x in taus.items()}
    parts = {name: np.linalg.svd(np.concatenate(list(x), 1), full_matrices=False) for name, x in dense.items()}
    if low_rank:
        parts = {
            name: (U[:, : TASKS * RANK], s[: TASKS * RANK], Vt[: TASKS * RANK]) for name, (U, s, Vt) in parts.items()
        }
    found = {name: np.stack(np.split(s[:, None] * Vt, TASKS, 1)) for name, (_, s, Vt) in parts.items()}
    flat = trim_elect_mean(found.values(), 0.3)
    ends = np.cumsum([0, *[core[0].size for core in found.values()]])
    made = merging.knots(inner=merging.ties(density=0.3))(taus)
    for i, (name, core) in enumerate(found.items()):
        expected = parts[name][0] @ flat[ends[i] : ends[i + 1]].reshape(core[0].shape)
        close(made[name].dense() if low_rank else made[name], expected, 1e-4)


INNERS = {
    "sum": merging.total(),
    "ties": merging.ties(density=0.4),
    "by leaf": merging.top(density=0.3, scope="leaf") | merging.mean(),
    "dare": merging.dare(density=0.5, seed=3),
    "tsv_m": merging.tsv_m(),
    "svc": merging.svc(),
    "pcb": merging.pcb(),
}


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("method", [merging.knots, merging.core_space])
def test_engines_agree_on_any_inner_operator(method, inner):
    operator, taus = method(inner=INNERS[inner]), {"d": DENSE["a"], "l": adapters(), "bias": DENSE["a"][:, :, 0]}
    made, jitted = operator(taus), jax.jit(operator)(taus)
    close(jitted["d"], made["d"])
    close(jitted["l"].dense(), made["l"].dense(), 1e-4)
    close(made["bias"], taus["bias"].mean(0))


@pytest.mark.parametrize("method", [merging.knots, merging.core_space])
def test_linear_merges_lose_nothing(method):
    x = adapters()
    close(method(inner=merging.total())({"w": x})["w"].dense(), x.dense().sum(0))
    close(method(inner=merging.mean())(DENSE)["b"], DENSE["b"].mean(0))
    close(
        method(inner=merging.weigh(weights=[1.0, 0.0, -1.0]) | merging.total())(DENSE)["a"],
        DENSE["a"][0] - DENSE["a"][2],
    )


def test_without_a_reduction_the_stack_comes_back():
    x = adapters()
    close(merging.core_space(inner=merging.identity())({"w": x})["w"].dense(), x.dense())
    close(merging.knots(inner=merging.identity())(DENSE)["a"], DENSE["a"])


def test_tsv_m_in_core_space_is_tsv_m():
    x = adapters()
    made = merging.core_space()({"w": x})["w"]
    assert made.B.shape == (12, TASKS * RANK) and made.A.shape == (TASKS * RANK, 15)
    close(made.dense(), merging.tsv_m(per_task=RANK)({"w": np.asarray(x.dense())})["w"])


@pytest.mark.parametrize(
    "operator",
    [
        merging.core_space(),
        merging.knots(),
        merging.dc_merge(per_task=RANK),
        merging.tsv_m(per_task=RANK),
        merging.iso_c(),
        merging.total(),
    ],
)
def test_no_dense_matrix_is_ever_formed(operator):
    x = adapters(60, 70)
    values = every_value(jax.make_jaxpr(lambda x: operator({"w": x})["w"])(x).jaxpr)
    sizes = [int(np.prod(getattr(value.aval, "shape", ()))) for value in values]
    assert max(sizes) < 60 * 70


def every_value(jaxpr):
    for equation in jaxpr.eqns:
        yield from equation.outvars
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from every_value(inner)


def test_identical_and_empty_adapters():
    x = adapters()
    same = LowRank(jnp.stack([x.B[0]] * TASKS), jnp.stack([x.A[0]] * TASKS))
    close(merging.core_space(inner=merging.mean())({"w": same})["w"].dense(), x.dense()[0])
    close(merging.knots(inner=merging.ties(density=1.0))({"w": same})["w"].dense(), x.dense()[0])
    nothing = LowRank(jnp.zeros_like(x.B), x.A)  # as adapters are before training
    for operator in (
        merging.core_space(),
        merging.knots(),
        merging.tsv_m(),
        merging.iso_c(),
        merging.dc_merge(),
        merging.svc(),
    ):
        assert not np.asarray(operator({"w": nothing})["w"].dense()).any()


def test_one_program_serves_every_value_of_an_inner_number():
    operator = jax.jit(lambda operator, taus: operator(taus))
    for density in (0.2, 0.5, 0.9):
        operator(merging.knots(inner=merging.ties(density=density)), DENSE)
    assert operator._cache_size() == 1


# ---------------------------------------------------------------- DC-Merge
def test_smoothed_spectra_keep_their_sum():
    s = jnp.array([[8.0, 4.0, 2.0, 1.0], [9.0, 3.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    close(cores.smoothed(s, 5.0, "average"), [[3.75] * 4, [6.0, 6.0, 0.0, 0.0], [0.0] * 4])
    linear = np.asarray(cores.smoothed(s, 5.0, "linear"))
    close(linear.sum(1), s.sum(1))
    close(linear[0] / linear[0, 3], [5.0, 11 / 3, 7 / 3, 1.0])
    close(linear[1], [9.0, 3.0, 0.0, 0.0])  # already flatter than rho


def dc_by_hand(x, k, rho, density):
    """The authors' recipe for adapters: linear smoothing, the largest entries of every core, elected and averaged, own
    blocks only."""
    U, s, Vt = np.linalg.svd(x, full_matrices=False)
    U, s, Vt = U[:, :, :k], s[:, :k], Vt[:, :k]
    shape = np.stack([np.linspace(min(rho, row[0] / row[-1]), 1, k) for row in s])
    smooth = s.sum(1, keepdims=True) * shape / shape.sum(1, keepdims=True)
    cover = lambda a: (lambda f: f[0] @ f[2])(np.linalg.svd(a, full_matrices=False))
    P, Q = cover(np.concatenate(list(U), 1)), cover(np.concatenate([v.T for v in Vt], 1))
    M = np.stack([P.T @ (u * a) @ v @ Q for u, a, v in zip(U, smooth, Vt, strict=True)])
    kept = int(density * M[0].size)
    M = np.where(abs(M) >= np.sort(abs(M).reshape(len(M), -1), 1)[:, -kept, None, None], M, 0)
    agreeing = np.where(np.sign(M) == np.sign(M.sum(0)), M, 0) * (M.sum(0) != 0)
    merged = agreeing.sum(0) / np.maximum((agreeing != 0).sum(0), 1)
    return P @ (merged * np.kron(np.eye(len(x)), np.ones((k, k)))) @ Q.T


@pytest.mark.parametrize("low_rank", [False, True])
def test_the_recipe_for_adapters(low_rank):
    x = adapters(rank=2)
    inner = merging.top(density=0.2, scope="leaf") | merging.agree(zero="none") | merging.nonzero_mean()
    operator = merging.dc_merge(inner=inner, smoothing="linear", rho=1.5, per_task=2)
    made = operator({"w": x if low_rank else np.asarray(x.dense())})["w"]
    close(made.dense() if low_rank else made, dc_by_hand(np.asarray(x.dense(), np.float64), 2, 1.5, 0.2), 1e-4)


def test_without_a_mask_cores_are_summed_whole():
    x = np.asarray(adapters().dense())
    bare, masked = (merging.dc_merge(mask=mask, per_task=1, scale=2.0)({"w": x})["w"] for mask in ("none", "block"))
    lead = [np.linalg.svd(one, full_matrices=False) for one in x]
    close(bare, 2 * sum(s[0] * np.outer(U[:, 0], Vt[0]) for U, s, Vt in lead), 1e-4)
    assert np.linalg.norm(masked - bare) > 0.01


# ---------------------------------------------------------------- one clear sentence
@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: merging.knots(inner="ties"), r"inner is an operator, such as ties\(\); got str"),
        (
            lambda: merging.core_space(inner=merging.fisher()),
            "needs fisher by entry of the leaf, which a core does not have",
        ),
        (
            lambda: merging.knots(inner=merging.scale(by=merging.entries({"a": np.ones((5, 7))})) | merging.total()),
            "a number for each entry",
        ),
        (lambda: merging.dc_merge(smoothing="cubic"), "no smoothing 'cubic'"),
        (lambda: merging.dc_merge(mask="diagonal"), "no mask 'diagonal'"),
        (lambda: merging.dc_merge(rho=0.5), r"rho lies in \[1, inf\]; got 0.5"),
        (lambda: merging.dc_merge(per_task=0), "per_task is a whole number"),
    ],
)
def test_slips_get_one_sentence(build, message):
    with pytest.raises(ValueError, match=message):
        build()
