"""One operator, two engines: chunks of concrete trees and one traced program give the same entries, whatever the
chunk size or container.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import merging, tree
from tvjax.merging import ranking, streamed, traced
from tvjax.merging.draws import uniform
from tvjax.merging.operator import named, step
from tvjax.merging.statistics import Greatest, Kth, Least, Sum

TASKS = 4


def stack(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: (rng.standard_normal((TASKS, *shape)) * rng.random((TASKS, *shape)) ** 3).astype(dtype)
    layers = {str(i): {"weight": draw(12, 8), "bias": draw(12)} for i in (0, 1, 2, 10)}
    return {"layers": layers, "head": {"weight": draw(5, 12)}, "norm": {"weight": draw(12)}}


TAUS = stack()


def _keep(x, uniform):
    return jnp.where(uniform < 0.5, x, 0)


def _unit(x, squares):
    return x / jnp.sqrt(squares).reshape(-1, *[1] * (x.ndim - 1))


def _squares(x):
    return (x * x).reshape(len(x), -1).sum(1)


def _range(x, high, low):
    return x * (high - low).reshape(-1, *[1] * (x.ndim - 1))


def _by_depth(x, depth):
    return x * (1 + depth)


OPERATORS = {
    "average": merging.average(),
    "task_arithmetic": merging.task_arithmetic(),
    "ties": merging.ties(),
    "ties by layer": merging.ties(scope="layer", density=0.4),
    "ties by leaf, official": merging.ties(scope="leaf", trim="official", reduce="sum"),
    "ties with densities by name": merging.ties(density=merging.by_name({"bias": 1.0}, default=0.3), scope="leaf"),
    "consensus": merging.consensus(),
    "tsv_m": merging.tsv_m(),
    "iso_c": merging.iso_c(),
    "drop": step(_keep, needs=("uniform",), seed=3) | merging.total(),
    "unit norms": step(_unit, Sum(_squares)) | merging.top(density=0.3) | merging.total(),
    "ranges": step(_range, Greatest(), Least()) | merging.total(),
    "routed": merging.on(
        named("layers"), merging.top(density=0.2) | merging.total(), merging.top(density=0.9) | merging.mean()
    ),
    "spectral then trimmed": merging.on(
        merging.matrix, step(lambda x: jnp.tanh(x), entrywise=False), merging.identity()
    )
    | merging.top(density=0.3)
    | merging.total(),
    "by depth": merging.total() | merging.scale(by=merging.by_depth([0.0, 0.5, 1.0])),
    "needs depth": step(_by_depth, needs=("depth",)) | merging.total(),
    "per task and leaf": merging.weigh(
        weights=merging.per_leaf(jax.tree.map(lambda x: np.arange(4.0, dtype=np.float32), TAUS))
    )
    | merging.total(),
    "per entry": merging.total() | merging.scale(by=merging.entries(jax.tree.map(lambda x: np.abs(x[0]), TAUS))),
    "a stack": merging.top(density=0.3),
}


def close(a, b, rtol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-6), a, b)


@pytest.mark.parametrize("name", OPERATORS)
def test_chunks_and_program_agree(name):
    operator = OPERATORS[name]
    eager, program = operator(TAUS), jax.jit(lambda operator, taus: operator(taus))(operator, TAUS)
    close(eager, program)


@pytest.mark.parametrize("name", OPERATORS)
def test_lists_and_stacks_agree(name):
    taus = tree.unstack(TAUS)
    jax.tree.map(np.testing.assert_array_equal, OPERATORS[name](TAUS), OPERATORS[name](taus))


@pytest.mark.parametrize("shape", [(1, 512), (1, 1), (512, 1), (1,), (0, 5), ()])
@pytest.mark.parametrize("tasks", [1, 3])
def test_a_leaf_keeps_its_shape(shape, tasks):
    """A stack of one task looks like one row."""
    stack = {"w": np.ones((tasks, *shape), np.float32)}
    for given in (stack, tree.unstack(stack)):
        assert merging.top(density=0.5)(given)["w"].shape == (tasks, *shape)
        assert merging.total()(given)["w"].shape == shape


@pytest.mark.parametrize(
    "name", [n for n in OPERATORS if n != "unit norms"]
)  # its float sums depend on how they are split
def test_chunk_size_changes_nothing(name, monkeypatch):
    one = OPERATORS[name](stack(1))
    monkeypatch.setattr("tvjax.merging.pieces.SIZES", (1 << 10,))
    big = {"w": np.random.default_rng(0).standard_normal((TASKS, 50, 60)).astype(np.float32)}
    jax.tree.map(np.testing.assert_array_equal, one, OPERATORS[name](stack(1)))
    if "leaf" not in name and "entry" not in name:
        small = OPERATORS[name](big)
        monkeypatch.setattr("tvjax.merging.pieces.SIZES", (1 << 14,))
        jax.tree.map(np.testing.assert_array_equal, small, OPERATORS[name](big))


def test_one_compilation_serves_every_value_of_a_number():
    merging.ties(density=0.2, scale=1.0)(TAUS)
    before = streamed._through._cache_size()
    for density in (0.1, 0.3, 0.7):
        merging.ties(density=density, scale=density)(TAUS)
    assert streamed._through._cache_size() == before


def test_vmap_sweeps_numbers():
    sweep = jax.vmap(lambda density: merging.ties(density=density)(TAUS))(jnp.array([0.1, 0.5, 1.0]))
    for i, density in enumerate([0.1, 0.5, 1.0]):
        close(jax.tree.map(lambda x, i=i: x[i], sweep), merging.ties(density=density)(TAUS))


def test_operators_are_trees_of_numbers():
    assert sorted(map(float, jax.tree.leaves(merging.ties(density=0.25, scale=2.0)))) == [0.25, 2.0]
    gradient = jax.grad(lambda operator: jax.tree.reduce(lambda a, x: a + (x**2).sum(), operator(TAUS), 0.0))(
        merging.task_arithmetic(scale=0.5)
    )
    squares = sum(float((np.asarray(x).sum(0) ** 2).sum()) for x in jax.tree.leaves(TAUS))
    np.testing.assert_allclose(jax.tree.leaves(gradient)[0], 2 * 0.5 * squares, rtol=1e-5)


def test_gradients_reach_coefficients_behind_a_trim():
    target = merging.ties(density=0.5)(TAUS)

    def loss(weights):
        merged = (merging.top(density=0.5) | merging.agree() | merging.weigh(weights=weights) | merging.total())(TAUS)
        return sum(((a - b) ** 2).sum() for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(target), strict=True))

    gradient, at, step_ = jax.grad(loss)(jnp.full(TASKS, 0.3)), jnp.full(TASKS, 0.3), 1e-2
    for t in range(TASKS):
        e = jnp.zeros(TASKS).at[t].set(step_)
        np.testing.assert_allclose(gradient[t], (loss(at + e) - loss(at - e)) / (2 * step_), rtol=1e-2)


def test_data_are_named_trees():
    grams = {"w": np.stack([np.eye(3, dtype=np.float32) * (t + 1) for t in range(TASKS)])}
    solve = step(_regmean, needs=("gram",), entrywise=False)
    xs = np.random.default_rng(0).standard_normal((TASKS, 2, 3)).astype(np.float32)
    expected = sum((t + 1) * xs[t] for t in range(TASKS)) / 10
    np.testing.assert_allclose(solve({"w": xs}, gram=grams)["w"], expected, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(lambda x, g: solve(x, gram=g))({"w": xs}, grams)["w"], expected, rtol=1e-5)
    with pytest.raises(ValueError, match="needs gram: call it as operator"):
        solve({"w": xs})
    with pytest.raises(ValueError, match="takes no fisher"):
        merging.mean()({"w": xs}, fisher=grams)


def _regmean(x, gram):
    return jnp.linalg.solve(gram.sum(0), jnp.einsum("toi,tij->oj", x, gram, precision="highest").T).T


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_dtypes_are_kept_and_sums_are_wide(dtype):
    x = {"w": jnp.asarray(np.random.default_rng(0).standard_normal((8, 300)), dtype)}
    for made in (merging.task_arithmetic(scale=0.3)(x), jax.jit(merging.task_arithmetic(scale=0.3))(x)):
        assert made["w"].dtype == dtype
        exact = (np.float32(0.3) * sum(np.asarray(row, np.float32) for row in x["w"])).astype(dtype)
        np.testing.assert_allclose(
            np.asarray(made["w"], np.float32), np.asarray(exact, np.float32), rtol=1e-6 if dtype == np.float32 else 1e-2
        )


@pytest.mark.parametrize("shape", [(3, 5), (2, 4000), (1, 1)])
@pytest.mark.parametrize("k", [1, 2, 5, 3999])
def test_kth_largest_is_the_sorted_entry(shape, k):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    k = min(k, shape[1])
    exact = np.sort(x, 1)[:, -k]
    np.testing.assert_array_equal(jax.jit(traced.kth_largest)([jnp.asarray(x)], k), exact)
    np.testing.assert_array_equal(
        ranking.kth_largest(lambda: iter([x[:, : shape[1] // 2], x[:, shape[1] // 2 :]]), k, shape[1]), exact
    )


@pytest.mark.parametrize("kind", ["normal", "sorted", "constant", "two values"])
@pytest.mark.parametrize("share", [1e-7, 0.2, 0.999, 1.0])
def test_kth_largest_of_long_streams_goes_by_bracket(kind, share):
    n = ranking.SMALL // 2
    rng = np.random.default_rng(0)
    x = {
        "normal": rng.standard_normal((2, n)),
        "sorted": np.sort(rng.random((2, n)) ** 8, 1),
        "constant": np.ones((2, n)),
        "two values": (rng.random((2, n)) < 0.2) * 1.0,
    }[kind].astype(np.float32)
    k = traced.rank(share, n)
    parts = np.array_split(x, 7, 1)
    np.testing.assert_array_equal(ranking.kth_largest(lambda: iter(parts), k, n), np.sort(x, 1)[:, n - k])


def test_draws_belong_to_entries():
    names = np.array([1, 2, 3], np.uint32)
    whole = uniform(0, np.uint32(7), names, 0, (3, 5000), jnp.float32)
    np.testing.assert_array_equal(whole[:, 2048:4000], uniform(0, np.uint32(7), names, 2048, (3, 1952), jnp.float32))
    np.testing.assert_array_equal(
        whole[np.array([2, 0])], uniform(0, np.uint32(7), names[[2, 0]], 0, (2, 5000), jnp.float32)
    )
    np.testing.assert_array_equal(
        whole.reshape(3, 50, 100), uniform(0, np.uint32(7), names, 0, (3, 50, 100), jnp.float32)
    )
    assert abs(float(whole.mean()) - 0.5) < 0.02 and len(np.unique(whole)) > 14000


def test_bad_input_gets_one_sentence():
    with pytest.raises(ValueError, match="the list of task vectors is empty"):
        merging.mean()([])
    with pytest.raises(ValueError, match=r"same leading axis of tasks; found \['2', '3'\]"):
        merging.mean()({"a": np.ones((2, 3), np.float32), "b": np.ones((3, 3), np.float32)})
    with pytest.raises(ValueError, match="floating-point arrays only; not so: ids"):
        merging.mean()({"ids": np.ones((2, 3), int)})
    with pytest.raises(ValueError, match=r"differ: shapes: w \(3,\) vs \(1,\)"):
        merging.mean()([{"w": np.ones(3, np.float32)}, {"w": np.ones(1, np.float32)}])
    with pytest.raises(ValueError, match="b.w holds NaN or infinite entries"):
        merging.mean()({"a": np.ones((2, 3), np.float32), "b": {"w": np.array([[1.0], [np.nan]], np.float32)}})
    with pytest.raises(ValueError, match="2 task vectors but 1 names"):
        merging.mean()({"a": np.ones((2, 3), np.float32)}, tasks=["x"])
    with pytest.raises(ValueError, match="varies inside a global scope"):
        merging.top(density=merging.by_name({"bias": 0.5}, default=0.1))(TAUS)
    with pytest.raises(ValueError, match="followed by an operator; got function"):
        merging.total() | merging.mean


def test_statistics_are_declared_not_computed():
    assert [type(s) for stage in merging.ties().stages for s in stage.stats] == [Kth, Sum]
