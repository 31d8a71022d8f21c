"""mergekit's YAML as a recipe of ours; what cannot be had here is said in one sentence, with its place in the file."""
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tvjax import tree
from tvjax.disk import cuts
from tvjax.disk.readers import open_checkpoint
from tvjax.disk.recipe import Recipe
from tvjax.disk.slices import layers
from tvjax.merging import compat
from tvjax.merging.peers import ROWS
from tvjax.merging.shorthand import spelt

KEYS = ("merge_method", "base_model", "models", "slices", "parameters", "dtype", "out_dtype", "tokenizer_source",
        "tokenizer", "chat_template", "modules")
EACH = ("weight", "density", "epsilon", "gamma", "scale")  # numbers that each model may have of its own


def from_mergekit(given: Mapping[str, Any], what: str = "the recipe") -> Recipe:
    """The recipe of a mergekit configuration; relative paths are meant from the working directory, as there.

    It is computed in float32 (float64 if `dtype` says so) and written in `out_dtype`, else `dtype`, else the base's.
    """
    _check_keys(given, KEYS, what)
    method = str(given["merge_method"])
    compat.acts_on("mergekit", method)  # says what there is where the name is mistyped
    base = _reference(given["base_model"], f"base_model of {what}") if given.get("base_model") else ""
    zero = compat.acts_on("mergekit", method, base=bool(base)) == "models"
    if not zero and not base:
        raise ValueError(f"{what} lacks base_model, which {method} takes differences from")
    found = _combined(given, what, base, method, zero)
    under = base or next(iter(found.labels.values()))
    _check_tokenizer(given, under, what)
    numbers = _numbers(method, found.everywhere, found.own, what)
    ours, options = compat.translate("mergekit", method, numbers)
    dtype, out = (str(given.get(name) or "").removeprefix("torch.") for name in ("dtype", "out_dtype"))
    return Recipe(base=under, models=found.labels, method=ours, options=spelt(options), slices=found.slices,
                  origin="zero" if zero else "base", out_dtype=out or dtype or "base",
                  vocabulary="union" if "union" in _sources(given) else "refuse",
                  compute_dtype="float64" if dtype == "float64" else "float32")


# ---------------------------------------------------------------- models
def _combined(given: Mapping[str, Any], what: str, base: str, method: str, zero: bool) -> cuts.Cut:
    """The models, from `models` or from slices, with their numbers and those of the whole merge."""
    if given.get("modules"):
        raise ValueError(f"modules in {what} cannot be had here: merge all tensors with models, or some with `only`")
    if bool(given.get("models")) == bool(given.get("slices")):
        raise ValueError(f"{what} needs either models or slices")
    everywhere = _mapping(given.get("parameters"), what)
    if given.get("models"):
        entries = enumerate(_listed(given["models"], f"models of {what}"))
        inputs = [_entry(entry, base, f"models of {what}, entry {i + 1}") for i, entry in entries]
    else:
        slices = _slices(given["slices"], f"slices of {what}", base)
        prefix, count = _layers(slices[0].sources[0].model)
        inputs = cuts.uncut(slices, count, everywhere)
        if inputs is None:
            found = cuts.cut(slices, everywhere, base=base, differences=not zero, each=EACH, prefix=prefix,
                             preset=ROWS["mergekit"][method].preset, where=f"slices of {what}")
            _check_count(method, base, list(found.labels.values()), what)
            return found
    inputs = _with_base(inputs, base, method, zero, what)
    labels = _labels([model for model, _ in inputs], what)
    own = dict(zip(labels, [numbers for _, numbers in inputs], strict=True))
    return cuts.Cut(labels, own, everywhere, [])


def _entry(entry: Any, base: str, at: str, known: Sequence[str] = ("model", "parameters")) -> tuple[str, dict]:
    """(a model, its own numbers)."""
    entry = {"model": entry} if isinstance(entry, str) else entry
    _check_keys(entry, known, at)
    if "model" not in entry:
        raise ValueError(f"{at}: it lacks model")
    return _reference(entry["model"], at, base), _mapping(entry.get("parameters"), at)


def _mapping(given: Any, at: str) -> dict[str, Any]:
    if not isinstance(given or {}, Mapping):
        raise ValueError(f"parameters of {at} map names to numbers")
    return dict(given or {})


def _slices(given: Any, where: str, base: str) -> list[cuts.Slice]:
    found = []
    for i, one in enumerate(_listed(given, where)):
        at = f"{where}, entry {i + 1}"
        _check_keys(one, ("sources", "parameters"), at)
        sources = [_source(source, base, f"{at}, source {j + 1}") for j, source in enumerate(
            _listed(one.get("sources"), f"sources of {at}"))]
        if len({source.last - source.first for source in sources}) > 1:
            raise ValueError(f"{at}: its sources have other numbers of layers")
        found.append(cuts.Slice(sources, _mapping(one.get("parameters"), at)))
    return found


def _source(given: Any, base: str, at: str) -> cuts.Source:
    model, own = _entry(given, base, at, ("model", "layer_range", "parameters"))
    part = given.get("layer_range") if isinstance(given, Mapping) else None
    if not isinstance(part, list) or [type(n) for n in part] != [int, int] or not 0 <= part[0] < part[1]:
        raise ValueError(f"{at}: layer_range is [first, last], layers from first up to and without last; got {part!r}")
    return cuts.Source(model, part[0], part[1], own)


