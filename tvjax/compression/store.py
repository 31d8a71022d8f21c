"""Reading a store of compressed task vectors, leaf by leaf, and adding tasks to it; `building` makes one.

θ_t = θ0 + γ_t · m_t ⊙ shared. Opening reads headers and `store.json` alone; a task's leaves are read when asked for.
"""
import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import tree
from tvjax.compression import bits as packed
from tvjax.compression import building, layout
from tvjax.disk.readers import Safetensors, open_checkpoint
from tvjax.merging.checks import within


@dataclasses.dataclass(frozen=True)
class Store:
    """An opened store: where it is, what its index says, θ0 and the shared vector as opened files."""

    path: Path
    about: dict
    base: Any
    shared: Any

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of its tasks."""
        return tuple(self.about["tasks"])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{name: shape} of the leaves that tasks change."""
        return {name: info.shape for name, info in self.shared.tensors.items()}


def open_store(path: str | os.PathLike, theta0: Any = None) -> Store:
    """The store at `path`, its parts checked against each other.

    theta0: θ0, a tree or an opened checkpoint, for a store that has no copy of it (which is otherwise looked for where
    the store says); its content must have the hash that the store names.

    Raises ValueError with one sentence for what is no store, and for a base or shared vector that does not fit.
    """
    path = Path(path)
    about = layout.read_index(path)
    shared = _file(path / about["shared"]["file"])
    if shared.metadata.get("hash") != about["shared"]["hash"]:
        raise ValueError(f"{path / about['shared']['file']} is not this store's shared vector: hashes differ")
    shapes = {name: info.shape for name, info in shared.tensors.items()}
    if layout.tree_hash(shapes) != about["tree"]:
        raise ValueError(f"{path / about['shared']['file']} holds another tree than {layout.INDEX} says")
    base = _base(path, about, theta0)
    if lost := [name for name in shapes if name not in base.tensors or base.tensors[name].shape != shapes[name]]:
        raise ValueError(f"the base of {path} lacks {tree.listing(lost)}, or has them in another shape")
    return Store(path, about, base, shared)


def _base(path: Path, about: dict, theta0: Any) -> Any:
    said = about["base"]
    if theta0 is None and said["file"]:
        opened = _file(path / said["file"])
        found = opened.metadata.get("hash")
    else:
        opened = open_checkpoint(said["where"]) if theta0 is None else theta0
        opened = opened if hasattr(opened, "tensors") else layout.Held(opened)
        found = layout.content_hash(opened)
    if found != said["hash"]:
        what = "the base" if theta0 is None else "theta0"
        raise ValueError(f"{what} does not fit the store {path}, which was made on weights {said['hash'][:12]}; "
                         f"these are {str(found)[:12]}")
    return opened


def _file(path: Path) -> Safetensors:
    if not path.is_file():
        raise ValueError(f"the store {path.parent} lacks {path.name}")
    return Safetensors(path)


# ---------------------------------------------------------------- one task
def masks_of(store: Store, task: str) -> Safetensors:
    """The opened file of a task's masks, checked against the store; no mask is read yet."""
    if task not in store.about["tasks"]:
        raise ValueError(f"{store.path} has no task {task!r}; {tree.did_you_mean(task, store.tasks)}")
    path = store.path / store.about["tasks"][task]["file"]
    if not path.is_file():
        raise ValueError(f"the store {store.path} lacks {path.relative_to(store.path)}")
    opened = Safetensors(path)
    said = opened.metadata
    if said.get("bit_order") != packed.ORDER:
        raise ValueError(f"{path} is packed in {said.get('bit_order')!r} bit order; readable is {packed.ORDER!r}")
    if said.get("tree") != store.about["tree"]:
        raise ValueError(f"{path} holds masks of another tree than the store's")
    if said.get("base") != store.about["base"]["hash"] or said.get("shared") != store.about["shared"]["hash"]:
        raise ValueError(f"{path} holds masks for another base or shared vector than the store's")
    if said.get("task") != task:
        raise ValueError(f"{path} holds the masks of {said.get('task')!r}, not of {task!r}")
    return _check_bytes(opened, store.shapes)


def _check_bytes(opened: Safetensors, shapes: dict) -> Safetensors:
    found = {name: info.shape for name, info in opened.tensors.items()}
    wanted = {name: (packed.size(math.prod(shape)),) for name, shape in shapes.items()}
    for name in wanted:
        if found.get(name) != wanted[name]:
            there = f"{found[name][0]} bytes" if name in found else "missing"
            raise ValueError(f"{opened.where}: the mask of {name} is {there}, its {math.prod(shapes[name])} entries "
                             f"take {wanted[name][0]} bytes")
    return opened


def leaves(store: Store, task: str) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of all leaves of a task's model, one in memory at a time, in the dtypes of θ0."""
    masks, factor = masks_of(store, task), np.float32(store.about["tasks"][task]["factor"])
    for name, info in store.base.tensors.items():
        x = store.base.read(name, 0, info.size)
        if name in store.shapes:
            x = _moved(x, store.shared.read(name, 0, info.size), masks.read(name, 0, packed.size(info.size)), factor)
        yield name, x.reshape(info.shape)


