"""The quickstart's local setting with two merges, for tests that start the command several times."""
import pathlib
import runpy

QUICKSTART = pathlib.Path(__file__).parents[1] / "configs" / "quickstart.py"


def get_config():
    config = runpy.run_path(str(QUICKSTART))["get_config"]("runlocal")
    config.merges = tuple(merge for merge in config.merges if merge.name in ("average", "ties"))
    return config
