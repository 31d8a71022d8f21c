"""Codecs: sizes as counted by hand, what they restore, and the law that encoding what was restored changes nothing."""
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import compression, merging
from tvjax.compression import bits, sparse
from tvjax.compression.quantised import quantise

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "merging.npz")
pytestmark = pytest.mark.usefixtures("quick_compilation")
SHAPES = {"enc": {"layers": {"0": {"weight": (24, 17), "bias": (17,)}, "1": {"weight": (24, 17), "bias": (17,)}}},
          "scale": ()}
TASKS = 3


def taus(seed=0):
    draws = np.random.default_rng(seed)
    draw = lambda shape: jnp.asarray(draws.standard_t(3, size=shape), jnp.float32) * 0.01
    return [jax.tree.map(draw, SHAPES, is_leaf=lambda x: isinstance(x, tuple)) for _ in range(TASKS)]


ENTRIES = 2 * (24 * 17 + 17) + 1
LEAVES = 5
CODECS = {
    "tall": compression.tall_codec(lam=[0.3, 0.4, 0.5]),
    "tall on ties": compression.tall_codec(merging=merging.ties(reduce="sum")),
    "magnitude masking": compression.magnitude_masking(),
    "emr": compression.emr_codec(),
    "bitdelta": compression.bitdelta(),
    "tvq": compression.tvq(width=4),
    "tvq 3": compression.tvq(width=3),
    "rtvq": compression.rtvq(),
    "top": compression.top_k(density=0.1),
    "top, dense": compression.top_k(density=0.5),
    "t-switch": compression.t_switch(),
    "tsv-c": compression.tsv_c(density=1 / TASKS),
    "ultradelta": compression.ultra_delta(drop=0.9),
}


def worst(a, b):
    return max(float(jnp.abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize("name", CODECS)
def test_encoding_again_changes_nothing(name):
    """A codec whose rule says otherwise (UltraDelta rescales what it kept) must break it."""
    codec, given = CODECS[name], taus()
    state = codec.encode(given)
    once = [codec.decode(state, task) for task in range(TASKS)]
    for task, tau in enumerate(once):
        again = codec.restore(state.shared, codec.one(state.shared, tau, task))
        error = worst(again, tau) / max(worst(tau, jax.tree.map(jnp.zeros_like, tau)), 1e-9)
        assert error < 2e-6 if codec.projects else error > 0.1


@pytest.mark.parametrize("name", CODECS)
def test_restored_has_the_shape_of_the_given(name):
    codec, given = CODECS[name], taus()
    state = codec.encode(given)
    for task in range(TASKS):
        found = codec.decode(state, task)
        assert jax.tree.structure(found) == jax.tree.structure(given[0])
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(given[0]), strict=True):
            assert jnp.shape(x) == jnp.shape(y) and x.dtype == jnp.float32
    jitted = jax.jit(codec.restore)(state.shared, state.tasks[1])
    assert worst(jitted, codec.decode(state, 1)) < 1e-8


@pytest.mark.parametrize("name", CODECS)
def test_written_bytes_are_the_counted_bits(name, tmp_path):
    """Each packed leaf fills up its last byte; safetensors adds a header of names."""
    state = CODECS[name].encode(taus())
    counted, stored = compression.count_bits(state) / 8, compression.stored_bytes(state)
    packed = [x for x in jax.tree.leaves(state, is_leaf=bits.is_packed) if bits.is_packed(x)]
    assert counted <= stored < counted + len(packed) + 1e-9 or not packed and counted == stored
    written = compression.write(state, tmp_path / "state.safetensors")
    arrays = len(jax.tree.leaves(state))
    assert stored <= written <= stored + 200 + 200 * arrays


FORMULAS = {
    "tall": 32 * ENTRIES + TASKS * ENTRIES,
    "magnitude masking": 32 * ENTRIES + TASKS * ENTRIES,
    "emr": 32 * ENTRIES + TASKS * (ENTRIES + 32),
    "bitdelta": TASKS * (ENTRIES + 32 * LEAVES),
    "tvq": TASKS * (4 * ENTRIES + 64 * LEAVES),
    "tvq 3": TASKS * (3 * ENTRIES + 64 * LEAVES),
    "rtvq": 3 * ENTRIES + 64 * LEAVES + TASKS * (2 * ENTRIES + 64 * LEAVES),
    "tsv-c": TASKS * 32 * (2 * 5 * (24 + 17) + 2 * 17 + 1),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_bits_by_hand(name):
    assert compression.count_bits(CODECS[name].encode(taus())) == FORMULAS[name]


def place_bits(kept: np.ndarray) -> int:
    return min(kept.size, int(kept.sum()) * max(1, math.ceil(math.log2(max(kept.size, 2)))))


@pytest.mark.parametrize("name, density", [("top", 0.1), ("top, dense", 0.5)])
def test_bits_of_sparse_vectors(name, density):
    given = taus()
    state = CODECS[name].encode(given)
    expected = 0
    for task in range(TASKS):
        found = jax.tree.leaves(CODECS[name].decode(state, task))
        kept = [np.asarray(x) != 0 for x in found]
        assert sum(int(x.sum()) for x in kept) == int(density * ENTRIES)
        expected += sum(place_bits(x) + 32 * int(x.sum()) for x in kept)
        flat = np.concatenate([np.abs(np.asarray(x)).reshape(-1) for x in jax.tree.leaves(given[task])])
        least = np.sort(flat)[::-1][int(density * ENTRIES) - 1]
        assert min(np.abs(np.asarray(x)[m]).min() for x, m in zip(found, kept, strict=True) if m.any()) == least
    assert compression.count_bits(state) == expected


def test_switches_keep_signs_and_norm():
    given = taus()
    codec = compression.t_switch(density=0.25)
    found = codec.decode(codec.encode(given), 0)
    values = np.concatenate([np.asarray(x).reshape(-1) for x in jax.tree.leaves(found)])
    source = np.concatenate([np.asarray(x).reshape(-1) for x in jax.tree.leaves(given[0])])
    assert len(np.unique(np.abs(values))) == 2 and (values != 0).sum() == int(0.25 * ENTRIES)
    assert np.all(np.sign(values[values != 0]) == np.sign(source[values != 0]))
    assert np.linalg.norm(values) == pytest.approx(np.linalg.norm(source[values != 0]), rel=1e-5)


def test_the_authors_emr():
    with jax.enable_x64(True):
        given = [{"w": jnp.asarray(w), "b": jnp.asarray(b)} for w, b in zip(GOLDEN["W"], GOLDEN["B"], strict=True)]
        state = compression.emr_codec().encode(given)
        np.testing.assert_array_equal(state.shared["w"], GOLDEN["emr_u.w"])
        for task, own in enumerate(state.tasks):
            np.testing.assert_array_equal(bits.unpack(own["mask"]["w"]), GOLDEN["emr_mask_w"][task])
            np.testing.assert_allclose(own["factor"], GOLDEN["emr_resc"][task], rtol=1e-6)  # theirs is float32


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 13])
def test_quantisation_is_within_half_a_step(width):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(9, 5)), jnp.float32)
    node = quantise(x, width=width)
    assert float(jnp.abs(node.restored() - x).max()) <= float(node.step) * (0.5 + 1e-5)
    assert quantise(jnp.full((3,), 2.0), width=width).restored().tolist() == [2.0] * 3
    assert quantise(jnp.zeros((0,)), width=width).restored().shape == (0,)


