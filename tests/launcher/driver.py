"""``python driver.py KIND NAME ARGS…``: run a target as ``stepscope run`` does, without watching it."""

import sys

from stepscope.errors import StepscopeError
from stepscope.watch.launcher import Target, execute


def main(kind, name, *args):
    try:
        return execute(Target(kind, name, args)).code
    except StepscopeError as error:
        print(f"stepscope: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
