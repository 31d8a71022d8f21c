"""The job `merge` of the command: a config as a recipe, the plan alone or the whole merge."""
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from tvjax.disk import data, merge, moving, push, recipe

FIELDS = ("only", "exclude", "missing", "extra", "heads", "vocabulary", "compute_dtype", "out_dtype", "max_shard_size",
          "allow_nonfinite", "code", "output", "rank")


def run(config: Any, *, say: Callable[[str], Any] = print, command: str = "") -> Path | None:
    """The directory that a config of configs/merge.py makes; None where it asks for the plan alone."""
    chosen, to = from_config(config), push.target(config.get("push", ""))
    given = data.read(config.get("data", ""), list(chosen.models))
    if config.plan:
        with closing(merge.prepare(chosen, config.out or "out", data=given)) as held:
            print(held.ready.describe())
        return None
    try:
        out = merge.run(chosen, config.out, ledger=config.ledger, say=say, command=command, data=given)
        if to:
            push.push(out, to, say=say)
        return out
    except KeyboardInterrupt:
        say("interrupted; the same command goes on where it stopped")
        raise SystemExit(130) from None


def from_config(config: Any) -> recipe.Recipe:
    """The recipe that a config describes, or names."""
    if config.recipe:
        return moving.read(config.recipe, config.base, config.models)
    options = {name: value for name, value in config.merge.to_dict().items() if value is not None}
    return recipe.Recipe(base=config.base, models=recipe.named(config.models), method=config.method, options=options,
                         **{name: config[name] for name in FIELDS})
