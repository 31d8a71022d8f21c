"""The recipe of a merge: all that decides its result, as a file that runs it again."""
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tvjax import merging, tree
from tvjax.disk import slices
from tvjax.disk.match import POLICIES
from tvjax.merging.checks import choice
from tvjax.merging.operator import Operator

NAME = "recipe.yaml"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is merged, how, and what becomes of tensors that do not match.

    base, models: directories, files or hub ids; `models` maps a task's name, to which random draws belong, to one.
    method: a name in `merging.METHODS` (with `options`), or an `Operator`.
    only, exclude: regular expressions of the base's tensors to merge, and not to. missing, extra, heads, vocabulary:
    see `match`. compute_dtype: float32 or float64. out_dtype: "base" or a dtype for all merged tensors. max_shard_size:
    of an output file. allow_nonfinite: merge what holds NaN or infinities. code: "refuse" or "copy" Python files.
    output: a "model", the merged step as a "task_vector", or as a "lora" adapter of at most this `rank`.
    origin: what task vectors start from, the "base" or "zero" (models themselves are combined, the base gives names,
    dtypes and what is not merged).
    slices: for models stacked of layers of others, [{name: [model, first, last]}] for each of `models` and the base
    (""): layers first … last − 1 of that model, then those of the next slice; all layers in their order without.
    """

    base: str
    models: dict[str, str]
    method: str | Operator = "ties"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    only: str = ""
    exclude: str = ""
    missing: str = "refuse"
    extra: str = "refuse"
    heads: str = "base"
    vocabulary: str = "refuse"
    compute_dtype: str = "float32"
    out_dtype: str = "base"
    max_shard_size: str | int = "5GB"
    allow_nonfinite: bool = False
    code: str = "refuse"
    output: str = "model"
    rank: int = 16
    origin: str = "base"
    slices: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        for name, allowed in POLICIES.items():
            choice(name, getattr(self, name), allowed)
        choice("compute_dtype", self.compute_dtype, ("float32", "float64"))
        choice("out_dtype", self.out_dtype, ("base", "float32", "float16", "bfloat16", "float64"))
        choice("code", self.code, ("refuse", "copy"))
        choice("output", self.output, ("model", "task_vector", "lora"))
        if self.vocabulary == "union" and self.output != "model":
            raise ValueError(f"vocabulary=union makes a model with more tokens than the base, whose step is no "
                             f"{self.output}: choose output=model")
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"rank is a whole number from 1 on; got {self.rank!r}")
        choice("origin", self.origin, ("base", "zero"))
        if not self.base:
            raise ValueError("a merge needs a base, the pretrained model: give a directory or a hub id")
        if not self.models:
            raise ValueError("there is nothing to merge: the list of models is empty")
        if self.slices and self.output != "model":
            raise ValueError(f"slices make a model of other layers than the base's, whose step is no {self.output}: "
                             "choose output=model")
        slices.check(self.slices, self.models)

    @property
    def policies(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in POLICIES}

    def operator(self) -> Operator:
        if isinstance(self.method, Operator):
            return self.method
        return merging.build(self.method, self.options)


def named(models: Mapping[str, Any] | Sequence[Any] | str | os.PathLike) -> dict[str, str]:
    """{task: model}: given so, or a list whose entries are `task=model` or are called by the last part of their path.

    >>> named("runs/cars,eu=runs/eurosat@main")
    {'cars': 'runs/cars', 'eu': 'runs/eurosat@main'}
    """
    if isinstance(models, Mapping):
        return {str(name): os.fspath(model) for name, model in models.items()}
    if isinstance(models, os.PathLike):
        models = [models]
    given = models.split(",") if isinstance(models, str) else [os.fspath(model) for model in models]
    found: dict[str, str] = {}
    for text in filter(None, (part.strip() for part in given)):
        name, equals, model = text.partition("=")
        if not equals or os.path.exists(text):
            name, model = _last(text), text
        if name in found:
            raise ValueError(f"two models are called {name!r}: write one of them as name={model}")
        found[name] = model
    return found


def _last(path: str) -> str:
    path = path.rstrip("/\\")
    last = Path(path).name
    return last.removesuffix(".safetensors") if last not in ("", ".", "..") else Path(path).resolve().name


def fields(recipe: Recipe) -> dict[str, Any]:
    """The recipe as YAML and JSON hold it; an operator made in Python is told by its steps and numbers."""
    found = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    if isinstance(recipe.method, Operator):
        found["method"] = {"operator": repr(recipe.method), "numbers": _fingerprint(recipe.method)}
    return {name: plain(value) for name, value in found.items()}


def plain(value: Any) -> Any:
    """Arrays, tuples and paths as lists, numbers and strings; rules are told by their content."""
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return np.asarray(value).tolist()
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def _fingerprint(operator: Operator) -> str:
    leaves, structure = jax.tree.flatten(operator)
    digest = hashlib.sha256(repr([[getattr(stage.leaf, "__qualname__", ""), stage.options, stage.needs, stage.entrywise,
                                   len(stage.guards)] for stage in operator.stages]).encode())
    for leaf in leaves:
        array = np.asarray(leaf)
        digest.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return f"{digest.hexdigest()[:16]} ({structure.num_leaves} numbers)"


def identity(recipe: Recipe, inputs: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """A hash of all that decides the output's bytes: the recipe, the input files as they are, the versions."""
    text = json.dumps([fields(recipe), inputs, versions], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def to_yaml(recipe: Recipe) -> str:
    """The text of recipe.yaml."""
    import yaml

    head = ("# Runs this merge again: python -m tvjax.run --config=configs/merge.py --config.recipe=recipe.yaml "
            "--config.out=DIRECTORY\n")
    if isinstance(recipe.method, Operator):
        head = "# Made with an operator composed in Python, which this file describes but cannot run again.\n"
    return head + yaml.safe_dump(fields(recipe), sort_keys=False, allow_unicode=True, width=118)


def from_yaml(path: str | os.PathLike) -> Recipe:
    """The recipe in a file; ValueError with one sentence for a slip in it."""
    return from_fields(load(path), str(path))


def load(path: str | os.PathLike) -> dict[str, Any]:
    """The fields of a YAML file."""
    import yaml

    try:
        given = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"there is no recipe {path} ({error.strerror})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no recipe: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(given, dict):
        raise ValueError(f"{path} is no recipe: it holds no fields")
    return given


def from_fields(given: Mapping[str, Any], what: str = "the recipe") -> Recipe:
    """The recipe of these fields."""
    known = [field.name for field in dataclasses.fields(Recipe)]
    for name in given:
        if name not in known:
            raise ValueError(f"{what} has no field {name!r}; {tree.did_you_mean(str(name), known)}")
    if missing := [name for name in ("base", "models") if name not in given]:
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    if not isinstance(given.get("method", ""), str):
        raise ValueError(f"{what} was made with an operator composed in Python: run it from there")
    return Recipe(**{**given, "models": named(given["models"])})
