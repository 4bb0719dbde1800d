"""The Triton kernels: two for the crops of one size. A program makes one tile after the other.

`resize_tiles` makes a tile of a crop: only the band of the image that the tile needs, as two products with banded
weights on the tensor cores. It applies the color operations up to contrast, which needs the mean of the whole crop, and
sums that mean in whole numbers, so that it does not depend on the order of the tiles. `finish_tiles` applies all other
operations. Weights are computed, not stored: a table of them would be larger than the images.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headway.data.images.draws import FLOATS, INTS

IMAGE_COLUMNS = tl.constexpr(4)
"""of the table of images: address, and bytes from one channel, row and column to the next"""
_INTS, _FLOATS = tl.constexpr(INTS), tl.constexpr(FLOATS)
_RED, _GREEN, _BLUE = tl.constexpr(0.2989), tl.constexpr(0.587), tl.constexpr(0.114)
MEAN_SCALE = tl.constexpr(256.0)  # the mean of a crop is summed in units of 1/256
_RADIUS = tl.constexpr(4)  # of the blur


@triton.jit
def _cubic(x):
    """Returns the bicubic filter with a = -0.5, as in Pillow."""
    x = tl.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return tl.where(x < 1.0, near, tl.where(x < 2.0, far, 0.0))


@triton.jit
def _weights(outputs, inputs, scale, size, CUBIC: tl.constexpr):
    """Returns how much each input pixel counts for each output pixel, roughly normalized; 0 outside of the box."""
    spread = tl.maximum(scale, 1.0)
    distance = (inputs.to(tl.float32) + 0.5 - (outputs.to(tl.float32) + 0.5) * scale) / spread
    if CUBIC:
        weight = _cubic(distance)
    else:
        weight = tl.maximum(1.0 - tl.abs(distance), 0.0)
    return tl.where((inputs >= 0) & (inputs < size), weight / spread, 0.0).to(tl.float16)


@triton.jit
def _band(first, count, scale, size, CUBIC: tl.constexpr):
    """Returns the range of input pixels that some output pixels need."""
    support = tl.maximum(scale, 1.0) * (2.0 if CUBIC else 1.0)
    low = tl.maximum(((first + 0.5) * scale - support).to(tl.int32) - 1, 0)
    high = tl.minimum(((first + count - 0.5) * scale + support).to(tl.int32) + 2, size)
    return low, high


@triton.jit
def _gray(red, green, blue):
    return red * _RED + green * _GREEN + blue * _BLUE


@triton.jit
def _clamp(x):
    return tl.minimum(tl.maximum(x, 0.0), 255.0)


@triton.jit
def _channel(top, chroma, place):
    place = place - 6.0 * tl.floor(place * (1.0 / 6.0))
    return top - chroma * tl.minimum(tl.maximum(tl.minimum(place, 4.0 - place), 0.0), 1.0)


@triton.jit
def _shift_hue(red, green, blue, shift):
    top = tl.maximum(tl.maximum(red, green), blue)
    chroma = top - tl.minimum(tl.minimum(red, green), blue)
    share = 1.0 / tl.where(chroma > 0, chroma, 1.0)
    hue = tl.where(top == green, (blue - red) * share + 2.0, (red - green) * share + 4.0)
    hue = tl.where(top == red, (green - blue) * share, hue) + 6.0 * shift + 6.0
    return (
        _channel(top, chroma, hue + 5.0),
        _channel(top, chroma, hue + 3.0),
        _channel(top, chroma, hue + 1.0),
    )


@triton.jit
def _blend(x, other, factor):
    return _clamp(factor * x + (1.0 - factor) * other)


@triton.jit
def _change(red, green, blue, op, floats, mean):
    """Applies one color operation."""
    if op == 4:
        red, green, blue = _shift_hue(red, green, blue, tl.load(floats + 3))
    elif op > 0:
        factor = tl.load(floats + op - 1)
        gray = _gray(red, green, blue)
        other = tl.where(op == 1, 0.0, tl.where(op == 2, mean, gray))
        red, green, blue = (
            _blend(red, other, factor),
            _blend(green, other, factor),
            _blend(blue, other, factor),
        )
    return red, green, blue


@triton.jit
def _product(address, rows, columns, weights, inside):
    """Returns the product of a part of one channel and weights."""
    pixels = tl.load(address + rows + columns, mask=inside, other=0)
    return tl.dot(pixels.to(tl.float16), weights)


@triton.jit
def resize_tiles(
    images, ints, floats, resized, sums, crops_per_image, total,
    SIZE: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr, CUBIC: tl.constexpr,
):  # fmt: skip
    """Makes `total` tiles of crops. `resized` has crops x 3 x SIZE x SIZE values from 0 to 255."""
    for number in range(tl.program_id(0), total, tl.num_programs(0)):
        _resize_tile(images, ints, floats, resized, sums, crops_per_image, number, SIZE, TILE, K, CUBIC)


@triton.jit
def _resize_tile(
    images, ints, floats, resized, sums, crops_per_image, number,
    SIZE: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr, CUBIC: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (SIZE + TILE - 1) // TILE
    crop, tile = number // (tiles * tiles), number % (tiles * tiles)
    first_y, first_x = (tile // tiles) * TILE, (tile % tiles) * TILE
    ints += crop * _INTS
    floats += crop * _FLOATS
    image = images + (crop // crops_per_image) * IMAGE_COLUMNS
    stride_c = tl.load(image + 1).to(tl.int32)
    stride_y, stride_x = tl.load(image + 2).to(tl.int32), tl.load(image + 3).to(tl.int32)
    top, left, height, width = tl.load(ints), tl.load(ints + 1), tl.load(ints + 2), tl.load(ints + 3)
    address = tl.load(image).to(tl.pointer_type(tl.uint8)) + top * stride_y + left * stride_x
    scale_y, scale_x = height / tl.load(ints + 4).to(tl.float32), width / tl.load(ints + 5).to(tl.float32)
    start_y, start_x = first_y + tl.load(ints + 6), first_x + tl.load(ints + 7)
    low_y, high_y = _band(start_y, TILE, scale_y, height, CUBIC)
    low_x, high_x = _band(start_x, TILE, scale_x, width, CUBIC)
    out_y, out_x, steps = start_y + tl.arange(0, TILE), start_x + tl.arange(0, TILE), tl.arange(0, K)
    red = tl.zeros((TILE, TILE), tl.float32)
    green, blue = red, red
    sum_y, sum_x = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    for y in range(low_y, high_y, K):
        part_r = tl.zeros((K, TILE), tl.float32)
        part_g, part_b = part_r, part_r
        rows = ((y + steps) * stride_y)[:, None]
        for x in range(low_x, high_x, K):
            weights = _weights(out_x[None, :], (x + steps)[:, None], scale_x, width, CUBIC)
            sum_x += tl.where(y == low_y, tl.sum(weights.to(tl.float32), 0), 0.0)
            columns = ((x + steps) * stride_x)[None, :]
            inside = (y + steps < height)[:, None] & (x + steps < width)[None, :]
            part_r += _product(address, rows, columns, weights, inside)
            part_g += _product(address + stride_c, rows, columns, weights, inside)
            part_b += _product(address + 2 * stride_c, rows, columns, weights, inside)
        weights = _weights(out_y[:, None], (y + steps)[None, :], scale_y, height, CUBIC)
        sum_y += tl.sum(weights.to(tl.float32), 1)
        red += tl.dot(weights, part_r.to(tl.float16))
        green += tl.dot(weights, part_g.to(tl.float16))
        blue += tl.dot(weights, part_b.to(tl.float16))
    norm = 1.0 / (sum_y[:, None] * sum_x[None, :])
    red, green, blue = _clamp(red * norm), _clamp(green * norm), _clamp(blue * norm)
    order = tl.load(ints + 9)
    contrast = 0
    for slot in tl.static_range(4):
        op = (order >> (3 * slot)) & 7
        contrast = contrast | (op == 2).to(tl.int32)
        red, green, blue = _change(red, green, blue, tl.where(contrast == 0, op, 0), floats, 0.0)
    rows, columns = first_y + tl.arange(0, TILE), first_x + tl.arange(0, TILE)
    inside = (rows < SIZE)[:, None] & (columns < SIZE)[None, :]
    if contrast != 0:
        gray = tl.where(inside, _gray(red, green, blue), 0.0)
        tl.atomic_add(sums + crop, (tl.sum(gray) * MEAN_SCALE + 0.5).to(tl.int64))
    columns = tl.where((tl.load(ints + 8) & 1) != 0, SIZE - 1 - columns, columns)
    out = resized + crop.to(tl.int64) * 3 * SIZE * SIZE + rows[:, None] * SIZE + columns[None, :]
    tl.store(out, red.to(tl.float16), mask=inside)
    tl.store(out + SIZE * SIZE, green.to(tl.float16), mask=inside)
    tl.store(out + 2 * SIZE * SIZE, blue.to(tl.float16), mask=inside)


@triton.jit
def _reflect(places, SIZE: tl.constexpr):
    """Returns places beyond the border of a crop as their mirror images within it."""
    period: tl.constexpr = 2 * (SIZE - 1) if SIZE > 1 else 1
    places = tl.abs(places) % period
    return tl.minimum(places, period - places)


@triton.jit
def _blur(pixels, band):
    across = tl.dot(pixels.to(tl.float16), band)
    return tl.dot(tl.trans(band), across.to(tl.float16))


@triton.jit
def _put(out, x, factor, summand, inside, ROUND: tl.constexpr):
    x = x * factor + summand
    if ROUND:
        x = tl.floor(_clamp(x) + 0.5)
    tl.store(out, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def finish_tiles(
    ints, floats, resized, sums, norms, out, crops_per_image, total,
    by_crop, by_image, by_channel, by_row, by_column,
    SIZE: tl.constexpr, TILE: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Finishes `total` tiles of crops."""
    for number in range(tl.program_id(0), total, tl.num_programs(0)):
        _finish_tile(
            ints, floats, resized, sums, norms, out, crops_per_image, number,
            by_crop, by_image, by_channel, by_row, by_column, SIZE, TILE, ROUND,
        )  # fmt: skip


