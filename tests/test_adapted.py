"""Adapters' task vectors through the job of masks and compression: (IA)³ on a network of one layer."""
import pathlib

import jax
import numpy as np
import pytest

from tests.test_configs import load
from tests.test_tatr import CLASSES, FEATURES, HIDDEN, made_up
from tvjax import adapters, compression, results, sharding, tree, vectors
from tvjax.compression import encoded
from tvjax.experiment import adapted, loading, planning, sharing, study, tall, tall_plan

pytestmark = pytest.mark.usefixtures("quick_compilation")
METHOD = adapters.Rescale(targets=r"(^|[.])fc$")
CODECS = ({"name": "emr"}, {"name": "tvq", "width": 4}, {"name": "magnitude_pruning"})


def config(**own):
    made = load("tall", "runlocal")
    made.finetune.steps, made.finetune.lr, made.finetune.batch = 30, 0.05, 16
    made.tall.update({"adapter": {"name": "ia3", "targets": METHOD.targets}, "nonoverlap": (), "ks": (), **own})
    return made


@pytest.fixture(scope="module")
def done(tmp_path_factory, quick_compilation):
    """(folder, rows, what was said) of the local config, its weights being factors."""
    patch = pytest.MonkeyPatch()
    patch.setattr(study, "problem", made_up)
    folder, said = tmp_path_factory.mktemp("ia3") / "run", []
    base = {"name": "task_arithmetic", "k": 1}
    own = config(bases=(base,), codecs=CODECS, save=True)
    own.tall.curve.orders = ()
    yield folder, own, tall.run(own, folder, say=said.append, progress=False), said
    patch.undo()


def test_at_the_start_it_is_the_network():
    plan = tall_plan.tall_plan(config()).usual
    about = made_up(plan)
    whole = adapted.beside(about, METHOD)
    base, phi = adapted.split(whole.theta0, METHOD)
    jax.tree.map(np.testing.assert_array_equal, base, about.theta0)
    assert {name: x.shape for name, x in tree.flatten(phi).items()} == {"layers.0.fc.ia3_l": (HIDDEN, 1)}
    assert all(np.all(x == 1) for x in jax.tree.leaves(phi)) and whole.base != about.base
    task = plan.tasks[0]
    x = np.ones((2, FEATURES), np.float32)
    np.testing.assert_array_equal(jax.jit(whole.predict)(whole.theta0, about.heads[task], x),
                                  jax.jit(about.predict)(about.theta0, about.heads[task], x))


def test_task_vectors_are_factors_less_one_and_learn(done):
    folder, own, rows, _ = done
    value = lambda method: results.select(rows, metric="accuracy", split="test", task="average", method=method)[0]
    assert value("fine-tuned")["value"] > value("zero-shot")["value"] + 0.05
    path = folder / "adapters" / "ia3" / "seed0" / f"{own.tasks[0]}.safetensors"
    tau = adapted.checkpoints.load_task_vector(path).params
    assert set(tree.flatten(tau)) == {"layers.0.fc.ia3_l"}


def test_bits_are_those_of_the_factors(done):
    _, _, rows, _ = done
    trained, frozen, tasks = HIDDEN, HIDDEN * FEATURES + HIDDEN, 3
    row = lambda method: results.select(rows, metric="accuracy", split="test", task="average", method=method)[0]
    assert row("fine-tuned")["bits"] == 32 * (tasks * trained + frozen)
    assert row("TALL + task_arithmetic")["bits"] == (64 + tasks) * trained + 32 * frozen
    assert row("emr")["bits_with_heads"] - row("emr")["bits"] == 32 * tasks * HIDDEN * CLASSES
    assert {"Consensus task_arithmetic", "tvq", "magnitude_pruning"} <= {one["method"] for one in rows}


