"""Calibration by per-example gradients, and a sparse fine-tuning step, at the size of CLIP ViT-B/32's vision tower.

    python experiments/bench/talos.py calibration [--examples 8] [--budget-gib 1.4] [--rounds 2]
    python experiments/bench/talos.py step [--batch 8] [--rounds 3]

calibration: mean_n (∂ log p(ŷ|x_n)/∂θ)² over the same examples, three ways: `calibration.reduced`, a plain loop (one
compiled gradient an example, squares added leaf by leaf), and torch.func's vmap(grad) in chunks of as many examples
(needs torch and transformers). step: AdamW with clipping on all tensors, and on a tenth of the entries, all of them in
the attention's queries and keys. Weights are random: times do not depend on them. Rounds alternate between the ways;
the figures are the least over rounds, of wall and of processor seconds (those of other processes do not count in the
latter).
"""
import argparse
import functools
import resource
import time

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import calibration, evaluation, training, tree
from tvjax.calibration import gradients
from tvjax.models import clip
from tvjax.training import loop

CLASSES = 10


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("what", choices=("calibration", "step"))
    cli.add_argument("--examples", type=int, default=8)
    cli.add_argument("--batch", type=int, default=8)
    cli.add_argument("--budget-gib", type=float, default=1.4)
    cli.add_argument("--rounds", type=int, default=2)
    cli.add_argument("--ways", default="tvjax,loop,torch", help="of calibration, with commas between")
    args = cli.parse_args()
    print(f"{jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}")
    (bench_calibration if args.what == "calibration" else bench_step)(args)


def tower():
    """(model, θ) of ViT-B/32's vision tower, random weights."""
    spec = clip.Spec(clip.VisionSpec(768, 3072, 12, 12, image_size=224, patch=32), text=None, projection_dim=512)
    model = clip.CLIP(spec)
    return model, clip.init(model, jax.random.key(0))


def data(count):
    rng = np.random.default_rng(0)
    return (rng.normal(size=(count, 224, 224, 3)).astype(np.float32), rng.integers(0, CLASSES, count).astype(np.int32),
            0.3 * rng.normal(size=(512, CLASSES)).astype(np.float32))


# ---------------------------------------------------------------- calibration
def bench_calibration(args):
    model, params = tower()
    images, labels, head = data(args.examples)
    chunk = calibration.chunk_size(params, budget=int(args.budget_gib * 2**30))
    predict = evaluation.classify(clip.image_features(model))

    def f(params, example, head):
        image, label = example
        return jax.nn.log_softmax(predict(params, head, image[None])[0])[label]
    makers = {"tvjax": functools.partial(ours, f, params, (images, labels), head, args.budget_gib),
              "loop": functools.partial(plain_loop, f, params, (images, labels), head),
              "torch": functools.partial(torch_way, model, params, images, labels, head, chunk)}
    ways = {name: makers[name]() for name in args.ways.split(",")}
    found = {name: run() for name, run in ways.items()}  # compiles, and gives what must agree
    for name, value in found.items():
        print(f"{name}: mean score of a query weight {value:.6g}")
    print(f"{args.examples} examples, {tree.size(params):,} parameters, budget {args.budget_gib} GiB: {chunk} a chunk")
    report(ways, args.rounds, args.examples, "s an example")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory of the process, all ways together: {peak:.1f} GiB")