@triton.jit
def _finish_tile(
    ints, floats, resized, sums, norms, out, crops_per_image, number,
    by_crop, by_image, by_channel, by_row, by_column,
    SIZE: tl.constexpr, TILE: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Finishes a tile of a crop, whose border of four pixels on each side is only read."""
    inner: tl.constexpr = TILE - 2 * _RADIUS
    tiles: tl.constexpr = (SIZE + inner - 1) // inner
    crop, tile = number // (tiles * tiles), number % (tiles * tiles)
    ints += crop * _INTS
    floats += crop * _FLOATS
    rows = (tile // tiles) * inner - _RADIUS + tl.arange(0, TILE)
    columns = (tile % tiles) * inner - _RADIUS + tl.arange(0, TILE)
    near_y, near_x = _reflect(rows, SIZE), _reflect(columns, SIZE)
    pixels = resized + crop.to(tl.int64) * 3 * SIZE * SIZE + near_y[:, None] * SIZE + near_x[None, :]
    red = tl.load(pixels).to(tl.float32)
    green = tl.load(pixels + SIZE * SIZE).to(tl.float32)
    blue = tl.load(pixels + 2 * SIZE * SIZE).to(tl.float32)
    mean = tl.load(sums + crop).to(tl.float32) / (MEAN_SCALE * SIZE * SIZE)
    order, flags, sigma = tl.load(ints + 9), tl.load(ints + 8), tl.load(floats + 4)
    contrast = 0
    for slot in tl.static_range(4):
        op = (order >> (3 * slot)) & 7
        contrast = contrast | (op == 2).to(tl.int32)
        red, green, blue = _change(red, green, blue, tl.where(contrast != 0, op, 0), floats, mean)
    if (flags & 2) != 0:
        red = _gray(red, green, blue)
        green, blue = red, red
    if sigma > 0:
        places = tl.arange(0, TILE)
        distance = (places[:, None] - places[None, :]).to(tl.float32)
        band = tl.where(
            tl.abs(distance) <= _RADIUS, tl.exp(-0.5 * distance * distance / (sigma * sigma)), 0.0
        )
        taps = tl.arange(0, 16).to(tl.float32) - _RADIUS
        total = tl.sum(tl.where(taps <= _RADIUS, tl.exp(-0.5 * taps * taps / (sigma * sigma)), 0.0))
        band = (band / total).to(tl.float16)
        red, green, blue = _blur(red, band), _blur(green, band), _blur(blue, band)
    if (flags & 4) != 0:
        red = tl.where(red >= 128.0, 255.0 - red, red)
        green = tl.where(green >= 128.0, 255.0 - green, green)
        blue = tl.where(blue >= 128.0, 255.0 - blue, blue)
    place = tl.arange(0, TILE)
    own = (place >= _RADIUS) & (place < TILE - _RADIUS)
    inside = (own & (rows < SIZE))[:, None] & (own & (columns < SIZE))[None, :]
    image, nth = crop // crops_per_image, crop % crops_per_image
    out += image.to(tl.int64) * by_image + nth.to(tl.int64) * by_crop
    out += rows[:, None] * by_row + columns[None, :] * by_column
    _put(out, red, tl.load(norms), tl.load(norms + 3), inside, ROUND)
    _put(out + by_channel, green, tl.load(norms + 1), tl.load(norms + 4), inside, ROUND)
    _put(out + 2 * by_channel, blue, tl.load(norms + 2), tl.load(norms + 5), inside, ROUND)
