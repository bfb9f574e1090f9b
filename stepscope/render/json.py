"""The report as JSON: the envelope of findings.json, and the run in numbers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from stepscope.store.jsonio import plain

if TYPE_CHECKING:
    from stepscope.render.model import ReportModel


def render_json(model: ReportModel) -> str:
    """Strict JSON in ASCII, which no terminal reads as a command; values that are not finite are texts."""
    content = {
        **model.envelope,
        "title": model.title,
        "heading": model.verdict.heading,
        "limits": model.banners,
        "numbers": {figure.key: figure.value for figure in model.numbers},
    }
    return json.dumps(plain(content), indent=2, allow_nan=False, ensure_ascii=True) + "\n"
