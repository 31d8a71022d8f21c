"""A tiny study of linearised fine-tuning, for the tests of its job: a config, and a toy problem in place of glyphs."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from tvjax import evaluation
from tvjax.data import glyphs
from tvjax.experiment import loading
from tvjax.models.layers import Linear


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + jnp.tanh(Linear(6, name="q_proj", std=0.5)(x))
        return Linear(5, name="fc2", std=0.5)(jnp.tanh(Linear(7, name="v_proj", std=0.5)(x)))


NET = Net()


def encode(params, x):
    return NET.apply({"params": params}, x)


def problem(plan):
    """Three classes a task, told apart by a network near θ0; a control that θ0 itself knows."""
    theta0 = dict(jax.jit(NET.init)(jax.random.key(0), jnp.ones((1, 6)))["params"])
    names = (*plan.tasks, "control")
    made = {name: _task(theta0, i, 0.0 if name == "control" else 0.3, plan.examples) for i, name in enumerate(names)}
    keys = {name: {split: evaluation.content_key(name, tuple(data)) for split, data in splits.items()}
            for name, (_, splits) in made.items()}
    return loading.Problem(None, jax.device_get(theta0), evaluation.classify(encode),
                           {name: head for name, (head, _) in made.items()},
                           {name: splits for name, (_, splits) in made.items()}, "toy", keys, encode, "control")


def _task(theta0, i, far, examples):
    draw = np.random.default_rng(i).standard_normal
    theta = jax.tree.map(lambda x: x + far * draw(x.shape, np.float32), theta0)
    head = jnp.asarray(draw((5, 3), np.float32))
    run = jax.jit(lambda theta, x: (encode(theta, x) @ head).argmax(-1))
    inputs = {split: draw((count, 6), np.float32) for split, count in examples.items()}
    return head, {split: (x, np.asarray(run(theta, x), np.int32)) for split, x in inputs.items()}


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
