"""TALL-masks: the worked examples, the authors' numbers, agreement and Consensus, the choice of λ, storage."""
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import compression, merging, vectors
from tvjax.compression import agreement, bits, sizes, tall

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "merging.npz")
pytestmark = pytest.mark.usefixtures("quick_compilation")
T = np.array([[4, -2, 1, 0, 3, -5], [3, 3, -1, 0, -2, 2], [-1, 1, 2, 0, 3, 1]], np.float32) / 8
TAUS = [{"w": jnp.array(row)} for row in T]
TOTAL = tall.multi_task_vector(TAUS)
MASKS = {
    (1.0, ">="): [[1, 0, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0], [0, 1, 1, 1, 1, 0]],
    (1.0, ">"): [[1, 0, 0, 0, 1, 1], [0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 1, 0]],
    (0.5, ">="): [[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 1], [0, 1, 1, 1, 1, 0]],
    (0.5, ">"): [[1, 0, 1, 0, 1, 1], [1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 1, 0]],
}
AGREEMENT = {(1.0, ">="): [0, 1, 4, 1], (1.0, ">"): [1, 4, 1, 0], (0.5, ">="): [0, 0, 4, 2], (0.5, ">"): [1, 1, 4, 0]}


def masks(lam, comparator):
    return compression.tall_masks(TAUS, TOTAL, lam=lam, comparator=comparator)


@pytest.mark.parametrize("lam, comparator", MASKS)
def test_masks_of_the_worked_example(lam, comparator):
    assert bits.unpack(masks(lam, comparator)["w"]).astype(int).tolist() == MASKS[lam, comparator]


@pytest.mark.parametrize("lam, comparator", AGREEMENT)
def test_agreement(lam, comparator):
    expected = np.array(AGREEMENT[lam, comparator]) / 6
    np.testing.assert_allclose(compression.profile(masks(lam, comparator))["all"], expected)
    named = compression.classes(expected)
    assert named["catastrophic"] == expected[0] and named["selfish"] == expected[1]
    assert named["general"] == pytest.approx(expected[2:].sum()) and named["universal"] == expected[3]


@pytest.mark.parametrize("k, comparator, expected", [
    (2, ">=", [0.75, 0.25, 0.25, 0, 0.5, 0]), (1, ">", [0.75, 0.25, 0.25, 0, 0.5, -0.25]),
    (2, ">", [0, 0, 0, 0, 0.5, 0]), (0, ">", [0.75, 0.25, 0.25, 0, 0.5, -0.25]), (4, ">=", [0] * 6)])
def test_consensus_from_masks(k, comparator, expected):
    kept = compression.consensus_of(TOTAL, masks(1.0, comparator), k=k)
    assert kept["w"].tolist() == expected
    operator = merging.consensus(lam=1.0, k=k, scale=1.0, comparator=comparator)
    assert operator(TAUS)["w"].tolist() == expected


def test_overlaps():
    found = compression.overlaps(masks(0.5, ">="))
    np.testing.assert_allclose(found, [[1, 2 / 3, 2 / 3], [2 / 3, 1, 1 / 3], [2 / 3, 1 / 3, 1]])
    empty = bits.stack([{"w": bits.pack(np.zeros(5, bool))}] * 2)
    assert compression.overlaps(empty).tolist() == [[1, 1], [1, 1]]


def test_masks_on_ties():
    """Masks over the TIES sum of the same example, trimmed as the authors' code does: by hand from the definition."""
    merged = tall.multi_task_vector(TAUS, merging.ties(density=0.5, trim="official", reduce="sum", scale=1.0))
    assert merged["w"].tolist() == [0.875, 0.5, 0.25, 0, 0.75, -0.625]
    expected = np.abs(T) >= np.abs(np.array(merged["w"]) - T)
    found = compression.tall_masks(TAUS, merged, lam=1.0, comparator=">=")
    assert bits.unpack(found["w"]).tolist() == expected.tolist()


@pytest.mark.parametrize("merge", [merging.total(), merging.ties(reduce="sum"), merging.tsv_m(scale=1.0),
                                   merging.iso_c(scale=1.0)])
def test_any_base_merger(merge):
    taus = random_taus()
    state = compression.tall_codec(merging=merge, lam=0.4).encode(taus)
    whole = merge(taus)
    for task, tau in enumerate(taus):
        kept = np.abs(tau["w"]) > np.float32(0.4) * np.abs(np.asarray(whole["w"]) - tau["w"])
        found = compression.tall_codec(merging=merge).decode(state, task)["w"]
        np.testing.assert_array_equal(found, np.where(kept, whole["w"], 0))


def random_taus(tasks=3, seed=0):
    draws = np.random.default_rng(seed)
    return [{"w": draws.normal(size=(13, 7)).astype(np.float32), "b": draws.normal(size=5).astype(np.float32)}
            for _ in range(tasks)]


def test_the_authors_masks():
    """Flattened in the authors' order of keys: b before w."""
    with jax.enable_x64(True):
        taus = [{"w": jnp.asarray(w), "b": jnp.asarray(b)} for w, b in zip(GOLDEN["W"], GOLDEN["B"], strict=True)]
        found = compression.tall_masks(taus, tall.multi_task_vector(taus), lam=0.4)
        flat = np.concatenate([np.asarray(bits.unpack(found["b"])).reshape(4, -1),
                               np.asarray(bits.unpack(found["w"])).reshape(4, -1)], 1)
    np.testing.assert_array_equal(flat, GOLDEN["tall_mask"])


