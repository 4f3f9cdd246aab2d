"""Moxie as the experts of SGLang: what its Triton runner computes, unquantised and in fp8.

    pip install hosts/python
    export MOXIE_PLUGIN=/opt/lib/libmoxie.so
    python -m sglang.launch_server --model-path Qwen/Qwen3-30B-A3B

SGLang calls register() by itself, in each of its processes (sglang_plugin.py). Where it has chosen
its Triton runner, as --moe-runner-backend auto and triton do, Moxie is asked first; what it cannot
compute stays with that runner, and a warning says why. The weights stay where SGLang has them;
layers that are alike share one instance, and with it the memory between the two products, which is
taken before SGLang shares out what is left.

    python -m sglang.launch_server --model-path Qwen/Qwen3-30B-A3B --tp-size 2 --dp-size 2 \\
        --enable-dp-attention --moe-a2a-backend flashinfer --moe-runner-backend triton

With these two backends, which SGLang has nothing for without Moxie, Moxie's dispatcher also takes
rows to the ranks of their experts and back, between the GPUs of one host; FlashInfer is not used.
"""

import functools
import logging

import sglang
import torch

from moxie import abi, ranks
from moxie.engine import LAYERS_MAX, Borrower, Engine, check_rows
from moxie.modules import E4M3, NUMBERS, keys_of, marks_of, refusal

try:
    from sglang.srt.arg_groups.overrides import (
        declare_resolution, flashinfer_a2a_max_dispatch_tokens_per_rank, model_config_of,
        resolved_view)
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.distributed.device_communicators.pynccl_allocator import use_symmetric_memory
    from sglang.srt.layers.dp_attention import get_dp_global_num_tokens, is_allocation_symmetric
    from sglang.srt.layers.moe.fused_moe_triton.layer import create_moe_dispatcher
    from sglang.srt.layers.moe.moe_runner.runner import MoeRunner
    from sglang.srt.layers.moe.moe_runner.triton import fused_experts_none_to_triton
    from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
    from sglang.srt.layers.moe.token_dispatcher.standard import (
        StandardCombineInput, StandardDispatchOutput)
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend, get_moe_runner_backend
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.runtime_context import (
        get_disagg, get_exec, get_parallel, get_schedule, max_prefill_buffer_tokens)
except (ImportError, AttributeError) as error:
    raise ImportError(f"moxie.sglang fits SGLang 0.5.23, and this is {sglang.__version__}: "
                      f"{error}; leave MOXIE_PLUGIN unset, or take the Moxie that fits") from error

# Activations that have Moxie's names: with a gate, but SiLU, which has more forms; and without.
GATED, PLAIN = ("gelu", "gelu_tanh"), ("relu2",)
ENGINE = Engine("sglang")
logger = logging.getLogger("sglang.moxie")


@functools.lru_cache(maxsize=None)
def _once(log, text, *given):
    log(text, *given)


# ---- What Moxie takes --------------------------------------------------------------------------


def _not_taken(what):
    return refusal(abi.E_UNSUPPORTED, f"moxie.sglang takes no {what}")


def _silu(config):
    """Keys and order of SiLU's forms, as the Triton runner tells them apart."""
    alpha, limit = config.gemm1_alpha, config.gemm1_clamp_limit
    if alpha is not None:
        if limit is None or config.gemm1_beta not in (None, 1.0):
            raise _not_taken(f"gate with alpha {alpha}, limit {limit}, beta {config.gemm1_beta}")
        order = abi.ORDER_INTERLEAVED if config.gate_up_interleaved else abi.ORDER_GATE_UP
        return {"activation": "swigluoai", "activation_alpha": float(alpha),
                "activation_beta": 1.0, "activation_limit": float(limit)}, order
    if limit is not None:  # of what SiLU gives, not of what it takes
        raise _not_taken(f"SiLU whose result has a limit of {limit}")
    if config.swiglu_limit is not None:
        return {"activation": "swigluoai", "activation_alpha": 1.0, "activation_beta": 0.0,
                "activation_limit": float(config.swiglu_limit)}, abi.ORDER_GATE_UP
    return {"activation": "silu"}, abi.ORDER_GATE_UP


