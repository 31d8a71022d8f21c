"""Meshes: how many devices share the examples of a batch (axis `data`) and the tensors of a model (axis `model`).

A layout is found where arrays are (parameters that lie on a mesh) or taken from `on`; functions that run networks look
there, so that one device, eight of a host and those of many hosts run the same program. Without a layout nothing is
moved and nothing changes.
"""
import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tvjax.sharding import rules as ruling

DATA, MODEL = "data", "model"
_current: contextvars.ContextVar["Layout | None"] = contextvars.ContextVar("layout", default=None)


class Layout(NamedTuple):
    """A mesh, and the rules by which parameters lie on it: none replicates them, or splits them where `model` > 1."""

    mesh: Mesh
    rules: tuple[tuple[str, P], ...] = ()

    @property
    def data(self) -> int:
        """Into how many parts a batch is cut: the devices along `data`, all of a mesh that has no such axis."""
        return self.mesh.shape[DATA] if DATA in self.mesh.shape else self.mesh.size

    @property
    def model(self) -> int:
        return self.mesh.shape.get(MODEL, 1)

    @property
    def batch_axes(self) -> Any:
        return DATA if DATA in self.mesh.shape else tuple(self.mesh.axis_names)

    @property
    def processes(self) -> list[int]:
        """The processes that hold devices of the mesh."""
        return sorted({device.process_index for device in self.mesh.devices.flat})


def layout(*, data: int = 1, model: int = 1, rules: Sequence[str] = ()) -> Layout | None:
    """The layout of data × model devices; None where that is one device, which needs none.

    data, model: −1 for one of them means all devices that the other leaves. All devices of all processes together make
    one mesh; a number that the devices of each process hold makes one mesh a process, whose work is its own.
    rules: see `rules.parsed`.

    Raises ValueError where the numbers do not divide the devices, or a rule is none.
    """
    parsed = ruling.parsed(rules)
    data, model = _sizes(data, model)
    if data * model == 1:
        return None
    devices = np.array(_devices(data, model)).reshape(data, model)
    return Layout(Mesh(devices, (DATA, MODEL)), parsed)


def _sizes(data: int, model: int) -> tuple[int, int]:
    for name, value in ((DATA, data), (MODEL, model)):
        if isinstance(value, bool) or not isinstance(value, int) or value == 0 or value < -1:
            raise ValueError(f"mesh.{name} is a number of devices from 1 on, or -1 for all that are left; got "
                             f"{value!r}")
    if data == model == -1:
        raise ValueError("only one of mesh.data and mesh.model may be -1")
    left = lambda other: max(1, jax.device_count() // other)
    return (left(model), model) if data == -1 else (data, left(data)) if model == -1 else (data, model)


def _devices(data: int, model: int) -> list[Any]:
    wanted, all_, here = data * model, jax.devices(), jax.local_devices()
    if wanted == len(all_):
        return all_
    if wanted <= len(here) and len(here) % wanted == 0:
        return here[:wanted]
    where = f"{len(here)} in each of {jax.process_count()} processes" if jax.process_count() > 1 else all_[0].platform
    raise ValueError(f"a mesh of data={data} × model={model} takes {wanted} devices, which do not divide the "
                     f"{len(all_)} that there are ({where})")


def from_config(config: Any) -> Layout | None:
    """The layout of a config's group `mesh` (data, model, rules); None where it has none or asks for one device."""
    given = dict(config.get("mesh") or {})
    if unknown := [name for name in given if name not in (DATA, MODEL, "rules")]:
        raise ValueError(f"mesh has no field {unknown[0]!r}; there are data, model, rules")
    return layout(data=given.get(DATA, 1), model=given.get(MODEL, 1), rules=tuple(given.get("rules") or ()))


@contextlib.contextmanager
def on(layout_: Layout | None) -> Iterator[Layout | None]:
    """Inside of it, networks run on this layout wherever their parameters lie on no mesh of their own."""
    token = _current.set(layout_)
    try:
        yield layout_
    finally:
        _current.reset(token)


def found(*trees: Any) -> Layout | None:
    """The layout of the first mesh of several devices that a leaf lies on, else that of `on`; None for one device."""
    for leaf in jax.tree.leaves(trees):
        if (mesh := mesh_of(leaf)) is not None:
            current = _current.get()
            return current if current is not None and current.mesh == mesh else Layout(mesh)
    return _current.get()


def mesh_of(leaf: Any) -> Mesh | None:
    """The mesh of several devices, in automatic mode, on which an array lies."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(leaf, jax.Array) or not isinstance(sharding, NamedSharding):
        return None
    mesh = sharding.mesh
    if not isinstance(mesh, Mesh) or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return None
    return mesh if mesh.size > 1 else None


def told(layout_: Layout | None, params: Any = None) -> str:
    """What a layout does, in one sentence.

    >>> told(None)
    'one device: nothing is spread'
    """
    if layout_ is None:
        return "one device: nothing is spread"
    mesh, many = layout_.mesh, len(layout_.processes)
    kind = mesh.devices.flat[0].platform
    axes = " × ".join(f"{name}={size}" for name, size in mesh.shape.items())
    where = f" in {many} processes" if many > 1 else ""
    said = f"mesh of {mesh.size} {kind} devices{where}, {axes}: batches are cut into {layout_.data}"
    if params is None:
        return said
    specs = ruling.specs(params, layout_)
    split = [name for name, spec in specs.items() if spec != P()]
    most = max(layout_.model, 1)
    if not split:
        return f"{said}, all {len(specs)} tensors are on every device"
    return f"{said}, {len(split)} of {len(specs)} tensors are split (most over {most}), the others on every device"

