"""The glyph benchmark by the full protocol: 8, 14 or 20 tasks, three seeds, the six methods of 2022–2025.

    python -m tvjax.run --config=configs/glyphs.py:8
    python -m tvjax.run --config=configs/glyphs.py:14
    python -m tvjax.run --config=configs/glyphs.py:20     # merges of the first 8 and 14 tasks too: interference grows
    python -m tvjax.run --config=configs/glyphs.py:runlocal

Protocol: task addition as in arXiv:2212.04089 and arXiv:2305.12827 (α = 0, 0.05, …, 1, chosen on validation data);
suites of 8, 14 and 20 tasks and the λ of Consensus as in arXiv:2405.07813.

Expected (seed 0, measured; test accuracy %, 8 / 14 / 20 tasks): zero-shot 55.7 / 52.8 / 51.6, average 66.2 / 58.6 /
55.8, task arithmetic 72.5 / 62.0 / 58.0, TIES 67.6 / 59.8 / 57.2, Consensus 72.3 / 63.0 / 59.1, TSV-M 76.4 / 67.6 /
62.4, Iso-C 76.0 / 66.2 / 61.8, fine-tuned 92.3 / 89.5 / 89.7. A task takes 12 to 30 s of fine-tuning on two cores.
"""
from ml_collections import ConfigDict

COUNTS = {"": (8,), "8": (8,), "14": (8, 14), "20": (8, 14, 20), "runlocal": (2, 3)}


def get_config(arg=""):
    if arg not in COUNTS:
        raise ValueError(f"glyphs takes {', '.join(f':{name}' for name in COUNTS if name)}; got :{arg}")
    from tvjax.data import glyphs

    local = arg == "runlocal"
    counts = COUNTS[arg]
    wide = (0.0, 0.5, 1.0) if local else tuple(i / 10 for i in range(31))  # where the natural scale is 1 or more
    return ConfigDict(dict(
        name=f"glyphs-{arg or 8}",
        model="glyphs",
        suite="glyphs",
        tasks=glyphs.suite(20)[:max(counts)],
        counts=counts,
        seeds=(0,) if local else (0, 1, 2),
        examples=dict(train=64, val=100, test=100) if local else glyphs.EXAMPLES,
        finetune=dict(steps=4, batch=8, lr=2e-4, warmup=1, weight_decay=0.1) if local else glyphs.RECIPE,
        finetuned=(),
        merges=(
            ConfigDict(dict(name="average")),
            ConfigDict(dict(name="task_arithmetic")),
            ConfigDict(dict(name="ties", density=0.2, scales=wide)),
            ConfigDict(dict(name="consensus", lam="val", k=2)),
            ConfigDict(dict(name="tsv_m", scales=wide)),
            ConfigDict(dict(name="iso_c", scales=wide)),
        ),
        scales=(0.0, 0.5, 1.0) if local else tuple(i / 20 for i in range(21)),
        select_on="val",
        batch=100 if local else 250,
        save_models=True,
        allow_nonfinite=False,
        mesh=dict(data=1, model=1, rules=()),
    ))
