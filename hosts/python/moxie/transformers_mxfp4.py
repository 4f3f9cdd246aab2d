"""gpt-oss' experts in mxfp4, which transformers keeps for Moxie as their checkpoint has them.

transformers has a quantizer for such checkpoints, which lays the weights out anew for a library of
kernels, or makes 16 bits of them where that library is not. register() puts one in its place that
does neither for experts whose implementation is "moxie", and for all others is the same.
"""

import torch
from transformers.integrations.moe import use_experts_implementation
from transformers.quantizers import auto
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from moxie import abi
from moxie.modules import named, refusal

PROJECTIONS = "gate_up_proj", "down_proj"
GROUP = 32  # numbers along K that share a scale, two a byte


@use_experts_implementation(is_concatenated=False, has_bias=True)
class Mxfp4Experts(torch.nn.Module):
    """GptOssExperts, each of whose weights [E, K, N] is *_blocks u8 [E, N, K / 32, 16] and *_scales
    u8 [E, N, K / 32] instead: the names and shapes of a checkpoint's tensors.

    Every other implementation than Moxie's computes with 16 bits, which are made of these at each
    forward.
    """

    def __init__(self, config, plain, name):
        super().__init__()
        self.num_experts, self.intermediate_size = plain.num_experts, plain.intermediate_size
        self.hidden_size, self.alpha, self.limit = plain.hidden_size, plain.alpha, plain.limit
        self.plain_gate = type(plain)._apply_gate
        for projection in PROJECTIONS:
            weight = getattr(plain, projection)
            experts, inputs, outputs = weight.shape
            if inputs % GROUP:
                raise refusal(abi.E_UNSUPPORTED, f"{name}: {projection} has {inputs} inputs; mxfp4 "
                              f"has a scale for each {GROUP}: want a multiple")
            shape = experts, outputs, inputs // GROUP
            for suffix, each in (("_blocks", (*shape, GROUP // 2)), ("_scales", shape)):
                self.register_parameter(projection + suffix, torch.nn.Parameter(torch.empty(
                    each, dtype=torch.uint8, device=weight.device), requires_grad=False))
            self.register_parameter(projection + "_bias", getattr(plain, projection + "_bias"))

    def _apply_gate(self, gate_up):
        return self.plain_gate(self, gate_up)

    def _unpacked(self, projection):
        """[E, N, K] in the type of the biases."""
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors
        blocks, scales, bias = (getattr(self, projection + suffix)
                                for suffix in ("_blocks", "_scales", "_bias"))
        return convert_moe_packed_tensors(blocks, scales, dtype=bias.dtype).transpose(1, 2)

    # What transformers' implementations read, each once a forward.
    gate_up_proj = property(lambda self: self._unpacked("gate_up_proj"))
    down_proj = property(lambda self: self._unpacked("down_proj"))

    def forward(self, hidden_states, router_indices, routing_weights):
        """"eager": [T, H], ids [T, k], weights [T, k] to [T, H]; other ids add nothing."""
        gate_up, down = self.gate_up_proj, self.down_proj
        result = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            tokens, slots = torch.where(router_indices == expert)
            inner = self._apply_gate(hidden_states[tokens] @ gate_up[expert].T
                                     + self.gate_up_proj_bias[expert])
            rows = inner @ down[expert].T + self.down_proj_bias[expert]
            rows = rows * routing_weights[tokens, slots, None]
            result.index_add_(0, tokens, rows.to(result.dtype))
        return result


class KeepingMxfp4Quantizer(Mxfp4HfQuantizer):
    """transformers' own, but that experts which Moxie computes stay packed."""

    keeps = False  # whether a model's experts are Mxfp4Experts
    asked = (), {}  # validate_environment's arguments

    def validate_environment(self, *args, **kwargs):
        """Later, where nothing is kept: it asks for what only transformers' kernels need, and
        decides to make 16 bits where that is missing. Which model it is for is not known yet."""
        if self.pre_quantized:
            self.asked = args, kwargs
        else:
            super().validate_environment(*args, **kwargs)

    def _process_model_before_weight_loading(self, model, use_kernels=False, **kwargs):
        if self.pre_quantized:
            if not use_kernels and not self.quantization_config.dequantize:
                self.keeps = self._keep(model)
            if self.keeps:
                return
            super().validate_environment(*self.asked[0], **self.asked[1])
        super()._process_model_before_weight_loading(model, use_kernels=use_kernels, **kwargs)

    def _keep(self, model):
        """Whether there are experts to keep, which are Mxfp4Experts then."""
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
        others = self.get_modules_to_not_convert(
            model, self.quantization_config.modules_to_not_convert, model._keep_in_fp32_modules)
        kept = [(name, each) for name, each in model.named_modules()
                if isinstance(each, GptOssExperts) and should_convert_module(name, others)
                and each.config._experts_implementation == "moxie"]
        for name, each in kept:
            model.set_submodule(name, Mxfp4Experts(each.config, each, named(each, name)))
        return bool(kept)

    def get_weight_conversions(self):
        return [] if self.keeps else super().get_weight_conversions()


def register():
    """Lets transformers load mxfp4 checkpoints by KeepingMxfp4Quantizer, unless somebody else has
    replaced its own."""
    if auto.AUTO_QUANTIZER_MAPPING.get("mxfp4") is Mxfp4HfQuantizer:
        auto.AUTO_QUANTIZER_MAPPING["mxfp4"] = KeepingMxfp4Quantizer
