"""The command: `python -m tvjax.run --config=configs/quickstart.py [--workdir=DIR] [--config.field=value]`.

Reads and checks the config, does the experiment (`tvjax.experiment`), draws tables, figures and the report. A slip ends
in one sentence on stderr and exit code 2.
"""
import difflib
import importlib
import logging
import os
import pathlib
import pkgutil
import re
import runpy
import shlex
import sys

from absl import app, flags
from absl import logging as absl_logging
from ml_collections import config_flags
from safetensors import SafetensorError

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "An experiment, such as configs/quickstart.py or configs/glyphs.py:8", lock_config=True)
WORKDIR = flags.DEFINE_string("workdir", None, "Where results are written (default: runs/ and the config's name)")
TRACEBACK = flags.DEFINE_bool("traceback", False, "Whether an error shows where it arose, not its sentence alone")
TRACK = flags.DEFINE_string("track", None, "Where rows are sent as well: wandb:PROJECT or mlflow:EXPERIMENT")
DISTRIBUTED = flags.DEFINE_string(
    "distributed", None, "Joins other processes: auto (SLURM, TPU pods, Open MPI), or HOST:PORT,COUNT,INDEX")
TIMEOUT = flags.DEFINE_float(
    "timeout", 60.0, "Seconds after which a silent process counts as dead; to meet, all have as many, at least 60",
    lower_bound=1)
SLIP = 2  # the exit code


def parse_flags(argv):
    """absl's parsing, ending in one sentence instead of a traceback where --config or an override is mistyped."""
    flags.mark_flag_as_required("config")
    if missing := no_such_file(argv):
        stop(missing)
    join(argv)
    try:
        rest = flags.FLAGS(argv)
        CONFIG.value.keys()  # an error in the file is only reported when the config is used
        if len(rest) > 1:
            raise flags.Error(f"what is {rest[1]!r}? A flag begins with --, as in --config=configs/quickstart.py")
        return rest
    except (AttributeError, KeyError, IndexError) as error:
        stop(no_such_field(argv) or error)
    except (flags.Error, OSError, ValueError, TypeError, SyntaxError) as error:
        stop(error)


def join(argv):
    """Meets the other processes, where --distributed says how: before a config may compute anything."""
    if where := argument(argv, "distributed"):
        from tvjax import sharding
        try:
            silence = float(argument(argv, "timeout") or TIMEOUT.default)
            sharding.start(where, timeout=max(silence, TIMEOUT.default), silence=silence)
        except ValueError as error:
            stop(error)


def stop(sentence):
    """Says it on stderr, in one line, and ends with exit code 2."""
    before, traceback, after = str(sentence).partition("Traceback (most recent call last)")
    if traceback:  # of an error in a config file, which ml_collections quotes whole
        sentence = before.partition(": ")[0] + ": " + after.strip().splitlines()[-1].removeprefix("ValueError: ")
    sentence = " ".join(str(sentence).split())
    print(sentence, file=sys.stderr, flush=True)
    if "tvjax.sharding" in sys.modules:
        sys.modules["tvjax.sharding"].fail(sentence)  # the other processes end too
    sys.exit(SLIP)


def no_such_file(argv):
    """The sentence about a config file that is not there, with the nearest one beside it; None where it is."""
    file = argument(argv, "config").partition(":")[0]
    if not file or os.path.exists(file):
        return None
    near = difflib.get_close_matches(file, map(str, pathlib.Path(file).parent.glob("*.py")), 1)
    return f"there is no config file {file}" + (f"; did you mean {near[0]}?" if near else "")


def no_such_field(argv):
    """The sentence about the first override of a field that the config lacks; None where all exist."""
    file, _, arg = argument(argv, "config").partition(":")
    if not os.path.isfile(file):
        return None
    fields = list(paths(runpy.run_path(file)["get_config"](*([arg] if arg else []))))
    given = [found[1] for found in (re.match(r"--?config\.([^=]+)", part) for part in argv) if found]
    name = next((name for name in given if name not in fields), None)
    if name is None:
        return None
    near = difflib.get_close_matches(name, fields, 1)
    return f"no field {name} in {file}; " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(fields)}")


