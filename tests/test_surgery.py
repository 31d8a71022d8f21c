"""Representation Surgery: it starts as the merged model, learns a bias away, and says what does not fit."""
import numpy as np
import pytest

from tvjax.learning import surgery

Z = np.random.default_rng(0).standard_normal((64, 6)).astype(np.float32)


def test_it_begins_at_the_merged_model_and_takes_a_bias_out():
    start, losses = surgery.train(Z, Z, rank=3, steps=1)
    np.testing.assert_allclose(surgery.repaired(start, Z), Z, atol=0.003)  # one step of Adam away
    assert losses[0] == 0 and start["A"].shape == (3, 6) and start["B"].shape == (6, 3)
    target = Z - 0.5 * np.maximum(Z @ np.eye(6, dtype=np.float32)[:, :2], 0) @ np.eye(2, 6, dtype=np.float32)
    repair, losses = surgery.train(Z, target, rank=4, steps=600, lr=1e-2, batch=32)
    before, after = np.abs(Z - target).mean(), np.abs(np.asarray(surgery.repaired(repair, Z)) - target).mean()
    assert after < 0.5 * before and losses.shape == (600,)


@pytest.mark.parametrize("given, message", [
    ((Z, Z[:3]), r"rows for the same inputs; got shapes \(64, 6\) and \(3, 6\)"), ((Z, Z, 0), "rank is at least 1")])
def test_slips_get_one_sentence(given, message):
    with pytest.raises(ValueError, match=message):
        surgery.train(*given[:2], rank=(*given, 16)[2], steps=1)
