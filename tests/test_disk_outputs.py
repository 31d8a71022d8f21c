"""A merge written as a task vector, or as a LoRA adapter of a given rank whose error is told."""
import json

import numpy as np
import pytest
import safetensors.numpy

from tvjax import checkpoints, disk, tree, vectors
from tvjax.disk import ledger

SHAPES = {"model.embed_tokens.weight": (11, 8), "model.layers.0.q_proj.weight": (8, 8),
          "model.layers.0.up_proj.weight": (12, 8), "model.layers.0.up_proj.bias": (12,),
          "model.conv.weight": (5, 3, 2, 2), "model.norm.weight": (8,)}
RANKS = {"model.conv": 5, "model.embed_tokens": 8, "model.layers.0.q_proj": 8, "model.layers.0.up_proj": 8}


def write(folder, flat, **config):
    folder.mkdir(parents=True)
    safetensors.numpy.save_file(flat, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", **config}))
    return folder


def draw(seed, scale=1.0, shapes=None):
    rng = np.random.default_rng(seed)
    return {name: (scale * rng.standard_normal(shape)).astype(np.float32) for name, shape in (shapes or SHAPES).items()}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder, base = tmp_path_factory.mktemp("inputs"), draw(0)
    moved = lambda seed: {name: base[name] + step for name, step in draw(seed, 0.1).items()}
    return write(folder / "base", base), [write(folder / f"m{seed}", moved(seed)) for seed in (1, 2)]


def made(base, models, out, method="task_arithmetic", said=None, **settings):
    say = (lambda line: None) if said is None else said.append
    return disk.merge_checkpoints(base, models, out, method, say=say, **settings)


def read(folder, name="model"):
    return safetensors.numpy.load_file(folder / f"{name}.safetensors")


def fused(folder, base):
    held = disk.open_checkpoint(base)
    opened = disk.open_checkpoint(folder, base=held)
    found = {name: opened.whole(name) for name in opened.tensors}
    opened.close()
    held.close()
    return found


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "iso_c"])
def test_a_task_vector_is_what_the_model_moved_by(method, inputs, tmp_path):
    base, models = inputs
    model = read(made(base, models, tmp_path / "model", method))
    out = made(base, models, tmp_path / "tau", method, output="task_vector")
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "ledger.jsonl", "recipe.yaml",
                                                           "task_vector.safetensors"]
    tau = checkpoints.load_task_vector(out / "task_vector.safetensors").params
    for name, x in tree.flatten(vectors.add(checkpoints.load(base).params, tau, scale=1.0)).items():
        np.testing.assert_allclose(x, model[name], rtol=0, atol=1e-6)
    again = disk.run(disk.from_yaml(out / "recipe.yaml"), tmp_path / "again", say=lambda line: None)
    assert (again / "task_vector.safetensors").read_bytes() == (out / "task_vector.safetensors").read_bytes()


def test_a_task_vector_of_models_that_are_combined_is_a_difference_too(inputs, tmp_path):
    base, models = inputs
    slerp = dict(method="slerp", options={"t": 0.5}, origin="zero")
    one, two = (disk.run(disk.Recipe(str(base), {"a": str(models[0]), "b": str(models[1])}, **slerp, output=kind),
                         tmp_path / kind, say=lambda line: None) for kind in ("model", "task_vector"))
    start = read(base)
    for name, x in read(two, "task_vector").items():
        np.testing.assert_allclose(start[name] + x, read(one)[name], rtol=0, atol=1e-6)


def test_it_is_sharded_as_models_are(inputs, tmp_path):
    base, models = inputs
    out = made(base, models, tmp_path / "out", output="task_vector", max_shard_size=500)
    index = out / "task_vector.safetensors.index.json"
    assert set(tree.flatten(checkpoints.load_task_vector(index).params)) == set(SHAPES)


