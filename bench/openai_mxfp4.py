#!/usr/bin/env python3
"""Microseconds of a gpt-oss layer by OpenAI's Triton kernels for mxfp4, which vLLM and transformers run it by on Hopper.

    bench/openai_mxfp4.py --triton-kernels vllm/third_party --tokens 1,16,64 --json

A layer goes from router logits to results: routing by their kernel, both products with SwiGLU in the
first, the weighted sum in the second. Eight layers with weights of their own, random codes and
logits, are one CUDA graph; a time is the median of its replays, divided by eight. Nothing is
compared: `moxie bench` and bench/layer say whether Moxie's results are right. Exit code 1: it
cannot run here; 2: usage.
"""

import argparse
import importlib
import pathlib
import statistics
import sys
from typing import Any, NamedTuple

sys.path[0] = str(pathlib.Path(__file__).resolve().parent / "layer")

from measure.command import CannotRun, at_least, counts, named_path, say, show  # noqa: E402

LAYERS, REPLAYS = 8, 25  # of a graph, and its replays
ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss' gate


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--triton-kernels", type=named_path, help="the folder in which the package "
                        "triton_kernels is, of the API that vLLM 0.26 has; default: where Python "
                        "looks")
    parser.add_argument("--hidden", type=at_least(32), default=2880, help="default: %(default)s")
    parser.add_argument("--intermediate", type=at_least(32), default=2880,
                        help="default: %(default)s")
    parser.add_argument("--experts", type=at_least(1), default=128, help="default: %(default)s")
    parser.add_argument("--top-k", type=at_least(1), default=4, help="default: %(default)s")
    parser.add_argument("--tokens", type=counts("tokens", 1), default="1,16,64,256,1024,4096",
                        help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser.parse_args(arguments)


class Kernels(NamedTuple):
    """The package's modules that are used."""

    matmul: Any
    numerics: Any
    routing: Any
    swiglu: Any
    tensor: Any
    layout: Any


def load(folder):
    """The package; CannotRun where it is missing, or another than vLLM 0.26's."""
    if folder:
        sys.path.insert(0, folder)
    try:
        named = {name: importlib.import_module(f"triton_kernels.{path}") for name, path in {
            "matmul": "matmul_ogs", "numerics": "numerics", "routing": "routing",
            "swiglu": "swiglu", "tensor": "tensor", "layout": "tensor_details.layout"}.items()}
        flags = importlib.import_module("triton_kernels.matmul_ogs_details.opt_flags")
    except ImportError as error:
        raise CannotRun(f"triton_kernels cannot be used: {error}; name the folder that has it with "
                        "--triton-kernels") from error
    flags.update_opt_flags_constraints({"split_k": 1})  # as vLLM does on Hopper
    return Kernels(**named)


def weights(kernels, torch, experts, rows, columns):
    """Random codes and scales of a projection, laid out as vLLM does, and how to read them."""
    codes = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(119, 122, (experts, rows, columns // 32), dtype=torch.uint8,
                           device="cuda")
    scales = torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4))
    tensor, layout = kernels.tensor, kernels.layout
    by, options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    codes = tensor.convert_layout(
        tensor.wrap_torch_tensor(codes.transpose(-2, -1), dtype=tensor.FP4), by, **options)
    by, options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
    scales = tensor.convert_layout(
        tensor.wrap_torch_tensor(scales.transpose(-2, -1)), by, **options)
    flex = kernels.matmul.FlexCtx(rhs_data=kernels.numerics.InFlexData())
    return codes, kernels.matmul.PrecisionConfig(weight_scale=scales, flex_ctx=flex)


class Layer:
    """The experts of one layer."""

    def __init__(self, kernels, torch, options):
        hidden, inner, experts = options.hidden, options.intermediate, options.experts
        self.kernels, self.top_k = kernels, options.top_k
        self.first = weights(kernels, torch, experts, 2 * inner, hidden)
        self.second = weights(kernels, torch, experts, hidden, inner)
        self.biases = [torch.randn(experts, n, device="cuda") for n in (2 * inner, hidden)]
        gate = kernels.matmul.FnSpecs("swiglu", kernels.swiglu.swiglu_fn, ("alpha", "limit"))
        self.gate = kernels.matmul.FusedActivation(gate, (ALPHA, LIMIT), 2)

    def route(self, logits):
        return self.kernels.routing.routing(logits, self.top_k, sm_first=False)

    def products(self, x, routed):
        data, gather, scatter = routed
        multiply = self.kernels.matmul.matmul_ogs
        mid = multiply(x, self.first[0], self.biases[0], data, gather_indx=gather,
                       precision_config=self.first[1], fused_activation=self.gate)
        return multiply(mid, self.second[0], self.biases[1], data, scatter_indx=scatter,
                        precision_config=self.second[1], gammas=data.gate_scal)


def time_graph(torch, calls):
    """Microseconds of a call, of all as one graph."""
    for _ in range(2):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    times = []
    for _ in range(REPLAYS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    del kept
    return round(statistics.median(times[1:]), 1)


def measure(options):
    import torch
    if not torch.cuda.is_available():
        raise CannotRun("torch sees no GPU")
    kernels, results = load(options.triton_kernels), []
    layers = [Layer(kernels, torch, options) for _ in range(LAYERS)]
    for tokens in options.tokens:
        say(f"{tokens} tokens")
        given = [(layer, torch.randn(tokens, options.hidden, device="cuda", dtype=torch.bfloat16),
                  torch.randn(tokens, options.experts, device="cuda", dtype=torch.bfloat16))
                 for layer in layers]
        whole = time_graph(torch, [lambda each=each: each[0].products(
            each[1], each[0].route(each[2])) for each in given])
        routed = [(layer, x, layer.route(logits)) for layer, x, logits in given]
        products = time_graph(torch, [lambda each=each: each[0].products(each[1], each[2])
                                      for each in routed])
        results.append({"tokens": tokens, "layer_us": whole, "products_us": products})
    return {"machine": torch.cuda.get_device_name(), "torch": torch.__version__,
            "command": " ".join(["bench/openai_mxfp4.py", *sys.argv[1:]]),
            "shape": [options.hidden, options.intermediate, options.experts, options.top_k],
            "results": results}


def report(found):
    print(f"{found['machine']}, torch {found['torch']}, {' / '.join(map(str, found['shape']))}")
    for each in found["results"]:
        print(f"{each['tokens']:6} tokens: layer {each['layer_us']:8} us, products alone "
              f"{each['products_us']:8}")


def main(arguments):
    options = parse(arguments)
    try:
        found = measure(options)
    except CannotRun as error:
        say(str(error))
        return 1
    show(found, options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
