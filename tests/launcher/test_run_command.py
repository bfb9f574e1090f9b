"""The same fidelity through ``stepscope run``, with every patch in place and a loop to record."""

import json

import pytest

TRAINING = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    torch.nn.functional.mse_loss(model(torch.ones(3, 2)), torch.zeros(3, 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
step()
print("trained", model.weight.tolist(), torch.rand(1).item())
"""

BROKEN_BACKWARD = """
class Odd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        raise ValueError("no gradient")
try:
    Odd.apply(model.weight).sum().backward()
except ValueError as error:
    raise RuntimeError("step 2") from error
"""

BROKEN_STEP = """
optimizer.step(closure=lambda: int("fast"))
"""

WARNED = """
schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 2)
schedule.step()
schedule.get_lr()
torch.nn.Linear(2, 1).load_state_dict(torch.nn.Linear(2, 1).state_dict(), strict=True)
model.register_full_backward_hook(lambda module, inputs, outputs: None)
model(torch.ones(1, 2)).sum().backward()
"""

ENDS = {
    "warnings that name a line of the script": (WARNED, "complete"),
    "plain end": ("", "complete"),
    "exit 3": ("import sys; print('last'); sys.exit(3)", "failed"),
    "exit text": ("import sys; sys.exit('no data')", "failed"),
    "exception in backward": (BROKEN_BACKWARD, "failed"),
    "exception in step": (BROKEN_STEP, "failed"),
    "interrupt": ("raise KeyboardInterrupt", "interrupted"),
    "folder left": ("import os; os.makedirs('deep'); os.chdir('deep'); print(os.path.relpath(__file__))", "complete"),
}


def status(tmp_path):
    meta = json.loads((tmp_path / "trace" / "meta.json").read_text("utf-8"))
    return meta["status"], meta["micro_steps"]


@pytest.mark.parametrize("end", ENDS)
def test_recorded_script_ends_as_it_does_alone(end, natively, watched, write, tmp_path):
    """Its output, traceback and exit code are its own, and what was recorded up to there is kept."""
    text, expected = ENDS[end]
    write("train.py", TRAINING + text)
    native = natively("script", "train.py", "--lr", "1")
    for made in tmp_path.glob("deep"):
        made.rmdir()
    assert watched("script", "train.py", "--lr", "1") == native
    assert status(tmp_path) == (expected, 1 + (end.startswith(("exception in backward", "warnings"))))


def test_recorded_module_and_code_find_their_arguments(natively, watched, write, tmp_path):
    program = TRAINING + "import sys; print(sys.argv, sys.path[0], sorted(globals()), __spec__ and __spec__.name)"
    write("pack/__main__.py", program)
    assert watched("module", "pack", "-m", "--out", "x") == natively("module", "pack", "-m", "--out", "x")
    (tmp_path / "trace").rename(tmp_path / "first")
    assert watched("code", program, "-c", "--", "x") == natively("code", program, "-c", "--", "x")
    assert status(tmp_path) == ("complete", 1)


def test_child_of_a_raw_fork_leaves_the_recording_to_its_parent(natively, watched, write, tmp_path):
    write(
        "train.py",
        TRAINING + "import os\nchild = os.fork()\nif child:\n    os.waitpid(child, 0)\n    step()\n"
        "print('parent' if child else 'child', flush=True)\n",
    )
    assert watched("script", "train.py") == natively("script", "train.py")
    assert status(tmp_path) == ("complete", 2)


def test_spawned_loader_workers_are_not_watched(natively, watched, write, tmp_path):
    write(
        "train.py",
        "import sys, torch\n"
        "class Names(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 2\n"
        "    def __getitem__(self, i): return 'stepscope' in sys.modules\n"
        "if __name__ == '__main__':\n"
        "    loader = torch.utils.data.DataLoader(Names(), num_workers=1, multiprocessing_context='spawn')\n"
        "    print([bool(x) for x in loader])\n" + "\n".join("    " + line for line in TRAINING.splitlines()) + "\n",
    )
    ran = watched("script", "train.py")
    assert ran == natively("script", "train.py")
    assert ran.stdout.startswith("[False, False]\n")
    assert status(tmp_path) == ("complete", 1)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("script", "nosuch.py"), "cannot open nosuch.py: No such file or directory"),
        (("module", "nosuch"), "No module named nosuch"),
    ],
)
def test_target_that_does_not_exist_is_refused(words, reason, watched):
    ran = watched(*words)
    assert (ran.code, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert reason in ran.stderr
