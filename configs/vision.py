"""Real digits nobody made for us: MNIST, USPS, Kannada and sign language, with omniglot's characters as control.

    python -m tvjax.run --config=configs/vision.py              # the embedded CLIP
    python experiments/vision/pretrain.py ../shared/data/vision_real.npz runs/encoders    # once, for the next two
    python -m tvjax.run --config=configs/vision.py:omniglot     # an encoder pretrained on omniglot's characters
    python -m tvjax.run --config=configs/vision.py:random       # the same encoder left random: the honest control
    python -m tvjax.run --config=configs/vision.py:runlocal

Heads are frozen prototypes of five training images a class, made by the pretrained encoder. Data: any `.npz` with
arrays {task}_{train,test}_{x,y}; name yours by --config.sources='("file.npz",)'. Beside every merge stands the linear
probe of the pretrained features on the same training images.

Expected (measured, three seeds; average test accuracy %, glyph CLIP / omniglot / random): zero-shot 72.5 / 31.1 / 26.0,
linear probe 91.5 / 56.7 / 39.6, average 82.0 / 36.3 / 22.7, task arithmetic 87.5 / 36.1 / 26.0, TIES 87.9 / 36.3 /
23.0, TSV-M 90.5 / 42.7 / 23.9, Iso-C 89.5 / 39.6 / 25.2, fine-tuned 94.2 / 62.7 / 32.5; two to five minutes each on
two shared cores. What they say: experiments/vision/README.md.
"""
from ml_collections import ConfigDict

SOURCES = ("../shared/data/vision_real.npz",)
MODELS = {"": "glyphs", "omniglot": "runs/encoders/omniglot", "random": "runs/encoders/random", "runlocal": "glyphs"}


def get_config(arg=""):
    if arg not in MODELS:
        raise ValueError(f"vision takes no argument, {', '.join(f':{name}' for name in MODELS if name)}; got :{arg}")
    group = lambda **fields: ConfigDict(fields)
    local = arg == "runlocal"
    wide = (0.5, 1.0) if local else tuple(i / 5 for i in range(1, 13))
    return ConfigDict(dict(
        job="benchmark",
        name=f"vision-{arg or 'glyphs'}",
        model=MODELS[arg],            # or a folder of another CLIP or CLIP vision tower
        suite="arrays",
        sources=SOURCES,
        tasks=("mnist", "usps") if local else ("mnist", "usps", "kannada", "sign"),
        control="omniglot",
        counts=(2,) if local else (4,),
        seeds=(0,) if local else (0, 1, 2),
        examples=dict(train=4000, val=20, test=40) if local else dict(train=4000, val=150, test=400),
        finetune=dict(steps=2, batch=8, lr=3e-4, warmup=1, weight_decay=0.1) if local else
        dict(steps=120, batch=32, lr=3e-4, warmup=12, weight_decay=0.1),
        finetuned=(),
        vectors="",
        merges=(
            group(name="average"),
            group(name="task_arithmetic"),
            group(name="ties", density=0.2, scales=wide),
            group(name="tsv_m", scales=wide),
            group(name="iso_c", scales=wide),
        ),
        scales=(0.0, 0.5, 1.0) if local else tuple(i / 10 for i in range(11)),
        select_on="val",
        batch=50,
        save_models=False,
        allow_nonfinite=False,
        mesh=dict(data=1, model=1, rules=()),
        data=group(heads="prototypes", shots=5, scale=20.0),
        benchmark=group(
            negation=(0.5, 1.0) if local else tuple(i / 5 for i in range(1, 8)),
            threshold=0.95,
            probe=100 if local else 1200,
            expected=group(),
        ),
    ))
