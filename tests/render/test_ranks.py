"""Processes that should agree and do not stand out."""

from stepscope.render.ranks import rank_view
from stepscope.render.rows import Rows


def test_one_process_has_no_table(factory):
    assert rank_view(Rows(factory.make())) is None


def test_the_rate_of_one_rank_of_three_stands_apart(factory):
    run = factory.Run(ranks=3, lr_offset=1e-5, skips=(), tail=0)
    view = rank_view(Rows(factory.make(run)))
    said = next(s for s in view.partings if s.startswith("lr "))
    assert said.startswith("lr differs first at micro-step 1 (rank 0 0.000499")
    assert said.endswith("in all at 48 of 48 steps.")
    assert {row.rank: "lr" in row.differs for row in view.rows} == {0: False, 1: False, 2: True}


def test_processes_that_agree_are_not_told_apart(factory):
    view = rank_view(Rows(factory.make(ranks=2, skips=(), tail=0)))
    assert not any(s.startswith(("lr ", "param_norm ", "step_skipped ", "applied_steps ")) for s in view.partings)


def test_figures_of_each_process(factory):
    trace = factory.make(ranks=2)
    view = rank_view(Rows(trace))
    for row in view.rows:
        mine = [r for r in trace.tables["steps"].to_pylist() if r["rank"] == row.rank]
        cells = dict(zip(view.headers, row.cells, strict=True))
        assert cells["micro-steps"] == str(len(mine))
        assert cells["applied"] == str(mine[-1]["applied_steps"])
        assert cells["first loss"] == f"{mine[0]['loss']:.4g}"
        assert cells["last loss"] == f"{mine[-1]['loss']:.4g}"
