"""The config of a tiny study of linearised fine-tuning, for the tests of its job."""
from ml_collections import ConfigDict

from tvjax.data import glyphs


def config(job="llora", **changes):
    group = lambda **fields: ConfigDict(fields)
    lora = dict(rank=2, alpha=4, dropout=0.1)
    own = dict(
        ways=(group(name="full", kind="standard"),
              group(name="LoRA", kind="lora", options=group(**lora), finetune=group(lr=1e-3)),
              group(name="L-LoRA", kind="lora", scope="module", options=group(**lora), finetune=group(lr=1e-3))),
        fusions=("average", "task_arithmetic", "ties", "lorahub", "greedy"), sizes=(2, 3), most=1, greedy=(0.0, 1.0),
        ties=group(densities=(0.5, 1.0), scales=(0.5, 1.0)), lorahub=group(budget=3, bound=1.5, penalty=0.05),
        plane=group(span=2, points=3, examples=8, pairs=1), scatter=True, negation=False, scaling=group())
    own.update({name: value for name, value in changes.items() if name in own})
    usual = dict(
        job=job, name="tiny", model="glyphs", suite="glyphs", tasks=glyphs.suite(8)[:3], counts=(3,), seeds=(0,),
        examples=dict(train=16, val=16, test=16), finetune=dict(steps=2, batch=8, lr=2e-4, warmup=1, weight_decay=0.1),
        finetuned=(), vectors="", merges=(group(name="average"),), scales=(0.0, 0.5, 1.0), select_on="val", batch=16,
        save_models=False, allow_nonfinite=False)
    usual.update({name: value for name, value in changes.items() if name not in own})
    return ConfigDict({**usual, job: group(**own)})
