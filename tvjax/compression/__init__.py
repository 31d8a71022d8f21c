"""Compression: task vectors in few bits (`Codec`), TALL-masks, their statistics, a store on disk, switching."""
from tvjax.compression.agreement import classes, consensus_of, overlaps, profile
from tvjax.compression.bits import Bits, Codes, pack, unpack, where_bits
from tvjax.compression.codec import Codec, State, count_bits, stored_bytes, write
from tvjax.compression.lowrank import tsv_c
from tvjax.compression.quantised import bitdelta, emr_codec, rtvq, tvq
from tvjax.compression.registry import CODECS, build_codec
from tvjax.compression.sizes import Counts, formula, gigabits
from tvjax.compression.sparse import matched_density, t_switch, top_k, ultra_delta
from tvjax.compression.tall import (
    choose_lambdas,
    magnitude_masking,
    multi_task_vector,
    reconstruct,
    scaling_vector,
    tall_codec,
    tall_mask,
    tall_masks,
)

__all__ = [
    "Bits", "CODECS", "Codec", "Codes", "Counts", "State", "bitdelta", "build_codec", "choose_lambdas", "classes",
    "consensus_of", "count_bits",
    "emr_codec", "formula", "gigabits", "magnitude_masking", "matched_density", "multi_task_vector", "overlaps", "pack",
    "profile", "reconstruct", "rtvq", "scaling_vector", "stored_bytes", "t_switch", "tall_codec", "tall_mask",
    "tall_masks", "top_k", "tsv_c", "tvq", "ultra_delta", "unpack", "where_bits", "write",
]
