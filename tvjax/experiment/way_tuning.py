"""Task vectors in the space of each way, kept in a folder of its own and reused where nothing has changed."""
import json
import pathlib
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tvjax import checkpoints, evaluation, training, vectors
from tvjax.experiment import finetune, study
from tvjax.experiment.ways import Way, loss


class Trained(NamedTuple):
    """A task vector and what it cost; `seconds` and `rate` (examples a second) of the run that made it."""

    tau: vectors.TaskVector
    seconds: float
    rate: float
    loss: float


def tune(bench: study.Bench, way: Way, task: str, folder, *, theirs: str = "", progress: bool | None = None) -> Trained:
    """τ of one task by one way; standard fine-tuning is shared with other jobs (`theirs`: a run to take it from)."""
    if way.plan.kind == "standard":
        tau = study.vector(bench, task, folder, theirs=theirs, progress=progress)
        beside = finetune.vector_path(folder, task, bench.seed).with_suffix(".json")
        return Trained(tau, **{"seconds": 0.0, "rate": 0.0, "loss": 0.0, **json.loads(beside.read_text())["cost"]})
    path = place(folder, way, task, bench.seed)
    key = evaluation.content_key(json.loads(json.dumps(_told(way))), bench.seed, bench.about.keys[task]["train"])
    about = finetune.known(path)
    if about.get("key") == key:
        bench.say(f"{task}, seed {bench.seed}, {way.name}: task vector reused")
        return Trained(vectors.TaskVector(checkpoints.load_task_vector(path).params), **about["cost"])
    return _train(bench, way, task, path, key, progress)


def place(folder, way: Way, task: str, seed: int) -> pathlib.Path:
    """Where a task vector is kept."""
    return pathlib.Path(folder) / "task_vectors" / slug(way.name) / f"seed{seed}" / f"{task}.safetensors"


def slug(name: str) -> str:
    """A name as a folder's.

    >>> slug("L-LoRA (network)")
    'l-lora-network'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "way"


def _told(way: Way) -> dict:
    """What training depends on besides seed, base and data."""
    plan = way.plan
    return {"kind": plan.kind, "scope": plan.scope, "method": repr(plan.method), "seed": plan.seed, **plan.recipe}


def _train(bench, way, task, path, key, progress) -> Trained:
    recipe = training.Recipe(**way.plan.recipe, seed=bench.seed)
    head = bench.about.heads[task]
    width = head.shape[1] if recipe.label_smoothing else bench.about.width
    frozen = (way.family.base, way.start, jnp.pad(head, ((0, 0), (0, width - head.shape[1]))), jnp.int32(head.shape[1]))
    feed = training.recipe_batches(tuple(bench.about.splits[task]["train"]), recipe)
    state = path.parent / f".state-{task}-{key[:12]}"
    family = (way.family.place, way.family.encode, way.family.readout)
    fitted = training.fit(loss(family, recipe.label_smoothing, bench.about.criterion), way.start, feed, recipe,
                          frozen=jax.device_put(frozen), place=training.own_rows, state_dir=state,
                          save_every=finetune.SAVE_EVERY, progress=progress)
    tau = jax.device_get(vectors.task_vector(fitted.params, way.start))
    cost = {"seconds": fitted.seconds, "rate": fitted.rate, "loss": float(fitted.losses[-1])}
    finetune.keep(path, tau, {"key": key, "cost": cost}, base=bench.about.base, state=state,
                  metadata={"way": way.name})
    bench.say(f"{task}, seed {bench.seed}, {way.name}: fine-tuned in {fitted.seconds:.0f} s, loss {cost['loss']:.3f}")
    return Trained(tau, **cost)
