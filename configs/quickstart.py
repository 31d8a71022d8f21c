"""Four glyph tasks from end to end: fine-tune, merge in six ways, judge. A few minutes on two cores.

    python -m tvjax.run --config=configs/quickstart.py
    python -m tvjax.run --config=configs/quickstart.py:runlocal    # seconds; to see whether everything works

What it shows: the protocol of task addition (arXiv:2212.04089) with the methods of 2022–2025 on the embedded benchmark.
Expected (measured; test accuracy %, four tasks): zero-shot 55.5, average 68.8, task arithmetic 75.7, TIES 73.4,
Consensus 74.9, TSV-M 77.4, Iso-C 77.8, fine-tuned 89.1; 162 s and 1.45 GiB on two cores.

Change any number on the command line: --config.finetune.steps=300, '--config.merges[2].density=0.1',
'--config.tasks=("greek", "lao")'.
"""
from ml_collections import ConfigDict


def get_config(arg=""):
    if arg not in ("", "runlocal"):
        raise ValueError(f"quickstart takes no argument or :runlocal; got :{arg}")
    config = ConfigDict(dict(
        name="quickstart",
        model="glyphs",               # the CLIP that ships with the package, or a Hugging Face directory
        suite="glyphs",
        tasks=("greek", "braille", "armenian", "digits"),
        counts=(2, 4),                # merge the first 2 and all 4 task vectors
        seeds=(0,),                   # of fine-tuning
        examples=dict(train=2400, val=250, test=1000),
        finetune=dict(steps=120, batch=64, lr=3e-4, warmup=12, weight_decay=0.1),
        finetuned=(),                 # models that need no fine-tuning: ("greek=path/to/directory",)
        merges=(
            ConfigDict(dict(name="average")),
            ConfigDict(dict(name="task_arithmetic")),
            ConfigDict(dict(name="ties", density=0.2, scales=tuple(i / 10 for i in range(21)))),
            ConfigDict(dict(name="consensus", lam="val", k=2)),
            ConfigDict(dict(name="tsv_m", scales=tuple(i / 10 for i in range(21)))),
            ConfigDict(dict(name="iso_c", scales=tuple(i / 10 for i in range(21)))),
        ),
        scales=tuple(i / 20 for i in range(21)),  # the grid of α where a merge has none of its own
        select_on="val",              # "test" mimics papers that did so, and the report says it
        batch=250,                    # of evaluation
        save_models=True,
        allow_nonfinite=False,
        mesh=dict(data=1, model=1, rules=()),  # devices: batches cut in so many, tensors in so many
    ))
    if arg == "runlocal":
        config.name = "quickstart-runlocal"
        config.tasks, config.counts = ("greek", "digits"), (2,)
        config.examples.update(train=64, val=100, test=100)
        config.finetune.update(steps=4, batch=8, warmup=1)
        config.scales = (0.0, 0.5, 1.0)
        config.batch = 100
        for merge in config.merges:
            if "scales" in merge:
                merge.scales = (0.5, 1.0)
    return config
