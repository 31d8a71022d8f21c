"""What a run of masks and compression leaves for people: tables, merging on top and compression below, and figures."""
import functools
import json
import pathlib

from tvjax import checkpoints, plotting, plotting_tall, results
from tvjax.report import Run

SECTIONS = ("anchor", "merging", "compression")


def write(folder, *, command: str) -> list[pathlib.Path]:
    """Writes tables.md and figures/*.png beside results.jsonl; returns their paths."""
    folder = pathlib.Path(folder)
    path = folder / "results.jsonl"
    if not results.read(path):
        raise ValueError(f"{path} holds no results to report")
    run = Run(json.loads((folder / "config.json").read_text()), results.headers(path)[-1], results.read(path), command)
    files = {folder / "figures" / f"{name}.png": plotting.png(figure) for name, figure in figures(run.rows).items()}
    files[folder / "tables.md"] = markdown(run).encode()
    checkpoints.replace({path: functools.partial(_write, body) for path, body in files.items()})
    return list(files)


def _write(body: bytes, path: pathlib.Path) -> None:
    path.write_bytes(body)


def counts(rows) -> list[int]:
    """The numbers of tasks of the tables."""
    return sorted({row["tasks"] for row in results.select(rows, metric="accuracy") if row.get("section") in SECTIONS})


def figures(rows) -> dict:
    """{name: figure}; those are left out for which there are no rows."""
    made = {}
    for count in counts(rows):
        made[f"agreement_{count}"] = plotting_tall.agreement(rows, tasks=count)
        made[f"classes_by_layer_{count}"] = plotting_tall.profile_by(rows, tasks=count, by="layer")
        made[f"classes_by_kind_{count}"] = plotting_tall.profile_by(rows, tasks=count, by="kind")
        made[f"over_k_{count}"] = plotting_tall.over_k(rows, tasks=count)
        made[f"over_lambda_{count}"] = plotting_tall.over_lambda(rows, tasks=count)
        made[f"pareto_{count}"] = plotting_tall.pareto(rows, tasks=count)
        if count >= 3:
            made[f"radar_{count}"] = plotting_tall.radar(rows, tasks=count)
    if any(row["metric"] == "curve normalised" for row in rows):
        made["over_tasks"], made["storage_over_tasks"] = plotting_tall.over_tasks(rows)
    return made


def markdown(run: Run) -> str:
    """All tables as Markdown."""
    parts = [f"# {run.config['name']}", f"`{run.command}`", NOTE]
    for count in counts(run.rows):
        parts += [f"## {count} tasks", main_table(run.rows, count),
                  "### Agreement of masks (%)", classes(run.rows, count),
                  "### Consensus over k: normalised test accuracy (%)", over_k(run.rows, count),
                  "### Masks over λ, one for all tasks: normalised validation accuracy (%)",
                  over_lambda(run.rows, count)]
    if any(row.get("section") == "control" for row in run.rows):
        parts += ["## Without interference between weights", control(run.rows)]
    if any(row["metric"] == "curve normalised" for row in run.rows):
        parts += ["## Over the number of tasks: normalised test accuracy (%), mean ± deviation over orders and seeds",
                  curve(run.rows)]
    seconds = results.select(run.rows, metric="seconds", method="all")
    parts.append(f"This run, all that was not reused: {seconds[0]['value']:.0f} s on {run.header['device']}.")
    return "\n\n".join(parts) + "\n"


NOTE = ("Test accuracy in percent, in brackets normalised: the mean over tasks of accuracy over that of the model "
        "fine-tuned on the task alone, same split and seed. λ of a task, α and what else is chosen is chosen on "
        "validation data. Bits are those of the whole collection, θ0 and frozen parts included; heads, which all rows "
        "need alike, are left out. Bits/weight: of a codec's state for each trained weight and task, θ0 left out. "
        "Several seeds: mean ± deviation.")


def main_table(rows, tasks: int) -> str:
    """Merging on top, compression below."""
    lines = ["| | absolute (normalised) | 10⁹ bits | bits/weight |", "| --- | ---: | ---: | ---: |"]
    for section in SECTIONS:
        mine = [row for row in results.select(rows, tasks=tasks, split="test", task="average")
                if row.get("section") == section and row["metric"] in ("accuracy", "normalised accuracy")]
        if section != "anchor" and mine:
            lines.append(f"| *{section}* | | | |")
        for method in dict.fromkeys(row["method"] for row in mine):
            found = results.select(mine, method=method)
            pair = [_cell([row["value"] for row in found if row["metric"] == metric])
                    for metric in ("accuracy", "normalised accuracy")]
            weight = f"{found[0]['bits_per_weight']:.3g}" if "bits_per_weight" in found[0] else "–"
            lines.append(f"| {method} | {pair[0]} ({pair[1]}) | {found[0]['bits'] / 1e9:.4g} | {weight} |")
    return "\n".join(lines)


def classes(rows, tasks: int) -> str:
    """Shares of catastrophic, selfish, general and universal entries by base."""
    chosen = results.select(rows, metric="class", by="all", tasks=tasks)
    return results.markdown(_pivot(chosen, index="method", columns="class"), scale=100)


def over_lambda(rows, tasks: int) -> str:
    """Masks by base and λ."""
    return results.markdown(_pivot(results.select(rows, metric="lambda", tasks=tasks), columns="lam"), scale=100)


def over_k(rows, tasks: int) -> str:
    """Consensus by base and k."""
    chosen = results.select(rows, metric="normalised accuracy", split="test", task="average", tasks=tasks)
    mine = sorted((row for row in chosen if "k" in row), key=lambda row: row["k"])
    return results.markdown(_pivot(mine, index="base", columns="k"), scale=100)


def control(rows) -> str:
    """Standard against non-overlapping fine-tuning."""
    chosen = results.select(rows, metric=["accuracy", "normalised accuracy"], split="test", task="average")
    mine = [row for row in chosen if row.get("section") == "control"]
    return results.markdown(_pivot(mine, columns="metric"), scale=100)


def curve(rows) -> str:
    """Methods by number of tasks."""
    chosen = sorted(results.select(rows, metric="curve normalised"), key=lambda row: row["tasks"])
    return results.markdown(_pivot(chosen, columns="tasks"), scale=100)


def _pivot(chosen, *, index: str = "method", columns: str) -> results.Table:
    cells = {(row[index], row[columns]) for row in chosen}
    several = len(cells) < len(chosen)
    how: dict = {"reduce": results.mean_std} if several else {}
    return results.pivot(chosen, index=index, columns=columns, **how)


def _cell(values) -> str:
    mean, spread = results.mean_std(values)
    return f"{100 * mean:.1f} ± {100 * spread:.1f}" if len(values) > 1 else f"{100 * mean:.1f}"
