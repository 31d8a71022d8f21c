"""Merges of a synthetic language model from disk to disk at three sizes: is memory flat, does time grow with bytes?

    python experiments/bench/large.py FOLDER [--layers 8,16,32] [--methods task_arithmetic,ties] [--filled 2]

Shapes are those of a Llama, bfloat16, 7 billion parameters at 32 layers, in shards of 1 GB with an index: a base and
three models. The first `--filled` shards repeat a block of random numbers, the others are sparse files (zeros that take
no disk but are read like any others). One JSON line a run, as `disk.py` writes; models are removed after each size.
"""
import argparse
import json
import pathlib
import shutil
import sys

import ml_dtypes
import numpy as np
from disk import timed

from tvjax.disk import readers, writers

WIDTH, INNER, TOKENS, TASKS = 4096, 11008, 32000, 3
BLOCK = 1 << 22  # entries


def shapes(layers: int):
    yield "model.embed_tokens.weight", (TOKENS, WIDTH)
    for i in range(layers):
        at = f"model.layers.{i}"
        yield from ((f"{at}.self_attn.{name}_proj.weight", (WIDTH, WIDTH)) for name in "qkvo")
        yield from ((f"{at}.mlp.{name}_proj.weight", (INNER, WIDTH)) for name in ("gate", "up"))
        yield f"{at}.mlp.down_proj.weight", (WIDTH, INNER)
        yield from ((f"{at}.{name}_layernorm.weight", (WIDTH,)) for name in ("input", "post_attention"))
    yield "model.norm.weight", (WIDTH,)
    yield "lm_head.weight", (TOKENS, WIDTH)


def write(folder: pathlib.Path, layers: int, seed: int, filled: int) -> int:
    """A model; its bytes."""
    folder.mkdir(parents=True)
    kind, block = np.dtype(ml_dtypes.bfloat16), numbers(seed)
    files = writers.shards({name: readers.TensorInfo(shape, kind) for name, shape in shapes(layers)}, 10**9)
    for i, shard in enumerate(files):
        with open(folder / shard.name, "wb") as file:
            file.write(shard.header)
            file.truncate(shard.size)
            for at in range(len(shard.header), shard.size if i < filled else 0, block.nbytes):
                file.seek(at)
                file.write(block.view(np.uint8)[: shard.size - at].data)
    (folder / "model.safetensors.index.json").write_text(writers.index(files))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": False}))
    return sum(shard.size for shard in files)


def numbers(seed: int) -> np.ndarray:
    """A block of the base's entries (seed 0), or of those and a heavy-tailed step."""
    draw = lambda one: np.random.default_rng(one).standard_normal(BLOCK, np.float32)
    base = 0.02 * draw(0)
    return (base if seed == 0 else base + 1e-3 * draw(seed) ** 3).astype(ml_dtypes.bfloat16)


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("folder", type=pathlib.Path)
    cli.add_argument("--layers", default="8,16,32")
    cli.add_argument("--methods", default="task_arithmetic,ties")
    cli.add_argument("--filled", type=int, default=2)
    args = cli.parse_args()
    config = pathlib.Path(__file__).parents[2] / "configs" / "merge.py"
    for layers in map(int, args.layers.split(",")):
        at = args.folder / f"layers-{layers}"
        count = sum(write(at / ("base", "a", "b", "c")[i], layers, i, args.filled) for i in range(TASKS + 1))
        entries = sum(int(np.prod(shape)) for _, shape in shapes(layers))
        for method in args.methods.split(","):
            found = timed([sys.executable, "-m", "tvjax.run", f"--config={config}:{method}", f"--config.base={at}/base",
                           f"--config.models={at}/a,{at}/b,{at}/c", f"--config.out={at}/out", "--config.ledger=brief"],
                          count)
            shutil.rmtree(at / "out", ignore_errors=True)
            print(json.dumps({"run": method, "parameters": entries, **found}), flush=True)
        shutil.rmtree(at)


if __name__ == "__main__":
    main()
