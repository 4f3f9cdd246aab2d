"""A GPU for bench/layer's tests: its tensors are on the CPU, a graph replays what it captured. What
imports this has bench/layer among its paths.
"""

import contextlib
import os
import types
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from measure import device
from measure.case import FORWARDS
from moxie import abi
from peers import moxie

# What the host would have to wait for the GPU for: a capture refuses it.
WAITS = ("_local_scalar_dense", "nonzero", "item", "bincount", "unique")


class Recorder(TorchDispatchMode):
    """The operators of a capture, with the memory that they read and write."""

    def __init__(self, graph):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        assert name not in WAITS, f"{name} in a capture"
        out = func(*args, **(kwargs or {}))
        self.graph.calls.append((func, args, kwargs or {}, out))
        return out


class PretendedGraph:
    """Replays the operators into the tensors that the capture made, as a graph does."""

    made = []

    def __init__(self):
        self.calls, self.replays = [], 0
        PretendedGraph.made.append(self)

    def replay(self):
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            outs, news = ((out, again) if isinstance(out, (tuple, list)) else ((out,), (again,)))
            for old, new in zip(outs, news):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def reset(self):
        PretendedGraph.made.remove(self)


class PretendedCuda(device.Cuda):
    """The class under test, with its tensors on the CPU."""

    kind = where = "cpu"
    matrix, read_bytes, ballast_bytes = 64, 1 << 20, 4096

    def key(self):
        return "cpu"


@contextlib.contextmanager
def pretended_graph(graph, stream, capture_error_mode):
    assert capture_error_mode in ("global", "thread_local", "relaxed") and stream is not None
    with Recorder(graph):
        yield


def pretended_ms(_):
    """Half a millisecond for eight forwards, a tenth for separators alone."""
    made = PretendedGraph.made
    return 0.1 if made and made[-1].replays and len(made[-1].calls) == FORWARDS else 0.5


def pretend():
    """torch.cuda as far as measure/device.py uses it; a name that it has not fails the test."""
    event = mock.Mock(record=mock.Mock(), synchronize=mock.Mock(),
                      elapsed_time=mock.Mock(side_effect=pretended_ms))
    names = {
        "current_device": lambda: 0, "Stream": mock.Mock(), "set_stream": mock.Mock(),
        "Event": mock.Mock(return_value=event), "synchronize": mock.Mock(),
        "empty_cache": mock.Mock(), "CUDAGraph": PretendedGraph, "graph": pretended_graph,
        "get_device_name": lambda: "pretended",
        "get_device_properties": lambda _: types.SimpleNamespace(multi_processor_count=132,
                                                                 uuid="1-2"),
        "mem_get_info": lambda _: (8 << 30, 9 << 30),
        "current_stream": lambda: types.SimpleNamespace(cuda_stream=None)}
    for name in names:
        assert hasattr(torch.cuda, name), name
    patches = contextlib.ExitStack()
    patches.enter_context(mock.patch.multiple(torch.cuda, **names))
    patches.enter_context(mock.patch("torch.cuda.nvtx.range",
                                     side_effect=lambda name: contextlib.nullcontext()))
    return patches


class Emulated(device.Cpu):
    """A GPU whose memory is RAM, of a library on the emulated one."""

    kind, middle = "emulated", device.Cuda.middle

    def key(self):
        return "sm_90"


@contextlib.contextmanager
def emulated():
    """Where such a library is loaded: torch's own runtime of CUDA must not stand in for its."""
    with mock.patch("os.RTLD_LOCAL", os.RTLD_LOCAL | os.RTLD_DEEPBIND), \
            mock.patch.dict(moxie.DLPACK, emulated=abi.DEVICE_CUDA):
        yield
