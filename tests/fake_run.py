"""Rows and a folder as a run leaves them, made up, for tests of figures and reports."""
import json

from tvjax.experiment import workdir

TASKS = ("greek", "digits", "lao", "boxes")
METHODS = {"average": 0.0, "ties": 0.05, "consensus": 0.1}
ANCHORS = {"zero-shot": -0.2, "fine-tuned": 0.3}
CHOSEN = {"scale": 0.5, "options": {"density": 0.2}, "data": "val labels for α"}
CONFIG = {
    "name": "made-up", "model": "glyphs", "suite": "glyphs", "tasks": list(TASKS), "counts": [2, 4], "seeds": [0, 1],
    "examples": {"train": 10, "val": 10, "test": 10}, "finetune": {"steps": 10, "lr": 1e-4, "weight_decay": 0.1},
    "finetuned": [], "merges": [], "select_on": "val", "allow_nonfinite": False,
}


def make_rows(seeds=(0, 1)):
    rows = []
    for seed in seeds:
        for count in (2, 4):
            shared = {"suite": f"glyphs:{count}", "tasks": count, "seed": seed, "model": "glyphs"}
            for method, bonus in {**ANCHORS, **METHODS}.items():
                rows += accuracies(method, bonus + 0.01 * seed, count, shared)
                rows += traces(method, shared) if method in METHODS else []
        rows += tuning({"suite": "glyphs:4", "tasks": 4, "seed": seed, "model": "glyphs", "split": "none"})
    whole = {"method": "all", "task": "average", "split": "none", "suite": "glyphs:4", "tasks": 4, "seed": 0,
             "model": "glyphs"}
    return [*rows, {"metric": "seconds", "value": 60.0, **whole, "what": "whole run"},
            {"metric": "peak bytes", "value": 2**30, **whole, "what": "process"}]


def accuracies(method, bonus, count, shared):
    more = {"merge": method, **CHOSEN} if method in METHODS else {"data": "none"}
    value = {task: 0.5 + bonus + 0.02 * i for i, task in enumerate(TASKS[:count])}
    value["average"] = sum(value.values()) / count
    return [{"metric": metric, "value": x / divisor, "method": method, "task": task, "split": split, **shared, **more}
            for metric, divisor in (("accuracy", 1), ("normalised accuracy", 0.8))
            for split in ("val", "test") for task, x in value.items()]


def traces(method, shared):
    base = {"metric": "trace", "method": method, "task": "average", "split": "val", **shared}
    curve = {0.0: 0.5, 0.5: 0.9, 1.0: 0.7}
    merging = {**base, "metric": "seconds", "value": 0.5, "split": "none", "what": "merging"}
    return [*({**base, "scale": scale, "value": x, "absolute": x} for scale, x in curve.items()), merging]


def tuning(shared):
    rows = []
    for i, task in enumerate(TASKS):
        base = {"method": "fine-tuned", "task": task, "what": "fine-tuning", "note": "", **shared}
        rows += [{"metric": metric, "value": 1.0 + i, **base}
                 for metric in ("seconds", "examples per second", "delta norm ratio")]
        rows += [{"metric": "cosine", "value": 0.1 * (i + 1), "method": "fine-tuned", "task": task, "other": other,
                  **shared} for other in TASKS[i + 1:]]
    return rows


def make_folder(folder, **changes):
    workdir.write_text(folder / "config.json", json.dumps({**CONFIG, **changes}))
    workdir.write_rows(folder / "results.jsonl", make_rows(), base="0123456789abcdef", data="fedcba9876543210")
    return folder
