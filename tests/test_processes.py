"""Processes that meet over loopback: they agree, share tasks, and end with one sentence where one of them fails."""
import contextlib
import itertools
import json
import socket
import time
import types

import jax
import numpy as np
import pytest

from tests import one_mesh, processes
from tvjax import checkpoints, results, sharding, tree
from tvjax.sharding import processes as ours

SILENCE = 8  # seconds


def meet(mode, folder=".", count=2):
    return processes.together(["tests/meeting.py", mode, 200, SILENCE, folder], count=count)


def sentences(err):
    """What stands on stderr, but for lines of the libraries below, which a process may utter while it ends."""
    theirs = ("[Gloo]", "E1", "E0", "F1", "F0", "W1", "W0", "I")
    return [line for line in err.splitlines() if line and not line.startswith(theirs)]


def test_processes_meet_agree_keep_states_of_their_own_and_part(tmp_path):
    said = meet("well", tmp_path)
    assert [code for code, _, _ in said] == [0, 0], said
    assert all("met" in out for _, out, _ in said)


@pytest.mark.parametrize("dead, left", [(1, 0), (0, 1)])
def test_a_process_that_dies_ends_the_others_with_one_sentence(dead, left):
    begun = time.monotonic()
    said = meet(f"die{dead}")
    code, _, err = said[left]
    assert code == ours.DIED, said
    known = (f"process {dead} has not been heard of for {SILENCE} s: ", "process 0, where all meet (127.0.0.1:")
    last = sentences(err)[-1]
    assert last.startswith(known) and last.endswith(ours.AGAIN)
    assert dead == 0 or len(sentences(err)) == 1
    assert time.monotonic() - begun < 300


def test_a_process_that_fails_tells_the_others_why():
    (code, _, err), (other, _, its) = meet("fail")
    assert other == 2 and sentences(its) == ["bad input: what process 1 alone has read"]
    assert code == ours.DIED and sentences(err) == ["process 1 ended: bad input: what process 1 alone has read"]


def test_configs_that_differ_are_found_out_at_the_start():
    (code, _, err), (other, _, its) = meet("differ")
    sentence = ("process 1 is not started as process 0 is (config.steps 3 there, 4 here): start all with one command, "
                "one config and the same versions")
    assert (other, sentences(its)) == (2, [sentence])
    assert code == ours.DIED and sentences(err) == [f"process 1 ended: {sentence}"]


def test_versions_that_differ_are_told_as_configs_are(monkeypatch):
    held = {}
    service = types.SimpleNamespace(key_value_set=held.__setitem__, blocking_key_value_get=lambda key, _: held[key])
    monkeypatch.setattr(ours, "client", lambda: service)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for rank, version in enumerate(("0.10.2", "0.10.1")):
        monkeypatch.setattr(jax, "process_index", lambda rank=rank: rank)
        monkeypatch.setattr(ours, "_numbers", itertools.count())
        said = "is not started as process 0 is .versions.jax '0.10.2' there, '0.10.1' here."
        with pytest.raises(ValueError, match=said) if rank else contextlib.nullcontext():
            sharding.agree({"config": {"lr": 0.1}, "versions": {"jax": version}})


def test_a_coordinator_that_does_not_answer():
    with pytest.raises(ValueError, match="the coordinator 127.0.0.1:1 does not answer within 0.3 s"):
        sharding.start("127.0.0.1:1,2,1", timeout=0.3)


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(ValueError, match="cannot be used .*: choose another one"):
            sharding.start(f"127.0.0.1:{taken.getsockname()[1]},2,0", timeout=1)


def test_others_that_do_not_come():
    port = processes.free_port()
    code, _, err = processes.ended(processes.started(["tests/meeting.py", "well", 2, 2, "."], 0, count=2, port=port))
    assert code == ours.DIED and sentences(err)[0].startswith("not all processes came within 2 s"), err


