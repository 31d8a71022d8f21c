"""Where a model lies: a folder of that path or the hub's model of that name, and which family its configuration names.
"""
import json
import os
import re
from pathlib import Path
from typing import Any

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model",
                   "special_tokens_map.json", "added_tokens.json")
OPEN_CLIP = "open_clip_config.json"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
READ_BY = {"clip": "clip", "clip_vision_model": "clip", "t5": "t5", "gpt2": "gpt2", "roberta": "roberta",
           "bert": "bert", "open_clip": "clip", "open_clip_resnet": "clip_resnet"}  # kind: module of this package


def find(given: str | os.PathLike, revision: str | None, family: Any = None) -> Path:
    """The folder of that path, or the one to which the hub's model was downloaded.

    family: the `tvjax.models.files.Family` whose files are fetched; None: the configuration alone.
    """
    path = Path(given).expanduser()
    if path.is_dir():
        return path
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(given)) or str(given).startswith("."):
        raise ValueError(f"There is no folder {path}{_near(path)}.")
    try:
        return _download(str(given), revision, family)
    except Exception as error:  # httpx, the hub and the file system each raise kinds of their own
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(f"{str(given)!r} is no folder here{_near(path)}, and the hub gave no such model: "
                         f"{reason}. Offline, give the path of a folder that holds its files.") from error


def _download(name: str, revision: str | None, family: Any) -> Path:
    import huggingface_hub

    fetch = lambda patterns: Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
    if family is None:
        return fetch(["config.json", OPEN_CLIP])
    shards = f"{family.weights.removesuffix('.safetensors')}*.safetensors"
    patterns = [shards, f"{family.weights}.index.json", family.config_file, OPEN_CLIP, *TOKENIZER_FILES,
                *PROCESSOR_FILES, *family.extras]
    folder = fetch(patterns)
    other = only_open_clip(folder) and family.config_file != OPEN_CLIP
    return folder if other or any(folder.glob(shards)) else fetch([*patterns, family.pickle])


def _near(path: Path) -> str:
    from tvjax import tree

    if not path.parent.is_dir():
        return f" (nor a folder {path.parent})"
    folders = sorted(p.name for p in path.parent.iterdir() if p.is_dir() and not p.name.startswith("."))
    return f" ({tree.did_you_mean(path.name, folders[:20])})" if folders else f" ({path.parent} holds no folder)"


def model_type(folder: Path) -> str | None:
    """What a folder's configuration calls its kind of model; ValueError where there is none to be read."""
    if only_open_clip(folder):
        vision = open_clip_config(folder)["model_cfg"].get("vision_cfg", {})
        return "open_clip_resnet" if isinstance(vision.get("layers"), list) else "open_clip"
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{folder} holds no readable config.json, so it is not a model folder.") from error


def only_open_clip(folder: Path) -> bool:
    """Whether a folder has open_clip's configuration and none of transformers (timm's has no model_type)."""
    if not (folder / OPEN_CLIP).exists():
        return False
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type") is None
    except (OSError, ValueError, AttributeError):
        return True


def open_clip_config(folder: Path) -> dict[str, Any]:
    """What open_clip_config.json says, with its `model_cfg`; a ValueError where it isn't there or says nothing."""
    try:
        about = json.loads((folder / OPEN_CLIP).read_text(encoding="utf-8"))
        return {**about, "model_cfg": {**about["model_cfg"]}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        kind = model_type(folder) if (folder / "config.json").exists() else None
        raise ValueError(f"{folder} holds no readable {OPEN_CLIP}, so it is not a folder of open_clip"
                         f"{other_module(kind)}.") from error


def other_module(kind: str | None) -> str:
    """Where else a model of this kind is read, as the end of a sentence."""
    return f", tvjax.models.{READ_BY[kind]} reads {kind}" if kind in READ_BY else ""
