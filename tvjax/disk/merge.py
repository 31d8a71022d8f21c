"""Merges checkpoints from disk to disk: base and models in, a directory that loads in `transformers` and here out.

θ = θ0 + operator(θ_1 − θ0, …, θ_T − θ0), for every operator, with exact whole-model statistics, in memory that does not
grow with the models.
"""
import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from tvjax import checkpoints, sharding
from tvjax.disk import cards, drive, outputs, planning, recipe, sharing, slices, vocabularies, workdir, writers
from tvjax.disk import ledger as ledgers
from tvjax.disk.deltas import Deltas, Zero
from tvjax.disk.headers import DTYPES
from tvjax.disk.match import check_tied, match
from tvjax.disk.readers import Opened, TensorInfo, open_checkpoint
from tvjax.disk.recipe import Recipe
from tvjax.merging import plan as plans
from tvjax.merging.checks import choice
from tvjax.merging.operator import Operator


class Ready(NamedTuple):
    """A merge whose headers are read and fit."""

    recipe: Recipe
    out: Path
    work: Path
    task: drive.Task
    plan: planning.Plan
    side: dict[str, bytes]
    notes: list[str]

    def describe(self) -> str:
        """The plan in words."""
        task = self.task
        return planning.describe(self.plan, task.base, task.models, task.matched, task.files)


def merge_checkpoints(base: str | os.PathLike, models: Mapping[str, Any] | Sequence[Any] | str | os.PathLike,
                      out: str | os.PathLike, operator: Operator | str = "ties", *, ledger: str = "full",
                      say: Callable[[str], Any] = print, progress: bool | None = None,
                      data: Mapping[str, Any] | None = None, **settings: Any) -> Path:
    """Merges `models` into the new directory `out` and returns it.

    base, models: Hugging Face directories, safetensors files, shard indices or hub ids; models as a list, a mapping
    of names, or a string `a=A,b=B`. A model's name (the last part of its path unless given) is its task's: random draws
    belong to it, to the tensor's name in the base and to the entry, and to nothing else. operator: an operator, or
    a method's name with its numbers in `options`. settings: the other fields of `Recipe`. data: trees by name that the
    operator needs. ledger: "full", or "brief": without inputs' hashes, norms, cosines and shares, which take time.
    say: takes the plan and other lines. progress: whether a bar is shown (by default on terminals).

    An interrupted merge goes on when called again. Raises ValueError with one sentence, and leaves nothing behind, for
    inputs that are broken or do not fit, entries that are not finite, an `out` that holds anything else.
    """
    chosen = Recipe(base=os.fspath(base), models=recipe.named(models), method=operator, **settings)
    return run(chosen, out, ledger=ledger, say=say, progress=progress, data=data)


def run(recipe_: Recipe, out: str | os.PathLike, *, ledger: str = "full", say: Callable[[str], Any] = print,
        progress: bool | None = None, data: Mapping[str, Any] | None = None, command: str = "") -> Path:
    """Carries a recipe out; see `merge_checkpoints`."""
    choice("ledger", ledger, ("full", "brief"))
    with contextlib.closing(prepare(recipe_, out, data=data)) as held:
        ready = held.ready
        say(ready.describe())
        if workdir.finished_before(ready.out, ready.task.head["merge"]):
            say(f"{ready.out} holds this merge already")
            return ready.out
        apart = planning.entrywise(ready.task.operator, ready.task.source)
        crew = sharing.crew(ready.task.files, apart, ready.task.source.tasks)
        first = crew is None or crew.rank == 0
        sharding.agree({"merge": ready.task.head["merge"]}, "merge")
        past = workdir.begun_before(ready.work, ready.task.head["merge"])
        if first:
            _check_room(ready, past)
        with workdir.working(ready.work, first=first), _bar(ready, progress if first else False) as bar:
            held.counter.bar = bar
            if first:
                _check_tied(ready.task)
            sharding.barrier("merge begins")
            with jax.enable_x64(recipe_.compute_dtype == "float64"):
                drive.drive(ready.task._replace(brief=ledger == "brief", crew=crew), ready.work, past, data or {})
            sharding.barrier("merge written")
            if first:
                sharing.join(ready.work, ready.task.files, crew)
                _finish(ready, command or shlex.join(["python", *sys.argv]))
                for line in residual(ready, ready.out):
                    say(line)
        sharding.barrier("merge finished")
    say(f"written: {ready.out}")
    return ready.out


