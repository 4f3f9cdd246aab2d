"""hosts/python/moxie/transformers.py: whole models, their logits with moxie against eager; and
bench/transformers.py on a tiny one.

Wants torch and transformers, of the interpreter that runs it or of build/torch (scripts/test makes
that); without them it exits 77. MOXIE_TEST_DEVICE=cuda runs the same models on a GPU.
"""

import contextlib
import copy
import gc
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import pathlib
import runpy
import sys
import tempfile
import threading
import types
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
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402
from transformers.integrations.moe import (  # noqa: E402
    ALL_EXPERTS_FUNCTIONS, use_experts_implementation)

import moxie.transformers as adapter  # noqa: E402
from moxie import MoxieError, abi, gates, modules  # noqa: E402

if os.environ.get("MOXIE_TEST_DEVICE") == "cuda" and not torch.cuda.is_available():
    print("skipped: torch sees no GPU")
    sys.exit(77)

# With an index, as tensors have it: torch.device("cuda") equals none of theirs.
DEVICE = torch.empty(0, device=os.environ.get("MOXIE_TEST_DEVICE", "cpu")).device
ON_CPU = DEVICE.type == "cpu"
torch.set_num_threads(1)  # torch's own wait for each other by spinning, on cores that others use
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


def prompt(tokens=17, batch=2):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 128, (batch, tokens), generator=generator).to(DEVICE)


def logits(model, implementation, ids):
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        return model(ids).logits


def configurations(folder):
    """One of each kind in a folder of transformers/models, of those that need no argument."""
    for code in folder.glob("configuration_*.py"):
        module = importlib.import_module(f"transformers.models.{folder.name}.{code.stem}")
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedConfig) and (
                    kind.__module__ == module.__name__):
                with contextlib.suppress(Exception):
                    yield kind()


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


class Models(Case):
    @unittest.skipUnless(ON_CPU, "the runner on this device has no f32")
    def test_f32(self):
        for name in MODELS:
            with self.subTest(name):
                model, ids = model_of(name), prompt()
                wanted = logits(model, "eager", ids)
                self.assertLess(relative(logits(model, "moxie", ids), wanted), 5e-6)

    def test_16_bit(self):
        """Nobody rounds like another, and a rounding can send a token elsewhere: with the routes of
        the f32 model, the logits are no farther from its logits than those of eager."""
        for name in MODELS:
            for dtype in (torch.bfloat16, torch.float16):
                with self.subTest(name, dtype=dtype):
                    model, ids, routes = model_of(name, dtype), prompt(), []
                    exact = copy.deepcopy(model).float()
                    with routed_as(exact, routes):
                        wanted = logits(exact, "eager", ids)
                    with routed_as(model, routes):
                        eager = logits(model, "eager", ids)
                        seen = logits(model, "moxie", ids)
                    self.assertEqual(seen.dtype, dtype)
                    self.assertLess(relative(seen, wanted), 1.3 * relative(eager, wanted))
                    self.assertLess(relative(seen, eager), 3 * torch.finfo(dtype).eps)

    @unittest.skipUnless(ON_CPU, "the runner on this device has no f32")
    def test_generate(self):
        """Prefill, then one token at a time with a cache."""
        for name in MODELS:
            with self.subTest(name):
                model, ids, out = model_of(name), prompt(tokens=9), {}
                for implementation in ("eager", "moxie"):
                    model.set_experts_implementation(implementation)
                    out[implementation] = model.generate(
                        ids, max_new_tokens=12, do_sample=False, pad_token_id=0,
                        output_logits=True, return_dict_in_generate=True)
                self.assertTrue(torch.equal(out["moxie"].sequences, out["eager"].sequences))
                for seen, wanted in zip(out["moxie"].logits, out["eager"].logits):
                    self.assertLess(relative(seen, wanted), 1e-5)

    @unittest.skipUnless(ON_CPU, "the runner on this device has no f32")
    def test_golden_checkpoint(self):
        golden = load_file(TINY_QWEN3 / "logits_golden.safetensors")
        model = AutoModelForCausalLM.from_pretrained(
            TINY_QWEN3, dtype=torch.float32, experts_implementation="moxie").eval()
        # The golden logits are of a model that was cast to bf16 with its rotary frequencies.
        rotary = model.model.rotary_emb
        rotary.inv_freq = rotary.inv_freq.bfloat16().float()
        with torch.no_grad():
            seen = model(golden["input_ids"].long()[None]).logits[0]
        self.assertLess(relative(seen, golden["logits"]), 5e-6)
        for module in adapter._experts_modules(model):
            self.assertIn(module, adapter._layers)

    def test_from_config(self):
        config = AutoConfig.for_model("mixtral", **MODELS["mixtral"])
        model = AutoModelForCausalLM.from_config(config, experts_implementation="moxie",
                                                 dtype=torch.bfloat16).to(DEVICE)
        with torch.no_grad():
            model(prompt())
        self.assertEqual(sum(module in adapter._layers for module in model.modules()), LAYERS)

    def test_compiled(self):
        model, ids = model_of("qwen3_moe", torch.bfloat16), prompt()
        wanted = logits(model, "moxie", ids)
        # torch 2.11 says so of whatever it compiles
        with torch.no_grad(), mock.patch.object(adapter, "_is_exporting", lambda: True), \
                mock.patch.object(adapter, "_opaque_forward",
                                  wraps=adapter._opaque_forward) as opaque:
            seen = torch.compile(model, backend="eager")(ids).logits
        self.assertTrue(torch.equal(seen, wanted))
        self.assertEqual(opaque.call_count, LAYERS)


