"""The report of partial linearisation: fusions first, then single models, geometry, planes, sizes, cost."""
from tvjax.reports import linearised
from tvjax.reports.linearised import chosen


def sections(run):
    """The sections of the page."""
    return chosen(run, linearised.fusions, linearised.single, linearised.geometry, linearised.planes,
                  linearised.scaling, linearised.linearity, linearised.negation, linearised.cost)
