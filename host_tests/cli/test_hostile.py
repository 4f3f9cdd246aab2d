"""The command moxie, wrongly used, and on hostile input.

    MOXIE_COMMAND=build/dev/bin/moxie MOXIE_GOLDEN=host_tests/golden python3 test_hostile.py [GROUP]
"""

import json
import os
import random
import subprocess
import unittest

import safetensors_files as files
from case import COMMAND, GOLDEN, LAYER, MODELS, RUN_KEYS, TIMEOUT_S, Case, layer, model_arguments


class Usage(Case):
    def test_words_that_are_no_text(self):
        for option in ("runner", "dispatcher", "dispatch-format", "device"):
            with self.subTest(option):
                _, trouble = self.moxie("run", "--layer-file", layer("mixtral_a.safetensors"), f"--{option}", "x\udcff", code=2)
                self.assertIn(f"{option.replace('-', '_')} has the byte", trouble)

    def test_help(self):
        for command in ([], ["info"], ["check"], ["plan"], ["run"], ["bench"], ["conform"]):
            text, trouble = self.moxie(*command, "--help")
            self.assertIn("Usage: moxie", text)
            self.assertRegex(text, r"[^\n]\n\Z")
            self.assertEqual(trouble, "")
        self.assertRegex(self.moxie("--version")[0], r"^moxie \d+\.\d+\.\d+\n$")

    def test_wrong_usage(self):
        for arguments in ([], ["fly"], ["--fly"], ["plan"], ["plan", "a", "b"], ["check"], ["info", "x"], ["run"],
                          ["run", "--model", "x"], ["run", "--layer-file", "x", "--model", "y"],
                          ["run", "--layer-file", "x", "--ranks", "0"], ["run", "--layer-file", "x", "--ranks", "65"],
                          ["run", "--layer-file", "x", "--ranks", "two"],
                          ["run", "--layer-file", "x", "--tolerance", "nan"],
                          ["run", "--layer-file", "x", "--tolerance", "-1"], ["bench"], ["--rank-process"]):
            text, trouble = self.moxie(*arguments, code=1)
            self.assertEqual(text, "")
            self.assertIn("moxie", trouble)

    def test_files(self):
        for command in ("plan", "check"):
            for name, text in (("malformed", "{"), ("list", "[]"), ("text", '"x"'), ("twice", '{"a":1,"a":2}'),
                               ("after", "{} x"), ("empty", ""), ("binary", b"\x00\xff\xfe")):
                _, trouble = self.moxie(command, self.write(name, text), code=1)
                self.assertIn(name, trouble)
            self.moxie(command, self.path("absent"), code=1)
            self.moxie(command, self.folder, code=1)
        self.moxie("run", "--layer-file", self.path("absent"), code=1)
        self.moxie("run", "--model", self.path("absent"), "--layer", "0", "--input", "x", code=1)
        self.moxie("run", *model_arguments("tiny-qwen3-moe", 1)[:3], "9", "--input",
                   GOLDEN + "/models/tiny-qwen3-moe/layer1_golden.safetensors", code=1)

    def test_tolerance(self):
        arguments = ["run", "--layer-file", layer("mixtral_a.safetensors"), "--tolerance"]
        self.moxie(*arguments, "1e-6")
        result = self.document(*arguments, "1e-12", code=3)
        self.assertGreater(result["relative_error"], 1e-12)
        tensors, metadata = files.read(layer("mixtral_a.safetensors"))
        del tensors["routed_output"]
        files.write(self.path("layer"), tensors, metadata)
        self.moxie("run", "--layer-file", self.path("layer"), "--tolerance", "1", code=1)
        result = self.document("run", "--layer-file", self.path("layer"))
        self.assertIsNone(result["relative_error"])
        self.assertIsNone(result["max_abs_error"])

    def test_refusals(self):
        source = ["run", "--layer-file", layer("mixtral_a.safetensors")]
        for arguments in (["--runner", "nobody"], ["--dispatcher", "nobody"],
                          ["--dispatcher", "local", "--ranks", "2"]):
            text, trouble = self.moxie(*source, *arguments, code=2)
            self.assertEqual(text, "")
            self.assertRegex(trouble, "runner|dispatcher")
        refused = self.document(*source, "--runner", "nobody", code=2)
        self.assertIs(refused["ok"], False)
        self.assertEqual(refused["reasons"][0]["key"], "runner")

    def test_a_device_that_is_not_here(self):
        """Refused with the reason that `moxie info` has."""
        cuda, = [each for each in self.document("info")["backends"] if each["name"] == "moxie_cuda"]
        if cuda["score"] > 0:
            self.skipTest("moxie_cuda can run here")
        for arguments in (["run", "--layer-file", layer("mixtral_a.safetensors")],
                          ["bench", "--shape", "64,32,8,2", "--tokens", "1"]):
            for choice in (["--device", "sm_90"], ["--runner", "moxie_cuda"]):
                _, trouble = self.moxie(*arguments, *choice, code=2)
                self.assertIn("moxie_cuda", trouble)
                self.assertIn(cuda["reason"], trouble)

    def test_plugin(self):
        env = {key: value for key, value in os.environ.items() if key != "MOXIE_PLUGIN"}
        self.moxie("info", env=env)  # beside the command, or in ../lib
        os.mkfifo(self.path("pipe"))
        for path in (self.path("absent"), self.write("text", "no library"), self.folder, "/bin/true", "x" * 5000,
                     self.path("pipe")):
            _, trouble = self.moxie("info", "--plugin", path, code=1)
            self.assertIn("moxie info: ", trouble)
            self.moxie("info", code=1, env={**env, "MOXIE_PLUGIN": path})
        self.moxie("run", "--layer-file", layer("mixtral_a.safetensors"), "--plugin", self.path("absent"), code=1)

    def test_verbose(self):
        _, trouble = self.moxie("check", self.config(), "--verbose")
        self.assertIn("info", trouble)


