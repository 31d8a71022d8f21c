"""All ways of fine-tuning by one protocol: alone, added under every merge of the plan, negated beside a control task.

The denominators of normalised accuracy are those of the same way of fine-tuning.
"""
from collections.abc import Mapping
from typing import Any, NamedTuple

from tvjax import adapters, calibration, evaluation, learning, tree, vectors
from tvjax.experiment import adapted, finetune, merges, negation, rows
from tvjax.experiment.columns import columns
from tvjax.experiment.study import SPLITS, Bench
from tvjax.experiment.talos_plan import ADAPTERS, Tuning
from tvjax.experiment.talos_tuning import recipe, tuned
from tvjax.learning import adamerging


class Way(NamedTuple):
    """What one way of fine-tuning gave for all tasks: task vectors, masks (None: all entries), single-task accuracies.

    `single` {split: {task: accuracy}}; `seconds` {"calibration" or "fine-tuning": {task: seconds}}; `trained` {task:
    numbers that may move}.
    """

    tuning: Tuning
    taus: Mapping[str, Any]
    masks: Mapping[str, Any] | None
    single: dict[str, dict[str, float]]
    seconds: dict[str, dict[str, float]]
    trained: dict[str, int]


def way(bench: Bench, tuning: Tuning, folder, progress=None) -> Way:
    """Fine-tunes all tasks (or takes what is there) and judges each on its own task."""
    tasks = bench.usual.tasks
    if tuning.name == "full":
        taus, masks, seconds, trained = _full(bench, folder, progress)
    elif tuning.name in ADAPTERS:
        taus, masks, seconds, trained = _adapter(bench, tuning, folder, progress)
    else:
        made = tuned(bench, tuning, folder, budget=bench.todo.budget, progress=progress)
        taus, masks = ({task: getattr(one, what) for task, one in made.items()} for what in ("tau", "mask"))
        trained = {task: calibration.count(one.mask) for task, one in made.items()}
        seconds = {"calibration": {task: one.calibration for task, one in made.items()},
                   "fine-tuning": {task: one.seconds for task, one in made.items()}}
    judge = lambda task, split: bench.measure(vectors.add(bench.about.theta0, taus[task]), [task], split)[task]
    single = {split: {task: judge(task, split) for task in tasks} for split in SPLITS}
    return Way(tuning, taus, masks, single, seconds, trained)


def _adapter(bench: Bench, tuning: Tuning, folder, progress):
    method = adapters.build(tuning.name, tuning.options)
    made = {task: adapted.dense(bench, method, task, folder, recipe=recipe(bench, tuning), label=tuning.label,
                                progress=progress) for task in bench.usual.tasks}
    seconds = {"calibration": dict.fromkeys(made, 0.0),
               "fine-tuning": {task: one.seconds for task, one in made.items()}}
    trained = {task: one.trained for task, one in made.items()}
    return {task: one.tau for task, one in made.items()}, None, seconds, trained


def _full(bench: Bench, folder, progress):
    made = {task: finetune.finetune(bench.about, bench.usual, task, seed=bench.seed, workdir=folder,
                                    progress=progress) for task in bench.usual.tasks}
    seconds = {"calibration": dict.fromkeys(made, 0.0),
               "fine-tuning": {task: one.seconds for task, one in made.items()}}
    trained = dict.fromkeys(made, tree.size(bench.about.theta0))
    return {task: one.tau for task, one in made.items()}, None, seconds, trained


def single_rows(bench: Bench, one: Way) -> list[dict]:
    """Accuracies on the own task, seconds, the size of the masks and of what moved."""
    tasks, label = bench.usual.tasks, one.tuning.label
    base = {"method": label, "section": "single", "tuning": label, **bench.common(tasks)}
    with_average = lambda by: {**by, rows.AVERAGE: evaluation.absolute(by)}
    found = [{"metric": "accuracy", "value": value, "task": task, "split": split, **base}
             for split, by in one.single.items() for task, value in with_average(by).items()]
    found += [{"metric": "seconds", "value": value, "task": task, "split": "none", "what": what, **base}
              for what, by in one.seconds.items() for task, value in by.items()]
    entries = tree.size(bench.about.theta0)
    for task in tasks:
        kept = one.trained[task]
        ratio = float(vectors.norm(one.taus[task]) / vectors.norm(bench.about.theta0))
        found += [{"metric": "trainable", "value": kept / entries, "task": task, "split": "none", **base},
                  {"metric": "delta norm ratio", "value": ratio, "task": task, "split": "none", **base}]
    return found


def addition_rows(bench: Bench, one: Way, merging=None) -> list[dict]:
    """The plan's merges (or those given) of one way's task vectors."""
    tasks, label, found = bench.usual.tasks, one.tuning.label, []
    for merge in bench.usual.merges if merging is None else merging:
        judged = merges.judge(bench.about, bench.usual, merge, tasks, [one.taus[task] for task in tasks], one.single,
                              cache=bench.cache)
        found += _judged_rows(bench, label, merge.label, judged.accuracy, one.single, scale=judged.scale)
    return found


def _judged_rows(bench: Bench, label: str, merge: str, accuracy, single, **more) -> list[dict]:
    test = accuracy["test"]
    bench.say(f"{label} + {merge}, seed {bench.seed}: test {100 * evaluation.absolute(test):.1f} % "
              f"({100 * evaluation.normalised(test, single['test']):.1f} % normalised)")
    about = {**columns(bench.usual, data="none"), **more}
    return rows.accuracies(bench.common(bench.usual.tasks), f"{label} + {merge}", accuracy, single, section="addition",
                           tuning=label, merge=merge, **about)


def adamerging_rows(bench: Bench, one: Way) -> list[dict]:
    """AdaMerging of one way's task vectors, adapted on validation inputs without their labels."""
    tasks, about, options = bench.usual.tasks, bench.about, bench.todo.adamerging
    held = learning.pool([one.taus[task] for task in tasks])
    inputs = {task: (about.heads[task], about.splits[task]["val"][0]) for task in tasks}
    adapted = adamerging.adapt(about.predict, about.theta0, held, inputs, by=options["by"],
                                        steps=options["steps"], batch=options["batch"], seed=bench.seed)
    theta = adamerging.merged(about.theta0, held, adapted.coefficients)
    accuracy = {split: bench.measure(theta, tasks, split) for split in SPLITS}
    about = columns(bench.usual, data="unlabelled", seen="unlabelled val inputs")
    return _judged_rows(bench, one.tuning.label, f"adamerging by {options['by']}", accuracy, one.single, **about)


def negated(bench: Bench, one: Way) -> dict[str, negation.Negated]:
    """{task: its negation}; says the averages."""
    found = {task: negation.negate(bench, one.taus[task], task, scales=bench.todo.scales,
                                   threshold=bench.todo.threshold) for task in bench.usual.tasks}
    target, control = (100 * negation.average(found, metric, "test") for metric in ("target", "control"))
    bench.say(f"{one.tuning.label}, seed {bench.seed}: negated to {target:.1f} %, control {control:.1f} %")
    return found