@pytest.mark.parametrize("where, said", [
    ("here", "distributed is auto or HOST:PORT,COUNT,INDEX"), ("a:1,2", "HOST:PORT,COUNT,INDEX"),
    ("a:1,2,2", "of 2 processes the indices are 0 … 1; got 2"), ("auto", "finds no SLURM, TPU pod or Open MPI"),
])
def test_addresses_that_are_none(where, said):
    with pytest.raises(ValueError, match=said):
        sharding.start(where, timeout=1)


# ---------------------------------------------------------------- tasks shared by rank
def run_together(workdir, port, *more):
    program = ["-m", "tvjax.run", "--config=tests/two_merges.py", f"--workdir={workdir}",
               "--config.save_models=False", "--timeout=10", *more]
    return [processes.started(program, index, count=2, port=port, flag="--distributed=") for index in range(2)]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_tasks_are_shared_and_a_killed_run_is_continued(tmp_path):
    vectors = tmp_path / "task_vectors" / "seed0"
    running = run_together(tmp_path, processes.free_port())
    until = time.monotonic() + 900
    while not (vectors / "digits.json").exists() and time.monotonic() < until:  # the task of process 1
        time.sleep(0.05)
    running[1].kill()
    processes.ended(running[1])
    code, _, err = processes.ended(running[0])
    assert code == ours.DIED and "process 1 has not been heard of" in err, err
    before = {path.name: path.stat().st_mtime_ns for path in vectors.glob("*.safetensors")}
    assert "digits.safetensors" in before and not (tmp_path / "results.jsonl").exists()

    said = [processes.ended(one) for one in run_together(tmp_path, processes.free_port())]
    assert [code for code, _, _ in said] == [0, 0], said
    assert all((vectors / name).stat().st_mtime_ns == when for name, when in before.items())
    keys = [line["key"] for line in lines(tmp_path / "cache.jsonl")]
    assert keys and len(set(keys)) == len(keys), "a measurement was done twice"
    assert "process 1: average, 2 tasks" in said[1][2] or "process 0: average, 2 tasks" in said[0][2]
    rows = results.read(tmp_path / "results.jsonl")
    assert {row["task"] for row in rows} >= {"greek", "digits"}
    assert {"average", "ties"} <= {row["method"] for row in rows}
    assert (tmp_path / "report.html").exists()


# ---------------------------------------------------------------- tasks done together, on one mesh
def test_a_job_on_a_mesh_over_two_processes_gives_the_numbers_of_one_device_and_goes_on_where_it_died(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    expected = one_mesh.do(one)
    (code, _, err), (gone, out, _) = processes.together(["tests/one_mesh.py", two, "die"], count=2)
    assert gone == 9 and "dies after greek.json" in out
    assert code == ours.DIED and sentences(err) == [f"process 1 has not been heard of for {SILENCE} s: {ours.AGAIN}"]
    greek = two / "task_vectors" / "seed0" / "greek.safetensors"
    before, [state] = greek.stat().st_mtime_ns, list((two / "state").glob("digits-*"))
    assert (state / "2").exists()

    said = processes.together(["tests/one_mesh.py", two, "well"], count=2)
    assert [code for code, _, _ in said] == [0, 0], said
    assert all("greek, seed 0: reused" in out and "digits, seed 0: fine-tuned" in out for _, out, _ in said)
    assert greek.stat().st_mtime_ns == before and not state.exists()
    for task in ("greek", "digits"):
        pair = [tree.flatten(checkpoints.load_task_vector(
            folder / "task_vectors" / "seed0" / f"{task}.safetensors").params) for folder in (one, two)]
        assert set(pair[0]) == set(pair[1])
        for name, x in pair[0].items():
            np.testing.assert_allclose(pair[1][name], x, rtol=1e-5, atol=1e-5, err_msg=name)
    accuracies = lambda rows: {tuple(row[name] for name in ("metric", "method", "task", "split")): row["value"]
                               for row in rows if "accuracy" in row["metric"] and "scale" not in row}
    assert accuracies(results.read(two / "results.jsonl")) == accuracies(expected) != {}
