"""Models of published sizes with random weights, as transformers makes them."""

import contextlib
from unittest import mock

# The published sizes of each model.
SHAPES = {
    "tiny": ("qwen3_moe", {
        "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 16,
        "moe_intermediate_size": 128, "num_experts_per_tok": 4, "norm_topk_prob": True}),
    "qwen3-30b-a3b": ("qwen3_moe", {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "moe_intermediate_size": 768,
        "num_experts_per_tok": 8, "norm_topk_prob": True}),
    "mixtral-8x7b": ("mixtral", {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "num_experts_per_tok": 2}),
    "gpt-oss-20b": ("gpt_oss", {
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4}),
    "gpt-oss-120b": ("gpt_oss", {
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4,
        "quantization_config": {"quant_method": "mxfp4"}}),
    "deepseek-v3": ("deepseek_v3", {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "n_group": 8, "topk_group": 4, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "max_position_embeddings": 163840,
        # Of engines' own code, that transformers has none of.
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}),
}


def config_of(shape, layers=None):
    """The configuration of one of SHAPES, of so many layers instead of its own where that is
    given."""
    from transformers import AutoConfig
    kind, keys = SHAPES[shape]
    cut = {"num_hidden_layers": layers} if layers else {}
    if layers and kind == "deepseek_v3":
        cut["first_k_dense_replace"] = 1  # of 3 dense layers before the first with experts
    return AutoConfig.for_model(kind, **{**keys, **cut})


def _is_mxfp4(config):
    """Whether a configuration says that its experts' weights are mxfp4, which of gpt-oss' it does."""
    quantised = getattr(config, "quantization_config", None) or {}
    return config.model_type == "gpt_oss" and quantised.get("quant_method") == "mxfp4"


def _packed_experts(config, device):
    """Experts as moxie.transformers keeps them, which transformers would make of 16 bits first:
    random codes, and scales that make weights about as large as other random ones."""
    import torch
    from moxie.transformers_mxfp4 import Mxfp4Experts
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    with torch.device("meta"):
        plain = GptOssExperts(config)
    packed = Mxfp4Experts(config, plain, "experts").to_empty(device=device)
    for name, each in packed.named_parameters():
        if name.endswith("_bias"):
            torch.nn.init.normal_(each, std=config.initializer_range)
        else:
            each.random_(*((0, 256) if name.endswith("_blocks") else (119, 122)))
    return packed


def _making_packed_experts(device):
    """A context in which gpt-oss models are made with them."""
    import torch
    from transformers.models.gpt_oss import modeling_gpt_oss

    def make_mlp(self, config):
        torch.nn.Module.__init__(self)
        self.router = modeling_gpt_oss.GptOssTopKRouter(config)
        self.experts = _packed_experts(config, device)
    return mock.patch.object(modeling_gpt_oss.GptOssMLP, "__init__", make_mlp)


def random_model(config, device, dtype="bfloat16"):
    """The model with random weights, made where it will run."""
    import torch
    from transformers import AutoModelForCausalLM
    torch.manual_seed(0)
    making = _making_packed_experts(device) if _is_mxfp4(config) else contextlib.nullcontext()
    with torch.device(device), making:
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
