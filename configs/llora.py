"""Partial linearisation (L-LoRA, arXiv:2310.04742) on the glyph benchmark or on sentences: three seeds.

    python -m tvjax.run --config=configs/llora.py:8
    python -m tvjax.run --config=configs/llora.py:8 --config.vectors=runs/glyphs-8   # full fine-tuning, if it ran
    python -m tvjax.run --config=configs/llora.py:text       # MiniLM on sentences, as configs/minilm.py:quick
    python -m tvjax.run --config=configs/llora.py:protocol                           # all subsets, 21 λ: hours
    python -m tvjax.run --config=configs/llora.py:quick                              # four tasks, few examples
    python -m tvjax.run --config=configs/llora.py:clip                               # CLIP ViT-B/16, needs the hub
    python -m tvjax.run --config=configs/llora.py:flan_t5                            # Flan-T5-base, needs the hub
    python -m tvjax.run --config=configs/llora.py:runlocal

Ways: full fine-tuning, LoRA, L-LoRA by module (the authors' code, the default) and by network (the paper's equation),
all tasks of a seed from one φ0. Fusions of subsets of tasks: simple average, task arithmetic, TIES, LoRAHub, greedy,
each chosen for every subset on validation data; `select_on="test"` mimics the authors' code, and the report says so.
`:8` draws a few subsets of each size and takes coarser grids than `:protocol`, which is the paper's. Measured numbers:
experiments/llora/README.md.

`:clip` and `:flan_t5` are the paper's own settings, for machines with its models and data, or with folders of them
(`:flan_t5,FOLDER`, as in configs/language.py); they were not run at size. CLIP ViT-B/16: rank 16, alpha 32, dropout
0.1, targets q_proj and v_proj (the released configuration misspells the latter, so that it adapts q_proj alone:
targets=r"q_proj"), AdamW, lr 1e-5, weight decay 0.1, 6000 steps of 64 images, 600 of warm-up, on Cars,
DTD, EuroSAT, GTSRB, RESISC45, SUN397, SVHN. Flan-T5-base: rank 8, 16 or 32, alpha 32, Adam, lr 1e-5 … 4e-5, no weight
decay, 2000 steps of 16, on CoLA, MNLI, MRPC, QQP, RTE, SST-2, STS-B as text to text. Its claims there, normalised
score of simple averages of 2 … 7 ViT-B/16: LoRA 75.8 … 57.4 %, L-LoRA 82.2 … 66.1 %.
"""
from ml_collections import ConfigDict

ARGUMENTS = ("", "8", "protocol", "quick", "text", "clip", "flan_t5", "runlocal")
SOURCES = ("../shared/data/text_*.json.gz",)
TEXTS = ("trec", "subj", "cr", "emotion")
FUSIONS = ("average", "task_arithmetic", "ties", "lorahub", "greedy")
EXAMPLES = {
    "": dict(train=2400, val=100, test=250),
    "protocol": dict(train=2400, val=250, test=1000),
    "quick": dict(train=2400, val=60, test=150),
    "text": dict(train=960, val=64, test=150),
    "runlocal": dict(train=16, val=16, test=16),
}
TUNED = {                             # what adapters' recipes change of full fine-tuning's
    "": dict(steps=100, batch=32, warmup=10, lr=3e-3),
    "quick": dict(steps=50, batch=32, warmup=5, lr=3e-3),
    "text": dict(steps=100, batch=16, warmup=10, lr=1e-3),
    "runlocal": {},
}


def group(**fields):
    return ConfigDict(fields)


def ways(local, tuned, *, quick=False):
    """Rows of `ways`; adapters take a larger learning rate than full fine-tuning."""
    lora = dict(rank=2 if local else 16, alpha=4 if local else 32, dropout=0.1)
    return (
        group(name="full", kind="standard"),
        group(name="LoRA", kind="lora", options=group(**lora), finetune=group(**tuned)),
        group(name="L-LoRA", kind="lora", scope="module", options=group(**lora), finetune=group(**tuned)),
    ) + (() if local or quick else (
        group(name="L-LoRA (network)", kind="lora", scope="network", options=group(**lora), finetune=group(**tuned)),))


