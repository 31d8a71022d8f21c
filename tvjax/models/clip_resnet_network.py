"""The modules of CLIP with a residual network, under the names of OpenAI's and open_clip's files.

The network differs from the usual ResNet in three ways: three convolutions at the start, an average over 2 × 2 before
each convolution that would have a stride, and attention in place of the last average.
"""
import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tvjax.models.layers import ACTIVATIONS, Embedding, LayerNorm, Linear

STATISTICS = "batch_stats"  # Flax's name of the collection


@dataclasses.dataclass(frozen=True)
class TextSpec:
    width: int = 512
    heads: int = 8
    depth: int = 12
    positions: int = 77
    vocabulary: int = 49408


@dataclasses.dataclass(frozen=True)
class Spec:
    """What fixes the network. blocks: (3, 4, 6, 3) is ResNet-50, (3, 4, 23, 3) ResNet-101."""
    projection_dim: int
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    image_size: int = 224
    head_width: int = 64
    text: TextSpec = TextSpec()
    activation: str = "quick_gelu"


class Conv(nn.Module):
    """A convolution without bias; weight (out, in, rows, columns), padded so that stride 1 keeps the size."""
    features: int
    size: int = 1
    stride: int = 1

    @nn.compact
    def __call__(self, x: Float[Array, "batch height width channels"]) -> Float[Array, "batch rows columns features"]:
        shape = (self.features, x.shape[-1], self.size, self.size)
        std = (x.shape[-1] * self.size**2) ** -0.5
        weight = jnp.asarray(self.param("weight", nn.initializers.normal(std), shape))
        if self.size == 1:
            return jnp.einsum("bhwi,oi->bhwo", x, weight[:, :, 0, 0])
        pad = (self.size // 2, self.size // 2)
        return jax.lax.conv_general_dilated(x, weight, (self.stride,) * 2, (pad, pad),
                                            dimension_numbers=("NHWC", "OIHW", "NHWC"))


class BatchNorm(nn.Module):
    """(x − mean) / √(var + eps) · weight + bias for each channel.

    With the running statistics; or, where their collection may be changed, with those of the batch, which then stand
    in it (the variance divided by n − 1, as torch keeps it).
    """
    start: float = 1.0
    eps: float = 1e-5

    @nn.compact
    def __call__(self, x: Float[Array, "batch height width channels"]) -> Float[Array, "batch height width channels"]:
        weight = jnp.asarray(self.param("weight", nn.initializers.constant(self.start), x.shape[-1:]))
        bias = jnp.asarray(self.param("bias", nn.initializers.zeros, x.shape[-1:]))
        kept = [self.variable(STATISTICS, f"running_{what}", lambda y=y: jnp.full(x.shape[-1:], y, jnp.float32))
                for what, y in (("mean", 0.0), ("var", 1.0))]
        mean, var = jnp.asarray(kept[0].value), jnp.asarray(kept[1].value)
        if self.is_mutable_collection(STATISTICS) and not self.is_initializing():
            wide, count = x.astype(mean.dtype), x[..., 0].size
            mean, var = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
            kept[0].value, kept[1].value = mean, var * (count / max(count - 1, 1))
        scale = weight.astype(mean.dtype) * jax.lax.rsqrt(var + self.eps)
        shift = bias.astype(mean.dtype) - mean * scale
        return x * scale.astype(x.dtype)[None, None, None] + shift.astype(x.dtype)[None, None, None]


def halve(x: Float[Array, "batch height width channels"]) -> Float[Array, "batch rows columns channels"]:
    """The average over 2 × 2; an odd last row or column is left out."""
    batch, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).mean((2, 4))


class Shortcut(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x):
        return BatchNorm(name="1")(Conv(self.features, name="0")(x))


class Bottleneck(nn.Module):
    """relu(x + three convolutions of x), with an average over 2 × 2 in both ways where `stride` is 2."""
    width: int
    stride: int

    @nn.compact
    def __call__(self, x):
        y = jax.nn.relu(BatchNorm(name="bn1")(Conv(self.width, name="conv1")(x)))
        y = jax.nn.relu(BatchNorm(name="bn2")(Conv(self.width, 3, name="conv2")(y)))
        y = halve(y) if self.stride == 2 else y
        y = BatchNorm(start=0.0, name="bn3")(Conv(4 * self.width, name="conv3")(y))
        if self.stride == 2 or x.shape[-1] != 4 * self.width:
            x = Shortcut(4 * self.width, name="downsample")(halve(x) if self.stride == 2 else x)
        return jax.nn.relu(x + y)


class Stage(nn.Module):
    width: int
    blocks: int
    stride: int

    @nn.compact
    def __call__(self, x):
        for i in range(self.blocks):
            x = Bottleneck(self.width, self.stride if i == 0 else 1, name=str(i))(x)
        return x