def test_files_hold_what_was_judged(done):
    """What a codec wrote gives the task vectors back; their bytes are the row's."""
    folder, own, rows, _ = done
    place = folder / "encoded" / "seed0" / "3-tasks"
    assert {path.name for path in place.iterdir()} == {"TALL + task_arithmetic", "emr", "tvq", "magnitude_pruning"}
    taus = [vectors.TaskVector(adapted.checkpoints.load_task_vector(
        folder / "adapters" / "ia3" / "seed0" / f"{task}.safetensors").params) for task in own.tasks]
    coder = compression.build_codec("emr", {}, tasks=3)
    state = coder.encode(taus)
    for i, task in enumerate(own.tasks):
        found, wanted = encoded.load(place / "emr", task), coder.decode(state, i)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), dict(found), dict(wanted))
    row = results.select(rows, metric="accuracy", split="test", task="average", method="emr")[0]
    assert row["file_bytes"] == encoded.sizes_of(encoded.open_encoded(place / "emr"))["measured"]


def test_a_second_run_reuses_everything(done):
    folder, own, rows, _ = done
    said = []
    again = tall.run(own, folder, say=said.append, progress=False)
    assert not any("fine-tuned in" in text for text in said)
    keep = lambda found: [(row["method"], row["value"]) for row in found if row["metric"] == "accuracy"]
    assert keep(again) == keep(rows)


@pytest.mark.parametrize("change, sentence", [
    ({"adapter": {"name": "ia4"}}, "no adapter called 'ia4'; did you mean 'ia3'"),
    ({"adapter": {"name": "bias"}}, "tune those alone"),
    ({"adapter": {"name": "lora", "ranks": 4}}, "did you mean 'rank'"),
    ({"nonoverlap": (2,)}, "tall.nonoverlap is about the network's own weights"),
])
def test_slips_are_one_sentence(change, sentence):
    given = planning.plain(config())
    given["tall"] |= planning.plain(change)
    with pytest.raises(ValueError, match=sentence):
        tall_plan.tall_plan(given)


def test_factors_of_a_text_to_text_model(tmp_path, monkeypatch):
    """A tiny T5: its (IA)³ factors are tuned, masked and merged like weights."""
    monkeypatch.setattr(study, "problem", loading.problem)
    theirs, own = load("language", "runlocal"), config(bases=({"name": "task_arithmetic", "k": 1},), codecs=CODECS[:1],
                                                       lams=(0.4,), adapter={"name": "ia3"})
    for name in ("model", "suite", "sources", "tasks", "control", "counts", "seeds", "examples", "finetune", "batch"):
        own[name] = theirs[name]
    own.data, own.tall.curve.orders, own.tall.curve.counts = theirs.data, (), (2,)
    rows = tall.run(own, tmp_path / "run", say=lambda line: None, progress=False)
    judged = results.select(rows, metric="accuracy", split="test", task="average", tasks=2)
    assert {"zero-shot", "fine-tuned", "TALL + task_arithmetic", "Consensus task_arithmetic", "emr"} <= {
        row["method"] for row in judged}
    path = tmp_path / "run" / "adapters" / "ia3" / "seed0" / f"{own.tasks[0]}.safetensors"
    names = tree.flatten(adapted.checkpoints.load_task_vector(path).params)
    assert len(names) == 8 and all(name.endswith(".ia3_l") for name in names)  # k, v of three attentions, two wo


def test_processes_share_the_tasks(monkeypatch):
    done = []
    monkeypatch.setattr(adapted, "vector", lambda bench, method, task, folder, progress: (
        done.append(task), adapted.Adapted({}, 0.0))[1])
    for name, value in {"process_count": 2, "process_index": 1}.items():
        monkeypatch.setattr(jax, name, lambda value=value: value)
    monkeypatch.setattr(sharding, "barrier", lambda what: done.append(what))
    plan = tall_plan.tall_plan(config()).usual
    bench = study.Bench(made_up(plan), plan, pathlib.Path("cache"), 0, print)
    with pytest.raises(sharing.Done):
        adapted.task_vectors(bench, METHOD, "folder")
    assert done == [*plan.tasks[1::2], "tasks"] != ["tasks"]
