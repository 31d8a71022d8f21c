"""Parameter-efficient methods: what each adds to the modules it sits on. A method is a value; its weights are a tree φ.

    LoRA        y + s·B A h, s = α/r (or α/√r)       Hu et al., 2021, arXiv:2106.09685; √r: arXiv:2312.03732
    Bias        y + b                                 Ben Zaken et al., 2021, arXiv:2106.10199
    Rescale     l ⊙ y, or W(l ⊙ h) before an MLP's end  (IA)³, Liu et al., 2022, arXiv:2205.05638
    Bottleneck  y + U gelu(D y)                       Houlsby et al., 2019, arXiv:1902.00751
"""
import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tvjax import tree
from tvjax.adapters.sites import Site

ATTENTION = r"(^|\.)(q_proj|v_proj|q|v|query|value|c_attn)$"  # queries and values under the names of all families
SCALINGS = ("rank", "root")
Module = dict[str, Any]  # the leaves of φ at one module, by the end of their names


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters: y + s·B A dropout(h), with A uniform in ±1/√inputs and B zero at the start, as in PEFT.

    targets: a regular expression that the paths of the adapted modules contain. scaling: "rank" for s = α/r, "root" for
    α/√r. dropout: the share of inputs left out in training.

    >>> Lora(rank=16, alpha=32).scale, Lora(rank=16, alpha=32, scaling="root").scale
    (2.0, 8.0)
    """

    rank: int = 16
    alpha: int | float = 32
    targets: str = ATTENTION
    dropout: int | float = 0.0
    scaling: str = "rank"
    parts = ("lora_A.weight", "lora_B.weight")
    what = "has a matrix"

    def __post_init__(self):
        _at_least_one("rank", self.rank)
        if self.scaling not in SCALINGS:
            raise ValueError(f"scaling is 'rank' (α/r) or 'root' (α/√r); got {self.scaling!r}")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha is a finite number above 0; got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is a share from 0 to below 1; got {self.dropout}")

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank if self.scaling == "rank" else math.sqrt(self.rank))

    def fits(self, site: Site) -> bool:
        return bool(site.weight)

    def start(self, key, site: Site, name: str) -> Module:
        if self.rank > min(site.inputs, site.outputs):
            raise ValueError(f"rank {self.rank} is above that of {name}, a matrix of {site.outputs} × {site.inputs}: "
                             f"take at most {min(site.inputs, site.outputs)}")
        bound = site.inputs**-0.5  # Kaiming's uniform with a = √5
        a = jax.random.uniform(key, (self.rank, site.inputs), minval=-bound, maxval=bound)
        return {"lora_A.weight": a, "lora_B.weight": jnp.zeros((site.outputs, self.rank))}

    def before(self, phi: Module, h: Array) -> Array:
        return h

    def after(self, phi: Module, h: Array, y: Array, key) -> Array:
        a, b = (phi[part].astype(h.dtype) for part in self.parts)
        low = jnp.einsum("...i,ri->...r", _dropped(h, key, self.dropout), a)
        return y + jnp.asarray(self.scale, h.dtype) * jnp.einsum("...r,or->...o", low, b)

    def change(self, phi: Module, leaves: Module, site: Site) -> Module:
        """What it adds to the module's own leaves: s·B A, in the weight's layout."""
        a, b = (phi[part] for part in self.parts)
        product = self.scale * jnp.matmul(b, a, precision="highest")
        return {site.weight: product.T if site.turned else product}


@dataclasses.dataclass(frozen=True)
class Bias:
    """A vector b added to what a module returns, 0 at the start; of modules that have a bias of their own."""

    targets: str = ""
    parts = ("bias",)
    what = "has a bias"

    def fits(self, site: Site) -> bool:
        return bool(site.bias)

    def start(self, key, site: Site, name: str) -> Module:
        return {"bias": jnp.zeros(site.outputs)}

    def before(self, phi: Module, h: Array) -> Array:
        return h

    def after(self, phi: Module, h: Array, y: Array, key) -> Array:
        return y + _last(phi["bias"], y)

    def change(self, phi: Module, leaves: Module, site: Site) -> Module:
        return {site.bias: phi["bias"]}


@dataclasses.dataclass(frozen=True)
class Rescale:
    """(IA)³: a factor l for every output of a module (input where it matches `feedforward`), 1 at the start.

    The task vector is l − 1. Factors are kept as in PEFT's files: (outputs, 1), or (1, inputs).
    """

    targets: str = r"(^|\.)(k_proj|v_proj|k|v|key|value|fc2|wo|output\.dense)$"
    feedforward: str = r"(^|\.)(fc2|wo|output\.dense)$"
    parts = ("ia3_l",)
    what = "has a matrix"

    def fits(self, site: Site) -> bool:
        return bool(site.weight)

    def start(self, key, site: Site, name: str) -> Module:
        return {"ia3_l": jnp.ones((1, site.inputs) if re.search(self.feedforward, name) else (site.outputs, 1))}

    def before(self, phi: Module, h: Array) -> Array:
        return h * _last(phi["ia3_l"][0], h) if _on_inputs(phi) else h

    def after(self, phi: Module, h: Array, y: Array, key) -> Array:
        return y if _on_inputs(phi) else y * _last(phi["ia3_l"][:, 0], y)

    def change(self, phi: Module, leaves: Module, site: Site) -> Module:
        """(l − 1) ⊙ W by rows or columns; a bias is rescaled with the outputs."""
        less, weight = phi["ia3_l"] - 1, leaves[site.weight]
        by = less.T if site.turned else less
        found = {site.weight: jnp.broadcast_to(by, weight.shape) * weight}
        if site.bias and not _on_inputs(phi):
            found[site.bias] = less[:, 0] * leaves[site.bias]
        return found


@dataclasses.dataclass(frozen=True)
class Bottleneck:
    """A small network after a module, y + U gelu(D y), U zero at the start. No change of weights, so never exported."""

    width: int = 16
    targets: str = r"(^|\.)(out_proj|fc2|o|wo|c_proj)$"
    parts = ("adapter_down.weight", "adapter_down.bias", "adapter_up.weight", "adapter_up.bias")
    what = "has a matrix"

    def __post_init__(self):
        _at_least_one("width", self.width)

    def fits(self, site: Site) -> bool:
        return bool(site.weight)

    def start(self, key, site: Site, name: str) -> Module:
        down = site.outputs**-0.5 * jax.random.normal(key, (self.width, site.outputs))
        shapes = ((self.width,), (site.outputs, self.width), (site.outputs,))
        return dict(zip(self.parts, (down, *map(jnp.zeros, shapes)), strict=True))

    def before(self, phi: Module, h: Array) -> Array:
        return h

    def after(self, phi: Module, h: Array, y: Array, key) -> Array:
        down, down_bias, up, up_bias = (phi[part] for part in self.parts)
        low = jax.nn.gelu(jnp.einsum("...o,wo->...w", y, down) + _broad(down_bias, y), approximate=False)
        return y + jnp.einsum("...w,ow->...o", low, up) + _broad(up_bias, y)

    def change(self, phi: Module, leaves: Module, site: Site) -> Module:
        raise ValueError("a bottleneck adapter is a network of its own, no change of weights: it can't be exported as "
                         "a task vector of the model; merge it in the space of its own weights")


METHODS = {"lora": Lora, "bias": Bias, "ia3": Rescale, "bottleneck": Bottleneck}
Method = Lora | Bias | Rescale | Bottleneck


def build(name: str, options: dict) -> Method:
    """The method of a name with these options; ValueError where there is none, or no such option.

    >>> build("lora", {"rank": 4}).rank
    4
    """
    if name not in METHODS:
        raise ValueError(f"no adapter called {name!r}; {tree.did_you_mean(name, list(METHODS))}")
    known = [field.name for field in dataclasses.fields(METHODS[name])]
    if strange := [option for option in options if option not in known]:
        raise ValueError(f"{name} has no option {strange[0]!r}; {tree.did_you_mean(strange[0], known)}")
    return METHODS[name](**options)


# ---------------------------------------------------------------- parts
def _dropped(h: Array, key, rate: float) -> Array:
    if key is None or not rate:
        return h
    kept = jax.random.bernoulli(key, 1 - rate, h.shape)
    return jnp.where(kept, h / jnp.asarray(1 - rate, h.dtype), jnp.zeros_like(h))


def _on_inputs(phi: Module) -> bool:
    return phi["ia3_l"].shape[0] == 1 and phi["ia3_l"].ndim == 2


def _last(vector: Array, x: Array) -> Array:
    """A vector along the last axis of `x`, in its dtype."""
    return vector.astype(x.dtype).reshape((1,) * (x.ndim - 1) + vector.shape)


def _broad(vector: Array, x: Array) -> Array:
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


def _at_least_one(name: str, value) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is a whole number from 1 on; got {value!r}")
