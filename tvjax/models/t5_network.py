"""The modules of T5: two stacks of blocks over one table of tokens, and the hashable specification that fixes them.

Module and parameter names are those of `transformers.T5ForConditionalGeneration`; the public functions are in
`tvjax.models.t5`. A tied tensor exists once, as `shared`.
"""
import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tvjax.models.layers import ACTIVATIONS, Embedding, Linear, RMSNorm


@dataclasses.dataclass(frozen=True)
class Spec:
    """The hashable part of a `transformers.T5Config` that fixes the network.

    gated: act(x W0) · (x W1) in the feed-forward layers (T5 v1.1, Flan-T5) in place of act(x W).
    tied: the output layer is the table of tokens. scaled: its input is divided by √width (T5 v1.0).
    """
    vocabulary: int
    width: int
    head_width: int
    heads: int
    hidden: int
    depth: int
    decoder_depth: int
    buckets: int = 32
    distance: int = 128
    activation: str = "relu"
    gated: bool = False
    tied: bool = True
    scaled: bool = True
    eps: float = 1e-6
    start: int = 0
    pad: int = 0
    eos: tuple[int, ...] = (1,)
    factor: float = 1.0  # multiplies every initial standard deviation


def bucket_table(buckets: int, distance: int) -> np.ndarray:
    """The bucket of each distance 0, 1, …, `distance` to one side: each its own at first, then logarithmically wide.

    A table, since the logarithms of another device may round a boundary to the other side.

    >>> bucket_table(8, 16).tolist()
    [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 7]
    """
    exact = buckets // 2
    far = np.arange(distance + 1, dtype=np.float32).clip(min=1) / np.float32(exact)
    wide = exact + (np.log(far) / np.float32(math.log(distance / exact)) * np.float32(buckets - exact)).astype(np.int32)
    near = np.arange(distance + 1)
    return np.where(near < exact, near, np.minimum(wide, buckets - 1)).astype(np.int32)


