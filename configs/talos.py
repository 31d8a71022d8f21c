"""Task-localised sparse fine-tuning (TaLoS, arXiv:2504.02620) on the glyph benchmark, beside LoTA and ablations.

    python -m tvjax.run --config=configs/talos.py:8
    python -m tvjax.run --config=configs/talos.py:8 --config.vectors=runs/glyphs-8   # standard task vectors, if it ran
    python -m tvjax.run --config=configs/talos.py:runlocal

Protocol: masks of the tenth of the weights to which the logits are least sensitive, on 4 rounds of validation inputs;
masked AdamW under the recipe of standard fine-tuning; addition with α on validation data; negation with α such that
validation accuracy on the control task stays at 95 % of the zero-shot one or above; sparsity 10 … 99 %, chosen by
negation. Over three seeds: standard fine-tuning, TaLoS, LoTA; over one: the ablations, BitFit, the analyses.

The paper's own settings, for machines with its checkpoints: CLIP ViT-B/32, B/16 and L/14 on Cars, DTD, EuroSAT, GTSRB,
MNIST, RESISC45, SUN397, SVHN (AdamW, lr 1e-5, weight decay 0.1, batch 128, about 2000 steps); T5-small, -base and
-large on QASC, WikiQA, QuaRTz, PAWS, StoryCloze, Winogrande, WSC (lr 1e-4, no decay, batch 1024, 75,000 steps).
"""
from ml_collections import ConfigDict

COUNTS = {"": 8, "8": 8, "runlocal": 2}


def get_config(arg=""):
    if arg not in COUNTS:
        raise ValueError(f"talos takes {', '.join(f':{name}' for name in COUNTS if name)}; got :{arg}")
    from tvjax.data import glyphs

    local, count = arg == "runlocal", COUNTS[arg]
    group = lambda **fields: ConfigDict(fields)
    main = (
        group(name="full"),
        group(name="talos", sparsity=0.9),
        group(name="lota", sparsity=0.9, steps=2 if local else 40),
    )
    one = dict(seeds=(0,))
    others = (
        group(name="talos", label="talos official", preset="official", **one),
        group(name="random", **one),
        group(name="magnitude", **one),
        group(name="top_sensitivity", **one),
        group(name="attention", **one),
        group(name="bitfit", **one),
    )
    return ConfigDict(dict(
        job="talos",
        name=f"talos-{arg or 8}",
        model="glyphs",
        suite="glyphs",
        tasks=glyphs.suite(20)[:count],
        counts=(count,),
        seeds=(0,) if local else (0, 1, 2),
        examples=dict(train=64, val=40, test=40) if local else glyphs.EXAMPLES,
        finetune=dict(steps=4, batch=8, lr=2e-4, warmup=1, weight_decay=0.1) if local else glyphs.RECIPE,
        finetuned=(),
        vectors="",                   # the folder of another run with the same model, data and recipe
        merges=(
            group(name="task_arithmetic"),
            group(name="ties", density=0.2),
            group(name="consensus", lam="val", k=2),
        ),
        scales=(0.0, 0.5, 1.0) if local else tuple(i / 10 for i in range(11)),
        select_on="val",
        batch=40 if local else 250,
        save_models=False,
        allow_nonfinite=False,
        talos=group(
            methods=main if local else main + others,
            negation=group(scales=(0.0, 0.5, 1.0) if local else tuple(i / 10 for i in range(11)), threshold=0.95),
            sweep=group(sparsities=(0.5,) if local else (0.1, 0.5, 0.7, 0.9, 0.95, 0.99), seeds=(0,)),
            adamerging=group(methods=("talos", "full"), seeds=(0,), steps=1 if local else 100, by="tensor",
                             batch=8 if local else 16),
            studies=group(names=("pruning", "noise", "masks", "localisation", "linear", "cost"), seeds=(0,),
                          budget=1 << 28),  # bytes of per-example gradients held at once
        ),
    ))
