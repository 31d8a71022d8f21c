"""CLIP computes what transformers' CLIPModel computes, under the same names, and its folders go both ways."""
import json
import os
import subprocess
import sys
import textwrap

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from tvjax import checkpoints, tree
from tvjax.models import clip
from tvjax.models.layers import Linear

pytestmark = pytest.mark.usefixtures("quick_compilation")
TINY = clip.Spec(clip.VisionSpec(16, 24, 2, 2, image_size=16, patch=8),
                 clip.TextSpec(12, 20, 2, 3, vocabulary=50, positions=9, eos=49), projection_dim=10)


def config(*, activation="quick_gelu", patch=8, size=16, projection=10, eos=49, depth=2):
    import transformers
    text = dict(vocab_size=50, hidden_size=12, intermediate_size=20, num_hidden_layers=depth, num_attention_heads=3,
                max_position_embeddings=9, eos_token_id=eos, bos_token_id=48, pad_token_id=1, hidden_act=activation,
                layer_norm_eps=1e-4)
    vision = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=depth, num_attention_heads=2, image_size=size,
                  patch_size=patch, hidden_act=activation, layer_norm_eps=1e-3)
    return transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=projection)


def torch_model(cfg, kind="CLIPModel"):
    torch = pytest.importorskip("torch")
    import transformers
    torch.manual_seed(0)
    model = getattr(transformers, kind)(cfg).eval()
    for p in model.parameters():  # biases and norms start at 0 and 1, where mistakes hide
        p.data.add_(0.1 * torch.randn_like(p))
    return torch, model


def state(model):
    return {name: x.detach().numpy() for name, x in model.state_dict().items()}


def inputs(size=16, images=3, prompts=4, tokens=9):
    """Pixels, prompts that end with 49 at various places, padded with 49 as OpenAI's tokenizer does, and the mask."""
    rng = np.random.default_rng(1)
    ids = rng.integers(2, 48, (prompts, tokens))
    ends = np.arange(prompts) % (tokens - 3) + 2
    mask = (np.arange(tokens)[None] <= ends[:, None]).astype(np.int32)
    ids = np.where(np.arange(tokens)[None] < ends[:, None], ids, 49).astype(np.int32)
    return rng.normal(size=(images, size, size, 3)).astype(np.float32), ids, mask


