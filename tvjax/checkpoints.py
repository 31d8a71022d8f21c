"""Trees on disk: safetensors files whose keys are the dotted paths of the leaves, bit for bit in both directions.

A checkpoint is `params` (floating-point leaves, a nested dict), `buffers` (integers and flags, a flat dict, untouched)
and `metadata`. Leaves are read as numpy arrays. The state of a training run in progress is `tvjax.state`'s matter.
"""
import hashlib
import json
import os
import re
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
import safetensors
import safetensors.numpy

from tvjax import tree
from tvjax.state import latest_step, restore_state, save_state

__all__ = ["Checkpoint", "check_finite", "content_hash", "fields_of", "latest_step", "load", "load_task_vector",
           "restore_state", "save", "save_state", "save_task_vector"]

# What safetensors writes and reads back through numpy; float8 it writes only.
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16",
          "uint8", "bool", "complex64")
NAME = "model.safetensors"
Writer = Callable[[Path], None]
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Checkpoint(NamedTuple):
    params: dict[str, Any]
    buffers: dict[str, np.ndarray]
    metadata: dict[str, str]


def load(path: str | os.PathLike) -> Checkpoint:
    """The checkpoint at `path`: a .safetensors file, a folder with model.safetensors, or a shard index (.json)."""
    files, promised = _files(Path(path))
    flat: dict[str, np.ndarray] = {}
    metadata: dict[str, str] = {}
    for file in files:
        tensors, about = _read(file)
        twice = sorted(set(tensors) & set(flat))
        if twice:
            raise ValueError(f"{file} holds {tree.listing(twice)} once more than another shard of {path}.")
        flat.update(tensors)
        metadata.update(about)
    missing = sorted(promised - set(flat))
    if missing:
        raise ValueError(f"The index {path} promises {tree.listing(missing)}, but no shard holds it.")
    return split(flat, metadata)


def split(flat: Mapping[str, np.ndarray], metadata: dict[str, str]) -> Checkpoint:
    """The flat content of a file as a checkpoint: floats to `params`, nested; the rest to `buffers`, as it is."""
    floats = {name: leaf for name, leaf in flat.items() if jax.numpy.issubdtype(leaf.dtype, np.inexact)}
    return Checkpoint(nest(floats), {name: leaf for name, leaf in flat.items() if name not in floats}, metadata)


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts from dotted names; an error where a name is a leaf and a folder of other leaves at once."""
    for name in flat:
        parts = name.split(".")
        for i in range(1, len(parts)):
            if ".".join(parts[:i]) in flat:
                raise ValueError(f"{'.'.join(parts[:i])} is a leaf and also the beginning of {name}; "
                                 "a tree can't hold both.")
    return tree.unflatten(dict(flat))


def _files(path: Path) -> tuple[list[Path], set[str]]:
    """The files to read, and the names that an index promises."""
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir())
        inside = next((name for name in (NAME, f"{NAME}.index.json") if name in names), None)
        if inside is None:
            raise ValueError(f"{path} holds no {NAME}; it holds {tree.listing(names, 5) or 'nothing'}.")
        path = path / inside
    if not path.exists() and path.with_name(f"{path.name}.index.json").exists():
        path = path.with_name(f"{path.name}.index.json")
    if not path.exists():
        raise ValueError(f"There is no file {path}{_near(path)}.")
    return _shards(path) if path.name.endswith(".json") else ([path], set())


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; the folder {path.parent} doesn't exist either"
    names = sorted(p.name for p in path.parent.iterdir())
    return f"; {tree.did_you_mean(path.name, names[:50])}" if names else f"; {path.parent} is empty"


def fields_of(path: Path) -> dict[str, Any]:
    """What a JSON file (a configuration, an index) says, by name; ValueError where it is no JSON or holds no fields."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not fields with names")
    return found


