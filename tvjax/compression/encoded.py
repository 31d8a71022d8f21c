"""Encoded task vectors on disk, for any codec: `codec.json`, what all tasks share, and a file for each task.

Arrays are safetensors under the paths they have in the state; how they hang together (packed bits, codes, triplets …)
stands in each file's metadata. A task that comes later is a file more: nothing else is rewritten. What is read back
decodes to the same bits. TALL-masks on checkpoints too large for memory have a store of their own, `compression.store`.
"""
import dataclasses
import json
import os
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import checkpoints, tree, vectors
from tvjax.compression import bits, layout, lowrank, quantised, sparse
from tvjax.compression.codec import Codec, State, count_bits
from tvjax.compression.registry import build_codec

INDEX, SHARED, TASKS = "codec.json", "shared.safetensors", "tasks"
FORMAT = 1
FIELDS = ("codec", "options", "built_for", "base", "shared", "tasks")
NODES: dict[str, Callable] = {cls.__name__: cls for cls in (
    bits.Bits, bits.Codes, lowrank.Triplets, quantised.Signed, quantised.Quantised, sparse.Sparse, sparse.Switches)}
NOTHING: Mapping[str, Any] = {}
EMPTY = {"nothing": np.zeros(0, np.uint8)}  # what a part without arrays holds: a file has at least one


class Encoded(NamedTuple):
    """An opened folder: where it is, and what its index says."""

    path: Path
    about: dict[str, Any]

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of its tasks."""
        return tuple(self.about["tasks"])

    @property
    def codec(self) -> Codec:
        """The codec that decodes what is there, and encodes a task more."""
        return build_codec(self.about["codec"], self.about["options"], tasks=self.about["built_for"])


def save(path: str | os.PathLike, taus: Sequence[Any], *, tasks: Sequence[str], codec: str,
         options: Mapping[str, Any] = NOTHING, base: str = "") -> Encoded:
    """Encodes task vectors by a codec of the registry and writes them into the new folder `path`.

    base: the content hash of θ0 (`checkpoints.content_hash`), which `load` can then be asked to check.

    >>> import tempfile
    >>> made = save(os.path.join(tempfile.mkdtemp(), "taus"), [{"w": jnp.array([1.0, -3.0])}], tasks=["a"],
    ...             codec="bitdelta")
    >>> load(made, "a")["w"].tolist()
    [2.0, -2.0]
    """
    coder = build_codec(codec, options, tasks=len(taus))
    return write(path, coder.encode(taus), tasks=tasks, codec=codec, options=options, base=base)


def write(path: str | os.PathLike, state: State, *, tasks: Sequence[str], codec: str,
          options: Mapping[str, Any] = NOTHING, base: str = "") -> Encoded:
    """Writes a state that a codec of this name made; the folder appears when all of it is there."""
    if len(tasks) != len(state.tasks) or len(set(tasks)) < len(tasks):
        raise ValueError(f"a state of {len(state.tasks)} tasks names them, each differently; got {list(tasks)}")
    build_codec(codec, options, tasks=len(tasks))
    with layout.new_folder(Path(path)) as folder:
        hash_ = _put(folder / SHARED, state.shared, {"tvjax": "encoded, shared"})
        (folder / TASKS).mkdir()
        lines = {task: _put_task(folder, task, part, hash_) for task, part in zip(tasks, state.tasks, strict=True)}
        _index(folder, {"codec": codec, "options": _plain(options), "built_for": len(tasks), "base": base,
                        "shared": hash_, "tasks": lines})
    return open_encoded(path)


def open_encoded(path: str | os.PathLike) -> Encoded:
    """The folder at `path`; ValueError with one sentence where it is none, broken, or of a newer version."""
    file = Path(path) / INDEX
    about = layout.said_by(file, f"{path} holds no encoded task vectors: it has no {INDEX}")
    if about.get("tvjax") != "encoded" or about.get("format") != FORMAT:
        raise ValueError(f"{file} is no index of encoded task vectors in format {FORMAT}, which this version reads")
    layout.check_fields(file, about, FIELDS)
    return Encoded(Path(path), about)


def load(encoded: Encoded | str | os.PathLike, task: str, *, base: str = "") -> Any:
    """The decoded task vector of one task; the files of others are not touched.

    base: the content hash of the θ0 that it is meant for. Raises ValueError for a task that is not there (and names
    the nearest one), a base that does not fit, and for files that are cut off or belong to another folder.
    """
    encoded = encoded if isinstance(encoded, Encoded) else open_encoded(encoded)
    if base and encoded.about["base"] and base != encoded.about["base"]:
        raise ValueError(f"{encoded.path} holds task vectors of the base {encoded.about['base'][:12]}; "
                         f"this one is {base[:12]}")
    state = State(shared(encoded), (own(encoded, task),))
    return encoded.codec.decode(state, 0)


def shared(encoded: Encoded) -> Any:
    """What all tasks share, as the codec made it."""
    return _take(encoded.path / SHARED, encoded.about["shared"])


def own(encoded: Encoded, task: str) -> Any:
    """One task's part, as the codec made it."""
    if task not in encoded.about["tasks"]:
        raise ValueError(f"{encoded.path} has no task {task!r}; {tree.did_you_mean(task, encoded.tasks)}")
    return _take(encoded.path / _file(task), encoded.about["tasks"][task], encoded.about["shared"])


