"""The site builds without a warning and without network; what its pages show runs; nothing is left out of it."""
import doctest
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
HOW_TO = sorted((DOCS / "how-to").glob("*.md"))
PAGES = [*HOW_TO, *sorted((DOCS / "explanation").glob("*.md")), *sorted((DOCS / "reference").glob("*.md")),
         ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", DOCS / "index.md"]


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", HOW_TO, ids=lambda path: path.stem)
def test_its_code_runs(path):
    code = "\n".join(part for part in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL) if ">>> " in part)
    test = doctest.DocTestParser().get_doctest(code, {}, path.name, str(path), 0)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    assert doctest.DocTestRunner(optionflags=flags).run(test).failed == 0


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_what_it_names_exists(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.])/(work|opt|tmp|home)/", text), "it speaks of the project alone"
    for name in re.findall(r"(?:configs|experiments|tests|tvjax|docs)/[\w/]+\.py", text):
        assert (ROOT / name).is_file() or re.search("JOB|NN", name), name
    for name, method in re.findall(r"\b(merging|compat|vectors|tangent)\.([a-z_]+)\(", text):
        module = importlib.import_module({"compat": "tvjax.merging.compat"}.get(name, f"tvjax.{name}"))
        assert hasattr(module, method), f"{name}.{method}"


def test_every_config_module_and_notebook_has_a_page(generate):
    assert {f"configs/{path.stem}.md" for path in (ROOT / "configs").glob("*.py")} == set(generate.configs())
    assert len(generate.tutorials()) >= 8
    page = generate.module_page("tvjax.vectors")
    assert "## task_vector" in page and ">>> task_vector(" in page
    assert "## choice_log_probs" in generate.module_page("tvjax.models.t5"), "what is cached is public too"


def test_docstrings_become_markdown(generate):
    assert generate.prose("Sum of `a * b` and 2*x*y.\n\n    python -m tvjax.run") == (
        "Sum of `a * b` and 2\\*x\\*y.\n\n```sh\npython -m tvjax.run\n```")
    assert generate.prose("Adds.\n>>> 1 + 1\n2") == "Adds.\n\n```python\n>>> 1 + 1\n2\n```"


def test_the_site_builds(tmp_path):
    for package in ("sphinx", "myst_nb", "furo"):
        pytest.importorskip(package, reason=f"the site needs {package}: pip install '.[docs]'", exc_type=ImportError)
    site = tmp_path / "build" / "html"
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", tmp_path / "trees", DOCS, site],
        capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Task vectors in JAX" in (site / "index.html").read_text(encoding="utf-8")
