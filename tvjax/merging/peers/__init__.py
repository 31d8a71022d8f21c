"""How mergekit, FusionBench and PEFT call our methods: one row for each of theirs, read by `compat`."""

from tvjax.merging.peers.fusionbench import CONFIGS, FUSIONBENCH
from tvjax.merging.peers.fusionbench import NONE as NO_FUSIONBENCH
from tvjax.merging.peers.mergekit import MERGEKIT
from tvjax.merging.peers.mergekit import NONE as NO_MERGEKIT
from tvjax.merging.peers.peft import PEFT
from tvjax.merging.peers.row import Row

ROWS = {"mergekit": MERGEKIT, "fusionbench": FUSIONBENCH, "peft": PEFT}
NONE = {"mergekit": NO_MERGEKIT, "fusionbench": NO_FUSIONBENCH, "peft": {}}

__all__ = ["CONFIGS", "NONE", "ROWS", "Row"]
