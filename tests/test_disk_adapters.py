"""LoRA adapters are the models that they make of their base, exactly, or refused by name."""

import json

import numpy as np
import pytest
import safetensors.numpy

from tvjax import checkpoints, disk, tree
from tvjax.disk.readers import Opened, open_checkpoint

SHAPES = {"model.embed_tokens.weight": (7, 6), "model.layers.0.q_proj.weight": (6, 6),
          "model.layers.0.up_proj.weight": (9, 6), "model.layers.0.c_attn.weight": (6, 9),
          "model.layers.1.q_proj.weight": (6, 6), "model.conv.weight": (5, 6, 2, 3), "model.norm.weight": (6,)}


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture
def base(tmp_path):
    flat = {name: draw(i, *shape) for i, (name, shape) in enumerate(SHAPES.items())}
    return write_base(tmp_path / "base", flat)


def write_base(folder, flat, **config):
    checkpoints.save(checkpoints.nest(flat), folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", **config}))
    return folder


def write(folder, tensors, **config):
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file({n: np.ascontiguousarray(x) for n, x in tensors.items()},
                                folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}))
    return folder


def factors(seed, module, out, into, rank=2, kernel=(), name="lora"):
    """(A, B) under PEFT's names; convolutions have their kernel in A."""
    end = ".weight" if name == "lora" else ""
    one = (1,) * len(kernel)
    return {f"base_model.model.{module}.{name}_A{end}": draw(seed, rank, into, *kernel),
            f"base_model.model.{module}.{name}_B{end}": draw(seed + 1, out, rank, *one)}


