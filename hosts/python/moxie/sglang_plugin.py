"""What SGLang finds of this package (sglang.srt.plugins), and calls in each of its processes."""

import os


def register():
    """moxie.sglang.register where MOXIE_PLUGIN is set, and nothing, not even an import, where it is
    not: the package may be there for something else. What does not fit stops SGLang in words; an
    exception it would log, and serve without Moxie."""
    if os.environ.get("MOXIE_PLUGIN"):
        try:
            from moxie import sglang
            sglang.register()
        except Exception as error:
            raise SystemExit(f"moxie.sglang: {error}") from error
