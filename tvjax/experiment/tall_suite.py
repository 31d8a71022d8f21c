"""One set of tasks: merges, TALL-masks on every base and their agreement, Consensus over k, codecs, with bits for each.

θ̂_t = θ0 + decode(encode(τ_1 … τ_T), t) is judged on its own task; a merged model on all. Bits are those of the whole
collection by the convention of arXiv:2405.07813: θ0, the frozen parts, and the state; heads apart.
"""
import pathlib
import shutil
import tempfile
import time
from typing import Any, NamedTuple

from tvjax import compression, evaluation, sharding, tree, vectors
from tvjax.compression import agreement, encoded, sizes
from tvjax.compression import bits as packed
from tvjax.experiment import adapted, merges, planning, rows
from tvjax.experiment.columns import columns
from tvjax.experiment.study import SPLITS, Bench
from tvjax.experiment.tall_plan import Base, Coded


class Localised(NamedTuple):
    """A base's merged vector, λ of each task, the masks (stacked), and the accuracies under them."""

    merged: Any
    lams: tuple[float, ...]
    masks: Any
    accuracy: dict[str, dict[str, float]]


def suite(bench: Bench, tasks, taus, anchors) -> list[dict]:
    """Rows of everything on these tasks."""
    some = [taus[task] for task in tasks]
    anchors = {name: {split: {task: by[task] for task in tasks} for split, by in found.items()}
               for name, found in anchors.items()}
    counted = counts_of(bench, tasks)
    single = sizes.formula("single", counted)
    bits = {"zero-shot": single, "fine-tuned": sizes.formula("finetuned", counted)}
    found = [row for name in bits
             for row in judged_rows(bench, tasks, name, "anchor", anchors[name], anchors, bits[name])]
    for merge in bench.usual.merges:
        judged = merges.judge(bench.about, bench.usual, merge, tasks, some, anchors["fine-tuned"],
                              cache=bench.cache)
        found += judged_rows(bench, tasks, merge.label, "merging", judged.accuracy, anchors, single, scale=judged.scale)
    for base in bench.todo.bases:
        found += _base(bench, base, tasks, some, anchors, counted)
    for one in bench.todo.codecs:
        found += _codec(bench, one, tasks, some, anchors, counted)
    return found


def counts_of(bench: Bench, tasks) -> sizes.Counts:
    """P (the image tower), F (the rest of the model) and T; heads are counted apart, as in the paper. Of an adapter P
    counts φ, F all of the model."""
    about, whole = bench.about, tree.size(bench.about.pretrained.params)
    if bench.todo.adapter is not None:
        return sizes.Counts(tree.size(adapted.split(about.theta0, bench.todo.adapter)[1]), whole, len(tasks))
    trained = tree.size(about.theta0)
    return sizes.Counts(trained, whole - trained, len(tasks))


def _base(bench, base: Base, tasks, taus, anchors, counted) -> list[dict]:
    local = localise(bench, base, tasks, taus)
    label, state = f"TALL + {base.label}", (local.merged, local.masks)
    bits = compression.count_bits(state)
    options = {"lam": local.lams, "comparator": bench.todo.comparator}
    mine = compression.State(local.merged, tuple(packed.take(local.masks, i) for i in range(len(tasks))))
    found = judged_rows(bench, tasks, label, "compression", local.accuracy, anchors, sizes.of_state(bits, counted),
                        lam=local.lams, file_bytes=written(bench, Coded(label, "tall", options), mine, tasks),
                        **weights(state, counted))
    found += profile_rows(bench, tasks, base, local.masks)
    found += lambda_rows(bench, base, tasks, taus, local.merged, anchors)
    for k in sorted({k for k in (*bench.todo.ks, base.k) if k <= len(tasks) + 1}):
        judged, scale = consensus(bench, local, k, tasks, anchors)
        name, section = (f"Consensus {base.label}", "merging") if k == base.k else (f"{base.label}, k = {k}", "k")
        found += judged_rows(bench, tasks, name, section, judged, anchors, sizes.formula("single", counted),
                             scale=scale, k=k, base=base.label, lam=local.lams)
    return found


