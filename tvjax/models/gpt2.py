"""GPT-2 (Radford et al., 2019) in Flax, with a head for classification: logits = W · state of the last token of text.

The parameter tree is that of `transformers.GPT2ForSequenceClassification` and `GPT2LMHeadModel`: `transformer`, and
`score` or `lm_head` where there is one; a tied output layer is the table `transformer.wte` alone. Weights of the blocks
are (in, out), as in the files. A task of its own has a `score` of its own: {**merged, "score": heads[task]}.

>>> model = GPT2(Spec(width=8, hidden=16, depth=1, heads=2, vocabulary=11, positions=6, labels=3, pad=0))
>>> params = jax.eval_shape(functools.partial(init, model), jax.random.key(0))
>>> jax.eval_shape(logits(model), params, jnp.array([[5, 7, 1], [6, 0, 0]])).shape
(2, 3)
"""
import dataclasses
import functools
import os
from collections.abc import Callable, Collection
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tvjax.models import files
from tvjax.models.files import Pretrained, save_pretrained
from tvjax.models.layers import ACTIVATIONS, Conv1D, Embedding, LayerNorm, Linear, of_tokens

__all__ = ["GPT2", "Pretrained", "Spec", "backbone", "features", "from_pretrained", "init", "logits",
           "next_token_logits", "save_pretrained", "spec"]

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Spec:
    """The hashable part of a `transformers.GPT2Config` that fixes the network.

    pad: the token that fills up texts; None: all texts must be of one length.
    scaled: whether scores are divided by √(head width); by_layer: also by the number of the block, from 1 on.
    """
    width: int
    hidden: int
    depth: int
    heads: int
    vocabulary: int
    positions: int = 1024
    labels: int = 2
    activation: str = "gelu_new"
    eps: float = 1e-5
    std: float = 0.02
    pad: int | None = None
    scaled: bool = True
    by_layer: bool = False
    tied: bool = True


