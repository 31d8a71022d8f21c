"""Tasks of different kinds on one encoder, with and without a trust region: classes, pixels and words, over seeds.

    python experiments/tatr/heterogeneous.py [--steps 120] [--seeds 3] [--train 2000] [--test 400]

The glyph CLIP's image tower is fine-tuned on two scripts to classify (frozen heads of class names), on scenes to tell
the class of every pixel, and on images of words of four letters to say which word they spell (heads fitted by ridge
regression to pretrained features, then frozen). The task vectors are merged by task arithmetic and TIES, alone, behind
TATR's region (gradients of 16 labelled exemplars of each task's own loss) and behind the zero-shot region; α is chosen
on validation data by the mean over tasks of the metric over that of the model tuned on the task alone. The metric is
accuracy, or mean IoU for pixels. A task is one predict function, one loss and one metric: the merge sees none of them.
"""
import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import calibration, evaluation, merging, results, training, vectors
from tvjax.data import glyph_scenes, glyphs
from tvjax.evaluation import dense
from tvjax.experiment import glyph_suite
from tvjax.models import clip

PATCH, EXEMPLARS, QUANTILE = 8, 16, 0.99
SCALES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
BASES = {"task arithmetic": merging.total(), "TIES": merging.ties(density=0.2)}
REGIONS = {"alone": merging.identity(), "TATR": merging.trust_region(quantile=QUANTILE),
           "zero-shot TATR": merging.trust_region(quantile=QUANTILE, by="vectors")}


class Task(NamedTuple):
    """predict(θ, head, images) -> logits, (images, classes) or (images, height, width, classes)."""

    predict: Callable
    head: Any
    splits: dict[str, tuple[np.ndarray, np.ndarray]]
    metric: Callable  # (answers, labels) -> a number in [0, 1]


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--steps", type=int, default=120)
    cli.add_argument("--seeds", type=int, default=3)
    cli.add_argument("--train", type=int, default=2000)
    cli.add_argument("--test", type=int, default=400)
    args = cli.parse_args()
    theta0, tasks = problem({"train": args.train, "val": 200, "test": args.test})
    gradients = exemplar_gradients(theta0, tasks)
    kept: dict = {}
    for seed in range(args.seeds):
        for (way, task), value in run(theta0, tasks, gradients, args.steps, seed).items():
            kept.setdefault((way, task), []).append(100 * value)
        print(f"seed {seed}: {len(kept)} numbers", file=sys.stderr, flush=True)
    print(results.markdown(table(kept, [*tasks, "normalised"])))


def table(kept, tasks) -> results.Table:
    """Ways by tasks, mean ± deviation over seeds."""
    cell = lambda values: results.cell(results.mean_std(values) if len(values) > 1 else values[0], scale=1.0)
    ways = dict.fromkeys(way for way, _ in kept)
    return results.Table(("test, %", *tasks), tuple(
        (way, *(cell(kept[way, task]) if (way, task) in kept else "–" for task in tasks)) for way in ways))


# ---------------------------------------------------------------- tasks
def problem(counts):
    """(θ0, {task: Task})"""
    found = clip.from_pretrained(glyphs.pretrained_dir())
    parts = glyph_suite.of_clip(found)
    theta0, encode = jax.device_get(parts["theta0"]), parts["encode"]
    tokens = dense.tokens(encode, "vision_model.encoder", skip=1)
    tasks = {name: classes_of(found, encode, name, counts) for name in ("greek", "braille")}
    return theta0, tasks | {"greek scenes": pixels_of(theta0, tokens, "greek scenes", counts),
                            "words": words_of(theta0, encode, counts)}


def classes_of(found, encode, name, counts) -> Task:
    row = glyphs.task(name)
    splits = {split: tuple(glyphs.load(name, split, most=count)) for split, count in counts.items()}
    return Task(evaluation.classify(encode), glyph_suite.head(found, row.classnames, row.templates), splits, share)


def pixels_of(theta0, tokens, name, counts) -> Task:
    splits = {split: tuple(glyph_scenes.load(name, split, count=count)) for split, count in counts.items()}
    images, labels = splits["train"]
    classes = glyph_scenes.classes(name)
    head = dense.ridge_head(evaluation.features(tokens, theta0, images), labels, classes=classes, patch=PATCH)
    iou = lambda answers, labels: dense.mean_iou(dense.confusion(answers, labels, classes=classes))
    return Task(per_pixel(tokens), head, splits, iou)


