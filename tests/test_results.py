"""Rows survive crashes, slips are one sentence, tables are well-formed."""
import json

import numpy as np
import pytest

from tvjax import results

ROW = {"metric": "accuracy", "value": 0.5, "method": "ties", "task": "mnist", "split": "test", "seed": 0,
       "suite": "digits", "model": "tiny"}


def test_rows_come_back_as_they_were_given(tmp_path):
    path = tmp_path / "runs" / "rows.jsonl"
    results.append(path, ROW | {"density": np.float32(0.5), "scales": np.arange(3), "where": tmp_path})
    results.append(path, ROW | {"value": None})
    first, second = results.read(path)
    assert first == ROW | {"density": 0.5, "scales": [0, 1, 2], "where": str(tmp_path)} and second["value"] is None
    assert results.read(tmp_path / "none.jsonl") == []


def test_the_header_says_what_computed_the_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    results.append(path, ROW)
    results.start(path, data="abc")
    first, second = results.headers(path)
    assert {"jax", "flax", "tvjax", "python", "platform", "device", "time"} <= set(first)
    assert first["hashes"] == {} and second["hashes"] == {"data": "abc"}
    assert results.read(path) == [ROW]


@pytest.mark.parametrize("change, words", [
    ({"value": float("nan")}, "value must be a finite number"), ({"value": "0.5"}, "value must be a finite number"),
    ({"extra": object()}, "a result can't hold"), ({"extra": float("nan")}, "Out of range|not JSON compliant"),
])
def test_values_that_are_none_are_refused(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        results.append(tmp_path / "rows.jsonl", ROW | change)
    assert results.read(tmp_path / "rows.jsonl") == []


def test_missing_fields_are_named(tmp_path):
    with pytest.raises(ValueError, match="a result needs seed, model; the row has metric"):
        results.append(tmp_path / "rows.jsonl", {k: v for k, v in ROW.items() if k not in ("seed", "model")})


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_cut_line_is_passed_over_and_repaired(tmp_path, cut):
    path = tmp_path / "rows.jsonl"
    results.append(path, ROW)
    results.append(path, ROW | {"seed": 1})
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    kept = [0, 1] if cut == 1 else [0]  # without its end of line, a row is still whole
    assert [row["seed"] for row in results.read(path)] == kept
    results.append(path, ROW | {"seed": 2})
    assert [row["seed"] for row in results.read(path)] == [*kept, 2]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(ValueError, match="line 2 of .* is not JSON"):
        results.read(path)


def test_select_by_fields():
    rows = [ROW, ROW | {"task": "svhn"}, ROW | {"task": "svhn", "seed": 1}]
    assert results.select(rows, task="svhn", seed=1) == rows[2:]
    assert results.select(rows, task=("mnist", "svhn"), seed=0) == rows[:2]
    with pytest.raises(ValueError, match="no row has a field 'taks'; did you mean 'task'"):
        results.select(rows, taks="svhn")


def test_pivot_keeps_order_and_reduces_seeds():
    rows = [ROW | {"method": "b", "task": "z"}, ROW | {"method": "a", "task": "y", "value": 1.0},
            ROW | {"method": "a", "task": "z", "value": 0.2}, ROW | {"method": "a", "task": "z", "value": 0.4},
            ROW | {"method": "c", "task": "z", "value": None}]
    table = results.pivot(rows)
    assert table.columns == ("method", "z", "y")
    assert table.lines == (("b", 0.5, None), ("a", pytest.approx(0.3), 1.0), ("c", None, None))
    spread = results.pivot(rows, reduce=results.mean_std)
    assert spread.lines[1][1] == (pytest.approx(0.3), pytest.approx(0.1 * 2**0.5))
    assert "| a | 30.0 ± 14.1 | 100.0 ± 0.0 |" in results.markdown(spread, scale=100)


def test_tables_escape_names():
    table = results.Table(("method", "50%_a|b"), (("x & y\\z", 1.0), ("{~^}", None)))
    assert results.markdown(table).splitlines() == [
        "| method | 50%_a\\|b |", "| --- | ---: |", "| x & y\\\\z | 1.0 |", "| {~^} | – |"]
    assert results.latex(table).splitlines()[2:6] == [
        r"method & 50\%\_a|b \\", r"\midrule", r"x \& y\textbackslash{}z & 1.0 \\",
        r"\{\textasciitilde{}\textasciicircum{}\} & -- \\"]
