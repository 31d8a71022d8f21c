"""The suite "questions": text-to-text tasks under a T5 or Flan-T5, all of whose weights are fine-tuned.

An example is answered by its choice of largest log p(choice | prompt), summed over tokens; these scores are the
features, and a task's head says how many choices it has. Fine-tuning minimises −log p of the right answer by token, as
T5 is trained, or the cross-entropy over choices. Answers may be judged as greedily generated text, by exact match.
"""
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from tvjax import evaluation
from tvjax.data import questions
from tvjax.experiment.loading import Material, Problem, assemble, checked, over_classes
from tvjax.experiment.planning import SPLITS, Plan
from tvjax.experiment.text_suite import tokenize
from tvjax.models import t5

ABSENT = -1e4  # the score of a choice that an example does not have; finite, so that a product with 0 is 0


def load(plan: Plan) -> Problem:
    """The problem of a plan."""
    found, data = checked(plan, t5.from_pretrained(plan.model)), plan.data
    names = (*plan.tasks, *([plan.control] if plan.control else []))
    asked = {name: questions.read(name, plan.sources, prompts=data["prompts"], template=data["template"],
                                  examples=plan.examples) for name in names}
    model: Any = found.model
    return assemble(plan, found, {name: _material(plan, found, name, one) for name, one in asked.items()},
                    theta0=found.params, encode=encoder(model), readout=evaluation.plain,
                    load=lambda path: t5.from_pretrained(path).params,
                    save=functools.partial(t5.save_pretrained, found),
                    criterion=likelihood(model.config.pad) if data["criterion"] == "answer" else over_classes,
                    metrics={name: questions.spearman for name, one in asked.items() if one.graded},
                    judge=generated(model) if data["judge"] == "generated" else None)


@functools.cache
def encoder(model: Any):
    """encode(θ, {"input_ids", "attention_mask", "choices"}) -> scores (batch, choices)."""
    scores = t5.choice_log_probs(model)

    def encode(params, inputs):
        found = scores(params, inputs["input_ids"], inputs["attention_mask"], inputs["choices"])
        there = (inputs["choices"] != model.config.pad).any(-1)
        return jnp.where(there, found, jnp.asarray(ABSENT, found.dtype))
    return encode


@functools.cache
def likelihood(pad: int):
    """The criterion −log p of the right answers, the mean over their tokens: one pass of the decoder an example."""
    def criterion(score, head, classes, inputs, labels, *, smoothing: float = 0.0):
        if smoothing:
            raise ValueError("label smoothing spreads over choices: set data.criterion='choices', or "
                             "finetune.label_smoothing=0")
        right = jnp.take_along_axis(inputs["choices"], labels[:, None, None], axis=1)
        found = score(jnp.ones((1, 1)), {**inputs, "choices": right})
        return -found.sum() / (right != pad).sum(dtype=jnp.int32).astype(found.dtype)
    return criterion


@functools.cache
def generated(model: Any):
    """judge(θ, head, inputs) -> 1 for the choice that is generated to the letter, NaN where none is: no answer."""
    def judge(params, head, inputs):
        choices = inputs["choices"]
        made = t5.generate(model, max_new_tokens=choices.shape[-1])(
            params, inputs["input_ids"], inputs["attention_mask"])
        same = (made[:, None] == choices).all(-1)
        return jnp.where(same.any(-1, keepdims=True), same.astype(jnp.float32), jnp.nan) @ head
    return judge


def _material(plan: Plan, found, name: str, task: questions.Questions) -> Material:
    own = max(len(choices) for part in task.splits.values() for choices in part.choices)
    width = plan.data["choices"] or own
    if width < own:
        raise ValueError(f"data.choices is {width}, but {name} has examples with {own}: raise it, or set it to 0")
    cut = {split: (_inputs(plan, found, task.splits[split], width, f"{name}, {split}"), task.splits[split].labels)
           for split in SPLITS}
    told = tuple(plan.data[name] for name in ("prompts", "template", "criterion", "judge"))
    how = ["by Spearman's rank correlation"] * task.graded + ["as generated text"] * (plan.data["judge"] == "generated")
    said = "; ".join([task.source, *([f"judged {' and '.join(how)}"] if how else [])])
    return Material(jnp.eye(width)[:, :own], cut, told, said)


def _inputs(plan: Plan, found, part: questions.Asked, width: int, where: str) -> dict[str, np.ndarray]:
    data = plan.data
    given = tokenize(found.tokenizer, part.prompts, tokens=data["tokens"], truncate=data["truncate"], where=where)
    ids = _answers(found, {text for choices in part.choices for text in choices}, data, where)
    choices = np.full((len(part.labels), width, data["answers"]), found.model.config.pad, np.int32)
    for i, texts in enumerate(part.choices):
        for j, text in enumerate(texts):
            choices[i, j, :len(ids[text])] = ids[text]
    return {**given, "choices": choices}


def _answers(found, texts: set[str], data: dict, where: str) -> dict[str, list[int]]:
    """{answer: its tokens with the end of text}."""
    end, made = found.model.config.eos[0], {}
    for text in sorted(texts):
        ids = [one for one in found.tokenizer(text)["input_ids"] if one != end]
        if len(ids) >= data["answers"] and not data["truncate"]:
            raise ValueError(f"{where}: the answer {text[:40]!r} has {len(ids) + 1} tokens, data.answers is "
                             f"{data['answers']}: raise it, or set data.truncate, which cuts longer ones")
        made[text] = [*ids[:data["answers"] - 1], end]
    return made