class Layers(Case):
    """What is made for a model, when, and what it holds."""

    def test_layers_share_one_instance(self):
        model = model_of("mixtral", torch.bfloat16)
        logits(model, "moxie", prompt())
        layers = [adapter._layers[module] for module in adapter._experts_modules(model)]
        self.assertEqual(len({id(each.shared) for each in layers}), 1)
        self.assertEqual({each.layer.index for each in layers}, set(range(LAYERS)))

    def test_weights_stay_where_they_are(self):
        model = model_of("gpt_oss", torch.bfloat16)
        logits(model, "moxie", prompt())
        for module in adapter._experts_modules(model):
            weights = adapter._layers[module].layer.weights
            self.assertEqual(weights.w1.contents.values.data, module.gate_up_proj.data_ptr())
            self.assertEqual(weights.w2.contents.values.data, module.down_proj.data_ptr())
            self.assertEqual(weights.w1.contents.bias.data, module.gate_up_proj_bias.data_ptr())

    def test_prepared_before_the_first_forward(self):
        model = model_of("deepseek_v3", torch.bfloat16)
        self.assertEqual(adapter.prepare(model), LAYERS - 1)  # the first layer is dense
        made = [adapter._layers[module] for module in adapter._experts_modules(model)]
        logits(model, "moxie", prompt())
        self.assertEqual(made, [adapter._layers[m] for m in adapter._experts_modules(model)])

    def test_what_is_ready_stays(self):
        """Graphs that were captured use its buffers."""
        model, released = model_of("mixtral", torch.bfloat16, num_hidden_layers=1), []
        with mock.patch.object(modules.Allocator, "release", lambda self, address: released.append(
                id(self.held.pop(address)))):
            logits(model, "moxie", prompt())
            adapter.prepare(model)
            adapter.configure()
            adapter.configure(forward_tokens_max=TOKENS_MAX)
            logits(model, "moxie", prompt())
            self.assertEqual(released, [])
            adapter.configure(forward_tokens_max=TOKENS_MAX - 1)
            self.assertTrue(released)

    def test_batch_larger_than_one_call(self):
        model, ids, routes = model_of("qwen3_moe", torch.bfloat16), prompt(tokens=15, batch=3), []
        with routed_as(model, routes):
            wanted = logits(model, "moxie", ids)
        for most in (1, 7, 44, 45):
            adapter.configure(forward_tokens_max=most)
            with routed_as(model, routes):
                seen = logits(model, "moxie", ids)
            if ON_CPU:
                self.assertTrue(torch.equal(seen, wanted), most)
            else:  # which adds up the products of few tokens in another order
                self.assertLess(relative(seen, wanted), 3 * torch.finfo(seen.dtype).eps)
            shared = adapter._layers[adapter._experts_modules(model)[0]].shared
            self.assertEqual(shared.experts.tokens_max, most)

    def test_weights_that_change(self):
        model, ids = model_of("mixtral", torch.bfloat16), prompt()
        first = logits(model, "moxie", ids)
        with torch.no_grad():
            for module in adapter._experts_modules(model):
                module.down_proj.mul_(-2)
        adapter.weights_updated(model)
        second = logits(model, "moxie", ids)
        self.assertFalse(torch.equal(first, second))
        self.assertLess(relative(second, logits(model, "eager", ids)), 0.5)
        model.to(torch.float16)
        self.assertEqual(logits(model, "moxie", ids).dtype, torch.float16)

    def test_a_copy_is_prepared_on_its_own(self):
        model, ids = model_of("mixtral", torch.bfloat16), prompt()
        wanted = logits(model, "moxie", ids)
        other = copy.deepcopy(model)
        self.assertTrue(torch.equal(logits(other, "moxie", ids), wanted))
        for mine, theirs in zip(*map(adapter._experts_modules, (model, other))):
            self.assertIsNot(adapter._layers[mine].shared, adapter._layers[theirs].shared)

    def test_describe(self):
        model = model_of("deepseek_v3", torch.bfloat16)
        names = {f"model.layers.{number}.mlp.experts" for number in range(1, LAYERS)}
        logits(model, "eager", prompt())
        self.assertEqual(adapter.describe(model), dict.fromkeys(names, "eager"))
        model.set_experts_implementation("moxie")
        self.assertEqual(adapter.describe(model), dict.fromkeys(names, "moxie, not prepared yet"))
        adapter.prepare(model)
        self.assertEqual(adapter.describe(model), dict.fromkeys(
            names, "moxie_cpu on cpu" if ON_CPU else "moxie_cuda on sm_90"))

    def each_has_one_of_its_own(self, *models):
        seen = [{adapter._layers[module].shared for module in adapter._experts_modules(model)}
                for model in models]
        self.assertEqual([len(each) for each in seen], [1] * len(models))
        self.assertEqual(len(set.union(*seen)), len(models))

    def test_models_share_nothing(self):
        modules = [toy(Options()) for _ in range(2)]
        for module in modules:
            module.config.num_hidden_layers = 2  # so that there is room for the other
            module(*toy_input())
        self.each_has_one_of_its_own(*modules)

    def test_models_of_one_configuration_share_nothing(self):
        """transformers does not copy it. There is a place left, of the layer that is dense."""
        config, ids = model_of("deepseek_v3").config, prompt()
        both = [AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(DEVICE).eval()
                for _ in range(2)]
        self.assertIs(both[0].config, both[1].config)
        held = torch.nn.ModuleList(both)

        def forward(model):
            logits(model, "moxie", ids)

        ways = {
            "forwards": lambda: [forward(each) for each in both],
            "prepared": lambda: [adapter.prepare(each) for each in both],
            "prepared in one": lambda: adapter.prepare(held),
            "prepared and called": lambda: (adapter.prepare(both[0]), forward(both[1])),
            "inside first": lambda: (adapter.prepare(both[0].model), *map(forward, both)),
            "compiled": lambda: [forward(torch.compile(each, backend="eager")) for each in both],
            "moved": lambda: [forward(each.to(dtype)) for dtype in (torch.float16, torch.bfloat16)
                              for each in both]}
        for name, way in ways.items():
            with self.subTest(name):
                adapter.release(held)
                way()
                self.each_has_one_of_its_own(*both)

    def test_layers_called_alone(self):
        """By no model of transformers: the outermost module has them, or else their options."""
        options = Options()
        options.num_hidden_layers = 3

        class Others(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = torch.nn.ModuleList([toy(options), toy(options)])

            def forward(self, x, ids, weights):
                for layer in self.layers:
                    x = layer(x, ids, weights)
                return x

        first, second = Others(), Others()
        for each in (first, second):
            each(*toy_input())
        self.each_has_one_of_its_own(first, second)
        adapter.release(first)
        for layer in first.layers:
            layer(*toy_input())
        self.each_has_one_of_its_own(first)
        adapter.release(first)
        adapter.prepare(first, top_k=3)
        self.each_has_one_of_its_own(first, second)

    def test_everything_goes_with_the_model(self):
        gc.collect()
        before = len(adapter._shared)
        model = model_of("mixtral", torch.bfloat16)
        logits(model, "moxie", prompt())
        self.assertEqual(len(adapter._shared), before + 1)
        adapter.release(model)
        self.assertEqual(len(adapter._shared), before)
        logits(model, "moxie", prompt())
        del model
        gc.collect()
        self.assertEqual(len(adapter._shared), before)

    def test_another_stream_waits_for_the_last(self):
        first, second = mock.Mock(), mock.Mock()
        allocator = modules.Allocator(DEVICE)
        for stream in (first, first, second):
            allocator.follow(stream, lambda: False)
        allocator.follow(mock.Mock(), lambda: True)
        first.wait_stream.assert_not_called()
        second.wait_stream.assert_called_once_with(first)
        self.assertIs(allocator.stream, second)

    def test_threads_are_torchs(self):
        if not ON_CPU:
            self.skipTest("of a CPU")
        threads = min(2, len(os.sched_getaffinity(0)))  # as many as there are processors at most
        adapter.configure(cpu_threads=None)
        with mock.patch.object(torch, "get_num_threads", return_value=threads):
            module = toy(Options())
            module(*toy_input())
        instance = adapter._layers[module].shared.experts.instance
        self.assertEqual(instance.snapshot()["cpu_threads"][1], str(threads))

    def test_top_k_by_every_name(self):
        for name in adapter._TOP_K_NAMES:
            self.assertEqual(adapter._top_k_of(types.SimpleNamespace(**{name: 5})), 5)

    def test_top_k_of_every_model_there_is(self):
        """Of this transformers; defaults may be None, but their name has to be known."""
        folder, unknown, seen = pathlib.Path(transformers.__file__).parent, [], 0
        for code in sorted(folder.glob("models/*/modeling_*.py")):
            if "@use_experts_implementation" not in code.read_text(encoding="utf-8"):
                continue
            names = {name for config in configurations(code.parent)
                     for name in adapter._TOP_K_NAMES if hasattr(config, name)}
            seen, unknown = seen + 1, unknown + ([] if names else [code.stem])
        self.assertGreater(seen, 20)
        self.assertEqual(unknown, [])

    def test_weights_that_become_others_where_they_lie(self):
        """Of the same address: another type, fewer experts, rows turned to columns."""
        changes = (lambda weight: weight.view(torch.float16), lambda weight: weight[:3],
                   lambda weight: weight.as_strided(weight.shape, (weight[0].numel(), 1,
                                                                   weight.shape[1])))
        for number, change in enumerate(changes):
            with self.subTest(number):
                module, given = toy(Options()), toy_input()
                module(*given)
                before = adapter._layers[module]
                for name in ("gate_up_proj", "down_proj"):
                    getattr(module, name).data = change(getattr(module, name).data)
                if number == 0 and not ON_CPU:  # where rows are of the weights' kind
                    self.refused(module, given, abi.E_CONFIG, "bf16 while weight_format is f16")
                    continue
                module(*given)
                self.assertIsNot(adapter._layers[module], before)

    def test_biases_that_become_others_where_they_lie(self):
        """Of the same address: fewer columns, columns apart from each other, another type."""
        given = toy_input()
        for change, code in ((lambda bias: bias.flatten()[:240].view(6, 40), abi.E_INVALID),
                             (lambda bias: bias.as_strided((6, 48), (1, 6)), abi.E_UNSUPPORTED)):
            module = toy(Options(), has_bias=True)
            module(*given)
            module.gate_up_proj_bias.data = change(module.gate_up_proj_bias.data)
            self.refused(module, given, code, "weights.w1.bias")
        if ON_CPU:  # which takes any type beside the weights'
            module = toy(Options(), has_bias=True)
            first = module(*given)
            module.down_proj_bias.data = module.down_proj_bias.data.view(torch.float16)
            seen = module(*given)
            adapter.release(module)
            self.assertTrue(torch.equal(seen, module(*given)))
            self.assertFalse(torch.equal(seen, first))

    def test_what_is_copied_waits_for_the_last_stream(self):
        """Of a layer that is made or made current on one stream, and used on another."""
        kind, told = modules.KINDS[DEVICE.type], []
        module = toy(Options())
        with mock.patch.dict(modules.KINDS, {DEVICE.type: kind._replace(stream=told.append)}), \
                mock.patch.object(adapter.Shared, "follow_here", lambda self, device: told.append(
                    ("follows", device))):
            adapter.prepare(module, top_k=3)
            adapter.weights_updated(module)
        self.assertEqual(told, [("follows", DEVICE)] * 2)

    def test_buffers_outlive_the_stream_that_used_them(self):
        allocator, stream = modules.Allocator(DEVICE), mock.Mock()
        memory = mock.Mock(is_cuda=True)
        allocator.held[64], allocator.stream = memory, stream
        allocator.release(64)
        memory.record_stream.assert_called_once_with(stream)
        self.assertEqual(allocator.held, {})

    def test_threads_on_streams_take_turns(self):
        """What one waits for has been enqueued: here the first thread is slow to."""
        module, given, told, here = toy(Options()), toy_input(), [], threading.local()
        module(*given)
        shared, second = adapter._layers[module].shared, threading.Event()
        experts, shared.allocator.stream = shared.experts, None

        class Stream:
            cuda_stream = None

            def __init__(self, name):
                self.name = name

            def wait_stream(self, other):
                told.append(f"{self.name} waits for {other.name}")

        def forward(*arguments):
            if here.stream.name == "first":
                threads[1].start()
                second.wait(0.2)
            told.append(f"{here.stream.name} enqueues")
            real(*arguments)

        def work(name):
            here.stream = Stream(name)
            module(*given)
            second.set()

        real, kind = experts.forward, modules.KINDS[DEVICE.type]
        threads = [threading.Thread(target=work, args=(name,)) for name in ("first", "second")]
        with mock.patch.object(experts, "forward", forward), mock.patch.dict(
                modules.KINDS, {DEVICE.type: kind._replace(stream=lambda device: here.stream)}):
            threads[0].start()
            for thread in threads:
                thread.join()
        shared.allocator.stream = None  # which is none of torch's
        self.assertEqual(told, ["first enqueues", "second waits for first", "second enqueues"])

    def test_threads_make_a_layer_once(self):
        module, given, out, both = toy(Options()), toy_input(), [], threading.Barrier(2)

        def recognise(*arguments):
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.2)
            return real(*arguments)

        def work():
            out.append(module(*given))

        real, threads = gates.recognise, [threading.Thread(target=work) for _ in range(2)]
        with mock.patch.object(gates, "recognise", side_effect=recognise) as recognised:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertEqual(recognised.call_count, 1)
        self.assertTrue(torch.equal(*out))


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


