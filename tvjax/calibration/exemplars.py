"""Gradients on a few exemplars of each task, as TATR (arXiv:2501.15065) and Fisher merging (arXiv:2111.09832) do it.

g_t = mean_n |∇ℓ(θ; x_n)| at the pretrained θ0, ℓ the cross-entropy of the label, or the entropy of the prediction where
there are no labels; F_t = mean_n (∇ log p(y | x_n))² at the fine-tuned θ_t, y the label or drawn from the model.
"""
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import checkpoints, tree
from tvjax.calibration.gradients import BUDGET, reduced

LOSSES = ("cross_entropy", "entropy", "sampled")


class Exemplars(NamedTuple):
    """Some examples of a task: its frozen head (features, classes), inputs (a tree, examples first), labels or None."""

    head: Any
    inputs: Any
    labels: Any = None


def draw(inputs: Any, labels: Any, *, count: int, task: str, seed: int = 0) -> tuple[Any, Any]:
    """`count` examples without repetition: a pure function of the seed, the task's name and the number of examples.

    >>> draw(np.arange(5), np.arange(5), count=2, task="greek")[1].shape
    (2,)
    """
    have = len(jax.tree.leaves(inputs)[0])
    if not 0 < count <= have:
        raise ValueError(f"{count} exemplars of {task} are asked for; there are {have}")
    chosen = np.random.default_rng([seed, zlib.crc32(task.encode())]).permutation(have)[:count]
    return jax.tree.map(lambda x: np.asarray(x)[chosen], inputs), None if labels is None else np.asarray(labels)[chosen]


def exemplar_gradients(predict: Callable, theta0: Any, exemplars: Mapping[str, Exemplars], *,
                       loss: str = "cross_entropy", reduce: str = "mean_abs", budget: int = BUDGET) -> Any:
    """A tree shaped as the stack of task vectors, (tasks, …) for each leaf, on the host: one gradient for each task.

    predict: (params, head, inputs) -> logits. exemplars: {task: its exemplars}, in the order of the task vectors.
    loss: "cross_entropy" of the labels, or "entropy" of the prediction, which needs none.
    reduce: "mean_abs", the mean of magnitudes over examples (the code that exists), "abs_mean", the magnitude of the
      mean (the formula), or "mean", with signs. budget: bytes of gradients held at once.

    Raises:
      ValueError: for exemplars without labels where they are asked for, labels that the head has no class for.
    """
    return _stacked(predict, dict.fromkeys(exemplars, theta0), exemplars, loss=loss, reduce=reduce, budget=budget)


def fisher_diagonals(predict: Callable, thetas: Mapping[str, Any], exemplars: Mapping[str, Exemplars], *,
                     loss: str = "sampled", budget: int = BUDGET) -> Any:
    """The diagonal Fisher information of each fine-tuned model on its own exemplars, stacked: `merging.fisher`'s data.

    thetas: {task: fine-tuned parameters}. loss: "sampled", labels drawn from the model (the Fisher information,
    inputs alone are needed), or "cross_entropy", the given labels (the so-called empirical Fisher).
    """
    return _stacked(predict, thetas, exemplars, loss=loss, reduce="mean_square", budget=budget)


def _stacked(predict, thetas, exemplars, *, loss, reduce, budget):
    if loss not in LOSSES:
        raise ValueError(f"no loss {loss!r}; {tree.did_you_mean(str(loss), LOSSES)} (there are {', '.join(LOSSES)})")
    if missing := [task for task in exemplars if task not in thetas]:
        raise ValueError(f"there are exemplars of {tree.listing(missing)} but no parameters")
    width = max(one.head.shape[1] for one in exemplars.values())
    made = []
    for task, one in exemplars.items():
        head = jnp.pad(one.head, ((0, 0), (0, width - one.head.shape[1])))
        examples = (one.inputs, _targets(one, task, loss))
        found = reduced(objective(predict, loss), thetas[task], examples, head, np.int32(one.head.shape[1]),
                        reduce=reduce, budget=budget)
        made.append(jax.device_get(found))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *made)


def _targets(one: Exemplars, task: str, loss: str) -> np.ndarray:
    """What goes with each input: its label, or a number from which one is drawn."""
    count = len(jax.tree.leaves(one.inputs)[0])
    if loss != "cross_entropy":
        return np.arange(count, dtype=np.int32)
    if one.labels is None:
        raise ValueError(f"the exemplars of {task} have no labels, which loss='cross_entropy' needs; "
                         "loss='entropy' goes without")
    labels = np.asarray(one.labels)
    if strange := sorted({int(y) for y in labels if not 0 <= y < one.head.shape[1]}):
        raise ValueError(f"the exemplars of {task} hold the label {strange[0]}, but its head has the classes 0 … "
                         f"{one.head.shape[1] - 1}")
    return labels.astype(np.int32)


@functools.cache
def objective(predict: Callable, loss: str) -> Callable:
    """(params, (input, target), head, classes) -> the loss of one example over the head's first `classes` columns.

    The same function for the same arguments, and heads padded to one width: all tasks share one program.
    """
    def one(params, example, head, classes):
        x, target = example
        logits = predict(params, head, jax.tree.map(lambda part: part[None], x))[0].astype(jnp.float32)
        logits = jnp.where(jnp.arange(logits.shape[0]) < classes, logits, -1e9)
        if loss == "entropy":
            return entropy(logits)
        if loss == "sampled":
            target = jax.random.categorical(jax.random.fold_in(jax.random.key(0), target), logits)
        return -jax.nn.log_softmax(logits)[target]
    return one


def entropy(logits):
    """−Σ p log p of softmax(logits) over the last axis, in nats; a class at −1e9 adds nothing.

    >>> round(float(entropy(jnp.array([0.0, 0.0, -1e9]))), 2)
    0.69
    """
    log_p = jax.nn.log_softmax(logits)
    return -(jnp.exp(log_p) * log_p).sum(-1)


# ---------------------------------------------------------------- files
def save_stack(stack: Any, path, *, tasks, base: str = "", **about: str) -> None:
    """Writes gradients or Fisher diagonals of `tasks` to a .safetensors file that says what it holds."""
    checkpoints.save(stack, path, metadata={**about, "tvjax": "stack", "tasks": ",".join(tasks), "base": base})


def load_stack(path, *, tasks=None) -> Any:
    """What `save_stack` wrote; with `tasks`, those of it and in that order, or a ValueError naming who lacks."""
    found = checkpoints.load(path)
    if found.metadata.get("tvjax") != "stack":
        raise ValueError(f"{path} holds no gradients of tasks (written by save_stack)")
    held = found.metadata["tasks"].split(",")
    if tasks is None:
        return found.params
    if missing := [task for task in tasks if task not in held]:
        raise ValueError(f"{path} holds nothing of {', '.join(missing)}; it has {', '.join(held)}")
    order = np.array([held.index(task) for task in tasks])
    return jax.tree.map(lambda x: x[order], found.params)
