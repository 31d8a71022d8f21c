"""Merging: operators on task vectors. `METHODS` holds the papers' methods by name; their steps are public too."""
from tvjax.merging.averaging import average, largest, mean, nonzero_mean, scale, task_arithmetic, total, weigh
from tvjax.merging.cores import core_space, dc_merge, knots
from tvjax.merging.dropping import dare, dare_ties, della, della_linear, drop, drop_by_rank
from tvjax.merging.lowrank import LowRank
from tvjax.merging.magnitude import breadcrumbs, breadcrumbs_ties, emr, emr_mask, emr_rescale, magmax, pcb, tails
from tvjax.merging.masks import consensus, needed, needed_by
from tvjax.merging.metric import actmat, aswudi, fisher, regmean, swudi, wudi
from tvjax.merging.numbers import by_depth, by_name, by_task, entries, per_leaf
from tvjax.merging.operator import Operator, Stage, identity, matrix, named, on, step
from tvjax.merging.registry import METHODS, build
from tvjax.merging.selection import HEADS, averaged, exclude, left_out, retie, untie
from tvjax.merging.signs import agree, disjoint_merge, ties, top
from tvjax.merging.spectral import calibrate, cart, flatten_spectrum, iso_c, iso_cts, svc, tsv_m
from tvjax.merging.spherical import karcher, model_stock, multi_slerp, nuslerp, slerp
from tvjax.merging.statistics import Greatest, Kth, Least, Sum
from tvjax.merging.stitching import localize_and_stitch
from tvjax.merging.thetas import merge
from tvjax.merging.tools import sce, truncate
from tvjax.merging.trust import conflicts, scale_descent, tatr, tatr_zero_shot, trust_pairs, trust_region
from tvjax.merging.weighting import by_layer, lines, metagpt, nan, weigh_by_norm

__all__ = [
    "Greatest", "HEADS", "Kth", "Least", "LowRank", "METHODS", "Operator", "Stage", "Sum", "actmat", "agree", "aswudi",
    "average", "averaged", "breadcrumbs", "breadcrumbs_ties", "build", "by_depth", "by_layer", "by_name", "by_task",
    "calibrate", "cart", "conflicts", "consensus", "core_space", "dare", "dare_ties", "dc_merge", "della",
    "della_linear", "disjoint_merge", "drop", "drop_by_rank", "emr", "emr_mask", "emr_rescale", "entries", "exclude",
    "fisher", "flatten_spectrum", "identity", "iso_c", "iso_cts", "karcher", "knots", "largest", "left_out", "lines",
    "localize_and_stitch", "magmax", "matrix", "mean", "merge", "metagpt", "model_stock", "multi_slerp", "named", "nan",
    "needed", "needed_by", "nonzero_mean", "nuslerp", "on", "pcb", "per_leaf", "regmean", "retie", "scale",
    "scale_descent", "sce", "slerp", "step", "svc", "swudi", "tails", "task_arithmetic", "tatr", "tatr_zero_shot",
    "ties", "top", "total", "truncate", "trust_pairs", "trust_region", "tsv_m", "untie", "weigh", "weigh_by_norm",
    "wudi",
]
