"""What depends on the device: graphs, times, separators, anchors. Cuda, and Cpu as its twin.

Both have the same functions, so that what is measured runs, in small, on a machine without a GPU.
A forward is a call without arguments that enqueues work and returns the tensor it writes.
"""

import contextlib
import gc
import time

import torch

from measure.case import DTYPES, ROWS
from measure.cells import NUMBERS

ANCHOR_BATCH, ANCHOR_TIMES = 8, 9


def _median(values):
    return sorted(values)[len(values) // 2]


class Replay:
    """A captured row of forwards; outputs are what they write."""

    def __init__(self, replay, outputs, reset):
        self.replay, self.outputs, self._reset = replay, outputs, reset

    def poison(self):
        """Makes every number of the outputs a NaN, in one kernel."""
        torch._foreach_add_(self.outputs, float("nan"))

    def reset(self):
        """Gives the memory back; before what the graph uses goes away."""
        self._reset()
        self.replay, self.outputs = None, []


class Cuda:
    """Everything on one stream of its own, which is also the one that is captured."""

    kind, where = "cuda", "cuda"
    middle = torch.bfloat16  # what is between activation and quantising: what all systems write
    matrix, read_bytes = 8192, 4 << 30  # of the anchors
    ballast_bytes = 1 << 30  # a quarter of a millisecond of reading

    def __init__(self):
        self.torch_device = torch.device(self.where, torch.cuda.current_device())
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        self.before, self.after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.bell = torch.zeros(1, dtype=torch.int32, device=self.torch_device)
        self.ballast = torch.zeros(self.ballast_bytes // 4, dtype=torch.float32,
                                   device=self.torch_device)
        self.total = torch.zeros((), dtype=torch.float32, device=self.torch_device)

    def describe(self):
        return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda,
                "sms": torch.cuda.get_device_properties(self.torch_device).multi_processor_count}

    def gpu(self):
        """What nvidia-smi calls it."""
        text = str(torch.cuda.get_device_properties(self.torch_device).uuid)
        return text if text.startswith("GPU-") else "GPU-" + text

    def key(self):
        """What Moxie's configuration calls it."""
        return "sm_%d%d" % torch.cuda.get_device_capability(self.torch_device)

    def free_bytes(self):
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def stream_handle(self):
        return torch.cuda.current_stream().cuda_stream

    def synchronise(self):
        torch.cuda.synchronize()

    def collect(self):
        """Gives back what nobody holds; graphs want their memory from the driver."""
        gc.collect()
        torch.cuda.empty_cache()

    def range(self, name):
        return torch.cuda.nvtx.range(name)

    def separate(self):
        """A plain kernel, which no forward can begin before the end of."""
        self.bell.add_(1)

    def _occupy(self):
        """Keeps the GPU busy until the host has enqueued what is timed next; reads only."""
        torch.sum(self.ballast, dim=0, out=self.total)

    def capture(self, forwards):
        """All forwards, a separator before each, as one graph whose memory is a pool of its own."""
        for _ in range(2):  # the first call of anything may load, compile or choose it
            for forward in forwards:
                forward()
        self.separate()
        self.synchronise()
        outputs, graph = [], torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            for forward in forwards:
                self.separate()
                outputs.append(forward())
        return Replay(graph.replay, [each for each in outputs if each is not None], graph.reset)

    def _timed(self, replay, name):
        with self.range(name):
            self.before.record()
            replay()
            self.after.record()
        self.after.synchronize()
        return 1e3 * self.before.elapsed_time(self.after)

    def time(self, replay, name):
        """Microseconds of a replay; one before it keeps the GPU busy and the caches as usual."""
        replay.replay()
        replay.poison()
        return self._timed(replay.replay, name)

    def separators(self, count, times):
        """Microseconds that `count` separators take in a graph of nothing else."""
        alone = self.capture([lambda: None] * count)
        found = []
        for _ in range(times):
            self._occupy()
            found.append(self._timed(alone.replay, "separators"))
        alone.reset()
        return _median(found)

    def anchor(self, body, seconds):
        """Microseconds of a body after a while of nothing else: the median of a few batches."""
        def batch():
            for _ in range(ANCHOR_BATCH):
                body()

        end = time.monotonic() + seconds
        while time.monotonic() < end:
            batch()
            self.synchronise()
        found = [self._timed(batch, "anchor") for _ in range(ANCHOR_TIMES)]
        return _median(found) / ANCHOR_BATCH


