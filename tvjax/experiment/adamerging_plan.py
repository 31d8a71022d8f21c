"""What a study of test-time merging is to do: the usual plan and a group `adamerging` of `FIELDS`, all checked."""
import dataclasses
from typing import Any

from tvjax.experiment import planning, study
from tvjax.experiment.planning import Plan
from tvjax.learning.pool import STORES
from tvjax.merging.checks import choice, share, within

FIELDS = ("methods", "adapt_on", "steps", "lr", "batch", "batches", "value", "store", "quantile", "exemplars",
          "density", "baselines", "surgery")
REGIONS = ("none", "gradients", "vectors")
SURGERY = ("on", "rank", "steps", "lr", "batch")


@dataclasses.dataclass(frozen=True)
class Method:
    """AdaMerging by "task" or "tensor", on TIES-processed vectors or not, behind a trust region or not."""

    label: str
    by: str
    ties: bool
    region: str


@dataclasses.dataclass(frozen=True)
class AdaPlan:
    """A checked config of this job; `usual` holds what every experiment has.

    adapt_on: the split whose inputs are adapted to, without labels. surgery: fields of `SURGERY`; `on` names methods.
    """

    usual: Plan
    vectors: str
    methods: tuple[Method, ...]
    adapt_on: str
    steps: int
    lr: float
    batch: int
    batches: int
    value: float
    store: str
    quantile: float
    exemplars: int
    density: float
    baselines: tuple[str, ...]
    surgery: dict[str, Any]
    split: str = "train"
    loss: str = "cross_entropy"
    reduce: str = "mean_abs"


def adamerging_plan(config: Any) -> AdaPlan:
    """The checked config; ValueError with one sentence for a slip in it."""
    given = dict(planning.plain(config))
    own, vectors = given.pop("adamerging", None), given.pop("vectors", "")
    if given.pop("job", None) != "adamerging" or not isinstance(own, dict):
        raise ValueError('this job needs job="adamerging" and a group of fields called adamerging')
    usual = planning.plan(given)
    planning.known(own, FIELDS, "adamerging", complete=True)
    adapt_on = choice("adapt_on", own["adapt_on"], ("val", "test"))
    need, have = own["batch"] * own["batches"], usual.examples[adapt_on]
    if need > have:
        raise ValueError(f"a step takes {need} inputs of each task (batch · batches); the {adapt_on} split has {have}")
    methods = tuple(_method(dict(one)) for one in own["methods"])
    baselines = tuple(choice("baselines", name, REGIONS) for name in own["baselines"])
    return AdaPlan(
        usual, study.check_vectors(vectors), methods, adapt_on, _count("steps", own["steps"]),
        within("lr", own["lr"], 0, 1, open_low=True), own["batch"], own["batches"],
        within("value", own["value"], 0, 1), choice("store", own["store"], STORES), share("quantile", own["quantile"]),
        _count("exemplars", own["exemplars"]), share("density", own["density"]), baselines,
        _surgery(dict(own["surgery"]), [one.label for one in methods], baselines))


def _method(one: dict) -> Method:
    planning.known(one, ("label", "by", "ties", "region"), "a method", complete=True)
    return Method(str(one["label"]), choice("by", one["by"], ("task", "tensor")), bool(one["ties"]),
                  choice("region", one["region"], REGIONS))


def _surgery(given: dict, labels, baselines) -> dict:
    planning.known(given, SURGERY, "surgery", complete=True)
    known = [*labels, *map(baseline_label, baselines)]
    for name in given["on"]:
        choice("surgery on", name, tuple(known))
    return {**given, "rank": _count("rank", given["rank"]), "steps": _count("steps", given["steps"])}


def baseline_label(region: str) -> str:
    """The name of task arithmetic behind a region."""
    return {"none": "task arithmetic", "gradients": "TATR", "vectors": "zero-shot TATR"}[region]


def _count(name: str, value) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is an integer of at least 1; got {value!r}")
    return value
