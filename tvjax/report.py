"""What a run leaves for people: tables, figures and one self-contained page, drawn from its config and rows alone."""
import html
import pathlib
import statistics

from tvjax import plotting, report_words, reports, results
from tvjax.plotting import ANCHORS
from tvjax.reports import Run, pieces


def write(folder, *, command: str) -> list[pathlib.Path]:
    """Writes tables.md, tables.tex, figures/ (PNG and CSV) and report.html beside results.jsonl; returns their paths.

    All of them are written before any is put in its place. `command` is what the page says to type for the same run.
    """
    folder, run = pathlib.Path(folder), reports.read(folder, command=command)
    drawn = figures(run)
    pictures = {name: plotting.png(figure) for name, figure in drawn.items()}
    files: dict[pathlib.Path, bytes] = {folder / "figures" / f"{name}.png": body for name, body in pictures.items()}
    files |= {folder / "figures" / f"{name}.csv": plotting.data(figure).encode() for name, figure in drawn.items()}
    files[folder / "tables.md"] = markdown(run).encode()
    files[folder / "tables.tex"] = latex(run).encode()
    files[folder / "report.html"] = page(run, pictures).encode()
    return reports.replace(files)


def counts(run: Run) -> list[int]:
    """The numbers of tasks that were merged, the largest first."""
    return sorted({row["tasks"] for row in results.select(run.rows, metric="accuracy")}, reverse=True)


def figures(run: Run) -> dict:
    """{name: figure}; those are left out for which the run holds no data."""
    most = counts(run)[0]
    made = {f"per_task_{count}": plotting.per_task(run.rows, tasks=count) for count in counts(run)}
    if most >= 5:
        made["radar"] = plotting.radar(run.rows, tasks=most)
    if len(counts(run)) > 1:
        made["over_tasks"] = plotting.over_tasks(run.rows)
    if any(row["metric"] == "trace" for row in run.rows):
        made |= {f"over_scales_{count}": plotting.over_scales(run.rows, tasks=count) for count in counts(run)}
    if any(row["metric"] == "cosine" for row in run.rows):
        made["cosines"] = plotting.cosine_map(run.rows)
    return made


def table(run: Run, metric: str, tasks: int) -> results.Table:
    """Methods by tasks on the test split, the average first; mean and spread over seeds where there are several."""
    chosen = results.select(run.rows, metric=metric, split="test", tasks=tasks)
    chosen = sorted(chosen, key=lambda row: row["task"] != "average")
    several = len({row["seed"] for row in chosen}) > 1
    found = results.pivot(chosen, reduce=results.mean_std if several else statistics.fmean)
    order = ["zero-shot", *plotting.methods(run.rows), "fine-tuned"]
    return found._replace(lines=tuple(sorted(found.lines, key=lambda line: order.index(line[0]))))


def tables(run: Run) -> dict[str, results.Table]:
    """{title: table} of all suites, absolute and normalised."""
    titles = {"accuracy": "test accuracy (%)", "normalised accuracy": "normalised test accuracy (%)"}
    return {f"{suite(run, count)}: {title}": table(run, metric, count)
            for count in counts(run) for metric, title in titles.items()}


def suite(run: Run, tasks: int) -> str:
    """The name of the suite of so many tasks."""
    return results.select(run.rows, metric="accuracy", tasks=tasks)[0]["suite"]


def markdown(run: Run) -> str:
    """All tables as Markdown."""
    warning = f"**{report_words.SELECTED_ON_TEST}**\n\n" if run.config["select_on"] == "test" else ""
    text = [f"## {title}\n\n{results.markdown(one, scale=100)}\n" for title, one in tables(run).items()]
    return warning + "\n".join(text)


def latex(run: Run) -> str:
    """All tables as LaTeX, each under a comment that names it."""
    warning = f"% {report_words.SELECTED_ON_TEST}\n" if run.config["select_on"] == "test" else ""
    text = [f"% {title}\n{results.latex(one, scale=100)}\n" for title, one in tables(run).items()]
    return warning + "\n".join(text)


