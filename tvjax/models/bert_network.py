"""The modules of BERT, whose parameter names are those of `transformers.BertModel`; RoBERTa has the same ones.

Every block normalises after it adds: x = norm(x + attention(x)), x = norm(x + mlp(x)).
"""
import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from tvjax.models.layers import ACTIVATIONS, Embedding, LayerNorm, Linear


@dataclasses.dataclass(frozen=True)
class Spec:
    """The hashable part of a configuration that fixes the network.

    padding: None where positions count from 0; RoBERTa's count the tokens that are not `padding`, from padding + 1 on.
    pooler: whether the weights hold the pooler, which sentence embeddings do not use.
    """
    width: int
    hidden: int
    depth: int
    heads: int
    vocabulary: int
    positions: int = 512
    types: int = 2
    activation: str = "gelu"
    eps: float = 1e-12
    std: float = 0.02
    padding: int | None = None
    pooler: bool = True

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return self.positions if self.padding is None else self.positions - self.padding - 1


class Embeddings(nn.Module):
    """norm(word + position + type)."""
    spec: Spec

    @nn.compact
    def __call__(self, ids, types):
        s = self.spec
        words = Embedding(s.vocabulary, s.width, std=s.std, name="word_embeddings")(ids)
        table = Embedding(s.positions, s.width, std=s.std, name="position_embeddings")
        kinds = Embedding(s.types, s.width, std=s.std, name="token_type_embeddings")
        kind = kinds.first(1)[None] if types is None else kinds(types)
        return LayerNorm(s.eps, name="LayerNorm")(words + kind + self._positions(table, ids))

    def _positions(self, table: Embedding, ids):
        pad = self.spec.padding
        if pad is None:
            return table.first(ids.shape[1])[None]
        real = ids != pad
        return table(jnp.where(real, jnp.cumsum(real, axis=1, dtype=ids.dtype) + jnp.asarray(pad, ids.dtype), pad))


class SelfAttention(nn.Module):
    """softmax(Q Kᵀ / √d) V by XLA, whose code has the forward-mode derivative that tangent models need."""
    spec: Spec

    @nn.compact
    def __call__(self, x, mask):
        heads, width = self.spec.heads, x.shape[-1]
        part = lambda name: Linear(width, std=self.spec.std, name=name)(x).reshape(*x.shape[:2], heads, width // heads)
        query, key, value = part("query"), part("key"), part("value")
        seen = None if mask is None else mask[:, None, None, :]
        with jax.numpy_dtype_promotion("standard"):  # jax 0.10 takes its softmax in float32 whatever the inputs are
            y = jax.nn.dot_product_attention(query, key, value, mask=seen, implementation="xla")
        return y.reshape(x.shape)


class Added(nn.Module):
    """norm(dense(y) + x), as the files keep it below `output`."""
    spec: Spec

    @nn.compact
    def __call__(self, y, x):
        return LayerNorm(self.spec.eps, name="LayerNorm")(Linear(x.shape[-1], std=self.spec.std, name="dense")(y) + x)


class SelfAttentionBlock(nn.Module):
    spec: Spec

    @nn.compact
    def __call__(self, x, mask):
        return Added(self.spec, name="output")(SelfAttention(self.spec, name="self")(x, mask), x)


class Intermediate(nn.Module):
    spec: Spec

    @nn.compact
    def __call__(self, x):
        return ACTIVATIONS[self.spec.activation](Linear(self.spec.hidden, std=self.spec.std, name="dense")(x))


class Block(nn.Module):
    spec: Spec

    @nn.compact
    def __call__(self, x, mask):
        x = SelfAttentionBlock(self.spec, name="attention")(x, mask)
        return Added(self.spec, name="output")(Intermediate(self.spec, name="intermediate")(x), x)


class Layers(nn.Module):
    spec: Spec

    @nn.compact
    def __call__(self, x, mask):
        for i in range(self.spec.depth):
            x = Block(self.spec, name=str(i))(x, mask)
        return x


class Encoder(nn.Module):
    spec: Spec

    @nn.compact
    def __call__(self, x, mask):
        return Layers(self.spec, name="layer")(x, mask)


class Pooler(nn.Module):
    """tanh(dense(first token))."""
    spec: Spec

    @nn.compact
    def __call__(self, x):
        return jnp.tanh(Linear(x.shape[-1], std=self.spec.std, name="dense")(x[:, 0]))


class BERT(nn.Module):
    """The encoder; `config` is a `Spec` or a `transformers.BertConfig`."""
    config: Any

    def __post_init__(self):
        if not isinstance(self.config, Spec):
            self.config = spec(self.config)
        super().__post_init__()

    def setup(self):
        self.embeddings = Embeddings(self.config)
        self.encoder = Encoder(self.config)
        if self.config.pooler:
            self.pooler = Pooler(self.config)

    def hidden(self, input_ids, attention_mask=None, token_type_ids=None) -> Float[Array, "batch tokens width"]:
        """The last hidden states; `attention_mask` is true, or 1, where there is text."""
        if jnp.ndim(input_ids) != 2 or jnp.shape(input_ids)[1] > self.config.longest:
            raise ValueError(f"input_ids have shape {jnp.shape(input_ids)}; this model takes (texts, tokens) of at "
                             f"most {self.config.longest} tokens: cut the texts, or take a model with more positions.")
        mask = None if attention_mask is None else jnp.asarray(attention_mask).astype(bool)
        types = None if token_type_ids is None else jnp.asarray(token_type_ids)
        return self.encoder(self.embeddings(jnp.asarray(input_ids), types), mask)

    def __call__(self, input_ids, attention_mask=None, token_type_ids=None):
        """(last hidden states, pooled first token or None)."""
        x = self.hidden(input_ids, attention_mask, token_type_ids)
        return x, self.pooler(x) if self.config.pooler else None


def mean_over(x: Float[Array, "batch tokens width"],
              mask: Bool[Array, "batch tokens"] | None) -> Float[Array, "batch width"]:
    """The mean of the states where there is text; zeros where there is none at all."""
    if mask is None:
        return x.mean(1)
    weight = mask.astype(x.dtype)
    count = jnp.maximum(weight.sum(1, keepdims=True), jnp.ones((), x.dtype))
    return jnp.einsum("btw,bt->bw", x, weight) / count


def spec(config: Any, *, pooler: bool = True) -> Spec:
    """What fixes the network, from a `transformers.BertConfig` or `RobertaConfig`."""
    if config.hidden_act not in ACTIVATIONS:
        raise ValueError(f"hidden_act is {config.hidden_act!r}; there are {', '.join(sorted(ACTIVATIONS))}.")
    if (kind := getattr(config, "position_embedding_type", None) or "absolute") != "absolute":
        raise ValueError(f"position_embedding_type is {kind!r}; only absolute positions are supported.")
    padding = config.pad_token_id if config.model_type in ("roberta", "xlm-roberta") else None
    return Spec(config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads,
                config.vocab_size, config.max_position_embeddings, config.type_vocab_size, config.hidden_act,
                float(config.layer_norm_eps), config.initializer_range, padding, pooler)
