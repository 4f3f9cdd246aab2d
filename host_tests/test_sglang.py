"""moxie.sglang: layers through SGLang's MoeRunner against plain loops, what Moxie takes, the entry
point.

Wants torch, or exits with 77; sglang_case.py says what else.
"""

import contextlib
import gc
import itertools
import os
import tempfile
import types
import unittest
from unittest import mock

from sglang_case import (
    DETERMINISTIC, DISAGG, FEATURES, FORMS, OUTPUT, REAL, Case, adapter, hooked)

import torch

import experts_case
from experts_case import DEVICE, OFF_BY_MAX, ON_CPU, capturing, off_by, python
from moxie import MoxieError, sglang_plugin
from sglang.srt.layers.moe.moe_runner.runner import MoeRunner
from sglang.srt.layers.moe.utils import MoeRunnerBackend
from sglang.srt.plugins.hook_registry import HookRegistry


class Layers(unittest.TestCase):
    def check(self, case, **more):
        self.assertLess(case.off_by(**more), OFF_BY_MAX[case.scheme])

    def test_activations(self):
        for form in FORMS:
            with self.subTest(form=form):
                self.check(Case(form))

    def test_the_two_forms_of_gelu(self):
        """Whose numbers are too near each other to tell."""
        for form in ("gelu", "gelu_tanh"):
            case = Case(form)
            keys, _, _ = adapter.describe(case.config(), case.quant(), torch.bfloat16, 2)
            self.assertEqual(keys["activation"], form)

    def test_biases(self):
        self.check(Case("gpt-oss", bias=True))

    def test_experts_that_change_places(self):
        """As EPLB has them do: weights and scales are copied to where others were."""
        for scheme in (None, "block", "channel", "tensor"):
            with self.subTest(scheme=scheme):
                case = Case(scheme=scheme)
                runner = case.made()
                before = case.run(runner)
                for each in (*case.weights, *(case.scales if scheme else ())):
                    moved = each.clone()
                    each[0], each[3] = moved[3], moved[0]
                case.ids = torch.where(case.ids == 0, 3, torch.where(case.ids == 3, 0, case.ids))
                self.assertLess(off_by(case.run(runner), before.float()), 1e-3)

    def test_fp8(self):
        for scheme, form in itertools.product(("block", "channel", "tensor"), FORMS):
            if (scheme, form) == ("block", "gpt-oss"):
                continue  # not taken
            with self.subTest(scheme=scheme, form=form):
                self.check(Case(form, scheme, inner=384))

    def test_rows_interleaved_for_its_own_epilogue(self):
        case = Case()
        gate, up = case.weights[0].chunk(2, 1)
        case.weights[0] = torch.stack((gate, up), 2).flatten(1, 2)
        seen = case.run(case.made(), case.quant(fuse_swiglu_interleaved=True))
        self.assertLess(off_by(seen, case.wanted()), OFF_BY_MAX[None])

    def test_more_tokens_than_planned(self):
        self.check(Case(tokens=41))  # 16 were

    def test_no_tokens(self):
        case = Case(tokens=0)
        self.assertEqual(list(case.run(case.made()).shape), [0, case.hidden])

    def test_scaling(self):
        case = Case()
        seen = case.run(case.made(routed_scaling_factor=2.5))
        self.assertLess(off_by(seen, 2.5 * case.wanted()), OFF_BY_MAX[None])
        for factor, wanted in ((None, 1.0), (0.0, 0.0)):
            keys, _, _ = adapter.describe(case.config(routed_scaling_factor=factor), case.quant(),
                                          torch.bfloat16, case.top_k)
            self.assertEqual(keys["routed_scaling_factor"], wanted)

    def test_experts_of_other_ranks(self):
        """SGLang has made their ids -1."""
        case = Case(tokens=9)
        case.ids[::2, 1] = -1
        case.ids[4] = -1
        everybody = torch.arange(-1, case.experts, device=DEVICE).roll(-1)  # -1 stays itself
        self.assertLess(off_by(case.run(case.made(num_experts=2 * case.experts)),
                               case.wanted(everybody)), OFF_BY_MAX[None])

    def test_router_weight_on_input(self):
        case = Case(top_k=1)
        seen = case.run(case.made(apply_router_weight_on_input=True))
        self.assertLess(off_by(seen, case.wanted(on_input=True)), OFF_BY_MAX[None])

    def test_its_rows_stay_as_they_are(self):
        """SGLang lets its own experts write over them, where nobody reads them again."""
        case = Case()
        before = case.x.clone()
        seen = case.run(case.made(inplace=True))
        self.assertTrue(torch.equal(case.x, before))
        self.assertNotEqual(seen.data_ptr(), case.x.data_ptr())

    def test_where_the_results_go(self):
        """Into memory that an all-reduce may want, and never over the rows."""
        x = Case().x.t().contiguous().t()
        for symmetric in (True, False):
            with mock.patch.object(adapter, "is_allocation_symmetric", lambda: symmetric), \
                    mock.patch.object(adapter, "use_symmetric_memory") as memory:
                y = OUTPUT(x)
            memory.assert_called_once_with(None, disabled=not symmetric)
            self.assertTrue(y.is_contiguous() and y.shape == x.shape and y.dtype == x.dtype)
            self.assertNotEqual(y.data_ptr(), x.data_ptr())

    def test_strided_rows_and_wide_ids(self):
        self.check(Case().strided())

    def test_rows_that_do_not_fit(self):
        case = Case()
        runner = case.made()
        for changed in ({"hidden_states": case.x[:, :-8]}, {"topk_ids": case.ids[:4]},
                        {"topk_weights": case.router[:, :1]},
                        {"topk_ids": case.ids[:4], "topk_weights": case.router[:4]}):
            with self.subTest(changed={name: each.shape for name, each in changed.items()}):
                with self.assertRaisesRegex(MoxieError, r"take output and hidden_states"):
                    case.run(runner, **changed)


