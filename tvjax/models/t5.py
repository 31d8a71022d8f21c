"""T5 and Flan-T5 (Raffel et al., 2020, arXiv:1910.10683) in Flax: log p(y | x) = Σ_i log p(y_i | y_<i, x).

The parameter tree is that of `transformers.T5ForConditionalGeneration`, with each tied tensor once: `shared` is the
table of both stacks and, unless there is an `lm_head`, the output layer.

>>> model = T5(Spec(vocabulary=11, width=8, head_width=4, heads=2, hidden=16, depth=1, decoder_depth=1))
>>> params = jax.eval_shape(functools.partial(init, model), jax.random.key(0))
>>> ids = jnp.array([[5, 6, 1], [7, 1, 0]])
>>> jax.eval_shape(choice_log_probs(model), params, ids, ids != 0, jnp.array([[3, 1, 0], [4, 4, 1], [2, 1, 0]])).shape
(2, 3)
"""
import functools
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tvjax.models import files
from tvjax.models.files import Pretrained, save_pretrained
from tvjax.models.t5_network import T5, Spec, spec

__all__ = ["Pretrained", "Spec", "T5", "choice_log_probs", "from_pretrained", "generate", "init", "logits", "loss",
           "save_pretrained", "spec", "token_log_probs"]

Params = dict[str, Any]
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
UNUSED = r"EncDecAttention\.relative_attention_bias"  # in the first conversions


def init(model: T5, key: Array) -> Params:
    """Random float32 parameters, drawn as transformers draws them."""
    ids, mask = jax.ShapeDtypeStruct((1, 2), jnp.int32), jax.ShapeDtypeStruct((1, 2), jnp.bool_)
    return dict(model.lazy_init(key, ids, mask, ids)["params"])


@functools.cache
def logits(model: Any) -> Callable[..., Array]:
    """(params, input_ids (batch, tokens), attention_mask or None, decoder_ids) -> (batch, decoder tokens, vocabulary).

    A model always gives the same function: `jit` caches hold.
    """
    def apply(params, input_ids, attention_mask, decoder_ids) -> Any:
        _check(model, input_ids, attention_mask, decoder_ids)
        return model.apply({"params": params}, input_ids, attention_mask, decoder_ids)
    return apply


@functools.cache
def token_log_probs(model: Any) -> Callable[..., Array]:
    """(params, input_ids, attention_mask or None, targets (batch, tokens)) -> log p of each target, given those before.

    The decoder reads the start token and then the targets. Targets that are padding or −100 get 0.
    """
    def apply(params, input_ids, attention_mask, targets):
        _check(model, input_ids, attention_mask, targets)
        memory = _encode(model, params, input_ids, attention_mask)
        return _targets(model, params, memory, attention_mask, jnp.asarray(targets))
    return apply


@functools.cache
def choice_log_probs(model: Any) -> Callable[..., Array]:
    """(params, input_ids, attention_mask or None, choices) -> (batch, choices): Σ over a choice's tokens of log p.

    choices: (batch, choices, tokens), or (choices, tokens) where all examples have the same; padded with the pad token
    or −100, the end-of-text token with them. Neither divided by the length nor renormalised over the choices
    (softmax does that). Each input is encoded once.
    """
    def apply(params, input_ids, attention_mask, choices):
        choices = jnp.asarray(choices)
        if choices.ndim == 2:
            choices = jnp.broadcast_to(choices, (jnp.shape(input_ids)[0], *choices.shape))
        if choices.ndim != 3 or choices.shape[0] != jnp.shape(input_ids)[0]:
            raise ValueError(f"choices have shape {choices.shape}; for {jnp.shape(input_ids)[0]} inputs they must be "
                             "(inputs, choices, tokens), or (choices, tokens) for all.")
        _check(model, input_ids, attention_mask, choices[:, 0])
        memory = _encode(model, params, input_ids, attention_mask)
        one = lambda targets: _targets(model, params, memory, attention_mask, targets).sum(1)
        return jax.vmap(one, in_axes=1, out_axes=1)(choices)
    return apply


@functools.cache
def loss(model: Any) -> Callable[..., Array]:
    """(params, input_ids, attention_mask or None, targets) -> −log p, the mean over all targets but padding."""
    def apply(params, input_ids, attention_mask, targets):
        found = token_log_probs(model)(params, input_ids, attention_mask, targets)
        return -found.sum() / jnp.maximum(_counts(model, jnp.asarray(targets)).sum(dtype=found.dtype), 1)
    return apply


@functools.cache
def generate(model: Any, *, max_new_tokens: int = 32) -> Callable[..., Array]:
    """(params, input_ids, attention_mask or None) -> (batch, max_new_tokens): always the likeliest next token.

    After an end-of-text token, padding follows. Keys and values of earlier tokens are kept, and it stops when all
    texts have ended. To be called under `jit`.
    """
    def apply(params, input_ids, attention_mask=None):
        _check(model, input_ids, attention_mask, input_ids)
        memory, batch = _encode(model, params, input_ids, attention_mask), jnp.shape(input_ids)[0]

        def step(token, position, cache):
            found: Any = model.apply({"params": params}, token, position, memory, attention_mask, cache, method="step")
            scores, cache = found
            return jnp.argmax(scores, axis=-1).astype(jnp.int32), cache

        return _greedy(step, _empty_cache(model.config, batch, max_new_tokens, memory.dtype), batch, max_new_tokens,
                       model.config)
    return apply


