"""Which examples are for training and which for validation, by the rule of the task-vector papers, to the index.

Of N training examples, min(⌊N/10⌋, 5000) are for validation: the last ones of a permutation that torch draws with seed
0 (`random_split` in the code of arXiv:2305.12827). Test sets stay as they are published.
"""
import hashlib

import numpy as np

SHARE, MOST = 0.1, 5000


def permutation(count: int, *, seed: int = 0) -> np.ndarray:
    """The permutation of 0 … count − 1 that `torch.randperm` draws on a CPU with a generator of that seed.

    Torch and numpy share the Mersenne twister and its seeding; torch then swaps entry i with i + draw mod (count − i).

    >>> permutation(60000)[0].item()  # which the papers' code asserts for MNIST
    36044
    """
    if not 0 <= count < 2**32 // 20:
        raise ValueError(f"torch draws a permutation of {count} examples in another way, which is not written here")
    twister = np.random.MT19937()
    twister._legacy_seeding(seed)
    draws = twister.random_raw(max(count - 1, 0)) % np.arange(count, 1, -1, dtype=np.uint64)
    row = list(range(count))
    for i, draw in enumerate(draws.tolist()):
        row[i], row[i + draw] = row[i + draw], row[i]
    return np.array(row, dtype=np.int64)


def held_out_size(count: int, *, share: float = SHARE, most: int = MOST) -> int:
    """How many of `count` training examples are for validation.

    >>> held_out_size(60000), held_out_size(8144)
    (5000, 814)
    """
    return min(int(count * share), most)


def train_val(count: int, *, share: float = SHARE, most: int = MOST, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(indices for training, indices for validation), disjoint; ValueError where there are too few to hold any out."""
    held = held_out_size(count, share=share, most=most)
    if not held:
        raise ValueError(f"of {count} training examples none can be held out for validation: give a split of its own")
    row = permutation(count, seed=seed)
    return row[:count - held], row[count - held:]


def first(count: int, most: int, *, seed: int = 0) -> np.ndarray:
    """Indices of at most `most` of `count` examples: all, in their order, or the first ones of a permutation.

    Published files are often sorted by class, so their first examples are no sample of them.
    """
    return np.arange(count) if count <= most else permutation(count, seed=seed)[:most]


def index_hash(indices) -> str:
    """A hash of indices, by which two people see that they split alike.

    >>> index_hash([2, 0, 1])
    '53afea62'
    """
    return hashlib.sha256(np.ascontiguousarray(indices, dtype="<i8").tobytes()).hexdigest()[:8]
