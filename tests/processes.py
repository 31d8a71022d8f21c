"""Programs in processes of their own, with so many forced CPU devices each; several of them meet over loopback."""
import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
PATIENT = ("--xla_cpu_collective_call_terminate_timeout_seconds=600 "  # XLA aborts where a busy machine is slow
           "--xla_cpu_collective_timeout_seconds=600")


def environment(devices: int, program) -> dict[str, str]:
    """Warnings are errors, but in the command, whose flags warn."""
    strict = {} if program[0] == "-m" else {"PYTHONWARNINGS": "error"}
    many = f"--xla_force_host_platform_device_count={devices} {PATIENT}"
    return {**os.environ, **strict, "XLA_FLAGS": many, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def run(program, *, devices: int, timeout: float = 1800) -> str:
    """What a program prints; it must succeed and say nothing on stderr."""
    done = subprocess.run([sys.executable, *map(str, program)], env=environment(devices, program), capture_output=True,
                          text=True, cwd=ROOT, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def started(program, index: int, *, count: int, port: int, devices: int = 1, flag: str = "") -> subprocess.Popen:
    """One process of several; the last argument tells it where they meet."""
    return subprocess.Popen([sys.executable, *map(str, program), f"{flag}127.0.0.1:{port},{count},{index}"],
                            env=environment(devices, program), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, cwd=ROOT)


def together(program, *, count: int, devices: int = 1, flag: str = "", timeout: float = 1800):
    """[(exit code, stdout, stderr)] of all processes."""
    port = free_port()
    running = [started(program, index, count=count, port=port, devices=devices, flag=flag) for index in range(count)]
    return [ended(one, timeout) for one in running]


def ended(process: subprocess.Popen, timeout: float = 1800):
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, out, err
