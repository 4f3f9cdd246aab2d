"""For the tests of an engine's adapter: a layer of experts, its weights and rows, and what plain
loops over them give; and the tests that every engine's suite has. What imports this has
hosts/python among its paths.
"""

import gc
import os
import pathlib
import subprocess
import sys
import unittest
import weakref
from unittest import mock

import torch

from moxie.modules import kind_of

ROOT = pathlib.Path(__file__).resolve().parent.parent

DEVICE = torch.device(os.environ.get("MOXIE_TEST_DEVICE", "cpu"),
                      int(os.environ.get("MOXIE_TEST_INDEX", "0")))
ON_CPU = DEVICE.type == "cpu"
E4M3 = torch.float8_e4m3fn
# Of None, weights as the rows; fp8 by blocks, weight rows, experts; mxfp4. A GPU quantises rows twice
# for fp8, of which some come to other codes than here.
AS_ROWS = (None, "mxfp4")  # whose rows are multiplied as they are
OFF_BY_MAX = {scheme: 8e-3 if ON_CPU or scheme in AS_ROWS else 3e-2
              for scheme in (*AS_ROWS, "block", "channel", "tensor")}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Dimensions of [E, N blocks, 128, K blocks, 128] that have one scale.
SCALED = {"block": (2, 4), "channel": (3, 4), "tensor": (1, 2, 3, 4)}

# What lies between the products, of gate and up by halves or in turns.
GATES = {
    "silu": lambda gate, up: torch.nn.functional.silu(gate) * up,
    "gelu": lambda gate, up: torch.nn.functional.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: torch.nn.functional.gelu(gate, approximate="tanh") * up,
}


def halves(gate):
    return lambda both: gate(*both.chunk(2, -1))


def in_turns(gate):
    return lambda both: gate(both[..., ::2], both[..., 1::2])


def swiglu(alpha, beta, limit):
    """The gate of gpt-oss."""
    def gate(gate, up):
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + beta)
    return gate


def off_by(seen, wanted):
    return ((seen.float() - wanted).norm() / wanted.norm()).item()


def coded(row):
    """What a GPU multiplies by fp8 weights: e4m3, with a scale for each 128 numbers of a row."""
    groups = torch.nn.functional.pad(row, (0, -row.shape[-1] % 128)).unflatten(-1, (-1, 128))
    scales = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
    return ((groups / scales).to(E4M3).float() * scales).flatten(-2)[..., :row.shape[-1]]


def capturing():
    """As if a graph was being captured on DEVICE."""
    kind = kind_of(DEVICE)._replace(capturing=lambda: True)
    return mock.patch("moxie.modules.KINDS", {DEVICE.type: kind})


