"""Who shares a merge: the processes that own leaves, and the devices of each, which take pieces side by side.

The engine of one device (`streamed`) says what is done to a piece; here only who does it. Every device runs the same
program on a piece of the same size, so entry-wise results are equal bit by bit on any number of devices and processes;
sums over the model are taken in float64 and exchanged, a few numbers for each.
"""
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "pieces"
SMALL = 1 << 10  # entries of what is stacked on the host
UNDER_WAY = 2  # rounds of all devices that are computed ahead of their use


class Crew(NamedTuple):
    """One process of several: its number, how many there are, its own devices, and how all learn what each has found.

    exchange: (what this process has found, anything that pickles) -> [what each has found], in the processes' order.
    owner: {leaf: the process that reads, merges and writes it}; leaves that it lacks belong to process 0.
    cuts: {leaf: where it is cut}, of leaves that all share: process p has entries cuts[p] … cuts[p + 1] − 1.
    """

    devices: tuple[Any, ...]
    rank: int = 0
    count: int = 1
    exchange: Callable[[Any], list] = lambda found: [found]
    owner: Mapping[str, int] = {}
    cuts: Mapping[str, tuple[int, ...]] = {}

    def owns(self, name: str) -> bool:
        """Whether this process takes the leaf, or its part of it."""
        return self.count == 1 or name in self.cuts or self.owner.get(name, 0) == self.rank

    @property
    def spans(self) -> dict[str, tuple[int, int]]:
        """{leaf: the first of this process's entries and the one after its last} of leaves that all share."""
        return {name: (at[self.rank], at[self.rank + 1]) for name, at in self.cuts.items()}

    @property
    def mesh(self) -> Mesh:
        return Mesh(np.array(self.devices), (AXIS,))


def shared_out(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """{name: process}: the largest first, each to the process that has least to do so far.

    >>> shared_out({"a": 5, "b": 3, "c": 2}, 2)
    {'a': 0, 'b': 1, 'c': 1}
    """
    load, owner = [0] * count, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner[name] = min(range(count), key=load.__getitem__)
        load[owner[name]] += sizes[name]
    return owner


def cut(entries: int, count: int, unit: int) -> tuple[int, ...]:
    """Where so many entries are cut for so many processes, at whole pieces of `unit` entries.

    >>> cut(100, 2, 16)
    (0, 48, 100)
    """
    pieces = -(-entries // unit)
    return tuple(min(entries, unit * (pieces * process // count)) for process in range(count + 1))


def side_by_side(crew: Crew, items: Iterable[tuple[Any, tuple]], body: Callable) -> Iterator[tuple[Any, Any]]:
    """(tag, body(*arguments)) of all items in order; successive ones of equal shapes run at once, one a device.

    body: a pure function at module level, or the same partial object each time.
    """
    waiting: list[list[tuple[Any, Any, int | None]]] = []
    for group in _groups(items, len(crew.devices)):
        waiting.append(_started(crew, group, body))
        while len(waiting) > UNDER_WAY:
            yield from _arrived(waiting.pop(0))
    for group in waiting:
        yield from _arrived(group)


def _arrived(group):
    return ((tag, jax.tree.map(np.asarray, made) if place is None else
             jax.tree.map(lambda x, place=place: np.asarray(x.addressable_shards[place].data)[0], made))
            for tag, made, place in group)


def _groups(items, most: int):
    group: list[tuple[Any, tuple, Any]] = []
    for tag, given in items:
        key = _key(given)
        if group and (len(group) == most or key != group[0][2]):
            yield group
            group = []
        group.append((tag, given, key))
    if group:
        yield group


def _key(given):
    """What must be equal for one program: structure, shapes, dtypes, and Python's own numbers."""
    flat, structure = jax.tree.flatten(given)
    return structure, tuple(x if _plain(x) else (np.shape(x), x.dtype) for x in flat)


def _plain(x) -> bool:
    return type(x) in (bool, int, float)


def _started(crew: Crew, group, body) -> list[tuple[Any, Any, int | None]]:
    """The results of a group, on their way: of one item by the plain program, of several by one over the devices.

    What all items share goes to all devices at once, and what an item has twice (a piece that no stage has changed is
    its own origin) goes there once.
    """
    if len(group) == 1:
        return [(group[0][0], _alone(body)(*group[0][1]), None)]
    many = len(crew.devices)
    flats = [jax.tree.leaves(given) for _, given, _ in group]
    flats += [flats[-1]] * (many - len(group))
    first: dict[int, int] = {}  # which position holds an object first
    source = tuple(first.setdefault(id(x), i) for i, x in enumerate(flats[0]))
    source = source if all(flat[i] is flat[j] for flat in flats for i, j in enumerate(source)) else tuple(
        range(len(source)))
    own = sorted(set(source))
    shared = lambda i: _plain(flats[0][i]) or all(flat[i] is flats[0][i] for flat in flats)
    still = tuple(i for i in own if shared(i))
    moving = tuple(i for i in own if i not in still)
    program = _together(body, crew.mesh, jax.tree.structure(group[0][1]), source, moving, still)
    made = program([_stacked(crew.mesh, [flat[i] for flat in flats]) for i in moving],
                   [_everywhere(crew.mesh, flats[0][i]) for i in still])
    return [(tag, made, place) for place, (tag, _, _) in enumerate(group)]


def _everywhere(mesh: Mesh, x: Any) -> Any:
    return jax.device_put(x, NamedSharding(mesh, P())) if isinstance(x, jax.Array) else x


def _stacked(mesh: Mesh, parts: list) -> jax.Array:
    """(devices, …): part d on device d; large ones are not copied on the host."""
    if np.size(parts[0]) < SMALL and not isinstance(parts[0], jax.Array):
        return jax.device_put(np.stack(parts), NamedSharding(mesh, P(AXIS)))
    if isinstance(parts[0], jax.Array) and jax.numpy.issubdtype(parts[0].dtype, jax.dtypes.prng_key):
        return jax.device_put(jax.numpy.stack(parts), NamedSharding(mesh, P(AXIS)))
    held = [jax.device_put(np.asarray(part)[None], device)
            for part, device in zip(parts, mesh.devices.flat, strict=True)]
    shape = len(parts), *held[0].shape[1:]
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, P(AXIS)), held)


@functools.cache
def _alone(body):
    """The program of one item."""
    return jax.jit(body)


@functools.cache
def _together(body, mesh: Mesh, structure, source, moving, still):
    """The program of one item on every device of the mesh, each with its own.

    Positions of the flattened arguments: `moving`, one for each device; `still`, the same for all; `source`, which of
    these stands at each position.
    """
    def one(stacks, same):
        held = {i: stack[0] for i, stack in zip(moving, stacks, strict=True)} | dict(zip(still, same, strict=True))
        given = jax.tree.unflatten(structure, [held[i] for i in source])
        return jax.tree.map(lambda x: x[None], body(*given))
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(P(AXIS), P()), out_specs=P(AXIS), check_vma=False))
