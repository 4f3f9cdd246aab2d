"""What the suites of moxie.transformers share: tiny models of random weights, experts in every form
that transformers' interface has, and a configured adapter.

Wants torch and transformers, of the interpreter that runs it or of build/torch (scripts/test makes
that); without them it exits 77. MOXIE_TEST_DEVICE=cuda runs the same models on a GPU.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import runpy
import sys
import unittest
from unittest import mock

import torch_python

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "hosts" / "python"))


def has_transformers():
    if not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        return False
    return int(importlib.metadata.version("transformers").split(".")[0]) >= 5


torch_python.require(has_transformers(), "torch and transformers 5 are")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import torch.nn.utils.parametrize  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402
from transformers.integrations.moe import use_experts_implementation  # noqa: E402

import moxie.transformers as adapter  # noqa: E402
from moxie import MoxieError  # noqa: E402

if os.environ.get("MOXIE_TEST_DEVICE") == "cuda" and not torch.cuda.is_available():
    print("skipped: torch sees no GPU")
    sys.exit(77)

# With an index, as tensors have it: torch.device("cuda") equals none of theirs.
DEVICE = torch.empty(0, device=os.environ.get("MOXIE_TEST_DEVICE", "cpu")).device
ON_CPU = DEVICE.type == "cpu"
BENCH = runpy.run_path(str(ROOT / "bench" / "transformers.py"), run_name="bench_transformers")
routed_as = BENCH["routed_as"]
TINY_QWEN3 = ROOT / "host_tests" / "golden" / "models" / "tiny-qwen3-moe"
LAYERS, TOKENS_MAX = 3, 64
ANY = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
       "num_experts_per_tok": 2}
GROUPED = {**ANY, "num_key_value_heads": 2, "head_dim": 16}
MODELS = {
    "qwen3_moe": {**GROUPED, "intermediate_size": 96, "moe_intermediate_size": 48,
                  "num_experts": 8, "norm_topk_prob": True},
    "qwen2_moe": {**GROUPED, "intermediate_size": 96, "moe_intermediate_size": 48,
                  "shared_expert_intermediate_size": 48, "num_experts": 8},
    "mixtral": {**GROUPED, "intermediate_size": 48, "num_local_experts": 8},
    "gpt_oss": {**GROUPED, "intermediate_size": 48, "num_local_experts": 8, "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "deepseek_v3": {**ANY, "num_key_value_heads": 4, "intermediate_size": 96,
                    "moe_intermediate_size": 48, "n_routed_experts": 8, "n_group": 2,
                    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32,
                    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
                    "v_head_dim": 16, "n_shared_experts": 1},
}


def relative(seen, wanted):
    seen, wanted = seen.double(), wanted.double()
    return ((seen - wanted).norm() / wanted.norm()).item()


def model_of(name, dtype=torch.float32, **more):
    """A tiny model of random weights, large enough for every layer to matter."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(name, **{**MODELS[name], **more})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    return model.to(dtype).to(DEVICE).eval()


def mxfp4(experts, rows, columns):
    """Blocks and scales of random codes, all of them, as large as weights are."""
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(119, 124, blocks.shape[:3], dtype=torch.uint8)


def save_mxfp4_config(config, folder, *left):
    """left: modules that are not quantised; of others OpenAI's files say so, too."""
    others = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
              "lm_head", *left]
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": others}
    config.save_pretrained(folder)


def save_mxfp4(folder):
    """A tiny gpt-oss with random weights, as OpenAI's files are; also its tensors by name."""
    model = model_of("gpt_oss", intermediate_size=96)
    hidden, inner, experts = (getattr(model.config, name) for name in (
        "hidden_size", "intermediate_size", "num_local_experts"))
    tensors = {name: each.data.cpu().bfloat16() for name, each in model.named_parameters()
               if not name.endswith(("gate_up_proj", "down_proj"))}
    for layer in range(LAYERS):
        for name, rows, columns in (("gate_up_proj", 2 * inner, hidden),
                                    ("down_proj", hidden, inner)):
            at = f"model.layers.{layer}.mlp.experts.{name}"
            tensors[at + "_blocks"], tensors[at + "_scales"] = mxfp4(experts, rows, columns)
    save_mxfp4_config(model.config, folder)
    save_file(tensors, pathlib.Path(folder) / "model.safetensors", {"format": "pt"})
    return tensors


