"""Models stacked of layers of others: reordered, repeated, left out, or taken from several models.

Layer j of a stack is a layer of one of its parts. What stands before the layers (embeddings) comes from the first
part's model, what stands after them (the last norm, heads) from the last one's.
"""
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tvjax import tree
from tvjax.disk.match import HEADS
from tvjax.disk.readers import Opened, TensorInfo

BEFORE = r"embed(?!_out)|wte|wpe|word_emb|(^|\.)pre_"  # tensors outside of layers that stand before them
DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # how configurations call the number of layers


class Part(NamedTuple):
    """Layers first … last − 1 of a model."""

    model: Opened
    first: int
    last: int


def layers(opened: Opened) -> tuple[str, int]:
    """(the name that the layers' numbers follow, how many there are); ValueError where that cannot be told."""
    found: dict[str, set[int]] = {}
    for name in opened.tensors:
        block = tree.block(name)
        if block and not HEADS.search(name):
            found.setdefault(block[0], set()).add(block[1])
    if len(found) != 1:
        several = f"several stacks of layers ({tree.listing(sorted(found))})" if found else "no numbered layers"
        raise ValueError(f"{opened.where} has {several}: slices need models with one")
    [(prefix, numbers)] = found.items()
    return prefix, 1 + max(numbers)


class Stacked:
    """An `Opened` whose layers are those of its parts, one part after the other, numbered from 0."""

    def __init__(self, parts: Sequence[Part]):
        self.where = " + ".join(f"{part.model.where} {part.first}–{part.last - 1}" for part in parts)
        self.at = _places(parts, _common(parts))
        self.tensors: Mapping[str, TensorInfo] = {name: model.tensors[own] for name, (model, own) in self.at.items()}
        base, every = parts[0].model, list({id(part.model): part.model for part in parts}.values())
        self.config: Mapping[str, Any] = config(parts)
        self.side = base.side
        self.identity: Mapping[str, Any] = {name if len(every) == 1 else f"{i}/{name}": about
                         for i, model in enumerate(every) for name, about in model.identity.items()}
        self.models = every

    def read(self, name, start, stop):
        model, own = self.at[name]
        return model.read(own, start, stop)

    def whole(self, name):
        model, own = self.at[name]
        return model.whole(own)

    def close(self):
        for model in self.models:
            model.close()


def _common(parts: Sequence[Part]) -> str:
    """What all names of layers begin with; ValueError where models differ in it or lack a layer."""
    prefixes = {}
    for part in parts:
        prefix, count = layers(part.model)
        prefixes.setdefault(prefix, part.model.where)
        if part.last > count:
            raise ValueError(f"layers {part.first} to {part.last} of {part.model.where} are asked for; it has {count}")
    if len(prefixes) > 1:
        (a, x), (b, y), *_ = prefixes.items()
        raise ValueError(f"layers are called {a}.… in {x} and {b}.… in {y}: one stack needs one kind of names")
    return next(iter(prefixes))


def _places(parts: Sequence[Part], prefix: str) -> dict[str, tuple[Opened, str]]:
    """{name: (the model, its own name)}."""
    first, last, at = parts[0].model, parts[-1].model, 0
    outside = lambda name: not name.startswith(f"{prefix}.")
    before = lambda name: re.search(BEFORE, name) is not None
    found = {name: (first, name) for name in first.tensors if outside(name) and before(name)}
    found |= {name: (last, name) for name in last.tensors if outside(name) and not before(name)}
    for part in parts:
        for name in part.model.tensors:
            block = tree.block(name)
            if block and block[0] == prefix and part.first <= block[1] < part.last:
                rest = name[len(f"{prefix}.{block[1]}"):]
                found[f"{prefix}.{at + block[1] - part.first}{rest}"] = part.model, name
        at += part.last - part.first
    return found


def config(parts: Sequence[Part]) -> dict[str, Any]:
    """The first model's config.json with the number of layers, and its lists of one entry a layer, of the stack."""
    given = dict(parts[0].model.config)
    if isinstance(given.get("text_config"), dict):
        return {**given, "text_config": _deep(parts, given["text_config"], lambda c: c.get("text_config") or {})}
    return _deep(parts, given, lambda c: c)


def _deep(parts, given: Mapping[str, Any], within) -> dict[str, Any]:
    count, there = sum(part.last - part.first for part in parts), layers(parts[0].model)[1]
    made = {**given, **{name: count for name in DEPTH if name in given}}
    for name, value in given.items():
        if "layer" in name and isinstance(value, list) and len(value) == there:
            each = [within(part.model.config).get(name, value)[part.first:part.last] for part in parts]
            made[name] = [one for some in each for one in some]
    return made


# ---------------------------------------------------------------- in a recipe
def check(slices: Any, labels: Iterable[str]) -> None:
    """Raises ValueError unless slices are [{label: [model, first, last]}] for the base ("") and every model."""
    wanted = {"", *labels}
    for i, one in enumerate(slices, 1):
        if not isinstance(one, Mapping) or set(one) != wanted:
            raise ValueError(f'slice {i} needs [model, first, last] for the base ("") and each of the models: '
                             f"{tree.listing(sorted(wanted - {''}))}")
        for label, part in one.items():
            fine = isinstance(part, list | tuple) and len(part) == 3 and isinstance(part[0], str)
            if not fine or any(type(n) is not int for n in part[1:]) or not 0 <= part[1] < part[2]:
                raise ValueError(f"slice {i}: {label or 'the base'} has [model, first, last], layers from first up to "
                                 f"and without last; got {part!r}")
        if len({part[2] - part[1] for part in one.values()}) > 1:
            raise ValueError(f"slice {i} takes other numbers of layers of different models")


def sources(slices: Iterable[Mapping[str, Sequence[Any]]]) -> list[str]:
    """The models that slices name, each once."""
    return list(dict.fromkeys(part[0] for one in slices for part in one.values()))


def stacked(slices: Sequence[Mapping[str, Sequence[Any]]], label: str, opened: Mapping[str, Opened]) -> Opened:
    """The stack of a label, of models that are open by their names."""
    return Stacked([Part(opened[one[label][0]], one[label][1], one[label][2]) for one in slices])
