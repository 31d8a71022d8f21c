"""What each suite asks of a config beyond the common fields, checked before anything is computed.

A check takes the tasks and the whole config and gives the fields `sources`, `control` and `data` of the plan.
"""
from collections.abc import Callable
from typing import Any

from tvjax import tree
from tvjax.data import arrays, glue, glyphs, questions, text, vision
from tvjax.data import sources as places

TEXT = {"tokens": 64, "truncate": True, "templates": None, "scale": 20.0, "heads": "descriptions"}
TEXT_HEADS = ("descriptions", "probe", "checkpoint")
QUESTIONS = {"tokens": 128, "answers": 16, "truncate": True, "prompts": "v1", "template": questions.TEMPLATE,
             "choices": 0, "criterion": "answer", "judge": "choices"}
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
    """Every task has a file among the sources, or is one of GLUE's with a source at hand."""
    named = [name for name in (*tasks, given["control"]) if name.startswith(questions.GLUE)]
    sources = _all_sources(given) if named else _sources(given)
    own = questions.own_files(sources) if named else text.files(sources)
    for name in named:
        questions.check(name, sources)
    _known_tasks(tasks, given["control"], {**own, **dict.fromkeys(named)}, sources)
    data = _options(given["data"], TEXT)
    _one_of("data.heads", data["heads"], TEXT_HEADS)
    if data["heads"] == "checkpoint":
        _all_given(tasks, given)
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


def check_questions(tasks, given: dict) -> dict[str, Any]:
    """Every task is known by name or among the sources, and has a source at hand."""
    sources, data = _all_sources(given), _known_fields(given["data"], QUESTIONS)
    for name in (*tasks, *([given["control"]] if given["control"] else [])):
        questions.check(name, sources)
        if name == "ropes" and data["judge"] == "choices":
            raise ValueError("ropes brings no choices to score: set data.judge='generated', or leave it out of tasks")
    _apart(tasks, given["control"])
    for name, low in (("tokens", 2), ("answers", 2), ("choices", 0)):
        if not isinstance(data[name], int) or isinstance(data[name], bool) or data[name] < low:
            raise ValueError(f"data.{name} is a whole number from {low} on; got {data[name]!r}")
    for name, known in (("prompts", glue.VERSIONS), ("criterion", ("answer", "choices")),
                        ("judge", ("choices", "generated"))):
        _one_of(f"data.{name}", data[name], known)
    if "{text}" not in data["template"]:
        raise ValueError(f"data.template is a prompt with {{text}} in it, and {{options}} if you like; got "
                         f"{data['template']!r}")
    return {"sources": sources, "control": given["control"], "data": data}


CHECKS: dict[str, Callable[..., dict[str, Any]]] = {
    "glyphs": check_glyphs, "text": check_text, "arrays": check_arrays, "vision": check_vision,
    "questions": check_questions}


def _all_sources(given: dict) -> tuple[str, ...]:
    """Sources of a suite whose tasks may come from the hub too."""
    sources = given["sources"]
    return (sources,) if isinstance(sources, str) else tuple(map(str, sources))


def only_scores(usual: Any, job: str) -> None:
    """For jobs that judge in their own way, by the scores which have gradients; `usual` is the checked usual plan."""
    if usual.data.get("judge") == "generated":
        raise ValueError(f"the job {job} judges by the scores of choices: set data.judge='choices'")
    if usual.geometry != "standard":
        raise ValueError(f"the job {job} linearises by fields of its own: leave geometry='standard'")


def _all_given(tasks, given: dict) -> None:
    """Heads of checkpoints: every task names one in `finetuned`, and there is no control, which has none."""
    named = {str(one).partition("=")[0] for one in given["finetuned"]}
    if lacking := [task for task in tasks if task not in named]:
        raise ValueError("data.heads='checkpoint' takes each task's head from its model in finetuned, which names none "
                         f"for {lacking[0]!r}")
    if given["control"]:
        raise ValueError(f"data.heads='checkpoint' has no head for the control {given['control']!r}: leave it empty")


def _one_of(what: str, value: Any, known) -> None:
    if value not in known:
        raise ValueError(f"{what} is {' or '.join(map(repr, known))}; got {value!r}")


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
    _apart(tasks, control)


def _apart(tasks, control: str) -> None:
    if control in tasks:
        raise ValueError(f"the control task {control!r} is for judging, no task vector trains on it: leave it out of "
                         "tasks")


def _known_fields(given: dict, defaults: dict) -> dict[str, Any]:
    if unknown := [name for name in given if name not in defaults]:
        raise ValueError(f"data has no field {unknown[0]!r}; {tree.did_you_mean(unknown[0], list(defaults))}")
    return {**defaults, **given}


def _options(given: dict, defaults: dict) -> dict[str, Any]:
    data = _known_fields(given, defaults)
    templates = data["templates"]
    if templates is not None:
        if isinstance(templates, str) or not templates or not all("{}" in one for one in templates):
            raise ValueError("data.templates is a list of prompts, each with one {} for the class; "
                             f"got {templates!r}")
        data["templates"] = tuple(templates)
    if isinstance(data["scale"], bool) or not isinstance(data["scale"], (int, float)) or data["scale"] <= 0:
        raise ValueError(f"data.scale multiplies the cosines, so it is above 0; got {data['scale']!r}")
    return data
