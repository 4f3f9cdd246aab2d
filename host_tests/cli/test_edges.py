"""The command moxie where it meets what is around it: outputs, other files, signals, names, JSON of refusals.

    MOXIE_COMMAND=build/dev/bin/moxie MOXIE_GOLDEN=host_tests/golden python3 test_edges.py [GROUP]
"""

import os
import subprocess
import unittest

from case import COMMAND, TIMEOUT_S, Case, layer

MIXTRAL = ["--layer-file", layer("mixtral_a.safetensors")]


class Output(Case):
    """What is written, or cannot be."""

    def test_a_result_that_is_lost_is_a_failure(self):
        for arguments in (["--help"], ["--version"], ["info"], ["info", "--json"], ["plan", self.config()],
                          ["conform", "--list"], ["info", "--keys"]):
            with self.subTest(arguments=arguments), open(os.devnull, "rb") as nowhere:
                done = subprocess.run([COMMAND, *arguments], stdout=nowhere, stderr=subprocess.PIPE, text=True,
                                      timeout=TIMEOUT_S, check=False)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertRegex(done.stderr, r"moxie[a-z ]*: [^\n]*output[^\n]*\n$")


if __name__ == "__main__":
    unittest.main()
