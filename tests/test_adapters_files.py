"""Adapters in PEFT's format: written here and read by peft, written by peft and read here, and files that don't fit."""
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import adapters, checkpoints, tree
from tvjax.models.layers import Conv1D, Linear

pytestmark = pytest.mark.usefixtures("quick_compilation")


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(Linear(6, name="q_proj")(x))
        return Linear(5, name="fc2")(jnp.tanh(Conv1D(7, name="c_fc")(x)))


NET, X = Net(), np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
apply = lambda params, x: NET.apply({"params": params}, x)
draw = np.random.default_rng(1).standard_normal
some = lambda *shape: jnp.asarray(draw(shape, np.float32))
THETA0 = {"q_proj": {"weight": some(6, 6), "bias": some(6)}, "c_fc": {"weight": some(6, 7), "bias": some(7)},
          "fc2": {"weight": some(5, 7), "bias": some(5)}}
SITES = adapters.find(apply, THETA0, X)
LORA = adapters.Lora(rank=2, alpha=4, targets="q_proj|fc2")


def moved(phi):
    return jax.tree.map(lambda x: np.asarray(x) + draw(x.shape, np.float32), phi)


def adapted(method, phi):
    return jax.jit(adapters.adapted(apply, method))(THETA0, phi, X)


def saved(folder, method=LORA, **options):
    phi0 = adapters.start(method, SITES, seed=options.get("seed", 42))
    adapters.save(folder, method, moved(phi0), SITES, phi0=phi0, **{"base": "b", "seed": 42, **options})
    return adapters.load(folder)


@pytest.mark.parametrize("method", [LORA, adapters.Lora(rank=3, alpha=1, scaling="root", dropout=0.1, targets="fc2"),
                                    adapters.Rescale(targets="q_proj|fc2", feedforward="fc2")])
def test_what_is_saved_is_read(tmp_path, method):
    phi = moved(adapters.start(method, SITES))
    adapters.save(tmp_path / "a", method, phi, SITES)
    found = adapters.load(tmp_path / "a")
    jax.tree.map(np.testing.assert_array_equal, found.phi, phi)
    np.testing.assert_allclose(adapted(found.method, found.phi), adapted(method, phi), atol=1e-6)
    assert adapters.start(found.method, SITES).keys() == phi.keys()


def test_the_disk_reads_it_as_a_model(tmp_path):
    from tvjax import disk  # noqa: F401  registers adapters
    from tvjax.disk.readers import open_checkpoint
    checkpoints.save(THETA0, tmp_path / "base")
    one = saved(tmp_path / "a")
    base = open_checkpoint(tmp_path / "base")
    model = open_checkpoint(tmp_path / "a", base=base)
    merged = tree.flatten(adapters.merged(LORA, THETA0, one.phi, SITES))
    for name, x in merged.items():
        np.testing.assert_allclose(model.whole(name), x, atol=1e-5)


def test_starts_are_compared(tmp_path):
    a, b = saved(tmp_path / "a"), saved(tmp_path / "b")
    adapters.same_start([a, b])
    for other, message in ((saved(tmp_path / "c", seed=7), r"began at another φ0 than .*a \(seeds 42 and 7\)"),
                           (saved(tmp_path / "d", base="x"), "began at another base than")):
        with pytest.raises(ValueError, match=message):
            adapters.same_start([a, other])
    (tmp_path / "a" / "tvjax.json").unlink()
    with pytest.raises(ValueError, match="doesn't tell the φ0"):
        adapters.same_start([adapters.load(tmp_path / "a"), b])


