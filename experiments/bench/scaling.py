"""What merges at the scale of the internet would take, on paper and on abstract shapes; nothing is allocated.

    python experiments/bench/scaling.py paper                       # bytes, flops, passes, what is sent, memory, time
    python experiments/bench/scaling.py shapes [--devices 64]       # memory a device of compiled programs
    python experiments/bench/scaling.py paper --hosts 64 --disk 2 --network 10 --stream 20   # another machine's GB/s

Constants that the paper plan takes are those measured on two CPU cores (`README.md` beside this file): GB/s at which a
host streams a merge from disk to disk, flop/s of its decompositions. Give those of another machine to plan for it.
shapes: programs of one block of a model with all its task vectors, spread over so many abstract CPU devices and
compiled ahead of time; XLA tells each device's memory.
"""
import argparse
import functools
import json
import math
import os
import subprocess
import sys

# GB/s of a pass: exact TIES of eight ViT-B/32 reads 3 times 3.15 GB and writes 0.35 GB in 10.2 s, 0.9 s of them the
# start (task arithmetic, one pass in 3.7 s: 1.25)
STREAM = 1.05
DECOMPOSITION = 127e9  # flop/s by the count of `decompositions`: TSV-M of eight ViT-B/32 in 72.1 s
METHODS = ("task_arithmetic", "ties", "consensus", "metagpt", "model_stock", "tsv_m")


