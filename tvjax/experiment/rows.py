"""What an experiment found as rows of `tvjax.results`: accuracies, the traces of α, cosines, costs.

metric is "accuracy" (absolute, a share in [0, 1]), "normalised accuracy" (over the fine-tuned model's on the same
split, averages being means of ratios), "trace" (the normalised average at `scale`, on the split that selects),
"cosine", "delta norm ratio", "seconds", "examples per second" or "peak bytes". `tasks` is the number of merged tasks.
"""
from typing import Any

from tvjax import evaluation
from tvjax.data import glyphs
from tvjax.experiment.columns import family

AVERAGE = "average"


def suite_name(tasks, suite: str = "glyphs") -> str:
    """"glyphs:8" for the first 8 tasks of the glyph benchmark (and so on), else the suite and the tasks' names.

    >>> suite_name(("greek", "braille"))
    'glyphs:greek+braille'
    """
    standard = suite == "glyphs" and len(tasks) in (8, 14, 20) and tuple(tasks) == glyphs.suite(len(tasks))
    return f"glyphs:{len(tasks)}" if standard else f"{suite}:{'+'.join(tasks)}"


def common(plan, tasks, seed: int) -> dict[str, Any]:
    """The fields that all rows of a suite and seed share."""
    return {"suite": suite_name(tasks, plan.suite), "tasks": len(tasks), "seed": seed, "model": plan.model,
            "family": family(plan)}


def accuracies(shared: dict, method: str, accuracy: dict, finetuned: dict, **more) -> list[dict]:
    """Rows of one method: absolute and normalised, for every task and on average, on every split."""
    rows = []
    for split, by_task in accuracy.items():
        averages = {"accuracy": evaluation.absolute(by_task),
                    "normalised accuracy": evaluation.normalised(by_task, finetuned[split])}
        ratios = {task: value / finetuned[split][task] for task, value in by_task.items()}
        for metric, values in (("accuracy", by_task), ("normalised accuracy", ratios)):
            for task, value in {**values, AVERAGE: averages[metric]}.items():
                rows.append({"metric": metric, "value": value, "method": method, "task": task, "split": split,
                             "added": 0, **shared, **more})
    return rows


def merged(shared: dict, merge, judged, finetuned: dict, *, split: str, data: str) -> list[dict]:
    """Rows of one merge: its accuracies, the trace of α on `split`, and the seconds that merging took."""
    options = {name: value for name, value in merge.options.items() if name != "lam" or value != "val"}
    chosen = {} if judged.lam is None else {"lam": list(judged.lam)}
    more = {"scale": judged.scale, "merge": merge.name, "options": {**options, **chosen}, "data": data}
    rows = accuracies(shared, merge.label, judged.accuracy, finetuned, **more)
    base = {"method": merge.label, "task": AVERAGE, **shared}
    rows += [{"metric": "trace", "value": value, **base, "split": split, "scale": scale, "absolute": absolute}
             for scale, value, absolute in judged.trace]
    return [*rows, {"metric": "seconds", "value": judged.seconds, **base, "split": "none", "what": "merging"}]


def tuning(shared: dict, tuned: dict, cosines) -> list[dict]:
    """Rows of the task vectors of one seed: cost of fine-tuning, distance to θ0, cosines of all pairs."""
    rows = []
    for task, one in tuned.items():
        base = {"method": "fine-tuned", "task": task, "split": "none", **shared}
        values = {"seconds": one.seconds, "examples per second": one.rate, "delta norm ratio": one.ratio}
        rows += [{"metric": metric, "value": value, **base, "what": "fine-tuning", "note": one.note}
                 for metric, value in values.items()]
    names = list(tuned)
    pairs = [(i, j) for i in range(len(names)) for j in range(i + 1, len(names))]
    return rows + [{"metric": "cosine", "value": float(cosines[i][j]), "method": "fine-tuned", "task": names[i],
                    "other": names[j], "split": "none", **shared} for i, j in pairs]
