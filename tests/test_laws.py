"""Laws of merging methods, each checked for every method but those it exempts, for a reason; these must break it.

A law is a function name -> relative error. A method runs as one jitted program of two merges at once, in which its
numbers are arguments, so that a law costs a call and not a compilation.
"""
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import tree
from tvjax.merging import METHODS, plan, total, traced
from tvjax.merging.engine import task_hashes

TOLERANCE = 2e-5  # float32, relative to the greatest entry: laws compare sums taken in different orders
BROKEN = 1e-3
SHAPES = {"layers.0.weight": (12, 8), "layers.0.bias": (12,), "layers.1.weight": (12, 8), "norm.weight": (12,)}
PAIRS = ("slerp", "nuslerp")  # merge two task vectors
NEED_TWO = (*PAIRS, "model_stock")
DATA_FREE = [name for name in METHODS if not plan.wanted(METHODS[name]())]

# options under which a method neither trims nor drops nor scales
NEUTRAL = {
    "task_arithmetic": dict(scale=1.0),
    "ties": dict(density=1.0),
    "consensus": dict(scale=1.0, k=1, lam=0.0),
    "dare": dict(density=1.0, scale=1.0),
    "dare_ties": dict(density=1.0),
    "della": dict(density=1.0, epsilon=0.0),
    "della_linear": dict(density=1.0, epsilon=0.0, scale=1.0),
    "breadcrumbs": dict(beta=0.0, gamma=0.0, scale=1.0),
    "breadcrumbs_ties": dict(beta=0.0, gamma=0.0),
    "magmax": dict(scale=1.0),
    "lines": dict(alpha=1.0, beta=0.0),
    "knots": dict(inner=total()),
    "tatr_zero_shot": dict(scale=1.0, quantile=1.0),
    "localize_and_stitch": dict(density=1.0),
}

ENTRYWISE = "chooses among entries, whose magnitudes depend on the basis"
SHARES = "its weights sum to 1, so that a sum is divided"
CROSSED = "signs and magnitudes of orthogonal tasks still meet entry by entry"
AGREED = "an entry that agrees with others is divided by their number"
FLAT = "gives all singular values the same size"
SVDS = "disjoint entries are not orthogonal singular vectors"
COSINE = "the cosine of orthogonal task vectors is 0, and so is the result"
SCORES = "entries compete with each other within a task vector too"
FEW = "equal tasks share the few singular directions that each may keep"
FILTERED = "where the filter holds it solves, elsewhere it sums"
CENTRED = "adds to the average what is left of low rank around it"
OTHERS = "leaves that are no matrices are averaged"
RIGHT = "merges the right factors entry by entry"
CONFLICTS = "drops the entries at which the product over tasks is greatest, one at least"
PRIVATE = "scales directions by what the tasks have in common there"

CHOOSERS = (
    "ties", "consensus", "dare", "dare_ties", "della", "della_linear", "breadcrumbs", "breadcrumbs_ties", "magmax",
    "emr", "pcb", "sce", "tatr_zero_shot", "localize_and_stitch",
)
AVERAGES = ("average", "metagpt", "nan", "multi_slerp", "karcher", "slerp", "nuslerp")
EXEMPT = {
    "homogeneous": {"pcb": "its scores are tanh of the products of entries, which have a unit"},
    "permutation": {},
    "identical": {
        "pcb": SCORES, "tatr_zero_shot": CONFLICTS,
        **{name: FEW for name in ("tsv_m", "core_space")},
        **{name: FLAT for name in ("iso_c", "iso_cts", "dc_merge")},
        **{name: FILTERED for name in ("swudi", "aswudi")},
    },
    "single": {"pcb": SCORES, **{name: FLAT for name in ("iso_c", "iso_cts", "dc_merge")}},
    "equivariant": {**{name: ENTRYWISE for name in CHOOSERS}, "knots": RIGHT},
    "disjoint": {
        **{name: SHARES for name in AVERAGES}, "model_stock": COSINE, "pcb": SCORES, "tsv_m": SVDS, "cart": CENTRED,
        **{name: FLAT for name in ("iso_c", "iso_cts", "dc_merge")}, "svc": PRIVATE,
        **{name: OTHERS for name in ("knots", "core_space", "wudi", "actmat", "swudi", "aswudi")},
    },
    "orthogonal": {
        **{name: SHARES for name in AVERAGES}, "model_stock": COSINE, "cart": CENTRED, "svc": PRIVATE,
        **{name: FLAT for name in ("iso_c", "iso_cts", "dc_merge")},
        **{name: AGREED for name in ("ties", "dare_ties", "della", "breadcrumbs_ties", "sce", "localize_and_stitch")},
        **{name: CROSSED for name in ("magmax", "emr", "pcb")},
    },
}


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Programs here run for microseconds: compile them fast, not well."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


