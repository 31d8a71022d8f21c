"""T5 computes what transformers' T5ForConditionalGeneration computes, under the same names, tied tensors once."""
import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import checkpoints, models, tree
from tvjax.models import t5
from tvjax.models.layers import Linear
from tvjax.models.t5_network import bucket_table

pytestmark = pytest.mark.usefixtures("quick_compilation")

TINY = t5.Spec(vocabulary=40, width=8, head_width=4, heads=2, hidden=12, depth=1, decoder_depth=1, buckets=8,
               distance=12)
KINDS = {"v1.0": {}, "v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}}


def config(**changes):
    import transformers
    return transformers.T5Config(**{**dict(
        vocab_size=40, d_model=8, d_kv=4, num_heads=2, d_ff=12, num_layers=2, num_decoder_layers=2,
        relative_attention_num_buckets=8, relative_attention_max_distance=12, decoder_start_token_id=0), **changes})


@functools.cache
def torch_model(kind):
    torch = pytest.importorskip("torch")
    import transformers
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config(**KINDS[kind])).eval()
    if kind == "v1.1":  # transformers 5 ties the head of a new model whatever the configuration says
        model.lm_head.weight = torch.nn.Parameter(0.3 * torch.randn(40, 8))
    for p in model.parameters():  # norms start at 1, where mistakes hide
        p.data.add_(0.1 * torch.randn_like(p))
    return torch, model


def weights(model):
    """One entry for each tensor, under its first name."""
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def ours(kind):
    return t5.T5(config(**KINDS[kind])), tree.unflatten(weights(torch_model(kind)[1]))


def shapes(model):
    return jax.eval_shape(functools.partial(t5.init, model), jax.random.key(0))


