"""The site: `sphinx-build -W docs docs/_build/html` (pip install '.[docs]'). Needs no network; a warning is an error.

Pages of operators are files (`python -m tvjax.merging.pages docs/operators`); those of configs, modules and notebooks
are made when the site is built, by `generate.py`, into docs/generated, which git ignores. Notebooks are shown without
outputs; TVJAX_EXECUTE=1 runs them first (some minutes).
"""
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import generate  # noqa: E402

generate.write(HERE / "generated")

project = "tvjax"
author = "the tvjax authors"
copyright = "the tvjax authors, Apache-2.0"
extensions = ["myst_nb"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["_build", "jupyter_execute"]
nb_execution_mode = "force" if os.environ.get("TVJAX_EXECUTE") else "off"
nb_execution_timeout = 600
nb_execution_raise_on_error = True
myst_heading_anchors = 3
html_theme = "furo"
html_title = "tvjax"
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
templates_path: list[str] = []
suppress_warnings = ["misc.highlighting_failure"]  # "{…}" in a page's code stands for what the reader fills in
