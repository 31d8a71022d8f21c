"""Breadcrumbs, MagMax, EMR and PCB against plain loops of their papers."""
import numpy as np
import pytest

from tvjax import merging

RNG = np.random.default_rng(0)
TAUS = {"w": RNG.standard_normal((3, 6, 10)).astype(np.float32), "b": RNG.standard_normal((3, 7)).astype(np.float32)}


def close(got, expected):
    for leaf in expected:
        np.testing.assert_allclose(got[leaf], expected[leaf], rtol=1e-5, atol=1e-6)


def crumbs(row, smallest, largest):
    """Zeroes so many of the smallest and of the largest magnitudes, as a sort would."""
    order = np.argsort(np.abs(row))
    out = row.copy()
    out[order[:smallest]] = 0
    out[order[len(row) - largest:]] = 0
    return out


def by_leaf(one):
    return {leaf: np.stack([one(row) for row in x.reshape(3, -1)]).reshape(x.shape) for leaf, x in TAUS.items()}


@pytest.mark.parametrize("beta, gamma", [(0.5, 0.15), (0.0, 0.2), (0.3, 0.0), (0.0, 0.0)])
def test_breadcrumbs_is_its_loop(beta, gamma):
    expected = by_leaf(lambda row: crumbs(row, int(beta * len(row)), int(gamma * len(row))))
    merged = merging.breadcrumbs(beta=beta, gamma=gamma, scale=0.3)(TAUS)
    close(merged, {leaf: 0.3 * x.sum(0) for leaf, x in expected.items()})


@pytest.mark.parametrize("density, gamma", [(0.5, 0.15), (1.0, 0.15), (0.95, 0.15)])
def test_breadcrumbs_by_density(density, gamma):
    """The largest go first, then the smallest until the density is reached, even at density 1."""

    def one(row):
        largest = int(gamma * len(row))
        return crumbs(row, max(len(row) - largest - int(density * len(row)), 0), largest)

    merged = merging.breadcrumbs(density=density, gamma=gamma, scale=1.0)(TAUS)
    close(merged, {k: x.sum(0) for k, x in by_leaf(one).items()})


def test_breadcrumbs_ties_votes_on_what_is_left():
    expected = {}
    for leaf, x in by_leaf(lambda row: crumbs(row, int(0.5 * len(row)), int(0.15 * len(row)))).items():
        agree = np.where(x * np.sign(x.sum(0)) > 0, x, 0)
        expected[leaf] = agree.sum(0) / np.maximum((agree != 0).sum(0), 1)
    close(merging.breadcrumbs_ties(beta=0.5, gamma=0.15)(TAUS), expected)


def test_breadcrumbs_takes_density_or_beta():
    with pytest.raises(ValueError, match="density or beta, not both"):
        merging.breadcrumbs(density=0.5, beta=0.3)
    with pytest.raises(ValueError, match=r"gamma lies in \[0, 1\)"):
        merging.breadcrumbs(gamma=1.0)


def test_magmax_is_its_loop_and_equals_go_to_the_first_or_last():
    x = TAUS["w"]
    expected = np.zeros(x.shape[1:])
    for place in np.ndindex(*expected.shape):
        column = x[(slice(None), *place)]
        expected[place] = 0.5 * column[np.argmax(np.abs(column))]
    close(merging.magmax()(TAUS), {"w": expected})
    equals = {"w": np.array([[1.0, -2.0], [-1.0, 2.0], [0.5, 1.0]], np.float32)}
    assert merging.magmax(scale=1.0)(equals)["w"].tolist() == [1.0, -2.0]
    assert merging.magmax(scale=1.0, ties="last")(equals)["w"].tolist() == [-1.0, 2.0]


def test_emr_is_its_loop():
    expected, masks = {}, {}
    for leaf, x in TAUS.items():
        out = np.zeros(x.shape[1:])
        for place in np.ndindex(*out.shape):
            column = x[(slice(None), *place)]
            sign = 1 if column.sum() > 0 else -1
            out[place] = sign * max([abs(value) for value in column if value * sign > 0], default=0.0)
        expected[leaf], masks[leaf] = out, x * out > 0
    unified = merging.emr()(TAUS)
    close(unified, expected)
    found = merging.emr_mask(TAUS, unified)
    for leaf in TAUS:
        np.testing.assert_array_equal(found[leaf], masks[leaf])
    for average, size in (("leaf", lambda x: x[0].size), ("entry", lambda x: 1)):
        whole = sum(np.abs(x).reshape(3, -1).sum(1) / size(x) for x in TAUS.values())
        kept = sum(np.abs(masks[leaf] * expected[leaf]).reshape(3, -1).sum(1) / size(x) for leaf, x in TAUS.items())
        np.testing.assert_allclose(merging.emr_rescale(TAUS, unified, average=average), whole / kept, rtol=1e-5)


def test_emr_counts_a_zero_sum_as_negative():
    assert merging.emr()({"w": np.array([[2.0, 0.0], [-2.0, 0.0]], np.float32)})["w"].tolist() == [-2.0, 0.0]


def competition(rows, density, scales, low=0.05, high=0.05):
    """PCB on flat task vectors, entry by entry."""
    def clamp(row, least, most):
        ordered = np.sort(row)
        return np.clip(row, ordered[int(len(row) * least)], ordered[int(len(row) * (1 - most)) - 1])

    def between(row):
        return (row - row.min()) / (row.max() - row.min())

    total = rows.sum(0)
    magnitudes = [clamp(np.abs(row), low, high) for row in rows]
    pairs = zip(magnitudes, rows, strict=True)
    scores = [np.exp(len(rows) * between(m) ** 2) * np.tanh(row * total) for m, row in pairs]
    scores = [between(clamp(score, 1 - density, 0)) for score in scores]
    above = sum(s * by * np.sign(row) * m for s, by, row, m in zip(scores, scales, rows, magnitudes, strict=True))
    return above / np.maximum(sum(scores), 1e-12)


@pytest.mark.parametrize("scale", [1.2, [0.5, 1.0, 2.0]])
def test_pcb_is_its_loop(scale):
    flat = np.concatenate([TAUS[leaf].reshape(3, -1) for leaf in ("b", "w")], 1).astype(np.float64)
    expected = competition(flat, 0.2, np.broadcast_to(scale, 3))
    got = merging.pcb(density=0.2, scale=scale, low=0.05, high=0.05)(TAUS)
    close(got, {"b": expected[:7], "w": expected[7:].reshape(6, 10)})


def test_consensus_masks_any_merged_vector():
    """On the TIES sum, as in the paper's appendix, and with λ that differs by leaf and task."""
    ties = merging.ties(density=0.5, trim="official", reduce="sum")(TAUS)
    lam = {"w": np.array([0.2, 0.4, 0.6], np.float32), "b": np.array([0.5, 0.5, 0.5], np.float32)}
    expected = {}
    for leaf, x in TAUS.items():
        by = lam[leaf].reshape(3, *[1] * (x.ndim - 1))
        expected[leaf] = np.where((np.abs(x) > by * np.abs(ties[leaf] - x)).sum(0) >= 2, ties[leaf], 0)
    options = dict(lam=merging.per_leaf(lam), k=2, scale=1.0)
    close(merging.consensus(base="ties", density=0.5, **options)(TAUS), expected)
    composed = merging.ties(density=0.5, trim="official", reduce="sum") | merging.needed_by(lam=options["lam"], k=2)
    close(composed(TAUS), expected)
