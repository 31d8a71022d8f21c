"""An experiment from end to end: a config checked (`plan`), model and data loaded (`problem`), the job done (`run`)."""
from tvjax.experiment.job import final_table, run
from tvjax.experiment.loading import Problem, problem
from tvjax.experiment.planning import Merge, Plan, plain, plan
from tvjax.experiment.workdir import check_owner

__all__ = ["Merge", "Plan", "Problem", "check_owner", "final_table", "plain", "plan", "problem", "run"]
