"""The quickstart as a user starts it: wall seconds, CPU seconds and peak memory of the whole process.

    python experiments/bench/quickstart.py [--config configs/quickstart.py] [--budget 300] [--memory 3]

The run goes to a temporary folder, without a compilation cache. Ends with exit code 1 where it took more than --budget
seconds or --memory GiB; the machine should have nothing else to do.
"""
import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[2]


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--config", default="configs/quickstart.py")
    cli.add_argument("--budget", type=float, default=300, help="seconds")
    cli.add_argument("--memory", type=float, default=3, help="GiB")
    args = cli.parse_args()
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        command = [sys.executable, "-m", "tvjax.run", f"--config={args.config}", f"--workdir={folder}/run"]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        seconds = time.perf_counter() - begun
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    gib = used.ru_maxrss / 2**20
    print(json.dumps({"config": args.config, "wall_seconds": round(seconds, 1), "peak_gib": round(gib, 2),
                      "cpu_seconds": round(used.ru_utime + used.ru_stime, 1), "cpus": os.cpu_count(),
                      "load_at_the_end": os.getloadavg()[0]}))
    sys.exit(seconds > args.budget or gib > args.memory)


if __name__ == "__main__":
    main()
