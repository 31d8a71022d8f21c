"""Merging: operators on task vectors. `METHODS` holds the papers' methods by name; the steps they are composed of are public too."""
from tvjax.merging.averaging import average, largest, mean, nonzero_mean, scale, task_arithmetic, total, weigh
from tvjax.merging.masks import consensus, needed
from tvjax.merging.lowrank import LowRank
from tvjax.merging.numbers import by_depth, by_name, entries, per_leaf
from tvjax.merging.operator import Operator, Stage, identity, matrix, named, on, step
from tvjax.merging.registry import METHODS, build
from tvjax.merging.spectral import iso_c, tsv_m
from tvjax.merging.statistics import Greatest, Kth, Least, Sum
from tvjax.merging.signs import agree, ties, top
from tvjax.merging.thetas import merge

__all__ = [
    "METHODS", "Greatest", "Kth", "Least", "LowRank", "Operator", "Stage", "Sum", "agree", "average", "build", "by_depth", "by_name", "consensus",
    "entries", "identity", "iso_c", "largest", "matrix", "mean", "merge", "named", "needed", "nonzero_mean", "on", "per_leaf", "scale", "step",
    "task_arithmetic", "ties", "top", "total", "tsv_m", "weigh",
]
