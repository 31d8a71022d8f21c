"""Numbers that are computed once: a JSON-lines file of values under the hash of all that they were computed from."""
import hashlib
import json

from tvjax import checkpoints, results, tree


def cached(path, compute, *parts):
    """`compute()` — a number, or what else JSON holds — taken from the file `path` if it has it for the same `parts`.

    parts: all that the value depends on: parameters, head, data, and strings or numbers for what has no content of its
    own, such as the model's configuration, the split's name and the metric.

    >>> import os, tempfile
    >>> import numpy as np
    >>> path = os.path.join(tempfile.mkdtemp(), "cache.jsonl")
    >>> cached(path, lambda: 0.5, "zero-shot", np.ones(3)), cached(path, lambda: 0.7, "zero-shot", np.ones(3))
    (0.5, 0.5)
    """
    key = content_key(*parts)
    for line in reversed(results.read_lines(path)):
        if line["key"] == key:
            return line["value"]
    value = json.loads(json.dumps(compute()))  # the same types now as when it is read
    results.append_line(path, {"key": key, "value": value})
    return value


def content_key(*parts):
    """A hash of trees of arrays by names, shapes, dtypes and bytes, and of the strings and numbers in them by value.

    >>> import numpy as np
    >>> content_key({"w": np.ones(2)}) == content_key({"w": np.ones(2)}), content_key(1) == content_key("1")
    (True, False)
    """
    found = []
    for part in parts:
        flat = tree.flatten(part)
        plain = {name: repr(leaf) for name, leaf in flat.items() if isinstance(leaf, (str, int, float, bool))}
        arrays = {name: leaf for name, leaf in flat.items() if name not in plain}
        found.append([sorted(plain.items()), checkpoints.content_hash(arrays)])
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:32]
