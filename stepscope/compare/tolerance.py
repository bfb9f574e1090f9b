"""How far two runs may differ by rounding alone.

Two runs of one program are bit-identical on one machine. Between machines, library versions, or two ways to write the
same sum, values differ by rounding, and `tolerance` says by how much they may:

    rtol = 8 (u + √n · v)

u is the unit roundoff of the dtype that layers compute in: a value is rounded to it a few times on its way, and three
bits are granted. v is the unit roundoff of the sums inside a layer (float32, or float64 where u is smaller), and n the
length of the longest sum: reordering n terms changes a sum by about √n · v (Higham and Mary, SIAM J. Sci. Comput. 41,
2019, give λ√n·v with a λ of that size). The bound is for values at one step. Where runs do differ, training itself
makes the difference grow: so look at the *first* step, not at the last.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from stepscope.store.trace import Trace

ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff: half the spacing of numbers just above 1."""

HOST_RTOL = 1e-9
"""For rates, which Python computes in float64: two orders of the same formula differ by a few units of 2⁻⁵³."""


def tolerance(*runs: Trace) -> float:
    """The relative difference that rounding explains in runs of these dtypes and sizes; see the module's formula."""
    unit = max(ROUNDOFF[compute_dtype(run)] for run in runs)
    inner = ROUNDOFF["float64"] if unit < ROUNDOFF["float32"] else ROUNDOFF["float32"]
    return 8 * (unit + math.sqrt(max(_longest(run) for run in runs)) * inner)


def compute_dtype(run: Trace) -> str:
    """The coarsest dtype that a run computed in, by autocast, settings or parameters; float32 if nothing says."""
    said: set[str] = set()
    for table, column in (("steps", "autocast_dtype"), ("params", "dtype")):
        held = run.tables[table]  # type: ignore[index]
        if column in held.column_names:
            said |= {str(v).removeprefix("torch.") for v in held[column].unique().to_pylist() if v}
    for part in ("reference", "settings", "config"):
        about = run.meta.get(part)
        if isinstance(about, dict):
            said.add(str(about.get("dtype")))
    known = said & ROUNDOFF.keys()
    return max(known, key=ROUNDOFF.__getitem__) if known else "float32"


def _longest(run: Trace) -> int:
    """The longest dimension of a parameter: the longest sum in a matrix product; 4096 where nothing is known."""
    held = run.tables["params"]
    shapes = held["shape"].unique().to_pylist() if "shape" in held.column_names else []
    shapes += [p.get("shape") for p in (run.meta.get("parameters") or {}).values() if isinstance(p, dict)]
    sizes = [
        int(n) for s in shapes for n in (s if isinstance(s, list) else str(s or "").split("x")) if str(n).isdigit()
    ]
    return max(sizes, default=4096)


def relative(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """``|a - b| / max(|a|, |b|)``: 0 where both are the same, also not finite; infinite where only one is finite."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.abs(a - b) / np.maximum(np.abs(a), np.abs(b))
    equal = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(equal, 0.0, np.where(np.isfinite(a) & np.isfinite(b), ratio, np.inf))
