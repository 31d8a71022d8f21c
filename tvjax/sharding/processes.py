"""Several processes, on one machine or many: how they start, agree, wait for each other, exchange arrays, and end.

JAX's own coordination service does all of it. It ends a process whose peer died by a core dump after minutes, so a
watch stands before it: each process tells the service every second that it lives, and one that no longer hears another
ends with one sentence.
"""
import ctypes
import itertools
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
import numpy as np

TIMEOUT = 60.0  # seconds without a sign of life
DIED = 3  # the exit code of a process whose peer is gone
AGES = 7 * 24 * 3600 * 1000  # milliseconds: waiting has no end of its own, the watch has
_numbers = itertools.count()
AGAIN = "it died or is cut off; start all again, what is done is kept"
_watch: "Watch | None" = None
_kept: list = []  # what C calls back may not be collected


def start(where: str, *, timeout: float | int = TIMEOUT, silence: float | int | None = None) -> None:
    """Joins the processes of a run; before any computation, and once.

    where: "auto" on SLURM, TPU pods and under Open MPI, or HOST:PORT,COUNT,INDEX with the address of process 0.
    timeout: seconds within which all have come. silence: seconds after which one that gives no sign of life counts as
      dead; as many as `timeout` by default.

    Raises ValueError where the address is none, nobody answers there, or `auto` finds no cluster.
    """
    global _watch
    if where == "auto":
        _initialize(timeout, {})
    else:
        address, count, index = parsed(where)
        (_check_free if index == 0 else _wait_for)(address, timeout)
        _initialize(timeout, dict(coordinator_address=address, num_processes=count, process_id=index))
    if jax.process_count() > 1:
        _watch = Watch(timeout if silence is None else silence)
        if jax.process_index():
            _speak_before_abort()


def parsed(where: str) -> tuple[str, int, int]:
    """(address, count, index) of HOST:PORT,COUNT,INDEX.

    >>> parsed("10.0.0.1:1234,2,0")
    ('10.0.0.1:1234', 2, 0)
    """
    address, *numbers = where.split(",")
    port = address.rpartition(":")[2]
    if len(numbers) != 2 or not all(n.strip().isdigit() for n in (*numbers, port)) or ":" not in address:
        raise ValueError(f"distributed is auto or HOST:PORT,COUNT,INDEX, as in 10.0.0.1:1234,2,0; got {where!r}")
    count, index = map(int, numbers)
    if not index < count:
        raise ValueError(f"of {count} processes the indices are 0 … {count - 1}; got {index}")
    return address, count, index


def _initialize(timeout: float | int, given: Mapping[str, Any]) -> None:
    """jax.distributed.initialize, which would end by a core dump where processes are missing."""
    late = threading.Timer(timeout, end, [f"not all processes came within {timeout:g} s: "
                                          "start all of them, with one address and one count"])
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(**given, initialization_timeout=int(timeout + 60),
                                   heartbeat_timeout_seconds=int(max(100, 4 * timeout)))
    except (ValueError, RuntimeError) as error:
        if given:
            raise ValueError(f"the processes did not come together: {str(error).splitlines()[0]}") from None
        raise ValueError("distributed=auto finds no SLURM, TPU pod or Open MPI around it: write HOST:PORT,COUNT,INDEX "
                         f"({str(error).splitlines()[0]})") from None
    finally:
        late.cancel()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _wait_for(address: str, timeout: float | int) -> None:
    """Until somebody listens at the coordinator's address."""
    until = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection(_split(address), timeout=min(timeout, 5)).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise ValueError(f"the coordinator {address} does not answer within {timeout:g} s ({error}): start "
                                 "process 0 there, and let this machine reach it") from None
            time.sleep(0.2)


def _check_free(address: str, timeout: float | int) -> None:
    del timeout
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", _split(address)[1]))
        except OSError as error:
            raise ValueError(f"the port of {address} cannot be used ({error}): choose another one") from None


def client() -> Any:
    """JAX's coordination service, which has no public door yet (Orbax takes this one too)."""
    from jax._src import distributed
    return distributed.global_state.client


