"""A step of layer-wise AdaMerging at the size of CLIP ViT-B/32: ours against FusionBench's, seconds and peak memory.

    python experiments/bench/adamerging.py [--tasks 8] [--batch 16] [--size 64] [--steps 3]
        [--stores bfloat16,int8] [--peers PYTHON]

Each tool has a process of its own, with random weights, small random task vectors and random images (of 64 pixels a
side by default, 5 tokens, so that two cores are done in minutes; all parameters are there). The loop of FusionBench is
that of its LayerWiseAdaMergingAlgorithm.test_time_adaptation. Seconds are the fastest step after the first, memory the
process's peak above what it was after its imports. --peers is a Python that has fusion_bench.
"""
import argparse
import json
import os
import resource
import subprocess
import sys
import time

WIDTH, DEPTH, HIDDEN, HEADS, PATCH, PROJECTION, CLASSES = 768, 12, 3072, 12, 32, 512, 20


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--tasks", type=int, default=8)
    cli.add_argument("--batch", type=int, default=16)
    cli.add_argument("--size", type=int, default=64, help="pixels a side; 224 is the model's own")
    cli.add_argument("--steps", type=int, default=3)
    cli.add_argument("--stores", default="bfloat16,int8")
    cli.add_argument("--peers", default="")
    cli.add_argument("--alone", default="", help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.alone:
        print(json.dumps(theirs(args) if args.alone == "fusionbench" else ours(args, args.alone)))
        return
    runs = [(f"tvjax, {store}", sys.executable, store) for store in args.stores.split(",")]
    runs += [("FusionBench", args.peers, "fusionbench")] if args.peers else []
    dense = 4 * 87_849_216 * (args.tasks + 1) / 1e9
    print(f"{args.tasks} tasks, batch {args.batch} a task of {args.size} pixels, load {os.getloadavg()[0]:.1f}; "
          f"{args.tasks + 1} dense copies are {dense:.2f} GB")
    print("| tool | seconds a step | peak GB above imports | peak GB of the process |\n| --- | ---: | ---: | ---: |")
    for label, python, alone in runs:
        command = [python, __file__, "--alone", alone, "--tasks", str(args.tasks), "--batch", str(args.batch),
                   "--size", str(args.size), "--steps", str(args.steps)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        print(f"| {label} | {found['seconds']:.2f} | {found['above']:.2f} | {found['peak']:.2f} |", flush=True)


def now() -> float:
    """Resident GB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e9


def told(seconds, imported) -> dict:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return {"seconds": min(seconds[1:]), "above": peak - imported, "peak": peak}


def ours(args, store) -> dict:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from tvjax import evaluation, learning, tree
    from tvjax.learning import adamerging
    from tvjax.models import clip

    imported = now()
    spec = clip.Spec(vision=clip.VisionSpec(WIDTH, HIDDEN, DEPTH, HEADS, image_size=args.size, patch=PATCH), text=None,
                     projection_dim=PROJECTION)
    model = clip.CLIP(spec)
    shapes = jax.eval_shape(lambda key: clip.init(model, key), jax.random.key(0))
    rng = np.random.default_rng(0)
    draw = lambda *shape: 0.02 * rng.standard_normal(shape, np.float32)
    theta0 = jax.tree.map(lambda x: jnp.asarray(draw(*x.shape)), shapes)
    held = {}
    for name, x in tree.flatten(shapes).items():  # one tensor at a time: nothing dense beside the pool
        held |= learning.pool([{name: 0.01 * draw(*x.shape)} for _ in range(args.tasks)], store=store)
    predict = evaluation.classify(clip.image_features(model))
    heads = [(jnp.asarray(draw(args.tasks, PROJECTION, CLASSES)), jnp.full(args.tasks, CLASSES, jnp.int32))]
    step = adamerging.adapter(predict, learning.Scheme(by="tensor"), 1e-3)
    state, seconds = adamerging.start(held), []
    for _ in range(args.steps):
        images = [draw(args.tasks, args.batch, args.size, args.size, 3)]
        begun = time.perf_counter()
        state, loss = step(state, theta0, held, heads, images)
        jax.block_until_ready((state, loss))
        seconds.append(time.perf_counter() - begun)
    return told(seconds, imported)


def theirs(args) -> dict:
    import torch
    from fusion_bench.method.adamerging.entropy_loss import entropy_loss
    from fusion_bench.models.wrappers.layer_wise_fusion import LayerWiseMergedModel, get_layer_wise_weights
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    imported = now()
    config = CLIPVisionConfig(hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=DEPTH,
                              num_attention_heads=HEADS, image_size=args.size, patch_size=PATCH,
                              projection_dim=PROJECTION)
    make = lambda: CLIPVisionModelWithProjection(config)
    base, tuned = make(), [make() for _ in range(args.tasks)]
    tensors = sum(1 for _ in base.parameters())
    module = LayerWiseMergedModel(get_layer_wise_weights(args.tasks, tensors, init_values=0.3), base, tuned,
                                  strict=False)  # position_ids is a buffer that no state dict holds
    optimizer = torch.optim.Adam([module.merge_weight], lr=1e-3)
    heads, seconds = [torch.randn(PROJECTION, CLASSES) for _ in range(args.tasks)], []
    module.train()
    module.merge_weights()
    for _ in range(args.steps):
        images = [torch.randn(args.batch, 3, args.size, args.size) for _ in range(args.tasks)]
        begun = time.perf_counter()
        for head, batch in zip(heads, images, strict=True):
            features = module(batch).image_embeds
            logits = features / features.norm(dim=-1, keepdim=True) @ head
            entropy_loss(logits).backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        module.merge_weights()
        seconds.append(time.perf_counter() - begun)
    return told(seconds, imported)


if __name__ == "__main__":
    main()
