"""A program finds the ``__main__``, the arguments and the paths that CPython would have made."""

import zipapp

import pytest

IDENTITY = '''"""Say who I am."""
names = list(globals())
import builtins, os, sys
main = sys.modules["__main__"]
print("names", names)
print("argv", sys.argv)
print("path", sys.path)
print("cwd", os.getcwd())
print("name", __name__, "package", repr(__package__), "doc", __doc__, "annotations", __annotations__)
print("file", globals().get("__file__"), "cached", globals().get("__cached__"))
loader = __loader__ if isinstance(__loader__, type) else type(__loader__)
print("loader", loader, getattr(__loader__, "name", ""), getattr(__loader__, "path", ""))
print("spec", __spec__ and (__spec__.name, __spec__.origin, __spec__.parent))
print("main", vars(main) is globals(), type(main), __builtins__ is builtins)
print("flags", sys.flags)
print("code", sys._getframe().f_code.co_filename)
'''


@pytest.mark.parametrize(
    "name", ["train.py", "./train.py", "sub/../train.py", "sub/train.py", "link.py", "runs/../link.py"]
)
def test_script_is_the_main_that_the_interpreter_makes(name, same, write, tmp_path):
    write("train.py", IDENTITY)
    write("sub/train.py", IDENTITY)
    write("runs/empty", "")
    (tmp_path / "link.py").symlink_to(tmp_path / "sub" / "train.py")
    ran = same("script", name, "--lr", "3e-4", "-m", "-h", "--", "x")
    assert ran.code == 0
    assert f"argv ['{name}', '--lr', '3e-4', '-m', '-h', '--', 'x']" in ran.stdout
    assert f"file {tmp_path}/{name} cached None" in ran.stdout


def test_script_given_by_absolute_path(same, write):
    ran = same("script", str(write("elsewhere/train.py", IDENTITY)))
    assert "elsewhere']" not in ran.stdout
    assert "/elsewhere', " in ran.stdout


@pytest.mark.parametrize("name", ["train", "pack.train", "pack"])
def test_module_is_the_main_that_the_interpreter_makes(name, same, write):
    write("train.py", IDENTITY)
    write("pack/__init__.py", "import sys; print('parent sees', sys.argv, sys.modules['__main__'].__spec__)")
    write("pack/train.py", IDENTITY)
    write("pack/__main__.py", IDENTITY)
    ran = same("module", name, "--lr", "3e-4")
    assert ran.code == 0
    assert f"spec ('{name if name != 'pack' else 'pack.__main__'}', " in ran.stdout
    assert ("parent sees ['-m', '--lr', '3e-4'] None" in ran.stdout) == (name != "train")


def test_code_is_the_main_that_the_interpreter_makes(same):
    ran = same("code", IDENTITY, "--lr", "3e-4")
    assert ran.code == 0
    assert "argv ['-c', '--lr', '3e-4']" in ran.stdout
    assert "path ['', " in ran.stdout


def test_folder_and_zip_file_run_their_main_file(same, write, tmp_path):
    write("app/__main__.py", IDENTITY)
    zipapp.create_archive(tmp_path / "app", tmp_path / "app.pyz")
    for name in ("app", "./app", "app.pyz"):
        ran = same("script", name, "--lr", "3e-4")
        assert ran.code == 0
        assert "names ['__name__', '__doc__', '__package__', '__loader__', '__spec__'" in ran.stdout


@pytest.mark.parametrize("options", [("-P",), ("-O", "-W", "error", "-X", "utf8")])
@pytest.mark.parametrize(("kind", "name"), [("script", "train.py"), ("script", "app"), ("code", IDENTITY)])
def test_options_of_the_interpreter_hold(kind, name, options, same, write):
    write("train.py", IDENTITY)
    write("app/__main__.py", IDENTITY)
    assert same(kind, name, options=options).code == 0


def test_future_imports_of_the_launcher_do_not_reach_the_program(same, write):
    write("train.py", "def step(x: NotDefined): pass\n")
    for kind, name in (("script", "train.py"), ("code", "def step(x: NotDefined): pass")):
        ran = same(kind, name)
        assert ran.code == 1
        assert "NameError: name 'NotDefined' is not defined" in ran.stderr


def test_program_may_import_itself_and_run_again_as_main(same, write):
    write(
        "train.py",
        "import runpy, sys\nimport train\nassert train is not sys.modules['__main__']\n"
        "if __name__ == '__main__' and len(sys.argv) < 2:\n"
        "    sys.argv.append('again')\n    runpy.run_path(__file__, run_name='__main__')\n"
        "print(__name__, sys.argv)\n",
    )
    ran = same("script", "train.py")
    assert (ran.code, ran.stdout.count("__main__ ")) == (0, 2)


@pytest.mark.parametrize(
    ("encoding", "head"),
    [
        ("utf-8", ""),
        ("utf-8-sig", ""),
        ("latin-1", "# -*- coding: latin-1 -*-\n"),
        ("utf-8", "#!/usr/bin/env python\r\n"),
    ],
)
def test_source_is_decoded_as_the_interpreter_does(encoding, head, same, tmp_path):
    (tmp_path / "train.py").write_bytes((head + "print(ascii('verlängert'))\r\n\x0cprint(2)").encode(encoding))
    assert same("script", "train.py").stdout == "'verl\\xe4ngert'\n2\n"
