"""What lies beside the weights of a merged model: configuration, tokenizer and other small files, and a model card."""
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tvjax import tree
from tvjax.disk.match import Matched
from tvjax.disk.readers import Opened, read_config
from tvjax.disk.recipe import Recipe, fields, plain

OURS = ("README.md", "recipe.yaml", "ledger.jsonl")
SAME = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja",
        "special_tokens_map.json", "preprocessor_config.json", "tokenizer.model", "vocab.txt")


def side_files(base: Opened, models: Mapping[str, Opened], recipe: Recipe) -> tuple[dict[str, bytes], list[str]]:
    """({name: content}, notes): the base's files beside its weights, and what should be known of them.

    Python files are copied only if the recipe says so. config.json tells the output's dtype. Of models whose tokenizer
    or processor differs from the base's, a note tells.
    """
    code = [name for name in base.side if name.endswith(".py")]
    taken = [name for name in base.side if name not in OURS and (recipe.code == "copy" or name not in code)]
    found = {name: base.side[name].read_bytes() for name in taken}
    left = code if recipe.code != "copy" else []
    notes = [f"left out: {tree.listing(left)}, which is code (code=copy takes it along)"] if left else []
    if "config.json" in found and (recipe.out_dtype != "base" or base.config != read_config(base.side)):
        found["config.json"] = _with_dtype(base.config, recipe.out_dtype)
    for label, model in models.items():
        both = [name for name in SAME if name in model.side and name in found]
        differ = [name for name in both if model.side[name].read_bytes() != found[name]]
        if differ:
            notes.append(f"{tree.listing(differ)} of {label} differ from the base's, which are taken")
    return found, notes


def _with_dtype(config: Mapping[str, Any], dtype: str) -> bytes:
    names = [name for name in ("dtype", "torch_dtype") if name in config] or ["dtype"]
    names = [] if dtype == "base" else names
    return (json.dumps({**config, **dict.fromkeys(names, dtype)}, indent=2) + "\n").encode()


def licence(opened: Opened) -> str:
    """The licence that a model's card names; "" where none does."""
    if "README.md" not in opened.side:
        return ""
    text = opened.side["README.md"].read_text(encoding="utf-8", errors="replace")
    front = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    named = re.search(r"^license:\s*(\S+)", front[1], re.MULTILINE) if front else None
    return named[1].strip("'\"") if named else ""


def card(recipe: Recipe, base: Opened, models: Mapping[str, Opened], matched: Matched, *, command: str,
         versions: Mapping[str, str], notes: list[str]) -> str:
    """The text of README.md: from what, how and with what the model was made."""
    given = fields(recipe)
    method = given["method"] if isinstance(given["method"], str) else given["method"]["operator"]
    every = {"base": base, **models}
    licences = {label: licence(opened) or "not stated" for label, opened in every.items()}
    known = {name for name in licences.values() if name != "not stated"}
    front = ["---", "library_name: transformers", "tags:", "- merge", "- tvjax", "base_model:"]
    front += [f"- {json.dumps(opened.where)}" for opened in every.values()]
    front += [f"license: {known.pop()}"] if len(known) == 1 and "not stated" not in licences.values() else []
    front += ["---", ""]
    rows = [f"| {label} | `{one.where}` | {licences[label]} | {_files(one)} |" for label, one in every.items()]
    lines = [f"# {method} of {len(models)} models", "",
             f"θ0 + operator(θ_1 − θ0, …, θ_{len(models)} − θ0), made by tvjax {versions.get('tvjax', '')}.", "",
             "| name | from | licence | files (bytes) |", "|---|---|---|---|", *rows, "",
             f"Method: `{method}` with `{json.dumps(plain(recipe.options))}`; seeds of random steps are among these, "
             "and draws belong to names of models and tensors.",
             f"Command: `{command}`. `recipe.yaml` runs it again; `ledger.jsonl` tells each tensor's norms, cosines, "
             "sign conflicts, kept share, effective coefficients and SHA-256 of inputs and output.", "",
             "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".", ""]
    told = [*notes, *(f"{why}: {len([1 for said in matched.copied.values() if said == why])} tensors"
                      for why in sorted(set(matched.copied.values())))]
    return "\n".join(front + lines + [f"- {note}" for note in told]) + "\n"


def _files(opened: Opened) -> str:
    files = [f"{Path(name).name} ({about[0]:,})" for name, about in opened.identity.items()]
    return ", ".join(files[:2]) + (f" and {len(files) - 2} more" if len(files) > 2 else "")
