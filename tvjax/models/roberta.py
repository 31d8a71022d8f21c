"""RoBERTa (Liu et al., 2019, arXiv:1907.11692) in Flax, with a head for classification:
logits = W2 tanh(W1 h + b1) + b2, h the state of the first token.

The parameter tree is that of `transformers.RobertaForSequenceClassification` and `RobertaForMaskedLM`: `roberta` is
BERT's encoder with positions that count from the padding token's number, `classifier` and `lm_head` are there where the
file has them. A task of its own has a `classifier` of its own: {**merged, "classifier": heads[task]}.

>>> model = RoBERTa(Spec(width=8, hidden=16, depth=1, heads=2, vocabulary=11, positions=9, types=1, padding=1))
>>> params = jax.eval_shape(functools.partial(init, model), jax.random.key(0))
>>> jax.eval_shape(logits(model), params, jnp.array([[0, 7, 2], [0, 2, 1]])).shape
(2, 2)
"""
import functools
import os
from collections.abc import Callable, Collection
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tvjax.models import bert_network, files
from tvjax.models.bert_network import BERT, Spec
from tvjax.models.files import Pretrained, save_pretrained
from tvjax.models.layers import ACTIVATIONS, LayerNorm, Linear, of_tokens

__all__ = ["Pretrained", "RoBERTa", "Spec", "backbone", "features", "from_pretrained", "init", "logits",
           "masked_token_logits", "save_pretrained", "spec"]

Params = dict[str, Any]
COPIES = {"lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
          "lm_head.decoder.bias": "lm_head.bias"}


class Classifier(nn.Module):
    labels: int
    std: float

    @nn.compact
    def __call__(self, x: Float[Array, "batch width"]) -> Float[Array, "batch labels"]:
        hidden = jnp.tanh(Linear(x.shape[-1], std=self.std, name="dense")(x))
        return Linear(self.labels, std=self.std, name="out_proj")(hidden)


class MaskedHead(nn.Module):
    """norm(gelu(dense(x))) and the bias of each token; the output layer itself is the table of words."""
    spec: Spec

    @nn.compact
    def __call__(self, x):
        hidden = ACTIVATIONS["gelu"](Linear(x.shape[-1], std=self.spec.std, name="dense")(x))
        bias = self.param("bias", nn.initializers.zeros, (self.spec.vocabulary,))
        return LayerNorm(self.spec.eps, name="layer_norm")(hidden), jnp.asarray(bias)


class RoBERTa(nn.Module):
    """`config` is a `Spec` or a `transformers.RobertaConfig`."""
    config: Any
    labels: int = 2

    def __post_init__(self):
        if not isinstance(self.config, Spec):
            self.labels, self.config = self.config.num_labels, spec(self.config)
        super().__post_init__()

    def setup(self):
        self.roberta = BERT(self.config)
        self.classifier = Classifier(self.labels, self.config.std)
        self.lm_head = MaskedHead(self.config)

    def features(self, input_ids, attention_mask=None) -> Float[Array, "batch width"]:
        return self.roberta.hidden(input_ids, attention_mask)[:, 0]

    def token_logits(self, input_ids, attention_mask=None) -> Float[Array, "batch tokens vocabulary"]:
        x, bias = self.lm_head(self.roberta.hidden(input_ids, attention_mask))
        table = self.variables["params"]["roberta"]["embeddings"]["word_embeddings"]["weight"]
        return jnp.einsum("btw,vw->btv", x, table) + bias[None, None]

    def __call__(self, input_ids, attention_mask=None) -> Float[Array, "batch labels"]:
        return self.classifier(self.features(input_ids, attention_mask))

    def everything(self, input_ids):
        return self.roberta(input_ids), self(input_ids), self.token_logits(input_ids)


def spec(config: Any, *, pooler: bool = False) -> Spec:
    """What fixes the encoder, from a `transformers.RobertaConfig`."""
    return bert_network.spec(config, pooler=pooler)


def init(model: Any, key: Array) -> Params:
    """Random float32 parameters with both heads, drawn as transformers draws them."""
    ids = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    return dict(model.lazy_init(key, ids, method=RoBERTa.everything)["params"])


@functools.cache
def features(model: Any) -> Callable[..., Array]:
    """(params, input_ids (batch, tokens), attention_mask or None) -> (batch, width), what a task's head reads.

    A model always gives the same function: `jit` caches hold.
    """
    return of_tokens(model, "features")


@functools.cache
def logits(model: Any) -> Callable[..., Array]:
    """(params with `classifier`, input_ids, attention_mask or None) -> (batch, labels)."""
    apply = of_tokens(model, "__call__")

    def classify(params, input_ids, attention_mask=None):
        if "classifier" not in params:
            raise ValueError("params hold no classifier: add the task's head, {**params, 'classifier': head}.")
        return apply(params, input_ids, attention_mask)
    return classify


@functools.cache
def masked_token_logits(model: Any) -> Callable[..., Array]:
    """(params with `lm_head`, input_ids, attention_mask or None) -> (batch, tokens, vocabulary)."""
    return of_tokens(model, "token_logits")


def backbone(params: Params) -> Params:
    """The part that tasks share and merges combine: the encoder."""
    return {name: part for name, part in params.items() if name == "roberta"}


def _adopt(weights: Params, config: Any) -> tuple[Params, Params]:
    """The prefix that files of a bare RobertaModel lack; no second copies of tied tensors."""
    inside = any(name.startswith("roberta.") for name in weights)
    named = {name if inside else f"roberta.{name}": leaf for name, leaf in weights.items()}
    for copy, original in COPIES.items():
        if copy in named and not np.array_equal(named[copy], named.get(original, named[copy])):
            raise ValueError(f"{copy} differs from {original}; in a RoBERTa they are one.")
    return {name: leaf for name, leaf in named.items() if name not in COPIES}, {}


def _network(config: Any, names: Collection[str]) -> RoBERTa:
    pooler = any(name.startswith("roberta.pooler.") for name in names)
    return RoBERTa(spec(config, pooler=pooler), config.num_labels)


FAMILY = files.Family("RoBERTa", {"roberta": "RobertaConfig"}, _network, init, _adopt,
                      optional=("classifier", "lm_head"), tokenizer="RobertaTokenizer")


def from_pretrained(path_or_hub_id: str | os.PathLike, *, revision: str | None = None) -> Pretrained:
    """The RoBERTa in a folder, or of that name on the hub (FacebookAI/roberta-base, …).

    Leaves keep the file's dtype. Errors: a ValueError that says what is missing, strange or of the wrong shape.
    """
    return files.from_pretrained(path_or_hub_id, FAMILY, revision=revision)
