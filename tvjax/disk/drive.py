"""The merge itself: statistics, then piece by piece base + step into the shards, while threads read, hash and tell.

What depends on the order of pieces (the file, its hashes) is one thread's work; the main thread runs JAX.
"""
import hashlib
import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tvjax.disk import finite, ledger, sharing
from tvjax.disk.deltas import BLOCK, Deltas, Zero, widened
from tvjax.disk.match import Matched
from tvjax.disk.outputs import Outputs, factors
from tvjax.disk.readers import Opened
from tvjax.disk.writers import Growing, Shard
from tvjax.merging import crewed, engine, streamed
from tvjax.merging.crew import Crew
from tvjax.merging.operator import Operator

QUEUE = 6  # pieces that wait to be written
LINES = 64  # tensors whose lines wait for their hashes


class Task(NamedTuple):
    """All that the merge needs, checked and opened."""

    operator: Operator
    source: Deltas
    base: Opened
    models: dict[str, Opened]
    matched: Matched
    files: list[Shard]
    outputs: Outputs
    allow_nonfinite: bool
    head: dict[str, Any]  # the ledger's first line
    brief: bool = False  # whether the ledger tells no more than is needed to go on
    crew: Crew | None = None  # who shares the merge; None: one device does it


def drive(task: Task, work: Path, past: ledger.Past | None, data: Mapping[str, Any]) -> None:
    """Writes all shards into `work`, with their ledger; what `past` did and is still there is not done again.

    A process of several writes its own shards, its part of those that all share, and a ledger of its own.
    """
    files, spans = sharing.own(task.files, task.crew), task.crew.spans if task.crew else {}
    done = ledger.still_there(past, work, files, spans) if past else {}
    rest = [name for shard in files for name in shard.tensors if name not in done]
    job, statistics = None, past.statistics if past else ""
    needed = any(name not in task.matched.copied for name in rest) or bool(task.outputs.left)
    if task.crew is not None and task.outputs.kind == "lora":
        raise ValueError("an adapter is extracted by one device of one process")
    if needed if task.crew is None else any(task.crew.exchange(needed)):
        job = _prepared(task, data)
        statistics = ledger.hash_of_values(job.values)
        if past and statistics != past.statistics:
            done = {}  # another number of threads may split a sum otherwise; the output is of one piece
    name = sharing.ledger_name(task.crew)
    known = [{"hashed": name, "inputs": past.inputs[name]} for name in spans if past and name in past.inputs]
    lines = ledger.Ledger(work / name, [task.head, {"statistics": statistics}, *done.values(), *known])
    try:
        for shard in files:
            _write_shard(task, job, shard, work, lines, done)
        if not task.brief:
            _hash_inputs(task, lines, spans, past.inputs if past else {})
    finally:
        lines.close()


def _prepared(task: Task, data: Mapping[str, Any]) -> streamed.Run:
    hashes = engine.task_hashes(list(task.models), len(task.models))
    data = engine.check_data(task.operator, data, task.matched.merged)
    if task.crew is not None:
        return crewed.prepare(task.operator, task.source, hashes, data, task.crew, finite.check(task))
    return streamed.prepare(task.operator, task.source, hashes, data, finite.check(task))


def _finished(task: Task, job, names):
    if task.crew is not None:
        return crewed.finished(job, task.crew, names)
    return streamed.finished(job, names, lean=task.brief)


def _write_shard(task: Task, job, shard: Shard, work: Path, lines: ledger.Ledger, done) -> None:
    rest = [name for name in shard.tensors if name not in done]
    shared = task.crew is not None and bool(task.crew.cuts.keys() & shard.tensors.keys())
    if not rest and (shared or (work / shard.name).exists()) and not task.outputs.left:
        return
    copied, merged = _sorted(task, shard, set(rest))
    growing = Growing(work, shard)
    try:
        with Sink(task, growing, lines) as sink:
            for name in copied:
                sink.copy(name)
            for made in _finished(task, job, merged) if merged and job else ():
                sink.put(made)
    except BaseException:
        growing.close()
        raise
    if shared:
        growing.leave()
    else:
        growing.finish()


def _hash_inputs(task: Task, lines: ledger.Ledger, names: Iterable[str], known: Mapping[str, Mapping]) -> None:
    """Lines of the hashes of what goes into tensors that all processes share, each process for its share of inputs."""
    for name in names:
        mine = list(_inputs(task, name).items())[task.crew.rank :: task.crew.count] if task.crew else []
        new = [(label, where) for label, where in mine if label not in known.get(name, {})]
        lines.add({"hashed": name, "inputs": {label: ledger.tensor_hash(*where) for label, where in new}})


