"""Linearised and low-rank fine-tuning against standard fine-tuning, and sweeps over coefficients, on the CPU or a GPU.

    python experiments/bench/linearised.py steps [--size b32|glyphs] [--batch 8] [--rounds 3]
    python experiments/bench/linearised.py sweeps [--images 125]

`steps`: time and memory of an AdamW step (gradient, clipping, update) of a CLIP vision tower of the size of ViT-B/32 or
of the glyph model, weights at random, for every way of fine-tuning. Ways alternate within a round; the figure is the
least over rounds: on the CPU processor time, which other programs on the machine change less than wall time. Memory is
what the compiled step holds: arguments, results and temporaries as XLA plans them.

`sweeps`: a linearised glyph CLIP at 21 α along one direction, and ξ of two tasks on 21 × 21 points: every point passed
through the network, against slopes computed once. Both give the same answers, which is checked. The map by points takes
minutes.
"""
import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import adapters, evaluation, tangent, vectors
from tvjax.data import glyphs
from tvjax.evaluation import mixtures
from tvjax.models import clip
from tvjax.training import Recipe, cross_entropy, optimizer

SIZES = {"b32": clip.VisionSpec(768, 3072, 12, 12, image_size=224, patch=32),
         "glyphs": clip.VisionSpec(128, 512, 4, 4, image_size=32, patch=8)}
GRID = tuple(i / 20 for i in range(21))


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("what", choices=("steps", "sweeps"))
    cli.add_argument("--size", choices=SIZES, default="b32")
    cli.add_argument("--batch", type=int, default=8)
    cli.add_argument("--rounds", type=int, default=3)
    cli.add_argument("--images", type=int, default=125)
    cli.add_argument("--classes", type=int, default=30)
    args = cli.parse_args()
    steps(args) if args.what == "steps" else sweeps(args)


def now():
    """Seconds: of the processor where the work is done there, else of the clock."""
    return time.process_time() if jax.default_backend() == "cpu" else time.perf_counter()


# ---------------------------------------------------------------- steps
def steps(args):
    spec = SIZES[args.size]
    encode = clip.image_features(clip.CLIP(clip.Spec(spec, None, projection_dim=512)))
    theta0 = clip.init(clip.CLIP(clip.Spec(spec, None, projection_dim=512)), jax.random.key(0))
    rng = np.random.default_rng(0)
    pixels = rng.standard_normal((args.batch, spec.image_size, spec.image_size, 3), np.float32)
    batch = jnp.asarray(pixels), jnp.asarray(rng.integers(0, args.classes, args.batch))
    head = jnp.asarray(rng.standard_normal((512, args.classes), np.float32))
    ready = {name: compiled(*made, batch, head) for name, made in ways(encode, theta0, batch[0]).items()}
    times = {name: [] for name in ready}
    for _ in range(args.rounds):
        for name, (run, *_) in ready.items():
            begun = now()
            run()
            times[name].append(now() - begun)
    print(f"size {args.size}, batch {args.batch}, {jax.devices()[0].device_kind}, least of {args.rounds} rounds")
    base = min(times["standard"]), ready["standard"][1]
    print(f"{'way':28} {'ms a step':>10} {'ratio':>6} {'MB':>7} {'ratio':>6} {'trained':>12}")
    for name, (_, held, trained) in ready.items():
        least = min(times[name])
        print(f"{name:28} {1e3 * least:10.1f} {least / base[0]:6.2f} {held / 1e6:7.0f} {held / base[1]:6.2f} "
              f"{trained:12,}")
    print(f"L-LoRA by module / LoRA: {min(times['L-LoRA by module']) / min(times['LoRA']):.2f}")


