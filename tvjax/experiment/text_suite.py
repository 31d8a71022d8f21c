"""The suite "text": sentences from files under a sentence encoder (BERT, MiniLM), all of whose weights are fine-tuned.

Heads are frozen and made from the class descriptions by the pretrained encoder, exactly as CLIP's zero-shot heads:
column c is scale · unit(mean over templates of unit(f(prompt; θ0))). The pooler, which sentences do not use, stays.
"""
import functools
from typing import Any

import numpy as np

from tvjax import evaluation
from tvjax.data import splits, text
from tvjax.experiment.loading import Material, Problem, assemble, checked
from tvjax.experiment.planning import SPLITS, Plan
from tvjax.models import bert

UNUSED = "pooler"


def load(plan: Plan) -> Problem:
    """The problem of a plan."""
    found = checked(plan, bert.from_pretrained(bert.MINILM if plan.model == "minilm" else plan.model))
    longest = found.model.config.longest
    if plan.data["tokens"] > longest:
        raise ValueError(f"data.tokens is {plan.data['tokens']}, but {found.path} takes texts of at most {longest} "
                         "tokens")
    of = text.files(plan.sources)
    names = (*plan.tasks, *([plan.control] if plan.control else []))
    material = {name: _material(plan, found, text.read(of[name])) for name in names}
    return assemble(plan, found, material, theta0=trained(found.params), encode=encoder(found.model),
                    load=lambda path: trained(bert.from_pretrained(path).params),
                    save=functools.partial(bert.save_pretrained, found))


def trained(params):
    """The part that fine-tuning moves: all that sentences depend on."""
    return {name: part for name, part in params.items() if name != UNUSED}


@functools.cache
def encoder(model: Any):
    """encode(θ, {"input_ids", "attention_mask"}) -> features."""
    features = bert.sentence_features(model)
    return lambda params, inputs: features(params, inputs["input_ids"], inputs["attention_mask"])


@functools.cache
def _encode_prompt(model: Any):
    return bert.sentence_features(model)


def _material(plan, found, task: text.Texts) -> Material:
    templates, scale = plan.data["templates"] or text.TEMPLATES, float(plan.data["scale"])
    words = lambda prompts: tokenize(found.tokenizer, prompts, tokens=plan.data["tokens"], truncate=False,
                                     where=f"{task.source}: the class descriptions")
    head = evaluation.zero_shot_head(_encode_prompt(found.model), found.params, words, task.classnames, templates,
                                     logit_scale=np.log(scale))
    cut = {split: _some(plan, found, task, split) for split in SPLITS}
    return Material(head, cut, (task.classnames, templates, scale), task.source)


def _some(plan, found, task: text.Texts, split: str):
    """(tokens, labels) of so many sentences as the plan asks for."""
    part = task.splits[split]
    rows = splits.first(len(part.labels), plan.examples[split])
    inputs = tokenize(found.tokenizer, [part.texts[i] for i in rows], tokens=plan.data["tokens"],
                      truncate=plan.data["truncate"], where=f"{task.source}, {split}")
    return inputs, part.labels[rows]


def tokenize(tokenizer, sentences, *, tokens: int, truncate: bool, where: str) -> dict[str, np.ndarray]:
    """{"input_ids", "attention_mask"}, (sentences, tokens), padded; a ValueError where one is longer and `truncate` is
    not set."""
    given = tokenizer(list(sentences), padding="max_length", truncation=truncate, max_length=tokens)
    lengths = [len(ids) for ids in given["input_ids"]]
    if longer := [i for i, length in enumerate(lengths) if length > tokens]:
        raise ValueError(f"{where}: text {longer[0]} has {lengths[longer[0]]} tokens, data.tokens is {tokens}: "
                         "raise it, or set data.truncate, which cuts longer ones")
    return {"input_ids": np.array(given["input_ids"], np.int32),
            "attention_mask": np.array(given["attention_mask"], np.int32)}
