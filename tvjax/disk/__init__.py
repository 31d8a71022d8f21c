"""Merging checkpoints from disk to disk, in bounded memory, whatever the operator.

    from tvjax import disk
    disk.merge_checkpoints("BASE", ["A", "B"], "OUT", "ties", options={"density": 0.2})
"""
from tvjax.disk import adapters, arrays, openclip, pickles  # noqa: F401 (they add to OPENERS and VIEWS)
from tvjax.disk.merge import merge_checkpoints, run
from tvjax.disk.readers import OPENERS, Opened, TensorInfo, open_checkpoint
from tvjax.disk.recipe import Recipe, from_yaml, to_yaml

__all__ = ["OPENERS", "Opened", "Recipe", "TensorInfo", "from_yaml", "merge_checkpoints", "open_checkpoint", "run",
           "to_yaml"]
