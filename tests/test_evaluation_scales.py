"""The choice of a scale: first of equals, control kept, nothing chosen from nan."""
import math

import pytest

from tvjax.evaluation import GRID, search, search_negation


def table(*values):
    """An evaluation that looks its values up by scale 0, 1, 2, …"""
    return lambda scale: values[int(scale)]


def test_grid_has_the_21_points():
    assert len(GRID) == 21 and GRID[0] == 0.0 and GRID[3] == 0.15 and GRID[-1] == 1.0


def test_the_first_maximum_wins():
    found = search(table(0.1, 0.7, 0.3, 0.7), range(4))
    assert (found.best, found.value) == (1.0, 0.7)
    assert found.trace == ((0.0, 0.1), (1.0, 0.7), (2.0, 0.3), (3.0, 0.7))


@pytest.mark.parametrize("value", [0.0, 0.5, -1.0])
def test_of_equal_values_the_first(value):
    assert search(lambda scale: value)[:2] == (0.0, value)


def test_nan_is_never_chosen():
    assert search(table(math.nan, 0.2, math.nan, 0.1), range(4)).best == 1.0
    with pytest.raises(ValueError, match="nan at all 2 points"):
        search(lambda scale: math.nan, [0, 1])
    with pytest.raises(ValueError, match="all 0 points"):
        search(lambda scale: 1.0, [])


def test_a_candidate_that_breaks_the_control_is_skipped():
    found = search_negation(table(0.9, 0.5, 0.3, 0.1), table(0.6, 0.6, 0.58, 0.56), range(4), control_at_zero=0.6)
    assert found[:2] == (2.0, 0.3) and found.trace[3] == (3.0, 0.1, 0.56)


def test_the_first_of_equal_targets_wins():
    assert search_negation(table(0.9, 0.3, 0.3), table(0.6, 0.6, 0.6), range(3), control_at_zero=0.6).best == 1.0


def test_the_threshold_itself_is_kept():
    zero, right = 6860 / 10000, 6517 / 10000  # 0.95 of 6860 is 6517, but not in binary
    assert 0.95 * zero > right
    assert search_negation(table(0.9, 0.1), table(zero, right), range(2), control_at_zero=zero).best == 1.0


@pytest.mark.parametrize("grid", [[1, 2], [0, 1, 2]])
def test_without_a_feasible_scale_the_model_itself_is_kept(grid):
    found = search_negation(table(0.0, 0.5, 0.1), table(0.4, 0.5, 0.5), grid, control_at_zero=0.6)
    assert found[:2] == (0.0, 0.0) and len(found.trace) == len(grid)


def test_nan_targets_and_controls_are_passed_over():
    nan = math.nan
    targets, controls = table(0.9, nan, 0.2, 0.1), table(0.6, 0.6, 0.6, nan)
    assert search_negation(targets, controls, range(4), control_at_zero=0.6).best == 2.0
