"""bench/layer with weights of 4 bits: how they are read, Moxie's numbers, mistakes that are seen.

Wants what test_bench_layer.py wants.
"""

import contextlib
import io
import os
import pathlib
import runpy
import sys
import unittest
from unittest import mock

from test_bench_layer import TINY, Peer, Program, WithoutNumbers, case_of, options

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import peers
from measure import cells, device, four_bits, numbers, report
from measure.case import off_by
from peers import moxie
from pretended_gpu import Emulated, emulated

NAMES = tuple(four_bits.FORMATS)
SMALL = cells.Shape(96, 64, 4, 2)


def e2m1(code):
    """Sign, two bits of exponent with bias 1, one bit of mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -size if code & 8 else size


def weight(number, codes, scales, row, column):
    """One of one expert's, without the scale of a whole expert; as abi.h has it."""
    code = codes[row, column // 2].item() >> 4 * (column % 2) & 15
    if number == "int4_g32":
        return (code - 8) * scales[row, column // 32].item()
    if number == "mxfp4":
        return e2m1(code) * 2.0 ** (scales[row, column // 32].item() - 127)
    return e2m1(code) * scales[row, column // 16].item()


class OpenAI(unittest.TestCase):
    """bench/openai_mxfp4.py, as far as it goes without a GPU."""

    def main(self, *arguments):
        """(exit code, standard error)."""
        path = pathlib.Path(__file__).resolve().parent.parent / "bench" / "openai_mxfp4.py"
        said = io.StringIO()
        with contextlib.redirect_stderr(said), mock.patch("sys.path", ["", *sys.path]):
            try:
                code = runpy.run_path(str(path), run_name="openai")["main"](arguments)
            except SystemExit as end:
                code = end.code
        return code, said.getvalue()

    def test_refusals(self):
        code, said = self.main("--tokens", "1,0")
        self.assertEqual((code, "tokens are at least 1" in said), (2, True))
        with mock.patch("torch.cuda.is_available", lambda: False):
            self.assertEqual(self.main(), (1, "torch sees no GPU\n"))
        with mock.patch("torch.cuda.is_available", lambda: True):
            code, said = self.main("--triton-kernels", "/nowhere")
        self.assertEqual((code, "--triton-kernels" in said), (1, True))


class Reference(unittest.TestCase):
    def dense(self, case, forward, expert, projection):
        """In double, a number at a time."""
        number, codes = case.number, case.weights(forward)[projection][expert]
        scales = case.scales(forward)[projection][expert]
        found = torch.tensor([[weight(number, codes, scales, row, column)
                               for column in range(2 * codes.shape[1])]
                              for row in range(len(codes))], dtype=torch.double)
        if number == "nvfp4":
            shared = case.global_scales(forward)[projection][expert].double().view(-1)
            found *= shared.repeat_interleave(len(codes) // len(shared))[:, None]
        return found

    def test_against_plain_loops(self):
        for number in NAMES:
            case = case_of(3, sizes=SMALL, number=number)
            case.draw(3, "uniform")
            wanted = torch.zeros(SMALL.hidden, dtype=torch.double)
            for slot, expert in enumerate(case.ids[3, 2].tolist()):
                w1, w2 = (self.dense(case, 3, expert, projection) for projection in (0, 1))
                gate, up = (w1 @ case.x[3, 2].double()).chunk(2)
                middle = gate / (1 + torch.exp(-gate)) * up
                wanted += case.router[3, 2, slot].double() * (w2 @ middle)
            self.assertLess(off_by(case.answer(3, [2])[0], wanted), 1e-5, number)

    def test_weights(self):
        """Every code, scales apart, sums about as large as what is summed."""
        for number, form in four_bits.FORMATS.items():
            case = case_of(1, number=number)
            for codes, scales in zip(case.w1 + case.w2, case.s1 + case.s2):
                self.assertEqual((codes.dtype, scales.dtype), (torch.uint8, form.scale_dtype))
                self.assertTrue(codes.is_contiguous() and scales.is_contiguous())
                self.assertEqual(codes.unique().numel(), 256)
                self.assertGreater(scales.float().unique().numel(), 2)
                self.assertFalse(torch.equal(codes[0], codes[-1]))
            self.assertEqual({each is None for each in case.g1 + case.g2}, {number != "nvfp4"})
            for each in zip(*(case.dense(0, expert) for expert in range(TINY.experts))):
                lengths = torch.stack(each).norm(dim=-1)  # of rows; the scales' spread makes 1.3
                self.assertAlmostEqual(lengths.mean().item(), 1.3, delta=0.5)
            bytes_of = sum(each[0].nbytes for each in (case.w1, case.w2, case.s1, case.s2))
            self.assertEqual(bytes_of, cells.set_bytes(TINY, number))


class Wrong:
    """Other ways to read weights, each of which a check of a layer has to see."""

    unpacked, dequantised = four_bits.unpacked, four_bits.dequantised

    @classmethod
    def half(cls, number, codes):
        return cls.unpacked(number, codes).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)

    @classmethod
    def zero(cls, number, codes):
        return cls.unpacked(number, codes) + (1 if number == "int4_g32" else 0.5)

    @classmethod
    def group(cls, number, codes, scales, global_scales):
        return cls.dequantised(number, codes, scales.roll(1, -1), global_scales)

    @classmethod
    def row(cls, number, codes, scales, global_scales):
        return cls.dequantised(number, codes, scales.roll(1, 0), global_scales)

    @classmethod
    def part(cls, number, codes, scales, global_scales):
        both = global_scales.flip(-1) if global_scales.ndim else global_scales
        return cls.dequantised(number, codes, scales, both)


class Peers(Peer):
    def make(self, number):
        return moxie.Moxie(options(format=number), device.Cpu())

    def test_moxie(self):
        for number in NAMES:
            self.check(lambda number=number: self.make(number))
            self.assertLess(self.errors(self.make(number), 9, sizes=SMALL), numbers.OFF_BY_MAX)

    @unittest.skipUnless(os.environ.get("MOXIE_EMULATED"), "no emulated GPU was built")
    def test_moxie_s_kernels(self):
        """Few tokens, which mma multiplies, and more of an expert than that takes."""
        with emulated():
            for number in NAMES:
                for sizes, tokens in ((SMALL, 5), (cells.Shape(96, 64, 2, 1), 90)):
                    system = moxie.Moxie(options(format=number, plugin=os.environ["MOXIE_EMULATED"]),
                                         Emulated())
                    self.assertLess(self.errors(system, tokens, sizes=sizes), numbers.OFF_BY_MAX)

    def test_mistakes_are_seen(self):
        """Where a layer reads otherwise than the reference, whichever of the two is wrong."""
        for number in NAMES:
            mistakes = [("unpacked", Wrong.half), ("unpacked", Wrong.zero),
                        ("dequantised", Wrong.group), ("dequantised", Wrong.row)]
            if number == "nvfp4":
                mistakes.append(("dequantised", Wrong.part))
            for name, wrong in mistakes:
                with mock.patch.object(four_bits, name, wrong):
                    self.assertGreater(self.errors(self.make(number), 5), 5 * numbers.OFF_BY_MAX,
                                       (number, wrong))

    def test_formats_of_other_systems(self):
        for number in NAMES:
            for system in peers.systems(options(format=number), device.Cpu()):
                if not isinstance(system, moxie.Moxie):
                    self.assertRegex(system.available(), "^of (bf16|fp8|bf16 and fp8) only")


class OnAGpu(WithoutNumbers):
    def test_weights(self):
        for number, shape in (("mxfp4", "gptoss120b"), ("nvfp4", "dsv3ep8"), ("nvfp4", "q235b"),
                              ("int4_g32", "kimik2tp8")):
            sizes, group = cells.SHAPES[shape], four_bits.FORMATS[number].group
            with FakeTensorMode():
                case = self.case(shape, 16, number)
            (w1, w2), (s1, s2) = case.weights(7), case.scales(7)
            self.assertEqual({each.device.type for each in (w1, w2, s1, s2)}, {"cuda"})
            rows = (sizes.experts, 2 * sizes.intermediate), (sizes.experts, sizes.hidden)
            self.assertEqual(w1.shape, (*rows[0], sizes.hidden // 2))
            self.assertEqual(w2.shape, (*rows[1], sizes.intermediate // 2))
            self.assertEqual(s1.shape, (*rows[0], sizes.hidden // group))
            self.assertEqual(s2.shape, (*rows[1], sizes.intermediate // group))
            if number == "nvfp4":
                self.assertEqual([tuple(each.shape) for each in case.global_scales(7)],
                                 [(sizes.experts, 2), (sizes.experts,)])


class Programs(Program):
    def test_moxie_alone(self):
        for number in NAMES:
            status, found = self.run_main("--drift", "9", "--format", number)
            self.assertEqual((status, report.faults(found)), (0, []))
            self.assertEqual(list(found["anchors"]["drift"]), ["bf16_product_flops_per_s",
                                                               "read_bytes_per_s"])
            self.assertIn("skipped: torch_grouped_mm: of bf16 only", self.said)
            self.assertIn("skipped: triton_fused_moe: of bf16 and fp8 only", self.said)
            for cell in found["cells"]:
                self.assertEqual(cell["format"], number)
                for routing in cell["routings"]:
                    self.assertEqual(list(routing["systems"]), ["moxie"])
                    self.assertLess(routing["systems"]["moxie"]["error"], numbers.OFF_BY_MAX)
            self.assertIn(f", {number}, ", (self.folder / "r.md").read_text())

    def test_what_is_named_and_has_no_such_format(self):
        self.assertRegex(self.refused("--format", "nvfp4", "--deep-gemm", str(self.folder)),
                         "^deep_gemm: of bf16 and fp8 only\n$")

    def test_wrong_numbers(self):
        with mock.patch.object(four_bits, "unpacked", Wrong.half):
            status, found = self.run_main("--drift", "9", "--format", "mxfp4", "--routing",
                                          "uniform")
        self.assertEqual(status, 3)
        self.assertEqual(found["wrong"], ["moxie at tiny 1 uniform", "moxie at tiny 7 uniform"])


if __name__ == "__main__":
    unittest.main()