class AttentionPool(nn.Module):
    """Multi-head attention of the mean over all places to that mean and the places."""
    heads: int
    features: int

    @nn.compact
    def __call__(self, x: Float[Array, "batch rows columns width"]) -> Float[Array, "batch features"]:
        batch, _, _, width = x.shape
        x = x.reshape(batch, -1, width)
        x = jnp.concatenate([x.mean(1, keepdims=True), x], axis=1)
        std = width**-0.5
        positions = self.param("positional_embedding", nn.initializers.normal(std), x.shape[1:])
        x = x + jnp.asarray(positions)[None]
        split = lambda y: y.reshape(*y.shape[:-1], self.heads, width // self.heads)
        query = split(Linear(width, std=std, name="q_proj")(x[:, :1]))
        key, value = (split(Linear(width, std=std, name=name)(x)) for name in ("k_proj", "v_proj"))
        with jax.numpy_dtype_promotion("standard"):  # jax 0.10 takes its softmax in float32 whatever the inputs are
            y = jax.nn.dot_product_attention(query, key, value, implementation="xla")
        return Linear(self.features, std=std, name="c_proj")(y.reshape(batch, width))


class Visual(nn.Module):
    spec: Spec

    @nn.compact
    def __call__(self, x: Float[Array, "batch height width channels"]) -> Float[Array, "batch features"]:
        s = self.spec
        for i, (width, stride) in enumerate([(s.width // 2, 2), (s.width // 2, 1), (s.width, 1)], 1):
            x = Conv(width, 3, stride, name=f"conv{i}")(x)
            x = jax.nn.relu(BatchNorm(name=f"bn{i}")(x))
        x = halve(x)
        for i, blocks in enumerate(s.blocks):
            x = Stage(s.width * 2**i, blocks, 2 if i else 1, name=f"layer{i + 1}")(x)
        return AttentionPool(s.width * 32 // s.head_width, s.projection_dim, name="attnpool")(x)


class TextAttention(nn.Module):
    """Causal self-attention whose three maps lie one below the other in one matrix."""
    heads: int

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        weight = self.param("in_proj_weight", nn.initializers.normal(width**-0.5), (3 * width, width))
        bias = jnp.asarray(self.param("in_proj_bias", nn.initializers.zeros, (3 * width,)))
        parts = jnp.split(jnp.einsum("bti,oi->bto", x, weight) + bias[None, None], 3, axis=-1)
        query, key, value = (y.reshape(*y.shape[:-1], self.heads, width // self.heads) for y in parts)
        with jax.numpy_dtype_promotion("standard"):
            y = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="xla")
        return Linear(width, name="out_proj")(y.reshape(x.shape))


class TextMLP(nn.Module):
    activation: str

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        hidden = ACTIVATIONS[self.activation](Linear(4 * width, std=(2 * width) ** -0.5, name="c_fc")(x))
        return Linear(width, name="c_proj")(hidden)


class TextBlock(nn.Module):
    heads: int
    activation: str

    @nn.compact
    def __call__(self, x):
        x = x + TextAttention(self.heads, name="attn")(LayerNorm(name="ln_1")(x))
        return x + TextMLP(self.activation, name="mlp")(LayerNorm(name="ln_2")(x))


class TextBlocks(nn.Module):
    spec: Spec

    @nn.compact
    def __call__(self, x):
        for i in range(self.spec.text.depth):
            x = TextBlock(self.spec.text.heads, self.spec.activation, name=str(i))(x)
        return x


class TextTransformer(nn.Module):
    spec: Spec

    @nn.compact
    def __call__(self, x):
        return TextBlocks(self.spec, name="resblocks")(x)


class ResNetCLIP(nn.Module):
    """Both towers; `config` is a `Spec`. A prompt ends at its highest token, as the files' own code has it.

    The visual tower may be applied with its own parameters alone.
    """
    config: Spec

    def setup(self):
        s, text = self.config, self.config.text
        self.visual = Visual(s)
        if not self.is_initializing() and not self.has_variable("params", "text_projection"):
            return
        self.token_embedding = Embedding(text.vocabulary, text.width, std=0.02)
        self.positional_embedding = self.param("positional_embedding", nn.initializers.normal(0.01),
                                               (text.positions, text.width))
        self.transformer = TextTransformer(s)
        self.ln_final = LayerNorm()
        self.text_projection = self.param("text_projection", nn.initializers.normal(text.width**-0.5),
                                          (text.width, s.projection_dim))
        self.logit_scale = self.param("logit_scale", nn.initializers.constant(2.6592), ())

    def image_features(self, pixels) -> Float[Array, "images features"]:
        side = self.config.image_size
        if jnp.shape(pixels)[1:] != (side, side, 3):
            raise ValueError(f"pixels have shape {jnp.shape(pixels)}; this model takes (batch, {side}, {side}, 3).")
        return self.visual(jnp.asarray(pixels))

    def text_features(self, input_ids) -> Float[Array, "prompts features"]:
        ids, most = jnp.asarray(input_ids), self.config.text.positions
        if not hasattr(self, "text_projection"):
            raise ValueError("text features need the text tower, but params hold only the visual one.")
        if ids.ndim != 2 or ids.shape[1] > most:
            raise ValueError(f"input_ids have shape {ids.shape}; this model takes (prompts, tokens) of at most "
                             f"{most} tokens.")
        x = self.token_embedding(ids) + jnp.asarray(self.positional_embedding)[: ids.shape[1]][None]
        x = self.ln_final(self.transformer(x))
        end = jnp.argmax(ids, axis=1)
        return jnp.take_along_axis(x, end[:, None, None], axis=1)[:, 0] @ self.text_projection

    def __call__(self, pixels, input_ids) -> Any:
        image, text = self.image_features(pixels), self.text_features(input_ids)
        unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        return jnp.exp(self.logit_scale) * (unit(image) @ unit(text).T)
