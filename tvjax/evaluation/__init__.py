"""Judging models: zero-shot heads, accuracies, the search for a scale, disentanglement, and what it all cost."""
from tvjax.evaluation.cache import cached, content_key
from tvjax.evaluation.cost import Cost, meter
from tvjax.evaluation.heads import classify, classify_linearised, plain, unit, zero_shot_head
from tvjax.evaluation.interference import (
    disagreement,
    disentanglement,
    disentanglement_pairs,
    off_diagonal_mean,
)
from tvjax.evaluation.points import combined, moved, paired, shifted
from tvjax.evaluation.probe import features, linear_probe, probe_head
from tvjax.evaluation.scales import GRID, Search, search, search_negation
from tvjax.evaluation.top1 import (
    absolute,
    accuracies,
    accuracy,
    nonlinear_advantage,
    normalised,
    predictions,
    sweep,
)

__all__ = [
    "Cost", "GRID", "Search", "absolute", "accuracies", "accuracy", "cached", "classify", "classify_linearised",
    "combined", "content_key", "disagreement", "disentanglement", "disentanglement_pairs", "features",
    "linear_probe", "meter", "moved", "nonlinear_advantage", "normalised", "off_diagonal_mean", "paired",
    "plain", "predictions", "probe_head", "search", "search_negation", "shifted", "sweep", "unit", "zero_shot_head",
]
