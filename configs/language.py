"""Language tasks under T5, Flan-T5 and GPT-2: fine-tune or take published models, merge, judge.

    python -m tvjax.run --config=configs/language.py:t5,7              # QASC … WSC; also 8 and 11 (arXiv:2405.07813)
    python -m tvjax.run --config=configs/language.py:glue,8            # T5 on GLUE as text to text
    python -m tvjax.run --config=configs/language.py:flan_t5_base,8    # published Flan-T5s, tuned on GLUE
    python -m tvjax.run --config=configs/language.py:gpt2,7            # published GPT-2 classifiers of GLUE
    python -m tvjax.run --config=configs/language.py:gpt2_tuned,7      # GPT-2 fine-tuned here, under linear probes
    python -m tvjax.run --config=configs/language.py:t5,7,FOLDER       # tasks and models in folders below FOLDER
    python -m tvjax.run --config=configs/language.py:runlocal          # a tiny T5 and tasks made up on the spot

Models: of the hub, or FOLDER/ID, as FOLDER/google-t5/t5-base; name others by --config.model. Data: FOLDER/data/TASK,
which holds what `datasets` saved (save_to_disk) or train.jsonl, validation.jsonl with the hub's columns, else the hub's
data sets (pip install 'tvjax[data]'); your own sentences by --config.sources='("folder/*.json",)' and --config.tasks.

T5 answers by the choice of largest log-probability, or, where published models are judged as their authors do, by
greedy generation and exact match (data.judge="generated"); stsb by Spearman's correlation. GPT-2's heads stay each
task's own and are never merged. ROPES brings no choices, so that suites 8 and 11 are judged by generation.

Published (percent, cola mnli mrpc qnli qqp rte sst2 stsb): Flan-T5-base 69.1 56.5 76.2 88.4 82.1 80.1 91.2 62.2, tuned
75.0 83.4 87.5 91.5 85.4 85.9 93.6 88.7; GPT-2 tuned 76.8 82.1 80.4 88.3 89.6 65.3 91.2 (to sst2). Their averages stand
beside the measured ones in the report. Not measured here: there was no network. TaLoS' own recipe for T5: lr 1e-4, no
weight decay, batch 1024, 75,000 steps; the recipe below is a short one.
"""
import os
import tempfile

from ml_collections import ConfigDict

KINDS = ("t5", "glue", "flan_t5_base", "gpt2", "gpt2_tuned")


def group(**fields):
    return ConfigDict(fields)


def get_config(arg="t5,7"):
    local = arg == "runlocal"
    kind, _, rest = ("t5,2" if local else arg).partition(",")
    count, _, root = rest.partition(",")
    if kind not in KINDS or not count.isdigit():
        raise ValueError(f"language takes :KIND,TASKS[,FOLDER] with KIND one of {', '.join(KINDS)}, or :runlocal; "
                         f"got :{arg}")
    root = local_hub() if local else root
    made_up = "tiny/t5", ("glue-rte", "wiki_qa"), {}, {}
    model, tasks, experts, expected = made_up if local else chosen(kind, int(count))
    place = lambda hub_id: os.path.join(root, hub_id) if root else hub_id
    gpt2 = kind.startswith("gpt2")
    generated = kind == "flan_t5_base" or "ropes" in tasks
    return ConfigDict(dict(
        job="benchmark",
        name=f"language-{arg.replace(',', '-')}" if not root or local else f"language-{kind}-{count}-local",
        model=place(model),
        suite="text" if gpt2 else "questions",
        sources=(os.path.join(root, "data"),) if root else (),
        tasks=tasks,
        control="" if kind in ("flan_t5_base", "gpt2") else "glue-cola" if local else "rte" if kind == "t5" else "",
        counts=(len(tasks),),
        seeds=(0,) if local or experts else (0, 1, 2),
        examples=dict(train=16, val=4, test=8) if local else dict(train=50_000, val=2000, test=10_000),
        finetune=dict(steps=2, batch=4, lr=1e-3, warmup=1, weight_decay=0.0) if local else
        dict(steps=2000, batch=32, lr=5e-5 if gpt2 else 1e-4, warmup=200, weight_decay=0.0),
        finetuned=tuple(f"{task}={place(path)}" for task, path in experts.items()),
        vectors="",
        merges=(
            group(name="average"),
            group(name="task_arithmetic"),
            group(name="ties", density=0.2),
            *(() if local else (group(name="tsv_m", scales=(0.5, 1.0, 1.5)),)),
        ),
        scales=(0.3, 1.0) if local else tuple(i / 10 for i in range(11)),
        select_on="val",
        batch=8 if local else 64,
        save_models=False,
        allow_nonfinite=False,
        mesh=dict(data=1, model=1, rules=()),
        data=group(tokens=128, heads="checkpoint" if kind == "gpt2" else "probe") if gpt2 else group(
            tokens=32 if local else 128, answers=8 if local else 16 if "glue" in tasks[0] else 32, truncate=True,
            prompts="v1", criterion="answer", judge="generated" if generated else "choices"),
        benchmark=group(negation=(0.5, 1.0) if local else tuple(i / 10 for i in range(1, 11)) if kind == "t5" else (),
                        threshold=0.95, probe=0, expected=group(**expected)),
    ))


