"""What a job of compression and Consensus is to do: the usual plan, and the fields of its own, checked beforehand.

Beside the fields of `planning` a config has `job="tall"`, `vectors` (the folder of another run whose task vectors may
be used, or "") and `tall`, a group of the fields `FIELDS` and perhaps of `OPTIONAL`.
"""
import dataclasses
import math
from typing import Any, NamedTuple

from tvjax import adapters, compression, tree
from tvjax.experiment import adapted, orders, planning, study
from tvjax.experiment.planning import Merge, Plan
from tvjax.merging.checks import within

FIELDS = ("bases", "lams", "comparator", "ks", "codecs", "curve", "nonoverlap")
OPTIONAL: dict[str, Any] = {"adapter": {}, "save": False}  # {} for the network's own weights; the codecs' files
CURVE = ("counts", "orders", "seeds")


class Base(NamedTuple):
    """A merged vector on which masks act: a merge at scale 1, and the k of its Consensus."""

    merge: Merge
    k: int

    @property
    def label(self) -> str:
        return self.merge.label


class Coded(NamedTuple):
    """A row of the compression table: a codec by name."""

    label: str
    name: str
    options: dict


@dataclasses.dataclass(frozen=True)
class TallPlan:
    """A checked config of this job; `usual` holds what every experiment has.

    adapter: what is fine-tuned in place of the weights, such as (IA)³. save: whether encoded task vectors stay on disk.
    """

    usual: Plan
    vectors: str
    bases: tuple[Base, ...]
    lams: tuple[float, ...]
    comparator: str
    ks: tuple[int, ...]
    codecs: tuple[Coded, ...]
    scales: tuple[float, ...]
    curve_counts: tuple[int, ...]
    curve_orders: tuple[str, ...]
    curve_seeds: tuple[int, ...]
    nonoverlap: tuple[int, ...]
    adapter: adapters.Method | None = None
    save: bool = False


def tall_plan(config: Any) -> TallPlan:
    """The checked config; ValueError with one sentence for a slip in it."""
    given = dict(planning.plain(config))
    own, vectors = given.pop("tall", None), given.pop("vectors", "")
    if given.pop("job", None) != "tall" or not isinstance(own, dict):
        raise ValueError('this job needs job="tall" and a group of fields called tall')
    usual = planning.plan(given)
    own = {**OPTIONAL, **own}
    planning.known(own, (*FIELDS, *OPTIONAL), "tall", complete=True)
    if own["comparator"] not in (">", ">="):
        raise ValueError(f"tall.comparator is '>' or '>='; got {own['comparator']!r}")
    planning.known(own["curve"], CURVE, "tall.curve", complete=True)
    counts, wanted, seeds = (tuple(own["curve"][name]) for name in CURVE)
    return TallPlan(
        usual, study.check_vectors(vectors), _bases(own["bases"]), _lams(own["lams"]), own["comparator"],
        _ks(own["ks"]), _codecs(own["codecs"], max(usual.counts)), tuple(float(x) for x in given["scales"]),
        _up_to("tall.curve.counts", counts, len(usual.tasks)),
        _orders(wanted), _some_of("tall.curve.seeds", seeds, usual.seeds),
        _up_to("tall.nonoverlap", own["nonoverlap"], len(usual.tasks)), _adapter(own, usual, vectors),
        bool(own["save"]))


def _adapter(own: dict, usual: Plan, vectors: str) -> adapters.Method | None:
    method = adapted.build(own["adapter"])
    for what, given in (("vectors", vectors), ("finetuned", usual.finetuned), ("tall.nonoverlap", own["nonoverlap"])):
        if method is not None and given:
            raise ValueError(f"{what} is about the network's own weights: leave it empty where tall.adapter is given")
    return method


def _bases(given) -> tuple[Base, ...]:
    if not given:
        raise ValueError("tall.bases is empty: name at least one merge whose vector is masked")
    found = []
    for one in given:
        one = dict(one)
        k = one.pop("k", 2)
        if "scale" in one or "scales" in one:
            raise ValueError("a base of masks is merged at scale 1: leave its scale out")
        if not isinstance(k, int) or k < 0:
            raise ValueError(f"k counts tasks, from 0 on; got {k!r}")
        found.append(Base(planning._merge(one, (1.0,)), k))
    labels = [base.label for base in found]
    if len(set(labels)) < len(labels):
        raise ValueError(f"two bases have the same label: {', '.join(labels)}")
    return tuple(found)


def _lams(values) -> tuple[float, ...]:
    if not values or not all(isinstance(x, (int, float)) and math.isfinite(x) for x in values):
        raise ValueError(f"tall.lams is a list of numbers, λ to choose from; got {values!r}")
    return tuple(float(within("lam", x, 0, float("inf"))) for x in values)


def _ks(values) -> tuple[int, ...]:
    if not all(isinstance(k, int) and k >= 0 for k in values):
        raise ValueError(f"tall.ks holds numbers of tasks, from 0 on; got {values!r}")
    return tuple(sorted(set(values)))


def _codecs(given, tasks: int) -> tuple[Coded, ...]:
    found = []
    for one in given:
        options = dict(one)
        name = str(options.pop("name", ""))
        label = str(options.pop("label", name))
        if set(label) & set('/\\"<>:|?*') or label.startswith("."):
            raise ValueError(f"a codec's label names a directory; {label!r} cannot")
        if name == "tall":
            raise ValueError("TALL-masks are there for every base: leave them out of tall.codecs")
        compression.build_codec(name, options, tasks=tasks)
        found.append(Coded(label, name, options))
    labels = [one.label for one in found]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(f"two codecs are called {twice[0]!r}: give one of them another label")
    return tuple(found)


def _up_to(name: str, values, most: int) -> tuple[int, ...]:
    if bad := [n for n in values if not isinstance(n, int) or not 0 < n <= most]:
        raise ValueError(f"{name} holds numbers of tasks from 1 to {most}; got {bad[0]!r}")
    return tuple(sorted(set(values)))


def _orders(names) -> tuple[str, ...]:
    for name in names:
        if name not in orders.NAMES:
            raise ValueError(f"no order of tasks {name!r}; {tree.did_you_mean(name, orders.NAMES)}")
    return tuple(names)


def _some_of(name: str, values, all_) -> tuple:
    if bad := [x for x in values if x not in all_]:
        raise ValueError(f"{name} holds {bad[0]!r}, which is none of the run's {', '.join(map(str, all_))}")
    return tuple(values)
