"""Figures show the rows: what is drawn is read back from the figure."""
import numpy as np
import pytest
from fake_run import METHODS, TASKS, make_rows

from tvjax import plotting, results

ROWS = make_rows()


def lines(figure):
    return {line.get_label(): line for line in figure.axes[0].lines}


def test_methods_are_the_merges_in_their_order():
    assert plotting.methods(ROWS) == list(METHODS)


def test_per_task_marks_every_accuracy():
    drawn = lines(plotting.per_task(ROWS, tasks=4))
    for method in METHODS:
        chosen = results.select(ROWS, method=method, metric="accuracy", split="test", tasks=4)
        mean = [np.mean([row["value"] for row in chosen if row["task"] == task]) for task in TASKS]
        np.testing.assert_allclose(drawn[method].get_xdata(), 100 * np.array(mean))


def test_per_task_bars_reach_from_zero_shot_to_fine_tuned():
    bars = plotting.per_task(ROWS, tasks=4).axes[0].patches
    assert len(bars) == len(TASKS)
    mean = lambda method, task: np.mean([row["value"] for row in results.select(
        ROWS, method=method, metric="accuracy", split="test", tasks=4, task=task)])
    assert bars[0].get_x() == pytest.approx(100 * mean("zero-shot", TASKS[0]))
    assert bars[0].get_x() + bars[0].get_width() == pytest.approx(100 * mean("fine-tuned", TASKS[0]))


def test_over_tasks_has_a_point_for_each_count():
    drawn = lines(plotting.over_tasks(ROWS))
    assert list(drawn["ties"].get_xdata()) == [2, 4]


def test_over_scales_is_the_trace_and_marks_the_choice():
    axes = plotting.over_scales(ROWS, tasks=4).axes[0]
    assert list(lines(axes.figure)["ties"].get_xdata()) == [0.0, 0.5, 1.0]
    assert any(list(line.get_xdata()) == [0.5] for line in axes.lines)


def test_cosines_are_symmetric_and_without_diagonal():
    shown = plotting.cosine_map(ROWS).axes[0].images[0].get_array()
    filled = np.ma.filled(shown, np.nan)
    np.testing.assert_allclose(filled, filled.T)
    assert np.isnan(np.diagonal(filled)).all() and not np.isnan(filled[0, 1])


def test_radar_closes_its_rings():
    ring = lines(plotting.radar(ROWS, tasks=4))["ties"].get_ydata()
    assert len(ring) == len(TASKS) + 1 and ring[0] == ring[-1]


def test_png_is_deterministic():
    first, second = (plotting.png(plotting.over_tasks(ROWS), dpi=40) for _ in range(2))
    assert first == second and first.startswith(b"\x89PNG")
