# %% [markdown]
# # Forget a task: negation with a sparse task vector
#
# θ0 − α·τ makes a model worse at τ's task. The art is to keep everything else: a *control* task must stay at 95 % of
# its accuracy. **TaLoS** (arXiv:2504.02620) fine-tunes only the weights to which the model's output is least
# sensitive, so that its task vector disturbs others little.

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
# ## A task to forget and a control
#
# `greek` is to be forgotten. The control task, characters that no task trains on, comes with the benchmark.

# %%
import runpy

from tvjax import calibration, evaluation, experiment, training, tree, vectors
from tvjax.experiment import negation, study
from tvjax.experiment.finetune import finetune

config = runpy.run_path(str(ROOT / "configs" / "quickstart.py"))["get_config"]()
config.update(name="forgetting", tasks=("greek",), counts=(1,), batch=100)
config.examples.update(train=640, val=100, test=200)
config.finetune.update(steps=40, batch=32, warmup=4)
plan = experiment.plan(config)
problem = experiment.problem(plan)
task, head = "greek", problem.heads["greek"]
both = problem.judged([task, problem.control], "val")
print(evaluation.accuracies(problem.predict, problem.theta0, both, batch=100))

# %% [markdown]
# ## Where the model hardly feels a change
#
# Per-example gradients of the output score every weight; four rounds narrow the mask down to the tenth with the
# lowest scores.

# %%
import jax.numpy as jnp

scored, frozen = tree.partition(problem.theta0, calibration.scored(problem.theta0))
images, _ = problem.splits[task]["val"]
found = calibration.calibrate(calibration.of_classifier(problem.predict), scored, images, frozen, head,
                              jnp.int32(head.shape[1]), sparsity=0.9, rounds=4, batches_per_round=1, batch=32)
print(f"{found.kept[-1]:,} of {tree.size(scored):,} weights may move, found in {found.seconds:.0f} s")
print({kind: f"{share:.0%}" for kind, share in calibration.shares(found.mask).items()})

# %% [markdown]
# ## Fine-tune on the mask, and in full
#
# Entries outside of the mask keep their bits. The learning rate is the full model's times five, since so little
# moves.

# %%
import functools

feed = functools.partial(training.batches, tuple(problem.splits[task]["train"]), batch=32, seed=0)
recipe = training.Recipe(**{**plan.finetune, "lr": 1.5e-3})


def loss(params, batch, key, head):
    images, labels = batch
    return training.cross_entropy(problem.predict(params, head, images), labels)


fitted = training.fit_sparse(loss, problem.theta0, found.mask, feed, recipe, frozen=head, progress=False)
taus = {"full": finetune(problem, plan, task, seed=0, workdir=RUNS / "forgetting", progress=False).tau,
        "TaLoS": vectors.task_vector(fitted.params, problem.theta0)}
print({name: f"‖τ‖ = {float(vectors.norm(tau)):.2f}" for name, tau in taus.items()})

# %% [markdown]
# ## Negate
#
# α is the one with the lowest validation accuracy on the task among those that keep the control at 95 %; where none
# does, α = 0 and the model stays. Lower `target` is better at equal `control`. When this notebook was tried, with forty
# steps, one task and one seed, the full vector forgot more (10 % left, TaLoS 59 %) and cost the control more (92.5 %,
# TaLoS 96.5 %): `experiments/talos` has the comparison over tasks and seeds.

# %%
bench = study.Bench(problem, plan, RUNS / "forgetting" / "cache.jsonl", 0, print)
for name, tau in taus.items():
    away = negation.negate(bench, tau, task, scales=(0.5, 1.0, 1.5, 2.0, 3.0))
    print(f"{name}: α = {away.scale:g}, test accuracy {100 * away.target['test']:.1f} % on {task}, "
          f"{100 * away.control['test']:.1f} % on the control")
