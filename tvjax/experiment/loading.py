"""What an experiment is about: a pretrained model, its frozen heads and the data of every task.

Accuracy is that of argmax over unit(image(x; θ)) · head, θ the visual part of a CLIP (what fine-tuning moves).
"""
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from tvjax import checkpoints, evaluation, training
from tvjax.data import glyphs
from tvjax.experiment.planning import SPLITS, Plan
from tvjax.models import clip

SIDE = 32  # pixels of a glyph


class Problem(NamedTuple):
    """`theta0` is the visual part of the pretrained CLIP; `base` hashes its weights.

    keys: {task: {split: a hash of base, class names, templates, images and labels}}, all that an accuracy depends on
      besides the weights that are judged.
    """

    pretrained: clip.Pretrained
    theta0: Any
    predict: Callable
    heads: dict[str, Any]
    splits: dict[str, dict[str, glyphs.Split]]
    base: str
    keys: dict[str, dict[str, str]]

    def judged(self, tasks, split: str) -> dict[str, tuple]:
        """{task: (head, (images, labels))}, as `tvjax.evaluation` takes them."""
        return {task: (self.heads[task], tuple(self.splits[task][split])) for task in tasks}


def problem(plan: Plan) -> Problem:
    """Loads the model and draws the data of a plan; ValueError where they do not fit or the model is not finite."""
    found = clip.from_pretrained(glyphs.pretrained_dir() if plan.model == "glyphs" else plan.model)
    if not plan.allow_nonfinite:
        check_finite(found.params, found.path)
    _check_fit(found)
    model: Any = found.model  # hashable, though its type does not say so
    predict = predictor(model, *(tuple(getattr(found.processor, name)) for name in ("image_mean", "image_std")))
    heads = {task: head(found, task) for task in plan.tasks}
    splits = {task: {split: _some(task, split, plan.examples[split]) for split in SPLITS} for task in plan.tasks}
    base = checkpoints.content_hash(found.params)
    keys = {task: {split: key(base, glyphs.task(task), part) for split, part in parts.items()}
            for task, parts in splits.items()}
    return Problem(found, jax.device_get(clip.visual(found.params)), predict, heads, splits, base, keys)


def key(base: str, task: glyphs.Task, split: glyphs.Split) -> str:
    """The hash under which results on a split are kept; a head follows from `base`, the names and the templates."""
    return evaluation.content_key(base, list(task.classnames), list(task.templates), tuple(split))


def _check_fit(found: clip.Pretrained) -> None:
    side = found.model.config.vision.image_size
    if side != SIDE:
        raise ValueError(f"{found.path} takes {side} × {side} pixels, glyphs have {SIDE} × {SIDE}: take another model")
    if "text_model" not in found.params:
        raise ValueError(f"{found.path} has no text tower, so it gives no zero-shot heads: choose a whole CLIP")


def check_finite(params, where) -> None:
    """Raises ValueError naming the tensor, and how to go on all the same."""
    try:
        checkpoints.check_finite(params)
    except ValueError as error:
        raise ValueError(f"{where}: {error} Set allow_nonfinite to go on all the same.") from None


@functools.cache
def predictor(model: Any, mean, std):
    """predict(θ, head, uint8 images) -> logits."""
    features = clip.image_features(model)

    def encode(params, images):
        return features(params, training.normalise(images, mean, std))
    return evaluation.classify(encode)


def head(found: clip.Pretrained, name: str):
    """The zero-shot head of a task, (projection, classes)."""
    task = glyphs.task(name)
    tokenize = lambda prompts: found.tokenizer(prompts, padding="max_length", truncation=True, return_tensors="np",
                                               max_length=found.model.config.text.positions)["input_ids"]
    model: Any = found.model
    return evaluation.zero_shot_head(_encode_text(model), found.params, tokenize, task.classnames, task.templates,
                                     logit_scale=found.params["logit_scale"])


@functools.cache
def _encode_text(model: Any):
    features = clip.text_features(model)
    return lambda params, ids: features(params, ids)


def _some(task: str, split: str, most: int) -> glyphs.Split:
    found = glyphs.load(task, split)
    return glyphs.Split(found.images[:most], found.labels[:most])
