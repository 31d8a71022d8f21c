"""The modules of CLIP: the two towers, their projections, and the hashable specification that fixes them.

Module and parameter names are those of `transformers.CLIPModel`; the public functions are in `tvjax.models.clip`.
"""
import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from tvjax.models.layers import ACTIVATIONS, Attention, Embedding, LayerNorm, Linear, PatchEmbedding


@dataclasses.dataclass(frozen=True)
class TowerSpec:
    """What both encoders need."""
    width: int
    hidden: int
    depth: int
    heads: int
    activation: str = "quick_gelu"
    eps: float = 1e-5
    factor: float = 1.0  # multiplies every initial standard deviation


@dataclasses.dataclass(frozen=True)
class VisionSpec(TowerSpec):
    image_size: int = 224
    patch: int = 32
    channels: int = 3
    std: float = 0.02


@dataclasses.dataclass(frozen=True)
class TextSpec(TowerSpec):
    vocabulary: int = 49408
    positions: int = 77
    eos: int = 49407


@dataclasses.dataclass(frozen=True)
class Spec:
    """The hashable part of a `transformers.CLIPConfig` that fixes the network; `text` is None for a vision tower."""
    vision: VisionSpec
    text: TextSpec | None
    projection_dim: int
    logit_scale: float = 2.6592


class MLP(nn.Module):
    spec: TowerSpec

    @nn.compact
    def __call__(self, x: Float[Array, "batch tokens width"]) -> Float[Array, "batch tokens width"]:
        s = self.spec
        hidden = Linear(s.hidden, std=s.factor * (2 * s.width) ** -0.5, name="fc1")(x)
        out_std = s.factor * (2 * s.width * s.depth) ** -0.5
        return Linear(s.width, std=out_std, name="fc2")(ACTIVATIONS[s.activation](hidden))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""
    spec: TowerSpec
    causal: bool

    @nn.compact
    def __call__(self, x, mask=None):
        s = self.spec
        attention = Attention(s.heads, self.causal, in_std=s.factor * (2 * s.width * s.depth) ** -0.5,
                              out_std=s.factor * s.width**-0.5, name="self_attn")
        x = x + attention(LayerNorm(s.eps, name="layer_norm1")(x), mask)
        return x + MLP(s, name="mlp")(LayerNorm(s.eps, name="layer_norm2")(x))


class Layers(nn.Module):
    spec: TowerSpec
    causal: bool

    @nn.compact
    def __call__(self, x, mask=None):
        for i in range(self.spec.depth):
            x = Block(self.spec, self.causal, name=str(i))(x, mask)
        return x


class Encoder(nn.Module):
    spec: TowerSpec
    causal: bool = False

    @nn.compact
    def __call__(self, x, mask=None):
        return Layers(self.spec, self.causal, name="layers")(x, mask)


class VisionEmbeddings(nn.Module):
    """Class token, then patches, plus positions."""
    spec: VisionSpec

    @nn.compact
    def __call__(self, pixels: Float[Array, "batch height width channels"]) -> Float[Array, "batch tokens features"]:
        s, std = self.spec, self.spec.factor * self.spec.std
        patches = PatchEmbedding(s.width, s.patch, std=std, name="patch_embedding")(pixels)
        first = self.param("class_embedding", nn.initializers.normal(s.factor * s.width**-0.5), (s.width,))
        x = jnp.concatenate([jnp.broadcast_to(first, (pixels.shape[0], 1, s.width)), patches], axis=1)
        return x + Embedding(x.shape[1], s.width, std=std, name="position_embedding").first(x.shape[1])[None]


class VisionModel(nn.Module):
    """The last hidden state of the class token, normalised by `post_layernorm`."""
    spec: VisionSpec

    @nn.compact
    def __call__(self, pixels: Float[Array, "batch height width channels"]) -> Float[Array, "batch features"]:
        x = VisionEmbeddings(self.spec, name="embeddings")(pixels)
        x = LayerNorm(self.spec.eps, name="pre_layrnorm")(x)  # the published files spell it so
        x = Encoder(self.spec, name="encoder")(x)
        return LayerNorm(self.spec.eps, name="post_layernorm")(x[:, 0])


class TextEmbeddings(nn.Module):
    spec: TextSpec

    @nn.compact
    def __call__(self, ids):
        s, std = self.spec, self.spec.factor * 0.02
        positions = Embedding(s.positions, s.width, std=std, name="position_embedding").first(ids.shape[1])
        return Embedding(s.vocabulary, s.width, std=std, name="token_embedding")(ids) + positions[None]


