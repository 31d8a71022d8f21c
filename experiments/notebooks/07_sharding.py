# %% [markdown]
# # Sharding: a TPU's chips, or eight devices made of one CPU
#
# An operator is a function of arrays, and arrays may be spread over a mesh. Nothing in a merge or in the training
# loop changes. Without accelerators eight devices are forced out of one CPU: no faster, but the same program.

# %%
import os

if not any(os.path.exists(f"/dev/{name}") for name in ("accel0", "vfio/0", "nvidia0")):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

# %% tags=["install"]
# Finds tvjax, or installs it for the device at hand; where that cannot be, it says what to do.
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path.cwd()
ROOT = next((folder for folder in (HERE, *HERE.parents) if (folder / "configs" / "quickstart.py").is_file()), None)
TPU = "TPU_NAME" in os.environ or any(os.path.exists(f"/dev/{name}") for name in ("accel0", "vfio/0"))
EXTRA = "[tpu]" if TPU else "[cuda12]" if shutil.which("nvidia-smi") else ""
if sys.version_info < (3, 11):
    raise SystemExit(f"tvjax needs Python 3.11 or later, this is {sys.version.split()[0]}: choose another runtime.")
if ROOT is None:
    raise SystemExit("Open this notebook in a clone of the repository (in Colab: upload or git clone it, then %cd into "
                     "it): the configs that it uses are not below or above this folder.")
if importlib.util.find_spec("tvjax") is None:
    if subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", f"{ROOT}{EXTRA}"]).returncode:
        raise SystemExit("pip could not install tvjax. Without network: `pip download . -d wheels` in a clone on a "
                         "machine that has one, copy the folder here, `pip install --no-index --find-links wheels .`")
RUNS = ROOT / "runs" / "notebooks"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(RUNS / "compiled"))  # a second run starts faster
import jax

if EXTRA and jax.default_backend() == "cpu":
    print(f"An accelerator is there, but JAX runs on the CPU: pip install '.{EXTRA}' in the clone, then restart.")
print(f"JAX {jax.__version__} on {jax.device_count()} {jax.default_backend()} device(s); results go to {RUNS}")

# %% [markdown]
# ## A mesh, and task vectors spread over it
#
# Each device holds a slice of every matrix of every task vector: none of them needs room for a whole one.

# %%
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tvjax import sharding

if jax.device_count() == 1:
    raise SystemExit("One device only: restart the kernel and run all cells from the first one.")
layout = sharding.layout(data=-1)  # in a config: --config.mesh.data=-1
print(sharding.told(layout))
rng = np.random.default_rng(0)
draw = lambda *shape: rng.standard_normal((4, *shape), np.float32)  # four tasks
taus = {"layers": {str(i): {"weight": draw(256, 128), "bias": draw(256)} for i in range(2)}}
spread = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(layout.mesh, P(None, "data"))), taus)
print(spread["layers"]["0"]["weight"].sharding)

# %% [markdown]
# ## Merge where they lie
#
# TIES needs a threshold of the whole model; it is found by counting, slice by slice, so nothing is gathered. The
# result is spread as the inputs were, and equals that of one device up to the order of sums.

# %%
from tvjax import merging

for name in ("task_arithmetic", "ties", "iso_c"):
    one, many = merging.build(name)(taus), merging.build(name)(spread)
    leaf = many["layers"]["0"]["weight"]
    gap = max(float(abs(np.asarray(a) - np.asarray(b)).max())
              for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True))
    print(f"{name}: on {len(leaf.devices())} devices, a slice is {leaf.addressable_shards[0].data.shape}, "
          f"largest difference {gap:.1e}")

# %% [markdown]
# ## Fine-tune with the batch spread
#
# Parameters are copied to all devices, the batch is cut between them, by everything that runs inside of `sharding.on`:
# fine-tuning, calibration, learning, evaluation. Numbers are those of one device, to rounding.

# %%
import functools

from tvjax import training

x, w = rng.standard_normal((512, 16), np.float32), rng.standard_normal((16, 4), np.float32)
labels = (x @ w).argmax(-1).astype(np.int32)


def loss(params, batch, key):
    images, labels = batch
    return training.cross_entropy(images @ params["w"], labels)


recipe = training.Recipe(steps=60, batch=64, lr=0.1, warmup=5, weight_decay=0.0)
start = {"w": np.zeros((16, 4), np.float32)}
feed = functools.partial(training.batches, (x, labels), batch=64, seed=0)
one = training.fit(loss, start, feed, recipe, progress=False)
with sharding.on(layout):
    many = training.fit(loss, start, feed, recipe, progress=False)
print(f"loss {many.losses[0]:.3f} → {many.losses[-1]:.3f}; largest difference to one device "
      f"{abs(np.asarray(one.params['w']) - many.params['w']).max():.1e}")

# %% [markdown]
# ## Merge from disk on all devices
#
# `configs/merge.py` with `--config.mesh.data=-1` gives a piece to each device, and several processes share the files
# that are written: `docs/how-to/cluster.md`. Here the same engine, on arrays: entries are equal bit by bit.

# %%
from tvjax.merging import crew, crewed, engine, sources, streamed

flat = {f"layers.{i}.{name}": taus["layers"][str(i)][name] for i in range(2) for name in ("weight", "bias")}
source, tasks = sources.Stacked(flat), engine.task_hashes(None, 4)
alone = dict(streamed.run(merging.build("ties"), source, tasks, {}))
shared = crewed.run(merging.build("ties"), source, tasks, {}, crew.Crew(tuple(jax.local_devices())))
print("equal bits:", all(np.array_equal(alone[name], shared[name]) for name in alone))
