"""Files give back what was put into them, bit for bit; a broken one says in a sentence what is wrong."""
import json
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors.numpy

from tvjax import checkpoints, tree

RNG = np.random.default_rng(0)


def numbers(*shape, dtype=np.float32):
    return RNG.normal(size=shape).astype(dtype)


def params():
    return {"encoder": {"layers": {"10": {"weight": numbers(3, 4)}, "2": {"weight": numbers(4, 3, dtype=np.float16)}}},
            "head": {"weight": numbers(5, 2, dtype=ml_dtypes.bfloat16)}, "scale": np.asarray(np.float32(2.6592))}


def assert_same(a, b):
    a, b = tree.flatten(a), tree.flatten(b)
    assert set(a) == set(b)
    for name in a:
        x, y = np.asarray(a[name]), np.asarray(b[name])
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        assert x.tobytes() == y.tobytes(), name


AWKWARD = {"transposed": lambda x: x.T, "sliced": lambda x: x[::2, 1:], "reversed": lambda x: x[::-1],
           "fortran": np.asfortranarray, "big-endian": lambda x: x.astype(">f4"), "scalar": lambda x: x[0, 0, ...],
           "broadcast": lambda x: np.broadcast_to(x[:1], x.shape), "empty": lambda x: x[:0],
           "jax": lambda x: jnp.asarray(x).T}


@pytest.mark.parametrize("kind", AWKWARD)
def test_awkward_arrays_are_written_right(tmp_path, kind):
    leaf = AWKWARD[kind](numbers(4, 6))
    checkpoints.save({"w": leaf}, tmp_path / "x.safetensors")
    back = checkpoints.load(tmp_path / "x.safetensors").params["w"]
    assert back.shape == leaf.shape and back.dtype == np.float32
    np.testing.assert_array_equal(back, np.asarray(leaf).astype(np.float32))


def test_round_trip_keeps_bits_dtypes_and_buffers(tmp_path):
    there = params()
    buffers = {"position_ids": np.array([[0, 2**40]]), "flags": np.array([True, False])}
    checkpoints.save(there, tmp_path / "x.safetensors", buffers=buffers, metadata={"who": "me"})
    back = checkpoints.load(tmp_path / "x.safetensors")
    assert_same(back.params, there)
    assert_same(back.buffers, buffers)
    assert back.buffers["position_ids"].dtype == np.int64
    assert "position_ids" not in back.params
    assert back.metadata == {"who": "me", "format": "pt"}


def test_a_file_loaded_and_saved_again_is_the_same_file(tmp_path):
    checkpoints.save(params(), tmp_path / "x.safetensors", buffers={"ids": np.array([2**40])})
    back = checkpoints.load(tmp_path / "x.safetensors")
    checkpoints.save(back.params, tmp_path / "y.safetensors", buffers=back.buffers)
    assert (tmp_path / "x.safetensors").read_bytes() == (tmp_path / "y.safetensors").read_bytes()


def test_the_callers_dict_is_left_alone(tmp_path):
    theirs = {"a": jnp.ones(3), "b": {"c": np.ones((2, 3)).T}}
    leaves, metadata = [id(x) for x in jax.tree.leaves(theirs)], {"k": "v"}
    checkpoints.save(theirs, tmp_path / "x.safetensors", metadata=metadata)
    assert [id(x) for x in jax.tree.leaves(theirs)] == leaves and metadata == {"k": "v"}


def test_shards_and_their_index(tmp_path):
    there, buffers = params(), {"ids": np.arange(3)}
    checkpoints.save(there, tmp_path, buffers=buffers, max_shard_size=60)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1 and not (tmp_path / "model.safetensors").exists()
    for path in (tmp_path, tmp_path / "model.safetensors.index.json", tmp_path / "model.safetensors"):
        back = checkpoints.load(path)
        assert_same(back.params, there)
        assert_same(back.buffers, buffers)


def test_the_last_save_is_the_one_read_however_it_was_sharded(tmp_path):
    first, second, third = params(), params(), params()
    checkpoints.save(first, tmp_path)
    checkpoints.save(second, tmp_path, max_shard_size=60)
    assert_same(checkpoints.load(tmp_path).params, second)
    checkpoints.save(third, tmp_path)
    assert_same(checkpoints.load(tmp_path).params, third)


@pytest.mark.parametrize("where", ["replace", "write"])
@pytest.mark.parametrize("size", ["5GB", 60])
def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch, where, size):
    old = params()
    checkpoints.save(old, tmp_path)
    names = sorted(p.name for p in tmp_path.iterdir())

    def half(arrays, file, metadata):
        with open(file, "wb") as out:
            out.write(b"half a fi")
        raise OSError("No space left on device")

    def refuse(source, target):
        raise OSError("interrupted")

    if where == "write":
        monkeypatch.setattr(safetensors.numpy, "save_file", half)
    else:
        monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space|interrupted"):
        checkpoints.save(params(), tmp_path, max_shard_size=size)
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert_same(checkpoints.load(tmp_path).params, old)


