"""Where papers and their code differ (D1 … D12): both forms of every decision, each against its own formula or numbers.

And determinism: whatever is drawn follows from the seed alone, in another process and on another device too.
"""
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tvjax import adapters, calibration, compression, learning, merging, training, tree
from tvjax.calibration import exemplars, rounds
from tvjax.experiment import merges, planning, study, talos_plan, talos_tuning
from tvjax.experiment.loading import Problem
from tvjax.learning import ufm
from tvjax.models.layers import Linear

pytestmark = pytest.mark.usefixtures("quick_compilation")
PAPER, OFFICIAL = (calibration.preset(name) for name in ("paper", "official"))
EIGHTHS = jnp.array([[4.0, -2, 1, 0, 3, -5], [3, 3, -1, 0, -2, 2], [-1, 1, 2, 0, 3, 1]]) / 8
TAUS = [{"w": row} for row in EIGHTHS]
X = np.array([[1.0, 2.0, -1.0], [0.5, -1.0, 2.0]], np.float32)
W = np.array([0.3, -0.2, 0.5], np.float32)


def logits(params, x):
    """(classes,): each class has a weight of its own."""
    return params["w"] * x


def d1_score(preset):
    """The Fisher diagonal of sampled classes, against the square of a sampled logit's gradient."""
    found = calibration.sensitivity(logits, {"w": W}, X, score=preset["score"], seed=3)["w"]
    drawn = np.eye(3)[calibration.draw_classes(logits, {"w": W}, X, seed=3)[:, 0]]
    p = np.asarray(jax.nn.softmax(W[None] * X))
    each = (drawn - p) * X if preset is PAPER else drawn * X
    return found, (each**2).mean(0)


def d2_excluded(preset):
    """Excluded weights stay as they are, or shrink to a tenth."""
    found = rounds.softened({"w": jnp.ones(2)}, {"w": jnp.array([True, False])}, preset["soft"])["w"]
    return found, [1, 1 if preset is PAPER else 0.1]


def d3_embeddings(preset):
    """Tensors that are not scored stay frozen, or are trained whole."""
    theta0 = {"fc": {"weight": W}, "position_embedding": {"weight": np.ones(3, np.float32)}}
    moved = lambda params, x: params["fc"]["weight"][None] * x + params["position_embedding"]["weight"][None]
    predict = lambda params, head, x: moved(params, x) @ head
    about = Problem(None, theta0, predict, {"a": np.eye(3, dtype=np.float32)},
                    {"a": {"val": (X, np.zeros(2, np.int32))}}, "base", {})
    name = "paper" if preset is PAPER else "official"
    tuning = talos_plan._tuning({"name": "talos", "preset": name, "sparsity": 0.5, "rounds": 1}, (0,))
    mask = talos_tuning._talos(study.Bench(about, None, "", 0, print), tuning, "a", 1 << 20, False)
    return sorted(tree.flatten(mask)), ["fc.weight"] if preset is PAPER else ["fc.weight", "position_embedding.weight"]


def d4_budget(preset):
    """Ten batches a round, or all validation examples."""
    count = len(rounds.round_examples(5000, 0, batches=preset["batches_per_round"], batch=128, seed=0))
    return count, 1280 if preset is PAPER else 5000


def d5_gradient(preset):
    """Moments and clip norm of the chosen entries' gradient, or of all."""
    recipe = training.Recipe(steps=4, lr=0.1, warmup=0, clip=1.0)
    step = training.masked_adamw(recipe, jnp.array([True, False]), moments=preset["moments"], norm=preset["norm"])
    params, gradient = jnp.ones(2), jnp.array([3.0, 4.0])
    with jax.numpy_dtype_promotion("standard"):
        _, state = step.update(gradient, step.init(params), params)
    return optax.tree.get(state, "mu"), [0.1, 0] if preset is PAPER else [0.1 * 3 / 5, 0.1 * 4 / 5]


