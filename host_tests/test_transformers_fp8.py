"""hosts/python/moxie/transformers.py with fp8 experts: transformers' FP8Experts against plain ones
that hold the same numbers, dequantised.

transformers keeps fp8 as fp8 only where it finds a GPU, and has kernels for it only there. So the
models here get FP8Experts from transformers' replacement function, and their numbers here. Wants
what transformers_case.py wants.
"""

import contextlib
import copy
import pathlib
import tempfile
import unittest
from unittest import mock

from transformers_case import (
    DEVICE, LAYERS, MODELS, ON_CPU, ROOT, Case, adapter, logits, model_of, prompt,
    put_at_odd_addresses, relative, routed_as, spread_apart)

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import FP8Experts, replace_with_fp8_linear
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from moxie import MoxieError, abi

GOLDEN = ROOT / "host_tests" / "golden" / "models" / "tiny-deepseek-v3-fp8"
BUT_EXPERTS = [r"(?!.*\.experts$).*"]  # what is not replaced: linear layers want a GPU
HIDDEN = 160  # a block and a quarter
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
EXACT = torch.float32 if ON_CPU else torch.bfloat16  # as exact as the runner on this device can


def spread(scales, matrix, block):
    """Each scale over its block of a [E, N, K]."""
    rows, columns = matrix.shape[-2:]
    block = block or (rows, columns)
    scales = scales.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return scales[..., :rows, :columns]


