"""GLUE as text to text (arXiv:1910.10683, arXiv:2310.04742): prompts, answers, exact match, Spearman's correlation.

Two versions of the prompts: "v0" names the task and its fields, as T5 does; "v1" asks in words and spells out the
possible answers, as the published Flan-T5 checkpoints were trained ("Answere" is part of what they saw).
"""
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

TASKS = ("cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb")
WITHOUT_QNLI = tuple(task for task in TASKS if task != "qnli")  # the seven of arXiv:2310.04742
VERSIONS = ("v0", "v1")
HUB = "nyu-mll/glue"
TEST = {task: "validation_matched" if task == "mnli" else "validation" for task in TASKS}  # its test labels are secret

_PAIR = "{name} sentence1: {{sentence1}} sentence2: {{sentence2}}"
PROMPTS = {
    "v0": {
        "cola": "cola sentence: {sentence}",
        "mnli": "mnli hypothesis: {hypothesis} premise: {premise}",
        "mrpc": _PAIR.format(name="mrpc"),
        "qnli": "qnli question: {question} sentence: {sentence}",
        "qqp": "qqp question1: {question1} question2: {question2}",
        "rte": _PAIR.format(name="rte"),
        "sst2": "sst2 sentence: {sentence}",
        "stsb": _PAIR.format(name="stsb"),
    },
    "v1": {
        "cola": "Indicate if the following sentence is grammatically correct or not: \"{sentence}\". "
                "Answere 'acceptable' or 'unacceptable'.",
        "mnli": "Does the premise: '{premise}' logically imply, contradict, or is neutral to the hypothesis: "
                "'{hypothesis}'? Answere with 'entailment', 'contradiction', or 'neutral'.",
        "mrpc": "Are the following sentences '{sentence1}' and '{sentence2}' conveying the same meaning? "
                "Answere with 'yes' or 'no'.",
        "qnli": "Given the context: '{sentence}', does the question '{question}' have an answer based on the "
                "information provided? Answer with 'yes' or 'no'.",
        "qqp": "Do the questions '{question1}' and '{question2}' have the same intent? Answere with 'yes' or 'no'.",
        "rte": "Does the text: '{sentence1}' entail that '{sentence2}' is true? Provide 'yes' or 'no'.",
        "sst2": "Given the sentence '{sentence}', determine the sentiment. Is it positive or negative?",
        "stsb": "Consider the sentences '{sentence1}' and '{sentence2}'. On a scale from 1 (completely different) to 5 "
                "(completely similar), rate the similarity.",
    },
}
_ENTAILED = ("entailment", "not_entailment")
ANSWERS: dict[str, dict[str, tuple[str, ...]]] = {
    "v0": {"cola": ("unacceptable", "acceptable"), "mnli": ("entailment", "neutral", "contradiction"),
           "mrpc": ("not_equivalent", "equivalent"), "qnli": _ENTAILED, "qqp": ("not_duplicate", "duplicate"),
           "rte": _ENTAILED, "sst2": ("negative", "positive")},
    "v1": {"cola": ("unacceptable", "acceptable"), "mnli": ("entailment", "neutral", "contradiction"),
           "mrpc": ("no", "yes"), "qnli": ("yes", "no"), "qqp": ("no", "yes"), "rte": ("yes", "no"),
           "sst2": ("negative", "positive")},
}
"""{version: {task: the answers in the order of the labels}}; stsb is answered by a number."""


def text_to_text(task: str, example: Mapping[str, Any], *, version: str = "v1") -> tuple[str, str]:
    """(prompt, answer) of an example of a GLUE task; the answer is "" where the label is secret (−1).

    >>> text_to_text("rte", {"sentence1": "It rains.", "sentence2": "It is wet.", "label": 0}, version="v0")
    ('rte sentence1: It rains. sentence2: It is wet.', 'entailment')
    """
    if version not in VERSIONS:
        raise ValueError(f"the prompts are {' or '.join(VERSIONS)}; got {version!r}")
    if task not in TASKS:
        raise ValueError(f"no GLUE task {task!r}; there are {', '.join(TASKS)}")
    try:
        prompt = PROMPTS[version][task].format(**example)
    except KeyError as error:
        raise ValueError(f"an example of {task} lacks the column {error}; it has {', '.join(example)}") from None
    label = example.get("label", -1)
    if task == "stsb":
        return prompt, f"{label:.1f}" if label >= 0 else ""
    answers = ANSWERS[version][task]
    if not -1 <= label < len(answers):
        raise ValueError(f"a label of {task} is from 0 to {len(answers) - 1}; got {label}")
    return prompt, answers[label] if label >= 0 else ""


def exact_match(given: Sequence[str], wanted: Sequence[str]) -> float:
    """The share of answers that are the wanted ones, blanks at their ends aside.

    >>> exact_match(["yes", " no", "maybe"], ["yes", "no", "no"]) == 2 / 3
    True
    """
    _same_length(given, wanted)
    return sum(one.strip() == other.strip() for one, other in zip(given, wanted, strict=True)) / len(wanted)


def spearman(given, wanted, *, otherwise: float = 0.0) -> float:
    """Spearman's rank correlation of numbers, ties at their mean rank; an answer that is no number counts `otherwise`.

    0 where one of the rows is constant, since it then ranks nothing.

    >>> spearman(["1.0", "2.5", "high"], [0.0, 5.0, 0.0])
    0.8660254037844387
    """
    _same_length(given, wanted)
    x, y = (_ranks([_number(one, otherwise) for one in row]) for row in (given, wanted))
    x, y = x - x.mean(), y - y.mean()
    norm = np.sqrt((x * x).sum() * (y * y).sum())
    return float((x * y).sum() / norm) if norm > 0 else 0.0


def score(task: str, given: Sequence[str], wanted: Sequence[str]) -> float:
    """The metric of a task: Spearman's correlation for stsb, exact match for all others."""
    return spearman(given, wanted) if task == "stsb" else exact_match(given, wanted)


def _same_length(given, wanted) -> None:
    if len(given) != len(wanted) or not len(wanted):
        raise ValueError(f"as many answers as questions are needed; got {len(given)} and {len(wanted)}")


def _number(text, otherwise: float) -> float:
    try:
        found = float(text)
    except ValueError:
        return otherwise
    return found if np.isfinite(found) else otherwise


def _ranks(values) -> np.ndarray:
    values = np.asarray(values)
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[where]
