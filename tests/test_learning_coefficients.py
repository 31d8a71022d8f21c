"""tvjax.learning.coefficients and pool: every scheme against a plain loop, laws, memory forms, exactness at zero."""
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import learning, tree
from tvjax.learning import Scheme
from tvjax.learning.coefficients import by_parts
from tvjax.merging.lowrank import LowRank

pytestmark = pytest.mark.usefixtures("quick_compilation")
SHAPES = {"stem.weight": (4, 3, 2, 2), "layers.0.weight": (4, 5), "layers.1.weight": (4, 5), "norm.bias": (4,)}
SCHEMES = [Scheme(by="task"), Scheme(), Scheme(by="row"), Scheme(by="column"), Scheme(by="part", parts=3),
           Scheme(by="part", parts=3, sharing="shape"), Scheme(blocks="weights"), Scheme(by="task", blocks="weights")]


def draw(seed):
    rng = np.random.default_rng(seed)
    return tree.unflatten({name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()})


THETA0, TAUS = draw(0), [draw(1), draw(2), draw(3)]


def some(held, scheme, seed=5):
    keys = jax.random.split(jax.random.key(seed), 99)
    zero = learning.init(held, scheme)
    return {name: jax.random.normal(key, c.shape) for (name, c), key in zip(zero.items(), keys, strict=False)}


def by_hand(taus, coefficients, scheme):
    """Σ_i Λ_i τ_i entry by entry."""
    total = {}
    for name, shape in SHAPES.items():
        if scheme.blocks == "weights" and len(shape) < 2:
            continue
        c = np.asarray(coefficients["task" if scheme.by == "task" else name])
        parts = np.asarray(learning.parts_of(name, shape, scheme))
        total[name] = np.zeros(shape)
        for i, tau in enumerate(taus):
            for at in itertools.product(*map(range, shape)):
                blocks = {"row": (at[0],), "column": at[1:2], "part": (parts[at],)}.get(scheme.by, ())
                total[name][at] += c[(i, *(blocks if len(shape) > 1 else ()))] * tree.flatten(tau)[name][at]
    return total


@pytest.fixture(scope="module")
def held():
    return learning.pool(TAUS, THETA0)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_sum_is_that_of_a_loop(scheme, held):
    coefficients = some(held, scheme)
    found = tree.flatten(jax.jit(learning.delta, static_argnames="scheme")(held, coefficients, scheme))
    wanted = by_hand(TAUS, coefficients, scheme)
    assert set(found) == set(wanted)
    for name, x in wanted.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-5, atol=1e-6)  # the loop sums in float64


@pytest.mark.parametrize("scheme, store", [(SCHEMES[0], "float32"), (SCHEMES[1], "float32"), (SCHEMES[1], "int8"),
                                           (SCHEMES[4], "bfloat16"), (SCHEMES[6], "float32")], ids=str)
def test_zero_is_the_pretrained_model_bit_for_bit(scheme, store):
    held = learning.pool(TAUS, THETA0, store=store)
    theta = jax.jit(learning.compose, static_argnames="scheme")(THETA0, held, learning.init(held, scheme), scheme)
    jax.tree.map(np.testing.assert_array_equal, theta, THETA0)


@pytest.mark.parametrize("by, numbers", [("task", 3), ("tensor", 12), ("row", 3 * (4 + 4 + 4 + 1)),
                                         ("column", 3 * (3 + 5 + 5 + 1)), ("part", 3 * (7 * 3 + 1))])
def test_counts(by, numbers, held):
    assert learning.count(learning.init(held, Scheme(by=by, parts=7 if by == "part" else 1))) == numbers


def test_the_papers_count():
    held = {f"tensor.{i}": np.zeros((22, 1)) for i in range(158)}  # a ViT-B/32 image encoder in open_clip
    assert learning.count(learning.init(held, Scheme())) == 3476


