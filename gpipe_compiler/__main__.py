"""`python -m gpipe_compiler` is `gpipe-compile`."""

import sys

from gpipe_compiler.cli import compile_command

if __name__ == "__main__":
    sys.exit(compile_command())
