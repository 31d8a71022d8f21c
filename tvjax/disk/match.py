"""Which tensor of each model belongs to which of the base, from headers alone; all that does not fit, said at once.

Policies are words, so that a merge states what happens to tensors that only some models have, heads, resized
vocabularies, tied weights and buffers.
"""
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tvjax import tree
from tvjax.disk.deltas import Place
from tvjax.disk.readers import Opened, TensorInfo
from tvjax.merging.checks import choice

PREFIXES = ("model.", "transformer.", "base_model.", "module.", "_orig_mod.", "bert.", "roberta.", "vit.", "gpt_neox.")
HEADS = re.compile(r"(^|\.)(classifier|classification_head|score|qa_outputs|cls|pooler|head|fc_norm|visual_projection"
                   r"|text_projection|lm_head|embed_out|logit_scale|seq_relationship|pre_classifier)(\.|$)")
INPUTS = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|shared|embed_in|tok_embeddings|token_embedding)\.weight$")
OUTPUTS = re.compile(r"(^|\.)(lm_head|embed_out|output)\.weight$")
POLICIES: dict[str, tuple[str, ...]] = {
    "missing": ("refuse", "base"), "extra": ("refuse", "ignore"), "heads": ("base", "refuse"),
    "vocabulary": ("refuse", "base", "backbone", "union")}
INTEGERS = "copied from the base: integers and flags"
NARROW = ("float8_e4m3fn", "float8_e5m2")


class Matched(NamedTuple):
    """What the headers say.

    merged: the base's names to merge. places: for each model {the base's name: Place}. copied: {name: why the base's
    own tensor is taken}. left: {model: its tensors that the base lacks}. tied: {name left out: the name it equals}.
    """

    merged: list[str]
    places: list[dict[str, Place]]
    copied: dict[str, str]
    left: dict[str, list[str]]
    tied: dict[str, str]
    prefixes: dict[str, str]
    notes: list[str]
    problems: list[str]


def match(base: Opened, models: Mapping[str, Opened], *, only: str = "", exclude: str = "",
          policies: Mapping[str, str] | None = None) -> Matched:
    """Matches tensors by name; nothing is raised for a misfit, all of them are in `problems`, each with its remedy.

    only, exclude: regular expressions; other tensors are the base's own. policies: missing ("refuse", or take the
    "base" tensor), extra ("refuse" or "ignore"), heads that not all models have (keep the "base"'s or "refuse"),
    vocabulary ("refuse"; "base" merges the rows that the base has; "backbone" keeps the base's embeddings; "union" is
    what `vocabularies` makes of them before).
    """
    chosen = {name: allowed[0] for name, allowed in POLICIES.items()} | _checked(policies or {})
    found = Matched([], [], {}, {}, {}, {}, [], [])
    if not base.tensors:
        found.problems.append(f"{base.where} holds no tensor")
    found.tied.update(_tied(base, models, found.problems))
    for name, info in base.tensors.items():
        if name not in found.tied:
            _sort_in(found, name, info, _pattern("only", only), _pattern("exclude", exclude))
    for label, model in models.items():
        places = _match_one(found, chosen, base, label, model)
        found.places.append(places)
    found.merged[:] = sorted((n for n in found.merged if n not in found.copied), key=tree.natural)
    for places in found.places:
        for name in [name for name in places if name in found.copied]:
            del places[name]
    if not found.merged and not found.problems:
        found.problems.append("there is nothing to merge: no floating-point tensor is in all models")
    return found


def _checked(policies: Mapping[str, str]) -> dict[str, str]:
    for name, value in policies.items():
        if name not in POLICIES:
            raise ValueError(f"no policy {name!r}; {tree.did_you_mean(name, list(POLICIES))}")
        choice(name, value, POLICIES[name])
    return dict(policies)


def _pattern(name: str, pattern: str) -> re.Pattern | None:
    try:
        return re.compile(pattern) if pattern else None
    except re.error as error:
        raise ValueError(f"{name} is no regular expression: {pattern!r} ({error})") from None


def is_float(info: TensorInfo) -> bool:
    return info.dtype.kind == "f" or info.dtype.name in ("bfloat16", *NARROW)


def _sort_in(found: Matched, name: str, info: TensorInfo, only, exclude) -> None:
    if not is_float(info):
        found.copied[name] = INTEGERS
    elif only and not only.search(name):
        found.copied[name] = "copied from the base: not in `only`"
    elif exclude and exclude.search(name):
        found.copied[name] = "copied from the base: excluded"
    else:
        found.merged.append(name)
        if info.dtype.name in NARROW:
            found.problems.append(f"{name} of the base is quantised ({info.dtype.name}): load and save the model in "
                                  "bfloat16 first")


def _match_one(found: Matched, policies, base: Opened, label: str, model: Opened) -> dict[str, Place]:
    rename, found.prefixes[label] = _renaming(base, model)
    places: dict[str, Place] = {}
    missing, shapes = [], []
    for name in found.merged:
        theirs = rename(name)
        if theirs not in model.tensors:
            missing.append(name)
            continue
        ours, other = base.tensors[name], model.tensors[theirs]
        places[name] = Place(theirs, ours.size)
        if other.shape != ours.shape:
            places[name] = Place(theirs, min(ours.size, other.size))
            shapes.append(name)
        elif not is_float(other) or other.dtype.name in NARROW:
            found.problems.append(f"{theirs} of {label} is of dtype {other.dtype.name}, the base's of "
                                  f"{ours.dtype.name}: load a quantised model and save it in bfloat16 first")
    _missing(found, policies, base, label, model, missing)
    _shapes(found, policies, base, label, model, places, shapes)
    _extra(found, policies, base, label, model, rename)
    return places