def d6_comparator(preset):
    """≥ in the paper, > in the code: check 4."""
    merged = {"w": EIGHTHS.sum(0)}
    found = [compression.tall_mask(tau, merged, lam=1.0, comparator=">=" if preset is PAPER else ">") for tau in TAUS]
    return (np.stack([compression.unpack(mask["w"]) for mask in found]),
            [[1, 0, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0], [0, 1, 1, 1, 1, 0]] if preset is PAPER else
            [[1, 0, 0, 0, 1, 1], [0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 1, 0]])


def d7_trim(preset):
    """The three largest of six, or one more: the first row of checks 2 and 3, which has no equal magnitudes."""
    merge = merging.ties(density=0.5, trim="exact" if preset is PAPER else "official")
    return merge(TAUS[:1])["w"], [0.5, 0 if preset is PAPER else -0.25, 0, 0, 0.375, -0.625]


def d8_gradient(preset):
    """|mean ∇ℓ| as the formula has it, or the mean of |∇ℓ|."""
    predict = lambda params, head, x: (params["w"][None] * x) @ head
    some = {"a": exemplars.Exemplars(jnp.eye(3), X, np.array([0, 2]))}
    found = exemplars.exemplar_gradients(predict, {"w": W}, some, reduce="abs_mean" if preset is PAPER else "mean_abs")
    each = (np.asarray(jax.nn.softmax(W[None] * X)) - np.eye(3)[[0, 2]]) * X
    return found["w"][0], np.abs(each.mean(0)) if preset is PAPER else np.abs(each).mean(0)


class Two(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Linear(3, bias=False, name="v_proj")(jnp.tanh(Linear(3, bias=False, name="q_proj")(x)))


def d9_scope(preset):
    """The network linearised in φ, or each module by itself: tanh between two of them tells them apart."""
    draws = np.random.default_rng(0)
    draw = lambda *shape: draws.normal(size=shape).astype(np.float32)
    q, v, a, b, c, d = draw(3, 3), draw(3, 3), draw(1, 3), draw(3, 1), draw(1, 3), draw(3, 1)
    phi = lambda b, d: {name: {"lora_A": {"weight": jnp.asarray(x)}, "lora_B": {"weight": jnp.asarray(y)}}
                        for name, x, y in (("q_proj", a, b), ("v_proj", c, d))}
    run = lambda params, x: Two().apply({"params": params}, x)
    linear = adapters.linearised(run, adapters.Lora(rank=1, alpha=2), "network" if preset is PAPER else "module")
    found = linear({"q_proj": {"weight": q}, "v_proj": {"weight": v}}, phi(0 * b, 0 * d), phi(b, d), X[:1])[0]
    z, dz = q @ X[0], 2 * b @ a @ X[0]
    if preset is PAPER:
        h = np.tanh(z)
        return found, v @ (h + (1 - h**2) * dz) + 2 * d @ c @ h
    h = np.tanh(z + dz)
    return found, v @ h + 2 * d @ c @ h


def d10_pseudo_labels(preset):
    """p^½ and ω from 0.9 to 1, or p as it is and ω at 0.99."""
    options = (ufm.EXPONENT, ufm.RAMP) if preset is PAPER else (1.0, (0.99, 0.99))
    found = [*ufm.sharpen(jnp.array([0.7, 0.2, 0.1]), exponent=options[0]), ufm.threshold(0, 5, options[1]),
             ufm.threshold(4, 5, options[1])]
    return found, [0.522879, 0.279491, 0.197630, 0.9, 1] if preset is PAPER else [0.7, 0.2, 0.1, 0.99, 0.99]


def d11_parts(preset):
    """Random parts of every tensor by itself, or of matrices alone, which tensors of one shape share."""
    held = {name: jnp.ones((1, *shape)) for name, shape in (("a", (4, 4)), ("b", (4, 4)), ("c", (4,)))}
    scheme = learning.Scheme(by="part", parts=8, **({} if preset is PAPER else {"blocks": "weights",
                                                                                "sharing": "shape"}))
    same = np.array_equal(*(learning.coefficients.parts_of(name, (4, 4), scheme) for name in "ab"))
    return (sorted(learning.init(held, scheme)), same), (["a", "b", "c"] if preset is PAPER else ["a", "b"],
                                                         preset is OFFICIAL)


def d12_split(preset):
    """α is chosen on validation data, or (to mimic) on test data."""
    split = "val" if preset is PAPER else "test"
    x = {"val": np.array([[1.0, 0.0]], np.float32), "test": np.array([[0.0, 1.0]], np.float32)}
    splits = {"a": {name: (images, np.zeros(1, np.int32)) for name, images in x.items()}}
    problem = Problem(None, {"w": jnp.array([1.0, 0.0])}, aligned, {"a": None}, splits, "base",
                      {"a": {name: name for name in x}})
    plan = types.SimpleNamespace(select_on=split, batch=1)
    best, _ = merges.choose_scale(problem, plan, planning.Merge("m", "", {}, (0.0, 1.0)), ["a"],
                                  {"w": jnp.array([-2.0, 1.0])}, {split: {"a": 1.0}},
                                  cache=pathlib.Path(tempfile.mkdtemp()) / "cache.jsonl")
    return best, 0.0 if preset is PAPER else 1.0


def aligned(params, head, x):
    """Class 0 where the input goes along w; at w = [1, 0] right on validation data, at [−1, 1] on test data."""
    return jnp.stack([x @ params["w"], 0.5 * jnp.ones(len(x))], -1)


DECISIONS = {one.__name__.partition("_")[0].upper(): one for one in (
    d1_score, d2_excluded, d3_embeddings, d4_budget, d5_gradient, d6_comparator, d7_trim, d8_gradient, d9_scope,
    d10_pseudo_labels, d11_parts, d12_split)}


@pytest.mark.parametrize("name", DECISIONS)
def test_paper_and_official(name):
    """Both forms are there, each is what its source says, and the two differ."""
    (paper, wanted), (official, other) = DECISIONS[name](PAPER), DECISIONS[name](OFFICIAL)
    for found, right in ((paper, wanted), (official, other)):
        if isinstance(right, (np.ndarray, list)) and not isinstance(right[0], str):
            np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(right, np.float32), atol=1e-5)
        else:
            assert found == right
    assert str(wanted) != str(other)


