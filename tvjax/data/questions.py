"""Text-to-text tasks answered by one of a few choices: GLUE, question answering, or sentences of your own.

A name is one of `tvjax.data.nlp` ("qasc"), "glue-" and one of `tvjax.data.glue` ("glue-rte"), or that of a file of
sentences (`tvjax.data.text`), whose choices are the class descriptions. The first two are read from FOLDER/NAME, which
holds what `datasets` saved (`save_to_disk`) or SPLIT.jsonl with the hub's columns, else from the hub. Validation: of
GLUE a tenth of the training examples, at most 5000, its test set being the published validation set, whose labels are
known; of the others by `nlp.val_test`.
"""
import importlib.util
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tvjax.data import glue, nlp, splits, text
from tvjax.data.sources import datasets_package, offline

GLUE, SPLITS = "glue-", ("train", "val", "test")
SCORES = tuple(f"{i / 10:.1f}" for i in range(51))  # the answers of stsb
TEMPLATE = "{text}\nOptions: {options}\nAnswer:"
FIELDS = {"cola": ("sentence",), "mnli": ("premise", "hypothesis"), "mrpc": ("sentence1", "sentence2"),
          "qnli": ("question", "sentence"), "qqp": ("question1", "question2"), "rte": ("sentence1", "sentence2"),
          "sst2": ("sentence",)}
Rows = Any  # a list of columns by name, or what `datasets` gives, which is as good


class Asked(NamedTuple):
    """A split: `labels` says which of an example's choices is right, (N,) int32."""
    prompts: list[str]
    choices: list[tuple[str, ...]]
    labels: np.ndarray


class Questions(NamedTuple):
    """A task; `splits` has train, val and test. graded: answers are numbers, judged by rank correlation.

    open: examples bring no choices but the right one, so that only generated answers can be judged.
    """
    splits: dict[str, Asked]
    source: str
    graded: bool = False
    open: bool = False


def names() -> tuple[str, ...]:
    """All tasks that are known by name."""
    return (*nlp.TASKS, *(GLUE + task for task in glue.TASKS))


def own_files(sources: Sequence[str]) -> dict[str, pathlib.Path]:
    """{task: file of sentences} among the sources; a folder may hold named tasks alone, and then none of these."""
    holds = lambda source: not os.path.isdir(source) or any(name.endswith(text.ENDINGS) for name in os.listdir(source))
    return text.files([source for source in sources if holds(source)])


def check(name: str, sources: Sequence[str]) -> str:
    """Where a task would be read from, found out without reading; ValueError that says what to put where."""
    if name in (own := own_files(sources)):
        return str(own[name])
    if name not in names():
        import difflib
        near = difflib.get_close_matches(name, [*own, *names()], 1)
        raise ValueError(f"no task {name!r} among the sources, nor known by name; " + (
            f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names())}"))
    roots = [source for source in sources if os.path.isdir(source)]
    for root in roots:
        if (folder := pathlib.Path(root, name)).is_dir():
            return str(folder)
    hub, config = _hub(name)
    if importlib.util.find_spec("datasets") and not offline():
        return f"hub {hub}"
    put = pathlib.Path(roots[0] if roots else "FOLDER", name)
    part = f" ({config})" if config else ""
    raise ValueError(f"no source at hand for the task {name!r}: save the hub's {hub}{part} into {put} with datasets' "
                     "save_to_disk, or as SPLIT.jsonl, and name the folder above in sources; or be online with pip "
                     "install 'tvjax[data]'")


def _hub(name: str) -> tuple[str, str]:
    if name.startswith(GLUE):
        return glue.HUB, name.removeprefix(GLUE)
    return nlp.TASKS[name].hub, nlp.TASKS[name].config


def read(name: str, sources: Sequence[str], *, prompts: str, template: str, examples: Mapping[str, int]) -> Questions:
    """A task with at most so many examples a split.

    prompts: the version of GLUE's. template: what is asked of your own sentences, with {text} and {options}.
    """
    said = check(name, sources)
    if name in (own := own_files(sources)):
        return _of_texts(text.read(own[name]), template, examples)
    parts, told = _published(name, said)
    asked = {split: _asked(name, parts[split], prompts, examples[split], f"{said}, {split}") for split in SPLITS}
    return Questions(asked, told, graded=name == f"{GLUE}stsb", open=name == "ropes")


def sentences(name: str, sources: Sequence[str], *, examples: Mapping[str, int]) -> text.Texts:
    """A GLUE task as sentences, or pairs of them, with classes, for encoders with a head."""
    task = name.removeprefix(GLUE)
    if task not in FIELDS:
        raise ValueError(f"{name} has no classes to put a head on; there are "
                         f"{', '.join(GLUE + one for one in FIELDS)}")
    parts, told = _published(name, check(name, sources))
    return text.Texts(glue.ANSWERS["v0"][task], {split: _fields(task, parts[split], examples[split], f"{told}, {split}")
                                                 for split in SPLITS}, told)


