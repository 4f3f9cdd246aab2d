"""hosts/python/moxie/transformers.py: what is made for a model, when, and what it holds.

Wants what transformers_case.py wants.
"""

import contextlib
import copy
import gc
import importlib
import os
import pathlib
import threading
import types
import unittest
from unittest import mock

from transformers_case import (
    DEVICE, LAYERS, ON_CPU, TOKENS_MAX, Case, Options, adapter, logits, model_of, prompt,
    put_at_odd_addresses, relative, routed_as, toy, toy_input)

import torch
import transformers
from transformers import AutoModelForCausalLM

from moxie import MoxieError, abi, gates, modules


def configurations(folder):
    """One of each kind in a folder of transformers/models, of those that need no argument."""
    for code in folder.glob("configuration_*.py"):
        module = importlib.import_module(f"transformers.models.{folder.name}.{code.stem}")
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedConfig) and (
                    kind.__module__ == module.__name__):
                with contextlib.suppress(Exception):
                    yield kind()


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

    def test_what_is_no_model(self):
        words = "^model: a int; want a torch.nn.Module"
        for call in (adapter.describe, adapter.prepare, adapter.weights_updated, adapter.release):
            with self.assertRaisesRegex(MoxieError, words) as caught:
                call(3)
            self.assertEqual(caught.exception.code, abi.E_INVALID)

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

    def test_a_profile_has_it_by_name(self):
        """And nothing is recorded where nobody asks."""
        module, given = toy(Options()), toy_input()
        module(*given)
        with torch.profiler.profile() as profile:
            for _ in range(3):
                module(*given)
        self.assertEqual([each.count for each in profile.key_averages() if each.key == "moxie"], [3])
        with mock.patch.object(modules.profiler, "record_function", side_effect=AssertionError):
            module(*given)

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

    def test_top_k_of_each_layer(self):
        """As HunYuan's configuration may have it."""
        self.assertEqual(adapter._top_k_of(types.SimpleNamespace(moe_topk=[3, 3])), 3)
        with self.assertRaisesRegex(MoxieError, r"moe_topk is \[1, 2\].*run the model once"):
            adapter._top_k_of(types.SimpleNamespace(moe_topk=[1, 2]))

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

    @unittest.skipUnless(ON_CPU, "a GPU's memory is no mapped file")
    def test_weights_at_odd_addresses(self):
        """Numbers of 32 bits are copied, anew when told; others are read where they lie."""
        for dtype in (torch.float32, torch.bfloat16):
            for turned in (False, True):
                module, given = toy(Options(turned=turned), dtype=dtype, has_bias=True), toy_input(
                    dtype=dtype)
                other = copy.deepcopy(module)
                put_at_odd_addresses(module, *(name for name, _ in module.named_parameters()))
                self.assertTrue(torch.equal(module(*given), other(*given)))
                for each in (module, other):
                    each.gate_up_proj.data.mul_(2)
                    each.down_proj_bias.data.add_(1)
                    adapter.weights_updated(each)
                self.assertTrue(torch.equal(module(*given), other(*given)))
                read = adapter._layers[module].layer.weights.w2.contents.values.data
                self.assertEqual(read == module.down_proj.data_ptr(), dtype == torch.bfloat16)

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


if __name__ == "__main__":
    unittest.main()
