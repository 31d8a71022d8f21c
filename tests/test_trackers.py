"""Rows reach a tracker through one door; without its package, or with a slip, one sentence."""
import importlib.machinery
import sys
import types

import pytest

from tvjax import trackers

ROW = {"metric": "accuracy", "value": 0.5, "method": "ties", "task": "average", "split": "test", "seed": 0, "tasks": 2}
ROWS = [ROW, {**ROW, "value": 0.75}, {**ROW, "value": None}, {**ROW, "metric": "seconds", "split": "none"}]


@pytest.fixture
def package(monkeypatch):
    """An installed module of that name whose calls are recorded."""
    def install(name):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
        return module
    return install


def test_wandb_gets_one_log_a_step(package):
    calls, module = [], package("wandb")
    log = lambda values, step: calls.append((step, values))
    run = types.SimpleNamespace(log=log, finish=lambda: calls.append("end"))
    module.init = lambda **given: calls.append(given) or run
    trackers.send(ROWS, trackers.parsed("wandb:merges"), name="glyphs", config={"tasks": 2})
    name = "accuracy/test/ties/average/2 tasks/seed 0"
    assert calls == [{"project": "merges", "name": "glyphs", "config": {"tasks": 2}},
                     (0, {name: 0.5, name.replace("accuracy/test", "seconds/none"): 0.5}), (1, {name: 0.75}), "end"]


def test_mlflow_gets_the_same_values(package):
    import contextlib
    calls, module = [], package("mlflow")
    module.set_experiment, module.log_dict = lambda name: calls.append(name), lambda given, file: calls.append(given)
    module.start_run = lambda run_name: contextlib.nullcontext()
    module.log_metric = lambda label, value, step: calls.append((label.partition("/")[0], value, step))
    trackers.send(ROWS, trackers.parsed("mlflow:merges"), name="glyphs", config={"tasks": 2})
    assert calls == ["merges", {"tasks": 2}, ("accuracy", 0.5, 0), ("accuracy", 0.75, 1), ("seconds", 0.5, 0)]


def test_slips_are_one_sentence(monkeypatch):
    assert trackers.parsed(None) is None and trackers.parsed("") is None
    with pytest.raises(ValueError, match="no tracker 'wand'; did you mean 'wandb'"):
        trackers.parsed("wand:x")
    with pytest.raises(ValueError, match="wandb:NAME"):
        trackers.parsed("wandb")
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install mlflow"):
        trackers.parsed("mlflow:x")
