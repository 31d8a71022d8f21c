"""Published model folders, of any family: configuration, weights, tokenizer and image processor, as transformers keeps
them.

What is particular to a family stands in its `Family`; reading and writing are the same code for all. Torch is needed
for none of it, except for old folders whose weights are only in a pickle (pytorch_model.bin).
"""
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tvjax.models.folders import PROCESSOR_FILES, TOKENIZER_FILES, find, model_type, other_module

Config = Any  # of transformers, or a dict where it knows none
Flat = dict[str, Any]


def _as_they_are(weights: Flat, config: Config) -> tuple[Flat, Flat]:
    return weights, {}


class Family(NamedTuple):
    """What a family's folders have of their own.

    kinds: {model_type: name of the configuration's class in transformers}.
    network: (config, names of the weights) -> the Flax module.
    init: (module, key) -> random parameters, whose names and shapes the weights must have.
    adopt: (weights, config) -> (weights under the module's names, buffers): prefixes, copies of tied tensors.
    constants: a regular expression for names of what all models have alike, such as causal masks: they are not read.
    optional: dotted beginnings of names that may be missing together, as a tower or a head.
    tokenizer, processor: the names of their classes in transformers; a processor may be made by a function instead.
    read_config, config_text: how the configuration is read from a folder and written, where transformers doesn't.
    weights, config_file: where they lie in a folder.
    extras: other files that go along when a folder is fetched or copied.
    """
    name: str
    kinds: Mapping[str, str]
    network: Callable[[Config, Collection[str]], Any]
    init: Callable[[Any, jax.Array], Mapping[str, Any]]
    adopt: Callable[[Flat, Config], tuple[Flat, Flat]] = _as_they_are
    optional: tuple[str, ...] = ()
    constants: str = ""
    tokenizer: str = ""
    processor: str | Callable[[Path], Any] = ""
    read_config: Callable[[Path], Config] | None = None
    config_text: Callable[[Config, Mapping[str, Any]], str] | None = None
    weights: str = "model.safetensors"
    pickle: str = "pytorch_model.bin"
    config_file: str = "config.json"
    extras: tuple[str, ...] = ()


class Pretrained(NamedTuple):
    """A model and all that belongs to it; tokenizer and processor are loaded when first used."""
    model: Any  # a Flax module, hashable
    params: dict[str, Any]
    config: Config
    tokenizer: Any
    processor: Any
    buffers: dict[str, Any]
    path: Path
    family: Family


class Lazy:
    """Stands for an object until the first call or attribute, when `load` makes it."""

    def __init__(self, load: Callable[[], Any]):
        self._load, self._made = load, None

    def _get(self) -> Any:
        if self._made is None:
            self._made = self._load()
        return self._made

    def __call__(self, *args, **kwargs) -> Any:
        return self._get()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._get(), name)


def from_pretrained(path_or_hub_id: str | os.PathLike, family: Family, *, revision: str | None = None) -> Pretrained:
    """The model in a folder, or of that name on the hub (from the local cache where HF_HUB_OFFLINE=1).

    Leaves keep the file's dtype. Errors: a ValueError that says what is missing, strange or of the wrong shape.
    """
    folder = find(path_or_hub_id, revision, family)
    config = (family.read_config or _config(family))(folder)
    weights, buffers = _weights(folder, family, config)
    model = family.network(config, weights.keys())
    from tvjax import checkpoints

    params = checkpoints.nest(weights)
    check(params, model, family, f"The weights in {folder}", f"its {family.config_file}")
    return Pretrained(model, jax.tree.map(jnp.asarray, params), config,
                      Lazy(lambda: _tokenizer(folder, family)), Lazy(lambda: _processor(folder, family)),
                      buffers, folder, family)


def _config(family: Family) -> Callable[[Path], Config]:
    def read(folder: Path) -> Config:
        import transformers

        kind = model_type(folder)
        if kind is None or kind not in family.kinds:
            raise ValueError(f"{folder / 'config.json'} says model_type {kind!r}; this reads "
                             f"{' and '.join(family.kinds)}{other_module(kind)}.")
        return getattr(transformers, family.kinds[kind]).from_pretrained(folder)
    return read


def _weights(folder: Path, family: Family, config: Config) -> tuple[Flat, Flat]:
    """(weights under the module's names, all else)."""
    from tvjax import checkpoints, tree

    stem, name = family.weights.removesuffix(".safetensors"), family.weights
    if (folder / family.pickle).exists() and not any(folder.glob(f"{stem}*.safetensors")):
        flat = _torch_weights(folder / family.pickle)
        params, buffers, _ = checkpoints.split(flat, {"format": "pt"})
    else:
        params, buffers, _ = checkpoints.load(folder if name == "model.safetensors" else folder / name)
    known = lambda name: bool(family.constants) and re.search(family.constants, name) is not None
    weights, more = family.adopt({n: x for n, x in tree.flatten(params).items() if not known(n)}, config)
    return weights, {**{n: x for n, x in buffers.items() if not known(n)}, **more}


