"""A merge shared by eight devices, or by two processes, is that of one device: entry by entry the same bits."""
import json

import jax
import numpy as np
import pytest

from tests import many_merges, processes
from tvjax import checkpoints, disk, merging, tree
from tvjax.disk import deltas, drive, ledger, planning, readers, sharing, writers
from tvjax.merging import crew, crewed

METHODS = ("ties", "consensus", "dare", "emr", "fisher", "metagpt", "tsv_m", "wudi", "regmean")
BOTH = ("ties", "dare", "metagpt", "tsv_m")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    many_merges.write(folder)
    return folder


@pytest.fixture(scope="module")
def one_and_eight(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("eight")
    processes.run(["tests/many_merges.py", inputs, out, ",".join({*METHODS, *BOTH})], devices=8)
    return out


def same(method, one, other):
    entrywise = all(stage.entrywise for stage in merging.build(method).stages)
    expected, found = (tree.flatten(checkpoints.load(path / method).params) for path in (one, other))
    assert set(found) == set(many_merges.SHAPES)
    for name, x in found.items():
        np.testing.assert_allclose(x, expected[name], rtol=0, atol=0 if entrywise else 1e-6, err_msg=f"{method} {name}")


@pytest.mark.parametrize("method", METHODS)
def test_eight_devices_merge_as_one(method, one_and_eight):
    same(method, one_and_eight / "one", one_and_eight / "many")


@pytest.fixture(scope="module")
def two(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("two")
    said = processes.together(["tests/many_merges.py", inputs, out, ",".join(BOTH)], count=2, devices=2)
    assert [code for code, _, _ in said] == [0, 0], said
    for _, told, _ in said:  # the base's and three models' float32, 4 of 9 and 5 of 9 pieces of 65,536 entries
        first, last = (0, 196_608) if "process 0" in told else (196_608, 530_000)
        assert f"embed.table: {first}:{last}" in told
    return out / "many"


def test_two_processes_merge_as_one(two, one_and_eight):
    for method in BOTH:
        same(method, one_and_eight / "one", two)
        written = two / method
        index = json.loads((written / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(many_merges.SHAPES)
        lines = ledger.read(written / ledger.NAME)
        assert set(lines.tensors) == set(many_merges.SHAPES) and not ledger.parts(written)
        files = {name: shard for name, shard in index["weight_map"].items()}
        assert {line["file"] for line in lines.tensors.values()} == set(files.values())


def test_a_large_tensor_is_written_by_both_and_told_as_by_one(two, one_and_eight):
    for method in BOTH:
        said, expected = ({line["tensor"]: line for line in ledger.lines(path / method) if "tensor" in line}
                          for path in (two, one_and_eight / "one"))
        assert set(said) == set(expected)
        entrywise = all(stage.entrywise for stage in merging.build(method).stages)
        for name in ("embed.table", "head.bias"):
            same_but_for = {"file"} if entrywise or name == "embed.table" else {"file", "sha256"}
            assert {key: x for key, x in said[name].items() if key not in same_but_for} == {
                key: x for key, x in expected[name].items() if key not in same_but_for}


def test_the_kth_largest_by_counting_is_that_of_a_sort():
    rng = np.random.default_rng(0)
    for kind in (np.float32, np.float64):
        x = rng.standard_normal((3, 4000)).astype(kind)
        x[:, :1000] = 0.5
        x[0, 7], x[1, 9] = np.inf, -np.inf
        for k in (1, 17, 1500, 4000):
            found = crewed.kth_largest({"": lambda x=x: [x[:, :900], x[:, 900:]]}, {"": k}, 3, kind=kind)[""]
            np.testing.assert_array_equal(found, np.sort(x, 1)[:, -k])
            assert found.dtype == kind


def test_leaves_are_shared_out_evenly():
    owner = crew.shared_out({str(i): 10 - i for i in range(10)}, 3)
    loads = [sum(10 - int(name) for name, rank in owner.items() if rank == process) for process in range(3)]
    assert max(loads) - min(loads) <= 2 and sum(loads) == 55


def test_a_shared_merge_that_is_interrupted_goes_on(inputs, tmp_path, monkeypatch):
    """Both processes' work, one after the other: the first one's part of a tensor that both have is not done again."""
    models = [inputs / task for task in many_merges.TASKS]
    merge = lambda out: disk.merge_checkpoints(inputs / "base", models, out / "dare", "dare", max_shard_size="300KB",
                                               say=lambda line: None, progress=False)
    merge(tmp_path / "one")
    monkeypatch.setattr(deltas.Deltas, "piece", deltas.Deltas.piece)  # as it was, at the end
    reads, ends = many_merges.watched_reads(), [KeyboardInterrupt]
    do, one = drive.drive, crew.Crew(tuple(jax.devices()[:1]), 0, 2, lambda found: [found, found])

    def both(task, work, past, data):
        owner, cuts = sharing.shares(task.files, planning.entrywise(task.operator, task.source), 2, 3)
        for rank in (0, 1):
            do(task._replace(crew=one._replace(rank=rank, owner=owner, cuts=cuts)), work, past, data)
            if ends:
                raise ends.pop()
    monkeypatch.setattr(drive, "drive", both)
    monkeypatch.setattr(sharing, "crew", lambda files, entrywise, tasks: one._replace(
        cuts=sharing.shares(files, entrywise, 2, tasks)[1]))
    with pytest.raises(KeyboardInterrupt):
        merge(tmp_path)
    assert (min(reads)[0], max(reads)[1]) == (0, 196_608)
    reads.clear()
    other = "model-00001-of-00099.safetensors"  # as if another number of processes had begun
    (tmp_path / ".dare.merging" / other).write_bytes(b"")
    merge(tmp_path)
    assert not (tmp_path / "dare" / other).exists()
    assert (min(reads)[0], max(reads)[1]) == (196_608, 530_000)
    same("dare", tmp_path / "one", tmp_path)


def test_what_only_one_could_do_is_not_cut():
    made = [writers.Shard(name, {name: readers.TensorInfo((n,), np.dtype("f4"))}, b"", {name: 0})
            for name, n in {"large": 900_000, "small": 90_000}.items()]
    assert sharing.shares(made, {"large": 900_000, "small": 90_000}, 2, 3) == (
        {"small": 0}, {"large": (0, 393_216, 900_000)})
    assert sharing.shares(made, {"small": 90_000}, 2, 3) == ({"large": 0, "small": 1}, {}), "taken whole"
    assert crew.cut(10, 3, 4) == (0, 4, 8, 10)


def test_one_device_of_one_process_needs_no_crew():
    assert sharing.crew([]) is None and sharing.most_bytes(5, 100) == 5
