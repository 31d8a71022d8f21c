"""TALL-masks and Consensus (arXiv:2405.07813) on the glyph benchmark: localise, compress, merge again; three seeds.

    python -m tvjax.run --config=configs/tall.py:8
    python -m tvjax.run --config=configs/tall.py:20 --config.vectors=runs/glyphs-20   # its task vectors, if it ran
    python -m tvjax.run --config=configs/tall.py:minilm       # sentences under MiniLM; data as in configs/minilm.py
    python -m tvjax.run --config=configs/tall.py:vision       # real digits; data as in configs/vision.py
    python -m tvjax.run --config=configs/tall.py:ia3          # task vectors of (IA)³'s factors, which begin at 1
    python -m tvjax.run --config=configs/tall.py:clip8        # published CLIPs: clip8, clip14, clip20; needs the hub
    python -m tvjax.run --config=configs/tall.py:t5_7         # T5 on language tasks: t5_7, t5_8, t5_11; needs the hub
    python -m tvjax.run --config=configs/tall.py:t5_7_ia3     # the same with (IA)³'s factors
    python -m tvjax.run --config=configs/tall.py:runlocal

Protocol: fine-tuned models of 8, 14 and 20 tasks; λ of a task from 0.2 … 0.6 and α from 0, 0.1, …, 1, first maxima on
validation data; masks |τ_t| > λ|τ_MTL − τ_t| on the sum and on the TIES sum of the top 20 %; Consensus with k = 2 on
the sum and k = 1 on TIES; magnitude masking with 10 % and magnitude pruning at the storage of the masks.

The paper's own settings, for machines with its checkpoints: CLIP ViT-B/32, B/16 and L/14, fine-tuned with AdamW, lr
1e-5, weight decay 0.1, batch 128, 500 steps of warm-up, about 2000 steps (epochs by task: `tvjax.training.EPOCHS`), on
Cars, DTD, EuroSAT, GTSRB, MNIST, RESISC45, SUN397, SVHN (8); CIFAR100, STL10, Flowers102, Pets, PCAM, FER2013 (14);
EMNIST, CIFAR10, Food101, FashionMNIST, RenderedSST2, KMNIST (20). Text: T5-large (LM-adapted) on QASC, QuaRTz, PAWS,
StoryCloze, WikiQA, Winogrande, WSC (7); CosmosQA, QASC, QuAIL, QuaRTz, PAWS, ROPES, SocialIQA, WikiQA (8 of question
answering).
With (IA)³ factors θ0 is 1 and k = 1, as in `:ia3`. `--config.tall.save=True` leaves what every codec wrote in the
run's folder, to be read by `tvjax.compression.encoded`.
"""
import pathlib
import runpy

from ml_collections import ConfigDict

OTHERS = ("minilm", "vision", "ia3", "clip8", "clip14", "clip20",
          *(f"t5_{count}{kind}" for count in (7, 8, 11) for kind in ("", "_ia3")))
SHARED = ("model", "suite", "sources", "tasks", "control", "counts", "seeds", "examples", "finetune", "finetuned",
          "batch", "data")  # what is taken from another config
COUNTS = {"": (8,), "8": (8,), "14": (8, 14), "20": (8, 14, 20), "runlocal": (3,)}


