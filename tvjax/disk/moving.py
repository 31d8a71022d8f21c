"""Recipes of other tools: mergekit's YAML, and FusionBench's of a method, with the numbers that they give."""
import os
from collections.abc import Mapping
from typing import Any

from tvjax.disk import recipe
from tvjax.disk.mergekit import from_mergekit
from tvjax.disk.recipe import Recipe
from tvjax.merging import compat
from tvjax.merging.shorthand import spelt


def read(path: str | os.PathLike, base: str = "", models: Any = "") -> Recipe:
    """The recipe in a file: ours, mergekit's, or FusionBench's of a method, which needs `base` and `models` besides.

    Raises ValueError with one sentence for a slip, or for what cannot be had here.
    """
    given = recipe.load(path)
    if "_target_" in given:
        return from_fusionbench(given, base, models)
    if base or models:
        raise ValueError("a recipe names its base and models: give either recipe, or base and models")
    return from_mergekit(given, str(path)) if "merge_method" in given else recipe.from_fields(given, str(path))


def from_fusionbench(given: Mapping[str, Any], base: str, models: Any) -> Recipe:
    """The recipe of a FusionBench method's configuration (`_target_` and its options) for these models."""
    target = str(given["_target_"])
    options = {name: value for name, value in given.items() if name not in ("_target_", "_recursive_", "_version_")}
    method, made = compat.translate("fusionbench", target, options)
    zero = compat.acts_on("fusionbench", target) == "models"
    return Recipe(base=base, models=recipe.named(models), method=method, options=spelt(made),
                  origin="zero" if zero else "base")
