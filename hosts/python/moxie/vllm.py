"""Moxie as the experts of vLLM: its fused_moe layers, unquantised, in fp8, and gpt-oss' in mxfp4.

    pip install hosts/python
    export MOXIE_PLUGIN=/opt/lib/libmoxie.so
    vllm serve Qwen/Qwen3-30B-A3B

vLLM calls register() by itself, in each of its processes (vllm_plugin.py). What Moxie cannot
compute stays with vLLM's own experts, and a warning says why. The weights stay where vLLM has them;
layers that are alike share one instance, and with it the memory between the two products. With
expert parallelism between ranks that have tokens of their own (--data-parallel-size,
--enable-expert-parallel) Moxie's dispatcher also takes rows to the ranks of their experts and back,
between the GPUs of one host; MOXIE_EXCHANGE=vllm leaves that to vLLM.
"""

import dataclasses
import functools
import inspect
import os
import sys
from typing import Any, NamedTuple

import torch
import vllm
from vllm.logger import init_logger

from moxie import abi, ranks
from moxie.engine import LAYERS_MAX, Borrower, Engine, check_rows
from moxie.modules import NUMBERS, keys_of, marks_of, refusal


VERSIONS = "0.26 to 0.33"  # of vLLM; what fits is told by names, arguments and fields


def _misfit(what):
    return ImportError(f"moxie.vllm fits vLLM {VERSIONS}, and this is {vllm.__version__}: {what}; "
                       "leave MOXIE_PLUGIN unset, or take the Moxie that fits")


class Selection(NamedTuple):
    """One of vLLM's selections of a backend."""

    select: Any
    asked: tuple  # its arguments that are read
    backend: Any  # as what vLLM then leaves the weights alone
    weight_key: Any = None  # where its arguments do not say it
    user: Any = None  # the one module that is to ask Moxie; None: all that have `select`


try:
    from vllm import envs
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed import get_ep_group
    from vllm.forward_context import get_forward_context, is_forward_context_available
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.oracle import fp8, mxfp4, unquantized
    from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
        MoEPrepareAndFinalizeNoDPEPModular)
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
    from vllm.model_executor.layers.quantization import mxfp4 as gpt_oss
    from vllm.model_executor.layers.quantization.utils import quant_utils
    from vllm.platforms import current_platform
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    Base = modular_kernel.FusedMoEExpertsModular
    STANDARD = modular_kernel.FusedMoEActivationFormat.Standard
    # What weights and rows are quantised as: Moxie's name of it, of None as the rows' type.
    SCHEMES = {
        (None, None): None,
        (quant_utils.kFp8Static128BlockSym, quant_utils.kFp8Dynamic128Sym): "fp8_block128",
        (quant_utils.kFp8StaticChannelSym, quant_utils.kFp8DynamicTokenSym): "fp8_channel",
        (quant_utils.kMxfp4Static, None): "mxfp4",
    }
    USER_ACTIVATION = mxfp4._user_moe_activation_override
    SELECTIONS = (
        Selection(unquantized.select_unquantized_moe_backend, ("moe_config",),
                  unquantized.UnquantizedMoeBackend.TRITON),
        Selection(fp8.select_fp8_moe_backend, ("config", "weight_key", "activation_key"),
                  fp8.Fp8MoeBackend.TRITON),
        # Others who ask it, Quark for one, go by the backend alone.
        Selection(mxfp4.select_mxfp4_moe_backend, ("config", "activation_key"),
                  mxfp4.Mxfp4MoeBackend.EMULATION, quant_utils.kMxfp4Static, gpt_oss),
    )
    # A step of a worker, and what joins experts and what is around them.
    STEP = WorkerWrapperBase.execute_model
    KERNEL = modular_kernel.FusedMoEKernel.__init__
    # Keys of the configuration, and how the rows of gate and up lie.
    ACTIVATIONS = {
        MoEActivation.SILU: ({"activation": "silu"}, abi.ORDER_GATE_UP),
        MoEActivation.GELU: ({"activation": "gelu"}, abi.ORDER_GATE_UP),
        MoEActivation.GELU_TANH: ({"activation": "gelu_tanh"}, abi.ORDER_GATE_UP),
        MoEActivation.RELU2_NO_MUL: ({"activation": "relu2"}, abi.ORDER_PLAIN),
        MoEActivation.SWIGLUOAI: ({"activation": "swigluoai", "activation_alpha": 1.702,
                                   "activation_beta": 1.0, "activation_limit": 7.0},
                                  abi.ORDER_INTERLEAVED),
    }
