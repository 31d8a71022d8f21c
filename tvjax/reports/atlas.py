"""The report of learned scaling: a section for every study that a run has rows of, with mean ± deviation over seeds."""
from tvjax import results
from tvjax.reports import Section, figures
from tvjax.reports.grouping import spread

AVERAGE = "average"


def sections(run) -> list[Section]:
    """The sections of the page, the studies in the order in which they ran."""
    parts = dict.fromkeys(row["part"] for row in run.rows if "part" in row)
    made = [(name, [row for row in run.rows if row.get("part") == name]) for name in parts]
    return [SECTIONS[name](rows) for name, rows in made if name in SECTIONS]


def _of(rows, **equals):
    return [row for row in rows if all(row.get(name) == value for name, value in equals.items())]


def _cell(rows, **equals):
    return spread([row["value"] for row in _of(rows, **equals)])


def _names(rows, field="method"):
    return list(dict.fromkeys(row[field] for row in rows if field in row))


def _table(rows, *, index="method", columns, heads=None, **equals) -> results.Table:
    """One line for each value of `index`, one column for each of `columns`, mean ± deviation over the rest."""
    chosen = _of(rows, **equals)
    places = _names(chosen, columns)
    lines = [(name, *(_cell(chosen, **{index: name, columns: place}) for place in places))
             for name in _names(chosen, index)]
    return results.Table((index, *(heads or (str(place) for place in places))), tuple(lines))


def _curves(rows, *, x, **equals):
    """{method: {x: values}} of accuracies in percent."""
    chosen = [row for row in _of(rows, **equals) if x in row]
    return {name: {place: [100 * row["value"] for row in _of(chosen, method=name, **{x: place})]
                   for place in sorted({row[x] for row in _of(chosen, method=name)})} for name in _names(chosen)}


def addition(rows) -> Section:
    methods = _names(_of(rows, metric="accuracy", split="test", task=AVERAGE))
    main = tuple((name, _cell(rows, method=name, metric="accuracy", split="test", task=AVERAGE),
                  _cell(rows, method=name, metric="normalised accuracy", split="test", task=AVERAGE),
                  _cell(rows, method=name, metric="xi", task=AVERAGE), _cell(rows, method=name, metric="control"))
                 for name in methods)
    seconds = tuple((name, _cell(rows, method=name, metric="seconds"),
                     spread([row["numbers"] for row in _of(rows, method=name, metric="accuracy", split="test",
                                                           task=AVERAGE)][:1]))
                    for name in methods if _of(rows, method=name, metric="seconds"))
    tables = {
        "Test accuracy, pair-wise ξ on validation images and accuracy on the control (%)":
            results.Table(("method", "accuracy", "normalised", "ξ", "control"), main),
        "By task: test accuracy (%)": _table([row for row in rows if row["task"] != AVERAGE], columns="task",
                                              metric="accuracy", split="test"),
    }
    drawn = {"Normalised validation accuracy over epochs": figures.lines(
        {name: {epoch: [100 * row["value"] for row in _of(rows, metric="trace", method=name, epoch=epoch)]
                for epoch in sorted({row["epoch"] for row in _of(rows, metric="trace", method=name)})}
         for name in _names(_of(rows, metric="trace"))}, x="epoch", y="normalised accuracy (%)")}
    for by in ("kind", "depth", "vector"):
        chosen = _of(rows, metric="coefficients", by=by)
        if chosen:
            drawn[f"Coefficients by {by}"] = figures.boxes(
                {group: [x for row in _of(chosen, group=group) for x in (row["least"], row["lower"], row["value"],
                                                                         row["upper"], row["greatest"])]
                 for group in _names(chosen, "group")}, y="λ")
    notes = [f"{name}: {_said(time)} s of learning or searching; {count[0] if isinstance(count, tuple) else count:g} "
             "numbers" for name, time, count in seconds]
    notes.append("Boxes are drawn from the five numbers of every seed's coefficients.")
    return Section("Task addition", "All tasks in one model. Validation data choose; test data are reported.", tables,
                   drawn, notes)


def _said(cell) -> str:
    return f"{cell[0]:.0f} ± {cell[1]:.0f}" if isinstance(cell, tuple) else f"{cell:.0f}"


def fractions(rows) -> Section:
    heads = [f"{100 * share:g} %" for share in _names(rows, "share")]
    return Section("Addition with less data", "Shares of the validation splits, on which both learn.", {
        "Average test accuracy (%)": _table(rows, columns="share", heads=heads, metric="accuracy", task=AVERAGE),
        "Accuracy on the control (%)": _table(rows, columns="share", heads=heads, metric="control")},
        {"Accuracy over the share of data": figures.lines(_curves(rows, x="share", metric="accuracy", task=AVERAGE),
                                                          x="share of the validation data", y="accuracy (%)")})


