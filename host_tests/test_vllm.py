"""moxie.vllm: layers through vLLM's modular kernel against plain loops, what Moxie takes, the entry
point.

Wants torch, or exits with 77. Where vLLM is installed it is vLLM itself, else what vllm_stand_in.py
has of it. With MOXIE_TEST_DEVICE=cuda it runs on a GPU, and wants vLLM.
"""

import contextlib
import dataclasses
import gc
import itertools
import os
import shutil
import sys
import tempfile
import types
import unittest
from unittest import mock

from vllm_case import (
    ACTIVATIONS, BLOCK, CHANNEL, MXFP4, REAL, Case, adapter, fp8, mxfp4, parallel, quant_utils,
    unquantized)

import torch

import experts_case
import torch_python
from experts_case import DEVICE, OFF_BY_MAX, ON_CPU, capturing, off_by, python
from moxie import MoxieError, abi, vllm_plugin
from moxie.modules import Shared, kind_of
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

if not (REAL or ON_CPU):
    torch_python.skip("vLLM is not installed")


class Layers(unittest.TestCase):
    def check(self, case, **more):
        self.assertLess(case.off_by(**more), OFF_BY_MAX[case.scheme])

    def test_activations(self):
        for activation in ACTIVATIONS:
            with self.subTest(activation=activation):
                self.check(Case(activation))

    def test_biases(self):
        self.check(Case(MoEActivation.SWIGLUOAI, bias=True))

    def test_fp8(self):
        for scheme, activation in itertools.product(("block", "channel"), ACTIVATIONS):
            if (scheme, activation) == ("block", MoEActivation.SWIGLUOAI):
                continue  # not taken
            with self.subTest(scheme=scheme, activation=activation):
                self.check(Case(activation, scheme=scheme, inner=384))

    def test_mxfp4(self):
        """Of gpt-oss, with its biases, and of the others."""
        for activation in ACTIVATIONS:
            with self.subTest(activation=activation):
                self.check(Case(activation, scheme="mxfp4", bias=True))
        self.check(Case(MoEActivation.SWIGLUOAI, scheme="mxfp4", inner=96, tokens=41))

    def test_fp8_in_other_blocks(self):
        case = Case(scheme="block", inner=256)
        quant = case.quant(block_shape=(64, 64))
        with mock.patch.object(case, "quant", lambda: quant):
            with self.assertRaisesRegex(MoxieError, r"blocks of \[64, 64\].*MOXIE_PLUGIN"):
                case.off_by()

    def test_more_tokens_than_planned(self):
        self.check(Case(tokens=41))  # 16 were

    def test_experts_of_other_ranks(self):
        """Ids are everybody's, -1 stands for those of others."""
        case = Case(tokens=9, experts=4)
        expert_map = torch.tensor([-1, 2, -1, 0, 1, -1, 3], dtype=torch.int32, device=DEVICE)
        case.ids = torch.tensor([[token % 7, (token + 3) % 7] for token in range(9)],
                                dtype=torch.int32, device=DEVICE)
        self.check(case, expert_map=expert_map)

    def test_rows_that_fill_up_a_graph(self):
        """Whose ids are -1, with vLLM 0.33 by default."""
        case = Case(tokens=9, experts=4)
        case.ids[5:] = -1
        self.check(case)
        self.check(case, expert_map=torch.tensor([3, -1, 0, 1, 2], dtype=torch.int32,
                                                 device=DEVICE))

    def test_router_weight_on_input(self):
        self.check(Case(top_k=1), on_input=True)

    def test_strided_rows_and_wide_ids(self):
        case = Case().strided()
        output = torch.full((case.tokens, case.hidden), float("nan"), dtype=torch.bfloat16,
                            device=DEVICE)
        self.apply(adapter.MoxieExperts(case.moe(), case.quant()), case, output=output)
        self.assertLess(off_by(output, case.wanted()), OFF_BY_MAX[None])

    def apply(self, experts, case, **changed):
        given = dict(
            output=torch.empty(case.tokens, case.hidden, dtype=torch.bfloat16, device=DEVICE),
            hidden_states=case.x, w1=case.weights[0], w2=case.weights[1],
            topk_weights=case.router, topk_ids=case.ids, activation=case.activation,
            global_num_experts=case.experts, expert_map=None, a1q_scale=None, a2_scale=None,
            workspace13=None, workspace2=None, expert_tokens_meta=None,
            apply_router_weight_on_input=False)
        experts.apply(**{**given, **changed})

    def test_rows_that_do_not_fit(self):
        case = Case()
        experts = adapter.MoxieExperts(case.moe(), case.quant())
        short = torch.empty(case.tokens, case.hidden - 8, dtype=torch.bfloat16, device=DEVICE)
        for changed in ({"hidden_states": short}, {"output": short}, {"output": short[:4]},
                        {"output": case.x.float()}, {"topk_ids": case.ids[:4]},
                        {"topk_weights": case.router[:, :1]},
                        {"topk_ids": case.ids[:4], "topk_weights": case.router[:4]}):
            with self.subTest(changed={name: each.shape for name, each in changed.items()}):
                with self.assertRaisesRegex(MoxieError, r"take output and hidden_states"):
                    self.apply(experts, case, **changed)
        with self.assertRaisesRegex(MoxieError, "expert_map"):
            self.apply(experts, case,
                       expert_map=torch.zeros(8, dtype=torch.int64, device=DEVICE))

    @unittest.skipUnless(hasattr(adapter.Base, "post_gemm2_hook"), "this vLLM has none")
    def test_rows_before_they_are_added_up(self):
        """Which a model's own layer may ask for when the kernel is there."""
        case = Case()
        kernel = case.made()
        kernel.fused_experts.post_gemm2_hook = lambda rows, output: output
        with self.assertRaisesRegex(MoxieError, "post_gemm2_hook.*MOXIE_PLUGIN"):
            case.run(kernel)

    def test_scales_of_another_type(self):
        case = Case(scheme="block")
        case.scales = [each.to(torch.float8_e8m0fnu) for each in case.scales]
        with self.assertRaisesRegex(MoxieError, "takes float32"):
            case.run(case.made())


