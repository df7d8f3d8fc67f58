"""Trains, runs, checks or times conv_net: python run.py --help."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

DIRECTORY = Path(__file__).resolve().parent
NAME = "conv_net_x3"


def load_package() -> ModuleType:
    """The package in this folder, whatever the folder is called and wherever it lies."""
    spec = importlib.util.spec_from_file_location(
        NAME, DIRECTORY / "__init__.py", submodule_search_locations=[str(DIRECTORY)]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = package
    spec.loader.exec_module(package)
    return package


if __name__ == "__main__":
    try:
        package = load_package()
        command = importlib.import_module(f"{package.__name__}.runtime.train.command")
    except KeyboardInterrupt:  # as torch is imported
        sys.exit(130)
    sys.exit(command.main(package.SPEC, DIRECTORY, package.WEIGHTS))
