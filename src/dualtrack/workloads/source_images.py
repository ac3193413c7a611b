"""Source images made from integers: clouds behind overlapping discs, so that there are edges and gradients at every size.

The discs follow the dead-leaves model of natural scenes (Lee, Mumford and Huang, IJCV 2001). Only raw PCG64 words and integer arithmetic
are used: the same bytes on every machine, with every numpy.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_DISCS = 32
OCTAVE_CELLS = (2, 4, 8, 16, 32)  # lattice cells a side; each octave has half the amplitude of the one before

Integers = NDArray[np.signedinteger[Any]]


def paint_source(seed: int, number: int, num_pixels: int) -> NDArray[np.uint8]:
    """Paint source image `number` as uint8 `[3, num_pixels, num_pixels]`."""
    words = np.random.PCG64([seed, number])
    image = _clouds(words, num_pixels)
    shade = image[0] >> 2
    for _ in range(NUM_DISCS):
        row, column, size, *colour = _random_bytes(words, 6).tolist()
        _paint_disc(
            image, shade, (row * num_pixels >> 8, column * num_pixels >> 8, num_pixels * 8 // (24 + size)), colour
        )
    return image.astype(np.uint8)


def _random_bytes(words: np.random.PCG64, count: int) -> NDArray[np.uint8]:
    """Take whole raw words, whose stream numpy guarantees, unlike that of `Generator` methods (NEP 19)."""
    raw = np.asarray(words.random_raw(-(-count // 8)))
    return raw.astype("<u8").view(np.uint8)[:count]


def _clouds(words: np.random.PCG64, num_pixels: int) -> NDArray[np.int32]:
    """Sum octaves of bilinear value noise, mostly grey, to values 0..247."""
    total = np.zeros((3, num_pixels, num_pixels), dtype=np.int32)
    for octave, cells in enumerate(OCTAVE_CELLS):
        side = cells + 1
        lattice = _random_bytes(words, 4 * side * side).reshape(4, side, side).astype(np.int32)
        coloured = (3 * lattice[3] + lattice[:3]) >> 2
        total += _enlarge(_enlarge(coloured, num_pixels).swapaxes(1, 2), num_pixels).swapaxes(1, 2) << (4 - octave)
    return total >> 5


def _enlarge(lattice: NDArray[np.int32], num_pixels: int) -> NDArray[np.int32]:
    """Interpolate the middle axis linearly to `num_pixels`, in steps of 1/256 of a cell."""
    position = np.arange(num_pixels, dtype=np.int32) * ((lattice.shape[1] - 1) * 256) // num_pixels
    cell, fraction = position >> 8, (position & 255)[:, None]
    blended: NDArray[np.int32] = (lattice[:, cell] * (256 - fraction) + lattice[:, cell + 1] * fraction) >> 8
    return blended


def _paint_disc(
    image: NDArray[np.int32], shade: NDArray[np.int32], place: tuple[int, int, int], colour: list[int]
) -> None:
    """Paint an opaque disc (centre row, centre column, radius) in a colour modulated by `shade`, clipped to the image."""
    row, column, radius = place
    top, left = max(0, row - radius), max(0, column - radius)
    window = image[:, top : row + radius + 1, left : column + radius + 1]
    rows = np.arange(top, top + window.shape[1]) - row
    columns = np.arange(left, left + window.shape[2]) - column
    inside = rows[:, None] ** 2 + columns**2 <= radius**2
    paint = (np.array(colour, dtype=np.int32)[:, None, None] * 3 >> 2) + shade[
        top : row + radius + 1, left : column + radius + 1
    ]
    np.copyto(window, paint, where=inside)
