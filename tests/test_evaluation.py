"""Heads, accuracies from exact counts with one compilation, the tangent evaluation, the cache and the meter."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import evaluation, results, vectors
from tvjax.evaluation import top1

RNG = np.random.default_rng(0)


def floats(*shape):
    return RNG.normal(size=shape).astype(np.float32)


THETA0 = {"fc1": {"weight": floats(16, 6), "bias": floats(16)}, "fc2": {"weight": floats(5, 16)}}
TAU = jax.tree.map(lambda x: 0.3 * floats(*x.shape), THETA0)


def encode(params, images):
    """A small network from (batch, 6) to features (batch, 5)."""
    hidden = jnp.tanh(images @ params["fc1"]["weight"].T + params["fc1"]["bias"][None])
    return hidden @ params["fc2"]["weight"].T


predict = evaluation.classify(encode)


def task(classes, examples):
    return floats(5, classes), (floats(examples, 6), RNG.integers(0, classes, examples))


TASKS = {"a": task(3, 10), "b": task(7, 33), "c": task(2, 4)}


def by_hand(params, head, split):
    """Accuracy without padding, batches or compilation."""
    features = np.asarray(encode(params, split[0]))  # their length changes no arg max
    return float(((features @ head).argmax(1) == split[1]).mean())


# --- heads ---

PROMPTS = ("a photo of a {}.", lambda name: f"the {name}")
TOKENS = ["a photo of a cat.", "the cat", "a photo of a dog.", "the dog", "a photo of a cow.", "the cow"]
tokenize = lambda prompts: np.array([TOKENS.index(prompt) for prompt in prompts])


def test_head_is_the_mean_of_unit_features_at_the_logit_scale():
    table = floats(6, 8)
    head = evaluation.zero_shot_head(lambda p, ids: p[ids], table, tokenize, ["cat", "dog", "cow"], PROMPTS,
                                     logit_scale=np.log(100), batch=4)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    expected = 100 * unit(unit(table).reshape(3, 2, 8).mean(1)).T
    np.testing.assert_allclose(head, expected, rtol=1e-5, atol=1e-5)  # entries of size 100
    np.testing.assert_allclose(jnp.linalg.norm(head, axis=0), [100] * 3, rtol=1e-6)


def test_tokens_may_be_named_arrays():
    table = jnp.array(floats(6, 8))
    by_name = lambda prompts: {"input_ids": tokenize(prompts), "attention_mask": np.ones(len(prompts), np.float32)}
    masked = lambda p, input_ids, attention_mask: p[input_ids] * attention_mask[:, None]
    args = ["cat", "dog"], PROMPTS
    one = evaluation.zero_shot_head(masked, table, by_name, *args, logit_scale=0.0)
    other = evaluation.zero_shot_head(lambda p, ids: p[ids], table, tokenize, *args, logit_scale=0.0)
    np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_head_needs_classes_and_templates():
    with pytest.raises(ValueError, match="needs class names and templates; got 0 and 2"):
        evaluation.zero_shot_head(encode, None, tokenize, [], PROMPTS, logit_scale=0.0)


def test_logits_are_scaled_cosines():
    head, (images, _) = TASKS["a"]
    features = np.asarray(encode(THETA0, images))
    expected = features @ head / np.linalg.norm(features, axis=1, keepdims=True)
    np.testing.assert_allclose(predict(THETA0, head, images), expected, atol=1e-6)
    assert evaluation.classify(encode) is predict


# --- accuracy ---

@pytest.mark.parametrize("batch", [1, 4, 10, 64])
@pytest.mark.parametrize("name", TASKS)
def test_padding_changes_no_answer(name, batch):
    head, split = TASKS[name]
    assert evaluation.accuracy(predict, THETA0, head, split, batch=batch) == by_hand(THETA0, head, split)


def test_a_padding_class_never_wins():
    head, images = -np.ones((5, 2), np.float32), np.abs(floats(9, 5))  # all true logits are negative, padded ones 0
    assert (evaluation.predictions(lambda p, h, x: x @ h, None, head, images) == 0).all()


def test_nan_logits_are_wrong_answers():
    images = np.array([[np.nan, 1.0], [1.0, 0.0]], np.float32)
    split = images, np.array([0, 0])
    assert evaluation.accuracy(lambda p, h, x: x @ h, None, np.eye(2, dtype=np.float32), split) == 0.5


def test_a_predict_may_do_without_a_head():
    split = np.eye(4, dtype=np.float32), np.arange(4)
    assert evaluation.accuracy(lambda p, h, x: x @ p, jnp.eye(4), None, split, batch=3) == 1.0


def test_labels_must_fit_the_images():
    with pytest.raises(ValueError, match=r"there are 10 images, but labels of shape \(9,\)"):
        head, (images, labels) = TASKS["a"]
        evaluation.accuracy(predict, THETA0, head, (images, labels[:9]))


def test_one_program_serves_every_scale_model_and_task():
    mine = evaluation.classify(lambda params, images: encode(params, images))
    before = top1._answers._cache_size()
    rows = evaluation.sweep(mine, THETA0, TAU, evaluation.GRID, TASKS, batch=8)
    evaluation.accuracies(mine, TAU, TASKS, batch=8)
    assert top1._answers._cache_size() == before + 1
    for scale, row in zip(evaluation.GRID, rows, strict=True):
        moved = vectors.add(THETA0, TAU, scale=scale)
        assert row == {name: by_hand(moved, head, split) for name, (head, split) in TASKS.items()}


def test_moving_compiles_once_and_keeps_dtypes():
    theta0 = {"w": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(2), "n": jnp.array(4)}
    tau = {"w": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(2)}
    before = evaluation.moved._cache_size()
    for scale in (0.0, 0.5, 1.0):
        moved = evaluation.moved(theta0, tau, scale)
        assert jax.tree.map(lambda x: x.dtype, moved) == jax.tree.map(lambda x: x.dtype, theta0)
    assert evaluation.moved._cache_size() == before + 1
    jax.tree.map(np.testing.assert_array_equal, evaluation.moved(theta0, tau, 0.0), theta0)


def test_normalised_is_the_mean_of_ratios():
    merged, finetuned = {"a": 0.6, "b": 0.9}, {"a": 0.8, "b": 0.95, "unused": 0.1}
    assert evaluation.normalised(merged, finetuned) == pytest.approx(0.848684, abs=1e-6)
    assert evaluation.absolute(merged) == pytest.approx(0.75)


@pytest.mark.parametrize("finetuned, words", [
    ({"a": 0.8}, "no fine-tuned accuracy for b; there are a"), ({}, "for a, b; there are none"),
    ({"a": 0.8, "b": 0.0}, "accuracy of b is not above 0"), ({"a": np.nan, "b": 0.5}, "accuracy of a is not above 0"),
])
def test_normalised_refuses_denominators_that_are_none(finetuned, words):
    with pytest.raises(ValueError, match=words):
        evaluation.normalised({"a": 0.6, "b": 0.9}, finetuned)
    with pytest.raises(ValueError, match="no accuracy to average"):
        evaluation.normalised({}, finetuned)


def test_nonlinear_advantage():
    assert evaluation.nonlinear_advantage(0.8, 0.5, classes=10) == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="at least 2 classes"):
        evaluation.nonlinear_advantage(0.8, 0.5, classes=1)


# --- judged as if it were linear ---

def test_linearised_evaluation_is_the_jvp():
    head, (images, _) = TASKS["b"]
    linear = evaluation.classify_linearised(encode)
    point = evaluation.moved(THETA0, TAU, 0.5, place=evaluation.paired)
    step = 1e-3  # the slope by central differences, in float64
    wide = lambda sign: jax.tree.map(lambda x, t: x.astype(np.float64) + sign * step * t, THETA0, TAU)
    f = lambda p: np.tanh(images @ p["fc1"]["weight"].T + p["fc1"]["bias"]) @ p["fc2"]["weight"].T
    features = f(wide(0)) + 0.5 * (f(wide(1)) - f(wide(-1))) / (2 * step)
    expected = features @ head / np.linalg.norm(features, axis=1, keepdims=True)
    np.testing.assert_allclose(linear(point, head, images), expected, atol=1e-5)


def test_linearised_model_at_theta0_is_the_model():
    head, (images, _) = TASKS["b"]
    point = evaluation.paired(THETA0, {})
    linear = evaluation.classify_linearised(encode)
    np.testing.assert_array_equal(linear(point, head, images), predict(THETA0, head, images))
    frozen = evaluation.paired(THETA0, {"fc2": TAU["fc2"]})[1]
    assert not np.any(frozen["fc1"]["weight"]) and np.array_equal(frozen["fc2"]["weight"], TAU["fc2"]["weight"])


def test_linearised_sweep_runs_in_one_program():
    linear = evaluation.classify_linearised(lambda params, images: encode(params, images))
    before = top1._answers._cache_size()
    rows = evaluation.sweep(linear, THETA0, TAU, [0.0, 0.5], TASKS, batch=8, place=evaluation.paired)
    assert top1._answers._cache_size() == before + 1
    assert rows[0] == evaluation.accuracies(predict, THETA0, TASKS, batch=8)


# --- cache and cost ---

def test_cached_numbers_are_computed_once(tmp_path):
    calls, path = [], tmp_path / "cache.jsonl"
    compute = lambda: calls.append(1) or {"a": 0.5, "b": (1, 2)}
    values = [evaluation.cached(path, compute, THETA0, "zero-shot", TASKS) for _ in range(3)]
    assert len(calls) == 1 and values == [{"a": 0.5, "b": [1, 2]}] * 3
    evaluation.cached(path, compute, TAU, "zero-shot", TASKS)
    assert len(calls) == 2


def test_lines_that_another_process_adds_are_seen(tmp_path):
    path = tmp_path / "cache.jsonl"
    evaluation.cached(path, lambda: 1, "mine")
    results.append_line(path, {"key": evaluation.content_key("theirs"), "value": 2})
    assert evaluation.cached(path, lambda: 3, "theirs") == 2
    with open(path, "a") as file:
        file.write('{"key": "cut')
    assert evaluation.cached(path, lambda: 4, "mine") == 1 and evaluation.cached(path, lambda: 5, "new") == 5
    path.unlink()
    assert evaluation.cached(path, lambda: 6, "mine") == 6


def test_the_key_is_the_content():
    key = evaluation.content_key
    x = floats(3, 4)
    same = [x, x.copy(), np.asfortranarray(x), jnp.array(x)]
    other = [x.T, x.reshape(4, 3), x.astype(np.float64), x + 1, {"w": x}, {"v": x}, (x, x)]
    assert len({key(part) for part in same}) == 1 and len({key(part) for part in [x, *other]}) == 1 + len(other)
    assert key("a", "b") != key("ab") and key((1, 2), 3) != key(1, (2, 3)) and key(1) != key(1.0)


def test_meter_measures_time_and_memory():
    with evaluation.meter() as cost:
        held = np.ones(40_000_000)
        jnp.ones((200, 200)) @ jnp.ones((200, 200))
    assert held.size and cost.seconds > 0 and cost.where in ("device", "process")
    assert cost.peak_bytes > 0 and 0 <= cost.raised_bytes <= cost.peak_bytes


def test_meter_records_a_block_that_fails():
    with pytest.raises(RuntimeError), evaluation.meter() as cost:
        raise RuntimeError
    assert cost.seconds > 0
