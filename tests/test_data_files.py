"""Readers of sentences, arrays and images: what they read, how they split, what they say to files that are wrong."""
import gzip
import json

import numpy as np
import pytest
from PIL import Image

from tvjax.data import arrays, images, sources, splits, text, vision


def write_json(path, **changes):
    whole = {"labels": ["bad", "good"], "train": [[i % 2, f"train {i}"] for i in range(20)],
             "test": [[0, "test 0"], ["good", "test 1"]], **changes}
    body = json.dumps({name: value for name, value in whole.items() if value is not None})
    path.write_bytes(gzip.compress(body.encode()) if path.name.endswith(".gz") else body.encode())
    return path


def test_sentences_of_json(tmp_path):
    read = text.read(write_json(tmp_path / "text_mood.json.gz"))
    train, val = splits.train_val(20)
    assert read.classnames == ("bad", "good")
    assert read.splits["val"].texts == [f"train {i}" for i in val] and len(read.splits["train"].texts) == 18
    assert read.splits["test"].labels.tolist() == [0, 1]
    assert "validation: 2 of 20 training examples" in read.source and splits.index_hash(val) in read.source


def test_sentences_with_a_validation_split_of_their_own(tmp_path):
    read = text.read(write_json(tmp_path / "a.json", validation=[[1, "v"]]))
    assert read.splits["val"].texts == ["v"] and len(read.splits["train"].texts) == 20


def test_sentences_of_csv(tmp_path):
    lines = ["Text,label,split", '"one, two",up,train'] + [f"t{i},down,train" for i in range(19)] + ["x,up,test"]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    read = text.read(tmp_path / "a.csv")
    assert read.classnames == ("down", "up") and read.splits["test"].labels.tolist() == [1]
    assert "one, two" in read.splits["train"].texts + read.splits["val"].texts


