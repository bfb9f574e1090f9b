"""Workers that a program starts can find its ``__main__``, and run without the launcher."""

import pytest

WORKERS = '''import multiprocessing, os, pickle, sys, dataclasses

print("import as", __name__, "by", sys.modules["__main__"].__name__, "watched", "stepscope" in sys.modules, flush=True)


@dataclasses.dataclass
class Batch:
    """A class that pickles know as __main__.Batch."""
    size: int

    def doubled(self):
        return Batch(self.size * 2)


def work(batch):
    return batch.doubled(), type(batch).__module__, sys.argv, sys.path[0], vars(sys.modules["__main__"]).get("__file__")


if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Batch(1))) == Batch(1)
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(work, [Batch(3)]), flush=True)
'''

LOADER = """import torch


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.tensor([i * i, torch.utils.data.get_worker_info().seed % 1000])


if __name__ == "__main__":
    torch.manual_seed(5)
    for method in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(Squares(), 2, shuffle=True, num_workers=1, multiprocessing_context=method)
        print(method, [batch.tolist() for batch in loader])
"""


def unwatched(text):
    """The driver itself imports stepscope, and a fork inherits that; a spawned worker must not have it."""
    return text.replace("watched True", "watched False")


@pytest.mark.parametrize(("kind", "name"), [("script", "train.py"), ("module", "train"), ("module", "pack.train")])
def test_forked_and_spawned_workers_share_the_classes_of_main(kind, name, natively, launched, write):
    for file in ("train.py", "pack/train.py"):
        write(file, WORKERS)
    native, ran = natively(kind, name), launched(kind, name)
    assert (ran.code, unwatched(ran.stdout), ran.stderr) == (native.code, native.stdout, native.stderr)
    assert native.code == 0
    assert "import as __mp_main__ by __main__ watched False" in ran.stdout
    assert "fork [(Batch(size=6), '__main__'" in ran.stdout
    assert "spawn [(Batch(size=6), '__mp_main__'" in ran.stdout


def test_data_loader_workers(same, write):
    write("train.py", LOADER)
    ran = same("script", "train.py")
    assert (ran.code, ran.stdout.count("fork ["), ran.stdout.count("spawn [")) == (0, 1, 1)


def test_subprocess_of_the_script_runs_natively(same, write):
    write("child.py", "import sys\nprint(sys.argv, 'stepscope' in sys.modules)\n")
    write(
        "train.py",
        "import subprocess, sys\nprint(subprocess.check_output([sys.executable, 'child.py', 'x'], text=True))\n",
    )
    assert "['child.py', 'x'] False" in same("script", "train.py").stdout


FORK = """import os
child = os.fork()
if child:
    os.waitpid(child, 0)
print("parent" if child else "child", flush=True)
raise SystemExit(0 if child else 4)
"""


def test_raw_fork_comes_to_the_end_of_main_twice(same, write):
    write("train.py", FORK)
    assert same("script", "train.py").stdout == "child\nparent\n"


def test_exit_of_a_raw_fork_says_that_it_is_one(natively, write):
    write("train.py", FORK)
    write(
        "outer.py",
        "from stepscope.watch.launcher import Target, execute\n"
        "end = execute(Target('script', 'train.py'))\nprint(end.code, end.forked, flush=True)\n",
    )
    assert natively("script", "outer.py").stdout == "child\n4 True\nparent\n0 False\n"
