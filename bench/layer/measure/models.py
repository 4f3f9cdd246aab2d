"""Models of published sizes with random weights, as transformers makes them."""

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


def random_model(config, device, dtype="bfloat16"):
    """The model with random weights, made where it will run."""
    import torch
    from transformers import AutoModelForCausalLM
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
