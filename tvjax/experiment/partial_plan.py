"""What a study of linearised fine-tuning is to do: the usual plan and a group named after its job, llora or tangent.

A way of fine-tuning is a row of `ways`: its kind, and what differs from the usual recipe.
"""
import dataclasses
import math
from typing import Any

from tvjax import adapters, tangent, training, tree
from tvjax.experiment import planning, study, suites
from tvjax.experiment.planning import Plan

JOBS = ("llora", "tangent")
FIELDS = ("ways", "fusions", "sizes", "most", "greedy", "ties", "lorahub", "plane", "scatter", "negation", "scaling")
WAY = ("name", "kind", "scope", "options", "seed", "remat", "finetune")
KINDS = ("standard", "tangent", *adapters.METHODS)
FUSIONS = ("average", "task_arithmetic", "ties", "lorahub", "greedy")


@dataclasses.dataclass(frozen=True)
class WayPlan:
    """One way of fine-tuning. scope: "" for adapters as they are, else how they are linearised. seed: of φ0, to which
    the run's seed is added, so that the tasks of a run share φ0."""

    name: str
    kind: str
    scope: str
    method: Any
    seed: int
    remat: str
    recipe: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class PartialPlan:
    """A checked config. sizes: numbers of tasks of the subsets, of which at most `most` are taken each (0: all).

    ties: {densities, scales}; lorahub: {budget, bound, penalty}; plane: {span, points, examples, pairs}; scaling:
    {ranks, tasks}, or {} where that study is not wanted.
    """

    usual: Plan
    job: str
    vectors: str
    ways: tuple[WayPlan, ...]
    fusions: tuple[str, ...]
    sizes: tuple[int, ...]
    most: int
    scales: tuple[float, ...]
    greedy: tuple[float, ...]
    ties: dict[str, Any]
    lorahub: dict[str, Any]
    plane: dict[str, Any]
    scatter: bool
    negation: bool
    scaling: dict[str, Any]


def partial_plan(config: Any) -> PartialPlan:
    """The checked config; ValueError with one sentence for a slip in it."""
    given = dict(planning.plain(config))
    job = given.pop("job", None)
    own, vectors = given.pop(str(job), None), given.pop("vectors", "")
    if job not in JOBS or not isinstance(own, dict):
        raise ValueError(f"this job needs job={' or '.join(map(repr, JOBS))} and a group of fields of that name")
    usual = planning.plan(given)
    suites.only_scores(usual, job)
    planning.known(own, FIELDS, job, complete=True)
    tasks = len(usual.tasks)
    return PartialPlan(
        usual, job, study.check_vectors(vectors), _ways(own["ways"], usual.finetune),
        tuple(_one_of("fusions", name, FUSIONS) for name in own["fusions"]), _sizes(own["sizes"], tasks),
        _whole("most", own["most"], 0), planning._scales(given["scales"]), planning._scales(own["greedy"]),
        _ties(own["ties"]), _lorahub(own["lorahub"]), _plane(own["plane"], tasks, usual.examples["test"]),
        bool(own["scatter"]), bool(own["negation"]), _scaling(own["scaling"], tasks))


def _ways(given, finetune) -> tuple[WayPlan, ...]:
    found = tuple(_way(dict(one), finetune) for one in given)
    names = [one.name for one in found]
    if not found or len(set(names)) < len(names):
        raise ValueError(f"ways needs one row or more, each with a name of its own; got {', '.join(names) or 'none'}")
    return found


def _way(given: dict, finetune: dict) -> WayPlan:
    planning.known(given, WAY, "a way")
    kind = _one_of("kind", given.get("kind"), KINDS)
    name, scope = str(given.get("name", kind)), _one_of("scope", given.get("scope", ""), ("", *adapters.SCOPES))
    if kind in ("standard", "tangent") and (scope or given.get("options")):
        raise ValueError(f"{name}: {kind} fine-tuning has neither scope nor options; they belong to adapters")
    method = adapters.build(kind, given.get("options") or {}) if kind in adapters.METHODS else None
    recipe = {**finetune, **(given.get("finetune") or {})}
    if kind == "standard" and recipe != finetune:
        raise ValueError(f"{name}: standard fine-tuning follows the config's own finetune; change that")
    training.Recipe(**recipe)
    remat = _one_of("remat", given.get("remat", "none"), tangent.POLICIES)
    return WayPlan(name, kind, scope, method, _whole("seed", given.get("seed", 42), 0), remat, recipe)


def _sizes(values, tasks: int) -> tuple[int, ...]:
    if bad := [n for n in values if not isinstance(n, int) or not 2 <= n <= tasks]:
        raise ValueError(f"sizes holds numbers of merged tasks, from 2 to {tasks}; got {bad[0]!r}")
    return tuple(sorted(set(values)))


def _ties(given: dict) -> dict[str, Any]:
    planning.known(given, ("densities", "scales"), "ties", complete=True)
    if bad := [k for k in given["densities"] if not 0 < k <= 1]:
        raise ValueError(f"ties.densities are shares above 0, up to 1; got {bad[0]!r}")
    return {"densities": tuple(given["densities"]), "scales": planning._scales(list(given["scales"]))}


def _lorahub(given: dict) -> dict[str, Any]:
    planning.known(given, ("budget", "bound", "penalty"), "lorahub", complete=True)
    _whole("lorahub.budget", given["budget"], 1)
    if not (given["bound"] > 0 and given["penalty"] >= 0 and math.isfinite(given["bound"] + given["penalty"])):
        raise ValueError(f"lorahub.bound is above 0 and lorahub.penalty not below; got {given['bound']}, "
                         f"{given['penalty']}")
    return dict(given)


def _plane(given: dict, tasks: int, examples: int) -> dict[str, Any]:
    if not given:
        return {}
    planning.known(given, ("span", "points", "examples", "pairs"), "plane", complete=True)
    _whole("plane.points", given["points"], 2)
    if not 0 < given["span"] < math.inf:
        raise ValueError(f"plane.span is above 0: the grid is [−span, span]²; got {given['span']}")
    if not 0 < given["examples"] <= examples:
        raise ValueError(f"plane.examples is from 1 to {examples}, those of the test split; got {given['examples']}")
    most = tasks * (tasks - 1) // 2
    if not 0 <= given["pairs"] <= most:
        raise ValueError(f"plane.pairs is from 0 to {most}, the pairs of {tasks} tasks; got {given['pairs']}")
    return dict(given)


def _scaling(given: dict, tasks: int) -> dict[str, Any]:
    if not given:
        return {}
    planning.known(given, ("ranks", "tasks", "seeds"), "scaling", complete=True)
    if not 2 <= given["tasks"] <= tasks:
        raise ValueError(f"scaling.tasks is from 2 to {tasks}; got {given['tasks']}")
    return {**given, "ranks": tuple(_whole("scaling.ranks", rank, 1) for rank in given["ranks"])}


def _one_of(what: str, name: Any, known) -> str:
    if name not in known:
        raise ValueError(f"{what}: there is no {name!r}; {tree.did_you_mean(str(name), [x for x in known if x])}")
    return name


def _whole(what: str, value: Any, low: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{what} is a whole number from {low} on; got {value!r}")
    return value
