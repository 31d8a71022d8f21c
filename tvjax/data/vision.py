"""The vision tasks of the task-vector papers: sources, split rules, class names, prompt templates; ImageNet as control.

Suites of 8, 14 and 20 tasks: arXiv:2405.07813. 22 tasks: arXiv:2407.02880. EMNIST is two tasks, since one code base
takes letters and another digits, and their averages over 20 tasks cannot be compared. Class names are in the order of
the labels; those of large sets that an installed package lists are read from it.
"""
import dataclasses
import functools
import importlib.resources
import json
from typing import Any

from tvjax.data.prompts import TEMPLATES

_FIRST8 = ("cars", "dtd", "eurosat", "gtsrb", "mnist", "resisc45", "sun397", "svhn")
_NEXT6 = ("cifar100", "stl10", "flowers102", "pets", "pcam", "fer2013")
_LAST6 = ("emnist", "cifar10", "food101", "fashion_mnist", "rendered_sst2", "kmnist")
_ATLAS = (*_FIRST8, "cifar10", "cifar100", "imagenet", "stl10", "food101", "caltech101", "caltech256", "aircraft",
          "flowers102", "pets", "cub200", "voc2007", "country211", "ucf101")
CONTROL = "imagenet"
EMNIST = ("emnist_digits", "emnist_letters")


@dataclasses.dataclass(frozen=True)
class Task:
    """One row. `hub` is a data set's id on the Hugging Face hub, `config` its configuration; `tfds` a name there.

    rule: "tenth" holds out a tenth of the training set (`tvjax.data.splits`), "own" takes the published validation
      set, "train+val" trains on the published training and validation sets and holds a tenth out of them.
    splits: {our split: theirs}. sizes: (train, val, test) by the rule, where the papers state them.
    """
    name: str
    classes: int
    hub: str = ""
    config: str = ""
    tfds: str = ""
    columns: tuple[str, str] = ("image", "label")
    rule: str = "tenth"
    test: str = "test"
    val: str = ""
    sizes: tuple[int, int, int] | None = None
    folders: tuple[str, ...] = ()
    names: str = ""  # (data set):(name there), where the class names are read from
    note: str = ""

    @property
    def templates(self) -> tuple[str, ...]:
        """Prompts, each with one {} for the class name."""
        return TEMPLATES[self.name]()

    @property
    def classnames(self) -> tuple[str, ...]:
        """Class names in the order of the labels; ValueError where the package that lists them is not there."""
        return _classnames(self.name)


_TASKS = (
    Task("cars", 196, "tanganke/stanford_cars", tfds="cars196", sizes=(7330, 814, 8041), names="cars196"),
    Task("dtd", 47, "tanganke/dtd", rule="train+val", val="validation", tfds="dtd", sizes=(3384, 376, 1880),
         note="train on the official train and val splits and test on the official test split: where these are mixed, "
              "as in checkpoints of arXiv:2405.07813 before December 2024, its accuracy is 98 % instead of 79 %"),
    Task("eurosat", 10, "tanganke/eurosat", tfds="eurosat", rule="own", val="validation", sizes=(21600, 2700, 2700),
         folders=("AnnualCrop", "Forest", "HerbaceousVegetation", "Highway", "Industrial", "Pasture", "PermanentCrop",
                  "Residential", "River", "SeaLake"),
         note="a fixed split of 21,600, 2,700 and 2,700 images; where a source has no val, a tenth is held out"),
    Task("gtsrb", 43, "tanganke/gtsrb", sizes=(23976, 2664, 12630)),
    Task("mnist", 10, "ylecun/mnist", tfds="mnist", sizes=(55000, 5000, 10000)),
    Task("resisc45", 45, "tanganke/resisc45", tfds="resisc45", sizes=(17010, 1890, 6300)),
    Task("sun397", 397, "tanganke/sun397", tfds="sun397", sizes=(17865, 1985, 19850), names="sun397"),
    Task("svhn", 10, "ufldl-stanford/svhn", "cropped_digits", tfds="svhn_cropped", sizes=(68257, 5000, 26032)),
    Task("cifar100", 100, "tanganke/cifar100", tfds="cifar100", columns=("image", "fine_label")),
    Task("stl10", 10, "tanganke/stl10", tfds="stl10"),
    Task("flowers102", 102, "dpdl-benchmark/oxford_flowers102", tfds="oxford_flowers102", names="oxford_flowers102"),
    Task("pets", 37, "timm/oxford-iiit-pet", tfds="oxford_iiit_pet"),
    Task("pcam", 2, "1aurent/PatchCamelyon", tfds="patch_camelyon"),
    Task("fer2013", 7, "clip-benchmark/wds_fer2013", columns=("jpg", "cls")),
    Task("emnist_digits", 10, "", tfds="emnist/digits", note="as in arXiv:2405.07813; images are transposed there"),
    Task("emnist_letters", 26, "tanganke/emnist_letters", tfds="emnist/letters", note="as in FusionBench"),
    Task("cifar10", 10, "tanganke/cifar10", tfds="cifar10"),
    Task("food101", 101, "ethz/food101", tfds="food101", test="validation"),
    Task("fashion_mnist", 10, "zalando-datasets/fashion_mnist", tfds="fashion_mnist"),
    Task("rendered_sst2", 2, "nateraw/rendered-sst2"),
    Task("kmnist", 10, "tanganke/kmnist", tfds="kmnist"),
    Task("imagenet", 1000, "ILSVRC/imagenet-1k", tfds="imagenet2012", test="validation", names="open_clip",
         note="5,000 training images are for validation, the 50,000 of the validation set for testing"),
    Task("caltech101", 102, "", tfds="caltech101", names="caltech101"),
    Task("caltech256", 257), Task("aircraft", 100), Task("cub200", 200, "Donghyun99/CUB-200-2011"),
    Task("voc2007", 20, tfds="voc/2007"), Task("country211", 211), Task("ucf101", 101),
)
TASKS = {task.name: task for task in _TASKS}
ALIASES = {"stanford-cars": "cars", "stanford_cars": "cars", "oxford_flowers102": "flowers102", "flowers": "flowers102",
           "oxford-iiit-pet": "pets", "rendered-sst2": "rendered_sst2", "renderedsst2": "rendered_sst2",
           "fashionmnist": "fashion_mnist", "fgvcaircraft": "aircraft", "cub": "cub200", "pascalvoc": "voc2007"}


