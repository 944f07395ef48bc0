"""Light, noise, film and a small ray caster, for ``example_photos.py``.

Light is linear, (H, W, 3) float32, until :func:`develop` makes a picture of it: glow of the bright parts,
vignette, film curve, lens blur, grain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFilter

Array = np.ndarray
Texture = Callable[[Array], Array]


# Noise, light and film.


def smooth_noise(
    rng: np.random.Generator, height: int, width: int, rows: int, columns: int, octaves: int = 4
) -> Array:
    """Fractal noise in about 0..1, (height, width): each octave twice as fine and half as strong."""
    total, weight = np.zeros((height, width), np.float32), 0.0
    for octave in range(octaves):
        shape = (min(rows << octave, height), min(columns << octave, width))
        cells = Image.fromarray((rng.random(shape) * 255).astype(np.uint8))
        total += (
            np.asarray(cells.resize((width, height), Image.Resampling.BICUBIC), np.float32)
            / 255
            * 0.5**octave
        )
        weight += 0.5**octave
    return total / weight


def ridge(rng: np.random.Generator, width: int, columns: int, octaves: int = 6) -> Array:
    """A mountain line in about 0..1, (width,)."""
    return smooth_noise(rng, 1, width, 1, columns, octaves)[0]


def rgb(*colour: int) -> Array:
    """An sRGB colour as linear light."""
    return (np.asarray(colour, np.float32) / 255) ** 2.2


def mix(first: Array, second: Array, share: Array) -> Array:
    share = np.clip(share, 0, 1)
    return first * (1 - share) + second * share


def blurred(light: Array, radius: float) -> Array:
    """Gaussian blur of linear light up to 2 (brighter is clipped)."""
    coded = Image.fromarray((np.clip(light / 2, 0, 1) ** (1 / 2.2) * 255).astype(np.uint8))
    soft = np.asarray(coded.filter(ImageFilter.GaussianBlur(radius)), np.float32) / 255
    return soft**2.2 * 2


def develop(
    light: Array, seed: int, *, soft: float = 0.6, grain: float = 0.014, glow: float = 0.12
) -> Image.Image:
    """Linear light to a picture: glow of the bright parts, vignette, film curve, lens blur, grain."""
    height, width = light.shape[:2]
    light = light + glow * blurred(np.maximum(light - 0.6, 0), width / 40)
    y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j].astype(np.float32)
    light = light * (1 - 0.22 * (x * x + y * y) ** 1.2 / 2)[..., None]
    film = light * (1 + light / 6) / (1 + 0.72 * light)
    coded = np.clip(film, 0, 1) ** (1 / 2.2)
    picture = Image.fromarray((coded * 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(soft))
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((height, width, 1), np.float32) + 0.4 * rng.standard_normal(
        (height, width, 3), np.float32
    )
    noisy = np.asarray(picture, np.float32) / 255 + grain * noise
    return Image.fromarray((np.clip(noisy, 0, 1) * 255).round().astype(np.uint8))


# Ray casting.


@dataclass(frozen=True)
class Ellipsoid:
    """Centre and half axes; ``texture`` turns unit-sphere points (n, 3) into linear colour (n, 3)."""

    centre: tuple[float, float, float]
    axes: tuple[float, float, float]
    texture: Texture
    gloss: float = 0.35

    def hit(self, origin: Array, direction: Array) -> Array:
        """Distance along each ray to the surface, infinity where it misses."""
        o = (origin - np.float32(self.centre)) / np.float32(self.axes)
        d = direction / np.float32(self.axes)
        a, b, c = (d * d).sum(1), (o * d).sum(1), (o * o).sum(1) - 1
        under = b * b - a * c
        distance = (-b - np.sqrt(np.maximum(under, 0))) / a
        return np.where((under > 0) & (distance > 1e-3), distance, np.inf)


def plain(colour: Array, spread: float = 0.0) -> Texture:
    return lambda p: colour * (1 + spread * np.sin(7 * p[:, :1] + 5 * np.sin(9 * p[:, 2:3])))


def cast(
    size: tuple[int, int], eye: Sequence[float], target: Sequence[float], zoom: float,
    bodies: Sequence[Ellipsoid], ground: Callable[[Array, Array], Array], sky: Callable[[Array], Array],
    sun: Sequence[float], seed: int,
) -> Array:  # fmt: skip
    """Ellipsoids over the plane y = 0: two by two rays a pixel, soft shadows from eight points of the sun.

    ``ground`` takes points (n, 2) and distances (n,), ``sky`` directions (n, 3); both give linear colours
    (n, 3).
    """
    width, height = size[0] * 2, size[1] * 2
    eye_, target_ = np.float32(eye), np.float32(target)
    forward = (target_ - eye_) / np.linalg.norm(target_ - eye_)
    right = np.cross(forward, (0, 1, 0)) / np.linalg.norm(np.cross(forward, (0, 1, 0)))
    up = np.cross(right, forward)
    y, x = np.mgrid[height / width : -height / width : height * 1j, -1 : 1 : width * 1j].astype(
        np.float32
    )
    ray = zoom * forward + x[..., None] * right + y[..., None] * up
    ray = (ray / np.linalg.norm(ray, axis=-1, keepdims=True)).reshape(-1, 3).astype(np.float32)
    origin = np.broadcast_to(eye_, ray.shape)
    to_plane = np.where(ray[:, 1] < -1e-4, -eye_[1] / np.minimum(ray[:, 1], -1e-4), np.inf)
    distances = np.stack([to_plane, *(body.hit(origin, ray) for body in bodies)])
    first = distances.argmin(0)
    distance = distances.min(0)
    light = sky(ray)
    sun_ = np.float32(sun) / np.linalg.norm(sun)
    rng = np.random.default_rng(seed)
    for index in range(len(bodies) + 1):
        seen = np.nonzero((first == index) & np.isfinite(distance))[0]
        if not len(seen):
            continue
        point = eye_ + distance[seen, None] * ray[seen]
        if index == 0:
            normal = np.broadcast_to(np.float32((0, 1, 0)), point.shape)
            colour, gloss = ground(point[:, [0, 2]], distance[seen]), 0.0
        else:
            body = bodies[index - 1]
            unit = (point - np.float32(body.centre)) / np.float32(body.axes)
            normal = unit / np.float32(body.axes)
            normal = normal / np.linalg.norm(normal, axis=1, keepdims=True)
            colour, gloss = body.texture(unit), body.gloss
        lit = np.zeros(len(seen), np.float32)
        for _ in range(8):
            towards = sun_ + rng.normal(0, 0.045, point.shape).astype(np.float32)
            shade = np.zeros(len(seen), bool)
            for other, body in enumerate(bodies):
                if other != index - 1:
                    shade |= np.isfinite(body.hit(point, towards))
            lit += ~shade / 8
        # What surrounds a point hides part of the sky from it: bodies standing near, by their solid angle.
        open_sky = np.ones(len(seen), np.float32)
        for other, body in enumerate(bodies):
            if other != index - 1:
                away = np.float32(body.centre) - point
                reach = np.linalg.norm(away, axis=1)
                facing = np.maximum((away * normal).sum(1) / reach, 0)
                open_sky *= 1 - np.minimum(0.85, facing * (max(body.axes) / reach) ** 2)
        lambert = np.maximum(normal @ sun_, 0) * lit
        ambient = (0.30 + 0.22 * normal[:, 1]) * open_sky
        half = sun_ - ray[seen]
        half = half / np.linalg.norm(half, axis=1, keepdims=True)
        shine = gloss * np.maximum((normal * half).sum(1), 0) ** 60 * lit
        edge = gloss * 0.25 * (1 - np.abs((normal * ray[seen]).sum(1))) ** 4 * open_sky
        warm, cool = np.float32((1.35, 1.22, 1.0)), np.float32((0.92, 1.0, 1.15))
        light[seen] = (
            colour * (lambert[:, None] * warm + ambient[:, None] * cool) + (shine + edge)[:, None]
        )
    return light.reshape(size[1], 2, size[0], 2, 3).mean((1, 3))
