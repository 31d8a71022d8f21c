"""What the store and switching cost, on task vectors of random numbers: seconds, peak memory, bytes.

    python experiments/tall/measure_store.py --folder=/some/large/disk [--entries=87849216] [--tasks=8]

Prints one JSON object. Reading the inputs once, from the same files, is the yardstick of building.
"""
import argparse
import json
import pathlib
import resource
import time

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import checkpoints
from tvjax.compression import building, layout, store, switch

LEAF = (3072, 768)


def make(folder: pathlib.Path, entries: int, tasks: int) -> dict[str, pathlib.Path]:
    """A base and its fine-tuned models as files, of leaves of a ViT's size; those that are there are kept."""
    count = max(1, entries // (LEAF[0] * LEAF[1]))
    base, models = folder / "base", {f"task{t}": folder / f"task{t}" for t in range(tasks)}
    if all(path.exists() for path in (base, *models.values())):
        return {"base": base, **models}
    draws = np.random.default_rng(0)
    theta0 = {"layers": {str(i): {"weight": draws.normal(size=LEAF).astype(np.float32)} for i in range(count)}}
    if not base.exists():
        checkpoints.save(theta0, base)
    for path in models.values():
        if not path.exists():
            moved = jax.tree.map(lambda x: x + np.float32(0.01) * draws.normal(size=x.shape).astype(np.float32), theta0)
            checkpoints.save(moved, path)
    return {"base": base, **models}


def timed(work) -> tuple[float, object]:
    begun = time.perf_counter()
    result = work()
    return time.perf_counter() - begun, result


def read_all(files) -> None:
    for path in files.values():
        opened = building.open_checkpoint(path)
        for name, info in opened.tensors.items():
            for start, stop in layout.pieces(info.size):
                opened.read(name, start, stop)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--entries", type=int, default=87_849_216)
    parser.add_argument("--tasks", type=int, default=8)
    args = parser.parse_args()
    files = make(args.folder, args.entries, args.tasks)
    models = {name: path for name, path in files.items() if name != "base"}
    out = {"entries": args.entries, "tasks": args.tasks, "device": str(jax.devices()[0].device_kind)}
    out["read_seconds"], _ = timed(lambda: read_all(files))
    opened, source = building.sources_of(files["base"], models)
    place = args.folder / f"store-{time.time_ns()}"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out["build_seconds"], _ = timed(lambda: building.build(place, opened, source, tasks=tuple(models)))
    out["build_peak_mib"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 1024
    out["before_peak_mib"] = before / 1024
    sizes = store.sizes_of(store.open_store(place))
    out |= {name: sizes[name] for name in ("formula", "measured", "checkpoints")}
    out["load_seconds"], _ = timed(lambda: store.load(place, "task1"))
    out["checkpoint_seconds"], _ = timed(lambda: jax.device_put(checkpoints.load(files["task1"]).params))
    out |= switching(place)
    print(json.dumps(out, indent=1))


def switching(place) -> dict:
    """Seconds of a switch on the device, and examples a second of single-task and mixed batches of a small forward."""
    parts = store.load_switch(store.open_store(place))
    tasks = parts["masks"]["layers"]["0"]["weight"].packed.shape[0]
    change = jax.jit(switch.params_for)
    give = lambda task: jax.block_until_ready(change(parts["theta0"], parts["tau"], parts["masks"], task))
    give(0)
    seconds = min(timed(lambda t=t: give(t))[0] for t in range(tasks))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, LEAF[1])), jnp.float32)

    def apply(params, x):
        return sum(jnp.tanh(x @ layer["weight"].T).sum(-1) for layer in params["layers"].values())
    mixed = jax.jit(lambda parts, t, x: switch.mixed(apply, parts["theta0"], parts["tau"], parts["masks"], t, x))
    single = switch.switched(apply)
    numbers = jnp.arange(64) % tasks
    done = jax.block_until_ready
    runs = {"mixed": lambda: done(mixed(parts, numbers, x)),
            "single": lambda: done(single(parts["theta0"], parts["tau"], parts["masks"], 0, x))}
    found = {}
    for name, work in runs.items():
        work()
        found[f"{name}_examples_per_second"] = 64 / min(timed(work)[0] for _ in range(3))
    return {"switch_seconds": seconds, **found, **switch.device_bytes(parts["theta0"], parts["tau"], parts["masks"])}


if __name__ == "__main__":
    main()
