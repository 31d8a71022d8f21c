"""Building a store: θ0, the merged vector and the tasks' masks written in one pass, a few pieces in memory at a time.

The inputs are read once for each statistic that the merge declares (none for a sum) and once for the result; masks are
packed from the same pieces as the merged vector.
"""
import contextlib
import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tvjax import tree
from tvjax.compression import bits as packed
from tvjax.compression import layout
from tvjax.compression.tall import per_task
from tvjax.disk.deltas import Deltas, Place
from tvjax.disk.headers import encode_header
from tvjax.disk.readers import open_checkpoint
from tvjax.merging import Operator, emr, engine, streamed, total
from tvjax.merging.checks import choice, within
from tvjax.merging.masks import COMPARATORS
from tvjax.merging.sources import Listed

KINDS = ("tall", "emr")
FLOAT = np.dtype(np.float32)


def build(path: str | os.PathLike, base: Any, taus: Any, *, tasks: Sequence[str], kind: str = "tall",
          merging: Operator | None = None, lam: Any = 0.4, comparator: str = ">", where: str = "", **data) -> None:
    """Writes a store of task vectors into the new folder `path`, which appears when all is there.

    base: θ0, a tree or an opened checkpoint. taus: a list of task vectors, or a source that is read piece by piece
    (`sources_of`). kind: "tall" (masks of λ against `merging`, the sum by default) or "emr". lam: λ, one number or one
    for each task. where: a folder or hub id where θ0 can be had; it is then not copied into the store but named with
    its hash. data: what `merging` needs.
    """
    choice("kind", kind, KINDS)
    choice("comparator", comparator, tuple(COMPARATORS))
    within("lam", np.asarray(lam), 0, float("inf"))
    opened, source = _opened(base), source_of(taus)
    operator = emr() if kind == "emr" else total() if merging is None else merging
    _check(opened, source, tasks)
    lams = [float(one) for one in per_task(lam, source.tasks)]
    rule = Emr(source) if kind == "emr" else Tall(lams, comparator)
    with layout.new_folder(Path(path)) as folder:
        hash_ = layout.content_hash(opened)
        if not where:
            layout.copy_base(opened, folder / layout.BASE, hash_)
        about = {"kind": kind, "bit_order": packed.ORDER, "comparator": comparator, "merging": repr(operator),
                 "base": {"hash": hash_, "file": "" if where else layout.BASE, "where": where},
                 "shared": {"file": layout.SHARED, "hash": layout.UNKNOWN}, "tree": layout.tree_hash(source.shapes),
                 "entries": sum(math.prod(shape) for shape in source.shapes.values()), "tasks": {}}
        about["shared"]["hash"] = _write(folder, about, operator, source, rule, list(tasks), data)
        factors = rule.factors()
        about["tasks"] = {task: {"file": layout.mask_file(task), "lam": lams[i] if kind == "tall" else None,
                                 "factor": factors[i]} for i, task in enumerate(tasks)}
        layout.write_index(folder, about)


def sources_of(base: str | os.PathLike, models: Mapping[str, str | os.PathLike], *, only: str = "") -> tuple[Any, Any]:
    """(θ0 opened, a source of θ_t − θ0) of checkpoints on disk or the hub; only headers are read now.

    only: a regular expression that the names of the leaves of interest contain (all floating-point leaves by default).
    """
    import re

    opened = open_checkpoint(base)
    thetas = [open_checkpoint(model) for model in models.values()]
    names = [name for name, info in opened.tensors.items() if tree.is_float(info) and re.search(only, name)]
    if not names:
        raise ValueError(f"no floating-point leaf of {base} matches {only!r}")
    for task, theta in zip(models, thetas, strict=True):
        flat = lambda one: {name: np.broadcast_to(np.zeros((), info.dtype), info.shape)
                            for name, info in one.tensors.items() if name in names}
        if faults := tree.differences(flat(theta), flat(opened), names=(task, "the base"), dtypes=False):
            raise ValueError(f"{task} and the base differ: {'; '.join(faults)}")
    places = [{name: Place(name, opened.tensors[name].size) for name in names} for _ in thetas]
    return opened, Deltas(opened, thetas, places, names)


def _opened(base: Any) -> Any:
    return base if hasattr(base, "tensors") else layout.Held(base)


def source_of(taus: Any) -> Any:
    """A list of task vectors, checked, as a source that is read piece by piece; a source is returned as it is."""
    if hasattr(taus, "piece"):
        return taus
    if not taus:
        raise ValueError("there is nothing to store: the list of task vectors is empty")
    for i, tau in enumerate(taus[1:], 1):
        tree.check_same(taus[0], tau, names=("the first task vector", f"task vector {i}"))
    return Listed([tree.flatten(tau) for tau in taus])