class Sharing(experts_case.Sharing, unittest.TestCase):
    adapter, case = adapter, Case

    @staticmethod
    def borrower(kernel):
        return kernel.fused_experts

    def test_layers_that_are_alike(self):
        layers, cases = adapter.layers_made(), [Case(tokens=tokens) for tokens in (3, 4, 5)]
        kernels = [case.made() for case in cases]
        for case, kernel in zip(cases, kernels):
            self.assertLess(off_by(case.run(kernel), case.wanted()), OFF_BY_MAX[None])
        self.assertEqual(self.more(), 1)
        other = Case(inner=256)
        kernels.append(other.made())
        other.run(kernels[-1])
        self.assertEqual(self.more(), 2)
        with mock.patch("moxie.experts.Experts.has_room", return_value=False):
            kernels.append(cases[0].made())
            cases[0].run(kernels[-1])
        self.assertEqual(self.more(), 3)
        self.assertEqual(adapter.layers_made() - layers, 5)
        del kernels, kernel
        gc.collect()
        self.assertEqual((self.more(), adapter.layers_made()), (3, layers))

    def test_every_call_follows_the_last_one_s_stream(self):
        case = Case()
        kernel = case.made()
        with mock.patch("moxie.modules.Allocator.follow") as follow:
            case.run(kernel)
            case.run(kernel)
        kind = kind_of(DEVICE)
        self.assertEqual(follow.call_args_list,
                         [mock.call(kind.stream(DEVICE), kind.capturing)] * 2)

    def test_no_layer_is_made_in_a_capture(self):
        case = Case()
        with capturing(), self.assertRaises(MoxieError) as caught:
            case.run(case.made())
        self.assertEqual(caught.exception.code, abi.E_CAPTURING)

    def test_no_layer_ends_in_a_capture(self):
        with mock.patch("moxie.modules.Experts") as made:
            Shared(None, {}, "test", DEVICE)
        self.assertIs(made.call_args.args[-1], kind_of(DEVICE).capturing)


@contextlib.contextmanager
def served():
    """Whatever this machine is, Moxie takes layers on DEVICE."""
    with mock.patch.object(adapter.MoxieExperts, "_supports_current_device", lambda: True), \
            mock.patch.object(adapter, "_device_here", lambda: DEVICE):
        yield