def _renaming(base: Opened, model: Opened):
    """How the base's names become the model's: by adding or taking away the prefix under which most names agree."""
    ways = {"": lambda name: name}
    for prefix in PREFIXES:
        ways[f"+{prefix}"] = lambda name, prefix=prefix: prefix + name
        ways[f"-{prefix}"] = lambda name, prefix=prefix: name.removeprefix(prefix)
    agree = {way: sum(rename(name) in model.tensors for name in base.tensors) for way, rename in ways.items()}
    best = max(ways, key=lambda way: agree[way])  # the first of equals: no prefix
    if not best:
        return ways[""], ""
    rename = ways[best]
    return (lambda name: rename(name) if rename(name) in model.tensors else name), best


def _missing(found: Matched, policies, base: Opened, label: str, model: Opened, missing: Sequence[str]) -> None:
    heads = [name for name in missing if HEADS.search(name) and policies["heads"] == "base"]
    for name in heads:
        found.copied.setdefault(name, "copied from the base: a head that not all models have")
    rest = [name for name in missing if name not in heads and name not in found.copied]
    if rest and policies["missing"] == "base":
        found.copied.update(dict.fromkeys(rest, "copied from the base: not all models have it"))
    elif rest:
        found.problems.append(f"{label} lacks {tree.listing(rest)}, which the base has (missing=base keeps the base's)"
                              + _kinds(base, model))


def _shapes(found, policies, base, label, model, places, names) -> None:
    bad = []
    for name in names:
        ours, theirs = base.tensors[name].shape, model.tensors[places[name].name].shape
        rows = len(ours) == len(theirs) == 2 and ours[1:] == theirs[1:]
        said = f"{name} {list(theirs)} vs {list(ours)}"
        if rows and (INPUTS.search(name) or OUTPUTS.search(name)):
            _vocabulary(found, policies["vocabulary"], label, name, theirs[0], ours[0])
        elif HEADS.search(name) and policies["heads"] == "base":
            found.copied.setdefault(name, "copied from the base: a head of another shape in some models")
        else:
            bad.append(said)
    if bad:
        found.problems.append(f"{label} is of another architecture or size: {tree.listing(bad)} in the base"
                              f" (exclude={re.escape(names[0])!r} would keep the base's)")


def _vocabulary(found, policy, label, name, theirs: int, ours: int) -> None:
    if policy == "refuse":
        found.problems.append(f"{name} has {theirs} rows in {label}, {ours} in the base: other vocabulary or padding "
                              "(vocabulary=base merges the base's rows, vocabulary=backbone keeps its embeddings, "
                              "vocabulary=union takes the tokens of all)")
    elif policy == "backbone":
        found.copied.setdefault(name, "copied from the base: embeddings of another length in some models")
    else:
        found.notes.append(f"{name}: {label} has {theirs} rows, the base {ours}; the base's are kept")


def _extra(found, policies, base, label, model, rename) -> None:
    used = {rename(name) for name in base.tensors}
    extra = sorted((name for name in model.tensors if name not in used), key=tree.natural)
    if extra:
        found.left[label] = extra
    heads = [name for name in extra if HEADS.search(name)] if policies["heads"] == "base" else []
    alien = [name for name in extra if is_float(model.tensors[name]) and name not in heads]
    if alien and policies["extra"] == "refuse":
        found.problems.append(f"{label} has {tree.listing(alien)}, which the base lacks (extra=ignore leaves them out)")


def _kinds(base: Opened, model: Opened) -> str:
    """What the configurations say where they say different things."""
    ours, theirs = base.config.get("model_type"), model.config.get("model_type")
    return f"; the base is a {ours}, the model a {theirs}" if ours and theirs and ours != theirs else ""


# ---------------------------------------------------------------- tied weights
def _tied(base: Opened, models: Mapping[str, Opened], problems: list[str]) -> dict[str, str]:
    """{output embedding: the input embedding it equals}, where the base ties them and its file has both."""
    inputs = [name for name in base.tensors if INPUTS.search(name)]
    outputs = [name for name in base.tensors if OUTPUTS.search(name)]
    if len(inputs) != 1 or len(outputs) != 1 or not ties(base):
        return {}
    untied = [label for label, model in models.items() if model.config and not ties(model)]
    if untied:
        problems.append(f"the base ties {outputs[0]} to {inputs[0]}, {tree.listing(untied)} does not: save all models "
                        "tied or all untied")
    return {outputs[0]: inputs[0]}


def ties(model: Opened) -> bool:
    """Whether a model's configuration says that input and output embeddings are one tensor."""
    config: Mapping[str, Any] = model.config.get("text_config") or model.config
    return bool(config.get("tie_word_embeddings", False))


def check_tied(tied: Mapping[str, str], checkpoint: Opened, label: str, block: int = 1 << 20) -> None:
    """Raises where a checkpoint holds two tensors for one that its configuration ties, and they differ."""
    for name, other in tied.items():
        if name not in checkpoint.tensors or other not in checkpoint.tensors:
            continue
        size = checkpoint.tensors[name].size
        for start in range(0, size, block):
            stop = min(start + block, size)
            if not np.array_equal(checkpoint.read(name, start, stop), checkpoint.read(other, start, stop)):
                raise ValueError(f"{label} says that {name} and {other} are tied, but its file holds different ones: "
                                 "set tie_word_embeddings to false in its config.json, or save it anew")
