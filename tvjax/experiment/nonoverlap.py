"""The control of arXiv:2405.07813, §3: each task is fine-tuned in a part of the weights of its own.

A random partition of all P entries into T equal parts; task t trains the t-th part alone. Then merging erases nothing,
and what a merged model still loses is interference between tasks, not between weights.
"""
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import checkpoints, evaluation, training, tree, vectors
from tvjax.compression import bits as packed
from tvjax.compression.codec import per_leaf
from tvjax.experiment import finetune


def partition(theta0: Any, tasks: int, *, seed: int) -> list[Any]:
    """A tree of `Bits` for each task; every entry belongs to exactly one, and their sizes differ by at most one."""
    flat = tree.flatten(theta0)
    size = sum(x.size for x in flat.values())
    owner = np.random.default_rng(seed).permutation(size) % tasks
    ends = np.cumsum([x.size for x in flat.values()])
    parts = dict(zip(flat, np.split(owner, ends[:-1]), strict=True))
    mask = lambda task: {name: packed.pack((part == task).reshape(flat[name].shape)) for name, part in parts.items()}
    return [tree.rebuild(theta0, mask(task)) for task in range(tasks)]


@functools.cache
def masked_loss(predict, smoothing: float):
    """(params, batch, key, ((head, classes), θ0, mask)) -> the loss where entries outside of the mask are θ0's.

    Their gradients vanish, so that clipping and moments see the own part alone; one program serves all tasks.
    """
    usual = finetune.loss(predict, smoothing)

    def loss(params, batch, key, frozen):
        head, theta0, mask = frozen
        own = per_leaf(lambda x, base, bits: jnp.where(packed.unpack(bits), x, base), params, theta0, mask)
        return usual(own, batch, key, head)
    return loss


def masked_vector(problem, plan, task: str, mask: Any, *, seed: int, folder: Path, progress=None):
    """The task vector of a task that trains the entries of `mask` alone, kept in `folder` and reused from there."""
    path = finetune.vector_path(folder, task, seed)
    key = evaluation.content_key(dict(plan.finetune), seed, problem.keys[task]["train"],
                                 {name: bits.packed for name, bits in packed.flatten(mask).items()})
    if finetune.known(path).get("key") == key:
        return vectors.TaskVector(checkpoints.load_task_vector(path).params)
    head = problem.heads[task]
    width = problem.width
    frozen = ((jnp.pad(head, ((0, 0), (0, width - head.shape[1]))), jnp.int32(head.shape[1])), problem.theta0, mask)
    recipe = plan.recipe(seed)
    split = tuple(problem.splits[task]["train"])
    feed = training.recipe_batches(split, recipe)
    state = Path(folder) / "state" / f"{task}-{seed}-{key[:12]}"
    fitted = training.fit(masked_loss(problem.predict, recipe.label_smoothing), problem.theta0, feed, recipe,
                          frozen=frozen, place=training.own_rows, state_dir=state, save_every=500, progress=progress)
    moved = vectors.task_vector(fitted.params, problem.theta0)  # weight decay moved the rest: it goes
    tau = jax.device_get(per_leaf(lambda x, bits: packed.where_bits(bits, x), moved, mask))
    finetune.keep(path, tau, {"key": key}, base=problem.base, state=state)
    return tau
