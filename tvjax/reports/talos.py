"""The report of sparse fine-tuning: addition and negation, single tasks, sparsity, masks, sensitivity, localisation,
linear behaviour, cost; each from the rows that there are."""
import statistics
from typing import Any

from tvjax import results
from tvjax.reports import Section, figures

NOTE = ("Test accuracy in percent; normalised: the mean over tasks of accuracy over that of the model tuned on the "
        "task alone in the same way, same split and seed. α, λ and the sparsity are chosen on validation data. Several "
        "seeds: mean ± deviation.")
FORGET = ("θ0 − ατ, one task at a time: accuracy on the task that is to be forgotten (target, lower is better) and on "
          "the control task, at the α with the lowest validation accuracy on the target among those that keep 95 % of "
          "the zero-shot validation accuracy on the control. Averages over tasks.")


def sections(run) -> list[Section]:
    """The sections for which there are rows."""
    rows = run.rows
    made = [Section("Addition and negation", NOTE, {
        **additions(rows),
        "task negation, test accuracy (%)": negation(rows),
        "one task at a time": single(rows), **_rates(rows)}, {"single accuracy by task": single_bars(rows)}, (FORGET,))]
    builders = {"sweep": _sweep, "masks": _masks, "pruning": _sensitivity, "localisation": _localisation,
                "linear": _linear, "cost": _cost}
    made += [build(rows) for section, build in builders.items() if any(row.get("section") == section for row in rows)]
    seconds = results.select(rows, metric="seconds", method="all")[0]["value"]
    last = made[-1]
    cost = f"This run, all that was not reused: {seconds:.0f} s on {run.header['device']}."
    return [*made[:-1], Section(last.title, last.words, last.tables, last.figures, (*last.notes, cost), (), last.scale,
                                last.digits)]


def of(rows, section: str, **equals) -> list[dict]:
    """The rows of a section that equal what is given."""
    return results.select([row for row in rows if row.get("section") == section], **equals)


def additions(rows) -> dict[str, results.Table]:
    """A table of addition for each kind of data that merging saw: {caption: table}."""
    mine = [{"data": "none", "seen": "nothing", **row} for row in of(rows, "addition", split="test", task="average")]
    found = {}
    for data, seen in dict.fromkeys((row["data"], row["seen"]) for row in mine if row["metric"] != "trace"):
        caption = "task addition" + ("" if data == "none" else f" that adapts to {seen}")
        some = [row for row in mine if (row["data"], row["seen"]) == (data, seen)]
        found[f"{caption}: absolute (normalised) test accuracy (%)"] = addition(some)
    return found


def addition(mine) -> results.Table:
    """Ways of fine-tuning by merge: absolute and, in brackets, normalised."""
    heads = list(dict.fromkeys(row["merge"] for row in mine))
    return results.Table(("fine-tuning", *heads), tuple(
        (way, *(_pair(mine, way, merge) for merge in heads)) for way in dict.fromkeys(row["tuning"] for row in mine)))


def _pair(rows, way: str, merge: str):
    both = [_spread([row["value"] for row in rows
                     if row["tuning"] == way and row["merge"] == merge and row["metric"] == metric])
            for metric in ("accuracy", "normalised accuracy")]
    return None if both[0] is None else "{} ({})".format(*(results.cell(x, scale=100) for x in both))


def negation(rows) -> results.Table:
    """Target and control by way of fine-tuning."""
    chosen = of(rows, "negation", split="test", task="average", metric=["target", "control"])
    return _pivot(chosen, columns="metric")


def single(rows) -> results.Table:
    """Single-task accuracy, the share of entries that may move, the distance, seconds."""
    mine = [row for row in of(rows, "single") if row["split"] in ("test", "none")]
    lines = []
    for way in dict.fromkeys(row["method"] for row in mine):
        found = [row for row in mine if row["method"] == way]
        by = lambda metric, found=found, **equals: [row["value"] for row in results.select(
            found, metric=metric, **equals)]
        lines.append((way, _spread(by("accuracy", task="average")), statistics.fmean(by("trainable")),
                      statistics.fmean(by("delta norm ratio")), _seconds(by("seconds", what="calibration")),
                      _seconds(by("seconds", what="fine-tuning"))))
    return results.Table(("fine-tuning", "test accuracy (%)", "trainable (%)", "‖τ‖/‖θ0‖ (%)", "calibration (s)",
                          "fine-tuning (s)"), tuple(lines))


