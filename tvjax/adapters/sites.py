"""Where adapters may sit: the modules of a network that map vectors to vectors, found by passing shapes through it.

A module counts where its parameters hold a matrix `weight` (or flax's `kernel`) or a vector `bias`, and its input and
output are arrays of floats whose last axes fit. Nothing is computed.
"""
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from tvjax import tree


class Site(NamedTuple):
    """`weight` and `bias` name leaves of the module ("" where it has none); `turned`: the weight is (in, out)."""

    inputs: int
    outputs: int
    weight: str
    bias: str
    turned: bool


def find(apply: Callable, params: Any, *inputs) -> dict[str, Site]:
    """{dotted path of a module: what it is}, in the order in which `apply(params, *inputs)` calls them.

    inputs: arrays or shapes with dtypes. ValueError where no module of the network was met.
    """
    shapes = {name: x.shape for name, x in tree.flatten(params).items()}
    found: dict[str, Site] = {}

    def note(call, args, kwargs, context):
        y = call(*args, **kwargs)
        if context.method_name == "__call__" and (site := _site(context.module, args, y, shapes)):
            found.setdefault(path(context.module), site)
        return y
    with nn.intercept_methods(note):
        jax.eval_shape(lambda params, *inputs: apply(params, *inputs), params, *inputs)
    if not found:
        raise ValueError("apply calls no Flax module that bears the names of params (or is compiled already): adapters "
                         "sit on modules; give the function that calls model.apply, without jit")
    return found


def path(module: nn.Module) -> str:
    """A module's dotted path, the common beginning of its leaves' names."""
    return ".".join(module.path)


def _site(module: nn.Module, args, y, shapes) -> Site | None:
    here = path(module)
    of = lambda leaf: shapes.get(f"{here}.{leaf}" if here else leaf)
    weight = next((leaf for leaf in ("weight", "kernel") if len(of(leaf) or ()) == 2), "")
    bias = "bias" if len(of("bias") or ()) == 1 else ""
    if not (weight or bias) or not args or not all(tree.is_float(x) and x.ndim for x in (args[0], y)):
        return None
    into, out = args[0].shape[-1], y.shape[-1]
    if weight and set(of(weight)) != {into, out}:
        return None
    turned = weight == "kernel" or _is_conv1d(module) or bool(weight and of(weight) != (out, into))
    return Site(into, out, weight, bias, turned)


def _is_conv1d(module: nn.Module) -> bool:
    """A square weight doesn't tell its layout; the layer's name does."""
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)


def matching(sites: dict[str, Site], targets: str, fits: Callable[[Site], bool], what: str) -> dict[str, Site]:
    """The sites whose paths contain the regular expression `targets` and that `fits`, at least one."""
    try:
        pattern = re.compile(targets)
    except re.error as error:
        raise ValueError(f"targets {targets!r} is no regular expression: {error}") from None
    chosen = {name: site for name, site in sites.items() if pattern.search(name) and fits(site)}
    if not chosen:
        kinds = last_names(name for name, site in sites.items() if fits(site))
        raise ValueError(f"targets {targets!r} matches no module that {what}; {tree.did_you_mean(targets, kinds)}")
    return chosen


def last_names(paths: Iterable[str]) -> list[str]:
    """What modules are called, without where they are.

    >>> last_names(["layers.0.fc1", "layers.1.fc1", "proj"])
    ['fc1', 'proj']
    """
    return list(dict.fromkeys(name.rpartition(".")[2] for name in paths))