class Verdict(Case):
    """A refusal is said once, with its reasons, and the library's own line about it belongs to --verbose."""

    MIXTRAL = ["--layer-file", layer("mixtral_a.safetensors")]

    def test_it_is_said_once(self):
        for keys in ([], ["--json"]):
            self.assertEqual(self.moxie("info", "--keys", *keys)[1], "")
        refused = self.config(top_k=1000)
        tiny = ["bench", "--shape", "64,32,8,2", "--tokens", "1"]
        for command in (["plan", refused], ["check", refused], ["run", *self.MIXTRAL, "--runner", "nobody"],
                        [*tiny, "--runner", "nobody"]):
            with self.subTest(command=command):
                text, trouble = self.moxie(*command, code=2)
                self.assertNotIn("error: config:", trouble)
                self.assertRegex(text + trouble, "refused, for 1 reason:\n")
                self.assertIn("error: config: refused for 1 reason", self.moxie(*command, "--verbose", code=2)[1])


class Hostile(Case):
    """Whatever a file says, the command ends with an exit code of its own."""

    CODES = [0, 1, 2]

    def test_cut_files(self):
        with open(layer("qwen3_moe_norenorm.safetensors"), "rb") as file:
            whole = file.read()
        length = 8 + int.from_bytes(whole[:8], "little")
        for kept in [0, 1, 7, 8, 9, length - 1, length, length + 1, len(whole) // 2, len(whole) - 1]:
            self.moxie("run", "--layer-file", self.write("cut", whole[:kept]), code=1)

    def test_flipped_headers(self):
        with open(layer("qwen3_moe_norenorm.safetensors"), "rb") as file:
            whole = bytearray(file.read())
        length = 8 + int.from_bytes(whole[:8], "little")
        chance = random.Random(7)
        for _ in range(150):
            bit = chance.randrange(8 * length)
            whole[bit // 8] ^= 1 << bit % 8
            self.moxie("run", "--layer-file", self.write("flipped", bytes(whole)), "--ranks", "2", code=self.CODES)
            whole[bit // 8] ^= 1 << bit % 8

    def test_random_data(self):
        """Values may be anything: NaNs, infinities, ids outside the experts."""
        with open(layer("qwen3_moe_norenorm.safetensors"), "rb") as file:
            whole = file.read()
        length = 8 + int.from_bytes(whole[:8], "little")
        for seed in range(5):
            data = random.Random(seed).randbytes(len(whole) - length)
            path = self.write("random", whole[:length] + data)
            result = self.document("run", "--layer-file", path, "--ranks", "2")
            self.assertEqual(list(result), RUN_KEYS)
            self.assertIsNone(result["relative_error"])
            self.assertIsNone(result["max_abs_error"])
            self.moxie("run", "--layer-file", path, "--tolerance", "1", code=3)

    def test_metadata(self):
        tensors, metadata = files.read(layer("qwen3_moe_norenorm.safetensors"))
        for key in metadata:
            for value in ("", "x", "-1", "0", "4611686018427387904", "1e3", "\u00e9"):
                files.write(self.path("layer"), tensors, {**metadata, key: value})
                self.moxie("run", "--layer-file", self.path("layer"), code=self.CODES)

    def test_shapes(self):
        tensors, metadata = files.read(layer("qwen3_moe_norenorm.safetensors"))
        for name in list(tensors):
            changed = dict(tensors)
            changed[name] = files.Tensor(tensors[name].dtype, [len(tensors[name].data)] + [1] * 2,
                                         tensors[name].data * files.BYTES[tensors[name].dtype])
            files.write(self.path("layer"), changed, metadata)
            self.moxie("run", "--layer-file", self.path("layer"), code=self.CODES)
            del changed[name]
            files.write(self.path("layer"), changed, metadata)
            self.moxie("run", "--layer-file", self.path("layer"), code=self.CODES)

    def test_model_configs(self):
        folder, number = MODELS[0]
        with open("%s/models/%s/config.json" % (GOLDEN, folder), encoding="utf-8") as file:
            config = json.load(file)
        os.symlink("%s/models/%s/model.safetensors" % (GOLDEN, folder), self.path("model.safetensors"))
        for key in ("hidden_size", "moe_intermediate_size", "num_local_experts", "num_experts_per_tok", "hidden_act",
                    "model_type", "norm_topk_prob", "n_group", "routed_scaling_factor", "text_config"):
            for value in (None, 0, -1, 2 ** 62, 2 ** 39, 1.5, "x", True, [], {}):
                self.write("config.json", json.dumps({**config, key: value}))
                self.moxie("run", *model_arguments(folder, number, self.folder), code=self.CODES)

    def test_pipes_in_a_folder(self):
        """Nobody writes into them. A configuration of the user's own may be one."""
        folder, number = MODELS[0]
        source = GOLDEN + "/models/" + folder
        for name in ("config.json", "hf_quant_config.json", "model.safetensors.index.json"):
            model = self.path("of " + name)
            os.mkdir(model)
            os.mkfifo(model + "/" + name)
            if name != "config.json":
                os.symlink(source + "/config.json", model + "/config.json")
            commands = [["run", *model_arguments(folder, number, model)]] if not name.startswith("hf") else []
            if not name.startswith("model"):
                commands += [[command, "--model", model] for command in ("plan", "check")]
            for command in commands:
                with self.subTest(command=command):
                    self.assertIn(name + ": not a regular file", self.moxie(*command, code=1)[1])
        with open(self.config(), "rb") as file:
            done = subprocess.run([COMMAND, "check", "/dev/stdin"], input=file.read(), capture_output=True,
                                  timeout=TIMEOUT_S, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_words_for_a_terminal(self):
        """What would steer it is '?', be it in a tensor's name, a model's word, a key or its value."""
        word = "x\r\x1b[2K\x1b]0;y\x07\x7f\u009b32m\nrouted \u00e9\u4e2d"
        shown = "x??[2K?]0;y????32m?routed \u00e9\u4e2d"
        files.write(self.path("evil"), {word: files.Tensor("F32", [2], bytes(4))})
        folder, _ = MODELS[0]
        with open("%s/models/%s/config.json" % (GOLDEN, folder), encoding="utf-8") as file:
            config = json.load(file)
        self.write("config.json", json.dumps({**config, "model_type": word, "swiglu_limit": 7, "hidden_size": None}))
        file = self.write("file.json", json.dumps({**LAYER, word: 1, "activation": word}))
        for command, code in ((["run", "--layer-file", self.path("evil")], 1), (["plan", "--model", self.folder], 1),
                              (["check", file], 2), (["check", file, "--verbose"], 2)):
            with self.subTest(command=command):
                text, trouble = self.moxie(*command, code=code)
                for line in text, trouble:
                    self.assertNotRegex(line, "[\x00-\x09\x0b-\x1f\x7f-\x9f]|\nrouted")
                self.assertIn(shown[:25], text + trouble)
        self.assertIn(word, [warning["key"] for warning in self.document("check", file, code=2)["warnings"]])

    def test_index_leads_nowhere_else(self):
        self.write("config.json", json.dumps({"hidden_size": 128}))
        for shard in ("../x", "/etc/passwd", "a/b", "", ".."):
            self.write("model.safetensors.index.json", json.dumps({"weight_map": {"t": shard}}))
            self.moxie("run", *model_arguments("tiny-qwen3-moe", 1, self.folder), code=1)


if __name__ == "__main__":
    unittest.main()
