"""Adapters on networks: what they add, where they start, their linearisations, and the weights they amount to."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import adapters, merging, tangent, training, tree, vectors
from tvjax.models.layers import Conv1D, Linear

pytestmark = pytest.mark.usefixtures("quick_compilation")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + jnp.tanh(Linear(6, name="q_proj")(x)) * Linear(6, name="v_proj")(x)
        return x + Linear(6, name="fc2")(jnp.tanh(Conv1D(9, name="c_fc")(x)))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = Block(name=f"layers_{i}")(x)
        return Linear(4, bias=False, name="head")(x)


NET, X = Net(), jax.random.normal(jax.random.key(1), (3, 5, 6))


def apply(params, x):
    return NET.apply({"params": params}, x)


def moved(phi0, seed=3, size=0.2):
    """φ away from φ0 in every entry."""
    draw = np.random.default_rng(seed).standard_normal
    return tree.unflatten({name: jnp.asarray(np.asarray(x) + size * draw(x.shape, np.float32))
                           for name, x in tree.flatten(phi0).items()})


def adapted(method, phi, key=None):
    return jax.jit(lambda *args: adapters.adapted(apply, method)(*args, key=key))(THETA0, phi, X)


def linearised(method, phi0, phi, scope="module", key=None):
    return jax.jit(lambda *args: adapters.linearised(apply, method, scope)(*args, key=key))(THETA0, phi0, phi, X)


THETA0 = moved(dict(jax.jit(NET.init)(jax.random.key(0), X)["params"]), seed=1)
SITES = adapters.find(apply, THETA0, X)
BASE = jax.jit(apply)(THETA0, X)
LORA = adapters.Lora(rank=2, alpha=4)
METHODS = {"lora": LORA, "lora on mlp": adapters.Lora(rank=3, targets="c_fc|fc2", scaling="root"),
           "bias": adapters.Bias(), "ia3": adapters.Rescale(targets="v_proj|c_fc|fc2"),
           "bottleneck": adapters.Bottleneck(width=2, targets="fc2")}


@pytest.fixture(params=METHODS, scope="module")
def case(request):
    """(method, φ0, φ)"""
    method = METHODS[request.param]
    phi0 = adapters.start(method, SITES)
    return method, phi0, moved(phi0)


def one_layer(weight, a, b, scale):
    """(method, apply, θ0, φ) of one linear map without a bias."""
    class Whole(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Linear(len(weight), bias=False, name="q_proj")(x)
    run = lambda params, x: Whole().apply({"params": params}, x)
    method = adapters.Lora(rank=len(a), alpha=scale * len(a))
    return method, run, {"q_proj": {"weight": jnp.array(weight)}}, phi_of(a, b)


def phi_of(a, b):
    return {"q_proj": {"lora_A": {"weight": jnp.array(a)}, "lora_B": {"weight": jnp.array(b)}}}


# ---------------------------------------------------------------- what they add
def test_the_worked_example():
    """W0 = I, A0 = [1, 2], B0 = 0, s = 2, A = [3, −1], B = [.5, −.25]ᵀ, x = [1, 1]: LoRA [3, 0], L-LoRA [4, −.5]."""
    method, run, theta0, phi = one_layer([[1.0, 0.0], [0.0, 1.0]], [[3.0, -1.0]], [[0.5], [-0.25]], 2)
    phi0, x = phi_of([[1.0, 2.0]], [[0.0], [0.0]]), jnp.ones((1, 2))
    assert adapters.adapted(run, method)(theta0, phi, x).tolist() == [[3.0, 0.0]]
    for scope in adapters.SCOPES:
        linear = adapters.linearised(run, method, scope)
        assert linear(theta0, phi0, phi, x).tolist() == [[4.0, -0.5]]
        grad = jax.grad(lambda phi, linear=linear: linear(theta0, phi0, phi, x).sum())(phi)
        assert not grad["q_proj"]["lora_A"]["weight"].any() and grad["q_proj"]["lora_B"]["weight"].all()


def test_modules_are_found_with_their_layout():
    assert list(SITES) == [f"layers_{i}.{name}" for i in range(2) for name in ("q_proj", "v_proj", "c_fc", "fc2")] + [
        "head"]
    assert SITES["layers_0.c_fc"] == (6, 9, "weight", "bias", True) and SITES["head"].bias == ""
    assert not SITES["layers_0.q_proj"].turned


def test_at_the_start_nothing_changes(case):
    method, phi0, _ = case
    np.testing.assert_allclose(adapted(method, phi0), BASE, atol=1e-6)


@pytest.mark.parametrize("scaling, scale", [("rank", 2.0), ("root", 8.0)])
def test_scales(scaling, scale):
    assert adapters.Lora(rank=16, alpha=32, scaling=scaling).scale == scale


def test_other_modules_are_left_alone():
    phi = adapters.start(LORA, SITES)
    assert list(adapters.modules(phi, LORA)) == [f"layers_{i}.{end}" for i in range(2) for end in ("q_proj", "v_proj")]


def test_weights_are_the_same_for_all_tasks_of_a_seed():
    first, again = (adapters.start(LORA, SITES, seed=42) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    other = adapters.start(LORA, SITES, seed=43)
    assert (first["layers_0"]["q_proj"]["lora_A"]["weight"] != other["layers_0"]["q_proj"]["lora_A"]["weight"]).any()
    alone = adapters.start(adapters.Lora(rank=2, alpha=4, targets="layers_0.q_proj"), SITES, seed=42)
    np.testing.assert_array_equal(alone["layers_0"]["q_proj"]["lora_A"]["weight"],
                                  first["layers_0"]["q_proj"]["lora_A"]["weight"])
    a = np.concatenate([x.ravel() for name, x in tree.flatten(first).items() if "lora_A" in name])
    assert np.abs(a).max() <= 6**-0.5 and np.std(a) == pytest.approx(6**-0.5 / 3**0.5, rel=0.2)


def test_dropout_is_unbiased_and_for_training_alone():
    method = adapters.Lora(rank=2, alpha=4, dropout=0.5)
    phi = moved(adapters.start(method, SITES))
    np.testing.assert_array_equal(adapted(method, phi), adapted(LORA, phi))
    one = jnp.ones((1, 6))
    site = {"lora_A.weight": jnp.ones((2, 6)), "lora_B.weight": jnp.ones((1, 2))}
    keys = jax.random.split(jax.random.key(0), 4000)
    many = jax.vmap(lambda key: method.after(site, one, jnp.zeros((1, 1)), key))(keys)
    assert many.mean() == pytest.approx(24.0, rel=0.02) and many.std() > 5


# ---------------------------------------------------------------- linearised
def test_by_network_it_is_the_jvp(case):
    method, phi0, phi = case
    expected = expanded(lambda p: adapters.adapted(apply, method)(THETA0, p, X), phi0, phi)
    np.testing.assert_allclose(linearised(method, phi0, phi, "network"), expected, rtol=1e-6, atol=1e-6)


def expanded(f, phi0, phi):
    return sum(jax.jit(lambda at, to: jax.jvp(f, (at,), (tangent.difference(to, at),)))(phi0, phi))


def test_by_module_it_is_each_modules_own_expansion():
    phi0 = moved(adapters.start(LORA, SITES), seed=5)  # B0 other than zero, so that all terms count
    phi = moved(phi0)
    np.testing.assert_allclose(linearised(LORA, phi0, phi), jax.jit(by_hand)(phi0, phi), rtol=1e-5, atol=2e-6)


def by_hand(phi0, phi):
    """W0 h + s(B0 A0 + (B − B0) A0 + B0 (A − A0)) h at the adapted modules, the rest as in `Block`."""
    def linear(i, name, h):
        p, weight = THETA0[f"layers_{i}"][name], THETA0[f"layers_{i}"][name]["weight"]
        if name in ("q_proj", "v_proj"):
            of = lambda one, side: one[f"layers_{i}"][name][f"lora_{side}"]["weight"]
            (a0, b0), (a, b) = ((of(one, "A"), of(one, "B")) for one in (phi0, phi))
            weight = weight + 2 * (b0 @ a0 + (b - b0) @ a0 + b0 @ (a - a0))
        return h @ (weight if name == "c_fc" else weight.T) + p["bias"][None, None]
    x = X
    for i in range(2):
        x = x + jnp.tanh(linear(i, "q_proj", x)) * linear(i, "v_proj", x)
        x = x + linear(i, "fc2", jnp.tanh(linear(i, "c_fc", x)))
    return x @ THETA0["head"]["weight"].T


@pytest.mark.parametrize("scope", adapters.SCOPES)
def test_a_gets_no_gradient_where_b_starts_at_zero(scope):
    phi0 = adapters.start(LORA, SITES)
    f = adapters.linearised(apply, LORA, scope)
    grad = tree.flatten(jax.jit(jax.grad(lambda phi: jnp.sum(f(THETA0, phi0, phi, X) ** 2)))(moved(phi0)))
    assert all(bool(x.any()) == ("lora_B" in name) for name, x in grad.items())


def test_dropout_is_inside_of_the_derivative():
    method = adapters.Lora(rank=2, alpha=4, dropout=0.5)
    phi0 = adapters.start(method, SITES)
    phi, key = moved(phi0), jax.random.key(7)
    expected = expanded(lambda p: adapters.adapted(apply, method)(THETA0, p, X, key=key), phi0, phi)
    np.testing.assert_allclose(linearised(method, phi0, phi, "network", key), expected, atol=1e-6)
    assert np.abs(linearised(method, phi0, phi, key=key) - linearised(method, phi0, phi)).max() > 1e-3


def test_slopes_in_phi_give_any_mixture():
    phi0 = adapters.start(LORA, SITES)
    taus = [vectors.task_vector(moved(phi0, seed), phi0) for seed in (3, 4)]
    value, slope = jax.jit(tangent.slopes(adapters.in_phi(apply, LORA)))(phi0, taus, THETA0, X)
    mixed = vectors.add(phi0, 0.5 * taus[0] - 2 * taus[1])
    np.testing.assert_allclose(tangent.affine(value, slope, jnp.array([0.5, -2.0])),
                               linearised(LORA, phi0, mixed, "network"), atol=1e-5)


def test_all_methods_train_linearised(case):
    method, phi0, _ = case
    f = adapters.linearised(apply, method, "network")

    def loss(phi, batch, key, frozen):
        return jnp.mean((f(*frozen, phi, batch[0], key=key) - batch[1]) ** 2)
    recipe = training.Recipe(steps=4, batch=3, lr=0.02, warmup=0, weight_decay=0.0)
    batch = (np.asarray(X), np.ones((3, 5, 4), np.float32))
    losses = training.fit(loss, phi0, [batch] * 4, recipe, frozen=(THETA0, phi0)).losses
    assert losses[-1] < losses[0]


# ---------------------------------------------------------------- as weights
@pytest.mark.parametrize("name", [name for name in METHODS if name != "bottleneck"])
@pytest.mark.parametrize("linear", [False, True])
def test_exported_weights_give_equal_outputs(name, linear):
    method = METHODS[name]
    phi0 = adapters.start(method, SITES)
    phi = moved(phi0)
    expected = linearised(method, phi0, phi) if linear else adapted(method, phi)
    theta = adapters.merged(method, THETA0, phi, SITES, phi0=phi0 if linear else None)
    np.testing.assert_allclose(jax.jit(apply)(theta, X), expected, rtol=1e-5, atol=1e-5)


def test_linear_lora_is_a_lora_with_the_first_a():
    phi0 = adapters.start(LORA, SITES)
    phi = moved(phi0)
    np.testing.assert_allclose(adapted(LORA, adapters.as_lora(phi0, phi)), linearised(LORA, phi0, phi), atol=1e-5)
    with pytest.raises(ValueError, match="B is not zero at the start in layers_0.q_proj, layers_0.v_proj"):
        adapters.as_lora(phi, phi)


def test_merges_work_in_the_space_of_phi():
    """Task arithmetic on L-LoRA adds the changes of the weights; on LoRA it does not, since B A is a product."""
    phi0 = adapters.start(LORA, SITES)
    phis = [moved(phi0, seed) for seed in (3, 4)]
    tau = merging.build("task_arithmetic", {"scale": 0.5})([vectors.task_vector(phi, phi0) for phi in phis])
    of = lambda phi, **kwargs: tree.flatten(adapters.dense(LORA, THETA0, phi, SITES, **kwargs))
    whole, parts = of(vectors.add(phi0, tau), phi0=phi0), [of(phi, phi0=phi0) for phi in phis]
    for name, x in whole.items():
        np.testing.assert_allclose(x, 0.5 * sum(part[name] for part in parts), atol=1e-6)
    query = lambda phi: of(phi)["layers_0.q_proj.weight"]
    assert np.abs(query(vectors.add(phi0, tau)) - 0.5 * sum(map(query, phis))).max() > 0.01


# ---------------------------------------------------------------- slips
@pytest.mark.parametrize("method, message", [
    (adapters.Lora(rank=2, targets="q_prj"), "matches no module that has a matrix; did you mean 'q_proj'"),
    (adapters.Lora(rank=2, targets="("), "is no regular expression"),
    (adapters.Lora(rank=7), "rank 7 is above that of layers_0.q_proj, a matrix of 6 × 6: take at most 6"),
    (adapters.Bias(targets="head"), "matches no module that has a bias"),
])
def test_a_method_that_does_not_fit_is_a_sentence(method, message):
    with pytest.raises(ValueError, match=message):
        adapters.start(method, SITES)


@pytest.mark.parametrize("name, options, message", [
    ("lroa", {}, "no adapter called 'lroa'; did you mean 'lora'"),
    ("lora", {"rnak": 2}, "lora has no option 'rnak'; did you mean 'rank'"),
    ("lora", {"rank": 0}, "rank is a whole number from 1 on; got 0"),
    ("lora", {"dropout": 1.0}, "dropout is a share from 0 to below 1"),
    ("lora", {"scaling": "rs"}, "scaling is 'rank'"),
    ("bottleneck", {"width": 0}, "width is a whole number"),
])
def test_a_wrong_option_is_a_sentence(name, options, message):
    with pytest.raises(ValueError, match=message):
        adapters.build(name, options)


def test_adapters_of_another_model_are_a_sentence():
    phi = {"layers_7": adapters.start(LORA, SITES)["layers_0"]}
    with pytest.raises(ValueError, match="never called layers_7.q_proj, layers_7.v_proj, where phi has adapters"):
        adapters.adapted(apply, LORA)(THETA0, phi, X)
    with pytest.raises(ValueError, match="no module layers_7.q_proj"):
        adapters.dense(LORA, THETA0, phi, SITES)
    with pytest.raises(ValueError, match="phi holds layers_7.q_proj.lora_A.weight, which is no part of Bias"):
        adapters.adapted(apply, adapters.Bias())(THETA0, phi, X)


def test_a_function_without_modules_is_a_sentence():
    with pytest.raises(ValueError, match="calls no Flax module"):
        adapters.find(lambda params, x: x @ params["w"], {"w": jnp.eye(2)}, jnp.ones((1, 2)))


def test_a_bottleneck_has_no_weights_to_export():
    method = METHODS["bottleneck"]
    with pytest.raises(ValueError, match="can't be exported"):
        adapters.merged(method, THETA0, adapters.start(method, SITES), SITES)
    with pytest.raises(ValueError, match="scope is 'module' or 'network'"):
        adapters.linearised(apply, method, "modul")
