"""What the tests of bench/vllm.py and bench/sglang.py have alike: the program runs with a stand-in
for its engine."""

import importlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent


def measure(name):
    """A module of what both programs measure with."""
    with mock.patch.object(sys, "path", [str(HERE.parent / "bench" / "layer"), *sys.path]):
        return importlib.import_module(f"measure.{name}")


class EngineProgram:
    """Of a TestCase. engine: the package that the program measures; stand_in: its source;
    arguments: those of every run."""

    engine, stand_in, arguments = None, None, ()

    @classmethod
    def bench(cls):
        return HERE.parent / "bench" / f"{cls.engine}.py"

    def run_main(self, *more, no_gpu=("--no-gpu",), **environment):
        """no_gpu: what lets a stand-in run without one."""
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / f"{self.engine}.py").write_text(self.stand_in)
            return subprocess.run(
                [sys.executable, str(self.bench()), "--model", "somewhere", *self.arguments,
                 *no_gpu, "--prompt", "600", "--steps", "3", "--batch", "1,2", *more], text=True,
                capture_output=True, check=False,
                env={**os.environ, "PYTHONPATH": folder, **environment})

    def expect_measured(self, ran):
        """The JSON of a run of two rounds."""
        self.assertEqual(ran.returncode, 0, ran.stderr)
        found = json.loads(ran.stdout)
        # Of 600, 500, 37 and 5 tokens; the third goes on otherwise at its fourth.
        self.assertEqual(found["logprobs"],
                         {"moxie": {"most": 0.01, "same_tokens": 27, "tokens": 32}})
        self.assertEqual(found["moxie_layers"], 4)
        self.assertNotIn(found["moxie"], ("", None))
        self.assertEqual([run["contestant"] for run in found["runs"]],
                         ["moxie"] * 2 + [self.engine] * 2)
        for run in found["runs"]:
            for each in (run["prefill"], *run["decode"].values()):
                self.assertEqual((len(each["seconds"]), each["busy_s"]), (3, 0.0))
        for rates in found["results"].values():
            self.assertIsNone(rates["prefill"]["gpu_ms_a_step"])
            self.assertEqual((set(rates), set(rates["decode"])),
                             ({"prefill", "decode"}, {"1", "2"}))
        self.assertEqual([line.split(":")[0] for line in ran.stderr.splitlines()],
                         ["moxie", self.engine, self.engine, "moxie"])
        return found

    def expect_refused_at_once(self):
        """Every reason in a line of its own, before a model is made."""
        gpu, engine, library = ("torch sees no GPU", f"is not installed for {sys.executable}",
                                "moxie: /nowhere/libmoxie.so cannot be loaded")
        here = importlib.util.find_spec(self.engine) is not None  # itself, not the stand-in
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        # As far as it is asked; once it is itself, which takes seconds to load.
        (pathlib.Path(folder.name) / "torch.py").write_text("class cuda: is_available = bool")
        for environment, wanted in (({}, [gpu, library]),
                                    ({"PYTHONPATH": folder.name}, [gpu, library] if here else
                                     [gpu, engine, library])):
            ran = self.run_main("--model", "", "--plugin", "/nowhere/libmoxie.so", no_gpu=(),
                                CUDA_VISIBLE_DEVICES="", **environment)
            self.assertEqual((ran.returncode, ran.stdout), (1, ""))
            said = ran.stderr.splitlines()
            self.assertEqual(len(said), len(wanted), ran.stderr)
            for line, text in zip(said, wanted):
                self.assertIn(text, line)
        self.assertIn("name a libmoxie.so with --plugin", said[-1])

    def expect_shapes(self):
        """What is refused of the random model's sizes."""
        for more, text in ((("--shape", "mixtral-8x7b"), "--model has its own"),
                           (("--model", "", "--shape", "tiny"), "invalid choice"),
                           (("--model", "", "--layers", "49"), "qwen3-30b-a3b has 48"),
                           (("--model", "", "--shape", "deepseek-v3", "--layers", "62"),
                            "deepseek-v3 has 61")):
            ran = self.run_main(*more)
            self.assertEqual(ran.returncode, 2)
            self.assertIn(text, ran.stderr)