def block(width: int, keys: int, inner: int) -> dict[str, tuple[int, ...]]:
    """A block of a Llama: its width, that of keys and values, that of the MLP."""
    return {"self_attn.q_proj.weight": (width, width), "self_attn.k_proj.weight": (keys, width),
            "self_attn.v_proj.weight": (keys, width), "self_attn.o_proj.weight": (width, width),
            "mlp.gate_proj.weight": (inner, width), "mlp.up_proj.weight": (inner, width),
            "mlp.down_proj.weight": (width, inner), "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,)}


block70b, block1b = functools.partial(block, 8192, 1024, 28_672), functools.partial(block, 2048, 512, 8192)


def layers(one: dict[str, tuple[int, ...]], count: int) -> dict[str, tuple[int, ...]]:
    return {f"model.layers.{i}.{name}": shape for i in range(count) for name, shape in one.items()}


def llama70b() -> dict[str, tuple[int, ...]]:
    return {"model.embed_tokens.weight": (32_000, 8192), "lm_head.weight": (32_000, 8192),
            "model.norm.weight": (8192,)} | layers(block70b(), 80)


def llama1b() -> dict[str, tuple[int, ...]]:
    return {"model.embed_tokens.weight": (128_256, 2048), "model.norm.weight": (2048,)} | layers(block1b(), 16)


CASES = {"70B x 10 experts": (llama70b, block70b, 10), "1B x 10,000 vectors": (llama1b, block1b, 10_000)}


# ---------------------------------------------------------------- on paper
def paper(args):
    from tvjax.merging import crewed, pieces
    for case, (shapes, _, tasks) in CASES.items():
        shapes = shapes()
        entries = sum(map(math.prod, shapes.values()))
        read, written = 2 * entries * (tasks + 1), 2 * entries  # bfloat16
        size = pieces.sizes(tasks)[-1]
        print(f"\n{case}: {entries / 1e9:.2f}e9 entries, {read / 1e12:.2f} TB in, {written / 1e9:.0f} GB out; "
              f"a piece of {size:,} entries of all tasks takes {4 * size * (tasks + 3) / 1e6:,.0f} MB, the counts of a "
              f"digit {8 * tasks * 2**crewed.DIGIT / 1e3:,.0f} kB")
        for method in METHODS:
            print(row(args, method, shapes, tasks, read, written))


def fullest(operator, shapes, tasks, hosts) -> float:
    """How many times its fair share of entries the fullest host has: tensors are cut where the operator allows it."""
    import numpy as np

    from tvjax.disk import planning, sharing, writers
    from tvjax.disk.readers import TensorInfo
    from tvjax.merging import plan
    infos = {name: TensorInfo(shape, np.dtype(np.float16)) for name, shape in shapes.items()}
    most = sharing.most_bytes(1 << 62, sum(info.nbytes for info in infos.values()), hosts)
    alone = {name: infos[name].size for name, leaf in plan.leaves(shapes).items() if planning.chunked(operator, leaf)}
    owner, cuts = sharing.shares(writers.shards(infos, most), alone, hosts, tasks)
    load = [0] * hosts
    for name, info in infos.items():
        ends = cuts.get(name, ())
        for host in range(hosts):
            load[host] += ends[host + 1] - ends[host] if ends else info.size * (owner[name] == host)
    return max(load) * hosts / sum(load)


def row(args, method, shapes, tasks, read, written):
    from tvjax import merging
    passes, sent = statistics(method, shapes, tasks)
    uneven = fullest(merging.build(method), shapes, tasks, args.hosts)
    flops = decompositions(shapes, tasks) if method == "tsv_m" else 0
    bytes_ = read * passes + written
    seconds = {"disk": bytes_ * uneven / (args.disk * 1e9 * args.hosts),
               "streaming": bytes_ * uneven / (args.stream * 1e9 * args.hosts),
               "decompositions": flops * uneven / (args.flops * args.hosts),
               "network": sent * args.hosts / (args.network * 1e9)}
    worst = max(seconds, key=seconds.get)
    return (f"  {method:16s} {passes} passes, {bytes_ / 1e12:7.2f} TB moved, {flops:.1e} flop, sent by each "
            f"{sent / 1e3:,.0f} kB, {uneven:.2f} of the mean by the fullest: {max(seconds.values()) / 3600:,.2f} h; "
            f"bottleneck {worst} ({', '.join(f'{name} {s / 3600:.3g} h' for name, s in seconds.items())})")


def statistics(method, shapes, tasks) -> tuple[int, int]:
    """(passes over the inputs, bytes of statistics that each host sends) of a shared merge, from what it declares."""
    import jax
    import numpy as np

    from tvjax import merging
    from tvjax.merging import crewed, plan
    from tvjax.merging.statistics import Kth, Sum
    passes, sent, leaves = 1, 0, plan.leaves(shapes)
    digits = math.ceil(32 / crewed.DIGIT)  # a k-th largest reads once for each digit, and counts each digit's values
    for stage in merging.build(method).stages:
        for stat in stage.stats:
            here = [leaf for leaf in leaves.values() if stage.holds(leaf.name, leaf.shape)]
            passes += digits if isinstance(stat, Kth) else 1
            size = tasks * (digits * 2**crewed.DIGIT if isinstance(stat, Kth) else 1)
            if isinstance(stat, Sum):
                part = jax.eval_shape(stat.f, jax.ShapeDtypeStruct((tasks, 8), np.float32))
                size = sum(x.size for x in jax.tree.leaves(part))
            sent += 8 * size * len(plan.groups(stat.scope, here))
    return passes, sent


def decompositions(shapes, tasks) -> float:
    """Flop of TSV-M: an SVD of every task's matrix and two of their stacked factors, about 14·m·n² each (m ≥ n)."""
    matrices = [sorted(shape) for shape in shapes.values() if len(shape) == 2]
    return sum(14 * m * n * n * tasks + 2 * 14 * n**2 * m for n, m in matrices)


# ---------------------------------------------------------------- on shapes
def shapes(args):
    if f"device_count={args.devices}" not in os.environ.get("XLA_FLAGS", ""):
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={args.devices}", "JAX_PLATFORMS": "cpu"}
        subprocess.run([sys.executable, *sys.argv], env={**os.environ, **flags}, check=True)
        return
    for case, (model, block, tasks) in CASES.items():
        if args.case in case:
            compiled(args, case, model(), block(), tasks)


def compiled(args, case, model, block, tasks):
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from tvjax import merging
    from tvjax.merging import engine, traced
    from tvjax.sharding import collectives
    mesh = Mesh(np.array(jax.devices()), ("model",))
    block = {f"model.layers.0.{name}": shape for name, shape in block.items()}
    spread = NamedSharding(mesh, P(None, "model"))
    abstract = lambda shape: jax.ShapeDtypeStruct((tasks, *shape), jnp.bfloat16, sharding=spread)
    stack, hashes = {name: abstract(shape) for name, shape in block.items()}, engine.task_hashes(None, tasks)
    whole = sum(map(math.prod, model.values())) / sum(map(math.prod, block.values()))
    for method in args.methods.split(","):
        operator = merging.build(method)
        program = functools.partial(traced.run, mesh=mesh)
        made = jax.eval_shape(program, operator, stack, hashes, {})
        out = jax.tree.map(lambda x: NamedSharding(mesh, P("model")), made)
        compiled = jax.jit(program, out_shardings=out).lower(operator, stack, hashes, {}).compile()
        memory = compiled.memory_analysis()
        print(json.dumps({"case": case, "method": method, "devices": mesh.size, "bytes of a block on each device": {
            "task vectors": memory.argument_size_in_bytes, "result": memory.output_size_in_bytes,
            "temporary": memory.temp_size_in_bytes}, "GB on each device, block by block":
            round((whole * memory.argument_size_in_bytes + whole * memory.output_size_in_bytes
                   + memory.temp_size_in_bytes) / 1e9, 2), "sent": collectives.sent(compiled.as_text())}), flush=True)


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("what", choices=("paper", "shapes"))
    cli.add_argument("--hosts", type=int, default=64)
    cli.add_argument("--stream", type=float, default=STREAM, help="GB/s that one host merges")
    cli.add_argument("--disk", type=float, default=1.0, help="GB/s that one host reads")
    cli.add_argument("--network", type=float, default=1.0, help="GB/s between hosts")
    cli.add_argument("--flops", type=float, default=DECOMPOSITION, help="flop/s of decompositions of one host")
    cli.add_argument("--devices", type=int, default=64)
    cli.add_argument("--case", default="70B", help="of shapes: the model whose name holds this, 70B or 1B")
    cli.add_argument("--methods", default="task_arithmetic,ties,metagpt,iso_c")
    args = cli.parse_args()
    {"paper": paper, "shapes": shapes}[args.what](args)


if __name__ == "__main__":
    main()
