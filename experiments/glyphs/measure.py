"""Measures the glyph benchmark: zero-shot, fine-tuned, simple average and task arithmetic on 8, 14 and 20 tasks.

    python experiments/glyphs/measure.py --workdir=runs/glyphs_pilot --steps=300 --lr=3e-4

Only the visual tower is trained; the head is frozen: averaged, normalised template features times exp(logit_scale).
The coefficient of task arithmetic is chosen on validation images by the mean over tasks of merged over fine-tuned
accuracy; all other numbers are on test images.
"""
import argparse
import functools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file
from transformers import CLIPConfig, CLIPTokenizer

from tvjax.data import glyphs
from tvjax.models import clip

ALPHAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def pixels(images):
    return jnp.asarray(images, jnp.float32) / 127.5 - 1


def make_head(model, params, tokenizer, task):
    """(classes, features), scaled."""
    text = jax.jit(clip.text_features(model))
    prompts = [[t.format(c) for c in task.classnames] for t in task.templates]
    ids = [tokenizer(p, padding="max_length", return_tensors="np")["input_ids"].astype(np.int32) for p in prompts]
    return jnp.exp(params["logit_scale"]) * unit(sum(unit(text(params, x)) for x in ids))


def make_tune(model, *, steps, lr, batch):
    apply = clip.image_features(model)
    schedule = optax.warmup_cosine_decay_schedule(0.0, lr, steps // 10, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    def loss_fn(theta, images, labels, head):
        logits = unit(apply(theta, pixels(images))) @ head.T
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def step(theta, state, images, labels, head):
        updates, state = optimizer.update(jax.grad(loss_fn)(theta, images, labels, head), state, theta)
        return optax.apply_updates(theta, updates), state

    def tune(theta, head, split, seed):
        rng, state = np.random.default_rng(seed), optimizer.init(theta)
        size = len(split.labels)
        order = np.concatenate([rng.permutation(size) for _ in range(1 + steps * batch // size)])
        for at in np.split(order[:steps * batch], steps):
            theta, state = step(theta, state, split.images[at], split.labels[at], head)
        return theta

    return tune


def make_accuracy(model):
    apply = clip.image_features(model)
    predict = jax.jit(lambda theta, images, head: (unit(apply(theta, pixels(images))) @ head.T).argmax(1))

    def accuracy(theta, head, split):
        said = [predict(theta, images, head) for images in np.split(split.images, range(500, len(split.labels), 500))]
        return float((np.concatenate(said) == split.labels).mean())

    return accuracy


def read(path):
    return unflatten_dict({k: jnp.asarray(v) for k, v in load_file(path).items()}, sep=".")


def write(path, params):
    save_file({k: np.asarray(v, order="C") for k, v in flatten_dict(params, sep=".").items()}, path)


def measure_sizes(theta0, taus, rows, test):
    """One line of JSON a suite; `test(theta, name, split)` is an accuracy."""
    for size in sorted({min(s, len(taus)) for s in (8, 14, 20)}):
        names = list(taus)[:size]
        total = jax.tree.map(lambda *x: sum(x), *(taus[n] for n in names))

        def normalised(alpha, split, names=names, total=total):
            theta = jax.tree.map(lambda a, b: a + alpha * b, theta0, total)
            accs = [test(theta, n, split) for n in names]
            key = "tuned" if split == "test" else "tuned_val"
            return float(np.mean(accs)), float(np.mean([a / rows[n][key] for a, n in zip(accs, names, strict=True)]))

        score = {alpha: normalised(alpha, "val")[1] for alpha in ALPHAS}
        best = max(score, key=score.get)
        line = {"tasks": size} | {k: float(np.mean([rows[n][k] for n in names])) for k in ("zero", "tuned")}
        line |= {"average": normalised(1 / size, "test"), "alpha": best, "arithmetic": normalised(best, "test")}
        print(json.dumps(line), json.dumps(score), flush=True)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pretrained", type=pathlib.Path, default=glyphs.pretrained_dir())
    parser.add_argument("--workdir", type=pathlib.Path, required=True, help="fine-tuned towers are kept here")
    parser.add_argument("--tasks", nargs="*", default=list(glyphs.suite(20)))
    parser.add_argument("--lr", type=float, default=3e-4)
    for name, default in dict(steps=300, batch=64, seed=0).items():
        parser.add_argument("--" + name, type=int, default=default)
    return parser.parse_args()


def main():
    args = parse()
    args.workdir.mkdir(parents=True, exist_ok=True)
    tokenizer = CLIPTokenizer.from_pretrained(args.pretrained)
    model, params = clip.CLIP(CLIPConfig.from_pretrained(args.pretrained)), read(args.pretrained / "model.safetensors")
    theta0, accuracy = clip.visual(params), make_accuracy(model)
    tune = make_tune(model, steps=args.steps, lr=args.lr, batch=args.batch)
    load = functools.cache(lambda name, split: glyphs.load(name, split, seed=args.seed))
    heads = {n: make_head(model, params, tokenizer, glyphs.task(n)) for n in (*args.tasks, "control")}
    test = lambda theta, name, split: accuracy(theta, heads[name], load(name, split))

    print(f"control zero-shot {test(theta0, 'control', 'test'):.3f}", flush=True)
    taus, rows = {}, {}
    for name in args.tasks:
        began, kept = time.time(), args.workdir / f"{name}.safetensors"
        if not kept.is_file():
            write(kept, tune(theta0, heads[name], load(name, "train"), args.seed))
        took, theta = time.time() - began, read(kept)
        rows[name] = {"zero": test(theta0, name, "test"), "tuned": test(theta, name, "test"),
                      "tuned_val": test(theta, name, "val"), "tuned_train": test(theta, name, "train")}
        taus[name] = jax.tree.map(jnp.subtract, theta, theta0)
        each = " ".join(f"{k} {v:.3f}" for k, v in rows[name].items())
        print(f"{name} classes {len(glyphs.task(name).chars)} {each} seconds {took:.0f}", flush=True)
    (args.workdir / "rows.json").write_text(json.dumps(rows, indent=1))
    measure_sizes(theta0, taus, rows, test)


if __name__ == "__main__":
    main()
