"""The embedded data set: drawings of stained blood cells, to try, teach and test without a download.

Nothing here was photographed. An image is drawn in layers, as light sees a smear: red cells, cytoplasm,
granules and nucleus each hold an amount of three stains, the stains absorb light, and lens and sensor do the
rest. Form and texture tell the classes apart (lobes of the nucleus, granules); colours and sizes overlap.

The pixels come from additions, multiplications, divisions and rounded cosines, and not from `exp`, matrix
products or long sums, whose last bits differ between processors: one seed should give one hash everywhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedkper.data.dataset import Dataset
from fedkper.errors import InputError

Floats = NDArray[np.float32]
Range = tuple[float, float]

SIZE = 28
HOSPITALS = 8
_FINE = 2 * SIZE
"""Drawn at twice the resolution, then averaged, so that edges are smooth."""
_CHUNK = 100
"""Images drawn together. Each chunk has its own random stream: image i is the same in sets of every size."""
_RED_CELLS = 16
_LOBES = 5
_AXIS = ((np.arange(_FINE, dtype=np.float32) + 0.5) / 2 - SIZE / 2).astype(np.float32)
_STAINS = np.array([(0.72, 1.12, 0.34), (0.10, 0.52, 0.44), (0.50, 0.36, 0.07)], np.float32)
"""Absorption of red, green and blue by one unit of azure (purple), eosin (pink) and basic blue."""


class _Cell(NamedTuple):
    """How a class is drawn: ranges that each image draws from. Lengths of the nucleus are in cell radii."""

    share: int  # images of this class among 100, rounded from BloodMNIST
    radius: Range  # of the cell, in pixels of the finished image
    lobes: Range  # how many, strung on an arc; rounded down
    lobe: Range  # radius of a lobe
    arc: Range  # radius of the arc on which the lobes lie
    step: Range  # angle between neighbouring lobes, radians
    chromatin: Range  # azure of the nucleus
    clumps: Range  # contrast of its texture
    pink: Range  # eosin of the cytoplasm
    blue: Range  # basic blue of the cytoplasm
    grains: Range  # amount of granules
    coarse: Range  # their size: 0 dust, 1 coarse
    warm: Range  # their stain: 0 azure, 1 eosin
    cover: Range  # how far they hide the nucleus: 0 not at all, 1 entirely


_CELLS = {
    "basophil": _Cell(7, (6.4, 9.2), (2, 4), (0.34, 0.46), (0.28, 0.42), (1.3, 2.2),
        (0.6, 1), (0.1, 0.4), (0.1, 0.5), (0.1, 0.5), (0.9, 1.4), (0.7, 1), (0, 0.2), (0.8, 1)),
    "eosinophil": _Cell(18, (6.6, 9.4), (2, 3.2), (0.33, 0.42), (0.42, 0.52), (2, 2.9),
        (0.8, 1.4), (0.2, 0.6), (0.3, 0.8), (0, 0.3), (0.7, 1.2), (0.6, 1), (0.7, 1), (0, 0.2)),
    "erythroblast": _Cell(9, (4.8, 7.2), (1, 1), (0.48, 0.64), (0, 0.2), (0, 0),
        (0.9, 1.5), (0.4, 1), (0.4, 0.9), (0, 0.6), (0, 0.1), (0, 0.5), (0, 1), (0, 0.1)),
    "immature granulocytes": _Cell(17, (6.6, 9.6), (1, 2.5), (0.56, 0.68), (0.14, 0.3), (0.4, 0.6),
        (0.7, 1.3), (0.2, 0.6), (0.1, 0.6), (0.1, 0.7), (0.4, 0.9), (0.1, 0.6), (0, 0.5), (0.1, 0.4)),
    "lymphocyte": _Cell(7, (5, 8), (1, 1), (0.8, 0.92), (0, 0.14), (0, 0),
        (0.7, 1.3), (0.3, 0.9), (0, 0.3), (0.3, 0.9), (0, 0.2), (0, 0.6), (0, 0.6), (0, 0.1)),
    "monocyte": _Cell(8, (6.8, 9.6), (4, 6), (0.29, 0.38), (0.44, 0.56), (0.6, 0.8),
        (0.7, 1.3), (0.2, 0.6), (0.1, 0.4), (0.4, 0.9), (0, 0.3), (0, 0.2), (0, 0.6), (0, 0.1)),
    "neutrophil": _Cell(20, (6.4, 9.2), (3, 6), (0.24, 0.31), (0.42, 0.56), (0.95, 1.35),
        (0.8, 1.4), (0.2, 0.6), (0.2, 0.7), (0, 0.3), (0.2, 0.6), (0, 0.3), (0.3, 1), (0, 0.2)),
    "platelet": _Cell(14, (2.2, 5.6), (1, 6), (0.4, 0.7), (0.3, 0.8), (0.9, 2.4),
        (0, 0), (0, 0), (0.2, 0.6), (0.2, 0.7), (0.4, 1), (0, 0.6), (0, 0.4), (0, 0)),
}  # fmt: skip
CLASSES = tuple(_CELLS)


def load(seed: int = 1, train: int = 4000, test: int = 1000) -> Dataset:
    """Draw `train` and `test` images [N, 28, 28, 3] uint8 of 8 classes, numbered 0 to 7 as in CLASSES.

    The column "hospital" (0 to 7) tells whose stain and lamp a train image has; the differences are mild, and
    the test split mixes all hospitals. A smaller set is the beginning of a larger one with the same seed.
    """
    if seed < 0 or train < 1 or test < 1:
        wrong = f"synthetic data: seed {seed}, train {train}, test {test}"
        raise InputError(f"{wrong}; give a seed of 0 or more and at least one image for each split")
    train_x, train_y, hospital = _split(seed, 0, train)
    test_x, test_y, _ = _split(seed, 1, test)
    source: dict[str, Any] = {
        "drawn_by": "fedkper.data.synthetic",
        "seed": seed,
        "licence": "CC0 1.0",
        "note": "drawings, not photographs; no use in medicine",
    }
    return Dataset("synthetic", CLASSES, train_x, train_y, test_x, test_y, {"hospital": hospital}, source)


def _split(
    seed: int, split: int, count: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Images, labels and hospitals of one split (0 train, 1 test)."""
    styles = _uniform(np.random.Generator(np.random.PCG64((seed, 2))), (HOSPITALS, 5), -1, 1)
    x = np.empty((count, SIZE, SIZE, 3), np.uint8)
    y = np.empty(count, np.int64)
    hospital = np.empty(count, np.int64)
    labels = np.repeat(np.arange(len(CLASSES)), [cell.share for cell in _CELLS.values()])
    for start in range(0, count, _CHUNK):
        rng = np.random.Generator(np.random.PCG64((seed, split, start)))
        here = slice(start, min(start + _CHUNK, count))
        size = here.stop - start
        drawn_y, drawn_h = rng.permutation(labels), rng.integers(0, HOSPITALS, _CHUNK)
        x[here] = _draw(rng, drawn_y, styles[drawn_h])[:size]
        y[here], hospital[here] = drawn_y[:size], drawn_h[:size]
    return x, y, hospital