def words_of(theta0, encode, counts) -> Task:
    splits = {split: tuple(glyph_scenes.words(split, count=count)) for split, count in counts.items()}
    images, labels = splits["train"]
    x = evaluation.features(encode, theta0, images)
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float64)
    wanted = np.eye(len(glyph_scenes.WORDS))[labels]
    head = np.linalg.solve(x.T @ x + np.eye(x.shape[1]), x.T @ wanted)
    return Task(evaluation.classify(encode), jnp.asarray(10 * head, jnp.float32), splits, share)


@functools.cache
def per_pixel(tokens):
    return lambda params, head, images: dense.unfold(tokens(params, images), head, patch=PATCH)


def share(answers, labels) -> float:
    return float((answers == labels).mean())


# ---------------------------------------------------------------- losses
@functools.cache
def loss(predict):
    """(θ, (images, labels), key, head) -> cross-entropy, over pixels too."""
    def loss(params, batch, key, head):
        images, labels = batch
        logits = predict(params, head, images)
        return training.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
    return loss


@functools.cache
def one_loss(predict):
    """The same of one example, as per-example gradients take it."""
    return lambda params, example, head: loss(predict)(params, jax.tree.map(lambda x: x[None], example), None, head)


def exemplar_gradients(theta0, tasks):
    """Mean |∇ℓ| at θ0 over a few training examples of each task, stacked in their order."""
    some = lambda task: tuple(x[:EXEMPLARS] for x in task.splits["train"])
    made = [jax.device_get(calibration.reduced(one_loss(task.predict), theta0, some(task), task.head,
                                               reduce="mean_abs")) for task in tasks.values()]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *made)


# ---------------------------------------------------------------- merging
def run(theta0, tasks, gradients, steps: int, seed: int) -> dict:
    """{(way, task): metric on test data}, with the normalised mean of each way."""
    tuned = {name: tune(theta0, task, steps, seed) for name, task in tasks.items()}
    taus = [vectors.task_vector(theta, theta0) for theta in tuned.values()]
    own = {split: {name: judge(tuned[name], task, split) for name, task in tasks.items()} for split in ("val", "test")}
    at = lambda theta, split: {name: judge(theta, task, split) for name, task in tasks.items()}
    found = {**named("zero-shot", at(theta0, "test"), own), **named("fine-tuned", own["test"], own)}
    for base, merge in BASES.items():
        for region, step in REGIONS.items():
            data = {"gradients": gradients} if region == "TATR" else {}
            tau = (step | merge)(taus, tasks=tuple(tasks), **data)
            value = lambda scale, tau=tau: evaluation.normalised(
                at(evaluation.moved(theta0, tau, scale), "val"), own["val"])
            best = evaluation.search(value, SCALES).best
            found |= named(f"{base}, {region}", at(evaluation.moved(theta0, tau, best), "test"), own)
    return found


def named(way: str, metrics: dict, own) -> dict:
    return {(way, name): value for name, value in metrics.items()} | {
        (way, "normalised"): evaluation.normalised(metrics, own["test"])}


def tune(theta0, task: Task, steps: int, seed: int):
    recipe = training.Recipe(steps=steps, batch=32, lr=3e-4, warmup=max(1, steps // 10), seed=seed)
    feed = functools.partial(training.batches, task.splits["train"], batch=recipe.batch, seed=seed)
    return training.fit(loss(task.predict), theta0, feed, recipe, frozen=task.head, progress=False).params


def judge(theta, task: Task, split: str, batch: int = 100) -> float:
    images, labels = task.splits[split]
    answers = [_answers(theta, task.head, images[at:at + batch], predict=task.predict)
               for at in range(0, len(images), batch)]
    return task.metric(np.concatenate(jax.device_get(answers)), labels)


@functools.partial(jax.jit, static_argnames="predict")
def _answers(theta, head, images, *, predict):
    return predict(theta, head, images).argmax(-1).astype(jnp.int32)


if __name__ == "__main__":
    main()
