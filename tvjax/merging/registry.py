"""Methods by name, as configurations call them, with their hyper-parameters checked before anything is computed."""
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tvjax import tree
from tvjax.merging import compat as compat_module
from tvjax.merging import selection, shorthand
from tvjax.merging.averaging import average, task_arithmetic, weigh
from tvjax.merging.cores import core_space, dc_merge, knots
from tvjax.merging.dropping import dare, dare_ties, della, della_linear
from tvjax.merging.magnitude import breadcrumbs, breadcrumbs_ties, emr, magmax, pcb
from tvjax.merging.masks import consensus
from tvjax.merging.metric import actmat, aswudi, fisher, regmean, swudi, wudi
from tvjax.merging.operator import Operator
from tvjax.merging.signs import ties
from tvjax.merging.spectral import cart, iso_c, iso_cts, svc, tsv_m
from tvjax.merging.spherical import karcher, model_stock, multi_slerp, nuslerp, slerp
from tvjax.merging.stitching import localize_and_stitch
from tvjax.merging.tools import sce, truncate
from tvjax.merging.trust import tatr, tatr_zero_shot
from tvjax.merging.weighting import lines, metagpt, nan

METHODS: dict[str, Callable[..., Operator]] = {
    "average": average,
    "task_arithmetic": task_arithmetic,
    "ties": ties,
    "consensus": consensus,
    "dare": dare,
    "dare_ties": dare_ties,
    "della": della,
    "della_linear": della_linear,
    "breadcrumbs": breadcrumbs,
    "breadcrumbs_ties": breadcrumbs_ties,
    "magmax": magmax,
    "emr": emr,
    "pcb": pcb,
    "slerp": slerp,
    "nuslerp": nuslerp,
    "multi_slerp": multi_slerp,
    "karcher": karcher,
    "model_stock": model_stock,
    "sce": sce,
    "metagpt": metagpt,
    "nan": nan,
    "lines": lines,
    "tsv_m": tsv_m,
    "iso_c": iso_c,
    "iso_cts": iso_cts,
    "cart": cart,
    "svc": svc,
    "dc_merge": dc_merge,
    "knots": knots,
    "core_space": core_space,
    "wudi": wudi,
    "actmat": actmat,
    "swudi": swudi,
    "aswudi": aswudi,
    "regmean": regmean,
    "fisher": fisher,
    "tatr": tatr,
    "tatr_zero_shot": tatr_zero_shot,
    "localize_and_stitch": localize_and_stitch,
}


EVERYWHERE = ("exclude", "averaged", "weights", "truncate")


def build(name: str, options: Mapping[str, Any] | None = None, *, compat: str | None = None) -> Operator:
    """The operator of a method by name; a slip in the name or in an option is answered by what there is.

    options: the method's own, whose numbers may be dicts and lists (see `shorthand`), and for every method `exclude`
    (a pattern of leaves that stay θ0), `averaged` (of leaves that are averaged instead, times the method's scale), and
    `weights` (one number for each task; where a method has none of its own, they multiply the task vectors before it),
    and `truncate` (a rank to which merged matrices are cut).
    A method that wraps another takes it as {"name": …, options}.
    compat: "mergekit", "fusionbench" or "peft" fill what is not given as that tool does, "paper" as the papers do.

    >>> build("ties", {"density": 0.1})
    top(share=0.1) | agree(sign=total, zero=majority) | nonzero_mean() | scale(by=1.0)
    >>> build("ties", {"density": 0.1}, compat="fusionbench")
    top(share=0.1) | agree(sign=total, zero=majority) | total() | scale(by=0.3)
    """
    takes = list(inspect.signature(METHODS[known_method(name)]).parameters)
    known = [*takes, *[option for option in EVERYWHERE if option not in takes]]
    options = {k: v for k, v in compat_module.complete(name, options or {}, compat).items() if v is not None}
    if unknown := [option for option in options if option not in known]:
        given, hint = ", ".join(unknown), tree.did_you_mean(unknown[0], known)
        raise ValueError(f"{name} takes {', '.join(known)}; got {given}; {hint}")
    options = {option: _value(option, value) for option, value in options.items()}
    operator = METHODS[name](**{option: value for option, value in options.items() if option in takes})
    return _everywhere(operator, {option: value for option, value in options.items() if option not in takes}, options)


def _value(option, value):
    if isinstance(value, Mapping) and "name" in value:  # a merge inside another
        return build(value["name"], {k: v for k, v in value.items() if k != "name"})
    return shorthand.number(option, value)


def _everywhere(operator, extra, options):
    """What every method takes, around it."""
    if "weights" in extra:
        operator = weigh(weights=extra["weights"]) | operator
    if "truncate" in extra:
        operator = operator | truncate(rank=extra["truncate"])
    if "averaged" in extra:
        operator = selection.averaged(operator, extra["averaged"], scale=options.get("scale", 1.0))
    return selection.exclude(operator, extra["exclude"]) if "exclude" in extra else operator


def known_method(name: str) -> str:
    """`name` if it is a method's."""
    if name not in METHODS:
        raise ValueError(f"no merge called {name!r}; {tree.did_you_mean(name, sorted(METHODS))}")
    return name
