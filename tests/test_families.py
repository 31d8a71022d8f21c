"""Calibration and AdaMerging on every family of networks: BERT, GPT-2, T5, against plain formulas."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import calibration, evaluation, learning, tree, vectors
from tvjax.learning import adamerging
from tvjax.models import bert, bert_network, gpt2, t5

pytestmark = pytest.mark.usefixtures("quick_compilation")
RNG = np.random.default_rng(0)
COUNT, CLASSES, WIDTH = 6, 3, 8


def texts():
    ids = RNG.integers(2, 11, (COUNT, 4)).astype(np.int32)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def head():
    return jnp.asarray(RNG.normal(size=(WIDTH, CLASSES)), jnp.float32)


def of_bert():
    model = bert_network.BERT(bert_network.Spec(WIDTH, 12, 1, 2, 11, positions=6))
    features = bert.sentence_features(model)
    predict = evaluation.classify(lambda params, x: features(params, x["input_ids"], x["attention_mask"]))
    return bert.init(model, jax.random.key(0)), predict


def of_gpt2():
    model = gpt2.GPT2(gpt2.Spec(WIDTH, 12, 1, 2, 11, positions=6, labels=CLASSES, pad=0))
    features = gpt2.features(model)
    predict = evaluation.classify(lambda params, x: features(params, x["input_ids"], x["attention_mask"]))
    return gpt2.backbone(gpt2.init(model, jax.random.key(0))), predict


def of_t5():
    """Answer choices in place of a head: their log-probabilities are the logits."""
    model = t5.T5(t5.Spec(vocabulary=11, width=WIDTH, head_width=4, hidden=12, depth=1, decoder_depth=1, heads=2))
    choices = jnp.array([[3, 1], [4, 1], [5, 1]])
    log_p = t5.choice_log_probs(model)
    return t5.init(model, jax.random.key(0)), lambda params, head, x: log_p(params, x["input_ids"], None, choices)


FAMILIES = {"bert": of_bert, "gpt2": of_gpt2, "t5": of_t5}


@pytest.fixture(params=FAMILIES, scope="module")
def family(request):
    """(θ0 of random weights, predict)"""
    theta0, predict = FAMILIES[request.param]()
    draw = lambda x: np.asarray(x) + RNG.normal(0, 0.3, x.shape).astype(np.asarray(x).dtype)
    return jax.tree.map(draw, jax.device_get(theta0)), predict


def test_calibration_takes_its_logits(family):
    """The score of one example is the square of its own gradient; a mask holds what the sparsity leaves."""
    theta0, predict = family
    scored, frozen = tree.partition(theta0, calibration.scored(theta0))
    logits, x, one = calibration.of_classifier(predict), texts(), head()
    first = jax.tree.map(lambda part: part[:1], x)
    shared = (frozen, one, np.int32(CLASSES))
    found = calibration.sensitivity(logits, scored, first, *shared, score="fisher", seed=1)
    label = int(calibration.draw_classes(logits, scored, first, *shared, seed=1)[0, 0])
    log_p = lambda part: jax.nn.log_softmax(predict(tree.union(part, frozen), one, first)[0])[label]
    slope = tree.flatten(jax.jit(jax.grad(log_p))(scored))
    for name, value in tree.flatten(found).items():
        np.testing.assert_allclose(value, np.square(slope[name]), rtol=1e-3, atol=1e-7)
    made = calibration.calibrate(logits, scored, x, *shared, sparsity=0.9, rounds=1, batches_per_round=1, batch=3)
    assert calibration.count(made.mask) >= int(0.1 * tree.size(scored))


def test_adamerging_lowers_its_entropy(family):
    """The first loss is the mean entropy at 0.3·Σ τ; coefficients stay within [0, 1] and move."""
    theta0, predict = family
    taus = [jax.tree.map(lambda x: RNG.normal(0, 0.3, x.shape).astype(x.dtype), theta0) for _ in range(2)]
    tasks = {task: (head(), texts()) for task in "ab"}
    held = learning.pool(taus, theta0)
    made = adamerging.adapt(predict, theta0, held, tasks, steps=3, lr=0.05, batch=COUNT, batches=1)
    theta = vectors.add(theta0, jax.tree.map(lambda a, b: np.float32(0.3) * (a + b), *taus))
    plain = jax.jit(lambda theta, one, x: adamerging.entropy(predict(theta, one, x)).mean())
    np.testing.assert_allclose(made.losses[0], sum(plain(theta, *task) for task in tasks.values()), rtol=1e-4)
    final = list(made.coefficients.values())
    assert all(((c >= 0) & (c <= 1)).all() for c in final) and any(np.abs(c - 0.3).max() > 1e-3 for c in final)
