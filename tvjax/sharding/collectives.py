"""What devices send each other in a compiled program, read from its text: bytes by kind of collective.

Counted is the size of each collective's result on one device, times how often it runs (loops of known length count as
often as they turn).
"""
import re
from collections import defaultdict

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
SIZES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
         "u64": 8, "f64": 8, "c64": 8, "c128": 16}
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{\s*$")
MADE = re.compile(r"= (\(?[^=]*?\)?) (" + "|".join(KINDS) + r")(?:-start)?\(")
CALLED = re.compile(r"(?:body|condition|to_apply|calls|branch_computations)=\{?%?([\w.-]+)")
TURNS = re.compile(r'known_trip_count\D*(\d+)')
SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


def sent(text: str) -> dict[str, int]:
    """{kind: bytes} of a compiled program, `jax.jit(f).lower(…).compile().as_text()`; kinds that do not occur lack.

    >>> sent("ENTRY %main (x: f32[4]) -> f32[4] {\\n  %a = f32[4]{0} all-reduce(%x), to_apply=%add\\n}")
    {'all-reduce': 16}
    """
    own, calls, entry = _read(text)
    total: dict[str, int] = defaultdict(int)
    _add(entry, 1, own, calls, total)
    return dict(total)


def _read(text: str):
    own: dict[str, list] = defaultdict(list)
    calls: dict[str, list] = defaultdict(list)
    entry = name = ""
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():  # tuples are numbered in comments
        if (found := COMPUTATION.match(line)) and "=" not in line.partition("(")[0]:
            name = found[2]
            entry = name if found[1] else entry
            continue
        if made := MADE.search(line):
            own[name].append((made[2], sum(map(_bytes, SHAPE.findall(made[1])))))
        times = int(TURNS.search(line)[1]) if " while(" in line and TURNS.search(line) else 1  # type: ignore[index]
        calls[name] += [(callee, times) for callee in CALLED.findall(line)]
    return own, calls, entry


def _bytes(shape: tuple[str, str]) -> int:
    count = 1
    for n in filter(None, shape[1].split(",")):
        count *= int(n)
    return count * SIZES.get(shape[0], 0)


def _add(name: str, times: int, own, calls, total) -> None:
    for kind, size in own[name]:
        total[kind] += times * size
    for callee, turns in calls[name]:
        _add(callee, times * turns, own, calls, total)
