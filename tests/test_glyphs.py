"""The glyph benchmark: what it promises about tasks, splits, pre-training domains and the CLIP that ships with it."""
import unicodedata

import numpy as np
import pytest

from tvjax.data import domains, fonts, glyphs

EVERY = (*glyphs.TASKS, glyphs.CONTROL)


def rows_of(tasks):
    return np.array([t.domain for t in tasks], np.float32)


def test_twenty_tasks_in_three_suites():
    assert len(glyphs.TASKS) == len({t.name for t in glyphs.TASKS}) == 20
    assert [len(glyphs.suite(n)) for n in (8, 14, 20)] == [8, 14, 20]
    assert glyphs.suite(14) == glyphs.suite(20)[:14]
    assert all(12 <= len(t.chars) <= 60 for t in glyphs.TASKS)


def test_classnames_are_the_unicode_names():
    assert glyphs.task("greek").classnames[0] == "greek small letter alpha"
    for task in EVERY:
        assert [unicodedata.lookup(n.upper()) for n in task.classnames] == list(task.chars)
        assert all("{}" in t for t in task.templates)


def test_no_character_belongs_to_two_tasks_nor_to_a_task_and_the_control():
    chars = "".join(t.chars for t in EVERY)
    assert len(set(chars)) == len(chars)


def test_same_seed_same_images_other_seed_other_images_and_classes_are_balanced():
    first, again, other = (glyphs.load("digits", "val", seed=s) for s in (0, 0, 1))
    assert np.array_equal(first.images, again.images) and np.array_equal(first.labels, again.labels)
    assert not np.array_equal(first.images, other.images)
    assert first.images.shape == (glyphs.SIZES["val"], 32, 32, 3) and first.images.dtype == np.uint8
    counts = np.bincount(first.labels, minlength=len(glyphs.task("digits").chars))
    assert first.labels.dtype == np.int32 and counts.max() - counts.min() <= 1


@pytest.mark.parametrize("task", EVERY, ids=lambda t: t.name)
def test_splits_share_no_font_or_no_slant(task):
    for char in task.chars:
        by_split = [set(glyphs.faces(char, s)) for s in glyphs.SIZES]
        assert all(by_split)
        slants = [np.abs(glyphs.slants(char * 20, s, np.random.default_rng(0))) for s in glyphs.SIZES]
        apart = all(a.max() < b.min() for a, b in zip(slants, slants[1:], strict=False))
        assert apart or not (by_split[0] & by_split[1] or by_split[0] & by_split[2] or by_split[1] & by_split[2])


def test_every_glyph_has_ink_and_differs_from_the_others_of_its_task():
    for task in EVERY:
        for split in glyphs.SIZES:
            drawn = [fonts.master(c, glyphs.faces(c, split)[0]) for c in task.chars]
            assert min(int((m > 127).sum()) for m in drawn) >= 12, (task.name, split)
        if task is not glyphs.CONTROL:
            assert len({fonts.master(c, "DejaVuSans").tobytes() for c in task.chars}) == len(task.chars)


def test_pretraining_domains_keep_away_from_every_task():
    assert (domains.outside(rows_of(glyphs.TASKS)) >= domains.MARGIN).all()
    drawn = domains.draw(np.random.default_rng(0), 500, rows_of(EVERY))
    assert drawn.shape == (500, len(domains.FIELDS)) and (domains.outside(drawn) == 0).all()
    assert domains.distance(drawn[:, None], rows_of(EVERY)[None]).min() >= domains.MARGIN


def test_draw_refuses_rows_near_those_to_avoid():
    near = domains.draw(np.random.default_rng(0), 1, np.zeros((0, len(domains.FIELDS)), np.float32))
    assert domains.distance(domains.draw(np.random.default_rng(0), 50, near), near).min() >= domains.MARGIN


def test_a_domain_changes_what_it_names():
    masters = np.stack([fonts.master("A", "DejaVuSans")] * 4)
    render = lambda rows: domains.render(masters, rows, np.zeros(4), np.random.default_rng(0))
    still = lambda **fields: render(np.tile(domains.domain(**fields), (4, 1)))
    plain = still().astype(float)
    assert plain.max() > 200 and plain.min() < 40
    for field in ("angle", "weight", "outline", "blur", "stripes", "checks", "clouds", "shade", "noise", "occlusion"):
        assert np.abs(still(**{field: 30.0 if field == "angle" else 0.5}) - plain).mean() > 2, field


def test_slips_are_answered_in_one_sentence():
    with pytest.raises(ValueError, match="did you mean 'greek'"):
        glyphs.task("greeek")
    with pytest.raises(ValueError, match="train, val, test"):
        glyphs.load("greek", "dev")
    with pytest.raises(ValueError, match="8, 14 and 20"):
        glyphs.suite(9)
    with pytest.raises(ValueError, match="unknown domain field"):
        domains.domain(colour=1)
    with pytest.raises(ValueError, match="no font"):
        fonts.master("A", "Helvetica")


def test_contact_sheet():
    assert glyphs.contact_sheet("ogham", "val", columns=5, rows=2).size == (170, 68)


def test_shipped_clip_is_an_ordinary_hugging_face_checkpoint_and_knows_glyphs():
    torch = pytest.importorskip("torch")
    from transformers import CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

    path = glyphs.pretrained_dir()
    assert (path / "model.safetensors").stat().st_size <= 8 * 2**20
    model, tokenizer = CLIPModel.from_pretrained(path), CLIPTokenizer.from_pretrained(path)
    processor = CLIPImageProcessorPil.from_pretrained(path)
    task, split = glyphs.task("greek"), glyphs.load("greek", "val")
    pixels = processor(list(split.images[:100]), return_tensors="pt")["pixel_values"]
    expected = split.images[:100].astype(np.float32).transpose(0, 3, 1, 2) / 127.5 - 1
    np.testing.assert_allclose(pixels.numpy(), expected, atol=1e-6)
    prompts = tokenizer([task.templates[1].format(n) for n in task.classnames], padding=True, return_tensors="pt")
    with torch.no_grad():
        scores = model(pixel_values=pixels, **prompts).logits_per_image
    assert float((scores.argmax(1).numpy() == split.labels[:100]).mean()) > 5 / len(task.chars)


def test_the_first_few_are_those_of_the_whole_split():
    whole, few = glyphs.load("digits", "val"), glyphs.load("digits", "val", most=300)
    np.testing.assert_array_equal(few.images, whole.images[:300])
    np.testing.assert_array_equal(few.labels, whole.labels[:300])