@pytest.mark.parametrize("rank", [2, 64])
def test_an_adapter_is_the_nearest_of_its_rank(rank, inputs, tmp_path):
    base, models = inputs
    said, start, model = [], read(base), read(made(base, models, tmp_path / "model"))
    out = made(base, models, tmp_path / "lora", output="lora", rank=rank, said=said)
    found, lines = fused(out, base), {line["of"]: line for line in ledger.lines(out) if "of" in line}
    whole, rest = 0.0, 0.0
    for name, x in model.items():
        step = (x - start[name]).astype(np.float64)
        if name.removesuffix(".weight") not in RANKS:
            np.testing.assert_array_equal(found[name], start[name])
            whole, rest = whole + (step**2).sum(), rest + (step**2).sum()
            continue
        s = np.linalg.svd(step.reshape(len(step), -1), compute_uv=False)
        beyond = (s[rank:] ** 2).sum()
        assert abs(lines[name]["residual_norm"] - beyond**0.5) < 1e-5 and lines[name]["rank"] == min(rank, len(s))
        np.testing.assert_allclose(((found[name] - x) ** 2).sum(), beyond, rtol=1e-4, atol=1e-9)
        whole, rest = whole + (step**2).sum(), rest + beyond
    told = f"rank {rank} leaves out {(rest / whole) ** 0.5:.3g} of the step's norm"
    assert told in said[-2] and "2 changed tensors that an adapter cannot hold" in said[-2]
    assert told in (out / "README.md").read_text()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_peft_reads_it(tmp_path):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    for kind, config in (("gpt2", transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)),
                         ("bert", transformers.BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1,
                                                          num_attention_heads=2, intermediate_size=12))):
        torch.manual_seed(0)
        folders = [tmp_path / kind / name for name in ("base", "a", "b")]
        for folder in folders:
            transformers.AutoModel.from_config(config).eval().save_pretrained(folder)
        load, ids = transformers.AutoModel.from_pretrained, torch.arange(6)[None]
        kept = dict(exclude="bias|[Nn]orm|ln_")
        lora = made(folders[0], folders[1:], tmp_path / kind / "lora", output="lora", rank=20, **kept)
        model = made(folders[0], folders[1:], tmp_path / kind / "model", **kept)
        with torch.no_grad():
            adapted = peft.PeftModel.from_pretrained(load(folders[0]).eval(), lora)(input_ids=ids).last_hidden_state
            plain = load(model).eval()(input_ids=ids).last_hidden_state
        torch.testing.assert_close(adapted, plain, rtol=0, atol=1e-4)


def test_fused_adapters_are_compressed_anew(inputs, tmp_path):
    base, _ = inputs
    for seed in (1, 2):
        a, b = draw(seed, shapes={"a": (2, 8), "b": (8, 2)}).values()
        folder = tmp_path / f"lora{seed}"
        folder.mkdir()
        names = [f"base_model.model.model.layers.0.q_proj.lora_{part}.weight" for part in "AB"]
        safetensors.numpy.save_file(dict(zip(names, (a, b), strict=True)), folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    both, exact = [tmp_path / "lora1", tmp_path / "lora2"], read(made(base, [tmp_path / "lora1", tmp_path / "lora2"],
                                                                     tmp_path / "model"))
    for rank, most in ((4, 1e-5), (2, np.inf)):
        said = []
        out = made(base, both, tmp_path / f"rank{rank}", output="lora", rank=rank, said=said)
        assert set(read(out, "adapter_model")) == set(names)
        [line] = [line for line in ledger.lines(out) if "of" in line]
        name = line["of"]
        off = np.linalg.norm(fused(out, base)[name] - exact[name])
        assert abs(off - line["residual_norm"]) < 1e-5 and line["residual_norm"] <= most
        assert "cannot hold" not in said[-2]
    assert line["residual_norm"] > 1e-2


@pytest.mark.parametrize("output", ["lora", "task_vector"])
def test_what_was_interrupted_goes_on(output, inputs, tmp_path, monkeypatch):
    base, models = inputs
    whole = made(base, models, tmp_path / "whole", output=output, rank=2)
    from tvjax.disk import drive
    for stop in (1, 2, 5):
        count, write_ = [0], drive.Sink._write

        def failing(self, *args, count=count, write_=write_, stop=stop):
            count[0] += 1
            if count[0] > stop:
                raise KeyboardInterrupt
            return write_(self, *args)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(drive.Sink, "_write", failing)
            made(base, models, tmp_path / f"out{stop}", output=output, rank=2)
        said = []
        out = made(base, models, tmp_path / f"out{stop}", output=output, rank=2, said=said)
        name = {"lora": "adapter_model", "task_vector": "task_vector"}[output] + ".safetensors"
        assert (out / name).read_bytes() == (whole / name).read_bytes()
        assert output == "task_vector" or "2 changed tensors" in said[-2]


def test_slips_get_one_sentence(inputs, tmp_path):
    base, models = inputs
    with pytest.raises(ValueError, match="no output 'loar'; did you mean 'lora'"):
        made(base, models, tmp_path / "o", output="loar")
    with pytest.raises(ValueError, match="rank is a whole number from 1 on; got 0"):
        made(base, models, tmp_path / "o", output="lora", rank=0)
    with pytest.raises(ValueError, match="an adapter has nothing to hold"):
        made(base, models, tmp_path / "o", output="lora", only="bias")
    assert not (tmp_path / "o").exists()
