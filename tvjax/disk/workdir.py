"""The output directory: nothing is there before all is there.

A merge into OUT works in the hidden directory `.OUT.merging` beside it, and renames that at the end. Only this
directory, which no user named, is ever removed or continued.
"""
import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tvjax.disk import ledger

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


def place(out: str | os.PathLike) -> tuple[Path, Path]:
    """(OUT, the directory to work in)."""
    if not os.fspath(out):
        raise ValueError("a merge needs out, the directory to write")
    out = Path(os.path.realpath(out))
    return out, out.parent / f".{out.name}.merging"


def finished_before(out: Path, identity: str) -> bool:
    """Whether `out` holds this very merge; ValueError where it holds anything else."""
    if not out.exists():
        return False
    if not out.is_dir():
        raise ValueError(f"{out} is a file: choose another directory to write")
    if not any(out.iterdir()):
        return False
    past = ledger.read(out / ledger.NAME)
    if past is None:
        raise ValueError(f"{out} holds other files: choose another directory to write, or an empty one")
    if past.head["merge"] != identity:
        raise ValueError(f"{out} holds a merge of another recipe, of other inputs or by other versions: choose another "
                         "directory to write")
    return True


def begun_before(work: Path, identity: str) -> ledger.Past | None:
    """The ledger of an interrupted merge into the same place; ValueError if that was another merge."""
    past = ledger.read_all(work)
    if past is not None and past.head["merge"] != identity:
        raise ValueError(f"{work} holds the beginning of a merge of another recipe, of other inputs or by other "
                         "versions: delete it, or choose another directory to write")
    if past is None and work.exists() and any(not name.startswith(".") for name in os.listdir(work)):
        raise ValueError(f"{work}, where this merge would work, holds other files: delete it, or choose another "
                         "directory to write")
    return past


@contextlib.contextmanager
def working(work: Path, *, first: bool = True) -> Iterator[None]:
    """Makes the directory, holds it against other processes, and removes it where the merge cannot be.

    After a broken input or a full disk nothing is left; after an interruption the directory stays, to be continued.
    first: False in the processes of one merge that leave all this to the first of them.
    """
    if not first:
        yield
        return
    made = [folder for folder in (work, *work.parents) if not folder.exists()]
    try:
        work.mkdir(parents=True, exist_ok=True)
        with _locked(work):
            yield
    except Busy:
        raise
    except ValueError:
        _remove(work, made)
        raise
    except OSError as error:
        if error.errno in FULL:
            _remove(work, made)
        raise OSError(error.errno, f"{work.parent} cannot be written to ({error.strerror or error})") from None


def _remove(work: Path, made: list[Path]) -> None:
    shutil.rmtree(work, ignore_errors=True)
    for folder in made[1:]:
        with contextlib.suppress(OSError):
            folder.rmdir()


class Busy(ValueError):
    """Another process works in the directory."""


@contextlib.contextmanager
def _locked(work: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    number = os.open(work, os.O_RDONLY)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"another process is merging into {work}") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(number)


def write_whole(path: Path, content: bytes) -> None:
    """A small file, whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def publish(work: Path, out: Path) -> None:
    """Gives the finished directory its name."""
    for leftover in work.glob(".*.partial"):
        leftover.unlink()
    if os.name == "nt" and out.exists():
        out.rmdir()  # empty: `finished_before` saw to that
    os.replace(work, out)