def drawn(model):
    """Parameters from numpy's generator, for what doesn't depend on how they are drawn."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(size=x.shape, scale=0.3).astype(x.dtype), shapes(model))


def inputs(tokens=17):
    """Texts longer than the last bucket boundary, one padded; targets of different lengths."""
    rng = np.random.default_rng(1)
    ids = rng.integers(2, 40, (3, tokens)).astype(np.int32)
    ids[1, tokens // 2:] = 0
    targets = rng.integers(2, 40, (3, tokens - 2)).astype(np.int32)
    targets[0, tokens // 3:], targets[2, 1:] = 0, 0
    return ids, (ids != 0).astype(np.int32), targets


@functools.cache
def reference(kind):
    """(logits, mean loss, {name: gradient}) of transformers."""
    torch, theirs = torch_model(kind)
    ids, mask, targets = (torch.tensor(x.astype(int)) for x in inputs())
    theirs.zero_grad()
    out = theirs(input_ids=ids, attention_mask=mask, labels=targets.masked_fill(targets == 0, -100))
    out.loss.backward()
    return out.logits.detach().numpy(), out.loss.item(), {n: p.grad.numpy() for n, p in theirs.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_gradients_agree_with_transformers(kind):
    scores, mean, gradients = reference(kind)
    model, params = ours(kind)
    ids, mask, targets = inputs()
    start = np.concatenate([np.zeros((3, 1), np.int32), targets[:, :-1]], 1)
    both = jax.jit(lambda p: (t5.logits(model)(p, ids, mask, start),
                              jax.value_and_grad(t5.loss(model))(p, ids, mask, targets)))
    mine, (value, grads) = both(params)
    np.testing.assert_allclose(mine, scores, rtol=1e-5, atol=1e-5 * np.abs(scores).max())
    np.testing.assert_allclose(value, mean, rtol=1e-6)
    grads = tree.flatten(grads)
    assert set(grads) == set(gradients)  # the tied table once, with the gradient of all its uses
    for name, other in gradients.items():
        np.testing.assert_allclose(grads[name], other, rtol=1e-5, atol=1e-5 * np.abs(other).max(), err_msg=name)


@functools.cache
def greedy(eos=None):
    """(ours with the cache, transformers') at most nine tokens."""
    torch, theirs = torch_model("v1.1")
    model, params = ours("v1.1")
    ids, mask, _ = inputs()
    model = model if eos is None else t5.T5(t5.Spec(**{**vars(model.config), "eos": (eos,)}))
    mine = np.asarray(jax.jit(t5.generate(model, max_new_tokens=9))(params, ids, mask))
    with torch.no_grad():
        other = theirs.generate(torch.tensor(ids.astype(int)), attention_mask=torch.tensor(mask), max_new_tokens=9,
                                do_sample=False, num_beams=1, eos_token_id=1 if eos is None else eos).numpy()[:, 1:]
    return mine, np.pad(other, ((0, 0), (0, 9 - other.shape[1])))


def test_greedy_generation_agrees_with_transformers():
    mine, other = greedy()
    np.testing.assert_array_equal(mine, other)
    assert len(set(mine.ravel().tolist())) > 3


def test_a_text_ends_at_its_end_and_padding_follows():
    free, _ = greedy()
    row, place = next((i, j) for j in range(1, 8) for i in range(3) if free[i, j] > 1 and free[i, j] not in free[i, :j])
    end = int(free[row, place])
    mine, other = greedy(end)
    np.testing.assert_array_equal(mine, other)
    np.testing.assert_array_equal(mine[row, :place + 1], free[row, :place + 1])
    assert not mine[row, place + 1:].any()


def test_choices_are_scored_token_by_token():
    model, params = ours("v1.1")
    torch, theirs = torch_model("v1.1")
    ids, mask, _ = inputs()
    choices = np.array([[[5, 1, 0, 0], [6, 7, 8, 1]], [[9, 1, 0, 0], [9, 9, 1, 0]], [[2, 3, 1, -100], [4, 1, 0, 0]]])
    score = t5.choice_log_probs(model)
    found, shared = jax.jit(lambda p: (score(p, ids, mask, choices), score(p, ids, mask, choices[0])))(params)
    labels = torch.tensor(np.where(choices == 0, -100, choices).reshape(6, 4))
    given = {"input_ids": torch.tensor(ids.repeat(2, 0).astype(int)), "attention_mask": torch.tensor(mask.repeat(2, 0))}
    with torch.no_grad():
        scores = theirs(**given, labels=labels).logits.log_softmax(-1).numpy()
    for i in range(6):
        expected = sum(scores[i, t, token] for t, token in enumerate(labels[i].tolist()) if token > 0)
        np.testing.assert_allclose(found[i // 2, i % 2], expected, rtol=1e-5)
    np.testing.assert_allclose(shared[0], found[0], rtol=1e-5)


@pytest.mark.parametrize("both", [True, False])
def test_buckets_are_those_of_transformers(both):
    torch = pytest.importorskip("torch")
    from transformers.models.t5.modeling_t5 import T5Attention
    away = torch.arange(-300, 301)
    theirs = T5Attention._relative_position_bucket(away, bidirectional=both, num_buckets=32, max_distance=128).numpy()
    table = bucket_table(16 if both else 32, 128)
    mine = table[np.minimum(np.abs(away.numpy()) if both else np.maximum(-away.numpy(), 0), 128)]
    np.testing.assert_array_equal(mine + (16 * (away.numpy() > 0) if both else 0), theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_tied_weights_are_counted_once(kind):
    theirs, mine = weights(torch_model(kind)[1]), tree.flatten(shapes(ours(kind)[0]))
    assert {name: x.shape for name, x in mine.items()} == {name: x.shape for name, x in theirs.items()}
    whole = torch_model(kind)[1].state_dict()
    entries = sum(x.numel() for x in whole.values())
    copies = 2 if kind == "v1.1" else 3  # of the table, in the state that torch writes: two stacks, the output layer
    assert sum(x.size for x in mine.values()) == entries - copies * 40 * 8


def test_published_sizes():
    """t5-small has 60,506,624 parameters with its table once; Flan-T5-small 76,961,152 with its own output layer."""
    import transformers
    small = transformers.T5Config(vocab_size=32128)
    flan = transformers.T5Config(vocab_size=32128, d_ff=1024, num_layers=8, num_heads=6, tie_word_embeddings=False,
                                 feed_forward_proj="gated-gelu")
    for cfg, count in ((small, 60_506_624), (flan, 76_961_152)):
        assert sum(x.size for x in jax.tree.leaves(shapes(t5.T5(cfg)))) == count


def test_starts_as_transformers_starts():
    torch = pytest.importorskip("torch")
    import transformers
    cfg = config(d_model=64, d_ff=48, d_kv=16, num_layers=1, num_decoder_layers=1)
    torch.manual_seed(0)
    theirs = weights(transformers.T5ForConditionalGeneration(cfg))
    mine = tree.flatten(jax.jit(functools.partial(t5.init, t5.T5(cfg)))(jax.random.key(0)))
    for name, leaf in theirs.items():
        if leaf.size > 500:  # the spread of that many draws is known to a few percent
            assert abs(float(mine[name].std()) / leaf.std() - 1) < 0.15, name


def test_transformations_and_low_precision():
    model, (ids, mask, targets) = t5.T5(TINY), inputs(5)
    params = drawn(model)
    one = lambda p, i, m, t: t5.loss(model)(p, i[None], m[None], t[None])
    whole = lambda p: jax.jvp(lambda q: t5.loss(model)(q, ids[1:2], mask[1:2], targets[1:2]), (p,), (p,))
    both = jax.jit(lambda p: (jax.vmap(jax.grad(one), (None, 0, 0, 0))(p, ids, mask, targets), whole(p)))
    each, (value, slope) = both(params)
    dot = sum(float((x[1] * y).sum()) for x, y in zip(*map(jax.tree.leaves, (each, params)), strict=True))
    np.testing.assert_allclose(slope, dot, rtol=1e-4)  # per-example gradient · direction = forward derivative
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    out = jax.eval_shape(t5.logits(model), narrow, ids, mask, targets)
    assert out.dtype == jnp.bfloat16
    tokens = jax.eval_shape(t5.generate(model, max_new_tokens=4), narrow, ids, mask)
    assert tokens.shape == (3, 4) and np.isfinite(float(value))


def test_interceptors_see_every_linear_map_by_its_path():
    model, seen = t5.T5(TINY), []
    params = shapes(model)

    def note(call, args, kwargs, context):
        if isinstance(context.module, Linear) and context.method_name == "__call__":
            seen.append(".".join(context.module.path))
        return call(*args, **kwargs)

    ids, mask, targets = inputs(5)
    with nn.intercept_methods(note):
        jax.eval_shape(t5.logits(model), params, ids, mask, targets)
    linear = {name.removesuffix(".weight") for name, x in tree.flatten(params).items()
              if x.ndim == 2 and "shared" not in name and "relative" not in name}
    assert set(seen) == linear and len(seen) == len(linear)


def folder(path, kind):
    """A T5 as transformers publishes it, with a tokenizer made here."""
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import Unigram
    made = path / "tiny-t5"
    torch_model(kind)[1].save_pretrained(made)
    words = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((c, -3.0) for c in "abcdefghij")]
    transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(Unigram(words, 2)), eos_token="</s>",
                                         unk_token="<unk>", pad_token="<pad>").save_pretrained(made)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_folders_go_both_ways(tmp_path, kind):
    pytest.importorskip("torch")
    import transformers
    found = t5.from_pretrained(folder(tmp_path, kind))
    flat = tree.flatten(found.params)
    assert found.model.config.tied == ("lm_head.weight" not in flat) == (kind == "v1.0")
    for name, leaf in weights(torch_model(kind)[1]).items():
        np.testing.assert_array_equal(flat[name], leaf)
    changed = jax.tree.map(lambda x: np.asarray(x) + 1, found.params)
    t5.save_pretrained(found, changed, tmp_path / "new")
    again = models.from_pretrained(tmp_path / "new")
    jax.tree.map(np.testing.assert_array_equal, again.params, changed)
    assert again.model == found.model and again.config.scale_decoder_outputs == (kind == "v1.0")
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "new")
    assert theirs.config.scale_decoder_outputs == (kind == "v1.0")
    for name, leaf in tree.flatten(changed).items():
        np.testing.assert_array_equal(theirs.get_parameter(name).detach().numpy(), leaf)
    assert again.tokenizer("a cab", return_tensors="np")["input_ids"].shape[0] == 1


def test_shards_and_copies_of_the_table(tmp_path):
    model = t5.T5(TINY)
    params = drawn(model)
    table = params["shared"]["weight"]
    stored = tree.unflatten({**tree.flatten(params), "lm_head.weight": table, "encoder.embed_tokens.weight": table})
    config(num_layers=1, num_decoder_layers=1).save_pretrained(tmp_path)
    checkpoints.save(stored, tmp_path, max_shard_size=1500)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    jax.tree.map(np.testing.assert_array_equal, t5.from_pretrained(tmp_path).params, params)
    checkpoints.save(tree.unflatten({**tree.flatten(params), "decoder.embed_tokens.weight": table + 1}), tmp_path)
    with pytest.raises(ValueError, match="decoder.embed_tokens.weight differs from shared.weight"):
        t5.from_pretrained(tmp_path)


def test_slips_are_told_in_a_sentence(tmp_path):
    model, (ids, mask, targets) = t5.T5(TINY), inputs()
    params = {}
    with pytest.raises(ValueError, match=r"attention_mask \(3, 4\); both must be \(batch, tokens\)"):
        t5.logits(model)(params, ids, mask[:, :4], targets)
    with pytest.raises(ValueError, match=r"targets have shape \(2, 15\); for 3 inputs they must be \(3, tokens\)"):
        t5.token_log_probs(model)(params, ids, mask, targets[:2])
    with pytest.raises(ValueError, match=r"choices have shape \(2, 4, 5\); for 3 inputs"):
        t5.choice_log_probs(model)(params, ids, mask, np.zeros((2, 4, 5), int))
    with pytest.raises(ValueError, match="feed_forward_proj is 'mish'; its activation must be one of gelu"):
        t5.T5(config(feed_forward_proj="mish"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(ValueError, match="says model_type 'clip'; this reads t5, tvjax.models.clip reads clip"):
        t5.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt3"}))
    with pytest.raises(ValueError, match="says model_type 'gpt3'; did you mean 'gpt2'"):
        models.from_pretrained(tmp_path)
    config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no model.safetensors"):
        t5.from_pretrained(tmp_path)
