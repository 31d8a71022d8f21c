"""Models with other tokens, or with the same ones in another order, merge as if their vocabularies were one."""
import json

import numpy as np
import pytest
import safetensors.numpy
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tvjax import disk

NAMES = ("model.embed_tokens.weight", "lm_head.weight")


def write(folder, words, tables, *, special=(), prefix=""):
    """A model whose row of a word is tables[word]; rows behind the words are padding."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    flat = {prefix + name: np.stack(rows).astype(np.float32) for name, rows in zip(NAMES, tables, strict=True)}
    flat[prefix + "model.norm.weight"] = np.full(3, len(words), np.float32)
    safetensors.numpy.save_file(flat, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", "vocab_size": len(tables[0])}))
    return folder


def rows(seed, count, width=3):
    rng = np.random.default_rng(seed)
    return [list(rng.standard_normal((count, width))), list(rng.standard_normal((count, width)))]


def merged(base, models, out, method="task_arithmetic", said=None, **settings):
    say = (lambda line: None) if said is None else said.append
    made = disk.merge_checkpoints(base, models, out, method, say=say, vocabulary="union", **settings)
    return safetensors.numpy.load_file(made / "model.safetensors"), made


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_permuted_tokens_merge_as_those_in_order(method, tmp_path):
    words, a, b = list("abcdefg"), rows(1, 7), rows(2, 7)
    base = write(tmp_path / "base", words, rows(0, 7))
    order = [6, 2, 0, 1, 5, 4, 3]
    models = [write(tmp_path / "a", words, a), write(tmp_path / "b", words, b)]
    turned = write(tmp_path / "c" / "b", [words[i] for i in order], [[table[i] for i in order] for table in b])
    plain, _ = merged(base, models, tmp_path / "one", method)
    found, _ = merged(base, [models[0], turned], tmp_path / "two", method)
    for name, x in plain.items():
        np.testing.assert_array_equal(found[name], x)


def test_tokens_of_one_model_or_two_or_none(tmp_path):
    zero, one, two = rows(0, 5), rows(1, 4), rows(2, 5)
    base = write(tmp_path / "base", ["u", "x", "y"], zero)  # two rows of padding
    a = write(tmp_path / "a", ["u", "p", "x", "q"], one)
    b = write(tmp_path / "b", ["q", "u", "y"], two, special=["<s>"])
    said = []
    found, out = merged(base, [a, b], tmp_path / "out", said=said, options={"scale": 1.0})
    vocabulary = Tokenizer.from_file(str(out / "tokenizer.json")).get_vocab()
    assert vocabulary == {"u": 0, "x": 1, "y": 2, "p": 3, "q": 4, "<s>": 5}
    for name, (o, p, q) in zip(NAMES, zip(zero, one, two, strict=True), strict=True):
        pq = (p[3] + q[0]) / 2
        expected = {"u": p[0] + q[1] - o[0], "x": p[2], "y": q[2], "p": p[1], "q": pq + (p[3] - pq) + (q[0] - pq),
                    "<s>": q[3]}
        for token, row in expected.items():
            np.testing.assert_allclose(found[name][vocabulary[token]], row, rtol=0, atol=1e-6)
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 6 == len(found[NAMES[0]])
    assert "3 tokens that the base lacks" in said[0]
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokenizer.encode("x q <s>").ids == [1, 4, 5]
    assert any(token.special for token in tokenizer.get_added_tokens_decoder().values())


def test_padding_stays_the_bases(tmp_path):
    zero, one = rows(0, 8), rows(1, 3)
    base, a = write(tmp_path / "base", list("xyz"), zero), write(tmp_path / "a", list("xyw"), one)
    found, out = merged(base, [a], tmp_path / "out", options={"scale": 1.0})
    for name, o, p in zip(NAMES, zero, one, strict=True):
        expected = np.stack([p[0], p[1], o[2], p[2], *o[4:]])
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-6)
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 8


def test_a_prefix_and_a_model_without_a_tokenizer(tmp_path):
    zero, one, two = rows(0, 3), rows(1, 3), rows(2, 3)
    base = write(tmp_path / "base", list("xyz"), zero)
    a, b = write(tmp_path / "a", list("zxy"), one, prefix="module."), write(tmp_path / "b", list("xyz"), two)
    (b / "tokenizer.json").unlink()
    said = []
    found, _ = merged(base, [a, b], tmp_path / "out", "average", said=said)
    np.testing.assert_allclose(found[NAMES[0]][0], (one[0][1] + two[0][0]) / 2, rtol=0, atol=1e-6)
    assert "b has no tokenizer.json: its tokens are taken to be the base's" in said[0]


def test_slips_get_one_sentence(tmp_path):
    base, a = (write(tmp_path / name, list("xyz"), rows(0, 3)) for name in ("base", "a"))
    with pytest.raises(ValueError, match="vocabulary=union makes a model with more tokens"):
        merged(base, [a], tmp_path / "out", output="lora")
    (a / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json of a is no tokenizer"):
        merged(base, [a], tmp_path / "out")
    (base / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="needs tokenizer.json beside the base's weights"):
        merged(base, [a], tmp_path / "out")
    assert not (tmp_path / "out").exists()
