"""Merging by name: exclusions, gradients over depth, filters, tied leaves, and how configurations write them."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import merging, tree
from tvjax.merging import selection, shorthand
from tvjax.merging.numbers import resolve
from tvjax.merging.peers.mergekit import each_model, setting

pytestmark = pytest.mark.usefixtures("quick_compilation")
ABOUT = json.loads(str(np.load(pathlib.Path(__file__).parent / "golden" / "peers.npz")["about"]))
GRADIENTS = ABOUT["gradients"]


def llama(fill=1.0, tasks=1, blocks=4):
    """Stacked task vectors under the names of a small LLaMA, one number for each leaf."""
    parts = ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm"]
    names = [f"model.layers.{i}.{part}.weight" for i in range(blocks) for part in parts]
    names += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    return tree.unflatten({name: np.full((tasks, 2), fill, np.float32) for name in names})


def coefficients(operator, taus):
    """The number by which an operator multiplies each leaf of a stack of ones."""
    return {name: float(leaf[0]) for name, leaf in tree.flatten(operator(taus)).items()}


# ---------------------------------------------------------------- gradients and filters, as mergekit evaluates them
@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("jit", [False, True])
def test_gradients_and_filters_are_mergekits(name, jit):
    theirs = GRADIENTS[name]["values"]
    taus = tree.unflatten({leaf: np.ones((1, 2), np.float32) for leaf in theirs})
    operator = merging.build(
        *merging.compat.translate("mergekit", "task_arithmetic", {"weight": {"ones": GRADIENTS[name]["setting"]}})
    )
    made = coefficients(jax.jit(operator) if jit else operator, taus)
    assert made.keys() == theirs.keys()
    np.testing.assert_allclose(list(made.values()), [theirs[leaf] for leaf in made], rtol=0, atol=1e-7)


def test_a_gradient_runs_from_the_first_block_to_the_last():
    made = coefficients(merging.build("task_arithmetic", {"scale": [0.0, 1.0, 0.4]}), llama(blocks=5))
    assert [round(made[f"model.layers.{i}.mlp.up_proj.weight"], 6) for i in range(5)] == [0.0, 0.5, 1.0, 0.7, 0.4]
    assert made["lm_head.weight"] == made["model.norm.weight"] == 0.0


def test_a_gradient_has_its_own_number_outside_of_blocks():
    made = coefficients(merging.build("task_arithmetic", {"scale": {"depth": [0.5, 1.0], "outside": 0.25}}), llama())
    assert (
        made["lm_head.weight"],
        made["model.layers.0.mlp.up_proj.weight"],
        made["model.layers.3.mlp.up_proj.weight"],
    ) == (0.25, 0.5, 1.0)


def test_each_task_may_have_its_own_gradient():
    weights = [[0.0, 1.0], {"mlp": 0.5, "default": 2.0}]
    taus = llama(tasks=2)
    operator = merging.build("task_arithmetic", {"scale": 1.0, "weights": weights})
    for made in (coefficients(operator, taus), coefficients(jax.jit(operator), taus)):
        assert (
            made["model.layers.3.mlp.up_proj.weight"] == 1.5 and made["model.layers.0.self_attn.q_proj.weight"] == 2.0
        )


@pytest.mark.parametrize(
    "method, option",
    [
        ("average", "weights"),
        ("task_arithmetic", "scale"),
        ("ties", "density"),
        ("ties", "scale"),
        ("dare", "density"),
        ("della", "density"),
        ("breadcrumbs", "density"),
        ("consensus", "lam"),
        ("magmax", "scale"),
        ("slerp", "t"),
        ("nuslerp", "weights"),
        ("pcb", "scale"),
        ("tsv_m", "scale"),
        ("iso_c", "scale"),
    ],
)
def test_names_and_gradients_go_wherever_a_number_does(method, option):
    """By name and by depth give each leaf what the plain number gives it."""
    rng = np.random.default_rng(0)
    names = [f"layers.{i}.{part}" for i in range(3) for part in ("self_attn", "mlp")]
    taus = tree.unflatten({name: rng.standard_normal((2, 4, 6)).astype(np.float32) for name in names})
    numbers = {"weights": lambda x: [x, 1.0]}.get(option, lambda x: x)
    kept = {"epsilon": 0.05} if method == "della" else {}
    kept |= {"scope": "leaf"} if method in ("ties", "pcb") else {}
    build = lambda value: tree.flatten(merging.build(method, {**kept, option: value})(taus))
    low, high = 0.3, 0.6
    by_name = build({"self_attn": numbers(low), "default": numbers(high)})
    by_depth = build([[low, high], 1.0] if option == "weights" else {"depth": [low, high]})
    plain = {value: build(numbers(value)) for value in (low, 0.45, high)}
    for name in names:
        np.testing.assert_allclose(
            by_name[name], plain[low if "self_attn" in name else high][name], rtol=1e-6, atol=1e-7
        )
        np.testing.assert_allclose(
            by_depth[name], plain[{0: low, 1: 0.45, 2: high}[tree.block(name)[1]]][name], rtol=1e-5, atol=1e-6
        )


def test_a_gradient_may_start_at_nothing():
    """Normalized weights that are all 0 in the first block leave it as it was."""
    made = coefficients(merging.build("average", {"weights": [[0.0, 1.0], [0.0, 3.0]]}), llama(tasks=2))
    blocks = [made[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(4)]
    np.testing.assert_allclose(blocks, [0, 1, 1, 1], rtol=1e-6)
    assert made["lm_head.weight"] == 0


# ---------------------------------------------------------------- what is left out
def test_excluded_leaves_stay_and_do_not_count():
    taus = {
        "body": {"w": np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)},
        "lm_head": {"weight": np.full((1, 4), 100.0, np.float32)},
    }
    made = merging.build("ties", {"density": 0.5, "exclude": "lm_head"})(taus)
    assert made["lm_head"]["weight"].tolist() == [0, 0, 0, 0]
    assert made["body"]["w"].tolist() == [0, 0, 3, 4]  # with the head in the ranking nothing of the body would be kept
    assert merging.build("ties", {"density": 0.5})(taus)["body"]["w"].tolist() == [0, 0, 0, 0]


def test_excluded_leaves_keep_their_bits():
    theta0 = {"head": jnp.array([0.1, 0.2], jnp.bfloat16), "body": jnp.array([0.1], jnp.float32)}
    thetas = [{"head": theta0["head"] + 1, "body": theta0["body"] + 1}] * 2
    made = merging.merge(merging.exclude(merging.average(), "head"), thetas, theta0)
    np.testing.assert_array_equal(made["head"], theta0["head"])
    assert float(made["body"][0]) == pytest.approx(1.1)


def test_exclusion_works_under_jit_and_on_low_rank_leaves():
    taus = {"head": np.ones((2, 3), np.float32), "body": np.ones((2, 3), np.float32)}
    made = jax.jit(merging.exclude(merging.total(), "head"))(taus)
    assert made["head"].tolist() == [0, 0, 0] and made["body"].tolist() == [2, 2, 2]
    low = [{"head": merging.LowRank(jnp.ones((3, 1)), jnp.ones((1, 2))), "body": jnp.ones(2)} for _ in range(2)]
    assert np.asarray(merging.exclude(merging.total(), "head")(low)["head"]).tolist() == [[0, 0]] * 3


def test_left_out_lists_every_name():
    params = {
        "model": {"layers": {"0": {"bias": np.ones(2, np.float32), "weight": np.ones((2, 2), np.float32)}}},
        "steps": np.ones(1, int),
        "lm_head": {"weight": np.ones((2, 2), np.float32)},
        "score": {"weight": np.ones((2, 2), np.float32)},
    }
    operator = merging.exclude(merging.exclude(merging.ties(), "bias"), selection.HEADS)
    assert merging.left_out(operator, params) == ["lm_head.weight", "model.layers.0.bias", "score.weight", "steps"]
    assert merging.left_out(operator, list(tree.flatten(params))) == [
        "lm_head.weight",
        "model.layers.0.bias",
        "score.weight",
    ]
    assert merging.left_out(merging.ties(), list(tree.flatten(params))) == []


@pytest.mark.parametrize(
    "name, head",
    [
        ("lm_head.weight", True),
        ("classifier.bias", True),
        ("score.weight", True),
        ("qa_outputs.weight", True),
        ("model.layers.0.headroom", False),
        ("vision_model.head.weight", True),
        ("model.classifiers_norm.weight", False),
        ("encoder.layer.0.attention.weight", False),
    ],
)
def test_heads_by_pattern(name, head):
    assert (merging.left_out(merging.exclude(merging.total(), selection.HEADS), [name]) == [name]) == head


def test_averaged_leaves_take_the_scale():
    taus = {"proj": np.array([[[1.0, 2.0]], [[3.0, 2.0]]], np.float32), "w": np.ones((2, 2, 2), np.float32)}
    made = merging.build("task_arithmetic", {"scale": 0.5, "averaged": "^proj"})(taus)
    assert made["proj"].tolist() == [[1.0, 1.0]] and made["w"].tolist() == [[1.0, 1.0]] * 2


# ---------------------------------------------------------------- tied leaves
def test_tied_leaves_are_merged_once():
    shared = np.arange(6, dtype=np.float32).reshape(3, 2)
    params = {"wte": {"weight": shared}, "lm_head": {"weight": shared.copy()}, "ln": np.ones(2, np.float32)}
    aliases = {"lm_head.weight": "wte.weight"}
    once = merging.untie(params, aliases)
    assert list(tree.flatten(once)) == ["ln", "wte.weight"]
    again = merging.retie(once, aliases)
    assert again["lm_head"]["weight"] is again["wte"]["weight"]
    taus = {name: np.stack([leaf, leaf]) for name, leaf in tree.flatten(once).items()}
    counted = merging.top(density=0.25)(taus)  # 8 entries of which 2 are kept; the head would have been 6 more
    assert sum(int((leaf[0] != 0).sum()) for leaf in counted.values()) == 2


def test_untied_heads_are_noticed():
    with pytest.raises(ValueError, match="lm_head and wte are tied but differ"):
        merging.untie({"wte": np.ones(2), "lm_head": np.zeros(2)}, {"lm_head": "wte"})
    with pytest.raises(ValueError, match="tied to wte, which is not there"):
        merging.untie({"lm_head": np.zeros(2)}, {"lm_head": "wte"})
    with pytest.raises(ValueError, match="no leaf wte to tie to"):
        merging.retie({"w": np.zeros(2)}, {"lm_head": "wte"})
    assert merging.untie({"wte": np.ones(2)}, {"lm_head": "wte"}).keys() == {"wte"}


# ---------------------------------------------------------------- shorthand
def test_shorthand():
    read = lambda value, name="layers.1.bias", depth=1.0, option="density": resolve(
        shorthand.number(option, value), name, depth
    )
    assert read(0.3) == 0.3
    assert read({"bias": 0.1, "default": 0.2}) == 0.1 and read({"weight": 0.1, "default": 0.2}) == 0.2
    assert read({"bias": [0.0, 0.5], "default": 0.2}) == 0.5 and read([0.1, 0.9]) == 0.9
    assert read({"tasks": [0.1, 0.2]}).tolist() == [0.1, 0.2] and read([0.1, 0.2], option="weights").tolist() == [
        0.1,
        0.2,
    ]
    assert read({"tasks": [0.1, [0.2, 0.4]]}).tolist() == [0.1, 0.4]
    assert read("exact") == "exact" and read(None) is None


def test_shorthand_slips_get_one_sentence():
    with pytest.raises(ValueError, match="density by name needs a 'default' for the other leaves; got self_attn"):
        merging.build("ties", {"density": {"self_attn": 0.3}})
    with pytest.raises(ValueError, match="density gives a number outside of blocks but none in them"):
        merging.build("ties", {"density": {"outside": 0.3}})
    with pytest.raises(ValueError, match=r"density lies in \(0, 1\]; got 1.5"):
        merging.build("ties", {"density": {"self_attn": 1.5, "default": 0.1}})
    with pytest.raises(ValueError, match="is not a regular expression"):
        merging.build("ties", {"exclude": "(head"})


def test_mergekits_settings():
    assert resolve(setting([{"filter": "mlp", "value": 0.1}, {"value": 0.2}]), "layers.0.mlp", 0.0) == 0.1
    assert (
        resolve(setting([{"filter": "m.p", "value": 0.1}, {"filter": "*", "value": 0.2}]), "layers.0.mlp", 0.0) == 0.2
    )  # no pattern to them
    assert setting(0.5) == 0.5 and setting({"value": 0.5}) == 0.5
    with pytest.raises(ValueError, match="the filters mlp leave out leaves"):
        setting([{"filter": "mlp", "value": 0.1}])
    assert (
        each_model({"a": 1.0, "b": 2}).tolist() == [1.0, 2.0]
        and each_model([1.0, 2.0]).tolist() == [1.0, 2.0]
        and each_model(0.5) == 0.5
    )