# ---------------------------------------------------------------- task vectors and programs
def count(name: str) -> int:
    return 2 if name in PAIRS else 4


def stack(tasks: int, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((tasks, *shape)).astype(np.float32) for name, shape in SHAPES.items()}


@functools.cache
def program():
    return jax.jit(jax.vmap(lambda operator, taus, tasks: traced.run(operator, taus, tasks, {})))


def both(name, first, second, *, names=(None, None), options=({}, {})) -> list[dict]:
    """Two merges by one program: of two stacks, under two lists of names, with two values of the numbers."""
    pair = lambda a, b: jax.tree.map(lambda x, y: np.stack([np.asarray(x), np.asarray(y)]), a, b)
    hashes = [task_hashes(given, len(first["norm.weight"])) for given in names]
    made = program()(pair(*[METHODS[name](**given) for given in options]), pair(first, second), pair(*hashes))
    return [{leaf: np.asarray(x)[i] for leaf, x in made.items()} for i in range(2)]


def merged(name: str, taus: dict, **options) -> dict:
    return both(name, taus, taus, options=(options, options))[0]


def error(got: dict, expected: dict) -> float:
    """The greatest deviation, relative to the greatest entry."""
    largest = max(float(np.abs(x).max()) for x in expected.values())
    return max(float(np.abs(got[name] - expected[name]).max()) for name in expected) / max(largest, 1e-30)


def matrices(flat: dict) -> dict:
    return {name: x for name, x in flat.items() if len(SHAPES[name]) == 2}


def summed(taus: dict) -> dict:
    return {name: x.sum(0) for name, x in taus.items()}


# ---------------------------------------------------------------- the laws
def homogeneous(name):
    """f(cX) = c·f(X), for negative c too."""
    taus = stack(count(name))
    once, scaled = both(name, taus, {leaf: -3 * x for leaf, x in taus.items()})
    return error(scaled, {leaf: -3 * x for leaf, x in once.items()})


def permutation(name):
    """The order of tasks is irrelevant; draws follow their names."""
    taus, names = stack(count(name)), ["mnist", "cars", "svhn", "dtd"][: count(name)]
    order = np.roll(np.arange(count(name)), 1)
    turned = {leaf: x[order] for leaf, x in taus.items()}
    return error(*both(name, turned, taus, names=([names[i] for i in order], names)))


def identical(name):
    """Equal task vectors merge to a multiple of themselves, leaf by leaf."""
    one = {leaf: x[0] for leaf, x in stack(1).items()}
    got = merged(name, {leaf: np.stack([x] * count(name)) for leaf, x in one.items()}, **NEUTRAL.get(name, {}))
    factors = {leaf: (got[leaf] * x).sum() / (x * x).sum() for leaf, x in one.items()}
    kept = min(factors.values()) > 0.01  # zero is no multiple worth the name
    return error(got, {leaf: factors[leaf] * x for leaf, x in one.items()}) if kept else 1.0


def single(name):
    """One task vector merges to itself."""
    taus = stack(1)
    return error(merged(name, taus, **NEUTRAL.get(name, {})), summed(taus))