@pytest.mark.parametrize("length", [0, 5, 30, -1])
def test_a_truncated_file_is_refused(tmp_path, length):
    checkpoints.save(params(), tmp_path / "x.safetensors")
    whole = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(whole[:length])
    with pytest.raises(ValueError, match="x.safetensors is not a whole safetensors file"):
        checkpoints.load(tmp_path / "x.safetensors")


def test_a_corrupt_header_is_refused(tmp_path):
    checkpoints.save(params(), tmp_path / "x.safetensors")
    whole = bytearray((tmp_path / "x.safetensors").read_bytes())
    whole[8:12] = b"\xff\xfe{{"
    (tmp_path / "x.safetensors").write_bytes(whole)
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        checkpoints.load(tmp_path / "x.safetensors")


def test_a_missing_file_says_what_there_is(tmp_path):
    checkpoints.save(params(), tmp_path / "mnist.safetensors")
    with pytest.raises(ValueError, match="did you mean 'mnist.safetensors'"):
        checkpoints.load(tmp_path / "minst.safetensors")
    with pytest.raises(ValueError, match="holds no model.safetensors; it holds mnist.safetensors"):
        checkpoints.load(tmp_path)
    with pytest.raises(ValueError, match="doesn't exist either"):
        checkpoints.load(tmp_path / "no" / "x.safetensors")


@pytest.mark.parametrize("shard, sentence", [
    ("model-2.safetensors", "names model-2.safetensors, which is missing; did you mean 'model-1.safetensors'"),
    ("../secret.safetensors", "outside of its own folder"), ("a/../../b", "outside of its own folder"),
    ("..\\b", "outside of its own folder"), ("/etc/x", "outside of its own folder"),
    ("C:\\x", "outside of its own folder"),
    ("model-1.safetensors", "promises b, but no shard holds it")])
def test_a_wrong_index_is_refused(tmp_path, shard, sentence):
    checkpoints.save({"a": np.ones(2, np.float32)}, tmp_path / "model-1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": shard}}))
    with pytest.raises(ValueError, match=sentence):
        checkpoints.load(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="is not a shard index"):
        checkpoints.load(tmp_path)


def test_a_shard_may_be_a_link_out_of_the_folder_as_in_the_hubs_cache(tmp_path):
    (tmp_path / "snapshot").mkdir()
    checkpoints.save({"a": np.ones(2, np.float32)}, tmp_path / "blob.safetensors")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blob.safetensors")
    assert list(checkpoints.load(tmp_path / "snapshot").params) == ["a"]


