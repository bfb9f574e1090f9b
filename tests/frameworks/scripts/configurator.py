"""Poor man's configurator: overrides the globals of the script that executes this file."""

import sys

for arg in sys.argv[1:]:
    key, value = arg.removeprefix("--").split("=")
    if key not in globals():
        raise ValueError(f"unknown config key: {key}")
    globals()[key] = type(globals()[key])(value)
