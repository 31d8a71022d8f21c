"""Few shots of a task whose own vector is left out: aTLAS, Tip-Adapter and LP++, alone and combined; other domains.

Draws of the shots are nested in k. Adapters alone work on zero-shot features; LP++ after aTLAS on those of its model,
Tip-Adapter together with it. `contribution` learns on one vector at a time.
"""
import jax
import numpy as np

from tvjax import evaluation, learning
from tvjax.experiment.atlas_bench import named, of_pool, once, plain, row, told
from tvjax.experiment.study import Bench
from tvjax.learning import Scheme, lpp, tip, ways
from tvjax.learning import fewshot as course


def fewshot_data(bench: Bench, target: str, k: int, draw: int):
    """(shots, validation, test) of a target."""
    splits = bench.about.splits[target]
    few = course.shots(tuple(splits["train"]), k, classes=bench.about.heads[target].shape[1],
                        seed=1000 * bench.seed + draw)
    return few, tuple(splits["val"]), tuple(splits["test"])


def pool_without(bench: Bench, taus, target: str):
    """The pool of all vectors but the target's, and their tasks."""
    left = course.without(taus, target)
    return learning.pool(list(left.values()), bench.about.theta0, store=bench.todo.store), list(left)


def fewshot(bench: Bench, taus, anchors, folder) -> list[dict]:
    own, found = bench.todo.of["fewshot"], []
    for target in own["targets"]:
        zero = anchors["zero-shot"]["test"][target]
        found += [row(bench, "fewshot", "zero-shot", target, zero, shots=k, draw=0) for k in own["shots"]]
        held, _ = pool_without(bench, taus, target)
        for draw in range(own["draws"]):
            for k in own["shots"]:
                found += _one(bench, target, held, k, draw, folder)
    return found


def _one(bench: Bench, target: str, held, k: int, draw: int, folder) -> list[dict]:
    """Rows of all methods on one draw."""
    own, head, data = bench.todo.of["fewshot"], bench.about.heads[target], fewshot_data(bench, target, k, draw)
    few, val, test = data
    found, base = {}, of_pool(bench, held, Scheme())
    zero = features_of(bench, base, bench.about.theta0, target, few, val, test)
    found["Tip-Adapter"] = _tip(zero, few, val, test, head)
    found["LP++"] = _lpp(zero, few, test, head)
    for scheme in own["schemes"]:
        way = of_pool(bench, held, scheme)
        made = learn_few(bench, way, scheme, held, target, data, own["course"], own["augment"], folder)
        point = ways.model(way, made["params"])
        found[named(scheme)] = evaluation.accuracy(way.predict, point, head, test, batch=bench.usual.batch)
        for domain in own["domains"]:
            found[f"{named(scheme)} on {domain}"] = _domain(bench, way, point, target, domain)
            found[f"zero-shot on {domain}"] = _domain(bench, way, bench.about.theta0, target, domain)
        if scheme == Scheme():
            features = features_of(bench, way, point, target, few, val, test)
            found["aTLAS + LP++"] = _lpp(features, few, test, head)
            found["aTLAS + Tip-Adapter"] = _joint(bench, way, held, target, data, folder)
    bench.say(f"{target}, k = {k}, draw {draw}, seed {bench.seed}: "
              + ", ".join(f"{name} {100 * value:.1f}" for name, value in found.items()))
    made = []
    for name, value in found.items():
        method, elsewhere, domain = name.partition(" on ")
        part, more = ("domains", {"domain": domain}) if elsewhere else ("fewshot", {})
        made.append(row(bench, part, method, target, value, shots=k, draw=draw, **more))
    return made


def learn_few(bench: Bench, way, scheme, held, target, data, by, augment, folder):
    """Coefficients from shots, kept."""
    few, val, _ = data
    return once(folder, "fewshot", way.start,
                lambda: told(course.few_shot(way, bench.about.heads[target], few, val, course=by, augment=augment,
                                              batch=bench.usual.batch)),
                held, str(scheme), plain(by), augment, few, val)