def test_isotropic_is_tensor_wise_with_tied_numbers(held):
    one = jnp.array([0.3, -0.7, 1.4])
    tied = dict.fromkeys(held, one)
    a, b = (learning.delta(held, c, s) for c, s in (({"task": one}, Scheme(by="task")), (tied, Scheme())))
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("scheme, store", [(Scheme(), "float32"), (Scheme(), "int8"), (Scheme(by="row"), "float32"),
                                           (Scheme(by="task"), "float32"),
                                           (Scheme(by="part", parts=3), "bfloat16")], ids=str)
def test_gradient_is_the_inner_product_with_the_vector(scheme, store):
    held = learning.pool(TAUS, THETA0, store=store)
    loss = lambda theta: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(theta))
    zero = learning.init(held, scheme)
    slopes = jax.grad(lambda c: loss(learning.compose(THETA0, held, c, scheme)))(zero)
    g = tree.flatten(jax.grad(loss)(THETA0))
    exact = {name: np.asarray(g[name])[None] * np.asarray(learning.dense(stack)) for name, stack in held.items()}
    for name, c in slopes.items():
        if scheme.by == "task":
            wanted = sum(x.reshape(3, -1).sum(1) for x in exact.values())
        elif c.ndim == 1:
            wanted = exact[name].reshape(3, -1).sum(1)
        elif scheme.by == "row":
            wanted = exact[name].reshape(3, c.shape[1], -1).sum(2)
        else:
            parts = np.asarray(learning.parts_of(name, SHAPES[name], scheme))
            wanted = np.stack([exact[name][:, parts == k].sum(1) for k in range(3)], 1)
        np.testing.assert_allclose(c, wanted, rtol=2e-5, atol=1e-5)  # sums of up to 60 terms in another order


@pytest.mark.parametrize("store, error", [("bfloat16", 2**-8), ("int8", 1 / 250)])
def test_how_exactly_a_pool_is_held(store, error, held):
    stored = learning.pool(TAUS, store=store)
    for name, x in held.items():
        assert np.abs(np.asarray(learning.dense(stored[name])) - np.asarray(x)).max() <= error * np.abs(x).max()
    assert learning.stored_bytes(stored) < 0.9 * learning.stored_bytes(held)


def low_rank(seed, rank=2):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    return {"layers": {"0": {"weight": LowRank(draw(4, rank), draw(rank, 5))}}}


@pytest.mark.parametrize("scheme", SCHEMES[1:5], ids=str)
def test_low_rank_vectors_equal_their_products(scheme):
    factors = [low_rank(1), low_rank(2, rank=3)]
    products = [jax.tree.map(lambda x: x.dense(), tau, is_leaf=lambda x: isinstance(x, LowRank)) for tau in factors]
    lazy, whole = learning.pool(factors, THETA0), learning.pool(products, THETA0)
    c = some(whole, scheme)
    loss = lambda pool, c: jnp.sum(jnp.sin(learning.delta(pool, c, scheme)["layers"]["0"]["weight"]))
    (a, da), (b, db) = (jax.value_and_grad(loss, 1)(pool, c) for pool in (lazy, whole))
    np.testing.assert_allclose(a, b, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), da, db)  # sums of 20 products


@pytest.mark.parametrize("by", ["task", "tensor", "row", "column"])
def test_low_rank_vectors_are_never_formed(by):
    """No intermediate holds a (vectors, out, in) array, nor the product of a single vector."""
    big = [{"w": LowRank(jnp.ones((64, 2)), jnp.ones((2, 64)))} for _ in range(3)]
    pool, scheme = learning.pool(big), Scheme(by=by)
    loss = lambda c: learning.delta(pool, c, scheme)["w"].sum()
    text = str(jax.make_jaxpr(jax.grad(loss))(learning.init(pool, scheme)))
    assert "f32[3,64,64]" not in text and text.count("f32[64,64]") > 0


