"""The suite "glyphs": embedded drawings, a CLIP whose visual part is fine-tuned, zero-shot heads of class names.

Accuracy is that of argmax over unit(image(x; θ)) · head, θ the visual part.
"""
import functools
from typing import Any

from tvjax import evaluation, training
from tvjax.data import glyphs
from tvjax.experiment.loading import Material, Problem, assemble, checked
from tvjax.experiment.planning import SPLITS, Plan
from tvjax.models import clip

SIDE = 32  # pixels of a glyph


def load(plan: Plan) -> Problem:
    """The problem of a plan."""
    found = checked(plan, clip.from_pretrained(glyphs.pretrained_dir() if plan.model == "glyphs" else plan.model))
    _check_fit(found)
    names = (*plan.tasks, glyphs.CONTROL.name)
    material = lambda task: Material(
        head(found, task.classnames, task.templates),
        {split: _some(task.name, split, plan.examples[split]) for split in SPLITS}, (task.classnames, task.templates))
    return assemble(plan, found, {name: material(glyphs.task(name)) for name in names}, **of_clip(found))


def _check_fit(found: clip.Pretrained) -> None:
    side = found.model.config.vision.image_size
    if side != SIDE:
        raise ValueError(f"{found.path} takes {side} × {side} pixels, glyphs have {SIDE} × {SIDE}: take another model")
    if "text_model" not in found.params:
        raise ValueError(f"{found.path} has no text tower, so it gives no zero-shot heads: choose a whole CLIP")


def of_clip(found: clip.Pretrained) -> dict[str, Any]:
    """What a problem takes from a CLIP: its visual part, the encoder of uint8 images, how to load and save others."""
    model: Any = found.model  # hashable, though its type does not say so
    mean, std = (tuple(getattr(found.processor, name)) for name in ("image_mean", "image_std"))
    return {"theta0": clip.visual(found.params), "encode": encoder(model, mean, std),
            "load": functools.partial(visual_of, clip.visual(found.params)),
            "save": functools.partial(clip.save_pretrained, found)}


def visual_of(theta0, path):
    """The visual part of the CLIP in a folder; what a tower alone lacks, its projection, is the pretrained model's."""
    return {**theta0, **clip.visual(clip.from_pretrained(path).params)}


@functools.cache
def encoder(model: Any, mean, std):
    """encode(θ, uint8 images (batch, height, width, 3)) -> features."""
    features = clip.image_features(model)
    return lambda params, images: features(params, training.normalise(images, mean, std))


def head(found: clip.Pretrained, classnames, templates):
    """The zero-shot head of a task, (projection, classes)."""
    tokenize = lambda prompts: found.tokenizer(prompts, padding="max_length", truncation=True, return_tensors="np",
                                               max_length=found.model.config.text.positions)["input_ids"]
    model: Any = found.model
    return evaluation.zero_shot_head(_encode_text(model), found.params, tokenize, classnames, templates,
                                     logit_scale=found.params["logit_scale"])


@functools.cache
def _encode_text(model: Any):
    features = clip.text_features(model)
    return lambda params, ids: features(params, ids)


def _some(task: str, split: str, most: int) -> glyphs.Split:
    return _control(split, most) if task == glyphs.CONTROL.name else glyphs.load(task, split, most=most)


@functools.cache
def _control(split: str, most: int) -> glyphs.Split:
    """The control's drawings, which all experiments of a process share."""
    return glyphs.load(glyphs.CONTROL.name, split, most=most)
