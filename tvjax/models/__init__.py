"""Networks as Flax modules whose parameter tree is the Hugging Face tree; one family a module."""
import importlib
import os

from tvjax.models import files, folders


def from_pretrained(path_or_hub_id: str | os.PathLike, *, revision: str | None = None) -> files.Pretrained:
    """The model in a folder, or of that name on the hub, of whichever family its configuration names.

    Errors: a ValueError where there is no such model, or none of these families, besides those of its family.
    """
    kind = folders.model_type(folders.find(path_or_hub_id, revision))
    if kind not in folders.READ_BY:
        from tvjax import tree

        near = tree.did_you_mean(str(kind), [*folders.READ_BY])
        raise ValueError(f"{path_or_hub_id} says model_type {kind!r}; {near}")
    family = importlib.import_module(f"tvjax.models.{folders.READ_BY[kind]}")
    return family.from_pretrained(path_or_hub_id, revision=revision)
