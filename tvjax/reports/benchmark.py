"""The report of a benchmark of real tasks: merges beside their controls, negation, where the data are from, cost."""
from tvjax import results
from tvjax.reports import Section, figures
from tvjax.reports.grouping import spread

NOTE = ("Test accuracy in percent. Normalised: the mean over tasks of accuracy over that of the model fine-tuned on "
        "the task alone. α is the first best on validation data. Several seeds: mean ± deviation. The linear probe is "
        "fitted on the pretrained features of the training examples: one head a task, no shared weights moved.")
NEGATION = ("θ0 − α·τ of each task: α ruins the task most while the control keeps its share of accuracy on validation "
            "data. Lower is better for the target, higher for the control.")
ORDER = ("zero-shot", "linear probe")


def sections(run) -> list[Section]:
    """Addition for each number of tasks, negation, cost."""
    counts = sorted({row["tasks"] for row in run.rows if row["metric"] == "normalised accuracy"}, reverse=True)
    made = [_addition(run, count) for count in counts]
    made += [_negation(run)] if results.select(run.rows, metric="target") else []
    made += [_data(run)] if results.select(run.rows, metric="examples") else []
    return [*made, _cost(run)]


def methods(rows, count: int) -> list[str]:
    """The methods in the order of the table."""
    named = dict.fromkeys(row["method"] for row in results.select(rows, metric="accuracy", tasks=count))
    rest = [name for name in named if name not in (*ORDER, "fine-tuned")]
    return [*(name for name in ORDER if name in named), *rest, "fine-tuned"]


def _addition(run, count: int) -> Section:
    test = results.select(run.rows, split="test", tasks=count)
    tasks = list(dict.fromkeys(row["task"] for row in test if row["metric"] == "accuracy"))
    tasks.remove("average")
    published = run.config["benchmark"]["expected"]
    pick = lambda method, metric, task: spread([row["value"] for row in results.select(
        test, method=method, metric=metric, task=task)])
    lines = []
    for name in methods(run.rows, count):
        alpha = dict.fromkeys(row["scale"] for row in results.select(test, method=name, metric="accuracy",
                                                                     task="average") if "scale" in row)
        lines.append((name, pick(name, "accuracy", "average"), pick(name, "normalised accuracy", "average"),
                      *([published.get(name)] if published else []), ", ".join(f"{x:g}" for x in alpha) or "–",
                      *(pick(name, "accuracy", task) for task in tasks)))
    head = ("method", "average", "normalised", *(["published"] if published else []), "α", *tasks)
    notes = (NOTE, *(["Published: average test accuracy of the same method on the same checkpoints, by their authors."]
                     if published else []))
    return Section(f"{count} tasks merged", "", {"test accuracy (%)": results.Table(head, tuple(lines))},
                   {f"accuracy of {count} tasks": _bars(run, count)}, notes)


def _bars(run, count: int):
    rows = results.select(run.rows, metric="accuracy", split="test", task="average", tasks=count)
    groups: dict = {"average": {}}
    for name in methods(run.rows, count):
        groups["average"][name] = [100 * row["value"] for row in rows if row["method"] == name]
    return figures.bars(groups, y="test accuracy (%)")


def _negation(run) -> Section:
    rows = results.select(run.rows, split="test")
    tasks = list(dict.fromkeys(row["task"] for row in rows if row["metric"] == "target"))
    pick = lambda method, metric, task: spread([row["value"] for row in results.select(
        rows, method=method, metric=metric, task=task)])
    chosen = lambda task: ", ".join(f"{x:g}" for x in dict.fromkeys(
        row["scale"] for row in results.select(rows, method="negated", metric="target", task=task) if "scale" in row))
    lines = [(task, pick("zero-shot", "target", task), pick("negated", "target", task),
              pick("zero-shot", "control", task), pick("negated", "control", task), chosen(task) or "–")
             for task in tasks]
    head = ("task", "target before", "target after", "control before", "control after", "α")
    return Section("Negation", f"The control is {run.config.get('control') or 'the suite’s own'}.",
                   {"test accuracy (%)": results.Table(head, tuple(lines))}, notes=(NEGATION,))


def _data(run) -> Section:
    found = results.select(run.rows, metric="examples")
    count = lambda task, split: f"{results.select(found, task=task, split=split)[0]['value']:,}"
    lines = [(task, *(count(task, split) for split in ("train", "val", "test")),
              results.select(found, task=task)[0]["source"]) for task in dict.fromkeys(row["task"] for row in found)]
    return Section("Data", "", {"examples": results.Table(("task", "train", "val", "test", "source"), tuple(lines))})


def _cost(run) -> Section:
    seconds = results.select(run.rows, metric="seconds", method="all")[0]["value"]
    peak = results.select(run.rows, metric="peak bytes", method="all")[0]
    return Section("Cost", f"This run, all that was not reused: {seconds:.0f} s, at most "
                   f"{peak['value'] / 2**30:.2f} GiB of {peak['what']} memory, on {run.header['device']} with "
                   f"{run.header['cpus']} CPUs.")
