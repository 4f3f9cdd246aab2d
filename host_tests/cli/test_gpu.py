"""The command moxie on a GPU, real or emulated.

    MOXIE_COMMAND=build/dev/bin/moxie MOXIE_GOLDEN=host_tests/golden python3 test_gpu.py [GROUP]
"""

import json
import os
import subprocess
import unittest

import safetensors_files as files
from case import COMMAND, LAYERS, MODELS, TIMEOUT_S, Case, layer, model_arguments


class Gpu(Case):
    """On a GPU, real or emulated. Leaves with 77 when there is none."""

    ON = ["--runner", "moxie_cuda"]
    BOUND = 5e-3  # rows between the projections are 16-bit
    TINY = ["bench", "--shape", "64,32,8,2", "--seconds", "0.01"]

    @classmethod
    def setUpClass(cls):
        told = subprocess.run([COMMAND, "info", "--json"], capture_output=True, timeout=TIMEOUT_S, check=True).stdout
        gpus = [entry for entry in json.loads(told)["backends"] if entry["device"] == "sm_90"]
        if not any(entry["score"] > 0 for entry in gpus):
            print("skipped: no GPU that the library has kernels for")
            raise SystemExit(77)

    def layer(self, path, *arguments):
        return self.run_layer("--layer-file", path, *arguments, *self.ON, bound=self.BOUND)

    def test_layers(self):
        for name in LAYERS:
            with self.subTest(name=name):
                self.assertEqual(self.layer(layer(name))["dispatcher"], "local")

    def test_model(self):
        self.run_layer(*model_arguments(*MODELS[0]), *self.ON, bound=self.BOUND)
        # The golden output is that of unrounded rows.
        self.run_layer(*model_arguments(*MODELS[1]), *self.ON, bound=6e-2)
        for packed in MODELS[2:]:
            with self.subTest(packed=packed):
                self.run_layer(*model_arguments(*packed), *self.ON, bound=self.BOUND)
                self.run_layer(*model_arguments(*packed), *self.ON, bound=self.BOUND, ranks=2)

    def test_ranks(self):
        """Ranks are processes, each with its own GPU or sharing one."""
        os.environ["MOXIE_EMULATOR_DEVICES"] = "2"
        self.addCleanup(os.environ.pop, "MOXIE_EMULATOR_DEVICES")
        for ranks, dispatcher in ((2, "alltoall"), (3, "alltoall"), (3, "allgather")):
            with self.subTest(ranks=ranks, dispatcher=dispatcher):
                self.run_layer("--layer-file", layer("qwen3_moe_a.safetensors"), *self.ON, bound=self.BOUND, ranks=ranks,
                               dispatcher=dispatcher)
        for rows in ("input", "fp8_block128"):
            with self.subTest(rows=rows):
                self.run_layer(*model_arguments(*MODELS[1]), "--dispatch-format", rows, *self.ON, bound=6e-2,
                               ranks=2)

    def test_router_and_wide_ids(self):
        tensors, metadata = files.read(layer("mixtral_a.safetensors"))
        tensors["topk_ids"] = tensors["topk_ids"].as_i64()
        files.write(self.path("wide"), tensors, metadata)
        self.layer(self.path("wide"))
        del tensors["topk_ids"], tensors["topk_weights"]
        files.write(self.path("routed"), tensors, metadata)
        self.layer(self.path("routed"))

    def test_device_picks_the_runner(self):
        result = self.document("run", "--layer-file", layer("mixtral_a.safetensors"), "--device", "sm_90")
        self.assertEqual(result["runner"], "moxie_cuda")
        result = self.document("run", "--layer-file", layer("mixtral_a.safetensors"), "--runner", "moxie_cpu")
        self.assertEqual(result["runner"], "moxie_cpu")

    def test_refusals(self):
        mixtral = ["--layer-file", layer("mixtral_a.safetensors")]
        for arguments, words in ((mixtral + ["--device", "cpu"], "not registered for device cpu"),
                                 (mixtral + ["--ranks", "2", "--dispatch-format", "fp8_block128"],
                                  "rows of dispatch_format fp8_block128 with weight_format bf16: set dispatch_format to input"),
                                 (mixtral + ["--device", "sm_7"], "device"),
                                 (model_arguments(*MODELS[2]) + ["--ranks", "2", "--dispatch-format", "fp8_block128"],
                                  "rows of dispatch_format fp8_block128 with weight_format mxfp4: set dispatch_format to input")):
            with self.subTest(words=words):
                _, trouble = self.moxie("run", *arguments, *self.ON, code=2)
                self.assertIn(words, trouble)

    def test_replays(self):
        result = self.document(*self.TINY, "--tokens", "1", *self.ON)
        self.assertGreaterEqual(result["cells"][0]["replays"], 30)

    def test_bench(self):
        result = self.document(*self.TINY, "--tokens", "1,5", "--replays", "2", *self.ON)
        self.assertEqual([cell["tokens"] for cell in result["cells"]], [1, 5])
        self.assertEqual((result["forwards_per_graph"], result["weight_sets"], result["ranks"]), (8, 8, 1))
        self.assertEqual(result["floor_of"], {"read_gb_per_s": 4500.0, "tflops": 790.0, "operands": "16-bit"})
        for name in ("driver_copy_gb_per_s", "driver_fill_gb_per_s"):
            self.assertTrue(all(rate > 0 for rate in result["anchors"][name]))
        for cell in result["cells"]:
            self.assertLessEqual(cell["p10_us"], cell["median_us"])
            self.assertLessEqual(cell["median_us"], cell["p90_us"])
            self.assertGreater(cell["floor_us"], 0)
            self.assertGreater(cell["times_floor"], 0)
            self.assertGreater(cell["reuse_mb"], 0)
            self.assertEqual(cell["replays"], 2)
            self.assertLess(cell["relative_error"], 0.02)

    def test_bench_fp8(self):
        """Blocks that are not whole, of rows and of columns."""
        for weights, rows in (("fp8_tensor", "f16"), ("fp8_channel", "bf16"), ("fp8_block128", "bf16")):
            with self.subTest(weights=weights, rows=rows):
                result = self.document("bench", "--shape", "144,144,2,1", "--seconds", "0.01", "--tokens", "1",
                                       "--replays", "2",
                                       "--weight-format", weights, "--row-format", rows, *self.ON)
                self.assertEqual((result["weight_format"], result["row_format"]), (weights, rows))
                self.assertEqual(result["floor_of"], {"read_gb_per_s": 4500.0, "tflops": 1580.0, "operands": "fp8"})
                # Rows are quantised on the way: an error of zero would be that of another layer.
                self.assertLess(result["cells"][0]["relative_error"], 0.06)
                self.assertGreater(result["cells"][0]["relative_error"], 0.005)

    # Every token goes to every expert, so that what moves does not depend on the draw.
    OVER_RANKS = ["bench", "--shape", "64,32,8,8", "--tokens", "3", "--seconds", "0.01", "--replays", "1", "--ranks",
                  "2", *ON]
    WIRE_KEYS = ["spread_us", "rows_per_rank", "rows_sent_most", "rows_received_most", "wire_bytes", "wire_gb_per_s",
                 "logical_gb_per_s", "wire_floor_us", "wire_share", "nccl"]

    def over_ranks(self, *arguments, nccl="none", code=0, **env):
        """(standard output, standard error) over two ranks, with an NCCL that is a file of nothing, or a fake."""
        env = {**os.environ, "MOXIE_EMULATOR_DEVICES": "2", **env, "LD_LIBRARY_PATH": ":".join(
            [os.environ["MOXIE_NCCL"] + nccl, os.environ.get("LD_LIBRARY_PATH", "")])}
        return self.moxie(*self.OVER_RANKS, *arguments, env=env, code=code)

    def check_wire(self, document, rows, row_bytes):
        cell, = document["cells"]
        self.assertEqual([key for key in cell if key in self.WIRE_KEYS], self.WIRE_KEYS)
        self.assertEqual((cell["rows_per_rank"], cell["rows_sent_most"], cell["rows_received_most"]), (rows,) * 3)
        self.assertEqual(cell["wire_bytes"], rows * row_bytes)
        self.assertAlmostEqual(cell["wire_floor_us"], 1e6 * rows * row_bytes / 350e9)
        self.assertAlmostEqual(cell["wire_share"], cell["wire_floor_us"] / cell["median_us"])
        self.assertGreaterEqual(cell["spread_us"], 0)
        return cell

    def test_bench_over_ranks(self):
        found = json.loads(self.over_ranks("--json", "--dispatcher", "alltoall")[0])
        self.assertEqual((found["ranks"], found["op"], found["weight_sets"], found["dispatcher"]),
                         (2, "layer", 8, "alltoall"))
        self.assertEqual(found["row_bytes"], {"dispatch": 64 * 2 + 8 * 8, "result": 64 * 2})
        self.assertEqual(found["dispatch_format"], "input")
        self.assertIn("libnccl.so.2", found["no_nccl"])
        cell = self.check_wire(found, 3, 192 + 128)
        self.assertEqual(cell["nccl"], {})
        # Four of the eight experts are read on each rank.
        self.assertAlmostEqual(cell["floor_us"] - cell["wire_floor_us"], 1e6 * 4 * 3 * 64 * 32 * 2 / 4.5e12)
        self.assertLess(cell["relative_error"], 0.02)
        self.assertGreater(cell["relative_error"], 0)

    def test_bench_of_some_experts(self):
        """A rank that took its own experts for the first ones would miss the checked token's."""
        text, _ = self.over_ranks("--shape", "64,32,8,2", "--skew", "1.5")
        for words in ("layer over 2 ranks", "wire floor", "no NCCL beside it: "):
            self.assertIn(words, text)

    def test_bench_without_experts(self):
        """Quantised rows, in halves, with a skew and starts at different times."""
        shape = ["--shape", "128,128,8,2", "--weight-format", "fp8_block128", "--dispatch-format", "fp8_block128"]
        for op in ("dispatch", "combine"):
            with self.subTest(op=op):
                found = json.loads(self.over_ranks("--json", *shape, "--op", op, "--skew", "2", "--delay-us", "20",
                                                   "--dispatch-sms", "2")[0])
                self.assertEqual((found["op"], found["skew"], found["delay_us"], found["weight_sets"]), (op, 2, 20, 1))
                self.assertEqual((found["dispatch_sms"], found["dispatch_format"]), (2, "fp8_block128"))
                self.assertEqual(found["row_bytes"], {"dispatch": 128 + 4 + 16, "result": 256})
                # All experts of all tokens are on rank 0: rank 1 alone sends rows, and rank 0 alone results.
                cell, = found["cells"]
                self.assertEqual((cell["rows_per_rank"], cell["rows_sent_most"], cell["rows_received_most"]), (1.5, 3, 3))
                self.assertEqual(cell["wire_bytes"], 1.5 * (148 if op == "dispatch" else 256))
                self.assertAlmostEqual(cell["floor_us"], 1e6 * 3 * (148 if op == "dispatch" else 256) / 350e9)
                self.assertEqual(cell["floor_by"], "wire")
                self.assertGreater(cell["median_us"], cell["event_us"])
                self.assertLess(cell["relative_error"], 0.02)

    def test_bench_of_short_rows(self):
        """Of which one number's rounding to fp8 tells."""
        text, _ = self.over_ranks("--shape", "128,128,8,2", "--skew", "1.5", "--weight-format", "fp8_block128", "--tokens", "1,8")
        self.assertIn("layer over 2 ranks", text)

    def test_bench_without_experts_of_some_tokens(self):
        """Room for rows is that of a step, not that of the plan."""
        for wire, weights in (("input", "bf16"), ("fp8_block128", "fp8_block128")):
            with self.subTest(wire=wire):
                found = json.loads(self.over_ranks("--json", "--shape", "128,128,8,2", "--op", "both", "--tokens", "1,4,3",
                                                   "--dispatch-format", wire, "--weight-format", weights)[0])
                self.assertEqual([cell["tokens"] for cell in found["cells"]], [1, 4, 3])
                self.assertLess(max(cell["relative_error"] for cell in found["cells"]), 0.02)

    def test_bench_beside_nccl(self):
        text, _ = self.over_ranks("--op", "both", nccl="fake", FAKE_NCCL_LOG=self.path("log"))
        for words in ("both over 2 ranks", "wire GB/s", "dispatch_all_to_all", "combine_reduce_scatter"):
            self.assertIn(words, text)
        with open(self.path("log"), encoding="ascii") as file:
            calls = [line.split() for line in file]
        for rank in ("0", "1"):
            made = [call[1:] for call in calls if call[0] == rank]
            self.assertEqual(made[0 if rank == "1" else 1], ["ncclCommInitRank", "2", "0", "-1"])
            self.assertEqual(made[-1][0], "ncclCommDestroy")
            # 24 copies of 3 tokens over 2 ranks, of 192 bytes and of 128; eight at once and eight into a graph.
            for peer in ("0", "1"):
                for count in ("2304", "1536"):
                    for name in ("ncclSend", "ncclRecv"):
                        self.assertEqual(made.count([name, count, "1", peer]), 16)
            self.assertEqual(made.count(["ncclAllGather", "576", "1", "-1"]), 16)
            self.assertEqual(made.count(["ncclReduceScatter", "192", "9", "-1"]), 16)

    def test_bench_ends_when_one_rank_fails(self):
        _, trouble = self.over_ranks("--op", "combine", nccl="fake", code=1, FAKE_NCCL_FAIL="1 ncclReduceScatter")
        self.assertIn("rank 1: NCCL, combine_reduce_scatter: the planted failure", trouble)
        found = json.loads(self.over_ranks("--op", "dispatch", "--json", nccl="fake",
                                           FAKE_NCCL_FAIL="1 ncclCommInitRank")[0])
        self.assertEqual(found["no_nccl"], "ncclCommInitRank: the planted failure")
        self.assertEqual(found["cells"][0]["nccl"], {})

    def test_bench_of_4_bits(self):
        """Rows of a part of a step, of few tokens and of more."""
        for weights in ("int4_g32", "mxfp4", "nvfp4"):
            chosen = ["--weight-format", weights, *self.ON]
            with self.subTest(weights=weights):
                result = self.document("bench", "--shape", "288,32,2,2", "--seconds", "0.01", "--tokens", "1,33", "--replays",
                                       "2", *chosen)
                self.assertEqual(result["weight_format"], weights)
                self.assertEqual(result["floor_of"], {"read_gb_per_s": 4500.0, "tflops": 790.0, "operands": "16-bit"})
                for cell in result["cells"]:
                    self.assertLess(cell["relative_error"], 0.02)
                _, trouble = self.moxie("bench", "--shape", "48,32,8,2", "--tokens", "1", *chosen, code=2)
                self.assertIn("multiple of 32", trouble)
                _, trouble = self.moxie(*self.TINY, "--tokens", "1", "--row-format", "f16", *chosen, code=2)
                self.assertIn("weights of 4 bits by bf16 rows, and input_format is f16", trouble)

    def test_bench_refuses_what_ranks_cannot_do(self):
        for arguments, words in ((["--skew", "2.1"], "allow 2"), (["--ranks", "1", "--op", "both"], "--op both"),
                                 (["--ranks", "1", "--delay-us", "5"], "--delay-us"),
                                 (["--runner", "moxie_cpu", "--op", "both"], "several ranks on GPUs")):
            _, trouble = self.over_ranks("--shape", "64,32,8,2", *arguments, code=2)
            self.assertIn(words, trouble)

    def test_bench_refuses_what_it_cannot_check(self):
        for shape, words in (("2097280,128,2,1", "rows of at most 2097152 numbers"),
                             ("128,2097280,2,1", "intermediate 2097280")):
            _, trouble = self.moxie("bench", "--shape", shape, "--tokens", "1", *self.ON, code=2)
            self.assertIn(words, trouble)
        _, trouble = self.moxie(*self.TINY, "--tokens", "1", "--weight-format", "f32", *self.ON, code=2)
        self.assertIn("weight_format f32", trouble)

    def test_bench_table(self):
        text, _ = self.moxie(*self.TINY, "--tokens", "2", "--weight-format", "f16", "--row-format", "f16", "--replays",
                             "2", *self.ON)
        self.assertIn("x floor", text)
        self.assertIn("4.5 TB/s and 790 TFLOP/s (16-bit)", text)
        self.assertIn("which a cache may hold", text)
        _, trouble = self.moxie(*self.TINY, "--tokens", "2", "--weight-format", "f16", *self.ON, code=2)
        self.assertIn("input_format", trouble)


if __name__ == "__main__":
    unittest.main()
