"""One fine-tuning step of a CLIP vision tower: ours (Flax, jit) against PyTorch (transformers' CLIPModel), same size,
batch and optimizer, on the CPU, or on a GPU where JAX and torch both have one.

    python experiments/bench/finetune.py [--model DIR] [--batch 128] [--rounds 7]

Both take AdamW steps with global-norm clipping on the same images with a frozen head. Rounds alternate between the
two, so that other load on the machine hits both alike; the figure is the median over rounds. Needs torch (pip install
'.[parity]').
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from tvjax.data import glyphs
from tvjax.models import clip
from tvjax.training import Recipe, cross_entropy, optimizer

STEPS = 5


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--model", default=str(glyphs.pretrained_dir()))
    cli.add_argument("--batch", type=int, default=128)
    cli.add_argument("--rounds", type=int, default=7)
    args = cli.parse_args()
    pretrained = clip.from_pretrained(args.model)
    rng = np.random.default_rng(0)
    size, width = pretrained.config.vision_config.image_size, pretrained.config.projection_dim
    pixels = rng.standard_normal((args.batch, size, size, 3), np.float32)
    labels, head = rng.integers(0, 30, args.batch), rng.standard_normal((width, 30), np.float32)
    ours, theirs = flax_steps(pretrained, pixels, labels, head), torch_steps(args.model, pixels, labels, head)
    print(f"first losses: tvjax {ours():.5f}, torch {theirs():.5f}")
    times = {"tvjax": [], "torch": []}
    for _ in range(args.rounds):
        for name, run in (("tvjax", ours), ("torch", theirs)):
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) / STEPS)
    ms = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    spread = {name: f"{1e3 * min(values):.1f}–{1e3 * max(values):.1f}" for name, values in times.items()}
    for name in ms:
        print(f"{name}: {ms[name]:.1f} ms a step (median of {args.rounds} rounds of {STEPS} steps; {spread[name]})")
    print(f"torch / tvjax = {ms['torch'] / ms['tvjax']:.2f}")


def flax_steps(pretrained, pixels, labels, head):
    """A function that takes a few steps and returns the first of their losses."""
    encode = clip.image_features(pretrained.model)
    transform = optimizer(Recipe(steps=1000, batch=len(pixels), lr=1e-5, warmup=1))

    def loss(params, pixels, labels, head):
        features = encode(params, pixels)
        return cross_entropy(features / jnp.linalg.norm(features, axis=-1, keepdims=True) @ head, labels)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, *batch):
        value, gradient = jax.value_and_grad(loss)(params, *batch)
        updates, state = transform.update(gradient, state, params)
        return jax.tree.map(jnp.add, params, updates), state, value

    params = jax.tree.map(jnp.array, clip.visual(pretrained.params))
    held = [params, transform.init(params)]
    batch = jax.device_put((pixels, labels.astype(np.int32), head))

    def run():
        values = []
        for _ in range(STEPS):
            held[0], held[1], value = step(*held, *batch)
            values.append(value)
        return float(jnp.stack(values)[0])

    return run


def torch_steps(path, pixels, labels, head):
    import torch
    from transformers import CLIPVisionModelWithProjection

    where = "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"
    print(f"tvjax on {jax.default_backend()}, torch on {where}")
    model = CLIPVisionModelWithProjection.from_pretrained(path).train().to(where)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1)
    x, y = torch.tensor(pixels).permute(0, 3, 1, 2).contiguous().to(where), torch.tensor(labels).to(where)
    w = torch.tensor(head).to(where)

    def run():
        values = []
        for _ in range(STEPS):
            features = model(pixel_values=x).image_embeds
            loss = torch.nn.functional.cross_entropy(features / features.norm(dim=-1, keepdim=True) @ w, y)
            adamw.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adamw.step()
            values.append(loss.detach())
        return float(values[0])

    return run


if __name__ == "__main__":
    main()
