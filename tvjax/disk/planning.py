"""What a merge will read, write and need, told before it starts; headers are all that has been read by then."""
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tvjax import tree
from tvjax.disk.deltas import Deltas
from tvjax.disk.match import Matched
from tvjax.disk.outputs import Outputs
from tvjax.disk.readers import Opened, TensorInfo
from tvjax.disk.writers import Shard, free_bytes
from tvjax.merging import ahead, counting, pieces, ranking
from tvjax.merging import plan as stages
from tvjax.merging.operator import Operator
from tvjax.merging.statistics import Kth

START = 300 << 20  # bytes that Python, NumPy and JAX take by themselves
PIECES = 4 * ahead.AHEAD + 8  # that are read, computed or written at a time, over all threads
FACTORED = 48  # bytes an entry of a matrix that is taken apart: itself, its transpose and Gram matrix in float64
SPEED = 1e9  # bytes a second, for the guess of the time


class Plan(NamedTuple):
    """The numbers of a merge: bytes of each pass over the inputs, how many passes, bytes to write, memory."""

    bytes_once: int
    passes: int
    bytes_copied: int
    bytes_written: int
    peak_bytes: int
    free: int

    @property
    def bytes_read(self) -> int:
        return self.bytes_once * self.passes + self.bytes_copied


def plan(operator: Operator, source: Deltas, matched: Matched, files: Sequence[Shard], out: Path,
         made: Outputs) -> Plan:
    """The plan of a merge; nothing is read for it."""
    once = sum(source.base.tensors[name].nbytes for name in matched.merged)
    for model, places in zip(source.models, matched.places, strict=True):
        once += sum(at.entries * model.tensors[at.name].dtype.itemsize for at in places.values())
    copied = sum(source.base.tensors[name].nbytes for name in matched.copied) if made.kind == "model" else 0
    factored = max((math.prod(module.shape) for module in made.modules.values()), default=0)
    written = sum(shard.size for shard in files)
    peak = START + memory(operator, source) + FACTORED * factored
    return Plan(once, counting.passes(operator), copied, written, peak, free_bytes(out))


def memory(operator: Operator, source: Deltas) -> int:
    """A bound of the bytes held at once: pieces under way, the largest leaf that goes whole, sampled scores."""
    tasks, leaves = source.tasks, stages.leaves(source.shapes)
    size = lambda leaf: math.prod(leaf.shape) * source.dtypes[leaf.name].itemsize
    whole = [size(leaf) for leaf in leaves.values() if not chunked(operator, leaf)]
    wide = max((dtype.itemsize for dtype in source.dtypes.values()), default=4)
    bound = PIECES * (tasks + 3) * pieces.sizes(tasks)[-1] * wide
    at_once = max(whole, default=0) + min(sum(whole), ahead.WHOLE * wide)
    bound += 3 * (tasks + 3) * at_once  # decompositions hold what they read, and as much again twice
    if any(stage.stats for stage in operator.stages[1:]):
        bound += tasks * sum(whole)  # leaves taken half of the way are kept
    if any(isinstance(stat, Kth) for stage in operator.stages for stat in stage.stats):
        entries = sum(math.prod(shape) for shape in source.shapes.values())
        held = entries if entries <= ranking.SMALL // 4 else entries // ranking.stride(entries)
        bound += tasks * wide * (4 * held + entries // 100)  # samples, sorted, and candidates
    return bound


def chunked(operator: Operator, leaf: stages.Leaf) -> bool:
    """Whether a leaf may go in chunks: all its stages are entry-wise."""
    return all(operator.stages[i].entrywise for i in stages.pipeline(operator, leaf))


def entrywise(operator: Operator, source: Deltas) -> dict[str, int]:
    """{tensor: its entries} of those that are merged entry by entry."""
    leaves = stages.leaves(source.shapes).values()
    return {leaf.name: math.prod(leaf.shape) for leaf in leaves if chunked(operator, leaf)}


# ---------------------------------------------------------------- in words
def describe(plan_: Plan, base: Opened, models: Mapping[str, Opened], matched: Matched, files: Sequence[Shard]) -> str:
    """The plan as lines of text."""
    lines = [f"base {base.where}: {_inventory(base.tensors)}"]
    for (label, model), places in zip(models.items(), matched.places, strict=True):
        lines.append(f"model {label} ({model.where}): {_inventory(model.tensors)}{_model(matched, label, places)}")
    lines.append(f"merged: {len(matched.merged)} tensors, "
                 f"{sum(base.tensors[name].size for name in matched.merged):,} entries")
    for why in sorted(set(matched.copied.values())):
        lines.append(f"{why}: {tree.listing([name for name, said in matched.copied.items() if said == why], 4)}")
    lines += [f"tied: {name} is {other}, merged and written once" for name, other in matched.tied.items()]
    lines += [f"note: {note}" for note in matched.notes]
    lines.append(f"to read: {gigabytes(plan_.bytes_read)} ({plan_.passes} pass{'es' * (plan_.passes > 1)} over "
                 f"{gigabytes(plan_.bytes_once)}); to write: {gigabytes(plan_.bytes_written)} in {len(files)} "
                 f"file{'s' * (len(files) > 1)}, {gigabytes(plan_.free)} free")
    lines.append(f"memory: at most {gigabytes(plan_.peak_bytes)}; time: about "
                 f"{(plan_.bytes_read + plan_.bytes_written) / SPEED + 2:.0f} s where the disk gives 1 GB/s")
    return "\n".join(lines)


def _inventory(tensors: Mapping[str, TensorInfo]) -> str:
    dtypes: dict[str, int] = {}
    for info in tensors.values():
        dtypes[info.dtype.name] = dtypes.get(info.dtype.name, 0) + 1
    counts = ", ".join(f"{count} {name}" for name, count in sorted(dtypes.items()))
    return f"{len(tensors)} tensors ({counts}), {gigabytes(sum(info.nbytes for info in tensors.values()))}"


def _model(matched: Matched, label: str, places) -> str:
    said = f"; {len(places)} matched"
    if prefix := matched.prefixes.get(label):
        said += f", its names {'have' if prefix[0] == '+' else 'lack'} the prefix {prefix[1:]!r}"
    if left := matched.left.get(label):
        said += f"; left out: {tree.listing(left, 4)}"
    return said


def gigabytes(count: int | float) -> str:
    """Bytes in words.

    >>> gigabytes(3_150_000_000), gigabytes(2_048)
    ('3.15 GB', '2.05 kB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def versions() -> dict[str, str]:
    """The versions on which a merge's bits may depend."""
    import importlib.metadata

    return {name: importlib.metadata.version(name) for name in ("tvjax", "jax", "jaxlib", "numpy")}