def ways(encode, theta0, pixels):
    """{name: (features(trained, frozen, pixels), trained, frozen)}"""
    method = adapters.Lora(rank=16, alpha=32)
    phi0 = adapters.start(method, adapters.find(encode, theta0, pixels[:1]))
    phi = jax.tree.map(lambda x: x + 0.01, phi0)
    step = tangent.difference
    linear = lambda apply: lambda theta, theta0, x: tangent.linearised(apply)(theta0, step(theta, theta0), x)
    around = lambda scope: lambda phi, still, x: adapters.linearised(encode, method, scope)(*still, phi, x)
    return {
        "standard": (lambda theta, _, x: encode(theta, x), theta0, ()),
        "linearised": (linear(encode), theta0, theta0),
        "linearised, remat dots": (linear(tangent.rematerialised(encode, "dots")), theta0, theta0),
        "LoRA": (lambda phi, theta0, x: adapters.adapted(encode, method)(theta0, phi, x), phi, theta0),
        "L-LoRA by module": (around("module"), phi, (theta0, phi0)),
        "L-LoRA by network": (around("network"), phi, (theta0, phi0)),
    }


def compiled(features, trained, frozen, batch, head):
    """(a function that takes one step, bytes that it holds, numbers trained)"""
    transform = optimizer(Recipe(steps=1000, batch=len(batch[1]), lr=1e-5, warmup=1))

    def loss(params, frozen, batch, head):
        found = features(params, frozen, batch[0])
        return cross_entropy(found / jnp.linalg.norm(found, axis=-1, keepdims=True) @ head, batch[1])

    def step(params, state, frozen, batch, head):
        grads = jax.grad(loss)(params, frozen, batch, head)
        updates, state = transform.update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state
    args = trained, transform.init(trained), frozen, batch, head
    program = jax.jit(step).lower(*args).compile()
    plan = program.memory_analysis()
    held = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    run = lambda: jax.block_until_ready(program(*args))
    run()
    return run, held, sum(x.size for x in jax.tree.leaves(trained))


# ---------------------------------------------------------------- sweeps
@functools.cache
def encoder(model):
    features = clip.image_features(model)
    return lambda params, images: features(params, images.astype(jnp.float32) / 127.5 - 1)


def sweeps(args):
    found = clip.from_pretrained(glyphs.pretrained_dir())
    encode, theta0 = encoder(found.model), clip.visual(found.params)
    rng = np.random.default_rng(0)
    small = lambda x: 0.003 * rng.standard_normal(x.shape, np.float32)
    taus = [vectors.TaskVector(jax.tree.map(small, theta0)) for _ in range(2)]
    data = []
    for name in ("greek", "braille"):
        split = glyphs.load(name, "test")
        head = jnp.asarray(rng.standard_normal((128, args.classes), np.float32))
        data.append((head, (split.images[:args.images], split.labels[:args.images] % args.classes)))
    family, predict = mixtures.family(encode, theta0, linear=True), evaluation.classify_linearised(encode)
    line = np.array(GRID)[:, None]
    one = lambda: mixtures.mixture_accuracy(family, taus[:1], line, *data[0], batch=args.images)
    plain = lambda: [x["a"] for x in evaluation.sweep(predict, theta0, taus[0], GRID, {"a": data[0]},
                                                      place=evaluation.paired, batch=args.images)]
    report("21 α along one direction", plain, one, lambda a, b: np.abs(np.array(a) - np.array(b)).max())
    grid = np.linspace(-2, 2, 21)
    images = [(head, inputs) for head, (inputs, _) in data]
    flat = lambda: mixtures.plane(family, *taus, *data, grid, batch=args.images).xi
    pointwise = lambda: evaluation.disentanglement(predict, theta0, *taus, *images, grid, place=evaluation.paired,
                                                   batch=args.images)
    report("ξ on 21 × 21 points", pointwise, flat, lambda a, b: np.abs(a - b).max(), repeat=1)


def report(name, slow, quick, differ, *, repeat=2):
    """Times both after a run of `quick`, and of `slow` where it is short, to compile."""
    quick()
    if repeat > 1:
        slow()
    took, made = zip(*(timed(run, repeat if run is slow else 2) for run in (slow, quick)), strict=True)
    print(f"{name}: by points {took[0]:.2f} s, by slopes {took[1]:.3f} s, {took[0] / took[1]:.1f} times faster; "
          f"largest difference {differ(*made):.2g}", flush=True)


def timed(run, repeat):
    best, made = float("inf"), None
    for _ in range(repeat):
        begun = now()
        made = run()
        best = min(best, now() - begun)
    return best, made


if __name__ == "__main__":
    main()