def _activation(config, quant):
    """The keys, and how the rows of gate and up lie."""
    name = config.activation
    if not config.is_gated:
        if name not in PLAIN:
            raise _not_taken(f"activation {name!r} without a gate")
        return {"activation": name}, abi.ORDER_PLAIN
    if name == "silu":
        keys, order = _silu(config)
    elif name in GATED:
        keys, order = {"activation": name}, abi.ORDER_GATE_UP
    else:
        raise _not_taken(f"activation {name!r} with a gate")
    return keys, abi.ORDER_INTERLEAVED if quant.fuse_swiglu_interleaved else order


def _scales(quant, order):
    """The weight format, None for the rows' own, and both scales as Moxie has them."""
    for name in ("use_mxfp8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16"):
        if getattr(quant, name):
            raise _not_taken(f"weights of {name}")
    if not quant.use_fp8_w8a8:
        return None, (None, None)
    if quant.a13_scale is not None or quant.a2_scale is not None:
        raise _not_taken("activation scales that are fixed; Moxie scales them by what they are")
    scales = quant.w13_scale, quant.w2_scale
    types = [getattr(each, "dtype", None) for each in (quant.w13_weight, quant.w2_weight, *scales)]
    if types != [E4M3, E4M3, torch.float32, torch.float32]:
        raise _not_taken(f"fp8 of {types[0]} and {types[1]}, scaled by {types[2]} and {types[3]}; "
                         "it takes float8_e4m3fn, scaled by float32")
    if quant.block_shape is not None:
        if list(quant.block_shape) != [128, 128]:
            raise _not_taken(f"fp8 in blocks of {list(quant.block_shape)}; it takes [128, 128]")
        if order == abi.ORDER_INTERLEAVED:  # Moxie has blocks of gate, then of up
            raise _not_taken("scales of blocks in which rows of gate and up take turns")
        return "fp8_block128", scales
    if quant.per_channel_quant:  # they end in a dimension of one
        return "fp8_channel", tuple(each.flatten(1) for each in scales)
    # One of gate and up together, before weights are loaded one of each. No copy: EPLB moves them.
    w1 = scales[0].reshape(len(quant.w13_weight), -1)
    return "fp8_tensor", (w1 if w1.shape[1] == 2 else w1.flatten(), scales[1].flatten())


def _tokens_max():
    """Rows of a usual forward, a chunk of each DP rank's prompts; more of them go in several
    calls."""
    schedule = get_schedule()
    chunk = schedule.chunked_prefill_size
    if chunk is None or chunk <= 0:
        chunk = schedule.max_prefill_tokens
    return chunk * get_parallel().attn_dp_size


def describe(config, quant, number, top_k):
    """What Moxie borrows of a layer: (keys of the configuration, orders, scales).

    config, quant: SGLang's MoeRunnerConfig and TritonMoeQuantInfo. number: torch's type of the
    rows. MoxieError says what is not taken.
    """
    w1, w2 = quant.w13_weight, quant.w2_weight
    if config.no_combine or config.no_combine_keep_router_weight:
        raise _not_taken("results that are not summed")
    if get_exec().deterministic.enable_deterministic_inference:
        raise _not_taken("--enable-deterministic-inference: the bits of a row depend on how many "
                         "rows there are")
    if get_disagg().enable_pdmux:
        raise _not_taken("--enable-pdmux: prefill and replayed decode are on two streams at once, "
                         "and layers share their buffers")
    if config.apply_router_weight_on_input and quant.b13 is not None:  # b13, too, there
        raise _not_taken("router weights on the input of experts with biases of gate and up")
    activation, order = _activation(config, quant)
    weight_format, scales = _scales(quant, order)
    if number not in NUMBERS or (weight_format is None and not w1.dtype == w2.dtype == number):
        raise _not_taken(f"rows of {number} with weights of {w1.dtype} and {w2.dtype}")
    experts, rows, hidden = w1.shape
    inner = rows // 2 if config.is_gated else rows
    if list(w2.shape) != [experts, hidden, inner]:
        raise _not_taken(f"weights of {list(w1.shape)} and {list(w2.shape)}, which do not belong "
                         "together, or are padded")
    name, scaling = NUMBERS[number], config.routed_scaling_factor
    keys = {
        **keys_of(w1.device, weight_format or name, name), "hidden_size": hidden,
        "intermediate_size": inner, "num_experts": experts, "top_k": top_k,
        "forward_tokens_max": _tokens_max(), "num_layers": LAYERS_MAX,
        "routed_scaling_factor": 1.0 if scaling is None else float(scaling),
        "apply_router_weight_on_input": int(config.apply_router_weight_on_input), **activation}
    return keys, (order, abi.ORDER_PLAIN), scales