def _rates(rows) -> dict[str, results.Table]:
    """Validation accuracy by way and learning rate, where rates were searched."""
    mine = of(rows, "rates", metric="accuracy at a rate")
    found = [{**row, "rate": f"{row['rate']:g}"} for row in sorted(mine, key=lambda row: row["rate"])]
    return {"learning rates, validation accuracy (%): each way takes its first best": _pivot(
        found, columns="rate")} if found else {}


def _seconds(values) -> str:
    return f"{statistics.fmean(values):.1f}"


def single_bars(rows):
    """Test accuracy on each task alone, of the methods that all seeds have."""
    mine = of(rows, "single", split="test", metric="accuracy")
    groups: dict[str, dict] = {}
    for row in mine:
        groups.setdefault(row["method"], {}).setdefault(row["task"], []).append(100 * row["value"])
    drawn = ("full", "talos", "lota", "bitfit", "ia3")
    return figures.bars({way: found for way, found in groups.items() if way in drawn}, y="test accuracy (%)")


def _sweep(rows) -> Section:
    mine = [row for row in of(rows, "sweep", split="test") if row["metric"] in SWEPT]
    best = of(rows, "sweep", metric="chosen sparsity")
    named = [{**row, "sparsity": f"{100 * row['sparsity']:g} %", "what": SWEPT[row["metric"]]}
             for row in sorted(mine, key=lambda row: row["sparsity"])]
    lines: dict[str, dict] = {}
    for row in sorted(mine, key=lambda row: row["sparsity"]):
        lines.setdefault(SWEPT[row["metric"]], {}).setdefault(100 * row["sparsity"], []).append(100 * row["value"])
    words = "Chosen by the lowest validation accuracy on the negated tasks: " + ", ".join(
        f"{100 * row['value']:g} % (seed {row['seed']})" for row in best) + ". 0 % is full fine-tuning."
    return Section("Over the sparsity", words, {"test accuracy (%)": _pivot(named, index="sparsity", columns="what")},
                   {"over sparsity": figures.lines(lines, x="sparsity (%)", y="test accuracy (%)")})


SWEPT = {"accuracy": "addition", "normalised accuracy": "addition, normalised", "target": "negation, target",
         "control": "negation, control", "single accuracy": "one task"}


def _masks(rows) -> Section:
    mine = of(rows, "masks")
    pairs = [row for row in mine if row["metric"] == "mask iou" and row["task"] != row["other"]]
    lines = []
    for way in dict.fromkeys(row["method"] for row in pairs):
        found = [row["value"] for row in pairs if row["method"] == way]
        chance = statistics.fmean(row["value"] for row in results.select(mine, metric="iou by chance", method=way))
        lines.append((way, statistics.fmean(found), min(found), max(found), chance))
    table = results.Table(("masks", "mean IoU (%)", "least", "most", "by chance"), tuple(lines))
    talos = [row for row in mine if row["method"] == "talos" and row["seed"] == mine[0]["seed"]]
    drawn = {"mask overlap of talos": _map(results.select(talos, metric="mask iou"), "intersection over union"),
             "occupancy by kind": occupancy_map(talos, "kind"), "occupancy by layer": occupancy_map(talos, "layer")}
    kinds = [{**row, "value": row["value"]} for row in results.select(mine, metric="occupancy", by="kind")]
    return Section("What masks share and hold", "By chance: two random masks of that density.", {
        "overlap between tasks (%)": table,
        "where the entries of masks lie (% of the mask, mean over tasks)": results.pivot(kinds, columns="group"),
        "how full each kind of tensor is (%)": results.pivot(kinds, columns="group", value="filled")}, drawn)


def occupancy_map(rows, by: str):
    """Tasks by kinds or layers: the share of the tensor's entries in the mask."""
    mine = results.select(rows, metric="occupancy", by=by)
    tasks, groups = (list(dict.fromkeys(row[key] for row in mine)) for key in ("task", "group"))
    at = {(row["task"], row["group"]): 100 * row["filled"] for row in mine}
    return figures.heat_map([[at[task, group] for group in groups] for task in tasks], rows=tasks, columns=groups,
                            label="entries in the mask (%)", digits=0)


