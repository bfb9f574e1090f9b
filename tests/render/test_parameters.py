"""The table and the heat maps of parameters against a plain loop over the rows."""

import math
import statistics
import struct
import zlib

import numpy as np

from stepscope.render.heatmap import colours, png
from stepscope.render.parameters import CELLS, parameter_view


def test_cells_of_each_parameter(factory):
    trace = factory.make()
    view = parameter_view(trace)
    rows = trace.tables["params"].to_pylist()
    how = {"last": lambda v: v[-1], "max": max, "median": statistics.median, "sum": sum}
    assert [r.name for r in view.rows] == list(factory.Run().params)
    for row in view.rows:
        mine = [r for r in rows if r["param"] == row.name]
        for (_, column, kind), cell in zip(CELLS, row.cells, strict=True):
            values = [r[column] for r in mine if math.isfinite(r[column])]
            assert math.isclose(cell, how[kind](values), rel_tol=1e-15), (row.name, column)
    assert view.rows[1].shape == "64 × 32"
    assert view.rows[1].dtype == "float32"


def test_heat_map_cells_are_the_recorded_values(factory):
    trace = factory.make()
    heat = next(h for h in parameter_view(trace).heats if h.id == "fig-heat-grad")
    for row in trace.tables["params"].to_pylist():
        i, j = heat.names.index(row["param"]), heat.steps.tolist().index(row["micro_step"])
        if math.isfinite(row["grad_norm"]):
            assert heat.values[i, j] == row["grad_norm"]
            assert not heat.odd[i, j]
        else:
            assert math.isnan(heat.values[i, j])
            assert heat.odd[i, j]
    assert "Not finite at some step: embed.weight" in heat.caption


def test_a_long_run_keeps_the_largest_value_and_every_odd_cell(factory):
    run = factory.Run(windows=3000, skips=(1, 1500), params=("a", "b"))
    trace = factory.make(run)
    heat = next(h for h in parameter_view(trace).heats if h.id == "fig-heat-grad")
    values = [r["grad_norm"] for r in trace.tables["params"].to_pylist() if math.isfinite(r["grad_norm"])]
    assert np.nanmax(heat.values) == max(values)
    assert heat.odd.sum() == 2
    assert heat.steps[-1] == 12_000
    assert "Each column is the largest of about 13 steps" in heat.caption


def test_picture_is_a_png_with_the_right_pixels(factory):
    heat = parameter_view(factory.make()).heats[0]
    index, _, _ = colours(heat)
    data = png(index)
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert (width, height, depth, kind) == (index.shape[1], index.shape[0], 8, 3)
    start = data.index(b"IDAT")
    length = struct.unpack(">I", data[start - 4 : start])[0]
    lines = np.frombuffer(zlib.decompress(data[start + 4 : start + 4 + length]), np.uint8).reshape(height, width + 1)
    np.testing.assert_array_equal(lines[:, 1:], index)
    assert not lines[:, 0].any()


def test_colours_tell_zero_nothing_and_not_finite_apart(factory):
    heat = parameter_view(factory.make()).heats[0]
    index, low, high = colours(heat)
    assert (index[:, :2] == 2).all(), "the two skipped steps changed nothing: exactly 0"
    assert index[:, 2:].min() == 3
    assert index.max() == 255
    positive = heat.values[heat.values > 0]
    assert math.isclose(10**low, positive.min())
    assert math.isclose(10**high, positive.max())
