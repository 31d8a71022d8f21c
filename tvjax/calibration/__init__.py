"""Calibration: what a task's examples say of each parameter, by true per-example gradients."""
from tvjax.calibration.gradients import REDUCTIONS, chunk_size, per_example, reduced

__all__ = ["REDUCTIONS", "chunk_size", "per_example", "reduced"]
