"""What suites that want torch begin with."""

import os
import pathlib
import sys

VENV_PYTHON = pathlib.Path(__file__).resolve().parent.parent / "build" / "torch" / "bin" / "python3"


def require(is_there, what):
    """Goes on where it is there. Else begins the program again with the interpreter of build/torch,
    which scripts/test makes, or ends it with 77, skipped."""
    if is_there:
        return
    if VENV_PYTHON.exists() and sys.executable != str(VENV_PYTHON):
        os.execv(VENV_PYTHON, [str(VENV_PYTHON), *sys.argv])
    skip(f"{what} not installed, nor in build/torch")


def skip(why):
    """Ends the program as skipped."""
    print(f"skipped: {why}")
    sys.exit(77)
