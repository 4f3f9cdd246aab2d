"""hosts/python/moxie/transformers.py: experts in every form that transformers' interface has, and
what is refused.

Wants what transformers_case.py wants.
"""

import copy
import importlib
import inspect
import pathlib
import unittest
from unittest import mock

from transformers_case import (
    DEVICE, LAYERS, ON_CPU, Case, Options, adapter, clamped, clamped_silu, computed, logits,
    model_of, prompt, relative, toy, toy_input)

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

from moxie import MoxieError, abi, gates, modules


class Spread:
    """A weight of which this process has a part, as DTensor is one."""

    def __init__(self, part):
        self.part = part

    def to_local(self):
        return self.part


def spread(module, part=slice(None)):
    """Leaves in a module what several processes that share it do, here this part of the experts."""
    for name, parameter in list(module.named_parameters()):
        delattr(module, name)
        setattr(module, name, Spread(parameter.detach()[part]))
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
                self.assertEqual(gates.recognise(module, DEVICE, "toy")[1]["activation"], name)
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
        """What transformers' parallel loading leaves in a module: this process' part is inside, and
        the module has as many experts."""
        module = toy(Options(turned=True), has_bias=True)
        wanted = module(*toy_input())
        adapter.release(spread(module))
        self.assertTrue(torch.equal(module(*toy_input()), wanted))
        whole, (x, ids, weights) = toy(Options()), toy_input()
        module = spread(toy(Options()), slice(0, 3))
        module.num_experts = 3
        self.assertTrue(torch.equal(module(x, ids, weights),
                                    whole(x, ids.masked_fill(ids >= 3, 6), weights)))

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

    def test_numbers_that_torch_has_yet_to_negate(self):
        """As those of torch's conjugates are."""
        module, (x, ids, weights) = toy(Options()), toy_input()
        lazy = [torch._neg_view(-each) for each in (x, ids, weights)]
        self.assertTrue(all(each.is_neg() for each in lazy))
        self.assertTrue(torch.equal(module(*lazy), module(x, ids, weights)))

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
        self.assertEqual(gates.recognise(toy(Options(), clamped_to(-none, none, none)), DEVICE,
                                         "toy")[1], {"activation": "silu"})

    def test_norm_after_each_expert(self):
        module = toy(Options())
        module.has_post_expert_norm = True
        self.refused(module, toy_input(), abi.E_UNSUPPORTED, "normalises")

    def test_experts_that_give_their_rows_back(self):
        """LongCat's, of which an id names one that has no weights."""
        module = toy(Options())
        module.config.zero_expert_num = 0
        module(*toy_input())
        module = toy(Options())
        module.config.zero_expert_num = 4
        self.refused(module, toy_input(), abi.E_UNSUPPORTED, "4 experts more.*bfloat16")

    def test_experts_of_which_others_are_elsewhere(self):
        """As FSDP leaves them between forwards."""
        module = toy(Options(), has_bias=True)
        module(*toy_input())
        spread(module, slice(3, 6))
        pattern = "Toy.*: the weights of 3 of its 6 experts .* FSDP .*call the whole model"
        self.refused(module, toy_input(), abi.E_UNSUPPORTED, pattern)
        self.refused(lambda: adapter.prepare(module, top_k=3), (), abi.E_UNSUPPORTED, pattern)

    def test_fake_tensors(self):
        module = toy(Options())
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            given = [mode.from_tensor(each) for each in toy_input()]
            self.refused(module, given, abi.E_UNSUPPORTED, "a fake tensor would not hold.*eager")

    def test_names_in_refusals(self):
        """Those of the model, whatever is refused."""
        sine = toy(Options(), lambda self, merged: merged.chunk(2, dim=-1)[0].sin())
        model = torch.nn.ModuleDict({"mlp": sine})
        with self.assertRaisesRegex(MoxieError, r"^mlp \(Toy\): act_fn SiLU.*gated: an activation"):
            adapter.prepare(model, top_k=2)

    def test_types(self):
        self.refused(toy(Options(), dtype=torch.float64), toy_input(dtype=torch.float64),
                     abi.E_UNSUPPORTED, "float64.*bfloat16")
        self.refused(toy(Options()), toy_input(dtype=torch.float64), abi.E_UNSUPPORTED,
                     "hidden_states is torch.float64.*load the model with")
        x, ids, weights = toy_input()
        self.refused(toy(Options()), (x, ids.to(torch.int16), weights), abi.E_UNSUPPORTED,
                     "top_k_index is torch.int16")
        self.refused(toy(Options()), (x[None], ids, weights), abi.E_UNSUPPORTED, r"\[1, 11, 40\]")

    def test_tensors_without_an_address(self):
        module, given = toy(Options()), toy_input()
        kinds = {r"TwoTensor \(torch.strided\)": lambda each: TwoTensor(each, each),
                 r"Tensor \(torch.sparse_coo\)": torch.Tensor.to_sparse}
        for place, what in enumerate(("hidden_states", "top_k_index", "top_k_weights")):
            for kind, make in kinds.items():
                with self.subTest(what, kind=kind):
                    changed = [make(each) if at == place else each for at, each in enumerate(given)]
                    self.refused(module, changed, abi.E_UNSUPPORTED, f"Toy: {what} is a {kind}; .*"
                                 r"at an address, .*: give .*to_local\(\) or .*'eager'")
        masked = masked_tensor(given[2], given[2] > 0.5)
        self.refused(module, (*given[:2], masked), abi.E_UNSUPPORTED, "weights is a MaskedTensor ")
        if ON_CPU:
            self.refused(module, (given[0].to_mkldnn(), *given[1:]), abi.E_UNSUPPORTED,
                         r"Tensor \(torch._mkldnn\); ")

    def test_weights_that_torch_has_yet_to_negate(self):
        for name in ("down_proj", "down_proj_bias"):
            module = toy(Options(), has_bias=True)
            getattr(module, name).data = torch._neg_view(getattr(module, name).data)
            self.refused(module, toy_input(), abi.E_UNSUPPORTED, r"Toy: .*is_neg.*resolve_neg\(\)")

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
            for _ in range(2):
                self.refused(module, given, abi.E_CONFIG, "libmoxie.* no key timeout;")
            adapter.configure(timeout=None)
            module(*given)

    def test_trace(self):
        with self.assertRaisesRegex(MoxieError, "a trace would not hold") as caught:
            torch.jit.trace(toy(Options()), toy_input())
        self.assertEqual(caught.exception.code, abi.E_UNSUPPORTED)

    def test_make_fx(self):
        from torch.fx.experimental.proxy_tensor import make_fx
        model, given = toy(Options()), toy_input()
        model(*given)
        for pre_dispatch in (False, True):
            with self.assertRaisesRegex(MoxieError, "make_fx.*'eager'"):
                make_fx(lambda x: model(x, *given[1:]), pre_dispatch=pre_dispatch)(given[0])

    def test_export(self):
        with self.assertRaisesRegex(MoxieError, "an exported program would not hold") as caught:
            torch.export.export(toy(Options()), toy_input(), strict=False)
        self.assertEqual(caught.exception.code, abi.E_UNSUPPORTED)

    @unittest.skipUnless("reason" in inspect.signature(torch.compiler.disable).parameters,
                         "this torch has words of its own")
    def test_whole_graphs(self):
        """Of which torch says why, in the words given to it."""
        module, given = toy(Options()), toy_input()
        words = "Moxie's calls lie between graphs: leave fullgraph out; to export, .*'eager'"
        for whole in (lambda: torch.compile(module, fullgraph=True, backend="eager")(*given),
                      lambda: torch.export.export(module, given, strict=True)):
            with self.assertRaisesRegex(Exception, words):
                whole()

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

    def test_more_tokens_than_there_is_memory_for(self):
        """Whichever buffer finds none: those of all layers, or what a layer is the first to need."""
        adapter.configure(forward_tokens_max=1000)
        allocate, full = modules.Allocator.allocate, torch.OutOfMemoryError("full")
        for room in (0, 1):
            def allocate_first(self, *wanted):
                if len(self.held) == room:
                    raise full
                return allocate(self, *wanted)

            with mock.patch.object(modules.Allocator, "allocate", allocate_first), \
                    self.assertRaisesRegex(MoxieError, r"bytes.*: set forward_tokens_max lower \(now "
                                           r"1000\) by moxie.transformers.configure") as caught:
                toy(Options())(*toy_input())
            error = caught.exception
            self.assertEqual((error.code, error.keys), (abi.E_MEMORY, ("forward_tokens_max",)))
            self.assertIs(error.__cause__.__cause__, full)

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

    def test_what_is_no_path_of_a_library(self):
        before = dict(adapter._settings)
        for value, kind in ((3, "int"), (b"libmoxie.so", "bytes"), (adapter, "module")):
            with self.assertRaisesRegex(MoxieError, f"plugin is .*, a {kind}: give the path") as caught:
                adapter.configure(plugin=value)
            self.assertEqual(caught.exception.code, abi.E_CONFIG)
        self.assertEqual(adapter._settings, before)

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


if __name__ == "__main__":
    unittest.main()
