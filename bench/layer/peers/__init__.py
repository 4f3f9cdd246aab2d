"""The systems that are timed. Each is a small file with a class of three functions:

available() says why it cannot be had here, or None; prepare(case) makes what a cell needs, outside
of any timing; run(forward) enqueues one forward and returns the tensor that it writes.

Where a system needs it, routed() follows every draw, untimed, and errors() compares what the last
replay wrote with what is right for this system.
"""

import importlib.machinery
import importlib.util
import pathlib
import sys

from measure import fp8
from measure.case import FORWARDS, off_by
from measure.cells import WHOLE


class Unfit(Exception):
    """prepare() cannot serve this case; the text says why."""


def lacks_format(number, *formats):
    """Why a system of these formats of weights cannot take another, or None."""
    return None if number in formats else f"of {' and '.join(formats)} only"


def check_blocks(case):
    """For systems whose scales of up go on where gate's end."""
    if case.number == "fp8" and case.sizes.intermediate % fp8.BLOCK != 0:
        raise Unfit("its blocks do not begin anew at up")


def look_in(folder):
    """For packages, before anywhere else."""
    path = str(pathlib.Path(folder).resolve())
    if path not in sys.path:
        sys.path.insert(0, path)


def not_in(folder, option, *packages):
    """Why a folder that an option names has none of these packages, or None."""
    if any(importlib.machinery.PathFinder.find_spec(each, [str(folder)]) for each in packages):
        return None
    return f"no package {' or '.join(packages)} in {folder}; {option} names a folder that has it"


def lacks(package, folder, option):
    """Why a package cannot be imported, with the option that names a folder of it, or None. Where
    one is named, no other is measured instead."""
    if folder is not None:
        look_in(folder)
        return not_in(folder, option, package)
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed; {option} PATH"
    return None


class System:
    """A whole layer: x, ids and router weights in, y out."""

    name, what = None, WHOLE
    version = None  # of what is measured, where it says so; known once it is available

    def __init__(self, options, device):
        self.options, self.device, self.case = options, device, None

    @classmethod
    def names(cls):
        """All that --systems may call it."""
        return (cls.name,)

    def is_among(self, names):
        return self.name in names

    def has_to_be_there(self):
        """Whether nothing is measured where it is absent: as of what an option names."""
        return False

    def available(self):
        return None

    def prepare(self, case):
        self.case = case

    def run(self, forward):
        raise NotImplementedError

    def routed(self):
        pass

    def errors(self, answers, outputs):
        """The relative error of each forward; `answers` are Case.answer of some_tokens()."""
        tokens = self.case.some_tokens()
        return [off_by(outputs[forward][tokens], answers[forward]) for forward in range(FORWARDS)]

    def host_call(self):
        """One forward's call below the system's own Python, or None where there is none."""
        return None

    def release(self):
        self.case = None


def kinds():
    """All that this program knows, the one that bars are for first."""
    from peers import deep_gemm, grouped_mm, moxie, triton, vllm_deep_gemm
    return (moxie.Moxie, grouped_mm.Layer, grouped_mm.Products, triton.Triton,
            vllm_deep_gemm.Layer, deep_gemm.Contiguous, deep_gemm.Masked, moxie.Other)


def systems(options, device):
    return [each(options, device) for each in kinds()]
