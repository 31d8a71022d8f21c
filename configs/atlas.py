"""aTLAS, learned anisotropic scaling of task vectors (arXiv:2407.02880): one command a study.

    python -m tvjax.run --config=configs/atlas.py:addition --config.vectors=runs/glyphs-8     # 8 tasks, 3 seeds
    python -m tvjax.run --config=configs/atlas.py:negation --config.vectors=runs/glyphs-8
    python -m tvjax.run --config=configs/atlas.py:fewshot --config.vectors=runs/glyphs-20     # pool of 19
    python -m tvjax.run --config=configs/atlas.py:tta --config.vectors=runs/glyphs-20
    python -m tvjax.run --config=configs/atlas.py:peft --config.vectors=runs/glyphs-8
    python -m tvjax.run --config=configs/atlas.py:selection --config.vectors=runs/glyphs-20
    python -m tvjax.run --config=configs/atlas.py:8 --config.vectors=runs/glyphs-8            # four of them, small
    python -m tvjax.run --config=configs/atlas.py:minilm --config.vectors=runs/minilm-quick   # sentences, three of them
    python -m tvjax.run --config=configs/atlas.py:vision --config.vectors=runs/vision-glyphs  # real digits, three
    python -m tvjax.run --config=configs/atlas.py:runlocal                                    # all of them, minutes

Without `vectors` the task vectors are fine-tuned first. Protocol: coefficients from zero; addition learns on the
validation splits and keeps their best epoch; negation ends where the control falls below 95 %; few-shot, adaptation
and selection leave the target's own vector out. Measured numbers: experiments/atlas/README.md.

The paper's own settings, for CLIP ViT-B/32, B/16, L/14 and ResNets with 22 tasks: addition lr 1e-3, weight decay 0.1,
batch 128, 20 epochs of the shortest of 8 validation splits; negation 1e-3 times 2 … 10 by task
(`tvjax.learning.arithmetic.TIMES`); few-shot lr 0.1, cosine, 10 epochs (ResNets 30), batch 128; adaptation lr 1e-3,
10 epochs. The rates below are larger where an epoch of glyphs has fewer steps.
"""
from ml_collections import ConfigDict

PARTS = {
    "addition": ("addition",),
    "negation": ("negation",),
    "fewshot": ("fewshot", "contribution"),
    "tta": ("tta",),
    "peft": ("peft",),
    "selection": ("selection", "basis"),
    "8": ("negation", "fewshot", "selection", "tta"),
    "minilm": ("addition", "negation", "fewshot"),
    "vision": ("addition", "negation", "fewshot"),
    "runlocal": ("addition", "negation", "fewshot", "contribution", "tta", "peft", "selection", "basis"),
}
TASKS = {"fewshot": 20, "tta": 20, "selection": 20, "runlocal": 3}


def group(**fields):
    return ConfigDict(fields)


def get_config(arg="addition"):
    if arg not in PARTS:
        raise ValueError(f"atlas takes {', '.join(f':{name}' for name in PARTS)}; got :{arg}")
    from tvjax.data import glyphs

    local, real = arg == "runlocal", REAL.get(arg)
    many = arg in ("8", "addition", "negation", *REAL)
    tasks = real["tasks"] if real else glyphs.suite(20)[:TASKS.get(arg, 8)]
    found = ConfigDict(dict(
        job="atlas",
        name=f"atlas-{arg}",
        model="glyphs",
        suite="glyphs",
        tasks=tasks,
        counts=(len(tasks),),
        seeds=(0, 1, 2) if many else (0,),  # of the task vectors; elsewhere several draws of shots
        examples=dict(train=400, val=40, test=40) if local else dict(glyphs.EXAMPLES, val=125, test=500),
        finetune=dict(steps=4, batch=8, lr=2e-4, warmup=1, weight_decay=0.1) if local else glyphs.RECIPE,
        finetuned=(),
        vectors="",                   # the folder of another run with the same model, data and recipe
        merges=(group(name="task_arithmetic"),),
        scales=(0.0, 0.5, 1.0),
        select_on="val",
        batch=40 if local else 250,
        save_models=False,
        allow_nonfinite=False,
        mesh=dict(data=1, model=1, rules=()),
        atlas=group(parts=PARTS[arg], store="float32", **studies(local, tasks, small=arg == "8")),
    ))
    return of_real(found, dict(real)) if real else found


def of_real(found, real):
    """Real tasks in place of glyphs: other data, shorter courses, one target of few shots."""
    few = real.pop("fewshot")
    found.update({name: ConfigDict(value) if isinstance(value, dict) else value for name, value in real.items()})
    found.atlas.addition.update(dict(schemes=(group(by="task"), group(by="tensor")), penalties=(), fractions=(1.0,)))
    found.atlas.addition.course.update(dict(batch=64))
    found.atlas.negation.update(dict(targets=real["tasks"]))
    found.atlas.fewshot.update(dict(few, draws=1))
    return found


