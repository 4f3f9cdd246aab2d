"""What moxie.vllm touches of vLLM, for where vLLM is not installed: it has a gigabyte, and wants a
GPU. The names, signatures and orders of calls are vLLM's; what lies behind them is only as much as
the adapter and its tests can tell. On a GPU test_vllm.py runs with vLLM itself.

It is vLLM 0.33, the newest that fits, or by MOXIE_TEST_VLLM=0.26 the oldest.
"""

import abc
import enum
import logging
import os
import sys
import types
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

import stand_in

MOE = "vllm.model_executor.layers.fused_moe."
VERSION = os.environ.get("MOXIE_TEST_VLLM", "0.33")
OLDEST = VERSION == "0.26"
assert VERSION in ("0.26", "0.33"), f"MOXIE_TEST_VLLM is {VERSION}; want 0.26 or 0.33"


class MoEActivation(enum.Enum):
    SILU, GELU, GELU_TANH = "silu", "gelu", "gelu_tanh"
    SWIGLUOAI, SWIGLUSTEP, RELU2_NO_MUL = "swigluoai", "swiglustep", "relu2_no_mul"

    @property
    def is_gated(self):
        return not self.value.endswith("_no_mul")


class FusedMoEActivationFormat(enum.Enum):
    Standard, BatchedExperts = "standard", "batched_experts"


class RoutingMethodType(enum.IntEnum):
    TopK = 5


class QuantKey(NamedTuple):
    name: str


@dataclass
class FusedMoEParallelConfig:
    tp_size: int
    pcp_size: int
    dp_size: int
    ep_size: int
    tp_rank: int
    pcp_rank: int
    dp_rank: int
    ep_rank: int
    sp_size: int
    use_ep: bool
    all2all_backend: str
    enable_eplb: bool
    use_batched_activation_format = property(lambda self: False)
    use_all2all_kernels = property(
        lambda self: self.use_ep and (self.dp_size > 1 or self.sp_size > 1))
    use_ag_rs_all2all_kernels = property(
        lambda self: (self.use_all2all_kernels and
                      self.all2all_backend == "allgather_reducescatter"))
    if not OLDEST:  # of ranks without all-to-all, too
        use_passthrough_all2all = property(lambda self: self.all2all_backend == "passthrough")

    @classmethod
    def make_no_parallel(cls):
        return cls(1, 1, 1, 1, 0, 0, 0, 0, 1, False, "allgather_reducescatter", False)


@dataclass
class FusedMoEConfig:
    num_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size: int
    num_local_experts: int
    num_logical_experts: int
    activation: MoEActivation
    device: Any
    routing_method: RoutingMethodType
    moe_parallel_config: FusedMoEParallelConfig
    in_dtype: torch.dtype
    max_num_tokens: int = 256
    moe_backend: str = "auto"
    has_bias: bool = False
    is_lora_enabled: bool = False
    skip_final_all_reduce: bool = False
    swiglu_limit: Any = None
    swiglu_alpha: Any = None
    swiglu_beta: Any = None
    if not OLDEST:
        elastic_ep_max_dp_size: Any = None
        has_hash_routing: bool = False
        require_decomposed_backend: bool = False
        shared_expert_prefix: Any = None
        activation_situ_beta: Any = None
        activation_situ_linear_beta: Any = None
        tp_shard_with_padding: bool = False
    intermediate_size_per_partition: int = field(init=False)

    def __post_init__(self):
        self.intermediate_size_per_partition = (
            self.intermediate_size // self.moe_parallel_config.tp_size)


@dataclass
class FusedMoEQuantConfig:
    quant_dtype: Any = None
    per_act_token_quant: bool = False
    per_out_ch_quant: bool = False
    block_shape: Any = None
    w1_scale: Any = None
    w2_scale: Any = None
    w1_bias: Any = None
    w2_bias: Any = None

    @classmethod
    def make(cls, quant_dtype=None, **given):
        return cls(quant_dtype, **given)


def fp8_w8a8_moe_quant_config(**given):
    return FusedMoEQuantConfig.make(torch.float8_e4m3fn, **given)


class FusedMoEExpertsModular(abc.ABC):
    if not OLDEST:
        post_gemm2_hook = None

    def __init__(self, moe_config, quant_config):
        self.moe_config, self.quant_config = moe_config, quant_config

    def __getattr__(self, name):
        if name in FusedMoEQuantConfig.__dataclass_fields__:
            return getattr(self.quant_config, name)
        raise AttributeError(name)

    @abc.abstractmethod
    def workspace_shapes(self, M, N, K, topk, global_num_experts, local_num_experts,
                         expert_tokens_meta, activation):
        pass

    @abc.abstractmethod
    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation,
              global_num_experts, expert_map, a1q_scale, a2_scale, workspace13, workspace2,
              expert_tokens_meta, apply_router_weight_on_input):
        pass

    @staticmethod
    def supports_lora():
        return False

    @staticmethod
    def is_supported_config(cls, moe_config, weight_key, activation_key, activation_format):
        lacks = {
            "current device": cls._supports_current_device(),
            "no act_and_mul MLP layer": (moe_config.activation.is_gated
                                         or cls._supports_no_act_and_mul()),
            f"{moe_config.activation} activation": cls._supports_activation(moe_config.activation),
            f"quantization scheme {weight_key}x{activation_key}": cls._supports_quant_scheme(
                weight_key, activation_key),
            "parallel config": cls._supports_parallel_config(moe_config.moe_parallel_config),
            f"{activation_format.value} activation format": (
                activation_format == cls.activation_format()),
            "LoRA": not moe_config.is_lora_enabled or cls.supports_lora()}
        for what, served in lacks.items():
            if not served:
                return False, f"kernel does not support {what}"
        return True, None


