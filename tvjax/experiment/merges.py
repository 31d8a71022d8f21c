"""One merge judged: its λ and α chosen on the validation split, then one number a task on the test split.

θ = θ0 + α·operator(τ_1 … τ_T); α is the first maximum over the grid of the mean of accuracy/fine-tuned accuracy.
"""
import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import evaluation, vectors
from tvjax.experiment import planning
from tvjax.experiment.loading import Problem
from tvjax.merging import needed


class Judged(NamedTuple):
    """`accuracy` maps a split to {task: accuracy} at `scale`; `trace` holds (scale, normalised, absolute)."""

    tau: Any
    scale: float
    accuracy: dict[str, dict[str, float]]
    trace: tuple[tuple[float, float, float], ...]
    lam: tuple[float, ...] | None
    seconds: float


def judge(problem: Problem, plan, merge, tasks, taus, finetuned, *, cache) -> Judged:
    """Merges the task vectors of `tasks` and judges the result.

    finetuned: {split: {task: accuracy}}, the denominators. cache: the file that keeps what was measured.
    """
    lam = choose_lambdas(problem, plan, tasks, taus, cache=cache) if merge.searches_lambda else None
    begun = time.perf_counter()
    operator = planning.operator(merge, lam=None if lam is None else jnp.array(lam, jnp.float32))
    tau = combine(operator, taus, tasks, allow_nonfinite=plan.allow_nonfinite)
    seconds = time.perf_counter() - begun
    scale, trace = choose_scale(problem, plan, merge, tasks, tau, finetuned, cache=cache)
    theta = evaluation.moved(problem.theta0, tau, scale)
    accuracy = {split: measure(problem, plan, theta, tasks, split, cache=cache) for split in ("val", "test")}
    return Judged(tau, scale, accuracy, trace, lam, seconds)


def combine(operator, taus, tasks, *, allow_nonfinite: bool):
    """The merged vector; NaN and infinite entries are refused by name, or merged like others where they are allowed."""
    run = functools.partial(operator, tasks=tuple(tasks))
    return jax.block_until_ready((jax.jit(run) if allow_nonfinite else run)(list(taus)))


def choose_scale(problem, plan, merge, tasks, tau, finetuned, *, cache):
    """(α, trace): the first scale of the grid with the best average normalised accuracy; 1 where it is fixed."""
    if merge.scales is None:
        return 1.0, ()
    split = plan.select_on
    judged = problem.judged(tasks, split)
    found = evaluation.cached(
        cache, lambda: evaluation.sweep(problem.judging, problem.theta0, tau, merge.scales, judged, batch=plan.batch,
                                        place=problem.place),
        "sweep", *problem.told(), tau, list(merge.scales), [problem.keys[task][split] for task in tasks])
    at = dict(zip(merge.scales, found, strict=True))
    best = evaluation.search(lambda scale: evaluation.normalised(at[scale], finetuned[split]), merge.scales)
    return best.best, tuple((scale, value, evaluation.absolute(at[scale])) for scale, value in best.trace)


def measure(problem, plan, theta, tasks, split: str, *, cache) -> dict[str, float]:
    """{task: accuracy} of one model, each taken from the cache where it was measured before."""
    judged = problem.judged(tasks, split)
    one = lambda task: evaluation.cached(
        cache, lambda: evaluation.accuracy(problem.judging, problem.point(theta), *judged[task], batch=plan.batch),
        "accuracy", *problem.told(), theta, problem.keys[task][split])
    return {task: one(task) for task in tasks}


def choose_lambdas(problem, plan, tasks, taus, *, cache) -> tuple[float, ...]:
    """λ of each task: the first of 0.2 … 0.6 with the best accuracy of θ0 + m_t·Σ τ on its own validation split.

    arXiv:2405.07813; m_t = 1{|τ_t| > λ|Σ τ − τ_t|}.
    """
    total = jax.tree.map(lambda *xs: np.sum(np.stack(xs), 0, dtype=xs[0].dtype), *taus)

    def one(task, tau):
        theta = lambda lam: rebuilt(problem.theta0, tau, total, lam)
        at = lambda lam: measure(problem, plan, theta(lam), [task], plan.select_on, cache=cache)[task]
        return evaluation.search(at, planning.LAMBDAS).best
    return tuple(one(task, tau) for task, tau in zip(tasks, taus, strict=True))


@jax.jit
def rebuilt(theta0, tau, total, lam):
    """θ0 + m·Σ τ, the model of one task under its TALL-mask."""
    kept = lambda x, merged: jnp.where(needed(x[None], merged, lam)[0], merged, jnp.zeros_like(merged))
    return vectors.add(theta0, jax.tree.map(kept, tau, total))


def data_used(merge, plan) -> str:
    """What a method saw besides the task vectors, in words."""
    chosen = [name for name, on in (("λ", merge.searches_lambda), ("α", merge.scales is not None)) if on]
    return f"{plan.select_on} labels for {' and '.join(chosen)}" if chosen else "none"
