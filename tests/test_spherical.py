"""SLERP and its kin, Karcher means and Model Stock against plain loops on flattened leaves."""
import numpy as np
import pytest

from tvjax import merging

RNG = np.random.default_rng(0)
TAUS = {"layers": [{"w": RNG.standard_normal((3, 4, 5)).astype(np.float32)} for _ in range(2)],
        "norm": RNG.standard_normal((3, 4)).astype(np.float32)}
TWO = {"layers": [{"w": layer["w"][:2]} for layer in TAUS["layers"]], "norm": TAUS["norm"][:2]}
WEIGHTS = [0.5, 2.0, 1.5]


def parts(taus, unit):
    """The vectors that one coefficient belongs to, (tasks, n) each, and how to put merged ones together again."""
    leaves = [*[layer["w"] for layer in taus["layers"]], taus["norm"]]
    if unit in ("leaf", "global"):
        flat = [x.reshape(len(x), -1).astype(np.float64) for x in leaves]
        return flat if unit == "leaf" else [np.concatenate(flat, 1)]
    rows = [x if unit == "row" or x.ndim == 2 else np.swapaxes(x, 1, 2) for x in leaves]
    return [row.astype(np.float64) for x in rows for row in np.moveaxis(x.reshape(len(x), -1, x.shape[-1]), 1, 0)]


def check(operator, taus, one, unit):
    merged = operator(taus)
    got = parts({"layers": [{"w": x["w"][None]} for x in merged["layers"]], "norm": merged["norm"][None]}, unit)
    for found, rows in zip(got, parts(taus, unit), strict=True):
        np.testing.assert_allclose(found[0], one(rows), rtol=1e-5, atol=2e-6)


def arc(t, a, b):
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    if abs(cosine) > 0.9995:
        return (1 - t) * a + t * b
    angle = np.arccos(cosine)
    return (np.sin((1 - t) * angle) * a + np.sin(t * angle) * b) / np.sin(angle)


@pytest.mark.parametrize("unit", ["leaf", "global", "row", "column"])
def test_slerp_is_its_formula(unit):
    check(merging.slerp(t=0.3, unit=unit), TWO, lambda rows: arc(0.3, *rows), unit)


def test_slerp_ends_where_it_should_and_goes_straight_between_parallels():
    a, b = np.array([3.0, 4.0], np.float32), np.array([-1.0, 2.0], np.float32)
    for t, end in ((0.0, a), (1.0, b)):
        np.testing.assert_allclose(merging.slerp(t=t)({"w": np.stack([a, b])})["w"], end, rtol=1e-6)
    np.testing.assert_allclose(merging.slerp(t=0.25)({"w": np.stack([a, 3 * a])})["w"], 1.5 * a, rtol=1e-6)
    np.testing.assert_allclose(merging.slerp(t=0.25)({"w": np.stack([a, -a])})["w"], 0.5 * a, rtol=1e-6)
    np.testing.assert_allclose(merging.slerp(t=0.5)({"w": np.stack([a, 0 * a])})["w"], a / np.sqrt(2), rtol=1e-6)


@pytest.mark.parametrize("unit", ["leaf", "row"])
def test_nuslerp_goes_by_weights(unit):
    check(merging.nuslerp(weights=[1.0, 3.0], unit=unit), TWO, lambda rows: arc(0.75, *rows), unit)


def multi_slerp(rows, weights):
    """As published: the mean direction, a step in its tangent space, the mean length."""
    weights = np.asarray(weights) / np.sum(weights)
    norms = np.linalg.norm(rows, axis=1)
    units = rows / norms[:, None]
    mean = weights @ units
    mean = mean / np.linalg.norm(mean)
    step = weights @ (units - (units @ mean)[:, None] * mean)
    size = np.linalg.norm(step) + 1e-8
    return (mean * np.cos(size) + step * np.sin(size) / size) * (weights @ norms)


@pytest.mark.parametrize("unit", ["leaf", "row"])
def test_multi_slerp_is_as_published(unit):
    check(merging.multi_slerp(weights=WEIGHTS, unit=unit), TAUS, lambda rows: multi_slerp(rows, WEIGHTS), unit)


