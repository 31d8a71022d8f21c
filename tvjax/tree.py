"""Names, selections and checks on parameter trees: what `optax.tree` lacks.

A leaf's name is its dotted path (`vision_model.encoder.layers.0.mlp.fc1.weight`), which for our trees is its Hugging
Face name.
"""

import difflib
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any


def flatten(tree: Tree, is_leaf: Callable | None = None) -> dict[str, Any]:
    """The leaves of `tree` by dotted name, in natural order (layer 2 before layer 10).

    >>> list(flatten({"layers": {"10": 1.0, "2": 2.0}}))
    ['layers.2', 'layers.10']
    """
    pairs = [(_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf)]
    return dict(sorted(pairs, key=lambda pair: natural(pair[0])))


def unflatten(flat: dict[str, Any]) -> Tree:
    """Nested dicts from dotted names.

    >>> unflatten({"a.b": 1, "a.c": 2})
    {'a': {'b': 1, 'c': 2}}
    """
    tree: dict = {}
    for name, leaf in flat.items():
        *path, last = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


def rebuild(like: Tree, flat: dict[str, Any], is_leaf: Callable | None = None) -> Tree:
    """The leaves `flat` put into the structure of `like` (any pytree), matched by name."""
    return jax.tree_util.tree_map_with_path(lambda path, _: flat[_name(path)], like, is_leaf=is_leaf)


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def natural(name: str) -> tuple:
    """A sorting key under which "layers.2" comes before "layers.10"."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split("."))


def block(name: str) -> tuple[str, int] | None:
    """The repeated block that a leaf belongs to, as (where the blocks are, which one); None outside of any.

    >>> block("encoder.layers.11.mlp.fc1.weight"), block("post_layernorm.bias")
    (('encoder.layers', 11), None)
    """
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:i]), int(part)
    return None


def layer(name: str) -> str:
    """The layer that a leaf belongs to: its numbered block, or its module outside of any.

    >>> layer("encoder.layers.11.mlp.fc1.weight"), layer("post_layernorm.bias")
    ('encoder.layers.11', 'post_layernorm')
    """
    found = block(name)
    return f"{found[0]}.{found[1]}" if found else name.rpartition(".")[0] or name


def is_float(x) -> bool:
    """Whether a leaf holds floating-point numbers (bfloat16 among them); keys, integers and flags do not."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def wide(dtype):
    """The precision in which sums over leaves of this dtype are taken: float32 for narrower floats, its own
    otherwise.
    """
    return jnp.dtype(jnp.float32) if jnp.finfo(dtype).bits < 32 else jnp.dtype(dtype)


def select(tree: Tree, pattern: str) -> Tree:
    """The leaves whose names contain the regular expression `pattern`, as nested dicts; an error if there are none."""
    flat = flatten(tree)
    found = {name: leaf for name, leaf in flat.items() if re.search(pattern, name)}
    if not found:
        raise ValueError(f"no leaf matches {pattern!r}; there are {listing(list(flat))}")
    return unflatten(found)


def drop(tree: Tree, pattern: str) -> Tree:
    """The leaves whose names do not contain the regular expression `pattern`, as nested dicts."""
    return unflatten({name: leaf for name, leaf in flatten(tree).items() if not re.search(pattern, name)})


def partition(tree: Tree, names: Collection[str]) -> tuple[Tree, Tree]:
    """The leaves called so and the others, both as nested dicts: what is trained, and what stays frozen.

    >>> partition({"a": {"w": 1, "b": 2}}, ["a.w"])
    ({'a': {'w': 1}}, {'a': {'b': 2}})
    """
    flat = flatten(tree)
    if strange := [name for name in names if name not in flat]:
        raise ValueError(f"no leaf {strange[0]!r}; {did_you_mean(strange[0], list(flat))}")
    these = {name: leaf for name, leaf in flat.items() if name in names}
    return unflatten(these), unflatten({name: leaf for name, leaf in flat.items() if name not in these})


def union(*trees: Tree) -> Tree:
    """The leaves of all trees in one, as nested dicts: what `partition` took apart.

    >>> union({"a": {"w": 1}}, {"a": {"b": 2}})
    {'a': {'w': 1, 'b': 2}}
    """
    flats = [flatten(tree) for tree in trees]
    both = [name for i, flat in enumerate(flats) for name in flat if any(name in other for other in flats[:i])]
    if both:
        raise ValueError(f"two trees have the same leaves: {listing(both)}")
    return unflatten({name: leaf for flat in flats for name, leaf in flat.items()})


def stack(trees: Sequence[Tree]) -> Tree:
    """One tree whose leaves have a leading axis of tasks; the trees must agree in names, shapes and dtypes."""
    if not trees:
        raise ValueError("there is nothing to stack: the list of task vectors is empty")
    for i, tree in enumerate(trees[1:], 1):
        check_same(trees[0], tree, names=("the first tree", f"tree {i}"))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def unstack(tree: Tree) -> list[Tree]:
    """The trees of the tasks, from a tree whose leaves have a leading axis of tasks."""
    tasks = {leaf.shape[0] for leaf in jax.tree.leaves(tree)}
    if len(tasks) != 1:
        raise ValueError(f"a stack has one leading axis of tasks for all leaves; here it is {sorted(tasks)} long")
    return [jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in range(tasks.pop())]


def size(tree: Tree) -> int:
    """How many numbers the tree holds."""
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(tree))


def check_same(a: Tree, b: Tree, *, names: tuple[str, str] = ("theta", "theta0"), dtypes: bool = True) -> None:
    """Raises one sentence that names the leaves in which two trees differ: names, shapes (broadcastable ones too),
    dtypes.
    """
    faults = differences(flatten(a), flatten(b), names=names, dtypes=dtypes)
    if faults:
        raise ValueError(f"{names[0]} and {names[1]} differ: {'; '.join(faults)}")


def differences(a: dict, b: dict, *, names: tuple[str, str], dtypes: bool = True) -> list[str]:
    """What `check_same` says, as a list of clauses over two flat trees."""
    both = [name for name in a if name in b]
    shapes = [f"{n} {np.shape(a[n])} vs {np.shape(b[n])}" for n in both if np.shape(a[n]) != np.shape(b[n])]
    kinds = [f"{n} {_dtype(a[n])} vs {_dtype(b[n])}" for n in both if dtypes and _dtype(a[n]) != _dtype(b[n])]
    clauses = [
        (f"only in {names[0]}", [n for n in a if n not in b]),
        (f"only in {names[1]}", [n for n in b if n not in a]),
        ("shapes", shapes),
        ("dtypes", kinds),
    ]
    return [f"{what}: {listing(found)}" for what, found in clauses if found]


def _dtype(x) -> str:
    return str(getattr(x, "dtype", type(x).__name__))


def listing(names: Sequence[str], most: int = 3) -> str:
    """The first few names and how many more there are.

    >>> listing(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The closing words of an error about a name that does not exist.

    >>> did_you_mean("tise", ["ties", "dare"])
    "did you mean 'ties'?"
    """
    near = difflib.get_close_matches(name, list(known), 1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