# ---------------------------------------------------------------- agreement
def agree(about: Mapping[str, Any], what: str = "start") -> None:
    """Raises ValueError in a process whose config or versions are not those of process 0, naming what differs.

    about: what must be equal, as JSON holds it, such as {"config": …, "versions": …}; hashes stand for what is large.
    """
    if jax.process_count() == 1:
        return
    ours = _flat(json.loads(json.dumps(about, default=str)))
    key = f"tvjax/{what}/{next(_numbers)}"
    if jax.process_index() == 0:
        client().key_value_set(key, json.dumps(ours))
        return
    theirs = json.loads(client().blocking_key_value_get(key, AGES))
    other = [f"{name} {theirs.get(name)!r} there, {ours.get(name)!r} here"
             for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    if other:
        raise ValueError(f"process {jax.process_index()} is not started as process 0 is ({'; '.join(other[:3])}): "
                         "start all with one command, one config and the same versions")


def _flat(about: Any, name: str = "") -> dict[str, Any]:
    if isinstance(about, dict) and about:
        return {key: value for part, inner in about.items()
                for key, value in _flat(inner, f"{name}.{part}" if name else part).items()}
    return {name: about}


def speaker(say: Callable[[str], Any]) -> Callable[[str], Any]:
    """`say`, with the process's number before each line where there are several."""
    if jax.process_count() == 1:
        return say
    return lambda line: say(f"process {jax.process_index()}: {line}")


# ---------------------------------------------------------------- waiting, exchanging
def barrier(what: str = "here") -> None:
    """Waits until all processes have come to the same place; one that dies meanwhile ends all."""
    if jax.process_count() > 1:
        client().wait_at_barrier(f"tvjax/{what}/{next(_numbers)}", AGES)


def gathered(array: Any) -> np.ndarray:
    """(processes, …): the arrays of all processes, which have one shape and dtype, bit by bit."""
    array = np.ascontiguousarray(array)
    if jax.process_count() == 1:
        return array[None]
    from jax.experimental import multihost_utils
    held = multihost_utils.process_allgather(np.frombuffer(array.tobytes(), np.uint8))
    return np.frombuffer(np.ascontiguousarray(held).tobytes(), array.dtype).reshape(-1, *array.shape)


def exchanged(found: Any) -> list[Any]:
    """What each process has found, in the processes' order: anything that pickles, a few kilobytes."""
    if jax.process_count() == 1:
        return [found]
    mine = np.frombuffer(pickle.dumps(found), np.uint8)
    sizes = gathered(np.int64(mine.size))
    held = gathered(np.pad(mine, (0, int(sizes.max()) - mine.size)))
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(held, sizes.ravel(), strict=True)]


def sent(arrays: Any, source: int, *, like: Any) -> Any:
    """The tree of arrays of process `source` in all processes; the others give None, and `like` for shapes."""
    from jax.experimental import multihost_utils
    mine = jax.process_index() == source
    return multihost_utils.broadcast_one_to_all(jax.device_get(arrays if mine else like), is_source=mine)


# ---------------------------------------------------------------- the end
class Watch:
    """Two threads: one tells and asks, the other counts how long nothing has been heard."""

    def __init__(self, timeout: float | int):
        self.timeout, self.count, self.mine = timeout, jax.process_count(), jax.process_index()
        others = (other for other in range(self.count) if other != self.mine)
        self.heard: dict[int, tuple[str | None, float]] = {other: (None, 0.0) for other in others}
        self.stopped = threading.Event()
        for run in (self._talk, self._look):
            threading.Thread(target=run, name="tvjax-watch", daemon=True).start()

    def _talk(self) -> None:
        for beat in itertools.count():
            if self.stopped.is_set():
                return
            try:
                client().key_value_set(f"tvjax/alive/{self.mine}", str(beat), allow_overwrite=True)
                for other in self.heard:
                    self._ask(other)
            except Exception:  # the service is gone, which the other thread will notice
                pass
            self.stopped.wait(min(1.0, self.timeout / 10))

    def _ask(self, other: int) -> None:
        ended = _value(f"tvjax/ended/{other}")
        if ended and not self.stopped.is_set():
            end(f"process {other} ended: {ended}")
        beat = "" if ended is not None else _value(f"tvjax/alive/{other}")
        if ended is not None or beat != self.heard[other][0]:
            self.heard[other] = beat, 0.0

    def _look(self) -> None:
        last = time.monotonic()
        while not self.stopped.wait(0.2):
            now = time.monotonic()
            gap, last = min(now - last, 1.0), now  # where this process was stopped itself, nobody is to blame
            for other, (beat, silent) in list(self.heard.items()):
                self.heard[other] = beat, silent + gap
                if silent + gap > self.timeout and not self.stopped.is_set():
                    end(f"process {other} has not been heard of for {self.timeout:g} s: {AGAIN}")


def _value(key: str) -> str | None:
    try:
        return client().key_value_try_get(key)
    except Exception as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


def _speak_before_abort() -> None:
    """Where process 0 is gone, and JAX's service with it, JAX calls abort(): after what it says comes one sentence."""
    from jax._src import distributed
    address = str(distributed.global_state.coordinator_address)

    def last(number):
        try:
            socket.create_connection(_split(address), timeout=2).close()
        except OSError:
            end(f"process 0, where all meet ({address}), is gone: {AGAIN}")
        os._exit(128 + number)
    if os.name == "posix":
        handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(last)  # Python's own handlers do not run inside of abort()
        _kept.append(handler)
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))


def finish() -> None:
    """The good end: waits for the others, and leaves."""
    if _watch is not None:
        barrier("end")
        _watch.stopped.set()
        jax.distributed.shutdown()


def fail(sentence: str) -> None:
    """Tells the others why this process ends, so that they end too."""
    if _watch is not None:
        _watch.stopped.set()
        try:
            client().key_value_set(f"tvjax/ended/{_watch.mine}", " ".join(sentence.split()) or "an error")
            time.sleep(3 * min(1.0, _watch.timeout / 10) if _watch.mine == 0 else 0)  # until the others have heard
        except Exception:
            pass


def broken_off() -> None:
    """Where a collective has failed: leaves the watch the time to find out which process is gone, and to end this one
    with its sentence. Returns where all are there, so that the error is another one."""
    if _watch is not None:
        time.sleep(_watch.timeout + 5)


def end(sentence: str, code: int = DIED) -> NoReturn:
    """Ends this process at once, whatever its other threads wait for."""
    print(sentence, file=sys.stderr, flush=True)
    os._exit(code)
