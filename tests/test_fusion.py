"""Fusion protocols on a judge that is known: which rows they ask for, what they choose, and what their plans refuse."""
import math

import numpy as np
import pytest
from fusion_config import config

from tvjax.experiment import fusion, partial_plan

TARGET = np.array([0.5, 0.0, 0.25, 1.0])


def judge(rows):
    """The nearer to TARGET the better."""
    far = np.abs(np.asarray(rows) - TARGET[None]).sum(1)
    return -far, far


@pytest.mark.parametrize("size, count", list(enumerate((21, 35, 35, 21, 7, 1), 2)))
def test_all_subsets_of_seven_tasks(size, count):
    found = fusion.subsets(7, size)
    assert len(found) == len(set(found)) == count and all(len(set(one)) == size for one in found)


def test_some_subsets_are_drawn_by_the_seed():
    found = fusion.subsets(8, 4, most=6, seed=1)
    assert found == fusion.subsets(8, 4, most=6, seed=1) and len(set(found)) == 6
    assert found != fusion.subsets(8, 4, most=6, seed=2) and set(found) <= set(fusion.subsets(8, 4))
    assert fusion.subsets(3, 3, most=5) == [(0, 1, 2)]
    with pytest.raises(ValueError, match="from 1 to 3 tasks"):
        fusion.subsets(3, 4)


def test_the_average_is_task_arithmetic_at_one_nth():
    assert fusion.average((1, 3), 4).row.tolist() == [0, 0.5, 0, 0.5]
    asked = []
    chosen = fusion.task_arithmetic(lambda rows: (asked.append(rows), judge(rows))[1], (1, 3), 4, [0.5])
    np.testing.assert_array_equal(asked[0], fusion.average((1, 3), 4).row[None])
    assert chosen.asked == 1


def test_task_arithmetic_takes_the_first_of_the_best():
    grid = np.linspace(0, 1, 21)
    chosen = fusion.task_arithmetic(judge, (0, 2, 3), 4, grid)
    by_hand = [np.abs(scale * np.array([1, 0, 1, 1]) - TARGET).sum() for scale in grid]
    assert chosen.row[0] == grid[int(np.argmin(by_hand))] and chosen.row[1] == 0 and chosen.asked == 21
    same = fusion.task_arithmetic(lambda rows: (np.ones(len(rows)), None), (0, 1), 4, grid)
    assert same.row.tolist() == [0, 0, 0, 0]


def test_greedy_goes_task_after_task():
    chosen = fusion.greedy(judge, (0, 2, 3), 4, [0.0, 0.25, 0.5, 1.0])
    np.testing.assert_array_equal(chosen.row, TARGET)
    assert chosen.asked == 12 and chosen.value == 0


def test_lorahub_minimises_loss_and_penalty_within_bounds_and_budget():
    pytest.importorskip("cma")
    asked = []

    def ask(rows):
        asked.extend(np.array(rows))
        return judge(rows)
    chosen = fusion.lorahub(ask, (0, 3), 4, budget=40, bound=1.5, penalty=0.05, seed=0)
    assert len(asked) == 40 and not asked[0].any() and np.abs(asked).max() <= 1.5
    objective = lambda row: judge(row[None])[1][0] + 0.05 * np.abs(row[[0, 3]]).mean()
    assert -chosen.value == pytest.approx(min(map(objective, asked)))
    assert objective(chosen.row) < objective(np.zeros(4)) and not chosen.row[[1, 2]].any()


def test_a_heavy_penalty_keeps_the_start():
    pytest.importorskip("cma")
    assert not fusion.lorahub(judge, (0, 3), 4, budget=12, penalty=1e3).row.any()


# ---------------------------------------------------------------- the plan
def test_the_plan_of_the_paper():
    todo = partial_plan.partial_plan(config(fusions=("ties",), ties={
        "densities": (0.25, 0.5, 0.75, 1.0), "scales": (0.0, 0.25, 0.5, 0.75, 1.0)}))
    assert len(todo.ties["densities"]) * len(todo.ties["scales"]) == 20
    llora = todo.ways[2]
    assert (llora.kind, llora.scope, llora.seed, llora.method.scale) == ("lora", "module", 42, 2.0)
    assert llora.recipe["lr"] == 1e-3 and todo.ways[0].recipe["lr"] == 2e-4


@pytest.mark.parametrize("changes, message", [
    (dict(ways=({"name": "x", "kind": "lroa"},)), "kind: there is no 'lroa'; did you mean 'lora'"),
    (dict(ways=({"kind": "lora", "scope": "modul"},)), "scope: there is no 'modul'; did you mean 'module'"),
    (dict(ways=({"kind": "lora", "options": {"rnk": 2}},)), "lora has no option 'rnk'; did you mean 'rank'"),
    (dict(ways=({"kind": "tangent", "scope": "module"},)), "neither scope nor options"),
    (dict(ways=({"kind": "standard", "finetune": {"lr": 1.0}},)), "follows the config's own finetune"),
    (dict(ways=({"kind": "lora"}, {"kind": "lora"})), "each with a name of its own"),
    (dict(ways=({"kind": "tangent", "remat": "dot"},)), "remat: there is no 'dot'"),
    (dict(fusions=("avarage",)), "did you mean 'average'"),
    (dict(sizes=(4,)), "from 2 to 3; got 4"),
    (dict(ties={"densities": (0.0,), "scales": (1.0,)}), "shares above 0"),
    (dict(lorahub={"budget": 0, "bound": 1.5, "penalty": 0.1}), "lorahub.budget is a whole number from 1 on"),
    (dict(lorahub={"budget": 4, "bound": -1.0, "penalty": 0.1}), "lorahub.bound is above 0"),
    (dict(plane={"span": 2, "points": 3, "examples": 99, "pairs": 1}), "plane.examples is from 1 to 16"),
    (dict(plane={"span": 2, "points": 3, "examples": 9, "pairs": 9}), "plane.pairs is from 0 to 3"),
    (dict(scaling={"ranks": (1,), "tasks": 5, "seeds": (0,)}), "scaling.tasks is from 2 to 3"),
    (dict(most=-1), "most is a whole number from 0 on"),
    (dict(vectors="nowhere"), "there is no folder nowhere"),
])
def test_slips_are_sentences(changes, message):
    with pytest.raises(ValueError, match=message):
        partial_plan.partial_plan(config(**changes))


def test_a_group_of_another_name_is_a_sentence():
    wrong = config()
    wrong.job = "tangent"
    with pytest.raises(ValueError, match="a group of fields of that name"):
        partial_plan.partial_plan(wrong)
    assert math.isfinite(partial_plan.partial_plan(config(job="tangent")).scales[0])
