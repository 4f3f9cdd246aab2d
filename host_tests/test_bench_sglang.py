"""bench/sglang.py with a stand-in for SGLang's engine: what it asks for, compares and refuses.

Wants torch, as moxie.sglang does. No test reads a speed.
"""

import importlib.util
import json
import pathlib
import runpy
import statistics
import sys
import tempfile
import types
import unittest
from unittest import mock

import torch_python

torch_python.require(importlib.util.find_spec("torch"), "torch is")
import torch  # noqa: E402
from bench_engine import HERE, EngineProgram, measure  # noqa: E402

ENGINE = f"""
import dataclasses, os, sys, time, types
from importlib.metadata import entry_points
OURS = "MOXIE_PLUGIN" in os.environ
__version__ = "0.5.23"
sys.path.append({str(HERE)!r})
import stand_in
SHIFT, LAYERS, FAULT = (os.environ.get(name, "") for name in ("SHIFT", "LAYERS", "FAULT"))
# Moxie's adapter is itself, which wants torch, where nothing is to go wrong.
ADAPTER = OURS and not (SHIFT or LAYERS or FAULT)
PARALLEL = types.SimpleNamespace(tp_rank=0, attn_dp_size=1, tp_group=None)


class Scheduler:
    pass


@dataclasses.dataclass
class PortArgs:
    rpc_ipc_name: str


class SchedulerIpcChannels:
    @classmethod
    def create(cls, *, port_args, is_rank_zero):
        return port_args.rpc_ipc_name


class Engine:
    def __init__(self, **given):
        assert given["skip_tokenizer_init"] and given["disable_radix_cache"]
        assert given["model_path"] == "somewhere" and "load_format" not in given
        assert given["disable_cuda_graph"] is True and given["context_length"] >= 1000 + 8
        assert given["chunked_prefill_size"] == 8192
        if FAULT == "hangs":
            time.sleep(600)
        if ADAPTER:
            import torch
            torch.compiler.disable = lambda function: function  # which loads all of the compiler
            import sglang_stand_in
            sglang_stand_in.install()
        else:
            stand_in.install_torch()
            if OURS:
                stand_in.install_adapter("sglang")
        moves = given.get("moe_a2a_backend"), given.get("moe_runner_backend")
        assert moves in ((None, None), ("flashinfer", "triton"))
        self.ranks = given.get("dp_size", 1)
        assert moves[0] is None or OURS and self.ranks > 1
        stand_in.install({{"sglang.srt.managers.scheduler": [Scheduler, SchedulerIpcChannels],
                          "sglang.srt.runtime_context": {{"get_parallel": lambda: PARALLEL}}}})
        found = entry_points(group="sglang.srt.plugins")
        assert sorted(each.name for each in found) == ["moxie", "moxie-bench"]
        for each in found:
            each.load()()
        self.schedulers = [Scheduler() for _ in range(given.get("tp_size", 1))]
        for PARALLEL.tp_rank, _ in enumerate(self.schedulers):  # who takes what is asked
            name = SchedulerIpcChannels.create(port_args=PortArgs("tcp://here"), is_rank_zero=True)
            assert name == ("inproc://nobody" if PARALLEL.tp_rank else "tcp://here")
        if OURS:
            import moxie.sglang
            moxie.sglang.layers_made = lambda: (
                int(LAYERS or 4) + PARALLEL.tp_rank + 10 * (moves[0] is not None))
            print("INFO Moxie was seen")
        if FAULT == "1" and not OURS:
            raise SystemExit("SGLang's own engine is broken")

    def collective_rpc(self, method, **given):
        assert all(isinstance(each, str) for each in given.values())
        for PARALLEL.tp_rank, each in enumerate(self.schedulers):
            if not (PARALLEL.tp_rank and FAULT == "quiet" and given["what"] == "busy"):
                getattr(each, method)(**given)

    def shutdown(self):
        pass

    def generate(self, input_ids, sampling_params, return_logprob=False, top_logprobs_num=0):
        assert sampling_params["temperature"] == 0 and sampling_params["ignore_eos"]
        assert return_logprob == (top_logprobs_num > 0) and len(input_ids) % self.ranks == 0
        assert len(set(map(tuple, input_ids))) == len(input_ids)
        return [self.answer(prompt, sampling_params["max_new_tokens"]) for prompt in input_ids]

    def answer(self, prompt, steps):
        tokens = [sum(prompt) % 97 + step for step in range(steps)]
        shift = float(SHIFT or 0.01) if OURS else 0.0
        if OURS and len(prompt) == 37:
            tokens[3 % steps] += 1000  # from here on what is said is of another text
        entries = [[(-1.0 - each + shift + (5.0 if each >= 1000 else 0.0), each, None)
                    for each in (token, token + 1)] for token in tokens]
        return {{"output_ids": tokens, "meta_info": {{"output_top_logprobs": entries}}}}
"""


TWO_RANKS = "--engine", '{"disable_cuda_graph": true, "tp_size": 2}'


