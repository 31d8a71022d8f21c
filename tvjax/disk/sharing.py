"""One merge by several devices and processes: each process owns output files, and reads what goes into them.

A file belongs to one process, its tensors are read there as byte ranges, a piece for each of its devices; at the end
process 0 adds the index, the card and one ledger.
"""
from collections.abc import Sequence
from pathlib import Path

import jax

from tvjax import sharding
from tvjax.disk import ledger
from tvjax.disk.workdir import write_whole
from tvjax.disk.writers import Shard
from tvjax.merging.crew import Crew, shared_out

FILES = 4  # output files that each process has at least, where the model is large enough: so they share it evenly


def crew(files: Sequence[Shard]) -> Crew | None:
    """Who shares the merge into these files; None for one device of one process."""
    layout, count, rank = sharding.found(), jax.process_count(), jax.process_index()
    devices = jax.local_devices()[:1] if layout is None else layout.mesh.devices.flat
    mine = tuple(device for device in devices if device.process_index == rank)
    if count == 1 and len(mine) == 1:
        return None
    return Crew(mine, rank, count, sharding.exchanged, _owners(files, count))


def _owners(files: Sequence[Shard], count: int) -> dict[str, int]:
    owner = shared_out({shard.name: shard.size for shard in files}, count)
    return {name: owner[shard.name] for shard in files for name in shard.tensors}


def own(files: Sequence[Shard], crew_: Crew | None) -> list[Shard]:
    """The files that this process writes."""
    return [shard for shard in files if crew_ is None or crew_.owns(next(iter(shard.tensors), ""))]


def most_bytes(most: int, total: int) -> int:
    """The size of an output file: small enough that every process has some."""
    count = jax.process_count()
    return most if count == 1 else max(1, min(most, -(-total // (FILES * count))))


def ledger_name(crew_: Crew | None) -> str:
    """Where this process writes its lines."""
    return ledger.NAME if crew_ is None or crew_.rank == 0 else f"ledger-{crew_.rank}.jsonl"


def join(work: Path, files: Sequence[Shard]) -> None:
    """Makes one ledger of all, in the order of the files, and removes the parts."""
    past, parts = ledger.read_all(work), ledger.parts(work)
    if past is None or not parts:
        return
    order = [past.tensors[name] for shard in files for name in shard.tensors if name in past.tensors]
    text = "".join(map(ledger.as_text, [past.head, {"statistics": past.statistics}, *order]))
    write_whole(work / ledger.NAME, text.encode())
    for path in parts:
        path.unlink()
