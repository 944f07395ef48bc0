"""Photo-like pictures for ``examples/``, rendered with NumPy and Pillow alone: no photograph is copied.

Two are cast ray by ray, three are painted in layers from far to near; ``example_light.py`` has the means.
Every function gives the same picture each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from example_light import (
    Array,
    Ellipsoid,
    blurred,
    cast,
    develop,
    mix,
    plain,
    rgb,
    ridge,
    smooth_noise,
)
from PIL import Image, ImageDraw, ImageFilter


def _tiled(pattern: Array, points: Array, scale: tuple[float, float]) -> Array:
    """``pattern`` looked up at plane points, repeated; ``scale`` pixels a unit."""
    column = (points[:, 0] * scale[0]).astype(int) % pattern.shape[1]
    row = (points[:, 1] * scale[1]).astype(int) % pattern.shape[0]
    return pattern[row, column]


def lawn() -> Image.Image:
    """Balls on grass, 960x640."""
    rng = np.random.default_rng(11)
    blades = smooth_noise(rng, 1024, 1024, 128, 256, 3)
    patches = smooth_noise(rng, 1024, 1024, 6, 6, 4)

    def grass(points: Array, distance: Array) -> Array:
        fine = _tiled(blades, points, (230, 90))[:, None]
        broad = _tiled(patches, points, (60, 60))[:, None]
        fade = np.clip(1.3 - distance / 16, 0.15, 1)[:, None]
        tone = mix(
            rgb(52, 98, 32),
            rgb(150, 172, 74),
            0.5 + 1.9 * (fine - 0.5) * fade + 0.8 * (broad - 0.5),
        )
        return mix(tone, rgb(128, 160, 92), np.clip((distance[:, None] - 9) / 30, 0, 0.7))

    def air(ray: Array) -> Array:
        return mix(rgb(214, 226, 226), rgb(110, 160, 214), np.clip(ray[:, 1:2] * 4, 0, 1)) * 1.3

    balls = (
        (-1.75, 0.62, 0.5, (200, 30, 36)),
        (0.15, 0.5, -0.7, (28, 70, 190)),
        (1.9, 0.7, 0.9, (236, 200, 40)),
        (0.75, 0.42, 2.6, (238, 238, 232)),
        (-0.75, 0.36, -1.9, (206, 34, 40)),
        (-3.1, 0.5, 3.3, (34, 80, 196)),
    )
    bodies = [
        Ellipsoid((x, r * 0.96, z), (r, r, r), plain(rgb(*c), 0.04), 0.5) for x, r, z, c in balls
    ]
    light = cast(
        (960, 640),
        (0.2, 2.1, -6.6),
        (0.05, 0.55, 0.6),
        1.75,
        bodies,
        grass,
        air,
        (-0.75, 0.85, -0.55),
        12,
    )
    far = blurred(light, 3.2)
    depth = np.clip(1 - np.linspace(0, 1, 640, dtype=np.float32) * 2.7, 0, 1)[:, None, None]
    return develop(mix(light, far, depth), 13)


def fruit() -> Image.Image:
    """Fruit on a wooden table, 900x675."""
    rng = np.random.default_rng(21)
    grain = smooth_noise(rng, 512, 1024, 96, 3, 3)
    wall = smooth_noise(rng, 64, 64, 3, 3, 3)

    def wood(points: Array, distance: Array) -> Array:
        line = _tiled(grain, points, (60, 120))[:, None]
        plank = np.abs((points[:, 1:2] / 1.35 + 0.35) % 1 - 0.5) > 0.492
        tone = mix(rgb(112, 70, 40), rgb(190, 138, 88), 0.5 + 1.6 * (line - 0.5))
        return np.where(plank, tone * 0.35, tone) * np.clip(1.25 - distance / 24, 0.5, 1)[:, None]

    def room(ray: Array) -> Array:
        row = np.clip((ray[:, 1] * 60 + 30).astype(int), 0, 63)
        column = np.clip((ray[:, 0] * 40 + 32).astype(int), 0, 63)
        return rgb(148, 152, 146) * (0.55 + 0.35 * wall[row, column][:, None] - 0.3 * ray[:, :1])

    def apple(p: Array) -> Array:
        streak = 0.5 + 0.5 * np.sin(9 * np.arctan2(p[:, 2:3], p[:, :1]) + 3 * p[:, 1:2])
        return mix(
            rgb(178, 22, 28),
            rgb(214, 120, 52),
            0.35 * streak + np.clip(1.6 * p[:, 1:2] - 1.0, 0, 0.6),
        )

    def peel(p: Array) -> Array:
        pores = np.sin(46 * p[:, :1] + 3 * np.sin(31 * p[:, 2:3])) * np.sin(
            44 * p[:, 1:2] + 2 * np.sin(37 * p[:, :1])
        )
        return rgb(236, 130, 22) * (1 - 0.13 * np.clip(pores, 0, 1))

    stem = plain(rgb(74, 50, 28))
    bodies = [
        Ellipsoid((-1.55, 0.62, 0.35), (0.68, 0.62, 0.68), apple),
        Ellipsoid((-1.5, 1.26, 0.3), (0.035, 0.16, 0.035), stem, 0.0),
        Ellipsoid((-0.35, 0.58, 1.35), (0.64, 0.58, 0.64), apple),
        Ellipsoid((-0.32, 1.17, 1.33), (0.035, 0.15, 0.035), stem, 0.0),
        Ellipsoid((0.05, 0.62, -0.35), (0.62, 0.62, 0.62), peel, 0.25),
        Ellipsoid((1.1, 0.6, 0.9), (0.6, 0.6, 0.6), peel, 0.25),
        Ellipsoid((1.75, 0.42, -0.65), (0.62, 0.42, 0.44), plain(rgb(244, 214, 52), 0.02), 0.3),
        Ellipsoid((-0.98, 0.34, -1.15), (0.36, 0.34, 0.36), plain(rgb(92, 34, 96), 0.05), 0.2),
        Ellipsoid((-1.85, 0.33, -0.85), (0.35, 0.33, 0.35), plain(rgb(84, 30, 90), 0.05), 0.2),
        Ellipsoid((2.5, 0.33, 0.35), (0.35, 0.33, 0.35), plain(rgb(88, 32, 92), 0.05), 0.2),
    ]  # fmt: skip
    light = cast(
        (900, 675),
        (0.35, 2.5, -5.9),
        (0.15, 0.5, 0.15),
        1.85,
        bodies,
        wood,
        room,
        (-0.9, 0.95, -0.25),
        22,
    )
    far = blurred(light, 4)
    depth = np.clip(1 - np.linspace(0, 1, 675, dtype=np.float32) * 3.6, 0, 1)[:, None, None]
    return develop(mix(light, far, depth), 23)


# Painting in layers.


def _drawn(
    width: int, height: int, paint: Callable[[ImageDraw.ImageDraw], None], blur: float = 0.0
) -> Array:
    """A mask drawn at twice the size and averaged: (height, width, 1) float32 in 0..1."""
    canvas = Image.new("L", (width * 2, height * 2), 0)
    paint(ImageDraw.Draw(canvas))
    canvas = canvas.reduce(2)
    if blur:
        canvas = canvas.filter(ImageFilter.GaussianBlur(blur))
    return np.asarray(canvas, np.float32)[..., None] / 255


def _disc(width: int, height: int, x: float, y: float) -> Array:
    """Distance of each pixel from (x, y): (height, width, 1)."""
    rows, columns = np.mgrid[:height, :width].astype(np.float32)
    return np.hypot(columns - x, rows - y)[..., None]


def valley() -> Image.Image:
    """A low sun over hazy mountains, a lake and pines, 1200x750."""
    width, height, shore = 1200, 750, 520
    rng = np.random.default_rng(31)
    rows = np.linspace(0, 1, height, dtype=np.float32)[:, None, None]
    light = mix(rgb(92, 134, 184), rgb(250, 206, 150), rows * 1.7) * np.ones(
        (1, width, 1), np.float32
    )
    clouds = smooth_noise(rng, height, width, 10, 3, 5)[..., None]
    light = mix(light, rgb(255, 224, 196) * 1.1, np.clip((clouds - 0.52) * 4, 0, 0.75) * (1 - rows))
    away = _disc(width, height, 770, 268)
    light = (
        light
        + rgb(255, 196, 120) * 0.9 * np.exp(-away / 120)
        + rgb(255, 240, 206) * 2.2 * (away < 44)
    )
    across = np.arange(height)[:, None]
    for layer, (base, rise, colour) in enumerate(
        (
            (372, 190, (158, 160, 176)),
            (428, 190, (112, 126, 142)),
            (486, 150, (70, 92, 96)),
            (525, 90, (40, 62, 56)),
        )
    ):
        top = base - rise * (ridge(rng, width, 3 + 2 * layer) - 0.28)
        rock = rgb(*colour) * (0.8 + 0.5 * smooth_noise(rng, height, width, 20, 30, 4)[..., None])
        snow = np.clip(
            (top.min() + 62 - across) / 26 + 2.4 * smooth_noise(rng, height, width, 30, 16) - 1.3,
            0,
            1,
        )
        rock = mix(rock, rgb(236, 226, 226), snow[..., None] * (layer == 0) * 0.85)
        haze = np.clip((across - top) / (rise * 1.3), 0, 1)[..., None] * (0.5 - 0.1 * layer)
        light = mix(
            light, mix(rock, rgb(232, 206, 178), haze), np.clip(across - top, 0, 1)[..., None]
        )
    mirror = light[shore - 1 :: -1][: height - shore]
    ripple = (smooth_noise(rng, height - shore, width, 70, 5, 3) - 0.5) * np.linspace(
        4, 46, height - shore
    )[:, None]
    column = np.clip(np.arange(width) + ripple.astype(int), 0, width - 1)
    water = np.take_along_axis(mirror, np.broadcast_to(column[..., None], mirror.shape), 1)
    light[shore:] = blurred(water, 1.6) * 0.78 * np.float32((0.92, 1.0, 1.06))

    def pines(draw: ImageDraw.ImageDraw) -> None:
        places = [
            (60, 330),
            (150, 270),
            (225, 205),
            (300, 150),
            (905, 140),
            (985, 215),
            (1065, 290),
            (1155, 360),
        ]
        for x, tall in places:
            foot = 760
            for tier in range(9):
                y = foot - tall * (0.1 + 0.1 * tier)
                reach = tall * 0.2 * (1 - tier / 9.5) * (0.9 + 0.2 * rng.random())
                lean = rng.normal(0, 2)
                draw.polygon(
                    [
                        (2 * (x - reach), 2 * y),
                        (2 * (x + lean), 2 * (y - tall * 0.17)),
                        (2 * (x + reach), 2 * y),
                    ],
                    fill=255,
                )
            draw.rectangle((2 * x - 8, 2 * (foot - tall * 0.2), 2 * x + 8, 2 * height), fill=255)
        draw.polygon(
            [
                (0, 1500),
                (0, 1380),
                (500, 1440),
                (1000, 1470),
                (1500, 1462),
                (2000, 1420),
                (2400, 1370),
                (2400, 1500),
            ],
            fill=255,
        )

    needles = rgb(30, 46, 36) * (
        0.55 + 0.9 * smooth_noise(rng, height, width, 120, 160, 3)[..., None]
    )
    return develop(mix(light, needles, _drawn(width, height, pines)), 33)


def street() -> Image.Image:
    """A street at dusk with two cars, 1200x800."""
    width, height, horizon = 1200, 800, 430
    rng = np.random.default_rng(41)
    rows = np.linspace(0, 1, height, dtype=np.float32)[:, None, None]
    light = (
        mix(rgb(44, 62, 104), rgb(236, 150, 110), rows * 1.75)
        * np.ones((1, width, 1), np.float32)
        * 0.75
    )
    clouds = smooth_noise(rng, height, width, 8, 3, 5)[..., None]
    light = mix(light, rgb(216, 132, 128) * 0.8, np.clip((clouds - 0.5) * 4, 0, 0.7) * (1 - rows))
    vanish, glow = 600.0, np.zeros((height, width, 3), np.float32)

    def box(x0: float, y0: float, x1: float, y1: float) -> tuple[slice, slice]:
        return slice(max(int(y0), 0), max(int(y1), 0)), slice(max(int(x0), 0), max(int(x1), 0))

    # Houses: each a trapezium running towards the vanishing point, far ones first.
    for side in (-1, 1):
        near = [0.16, 0.24, 0.36, 0.55, 0.82, 1.25]
        for index in range(len(near) - 1):
            a, b = near[index], near[index + 1]
            tall = 300 + 190 * rng.random()
            wall = rgb(*(int(v) for v in rng.integers(64, 118, 3) * np.array([1.0, 0.86, 0.84])))
            xa, xb = (vanish + side * 600 * s for s in (a, b))
            corners = [
                (xa, horizon - tall * a),
                (xb, horizon - tall * b),
                (xb, horizon + 190 * b),
                (xa, horizon + 190 * a),
            ]
            face = _drawn(
                width,
                height,
                lambda draw, c=corners: draw.polygon([(2 * x, 2 * y) for x, y in c], fill=255),
            )
            light = mix(light, mix(wall, rgb(190, 130, 120), 0.5 * (1 - index / 5)) * 0.33, face)
            columns, floors = 4, 5
            for column in range(columns):
                for floor in range(floors):
                    s0, s1 = (a + (b - a) * (column + f) / columns for f in (0.25, 0.75))
                    u0, u1 = (tall * (0.93 - f / floors * 0.98) for f in (floor, floor + 0.55))
                    panes = [
                        (vanish + side * 600 * s, horizon - u * s)
                        for s, u in ((s0, u0), (s1, u0), (s1, u1), (s0, u1))
                    ]
                    on = rng.random() < 0.42
                    colour = (
                        rgb(255, 206, 126) * (0.7 + 0.7 * rng.random())
                        if on
                        else rgb(58, 70, 92) * 0.7
                    )
                    pane = _local(light, panes)
                    if pane is not None:
                        where, mask = pane
                        light[where] = mix(light[where], colour, mask)
                        glow[where] += colour * mask * (0.35 if on else 0)
    # The road, wet: it mirrors what is above, smeared downwards.
    road = _drawn(
        width,
        height,
        lambda draw: draw.polygon([(1200, 860), (2700, 1600), (-300, 1600)], fill=255),
    )
    kerb = [(1200, 860), (2700, 1335), (2700, 1600), (-300, 1600), (-300, 1335)]
    pavement = _drawn(width, height, lambda draw: draw.polygon(kerb, fill=255))
    light = mix(
        light,
        rgb(74, 70, 78) * (0.55 + 0.5 * smooth_noise(rng, height, width, 160, 40, 3)[..., None]),
        pavement,
    )
    mirror = blurred(np.concatenate([light[:horizon], light[horizon - 1 :: -1]])[:height], 7)
    wet = 0.25 + 0.75 * smooth_noise(rng, height, width, 16, 5, 3)[..., None]
    asphalt = rgb(52, 54, 64) * (
        0.6 + 0.6 * smooth_noise(rng, height, width, 300, 200, 2)[..., None]
    )
    light = mix(light, asphalt * 0.7 + 0.55 * wet * mirror, road)
    for start, end in ((0.12, 0.18), (0.26, 0.4), (0.56, 0.84)):
        line = [(vanish - 9 * start, horizon + 370 * start), (vanish + 9 * start, horizon + 370 * start),
                (vanish + 9 * end, horizon + 370 * end), (vanish - 9 * end, horizon + 370 * end)]  # fmt: skip
        where, mask = _local(light, line) or (box(0, 0, 0, 0), np.zeros((0, 0, 1)))
        light[where] = mix(light[where], rgb(214, 206, 190) * 0.6, mask * 0.8)
    for side in (-1, 1):
        for s in (0.24, 0.4, 0.68, 1.0):
            x, foot, top = vanish + side * 420 * s, horizon + 182 * s, horizon - 280 * s
            pole = [(x - 4 * s, foot), (x + 4 * s, foot), (x + 3 * s, top), (x - 3 * s, top)]
            arm = [
                (x, top),
                (x - side * 62 * s, top - 7 * s),
                (x - side * 62 * s, top - 1 * s),
                (x, top + 7 * s),
            ]
            for part in (pole, arm):
                if (drawn := _local(light, part)) is not None:
                    light[drawn[0]] = mix(light[drawn[0]], rgb(26, 26, 32), drawn[1])
            bulb = np.exp(
                -((_disc(width, height, x - side * 60 * s, top + 2 * s) / (9 * s + 1.5)) ** 2)
            )
            glow += rgb(255, 214, 150) * bulb * 2.6
    for x, foot, wide, colour, lamp in (
        (455, 742, 190, (150, 24, 30), (255, 40, 30)),
        (716, 604, 104, (38, 66, 132), (255, 244, 214)),
    ):
        light, glow = _car(light, glow, x, foot, wide, rgb(*colour), rgb(*lamp))
    light = light + glow + 0.6 * blurred(glow, 14) + 0.5 * blurred(glow, 50)
    return develop(light, 43, grain=0.02, glow=0.2)


def _local(
    light: Array, corners: Sequence[tuple[float, float]]
) -> tuple[tuple[slice, slice], Array] | None:
    """A small polygon: the window of the picture it lies in, and its mask there."""
    height, width = light.shape[:2]
    xs, ys = [x for x, _ in corners], [y for _, y in corners]
    x0, x1, y0, y1 = (
        max(int(min(xs)) - 1, 0),
        min(int(max(xs)) + 2, width),
        max(int(min(ys)) - 1, 0),
        min(int(max(ys)) + 2, height),
    )
    if x1 <= x0 or y1 <= y0:
        return None
    shifted = [(2 * (x - x0), 2 * (y - y0)) for x, y in corners]
    return (slice(y0, y1), slice(x0, x1)), _drawn(
        x1 - x0, y1 - y0, lambda draw: draw.polygon(shifted, fill=255)
    )


def _car(
    light: Array, glow: Array, x: float, foot: float, wide: float, paint: Array, lamp: Array
) -> tuple[Array, Array]:
    """A car seen from behind or in front: body, cabin, window, tyres, two lamps and its shadow."""
    height, width = light.shape[:2]
    tall = wide * 0.72

    def part(*shapes: tuple[float, float, float, float, float], blur: float = 0.5) -> Array:
        def paint_shapes(draw: ImageDraw.ImageDraw) -> None:
            for left, top, right, bottom, corner in shapes:
                area = tuple(
                    2 * v
                    for v in (
                        x + left * wide,
                        foot - top * tall,
                        x + right * wide,
                        foot - bottom * tall,
                    )
                )
                draw.rounded_rectangle(area, 2 * corner * wide, fill=255)

        return _drawn(width, height, paint_shapes, blur)

    light = mix(light, light * 0.12, part((-0.56, 0.1, 0.56, -0.07, 0.08), blur=wide / 22))
    light = mix(
        light,
        rgb(14, 14, 16),
        part((-0.46, 0.25, -0.29, -0.02, 0.04), (0.29, 0.25, 0.46, -0.02, 0.04)),
    )
    rows = np.linspace(1.25, 0.55, height, dtype=np.float32)[:, None, None]
    body = part((-0.5, 0.66, 0.5, 0.12, 0.09), (-0.37, 1.0, 0.37, 0.5, 0.11))
    light = mix(light, paint * rows * 0.8, body)
    light = mix(light, rgb(70, 84, 108) * 0.75, part((-0.31, 0.94, 0.31, 0.67, 0.06)))
    light = mix(light, paint * 0.3, part((-0.5, 0.24, 0.5, 0.14, 0.04)))
    light = mix(light, rgb(208, 206, 196) * 0.6, part((-0.12, 0.42, 0.12, 0.3, 0.01)))
    lamps = part((-0.47, 0.56, -0.31, 0.43, 0.03), (0.31, 0.56, 0.47, 0.43, 0.03))
    return mix(light, lamp, lamps), glow * (1 - body) + lamp * lamps * 1.3


def harbour() -> Image.Image:
    """Sailing boats on a bright sea, 1080x720."""
    width, height, horizon = 1080, 720, 392
    rng = np.random.default_rng(51)
    rows = np.linspace(0, 1, height, dtype=np.float32)[:, None, None]
    light = mix(rgb(70, 128, 196), rgb(190, 214, 228), rows * 1.8) * np.ones(
        (1, width, 1), np.float32
    )
    clouds = smooth_noise(rng, height, width, 7, 4, 6)[..., None]
    puffs = np.clip((clouds - 0.5 - 0.12 * np.abs(rows - 0.3)) * 7, 0, 1)
    shade = np.clip(0.72 + 1.2 * (clouds - np.roll(clouds, -14, 0)), 0.55, 1.1)
    light = mix(light, rgb(250, 248, 246) * shade * 1.15, puffs * 0.9)
    across = np.arange(height)[:, None]
    hills = horizon - 8 - 46 * (ridge(rng, width, 5) - 0.25) * np.linspace(1.3, 0.1, width)
    hill = mix(
        rgb(104, 124, 132), rgb(94, 122, 106), smooth_noise(rng, height, width, 30, 40)[..., None]
    )
    light = mix(light, hill, np.clip(across - hills, 0, 1)[..., None])
    down = np.clip((across - horizon) / (height - horizon), 0, 1)[..., None].astype(np.float32)
    perspective = (40 / (down[:, 0, 0] * 3 + 0.06)).astype(np.float32)
    waves = np.stack([
        smooth_noise(rng, 1, width, 1, int(np.clip(p, 8, 300)), 3)[0] for p in perspective
    ])[..., None]  # fmt: skip
    waves = 0.6 * waves + 0.4 * smooth_noise(rng, height, width, 110, 26, 3)[..., None]
    sea = mix(rgb(120, 166, 186), rgb(22, 78, 112), 0.2 + 0.8 * down + 1.1 * (waves - 0.5))
    light = mix(
        light,
        sea + rgb(255, 255, 250) * np.clip(waves - 0.74, 0, 1) * 3,
        np.clip(across - horizon, 0, 1)[..., None],
    )
    white, red = rgb(248, 246, 238) * 1.1, rgb(196, 36, 40)
    for x, foot, tall, sail, hull in (
        (830, 424, 104, white, (40, 52, 80)), (470, 436, 128, white, (150, 40, 44)),
        (212, 520, 270, white, (36, 60, 104)), (742, 606, 372, red, (236, 234, 226)),
    ):  # fmt: skip
        light = _boat(light, x, foot, tall, sail, rgb(*hull), rng)
    return develop(light, 53)


def _boat(
    light: Array,
    x: float,
    foot: float,
    tall: float,
    sail: Array,
    hull: Array,
    rng: np.random.Generator,
) -> Array:
    height, width = light.shape[:2]

    def polygon(*points: tuple[float, float], blur: float = 0.4) -> Array:
        corners = [(2 * (x + px * tall), 2 * (foot - py * tall)) for px, py in points]
        return _drawn(width, height, lambda draw: draw.polygon(corners, fill=255), blur)

    across = np.linspace(1.12, 0.72, width, dtype=np.float32)[None, :, None]
    main, jib = (
        ((0.02, 0.98), (0.34, 0.14), (0.02, 0.14)),
        ((-0.02, 0.9), (-0.02, 0.14), (-0.3, 0.14)),
    )
    wobble = smooth_noise(rng, height, width, 90, 12, 3)[..., None]
    reflection = sum(
        polygon(*((px, -0.75 * py) for px, py in part), blur=tall / 40) for part in (main, jib)
    )
    light = mix(light, sail * 0.8, 0.5 * reflection * np.clip(2.2 * wobble - 0.55, 0, 1))
    light = mix(
        light,
        light * 0.45,
        polygon((-0.34, 0.0), (0.4, 0.0), (0.3, -0.08), (-0.26, -0.08), blur=tall / 60),
    )
    light = mix(
        light,
        rgb(70, 56, 44),
        polygon((-0.008, 1.02), (0.012, 1.02), (0.012, 0.05), (-0.008, 0.05)),
    )
    light = mix(light, sail * across, polygon(*main))
    light = mix(light, sail * across * 0.86, polygon(*jib))
    light = mix(light, hull, polygon((-0.36, 0.1), (0.42, 0.11), (0.33, -0.015), (-0.27, -0.015)))
    return mix(
        light, hull * 0.55, polygon((-0.34, 0.055), (0.405, 0.06), (0.33, -0.015), (-0.27, -0.015))
    )