def chosen(kind, count):
    """(model, tasks, {task: expert}, {method: published average}) of a kind and a number of tasks."""
    from tvjax.data import glue, nlp, pools

    if kind == "t5":
        return "google-t5/t5-base", nlp.suite(count), {}, {}
    if kind == "glue":
        return "google-t5/t5-base", tuple(f"glue-{task}" for task in glue.TASKS[:count]), {}, {}
    pool = pools.pool(kind.removesuffix("_tuned"))
    names = {f"glue-{task}": pool.id_of(task) for task in pool.tasks[:count]}
    return (pool.base, tuple(names), {}, {}) if kind == "gpt2_tuned" else (
        pool.base, tuple(names), names, pools.expected(kind, count))


def local_hub():
    """A folder with the hub's layout: a tiny T5 of random weights, and tasks in words made up on the spot."""
    import pathlib

    root = pathlib.Path(tempfile.gettempdir()) / "tvjax-language-runlocal"
    if not (root / "tiny" / "t5" / "model.safetensors").exists():
        save_tasks(root / "data")
        save_model(root / "tiny" / "t5")
    return str(root)


def save_tasks(folder):
    """A few questions of two tasks and a control, whose answers follow from the words."""
    import json
    import random

    draw = random.Random(0)
    word = lambda: "".join(draw.choices("abcde", k=3))
    for task in ("glue-rte", "wiki_qa", "glue-cola"):
        (folder / task).mkdir(parents=True, exist_ok=True)
        for split in ("train", "validation"):
            rows = [dict(sentence=word(), sentence1=word(), sentence2=word(), question=word(), answer=word(),
                         label=i % 2) for i in range(48)]
            (folder / task / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def save_model(folder):
    """A T5 that reads letters: configuration, tokenizer, weights."""
    import string

    import jax
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import Unigram

    from tvjax import checkpoints
    from tvjax.models import t5

    words = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((c, -3.0) for c in string.ascii_letters)]
    config = transformers.T5Config(vocab_size=len(words), d_model=16, d_kv=8, num_heads=2, d_ff=32, num_layers=1,
                                   num_decoder_layers=1, decoder_start_token_id=0)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(Unigram(words, 2)), eos_token="</s>",
                                         unk_token="<unk>", pad_token="<pad>").save_pretrained(folder)
    params = jax.jit(lambda key: t5.init(t5.T5(t5.spec(config, tied=True)), key))(jax.random.key(0))
    checkpoints.save(jax.device_get(params), folder / "model.safetensors")
