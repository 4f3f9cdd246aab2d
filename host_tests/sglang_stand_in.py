"""What moxie.sglang touches of SGLang 0.5.23, for where SGLang is not installed: it has gigabytes,
and wants a GPU. The names, signatures and orders of calls are SGLang's; what lies behind them is
only as much as the adapter and its tests can tell. Where it is installed test_sglang.py runs with
SGLang itself.
"""

import contextlib
import enum
import importlib
import types
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import stand_in

MOE = "sglang.srt.layers.moe."


class MoeRunnerBackend(enum.Enum):
    TRITON, DEEP_GEMM = "triton", "deep_gemm"

    def is_triton(self):
        return self == MoeRunnerBackend.TRITON


@dataclass
class MoeRunnerConfig:
    num_experts: Any = None
    num_local_experts: Any = None
    hidden_size: Any = None
    intermediate_size_per_partition: Any = None
    top_k: Any = None
    params_dtype: Any = None
    activation: str = "silu"
    is_gated: bool = True
    apply_router_weight_on_input: bool = False
    inplace: bool = True
    no_combine: bool = False
    no_combine_keep_router_weight: bool = False
    routed_scaling_factor: Any = None
    gemm1_alpha: Any = None
    gemm1_beta: Any = None
    gemm1_clamp_limit: Any = None
    swiglu_limit: Any = None
    gate_up_interleaved: bool = True
    layer: Any = None


@dataclass
class TritonMoeQuantInfo:
    w13_weight: torch.Tensor
    w2_weight: torch.Tensor
    b13: Any = None
    b2: Any = None
    use_mxfp8: bool = False
    use_fp8_w8a8: bool = False
    use_int8_w8a8: bool = False
    use_int8_w8a16: bool = False
    use_int4_w4a16: bool = False
    per_channel_quant: bool = False
    w13_scale: Any = None
    w2_scale: Any = None
    a13_scale: Any = None
    a2_scale: Any = None
    block_shape: Any = None
    fuse_swiglu_interleaved: bool = False


class StandardTopKOutput(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: Any


class StandardDispatchOutput(NamedTuple):
    hidden_states: torch.Tensor
    hidden_states_scale: Any
    topk_output: StandardTopKOutput
    hidden_states_pre_quant: Any = None


class StandardCombineInput(NamedTuple):
    hidden_states: torch.Tensor


def fused_experts_none_to_triton(dispatch_output, quant_info, runner_config):
    return "SGLang's"


def _others(dispatch_output, quant_info, runner_config):
    return "another runner's"


class MoeRunner:
    def __init__(self, runner_backend, config, lora_enabled=False):
        self.runner_backend, self.config, self.lora_enabled = runner_backend, config, lora_enabled
        self.fused_func = None
        if not lora_enabled:
            self.fused_func = fused_experts_none_to_triton if runner_backend.is_triton() else _others

    def run(self, dispatch_output, quant_info, lora_info=None):
        if self.fused_func is None:
            return "with adapters"
        return self.fused_func(dispatch_output, quant_info, self.config)


class HookType(enum.Enum):
    AFTER = "after"


class HookRegistry:
    """Of hooks on methods, behind them."""

    hooks, patched = [], set()

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AFTER):
        cls.hooks.append((target, hook))

    @classmethod
    def apply_hooks(cls):
        for target, hook in cls.hooks:
            if target not in cls.patched:
                cls.patched.add(target)
                cls.apply(target, hook)

    @staticmethod
    def apply(target, hook):
        module, name, method = target.rsplit(".", 2)
        kind = getattr(importlib.import_module(module), name)
        original = getattr(kind, method)

        def wrapper(*given, **named):
            result = original(*given, **named)
            changed = hook(result, *given, **named)
            return result if changed is None else changed

        setattr(kind, method, wrapper)


def use_symmetric_memory(group, disabled=False):
    return contextlib.nullcontext()


def modules():
    """As stand_in.install takes them."""
    features = types.SimpleNamespace(enable_memory_saver=False)
    context = {"get_exec": lambda: types.SimpleNamespace(features=features),
               "get_parallel": lambda: types.SimpleNamespace(attn_dp_size=1, tp_group=None),
               "get_schedule": lambda: types.SimpleNamespace(chunked_prefill_size=16,
                                                             max_prefill_tokens=32)}
    return {
        "sglang": {"__version__": "0.5.23 (a stand-in)"},
        "sglang.srt.distributed.device_communicators.pynccl_allocator": [use_symmetric_memory],
        "sglang.srt.layers.dp_attention": {"is_allocation_symmetric": lambda: True},
        MOE + "utils": [MoeRunnerBackend],
        MOE + "moe_runner.base": [MoeRunnerConfig],
        MOE + "moe_runner.runner": [MoeRunner],
        MOE + "moe_runner.triton": [TritonMoeQuantInfo, fused_experts_none_to_triton],
        MOE + "token_dispatcher.standard": [StandardDispatchOutput, StandardCombineInput],
        MOE + "topk": [StandardTopKOutput],
        "sglang.srt.plugins.hook_registry": [HookRegistry, HookType],
        "sglang.srt.runtime_context": context,
    }


def install():
    """As if SGLang was there."""
    MoeRunner.__module__ = MOE + "moe_runner.runner"
    stand_in.install(modules())
