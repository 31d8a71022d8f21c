# %% [markdown]
# # Merge published CLIP checkpoints, and read the report
#
# Other people's fine-tuned models need no fine-tuning here: the config names a directory or a hub id for each task.
# Without a network this notebook makes two fine-tuned models of the built-in CLIP first and then treats them as
# strangers' files; `PUBLIC = True` takes OpenAI's CLIP and eight fine-tuned ones from the Hugging Face hub.

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
# ## Which models
#
# `PUBLIC = True` needs the network, several GB of disk, `pip install "tvjax[data]"`, and an accelerator or patience.

# %%
import runpy

PUBLIC = False
config = runpy.run_path(str(ROOT / "configs" / "quickstart.py"))["get_config"]()
config.update(name="checkpoints", tasks=("greek", "digits"), counts=(2,), scales=(0.0, 0.25, 0.5, 0.75, 1.0))
config.examples.update(train=640, val=100, test=200)
config.finetune.update(steps=40, batch=32, warmup=4)

# %% [markdown]
# ## The strangers' files
#
# Each is a directory that `transformers.CLIPModel.from_pretrained` reads too: weights, config, tokenizer, processor.

# %%
from tvjax import experiment, vectors
from tvjax.experiment.finetune import finetune

if not PUBLIC:
    plan = experiment.plan(config)
    problem = experiment.problem(plan)
    for task in plan.tasks:
        tau = finetune(problem, plan, task, seed=0, workdir=RUNS / "experts", progress=False).tau
        problem.save(vectors.add(problem.theta0, tau), RUNS / "experts" / f"clip-{task}")
    print(sorted(path.name for path in (RUNS / "experts" / "clip-greek").iterdir()))

# %% [markdown]
# ## Merge them
#
# A checkpoint that does not fit (other names, other shapes, NaN, another base) ends in one sentence before anything
# is computed; one that lies suspiciously far from the base gets a red line in the report.

# %%
if PUBLIC:
    from tvjax.run import run
    config = runpy.run_path(str(ROOT / "configs" / "clip_merge.py"))["get_config"]("vit_b_32,8")
    rows = run(config, RUNS / "public-clip")
else:
    config.finetuned = tuple(f"{task}={RUNS / 'experts' / f'clip-{task}'}" for task in config.tasks)
    config.merges = (dict(name="average"), dict(name="task_arithmetic"), dict(name="ties", density=0.2),
                     dict(name="iso_c", scales=(0.5, 1.0, 1.5)))
    rows = experiment.run(config, RUNS / "checkpoints", progress=False)

# %% [markdown]
# ## How to read the report
#
# The table first: absolute accuracy in black, normalised below it in grey, the best merge of a column in bold,
# *zero-shot* and *fine-tuned* as the anchors between which merges lie. Then α over the grid (an α at the edge of its
# grid is said in words: widen the grid), cosines between task vectors (near 0: the tasks hardly share directions),
# cost, protocol.

# %%
from IPython.display import Image, display

from tvjax import plotting, report

if not PUBLIC:
    print(*report.write(RUNS / "checkpoints", command="python -m tvjax.run --config=…"), sep="\n")
    display(Image(plotting.png(plotting.per_task(rows, tasks=2)), width=560))
