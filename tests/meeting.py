"""A program that meets others, and then dies, fails, disagrees or waits, as the tests of processes want it.

    python tests/meeting.py MODE SECONDS SILENCE FOLDER HOST:PORT,COUNT,INDEX
"""
import os
import sys

import jax
import numpy as np

from tvjax import checkpoints, sharding


def keep_own_state(folder, me):
    """Each process saves and restores a state of its own, in its own time."""
    for step in range(1, 2 + me):
        checkpoints.save_state({"w": np.full(3, me + step, np.float32)}, f"{folder}/{me}", step)
    found = checkpoints.restore_state({"w": np.zeros(3, np.float32)}, f"{folder}/{me}")
    assert checkpoints.latest_step(f"{folder}/{me}") == 1 + me and found["w"][0] == 2 * me + 1


def main(mode, seconds, silence, own, where):
    try:
        sharding.start(where, timeout=float(seconds), silence=float(silence))
        me = jax.process_index()
        if mode == f"die{me}":
            os._exit(9)
        if mode == "fail" and me == 1:
            raise ValueError("bad input: what process 1 alone has read")
        sharding.agree({"config": {"lr": 0.1, "steps": 3 + me * (mode == "differ")}, "versions": {"jax": "1"}})
        if mode == "well":
            assert sharding.exchanged({"me": me}) == [{"me": i} for i in range(jax.process_count())]
            keep_own_state(own, me)
            print("met", flush=True)
            sharding.finish()
            return
        sharding.barrier("never")
    except ValueError as error:
        print(error, file=sys.stderr, flush=True)
        sharding.fail(str(error))
        os._exit(2)


if __name__ == "__main__":
    main(*sys.argv[1:])