# ---- The layer ---------------------------------------------------------------------------------


def layers_made():
    """How many layers of SGLang have computed with Moxie in this process, and are still there."""
    return ENGINE.layers()


def _output(x):
    """Where SGLang's own experts would write, for an all-reduce that wants its memory."""
    with use_symmetric_memory(get_parallel().tp_group, disabled=not is_allocation_symmetric()):
        return x.new_empty(x.shape)


def _marks(quant, number, top_k):
    return marks_of((quant.w13_weight, quant.w2_weight, quant.b13, quant.b2, quant.w13_scale,
                     quant.w2_scale), number, top_k)


class FusedExperts(Borrower):
    """What SGLang's MoeRunner calls instead of its fused Triton experts, of one layer."""

    engine, does = ENGINE, "Moxie computes the experts"

    def __init__(self, config, otherwise=None):
        """config: the MoeRunnerConfig. otherwise: SGLang's function, for what Moxie leaves."""
        self.config, self.otherwise = config, otherwise

    def reserve(self):
        """A layer of the weights as they are, for its buffers alone: their numbers may not be there
        yet, so that the first forward makes another."""
        module = self.config.layer
        if module is None or not self.config.top_k or get_exec().features.enable_memory_saver:
            return  # at the first forward then: what is taken now would be released with the weights
        try:
            self._borrow(module.quant_method.get_triton_quant_info(module),
                         self.config.params_dtype, self.config.top_k)
            self.marks = self.layer = None
        except (AttributeError, NotImplementedError) as error:
            logger.debug("no buffers yet: %s", error)
        except abi.MoxieError as error:
            self._unreserved(error)

    def _unreserved(self, error):
        """No harm: weights may become others when loaded."""
        logger.debug("no buffers yet: %s", error)

    def _describe(self, quant, number, top_k):
        return describe(self.config, quant, number, top_k)

    def _refused(self, error, marks):
        """What a warning says once: the layer is SGLang's for good, until other weights come; in a
        capture nobody has looked yet."""
        _once(logger.warning, "Moxie leaves experts to SGLang: %s", str(error))
        self.layer, self.marks = None, None if error.code == abi.E_CAPTURING else marks

    def _tokens_of_ranks(self):
        return None

    def _borrow(self, quant, number, top_k):
        weights, biases = (quant.w13_weight, quant.w2_weight), (quant.b13, quant.b2)
        keys, orders, scales = self._describe(quant, number, top_k)
        self.borrow(_marks(quant, number, top_k), keys, weights, orders, biases, scales)

    def _ready(self, x, quant, top_k):
        """Whether there is a layer of these weights; where there is none a warning has said why."""
        marks = _marks(quant, x.dtype, top_k)
        if marks != self.marks:
            try:
                self._borrow(quant, x.dtype, top_k)
                _once(logger.info, self.does + ": %s", self.engine.library().path)
            except abi.MoxieError as error:
                self._refused(error, marks)
        return self.layer is not None

    @torch.compiler.disable
    def __call__(self, dispatch_output, quant_info, runner_config):
        """SGLang's StandardDispatchOutput to its StandardCombineInput."""
        x, top = dispatch_output.hidden_states, dispatch_output.topk_output
        ids, weights = top.topk_ids, top.topk_weights
        if not self._ready(x, quant_info, ids.shape[-1]):
            return self.otherwise(dispatch_output, quant_info, runner_config)
        y = _output(x)
        check_rows(y, x, quant_info.w13_weight, weights, ids)
        self.shared.forward(self.layer, x, ids, weights, y, None, self._tokens_of_ranks())
        return StandardCombineInput(hidden_states=y)


