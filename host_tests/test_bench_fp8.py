"""bench/layer with --format fp8: quantising, the reference, peers, the program.

Wants what test_bench_layer.py wants.
"""

import contextlib
import importlib.util
import io
import json
import os
import pathlib
import sys
import tempfile
import types
import unittest
from unittest import mock

from test_bench_layer import (
    MAIN, RIGHT, TINY, Peer, Program, WithoutNumbers, case_of, fake_deep_gemm, no_numbers, options)

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import peers
from measure import cells, device, fp8, numbers, race, report
from measure.case import off_by
from peers import deep_gemm, grouped_mm, moxie, triton, vllm_deep_gemm
from pretended_gpu import Emulated, PretendedCuda, PretendedGraph, emulated, pretend


SMALL = cells.Shape(128, 128, 4, 2)


class Reference(unittest.TestCase):
    def test_against_plain_loops(self):
        """Every block by itself; gate and up begin with blocks of their own."""
        sizes = cells.Shape(160, 48, 4, 2)
        case = case_of(3, sizes=sizes, number="fp8")
        case.draw(3, "uniform")

        def operand(row, quantised):
            if quantised:
                for first in range(0, len(row), 128):
                    block = row[first:first + 128]
                    largest = block.abs().max()
                    inverse = torch.full_like(largest, 448) / largest
                    block.copy_((block * inverse).to(fp8.E4M3).float() * (largest / 448))
            return row.double()

        def weight(values, scales, half, row):
            return torch.tensor([values[half * 48 + row, column].float() *
                                 scales[half + row // 128, column // 128]
                                 for column in range(values.shape[1])]).double()

        (w1, w2), (s1, s2) = case.weights(3), case.scales(3)
        self.assertEqual((s1.shape, s2.shape), ((4, 2, 2), (4, 2, 1)))
        for quantised in (True, False):
            wanted = torch.zeros(160).double()
            for slot, expert in enumerate(case.ids[3, 2].tolist()):
                row = operand(case.x[3, 2].float(), quantised)
                gate, up = (torch.stack([weight(w1[expert], s1[expert], half, index) @ row
                                         for index in range(48)]) for half in (0, 1))
                middle = operand((gate / (1 + torch.exp(-gate)) * up).float(), quantised)
                wanted += case.router[3, 2, slot].double() * torch.stack(
                    [weight(w2[expert], s2[expert], 0, index) @ middle for index in range(160)])
            found = case.answer(3, [2], quantised)[0]
            self.assertLess(off_by(found, wanted), 1e-5)
        self.assertGreater(off_by(case.answer(3, [2])[0], wanted), 0.02)  # 4%, of two quantisings


class Quantising(unittest.TestCase):
    def test_rows(self):
        rows = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
        rows[1, 128:256] = 0
        values, scales = fp8.quantise_rows(rows)
        self.assertEqual((values.shape, scales.shape), (rows.shape, (3, 3)))
        for row in range(3):
            for block in range(3):
                part = rows[row, block * 128:(block + 1) * 128]
                self.assertEqual(scales[row, block], part.abs().max() / 448)
        self.assertTrue((values[1, 128:256].float() == 0).all())
        self.assertEqual(values.float().abs().max(), 448)
        self.assertLess(off_by(fp8.rounded(rows), rows), 0.03)  # 2^-4 at most of any number
        self.assertTrue(torch.equal(fp8.rounded(rows)[:, 256:], fp8.rounded(rows[:, 256:])))

    def test_blocks(self):
        weights = torch.randn(2, 200, 300, generator=torch.Generator().manual_seed(1))
        weights[1, 128:, :128] *= 100
        values, scales = fp8.quantise_blocks(weights)
        self.assertEqual((values.shape, scales.shape), (weights.shape, (2, 2, 3)))
        self.assertEqual(scales[1, 1, 0], weights[1, 128:, :128].abs().max() / 448)
        self.assertTrue(scales.is_contiguous())
        again = fp8.dequantised(values, scales)
        for rows in (slice(0, 128), slice(128, None)):
            self.assertLess(off_by(again[:, rows, 128:256], weights[:, rows, 128:256]), 0.03)

    def test_weights_made_in_parts(self):
        """Scales far apart, codes over the whole range, experts that differ."""
        with mock.patch("measure.case.FP8_AT_ONCE", 3 * 2 * 128 * 256):
            case = case_of(1, number="fp8")
        for values, scales in zip(case.w1 + case.w2, case.s1 + case.s2):
            self.assertEqual((values.dtype, scales.dtype), (fp8.E4M3, torch.float32))
            top = values.float().abs().flatten(1).max(1)[0]
            self.assertTrue((top == 448).all(), top)
            self.assertGreater((scales.max() / scales.min()).item(), 2)
            self.assertFalse(torch.equal(values[0].float(), values[-1].float()))
        self.assertEqual((case.x.dtype, case.y.dtype), (torch.bfloat16, torch.bfloat16))


def dense_rows(a):
    """Rows with scales in f32, and whether those lie as the kernels read them."""
    values, scales = a
    rows = scales.shape[-2]
    assert scales.stride()[-2:] == (1, rows) and rows % 4 == 0, scales.stride()
    return values.float() * fp8.spread(scales, values.shape[-1])


def fp8_contiguous(a, b, d, layout):
    """In operators that a graph can hold; of 128 rows one expert's, as its kernels have it."""
    rows, weights = dense_rows(a), fp8.dequantised(*b)
    experts = layout.view(-1, 128).amax(dim=1).clamp(min=0)
    made = torch.bmm(rows.view(len(experts), 128, -1), weights[experts].transpose(1, 2))
    d.copy_(torch.where((layout >= 0)[:, None], made.view(d.shape).to(d.dtype), d))


def fp8_masked(a, b, d, counts, expected):
    rows, weights = dense_rows(a), fp8.dequantised(*b)
    used = torch.arange(rows.shape[1]) < counts[:, None]
    d.copy_(torch.where(used[..., None], (rows @ weights.transpose(1, 2)).to(d.dtype), d))


class Peers(Peer):
    def test_moxie(self):
        def make():
            return moxie.Moxie(options(format="fp8"), device.Cpu())
        self.check(make, most=numbers.FP8_OFF_BY_MAX)
        # Sizes that end within a block, so that up's first one is not where gate's would go on.
        self.assertLess(self.errors(make(), 9, sizes=cells.Shape(160, 48, 8, 2)),
                        numbers.FP8_OFF_BY_MAX)

    @unittest.skipUnless(os.environ.get("MOXIE_EMULATED"), "no emulated GPU was built")
    def test_moxie_s_kernels(self):
        """Those of the GPU quantise at the reference's places, with 16 bits in between."""
        # The tensor core's sums would make other codes of mid, 1.5e-2 of so few numbers.
        with emulated(), mock.patch.dict(os.environ, MOXIE_EMULATOR_EXACT_SUMS="1"):
            for sizes, tokens in ((TINY, 5), (cells.Shape(512, 256, 8, 2), 20)):
                system = moxie.Moxie(options(format="fp8", plugin=os.environ["MOXIE_EMULATED"]),
                                     Emulated())
                self.assertLess(self.errors(system, tokens, sizes=sizes),
                                numbers.FP8_OFF_BY_MAX)

    def test_torch_has_none(self):
        for kind in (grouped_mm.Layer, grouped_mm.Products):
            self.assertIn("128 x 128", kind(options(format="fp8"), device.Cpu()).available())

    def test_deep_gemm(self):
        with fake_deep_gemm(fp8_contiguous, fp8_masked):
            for kind in (deep_gemm.Contiguous, deep_gemm.Masked):
                self.check(lambda: kind(options(format="fp8"), device.Cpu()), (1, 20),
                           numbers.FP8_OFF_BY_MAX)
                system = kind(options(format="fp8"), device.Cpu())
                self.assertIsNone(system.available())
                with self.assertRaises(peers.Unfit):
                    system.prepare(case_of(1, sizes=cells.Shape(128, 192, 4, 1), number="fp8"))
                self.assertIn("has no m_grouped_bf16", kind(options(), device.Cpu()).available())
        with fake_deep_gemm(None, None, "bf16"):
            reason = deep_gemm.Masked(options(format="fp8"), device.Cpu()).available()
        self.assertIn("no m_grouped_fp8_gemm_nt_masked nor ", reason)

    def test_engines_are_told_of_scales(self):
        """vLLM by its two ways and SGLang by its one, as far as their signatures go."""
        told = []

        def new(hidden_states, w1, w2, topk_weights, topk_ids, quant_config=None):
            told.append(quant_config)

        def old(hidden_states, w1, w2, topk_weights, topk_ids, use_fp8_w8a8=False, w1_scale=None,
                w2_scale=None, block_shape=None):
            told.append((use_fp8_w8a8, w1_scale, w2_scale, block_shape))

        def sglang(hidden_states, w1, w2, topk_output, moe_runner_config, use_fp8_w8a8=False,
                   w1_scale=None, w2_scale=None, block_shape=None):
            self.assertEqual((topk_output, moe_runner_config), ((4, 5, None), "settings"))
            told.append((use_fp8_w8a8, w1_scale, w2_scale, block_shape))

        def described(w1_scale, w2_scale, block_shape):
            return True, w1_scale, w2_scale, block_shape

        for find, fused in ((triton.from_vllm, new), (triton.from_vllm, old),
                            (triton.from_sglang, sglang)):
            module = types.SimpleNamespace(
                fused_experts=fused, fp8_w8a8_moe_quant_config=described,
                StandardTopKOutput=lambda *given: given, MoeRunnerConfig=lambda inplace: "settings")
            with mock.patch("importlib.import_module", return_value=module):
                call = find()
                given = dict(hidden_states=1, w1=2, w2=3, topk_weights=4, topk_ids=5)
                call(**given, w1_scale=6, w2_scale=7, block_shape=[128, 128])
                self.assertEqual(told.pop(), (True, 6, 7, [128, 128]))
                call(**given)
                self.assertIn(told.pop(), (None, (False, None, None, None)))


class Kernel:
    """vLLM's FusedMoEKernel, as far as the peer goes: what it is made of, and apply()."""

    def __init__(self, prepare, experts):
        assert prepare == "prepare"
        self.layer, self.scales = experts

    def apply(self, hidden_states, w1, w2, topk_ids, topk_weights, activation, global_num_experts,
              expert_map, apply_router_weight_on_input):
        sizes = cells.Shape(hidden_states.shape[1], w2.shape[2], w1.shape[0], topk_ids.shape[1])
        assert (activation, global_num_experts, expert_map) == ("silu", sizes.experts, None)
        assert not apply_router_weight_on_input
        assert self.layer["num_experts"] == self.layer["num_local_experts"] == sizes.experts
        assert self.layer["max_num_tokens"] == len(hidden_states)
        assert sizes == tuple(self.layer[name] for name in (
            "hidden_dim", "intermediate_size", "num_logical_experts", "experts_per_token"))
        given = {}
        exec(RIGHT_FP8.replace(".bfloat16()", ""), given)  # as Cpu.middle says
        return given["fused_experts"](hidden_states, w1, w2, topk_weights, topk_ids, **self.scales)


@contextlib.contextmanager
def fake_vllm():
    """With the modules that its layer of DeepGEMM is taken from, which are one here."""
    made = []
    where = types.SimpleNamespace(
        is_workspace_manager_initialized=lambda: bool(made), init_workspace_manager=made.append,
        DeepGemmExperts=lambda layer, scales: (layer, scales), FusedMoEKernel=Kernel,
        MoEPrepareAndFinalizeNoDPEPModular=lambda: "prepare",
        MoEActivation=types.SimpleNamespace(SILU="silu"), FusedMoEConfig=dict,
        RoutingMethodType=types.SimpleNamespace(TopK=5), fp8_w8a8_moe_quant_config=dict,
        FusedMoEParallelConfig=types.SimpleNamespace(make_no_parallel=lambda: "alone"),
        __version__="9.8.7", __spec__=importlib.util.spec_from_loader("vllm", None))
    names = ("", ".v1.worker.workspace", *(f".model_executor.layers.fused_moe.{name}" for name in (
        "experts.deep_gemm_moe", "modular_kernel", "prepare_finalize.no_dp_ep", "config",
        "activation")))
    with mock.patch.dict(os.environ):
        sys.modules.update({f"vllm{name}": where for name in names})
        try:
            yield made
        finally:
            for name in names:
                del sys.modules[f"vllm{name}"]


class Layers(Peer):
    """vLLM's layer of DeepGEMM's products."""

    def system(self, number="fp8"):
        return vllm_deep_gemm.Layer(options(format=number), device.Cpu())

    def test_numbers(self):
        with fake_vllm() as workspaces, fake_deep_gemm(None, None):
            self.check(self.system, (1, 20), numbers.FP8_OFF_BY_MAX)
            self.assertEqual(workspaces, [torch.device("cpu")])  # one for all that are made
            self.assertEqual(os.environ["VLLM_USE_DEEP_GEMM"], "0")
            system = self.system()
            self.assertIsNone(system.available())
            self.assertEqual(system.version, "9.8.7")
            with self.assertRaises(peers.Unfit):
                system.prepare(case_of(1, sizes=cells.Shape(128, 192, 4, 1), number="fp8"))

    def test_what_is_absent_says_why(self):
        self.assertIn("fp8", self.system("bf16").available())
        with fake_deep_gemm(None, None):
            self.assertEqual("vllm is not installed; --triton-fused-moe PATH",
                             self.system().available())
        with fake_vllm():
            self.assertEqual("deep_gemm is not installed; --deep-gemm PATH",
                             self.system().available())
            with fake_deep_gemm(None, None):
                del sys.modules["vllm"].FusedMoEKernel
                self.assertIn("vllm: AttributeError", self.system().available())


class CudaHalf(unittest.TestCase):
    def setUp(self):
        self.addCleanup(pretend().close)
        PretendedGraph.made.clear()

    def test_replays_follow_the_draw(self):
        where = PretendedCuda()
        for kind in (deep_gemm.Contiguous, deep_gemm.Masked):
            case = case_of(6, sizes=SMALL, where=where, number="fp8")
            case.draw(1, "uniform")
            with fake_deep_gemm(fp8_contiguous, fp8_masked):
                system = kind(options(format="fp8"), where)
                self.assertIsNone(system.available())
            contestant = race.Contestant(system, where)
            contestant.get_ready(case)
            self.assertIsNone(contestant.absent)
            for routing in ("zipf", "one"):
                case.draw(2, routing)
                system.routed()
                contestant.race(0.0, 1.0, "x")
                contestant.verify(*race.answers_of(case))
                # Two products are compared with what they multiply, which is quantised.
                self.assertIsNone(contestant.unquantised)
                self.assertLess(contestant.error, numbers.FP8_OFF_BY_MAX, (kind, routing))
            PretendedGraph.made[-1].calls = []
            contestant.race(0.0, 1.0, "x")
            contestant.verify(*race.answers_of(case))
            self.assertFalse(contestant.result()["right"])

    def test_the_whole_program(self):
        with tempfile.TemporaryDirectory() as folder:
            given, out = pathlib.Path(folder) / "given.py", pathlib.Path(folder) / "r"
            given.write_text(RIGHT_FP8.replace("gates.bfloat16().float()", "gates"))
            with mock.patch.dict(device.DEVICES, cuda=PretendedCuda), \
                    mock.patch.dict(cells.SHAPES, tiny=SMALL), \
                    mock.patch("torch.cuda.is_available", return_value=True), \
                    fake_deep_gemm(fp8_contiguous, fp8_masked), \
                    contextlib.redirect_stdout(io.StringIO()), \
                    contextlib.redirect_stderr(io.StringIO()):
                status = MAIN["main"]([
                    "--format", "fp8", "--shape", "tiny", "--tokens", "5", "--steady", "0",
                    "--drift", "9", "--routing", "uniform", "--out", str(out), "--systems",
                    "deep_gemm,deep_gemm_masked,triton_fused_moe", "--triton-fused-moe",
                    str(given)])
            found = json.loads(pathlib.Path(f"{out}.json").read_text())
        self.assertEqual((status, found["wrong"], report.faults(found)), (0, [], []))
        self.assertEqual(found["cells"][0]["absent"], {})
        systems = found["cells"][0]["routings"][0]["systems"]
        self.assertEqual(set(systems), {"deep_gemm", "deep_gemm_masked", "triton_fused_moe"})
        for system in systems.values():  # on a GPU what is quantised in between has 16 bits
            self.assertLess(system["error"], numbers.FP8_OFF_BY_MAX)
        self.assertEqual([name for name in systems if "error_unquantised" in systems[name]],
                         ["triton_fused_moe"])


class OnAGpu(WithoutNumbers):
    def test_weights(self):
        for shape in ("q30b", "dsv3ep8", "mixtral"):  # many experts, top-k 1, the widest
            sizes = cells.SHAPES[shape]
            with FakeTensorMode():
                case = self.case(shape, 16, "fp8")
            for (w1, w2), (s1, s2) in ((case.weights(7), case.scales(7)),):
                self.assertEqual({each.device.type for each in (w1, w2, s1, s2)}, {"cuda"})
                self.assertEqual((w1.dtype, s1.dtype), (fp8.E4M3, torch.float32))
                self.assertTrue(all(each.is_contiguous() for each in (w1, w2, s1, s2)))
                self.assertEqual(w1.shape, (sizes.experts, 2 * sizes.intermediate, sizes.hidden))
                self.assertEqual(s1.shape, tuple(-(-each // 128) if place else each
                                                 for place, each in enumerate(w1.shape)))
                self.assertEqual(w2.shape, (sizes.experts, sizes.hidden, sizes.intermediate))
            bytes_of = sum(each[0].nbytes for each in (case.w1, case.w2, case.s1, case.s2))
            self.assertEqual(bytes_of, cells.set_bytes(sizes, "fp8"))

    def test_anchors(self):
        where = types.SimpleNamespace(
            torch_device=torch.device("cuda", 0), matrix=8192, read_bytes=4 << 30,
            anchor=lambda body, seconds: len(seen) + (seen.append(body()) or 1.0),
            collect=lambda: None)
        seen = []
        with FakeTensorMode(), no_numbers():
            self.assertEqual(list(device.anchors(where, "fp8", 0)), [
                "bf16_product_flops_per_s", "fp8_product_flops_per_s", "read_bytes_per_s"])
        self.assertEqual([each.dtype for each in seen], [torch.bfloat16] * 2 + [torch.float32])
        self.assertEqual(seen[1].shape, (8192, 8192))

    def test_layouts(self):
        seen = []
        fake = types.SimpleNamespace(get_m_alignment_for_contiguous_layout=lambda: 128)
        for kind in (deep_gemm.Contiguous, deep_gemm.Masked):
            with FakeTensorMode():
                case = self.case("qwen3next", 64, "fp8")
                system = kind(options(format="fp8"), case.device)
                system.module, system.multiply = fake, lambda *given: seen.append(given)
                with no_numbers():
                    system.prepare(case)
                system.routed()
                system.run(7)
                for a, b, out, layout, *_ in seen[-2:]:
                    tensors = (*a, *b, out, layout)
                    self.assertEqual({each.device.type for each in tensors}, {"cuda"})
                    self.assertEqual([each.dtype for each in tensors], [
                        fp8.E4M3, torch.float32] * 2 + [torch.bfloat16, torch.int32])
                    self.assertEqual((a[0].shape[-1], b[0].shape[1]),
                                     (b[0].shape[2], out.shape[-1]))
                    self.assertEqual(a[1].shape, (*a[0].shape[:-1], a[0].shape[-1] // 128))
                    self.assertEqual(a[1].stride()[-2:], (1, a[0].shape[-2]))
                    self.assertEqual(b[1].shape[1:], tuple(each // 128 for each in b[0].shape[1:]))
                    self.assertTrue(all(each.is_contiguous() for each in (a[0], *b, out)))


RIGHT_FP8 = """
import torch
from measure import fp8

def fused_experts(hidden_states, w1, w2, topk_weights, topk_ids, w1_scale, w2_scale, block_shape):
    assert block_shape == [128, 128]
    w1, w2 = fp8.dequantised(w1, w1_scale), fp8.dequantised(w2, w2_scale)
    gates = torch.einsum("th,tkih->tki", fp8.rounded(hidden_states), w1[topk_ids])
    gate, up = gates.bfloat16().float().chunk(2, -1)
    middle = fp8.rounded((torch.nn.functional.silu(gate) * up).bfloat16())
    out = torch.einsum("tki,tkhi->tkh", middle, w2[topk_ids])
    return (out * topk_weights[..., None]).sum(1).to(hidden_states.dtype)
"""
WRONG_FP8 = RIGHT_FP8.replace("dequantised(w1, w1_scale)",
                              "dequantised(w1, w1_scale.roll(1, 1))")


class Programs(Program):
    def test_all_systems(self):
        status, found = self.run_main("--drift", "9", "--format", "fp8", *self.peer(RIGHT_FP8))
        self.assertEqual(status, 0)
        self.assertEqual(report.faults(found), [])
        self.assertEqual(found["settings"]["format"], "fp8")
        self.assertIn("128 x 128", found["systems"][1]["absent"])
        self.assertEqual(list(found["anchors"]["drift"]), [
            "bf16_product_flops_per_s", "fp8_product_flops_per_s", "read_bytes_per_s"])
        for cell in found["cells"]:
            self.assertEqual(cell["format"], "fp8")
            for routing in cell["routings"]:
                ours, theirs = (routing["systems"][name] for name in ("moxie", "triton_fused_moe"))
                self.assertLess(ours["error"], numbers.FP8_OFF_BY_MAX)
                # One more rounding is more than that.
                self.assertLess(numbers.FP8_OFF_BY_MAX, theirs["error"])
                for system in (ours, theirs):
                    self.assertLess(system["error_unquantised"], numbers.UNQUANTISED_OFF_BY_MAX)
        self.assertIn(", fp8, ", (self.folder / "r.md").read_text())

    def test_wrong_scales(self):
        status, found = self.run_main("--drift", "9", "--format", "fp8", "--routing", "uniform",
                                      *self.peer(WRONG_FP8))
        self.assertEqual(status, 3)
        self.assertEqual(found["wrong"], ["triton_fused_moe at tiny 1 uniform",
                                          "triton_fused_moe at tiny 7 uniform"])

    def test_a_peer_without_fp8_says_so(self):
        self.assertIn("no w1_scale, w2_scale, block_shape",
                      self.refused("--format", "fp8", *self.peer(RIGHT)))


if __name__ == "__main__":
    unittest.main()
