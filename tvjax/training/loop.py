"""One training loop for full, tangent, low-rank and sparse fine-tuning: what differs is `loss`, `params`, `transform`.

θ ← θ + update(∇ loss(θ, batch, key)); the key of step s is fold_in(key(seed), s), its batch depends on (seed, s) alone,
and the whole state is saved, so an interrupted run ends with the very bits of an uninterrupted one.
"""
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm.auto import tqdm

from tvjax import sharding
from tvjax.training.recipe import optimizer


class Fitted(NamedTuple):
    """What `fit` returns.

    `losses` holds one number a step, those before an interruption too; `seconds` is the wall time of this call,
    compilation with it; `rate` the examples a second after the first step (0 where none followed); `aux` the last
    step's (None where this call took no step).
    """

    params: Any
    losses: np.ndarray
    seconds: float
    steps: int
    rate: float
    aux: Any


def fit(loss, params, feed, recipe, *, frozen=None, transform=None, place=None, state_dir=None, save_every=500,
        log_every=20, progress=None, watch=None, watch_every=1):
    """Minimises `loss` over `params` for `recipe.steps` steps; the caller's `params` are left as they are.

    loss: (params, batch, key) -> scalar, or (scalar, aux) with a tree of floats.
    frozen: a tree of arrays that are not trained, if there are any: they get no gradient and no optimizer state, and
      `loss` takes them as its fourth argument.
    feed: an iterable of batches, or a function `feed(start=step)` that gives the iterable from a step on, for instance
      `functools.partial(batches, split, batch=128, seed=0)`. Numpy arrays, examples first.
    transform: an optax transformation in place of `optimizer(recipe)`, for instance `sparse(optimizer(recipe), mask)`.
    place: what puts a batch on the devices. By default it is cut along its examples over the mesh on which `params` or
      `frozen` lie, or over that of `sharding.on`; parameters that are on none are put there by its rules, and come back
      to the host. Processes that share a mesh all feed the same batches, or each its own rows of them alone
      (`recipe_batches`, which takes `own_rows`). With one device nothing is moved.
    state_dir: where the state is saved every `save_every` steps and at the end, and where a run continues from.
    progress: whether to show a bar; None: on a terminal and in a notebook. Never but on process 0.
    watch: a function (params, steps done) that is called after every `watch_every` steps, before the next batch is
      drawn; where it answers True, the run ends there. What it keeps it copies: the next step reuses the memory.

    Raises:
      ValueError: where the loss is no longer finite, the batches end early, or `state_dir` holds another run.

    >>> from tvjax.training import Recipe
    >>> recipe = Recipe(steps=200, batch=1, lr=0.1, warmup=0, weight_decay=0.0)
    >>> fitted = fit(lambda params, batch, key: (params["w"] - batch[0]) ** 2, {"w": jnp.array(0.0)},
    ...              itertools.repeat(np.ones(1, np.float32)), recipe)
    >>> round(float(fitted.params["w"]), 2), fitted.losses.shape
    (1.0, (200,))
    """
    begun = time.perf_counter()
    transform = optimizer(dataclasses.replace(recipe, seed=0)) if transform is None else transform
    layout = sharding.found(params, frozen)
    if layout is not None:
        params, frozen, place, home = _spread(params, frozen, place, layout)
    state = _start(params, transform, recipe)
    if state_dir is not None:
        state = _resume(state, state_dir, recipe)
    kept = None if layout is None else tuple(x.sharding for x in jax.tree.leaves(state))
    advance = functools.partial(_advance, loss=loss, update=transform.update, parts=recipe.accumulation, kept=kept)
    key, aux, first, steps = jax.random.key(recipe.seed), None, int(state["step"]), recipe.steps
    done = steps
    with _Clock(steps, first, progress) as clock:
        for step, batch in _numbered(feed, first, steps):
            batch = batch if place is None else place(batch)
            state, aux = advance(state, batch, frozen, key)
            clock.count(batch)
            done = step + 1
            saving = state_dir is not None and (done == steps or done % save_every == 0)
            if saving or step == first or done == steps or done % log_every == 0:
                clock.show(done, _finite_losses(state, done, recipe))
            if saving or done == steps:
                _check_weights(state["params"], done)
            if saving:
                _save(state, state_dir, done)
            if watch is not None and done % watch_every == 0 and watch(sharding.whole(state["params"]), done):
                break
    seconds = time.perf_counter() - begun
    params, aux = state["params"], sharding.host(aux)
    params = params if layout is None else home(params)
    return Fitted(params, np.array(state["losses"])[:done], seconds, done, clock.rate, aux)


def _spread(params, frozen, place, layout):
    """What is trained and what is not on the layout's devices, how a batch gets there, and how the result comes back:
    to the host where the parameters were not on the mesh."""
    there = any(sharding.mesh_of(x) is not None for x in jax.tree.leaves(params))
    home = (lambda params: params) if there else sharding.host
    place = functools.partial(sharding.spread, layout=layout) if place is None else place
    return sharding.place(params, layout), sharding.place(frozen, layout), place, home


def _start(params, transform, recipe):
    """The state before the first step, in buffers of its own, since a step donates them."""
    losses = np.full(recipe.steps, np.nan, np.float32)
    state = {"params": params, "opt": transform.init(params), "step": np.int32(0), "losses": losses}
    state = jax.tree.map(lambda x: jnp.array(x, jnp.asarray(x).dtype, copy=True), state)
    meshes = [x.sharding.mesh for x in jax.tree.leaves(state) if isinstance(x.sharding, jax.NamedSharding)]
    return _on_mesh(state, meshes[0]) if meshes else state