class Sharing(experts_case.Sharing, unittest.TestCase):
    adapter, case = adapter, Case

    @staticmethod
    def borrower(runner):
        return runner.fused_func

    def test_layers_that_are_alike(self):
        layers, cases = adapter.layers_made(), [Case(tokens=tokens) for tokens in (3, 4, 5)]
        runners = [case.made() for case in cases]
        for case, runner in zip(cases, runners):
            self.assertLess(off_by(case.run(runner), case.wanted()), OFF_BY_MAX[None])
        self.assertEqual((self.more(), adapter.layers_made() - layers), (1, 3))
        other = Case(inner=256)
        runners.append(other.made())
        other.run(runners[-1])
        self.assertEqual((self.more(), adapter.layers_made() - layers), (2, 4))
        del runners, runner
        gc.collect()
        self.assertEqual((self.more(), adapter.layers_made()), (2, layers))

    def test_buffers_before_the_first_forward(self):
        """As soon as a layer is made, so that SGLang shares out what is left."""
        for scheme in (None, "block", "tensor"):
            case = Case(scheme=scheme, inner=512)
            method = types.SimpleNamespace(get_triton_quant_info=lambda module: module.quant)
            module = types.SimpleNamespace(quant_method=method, quant=case.quant())
            if scheme == "tensor":  # before weights are loaded
                module.quant.w13_scale = case.scales[0].reshape(-1, 1).repeat(1, 2)
            gc.collect()  # what SGLang's runners had, which hold themselves
            layers, scales = adapter.layers_made(), [each.clone() for each in case.scales if scheme]
            for each in case.scales:
                if scheme:
                    each.fill_(float("nan"))  # not loaded yet
            runner = case.made(layer=module)
            self.assertEqual((self.more(), adapter.layers_made()), (1, layers))
            shared = runner.fused_func.shared
            held = set(shared.allocator.held)
            for each, loaded in zip(case.scales, scales):
                each.copy_(loaded)
            self.assertLess(off_by(case.run(runner), case.wanted()), OFF_BY_MAX[scheme])
            self.assertIs(runner.fused_func.shared, shared)
            self.assertEqual(set(shared.allocator.held), held)
            adapter.ENGINE.shared.clear()
            with mock.patch.object(FEATURES, "enable_memory_saver", True):
                runner = case.made(layer=module)
            self.assertEqual(self.more(), 0)
            self.assertLess(off_by(case.run(runner), case.wanted()), OFF_BY_MAX[scheme])
            del runner, shared
            adapter.ENGINE.shared.clear()

    def test_no_buffers_where_nothing_is_known(self):
        """And nothing is said: weights may become others when they are loaded."""
        def refused(module):
            raise NotImplementedError
        case = Case(scheme="block")
        later = case.quant(w13_weight=case.dense[0].bfloat16())
        for answer in (refused, lambda module: later):
            module = types.SimpleNamespace(
                quant_method=types.SimpleNamespace(get_triton_quant_info=answer))
            with mock.patch.object(adapter, "logger") as logger:
                runner = case.made(layer=module)
            logger.warning.assert_not_called()
            self.assertEqual(self.more(), 0)
            self.assertLess(off_by(case.run(runner), case.wanted()), OFF_BY_MAX["block"])
            adapter.ENGINE.shared.clear()

    def test_how_many_tokens(self):
        for chunk, ranks, wanted in ((16, 1, 16), (16, 4, 64), (-1, 2, 64), (None, 1, 32)):
            schedule = types.SimpleNamespace(chunked_prefill_size=chunk, max_prefill_tokens=32)
            parallel = types.SimpleNamespace(attn_dp_size=ranks, tp_group=None)
            with mock.patch.object(adapter, "get_schedule", lambda: schedule), \
                    mock.patch.object(adapter, "get_parallel", lambda: parallel):
                keys, _, _ = adapter.describe(Case().config(), Case().quant(), torch.bfloat16, 2)
            self.assertEqual(keys["forward_tokens_max"], wanted)


