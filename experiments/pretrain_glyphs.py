"""Pre-trains the small CLIP of the glyph benchmark by contrastive image-name learning; runs once.

    python experiments/pretrain_glyphs.py --out=tvjax/data/glyphs_clip --workdir=runs/glyphs_clip

Each step draws 64 names, many from two blocks, and two renderings of each; the loss is CLIP's, images against names and
names against images. A learnt anchor for each name (dropped at the end) speeds both towers up: images and names are
also classified against all anchors. Stage 1 shows plain glyphs, light on dark; stage 2 four fifths in random mild
domains (never within `domains.MARGIN` of a task's own). Only training fonts and training slants are drawn. Names are
all classes of all tasks, the control characters, and `EXTRA` characters that belong to no task. The learning rate is
constant until the last --decay_steps: a run stopped early can be resumed from --workdir with another --steps.
Everything follows from --seed.
"""
import argparse
import functools
import json
import os
import pathlib
import queue
import threading
import time
import unicodedata

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file
from tokenizers import pre_tokenizers, trainers
from transformers import CLIPConfig, CLIPTextConfig, CLIPTokenizer, CLIPVisionConfig

from tvjax.data import domains, fonts, glyphs
from tvjax.data.glyphs_blocks import characters
from tvjax.models import clip

EXTRA = """0250-0252 0254-0259 025B 025E 0264-0268 026E 0270-0273 0278 0279-0281 0283-0284 0289-028A 028C-028F 0292
0294-0298 02A1 0531-0546 10301-1031E 25A1-25AF 25B2-25B3 25B6-25B7 25BA-25BD 25C0-25C1 25C4-25C8 25CB 25CD-25E1
25E7-25EE 2600-260D 2613-2628 262A-262F 2638-263B 263D-266F 2680-2685 2692-26A1 26B0 26B2"""
LENGTH, PAIRS, COPIES = 24, 64, 2
PREPROCESSOR = {
    "image_processor_type": "CLIPImageProcessor", "do_convert_rgb": True,
    "do_resize": True, "size": {"height": 32, "width": 32}, "resample": 3,
    "do_center_crop": False, "crop_size": {"height": 32, "width": 32},
    "do_rescale": True, "rescale_factor": 1 / 255,
    "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}


def universe() -> str:
    """All characters that pre-training names."""
    extra = "".join(c for c in characters(EXTRA) if ord(c) in fonts.coverage("DejaVuSans"))
    return "".join(t.chars for t in (*glyphs.TASKS, glyphs.CONTROL)) + extra


def make_tokenizer(names: list[str], size: int = 1400) -> CLIPTokenizer:
    """A CLIP tokenizer (byte-level BPE) learnt on the names in all templates; specials come last, as in CLIP's own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learner = CLIPTokenizer().backend_tokenizer
    texts = [t.format(name) for name in names for t in glyphs.TEMPLATES]
    learner.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=size - 2 - len(alphabet), initial_alphabet=alphabet, end_of_word_suffix="</w>", show_progress=False))
    merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    tokens = dict.fromkeys([*alphabet, *(a + "</w>" for a in alphabet), *("".join(pair) for pair in merges),
                            "<|startoftext|>", "<|endoftext|>"])
    return CLIPTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, model_max_length=LENGTH)


def make_config(tokenizer: CLIPTokenizer, *, width: int, depth: int) -> CLIPConfig:
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
               "pad_token_id": tokenizer.eos_token_id}
    text = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=LENGTH, projection_dim=128, **special)
    vision = CLIPVisionConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=depth, num_attention_heads=4, image_size=32,
        patch_size=8, projection_dim=128)
    return CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=128)


def save(out: pathlib.Path, params, config: CLIPConfig, tokenizer: CLIPTokenizer) -> None:
    """Writes an ordinary Hugging Face CLIP directory; the weights appear last, whole."""
    out.mkdir(parents=True, exist_ok=True)
    config.architectures = ["CLIPModel"]
    config.save_pretrained(out)
    tokenizer.save_pretrained(out)
    tokenizer.backend_tokenizer.model.save(str(out))  # vocab.json, merges.txt
    (out / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=2) + "\n")
    flat = {k: np.asarray(v, np.float32, order="C")
            for k, v in flatten_dict(jax.device_get(params), sep=".").items()}
    save_file(flat, out / "model.safetensors.new", metadata={"format": "pt"})
    (out / "model.safetensors.new").chmod(0o644)
    os.replace(out / "model.safetensors.new", out / "model.safetensors")


@functools.cache
def blocks(size: int) -> list[np.ndarray]:
    """Positions in `universe()` that belong together: the tasks' classes, then runs of 40 of the rest."""
    bounds = np.cumsum([len(t.chars) for t in glyphs.TASKS])
    return np.split(np.arange(size), [*bounds, *range(bounds[-1] + 40, size - 20, 40)])


def choose(rng: np.random.Generator, size: int) -> np.ndarray:
    """64 different names: up to 24 each of two blocks (they look alike: hard negatives), the rest from anywhere."""
    two = rng.choice(len(blocks(size)), 2, replace=False)
    near = np.concatenate([rng.permutation(blocks(size)[b])[:24] for b in two])
    far = rng.permutation(np.setdiff1d(np.arange(size), near))
    return rng.permutation(np.concatenate([near, far])[:PAIRS])


def batch(step: int, *, seed: int, chars: str, tokens: np.ndarray, clean_steps: int, sparsity: float):
    """(images uint8, input_ids, name ids) of one step; a pure function of (seed, step)."""
    rng = np.random.default_rng([seed, step])
    ids = choose(rng, len(chars))
    avoid = np.array([t.domain for t in (*glyphs.TASKS, glyphs.CONTROL)], np.float32)
    rows = domains.draw(rng, PAIRS * COPIES, avoid, sparsity=sparsity)
    rows[rng.random(len(rows)) < (1 if step < clean_steps else 0.2)] = domains.domain()
    images = glyphs.draw("".join(chars[i] for i in np.repeat(ids, COPIES)), "train", rows, rng)
    return images, tokens[rng.integers(len(glyphs.TEMPLATES), size=PAIRS), ids], ids.astype(np.int32)


def prefetch(make, steps):
    """Yields make(step), drawn ahead of time in a thread."""
    ready = queue.Queue(4)
    threading.Thread(target=lambda: [ready.put(make(step)) for step in steps], daemon=True).start()
    for _ in steps:
        yield ready.get()


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def pixels(images):
    return jnp.asarray(images, jnp.float32) / 127.5 - 1


def make_loss(model):
    """CLIP's loss (both directions, two images a name) plus half the cross-entropies against all anchors."""
    image, own = jnp.arange(PAIRS * COPIES), jnp.repeat(jnp.arange(PAIRS), COPIES)

    def loss_fn(trained, images, tokens, ids):
        params, anchors = trained
        seen = unit(clip.image_features(model)(params, pixels(images)))
        said = unit(clip.text_features(model)(params, tokens))
        scale = jnp.exp(params["logit_scale"])
        logits = scale * seen @ said.T  # (images, names)
        by_image, by_text = jax.nn.log_softmax(logits, axis=1), jax.nn.log_softmax(logits, axis=0)
        contrast = -(by_image[image, own].mean() + by_text[image, own].mean() + jnp.log(COPIES)) / 2
        to_anchors = lambda x, labels: optax.softmax_cross_entropy_with_integer_labels(
            scale * x @ unit(anchors).T, labels).mean()
        return contrast + 0.5 * (to_anchors(seen, ids[own]) + to_anchors(said, ids)), contrast

    return loss_fn


def make_step(model, optimizer):
    loss_fn = make_loss(model)

    @functools.partial(jax.jit, donate_argnums=(0,))
    def step(state, images, tokens, ids):
        trained, opt = state
        grads, loss = jax.grad(loss_fn, has_aux=True)(trained, images, tokens, ids)
        updates, opt = optimizer.update(grads, opt, trained)
        params, anchors = optax.apply_updates(trained, updates)
        params = params | {"logit_scale": jnp.minimum(params["logit_scale"], jnp.log(100.0))}
        return ((params, anchors), opt), loss

    return step


def make_optimizer(args):
    """AdamW; a constant rate until the last `decay_steps`, so that a run can be prolonged from its state."""
    schedule = optax.join_schedules(
        [optax.linear_schedule(0.0, args.lr, 100), optax.linear_schedule(args.lr, 0.0, args.decay_steps)],
        [args.steps - args.decay_steps])
    matrices = lambda tree: jax.tree.map(lambda x: x.ndim >= 2, tree)
    decayed = optax.adamw(schedule, b2=0.98, weight_decay=args.weight_decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), decayed)