def page(run: Run, pictures: dict[str, bytes]) -> str:
    """The report: one HTML document that needs nothing beside it."""
    config, escape = run.config, html.escape
    alarms = [report_words.SELECTED_ON_TEST] if config["select_on"] == "test" else []
    alarms += dict.fromkeys(row["note"] for row in results.select(run.rows, metric="delta norm ratio") if row["note"])
    parts = [f"<h1>{escape(config['name'])}</h1>", f"<p class=lead>{escape(report_words.summary(run))}</p>",
             *(f"<p class=alarm>{escape(alarm)}</p>" for alarm in alarms)]
    for count in counts(run):
        parts += [f"<h2>{escape(_heading(run, count))}</h2>", html_table(run, count)]
    notes = [report_words.TABLE_NOTE, report_words.edges(run)]
    parts += [*(f"<p class=note>{escape(note)}</p>" for note in notes if note), "<h2>Figures</h2>"]
    parts += [pieces.picture(name, body, report_words.caption(name)) for name, body in pictures.items()]
    lines = "".join(f"<li>{escape(line)}</li>" for line in report_words.protocol(run))
    parts += [f"<h2>Protocol</h2><ul>{lines}</ul>",
              "<h2>Methods</h2>", pieces.words(*report_words.method_table(run)),
              "<h2>Cost</h2>", pieces.words(*report_words.cost_table(run)),
              "<h2>To reproduce</h2>", f"<pre>{escape(run.command)}</pre>",
              pieces.folded("Config", config), pieces.folded("Versions and hashes", run.header)]
    return pieces.page(config["name"], parts)


def _heading(run: Run, tasks: int) -> str:
    return f"{tasks} task{'s' if tasks > 1 else ''} merged"


def html_table(run: Run, tasks: int) -> str:
    """Methods by tasks: accuracy, below it in grey the normalised one; the best merge of each column is bold."""
    absolute, relative = (table(run, metric, tasks) for metric in ("accuracy", "normalised accuracy"))
    scales: dict[str, set] = {}
    for row in results.select(run.rows, metric="accuracy", tasks=tasks):
        scales.setdefault(row["method"], set()).update([row["scale"]] if "scale" in row else [])
    merges = [line for line in absolute.lines if line[0] not in ANCHORS]
    best = [max((_mean(line[i]) for line in merges), default=None) for i in range(1, len(absolute.columns))]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("method", "α", *absolute.columns[1:]))
    lines = []
    for line, ratio in zip(absolute.lines, relative.lines, strict=True):
        anchor = line[0] in ANCHORS
        cells = "".join(_cell(x, r, best=not anchor and _mean(x) == top, spread=i == 0)
                        for i, (x, r, top) in enumerate(zip(line[1:], ratio[1:], best, strict=True)))
        alpha = ", ".join(f"{scale:g}" for scale in sorted(scales[line[0]])) or "–"
        kind = " class=anchor" if anchor else ""
        lines.append(f"<tr{kind}><th>{html.escape(line[0])}</th><td>{alpha}</td>{cells}</tr>")
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f"<div class=wide><table class=judged>{body}</table></div>"


def _cell(absolute, relative, *, best: bool, spread: bool) -> str:
    """A cell; where `spread` is not to be shown, it appears when the mouse rests on the cell."""
    whole = lambda x: f"{100 * x[0]:.1f} ± {100 * x[1]:.1f}" if isinstance(x, tuple) else f"{100 * x:.1f}"
    show = whole if spread else lambda x: f"{100 * _mean(x):.1f}"
    text = f"<b>{show(absolute)}</b>" if best else show(absolute)
    title = "" if spread or not isinstance(absolute, tuple) else f" title='{whole(absolute)} ({whole(relative)})'"
    return f"<td{title}>{text}<small>{show(relative)}</small></td>"


def _mean(x) -> float:
    return x[0] if isinstance(x, tuple) else x