CASES = {"quick_gelu": {}, "gelu": {"activation": "gelu"}, "tanh gelu": {"activation": "gelu_pytorch_tanh"},
         "patch 14": {"patch": 14, "size": 28}, "patch 16": {"patch": 16, "size": 32},
         "patch 32": {"patch": 32, "size": 64}, "projection": {"projection": 7}, "legacy eos": {"eos": 2},
         "remainder": {"size": 21}, "eleven layers": {"depth": 11}, "no mask": {}, "legacy eos, no mask": {"eos": 2}}


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_transformers(case):
    cfg = config(**CASES[case])
    torch, theirs = torch_model(cfg)
    model, params = clip.CLIP(cfg), tree.unflatten(state(theirs))
    pixels, ids, mask = inputs(cfg.vision_config.image_size)
    mask = None if "no mask" in case else mask
    given = {"input_ids": torch.tensor(ids.astype(int)), "attention_mask": None if mask is None else torch.tensor(mask)}
    images = torch.tensor(pixels.transpose(0, 3, 1, 2))
    with torch.no_grad():
        expected = (theirs.get_image_features(images).pooler_output.numpy(),
                    theirs.get_text_features(**given).pooler_output.numpy(),
                    theirs(pixel_values=images, **given).logits_per_image.numpy())

    @jax.jit
    def ours(params, pixels, ids, mask):
        return (clip.image_features(model)(clip.visual(params), pixels), clip.text_features(model)(params, ids, mask),
                clip.logits(model)(params, pixels, ids, mask))

    for mine, other in zip(ours(params, pixels, ids, mask), expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


def test_gradients_agree_with_transformers():
    cfg = config()
    torch, theirs = torch_model(cfg)
    pixels, ids, mask = inputs()
    out = theirs(pixel_values=torch.tensor(pixels.transpose(0, 3, 1, 2)), input_ids=torch.tensor(ids.astype(int)),
                 attention_mask=torch.tensor(mask)).logits_per_image
    weights = np.random.default_rng(2).normal(size=out.shape).astype(np.float32)
    (out * torch.tensor(weights)).sum().backward()
    logits = clip.logits(clip.CLIP(cfg))
    ours = jax.jit(jax.grad(lambda p: (logits(p, pixels, ids, mask) * weights).sum()))(tree.unflatten(state(theirs)))
    for name, gradient in tree.flatten(ours).items():
        other = theirs.get_parameter(name).grad.numpy()
        if name.endswith("k_proj.bias"):  # softmax doesn't see a shift of the keys: zero but for rounding
            assert np.abs(other).max() < 1e-5 and np.abs(gradient).max() < 1e-5
            continue
        np.testing.assert_allclose(gradient, other, rtol=1e-5, atol=1e-5 * np.abs(other).max(), err_msg=name)


def test_names_and_shapes_are_those_of_transformers():
    cfg = config(depth=11)
    _, theirs = torch_model(cfg)
    ours = tree.flatten(jax.eval_shape(lambda key: clip.init(clip.CLIP(cfg), key), jax.random.key(0)))
    assert {name: x.shape for name, x in ours.items()} == {name: x.shape for name, x in state(theirs).items()}


def test_starts_as_transformers_starts():
    torch = pytest.importorskip("torch")
    import transformers
    cfg = config(depth=1)
    cfg.vision_config.hidden_size, cfg.text_config.hidden_size = 64, 48
    torch.manual_seed(0)
    theirs = state(transformers.CLIPModel(cfg))
    ours = tree.flatten(clip.init(clip.CLIP(cfg), jax.random.key(0)))
    for name, leaf in theirs.items():
        if leaf.std() == 0:
            np.testing.assert_array_equal(ours[name], leaf, err_msg=name)
        elif leaf.size > 500:  # the spread of that many draws is known to a few percent
            assert abs(float(ours[name].std()) / leaf.std() - 1) < 0.15, name


def test_the_models_transformations():
    apply = clip.image_features(clip.CLIP(TINY))
    params = clip.visual(clip.init(clip.CLIP(TINY), jax.random.key(0)))
    pixels = inputs()[0]
    tau = jax.tree.map(lambda x: 0.01 * jnp.ones_like(x), params)
    value, tangent = jax.jit(lambda p, t: jax.jvp(lambda q: apply(q, pixels), (p,), (t,)))(params, tau)
    forward = jax.jit(lambda p, t, h: apply(jax.tree.map(lambda x, y: x + h * y, p, t), pixels))
    quotient = (forward(params, tau, 0.1) - forward(params, tau, -0.1)) / 0.2
    np.testing.assert_allclose(tangent, quotient, rtol=1e-2, atol=1e-4)  # a difference quotient is no better than that
    np.testing.assert_allclose(forward(params, tau, 0.0), value, rtol=1e-5, atol=1e-6)
    one = lambda p, image: (apply(p, image[None]) ** 2).sum()
    each = tree.flatten(jax.jit(jax.vmap(jax.grad(one), (None, 0)))(params, pixels))
    for name, alone in tree.flatten(jax.jit(jax.grad(one))(params, pixels[1])).items():
        np.testing.assert_allclose(each[name][1], alone, rtol=1e-5, atol=1e-6 * (1 + np.abs(alone).max()))


def test_tabulates():
    table = clip.CLIP(TINY).tabulate(jax.random.key(0), *inputs(), compute_flops=False, compute_vjp_flops=False)
    assert "vision_model" in table


def test_interceptors_see_every_linear_map_by_its_path():
    params, seen = clip.init(clip.CLIP(TINY), jax.random.key(0)), []
    pixels, ids, mask = inputs()

    def note(call, args, kwargs, context):
        if isinstance(context.module, Linear):
            seen.append(".".join(context.module.path))
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        jax.eval_shape(clip.logits(clip.CLIP(TINY)), params, pixels, ids, mask)
    linear = {name.removesuffix(".weight") for name, x in tree.flatten(params).items()
              if x.ndim == 2 and name.endswith(".weight") and "embedding" not in name}
    assert set(seen) == linear and len(seen) == len(linear)


def test_the_same_model_is_the_same_function():
    assert clip.image_features(clip.CLIP(TINY)) is clip.image_features(clip.CLIP(TINY))
    assert clip.CLIP(config()) == clip.CLIP(config()) and hash(clip.CLIP(config())) == hash(clip.CLIP(config()))


def test_bfloat16_stays_bfloat16():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), clip.init(clip.CLIP(TINY), jax.random.key(0)))
    pixels, ids, mask = inputs()
    out = jax.jit(clip.logits(clip.CLIP(TINY)))(params, pixels, ids, mask)
    assert out.dtype == jnp.bfloat16 and np.isfinite(np.asarray(out, np.float32)).all()