class Selection(unittest.TestCase):
    """What stays with SGLang, and what is said of it."""

    def run_with(self, case, config, quant, runner=None):
        """What a layer gives, and the warnings."""
        adapter._once.cache_clear()
        runner = runner or hooked(MoeRunnerBackend.TRITON, config)
        runner.fused_func.otherwise = lambda *given: "SGLang's"
        with mock.patch.object(adapter, "logger") as logger:
            seen = [runner.run(case.rows(), quant) for _ in range(2)]
        self.assertEqual(seen, ["SGLang's"] * 2)
        (call,) = logger.warning.call_args_list
        return call[0][1]

    def test_what_is_not_taken(self):
        case, fp8 = Case(), Case(scheme="block")
        half = {"w13_weight": case.weights[0].half()}
        for text, config, quant in (
                ("not summed", {"no_combine": True, "inplace": False}, {}),
                ("activation 'situ' with a gate", {"activation": "situ"}, {}),
                ("activation 'silu' without a gate", {"is_gated": False}, {}),
                ("result has a limit of 7", {"gemm1_clamp_limit": 7.0}, {}),
                ("gate with alpha 1.7", {"gemm1_alpha": 1.7}, {}),
                ("beta 0.5", {"gemm1_alpha": 1.7, "gemm1_clamp_limit": 7.0, "gemm1_beta": 0.5}, {}),
                ("use_int8_w8a16", {}, {"use_int8_w8a16": True}),
                ("weights of use_int4_w4a16", {}, {"use_int4_w4a16": True}),
                ("rows of torch.bfloat16", {}, half),
                ("do not belong together", {}, {"w2_weight": case.weights[1][..., :-8]}),
                ("apply_router_weight_on_input", {"apply_router_weight_on_input": True}, {})):
            with self.subTest(text=text):
                self.assertIn(text, self.run_with(case, case.config(**config), case.quant(**quant)))
        biased = Case(top_k=1, bias=True)
        self.assertIn("router weights on the input of experts with biases", self.run_with(
            biased, biased.config(apply_router_weight_on_input=True), biased.quant()))
        turns = Case("gpt-oss", "block")
        self.assertIn("gate and up take turns", self.run_with(turns, turns.config(), turns.quant()))
        scale = torch.ones(1, device=DEVICE)
        e8m0 = [each.to(torch.float8_e8m0fnu) for each in fp8.scales]
        for text, quant in (
                ("activation scales that are fixed", {"a13_scale": scale}),
                ("blocks of [64, 128]", {"block_shape": [64, 128]}),
                ("scaled by float32", {"w13_scale": e8m0[0], "w2_scale": e8m0[1]}),
                ("scaled by float32", {"w13_scale": None})):
            with self.subTest(text=text):
                self.assertIn(text, self.run_with(fp8, fp8.config(), fp8.quant(**quant)))

    def test_what_promises_the_same_bits(self):
        case = Case()
        with mock.patch.object(DETERMINISTIC, "enable_deterministic_inference", True):
            self.assertIn("--enable-deterministic-inference",
                          self.run_with(case, case.config(), case.quant()))

    def test_two_streams_at_once(self):
        case = Case()
        with mock.patch.object(DISAGG, "enable_pdmux", True):
            self.assertIn("--enable-pdmux", self.run_with(case, case.config(), case.quant()))

    def test_a_library_that_is_not_there(self):
        with mock.patch.dict(os.environ, MOXIE_PLUGIN="/nowhere/libmoxie.so"):
            case = Case()
            self.assertIn("/nowhere/libmoxie.so",
                          self.run_with(case, case.config(), case.quant()))
            with self.assertRaisesRegex(MoxieError, "MOXIE_PLUGIN, or unset it"):
                adapter.register()

    def test_a_layer_that_first_runs_in_a_capture(self):
        """SGLang's runner is captured, and Moxie asked again where none is."""
        case = Case()
        runner = case.made()
        with capturing():
            self.assertIn("graph is being captured",
                          self.run_with(case, case.config(), case.quant(), runner))
        self.assertLess(off_by(case.run(runner), case.wanted()), OFF_BY_MAX[None])

    def test_weights_that_become_others(self):
        """A layer of what came before computes nothing of what came after, until that is back."""
        case, fixed = Case(scheme="block"), {"a13_scale": torch.ones(1, device=DEVICE)}
        runner = case.made()
        first, otherwise = case.run(runner), runner.fused_func.otherwise
        moved = {**fixed, "w13_weight": case.weights[0].clone()}
        self.run_with(case, None, case.quant(**moved), runner)
        self.assertTrue(torch.equal(case.run(runner), first))
        with capturing():
            self.run_with(case, None, case.quant(w13_weight=moved["w13_weight"]), runner)
        runner.fused_func.otherwise = otherwise
        self.assertTrue(torch.equal(case.run(runner), first))

    def test_what_is_refused_is_asked_once(self):
        case = Case()
        with mock.patch.object(adapter, "describe", wraps=adapter.describe) as describe:
            self.run_with(case, case.config(), case.quant(use_int4_w4a16=True))
        describe.assert_called_once()

    def test_other_runners_are_left_alone(self):
        """With LoRA, or of another backend."""
        lora = MoeRunner(MoeRunnerBackend.TRITON, Case().config(), lora_enabled=True)
        for runner in (lora, types.SimpleNamespace(config=None, fused_func=print)):
            before = runner.fused_func
            adapter._made(None, runner)
            self.assertIs(runner.fused_func, before)


