"""Networks with adapters, without a change to their code: an interceptor adds to what the adapted modules return.

    adapted     f(x; θ0, φ)
    linearised  scope "module": each adapted module m is m(h; φ0) + ∇m(h; φ0)·(φ − φ0), the network stays as it is
                scope "network": f(x; φ0) + ∇f(x; φ0)·(φ − φ0)

Partial linearisation: Tang et al., 2024, arXiv:2310.04742. Its equation is that of the network; the authors' code
linearises module by module, which is the default here too: it costs as little as LoRA and merges into the weights.
"""
import functools
import zlib
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from tvjax import tangent, tree
from tvjax.adapters.methods import Method, Module
from tvjax.adapters.sites import Site, matching, path

SCOPES = ("module", "network")


def start(method: Method, sites: dict[str, Site], *, seed: int = 42) -> dict[str, Any]:
    """φ0: the weights of the adapters before training, the same for all tasks that share the seed.

    sites: `find(apply, theta0, x)`. A module's weights depend on the seed and on its path alone, not on which others
    are adapted. ValueError where `targets` match nothing or a rank is above that of a matrix.
    """
    chosen = matching(sites, method.targets, method.fits, method.what)
    root = jax.random.key(seed)
    of = lambda name: jax.random.fold_in(root, zlib.crc32(name.encode()))
    return tree.unflatten({f"{name}.{part}": leaf for name, site in chosen.items()
                           for part, leaf in method.start(of(name), site, name).items()})


@functools.cache
def adapted(apply: Callable, method: Method) -> Callable:
    """(theta0, phi, *inputs, key=None) -> what `apply(theta0, *inputs)` returns with the adapters φ in place.

    key: of the dropout, for training; without one there is none.
    """
    def run(theta0, phi, *inputs, key=None, **more):
        return _attached(apply, method, theta0, phi, None, inputs, key, more)
    return run


@functools.cache
def linearised(apply: Callable, method: Method, scope: str = "module") -> Callable:
    """(theta0, phi0, phi, *inputs, key=None) -> the output of the network linearised in φ at φ0.

    scope: "module" or "network", see the head of this module; the dropout is inside of the derivative.
    """
    if scope not in SCOPES:
        raise ValueError(f"scope is 'module' or 'network'; got {scope!r}")

    def by_module(theta0, phi0, phi, *inputs, key=None, **more):
        return _attached(apply, method, theta0, phi, phi0, inputs, key, more)

    def by_network(theta0, phi0, phi, *inputs, key=None, **more):
        model = lambda phi: adapted(apply, method)(theta0, phi, *inputs, key=key, **more)
        value, slope = tangent.push(model, phi0, tangent.difference(phi, phi0))
        return jax.tree.map(jnp.add, value, slope)
    return by_module if scope == "module" else by_network


@functools.cache
def in_phi(apply: Callable, method: Method) -> Callable:
    """(phi, theta0, *inputs) -> output: the adapted network as a function of φ, as `tangent.slopes` takes one."""
    def run(phi, theta0, *inputs, **more):
        return adapted(apply, method)(theta0, phi, *inputs, **more)
    return run


def modules(phi: Any, method: Method) -> dict[str, Module]:
    """{path of a module: its leaves of φ}; ValueError where a leaf is none of the method's."""
    found: dict[str, Module] = {}
    for name, leaf in tree.flatten(phi).items():
        part = next((part for part in method.parts if name.endswith(f".{part}") or name == part), None)
        if part is None:
            raise ValueError(f"phi holds {name}, which is no part of {type(method).__name__}: it has "
                             f"{', '.join(method.parts)}")
        found.setdefault(name.removesuffix(part).removesuffix("."), {})[part] = jnp.asarray(leaf)
    if short := [name for name, leaves in found.items() if len(leaves) < len(method.parts)]:
        raise ValueError(f"phi lacks some of {', '.join(method.parts)} at {tree.listing(short)}")
    return found


def _attached(apply, method: Method, theta0, phi, phi0, inputs, key, more):
    """The network with each adapted module expanded at φ0, or, where `phi0` is None, as it is."""
    at, origin = modules(phi, method), None if phi0 is None else modules(phi0, method)
    calls: dict[str, int] = {}

    def intercept(call, args, kwargs, context):
        name = path(context.module)
        if name not in at or context.method_name != "__call__":
            return call(*args, **kwargs)
        count = calls[name] = calls.get(name, 0) + 1
        mine = None if key is None else jax.random.fold_in(key, zlib.crc32(f"{name}/{count}".encode()))
        h = method.before(at[name], jnp.asarray(args[0]))  # linear in φ, so its own expansion
        y = call(h, *args[1:], **kwargs)
        add = lambda phi: method.after(phi, h, y, mine)
        return add(at[name]) if origin is None else _expanded(add, origin[name], at[name])

    with nn.intercept_methods(intercept):
        output = apply(theta0, *inputs, **more)
    if missed := [name for name in at if name not in calls]:
        raise ValueError(f"the network never called {tree.listing(missed)}, where phi has adapters: they are of "
                         "another model, or apply is compiled already (give it without jit)")
    return output


def _expanded(add: Callable, phi0: Module, phi: Module):
    value, slope = jax.jvp(add, (phi0,), (tangent.difference(phi, phi0),))
    return value + slope
