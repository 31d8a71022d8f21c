"""Several devices: what the sharded path costs beside the plain one, what devices send each other, and a GPU's speed.

    python experiments/bench/devices.py             # what the machine has: forced CPU devices, and its GPUs
    python experiments/bench/devices.py overhead [--rounds 5] [--only ties]
    python experiments/bench/devices.py collectives
    python experiments/bench/devices.py gpu [--million 400] [--tasks 4]

overhead: 1, 2, 4 and 8 devices forced out of one CPU, each in a process of its own, at equal work: a step of
fine-tuning the built-in CLIP, an accuracy, a merge through the streaming engine, a merge of leaves spread over the
mesh. The ratio is to the plain path in the same process, rounds alternating, medians. Forced devices share the cores:
no speed-up is to be had, only the cost to be seen.
collectives: bytes by kind of a merge of a 12-layer transformer spread over 8 devices, from the compiled program.
gpu: GB/s of element-wise merges that read T task vectors and write one, beside a device-to-device copy of as many
bytes; then `finetune.py` and `talos.py calibration` against torch, where torch has the GPU too.
"""
import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

COUNTS = (1, 2, 4, 8)
METHODS = ("task_arithmetic", "average", "ties", "consensus", "dare", "breadcrumbs", "emr", "magmax", "metagpt",
           "model_stock", "sce", "iso_c", "tsv_m", "wudi")
ON_GPU = ("task_arithmetic", "average", "ties", "consensus", "emr", "magmax", "dare")


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("what", nargs="?", default="all", choices=("all", "overhead", "collectives", "gpu", "one"))
    cli.add_argument("--rounds", type=int, default=5)
    cli.add_argument("--only", default="", help="of the overheads those whose name holds this")
    cli.add_argument("--million", type=float, default=400, help="millions of entries of a task vector on the GPU")
    cli.add_argument("--tasks", type=int, default=4)
    args = cli.parse_args()
    if args.what in ("all", "overhead"):
        for count in COUNTS:
            again("one", count, f"--rounds={args.rounds}", f"--only={args.only}")
    if args.what == "all":
        again("collectives", 8)
    if args.what == "all" and has_gpu():
        subprocess.run([sys.executable, __file__, "gpu"], check=True)
    if args.what == "collectives" and "xla_force_host_platform" not in os.environ.get("XLA_FLAGS", ""):
        again("collectives", 8)
    elif args.what in ("one", "collectives", "gpu"):
        {"one": overhead, "collectives": collectives, "gpu": gpu}[args.what](args)


def again(what, count, *more):
    """This program in a process with so many devices."""
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, __file__, what, *more], env={**os.environ, **flags}, check=True)


def has_gpu():
    found = subprocess.run([sys.executable, "-c", "import jax; print(jax.default_backend())"], capture_output=True,
                           text=True)
    return found.stdout.strip() == "gpu"


# ---------------------------------------------------------------- overhead
def overhead(args):
    import jax
    for name, (plain, shared) in works(args.only).items():
        plain(), shared()  # compiled
        times = {plain: [], shared: []}
        for _ in range(args.rounds):
            for run in times:
                begun = time.perf_counter()
                run()
                times[run].append(time.perf_counter() - begun)
        seconds = [statistics.median(found) for found in times.values()]
        print(json.dumps({"devices": jax.device_count(), "work": name, "plain ms": round(1e3 * seconds[0], 1),
                          "shared ms": round(1e3 * seconds[1], 1), "ratio": round(seconds[1] / seconds[0], 3),
                          "load": round(os.getloadavg()[0], 1)}), flush=True)


def works(only):
    """{name: (plain, shared)} of the works whose names hold `only`."""
    networks = {"fine-tuning step": training_work, "accuracy": accuracy_work}
    return {**{name: make() for name, make in networks.items() if only in name},
            **{name: work for name, work in merging_works().items() if only in name}}