def whole(where, base):
    """All tensors of an opened adapter; pieces of any length are the same bits."""
    held = open_checkpoint(base)
    opened = open_checkpoint(where, base=held)
    assert isinstance(opened, Opened)
    found = {name: opened.whole(name) for name in opened.tensors}
    for name, x in found.items():
        assert x.shape == opened.tensors[name].shape and x.dtype == opened.tensors[name].dtype
        for start, stop in ((0, min(5, x.size)), (min(3, x.size - 1), min(4, x.size)), (x.size // 2, x.size), (2, 2)):
            np.testing.assert_array_equal(opened.read(name, start, stop), x.reshape(-1)[start:stop])
    opened.close()
    held.close()
    return found


def test_every_kind_of_module(base, tmp_path):
    q, up = factors(10, "model.layers.0.q_proj", 6, 6), factors(20, "model.layers.0.up_proj", 9, 6, rank=3)
    conv1d, conv = factors(30, "model.layers.0.c_attn", 9, 6), factors(40, "model.conv", 5, 6, kernel=(2, 3))
    embed = factors(50, "model.embed_tokens", 6, 7, name="lora_embedding")
    folder = write(tmp_path / "a", q | up | conv1d | conv | embed, rank_pattern={"up_proj": 3},
                   alpha_pattern={r"layers\.0\.q_proj": 5.0}, target_modules=["q_proj"], task_type="CAUSAL_LM")
    before, found = tree.flatten(checkpoints.load(base).params), whole(folder, base)
    value = lambda pair: tuple(pair.values())
    (qa, qb), (ua, ub), (ca, cb), (va, vb), (ea, eb) = map(value, (q, up, conv1d, conv, embed))
    expected = {"model.layers.0.q_proj.weight": 5 / 2 * qb @ qa, "model.layers.0.up_proj.weight": 4 / 3 * ub @ ua,
                "model.layers.0.c_attn.weight": 2 * (cb @ ca).T, "model.embed_tokens.weight": 2 * (eb @ ea).T,
                "model.conv.weight": 2 * np.einsum("or,rihw->oihw", vb[..., 0, 0], va)}
    assert set(found) == set(before)
    for name, x in found.items():
        np.testing.assert_allclose(x, before[name] + expected.get(name, 0), rtol=0, atol=2e-6)
        assert (name in expected) != np.array_equal(x, before[name])


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("root", [False, True])
def test_square_weights_and_the_root_of_the_rank(turned, root, base, tmp_path):
    q = factors(10, "model.layers.1.q_proj", 6, 6, rank=4)
    folder = write(tmp_path / "a", q, r=4, use_rslora=root, fan_in_fan_out=turned)
    name = "model.layers.1.q_proj.weight"
    a, b = q.values()
    change = 4 / (2 if root else 4) * (b @ a)
    before = tree.flatten(checkpoints.load(base).params)[name]
    np.testing.assert_allclose(whole(folder, base)[name], before + (change.T if turned else change), rtol=0, atol=2e-6)


def test_large_weights_are_the_same_in_pieces(tmp_path):
    base = write_base(tmp_path / "base", {"a.weight": draw(0, 70, 1000)})
    folder = write(tmp_path / "a", factors(1, "a", 70, 1000))
    held = open_checkpoint(base)
    opened = open_checkpoint(folder, base=held)
    x = opened.whole("a.weight").reshape(-1)
    for start, stop in ((0, 65536), (65536, 70000), (12345, 67890), (64999, 65001)):
        np.testing.assert_array_equal(opened.read("a.weight", start, stop), x[start:stop])
    opened.close()
    held.close()


def test_merged_adapters_are_the_weighted_sum(base, tmp_path):
    """Other ranks, other modules, one with the names of a model without its prefix."""
    first = factors(10, "model.layers.0.q_proj", 6, 6)
    second = factors(20, "layers.0.q_proj", 6, 6, rank=5) | factors(30, "layers.0.up_proj", 9, 6, rank=5)
    a, b = write(tmp_path / "a", first), write(tmp_path / "b", second, r=5, lora_alpha=5)
    out = disk.merge_checkpoints(base, [a, b], tmp_path / "out", "task_arithmetic", options={"scale": 0.5},
                                 say=lambda line: None)
    before, found = (tree.flatten(checkpoints.load(folder).params) for folder in (base, out))
    product = lambda pair: pair[1] @ pair[0]
    one, two = list(first.values()), list(second.values())
    expected = {"model.layers.0.q_proj.weight": product(one) + 0.5 * product(two[:2]),
                "model.layers.0.up_proj.weight": 0.5 * product(two[2:])}
    for name, x in found.items():
        np.testing.assert_allclose(x, before[name] + expected.get(name, 0), rtol=0, atol=2e-6)


def test_a_narrow_base_is_fused_in_float32(tmp_path):
    import ml_dtypes

    w = draw(0, 4, 3).astype(ml_dtypes.bfloat16)
    base = write_base(tmp_path / "base", {"a.weight": w})
    pair = {n: x.astype(np.float16) for n, x in factors(1, "a", 4, 3).items()}
    found = whole(write(tmp_path / "a", pair), base)["a.weight"]
    a, b = (x.astype(np.float32) for x in pair.values())
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, w.astype(np.float32) + 2 * b @ a, rtol=0, atol=1e-6)


def test_an_adapter_alone_opens_the_base_that_it_names(base, tmp_path):
    q = factors(10, "model.layers.0.q_proj", 6, 6)
    folder = write(tmp_path / "a", q, base_model_name_or_path=str(base))
    opened = open_checkpoint(folder)
    np.testing.assert_array_equal(opened.whole("model.layers.0.q_proj.weight"),
                                  whole(folder, base)["model.layers.0.q_proj.weight"])
    assert opened.config["model_type"] == "toy" and "base/model.safetensors" in opened.identity
    opened.close()
    with pytest.raises(ValueError, match="an adapter that names no base model"):
        open_checkpoint(write(tmp_path / "a", q))


def test_peft_writes_what_is_read(tmp_path):
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    base = write_base(tmp_path / "base", {n: x.numpy().copy() for n, x in net.state_dict().items()})
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], rank_pattern={"2": 3}, init_lora_weights=False)
    model = peft.get_peft_model(net, config)
    model.save_pretrained(tmp_path / "a")
    merged = model.merge_and_unload().state_dict()
    for name, x in whole(tmp_path / "a", base).items():
        np.testing.assert_allclose(x, merged[name].numpy(), rtol=0, atol=1e-6)