except (ImportError, AttributeError) as error:
    raise _misfit(error) from error

# Fields of vLLM's configuration of a layer that are read here.
READ = frozenset(("activation", "experts_per_token", "hidden_dim", "in_dtype",
                  "intermediate_size_per_partition", "max_num_tokens", "moe_backend",
                  "moe_parallel_config", "num_experts", "num_local_experts"))
# And those by which experts compute nothing else: how tokens are routed to them, what is added up
# behind them, what the weights show, what other fields or _apart() say, other makers' GPUs.
KNOWN = READ | frozenset((
    "aiter_fmoe_shared_expert_enabled", "device", "elastic_ep_max_dp_size", "has_bias",
    "has_hash_routing", "hidden_dim_unpadded", "intermediate_pad", "intermediate_size",
    "intermediate_size_per_partition_unpadded", "is_lora_enabled", "max_capture_size",
    "num_logical_experts", "require_decomposed_backend", "rocm_aiter_fmoe_enabled",
    "router_logits_dtype", "routing_method", "shared_expert_prefix", "skip_final_all_reduce",
    "use_mxfp4_w4a4_dsv4"))

ENGINE = Engine("vllm")
logger = init_logger("vllm.moxie")  # beneath vLLM's, so that its settings hold for it


# ---- What Moxie takes --------------------------------------------------------------------------