class Forms(Case):
    def compare(self, module, given, zeroed=None, bound=4e-3):
        """moxie against batched_mm in f32 of the same numbers."""
        exact = copy.deepcopy(module).float()
        exact.config = copy.copy(module.config)
        exact.config._experts_implementation = "batched_mm"
        x, ids, weights = given
        wanted = exact(x.float(), *(zeroed or (ids.long(), weights.float())))
        self.assertLess(relative(module(x, ids, weights), wanted), bound)

    def test_activations(self):
        named = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu",
                 "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
                 "quick_gelu": "swigluoai", "relu2": "relu2"}
        for act, name in named.items():
            with self.subTest(act):
                module = toy(Options(act, gated=act != "relu2"))
                self.assertEqual(gates.recognise(module, DEVICE)[1]["activation"], name)
                self.compare(module, toy_input())

    def test_gates_of_the_module_itself(self):
        self.compare(toy(Options(), clamped), toy_input())
        self.compare(toy(Options(), clamped_silu), toy_input())

    def test_layouts(self):
        for turned in (False, True):
            for bias in (False, True):
                with self.subTest(turned=turned, bias=bias):
                    self.compare(toy(Options(turned=turned), has_bias=bias), toy_input())

    def test_fewer_experts_than_choices(self):
        """As a rank of expert parallelism may have: an id past its own is nobody's."""
        module, (x, ids, weights) = toy(Options()), toy_input()
        module.num_experts = 2
        for name in ("gate_up_proj", "down_proj"):
            getattr(module, name).data = getattr(module, name).data[:2].clone()
        ids, nobody = ids.clamp(max=2), ids >= 2
        self.compare(module, (x, ids, weights),
                     (ids.masked_fill(nobody, 0), weights.masked_fill(nobody, 0).float()))

    def test_weights_that_are_turned_views(self):
        module = toy(Options())
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(module, name)
            weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)
        self.compare(module, toy_input())

    def test_weights_computed_at_each_access(self):
        module = computed(toy(Options(), has_bias=True), "gate_up_proj", "down_proj",
                          "gate_up_proj_bias", "down_proj_bias")
        for _ in range(3):  # their sum rounds to bf16, that of the reference does not
            self.compare(module, toy_input(), bound=8e-3)
        with torch.nn.utils.parametrize.cached():
            module(*toy_input())
            made, kept = adapter._layers[module], (module.gate_up_proj, module.down_proj)
            module(*toy_input())
        self.assertIs(adapter._layers[module], made)
        adapter.weights_updated(module)  # of memory that was given back: nothing is read there
        self.assertNotIn(module, adapter._layers)
        del kept  # so that they cannot lie where they lay

    def test_each_tensor_is_read_once(self):
        module, read = toy(Options(), has_bias=True), []
        module(*toy_input())
        with mock.patch.object(type(module), "__getattr__", lambda self, name: read.append(name)
                               or torch.nn.Module.__getattr__(self, name), create=True):
            module(*toy_input())
        self.assertEqual(sorted(name for name in read if "proj" in name),
                         sorted(name for name, _ in module.named_parameters()))

    def test_weights_of_other_strides(self):
        """In the same place: a square projection, turned."""
        module, (_, ids, weights) = toy(Options()), toy_input()
        module.gate_up_proj.data = module.random(48, 48).bfloat16().to(DEVICE)
        module.down_proj.data = module.random(48, 24).bfloat16().to(DEVICE)
        given = torch.randn(11, 48, dtype=torch.bfloat16, device=DEVICE), ids, weights
        self.compare(module, given)
        module.gate_up_proj.data = module.gate_up_proj.data.transpose(1, 2)
        if ON_CPU:
            self.compare(module, given)
        else:
            self.refused(module, given, abi.E_UNSUPPORTED, "orientation is 1 for w1 and 0 for w2")

    def test_weights_spread_over_processes(self):
        """What transformers' parallel loading leaves in a module: this process' part is inside."""
        class Spread:
            def __init__(self, part):
                self.part = part

            def to_local(self):
                return self.part

        module = toy(Options(turned=True), has_bias=True)
        wanted = module(*toy_input())
        for name, parameter in list(module.named_parameters()):
            delattr(module, name)
            setattr(module, name, Spread(parameter.detach()))
        adapter.release(module)
        self.assertTrue(torch.equal(module(*toy_input()), wanted))

    def test_ids_and_weights_of_any_type(self):
        module, (x, ids, weights) = toy(Options()), toy_input()
        for ids_dtype in (torch.int32, torch.int64):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                self.compare(module, (x, ids.to(ids_dtype), weights.to(dtype)))

    def test_strided_input(self):
        module, (x, ids, weights) = toy(Options()), toy_input(tokens=20)
        self.compare(module, (x[::2], ids[::2], weights[::2]))
        self.compare(module, (x[:1].expand(20, 40), ids, weights))
        turned = [each.T.contiguous().T for each in (x, ids, weights)]
        self.assertTrue(torch.equal(module(*turned), module(x, ids, weights)))

    def test_no_tokens(self):
        self.assertEqual(toy(Options())(*toy_input(tokens=0)).shape, (0, 40))

    def test_ids_of_no_expert(self):
        """As expert parallelism marks what another rank computes, whatever weight stands there."""
        module, (x, ids, weights) = toy(Options()), toy_input()
        marked = ids.clone()
        marked[::2, 0], marked[1::3, 1], marked[3], marked[4, 2] = 6, 7, 6, -1
        gone = (marked < 0) | (marked >= 6)
        self.compare(module, (x, marked, weights), (ids, weights.masked_fill(gone, 0.0)))
        self.assertEqual(module(x, marked, weights)[3].abs().max(), 0)

    def test_one_expert_of_each_token(self):
        """As an all-to-all hands rows to their experts: top_k 1, beside the model's own."""
        module, (x, ids, weights) = toy(Options()), toy_input()
        self.compare(module, (x, ids, weights))
        self.compare(module, (x, ids[:, :1], weights[:, :1]))

    @unittest.skipUnless(ON_CPU, "the runner on this device has one format")
    def test_input_of_another_type_than_the_weights(self):
        x, ids, weights = toy_input()
        self.assertEqual(toy(Options())(x.float(), ids, weights).dtype, torch.float32)
        self.compare(toy(Options()), (x.float(), ids, weights))