def prompt(tokens=17, batch=2):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 128, (batch, tokens), generator=generator).to(DEVICE)


def logits(model, implementation, ids):
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        return model(ids).logits


class Case(unittest.TestCase):
    def setUp(self):
        adapter.configure(plugin=os.environ["MOXIE_PLUGIN"], forward_tokens_max=TOKENS_MAX,
                          cpu_threads=2)
        # What a callback raises is printed, and nothing else.
        unraisable = []
        hook = mock.patch.object(sys, "unraisablehook", lambda it: unraisable.append(it.exc_value))
        hook.start()
        self.addCleanup(lambda: self.assertEqual(unraisable, []))
        self.addCleanup(hook.stop)

    def refused(self, module, given, code, pattern):
        with self.assertRaisesRegex(MoxieError, pattern) as caught:
            module(*given)
        self.assertEqual(caught.exception.code, code)


class Toy(torch.nn.Module):
    """Experts alone, in every form that the interface has; forward is transformers' own."""

    def __init__(self, config):
        super().__init__()
        self.num_experts, self.act_fn = 6, ACT2FN[config.act]
        self.alpha, self.limit = 1.3, 0.7
        wide = 2 * 24 if config.gated else 24
        shapes = {("gate_up" if config.gated else "up") + "_proj": (wide, 40),
                  "down_proj": (40, 24)}
        for name, shape in shapes.items():
            turned = shape[::-1] if config.turned else shape
            self.register_parameter(name, self.random(*turned))
            self.register_parameter(name + "_bias", self.random(shape[0]))

    def random(self, *shape):
        return torch.nn.Parameter(torch.randn(6, *shape) * 0.3, requires_grad=False)

    def forward(self, *_):
        raise AssertionError("eager is not asked for")


class Options:
    """A configuration of Toy's."""

    num_hidden_layers = 1

    def __init__(self, act="silu", gated=True, turned=False, implementation="moxie"):
        self.act, self.gated, self.turned = act, gated, turned
        self._experts_implementation = implementation


def clamped(self, merged):
    gate, up = merged[..., ::2].clamp(max=self.limit), merged[..., 1::2]
    return gate * torch.sigmoid(gate * self.alpha) * (up.clamp(-self.limit, self.limit) + 1)


def clamped_silu(self, merged):
    up, gate = merged.chunk(2, dim=-1)
    return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def toy(options, apply_gate=None, dtype=torch.bfloat16, **flags):
    torch.manual_seed(2)
    methods = {"_apply_gate": apply_gate} if apply_gate else {}
    kind = use_experts_implementation(
        type("Toy", (Toy,), {"__init__": lambda self, config: Toy.__init__(self, config),
                             "forward": Toy.forward, **methods}),
        has_gate=options.gated, is_transposed=options.turned, **flags)
    return kind(options).to(dtype).to(DEVICE)


def toy_input(tokens=11, top_k=3, dtype=torch.bfloat16):
    torch.manual_seed(4)
    ids = torch.rand(tokens, 6).topk(top_k, dim=-1).indices
    return (torch.randn(tokens, 40, dtype=dtype, device=DEVICE), ids.to(DEVICE),
            torch.rand(tokens, top_k, device=DEVICE))


def spread_apart(module, *names):
    """Gives parameters strides, with zeros between their numbers."""
    for name in names:
        each = getattr(module, name)
        each.data = torch.stack([each.data, each.data * 0], -1)[..., 0]


def put_at_odd_addresses(module, *names):
    """As a file that is mapped has tensors behind a header of odd length."""
    for name in names:
        each = getattr(module, name)
        memory = bytearray(each.numel() * each.element_size() + 1)
        moved = torch.frombuffer(memory, dtype=each.dtype, offset=1).view(each.shape)
        assert moved.data_ptr() % 2 == 1
        each.data = moved.copy_(each.data)


class Added(torch.nn.Module):
    """A weight computed at each access, as an adapter that is not merged does."""

    def __init__(self, weight):
        super().__init__()
        self.more = torch.nn.Parameter(torch.randn_like(weight) * 0.3, requires_grad=False)

    def forward(self, weight):
        return weight + self.more


def computed(module, *names):
    for name in names:
        added = Added(getattr(module, name))
        torch.nn.utils.parametrize.register_parametrization(module, name, added)
    return module
