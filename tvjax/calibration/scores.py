"""How sensitive a model's output is to each parameter at θ0: the score of task-localised sparse fine-tuning (TaLoS).

For an example x, classes ŷ are drawn from softmax(z(x; θ)), z the logits, and the score is the mean over examples and
draws of

    fisher    (∂ log p(ŷ | x) / ∂θ)²   the diagonal of the Fisher information
    logit_sq  (∂ z_ŷ / ∂θ)²            the authors' code
    abs       |∂ z_ŷ / ∂θ|             the authors' pseudo-code

The three rank parameters alike for one example and one output, not after averaging (arXiv:2504.02620).
"""
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import sharding, tree
from tvjax.calibration.gradients import BUDGET, count_examples, reduced

LOGITS_AT_ONCE = 256  # examples whose logits are computed together


@functools.cache
def _log_probability(logits):
    def f(params, drawn, *shared):
        example, label = drawn
        return jax.nn.log_softmax(logits(params, example, *shared).astype(jnp.float32))[label]
    return f


@functools.cache
def _logit(logits):
    def f(params, drawn, *shared):
        example, label = drawn
        return logits(params, example, *shared).astype(jnp.float32)[label]
    return f


SCORES: dict[str, tuple[Callable, str]] = {
    "fisher": (_log_probability, "mean_square"),
    "logit_sq": (_logit, "mean_square"),
    "abs": (_logit, "mean_abs"),
}


def sensitivity(logits: Callable, params: Any, examples: Any, *shared, score: str = "fisher", samples: int = 1,
                seed: int = 0, budget: int = BUDGET, devices=None) -> Any:
    """The score of every entry of `params`, a tree like it, in float32.

    logits: (params, example, *shared) -> (classes,), −∞ or very low where a column is no class. In evaluation mode: it
      takes no key. Give the same object each time: programs are kept under it.
    params: what is scored; frozen tensors, heads with them, belong to `shared`.
    samples: R, the classes drawn for each example; they follow from (seed, place of the example) alone.
    budget: bytes of per-example gradients held at once; devices: see `gradients.reduced`.

    >>> logits = lambda params, x: params["w"] * x
    >>> found = sensitivity(logits, {"w": jnp.array([0.0, 30.0])}, jnp.array([[1.0, 1.0]]), score="logit_sq")
    >>> found["w"].tolist()
    [0.0, 1.0]
    """
    if score not in SCORES:
        raise ValueError(f"no score {score!r}; {tree.did_you_mean(str(score), list(SCORES))}")
    of, reduce = SCORES[score]
    labels = draw_classes(logits, params, examples, *shared, samples=samples, seed=seed)
    repeated = jax.tree.map(lambda x: np.repeat(np.asarray(x), samples, 0) if samples > 1 else x, examples)
    return reduced(of(logits), params, (repeated, labels.reshape(-1)), *shared, reduce=reduce, budget=budget,
                   devices=devices)


def draw_classes(logits: Callable, params: Any, examples: Any, *shared, samples: int = 1, seed: int = 0) -> np.ndarray:
    """(examples, samples) classes drawn from softmax(logits), int32 on the host.

    The key of an example is fold_in(key(seed), its place): the draw knows neither chunks nor devices.
    """
    if samples < 1:
        raise ValueError(f"at least one class is drawn for each example; got samples={samples}")
    count, parts = count_examples(examples), []
    given = (*sharding.host((params, shared)), jax.random.key(seed)) if sharding.found(params) else (
        params, shared, jax.random.key(seed))
    params, shared, key = jax.device_put(given, jax.local_devices()[0])
    for start in range(0, count, LOGITS_AT_ONCE):
        places = np.minimum(np.arange(start, start + LOGITS_AT_ONCE, dtype=np.int32), count - 1)
        part = jax.tree.map(lambda x, places=places: x[places], examples)
        parts.append(_draw(params, part, places, shared, key, logits=logits, samples=samples))
    return np.concatenate(jax.device_get(parts))[:count]


@functools.partial(jax.jit, static_argnames=("logits", "samples"))
def _draw(params, part, places, shared, key, *, logits, samples):
    def one(example, place):
        z = logits(params, example, *shared).astype(jnp.float32)
        return jax.random.categorical(jax.random.fold_in(key, place), z, shape=(samples,)).astype(jnp.int32)
    return jax.vmap(one)(part, places)


@functools.cache
def of_classifier(predict: Callable) -> Callable:
    """logits(params, example, frozen, head, classes) for one example, from predict(params, head, examples) -> logits.

    `params` and `frozen` are the scored and the other leaves of one model, `head` may be padded by columns that are no
    class; `classes` counts those that are.
    """
    def logits(params, example, frozen, head, classes):
        z = predict(tree.union(params, frozen), head, jax.tree.map(lambda x: x[None], example))[0]
        return jnp.where(jnp.arange(z.shape[-1]) < classes, z, -1e9)
    return logits


@functools.cache
def of_choices(choice_log_probs: Callable) -> Callable:
    """logits(params, example, frozen) of one question, from choice_log_probs(params, *inputs) -> (questions, choices).

    For text-to-text models (`models.t5.choice_log_probs`): an example is the tuple of `inputs` of one question, ids,
    mask and answer choices. The "logit" of a choice is the sum of its tokens' log-probabilities, neither divided by
    their number nor made to sum to one over the choices.
    """
    def logits(params, example, frozen):
        return choice_log_probs(tree.union(params, frozen), *(x[None] for x in example))[0]
    return logits