def get_config(arg=""):
    if arg in OTHERS:
        config = get_config("8") if arg == "ia3" else of_suite(arg.removesuffix("_ia3"))
        return with_factors(config, f"tall-{arg}") if arg.endswith("ia3") else config
    if arg not in COUNTS:
        raise ValueError(f"tall takes {', '.join(f':{name}' for name in (*COUNTS, *OTHERS) if name)}; got :{arg}")
    from tvjax.data import glyphs
    from tvjax.experiment import orders

    local, counts = arg == "runlocal", COUNTS[arg]
    wide = (0.0, 0.5, 1.0) if local else tuple(i / 10 for i in range(31))
    group = lambda **fields: ConfigDict(fields)
    return ConfigDict(dict(
        job="tall",
        name=f"tall-{arg or 8}",
        model="glyphs",
        suite="glyphs",
        tasks=glyphs.suite(20)[:max(counts)],
        counts=counts,
        seeds=(0,) if local else (0, 1, 2),
        examples=dict(train=64, val=40, test=40) if local else glyphs.EXAMPLES,
        finetune=dict(steps=4, batch=8, lr=2e-4, warmup=1, weight_decay=0.1) if local else glyphs.RECIPE,
        finetuned=(),
        vectors="",                   # the folder of another run with the same model, data and recipe
        merges=(
            group(name="average"),
            group(name="task_arithmetic"),
            group(name="ties", density=0.2, scales=wide),
        ),
        scales=(0.0, 0.5, 1.0) if local else tuple(i / 10 for i in range(11)),
        select_on="val",
        batch=40 if local else 250,
        save_models=False,
        allow_nonfinite=False,
        mesh=dict(data=1, model=1, rules=()),
        tall=group(
            bases=(                   # merged vectors under masks, and k of their Consensus
                group(name="task_arithmetic", k=2),
                group(name="ties", density=0.2, reduce="sum", k=1),
            ) + (() if local else (group(name="tsv_m", k=2), group(name="iso_c", k=2))),
            lams=(0.2, 0.6) if local else (0.2, 0.3, 0.4, 0.5, 0.6),
            comparator=">",           # the authors' code; ">=" is the paper's
            ks=(0, 2, 4) if local else (0, 1, 2, 3, 4, 5, 6, 8),
            codecs=(
                group(name="magnitude_masking", density=0.1),
                group(name="magnitude_pruning"),
                group(name="magnitude_pruning", positions="counted", label="magnitude_pruning, places counted"),
                group(name="emr"),
                group(name="tsv_c"),
                group(name="bitdelta"),
                group(name="tvq", width=4, label="tvq 4"),
                group(name="tvq", width=2, label="tvq 2"),
                group(name="rtvq"),
                group(name="t_switch"),
                group(name="top_k", density=0.05),
                group(name="ultra_delta"),
            ),
            curve=group(              # the first n tasks of each order
                counts=(2, 3) if local else tuple(n for n in (2, 4, 8, 14, 20) if n <= max(counts)),
                orders=orders.NAMES[-2:] if local else orders.NAMES,
                seeds=(0,),
            ),
            nonoverlap=(2,) if local else (8,),  # numbers of tasks for the control without weight interference
            adapter=group(),          # or group(name="ia3"): its factors are tuned in place of the weights
            save=False,               # whether what the codecs write stays in the run's folder
        ),
    ))


def of_suite(arg):
    """The suite, model, data and recipe of another config, the masks and codecs of this file."""
    config, (kind, _, count) = get_config("8"), arg.partition("_")
    clips = f"vit_b_32,{arg.removeprefix('clip')}"
    file, its = {"minilm": ("minilm", "quick"), "vision": ("vision", ""), "t5": ("language", f"t5,{count}")}.get(
        kind, ("clip_merge", clips))
    theirs = runpy.run_path(str(pathlib.Path(__file__).with_name(f"{file}.py")))["get_config"](its)
    for name in SHARED:
        if name in theirs:
            config[name] = theirs[name]
    config.name = f"tall-{arg}"
    most = len(config.tasks)
    config.tall.curve.counts = tuple(sorted({n for n in (2, 4, 8, 14, 20) if n <= most} | {most}))
    config.tall.curve.orders = config.tall.curve.orders[-2:] if most < 8 else config.tall.curve.orders
    config.tall.nonoverlap = (most,) if arg == "vision" else ()
    return config


def with_factors(config, name):
    """The same with (IA)³'s factors (arXiv:2205.05638) tuned in place of the weights, k = 1.

    Their rate on glyphs is the best of 0.003, 0.01, 0.03 and 0.1 on validation data of two tasks (100 steps).
    """
    config.name = name
    config.finetune = ConfigDict(dict(config.finetune, lr=0.1 if config.suite == "glyphs" else 3e-3, weight_decay=0.0))
    config.tall.adapter = ConfigDict(dict(name="ia3"))
    config.tall.bases = tuple(ConfigDict(dict(base, k=1)) for base in config.tall.bases)
    config.tall.nonoverlap = ()
    return config
