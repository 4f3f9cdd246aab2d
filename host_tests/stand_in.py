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


def install_torch():
    """torch as far as it sees no GPU, for a process that asks no more: all of it takes seconds to
    load."""
    install({"torch": {"cuda": types.SimpleNamespace(is_available=lambda: False)}})


def install_adapter(engine):
    """Moxie's module for an engine, as far as its plugin and the benchmarks ask: without torch."""
    import moxie  # noqa: F401  the rest is itself
    install({f"moxie.{engine}": {"register": lambda: None, "layers_made": lambda: 0}})