def test_visual_and_merge_visual():
    params = clip.init(clip.CLIP(TINY), jax.random.key(0))
    assert set(clip.visual(params)) == {"vision_model", "visual_projection"}
    other = jax.tree.map(lambda x: x + 1, clip.visual(params))
    whole = clip.merge_visual(params, other)
    assert whole["vision_model"] is other["vision_model"] and whole["text_model"] is params["text_model"]
    assert params["vision_model"] is not other["vision_model"]
    with pytest.raises(ValueError, match="you gave text_model too"):
        clip.merge_visual(params, {"text_model": {}})


def test_slips_are_told_in_a_sentence():
    params = clip.init(clip.CLIP(TINY), jax.random.key(0))
    pixels, ids, mask = inputs()
    with pytest.raises(ValueError, match=r"pixels have shape \(3, 3, 16, 16\); this model takes \(batch, 16, 16, 3\)"):
        clip.image_features(clip.CLIP(TINY))(params, pixels.transpose(0, 3, 1, 2))
    with pytest.raises(ValueError, match="at most 9 tokens"):
        clip.text_features(clip.CLIP(TINY))(params, np.ones((2, 10), np.int32))
    with pytest.raises(ValueError, match="text features need text_model, text_projection, but params hold only vis"):
        clip.text_features(clip.CLIP(TINY))(clip.visual(params), ids)
    with pytest.raises(ValueError, match="image features need visual_projection, but params hold only vision_model"):
        clip.image_features(clip.CLIP(TINY))({"vision_model": params["vision_model"]}, pixels)
    with pytest.raises(ValueError, match="hidden_act is 'mish'; there are gelu"):
        clip.CLIP(config(activation="mish"))


