"""hosts/python/moxie/experts.py over the library named by MOXIE_PLUGIN, against sums in Python."""

import array
import copy
import ctypes
import gc
import math
import os
import pathlib
import random
import sys
import threading
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "hosts" / "python"))

from moxie import Experts, MoxieError, Rows, abi, load, matrix, tensor  # noqa: E402
from moxie.experts import DTYPES, FORMATS  # noqa: E402

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS_MAX = 5, 3, 4, 2, 3
CONFIG = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_experts": EXPERTS,
    "top_k": TOP_K,
    "num_layers": 2,
    "forward_tokens_max": TOKENS_MAX,
    "weight_format": "f32",
    "input_format": "f32",
    "output_format": "f32",
    "cpu_threads": 2,
}
NO_GPU = ("moxie_cuda", "runner", "sm_90", "this library was built without sm_90 kernels")
GPU_CONFIG = {"device": "sm_90", "hidden_size": 8, "intermediate_size": 8, "weight_format": "bf16",
              "input_format": "bf16", "output_format": "bf16"}
SWIGLUOAI = {"activation": "swigluoai", "activation_alpha": 1.5, "activation_limit": 0.5}


def silu(gate, up):
    return gate / (1 + math.exp(-gate)) * up


def swigluoai(gate, up):
    gate, up = min(gate, 0.5), max(-0.5, min(up, 0.5))
    return gate / (1 + math.exp(-1.5 * gate)) * (up + 1)


class Model:
    """Random experts as lists, and their memory in the layout asked for."""

    def __init__(self, seed=1, interleaved=False, rows_in=False, bias=False):
        self.random = random.Random(seed)
        self.gate, self.up = self.table(INTERMEDIATE, HIDDEN), self.table(INTERMEDIATE, HIDDEN)
        self.down = self.table(HIDDEN, INTERMEDIATE)
        self.biases = [[self.numbers(n) if bias else [0.0] * n for _ in range(EXPERTS)]
                       for n in (INTERMEDIATE, INTERMEDIATE, HIDDEN)]
        self.interleaved, self.rows_in, self.bias, self.kept = interleaved, rows_in, bias, []

    def numbers(self, count):
        return [self.random.uniform(-1, 1) for _ in range(count)]

    def table(self, rows, columns):
        return [[self.numbers(columns) for _ in range(rows)] for _ in range(EXPERTS)]

    def keep(self, shape, numbers):
        self.kept.append(array.array("f", numbers))
        return tensor(self.kept[-1].buffer_info()[0], shape)

    def merge(self, gate, up):
        if not self.interleaved:
            return gate + up
        return [row for pair in zip(gate, up) for row in pair]

    def matrix(self, tables, biases, order):
        rows, columns = len(tables[0]), len(tables[0][0])
        shape = (len(tables), *((columns, rows) if self.rows_in else (rows, columns)))
        turned = [zip(*each) if self.rows_in else each for each in tables]
        values = self.keep(shape, [v for each in turned for row in each for v in row])
        bias = self.keep((len(tables), rows), [v for row in biases for v in row]) if self.bias else None
        return matrix(values, "f32", order, abi.ROWS_IN if self.rows_in else abi.ROWS_OUT, bias)

    def matrices(self):
        order = abi.ORDER_INTERLEAVED if self.interleaved else abi.ORDER_GATE_UP
        gates, ups, downs = self.biases
        return (self.matrix([self.merge(*pair) for pair in zip(self.gate, self.up)],
                            [self.merge(*pair) for pair in zip(gates, ups)], order),
                self.matrix(self.down, downs, abi.ORDER_PLAIN))

    def part(self, rank, ranks):
        """The experts of one rank; they keep what the model keeps."""
        own, count = copy.copy(self), EXPERTS // ranks
        mine = slice(rank * count, (rank + 1) * count)
        own.gate, own.up, own.down = self.gate[mine], self.up[mine], self.down[mine]
        own.biases = [each[mine] for each in self.biases]
        return own

    def product(self, table, bias, row):
        return [sum(a * b for a, b in zip(line, row)) + more for line, more in zip(table, bias)]

    def wanted(self, row, ids, weights, act=silu):
        y = [0.0] * HIDDEN
        for expert, weight in zip(ids, weights):
            if not 0 <= expert < EXPERTS:
                continue
            gate = self.product(self.gate[expert], self.biases[0][expert], row)
            up = self.product(self.up[expert], self.biases[1][expert], row)
            mid = [act(*pair) for pair in zip(gate, up)]
            down = self.product(self.down[expert], self.biases[2][expert], mid)
            y = [a + weight * b for a, b in zip(y, down)]
        return y


