"""Adapters as changes of the model's own weights: task vectors in the space of θ, and merged models.

LoRA: ΔW = s·B A; linearised by module at φ0: s·(B0 A0 + (B − B0) A0 + B0 (A − A0)), which is s·B A0 for B0 = 0.
"""
from typing import Any

import jax
import jax.numpy as jnp

from tvjax import tangent, tree, vectors
from tvjax.adapters.attach import modules
from tvjax.adapters.methods import Lora, Method
from tvjax.adapters.sites import Site


def dense(method: Method, theta0: Any, phi: Any, sites: dict[str, Site], *, phi0: Any = None) -> vectors.TaskVector:
    """The task vector of θ that does what the adapters do; with `phi0`, what they do linearised by module.

    It holds the changed leaves alone. Adapters linearised in the whole network have none: their output is no model's.
    """
    at, origin = modules(phi, method), None if phi0 is None else modules(phi0, method)
    leaves, found = tree.flatten(theta0), {}
    for name, mine in at.items():
        if name not in sites:
            raise ValueError(f"the model has no module {name}, where phi has adapters; "
                             f"{tree.did_you_mean(name, list(sites))}")
        site = sites[name]
        own = {leaf: leaves[f"{name}.{leaf}"] for leaf in (site.weight, site.bias) if leaf}
        change = lambda phi, own=own, site=site: method.change(phi, own, site)
        made = change(mine) if origin is None else _expanded(change, origin[name], mine)
        found |= {f"{name}.{leaf}": value for leaf, value in made.items()}
    return vectors.TaskVector(tree.unflatten(found))


def merged(method: Method, theta0: Any, phi: Any, sites: dict[str, Site], *, phi0: Any = None) -> Any:
    """θ0 with the adapters folded into its weights: a plain model that gives the same outputs."""
    return vectors.add(theta0, dense(method, theta0, phi, sites, phi0=phi0))


def as_lora(phi0: Any, phi: Any) -> Any:
    """The LoRA weights that compute what L-LoRA by module does: A of φ0 and B of φ. ValueError where B0 is not zero."""
    method = Lora()
    first, last = modules(phi0, method), modules(phi, method)
    a, b = Lora.parts
    if moved := [name for name, leaves in first.items() if jnp.any(leaves[b] != 0)]:
        raise ValueError(f"B is not zero at the start in {tree.listing(moved)}: what is linearised there is a sum of "
                         "two products; export it by `dense`")
    return tree.unflatten({f"{name}.{part}": (first if part == a else last)[name][part]
                           for name in last for part in (a, b)})


def _expanded(change, phi0, phi):
    value, slope = jax.jvp(change, (phi0,), (tangent.difference(phi, phi0),))
    return jax.tree.map(jnp.add, value, slope)
