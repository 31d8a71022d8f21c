# %% [markdown]
# # Quickstart: from one pretrained model to one that knows four tasks
#
# A **task vector** is what fine-tuning adds to a model, τ = θ_finetuned − θ_pretrained. Here four of them are made,
# merged in several ways, and judged. Everything needed ships with the package: a small CLIP and *glyphs*, a benchmark
# of characters drawn in many fonts. It takes about a minute on two cores.

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
# ## A config says what is done
#
# It is a tree of plain numbers. This is the quickstart's, with fewer steps and examples so that it is quick; remove
# the second statement for the real one.

# %%
import runpy

from tvjax import experiment, plotting, report, results

config = runpy.run_path(str(ROOT / "configs" / "quickstart.py"))["get_config"]()
config.update(name="notebook", counts=(4,), scales=(0.0, 0.25, 0.5, 0.75, 1.0), save_models=False)
config.examples.update(train=640, val=100, test=200)
config.finetune.update(steps=40, batch=32, warmup=4)
for merge in config.merges:
    if "scales" in merge:
        merge.scales = (0.5, 1.0, 1.5)
print(config.tasks, [merge.name for merge in config.merges])

# %% [markdown]
# ## Fine-tune, merge, judge
#
# Each task is fine-tuned on its own. Each merge then combines the four task vectors into one; its scale α is chosen
# on *validation* images, and the table shows *test* images. A second run in the same folder reuses what is unchanged.

# %%
rows = experiment.run(config, RUNS / "quickstart", progress=False)

# %% [markdown]
# ## What came out
#
# Every number is a row. *Normalised* accuracy divides by that of the model fine-tuned on the task alone. With so few
# steps and images, differences of a few points are chance; `configs/quickstart.py` tells what the whole run gives.

# %%
from IPython.display import Image, Markdown

Markdown(results.markdown(experiment.final_table(rows, tasks=4), scale=100))

# %%
Image(plotting.png(plotting.over_scales(rows, tasks=4)), width=560)

# %% [markdown]
# ## The report
#
# One page that stands alone: tables, figures, protocol, cost, and how to run it again. Open it in a browser.

# %%
made = report.write(RUNS / "quickstart", command="python -m tvjax.run --config=configs/quickstart.py")
print(*[path for path in made if path.suffix in (".html", ".md")], sep="\n")
