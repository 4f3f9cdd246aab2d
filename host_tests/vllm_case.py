"""For the tests of moxie.vllm: vLLM, or what vllm_stand_in.py has of it where it is not installed,
the adapter, and a layer as vLLM has it.

Wants torch, or exits with 77; with MOXIE_TEST_DEVICE=cuda a GPU, too.
"""

import dataclasses
import importlib
import importlib.util
import pathlib
import sys

import torch_python

torch_python.require(importlib.util.find_spec("torch"), "torch is")
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "hosts" / "python"))

import torch  # noqa: E402

import experts_case  # noqa: E402
import vllm_stand_in  # noqa: E402
from experts_case import DEVICE, GATES, ON_CPU, halves, in_turns, off_by, swiglu  # noqa: E402

REAL = importlib.util.find_spec("vllm") is not None
if not (ON_CPU or torch.cuda.is_available()):
    torch_python.skip("torch sees no GPU")
if not REAL:
    vllm_stand_in.install()

from moxie import vllm as adapter  # noqa: E402
from vllm.model_executor.layers.fused_moe import config as vllm_config  # noqa: E402
from vllm.model_executor.layers.fused_moe import modular_kernel  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.oracle import fp8, mxfp4, unquantized  # noqa: E402
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (  # noqa: E402
    MoEPrepareAndFinalizeNoDPEPModular)
from vllm.model_executor.layers.quantization.utils import quant_utils  # noqa: E402

for user in ("fused_moe.unquantized_fused_moe_method", "quantization.fp8", "quantization.mxfp4",
             "quantization.quark.quark_moe"):  # of the selections
    importlib.import_module("vllm.model_executor.layers." + user)
# vLLM refuses those without a gate on a CPU.
ACTIVATIONS = [each for each in adapter.ACTIVATIONS if each.is_gated or not (REAL and ON_CPU)]
BLOCK = quant_utils.kFp8Static128BlockSym, quant_utils.kFp8Dynamic128Sym
CHANNEL = quant_utils.kFp8StaticChannelSym, quant_utils.kFp8DynamicTokenSym
MXFP4 = quant_utils.kMxfp4Static, None
BETWEEN = {
    MoEActivation.SILU: halves(GATES["silu"]),
    MoEActivation.GELU: halves(GATES["gelu"]),
    MoEActivation.GELU_TANH: halves(GATES["gelu_tanh"]),
    MoEActivation.RELU2_NO_MUL: lambda up: torch.relu(up) ** 2,
    MoEActivation.SWIGLUOAI: in_turns(swiglu(1.702, 1.0, 7.0)),
}

if REAL:
    from vllm.v1.worker import workspace
    workspace.init_workspace_manager(DEVICE)


def parallel(ep_size, ep_rank, **more):
    """vLLM's description of experts that are spread over all ranks."""
    alone = vllm_config.FusedMoEParallelConfig.make_no_parallel()
    return dataclasses.replace(alone, use_ep=True, ep_size=ep_size, ep_rank=ep_rank, **more)


class Case(experts_case.Case):
    """A layer as vLLM has it."""

    def __init__(self, activation=MoEActivation.SILU, **more):
        self.activation = activation
        super().__init__(BETWEEN.get(activation), activation.is_gated, **more)

    def moe(self, **more):
        given = dict(
            num_experts=self.experts, num_local_experts=self.experts,
            num_logical_experts=self.experts, experts_per_token=self.top_k, hidden_dim=self.hidden,
            intermediate_size=self.inner, activation=self.activation, device=DEVICE,
            routing_method=vllm_config.RoutingMethodType.TopK, in_dtype=torch.bfloat16,
            moe_parallel_config=vllm_config.FusedMoEParallelConfig.make_no_parallel(),
            max_num_tokens=16, has_bias=self.biases[0] is not None)
        return vllm_config.FusedMoEConfig(**{**given, **more})

    def quant(self, block_shape=(128, 128)):
        named = {f"w{number}_{what}": each for what, both in (
            ("scale", self.scales), ("bias", self.biases)) for number, each in enumerate(both, 1)}
        if self.scheme is None:
            return vllm_config.FusedMoEQuantConfig.make(**named)
        if self.scheme == "mxfp4":
            return mxfp4.make_mxfp4_moe_quant_config(
                mxfp4.Mxfp4MoeBackend.EMULATION, **named, gemm1_alpha=1.702, gemm1_beta=1.0,
                swiglu_limit=7.0)
        block = self.scheme == "block"
        return vllm_config.fp8_w8a8_moe_quant_config(
            **named, block_shape=list(block_shape) if block else None, per_act_token_quant=not block,
            per_out_ch_quant=not block)

    def made(self):
        return modular_kernel.FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(),
                                             adapter.MoxieExperts(self.moe(), self.quant()))

    def run(self, kernel, expert_map=None, on_input=False):
        w1, w2 = self.weights
        return kernel.apply(
            hidden_states=self.x, w1=w1, w2=w2, topk_ids=self.ids, topk_weights=self.router,
            activation=self.activation, expert_map=expert_map,
            apply_router_weight_on_input=on_input,
            global_num_experts=self.experts if expert_map is None else len(expert_map))

    def off_by(self, **more):
        return off_by(self.run(self.made(), **more), self.wanted(**more))