class TopKWeightAndReduceNoOP:
    def apply(self, output, fused_expert_output, topk_weights, topk_ids,
              apply_router_weight_on_input):
        return output if output is fused_expert_output else output.copy_(fused_expert_output)


class MoEPrepareAndFinalizeNoDPEPModular:
    """Rows as they are: the adapter wants them so."""

    def post_init_setup(self, fused_experts):
        pass

    def num_dispatchers(self):
        return 1

    def output_is_reduced(self):
        return False

    def allocate_fused_expert_output(self, shape, dtype, device, weight_and_reduce):
        """Where experts are to write; None: where the kernel says. Not asked by the oldest."""

    def prepare(self, a1, topk_weights, topk_ids, on_input):
        return a1 * topk_weights.to(a1.dtype) if on_input else a1, topk_weights, topk_ids

    def finalize(self, output, fused_out, weight_and_reduce, *given):
        weight_and_reduce.apply(output, fused_out, *given)


def get_current_vllm_config_or_none():
    return None


def get_ep_group():
    raise AssertionError("expert parallel group is not initialized")


def get_forward_context():
    raise AssertionError("Forward context is not set")


def is_forward_context_available():
    return False


class MoEPrepareAndFinalizeNaiveDPEPModular(MoEPrepareAndFinalizeNoDPEPModular):
    """Rows of all ranks, and this rank's part of their sums."""

    def prepare(self, a1, topk_weights, topk_ids, on_input):
        rows = super().prepare(a1, topk_weights, topk_ids, on_input)[0]
        return group_of_ranks().dispatch(rows, topk_weights, topk_ids, is_sequence_parallel=False,
                                         extra_tensors=None)

    def allocate_fused_expert_output(self, shape, dtype, device, weight_and_reduce):
        return group_of_ranks().allocate_combine_input(shape, dtype, device,
                                                       is_sequence_parallel=False)

    def finalize(self, output, fused_out, *given):
        if OLDEST:
            output.copy_(group_of_ranks().combine(fused_out, is_sequence_parallel=False))
        else:
            group_of_ranks().combine_into_output(fused_out, output, is_sequence_parallel=False)


def group_of_ranks():
    return sys.modules[MOE + "prepare_finalize.naive_dp_ep"].get_ep_group()


def maybe_make_prepare_finalize(moe, quant_config, routing_tables=None, allow_new_interface=False,
                                use_monolithic=False):
    if moe.moe_parallel_config.use_all2all_kernels:
        return MoEPrepareAndFinalizeNaiveDPEPModular()
    return MoEPrepareAndFinalizeNoDPEPModular()


class FusedMoEKernel:
    """As FusedMoEKernelModularImpl.apply does it."""

    def __init__(self, prepare_finalize, fused_experts):
        self.prepare_finalize, self.fused_experts = prepare_finalize, fused_experts
        prepare_finalize.post_init_setup(fused_experts)

    def apply(self, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts,
              expert_map, apply_router_weight_on_input):
        experts, output = self.fused_experts, torch.empty_like(hidden_states)
        assert experts.expects_unquantized_inputs
        rows, topk_weights, topk_ids = self.prepare_finalize.prepare(
            hidden_states, topk_weights, topk_ids, apply_router_weight_on_input)
        shapes = experts.workspace_shapes(len(rows), w1.shape[1], rows.shape[1], topk_ids.shape[1],
                                          global_num_experts, w1.shape[0], None, activation)
        workspace13, workspace2, fused_out = (
            torch.full(shape, float("nan"), dtype=rows.dtype, device=rows.device)
            for shape in shapes)
        if not OLDEST:
            fused_out = self.output_of_experts(fused_out, output,
                                               experts.finalize_weight_and_reduce_impl())
        experts.apply(
            output=fused_out, hidden_states=rows, w1=w1, w2=w2, topk_weights=topk_weights,
            topk_ids=topk_ids, activation=activation, global_num_experts=global_num_experts,
            expert_map=expert_map, a1q_scale=None, a2_scale=None, workspace13=workspace13,
            workspace2=workspace2, expert_tokens_meta=None,
            apply_router_weight_on_input=apply_router_weight_on_input)
        self.prepare_finalize.finalize(
            output, fused_out, experts.finalize_weight_and_reduce_impl(), topk_weights, topk_ids,
            apply_router_weight_on_input)
        return output

    def output_of_experts(self, fused_out, output, weight_and_reduce):
        """What is around experts may have a place for it, or it is the layer's own output."""
        found = self.prepare_finalize.allocate_fused_expert_output(
            fused_out.shape, fused_out.dtype, fused_out.device, weight_and_reduce)
        if found is not None:
            return found
        return output if output.shape == fused_out.shape else fused_out


