"""The pages that are made from the code: every config, every public module, every notebook, as Markdown for MyST."""
import ast
import inspect
import os
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
MODULES = (
    "tvjax.vectors", "tvjax.tree", "tvjax.merging", "tvjax.tangent", "tvjax.checkpoints", "tvjax.compression",
    "tvjax.compression.building", "tvjax.compression.encoded", "tvjax.compression.store", "tvjax.compression.switch",
    "tvjax.calibration", "tvjax.sharding", "tvjax.training", "tvjax.evaluation", "tvjax.adapters", "tvjax.disk",
    "tvjax.results", "tvjax.merging.compat",
    "tvjax.models", "tvjax.models.bert", "tvjax.models.clip", "tvjax.models.clip_resnet", "tvjax.models.gpt2",
    "tvjax.models.roberta", "tvjax.models.t5", "tvjax.data.arrays", "tvjax.data.questions", "tvjax.data.text",
    "tvjax.learning", "tvjax.learning.adamerging", "tvjax.learning.adaptation", "tvjax.learning.arithmetic",
    "tvjax.learning.fewshot", "tvjax.learning.lpp", "tvjax.learning.selection", "tvjax.learning.tip",
    "tvjax.learning.ufm", "tvjax.trackers",
)
PROMPT = ">>> "


def write(folder: pathlib.Path) -> None:
    """Brings `folder` up to date: configs/, api/, tutorials/. Pages that have not changed are left alone."""
    pages = {**configs(), **api(), **tutorials()}
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if path.relative_to(folder).as_posix() not in pages:
            path.unlink()  # made here once, from what is no more
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, path)


# ---------------------------------------------------------------- configs
def configs() -> dict[str, str]:
    """A page for each file of configs/: its docstring and its text."""
    files = sorted((ROOT / "configs").glob("*.py"))
    return {f"configs/{path.stem}.md": config_page(path) for path in files}


def config_page(path: pathlib.Path) -> str:
    text = path.read_text(encoding="utf-8")
    parsed = ast.parse(text)
    begin = parsed.body[0].end_lineno if ast.get_docstring(parsed) else 0
    rest = "\n".join(text.splitlines()[begin:]).strip("\n")
    return (f"# configs/{path.name}\n\n{prose(ast.get_docstring(parsed) or '')}\n\n## The file\n\n"
            f"{fenced(rest, 'python')}\n")


# ---------------------------------------------------------------- modules
def api() -> dict[str, str]:
    """A page for each public module: its docstring, and all public functions and classes with theirs."""
    return {f"api/{name.removeprefix('tvjax.')}.md": module_page(name) for name in MODULES}


def module_page(name: str) -> str:
    import importlib

    module = importlib.import_module(name)
    parts = [f"# {name}", prose(inspect.getdoc(module) or "")]
    parts += [member(title, x) for title, x in public(module) if inspect.getdoc(x)]
    return "\n\n".join(parts) + "\n"


def public(module) -> list[tuple[str, object]]:
    """(name, object) of the functions and classes of `__all__`, or of those that the module defines itself."""
    names = getattr(module, "__all__", None) or [
        name for name, x in vars(module).items() if not name.startswith("_") and getattr(x, "__module__", "") ==
        module.__name__]
    found = [(name, getattr(module, name)) for name in names]
    cached_too = lambda x: inspect.isfunction(inspect.unwrap(x)) if callable(x) else False
    return [(name, x) for name, x in found if inspect.isclass(x) or cached_too(x)]


def member(title: str, x) -> str:
    try:
        signature = f"{title}{inspect.signature(x)}"
    except (TypeError, ValueError):
        signature = title
    signature = re.sub(r"<PjitFunction of <function (\w+).*?>>|<function (\w+).*?>", r"\1\2", signature)
    signature = re.sub(r"collections\.abc\.|pathlib\.|typing\.| at 0x[0-9a-f]+", "", signature)
    return f"## {title}\n\n{fenced(signature, 'python')}\n\n{prose(inspect.getdoc(x) or '')}"


# ---------------------------------------------------------------- notebooks
def tutorials() -> dict[str, str]:
    folder = ROOT / "experiments" / "notebooks"
    return {f"tutorials/{path.name}": path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.ipynb"))}


# ---------------------------------------------------------------- docstrings as Markdown
def prose(text: str) -> str:
    """A docstring as Markdown: doctests and indented lines become code, all else is text, tables stay.

    >>> prose("Adds.\\n\\n>>> 1 + 1\\n2")
    'Adds.\\n\\n```python\\n>>> 1 + 1\\n2\\n```'
    """
    return "\n\n".join(paragraph(part) for part in re.split(r"\n\s*\n", text.strip("\n")) if part.strip())


def paragraph(part: str) -> str:
    lines = part.splitlines()
    if lines[0].lstrip().startswith(PROMPT):
        return fenced(inspect.cleandoc(part), "python")
    if lines[0].startswith("    "):
        return fenced(inspect.cleandoc(part), "sh" if "python -m" in part else "python")
    if lines[0].startswith("|"):
        return part
    at = next((i for i, line in enumerate(lines) if line.lstrip().startswith(PROMPT)), None)
    if at:
        return "\n\n".join(paragraph("\n".join(some)) for some in (lines[:at], lines[at:]))
    return " ".join(escaped(line.strip()) for line in lines)


def escaped(line: str) -> str:
    """Text whose signs mean themselves; what stands between backticks is left alone."""
    parts = re.split(r"(`[^`]*`)", line)
    plain = [part if i % 2 else re.sub(r"([*_<\[\]{}\\|$#~`])", r"\\\1", part) for i, part in enumerate(parts)]
    return "".join(plain)


def fenced(text: str, language: str) -> str:
    marks = "````" if "```" in text else "```"
    return f"{marks}{language}\n{text.rstrip()}\n{marks}"
