"""Published fine-tuned checkpoints as pools: base, experts by task, and the accuracies that their authors print.

Sources: the collections of FusionBench (arXiv:2406.03280) on the Hugging Face hub, as its documentation tabulates them.
An expert directory holds the vision tower alone; text tower, projection and heads are the base's.
"""
import dataclasses

TA8 = ("sun397", "cars", "resisc45", "eurosat", "svhn", "gtsrb", "mnist", "dtd")  # its order: "the first k tasks"
TALL14 = (*TA8, "flowers102", "pcam", "fer2013", "pets", "stl10", "cifar100")
TALL20 = (*TALL14, "cifar10", "food101", "fashion_mnist", "emnist_letters", "kmnist", "rendered_sst2")
GLUE = ("cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb")
ON_HUB = {"cars": "stanford-cars", "flowers102": "oxford_flowers102", "pets": "oxford-iiit-pet",
          "rendered_sst2": "rendered-sst2"}


@dataclasses.dataclass(frozen=True)
class Pool:
    """`base` and `expert` are hub ids, the latter with {task}. `finetuned` and `pretrained`: accuracies in percent of
    each expert on its own task and of the base, in the order of `tasks`; `merged`: averages of merges of the first 8.
    """
    base: str
    expert: str
    tasks: tuple[str, ...]
    finetuned: tuple[float, ...] = ()
    pretrained: tuple[float, ...] = ()
    merged: tuple[tuple[str, float], ...] = ()

    def id_of(self, task: str) -> str:
        """The hub id of an expert."""
        return self.expert.format(task=ON_HUB.get(task, task))


_B32 = ("simple average", 66.5), ("fisher", 70.6), ("regmean", 82.4), ("task_arithmetic", 68.0), ("ties", 72.2), (
    "adamerging", 82.6)
_L14 = ("simple average", 80.0), ("fisher", 80.3), ("regmean", 90.4), ("task_arithmetic", 80.7), ("ties", 84.0), (
    "adamerging", 91.0)
POOLS = {
    "vit_b_32": Pool(
        "openai/clip-vit-base-patch32", "tanganke/clip-vit-base-patch32_{task}", TALL20,
        (74.86, 78.52, 95.14, 99.07, 97.27, 98.91, 99.58, 79.68, 88.55, 87.96, 71.61, 92.45, 97.55, 88.38, 97.60, 88.41,
         94.75, 95.62, 98.23, 71.28),
        (63.18, 59.58, 60.27, 45.00, 31.63, 32.53, 48.26, 44.20, 66.45, 60.64, 41.25, 83.32, 97.12, 63.72, 89.83, 82.36,
         63.01, 11.98, 9.95, 58.65), _B32),
    "vit_b_16": Pool("openai/clip-vit-base-patch16", "tanganke/clip-vit-base-patch16_{task}", TALL20,
                     merged=(("task_arithmetic", 77.1), ("ties", 77.5), ("adamerging", 85.0))),
    "vit_l_14": Pool("openai/clip-vit-large-patch14", "tanganke/clip-vit-large-patch14_{task}", TALL20, merged=_L14),
    "flan_t5_base": Pool("google/flan-t5-base", "tanganke/flan-t5-base_glue-{task}", GLUE,
                         (74.98, 83.41, 87.50, 91.49, 85.37, 85.92, 93.58, 88.70),
                         (69.1, 56.5, 76.2, 88.4, 82.1, 80.1, 91.2, 62.2)),
    "gpt2": Pool("gpt2", "tanganke/gpt2_{task}", GLUE[:-1], (76.8, 82.1, 80.4, 88.3, 89.6, 65.3, 91.2)),
}


def pool(name: str) -> Pool:
    """The pool of that name; ValueError with the nearest one where there is none.

    >>> pool("vit_b_32").id_of("cars")
    'tanganke/clip-vit-base-patch32_stanford-cars'
    """
    import difflib

    if name not in POOLS:
        near = difflib.get_close_matches(name, POOLS, 1)
        raise ValueError(f"no pool of checkpoints {name!r}; " + (f"did you mean {near[0]!r}?" if near else
                                                                 f"there are {', '.join(POOLS)}"))
    return POOLS[name]


def expected(name: str, count: int) -> dict[str, float]:
    """{method: published average test accuracy} of the first `count` tasks, as shares of 1; merges for 8 alone."""
    found = pool(name)
    mean = lambda values: round(sum(values[:count]) / count / 100, 4)
    anchors = {key: mean(values) for key, values in (("fine-tuned", found.finetuned), ("zero-shot", found.pretrained))
               if len(values) >= count}
    return anchors | ({method.replace("simple ", ""): value / 100 for method, value in found.merged}
                      if count == 8 else {})