def test_ultra_delta_drops_within_every_value():
    given = taus()
    codec = compression.ultra_delta(drop=0.9, spread=0.0, balance="none")
    found = codec.decode(codec.encode(given), 0)["enc"]["layers"]["0"]["weight"]
    node = quantise(given[0]["enc"]["layers"]["0"]["weight"], width=4)
    values, kept = np.asarray(node.restored()), np.asarray(found) != 0
    for value in np.unique(values):
        here = values == value
        assert (kept & here).sum() == here.sum() - round(0.9 * here.sum())
    np.testing.assert_allclose(np.asarray(found)[kept], values[kept] / 0.1, rtol=1e-5)


def test_ultra_delta_is_repeatable_and_balanced():
    given = taus()
    given[1] = jax.tree.map(lambda x: 3 * x, given[1])
    encode = lambda **options: compression.ultra_delta(drop=0.9, **options).encode(given)
    one, two, other = encode(), encode(), encode(seed=1)
    same = [np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)]
    assert all(same) and not all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=False))
    factors = [float(own["factor"]) for own in one.tasks]
    assert factors[1] == pytest.approx(min(factors)) and factors[1] < 0.6 * factors[0]


def test_a_zero_vector_costs_no_values():
    zero = [jax.tree.map(jnp.zeros_like, tau) for tau in taus()]
    for name in ("top", "t-switch", "ultradelta", "tvq", "bitdelta", "emr", "tall", "rtvq", "tsv-c"):
        state = CODECS[name].encode(zero)
        assert worst(CODECS[name].decode(state, 0), zero[0]) == 0
    assert compression.count_bits(CODECS["top"].encode(zero)) == 0


def test_rank_keeps_the_best_triplets():
    given = taus()
    codec = compression.tsv_c(density=0.5)
    found = codec.decode(codec.encode(given), 0)["enc"]["layers"]["0"]["weight"]
    U, s, Vt = np.linalg.svd(np.asarray(given[0]["enc"]["layers"]["0"]["weight"]), full_matrices=False)
    np.testing.assert_allclose(found, (U[:, :8] * s[:8]) @ Vt[:8], atol=1e-6)


def test_a_task_more():
    given = taus()
    for name in ("tall on ties", "emr", "bitdelta", "rtvq"):
        codec = CODECS[name]
        state = codec.encode(given[:2])
        more = codec.add(state, given[2])
        assert len(more.tasks) == 3 and more.shared is state.shared and more.tasks[:2] == state.tasks


@pytest.mark.parametrize("entries", [0, 1, 7, 8, 9, 64, 1001])
@pytest.mark.parametrize("xp", [np, jnp])
def test_bits_round_trip(entries, xp):
    mask = np.random.default_rng(entries).random(entries) < 0.5
    found = bits.pack(xp.asarray(mask))
    assert found.packed.shape == (bits.size(entries),) and found.information == entries
    np.testing.assert_array_equal(bits.unpack(found), mask)
    np.testing.assert_array_equal(found.packed, np.packbits(mask))
    for width in (1, 3, 5, 8, 11, 27):
        numbers = np.random.default_rng(width).integers(0, 2**width, entries)
        codes = bits.pack_codes(xp.asarray(numbers, np.uint32), width=width)
        assert codes.information == entries * width
        np.testing.assert_array_equal(bits.unpack_codes(codes), numbers)


def test_slips_are_answered():
    with pytest.raises(ValueError, match="numbered from 0; got 3"):
        CODECS["tall"].decode(CODECS["tall"].encode(taus()), 3)
    with pytest.raises(ValueError, match="nothing to encode"):
        CODECS["tall"].encode([])
    with pytest.raises(ValueError, match="1 to 16 bits; got 0"):
        compression.tvq(width=0)
    with pytest.raises(ValueError, match="'free' or 'counted'"):
        sparse.matched_density(8, positions="none")
    with pytest.raises(ValueError, match="another tree"):
        bits.stack([{"w": bits.pack(np.ones(3, bool))}, {"v": bits.pack(np.ones(3, bool))}])