def configured(quant, cpu_offload_gb=0):
    """A model in vLLM's configuration of it; quant: how it is quantised."""
    config = types.SimpleNamespace(quant_config=quant, offload_config=types.SimpleNamespace(
        uva=types.SimpleNamespace(cpu_offload_gb=cpu_offload_gb)))
    return mock.patch.object(adapter, "get_current_vllm_config_or_none", lambda: config)


class Selection(unittest.TestCase):
    def why_not(self, scheme=(None, None), **more):
        activation = more.pop("activation", MoEActivation.SILU)
        with served():
            return adapter.why_not(Case(activation).moe(**more), *scheme)

    def test_what_is_taken(self):
        for activation in ACTIVATIONS:
            self.assertIsNone(self.why_not(activation=activation))
        for scheme, activation in itertools.product((BLOCK, CHANNEL, MXFP4), ACTIVATIONS):
            with self.subTest(scheme=scheme, activation=activation):
                reason = self.why_not(scheme, activation=activation)
                if scheme == BLOCK and activation == MoEActivation.SWIGLUOAI:
                    self.assertIn("gate and up take turns", reason)
                else:
                    self.assertIsNone(reason)
        # A part that vLLM makes a multiple of 32.
        self.assertIsNone(self.why_not(MXFP4, intermediate_size=144))

    def test_what_is_not(self):
        if ON_CPU:
            self.assertIn("device", adapter.why_not(Case().moe(), None, None))
        self.assertIn("quantization scheme", self.why_not((MXFP4[0], BLOCK[1])))
        tensor = quant_utils.kFp8StaticTensorSym
        for text, reason in (
                ("quantization scheme", self.why_not((tensor, tensor))),
                ("SWIGLUSTEP", self.why_not(activation=MoEActivation.SWIGLUSTEP)),
                ("LoRA", self.why_not(is_lora_enabled=True)),
                ("a layer with swiglu_limit and swiglu_alpha",
                 self.why_not(swiglu_limit=7.0, swiglu_alpha=1.0)),
                ("hidden_size", self.why_not(hidden_dim=-8)),
                ("intermediate_size", self.why_not(intermediate_size=-8))):
            self.assertIn(text, reason or "")
        ours = parallel(2, 0, dp_size=2, all2all_backend="deepep_high_throughput")
        self.assertIn("parallel config", self.why_not(moe_parallel_config=ours))
        ours = parallel(2, 0, dp_size=2)
        self.assertIn("1 experts on 2 ranks", self.why_not(
            moe_parallel_config=ours, num_experts=1, num_local_experts=1, experts_per_token=1))
        for more in ({"dp_size": 2}, {"tp_size": 2}):  # of vLLM 0.32
            ours = parallel(2, 0, all2all_backend="passthrough", **more)
            if hasattr(ours, "use_passthrough_all2all"):
                self.assertIn("parallel config", self.why_not(moe_parallel_config=ours) or "")
        with configured(None, cpu_offload_gb=1):
            self.assertIn("--cpu-offload-gb", self.why_not())
        with mock.patch.object(type(ours), "use_batched_activation_format", True):
            self.assertIn("batched", self.why_not())

    def test_what_configurations_say(self):
        """Of vLLM's fields those that experts need not know, and any that came since."""
        moe = Case().moe()
        names = {each.name for each in dataclasses.fields(moe)}
        for name, value in (("elastic_ep_max_dp_size", 2), ("has_hash_routing", True),
                            ("require_decomposed_backend", True), ("shared_expert_prefix", "a.b"),
                            ("skip_final_all_reduce", True)):
            if name in names:
                self.assertIsNone(self.why_not(**{name: value}), name)
        for name in ("activation_situ_beta", "tp_shard_with_padding"):
            if name in names:
                self.assertIn(f"a layer with {name}", self.why_not(**{name: 1}) or "")
        later = dataclasses.make_dataclass("FusedMoEConfig", [
            ("novice_experts", object, dataclasses.field(default=None)),
            ("plain", object, dataclasses.field(default=None))], bases=(type(moe),))
        given = {name: getattr(moe, name) for name in names
                 if type(moe).__dataclass_fields__[name].init}
        with served():
            for number in (None, 3):
                found = later(**given, novice_experts=number)
                self.assertEqual(adapter.why_not(found, None, None),
                                 "kernel does not support a layer with FusedMoEConfig")
                with mock.patch.object(adapter, "FusedMoEConfig", later):
                    self.assertEqual(adapter.why_not(found, None, None), number and
                                     "kernel does not support a layer with novice_experts")

    def test_blocks_of_another_size(self):
        """Which vLLM has one key for: as each of its two configurations of fp8 says it."""
        for blocks in ([128, 128], [64, 128], [128, 64], None):
            checkpoint = Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=blocks)
            weights = types.SimpleNamespace(block_structure=blocks)
            compressed = types.SimpleNamespace(target_scheme_map={
                "Linear": {"weights": types.SimpleNamespace(block_structure=None)},
                "RoutedExperts": {"weights": weights}})
            for quant in (checkpoint, compressed):
                with self.subTest(blocks=blocks, quant=quant), configured(quant):
                    reason = self.why_not(BLOCK)
                    self.assertIsNone(self.why_not(CHANNEL))
                if blocks in ([128, 128], None):
                    self.assertIsNone(reason)
                else:
                    self.assertIn(f"fp8 weights in blocks of {blocks}", reason or "")

    def test_backends_that_the_environment_names(self):
        """By the variables that vLLM reads of fp8 alone."""
        use, moe, marlin = (*adapter.DEEP_GEMM, "VLLM_TEST_FORCE_FP8_MARLIN")
        read = marlin if hasattr(adapter.envs, marlin) else ""  # up to vLLM 0.28
        for values, said in (
                ({}, ""), ({marlin: "0"}, ""), ({use: "0"}, ""), ({moe: "0"}, ""),
                ({use: "0", moe: "1"}, ""), ({use: "1", moe: "0"}, ""), ({use: "1"}, use),
                ({moe: "1"}, moe), ({use: "1", moe: "1"}, f"{use} and {moe}"),
                ({marlin: "1"}, read), ({use: "0", marlin: "1"}, read)):
            with mock.patch.dict(os.environ, values), self.subTest(values=values):
                for name in {use, moe, marlin} - values.keys():
                    os.environ.pop(name, None)
                for scheme in (BLOCK, CHANNEL):
                    self.assertEqual((self.why_not(scheme) or "").split(":")[0], said)
                self.assertIsNone(self.why_not())
                self.assertIsNone(self.why_not(MXFP4))

    def test_a_library_that_is_not_there(self):
        with mock.patch.dict(os.environ, MOXIE_PLUGIN="/nowhere/libmoxie.so"):
            self.assertIn("/nowhere/libmoxie.so", self.why_not())
            with self.assertRaisesRegex(MoxieError, "MOXIE_PLUGIN, or unset it"):
                adapter.register()