def weights(state, counted: sizes.Counts) -> dict[str, float]:
    """Bits for each trained weight and task of a state: by its numbers, and as its arrays are stored; `added`: what it
    holds beyond one merged model, in numbers of 32 bits."""
    stored, bits = 8 * compression.stored_bytes(state), compression.count_bits(state)
    return {"bits_per_weight": sizes.per_weight(bits, counted),
            "stored_bits_per_weight": sizes.per_weight(stored, counted),
            "added": max(0, -(-bits // sizes.FLOAT) - counted.trained)}


def localise(bench: Bench, base: Base, tasks, taus) -> Localised:
    """The masks of all tasks on one merged vector, λ of each chosen on its own validation split."""
    theta0, split = bench.about.theta0, bench.usual.select_on
    merged = planning.operator(base.merge)(list(taus), tasks=list(tasks))

    def judge(task, tau):
        return bench.measure(vectors.add(theta0, tau), [tasks[task]], split)[tasks[task]]
    lams = compression.choose_lambdas(taus, merged, judge, grid=bench.todo.lams, comparator=bench.todo.comparator)
    masks = compression.tall_masks(taus, merged, lam=lams, comparator=bench.todo.comparator)
    model = lambda i: compression.reconstruct(theta0, merged, packed.take(masks, i))
    accuracy = {split: {task: bench.measure(model(i), [task], split)[task] for i, task in enumerate(tasks)}
                for split in SPLITS}
    return Localised(merged, lams, masks, accuracy)


def consensus(bench: Bench, local: Localised, k: int, tasks, anchors):
    """({split: {task: accuracy}}, α) of the merged vector where at least k masks agree."""
    tau = compression.consensus_of(local.merged, local.masks, k=k)
    grid = planning.Merge("", "", {}, bench.todo.scales)
    scale, _ = merges.choose_scale(bench.about, bench.usual, grid, tasks, tau, anchors["fine-tuned"],
                                   cache=bench.cache)
    theta = evaluation.moved(bench.about.theta0, tau, scale)
    return {split: bench.measure(theta, tasks, split) for split in SPLITS}, scale


def written(bench: Bench, one: Coded, state: compression.State, tasks) -> int:
    """The bytes of the files that hold a state; they stay below the run's folder where the plan says so."""
    kept = bench.cache.parents[2] / "encoded" / f"seed{bench.seed}" / f"{len(tasks)}-tasks" / one.label
    with tempfile.TemporaryDirectory() as place:
        path = pathlib.Path(place) / "state"
        made = encoded.write(path, state, tasks=tasks, codec=one.name, options=one.options, base=bench.about.base)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        if bench.todo.save:
            sharding.once(lambda: _move(path, kept, made.about))
    return size


def _move(path: pathlib.Path, kept: pathlib.Path, about) -> None:
    if not (kept.exists() and encoded.open_encoded(kept).about == about):
        shutil.rmtree(kept, ignore_errors=True)  # what this job wrote there, from other task vectors
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, kept)


def _codec(bench, one: Coded, tasks, taus, anchors, counted) -> list[dict]:
    coder = compression.build_codec(one.name, one.options, tasks=len(tasks))
    begun = time.perf_counter()
    state = coder.encode(taus)
    seconds = time.perf_counter() - begun
    theta0, restored = bench.about.theta0, [coder.decode(state, i) for i in range(len(tasks))]
    accuracy = {split: {task: bench.measure(vectors.add(theta0, restored[i]), [task], split)[task]
                        for i, task in enumerate(tasks)} for split in SPLITS}
    bits = sizes.of_state(compression.count_bits(state), counted)
    return judged_rows(bench, tasks, one.label, "compression", accuracy, anchors, bits, seconds=seconds,
                       file_bytes=written(bench, one, state, tasks), **weights(state, counted))


def judged_rows(bench: Bench, tasks, method: str, section: str, accuracy, anchors, bits: int, **more) -> list[dict]:
    """Rows of accuracies with `section`, the collection's `bits` and those with heads; says the average."""
    heads = sum(int(bench.about.heads[task].size) for task in tasks)
    more = {"section": section, "bits": bits, "bits_with_heads": bits + sizes.FLOAT * heads,
            **columns(bench.usual, data="none"), **more}
    shared = rows.common(bench.usual, tasks, bench.seed)
    test = accuracy["test"]
    bench.say(f"{method}, {len(tasks)} tasks, seed {bench.seed}: test {100 * evaluation.absolute(test):.1f} % "
              f"({100 * evaluation.normalised(test, anchors['fine-tuned']['test']):.1f} % normalised)")
    return rows.accuracies(shared, method, accuracy, anchors["fine-tuned"], **more)


def lambda_rows(bench: Bench, base: Base, tasks, taus, merged, anchors) -> list[dict]:
    """Rows of the average normalised accuracy, on the split that chooses λ, over one λ for all tasks."""
    split, shared = bench.usual.select_on, rows.common(bench.usual, tasks, bench.seed)
    found = []
    for lam in bench.todo.lams:
        masks = [compression.tall_mask(tau, merged, lam=lam, comparator=bench.todo.comparator) for tau in taus]
        models = [compression.reconstruct(bench.about.theta0, merged, mask) for mask in masks]
        by = {task: bench.measure(model, [task], split)[task] for task, model in zip(tasks, models, strict=True)}
        found.append({"metric": "lambda", "value": evaluation.normalised(by, anchors["fine-tuned"][split]), "lam": lam,
                      "method": f"TALL + {base.label}", "task": rows.AVERAGE, "split": split, **shared})
    return found


def profile_rows(bench: Bench, tasks, base: Base, masks) -> list[dict]:
    """Rows of the agreement profile α(n) over the model, by layer and by kind, and of the named classes."""
    shared = {"task": rows.AVERAGE, "split": "none", "method": f"TALL + {base.label}",
              **rows.common(bench.usual, tasks, bench.seed)}
    found = []
    for by in ("all", "layer", "kind"):
        for group, shares in compression.profile(masks, by=by).items():
            found += [{"metric": "agreement", "value": float(share), "by": by, "group": group, "n": n, **shared}
                      for n, share in enumerate(shares)]
            found += [{"metric": "class", "value": value, "by": by, "group": group, "class": name, **shared}
                      for name, value in agreement.classes(shares).items()]
    overlap = compression.overlaps(masks)
    return found + [{"metric": "mask overlap", "value": float(overlap[i, j]), **shared, "task": tasks[i],
                     "other": tasks[j]} for i in range(len(tasks)) for j in range(i + 1, len(tasks))]
