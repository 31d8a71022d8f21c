"""The job "tangent": standard and linearised fine-tuning, added and negated, and how linear tuned models are
(arXiv:2305.12827)."""
from tvjax.experiment.partial_job import run
from tvjax.experiment.partial_plan import partial_plan as plan

__all__ = ["plan", "run"]
