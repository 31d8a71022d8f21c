"""A program that meets others, and then dies, fails, disagrees or waits, as the tests of processes want it.

    python tests/meeting.py MODE SECONDS HOST:PORT,COUNT,INDEX
"""
import os
import sys
import time

import jax

from tvjax import sharding


def main(mode, seconds, where):
    try:
        sharding.start(where, timeout=float(seconds))
        me = jax.process_index()
        if mode == f"die{me}":
            os._exit(9)
        if mode == "fail" and me == 1:
            raise ValueError("bad input: what process 1 alone has read")
        sharding.agree({"config": {"lr": 0.1, "steps": 3 + me * (mode == "differ")}, "versions": {"jax": "1"}})
        if mode == "well":
            assert sharding.exchanged({"me": me}) == [{"me": i} for i in range(jax.process_count())]
            print("met", flush=True)
            sharding.finish()
            return
        sharding.barrier("never")
    except ValueError as error:
        print(error, file=sys.stderr, flush=True)
        sharding.fail(str(error))
        time.sleep(0.1)
        os._exit(2)


if __name__ == "__main__":
    main(*sys.argv[1:])
