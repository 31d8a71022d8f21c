"""Merging that adapts without labels on the glyph benchmark: AdaMerging (arXiv:2310.02575), Surgery (arXiv:2402.02705).

    python -m tvjax.run --config=configs/adamerging.py:8
    python -m tvjax.run --config=configs/adamerging.py:8 --config.vectors=runs/glyphs-8   # its task vectors, if it ran
    python -m tvjax.run --config=configs/adamerging.py:20         # as many as the glyphs have: memory is what it tries
    python -m tvjax.run --config=configs/adamerging.py:minilm     # sentences under MiniLM, as configs/minilm.py:quick
    python -m tvjax.run --config=configs/adamerging.py:vision     # real digits, as configs/vision.py
    python -m tvjax.run --config=configs/adamerging.py:paper      # 500 steps of two batches at 1e-3, as released
    python -m tvjax.run --config=configs/adamerging.py:runlocal

Protocol: coefficients from 0.3, clamped to [0, 1], Adam on the entropy of predictions on unlabelled test inputs, 16 of
each task a step. `:8` takes 60 steps at 1e-2, which suits two cores; `:paper` is the released code's. Whatever saw
test inputs is kept in a table of its own; `adapt_on="val"` adapts to validation inputs instead. Surgery has rank 16.
"""
import pathlib
import runpy

from ml_collections import ConfigDict

COUNTS = {"": 8, "8": 8, "20": 20, "minilm": 4, "vision": 4, "paper": 8, "runlocal": 3}


def get_config(arg=""):
    if arg not in COUNTS:
        raise ValueError(f"adamerging takes {', '.join(f':{name}' for name in COUNTS if name)}; got :{arg}")
    from tvjax.data import glyphs

    local, paper, count = arg == "runlocal", arg == "paper", COUNTS[arg]
    group = lambda **fields: ConfigDict(fields)
    method = lambda label, by="tensor", ties=False, region="none": group(label=label, by=by, ties=ties, region=region)
    config = ConfigDict(dict(
        job="adamerging",
        name=f"adamerging-{arg or 8}",
        model="glyphs",
        suite="glyphs",
        tasks=glyphs.suite(20)[:count],
        counts=(count,),
        seeds=(0,) if local else (0, 1, 2),
        examples=dict(train=64, val=40, test=40) if local else dict(glyphs.EXAMPLES, val=100, test=400),
        finetune=dict(steps=4, batch=8, lr=2e-4, warmup=1, weight_decay=0.1) if local else glyphs.RECIPE,
        finetuned=(),
        vectors="",                   # the folder of another run with the same model, data and recipe
        merges=(group(name="task_arithmetic"),),  # whose grid of α the baselines take
        scales=(0.0, 0.5, 1.0) if local else (0.2, 0.25, 0.3, 0.35, 0.4, 0.5),
        select_on="val",
        batch=40 if local else 250,
        save_models=False,
        allow_nonfinite=False,
        mesh=dict(data=1, model=1, rules=()),
        adamerging=group(
            baselines=("none", "gradients") if local else ("none", "gradients", "vectors"),
            methods=(
                method("AdaMerging by task", by="task"),
                method("AdaMerging"),
            ) + (() if local else (
                method("AdaMerging++", ties=True),
                method("TATR + AdaMerging", region="gradients"),
            )),
            adapt_on="test",          # unlabelled inputs of this split
            steps=3 if local else 500 if paper else 60,
            lr=1e-3 if local or paper else 1e-2,
            batch=8 if local else 16,
            batches=2 if paper else 1,
            value=0.3,
            store="bfloat16",         # how task vectors are held while adapting
            density=0.2,              # of ++
            quantile=0.99,            # of regions
            exemplars=4 if local else 16,
            surgery=group(on=("task arithmetic",) if local else ("task arithmetic", "TATR", "AdaMerging"), rank=16,
                          steps=20 if local else 1000, lr=1e-3, batch=16),
        ),
    ))
    return on_suite(config, arg) if arg in ("minilm", "vision") else config


def on_suite(config, arg):
    """The study on the model, tasks, data and recipe that configs/tatr.py has under this argument."""
    theirs = runpy.run_path(str(pathlib.Path(__file__).with_name("tatr.py")))["get_config"](arg)
    for name in ("model", "suite", "sources", "tasks", "control", "counts", "examples", "finetune", "batch", "data",
                 "scales"):
        config[name] = theirs[name]
    return config
