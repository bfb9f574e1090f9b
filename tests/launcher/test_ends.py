"""A program ends under the launcher as it does alone: its traceback, its words and its exit code."""

import re

import pytest

PROGRAMS = r"""
#: plain end
print("done")
#: exit None
import sys; sys.exit()
#: exit 0
raise SystemExit(0)
#: exit 3
print("out"); raise SystemExit(3)
#: exit True
raise SystemExit(True)
#: exit 256
raise SystemExit(256)
#: exit -1
raise SystemExit(-1)
#: exit text
import sys; print("out"); sys.exit("no data in ./data")
#: exit tuple
raise SystemExit(1, "two")
#: exit from a nested call
def main():
    quit(5)
main()
#: os._exit
import os; print("lost", end=""); os._exit(7)
#: exception
def step():
    return 1 / 0

step()
#: cause
def run():
    try:
        1 / 0
    except ZeroDivisionError as error:
        raise RuntimeError("step failed") from error
run()
#: context
try:
    {}["lr"]
except KeyError:
    int("x")
#: context suppressed
try:
    {}["lr"]
except KeyError:
    raise ValueError("no lr") from None
#: group
try:
    1 / 0
except ZeroDivisionError as error:
    raise ExceptionGroup("several", [error, ExceptionGroup("inner", [ValueError(1)])])
#: note
error = ValueError("x"); error.add_note("seen at step 3"); raise error
#: frozen exception
import dataclasses
@dataclasses.dataclass(frozen=True)
class Odd(Exception):
    step: int
raise Odd(3)
#: base exception
class Stop(BaseException): pass
raise Stop("now")
#: import error
import no_such_library
#: syntax error
x = (1,
print(x)
#: indentation error
if True:
print(1)
#: syntax error in an import
import broken
#: syntax warning
print(1 is 1)
#: keyboard interrupt
def step():
    raise KeyboardInterrupt
step()
#: excepthook
import sys
def hook(kind, error, trace):
    print("hook", kind, error, trace.tb_lineno, trace.tb_frame.f_code.co_name)
sys.excepthook = hook
1 / 0
#: excepthook exits
import sys
def hook(*_):
    sys.exit(9)
sys.excepthook = hook
1 / 0
#: excepthook fails
import sys
def hook(*_):
    raise OSError("no log")
sys.excepthook = hook
1 / 0
#: last exception is kept
import atexit, sys
atexit.register(lambda: print("last", sys.last_type, sys.last_value, sys.last_traceback.tb_lineno))
1 / 0
#: exit handlers
import atexit, sys
atexit.register(lambda: print("bye", sys.modules["__main__"].lr, sys.argv))
lr = 3e-4
#: thread outlives main
import threading
def late():
    threading.main_thread().join()
    print("late", lr)
threading.Thread(target=late).start()
lr = 3e-4
print("end of main")
#: idle pool
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)
print(pool.submit(pow, 2, 3).result())
#: exception in a thread
import threading
thread = threading.Thread(target=lambda: 1 / 0, name="loader")
thread.start(); thread.join()
print("on")
#: warnings
import warnings
warnings.warn("slow")
warnings.filterwarnings("ignore")
warnings.warn("unseen")
#: nothing is being handled
import sys
print(sys.exc_info())
try:
    raise
except RuntimeError as error:
    print(error, error.__context__)
"""
ENDS = dict(part.split("\n", 1) for part in PROGRAMS.split("#: ")[1:])


@pytest.mark.parametrize("end", ENDS)
def test_script_ends_as_it_does_alone(end, same, write):
    write("train.py", ENDS[end])
    write("broken.py", "def f(:\n")
    same("script", "train.py")


@pytest.mark.parametrize(
    "end",
    ["exit 3", "exit text", "exception", "cause", "syntax error", "keyboard interrupt", "excepthook", "exit handlers"],
)
def test_module_and_code_end_as_they_do_alone(end, same, write):
    write("train.py", ENDS[end])
    same("module", "train")
    same("code", ENDS[end])


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("plain end", 0, ""),
        ("exit 3", 3, ""),
        ("exit 256", 0, ""),
        ("exit -1", 255, ""),
        ("exit text", 1, "no data in ./data\n"),
        ("exception", 1, "ZeroDivisionError: division by zero\n"),
        ("keyboard interrupt", 130, "KeyboardInterrupt\n"),
        ("excepthook exits", 9, ""),
        ("os._exit", 7, ""),
    ],
)
def test_exit_code_and_last_words(end, code, words, launched, write):
    write("train.py", ENDS[end])
    ran = launched("script", "train.py")
    assert (ran.code, ran.stderr[len(ran.stderr) - len(words) :]) == (code, words)


def test_endless_recursion(natively, launched, write):
    """The limit is reached some calls sooner, so that only the count of repeated lines may differ."""
    write("train.py", "def f():\n    f()\nf()\n")
    ends = [run("script", "train.py") for run in (natively, launched)]
    native, ran = (re.sub(r"repeated \d+ more", "repeated", end.stderr) for end in ends)
    assert ran == native
    assert "RecursionError" in ran


def test_missing_library_of_the_script_is_the_scripts_own_error(launched, write):
    write("train.py", "import no_such_library")
    ran = launched("script", "train.py")
    assert ran.code == 1
    assert ran.stderr.startswith("Traceback (most recent call last):\n")


def test_frames_of_a_patch_in_the_middle_of_a_traceback_are_taken_out(natively, launched, write):
    """A wrapper of ours around ``backward`` must not stand in the traceback of an error below it, nor of its causes."""
    write(
        "train.py",
        "import os, stepscope.watch as ours\n"
        "patch = {}\n"
        "file = os.path.join(os.path.dirname(ours.__file__), 'patch.py')\n"
        "exec(compile('def patched(f): f()', file, 'exec'), patch)\n"
        "def backward():\n    raise ValueError('no graph')\n"
        "def step():\n"
        "    try:\n        patch['patched'](backward)\n"
        "    except ValueError as cause:\n        raise RuntimeError('step 3') from cause\n"
        "patch['patched'](step)\n",
    )
    native, ran = natively("script", "train.py"), launched("script", "train.py")
    lines = native.stderr.splitlines()
    assert sum("watch/patch.py" in line for line in lines) == 2
    assert ran.stderr.splitlines() == [line for line in lines if "watch/patch.py" not in line]


def test_message_of_an_exit_is_the_last_line_of_the_traceback(launched, write):
    write(
        "outer.py",
        "import sys\nfrom stepscope.watch.launcher import Target, execute\n"
        "for code in ('1/0', 'raise SystemExit(3)', 'raise SystemExit(256)', 'pass', 'raise KeyboardInterrupt'):\n"
        "    end = execute(Target('code', code))\n    print(end.code, end.message, type(end.error).__name__)\n",
    )
    assert launched("script", "outer.py").stdout.splitlines() == [
        "1 ZeroDivisionError: division by zero ZeroDivisionError",
        "3 SystemExit: 3 SystemExit",
        "0 SystemExit: 256 SystemExit",
        "0  NoneType",
        "130 KeyboardInterrupt KeyboardInterrupt",
    ]
