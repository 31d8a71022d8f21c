"""CLIP's residual network computes what OpenAI's torch code computes (written down here again), statistics apart."""
import functools
import json

import jax
import numpy as np
import pytest

from tvjax import checkpoints, models, tree
from tvjax.models import clip_resnet as resnet

pytestmark = pytest.mark.usefixtures("quick_compilation")
ABOUT = {"model_cfg": {"embed_dim": 6, "quick_gelu": True,
                       "vision_cfg": {"image_size": 64, "layers": [2, 1, 1, 1], "width": 4, "patch_size": None},
                       "text_cfg": {"context_length": 7, "vocab_size": 20, "width": 8, "heads": 2, "layers": 2}},
         "preprocess_cfg": {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]}}
MODEL = resnet.ResNetCLIP(resnet.spec(ABOUT))


def torch_network(torch):
    """The CLIP of ABOUT, as OpenAI's model.py builds it."""
    nn, seq = torch.nn, torch.nn.Sequential

    class Bottleneck(nn.Module):
        def __init__(self, inside, width, stride):
            super().__init__()
            conv = functools.partial(nn.Conv2d, bias=False)
            self.conv1, self.bn1 = conv(inside, width, 1), nn.BatchNorm2d(width)
            self.conv2, self.bn2 = conv(width, width, 3, padding=1), nn.BatchNorm2d(width)
            self.conv3, self.bn3 = conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
            self.pool = nn.AvgPool2d(stride)
            self.downsample = None
            if stride > 1 or inside != 4 * width:
                self.downsample = seq()
                self.downsample.add_module("-1", nn.AvgPool2d(stride))
                self.downsample.add_module("0", conv(inside, 4 * width, 1))
                self.downsample.add_module("1", nn.BatchNorm2d(4 * width))

        def forward(self, x):
            y = self.bn1(self.conv1(x)).relu()
            y = self.pool(self.bn2(self.conv2(y)).relu())
            return (self.bn3(self.conv3(y)) + (x if self.downsample is None else self.downsample(x))).relu()

    class Pool(nn.Module):
        def __init__(self, places, width, heads, features):
            super().__init__()
            self.positional_embedding = nn.Parameter(torch.randn(places + 1, width))
            self.k_proj, self.q_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
            self.c_proj, self.heads = nn.Linear(width, features), heads

        def forward(self, x):
            x = x.flatten(2).permute(2, 0, 1)
            x = torch.cat([x.mean(0, keepdim=True), x]) + self.positional_embedding[:, None]
            bias = torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias])
            return nn.functional.multi_head_attention_forward(
                x, x, x, x.shape[-1], self.heads, None, bias, None, None, False, 0.0, self.c_proj.weight,
                self.c_proj.bias, training=False, need_weights=False, use_separate_proj_weight=True,
                q_proj_weight=self.q_proj.weight, k_proj_weight=self.k_proj.weight,
                v_proj_weight=self.v_proj.weight)[0][0]

    class Visual(nn.Module):
        def __init__(self):
            super().__init__()
            for i, (a, b, stride) in enumerate([(3, 2, 2), (2, 2, 1), (2, 4, 1)], 1):
                setattr(self, f"conv{i}", nn.Conv2d(a, b, 3, stride=stride, padding=1, bias=False))
                setattr(self, f"bn{i}", nn.BatchNorm2d(b))
            inside = 4
            for i, blocks in enumerate((2, 1, 1, 1)):
                width, stage = 4 * 2**i, seq()
                for j in range(blocks):
                    stage.append(Bottleneck(inside, width, 2 if i and not j else 1))
                    inside = 4 * width
                setattr(self, f"layer{i + 1}", stage)
            self.attnpool = Pool(4, 128, 2, 6)

        def forward(self, x):
            for i in "123":
                x = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(x)).relu()
            x = nn.functional.avg_pool2d(x, 2)
            return self.attnpool(self.layer4(self.layer3(self.layer2(self.layer1(x)))))

    class QuickGELU(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(1.702 * x)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.mlp = nn.MultiheadAttention(8, 2), seq()
            self.ln_1, self.ln_2 = nn.LayerNorm(8), nn.LayerNorm(8)
            for name, part in (("c_fc", nn.Linear(8, 32)), ("gelu", QuickGELU()), ("c_proj", nn.Linear(32, 8))):
                self.mlp.add_module(name, part)

        def forward(self, x):
            y, mask = self.ln_1(x), torch.full((x.shape[0],) * 2, -torch.inf).triu(1)
            x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
            return x + self.mlp(self.ln_2(x))

    class CLIP(nn.Module):
        def __init__(self):
            super().__init__()
            self.visual, self.transformer = Visual(), nn.Module()
            self.transformer.resblocks = seq(Block(), Block())
            self.token_embedding, self.ln_final = nn.Embedding(20, 8), nn.LayerNorm(8)
            self.positional_embedding = nn.Parameter(torch.randn(7, 8))
            self.text_projection, self.logit_scale = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.tensor(1.5))

        def encode_text(self, ids):
            x = self.token_embedding(ids) + self.positional_embedding[: ids.shape[1]]
            x = self.ln_final(self.transformer.resblocks(x.transpose(0, 1)).transpose(0, 1))
            return x[torch.arange(len(ids)), ids.argmax(-1)] @ self.text_projection

        def forward(self, images, ids):
            image, text = (y / y.norm(dim=-1, keepdim=True) for y in (self.visual(images), self.encode_text(ids)))
            return self.logit_scale.exp() * image @ text.T

    return CLIP()


