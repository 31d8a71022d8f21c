"""Every merging method on eight synthetic task vectors of a ViT-B/32: seconds, GB/s, programs compiled, seconds of
compilation, peak memory.

    python experiments/bench/operators.py CKPT_DIR [--methods ties,tsv_m] [--markdown FILE]

CKPT_DIR holds base/ and t0/ … t7/ (directories with model.safetensors). Each method runs in a process of its own: the
files are mapped, θ0 + operator(τ) is computed leaf by leaf and dropped. Memory is anonymous memory (without the
mapped files), also as a multiple of the eight models' bytes. A numpy pass that adds the same eight models stands
beside them as the floor.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import threading
import time

TASKS = 8


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("checkpoints", type=pathlib.Path)
    cli.add_argument("--methods", default="")
    cli.add_argument("--markdown", type=pathlib.Path)
    cli.add_argument("--one", help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.one:
        print(json.dumps(floor(args.checkpoints) if args.one == "numpy sum" else one(args.checkpoints, args.one)))
        return
    from tvjax import merging

    names = args.methods.split(",") if args.methods else ["numpy sum", *merging.METHODS]
    rows = [run(args.checkpoints, name) for name in names]
    table = markdown([row for row in rows if row])
    print(table)
    if args.markdown:
        args.markdown.write_text(table)


def run(checkpoints, name):
    command = [sys.executable, __file__, str(checkpoints), "--one", name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    row = {"method": name, **json.loads(done.stdout.splitlines()[-1])}
    print(row, file=sys.stderr)
    return row


def mapped(checkpoints):
    from tvjax import checkpoints as files

    base = files.load(checkpoints / "base").params
    return base, [files.load(checkpoints / f"t{t}").params for t in range(TASKS)]


def one(checkpoints, name) -> dict:
    """The method's figures, in this process."""
    from tvjax import merging, tree

    compiled = listen()
    base, thetas = mapped(checkpoints)
    if name in ("slerp", "nuslerp"):
        thetas = thetas[:2]
    operator = merging.build(name)
    with Anonymous() as memory:
        start = time.perf_counter()
        entries = tree.size(merging.merge(operator, thetas, base))
        seconds = time.perf_counter() - start
    size = 4 * entries * len(thetas)
    return {
        "seconds": seconds,
        "GB/s": (size + 4 * entries) / seconds / 1e9,
        "programs": len(compiled),
        "compiling": sum(compiled),
        "peak GB": memory.peak / 1e9,
        "peak / inputs": memory.peak / size,
    }


def floor(checkpoints) -> dict:
    """One numpy pass over the same bytes: θ0 + 0.3·Σ (θ_t − θ0), written as a running sum."""
    import numpy as np

    from tvjax import tree

    base, thetas = mapped(checkpoints)
    flats = [tree.flatten(theta) for theta in thetas]
    with Anonymous() as memory:
        start = time.perf_counter()
        made = {}
        for name, x in tree.flatten(base).items():
            total = np.float32(1 - 0.3 * TASKS) * x
            for flat in flats:
                total += np.float32(0.3) * flat[name]
            made[name] = total
        seconds = time.perf_counter() - start
    size = sum(x.nbytes for x in made.values())
    return {
        "seconds": seconds,
        "GB/s": size * (TASKS + 1) / seconds / 1e9,
        "programs": 0,
        "compiling": 0.0,
        "peak GB": memory.peak / 1e9,
        "peak / inputs": memory.peak / size / TASKS,
    }


def listen() -> list[float]:
    """A list that fills with the seconds of each compilation from now on."""
    import jax

    seconds: list[float] = []

    def heard(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(heard)
    return seconds


class Anonymous:
    """The peak of this process's anonymous memory inside the block, above what it had at the start, sampled every 10
    ms.
    """

    def __enter__(self):
        self.first, self.peak, self.on = self.now(), 0, True
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def watch(self):
        while self.on:
            self.peak = max(self.peak, self.now() - self.first)
            time.sleep(0.01)

    @staticmethod
    def now() -> int:
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

    def __exit__(self, *_):
        self.on = False
        self.thread.join()


def markdown(rows) -> str:
    columns = ["method", "seconds", "GB/s", "programs", "compiling", "peak GB", "peak / inputs"]
    show = lambda value: f"{value:.2f}" if isinstance(value, float) else str(value)
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(show(row[c]) for c in columns)} |" for row in rows)]) + "\n"


if __name__ == "__main__":
    main()
