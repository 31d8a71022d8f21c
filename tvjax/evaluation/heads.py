"""Frozen heads from text (Radford et al., 2021, arXiv:2103.00020) and the classifiers that put them on an encoder.

Column c of a head is exp(s) · unit(mean over templates of unit(text(prompt))); logits = unit(image(x)) · head, no bias.
Heads of other models read features as they are: logits = f(x) · head.
"""
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import sharding, tangent
from tvjax.evaluation.top1 import padded


def zero_shot_head(encode, params, tokenize, classnames, templates, *, logit_scale, batch=256):
    """The head (projection, classes): unit columns times exp(`logit_scale`).

    encode: (params, tokens) -> (prompts, projection), not normalised. tokenize: list of prompts -> tokens, an array
    with prompts first, or a mapping of such arrays, which `encode` then takes by name. A template is a string with one
    `{}` for the class name, or a function of the class name. `logit_scale` is the checkpoint's, the logarithm.

    >>> encode = lambda params, ids: params[ids]
    >>> tokenize = lambda prompts: np.array([len(prompt) for prompt in prompts])
    >>> zero_shot_head(encode, 3 * jnp.eye(4), tokenize, ["a", "to"], ["{}"], logit_scale=0.0).tolist()
    [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    """
    if not classnames or not templates:
        raise ValueError(f"a head needs class names and templates; got {len(classnames)} and {len(templates)}")
    prompts = [template(name) if callable(template) else template.format(name)
               for name in classnames for template in templates]
    features = _embed(encode, params, tokenize(prompts), batch)
    classes = unit(unit(features).reshape(len(classnames), len(templates), -1).mean(1))
    return (jnp.exp(jnp.float32(logit_scale)) * classes).T


def _embed(encode, params, tokens, batch):
    """Features of all prompts in float32, by one compiled program; on a mesh each device takes its part of a batch."""
    tokens = {k: np.asarray(v) for k, v in tokens.items()} if isinstance(tokens, Mapping) else np.asarray(tokens)
    (params,), layout = sharding.settled(params)
    batch += -batch % (layout.data if layout else 1)
    parts = [_encode(params, sharding.spread(part, layout), encode=encode)[:real]
             for part, real in padded(tokens, batch=batch)]
    return jnp.concatenate(parts if layout is None else sharding.host(parts)).astype(jnp.float32)


@functools.partial(jax.jit, static_argnames="encode")
def _encode(params, tokens, *, encode):
    return encode(params, **tokens) if isinstance(tokens, Mapping) else encode(params, tokens)


def unit(x):
    """Rows of length 1; a zero row stays zero: the readout of CLIP's heads, which compare directions."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), jnp.finfo(x.dtype).tiny)


def plain(x):
    """Features as they are: the readout of linear heads, and of scores that are logits already."""
    return x


@functools.cache
def classify(encode, readout=unit):
    """predict(params, head, images) -> logits (images, classes), for an encoder (params, images) -> features.

    readout: what the head sees of the features, `unit` or `plain`. An encoder always gives the same function, so that
    compiled evaluations are shared.

    >>> predict = classify(lambda params, images: images @ params)
    >>> predict(jnp.eye(2), jnp.eye(2), jnp.array([[3.0, 4.0]])).round(3).tolist()
    [[0.6000000238418579, 0.800000011920929]]
    """
    def predict(params, head, images):
        return readout(encode(params, images).astype(jnp.float32)) @ head
    return predict


@functools.cache
def classify_linearised(encode, readout=unit):
    """predict((theta0, tau), head, images) -> logits of the encoder linearised at θ0, f(x; θ0) + ∇f(x; θ0)·τ.

    The head, feature normalisation with it, acts on the linearised features (arXiv:2305.12827). With `paired` as the
    `place` of `sweep` and `disentanglement`, a model tuned in the usual way is judged as if it were linear.
    """
    def predict(point, head, images):
        theta0, tau = point
        return readout(tangent.linearised(encode)(theta0, tau, images).astype(jnp.float32)) @ head
    return predict
