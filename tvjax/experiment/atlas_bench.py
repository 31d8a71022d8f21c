"""What the studies of learned scaling share: ways to a model from task vectors, rows, and work that is done once.

Whatever was learned is kept in `folder`/learned under a hash of all that it followed from, so that an interrupted run
goes on where it was.
"""
import dataclasses
import time
from typing import Any

import jax
import numpy as np

from tvjax import checkpoints, evaluation, learning, results, sharding, tree
from tvjax.experiment import rows
from tvjax.experiment.study import Bench
from tvjax.learning import Scheme, ways
from tvjax.learning.course import Learned
from tvjax.learning.ways import Way

VALIDATION = ("labelled", "labelled validation examples of all tasks")
SHOTS = ("labelled", "labelled training examples of the target")
SEEN = {"addition": VALIDATION, "fractions": VALIDATION, "tta": ("test", "unlabelled inputs of the test split"),
        "negation": ("labelled", "labelled validation examples of the target and of the control"),
        **dict.fromkeys(("fewshot", "domains", "contribution", "peft", "selection", "basis", "gradient-free"), SHOTS)}


def way(bench: Bench, taus, scheme: Scheme, *, geometry: str = "standard") -> Way:
    """Coefficients on these task vectors, in the usual or the linearised geometry."""
    held = learning.pool(list(taus), bench.about.theta0, store=bench.todo.store)
    return of_pool(bench, held, scheme, geometry=geometry)


def of_pool(bench: Bench, held, scheme: Scheme, *, geometry: str = "standard") -> Way:
    if geometry == "linearised":
        predict = evaluation.classify_linearised(bench.about.encode, bench.about.readout)
        return ways.scaled(predict, bench.about.theta0, held, scheme, place=evaluation.paired)
    return ways.scaled(bench.about.predict, bench.about.theta0, held, scheme)


def named(scheme: Scheme) -> str:
    """What a scheme is called in tables.

    >>> named(Scheme(by="part", parts=5)), named(Scheme(blocks="weights")), named(Scheme(by="task"))
    ('aTLAS × 5', 'aTLAS, weights only', 'isotropic')
    """
    base = {"task": "isotropic", "tensor": "aTLAS", "row": "aTLAS by row", "column": "aTLAS by column",
            "part": f"aTLAS × {scheme.parts}"}[scheme.by]
    return base + (", weights only" if scheme.blocks == "weights" else "")


def once(folder, kind: str, like, compute, *parts) -> dict[str, Any]:
    """`compute()`, a dict of trees, numbers and lists, kept under the hash of `parts`.

    like: the structure of its "params", the only arrays.
    """
    key = evaluation.content_key(kind, *parts)
    path = folder / "learned" / f"{kind.replace(' ', '-')}-{key[:16]}.jsonl"
    arrays = path.with_suffix(".safetensors")
    found = sharding.decided(lambda: results.read_lines(path)[-1:] if arrays.exists() else [])
    if found:
        return {**found[-1], "params": tree.rebuild(like, tree.flatten(checkpoints.load(arrays).params))}
    begun = time.perf_counter()
    made = compute()
    plain = {**{name: value for name, value in made.items() if name != "params"},
             "seconds": made.get("seconds", time.perf_counter() - begun)}
    params = tree.unflatten(tree.flatten(jax.tree.map(np.asarray, made["params"])))
    sharding.once(lambda: _keep(path, params, plain))
    return {**plain, "params": made["params"]}


def _keep(path, params, plain) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoints.save(params, path.with_suffix(".safetensors"))
    results.append_line(path, plain)


def plain(course) -> dict[str, Any]:
    return dataclasses.asdict(course)


def told(found: Learned) -> dict[str, Any]:
    """What `once` keeps of a course."""
    return {"params": found.params, "epoch": found.epoch, "value": _finite(found.verdict.value),
            "trace": [_finite(one.value) for one in found.trace], "told": [list(one.told) for one in found.trace],
            "seconds": found.seconds, "steps": len(found.losses)}


def _finite(x):
    return float(x) if np.isfinite(x) else None


def row(bench: Bench, part: str, method: str, task: str, value: float, *, metric: str = "accuracy", split: str = "test",
        **more) -> dict:
    """One row of a study."""
    return {"metric": metric, "value": float(value), "method": method, "task": task, "split": split, "part": part,
            **saw(part, method), "added": 0, **rows.common(bench.usual, bench.usual.tasks, bench.seed), **more}


def saw(part: str, method: str) -> dict[str, str]:
    """What a method saw besides task vectors: kind of data, and in words. The chosen α is every row's right.

    >>> saw("tta", "aTLAS")["data"], saw("addition", "searched α")["data"]
    ('test', 'none')
    """
    if method.startswith(("zero-shot", "fine-tuned", "searched")):
        return {"data": "none", "seen": "nothing"}
    return dict(zip(("data", "seen"), SEEN[part], strict=True))