class Program(EngineProgram, unittest.TestCase):
    engine, stand_in = "sglang", ENGINE
    arguments = ("--engine", '{"disable_cuda_graph": true}')

    def test_what_is_measured(self):
        found = self.expect_measured(self.run_main("--json", *TWO_RANKS))
        self.assertEqual((found["sglang"], found["engine"]["tp_size"]), ("0.5.23", 2))

    def test_another_answer(self):
        ran = self.run_main("--rounds", "1", SHIFT="0.5")
        self.assertEqual(ran.returncode, 3, ran.stderr)
        for text in ("SGLang 0.5.23\n", "prefill of 600", "decode, 1 ",
                     "decode, 2 ", "at most 0.5, 27 of 32 tokens"):
            self.assertIn(text, ran.stdout)

    def test_a_rank_that_does_not_answer(self):
        ran = self.run_main("--rounds", "1", *TWO_RANKS, FAULT="quiet")
        self.assertEqual((ran.returncode, ran.stdout), (1, ""))
        self.assertIn("1 of 2 ranks have answered 'busy'", ran.stderr)

    def test_data_parallel_ranks(self):
        """A third contestant, and prompts for each rank."""
        ran = self.run_main("--json", "--rounds", "1", "--engine", json.dumps(
            {"disable_cuda_graph": True, "tp_size": 2, "dp_size": 2, "enable_dp_attention": True}))
        self.assertEqual(ran.returncode, 0, ran.stderr)
        found = json.loads(ran.stdout)
        self.assertEqual([run["contestant"] for run in found["runs"]],
                         ["moxie", "sglang", "moxie-experts"])
        self.assertEqual(found["moxie_layers"], 14)  # as Moxie moves rows there
        self.assertEqual(set(found["logprobs"]), {"moxie", "moxie-experts"})
        self.assertNotIn("moe_a2a_backend", found["engine"])
        for run in found["runs"]:
            rates, seconds = found["results"][run["contestant"]], run["decode"]["2"]["seconds"]
            self.assertAlmostEqual(rates["decode"]["2"]["tokens_per_second"],
                                   2 * 2 * 3 / statistics.median(seconds), delta=0.1)

    def test_what_cannot_be_measured(self):
        for environment, texts in (
                ({"LAYERS": "0"}, ("computed no layer", "Moxie was seen")),
                ({"FAULT": "1"}, ("sglang: its engine ended with 1:\n",
                                  "SGLang's own engine is broken")),
                ({"FAULT": "hangs"}, ("had not ended after 20 s (--timeout-s)", "in make_engine"))):
            ran = self.run_main("--rounds", "1", "--timeout-s", "20", **environment)
            self.assertEqual((ran.returncode, ran.stdout), (1, ""))
            for text in texts:
                self.assertIn(text, ran.stderr)
        self.expect_refused_at_once()

    def test_usage(self):
        self.expect_shapes()
        for more, text in ((("--engine", "[1]"), "[1] is no JSON object"),
                           (("--engine", "{x"), "{x is no JSON object, as {"),
                           (("--batch", "0"), "at least 1"), (("--plugin", ""), "empty path"),
                           (("--quantization", "fp8_per_block"), "--model has its own"),
                           (("--quantization", "int3"), "invalid choice")):
            ran = self.run_main(*more)
            self.assertEqual(ran.returncode, 2)
            self.assertIn(text, ran.stderr)
        ran = self.run_main(MOXIE_PLUGIN="")
        self.assertEqual(ran.returncode, 2)
        self.assertIn("--plugin, or MOXIE_PLUGIN", ran.stderr)


class Model(unittest.TestCase):
    @unittest.skipUnless(importlib.util.find_spec("transformers"), "transformers is not installed")
    def test_of_a_shape(self):
        """What SGLang reads of DeepSeek-V3's configuration, with and without a format."""
        with mock.patch.object(sys, "path", [*sys.path]), tempfile.TemporaryDirectory() as folder:
            program = runpy.run_path(str(Program.bench()))
            for more, blocks in (((), None), (("--quantization", "fp8_per_block"), [128, 128])):
                program["make_config"](program["parse"](
                    ["--plugin", "here", "--shape", "deepseek-v3", "--layers", "4", *more]), folder)
                found = json.loads((pathlib.Path(folder) / "config.json").read_text())
                self.assertEqual(found["architectures"], ["DeepseekV3ForCausalLM"])
                self.assertEqual([found[key] for key in (
                    "dtype", "num_hidden_layers", "first_k_dense_replace", "hidden_size",
                    "topk_method", "scoring_func", "moe_layer_freq")],
                    ["bfloat16", 4, 1, 7168, "noaux_tc", "sigmoid", 1])
                self.assertEqual(found.get("quantization_config", {}).get("weight_block_size"),
                                 blocks)
                self.assertEqual(program["engines"].quantization_of(folder), blocks and "fp8")


