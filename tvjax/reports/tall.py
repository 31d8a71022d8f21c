"""The report of masks and compression: merging above, compression below, agreement, Consensus over k, masks over λ."""
from tvjax import results
from tvjax.reports import Section, tall_figures

SECTIONS = ("anchor", "merging", "compression")
NOTE = ("Test accuracy in percent, in brackets normalised: the mean over tasks of accuracy over that of the model "
        "fine-tuned on the task alone, same split and seed. λ of a task, α and what else is chosen is chosen on "
        "validation data. Bits are those of the whole collection, θ0 and frozen parts included; heads, which all rows "
        "need alike, are left out. Bits/weight: of a codec's state for each trained weight and task, θ0 left out; MB: "
        "the files that hold it, names and headers included. "
        "Several seeds: mean ± deviation.")


def sections(run) -> list[Section]:
    """A section for each number of tasks, one for the control and one for the curve, as far as there are rows."""
    made = [_suite(run.rows, count) for count in counts(run.rows)]
    if any(row.get("section") == "control" for row in run.rows):
        made.append(Section("Without interference between weights", tables={"test accuracy (%)": control(run.rows)}))
    if any(row["metric"] == "curve normalised" for row in run.rows):
        accuracy, storage = tall_figures.over_tasks(run.rows)
        made.append(Section(
            "Over the number of tasks", "Mean ± deviation over orders of the tasks and seeds.",
            {"normalised test accuracy (%)": curve(run.rows)},
            {"over tasks: normalised accuracy": accuracy, "storage over tasks": storage}))
    seconds = results.select(run.rows, metric="seconds", method="all")[0]["value"]
    cost = f"This run, all that was not reused: {seconds:.0f} s on {run.header['device']}."
    return [*made[:-1], _noted(made[-1], cost)] if made else []


def _noted(section: Section, note: str) -> Section:
    return Section(section.title, section.words, section.tables, section.figures, (*section.notes, note))


def counts(rows) -> list[int]:
    """The numbers of tasks of the tables."""
    return sorted({row["tasks"] for row in results.select(rows, metric="accuracy") if row.get("section") in SECTIONS})


def _suite(rows, count: int) -> Section:
    tables = {"accuracy and storage": main_table(rows, count),
              "agreement of masks (% of entries)": classes(rows, count),
              "Consensus over k: normalised test accuracy (%)": over_k(rows, count),
              "masks over λ, one for all tasks: normalised validation accuracy (%)": over_lambda(rows, count)}
    return Section(f"{count} tasks", "", tables, _figures(rows, count), (NOTE,))


def _figures(rows, count: int) -> dict:
    drawn = {"agreement": tall_figures.agreement(rows, tasks=count),
             "classes by layer": tall_figures.profile_by(rows, tasks=count, by="layer"),
             "classes by kind": tall_figures.profile_by(rows, tasks=count, by="kind"),
             "over k": tall_figures.over_k(rows, tasks=count),
             "over lambda": tall_figures.over_lambda(rows, tasks=count),
             "pareto": tall_figures.pareto(rows, tasks=count)}
    return drawn | ({"radar": tall_figures.radar(rows, tasks=count)} if count >= 3 else {})


def main_table(rows, tasks: int) -> results.Table:
    """Merging on top, compression below."""
    lines = []
    for section in SECTIONS:
        mine = [row for row in results.select(rows, tasks=tasks, split="test", task="average")
                if row.get("section") == section and row["metric"] in ("accuracy", "normalised accuracy")]
        if section != "anchor" and mine:
            lines.append((f"*{section}*", "", "", "", ""))
        for method in dict.fromkeys(row["method"] for row in mine):
            found = results.select(mine, method=method)
            pair = [results.cell(_spread([row["value"] for row in found if row["metric"] == metric]), scale=100)
                    for metric in ("accuracy", "normalised accuracy")]
            weight = f"{found[0]['bits_per_weight']:.3g}" if "bits_per_weight" in found[0] else "–"
            files = f"{found[0]['file_bytes'] / 1e6:.3g}" if "file_bytes" in found[0] else "–"
            lines.append((method, f"{pair[0]} ({pair[1]})", f"{found[0]['bits'] / 1e9:.4g}", weight, files))
    return results.Table(("", "absolute (normalised)", "10⁹ bits", "bits/weight", "MB"), tuple(lines))


def classes(rows, tasks: int) -> results.Table:
    """Shares of catastrophic, selfish, general and universal entries by base."""
    return _pivot(results.select(rows, metric="class", by="all", tasks=tasks), columns="class")


def over_lambda(rows, tasks: int) -> results.Table:
    """Masks by base and λ."""
    return _pivot(results.select(rows, metric="lambda", tasks=tasks), columns="lam")


def over_k(rows, tasks: int) -> results.Table:
    """Consensus by base and k."""
    chosen = results.select(rows, metric="normalised accuracy", split="test", task="average", tasks=tasks)
    return _pivot(sorted((row for row in chosen if "k" in row), key=lambda row: row["k"]), index="base", columns="k")


def control(rows) -> results.Table:
    """Standard against non-overlapping fine-tuning."""
    chosen = results.select(rows, metric=["accuracy", "normalised accuracy"], split="test", task="average")
    return _pivot([row for row in chosen if row.get("section") == "control"], columns="metric")


def curve(rows) -> results.Table:
    """Methods by number of tasks."""
    return _pivot(sorted(results.select(rows, metric="curve normalised"), key=lambda row: row["tasks"]),
                  columns="tasks")


def _pivot(chosen, *, index: str = "method", columns: str) -> results.Table:
    several = len({(row[index], row[columns]) for row in chosen}) < len(chosen)
    how: dict = {"reduce": results.mean_std} if several else {}
    return results.pivot(chosen, index=index, columns=columns, **how)


def _spread(values):
    return results.mean_std(values) if len(values) > 1 else values[0]
