"""The job of masks and compression on a made-up problem of a few hundred weights: rows, tables, figures, slips."""
import json
import pathlib
import runpy
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import reports, results, tree
from tvjax.compression import bits
from tvjax.data import glyphs
from tvjax.experiment import nonoverlap, orders, planning, study, tall, tall_plan
from tvjax.experiment.loading import Problem
from tvjax.reports import tall as tall_report

ROOT = pathlib.Path(__file__).parents[1]
FEATURES, HIDDEN, CLASSES = 12, 10, 4
pytestmark = pytest.mark.usefixtures("quick_compilation")


def config(**own):
    made = runpy.run_path(str(ROOT / "configs" / "tall.py"))["get_config"]("runlocal")
    made.finetune.steps, made.finetune.lr, made.finetune.batch = 30, 0.05, 16
    for name, value in own.items():
        made.tall[name] = value
    return made


def predict(params, head, images):
    layer = params["vision_model"]["layers"]["0"]
    return jnp.tanh(images @ layer["weight"].T + layer["bias"][None]) @ head


def split(draws, centres, count):
    labels = draws.integers(0, CLASSES, count).astype(np.int32)
    images = (centres[labels] + draws.normal(size=(count, FEATURES))).astype(np.float32)
    return glyphs.Split(images, labels)


def made_up(plan) -> Problem:
    """Tasks of Gaussian classes, one layer before a frozen random head."""
    draws = np.random.default_rng(0)
    draw = lambda *shape: (0.3 * draws.normal(size=shape)).astype(np.float32)
    theta0 = {"vision_model": {"layers": {"0": {"weight": draw(HIDDEN, FEATURES), "bias": draw(HIDDEN)}}}}
    heads = {task: jnp.asarray(draw(HIDDEN, CLASSES)) for task in plan.tasks}
    centres = {task: 2 * draw(CLASSES, FEATURES) for task in plan.tasks}
    sizes = {"train": 96, "val": 40, "test": 40}
    splits = {task: {name: split(draws, centres[task], count) for name, count in sizes.items()} for task in plan.tasks}
    keys = {task: {name: f"{task}-{name}" for name in sizes} for task in plan.tasks}
    params = {**theta0, "text_model": np.zeros(17, np.float32)}
    return Problem(types.SimpleNamespace(params=params), theta0, predict, heads, splits, "base", keys)


@pytest.fixture(scope="module")
def done(tmp_path_factory, quick_compilation):
    """(folder, rows, what was said) of the local config on the made-up problem."""
    patch = pytest.MonkeyPatch()
    patch.setattr(study, "problem", made_up)
    folder, said = tmp_path_factory.mktemp("tall") / "run", []
    yield folder, tall.run(config(), folder, say=said.append, progress=False), said
    patch.undo()


def pick(rows, **equals):
    return results.select(rows, **equals)


def test_rows_of_every_method(done):
    _, rows, _ = done
    assert all(set(results.FIELDS) <= set(row) for row in rows)
    by = {section: {row["method"] for row in rows if row.get("section") == section}
          for section in ("anchor", "merging", "compression", "k", "control")}
    assert by["anchor"] == {"zero-shot", "fine-tuned"}
    assert by["merging"] == {"average", "task_arithmetic", "ties", "Consensus task_arithmetic", "Consensus ties"}
    assert {"TALL + task_arithmetic", "TALL + ties", "emr", "tsv_c", "magnitude_pruning"} <= by["compression"]
    assert len(by["compression"]) == 2 + len(config().tall.codecs)
    assert "non-overlapping: task arithmetic" in by["control"]


def test_masks_of_consensus_are_those_of_tall(done):
    _, rows, _ = done
    average = lambda method: pick(rows, metric="accuracy", split="test", task="average", method=method)[0]
    for base in ("task_arithmetic", "ties"):
        assert average(f"Consensus {base}")["lam"] == average(f"TALL + {base}")["lam"]
        assert set(average(f"TALL + {base}")["lam"]) <= {0.2, 0.6}


def test_limits_of_k(done):
    """k = 0 is the base itself, more than there are tasks is the zero-shot model."""
    _, rows, _ = done
    value = lambda method: {row["task"]: row["value"] for row in
                            pick(rows, metric="accuracy", split="test", method=method, tasks=3)}
    assert value("task_arithmetic, k = 4") == value("zero-shot")
    assert value("task_arithmetic, k = 0") == value("task_arithmetic")


