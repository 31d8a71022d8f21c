"""The report of linearised fine-tuning: addition first, then negation, single models, linearity, geometry, cost."""
from tvjax.reports import linearised
from tvjax.reports.linearised import chosen


def sections(run):
    """The sections of the page."""
    return chosen(run, linearised.fusions, linearised.negation, linearised.single, linearised.linearity,
                  linearised.geometry, linearised.planes, linearised.scaling, linearised.cost)
