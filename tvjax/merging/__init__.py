"""Merging: operators on task vectors. `METHODS` holds the papers' methods by name; their steps are public too."""
from tvjax.merging.averaging import average, largest, mean, nonzero_mean, scale, task_arithmetic, total, weigh
from tvjax.merging.dropping import dare, dare_ties, della, della_linear, drop, drop_by_rank
from tvjax.merging.lowrank import LowRank
from tvjax.merging.magnitude import breadcrumbs, breadcrumbs_ties, emr, emr_mask, emr_rescale, magmax, pcb, tails
from tvjax.merging.masks import consensus, needed, needed_by
from tvjax.merging.numbers import by_depth, by_name, entries, per_leaf
from tvjax.merging.operator import Operator, Stage, identity, matrix, named, on, step
from tvjax.merging.registry import METHODS, build
from tvjax.merging.signs import agree, disjoint_merge, ties, top
from tvjax.merging.spectral import iso_c, tsv_m
from tvjax.merging.spherical import karcher, model_stock, multi_slerp, nuslerp, slerp
from tvjax.merging.statistics import Greatest, Kth, Least, Sum
from tvjax.merging.thetas import merge
from tvjax.merging.weighting import by_layer, lines, metagpt, nan, weigh_by_norm

__all__ = [
    "Greatest", "Kth", "Least", "LowRank", "METHODS", "Operator", "Stage", "Sum", "agree", "average", "breadcrumbs",
    "breadcrumbs_ties", "build", "by_depth", "by_layer", "by_name", "consensus", "dare", "dare_ties", "della",
    "della_linear", "disjoint_merge", "drop", "drop_by_rank", "emr", "emr_mask", "emr_rescale", "entries", "identity",
    "iso_c", "karcher", "largest", "lines", "magmax", "matrix", "mean", "merge", "metagpt", "model_stock",
    "multi_slerp", "named", "nan", "needed", "needed_by", "nonzero_mean", "nuslerp", "on", "pcb", "per_leaf", "scale",
    "slerp", "step", "tails", "task_arithmetic", "ties", "top", "total", "tsv_m", "weigh", "weigh_by_norm",
]
