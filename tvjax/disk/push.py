"""Uploads a merged directory to the Hugging Face hub: `push=owner/name`, or `push=dry:owner/name` to say what would go.

What begins with a dot, and folders, are not uploaded. Logging in is the hub client's matter.
"""
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tvjax.disk.planning import gigabytes

NAME = re.compile(r"(dry:)?([\w-][\w.-]*/[\w-][\w.-]*)")


class Target(NamedTuple):
    """Where to: a repository of the hub, or a rehearsal."""

    repository: str
    dry: bool


def target(text: str) -> Target | None:
    """The `push` field of a config; None for "".

    >>> target("dry:owner/merged")
    Target(repository='owner/merged', dry=True)
    """
    if not text:
        return None
    found = NAME.fullmatch(text)
    if not found:
        raise ValueError(f"push is owner/name on the hub, or dry:owner/name to be told what would go; got {text!r}")
    return Target(found[2], bool(found[1]))


def files(folder: str | os.PathLike) -> dict[str, int]:
    """{name: bytes} of what is uploaded: the files of the folder itself but those that begin with a dot."""
    there = sorted(Path(folder).iterdir()) if Path(folder).is_dir() else []
    found = {path.name: path.stat().st_size for path in there if path.is_file() and not path.name.startswith(".")}
    if "config.json" not in found or not any(name.endswith(".safetensors") for name in found):
        raise ValueError(f"{folder} holds no model to push: it lacks config.json or weights in safetensors")
    return found


def push(folder: str | os.PathLike, to: Target, *, say: Callable[[str], Any] = print, client: Any = None) -> str | None:
    """Uploads `folder` and returns the address; with `to.dry` says what would be uploaded and returns None.

    client: a huggingface_hub.HfApi, made where none is given. Errors: ValueError in one sentence where the folder holds
    no model, or the hub cannot be had or refuses.
    """
    chosen = files(folder)
    say(f"{'would push' if to.dry else 'pushing'} to {to.repository}: "
        + ", ".join(f"{name} ({gigabytes(size)})" for name, size in chosen.items()))
    if to.dry:
        return None
    from huggingface_hub import HfApi

    client = HfApi() if client is None else client
    try:
        client.create_repo(to.repository, exist_ok=True)
        done = client.upload_folder(repo_id=to.repository, folder_path=os.fspath(folder), allow_patterns=list(chosen),
                                    commit_message="Merged with tvjax")
    except Exception as error:  # of the network, of the hub, of a missing token
        raise ValueError(f"{to.repository} could not be pushed to: {_first_line(error)}; {folder} is whole, "
                         "and the same command tries again") from error
    say(f"pushed: {done}")
    return str(done)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
