"""GPT-2 computes what transformers' GPT2ForSequenceClassification and GPT2LMHeadModel compute, under their names."""
import functools

import flax.linen as nn
import jax
import numpy as np
import pytest

from tvjax import checkpoints, models, tree
from tvjax.models import gpt2
from tvjax.models.layers import Linear

pytestmark = pytest.mark.usefixtures("quick_compilation")
TINY = gpt2.Spec(width=8, hidden=12, depth=2, heads=2, vocabulary=30, positions=9, labels=3, pad=29)


def config(**changes):
    import transformers
    return transformers.GPT2Config(**{**dict(
        vocab_size=30, n_embd=8, n_inner=12, n_layer=2, n_head=2, n_positions=9, num_labels=3, pad_token_id=29,
        eos_token_id=29, bos_token_id=29, scale_attn_by_inverse_layer_idx=True), **changes})


@functools.cache
def torch_model(kind="GPT2ForSequenceClassification"):
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
    """Texts padded at the right, not at all, at the left, and with the padding token inside."""
    ids = np.random.default_rng(1).integers(0, 29, (4, 7)).astype(np.int32)
    ids[0, 4:], ids[2, :3], ids[3, 2] = 29, 29, 29
    mask = (ids != 29).astype(np.int32)
    mask[3, 2] = 1
    return ids, mask


def test_classifier_and_gradients_agree_with_transformers():
    torch, theirs = torch_model()
    ids, mask = inputs()
    model, params = gpt2.GPT2(config()), tree.unflatten(weights(theirs))
    out = theirs(input_ids=torch.tensor(ids.astype(int)), attention_mask=torch.tensor(mask)).logits
    cotangent = np.random.default_rng(2).normal(size=out.shape).astype(np.float32)
    theirs.zero_grad()
    (out * torch.tensor(cotangent)).sum().backward()
    def both(p):
        value, pull = jax.vjp(lambda q: gpt2.logits(model)(q, ids, mask), p)
        return value, pull(cotangent)[0]

    value, grads = jax.jit(both)(params)
    out = out.detach().numpy()
    np.testing.assert_allclose(value, out, rtol=1e-5, atol=1e-5 * np.abs(out).max())
    grads = tree.flatten(grads)
    assert set(grads) == set(weights(theirs))
    for name, gradient in grads.items():
        other = theirs.get_parameter(name).grad.numpy()
        np.testing.assert_allclose(gradient, other, rtol=1e-5, atol=1e-5 * np.abs(other).max() + 1e-7, err_msg=name)


def test_next_tokens_agree_with_transformers_over_one_table():
    torch, theirs = torch_model("GPT2LMHeadModel")
    ids, mask = inputs()
    with torch.no_grad():
        out = theirs(input_ids=torch.tensor(ids[:2].astype(int)), attention_mask=torch.tensor(mask[:2])).logits.numpy()
    mine = jax.jit(gpt2.next_token_logits(gpt2.GPT2(config())))(tree.unflatten(weights(theirs)), ids[:2], mask[:2])
    np.testing.assert_allclose(mine, out, rtol=1e-5, atol=1e-5 * np.abs(out).max())
    assert "lm_head.weight" in theirs.state_dict() and "lm_head.weight" not in weights(theirs)


def test_names_and_start_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    import transformers
    cfg = config(n_embd=32, n_inner=48)
    torch.manual_seed(0)
    theirs = weights(transformers.GPT2ForSequenceClassification(cfg))
    mine = tree.flatten(jax.jit(functools.partial(gpt2.init, gpt2.GPT2(cfg)))(jax.random.key(0)))
    assert {n: x.shape for n, x in mine.items()} == {n: x.shape for n, x in theirs.items()}
    for name, leaf in theirs.items():
        if leaf.size > 1000:  # the spread of that many draws is known to a few percent
            assert abs(float(mine[name].std()) / leaf.std() - 1) < 0.15, name


def test_interceptors_see_every_linear_map_by_its_path():
    model, seen = gpt2.GPT2(TINY), []
    params = jax.eval_shape(functools.partial(gpt2.init, model), jax.random.key(0))

    def note(call, args, kwargs, context):
        if isinstance(context.module, Linear):
            seen.append(".".join(context.module.path))
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        jax.eval_shape(gpt2.logits(model), params, *inputs())
    linear = {name.removesuffix(".weight") for name, x in tree.flatten(params).items() if x.ndim == 2 and "wte" not in
              name and "wpe" not in name}
    assert set(seen) == linear and len(seen) == len(linear) == 9


def test_a_classifiers_folder_goes_both_ways(tmp_path):
    _, theirs = torch_model()
    import transformers
    theirs.save_pretrained(tmp_path / "old")
    found = models.from_pretrained(tmp_path / "old")
    assert found.model.config.pad == 29 and set(gpt2.backbone(found.params)) == {"transformer"}
    changed = jax.tree.map(lambda x: np.asarray(x) + 1, found.params)
    gpt2.save_pretrained(found, changed, tmp_path / "new")
    jax.tree.map(np.testing.assert_array_equal, gpt2.from_pretrained(tmp_path / "new").params, changed)
    again = transformers.GPT2ForSequenceClassification.from_pretrained(tmp_path / "new")
    for name, leaf in tree.flatten(changed).items():
        np.testing.assert_array_equal(again.get_parameter(name).detach().numpy(), leaf)


def test_the_published_base_has_the_names_of_its_classifiers(tmp_path):
    """The hub's gpt2 has no prefix, and causal masks among its weights; its fine-tuned models have the prefix."""
    flat = weights(torch_model()[1])
    bare = {name.removeprefix("transformer."): x for name, x in flat.items() if name != "score.weight"}
    bare |= {"h.0.attn.bias": np.ones((1, 1, 9, 9), np.float32), "h.1.attn.masked_bias": np.float32(-1e4),
             "lm_head.weight": flat["transformer.wte.weight"]}
    checkpoints.save(tree.unflatten(bare), tmp_path)
    config().save_pretrained(tmp_path)
    found = gpt2.from_pretrained(tmp_path)
    assert set(tree.flatten(found.params)) == set(flat) - {"score.weight"} and not found.buffers
    untied = {**bare, "lm_head.weight": bare["wte.weight"] + 1}
    checkpoints.save(tree.unflatten(untied), tmp_path)
    assert not gpt2.from_pretrained(tmp_path).model.config.tied


def test_slips_are_told_in_a_sentence():
    model, params = gpt2.GPT2(TINY), {}
    with pytest.raises(ValueError, match=r"shape \(2, 10\); this model takes \(texts, tokens\) of at most 9 tokens"):
        gpt2.features(model)(params, np.ones((2, 10), np.int32))
    with pytest.raises(ValueError, match="params hold no score.weight: add the task's head"):
        gpt2.logits(model)(params, np.ones((2, 5), np.int32))
    unpadded = gpt2.GPT2(config(pad_token_id=None))
    shapes = jax.eval_shape(functools.partial(gpt2.init, unpadded), jax.random.key(0))
    with pytest.raises(ValueError, match="config.pad_token_id is not set"):
        jax.eval_shape(gpt2.logits(unpadded), shapes, np.ones((2, 5), np.int32))
    with pytest.raises(ValueError, match="activation_function is 'mish'; there are gelu"):
        gpt2.GPT2(config(activation_function="mish"))
