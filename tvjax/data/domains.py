"""Visual domains: how a task's images look. image = domain(warp(glyph)), a fixed row of numbers plus jitter.

A domain is a row of 22 numbers (`FIELDS`). Pre-training draws rows from `BROAD`, a box of mild effects; each task owns
a row at least `MARGIN` outside that box, and `draw` also refuses any row within `MARGIN` of those it is told to avoid,
so that no model is pre-trained on a task's own domain.
"""
import functools

import numpy as np

SIDE = 32
# name: (neutral value, unit of the distance, pre-training range)
BROAD: dict[str, tuple[float, float, tuple[float, float]]] = {
    "angle": (0.0, 30.0, (-20.0, 20.0)),  # degrees, anticlockwise
    "stretch": (0.0, 0.3, (-0.15, 0.15)),  # log of width over height
    "wave": (0.0, 2.0, (0.0, 1.2)),  # amplitude of a horizontal displacement, pixels
    "wave_length": (16.0, 16.0, (8.0, 32.0)),  # pixels
    "weight": (0.0, 1.0, (-0.4, 0.5)),  # thinner .. bolder strokes
    "outline": (0.0, 0.7, (0.0, 0.5)),  # 1 keeps the contour only
    "blur": (0.0, 0.7, (0.0, 0.5)),
    "stripes": (0.0, 0.3, (0.0, 0.15)),  # contrasts of three textures
    "checks": (0.0, 0.3, (0.0, 0.15)),
    "clouds": (0.0, 0.5, (0.0, 0.3)),
    "texture_length": (8.0, 8.0, (4.0, 16.0)),  # pixels
    "texture_angle": (0.0, 90.0, (-90.0, 90.0)),
    "shade": (0.0, 0.5, (0.0, 0.3)),  # illumination falling off along texture_angle
    "noise": (0.0, 0.2, (0.0, 0.1)),  # standard deviation
    "occlusion": (0.0, 0.4, (0.0, 0.25)),  # side of a grey square over the image's
    "clutter": (0.0, 0.5, (0.0, 0.25)),  # opacity of a neighbour's fragment
    "ink_r": (0.95, 0.7, (0.0, 1.0)), "ink_g": (0.95, 0.7, (0.0, 1.0)), "ink_b": (0.95, 0.7, (0.0, 1.0)),
    "paper_r": (0.05, 0.7, (0.0, 1.0)), "paper_g": (0.05, 0.7, (0.0, 1.0)), "paper_b": (0.05, 0.7, (0.0, 1.0)),
}
Params = dict[str, np.ndarray]
Colour = tuple[float, ...]  # red, green, blue
FIELDS = tuple(BROAD)
MARGIN = 0.5
_NEUTRAL, _UNIT = (np.array([BROAD[f][i] for f in FIELDS], np.float32) for i in (0, 1))
_LOW, _HIGH = (np.array([BROAD[f][2][i] for f in FIELDS], np.float32) for i in (0, 1))


def domain(*, ink: Colour = (0.95,) * 3, paper: Colour = (0.05,) * 3, **fields: float | int) -> np.ndarray:
    """A row of `FIELDS`, neutral where nothing is said; colours in [0, 1].

    >>> domain(angle=30).shape
    (22,)
    """
    unknown = set(fields) - set(FIELDS)
    if unknown:
        raise ValueError(f"unknown domain field {sorted(unknown)[0]!r}; there are {', '.join(FIELDS)}")
    row = _NEUTRAL.copy()
    for name, value in fields.items():
        row[FIELDS.index(name)] = value
    row[-6:] = *ink, *paper
    return row


