"""The restricted reader of PyTorch's pickles: dictionaries and descriptions of tensors are built, nothing else is.

No code in a pickle runs, and nothing of torch is imported: the few names that a state_dict needs stand for objects of
this module, without attributes that a pickle could set; any other name is refused.
"""
import io
import pickle
import pickletools
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

WHAT = "PyTorch file"
WAY = "load it with torch and save its state_dict as safetensors"
KINDS = {"float32": np.dtype(np.float32), "float64": np.dtype(np.float64), "float16": np.dtype(np.float16),
         "bfloat16": np.dtype(ml_dtypes.bfloat16), "int64": np.dtype(np.int64), "int32": np.dtype(np.int32),
         "int16": np.dtype(np.int16), "int8": np.dtype(np.int8), "uint8": np.dtype(np.uint8),
         "bool": np.dtype(np.bool_)}
STORAGES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
            "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"}


class Kind(NamedTuple):
    """A dtype, as something that a pickle cannot change."""

    name: str


class Storage(NamedTuple):
    key: str
    kind: Kind
    entries: int


class Tensor(NamedTuple):
    """A tensor as a pickle describes it: a storage, where in it it begins, sizes and strides in entries."""

    storage: Storage
    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Rebuild:
    """torch._utils._rebuild_tensor_v2 for `Tensor`; without attributes that a pickle could set."""

    __slots__ = ()

    def __call__(self, storage, begin, shape, strides, *rest):
        made = Tensor(storage, begin, tuple(shape), tuple(strides))
        counts = (begin, *made.shape, *made.strides)
        if not isinstance(storage, Storage) or not all(type(n) is int and 0 <= n < 1 << 62 for n in counts):
            raise pickle.UnpicklingError("a tensor of no storage, or of sizes that cannot be")
        if len(made.shape) != len(made.strides) or len(made.shape) > 64:
            raise pickle.UnpicklingError("a tensor with other strides than sizes")
        return made


class _Parameter:
    """torch._utils._rebuild_parameter: the tensor itself."""

    __slots__ = ()

    def __call__(self, data, *rest):
        return data


ADMITTED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _Rebuild(),
    ("torch._utils", "_rebuild_parameter"): _Parameter(),
    **{("torch", f"{name}Storage"): Kind(kind) for name, kind in STORAGES.items()},
    **{("torch", kind): Kind(kind) for kind in KINDS},
}


class Refused(ValueError):
    """Something in a pickle that is no tensor."""


class Restricted(pickle.Unpickler):
    """An unpickler that knows what `ADMITTED` holds, and nothing else; nothing of torch is imported."""

    def __init__(self, file: io.BytesIO, path: Path):
        super().__init__(file)
        self.path = path

    def find_class(self, module, name):
        if (module, name) not in ADMITTED:
            what = f"{module}.{name}".replace("\n", " ")[:120]
            raise Refused(f"{self.path} holds a pickled {what}: only tensors are read, and no code is run ({WAY}, "
                          "if you trust it)")
        return ADMITTED[module, name]

    def persistent_load(self, pid):
        fine = isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage"
        if not fine or type(pid[1]) is not Kind or type(pid[2]) is not str or type(pid[4]) is not int:
            raise pickle.UnpicklingError("a reference to something other than a storage")
        return Storage(pid[2], pid[1], pid[4])


def broken(path: Path, why: Any) -> ValueError:
    return ValueError(f"{path} is not a whole {WHAT}: {' '.join(str(why).split())[:200]}")


def unpickled(path: Path, data: bytes) -> Any:
    """What a data.pkl describes: dictionaries of `Tensor`; ValueError for anything else in it."""
    try:
        for code, number, _ in pickletools.genops(data):  # a memo's place decides how much memory it takes
            if code.name in ("PUT", "LONG_BINPUT") and isinstance(number, int) and number > len(data):
                raise pickle.UnpicklingError("a memo larger than the file")
        return Restricted(io.BytesIO(data), path).load()
    except Refused:
        raise
    except Exception as error:  # broken pickles raise whatever the broken step raises
        raise broken(path, f"{type(error).__name__} in data.pkl, {error}") from None