class Refusals(Case):
    def test_training(self):
        model, ids = model_of("mixtral", torch.bfloat16), prompt()
        model.set_experts_implementation("moxie")
        with self.assertRaisesRegex(MoxieError, "MixtralExperts.*gradients.*training mode"):
            model.train()(ids)
        with torch.no_grad():
            wanted = model(ids).logits
        out = model.eval()(ids).logits
        self.assertTrue(torch.equal(out, wanted))
        with self.assertRaisesRegex(MoxieError, "no gradients"):
            out.sum().backward()

    def test_result_with_gradients_is_changed_in_place(self):
        """As models do to the sum of their experts, in eval and without no_grad."""
        module, (x, ids, weights) = toy(Options()).eval(), toy_input()
        wanted = module(x, ids, weights) + 1
        out = module(x.requires_grad_(True), ids, weights)
        out += 1
        self.assertTrue(torch.equal(out, wanted))
        with self.assertRaisesRegex(MoxieError, "no gradients"):
            out.sum().backward()

    def test_training_of_any_part(self):
        for name, _ in toy(Options(), has_bias=True).named_parameters():
            with self.subTest(name):
                module = toy(Options(), has_bias=True)
                getattr(module, name).requires_grad_(True)
                self.refused(module, toy_input(), abi.E_UNSUPPORTED, "gradients.*training mode")
                with self.assertRaisesRegex(MoxieError, "no gradients"):
                    module.eval()(*toy_input()).sum().backward()

    def test_derivatives_in_forward_mode(self):
        """Of the input or a weight; they would be zero."""
        module, (x, ids, weights) = toy(Options()).eval().requires_grad_(False), toy_input()
        pattern = "no derivatives in forward mode: use .*'eager'"
        with forward_ad.dual_level():
            module(x, ids, weights)
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            with torch.no_grad():
                self.refused(module, (dual, ids, weights), abi.E_UNSUPPORTED, pattern)
            down = module.down_proj
            del module.down_proj
            module.down_proj = forward_ad.make_dual(down.detach(), torch.ones_like(down))
            self.refused(module, (x, ids, weights), abi.E_UNSUPPORTED, pattern)

    def test_transforms_of_torch(self):
        module, (x, ids, weights) = toy(Options()).eval().requires_grad_(False), toy_input()
        for transformed in (torch.func.grad(lambda x: module(x, ids, weights).sum()),
                            torch.func.vmap(lambda x: module(x[None], ids[:1], weights[:1])),
                            lambda x: torch.func.jvp(lambda x: module(x, ids, weights), (x,), (x,))):
            self.refused(transformed, (x,), abi.E_UNSUPPORTED, "no transforms of torch.func: use")
        parameters = {name: 2 * each for name, each in module.named_parameters()}
        self.assertFalse(torch.equal(
            torch.func.functional_call(module, parameters, (x, ids, weights)),
            module(x, ids, weights)))

    def test_activation(self):
        self.refused(toy(Options("mish")), toy_input(), abi.E_UNSUPPORTED,
                     "act_fn MishActivation.*silu, gelu, gelu_tanh, swigluoai.*relu2.*grouped_mm")
        self.refused(toy(Options("silu", gated=False)), toy_input(), abi.E_UNSUPPORTED, "not gated")
        self.refused(toy(Options(), lambda self, merged: merged.nothing), toy_input(),
                     abi.E_UNSUPPORTED, "silu, gelu")
        late = lambda self, merged: self.act_fn(merged[..., ::2]).clamp(max=0.5) * merged[..., 1::2]
        self.refused(toy(Options(), late), toy_input(), abi.E_UNSUPPORTED, "silu, gelu")

    def test_clamps_of_another_name(self):
        def clamped_to(gate_least, gate_most, up_most):
            def act(self, merged):
                gate, up = merged.chunk(2, dim=-1)
                return (self.act_fn(gate.clamp(gate_least, gate_most))
                        * up.clamp(-up_most, up_most))
            return act

        none = float("inf")
        for size in (20.0, 1e4):
            for limits in ((-none, size, size), (-none, size, none), (-none, none, size)):
                self.refused(toy(Options(), clamped_to(*limits)), toy_input(), abi.E_UNSUPPORTED,
                             "silu, gelu")
        self.refused(toy(Options(), clamped_to(-20.0, none, none)), toy_input(),
                     abi.E_UNSUPPORTED, "silu, gelu")
        self.assertEqual(gates.recognise(toy(Options(), clamped_to(-none, none, none)), DEVICE)[1],
                         {"activation": "silu"})

    def test_norm_after_each_expert(self):
        module = toy(Options())
        module.has_post_expert_norm = True
        self.refused(module, toy_input(), abi.E_UNSUPPORTED, "normalises")

    def test_types(self):
        self.refused(toy(Options(), dtype=torch.float64), toy_input(dtype=torch.float64),
                     abi.E_UNSUPPORTED, "float64.*bfloat16")
        self.refused(toy(Options()), toy_input(dtype=torch.float64), abi.E_UNSUPPORTED,
                     "hidden_states is torch.float64")
        x, ids, weights = toy_input()
        self.refused(toy(Options()), (x, ids.to(torch.int16), weights), abi.E_UNSUPPORTED,
                     "top_k_index is torch.int16")
        self.refused(toy(Options()), (x[None], ids, weights), abi.E_UNSUPPORTED, r"\[1, 11, 40\]")

    def test_shapes(self):
        module, (x, ids, weights) = toy(Options()), toy_input()
        wanted = module(x, ids, weights)
        for given, seen in (((x, ids[:, :2], weights), r"\[11, 40\], .*\[11, 2\] and .*\[11, 3\]"),
                            ((x, ids, weights[:3]), r"\[11, 3\] and .*\[3, 3\]"),
                            ((x[:4], ids, weights), r"\[4, 40\], .*\[11, 3\] and .*\[11, 3\]"),
                            ((x[:, :32], ids, weights), r"\[11, 32\].*\[tokens, 40\]"),
                            ((x.repeat(1, 2), ids, weights), r"\[11, 80\].*\[tokens, 40\]")):
            self.refused(module, given, abi.E_INVALID, "Toy: hidden_states is .*" + seen)
        self.refused(module, (x, weights, weights), abi.E_UNSUPPORTED, "top_k_index is torch.float")
        self.refused(module, (ids, ids, weights), abi.E_UNSUPPORTED, "hidden_states is torch.int64")
        self.assertTrue(torch.equal(module(x, ids, weights), wanted))

    def test_devices(self):
        x, ids, weights = toy_input()
        self.refused(toy(Options()), (x, ids.to("meta"), weights), abi.E_INVALID,
                     "top_k_index on meta")
        elsewhere = [each.to("meta") for each in (x, ids, weights)]
        self.refused(toy(Options()).to("meta"), elsewhere, abi.E_UNSUPPORTED,
                     "on meta.*cpu and cuda")

    def test_weights_on_two_devices(self):
        for name, where in (("down_proj", "Toy: .* on meta; .*cpu and cuda: .*device_map"),
                            ("down_proj_bias", "Toy: .* on meta")):
            module = toy(Options(), has_bias=True)
            setattr(module, name, torch.nn.Parameter(getattr(module, name).to("meta"),
                                                     requires_grad=False))
            self.refused(module, toy_input(), abi.E_UNSUPPORTED, where)
        module, unlike = toy(Options()), torch.empty(1, device="meta")
        with mock.patch.dict(modules.KINDS, meta=modules.KINDS["cpu"]):
            for path, name in (("", "Toy"), ("its.experts", r"its.experts \(Toy\)")):
                with self.assertRaisesRegex(MoxieError, f"^{name}: .* on {DEVICE}.* and meta; .*one "
                                            "device"):
                    modules.check_module(module, modules.parts_of(module)._replace(w2=unlike), path)

    def test_prepare_names_the_module_in_the_model(self):
        """Whatever of it is refused; a forward knows its class."""
        module, name = toy(Options()), r"experts\.1 \(Toy\)"
        module.down_proj.data = module.down_proj.data.float()
        both = torch.nn.ModuleDict({"experts": torch.nn.ModuleList([toy(Options()), module])})
        with self.assertRaisesRegex(MoxieError, f"^{name}: .*bfloat16, .* down of .*float32"):
            adapter.prepare(both, top_k=3)
        self.refused(module, toy_input(), abi.E_UNSUPPORTED, "^Toy: .*bfloat16, .*float32")

    @unittest.skipUnless(importlib.util.find_spec("accelerate"), "accelerate is missing")
    def test_offloaded_weights_are_prepared_by_no_one(self):
        """Their forwards bring them, and prepare says which they are."""
        import accelerate

        model, ids = model_of("mixtral", torch.bfloat16), prompt()
        wanted = logits(model, "moxie", ids)
        adapter.release(model)
        name = "model.layers.1.mlp.experts"
        accelerate.cpu_offload(model.get_submodule(name), execution_device=DEVICE)
        with self.assertRaisesRegex(MoxieError, rf"^{name} \(MixtralExperts\): the weights are on "
                                    "meta; .*cpu and cuda: .*device_map.*leave prepare") as caught:
            adapter.prepare(model)
        self.assertEqual(caught.exception.code, abi.E_UNSUPPORTED)
        self.assertTrue(torch.equal(logits(model, "moxie", ids), wanted))
        with self.assertRaisesRegex(MoxieError, "^MixtralExperts: the weights are on meta"):
            adapter.prepare(model.get_submodule(name))

    def test_library_that_is_not_there(self):
        for path, code, seen in (("/nowhere/libmoxie.so", abi.E_UNAVAILABLE, "cannot be loaded"),
                                 ("libc.so.6", abi.E_UNSUPPORTED, "no Moxie plugin")):
            adapter.configure(plugin=path)
            self.refused(toy(Options()), toy_input(), code,
                         rf"^{path} .*{seen}.*: name .*configure\(plugin=\.\.\.\) or .*MOXIE_PLUGIN")

    def test_every_reason_of_the_library(self):
        with mock.patch.dict(adapter._settings, timeout_ms=0, activation_format="f64"):
            self.refused(toy(Options()), toy_input(), abi.E_CONFIG,
                         r"(?s)\n  activation_format: .*\n  timeout_ms: |"
                         r"\n  timeout_ms: .*\n  activation_format: ")

    def test_key_that_is_none(self):
        module, given = toy(Options()), toy_input()
        with mock.patch.dict(adapter._settings):
            adapter.configure(timeout=7)
            self.refused(module, given, abi.E_CONFIG, "libmoxie.* no key timeout;")
            module(*given)  # said once, and forgotten

    def test_trace(self):
        with self.assertRaisesRegex(MoxieError, "a trace would not hold") as caught:
            torch.jit.trace(toy(Options()), toy_input())
        self.assertEqual(caught.exception.code, abi.E_UNSUPPORTED)

    def test_export(self):
        with self.assertRaisesRegex(MoxieError, "an exported program would not hold") as caught:
            torch.export.export(toy(Options()), toy_input(), strict=False)
        self.assertEqual(caught.exception.code, abi.E_UNSUPPORTED)

    def test_values_that_no_key_can_have(self):
        before = dict(adapter._settings)
        for value in ([1], torch.tensor(7), b"7", {}):
            with self.assertRaisesRegex(MoxieError, "timeout_ms is .*, a .*: give an int") as caught:
                adapter.configure(timeout_ms=value)
            self.assertEqual(caught.exception.code, abi.E_CONFIG)
        self.assertEqual(adapter._settings, before)

    def test_tokens_of_no_call(self):
        before = dict(adapter._settings)
        for value in (0, -1, 64.0, "64"):
            with self.assertRaisesRegex(MoxieError, "forward_tokens_max is .*: give .* 1 or more, "
                                        "or None for 4096") as caught:
                adapter.configure(forward_tokens_max=value)
            self.assertEqual(caught.exception.code, abi.E_CONFIG)
        self.assertEqual(adapter._settings, before)

    def test_weights_of_other_dimensions(self):
        for name, what in (("gate_up_proj", "gate and up"), ("down_proj", "down")):
            for shape in ((0,), (6 * 48, 40), (6, 1, 48, 40)):
                module = toy(Options())
                getattr(module, name).data = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
                self.refused(module, toy_input(), abi.E_UNSUPPORTED,
                             f"Toy: the weights of {what} are .*; Moxie takes .*three dimensions")

    def test_weights_of_two_types(self):
        module, given = toy(Options(), has_bias=True), toy_input()
        module.down_proj.data = module.down_proj.data.float()
        self.refused(module, given, abi.E_UNSUPPORTED, "Toy: .*bfloat16, .* down of .*float32")
        module.down_proj.data = module.down_proj.data.bfloat16()
        module.down_proj_bias.data = module.down_proj_bias.data.double()
        self.refused(module, given, abi.E_UNSUPPORTED, "Toy: the biases of down are of .*float64")

    def test_trouble_of_the_device_is_not_the_activation(self):
        full = torch.OutOfMemoryError("full")
        with mock.patch.object(adapter.gates, "_same", side_effect=full):
            with self.assertRaisesRegex(torch.OutOfMemoryError, "full"):
                toy(Options())(*toy_input())
        with mock.patch.object(adapter.gates, "_same", side_effect=ValueError("odd")):
            self.refused(toy(Options()), toy_input(), abi.E_UNSUPPORTED,
                         "an activation that Moxie does not have .it raised ValueError: odd")

    def test_what_was_set_is_taken_back(self):
        module, given = toy(Options()), toy_input()
        with mock.patch.dict(adapter._settings):
            before = dict(adapter._settings)
            adapter.configure(timeout_ms=0, forward_tokens_max=1, plugin=before["plugin"])
            self.refused(module, given, abi.E_CONFIG, "timeout_ms")
            adapter.configure(timeout_ms=None, forward_tokens_max=None, log_level=None)
            self.assertEqual(adapter._settings, {**before, "forward_tokens_max": adapter.TOKENS_MAX})
            module(*given)
            adapter.configure(plugin=None)
            self.assertIsNone(adapter._settings["plugin"])

    def test_empty_path_of_the_library(self):
        with self.assertRaisesRegex(MoxieError, "plugin is an empty path") as caught:
            adapter.configure(plugin="")
        self.assertEqual(caught.exception.code, abi.E_CONFIG)

    def test_path_of_the_library(self):
        adapter.configure(plugin=pathlib.Path("/nowhere/libmoxie.so"))
        self.refused(toy(Options()), toy_input(), abi.E_UNAVAILABLE, "/nowhere/libmoxie.so cannot")

    def test_keys_that_the_model_says(self):
        before = dict(adapter._settings)
        for key in adapter.DERIVED:
            with self.assertRaisesRegex(MoxieError, f"{key} cannot be set here: it is") as caught:
                adapter.configure(timeout_ms=7, **{key: 1})
            self.assertEqual(caught.exception.code, abi.E_CONFIG)
        self.assertEqual(adapter._settings, before)
        x, ids, weights = toy_input()
        self.refused(toy(Options()), (x, ids.repeat(1, 11), weights.repeat(1, 11)), abi.E_CONFIG,
                     "(?s)  top_k: .*  top_k cannot be set here: it is the width of top_k_index")

    def on_device(self, key):
        kind = modules.KINDS[DEVICE.type]
        return mock.patch.dict(modules.KINDS, {DEVICE.type: kind._replace(key=lambda device: key)})

    def test_gpu_that_the_library_does_not_know(self):
        with self.on_device("sm_80"):
            self.refused(toy(Options()), toy_input(), abi.E_UNAVAILABLE, r"capability 8\.0.*"
                         r"kernels for cpu and sm_90: .*\.to\('cpu'\).*grouped_mm")

    @unittest.skipUnless(ON_CPU, "the GPU is that one")
    def test_gpu_that_the_library_was_not_built_for(self):
        x, ids, weights = toy_input()
        with self.on_device("sm_90"):
            self.refused(toy(Options()), (x.float(), ids, weights), abi.E_CONFIG,
                         "(?s)input_format cannot be set here: it is the type of hidden_states: "
                         "load the model with dtype=torch.bfloat16")
            if "without sm_90" in str(adapter._library().probe()):
                self.refused(toy(Options()), (x, ids, weights), abi.E_UNAVAILABLE,
                             r"(?s)without sm_90 kernels.*device cannot .*\.to\('cpu'\)")

    def test_capture_of_what_is_not_prepared(self):
        kind = modules.KINDS[DEVICE.type]
        module, given = toy(Options()), toy_input()
        with mock.patch.dict(modules.KINDS, {DEVICE.type: kind._replace(capturing=lambda: True)}):
            self.refused(module, given, abi.E_CAPTURING, r"prepare\(model\)")
        wanted = module(*given)
        with mock.patch.dict(modules.KINDS, {DEVICE.type: kind._replace(capturing=lambda: True)}):
            self.assertTrue(torch.equal(module(*given), wanted))

    def test_experts_of_a_token_unknown(self):
        model = model_of("mixtral", torch.bfloat16)
        with mock.patch.object(adapter, "_TOP_K_NAMES", ()):
            with self.assertRaisesRegex(MoxieError, "top_k="):
                adapter.prepare(model)
            self.assertEqual(adapter.prepare(model, top_k=2), LAYERS)


