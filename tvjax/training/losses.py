"""What a vision loss is made of: images normalised on the device, and the mean cross-entropy."""
import jax
import jax.numpy as jnp
import optax


def normalise(images, mean, std, *, axis=-1):
    """Float32 images (x/255 − mean)/std from uint8 ones: a batch travels to the device at a quarter of its size.

    `mean` and `std` hold one number a channel; `axis` is the channels' axis, −1 for (…, height, width, channels) and −3
    for (…, channels, height, width).

    >>> normalise(jnp.array([[[[255, 0]]]], jnp.uint8), [0.5, 0.5], [0.5, 0.25]).ravel().tolist()
    [1.0, -2.0]
    """
    shape = [1] * images.ndim
    shape[axis] = images.shape[axis]
    mean, std = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), shape[axis]).reshape(shape) for x in (mean, std))
    return (images.astype(jnp.float32) / 255 - mean) / std


def cross_entropy(logits, labels, *, smoothing=0.0):
    """Mean of −log softmax(logits)[label], in float32; `smoothing` spreads that share of the target over all classes.

    logits: (examples, classes); labels: (examples,) integers.

    >>> round(float(cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 3]))), 4)
    1.3863
    """
    logits = logits.astype(jnp.float32)
    if not smoothing:
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    target = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1], dtype=jnp.float32), smoothing)
    return optax.losses.softmax_cross_entropy(logits, target).mean()