def test_a_leaf_that_is_also_a_folder_is_refused(tmp_path):
    safetensors.numpy.save_file({"a": np.ones(1), "a.b": np.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="a is a leaf and also the beginning of a.b"):
        checkpoints.load(tmp_path / "x.safetensors")


@pytest.mark.parametrize("leaf, sentence", [
    (0.5, "w is a float; a checkpoint holds arrays only"), (np.array(["a"]), "w is of dtype str"),
    (np.ones(2, complex), "w is of dtype complex128"), (np.ones(2, ml_dtypes.float8_e4m3fn), "float8_e4m3fn"),
    (np.array([None]), "w is of dtype object"), (jax.random.key(0), "w is of dtype key<fry>")])
def test_what_no_file_can_hold_is_refused_at_the_door(tmp_path, leaf, sentence):
    with pytest.raises(ValueError, match=sentence):
        checkpoints.save({"w": leaf}, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_other_slips_at_the_door(tmp_path):
    with pytest.raises(ValueError, match="params and buffers both hold a"):
        checkpoints.save({"a": np.ones(1)}, tmp_path / "x.safetensors", buffers={"a": np.ones(1)})
    with pytest.raises(ValueError, match="metadata maps strings to strings; you gave n=3"):
        checkpoints.save({"a": np.ones(1)}, tmp_path / "x.safetensors", metadata={"n": 3})


def test_float8_files_are_refused_with_a_sentence(tmp_path):
    safetensors.numpy.save_file({"a": np.ones(2, ml_dtypes.float8_e4m3fn)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="a dtype that numpy can't read"):
        checkpoints.load(tmp_path / "x.safetensors")


def test_torch_reads_our_files_and_we_read_torchs(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file
    there = params()
    checkpoints.save(there, tmp_path / "x.safetensors", buffers={"ids": np.array([2**40])})
    seen = load_file(tmp_path / "x.safetensors")
    assert seen["head.weight"].dtype == torch.bfloat16 and seen["ids"].item() == 2**40
    for name, leaf in tree.flatten(there).items():
        np.testing.assert_array_equal(seen[name].float().numpy(), np.asarray(leaf, np.float32))
    save_file(seen, tmp_path / "y.safetensors")
    assert_same(checkpoints.load(tmp_path / "y.safetensors").params, there)


def test_a_task_vector_says_what_it_is(tmp_path):
    tau, base = {"w": numbers(2, 3)}, checkpoints.content_hash(params())
    checkpoints.save_task_vector(tau, tmp_path / "tau.safetensors", base=base, metadata={"task": "mnist"})
    back = checkpoints.load_task_vector(tmp_path / "tau.safetensors")
    assert_same(back.params, tau)
    assert back.metadata == {"tvjax": "task_vector", "base": base, "task": "mnist", "format": "pt"}
    checkpoints.save(tau, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="holds a model, not a task vector"):
        checkpoints.load_task_vector(tmp_path / "model.safetensors")


def test_content_hash_sees_content_and_only_content():
    there = params()
    digest = checkpoints.content_hash(there)
    assert checkpoints.content_hash(dict(reversed(there.items()))) == digest
    assert checkpoints.content_hash(jax.tree.map(jnp.asarray, there)) == digest
    w = there["encoder"]["layers"]["10"]["weight"]
    assert checkpoints.content_hash({"w": np.asfortranarray(w)}) == checkpoints.content_hash({"w": w})
    others = [{"w": w}, {"v": w}, {"w": w.T}, {"w": w.reshape(4, 3)}, {"w": w.view(np.int32)}, {"w": w + 1},
              {"w": w, "v": w}]
    assert len({checkpoints.content_hash(other) for other in others}) == len(others)


def test_check_finite_names_the_first_culprit():
    there = params()
    checkpoints.check_finite(there)
    there["head"]["weight"][4, 1] = np.inf
    with pytest.raises(ValueError, match=r"head.weight\[4, 1\] is inf; 1 of its 10 entries are not finite"):
        checkpoints.check_finite(there)
    with pytest.raises(ValueError, match=r"a\[0\] is nan"):
        checkpoints.check_finite({"a": jnp.array([jnp.nan]), "ids": np.arange(2)})


def training_state(value=1.0):
    theta = {"a": {"weight": jnp.full((3, 2), value)}, "b": jnp.full(4, value, jnp.bfloat16)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return {"params": theta, "opt": optimizer.init(theta), "key": jax.random.key(int(value)), "epoch": int(value),
            "best": value / 4, "done": value > 2, "seen": np.array([2**40]), "loss": np.float32(value), "none": None}


def same_leaf(a, b):
    if hasattr(a, "dtype") and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        assert jax.random.key_impl(a) == jax.random.key_impl(b)
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    assert type(a) is type(b)
    assert_same({"x": np.asarray(a)}, {"x": np.asarray(b)})


def test_a_training_state_comes_back_whole(tmp_path):
    for step in (1, 2, 3):
        checkpoints.save_state(training_state(float(step)), tmp_path / "run", step)
    assert checkpoints.latest_step(tmp_path / "run") == 3
    assert sorted(int(p.name) for p in (tmp_path / "run").iterdir() if p.name.isdigit()) == [2, 3]
    example = training_state()
    for wanted, step in ((3, None), (2, 2)):
        back = checkpoints.restore_state(example, tmp_path / "run", step)
        jax.tree.map(same_leaf, back, training_state(float(wanted)))
    assert jax.tree.structure(back) == jax.tree.structure(example)


def test_an_abstract_example_will_do(tmp_path):
    state = {"w": jnp.arange(3.0), "key": jax.random.key(5, impl="rbg")}
    checkpoints.save_state(state, tmp_path, 1)
    jax.tree.map(same_leaf, checkpoints.restore_state(jax.eval_shape(lambda: state), tmp_path), state)


def test_a_step_may_be_saved_again_but_not_an_earlier_one(tmp_path):
    checkpoints.save_state({"n": 1}, tmp_path, 5)
    checkpoints.save_state({"n": 2}, tmp_path, 5)
    assert checkpoints.restore_state({"n": 0}, tmp_path) == {"n": 2}
    with pytest.raises(ValueError, match="already holds step 5; step 3 would come before it"):
        checkpoints.save_state({"n": 3}, tmp_path, 3)


def test_slips_with_training_states(tmp_path):
    assert checkpoints.latest_step(tmp_path / "none") is None and not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="holds no saved state"):
        checkpoints.restore_state({"n": 0}, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    checkpoints.save_state({"n": 1, "w": jnp.ones(3)}, tmp_path / "run", 1)
    with pytest.raises(ValueError, match="holds no step 7; there are 1"):
        checkpoints.restore_state({"n": 0, "w": jnp.ones(3)}, tmp_path / "run", 7)
    with pytest.raises(ValueError, match=r"doesn't fit yours: only in yours: m; shapes: w \(3,\) vs \(4,\)"):
        checkpoints.restore_state({"n": 0, "m": 1, "w": jnp.ones(4)}, tmp_path / "run")
    with pytest.raises(ValueError, match="s is a str; a training state holds arrays, keys and numbers"):
        checkpoints.save_state({"s": "words"}, tmp_path / "run", 2)


def test_fields_of_a_file(tmp_path):
    path = tmp_path / "config.json"
    for text, said in (("{", "is not JSON"), ("[" * 100000, "is not JSON"), ("[1]", "holds a list, not fields with")):
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            checkpoints.fields_of(path)
    path.write_text('{"a": 1}')
    assert checkpoints.fields_of(path) == {"a": 1}