def _map(rows, label: str, value: str = "value", scale: float = 1.0):
    tasks, others = (list(dict.fromkeys(row[key] for row in rows)) for key in ("task", "other"))
    at: dict[Any, list] = {}
    for row in rows:
        at.setdefault((row["task"], row["other"]), []).append(scale * row[value])
    return figures.heat_map([[statistics.fmean(at[a, b]) for b in others] for a in tasks], rows=tasks, columns=others,
                            label=label)


def _sensitivity(rows) -> Section:
    both = [row for name in ("pruning", "noise") for row in of(rows, name, metric=f"{name} ratio")]
    named = [{**row, "what": "zeroed" if row["section"] == "pruning" else "under noise of 2σ",
              "which": "own" if row["task"] == row["other"] else "others"} for row in both]
    table = results.pivot([{**row, "what": f"{row['what']}, {row['which']}"} for row in named], columns="what")
    measured = [row for row in of(rows, "noise") if row["metric"] in ("mean magnitude", "deviation")]
    weights = results.pivot([{**row, "value": 100 * row["value"]} for row in measured], columns="metric")
    drawn = {f"{name} by talos masks": _map(of(rows, name, metric=f"{name} ratio", method="talos"),
                                            "accuracy over that of θ0") for name in ("pruning", "noise")}
    return Section("What θ0 bears to lose where the masks lie",
                   "Zero-shot test accuracy, over that of θ0, with the mask's entries zeroed, or disturbed by noise of "
                   "twice their own deviation; on the mask's own task and on the others.",
                   {"accuracy ratio (%)": table, "weights in the mask (× 10⁻⁴)": weights}, drawn)


def _localisation(rows) -> Section:
    mine = of(rows, "localisation")
    named = [{**row, "which": "own" if row["task"] == row["other"] else "others"} for row in mine]
    apart = [{**row, "which": f"{row['which']}, relative", "value": row["relative"]} for row in named]
    drawn = {"localisation of talos": _map(results.select(mine, method="talos"), "mean |τᵀ∇z| relative to own task",
                                           "relative")}
    return Section("Localisation", "Mean |τᵀ∇z| over test inputs and classes; relative: over that on the vector's own "
                   "task. '+ ties': the vectors after the trim to 20 % and the elected signs.",
                   {"mean |τᵀ∇z|": results.pivot(named + apart, columns="which")}, drawn, scale=1.0, digits=3)


def _linear(rows) -> Section:
    mine = of(rows, "linear")
    points: dict[str, tuple[list, list]] = {}
    for row in mine:
        across, up = points.setdefault(row["method"], ([], []))
        across.append(100 * row["value"])
        up.append(100 * row["tuned"])
    gap = [{**row, "what": "tuned", "value": row["tuned"]} for row in mine]
    gap += [{**row, "what": "linearised"} for row in mine]
    gap += [{**row, "what": "advantage of the tuned", "value": row["advantage"]} for row in mine]
    return Section("Linear behaviour", "Test accuracy of tuned models and of their first-order expansion at θ0.",
                   {"test accuracy (%)": results.pivot(gap, columns="what")},
                   {"linear and tuned": figures.scatter(points, x="linearised: test accuracy (%)",
                                                        y="tuned: test accuracy (%)", bisector=True)})


def _cost(rows) -> Section:
    mine = [{**row, "value": row["value"] / 2**20} for row in of(rows, "cost", metric="bytes")]
    return Section("Memory of a step (MiB)", "Counted from shapes: what each must hold; activations are what the "
                   "backward pass keeps, as they are and with blocks computed again.",
                   {"MiB": results.pivot(mine, columns="what")}, scale=1.0)


def _pivot(chosen, *, index: str = "method", columns: str) -> results.Table:
    several = len({(row[index], row[columns]) for row in chosen}) < len(chosen)
    how: dict = {"reduce": results.mean_std} if several else {}
    return results.pivot(chosen, index=index, columns=columns, **how)


def _spread(values):
    if not values:
        return None
    return results.mean_std(values) if len(values) > 1 else values[0]
