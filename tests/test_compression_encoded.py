"""Encoded task vectors on disk: every codec comes back to the bit, a task more, bytes, and what does not fit."""
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import checkpoints, compression, tree
from tvjax.compression import encoded

pytestmark = pytest.mark.usefixtures("quick_compilation")
TASKS = ("mnist", "svhn", "sun397/hard")
OPTIONS = {"tall": {"lam": (0.3, 0.4, 0.5)}, "top_k": {"density": 0.2}, "ultra_delta": {"drop": 0.5}}


def taus(count=3, rows=9):
    draws = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(draws.standard_t(3, size=shape), jnp.float32) * 0.01
    return [{"enc": {"layers": {"0": {"weight": draw(rows, 7), "bias": draw(7)}}}, "scale": draw()}
            for _ in range(count)]


GIVEN = taus()


def bits_of(vector):
    return {name: np.asarray(x).tobytes() for name, x in tree.flatten(vector).items()}


@pytest.mark.parametrize("codec", compression.CODECS)
def test_every_codec_comes_back_to_the_bit(codec, tmp_path):
    options = OPTIONS.get(codec, {})
    made = encoded.save(tmp_path / "taus", GIVEN, tasks=TASKS, codec=codec, options=options, base="b" * 64)
    assert made.tasks == TASKS and made.codec.name == compression.build_codec(codec, options, tasks=3).name
    coder = compression.build_codec(codec, options, tasks=3)
    state = coder.encode(GIVEN)
    for i, task in enumerate(TASKS):
        found = encoded.load(tmp_path / "taus", task, base="b" * 64)
        assert jax.tree.structure(found) == jax.tree.structure(coder.decode(state, i))
        assert bits_of(found) == bits_of(coder.decode(state, i))
    sizes = encoded.sizes_of(made)
    assert sizes["formula"] == pytest.approx(compression.count_bits(state) / 8)
    files = [path for path in (tmp_path / "taus").rglob("*") if path.is_file()]
    assert sizes["measured"] == sum(path.stat().st_size for path in files) and len(files) == 2 + len(TASKS)


def test_measured_bytes_are_within_a_percent_of_the_counted(tmp_path):
    made = encoded.save(tmp_path / "taus", taus(rows=60_000), tasks=TASKS, codec="tvq", options={"width": 3})
    sizes = encoded.sizes_of(made)
    assert sizes["formula"] <= sizes["measured"] < 1.01 * sizes["formula"] + 4096


def test_a_task_more_rewrites_nothing_else(tmp_path):
    made = encoded.save(tmp_path / "taus", GIVEN[:2], tasks=TASKS[:2], codec="rtvq")
    before = {path: path.read_bytes() for path in made.path.rglob("*.safetensors")}
    more = encoded.add(made, "new", GIVEN[2])
    assert more.tasks == (*TASKS[:2], "new") and all(path.read_bytes() == text for path, text in before.items())
    state = made.codec.add(made.codec.encode(GIVEN[:2]), GIVEN[2])
    assert bits_of(encoded.load(more, "new")) == bits_of(made.codec.decode(state, 2))
    with pytest.raises(ValueError, match="has a task 'new' already"):
        encoded.add(more, "new", GIVEN[2])


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    made = encoded.save(tmp_path / "taus", GIVEN, tasks=TASKS, codec="emr")
    before = {path: path.read_bytes() for path in made.path.rglob("*") if path.is_file()}

    def fail(*args):
        raise OSError("no space left")
    monkeypatch.setattr(encoded, "_index", fail)
    with pytest.raises(OSError):
        encoded.add(made, "new", GIVEN[0])
    with pytest.raises(OSError):
        encoded.save(tmp_path / "other", GIVEN, tasks=TASKS, codec="emr")
    assert not (tmp_path / "other").exists() and encoded.open_encoded(made.path).tasks == TASKS
    assert all(path.read_bytes() == text for path, text in before.items())


def test_what_does_not_fit_is_one_sentence(tmp_path):
    made = encoded.save(tmp_path / "taus", GIVEN, tasks=TASKS, codec="emr", base="b" * 64)
    other = encoded.save(tmp_path / "other", GIVEN[::-1], tasks=TASKS, codec="bitdelta")
    for what, sentence in ((lambda: encoded.load(made, "mnst"), "no task 'mnst'; did you mean 'mnist'"),
                           (lambda: encoded.load(made, "mnist", base="c" * 64), "of the base bbbbbbbbbbbb"),
                           (lambda: encoded.save(made.path, GIVEN, tasks=TASKS, codec="emr"), "is there already"),
                           (lambda: encoded.open_encoded(tmp_path), "holds no encoded task vectors"),
                           (lambda: encoded.save(tmp_path / "x", GIVEN, tasks=TASKS[:2], codec="emr"), "names them"),
                           (lambda: encoded.save(tmp_path / "x", GIVEN, tasks=TASKS, codec="emrr"), "mean 'emr'")):
        with pytest.raises(ValueError, match=sentence):
            what()
    part = made.path / "tasks" / "mnist.safetensors"
    whole = part.read_bytes()
    part.write_bytes((other.path / "tasks" / "mnist.safetensors").read_bytes())
    with pytest.raises(ValueError, match="does not belong to this folder"):
        encoded.load(made, "mnist")
    part.write_bytes(whole[:-3])
    with pytest.raises(ValueError, match="mnist.safetensors"):
        encoded.load(made, "mnist")
    part.unlink()
    with pytest.raises(ValueError, match="which the index promises"):
        encoded.load(made, "mnist")
    index = json.loads((made.path / "codec.json").read_text())
    for text, sentence in (("{", "is not JSON"), (json.dumps({**index, "format": 9}), "in format 1"),
                           (json.dumps({k: v for k, v in index.items() if k != "tasks"}), "lacks tasks")):
        (made.path / "codec.json").write_text(text)
        with pytest.raises(ValueError, match=sentence):
            encoded.open_encoded(made.path)


def test_the_base_is_named_by_its_content(tmp_path):
    base = checkpoints.content_hash({"w": np.ones(3)})
    made = encoded.save(tmp_path / "taus", GIVEN[:1], tasks=["a"], codec="t_switch", base=base)
    assert encoded.open_encoded(made.path).about["base"] == base