def negation(rows) -> Section:
    lines = tuple((name, _cell(rows, method=name, metric="target", task=AVERAGE),
                   _cell(rows, method=name, metric="control", task=AVERAGE)) for name in _names(rows))
    return Section("Task negation", "One task is forgotten at a time; the control keeps 95 % on validation data.", {
        "Test accuracy on the target (lower is better) and on the control (%)":
            results.Table(("method", "target", "control"), lines),
        "By task: target (%)": _table([row for row in rows if row["task"] != AVERAGE], columns="task",
                                      metric="target")})


def fewshot(rows) -> Section:
    return Section("Few shots", "The target's own vector is left out; mean ± deviation over targets and draws.", {
        "Test accuracy over targets (%), by shots a class": _table(rows, columns="shots"),
        "By target, all shots together (%)": _table(rows, columns="task")},
        {"Accuracy over shots": figures.lines(_curves(rows, x="shots"), x="shots a class", y="accuracy (%)", log=True)})


def domains(rows) -> Section:
    """Classes of the target under looks that the shots did not have."""
    tables = {f"Test accuracy on {domain} images (%), by shots a class": _table(rows, columns="shots", domain=domain)
              for domain in _names(rows, "domain")}
    return Section("Other domains", "The models of the few shots, judged where they have not learned.", tables)


def contribution(rows) -> Section:
    targets, sources = _names(rows, "task"), _names(rows, "other")
    matrix = [[_first(_cell(rows, task=target, other=source)) for source in sources] for target in targets]
    percent = [[100 * value for value in line] for line in matrix]
    lines = tuple((target, *line) for target, line in zip(targets, matrix, strict=True))
    return Section("What one vector contributes", "Gain over zero-shot, in points, with one vector alone.", {
        "Gain on the target (lines) from the vector (columns), points": results.Table(("target", *sources), lines)},
        {"Gain over zero-shot": figures.heat_map(percent, rows=targets, columns=sources, label="points",
                                                 diverging=True, digits=0)})


def _first(cell) -> float:
    """The mean of a cell, nan of an empty one."""
    return float("nan") if cell is None else cell[0] if isinstance(cell, tuple) else cell


def tta(rows) -> Section:
    lines = []
    for objective in _names(rows, "objective"):
        found = _of(rows, objective=objective)
        lines.append((objective, *(_cell(found, method=name) for name in ("zero-shot", "LayerNorm", "aTLAS"))))
    return Section("Test-time adaptation", "Unlabelled test images; accuracy on the same ones after the last epoch.", {
        "Accuracy over targets (%)": results.Table(("objective", "zero-shot", "LayerNorm", "aTLAS"), tuple(lines)),
        "By target (%)": _table([{**row, "line": f"{row['objective']}: {row['method']}"} for row in rows],
                                index="line", columns="task")})


def peft(rows) -> Section:
    shares = sorted({row["share"] for row in rows if row["share"]})
    lines = []
    for name in _names(rows):
        numbers = _of(rows, method=name)[0]["numbers"]
        own = {row["share"] for row in _of(rows, method=name)}  # what needs no data has a share of 0 alone
        cells = [_cell(rows, method=name, share=share if share in own else 0.0) for share in shares]
        lines.append((f"{name} ({numbers:,} numbers)", *cells))
    drawn = {f"Accuracy over trained numbers, {100 * share:g} % of the data": figures.lines(
        {name: {max(_of(rows, method=name)[0]["numbers"], 1): [100 * row["value"] for row in
                                                               _of(rows, method=name, share=share)]}
         for name in _names(rows) if _of(rows, method=name, share=share)},
        x="numbers trained", y="accuracy (%)", log=True) for share in shares}
    return Section("Parameter-efficient fine-tuning", "Shares of the target's training data.", {
        "Test accuracy (%) by share of the data": results.Table(("method", *(f"{100 * s:g} %" for s in shares)),
                                                                tuple(lines))}, drawn)


def selection(rows) -> Section:
    return Section("Selection under a budget", "Learned on shots; mean ± deviation over targets and draws.", {
        "Test accuracy (%) by the number of vectors": _table(rows, columns="budget")},
        {"Accuracy over the budget": figures.lines(_curves(rows, x="budget"), x="task vectors", y="accuracy (%)")})


def basis(rows) -> Section:
    return Section("Random directions", "Coefficients on random vectors, with the moments of the pretrained tensors.", {
        "Test accuracy (%) by the number of vectors": _table(rows, columns="count")},
        {"Accuracy over the number of vectors": figures.lines(_curves(rows, x="count"), x="vectors",
                                                              y="accuracy (%)")})


def gradient_free(rows) -> Section:
    lines = tuple((name, _cell(rows, method=name)) for name in _names(rows))
    return Section("Without gradients", "The same coefficients, found by asking for losses alone.", {
        "Test accuracy (%)": results.Table(("method", "accuracy"), lines)})


SECTIONS = {"addition": addition, "fractions": fractions, "negation": negation, "fewshot": fewshot, "domains": domains,
            "contribution": contribution, "tta": tta, "peft": peft, "selection": selection, "basis": basis,
            "gradient-free": gradient_free}
