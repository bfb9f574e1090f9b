"""Several processes write one trace, whatever ends them."""

import json

import pytest

from stepscope.commands.processes import Processes
from stepscope.errors import StepscopeError
from stepscope.store.folder import prepare_folder
from stepscope.store.trace import Trace
from tests.rules.ranks.conftest import torchrun

pytestmark = pytest.mark.timeout(300)

LOOP = """
import os, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    if step == 2 and rank == int(os.environ.get("FAILS", "-1")):
        raise RuntimeError("out of luck")
    optimizer.zero_grad()
    model(torch.randn(4, 3)).mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= 2
    optimizer.step()
if rank == 1:  # one process has more rows
    model(torch.randn(4, 3)).mean().backward()
dist.barrier()
os.write(1, f"done {rank}\\n".encode())  # in one piece: both write to the same pipe
if os.environ.get("ABORTS") == str(rank):
    import atexit
    atexit.register(os.abort)
else:
    dist.destroy_process_group()
"""


def run(folder, *options, check=True, **environment):
    script = folder / "loop.py"
    script.write_text(LOOP)
    words = ["-m", "stepscope", "run", "--no-report", "--out", str(folder / "t"), *options, str(script)]
    return torchrun(*words, cwd=folder, check=check, **environment)


def verdict(folder):
    return json.loads((folder / "t" / "findings.json").read_text())["verdict"]


def test_parts_are_merged_with_their_ranks_and_replaced_by_force(tmp_path):
    ran = run(tmp_path)
    trace = Trace.load(tmp_path / "t")
    assert sorted(ran.stdout.split("\n")) == ["", "done 0", "done 1"]
    assert ran.stderr.count("stepscope: trace in") == 1
    assert trace.whole
    assert sorted(trace.meta["ranks"]) == ["0", "1"]
    assert trace.steps.groupby("rank").size().to_dict() == {0: 4, 1: 5}
    assert verdict(tmp_path) != "incomplete"

    refused = run(tmp_path, check=False)
    assert refused.returncode
    assert "already holds a trace" in refused.stderr
    assert len(Trace.load(tmp_path / "t").steps) == 9, "the trace that was there is untouched"

    run(tmp_path, "--force")
    assert len(Trace.load(tmp_path / "t").steps) == 9


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_fails_leaves_a_verdict(tmp_path, rank):
    ran = run(tmp_path, check=False, FAILS=str(rank))
    assert ran.returncode
    assert "out of luck" in ran.stderr
    trace = Trace.load(tmp_path / "t")
    assert (tmp_path / "t" / "findings.json").exists()
    assert trace.meta["ranks"][str(rank)]["status"] == "failed"
    assert trace.meta["ranks"][str(rank)]["error"] == "RuntimeError: out of luck"
    assert (trace.steps["rank"] == rank).sum() == 2


def test_a_process_that_aborts_at_exit_takes_no_verdict_along(tmp_path):
    ran = run(tmp_path, check=False, ABORTS="1")
    assert ran.returncode
    assert Trace.load(tmp_path / "t").whole
    assert verdict(tmp_path) != "incomplete"


def part(folder, rank, run_id="a", status="complete"):
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": 1, "rank": rank, "world_size": 2, "run_id": run_id, "status": status})
    (folder / f"rank{rank}.meta.json").write_text(text)


def test_all_processes_of_a_run_come_to_the_same_free_folder(tmp_path):
    part(tmp_path / "train", 0, "earlier")
    first, second = Processes(0, 2, "now"), Processes(1, 2, "now")
    assert first.share_folder(tmp_path, "train") == tmp_path / "train-2"
    part(tmp_path / "train-2", 0, "now")
    assert second.share_folder(tmp_path, "train") == tmp_path / "train-2"


def test_a_part_of_an_earlier_run_is_not_waited_for_and_not_taken(tmp_path):
    part(tmp_path, 0, "now")
    part(tmp_path, 1, "earlier")
    assert not Processes(0, 2, "now")._ended(tmp_path, 1)
    assert Processes(1, 2, "now").judges(tmp_path, failed=True) is False, "rank 0 has ended and judges"
    part(tmp_path, 0, "now", status="recording")
    assert Processes(1, 2, "now").judges(tmp_path, failed=True)
    assert not Processes(1, 2, "now").judges(tmp_path, failed=False)


def test_no_process_destroys_a_trace_that_another_refuses_to_replace(tmp_path):
    for rank in range(2):
        part(tmp_path, rank)
    for rank in (1, 0):
        with pytest.raises(StepscopeError, match="already holds a trace"):
            prepare_folder(tmp_path, rank=rank, world_size=2)
    assert len(list(tmp_path.glob("rank*.meta.json"))) == 2


def test_force_removes_parts_of_processes_that_the_run_does_not_have(tmp_path):
    for rank in range(4):
        part(tmp_path, rank)
    prepare_folder(tmp_path, force=True, rank=0, world_size=2)
    assert [p.name for p in tmp_path.iterdir()] == ["rank1.meta.json"]
    prepare_folder(tmp_path, force=True, rank=1, world_size=2)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_part_makes_the_trace_incomplete(tmp_path):
    part(tmp_path, 0)
    assert not Trace.load(tmp_path).whole
    part(tmp_path, 1)
    assert Trace.load(tmp_path).whole
    part(tmp_path, 1, status="recording")
    assert not Trace.load(tmp_path).whole
