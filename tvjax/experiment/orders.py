"""The eight orders of tasks of arXiv:2405.07813, appendix E: the first n of each stand for all sets of n tasks.

Tasks are sorted by zero-shot accuracy or by name; then upwards, downwards, from both ends inwards, or from the middle
outwards.
"""
from collections.abc import Mapping, Sequence

NAMES = ("zero-shot ascending", "zero-shot descending", "zero-shot wave", "zero-shot zigzag",
         "alphabetic ascending", "alphabetic descending", "alphabetic wave", "alphabetic zigzag")


def inwards(tasks: Sequence[str]) -> list[str]:
    """The first, the last, the second, the last but one, …

    >>> inwards("abcde")
    ['a', 'e', 'b', 'd', 'c']
    """
    rest, found = list(tasks), []
    while rest:
        found.append(rest.pop(0 if len(found) % 2 == 0 else -1))
    return found


def order(name: str, zero_shot: Mapping[str, float]) -> list[str]:
    """The tasks of {task: zero-shot accuracy} in the order of this name; equal accuracies keep their order.

    A "wave" of names goes inwards from the first and a "zigzag" backwards through it; of accuracies a "zigzag" goes
    inwards from the best and a "wave" backwards through it. So the paper has it.
    """
    if name not in NAMES:
        raise ValueError(f"no order {name!r}; there are {', '.join(NAMES)}")
    by, _, way = name.partition(" ")
    rising = sorted(zero_shot) if by == "alphabetic" else sorted(zero_shot, key=lambda task: zero_shot[task])
    if way in ("ascending", "descending"):
        return rising if way == "ascending" else rising[::-1]
    if by == "alphabetic":
        wave = inwards(rising)
        return wave if way == "wave" else wave[::-1]
    zigzag = inwards(rising[::-1])
    return zigzag if way == "zigzag" else zigzag[::-1]