def test_the_decisions_are_all_there():
    assert list(DECISIONS) == [f"D{i}" for i in range(1, 13)]


# ---------------------------------------------------------------- one seed, one result
def drawn():
    """A hash of all that is drawn: masks of a calibration, random masks, dropped entries, exemplars, batches."""
    params = {"fc": {"weight": np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)}}
    examples = np.random.default_rng(1).normal(size=(16, 3)).astype(np.float32)
    scores = lambda params, x: params["fc"]["weight"] @ x
    taus = [jax.tree.map(lambda x, i=i: x + i, params) for i in range(2)]
    found = [
        calibration.calibrate(scores, params, examples, sparsity=0.5, batches_per_round=1, batch=8, seed=5).mask,
        calibration.at_random(params, density=0.5, seed=5),
        jax.tree.map(lambda x: np.asarray(x) != 0, merging.dare(density=0.5, seed=5)(taus, tasks=("a", "b"))),
        exemplars.draw(examples, np.arange(16), count=4, task="a", seed=5),
        next(iter(training.batches((examples, np.arange(16)), batch=4, seed=5))),
        learning.coefficients.parts_of("fc", (4, 3), learning.Scheme(by="part", parts=3, seed=5)),
    ]
    leaves = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(jax.device_get(found))]
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()


def drawn_elsewhere(platform):
    """The same in a process of its own, on a platform."""
    root = pathlib.Path(__file__).parents[1]
    env = {**os.environ, "JAX_PLATFORMS": platform, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    program = "from tests import test_decisions as here; import jax; print(jax.devices()[0].platform, here.drawn())"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, cwd=root)
    return done.stdout.split()[-2:] if done.returncode == 0 else [done.stderr.strip().splitlines()[-1], ""]


def test_a_seed_gives_the_same_draws_in_any_process():
    assert drawn_elsewhere("cpu") == ["cpu", drawn()]


def test_a_seed_gives_the_same_draws_on_an_accelerator():
    found = drawn_elsewhere("cuda")
    if found[0] not in ("gpu", "cuda"):
        pytest.skip(f"there is no accelerator here: {found[0]}")
    assert found[1] == drawn()
