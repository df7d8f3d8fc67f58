"""`python -m gpipe_compiler` is `gpipe-compile`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # The working directory, which `-m` puts first: a file there may be called torch.py.
        sys.path.append(sys.path.pop(0))
    from gpipe_compiler.cli.main import compile_command

    sys.exit(compile_command())
