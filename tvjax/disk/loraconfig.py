"""adapter_config.json of a LoRA adapter: rank and scale of each module; what is more than LoRA is refused by name."""
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tvjax import checkpoints

WAY = "merge it into its base with peft's merge_and_unload, and give that"
HARMLESS = {  # what does not change the product, or is read below
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type", "use_rslora"}
VARIANTS = {  # what else there is, by the name under which it is known
    "use_dora": "DoRA", "use_qalora": "QALoRA", "lora_bias": "LoRA with a bias", "modules_to_save":
    "LoRA with modules saved whole (modules_to_save)", "layer_replication": "LoRA with replicated layers",
    "trainable_token_indices": "LoRA with trained tokens", "target_parameters": "LoRA of parameters of experts",
    "alora_invocation_tokens": "activated LoRA", "arrow_config": "a router of adapters"}
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that take a part out of the base


class Config(NamedTuple):
    """What matters of a configuration. base: the model it names; turned: whether weights are (in, out)."""

    base: str
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    root: bool
    turned: bool

    def of(self, module: str) -> tuple[int, float]:
        """(rank, scale) of a module: the first pattern that ends its name, else the adapter's own.

        >>> Config("", 4, 8.0, {"q_proj": 16}, {}, False, False).of("layers.0.q_proj")
        (16, 0.5)
        """
        rank, alpha = _matched(self.ranks, module, self.rank), _matched(self.alphas, module, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.root else rank)


def _matched(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)), default)


def read_lora_config(path: Path) -> Config:
    """The configuration in a file; ValueError where it is none, or of more than LoRA."""
    given = checkpoints.fields_of(path)
    _refuse(path, given)
    rank, alpha = given.get("r", 8), given.get("lora_alpha", 8)
    ranks, alphas = given.get("rank_pattern") or {}, given.get("alpha_pattern") or {}
    if not (isinstance(ranks, dict) and isinstance(alphas, dict)):
        raise ValueError(f"{path}: rank_pattern and alpha_pattern map names to numbers")
    for name, value in (("r", rank), *(("rank_pattern", n) for n in ranks.values())):
        if type(value) is not int or value < 1:
            raise ValueError(f"{path}: {name} is a whole number from 1 on; got {value!r}")
    for name, value in (("lora_alpha", alpha), *(("alpha_pattern", n) for n in alphas.values())):
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise ValueError(f"{path}: {name} is a number; got {value!r}")
    for pattern in (*ranks, *alphas):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{path}: {pattern!r} is no pattern ({error})") from None
    return Config(str(given.get("base_model_name_or_path") or ""), rank, alpha, ranks, alphas,
                  bool(given.get("use_rslora")), bool(given.get("fan_in_fan_out")))


def _refuse(path: Path, given: Mapping[str, Any]) -> None:
    kind, where = given.get("peft_type", "LORA"), path.parent
    if kind != "LORA":
        raise ValueError(f"{where} is an adapter of type {kind}: only LORA is read ({WAY})")
    for name, what in VARIANTS.items():
        if given.get(name):
            raise ValueError(f"{where} is {what}, more than a product of two factors: {WAY}")
    if given.get("bias", "none") not in ("none", None):
        raise ValueError(f"{where} trains biases too (bias={given['bias']}): {WAY}")
    start = given.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(CHANGES_BASE):
        raise ValueError(f"{where} began as {start}, which takes a part out of the base: save it with peft's "
                         "path_initial_model_for_weight_conversion")
    other = [name for name in given if name not in HARMLESS and name not in VARIANTS]
    if unknown := [name for name in other if given[name] not in (None, False, {}, [])]:
        raise ValueError(f"{where} has {', '.join(map(str, unknown))[:200]} in its configuration, which is not known "
                         f"here: {WAY}")