class Input:
    """Tokens with a gap of `gap` columns between rows, and room for y."""

    def __init__(self, tokens, seed=7, gap=0, no_expert=()):
        numbers = random.Random(seed)
        self.tokens, self.pitch = tokens, HIDDEN + gap
        self.x = array.array("f", [numbers.uniform(-1, 1) for _ in range(tokens * self.pitch)])
        self.ids = array.array("q", [e for _ in range(tokens)
                                     for e in numbers.sample(range(EXPERTS), TOP_K)])
        for place, value in zip(range(0, tokens * TOP_K, 3), no_expert):
            self.ids[place] = value
        self.weights = array.array("f", [numbers.random() for _ in self.ids])
        self.y = array.array("f", [math.nan] * len(self.x))

    def rows(self):
        def at(values, stride, number):
            return Rows(values.buffer_info()[0], stride, number)

        return (at(self.x, self.pitch, "f32"), at(self.ids, TOP_K, "i64"),
                at(self.weights, TOP_K, "f32"), at(self.y, self.pitch, "f32"))


class Allocator:
    def __init__(self, room=1 << 24):
        self.held, self.room, self.asked = {}, room, 0

    def allocate(self, kind, size, align):
        self.asked += size
        if self.asked > self.room:
            raise MemoryError(f"{size} bytes are too many")
        memory = ctypes.create_string_buffer(size + align)
        address = -(-ctypes.addressof(memory) // align) * align
        self.held[address] = memory
        return address

    def release(self, address):
        del self.held[address]


class Forward(unittest.TestCase):
    def setUp(self):
        self.library = load(os.environ["MOXIE_PLUGIN"])

    def run_layer(self, model, given, config=None, **options):
        experts = Experts(self.library, {**CONFIG, **(config or {})}, **options)
        layer = experts.add_layer(*model.matrices())
        layer.forward(given.tokens, *given.rows())
        return experts, layer

    def compare(self, model, given, act=silu):
        for token in range(given.tokens):
            row = slice(token * given.pitch, token * given.pitch + HIDDEN)
            pair = slice(token * TOP_K, (token + 1) * TOP_K)
            wanted = model.wanted(given.x[row], given.ids[pair], given.weights[pair], act)
            for seen, want in zip(given.y[row], wanted):
                self.assertAlmostEqual(seen, want, places=5)

    def test_layouts(self):
        for interleaved in (False, True):
            for rows_in in (False, True):
                for bias in (False, True):
                    model, given = Model(1, interleaved, rows_in, bias), Input(2)
                    self.run_layer(model, given)
                    self.compare(model, given)

    def test_activation_parameters(self):
        model, given = Model(), Input(3)
        self.run_layer(model, given, SWIGLUOAI)
        self.compare(model, given, swigluoai)

    def test_more_tokens_than_one_call(self):
        for tokens in (1, TOKENS_MAX, TOKENS_MAX + 1, 4 * TOKENS_MAX + 2):
            model, given = Model(), Input(tokens)
            self.run_layer(model, given)
            self.compare(model, given)

    def test_no_tokens(self):
        self.run_layer(Model(), Input(0))

    def test_strided_rows(self):
        model, given = Model(), Input(7, gap=3)
        self.run_layer(model, given)
        self.compare(model, given)
        for token in range(given.tokens):
            gap = given.y[token * given.pitch + HIDDEN:(token + 1) * given.pitch]
            self.assertTrue(all(math.isnan(v) for v in gap))

    def test_ids_without_an_expert(self):
        model = Model()
        given = Input(8, no_expert=(EXPERTS, -1, 2**31, EXPERTS + 1, 2**40))
        self.run_layer(model, given)
        self.compare(model, given)

    def test_ids_that_a_map_gives(self):
        """In two calls, and none of them where the next call has no map."""
        model, given = Model(), Input(TOKENS_MAX + 3, no_expert=(7, -1, 6))
        plain = Input(2)
        named = {0: 3, 1: -1, 2: EXPERTS, 3: 0, 4: 2, 5: 1}
        numbers = array.array("i", [named.get(place, 1) for place in range(7)])
        expert_map = tensor(numbers.buffer_info()[0], (7,), "i32")
        experts = Experts(self.library, CONFIG)
        layer = experts.add_layer(*model.matrices())
        layer.forward(given.tokens, *given.rows(), expert_map=expert_map)
        layer.forward(plain.tokens, *plain.rows())
        self.compare(model, plain)
        given.ids = array.array("q", [numbers[e] if 0 <= e < 7 else -1 for e in given.ids])
        self.compare(model, given)
        with self.assertRaisesRegex(MoxieError, "batch.expert_map"):
            layer.forward(plain.tokens, *plain.rows(),
                          expert_map=tensor(numbers.buffer_info()[0], (3,), "i64"))
        with self.assertRaisesRegex(MoxieError, "expert_map a Tensor or None"):
            layer.forward(plain.tokens, *plain.rows(), expert_map=numbers)

    def test_layers_share_the_buffers(self):
        allocator = Allocator()
        models, given = (Model(1), Model(2)), (Input(4, 3), Input(4, 4))
        experts, first = self.run_layer(models[0], given[0], allocator=allocator)
        asked = allocator.asked
        self.assertGreater(asked, 0)
        second = experts.add_layer(*models[1].matrices())
        second.forward(given[1].tokens, *given[1].rows())
        self.assertEqual(allocator.asked, asked)
        self.assertNotEqual(first.index, second.index)
        for model, each in zip(models, given):
            self.compare(model, each)

    def test_a_step_is_begun_once(self):
        """What follows may be captured into a graph, which beginning a step may not."""
        experts, layer = self.run_layer(Model(), Input(2))
        calls, given = mock.Mock(wraps=experts._call), Input(2)
        experts._call = calls
        layer.forward(given.tokens, *given.rows())
        self.assertEqual(calls.call_count, 1)
        layer.forward(1, *given.rows())
        self.assertEqual(calls.call_count, 3)

    def test_a_step_whose_begin_was_interrupted(self):
        """Its tokens are not those that were begun before."""
        model, given = Model(), Input(3)
        experts, layer = self.run_layer(model, Input(2))
        begin = experts._call

        def interrupted(*arguments):
            begin(*arguments)
            raise KeyboardInterrupt

        with mock.patch.object(experts, "_call", interrupted):
            with self.assertRaises(KeyboardInterrupt):
                layer.forward(given.tokens, *given.rows())
        layer.forward(2, *given.rows())
        layer.forward(given.tokens, *given.rows())
        self.compare(model, given)

    def test_a_check_is_not_of_what_is_closed_meanwhile(self):
        experts = Experts(load(), CONFIG)
        closing = threading.Thread(target=experts.close)
        with experts.polling:  # as check() has it, behind its look at the dispatcher
            closing.start()
            closing.join(0.2)
            self.assertTrue(closing.is_alive() and experts.dispatcher)
        closing.join(10)
        with self.assertRaisesRegex(MoxieError, "these experts are closed"):
            experts.check()

    def test_num_layers_left_out(self):
        """The library has one, and the error says so."""
        config = {key: value for key, value in CONFIG.items() if key != "num_layers"}
        experts = Experts(self.library, config)
        layer = experts.add_layer(*Model(1).matrices())
        with self.assertRaisesRegex(MoxieError, "all 1 layers .*: set num_layers") as caught:
            experts.add_layer(*Model(2).matrices())
        self.assertEqual(caught.exception.code, abi.E_CAPACITY)
        del layer

    def test_a_layer_that_is_given_up(self):
        experts, layer = self.run_layer(Model(1), Input(1))
        kept = experts.add_layer(*Model(2).matrices())
        with self.assertRaisesRegex(MoxieError, "set num_layers"):
            experts.add_layer(*Model(3).matrices())
        index = layer.index
        del layer
        self.assertEqual(experts.add_layer(*Model(3).matrices()).index, index)
        del kept

    def test_everything_is_given_back(self):
        allocator = Allocator()
        experts, layer = self.run_layer(Model(), Input(1), allocator=allocator)
        self.assertTrue(allocator.held)
        del layer, experts
        gc.collect()
        self.assertEqual(allocator.held, {})

    def test_closed(self):
        """Once, whoever still holds layers; they are refused, and go in peace."""
        allocator, given = Allocator(), Input(1)
        with Experts(self.library, CONFIG, allocator=allocator) as experts:
            gone, layer = (experts.add_layer(*Model(seed).matrices()) for seed in (1, 2))
            layer.forward(given.tokens, *given.rows())
            with experts.lock:
                del gone
        self.assertEqual((allocator.held, experts.made), ({}, {}))
        for call in (lambda: layer.forward(given.tokens, *given.rows()), layer.weights_updated,
                     lambda: layer.forward(0, *given.rows()), experts.check,
                     lambda: experts.add_layer(*Model(3).matrices()),
                     lambda: experts.set_active_ranks((True,))):
            with self.assertRaisesRegex(MoxieError, "^these experts are closed: make") as caught:
                call()
            self.assertEqual(caught.exception.code, abi.E_INVALID)
        with mock.patch.object(sys, "unraisablehook") as printed, \
                mock.patch.object(experts, "runs") as runs, \
                mock.patch.object(experts, "moves") as moves:
            experts.close()
            del layer, call
            gc.collect()
            self.assertEqual((runs.mock_calls, moves.mock_calls), ([], []))
        printed.assert_not_called()

    def test_closed_after_a_failure(self):
        """Of a forward within the with statement, which is what is raised."""
        allocator, given = Allocator(), Input(1)
        with self.assertRaisesRegex(MoxieError, "tokens: -1"):
            with Experts(self.library, CONFIG, allocator=allocator) as experts:
                layer = experts.add_layer(*Model().matrices())
                layer.forward(-1, *given.rows())
        self.assertEqual(allocator.held, {})
        del layer

    def test_a_layer_given_up_inside_a_step(self):
        experts, layer = self.run_layer(Model(), Input(1))
        with experts.lock:
            del layer
            self.assertEqual(len(experts.dead), 1)
        given, model = Input(2), Model(2)
        experts.add_layer(*model.matrices()).forward(given.tokens, *given.rows())
        self.assertFalse(experts.dead)
        self.compare(model, given)

    def test_what_is_given_up_in_a_capture_outlives_it(self):
        """Its end would wait for the device, and spoil the capture."""
        capturing, given = mock.Mock(return_value=False), Input(1)
        experts, layer = self.run_layer(Model(), given, capturing=capturing)
        kept = experts.add_layer(*Model(2).matrices())
        capturing.return_value = True
        index = layer.index
        del layer
        kept.forward(given.tokens, *given.rows())
        with self.assertRaisesRegex(MoxieError, "layers are in use"):
            experts.add_layer(*Model(3).matrices())
        self.assertEqual((list(experts.made), list(experts.dead)), ([0, 1], [index]))
        capturing.return_value = False
        kept.forward(given.tokens, *given.rows())
        self.assertEqual((list(experts.made), list(experts.dead)), ([1], []))

    def test_experts_given_up_in_a_capture(self):
        capturing, given = mock.Mock(return_value=True), Input(1)
        others, other = self.run_layer(Model(), given, capturing=capturing)
        for after in (lambda: other.forward(given.tokens, *given.rows()),
                      lambda: others.add_layer(*Model(3).matrices()),
                      lambda: Experts(self.library, CONFIG), others.close):
            allocator = Allocator()
            experts, layer = self.run_layer(Model(), given, allocator=allocator,
                                            capturing=capturing)
            held = set(allocator.held)
            del experts, layer
            gc.collect()
            other.forward(given.tokens, *given.rows())
            self.assertTrue(held)
            self.assertEqual(set(allocator.held), held)
            capturing.return_value = False
            after()
            self.assertEqual((allocator.held, len(self.library.given_up)), ({}, 0))
            capturing.return_value = True

    def test_closed_in_a_capture(self):
        allocator = Allocator()
        with Experts(self.library, CONFIG, allocator=allocator, capturing=lambda: True) as experts:
            layer = experts.add_layer(*Model().matrices())
            del layer
            self.assertTrue(allocator.held)
        self.assertEqual((allocator.held, experts.made), ({}, {}))

    def test_threads_take_turns(self):
        models, inputs = (Model(1), Model(2)), (Input(9, 3), Input(9, 4))
        experts = Experts(self.library, CONFIG)
        layers = [experts.add_layer(*model.matrices()) for model in models]

        def work(layer, given):
            for _ in range(200):
                layer.forward(given.tokens, *given.rows())

        threads = [threading.Thread(target=work, args=pair) for pair in zip(layers, inputs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for model, given in zip(models, inputs):
            self.compare(model, given)


class Refusals(unittest.TestCase):
    def setUp(self):
        self.library = load(os.environ["MOXIE_PLUGIN"])

    def refused(self, code, config=None, **options):
        with self.assertRaises(MoxieError) as caught:
            Experts(self.library, {**CONFIG, **(config or {})}, **options)
        self.assertEqual(caught.exception.code, code)
        return caught.exception

    def test_every_reason(self):
        error = self.refused(abi.E_CONFIG, {"top_k": 40, "hidden_size": 0, "weight_format": "f8"})
        for key in ("top_k", "hidden_size", "weight_format"):
            self.assertRegex(error.text, f"\n  {key}: ")

    def test_word_that_is_no_key(self):
        error = self.refused(abi.E_CONFIG, {"activaton": "gelu", "top": 2})
        self.assertIn("has no key activaton, top; docs/", error.text)
        self.assertEqual(error.keys, ("activaton", "top"))

    def test_several_ranks(self):
        for sizes in ({"ep_size": 2}, {"ep_size": 2, "tp_size": 2}):
            error = self.refused(abi.E_UNSUPPORTED, sizes)
            self.assertIn("ep_size is 2, and no all_gather says how the ranks", error.text)
            self.assertEqual(error.keys, ("ep_size",))

    def test_words_that_there_are_not(self):
        values = tensor(64, (1, 2, 2))
        numbers, formats = ", ".join(DTYPES), ", ".join(FORMATS)
        for call, words in (
                (lambda: tensor(64, (2,), "f99"),
                 f"'f99' is no number type; want one of {numbers}"),
                (lambda: matrix(values, "fp8", abi.ORDER_PLAIN),
                 f"'fp8' is no weight format; want one of {formats}")):
            with self.assertRaisesRegex(MoxieError, words) as caught:
                call()
            self.assertEqual(caught.exception.code, abi.E_INVALID)
        for table, make in ((DTYPES, tensor), (FORMATS, matrix)):  # which name them all
            for word in table:
                self.assertIn(f'"{word}"', make.__doc__)
                self.assertIn(f"`{word}`", (ROOT / "hosts" / "python" / "README.md").read_text())

    def test_tensors_that_are_none(self):
        """What ctypes would cut, fill up with zeros, or refuse in words of its own."""
        values, name = tensor(64, (1, 2, 2)), "device .DLPack's type, index."
        for call, words in (
                (lambda: tensor(64, (2, 3), strides=(3,)), "shape .2, 3., strides .3., .*as many"),
                (lambda: tensor(64, (2, 3), strides=(3, 1, 1)), "want as many strides"),
                (lambda: tensor(64, (2**64 + 3,)), "shape: .18446744073709551619,.; want whole"),
                (lambda: tensor(64, (3,), strides=(2**63,)), "strides: .9223372036854775808,.; "),
                (lambda: tensor(64, 5), "shape: 5; want whole numbers"),
                (lambda: tensor(64, (2.0,)), r"shape: \(2.0,\); want whole numbers"),
                (lambda: tensor("x", (2,)), "address: .'x',.; want whole numbers from 0 to 1844"),
                (lambda: tensor(2**64, (2,)), "address: .18446744073709551616,.; want"),
                (lambda: tensor(64, (2,), device=1), f"{name}: 1; want whole numbers"),
                (lambda: tensor(64, (2,), device=(1,)), r"device \[1\]; want .*type and index"),
                (lambda: tensor(64, (2,), device=(1, 2**40)), f"{name}: .* to 2147483647"),
                (lambda: matrix(5, "f32", 0), "values: a int; want what moxie.tensor makes"),
                (lambda: matrix(values, "f32", 0, bias=5), "bias: a int; want what moxie.tensor"),
                (lambda: matrix(values, "nvfp4", 0, global_scales=1.0), "global_scales: a float; "),
                (lambda: matrix(values, "f32", "gate_up"), "order, orientation: .'gate_up', 0."),
                (lambda: matrix(values, "f32", 2**32 + 1), "order, orientation: .4294967297, 0.")):
            with self.subTest(words), self.assertRaisesRegex(MoxieError, words) as caught:
                call()
            self.assertEqual(caught.exception.code, abi.E_INVALID)
        self.assertEqual(tensor(64, ()).ndim, 0)
        experts = Experts(self.library, CONFIG)
        for pair, name in (((values, values), "w1: a tensor"),
                           ((matrix(values, "f32", 0), None), "w2: a NoneType")):
            with self.assertRaisesRegex(MoxieError, f"{name}; want what moxie.matrix makes"):
                experts.add_layer(*pair)

    def test_what_is_no_library_and_no_configuration(self):
        for arguments, words in (((None, {}), "library: a NoneType; want what moxie.load makes"),
                                 (("libmoxie.so", CONFIG), "library: a str; want"),
                                 ((self.library, None), "config: a NoneType; want a dict of the k"),
                                 ((self.library, 3), "config: a int; want a dict")):
            with self.assertRaisesRegex(MoxieError, f"^{words}") as caught:
                Experts(*arguments)
            self.assertEqual(caught.exception.code, abi.E_INVALID)

    def test_keys_that_are_no_words(self):
        error = self.refused(abi.E_INVALID, {5: 2, "zz": 3})
        self.assertIn("5 is a int and no key of the configuration: want a str", error.text)

    def test_a_device_that_is_none_is_refused_before_anything_is_made(self):
        allocator = Allocator()
        self.refused(abi.E_INVALID, allocator=allocator, device=None)
        self.assertEqual(allocator.held, {})

    def test_layers_that_nobody_adds_cost_nothing(self):
        """A number of each would take 64 GiB."""
        experts = Experts(self.library, {**CONFIG, "num_layers": 2**31 - 1})
        self.assertTrue(experts.has_room())
        self.assertEqual([experts.add_layer(*Model().matrices()).index for _ in range(2)], [0, 0])
        kept = [experts.add_layer(*Model().matrices()) for _ in range(3)]
        self.assertEqual(sorted(layer.index for layer in kept), [0, 1, 2])

    def test_a_layer_that_dies_meanwhile_leaves_no_place(self):
        """Its number is not there before its runner is destroyed."""
        experts = Experts(self.library, CONFIG)
        layers = [experts.add_layer(*Model().matrices()) for _ in range(experts.layers_max)]
        with mock.patch.object(experts, "_drain"):
            del layers[0]
            self.assertTrue(experts.has_room())
            with self.assertRaisesRegex(MoxieError, "layers are in use: set num_layers"):
                experts.add_layer(*Model().matrices())
        experts.add_layer(*Model().matrices())

    def test_no_bound(self):
        self.assertIn("forward_tokens_max",
                      self.refused(abi.E_CAPACITY, {"forward_tokens_max": 0}).text)

    def test_device_that_the_library_was_not_built_for(self):
        reasons = [row[-1] for row in self.library.probe() if row[:3] == NO_GPU[:3]]
        if reasons != [NO_GPU[-1]]:
            self.skipTest("the library was built with GPU kernels")
        error = self.refused(abi.E_UNAVAILABLE, GPU_CONFIG)
        self.assertIn(f"runner moxie_cuda cannot run on sm_90: {NO_GPU[-1]}; load", error.text)
        self.assertEqual(error.keys, ("device",))

    def test_runner_of_the_hosts_own(self):
        allocator = Allocator()
        error = self.refused(abi.E_UNSUPPORTED, {"runner": "none"}, allocator=allocator)
        self.assertIn("Experts are what computes them: set runner to auto", error.text)
        self.assertEqual(error.keys, ("runner",))
        self.assertEqual(allocator.asked, 0)

    def test_allocator_that_fails(self):
        allocator = Allocator()
        experts = Experts(self.library, CONFIG, allocator=allocator)
        held, allocator.room = set(allocator.held), allocator.asked + 200
        with self.assertRaises(MoxieError) as caught:
            experts.add_layer(*Model().matrices())
        self.assertEqual(caught.exception.code, abi.E_MEMORY)
        self.assertIsInstance(caught.exception.__cause__, MemoryError)
        self.assertEqual(set(allocator.held), held)
        allocator.room = 1 << 24
        experts.add_layer(*Model().matrices())

    def test_weights_of_another_shape(self):
        experts = Experts(self.library, CONFIG)
        w1, w2 = Model().matrices()
        w2.values.shape[1] += 1
        with self.assertRaisesRegex(MoxieError, r"weights.w2.values"):
            experts.add_layer(w1, w2)

    def test_forward_of_another_number(self):
        experts = Experts(self.library, CONFIG)
        layer, given = experts.add_layer(*Model().matrices()), Input(1)
        x, ids, weights, y = given.rows()
        with self.assertRaisesRegex(MoxieError, "batch.x: dtype"):
            layer.forward(1, x._replace(number="bf16"), ids, weights, y)
        layer.forward(1, x, ids, weights, y)
        with self.assertRaisesRegex(MoxieError, "'bf17' is no number type; .*bf16") as caught:
            layer.forward(1, x._replace(number="bf17"), ids, weights, y)
        self.assertEqual(caught.exception.code, abi.E_INVALID)
        layer.forward(1, x, ids, weights, y)
        for tokens, rows, stream in (
                (1.0, x, None), (None, x, None), (1, x._replace(stride=5.0), None),
                (1, x._replace(address=None), None), (1, x._replace(number=["f32"]), None),
                (1, self, None), (1, x, "stream")):
            with self.assertRaisesRegex(MoxieError, "^forward: .*; want tokens as an int, four Rows "
                                        ".* stream an int or None") as caught:
                layer.forward(tokens, rows, ids, weights, y, stream)
            self.assertEqual(caught.exception.code, abi.E_INVALID)
        layer.forward(1, x, ids, weights, y)
        with self.assertRaisesRegex(MoxieError, "tokens: -1; want 0 or more") as caught:
            layer.forward(-1, x, ids, weights, y)
        self.assertEqual(caught.exception.code, abi.E_INVALID)


if __name__ == "__main__":
    unittest.main()
