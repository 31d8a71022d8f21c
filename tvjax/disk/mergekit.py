"""mergekit's YAML as a recipe of ours; what cannot be had here is said in one sentence, with its place in the file."""
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tvjax import tree
from tvjax.disk.readers import open_checkpoint
from tvjax.disk.recipe import Recipe
from tvjax.merging import compat
from tvjax.merging.peers import ROWS
from tvjax.merging.shorthand import spelt

KEYS = ("merge_method", "base_model", "models", "slices", "parameters", "dtype", "out_dtype", "tokenizer_source",
        "tokenizer", "chat_template", "modules")
EACH = ("weight", "density", "epsilon", "gamma")  # numbers that each model may have of its own


def from_mergekit(given: Mapping[str, Any], what: str = "the recipe") -> Recipe:
    """The recipe of a mergekit configuration; relative paths are meant from the working directory, as there.

    It is computed in float32 (float64 if `dtype` says so) and written in `out_dtype`, else `dtype`, else the base's.
    """
    _check_keys(given, KEYS, what)
    method = str(given["merge_method"])
    compat.acts_on("mergekit", method)  # says what there is where the name is mistyped
    base = _reference(given["base_model"], f"base_model of {what}") if given.get("base_model") else ""
    inputs = _inputs(given, what, base)
    zero = compat.acts_on("mergekit", method, base=bool(base)) == "models"
    inputs = _with_base(inputs, base, method, zero, what)
    _check_tokenizer(given, base or inputs[0][0], what)
    models = _labels([model for model, _ in inputs], what)
    own = dict(zip(models, [numbers for _, numbers in inputs], strict=True))
    numbers = _numbers(method, given.get("parameters") or {}, own, what)
    ours, options = compat.translate("mergekit", method, numbers)
    dtype, out = (str(given.get(name) or "").removeprefix("torch.") for name in ("dtype", "out_dtype"))
    return Recipe(base=base or inputs[0][0], models=models, method=ours, options=spelt(options),
                  origin="zero" if zero else "base", out_dtype=out or dtype or "base",
                  vocabulary="union" if "union" in _sources(given) else "refuse",
                  compute_dtype="float64" if dtype == "float64" else "float32")


# ---------------------------------------------------------------- models
def _inputs(given: Mapping[str, Any], what: str, base: str) -> list[tuple[str, dict[str, Any]]]:
    """[(model, its own numbers)], from `models` or from slices that cover all layers."""
    if given.get("modules"):
        raise ValueError(f"modules in {what} cannot be had here: merge all tensors with models, or some with `only`")
    if bool(given.get("models")) == bool(given.get("slices")):
        raise ValueError(f"{what} needs either models or slices")
    entries, where = given.get("models"), f"models of {what}"
    if given.get("slices"):
        entries, where = _uncut(given["slices"], f"slices of {what}"), f"sources in {what}"
    found = []
    for i, entry in enumerate(_listed(entries, where)):
        at = f"{where}, entry {i + 1}"
        entry = {"model": entry} if isinstance(entry, str) else entry
        _check_keys(entry, ("model", "parameters"), at)
        if "model" not in entry:
            raise ValueError(f"{at}: it lacks model")
        own = entry.get("parameters") or {}
        if not isinstance(own, Mapping):
            raise ValueError(f"{at}: parameters maps names to numbers")
        found.append((_reference(entry["model"], at, base), dict(own)))
    return found


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


def _uncut(slices: Any, where: str) -> list[dict[str, Any]]:
    """The sources of slices that give all layers of all models, one after the other, with the same numbers."""
    sources: list[list[dict[str, Any]]] = []
    at = 0
    for part in _listed(slices, where):
        _check_keys(part, ("sources",), where)
        ranges, plain = [], []
        for source in _listed(part.get("sources"), where):
            _check_keys(source, ("model", "layer_range", "parameters"), where)
            ranges.append(source.get("layer_range"))
            plain.append({name: value for name, value in source.items() if name != "layer_range"})
        first = ranges[0]
        fine = isinstance(first, list) and len(first) == 2 and all(isinstance(n, int) for n in first)
        if not fine or any(one != first for one in ranges) or first[0] != at or (sources and plain != sources[0]):
            raise ValueError(f"{where} {_CUT}")
        at = first[1]
        sources.append(plain)
    there = _layers(sources[0][0].get("model"), where)
    if at != there:
        raise ValueError(f"{where} {_CUT}: they end at layer {at}, the first model has {there}")
    return sources[0]


_CUT = ("reorder, repeat or leave out layers, or differ in their numbers, which cannot be had here: give models, or "
        "the same sources for all layers (numbers that vary by depth are gradients, [0, 0.5, 1])")


def _layers(model: Any, where: str) -> int:
    opened = open_checkpoint(_reference(model, where))
    blocks = [found for found in map(tree.block, opened.tensors) if found]
    opened.close()
    return 1 + max((number for _, number in blocks), default=-1)


def _with_base(inputs, base: str, method: str, zero: bool, what: str):
    """The models that the method combines: without the base where it combines differences, with it otherwise."""
    if not zero:
        if not base:
            raise ValueError(f"{what} lacks base_model, which {method} takes differences from")
        inputs = [(model, own) for model, own in inputs if model != base]
    elif base and method == "slerp":
        inputs = [*((m, own) for m, own in inputs if m == base), *((m, own) for m, own in inputs if m != base)]
        inputs = inputs if inputs[0][0] == base else [(base, {}), *inputs]
    elif base and base not in dict(inputs):
        inputs = [*inputs, (base, {})]
    if not inputs:
        raise ValueError(f"{what} names no model but the base")
    if method == "slerp" and (not base or len(inputs) != 2):
        raise ValueError(f"slerp goes from base_model to one other model; {what} has "
                         f"{'' if base else 'no base_model and '}{len(inputs)} models")
    return inputs


# ---------------------------------------------------------------- numbers
def _numbers(method: str, everywhere: Any, own: Mapping[str, Mapping[str, Any]], what: str) -> dict[str, Any]:
    """The options as `compat.translate` takes them: what a model has itself goes before what all have."""
    row = ROWS["mergekit"][method]
    if not isinstance(everywhere, Mapping):
        raise ValueError(f"parameters of {what} map names to numbers")
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