# ---- Over ranks --------------------------------------------------------------------------------

# Whose blocks of experts leave sums alone that are whole already, call experts for no rows, too, and
# compute their shared experts for the rows of the own rank.
MODELS = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM",
          "Glm4MoeForCausalLM", "Glm4vMoeForConditionalGeneration", "GlmMoeDsaForCausalLM",
          "MiniMaxM2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM",
          "Qwen3NextForCausalLM", "Qwen3VLMoeForConditionalGeneration", "Qwen3_5MoeForCausalLM",
          "Qwen3_5MoeForConditionalGeneration")
# SGLang's arguments that do not go with it, or that nobody has run with it; and what some of them
# may be that is not nothing.
APART = ("cpu_offload_gb", "dwdp_size", "elastic_ep_backend", "enable_deterministic_inference",
         "enable_dynamic_chunking", "enable_eplb", "enable_lora", "enable_pdmux",
         "enable_single_batch_overlap", "enable_torch_compile", "enable_two_batch_overlap",
         "enable_waterfill", "ep_num_redundant_experts", "flashinfer_a2a_dispatch_type",
         "lora_paths", "model_impl", "moe_dp_size", "nnodes", "offload_group_size",
         "speculative_algorithm")
ALLOWED = {"dwdp_size": (1,), "model_impl": ("auto", "sglang"), "moe_dp_size": (1,),
           "nnodes": (1,), "offload_group_size": (-1,)}
NO_OTHER = "--moe-a2a-backend none leaves rows to SGLang"


def _reasons(args):
    """Why Moxie cannot move the rows of a server, by SGLang's view of its arguments."""
    said = {name: getattr(args, name) for name in APART}
    found = [f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
             for name, value in said.items() if value and value not in ALLOWED.get(name, ())]
    models = model_config_of(args).hf_config.architectures or []
    if not any(each in MODELS for each in models):
        found.append(f"a model of {', '.join(models)} (but with {', '.join(MODELS)})")
    return found


def _resolved(server_args, previous):
    """Around handle_a2a_moe, the step in which SGLang, before it starts anything, resolves what
    its all-to-alls want and refuses runners that they have no way into."""
    args = resolved_view(server_args)
    if args.moe_a2a_backend != "flashinfer" or args.moe_runner_backend != "triton":
        previous(server_args)
        return
    reasons = _reasons(args)
    if reasons:
        raise refusal(abi.E_UNSUPPORTED, "moxie.sglang does not move rows between ranks with "
                      f"{'; nor with '.join(reasons)}; {NO_OTHER}")
    # A runner that SGLang has for FlashInfer, so that it looks at everything else.
    declare_resolution(server_args, "moxie.sglang", moe_runner_backend="deep_gemm")
    previous(server_args)
    declare_resolution(server_args, "moxie.sglang", moe_runner_backend="triton")


def moves_rows():
    """Whether this server's rows go by Moxie's dispatcher: each rank has its own tokens then, and
    its layers' results are whole. SGLang's own FlashInfer dispatcher has no way into its Triton
    runner."""
    return get_moe_a2a_backend().is_flashinfer() and get_moe_runner_backend().is_triton()