def quantise(matrix, block, scale_type=torch.float32):
    """e4m3 and scales of one projection, blocks beginning at its first row; the scales differ by
    much, so that none can stand for another."""
    experts, rows, columns = matrix.shape
    tile = block or (rows, columns)
    shape = experts, -(-rows // tile[0]), -(-columns // tile[1])
    scales = torch.exp2(torch.randint(-9, -4, shape).float())
    if scale_type is torch.float32:
        scales *= 1 + torch.rand(shape)
    matrix = matrix * 60 * spread(scales, matrix, block)  # as large in its block as the scale says
    return (matrix / spread(scales, matrix, block)).to(E4M3), scales.to(scale_type)


def dequantised(values, scales, block):
    return values.float() * spread(scales, values, block)


def quantise_experts(plain, fp8, block=(128, 128), scale_type=torch.float32):
    """Random fp8 into an FP8Experts, and the same numbers into the plain experts."""
    gate_up = [quantise(half, block, scale_type)
               for half in plain.gate_up_proj.data.cpu().chunk(2, dim=1)]
    down = quantise(plain.down_proj.data.cpu(), block, scale_type)
    plain.gate_up_proj.data = torch.cat([dequantised(*half, block) for half in gate_up], 1)
    plain.down_proj.data = dequantised(*down, block)
    parts = [torch.cat(each, 1) for each in zip(*gate_up)]
    for name, each in zip(("gate_up_proj", "gate_up_proj_scale_inv", "down_proj",
                           "down_proj_scale_inv"), (*parts, *down)):
        setattr(fp8, name, torch.nn.Parameter(each, requires_grad=False))


def models(name, intermediate, block=(128, 128), scale_type=torch.float32, dtype=EXACT):
    """A tiny model with fp8 experts, and in f32 the same numbers with plain ones."""
    sizes = {**MODELS[name], "hidden_size": HIDDEN, "moe_intermediate_size": intermediate}
    with mock.patch.dict(MODELS, {name: sizes}):
        plain = model_of(name)
    fp8 = replaced(copy.deepcopy(plain), block)
    for mine, theirs in zip(*map(adapter._experts_modules, (plain, fp8))):
        quantise_experts(mine, theirs, block, scale_type)
    for model in (fp8, plain):
        for name, parameter in model.named_parameters():
            if ".mlp.experts." not in name:
                rounded = parameter.data.to(dtype)
                parameter.data = rounded if model is fp8 else rounded.float()
    return fp8.to(DEVICE).eval(), plain.to(DEVICE).eval()


def replaced(model, block=(128, 128), **more):
    config = FineGrainedFP8Config(weight_block_size=block, **more)
    return replace_with_fp8_linear(model, BUT_EXPERTS, config, pre_quantized=True)


def experts_of(model):
    modules = adapter._experts_modules(model)
    assert all(isinstance(module, FP8Experts) for module in modules) and modules
    return modules


class Near(Case):
    def near(self, fp8, plain):
        """On a GPU, which multiplies fp8 activations, by the routes of the plain model."""
        routes = []
        with routed_as(plain, routes):
            wanted = logits(plain, "eager", prompt())
        with contextlib.nullcontext() if ON_CPU else routed_as(fp8, routes):
            seen = logits(fp8, "moxie", prompt())
        self.assertLess(relative(seen, wanted), 5e-6 if ON_CPU else 8e-2)
        for module in experts_of(fp8):
            self.assertIn(module, adapter._layers)


class Models(Near):
    def test_blocks(self):
        """Blocks that end early, in both directions, and with up beginning anew or not."""
        for name in ("deepseek_v3", "qwen3_moe"):
            for intermediate in (48, 112, 192, 240, 256):
                with self.subTest(name, intermediate=intermediate):
                    self.near(*models(name, intermediate))

    def test_16_bit(self):
        """No farther from the f32 model than eager in bf16, for the same routes; a GPU multiplies
        fp8 activations."""
        for name in ("deepseek_v3", "qwen3_moe"):
            with self.subTest(name):
                (fp8, plain), ids, routes = models(name, 240, dtype=torch.bfloat16), prompt(), []
                with routed_as(plain, routes):
                    wanted = logits(plain, "eager", ids)
                with routed_as(fp8, routes):
                    seen = logits(fp8, "moxie", ids)
                eager = copy.deepcopy(plain).bfloat16()
                with routed_as(eager, routes):
                    limit = 1.3 * relative(logits(eager, "eager", ids), wanted) if ON_CPU else 8e-2
                self.assertEqual(seen.dtype, torch.bfloat16)
                self.assertLess(relative(seen, wanted), limit)

    def test_one_scale_for_each_projection(self):
        self.near(*models("deepseek_v3", 112, block=None))

    def test_scales_that_are_powers_of_two(self):
        """scale_fmt ue8m0: one byte each, of which there is a copy, made anew when told."""
        fp8, plain = models("deepseek_v3", 240, scale_type=E8M0)
        self.near(fp8, plain)
        for mine, theirs in zip(*map(adapter._experts_modules, (fp8, plain))):
            mine.down_proj_scale_inv.data.copy_((mine.down_proj_scale_inv.data.float() * 4))
            theirs.down_proj.data.mul_(4)
        adapter.weights_updated(fp8)
        self.near(fp8, plain)

    def test_copies_made_in_inference_mode(self):
        fp8, plain = models("qwen3_moe", 128, scale_type=torch.bfloat16)
        with torch.inference_mode():
            self.near(fp8, plain)
        for mine, theirs in zip(*map(adapter._experts_modules, (fp8, plain))):
            mine.down_proj_scale_inv.data.mul_(4)
            theirs.down_proj.data.mul_(4)
        adapter.weights_updated(fp8)
        self.near(fp8, plain)

    def test_no_other_scales_where_copied_ones_were(self):
        """They would be taken for the copied ones."""
        with mock.patch.dict(globals(), HIDDEN=2048), \
                mock.patch.dict(MODELS["qwen3_moe"], num_hidden_layers=1):
            fp8, _ = models("qwen3_moe", 1024, scale_type=torch.bfloat16)
        fp8.set_experts_implementation("moxie")
        module = adapter._experts_modules(fp8)[0]
        scales = module.down_proj_scale_inv
        ids = torch.arange(18, device=DEVICE).reshape(9, 2) % module.gate_up_proj.shape[0]
        x = torch.randn(9, 2048, dtype=EXACT, device=DEVICE)
        given = x, ids, torch.rand(9, 2, device=DEVICE)
        for _ in range(20):
            with torch.no_grad():
                module(*given)
            before = scales.data_ptr()
            scales.data = scales.data * 2  # elsewhere,
            scales.data = scales.data / 2  # and perhaps back
            self.assertNotEqual(before, scales.data_ptr())

    def test_weights_and_scales_stay_where_they_are(self):
        for block, dims in (((128, 128), 3), (None, 2)):
            fp8, _ = models("deepseek_v3", 240, block, dtype=torch.bfloat16)
            logits(fp8, "moxie", prompt())
            for module in experts_of(fp8):
                weights = adapter._layers[module].layer.weights
                w1, w2 = weights.w1.contents, weights.w2.contents
                self.assertEqual(w1.values.data, module.gate_up_proj.data_ptr())
                self.assertEqual(w2.values.data, module.down_proj.data_ptr())
                self.assertEqual(w1.scales.data, module.gate_up_proj_scale_inv.data_ptr())
                self.assertEqual(w2.scales.data, module.down_proj_scale_inv.data_ptr())
                self.assertEqual(w1.scales.ndim, dims)

    def test_scales_that_move(self):
        fp8, plain = models("deepseek_v3", 112)
        self.near(fp8, plain)
        for mine, theirs in zip(*map(adapter._experts_modules, (fp8, plain))):
            mine.gate_up_proj_scale_inv.data = mine.gate_up_proj_scale_inv.data * 2
            theirs.gate_up_proj.data.mul_(2)
        self.near(fp8, plain)

    def test_scales_that_are_strided(self):
        for block in ((128, 128), None):
            fp8, plain = models("deepseek_v3", 112, block)
            for module in experts_of(fp8):
                spread_apart(module, "gate_up_proj_scale_inv", "down_proj_scale_inv")
            self.near(fp8, plain)

    @unittest.skipUnless(ON_CPU, "a GPU's memory is no mapped file")
    def test_scales_at_odd_addresses(self):
        fp8, plain = models("deepseek_v3", 112)
        for module in experts_of(fp8):
            put_at_odd_addresses(module, "gate_up_proj_scale_inv", "down_proj_scale_inv")
        self.near(fp8, plain)

    def test_experts_that_were_left_in_16_bits(self):
        """FP8Experts' own linear takes weights as they are when they are not of one byte."""
        fp8, plain = models("qwen3_moe", 112)
        for mine, theirs in zip(*map(adapter._experts_modules, (fp8, plain))):
            for name in ("gate_up_proj", "down_proj"):
                setattr(mine, name, torch.nn.Parameter(getattr(theirs, name).data.bfloat16()))
                getattr(theirs, name).data = getattr(theirs, name).data.bfloat16().float()
        self.near(fp8, plain)

    def test_prepared_before_the_first_forward(self):
        """For what the rest of the model is in."""
        fp8, _ = models("deepseek_v3", 112, dtype=torch.bfloat16)
        self.assertEqual(adapter.prepare(fp8), LAYERS - 1)
        made = [adapter._layers[module] for module in experts_of(fp8)]
        self.assertEqual(logits(fp8, "moxie", prompt()).dtype, torch.bfloat16)
        self.assertEqual(made, [adapter._layers[module] for module in experts_of(fp8)])

    def test_training(self):
        fp8, _ = models("qwen3_moe", 112)
        fp8.set_experts_implementation("moxie")
        with self.assertRaisesRegex(MoxieError, "FP8Experts.*gradients.*training mode"):
            fp8.train()(prompt())


class Files(Near):
    def test_loaded_model(self):
        """from_pretrained, of the names that DeepSeek's files have: an expert's gate and up and the
        scales of each."""
        fp8, plain = models("deepseek_v3", 112)
        tensors = {name: each.data.cpu().clone() for name, each in fp8.named_parameters()
                   if ".mlp.experts." not in name}
        tensors.update((name, each.cpu().clone()) for name, each in fp8.named_buffers()
                       if name.endswith("e_score_correction_bias"))
        for path, module in fp8.named_modules():
            if not isinstance(module, FP8Experts):
                continue
            for suffix, end in (("", ".weight"), ("_scale_inv", ".weight_scale_inv")):
                gate, up = getattr(module, "gate_up_proj" + suffix).data.cpu().chunk(2, 1)
                down = getattr(module, "down_proj" + suffix).data.cpu()
                for name, all_of_them in (("gate", gate), ("up", up), ("down", down)):
                    for expert, each in enumerate(all_of_them):
                        tensors[f"{path}.{expert}.{name}_proj{end}"] = each.clone()
        fp8.config.quantization_config = {
            "quant_method": "fp8", "weight_block_size": [128, 128],
            "activation_scheme": "dynamic", "modules_to_not_convert": BUT_EXPERTS}
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(
                FineGrainedFP8HfQuantizer, "validate_environment"):  # which wants a GPU
            fp8.config.save_pretrained(folder)
            save_file(tensors, pathlib.Path(folder) / "model.safetensors", {"format": "pt"})
            loaded = AutoModelForCausalLM.from_pretrained(
                folder, dtype=EXACT, experts_implementation="moxie").to(DEVICE).eval()
        with torch.no_grad():
            loaded(prompt())  # by what it was loaded with
        for module in experts_of(loaded):
            self.assertEqual(module.gate_up_proj.dtype, E4M3)
            self.assertIn(module, adapter._layers)
        self.near(loaded, plain)

    def test_golden_layer(self):
        """A layer's output that was computed elsewhere, from numbers in a file."""
        files = load_file(GOLDEN / "model.safetensors")
        golden = load_file(GOLDEN / "layer0_golden.safetensors")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(GOLDEN),
                                                     experts_implementation="moxie")
        module, = experts_of(replaced(model))
        at = "model.layers.0.mlp.experts.%d.%s_proj.weight%s"
        for suffix in ("", "_scale_inv"):
            pairs = [[files[at % (e, name, suffix)] for name in ("gate", "up", "down")]
                     for e in range(8)]
            for name, each in (("gate_up_proj", torch.stack([torch.cat(p[:2]) for p in pairs])),
                               ("down_proj", torch.stack([p[2] for p in pairs]))):
                setattr(module, name + suffix, torch.nn.Parameter(each.to(DEVICE), False))
        with torch.no_grad():
            seen = module(*(golden[name].to(DEVICE)
                            for name in ("hidden_states", "topk_ids", "topk_weights")))
        self.assertLess(relative(seen.cpu(), golden["routed_output"]), 4e-3 if ON_CPU else 5e-2)


