"""Merges from disk to disk, whole processes timed: ours, the floor (reading and copying bytes), and other tools.

    python experiments/bench/disk.py CHECKPOINTS [--methods task_arithmetic,ties] [--peers PYTHON] [--repeats 3]

CHECKPOINTS holds base, t0, t1, … (Hugging Face directories of one architecture). One JSON line for each run: seconds,
processor seconds (user and system), peak anonymous memory (no page cache), bytes of the inputs, GB/s, the load average
before. Files are read once before, so that all runs find them in the page cache. `floor` is `cat` of all inputs and a
copy of one; `start` is Python with JAX and this library, which every merge of ours contains. PYTHON is an interpreter
whose environment has mergekit and fusion_bench. Run it on a quiet machine: the load is told, not corrected.
"""
import argparse
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import threading
import time

START = "import jax, tvjax.disk; jax.numpy.zeros(1).block_until_ready()"
FUSION = """
import sys
from fusion_bench.method import TaskArithmeticAlgorithm, TiesMergingAlgorithm
from fusion_bench.method.isotropic_merging.iso import IsotropicMergingInCommonSubspace
from fusion_bench.method.task_singular_vector.TSVM import TaskSingularVectorMerging
from fusion_bench.modelpool import BaseModelPool
from transformers import CLIPVisionModel
method, base, models, out = sys.argv[1:]
load = CLIPVisionModel.from_pretrained
pool = BaseModelPool({"_pretrained_": load(base), **{path.split("/")[-1]: load(path) for path in models.split(",")}})
ties = lambda: TiesMergingAlgorithm(scaling_factor=1.0, threshold=20, remove_keys=[], merge_func="mean")
methods = {"task_arithmetic": lambda: TaskArithmeticAlgorithm(scaling_factor=0.3), "ties": ties,
           "tsv_m": TaskSingularVectorMerging, "iso_c": lambda: IsotropicMergingInCommonSubspace(scaling_factor=1.0)}
made = methods[method]().run(pool)
made.save_pretrained(out)
"""


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("checkpoints", type=pathlib.Path)
    cli.add_argument("--methods", default="task_arithmetic,ties")
    cli.add_argument("--peers", default="")
    cli.add_argument("--repeats", type=int, default=3)
    args = cli.parse_args()
    base = args.checkpoints / "base"
    models = sorted(path for path in args.checkpoints.iterdir() if path.is_dir() and path.name != "base")
    files = [str(file) for folder in (base, *models) for file in sorted(folder.glob("*.safetensors"))]
    count = sum(os.path.getsize(file) for file in files)
    subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True)
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory(dir=args.checkpoints.parent) as out:
            out = pathlib.Path(out)
            for name, command in commands(base, models, files, args, out):
                before = size(out)
                found = timed(command, count)
                if name != "start" and size(out) - before < os.path.getsize(files[0]) // 2:
                    found["failed"] = found.get("failed", "it wrote no model")
                print(json.dumps({"run": name, **found}), flush=True)


def size(folder) -> int:
    """Bytes of the tensors below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def commands(base, models, files, args, out):
    """(name, argument list) of each run."""
    ours = pathlib.Path(__file__).parents[2] / "configs" / "merge.py"
    joined = ",".join(map(str, models))
    yield "start", [sys.executable, "-c", START]
    copied = " ".join(shlex.quote(file) for file in files if file.startswith(f"{base}/"))
    yield "floor", ["sh", "-c", f"cat {shlex.join(files)} > /dev/null && cp {copied} {shlex.quote(str(out))}"]
    for method in args.methods.split(","):
        for ledger in ("full", "brief"):
            yield f"tvjax {method}, {ledger} ledger", [
                sys.executable, "-m", "tvjax.run", f"--config={ours}:{method}", f"--config.base={base}",
                f"--config.models={joined}", f"--config.out={out / (method + ledger)}", f"--config.ledger={ledger}"]
    if args.peers:
        yield from peers(base, models, joined, args, out)


def peers(base, models, joined, args, out):
    kit = pathlib.Path(args.peers).parent / "mergekit-yaml"
    for method in args.methods.split(","):
        at = lambda tool, method=method: str(out / f"{tool}-{method}")
        (out / f"{method}.yaml").write_text(json.dumps({
            "merge_method": method, "base_model": str(base), "dtype": "float32",
            "models": [{"model": str(model), "parameters": {"weight": 0.3, "density": 0.2}} for model in models]}))
        if method in ("task_arithmetic", "ties"):  # the two that mergekit has of these
            yield f"mergekit {method}", [str(kit), str(out / f"{method}.yaml"), at("kit"),
                                        "--allow-crimes", "--no-copy-tokenizer"]
        yield f"fusion_bench {method}", [args.peers, "-c", FUSION, method, str(base), joined, at("fusion")]


def timed(command, count: int) -> dict:
    """What a process took, from start to end."""
    load, begun = os.getloadavg()[0], time.perf_counter()
    before = os.times()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peak = [0]
    watcher = threading.Thread(target=watch, args=(process.pid, peak))
    watcher.start()
    said = process.communicate()[1]
    watcher.join()
    after = os.times()
    seconds = time.perf_counter() - begun
    used = after.children_user + after.children_system - before.children_user - before.children_system
    found = {"seconds": round(seconds, 2), "processor_seconds": round(used, 2), "peak_anonymous_mb": peak[0] >> 10,
             "input_gb": round(count / 1e9, 3), "gb_per_s": round(count / seconds / 1e9, 3), "load": round(load, 1),
             "cores": os.cpu_count()}
    return found if process.returncode == 0 else {**found, "failed": said[-300:]}


def watch(pid: int, peak: list[int]) -> None:
    """Keeps the greatest anonymous memory of a process, in kB, until it ends."""
    while True:
        try:
            lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return
        found = [int(line.split()[1]) for line in lines if line.startswith("RssAnon")]
        if not found:  # it has ended
            return
        peak[0] = max(peak[0], *found)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
