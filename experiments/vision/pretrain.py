"""The small encoders of configs/vision.py: one trained to tell the characters of omniglot apart, one left random.

    python experiments/vision/pretrain.py ../shared/data/vision_real.npz runs/encoders

Writes `omniglot` and `random`, folders of a CLIP vision tower (28 × 28 pixels, 16 patches, 96 wide, 3 layers), and
says the accuracy on omniglot's held-out drawings under the head it was trained with.
"""
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import transformers

from tvjax import checkpoints, evaluation, training
from tvjax.data import arrays
from tvjax.experiment import glyph_suite
from tvjax.models import clip

MEAN, STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
RECIPE = training.Recipe(steps=1200, batch=64, lr=1e-3, warmup=60, weight_decay=0.05, label_smoothing=0.1)


def config():
    return transformers.CLIPVisionConfig(hidden_size=96, intermediate_size=384, num_hidden_layers=3,
                                         num_attention_heads=4, image_size=28, patch_size=7, projection_dim=96)


def loss(encode):
    """Cross-entropy of a cosine classifier, so that features are trained as the frozen heads use them."""
    predict = evaluation.classify(encode)

    def loss(params, batch, key):
        images, labels = batch
        head = params["head"] / jnp.linalg.norm(params["head"], axis=0, keepdims=True)
        return training.cross_entropy(predict(params["tower"], 20.0 * head, images), labels,
                                      smoothing=RECIPE.label_smoothing)
    return loss


def save(params, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config().to_json_string())
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "image_processor_type": "CLIPImageProcessor", "image_mean": MEAN, "image_std": STD,
        "size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}))
    checkpoints.save(jax.device_get(params), folder / "model.safetensors")


def main(source: str, target: str) -> None:
    task = arrays.read(source, "omniglot", side=28)
    model = clip.CLIP(clip.spec(config()))
    encode = glyph_suite.encoder(model, MEAN, STD)
    tower = clip.init(model, jax.random.key(0))
    save(tower, pathlib.Path(target) / "random")
    head = jax.random.normal(jax.random.key(1), (96, task.classes))
    begun = time.perf_counter()
    feed = lambda start: training.batches(tuple(task.splits["train"]), batch=RECIPE.batch, seed=0, start=start)
    fitted = training.fit(loss(encode), {"tower": tower, "head": head}, feed, RECIPE, progress=False)
    columns = fitted.params["head"] / np.linalg.norm(fitted.params["head"], axis=0, keepdims=True)
    test = evaluation.accuracy(evaluation.classify(encode), fitted.params["tower"], columns, tuple(task.splits["test"]))
    save(fitted.params["tower"], pathlib.Path(target) / "omniglot")
    print(f"omniglot: {100 * test:.1f} % of {task.classes} characters on test, {time.perf_counter() - begun:.0f} s, "
          f"loss {fitted.losses[-1]:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