class Experts(torch.nn.Module):
    """As SGLang has those of one rank, with shared ones in slots behind them."""

    def __init__(self, slots, shared, rank, units, dtype):
        super().__init__()
        self.num_fused_shared_experts = shared
        self.moe_tp_rank, self.moe_tp_size = rank if units < 4 else 0, 4 // units
        self.moe_ep_rank = rank if units == 4 else 0
        for name, size in (("w13_weight", (2 * units, 4)), ("w2_weight", (4, units))):
            setattr(self, name, torch.nn.Parameter(
                torch.zeros(slots, *size).to(dtype), requires_grad=False))


class Worker(unittest.TestCase):
    def setUp(self):
        self.worker = measure("sglang_worker")
        self.grow = self.worker.grow_dummies

    def test_dummies_grow(self):
        model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False)
                                     for name in ("gate", "w_scale_inv", "codes", "lm_head")})
        model["norm"] = torch.nn.LayerNorm(2, bias=False)
        for weight in model.parameters():
            weight.data.fill_(0.001)
        model["lm_head"].weight.data[:, 1] = 0
        codes = torch.zeros(64, 64).to(torch.float8_e4m3fn)
        model["codes"].weight = torch.nn.Parameter(codes, requires_grad=False)
        self.grow(model, 2)
        self.assertEqual(model["lm_head"].weight[0, 0].item(), 0)
        self.assertAlmostEqual(model["lm_head"].weight[0, 1].item(), 0.035 * 1.25, places=6)
        for name, value in (("gate", 0.035), ("w_scale_inv", 0.035 / 448), ("norm", 1)):
            self.assertAlmostEqual(model[name].weight.flatten()[0].item(), value, places=6)
        codes = model["codes"].weight.float()
        self.assertTrue(400 < codes.abs().max() <= 448 and codes.mean().abs() < 20)

    def test_answers_are_of_this_question(self):
        silent = set()

        class Engine:
            def collective_rpc(self, _, what, folder):
                for rank in {0, 1} - silent:
                    (pathlib.Path(folder) / str(rank)).write_text(json.dumps(f"{what} {silent}"))
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(2):
                found = self.worker.answers(Engine(), "busy", folder, 2)
                self.assertEqual(found, ["busy set()"] * 2)
            silent.add(1)
            with self.assertRaisesRegex(measure("command").CannotRun,
                                        "1 of 2 ranks have answered 'busy'"):
                self.worker.answers(Engine(), "busy", folder, 2)

    def layer(self, rank, ranks, shares, shared, dtype=torch.float32):
        """Of four experts of four units and a shared one, which ranks share by their units or which
        each has whole, in a slot or as a module, as contestants have it. Its weights of all experts,
        the shared one last: ([5, 8, 4], [5, 4, 4]), of whom this rank has only some."""
        fused, units = shared == "slot", 4 // (ranks if shares else 1)
        block = {"experts": Experts(4 // (1 if shares else ranks) + fused, int(fused), rank, units,
                                    dtype)}
        if not fused:
            units = 4 // (ranks if shared == "parts" else 1)
            block["shared_experts"] = torch.nn.ModuleDict({
                "gate_up_proj": torch.nn.Linear(4, 2 * units, bias=False),
                "down_proj": torch.nn.Linear(units, 4, bias=False)})
            block["shared_experts"]["down_proj"].tp_group = None if units == 4 else (
                types.SimpleNamespace(rank_in_group=rank, world_size=ranks))
        model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(
            [torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict(block)})])})
        self.grow(model, rank)
        found = model["layers"][0]["mlp"]
        routed = [found["experts"].w13_weight, found["experts"].w2_weight]
        return routed, None if fused else [
            found["shared_experts"][name].weight for name in ("gate_up_proj", "down_proj")]

    def test_experts_are_the_same_wherever_they_are(self):
        whole, _ = self.layer(0, 1, False, "slot")
        for each in whole:
            self.assertEqual(len({part.sum().item() for part in each}), 5)
            self.assertTrue(0.03 < each.abs().max() <= 0.035)
        def of_rank(weights, rank):
            """Half of each one's units."""
            units = slice(2 * rank, 2 * rank + 2)
            return weights[0].unflatten(-2, (2, 4))[..., units, :].flatten(-3, -2), (
                weights[1][..., units])
        for rank in range(2):
            routed, shared = self.layer(rank, 2, False, "module")
            for number in range(2):
                self.assertTrue(torch.equal(routed[number], whole[number][2 * rank:2 * rank + 2]))
                self.assertTrue(torch.equal(shared[number], whole[number][4]))
            routed, shared = self.layer(rank, 2, True, "parts")
            slots, _ = self.layer(rank, 2, True, "slot")
            for number, there in enumerate(of_rank(whole, rank)):
                self.assertTrue(torch.equal(slots[number], there))
                self.assertTrue(torch.equal(routed[number], there[:4]))
                self.assertTrue(torch.equal(shared[number], there[4]))
        coded, _ = self.layer(1, 2, False, "slot", dtype=torch.float8_e4m3fn)
        self.assertTrue(400 < coded[0].float().abs().max() <= 448)


if __name__ == "__main__":
    unittest.main()