def _on_mesh(state, mesh):
    """The state with counters and losses on the parameters' devices too, so that the first step compiles for all."""
    layout = sharding.Layout(mesh)
    put = lambda x: x if isinstance(x.sharding, jax.NamedSharding) else sharding.replicate(x, layout)
    return jax.tree.map(put, state)


@functools.partial(jax.jit, static_argnames=("loss", "update", "parts", "kept"), donate_argnames="state")
def _advance(state, batch, frozen, key, *, loss, update, parts, kept=None):
    """One update of the weights; compiled once for all runs with the same loss, recipe and shapes.

    kept: the shardings of the state's leaves on a mesh, which they keep.
    """
    params, step = state["params"], state["step"]
    (value, aux), grads = _gradient(loss, params, batch, jax.random.fold_in(key, step), frozen, parts)
    with jax.numpy_dtype_promotion("standard"):  # optax 0.2.8 raises floats to integer counts
        updates, opt = update(grads, state["opt"], params)
    losses = state["losses"].at[step].set(value.astype(jnp.float32))
    state = {"params": optax.apply_updates(params, updates), "opt": opt, "step": step + 1, "losses": losses}
    return sharding.constrain(state, kept), aux


def _gradient(loss, params, batch, key, frozen, parts):
    """((loss, aux), gradient) of a batch, taken in `parts` and averaged.

    Not by optax.MultiSteps, which runs the whole optimizer on every part and keeps one more copy of the gradient.
    """
    def with_aux(params, batch, key):
        out = loss(params, batch, key) if frozen is None else loss(params, batch, key, frozen)
        return out if isinstance(out, tuple) else (out, None)

    gradient = jax.value_and_grad(with_aux, has_aux=True)
    if parts == 1:
        return gradient(params, batch, key)
    examples = jax.tree.leaves(batch)[0].shape[0]
    one = lambda params, numbered: gradient(params, numbered[0], jax.random.fold_in(key, numbered[1][0]))
    mean = optax.microbatching.AccumulationType.MEAN
    split = optax.microbatch(one, argnums=1, microbatch_size=examples // parts, accumulator=mean)
    return split(params, (batch, jnp.arange(examples)))


def _numbered(feed: Callable[..., Iterable] | Iterable, start, steps):
    """Pairs (step, batch) from `start` to `steps`; a ValueError where the batches end before."""
    if start >= steps:
        return
    rest = iter(feed(start=start) if callable(feed) else itertools.islice(feed, start, None))
    for step in range(start, steps):
        batch = next(rest, None)
        if batch is None:
            raise ValueError(f"the batches ended at step {step} of {steps}: give a feed that goes on, or fewer steps")
        yield step, batch


def _finite_losses(state, step, recipe):
    """The losses of the steps so far, after a look for the first that is not finite."""
    losses = np.array(state["losses"])[:step]  # cut on the host: on the device each length would compile anew
    if not np.isfinite(losses).all():
        first = int(np.argmin(np.isfinite(losses)))
        raise ValueError(f"the loss is {losses[first]} at step {first} of {recipe.steps} (lr={recipe.lr:g}): "
                         "lower the learning rate or look for bad values in the batches")
    return losses


@jax.jit
def _all_finite(tree):
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


def _check_weights(params, step):
    if not _all_finite(params):
        raise ValueError(f"the weights are not finite after step {step}: lower the learning rate")


def _save(state, state_dir, step):
    from tvjax import checkpoints  # orbax takes a second to import, and most runs never save
    checkpoints.save_state(state, state_dir, step)


def _resume(state, state_dir, recipe):
    """The latest state under `state_dir`, or `state` where there is none; the recipe beside it must be the same."""
    from tvjax import checkpoints
    path = pathlib.Path(state_dir) / "recipe.json"
    ours = dataclasses.asdict(recipe)
    if checkpoints.latest_step(state_dir) is None:
        if jax.process_index() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, json.dumps(ours))
        return state
    theirs = json.loads(path.read_text()) if path.exists() else ours
    changed = [f"{k}={theirs.get(k)} (now {v})" for k, v in ours.items() if theirs.get(k) != v]
    if changed:
        raise ValueError(f"{state_dir} holds a run with {', '.join(changed)}: use its recipe or another folder")
    return checkpoints.restore_state(state, state_dir)


def _write(path, text):
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    os.replace(partial, path)


class _Clock:
    """The bar on process 0, and the examples a second since the first step was done (compilation left out)."""

    def __init__(self, steps, step, progress):
        shown = sys.stderr.isatty() or "ipykernel" in sys.modules if progress is None else progress
        self.bar = tqdm(total=steps, initial=step, unit="step", disable=not shown or jax.process_index() != 0)
        self.begun, self.examples, self.rate = None, 0, 0.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.bar.close()

    def count(self, batch):
        self.examples += jax.tree.leaves(batch)[0].shape[0]

    def show(self, done, losses):
        """Called when the losses have arrived, which is when the device has caught up."""
        now = time.perf_counter()
        if self.begun is None:
            self.begun, self.examples = now, 0
        else:
            self.rate = self.examples / (now - self.begun)
        self.bar.set_postfix(loss=f"{losses[-1]:.4f}", examples=f"{self.rate:.0f}/s", refresh=False)
        self.bar.update(done - self.bar.n)
