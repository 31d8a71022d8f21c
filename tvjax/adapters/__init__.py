"""Parameter-efficient fine-tuning on any Flax network of the library's kind, and its partial linearisation.

`sites = find(apply, theta0, x)`, `phi0 = start(Lora(), sites)`, then `adapted(apply, method)(theta0, phi, x)` or
`linearised(apply, method, scope)(theta0, phi0, phi, x)`. φ is a tree of named leaves: φ − φ0 is a task vector like any
other, and every merge works on it.
"""
from tvjax.adapters.attach import SCOPES, adapted, in_phi, linearised, modules, start
from tvjax.adapters.export import as_lora, dense, merged
from tvjax.adapters.files import Saved, load, same_start, save
from tvjax.adapters.methods import METHODS, Bias, Bottleneck, Lora, Method, Rescale, build
from tvjax.adapters.sites import Site, find

__all__ = [
    "Bias", "Bottleneck", "Lora", "METHODS", "Method", "Rescale", "SCOPES", "Saved", "Site", "adapted", "as_lora",
    "build", "dense", "find", "in_phi", "linearised", "load", "merged", "modules", "same_start", "save", "start",
]