class Cpu:
    """The clock on the wall instead of events, calls instead of graphs, nothing to separate."""

    kind = "cpu"
    middle = torch.float32  # Moxie's kernels keep it
    matrix, read_bytes = 512, 64 << 20

    def __init__(self):
        self.torch_device = torch.device("cpu")

    def describe(self):
        return {"gpu": None, "cuda": None, "threads": torch.get_num_threads()}

    def gpu(self):
        return None

    def key(self):
        return "cpu"

    def free_bytes(self):
        return 4 << 30

    def stream_handle(self):
        return None

    def synchronise(self):
        pass

    def collect(self):
        gc.collect()

    def range(self, name):
        return contextlib.nullcontext()

    def capture(self, forwards):
        outputs = [forward() for forward in forwards]

        def replay():
            # A peer may return another tensor at each call.
            outputs[:] = [forward() for forward in forwards]
        return Replay(replay, outputs, lambda: None)

    def _timed(self, replay, name):
        start = time.perf_counter()
        replay()
        return 1e6 * (time.perf_counter() - start)

    def time(self, replay, name):
        replay.poison()
        return self._timed(replay.replay, name)

    def separators(self, count, times):
        return 0.0

    def anchor(self, body, seconds):
        body()
        return _median([self._timed(body, "anchor") for _ in range(ANCHOR_TIMES)])


DEVICES = {"cuda": Cuda, "cpu": Cpu}


def _random(device, shape, dtype):
    generator = torch.Generator(device.torch_device).manual_seed(1)
    made = torch.empty(shape, dtype=dtype, device=device.torch_device)
    return made.normal_(generator=generator)


def _product_us(device, number, seconds):
    a, b = (_random(device, (device.matrix, device.matrix), DTYPES[ROWS[number]])
            for _ in range(2))
    c = torch.empty_like(a)
    if number != "fp8":
        return device.anchor(lambda: torch.mm(a, b, out=c), seconds)
    # One scale for a matrix, and sums as the tensor cores keep them: no product of fp8 is faster.
    one = torch.ones((), dtype=torch.float32, device=device.torch_device)
    a, b = a.to(DTYPES[number]), b.to(DTYPES[number]).t()
    return device.anchor(lambda: torch._scaled_mm(a, b, one, one, out_dtype=c.dtype,
                                                  use_fast_accum=True), seconds)


def _read_us(device, seconds):
    rows = _random(device, (8192, device.read_bytes // 4 // 8192), torch.float32)
    sums = torch.empty(8192, dtype=torch.float32, device=device.torch_device)
    return device.anchor(lambda: torch.sum(rows, dim=1, out=sums), seconds)


def anchors(device, number, seconds):
    """What the machine does at this moment: {anchor: FLOP/s or bytes/s}, on random data. Products
    are of what the format's rows are, and of what it multiplies.

    Its memory is given back, so that nothing of it is held while cells are measured.
    """
    found = {}
    for each in dict.fromkeys((ROWS[number], NUMBERS[number].multiplied)):
        product_us = _product_us(device, each, seconds)
        found[f"{each}_product_flops_per_s"] = 2e6 * device.matrix ** 3 / product_us
        device.collect()
    found["read_bytes_per_s"] = 1e6 * device.read_bytes / _read_us(device, seconds)
    device.collect()
    return found
