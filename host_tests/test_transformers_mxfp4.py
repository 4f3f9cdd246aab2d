"""hosts/python/moxie/transformers_mxfp4.py: checkpoints of gpt-oss' kind, loaded packed, against
what transformers makes of the same files without Moxie, which is 16 or 32 bits.

Wants what transformers_case.py wants.
"""

import pathlib
import tempfile
import unittest
import unittest.mock

from transformers_case import (
    DEVICE, LAYERS, ON_CPU, ROOT, Case, adapter, logits, model_of, prompt, relative, routed_as,
    save_mxfp4, save_mxfp4_config, spread_apart)

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.quantizers import auto

from moxie import MoxieError, abi
from moxie.transformers_mxfp4 import KeepingMxfp4Quantizer, Mxfp4Experts

GOLDEN = ROOT / "host_tests" / "golden" / "models" / "tiny-gpt-oss-mxfp4"
EXACT = torch.float32 if ON_CPU else torch.bfloat16  # as exact as the runner on this device can
NEAR = 5e-6 if ON_CPU else 3e-2


def load(folder, implementation, dtype=EXACT, **more):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, experts_implementation=implementation, **more).to(DEVICE).eval()


def experts_of(model):
    return adapter._experts_modules(model)


class Loaded(Case):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.tensors = save_mxfp4(self.folder)

    def model(self, **more):
        model = load(self.folder, "moxie", **more)
        for module in experts_of(model):
            self.assertIsInstance(module, Mxfp4Experts)
        return model

    def plain(self):
        """What transformers makes of it, in f32: bf16 holds all of these numbers, and is what
        older ones make, whatever they are asked for."""
        return load(self.folder, "eager", torch.bfloat16,
                    quantization_config=Mxfp4Config(dequantize=True)).float()

    def near(self, model, plain, most=NEAR):
        """By the routes of the plain model, which rounding may change; the model's logits."""
        routes = []
        with routed_as(plain, routes):
            wanted = logits(plain, "eager", prompt())
        with routed_as(model, routes):
            seen = logits(model, "moxie", prompt())
        self.assertLess(relative(seen, wanted), most)
        for module in experts_of(model):
            self.assertIn(module, adapter._layers)
        return seen

    def test_same_as_unpacked(self):
        self.near(self.model(), self.plain())

    def test_16_bit(self):
        seen = self.near(self.model(dtype=torch.bfloat16), self.plain(), 3e-2)
        self.assertEqual(seen.dtype, torch.bfloat16)

    def test_lies_where_the_model_has_it(self):
        """4 bits and a scale for 32, and no other copy."""
        model = self.model()
        self.assertEqual(adapter.prepare(model), LAYERS)
        for name, module in model.named_modules():
            if not isinstance(module, Mxfp4Experts):
                continue
            weights = adapter._layers[module].layer.weights
            for matrix, projection in ((weights.w1, "gate_up_proj"), (weights.w2, "down_proj")):
                for part, suffix in (("values", "_blocks"), ("scales", "_scales")):
                    mine = getattr(module, projection + suffix)
                    self.assertEqual(getattr(matrix.contents, part).data, mine.data_ptr())
                    self.assertTrue(torch.equal(
                        mine.cpu(), self.tensors[f"{name}.{projection}{suffix}"]))
        made = [adapter._layers[module] for module in experts_of(model)]
        logits(model, "moxie", prompt())
        self.assertEqual(made, [adapter._layers[module] for module in experts_of(model)])

    def test_other_implementations(self):
        """Of the packed model, and back."""
        model, plain = self.model(dtype=torch.float32), self.plain()
        wanted = logits(plain, "eager", prompt())
        for implementation in ("eager", "grouped_mm", "batched_mm"):
            with self.subTest(implementation):
                seen = logits(model, implementation, prompt())
                self.assertLess(relative(seen, wanted), 5e-6 if ON_CPU else 1e-2)
                self.assertEqual(set(adapter.describe(model).values()), {implementation})
        if ON_CPU:
            self.near(model, plain)

    def test_saved_and_loaded_again(self):
        model = self.model()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            saved = load_file(pathlib.Path(folder) / "model.safetensors")
            again = load(folder, "moxie")
        for name, wanted in self.tensors.items():
            self.assertTrue(torch.equal(saved[name], wanted.to(saved[name].dtype)), name)
        self.assertEqual(saved.keys(), self.tensors.keys())
        self.assertTrue(torch.equal(logits(again, "moxie", prompt()),
                                    logits(model, "moxie", prompt())))

    def test_changed_in_place_and_moved(self):
        model, plain = self.model(), self.plain()
        self.near(model, plain)
        for module, theirs in zip(*map(experts_of, (model, plain))):
            module.down_proj_scales.data += 1
            theirs.down_proj.data *= 2
        adapter.weights_updated(model)
        self.near(model, plain)
        for module, theirs in zip(*map(experts_of, (model, plain))):
            module.gate_up_proj_scales.data = module.gate_up_proj_scales.data - 1
            theirs.gate_up_proj.data /= 2
        self.near(model, plain)

    def test_strided(self):
        """Scales that are no longer compact are read as copies."""
        model, plain = self.model(), self.plain()
        for module in experts_of(model):
            spread_apart(module, "gate_up_proj_scales", "down_proj_scales")
        self.near(model, plain)

    def test_on_the_way_by_device_map(self):
        """accelerate's hooks around each module, of a model larger than one device."""
        self.near(self.model(device_map={"": DEVICE}), self.plain())

    def test_what_is_not_moxie_s_is_left_to_transformers(self):
        """Which makes 16 or 32 bits of it, here because it has no kernels, or as it was asked."""
        models = [load(self.folder, "moxie", quantization_config=Mxfp4Config(dequantize=True))]
        models += [load(self.folder, "grouped_mm")] if ON_CPU else []
        for model in models:
            self.assertEqual(len(experts_of(model)), LAYERS)
            for module in experts_of(model):
                self.assertIsInstance(module, GptOssExperts)
                self.assertTrue(module.gate_up_proj.is_floating_point())

    def test_experts_that_the_files_have_in_16_bits(self):
        """Those that modules_to_not_convert names."""
        folder = pathlib.Path(self.folder)
        first = "model.layers.0.mlp.experts"
        plain = self.plain()
        for name in ("gate_up_proj", "down_proj"):
            del self.tensors[f"{first}.{name}_blocks"], self.tensors[f"{first}.{name}_scales"]
            whole = plain.get_submodule(first).get_parameter(name).data
            self.tensors[f"{first}.{name}"] = whole.cpu().clone()
        save_file(self.tensors, folder / "model.safetensors", {"format": "pt"})
        save_mxfp4_config(AutoConfig.from_pretrained(folder), folder, first)
        model = load(self.folder, "moxie")
        self.assertEqual([type(each) for each in experts_of(model)][1:],
                         [Mxfp4Experts] * (LAYERS - 1))
        self.assertIsInstance(model.get_submodule(first), GptOssExperts)
        self.near(model, plain)


