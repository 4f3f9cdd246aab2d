"""Layers of random sizes, formats, orders, strides and routing through the ABI, against sums in
double: forward() of one rank, and run() of rows from several.

Wants torch. MOXIE_PLUGIN is a library on CPUs, or with the emulated GPU, which is then preloaded, so
that its functions are called and not those of torch's CUDA; with MOXIE_TEST_DEVICE=cuda it runs on
a GPU, and each forward is also captured and replayed with other rows. MOXIE_TEST_SEEDS=FROM-TO
takes other seeds than those of CI, and what fails says its own.
"""

import contextlib
import ctypes
import functools
import gc
import importlib.util
import math
import os
import pathlib
import random
import sys
import unittest

import torch_python

torch_python.require(importlib.util.find_spec("torch"), "torch is")

import torch  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "hosts" / "python"))
from experts_case import DEVICE, GATES, coded, swiglu  # noqa: E402
from moxie import abi, host  # noqa: E402

# A library of the emulated GPU has tensors that torch calls a CPU's.
EMULATED = "emulated" in os.environ.get("MOXIE_PLUGIN", "")
if DEVICE.type == "cuda" and not torch.cuda.is_available():
    torch_python.skip("torch sees no GPU")
ON_GPU = EMULATED or DEVICE.type == "cuda"
GRAPHS = DEVICE.type == "cuda"
PLACE = abi.Device(type=2 if ON_GPU else 1)
SEEDS = os.environ.get("MOXIE_TEST_SEEDS", "0-60" if EMULATED else "0-150")
FIRST, END = map(int, SEEDS.split("-"))

CODES = {torch.float32: (2, 32), torch.bfloat16: (4, 16), torch.float16: (2, 16),
         torch.float8_e4m3fn: (10, 8), torch.uint8: (1, 8), torch.int32: (0, 32),
         torch.int64: (0, 64)}
FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
FORMATS = {"f32": 1, "bf16": 2, "f16": 3, "fp8_tensor": 4, "fp8_channel": 5, "fp8_block128": 6,
           "int4_g32": 7, "mxfp4": 8, "nvfp4": 9}
E2M1 = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=DEVICE)
E2M1 = torch.cat((E2M1, -E2M1))
# Of a row's sums, relative to what its experts give: what outputs and products are rounded to.
BOUNDS = {"f32": 5e-5, "bf16": 8e-3, "f16": 1e-3}
# On a GPU, whose mid and results of one expert are rounded; in fp8, where mid may come to another
# code than here, all rows together are off by less than one may be.
BOUND_16_BITS, BOUND_FP8, BOUND_FP8_ALL = 2e-2, 0.2, 6e-2


ALIVE = []  # what the library has the addresses of, until the next seed


def tensor(value):
    """As the ABI has it."""
    if value is None:
        return abi.Tensor()
    code, bits = CODES[value.dtype]
    extents = ctypes.c_int64 * value.dim()
    found = abi.Tensor(data=value.data_ptr() or None, device=PLACE, ndim=value.dim(),
                       dtype=abi.Dtype(code=code, bits=bits, lanes=1),
                       shape=extents(*value.shape), strides=extents(*value.stride()))
    ALIVE.append(value)
    return found


class Chance:
    """What a seed gives."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.generator = torch.Generator(DEVICE).manual_seed(seed)

    def one_of(self, *choices):
        return self.draw.choice(choices)

    def happens(self, share):
        return self.draw.random() < share

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator, device=DEVICE)

    def uniform(self, *shape):
        return torch.rand(*shape, generator=self.generator, device=DEVICE)

    def integers(self, low, high, *shape):
        return torch.randint(low, high, shape, generator=self.generator, device=DEVICE)

    def spread(self, value, columns=8):
        """The same in an array of its own, perhaps with others' columns behind each row."""
        if value.dim() < 2 or self.happens(0.5):
            return value.contiguous()
        wide = torch.zeros(*value.shape[:-1], value.shape[-1] + columns, device=DEVICE)
        wide = wide.to(value.dtype)
        view = wide[..., :value.shape[-1]]
        view.copy_(value)
        return view


def gate_rows(rows, order):
    """Which of w1's are gate's."""
    row = torch.arange(rows, device=DEVICE)
    return {abi.ORDER_GATE_UP: row < rows // 2, abi.ORDER_UP_GATE: row >= rows // 2,
            abi.ORDER_INTERLEAVED: row % 2 == 0}[order]


