"""tvjax.learning.selection, basis, blackbox, statistics."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import toy_tasks as toy
from tvjax import checkpoints, learning, tree
from tvjax.learning import Scheme, basis, blackbox, heads, selection, statistics, ways
from tvjax.merging.lowrank import LowRank

pytestmark = pytest.mark.usefixtures("quick_compilation")
BASE = toy.theta0()
TAUS = [toy.vector(seed, BASE) for seed in range(1, 5)]
HEAD, SPLIT = toy.task(BASE, TAUS[0], 10)


@pytest.fixture(scope="module")
def slope():
    return selection.gradient(toy.PREDICT, BASE, HEAD, SPLIT, batch=20)


@pytest.fixture(scope="module")
def scores(slope):
    return selection.block_scores(slope, TAUS)


def test_one_backward_pass_scores_every_vector_on_every_tensor(scores):
    way = ways.scaled(toy.PREDICT, BASE, learning.pool(TAUS, BASE), Scheme())
    joined = heads.join([HEAD])
    batch = (SPLIT[0], SPLIT[1], np.zeros(len(SPLIT[1]), np.int32))
    slopes = jax.jit(jax.grad(heads.weighted(way.point, way.predict)))
    wanted = slopes(way.start, batch, None, (way.frozen, (joined.head, joined.owner, jnp.ones(1))))
    assert set(scores) == set(wanted)
    for name, score in scores.items():
        np.testing.assert_allclose(score, wanted[name], rtol=1e-3, atol=1e-5)


def test_low_rank_vectors_are_scored_without_their_product(slope):
    rng = np.random.default_rng(0)
    B, A = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((7, 2), (2, 5)))
    tau = lambda x: {"layers": {"0": {"fc1": {"weight": x}}}}
    low, full = (selection.block_scores(slope, [tau(x)]) for x in (LowRank(B, A), B @ A))
    np.testing.assert_allclose(low["layers.0.fc1.weight"], full["layers.0.fc1.weight"], rtol=1e-4)


def test_choices_by_gradient(scores):
    stacked = np.abs(np.stack(list(scores.values())))
    assert selection.by_whole_gradient(scores, 2) == list(np.argsort(-stacked.sum(0), kind="stable")[:2])
    chosen = selection.by_block_gradient(scores, 2)
    for name, picks in chosen.items():
        assert picks == list(np.argsort(-np.abs(scores[name]), kind="stable")[:2])
    held = learning.take(learning.pool(TAUS, BASE), chosen)
    assert learning.size(held) == 2
    for name, picks in chosen.items():
        np.testing.assert_array_equal(held[name][1], tree.flatten(TAUS[picks[1]])[name])


def test_choices_by_features_and_at_random():
    means = [np.array([1.0, 0.0]), np.array([1.0, 1.0]), np.array([-1.0, 0.0])]
    assert selection.by_features(np.array([2.0, 0.1]), means, 3) == [0, 1, 2]
    assert selection.at_random(9, 4, seed=1) == selection.at_random(9, 4, seed=1)
    assert selection.at_random(9, 9, seed=1) != selection.at_random(9, 9, seed=2)


@pytest.mark.parametrize("whole", [True, False])
def test_only_what_is_chosen_is_read(tmp_path, scores, whole):
    paths = [tmp_path / f"{i}.safetensors" for i in range(len(TAUS))]
    for path, tau in zip(paths, TAUS, strict=True):
        checkpoints.save_task_vector(tau, path, base="x")
    loaded = []
    load = lambda path: (loaded.append(path.name), checkpoints.load_task_vector(path).params)[1]
    chosen = [3, 1] if whole else selection.by_block_gradient(scores, 2)
    held = selection.load_chosen(paths, chosen, load, BASE)
    jax.tree.map(np.testing.assert_array_equal, held, learning.take(learning.pool(TAUS, BASE), chosen))
    assert loaded == (["1.safetensors", "3.safetensors"] if whole else [path.name for path in paths])


def test_random_vectors_have_the_moments_of_the_base():
    base = {"w": jnp.asarray(np.random.default_rng(0).normal(0.3, 2.0, (60, 70)), jnp.float32)}
    first, second = basis.random_vectors(base, 2, seed=0)
    assert abs(first["w"].mean() - base["w"].mean()) < 0.1 and abs(first["w"].std() / base["w"].std() - 1) < 0.05
    assert abs(np.corrcoef(first["w"].ravel(), second["w"].ravel())[0, 1]) < 0.05
    np.testing.assert_array_equal(first["w"], basis.random_vectors(base, 1, seed=0)[0]["w"])


def test_gradient_free_learning_improves_on_its_start():
    way = ways.scaled(toy.PREDICT, BASE, learning.pool(TAUS[:2], BASE), Scheme(by="task"))
    joined = heads.join([HEAD])
    batch = (SPLIT[0], SPLIT[1], np.zeros(len(SPLIT[1]), np.int32))
    evaluate = blackbox.mean_loss(way, joined, batch, size=30)
    found = blackbox.gradient_free(way, evaluate, budget=15)
    assert len(found.trace) == 15 and found.loss == found.trace.min() < found.trace[0]
    np.testing.assert_allclose(evaluate(ways.model(way, found.params)), found.loss, rtol=1e-5)
    assert np.abs(found.params["task"]).max() <= 1.5
    again = blackbox.gradient_free(way, evaluate, budget=15)
    np.testing.assert_array_equal(again.trace, found.trace)
    with pytest.raises(ValueError, match="budget of at least 1"):
        blackbox.gradient_free(way, evaluate, budget=0)


def test_summaries():
    c = {"layers.0.self_attn.q_proj.weight": np.array([[1.0, 2.0], [3.0, 4.0]]),
         "layers.1.mlp.fc1.bias": np.array([0.0, -2.0]), "embed.position_embedding.weight": np.array([5.0, 5.0])}
    by_kind = statistics.summaries(c, by="kind")
    assert by_kind["attention weight"][:5] == (1.0, 1.75, 2.5, 3.25, 4.0)
    assert by_kind["mlp bias"].magnitude == 1.0 and by_kind["mlp bias"].count == 2
    assert list(statistics.summaries(c, by="depth")) == ["0", "1", "outside"]
    assert statistics.summaries(c, by="vector")["1"].greatest == 5.0


@pytest.mark.parametrize("make, sentence", [
    (lambda: selection.check_budget(5, 4), "from 1 to the 4 task vectors of the pool; got 5"),
    (lambda: selection.at_random(4, 0, seed=0), "got 0"),
    (lambda: selection.block_scores(BASE, []), "the pool is empty"),
    (lambda: basis.random_vectors(BASE, 0, seed=0), "at least one random vector"),
    (lambda: statistics.summaries({"w": np.ones(2)}, by="layer"), "kind, depth or vector; got 'layer'"),
])
def test_slips(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