def _shards(index: Path) -> tuple[list[Path], set[str]]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted({os.fspath(shard) for shard in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not a shard index: it needs a weight_map from names to files.") from error
    for shard in shards:
        # By its letters, not by resolving: the hub's cache keeps files as links that lead out of the folder.
        if os.path.isabs(shard) or re.match("[A-Za-z]:", shard) or ".." in re.split(r"[/\\]", shard):
            raise ValueError(f"The index {index} points to {shard!r}, outside of its own folder.")
        if not (index.parent / shard).is_file():
            raise ValueError(f"The index {index} names {shard}, which is missing{_near(index.parent / shard)}.")
    return [index.parent / shard for shard in shards], set(weight_map)


def _read(file: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    try:
        with safetensors.safe_open(file, framework="numpy") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}, dict(opened.metadata() or {})
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}.") from error
    except AttributeError as error:  # numpy has no such dtype (float8)
        known = ", ".join(DTYPES)
        raise ValueError(f"{file} holds a dtype that numpy can't read; it reads {known}.") from error


def save(params: Mapping[str, Any], path: str | os.PathLike, *, buffers: Mapping[str, Any] = NOTHING,
         metadata: Mapping[str, Any] = NOTHING, max_shard_size: int | str = "5GB") -> None:
    """Writes `params` and `buffers` to a .safetensors file, or into the folder `path` as model.safetensors.

    Above `max_shard_size` bytes there are several files and an index beside them. Each file is written under a
    temporary name and then renamed; nothing is renamed before everything is written. Arrays may be of numpy or JAX.
    """
    replace(writers(params, path, buffers=buffers, metadata=metadata, max_shard_size=max_shard_size))


def _target(path: str | os.PathLike) -> Path:
    return Path(path) if Path(path).suffix == ".safetensors" else Path(path) / NAME


def writers(params: Mapping[str, Any], path: str | os.PathLike, *, buffers: Mapping[str, Any] = NOTHING,
            metadata: Mapping[str, Any] = NOTHING, max_shard_size: int | str = "5GB") -> dict[Path, Writer]:
    """What `save` writes, as {file: how to write it}: `replace` may carry it out together with other files."""
    from huggingface_hub import split_state_dict_into_shards_factory

    target, arrays, about = _target(path), _arrays(params, buffers), _texts(metadata)
    plan = split_state_dict_into_shards_factory(
        arrays, get_storage_size=lambda x: x.nbytes, max_shard_size=max_shard_size,
        filename_pattern=target.stem.replace("{", "{{").replace("}", "}}") + "{suffix}.safetensors")
    files = {target.with_name(name): _tensor_writer({key: arrays[key] for key in keys}, about)
             for name, keys in plan.filename_to_tensors.items()}
    if not plan.is_sharded:
        return {target: _tensor_writer(arrays, about)}
    index = {"metadata": {**plan.metadata, **metadata}, "weight_map": plan.tensor_to_filename}
    return {**files, target.with_name(f"{target.name}.index.json"): text_writer(json.dumps(index, indent=2))}


def replace(files: Mapping[Path, Writer]) -> None:
    """Writes each file under a temporary name beside its own, then renames all; on failure the old files stay."""
    temporary = {target: target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp") for target in files}
    try:
        for target, write in files.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            write(temporary[target])
        for target in files:
            os.replace(temporary[target], target)
        for index in (target for target in files if target.name.endswith(".safetensors.index.json")):
            # The single file that these shards overwrite; readers would prefer it to the index.
            index.with_name(index.name.removesuffix(".index.json")).unlink(missing_ok=True)
    finally:
        for leftover in temporary.values():
            leftover.unlink(missing_ok=True)


def _tensor_writer(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> Writer:
    return lambda file: safetensors.numpy.save_file(dict(arrays), file, metadata=metadata)


def text_writer(text: str) -> Writer:
    """How to write a text file, for `replace`."""
    def write(file: Path) -> None:
        file.write_text(text, encoding="utf-8")
    return write


def _arrays(params: Mapping[str, Any], buffers: Mapping[str, Any]) -> dict[str, np.ndarray]:
    flat, extra = tree.flatten(params), dict(buffers)
    twice = sorted(set(flat) & set(extra))
    if twice:
        raise ValueError(f"params and buffers both hold {tree.listing(twice)}.")
    return {name: _array(name, leaf) for name, leaf in {**flat, **extra}.items()}


def _array(name: str, leaf: Any) -> np.ndarray:
    """C-contiguous, native byte order: safetensors writes the wrong numbers for anything else, without a word."""
    if not hasattr(leaf, "dtype"):
        raise ValueError(f"{name} is a {type(leaf).__name__}; a checkpoint holds arrays only.")
    if leaf.dtype.name not in DTYPES:
        raise ValueError(f"{name} is of dtype {leaf.dtype.name}; a checkpoint holds {', '.join(DTYPES)}.")
    array = np.asarray(leaf)
    return np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")


def _texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    wrong = [f"{key}={value!r}" for key, value in metadata.items() if not isinstance(value, str)]
    if wrong:
        raise ValueError(f"metadata maps strings to strings; you gave {tree.listing(wrong)}.")
    return {**metadata, "format": "pt"}  # without it, transformers refuses the file


def save_task_vector(tau: Mapping[str, Any], path: str | os.PathLike, *, base: str = "",
                     metadata: Mapping[str, Any] = NOTHING) -> None:
    """Writes τ to a file that says what it is; `base` is the `content_hash` of the pretrained parameters."""
    save(tau, path, metadata={**metadata, "tvjax": "task_vector", "base": base})


def load_task_vector(path: str | os.PathLike) -> Checkpoint:
    """The task vector that `save_task_vector` wrote (τ is `params`, the base's hash in `metadata`)."""
    found = load(path)
    if found.metadata.get("tvjax") != "task_vector":
        raise ValueError(f"{path} holds a model, not a task vector; subtract the pretrained one first "
                         "(tvjax.vectors.task_vector).")
    return found


def content_hash(params: Mapping[str, Any]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, whatever the order of the dict and whoever holds the arrays.

    >>> content_hash({"a": np.ones(2), "b": np.zeros(1)}) == content_hash({"b": np.zeros(1), "a": np.ones(2)})
    True
    """
    digest = hashlib.sha256()
    for name, leaf in sorted(tree.flatten(params).items()):
        array = _array(name, leaf)
        digest.update(json.dumps([name, str(array.dtype), array.shape]).encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def check_finite(params: Mapping[str, Any]) -> None:
    """Raises a ValueError that names the first tensor, and the place in it, with a NaN or an infinity."""
    for name, leaf in tree.flatten(params).items():
        if tree.is_float(leaf):
            array = np.asarray(leaf)
            places = np.argwhere(~np.isfinite(array))
            if len(places):
                place = tuple(int(i) for i in places[0])
                raise ValueError(f"{name}{list(place)} is {array[place]}; {len(places)} of its {array.size} entries "
                                 "are not finite.")