def _check(opened: Any, source: Any, tasks: Sequence[str]) -> None:
    if len(tasks) != source.tasks or len(set(tasks)) < len(tasks) or not all(isinstance(t, str) and t for t in tasks):
        raise ValueError(f"a store names its {source.tasks} tasks, each differently; got {', '.join(map(str, tasks))}")
    for name, shape in source.shapes.items():
        if name not in opened.tensors or opened.tensors[name].shape != tuple(shape):
            found = opened.tensors[name].shape if name in opened.tensors else "nothing"
            raise ValueError(f"the task vectors do not belong to this base: {name} is {tuple(shape)}, there is {found}")


# ---------------------------------------------------------------- the pass
def _write(folder: Path, about: dict, operator, source, rule, tasks: list[str], data: dict) -> str:
    """Writes the shared vector and all masks; returns the hash of the former, which the latter then name."""
    hashes = engine.task_hashes(tasks, source.tasks)
    job = streamed.prepare(operator, source, hashes, engine.check_data(operator, data, list(source.shapes)))
    shapes = {leaf.name: tuple(leaf.shape) for leaf in job.leaves.values()}
    header = lambda task: encode_header(layout.mask_tensors(shapes), layout.mask_metadata(about, task))
    (folder / layout.MASKS).mkdir()
    digest = hashlib.sha256()
    with contextlib.ExitStack() as files:
        shared = files.enter_context(open(folder / layout.SHARED, "wb"))
        shared.write(_shared_header(shapes, layout.UNKNOWN))
        masks = [files.enter_context(open(folder / layout.mask_file(task), "wb")) for task in tasks]
        for file, task in zip(masks, tasks, strict=True):
            file.write(header(task))
        for made in streamed.finished(job):
            _write_piece(made, rule, shared, masks, digest)
        about["shared"]["hash"] = digest.hexdigest()
        for file, text in [(shared, _shared_header(shapes, digest.hexdigest())),
                           *((file, header(task)) for file, task in zip(masks, tasks, strict=True))]:
            file.seek(0)
            file.write(text)  # as long as before: a hash is 64 letters
            file.flush()
            os.fsync(file.fileno())
    return digest.hexdigest()


def _shared_header(shapes, hash_: str) -> bytes:
    return encode_header({name: (FLOAT, shape) for name, shape in shapes.items()}, {"tvjax": "shared", "hash": hash_})


def _write_piece(made, rule, shared, masks, digest) -> None:
    count = made.stop - made.start
    merged = np.asarray(made.result, FLOAT).reshape(-1)
    if merged.size != count:
        raise ValueError(f"this operator does not reduce over tasks: {made.leaf.name} came out as {merged.size} "
                         f"entries, the model has {count}")
    taus = np.asarray(made.origin, FLOAT).reshape(len(masks), -1)[:, :count]
    layout.append(shared, merged)
    if made.start == 0:
        layout.start_leaf(digest, made.leaf.name, FLOAT, tuple(made.leaf.shape))
    digest.update(merged.view(np.uint8).data)
    rows = rule.masks(taus, merged, math.prod(made.leaf.shape))
    for file, row in zip(masks, rows, strict=True):  # pieces but the last of a leaf are whole bytes of bits
        layout.append(file, np.packbits(row, bitorder=packed.ORDER))


class Tall:
    """TALL-masks of pieces: |τ_t| > λ_t·|merged − τ_t|."""

    def __init__(self, lams: Sequence[float], comparator: str):
        self.lams, self.above = np.asarray(lams, FLOAT), np.greater if comparator == ">" else np.greater_equal

    def masks(self, taus: np.ndarray, merged: np.ndarray, size: int) -> np.ndarray:
        """(tasks, entries) flags; `size` counts the entries of the whole leaf."""
        return self.above(np.abs(taus), self.lams[:, None] * np.abs(merged[None] - taus))

    def factors(self) -> list[float]:
        """The factor of each task, once all pieces have passed."""
        return [1.0] * len(self.lams)


class Emr:
    """EMR's masks of pieces, τ_t·u > 0, and its factors: sums over leaves of mean|τ_t| over those of mean|m_t·u|."""

    def __init__(self, source: Any):
        self.whole, self.kept = np.zeros(source.tasks), np.zeros(source.tasks)

    def masks(self, taus: np.ndarray, merged: np.ndarray, size: int) -> np.ndarray:
        """(tasks, entries) flags; adds this piece's part to the means over its leaf of `size` entries."""
        flags = taus * merged[None] > 0
        self.whole += np.abs(taus).sum(1, dtype=np.float64) / size
        self.kept += np.where(flags, np.abs(merged)[None], 0).sum(1, dtype=np.float64) / size
        return flags

    def factors(self) -> list[float]:
        """The factor of each task, once all pieces have passed."""
        return [float(np.float32(w / k)) if k > 0 else 1.0 for w, k in zip(self.whole, self.kept, strict=True)]
