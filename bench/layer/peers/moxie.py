"""Moxie, through its package for Python: everything from (x, ids, weights) to y."""

import ctypes

import torch

from measure.case import FORWARDS
from measure.cells import NUMBERS
from moxie import Experts, MoxieError, Rows, abi, load, matrix, tensor
from moxie.host import default_path
from peers import System

# What Moxie calls the weights' format where it has another name for it, one of them as it is stored
# where that is not two to a byte, and one of their scales.
FORMATS = {"fp8": "fp8_block128"}
STORED = {"bf16": "bf16", "fp8": "e4m3"}
SCALES = {"fp8": "f32", "mxfp4": "u8", "nvfp4": "e4m3", "int4_g32": "bf16"}
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
        sizes, weights = case.sizes, FORMATS.get(case.number, case.number)
        where = (DLPACK[self.device.kind], case.where.index or 0)
        config = {
            "hidden_size": sizes.hidden, "intermediate_size": sizes.intermediate,
            "num_experts": sizes.experts, "top_k": sizes.top_k, "num_layers": case.sets,
            "forward_tokens_max": case.tokens, "weight_format": weights,
            "input_format": case.row_number, "output_format": case.row_number,
            "device": self.device.key()}
        if case.number != case.row_number:  # of which the CPU would make f32
            config["activation_format"] = NUMBERS[case.number].multiplied
        if self.device.kind == "cpu":
            config["cpu_threads"] = torch.get_num_threads()
        self.experts = Experts(self.library, config, "bench", Allocator(case.where), where)

        def place(each, number):
            return None if each is None else tensor(each.data_ptr(), each.shape, number,
                                                    each.stride(), where)

        def describe(order, values, scales, global_scales):
            return matrix(place(values, STORED.get(case.number, "u8")), weights, order,
                          scales=place(scales, SCALES.get(case.number)),
                          global_scales=place(global_scales, "f32"))

        self.layers = [self.experts.add_layer(describe(abi.ORDER_GATE_UP, *first),
                                              describe(abi.ORDER_PLAIN, *second))
                       for first, second in zip(zip(case.w1, case.s1, case.g1),
                                                zip(case.w2, case.s2, case.g2))]
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
