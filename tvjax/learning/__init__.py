"""Learning over task vectors: coefficients Λ of θ0 + Σ Λ_i τ_i, and what trains, judges and selects with them."""
from tvjax.learning.coefficients import Coefficients, Scheme, compose, count, delta, init, parts_of, penalty
from tvjax.learning.pool import Int8, Pool, dense, pool, size, stored_bytes, take

__all__ = [
    "Coefficients", "Int8", "Pool", "Scheme", "compose", "count", "delta", "dense", "init", "parts_of", "penalty",
    "pool", "size", "stored_bytes", "take",
]