class Case:
    """between: of a row's gate and up, or of up alone where it is not gated. scheme: of
    OFF_BY_MAX. more: other sizes."""

    experts, hidden, inner, top_k = 8, 256, 128, 2

    def __init__(self, between, gated=True, scheme=None, tokens=5, bias=False, **more):
        self.between, self.scheme, self.tokens = between, scheme, tokens
        for name, value in more.items():
            setattr(self, name, value)
        self.chance = torch.Generator(DEVICE).manual_seed(tokens)
        rows = self.inner * (2 if gated else 1)
        sizes = (self.experts, rows, self.hidden), (self.experts, self.hidden, self.inner)
        self.dense = [self.random(*size) / size[-1] ** 0.5 for size in sizes]
        self.biases = [self.random(*size[:2]).bfloat16() if bias else None for size in sizes]
        self.scales = [None, None]
        if scheme is None:
            self.weights = [each.bfloat16() for each in self.dense]
        else:
            self.weights, self.scales = zip(*map(self.quantised, self.dense))
        self.dense = [self.dequantised(*each) for each in zip(self.weights, self.scales)]
        self.x = self.random(tokens, self.hidden).bfloat16()
        self.router = torch.rand(tokens, self.top_k, generator=self.chance, device=DEVICE)
        self.ids = torch.rand(tokens, self.experts, generator=self.chance, device=DEVICE).topk(
            self.top_k)[1].int()

    def random(self, *shape):
        return torch.randn(*shape, generator=self.chance, device=DEVICE)

    def bytes(self, least, end, *shape):
        return torch.randint(least, end, shape, generator=self.chance, device=DEVICE,
                             dtype=torch.uint8)

    def quantised(self, dense):
        """Values and scales, [E, N / 128, K / 128], [E, N, 1] or [E]; those of one expert are far
        from another's, so that the wrong ones are seen."""
        if self.scheme == "mxfp4":  # of any numbers
            return self.bytes(0, 256, *dense.shape[:2], dense.shape[2] // 2), self.bytes(
                119, 123, *dense.shape[:2], dense.shape[2] // 32)
        blocks = dense.unflatten(-1, (-1, 128)).unflatten(1, (-1, 128))
        scales = blocks.abs().amax(SCALED[self.scheme], keepdim=True) / 448
        values = (blocks / scales).flatten(1, 2).flatten(2).to(E4M3)
        scales = scales * torch.exp2(torch.randint(
            -2, 3, scales.shape, generator=self.chance, device=DEVICE))
        kept = {"block": lambda: scales.squeeze(4).squeeze(2), "channel": lambda: scales.flatten(1, 3),
                "tensor": scales.flatten}[self.scheme]()
        return values, kept.contiguous()

    def dequantised(self, values, scales):
        if scales is None:
            return values.float()
        if self.scheme == "mxfp4":
            codes = torch.stack((values & 15, values >> 4), -1).flatten(-2).long()
            numbers = torch.tensor([*E2M1, *(-each for each in E2M1)], device=DEVICE)[codes]
            return numbers * torch.exp2(scales.float() - 127).repeat_interleave(32, 2)
        if self.scheme == "block":
            return values.float() * scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
        return values.float() * (scales if self.scheme == "channel" else scales[:, None, None])

    def multiplied(self, row):
        return row if ON_CPU or self.scheme in AS_ROWS else coded(row)

    def one(self, expert, row):
        """What an expert gives of a row."""
        both = self.dense[0][expert] @ self.multiplied(row)
        if self.biases[0] is not None:
            both = both + self.biases[0][expert].float()
        out = self.dense[1][expert] @ self.multiplied(self.between(both))
        return out if self.biases[1] is None else out + self.biases[1][expert].float()

    def wanted(self, expert_map=None, on_input=False):
        found = torch.zeros(self.tokens, self.hidden, device=DEVICE)
        for token in range(self.tokens):
            for slot in range(self.top_k):
                expert = self.ids[token, slot].item()
                if expert >= 0 and expert_map is not None:
                    expert = expert_map[expert].item()
                if expert < 0:
                    continue
                row, share = self.x[token].float(), self.router[token, slot]
                if on_input:
                    row, share = (self.x[token] * share.bfloat16()).float(), 1.0
                found[token] += share * self.one(expert, row)
        return found

    def strided(self):
        """Rows and router weights with others between them, and wide ids."""
        self.ids = self.ids.long()
        self.router = torch.stack((self.router, self.router), -1)[..., 0]
        self.x = torch.cat((self.x, self.x), -1)[:, :self.hidden]
        assert (self.x.is_contiguous(), self.router.stride(1)) == (False, 2)
        return self


class Sharing:
    """Tests of what a moxie.engine.Borrower keeps. A suite's has its adapter and Case, of whose
    made() run() takes what an engine would call, and borrower() says where the Borrower is."""

    adapter = case = None

    def setUp(self):
        self.adapter.ENGINE.shared.clear()
        gc.collect()

    def more(self):
        return len(self.adapter.ENGINE.shared)

    def test_buffers_stay_where_they_are(self):
        """Where an engine makes its layers anew, whose graphs it replays."""
        case = self.case(scheme="block", inner=384)
        made = case.made()
        case.run(made)
        borrower = weakref.ref(self.borrower(made))
        shared, held = borrower().shared, set(borrower().shared.allocator.held)
        del made
        gc.collect()
        self.assertIsNone(borrower())
        made = case.made()
        self.assertLess(off_by(case.run(made), case.wanted()), OFF_BY_MAX["block"])
        self.assertIs(self.borrower(made).shared, shared)
        self.assertEqual(set(shared.allocator.held), held)

    def test_weights_that_moved(self):
        case = self.case()
        made = case.made()
        borrower, first = self.borrower(made), case.run(made)
        layer = borrower.layer
        self.assertTrue(torch.equal(case.run(made), first))
        self.assertIs(borrower.layer, layer)
        case.weights[1] = -case.weights[1]
        self.assertTrue(torch.equal(case.run(made), -first))
        self.assertIsNot(borrower.layer, layer)
        case.weights[1].neg_()  # where they lie
        layer = borrower.layer
        self.assertTrue(torch.equal(case.run(made), first))
        self.assertIs(borrower.layer, layer)

    @unittest.skipIf(ON_CPU, "of a GPU")
    def test_a_graph(self):
        case = self.case(scheme="block", tokens=12)
        made = case.made()
        case.run(made)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = case.run(made)
        case.x.copy_(self.case(scheme="block", tokens=13).x[:12])
        case.ids.copy_(case.ids.roll(1, 0))
        y.fill_(float("nan"))
        graph.replay()
        self.assertLess(off_by(y, case.wanted()), OFF_BY_MAX["block"])


def python(program, **environment):
    """What a program prints in a process of its own."""
    path = [str(ROOT / "hosts" / "python"), str(ROOT / "host_tests")]
    return subprocess.run(
        [sys.executable, "-c", program], text=True, capture_output=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment})


class Found:
    """Tests of what an engine finds: a suite's has its adapter, plugin (a module) and group."""

    adapter = plugin = group = None

    def test_without_a_library_nothing_changes(self):
        with mock.patch.object(self.adapter, "register") as register:
            with mock.patch.dict(os.environ):
                del os.environ["MOXIE_PLUGIN"]
                self.plugin.register()
            register.assert_not_called()
            self.plugin.register()
            register.assert_called_once_with()

    def test_what_is_found(self):
        """The name in the package's description is that of the function; it imports no engine."""
        described = (ROOT / "hosts" / "python" / "pyproject.toml").read_text()
        name, engine = self.plugin.__name__, self.adapter.ENGINE.name
        self.assertIn(f'[project.entry-points."{self.group}"]\nmoxie = "{name}:register"', described)
        ran = python(f"import {name}; {name}.register(); import sys; "
                     f"print(sorted(sys.modules.keys() & {{'torch', '{engine}', 'moxie.{engine}'}}))",
                     MOXIE_PLUGIN="")
        self.assertEqual((ran.stdout, ran.stderr), ("[]\n", ""))
