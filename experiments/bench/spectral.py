"""What TSV-M and Iso-C cost for one matrix of eight tasks, by solver and library, and how far each is from float64.

    taskset -c 0 python experiments/bench/spectral.py > experiments/bench/spectral.md

CPU seconds of the process on one core, which measure on a shared machine nearly what they would on an idle one. The
matrices are products of Gaussian ones with a spectrum that falls as i^-0.6, plus a part that all tasks share. The
libraries' route is the published codes': a full SVD of each task and of the two concatenations (TSV-M), or of the sum
(Iso-C).
"""

import functools
import os
import sys
import time

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import scipy.linalg  # noqa: E402
import torch  # noqa: E402

from tvjax import merging  # noqa: E402
from tvjax.merging import traced  # noqa: E402

TASKS, SHAPES = 8, [(768, 768), (768, 3072)]


def deltas(rows: int, columns: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    fall = np.arange(1, rows + 1) ** -0.6
    draw = lambda: (rng.standard_normal((rows, rows)) * fall) @ rng.standard_normal((rows, columns)) / rows
    common = draw()
    return np.stack([1e-3 * (draw() + 0.5 * common) for _ in range(TASKS)]).astype(np.float32)


def tsv_m(x, svd):
    k = min(x.shape[1:]) // len(x)
    parts = [svd(matrix) for matrix in x]
    polar = lambda a: (lambda f: f[0] @ f[2])(svd(a))
    U = polar(np.concatenate([u[:, :k] for u, _, _ in parts], 1))
    V = polar(np.concatenate([v[:k].T for _, _, v in parts], 1))
    return U * np.concatenate([s[:k] for _, s, _ in parts]) @ V.T


def iso_c(x, svd):
    u, s, v = svd(x.sum(0))
    return s.mean() * (u @ v)


LIBRARIES = {
    "torch.linalg.svd": lambda a: [part.numpy() for part in torch.linalg.svd(torch.from_numpy(a), full_matrices=False)],
    "scipy.linalg.svd": lambda a: scipy.linalg.svd(a, full_matrices=False, check_finite=False),
}
PEERS, OURS = {"Iso-C": iso_c, "TSV-M": tsv_m}, {"Iso-C": merging.iso_c, "TSV-M": merging.tsv_m}


def by_eigh(a):
    """The SVD of a float64 matrix from its smaller Gram matrix: good to 1e-9 for condition numbers below 1e3 or so."""
    if len(a) > a.shape[1]:
        u, s, v = by_eigh(a.T)
        return v.T, s, u.T
    e, u = np.linalg.eigh(a @ a.T)
    s = np.sqrt(np.maximum(e[::-1], 0))
    return u[:, ::-1], s, (u[:, ::-1].T @ a) / s[:, None]


def timed(f):
    """(CPU seconds, result) of one call."""
    start = time.process_time()
    made = f()
    return time.process_time() - start, made


def rows_of(method, x):
    """(route, seconds, result) of each route; ours compiled beforehand."""
    merge = lambda operator, x: traced.run(operator, {"w": x}, np.arange(TASKS, dtype=np.uint32), {})["w"]
    for solver in ("auto", "svd"):
        operator = OURS[method](solver=solver)
        program = jax.jit(merge).lower(operator, x).compile()
        yield f"tvjax, solver={solver}", *timed(lambda run=program, it=operator: np.asarray(run(it, x)))
    for library, svd in LIBRARIES.items():
        yield library, *timed(functools.partial(PEERS[method], x, svd))


def main() -> None:
    torch.set_num_threads(1)
    print(f"# TSV-M and Iso-C of {TASKS} tasks, one matrix\n\n{__doc__.partition(chr(10) * 2)[2]}")
    print("| method | shape | route | CPU seconds | relative error to float64 |\n| --- | --- | --- | --- | --- |")
    for rows, columns in SHAPES:
        x = deltas(rows, columns)
        for method in PEERS:
            exact = PEERS[method](x.astype(np.float64), by_eigh)
            for route, cost, made in rows_of(method, x):
                error = np.linalg.norm(made - exact) / np.linalg.norm(exact)
                print(f"| {method} | {rows}×{columns} | {route} | {cost:.2f} | {error:.1e} |", flush=True)
    modules = ", ".join(f"{module.__name__} {module.__version__}" for module in (jax, np, scipy, torch))
    print(f"\nPython {sys.version.split()[0]}, {modules}")


if __name__ == "__main__":
    main()