def distance(rows: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Euclidean distances (..., ) between domain rows in units of a clearly visible change."""
    return np.sqrt((((rows - other) / _UNIT) ** 2).sum(-1))


def outside(rows: np.ndarray) -> np.ndarray:
    """Distances (...,) of domain rows (..., 22) from the pre-training box; 0 inside."""
    return distance(rows, np.clip(rows, _LOW, _HIGH))


def _contrast(rows: np.ndarray) -> np.ndarray:
    return np.abs(rows[:, -6:-3].mean(1) - rows[:, -3:].mean(1))


def draw(rng: np.random.Generator, size: int, avoid: np.ndarray, *, sparsity: float = 0.6) -> np.ndarray:
    """Random rows (size, 22) from the pre-training box, at least MARGIN from each row of `avoid` (rows, 22).

    Each effect is switched off with probability `sparsity`, colours never; ink and paper differ by .25 in lightness.
    """
    kept: list[np.ndarray] = []
    while sum(map(len, kept)) < size:
        rows = rng.uniform(_LOW, _HIGH, (2 * size, len(FIELDS))).astype(np.float32)
        off = rng.random(rows.shape) < sparsity
        off[:, -6:] = False
        rows = np.where(off, _NEUTRAL, rows)
        near = (distance(rows[:, None], avoid[None]) < MARGIN).any(1) if len(avoid) else np.zeros(len(rows), bool)
        kept.append(rows[~near & (_contrast(rows) >= 0.25)])
    return np.concatenate(kept)[:size]


@functools.lru_cache(maxsize=1)
def _clouds() -> np.ndarray:
    """A bank (64, 32, 32) of smooth random fields in [-1, 1]."""
    coarse = np.random.default_rng(0).uniform(-1, 1, (64, 6, 6)).astype(np.float32)
    at = np.linspace(0, 4.999, SIDE)
    lo, frac = at.astype(int), (at % 1).astype(np.float32)
    rows = coarse[:, lo] * (1 - frac)[:, None] + coarse[:, lo + 1] * frac[:, None]
    return rows[:, :, lo] * (1 - frac) + rows[:, :, lo + 1] * frac


def _grid() -> tuple[np.ndarray, np.ndarray]:
    """Coordinates (v down, u right) of the pixels, (32, 32) each, around 0."""
    at = np.arange(SIDE, dtype=np.float32) - (SIDE - 1) / 2
    v, u = np.meshgrid(at, at, indexing="ij")
    return v, u


def _sample(masters: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Bilinear values in [0, 1] of masters (B, S, S) at the points (x, y) of (B, 32, 32) each."""
    size, side = masters.shape[:2]
    x, y = np.clip(x, 0, side - 1.001), np.clip(y, 0, side - 1.001)
    left, top = x.astype(np.int32), y.astype(np.int32)
    fx, fy = x - left, y - top
    flat = masters.reshape(-1)
    index = np.arange(size, dtype=np.int32)[:, None, None] * side * side + top * side + left
    upper = flat[index] * (1 - fx) + flat[index + 1] * fx
    lower = flat[index + side] * (1 - fx) + flat[index + side + 1] * fx
    return (upper * (1 - fy) + lower * fy) / np.float32(255)


def _warp(masters: np.ndarray, p: Params, slant: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Masters (B, S, S) resampled to (B, 32, 32): rotation, slant, stretch, wave, and a little jitter."""
    size, side = masters.shape[:2]

    def uniform(limit):
        return rng.uniform(-limit, limit, (size, 1, 1)).astype(np.float32)

    v, u = _grid()
    u, v = u[None] - uniform(2.0), v[None] - uniform(2.0)
    u = u + p["wave"] * np.sin(2 * np.pi * (v / p["wave_length"] + uniform(0.5)))
    angle = np.deg2rad(p["angle"] + uniform(5.0))
    zoom, half = side / SIDE * np.exp(uniform(0.08)), np.exp(p["stretch"] / 2)
    x = (np.cos(angle) * u - np.sin(angle) * v) * zoom / half
    y = (np.sin(angle) * u + np.cos(angle) * v) * zoom * half
    return _sample(masters, x + slant[:, None, None] * y + (side - 1) / 2, y + (side - 1) / 2)


def _pooled(mask: np.ndarray, combine) -> np.ndarray:
    """`combine` of each pixel with its four neighbours, border kept."""
    out = mask.copy()
    out[:, 1:] = combine(out[:, 1:], mask[:, :-1])
    out[:, :-1] = combine(out[:, :-1], mask[:, 1:])
    out[:, :, 1:] = combine(out[:, :, 1:], mask[:, :, :-1])
    out[:, :, :-1] = combine(out[:, :, :-1], mask[:, :, 1:])
    return out


def _smooth(mask: np.ndarray) -> np.ndarray:
    """[1, 2, 1]/4 along both axes, applied twice."""
    for _ in range(2):
        mask = np.pad(mask, ((0, 0), (1, 1), (1, 1)), mode="edge")
        mask = (mask[:, :-2] + 2 * mask[:, 1:-1] + mask[:, 2:]) / 4
        mask = (mask[:, :, :-2] + 2 * mask[:, :, 1:-1] + mask[:, :, 2:]) / 4
    return mask


def _strokes(mask: np.ndarray, p: Params) -> np.ndarray:
    """Stroke weight, outline, blur."""
    bold, thin = _pooled(mask, np.maximum), _pooled(mask, np.minimum)
    w, contour = p["weight"], bold - thin
    mask = mask + np.maximum(w, 0) * (bold - mask) + np.maximum(-w, 0) * (thin - mask)
    mask = mask + p["outline"] * (contour - mask)
    soft = _smooth(mask)
    little, much = np.minimum(2 * p["blur"], 1), np.maximum(2 * p["blur"] - 1, 0)
    return mask + little * (soft - mask) + much * (_smooth(_smooth(soft)) - soft)


def _texture(p: Params, rng: np.random.Generator, size: int) -> np.ndarray:
    """Stripes, checks, clouds and shade, (B, 32, 32) around 0."""
    v, u = _grid()
    angle = np.deg2rad(p["texture_angle"])
    along = np.cos(angle) * u + np.sin(angle) * v
    across = -np.sin(angle) * u + np.cos(angle) * v
    phases = rng.uniform(0, 2 * np.pi, (2, size, 1, 1)).astype(np.float32)
    wave = np.sin(2 * np.pi * along / p["texture_length"] + phases[0])
    checks = np.clip(3 * wave * np.sin(2 * np.pi * across / p["texture_length"] + phases[1]), -1, 1)
    clouds = _clouds()[rng.integers(64, size=size)]
    return p["stripes"] * wave + p["checks"] * checks + p["clouds"] * clouds + p["shade"] * along / 22


def _covered(images: np.ndarray, p: Params, rng: np.random.Generator) -> np.ndarray:
    """A grey square of side `occlusion` somewhere over the image."""
    centre = rng.uniform(4, SIDE - 4, (2, len(images), 1)).astype(np.float32)
    half, at = p["occlusion"][:, :, 0] * SIDE / 2, np.arange(SIDE, dtype=np.float32)[None]
    inside = [np.abs(at - c) < half for c in centre]
    square = inside[0][:, :, None] & inside[1][:, None, :]
    return np.where(square[..., None], np.float32(0.5), images)


def render(masters: np.ndarray, rows: np.ndarray, slant: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Images (B, 32, 32, 3) uint8 of the masters (B, S, S) in the domains rows (B, 22), leaning by slant (B,)."""
    p = {name: column[:, None, None] for name, column in zip(FIELDS, rows.astype(np.float32).T, strict=True)}
    size = len(masters)
    mask = _strokes(_warp(masters, p, slant.astype(np.float32), rng), p)
    shift = rng.choice([-20, -16, 16, 20])
    neighbour = np.roll(np.roll(mask, 1, 0), (shift, int(rng.integers(-8, 8))), (1, 2))
    mask = np.maximum(mask, p["clutter"] * neighbour)[..., None]
    colours = rows[:, -6:].astype(np.float32) + rng.uniform(-0.06, 0.06, (size, 6)).astype(np.float32)
    ink, paper = colours[:, None, None, :3], colours[:, None, None, 3:]
    images = paper + (ink - paper) * mask + _texture(p, rng, size)[..., None]
    images = images + p["noise"][..., None] * rng.standard_normal(images.shape, dtype=np.float32)
    return (np.clip(_covered(images, p, rng), 0, 1) * 255 + 0.5).astype(np.uint8)
