"""Moxie, through its package for Python: everything from (x, ids, weights) to y."""

import ctypes

import torch

from measure.case import FORWARDS
from moxie import Experts, MoxieError, Rows, abi, load, matrix, tensor
from moxie.host import default_path
from peers import System

FORMATS = {"bf16": "bf16", "fp8": "fp8_block128"}  # what Moxie calls the weights' format
STORED = {"bf16": "bf16", "fp8": "e4m3"}  # and one of them
DLPACK = {"cpu": abi.DEVICE_CPU, "cuda": abi.DEVICE_CUDA}


class Allocator:
    """The planned buffers from torch, so that they count in its statistics."""

    def __init__(self, where):
        self.where, self.held = where, {}

    def allocate(self, kind, size, align):
        memory = torch.empty(size + align, dtype=torch.uint8, pin_memory=kind == abi.MEMORY_PINNED,
                             device=self.where if kind == abi.MEMORY_DEVICE else "cpu")
        address = -(-memory.data_ptr() // align) * align
        self.held[address] = memory
        return address

    def release(self, address):
        del self.held[address]


class Moxie(System):
    name, option = "moxie", "--plugin"

    def has_to_be_there(self):
        return True

    def given(self):
        return self.options.plugin

    def available(self):
        try:
            self.library = load(self.given() or default_path(), "moxie bench",
                                f"name a libmoxie.so with {self.option}")
        except MoxieError as error:
            return str(error)
        self.version = self.library.source_id
        return None

    def prepare(self, case):
        super().prepare(case)
        sizes, weights = case.sizes, FORMATS[case.number]
        where = (DLPACK[self.device.kind], case.where.index or 0)
        config = {
            "hidden_size": sizes.hidden, "intermediate_size": sizes.intermediate,
            "num_experts": sizes.experts, "top_k": sizes.top_k, "num_layers": case.sets,
            "forward_tokens_max": case.tokens, "weight_format": weights,
            "input_format": case.row_number, "output_format": case.row_number,
            "device": self.device.key()}
        if case.number == "fp8":
            config["activation_format"] = "fp8"  # the CPU would choose f32
        if self.device.kind == "cpu":
            config["cpu_threads"] = torch.get_num_threads()
        self.experts = Experts(self.library, config, "bench", Allocator(case.where), where)

        def place(each, number):
            return tensor(each.data_ptr(), each.shape, number, each.stride(), where)

        def describe(values, scales, order):
            return matrix(place(values, STORED[case.number]), weights, order,
                          scales=None if scales is None else place(scales, "f32"))

        self.layers = [self.experts.add_layer(describe(w1, s1, abi.ORDER_GATE_UP),
                                              describe(w2, s2, abi.ORDER_PLAIN))
                       for w1, s1, w2, s2 in zip(case.w1, case.s1, case.w2, case.s2)]
        self.calls = [self._arguments(forward) for forward in range(FORWARDS)]

    def _arguments(self, forward):
        case = self.case

        def rows(each, name):
            return Rows(each.data_ptr(), each.stride(0), name)

        y = case.y[forward]
        return (self.layers[forward % case.sets], y,
                (case.tokens, rows(case.x[forward], case.row_number),
                 rows(case.ids[forward], "i32"), rows(case.router[forward], "f32"),
                 rows(y, case.row_number)))

    def run(self, forward):
        layer, y, arguments = self.calls[forward]
        layer.forward(*arguments, self.device.stream_handle())
        return y

    def host_call(self):
        """The library's own forward, with what the last run() of forward 0 filled in."""
        self.run(0)
        experts, layer = self.experts, self.calls[0][0]
        slot, arguments = experts.instance.api.forward, (
            experts.dispatcher, layer.handle, ctypes.byref(experts.batch),
            ctypes.byref(experts.error))
        if slot(*arguments) != abi.OK:
            raise RuntimeError(experts.error_text.value.decode(errors="replace"))
        return lambda: slot(*arguments)

    def release(self):
        self.calls, self.layers, self.experts = [], [], None
        super().release()


class Other(Moxie):
    """Another build beside it: on the same draws and card they differ by what the code does."""

    name, option = "moxie_other", "--other-plugin"

    def has_to_be_there(self):
        return bool(self.given())

    def given(self):
        return self.options.other_plugin

    def available(self):
        return super().available() if self.given() else f"another build; {self.option} PATH"