def encode(tokenizer, texts):
    ids = tokenizer(texts, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="np")["input_ids"]
    return ids.astype(np.int32)


validation = functools.cache(lambda name: glyphs.load(name, "val"))


def zero_shot(model, params, tokenizer) -> dict[str, float]:
    """Accuracy on each task's validation split with the head of averaged templates."""
    image, text = jax.jit(clip.image_features(model)), jax.jit(clip.text_features(model))
    result = {}
    for task in (*glyphs.TASKS, glyphs.CONTROL):
        split = validation(task.name)
        prompts = [encode(tokenizer, [t.format(c) for c in task.classnames]) for t in task.templates]
        head = unit(sum(unit(text(params, ids)) for ids in prompts))
        said = np.asarray(image(params, pixels(split.images)) @ head.T).argmax(1)
        result[task.name] = float((said == split.labels).mean())
    return result


def restore(kept: pathlib.Path, state):
    """(step, state) of the file, or (0, state) where there is none."""
    if not kept.is_file():
        return 0, state
    with np.load(kept) as file:
        leaves = [jnp.asarray(file[f"x{i}"]) for i in range(len(jax.tree.leaves(state)))]
        return int(file["step"]), jax.tree.unflatten(jax.tree.structure(state), leaves)


def keep(kept: pathlib.Path, step: int, state) -> None:
    new = kept.with_name("new.npz")
    np.savez(new, step=step, **{f"x{i}": x for i, x in enumerate(jax.tree.leaves(jax.device_get(state)))})
    os.replace(new, kept)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the Hugging Face directory to write")
    parser.add_argument("--workdir", type=pathlib.Path, required=True, help="where the resumable state lies")
    whole = dict(seed=0, steps=6000, clean_steps=1500, decay_steps=1500, every=500, width=128, depth=4)
    for name, default in whole.items():
        parser.add_argument("--" + name, type=int, default=default)
    for name, default in dict(lr=1e-3, sparsity=0.7, weight_decay=0.05).items():
        parser.add_argument("--" + name, type=float, default=default)
    return parser.parse_args()


