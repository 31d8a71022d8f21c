"""Which vectors to take under a budget, and what random directions or questions without gradients would do instead."""
import jax
import numpy as np

from tvjax import evaluation, learning
from tvjax.experiment.atlas_bench import named, of_pool, once, row
from tvjax.experiment.atlas_fewshot import features_of, fewshot_data, learn_few, pool_without
from tvjax.experiment.study import Bench
from tvjax.learning import Scheme, blackbox, heads, ways
from tvjax.learning import basis as random_basis
from tvjax.learning import selection as select


def selection(bench: Bench, taus, anchors, folder) -> list[dict]:
    """Rows of four ways to choose b vectors, for every budget, target and draw; the whole pool at last."""
    own, found = bench.todo.of["selection"], []
    means = _means(bench, taus) if "features" in own["methods"] else {}
    for target in own["targets"]:
        held, names = pool_without(bench, taus, target)
        for draw in range(own["draws"]):
            data = fewshot_data(bench, target, own["shots"][0], draw)
            slope = select.gradient(bench.about.predict, bench.about.theta0, bench.about.heads[target], data[0])
            scores = select.block_scores(slope, [taus[name] for name in names])
            for budget in (*own["budgets"], len(names)):
                methods = own["methods"] if budget < len(names) else ("all",)
                for method in methods:
                    chosen = _chosen(bench, method, budget, target, names, means, data, scores, draw)
                    some = learning.take(held, chosen)
                    found.append(_row(bench, "selection", method, target, some, data, folder, own, budget=budget,
                                      draw=draw, chosen=_names(chosen, names)))
    return found


def _means(bench: Bench, taus) -> dict:
    """Mean zero-shot features of the training images of every task."""
    way = of_pool(bench, learning.pool([next(iter(taus.values()))]), Scheme())
    return {task: features_of(bench, way, bench.about.theta0, task, _first(bench, task))[0].mean(0) for task in taus}


def _first(bench: Bench, task: str, most: int = 256):
    split = tuple(bench.about.splits[task]["train"])
    return heads.some(split, range(min(most, heads.sized(split))))


def _chosen(bench, method, budget, target, names, means, data, scores, draw):
    if method == "random":
        return select.at_random(len(names), budget, seed=1000 * bench.seed + draw)
    if method == "features":
        way = of_pool(bench, learning.pool([{"none": np.zeros(1)}]), Scheme())
        mean = features_of(bench, way, bench.about.theta0, target, data[0])[0].mean(0)
        return select.by_features(mean, [means[name] for name in names], budget)
    if method == "whole gradient":
        return select.by_whole_gradient(scores, budget)
    if method == "block gradient":
        return select.by_block_gradient(scores, budget)
    return list(range(len(names)))


def _names(chosen, names) -> list[str]:
    return [names[i] for i in chosen] if isinstance(chosen, list) else []


def _row(bench: Bench, part: str, method: str, target: str, held, data, folder, own, *, scheme=None, **more) -> dict:
    """Learns on a pool from shots and judges on test."""
    scheme = scheme or Scheme()
    way = of_pool(bench, held, scheme)
    made = learn_few(bench, way, scheme, held, target, data, own["course"], own["augment"], folder)
    value = evaluation.accuracy(way.predict, ways.model(way, made["params"]), bench.about.heads[target], data[2],
                                batch=bench.usual.batch)
    said = ", ".join(f"{key} {value}" for key, value in more.items() if key != "chosen")
    bench.say(f"{part}, {target}, {method}, {said}, seed {bench.seed}: {100 * value:.1f} %")
    return row(bench, part, method, target, value, numbers=learning.count(way.start), **more)


# ---------------------------------------------------------------- random directions; no gradients
def basis(bench: Bench, taus, anchors, folder) -> list[dict]:
    """Task vectors against random ones by number, and learning by gradient against asking for losses."""
    own, found = bench.todo.of["basis"], []
    for target in own["targets"]:
        held, names = pool_without(bench, taus, target)
        for draw in range(own["draws"]):
            data = fewshot_data(bench, target, own["shots"][0], draw)
            for count in own["counts"]:
                noise = learning.pool(random_basis.random_vectors(bench.about.theta0, count, seed=draw))
                found.append(_row(bench, "basis", "random vectors", target, noise, data, folder, own, count=count,
                                  draw=draw))
                if count <= len(names):
                    some = learning.take(held, select.at_random(len(names), count, seed=draw))
                    found.append(_row(bench, "basis", "task vectors", target, some, data, folder, own, count=count,
                                      draw=draw))
            found += _without_gradients(bench, target, held, data, draw, folder)
    return found


def _without_gradients(bench: Bench, target, held, data, draw, folder) -> list[dict]:
    own, head, found = bench.todo.of["basis"], bench.about.heads[target], []
    if not own["questions"]:
        return found
    few, _, test = data
    batch = (few[0], few[1], np.zeros(len(few[1]), np.int32))
    for scheme in (Scheme(by="task"), Scheme()):
        found.append(_row(bench, "gradient-free", f"{named(scheme)}, by gradient", target, held, data, folder, own,
                          scheme=scheme, draw=draw))
        way, joined = of_pool(bench, held, scheme), heads.join([head])
        made = once(folder, "questions", way.start, lambda way=way, joined=joined: _asked(
            way, joined, batch, own["questions"], draw, bench.usual.batch),
            held, str(scheme), own["questions"], draw, few)
        value = evaluation.accuracy(way.predict, ways.model(way, made["params"]), head, test, batch=bench.usual.batch)
        method = f"{named(scheme)}, without gradients"
        bench.say(f"{target}, {method}, draw {draw}, seed {bench.seed}: {100 * value:.1f} %")
        found.append(row(bench, "gradient-free", method, target, value, draw=draw, questions=own["questions"],
                         numbers=learning.count(way.start)))
    return found


def _asked(way, joined, batch, questions, draw, size) -> dict:
    found = blackbox.gradient_free(way, blackbox.mean_loss(way, joined, batch, size=size), budget=questions, seed=draw)
    return {"params": jax.device_get(found.params), "loss": found.loss}

