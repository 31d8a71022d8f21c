"""Where a vision task is read from: a local folder, the Hugging Face hub, or TFDS; the first that has it is taken.

A folder ROOT/TASK holds either images by split and class, ROOT/TASK/{train,val,test}/CLASS/*, or a data set saved by
`datasets` (`save_to_disk`). TFDS is a reader only: it needs a copy prepared with file_format="array_record" (or
"parquet"), which works without TensorFlow. Every source gives records by index, so that only what is wanted is decoded.
"""
import importlib.util
import io
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from tvjax.data.vision import Task

SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".webp", ".tif", ".tiff")


class Records(NamedTuple):
    """Examples of a split: `get(i)` decodes one to an RGB image, `where(i)` names it in an error."""
    labels: np.ndarray
    get: Callable[[int], Image.Image]
    where: Callable[[int], str]


class Source(NamedTuple):
    """`said` names what was taken, `names` the classes as the source calls them, () where it has numbers only."""
    said: str
    names: tuple[str, ...]
    splits: dict[str, Records]


def check(task: Task, roots: Sequence[str]) -> str:
    """Which source would be taken, found out without reading or downloading; ValueError that says what to put where."""
    for root in roots:
        if not os.path.isdir(root):
            raise ValueError(f"there is no folder {root} (sources)")
        if (folder := pathlib.Path(root, task.name)).is_dir():
            return str(folder)
    if task.hub and importlib.util.find_spec("datasets") and not offline():
        return f"hub {task.hub}"
    if task.tfds and _prepared(task):
        return f"tfds {task.tfds}"
    raise ValueError(missing(task, roots))


def missing(task: Task, roots: Sequence[str]) -> str:
    """The sentence about a task that no source at hand has."""
    root = pathlib.Path(roots[0] if roots else "FOLDER", task.name)
    ways = [f"put its images into {root}/{{train,test}}/CLASS/ and name the folder above in sources"]
    if task.hub:
        ways.append(f"save the hub's {task.hub} there with datasets' save_to_disk, or be online with "
                    "pip install datasets")
    if task.tfds:
        ways.append(f"prepare TFDS {task.tfds} with file_format='array_record'")
    return f"no source at hand for the task {task.name!r}: {'; or '.join(ways)}"


def offline() -> bool:
    on = lambda name: os.environ.get(name, "").upper() in ("1", "TRUE", "YES", "ON")
    return on("HF_HUB_OFFLINE") or on("HF_DATASETS_OFFLINE")


def open_source(task: Task, roots: Sequence[str]) -> Source:
    """The first source that has the task."""
    taken = check(task, roots)
    if taken == f"hub {task.hub}":
        return _hub(task)
    if taken == f"tfds {task.tfds}":
        return _tfds(task)
    folder = pathlib.Path(taken)
    saved = (folder / "dataset_dict.json").exists()
    return _saved(task, folder) if saved else _folder(task, folder)


def _folder(task: Task, folder: pathlib.Path) -> Source:
    parts = {SPLITS[path.name.lower()]: path for path in sorted(folder.iterdir())
             if path.is_dir() and path.name.lower() in SPLITS}
    if lacking := [split for split in ("train", "test") if split not in parts]:
        raise ValueError(f"{folder} has no folder {lacking[0]}: images lie in {folder}/{{train,test}}/CLASS/")
    names = tuple(sorted({path.name for part in parts.values() for path in part.iterdir() if path.is_dir()},
                         key=lambda name: (len(name), name) if name.isdigit() else (0, name)))
    return Source(f"folder {folder}", names, {split: _files(part, names) for split, part in parts.items()})


def _files(part: pathlib.Path, names: tuple[str, ...]) -> Records:
    found = [(path, names.index(kind.name)) for kind in sorted(part.iterdir()) if kind.is_dir()
             for path in sorted(kind.rglob("*")) if path.suffix.lower() in IMAGES]
    if not found:
        raise ValueError(f"{part} holds no images ({', '.join(IMAGES)}) in folders of classes")
    paths, labels = [path for path, _ in found], np.array([label for _, label in found])
    return Records(labels, lambda i: _decoded(paths[i], str(paths[i])), lambda i: str(paths[i]))