class TextModel(nn.Module):
    """The last hidden state, normalised, at the end-of-text token of each prompt.

    Older files say `eos_token_id = 2`, which is wrong; as in transformers, the token is then the prompt's highest id.
    """
    spec: TextSpec

    @nn.compact
    def __call__(self, ids, mask=None):
        x = TextEmbeddings(self.spec, name="embeddings")(ids)
        x = Encoder(self.spec, causal=True, name="encoder")(x, mask)
        x = LayerNorm(self.spec.eps, name="final_layer_norm")(x)
        end = jnp.argmax(ids if self.spec.eos == 2 else ids == self.spec.eos, axis=1)
        return jnp.take_along_axis(x, end[:, None, None], axis=1)[:, 0]


class CLIP(nn.Module):
    """Both towers and their projections; `config` is a `Spec` or a `transformers.CLIPConfig`."""
    config: Any

    def __post_init__(self):
        if not isinstance(self.config, Spec):
            self.config = spec(self.config)
        super().__post_init__()

    def setup(self):
        s = self.config
        self.vision_model = VisionModel(s.vision)
        self.visual_projection = Linear(s.projection_dim, bias=False, std=s.vision.factor * s.vision.width**-0.5)
        if s.text is not None:
            self.text_model = TextModel(s.text)
            self.text_projection = Linear(s.projection_dim, bias=False, std=s.text.factor * s.text.width**-0.5)

    def image_features(self, pixels) -> Float[Array, "images features"]:
        size, channels = self.config.vision.image_size, self.config.vision.channels
        if jnp.shape(pixels)[1:] != (size, size, channels):
            raise ValueError(f"pixels have shape {jnp.shape(pixels)}; "
                             f"this model takes (batch, {size}, {size}, {channels}).")
        return self.visual_projection(self.vision_model(jnp.asarray(pixels)))

    def text_features(self, input_ids, attention_mask=None) -> Float[Array, "prompts features"]:
        if self.config.text is None:
            raise ValueError("This model is a vision tower alone; text features need a whole CLIP.")
        if jnp.ndim(input_ids) != 2 or jnp.shape(input_ids)[1] > self.config.text.positions:
            raise ValueError(f"input_ids have shape {jnp.shape(input_ids)}; this model takes (prompts, tokens) "
                             f"of at most {self.config.text.positions} tokens.")
        mask = None if attention_mask is None else jnp.asarray(attention_mask).astype(bool)
        return self.text_projection(self.text_model(jnp.asarray(input_ids), mask))

    @nn.compact
    def __call__(self, pixels, input_ids=None, attention_mask=None) -> Array:
        """exp(logit_scale) · cosines, (images, prompts); image features where there is no text."""
        image = self.image_features(pixels)
        if input_ids is None:
            return image
        text = self.text_features(input_ids, attention_mask)
        scale = self.param("logit_scale", nn.initializers.constant(self.config.logit_scale), ())
        return jnp.exp(scale) * (_unit(image) @ _unit(text).T)


def _unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def spec(config: Any) -> Spec:
    """What fixes the network, from a `transformers.CLIPConfig` or `CLIPVisionConfig`."""
    vision = getattr(config, "vision_config", config)
    text = getattr(config, "text_config", None)
    whole = VisionSpec(**_tower(vision), image_size=_side(vision, "image_size"), patch=_side(vision, "patch_size"),
                       channels=vision.num_channels, std=vision.initializer_range)
    if text is not None and not isinstance(text.eos_token_id, int):
        raise ValueError(f"text_config.eos_token_id is {text.eos_token_id!r}; CLIP needs one integer.")
    words = None if text is None else TextSpec(**_tower(text), vocabulary=text.vocab_size,
                                               positions=text.max_position_embeddings, eos=text.eos_token_id)
    return Spec(whole, words, config.projection_dim, float(getattr(config, "logit_scale_init_value", 2.6592)))


def _tower(config) -> dict[str, Any]:
    if config.hidden_act not in ACTIVATIONS:
        raise ValueError(f"hidden_act is {config.hidden_act!r}; there are {', '.join(sorted(ACTIVATIONS))}.")
    return dict(width=config.hidden_size, hidden=config.intermediate_size, depth=config.num_hidden_layers,
                heads=config.num_attention_heads, activation=config.hidden_act, eps=config.layer_norm_eps,
                factor=float(config.initializer_factor))


def _side(config, name: str) -> int:
    sides = getattr(config, name)
    sides = (sides,) if isinstance(sides, int) else tuple(sides)
    if len(set(sides)) != 1:
        raise ValueError(f"{name} is {list(sides)}; only square images and patches are supported.")
    return sides[0]