class Attention(nn.Module):
    """Causal self-attention; one map c_attn gives queries, keys and values."""
    spec: Spec
    number: int

    @nn.compact
    def __call__(self, x: Float[Array, "batch tokens width"], mask) -> Float[Array, "batch tokens width"]:
        s, width = self.spec, x.shape[-1]
        parts = jnp.split(Conv1D(3 * width, std=s.std, name="c_attn")(x), 3, axis=-1)
        query, key, value = (y.reshape(*y.shape[:-1], s.heads, width // s.heads) for y in parts)
        scale = (width // s.heads) ** -0.5 if s.scaled else 1.0
        scale = scale / (self.number + 1) if s.by_layer else scale
        with jax.numpy_dtype_promotion("standard"):  # jax 0.10 takes its softmax in float32 whatever the inputs are
            y = jax.nn.dot_product_attention(query, key, value, mask=mask, scale=scale, is_causal=True,
                                             implementation="xla")
        return Conv1D(width, std=s.std * (2 * s.depth) ** -0.5, name="c_proj")(y.reshape(x.shape))


class MLP(nn.Module):
    spec: Spec

    @nn.compact
    def __call__(self, x):
        hidden = ACTIVATIONS[self.spec.activation](Conv1D(self.spec.hidden, std=self.spec.std, name="c_fc")(x))
        return Conv1D(x.shape[-1], std=self.spec.std * (2 * self.spec.depth) ** -0.5, name="c_proj")(hidden)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""
    spec: Spec
    number: int

    @nn.compact
    def __call__(self, x, mask):
        x = x + Attention(self.spec, self.number, name="attn")(LayerNorm(self.spec.eps, name="ln_1")(x), mask)
        return x + MLP(self.spec, name="mlp")(LayerNorm(self.spec.eps, name="ln_2")(x))


class Blocks(nn.Module):
    spec: Spec

    @nn.compact
    def __call__(self, x, mask):
        for i in range(self.spec.depth):
            x = Block(self.spec, i, name=str(i))(x, mask)
        return x


class Transformer(nn.Module):
    """Normalised last hidden states; positions count from 0 whatever the mask says."""
    spec: Spec

    def setup(self):
        s = self.spec
        self.wte = Embedding(s.vocabulary, s.width, std=s.std)
        self.wpe = Embedding(s.positions, s.width, std=s.std)
        self.h = Blocks(s)
        self.ln_f = LayerNorm(s.eps)

    def __call__(self, ids, mask):
        if ids.ndim != 2 or ids.shape[1] > self.spec.positions:
            raise ValueError(f"input_ids have shape {ids.shape}; this model takes (texts, tokens) of at most "
                             f"{self.spec.positions} tokens.")
        x = self.wte(ids) + self.wpe.first(ids.shape[1])[None]
        mask = None if mask is None else jnp.asarray(mask).astype(bool)[:, None, None, :]
        return self.ln_f(self.h(x, mask))


class GPT2(nn.Module):
    """`config` is a `Spec` or a `transformers.GPT2Config`."""
    config: Any

    def __post_init__(self):
        if not isinstance(self.config, Spec):
            self.config = spec(self.config)
        super().__post_init__()

    def setup(self):
        self.transformer = Transformer(self.config)
        self.score = Linear(self.config.labels, bias=False, std=self.config.std)
        if not self.config.tied:
            self.lm_head = Linear(self.config.vocabulary, bias=False, std=self.config.std)

    def features(self, input_ids, attention_mask=None) -> Float[Array, "batch width"]:
        """The state at the last token that isn't padding, as transformers finds it."""
        ids = jnp.asarray(input_ids)
        x = self.transformer(ids, attention_mask)
        if self.config.pad is None:
            if ids.shape[0] > 1:
                raise ValueError("config.pad_token_id is not set, so texts of several lengths can't be told apart: "
                                 "give one text at a time or set it.")
            return x[:, -1]
        places = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
        last = jnp.argmax(jnp.where(ids != self.config.pad, places, 0), axis=1)
        return jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]

    def token_logits(self, input_ids, attention_mask=None) -> Float[Array, "batch tokens vocabulary"]:
        x = self.transformer(jnp.asarray(input_ids), attention_mask)
        return self.transformer.wte.scores(x) if self.config.tied else self.lm_head(x)

    def __call__(self, input_ids, attention_mask=None) -> Float[Array, "batch labels"]:
        return self.score(self.features(input_ids, attention_mask))

    def everything(self, input_ids):
        return self(input_ids), self.token_logits(input_ids)


def spec(config: Any, *, tied: bool = True) -> Spec:
    """What fixes the network, from a `transformers.GPT2Config`."""
    if config.activation_function not in ACTIVATIONS:
        raise ValueError(f"activation_function is {config.activation_function!r}; there are "
                         f"{', '.join(sorted(ACTIVATIONS))}.")
    if config.add_cross_attention:
        raise ValueError("add_cross_attention is true; a GPT-2 that reads another model's states is not supported.")
    return Spec(config.n_embd, config.n_inner or 4 * config.n_embd, config.n_layer, config.n_head, config.vocab_size,
                config.n_positions, config.num_labels, config.activation_function, config.layer_norm_epsilon,
                config.initializer_range, config.pad_token_id, config.scale_attn_weights,
                config.scale_attn_by_inverse_layer_idx, tied)


def init(model: Any, key: Array) -> Params:
    """Random float32 parameters with a head `score`, drawn as transformers draws them."""
    ids = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    return dict(model.lazy_init(key, ids, method=GPT2.everything)["params"])


@functools.cache
def features(model: Any) -> Callable[..., Array]:
    """(params, input_ids (batch, tokens), attention_mask or None) -> (batch, width), what a task's head reads.

    A model always gives the same function: `jit` caches hold.
    """
    return of_tokens(model, "features")


@functools.cache
def logits(model: Any) -> Callable[..., Array]:
    """(params with `score`, input_ids, attention_mask or None) -> (batch, labels)."""
    apply = of_tokens(model, "__call__")

    def classify(params, input_ids, attention_mask=None):
        if "score" not in params:
            raise ValueError("params hold no score.weight: add the task's head, {**params, 'score': {'weight': W}}.")
        return apply(params, input_ids, attention_mask)
    return classify


@functools.cache
def next_token_logits(model: Any) -> Callable[..., Array]:
    """(params, input_ids, attention_mask or None) -> (batch, tokens, vocabulary): of the token after each one."""
    return of_tokens(model, "token_logits")


def backbone(params: Params) -> Params:
    """The part that tasks share and merges combine: all but `score`."""
    return {name: part for name, part in params.items() if name != "score"}


def _adopt(weights: Params, config: Any) -> tuple[Params, Params]:
    """The prefix that files of a bare GPT2Model lack; no second copy of a tied table."""
    inside = any(name.startswith("transformer.") for name in weights)
    named = {name if inside or name.startswith(("score.", "lm_head.")) else f"transformer.{name}": leaf
             for name, leaf in weights.items()}
    head = named.get("lm_head.weight")
    if head is not None and np.array_equal(head, named.get("transformer.wte.weight", ())):
        del named["lm_head.weight"]
    return named, {}


def _network(config: Any, names: Collection[str]) -> GPT2:
    return GPT2(spec(config, tied="lm_head.weight" not in names))


FAMILY = files.Family("GPT-2", {"gpt2": "GPT2Config"}, _network, init, _adopt, optional=("score",),
                      constants=r"(^|\.)h\.\d+\.attn\.(masked_)?bias$", tokenizer="GPT2Tokenizer")


def from_pretrained(path_or_hub_id: str | os.PathLike, *, revision: str | None = None) -> Pretrained:
    """The GPT-2 in a folder, or of that name on the hub (openai-community/gpt2, tanganke/gpt2_sst2, …).

    Leaves keep the file's dtype. Errors: a ValueError that says what is missing, strange or of the wrong shape.
    """
    return files.from_pretrained(path_or_hub_id, FAMILY, revision=revision)
