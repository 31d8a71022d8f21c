"""What each suite asks of a config beyond the common fields, checked before anything is computed.

A check takes the tasks and the whole config and gives the fields `sources`, `control` and `data` of the plan.
"""
from collections.abc import Callable
from typing import Any

from tvjax import tree
from tvjax.data import arrays, glyphs, text, vision
from tvjax.data import sources as places

TEXT = {"tokens": 64, "truncate": True, "templates": None, "scale": 20.0}
ARRAYS = {"heads": "text", "templates": None, "scale": 20.0, "shots": 0}
HEADS = ("text", "prototypes")


def check_glyphs(tasks, given: dict) -> dict[str, Any]:
    """Glyphs are drawn: no sources, a control of their own."""
    for name in tasks:
        if glyphs.task(name).name == glyphs.CONTROL.name:
            raise ValueError("the control task is for judging, no task vector trains on it: leave it out of tasks")
    for name in ("sources", "control", "data"):
        if given[name]:
            raise ValueError(f"the suite glyphs has {name} of its own: leave the field empty; got {given[name]!r}")
    return {"control": glyphs.CONTROL.name}


def check_text(tasks, given: dict) -> dict[str, Any]:
    """Every task has a file among the sources."""
    sources = _sources(given)
    _known_tasks(tasks, given["control"], text.files(sources), sources)
    data = _options(given["data"], TEXT)
    if not isinstance(data["tokens"], int) or data["tokens"] < 2:
        raise ValueError(f"data.tokens is the number of tokens of a sentence, at least 2; got {data['tokens']!r}")
    return {"sources": sources, "control": given["control"], "data": data}


def check_arrays(tasks, given: dict) -> dict[str, Any]:
    """Every task is in one of the files of arrays."""
    sources = _sources(given)
    _known_tasks(tasks, given["control"], arrays.files(sources), sources)
    data = _options(given["data"], ARRAYS)
    if data["heads"] not in HEADS:
        raise ValueError(f"data.heads is {' or '.join(map(repr, HEADS))}; got {data['heads']!r}")
    if not isinstance(data["shots"], int) or data["shots"] < 0:
        raise ValueError(f"data.shots is the number of images of a prototype, or 0 for all; got {data['shots']!r}")
    return {"sources": sources, "control": given["control"], "data": data}


def check_vision(tasks, given: dict) -> dict[str, Any]:
    """Every task is one of the registry and has a source at hand: a folder below one of `sources`, the hub or TFDS."""
    control, roots = given["control"], given["sources"]
    roots = (roots,) if isinstance(roots, str) else tuple(map(str, roots))
    if given["data"]:
        raise ValueError(f"the suite vision has no fields of its own: leave data empty; got {given['data']!r}")
    if control and vision.task(control).name in tasks:
        raise ValueError(f"the control task {control!r} is for judging, no task vector trains on it: leave it out of "
                         "tasks")
    for name in (*tasks, *([control] if control else [])):
        if name != vision.task(name).name:
            raise ValueError(f"the task {name!r} is called {vision.task(name).name!r} here")
        places.check(vision.task(name), roots)
    return {"sources": roots, "control": control}


CHECKS: dict[str, Callable[..., dict[str, Any]]] = {
    "glyphs": check_glyphs, "text": check_text, "arrays": check_arrays, "vision": check_vision}


def _sources(given: dict) -> tuple[str, ...]:
    sources = given["sources"]
    sources = (sources,) if isinstance(sources, str) else tuple(map(str, sources))
    if not sources or not all(sources):
        raise ValueError(f"the suite {given['suite']} needs sources, the files or folders that hold its tasks")
    return sources


def _known_tasks(tasks, control: str, found, sources) -> None:
    for name in (*tasks, *([control] if control else [])):
        if name not in found:
            raise ValueError(f"no task {name!r} in {', '.join(sources)}; {tree.did_you_mean(name, sorted(found))}")
    if control in tasks:
        raise ValueError(f"the control task {control!r} is for judging, no task vector trains on it: leave it out of "
                         "tasks")


def _options(given: dict, defaults: dict) -> dict[str, Any]:
    if unknown := [name for name in given if name not in defaults]:
        raise ValueError(f"data has no field {unknown[0]!r}; {tree.did_you_mean(unknown[0], list(defaults))}")
    data = {**defaults, **given}
    templates = data["templates"]
    if templates is not None:
        if isinstance(templates, str) or not templates or not all("{}" in one for one in templates):
            raise ValueError("data.templates is a list of prompts, each with one {} for the class; "
                             f"got {templates!r}")
        data["templates"] = tuple(templates)
    if isinstance(data["scale"], bool) or not isinstance(data["scale"], (int, float)) or data["scale"] <= 0:
        raise ValueError(f"data.scale multiplies the cosines, so it is above 0; got {data['scale']!r}")
    return data
