"""Tangent models: the identities of a first-order expansion, on a network and on arrays; what has none."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tvjax import tangent, training, tree, vectors
from tvjax.models import clip

pytestmark = pytest.mark.usefixtures("quick_compilation")
MODEL = clip.CLIP(clip.Spec(clip.VisionSpec(8, 16, 2, 2, image_size=8, patch=4), None, projection_dim=4))
APPLY = clip.image_features(MODEL)
THETA0 = clip.init(MODEL, jax.random.key(0))
IMAGES = jax.random.normal(jax.random.key(1), (3, 8, 8, 3))


def near(seed, size=0.1):
    """A random task vector of the network."""
    leaves, shape = jax.tree.flatten(THETA0)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return vectors.TaskVector(jax.tree.unflatten(shape, [size * jax.random.normal(k, x.shape)
                                                         for k, x in zip(keys, leaves, strict=True)]))


TAUS = [near(seed) for seed in (2, 3, 4)]


@pytest.fixture(scope="module")
def f():
    return jax.jit(lambda tau: tangent.tangent(APPLY, THETA0)(tau, IMAGES))


@pytest.fixture(scope="module")
def swept():
    return jax.jit(tangent.slopes(APPLY))(THETA0, TAUS, IMAGES)


@pytest.fixture(scope="module")
def model():
    return jax.jit(APPLY)


def test_at_theta0_it_is_the_model(f, model):
    np.testing.assert_allclose(f(0 * TAUS[0]), model(THETA0, IMAGES), rtol=1e-5, atol=1e-6)


def test_it_is_the_first_order_expansion(f, model):
    """The rest is of second order: a tenth of the step leaves a hundredth of the error."""
    rest = lambda size: np.abs(model(vectors.add(THETA0, TAUS[0], scale=size), IMAGES) - f(size * TAUS[0])).max()
    assert rest(0.1) < 0.03 * rest(1.0)


def test_it_is_affine_in_tau(f):
    a, b = TAUS[:2]
    zero = f(0 * a)
    np.testing.assert_allclose(f(0.5 * a - 2 * b), zero + 0.5 * (f(a) - zero) - 2 * (f(b) - zero), atol=1e-4)


def test_slopes_are_those_of_each_task(f, swept):
    value, slopes = swept
    zero = f(0 * TAUS[0])
    np.testing.assert_allclose(value, zero, atol=1e-6)
    for tau, slope in zip(TAUS, slopes, strict=True):
        np.testing.assert_allclose(zero + slope, f(tau), atol=1e-5)


def test_any_coefficients_from_one_pass(f, swept):
    coefficients = np.array([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [-2.0, 0.5, 0.0]], np.float32)
    found = tangent.affine(*swept, coefficients)
    for row, c in zip(found, coefficients, strict=True):
        merged = sum(float(x) * tau for x, tau in zip(c, TAUS, strict=True))
        np.testing.assert_allclose(row, f(merged), atol=2e-5)


def test_coefficients_may_have_any_leading_axes(swept):
    grid = np.stack(np.meshgrid([0.0, 1.0], [0.0, 2.0, 3.0], [1.0]), -1)
    assert tangent.affine(*swept, grid).shape == (3, 2, 1, 3, 4)


def test_it_is_an_argument_of_jit():
    f = tangent.tangent(APPLY, THETA0)
    made = jax.make_jaxpr(lambda f, tau, x: f(tau, x))(f, TAUS[0], IMAGES)
    assert sum(np.size(x) for x in made.consts) < 100, "θ0 is inside of the program"


def test_geometries_hold_the_same_numbers():
    part = tree.select(TAUS[0], "mlp")
    there = tangent.to_tangent(part, THETA0)
    tree.check_same(there, THETA0)
    back = tangent.to_standard(tangent.to_tangent(TAUS[0], THETA0), THETA0)
    assert isinstance(back, vectors.TaskVector)
    jax.tree.map(np.testing.assert_array_equal, back, TAUS[0])
    jax.tree.map(np.testing.assert_array_equal, vectors.add(THETA0, there), vectors.add(THETA0, part))


def test_a_vector_of_another_model_is_refused():
    with pytest.raises(ValueError, match="only in tau: alien"):
        tangent.to_tangent({"alien": jnp.ones(1)}, THETA0)
    with pytest.raises(ValueError, match="shapes: class_embedding"):
        tangent.to_tangent({"class_embedding": jnp.ones(1)}, {"class_embedding": jnp.ones(2)})


def test_training_moves_the_linear_model_alone():
    """Gradient descent on a linear model's squared error is the closed-form iteration."""
    apply, x, y = lambda p, x: jnp.tanh(x @ p["w"]), jnp.eye(3, 2), jnp.array([0.5, -0.5, 1.0])
    theta0 = {"w": jnp.array([0.3, -0.2])}
    jacobian = jax.jacobian(lambda w: apply({"w": w}, x))(theta0["w"])

    def loss(theta, batch, key, theta0):
        made = tangent.linearised(apply)(theta0, tangent.difference(theta, theta0), batch[0])
        return jnp.sum((made - batch[1]) ** 2) / 2
    recipe = training.Recipe(steps=3, batch=3, lr=0.1, warmup=0)
    fitted = training.fit(loss, theta0, [(np.asarray(x), np.asarray(y))] * 3, recipe, frozen=theta0,
                          transform=optax.sgd(0.1))
    tau = np.zeros(2, np.float32)
    for _ in range(3):
        tau -= 0.1 * jacobian.T @ (apply(theta0, x) + jacobian @ tau - y)
    np.testing.assert_allclose(fitted.params["w"] - theta0["w"], tau, atol=1e-6)