def write(folder, name, content):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def test_files_that_do_not_fit_are_sentences(tmp_path):
    with pytest.raises(ValueError, match="holds no adapter_config.json"):
        adapters.load(tmp_path)
    write(tmp_path / "x", "adapter_config.json", {"peft_type": "PREFIX_TUNING"})
    with pytest.raises(ValueError, match="of type PREFIX_TUNING; LORA and IA3 are read"):
        adapters.load(tmp_path / "x")
    write(tmp_path / "x", "adapter_config.json", {"peft_type": "LORA"})
    with pytest.raises(ValueError, match="but no adapter_model.safetensors"):
        adapters.load(tmp_path / "x")
    saved(tmp_path / "y")
    config = json.loads((tmp_path / "y" / "adapter_config.json").read_text())
    write(tmp_path / "y", "adapter_config.json", {**config, "rank_pattern": {"fc2": 4}})
    with pytest.raises(ValueError, match="other ranks or α for some modules"):
        adapters.load(tmp_path / "y")
    with pytest.raises(ValueError, match="PEFT has no Bias adapters"):
        bias = adapters.Bias(targets="fc2")
        adapters.save(tmp_path / "z", bias, adapters.start(bias, SITES), SITES)
    both = adapters.Lora(rank=2, targets="c_fc|fc2")
    with pytest.raises(ValueError, match="one layout for all"):
        adapters.save(tmp_path / "z", both, adapters.start(both, SITES), SITES)


# ---------------------------------------------------------------- beside peft
@pytest.fixture(scope="module")
def twin():
    """() -> the same network in torch, as an argument of peft."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("peft")
    from transformers.pytorch_utils import Conv1D as TorchConv1D

    class Twin(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.c_fc, self.fc2 = torch.nn.Linear(6, 6), TorchConv1D(7, 6), torch.nn.Linear(7, 5)

        def forward(self, x):
            return self.fc2(torch.tanh(self.c_fc(torch.tanh(self.q_proj(x)))))

    def make():
        net = Twin()
        net.load_state_dict({name: torch.tensor(np.array(x)) for name, x in tree.flatten(THETA0).items()})
        return net
    return make


def torch_output(model):
    import torch
    with torch.no_grad():
        return model(torch.tensor(X)).numpy()


CASES = {"lora": LORA, "rslora": adapters.Lora(rank=3, alpha=2, scaling="root", targets="q_proj"),
         "conv1d": adapters.Lora(rank=2, alpha=4, targets="c_fc"),
         "ia3": adapters.Rescale(targets="q_proj|fc2", feedforward="fc2")}


@pytest.mark.filterwarnings("ignore")  # of peft and torch
@pytest.mark.parametrize("name", CASES)
def test_peft_loads_what_is_saved_here(tmp_path, twin, name):
    from peft import PeftModel
    method = CASES[name]
    phi = moved(adapters.start(method, SITES))
    adapters.save(tmp_path / "a", method, phi, SITES)
    model = PeftModel.from_pretrained(twin(), tmp_path / "a").eval()
    np.testing.assert_allclose(torch_output(model), adapted(method, phi), atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_peft_computes_what_is_linearised_by_module(tmp_path, twin):
    from peft import PeftModel
    phi0 = adapters.start(LORA, SITES)
    phi = moved(phi0)
    adapters.save(tmp_path / "a", LORA, adapters.as_lora(phi0, phi), SITES, scope="module")
    model = PeftModel.from_pretrained(twin(), tmp_path / "a").eval()
    made = jax.jit(adapters.linearised(apply, LORA))(THETA0, phi0, phi, X)
    np.testing.assert_allclose(torch_output(model), made, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["lora", "rslora", "ia3"])
def test_what_peft_saves_is_read(tmp_path, twin, kind):
    import torch
    from peft import IA3Config, LoraConfig, get_peft_model
    config = (IA3Config(target_modules=["q_proj", "fc2"], feedforward_modules=["fc2"]) if kind == "ia3" else
              LoraConfig(r=2, lora_alpha=5, target_modules=["q_proj", "fc2"], use_rslora=kind == "rslora"))
    model = get_peft_model(twin(), config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += 0.3 * torch.randn_like(p)
    model.save_pretrained(tmp_path / "a")
    found = adapters.load(tmp_path / "a")
    made = adapted(found.method, found.phi)
    np.testing.assert_allclose(made, torch_output(model), atol=1e-5)
