"""What the tests of shared merging run: merges from disk to disk on all devices that there are, and on one.

    python tests/many_merges.py FOLDER OUT METHOD,METHOD… [HOST:PORT,COUNT,INDEX]
"""
import contextlib
import pathlib
import sys

import jax
import numpy as np

from tvjax import checkpoints, disk, merging, sharding
from tvjax.disk import deltas
from tvjax.merging import plan

TASKS = ("cars", "birds", "maps")
SHAPES = {"embed.table": (530_000,), "head.bias": (70_000,),
          **{f"layers.{i}.{name}": shape for i in range(3) for name, shape in
             {"attn.weight": (24, 16), "fc1.weight": (16, 24), "fc2.weight": (16, 24), "bias": (24,)}.items()}}


def write(folder: pathlib.Path) -> None:
    """A base, three models, and what some methods need beside them."""
    rng = np.random.default_rng(0)
    base = {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    checkpoints.save(checkpoints.nest(base), folder / "base" / "model.safetensors")
    for task in TASKS:
        tuned = {name: x + np.float32(0.1) * rng.standard_normal(x.shape, np.float32) for name, x in base.items()}
        checkpoints.save(checkpoints.nest(tuned), folder / task / "model.safetensors")


def needed(method: str) -> dict:
    rng = np.random.default_rng(9)
    made = {"fisher": lambda: {n: rng.random((3, *shape), np.float32) + 0.1 for n, shape in SHAPES.items()},
            "gram": lambda: {n: np.stack([a.T @ a for a in rng.standard_normal((3, 100, shape[1]), np.float32)])
                             for n, shape in SHAPES.items() if len(shape) == 2}}
    return {name: checkpoints.nest(made[name]()) for name in sorted(plan.wanted(merging.build(method)))}


def watched_reads() -> list[tuple[int, int]]:
    """Which entries of the largest tensor this process reads of the models from now on."""
    seen, piece = [], deltas.Deltas.piece

    def watched(self, name, start, stop):
        seen.extend([(start, stop)] if name == "embed.table" else [])
        return piece(self, name, start, stop)
    deltas.Deltas.piece = watched
    return seen


def main(folder, out, methods, where=""):
    folder, out = pathlib.Path(folder), pathlib.Path(out)
    if where:
        sharding.start(where, timeout=30)
    layout, seen = sharding.layout(data=jax.local_device_count()), watched_reads()
    for method in methods.split(","):
        data = needed(method)
        places = {"many": sharding.on(layout)} | ({} if where else {"one": contextlib.nullcontext()})
        for name, place in places.items():
            with place:
                disk.merge_checkpoints(folder / "base", [folder / task for task in TASKS], out / name / method, method,
                                       data=data, say=lambda line: None, progress=False)
    print(f"process {jax.process_index()}, embed.table: {min(seen)[0]}:{max(last for _, last in seen)}", flush=True)
    sharding.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