def test_one_task_is_given_back():
    theta0 = {"w": jnp.arange(6.0), "frozen": jnp.ones(3)}
    tau = {"w": jnp.array(T[0])}
    mask = compression.tall_mask(tau, tau, lam=0.6)
    np.testing.assert_array_equal(compression.reconstruct(theta0, tau, mask)["w"], vectors.add(theta0, tau)["w"])
    assert compression.reconstruct(theta0, tau, mask)["frozen"].tolist() == [1, 1, 1]


def test_lambda_is_the_first_best_of_each_task():
    scores = {(0, 0.2): 0.5, (0, 0.3): 0.7, (0, 0.4): 0.7, (0, 0.5): 0.1, (0, 0.6): 0.2}
    seen = iter([0.2, 0.3, 0.4, 0.5, 0.6] * 3)

    def judge(task, tau):
        lam = next(seen)
        expected = bits.unpack(compression.tall_mask(TAUS[task], TOTAL, lam=lam)["w"])
        np.testing.assert_array_equal(tau["w"], np.where(expected, TOTAL["w"], 0))
        return scores.get((task, lam), 1.0)
    assert compression.choose_lambdas(TAUS, TOTAL, judge) == (0.3, 0.2, 0.2)
    with pytest.raises(ValueError, match="no λ can be chosen for task 0"):
        compression.choose_lambdas(TAUS, TOTAL, lambda task, tau: float("nan"))


def test_lambda_for_each_task():
    both = compression.tall_masks(TAUS, TOTAL, lam=[1.0, 0.5, 1.0], comparator=">=")
    expected = [MASKS[1.0, ">="][0], MASKS[0.5, ">="][1], MASKS[1.0, ">="][2]]
    assert bits.unpack(both["w"]).astype(int).tolist() == expected
    with pytest.raises(ValueError, match="3 task vectors but 2 numbers"):
        compression.tall_masks(TAUS, TOTAL, lam=[1.0, 0.5])


def test_profile_by_groups():
    leaves = ("enc.layers.0.a.weight", "enc.layers.1.a.weight", "enc.layers.1.b.bias", "norm.weight")
    trees = [{name: bits.pack(np.array([True, i == 0])) for name in leaves} for i in range(2)]
    found = bits.stack([dict(one) for one in trees])
    assert set(compression.profile(found, by="layer")) == {"enc.layers.0", "enc.layers.1", "norm"}
    assert set(compression.profile(found, by="kind")) == {"a.weight", "b.bias", "norm.weight"}
    for by in agreement.BY:
        for shares in compression.profile(found, by=by).values():
            assert shares.sum() == pytest.approx(1) and len(shares) == 3
    with pytest.raises(ValueError, match="did you mean 'layer'"):
        compression.profile(found, by="layers")


def test_magnitude_mask_density():
    taus = random_taus()
    state = compression.magnitude_masking(density=0.1).encode(taus)
    kept = sum(int(np.asarray(bits.unpack(b)).sum()) for b in bits.flatten(state.tasks[0]).values())
    assert kept == int(0.1 * (13 * 7 + 5))


def test_scaling_factors_round_trip():
    factors = {"k": jnp.array([1.25, 1.0, 0.5])}
    tau = compression.scaling_vector(factors)
    ones = jax.tree.map(jnp.ones_like, factors)
    mask = compression.tall_mask(tau, tau, lam=0.5)
    np.testing.assert_array_equal(compression.reconstruct(ones, tau, mask)["k"], factors["k"])


GB = {  # fine-tuned, TALL, single; 10⁹ bits
    ("ViT-B/32", 8): (23.31, 7.14, 3.63), ("ViT-B/32", 14): (40.18, 7.67, 3.63), ("ViT-B/32", 20): (57.04, 8.20, 3.63),
    ("ViT-B/16", 8): (22.88, 7.03, 3.58), ("ViT-B/16", 14): (39.43, 7.54, 3.58), ("ViT-B/16", 20): (55.98, 8.06, 3.58),
    ("ViT-L/14", 8): (79.05, 23.12, 10.96), ("ViT-L/14", 14): (137.41, 24.94, 10.96),
    ("ViT-L/14", 20): (195.77, 26.77, 10.96),
}


@pytest.mark.parametrize("model, tasks", GB)
def test_published_gigabits(model, tasks):
    counts = sizes.Counts(*sizes.VISUAL[model], tasks)
    found = [round(sizes.gigabits(sizes.formula(method, counts)), 2) for method in ("finetuned", "tall", "single")]
    assert tuple(found) == GB[model, tasks]


def test_published_share():
    counts = sizes.Counts(*sizes.VISUAL["ViT-L/14"], 20)
    assert round(100 * sizes.formula("tall", counts) / sizes.formula("finetuned", counts), 1) == 13.7
    with pytest.raises(ValueError, match="did you mean 'tall'"):
        sizes.formula("tal", counts)


def test_matched_densities():
    for tasks, density in ((8, 0.1563), (14, 0.1027), (20, 0.0813)):
        assert compression.matched_density(tasks) == pytest.approx(density, abs=6e-5)
        assert 32 * tasks * compression.matched_density(tasks) == pytest.approx(32 + tasks)
        assert tasks * (1 + 32 * compression.matched_density(tasks, positions="counted")) == pytest.approx(32 + tasks)