def _greedy(step: Callable, cache: Any, batch: int, most: int, s: Spec) -> Array:
    eos = jnp.array(s.eos, jnp.int32)
    ended = lambda token: (token[:, None] == eos[None]).any(1)
    first, cache = step(jnp.full((batch,), s.start, jnp.int32), 0, cache)  # fills in the memory's keys
    tokens = jnp.full((batch, most), s.pad, jnp.int32).at[:, 0].set(first)

    def going_on(state):
        position, _, done, _, _ = state
        return (position < most) & ~done.all()

    def advance(state):
        position, token, done, tokens, cache = state
        token, cache = step(token, position, cache)
        token = jnp.where(done, s.pad, token)
        return position + 1, token, done | ended(token), tokens.at[:, position].set(token), cache

    return jax.lax.while_loop(going_on, advance, (jnp.int32(1), first, ended(first), tokens, cache))[3]


def _empty_cache(s: Spec, batch: int, length: int, dtype: Any) -> tuple:
    empty = jnp.zeros((batch, length, s.heads, s.head_width), dtype)
    return tuple(((empty, empty), None) for _ in range(s.decoder_depth))


def _encode(model: T5, params: Params, input_ids: Any, attention_mask: Any) -> Any:
    return model.apply({"params": params}, input_ids, attention_mask, method="encode")


def _targets(model: T5, params: Params, memory: Any, attention_mask: Any, targets: Array) -> Array:
    """log p of targets (batch, tokens), 0 at padding."""
    counts = _counts(model, targets)
    targets = jnp.where(counts, targets, model.config.pad)
    start = jnp.full_like(targets[:, :1], model.config.start)
    inputs = jnp.concatenate([start, targets[:, :-1]], axis=1)
    scores: Any = model.apply({"params": params}, inputs, memory, attention_mask, method="decode")
    scores = scores.astype(jnp.float32) if jnp.finfo(scores.dtype).bits < 32 else scores
    chosen = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    return jnp.where(counts, chosen - jax.nn.logsumexp(scores, axis=-1), 0)


def _counts(model: T5, targets: Array) -> Array:
    return (targets != model.config.pad) & (targets != -100)


def _check(model: T5, input_ids: Any, attention_mask: Any, decoder_ids: Any) -> None:
    given = jnp.shape(input_ids)
    if len(given) != 2 or attention_mask is not None and jnp.shape(attention_mask) != given:
        raise ValueError(f"input_ids have shape {given} and attention_mask {jnp.shape(attention_mask)}; "
                         "both must be (batch, tokens).")
    if jnp.ndim(decoder_ids) != 2 or jnp.shape(decoder_ids)[0] != given[0]:
        raise ValueError(f"targets have shape {jnp.shape(decoder_ids)}; for {given[0]} inputs they must be "
                         f"({given[0]}, tokens).")


def _adopt(weights: Params, config: Any) -> tuple[Params, Params]:
    """Copies of tied tensors are left out once they are seen to be copies."""
    copies = {name: weights[name] for name in COPIES if name in weights}
    weights = {name: leaf for name, leaf in weights.items() if name not in copies}
    head = weights.get("lm_head.weight")
    sources = [x for x in (weights.get("shared.weight"), *copies.values()) if x is not None]
    if not sources and head is not None:
        sources = [head]
    if not sources:
        return weights, {}
    for name, leaf in copies.items():
        if not np.array_equal(leaf, sources[0]):
            raise ValueError(f"{name} differs from shared.weight; in a T5 both stacks have one table.")
    if head is not None and getattr(config, "scale_decoder_outputs", True) and np.array_equal(head, sources[0]):
        del weights["lm_head.weight"]
    return {"shared.weight": sources[0], **weights}, {}


def _network(config: Any, names: Collection[str]) -> T5:
    return T5(spec(config, tied="lm_head.weight" not in names))


def _config_text(config: Any, params: Mapping[str, Any]) -> str:
    """Says whether the output layer is tied, as readers before transformers 5 need it."""
    text = files.config_text(config, params)
    untied = "lm_head" in params and not getattr(config, "scale_decoder_outputs", True)
    return text.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false') if untied else text


FAMILY = files.Family("T5", {"t5": "T5Config"}, _network, init, _adopt, tokenizer="T5Tokenizer",
                      config_text=_config_text, constants=UNUSED)


def from_pretrained(path_or_hub_id: str | os.PathLike, *, revision: str | None = None) -> Pretrained:
    """The T5 in a folder, or of that name on the hub (google-t5/t5-small, google/flan-t5-base, …).

    Leaves keep the file's dtype. Errors: a ValueError that says what is missing, strange or of the wrong shape.
    """
    return files.from_pretrained(path_or_hub_id, FAMILY, revision=revision)
