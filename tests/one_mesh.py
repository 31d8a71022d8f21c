"""A whole job of two toy tasks on one mesh over all processes, which may die in the middle of its second fine-tuning.

    python tests/one_mesh.py FOLDER (well | die) HOST:PORT,COUNT,INDEX
"""
import os
import pathlib
import runpy
import sys

import jax

from tests import toy_tasks
from tvjax import experiment, sharding, training
from tvjax.experiment import finetune, job
from tvjax.experiment.loading import Problem

ROOT = pathlib.Path(__file__).parents[1]
STEPS, BATCH, DEADLY, SILENCE = 6, 16, 3, 8


def config(data=1):
    """The quickstart's, made small."""
    made = runpy.run_path(str(ROOT / "configs" / "quickstart.py"))["get_config"]("runlocal")
    made.update(tasks=("greek", "digits"), save_models=False, merges=made.merges[1:2], batch=BATCH)
    made.finetune.update(steps=STEPS, batch=BATCH, lr=0.02, warmup=1)
    made.mesh.data = data
    return made


def problem(plan):
    """Toy tasks under the names of a plan."""
    base = toy_tasks.theta0()
    made = {task: toy_tasks.task(base, toy_tasks.vector(i, base), i + 2) for i, task in enumerate(plan.tasks, 1)}
    splits = {task: dict.fromkeys(("train", "val", "test"), split) for task, (_, split) in made.items()}
    keys = {task: {split: f"{task} {split}" for split in by} for task, by in splits.items()}
    return Problem(None, jax.device_get(base), toy_tasks.PREDICT, {task: head for task, (head, _) in made.items()},
                   splits, "toy", keys, toy_tasks.encode)


def dying(split, recipe, own=training.recipe_batches):
    """The feed of a process that is gone after a few steps of the second task."""
    def feed(start=0):
        for step, batch in enumerate(own(split, recipe)(start=start), start):
            if step == DEADLY and (finetuned := list(pathlib.Path(sys.argv[1]).rglob("greek.json"))):
                print(f"dies after {finetuned[0].name}", flush=True)
                os._exit(9)
            assert len(batch[1]) == BATCH // jax.process_count()
            yield batch
    return feed


def do(folder, data=1):
    """The rows of the job."""
    finetune.SAVE_EVERY, job.problem = 2, problem
    with sharding.on(sharding.from_config(config(data))):
        return experiment.run(config(data), folder, say=lambda line: print(line, flush=True), progress=False)


def main(folder, how, where):
    sharding.start(where, timeout=200, silence=SILENCE)
    if how == "die" and jax.process_index() == 1:
        training.recipe_batches = dying
    try:
        rows = do(folder, jax.process_count())
    except RuntimeError:
        sharding.broken_off()
        raise
    assert bool(rows) == (jax.process_index() == 0)
    sharding.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
