"""The suite "text": sentences under an encoder (BERT, MiniLM, RoBERTa, GPT-2), all of whose weights are fine-tuned.

Heads are frozen. "descriptions": made from the class descriptions by the pretrained encoder, as CLIP's zero-shot heads,
column c being scale · unit(mean over templates of unit(f(prompt; θ0))). "probe": a linear probe of the pretrained
features, fitted on the task's training examples, over unit features. "checkpoint": the `score` of the model that
`finetuned` names for the task, as published GPT-2 classifiers have one each; logits = f(x) · head.
"""
import functools
from typing import Any

import numpy as np

from tvjax import evaluation
from tvjax.data import questions, splits, text
from tvjax.experiment import text_models
from tvjax.experiment.loading import Material, Problem, assemble, checked
from tvjax.experiment.planning import SPLITS, Plan
from tvjax.models import bert


def load(plan: Plan) -> Problem:
    """The problem of a plan."""
    with_head = text_models.load(bert.MINILM if plan.model == "minilm" else plan.model)
    found = checked(plan, with_head.found)
    if plan.data["tokens"] > with_head.longest:
        raise ValueError(f"data.tokens is {plan.data['tokens']}, but {found.path} takes texts of at most "
                         f"{with_head.longest} tokens")
    names = (*plan.tasks, *([plan.control] if plan.control else []))
    encode, theta0 = encoder(with_head.features), with_head.trained(found.params)
    material = {name: _material(plan, with_head, name, _read(plan, name), (encode, theta0)) for name in names}
    readout = evaluation.plain if plan.data["heads"] == "checkpoint" else evaluation.unit
    return assemble(plan, found, material, theta0=theta0, encode=encode, readout=readout,
                    load=lambda path: with_head.trained(with_head.load(path).params),
                    save=functools.partial(with_head.save, found))


@functools.cache
def encoder(features: Any):
    """encode(θ, {"input_ids", "attention_mask"}) -> features."""
    return lambda params, inputs: features(params, inputs["input_ids"], inputs["attention_mask"])


def _read(plan: Plan, name: str) -> text.Texts:
    own = questions.own_files(plan.sources)
    return text.read(own[name]) if name in own else questions.sentences(name, plan.sources, examples=plan.examples)


def _material(plan: Plan, model: text_models.Encoder, name: str, task: text.Texts, start) -> Material:
    cut = {split: _some(plan, model.tokenizer, task, split) for split in SPLITS}
    head, told = HEADS[plan.data["heads"]](plan, model, name, task, cut, start)
    return Material(head, cut, told, task.source)


def _some(plan, tokenizer, task: text.Texts, split: str):
    """(tokens, labels) of so many sentences as the plan asks for."""
    part = task.splits[split]
    rows = splits.first(len(part.labels), plan.examples[split])
    inputs = tokenize(tokenizer, [part.texts[i] for i in rows], tokens=plan.data["tokens"],
                      truncate=plan.data["truncate"], where=f"{task.source}, {split}")
    return inputs, part.labels[rows]


# ---------------------------------------------------------------- heads: (head, what a hash has to know of it)
def _described(plan, model: text_models.Encoder, name: str, task: text.Texts, cut, start):
    templates, scale = plan.data["templates"] or text.TEMPLATES, float(plan.data["scale"])
    words = lambda prompts: tokenize(model.tokenizer, prompts, tokens=plan.data["tokens"], truncate=False,
                                     where=f"{task.source}: the class descriptions")
    head = evaluation.zero_shot_head(model.features, model.found.params, words, task.classnames, templates,
                                     logit_scale=np.log(scale))
    return head, (task.classnames, templates, scale)


def _probed(plan, model, name: str, task: text.Texts, cut, start):
    encode, theta0 = start
    sides = [(evaluation.features(encode, theta0, inputs, batch=plan.batch), labels)
             for inputs, labels in (cut["train"], cut["val"])]
    return evaluation.probe_head(*sides, classes=len(task.classnames)), ("probe", *cut["train"])


def _published(plan, model, name: str, task: text.Texts, cut, start):
    path = plan.finetuned[name]
    head = model.head(model.load(path).params)
    if head is None:
        raise ValueError(f"{path} holds no linear head 'score' (finetuned, task {name}): set data.heads='probe'")
    if head.shape[1] != len(task.classnames):
        raise ValueError(f"the head in {path} has {head.shape[1]} classes, {name} has {len(task.classnames)}")
    return head, ("checkpoint", head)


HEADS = {"descriptions": _described, "probe": _probed, "checkpoint": _published}


def tokenize(tokenizer, sentences, *, tokens: int, truncate: bool, where: str) -> dict[str, np.ndarray]:
    """{"input_ids", "attention_mask"}, (sentences, tokens), padded; a ValueError where one is longer and `truncate` is
    not set. A sentence may be a pair of them."""
    pairs = isinstance(sentences[0], tuple)
    texts = [list(side) for side in zip(*sentences, strict=True)] if pairs else [list(sentences)]
    given = tokenizer(*texts, padding="max_length", truncation=truncate, max_length=tokens)
    lengths = [len(ids) for ids in given["input_ids"]]
    if longer := [i for i, length in enumerate(lengths) if length > tokens]:
        raise ValueError(f"{where}: text {longer[0]} has {lengths[longer[0]]} tokens, data.tokens is {tokens}: "
                         "raise it, or set data.truncate, which cuts longer ones")
    return {"input_ids": np.array(given["input_ids"], np.int32),
            "attention_mask": np.array(given["attention_mask"], np.int32)}
