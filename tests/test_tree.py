"""Names and checks on trees."""

import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import tree

NET = {"layers": {str(i): {"weight": jnp.full((2, 2), i)} for i in (0, 2, 10)}, "head": {"bias": jnp.ones(2)}}


def test_names_are_paths_in_natural_order():
    assert list(tree.flatten(NET)) == ["head.bias", "layers.0.weight", "layers.2.weight", "layers.10.weight"]


def test_unflatten_and_rebuild_undo_flatten():
    flat = tree.flatten(NET)
    assert tree.unflatten(flat).keys() == NET.keys()
    again = tree.rebuild(NET, {name: -x for name, x in flat.items()})
    np.testing.assert_array_equal(again["layers"]["10"]["weight"], -NET["layers"]["10"]["weight"])
    assert tree.rebuild((jnp.ones(1), [jnp.zeros(1)]), {"0": 1, "1.0": 2}) == (1, [2])


def test_select_and_drop_are_complements():
    assert list(tree.flatten(tree.select(NET, r"layers\.2\b"))) == ["layers.2.weight"]
    assert "layers.2.weight" not in tree.flatten(tree.drop(NET, r"layers\.2\b"))
    with pytest.raises(ValueError, match="no leaf matches 'nothing'; there are"):
        tree.select(NET, "nothing")


def test_stack_and_unstack():
    trees = [{"w": jnp.ones(3) * i} for i in range(4)]
    again = tree.unstack(tree.stack(trees))
    assert [float(t["w"][0]) for t in again] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="the list of task vectors is empty"):
        tree.stack([])
    with pytest.raises(ValueError, match=r"the first tree and tree 1 differ: shapes: w \(3,\) vs \(1,\)"):
        tree.stack([{"w": jnp.ones(3)}, {"w": jnp.ones(1)}])
    with pytest.raises(ValueError, match="one leading axis"):
        tree.unstack({"a": jnp.ones((2, 1)), "b": jnp.ones((3, 1))})


def test_broadcastable_shapes_are_differences_too():
    with pytest.raises(ValueError, match=r"shapes: w \(1, 2\) vs \(2, 2\)"):
        tree.check_same({"w": jnp.ones((1, 2))}, {"w": jnp.ones((2, 2))})


def test_only_floats_are_floats():
    assert [
        tree.is_float(x) for x in (jnp.ones(1), jnp.ones(1, jnp.bfloat16), np.ones(1, int), np.ones(1, bool), 3.0)
    ] == [True, True, False, False, False]
    assert tree.wide(jnp.bfloat16) == jnp.float32 and tree.wide(np.float64) == np.float64


def test_long_lists_are_cut():
    many = {f"leaf{i}": jnp.ones(1) for i in range(9)}
    with pytest.raises(ValueError, match="only in theta: leaf0, leaf1, leaf2 and 6 more"):
        tree.check_same(many, {})
