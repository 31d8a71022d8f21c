"""Networks as Flax modules whose parameter tree is the Hugging Face tree; one family a module."""
import importlib
import os

from tvjax.models import files


def from_pretrained(path_or_hub_id: str | os.PathLike, *, revision: str | None = None) -> files.Pretrained:
    """The model in a folder, or of that name on the hub, of whichever family its configuration names.

    Errors: a ValueError where there is no such model, or none of these families, besides those of its family.
    """
    kind = files.model_type(files.find(path_or_hub_id, revision))
    if kind not in files.READ_BY:
        from tvjax import tree

        raise ValueError(f"{path_or_hub_id} says model_type {kind!r}; {tree.did_you_mean(str(kind), [*files.READ_BY])}")
    family = importlib.import_module(f"tvjax.models.{files.READ_BY[kind]}")
    return family.from_pretrained(path_or_hub_id, revision=revision)