def test_bits_are_counted(done):
    _, rows, _ = done
    trained, frozen, tasks = HIDDEN * FEATURES + HIDDEN, 17, 3
    bits_of = {row["method"]: row for row in pick(rows, metric="accuracy", split="test", task="average", tasks=3)
               if row.get("section") in tall_report.SECTIONS}
    assert bits_of["fine-tuned"]["bits"] == 32 * (tasks * trained + frozen)
    assert bits_of["zero-shot"]["bits"] == bits_of["average"]["bits"] == 32 * (trained + frozen)
    assert bits_of["TALL + ties"]["bits"] == (64 + tasks) * trained + 32 * frozen
    assert bits_of["TALL + ties"]["bits_per_weight"] == pytest.approx((32 + tasks) / tasks)
    assert bits_of["TALL + ties"]["bits_with_heads"] - bits_of["TALL + ties"]["bits"] == 32 * tasks * HIDDEN * CLASSES
    assert bits_of["emr"]["bits"] == (64 + tasks) * trained + 32 * frozen + 32 * tasks


def test_every_row_says_family_data_and_parameters(done):
    _, rows, _ = done
    judged = pick(rows, metric="accuracy", split="test", task="average", tasks=3)
    assert {(row["family"], row["data"], row["seen"]) for row in judged} == {
        ("glyphs, fine-tuned here", "none", "nothing")}
    added = {row["method"]: row["added"] for row in judged}
    trained = HIDDEN * FEATURES + HIDDEN
    assert added["task_arithmetic"] == 0 and added["TALL + ties"] == -(-(32 + 3) * trained // 32) - trained


def test_agreement_sums_to_one(done):
    _, rows, _ = done
    for by in ("all", "layer", "kind"):
        found = pick(rows, metric="agreement", by=by, method="TALL + ties", tasks=3)
        groups = {row["group"] for row in found}
        for group in groups:
            assert sum(row["value"] for row in found if row["group"] == group) == pytest.approx(1)
    assert {row["class"] for row in pick(rows, metric="class")} == {"catastrophic", "selfish", "general", "universal"}


def test_control_has_apart_task_vectors(done):
    folder, rows, _ = done
    files = sorted((folder / "nonoverlap-2").rglob("*.safetensors"))
    assert len(files) == 2
    first, second = (tree.flatten(nonoverlap.checkpoints.load_task_vector(file).params) for file in files)
    for name in first:
        assert not np.any((first[name] != 0) & (second[name] != 0)) and np.any(first[name] != 0)
    value = lambda method: pick(rows, metric="accuracy", split="test", task="average", method=method)[0]["value"]
    assert value("non-overlapping: own part of the sum") == value("non-overlapping: fine-tuned")


def test_curve(done):
    _, rows, _ = done
    found = pick(rows, metric="curve normalised")
    assert {(row["order"], row["tasks"]) for row in found} == {(name, n) for name in orders.NAMES[-2:] for n in (2, 3)}
    assert {row["method"] for row in found} == {
        f"{way}{base}" for way in ("", "Consensus ", "TALL + ") for base in ("task_arithmetic", "ties")}


def test_report(done):
    folder, rows, _ = done
    made = reports.write(folder, command="the command")
    names = {path.name for path in made}
    assert {"tables.md", "tables.tex", "report.html", "1_agreement.png", "1_pareto.png", "1_pareto.csv", "1_radar.png",
            "1_over-k.png", "1_over-lambda.png", "3_over-tasks-normalised-accuracy.png", "3_storage-over-tasks.png",
            "1_classes-by-layer.png"} <= names
    text = (folder / "tables.md").read_text()
    assert "*compression*" in text and "non-overlapping: task arithmetic" in text
    assert text.index("*merging*") < text.index("| TALL + ties |")
    line = next(line for line in text.splitlines() if line.startswith("| TALL + ties |"))
    want = pick(rows, metric="accuracy", split="test", task="average", method="TALL + ties", tasks=3)[0]["value"]
    assert f"{100 * want:.1f} (" in line
    assert "TALL + ties" in (folder / "report.html").read_text()


def test_a_second_run_measures_nothing_again(done, monkeypatch):
    folder, rows, _ = done
    monkeypatch.setattr(nonoverlap.training, "fit", None)
    monkeypatch.setattr(study.evaluation, "accuracy", None)
    said = []
    again = tall.run(config(), folder, say=said.append, progress=False)
    steady = lambda found: [{k: v for k, v in row.items() if k != "seconds"} for row in found
                            if row["metric"] not in ("seconds", "peak bytes")]
    assert steady(again) == steady(rows)
    assert all(line.startswith("[") for line in said)


def test_vectors_of_another_run_are_taken_over(done, tmp_path, monkeypatch):
    folder, rows, _ = done
    other = config(codecs=(), bases=config().tall.bases[:1], nonoverlap=(), ks=())
    other.tall.curve.orders = ()
    other.vectors = str(folder)
    monkeypatch.setattr(nonoverlap.training, "fit", None)  # nothing is fine-tuned
    found = tall.run(other, tmp_path / "other", say=lambda line: None, progress=False)
    anchor = lambda all_: pick(all_, metric="accuracy", method="fine-tuned", split="test", tasks=3)
    assert [row["value"] for row in anchor(found)] == [row["value"] for row in anchor(rows)]


# ---------------------------------------------------------------- orders
PAPER = {
    "zero-shot ascending":
        "KMNIST EMNIST SVHN GTSRB FER2013 DTD EuroSAT MNIST RenderedSST2 Cars PCAM RESISC45 FashionMNIST "
        "SUN397 CIFAR100 Flowers102 Food101 OxfordIIITPet CIFAR10 STL10",
    "zero-shot descending":
        "STL10 CIFAR10 OxfordIIITPet Food101 Flowers102 CIFAR100 SUN397 FashionMNIST RESISC45 PCAM Cars "
        "RenderedSST2 MNIST EuroSAT DTD FER2013 GTSRB SVHN EMNIST KMNIST",
    "zero-shot wave":
        "Cars PCAM RenderedSST2 RESISC45 MNIST FashionMNIST EuroSAT SUN397 DTD CIFAR100 FER2013 Flowers102 "
        "GTSRB Food101 SVHN OxfordIIITPet EMNIST CIFAR10 KMNIST STL10",
    "zero-shot zigzag":
        "STL10 KMNIST CIFAR10 EMNIST OxfordIIITPet SVHN Food101 GTSRB Flowers102 FER2013 CIFAR100 DTD SUN397 "
        "EuroSAT FashionMNIST MNIST RESISC45 RenderedSST2 PCAM Cars",
    "alphabetic ascending":
        "CIFAR10 CIFAR100 Cars DTD EMNIST EuroSAT FER2013 FashionMNIST Flowers102 Food101 GTSRB KMNIST MNIST "
        "OxfordIIITPet PCAM RESISC45 RenderedSST2 STL10 SUN397 SVHN",
    "alphabetic descending":
        "SVHN SUN397 STL10 RenderedSST2 RESISC45 PCAM OxfordIIITPet MNIST KMNIST GTSRB Food101 Flowers102 "
        "FashionMNIST FER2013 EuroSAT EMNIST DTD Cars CIFAR100 CIFAR10",
    "alphabetic wave":
        "CIFAR10 SVHN CIFAR100 SUN397 Cars STL10 DTD RenderedSST2 EMNIST RESISC45 EuroSAT PCAM FER2013 "
        "OxfordIIITPet FashionMNIST MNIST Flowers102 KMNIST Food101 GTSRB",
    "alphabetic zigzag":
        "GTSRB Food101 KMNIST Flowers102 MNIST FashionMNIST OxfordIIITPet FER2013 PCAM EuroSAT RESISC45 "
        "EMNIST RenderedSST2 DTD STL10 Cars SUN397 CIFAR100 SVHN CIFAR10",
}


@pytest.mark.parametrize("name", orders.NAMES)
def test_the_orders_of_the_paper(name):
    rising = PAPER["zero-shot ascending"].split()
    accuracy = {task: rising.index(task) / 20 for task in sorted(rising)}
    assert orders.order(name, accuracy) == PAPER[name].split()


# ---------------------------------------------------------------- parts and slips
@pytest.mark.parametrize("tasks", [1, 3, 7])
def test_partition(tasks):
    theta0 = {"a": np.zeros((5, 3), np.float32), "b": np.zeros(8, np.float32)}
    masks = nonoverlap.partition(theta0, tasks, seed=0)
    flags = lambda mask, name: np.asarray(bits.unpack(bits.flatten(mask)[name])).astype(int)
    assert all((sum(flags(mask, name) for mask in masks) == 1).all() for name in theta0)
    sizes = [sum(int(np.asarray(bits.unpack(b)).sum()) for b in bits.flatten(mask).values()) for mask in masks]
    assert max(sizes) - min(sizes) <= 1 and sum(sizes) == 23


def test_masked_loss_has_no_gradient_outside():
    plan = planning.plan({k: v for k, v in planning.plain(config()).items() if k not in ("job", "vectors", "tall")})
    problem = made_up(plan)
    task = plan.tasks[0]
    mask = nonoverlap.partition(problem.theta0, 2, seed=0)[0]
    frozen = ((problem.heads[task], jnp.int32(CLASSES)), problem.theta0, mask)
    loss = nonoverlap.masked_loss(predict, 0.0)
    moved = jax.tree.map(lambda x: jnp.asarray(x) + 0.1, problem.theta0)
    batch = tuple(part[:16] for part in problem.splits[task]["train"])
    grad = tree.flatten(jax.grad(loss)(moved, batch, jax.random.key(0), frozen))
    for name, flags in bits.flatten(mask).items():
        assert not np.any(np.asarray(grad[name])[~np.asarray(bits.unpack(flags))])
    assert any(np.any(np.asarray(g) != 0) for g in grad.values())


@pytest.mark.parametrize("change, sentence", [
    ({"bases": ()}, "tall.bases is empty"),
    ({"bases": ({"name": "ties", "scale": 0.3},)}, "leave its scale out"),
    ({"bases": ({"name": "tise"},)}, "did you mean 'ties'"),
    ({"lams": ()}, "tall.lams is a list of numbers"),
    ({"comparator": "<"}, "'>' or '>='"),
    ({"ks": (-1,)}, "tall.ks holds numbers of tasks"),
    ({"codecs": ({"name": "emrr"},)}, "no codec called 'emrr'; did you mean 'emr'"),
    ({"codecs": ({"name": "tvq", "bits": 3},)}, "tvq takes width; got bits"),
    ({"codecs": ({"name": "tall"},)}, "TALL-masks are there for every base"),
    ({"codecs": ({"name": "emr"}, {"name": "emr"})}, "two codecs are called 'emr'"),
    ({"codecs": ({"name": "emr", "label": "a/b"},)}, "a codec's label names a directory; 'a/b' cannot"),
    ({"nonoverlap": (9,)}, "tall.nonoverlap holds numbers of tasks from 1 to 3; got 9"),
])
def test_slips(change, sentence):
    given = planning.plain(config())
    given["tall"] |= planning.plain(change)
    with pytest.raises(ValueError, match=sentence):
        tall_plan.tall_plan(given)


def test_models_of_the_hub_are_those_of_the_configs_that_merge_them():
    made = runpy.run_path(str(ROOT / "configs" / "tall.py"))["get_config"]("t5_7_ia3")
    assert made.suite == "questions" and len(made.tasks) == 7 and made.tall.adapter.name == "ia3"
    assert made.name == "tall-t5_7_ia3" and {base.k for base in made.tall.bases} == {1}
    made = runpy.run_path(str(ROOT / "configs" / "tall.py"))["get_config"]("clip14")
    assert made.job == "tall" and len(made.tasks) == len(made.finetuned) == 14 and made.counts == (14,)
    assert made.tall.curve.counts == (2, 4, 8, 14) and made.tall.nonoverlap == () and made.suite == "vision"


def test_more_slips(tmp_path):
    given = planning.plain(config())
    with pytest.raises(ValueError, match="there is no folder nowhere"):
        tall_plan.tall_plan({**given, "vectors": "nowhere"})
    curve = {**given["tall"], "curve": {**given["tall"]["curve"], "orders": ["alphabetic wav"]}}
    with pytest.raises(ValueError, match="did you mean 'alphabetic wave'"):
        tall_plan.tall_plan({**given, "tall": curve})
    with pytest.raises(ValueError, match="tall has no field 'kss'; did you mean 'ks'"):
        tall_plan.tall_plan({**given, "tall": {**given["tall"], "kss": 1}})
    assert json.dumps(given)