class ExchangingExperts(FusedExperts):
    """The same of rows that are this rank's own, and ids of the experts of all ranks."""

    does = "Moxie computes the experts and moves their rows"

    def __init__(self, config):
        super().__init__(config)
        if getattr(config.layer, "reduce_results", False):
            raise _not_taken("experts of a model that adds up the results of all ranks, which have "
                             f"different tokens; {NO_OTHER}")
        parallel = get_parallel()
        self.ranks, self.rank = parallel.moe_ep_size, parallel.moe_ep_rank
        # What SGLang has checked its own limits against.
        self.tokens_max = flashinfer_a2a_max_dispatch_tokens_per_rank(max_prefill_buffer_tokens())
        self.all_gather = ranks.all_gather_of(parallel.tp_group.cpu_group)

    def _describe(self, quant, number, top_k):
        keys, orders, scales = super()._describe(quant, number, top_k)
        here = len(quant.w13_weight)
        if here * self.ranks != self.config.num_experts:
            raise _not_taken(f"{here} of {self.config.num_experts} experts on one of {self.ranks} "
                             "ranks; each has the same number")
        is_fp8 = quant.use_fp8_w8a8 and quant.w13_weight.is_cuda
        # Router weights come scaled: see _dispatcher.
        return {**keys, "num_experts": self.config.num_experts, "routed_scaling_factor": 1.0,
                **ranks.exchange_keys(self.ranks, self.rank, self.tokens_max, is_fp8)
                }, orders, scales

    def _refused(self, error, marks):
        raise abi.MoxieError(error.code, error.rank, f"{error.text}; {NO_OTHER}",
                             error.keys) from error

    def _unreserved(self, error):
        """E_UNSUPPORTED is all ranks' alike; after anything else they wait for each other."""
        if error.code != abi.E_UNSUPPORTED:
            self._refused(error, None)

    def _tokens_of_ranks(self):
        """Of this forward, where SGLang knows those of each rank."""
        tokens = get_dp_global_num_tokens()
        if tokens is None or len(tokens) != self.ranks:
            return None
        if max(tokens) > self.tokens_max:  # of whichever rank: so all raise this
            raise refusal(abi.E_INVALID, f"a forward of {max(tokens)} tokens on one rank; there is "
                          f"room for {self.tokens_max}: set "
                          "SGLANG_FLASHINFER_NUM_MAX_DISPATCH_TOKENS_PER_RANK to as many")
        return list(tokens)


class MoxieDispatcher(BaseDispatcher):
    """What SGLang has around experts where rows go to other ranks: nothing, since ExchangingExperts
    take them there, and bring the sums back."""

    def __init__(self, backend):
        super().__init__()
        self.runner_backend = backend

    def dispatch(self, hidden_states, topk_output):
        return StandardDispatchOutput(hidden_states, None, topk_output)

    def combine(self, combine_input):
        return combine_input.hidden_states


# ---- The entry point ---------------------------------------------------------------------------


def _made(_, runner, *given, **named):
    """Behind MoeRunner.__init__, whatever it was given."""
    if runner.fused_func is fused_experts_none_to_triton:
        runner.fused_func = FusedExperts(runner.config, runner.fused_func)
    elif runner.fused_func is None and runner.runner_backend.is_triton() and moves_rows():
        runner.fused_func = ExchangingExperts(runner.config)
    else:
        return
    runner.fused_func.reserve()


def _dispatcher(make, moe_runner_config, quant_method):
    """Around create_moe_dispatcher, behind the layer's MoeRunner."""
    if not moves_rows():
        return make(moe_runner_config, quant_method)
    backend = moe_runner_config.runner_backend
    if backend is None or not backend.is_triton():
        raise _not_taken(f"experts of {type(quant_method).__name__}, whose runner is {backend}; "
                         f"{NO_OTHER}")
    # The layer asks for this next: its router then scales weights, and the model no sums.
    quant_method.fuse_routed_scaling_factor_in_topk = True
    return MoxieDispatcher(backend)


def _forwarded(*given, **named):
    """Behind ModelRunner.forward, which the GPU may not have ended: of what failed in earlier
    replayed graphs nothing else says so."""
    ENGINE.check()


def register():
    """Has Moxie compute what SGLang would with its Triton runner; MoxieError where there is no
    library that serves. SGLang applies the hooks when all plugins have been called."""
    ENGINE.library()
    register_resolution_hook("handle_a2a_moe")(_resolved)
    HookRegistry.register(f"{create_moe_dispatcher.__module__}.create_moe_dispatcher", _dispatcher,
                          HookType.AROUND)
    HookRegistry.register(f"{MoeRunner.__module__}.MoeRunner.__init__", _made, HookType.AFTER)
    HookRegistry.register(f"{ModelRunner.__module__}.ModelRunner.forward", _forwarded, HookType.AFTER)
