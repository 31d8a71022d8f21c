"""The pass that finds a threshold takes the sum behind the trim along, and changes nothing by it."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import merging
from tvjax.merging import counting, pieces, ranking

SHAPES = {"a": (60, 50), "b": (7,), "c": (33, 41)}


def stack(kind):
    rng = np.random.default_rng(0)
    draw = {"normal": lambda shape: rng.standard_normal((4, *shape)),
            "few values": lambda shape: rng.integers(-3, 4, (4, *shape)) / 4,  # which cancel exactly, and often
            "rows": lambda shape: rng.standard_normal((4, *shape)) * rng.random((4, shape[0], *[1] * (len(shape) - 1)))}
    return {name: draw[kind](shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.fixture
def long(monkeypatch):
    """Streams of these lengths go by sample and bracket, as those of models do."""
    monkeypatch.setattr(ranking, "SMALL", 64)
    monkeypatch.setattr(pieces, "SIZES", (1 << 10,))


@pytest.mark.parametrize("kind", ["normal", "few values", "rows"])
@pytest.mark.parametrize("held", [1 << 25, 0])
def test_ties_is_what_the_traced_engine_makes(kind, held, long, monkeypatch):
    monkeypatch.setattr(counting, "HELD", held)
    x = stack(kind)
    for operator in (merging.ties(density=0.3), merging.ties(density=0.3, weights=[1.0, 2.0, 0.5, 1.0])):
        jax.tree.map(np.testing.assert_array_equal, operator(x), jax.jit(operator)(x))


def test_the_sum_needs_no_pass_of_its_own(long, monkeypatch):
    calls = []
    folded = counting.Pass.sum_at
    monkeypatch.setattr(counting.Pass, "sum_at", lambda self, found: calls.append(folded(self, found)) or calls[-1])
    merging.ties(density=0.3)(stack("normal"))
    assert len(calls) == 1 and calls[0] is not None
    assert counting.passes(merging.ties()) == 2


@pytest.mark.parametrize("operator", [
    merging.dare_ties(density=0.5),  # draws belong to the place of an entry
    merging.ties(density=0.3, scope="leaf"),  # a threshold for each leaf
    merging.breadcrumbs_ties(),
    merging.top(density=0.3) | merging.weigh(weights=merging.per_leaf({"a": 1.0, "b": 2.0, "c": 1.0}))
    | merging.agree(),
    merging.pcb(),  # a threshold that is more than a cut
])
def test_where_an_entry_alone_does_not_decide_it_has_one(operator):
    assert not any(counting.behind(operator, i) for i in range(len(operator.stages)))


def test_equal_scores_are_counted_not_held():
    tally = ranking.Tally()
    for _ in range(3):
        tally.add(np.array([1.0, 2.0, 2.0], np.float32))
    tally.add(np.array([3.0], np.float32), np.array([4], np.int64))
    tally._pack()
    assert tally.total == 13 and tally.held == 3
    assert [float(tally.largest(k)) for k in (1, 4, 5, 10, 11, 13)] == [3, 3, 2, 2, 1, 1]


def test_runs_that_resemble_each_other_widen_the_bracket():
    rows = np.repeat(np.random.default_rng(0).standard_normal((1, 64)), ranking.RUN, 1).astype(np.float32)
    mixed = np.random.default_rng(1).permutation(rows.reshape(-1))[None]
    width = lambda drawn: np.subtract(*ranking._bracket(drawn, np.sort(drawn, 1)[:, ::-1], np.array([0.5]), 6.0)[::-1])
    assert width(rows) > 3 * width(mixed)


def test_a_count_of_signs_is_exact():
    x = {"w": jnp.where(jnp.arange(1 << 12) % 3 == 0, -1.0, 1.0)[None]}
    assert float(merging.agree()({"w": jnp.concatenate([x["w"], -x["w"] * 0])})["w"].sum()) == float(x["w"].sum())
