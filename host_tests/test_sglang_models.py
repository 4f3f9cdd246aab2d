"""Blocks of experts of SGLang's own models over two and four ranks, with Moxie's experts and
exchange in them, against transformers' blocks of the same weights, which know of no ranks: router,
scaling of its weights, shared experts, ranks of unequal rows and without any.

Wants torch, SGLang and transformers, or exits with 77; with MOXIE_TEST_DEVICE=cuda a GPU for each
rank. sglang_case.py says what else.
"""

import contextlib
import importlib
import importlib.util
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

import test_sglang_ranks as sglang_ranks
import torch_python
from sglang_case import REAL, adapter
from test_sglang_ranks import RANKS, SECONDS

torch_python.require(REAL and importlib.util.find_spec("transformers"),
                     "SGLang and transformers are")

import torch  # noqa: E402
import torch.distributed  # noqa: E402
from sglang.srt.models import qwen2_moe  # noqa: E402
from transformers import AutoConfig  # noqa: E402

import rank_processes  # noqa: E402
from experts_case import DEVICE, ON_CPU, off_by  # noqa: E402

EXPERTS, HIDDEN, INNER = 8, 256, 128
OFF_BY_MAX = 8e-3  # of sums in bf16, routed and shared, against those in float
SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
GROUPS = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
          "routed_scaling_factor": 2.5, "first_k_dense_replace": 0}
QWEN = {"num_experts": EXPERTS, "shared_expert_intermediate_size": INNER, "decoder_sparse_step": 1}
# Of each model: SGLang's block, transformers' and what more its configuration has.
BLOCKS = {
    "deepseek_v2": ("deepseek_v2.DeepseekV2MoE", "deepseek_v2.DeepseekV2Moe", {
        **GROUPS, **SIGMOID, "topk_method": "group_limited_greedy", "scoring_func": "softmax",
        "norm_topk_prob": False}),
    "deepseek_v3": ("deepseek_v2.DeepseekV2MoE", "deepseek_v3.DeepseekV3MoE", {**GROUPS, **SIGMOID}),
    "glm4_moe": ("glm4_moe.Glm4MoeSparseMoeBlock", "glm4_moe.Glm4MoeMoE", GROUPS),
    "minimax_m2": ("minimax_m2.MiniMaxM2MoE", "minimax_m2.MiniMaxM2SparseMoeBlock", {
        "num_local_experts": EXPERTS, "intermediate_size": INNER, "use_routing_bias": True,
        "scoring_func": "sigmoid"}),
    "qwen2_moe": ("qwen2_moe.Qwen2MoeSparseMoeBlock", "qwen2_moe.Qwen2MoeSparseMoeBlock", QWEN),
    "qwen3_moe": ("qwen3_moe.Qwen3MoeSparseMoeBlock", "qwen3_moe.Qwen3MoeSparseMoeBlock", QWEN),
    "qwen3_5_moe_text": ("qwen2_moe.Qwen2MoeSparseMoeBlock", "qwen3_5_moe.Qwen3_5MoeSparseMoeBlock",
                         {**QWEN, "norm_topk_prob": True}),
    "qwen3_next": ("qwen2_moe.Qwen2MoeSparseMoeBlock", "qwen3_next.Qwen3NextSparseMoeBlock", QWEN),
}


def config_of(kind):
    config = AutoConfig.for_model(kind, hidden_size=HIDDEN, moe_intermediate_size=INNER,
                                  num_experts_per_tok=2)
    config.update({**BLOCKS[kind][2], "_experts_implementation": "eager"})
    return config


def reference(kind, config):
    """transformers' block in float, with weights that bf16 has."""
    model, name = BLOCKS[kind][1].split(".")
    models = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    block = getattr(models, name)(config).float().eval()
    for name, weight in block.state_dict().items():
        seeded = torch.Generator().manual_seed(len(name) + weight.numel())
        drawn = torch.randn(weight.shape, generator=seeded) / weight.shape[-1] ** 0.5
        weight.copy_(drawn.bfloat16())
    return block


def load(block, weights, rank):
    """Those of transformers, of which this rank has its experts."""
    own = EXPERTS // RANKS
    mine = slice(rank * own, (rank + 1) * own)
    for name, weight in block.named_parameters():
        if name == "experts.w13_weight":
            given = weights["experts.gate_up_proj"][mine]
        elif name == "experts.w2_weight":
            given = weights["experts.down_proj"][mine]
        elif "gate_up_proj" in name:
            given = torch.cat([weights[name.replace("gate_up", each)] for each in ("gate", "up")])
        else:
            given = weights.get(name, weights.get(f"gate.{name}"))
        assert given.shape == weight.shape, (name, given.shape, weight.shape)
        weight.data.copy_(given)


def made(kind, config):
    """SGLang's block as it makes one, but without a checkpoint."""
    module, name = BLOCKS[kind][0].split(".")
    models = importlib.import_module(f"sglang.srt.models.{module}")
    torch.set_default_dtype(torch.bfloat16)
    try:
        return getattr(models, name)(config=config, layer_id=0).to(DEVICE).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def on_this_device(ours):
    """On a CPU SGLang computes experts otherwise, and has no gate of Qwen's shared one."""
    ways = contextlib.ExitStack()
    if ON_CPU:
        method = type(ours.experts.quant_method)
        ways.enter_context(mock.patch.object(method, "apply", method.forward_cuda))
        ways.enter_context(mock.patch.object(qwen2_moe, "fused_gate_sigmoid_mul_add", gated))
    return ways


def gated(x, weight, shared, summed):
    summed += torch.sigmoid(x @ weight)[:, None] * shared


def check_block(kind, rank):
    config = config_of(kind)
    theirs, ours = reference(kind, config), made(kind, config)
    load(ours, theirs.state_dict(), rank)
    runner = ours.experts.runner
    assert isinstance(runner.fused_func, adapter.ExchangingExperts), runner
    for number, shares in enumerate(((9, 4, 1, 0), (0, 7, 3, 5))):
        seeded = torch.Generator().manual_seed(10 * number + rank)
        x = torch.randn(shares[rank], HIDDEN, generator=seeded).bfloat16()
        with torch.no_grad(), on_this_device(ours):
            seen = ours(x.to(DEVICE).clone())
        assert seen.shape == x.shape, (kind, seen.shape)
        if len(x):
            wanted = theirs(x.float()[None])
            wanted = wanted[0] if isinstance(wanted, tuple) else wanted
            apart = off_by(seen.cpu(), wanted.detach()[0])
            assert apart < OFF_BY_MAX, (kind, shares, apart)


def run_rank(folder, rank):
    sglang_ranks.begin(folder, rank)
    for kind in BLOCKS:
        check_block(kind, rank)
    torch.distributed.destroy_process_group()


class Ranks(unittest.TestCase):
    def check(self, ranks):
        with tempfile.TemporaryDirectory() as folder:
            rank_processes.run(self, __file__, folder, ranks, SECONDS, lambda rank: {
                "MOXIE_TEST_RANKS": str(ranks), "MOXIE_TEST_INDEX": "0" if ON_CPU else str(rank)})

    def test_two(self):
        self.check(2)

    @unittest.skipUnless(ON_CPU or torch.cuda.device_count() >= 4, "torch sees fewer than 4 GPUs")
    def test_four(self):
        self.check(4)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        run_rank(pathlib.Path(sys.argv[2]), int(sys.argv[3]))
    else:
        unittest.main()
