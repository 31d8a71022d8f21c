"""The job "llora": LoRA, LoRA linearised by module or network, and full fine-tuning, fused (arXiv:2310.04742)."""
from tvjax.experiment.partial_job import run
from tvjax.experiment.partial_plan import partial_plan as plan

__all__ = ["plan", "run"]
