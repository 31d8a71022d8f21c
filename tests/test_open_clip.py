"""Folders of open_clip: what its own models compute comes out, under names of Hugging Face for vision transformers."""
import functools
import json

import jax
import numpy as np
import pytest

from tvjax import models, tree
from tvjax.models import clip, clip_resnet

pytestmark = pytest.mark.usefixtures("quick_compilation")
TEXT = {"context_length": 7, "vocab_size": 20, "width": 8, "heads": 2, "layers": 2}
VIT = {"embed_dim": 6, "quick_gelu": True, "text_cfg": TEXT,
       "vision_cfg": {"image_size": 16, "layers": 2, "width": 12, "head_width": 4, "patch_size": 8}}
RESNET = {"embed_dim": 6, "text_cfg": TEXT,
          "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 4, "patch_size": None}}


def written(path, about, weights):
    torch = pytest.importorskip("torch")
    path.mkdir()
    (path / "open_clip_config.json").write_text(json.dumps({"model_cfg": about, "preprocess_cfg": {"mean": [0, 0, 1]}}))
    torch.save(weights, path / "open_clip_pytorch_model.bin")
    return path


def hugging_face():
    """A CLIP of transformers like VIT, with biases and norms away from 0 and 1."""
    torch = pytest.importorskip("torch")
    import transformers
    tower = lambda part, heads: dict(hidden_size=part["width"], intermediate_size=4 * part["width"],
                                     num_hidden_layers=2, num_attention_heads=heads, hidden_act="quick_gelu")
    config = transformers.CLIPConfig(
        vision_config=dict(**tower(VIT["vision_cfg"], 3), image_size=16, patch_size=8), projection_dim=6,
        text_config=dict(**tower(TEXT, 2), vocab_size=20, max_position_embeddings=7, eos_token_id=19))
    torch.manual_seed(0)
    model = transformers.CLIPModel(config).eval()
    for p in model.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    return torch, model


def renamed(torch, state):
    """The weights of transformers as open_clip names, joins and turns them."""
    found, pieces = {}, {}
    for name, x in state.items():
        name = name.replace("vision_model.encoder.layers", "visual.transformer.resblocks").replace(
            "text_model.encoder.layers", "transformer.resblocks").replace("self_attn", "attn").replace(
            "layer_norm", "ln_").replace("mlp.fc1", "mlp.c_fc").replace("mlp.fc2", "mlp.c_proj")
        if "_proj." in name and ".attn." in name and "out_proj" not in name:
            at, _, rest = name.rpartition(".attn.")
            pieces.setdefault(f"{at}.attn.in_proj_{rest.partition('.')[2]}", {})[rest[0]] = x
            continue
        top = {"vision_model.embeddings.patch_embedding.weight": "visual.conv1.weight",
               "vision_model.embeddings.class_embedding": "visual.class_embedding",
               "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
               "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
               "text_model.embeddings.position_embedding.weight": "positional_embedding"}
        name = name.replace("vision_model.pre_layrnorm", "visual.ln_pre").replace(
            "vision_model.post_layernorm", "visual.ln_post").replace("text_model.final_ln_", "ln_final")
        if name in ("visual_projection.weight", "text_projection.weight"):
            found["visual.proj" if "visual" in name else "text_projection"] = x.T.contiguous()
        elif "position_ids" not in name:
            found[top.get(name, name)] = x
    return found | {name: torch.cat([part[letter] for letter in "qkv"]) for name, part in pieces.items()}


def test_a_vision_transformers_folder_becomes_one_of_transformers(tmp_path):
    torch, theirs = hugging_face()
    folder = written(tmp_path / "vit", VIT, renamed(torch, theirs.state_dict()))
    found = models.from_pretrained(folder)
    state = {name: x.numpy() for name, x in theirs.state_dict().items() if "position_ids" not in name}
    flat = tree.flatten(found.params)
    assert set(flat) == set(state)
    for name, leaf in state.items():
        np.testing.assert_array_equal(flat[name], leaf)
    assert found.model == clip.CLIP(theirs.config) and list(found.processor.image_mean) == [0, 0, 1]
    clip.save_pretrained(found, found.params, tmp_path / "new")
    again = type(theirs).from_pretrained(tmp_path / "new")
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in theirs.state_dict().items())


@pytest.mark.parametrize("about", [VIT, RESNET], ids=["ViT", "ResNet"])
def test_logits_are_open_clips(tmp_path, about):
    """Against the package itself, where it is installed."""
    open_clip = pytest.importorskip("open_clip", exc_type=ImportError)
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    theirs = open_clip.model.CLIP(**about).eval()
    for name, x in (*theirs.named_parameters(), *theirs.named_buffers()):
        if x.is_floating_point() and "attn_mask" not in name:
            x.data.add_(0.1 * torch.rand_like(x))
    found = models.from_pretrained(written(tmp_path / "model", about, theirs.state_dict()))
    rng = np.random.default_rng(0)
    side, ids = about["vision_cfg"]["image_size"], rng.integers(1, 18, (3, 7)).astype(np.int32)
    ids[0, 4], ids[1, 6], ids[2, 2] = 19, 19, 19
    pixels = rng.standard_normal((2, side, side, 3)).astype(np.float32)
    with torch.no_grad():
        image, text, scale = theirs(torch.tensor(pixels.transpose(0, 3, 1, 2)), torch.tensor(ids.astype(int)))[:3]
        expected = (scale * image @ text.T).numpy()
    if about is RESNET:
        params = clip_resnet.join(found.params, clip_resnet.statistics(found))
        mine = jax.jit(clip_resnet.logits(found.model))(params, pixels, ids)
    else:
        mine = jax.jit(functools.partial(clip.logits(found.model), attention_mask=None))(found.params, pixels, ids)
    np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_what_is_not_supported_is_told_in_a_sentence(tmp_path):
    torch, theirs = hugging_face()
    weights = renamed(torch, theirs.state_dict())
    timm = {**VIT, "vision_cfg": {**VIT["vision_cfg"], "timm_model_name": "vit_base"}}
    with pytest.raises(ValueError, match="sets timm_model_name in vision_cfg, which changes the network"):
        clip.from_pretrained(written(tmp_path / "timm", timm, weights))
    hf = {**VIT, "text_cfg": {"hf_model_name": "roberta-base"}}
    with pytest.raises(ValueError, match="says nothing of width, layers, heads in text_cfg"):
        clip.from_pretrained(written(tmp_path / "hf", hf, weights))
    with pytest.raises(ValueError, match="holds a residual network: tvjax.models.clip_resnet reads it"):
        clip.from_pretrained(written(tmp_path / "rn", RESNET, weights))
    more = {**weights, "visual.attn_pool.query": weights["logit_scale"]}
    with pytest.raises(ValueError, match="only in the weights: visual.attn_pool.query"):
        clip.from_pretrained(written(tmp_path / "more", VIT, more))