class Refusals(Case):
    def refused(self, change, *patterns, intermediate=112, block=(128, 128)):
        fp8, _ = models("deepseek_v3", intermediate, block)
        change(experts_of(fp8)[0])
        with self.assertRaises(MoxieError) as caught:
            logits(fp8, "moxie", prompt())
        self.assertEqual(caught.exception.code, abi.E_UNSUPPORTED)
        for pattern in ("FP8Experts", *patterns):
            self.assertIn(pattern, str(caught.exception))

    def test_block_sizes(self):
        for block in ([64, 64], [128, 64], [1, 128]):
            self.refused(lambda module: setattr(module, "block_size", block), str(block),
                         "[128, 128]", "dequantize=True")

    def test_static_activations(self):
        self.refused(lambda module: setattr(module, "activation_scheme", "static"),
                     "activation_scheme is 'static'", "dequantize=True")

    def test_blocks_across_gate_and_up(self):
        """As FP8Experts allocates them: 3 rows for 2 * 192, the second of which is in both."""
        def across(module):
            module.gate_up_proj_scale_inv.data = module.gate_up_proj_scale_inv.data[:, :3]
        self.refused(across, "[8, 3, 2]", "[8, 4, 2]", "blocks of their own", intermediate=192)

    def test_part_of_the_blocks(self):
        """Half of 224 units is here, with as many scales as 112 alone would have."""
        self.refused(lambda module: setattr(module, "intermediate_dim", 224), "112 of 224",
                     "parallelism")

    def test_part_of_what_one_scale_is_for(self):
        """Of the scales of gate and up transformers gives one rank both and the other none; as it
        does to the weights, both refuse for the same reason."""
        for left in (2, 0):
            def part(module):
                module.intermediate_dim = 224
                scales = module.gate_up_proj_scale_inv
                scales.data = scales.data[:, :left]
            self.refused(part, "tensor parallelism leaves 112 of 224", "one scale", "expert "
                         "parallelism", block=None)

    def test_scales(self):
        for name in ("gate_up_proj_scale_inv", "down_proj_scale_inv"):
            self.refused(lambda module: setattr(module, name, None), "scales", "missing")
            self.refused(lambda module: setattr(module, name, torch.nn.Parameter(
                getattr(module, name).to(torch.uint8), False)), "scales", "uint8")
            self.refused(lambda module: setattr(module, name, torch.nn.Parameter(
                getattr(module, name)[:, :, :1])), "scales", "1]", intermediate=240)

    def test_types(self):
        def fp4(module):
            module.down_proj = torch.nn.Parameter(module.down_proj.data.view(torch.int8), False)
        def mixed(module):
            module.down_proj = torch.nn.Parameter(module.down_proj.data.bfloat16())
        def mixed_the_other_way(module):
            module.gate_up_proj = torch.nn.Parameter(module.gate_up_proj.data.bfloat16())
        self.refused(fp4, "down", "int8", "dequantised")
        self.refused(mixed, "bfloat16", "float8_e4m3fn", "one type")
        self.refused(mixed_the_other_way, "bfloat16", "float8_e4m3fn", "one type")

    def test_softcapped_gate(self):
        def softcap(module):
            if not hasattr(module, "gate_softcap"):
                self.skipTest("FP8Experts of this transformers has no softcaps")
            module.gate_softcap = module.up_softcap = 1.5
        self.refused(softcap, "an activation that Moxie does not have")


if __name__ == "__main__":
    unittest.main()
