"""What a merge writes: a model θ0 + step, the step itself as a task vector, or the step as a LoRA adapter.

The adapter is the best of its rank: step ≈ B·A from the leading singular triplets, B = U √s, A = √s Vᵀ. What it leaves
out, ‖step − B·A‖, is measured on the numbers that are written.
"""
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tvjax.disk.adapters import CONFIG, Fused
from tvjax.disk.headers import DTYPES
from tvjax.disk.match import Matched
from tvjax.disk.readers import Opened, TensorInfo
from tvjax.merging.factors import svd

OUTPUTS = ("model", "task_vector", "lora")
STEMS = {"model": "model", "task_vector": "task_vector", "lora": "adapter_model"}
METADATA = {"model": {}, "task_vector": {"tvjax": "task_vector", "base": ""}, "lora": {}}  # as checkpoints' own files
LOOKUPS = re.compile(r"(^|\.)(\w*embed(ding|dings|_tokens|_in)?|wte|wpe|shared)\.weight$")
TURNED = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"}  # their Conv1D weights are (in, out)
CONV1D = re.compile(r"(^|\.)(c_attn|c_proj|c_fc|q_attn)\.weight$")
PREFIX = "base_model.model."


class Module(NamedTuple):
    """A module of the adapter: its path, the shape of its weight, its rank, and how A and B become that weight."""

    path: str
    shape: tuple[int, ...]
    rank: int
    lookup: bool  # an embedding
    turned: bool  # the weight is (B·A)ᵀ

    @property
    def names(self) -> tuple[str, str]:
        end = "lora_embedding_{}" if self.lookup else "lora_{}.weight"
        return f"{PREFIX}{self.path}.{end.format('A')}", f"{PREFIX}{self.path}.{end.format('B')}"

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        out, *into = self.shape[::-1] if self.turned else self.shape
        return (self.rank, *into), (out, self.rank, *(1 for _ in into[1:]))


class Outputs(NamedTuple):
    """kind: one of `OUTPUTS`. modules: of an adapter, by the base's tensor. left: what an adapter cannot hold."""

    kind: str
    modules: Mapping[str, Module]
    left: Sequence[str]

    def names(self, tensor: str) -> tuple[str, ...]:
        """The tensors written for one of the base's."""
        return self.modules[tensor].names if self.kind == "lora" else (tensor,)


def outputs(kind: str, rank: int, base: Opened, models: Mapping[str, Opened], matched: Matched) -> Outputs:
    """What is written of the tensors that are merged."""
    if kind != "lora":
        return Outputs(kind, {}, [])
    changed = set(matched.merged)
    if all(isinstance(model, Fused) for model in models.values()):
        changed &= {name for model in models.values() for name in getattr(model, "pairs", {})}
    found = {name: _module(name, base, rank) for name in matched.merged if name in changed}
    modules = {name: module for name, module in found.items() if module}
    if not modules:
        raise ValueError("output=lora: none of the tensors to merge is a weight of a linear layer, a convolution or an "
                         "embedding, so an adapter has nothing to hold")
    return Outputs(kind, modules, [name for name, module in found.items() if not module])


def _module(name: str, base: Opened, rank: int) -> Module | None:
    shape = base.tensors[name].shape
    if not name.endswith(".weight") or len(shape) not in (2, 3, 4, 5) or 0 in shape:
        return None
    lookup = bool(len(shape) == 2 and LOOKUPS.search(name))
    turned = lookup or bool(len(shape) == 2 and base.config.get("model_type") in TURNED and CONV1D.search(name))
    most = min(shape[0], int(np.prod(shape[1:])))
    return Module(name.removesuffix(".weight"), tuple(shape), min(rank, most), lookup, turned)


def tensors(made: Outputs, out_dtype: str, base: Opened, matched: Matched) -> dict[str, TensorInfo]:
    """The headers of what is written: in the base's dtypes (float32 for a task vector), or in the one asked for."""
    chosen = {dtype.name: dtype for dtype in DTYPES.values()}.get(out_dtype)
    dtype = lambda name: chosen or (np.dtype(np.float32) if made.kind == "task_vector" else base.tensors[name].dtype)
    if made.kind == "lora":
        return {part: TensorInfo(shape, dtype(name)) for name, module in made.modules.items()
                for part, shape in zip(module.names, module.shapes, strict=True)}
    found = {name: TensorInfo(base.tensors[name].shape, dtype(name)) for name in matched.merged}
    return found | ({name: base.tensors[name] for name in matched.copied} if made.kind == "model" else {})


# ---------------------------------------------------------------- adapters
def factors(step: np.ndarray, module: Module, dtypes: Sequence[np.dtype]) -> tuple[tuple[np.ndarray, ...], float]:
    """((A, B) as they are written, ‖step − B·A‖) for the step of a module's weight."""
    matrix = step.reshape(len(step), -1).astype(np.float32, copy=False)
    matrix = np.ascontiguousarray(matrix.T) if module.turned else matrix
    made = [np.asarray(part).astype(dtype) for part, dtype in zip(_leading(matrix, k=module.rank), dtypes, strict=True)]
    a, b = (part.astype(np.float32) for part in made)
    rest = np.subtract(matrix, b @ a, dtype=np.float64)
    shaped = tuple(part.reshape(shape) for part, shape in zip(made, module.shapes, strict=True))
    return shaped, float(np.linalg.norm(rest))


@functools.partial(jax.jit, static_argnames="k")
def _leading(x, *, k: int):
    found = svd(x, k=k)
    root = jnp.sqrt(found.s)[None]
    return (found.V * root).T, found.U * root


def adapter_config(made: Outputs, rank: int, base: Opened) -> dict[str, bytes]:
    """adapter_config.json, as PEFT reads it; α is each module's rank, so that nothing is scaled."""
    modules = made.modules.values()
    other = {re.escape(module.path): module.rank for module in modules if module.rank != rank}
    given = {"peft_type": "LORA", "base_model_name_or_path": base.where, "r": rank, "lora_alpha": rank,
             "rank_pattern": other, "alpha_pattern": other, "target_modules": sorted(one.path for one in modules),
             "lora_dropout": 0.0, "bias": "none", "use_rslora": False, "task_type": None, "inference_mode": True,
             "fan_in_fan_out": any(module.turned and not module.lookup for module in modules)}
    return {CONFIG: (json.dumps(given, indent=2) + "\n").encode()}


def residual(lines: Sequence[Mapping[str, Any]], rank: int) -> str:
    """What an adapter leaves out, in a sentence, from the lines of a ledger; "" where none tells."""
    told = [line for line in lines if "residual_norm" in line]
    if not told:
        return ""
    whole, rest = (sum(line[name] ** 2 for line in told) ** 0.5 for name in ("change_norm", "residual_norm"))
    left = [line for line in told if "left_out" in line and line["change_norm"] > 0]
    share = lambda line: line["residual_norm"] / (line["change_norm"] or 1)
    worst = max((line for line in told if "of" in line), key=share)
    said = (f"rank {rank} leaves out {rest / (whole or 1):.3g} of the step's norm {whole:.4g} "
            f"(at most {share(worst):.3g}, of {worst['of']})")
    return said + (f"; {len(left)} changed tensors that an adapter cannot hold are among that" if left else "")