class Refusals(Case):
    def test_no_scale_for_the_last_inputs(self):
        with tempfile.TemporaryDirectory() as folder:
            model = model_of("gpt_oss", intermediate_size=48)
            save_mxfp4_config(model.config, folder)
            save_file({"lm_head.weight": model.lm_head.weight.data.cpu()},
                      pathlib.Path(folder) / "model.safetensors", {"format": "pt"})
            with self.assertRaisesRegex(MoxieError, r"model\.layers\.0\.mlp\.experts .*down_proj "
                                        "has 48 inputs.*32"):
                load(folder, "moxie")

    def refused(self, change, pattern, code=abi.E_UNSUPPORTED):
        with tempfile.TemporaryDirectory() as folder:
            save_mxfp4(folder)
            model = load(folder, "moxie")
        change(experts_of(model)[0])
        with self.assertRaisesRegex(MoxieError, pattern) as caught:
            logits(model, "moxie", prompt())
        self.assertEqual(caught.exception.code, code)

    def test_scales(self):
        def fewer(module):
            module.down_proj_scales.data = module.down_proj_scales.data[:, :, :-1]
        def wider(module):
            module.down_proj_scales.data = module.down_proj_scales.data.float()
        self.refused(fewer, r"Mxfp4Experts: the weights of down are \[8, 64, 48\] and their scales "
                     r"torch.uint8 of \[8, 64, 2\].*\[8, 64, 3\]")
        self.refused(wider, "scales torch.float32 of")

    def test_blocks(self):
        def fewer(module):
            module.gate_up_proj_blocks.data = module.gate_up_proj_blocks.data[..., :15]
        def signed(module):
            module.gate_up_proj_blocks.data = module.gate_up_proj_blocks.data.view(torch.int8)
        self.refused(fewer, r"gate and up are \[8, 192, 30\]")
        self.refused(signed, "gate and up are a .* of torch.int8")

    def test_scales_that_are_no_numbers(self):
        def nan(module):
            module.gate_up_proj_scales.data[3, 5, 1] = 255
        self.refused(nan, "255|NaN", abi.E_INVALID)


class Golden(Case):
    def test_layer(self):
        """A layer's output that was computed elsewhere, from the numbers in a file."""
        files, golden = load_file(GOLDEN / "model.safetensors"), load_file(
            GOLDEN / "layer0_golden.safetensors")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(GOLDEN), experts_implementation="moxie")
        quantizer = KeepingMxfp4Quantizer(Mxfp4Config())
        quantizer.validate_environment()
        quantizer.preprocess_model(model)
        self.assertEqual(quantizer.get_weight_conversions(), [])  # names are the files' own
        module, = experts_of(model)
        at = "model.layers.0.mlp.experts."
        module.load_state_dict({name[len(at):]: each.to(DEVICE) for name, each in files.items()
                                if name.startswith(at)}, assign=True)
        with torch.no_grad():
            seen = module(*(golden[name].to(DEVICE)
                            for name in ("hidden_states", "topk_ids", "topk_weights")))
        self.assertLess(relative(seen.cpu(), golden["routed_output"]), 4e-3)


class Registered(unittest.TestCase):
    def test_once(self):
        """Whoever else replaced transformers' quantizer keeps what he did."""
        mapping = auto.AUTO_QUANTIZER_MAPPING
        self.assertIs(mapping["mxfp4"], KeepingMxfp4Quantizer)
        with unittest.mock.patch.dict(mapping, mxfp4=str):
            adapter.transformers_mxfp4.register()
            self.assertIs(mapping["mxfp4"], str)


if __name__ == "__main__":
    unittest.main()
