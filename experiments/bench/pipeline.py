"""Images a second that the input pipeline gives, beside what a training step of CLIP ViT-B/32 takes.

    python experiments/bench/pipeline.py [images]

Writes JPEGs of 500 × 375 pixels into a temporary folder, as a task's train and test folders hold them; times reading,
decoding and cutting them to 224 × 224 (`tvjax.data.images`), drawing batches of 64 from memory (`tvjax.training`), and
one training step of a ViT-B/32 of random weights on 16 images. The minimum of two rounds counts.
"""
import os
import pathlib
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from tvjax import training
from tvjax.data import images
from tvjax.models import clip


def folder(root: pathlib.Path, count: int) -> None:
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (count, 47, 63, 3)).astype(np.uint8)
    for i in range(count):
        place = root / "mnist" / ("test" if i < 10 else "train") / str(i % 10)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(small[i]).resize((500, 375), Image.Resampling.BICUBIC).save(place / f"{i}.jpg", quality=90)


def best(run, rounds: int = 2) -> float:
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return min(times)


def decoding(count: int) -> float:
    with tempfile.TemporaryDirectory() as root:
        folder(pathlib.Path(root), count)
        examples = {"train": count, "val": count, "test": count}
        return count / best(lambda: images.read("mnist", [root], side=224, examples=examples))


def batches(count: int) -> float:
    split = np.zeros((count, 224, 224, 3), np.uint8), np.zeros(count, np.int32)
    return 20 * 64 / best(lambda: list(training.batches(split, batch=64, seed=0, steps=20)))


def step() -> float:
    spec = clip.Spec(clip.VisionSpec(768, 3072, 12, 12), text=None, projection_dim=512)
    model = clip.CLIP(spec)
    params, features = clip.init(model, jax.random.key(0)), clip.image_features(model)
    loss = lambda params, x: jnp.mean(jnp.square(features(params, training.normalise(x, [0.5] * 3, [0.5] * 3))))
    gradient, x = jax.jit(jax.grad(loss)), np.zeros((16, 224, 224, 3), np.uint8)
    jax.block_until_ready(gradient(params, x))
    return 16 / best(lambda: jax.block_until_ready(gradient(params, x)))


if __name__ == "__main__":
    some = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    print(f"decoding and cutting: {decoding(some):.0f} images/s with {os.cpu_count()} threads")
    print(f"batches of 64 from memory: {batches(512):.0f} images/s")
    print(f"a training step of ViT-B/32, gradients alone: {step():.1f} images/s; load {os.getloadavg()[0]:.1f}")
