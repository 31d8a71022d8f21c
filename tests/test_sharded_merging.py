"""Every method on leaves sharded over four (forced) CPU devices gives the entries of one device, whatever the mesh's
axis types.
"""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tvjax import merging
rng = np.random.default_rng(0)
draw = lambda *shape: rng.standard_normal((2, *shape)).astype(np.float32)
taus = {"layers": {str(i): {"weight": draw(16, 8), "bias": draw(16)} for i in range(2)}}
mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.KIND,))
sharded = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P(None, "x"))), taus)
for name in METHODS:
    one, four = merging.build(name)(taus), merging.build(name)(sharded)
    assert len(jax.tree.leaves(four)[0].devices()) == 4, name
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-6, err_msg=name), one, four)
print("equal")
"""
METHODS = ("task_arithmetic", "ties", "consensus", "dare", "della", "model_stock", "slerp", "tsv_m", "iso_c")


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_leaves(kind):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu",
             "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    code = PROGRAM.replace("KIND", kind).replace("METHODS", repr(METHODS))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env={**os.environ, **flags}, capture_output=True, text=True
    )
    assert done.stdout == "equal\n", done.stderr[-2000:]


SENT = """
import functools
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tvjax import merging
from tvjax.merging import engine, traced
from tvjax.sharding import collectives
mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
leaf = lambda *shape: jax.ShapeDtypeStruct((2, *shape), jnp.float32, sharding=NamedSharding(mesh, P(None, "x")))
several = {"a": leaf(4096, 64), "b": leaf(4096)}
def sent(method, stack):
    program = jax.jit(functools.partial(traced.run, mesh=mesh))
    lowered = program.lower(merging.build(method), stack, engine.task_hashes(None, 2), {})
    return collectives.sent(lowered.compile().as_text())
for method in ("task_arithmetic", "consensus", "ties", "metagpt"):
    found = sent(method, several)
    assert set(found) <= {"all-reduce"} and sum(found.values()) < 4096, (method, found)
assert sent("task_arithmetic", several) == {} and sent("ties", several)["all-reduce"] >= 31 * 2 * 4
gram = sent("wudi", {"a": leaf(4096, 8)})  # rows are spread: parts of Gram matrices are added up, no row travels
assert set(gram) == {"all-reduce"} and gram["all-reduce"] < 4096 * 8, gram
print("small")
"""


def test_devices_send_counts_and_gram_matrices_not_entries():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SENT], env={**os.environ, **flags}, capture_output=True, text=True)
    assert done.stdout == "small\n", done.stderr[-2000:]
