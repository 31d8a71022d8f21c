"""The question-answering tasks of TALL-masks (arXiv:2405.07813) and TaLoS for T5: sources, splits, choices, prompts.

Suites: seven and eleven, and the eight of question answering; RTE is the control of negation. A task is answered by the
choice of largest log-probability. Validation: the first 32 examples of the published validation split after a shuffle
with seed 42, as in TaLoS' code; the rest of it is the test set.
"""
import dataclasses
from collections.abc import Mapping
from typing import Any

VAL, SHUFFLE = 32, 42
CONTROL = "rte"


@dataclasses.dataclass(frozen=True)
class Task:
    """One row: a data set of the Hugging Face hub, and how an example becomes a question.

    `choices`: the answers of all examples, or () where an example brings its own, in the columns `own`. `label`: the
    column of the answer, a number from `first` on, or the letter or text of the choice. `train` and `held` are the
    published splits for training, and for validation and testing.
    """
    name: str
    hub: str
    config: str
    prompt: str
    label: str
    choices: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    first: int = 0
    train: str = "train"
    held: str = "validation"


_OPTIONS = "\nOptions: {options}\nAnswer:"
_TASKS = (
    Task("qasc", "allenai/qasc", "", "{question}" + _OPTIONS, "answerKey", own=("choices",)),
    Task("quartz", "allenai/quartz", "", "{para} {question}" + _OPTIONS, "answerKey", own=("choices",)),
    Task("paws", "google-research-datasets/paws", "labeled_final",
         "Sentence 1: {sentence1} Sentence 2: {sentence2} Do they have the same meaning?", "label", ("no", "yes")),
    Task("story_cloze", "LSDSem/story_cloze", "2016",
         "{input_sentence_1} {input_sentence_2} {input_sentence_3} {input_sentence_4} Which end follows?" + _OPTIONS,
         "answer_right_ending", own=("sentence_quiz1", "sentence_quiz2"), first=1, train="validation", held="test"),
    Task("wiki_qa", "microsoft/wiki_qa", "", "Question: {question} Sentence: {answer} Does it answer the question?",
         "label", ("no", "yes")),
    Task("winogrande", "allenai/winogrande", "winogrande_xl", "{sentence} What does _ stand for?" + _OPTIONS, "answer",
         own=("option1", "option2"), first=1),
    Task("wsc", "aps/super_glue", "wsc.fixed", "{text} Does \"{span2_text}\" refer to {span1_text}?", "label",
         ("no", "yes")),
    Task("cosmos_qa", "allenai/cosmos_qa", "", "{context} {question}" + _OPTIONS, "label",
         own=("answer0", "answer1", "answer2", "answer3")),
    Task("quail", "textmachinelab/quail", "", "{context} {question}" + _OPTIONS, "correct_answer_id", own=("answers",)),
    Task("ropes", "allenai/ropes", "", "{background} {situation} {question}", "answers"),
    Task("social_iqa", "allenai/social_i_qa", "", "{context} {question}" + _OPTIONS, "label",
         own=("answerA", "answerB", "answerC"), first=1),
    Task("rte", "aps/super_glue", "rte", "{premise} Is it true that {hypothesis}?", "label", ("yes", "no")),
)
TASKS = {task.name: task for task in _TASKS}
SEVEN = ("qasc", "quartz", "paws", "story_cloze", "wiki_qa", "winogrande", "wsc")
EIGHT = ("cosmos_qa", "qasc", "quail", "quartz", "paws", "ropes", "social_iqa", "wiki_qa")
ELEVEN = (*SEVEN, "cosmos_qa", "quail", "ropes", "social_iqa")


def suite(size: int) -> tuple[str, ...]:
    """The names of the 7, 8 or 11 tasks.

    >>> suite(11)[7:]
    ('cosmos_qa', 'quail', 'ropes', 'social_iqa')
    """
    found = {7: SEVEN, 8: EIGHT, 11: ELEVEN}
    if size not in found:
        raise ValueError(f"no suite of {size} language tasks; there are suites of {', '.join(map(str, found))}")
    return found[size]


def question(name: str, example: Mapping[str, Any]) -> tuple[str, tuple[str, ...], int | None]:
    """(prompt, choices, index of the right one) of an example; without choices the one answer is the right one.

    >>> question("wiki_qa", {"question": "Who?", "answer": "Nobody.", "label": 0})
    ('Question: Who? Sentence: Nobody. Does it answer the question?', ('no', 'yes'), 0)
    """
    if name not in TASKS:
        raise ValueError(f"no language task {name!r}; there are {', '.join(TASKS)}")
    task = TASKS[name]
    try:
        choices, labels = _choices(task, example)
        prompt = task.prompt.format(**example, options=" | ".join(choices))
        answer = example[task.label]
    except KeyError as error:
        raise ValueError(f"an example of {name} lacks the column {error}; it has {', '.join(example)}") from None
    if name == "ropes":
        return prompt, tuple(answer["text"][:1]), 0
    return prompt, choices, _right(name, answer, labels, task.first)


def _choices(task: Task, example) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(choices, the labels that the example gives them, or ())."""
    if not task.own:
        return task.choices, ()
    first = example[task.own[0]]
    if isinstance(first, Mapping):
        return tuple(first["text"]), tuple(first["label"])
    return (tuple(first) if len(task.own) == 1 else tuple(example[column] for column in task.own)), ()


def _right(name: str, answer, labels, first: int) -> int | None:
    if answer in ("", None, -1):
        return None
    if labels:
        if answer not in labels:
            raise ValueError(f"{name}: the answer {answer!r} is none of the choices {', '.join(labels)}")
        return labels.index(answer)
    return int(answer) - first


def val_test(count: int) -> tuple[list[int], list[int]]:
    """(indices of validation, indices of test) in the published validation split: a shuffle with numpy's seed 42.

    `datasets` shuffles by the permutation of numpy's default generator.
    """
    import numpy as np

    order = np.random.default_rng(SHUFFLE).permutation(count).tolist()
    if count <= VAL:
        raise ValueError(f"of {count} examples {VAL} cannot be held out for validation")
    return order[:VAL], order[VAL:]
