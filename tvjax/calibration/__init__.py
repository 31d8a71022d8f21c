"""Calibration: what a task's examples say of each parameter, by true per-example gradients, and masks made of it."""
from tvjax.calibration.analysis import chance, iou, localisation, noised, occupancy, pruned, shares
from tvjax.calibration.eligible import ATTENTION, BIASES, is_scored, kind, scored
from tvjax.calibration.gradients import REDUCTIONS, chunk_size, per_example, reduced
from tvjax.calibration.masks import (
    at_random,
    by_magnitude,
    by_score,
    check_sparsity,
    count,
    densities,
    full,
    lota,
    narrowed,
)
from tvjax.calibration.rounds import PRESETS, Calibrated, calibrate, preset
from tvjax.calibration.scores import SCORES, draw_classes, of_choices, of_classifier, sensitivity
from tvjax.calibration.sparse_files import load_mask, load_sparse, save_mask, save_sparse

__all__ = [
    "ATTENTION", "BIASES", "Calibrated", "PRESETS", "REDUCTIONS", "SCORES", "at_random", "by_magnitude", "by_score",
    "calibrate", "chance", "check_sparsity", "chunk_size", "count", "densities", "draw_classes", "full", "iou",
    "is_scored", "kind", "load_mask", "load_sparse", "localisation", "lota", "narrowed", "noised", "occupancy",
    "of_choices", "of_classifier", "per_example", "preset", "pruned", "reduced", "save_mask", "save_sparse",
    "scored", "sensitivity", "shares",
]
