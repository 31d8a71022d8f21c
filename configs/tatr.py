"""Task arithmetic in a trust region (TATR, arXiv:2501.15065) on the glyph benchmark: merges, ablations, three seeds.

    python -m tvjax.run --config=configs/tatr.py:8
    python -m tvjax.run --config=configs/tatr.py:8 --config.vectors=runs/glyphs-8   # its task vectors, if it ran
    python -m tvjax.run --config=configs/tatr.py:minilm     # sentences under MiniLM, as configs/minilm.py:quick
    python -m tvjax.run --config=configs/tatr.py:vision     # real digits, as configs/vision.py
    python -m tvjax.run --config=configs/tatr.py:runlocal

Protocol: gradients of the pretrained model on 16 labelled training exemplars a task (mean of |∇ℓ| over examples), Ω's
quantile 0.99 over the whole model, one mask for all tasks; α on validation data for every row. Ablations: entropy in
place of labels, |mean ∇ℓ|, a region for each pair of tasks, removal by magnitude, scaling by sign, quantiles, numbers
of exemplars over five draws, knowledge conflicts. Fisher merging, RegMean and RegMean++ are there with 64 unlabelled
inputs a task.

The paper's own settings: CLIP ViT-B/32, B/16, L/14 with the checkpoints of task arithmetic, 8 tasks (Cars, DTD,
EuroSAT, GTSRB, MNIST, RESISC45, SUN397, SVHN), λ = 0.3; it reports +3.7 points for task arithmetic on B/32
and +0.8 on L/14.
"""
from ml_collections import ConfigDict

ARGUMENTS = ("", "8", "minilm", "vision", "runlocal")


def get_config(arg=""):
    if arg not in ARGUMENTS:
        raise ValueError(f"tatr takes {', '.join(f':{name}' for name in ARGUMENTS if name)}; got :{arg}")
    local, group = arg == "runlocal", lambda **fields: ConfigDict(fields)
    about = {"minilm": minilm, "vision": vision}.get(arg, glyph_tasks)(local)
    four = arg in ("minilm", "vision")  # four tasks, whose best α are larger
    wide = (0.0, 0.5, 1.0) if local else (0.6, 0.8, 1.0, 1.2, 1.4)
    return ConfigDict(dict(
        job="tatr",
        name=f"tatr-{arg or 8}",
        **about,
        counts=(len(about["tasks"]),),
        seeds=(0,) if local else (0, 1, 2),
        finetuned=(),
        vectors="",                   # the folder of another run with the same model, data and recipe
        merges=(group(name="average"),),  # the job's own merges are `bases`
        scales=(0.0, 0.5, 1.0) if local else tuple(i / 10 for i in range(2, 13)) if four else
        (0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6),
        select_on="val",
        save_models=False,
        allow_nonfinite=False,
        mesh=dict(data=1, model=1, rules=()),
        tatr=group(
            bases=(                   # what comes behind the region; the first one is that of the conflicts
                group(name="task_arithmetic"),
                group(name="ties", density=0.2, scales=wide),
                group(name="consensus", k=2, lam=0.4),
                group(name="tsv_m", scales=wide),
            ),
            loss="cross_entropy",     # or "entropy", which needs no labels
            reduce="mean_abs",        # mean of |∇|; "abs_mean" is |mean of ∇|
            split="train",            # where exemplars come from
            exemplars=4 if local else 16,
            quantile=0.99,
            few=(0.2, 0.4) if local else (0.3, 0.5, 0.7, 0.9) if four else (0.2, 0.3, 0.4),
            sources=(("entropy", "mean_abs"),) if local else (
                ("cross_entropy", "abs_mean"), ("entropy", "mean_abs"), ("entropy", "abs_mean")),
            pairs=(0.99,),
            removals=(0.01,) if local else (0.01, 0.02, 0.05),
            multipliers=(0.5,) if local else (0.5, 1.0, 2.0),
            quantiles=(0.9,) if local else (0.8, 0.95, 0.99, 0.999),
            counts=(2,) if local else (1, 4, 16),
            draws=2 if local else 5,
            conflicts=("base", "region"),
            statistics=group(**{"fisher": 8, "regmean": 8, "regmean++": 8} if local else
                             {"fisher": 64, "regmean": 64, "regmean++": 64}),
        ),
    ))


def glyph_tasks(local):
    """The glyph benchmark, with fewer images to judge on than configs/glyphs.py has."""
    from tvjax.data import glyphs

    return dict(
        model="glyphs", suite="glyphs", tasks=glyphs.suite(20)[:3 if local else 8],
        examples=dict(train=64, val=40, test=40) if local else dict(glyphs.EXAMPLES, val=100, test=400),
        finetune=dict(steps=4, batch=8, lr=2e-4, warmup=1, weight_decay=0.1) if local else glyphs.RECIPE,
        batch=40 if local else 250)


def minilm(local):
    """What configs/minilm.py:quick fine-tunes, so that its task vectors can be taken over."""
    return dict(
        model="minilm", suite="text", sources=("../shared/data/text_*.json.gz",), control="banking77",
        data=ConfigDict(dict(tokens=24, truncate=True)), tasks=("trec", "subj", "cr", "emotion"),
        examples=dict(train=960, val=64, test=150),
        finetune=dict(steps=60, batch=16, lr=1e-4, warmup=6, weight_decay=0.1), batch=64)


def vision(local):
    """What configs/vision.py fine-tunes."""
    return dict(
        model="glyphs", suite="arrays", sources=("../shared/data/vision_real.npz",), control="omniglot",
        data=ConfigDict(dict(heads="prototypes", shots=5, scale=20.0)), tasks=("mnist", "usps", "kannada", "sign"),
        examples=dict(train=4000, val=150, test=400),
        finetune=dict(steps=120, batch=32, lr=3e-4, warmup=12, weight_decay=0.1), batch=50)
