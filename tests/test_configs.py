"""Every config in configs/: it loads, all in it exists, and its docstring says how to run it."""
import glob
import importlib
import inspect
import pathlib
import runpy

import pytest

from tvjax import experiment, merging

FOLDER = pathlib.Path(__file__).parents[1] / "configs"
ARGUMENTS = {"quickstart": ("", "runlocal"), "glyphs": ("", "8", "14", "20", "runlocal"),
             "tall": ("", "8", "14", "20", "minilm", "vision", "ia3", "runlocal"),
             "talos": ("", "8", "4", "ablations", "sparsity", "minilm", "vision", "runlocal"),
             "tatr": ("", "8", "minilm", "vision", "runlocal"),
             "adamerging": ("", "8", "20", "minilm", "vision", "paper", "runlocal"),
             "atlas": ("8", "addition", "negation", "fewshot", "tta", "peft", "selection", "minilm",
                       "vision", "runlocal"),
             "minilm": ("", "quick", "runlocal"), "vision": ("", "omniglot", "random", "runlocal"),
             "llora": ("", "8", "protocol", "quick", "runlocal"), "language": ("runlocal",),
             "tangent": ("", "8", "quick", "runlocal"),
             "clip_merge": ("runlocal",)}
CASES = [(name, arg) for name, args in ARGUMENTS.items() for arg in args]


def load(name, arg=""):
    return runpy.run_path(str(FOLDER / f"{name}.py"))["get_config"](*([arg] if arg else []))


def test_every_file_is_listed_here():
    assert {path.stem for path in FOLDER.glob("*.py")} == {*ARGUMENTS, "merge"}


def planned(config):
    """The usual part of the checked config, of a job's own plan too."""
    plan = importlib.import_module(f"tvjax.experiment.{config.job}").plan if "job" in config else experiment.plan
    found = plan(config)
    return getattr(found, "usual", found)


@pytest.mark.parametrize("name, arg", CASES)
def test_a_config_is_valid(name, arg):
    config = load(name, arg)
    if absent := [where for where in config.get("sources", ()) if not glob.glob(str(FOLDER.parent / where))]:
        pytest.skip(f"{absent[0]} is not here")
    plan = planned(config)
    assert plan.select_on == "val"
    assert {merge.name for merge in plan.merges} <= set(merging.METHODS)
    assert max(plan.counts) == len(plan.tasks)


@pytest.mark.parametrize("method", merging.METHODS)
def test_every_method_has_a_merge_on_disk(method):
    config = load("merge", method)
    given = {name: value for name, value in config.merge.items() if value is not None}
    assert config.job == "merge" and set(given) <= set(inspect.signature(merging.METHODS[method]).parameters)
    merging.build(method, given)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_its_docstring_has_the_command(name):
    text = runpy.run_path(str(FOLDER / f"{name}.py"))["__doc__"]
    assert f"python -m tvjax.run --config=configs/{name}.py" in text and ":runlocal" in text


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_unknown_argument_is_a_sentence(name):
    with pytest.raises(ValueError, match="got :nonsense"):
        load(name, "nonsense")


def test_names_are_those_of_different_folders():
    again = lambda name, arg: arg == "" and len(ARGUMENTS[name]) > 2  # without an argument they take another's
    names = [load(name, arg).name for name, arg in CASES if not again(name, arg)]
    assert len(set(names)) == len(names)


def test_the_full_protocol_is_the_papers():
    plan = experiment.plan(load("glyphs", "20"))
    assert plan.counts == (8, 14, 20) and len(plan.seeds) >= 3
    grid = {merge.label: merge.scales for merge in plan.merges}
    assert len(grid["task_arithmetic"]) == 21 and grid["average"] is None