@unittest.skipUnless(REAL, "of SGLang itself")
class Module(unittest.TestCase):
    """SGLang's FusedMoE, from its quantisation methods to its dispatcher, in a world of one rank."""

    @classmethod
    def setUpClass(cls):
        from sglang.srt.distributed import parallel_state
        from sglang.srt import runtime_context
        from sglang.srt.server_args import ServerArgs
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, backend="gloo",
            distributed_init_method=f"file://{folder.name}/ranks")
        runtime_context.publish(ServerArgs(model_path="dummy"), role="test",
                                ranks=runtime_context.SpawnRanks(world_rank=0))
        runtime_context.get_parallel().override_permanently(world_group=parallel_state._WORLD)
        parallel_state.initialize_model_parallel(backend="gloo")
        adapter.register()
        HookRegistry.apply_hooks()

    def run_module(self, case, quant_config=None):
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
        with DEVICE:
            module = FusedMoE(
                num_experts=case.experts, hidden_size=case.hidden, intermediate_size=case.inner,
                layer_id=0, top_k=case.top_k, params_dtype=torch.bfloat16,
                quant_config=quant_config, **case.words)
        self.assertIsNotNone(module.runner.fused_func.shared)  # before there are weights
        given = dict(zip(("w13_weight", "w2_weight"), case.weights))
        if case.scheme is not None:
            given.update(zip(("w13_weight_scale_inv", "w2_weight_scale_inv"), case.scales))
        self.assertEqual(given.keys(), dict(module.named_parameters()).keys())
        for name, parameter in module.named_parameters():
            parameter.data.copy_(given[name])
        module.quant_method.process_weights_after_loading(module)
        gc.collect()  # what SGLang's runners of earlier modules had, which hold themselves
        method, layers = type(module.quant_method), adapter.layers_made()
        if ON_CPU and hasattr(method, "forward_cuda"):  # there SGLang has another way
            method = mock.patch.object(method, "apply", method.forward_cuda)
        else:
            method = contextlib.nullcontext()
        with torch.no_grad(), method:
            seen = module(case.x.clone(), case.rows().topk_output)
        self.assertEqual(adapter.layers_made() - layers, 1)
        self.assertLess(off_by(seen, case.wanted()), OFF_BY_MAX[case.scheme])

    def test_its_formats(self):
        from sglang.srt.layers.quantization.fp8 import Fp8Config
        self.run_module(Case())
        self.run_module(Case("relu2"))
        self.run_module(Case(scheme="block"), Fp8Config(
            is_checkpoint_fp8_serialized=True, activation_scheme="dynamic",
            weight_block_size=[128, 128]))


