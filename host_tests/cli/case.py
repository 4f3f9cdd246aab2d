"""What every test of the command shares: running it, checking its exit code, reading its JSON."""

import json
import os
import subprocess
import tempfile
import unittest

COMMAND = os.environ["MOXIE_COMMAND"]
GOLDEN = os.environ["MOXIE_GOLDEN"]
RUNNER = os.environ.get("MOXIE_RUNNER", "moxie_cpu")
TIMEOUT_S = 120

LAYERS = sorted(os.listdir(GOLDEN + "/layers"))
MODELS = [("tiny-qwen3-moe", 1), ("tiny-deepseek-v3-fp8", 0), ("tiny-gpt-oss-mxfp4", 0), ("tiny-qwen3-moe-nvfp4", 0)]
RUN_KEYS = ["ok", "tokens", "ids_of_no_expert", "ranks", "runner", "dispatcher", "weights", "relative_error",
            "max_abs_error", "tolerance", "time_ms", "warnings"]
BOUNDS = ["forward_tokens", "dominant", "prefill", "decode", "dispatch_required", "dispatch_tokens",
          "allgather_rows", "alltoall_rows", "capture_rows"]
LAYER = {"hidden_size": 2048, "intermediate_size": 768, "num_experts": 128, "top_k": 8}


def layer(name):
    return GOLDEN + "/layers/" + name


def model_arguments(folder, number, source=None):
    return ["--model", GOLDEN + "/models/" + folder if source is None else source, "--layer", str(number),
            "--input", "%s/models/%s/layer%d_golden.safetensors" % (GOLDEN, folder, number)]


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="moxie-test-")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, text):
        with open(self.path(name), "wb" if isinstance(text, bytes) else "w") as file:
            file.write(text)
        return self.path(name)

    def config(self, **keys):
        return self.write("config.json", json.dumps({**LAYER, **keys}))

    def moxie(self, *arguments, code=0, env=None):
        """Runs the command, checks its exit code, and gives (standard output, standard error)."""
        done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, env=env,
                              stdin=subprocess.DEVNULL, check=False)
        codes = code if isinstance(code, (list, tuple)) else [code]
        self.assertIn(done.returncode, codes, "%s\n%s%s" % (" ".join(arguments), done.stdout, done.stderr))
        self.assertNotRegex(done.stderr, "Sanitizer|runtime error")
        return done.stdout, done.stderr

    def document(self, *arguments, code=0):
        """The one JSON document that --json prints."""
        text, _ = self.moxie(*arguments, "--json", code=code)
        self.assertEqual(text.count("\n"), 1)
        return json.loads(text)

    def run_layer(self, *arguments, bound=2e-6, ranks=1, dispatcher=None):
        chosen = ["--dispatcher", dispatcher] if dispatcher else []
        result = self.document("run", *arguments, "--ranks", str(ranks), *chosen)
        self.assertEqual(list(result), RUN_KEYS)
        self.assertEqual(result["ranks"], ranks)
        self.assertEqual(result["runner"], RUNNER)
        if dispatcher:
            self.assertEqual(result["dispatcher"], dispatcher)
        self.assertLessEqual(result["relative_error"], bound)
        self.assertGreaterEqual(result["time_ms"], 0)
        return result