@unittest.skipIf(ON_CPU, "wants a GPU")
class Enqueued(Case):
    def test_graph(self):
        """A step captured before any forward, and replayed on other tokens."""
        model, first, second = model_of("qwen3_moe", torch.bfloat16), prompt(), prompt().flip(0)
        wanted = [logits(model, "moxie", ids) for ids in (first, second)]
        adapter.release(model)
        adapter.prepare(model)
        ids, graph = first.clone(), torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            out = model(ids, use_cache=False).logits
        for given, want in zip((first, second), wanted):
            ids.copy_(given)
            graph.replay()
            self.assertLess(relative(out, want), 1e-2)

    def test_streams(self):
        """Two in turns, of which the last is at work when the buffers go back."""
        model, ids = model_of("mixtral", torch.bfloat16), prompt()
        wanted = logits(model, "moxie", ids)
        streams = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        seen = []
        for stream in streams * 4:
            with torch.cuda.stream(stream):
                seen.append(logits(model, "moxie", ids))
        adapter.release(model)
        others = [torch.full((1 << 20,), 7, device=DEVICE) for _ in range(16)]
        torch.cuda.synchronize()
        for each in seen:
            self.assertTrue(torch.equal(each, wanted))
        del others


class Benchmark(Case):
    def main(self, *arguments):
        """(exit code, standard output)."""
        text = io.StringIO()
        self.said = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(self.said):
            code = BENCH["main"](["--layers", "1", "--prompt", "2", "--steps", "1", "--rounds", "1",
                                  "--against", "eager", "--device", DEVICE.type, *arguments])
        return code, text.getvalue()

    def test_a_run(self):
        code, text = self.main()
        self.assertEqual(code, 0)
        self.assertRegex(text, r"(?m)^moxie .*\n^eager ")
        self.assertEqual(self.main("--tolerance", "0")[0], 3)

    def test_logits_that_are_no_numbers(self):
        logits_of = BENCH["Contestant"].logits
        for number in ("nan", "inf"):
            def logits_with(contestant, ids):
                found = logits_of(contestant, ids)
                return found * float(number) if contestant.name == "moxie" else found

            with mock.patch.object(BENCH["Contestant"], "logits", logits_with):
                code, text = self.main("--json", "--tolerance", "inf")
            found = json.loads(text, parse_constant=self.fail)
            self.assertEqual((code, found["logits"]["moxie"]),
                             (3, {"whole": None, "median_token": None}))
            self.assertEqual(found["logits"]["eager"]["whole"], 0)

    def test_a_library_that_is_none(self):
        """In words, and before a model is made."""
        refused = MoxieError(abi.E_VERSION, -1, "libc.so.6 is no libmoxie")
        made = AssertionError("a model is made")
        with mock.patch.object(AutoModelForCausalLM, "from_config", side_effect=made):
            with mock.patch.object(adapter, "load", side_effect=refused), \
                    mock.patch.dict(adapter._libraries, clear=True):
                self.assertEqual(self.main(), (1, ""))
            self.assertIn("moxie: libc.so.6 is no libmoxie", self.said.getvalue())
            self.assertEqual(self.main("--plugin", "/nowhere/libmoxie.so"), (1, ""))
        self.assertIn("moxie: /nowhere/libmoxie.so cannot be loaded", self.said.getvalue())

    def test_usage(self):
        """In words, and before a model is made."""
        config = tempfile.NamedTemporaryFile(suffix=".json", mode="w")
        self.addCleanup(config.close)
        config.write('{"model_type": "no_such_model"}')
        config.flush()
        for arguments, words in ((["--against", "egaer"], "egaer is none of "),
                                 (["--against", "moxie"], "moxie is none of "),
                                 (["--against", ","], "nothing is none of "),
                                 (["--config", "/nowhere/config.json"], "/nowhere/config.json"),
                                 (["--config", config.name], "no_such_model"),
                                 (["--shape", "tinny"], "tinny"),
                                 (["--layers", "-1"], "-1 is not 0 or more"),
                                 (["--batch", "0"], "0 is not 1 or more"),
                                 (["--prompt", "-3"], "-3 is not 1 or more"),
                                 (["--steps", "0"], "0 is not 1 or more"),
                                 (["--rounds", "0"], "0 is not 1 or more"),
                                 (["--threads", "-1"], "-1 is not 1 or more"),
                                 (["--forward-tokens-max", "0"], "0 is not 1 or more"),
                                 (["--tolerance", "nan"], "nan is not 0 or more"),
                                 (["--device", "cpu", "--graph"], "--graph needs --device cuda"),
                                 (["--plugin", ""], "an empty path"),
                                 (["--batch", "two"], "two is no whole number")):
            made = AssertionError("a model is made")
            with self.subTest(arguments=arguments), self.assertRaises(SystemExit) as ended, \
                    mock.patch.object(AutoModelForCausalLM, "from_config", side_effect=made):
                self.main(*arguments)
            self.assertEqual(ended.exception.code, 2)
            self.assertIn(words, self.said.getvalue())

    def test_a_model_that_moxie_does_not_run(self):
        """Whose experts, where it has any, have one implementation under every name."""
        config = tempfile.NamedTemporaryFile(suffix=".json", mode="w")
        self.addCleanup(config.close)
        json.dump({"model_type": "llama", "hidden_size": 32, "intermediate_size": 32,
                   "num_attention_heads": 2, "vocab_size": 64}, config)
        config.flush()
        self.assertEqual(self.main("--config", config.name), (1, ""))
        self.assertIn("Moxie ran none or not all of this llama of 1 layers", self.said.getvalue())

    def test_an_implementation_that_is_not_installed(self):
        absent = ImportError("no kernels here")
        with mock.patch.dict(ALL_EXPERTS_FUNCTIONS, grouped_mm=mock.Mock(side_effect=absent)):
            self.assertEqual(self.main("--against", "grouped_mm"), (1, ""))
        self.assertIn("grouped_mm cannot run here: no kernels here", self.said.getvalue())

    def test_layers_are_those_that_ran(self):
        for given, wanted in (("0", 4), ("2", 2)):
            code, text = self.main("--json", "--layers", given)
            self.assertEqual((code, json.loads(text)["layers"]), (0, wanted))

    def test_another_gpu_is_refused(self):
        """Events, streams and synchronize() are of the current one."""
        for name in ("cuda:1", "cpu:0"):
            with self.assertRaises(SystemExit) as ended:
                self.main("--device", name)
            self.assertEqual(ended.exception.code, 2)


if __name__ == "__main__":
    unittest.main()
