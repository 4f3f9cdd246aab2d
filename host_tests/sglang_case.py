"""For the tests of moxie.sglang: SGLang's words of a layer, and its runner as Moxie's hook leaves
it.

Wants torch, or exits with 77. Where SGLang is installed it is SGLang itself, else what
sglang_stand_in.py has of it. With MOXIE_TEST_DEVICE=cuda it runs on a GPU, and wants SGLang.
"""

import importlib.util
import os
import pathlib
import sys
import types

import torch_python

torch_python.require(importlib.util.find_spec("torch"), "torch is")
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "hosts" / "python"))

import torch  # noqa: E402

import experts_case  # noqa: E402
import sglang_stand_in  # noqa: E402
from experts_case import GATES, halves, in_turns, off_by, swiglu  # noqa: E402

REAL = importlib.util.find_spec("sglang") is not None
if os.environ.get("MOXIE_TEST_DEVICE") == "cuda" and not (REAL and torch.cuda.is_available()):
    print("skipped: SGLang is not installed, or torch sees no GPU")
    sys.exit(77)
if not REAL:
    sglang_stand_in.install()

from moxie import sglang as adapter  # noqa: E402
from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig  # noqa: E402
from sglang.srt.layers.moe.moe_runner.runner import MoeRunner  # noqa: E402
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo  # noqa: E402
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput  # noqa: E402
from sglang.srt.layers.moe.topk import StandardTopKOutput  # noqa: E402
from sglang.srt.layers.moe.utils import MoeRunnerBackend  # noqa: E402

# What a server has resolved, and nobody has started one.
FEATURES = types.SimpleNamespace(enable_memory_saver=False)
DETERMINISTIC = types.SimpleNamespace(enable_deterministic_inference=False)
DISAGG = types.SimpleNamespace(enable_pdmux=False)
STATE = {"get_disagg": DISAGG,
         "get_exec": types.SimpleNamespace(features=FEATURES, deterministic=DETERMINISTIC),
         "get_parallel": types.SimpleNamespace(attn_dp_size=1, tp_group=None),
         "get_schedule": types.SimpleNamespace(chunked_prefill_size=16, max_prefill_tokens=32)}
for getter, answer in STATE.items():
    setattr(adapter, getter, lambda answer=answer: answer)
OUTPUT = adapter._output  # which asks for the memory of a group of ranks
adapter._output = lambda x: x.new_empty(x.shape)

# SGLang's words of a layer: what lies between, and its MoeRunnerConfig.
FORMS = {
    "silu": (halves(GATES["silu"]), {}),
    "gelu": (halves(GATES["gelu"]), {"activation": "gelu"}),
    "gelu_tanh": (halves(GATES["gelu_tanh"]), {"activation": "gelu_tanh"}),
    "relu2": (lambda up: torch.relu(up) ** 2, {"activation": "relu2", "is_gated": False}),
    "gpt-oss": (in_turns(swiglu(1.702, 1.0, 0.7)),
                {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 0.7}),
    "its halves": (halves(swiglu(1.5, 1.0, 0.7)),
                   {"gemm1_alpha": 1.5, "gemm1_clamp_limit": 0.7, "gate_up_interleaved": False}),
    "deepseek v4": (halves(swiglu(1.0, 0.0, 0.5)), {"swiglu_limit": 0.5}),
}


class Case(experts_case.Case):
    """A layer as SGLang has it."""

    def __init__(self, form="silu", scheme=None, **more):
        between, self.words = FORMS[form]
        super().__init__(between, self.words.get("is_gated", True), scheme, **more)

    def config(self, **more):
        given = dict(
            num_experts=self.experts, num_local_experts=self.experts, hidden_size=self.hidden,
            intermediate_size_per_partition=self.inner, top_k=self.top_k,
            params_dtype=torch.bfloat16, **self.words)
        return MoeRunnerConfig(**{**given, **more})

    def quant(self, **more):
        w1, w2 = self.weights
        given = dict(w13_weight=w1, w2_weight=w2, b13=self.biases[0], b2=self.biases[1])
        if self.scheme is not None:
            given.update(use_fp8_w8a8=True, w13_scale=self.scales[0], w2_scale=self.scales[1],
                         block_shape=[128, 128] if self.scheme == "block" else None,
                         per_channel_quant=self.scheme == "channel")
        return TritonMoeQuantInfo(**{**given, **more})

    def rows(self, **more):
        given = dict(hidden_states=self.x, topk_weights=self.router, topk_ids=self.ids)
        given.update(more)
        x = given.pop("hidden_states")
        return StandardDispatchOutput(x, None, StandardTopKOutput(**given, router_logits=None))

    def made(self, **more):
        return hooked(MoeRunnerBackend.TRITON, self.config(**more))

    def run(self, runner, quant=None, **rows):
        return runner.run(self.rows(**rows), quant or self.quant()).hidden_states

    def off_by(self, **more):
        return off_by(self.run(self.made(**more)), self.wanted())


def hooked(*given, **named):
    """A MoeRunner as the hook leaves it."""
    runner = MoeRunner(*given, **named)
    if not isinstance(runner.fused_func, adapter.FusedExperts):  # where it is not applied yet
        adapter._made(None, runner)
    return runner
