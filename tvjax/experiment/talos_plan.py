"""What a job of sparse fine-tuning is to do: the usual plan, and the fields of its own, checked beforehand.

Beside the fields of `planning` a config has `job="talos"`, `vectors` (the folder of another run whose standard task
vectors may be used, or "") and `talos`, a group of the fields `FIELDS` and perhaps of `OPTIONAL`.
"""
import dataclasses
import math
from typing import Any

from tvjax import adapters, calibration, tree
from tvjax.experiment import planning, study
from tvjax.experiment.planning import Plan

FIELDS = ("methods", "negation", "sweep", "adamerging", "studies")
OPTIONAL: dict[str, Any] = {"rates": ()}  # learning rates from which every method but full chooses its own
STUDIES = ("pruning", "noise", "masks", "localisation", "linear", "cost")
CALIBRATION = {"sparsity": 0.9, "preset": "paper", "rounds": 4, "samples": 1, "batch": 128}  # the rest is the preset's
PRESET = tuple(calibration.PRESETS["paper"])
MASKED = {"sparsity": 0.9, "moments": "chosen", "norm": "chosen"}
ADAPTERS = ("ia3", "lora")  # what is tuned beside the weights and then written into them
METHODS: dict[str, dict[str, Any]] = {  # what they take, with defaults
    "full": {},
    "talos": CALIBRATION,
    "top_sensitivity": CALIBRATION,
    "lota": {**MASKED, "steps": 40, "off": 0.0},
    "random": MASKED,
    "magnitude": MASKED,
    "small_magnitude": MASKED,
    "attention": {"within": calibration.ATTENTION},
    "bitfit": {"within": calibration.BIASES},
    **{name: {field.name: field.default for field in dataclasses.fields(adapters.METHODS[name])} for name in ADAPTERS},
}
COMMON = {"seeds": None, "lr": None, "label": None, "rates": None}


@dataclasses.dataclass(frozen=True)
class Tuning:
    """A way of fine-tuning: a row of the tables. `seeds` are those of the run for which it is done.

    rates: learning rates to choose from on validation data; without any it takes `lr`, or the recipe's.
    """

    label: str
    name: str
    options: dict[str, Any]
    seeds: tuple[int, ...]
    lr: float | None = None
    rates: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class TalosPlan:
    """A checked config of this job; `usual` holds what every experiment has."""

    usual: Plan
    vectors: str
    methods: tuple[Tuning, ...]
    scales: tuple[float, ...]
    threshold: float
    sparsities: tuple[float, ...]
    sweep_seeds: tuple[int, ...]
    adamerging: dict[str, Any]
    studies: tuple[str, ...]
    study_seeds: tuple[int, ...]
    budget: int

    def at(self, sparsity: float) -> Tuning:
        """The first TaLoS of the methods at another sparsity."""
        one = next(one for one in self.methods if one.name == "talos")
        if math.isclose(one.options["sparsity"], sparsity):
            return one
        return dataclasses.replace(one, label=f"{one.label} {100 * sparsity:g} %", seeds=self.sweep_seeds,
                                   options={**one.options, "sparsity": sparsity})