def tokenizer_files(folder):
    """A character-level CLIP vocabulary of 50 entries, made here."""
    letters = [chr(ord("a") + i) for i in range(23)]
    vocab = {token: i for i, token in enumerate([*letters, *(f"{x}</w>" for x in letters), "!", "?", "<|startoftext|>",
                                                  "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n")


@pytest.fixture
def folder(tmp_path):
    """A whole CLIP as transformers itself would publish it, weights included."""
    import transformers
    made = tmp_path / "tiny-clip"
    made.mkdir()
    cfg = config()
    cfg.save_pretrained(made)
    tokenizer_files(made)
    crop = {"height": 16, "width": 16}
    transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=crop).save_pretrained(made)
    checkpoints.save(clip.init(clip.CLIP(cfg), jax.random.key(3)), made,
                     buffers={"text_model.embeddings.position_ids": np.arange(9)[None]})
    return made


def test_reads_a_folder_and_writes_one_that_transformers_reads(folder, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers
    pretrained = clip.from_pretrained(folder)
    assert list(pretrained.buffers) == ["text_model.embeddings.position_ids"]
    changed = jax.tree.map(lambda x: x + 0.01, clip.visual(pretrained.params))
    clip.save_pretrained(pretrained, changed, tmp_path / "new")
    back = clip.from_pretrained(tmp_path / "new")
    whole = clip.merge_visual(pretrained.params, changed)
    jax.tree.map(np.testing.assert_array_equal, back.params, whole)
    theirs = transformers.CLIPModel.from_pretrained(tmp_path / "new").eval()
    for name, leaf in tree.flatten(whole).items():
        np.testing.assert_array_equal(theirs.get_parameter(name).detach().numpy(), leaf)
    words = back.tokenizer(["a cab", "bad"], padding=True, return_tensors="np")
    with torch.no_grad():
        other = theirs.get_text_features(**{k: torch.tensor(v) for k, v in words.items()}).pooler_output.numpy()
    ours = clip.text_features(back.model)(back.params, words["input_ids"], words["attention_mask"])
    np.testing.assert_allclose(ours, other, rtol=1e-5, atol=1e-5)
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == sorted(p.name for p in folder.iterdir())


def test_an_interrupted_save_leaves_the_old_folder(folder, monkeypatch):
    pretrained = clip.from_pretrained(folder)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def fail(*args, **kwargs):
        raise OSError("full")

    monkeypatch.setattr(safetensors.numpy, "save_file", fail)
    with pytest.raises(OSError, match="full"):
        clip.save_pretrained(pretrained, jax.tree.map(jnp.zeros_like, pretrained.params), folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


@pytest.mark.parametrize("kind", ["CLIPVisionModel", "CLIPVisionModelWithProjection"])
def test_a_vision_tower_alone(tmp_path, kind):
    torch, theirs = torch_model(config().vision_config, kind)
    import transformers
    theirs.save_pretrained(tmp_path / "vision")
    tower = clip.from_pretrained(tmp_path / "vision")
    assert set(tower.params) == {"vision_model", "visual_projection"} if "With" in kind else {"vision_model"}
    pixels, ids, _ = inputs()
    images = torch.tensor(pixels.transpose(0, 3, 1, 2))
    if "With" in kind:
        with torch.no_grad():
            other = theirs(images).image_embeds.numpy()
        np.testing.assert_allclose(clip.image_features(tower.model)(tower.params, pixels), other, rtol=1e-5, atol=1e-5)
    else:
        with pytest.raises(ValueError, match="image features need visual_projection"):
            clip.image_features(tower.model)(tower.params, pixels)
    with pytest.raises(ValueError, match="text features need text_model"):
        clip.text_features(tower.model)(tower.params, ids)
    with pytest.raises(ValueError, match="holds no tokenizer"):
        tower.tokenizer(["a"])
    with pytest.raises(ValueError, match="holds no preprocessor_config.json"):
        _ = tower.processor.size
    clip.save_pretrained(tower, tower.params, tmp_path / "again")
    again = getattr(transformers, kind).from_pretrained(tmp_path / "again").eval()
    for name, leaf in state(theirs).items():
        np.testing.assert_array_equal(state(again)[name], leaf)


def test_weights_of_torchs_own_format(folder):
    torch = pytest.importorskip("torch")
    flat = tree.flatten(clip.from_pretrained(folder).params)
    tensors = {name: torch.tensor(np.asarray(x)) for name, x in flat.items()}
    narrow = tensors["logit_scale"].bfloat16()
    torch.save({**tensors, "logit_scale": narrow}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").rename(folder / "kept")
    back = clip.from_pretrained(folder).params
    assert back["logit_scale"].dtype == jnp.bfloat16 and float(back["logit_scale"]) == float(narrow)
    np.testing.assert_array_equal(tree.flatten(back)["visual_projection.weight"], flat["visual_projection.weight"])


def test_folders_that_will_not_do(folder, tmp_path):
    with pytest.raises(ValueError, match="There is no folder .*tiny-clop.*did you mean 'tiny-clip'"):
        clip.from_pretrained(tmp_path / "tiny-clop")
    (folder / "model.safetensors").rename(folder / "kept")
    with pytest.raises(ValueError, match="holds no model.safetensors"):
        clip.from_pretrained(folder)
    params = clip.init(clip.CLIP(config()), jax.random.key(0))
    one = np.ones(1, np.float32)
    checkpoints.save({**params, "classifier": one, "logit_scale": one}, folder)
    with pytest.raises(ValueError, match="don't fit its config.json: only in the weights: classifier; shapes: logit"):
        clip.from_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="says model_type 'bert'; this reads clip and clip_vision_model"):
        clip.from_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="holds no readable config.json"):
        clip.from_pretrained(folder)


def test_a_hub_name_that_cannot_be_had(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(*args, **kwargs):
        raise LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder.\nMore about it.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    said = r"^'openai/no-such-clip' is no folder here .*: Cannot find an .* folder\. Offline, give"
    with pytest.raises(ValueError, match=said):
        clip.from_pretrained("openai/no-such-clip")


def test_a_hub_name_is_downloaded_without_what_is_not_needed(folder, monkeypatch):
    import huggingface_hub
    asked = []

    def download(name, *, revision, allow_patterns):
        asked.append((name, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert clip.from_pretrained("someone/tiny-clip", revision="main").path == folder
    assert [a[:2] for a in asked] == [("someone/tiny-clip", "main")] and "pytorch_model.bin" not in asked[0][2]


WITHOUT_TORCH = """
    import sys
    from importlib.machinery import PathFinder
    class Hidden(PathFinder):
        @classmethod
        def find_spec(cls, name, *args):
            return None if name.partition(".")[0] in ("torch", "torchvision") else super().find_spec(name, *args)
    sys.meta_path[sys.meta_path.index(PathFinder)] = Hidden
    import numpy as np
    from PIL import Image
    from tvjax.models import clip
    pretrained = clip.from_pretrained(sys.argv[1])
    assert not any(name.startswith("transformers.models.clip.tokenization") for name in sys.modules)
    words = pretrained.tokenizer(["a cab"], padding=True, return_tensors="np")
    image = Image.fromarray(np.full((20, 30, 3), 99, np.uint8))
    image = pretrained.processor(image, return_tensors="np")["pixel_values"]
    logits = clip.logits(pretrained.model)(pretrained.params, image.transpose(0, 2, 3, 1), **words)
    assert logits.shape == (1, 1) and np.isfinite(logits).all()
    assert "torch" not in sys.modules
"""


def test_needs_no_torch(folder):
    """Where torch is installed, transformers itself imports it; so here it is hidden, as on a machine without it."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(WITHOUT_TORCH), str(folder)], capture_output=True,
                          text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False)
    assert done.returncode == 0, done.stderr
