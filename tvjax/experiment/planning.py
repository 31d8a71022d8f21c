"""What an experiment is to do, read from a config and checked before anything is computed or written.

A config is a tree of numbers, strings and tuples; `plan` turns it into a `Plan` or answers a slip by one sentence.
"""
import dataclasses
import inspect
import math
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tvjax import merging, training, tree
from tvjax.data import glyphs
from tvjax.experiment import suites
from tvjax.merging import Operator

SPLITS = ("train", "val", "test")
LAMBDAS = (0.2, 0.3, 0.4, 0.5, 0.6)  # the grid of arXiv:2405.07813


class Merge(NamedTuple):
    """One row of the table: `scales` is the grid searched for α, or None where the method or the config fixes it."""

    label: str
    name: str
    options: dict
    scales: tuple[float, ...] | None
    compat: str | None = None

    @property
    def searches_lambda(self) -> bool:
        return self.options.get("lam") == "val"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A checked config. `finetuned` maps a task to the directory of a model that needs no fine-tuning.

    `sources` are the files or folders of the data, `control` names the task that is judged and never trained on, `data`
    holds what a suite alone knows; the suite "glyphs" needs none of them. geometry: "linearised" judges every model by
    its first-order expansion at θ0, whatever way it was tuned.
    """

    name: str
    model: str
    suite: str
    tasks: tuple[str, ...]
    counts: tuple[int, ...]
    seeds: tuple[int, ...]
    examples: dict[str, int]
    finetune: dict[str, Any]
    finetuned: dict[str, str]
    merges: tuple[Merge, ...]
    select_on: str
    batch: int
    save_models: bool
    allow_nonfinite: bool
    sources: tuple[str, ...] = ()
    control: str = ""
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    geometry: str = "standard"

    def recipe(self, seed: int) -> training.Recipe:
        return training.Recipe(**self.finetune, seed=seed)


FIELDS = ("name", "model", "suite", "tasks", "counts", "seeds", "examples", "finetune", "finetuned", "merges", "scales",
          "select_on", "batch", "save_models", "allow_nonfinite")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # owner/name on the Hugging Face hub
OPTIONAL: dict[str, Any] = {"sources": [], "control": "", "data": {}, "mesh": {}, "geometry": "standard"}


def plain(config: Any) -> Any:
    """A config as dicts, lists, numbers and strings, as JSON holds it.

    >>> plain({"tasks": ("a", "b"), "merges": ({"name": "ties"},)})
    {'tasks': ['a', 'b'], 'merges': [{'name': 'ties'}]}
    """
    if hasattr(config, "items"):
        return {key: plain(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [plain(value) for value in config]
    return config


def plan(config: Any) -> Plan:
    """The checked config; ValueError with one sentence for a slip in it.

    Builds every operator, knows every task, and computes nothing.
    """
    given = {**OPTIONAL, **plain(config)}
    known(given, (*FIELDS, *OPTIONAL), "the config", complete=True)
    options = {"select_on": ("val", "test"), "suite": tuple(suites.CHECKS), "geometry": ("standard", "linearised")}
    for name, known_ones in options.items():
        _choice(name, given[name], known_ones)
    tasks = _tasks(given["tasks"], given["suite"])
    data = suites.CHECKS[given["suite"]](tasks, given)
    finetune = _recipe(given["finetune"])
    return Plan(
        name=given["name"], model=str(given["model"]), suite=given["suite"], tasks=tasks,
        counts=_counts(given["counts"], len(tasks)), seeds=_integers("seeds", given["seeds"], low=0),
        examples=_examples(given["examples"], given["suite"]), finetune=finetune,
        finetuned=_finetuned(given["finetuned"], tasks),
        merges=_merges(given["merges"], _scales(given["scales"])), select_on=given["select_on"],
        batch=_integers("batch", [given["batch"]], low=1)[0], save_models=bool(given["save_models"]),
        allow_nonfinite=bool(given["allow_nonfinite"]), geometry=given["geometry"], **data)


def known(given: Mapping, fields, what: str, *, complete: bool = False) -> None:
    """Raises for a field that does not exist, and where `complete` for one that lacks."""
    unknown = [name for name in given if name not in fields]
    if unknown:
        raise ValueError(f"{what} has no field {unknown[0]!r}; {tree.did_you_mean(unknown[0], fields)}")
    missing = [name for name in fields if name not in given]
    if missing and complete:
        raise ValueError(f"{what} lacks {', '.join(missing)}")


def _choice(name: str, value: Any, options: tuple[str, ...]) -> None:
    if value not in options:
        raise ValueError(f"{name} is {' or '.join(map(repr, options))}; got {value!r}")


def _tasks(names, suite: str) -> tuple[str, ...]:
    if isinstance(names, str) or not names:
        some = f" of {', '.join(glyphs.suite(20))}" if suite == "glyphs" else ""
        raise ValueError(f"tasks is empty or no list: {names!r}; name at least one{some}")
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"tasks holds {name!r}, which is no name of a task")
        if "," in name:
            several = '", "'.join(name.split(","))
            raise ValueError(f"tasks holds {name!r}; several tasks are written '(\"{several}\")'")
    twice = [name for name in names if list(names).count(name) > 1]
    if twice:
        raise ValueError(f"tasks names {twice[0]!r} more than once")
    return tuple(names)


def _counts(counts, tasks: int) -> tuple[int, ...]:
    counts = _integers("counts", counts, low=1)
    if max(counts) > tasks:
        raise ValueError(f"counts says to merge the first {max(counts)} tasks, but there are {tasks}")
    return tuple(sorted(counts))


def _integers(name: str, values, *, low: int) -> tuple[int, ...]:
    if not isinstance(values, list) or not values:
        raise ValueError(f"{name} needs at least one integer; got {values!r}")
    bad = [x for x in values if not isinstance(x, int) or isinstance(x, bool) or x < low]
    if bad or len(set(values)) < len(values):
        raise ValueError(f"{name} holds different integers of at least {low}; got {values!r}")
    return tuple(values)


def _examples(given: dict, suite: str) -> dict[str, int]:
    known(given, SPLITS, "examples", complete=True)
    for split in SPLITS:
        most = glyphs.SIZES[split] if suite == "glyphs" else 10**9
        if not isinstance(given[split], int) or not 0 < given[split] <= most:
            raise ValueError(f"examples.{split} is from 1 to {most}; got {given[split]!r}")
    return {split: given[split] for split in SPLITS}


def _recipe(given: dict) -> dict[str, Any]:
    fields = [field.name for field in dataclasses.fields(training.Recipe) if field.name != "seed"]
    known(given, fields, "finetune")
    training.Recipe(**given)
    return dict(given)


def _finetuned(given, tasks) -> dict[str, str]:
    pairs = [str(text).partition("=") for text in given]
    for task, _, path in pairs:
        if not path:
            raise ValueError(f"finetuned holds entries like 'task=directory'; got {task!r}")
        if task not in tasks:
            raise ValueError(f"finetuned names {task!r}, which is none of the tasks; {tree.did_you_mean(task, tasks)}")
        if not os.path.isdir(path) and not HUB_ID.fullmatch(path):
            raise ValueError(f"there is no directory {path} (finetuned, task {task})")
    return {task: path for task, _, path in pairs}


def _scales(values) -> tuple[float, ...]:
    if not isinstance(values, list) or not values:
        raise ValueError(f"scales is empty or no list: {values!r}")
    if bad := [x for x in values if isinstance(x, (bool, str)) or not math.isfinite(x)]:
        raise ValueError(f"scales holds {bad[0]!r}, which is no finite number")
    return tuple(float(x) for x in values)


def _merges(given, scales) -> tuple[Merge, ...]:
    if not isinstance(given, list) or not given:
        raise ValueError(f"merges is empty; there are {', '.join(merging.METHODS)}")
    merges = tuple(_merge(dict(one), scales) for one in given)
    labels = [one.label for one in merges]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(f"two merges are called {twice[0]!r}: give one of them another label")
    return merges


def _merge(options: dict, scales) -> Merge:
    if not isinstance(options.get("name"), str):
        raise ValueError(f"a merge has a name, one of {', '.join(merging.METHODS)}; got {options}")
    name = merging_known(options.pop("name"))
    label = str(options.pop("label", name))
    if set(label) & set('/\\"<>:|?*') or label.startswith("."):
        raise ValueError(f"a merge's label names a directory; {label!r} cannot")
    own, compat = options.pop("scales", None), options.pop("compat", None)
    fixed = "scale" in options or not takes(name, "scale")
    if fixed and own is not None:
        raise ValueError(f"{label} has scales to search, but its scale is fixed")
    grid = None if fixed or (compat and own is None) else scales if own is None else _scales(own)
    merge = Merge(label, name, options, grid, compat)
    _check_result(merge)
    return merge


def merging_known(name: str) -> str:
    """`name` if it is a method's."""
    if name not in merging.METHODS:
        raise ValueError(f"no merge called {name!r}; {tree.did_you_mean(name, list(merging.METHODS))}")
    return name


def _check_result(merge: Merge) -> None:
    """Traces the operator, on shapes alone: it must need no data and give one vector."""
    taus = {"a": jax.ShapeDtypeStruct((3, 4, 4), jnp.float32), "b": jax.ShapeDtypeStruct((3, 4), jnp.float32)}
    try:
        made = jax.eval_shape(operator(merge, lam=jnp.full(3, LAMBDAS[0])), taus)
    except ValueError as error:
        raise ValueError(f"{merge.label}: {error}") from None
    if made["a"].shape != (4, 4):
        raise ValueError(f"{merge.label} gives a model for each task, not one for all: it is no merge for this table")


def takes(name: str, option: str) -> bool:
    """Whether a method has a hyper-parameter of that name."""
    return option in inspect.signature(merging.METHODS[name]).parameters


def operator(merge: Merge, *, lam: Any = None) -> Operator:
    """The operator of a merge, at scale 1 where α is searched, with `lam` where λ is."""
    options = dict(merge.options)
    if merge.searches_lambda:
        options["lam"] = lam
    if merge.scales is not None:
        options["scale"] = 1.0
    return merging.build(merge.name, options, compat=merge.compat)
