"""Merges checkpoints from disk to disk, in bounded memory: no data, no training, no evaluation.

    python -m tvjax.run --config=configs/merge.py:ties --config.base=BASE --config.models=A,B,C --config.out=OUT

The method is named after the colon (`ties` if none is), its numbers are --config.merge.density=0.2 and so on.
--config.plan=True reads headers only and tells what would be done, and every problem at once. BASE, A, B and C are
Hugging Face directories, safetensors files, shard indices or hub ids (owner/name@revision), PyTorch's files (nothing
pickled in them is run), .npz, Orbax directories, or LoRA adapters of the base; CLIP under open_clip's names is written
under those of Hugging Face. eu=PATH names a model, and random steps draw by that name. OUT holds a model, its card,
ledger.jsonl and recipe.yaml, which runs the merge again:

    python -m tvjax.run --config=configs/merge.py --config.recipe=OUT/recipe.yaml --config.out=AGAIN

A recipe may be mergekit's too, or a method's of FusionBench (with --config.base and --config.models).

An interrupted merge is continued by the same command. What it costs: one reading of all inputs, and one more for each
statistic of the whole model that the method takes (TIES: one, its threshold and the majority of signs together).

--config.output=task_vector writes the merged step alone (`checkpoints.load_task_vector` reads it), --config.output=lora
the step as an adapter of PEFT of rank --config.rank, and says what that leaves out; so adapters are merged into one, or
compressed anew. Where models have other tokens than the base, --config.vocabulary says what becomes of them.
"""
import inspect

from ml_collections import ConfigDict, config_dict

from tvjax import merging


def get_config(arg="ties"):
    method = arg or "ties"
    merging.build(method)  # says what there is where the name is mistyped
    return ConfigDict(dict(
        name="merge",
        job="merge",
        method=method,
        merge=dict(numbers(method)),  # the method's own
        base="",                      # the pretrained model
        models="",                    # the fine-tuned ones: A,B,C or eu=A,cars=B
        out="",                       # the directory to write
        data="",                      # what the method needs beside models: gradients=FILE, fisher=FILE, gram=FILE
        recipe="",                    # a recipe.yaml, ours or mergekit's, instead of method, base and models
        plan=False,                   # tell what would be done, and do nothing
        push="",                      # owner/name on the hub to upload OUT to; dry:owner/name tells what would go
        only="",                      # a regular expression: merge these tensors of the base, keep the others
        exclude="",                   # a regular expression: keep these
        missing="refuse",             # tensors that a model lacks: refuse, or base (keep the base's)
        extra="refuse",               # tensors that the base lacks: refuse, or ignore
        heads="base",                 # heads that differ: base (keep the base's), or refuse
        vocabulary="refuse",          # embeddings of other lengths: refuse, base (its rows), backbone (keep them),
                                      # union (the tokens of all; needs tokenizer.json beside the weights)
        compute_dtype="float32",      # or float64
        out_dtype="base",             # each tensor's in the base, or float32, float16, bfloat16
        output="model",               # or task_vector (the merged step alone), lora (the step as an adapter of PEFT)
        rank=16,                      # of that adapter, at most
        max_shard_size="5GB",
        allow_nonfinite=False,        # merge NaN and infinities all the same
        mesh=dict(data=1, model=1, rules=()),  # data: devices of this process that take pieces side by side
        ledger="full",                # or brief: no hashes of inputs, norms, cosines, shares
        code="refuse",                # Python files beside the base's weights: refuse, or copy
    ))


def numbers(method):
    """The method's hyper-parameters and their defaults; None stands for one that is not given."""
    for name, parameter in inspect.signature(merging.METHODS[method]).parameters.items():
        if parameter.default is None or parameter.default is parameter.empty:
            yield name, config_dict.placeholder(object)
        elif isinstance(parameter.default, int | float | str):
            yield name, parameter.default
