"""The suite "arrays": images from `.npz` files under a CLIP or its vision tower alone, whose visual part is fine-tuned.

Heads are frozen and made from the pretrained model: of class names ("text"), or as prototypes, where column c is
scale · unit(mean over the first `shots` training images of c of unit(f(x; θ0))): no names, no text tower.
"""
import jax.numpy as jnp
import numpy as np

from tvjax import evaluation
from tvjax.data import arrays, glyphs, splits
from tvjax.experiment import glyph_suite
from tvjax.experiment.loading import Material, Problem, assemble, checked
from tvjax.experiment.planning import SPLITS, Plan
from tvjax.models import clip


def load(plan: Plan) -> Problem:
    """The problem of a plan."""
    found = checked(plan, clip.from_pretrained(glyphs.pretrained_dir() if plan.model == "glyphs" else plan.model))
    if plan.data["heads"] == "text" and "text_model" not in found.params:
        raise ValueError(f"{found.path} has no text tower, so it gives no heads of class names: "
                         "set data.heads='prototypes'")
    side, of = found.model.config.vision.image_size, arrays.files(plan.sources)
    parts = glyph_suite.of_clip(found)
    names = (*plan.tasks, *([plan.control] if plan.control else []))
    material = {name: _material(plan, found, name, arrays.read(of[name], name, side=side), parts) for name in names}
    return assemble(plan, found, material, **parts)


def _material(plan, found, name: str, task: arrays.Arrays, parts) -> Material:
    """A task's splits, cut to what the plan asks for, and its head."""
    cut = {split: _some(task.splits[split], plan.examples[split]) for split in SPLITS}
    if plan.data["heads"] == "prototypes":
        few = _shots(cut["train"], plan.data["shots"])
        if missing := sorted(set(range(task.classes)) - set(few.labels.tolist())):
            raise ValueError(f"{name}: no training image of class {missing[0]} for its prototype: raise examples.train")
        head = prototypes(parts["encode"], parts["theta0"], few, task.classes, scale=plan.data["scale"])
        return Material(head, cut, ("prototypes", float(plan.data["scale"]), few.images, few.labels), task.source)
    if task.classnames is None:
        raise ValueError(f"{task.source} names no classes (array {name}_classes): add it, or set "
                         "data.heads='prototypes'")
    templates = plan.data["templates"] or arrays.TEMPLATES
    return Material(glyph_suite.head(found, task.classnames, templates), cut, (task.classnames, templates), task.source)


def _some(part: arrays.Pictures, most: int) -> arrays.Pictures:
    rows = splits.first(len(part.labels), most)
    return arrays.Pictures(part.images[rows], part.labels[rows])


def _shots(part: arrays.Pictures, most: int) -> arrays.Pictures:
    """The first `most` images of every class (all of them for 0), in their order."""
    earlier = np.array([np.sum(part.labels[:i] == label) for i, label in enumerate(part.labels)])
    rows = np.flatnonzero(earlier < most) if most else np.arange(len(part.labels))
    return arrays.Pictures(part.images[rows], part.labels[rows])


def prototypes(encode, params, split, classes: int, *, scale: float, batch: int = 256):
    """The head (features, classes) of the mean unit features of each class, unit columns times `scale`."""
    features = evaluation.features(encode, params, split[0], batch=batch)
    features = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    one = np.eye(classes, dtype=np.float32)[np.asarray(split[1])]
    means = one.T @ features
    return jnp.asarray(scale * (means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)).T)


