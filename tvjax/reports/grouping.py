"""Tables that keep apart what is not comparable: one for each kind of data that methods saw, never a mixed one.

Rows carry `family`, `data`, `seen` and `added` (`tvjax.experiment.columns`). Anchors stand in every group.
"""
from tvjax import results

TITLES = {
    "none": "no data",
    "unlabelled": "a few unlabelled inputs, none of the test split",
    "labelled": "a few labelled examples, none of the test split",
    "test": "unlabelled inputs of the test split: test-time adaptation, which no method of another group may do",
}
ANCHORS = ("zero-shot", "fine-tuned")


def grouped(rows, *, tasks: int, section, anchors: bool = True) -> dict[str, results.Table]:
    """{caption: table} of methods of a section (or several): absolute and normalised test accuracy, what each saw.

    A table holds one kind of data and one checkpoint family.
    """
    sections = (section,) if isinstance(section, str) else tuple(section)
    chosen = [row for row in results.select(rows, split="test", task="average", tasks=tasks)
              if row["metric"] in ("accuracy", "normalised accuracy")]
    ends = [row for row in chosen if row["method"] in ANCHORS]
    mine = [row for row in chosen if row.get("section") in sections and row["method"] not in ANCHORS]
    found = {}
    for family in dict.fromkeys(row["family"] for row in mine):
        for kind, title in TITLES.items():
            group = [row for row in mine if row["data"] == kind and row["family"] == family]
            if group:
                found[f"{tasks} tasks, {family}: {title} (test accuracy, %)"] = _table(
                    [*(ends if anchors else ()), *group])
    return found


def _table(rows) -> results.Table:
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        cells = [spread([row["value"] for row in mine if row["metric"] == metric])
                 for metric in ("accuracy", "normalised accuracy")]
        scales = [row["scale"] for row in mine if row["metric"] == "accuracy" and "scale" in row]
        alpha = ", ".join(f"{scale:g}" for scale in dict.fromkeys(scales)) or "–"
        lines.append((method, *cells, alpha, mine[0].get("seen", "nothing"), f"{mine[0].get('added', 0):,}"))
    return results.Table(("method", "accuracy", "normalised", "α", "saw", "parameters added"), tuple(lines))


def spread(values):
    """The mean and deviation of several seeds, the value of one, None of none."""
    if not values:
        return None
    return results.mean_std(values) if len(values) > 1 else values[0]


def by(rows, metric: str, *, index: str, columns: str) -> results.Table:
    """A table of one metric by two fields, with mean and deviation over what else varies."""
    chosen = [row for row in rows if row["metric"] == metric]
    several = len({(row[index], row[columns]) for row in chosen}) < len(chosen)
    how: dict = {"reduce": results.mean_std} if several else {}
    return results.pivot(chosen, index=index, columns=columns, **how)