def _torch_weights(file: Path) -> Flat:
    try:
        import torch
    except ImportError as error:
        raise ValueError(f"{file.parent} holds its weights only as {file.name}, which needs torch to read; install "
                         "torch, or name a revision that has model.safetensors.") from error
    state = torch.load(file, map_location="cpu", weights_only=True)
    return {name: _numpy(x, torch) for name, x in state.items()}


def _numpy(tensor: Any, torch: Any) -> Any:
    if tensor.dtype == torch.bfloat16:  # torch gives numpy no bfloat16, so its bits travel as integers
        return tensor.contiguous().view(torch.uint16).numpy().view(jnp.bfloat16)
    return tensor.numpy()


def check(params: Mapping[str, Any], model: Any, family: Family, what: str, whose: str) -> None:
    """Optional parts may be missing whole; nothing else may be, and nothing may be strange or of another shape."""
    from tvjax import tree

    given = tree.flatten(params)
    expected = tree.flatten(jax.eval_shape(lambda key: family.init(model, key), jax.random.key(0)))
    for part in family.optional:
        inside = [name for name in expected if f"{name}.".startswith(f"{part}.")]
        if not any(name in given for name in inside):
            expected = {name: leaf for name, leaf in expected.items() if name not in inside}
    faults = tree.differences(given, expected, names=("the weights", "the configuration"), dtypes=False)
    if faults:
        raise ValueError(f"{what} don't fit {whose}: {'; '.join(faults)}.")


def _tokenizer(folder: Path, family: Family) -> Any:
    if not any((folder / name).exists() for name in ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model")):
        raise ValueError(f"{folder} holds no tokenizer (tokenizer.json, or the vocabulary's own files); "
                         "for text take the one of the model that it was tuned from.")
    return _made(family.tokenizer, folder, "tokenizer")


def _processor(folder: Path, family: Family) -> Any:
    if not family.processor:
        raise ValueError(f"{folder} holds a model of text, which has no image processor.")
    if not isinstance(family.processor, str):
        return family.processor(folder)
    if not any((folder / name).exists() for name in PROCESSOR_FILES):
        raise ValueError(f"{folder} holds no {PROCESSOR_FILES[0]}; "
                         "take the image processor of the whole model that it was tuned from.")
    return _made(family.processor, folder, "image processor")


def _made(kind: str, folder: Path, what: str) -> Any:
    import transformers

    try:
        return getattr(transformers, kind).from_pretrained(folder)
    except Exception as error:  # readers of JSON, of SentencePiece and of transformers raise kinds of their own
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(f"The {what} in {folder} can't be read as a {kind}: {reason}.") from error


def save_pretrained(pretrained: Pretrained, params: Mapping[str, Any], path: str | os.PathLike) -> None:
    """Writes a folder that transformers and `from_pretrained` load: configuration, weights, tokenizer, image processor.

    `params` may be part of the tree at its top level (a tower, a head); the rest is then `pretrained`'s. All files are
    written before any is renamed.
    """
    from tvjax import checkpoints

    family, folder, whole = pretrained.family, Path(path), {**pretrained.params, **params}
    check(whole, pretrained.model, family, f"The weights for {folder}", f"its {family.config_file}")
    copied = [name for name in (*TOKENIZER_FILES, *PROCESSOR_FILES, *family.extras)
              if (pretrained.path / name).exists()]
    files = {folder / name: _copier(pretrained.path / name) for name in copied}
    text = (family.config_text or config_text)(pretrained.config, whole)
    files[folder / family.config_file] = checkpoints.text_writer(text)
    files.update(checkpoints.writers(whole, folder / family.weights, buffers=pretrained.buffers))
    checkpoints.replace(files)


def _copier(source: Path) -> Callable[[Path], None]:
    def write(target: Path) -> None:
        shutil.copyfile(source, target)
    return write


def config_text(config: Config, params: Mapping[str, Any]) -> str:
    """A configuration of transformers as its file, saying the dtype of the weights."""
    about = json.loads(config.to_json_string())
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(params)}
    if len(dtypes) == 1:  # transformers loads into the dtype that the configuration names
        about["dtype"] = dtypes.pop()
    return json.dumps(about, indent=2, sort_keys=True) + "\n"
