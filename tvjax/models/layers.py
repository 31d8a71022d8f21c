"""Flax layers whose parameters bear the names and layouts of Hugging Face files: y = x Wᵀ + b, W of shape (out, in).

A model built of these needs no conversion: the dotted path of a leaf is its key in `model.safetensors`. Every layer is
a module of its own, so `flax.linen.intercept_methods` can wrap it by its path (adapters, features, Gram matrices).
"""
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int


@jax.custom_jvp
def quick_gelu(x: Array) -> Array:
    """x · σ(1.702 x), σ(y) taken as ½(1 + tanh(y/2)): faster code on CPU, and one tanh for value and derivative."""
    return x * _gate(x)


def _gate(x: Array) -> Array:
    return 0.5 + 0.5 * jnp.tanh(0.851 * x)


@quick_gelu.defjvp
def _quick_gelu_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    gate = _gate(x)
    return x * gate, dx * (gate + 1.702 * x * gate * (1 - gate))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "quick_gelu": quick_gelu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_fast": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
}


def _over_leading(vector: ArrayLike, x: Array) -> Array:
    """Gives `vector` the rank of `x`: it broadcasts over all axes but the last where rank promotion is an error."""
    return jnp.reshape(vector, (1,) * (x.ndim - 1) + jnp.shape(vector))


class Linear(nn.Module):
    """y = x Wᵀ + b; weight (out, in), bias (out,)."""
    features: int
    bias: bool = True
    std: float = 0.02

    @nn.compact
    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        weight = self.param("weight", nn.initializers.normal(self.std), (self.features, x.shape[-1]))
        y = jnp.einsum("...i,oi->...o", x, weight)
        if not self.bias:
            return y
        return y + _over_leading(self.param("bias", nn.initializers.zeros, (self.features,)), y)


class Conv1D(Linear):
    """y = x W + b; weight (in, out), as GPT-2's files keep it. A `Linear` to all who wrap one: it maps x to y alike."""

    @nn.compact
    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        weight = self.param("weight", nn.initializers.normal(self.std), (x.shape[-1], self.features))
        y = jnp.einsum("...i,io->...o", x, weight)
        return y + _over_leading(self.param("bias", nn.initializers.zeros, (self.features,)), y)


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight over the last axis; low-precision input is normalised in float32."""
    eps: float = 1e-6

    @nn.compact
    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        weight = self.param("weight", nn.initializers.ones, x.shape[-1:])
        wide = x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x
        normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return normal.astype(x.dtype) * _over_leading(weight, x)


class LayerNorm(nn.Module):
    """(x - mean) / √(var + eps) · weight + bias over the last axis; low-precision input is normalised in float32."""
    eps: float = 1e-5

    @nn.compact
    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        weight = self.param("weight", nn.initializers.ones, x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        wide = x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x
        normal = jax.nn.standardize(wide, axis=-1, epsilon=self.eps).astype(x.dtype)
        return normal * _over_leading(weight, x) + _over_leading(bias, x)


class Embedding(nn.Module):
    """Rows of a table; weight (rows, width)."""
    rows: int
    width: int
    std: float = 0.02

    def setup(self):
        self.weight = self.param("weight", nn.initializers.normal(self.std), (self.rows, self.width))

    def __call__(self, ids: Int[Array, "*batch"]) -> Float[Array, "*batch width"]:
        return jnp.take(self.weight, ids, axis=0)

    def first(self, count: int) -> Float[Array, "count width"]:
        """The first `count` rows: what positions 0, 1, … look up, without a gather."""
        return jnp.asarray(self.weight)[:count]

    def scores(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch rows"]:
        """x Wᵀ: the table as the output layer that is tied to it."""
        return jnp.einsum("...w,rw->...r", x, self.weight)


class PatchEmbedding(nn.Module):
    """A convolution whose stride is its kernel size; weight (width, channels, patch, patch).

    Written as cut and multiply: a convolution's sums, yet per-example gradients (`vmap(grad)`) stay matrix products.
    """
    width: int
    patch: int
    std: float = 0.02

    @nn.compact
    def __call__(self, pixels: Float[Array, "batch height width channels"]) -> Float[Array, "batch patches features"]:
        batch, height, width, channels = pixels.shape
        p, rows, columns = self.patch, height // self.patch, width // self.patch
        weight = self.param("weight", nn.initializers.normal(self.std), (self.width, channels, p, p))
        cut = pixels[:, : rows * p, : columns * p].astype(weight.dtype)
        cut = cut.reshape(batch, rows, p, columns, p, channels).transpose(0, 1, 3, 5, 2, 4)
        return jnp.einsum("bni,oi->bno", cut.reshape(batch, rows * columns, -1), weight.reshape(self.width, -1))


class Attention(nn.Module):
    """Multi-head self-attention, softmax(Q Kᵀ / √d) V, with the four projections q_proj, k_proj, v_proj and out_proj.

    Uses XLA's attention by name: the fused GPU kernels have no forward-mode derivative, which tangent models need.
    """
    heads: int
    causal: bool = False
    in_std: float = 0.02
    out_std: float = 0.02

    @nn.compact
    def __call__(self, x: Float[Array, "batch tokens width"],
                 mask: Bool[Array, "batch tokens"] | None = None) -> Float[Array, "batch tokens width"]:
        width = x.shape[-1]
        split = lambda y: y.reshape(*y.shape[:-1], self.heads, width // self.heads)
        query = split(Linear(width, std=self.in_std, name="q_proj")(x))
        key = split(Linear(width, std=self.in_std, name="k_proj")(x))
        value = split(Linear(width, std=self.in_std, name="v_proj")(x))
        seen = None if mask is None else mask[:, None, None, :]
        with jax.numpy_dtype_promotion("standard"):  # jax 0.10 takes its softmax in float32 whatever the inputs are
            y = jax.nn.dot_product_attention(query, key, value, mask=seen, is_causal=self.causal, implementation="xla")
        return Linear(width, std=self.out_std, name="out_proj")(y.reshape(x.shape))


def of_tokens(model: Any, name: str) -> Callable[..., Array]:
    """A method of a model of tokens as a function (params, input_ids, attention_mask or None) -> what it gives."""
    def apply(params, input_ids, attention_mask=None) -> Any:
        return model.apply({"params": params}, input_ids, attention_mask, method=name)
    return apply