class UnquantizedMoeBackend(enum.Enum):
    TRITON = "TRITON"


class Fp8MoeBackend(enum.Enum):
    TRITON = "TRITON"


def select_unquantized_moe_backend(moe_config):
    return "vLLM's", moe_config


def select_fp8_moe_backend(config, weight_key, activation_key, allow_vllm_cutlass=False):
    return "vLLM's", config


class Fp8Config:
    """What the quantisation_config of a checkpoint in fp8 becomes."""

    def __init__(self, is_checkpoint_fp8_serialized=False, activation_scheme="dynamic",
                 ignored_layers=None, weight_block_size=None):
        self.weight_block_size = weight_block_size


def read_variable(name):
    """A module's __getattr__, of these variables."""
    unset = {"VLLM_USE_DEEP_GEMM": "1", "VLLM_MOE_USE_DEEP_GEMM": "1"}
    if OLDEST:
        unset.update(VLLM_TEST_FORCE_FP8_MARLIN="0", VLLM_USE_RAY_V2_EXECUTOR_BACKEND="1")
    if name not in unset:
        raise AttributeError(name)
    return bool(int(os.environ.get(name, unset[name])))


class Mxfp4MoeBackend(enum.Enum):
    EMULATION = "EMULATION"


def select_mxfp4_moe_backend(config, activation_key=None):
    return "vLLM's", config


def _user_moe_activation_override():
    return None


def make_mxfp4_moe_quant_config(mxfp4_backend, w1_scale, w2_scale, gemm1_alpha=None,
                                gemm1_beta=None, swiglu_limit=None, w1_bias=None, w2_bias=None):
    return FusedMoEQuantConfig.make("mxfp4", w1_scale=w1_scale, w2_scale=w2_scale, w1_bias=w1_bias,
                                    w2_bias=w2_bias)


class Logger(logging.LoggerAdapter):
    def info_once(self, *given):
        self.info(*given)

    def warning_once(self, *given):
        self.warning(*given)


class WorkerWrapperBase:
    def execute_model(self, scheduler_output):
        return scheduler_output


def modules():
    """As stand_in.install takes them."""
    keys = {name: QuantKey(name) for name in (
        "kFp8Static128BlockSym", "kFp8Dynamic128Sym", "kFp8StaticChannelSym",
        "kFp8DynamicTokenSym", "kFp8StaticTensorSym", "kMxfp4Static")}
    platform = types.SimpleNamespace(is_cuda=lambda: False,
                                     is_device_capability=lambda capability: False)
    oracle = MOE + "oracle."
    found = {
        "vllm": {"__version__": f"{VERSION}.0 (a stand-in)"},
        "vllm.config": [get_current_vllm_config_or_none],
        "vllm.distributed": [get_ep_group],
        "vllm.envs": {"__getattr__": read_variable, "is_set": lambda name: name in os.environ},
        "vllm.forward_context": [get_forward_context, is_forward_context_available],
        "vllm.logger": {"init_logger": lambda name: Logger(logging.getLogger(name), {})},
        "vllm.platforms": {"current_platform": platform},
        "vllm.model_executor.layers.quantization.utils.quant_utils": keys,
        MOE + "activation": [MoEActivation],
        MOE + "config": [FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType,
                         FusedMoEQuantConfig, fp8_w8a8_moe_quant_config],
        MOE + "modular_kernel": [FusedMoEExpertsModular, FusedMoEActivationFormat, FusedMoEKernel],
        MOE + "prepare_finalize.no_dp_ep": [MoEPrepareAndFinalizeNoDPEPModular],
        MOE + "prepare_finalize.naive_dp_ep": [MoEPrepareAndFinalizeNaiveDPEPModular,
                                               get_ep_group],
        MOE + "topk_weight_and_reduce": [TopKWeightAndReduceNoOP],
        oracle + "unquantized": [select_unquantized_moe_backend, UnquantizedMoeBackend],
        oracle + "fp8": [select_fp8_moe_backend, Fp8MoeBackend, maybe_make_prepare_finalize],
        oracle + "mxfp4": [select_mxfp4_moe_backend, Mxfp4MoeBackend, make_mxfp4_moe_quant_config,
                           _user_moe_activation_override],
        # As the modules of vLLM's methods do, which import the selections by their names.
        MOE + "unquantized_fused_moe_method": [select_unquantized_moe_backend],
        "vllm.model_executor.layers.quantization.fp8": [select_fp8_moe_backend, Fp8Config],
        "vllm.model_executor.layers.quantization.mxfp4": [select_mxfp4_moe_backend],
        "vllm.model_executor.layers.quantization.quark.quark_moe": [select_mxfp4_moe_backend],
        "vllm.v1.worker.worker_base": [WorkerWrapperBase],
    }
    return found


def install():
    """As if vLLM was there."""
    stand_in.install(modules())