def plan(config: Any) -> TalosPlan:
    """The checked config; ValueError with one sentence for a slip in it."""
    given = dict(planning.plain(config))
    own, vectors = given.pop("talos", None), given.pop("vectors", "")
    if given.pop("job", None) != "talos" or not isinstance(own, dict):
        raise ValueError('this job needs job="talos" and a group of fields called talos')
    usual = planning.plan(given)
    if not usual.control:
        raise ValueError("task negation needs a control task: name one in the field control")
    own = {**OPTIONAL, **own}
    planning.known(own, (*FIELDS, *OPTIONAL), "talos", complete=True)
    methods = tuple(_tuning(dict(one), usual.seeds, own["rates"]) for one in own["methods"])
    labels = [one.label for one in methods]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(f"two methods are called {twice[0]!r}: give one of them another label")
    negation, sweep, studies = (dict(own[name]) for name in ("negation", "sweep", "studies"))
    planning.known(negation, ("scales", "threshold"), "talos.negation", complete=True)
    planning.known(sweep, ("sparsities", "seeds"), "talos.sweep", complete=True)
    planning.known(studies, ("names", "seeds", "budget"), "talos.studies", complete=True)
    if not any(one.name == "talos" for one in methods):
        raise ValueError("talos.methods lacks talos: name it first")
    for sparsity in sweep["sparsities"]:
        calibration.check_sparsity(sparsity)
    return TalosPlan(
        usual, study.check_vectors(vectors), methods, planning._scales(negation["scales"]),
        _threshold(negation["threshold"]), tuple(sorted(sweep["sparsities"])),
        _some("talos.sweep.seeds", sweep["seeds"], usual.seeds), _adamerging(dict(own["adamerging"]), labels),
        _names(studies["names"]), _some("talos.studies.seeds", studies["seeds"], usual.seeds), int(studies["budget"]))


def _tuning(given: dict, seeds, rates=()) -> Tuning:
    name = given.pop("name", None)
    if name not in METHODS:
        raise ValueError(f"no way of fine-tuning called {name!r}; {tree.did_you_mean(str(name), list(METHODS))}")
    more = PRESET if "preset" in METHODS[name] else ()
    planning.known(given, (*METHODS[name], *more, *COMMON), f"the method {name}")
    common = {**COMMON, **{key: given.pop(key) for key in COMMON if key in given}}
    options = {**METHODS[name], **given}
    if "sparsity" in options:
        calibration.check_sparsity(options["sparsity"])
    if "preset" in options:
        preset = calibration.preset(options["preset"])
        options = {**preset, **options}
        if options["score"] not in calibration.SCORES:
            raise ValueError(f"no score {options['score']!r}; "
                             f"{tree.did_you_mean(str(options['score']), list(calibration.SCORES))}")
    label = str(common["label"] or name)
    if set(label) & set('/\\"<>:|?*') or label.startswith("."):
        raise ValueError(f"a method's label names a directory; {label!r} cannot")
    mine = seeds if common["seeds"] is None else _some(f"{label}.seeds", common["seeds"], seeds)
    if name in ADAPTERS:
        adapters.build(name, options)
    return Tuning(label, name, options, tuple(mine), common["lr"], _rates(name, label, common, rates))


def _rates(name: str, label: str, common: dict, usual) -> tuple[float, ...]:
    if name == "full":
        if common["lr"] is not None or common["rates"]:
            raise ValueError("full is standard fine-tuning, whose learning rate is finetune.lr: it takes no other")
        return ()
    rates = usual if common["rates"] is None and common["lr"] is None else common["rates"] or ()
    if bad := [x for x in rates if isinstance(x, (bool, str)) or not 0 < x < math.inf]:
        raise ValueError(f"{label}: learning rates are numbers above 0; got {bad[0]!r}")
    if rates and common["lr"] is not None:
        raise ValueError(f"{label} has a learning rate and rates to choose from: give one of them")
    return tuple(float(x) for x in rates)


def _threshold(value) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"talos.negation.threshold is the share of the control's accuracy to keep; got {value}")
    return float(value)


def _adamerging(given: dict, labels) -> dict[str, Any]:
    planning.known(given, ("methods", "steps", "by", "batch", "seeds"), "talos.adamerging", complete=True)
    _some("talos.adamerging.methods", given["methods"], labels)
    return given


def _names(names) -> tuple[str, ...]:
    for name in names:
        if name not in STUDIES:
            raise ValueError(f"no study {name!r}; {tree.did_you_mean(str(name), STUDIES)}")
    return tuple(names)


def _some(name: str, values, all_) -> tuple:
    if bad := [x for x in values if x not in all_]:
        raise ValueError(f"{name} holds {bad[0]!r}, which is none of {', '.join(map(str, all_))}")
    return tuple(values)
