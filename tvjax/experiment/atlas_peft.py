"""Parameter-efficient fine-tuning with task vectors: aTLAS × K on LoRA vectors, LoRA and full fine-tuning beside it.

LoRA vectors are trained on every task by the usual recipe with its own rate; the target's is left out. The curve is
accuracy against how many numbers are trained, at shares of the target's training data.
"""
import dataclasses
import time

import jax
import jax.numpy as jnp

from tvjax import evaluation, learning, training
from tvjax.experiment.atlas_bench import named, of_pool, once, plain, row, told
from tvjax.experiment.atlas_fewshot import pool_without
from tvjax.experiment.study import Bench
from tvjax.learning import Scheme, fewshot, heads, ways

PART = "peft"
FORM = "full vectors"


def peft(bench: Bench, taus, anchors, folder) -> list[dict]:
    """Rows of every form of vector and every method, by target, share of data and draw."""
    own, found = bench.todo.of[PART], []
    pools = {FORM: taus, **{f"LoRA vectors, rank {rank}": lora_vectors(bench, rank, folder) for rank in own["ranks"]}}
    for target in own["targets"]:
        found.append(row(bench, PART, "zero-shot", target, anchors["zero-shot"]["test"][target], share=0.0, draw=0,
                         numbers=0))
        for share in own["fractions"]:
            for draw in range(own["draws"]):
                found += _one(bench, target, pools, share, draw, folder)
    return found


def lora_vectors(bench: Bench, rank: int, folder) -> dict:
    """{task: its low-rank vector}, by LoRA fine-tuning of attention and MLP matrices from one common start."""
    about, recipe = bench.about, training.Recipe(**bench.todo.of[PART]["lora"], seed=bench.seed)
    found = {}
    for task in bench.usual.tasks:
        way = ways.low_rank(about.predict, about.theta0, rank=rank, key=jax.random.key(bench.seed))
        made = once(folder, "lora", way.start, lambda task=task, way=way: _tuned(bench, way, task, recipe),
                    rank, dataclasses.asdict(recipe), about.keys[task]["train"])
        found[task] = ways.low_rank_vector(way, made["params"])
        bench.say(f"{task}, seed {bench.seed}: LoRA vector of rank {rank}")
    return found


def _tuned(bench: Bench, way, task: str, recipe, split=None) -> dict:
    """A way trained by a recipe of fine-tuning."""
    joined = heads.join([bench.about.heads[task]])
    split = tuple(bench.about.splits[task]["train"]) if split is None else split
    feed = heads.together([split], joined.offsets, batches=[recipe.batch], seed=recipe.seed)
    fitted = training.fit(heads.weighted(way.point, way.predict), way.start, feed, recipe, progress=False,
                          frozen=(way.frozen, (joined.head, joined.owner, jnp.ones(1))))
    return {"params": jax.device_get(fitted.params), "seconds": fitted.seconds}


def _one(bench: Bench, target: str, pools, share: float, draw: int, folder) -> list[dict]:
    own, about = bench.todo.of[PART], bench.about
    some = heads.fraction(about.splits[target]["train"], share, seed=1000 * bench.seed + draw)
    found = []
    for form, taus in pools.items():
        held, _ = pool_without(bench, taus, target)
        for k in own["parts"] if form != FORM else (1,):
            scheme = Scheme(by="part", parts=k) if k > 1 else Scheme()
            way = of_pool(bench, held, scheme)
            made = once(folder, "peft", way.start, lambda way=way: told(_learned(bench, way, target, some)),
                        held, str(scheme), plain(own["course"]), some, about.keys[target]["val"])
            found.append(_row(bench, f"{named(scheme)}, {form}", target, way, made, share, draw))
    recipe = training.Recipe(**own["tuning"], seed=1000 * bench.seed + draw)
    baselines = {f"LoRA, rank {rank}": (ways.low_rank(about.predict, about.theta0, rank=rank, key=jax.random.key(draw)),
                                        training.Recipe(**own["lora"], seed=1000 * bench.seed + draw))
                 for rank in own["ranks"]} | {"full fine-tuning": (ways.whole(about.predict, about.theta0), recipe)}
    for name, (way, how) in baselines.items():
        made = once(folder, "tuned", way.start, lambda way=way, how=how: _tuned(bench, way, target, how, some),
                    name, dataclasses.asdict(how), some, about.base)
        found.append(_row(bench, name, target, way, made, share, draw))
    return found


def _learned(bench: Bench, way, target, some):
    own = bench.todo.of[PART]
    return fewshot.few_shot(way, bench.about.heads[target], some, tuple(bench.about.splits[target]["val"]),
                            course=own["course"], augment="none", batch=bench.usual.batch)


def _row(bench: Bench, method: str, target: str, way, made, share: float, draw: int) -> dict:
    begun = time.perf_counter()
    value = evaluation.accuracy(way.predict, jax.device_get(ways.model(way, made["params"])), bench.about.heads[target],
                                tuple(bench.about.splits[target]["test"]), batch=bench.usual.batch)
    bench.say(f"{target}, {method}, {100 * share:g} % of the data, draw {draw}, seed {bench.seed}: {100 * value:.1f} % "
              f"({made['seconds']:.0f} s, judged in {time.perf_counter() - begun:.0f} s)")
    return row(bench, PART, method, target, value, share=share, draw=draw, numbers=learning.count(way.start),
               seconds=made["seconds"])