def layout():
    """The layout of all devices; of one device a mesh too, which the command would do without."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from tvjax import sharding
    return sharding.Layout(Mesh(np.array(jax.devices()).reshape(-1, 1), ("data", "model")))


def tower():
    import jax
    import numpy as np

    from tvjax import evaluation
    from tvjax.data import glyphs
    from tvjax.models import clip
    found = clip.from_pretrained(str(glyphs.pretrained_dir()))
    size, width = found.config.vision_config.image_size, found.config.projection_dim
    rng = np.random.default_rng(0)
    images = rng.standard_normal((256, size, size, 3), np.float32)
    labels, head = rng.integers(0, 30, 256).astype(np.int32), rng.standard_normal((width, 30), np.float32)
    params = {name: x for name, x in found.params.items() if name.startswith("vis")}
    return evaluation.classify(clip.image_features(found.model)), jax.device_get(params), images, labels, head


def training_work():
    import jax

    from tvjax import sharding, training
    predict, params, images, labels, head = tower()
    recipe = training.Recipe(steps=8, batch=64, warmup=1)
    batch = (images[:64], labels[:64])

    def loss(params, batch, key, head):
        return training.cross_entropy(predict(params, head, batch[0]), batch[1])

    def run():
        feed = (batch for _ in range(recipe.steps))
        return training.fit(loss, params, feed, recipe, frozen=jax.numpy.asarray(head), progress=False)
    return run, functools.partial(under, sharding.on, layout(), run)


def under(on, layout_, run):
    with on(layout_):
        return run()


def accuracy_work():
    from tvjax import evaluation, sharding
    predict, params, images, labels, head = tower()
    run = lambda: evaluation.accuracy(predict, params, head, (images, labels), batch=64)
    return run, functools.partial(under, sharding.on, layout(), run)


def merging_works():
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from tvjax import merging
    from tvjax.merging import crew, crewed, engine, sources, streamed, traced
    stack = {f"layers.{i}.weight": np.random.default_rng(i).standard_normal((4, 1024, 1024), np.float32)
             for i in range(8)}
    source, hashes, one = sources.Stacked(stack), engine.task_hashes(None, 4), crew.Crew(tuple(jax.devices()))
    mesh = layout().mesh
    spread = {name: jax.device_put(x, NamedSharding(mesh, P(None, "data"))) for name, x in stack.items()}
    here = jax.device_put(stack, jax.devices()[0])
    program = jax.jit(traced.run)
    works = {}
    for method in ("task_arithmetic", "ties"):
        operator = merging.build(method)
        works[f"{method}, streamed"] = (lambda operator=operator: dict(streamed.run(operator, source, hashes, {})),
                                        lambda operator=operator: crewed.run(operator, source, hashes, {}, one))
        works[f"{method}, in memory"] = (
            lambda operator=operator: jax.block_until_ready(program(operator, here, hashes, {})),
            lambda operator=operator: jax.block_until_ready(program(operator, spread, hashes, {})))
    return works


# ---------------------------------------------------------------- collectives
def collectives(args):
    """Nothing is allocated: the program is compiled from shapes."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from tvjax import merging
    from tvjax.merging import engine, traced
    from tvjax.sharding import collectives as counted
    mesh = layout().mesh
    shapes = {"embed.weight": (30_528, 768)}
    for i in range(12):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in {
            "q.weight": (768, 768), "v.weight": (768, 768), "fc1.weight": (3072, 768), "fc2.weight": (768, 3072),
            "fc1.bias": (3072,), "norm.weight": (768,)}.items()}
    spread = NamedSharding(mesh, P(None, "data"))
    stack = {name: jax.ShapeDtypeStruct((args.tasks, *shape), jnp.float32, sharding=spread)
             for name, shape in shapes.items()}
    entries = sum(x.size for x in stack.values()) // args.tasks
    for method in METHODS:
        program = jax.jit(functools.partial(traced.run, mesh=mesh))
        lowered = program.lower(merging.build(method), stack, engine.task_hashes(None, args.tasks), {})
        compiled = lowered.compile()
        memory = compiled.memory_analysis()
        print(json.dumps({"method": method, "devices": mesh.size, "entries": entries, "tasks": args.tasks,
                          "sent": counted.sent(compiled.as_text()), "arguments": memory.argument_size_in_bytes,
                          "temporary": memory.temp_size_in_bytes}), flush=True)


# ---------------------------------------------------------------- a GPU
def gpu(args):
    import jax
    import jax.numpy as jnp

    from tvjax import merging
    from tvjax.merging import engine, traced
    print(json.dumps({"device": jax.devices()[0].device_kind, "backend": jax.default_backend()}))
    entries = int(args.million * 1e6) // 8 // 1024 * 1024
    draw = jax.jit(lambda key: jax.random.normal(key, (args.tasks, entries // 1024, 1024), jnp.float32))
    stack = {f"layers.{i}.weight": draw(jax.random.key(i)) for i in range(8)}
    total = sum(x.nbytes for x in stack.values())
    moved = total + total // args.tasks  # T vectors read, one written
    copy = jax.jit(lambda xs: jax.tree.map(lambda x: x + 0, xs))
    speed = 2 * total / least(lambda: copy(stack))
    print(json.dumps({"what": "device-to-device copy", "GB/s": round(speed / 1e9, 1)}))
    program, hashes = jax.jit(traced.run), engine.task_hashes(None, args.tasks)
    for method in ON_GPU:
        operator = merging.build(method)
        found = moved / least(lambda operator=operator: program(operator, stack, hashes, {}))
        print(json.dumps({"what": method, "GB/s": round(found / 1e9, 1), "share of the copy": round(found / speed, 3)}),
              flush=True)
    here = pathlib.Path(__file__).parent
    for command in (["finetune.py"], ["talos.py", "calibration", "--examples=128"]):
        subprocess.run([sys.executable, here / command[0], *command[1:]], check=False)


def least(run, rounds=10):
    import jax
    jax.block_until_ready(run())
    found = []
    for _ in range(rounds):
        begun = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - begun)
    return min(found)


if __name__ == "__main__":
    main()
