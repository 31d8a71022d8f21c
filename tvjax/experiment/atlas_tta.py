"""Test-time adaptation: three objectives on the unlabelled images, through norms and through task vectors.

The images are those of the test split, without labels, and the accuracy afterwards is on the same images: the offline
setting of arXiv:2407.02880, §5.3. Nothing chooses among epochs.
"""
import dataclasses

import jax

from tvjax import evaluation
from tvjax.experiment.atlas_bench import of_pool, once, plain, row, told
from tvjax.experiment.atlas_fewshot import pool_without
from tvjax.experiment.study import Bench
from tvjax.learning import Scheme, adaptation, heads, ufm, ways

PART = "tta"


def tta(bench: Bench, taus, anchors, folder) -> list[dict]:
    """Rows of zero-shot and of objective × way, by target and draw."""
    own, about, found = bench.todo.of[PART], bench.about, []
    for target in own["targets"]:
        held, _ = pool_without(bench, taus, target)
        each = {"LayerNorm": (ways.norms(about.predict, about.theta0), about.base),
                "aTLAS": (of_pool(bench, held, Scheme()), held)}
        test = tuple(about.splits[target]["test"])
        split = heads.some(test, range(min(own["images"], heads.sized(test))))
        zero = evaluation.accuracy(about.predict, about.theta0, about.heads[target], split, batch=bench.usual.batch)
        found.append(row(bench, PART, "zero-shot", target, zero, objective="none", draw=0))
        for draw in range(own["draws"]):
            for name, (way, content) in each.items():
                for objective in _objectives(own):
                    found.append(_one(bench, target, split, name, way, content, objective, draw, folder))
    return found


def _objectives(own) -> list[str]:
    kinds = [one for one in own["objectives"] if one != "ufm"]
    return [*kinds, *(f"ufm, exponent {e:g}" for e in own["exponents"] if "ufm" in own["objectives"])]


def _one(bench: Bench, target, split, name, way, content, objective, draw, folder) -> dict:
    own, head = bench.todo.of[PART], bench.about.heads[target]
    course = dataclasses.replace(own["course"], seed=1000 * bench.seed + draw)
    made = once(folder, "tta", way.start, lambda: told(adapt(way, head, split[0], objective, own, course)),
                content, name, objective, plain(course), own["augment"], own["share"], own["margin"], split[0],
                bench.todo.store)
    value = evaluation.accuracy(way.predict, jax.device_get(ways.model(way, made["params"])), head, split,
                                batch=bench.usual.batch)
    bench.say(f"{target}, {objective}, {name}, draw {draw}, seed {bench.seed}: {100 * value:.1f} %")
    return row(bench, PART, name, target, value, objective=objective, draw=draw, seconds=made["seconds"])


def adapt(way, head, inputs, objective: str, own, course):
    """One adaptation by name."""
    if objective == "contrast":
        return adaptation.contrast(way, head.shape[0], inputs, course=course, augment=own["augment"])
    if objective == "entropy":
        return adaptation.entropy(way, head, inputs, course=course, margin=own["margin"])
    exponent = float(objective.rpartition(" ")[2])
    return ufm.ufm(way, head, inputs, course=course, augment=own["augment"], exponent=exponent, share=own["share"])
