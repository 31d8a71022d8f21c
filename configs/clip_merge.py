"""Published fine-tuned CLIPs: every expert judged, merged by any operator, the published numbers beside the measured.

    python -m tvjax.run --config=configs/clip_merge.py:vit_b_32,8
    python -m tvjax.run --config=configs/clip_merge.py:vit_l_14,20
    python -m tvjax.run --config=configs/clip_merge.py:vit_b_32,8,models    # models/openai/…, models/tanganke/… on disk
    python -m tvjax.run --config=configs/clip_merge.py:runlocal

Pools: vit_b_32, vit_b_16, vit_l_14 with the first 8, 14 or 20 tasks of FusionBench's (arXiv:2406.03280) checkpoints on
the Hugging Face hub. Data: folders below `sources`, else the hub's data sets (pip install 'tvjax[data]'), else TFDS.
Needs the network, or what it would fetch on disk; without, one sentence says what to put where.

Published Flan-T5s and GPT-2s: configs/language.py.

Published averages of ViT-B/32 on 8 tasks (%): zero-shot 48.1, average 66.5, task arithmetic at 0.3 68.0, TIES at 0.3
72.2, fine-tuned 90.4; they stand beside the measured ones in the report. Not measured here: there was no network.
:runlocal makes two "experts" of the embedded CLIP by noise, and images of digits, and takes the very same way.
"""
import os
import tempfile

from ml_collections import ConfigDict


def get_config(arg="vit_b_32,8"):
    from tvjax.data import pools

    local = arg == "runlocal"
    name, _, rest = ("vit_b_32,2" if local else arg).partition(",")
    count, _, root = rest.partition(",")
    if name not in pools.POOLS or not name.startswith("vit") or not count.isdigit() or not 0 < int(count) <= 20:
        raise ValueError(f"clip_merge takes :POOL,TASKS[,FOLDER], such as :vit_b_32,8, or :runlocal; got :{arg}")
    root = local_hub() if local else root
    pool, group = pools.pool(name), lambda **fields: ConfigDict(fields)
    place = lambda hub_id: os.path.join(root, hub_id) if root else hub_id
    tasks = ("mnist", "svhn") if local else pool.tasks[:int(count)]
    return ConfigDict(dict(
        job="benchmark",
        name="clip-merge-runlocal" if local else f"clip-merge-{name}-{count}",
        model=place(pool.base),
        suite="vision",
        sources=(os.path.join(root, "data"),) if local else (),  # folders that hold TASK/{train,test}/CLASS/…
        tasks=tasks,
        control="",
        counts=(len(tasks),),
        seeds=(0,),
        examples=dict(train=8, val=8, test=80) if local else dict(train=100_000, val=5000, test=100_000),
        finetune=dict(steps=2000, batch=128, lr=1e-5, warmup=500, weight_decay=0.1),  # not run: experts are given
        finetuned=tuple(f"{task}={place(pool.id_of(task))}" for task in tasks),
        vectors="",
        merges=(
            group(name="average"),
            group(name="task_arithmetic", label="task_arithmetic", scale=0.3),
            group(name="ties", density=0.2, scale=0.3),
            group(name="tsv_m", scales=(0.5, 1.0, 1.5)),
        ),
        scales=(0.3, 1.0) if local else tuple(i / 20 for i in range(21)),
        select_on="val",
        batch=8 if local else 128,
        save_models=False,
        allow_nonfinite=False,
        mesh=dict(data=1, model=1, rules=()),
        benchmark=group(negation=(), threshold=0.95, probe=0,
                        expected=group(**({} if local else pools.expected(name, int(count))))),
    ))


def local_hub():
    """A folder with the hub's layout: the embedded CLIP, two experts made of it by noise, images of two tasks."""
    import pathlib
    import shutil

    from tvjax.data import glyphs, pools

    root = pathlib.Path(tempfile.gettempdir()) / "tvjax-clip-merge-runlocal"
    pool = pools.pool("vit_b_32")
    if not (root / pool.base).exists():
        for seed, task in enumerate(("mnist", "svhn")):
            save_expert(root / pool.id_of(task), seed)
            save_images(root / "data" / task, seed)
        shutil.copytree(glyphs.pretrained_dir(), root / pool.base)
    return str(root)


def save_expert(folder, seed):
    """The vision tower of the embedded CLIP with a little noise, saved as such a tower alone."""
    import json

    import jax
    import numpy as np

    from tvjax import checkpoints
    from tvjax.data import glyphs
    from tvjax.models import clip

    found, rng = clip.from_pretrained(glyphs.pretrained_dir()), np.random.default_rng(seed)
    moved = jax.tree.map(lambda x: np.asarray(x) + rng.normal(0, 1e-3, x.shape).astype(np.float32),
                         {"vision_model": found.params["vision_model"]})
    about = json.loads((glyphs.pretrained_dir() / "config.json").read_text())["vision_config"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**about, "architectures": ["CLIPVisionModel"]}))
    checkpoints.save(moved, folder / "model.safetensors")


def save_images(folder, seed):
    """Eight images for training and testing of each digit: a large one on a paper of its own."""
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    rng = np.random.default_rng(seed)
    for split in ("train", "test"):
        for digit in range(10):
            (folder / split / str(digit)).mkdir(parents=True, exist_ok=True)
            for i in range(8):
                image = Image.new("RGB", (40, 32), tuple(rng.integers(150, 256, 3).tolist()))
                ImageDraw.Draw(image).text(rng.integers(8, 14, 2).tolist(), str(digit), fill=(20, 20, 60),
                                           font=ImageFont.load_default(22), anchor="lt")
                image.save(folder / split / str(digit) / f"{i}.png")