def get_config(arg=""):
    arg, _, root = arg.partition(",")
    if arg not in ARGUMENTS or root and arg not in HUB:
        raise ValueError(f"llora takes {', '.join(f':{name}' for name in ARGUMENTS if name)}; got :{arg}")
    from tvjax.data import glyphs

    local, whole, text, quick = (arg == name for name in ("runlocal", "protocol", "text", "quick"))
    tasks = TEXTS if text else glyphs.suite(8)[:2 if local else 4 if quick else 8]
    few = tuple(i / 20 for i in range(21)) if whole else (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
    sizes = (2,) if local else (2, 3, 4) if text or quick else tuple(range(2, 9)) if whole else (2, 4, 8)
    kind = arg if arg in EXAMPLES else ""
    recipe = dict(steps=60, batch=16, lr=1e-4, warmup=6, weight_decay=0.1) if text else glyphs.RECIPE
    whole = whole or arg in HUB
    found = ConfigDict(dict(
        job="llora",
        name=f"llora-{arg or 8}",
        model="minilm" if text else "glyphs",
        suite="text" if text else "glyphs",
        **(dict(sources=SOURCES, control="banking77", data=group(tokens=24)) if text else {}),
        tasks=tasks,
        counts=(len(tasks),),
        seeds=(0,) if local else (0, 1, 2),
        examples=EXAMPLES[kind],
        finetune=dict(steps=2, batch=8, lr=2e-4, warmup=1, weight_decay=0.1) if local else recipe,
        finetuned=(),
        vectors="",                   # the folder of another run with the same model, data and recipe
        merges=(group(name="average"),),  # the job's own merges are `fusions`
        scales=(0.0, 0.5, 1.0) if local else few,  # λ of task arithmetic
        select_on="val",              # "test" mimics the authors' code; the report warns
        batch=16 if local else 64 if text else 60 if quick else 125,
        save_models=False,
        allow_nonfinite=False,
        mesh=dict(data=1, model=1, rules=()),
        llora=group(
            ways=ways(local, TUNED.get(kind, TUNED[""]), quick=quick),
            fusions=FUSIONS[:2] if quick else FUSIONS if whole or local else FUSIONS[:4],
            sizes=sizes,              # numbers of tasks of the subsets
            most=0 if whole or quick else 2,   # at most so many subsets of a size; 0: all
            greedy=(0.0, 0.5, 1.0) if local else (0.0, 0.25, 0.5, 0.75, 1.0),
            ties=group(densities=(0.5, 1.0), scales=(0.5, 1.0)) if not whole else
            group(densities=(0.25, 0.5, 0.75, 1.0), scales=(0.0, 0.25, 0.5, 0.75, 1.0)),
            lorahub=group(budget=3 if local else 40 if whole else 20, bound=1.5, penalty=0.05),
            plane=group(span=2, points=3 if local else 21 if whole else 9, examples=16 if local else 125,
                        pairs=1 if local else 3 if whole else 0 if quick else 1),
            scatter=False,
            negation=False,
            scaling=group(ranks=(1, 2), tasks=2, seeds=(0,)) if local else group() if text or quick else
            group(ranks=(1, 4, 16), tasks=4, seeds=(0,)),
        ),
    ))
    return of_hub(found, HUB[arg], root) if arg in HUB else found


def of_hub(found, theirs, root):
    """The protocol with the paper's models, tasks and recipes; `root` holds them, if not the hub."""
    import os

    place = lambda name: os.path.join(root, name) if root else name
    tuned = group(**theirs["tuned"])
    lora = group(**theirs["lora"])
    full, *adapted = found.llora.ways
    for way in adapted:
        way.update(dict(options=lora, finetune=tuned))
    found.update(dict(model=place(theirs["model"]), suite=theirs["suite"], tasks=theirs["tasks"],
                      counts=(len(theirs["tasks"]),), sources=(place("data"),) if root else (), batch=theirs["batch"],
                      examples=group(**theirs["examples"]), finetune=group(**theirs["full"])))
    found.data = group(**theirs["data"])
    found.llora.update(dict(ways=(full, *adapted), sizes=tuple(range(2, len(theirs["tasks"]) + 1)), scaling=group()))
    return found


_CLIP = dict(steps=6000, batch=64, warmup=600, lr=1e-5, weight_decay=0.1)
_T5 = dict(steps=2000, batch=16, warmup=0, weight_decay=0.0)
HUB = {                               # of the paper
    "clip": dict(
        model="openai/clip-vit-base-patch16", suite="vision", data={}, batch=128,
        tasks=("cars", "dtd", "eurosat", "gtsrb", "resisc45", "sun397", "svhn"),
        examples=dict(train=100_000, val=5000, test=100_000), full=_CLIP, tuned=_CLIP,
        lora=dict(rank=16, alpha=32, dropout=0.1)),
    "flan_t5": dict(
        model="google/flan-t5-base", suite="questions", data=dict(tokens=128, answers=16, prompts="v0"), batch=64,
        tasks=("glue-cola", "glue-mnli", "glue-mrpc", "glue-qqp", "glue-rte", "glue-sst2", "glue-stsb"),
        examples=dict(train=50_000, val=2000, test=10_000), full=dict(_T5, lr=2e-5), tuned=dict(_T5, lr=4e-5),
        lora=dict(rank=16, alpha=32, dropout=0.1)),
}
