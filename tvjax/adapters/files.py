"""Adapters on disk as PEFT keeps them: adapter_config.json and adapter_model.safetensors; LoRA and (IA)³.

A third file, tvjax.json, tells what PEFT does not: the seed and the hash of φ0 and the hash of the base. It makes
φ − φ0 of several files comparable, and is not needed to read them.
"""
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tvjax import checkpoints, tree
from tvjax.adapters.attach import modules
from tvjax.adapters.methods import Lora, Method, Rescale
from tvjax.adapters.sites import Site
from tvjax.disk.loraconfig import read_lora_config

CONFIG, WEIGHTS, ABOUT = "adapter_config.json", "adapter_model.safetensors", "tvjax.json"
PREFIX = "base_model.model."


class Saved(NamedTuple):
    """What a folder holds: the method, its weights φ, and {seed, phi0, base, scope} as far as they are known."""

    where: str
    method: Method
    phi: Any
    about: Mapping[str, Any]


def save(folder: str | os.PathLike, method: Method, phi: Any, sites: dict[str, Site], *, model: str = "",
         phi0: Any = None, seed: int | None = None, base: str = "", scope: str = "") -> None:
    """Writes adapters where PEFT's `PeftModel.from_pretrained` reads them.

    model: the name or folder of the model that they belong to; base: the `content_hash` of its weights. scope: "" for
    adapters as they are, else how they were linearised: PEFT computes the same as scope "module" from
    `as_lora(phi0, phi)`.
    """
    folder = Path(folder)
    names = list(modules(phi, method))
    about = {"seed": seed, "phi0": checkpoints.content_hash(phi0) if phi0 is not None else "", "base": base,
             "scope": scope}
    flat = {f"{PREFIX}{name}": leaf for name, leaf in tree.flatten(phi).items()}
    checkpoints.replace({
        **checkpoints.writers(tree.unflatten(flat), folder / WEIGHTS),
        folder / CONFIG: checkpoints.text_writer(json.dumps(_config(method, names, sites, model), indent=2) + "\n"),
        folder / ABOUT: checkpoints.text_writer(json.dumps(about, indent=2) + "\n")})


def _config(method: Method, names: list[str], sites: dict[str, Site], model: str) -> dict[str, Any]:
    shared = {"base_model_name_or_path": model or None, "target_modules": names, "inference_mode": True,
              "task_type": None, "fan_in_fan_out": _turned(names, sites)}
    if isinstance(method, Lora):
        return {"peft_type": "LORA", "r": method.rank, "lora_alpha": method.alpha, "lora_dropout": method.dropout,
                "use_rslora": method.scaling == "root", "bias": "none", **shared}
    if isinstance(method, Rescale):
        ends = [name for name in names if re.search(method.feedforward, name)]
        return {"peft_type": "IA3", "feedforward_modules": ends, **shared}
    raise ValueError(f"PEFT has no {type(method).__name__} adapters; LoRA and (IA)³ are saved in its format")


def _turned(names: list[str], sites: dict[str, Site]) -> bool:
    kinds = {sites[name].turned for name in names}
    if len(kinds) > 1:
        raise ValueError("PEFT keeps one layout for all adapted modules, and these are of both, (out, in) and "
                         "(in, out): adapt one kind alone by `targets`")
    return kinds.pop()


def load(folder: str | os.PathLike) -> Saved:
    """The adapters in a folder, written here or by PEFT; ValueError where it holds another kind or several ranks."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} holds no {CONFIG}: it is no folder of adapters")
    kind = checkpoints.fields_of(folder / CONFIG).get("peft_type", "LORA")
    read = {"LORA": _lora, "IA3": _rescale}.get(kind)
    if read is None:
        raise ValueError(f"{folder} is an adapter of type {kind}; LORA and IA3 are read")
    method, phi = read(folder)
    about = checkpoints.fields_of(folder / ABOUT) if (folder / ABOUT).is_file() else {}
    modules(phi, method)
    return Saved(str(folder), method, phi, about)


def _lora(folder: Path):
    config, given = read_lora_config(folder / CONFIG), checkpoints.fields_of(folder / CONFIG)
    if config.ranks or config.alphas:
        raise ValueError(f"{folder} has other ranks or α for some modules, and one rank and α are read: merge it into "
                         "its base as a model (tvjax.disk does)")
    phi = _phi(folder)
    names = modules(phi, Lora())
    return Lora(config.rank, float(config.alpha), _any_of(names), float(given.get("lora_dropout", 0.0)),
                "root" if config.root else "rank"), phi


def _rescale(folder: Path):
    phi = _phi(folder)
    found = modules(phi, Rescale())
    ends = [name for name, leaves in found.items() if leaves["ia3_l"].shape[0] == 1]
    return Rescale(_any_of(found), _any_of(ends) if ends else r"(?!)"), phi


def _phi(folder: Path) -> Any:
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder} has an {CONFIG} but no {WEIGHTS}")
    flat = tree.flatten(checkpoints.load(folder / WEIGHTS).params)
    return tree.unflatten({name.removeprefix(PREFIX): leaf for name, leaf in flat.items()})


def _any_of(names) -> str:
    return f"^({'|'.join(re.escape(name) for name in names)})$"


def same_start(adapters: Sequence[Saved]) -> None:
    """Raises unless all adapters began at one φ0 on one base, which is what makes their differences add up."""
    first = adapters[0]
    for one in adapters:
        if not one.about.get("phi0"):
            raise ValueError(f"{one.where} doesn't tell the φ0 it began at (no {ABOUT}): give it as a dense task "
                             "vector, or merge φ itself")
    for other in adapters[1:]:
        for field, what in (("base", "another base"), ("phi0", "another φ0")):
            if other.about.get(field) != first.about.get(field):
                seeds = f" (seeds {first.about.get('seed')} and {other.about.get('seed')})" if field == "phi0" else ""
                raise ValueError(f"{other.where} began at {what} than {first.where}{seeds}: φ − φ0 of the two can't be "
                                 "added; train both from one seed, or merge their dense task vectors")
