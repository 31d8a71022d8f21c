"""One place for all that concerns several devices and processes: meshes, parameters and batches on them, processes.

    with sharding.on(sharding.layout(data=8)):  # or --config.mesh.data=8
        training.fit(…), evaluation.accuracy(…), calibration.calibrate(…)

Nothing here is needed on one device.
"""
from tvjax.sharding.lockstep import decided, once, together
from tvjax.sharding.meshes import Layout, found, from_config, layout, mesh_of, on, told
from tvjax.sharding.placing import (
    check_batch,
    constrain,
    host,
    local_rows,
    place,
    replicate,
    settled,
    spread,
    spread_local,
    whole,
)
from tvjax.sharding.processes import agree, barrier, broken_off, exchanged, fail, finish, gathered, sent, speaker, start
from tvjax.sharding.rules import check, parsed, specs

__all__ = [
    "Layout", "agree", "barrier", "broken_off", "check", "check_batch", "constrain", "decided", "exchanged", "fail",
    "finish", "found", "from_config", "gathered", "host", "layout", "local_rows", "mesh_of", "on", "once", "parsed",
    "place", "replicate", "sent", "settled", "speaker", "specs", "spread", "spread_local", "start", "together", "told",
    "whole",
]