class prepare:
    """Opens and checks all that a recipe names, from headers alone; `ready` is the result, `close` lets the files go.

    Raises ValueError with every problem at once.
    """

    def __init__(self, recipe_: Recipe, out: str | os.PathLike, *, data: Mapping[str, Any] | None = None):
        self.opened: list[Opened] = []
        self.counter = drive.Counter(_NoBar())
        try:
            self.ready = self._ready(recipe_, out, data)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for opened in self.opened:
            opened.close()

    def _ready(self, recipe_: Recipe, out, data) -> Ready:
        operator = recipe_.operator()
        place = workdir.place(out)
        base, models = self._open(recipe_)
        common = vocabularies.union(base, models) if recipe_.vocabulary == "union" else None
        if common is not None:
            base, models = common.base, common.models
        matched = match(base, models, only=recipe_.only, exclude=recipe_.exclude, policies=recipe_.policies)
        problems = list(matched.problems)
        if needed := sorted(plans.wanted(operator) - set(data or {})):
            problems.append(f"this operator needs data that no checkpoint holds: {', '.join(needed)}")
        if problems:
            raise ValueError("; ".join(problems))
        if recipe_.origin == "zero":
            base = Zero(base, {*matched.merged, *matched.tied})
        source = Deltas(base, list(models.values()), matched.places, matched.merged, self.counter)
        if recipe_.compute_dtype == "float64":
            source.dtypes = dict.fromkeys(source.dtypes, DTYPES["F64"])
        made = outputs.outputs(recipe_.output, recipe_.rank, base, models, matched)
        files = _files(recipe_, outputs.tensors(made, recipe_.out_dtype, base, matched))
        side, notes = _beside(recipe_, made, base, models)
        if common is not None:
            side, notes = side | common.side, [*notes, *common.notes]
        matched.notes.extend(notes)
        inputs = {label: dict(opened.identity) for label, opened in {"": base, **models}.items()}
        versions = planning.versions() | ({"vocabulary": common.hash} if common is not None else {})
        versions |= {f"data {name}": checkpoints.content_hash(given) for name, given in (data or {}).items()}
        head = {"merge": recipe.identity(recipe_, inputs, versions), "inputs": inputs, "versions": versions}
        task = drive.Task(operator, source, base, models, matched, files, made, recipe_.allow_nonfinite, head)
        plan = planning.plan(operator, source, matched, files, place[0], made)
        return Ready(recipe_, *place, task, plan, side, notes)

    def _open(self, recipe_: Recipe) -> tuple[Opened, dict[str, Opened]]:
        found, problems, cut = {}, [], recipe_.slices
        every = {"": recipe_.base, **recipe_.models}
        for where in slices.sources(cut) if cut else every.values():
            try:
                found[where] = open_checkpoint(where, base=found.get(recipe_.base))
                self.opened.append(found[where])
            except (ValueError, OSError) as error:
                problems.append(str(error))
        if problems:
            raise ValueError("; ".join(dict.fromkeys(problems)))
        seen = {label: slices.stacked(cut, label, found) if cut else found[where] for label, where in every.items()}
        return seen.pop(""), seen


def _files(recipe_: Recipe, tensors: Mapping[str, TensorInfo]) -> list[writers.Shard]:
    """The files to write; an adapter is one, since PEFT knows no shards."""
    most, total = writers.size_in_bytes(recipe_.max_shard_size), sum(info.nbytes for info in tensors.values())
    most = total if recipe_.output == "lora" else sharing.most_bytes(most, total)
    return writers.shards(tensors, most, outputs.STEMS[recipe_.output], outputs.METADATA[recipe_.output])


def _beside(recipe_: Recipe, made: outputs.Outputs, base: Opened, models) -> tuple[dict[str, bytes], list[str]]:
    """({file beside the weights: content}, notes)."""
    if recipe_.output == "model":
        return cards.side_files(base, models, recipe_)
    if recipe_.output == "task_vector":
        return {}, ["this is no model: add it to the base, as θ0 + scale·τ"]
    return outputs.adapter_config(made, recipe_.rank, base), []


def _check_room(ready: Ready, past) -> None:
    there = sum(file.stat().st_size for file in os.scandir(ready.work)) if past else 0
    needed = ready.plan.bytes_written - there
    if needed > ready.plan.free:
        raise ValueError(f"the disk of {ready.out} is too full: the merge takes {planning.gigabytes(needed)}, "
                         f"{planning.gigabytes(ready.plan.free)} are free")


def _check_tied(task: drive.Task) -> None:
    for label, opened in {"the base": task.base, **task.models}.items():
        check_tied(task.matched.tied, opened, label)


def _bar(ready: Ready, progress: bool | None):
    from tqdm import tqdm

    total, hidden = ready.plan.bytes_once * ready.plan.passes, None if progress is None else not progress
    return tqdm(total=total, unit="B", unit_scale=True, desc="merging", disable=hidden, leave=False, dynamic_ncols=True)


class _NoBar:
    def update(self, count: int) -> None:
        pass


def _finish(ready: Ready, command: str) -> None:
    """The files beside the shards, a look at the whole, and the directory's name."""
    task, work, stem = ready.task, ready.work, outputs.STEMS[ready.recipe.output]
    for other in {*work.glob(f"{stem}*.safetensors")} - {work / shard.name for shard in task.files}:
        other.unlink()  # of the same merge begun by another number of processes
    if len(task.files) > 1:
        workdir.write_whole(work / f"{stem}.safetensors.index.json", writers.index(task.files).encode())
    for name, content in ready.side.items():
        workdir.write_whole(work / name, content)
    text = cards.card(ready.recipe, task.base, task.models, task.matched, command=command,
                      versions=task.head["versions"], notes=[*ready.notes, *residual(ready, work)])
    workdir.write_whole(work / "README.md", text.encode())
    workdir.write_whole(work / recipe.NAME, recipe.to_yaml(ready.recipe).encode())
    _look(work, task)
    writers.sync_folder(work)
    workdir.publish(work, ready.out)
    writers.sync_folder(ready.out.parent)


def residual(ready: Ready, folder: Path) -> list[str]:
    """What an adapter leaves out, in a sentence; nothing for other outputs."""
    said = outputs.residual(ledgers.lines(folder), ready.recipe.rank) if ready.recipe.output == "lora" else ""
    return [said] if said else []


def _look(work: Path, task: drive.Task) -> None:
    """Opens what was written as any reader would."""
    stem = outputs.STEMS[task.outputs.kind]
    made = open_checkpoint(work / f"{stem}.safetensors{'.index.json' if len(task.files) > 1 else ''}")
    made.close()
    wanted = {name: info for shard in task.files for name, info in shard.tensors.items()}
    past = ledgers.read(work / ledgers.NAME)
    if dict(made.tensors) != wanted or past is None or set(past.tensors) != set(wanted):
        raise OSError(f"{work} does not hold what was written into it")
