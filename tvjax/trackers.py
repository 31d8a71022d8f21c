"""Rows of a run sent to a tracker as well: Weights & Biases or MLflow, by one function; neither is needed or imported.

`wandb:PROJECT` or `mlflow:EXPERIMENT`. A row's value is logged under "metric/split/method/task"; rows that differ in
nothing but α become one curve. results.jsonl stays the record: what is here can be sent again from it.
"""
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tvjax import tree

SENDERS: dict[str, Callable[..., None]] = {}


def parsed(text: str | None) -> tuple[str, str] | None:
    """(tracker, project) of "wandb:PROJECT"; None where nothing is asked for.

    Raises ValueError for another form, an unknown tracker, or one whose package is not installed.
    """
    if not text:
        return None
    tracker, _, project = text.partition(":")
    if tracker not in SENDERS:
        raise ValueError(f"no tracker {tracker!r}; {tree.did_you_mean(tracker, list(SENDERS))}")
    if not project:
        raise ValueError(f"track is {tracker}:NAME, with the name of a project or experiment; got {text!r}")
    if importlib.util.find_spec(tracker) is None:
        raise ValueError(f"track={text} needs the package {tracker}: pip install {tracker}")
    return tracker, project


def send(rows: Iterable[Mapping[str, Any]], to: tuple[str, str], *, name: str, config: Mapping[str, Any]) -> None:
    """Sends all rows that have a value as one run called `name`."""
    tracker, project = to
    SENDERS[tracker]([(key(row), row["value"], step) for row, step in steps(rows)], project, name=name, config=config)


def key(row: Mapping[str, Any]) -> str:
    """The name of a row's value.

    >>> key({"metric": "accuracy", "split": "test", "method": "ties", "task": "average", "tasks": 8, "seed": 0})
    'accuracy/test/ties/average/8 tasks/seed 0'
    """
    parts = [row["metric"], row["split"], row["method"], row["task"]]
    parts += [f"{row['tasks']} tasks"] if "tasks" in row else []
    return "/".join(map(str, [*parts, f"seed {row['seed']}"]))


def steps(rows: Iterable[Mapping[str, Any]]) -> Iterable[tuple[Mapping[str, Any], int]]:
    """(row, how many rows of its name came before) of all rows with a value."""
    seen: dict[str, int] = {}
    for row in rows:
        if row["value"] is not None:
            number = seen[key(row)] = seen.get(key(row), -1) + 1
            yield row, number


def _wandb(values, project: str, *, name: str, config) -> None:
    import wandb  # pyright: ignore[reportMissingImports]

    run = wandb.init(project=project, name=name, config=dict(config))
    by_step: dict[int, dict] = {}
    for label, value, step in values:
        by_step.setdefault(step, {})[label] = value
    for step, together in sorted(by_step.items()):
        run.log(together, step=step)
    run.finish()


def _mlflow(values, project: str, *, name: str, config) -> None:
    import mlflow  # pyright: ignore[reportMissingImports]

    mlflow.set_experiment(project)
    with mlflow.start_run(run_name=name):
        mlflow.log_dict(dict(config), "config.json")
        for label, value, step in values:
            mlflow.log_metric(label, value, step=step)


SENDERS.update(wandb=_wandb, mlflow=_mlflow)
