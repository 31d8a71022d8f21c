"""Makes tests/golden/slices.npz: what mergekit makes of slices that reorder, repeat and leave out layers.

Run it in the environment of peers.py; tvjax is not needed there:

    python experiments/golden/slices.py tests/golden/slices.npz

The file holds `base`, `a`, `b` (n,), three LLaMAs of four layers, flat over the names of `about`; `out/NAME`, each
case's model, flat over its own sorted names; `about`: JSON with `names` {tensor: shape}, `version`, and `cases`
{NAME: {recipe, names, layers}}, recipes with the models' names for their paths. Numbers are multiples of 2⁻²⁰.
"""
import importlib.metadata
import json
import pathlib
import sys
import tempfile

import numpy as np
import safetensors.numpy
import transformers
import yaml

DEPTH, WIDTH, HIDDEN, WORDS = 4, 4, 3, 5
LAYER = {"self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (2, WIDTH), "self_attn.v_proj": (2, WIDTH),
         "self_attn.o_proj": (WIDTH, WIDTH), "mlp.gate_proj": (HIDDEN, WIDTH), "mlp.up_proj": (HIDDEN, WIDTH),
         "mlp.down_proj": (WIDTH, HIDDEN), "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}
NAMES = {"model.embed_tokens.weight": (WORDS, WIDTH), "model.norm.weight": (WIDTH,), "lm_head.weight": (WORDS, WIDTH)}
NAMES |= {f"model.layers.{i}.{part}.weight": shape for i in range(DEPTH) for part, shape in LAYER.items()}


def source(model, first, last, **numbers):
    return {"model": model, "layer_range": [first, last], **({"parameters": numbers} if numbers else {})}


HALF = [{"filter": "o_proj", "value": 0.5}, {"value": 1.0}]
CASES = {
    "passthrough": {"merge_method": "passthrough", "slices": [
        {"sources": [source("a", 0, 3)]}, {"sources": [source("b", 1, 4, scale=HALF)]}]},
    "ties": {"merge_method": "ties", "base_model": "base", "parameters": {"density": [0.5, 1.0]}, "slices": [
        {"sources": [source("base", 0, 2), source("a", 0, 2, weight=1.0), source("b", 0, 2, weight=[0.25, 1.0])]},
        {"sources": [source("base", 1, 4), source("a", 1, 4, weight=0.5), source("b", 0, 3, weight=1.0)],
         "parameters": {"density": 0.75}}]},
    "slerp": {"merge_method": "slerp", "base_model": "a", "slices": [
        {"sources": [source("a", 2, 4), source("b", 2, 4)]}, {"sources": [source("a", 0, 2), source("b", 0, 2)]}],
        "parameters": {"t": [{"filter": "mlp", "value": [0.0, 0.5, 1.0]}, {"value": 0.25}]}},
    "linear": {"merge_method": "linear", "slices": [
        {"sources": [source("a", 0, 2, weight=1.0), source("b", 2, 4, weight=3.0)]},
        {"sources": [source("b", 0, 1, weight=1.0), source("a", 3, 4, weight=[0.5, 1.0])]}]},
}


def drawn(seed, around=None):
    rng, found = np.random.default_rng(seed), {}
    for name, shape in sorted(NAMES.items()):
        x = rng.standard_normal(shape) + (0 if around is None else 4 * around[name])
        found[name] = (np.round(x * 2**20) / 2**20).astype(np.float32)
    return found


def write(folder, tensors):
    transformers.LlamaConfig(vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=DEPTH,
                             num_attention_heads=2, num_key_value_heads=1, architectures=["LlamaForCausalLM"],
                             tie_word_embeddings=False).save_pretrained(folder)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def merged(recipe, folder):
    from mergekit.config import MergeConfiguration
    from mergekit.merge import MergeOptions, run_merge
    text = json.dumps(recipe)
    for name in ("base", "a", "b"):
        text = text.replace(f'"model": "{name}"', f'"model": "{folder / name}"')
        text = text.replace(f'"base_model": "{name}"', f'"base_model": "{folder / name}"')
    out = folder / "out"
    config = MergeConfiguration.model_validate(yaml.safe_load(text))
    run_merge(config, str(out), MergeOptions(copy_tokenizer=False, allow_crimes=False))
    tensors = safetensors.numpy.load_file(next(out.glob("*.safetensors")))
    return tensors, json.loads((out / "config.json").read_text())["num_hidden_layers"]


def main(path):
    models = {"base": drawn(0)}
    models |= {name: drawn(seed, models["base"]) for name, seed in (("a", 1), ("b", 2))}
    flat = lambda tensors: np.concatenate([tensors[name].ravel() for name in sorted(tensors)])
    arrays, about = {name: flat(tensors) for name, tensors in models.items()}, {}
    for case, recipe in CASES.items():
        with tempfile.TemporaryDirectory() as place:
            folder = pathlib.Path(place)
            for name, tensors in models.items():
                write(folder / name, tensors)
            found, layers = merged({**recipe, "dtype": "float32"}, folder)
        arrays[f"out/{case}"] = flat(found)
        about[case] = {"recipe": recipe, "names": {n: list(found[n].shape) for n in sorted(found)}, "layers": layers}
    arrays["about"] = np.array(json.dumps({"names": {n: list(NAMES[n]) for n in sorted(NAMES)}, "cases": about,
                                           "version": importlib.metadata.version("mergekit")}))
    np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
