"""Runs a user's script, module or ``-c`` code as a faithful ``__main__`` in this process.

The program must not be able to tell that it is watched: its arguments, ``sys.path``, ``__main__`` and globals are those
that CPython would have made, it can pickle its classes and spawn workers, and when it fails its own traceback is
printed without a frame of ours and its own exit code is returned. The behaviour copied is that of CPython's
``Modules/main.c`` and ``Python/pythonrun.c``; modules, directories and zip files are left to ``runpy``, as CPython
leaves them.

One difference remains: frames of stepscope lie below the program's first one. ``inspect.stack()`` shows them, so does a
warning whose ``stacklevel`` points below the program, and the recursion limit is reached that many calls sooner.
"""

from __future__ import annotations

import builtins
import importlib.util
import linecache
import os
import pkgutil
import runpy
import sys
import traceback
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Literal

from stepscope.errors import EXIT_INTERRUPTED, StepscopeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_OUR_FOLDER = os.path.dirname(__file__) + os.sep  # noqa: PTH120 - compared as a string

# The very function that the interpreter calls for -m, directories and zip files: it alone gives their exact behaviour.
_run_module_as_main: Callable[[str, bool], Any] = runpy._run_module_as_main  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Target:
    """What to run: the words after ``python`` on a command line.

    Attributes:
        kind: ``script`` (also a directory or zip file that holds a ``__main__.py``), ``module`` or ``code``.
        name: the path, the dotted name or the source text.
        args: the program's own arguments, which become ``sys.argv[1:]``.
    """

    kind: Literal["script", "module", "code"]
    name: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exit:
    """How the program ended. Whatever it had to say is already printed.

    Attributes:
        code: exit code as a shell shows it: 130 after a KeyboardInterrupt.
        error: the exception that ended the program, SystemExit included; None at a plain end.
        forked: this process is a child that the program made with ``os.fork`` and that came to the end of ``__main__``.
            It should end now with ``code``: recording and reporting are its parent's work.
    """

    code: int
    error: BaseException | None = None
    forked: bool = False

    @property
    def message(self) -> str:
        """The last line of the traceback, such as ``ValueError: no data``; empty at a plain end."""
        return "" if self.error is None else traceback.format_exception_only(self.error)[-1].strip()


def execute(target: Target) -> Exit:
    """Run the target to its end as ``__main__`` and print what the interpreter would print.

    ``sys.argv``, ``sys.path[0]`` and ``sys.modules["__main__"]`` are replaced and stay so: exit handlers, pickles and
    threads of the program still need them. Non-daemon threads may still run when this returns.

    Raises:
        StepscopeError: the script or module does not exist or is not Python source. What the program itself raises
            is never raised here.
    """
    parent = os.getpid()
    error = _catch(_PREPARE[target.kind](target))
    if target.kind == "module":
        _raise_if_not_found(error)
    return Exit(_finish(error), error, forked=os.getpid() != parent)


def _prepare_path(target: Target) -> Callable[[], None]:
    file = os.path.join(os.getcwd(), target.name)  # noqa: PTH109, PTH118 - CPython does not normalize it either
    return _prepare_script(target, file) if pkgutil.get_importer(file) is None else _prepare_container(target, file)


def _prepare_script(target: Target, file: str) -> Callable[[], None]:
    source = _read(target.name, file)
    main = _new_main(SourceFileLoader("__main__", file), __file__=file, __cached__=None)
    _install(main, [target.name, *target.args], _replacing(str(Path(file).resolve().parent)))
    return lambda: exec(_compile(source, file), main.__dict__)


def _prepare_container(target: Target, file: str) -> Callable[[], None]:
    """A directory or zip file. It heads ``sys.path`` even in safe mode (``-P``), because its code lies there."""
    if PathFinder.find_spec("__main__", [file]) is None:
        raise StepscopeError(f"{target.name} has no __main__.py to run", hint="name a script in it, or use -m MODULE")
    _install(_new_main(), [target.name, *target.args], [file, *sys.path[not sys.flags.safe_path :]])
    return lambda: _run_module_as_main("__main__", False)


def _prepare_module(target: Target) -> Callable[[], None]:
    # "-m" stands in argv[0] until the module is found: parent packages, imported on the way, see it in CPython too.
    _install(_new_main(), ["-m", *target.args], _replacing(os.getcwd()))  # noqa: PTH109
    return lambda: _run_module_as_main(target.name, True)