def suite(size: int, *, emnist: str = "emnist_digits") -> tuple[str, ...]:
    """The first 8, 14 or 20 tasks of arXiv:2405.07813, in its order, or the 22 of arXiv:2407.02880.

    emnist: which of the two is meant, digits as in that paper's code, or letters as in FusionBench.

    >>> suite(8)[:3], len(suite(14)), suite(20)[14]
    (('cars', 'dtd', 'eurosat'), 14, 'emnist_digits')
    """
    found = {8: _FIRST8, 14: _FIRST8 + _NEXT6, 20: _FIRST8 + _NEXT6 + _LAST6, 22: _ATLAS}
    if size not in found:
        raise ValueError(f"no suite of {size} vision tasks; there are suites of {', '.join(map(str, found))}")
    if emnist not in EMNIST:
        raise ValueError(f"emnist is {' or '.join(EMNIST)}; got {emnist!r}")
    return tuple(emnist if name == "emnist" else name for name in found[size])


def task(name: str) -> Task:
    """The task of that name, of any of its usual names; ValueError with the nearest one where there is none."""
    import difflib

    key = ALIASES.get(name.lower(), name.lower())
    if key == "emnist":
        raise ValueError(f"emnist is two tasks, {' and '.join(EMNIST)}: papers mean different ones, so say which")
    if key not in TASKS:
        near = difflib.get_close_matches(key, [*TASKS, *ALIASES], 1)
        raise ValueError(f"no vision task {name!r}; " + (f"did you mean {near[0]!r}?" if near else
                                                         f"there are {', '.join(TASKS)}"))
    return TASKS[key]


@functools.cache
def _listed() -> dict[str, list[str]]:
    return json.loads((importlib.resources.files("tvjax.data") / "classnames.json").read_text(encoding="utf-8"))


@functools.cache
def _classnames(name: str) -> tuple[str, ...]:
    row = TASKS[name]
    if row.names == "open_clip":
        found = _of_open_clip().IMAGENET_CLASSNAMES
    elif row.names:
        import tensorflow_datasets as tfds
        features: Any = tfds.builder(row.names).info.features
        found = [_words(one) for one in features["label"].names]
    else:
        found = _listed()[name]
    if len(found) != row.classes:
        raise ValueError(f"{name} has {row.classes} classes, but {row.names} lists {len(found)}")
    return tuple(found)


def _of_open_clip():
    try:
        from open_clip import zero_shot_metadata
    except ImportError:
        raise ValueError("the class names and prompts of imagenet are those that open_clip lists: "
                         "pip install open_clip_torch") from None
    return zero_shot_metadata


def _words(name: str) -> str:
    """A class as a data set names it, in words.

    >>> _words("/a/apartment_building/outdoor"), _words("airplanes")
    ('apartment building outdoor', 'airplanes')
    """
    parts = name[3:] if name[:1] == "/" and name[2:3] == "/" else name
    return parts.replace("/", " ").replace("_", " ")
