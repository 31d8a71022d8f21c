"""PyTorch's files (.bin, .pt, .pth), read without running what is pickled in them, and without torch.

A file of torch.save since version 1.6 is a zip: data.pkl tells names, shapes and strides, data/0, data/1 … are the
storages. `unpickling` reads data.pkl; tensors are read from the storages in pieces.
"""
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tvjax import tree
from tvjax.disk.headers import LIMIT, Index, read_index
from tvjax.disk.readers import OPENERS
from tvjax.disk.strided import Span, Strided, data_begin, members
from tvjax.disk.unpickling import KINDS, WAY, WHAT, Tensor, broken, unpickled

WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "diffusion_pytorch_model.bin",
           "open_clip_pytorch_model.bin")
SUFFIXES = (".bin", ".pt", ".pth")
WRAPPED = ("state_dict", "model_state_dict", "model")  # where training scripts put the weights


def read_spans(path: Path) -> dict[str, Span]:
    """Where the tensors of one file lie; checked against the file's size."""
    with open(path, "rb") as file:
        start = file.read(4)
    if start != b"PK\3\4":
        raise ValueError(f"{path} is no zip, so no file of torch.save since PyTorch 1.6: load it with torch and save "
                         "it again with torch.save, or as safetensors")
    found = members(path, WHAT)
    pickled = [name for name in found if name.rpartition("/")[2] == "data.pkl"]
    if len(pickled) != 1:
        raise broken(path, "it has no data.pkl, or several")
    root = pickled[0].removesuffix("data.pkl")
    if f"{root}constants.pkl" in found:
        raise ValueError(f"{path} is a TorchScript archive, which holds code: load it with torch.jit.load and save its "
                         "state_dict as safetensors")
    if f"{root}byteorder" in found and _content(path, found[f"{root}byteorder"]) != b"little":
        raise ValueError(f"{path} was saved on a big-endian machine: {WAY}")
    tensors = _tensors(path, unpickled(path, _content(path, found[pickled[0]])))
    return {name: _span(path, name, tensor, found, root) for name, tensor in tensors.items()}


def _content(path: Path, info: zipfile.ZipInfo) -> bytes:
    if info.file_size > LIMIT:
        raise broken(path, f"its {info.filename[:100]} has {info.file_size:,} bytes")
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(info)
    except Exception as error:  # zlib's, zipfile's
        raise broken(path, error) from None


def _tensors(path: Path, held: Any) -> dict[str, Tensor]:
    """{name: tensor} of what was saved: a state_dict, or a dictionary that holds one under a usual name."""
    inside = [name for name in WRAPPED if isinstance(held, Mapping) and isinstance(held.get(name), Mapping)]
    held = held[inside[0]] if inside else held
    if not isinstance(held, Mapping):
        raise ValueError(f"{path} holds one {type(held).__name__}, not a dictionary of tensors: save a state_dict")
    for name, value in held.items():
        if type(name) is not str or type(value) is not Tensor:
            kind = type(value).__name__.lower()
            raise ValueError(f"{path} holds {str(name)[:100]!r} of type {kind}: only tensors are read (save "
                             "a state_dict)")
    return dict(held)


def _span(path: Path, name: str, tensor: Tensor, found: Mapping[str, zipfile.ZipInfo], root: str) -> Span:
    storage, dtype = tensor.storage, KINDS[tensor.storage.kind.name]
    info = found.get(f"{root}data/{storage.key}")
    if info is None or info.compress_type != zipfile.ZIP_STORED:
        raise broken(path, f"the storage of {name} is missing or compressed")
    begin = data_begin(path, info, WHAT) + tensor.begin * dtype.itemsize
    span = Span(path, begin, dtype, tensor.shape, tensor.strides)
    if (tensor.begin + span.reach) * dtype.itemsize > info.file_size or span.size >= 1 << 62:
        raise broken(path, f"{name} reaches beyond its storage")
    return span


def open_pickle(path: Path, where: str) -> Strided:
    """The checkpoint in one file, or in the shards of a pytorch_model.bin.index.json."""
    index = read_index(path) if path.suffix == ".json" else Index([path], {})
    spans: dict[str, Span] = {}
    for shard in index.shards:
        more = read_spans(shard)
        if twice := [name for name in more if name in spans]:
            raise ValueError(f"{shard} holds {tree.listing(twice)} once more than another shard of {path}")
        spans |= more
    if missing := [name for name in index.where if name not in spans]:
        raise ValueError(f"the index {path} promises {tree.listing(missing)}, but no shard holds it")
    return Strided(path, where, spans)


def pickle_file(path: Path) -> Path | None:
    """The PyTorch file or index that `path` is or holds."""
    if path.is_dir():
        named = next((path / name for name in WEIGHTS if (path / name).is_file()), None)
        alone = [file for suffix in SUFFIXES for file in path.glob(f"*{suffix}")]
        return named or (alone[0] if len(alone) == 1 else None)
    return path if path.name.endswith((*SUFFIXES, ".bin.index.json")) and path.is_file() else None


OPENERS.append((pickle_file, open_pickle))
