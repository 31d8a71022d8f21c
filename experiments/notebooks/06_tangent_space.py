# %% [markdown]
# # Tangent space: the affine sweep and the disentanglement map
#
# Linearise the model at θ0, f_lin(x; τ) = f(x; θ0) + ∇f(x; θ0)·τ (arXiv:2305.12827). Its output is *affine* in τ:
# once the slopes of a batch are known, every combination of task vectors costs a small sum, not a pass through the
# network.

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
# ## Two tasks, fine-tuned in the tangent space
#
# The same loop as ever: only the model is the linearised one, and τ is what is trained.

# %%
import functools
import runpy

import jax.numpy as jnp

from tvjax import evaluation, experiment, tangent, training

config = runpy.run_path(str(ROOT / "configs" / "quickstart.py"))["get_config"]()
config.update(name="tangent", tasks=("braille", "cyrillic"), counts=(2,))  # 36 classes each: one program for both
config.examples.update(train=480, val=64, test=50)
config.finetune.update(steps=20, batch=16, warmup=2)
plan = experiment.plan(config)
problem = experiment.problem(plan)
linear = evaluation.classify_linearised(problem.encode)


def loss(tau, batch, key, frozen):
    (images, labels), (theta0, head) = batch, frozen
    return training.cross_entropy(linear((theta0, tau), head, images), labels)


zero = jax.tree.map(jnp.zeros_like, problem.theta0)
taus = []
for task in plan.tasks:
    feed = functools.partial(training.batches, tuple(problem.splits[task]["train"]), batch=16, seed=0)
    frozen = (problem.theta0, problem.heads[task])
    fitted = training.fit(loss, zero, feed, plan.recipe(0), frozen=frozen, progress=False)
    taus.append(tangent.to_standard(fitted.params, problem.theta0))
    print(task, f"loss {fitted.losses[0]:.2f} → {fitted.losses[-1]:.2f}")

# %% [markdown]
# ## The affine sweep
#
# One pass through the network gives value and slopes; 441 pairs of coefficients are then judged from them.

# %%
import numpy as np

grid = np.linspace(0, 2, 21, dtype=np.float32)
pairs = jnp.asarray(np.stack(np.meshgrid(grid, grid, indexing="ij"), -1).reshape(-1, 2))


@jax.jit
def sweep(theta0, taus, head, images, labels):
    features = tangent.affine(*tangent.slopes(problem.encode)(theta0, taus, images), pairs)
    unit = features / jnp.linalg.norm(features, axis=-1, keepdims=True)
    return ((unit @ head).argmax(-1) == labels[None]).mean(-1)


judged = [sweep(problem.theta0, taus, problem.heads[task], *problem.splits[task]["val"]) for task in plan.tasks]
accuracy = sum(judged) / len(judged)
best = int(accuracy.argmax())
print(f"{len(pairs)} models: best validation average {100 * float(accuracy[best]):.1f} % at {pairs[best]}")

# %% [markdown]
# ## Does a task vector act on its own task alone?
#
# ξ(α₁, α₂) counts how often the predictions of the combined model differ from those of each vector alone; 0 is
# perfect disentanglement. Left to the reader: the same map on standard task vectors, with `place=evaluation.shifted`.

# %%
data = [(problem.heads[task], problem.splits[task]["test"].images) for task in plan.tasks]
axis = (0.0, 1.0, 2.0)
xi = evaluation.disentanglement(linear, problem.theta0, *taus, *data, axis, batch=50, place=evaluation.paired)
print(np.round(xi, 2))

# %%
from IPython.display import Image

from tvjax import plotting
from tvjax.reports import figures

Image(plotting.png(figures.surface(xi, xs=axis, ys=axis, label="ξ (0 … 2)", x=f"α of {plan.tasks[1]}",
                                   y=f"α of {plan.tasks[0]}", box=1.0)), width=480)