def _draw(rng: np.random.Generator, y: NDArray[np.int64], style: Floats) -> NDArray[np.uint8]:
    """A chunk of images [n, 28, 28, 3]; `style` [n, 5] in -1 to 1: the hospital's stain (3), lamp (2)."""
    n = len(y)
    p = _parameters(rng, y)
    # Bent coordinates make every outline drawn in them irregular.
    bend = _noise(rng, (2, n), 7) * _column(_uniform(rng, n, 0.8, 1.8))
    x0, y0 = _AXIS[None, None, :] + bend[0], _AXIS[None, :, None] + bend[1]
    centre = _uniform(rng, (2, n), -3.0, 3.0)

    pink, azure = _red_cells(rng, x0, y0, centre, p)
    blue = np.zeros_like(pink)
    body, nucleus = _central_cell(rng, x0 - _column(centre[0]), y0 - _column(centre[1]), p)

    dust, coarse, mottle = _noise(rng, n, 28), _noise(rng, n, 14), _noise(rng, n, 28)
    size = _column(p["coarse"])
    grain = np.clip(2.2 * (dust + size * (2.4 * coarse - 0.4 * dust)) + 0.15, 0, 1)
    grain *= body * _column(p["grains"]) * (1 - nucleus * _column(1 - p["cover"]))
    hidden = 1 - nucleus * 0.9
    clear = 1 - body
    pink = pink * clear + body * hidden * _column(p["pink"]) * (0.7 + 0.3 * mottle)
    blue = blue + body * hidden * _column(p["blue"]) * (0.8 + 0.4 * coarse)
    texture = 1 + _column(p["clumps"]) * (0.5 * mottle + 0.9 * coarse)
    azure = azure * clear + nucleus * _column(p["chromatin"]) * texture
    azure += grain * _column(1 - p["warm"]) * 0.9
    pink += grain * _column(p["warm"]) * 1.3
    return _photograph(rng, np.stack([azure, pink, blue]), style)