def test_multi_slerp_of_opposites_is_their_mean():
    x = {"w": np.array([[3.0, 0.0], [-1.0, 0.0]], np.float32)}
    np.testing.assert_allclose(merging.multi_slerp()(x)["w"], [1.0, 0.0], rtol=1e-6)


def karcher(rows, weights, max_iter, tol=1e-5):
    weights = np.asarray(weights) / np.sum(weights)
    norms = np.linalg.norm(rows, axis=1)
    units = rows / norms[:, None]
    mean = weights @ units
    mean = mean / np.linalg.norm(mean)
    for _ in range(max_iter):
        tangent = np.zeros_like(mean)
        for weight, unit in zip(weights, units, strict=True):
            angle = np.arccos(np.clip(mean @ unit, -1, 1))
            if angle > tol:
                tangent += weight * angle / np.sin(angle) * (unit - np.cos(angle) * mean)
        size = np.linalg.norm(tangent)
        if size < tol:
            break
        mean = np.cos(size) * mean + np.sin(size) * tangent / size
        mean = mean / np.linalg.norm(mean)
    return (weights @ norms) * mean


@pytest.mark.parametrize("unit, max_iter", [("leaf", 10), ("leaf", 1), ("global", 10)])
def test_karcher_is_its_iteration(unit, max_iter):
    operator = merging.karcher(weights=WEIGHTS, max_iter=max_iter, unit=unit)
    check(operator, TAUS, lambda rows: karcher(rows, WEIGHTS, max_iter), unit)


def test_karcher_of_two_is_half_way_and_survives_zeros_and_opposites():
    check(merging.karcher(max_iter=5), TWO, lambda rows: karcher(rows, [1, 1], 5), "leaf")
    rows = {"w": np.array([[2.0, 0.0], [0.0, 0.0]], np.float32)}
    np.testing.assert_allclose(merging.karcher()(rows)["w"], [1.0, 0.0], rtol=1e-6)
    opposite = {"w": np.array([[2.0, 0.0], [-2.0, 0.0]], np.float32)}
    assert np.isfinite(merging.karcher()(opposite)["w"]).all()


def stock(rows, degrees):
    """r·mean with r = T cos φ / (1 + (T − 1) cos φ)."""
    count, cosines = len(rows), []
    for i in range(count):
        for j in range(i):
            cosines.append(rows[i] @ rows[j] / np.linalg.norm(rows[i]) / np.linalg.norm(rows[j]))
    cosine = np.cos(np.deg2rad(np.mean(np.rad2deg(np.arccos(cosines))))) if degrees else np.mean(cosines)
    return count * cosine / (1 + (count - 1) * cosine) * rows.mean(0)


@pytest.mark.parametrize("angle", ["cosine", "degrees"])
@pytest.mark.parametrize("unit", ["leaf", "global", "row"])
def test_model_stock_is_its_formula(unit, angle):
    near = {"layers": [{"w": 2 + layer["w"]} for layer in TAUS["layers"]], "norm": 2 + TAUS["norm"]}
    check(merging.model_stock(unit=unit, angle=angle), near, lambda rows: stock(rows, angle == "degrees"), unit)


def test_model_stock_by_layer_pools_its_leaves():
    x = {"layers": [{"a": TAUS["layers"][0]["w"] + 2, "b": TAUS["norm"] + 2}]}
    merged = merging.model_stock(unit="layer")(x)["layers"][0]
    pooled = stock(np.concatenate([x["layers"][0][k].reshape(3, -1) for k in "ab"], 1).astype(np.float64), False)
    found = np.concatenate([np.ravel(merged[k]) for k in "ab"])
    np.testing.assert_allclose(found, pooled, rtol=1e-5, atol=1e-6)


def test_model_stock_without_a_direction_is_the_base():
    opposite = {"w": np.array([[1.0, 2.0], [-1.0, -2.0]], np.float32)}
    np.testing.assert_array_equal(merging.model_stock()(opposite)["w"], [0.0, 0.0])
