"""A merge that is cut off at any point leaves no output, and ends with the same bytes when it is called again."""

import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from tvjax import disk
from tvjax.disk import ledger as ledgers
from tvjax.disk import workdir, writers

SHAPES = {
    "embed": (9, 4),
    "layers.0.w": (300, 300),
    "layers.0.b": (300,),
    "layers.1.w": (40, 40),
    "layers.1.b": (40,),
    "head": (4, 9),
}
SETTINGS = {"max_shard_size": "200KB", "say": lambda line: None}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    rng = np.random.default_rng(0)
    base = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    for name in ("base", "a", "b"):
        (folder / name).mkdir()
        flat = {
            n: (x + 0.1 * rng.standard_normal(x.shape)).astype(np.float32) if name != "base" else x
            for n, x in base.items()
        }
        safetensors.numpy.save_file(
            {**flat, "ids": np.arange(5)}, folder / name / "model.safetensors", metadata={"format": "pt"}
        )
        (folder / name / "config.json").write_text("{}")
    return folder / "base", [folder / "a", folder / "b"]


def contents(out):
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name not in ("README.md", "ledger.jsonl")}


def merge(inputs, out, method="dare_ties"):
    return disk.merge_checkpoints(*inputs, out, method, **SETTINGS)


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    out = merge(inputs, tmp_path_factory.mktemp("whole") / "out")
    assert len(list(out.glob("model-*.safetensors"))) == 3
    return out


class Cut(BaseException):
    """What stands for a kill in the same process."""


def cut(monkeypatch, where, name, after):
    """Makes the call number `after` of a function raise."""
    real, calls = getattr(where, name), []

    def counted(*args, **kwargs):
        calls.append(name)
        if len(calls) == after:
            raise Cut
        return real(*args, **kwargs)

    monkeypatch.setattr(where, name, counted)
    return calls


POINTS = [(os, "pwrite", n) for n in (1, 2, 3, 4, 5, 7, 9, 11)] + [(os, "replace", n) for n in range(1, 10)]
POINTS += [(ledgers.Ledger, "add", n) for n in (1, 2, 4, 6, 7)] + [(os, "fsync", n) for n in (1, 2, 4, 6)]
POINTS += [(os, "posix_fallocate", 2), (workdir, "publish", 1), (writers, "sync_folder", 1)]