def equivariant(name):
    """f(QXR) = Q f(X) R for orthogonal Q and R, on the matrices."""
    rng = np.random.default_rng(1)
    Q, R = (np.linalg.qr(rng.standard_normal((n, n)))[0].astype(np.float32) for n in (12, 8))
    turn = lambda flat: {leaf: Q @ x @ R if leaf in matrices(flat) else x for leaf, x in flat.items()}
    taus = stack(count(name))
    turned, straight = both(name, turn(taus), taus)
    return error(matrices(turned), matrices(turn(straight)))


def disjoint(name):
    """Task vectors without common entries merge to their sum."""
    taus, rng = stack(count(name)), np.random.default_rng(3)
    owner = {leaf: rng.permutation(x[0].size).reshape(x[0].shape) % len(x) for leaf, x in taus.items()}
    taus = {leaf: np.stack([np.where(owner[leaf] == t, x[t], 0) for t in range(len(x))]) for leaf, x in taus.items()}
    return error(merged(name, taus, **NEUTRAL.get(name, {})), summed(taus))


def orthogonal(name):
    """Task vectors with orthogonal row and column spaces merge to their sum, on the matrices."""
    rng, tasks = np.random.default_rng(2), count(name)
    taus = stack(tasks)
    for leaf in matrices(taus):
        U, V = (np.linalg.qr(rng.standard_normal((n, 8)))[0].reshape(n, tasks, -1) for n in (12, 8))
        taus[leaf] = np.einsum("otk,itk,tk->toi", U, V, 1 + rng.random((tasks, 8 // tasks))).astype(np.float32)
    return error(matrices(merged(name, taus, **NEUTRAL.get(name, {}))), matrices(summed(taus)))


LAWS = {law.__name__: law for law in (homogeneous, permutation, identical, single, equivariant, disjoint, orthogonal)}


@pytest.mark.parametrize("name", DATA_FREE)
@pytest.mark.parametrize("law", LAWS)
def test_law(law, name):
    """Each method obeys each law, or is exempted for a reason and breaks it."""
    if law == "single" and name in NEED_TWO:
        pytest.skip("needs two task vectors")
    found = LAWS[law](name)
    if name in EXEMPT[law]:
        assert found > BROKEN, f"{name} obeys {law}: no exemption needed ({EXEMPT[law][name]})"
    else:
        assert found < TOLERANCE, f"{name} breaks {law}"


def test_exemptions_name_methods():
    assert set(EXEMPT) == set(LAWS) and {name for law in EXEMPT.values() for name in law} <= set(METHODS)
    assert all(reason for law in EXEMPT.values() for reason in law.values())


# ---------------------------------------------------------------- engines, containers, transformations
def float_options(name):
    """The numbers of a method, by their defaults."""
    parameters = inspect.signature(METHODS[name]).parameters.values()
    return {p.name: p.default for p in parameters if isinstance(p.default, float)}


@pytest.mark.parametrize("name", DATA_FREE)
def test_types_are_kept_and_no_arrays_held(name):
    """Names, shapes and dtypes, without computing; the method's first number is traced from its factory on."""
    taus = {leaf: jax.ShapeDtypeStruct((count(name), *shape), jnp.bfloat16) for leaf, shape in SHAPES.items()}
    numbers = dict(list(float_options(name).items())[:1])
    go = lambda taus, numbers: METHODS[name](**numbers)(taus)
    jaxpr, made = jax.make_jaxpr(go, return_shape=True)(tree.unflatten(taus), numbers)
    kept = {leaf: (shape, jnp.bfloat16) for leaf, shape in SHAPES.items()}
    assert {leaf: (x.shape, x.dtype) for leaf, x in tree.flatten(made).items()} == kept
    assert all(np.size(constant) <= 16 for constant in jaxpr.consts), "an array in a closure"


@pytest.mark.parametrize("name", DATA_FREE)
def test_one_program_is_every_single_call(name):
    """`jit` and `vmap` over a number give what eager calls give; a list is a stack; NaN is refused by name."""
    taus = stack(count(name))
    nested = tree.unflatten(taus)
    number, default = next(iter(float_options(name).items()), (None, None))
    options = ({}, {number: 0.9 * default}) if number else ({}, {})
    for given, made in zip(options, both(name, taus, taus, options=options), strict=True):
        eager = tree.flatten(METHODS[name](**given)(nested))
        assert all(eager[leaf].dtype == np.float32 for leaf in SHAPES)
        assert error(made, eager) < TOLERANCE
    eager = tree.flatten(METHODS[name]()(nested))
    listed = METHODS[name]()([tree.unflatten({leaf: x[t] for leaf, x in taus.items()}) for t in range(count(name))])
    jax.tree.map(np.testing.assert_array_equal, tree.flatten(listed), eager)
    taus["layers.1.weight"][0, 3, 2] = np.nan
    with pytest.raises(ValueError, match="NaN or infinite"):
        METHODS[name]()(tree.unflatten(taus))


@pytest.mark.parametrize("name", DATA_FREE)
def test_zero_task_vectors_are_harmless(name):
    """One that is all zero makes nothing infinite, and nothing comes from nothing."""
    taus = stack(count(name))
    one = {leaf: np.concatenate([x[:-1], np.zeros_like(x[-1:])]) for leaf, x in taus.items()}
    some, none = both(name, one, {leaf: np.zeros_like(x) for leaf, x in taus.items()})
    assert all(np.isfinite(x).all() for x in some.values()) and any(x.any() for x in some.values())
    assert not any(x.any() for x in none.values())


# ---------------------------------------------------------------- one clear sentence
@pytest.mark.parametrize("name", NEED_TWO)
def test_too_few_task_vectors_are_a_sentence(name):
    with pytest.raises(ValueError, match=f"{name} needs .* two task vectors; got 1"):
        METHODS[name]()(stack(1))
    if name in PAIRS:
        with pytest.raises(ValueError, match=f"{name} needs exactly two task vectors; got 3"):
            METHODS[name]()(stack(3))


@pytest.mark.parametrize("name", [name for name in METHODS if "density" in inspect.signature(METHODS[name]).parameters])
@pytest.mark.parametrize("density", [0.0, -0.1, 1.5])
def test_densities_are_shares(name, density):
    with pytest.raises(ValueError, match=re.escape(f"density lies in (0, 1]; got {density}")):
        METHODS[name](density=density)


NORMALIZING = (
    "average", "task_arithmetic", "dare", "della_linear", "breadcrumbs", "nuslerp", "multi_slerp", "karcher",
)


@pytest.mark.parametrize("name", NORMALIZING)
def test_weights_that_sum_to_zero_cannot_be_normalized(name):
    options = {"normalize": True} if "normalize" in inspect.signature(METHODS[name]).parameters else {}
    with pytest.raises(ValueError, match=r"the weights \[1.0, -1.0\] sum to 0 and cannot be normalized"):
        METHODS[name](weights=[1.0, -1.0], **options)


@pytest.mark.parametrize("name", [name for name in METHODS if "weights" in inspect.signature(METHODS[name]).parameters])
def test_weights_are_as_many_as_tasks(name):
    with pytest.raises(ValueError, match=f"there are {count(name)} task vectors but 3 numbers for them"):
        METHODS[name](weights=[0.2, 0.3, 0.5])(stack(count(name)))


@pytest.mark.parametrize("name, option", [
    ("ties", {"reduce": "median"}), ("ties", {"zero": "-"}), ("ties", {"sign": "sum"}), ("ties", {"elect": "never"}),
    ("ties", {"divide": "n"}), ("ties", {"scope": "tensor"}), ("dare", {"rescale": "l2"}), ("della", {"rescale": "l2"}),
    ("magmax", {"ties": "both"}), ("slerp", {"unit": "tensor"}), ("model_stock", {"angle": "radians"}),
    ("consensus", {"base": "mean"}), ("consensus", {"comparator": "<"}), ("lines", {"norm": "l3"})])
def test_options_say_what_there_is(name, option):
    with pytest.raises(ValueError, match=rf"no {next(iter(option))} '.*'; .*there are"):
        METHODS[name](**option)
