"""What moxie.sglang touches of SGLang 0.5.23, for where SGLang is not installed: it has gigabytes,
and wants a GPU. The names, signatures and orders of calls are SGLang's; what lies behind them is
only as much as the adapter and its tests can tell. Where it is installed test_sglang.py runs with
SGLang itself.
"""

import contextlib
import enum
import functools
import json
import pathlib
import pkgutil
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


class MoeA2ABackend(enum.Enum):
    NONE, FLASHINFER = "none", "flashinfer"

    def is_flashinfer(self):
        return self == MoeA2ABackend.FLASHINFER


FLAGS = types.SimpleNamespace(moe=types.SimpleNamespace(
    a2a_backend=MoeA2ABackend.NONE, runner_backend=MoeRunnerBackend.TRITON))


def get_moe_a2a_backend():
    return FLAGS.moe.a2a_backend


def get_moe_runner_backend():
    return FLAGS.moe.runner_backend


@dataclass
class ServerArgs:
    """And what is resolved of it: this is its own view."""

    model_path: str
    moe_a2a_backend: str = "none"
    moe_runner_backend: str = "auto"
    cpu_offload_gb: int = 0
    elastic_ep_backend: Any = None
    enable_deterministic_inference: bool = False
    enable_dynamic_chunking: bool = False
    enable_eplb: bool = False
    enable_lora: Any = None
    enable_pdmux: bool = False
    enable_single_batch_overlap: bool = False
    enable_torch_compile: bool = False
    enable_two_batch_overlap: bool = False
    enable_waterfill: bool = False
    ep_num_redundant_experts: int = 0
    flashinfer_a2a_dispatch_type: Any = None
    lora_paths: Any = None
    model_impl: str = "auto"
    offload_group_size: int = -1
    speculative_algorithm: Any = None
    dwdp_size: int = 1
    moe_dp_size: int = 1
    nnodes: int = 1
    tp_size: int = 1
    dp_size: int = 1
    enable_dp_attention: bool = False
    device: Any = None
    load_format: str = "auto"
    skip_tokenizer_init: bool = False

    def resolve_once(self):
        step = handle_a2a_moe
        for hook in HOOKS.get("handle_a2a_moe", []):
            step = functools.partial(hook, previous=step)
        step(self)


HOOKS = {}


def register_resolution_hook(name):
    return lambda hook: HOOKS.setdefault(name, []).append(hook)


def resolved_view(server_args):
    return server_args


def declare_resolution(server_args, source, **fields):
    vars(server_args).update(fields)


def model_config_of(server_args):
    text = (pathlib.Path(server_args.model_path) / "config.json").read_text()
    return types.SimpleNamespace(hf_config=types.SimpleNamespace(
        architectures=json.loads(text)["architectures"]))


def handle_a2a_moe(server_args):
    if server_args.moe_a2a_backend == "flashinfer":
        assert server_args.enable_dp_attention and server_args.dp_size == server_args.tp_size, (
            "Flashinfer MoE A2A requires --attn-dp-size equal to --tp-size")
        assert server_args.moe_runner_backend in ("flashinfer_cutlass", "deep_gemm"), (
            "FlashInfer MoE A2A is supported with flashinfer_cutlass, or deep_gemm.")


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


class BaseDispatcher:
    def __init__(self):
        self.quant_config, self.runner_backend = {}, None


def create_moe_dispatcher(moe_runner_config, quant_method):
    return "SGLang's"


class MoeRunner:
    def __init__(self, runner_backend, config, lora_enabled=False):
        self.runner_backend, self.config, self.lora_enabled = runner_backend, config, lora_enabled
        self.fused_func = None
        if not lora_enabled and not get_moe_a2a_backend().is_flashinfer():
            self.fused_func = fused_experts_none_to_triton if runner_backend.is_triton() else _others

    def run(self, dispatch_output, quant_info, lora_info=None):
        if self.fused_func is None:
            return "with adapters"
        return self.fused_func(dispatch_output, quant_info, self.config)


class ModelRunner:
    def forward(self, forward_batch):
        return "logits"


class HookType(enum.Enum):
    AFTER, AROUND = "after", "around"


class HookRegistry:
    """Of hooks on methods and functions."""

    hooks, patched = [], set()

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AFTER):
        cls.hooks.append((target, hook, hook_type))

    @classmethod
    def apply_hooks(cls):
        for target, hook, hook_type in cls.hooks:
            if target not in cls.patched:
                cls.patched.add(target)
                cls.apply(target, hook, hook_type)

    @staticmethod
    def apply(target, hook, hook_type):
        owner, name = target.rsplit(".", 1)
        kind = pkgutil.resolve_name(owner)
        original = getattr(kind, name)

        def wrapper(*given, **named):
            if hook_type == HookType.AROUND:
                return hook(original, *given, **named)
            result = original(*given, **named)
            changed = hook(result, *given, **named)
            return result if changed is None else changed

        setattr(kind, name, wrapper)


def use_symmetric_memory(group, disabled=False):
    return contextlib.nullcontext()


def modules():
    """As stand_in.install takes them."""
    features = types.SimpleNamespace(enable_memory_saver=False)
    context = {"get_flags": lambda: FLAGS,
               "get_disagg": lambda: types.SimpleNamespace(enable_pdmux=False),
               "get_exec": lambda: types.SimpleNamespace(features=features),
               "get_parallel": lambda: types.SimpleNamespace(attn_dp_size=1, tp_group=None),
               "get_schedule": lambda: types.SimpleNamespace(chunked_prefill_size=16,
                                                             max_prefill_tokens=32),
               "max_prefill_buffer_tokens": lambda: 16}
    return {
        "sglang": {"__version__": "0.5.23 (a stand-in)"},
        "sglang.srt.distributed.device_communicators.pynccl_allocator": [use_symmetric_memory],
        "sglang.srt.arg_groups.overrides": {
            "declare_resolution": declare_resolution, "model_config_of": model_config_of,
            "flashinfer_a2a_max_dispatch_tokens_per_rank": lambda tokens: max(tokens, 4096),
            "resolved_view": resolved_view},
        "sglang.srt.arg_groups.resolution_hooks": [register_resolution_hook],
        "sglang.srt.layers.dp_attention": {"is_allocation_symmetric": lambda: True,
                                           "get_dp_global_num_tokens": lambda: None},
        MOE + "fused_moe_triton.layer": [create_moe_dispatcher],
        MOE + "utils": [MoeRunnerBackend, MoeA2ABackend, get_moe_a2a_backend,
                        get_moe_runner_backend],
        MOE + "moe_runner.base": [MoeRunnerConfig],
        MOE + "moe_runner.runner": [MoeRunner],
        MOE + "moe_runner.triton": [TritonMoeQuantInfo, fused_experts_none_to_triton],
        MOE + "token_dispatcher.base": [BaseDispatcher],
        MOE + "token_dispatcher.standard": [StandardDispatchOutput, StandardCombineInput],
        MOE + "topk": [StandardTopKOutput],
        "sglang.srt.model_executor.model_runner": [ModelRunner],
        "sglang.srt.plugins.hook_registry": [HookRegistry, HookType],
        "sglang.srt.runtime_context": context,
        "sglang.srt.server_args": [ServerArgs],
    }


def install():
    """As if SGLang was there."""
    MoeRunner.__module__ = MOE + "moe_runner.runner"
    create_moe_dispatcher.__module__ = MOE + "fused_moe_triton.layer"
    ModelRunner.__module__ = "sglang.srt.model_executor.model_runner"
    stand_in.install(modules())