# ---------------------------------------------------------------- reading
def _published(name: str, said: str) -> tuple[dict[str, Rows], str]:
    """({split: rows}, what was taken and how it was split)."""
    is_glue = name.startswith(GLUE)
    task = name.removeprefix(GLUE)
    wanted = ("train", glue.TEST[task]) if is_glue else (nlp.TASKS[name].train, nlp.TASKS[name].held)
    train, held = (_rows(name, said, split) for split in wanted)
    if is_glue:
        rows, val = splits.train_val(len(train))
        told = f"{said} (validation: {len(val)} of {len(train)} training examples, {splits.index_hash(val)})"
        return {"train": Some(train, rows), "val": Some(train, val), "test": held}, told
    val, test = nlp.val_test(len(held))
    told = f"{said} (validation: {len(val)} of {len(held)} {wanted[1]} examples, {splits.index_hash(val)})"
    return {"train": train, "val": Some(held, val), "test": Some(held, test)}, told


class Some(Sequence):
    """Rows of rows, read when asked for."""

    def __init__(self, rows: Rows, chosen):
        self._rows, self._chosen = rows, chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, i):
        return self._rows[int(self._chosen[i])]


def _rows(name: str, said: str, split: str) -> Rows:
    hub, config = _hub(name)
    if said == f"hub {hub}":
        try:
            found = datasets_package().load_dataset(hub, config or None)
        except Exception as error:  # datasets, the hub and the network each raise kinds of their own
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            raise ValueError(f"the hub gave no {hub} ({reason})") from None
        return _split(found, split, said)
    if pathlib.Path(said, "dataset_dict.json").exists():
        return _split(datasets_package().load_from_disk(said), split, said)
    return _lines(pathlib.Path(said, f"{split}.jsonl"))


def _split(found, split: str, said: str) -> Rows:
    if split not in found:
        raise ValueError(f"{said} has no split {split!r}; there are {', '.join(found)}")
    return found[split]


def _lines(path: pathlib.Path) -> Rows:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is needed and cannot be read ({error})") from None
    found = []
    for i, line in enumerate(lines):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {i + 1} is not JSON ({error})") from None
        if not isinstance(found[-1], dict):
            raise ValueError(f"{path}, line {i + 1}: an example is an object of columns; got {line[:40]}")
    return found


# ---------------------------------------------------------------- examples
def _asked(name: str, rows: Rows, prompts: str, most: int, where: str) -> Asked:
    """At most so many examples whose answer is known."""
    found = []
    for i in splits.first(len(rows), most):
        prompt, choices, right = _example(name, rows[int(i)], prompts)
        if right is not None:
            found.append((prompt, choices, right))
    if not found:
        raise ValueError(f"{where} holds no example whose answer is known")
    texts, choices, labels = zip(*found, strict=True)
    return Asked(list(texts), list(choices), np.array(labels, np.int32))


def _example(name: str, row, prompts: str) -> tuple[str, tuple[str, ...], int | None]:
    if not name.startswith(GLUE):
        return nlp.question(name, row)
    task = name.removeprefix(GLUE)
    prompt, answer = glue.text_to_text(task, row, version=prompts)
    choices = SCORES if task == "stsb" else glue.ANSWERS[prompts][task]
    if answer and answer not in choices:
        raise ValueError(f"an answer of {name} is one of {choices[0]} … {choices[-1]}; got {answer}")
    return prompt, choices, choices.index(answer) if answer else None


def _fields(task: str, rows: Rows, most: int, where: str) -> text.Sentences:
    texts, labels = [], []
    for i in splits.first(len(rows), most):
        row = rows[int(i)]
        if absent := [name for name in (*FIELDS[task], "label") if name not in row]:
            raise ValueError(f"{where}: an example lacks the column {absent[0]!r}; it has {', '.join(row)}")
        if row["label"] >= 0:
            parts = [row[name] for name in FIELDS[task]]
            texts.append(tuple(parts) if len(parts) > 1 else parts[0])
            labels.append(row["label"])
    if not texts:
        raise ValueError(f"{where} holds no example whose label is known")
    return text.Sentences(texts, np.array(labels, np.int32))


def _of_texts(task: text.Texts, template: str, examples: Mapping[str, int]) -> Questions:
    options = " | ".join(task.classnames)
    asked = {}
    for split, part in task.splits.items():
        rows = splits.first(len(part.labels), examples[split])
        prompts = [template.format(text=part.texts[i], options=options) for i in rows]
        asked[split] = Asked(prompts, [task.classnames] * len(rows), part.labels[rows])
    return Questions(asked, task.source)


def spearman(answers, labels) -> float:
    """Rank correlation of answered and right choices; what is no answer counts as the lowest."""
    return glue.spearman(np.maximum(answers, 0).tolist(), np.asarray(labels).tolist())
