"""CLIP with a residual network (Radford et al., 2021, arXiv:2103.00020; RN50, RN101) in Flax, from open_clip's folders.

The parameter tree is that of OpenAI's and open_clip's files (`visual.layer1.0.conv1.weight`, …). The running mean and
variance of each batch normalisation are data, not parameters: `from_pretrained` gives them among the buffers, so that
no task vector, norm or mask has them. `join(params, statistics)` puts them back for applying the model. For a merged
model they may be those of the base, the average of the tuned models', or be computed anew (`merged_statistics`).

>>> model = ResNetCLIP(Spec(projection_dim=4, blocks=(1, 1, 1, 1), width=2, image_size=32, text=TextSpec(8, 2, 1)))
>>> params, statistics = jax.eval_shape(functools.partial(init, model), jax.random.key(0))
>>> pixels = jax.ShapeDtypeStruct((3, 32, 32, 3), jnp.float32)
>>> jax.eval_shape(image_features(model), join(params, statistics), pixels).shape
(3, 4)
"""
import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tvjax.models import files, folders, open_clip
from tvjax.models.clip_resnet_network import STATISTICS, ResNetCLIP, Spec, TextSpec
from tvjax.models.files import Pretrained, save_pretrained

__all__ = ["POLICIES", "Pretrained", "ResNetCLIP", "Spec", "TextSpec", "average_statistics", "from_pretrained",
           "image_features", "init", "join", "logits", "merged_statistics", "moved", "recompute_statistics",
           "save_pretrained", "spec", "split", "statistics", "text_features", "training_features", "visual",
           "with_statistics"]

Params = dict[str, Any]
RUNNING = ("running_mean", "running_var")
POLICIES = ("base", "average", "recompute")


def init(model: Any, key: Array) -> tuple[Params, Params]:
    """(random float32 parameters, statistics of mean 0 and variance 1)."""
    s = model.config
    pixels = jax.ShapeDtypeStruct((1, s.image_size, s.image_size, 3), jnp.float32)
    made = model.lazy_init(key, pixels, jax.ShapeDtypeStruct((1, s.text.positions), jnp.int32))
    return dict(made["params"]), dict(made[STATISTICS])


def split(params: Mapping[str, Any]) -> tuple[Params, Params]:
    """(parameters, running statistics) of a tree that holds both, as the files do."""
    from tvjax import tree

    flat = tree.flatten(params)
    running = {name: leaf for name, leaf in flat.items() if name.rpartition(".")[2] in RUNNING}
    return tree.unflatten({n: x for n, x in flat.items() if n not in running}), tree.unflatten(running)


def join(params: Mapping[str, Any], statistics: Mapping[str, Any]) -> Params:
    """One tree with the leaves of both, which `image_features` takes."""
    both = {**params}
    for name, part in statistics.items():
        both[name] = join(params.get(name, {}), part) if isinstance(part, Mapping) else part
    return both


def statistics(pretrained: Pretrained) -> Params:
    """The running statistics of a model that was read, as a tree."""
    from tvjax import tree

    running = {name: jnp.asarray(x) for name, x in pretrained.buffers.items() if name.rpartition(".")[2] in RUNNING}
    return tree.unflatten(running)


def with_statistics(pretrained: Pretrained, statistics: Mapping[str, Any]) -> Pretrained:
    """The same model with other running statistics, for `save_pretrained`."""
    from tvjax import tree

    return pretrained._replace(buffers={**pretrained.buffers, **jax.device_get(tree.flatten(statistics))})


@functools.cache
def image_features(model: Any) -> Callable[[Params, Array], Array]:
    """(params joined with statistics, or their visual part, pixels (batch, height, width, 3)) -> (batch, features).

    Not normalised. A model always gives the same function: `jit` caches hold.
    """
    def apply(params, pixels) -> Any:
        return model.apply(_variables(params), pixels, method="image_features")
    return apply


@functools.cache
def training_features(model: Any) -> Callable[[Params, Array], tuple[Array, Params]]:
    """(params without statistics, pixels) -> (features normalised by the batch's statistics, those statistics).

    `moved` keeps their running average over steps.
    """
    def apply(params, pixels):
        given = {"params": split(params)[0]}
        features, changed = model.apply(given, pixels, method="image_features", mutable=[STATISTICS])
        return features, dict(changed[STATISTICS])
    return apply


@functools.cache
def text_features(model: Any) -> Callable[..., Array]:
    """(params, input_ids (prompts, tokens)) -> (prompts, features), not normalised; statistics are not needed."""
    def apply(params, input_ids, attention_mask=None) -> Any:
        return model.apply({"params": split(params)[0]}, input_ids, method="text_features")
    return apply


@functools.cache
def logits(model: Any) -> Callable[..., Array]:
    """(params joined with statistics, pixels, input_ids) -> exp(logit_scale) · cosines, (images, prompts)."""
    def apply(params, pixels, input_ids) -> Any:
        return model.apply(_variables(params), pixels, input_ids)
    return apply


