"""Task vectors in JAX: obtain them, merge them, edit with them, judge the result.

Names are loaded when first used, so that `import tvjax` is quick: `tvjax.task_vector`, `tvjax.merging.ties`, …
"""
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvjax import checkpoints, evaluation, merging, models, results, training, tree, vectors
    from tvjax.checkpoints import load, load_task_vector, save, save_task_vector
    from tvjax.vectors import TaskVector, add, cosines, delta_norm_ratio, task_vector

_MODULES = ("checkpoints", "evaluation", "merging", "models", "results", "training", "tree", "vectors")
_NAMES = {
    **dict.fromkeys(("TaskVector", "add", "cosines", "delta_norm_ratio", "task_vector"), "tvjax.vectors"),
    **dict.fromkeys(("load", "load_task_vector", "save", "save_task_vector"), "tvjax.checkpoints"),
}
__all__ = [
    "TaskVector", "add", "checkpoints", "cosines", "delta_norm_ratio", "evaluation", "load", "load_task_vector",
    "merging", "models", "results", "save", "save_task_vector", "task_vector", "training", "tree", "vectors",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"tvjax.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'tvjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
