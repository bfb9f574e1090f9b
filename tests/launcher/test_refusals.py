"""A target that cannot be run is refused in one line with exit code 2; nothing of it is run."""

import pytest


def refusal(ran):
    assert ran.code == 2
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1
    assert ran.stderr.startswith("stepscope: ")
    return ran.stderr


def test_script_that_does_not_exist(launched):
    assert "cannot open nosuch.py: No such file or directory" in refusal(launched("script", "nosuch.py"))


def test_folder_without_a_main_file(launched, write):
    write("src/train.py", "print(1)")
    assert "src has no __main__.py" in refusal(launched("script", "src"))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"print(1)\n# caf\xe9\n", "cannot be decoded: 'utf-8' codec can't decode byte 0xe9"),
        (b"# coding: klingon\nprint(1)\n", "cannot be decoded: unknown encoding: klingon"),
        (b"\xef\xbb\xbf# coding: latin-1\nprint(1)\n", "cannot be decoded: encoding problem: utf-8"),
        (b"print(1)\n\0", "is not Python source: it holds null bytes"),
    ],
)
def test_file_that_is_not_python_source(source, reason, launched, tmp_path):
    (tmp_path / "train.py").write_bytes(source)
    assert f"train.py {reason}" in refusal(launched("script", "train.py"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nosuch", "No module named nosuch"),
        ("pack.nosuch", "No module named pack.nosuch"),
        ("pack", "No module named pack.__main__; 'pack' is a package and cannot be directly executed"),
        ("train.py", "Try using 'train' instead of 'train.py' as the module name."),
        (".train", "Relative module names not supported"),
    ],
)
def test_module_that_does_not_exist(name, reason, launched, write):
    write("train.py", "")
    write("pack/__init__.py", "")
    assert reason in refusal(launched("module", name))


@pytest.mark.parametrize("text", ["import no_such_library", "import sys; sys.exit('python: No module named x')"])
def test_what_a_parent_package_raises_is_the_programs_own_error(text, same, write):
    write("pack/__init__.py", text)
    write("pack/train.py", "")
    assert same("module", "pack.train").code == 1
