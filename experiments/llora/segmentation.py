"""Two tasks of dense prediction merged by simple averaging: LoRA against L-LoRA, mean IoU, over seeds.

    python experiments/llora/segmentation.py [--steps 60] [--seeds 3]

The glyph CLIP's patch tokens under a linear head of pixels, which is fitted by ridge regression to the pretrained
tokens of the training scenes of a task and then frozen; adapters on queries, values and the MLP are trained by
pixel-wise cross-entropy. The averaged adapters are judged on both tasks, each under its own head. Mirrors the authors'
SAM experiment on VOC and NYU (rank 32, batch 4), where LoRA kept 43 and 47 %, L-LoRA 99 and 78 % of the single models.
"""
import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import adapters, results, training, vectors
from tvjax.data import glyph_scenes, glyphs
from tvjax.evaluation import dense
from tvjax.models import clip

PATCH, LR = 8, 2e-3
METHOD = adapters.Lora(rank=16, alpha=32, targets=r"q_proj|v_proj|fc1|fc2")
COUNTS = {"train": 400, "test": 200}


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--steps", type=int, default=60)
    cli.add_argument("--seeds", type=int, default=3)
    args = cli.parse_args()
    found = clip.from_pretrained(glyphs.pretrained_dir())
    encode, theta0 = encoder(found.model), clip.visual(found.params)
    sites = adapters.find(encode, theta0, np.zeros((1, 32, 32, 3), np.uint8))
    scenes = {task: {split: glyph_scenes.load(task, split, count=n) for split, n in COUNTS.items()}
              for task in glyph_scenes.TASKS}
    heads = {task: head(encode, theta0, one["train"], glyph_scenes.classes(task)) for task, one in scenes.items()}
    kept: dict = {}
    for seed in range(args.seeds):
        for name, f in families(encode, theta0, adapters.start(METHOD, sites, seed=42 + seed)).items():
            for metric, values in run(*f, scenes, heads, args.steps, seed).items():
                for task, value in values.items():
                    kept.setdefault((name, metric, task), []).append(value)
    for (name, metric, task), values in kept.items():
        mean, spread = results.mean_std(values)
        print(f"{name:8} {metric:10} {task:18} {100 * mean:5.1f} ± {100 * spread:.1f}")


@functools.cache
def encoder(model):
    features = clip.image_features(model)
    pixels = lambda params, images: features(params, images.astype(jnp.float32) / 127.5 - 1)
    return dense.tokens(pixels, "vision_model.encoder", skip=1)


def families(encode, theta0, phi0):
    """{way: (tokens(phi, images), φ0)}"""
    plain = lambda phi, frozen, x: adapters.adapted(encode, METHOD)(frozen[0], phi, x)
    linear = lambda phi, frozen, x: adapters.linearised(encode, METHOD)(frozen[0], frozen[1], phi, x)
    return {"LoRA": (plain, phi0, (theta0, phi0)), "L-LoRA": (linear, phi0, (theta0, phi0))}


def head(encode, theta0, scenes, classes):
    """The head of pixels on pretrained tokens."""
    return dense.ridge_head(jax.jit(encode)(theta0, scenes.images), scenes.labels, classes=classes, patch=PATCH)


def run(tokens, phi0, frozen, scenes, heads, steps, seed):
    """{metric: {task: mean IoU}} of the pretrained, the single and the averaged models."""
    recipe = training.Recipe(steps=steps, batch=16, lr=LR, warmup=5, weight_decay=0.0, seed=seed)

    def loss(phi, batch, key, still):
        logits = dense.unfold(tokens(phi, still[:2], batch[0]), still[2], patch=PATCH)
        return training.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[1].reshape(-1))
    predict = jax.jit(lambda phi, still, x: dense.unfold(tokens(phi, still[:2], x), still[2], patch=PATCH).argmax(-1))
    judge = lambda phi, task: dense.mean_iou(dense.confusion(
        predict(phi, (*frozen, heads[task]), scenes[task]["test"].images), scenes[task]["test"].labels,
        classes=glyph_scenes.classes(task)))
    feed = lambda task: functools.partial(training.batches, tuple(scenes[task]["train"]), batch=16, seed=seed)
    tuned = {task: training.fit(loss, phi0, feed(task), recipe, frozen=(*frozen, heads[task]), progress=False).params
             for task in scenes}
    taus = [vectors.task_vector(phi, phi0) for phi in tuned.values()]
    merged = vectors.add(phi0, sum(taus), scale=1 / len(taus))
    single = {task: judge(phi, task) for task, phi in tuned.items()}
    fused = {task: judge(merged, task) for task in scenes}
    return {"pretrained": {task: judge(phi0, task) for task in scenes}, "single": single, "average": fused,
            "kept": {task: fused[task] / single[task] for task in scenes}}


if __name__ == "__main__":
    main()
