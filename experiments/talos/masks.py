"""TaLoS masks without any fine-tuning: what tasks share, where the entries lie, what θ0 bears to lose there.

    python experiments/talos/masks.py [--tasks 4] [--seeds 3] [--sparsity 0.9] [--images 125] [--test 250]

Glyph tasks, the small CLIP of the package; takes a minute or two. Prints the tables of README.md in this folder.
"""
import argparse
import functools

import jax
import numpy as np

from tvjax import calibration, evaluation, results, tree
from tvjax.data import glyphs
from tvjax.experiment import planning
from tvjax.experiment.loading import problem


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tasks", 4), ("seeds", 3), ("images", 125), ("test", 250)):
        cli.add_argument(f"--{name}", type=int, default=default)
    cli.add_argument("--sparsity", type=float, default=0.9)
    args = cli.parse_args()
    tasks = glyphs.suite(20)[:args.tasks]
    about = problem(planning.plan(dict(
        name="masks", model="glyphs", suite="glyphs", tasks=list(tasks), counts=[len(tasks)], seeds=[0],
        examples=dict(train=64, val=args.images, test=args.test), finetune=dict(glyphs.RECIPE), finetuned=[],
        merges=[{"name": "average"}], scales=[1.0], select_on="val", batch=125, save_models=False,
        allow_nonfinite=False)))
    makers = {"talos": functools.partial(talos, about, args.sparsity, "lowest"),
              "top sensitivity": functools.partial(talos, about, args.sparsity, "highest"),
              "random": functools.partial(at_random, about, args.sparsity, list(tasks))}
    found = {way: [{task: make(task, seed) for task in tasks} for seed in range(args.seeds)]
             for way, make in makers.items()}
    print(results.markdown(overlap(found, args.sparsity), scale=100))
    print(results.markdown(occupancy(found), scale=100))
    print(results.markdown(pruning(about, found, tasks), scale=100))


def scored(about):
    return tree.partition(about.theta0, calibration.scored(about.theta0))


def talos(about, sparsity, keep, task, seed):
    part, frozen = scored(about)
    head = about.heads[task]
    head, classes = np.pad(np.asarray(head), ((0, 0), (0, about.width - head.shape[1]))), np.int32(head.shape[1])
    return jax.device_get(calibration.calibrate(
        calibration.of_classifier(about.predict), part, about.splits[task]["val"][0], frozen, head, classes,
        sparsity=sparsity, keep=keep, seed=seed, batch=50, batches_per_round=1, budget=1 << 28).mask)


def at_random(about, sparsity, tasks, task, seed):
    return jax.device_get(calibration.at_random(scored(about)[0], density=1 - sparsity,
                                                seed=len(tasks) * seed + tasks.index(task)))


def overlap(found, sparsity) -> results.Table:
    """Mean intersection over union of two tasks' masks, and of two seeds' masks of one task."""
    lines = []
    for way, seeds in found.items():
        between = [evaluation.off_diagonal_mean(calibration.iou(list(masks.values()))) for masks in seeds]
        same = [evaluation.off_diagonal_mean(calibration.iou([masks[task] for masks in seeds]))
                for task in seeds[0]] if len(seeds) > 1 else [1.0]
        lines.append((way, results.mean_std(between), results.mean_std(same), calibration.chance(1 - sparsity)))
    return results.Table(("IoU of masks (%)", "two tasks", "two seeds of one task", "by chance"), tuple(lines))


def occupancy(found) -> results.Table:
    """How much of each kind of tensor is in the mask."""
    lines, kinds = [], list(calibration.occupancy(next(iter(found["talos"][0].values()))))
    for way, seeds in found.items():
        by = [calibration.occupancy(mask) for masks in seeds for mask in masks.values()]
        whole = [sum(kept for kept, _ in one.values()) for one in by]
        lines += [(f"{way}: share of the mask", *(results.mean_std([one[k][0] / n for one, n in zip(by, whole,
                                                                                     strict=True)]) for k in kinds)),
                  (f"{way}: share of the tensors", *(results.mean_std([one[k][0] / one[k][1] for one in by])
                                                     for k in kinds))]
    return results.Table(("entries (%)", *kinds), tuple(lines))


def pruning(about, found, tasks) -> results.Table:
    """Zero-shot test accuracy over that of θ0 with a mask's entries zeroed, on its own task and on the others."""
    judge = lambda params: evaluation.accuracies(about.predict, params, about.judged(tasks, "test"), batch=125)
    whole, lines = judge(about.theta0), []
    for way, seeds in found.items():
        own, others = [], []
        for masks in seeds:
            ratio = {task: judge(calibration.pruned(about.theta0, mask)) for task, mask in masks.items()}
            own.append(np.mean([ratio[t][t] / whole[t] for t in tasks]))
            others.append(np.mean([ratio[t][u] / whole[u] for t in tasks for u in tasks if u != t]))
        lines.append((way, results.mean_std(own), results.mean_std(others)))
    return results.Table(("accuracy with the mask zeroed (% of θ0's)", "own task", "other tasks"), tuple(lines))


if __name__ == "__main__":
    main()