def _decoded(given: Any, where: str) -> Image.Image:
    """An RGB image from a path, bytes, an array, or what `datasets` gives."""
    try:
        if isinstance(given, dict):
            given = given.get("bytes") or given.get("path")
        if isinstance(given, np.ndarray):
            return Image.fromarray(given[..., 0] if given.ndim == 3 and given.shape[-1] == 1 else given).convert("RGB")
        if not isinstance(given, Image.Image):
            given = Image.open(io.BytesIO(given) if isinstance(given, bytes) else given)
        return given.convert("RGB")
    except (OSError, ValueError, SyntaxError, TypeError, AttributeError) as error:  # Pillow's own and PNG's kinds
        raise ValueError(f"{where} is no image that can be decoded ({error})") from None


def _saved(task: Task, folder: pathlib.Path) -> Source:
    return _of_datasets(task, datasets_package().load_from_disk(str(folder)), f"data set saved in {folder}")


def _hub(task: Task) -> Source:
    try:
        found = datasets_package().load_dataset(task.hub, task.config or None)
    except Exception as error:  # datasets, the hub and the network each raise kinds of their own
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(f"the hub gave no {task.hub} ({reason}); {missing(task, ())}") from None
    return _of_datasets(task, found, f"hub {task.hub}")


def datasets_package():
    try:
        import datasets
    except ImportError:
        raise ValueError("data sets of the Hugging Face hub need the package datasets: pip install 'tvjax[data]'"
                         ) from None
    return datasets


def _of_datasets(task: Task, found, said: str) -> Source:
    """Columns are checked, labels read whole, images left for `get`."""
    image, label = task.columns
    wanted = {"train": "train", "test": task.test, **({"val": task.val} if task.val in found else {})}
    if lacking := [theirs for theirs in wanted.values() if theirs not in found]:
        raise ValueError(f"{said} has no split {lacking[0]!r}; there are {', '.join(found)}")
    splits = {}
    for ours, theirs in wanted.items():
        part = found[theirs]
        if absent := [name for name in (image, label) if name not in part.column_names]:
            raise ValueError(f"{said}, {theirs}: no column {absent[0]!r}; there are {', '.join(part.column_names)}")
        where = lambda i, theirs=theirs: f"{said}, {theirs}, image {i}"
        get = lambda i, part=part, where=where: _decoded(part[int(i)][image], where(i))
        splits[ours] = Records(np.asarray(part[label][:]), get, where)
    return Source(said, tuple(getattr(found["train"].features[label], "names", None) or ()), splits)


def _prepared(task: Task) -> bool:
    """Whether TFDS has a prepared copy of the task that it can read without TensorFlow."""
    import tensorflow_datasets as tfds

    try:
        return bool(tfds.builder(task.tfds).info.splits)
    except Exception:  # a data set that needs TensorFlow to be built, or none of that name
        return False


def _tfds(task: Task) -> Source:
    import tensorflow_datasets as tfds

    builder: Any = tfds.builder(task.tfds)
    wanted = {"train": "train", "test": task.test, **({"val": task.val} if task.val in builder.info.splits else {})}
    try:
        found = {ours: builder.as_data_source(split=theirs) for ours, theirs in wanted.items()}
    except NotImplementedError:
        raise ValueError(f"the copy of TFDS {task.tfds} in {builder.data_dir} is of TFRecords, which need TensorFlow: "
                         "prepare it with file_format='array_record'") from None
    except (AssertionError, KeyError, ValueError) as error:  # no copy at hand, or one without this split
        raise ValueError(f"TFDS {task.tfds} cannot be read ({str(error).partition(chr(10))[0]}); "
                         f"{missing(task, ())}") from None
    names = builder.info.features["label"].names
    return Source(f"tfds {task.tfds} {builder.version}", tuple(names),
                  {ours: _of_tfds(part, f"tfds {task.tfds}, {ours}") for ours, part in found.items()})


def _of_tfds(part, said: str) -> Records:
    where = lambda i: f"{said}, image {i}"
    labels = np.array([int(part[i]["label"]) for i in range(len(part))])
    return Records(labels, lambda i: _decoded(part[int(i)]["image"], where(i)), where)