REAL = {                              # what configs/minilm.py:quick and configs/vision.py fine-tune
    "minilm": dict(
        model="minilm", suite="text", sources=("../shared/data/text_*.json.gz",), control="banking77",
        data=dict(tokens=24, truncate=True), tasks=("trec", "subj", "cr", "emotion"),
        examples=dict(train=960, val=64, test=150), batch=64,
        finetune=dict(steps=60, batch=16, lr=1e-4, warmup=6, weight_decay=0.1),
        fewshot=dict(targets=("trec", "cr"), augment="none", domains=())),
    "vision": dict(
        model="glyphs", suite="arrays", sources=("../shared/data/vision_real.npz",), control="omniglot",
        data=dict(heads="prototypes", shots=5, scale=20.0), tasks=("mnist", "usps", "kannada", "sign"),
        examples=dict(train=4000, val=150, test=400), batch=50,
        finetune=dict(steps=120, batch=32, lr=3e-4, warmup=12, weight_decay=0.1),
        fewshot=dict(targets=("mnist",), augment="crop", domains=("usps",))),
}


def studies(local, tasks, *, small):
    """The fields of every study; a config reads those of its parts. `small`: one target and one draw a seed."""
    pick = lambda full, less, least: least if local else less if small else full
    course = lambda epochs, batch, lr, **more: group(epochs=1 if local else epochs, batch=12 if local else batch, lr=lr,
                                                     **more)
    few = course(10, 32, 0.1, decay="cosine")
    targets = pick(("armenian", "arrows", "cards"), ("braille",), tasks[:1])
    targets = tuple(task for task in targets if task in tasks) or tasks[:1]
    draws = pick(3, 1, 1)
    tuning = dict(steps=4 if local else 200, batch=8 if local else 64, lr=3e-4, warmup=1, weight_decay=0.1)
    grid = (0.0, 0.5, 1.0) if local else tuple(i / 20 for i in range(21))
    shots = (1,) if local else (16,)
    return dict(
        addition=group(
            course=course(15, 128, 1e-2), grid=grid, tuning=group(**tuning),
            schemes=(group(by="task"), group(by="tensor"), group(by="tensor", blocks="weights")),
            penalties=(1,), fractions=(1.0,) if local else (0.2, 1.0),
            geometry=("standard",),   # and "linearised", on vectors fine-tuned in the tangent space by `linear`
            linear=group(**dict(tuning, steps=4 if local else 100, batch=8 if local else 32, lr=6e-4,
                                warmup=1 if local else 10)),
        ),
        negation=group(
            course=course(10, 64, 5e-2), grid=grid, targets=pick(tasks, tasks[:3], tasks),
            schemes=(group(by="tensor"),) if small else (group(by="task"), group(by="tensor")),
        ),
        fewshot=group(
            course=few, joint=few, targets=targets, shots=(1,) if local else (1, 4, 16), draws=draws, augment="crop",
            schemes=(group(by="tensor"),), domains=("plain",),
        ),
        contribution=group(course=course(3, 32, 0.1, decay="cosine"), targets=pick(tasks[:4], targets, targets),
                           shots=shots, augment="crop"),
        tta=group(
            course=course(5, 64, 1e-2, decay="cosine"), targets=targets[:2], draws=draws, augment="crop",
            objectives=pick(("contrast", "entropy", "ufm"), ("entropy", "ufm"), ("contrast", "entropy", "ufm")),
            images=40 if local else 400,
            exponents=pick((0.5, 1.0, 2.0), (0.5,), (0.5,)), share=0.5, margin=0.4,
        ),
        peft=group(
            course=course(10, 64, 3e-2, decay="cosine"), tuning=group(**tuning), lora=group(**{**tuning, "lr": 3e-3}),
            targets=pick(tasks[1:3], targets, targets), ranks=(2,) if local else (4,),
            parts=pick((1, 5, 20, 80), (1, 20), (1, 2)), fractions=pick((0.1, 1.0), (0.1,), (1.0,)), draws=draws,
        ),
        selection=group(
            course=few, targets=targets[:2], shots=shots, draws=draws, augment="crop",
            budgets=pick((1, 2, 5), (1,), (1,)),
            methods=("random", "features", "whole gradient", "block gradient"),
        ),
        basis=group(course=few, targets=targets[:1], shots=shots, draws=draws, counts=pick((2, 8, 19), (2, 7), (1,)),
                    augment="crop", questions=pick(200, 0, 2)),
    )
