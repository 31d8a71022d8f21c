"""Stored gradients, Fisher diagonals and the like beside checkpoints: the order of tasks, other data, slips."""
import pathlib
import runpy

import numpy as np
import pytest

from tvjax import checkpoints, disk, merging, tree
from tvjax.calibration.exemplars import save_stack
from tvjax.disk import data, job

pytestmark = pytest.mark.usefixtures("quick_compilation")

RNG = np.random.default_rng(0)
TASKS = ["cars", "birds"]


def model(folder, base=None):
    start = 0 if base is None else base["fc"]["weight"]
    params = {"fc": {"weight": (start + RNG.standard_normal((6, 5))).astype(np.float32)}}
    checkpoints.save(params, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "toy"}')
    return params


@pytest.fixture
def inputs(tmp_path):
    """(base, {task: τ}, gradients (tasks, …)), all on disk; the file of gradients has the tasks in another order."""
    base = model(tmp_path / "base")
    taus = {task: {"fc": {"weight": model(tmp_path / task, base)["fc"]["weight"] - base["fc"]["weight"]}}
            for task in TASKS}
    gradients = {"fc": {"weight": RNG.standard_normal((2, 6, 5)).astype(np.float32)}}
    turned = {"fc": {"weight": gradients["fc"]["weight"][::-1].copy()}}
    save_stack(turned, tmp_path / "gradients.safetensors", tasks=TASKS[::-1])
    return base, taus, gradients


def test_a_config_names_files_and_their_order_is_that_of_the_models(inputs, tmp_path):
    base, taus, gradients = inputs
    config = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "configs" / "merge.py"))["get_config"]("tatr")
    config.base, config.models = str(tmp_path / "base"), ",".join(f"{task}={tmp_path / task}" for task in TASKS)
    config.out, config.data = str(tmp_path / "out"), f"gradients={tmp_path / 'gradients.safetensors'}"
    config.merge.quantile = 0.7
    job.run(config, say=lambda line: None)
    made = checkpoints.load(tmp_path / "out").params["fc"]["weight"]
    expected = merging.tatr(quantile=0.7)(list(taus.values()), gradients=gradients)["fc"]["weight"]
    np.testing.assert_allclose(made, base["fc"]["weight"] + expected, atol=1e-6)


def test_other_data_are_another_merge(inputs, tmp_path):
    _, _, gradients = inputs
    go = lambda given, **more: disk.merge_checkpoints(
        tmp_path / "base", [tmp_path / task for task in TASKS], tmp_path / "out", "tatr",
        data={"gradients": given}, say=lambda line: None, **more)
    go(gradients)
    go(gradients)
    with pytest.raises(ValueError):
        go({"fc": {"weight": gradients["fc"]["weight"] + 1}})


@pytest.mark.parametrize("text, message", [
    ("gradients", "data is written name=file, as in gradients=gradients.safetensors; got 'gradients'"),
    ("gradients={}", "holds a stack of another number of tasks than the 3 models: fc.weight"),
])
def test_slips_get_one_sentence(inputs, tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        data.read(text.format(tmp_path / "gradients.safetensors"), [*TASKS, "maps"])
    assert list(tree.flatten(inputs[0])) == ["fc.weight"]
