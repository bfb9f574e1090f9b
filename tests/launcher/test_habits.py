"""Habits of real training scripts that a launcher easily breaks."""

CONFIGURATOR = """
import sys
for arg in sys.argv[1:]:
    key, value = arg.removeprefix('--').split('=')
    assert key in globals(), key
    globals()[key] = type(globals()[key])(value)
"""


def test_config_built_from_all_module_globals(same, write):
    write("configurator.py", CONFIGURATOR)
    write(
        "train.py",
        "lr = 6e-4\nbatch_size = 12\ncompile = False\n"
        "keys = [k for k, v in globals().items() if not k.startswith('_') and isinstance(v, (int, float, bool, str))]\n"
        "exec(open('configurator.py').read())\n"
        "print({k: globals()[k] for k in keys})\n",
    )
    ran = same("script", "train.py", "--batch_size=3", "--lr=0.1")
    assert ran.stdout == "{'lr': 0.1, 'batch_size': 3, 'compile': False}\n"


def test_package_set_by_hand_and_path_edited_for_a_relative_import(same, write):
    write("model/net.py", "width = 8\n")
    write(
        "trainer/train.py",
        "import os, sys\n__package__ = 'trainer'\n"
        "sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), '..')))\n"
        "from model.net import width\nfrom .helper import depth\nprint(width, depth, sys.path[0], sys.path[-1])\n",
    )
    write("trainer/helper.py", "depth = 2\n")
    assert same("script", "trainer/train.py").stdout.startswith("8 2 ")


def test_module_beside_the_script_is_found_and_one_in_the_current_folder_is_not(same, write):
    write("sub/train.py", "import beside\nprint(beside.here)\nimport above\n")
    write("sub/beside.py", "here = 'sub'\n")
    write("above.py", "")
    ran = same("script", "sub/train.py")
    assert ran.stdout == "sub\n"
    assert "ModuleNotFoundError: No module named 'above'" in ran.stderr


def test_relative_paths_and_a_change_of_folder(same, write, tmp_path):
    write("data/tokens.txt", "1 2 3")
    write(
        "train.py",
        "import os\nprint(open('./data/tokens.txt').read())\nos.makedirs('out/run')\nos.chdir('out/run')\n"
        "print(os.path.relpath(__file__))\nos.chdir('../..')\nos.removedirs('out/run')\n1/0\n",
    )
    assert same("script", "train.py").stdout == "1 2 3\n../../train.py\n"


def test_argparse_shows_the_same_usage(same, write):
    text = (
        "import argparse\nif __name__ == '__main__':\n    parser = argparse.ArgumentParser()\n"
        "    parser.add_argument('--lr', type=float, required=True)\n    print(parser.parse_args())\n"
    )
    write("train.py", text)
    write("pack/__init__.py", "")
    write("pack/__main__.py", text)
    for kind, name in (("script", "train.py"), ("module", "train"), ("module", "pack"), ("code", text)):
        assert same(kind, name, "--lr", "0.5").stdout == "Namespace(lr=0.5)\n"
        assert same(kind, name, "-h").stdout.startswith("usage: ")
        assert same(kind, name, "--lr", "high").code == 2


def test_source_of_what_the_script_defines_can_be_found(same, write):
    write(
        "train.py",
        "import dataclasses, inspect, typing\n"
        "@dataclasses.dataclass\nclass Config:\n    lr: 'float' = 1e-3\n"
        "print(inspect.getsource(Config), inspect.getfile(Config), inspect.getmodule(Config).__name__)\n"
        "print(typing.get_type_hints(Config), Config())\n",
    )
    ran = same("script", "train.py")
    assert "class Config:\n    lr: 'float' = 1e-3\n" in ran.stdout


def test_output_is_not_mixed_with_ours_and_stays_in_order(same, write):
    write(
        "train.py",
        "import os, sys\nos.dup2(1, 2)\nprint('buffered')\nos.write(1, b'direct\\n')\n"
        "print('warned', file=sys.stderr)\n1/0\n",
    )
    ran = same("script", "train.py")
    assert ran.stderr == ""
    assert "Traceback" in ran.stdout


def test_standard_error_closed_by_the_script(same, write):
    write("train.py", "import sys\nsys.stderr = None\nsys.exit('unheard')\n")
    same("script", "train.py")
