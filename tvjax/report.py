"""What a run leaves for people: tables, figures and one self-contained page, drawn from its config and rows alone."""
import base64
import functools
import html
import json
import pathlib
import statistics
import struct
from typing import Any, NamedTuple

from tvjax import checkpoints, plotting, report_words, results
from tvjax.plotting import ANCHORS


class Run(NamedTuple):
    """A run as its folder tells it; `command` is what made it."""

    config: dict[str, Any]
    header: dict[str, Any]
    rows: list[dict]
    command: str


def write(folder, *, command: str) -> list[pathlib.Path]:
    """Writes tables.md, tables.tex, figures/*.png and report.html beside results.jsonl; returns their paths.

    All of them are written before any is put in its place. `command` is what the page says to type for the same run.
    """
    folder = pathlib.Path(folder)
    path = folder / "results.jsonl"
    if not results.read(path):
        raise ValueError(f"{path} holds no results to report")
    run = Run(json.loads((folder / "config.json").read_text()), results.headers(path)[-1], results.read(path), command)
    pictures = {name: plotting.png(figure) for name, figure in figures(run).items()}
    files: dict[pathlib.Path, bytes] = {folder / "figures" / f"{name}.png": body for name, body in pictures.items()}
    files[folder / "tables.md"] = markdown(run).encode()
    files[folder / "tables.tex"] = latex(run).encode()
    files[folder / "report.html"] = page(run, pictures).encode()
    checkpoints.replace({path: functools.partial(_write, body) for path, body in files.items()})
    return list(files)


def _write(body: bytes, path: pathlib.Path) -> None:
    path.write_bytes(body)


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
    parts += [_picture(name, body, report_words.caption(name)) for name, body in pictures.items()]
    lines = "".join(f"<li>{escape(line)}</li>" for line in report_words.protocol(run))
    parts += [f"<h2>Protocol</h2><ul>{lines}</ul>",
              "<h2>Methods</h2>", _plain_table(*report_words.method_table(run)),
              "<h2>Cost</h2>", _plain_table(*report_words.cost_table(run)),
              "<h2>To reproduce</h2>", f"<pre>{escape(run.command)}</pre>",
              _folded("Config", config), _folded("Versions and hashes", run.header)]
    return (f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
            f"<title>{escape(config['name'])}</title><style>{CSS}</style><body>{''.join(parts)}</body></html>\n")


def _folded(title: str, content: dict) -> str:
    return f"<details><summary>{title}</summary><pre>{html.escape(json.dumps(content, indent=2))}</pre></details>"


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
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def _cell(absolute, relative, *, best: bool, spread: bool) -> str:
    """A cell; where `spread` is not to be shown, it appears when the mouse rests on the cell."""
    whole = lambda x: f"{100 * x[0]:.1f} ± {100 * x[1]:.1f}" if isinstance(x, tuple) else f"{100 * x:.1f}"
    show = whole if spread else lambda x: f"{100 * _mean(x):.1f}"
    text = f"<b>{show(absolute)}</b>" if best else show(absolute)
    title = "" if spread or not isinstance(absolute, tuple) else f" title='{whole(absolute)} ({whole(relative)})'"
    return f"<td{title}>{text}<small>{show(relative)}</small></td>"


def _mean(x) -> float:
    return x[0] if isinstance(x, tuple) else x


def _plain_table(head, lines) -> str:
    row = lambda cells, tag: "<tr>" + "".join(f"<{tag}>{html.escape(str(x))}</{tag}>" for x in cells) + "</tr>"
    body = "".join(row(cells, "td") for cells in lines)
    return f"<div class=wide><table class=plain><thead>{row(head, 'th')}</thead><tbody>{body}</tbody></table></div>"


def _picture(name: str, body: bytes, caption: str) -> str:
    data, (width,) = base64.b64encode(body).decode(), struct.unpack(">I", body[16:20])  # of the PNG's header
    return (f"<figure><img alt='{html.escape(name)}' width={width // 2} src='data:image/png;base64,{data}'>"
            f"<figcaption>{html.escape(caption)}</figcaption></figure>")


CSS = """
body{font:16px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;color:#222}
body{max-width:72rem;margin:2rem auto;padding:0 1.2rem}h1{font-size:1.7rem;margin:0 0 .4rem}
h2{font-size:1.15rem;margin:2.2rem 0 .6rem;border-bottom:1px solid #ddd;padding-bottom:.2rem}
.lead{font-size:1.08rem}.note,figcaption{color:#666;font-size:.86rem}
.alarm{background:#b00020;color:#fff;font-weight:600;padding:.7rem 1rem;border-radius:4px}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{padding:.28rem .55rem;text-align:right;white-space:nowrap}thead th{border-bottom:2px solid #444;font-weight:600}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:#fff}
tbody tr{border-bottom:1px solid #eee}tbody th{font-weight:500}
td:nth-child(3){background:#f6f8fa}tr.anchor{color:#777}
small{display:block;color:#888;font-size:.78rem;line-height:1.1}
table.plain td,table.plain th{text-align:left;white-space:normal;background:none}
figure{margin:1.2rem 0}img{max-width:100%;height:auto}
pre{background:#f6f8fa;padding:.8rem;overflow-x:auto;font-size:.85rem}
summary{cursor:pointer;margin:.4rem 0}@media print{body{max-width:none;margin:0}figure{break-inside:avoid}}
"""
