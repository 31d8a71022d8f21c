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