@functools.cache
def torch_model():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch_network(torch).eval()
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.is_floating_point():  # scales and variances start at 1, means and shifts at 0, where mistakes hide
            x.data.add_(0.1 * torch.rand_like(x) if name.endswith("var") else 0.1 * torch.randn_like(x))
    return torch, model


def state():
    return {name: x.detach().numpy().copy() for name, x in torch_model()[1].state_dict().items()}


def whole():
    """Parameters and statistics in one tree, as in the file."""
    return tree.unflatten({n: x for n, x in state().items() if not n.endswith("num_batches_tracked")})


def inputs(images=4):
    rng = np.random.default_rng(1)
    ids = rng.integers(1, 18, (3, 7)).astype(np.int32)
    ids[0, 4], ids[1, 6], ids[2, 2] = 19, 19, 19
    return rng.normal(size=(images, 64, 64, 3)).astype(np.float32), ids


def test_forward_and_gradients_agree_with_torch():
    torch, theirs = torch_model()
    pixels, ids = inputs()
    theirs.zero_grad()
    out = theirs(torch.tensor(pixels.transpose(0, 3, 1, 2)), torch.tensor(ids.astype(int)))
    cotangent = np.random.default_rng(2).normal(size=out.shape).astype(np.float32)
    (out * torch.tensor(cotangent)).sum().backward()

    def both(params, statistics):
        value, pull = jax.vjp(lambda p: resnet.logits(MODEL)(resnet.join(p, statistics), pixels, ids), params)
        return value, pull(cotangent)[0]

    mine, grads = jax.jit(both)(*resnet.split(whole()))
    out = out.detach().numpy()
    np.testing.assert_allclose(mine, out, rtol=1e-5, atol=1e-5 * np.abs(out).max())
    grads = tree.flatten(grads)
    assert set(grads) == {name for name, _ in theirs.named_parameters()}
    largest = max(float(np.abs(g).max()) for g in grads.values())
    for name, gradient in grads.items():
        other = theirs.get_parameter(name).grad.numpy()
        atol = max(1e-5 * np.abs(other).max(), 1e-7 * largest)  # softmax doesn't see the keys' bias: zero but rounding
        np.testing.assert_allclose(gradient, other, rtol=1e-5, atol=atol, err_msg=name)


