"""Moxie from Python, through ctypes alone: abi.h as a mirror, a host, and the experts of a model.

moxie.transformers, which needs torch and transformers, is imported by those who want it.
"""

from moxie.abi import VERSION as __version__
from moxie.abi import MoxieError
from moxie.experts import Experts, Layer, Rows, matrix, tensor
from moxie.host import Instance, Library, load

__all__ = ["Experts", "Instance", "Layer", "Library", "MoxieError", "Rows", "__version__", "load",
           "matrix", "tensor"]