def _inputs(task: Task, name: str) -> dict[str, tuple[Opened, str]]:
    """{label: (checkpoint, its name of the tensor)} of the base, "", and all models."""
    models = zip(task.models.items(), task.source.places, strict=True)
    return {"": (task.base, name)} | {label: (model, places[name].name) for (label, model), places in models}


def _sorted(task: Task, shard: Shard, rest: set[str]) -> tuple[list[str], list[str]]:
    """The base's tensors to copy and those to merge for a shard, of which the tensors `rest` are still to be written.

    What an adapter cannot hold is merged all the same, to be told.
    """
    if task.outputs.kind != "lora":
        return [n for n in shard.tensors if n in rest and n in task.matched.copied], \
               [n for n in shard.tensors if n in rest and n not in task.matched.copied]
    held = [name for name in task.outputs.modules if rest & {*task.outputs.names(name)}]
    return [], [*held, *task.outputs.left]


class Sink:
    """Takes finished pieces of one shard in order: adds the base, writes, hashes, and adds a line for each tensor."""

    def __init__(self, task: Task, growing: Growing, lines: ledger.Ledger):
        self.task, self.growing, self.lines = task, growing, lines
        self.writer = ThreadPoolExecutor(1, "tvjax-write")
        self.teller = ThreadPoolExecutor(1, "tvjax-tell")
        self.hashers = ThreadPoolExecutor(2, "tvjax-hash")
        self.waiting: deque[Future] = deque()
        self.untold: deque[tuple[dict, list[Future], dict[str, Future]]] = deque()
        self.digest = hashlib.sha256()
        self.sums: list[Future] = []
        self.gathered: np.ndarray | None = None  # the step of a tensor that is taken apart

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        try:
            if kind is None:
                self._wait(0)
                self._tell(0)
        finally:
            for pool in (self.writer, self.teller, self.hashers):
                pool.shutdown(wait=True, cancel_futures=True)

    def put(self, made: streamed.Made) -> None:
        """Hands a piece over; raises what writing an earlier one raised."""
        shape = made.leaf.shape
        if np.shape(made.result) not in ((made.stop - made.start,), shape):
            raise ValueError(f"this operator does not reduce over tasks: {made.leaf.name} came out as "
                             f"{np.shape(made.result)}, the model has {shape}")
        self.waiting.append(self.writer.submit(self._piece, made))
        self._wait(QUEUE)

    def copy(self, name: str) -> None:
        """Writes the base's own tensor."""
        self.waiting.append(self.writer.submit(self._copy, name))
        self._wait(QUEUE)

    def _wait(self, most: int) -> None:
        while len(self.waiting) > most:
            self.waiting.popleft().result()

    # ------------------------------------------------------------ in the writing thread
    def _piece(self, made: streamed.Made) -> None:
        name, spans = made.leaf.name, self.task.crew.spans if self.task.crew else {}
        first, last = spans.get(name, (0, math.prod(made.leaf.shape)))
        if made.start == first:
            self.digest, self.sums = hashlib.sha256(), []
            hashes = {} if self.task.brief or name in spans else self._input_hashes(name)
            self.untold.append(({}, self.sums, hashes))
        delta = np.asarray(made.result).reshape(-1)
        taus = None if self.task.brief else np.asarray(made.origin).reshape(self.task.source.tasks, -1)
        for start in range(0, delta.size, BLOCK):
            step, stop = delta[start : start + BLOCK], min(start + BLOCK, delta.size)
            self._take(name, made.start + start, step)
            if taus is None:
                continue
            self.sums.append(self.teller.submit(ledger.sums, taus[:, start:stop], step))
            if len(self.sums) > QUEUE:
                self.sums[-QUEUE].result()  # lest pieces heap up
        if made.stop == last:
            self.untold[-1][0].update(self._line(name) if self.gathered is None else self._factored(name))
            self.untold[-1][0].update({"part": [first, last]} if name in spans else {})
            self._tell(LINES)

    def _take(self, name: str, start: int, step: np.ndarray) -> None:
        """Entries of the step from `start` on: into the file, or to the others of a tensor that is taken apart."""
        dtype, kind, base = self.task.source.dtypes[name], self.task.outputs.kind, self.task.base
        step = step.astype(dtype, copy=False)
        if kind != "model" and isinstance(base, Zero):  # the operator made a model, not a step
            step = step - widened(base.base.read(name, start, start + step.size), dtype)
        if kind == "lora":
            if start == 0:
                self.gathered = np.empty(self.task.source.base.tensors[name].size, dtype)
            assert self.gathered is not None
            self.gathered[start : start + step.size] = step
        else:
            self._merge(name, start, step, 0 if kind == "task_vector" else
                        widened(base.read(name, start, start + step.size), dtype))

    def _merge(self, name: str, start: int, step: np.ndarray, base) -> None:
        info = self.growing.shard.tensors[name]
        with np.errstate(over="ignore", invalid="ignore"):
            wide = np.add(base, step, dtype=step.dtype)
            made = wide.astype(info.dtype, copy=False)
        if not self.task.allow_nonfinite and not np.isfinite(made).all():
            at = int(np.flatnonzero(~np.isfinite(made))[0])
            where = finite.entry(name, start + at, info.shape)
            raise ValueError(f"{where} becomes {wide[at]:g}, more than {info.dtype.name} holds: choose a wider "
                             "out_dtype, or set allow_nonfinite")
        self._write(name, start, made)

    def _factored(self, name: str) -> dict[str, Any]:
        """Writes the factors of a gathered step; the line of the first of them, or of what is left out."""
        step, self.gathered = self.gathered, None
        assert step is not None
        size = float(np.linalg.norm(step.astype(np.float64)))
        if name not in self.task.outputs.modules:
            return {"left_out": name, "change_norm": size, "residual_norm": size}
        module = self.task.outputs.modules[name]
        dtypes = [self.growing.shard.tensors[part].dtype for part in module.names]
        made, rest = factors(step.reshape(module.shape), module, dtypes)
        lines = []
        for part, x in zip(module.names, made, strict=True):
            if not self.task.allow_nonfinite and not np.isfinite(x).all():
                raise ValueError(f"the factors of {name} are more than {x.dtype.name} holds: choose a wider out_dtype")
            self.digest = hashlib.sha256()
            self._write(part, 0, np.ascontiguousarray(x).reshape(-1))
            lines.append(self._line(part))
        self.untold.append((lines[1], [], {}))
        return lines[0] | {"of": name, "rank": module.rank, "change_norm": size, "residual_norm": rest}

    def _write(self, name: str, start: int, made: np.ndarray) -> None:
        self.digest.update(np.atleast_1d(made).view(np.uint8).data)
        self.growing.write(self.growing.shard.begins[name] + start * made.dtype.itemsize, made)

    def _copy(self, name: str) -> None:
        info = self.task.base.tensors[name]
        self.digest = hashlib.sha256()
        for start in range(0, info.size, BLOCK):
            self._write(name, start, self.task.base.read(name, start, min(start + BLOCK, info.size)))
        self.untold.append(({**self._line(name), "copied": self.task.matched.copied[name]}, [], {}))
        self._tell(LINES)

    def _line(self, name: str) -> dict[str, Any]:
        shard = self.growing.shard
        info = shard.tensors[name]
        return {"tensor": name, "file": shard.name, "dtype": info.dtype.name, "shape": list(info.shape),
                "sha256": self.digest.hexdigest()}

    def _input_hashes(self, name: str) -> dict[str, Future]:
        return {label: self.hashers.submit(ledger.tensor_hash, *where)
                for label, where in _inputs(self.task, name).items()}

    def _tell(self, most: int) -> None:
        """Adds the lines of tensors all of whose numbers are there; of all but `most` in any case."""
        while self.untold:
            line, parts, hashes = self.untold[0]
            ready = line and all(future.done() for future in [*parts, *hashes.values()])
            if not ready and len(self.untold) <= most:
                return
            if parts:
                total = parts[0].result()
                for part in parts[1:]:
                    total = total + part.result()
                inputs = {label: future.result() for label, future in hashes.items()}
                line |= {"sums": total.plain} if "part" in line else ledger.told(total) | {
                    "base_sha256": inputs.pop(""), "model_sha256": inputs}
            self.lines.add(line)
            self.untold.popleft()


class Counter:
    """Counts bytes from several threads, and moves a progress bar."""

    def __init__(self, bar: Any):
        self.bar, self.lock, self.count = bar, threading.Lock(), 0

    def __call__(self, count: int) -> None:
        with self.lock:
            self.count += count
            self.bar.update(count)