@pytest.mark.parametrize("where, name, after", POINTS, ids=lambda x: str(getattr(x, "__name__", x)))
def test_cut_off_anywhere_it_goes_on(where, name, after, inputs, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        calls = cut(patch, where, name, after)
        with pytest.raises(Cut):
            merge(inputs, tmp_path / "out")
        assert len(calls) >= after
    assert not (tmp_path / "out").exists()
    out = merge(inputs, tmp_path / "out")
    assert contents(out) == contents(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    ours, theirs = ledgers.read(out / "ledger.jsonl"), ledgers.read(whole / "ledger.jsonl")
    assert ours.tensors == theirs.tensors and ours.head == theirs.head


def test_what_is_done_is_not_done_again(inputs, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        cut(patch, workdir, "publish", 1)
        with pytest.raises(Cut):
            merge(inputs, tmp_path / "out")
    monkeypatch.setattr("tvjax.merging.streamed.prepare", None)  # would fail if it were called
    assert contents(merge(inputs, tmp_path / "out")) == contents(whole)


def test_changed_bytes_are_written_anew(inputs, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        cut(patch, workdir, "publish", 1)
        with pytest.raises(Cut):
            merge(inputs, tmp_path / "out")
    shard = tmp_path / ".out.merging" / "model-00002-of-00003.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    text = (tmp_path / ".out.merging" / "ledger.jsonl").read_text()
    (tmp_path / ".out.merging" / "ledger.jsonl").write_text(text[:-40])  # and a torn last line
    assert contents(merge(inputs, tmp_path / "out")) == contents(whole)


KILLED = """
import os, signal, sys
from tvjax import disk
real, calls = os.pwrite, []
def pwrite(*args):
    calls.append(1)
    if len(calls) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)
os.pwrite = pwrite
disk.merge_checkpoints(sys.argv[2], sys.argv[3].split(","), sys.argv[4], "dare_ties", max_shard_size="200KB", say=print)
"""


def test_a_killed_process_is_continued(inputs, whole, tmp_path):
    base, models = inputs
    given = [str(base), ",".join(map(str, models)), str(tmp_path / "out")]
    code = subprocess.run([sys.executable, "-c", KILLED, "8", *given], capture_output=True, timeout=500).returncode
    assert code == -signal.SIGKILL and not (tmp_path / "out").exists()
    assert contents(merge(inputs, tmp_path / "out")) == contents(whole)


def test_other_merges_and_files_are_left_alone(inputs, whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path / "out")
    before = contents(tmp_path / "out")
    merge(inputs, tmp_path / "out")  # it holds this merge already
    with pytest.raises(ValueError, match="holds a merge of another recipe"):
        merge(inputs, tmp_path / "out", "average")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files"):
        merge(inputs, tmp_path / "mine")
    with pytest.raises(ValueError, match="is a file"):
        merge(inputs, tmp_path / "mine" / "notes.txt")
    with pytest.raises(ValueError, match="holds other files"):
        merge(inputs, inputs[0])
    assert contents(tmp_path / "out") == before and sorted(p.name for p in tmp_path.iterdir()) == ["mine", "out"]
    (tmp_path / "empty").mkdir()
    assert contents(merge(inputs, tmp_path / "empty")) == contents(whole)
    with monkeypatch.context() as patch:
        cut(patch, os, "pwrite", 6)
        with pytest.raises(Cut):
            merge(inputs, tmp_path / "begun")
    with pytest.raises(ValueError, match="beginning of a merge of another recipe"):
        merge(inputs, tmp_path / "begun", "average")
    assert contents(merge(inputs, tmp_path / "begun")) == contents(whole)


def test_two_processes_do_not_meet(inputs, tmp_path):
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / ".out.merging").mkdir()
    number = os.open(tmp_path / ".out.merging", os.O_RDONLY)
    fcntl.flock(number, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="another process is merging"):
        merge(inputs, tmp_path / "out")
    os.close(number)


@pytest.mark.parametrize("name, after", [("posix_fallocate", 1), ("posix_fallocate", 3), ("pwrite", 5), ("fsync", 2)])
def test_a_full_disk_leaves_nothing(name, after, inputs, tmp_path, monkeypatch):
    real, calls = getattr(os, name), []

    def full(*args):
        calls.append(1)
        if len(calls) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, name, full)
    with pytest.raises(OSError, match="cannot be written to .No space left on device"):
        merge(inputs, tmp_path / "new" / "out")
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_known_before(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("tvjax.disk.planning.free_bytes", lambda folder: 1000)
    with pytest.raises(ValueError, match="too full: the merge takes 3.. kB, 1 kB are free"):
        merge(inputs, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_place_is_named(inputs, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(pathlib.Path, "mkdir", refuse)
    with pytest.raises(OSError, match="cannot be written to .Permission denied"):
        merge(inputs, tmp_path / "out")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_named(value, inputs, tmp_path):
    base, models = inputs
    shutil.copytree(models[1], tmp_path / "b")
    flat = safetensors.numpy.load_file(tmp_path / "b" / "model.safetensors")
    flat["layers.0.w"][299, 7] = value
    safetensors.numpy.save_file(flat, tmp_path / "b" / "model.safetensors")
    for method in ("average", "ties"):
        with pytest.raises(ValueError, match=rf"layers.0.w\[299, 7\] of b is {value}"):
            merge((base, [models[0], tmp_path / "b"]), tmp_path / "out", method)
        assert [path.name for path in tmp_path.iterdir()] == ["b"]
    out = disk.merge_checkpoints(
        base, [models[0], tmp_path / "b"], tmp_path / "out", "average", allow_nonfinite=True, **SETTINGS
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    x = safetensors.numpy.load_file(out / index["layers.0.w"])["layers.0.w"]
    assert not np.isfinite(x[299, 7]) and np.isfinite(x).sum() == x.size - 1


def test_overflow_of_the_output_is_named(inputs, tmp_path):
    from tvjax import merging

    with pytest.raises(ValueError, match=r"embed\[0, 0\] becomes .*, more than float16 holds"):
        disk.merge_checkpoints(
            *inputs, tmp_path / "out", merging.task_arithmetic(scale=1e9), out_dtype="float16", **SETTINGS
        )
    assert list(tmp_path.iterdir()) == []