def features_of(bench: Bench, way, point, target, *splits):
    """Unit features of several splits."""
    width = bench.about.heads[target].shape[0]
    return [tip.features(way, point, split[0], width=width, batch=bench.usual.batch) for split in splits]


def _tip(features, few, val, test, head) -> float:
    cached, of_val, of_test = features
    found = tip.alone(cached, few[1], head, (of_val, val[1]))
    onehot = jax.nn.one_hot(few[1], head.shape[1])
    return tip.accuracy(found.params, (of_test, test[1]), head, onehot)


def _lpp(features, few, test, head) -> float:
    cached, _, of_test = features
    probe, _ = lpp.train(cached, few[1], head)
    return lpp.accuracy(probe, (of_test, test[1]))


def _joint(bench: Bench, way, held, target, data, folder) -> float:
    own, head, (few, val, test) = bench.todo.of["fewshot"], bench.about.heads[target], data
    both = tip.joint_way(way, head, few, batch=bench.usual.batch)
    made = once(folder, "tip joint", both.start,
                lambda: told(tip.joint(way, head, few, val, course=own["joint"], augment=own["augment"],
                                       batch=bench.usual.batch)),
                held, plain(own["joint"]), own["augment"], few, val)
    return evaluation.accuracy(both.predict, ways.model(both, made["params"]), head, test, batch=bench.usual.batch)


def _domain(bench: Bench, way, point, target: str, domain: str) -> float:
    """Accuracy on another split or another domain of the target's classes."""
    head, split = bench.about.heads[target], other_domain(bench, target, domain)
    return evaluation.accuracy(way.predict, point, head, split, batch=bench.usual.batch)


def other_domain(bench: Bench, target: str, domain: str):
    """Test examples of a target's classes in another domain.

    Of glyphs: drawn "plain", or in the look of another task. Of other suites: the test split of a task of the config
    with as many classes, which must mean the same, as those of two data sets of digits do.
    """
    about = bench.about
    if bench.usual.suite != "glyphs":
        alike = [task for task, head in about.heads.items() if task != target
                 and head.shape[1] == about.heads[target].shape[1]]
        if domain not in alike:
            raise ValueError(f"atlas.fewshot.domains holds {domain!r}; domains of {target} are the tasks with its "
                             f"classes, here {', '.join(alike) or 'none'}")
        return tuple(about.splits[domain]["test"])
    from tvjax.data import glyphs
    chars = glyphs.task(target).chars
    look = glyphs.CONTROL.domain if domain == "plain" else glyphs.task(domain).domain
    count = min(500, bench.usual.examples["test"])
    labels = np.arange(count, dtype=np.int32) % len(chars)
    looks = np.tile(np.array(look, np.float32), (count, 1))
    drawn = glyphs.draw("".join(chars[i] for i in labels), "test", looks, np.random.default_rng(bench.seed))
    return drawn, labels


# ---------------------------------------------------------------- one vector at a time
def contribution(bench: Bench, taus, anchors, folder) -> list[dict]:
    """The gain over zero-shot of every single vector on every target, its own among them."""
    own, found = bench.todo.of["contribution"], []
    for target in own["targets"]:
        head = bench.about.heads[target]
        data = fewshot_data(bench, target, own["shots"][0], 0)
        for source, tau in taus.items():
            held = learning.pool([tau], bench.about.theta0, store=bench.todo.store)
            way = of_pool(bench, held, Scheme())
            made = learn_few(bench, way, Scheme(), held, target, data, own["course"], own["augment"], folder)
            value = evaluation.accuracy(way.predict, ways.model(way, made["params"]), head, data[2],
                                        batch=bench.usual.batch)
            gain = value - anchors["zero-shot"]["test"][target]
            found.append(row(bench, "contribution", "aTLAS", target, gain, metric="gain", other=source))
        bench.say(f"contributions to {target}, seed {bench.seed}: done")
    return found
