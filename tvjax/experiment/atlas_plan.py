"""What a study of learned scaling is to do: the usual plan and a group `atlas`, all checked.

`parts` names the studies; each has a group of its own fields, which must be complete where the study is named.
"""
import dataclasses
from collections.abc import Mapping
from typing import Any

from tvjax import tree
from tvjax.experiment import planning, study, suites
from tvjax.experiment.planning import Plan
from tvjax.learning import Scheme
from tvjax.learning.course import Course
from tvjax.learning.pool import STORES
from tvjax.learning.views import KINDS

FIELDS = {
    "addition": ("course", "schemes", "penalties", "fractions", "grid", "tuning", "geometry", "linear"),
    "negation": ("course", "schemes", "grid", "targets"),
    "fewshot": ("course", "joint", "targets", "shots", "draws", "augment", "schemes", "domains"),
    "contribution": ("course", "targets", "shots", "augment"),
    "tta": ("course", "targets", "draws", "augment", "objectives", "images", "exponents", "share", "margin"),
    "peft": ("course", "tuning", "targets", "ranks", "parts", "fractions", "draws", "lora"),
    "selection": ("course", "targets", "shots", "draws", "augment", "budgets", "methods"),
    "basis": ("course", "targets", "shots", "draws", "counts", "augment", "questions"),
}
OBJECTIVES = ("contrast", "entropy", "ufm")
METHODS = ("random", "features", "whole gradient", "block gradient")
GEOMETRIES = ("standard", "linearised")


@dataclasses.dataclass(frozen=True)
class AtlasPlan:
    """A checked config of this job; `usual` holds what every experiment has, `of` the fields of each part."""

    usual: Plan
    vectors: str
    store: str
    parts: tuple[str, ...]
    of: Mapping[str, Any]


def atlas_plan(config: Any) -> AtlasPlan:
    """The checked config; ValueError with one sentence for a slip in it."""
    given = dict(planning.plain(config))
    own, vectors = given.pop("atlas", None), given.pop("vectors", "")
    if given.pop("job", None) != "atlas" or not isinstance(own, dict):
        raise ValueError('this job needs job="atlas" and a group of fields called atlas')
    usual = planning.plan(given)
    suites.only_scores(usual, "atlas")
    planning.known(own, ("parts", "store", *FIELDS), "atlas")
    parts = tuple(own.get("parts", ()))
    if not parts:
        raise ValueError(f"atlas.parts is empty; there are {', '.join(FIELDS)}")
    for name in parts:
        if name not in FIELDS:
            raise ValueError(f"atlas.parts: no study {name!r}; {tree.did_you_mean(name, list(FIELDS))}")
    store = own.get("store", "float32")
    if store not in STORES:
        raise ValueError(f"atlas.store is one of {', '.join(STORES)}; got {store!r}")
    return AtlasPlan(usual, study.check_vectors(vectors), store, parts,
                     {name: _part(name, own.get(name), usual) for name in parts})


def _part(name: str, given: Any, usual: Plan) -> dict[str, Any]:
    where = f"atlas.{name}"
    if not isinstance(given, dict):
        raise ValueError(f"{where} is missing: the group of fields {', '.join(FIELDS[name])}")
    planning.known(given, FIELDS[name], where, complete=True)
    checked = {field: CHECKS.get(field, _as_given)(f"{where}.{field}", value, usual)
               for field, value in given.items()}
    if name == "negation" and not usual.control:
        raise ValueError("negation needs a control task: set the field control")
    if checked.get("budgets") and max(checked["budgets"]) > len(usual.tasks) - 1:
        raise ValueError(f"{where}.budgets asks for {max(checked['budgets'])} task vectors, but without the target's "
                         f"own the pool holds {len(usual.tasks) - 1}")
    return checked


def _as_given(where, value, usual):
    return tuple(value) if isinstance(value, list) else value


def _course(where, value, usual) -> Course:
    planning.known(value, [field.name for field in dataclasses.fields(Course)], where)
    try:
        return Course(**value)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _recipe(where, value, usual) -> dict:
    return planning._recipe(value)


def _schemes(where, values, usual) -> tuple[Scheme, ...]:
    known = [field.name for field in dataclasses.fields(Scheme)]
    for one in values:
        planning.known(one, known, where)
    return tuple(Scheme(**one) for one in values)


def _targets(where, names, usual) -> tuple[str, ...]:
    for name in names:
        if name not in usual.tasks:
            raise ValueError(f"{where} holds {name!r}; {tree.did_you_mean(name, usual.tasks)}")
    if not names:
        raise ValueError(f"{where} is empty; there are {', '.join(usual.tasks)}")
    if len(usual.tasks) < 2:
        raise ValueError(f"{where}: with a single task no vector is left once the target's own is taken out")
    return tuple(names)


def _counts(where, values, usual) -> tuple[int, ...]:
    values = values if isinstance(values, list) else [values]
    if not values or any(isinstance(x, bool) or not isinstance(x, int) or x < 1 for x in values):
        raise ValueError(f"{where} holds whole numbers from 1 on; got {values!r}")
    return tuple(sorted(set(values)))


def _one(where, value, usual) -> int:
    return _counts(where, [value], usual)[0]


def _shares(where, values, usual) -> tuple[float, ...]:
    for x in values if isinstance(values, list) else [values]:
        if isinstance(x, bool) or not isinstance(x, (int, float)) or not 0 < x <= 1:
            raise ValueError(f"{where} holds shares above 0 and up to 1; got {x!r}")
    return tuple(float(x) for x in values)


def _among(known):
    def check(where, values, usual):
        for value in [values] if isinstance(values, str) else values:
            if value not in known:
                raise ValueError(f"{where} holds {value!r}; {tree.did_you_mean(str(value), list(known))}")
        return values if isinstance(values, str) else tuple(values)
    return check


CHECKS = {
    **dict.fromkeys(("course", "joint"), _course), **dict.fromkeys(("tuning", "lora", "linear"), _recipe),
    **dict.fromkeys(("draws", "images"), _one),
    **dict.fromkeys(("shots", "budgets", "counts", "ranks", "parts"), _counts),
    "schemes": _schemes, "targets": _targets, "fractions": _shares, "augment": _among(KINDS),
    "objectives": _among(OBJECTIVES), "methods": _among(METHODS), "geometry": _among(GEOMETRIES),
}