def test_leaves_that_a_vector_lacks_count_as_zero():
    held = learning.pool([low_rank(1), TAUS[0]], THETA0)
    assert set(held) == set(SHAPES)
    np.testing.assert_array_equal(held["norm.bias"][0], 0)
    np.testing.assert_allclose(held["layers.0.weight"][0], low_rank(1)["layers"]["0"]["weight"].dense())


def test_parts_are_seeded_and_belong_to_a_tensor():
    shape = (40, 50)
    draw = lambda name, **more: np.asarray(learning.parts_of(name, shape, Scheme(by="part", parts=4, **more)))
    np.testing.assert_array_equal(draw("a"), draw("a"))
    assert (draw("a") != draw("b")).mean() > 0.6 and (draw("a") != draw("a", seed=1)).mean() > 0.6
    np.testing.assert_array_equal(draw("a", sharing="shape"), draw("b", sharing="shape"))
    assert np.abs(np.bincount(draw("a").ravel(), minlength=4) / 2000 - 0.25).max() < 0.05


def test_parts_of_the_worked_example():
    tau, parts = jnp.array([[[0.0, 1, 2], [3, 4, 5]]]), jnp.array([[0, 1, 0], [1, 1, 0]])
    found = by_parts(tau, jnp.array([[0.5, 2.0]]), parts)
    np.testing.assert_array_equal(found, [[0, 2, 1], [6, 8, 2.5]])


def test_population_by_vmap(held):
    scheme = Scheme(by="task")
    many = {"task": jnp.arange(6.0).reshape(2, 3)}
    both = jax.vmap(lambda c: learning.delta(held, c, scheme))(many)
    for i in range(2):
        one = learning.delta(held, {"task": many["task"][i]}, scheme)
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-6, atol=1e-6), both, one)


def test_selection_may_differ_between_tensors(held):
    some = learning.take(held, {name: [i % 3, (i + 1) % 3] for i, name in enumerate(held)})
    for i, name in enumerate(held):
        np.testing.assert_array_equal(some[name][0], held[name][i % 3])
    assert learning.size(some) == 2 and learning.size(held) == 3


def test_bfloat16_models_keep_their_dtype():
    theta0 = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), THETA0)
    held = learning.pool(TAUS, theta0, store="bfloat16")
    theta = learning.compose(theta0, held, learning.init(held, Scheme(), value=0.5), Scheme())
    assert {x.dtype for x in jax.tree.leaves(theta)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("p", [1, 2])
def test_penalty(p, held):
    c = some(held, Scheme(by="part", parts=3))
    norms = [np.linalg.norm(column, p) for x in c.values() for column in np.asarray(x).reshape(3, -1).T]
    np.testing.assert_allclose(learning.penalty(c, p=p), 0.5 * np.mean(norms), rtol=1e-6)
    zero = jax.grad(lambda c: learning.penalty(c, p=p))(learning.init(held, Scheme()))
    assert all(np.isfinite(x).all() for x in zero.values())


@pytest.mark.parametrize("make, sentence", [
    (lambda: learning.pool([]), "the pool is empty"),
    (lambda: learning.pool([{"other": np.ones(2)}], THETA0), "another architecture: only there other"),
    (lambda: learning.pool([{"norm": {"bias": np.ones(5)}}], THETA0), r"norm.bias is \(5,\) there, \(4,\) here"),
    (lambda: learning.pool([{"norm": {"bias": np.full(4, np.nan)}}]), "not finite in norm.bias"),
    (lambda: learning.pool(TAUS, store="int4"), "float32, bfloat16, int8; got 'int4'"),
    (lambda: learning.init({"b": np.ones((2, 3))}, Scheme(blocks="weights")), "leaves nothing to scale"),
    (lambda: Scheme(parts=5), "goes with by='part'"),
    (lambda: learning.penalty({}, p=3), "p is 1 or 2"),
])
def test_slips(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