def _parameters(rng: np.random.Generator, y: NDArray[np.int64]) -> dict[str, Floats]:
    """One value [n] for every range of _Cell, drawn within that of its class, and "sharp", a focus."""
    names = _Cell._fields[1:]
    ranges = np.array([cell[1:] for cell in _CELLS.values()], np.float32)[y]
    low, high = ranges[..., 0], ranges[..., 1]
    values = low + (high - low) * rng.random(low.shape, np.float32)
    named: dict[str, Floats] = {name: values[:, i] for i, name in enumerate(names)}
    named["sharp"] = _uniform(rng, len(y), 0.7, 1.5)
    return named


def _red_cells(
    rng: np.random.Generator, x: Floats, y: Floats, centre: Floats, p: dict[str, Floats]
) -> tuple[Floats, Floats]:
    """Eosin of the red cells and azure of stray platelets around the central cell, [n, 56, 56] each."""
    n = len(p["radius"])
    size = _uniform(rng, n, 3.1, 4.3)
    wanted = rng.integers(5, _RED_CELLS + 1, n)
    placed = np.full((n, _RED_CELLS, 2), 1e3, np.float32)
    count = np.zeros(n, np.int64)
    for spot in _uniform(rng, (80, n, 2), -17, 17):
        # Red cells touch and overlap a little, but the large cell pushes them aside.
        far = ((spot - centre.T) ** 2).sum(1) > (p["radius"] + 0.8 * size) ** 2
        free = ((spot[:, None] - placed) ** 2).sum(2).min(1) > (1.75 * size) ** 2
        (here,) = np.nonzero(far & free & (count < wanted))
        placed[here, count[here]] = spot[here]
        count[here] += 1
    pink = np.zeros((n, _FINE, _FINE), np.float32)
    pale = _column(_uniform(rng, n, 0.2, 0.75))
    for k in range(_RED_CELLS):
        r: Floats = size * _uniform(rng, n, 0.85, 1.1)
        q = _distance(x, y, placed[:, k, 0], placed[:, k, 1], r)
        disc = np.clip(0.5 + (1 - q) * _column(p["sharp"] * r * 0.5), 0, 1)
        pink += disc * (0.75 - pale * np.maximum(0, 1 - 2.2 * q))
    azure = np.zeros_like(pink)
    for spot in _uniform(rng, (2, n, 2), -24, 24):
        r = _uniform(rng, n, 0.8, 1.8)
        azure += np.maximum(0, 1 - _distance(x, y, spot[:, 0], spot[:, 1], r)) * 0.9
    return pink, azure


def _central_cell(
    rng: np.random.Generator, x: Floats, y: Floats, p: dict[str, Floats]
) -> tuple[Floats, Floats]:
    """Coverage 0 to 1 of the whole cell and of its nucleus, [n, 56, 56] each; x and y are 0 at its centre."""
    radius, sharp = p["radius"], p["sharp"]
    n = len(radius)
    k = np.arange(_LOBES, dtype=np.float32)
    lobes = np.floor(p["lobes"])[:, None]
    turn = _uniform(rng, n, 0, 2 * np.pi)[:, None]
    angle = turn + (k - (lobes - 1) / 2) * p["step"][:, None] * _uniform(rng, (n, _LOBES), 0.85, 1.15)
    arc = (radius * p["arc"])[:, None] * _uniform(rng, (n, _LOBES), 0.85, 1.15)
    lobe = np.where(k < lobes, (radius * p["lobe"])[:, None] * _uniform(rng, (n, _LOBES), 0.85, 1.15), 1e-3)
    # In double, then rounded: the last bits of a cosine are not the same on every processor.
    cx = arc * np.cos(angle.astype(np.float64)).astype(np.float32)
    cy = arc * np.sin(angle.astype(np.float64)).astype(np.float32)
    # Each lobe is a hill; the outline runs where the hills add up to a quarter, so that near lobes join.
    field = np.zeros((n, _FINE, _FINE), np.float32)
    for i in range(_LOBES):
        field += np.maximum(0, 1 - _distance(x, y, cx[:, i], cy[:, i], lobe[:, i]) / 2) ** 2
    lobed = np.clip(0.5 + (field - 0.25) * _column(sharp * 3), 0, 1)
    stretch = _uniform(rng, n, 0.9, 1.1)
    q = (x / _column(radius * stretch)) ** 2 + (y / _column(radius / stretch)) ** 2
    whole = np.clip(0.5 + (1 - q) * _column(sharp * radius * 0.5), 0, 1)
    # Platelets have no nucleus: their lobes are the clump itself.
    is_clump = (p["chromatin"] == 0)[:, None, None]
    return np.where(is_clump, lobed, whole), np.where(is_clump, np.float32(0), lobed * whole)


