"""Weighted sums and votes, and closed-form coefficients, against their formulas."""
import numpy as np
import pytest

from tvjax import merging

RNG = np.random.default_rng(0)
TAUS = {"layers": [{"w": RNG.standard_normal((3, 4, 5)).astype(np.float32)} for _ in range(3)],
        "norm": RNG.standard_normal((3, 4)).astype(np.float32)}
LEAVES = [*[layer["w"] for layer in TAUS["layers"]], TAUS["norm"]]
WEIGHTS = [0.5, 2.0, 1.5]


def leaves(merged):
    return [*[layer["w"] for layer in merged["layers"]], merged["norm"]]


def close(merged, expected):
    for got, want in zip(leaves(merged), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def weighted(weights):
    return [np.tensordot(np.asarray(weights), x.astype(np.float64), 1) for x in LEAVES]


@pytest.mark.parametrize("options, weights", [
    ({}, [1 / 3] * 3), ({"weights": WEIGHTS}, [0.125, 0.5, 0.375]), ({"weights": WEIGHTS, "normalize": False}, WEIGHTS),
    ({"weights": [1.0, -0.5, 0.0]}, [2.0, -1.0, 0.0])])
def test_average(options, weights):
    close(merging.average(**options)(TAUS), weighted(weights))


def test_task_arithmetic_weighs_negates_and_normalizes():
    close(merging.task_arithmetic(scale=0.5, weights=[1, -1, 2])(TAUS), weighted([0.5, -0.5, 1.0]))
    close(merging.task_arithmetic(scale=0.5, weights=WEIGHTS, normalize=True)(TAUS), weighted([0.0625, 0.25, 0.1875]))


def test_a_scale_is_not_for_tasks():
    with pytest.raises(ValueError, match="scale takes one number, which may vary by leaf; got 3"):
        merging.task_arithmetic(scale=np.ones(3, np.float32))(TAUS)


def vote(x, weights, early, by_weights, reduce, frequency):
    """Elects and merges entry by entry."""
    out = np.zeros(x.shape[1:])
    for place in np.ndindex(*out.shape):
        values = x[(slice(None), *place)].astype(np.float64)
        voters = values * weights if early else values
        elected = np.sign((np.sign(voters) if frequency else voters).sum())
        elected = 1 if elected == 0 else elected
        agree = [t for t in range(len(x)) if np.sign(voters[t]) == elected]
        parts = [values[t] * weights[t] for t in agree]
        if not agree:
            continue
        count = sum(abs(weights[t]) for t in agree) if by_weights else len(agree)
        out[place] = {"mean": sum(parts) / count, "sum": sum(parts), "max": max(parts, key=abs)}[reduce]
    return out


@pytest.mark.parametrize("elect, divide, reduce, sign", [
    ("after_weights", "weights", "mean", "total"), ("after_weights", "count", "mean", "frequency"),
    ("before_weights", "count", "mean", "frequency"), ("before_weights", "weights", "mean", "total"),
    ("before_weights", "count", "max", "total"), ("after_weights", "count", "sum", "total")])
def test_weighted_votes(elect, divide, reduce, sign):
    weights = [1.0, 0.4, -0.7]
    merge = merging.disjoint_merge(reduce=reduce, weights=weights, elect=elect, divide=divide, sign=sign, zero="+")
    args = (np.asarray(weights), elect == "after_weights", divide == "weights", reduce, sign == "frequency")
    close(merge(TAUS), [vote(x, *args) for x in LEAVES])


def test_a_weight_of_minus_one_negates():
    one = {"w": np.array([[2.0, -3.0]], np.float32)}
    assert merging.ties(density=1.0, weights=[-1.0], divide="weights")(one)["w"].tolist() == [-2.0, 3.0]


@pytest.mark.parametrize("zero, expected", [("majority", -1.0), ("+", 1.0), ("none", 0.0)])
def test_entries_whose_signs_balance(zero, expected):
    """The other entry's sign, −, is the majority."""
    x = {"w": np.array([[1.0, -3.0], [-1.0, 0.0], [0.0, -1.0]], np.float32)}
    assert merging.disjoint_merge(zero=zero)(x)["w"].tolist() == [expected, -2.0]


@pytest.mark.parametrize("method, power", [(merging.metagpt, 2), (merging.nan, -1)])
@pytest.mark.parametrize("scope", ["global", "leaf"])
def test_coefficients_from_norms(method, power, scope):
    squares = np.array([(x.reshape(3, -1).astype(np.float64) ** 2).sum(1) for x in LEAVES])
    squares = squares if scope == "leaf" else np.broadcast_to(squares.sum(0), squares.shape)
    powers = np.sqrt(squares) ** power
    expected = [np.tensordot(p / p.sum(), x, 1) for p, x in zip(powers, LEAVES, strict=True)]
    close(method(scope=scope)(TAUS), expected)


def test_norms_far_from_one_have_finite_powers():
    tiny = {"w": np.array([[1e-15, 0.0], [0.0, 3e-15], [0.0, 0.0]], np.float32)}
    np.testing.assert_allclose(merging.nan()(tiny)["w"], [0.75e-15, 0.75e-15], rtol=1e-5)


def test_lines_grows_with_depth():
    merged = merging.lines(alpha=0.2, beta=0.6)(TAUS)
    close(merged, [by * x.sum(0) for by, x in zip([0.2, 0.5, 0.8, 0.2], LEAVES, strict=True)])


@pytest.mark.parametrize("norm, order", [("l1", 1), ("l2", 2)])
def test_lines_starts_at_the_ratio_of_norms(norm, order):
    base = leaves(merging.ties(density=0.5)(TAUS))
    size = lambda parts: np.linalg.norm(np.concatenate([np.ravel(x) for x in parts]), order)
    alpha = size([x.sum(0) for x in LEAVES]) / (3 * size(base))
    merged = merging.lines(beta=0.6, base="ties", density=0.5, norm=norm)(TAUS)
    close(merged, [(alpha + 0.6 * depth) * x for depth, x in zip([0, 0.5, 1, 0], base, strict=True)])
