# %% [markdown]
# # Twenty models in the space of three, switched within one batch
#
# Fine-tuned models differ from their base by little. **TALL-masks** (arXiv:2405.07813) keeps the base, one merged
# vector and *one bit a weight* for each task: θ_t = θ0 + m_t ⊙ τ. The masks of all tasks lie on the device, the task
# is an argument of the compiled function, and one batch may hold examples of many tasks.

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
# ## Twenty fine-tuned models
#
# Four tasks with five seeds each, for a few steps.

# %%
import runpy

from tvjax import evaluation, experiment, vectors
from tvjax.experiment.finetune import finetune

config = runpy.run_path(str(ROOT / "configs" / "quickstart.py"))["get_config"]()
config.update(name="twenty", counts=(4,), seeds=(0, 1, 2, 3, 4), batch=100)
config.examples.update(train=640, val=50, test=100)
config.finetune.update(steps=12, batch=16, warmup=2)
plan = experiment.plan(config)
problem = experiment.problem(plan)
names = [(task, seed) for seed in plan.seeds for task in plan.tasks]
taus = [finetune(problem, plan, task, seed=seed, workdir=RUNS / "twenty", progress=False).tau for task, seed in names]
print(len(taus), "task vectors of", taus[0])

# %% [markdown]
# ## A store on disk
#
# The merged vector is written once, each task's bits beside it; nothing needs all models in memory.

# %%
import shutil

from tvjax.compression import building
from tvjax.compression import store as stores

folder = RUNS / "twenty" / "store"
shutil.rmtree(folder, ignore_errors=True)  # of an earlier run of this notebook
labels = [f"{task}-{seed}" for task, seed in names]
building.build(folder, problem.theta0, taus, tasks=labels, lam=0.4)
store = stores.open_store(folder)
sizes = stores.sizes_of(store)
print(f"{sizes['measured'] / 2**20:.1f} MiB instead of {sizes['checkpoints'] / 2**20:.1f} MiB")

# %% [markdown]
# ## What the compression costs in accuracy
#
# A model from the store beside the fine-tuned one, on the test images of its own task.

# %%
tests = problem.judged(plan.tasks, "test")
judge = lambda theta, task: evaluation.accuracy(problem.predict, theta, *tests[task], batch=100)
for (task, _), label, tau in list(zip(names, labels, taus, strict=True))[:4]:
    whole, small = judge(vectors.add(problem.theta0, tau), task), judge(stores.load(store, label), task)
    print(f"{task}: fine-tuned {100 * whole:.1f} %, from the store {100 * small:.1f} %")

# %% [markdown]
# ## One batch, twenty tasks
#
# `mixed` sorts the examples by task inside `jit`; one model's parameters exist at a time. Another assignment of tasks
# needs no new compilation.

# %%
import numpy as np

from tvjax.compression import switch

held = stores.load_switch(store)
images = np.concatenate([problem.splits[task]["test"].images[:5] for task in plan.tasks])
owner = np.arange(len(images)) % len(labels)
parts = lambda held: (held["theta0"], held["tau"], held["masks"])
serve = jax.jit(lambda held, tasks, x: switch.mixed(problem.encode, *parts(held), tasks, x, held["factors"], block=2))
features = serve(held, owner, images)
alone = problem.encode(stores.load(store, labels[int(owner[7])]), images[7:8])
print(features.shape, "largest difference from the model alone:", float(abs(features[7] - alone[0]).max()))
print(switch.device_bytes(*parts(held)))