def _photograph(rng: np.random.Generator, amounts: Floats, style: Floats) -> NDArray[np.uint8]:
    """Light through the stains `amounts` [3, n, 56, 56], as 8-bit pixels [n, 28, 28, 3]."""
    n = amounts.shape[1]
    strength = _uniform(rng, (n, 3), 0.6, 1.45) + 0.12 * style[:, :3]
    hue = _STAINS * _uniform(rng, (n, 3, 3), 0.75, 1.25)
    lamp = np.array((0.95, 0.90, 0.87), np.float32) + _uniform(rng, (n, 3), -0.09, 0.05)
    lamp[:, [0, 2]] += 0.02 * style[:, 3:]
    slope = _uniform(rng, (2, n), -0.007, 0.007)
    light = 1 + _AXIS[None, None, :] * _column(slope[0]) + _AXIS[None, :, None] * _column(slope[1])
    ground = 0.05 * (1 + _noise(rng, n, 7))
    focus = _column(_uniform(rng, n, 0.0, 0.7))
    grain = _uniform(rng, n, 0.006, 0.022)
    out = np.empty((n, SIZE, SIZE, 3), np.uint8)
    for c in range(3):
        d = ground * (1 + 0.4 * c)
        for s in range(3):
            d += amounts[s] * _column(strength[:, s] * hue[:, s, c])
        # Close to exp(-d), from operations that every processor rounds alike.
        full = light * _column(lamp[:, c]) / (1 + d * (1 + d * (0.5 + d / np.float32(6))))
        image: Floats = (
            full[:, ::2, ::2] + full[:, 1::2, ::2] + full[:, ::2, 1::2] + full[:, 1::2, 1::2]
        ) * 0.25
        image += focus * (_blur(image) - image)
        speckle = rng.random(image.shape, np.float32) + rng.random(image.shape, np.float32) - 1
        image += speckle * _column(2 * grain)
        out[..., c] = np.clip(image * 255 + 0.5, 0, 255)
    return out


def _noise(rng: np.random.Generator, shape: int | tuple[int, ...], cells: int) -> Floats:
    """Smooth noise in -1 to 1, [*shape, 56, 56]: random values on a grid of cells x cells, interpolated."""
    shape = (shape,) if isinstance(shape, int) else shape
    field = 2 * rng.random((*shape, cells, cells), np.float32) - 1
    while field.shape[-1] < _FINE:
        for axis in (-1, -2):
            before, after = _neighbours(field, axis)
            pair = np.stack(
                [0.75 * field + 0.25 * before, 0.75 * field + 0.25 * after], axis % field.ndim + 1
            )
            field = pair.reshape([2 * s if i == axis % field.ndim else s for i, s in enumerate(field.shape)])
    return field


def _blur(image: Floats) -> Floats:
    for axis in (-1, -2):
        before, after = _neighbours(image, axis)
        image = 0.5 * image + 0.25 * (before + after)
    return image


def _neighbours(field: Floats, axis: int) -> tuple[Floats, Floats]:
    """The field moved by one place both ways along an axis, its edge repeated."""
    last = field.shape[axis] - 1
    places = np.arange(last + 1)
    return field.take(np.maximum(places - 1, 0), axis), field.take(np.minimum(places + 1, last), axis)


def _distance(x: Floats, y: Floats, cx: Floats, cy: Floats, r: Floats) -> Floats:
    """Squared distance [n, 56, 56] from the points (cx, cy) [n], in units of the radii r [n]."""
    return ((x - _column(cx)) ** 2 + (y - _column(cy)) ** 2) * _column(np.reciprocal(r * r))


def _column(values: Floats) -> Floats:
    """[n] as [n, 1, 1], to meet [n, 56, 56]."""
    return values[:, None, None].astype(np.float32)


def _uniform(rng: np.random.Generator, shape: int | tuple[int, ...], low: float, high: float) -> Floats:
    return np.float32(low) + np.float32(high - low) * rng.random(shape, np.float32)
