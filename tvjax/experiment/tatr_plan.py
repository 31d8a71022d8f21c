"""What a study of trust regions is to do: the usual plan and a group `tatr` of the fields `FIELDS`, all checked."""
import dataclasses
from typing import Any

from tvjax.calibration.exemplars import LOSSES
from tvjax.calibration.gradients import REDUCTIONS
from tvjax.experiment import planning, study
from tvjax.experiment.planning import Merge, Plan
from tvjax.merging.checks import choice, share, within

FIELDS = ("bases", "loss", "reduce", "split", "exemplars", "quantile", "few", "sources", "pairs", "removals",
          "multipliers", "quantiles", "counts", "draws", "conflicts", "statistics")
STATISTICS = ("fisher", "regmean", "regmean++")


@dataclasses.dataclass(frozen=True)
class TatrPlan:
    """A checked config of this job; `usual` holds what every experiment has.

    bases: merges in front of which regions go. loss, reduce, split, exemplars, quantile: of the region of the main
    table. few: the grid of α of all ablations. sources: other (loss, reduce) pairs. pairs, conflicts: 1 where those
    studies are wanted. statistics: methods with statistics of their own, each on so many inputs a task.
    """

    usual: Plan
    vectors: str
    bases: tuple[Merge, ...]
    loss: str
    reduce: str
    split: str
    exemplars: int
    quantile: float
    few: tuple[float, ...]
    sources: tuple[tuple[str, str], ...]
    pairs: tuple[float, ...]
    removals: tuple[float, ...]
    multipliers: tuple[float, ...]
    quantiles: tuple[float, ...]
    counts: tuple[int, ...]
    draws: int
    conflicts: tuple[str, ...]
    statistics: dict[str, int]


def tatr_plan(config: Any) -> TatrPlan:
    """The checked config; ValueError with one sentence for a slip in it."""
    given = dict(planning.plain(config))
    own, vectors = given.pop("tatr", None), given.pop("vectors", "")
    if given.pop("job", None) != "tatr" or not isinstance(own, dict):
        raise ValueError('this job needs job="tatr" and a group of fields called tatr')
    usual = planning.plan(given)
    planning.known(own, FIELDS, "tatr", complete=True)
    split = choice("split", own["split"], ("train", "val"))
    most = usual.examples[split]
    if bad := [n for n in (own["exemplars"], *own["counts"], *own["statistics"].values()) if not 0 < n <= most]:
        raise ValueError(f"exemplars are from 1 to the {most} examples of the {split} split; got {bad[0]}")
    return TatrPlan(
        usual, study.check_vectors(vectors), bases(own["bases"], planning._scales(given["scales"])),
        *_source(own["loss"], own["reduce"]), split, own["exemplars"], share("quantile", own["quantile"]),
        planning._scales(own["few"]), tuple(_source(*pair) for pair in own["sources"]),
        tuple(share("pairs", q) for q in own["pairs"]),
        tuple(within("removals", x, 0, 1, open_high=True) for x in own["removals"]),
        tuple(float(x) for x in own["multipliers"]), tuple(share("quantiles", q) for q in own["quantiles"]),
        tuple(own["counts"]), int(own["draws"]), tuple(choice("conflicts", x, ("base", "region"))
                                                       for x in own["conflicts"]),
        {choice("statistics", name, STATISTICS): count for name, count in own["statistics"].items()})


def bases(given, scales) -> tuple[Merge, ...]:
    """Merges that take the region's task vectors; each searches α."""
    if not given:
        raise ValueError("bases is empty: name at least one merge that goes behind the trust region")
    found = tuple(planning._merge(dict(one), scales) for one in given)
    for one in found:
        if one.searches_lambda:
            raise ValueError(f"{one.label}: a merge behind a trust region has λ fixed; leave lam='val' out")
    return found


def _source(loss: str, reduce: str) -> tuple[str, str]:
    known = tuple(name for name in REDUCTIONS if name != "mean_square")
    return choice("loss", loss, LOSSES[:2]), choice("reduce", reduce, known)
