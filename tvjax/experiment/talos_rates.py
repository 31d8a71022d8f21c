"""The learning rate of a way of fine-tuning, chosen on validation data.

It is the first of the best by the mean accuracy of single-task models, all tuned at one rate, on the run's first seed;
the other seeds take the same.
"""
import dataclasses
import pathlib

from tvjax import evaluation, sharding
from tvjax.experiment import rows, study
from tvjax.experiment.study import Bench
from tvjax.experiment.talos_plan import Tuning
from tvjax.experiment.talos_suite import way


def choose(bench: Bench, tuning: Tuning, folder, progress=None) -> tuple[Tuning, list[dict]]:
    """(the way at its rate, rows of all that were tried); the way itself where it has no rates to choose from.

    Whatever was tuned for the choice is kept in `folder` and taken over by the way that is chosen.
    """
    if not tuning.rates:
        return tuning, []
    first = bench._replace(seed=bench.usual.seeds[0])
    tried = {rate: _at(tuning, rate) for rate in tuning.rates}
    judged = {rate: evaluation.absolute(way(first, one, folder, progress).single[bench.usual.select_on])
              for rate, one in tried.items()}
    best = max(judged, key=lambda rate: judged[rate])  # the first of equals
    bench.say(f"{tuning.label}: learning rate {best:g}, of " + ", ".join(
        f"{rate:g} ({100 * value:.1f} %)" for rate, value in judged.items()))
    chosen = dataclasses.replace(tuning, lr=best, rates=())
    sharding.once(lambda: _take_over(pathlib.Path(folder), tried[best].label, chosen.label, first.seed))
    base = {"method": tuning.label, "section": "rates", "task": rows.AVERAGE, "split": bench.usual.select_on,
            **first.common(bench.usual.tasks)}
    found = [{"metric": "accuracy at a rate", "value": value, "rate": rate, "chosen": rate == best, **base}
             for rate, value in judged.items()]
    return chosen, found if bench.seed == first.seed else []


def _at(tuning: Tuning, rate: float) -> Tuning:
    return dataclasses.replace(tuning, label=f"{tuning.label}, lr {rate:g}", lr=rate, rates=())


def _take_over(folder: pathlib.Path, label: str, chosen: str, seed: int) -> None:
    """The files of one label as those of another, where it has none yet."""
    for kind in ("methods", "adapters"):
        for path in sorted((folder / kind / label / f"seed{seed}").glob("*.*")):
            mine = folder / kind / chosen / f"seed{seed}" / path.name
            if path.is_file() and not mine.exists():
                mine.parent.mkdir(parents=True, exist_ok=True)
                study._link(path, mine)