def _reference(given: Any, at: str, base: str = "") -> str:
    """mergekit's name of a model as ours: `path`, `owner/name@revision`, or `base+adapter`, which is the adapter."""
    if isinstance(given, Mapping):
        _check_keys(given, ("model", "lora"), at)
        parts = [given.get("model"), given.get("lora")]
        parts = [f"{one['path']}@{one['revision']}" if one.get("revision") else one.get("path")
                 if isinstance(one, Mapping) else one for one in (p or {} for p in parts)]
        given = "+".join(str(one) for one in parts if one)
    if not isinstance(given, str) or not given:
        raise ValueError(f"{at}: a model is a path or a name on the hub; got {given!r}")
    model, plus, adapter = given.partition("+")
    if not plus or os.path.exists(given):
        return given.rstrip("/") or given
    if model.rstrip("/") != base:
        raise ValueError(f"{at}: the adapter {adapter} is to be fused with {model}, here only with base_model: fuse it "
                         "with peft's merge_and_unload, and give that")
    return adapter


def _labels(models: Sequence[str], what: str) -> dict[str, str]:
    """{task: model}, called by the last part of the path where that is enough."""
    if twice := sorted({model for model in models if models.count(model) > 1}):
        raise ValueError(f"{what} names {tree.listing(twice)} more than once: give it one weight, their sum")
    last = [model.rpartition("/")[2] for model in models]
    return dict(zip(last if len(set(last)) == len(last) else models, models, strict=True))


def _layers(model: str) -> tuple[str, int]:
    opened = open_checkpoint(model)
    try:
        return layers(opened)
    finally:
        opened.close()


def _with_base(inputs, base: str, method: str, zero: bool, what: str):
    """The models that the method combines: without the base where it combines differences, with it otherwise."""
    if not zero:
        inputs = [(model, own) for model, own in inputs if model != base]
    elif base and method == "slerp":
        inputs = [*((m, own) for m, own in inputs if m == base), *((m, own) for m, own in inputs if m != base)]
        inputs = inputs if inputs[0][0] == base else [(base, {}), *inputs]
    elif base and base not in dict(inputs):
        inputs = [*inputs, (base, {})]
    if not inputs:
        raise ValueError(f"{what} names no model but the base")
    _check_count(method, base, [model for model, _ in inputs], what)
    return inputs


def _check_count(method: str, base: str, models: Sequence[str], what: str) -> None:
    if method == "slerp" and (not base or base not in models or len(models) != 2):
        raise ValueError(f"slerp goes from base_model to one other model; {what} has "
                         f"{'' if base else 'no base_model and '}{len(models)} models")
    if method == "passthrough" and len(models) > 1:
        raise ValueError(f"passthrough takes one model at a time; {what} has {len(models)} side by side")


# ---------------------------------------------------------------- numbers
def _numbers(method: str, everywhere: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]],
             what: str) -> dict[str, Any]:
    """The options as `compat.translate` takes them: what a model has itself goes before what all have."""
    row = ROWS["mergekit"][method]
    found = dict(everywhere)
    for option in dict.fromkeys(name for numbers in own.values() for name in numbers):
        if option not in EACH and option in row.takes:
            raise ValueError(f"{option} in {what} holds for the whole merge: move it to the parameters at the end")
        default = found.get(option, row.preset.get(option))
        each = {model: numbers.get(option, default) for model, numbers in own.items()}
        if option in row.takes and (without := [model for model, value in each.items() if value is None]):
            raise ValueError(f"{tree.listing(without)} in {what} {'have' if len(without) > 1 else 'has'} no {option}")
        found[option] = each
    return found


# ---------------------------------------------------------------- the rest
def _check_tokenizer(given: Mapping[str, Any], base: str, what: str) -> None:
    tokenizer = given.get("tokenizer") or {}
    _check_keys(tokenizer, ("source",), f"tokenizer of {what}")
    for name, source in (("tokenizer_source", given.get("tokenizer_source")), ("tokenizer", tokenizer.get("source"))):
        if source not in (None, "base", "union", base):
            raise ValueError(f"{name} of {what} is {source!r}: here the base's tokenizer is kept, or the tokens of all "
                             "are taken: leave it out, or set it to base or union")
    if given.get("chat_template"):
        raise ValueError(f"chat_template of {what}: here the base's is kept; leave it out")


def _sources(given: Mapping[str, Any]) -> list[Any]:
    return [given.get("tokenizer_source"), (given.get("tokenizer") or {}).get("source")]


def _check_keys(given: Any, known: Sequence[str], at: str) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(f"{at}: {str(given)[:60]!r} stands where names and values belong")
    for name in given:
        if name not in known:
            raise ValueError(f"{at} has no {name!r}; {tree.did_you_mean(str(name), list(known))}")


def _listed(given: Any, at: str) -> list[Any]:
    if not isinstance(given, list) or not given:
        raise ValueError(f"{at}: a list is needed")
    return given
