# %% [markdown]
# # Merge language models from disk to disk
#
# For checkpoints that do not fit in memory: tensors go through a piece at a time, thresholds are exact ones of the
# whole model, and an interrupted merge goes on where it was. Here with three toys of a few MB that are made now;
# `PUBLIC = True` takes real ones from the hub.

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
# ## The checkpoints
#
# Hugging Face directories: `config.json` and safetensors, sharded or not.

# %%
import json
import shutil

import numpy as np

from tvjax import checkpoints

PUBLIC = False
folder = RUNS / "llm"
shutil.rmtree(folder, ignore_errors=True)  # of an earlier run of this notebook
shapes = {"model.embed_tokens.weight": (512, 64), "model.norm.weight": (64,)}
for i in range(4):
    shapes |= {f"model.layers.{i}.self_attn.q_proj.weight": (64, 64), f"model.layers.{i}.mlp.up_proj.weight": (256, 64)}


def write(name, rng, start=None):
    leaves = {key: (0.1 * rng.standard_normal(shape) * (1 if start is None else 0.2)).astype(np.float32)
                   + (0 if start is None else start[key]) for key, shape in shapes.items()}
    checkpoints.save(checkpoints.nest(leaves), folder / name / "model.safetensors")
    (folder / name / "config.json").write_text(json.dumps({"model_type": "toy", "num_hidden_layers": 4}))
    return leaves


base = write("base", np.random.default_rng(0))
for seed, name in enumerate(("math", "code"), 1):
    write(name, np.random.default_rng(seed), base)
BASE, MODELS = folder / "base", {name: folder / name for name in ("math", "code")}
if PUBLIC:
    BASE, MODELS = "Qwen/Qwen2.5-0.5B", {"instruct": "Qwen/Qwen2.5-0.5B-Instruct", "coder": "Qwen/Qwen2.5-Coder-0.5B"}

# %% [markdown]
# ## Merge
#
# The plan is said first, from headers alone: what matches, what is kept, bytes, memory. `--config.plan=True` stops
# there.

# %%
from tvjax import disk

out = disk.merge_checkpoints(BASE, MODELS, folder / "merged", "ties", options={"density": 0.2}, progress=False)
print(sorted(path.name for path in out.iterdir()))

# %% [markdown]
# ## The ledger
#
# For every tensor: norms, cosines between models, conflicts of sign, kept shares, hashes. Below, the first tensor's
# line.

# %%
lines = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
print(json.dumps(lines[2], indent=1)[:900])

# %% [markdown]
# ## A recipe of mergekit's
#
# It is read as it is. A misspelt key is answered by the right one; what cannot be had here is said in one sentence.

# %%
from tvjax.disk import moving

recipe = folder / "mergekit.yaml"
recipe.write_text(f"""
merge_method: ties
base_model: {BASE}
models:
  - model: {list(MODELS.values())[0]}
    parameters: {{weight: 1.0, density: 0.5}}
  - model: {list(MODELS.values())[1]}
    parameters: {{weight: [0.0, 1.0], density: 0.5}}
parameters: {{normalize: true}}
""")
print(disk.to_yaml(moving.read(recipe)))

# %%
again = disk.run(moving.read(recipe), folder / "as-mergekit", progress=False)
try:
    recipe.write_text(recipe.read_text().replace("density", "densty"))
    moving.read(recipe)
except ValueError as error:
    print("one sentence:", error)
