"""The store: written and read piece by piece, exact sizes, tasks added later, one sentence for what does not fit."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from tvjax import checkpoints, compression, merging, tree, vectors
from tvjax.compression import bits, building, layout, store

TASKS = ("mnist", "svhn/extra", "gtsrb")


def problem(seed=0, dtype=np.float32, tasks=TASKS):
    draws = np.random.default_rng(seed)
    draw = lambda *shape: draws.normal(size=shape).astype(np.float32)
    theta0 = {"enc": {"weight": draw(13, 7).astype(dtype), "bias": draw(5).astype(dtype)},
              "frozen": draw(3).astype(dtype), "steps": np.array([3, 4])}
    taus = [{"enc": {"weight": 0.1 * draw(13, 7), "bias": 0.1 * draw(5)}} for _ in tasks]
    return theta0, taus


@pytest.fixture
def made(tmp_path):
    theta0, taus = problem()
    building.build(tmp_path / "store", theta0, taus, tasks=TASKS, lam=[0.3, 0.4, 0.5])
    return tmp_path / "store", theta0, taus


@pytest.mark.parametrize("kind, merge", [
    ("tall", None), ("tall", merging.ties(density=0.5, reduce="sum")), ("emr", None)])
def test_a_store_gives_back_what_the_codec_does(tmp_path, kind, merge):
    theta0, taus = problem()
    building.build(tmp_path / "s", theta0, taus, tasks=TASKS, kind=kind, merging=merge, lam=[0.3, 0.4, 0.5])
    codec = compression.emr_codec() if kind == "emr" else compression.tall_codec(merging=merge, lam=[0.3, 0.4, 0.5])
    state = codec.encode(taus)
    opened = store.open_store(tmp_path / "s")
    assert opened.tasks == TASKS
    for i, task in enumerate(TASKS):
        expected = tree.flatten(vectors.add(theta0, codec.decode(state, i)))
        found = tree.flatten(store.load(opened, task))
        assert list(found) == list(expected)
        for name, x in found.items():
            np.testing.assert_allclose(x, expected[name], atol=1e-7)
            assert x.dtype == expected[name].dtype
    hash_ = checkpoints.content_hash({name: opened.shared.whole(name) for name in opened.shapes})
    assert hash_ == opened.about["shared"]["hash"]
    assert opened.about["base"]["hash"] == checkpoints.content_hash(theta0)


def test_low_precision_bases(tmp_path):
    theta0, taus = problem(dtype=jnp.bfloat16)
    building.build(tmp_path / "s", theta0, taus, tasks=TASKS)
    codec = compression.tall_codec()
    found = store.load(tmp_path / "s", "gtsrb")["enc"]["weight"]
    expected = vectors.add(theta0, codec.decode(codec.encode(taus), 2))["enc"]["weight"]
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


def test_files_and_trees_make_the_same_store(tmp_path):
    theta0, taus = problem()
    checkpoints.save({"enc": theta0["enc"], "frozen": theta0["frozen"]}, tmp_path / "base")
    models = {}
    for task, tau in zip(TASKS, taus, strict=True):
        theta = vectors.add({"enc": theta0["enc"], "frozen": theta0["frozen"]}, tau)
        models[task] = tmp_path / layout.mask_file(task).removesuffix(".safetensors")
        checkpoints.save(theta, models[task])
    opened, source = building.sources_of(tmp_path / "base", models, only="^enc")
    building.build(tmp_path / "s", opened, source, tasks=TASKS, where=str(tmp_path / "base"))
    loaded = store.load(tmp_path / "s", "mnist")
    exact = [{"enc": {name: np.asarray(theta0["enc"][name] + taus[t]["enc"][name] - theta0["enc"][name])
                      for name in ("weight", "bias")}} for t in range(3)]
    codec = compression.tall_codec()
    expected = vectors.add({"enc": theta0["enc"]}, codec.decode(codec.encode(exact), 0))
    np.testing.assert_array_equal(loaded["enc"]["weight"], expected["enc"]["weight"])
    assert not (tmp_path / "s" / "base.safetensors").exists()


def test_a_task_more_rewrites_nothing_else(made):
    path, theta0, taus = made
    before = {file: (file.stat().st_mtime_ns, file.stat().st_ino) for file in path.rglob("*.safetensors")}
    opened = store.add(store.open_store(path), "new", taus[0], lam=0.3)
    assert opened.tasks == (*TASKS, "new")
    assert {file: (file.stat().st_mtime_ns, file.stat().st_ino) for file in before} == before
    np.testing.assert_array_equal(store.load(path, "new")["enc"]["weight"], store.load(path, "mnist")["enc"]["weight"])
    with pytest.raises(ValueError, match="has a task 'new' already"):
        store.add(opened, "new", taus[0])
    with pytest.raises(ValueError, match=r"another tree than the store's: enc.bias"):
        store.add(opened, "other", {"enc": {"weight": taus[0]["enc"]["weight"]}})


def test_emr_task_more(tmp_path):
    theta0, taus = problem()
    building.build(tmp_path / "s", theta0, taus, tasks=TASKS, kind="emr")
    opened = store.add(store.open_store(tmp_path / "s"), "again", taus[1])
    lines = opened.about["tasks"]
    assert lines["again"]["factor"] == pytest.approx(lines["svhn/extra"]["factor"])


def test_sizes(made):
    path, theta0, _ = made
    found = store.sizes_of(store.open_store(path))
    entries = 13 * 7 + 5
    base = 4 * (entries + 3) + 16
    assert found["formula"] == base + 4 * entries + 3 * entries / 8 and found["checkpoints"] == 3 * base
    assert found["measured"] == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def large(tmp_path, entries=1 << 21):
    theta0 = {"w": np.zeros(entries, np.float32)}
    draws = np.random.default_rng(0)
    taus = [{"w": draws.normal(size=entries).astype(np.float32)} for _ in range(2)]
    return theta0, taus


def test_measured_bytes_are_within_a_percent_of_the_formula(tmp_path):
    theta0, taus = large(tmp_path)
    building.build(tmp_path / "s", theta0, taus, tasks=("a", "b"))
    found = store.sizes_of(store.open_store(tmp_path / "s"))
    assert abs(found["measured"] / found["formula"] - 1) < 0.01


def test_memory_is_bounded_by_pieces(tmp_path):
    """Building and adding hold a few pieces beside the inputs, not a leaf; numpy's buffers count, XLA's do not."""
    theta0, taus = large(tmp_path)
    tracemalloc.start()
    try:
        building.build(tmp_path / "s", theta0, taus, tasks=("a", "b"))
        opened = store.open_store(tmp_path / "s")
        store.add(opened, "c", taus[0])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.9 * 2 * theta0["w"].nbytes  # two task vectors would already be more


# ---------------------------------------------------------------- what goes wrong
def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    theta0, taus = problem()
    monkeypatch.setattr(layout, "write_index", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        building.build(tmp_path / "s", theta0, taus, tasks=TASKS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["write_index", "write_tensors"])
def test_an_addition_that_fails_leaves_the_store(made, monkeypatch, step):
    path, theta0, taus = made
    before = store.load(path, "mnist")
    monkeypatch.setattr(layout, step, lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.add(store.open_store(path), "new", taus[0])
    monkeypatch.undo()
    opened = store.open_store(path)
    assert opened.tasks == TASKS and not list(path.rglob("*.tmp"))
    np.testing.assert_array_equal(store.load(opened, "mnist")["enc"]["weight"], before["enc"]["weight"])
    assert store.add(opened, "new", taus[0]).tasks == (*TASKS, "new")


def test_a_killed_addition_leaves_the_store(made):
    """The process dies between the masks and the index: the old store is whole, and takes the task later."""
    path, _, taus = made
    program = f"""if True:
        import os, signal
        from tests import test_compression_store as here
        from tvjax.compression import layout, store
        layout.write_index = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        store.add(store.open_store({str(path)!r}), "new", here.problem()[1][0])
    """
    root = pathlib.Path(__file__).parents[1]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    assert subprocess.run([sys.executable, "-c", program], env=env, cwd=root).returncode == -signal.SIGKILL
    opened = store.open_store(path)
    assert (path / layout.mask_file("new")).exists() and opened.tasks == TASKS
    assert all(store.load(opened, task) for task in TASKS)
    assert store.add(opened, "new", taus[0]).tasks == (*TASKS, "new")


def test_unknown_task(made):
    with pytest.raises(ValueError, match="no task 'mnst'; did you mean 'mnist'"):
        store.load(made[0], "mnst")


def test_another_base(made, tmp_path):
    path, theta0, taus = made
    building.build(tmp_path / "s", theta0, taus, tasks=TASKS, where="openai/clip-vit-base-patch32")
    other = {**theta0, "frozen": theta0["frozen"] + 1}
    for place in (path, tmp_path / "s"):
        with pytest.raises(ValueError, match="theta0 does not fit the store"):
            store.open_store(place, other)
    assert store.load(store.open_store(tmp_path / "s", theta0), "mnist").keys() == theta0.keys()
    building.build(tmp_path / "other", other, taus, tasks=TASKS)
    os.replace(tmp_path / "other" / "base.safetensors", path / "base.safetensors")
    with pytest.raises(ValueError, match="the base does not fit the store"):
        store.open_store(path)


def rewrite(file, change):
    """Writes a mask file again with other tensors or metadata."""
    with safetensors.safe_open(file, framework="numpy") as opened:
        tensors, about = {name: opened.get_tensor(name) for name in opened.keys()}, dict(opened.metadata())
    tensors, about = change(tensors, about)
    safetensors.numpy.save_file(tensors, file, metadata=about)


@pytest.mark.parametrize("change, sentence", [
    (lambda t, a: (t, {**a, "bit_order": "little"}), "packed in 'little' bit order"),
    (lambda t, a: (t, {**a, "tree": "0"}), "masks of another tree"),
    (lambda t, a: (t, {**a, "shared": "0"}), "another base or shared vector"),
    (lambda t, a: (t, {**a, "task": "gtsrb"}), "the masks of 'gtsrb', not of 'mnist'"),
    (lambda t, a: ({**t, "enc.weight": t["enc.weight"][:-1]}, a),
     "mask of enc.weight is 11 bytes, its 91 entries take 12"),
    (lambda t, a: ({"enc.weight": t["enc.weight"]}, a), "mask of enc.bias is missing"),
])
def test_masks_that_do_not_fit(made, change, sentence):
    rewrite(made[0] / layout.mask_file("mnist"), change)
    with pytest.raises(ValueError, match=sentence):
        store.load(made[0], "mnist")
    assert store.load(made[0], "gtsrb")


def test_files_cut_off_or_lost(made):
    path = made[0]
    file = path / layout.mask_file("mnist")
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    with pytest.raises(ValueError, match="not a whole safetensors file.*cut off"):
        store.load(path, "mnist")
    file.unlink()
    with pytest.raises(ValueError, match="lacks masks/mnist.safetensors"):
        store.load(path, "mnist")
    (path / "shared.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks shared.safetensors"):
        store.open_store(path)


def test_indices_that_do_not_fit(made, tmp_path):
    path = made[0]
    about = json.loads((path / "store.json").read_text())
    for change, sentence in [({"format": 9}, "has format 9"), ({"bit_order": "little"}, "'little' bit order"),
                             ({"tvjax": "x"}, "not the index of a store"),
                             ({"tree": "0"}, "another tree than store.json")]:
        (path / "store.json").write_text(json.dumps({**about, **change}))
        with pytest.raises(ValueError, match=sentence):
            store.open_store(path)
    (path / "store.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        store.open_store(path)
    with pytest.raises(ValueError, match="is no store: it holds no store.json"):
        store.open_store(tmp_path / "nowhere")


def test_slips_when_building(tmp_path, made):
    theta0, taus = problem()
    with pytest.raises(ValueError, match="is there already"):
        building.build(made[0], theta0, taus, tasks=TASKS)
    with pytest.raises(ValueError, match="names its 3 tasks, each differently"):
        building.build(tmp_path / "x", theta0, taus, tasks=("a", "a", "b"))
    with pytest.raises(ValueError, match="do not belong to this base: enc.weight"):
        building.build(tmp_path / "x", {"enc": {"bias": theta0["enc"]["bias"]}}, taus, tasks=TASKS)
    with pytest.raises(ValueError, match="does not reduce over tasks"):
        building.build(tmp_path / "x", theta0, taus, tasks=TASKS, merging=merging.top(density=0.5))
    with pytest.raises(ValueError, match="no kind 'tal'"):
        building.build(tmp_path / "x", theta0, taus, tasks=TASKS, kind="tal")
    assert not (tmp_path / "x").exists()


def test_masks_come_back_as_bits(made):
    path, _, taus = made
    opened = store.open_store(path)
    found = store.load_masks(opened, "svhn/extra")
    shared = {"enc": {name: opened.shared.whole(f"enc.{name}") for name in ("weight", "bias")}}
    expected = compression.tall_mask(taus[1], shared, lam=0.4)
    for name, value in bits.flatten(found).items():
        np.testing.assert_array_equal(value.packed, bits.flatten(expected)[name].packed)
