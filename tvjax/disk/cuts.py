"""mergekit's slices: which layers of which models are stacked, and the numbers that hold in each layer.

A gradient goes from the first to the last layer of its slice. What stands before the layers takes the first slice's
numbers, what stands after them the last one's, both where gradients begin.
"""
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tvjax import tree
from tvjax.disk.slices import BEFORE
from tvjax.merging.numbers import ByDepth, ByName, by_name, resolve
from tvjax.merging.peers.mergekit import setting


class Source(NamedTuple):
    """Layers first … last − 1 of a model, and its own numbers there."""

    model: str
    first: int
    last: int
    numbers: dict[str, Any]


class Slice(NamedTuple):
    """What is merged into some layers, and the numbers of these layers."""

    sources: list[Source]
    numbers: dict[str, Any]


class Cut(NamedTuple):
    """labels: {label: first model}. own: {label: its numbers}. everywhere: the other numbers. slices: a recipe's."""

    labels: dict[str, str]
    own: dict[str, dict[str, Any]]
    everywhere: dict[str, Any]
    slices: list[dict[str, list]]


def uncut(slices: Sequence[Slice], count: int, everywhere: Any) -> list[tuple[str, dict[str, Any]]] | None:
    """The models and their numbers, where slices give all `count` layers in their order and the same numbers in all;
    None where they reorder, repeat or leave out layers, or begin a gradient anew."""
    at, plain = 0, [(source.model, source.numbers) for source in slices[0].sources]
    for one in slices:
        same = [(source.model, source.numbers) for source in one.sources] == plain and not one.numbers
        if not same or {source.first for source in one.sources} != {at}:
            return None
        at = one.sources[0].last
    anew = len(slices) > 1 and _graded([everywhere, *(numbers for _, numbers in plain)])
    return plain if at == count and not anew else None


def _graded(value: Any) -> bool:
    """Whether a gradient is among numbers: one slice's goes over its own layers."""
    if isinstance(value, Mapping):
        return any(map(_graded, value.values()))
    numbers = isinstance(value, list) and len(value) > 1 and all(isinstance(one, int | float) for one in value)
    return numbers or isinstance(value, list) and any(map(_graded, value))


def cut(slices: Sequence[Slice], everywhere: Mapping[str, Any], *, base: str, differences: bool, each: Sequence[str],
        preset: Mapping[str, Any], prefix: str, where: str) -> Cut:
    """The columns of a merge: the i-th sources of all slices are one stacked model.

    base: what differences are taken from, or the first model of slerp ("" where there is none). each: names of numbers
    that a model may have of its own. preset: what holds where a slice has no number. prefix: what the layers' numbers
    follow in names.
    """
    rows = [_row(one, base, differences, slices[0]) for one in slices]
    if len({(len(sources), sources[:1] == [base]) for sources in ([s.model for s in some] for _, some in rows)}) > 1:
        raise ValueError(f"{where} have other numbers of sources in different slices, or base_model in some of them, "
                         "which cannot be had here")
    columns = list(zip(*[sources for _, sources in rows], strict=True))
    if not columns:
        raise ValueError(f"{where} name no model but the base")
    labels = _labels(columns, where)
    counts = [one.sources[0].last - one.sources[0].first for one in slices]
    made = [{"": list(under[:3]), **{label: list(source[:3]) for label, source in zip(labels, sources, strict=True)}}
            for under, sources in rows]
    varying = lambda given, names: {name: by_layer(raws, counts, prefix) for name, raws in _raws(
        given, names, preset, where).items()}
    shared, own = [{**everywhere, **one.numbers} for one in slices], {}
    for label, column in zip(labels, columns, strict=True):
        given = [{**numbers, **source.numbers} for numbers, source in zip(shared, column, strict=True)]
        strange = {name: value for source in column for name, value in source.numbers.items() if name not in each}
        own[label] = strange | varying(given, each)
    rest = [name for numbers in shared for name in numbers if name not in each]
    return Cut({label: column[0].model for label, column in zip(labels, columns, strict=True)}, own,
               varying(shared, rest), made)


def _row(one: Slice, base: str, differences: bool, first: Slice) -> tuple[Source, list[Source]]:
    """(what lies under a slice, what is merged in it), models in the order of the first slice where they are the same.

    The base lies under differences: its own layers if it is a source, else those that the first source has.
    """
    order = [source.model for source in first.sources]
    sources = list(one.sources)
    if {source.model for source in sources} == set(order):
        sources.sort(key=lambda source: order.index(source.model))
    its = [source for source in sources if source.model == base]
    others = [source for source in sources if source.model != base]
    if differences:
        return (its[0] if its else others[0]._replace(model=base)), others
    return (its or others)[0], [*its, *others]


def _labels(columns, where: str) -> list[str]:
    """A name for each column: the last parts of its models' paths, or these paths."""
    models = [list(dict.fromkeys(source.model for source in column)) for column in columns]
    for named in ([[model.rpartition("/")[2] for model in some] for some in models], models):
        found = ["+".join(some) for some in named]
        if len(set(found)) == len(found):
            return found
    raise ValueError(f"{where} name {tree.listing(sorted({one for one in found if found.count(one) > 1}))} more than "
                     "once side by side: give it one weight, their sum")


def _raws(given: Sequence[Mapping[str, Any]], names, preset, where: str) -> dict[str, list[Any]]:
    """{number: what each slice says, as written}, for those that a slice has."""
    found = {}
    for name in dict.fromkeys(names):
        if any(name in numbers for numbers in given):
            found[name] = [numbers.get(name, preset.get(name)) for numbers in given]
            if None in found[name]:
                raise ValueError(f"some of the {where} have a {name} and others have none")
    return found


def by_layer(raws: Sequence[Any], counts: Sequence[int], prefix: str) -> Any:
    """One number for every layer, from each slice's as mergekit writes them and its number of layers.

    >>> found = by_layer([1.0, [0, 1]], [1, 2], "layers")
    >>> [float(resolve(found, f"layers.{i}.weight", 0.0)) for i in range(3)]
    [1.0, 0.0, 1.0]
    """
    if all(raw == raws[0] for raw in raws) and not isinstance(raws[0], list | Mapping):
        return raws[0]
    settings, rules = [setting(raw) for raw in raws], {}
    for one, count in zip(settings, counts, strict=True):
        for i in range(count):
            rules[rf"^{re.escape(prefix)}\.{len(rules)}\."] = _fixed(one, i / (count - 1) if count > 1 else 1.0)
    return by_name({**rules, BEFORE: _fixed(settings[0], 0.0)}, default=_fixed(settings[-1], 0.0))


def _fixed(value: Any, t: float) -> Any:
    """A setting at one place of its gradients."""
    if isinstance(value, ByDepth):
        return float(resolve(value, "layers.0.weight", t))
    if isinstance(value, ByName):
        rules = zip(value.patterns, value.values, strict=True)
        return by_name({name: _fixed(one, t) for name, one in rules}, default=_fixed(value.default, t))
    return value
