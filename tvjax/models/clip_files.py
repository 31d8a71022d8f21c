"""Published CLIP folders: configuration, weights, tokenizer and image processor, as transformers keeps them.

Torch is needed for none of it, except for old folders whose weights are only in pytorch_model.bin.
"""
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tvjax.models.clip_network import CLIP

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json",
                   "added_tokens.json")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
TOWERS = ("vision_model", "visual_projection", "text_model", "text_projection", "logit_scale")


class Pretrained(NamedTuple):
    """A model and all that belongs to it; tokenizer and processor are loaded when first used."""
    model: CLIP
    params: dict[str, Any]
    config: Any  # transformers.CLIPConfig, or CLIPVisionConfig for a vision tower alone
    tokenizer: Any
    processor: Any
    buffers: dict[str, Any]
    path: Path


class Lazy:
    """Stands for an object until the first call or attribute, when `load` makes it."""

    def __init__(self, load: Callable[[], Any]):
        self._load, self._made = load, None

    def _get(self) -> Any:
        if self._made is None:
            self._made = self._load()
        return self._made

    def __call__(self, *args, **kwargs) -> Any:
        return self._get()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._get(), name)


def from_pretrained(path_or_hub_id: str | os.PathLike, *, revision: str | None = None) -> Pretrained:
    """The CLIP in a folder, or of that name on the hub (from the local cache where HF_HUB_OFFLINE=1).

    Folders of a vision tower alone (CLIPVisionModel, with or without projection) give params with only that part.
    Leaves keep the file's dtype. Errors: a ValueError that says what is missing, strange or of the wrong shape.
    """
    from tvjax import checkpoints

    folder = _folder(path_or_hub_id, revision)
    config = _config(folder)
    model = CLIP(config)
    bin_only = (folder / "pytorch_model.bin").exists() and not any(folder.glob("model.safetensors*"))
    found = _torch_weights(folder) if bin_only else checkpoints.load(folder)
    params = found.params if set(found.params) & set(TOWERS) else {"vision_model": found.params}
    _check(params, model, folder)
    return Pretrained(model, jax.tree.map(jnp.asarray, params), config, Lazy(lambda: _tokenizer(folder)),
                      Lazy(lambda: _processor(folder)), found.buffers, folder)


def _folder(given: str | os.PathLike, revision: str | None) -> Path:
    path = Path(given).expanduser()
    if path.is_dir():
        return path
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(given)) or str(given).startswith("."):
        raise ValueError(f"There is no folder {path}{_near(path)}.")
    import huggingface_hub

    patterns = ["model*.safetensors", "model.safetensors.index.json", "config.json", *TOKENIZER_FILES, *PROCESSOR_FILES]
    try:
        folder = Path(huggingface_hub.snapshot_download(str(given), revision=revision, allow_patterns=patterns))
        if not any(folder.glob("model*.safetensors")):
            patterns.append("pytorch_model.bin")
            folder = Path(huggingface_hub.snapshot_download(str(given), revision=revision, allow_patterns=patterns))
    except Exception as error:  # httpx, the hub and the file system each raise kinds of their own
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(f"{str(given)!r} is no folder here{_near(path)}, and the hub gave no such model: "
                         f"{reason}.") from error
    return folder


def _near(path: Path) -> str:
    from tvjax import tree

    if not path.parent.is_dir():
        return f" (nor a folder {path.parent})"
    folders = sorted(p.name for p in path.parent.iterdir() if p.is_dir() and not p.name.startswith("."))
    return f" ({tree.did_you_mean(path.name, folders[:20])})" if folders else f" ({path.parent} holds no folder)"


def _config(folder: Path) -> Any:
    import transformers

    kinds = {"clip": transformers.CLIPConfig, "clip_vision_model": transformers.CLIPVisionConfig}
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{folder} holds no readable config.json, so it is not a model folder.") from error
    if kind not in kinds:
        raise ValueError(f"{folder / 'config.json'} says model_type {kind!r}; this reads {' and '.join(kinds)}.")
    return kinds[kind].from_pretrained(folder)


def _torch_weights(folder: Path) -> Any:
    from tvjax import checkpoints

    try:
        import torch
    except ImportError as error:
        raise ValueError(f"{folder} holds its weights only as pytorch_model.bin, which needs torch to read; install "
                         "torch, or name a revision that has model.safetensors.") from error
    state = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    return checkpoints.split({name: _numpy(x, torch) for name, x in state.items()}, {"format": "pt"})


def _numpy(tensor: Any, torch: Any) -> Any:
    if tensor.dtype == torch.bfloat16:  # torch gives numpy no bfloat16, so its bits travel as integers
        return tensor.contiguous().view(torch.uint16).numpy().view(jnp.bfloat16)
    return tensor.numpy()


def _check(params: Mapping[str, Any], model: CLIP, folder: Path) -> None:
    """Whole towers may be missing; nothing else may be, and nothing may be strange or of another shape."""
    from tvjax import tree
    from tvjax.models import clip

    expected = jax.eval_shape(lambda key: clip.init(model, key), jax.random.key(0))
    expected = {name: part for name, part in expected.items() if name in params}
    faults = tree.differences(tree.flatten(params), tree.flatten(expected), names=("the weights", "the configuration"),
                              dtypes=False)
    if faults:
        raise ValueError(f"The weights in {folder} don't fit its config.json: {'; '.join(faults)}.")


def _tokenizer(folder: Path) -> Any:
    if not (folder / "tokenizer.json").exists() and not (folder / "vocab.json").exists():
        raise ValueError(f"{folder} holds no tokenizer (tokenizer.json, or vocab.json and merges.txt); "
                         "for text take the one of the whole CLIP that it was tuned from.")
    import transformers

    return transformers.CLIPTokenizer.from_pretrained(folder)


def _processor(folder: Path) -> Any:
    if not any((folder / name).exists() for name in PROCESSOR_FILES):
        raise ValueError(f"{folder} holds no {PROCESSOR_FILES[0]}; "
                         "take the image processor of the whole CLIP that it was tuned from.")
    import transformers

    return transformers.CLIPImageProcessorPil.from_pretrained(folder)


def save_pretrained(pretrained: Pretrained, params: Mapping[str, Any], path: str | os.PathLike) -> None:
    """Writes a folder that transformers and `from_pretrained` load: configuration, weights, tokenizer, image processor.

    `params` may be the visual part alone; the rest is then `pretrained`'s. All files are written before any is renamed.
    """
    from tvjax import checkpoints

    folder, whole = Path(path), {**pretrained.params, **params}
    _check(whole, pretrained.model, folder)
    copied = [name for name in (*TOKENIZER_FILES, *PROCESSOR_FILES) if (pretrained.path / name).exists()]
    files = {folder / name: _copier(pretrained.path / name) for name in copied}
    files[folder / "config.json"] = checkpoints.text_writer(_config_text(pretrained.config, whole))
    files.update(checkpoints.writers(whole, folder, buffers=pretrained.buffers))
    checkpoints.replace(files)


def _copier(source: Path) -> Callable[[Path], None]:
    def write(target: Path) -> None:
        shutil.copyfile(source, target)
    return write


def _config_text(config: Any, params: Mapping[str, Any]) -> str:
    about = json.loads(config.to_json_string())
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(params)}
    if len(dtypes) == 1:  # transformers loads into the dtype that the configuration names
        about["dtype"] = dtypes.pop()
    return json.dumps(about, indent=2, sort_keys=True) + "\n"
