"""Uploading a merged folder: what would go, what goes, and what is said where the hub cannot be had."""
import pathlib

import pytest

from tvjax.disk import push

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path):
    for name, text in {"config.json": "{}", "model.safetensors": "1234", "README.md": "#", ".partial": "x"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "more").mkdir()
    return tmp_path


class Hub:
    """What is asked of the hub's client."""

    def __init__(self, fails=None):
        self.asked, self.fails = [], fails

    def create_repo(self, name, *, exist_ok):
        self.asked.append(("create", name, exist_ok))

    def upload_folder(self, *, repo_id, folder_path, allow_patterns, commit_message):
        if self.fails:
            raise self.fails
        self.asked.append(("upload", repo_id, folder_path, sorted(allow_patterns)))
        return "address"


def test_a_rehearsal_says_what_would_go_and_asks_nobody(folder):
    said, hub = [], Hub()
    assert push.push(folder, push.target("dry:me/merged"), say=said.append, client=hub) is None
    assert hub.asked == [] and said == [
        "would push to me/merged: README.md (1 bytes), config.json (2 bytes), model.safetensors (4 bytes)"]


def test_the_files_of_the_merge_go(folder):
    hub = Hub()
    assert push.push(folder, push.target("me/merged"), say=lambda line: None, client=hub) == "address"
    assert hub.asked == [("create", "me/merged", True),
                         ("upload", "me/merged", str(folder), ["README.md", "config.json", "model.safetensors"])]


def test_slips_are_one_sentence(folder):
    with pytest.raises(ValueError, match="owner/name on the hub"):
        push.target("merged")
    with pytest.raises(ValueError, match="could not be pushed to: no network; .* the same command tries again"):
        push.push(folder, push.target("me/merged"), say=lambda line: None, client=Hub(OSError("no network.\nmore")))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no model"):
        push.files(folder)
    assert push.target("") is None


def test_the_command_takes_it(tmp_path):
    import runpy

    import numpy as np

    from tvjax import checkpoints
    from tvjax.disk import job
    for name, value in {"base": 0.0, "one": 1.0}.items():
        checkpoints.save({"w": np.full(3, value, np.float32)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text('{"model_type": "toy"}')
    config = runpy.run_path(str(ROOT / "configs" / "merge.py"))["get_config"]("average")
    config.update(base=str(tmp_path / "base"), models=str(tmp_path / "one"), out=str(tmp_path / "out"), push="x")
    said = []
    with pytest.raises(ValueError, match="owner/name on the hub"):
        job.run(config, say=said.append)
    assert said == [] and not (tmp_path / "out").exists()
    config.push = "dry:me/merged"
    job.run(config, say=said.append)
    assert said[-1].startswith("would push to me/merged: ") and "model.safetensors" in said[-1]
