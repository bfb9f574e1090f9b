"""The made-up traces of the renderers' tests, for comparisons."""

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def factory():
    name = "stepscope_tests_factory"
    if name not in sys.modules:
        path = Path(__file__).parents[1] / "render" / "factory.py"
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
