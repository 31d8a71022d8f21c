"""The report of merges that adapt without labels: a table for each kind of data, coefficients over steps and tensors.
"""
import statistics

from tvjax import results
from tvjax.reports import Section, figures
from tvjax.reports.grouping import grouped

ALARM = ("Test-time adaptation: methods of the group that says so have seen the inputs, not the labels, of the very "
         "test images they are judged on. No other group may be compared with it.")


def sections(run) -> list[Section]:
    """Accuracies by kind of data, entropy, coefficients."""
    rows = run.rows
    count = max(row["tasks"] for row in rows if row.get("section") == "adapted")
    tables = grouped(rows, tasks=count, section=("training-free", "adapted"))
    alarms = [ALARM] if any(row.get("data") == "test" for row in rows) else []
    seconds = results.select(rows, metric="seconds", method="all")[0]["value"]
    note = f"This run, all that was not reused: {seconds:.0f} s on {run.header['device']}."
    return [Section(f"{count} tasks", "", tables, {}, (note,), alarms), _entropy(rows), _coefficients(rows)]


def _entropy(rows) -> Section:
    series: dict = {}
    for row in results.select(rows, metric="entropy"):
        series.setdefault(row["method"], {}).setdefault(row["step"], []).append(row["value"])
    ends = tuple((method, statistics.fmean(found[min(found)]), statistics.fmean(found[max(found)]))
                 for method, found in series.items())
    table = results.Table(("method", "first steps", "last steps"), ends)
    return Section("Entropy of predictions", "", {"mean entropy of a batch (nats)": table},
                   {"entropy over steps": figures.lines(series, x="step", y="entropy (nats)")}, scale=1.0, digits=3)


def _coefficients(rows) -> Section:
    drawn = {}
    traces = results.select(rows, metric="coefficient trace")
    for method in dict.fromkeys(row["method"] for row in traces):
        mine = results.select(traces, method=method)
        series: dict = {}
        for row in mine:
            series.setdefault(row["task"], {}).setdefault(row["step"], []).append(row["value"])
        drawn[f"{method}: mean coefficient of each task vector"] = figures.lines(series, x="step", y="λ")
    finals = [row for row in rows if row["metric"] == "coefficient"]
    for method in dict.fromkeys(row["method"] for row in finals):
        mine = results.select(finals, method=method)
        tasks = dict.fromkeys(row["task"] for row in mine)
        drawn[f"{method}: final coefficients over tensors"] = figures.boxes(
            {task: [row["value"] for row in mine if row["task"] == task] for task in tasks}, y="λ")
        kinds = sorted({kind(row["tensor"]) for row in mine})
        drawn[f"{method}: final by kind of tensor"] = figures.boxes(
            {name: [row["value"] for row in mine if kind(row["tensor"]) == name] for name in kinds}, y="λ")
    return Section("Coefficients", "All lie in [0, 1] and start from one value.", {}, drawn)


def kind(name: str) -> str:
    """The part of a block that a tensor belongs to, from the last words of its name.

    >>> kind("vision_model.encoder.layers.0.mlp.fc1.weight"), kind("bias")
    ('fc1.weight', 'bias')
    """
    return ".".join(name.split(".")[-2:])
