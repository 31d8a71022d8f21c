"""TATR at the size of CLIP ViT-B/32: exemplar gradients of all tasks, then the region and the merge behind it.

    python experiments/bench/trust.py [--tasks 8] [--exemplars 16] [--budget 1.5]

Random weights, task vectors, images and labels. Gradients are true per-example ones, mean of |∇ℓ|; --budget is the GB
of them held at once. Memory is the process's peak above what it was after its imports.
"""
import argparse
import os
import resource
import time

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import evaluation, merging
from tvjax.calibration.exemplars import Exemplars, exemplar_gradients
from tvjax.models import clip

CLASSES = 20


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--tasks", type=int, default=8)
    cli.add_argument("--exemplars", type=int, default=16)
    cli.add_argument("--budget", type=float, default=1.5)
    args = cli.parse_args()
    before = peak()
    spec = clip.Spec(vision=clip.VisionSpec(768, 3072, 12, 12, image_size=224, patch=32), text=None, projection_dim=512)
    model = clip.CLIP(spec)
    rng = np.random.default_rng(0)
    draw = lambda *shape: 0.02 * rng.standard_normal(shape, np.float32)
    shapes = jax.eval_shape(lambda key: clip.init(model, key), jax.random.key(0))
    theta0 = jax.tree.map(lambda x: draw(*x.shape), shapes)
    some = {str(t): Exemplars(jnp.asarray(draw(512, CLASSES)), draw(args.exemplars, 224, 224, 3),
                              rng.integers(0, CLASSES, args.exemplars)) for t in range(args.tasks)}
    print(f"{args.tasks} tasks × {args.exemplars} exemplars, load {os.getloadavg()[0]:.1f}")
    predict = evaluation.classify(clip.image_features(model))
    begun = time.perf_counter()
    gradients = exemplar_gradients(predict, theta0, some, budget=int(args.budget * 1e9))
    print(f"gradients: {time.perf_counter() - begun:.1f} s with compiling, peak {peak() - before:.2f} GB, of which the "
          f"result {sum(x.nbytes for x in jax.tree.leaves(gradients)) / 1e9:.2f} GB", flush=True)
    taus = [jax.tree.map(lambda x: draw(*x.shape), shapes) for _ in range(args.tasks)]
    for name, operator, data in (("task arithmetic", merging.task_arithmetic(), {}),
                                 ("TATR", merging.tatr(), {"gradients": gradients}),
                                 ("zero-shot TATR", merging.tatr_zero_shot(), {})):
        for _ in range(2):
            begun = time.perf_counter()
            operator(taus, **data)
            seconds = time.perf_counter() - begun
        print(f"{name}: {seconds:.1f} s", flush=True)


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    main()