def _moved(x, shared, row, factor):
    flags = np.unpackbits(row, count=x.size, bitorder=packed.ORDER).astype(bool)
    wide = np.promote_types(tree.wide(x.dtype), np.float32)
    step = np.where(flags, shared * factor, np.float32(0))
    return (x.astype(wide, copy=False) + step.astype(wide, copy=False)).astype(x.dtype, copy=False)


def load(store: Store | str | os.PathLike, task: str) -> dict:
    """The parameters of one task as nested dicts of numpy arrays.

    Raises ValueError for a task that is not there (and names the nearest one), and for masks that do not fit.
    """
    store = store if isinstance(store, Store) else open_store(store)
    return tree.unflatten(dict(leaves(store, task)))


def load_masks(store: Store, task: str) -> dict:
    """The masks of one task as nested dicts of `Bits`."""
    opened = masks_of(store, task)
    return tree.unflatten({name: packed.Bits(opened.whole(name), shape) for name, shape in store.shapes.items()})


def load_switch(store: Store) -> dict[str, Any]:
    """{"theta0", "tau", "masks", "factors"} of all tasks on the device, as `switch.params_for` takes them by name."""
    tensors = store.base.tensors.items()
    theta0 = {name: store.base.read(name, 0, info.size).reshape(info.shape) for name, info in tensors}
    tau = tree.unflatten({name: store.shared.whole(name) for name in store.shapes})
    masks = packed.stack([load_masks(store, task) for task in store.tasks])
    factors = np.asarray([store.about["tasks"][task]["factor"] for task in store.tasks], np.float32)
    put = lambda part: jax.tree.map(jnp.asarray, part)
    return {"theta0": put(tree.unflatten(theta0)), "tau": put(tau), "masks": put(masks), "factors": put(factors)}


# ---------------------------------------------------------------- more tasks
def add(store: Store, task: str, tau: Any, *, lam: float = 0.4) -> Store:
    """Adds one task's masks against the shared vector as it is; nothing else is rewritten. Returns the opened store.

    tau: a task vector, or a source of one that is read piece by piece. lam: λ of a "tall" store.
    """
    if not task or task in store.about["tasks"]:
        raise ValueError(f"{store.path} has a task {task!r} already" if task else "a task needs a name")
    within("lam", lam, 0, float("inf"))
    source = building.source_of(tau if hasattr(tau, "piece") else [tau])
    shapes = {name: tuple(shape) for name, shape in source.shapes.items()}
    if layout.tree_hash(shapes) != layout.tree_hash(store.shapes):
        faults = [name for name in {**shapes, **store.shapes} if shapes.get(name) != store.shapes.get(name)]
        raise ValueError(f"the task vector is of another tree than the store's: {tree.listing(faults)} differ")
    tall = store.about["kind"] == "tall"
    rule = building.Tall([lam], store.about["comparator"]) if tall else building.Emr(source)

    def fill(file: Any) -> None:
        for name, shape in store.shapes.items():
            size = math.prod(shape)
            for start, stop in layout.pieces(size):
                row = np.asarray(source.piece(name, start, stop), np.float32)
                flags = rule.masks(row, store.shared.read(name, start, stop), size)
                layout.append(file, np.packbits(flags[0], bitorder=packed.ORDER))
    layout.write_tensors(store.path / layout.mask_file(task), layout.mask_tensors(store.shapes),
                         layout.mask_metadata(store.about, task), fill)
    line = {"file": layout.mask_file(task), "lam": lam if tall else None, "factor": rule.factors()[0]}
    about = layout.read_index(store.path)
    about["tasks"][task] = line
    layout.write_index(store.path, about)
    return dataclasses.replace(store, about=layout.read_index(store.path))


# ---------------------------------------------------------------- sizes
def sizes_of(store: Store) -> dict[str, Any]:
    """Bytes by formula and as measured: {"formula", "measured", "checkpoints", "files"}.

    formula: θ0 (if it is in the store), 4 bytes an entry of the shared vector, 1 bit an entry and task, 4 bytes a
    factor of EMR. measured: the sizes of all files. checkpoints: as many whole models as there are tasks.
    """
    base = sum(info.nbytes for info in store.base.tensors.values())
    entries, tasks = store.about["entries"], len(store.tasks)
    factors = 4 * tasks if store.about["kind"] == "emr" else 0
    held = base if store.about["base"]["file"] else 0
    names = [layout.INDEX, store.about["shared"]["file"], *(line["file"] for line in store.about["tasks"].values())]
    names += [store.about["base"]["file"]] if held else []
    files = {name: (store.path / name).stat().st_size for name in names}
    return {"formula": held + 4 * entries + tasks * entries / 8 + factors, "measured": sum(files.values()),
            "checkpoints": tasks * base, "files": files}