def test_rematerialised_models_give_the_same_gradients():
    apply = lambda p, x: jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"])
    theta0, tau = ({"a": c * jnp.ones((3, 4)), "b": c * jnp.eye(4)} for c in (0.2, 0.7))

    def gradient(policy):
        f = tangent.linearised(tangent.rematerialised(apply, policy))
        return jax.jit(jax.grad(lambda tau: jnp.sum(f(theta0, tau, jnp.eye(3)) ** 2)))(tau)
    for policy in ("dots", "all"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), gradient(policy), gradient("none"))
    assert tangent.rematerialised(apply, "none") is apply
    with pytest.raises(ValueError, match="did you mean 'dots'"):
        tangent.rematerialised(apply, "dot")


@jax.custom_vjp
def reverse_only(x):
    return x


reverse_only.defvjp(lambda x: (x, None), lambda _, g: (g,))


@pytest.mark.parametrize("apply, message", [
    (lambda p, x: jnp.argmax(p["w"] * x), "it returns int32; give one that returns features or logits"),
    (lambda p, x: reverse_only(p["w"]) * x, "apply has no forward derivative, so it has no tangent model"),
    (lambda p, x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((2,), x.dtype), p["w"] * x), "no forward derivative"),
])
def test_what_is_not_differentiable_is_a_sentence(apply, message):
    theta0, x = {"w": jnp.ones(2)}, jnp.ones(2)
    for run in (lambda: tangent.tangent(apply, theta0)(theta0, x), lambda: tangent.slopes(apply)(theta0, [theta0], x)):
        with pytest.raises(ValueError, match=message):
            run()


def test_integer_leaves_are_a_sentence():
    with pytest.raises(ValueError, match=r"floating-point leaves alone, and theta0 holds position_ids \(int32\)"):
        tangent.tangent(APPLY, {"w": jnp.ones(1), "position_ids": jnp.arange(3)})
    with pytest.raises(ValueError, match="no leaf"):
        tangent.tangent(APPLY, {})


def test_a_users_own_mistake_keeps_its_traceback():
    with pytest.raises(TypeError, match="my own"):
        def apply(params, x):
            raise TypeError("my own")
        tangent.tangent(apply, {"w": jnp.ones(1)})({}, 1.0)
