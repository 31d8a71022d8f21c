"""Dense prediction: the mean intersection over union of classes of pixels, and a hook for tokens of a Flax encoder.

IoU_c = |predicted c ∧ true c| / |predicted c ∨ true c|, from counts over all pixels; the mean is over the classes that
occur in either.
"""
import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import numpy as np


def confusion(predicted, labels, *, classes: int) -> np.ndarray:
    """Counts of pixels, (classes, classes): row the true class, column the predicted one; labels outside are ignored.

    >>> confusion([[0, 1, 1]], [[0, 1, 255]], classes=2).tolist()
    [[1, 0], [0, 1]]
    """
    predicted, labels = np.asarray(predicted).reshape(-1), np.asarray(labels).reshape(-1)
    if predicted.shape != labels.shape:
        raise ValueError(f"there are {predicted.size} predictions and {labels.size} labels of pixels")
    counted = (labels >= 0) & (labels < classes)
    if ((predicted[counted] < 0) | (predicted[counted] >= classes)).any():
        raise ValueError(f"predictions are classes from 0 to {classes - 1}")
    pairs = labels[counted].astype(np.int64) * classes + predicted[counted]
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def mean_iou(counts) -> float:
    """The mean IoU of a confusion matrix, over the classes that occur.

    >>> round(mean_iou(np.array([[2, 1], [0, 1]])), 4)
    0.5833
    """
    counts = np.asarray(counts)
    both = np.diagonal(counts)
    either = counts.sum(0) + counts.sum(1) - both
    if not either.any():
        raise ValueError("no pixel has been counted")
    return float((both[either > 0] / either[either > 0]).mean())


@functools.cache
def tokens(apply: Callable, module: str, *, skip: int = 0) -> Callable:
    """(params, inputs) -> what the module at a dotted path returns, (batch, tokens − skip, features).

    skip: leading tokens that are no patches, such as a class token. The network's own code stays as it is, so adapters
    and linearisation work on the result as on any `apply`.
    """
    def run(params, inputs):
        caught = []

        def note(call, args, kwargs, context):
            y = call(*args, **kwargs)
            if context.method_name == "__call__" and ".".join(context.module.path) == module:
                caught.append(y)
            return y
        with nn.intercept_methods(note):
            apply(params, inputs)
        if not caught:
            raise ValueError(f"the network calls no module {module!r}")
        return caught[-1][:, skip:]
    return run


def ridge_head(features, labels, *, classes: int, patch: int, ridge: float = 1.0, scale: float = 10.0):
    """The head of `unfold` by ridge regression of one-hot pixels on tokens, times `scale`: (features, patch²·classes).

    features: (batch, tokens, width); labels: (batch, height, width) classes of pixels.

    >>> ridge_head(np.ones((1, 1, 1)), np.array([[[0, 1], [1, 1]]]), classes=2, patch=2, scale=1.0).tolist()
    [[0.5, 0.0, 0.0, 0.5, 0.0, 0.5, 0.0, 0.5]]
    """
    tokens, labels = np.asarray(features, np.float64), np.asarray(labels)
    rows, width = round(tokens.shape[1] ** 0.5), tokens.shape[-1]
    tokens = tokens.reshape(-1, width)
    pixels = np.eye(classes)[labels].reshape(-1, rows, patch, rows, patch, classes).transpose(0, 1, 3, 2, 4, 5)
    pixels = pixels.reshape(len(tokens), -1)
    fitted = np.linalg.solve(tokens.T @ tokens + ridge * np.eye(width), tokens.T @ pixels)
    return jax.numpy.asarray(scale * fitted, jax.numpy.float32)


def unfold(features, head, *, patch: int):
    """Logits of pixels, (batch, height, width, classes), from tokens of square patches in rows.

    head: (features, patch·patch·classes). The picture is square.

    >>> unfold(jax.numpy.ones((1, 4, 2)), jax.numpy.ones((2, 12)), patch=2).shape
    (1, 4, 4, 3)
    """
    batch, count, _ = features.shape
    rows = round(count**0.5)
    cut = (features @ head).reshape(batch, rows, rows, patch, patch, -1)
    return jax.lax.transpose(cut, (0, 1, 3, 2, 4, 5)).reshape(batch, rows * patch, rows * patch, -1)
