"""What a step of learned scaling costs beside full fine-tuning of the same model: time, memory, numbers trained.

    python experiments/bench/atlas.py --size=glyphs --batch=64
    python experiments/bench/atlas.py --size=vit_b_32 --batch=4 --vectors 22 --forms bfloat16 LoRA --only-memory

Memory is what the compiled step says it needs (`memory_analysis`): its arguments (weights, optimiser state, pool) and
what it allocates beside them. Time is processor seconds of all threads, the least of several steps: wall seconds say
nothing while other work runs.
"""
import argparse
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tvjax import learning, tree
from tvjax.evaluation import classify
from tvjax.learning import Scheme, heads, ways
from tvjax.merging.lowrank import LowRank
from tvjax.models import clip

SIZES = {
    "glyphs": clip.VisionSpec(128, 512, 4, 4, image_size=32, patch=8),
    "vit_b_32": clip.VisionSpec(768, 3072, 12, 12, image_size=224, patch=32),
}
FORMS = ("float32", "bfloat16", "int8", "LoRA")
PROJECTION, CLASSES, RANK = 512, 100, 16


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="glyphs")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--vectors", type=int, nargs="+", default=[8, 20])
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only-memory", action="store_true")
    given = parser.parse_args()
    print("| what is trained | numbers | held as | MiB held | MiB beside | processor seconds a step |\n"
          "| --- | ---: | --- | ---: | ---: | ---: |")
    for name, form, way in variants(given.size, given.vectors, given.forms):
        report(name, form, way, given)


def variants(size: str, vectors, forms):
    """(name, how the vectors are held, a way on shapes alone)."""
    model = clip.CLIP(clip.Spec(vision=SIZES[size], text=None, projection_dim=PROJECTION))
    theta0 = jax.eval_shape(lambda: clip.init(model, jax.random.key(0)))
    predict = classify(clip.image_features(model))
    yield "full fine-tuning", "–", abstract(lambda: ways.whole(predict, zeros(theta0)))
    for count in vectors:
        for form in forms:
            held = pool(theta0, count, form)
            yield f"aTLAS, {count} vectors", form, abstract(lambda held=held: ways.scaled(
                predict, zeros(theta0), zeros(held), Scheme()))


def pool(theta0, count: int, form: str):
    """The shapes of a pool of so many vectors."""
    flat = {name: x for name, x in tree.flatten(theta0).items()
            if form != "LoRA" or (x.ndim == 2 and ".layers." in name)}
    shape = lambda *dims, dtype: jax.ShapeDtypeStruct(dims, dtype)

    def one(x):
        if form == "LoRA":
            return LowRank(shape(count, x.shape[0], RANK, dtype=jnp.bfloat16),
                           shape(count, RANK, x.shape[1], dtype=jnp.bfloat16))
        if form == "int8":
            rows = (x.shape[0], *(1,) * (x.ndim - 1)) if x.ndim > 1 else (1,)
            return learning.Int8(shape(count, *x.shape, dtype=jnp.int8), shape(count, *rows, dtype=jnp.float32))
        return shape(count, *x.shape, dtype=jnp.dtype(form))
    return {name: one(x) for name, x in flat.items()}


def zeros(shapes):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def abstract(make):
    """A way whose arrays are shapes: nothing is allocated until it is timed."""
    kept = {}

    def arrays():
        way = make()
        kept["functions"] = way.point, way.predict
        return way.start, way.frozen
    start, frozen = jax.eval_shape(arrays)
    return ways.Way(start, frozen, *kept["functions"])


def report(name: str, form: str, way, given):
    transform = optax.adamw(1e-3)
    loss = heads.weighted(way.point, way.predict)
    side = SIZES[given.size].image_size
    batch = (jax.ShapeDtypeStruct((given.batch, side, side, 3), jnp.float32),
             jax.ShapeDtypeStruct((given.batch,), jnp.int32), jax.ShapeDtypeStruct((given.batch,), jnp.int32))
    extras = jax.eval_shape(lambda: (jnp.zeros((PROJECTION, CLASSES)), jnp.zeros(CLASSES, jnp.int32), jnp.ones(1)))

    def step(params, state, batch, frozen):
        slopes = jax.grad(loss)(params, batch, None, frozen)
        updates, state = transform.update(slopes, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(transform.init, way.start)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(way.start, state, batch, (way.frozen, extras)).compile()
    memory = compiled.memory_analysis()
    seconds = "–" if given.only_memory else f"{timed(compiled, way, state, batch, extras, given.steps):.3f}"
    mib = lambda x: f"{x / 2**20:,.0f}"
    print(f"| {name} | {learning.count(way.start):,} | {form} | {mib(memory.argument_size_in_bytes)} | "
          f"{mib(memory.temp_size_in_bytes)} | {seconds} |", flush=True)


def timed(compiled, way, state, batch, extras, steps: int) -> float:
    """Processor seconds of the cheapest of several steps."""
    params, state, batch, frozen = map(zeros, (way.start, state, batch, (way.frozen, extras)))
    least = np.inf
    for _ in range(steps + 1):
        begun = time.process_time()
        params, state = jax.block_until_ready(compiled(params, state, batch, frozen))
        least = min(least, time.process_time() - begun)
    return least


if __name__ == "__main__":
    with jax.numpy_dtype_promotion("standard"):
        main()
    print(json.dumps({"jax": jax.__version__, "device": jax.devices()[0].device_kind}))