def _keys(moe, weight_format, device, over_ranks):
    """The configuration of vLLM's FusedMoEConfig."""
    number, inner = NUMBERS[moe.in_dtype], moe.intermediate_size_per_partition
    if weight_format == "mxfp4":  # as vLLM does once the layer is Moxie's
        inner = -(-inner // 32) * 32
    return {
        **keys_of(device, weight_format or number, number),
        "hidden_size": moe.hidden_dim, "intermediate_size": inner,
        "num_experts": moe.num_local_experts, "top_k": moe.experts_per_token,
        "forward_tokens_max": moe.max_num_tokens, "num_layers": LAYERS_MAX,
        **ACTIVATIONS[moe.activation][0],
        **(_rank_keys(moe, weight_format, device) if over_ranks else {})}


def _rank_keys(moe, weight_format, device):
    """Where each rank has its own tokens: with sequence parallelism a part of its group's."""
    parallel = moe.moe_parallel_config
    return {**ranks.exchange_keys(
        parallel.ep_size, parallel.ep_rank, -(-moe.max_num_tokens // parallel.sp_size),
        str(weight_format).startswith("fp8") and device.type == "cuda"),
        "num_experts": moe.num_experts}


def exchange():
    """Who moves rows between ranks, by MOXIE_EXCHANGE: "moxie", where it can, or "vllm"."""
    word = os.environ.get("MOXIE_EXCHANGE") or "moxie"
    if word not in ("moxie", "vllm"):
        raise refusal(abi.E_INVALID, f"MOXIE_EXCHANGE is {word!r}; want moxie or vllm")
    return word


def dispatches(moe):
    """Whether Moxie moves the rows of a layer, where vLLM would gather those of all ranks: each
    rank has its own tokens and the same number of experts, and all are on one host."""
    parallel = moe.moe_parallel_config
    if (exchange() != "moxie"
            or not parallel.use_ag_rs_all2all_kernels
            or parallel.ep_size != parallel.dp_size * parallel.sp_size
            or moe.num_experts != moe.num_local_experts * parallel.ep_size
            or get_ep_group().device_communicator.all2all_manager.internode):
        return False
    apart = _apart()
    if apart:
        logger.warning_once("Moxie leaves rows between ranks to vLLM: %s", apart)
    return apart is None


def _apart():
    """What of vLLM's configuration does not go with Moxie's exchange, or None."""
    config = get_current_vllm_config_or_none()
    if config is None:
        return None
    parallel = config.parallel_config
    if parallel.enable_elastic_ep:
        return "--enable-elastic-ep: ranks that join have other kernels than those that were there"
    if parallel.pipeline_parallel_size > 1:
        return ("--pipeline-parallel-size: vLLM hears no failure of a stage but the last, which "
                "goes on with zeros")
    # vLLM 0.33 has no other executor for Ray, and no such variable.
    if parallel.use_ray and not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True):
        return "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0: nothing sees failures in replayed graphs there"
    return None


def _offloads():
    config = get_current_vllm_config_or_none()
    return config is not None and config.offload_config.uva.cpu_offload_gb > 0


def _device_here():
    if current_platform.is_cuda():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _block_sizes():
    """Of the model's fp8 weights, by vLLM's quantisation config: blocks of all sizes have one key."""
    quant = getattr(get_current_vllm_config_or_none(), "quant_config", None)
    schemes = getattr(quant, "target_scheme_map", None) or {}  # of compressed-tensors
    found = [getattr(quant, "weight_block_size", None), *(
        getattr(each.get("weights"), "block_structure", None) for each in schemes.values())]
    return [list(each) for each in found if each is not None]


# Where one is set and both are on they choose it; on by default they only allow it.
DEEP_GEMM = "VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM"


def _chosen():
    """What the environment says of fp8 as --moe-backend does of all, by vLLM's own rules, or None."""
    named = [name for name in DEEP_GEMM if envs.is_set(name)]
    if named and all(getattr(envs, name) for name in DEEP_GEMM):
        return f"{' and '.join(named)}: DeepGEMM is chosen"
    if getattr(envs, "VLLM_TEST_FORCE_FP8_MARLIN", False):  # up to vLLM 0.28
        return "VLLM_TEST_FORCE_FP8_MARLIN: Marlin is chosen"
    return None


def _why_not_fp8(moe, weight_format):
    chosen = _chosen()
    if chosen is not None or weight_format != "fp8_block128":
        return chosen
    if ACTIVATIONS[moe.activation][1] == abi.ORDER_INTERLEAVED:
        return ("kernel does not support scales of blocks in which rows of gate and up take turns, "
                f"as {moe.activation} has them")
    others = [each for each in _block_sizes() if each != [128, 128]]
    return f"kernel does not support fp8 weights in blocks of {others[0]}" if others else None


def _unknown(moe):
    """What a layer's configuration says that nothing here knows, or None. Its experts may have to
    do what vLLM's own do by it, as with a limit of the gate."""
    if type(moe) is not FusedMoEConfig:
        return type(moe).__name__
    names = [each.name for each in dataclasses.fields(moe)
             if each.name not in KNOWN and getattr(moe, each.name) != each.default]
    return " and ".join(names) or None


def why_not(moe, weight_key, activation_key):
    """Why Moxie leaves a layer to vLLM, or None where it takes it.

    moe: vLLM's FusedMoEConfig. The keys are vLLM's, of how weights and rows are quantised.
    """
    parallel = moe.moe_parallel_config
    batched = parallel.use_batched_activation_format
    taken, reason = MoxieExperts.is_supported_config(
        MoxieExperts, moe, weight_key, activation_key,
        modular_kernel.FusedMoEActivationFormat.BatchedExperts if batched else STANDARD)
    if not taken:
        return reason
    if parallel.use_ep and moe.num_experts < parallel.ep_size:  # all say so, not those without one
        return f"{moe.num_experts} experts on {parallel.ep_size} ranks leave some without any"
    if _offloads():
        return "kernel does not read weights that --cpu-offload-gb has left in the host's memory"
    unknown = _unknown(moe)
    if unknown:
        return f"kernel does not support a layer with {unknown}"
    weight_format = SCHEMES[weight_key, activation_key]
    reason = _why_not_fp8(moe, weight_format) if str(weight_format).startswith("fp8") else None
    if reason:
        return reason
    try:
        keys = _keys(moe, weight_format, _device_here(), dispatches(moe))
        ENGINE.refuse(keys)
    except abi.MoxieError as error:
        return str(error)
    return None


# ---- The layer ---------------------------------------------------------------------------------


def layers_made():
    """How many layers of vLLM have computed with Moxie in this process, and are still there."""
    return ENGINE.layers()


class MoxieExperts(Borrower, Base):
    """vLLM's modular experts from rows as they are to their weighted sums, quantised on the way."""

    engine = ENGINE

    @property
    def expects_unquantized_inputs(self):
        return True

    @staticmethod
    def activation_format():
        return STANDARD

    @staticmethod
    def _supports_current_device():
        return current_platform.is_cuda() and current_platform.is_device_capability(90)

    @staticmethod
    def _supports_no_act_and_mul():
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key, activation_key):
        return (weight_key, activation_key) in SCHEMES

    @staticmethod
    def _supports_activation(activation):
        return activation in ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config):
        if getattr(moe_parallel_config, "use_passthrough_all2all", False):
            return False  # nothing around experts adds up what those of other ranks give
        return (not moe_parallel_config.use_all2all_kernels
                or moe_parallel_config.use_ag_rs_all2all_kernels)

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(self, M, N, K, topk, global_num_experts, local_num_experts,
                         expert_tokens_meta, activation):
        """None but y: Moxie has planned its own."""
        return (0,), (0,), (M, K)

    def _weight_format(self):
        """Moxie's name of it, or None as the rows' type."""
        if self.quant_dtype in (None, "mxfp4"):
            return self.quant_dtype
        return "fp8_block128" if self.block_shape else "fp8_channel"

    def _scales(self):
        """As Moxie has them: of channels vLLM's end in a dimension of one."""
        scales = self.w1_scale, self.w2_scale
        if self.quant_dtype is None:
            return None, None
        if self.quant_dtype == "mxfp4":
            return scales
        if self.block_shape and list(self.block_shape) != [128, 128]:
            raise refusal(abi.E_UNSUPPORTED, f"fp8 weights in blocks of {list(self.block_shape)}; "
                          "Moxie takes [128, 128]: unset MOXIE_PLUGIN for this model")
        if any(each is None or each.dtype != torch.float32 for each in scales):
            raise refusal(abi.E_UNSUPPORTED, "the scales of fp8 weights are "
                          f"{' and '.join(str(getattr(each, 'dtype', None)) for each in scales)}; "
                          "Moxie takes float32: unset MOXIE_PLUGIN for this model")
        return scales if self.block_shape else tuple(each.flatten(1) for each in scales)

    def _ready(self, x, w1, w2, top_k):
        """The layer of these weights, made where there is none, or one of others."""
        biases = self.w1_bias, self.w2_bias
        marks = marks_of((w1, w2, *biases, self.w1_scale, self.w2_scale), x.dtype, top_k)
        if marks != self.marks:
            # Of vLLM 0.33; a model sets it when the kernel is there.
            if getattr(self, "post_gemm2_hook", None) is not None:
                raise refusal(abi.E_UNSUPPORTED, "this model takes the rows of each expert before "
                              "they are added up (post_gemm2_hook), and Moxie gives their sums: "
                              "unset MOXIE_PLUGIN for this model")
            keys = {**_keys(self.moe_config, self._weight_format(), x.device,
                            bool(self.all_gather)), "top_k": top_k}
            orders = ACTIVATIONS[self.moe_config.activation][1], abi.ORDER_PLAIN
            scales = self._scales()
            try:
                self.borrow(marks, keys, (w1, w2), orders, biases, scales)
            except abi.MoxieError as error:
                if not self.all_gather:
                    raise
                raise abi.MoxieError(error.code, error.rank, f"{error.text}; MOXIE_EXCHANGE=vllm "
                                     "leaves rows to vLLM", error.keys) from error
        return self.layer

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation,
              global_num_experts, expert_map, a1q_scale, a2_scale, workspace13, workspace2,
              expert_tokens_meta, apply_router_weight_on_input):
        """output [M, K] = the weighted sums, of rows [M, K] that are not quantised."""
        check_rows(output, hidden_states, w1, topk_weights, topk_ids)
        layer = self._ready(hidden_states, w1, w2, topk_ids.shape[1])
        if apply_router_weight_on_input:  # vLLM has multiplied the rows by them
            topk_weights = torch.ones_like(topk_weights)
        rank_tokens = None
        if self.all_gather:
            expert_map, rank_tokens = None, _tokens_of_ranks()
        self.shared.forward(layer, hidden_states, topk_ids, topk_weights, output, expert_map,
                            rank_tokens)


