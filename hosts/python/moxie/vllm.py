"""Moxie as the experts of vLLM: its fused_moe layers, unquantised and in fp8.

    pip install hosts/python
    export MOXIE_PLUGIN=/opt/lib/libmoxie.so
    vllm serve Qwen/Qwen3-30B-A3B

vLLM calls register() by itself, in each of its processes (vllm_plugin.py). What Moxie cannot
compute stays with vLLM's own experts, and a warning says why. The weights stay where vLLM has them;
layers that are alike share one instance, and with it the memory between the two products.
"""

import inspect
import sys

import torch
import vllm
from vllm.logger import init_logger

from moxie import abi
from moxie.engine import LAYERS_MAX, Borrower, Engine, check_rows
from moxie.modules import NUMBERS, keys_of, marks_of, refusal

try:
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.oracle import fp8, unquantized
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
    from vllm.model_executor.layers.quantization.utils import quant_utils
    from vllm.platforms import current_platform

    Base = modular_kernel.FusedMoEExpertsModular
    STANDARD = modular_kernel.FusedMoEActivationFormat.Standard
    # What weights and rows are quantised as: Moxie's name of it, of None as the rows' type.
    SCHEMES = {
        (None, None): None,
        (quant_utils.kFp8Static128BlockSym, quant_utils.kFp8Dynamic128Sym): "fp8_block128",
        (quant_utils.kFp8StaticChannelSym, quant_utils.kFp8DynamicTokenSym): "fp8_channel",
    }
    # Its selections, and as what vLLM then leaves the weights alone.
    SELECTIONS = (
        (unquantized.select_unquantized_moe_backend, unquantized.UnquantizedMoeBackend.TRITON),
        (fp8.select_fp8_moe_backend, fp8.Fp8MoeBackend.TRITON),
    )
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
    raise ImportError(f"moxie.vllm fits vLLM 0.26, and this is {vllm.__version__}: {error}; leave "
                      "MOXIE_PLUGIN unset, or take the Moxie that fits") from error

ENGINE = Engine("vllm")
logger = init_logger("vllm.moxie")  # beneath vLLM's, so that its settings hold for it


# ---- What Moxie takes --------------------------------------------------------------------------


def _keys(moe, weight_format, device):
    """The configuration of vLLM's FusedMoEConfig."""
    number = NUMBERS[moe.in_dtype]
    return {
        **keys_of(device, weight_format or number, number),
        "hidden_size": moe.hidden_dim, "intermediate_size": moe.intermediate_size_per_partition,
        "num_experts": moe.num_local_experts, "top_k": moe.experts_per_token,
        "forward_tokens_max": moe.max_num_tokens, "num_layers": LAYERS_MAX,
        **ACTIVATIONS[moe.activation][0]}


def _device_here():
    if current_platform.is_cuda():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def why_not(moe, weight_key, activation_key):
    """Why Moxie leaves a layer to vLLM, or None where it takes it.

    moe: vLLM's FusedMoEConfig. The keys are vLLM's, of how weights and rows are quantised.
    """
    batched = moe.moe_parallel_config.use_batched_activation_format
    taken, reason = MoxieExperts.is_supported_config(
        MoxieExperts, moe, weight_key, activation_key,
        modular_kernel.FusedMoEActivationFormat.BatchedExperts if batched else STANDARD)
    if not taken:
        return reason
    gates = [name for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta")
             if getattr(moe, name, None) is not None]
    if gates:
        return f"kernel does not support a gate with {' and '.join(gates)}"
    try:
        keys = _keys(moe, SCHEMES[weight_key, activation_key], _device_here())
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
        return not moe_parallel_config.use_all2all_kernels

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(self, M, N, K, topk, global_num_experts, local_num_experts,
                         expert_tokens_meta, activation):
        """None but y: Moxie has planned its own."""
        return (0,), (0,), (M, K)

    def _scales(self):
        """As Moxie has them: of channels vLLM's end in a dimension of one."""
        scales = self.w1_scale, self.w2_scale
        if self.quant_dtype is None:
            return None, None
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
            weight_format = None
            if self.quant_dtype is not None:
                weight_format = "fp8_block128" if self.block_shape else "fp8_channel"
            keys = {**_keys(self.moe_config, weight_format, x.device), "top_k": top_k}
            orders = ACTIVATIONS[self.moe_config.activation][1], abi.ORDER_PLAIN
            self.borrow(marks, keys, (w1, w2), orders, biases, self._scales())
        return self.layer

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation,
              global_num_experts, expert_map, a1q_scale, a2_scale, workspace13, workspace2,
              expert_tokens_meta, apply_router_weight_on_input):
        """output [M, K] = the weighted sums, of rows [M, K] that are not quantised."""
        check_rows(output, hidden_states, w1, topk_weights, topk_ids)
        layer = self._ready(hidden_states, w1, w2, topk_ids.shape[1])
        if apply_router_weight_on_input:  # vLLM has multiplied the rows by them
            topk_weights = torch.ones_like(topk_weights)
        self.shared.forward(layer, hidden_states, topk_ids, topk_weights, output, expert_map)


# ---- The entry point ---------------------------------------------------------------------------


def _preferring_moxie(select, backend):
    """vLLM's selection of a backend, which first asks whether Moxie takes the layer."""
    def selected(*given, **named):
        asked = inspect.signature(select).bind(*given, **named).arguments
        moe = asked.get("moe_config", asked.get("config"))
        if moe.moe_backend != "auto":
            return select(*given, **named)  # somebody has chosen another
        reason = why_not(moe, asked.get("weight_key"), asked.get("activation_key"))
        if reason is None:
            logger.info_once("Moxie computes the experts: %s", ENGINE.library().path)
            return backend, MoxieExperts
        logger.warning_once("Moxie leaves experts to vLLM: %s", reason)
        return select(*given, **named)

    return selected


def register():
    """Has Moxie asked for every layer that vLLM's --moe-backend leaves open; MoxieError where there
    is no library that serves. Called again, it does nothing."""
    ENGINE.library()
    for select, backend in SELECTIONS:
        ours = _preferring_moxie(select, backend)
        for name, module in list(sys.modules.items()):  # those that have imported it by its name
            if name.startswith("vllm.") and vars(module).get(select.__name__) is select:
                setattr(module, select.__name__, ours)
