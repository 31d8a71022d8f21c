"""Other formats than safetensors: read in pieces, as they are, and never run."""

import io
import os
import pickle
import zipfile
from collections import OrderedDict

import numpy as np
import pytest

from tvjax import checkpoints, disk
from tvjax.disk.readers import Opened, open_checkpoint


def same(opened, expected):
    """All tensors, whole and in pieces."""
    assert isinstance(opened, Opened) and set(opened.tensors) == set(expected)
    for name, x in expected.items():
        info = opened.tensors[name]
        assert info.shape == x.shape and info.dtype == x.dtype
        whole = opened.whole(name)
        assert whole.dtype == x.dtype and whole.tobytes() == np.ascontiguousarray(x).tobytes(), name
        for start, stop in ((0, x.size), (0, 0), (x.size // 3, x.size), (x.size // 4, x.size // 2)):
            found = opened.read(name, start, stop)
            assert found.dtype == x.dtype and found.tobytes() == x.reshape(-1)[start:stop].tobytes(), name
    opened.close()


# ---------------------------------------------------------------- PyTorch's files
def state(torch):
    torch.manual_seed(0)
    big = torch.randn(6, 5)
    return OrderedDict({
        "a.weight": big, "a.turned": big.T, "a.part": big[1:4, 1:5:2], "a.row": big[2], "scale": torch.tensor(2.5),
        "empty": torch.zeros(0, 3), "spread": torch.ones(1, 4).expand(3, 4), "ids": torch.arange(4),
        "flags": torch.tensor([True, False]), "one": torch.randn(3, 1, 2).permute(1, 0, 2),
        **{f"kind.{kind}": torch.arange(-2, 5).to(getattr(torch, kind))
           for kind in ("float16", "bfloat16", "float64", "int32", "int16", "int8", "uint8")}})


def numpys(tensors):
    import ml_dtypes

    narrow = lambda x: x.view(dtype=__import__("torch").int16).numpy().view(ml_dtypes.bfloat16)
    return {n: narrow(x.contiguous()) if "bfloat16" in str(x.dtype) else x.numpy() for n, x in tensors.items()}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_a_state_dict_is_read_without_torch(name, tmp_path):
    torch = pytest.importorskip("torch")
    tensors = state(torch)
    torch.save(tensors, tmp_path / name)
    same(open_checkpoint(tmp_path), numpys(tensors))
    same(open_checkpoint(tmp_path / name), numpys(tensors))
    torch.save({"state_dict": tensors, "epoch": 3}, tmp_path / name)
    same(open_checkpoint(tmp_path / name), numpys(tensors))


def test_a_module_is_read_and_merged(tmp_path):
    torch = pytest.importorskip("torch")
    layers = [torch.nn.Linear(3, 2) for _ in range(3)]
    for name, layer in zip("0ab", layers, strict=True):
        (tmp_path / name).mkdir()
        torch.save(dict(layer.named_parameters()), tmp_path / name / "pytorch_model.bin")
    out = disk.merge_checkpoints(tmp_path / "0", [tmp_path / "a", tmp_path / "b"], tmp_path / "out", "average",
                                 say=lambda line: None)
    found = checkpoints.load(out).params
    mean = (layers[1].weight + layers[2].weight).detach().numpy() / 2
    np.testing.assert_allclose(found["weight"], mean, atol=1e-6)


def test_shards_of_an_index(tmp_path):
    torch = pytest.importorskip("torch")
    tensors = state(torch)
    names = list(tensors)
    where = {n: f"pytorch_model-0000{1 + (i > 3)}-of-00002.bin" for i, n in enumerate(names)}
    for file in set(where.values()):
        torch.save({n: tensors[n] for n in names if where[n] == file}, tmp_path / file)
    import json

    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    same(open_checkpoint(tmp_path), numpys(tensors))
    index.write_text(json.dumps({"weight_map": {**where, "more": where["ids"]}}))
    with pytest.raises(ValueError, match="promises more, but no shard holds it"):
        open_checkpoint(tmp_path)


def test_old_files_are_refused_with_the_way_out(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="no file of torch.save since PyTorch 1.6: load it with torch and save it"):
        open_checkpoint(tmp_path / "old.pt")


def zipped(path, data, **others):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        for name, content in others.items():
            archive.writestr(f"archive/{name}", content)
    return path


class Runs:
    def __init__(self, function, *args):
        self.made = function, args

    def __reduce__(self):
        return self.made


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_no_code_runs(protocol, tmp_path):
    ran = tmp_path / "ran"
    for what, said in ((Runs(os.system, f"touch {ran}"), "system"), (Runs(os.mkdir, str(ran)), "mkdir"),
                       (Runs(eval, "1"), "eval"), (Runs(getattr, "a", "upper"), "getattr")):
        file = zipped(tmp_path / "bad.pt", pickle.dumps({"w": what}, protocol))
        with pytest.raises(ValueError, match=f"holds a pickled .*{said}: only tensors are read") as caught:
            open_checkpoint(file)
        assert "\n" not in str(caught.value)
    assert not ran.exists()


GLOBAL = b"ctorch._utils\n_rebuild_tensor_v2\n"
PID = b"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI4\ntQ"  # protocol 0's persistent ids are text; this is 1's
TENSOR = GLOBAL + b"(" + PID + b"I0\n(I2\nI2\nt(I2\nI1\ntI00\nNtR"
FOUR = np.arange(4, dtype=np.float32)
BROKEN = {
    "no dictionary": (b"I1\n.", "holds one int, not a dictionary"),
    "an int": (b"(dS'n'\nI1\ns.", "holds 'n' of type int: only tensors"),
    "no storage": (b"(dS'n'\n" + GLOBAL + b"(I1\nI0\n(I2\nt(I1\ntI00\nNtRs.", "a tensor of no storage"),
    "too far": (b"(dS'n'\n" + TENSOR.replace(b"(I2\nI2\nt", b"(I2\nI3\nt") + b"s.", "n reaches beyond its storage"),
    "negative": (b"(dS'n'\n" + TENSOR.replace(b"QI0", b"QI-1") + b"s.", "sizes that cannot be"),
    "fewer strides": (b"(dS'n'\n" + TENSOR.replace(b"(I2\nI1\nt", b"(I1\nt") + b"s.", "other strides than sizes"),
    "no such storage": (b"(dS'n'\n" + TENSOR.replace(b"S'0'", b"S'7'") + b"s.", "the storage of n is missing"),
    "a setter": (GLOBAL + b"(NS'__class__'\nI1\nsb.", "not a whole PyTorch file"),
    "state of a function": (GLOBAL + b"}S'x'\nI1\nsb.", "not a whole PyTorch file"),
    "state of a dtype": (b"ctorch\nfloat32\n}S'x'\nI1\nsb.", "not a whole PyTorch file"),
    "a large memo": (b"}r\xff\xff\xff\xf0.", "a memo larger than the file"),
    "cut": (b"}(", "not a whole PyTorch file"),
    "nothing": (b"", "not a whole PyTorch file"),
    "deep": (b"(" * 50000 + b"t" * 50000 + b".", "holds one tuple, not a dictionary"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_pickles_are_refused(case, tmp_path):
    data, said = BROKEN[case]
    with pytest.raises(ValueError, match=said) as caught:
        open_checkpoint(zipped(tmp_path / "bad.bin", data, **{"data/0": FOUR.tobytes()}))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_a_file_by_hand(tmp_path):
    file = zipped(tmp_path / "fine.bin", b"(dS'n'\n" + TENSOR + b"s.", **{"data/0": FOUR.tobytes()})
    same(open_checkpoint(file), {"n": FOUR.reshape(2, 2)})


def test_mutated_files_are_read_or_refused(tmp_path):
    """Hundreds of broken files: a sentence, or tensors; never anything else."""
    whole = zipped(tmp_path / "w.bin", b"(dS'n'\n" + TENSOR + b"s.", **{"data/0": FOUR.tobytes()}).read_bytes()
    rng, refused = np.random.default_rng(0), 0
    for case in range(300):
        data = bytearray(whole)
        for at in rng.integers(0, len(data), 1 + case % 3):
            data[at] = rng.integers(256)
        (tmp_path / "w.bin").write_bytes(data[: rng.integers(len(data))] if case % 5 == 0 else data)
        try:
            opened = open_checkpoint(tmp_path / "w.bin")
            for name in opened.tensors:
                opened.whole(name)
            opened.close()
        except ValueError as error:
            refused += 1
            assert "\n" not in str(error)
    assert 100 < refused < 300


def test_a_torchscript_archive_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a TorchScript archive, which holds code"):
        open_checkpoint(zipped(tmp_path / "jit.pt", b"}.", **{"constants.pkl": b")."}))
    buffer = io.BytesIO(b"no zip")
    (tmp_path / "x.bin").write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match="is no zip"):
        open_checkpoint(tmp_path / "x.bin")


# ---------------------------------------------------------------- arrays
def some():
    rng = np.random.default_rng(0)
    return {"a.w": rng.standard_normal((3, 4)).astype(np.float32), "a.turned": np.asfortranarray(rng.random((3, 4, 2))),
            "scale": np.float16(2.5) * np.ones((), np.float16), "ids": np.arange(3), "none": np.zeros((0, 2))}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(save, tmp_path):
    save(tmp_path / "model.npz", **some())
    same(open_checkpoint(tmp_path), some())
    same(open_checkpoint(tmp_path / "model.npz"), some())


def test_npz_with_objects_and_others_is_refused(tmp_path):
    import ml_dtypes

    for name, x, said in (("o", np.array([Runs(os.mkdir, str(tmp_path / "ran"))]), "o is of pickled objects"),
                          ("b", np.ones(2, ml_dtypes.bfloat16), "bfloat16 and others are kept by safetensors"),
                          ("c", np.array(["text"]), "readable are native floats"), ("d", np.ones(2, ">f4"), "native")):
        np.savez(tmp_path / "m.npz", **{name: x})
        with pytest.raises(ValueError, match=said):
            open_checkpoint(tmp_path / "m.npz")
    assert not (tmp_path / "ran").exists()
    np.savez(tmp_path / "m.npz", **some())
    whole = (tmp_path / "m.npz").read_bytes()
    rng, refused = np.random.default_rng(1), 0
    for case in range(200):
        data = bytearray(whole)
        data[rng.integers(len(data))] = rng.integers(256)
        (tmp_path / "m.npz").write_bytes(data[: rng.integers(len(data))] if case % 4 == 0 else data)
        try:
            opened = open_checkpoint(tmp_path / "m.npz")
            for name in opened.tensors:
                opened.whole(name)
            opened.close()
        except ValueError as error:
            refused += 1
            assert "\n" not in str(error)
    assert 50 < refused < 200


@pytest.mark.parametrize("nested", [False, True])
def test_orbax(nested, tmp_path):
    import jax.numpy as jnp
    from orbax.checkpoint import v1

    arrays = {"a": {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.ones(2, jnp.bfloat16)}, "ids": np.arange(3)}
    v1.save(tmp_path / "state", {"params": arrays} if nested else arrays)
    expected = {"a.w": np.asarray(arrays["a"]["w"]), "a.b": np.asarray(arrays["a"]["b"]), "ids": arrays["ids"]}
    same(open_checkpoint(tmp_path / "state"), expected)


# ---------------------------------------------------------------- names of open_clip
def open_clip(text=True, layers=2, width=4):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    flat = {"visual.conv1.weight": draw(width, 3, 2, 2), "visual.class_embedding": draw(width),
            "visual.positional_embedding": draw(5, width), "visual.proj": draw(width, 3), "logit_scale": draw()}
    if text:
        flat |= {"token_embedding.weight": draw(7, width), "positional_embedding": draw(6, width),
                 "text_projection": draw(width, 3)}
    for norm in ("visual.ln_pre", "visual.ln_post", *(["ln_final"] if text else [])):
        flat |= {f"{norm}.weight": draw(width), f"{norm}.bias": draw(width)}
    for tower in ("visual.", *([""] if text else [])):
        for i in range(layers):
            at = f"{tower}transformer.resblocks.{i}"
            flat |= {f"{at}.attn.in_proj_weight": draw(3 * width, width), f"{at}.attn.in_proj_bias": draw(3 * width),
                     f"{at}.attn.out_proj.weight": draw(width, width), f"{at}.attn.out_proj.bias": draw(width),
                     f"{at}.mlp.c_fc.weight": draw(8, width), f"{at}.mlp.c_fc.bias": draw(8),
                     f"{at}.mlp.c_proj.weight": draw(width, 8), f"{at}.mlp.c_proj.bias": draw(width)}
            for norm in ("ln_1", "ln_2"):
                flat |= {f"{at}.{norm}.weight": draw(width), f"{at}.{norm}.bias": draw(width)}
    return flat


def save(path, flat):
    import safetensors.numpy

    safetensors.numpy.save_file({n: np.ascontiguousarray(x).reshape(np.shape(x)) for n, x in flat.items()}, path)
    return path


def hugging_face(flat):
    """The same numbers as transformers names them, written down once more by hand."""
    found = {}
    for name, x in flat.items():
        block = name.split(".resblocks.")
        if len(block) == 2:
            layer, _, rest = block[1].partition(".")
            at = f"{'vision' if name.startswith('visual') else 'text'}_model.encoder.layers.{layer}."
            if "in_proj" in rest:
                for letter, part in zip("qkv", np.split(x, 3), strict=True):
                    found[f"{at}self_attn.{letter}_proj.{rest.rpartition('_')[2]}"] = part
                continue
            for old, new in (("attn.out_proj", "self_attn.out_proj"), ("mlp.c_fc", "mlp.fc1"), ("ln_", "layer_norm"),
                             ("mlp.c_proj", "mlp.fc2")):
                rest = rest.replace(old, new)
            found[at + rest] = x
        elif name in ("visual.proj", "text_projection"):
            found[{"visual.proj": "visual_projection.weight"}.get(name, "text_projection.weight")] = x.T
        else:
            new = (name.replace("visual.conv1", "vision_model.embeddings.patch_embedding")
                   .replace("visual.class", "vision_model.embeddings.class")
                   .replace("visual.positional_embedding", "vision_model.embeddings.position_embedding.weight")
                   .replace("visual.ln_pre", "vision_model.pre_layrnorm")
                   .replace("visual.ln_post", "vision_model.post_layernorm")
                   .replace("token_embedding", "text_model.embeddings.token_embedding")
                   .replace("ln_final", "text_model.final_layer_norm"))
            found["text_model.embeddings.position_embedding.weight" if name == "positional_embedding" else new] = x
    return found


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("text", [False, True])
def test_open_clip_is_seen_under_hugging_face_names(text, prefix, tmp_path):
    flat = open_clip(text)
    file = save(tmp_path / "clip.safetensors", {prefix + name: x for name, x in flat.items()} | {
        f"{prefix}input_resolution": np.array(4)})
    same(open_checkpoint(file), hugging_face(flat))


def test_the_names_are_those_of_transformers(tmp_path):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tower = dict(hidden_size=4, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1)
    config = transformers.CLIPConfig(
        text_config=dict(**tower, vocab_size=7, max_position_embeddings=6),
        vision_config=dict(**tower, image_size=4, patch_size=2), projection_dim=3)
    theirs = {n: tuple(x.shape) for n, x in transformers.CLIPModel(config).state_dict().items()
              if not n.endswith("position_ids")}
    opened = open_checkpoint(save(tmp_path / "clip.safetensors", open_clip()))
    assert {name: info.shape for name, info in opened.tensors.items()} == theirs
    opened.close()


def test_half_of_open_clip_is_refused(tmp_path):
    flat = open_clip()
    for change, said in (({"visual.trunk.0.weight": np.ones(2)}, "visual.trunk.0.weight have no Hugging Face name"),
                         ({"head.weight": np.ones(2)}, "head.weight have no Hugging Face name"),
                         ({"visual.proj": None}, "visual_projection.weight would be missing"),
                         ({"visual.transformer.resblocks.1.attn.in_proj_bias": None}, "q_proj.bias.* be missing")):
        broken = {name: x for name, x in {**flat, **change}.items() if x is not None}
        with pytest.raises(ValueError, match=said):
            open_checkpoint(save(tmp_path / "clip.safetensors", broken))
    residual = {"visual.conv1.weight": np.ones((2, 3, 1, 1)), "visual.layer1.0.conv1.weight": np.ones((2, 2, 1, 1))}
    same(open_checkpoint(save(tmp_path / "clip.safetensors", residual)), residual)


def test_the_hub_is_asked_for_pickles_only_where_there_is_nothing_else(tmp_path, monkeypatch):
    torch, hub = pytest.importorskip("torch"), pytest.importorskip("huggingface_hub")
    asked = []

    def download(name, revision, allow_patterns):
        asked.append((name, revision, "*.bin" in allow_patterns))
        if "*.bin" in allow_patterns:
            torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    same(open_checkpoint("owner/name@main"), {"w": np.ones(2, np.float32)})
    assert asked == [("owner/name", "main", False), ("owner/name", "main", True)]
    save(tmp_path / "model.safetensors", {"w": np.zeros(2)})
    same(open_checkpoint("owner/name@main"), {"w": np.zeros(2)})
    assert len(asked) == 3


# ---------------------------------------------------------------- together
def test_formats_merge_with_each_other(tmp_path):
    """A base in .bin under open_clip's names, models in .npz and Orbax under those of Hugging Face."""
    torch = pytest.importorskip("torch")
    from orbax.checkpoint import v1

    base = open_clip(text=False)
    models = [{name: np.asarray(x + np.float32(by)) for name, x in hugging_face(base).items()} for by in (1, 3)]
    torch.save({name: torch.from_numpy(np.array(x)) for name, x in base.items()}, tmp_path / "base.bin")
    np.savez(tmp_path / "a.npz", **models[0])
    v1.save(tmp_path / "b", checkpoints.nest(models[1]))
    out = disk.merge_checkpoints(tmp_path / "base.bin", [tmp_path / "a.npz", tmp_path / "b"], tmp_path / "out",
                                 "average", say=lambda line: None)
    from tvjax import tree

    found = tree.flatten(checkpoints.load(out).params)
    assert set(found) == set(models[0])
    for name, x in hugging_face(base).items():
        np.testing.assert_allclose(found[name], x + 2, rtol=0, atol=1e-6)


def test_a_pickle_with_code_ends_the_command_in_a_sentence(tmp_path, capsys):
    import pathlib
    import subprocess
    import sys

    save(tmp_path / "base.safetensors", {"w": np.ones(2, np.float32)})
    zipped(tmp_path / "bad.pt", pickle.dumps({"w": Runs(os.mkdir, str(tmp_path / "ran"))}))
    root = pathlib.Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-m", "tvjax.run", f"--config={root}/configs/merge.py:average",
                           f"--config.base={tmp_path}/base.safetensors", f"--config.models={tmp_path}/bad.pt",
                           f"--config.out={tmp_path}/out"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 2 and "only tensors are read" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()