def add(encoded: Encoded, task: str, tau: Any) -> Encoded:
    """One task more, against what the others share as it is; returns the folder opened anew."""
    if not task or task in encoded.about["tasks"]:
        raise ValueError(f"{encoded.path} has a task {task!r} already" if task else "a task needs a name")
    about = open_encoded(encoded.path).about
    part = encoded.codec.one(shared(encoded), tau, len(about["tasks"]))
    about["tasks"][task] = _put_task(encoded.path, task, part, about["shared"])
    _index(encoded.path, {name: about[name] for name in FIELDS})
    return open_encoded(encoded.path)


def sizes_of(encoded: Encoded) -> dict[str, Any]:
    """{"formula", "measured", "files"}: bytes of what is held, bits counted one by one, and those of all files."""
    parts = [shared(encoded), *(own(encoded, task) for task in encoded.tasks)]
    names = [INDEX, SHARED, *map(_file, encoded.tasks)]
    files = {name: (encoded.path / name).stat().st_size for name in names}
    return {"formula": sum(map(count_bits, parts)) / 8, "measured": sum(files.values()), "files": files}


# ---------------------------------------------------------------- files
def _file(task: str) -> str:
    return f"{TASKS}/{urllib.parse.quote(task, safe='')}.safetensors"


def _put_task(folder: Path, task: str, part: Any, shared: str) -> str:
    return _put(folder / _file(task), part, {"tvjax": "encoded, task", "task": task, "shared": shared})


def _put(path: Path, part: Any, metadata: Mapping[str, str]) -> str:
    """Writes the arrays of a part with how they hang together; returns their hash."""
    arrays: dict[str, np.ndarray] = {}
    form = json.dumps(_form(part, "", arrays), separators=(",", ":"))
    checkpoints.save(arrays or EMPTY, path, metadata={**metadata, "form": form}, max_shard_size="1000GB")
    return checkpoints.content_hash(arrays)


def _take(path: Path, hash_: str, shared: str = "") -> Any:
    if not path.is_file():
        raise ValueError(f"there is no file {path}, which the index promises")
    found = checkpoints.load(path)
    arrays = {name: x for name, x in {**tree.flatten(found.params), **found.buffers}.items() if name not in EMPTY}
    if checkpoints.content_hash(arrays) != hash_ or found.metadata.get("shared", "") != shared:
        raise ValueError(f"{path} does not belong to this folder: its content is not what the index names")
    return _built(json.loads(found.metadata["form"]), arrays)


def _index(folder: Path, about: Mapping[str, Any]) -> None:
    text = json.dumps({"tvjax": "encoded", "format": FORMAT, **about}) + "\n"
    checkpoints.replace({folder / INDEX: checkpoints.text_writer(text)})


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(value).tolist() if not isinstance(value, str) else value
            for name, value in options.items()}


# ---------------------------------------------------------------- forms
def _form(node: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
    """How a part of a state is built of arrays, as JSON holds it; the arrays go into `arrays` under their paths."""
    below = lambda name, child: _form(child, f"{path}/{name}" if path else name, arrays)
    if node is None:
        return None
    if isinstance(node, dict):
        kind = "vector" if isinstance(node, vectors.TaskVector) else "dict"
        return {kind: {name: below(name, child) for name, child in node.items()}}
    if type(node).__name__ in NODES:
        fields = dataclasses.fields(node)
        static = {field.name for field in fields if field.metadata.get("static")}
        return {"node": type(node).__name__,
                "static": {name: getattr(node, name) for name in static},
                "parts": {field.name: below(field.name, getattr(node, field.name)) for field in fields
                          if field.name not in static}}
    name = (path or "x").replace(".", "/")
    if name in arrays:
        raise ValueError(f"two arrays of this state would be called {name}")
    arrays[name] = np.asarray(jax.device_get(node))
    return {"array": name, "device": isinstance(node, jax.Array)}


def _built(form: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if form is None:
        return None
    if "array" in form:
        x = arrays[form["array"]]
        return jnp.asarray(x) if form["device"] else x[()] if x.ndim == 0 else x
    if "node" in form:
        static = {name: tuple(value) if isinstance(value, list) else value for name, value in form["static"].items()}
        parts = {name: _built(child, arrays) for name, child in form["parts"].items()}
        return NODES[form["node"]](**static, **parts)
    (kind, children), = form.items()
    made = {name: _built(child, arrays) for name, child in children.items()}
    return vectors.TaskVector(made) if kind == "vector" else made