def _variables(params: Params) -> dict[str, Params]:
    weights, running = split(params)
    if not running:
        raise ValueError("params hold no running statistics of the batch normalisations: "
                         "give join(params, statistics).")
    return {"params": weights, STATISTICS: running}


def visual(params: Params) -> Params:
    """The subtree that is fine-tuned."""
    return {"visual": params["visual"]}


def moved(statistics: Params, batch: Params, *, momentum: float = 0.1) -> Params:
    """Running statistics after a training step: (1 − momentum) · old + momentum · the batch's."""
    return jax.tree.map(lambda old, new: (1 - momentum) * old + momentum * new, statistics, batch)


def average_statistics(each: Sequence[Params]) -> Params:
    """The mean of several models' running means and of their running variances."""
    if not each:
        raise ValueError("there are no statistics to average: give those of the fine-tuned models.")
    return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]) / len(leaves), *each)


def recompute_statistics(model: Any, params: Params, batches: Iterable[Any]) -> Params:
    """The mean, over batches of pixels, of each batch's statistics under `params`.

    The model normalises each batch by the batch itself meanwhile (`torch.optim.swa_utils.update_bn`). Batches must be
    of one size, or the smaller ones weigh too much.
    """
    gather, total, count = _gather(model), None, 0
    for pixels in batches:
        found = gather(params, pixels)
        total = found if total is None else jax.tree.map(jnp.add, total, found)
        count += 1
    if total is None:
        raise ValueError("there are no batches to compute statistics from: give an iterable of pixels.")
    return jax.tree.map(lambda x: x / count, total)


@functools.cache
def _gather(model: Any) -> Callable[[Params, Array], Params]:
    return jax.jit(lambda params, pixels: training_features(model)(params, pixels)[1])


def merged_statistics(model: Any, params: Params, base: Params, tuned: Sequence[Params] = (),
                      batches: Iterable[Any] = (), *, policy: str = "base") -> Params:
    """The statistics for a merged model `params`: the base's, the average of the tuned models', or computed anew.

    Only the policy "recompute" looks at `batches`, unlabelled images of the tasks.
    """
    if policy == "base":
        return base
    if policy == "average":
        return average_statistics(tuned)
    if policy == "recompute":
        return recompute_statistics(model, params, batches)
    from tvjax import tree

    raise ValueError(f"no policy {policy!r} for statistics of batches; {tree.did_you_mean(policy, POLICIES)}")


def spec(config: Mapping[str, Any]) -> Spec:
    """What fixes the network, from an open_clip_config.json or its `model_cfg`."""
    about = config.get("model_cfg", config)
    vision, text = about["vision_cfg"], about["text_cfg"]
    if not isinstance(vision.get("layers"), Sequence) or len(vision["layers"]) != 4:
        raise ValueError(f"vision_cfg.layers is {vision.get('layers')!r}; a residual network has four stages, and a "
                         "vision transformer is read by tvjax.models.clip.")
    words = TextSpec(text["width"], text["heads"], text["layers"], text.get("context_length", 77),
                     text.get("vocab_size", 49408))
    activation = "quick_gelu" if about.get("quick_gelu", False) else "gelu"
    return Spec(about["embed_dim"], tuple(vision["layers"]), vision.get("width", 64), vision.get("image_size", 224),
                vision.get("head_width", 64), words, activation)


def _adopt(weights: files.Flat, config: Any) -> tuple[files.Flat, files.Flat]:
    """Running statistics are buffers."""
    running = {name: leaf for name, leaf in weights.items() if name.rpartition(".")[2] in RUNNING}
    return {name: leaf for name, leaf in weights.items() if name not in running}, running


FAMILY = files.Family(
    "CLIP with a residual network", {"open_clip_resnet": ""}, lambda config, names: ResNetCLIP(spec(config)),
    lambda model, key: init(model, key)[0], _adopt, constants=r"^(input_resolution|context_length|vocab_size)$",
    tokenizer="CLIPTokenizer", processor=open_clip.processor, read_config=folders.open_clip_config,
    config_text=lambda config, params: json.dumps(config, indent=4) + "\n", weights="open_clip_model.safetensors",
    pickle="open_clip_pytorch_model.bin", config_file=folders.OPEN_CLIP)


def from_pretrained(path_or_hub_id: str | os.PathLike, *, revision: str | None = None) -> Pretrained:
    """The CLIP in a folder of open_clip, or of that name on the hub (timm/resnet50_clip.openai, …).

    `params` are without the running statistics, which are among the buffers (`statistics`). Errors: a ValueError that
    says what is missing, strange or of the wrong shape.
    """
    return files.from_pretrained(path_or_hub_id, FAMILY, revision=revision)
