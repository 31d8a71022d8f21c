"""Linearised fine-tuning (arXiv:2305.12827) on the glyph benchmark: addition, negation, disentanglement; three seeds.

    python -m tvjax.run --config=configs/tangent.py:8
    python -m tvjax.run --config=configs/tangent.py:8 --config.vectors=runs/glyphs-8   # the standard ones, if it ran
    python -m tvjax.run --config=configs/tangent.py:quick      # four tasks, few examples
    python -m tvjax.run --config=configs/tangent.py:runlocal

Ways: standard fine-tuning, and fine-tuning of f(x; θ0) + ∇f(x; θ0)·τ from the same recipe. Task addition with one λ for
all tasks, negation with a control, both on validation data; cosines, pair-wise ξ, ξ and losses in the plane of two task
vectors on [−3, 3]², and each tuned model beside its own linearisation. Measured numbers: experiments/llora/README.md.

The paper's own settings, for machines with its models: CLIP ViT-B/32, B/16 and L/14, AdamW, lr 1e-5, weight decay 0.1,
batch 128, 500 steps of warm-up, about 2000 steps (epochs by task: `tvjax.training.EPOCHS`), λ from 0, 0.05, …, 1, on
Cars, DTD, EuroSAT, GTSRB, MNIST, RESISC45, SUN397, SVHN; control ImageNet. `remat="dots"` and `finetune.accumulation`
bound the memory of a step there.
"""
from ml_collections import ConfigDict

ARGUMENTS = ("", "8", "quick", "runlocal")


def get_config(arg=""):
    if arg not in ARGUMENTS:
        raise ValueError(f"tangent takes {', '.join(f':{name}' for name in ARGUMENTS if name)}; got :{arg}")
    from tvjax.data import glyphs

    group = lambda **fields: ConfigDict(fields)
    local, quick = arg == "runlocal", arg == "quick"
    tasks = glyphs.suite(8)[:2 if local else 4 if quick else 8]
    tuned = {} if local else dict(steps=50, batch=32, warmup=5, lr=1e-3) if quick else dict(
        steps=100, batch=32, warmup=10, lr=6e-4)
    return ConfigDict(dict(
        job="tangent",
        name=f"tangent-{arg or 8}",
        model="glyphs",
        suite="glyphs",
        tasks=tasks,
        counts=(len(tasks),),
        seeds=(0,) if local else (0, 1, 2),
        examples=dict(train=16, val=16, test=16) if local else dict(
            glyphs.EXAMPLES, val=60 if quick else 100, test=150 if quick else 250),
        finetune=dict(steps=2, batch=8, lr=2e-4, warmup=1, weight_decay=0.1) if local else glyphs.RECIPE,
        finetuned=(),
        vectors="",                   # the folder of another run with the same model, data and recipe
        merges=(group(name="average"),),  # the job's own merges are `fusions`
        scales=(0.0, 0.5, 1.0) if local else tuple(i / 20 for i in range(21)),
        select_on="val",
        batch=16 if local else 60 if quick else 125,
        save_models=False,
        allow_nonfinite=False,
        mesh=dict(data=1, model=1, rules=()),
        tangent=group(
            ways=(
                group(name="standard", kind="standard"),
                group(name="linearised", kind="tangent", remat="none", finetune=group(**tuned)),
            ),
            fusions=("average", "task_arithmetic"),
            sizes=(2,) if local else (2, 3, 4) if quick else (2, 4, 8),
            most=0 if local or quick else 2,   # at most so many subsets of a size; 0: all
            greedy=(0.0, 1.0),
            ties=group(densities=(1.0,), scales=(1.0,)),
            lorahub=group(budget=40, bound=1.5, penalty=0.05),
            plane=group(span=3, points=3 if local else 7 if quick else 9, examples=16 if local else 125, pairs=1),
            scatter=True,
            negation=True,
            scaling=group(),
        ),
    ))
