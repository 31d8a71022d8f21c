"""One merge by several devices and processes: each process owns output files, and reads what goes into them.

A file belongs to one process, its tensors are read there as byte ranges, a piece for each of its devices. A large
tensor of which every entry stands alone belongs to all: each reads its range of bytes of all inputs and writes them at
their place in the one file. At the end process 0 adds the index, the card and one ledger.
"""
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import jax

from tvjax import sharding
from tvjax.disk import ledger
from tvjax.disk.workdir import write_whole
from tvjax.disk.writers import Shard, name_whole
from tvjax.merging import pieces
from tvjax.merging.crew import Crew, cut, shared_out

NOTHING: Mapping[str, int] = MappingProxyType({})
FILES = 4  # output files that each process has at least, where the model is large enough: so they share it evenly


def crew(files: Sequence[Shard], entrywise: Mapping[str, int] = NOTHING, tasks: int = 1) -> Crew | None:
    """Who shares the merge into these files; None for one device of one process.

    entrywise: {tensor: its entries} of those whose entries may be merged apart from each other.
    """
    layout, count, rank = sharding.found(), jax.process_count(), jax.process_index()
    devices = jax.local_devices()[:1] if layout is None else layout.mesh.devices.flat
    mine = tuple(device for device in devices if device.process_index == rank)
    if count == 1 and len(mine) == 1:
        return None
    own = shares(files, entrywise if count > 1 else NOTHING, count, tasks)
    return Crew(mine, rank, count, sharding.exchanged, *own)


def shares(files: Sequence[Shard], entrywise: Mapping[str, int], count: int, tasks: int
           ) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """({tensor: the process that has it}, {tensor that all have: where it is cut}), so that all write as much.

    Cut are tensors that have a file for themselves, and are more than a process should have in one file.
    """
    most = sum(shard.size for shard in files) // (FILES * count)
    alone = [next(iter(shard.tensors)) for shard in files if len(shard.tensors) == 1 and shard.size > most]
    unit = pieces.sizes(tasks)[-1]
    cuts = {name: cut(entrywise[name], count, unit) for name in alone if entrywise.get(name, 0) >= count * unit}
    whole = [shard for shard in files if not cuts.keys() & shard.tensors.keys()]
    owner = shared_out({shard.name: shard.size for shard in whole}, count)
    return {name: owner[shard.name] for shard in whole for name in shard.tensors}, cuts


def own(files: Sequence[Shard], crew_: Crew | None) -> list[Shard]:
    """The files that this process writes, or writes into."""
    return [shard for shard in files if crew_ is None or crew_.owns(next(iter(shard.tensors), ""))]


def most_bytes(most: int, total: int, count: int | None = None) -> int:
    """The size of an output file: small enough that every process (of `count`, by default of those here) has some."""
    count = jax.process_count() if count is None else count
    return most if count == 1 else max(1, min(most, -(-total // (FILES * count))))


def ledger_name(crew_: Crew | None) -> str:
    """Where this process writes its lines."""
    return ledger.NAME if crew_ is None or crew_.rank == 0 else f"ledger-{crew_.rank}.jsonl"


def join(work: Path, files: Sequence[Shard], crew_: Crew | None) -> None:
    """Names the files that all have written, makes one ledger of all, in the order of the files, and removes the
    parts."""
    past, parts = ledger.read_all(work), ledger.parts(work)
    if past is None or not parts:
        return
    cuts = crew_.cuts if crew_ else {}
    for shard in files:
        if cuts.keys() & shard.tensors.keys() and not (work / shard.name).exists():
            name_whole(work, shard)
    order = [past.tensors.get(name) or ledger.of_parts(past, work, shard, name, cuts[name])
             for shard in files for name in shard.tensors if name in past.tensors or name in cuts]
    text = "".join(map(ledger.as_text, [past.head, {"statistics": past.statistics}, *order]))
    write_whole(work / ledger.NAME, text.encode())
    for path in parts:
        path.unlink()
