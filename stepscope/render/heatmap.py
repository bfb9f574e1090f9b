"""Heat maps without a script: an indexed PNG inside an SVG, written with nothing but zlib."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape

from stepscope.render.palette import HEAT
from stepscope.render.words import grouped, number

if TYPE_CHECKING:
    from stepscope.render.parameters import Heat

ROW = 12
"""Height of a parameter's row in the picture, when there is room for its name."""

NAMED_ROWS = 60
LEFT = 230
WIDTH = 720


def colours(heat: Heat) -> tuple[npt.NDArray[np.uint8], float, float]:
    """Each cell as a palette index, and the logarithms of the values at both ends of the colour scale.

    Returns:
        Indices of shape ``(parameters, stretches)``: 0 nothing observed, 1 a value that is not finite, 2 exactly 0,
        3 to 255 the positive values on a logarithmic scale.
    """
    positive = heat.values > 0
    logs = np.log10(np.where(positive, heat.values, 1.0))
    low = float(logs[positive].min()) if positive.any() else 0.0
    high = float(logs[positive].max()) if positive.any() else 0.0
    scaled = 3 + np.round(252 * (logs - low) / ((high - low) or 1.0))
    index = np.where(positive, scaled, np.where(np.isnan(heat.values), 0, 2))
    return np.where(heat.odd, 1, index).astype(np.uint8), low, high


def picture(heat: Heat) -> Markup:
    """The map as an ``<svg>`` element with the parameters' names where there is room for them."""
    index, low, high = colours(heat)
    rows = len(heat.names)
    named = rows <= NAMED_ROWS
    height = rows * ROW if named else 360
    image = base64.b64encode(png(index)).decode()
    names = "".join(
        f'<text class="tick end" x="{LEFT - 6}" y="{(i + 0.5) * height / rows + 4:.1f}">{escape(_tail(name))}</text>'
        for i, name in enumerate(heat.names)
        if named
    )
    steps = f"micro-steps {grouped(int(heat.steps[0]))} to {grouped(int(heat.steps[-1]))}"
    scale = f"dark {number(10.0**low, digits=2)}, bright {number(10.0**high, digits=2)}, logarithmic"
    label = escape(f"{heat.title}: {heat.caption}")
    return Markup(
        f'<svg viewBox="0 0 {WIDTH} {height + 24}" role="img" aria-label="{label}" class="picture">'
        f'<image x="{LEFT}" y="0" width="{WIDTH - LEFT}" height="{height}" preserveAspectRatio="none" '
        f'class="heat" href="data:image/png;base64,{image}"/>{names}'
        f'<text class="tick" x="{LEFT}" y="{height + 17}">{steps}; {scale}</text></svg>'
    )


def _tail(name: str) -> str:
    return name if len(name) <= 34 else f"…{name[-33:]}"


def png(index: npt.NDArray[np.uint8]) -> bytes:
    """An 8-bit indexed image in the palette of `colours` (PNG specification, colour type 3)."""
    height, width = index.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), index], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", _palette()), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _palette() -> bytes:
    """Grey for nothing, red for not finite, white for zero, then the stops of the scale blended."""
    stops = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in HEAT], dtype=np.float64)
    places = np.linspace(0, len(stops) - 1, 253)
    blended = np.stack([np.interp(places, np.arange(len(stops)), stops[:, k]) for k in range(3)], axis=1)
    fixed = np.array([[128, 128, 128], [217, 45, 32], [255, 255, 255]])
    return np.concatenate([fixed, np.round(blended)]).astype(np.uint8).tobytes()
