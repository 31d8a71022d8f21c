"""The words of a report: what came out, how it was measured, what every method saw, what it cost."""
import math

from tvjax import results
from tvjax.plotting import methods

SELECTED_ON_TEST = (
    "Hyper-parameters were selected on the TEST split (select_on=\"test\"), as some papers did: these numbers are "
    "optimistic, no estimate of accuracy on new data, and not comparable to numbers selected on validation data.")
TABLE_NOTE = (
    "Accuracy on the test split in percent; below it in grey the normalised accuracy: accuracy over that of the model "
    "fine-tuned on that task alone, averages being means of the ratios. The best merge of each column is bold. "
    "With several seeds: the mean, ± the sample standard deviation (of a task where the mouse rests), every chosen α.")
CAPTIONS = {
    "per_task": "Test accuracy for each task: the bar spans the zero-shot and the fine-tuned model, marks are merges.",
    "radar": "Normalised test accuracy (%) for each task; the dashed circle is the fine-tuned model of that task.",
    "over_tasks": "Average normalised test accuracy over the number of merged tasks (the first so many of the suite).",
    "over_scales": "Search for α: average normalised accuracy over the grid; the mark is the chosen α.",
    "cosines": "Cosines between the task vectors; the scale is that of the largest off the diagonal.",
}


def caption(name: str) -> str:
    """The caption of a figure by its name, with the number of tasks where the name ends with one."""
    stem, _, count = name.rpartition("_")
    return f"{CAPTIONS[stem]} {count} tasks." if count.isdigit() else CAPTIONS[name]


def average(run, method: str, metric: str, tasks: int) -> float:
    """The mean over seeds of a method's average on the test split."""
    found = results.select(run.rows, method=method, metric=metric, tasks=tasks, split="test", task="average")
    return results.mean_std([row["value"] for row in found])[0]


def summary(run) -> str:
    """The outcome in two or three sentences."""
    most = max(row["tasks"] for row in run.rows)
    percent = lambda method, metric="accuracy": f"{100 * average(run, method, metric, most):.1f} %"
    names = sorted(methods(run.rows), key=lambda name: -average(run, name, "accuracy", most))
    text = (f"{_some(len(names), 'merge')} of {_some(most, 'task vector')} on {run.config['suite']}. "
            f"The zero-shot model reaches {percent('zero-shot')} on average over the tasks, "
            f"models fine-tuned on one task each {percent('fine-tuned')}. ")
    if not names:
        return text
    best = names[0]
    text += f"The best single model is {best} with {percent(best)} ({percent(best, 'normalised accuracy')} normalised)"
    return text + (f", the last {names[-1]} with {percent(names[-1])}." if len(names) > 1 else ".")


def edges(run) -> str:
    """A sentence that names the merges whose α was chosen at the upper end of its grid; "" where there are none."""
    tops: dict[tuple, float] = {}
    for row in results.select(run.rows, metric="trace"):
        place = row["method"], row["tasks"]
        tops[place] = max(row["scale"], tops.get(place, -math.inf))
    chosen = results.select(run.rows, metric="accuracy", split="test", task="average", method=list(methods(run.rows)))
    found = dict.fromkeys(f"{row['method']} ({row['tasks']} tasks)" for row in chosen
                          if row["scale"] == tops.get((row["method"], row["tasks"])))
    said = "α was chosen at the upper end of its grid, so that a wider one may do better:"
    return f"{said} {', '.join(found)}." if found else ""


def _some(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def protocol(run) -> list[str]:
    """How the numbers came about, one statement a line."""
    config, tune = run.config, run.config["finetune"]
    n, split = config["examples"], {"val": "validation"}.get(config["select_on"], config["select_on"])
    seeds = ", ".join(map(str, config["seeds"]))
    hashes = run.header["hashes"]
    recipe = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in tune.items())
    chosen = (f"α and λ are chosen on the {split} split: α by the average normalised accuracy over its grid (first "
              "maximum), λ of a task by that task's accuracy under its own mask. Nothing is selected on the test one.")
    if config["select_on"] != "val":
        chosen = f"α and λ are chosen on the {split} split, the very one that is reported. {SELECTED_ON_TEST}"
    lines = [
        f"Model: {config['model']} (weights {hashes.get('base', '?')[:12]}). Only the image tower and its projection "
        "are fine-tuned and merged; heads are frozen zero-shot heads made of the class names in all prompt templates.",
        f"Data: the first {n['train']} training, {n['val']} validation and {n['test']} test images of each task (hash "
        f"{hashes.get('data', '?')[:12]}); the splits share no image, and fonts or slants differ between them.",
        f"Fine-tuning: AdamW, {recipe}; the last step's weights are taken, none is selected. "
        f"Seeds ({seeds}) change the order of the batches alone.", chosen,
        "Normalised accuracy: the mean over tasks of accuracy/accuracy of the model fine-tuned on that task alone, on "
        "the same split, with the same head, recipe and seed.",
    ]
    if config.get("geometry") == "linearised":
        lines.append("Every model was judged by its first-order expansion at θ0 (geometry=\"linearised\").")
    if config["finetuned"]:
        lines.append(f"Not fine-tuned here but given: {', '.join(config['finetuned'])}.")
    if config["allow_nonfinite"]:
        lines.append("Tensors with NaN or infinite entries were allowed (allow_nonfinite).")
    return lines


def method_table(run):
    """(head, lines): operator, hyper-parameters, and the data that each method saw."""
    lines = []
    for name in methods(run.rows):
        row = results.select(run.rows, method=name, metric="accuracy", split="test", task="average")[-1]
        options = "; ".join(f"{key} {_value(value)}" for key, value in row["options"].items()) or "–"
        lines.append((name, row["merge"], options, f"{row['scale']:g}", row["data"]))
    return ("name", "operator", "hyper-parameters", "α", "data used to choose"), lines


def _value(value) -> str:
    return ", ".join(f"{x:g}" for x in value) if isinstance(value, list) else str(value)


def cost_table(run):
    """(head, lines): seconds of fine-tuning and merging, of the whole run, and peak memory."""
    most = max(row["tasks"] for row in run.rows)
    pick = lambda **equals: [row["value"] for row in results.select(run.rows, **equals)]
    tuned = pick(metric="seconds", what="fine-tuning")
    rates = [x for x in pick(metric="examples per second") if x > 0]
    lines = [("fine-tuning, all tasks and seeds", f"{sum(tuned):.0f} s"),
             ("images a second while fine-tuning", f"{results.mean_std(rates)[0]:.0f}" if rates else "–")]
    for name in methods(run.rows):
        seconds = pick(metric="seconds", method=name, tasks=most)
        mean, _ = results.mean_std(seconds)
        lines.append((f"merging {most} task vectors by {name}, with compilation", f"{mean:.2f} s"))
    lines += [("this run, all that was not reused", f"{row['value']:.0f} s")
              for row in results.select(run.rows, metric="seconds", method="all")]
    lines += [(f"peak memory of the {row['what']}", f"{row['value'] / 2**30:.2f} GiB")
              for row in results.select(run.rows, metric="peak bytes")]
    return ("what", "cost"), [*lines, ("on", f"{run.header['device']}, {run.header['cpus']} CPUs")]