class MoxieRankExperts(MoxieExperts):
    """Those whose rows are this rank's own, and ids those of all experts."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.all_gather = ranks.all_gather_of(get_ep_group().cpu_group)


def _tokens_of_ranks():
    """Of this forward, where vLLM knows."""
    if not is_forward_context_available():
        return None
    metadata = get_forward_context().dp_metadata
    return metadata.local_sizes if metadata is not None else None


class MoxieDispatch(MoEPrepareAndFinalizeNoDPEPModular):
    """What is around experts whose rows go to other ranks: nothing, since MoxieRankExperts take
    them there, and bring the sums back. Like vLLM's own it says nothing of a sum over a tensor
    parallel group, which models may leave out (skip_final_all_reduce): dispatches() takes layers
    alone whose group is one rank, or has other tokens on each, so that vLLM adds up nothing."""

    def __init__(self, ep_size):
        super().__init__()
        self.ep_size = ep_size

    def num_dispatchers(self):
        return self.ep_size


def _lacks():
    """What vLLM has otherwise than it is used here where no import tells, or None."""
    used = [(each.select, each.asked) for each in SELECTIONS]
    for function, names in (*used, (KERNEL, ("prepare_finalize", "fused_experts"))):
        missing = set(names) - _arguments(function)
        if missing:
            return f"{function.__qualname__} has no argument {' and '.join(sorted(missing))}"
    missing = READ - {each.name for each in dataclasses.fields(FusedMoEConfig)}
    if missing:
        return f"{FusedMoEConfig.__name__} has no field {' and '.join(sorted(missing))}"
    for name in ("apply", "workspace_shapes"):
        more = _arguments(getattr(Base, name)) - _arguments(getattr(MoxieExperts, name))
        if more:
            return f"{Base.__name__}.{name} has also the argument {' and '.join(sorted(more))}"
    for theirs, ours in ((Base, MoxieExperts), (MoEPrepareAndFinalizeNoDPEPModular, MoxieDispatch)):
        wanted = getattr(ours, "__abstractmethods__", ())
        if wanted:
            return f"{theirs.__name__} wants {' and '.join(sorted(wanted))}"
    return None


def _arguments(function):
    return set(inspect.signature(function).parameters)


if _lacks():
    raise _misfit(_lacks())


# ---- The entry point ---------------------------------------------------------------------------


def _activation_key(asked, selection):
    """vLLM's, of how rows are quantised: of mxfp4 weights its user may say it, too."""
    key = asked.get("activation_key")
    if key is None and selection.weight_key is not None and get_current_vllm_config_or_none():
        key = USER_ACTIVATION()
    return key