class Matrix:
    """Weights of [E, N, K] in a format, and in double. order: of w1's rows, or ORDER_PLAIN. first:
    block_offset, of rows of w1 and of columns of w2."""

    def __init__(self, chance, name, shape, order, is_w1, first):
        self.name, self.shape, self.order, self.is_w1, self.first = name, shape, order, is_w1, first
        self.size = shape[2] ** -0.5  # so that sums are about 1
        self.scales = self.global_scales = self.bias = None
        self.rows_in = name in FLOATS and chance.happens(0.3)
        self.offset = torch.zeros(shape[:2], dtype=torch.float64, device=DEVICE)
        if chance.happens(0.4):
            self.bias = chance.normal(*shape[:2]).to(chance.one_of(*FLOATS.values()))
            self.offset = self.bias.double()
        if name in FLOATS:
            self.values = (chance.normal(*shape) * self.size).to(FLOATS[name])
            self.dense = self.values.double()
        elif name.startswith("fp8"):
            self.values = (chance.normal(*shape) * 4).to(torch.float8_e4m3fn)
            self.dense = self.values.double() * getattr(self, name)(chance)
        else:
            nibbles = chance.integers(0, 16, *shape)
            self.values = (nibbles[..., ::2] | nibbles[..., 1::2] << 4).to(torch.uint8)
            numbers = nibbles.double() - 8 if name == "int4_g32" else E2M1[nibbles]
            self.dense = numbers * getattr(self, name)(chance)

    def halves(self):
        """Of each row the half of w1 that it is of, as scales lie, and its number there."""
        row = torch.arange(self.shape[1], device=DEVICE)
        if self.order == abi.ORDER_PLAIN:
            return torch.zeros_like(row), row
        if self.order == abi.ORDER_INTERLEAVED:
            return row % 2, row // 2
        return row // (len(row) // 2), row % (len(row) // 2)

    def positive(self, chance, *shape):
        return (chance.uniform(*shape) + 0.5) * self.size / 4

    def whole(self, chance, scales):
        """[E], or [E, 2] of gate, then up; for each row."""
        if scales.dim() == 1:
            return scales.double()[:, None, None]
        return scales.double()[:, (~gate_rows(self.shape[1], self.order)).long()][..., None]

    def of_experts(self, chance):
        two = self.order != abi.ORDER_PLAIN and chance.happens(0.5)
        return self.positive(chance, self.shape[0], *((2,) if two else ()))

    def fp8_tensor(self, chance):
        self.scales = self.of_experts(chance)
        return self.whole(chance, self.scales)

    def fp8_channel(self, chance):
        self.scales = self.positive(chance, *self.shape[:2])
        return self.scales.double()[..., None]

    def fp8_block128(self, chance):
        half, unit = self.halves()
        unit = (unit + (self.first if self.is_w1 else 0)) // 128
        row = half * (int(unit.max()) + 1) + unit
        column = torch.arange(self.shape[2], device=DEVICE)
        column = (column + (0 if self.is_w1 else self.first)) // 128
        self.scales = self.positive(chance, self.shape[0], int(row.max()) + 1, int(column.max()) + 1)
        return self.scales.double()[:, row][:, :, column]

    def int4_g32(self, chance):
        self.scales = self.positive(chance, *self.shape[:2], self.shape[2] // 32).to(
            chance.one_of(*FLOATS.values()))
        return self.scales.double().repeat_interleave(32, 2)

    def mxfp4(self, chance):
        least = 125 + round(math.log2(self.size / 3))
        self.scales = chance.integers(least, least + 3, *self.shape[:2], self.shape[2] // 32).to(
            torch.uint8)
        return torch.exp2(self.scales.double() - 127).repeat_interleave(32, 2)

    def nvfp4(self, chance):
        codes = chance.uniform(*self.shape[:2], self.shape[2] // 16) * 4 + 1
        codes = codes.to(torch.float8_e4m3fn)
        self.scales, self.global_scales = codes.view(torch.uint8), self.of_experts(chance) / 3
        return codes.double().repeat_interleave(16, 2) * self.whole(chance, self.global_scales)

    def of(self, chance, first, end):
        """Those experts, for the ABI."""
        values = self.values[first:end]
        parts = {"values": values.transpose(1, 2) if self.rows_in else values, "bias": self.bias,
                 "scales": self.scales, "global_scales": self.global_scales}
        parts = {key: value if value is None or key == "values" else value[first:end]
                 for key, value in parts.items()}
        return abi.Matrix(
            format=FORMATS[self.name], order=self.order, orientation=int(self.rows_in),
            block_offset=self.first,
            **{key: tensor(value if value is None else chance.spread(value, 16))
               for key, value in parts.items()})


class Layer:
    """Of a seed: a configuration, weights, and what they give of rows."""

    def __init__(self, seed):
        chance = self.chance = Chance(seed)
        name = chance.one_of("bf16", "f16", "fp8_tensor", "fp8_channel", "fp8_block128",
                             "int4_g32", "mxfp4", "nvfp4", *(() if ON_GPU else ("f32",)))
        self.is_fp8 = ON_GPU and name.startswith("fp8")
        packed = name in ("int4_g32", "mxfp4", "nvfp4")
        step = 32 if packed and (ON_GPU or name != "nvfp4") else 16 if packed or self.is_fp8 else (
            8 if ON_GPU else 1)
        sizes = [max(step, each // step * step) for each in (1, 31, 64, 72, 130, 144, 257, 300, 520)]
        hidden, inner = chance.one_of(*sizes[1:]), chance.one_of(*sizes)  # one number may be near 0
        activation = chance.one_of(*GATES, "swigluoai", "relu2")
        gated = activation != "relu2"
        top_k, experts = chance.one_of(1, 2, 3, 8), chance.one_of(1, 3, 8, 40)
        rows_format = (name if ON_GPU else chance.one_of(*FLOATS)) if name in FLOATS else (
            "bf16" if ON_GPU else chance.one_of(*FLOATS))
        self.config = {
            "hidden_size": hidden, "intermediate_size": inner, "num_experts": experts,
            "top_k": top_k, "activation": activation, "weight_format": name, "input_format": rows_format,
            "output_format": rows_format if ON_GPU else chance.one_of("bf16", "f32"),
            "forward_tokens_max": chance.one_of(1, 3, 16, 40, 200), "count_expert_load": 1,
            "device": "sm_90" if ON_GPU else "cpu", "cpu_threads": chance.one_of(1, 2),
            "routed_scaling_factor": chance.one_of(1.0, 2.5),
            "apply_router_weight_on_input": int(top_k == 1 and chance.happens(0.5))}
        if activation == "swigluoai":
            self.config.update(activation_limit=chance.one_of(0.0, 0.5, 7.0), activation_beta=1.0,
                               activation_alpha=1.702 if seed % 3 else 3e38)  # or a step, at 0
        first = chance.one_of(0, 0, 64) if name == "fp8_block128" and not ON_GPU else 0
        order = chance.one_of(1, 2, 3) if gated else abi.ORDER_PLAIN
        self.w1 = Matrix(chance, name, (experts, inner * (1 + gated), hidden), order, True, first)
        self.w2 = Matrix(chance, name, (experts, hidden, inner), abi.ORDER_PLAIN, False, first)
        if ON_GPU:
            self.w2.rows_in = self.w1.rows_in  # as it wants both
        self.bound = BOUNDS[self.config["output_format"]]
        if ON_GPU:
            self.bound = BOUND_FP8 if self.is_fp8 else BOUND_16_BITS

    def between(self, both):
        """Of w1's sums."""
        if self.w1.order == abi.ORDER_PLAIN:
            return torch.relu(both) ** 2
        is_gate = gate_rows(both.shape[1], self.w1.order)
        gate, up = both[:, is_gate], both[:, ~is_gate]
        if self.config["activation"] != "swigluoai":
            return GATES[self.config["activation"]](gate, up)
        alpha, beta, limit = (self.config[f"activation_{each}"]
                              for each in ("alpha", "beta", "limit"))
        return swiglu(alpha, beta, limit or math.inf)(gate, up)

    def of(self, expert, rows, weights):
        """What an expert gives of rows [n, H] in double, weighted."""
        on_input = self.config["apply_router_weight_on_input"]
        def multiplied(rows):
            return coded(rows.float()).double() if self.is_fp8 else rows
        both = multiplied(rows) @ self.w1.dense[expert].T
        both = both * (weights[:, None] if on_input else 1) + self.w1.offset[expert]
        out = multiplied(self.between(both)) @ self.w2.dense[expert].T + self.w2.offset[expert]
        return out * self.config["routed_scaling_factor"] * (1 if on_input else weights[:, None])

    def sums(self, x, ids, weights):
        """(y, how large what it is the sum of is, row by row) for physical ids [T, k]."""
        y = torch.zeros(len(x), self.config["hidden_size"], dtype=torch.float64, device=DEVICE)
        large = torch.zeros(len(x), dtype=torch.float64, device=DEVICE)
        for expert in range(self.config["num_experts"]):
            row, slot = (ids == expert).nonzero(as_tuple=True)
            if len(row):
                out = self.of(expert, x[row].double(), weights[row, slot].double())
                y.index_add_(0, row, out)
                large.index_add_(0, row, out.norm(dim=1) ** 2)
        return y, large.sqrt()


@functools.cache
def library():
    return host.load()


class Refused(Exception):
    """The library does not do this, and said why."""


class Opened:
    """An instance of a configuration, and the runner of one layer on it."""

    def __init__(self, layer, **more):
        self.config = {**layer.config, **more}
        ranks = self.config.get("ep_size", 1)
        self.instance = library().open(self.config, all_gather=bytes if ranks > 1 else None)  # not called
        self.runner, self.dispatcher = ctypes.c_void_p(), ctypes.c_void_p()
        try:
            self.create(layer)
        except BaseException:
            self.close()
            raise

    def create(self, layer):
        if self.instance.reasons():
            raise Refused(self.instance.reasons())
        plan = abi.type_of("*plan")()
        abi.check(self.instance.api.plan, self.instance.handle, ctypes.byref(plan))
        bounds = plan.contents.bounds.contents
        self.first, self.local = bounds.expert_first, bounds.experts_local
        self.runs, = [info.api.contents for info in self.instance.runners.values()
                      if info.name.decode() == ("moxie_cuda" if ON_GPU else "moxie_cpu")]
        w1, w2 = (each.of(layer.chance, self.first, self.first + self.local)
                  for each in (layer.w1, layer.w2))
        weights = abi.Weights(w1=ctypes.pointer(w1), w2=ctypes.pointer(w2))
        self.instance.check(self.runs.create, self.instance.handle, 0, ctypes.byref(weights),
                            ctypes.byref(self.runner))

    def dispatch(self):
        self.moves = self.instance.dispatchers["local"].api.contents
        self.instance.check(self.moves.create, self.instance.handle, ctypes.byref(self.dispatcher))

    def close(self):
        if self.runner:
            self.runs.destroy(self.runner)
        if self.dispatcher:
            self.moves.destroy(self.dispatcher)
        self.instance.close()


def stream():
    return torch.cuda.current_stream().cuda_stream if GRAPHS else None


def waited():
    """Behind this what was launched has ended."""
    if GRAPHS:
        torch.cuda.synchronize()
    elif EMULATED:
        emulator = ctypes.CDLL(os.environ["MOXIE_PLUGIN"])
        emulator.cudaDeviceSynchronize()


class Rows:
    """Rows and their routing, for forward() or a slab. experts: ids, or entries of a map."""

    def __init__(self, layer, tokens, experts):
        chance = self.chance = layer.chance
        self.layer, self.tokens, self.experts = layer, tokens, experts
        self.dtype = FLOATS[layer.config["input_format"]]
        self.kinds = chance.one_of(torch.int32, torch.int64), chance.one_of(*FLOATS.values())
        self.x, self.ids, self.weights = map(chance.spread, self.drawn())
        out = torch.full((tokens, layer.config["hidden_size"]), math.nan, device=DEVICE)
        self.y = chance.spread(out.to(FLOATS[layer.config["output_format"]]))

    def drawn(self):
        top_k = self.layer.config["top_k"]
        x = self.chance.normal(self.tokens, self.layer.config["hidden_size"]).to(self.dtype)
        x[:1] = 0
        return (x,
                self.chance.integers(-1, self.experts + 1, self.tokens, top_k).to(self.kinds[0]),
                (self.chance.uniform(self.tokens, top_k) * 0.9 + 0.1).to(self.kinds[1]))

    def redraw(self):
        """Others, where these lie."""
        for old, new in zip((self.x, self.ids, self.weights), self.drawn()):
            old.copy_(new)
        self.y.fill_(math.nan)


class RandomLayers(unittest.TestCase):
    def each(self, test, least=0.9):
        """test(layer) of each seed; most have to be done and not refused."""
        done = 0
        for seed in range(FIRST, END):
            with self.subTest(seed=seed, plugin=os.environ.get("MOXIE_PLUGIN")):
                ALIVE.clear()
                layer = Layer(seed)
                with contextlib.suppress(Refused):
                    test(layer)
                    done += 1
        self.assertGreaterEqual(done, least * (END - FIRST))

    def compare(self, layer, got, want, large):
        off = (got.double() - want).norm(dim=1)
        wrong = ~(off <= layer.bound * large)  # NaN is wrong, too
        rows, much = wrong.nonzero().flatten().tolist(), (off / large)[wrong].tolist()
        self.assertEqual(rows, [], f"of {len(got)} rows these are {much[:8]} off: {layer.config}")
        if layer.is_fp8 and len(got) >= 8:
            self.assertLessEqual(off.norm(), BOUND_FP8_ALL * large.norm(), layer.config)

    def forward(self, layer, opened):
        chance, api = layer.chance, opened.instance.api
        mapped = layer.chance.happens(0.3)
        experts = layer.config["num_experts"]
        expert_map = chance.integers(-1, experts + 1, 6).int() if mapped else None
        tokens = chance.one_of(0, 1, 2, layer.config["forward_tokens_max"])
        rows = Rows(layer, min(tokens, layer.config["forward_tokens_max"]), 6 if mapped else experts)
        valid = chance.integers(-1, rows.tokens + 2, 1).int() if chance.happens(0.3) else None
        step = abi.Step(tokens=rows.tokens)
        if valid is not None:
            step.tokens_valid = ctypes.cast(valid.data_ptr(), abi.type_of("*i32"))
        opened.instance.check(opened.moves.begin_forward, opened.dispatcher, ctypes.byref(step))

        def call():
            batch = abi.Batch(
                id_space=chance.one_of(1, 2, 3), x=tensor(rows.x), ids=tensor(rows.ids),
                weights=tensor(rows.weights), y=tensor(rows.y), stream=stream(),
                expert_map=tensor(expert_map))
            opened.instance.check(api.forward, opened.dispatcher, opened.runner, ctypes.byref(batch))

        def look():
            waited()
            ids = rows.ids.long()
            if mapped:
                inside = (ids >= 0) & (ids < 6)
                ids = torch.where(inside, expert_map.long()[ids.clamp(0, 5)], -1)
            if valid is not None:
                ids = ids.clone()
                ids[max(0, int(valid)):] = -1
            self.compare(layer, rows.y, *layer.sums(rows.x, ids, rows.weights))

        call()
        look()
        if GRAPHS:
            graph = torch.cuda.CUDAGraph()
            gc.collect()
            gc.disable()  # what it frees of earlier seeds ends a capture
            with torch.cuda.graph(graph):
                call()
            gc.enable()
            for _ in range(2):
                rows.redraw()
                graph.replay()
                look()

    def test_forward(self):
        def test(layer):
            with contextlib.closing(Opened(layer)) as opened:
                opened.dispatch()
                self.forward(layer, opened)
        self.each(test)

    def received(self, layer, opened, ranks):
        chance = layer.chance
        most = layer.config["forward_tokens_max"]
        parts = [Rows(layer, chance.one_of(0, 1, most), layer.config["num_experts"])
                 for _ in range(chance.one_of(1, ranks))]
        counts = torch.tensor([chance.one_of(each.tokens, chance.draw.randint(-1, each.tokens + 1))
                               for each in parts], dtype=torch.int32, device=DEVICE)
        ins = (abi.Slab * len(parts))(*[
            abi.Slab(rows=tensor(each.x), ids=tensor(each.ids), weights=tensor(each.weights))
            for each in parts])
        outs = (abi.Slab * len(parts))(*[abi.Slab(rows=tensor(each.y)) for each in parts])
        given, taken = (abi.Rows(layout=abi.LAYOUT_RANK_MAJOR, id_space=abi.IDS_PHYSICAL,
                                 slabs_count=len(parts), slab_stride=ctypes.sizeof(abi.Slab),
                                 slabs=slabs, counts=tensor(counts)) for slabs in (ins, outs))
        call = abi.Call(stream=stream())
        opened.instance.check(opened.runs.run, opened.runner, ctypes.byref(call),
                              ctypes.byref(given), ctypes.byref(taken))
        waited()
        for rows, count in zip(parts, counts.clamp_min(0).tolist()):
            ids = rows.ids.long()
            here = (ids >= opened.first) & (ids < opened.first + opened.local)
            want, large = layer.sums(rows.x, torch.where(here, ids, -1), rows.weights)
            self.compare(layer, rows.y[:count], want[:count], large[:count])
            self.assertTrue(rows.y[count:].isnan().all(), "rows past the count were written")

    def test_received_rows(self):
        def test(layer):
            ranks = layer.chance.one_of(2, 3)
            more = {"dispatcher": "allgather", "tp_size": ranks, "dp_size": ranks, "ep_size": ranks,
                    "ep_rank": layer.chance.draw.randrange(ranks)}
            with contextlib.closing(Opened(layer, **more)) as opened:
                self.received(layer, opened, ranks)
        self.each(test)


if __name__ == "__main__":
    unittest.main()
