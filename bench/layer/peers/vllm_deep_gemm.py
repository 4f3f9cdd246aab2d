"""The layer that vLLM makes of DeepGEMM's products, as the user has both: the whole layer, in fp8.

Its kernels quantise rows, take them to their experts, do SiLU and quantise in one, and sum;
DeepGEMM's contiguous products are between them. --triton-fused-moe is a folder that holds the
package vllm, --deep-gemm one that holds deep_gemm. vLLM takes this layer where it is told to
(VLLM_USE_DEEP_GEMM=1), and not of hidden sizes up to 512 or of intermediates that 128 does not
divide.
"""

import importlib

import torch

from measure import fp8
from measure.case import FORWARDS
from peers import System, check_blocks, lacks, lacks_format
from peers.triton import folder_of, keep_scales

MOE = "vllm.model_executor.layers.fused_moe."


def module(name):
    return importlib.import_module(MOE + name)


class Layer(System):
    name = "deep_gemm_vllm"

    def has_to_be_there(self):
        """Where it is named beside an option, which may be another system's."""
        given = self.options.deep_gemm or self.options.triton_fused_moe
        return bool(given) and self.name in (self.options.systems or ())

    def available(self):
        absent = (lacks_format(self.options.format, "fp8")
                  or lacks("vllm", folder_of(self.options), "--triton-fused-moe")
                  or lacks("deep_gemm", self.options.deep_gemm, "--deep-gemm"))
        if absent:
            return absent
        keep_scales()
        try:
            self.version = importlib.import_module("vllm").__version__
            self.experts = module("experts.deep_gemm_moe").DeepGemmExperts
            self.kernel = module("modular_kernel").FusedMoEKernel
            self.prepares = module("prepare_finalize.no_dp_ep").MoEPrepareAndFinalizeNoDPEPModular
            self.config, self.silu = module("config"), module("activation").MoEActivation.SILU
            workspace = importlib.import_module("vllm.v1.worker.workspace")
            if not workspace.is_workspace_manager_initialized():
                workspace.init_workspace_manager(torch.device(self.device.kind))
        except Exception as error:  # whatever an engine raises where it does not fit
            return f"vllm: {type(error).__name__}: {error}"
        return None

    def prepare(self, case):
        super().prepare(case)
        check_blocks(case)
        self.kernels = [self._kernel(case, forward) for forward in range(FORWARDS)]

    def _kernel(self, case, forward):
        sizes, config = case.sizes, self.config
        w1_scale, w2_scale = case.scales(forward)
        layer = config.FusedMoEConfig(
            num_experts=sizes.experts, num_local_experts=sizes.experts,
            num_logical_experts=sizes.experts, experts_per_token=sizes.top_k,
            hidden_dim=sizes.hidden, intermediate_size=sizes.intermediate, activation=self.silu,
            device=case.where, routing_method=config.RoutingMethodType.TopK,
            moe_parallel_config=config.FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=case.x.dtype, max_num_tokens=case.tokens)
        quantised = config.fp8_w8a8_moe_quant_config(
            w1_scale=w1_scale, w2_scale=w2_scale, block_shape=[fp8.BLOCK, fp8.BLOCK])
        return self.kernel(self.prepares(), self.experts(layer, quantised))

    def run(self, forward):
        case = self.case
        w1, w2 = case.weights(forward)
        return self.kernels[forward].apply(
            hidden_states=case.x[forward], w1=w1, w2=w2, topk_ids=case.ids[forward],
            topk_weights=case.router[forward], activation=self.silu,
            global_num_experts=case.sizes.experts, expert_map=None,
            apply_router_weight_on_input=False)

    def release(self):
        self.kernels = None
        super().release()
