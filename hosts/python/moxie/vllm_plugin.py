"""What vLLM finds of this package (vllm.general_plugins), and calls in each of its processes."""

import os


def register():
    """moxie.vllm.register where MOXIE_PLUGIN is set, and nothing, not even an import, where it is
    not: the package may be there for something else. What does not fit raises, and stops vLLM."""
    if os.environ.get("MOXIE_PLUGIN"):
        from moxie import vllm
        vllm.register()