def main():
    args = parse()
    chars = universe()
    names = [unicodedata.name(c).lower() for c in chars]
    tokenizer = make_tokenizer(names)
    config = make_config(tokenizer, width=args.width, depth=args.depth)
    tokens = np.stack([encode(tokenizer, [t.format(n) for n in names]) for t in glyphs.TEMPLATES])
    tokens = tokens[:, :, :int((tokens != tokenizer.eos_token_id).sum(-1).max()) + 1]
    model = clip.CLIP(config)
    params = clip.init(model, jax.random.key(args.seed))
    optimizer = make_optimizer(args)
    trained = (params, jax.random.normal(jax.random.key(args.seed + 1), (len(chars), 128)))
    size = sum(x.size for x in jax.tree.leaves(params))
    print(f"{len(chars)} names, {len(tokenizer)} tokens, {size} parameters", flush=True)

    args.workdir.mkdir(parents=True, exist_ok=True)
    start, state = restore(args.workdir / "state.npz", (trained, optimizer.init(trained)))
    run = make_step(model, optimizer)
    make = functools.partial(batch, seed=args.seed, chars=chars, tokens=tokens, clean_steps=args.clean_steps,
                             sparsity=args.sparsity)
    began, losses = time.time(), []
    for step, data in enumerate(prefetch(make, range(start, args.steps)), start=start + 1):
        state, loss = run(state, *data)
        losses.append(loss)
        if step % 100 == 0:
            mean = float(jnp.mean(jnp.stack(losses)))
            print(f"step {step} loss {mean:.3f} seconds {time.time() - began:.0f}", flush=True)
            losses = []
        if step % args.every == 0 or step == args.steps:
            accuracy = zero_shot(model, state[0][0], tokenizer)
            mean = np.mean([accuracy[t.name] for t in glyphs.TASKS])
            each = " ".join(f"{k} {v:.2f}" for k, v in accuracy.items())
            print(f"step {step} zero-shot {mean:.3f} {each}", flush=True)
            save(args.out, state[0][0], config, tokenizer)
            keep(args.workdir / "state.npz", step, state)


if __name__ == "__main__":
    main()