@unittest.skipUnless(REAL and ON_CPU, "vLLM itself, on a CPU")
class WholeLayers(unittest.TestCase):
    """From what a model asks vLLM for to a result: configuration, method, weights, runner."""

    @classmethod
    def setUpClass(cls):
        from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
        from vllm.distributed import parallel_state
        adapter.register()
        cls.config = VllmConfig(device_config=DeviceConfig("cpu"))
        cls.config.model_config = types.SimpleNamespace(
            dtype=torch.bfloat16, quantization_config=None, is_moe=True)
        current = set_current_vllm_config(cls.config)
        current.__enter__()
        cls.addClassCleanup(current.__exit__, None, None, None)
        store = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, store)
        parallel_state.init_distributed_environment(1, 0, f"file://{store}/store", 0, "gloo")
        cls.addClassCleanup(parallel_state.destroy_distributed_environment)
        parallel_state.initialize_model_parallel()
        cls.addClassCleanup(parallel_state.destroy_model_parallel)

    def layer(self, case, quant, number=itertools.count()):
        from vllm.model_executor.layers.fused_moe import layer
        make = getattr(layer, "FusedMoEFactory", None) or layer.FusedMoE  # of vLLM 0.26
        with served():
            return make(
                num_experts=case.experts, top_k=case.top_k, hidden_size=case.hidden,
                intermediate_size=case.inner, params_dtype=torch.bfloat16, quant_config=quant,
                prefix=f"layers.{next(number)}.experts", activation=case.activation.value,
                has_bias=case.biases[0] is not None,
                custom_routing_function=lambda *given, **named: (case.router, case.ids))

    def test_results(self):
        from vllm.forward_context import set_forward_context
        from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
        blocks = Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=[128, 128])
        gate = MoEActivation.SWIGLUOAI
        for case, quant, suffix in (
                (Case(), None, ""), (Case(gate, bias=True), None, ""),
                (Case(scheme="block", inner=256), blocks, "_scale_inv"),
                (Case(gate, scheme="mxfp4", bias=True), GptOssMxfp4Config(), "_scale")):
            with self.subTest(scheme=case.scheme, activation=case.activation):
                run = self.layer(case, quant)
                experts = run.routed_experts
                self.assertIs(experts.quant_method.experts_cls, adapter.MoxieExperts)
                for number, name in enumerate(("w13", "w2")):
                    for end, each in (("weight", case.weights), (f"weight{suffix}", case.scales),
                                      ("bias", case.biases)):
                        if each[number] is not None:
                            getattr(experts, f"{name}_{end}").data.copy_(each[number])
                with served(), set_forward_context(None, self.config):
                    experts.quant_method.process_weights_after_loading(experts)
                    seen = run(case.x, torch.zeros(case.tokens, case.experts).bfloat16())
                self.assertLess(off_by(seen, case.wanted()), OFF_BY_MAX[case.scheme])


