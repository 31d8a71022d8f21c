"""The suite "vision": the papers' tasks by name under a published CLIP, whose visual part is fine-tuned or was already.

Heads are zero-shot heads of the registry's class names and prompts.
"""
from tvjax.data import images, vision
from tvjax.experiment import glyph_suite
from tvjax.experiment.loading import Material, Problem, assemble, checked
from tvjax.experiment.planning import Plan
from tvjax.models import clip


def load(plan: Plan) -> Problem:
    """The problem of a plan."""
    found = checked(plan, clip.from_pretrained(plan.model))
    if "text_model" not in found.params:
        raise ValueError(f"{found.path} has no text tower, so it gives no zero-shot heads: choose a whole CLIP")
    names = (*plan.tasks, *([plan.control] if plan.control else []))
    return assemble(plan, found, {name: _material(plan, found, vision.task(name)) for name in names},
                    **glyph_suite.of_clip(found))


def _material(plan: Plan, found, task: vision.Task) -> Material:
    side = found.model.config.vision.image_size
    splits, said = images.read(task.name, plan.sources, side=side, examples=plan.examples)
    told = (task.classnames, task.templates)
    return Material(glyph_suite.head(found, *told), splits, told, said)