def argument(argv, flag):
    """What a flag says, also as two words."""
    for i, part in enumerate(argv):
        name, equals, value = part.lstrip("-").partition("=")
        if part.startswith("-") and name == flag:
            return value if equals else "".join(argv[i + 1:i + 2])
    return ""


def paths(node, prefix=""):
    """The dotted names of all fields below a config, entries of tuples as name[0]."""
    pairs = node.items() if hasattr(node, "items") else [(f"[{i}]", x) for i, x in enumerate(node)]
    for name, value in pairs:
        path = prefix + name if name.startswith("[") or not prefix else f"{prefix}.{name}"
        yield path
        if hasattr(value, "items") or isinstance(value, (list, tuple)):
            yield from paths(value, path)


def main(argv):
    del argv
    try:
        tracked(CONFIG.value, WORKDIR.value, TRACK.value)
        if DISTRIBUTED.value:
            from tvjax import sharding
            sharding.finish()
    except (ValueError, OSError, SafetensorError) as error:  # the last where the disk is full
        if TRACEBACK.value and not DISTRIBUTED.value:
            raise
        stop(error)
    except RuntimeError:  # what XLA raises where another process goes away in the middle of a collective
        if DISTRIBUTED.value:
            from tvjax import sharding
            sharding.broken_off()
        raise


def tracked(config, folder, track):
    """`run`, and its rows sent to a tracker where one is named, which is checked before anything is done."""
    from tvjax import trackers
    to = trackers.parsed(track)
    rows = run(config, folder, say=logger().info)
    if to and isinstance(rows, list):
        trackers.send(rows, to, name=config.name, config=config.to_dict())


def logger():
    """The log of this command: plain lines on stderr. Libraries speak up from warnings on."""
    absl_logging.set_verbosity(absl_logging.WARNING)
    log = logging.getLogger("tvjax")
    log.setLevel(logging.INFO)
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
        log.propagate = False
    return log


def run(config, folder=None, *, say=print):
    """Experiment, tables, figures, report; returns the rows, which are in `folder`/results.jsonl. Or a disk's merge."""
    from tvjax import results, sharding
    command = shlex.join(["python", "-m", "tvjax.run", *sys.argv[1:]])
    layout = sharding.from_config(config)
    sharding.agree({"config": config.to_dict(), "versions": results.versions()})
    say = sharding.speaker(say)
    with sharding.on(layout):
        return _run(config, folder, say=say, command=command)


def _run(config, folder, *, say, command):
    if config.get("job") == "merge":
        from tvjax import sharding
        from tvjax.disk import job
        if (layout := sharding.found()) is not None:
            say(sharding.told(layout))
        return job.run(config, say=say, command=command)
    if "job" in config:
        return study(config, folder, say=say, command=command)
    from tvjax import experiment, report, results
    experiment.plan(config)  # before its name is used
    folder = pathlib.Path(folder or pathlib.Path("runs") / config.name)
    rows = experiment.run(config, folder, say=say)
    if not rows:  # another process has them
        return rows
    made = report.write(folder, command=command)
    print(results.markdown(experiment.final_table(rows, max(config.counts)), scale=100))
    say(f"written: {folder / 'results.jsonl'}, {', '.join(str(path) for path in made)}")
    return rows


def modules(package):
    """The names of a package's modules."""
    return {module.name for module in pkgutil.iter_modules(package.__path__)}


def study(config, folder, *, say, command):
    """A job of `tvjax.experiment` and its report of `tvjax.reports`: rows, tables, figures, page; returns the rows."""
    from tvjax import experiment, reports, tree
    known = sorted(modules(experiment) & modules(reports))
    if config.job not in known:
        raise ValueError(f"job is {config.job!r}; {tree.did_you_mean(str(config.job), ['merge', *known])}")
    job = importlib.import_module(f"tvjax.experiment.{config.job}")
    job.plan(config)  # before its name is used
    folder = pathlib.Path(folder or pathlib.Path("runs") / config.name)
    rows = job.run(config, folder, say=say)
    if not rows:  # another process has them
        return rows
    made = reports.write(folder, command=command)
    page = next(path for path in made if path.name == "report.html")
    print(reports.first_table(folder, command=command))
    say(f"written: {folder / 'results.jsonl'}, {page}, and {len(made) - 1} tables and figures beside it")
    return rows


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
