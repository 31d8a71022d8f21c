"""Broken files are refused in one sentence, whatever is broken; nothing hangs, and nothing is written."""

import json
import re

import numpy as np
import pytest
import safetensors.numpy

from tvjax import disk
from tvjax.disk.headers import encode_header, read_header, read_headers
from tvjax.disk.readers import open_checkpoint

TENSORS = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float16), "ids": np.arange(2)}
CASES = 600


def pack(header, data=b"\0" * 12, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(3,), offsets=(0, 12)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


BROKEN = {
    "empty": (b"", "its header would be 0 bytes long, the file is 0"),
    "header beyond the file": (pack({"w": entry()}, length=1 << 60), "header would be 1,152,921,504,606,846,976 bytes"),
    "header cut": (pack({"w": entry()}, length=20), "its header cannot be read"),
    "not JSON": (pack(b"{nonsense}"), "its header cannot be read"),
    "not UTF-8": (pack(b'{"\xff": 1}'), "its header cannot be read"),
    "deep": (pack(b"[" * 100000), "its header cannot be read"),
    "a list": (pack([1]), "not an object of names"),
    "twice": (pack(b'{"w": %s, "w": %s}' % ((json.dumps(entry()).encode(),) * 2)), "w is there more than once"),
    "no shape": (pack({"w": {"dtype": "F32", "data_offsets": [0, 12]}}), "w lacks its dtype, shape or data_offsets"),
    "unknown dtype": (pack({"w": entry("F7")}), "w is of dtype F7; readable are F64"),
    "negative shape": (pack({"w": entry(shape=(-3,))}), r"the shape \[-3\]"),
    "true shape": (pack({"w": entry(shape=(True,))}), "has the shape"),
    "huge shape": (pack({"w": entry(shape=(1 << 40, 1 << 40))}), "has the shape"),
    "offsets reversed": (pack({"w": entry(offsets=(12, 0))}), r"data_offsets \[12, 0\]"),
    "float offsets": (pack({"w": entry(offsets=(0.0, 12.0))}), "data_offsets"),
    "wrong size": (pack({"w": entry("F16")}), r"w has 12 bytes, but F16 \[3\] takes 6"),
    "overlap": (pack({"v": entry(), "w": entry(offsets=(4, 16))}, b"\0" * 16), "w overlaps v"),
    "hole": (pack({"v": entry(), "w": entry(offsets=(16, 28))}, b"\0" * 28), "w leaves a hole behind v"),
    "cut off": (pack({"w": entry()}, b"\0" * 8), "it was cut off"),
    "too long": (pack({"w": entry()}, b"\0" * 16), "followed by other bytes"),
    "metadata": (pack({"__metadata__": {"a": 1}, "w": entry()}), "__metadata__ does not map"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused(case, tmp_path):
    content, said = BROKEN[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=said) as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_headers_are_those_of_safetensors(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(TENSORS, path, metadata={"format": "pt"})
    found = read_header(path)
    assert {name: (entry.dtype, entry.shape) for name, entry in found.entries.items()} == {
        n: (x.dtype, x.shape) for n, x in TENSORS.items()
    }
    assert found.metadata == {"format": "pt"}
    opened = open_checkpoint(path)
    for name, x in TENSORS.items():
        np.testing.assert_array_equal(opened.whole(name), x)
        np.testing.assert_array_equal(opened.read(name, 1, x.size), x.reshape(-1)[1:])
    ours = encode_header({name: (x.dtype, x.shape) for name, x in TENSORS.items()}, {"format": "pt"})
    path.write_bytes(ours + b"".join(x.tobytes() for x in TENSORS.values()))
    back = safetensors.numpy.load_file(path)
    assert len(ours) % 8 == 0 and set(back) == set(TENSORS)
    for name, x in TENSORS.items():
        np.testing.assert_array_equal(back[name], x)


def test_indices(tmp_path):
    safetensors.numpy.save_file({"a": np.ones(2, np.float32)}, tmp_path / "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for given, said in [
        ({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}, "files that are missing: two.safetensors"),
        ({"weight_map": {"a": "../one.safetensors"}}, "outside of its own folder"),
        ({"weight_map": {"a": str(tmp_path / "one.safetensors")}}, "outside of its own folder"),
        ({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}, "promises b, but no shard"),
        ({"weight_map": {"a": 3}}, "not a shard index"),
        ({"weight_map": {}}, "names no files"),
        ([], "not a shard index"),
    ]:
        index.write_text(json.dumps(given))
        with pytest.raises(ValueError, match=said):
            open_checkpoint(tmp_path)
    index.write_text('{"weight_map": {"a": "one.safetensors", "a": "one.safetensors"}}')
    with pytest.raises(ValueError, match="not a shard index"):
        read_headers(index)


def test_what_is_not_there(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "notes.txt").write_text("")
    with pytest.raises(ValueError, match="holds no model.safetensors; it holds notes.txt"):
        open_checkpoint(tmp_path / "models")
    with pytest.raises(ValueError, match="did you mean 'models'"):
        open_checkpoint(tmp_path / "modles")
    with pytest.raises(ValueError, match="the hub gives no such model"):
        open_checkpoint("nobody/nothing")


def mutate(rng, good):
    """A valid file with something changed: bytes, a cut, other numbers or names in its header."""
    content, length = bytearray(good), int.from_bytes(good[:8], "little")
    kind = rng.integers(7)
    if kind in (0, 6):  # anywhere, or in the tensors
        for at in rng.integers(8 + length if kind else 0, len(content), size=rng.integers(1, 4)):
            content[at] = rng.integers(256)
    elif kind == 1:
        del content[rng.integers(len(content)) :]
    elif kind == 2:
        at = rng.integers(len(content))
        content[at:at] = rng.bytes(int(rng.integers(1, 20)))
    elif kind == 3:
        content[:8] = [0, 1, length - 1, length + 8, 2**31, 2**63, 2**64 - 1][rng.integers(7)].to_bytes(8, "little")
    else:
        text = good[8 : 8 + length].decode()
        other = rng.choice(["-1", "1e3", "null", "[]", "{}", "9" * 30, '"x"', "true", "NaN", "F64", "BOOL", "F8_E4M3"])
        places = [m.span() for m in re.finditer(r'\d+|F32|F16|"[a-z._]+"', text)]
        start, stop = places[rng.integers(len(places))]
        text = (text[:start] + str(other) + text[stop:]).encode()
        return len(text).to_bytes(8, "little") + text + good[8 + length :]
    return bytes(content)


def test_mutated_files_give_one_sentence_or_a_merge(tmp_path):
    rng = np.random.default_rng(0)
    safetensors.numpy.save_file(TENSORS, tmp_path / "base.safetensors")
    good = (tmp_path / "base.safetensors").read_bytes()
    (tmp_path / "other.safetensors").write_bytes(good)
    refused = merged = 0
    for case in range(CASES):
        (tmp_path / "bad.safetensors").write_bytes(mutate(rng, good))
        out = tmp_path / f"out{case}"
        before = {path.name for path in tmp_path.iterdir()}
        try:
            disk.merge_checkpoints(
                tmp_path / "base.safetensors",
                [tmp_path / "bad.safetensors", tmp_path / "other.safetensors"],
                out,
                "average",
                say=lambda line: None,
            )
        except ValueError as error:
            assert "\n" not in str(error) and len(str(error)) < 2000
            assert {path.name for path in tmp_path.iterdir()} == before
            refused += 1
        else:
            assert set(open_checkpoint(out).tensors) == set(TENSORS)
            merged += 1
    assert refused > CASES // 2 and merged > CASES // 50