class EntryPoint(experts_case.Found, unittest.TestCase):
    adapter, plugin, group = adapter, vllm_plugin, "vllm.general_plugins"

    def setUp(self):
        # vLLM's methods import the selections by their names, before or after.
        self.users = [(module, each.select.__name__) for each in adapter.SELECTIONS
                      for module in adapter.users_of(each.select, each.user)]
        for module, name in self.users:
            self.addCleanup(setattr, module, name, getattr(module, name))

    def test_another_version_is_refused_in_words(self):
        """Names that are gone, arguments and fields that are others, what else there is to do."""
        for change, said in (
                ("del fp8.select_fp8_moe_backend", ".*select_fp8_moe_backend.*"),
                ("fp8.select_fp8_moe_backend = lambda config, key: 0", ".*<lambda> has no argument "
                 "activation_key and weight_key"),
                ("del config.FusedMoEConfig.__dataclass_fields__['num_experts']",
                 "FusedMoEConfig has no field num_experts"),
                ("base.apply = lambda self, output, gathered, sunk: 0",
                 "FusedMoEExpertsModular.apply has also the argument gathered and sunk"),
                ("base.__abstractmethods__ |= {'sink'}\n"
                 "base.sink = abc.abstractmethod(lambda self: 0)",
                 "FusedMoEExpertsModular wants sink")):
            with self.subTest(change=change):
                ran = python(f"""
import abc, sys, vllm_stand_in
vllm_stand_in.install()
fp8, config, kernels = (sys.modules[vllm_stand_in.MOE + name]
                        for name in ("oracle.fp8", "config", "modular_kernel"))
base = kernels.FusedMoEExpertsModular
{change}
from moxie import vllm_plugin
vllm_plugin.register()
""")
                self.assertRegex(ran.stderr, "ImportError: moxie.vllm fits vLLM 0.26 to 0.33, and "
                                 rf"this is 0\.\d+\.0 .*: {said}; leave MOXIE_PLUGIN unset")

    def test_everybody_asks_moxie(self):
        self.assertGreaterEqual(len(self.users), 4)
        originals = {getattr(module, name) for module, name in self.users}
        adapter.register()
        now = [getattr(module, name) for module, name in self.users]
        self.assertTrue(originals.isdisjoint(now))
        adapter.register()
        self.assertEqual([getattr(module, name) for module, name in self.users], now)

    def test_what_is_selected(self):
        adapter.register()
        for scheme, select in (((None, None), unquantized.select_unquantized_moe_backend),
                               (BLOCK, fp8.select_fp8_moe_backend),
                               (MXFP4, adapter.gpt_oss.select_mxfp4_moe_backend)):
            keys = dict(zip(("weight_key", "activation_key"), scheme)) if scheme == BLOCK else {}
            with served(), mock.patch.object(adapter, "logger") as logger:
                backend, experts = select(Case().moe(), **keys)
            self.assertEqual((backend.name, experts), (
                "EMULATION" if scheme == MXFP4 else "TRITON", adapter.MoxieExperts))
            self.assertIn(os.environ["MOXIE_PLUGIN"], logger.info_once.call_args[0])

    def test_rows_of_mxfp4_layers_as_the_user_says(self):
        """vLLM's quantization_config.moe.activation."""
        adapter.register()
        with served(), mock.patch.object(adapter, "get_current_vllm_config_or_none", object), \
                mock.patch.object(adapter, "_offloads", lambda: False), \
                mock.patch.object(adapter, "USER_ACTIVATION", lambda: BLOCK[1]), \
                mock.patch.object(adapter, "logger") as logger, contextlib.suppress(AssertionError):
            adapter.gpt_oss.select_mxfp4_moe_backend(Case().moe())
        self.assertIn("quantization scheme", logger.warning_once.call_args[0][1])

    @unittest.skipUnless(REAL, "vLLM's own method")
    @served()  # to its end: vLLM 0.33 asks again when the weights are there
    def test_gpt_oss_from_its_method(self):
        """From the selection over weights and what vLLM makes of them to a result."""
        adapter.register()
        case = Case(MoEActivation.SWIGLUOAI, scheme="mxfp4", bias=True)
        method = adapter.gpt_oss.GptOssMxfp4MoEMethod(case.moe())
        self.assertEqual(method.maybe_roundup_sizes(
            256, 144, torch.bfloat16, case.moe().moe_parallel_config), (256, 160))
        layer = torch.nn.Module()
        with DEVICE:  # as vLLM makes its models
            method.create_weights(layer, case.experts, case.hidden, case.inner, torch.bfloat16)
        for number, name in enumerate(("w13", "w2")):
            for suffix, each in (("weight", case.weights), ("weight_scale", case.scales),
                                 ("bias", case.biases)):
                getattr(layer, f"{name}_{suffix}").data.copy_(each[number])
        layer._expert_routing_tables = lambda: None
        vars(layer).update(activation=case.activation, global_num_experts=case.experts,
                           apply_router_weight_on_input=False, expert_map=None)
        method.process_weights_after_loading(layer)
        seen = method.apply(layer, case.x, case.router, case.ids, None, None)
        self.assertLess(off_by(seen, case.wanted()), OFF_BY_MAX["mxfp4"])

    def test_quark_is_left_alone(self):
        """It makes vLLM's experts of whatever backend it is told."""
        quark = sys.modules["vllm.model_executor.layers.quantization.quark.quark_moe"]
        adapter.register()
        self.assertIs(quark.select_mxfp4_moe_backend, mxfp4.select_mxfp4_moe_backend)
        self.assertIsNot(quark.select_mxfp4_moe_backend, adapter.gpt_oss.select_mxfp4_moe_backend)

    def test_a_word_for_the_exchange(self):
        with mock.patch.dict(os.environ, MOXIE_EXCHANGE="vlm"):
            with self.assertRaisesRegex(MoxieError, "MOXIE_EXCHANGE is 'vlm'; want moxie or vllm"):
                adapter.register()

    @unittest.skipIf(REAL, "vLLM's own selection wants its own machine")
    def test_what_stays_with_vllm(self):
        adapter.register()
        for more, said in (({"moe_backend": "triton"}, ""), ({"is_lora_enabled": True}, "LoRA"),
                           ({"hidden_dim": -8}, "hidden_size")):
            case = Case().moe(**more)
            with served(), mock.patch.object(adapter, "logger") as logger:
                self.assertEqual(unquantized.select_unquantized_moe_backend(moe_config=case),
                                 ("vLLM's", case))
                self.assertEqual(fp8.select_fp8_moe_backend(case, *BLOCK), ("vLLM's", case))
            logger.info_once.assert_not_called()
            warnings = [call[0][1] for call in logger.warning_once.call_args_list]
            self.assertEqual([said in text for text in warnings], [True, True] if said else [])


if __name__ == "__main__":
    unittest.main()
