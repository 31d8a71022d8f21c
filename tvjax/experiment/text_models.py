"""Encoders of sentences, one interface for BERT, RoBERTa and GPT-2: what is trained, its features, its published heads.
"""
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from tvjax.models import bert, files, folders, gpt2, roberta


class Encoder(NamedTuple):
    """`found`: the pretrained model, its `tokenizer` one that pads. features: (params, input_ids, attention_mask) ->
    (sentences, width). trained: params -> the part that fine-tuning moves. longest: tokens of a text. head: (params of
    a model with a head) -> (width, classes), or None where there is no linear one.
    """
    found: files.Pretrained
    tokenizer: Any
    features: Callable
    trained: Callable
    longest: int
    load: Callable
    save: Callable
    head: Callable


def load(path) -> Encoder:
    """The encoder in a folder or of that name, of whichever of the three families its configuration names."""
    if str(path) == bert.MINILM:
        return _bert(path)
    kind = folders.model_type(folders.find(path, None))
    if kind not in LOADERS:
        raise ValueError(f"{path} says model_type {kind!r}; sentences are read by {', '.join(LOADERS)}")
    return LOADERS[kind](path)


def _bert(path) -> Encoder:
    found = bert.from_pretrained(path)
    model: Any = found.model
    trained = lambda params: {name: part for name, part in params.items() if name != "pooler"}  # not used by sentences
    return Encoder(found, found.tokenizer, bert.sentence_features(model), trained, model.config.longest,
                   bert.from_pretrained, bert.save_pretrained, lambda params: None)


def _roberta(path) -> Encoder:
    found = roberta.from_pretrained(path)
    model: Any = found.model
    return Encoder(found, found.tokenizer, roberta.features(model), _without_pooler, model.config.longest,
                   roberta.from_pretrained, _save_roberta, lambda params: None)


def _without_pooler(params) -> dict:
    return {"roberta": {name: part for name, part in params["roberta"].items() if name != "pooler"}}


def _save_roberta(found: files.Pretrained, params, path) -> None:
    roberta.save_pretrained(found, {"roberta": {**found.params["roberta"], **params["roberta"]}}, path)


def _gpt2(path) -> Encoder:
    """A GPT-2 whose configuration names no padding, as the published base, is padded with its end of text."""
    found = gpt2.from_pretrained(path)
    model: Any = found.model
    if model.config.pad is None:
        model = gpt2.GPT2(dataclasses.replace(model.config, pad=int(found.config.eos_token_id)))
        found = found._replace(model=model)
    return Encoder(found, files.Lazy(functools.partial(_padding, found)), gpt2.features(model), gpt2.backbone,
                   model.config.positions, gpt2.from_pretrained, gpt2.save_pretrained, _score)


def _padding(found: files.Pretrained) -> Any:
    """The tokenizer, which fills up texts on their right with the model's own token for that."""
    tokenizer = found.tokenizer._get()
    tokenizer.padding_side = "right"
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(found.model.config.pad)
    return tokenizer


def _score(params) -> Any:
    return jnp.asarray(params["score"]["weight"]).T if "score" in params else None


LOADERS: dict[str, Callable[..., Encoder]] = {"bert": _bert, "roberta": _roberta, "gpt2": _gpt2}
