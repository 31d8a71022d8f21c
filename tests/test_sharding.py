"""One device, four, eight, and two processes give one result in training, scoring and judging; and bad input."""

import jax
import numpy as np
import pytest

from tests import many_devices, processes
from tvjax import sharding

BITS = ("mask/", "random mask/", "accuracy/", "sweep/", "xi/", "pairs/")  # equal bit by bit


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """What one device computes: no mesh is there."""
    assert sharding.layout(data=1) is None
    found = many_devices.numbers(tmp_path_factory.mktemp("state"))
    return {**found, **{f"split/{name}": np.asarray(x) for name, x in many_devices.split_by_rules().items()}}


def compare(path, one, *, without=()):
    many = np.load(path)
    assert set(many.files) == {name for name in one if not name.startswith(without or "no name")}
    for name in many.files:
        if name.startswith(BITS):
            np.testing.assert_array_equal(many[name], one[name], err_msg=name)
        else:
            np.testing.assert_allclose(many[name], one[name], atol=1e-5, rtol=1e-5, err_msg=name)


def test_eight_devices_give_the_numbers_of_one(one_device, tmp_path):
    said = processes.run(["tests/many_devices.py", tmp_path / "found.npz"], devices=8)
    assert said == ("mesh of 8 cpu devices, data=8 × model=1: batches are cut into 8, "
                    "all 4 tensors are on every device\n")
    compare(tmp_path / "found.npz", one_device)


def test_four_devices_give_the_numbers_of_one(one_device, tmp_path):
    processes.run(["tests/many_devices.py", tmp_path / "found.npz", "brief"], devices=4)
    compare(tmp_path / "found.npz", {name: x for name, x in one_device.items() if name.startswith(many_devices.BRIEF)})


def test_two_processes_give_the_numbers_of_one(one_device, tmp_path):
    said = processes.together(["tests/many_devices.py", tmp_path / "found.npz"], count=2, devices=2)
    assert all("mesh of 4 cpu devices in 2 processes, data=4 × model=1" in out for code, out, _ in said), said
    assert [code for code, _, _ in said] == [0, 0], said
    compare(tmp_path / "found.npz", one_device, without=("split/",))


# ---------------------------------------------------------------- what is said, and bad input
def layout(data=2, model=2, rules=()):
    """A layout of abstract sizes: rules need no devices."""
    class Fake:
        mesh = type("Mesh", (), {"shape": {"data": data, "model": model}})()
    Fake.rules = sharding.parsed(rules)
    return Fake


SHAPES = {"fc1": {"weight": np.zeros((8, 4))}, "fc2": {"weight": np.zeros((3, 4)), "bias": np.zeros(3)}}


def test_without_rules_the_longest_axis_that_divides_is_split():
    specs = sharding.specs(SHAPES, layout())
    assert specs == {"fc1.weight": jax.P("model"), "fc2.weight": jax.P(None, "model"), "fc2.bias": jax.P()}


def test_rules_are_taken_in_their_order():
    specs = sharding.specs(SHAPES, layout(rules=("fc1=-,model", "weight=data,-", ".*=")))
    assert specs["fc1.weight"] == jax.P(None, "model")


@pytest.mark.parametrize("rules, said", [
    (("fc3.*=model,-", ".*="), "no tensor matches the rule fc3"),
    (("fc1=model,-",), "no rule covers fc2.bias, fc2.weight"),
    (("fc2.weight=model,-", ".*="), "a rule cannot split axis 0 of fc2.weight, 3 long, over model=2"),
    (("bias=-,model", ".*="), "a rule cannot split fc2.bias, which has 1 axes, by 2"),
])
def test_rules_that_do_not_fit(rules, said):
    with pytest.raises(ValueError, match=said):
        sharding.check(SHAPES, layout(rules=rules))


@pytest.mark.parametrize("rule, said", [
    ("fc1", "a rule is written pattern=axis,axis"), ("(=model", "no regular expression"),
    ("fc1=modle", "splits over 'modle'; there are data, model and - for none"),
])
def test_rules_that_are_none(rule, said):
    with pytest.raises(ValueError, match=said):
        sharding.parsed([rule])


@pytest.mark.parametrize("given, said", [
    (dict(data=3), r"a mesh of data=3 × model=1 takes 3 devices, which do not divide the 1 that there are"),
    (dict(data=0), r"mesh.data is a number of devices from 1 on, or -1 for all that are left; got 0"),
    (dict(data=-1, model=-1), "only one of mesh.data and mesh.model may be -1"),
])
def test_meshes_that_are_none(given, said):
    with pytest.raises(ValueError, match=said):
        sharding.layout(**given)


def test_a_mesh_of_one_device_is_none_and_moves_nothing():
    assert sharding.from_config({"mesh": {"data": 1, "model": 1}}) is None and sharding.from_config({}) is None
    x = np.ones(3)
    assert sharding.place(x, None) is x and sharding.spread(x, None) is x and sharding.local_rows(8, None) == (0, 8)
    with pytest.raises(ValueError, match="mesh has no field 'dta'; there are data, model, rules"):
        sharding.from_config({"mesh": {"dta": 2}})


def sized(data, processes=(0,)):
    """A layout that says it cuts into so many, on one device."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    return type("Sized", (sharding.Layout,), {"data": data, "processes": list(processes)})(mesh)


def test_batches_of_a_plan_are_checked_before_anything_is_loaded(monkeypatch):
    from tests.test_configs import load
    from tvjax.experiment import plan
    from tvjax.experiment import sharing as shared
    monkeypatch.setattr(sharding, "found", lambda *trees: sized(3))
    with pytest.raises(ValueError, match="finetune.batch, in its parts, of 8 examples cannot be cut into 3"):
        shared.check_layout(plan(load("quickstart", "runlocal")))
    monkeypatch.setattr(sharding, "found", lambda *trees: sized(2))
    shared.check_layout(plan(load("quickstart", "runlocal")))


def test_a_job_checks_its_rules_and_says_what_it_does(monkeypatch):
    from tvjax.experiment import sharing as shared
    said, layout_ = [], sharding.Layout(sized(1).mesh, sharding.parsed((r"fc3.weight=model,-", ".*=")))
    monkeypatch.setattr(sharding, "found", lambda *trees: layout_)
    with pytest.raises(ValueError, match=r"no tensor matches the rule fc3.weight; did you mean"):
        shared.laid_out(SHAPES, said.append)
    layout_ = layout_._replace(rules=())
    shared.laid_out(SHAPES, said.append)
    assert len(said) == 1 and said[0].endswith("all 3 tensors are on every device")


def test_a_batch_that_cannot_be_cut():
    with pytest.raises(ValueError, match="a batch of 6 examples cannot be cut into 4 equal parts"):
        sharding.check_batch(6, sized(4))