def report(ways, rounds, divide, unit):
    """Alternates between the ways and prints the least of wall and processor seconds."""
    wall, cpu = {name: [] for name in ways}, {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            begun, used = time.perf_counter(), time.process_time()
            run()
            cpu[name].append((time.process_time() - used) / divide)
            wall[name].append((time.perf_counter() - begun) / divide)
    first = next(iter(ways))
    for name in ways:
        print(f"{name}: {min(wall[name]):.3f} {unit}, {min(cpu[name]):.3f} processor seconds "
              f"({min(cpu[name]) / min(cpu[first]):.2f} times those of {first}; {rounds} rounds)")


def read(scores):
    return float(scores["vision_model"]["encoder"]["layers"]["0"]["self_attn"]["q_proj"]["weight"].mean())


def ours(f, params, examples, head, budget_gib):
    gradients.GROUPS = 1  # one device: no groups to share
    return lambda: read(jax.block_until_ready(gradients.reduced(
        f, params, examples, head, reduce="mean_square", budget=int(budget_gib * 2**30))))


def plain_loop(f, params, examples, head):
    gradient = jax.jit(jax.grad(f))
    images, labels = examples

    def run():
        total = jax.tree.map(jnp.zeros_like, params)
        for image, label in zip(images, labels, strict=True):
            total = jax.tree.map(lambda t, g: t + g * g, total, gradient(params, (image, label), head))
        return read(jax.block_until_ready(jax.tree.map(lambda t: t / len(labels), total)))
    return run


def torch_way(model, params, images, labels, head, chunk):
    """torch.func.vmap(grad) over transformers' vision tower, as many examples at once."""
    import torch
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection
    config = CLIPVisionConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
                              image_size=224, patch_size=32, projection_dim=512)
    config._attn_implementation = "eager"
    where = "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"
    module = CLIPVisionModelWithProjection(config).eval().to(where)
    held = {name: torch.tensor(np.asarray(x)) for name, x in tree.flatten(params).items()}
    module.load_state_dict({**module.state_dict(), **held})
    weights = {name: x.detach() for name, x in module.named_parameters()}
    pixels = torch.tensor(images.transpose(0, 3, 1, 2).copy()).to(where)
    answers, head = torch.tensor(labels.astype(np.int64)).to(where), torch.tensor(head).to(where)

    def f(weights, image, label):
        features = torch.func.functional_call(module, weights, (image[None],)).image_embeds[0]
        return torch.log_softmax(features / features.norm() @ head, -1).gather(0, label[None])[0]  # vmap cannot index
    gradient = torch.func.vmap(torch.func.grad(f), (None, 0, 0))

    def run():
        total = {name: torch.zeros_like(x) for name, x in weights.items()}
        for start in range(0, len(labels), chunk):
            found = gradient(weights, pixels[start:start + chunk], answers[start:start + chunk])
            for name, g in found.items():
                total[name] += g.square().sum(0)
        return float(total["vision_model.encoder.layers.0.self_attn.q_proj.weight"].mean() / len(labels))
    return run


# ---------------------------------------------------------------- step
def bench_step(args):
    model, params = tower()
    images, labels, head = data(args.batch)
    predict = evaluation.classify(clip.image_features(model))
    recipe = training.Recipe(steps=1000, batch=args.batch, warmup=1)
    flat = tree.flatten(params)
    names = [name for name in flat if ".q_proj." in name or ".k_proj." in name]
    share = 0.1 * tree.size(params) / sum(flat[name].size for name in names)
    mask = calibration.at_random(tree.partition(params, names)[0], density=share)

    def loss(params, batch, key, head):
        return training.cross_entropy(predict(params, head, batch[0]), batch[1])
    whole = stepper(loss, params, (images, labels), head, training.optimizer(recipe), recipe)
    trained, still = tree.partition(params, names)
    partly = lambda part, batch, key, frozen: loss(tree.union(part, frozen[0]), batch, key, frozen[1])
    sparse = stepper(partly, trained, (images, labels), (still, head), training.masked_adamw(recipe, mask), recipe)
    print(f"batch {args.batch}; {calibration.count(mask) / tree.size(params):.1%} of the entries may move")
    report({"full": whole, "sparse": sparse}, args.rounds, 1, "s a step")
    full, part = (sum(training.training_bytes(params, m).values()) for m in (None, mask))
    print(f"parameters, gradients, optimizer state, mask: full {full / 2**20:.0f} MiB, sparse {part / 2**20:.0f} MiB "
          f"({part / full:.2f})")
    kept = [training.held_bytes(f, p, (images, labels), None, more) for f, p, more in (
        (loss, params, head), (partly, trained, (still, head)))]
    print(f"kept for the backward pass: full {kept[0] / 2**20:.0f} MiB, sparse {kept[1] / 2**20:.0f} MiB")


def stepper(loss, params, batch, frozen, transform, recipe):
    """A function that takes one step, the compiled one of `training.fit`."""
    held = [loop._start(params, transform, recipe)]
    key = jax.random.key(0)
    frozen = jax.tree.map(jnp.asarray, frozen)

    def run():
        held[0], _ = loop._advance(held[0], batch, frozen, key, loss=loss, update=transform.update, parts=1)
        jax.block_until_ready(held[0])
    run()
    return run


if __name__ == "__main__":
    main()