class Attention(nn.Module):
    """softmax(Q Kᵀ + bias) V, not divided by √d; weights q, k, v, o without biases.

    relative: "both" or "past": it owns the table of position biases that all blocks of its stack use; "" elsewhere.
    """
    spec: Spec
    relative: str = ""

    def setup(self):
        s, inner = self.spec, self.spec.heads * self.spec.head_width
        self.q = Linear(inner, bias=False, std=s.factor * (s.width * s.head_width) ** -0.5)
        self.k = Linear(inner, bias=False, std=s.factor * s.width**-0.5)
        self.v = Linear(inner, bias=False, std=s.factor * s.width**-0.5)
        self.o = Linear(s.width, bias=False, std=s.factor * inner**-0.5)
        if self.relative:
            self.relative_attention_bias = Embedding(s.buckets, s.heads, std=s.factor * s.width**-0.5)

    def split(self, y):
        return y.reshape(*y.shape[:-1], self.spec.heads, self.spec.head_width)

    def keys(self, memory) -> tuple[Array, Array]:
        """(K, V) of what is attended to."""
        return self.split(self.k(memory)), self.split(self.v(memory))

    def bias(self, queries: Int[Array, " queries"], keys: Int[Array, " keys"]) -> Float[Array, "1 heads queries keys"]:
        """What is added to the scores of keys at these positions, seen from queries at those."""
        s, away = self.spec, keys[None, :] - queries[:, None]
        if self.relative == "both":
            side = jnp.where(away > 0, s.buckets // 2, 0)
            table, away = bucket_table(s.buckets // 2, s.distance), jnp.abs(away)
        else:
            side, table, away = 0, bucket_table(s.buckets, s.distance), jnp.maximum(-away, 0)
        bucket = side + jnp.asarray(table)[jnp.minimum(away, s.distance)]
        return self.relative_attention_bias(bucket).transpose(2, 0, 1)[None]

    def __call__(self, x: Float[Array, "batch queries width"], keys: tuple[Array, Array], bias=None,
                 mask: Bool[Array, "..."] | None = None) -> Float[Array, "batch queries width"]:
        with jax.numpy_dtype_promotion("standard"):  # jax 0.10 takes its softmax in float32 whatever the inputs are
            y = jax.nn.dot_product_attention(self.split(self.q(x)), *keys, bias=bias, mask=mask, scale=1.0,
                                             implementation="xla")
        return self.o(y.reshape(*x.shape[:-1], -1))


class SelfLayer(nn.Module):
    """x + attention(norm(x)); gives the position bias and the keys too, the keys put into `held` where it is given."""
    spec: Spec
    relative: str

    @nn.compact
    def __call__(self, x, bias, mask, held, position):
        normal = RMSNorm(self.spec.eps, name="layer_norm")(x)
        attention = Attention(self.spec, self.relative, name="SelfAttention")
        keys = attention.keys(normal)
        if held is not None:
            put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, position, axis=1)
            keys = jax.tree.map(put, held, keys)
        if bias is None:
            bias = attention.bias(position + jnp.arange(x.shape[1]), jnp.arange(keys[0].shape[1]))
        return x + attention(normal, keys, bias, mask), bias, keys


class CrossLayer(nn.Module):
    """x + attention(norm(x), memory); the memory's keys may be given from an earlier step."""
    spec: Spec

    @nn.compact
    def __call__(self, x, memory, mask, held):
        attention = Attention(self.spec, name="EncDecAttention")
        keys = attention.keys(memory) if held is None else held
        return x + attention(RMSNorm(self.spec.eps, name="layer_norm")(x), keys, None, mask), keys


class Dense(nn.Module):
    spec: Spec

    @nn.compact
    def __call__(self, x):
        s, act = self.spec, ACTIVATIONS[self.spec.activation]
        into = lambda name: Linear(s.hidden, bias=False, std=s.factor * s.width**-0.5, name=name)(x)
        hidden = act(into("wi_0")) * into("wi_1") if s.gated else act(into("wi"))
        return Linear(s.width, bias=False, std=s.factor * s.hidden**-0.5, name="wo")(hidden)


class DenseLayer(nn.Module):
    """x + dense(norm(x))."""
    spec: Spec

    @nn.compact
    def __call__(self, x):
        return x + Dense(self.spec, name="DenseReluDense")(RMSNorm(self.spec.eps, name="layer_norm")(x))


class Layers(nn.Module):
    """Self-attention, in the decoder attention to `memory`, feed-forward."""
    spec: Spec
    relative: str
    decodes: bool

    @nn.compact
    def __call__(self, x, bias, mask, memory, memory_mask, held, position):
        own, other = (None, None) if held is None else held
        x, bias, own = SelfLayer(self.spec, self.relative, name="0")(x, bias, mask, own, position)
        if self.decodes:
            x, other = CrossLayer(self.spec, name="1")(x, memory, memory_mask, other)
        return DenseLayer(self.spec, name="2" if self.decodes else "1")(x), bias, (own, other)


class Block(nn.Module):
    spec: Spec
    relative: str
    decodes: bool

    @nn.compact
    def __call__(self, *inputs):
        return Layers(self.spec, self.relative, self.decodes, name="layer")(*inputs)


class Blocks(nn.Module):
    spec: Spec
    depth: int
    decodes: bool

    @nn.compact
    def __call__(self, x, mask, memory, memory_mask, cache, position):
        bias, filled = None, []
        for i in range(self.depth):
            relative = "" if i else "past" if self.decodes else "both"
            block = Block(self.spec, relative, self.decodes, name=str(i))
            x, bias, keys = block(x, bias, mask, memory, memory_mask, cache[i] if cache else None, position)
            filled.append(keys)
        return x, tuple(filled)


class Stack(nn.Module):
    """Blocks and the last norm; the cache is ((K, V) of itself, (K, V) of the memory or None) for each block."""
    spec: Spec
    depth: int
    decodes: bool = False

    @nn.compact
    def __call__(self, x, mask=None, memory=None, memory_mask=None, cache=(), position=0):
        blocks = Blocks(self.spec, self.depth, self.decodes, name="block")
        x, cache = blocks(x, mask, memory, memory_mask, cache, position)
        return RMSNorm(self.spec.eps, name="final_layer_norm")(x), cache


class T5(nn.Module):
    """Encoder, decoder and output layer; `config` is a `Spec` or a `transformers.T5Config`."""
    config: Any

    def __post_init__(self):
        if not isinstance(self.config, Spec):
            self.config = spec(self.config)
        super().__post_init__()

    def setup(self):
        s = self.config
        self.shared = Embedding(s.vocabulary, s.width, std=s.factor)
        self.encoder = Stack(s, s.depth)
        self.decoder = Stack(s, s.decoder_depth, decodes=True)
        if not s.tied:
            self.lm_head = Linear(s.vocabulary, bias=False, std=s.factor)

    def encode(self, input_ids, attention_mask=None) -> Float[Array, "batch tokens width"]:
        """The encoder's last hidden state; padding takes no part where the mask is 0."""
        return self.encoder(self.shared(jnp.asarray(input_ids)), wide_mask(attention_mask))[0]

    def decode(self, decoder_ids, memory, attention_mask=None) -> Float[Array, "batch tokens vocabulary"]:
        """Logits of the token after each of `decoder_ids`, all at once."""
        length = decoder_ids.shape[1]
        causal = jnp.tril(jnp.ones((length, length), bool))[None, None]
        x, _ = self.decoder(self.shared(jnp.asarray(decoder_ids)), causal, memory, wide_mask(attention_mask))
        return self._scores(x)

    def step(self, token: Int[Array, " batch"], position, memory, attention_mask, cache):
        """(logits (batch, vocabulary) of the next token, cache) at one position."""
        past = jnp.arange(cache[0][0][0].shape[1]) <= position
        x, cache = self.decoder(self.shared(token)[:, None], past[None, None, None], memory,
                                wide_mask(attention_mask), cache, position)
        return self._scores(x[:, 0]), cache

    def _scores(self, x):
        x = x * self.config.width**-0.5 if self.config.scaled else x
        return self.shared.scores(x) if self.config.tied else self.lm_head(x)

    def __call__(self, input_ids, attention_mask, decoder_ids):
        return self.decode(decoder_ids, self.encode(input_ids, attention_mask), attention_mask)


def wide_mask(mask) -> Bool[Array, "batch 1 1 tokens"] | None:
    return None if mask is None else jnp.asarray(mask).astype(bool)[:, None, None, :]


def spec(config: Any, *, tied: bool | None = None) -> Spec:
    """What fixes the network, from a `transformers.T5Config`; T5 v1.1 is the one whose outputs are neither scaled nor
    tied, unless `tied` says otherwise.
    """
    if config.dense_act_fn not in ACTIVATIONS:
        raise ValueError(f"feed_forward_proj is {config.feed_forward_proj!r}; its activation must be one of "
                         f"{', '.join(sorted(ACTIVATIONS))}.")
    scaled, eos = bool(getattr(config, "scale_decoder_outputs", config.tie_word_embeddings)), config.eos_token_id
    start = getattr(config, "decoder_start_token_id", None)
    pad = config.pad_token_id or 0
    return Spec(config.vocab_size, config.d_model, config.d_kv, config.num_heads, config.d_ff, config.num_layers,
                config.num_decoder_layers, config.relative_attention_num_buckets,
                config.relative_attention_max_distance, config.dense_act_fn, config.is_gated_act,
                scaled if tied is None else tied, scaled, config.layer_norm_epsilon, pad if start is None else start,
                pad, tuple(eos) if isinstance(eos, list) else (eos,), float(config.initializer_factor))
