"""Modules that are not there, for the tests of what imports them."""

import sys
import types


def install(modules):
    """modules: {dotted name: {name: what it is}, or classes and functions by their own names}."""
    for name, content in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            here = ".".join(parts[:end])
            if here not in sys.modules:
                sys.modules[here] = types.ModuleType(here)
                if end > 1:
                    setattr(sys.modules[".".join(parts[:end - 1])], parts[end - 1],
                            sys.modules[here])
        vars(sys.modules[name]).update(
            content if isinstance(content, dict) else {each.__name__: each for each in content})