@pytest.mark.parametrize("changes, sentence", [
    (dict(labels=None), "needs the fields labels, train and test; it holds train, test"),
    (dict(test=[[2, "x"]]), "test, example 0: the label 2 is none of the 2 classes"),
    (dict(test=[["so-so", "x"]]), "the label 'so-so' is none of the 2 classes"),
    (dict(train=[[0, None]]), "train, example 0 has no text"), (dict(train=["x"]), "an example is .label, text."),
    (dict(test=[]), "holds no examples"), (dict(train=[[0, "x"]] * 5), "none can be held out"),
])
def test_sentences_that_are_wrong(tmp_path, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        text.read(write_json(tmp_path / "a.json", **changes))


def test_files_that_are_no_sentences(tmp_path):
    (tmp_path / "a.csv").write_text("text,split\nx,train\n")
    (tmp_path / "b.json").write_text("{")
    (tmp_path / "c.json.gz").write_text("plain")
    for name, sentence in (("a.csv", "lacks the column 'label'; it has text, split"), ("b.json", "is not JSON"),
                           ("c.json.gz", "cannot be read"), ("d.json", "there is no file")):
        with pytest.raises(ValueError, match=sentence):
            text.read(tmp_path / name)


def test_tasks_are_found_by_file_folder_pattern_and_name(tmp_path):
    for name in ("text_a.json", "b.csv.gz", "readme.txt"):
        (tmp_path / name).write_text("")
    assert set(text.files([str(tmp_path)])) == {"a", "b"}
    assert set(text.files([f"{tmp_path}/text_*.json", f"c={tmp_path}/b.csv.gz"])) == {"a", "c"}
    with pytest.raises(ValueError, match="there is no file .*nothing"):
        text.files([f"{tmp_path}/nothing*"])
    (tmp_path / "a.json").write_text("")
    with pytest.raises(ValueError, match="two files hold the task 'a'"):
        text.files([str(tmp_path)])


def write_arrays(path, **changes):
    rng = np.random.default_rng(0)
    made = {f"a_{split}_{part}": value for split, n in (("train", 20), ("test", 4)) for part, value in
            (("x", rng.integers(0, 256, (n, 6, 6)).astype(np.uint8)), ("y", np.arange(n) % 2))}
    np.savez(path, **{name: value for name, value in {**made, **changes}.items() if value is not None})
    return path


def test_arrays_are_read_scaled_and_split(tmp_path):
    read = arrays.read(write_arrays(tmp_path / "a.npz", a_classes=np.array(["no", "yes"])), "a", side=8)
    assert read.classnames == ("no", "yes") and read.classes == 2
    assert {name: part.images.shape for name, part in read.splits.items()} == {
        "train": (18, 8, 8, 3), "val": (2, 8, 8, 3), "test": (4, 8, 8, 3)}
    assert arrays.files([str(tmp_path / "a.npz")]) == {"a": tmp_path / "a.npz"}
    grey = read.splits["test"].images
    assert (grey[..., 0] == grey[..., 2]).all() and read.splits["test"].labels.dtype == np.int32


@pytest.mark.parametrize("changes, sentence", [
    (dict(a_test_y=None), "lacks the array a_test_y"), (dict(a_test_y=np.zeros(3, int)), "needs 4 integers"),
    (dict(a_train_x=np.zeros((20, 6, 6))), "type float64; images are"), (dict(a_classes=np.array(["no"])),
                                                                         "1 class names, but labels up to 1"),
])
def test_arrays_that_are_wrong(tmp_path, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        arrays.read(write_arrays(tmp_path / "a.npz", **changes), "a")


def test_files_that_are_no_arrays(tmp_path):
    (tmp_path / "a.npz").write_text("x")
    np.savez(tmp_path / "b.npz", x=np.zeros(2))
    np.save(tmp_path / "c.npy", np.zeros(2))
    for name, sentence in (("a.npz", "is no .npz"), ("b.npz", "holds no task"), ("c.npy", "is one array"),
                           ("d.npz", "there is no file")):
        with pytest.raises(ValueError, match=sentence):
            arrays.tasks(tmp_path / name)


@pytest.fixture
def folder(tmp_path):
    """A root with mnist as images of 10 classes, train and test."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 3), ("test", 1)):
        for digit in range(10):
            place = tmp_path / "mnist" / split / str(digit)
            place.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(rng.integers(0, 256, (12, 9)).astype(np.uint8)).save(place / f"{i}.png")
    return tmp_path


EXAMPLES = {"train": 100, "val": 100, "test": 100}


def test_images_of_a_folder(folder):
    found, said = images.read("mnist", [str(folder)], side=8, examples={**EXAMPLES, "test": 4})
    assert {name: part.images.shape for name, part in found.items()} == {
        "train": (27, 8, 8, 3), "val": (3, 8, 8, 3), "test": (4, 8, 8, 3)}
    assert said.startswith(f"folder {folder / 'mnist'}; val: 3 of 30 training images")
    assert sorted(np.concatenate([found["train"].labels, found["val"].labels]).tolist()) == sorted([*range(10)] * 3)


def test_a_validation_folder_is_used_where_the_task_has_one(folder):
    (folder / "mnist").rename(folder / "eurosat")
    for split in ("train", "test"):
        for i, name in enumerate(vision.task("eurosat").folders):
            (folder / "eurosat" / split / str(i)).rename(folder / "eurosat" / split / name)
    (folder / "eurosat" / "test" / "River" / "0.png").rename(folder / "river.png")
    for name in vision.task("eurosat").folders:
        place = folder / "eurosat" / "val" / name
        place.mkdir(parents=True)
        Image.new("RGB", (8, 8), (7, 7, len(name))).save(place / "0.png")
    found, said = images.read("eurosat", [str(folder)], side=8, examples=EXAMPLES)
    assert said.endswith("its own val") and len(found["val"].labels) == 10
    assert sorted(found["test"].labels.tolist()) == [0, 1, 2, 3, 4, 5, 6, 7, 9]  # "River" is 8


def test_images_that_do_not_decode_are_named(folder):
    (folder / "mnist" / "test" / "3" / "0.png").write_bytes(b"not an image")
    with pytest.raises(ValueError, match="3/0.png is no image that can be decoded"):
        images.read("mnist", [str(folder)], side=8, examples=EXAMPLES)


def test_classes_that_are_not_the_heads(folder):
    (folder / "mnist" / "train" / "9").rename(folder / "mnist" / "train" / "nine")
    (folder / "mnist" / "test" / "9").rename(folder / "mnist" / "test" / "nine")
    with pytest.raises(ValueError, match="a class 'nine', which is none of mnist's 10"):
        images.read("mnist", [str(folder)], side=8, examples=EXAMPLES)
    with pytest.raises(ValueError, match="has 9 classes, but mnist has 10"):
        images.classes(vision.task("mnist"), tuple("012345678"), "it")


def test_test_images_that_were_trained_on_are_refused(folder):
    for digit in range(10):
        place = folder / "mnist" / "test" / str(digit) / "0.png"
        place.write_bytes((folder / "mnist" / "train" / str(digit) / "0.png").read_bytes())
    with pytest.raises(ValueError, match="test images are training images too"):
        images.read("mnist", [str(folder)], side=8, examples=EXAMPLES)


def test_training_on_train_and_val_where_the_papers_do():
    made = lambda n, first: sources.Records(np.full(n, first), lambda i: (first, i), lambda i: f"{first}.{i}")
    source = sources.Source("", (), {"train": made(20, 0), "val": made(10, 1), "test": made(5, 2)})
    rows, said = images._rows(vision.task("dtd"), source)
    records, indices = rows["train"]
    assert len(records.labels) == 30 and "val: 3 of 30" in said and rows["test"][0] is source.splits["test"]
    assert [records.get(i) for i in (0, 19, 20, 29)] == [(0, 0), (0, 19), (1, 0), (1, 9)]


def test_the_crop_is_that_of_clips_processor():
    transformers = pytest.importorskip("transformers")
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16},
                                                   do_normalize=False, do_rescale=False)
    rng = np.random.default_rng(0)
    for shape in ((20, 33, 3), (41, 17, 3), (16, 16, 3)):
        image = Image.fromarray(rng.integers(0, 256, shape).astype(np.uint8))
        theirs = processor(image, return_tensors="np")["pixel_values"][0]
        np.testing.assert_array_equal(images.crop(image, 16), np.moveaxis(theirs, 0, -1).astype(np.uint8))


def test_a_task_without_a_source_says_what_to_put_where(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"gtsrb.*put its images into .*gtsrb/{train,test}/CLASS/.*tanganke/gtsrb"):
        sources.check(vision.task("gtsrb"), [str(tmp_path)])
    with pytest.raises(ValueError, match="there is no folder nowhere"):
        sources.check(vision.task("gtsrb"), ["nowhere"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: object())
    assert sources.check(vision.task("gtsrb"), []) == "hub tanganke/gtsrb"


def test_data_sets_that_were_saved(tmp_path):
    datasets = pytest.importorskip("datasets")
    rng = np.random.default_rng(0)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=[*"0123456789"])})
    part = lambda n: datasets.Dataset.from_dict(
        {"image": [Image.fromarray(rng.integers(0, 256, (8, 8)).astype(np.uint8)) for _ in range(n)],
         "label": [i % 10 for i in range(n)]}, features=features)
    datasets.DatasetDict(train=part(20), test=part(10)).save_to_disk(str(tmp_path / "mnist"))
    found, said = images.read("mnist", [str(tmp_path)], side=8, examples=EXAMPLES)
    assert said.startswith("data set saved in") and found["test"].labels.tolist() == [*range(10)]
    datasets.DatasetDict(train=part(20), test=part(10)).rename_column("label", "digit").save_to_disk(
        str(tmp_path / "svhn"))
    with pytest.raises(ValueError, match="no column 'label'; there are image, digit"):
        images.read("svhn", [str(tmp_path)], side=8, examples=EXAMPLES)


def test_tensorflow_datasets():
    tfds = pytest.importorskip("tensorflow_datasets")
    with tfds.testing.mock_data(num_examples=30):
        source = sources._tfds(vision.task("mnist"))
        assert source.names == tuple("0123456789") and source.said.startswith("tfds mnist")
        assert source.splits["train"].get(3).size == (28, 28) and len(source.splits["test"].labels) == 30


def test_a_copy_of_tfrecords_is_a_sentence(monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")

    class Builder:
        info = type("Info", (), {"splits": {"train": 1, "test": 1}})
        data_dir = "somewhere"

        def as_data_source(self, split):
            raise NotImplementedError
    monkeypatch.setattr(tfds, "builder", lambda name: Builder())
    with pytest.raises(ValueError, match="of TFRecords.* file_format='array_record'"):
        sources._tfds(vision.task("mnist"))
