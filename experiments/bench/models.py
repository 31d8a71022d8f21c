"""A forward pass and a training step of CLIP ViT-B/32's image tower and of T5-small: ours (Flax, jit) against PyTorch
(transformers), same random weights, same inputs, same optimizer, on the CPU.

    python experiments/bench/models.py [--model clip,t5] [--batch 16] [--rounds 5]

Rounds alternate between the two; a figure is the least over rounds, of wall clock and of processor time (which other
load on the machine disturbs less). Needs torch (pip install '.[parity]').
"""

import argparse
import functools
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tvjax import tree
from tvjax.models import clip, t5

LENGTH, TARGET = 128, 16  # tokens of a T5's input and of its answer


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--model", default="clip,t5")
    cli.add_argument("--batch", type=int, default=16)
    cli.add_argument("--rounds", type=int, default=5)
    args = cli.parse_args()
    for name in args.model.split(","):
        made = {"clip": clip_case, "t5": t5_case}[name](args.batch)
        for what in ("forward", "step"):
            compare(name, what, made["tvjax"][what], made["torch"][what], args.rounds)


def compare(name, what, ours, theirs, rounds):
    first = ours(), theirs()  # compilation, and the same number from both
    times = {"tvjax": [], "torch": []}
    for _ in range(rounds):
        for who, run in (("tvjax", ours), ("torch", theirs)):
            start, busy = time.perf_counter(), time.process_time()
            run()
            times[who].append((1e3 * (time.perf_counter() - start), 1e3 * (time.process_time() - busy)))
    best = {who: [min(ms) for ms in zip(*pairs, strict=True)] for who, pairs in times.items()}
    spread = ", ".join(f"{who} {wall:.0f} ms of wall clock and {busy:.0f} of processors"
                       for who, (wall, busy) in best.items())
    wall, busy = (theirs / mine for theirs, mine in zip(best["torch"], best["tvjax"], strict=True))
    print(f"{name} {what}: {spread}; torch / tvjax = {wall:.2f} and {busy:.2f}; "
          f"values {first[0]:.6f} and {first[1]:.6f}; load {os.getloadavg()[0]:.1f}", flush=True)


def flax_case(params, forward, loss, inputs):
    """{what: function that runs it once and returns a number}."""
    transform = optax.adamw(1e-5)
    apply = jax.jit(forward)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, *inputs):
        value, gradient = jax.value_and_grad(loss)(params, *inputs)
        updates, state = transform.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    params = jax.tree.map(jnp.array, params)
    held = [params, transform.init(params)]

    def train():
        held[0], held[1], value = step(*held, *inputs)
        return float(value)

    return {"forward": lambda: float(apply(held[0], *inputs).mean()), "step": train}


def torch_case(model, forward, loss):
    import torch
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=1e-4)

    def infer():
        with torch.no_grad():
            return forward().mean().item()

    def train():
        value = loss()
        adamw.zero_grad()
        value.backward()
        adamw.step()
        return value.item()

    return {"forward": infer, "step": train}


def weights(model):
    return tree.unflatten({name: p.detach().numpy() for name, p in model.named_parameters()})


def clip_case(batch):
    """The image tower of ViT-B/32 on 224 × 224 pixels; trained on the square of its features."""
    import torch
    import transformers
    config = transformers.CLIPVisionConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
                                           num_attention_heads=12, patch_size=32, projection_dim=512)
    torch.manual_seed(0)
    theirs = transformers.CLIPVisionModelWithProjection(config).eval()
    pixels = np.random.default_rng(0).standard_normal((batch, 224, 224, 3), np.float32)
    images = torch.tensor(pixels).permute(0, 3, 1, 2).contiguous()
    forward = clip.image_features(clip.CLIP(config))
    mine = flax_case(weights(theirs), forward, lambda p, x: (forward(p, x) ** 2).mean(), (jnp.asarray(pixels),))
    features = lambda: theirs(pixel_values=images).image_embeds
    return {"tvjax": mine, "torch": torch_case(theirs, features, lambda: (features() ** 2).mean())}


def t5_case(batch):
    """T5-small on texts of 128 tokens with answers of 16; the forward pass gives all logits."""
    import torch
    import transformers
    config = transformers.T5Config(vocab_size=32128, decoder_start_token_id=0)
    torch.manual_seed(0)
    theirs = transformers.T5ForConditionalGeneration(config).eval()  # without dropout, which ours doesn't have
    rng = np.random.default_rng(0)
    ids, targets = (rng.integers(2, 32000, (batch, n)).astype(np.int32) for n in (LENGTH, TARGET))
    mask = np.ones_like(ids)
    mask[::2, LENGTH // 2:] = 0
    model = t5.T5(config)
    inputs = tuple(jnp.asarray(x) for x in (ids, mask, targets))
    mine = flax_case(weights(theirs), t5.logits(model), t5.loss(model), inputs)
    given = {"input_ids": torch.tensor(ids.astype(int)), "attention_mask": torch.tensor(mask)}
    answers = torch.tensor(targets.astype(int))
    return {"tvjax": mine, "torch": torch_case(theirs, lambda: theirs(**given, decoder_input_ids=answers).logits,
                                               lambda: theirs(**given, labels=answers).loss)}


if __name__ == "__main__":
    main()
