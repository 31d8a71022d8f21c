"""RoBERTa computes what transformers' classifier and masked language model compute, under their names."""
import functools

import jax
import numpy as np
import pytest

from tvjax import checkpoints, models, tree
from tvjax.models import roberta

pytestmark = pytest.mark.usefixtures("quick_compilation")


def config(**changes):
    import transformers
    return transformers.RobertaConfig(**{**dict(
        vocab_size=30, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=11, type_vocab_size=1, num_labels=3, pad_token_id=1), **changes})


@functools.cache
def torch_model(kind="RobertaForSequenceClassification"):
    torch = pytest.importorskip("torch")
    import transformers
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config()).eval()
    for p in model.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    return torch, model


def weights(model):
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def inputs():
    """Texts padded at the right, not at all and at the left, where positions begin later."""
    ids = np.random.default_rng(1).integers(2, 30, (3, 9)).astype(np.int32)
    ids[0, 4:], ids[2, :3] = 1, 1
    return ids, (ids != 1).astype(np.int32)


def test_classifier_and_gradients_agree_with_transformers():
    torch, theirs = torch_model()
    ids, mask = inputs()
    model, params = roberta.RoBERTa(config()), tree.unflatten(weights(theirs))
    out = theirs(input_ids=torch.tensor(ids.astype(int)), attention_mask=torch.tensor(mask)).logits
    cotangent = np.random.default_rng(2).normal(size=out.shape).astype(np.float32)
    theirs.zero_grad()
    (out * torch.tensor(cotangent)).sum().backward()
    def both(p):
        value, pull = jax.vjp(lambda q: roberta.logits(model)(q, ids, mask), p)
        return value, pull(cotangent)[0]

    value, grads = jax.jit(both)(params)
    out = out.detach().numpy()
    np.testing.assert_allclose(value, out, rtol=1e-5, atol=1e-5 * np.abs(out).max())
    for name, gradient in tree.flatten(grads).items():
        other = theirs.get_parameter(name).grad.numpy()
        if name.endswith("position_embeddings.weight"):  # torch gives the padding's position no gradient
            gradient = np.where(np.arange(11)[:, None] == 1, 0, gradient)
        if name.endswith("word_embeddings.weight"):  # nor the padding's word
            gradient = np.where(np.arange(30)[:, None] == 1, 0, gradient)
        np.testing.assert_allclose(gradient, other, rtol=1e-5, atol=1e-5 * np.abs(other).max() + 1e-7, err_msg=name)


def test_masked_tokens_agree_with_transformers():
    torch, theirs = torch_model("RobertaForMaskedLM")
    ids, mask = inputs()
    with torch.no_grad():
        out = theirs(input_ids=torch.tensor(ids.astype(int)), attention_mask=torch.tensor(mask)).logits.numpy()
    params = tree.unflatten(weights(theirs))
    mine = jax.jit(roberta.masked_token_logits(roberta.RoBERTa(config())))(params, ids, mask)
    np.testing.assert_allclose(mine, out, rtol=1e-5, atol=1e-5 * np.abs(out).max())


@pytest.mark.parametrize("kind", ["RobertaForSequenceClassification", "RobertaForMaskedLM", "RobertaModel"])
def test_folders_go_both_ways(tmp_path, kind):
    """Of a classifier, of the pre-trained model, and of the bare encoder with its pooler and without the prefix."""
    _, theirs = torch_model(kind)
    import transformers
    theirs.save_pretrained(tmp_path / "old")
    found = models.from_pretrained(tmp_path / "old")
    flat = {name if kind != "RobertaModel" else f"roberta.{name}": x for name, x in weights(theirs).items()}
    assert set(tree.flatten(found.params)) == set(flat) and set(roberta.backbone(found.params)) == {"roberta"}
    changed = jax.tree.map(lambda x: np.asarray(x) + 1, found.params)
    roberta.save_pretrained(found, changed, tmp_path / "new")
    jax.tree.map(np.testing.assert_array_equal, roberta.from_pretrained(tmp_path / "new").params, changed)
    again = getattr(transformers, kind).from_pretrained(tmp_path / "new")
    for name, leaf in tree.flatten(changed).items():
        mine = name.removeprefix("roberta.") if kind == "RobertaModel" else name
        np.testing.assert_array_equal(again.get_parameter(mine).detach().numpy(), leaf)


def test_slips_are_told_in_a_sentence(tmp_path):
    model = roberta.RoBERTa(config())
    with pytest.raises(ValueError, match=r"at most 9 tokens: cut the texts"):
        roberta.features(model)({}, np.ones((2, 10), np.int32))
    with pytest.raises(ValueError, match="params hold no classifier: add the task's head"):
        roberta.logits(model)({}, np.ones((2, 5), np.int32))
    flat = weights(torch_model("RobertaForMaskedLM")[1])
    flat["lm_head.decoder.weight"] = flat["roberta.embeddings.word_embeddings.weight"] + 1
    checkpoints.save(tree.unflatten(flat), tmp_path)
    config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lm_head.decoder.weight differs from roberta.embeddings.word_embeddings"):
        roberta.from_pretrained(tmp_path)