Q = factors(10, "model.layers.0.q_proj", 6, 6)
A, B = Q
REFUSED = {
    "DoRA": (Q, {"use_dora": True}, "is DoRA, more than a product"),
    "AdaLoRA": (Q, {"peft_type": "ADALORA"}, "an adapter of type ADALORA: only LORA is read"),
    "bias": (Q, {"bias": "all"}, "trains biases too"),
    "saved modules": (Q, {"modules_to_save": ["score"]}, "modules_to_save"),
    "pissa": (Q, {"init_lora_weights": "pissa_niter_4"}, "takes a part out of the base"),
    "news": (Q, {"use_novelty": True}, "use_novelty in its configuration, which is not known"),
    "no rank": (Q, {"r": 0}, "r is a whole number from 1 on"),
    "no alpha": (Q, {"lora_alpha": "x"}, "lora_alpha is a number"),
    "no pattern": (Q, {"rank_pattern": {"(": 2}}, "is no pattern"),
    "other rank": (Q, {"r": 3}, "has rank 2, its adapter_config.json says 3"),
    "half": ({A: Q[A]}, {}, "only one of the two factors of model.layers.0.q_proj"),
    "other keys": (Q | {"base_model.model.score.weight": draw(0, 2)}, {}, "score.weight, which are no LoRA factors"),
    "no module": (Q | factors(1, "model.layers.7.q_proj", 6, 6), {}, "changes model.layers.7.q_proj, which .* lacks"),
    "other shape": (factors(1, "model.layers.0.q_proj", 6, 8), {}, r"made for a weight \[6, 8\], the base's is"),
    "no pair": (Q | {B: draw(1, 6, 3)}, {}, "no pair of factors"),
    "quantised": (Q | {A: np.ones((2, 6), np.int8)}, {}, r"quantised \(int8\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_more_or_less_is_refused(case, base, tmp_path):
    tensors, config, said = REFUSED[case]
    folder = write(tmp_path / "a", tensors, **config)
    with pytest.raises(ValueError, match=said) as caught:
        disk.merge_checkpoints(base, [folder], tmp_path / "out", "average", say=lambda line: None)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_quantised_bases_and_tied_heads_are_refused(tmp_path):
    flat = {"q_proj.weight": draw(0, 6, 6), "embed_tokens.weight": draw(1, 7, 6)}
    base = write_base(tmp_path / "base", flat, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="changes lm_head, which .* lacks .it ties embeddings"):
        whole(write(tmp_path / "a", factors(1, "lm_head", 7, 6)), base)
    checkpoints.save({}, base, buffers={"q_proj.weight": np.ones((6, 6), np.int8)})
    with pytest.raises(ValueError, match=r"q_proj.weight of .* is quantised \(int8\)"):
        whole(write(tmp_path / "b", factors(1, "q_proj", 6, 6)), base)


@pytest.mark.parametrize("name", ["cat", "svd", "svd_truncated", "ties_svd", "magnitude_prune_svd"])
def test_pefts_numbers_through_the_disk(name, tmp_path):
    """What PEFT made of two of its adapters in product space, here from their directories."""
    import pathlib

    from tvjax.merging import compat

    golden = np.load(pathlib.Path(__file__).parent / "golden" / "peers.npz")
    about = json.loads(str(golden["about"]))
    case, shapes = about["cases"][f"peft/{name}"], about["factors"]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])[:-1]
    for i, row in enumerate(golden["adapters"]):
        parts = zip(shapes.items(), np.split(row, ends), strict=True)
        write(tmp_path / str(i), {f"base_model.model.{n}": x.reshape(shape) for (n, shape), x in parts})  # α/r = 2
    sides = {side: (shapes[f"{side}.lora_B.weight"][0], shapes[f"{side}.lora_A.weight"][1]) for side in "ab"}
    zeros = {f"{side}.weight": np.zeros(shape, np.float32) for side, shape in sides.items()}
    base = write_base(tmp_path / "base", zeros)
    method, options = compat.translate("peft", case["method"], case["options"])
    out = disk.merge_checkpoints(base, [tmp_path / "0", tmp_path / "1"], tmp_path / "out", method, options=options,
                                 say=lambda line: None)
    found = tree.flatten(checkpoints.load(out).params)
    flat = np.concatenate([found[f"{side}.weight"].reshape(-1) for side in "ab"])
    np.testing.assert_allclose(flat, golden[f"out/peft/{name}"], rtol=0, atol=2.5e-6)  # float32 singular vectors there