def test_recomputed_statistics_are_torchs():
    """torch.optim.swa_utils.update_bn over two batches; and a step's moving average."""
    torch, _ = torch_model()
    theirs = torch_network(torch)
    theirs.load_state_dict(torch_model()[1].state_dict())
    batches = [inputs()[0], inputs()[0][::-1] * 0.5 + 0.2]
    images = [torch.tensor(x.transpose(0, 3, 1, 2).copy()) for x in batches]
    params, running = resnet.split({"visual": whole()["visual"]})
    with torch.no_grad():
        features = theirs.train().visual(images[0]).numpy()
    stepped = {name: x.numpy().copy() for name, x in theirs.named_buffers() if "running" in name}
    torch.optim.swa_utils.update_bn(images, theirs.visual)
    anew = {name: x.numpy() for name, x in theirs.named_buffers() if "running" in name}
    mine = resnet.merged_statistics(MODEL, params, running, batches=batches, policy="recompute")
    values, batch = jax.jit(resnet.training_features(MODEL))(params, batches[0])
    np.testing.assert_allclose(values, features, rtol=1e-4, atol=1e-5 * np.abs(features).max())  # 1 of few examples
    for name, leaf in tree.flatten(mine).items():
        np.testing.assert_allclose(leaf, anew[name], rtol=1e-5, atol=1e-5 * np.abs(anew[name]).max(), err_msg=name)
    for name, leaf in tree.flatten(resnet.moved(running, batch)).items():
        np.testing.assert_allclose(leaf, stepped[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_policies_for_a_merged_models_statistics():
    params, base = resnet.split(whole())
    tuned = [jax.tree.map(lambda x, i=i: x + i, base) for i in (1.0, 3.0)]
    assert resnet.merged_statistics(MODEL, params, base, tuned) is base
    average = resnet.merged_statistics(MODEL, params, base, tuned, policy="average")
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y + 2, rtol=1e-6), average, base)
    with pytest.raises(ValueError, match="no policy 'averge' for statistics of batches; did you mean 'average'"):
        resnet.merged_statistics(MODEL, params, base, policy="averge")
    with pytest.raises(ValueError, match="no batches to compute statistics from"):
        resnet.merged_statistics(MODEL, params, base, policy="recompute")
    with pytest.raises(ValueError, match="no statistics to average"):
        resnet.merged_statistics(MODEL, params, base, policy="average")


def folder(path):
    made = path / "tiny-rn"
    made.mkdir()
    (made / "open_clip_config.json").write_text(json.dumps(ABOUT))
    checkpoints.save(resnet.split(whole())[0], made / "open_clip_model.safetensors",
                     buffers={n: x for n, x in state().items() if "running" in n or "tracked" in n})
    return made


def test_folders_go_both_ways_with_statistics_among_the_buffers(tmp_path):
    found = models.from_pretrained(folder(tmp_path))
    assert not [name for name in tree.flatten(found.params) if "running" in name]
    assert tree.size(found.params) == sum(p.numel() for p in torch_model()[1].parameters())
    changed = jax.tree.map(lambda x: np.asarray(x) + 1, resnet.visual(found.params))
    statistics = jax.tree.map(lambda x: np.asarray(x) + 2, resnet.statistics(found))
    resnet.save_pretrained(resnet.with_statistics(found, statistics), changed, tmp_path / "new")
    back = resnet.from_pretrained(tmp_path / "new")
    jax.tree.map(np.testing.assert_array_equal, back.params, {**found.params, **changed})
    jax.tree.map(np.testing.assert_array_equal, resnet.statistics(back), statistics)
    assert back.model == found.model == MODEL and list(back.processor.image_mean) == [0.5, 0.4, 0.3]
    torch, _ = torch_model()
    stored = checkpoints.load(tmp_path / "new" / "open_clip_model.safetensors")
    flat = {**tree.flatten(stored.params), **stored.buffers}
    torch_network(torch).load_state_dict({name: torch.tensor(x) for name, x in flat.items()})  # all keys, no others


def test_published_sizes():
    """RN50's image tower has 38,316,896 parameters and the whole 102,007,137."""
    model = resnet.ResNetCLIP(resnet.Spec(projection_dim=1024))
    shapes, _ = jax.eval_shape(functools.partial(resnet.init, model), jax.random.key(0))
    count = lambda part: sum(x.size for x in jax.tree.leaves(part))
    assert count(shapes["visual"]) == 38_316_896 and count(shapes) == 102_007_137


def test_slips_are_told_in_a_sentence(tmp_path):
    params, running = resnet.split(whole())
    pixels, ids = inputs(1)
    with pytest.raises(ValueError, match="params hold no running statistics"):
        resnet.image_features(MODEL)(params, pixels)
    with pytest.raises(ValueError, match=r"this model takes \(batch, 64, 64, 3\)"):
        resnet.image_features(MODEL)(resnet.join(params, running), pixels[:, :32])
    with pytest.raises(ValueError, match="params hold only the visual one"):
        resnet.text_features(MODEL)(resnet.visual(params), ids)
    with pytest.raises(ValueError, match="at most 7 tokens"):
        resnet.text_features(MODEL)(params, np.ones((2, 8), np.int32))
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(ValueError, match="no readable open_clip_config.json, .*, tvjax.models.clip reads clip"):
        resnet.from_pretrained(tmp_path)
    vit = {"model_cfg": {**ABOUT["model_cfg"], "vision_cfg": {"layers": 12, "width": 768, "patch_size": 32}}}
    with pytest.raises(ValueError, match="vision_cfg.layers is 12; a residual network has four stages"):
        resnet.spec(vit)
