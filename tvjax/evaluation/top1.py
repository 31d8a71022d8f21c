"""Top-1 accuracy from exact counts, by one compiled program for all models, scales and tasks of equal shapes.

What differs between tasks is padded away: the last batch to `batch` examples, a head to a multiple of 512 columns, of
which those that are no class count as −∞.
"""
import functools

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import sharding, tree
from tvjax.evaluation.points import moved, shifted

COLUMNS = 512  # covers the vision suites' largest head (397 classes) at no cost beside an encoder
QUEUE = 8  # batches sent ahead of the device


def accuracy(predict, params, head, split, metric=None, *, batch=128):
    """The share of right answers, correct/examples, a float in [0, 1].

    predict: (params, head, images) -> logits (images, classes); a logit that is not a number makes the answer wrong.
      Programs are kept under this function: give the same object each time, not a new lambda.
    head: (features, classes), or any tree (None) that `predict` knows to handle. split: the pair (images, labels).
    metric: (answers, labels) -> the number that is wanted in place of that share.

    >>> predict = lambda params, head, images: images @ head
    >>> accuracy(predict, None, jnp.eye(3), (np.eye(3, dtype=np.float32), np.array([0, 1, 1])), batch=2)
    0.6666666666666666
    """
    images, labels = split
    labels = np.asarray(labels)
    answers = predictions(predict, params, head, images, batch=batch)
    if labels.shape != answers.shape:
        raise ValueError(f"there are {answers.size} images, but labels of shape {labels.shape}")
    return int((answers == labels).sum()) / labels.size if metric is None else metric(answers, labels)


def predictions(predict, params, head, images, *, batch=128):
    """The predicted class of every image, (images,) int32 on the host; −1 where a logit is not a number.

    Batches are cut over the mesh on which `params` lie, or over that of `sharding.on`.
    """
    head, classes = _widened(head)
    (params, head), layout = sharding.settled(params, head)
    answers = []
    for part, real in padded(images, batch=batch):
        answers.append(_answers(params, head, classes, sharding.spread(part, layout), predict=predict)[:real])
        if len(answers) > QUEUE:
            answers[-QUEUE].block_until_ready()
    return np.concatenate(sharding.host(answers))


@functools.partial(jax.jit, static_argnames="predict")
def _answers(params, head, classes, images, *, predict):
    logits = predict(params, head, images)
    known = jnp.arange(logits.shape[-1])[None] < classes
    answers = jnp.argmax(jnp.where(known, logits, -jnp.inf), axis=-1).astype(jnp.int32)
    return jnp.where((jnp.isnan(logits) & known).any(-1), -1, answers)


def _widened(head):
    """A head padded by zero columns to a multiple of 512, and how many of them are classes."""
    if getattr(head, "ndim", 0) != 2:
        return head, np.int32(np.iinfo(np.int32).max)
    classes = head.shape[1]
    return jnp.pad(jnp.asarray(head), ((0, 0), (0, -classes % COLUMNS))), np.int32(classes)


def padded(arrays, *, batch):
    """Yields pairs (`batch` rows of a tree of arrays, how many of them are real); zeros fill the last.

    >>> [(part.tolist(), real) for part, real in padded(np.array([1, 2, 3]), batch=2)]
    [([1, 2], 2), ([3, 0], 1)]
    """
    sizes = {x.shape[0] for x in jax.tree.leaves(arrays)}
    if len(sizes) != 1 or sizes == {0}:
        raise ValueError(f"there must be one common, non-zero number of examples; got {sorted(sizes)}")
    examples = sizes.pop()
    for start in range(0, examples, batch):
        real = min(batch, examples - start)
        yield jax.tree.map(lambda x, start=start, real=real: _filled(x[start:start + real], batch), arrays), real


def _filled(rows, batch):
    short = batch - rows.shape[0]
    pad = jnp.pad if isinstance(rows, jax.Array) else np.pad
    return pad(rows, [(0, short)] + [(0, 0)] * (rows.ndim - 1)) if short else rows


def accuracies(predict, params, tasks, *, batch=128):
    """{task: accuracy} of one model; `tasks` maps a name to (head, (images, labels)), or to these and a metric."""
    (params,), _ = sharding.settled(params)
    return {name: accuracy(predict, params, *task, batch=batch) for name, task in tasks.items()}


def sweep(predict, theta0, tau, scales, tasks, *, batch=128, place=shifted):
    """[{task: accuracy} at θ0 + scale·τ for each scale]; the sum is taken on the device, by one program for all scales.

    `place`: `shifted`, or `paired` with a predict from `classify_linearised`.
    """
    (theta0, tau), _ = sharding.settled(theta0, tau)
    return [accuracies(predict, moved(theta0, tau, float(scale), place=place), tasks, batch=batch) for scale in scales]


def absolute(accuracies):
    """The mean over tasks of {task: accuracy}.

    >>> absolute({"mnist": 0.5, "svhn": 1.0})
    0.75
    """
    if not accuracies:
        raise ValueError("there is no accuracy to average")
    return sum(accuracies.values()) / len(accuracies)


def normalised(accuracies, finetuned):
    """The mean over tasks of accuracy/fine-tuned accuracy (arXiv:2212.04089), not the ratio of the means.

    The denominators come from the same split and the same way of fine-tuning; say which, where you report the number.

    >>> round(normalised({"a": 0.6, "b": 0.9}, {"a": 0.8, "b": 0.95}), 6)
    0.848684
    """
    missing = [task for task in accuracies if task not in finetuned]
    zero = [task for task in accuracies if task in finetuned and not finetuned[task] > 0]
    if missing:
        known = ", ".join(finetuned) or "none"
        raise ValueError(f"no fine-tuned accuracy for {tree.listing(missing)}; there are {known}")
    if zero:
        raise ValueError(f"the fine-tuned accuracy of {tree.listing(zero)} is not above 0: it cannot divide")
    return absolute({task: value / finetuned[task] for task, value in accuracies.items()})


def nonlinear_advantage(nonlinear, linear, *, classes):
    """(nonlinear − linear)/(1 − 1/classes): what a tuned model gains over its own linearisation (arXiv:2305.12827).

    >>> nonlinear_advantage(0.9, 0.4, classes=2)
    1.0
    """
    if classes < 2:
        raise ValueError(f"a task needs at least 2 classes; got classes={classes}")
    return (nonlinear - linear) / (1 - 1 / classes)