def _prepare_code(target: Target) -> Callable[[], None]:
    main, source = _new_main(), target.name + "\n"
    _install(main, ["-c", *target.args], _replacing(""))
    if sys.version_info >= (3, 13):  # since then the tracebacks of -c show its lines
        linecache.cache["<string>"] = (len(source), None, source.splitlines(keepends=True), "<string>")
    return lambda: exec(_compile(source, "<string>"), main.__dict__)


_PREPARE = {"script": _prepare_path, "module": _prepare_module, "code": _prepare_code}


def _new_main(loader: Any = BuiltinImporter, **names: Any) -> ModuleType:
    """An empty ``__main__`` with the names, in their order, that the interpreter gives it."""
    main = ModuleType("__main__")
    main.__dict__.update(__loader__=loader, __annotations__={}, __builtins__=builtins, **names)
    return main


def _install(main: ModuleType, argv: list[str], path: list[str]) -> None:
    sys.modules["__main__"] = main
    sys.argv = argv
    sys.path[:] = path


def _replacing(first: str) -> list[str]:
    """``sys.path`` with the target's entry in the place of ours; safe mode (``-P``) has neither."""
    return list(sys.path) if sys.flags.safe_path else [first, *sys.path[1:]]


def _read(name: str, file: str) -> bytes:
    try:
        source = Path(file).read_bytes()
        text = importlib.util.decode_source(source)
    except OSError as error:
        raise StepscopeError(
            f"cannot open {name}: {error.strerror}", hint="paths start at the current folder"
        ) from error
    except (SyntaxError, UnicodeDecodeError) as error:
        raise StepscopeError(
            f"{name} cannot be decoded: {error}", hint="declare its encoding, or save it as UTF-8"
        ) from error
    if "\0" in text:
        raise StepscopeError(f"{name} is not Python source: it holds null bytes", hint="give the .py file")
    return source


def _compile(source: str | bytes, file: str) -> CodeType:
    """Compile without the ``from __future__`` imports of this module."""
    return compile(source, file, "exec", dont_inherit=True)


def _catch(start: Callable[[], None]) -> BaseException | None:
    try:
        start()
    except BaseException as error:
        for linked in _linked(error):
            linked.with_traceback(_without_ours(linked.__traceback__))
        return error
    return None


def _linked(error: BaseException) -> Iterator[BaseException]:
    """The exception and, each once, those that it shows along with itself: causes, contexts, members of a group."""
    found: dict[int, BaseException] = {}
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in found:
            found[id(one)] = one
            waiting += [one.__cause__, one.__context__]
            waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
    return iter(found.values())


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Take the frames of this folder out of a traceback: the launcher's at its start, a patch's in its middle."""
    following = None
    for entry in reversed(list(_entries(trace))):
        if not entry.tb_frame.f_code.co_filename.startswith(_OUR_FOLDER):
            if entry.tb_next is not following:
                entry.tb_next = following
            following = entry
    return following


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _raise_if_not_found(error: BaseException | None) -> None:
    """``runpy`` reports a missing module by a SystemExit from its outermost frame, before code of the module ran."""
    trace = error.__traceback__ if isinstance(error, SystemExit) else None
    if trace is not None and trace.tb_next is None and trace.tb_frame.f_code.co_name == _run_module_as_main.__name__:
        raise StepscopeError(
            str(error).removeprefix(f"{sys.executable}: "), hint="-m searches the current folder first"
        )


def _finish(error: BaseException | None) -> int:
    """Say what CPython's ``PyErr_Print`` says about the exception that ended ``__main__``; return the exit code."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        return _exit_code(error)
    hook_exit = _show(error)
    if hook_exit is not None:
        return _exit_code(hook_exit)
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF  # all that a POSIX process can hand to its parent
    print(stop.code, file=sys.stderr or sys.__stderr__)  # the program may have closed the first
    return 1


def _show(error: BaseException) -> SystemExit | None:
    """Hand the exception to ``sys.excepthook``, which the program may have set; return an exit that the hook raised."""
    shown = (type(error), error, error.__traceback__)
    sys.last_type, sys.last_value, sys.last_traceback = shown
    failure = _catch(lambda: sys.excepthook(*shown))
    if failure is None or isinstance(failure, SystemExit):
        return failure
    print("Error in sys.excepthook:", file=sys.stderr)  # noqa: T201
    sys.__excepthook__(type(failure), failure, failure.__traceback__)
    print("\nOriginal exception was:", file=sys.stderr)  # noqa: T201
    sys.__excepthook__(*shown)
    return None