class EntryPoint(experts_case.Found, unittest.TestCase):
    adapter, plugin, group = adapter, sglang_plugin, "sglang.srt.plugins"

    def test_what_does_not_fit_stops_sglang_in_words(self):
        """Which logs exceptions of plugins, and goes on."""
        start = "import sglang_stand_in; sglang_stand_in.install(); "
        ask = ("from moxie import sglang_plugin\ntry: sglang_plugin.register()\n"
               "except Exception: print('it goes on')")
        lacks = ("import sys; del sys.modules[sglang_stand_in.MOE + 'moe_runner.triton']"
                 ".fused_experts_none_to_triton\n")
        ran = python(start + lacks + ask)
        self.assertEqual((ran.returncode, ran.stdout), (1, ""))
        self.assertRegex(ran.stderr, "moxie.sglang: moxie.sglang fits SGLang 0.5.23, and this is "
                         "0.5.23 .*fused_experts_none_to_triton.*; leave MOXIE_PLUGIN unset")
        ran = python(start + "\n" + ask, MOXIE_PLUGIN="/nowhere/libmoxie.so")
        self.assertEqual((ran.returncode, ran.stdout), (1, ""))
        self.assertRegex(ran.stderr, "moxie.sglang: /nowhere/libmoxie.so cannot be loaded")

    def test_every_runner_asks_moxie(self):
        """As SGLang does it: it calls the plugins, and applies their hooks."""
        adapter.register()
        HookRegistry.apply_hooks()
        case = Case()
        runner = MoeRunner(MoeRunnerBackend.TRITON, case.config())
        self.assertIsInstance(runner.fused_func, adapter.FusedExperts)
        adapter._once.cache_clear()
        with mock.patch.object(adapter, "logger") as logger:
            self.assertLess(off_by(case.run(runner), case.wanted()), OFF_BY_MAX[None])
        self.assertIn(os.environ["MOXIE_PLUGIN"], logger.info.call_args[0])


if __name__ == "__main__":
    unittest.main()
