# %% [markdown]
# # A merge is a pure function: compose it, compile it, differentiate through it
#
# A method is a sentence of steps joined by `|`. What comes out is an ordinary JAX function of the task vectors, so
# `jit`, `vmap` and `grad` work on it, and its numbers may be learned.

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
# ## TIES, step by step
#
# Keep the largest entries of each task vector, agree on a sign, average what agrees. The named method is that
# sentence.

# %%
import jax.numpy as jnp

from tvjax import merging

ties = merging.top(density=0.5) | merging.agree() | merging.nonzero_mean()
taus = [{"w": jnp.array([4.0, 1.0, 0.0, -2.0])}, {"w": jnp.array([2.0, -1.0, 1.0, -4.0])}]
print(ties)
print(ties(taus)["w"], merging.build("ties", {"density": 0.5})(taus)["w"])

# %% [markdown]
# ## One program for many densities
#
# Numbers are traced: `vmap` over them compiles once, and `jax.jit` takes the whole operator as an argument.

# %%
densities = jnp.array([0.25, 0.5, 1.0])
print(jax.vmap(lambda density: merging.ties(density=density)(taus)["w"])(densities))
print(jax.jit(lambda operator, taus: operator(taus)["w"])(ties, taus))

# %% [markdown]
# ## Real task vectors
#
# Two tasks of the glyph benchmark, fine-tuned for a few steps on the CLIP that ships with the package.

# %%
import runpy

from tvjax import evaluation, experiment, vectors
from tvjax.experiment.finetune import finetune

config = runpy.run_path(str(ROOT / "configs" / "quickstart.py"))["get_config"]()
config.update(name="composing", tasks=("greek", "digits"), counts=(2,))
config.examples.update(train=640, val=64, test=200)
config.finetune.update(steps=40, batch=32, warmup=4)
plan = experiment.plan(config)
problem = experiment.problem(plan)
taus = [finetune(problem, plan, task, seed=0, workdir=RUNS / "composing", progress=False).tau for task in plan.tasks]
print(taus, "cosine", round(float(vectors.cosines(taus)[0, 1]), 3))

# %% [markdown]
# ## Learn the weights by a gradient through the merge
#
# The trim does not depend on the weights, so it is done once. Then `weigh` multiplies each task vector before signs are
# elected. The loss is cross-entropy on validation images of both tasks at θ0 + merge(τ; weights); its gradient passes
# through the mean of what agrees.

# %%
import optax

from tvjax import training

batches = {task: (problem.heads[task], *problem.splits[task]["val"]) for task in plan.tasks}


trimmed = merging.top(density=0.3)(taus)


def merge(weights):
    return merging.weigh(weights=weights) | merging.agree() | merging.nonzero_mean()


def loss(weights, trimmed, theta0, batches):
    theta = vectors.add(theta0, merge(weights)(trimmed))
    return sum(training.cross_entropy(problem.predict(theta, head, images), labels)
               for head, images, labels in batches.values()) / len(batches)


step, weights = jax.jit(jax.value_and_grad(loss)), jnp.array([0.3, 0.3])
optimizer = optax.adam(0.1)
state = optimizer.init(weights)
for _ in range(8):
    value, gradient = step(weights, trimmed, problem.theta0, batches)
    update, state = optimizer.update(gradient, state)
    weights = optax.apply_updates(weights, update)
    print(f"loss {value:.3f}, weights {weights}")

# %% [markdown]
# Judged on test images, beside the pretrained model. Next: every method is a page in the reference, and
# `tvjax.learning` learns a weight for every tensor (aTLAS, AdaMerging).

# %%
theta = vectors.add(problem.theta0, merge(weights)(trimmed))
for name, params in {"pretrained": problem.theta0, "learned": theta}.items():
    print(name, evaluation.accuracies(problem.predict, params, problem.judged(plan.tasks, "test"), batch=100))
