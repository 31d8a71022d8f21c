"""Task-localised sparse fine-tuning (TaLoS, arXiv:2504.02620) on the glyph benchmark, beside LoTA and ablations.

    python -m tvjax.run --config=configs/talos.py:8          # three seeds: addition, negation, masks, analyses
    python -m tvjax.run --config=configs/talos.py:4          # the same on four tasks, under two merges
    python -m tvjax.run --config=configs/talos.py:ablations  # other masks, other tensors; 4 tasks, one seed
    python -m tvjax.run --config=configs/talos.py:sparsity   # 10 … 99 %, chosen by negation; 4 tasks, one seed
    python -m tvjax.run --config=configs/talos.py:minilm     # sentences under MiniLM, as configs/minilm.py:quick
    python -m tvjax.run --config=configs/talos.py:vision     # digits nobody made for us, as configs/vision.py
    python -m tvjax.run --config=configs/talos.py:t5         # T5 on seven tasks, RTE as control; needs the hub
    python -m tvjax.run --config=configs/talos.py:8 --config.vectors=runs/glyphs-8   # standard task vectors, if it ran
    python -m tvjax.run --config=configs/talos.py:runlocal

The tenth of the weights that the output feels least moves little at the rate of standard fine-tuning: let every way
but that choose its own on validation data by --config.talos.rates='(1e-3,3e-3,1e-2)'.

Protocol: masks of the tenth of the weights to which the logits are least sensitive, on 4 rounds of validation inputs;
masked AdamW under the recipe of standard fine-tuning; addition with α on validation data; negation with α such that
validation accuracy on the control task stays at 95 % of the zero-shot one or above. Splits of 125 validation and 500
test images, so that it takes two cores half an hour.

Expected (:vision, three seeds, measured; test accuracy %): one task 94.2 fully tuned, 74.5 by TaLoS, 90.4 by LoTA; task
arithmetic 87.5 / 74.4 / 85.8, normalised 92.8 / 99.7 / 94.9; negated to 61.6 / 71.4 / 54.9 from 72.5. More in
experiments/talos/README.md, with :4, :minilm and :sparsity; :8, :ablations and :t5 were not run at size.

The paper's own settings, for machines with its checkpoints: CLIP ViT-B/32, B/16 and L/14 on Cars, DTD, EuroSAT, GTSRB,
MNIST, RESISC45, SUN397, SVHN (AdamW, lr 1e-5, weight decay 0.1, batch 128, about 2000 steps); T5-small, -base and
-large on QASC, WikiQA, QuaRTz, PAWS, StoryCloze, Winogrande, WSC (lr 1e-4, no decay, batch 1024, 75,000 steps).
"""
import pathlib
import runpy

from ml_collections import ConfigDict

ARGUMENTS = ("8", "4", "ablations", "sparsity", "minilm", "vision", "t5", "runlocal")
SUITES = {"minilm": ("minilm.py", "quick"), "vision": ("vision.py", ""),
          "t5": ("language.py", "t5,7")}  # whose model, data and recipe are taken


def get_config(arg="8"):
    if arg not in ARGUMENTS:
        raise ValueError(f"talos takes {', '.join(f':{name}' for name in ARGUMENTS)}; got :{arg}")
    from tvjax.data import glyphs

    local, main = arg == "runlocal", arg not in ("ablations", "sparsity", "runlocal")
    group = lambda **fields: ConfigDict(fields)
    methods = {
        "ablations": (
            group(name="full"),
            group(name="talos"),
            group(name="talos", label="talos official", preset="official"),
            group(name="lota"),
            group(name="lota", label="lota, vision code", off=0.1),
            group(name="random"),
            group(name="magnitude"),
            group(name="small_magnitude"),
            group(name="top_sensitivity"),
            group(name="attention"),
            group(name="bitfit"),
            group(name="ia3", lr=0.1),
            group(name="lora", lr=1e-3),
        ),
        "sparsity": (group(name="full"), group(name="talos")),
        "runlocal": (group(name="full"), group(name="talos"), group(name="lota", steps=2)),
    }.get(arg, (group(name="full"), group(name="talos"), group(name="lota")))
    sparsities = {"sparsity": (0.1, 0.5, 0.7, 0.9, 0.95, 0.99), "runlocal": (0.5,)}.get(arg, ())
    studies = {"ablations": ("pruning", "masks", "cost"), "sparsity": ()}.get(
        arg, ("pruning", "noise", "masks", "localisation", "linear", "cost"))
    tenths = (0.0, 0.5, 1.0) if local else tuple(i / 10 for i in range(11))
    count = {"8": 8, "runlocal": 2}.get(arg, 4)
    config = ConfigDict(dict(
        job="talos",
        name=f"talos-{arg}",
        model="glyphs",
        suite="glyphs",
        tasks=glyphs.suite(20)[:count],
        counts=(count,),
        seeds=(0, 1, 2) if main else (0,),
        examples=dict(train=64, val=40, test=40) if local else dict(glyphs.EXAMPLES, val=125, test=500),
        finetune=dict(steps=4, batch=8, lr=2e-4, warmup=1, weight_decay=0.1) if local else glyphs.RECIPE,
        finetuned=(),
        vectors="",                   # the folder of another run with the same model, data and recipe
        merges=(
            group(name="task_arithmetic"),
            group(name="ties", density=0.2),
            *((group(name="consensus", lam="val", k=2),) if arg == "8" else ()),
        ) if main else (group(name="task_arithmetic"),),
        scales=tenths,
        select_on="val",
        batch=40 if local else 125,
        save_models=False,
        allow_nonfinite=False,
        mesh=dict(data=1, model=1, rules=()),
        talos=group(
            methods=methods,          # sparsity=0.9 unless another is given
            rates=(),                 # learning rates from which all but full choose on validation data; or finetune.lr
            negation=group(scales=tenths[::1 if local else 2], threshold=0.95),
            sweep=group(sparsities=sparsities, seeds=(0,)),
            adamerging=group(methods=("full", "talos") if arg in ("8", "runlocal") else (), seeds=(0,), by="tensor",
                             steps=1 if local else 50, batch=8 if local else 16),
            studies=group(names=studies, seeds=(0,), budget=1 << 28),  # bytes of per-example gradients held at once
        ),
    ))
    return on_suite(config, *SUITES[arg]) if arg in SUITES else config


def on_suite(config, file, arg):
    """The study with the model, tasks, data and recipe of another config."""
    theirs = runpy.run_path(str(pathlib.Path(__file__).with_name(file)))["get_config"](arg)
    for name in ("model", "suite", "sources", "tasks", "control", "counts", "seeds", "examples", "finetune", "batch",
                 "data"):
        if name in theirs:
            config[name] = theirs[name]
    return config