def _preferring_moxie(selection):
    """vLLM's selection of a backend, which first asks whether Moxie takes the layer."""
    select = selection.select

    def selected(*given, **named):
        asked = inspect.signature(select).bind(*given, **named).arguments
        moe = asked[selection.asked[0]]
        if moe.moe_backend != "auto":
            return select(*given, **named)  # somebody has chosen another
        reason = why_not(moe, asked.get("weight_key", selection.weight_key),
                         _activation_key(asked, selection))
        if reason is None:
            moves = dispatches(moe)
            logger.info_once("Moxie computes the experts%s: %s",
                             " and moves their rows" if moves else "", ENGINE.library().path)
            return selection.backend, MoxieRankExperts if moves else MoxieExperts
        logger.warning_once("Moxie leaves experts to vLLM: %s", reason)
        return select(*given, **named)

    return selected


@functools.wraps(KERNEL)
def _kernel(self, prepare_finalize, fused_experts, *given, **named):
    """vLLM's kernel, of experts and what vLLM has chosen around them. It is the experts that say
    whether they move rows: the method that asked for them may not be the one that computes."""
    if isinstance(fused_experts, MoxieRankExperts):
        prepare_finalize = MoxieDispatch(fused_experts.moe_config.moe_parallel_config.ep_size)
    KERNEL(self, prepare_finalize, fused_experts, *given, **named)


@functools.wraps(STEP)
def _step(*given, **named):
    """A step of one of vLLM's workers, which the GPU may not have ended: of what failed in earlier
    replayed graphs nothing else says so."""
    found = STEP(*given, **named)
    ENGINE.check()
    return found


def users_of(function, user=None):
    """vLLM's modules that have it by its name, or of those one."""
    return [module for name, module in list(sys.modules.items())
            if name.startswith("vllm.") and vars(module).get(function.__name__) is function
            and user in (None, module)]


def _replace(function, ours, user=None):
    for module in users_of(function, user):
        setattr(module, function.__name__, ours)


def register():
    """Has Moxie asked for every layer that vLLM's --moe-backend leaves open; MoxieError where there
    is no library that serves. Called again, it does nothing."""
    exchange()
    ENGINE.library()
    for selection in SELECTIONS:
        _replace(selection.select, _preferring_moxie(selection), selection.user)
    modular_kernel.FusedMoEKernel.__init__ = _kernel
    WorkerWrapperBase.execute_model = _step
