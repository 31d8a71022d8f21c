"""What a row must say so that tables compare like with like: checkpoint family, data used, parameters added.

`data` is the most that a method saw: "none", "unlabelled" or "labelled" inputs that are no test inputs, or "test",
unlabelled inputs of the test split (test-time adaptation). `seen` says it in words, `added` counts parameters beside
the merged model, `family` names the checkpoints. Choosing α on validation labels is the protocol of all rows alike.
"""
from typing import Any

DATA = ("none", "unlabelled", "labelled", "test")


def family(plan: Any) -> str:
    """Whose checkpoints: the pretrained model, and whether it was fine-tuned here or by others."""
    how = "fine-tuned here" if not plan.finetuned else "fine-tuned models as given" if len(plan.finetuned) == len(
        plan.tasks) else "fine-tuned here and as given"
    judged = ", judged linearised" if getattr(plan, "geometry", "standard") == "linearised" else ""
    return f"{plan.model}, {how}{judged}"


def columns(plan: Any, *, data: str, seen: str = "", added: int = 0) -> dict[str, Any]:
    """The fields of a row: family, data, seen, added.

    >>> class plan: model, finetuned, tasks = "glyphs", {}, ("greek",)
    >>> columns(plan, data="none")
    {'family': 'glyphs, fine-tuned here', 'data': 'none', 'seen': 'nothing', 'added': 0}
    """
    if data not in DATA:
        raise ValueError(f"data is one of {', '.join(DATA)}; got {data!r}")
    if data != "none" and not seen:
        raise ValueError(f"a method that uses {data} data says in `seen` which")
    return {"family": family(plan), "data": data, "seen": seen or "nothing", "added": int(added)}
