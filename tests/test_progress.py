"""A long job says how far it is and how long it still takes."""
from tvjax.experiment import progress


def test_what_is_left_follows_from_what_was_done(monkeypatch):
    clock, said = iter([0.0, 100.0, 150.0]), []
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    assert list(progress.counted((7, 8, 9), said.append, "seeds")) == [7, 8, 9]
    assert said == ["1 of 3 seeds done; about 3.33 min left for the others",
                    "2 of 3 seeds done; about 75 s left for the others"]


def test_one_item_needs_no_words():
    said = []
    assert list(progress.counted([1], said.append, "seeds")) == [1]
    assert list(progress.counted([], said.append, "")) == []
    assert not said
