"""What suites that want torch begin with."""

import ctypes
import os
import pathlib
import sys

# Before torch is loaded, and for what a suite starts: torch's threads wait for each other by
# spinning, on cores that others use.
os.environ["OMP_NUM_THREADS"] = "1"
VENV_PYTHON = pathlib.Path(__file__).resolve().parent.parent / "build" / "torch" / "bin" / "python3"


def require(is_there, what):
    """Goes on where it is there. Else begins the program again with the interpreter of build/torch,
    which scripts/test makes, or ends it with 77, skipped; so, too, where MOXIE_TEST_DEVICE wants a
    GPU and its driver sees none, which torch would take seconds to say."""
    if os.environ.get("MOXIE_TEST_DEVICE") == "cuda" and not gpus():
        skip("the driver sees no GPU")
    if is_there:
        return
    if VENV_PYTHON.exists() and sys.executable != str(VENV_PYTHON):
        os.execv(VENV_PYTHON, [str(VENV_PYTHON), *sys.argv])
    skip(f"{what} not installed, nor in build/torch")


def gpus():
    """How many the driver sees."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    if driver.cuInit(0) == 0:
        driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value


def skip(why):
    """Ends the program as skipped."""
    print(f"skipped: {why}")
    sys.exit(77)
