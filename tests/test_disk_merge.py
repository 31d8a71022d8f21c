"""From disk to disk is what memory gives, bit by bit, for every method; and a directory that others load."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest

from tvjax import checkpoints, disk, merging, tree
from tvjax.disk import ledger
from tvjax.merging import plan

TASKS = ("cars", "birds", "maps")
SHAPES = {
    "embed.weight": (7, 8),
    "layers.0.attn.weight": (8, 8),
    "layers.0.attn.bias": (8,),
    "layers.1.attn.weight": (8, 8),
    "layers.1.attn.bias": (8,),
    "layers.2.attn.weight": (8, 8),
    "big.weight": (263, 251),
    "scale": (),
}
BESIDE = ("generation_config.json", "preprocessor_config.json", "special_tokens_map.json", "tokenizer.json")
SPECTRAL = 1e-6  # decompositions of larger matrices in other memory may round otherwise


def leaves(seed, dtype=np.float32, base=None):
    rng = np.random.default_rng(seed)
    draw = lambda shape: rng.standard_normal(shape) * (1 if base is None else 0.1 * rng.random(shape) ** 3)
    start = lambda name: 0 if base is None else base[name].astype(np.float32)
    return {name: np.asarray(start(name) + draw(shape), np.float32).astype(dtype) for name, shape in SHAPES.items()}


def write(folder, flat, *, buffers=True, config=None, shard="5GB"):
    ids = {"embed.position_ids": np.arange(7)[None] + 2**40} if buffers else {}
    checkpoints.save(
        checkpoints.nest(flat),
        folder / "model.safetensors" if shard == "5GB" else folder,
        buffers=ids,
        max_shard_size=shard,
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", "dtype": "float32", **(config or {})}))
    return folder


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    base = leaves(0)
    write(folder / "base", base)
    for name in BESIDE:
        (folder / "base" / name).write_text("{}")
    (folder / "base" / "modeling_toy.py").write_text("print('no')")
    (folder / "base" / "README.md").write_text("---\nlicense: mit\n---\n# base\n")
    return folder / "base", [write(folder / task, leaves(i + 1, base=base)) for i, task in enumerate(TASKS)]


def needed(name):
    """Data that some methods need: Fisher information, Gram matrices of inputs."""
    rng = np.random.default_rng(9)
    square = lambda x: (x @ x.swapaxes(-1, -2)).astype(np.float32)
    fisher = {n: rng.random((3, *shape), np.float32) + 0.1 for n, shape in SHAPES.items()}
    gram = {n: square(rng.standard_normal((3, shape[1], 300))) for n, shape in SHAPES.items() if len(shape) == 2}
    gradients = {n: rng.standard_normal((3, *shape), np.float32) for n, shape in SHAPES.items()}
    wanted = plan.wanted(merging.build(name))
    known = {"fisher": fisher, "gram": gram, "gradients": gradients}
    return {n: checkpoints.nest(x) for n, x in known.items() if n in wanted}


def in_memory(operator, base, models, tasks=TASKS, **data):
    theta0, thetas = checkpoints.load(base).params, [checkpoints.load(model).params for model in models]
    return tree.flatten(merging.merge(operator, thetas, theta0, tasks=list(tasks), **data))


def made(base, models, out, *args, **kwargs):
    return disk.merge_checkpoints(base, models, out, *args, say=lambda line: None, **kwargs)


@pytest.mark.parametrize("name", merging.METHODS)
def test_disk_equals_memory(name, inputs, tmp_path):
    base, models = inputs
    models = models[:2] if name in ("slerp", "nuslerp") else models
    data = needed(name)
    expected = in_memory(merging.build(name), base, models, TASKS[: len(models)], **data)
    found = checkpoints.load(made(base, models, tmp_path / "out", name, data=data))
    flat = tree.flatten(found.params)
    assert set(flat) == set(SHAPES)
    entrywise = all(stage.entrywise for stage in merging.build(name).stages)
    for leaf, x in flat.items():
        np.testing.assert_allclose(x, expected[leaf], rtol=0, atol=0 if entrywise else SPECTRAL)
    np.testing.assert_array_equal(found.buffers["embed.position_ids"], np.arange(7)[None] + 2**40)


def test_few_leading_triplets_of_a_large_matrix_are_those_of_memory(tmp_path):
    """From 512 rows on they are taken in float32, by one program for disk, memory and `jit`."""
    rng = np.random.default_rng(0)
    base = {"w": rng.standard_normal((512, 514)).astype(np.float32)}
    models = {task: {"w": base["w"] + 0.01 * rng.standard_normal((512, 514)).astype(np.float32)} for task in "abcd"}
    folders = {name: write(tmp_path / name, flat, buffers=False) for name, flat in {"base": base, **models}.items()}
    out = made(folders.pop("base"), folders, tmp_path / "out", "tsv_m", ledger="brief")
    found = checkpoints.load(out).params["w"]
    taus = [{"w": model["w"] - base["w"]} for model in models.values()]
    for merge in (merging.tsv_m(), jax.jit(lambda taus: merging.tsv_m()(taus))):
        np.testing.assert_allclose(found, base["w"] + merge(taus)["w"], rtol=0, atol=SPECTRAL)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes_are_mixed_and_the_bases_are_kept(dtype, tmp_path):
    low = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    base = leaves(0, low)
    folders = [write(tmp_path / "base", base)]
    folders += [
        write(tmp_path / task, leaves(i + 1, kind, base))
        for i, (task, kind) in enumerate(zip(TASKS, (low, np.float32, np.float16), strict=True))
    ]
    out = made(folders[0], folders[1:], tmp_path / "out", merging.task_arithmetic(scale=0.3))
    wide = lambda x: np.asarray(x, np.float32)
    thetas = [tree.flatten(checkpoints.load(folder).params) for folder in folders[1:]]
    up = [checkpoints.nest({name: wide(x) for name, x in theta.items()}) for theta in thetas]
    expected = tree.flatten(
        merging.merge(merging.task_arithmetic(scale=0.3), up, checkpoints.nest({n: wide(x) for n, x in base.items()}))
    )
    for name, x in tree.flatten(checkpoints.load(out).params).items():
        assert x.dtype == low
        np.testing.assert_array_equal(wide(x), wide(expected[name].astype(low)))
    wider = made(folders[0], folders[1:], tmp_path / "wide", merging.task_arithmetic(scale=0.3), out_dtype="float32")
    for name, x in tree.flatten(checkpoints.load(wider).params).items():
        np.testing.assert_array_equal(x, expected[name])
    assert json.loads((wider / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("name", ["ties", "iso_c", "task_arithmetic"])
def test_double_precision_is_that_of_all_threads(name, inputs, tmp_path, monkeypatch):
    """What other threads measure, count and decompose is no less precise than what the first does."""
    monkeypatch.setattr("tvjax.merging.ranking.SMALL", 1 << 10)  # so that a pass counts
    base, models = inputs
    out = made(base, models, tmp_path / "out", name, compute_dtype="float64", out_dtype="float64")
    with jax.enable_x64(True):
        wide = lambda folder: checkpoints.nest(
            {leaf: np.asarray(x, np.float64) for leaf, x in tree.flatten(checkpoints.load(folder).params).items()})
        program = jax.jit(lambda thetas, theta0: merging.merge(merging.build(name), thetas, theta0))  # of one thread
        expected = tree.flatten(program([wide(model) for model in models], wide(base)))
    for leaf, x in tree.flatten(checkpoints.load(out).params).items():
        assert x.dtype == np.float64
        np.testing.assert_allclose(x, expected[leaf], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["iso_c", "svc"])
def test_the_ledger_changes_no_byte(name, inputs, tmp_path):
    """A brief one lets the engine sum tasks by pieces before it decomposes; a full one needs all of them."""
    base, models = inputs
    full, brief = (made(base, models, tmp_path / kind, name, ledger=kind) for kind in ("full", "brief"))
    assert (full / "model.safetensors").read_bytes() == (brief / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["dare", "della", "ties"])
def test_subsets_chunks_and_shards_change_nothing(name, inputs, tmp_path, monkeypatch):
    base, models = inputs
    whole = tree.flatten(checkpoints.load(made(base, models, tmp_path / "whole", name)).params)
    sharded = made(base, models, tmp_path / "shards", name, max_shard_size="1KB")
    assert len(list(sharded.glob("model-*-of-*.safetensors"))) > 2
    for leaf, x in tree.flatten(checkpoints.load(sharded).params).items():
        np.testing.assert_array_equal(x, whole[leaf])
    monkeypatch.setattr("tvjax.merging.pieces.SIZES", (1 << 10, 1 << 12))
    jax.tree.map(
        np.testing.assert_array_equal,
        whole,
        tree.flatten(checkpoints.load(made(base, models, tmp_path / "small", name)).params),
    )
    if name == "dare":  # no statistic of the whole model
        part = tree.flatten(checkpoints.load(made(base, models, tmp_path / "part", name, only="big|layers.1")).params)
        np.testing.assert_array_equal(part["big.weight"], whole["big.weight"])
        np.testing.assert_array_equal(part["embed.weight"], tree.flatten(checkpoints.load(base).params)["embed.weight"])


def test_sharded_inputs_are_read(inputs, tmp_path):
    base, models = inputs
    flat = tree.flatten(checkpoints.load(models[0]).params)
    sharded = write(tmp_path / TASKS[0], flat, shard=1000)
    assert len(list(sharded.glob("*.safetensors"))) > 1
    one, two = made(base, models, tmp_path / "one"), made(base, [sharded, *models[1:]], tmp_path / "two")
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()


def test_the_directory_is_complete(inputs, tmp_path):
    base, models = inputs
    said = []
    out = disk.merge_checkpoints(
        base, models, tmp_path / "a b ü" / "out", "ties", options={"density": 0.3}, say=said.append
    )
    ours = ("README.md", "config.json", "ledger.jsonl", "model.safetensors", "recipe.yaml")
    assert sorted(path.name for path in out.iterdir()) == sorted([*ours, *BESIDE])
    assert all((out / name).read_text() == "{}" for name in BESIDE)
    assert "modeling_toy.py, which is code" in said[0] and "2 passes" in said[0] and "memory: at most" in said[0]
    card = (out / "README.md").read_text()
    assert "base_model:" in card and "density" in card and "mit" in card
    (models[0] / "tokenizer.json").write_text("[]")
    again = disk.run(disk.from_yaml(out / "recipe.yaml"), tmp_path / "again", say=said.append)
    (models[0] / "tokenizer.json").unlink()
    assert "tokenizer.json of cars differ from the base's, which are taken" in "".join(said)
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_the_ledger_tells_what_was_done(inputs, tmp_path):
    base, models = inputs
    out = made(base, models, tmp_path / "out", "ties", options={"density": 0.3})
    lines = ledger.read(out / "ledger.jsonl").tensors
    theta0, found = checkpoints.load(base), checkpoints.load(out)
    flat, flat0 = tree.flatten(found.params), tree.flatten(theta0.params)
    assert set(lines) == {*flat, *found.buffers}
    taus = np.stack(
        [tree.flatten(checkpoints.load(model).params)["big.weight"] - flat0["big.weight"] for model in models]
    ).reshape(3, -1)
    line = lines["big.weight"]
    norms = np.linalg.norm(taus, axis=1)
    np.testing.assert_allclose(line["norms"], norms, rtol=1e-5)
    np.testing.assert_allclose(line["cosines"], taus @ taus.T / norms[:, None] / norms, atol=1e-5)
    assert line["sign_conflicts"] == np.mean((taus > 0).any(0) & (taus < 0).any(0))
    step = flat["big.weight"] - flat0["big.weight"]
    assert abs(line["kept"] - np.mean(step != 0)) < 0.01
    np.testing.assert_allclose(
        line["coefficients"], np.linalg.lstsq(taus.T, step.reshape(-1), rcond=None)[0], atol=1e-3
    )
    assert line["sha256"] == _sha(flat["big.weight"]) and line["base_sha256"] == _sha(flat0["big.weight"])
    assert set(line["model_sha256"]) == set(TASKS)
    assert lines["embed.position_ids"]["copied"].startswith("copied from the base")


def _sha(x):
    import hashlib

    return hashlib.sha256(x.tobytes()).hexdigest()


def test_it_loads_elsewhere(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    torch.manual_seed(0)
    for name in ("base", "a", "b"):
        transformers.CLIPVisionModel(config).save_pretrained(tmp_path / name)
    out = made(tmp_path / "base", [tmp_path / "a", tmp_path / "b"], tmp_path / "out", "average", max_shard_size="10KB")
    loaded = {n: transformers.CLIPVisionModel.from_pretrained(tmp_path / n).state_dict() for n in ("a", "b", "out")}
    for name, x in loaded["out"].items():
        torch.testing.assert_close(
            x, (loaded["a"][name] + loaded["b"][name]) / 2 if x.is_floating_point() else loaded["a"][name]
        )
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in loaded["out"].values() if x.is_floating_point())
