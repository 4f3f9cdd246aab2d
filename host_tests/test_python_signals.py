"""hosts/python/moxie/experts.py where Ctrl-C comes while something is made or given back: it is raised,
and nothing is left. SIGUSR1 stands for it.
"""

import gc
import itertools
import os
import signal
import sys
import unittest
from unittest import mock

from test_python_experts import CONFIG, Allocator, Input, Model

import moxie.experts
import moxie.host
from moxie import Experts, load

FILES = moxie.experts.__file__, moxie.host.__file__


class Interrupting(Allocator):
    """Ctrl-C comes in whichever calls are named."""

    def __init__(self, *calls):
        super().__init__()
        self.calls = calls

    def allocate(self, *wanted):
        if "allocate" in self.calls:
            signal.raise_signal(signal.SIGUSR1)
        return super().allocate(*wanted)

    def release(self, address):
        if "release" in self.calls:
            signal.raise_signal(signal.SIGUSR1)
        super().release(address)


def interrupt(*_):
    raise KeyboardInterrupt


class Interrupts(unittest.TestCase):
    def setUp(self):
        self.library = load(os.environ["MOXIE_PLUGIN"])
        self.addCleanup(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, interrupt))
        hook = mock.patch.object(sys, "unraisablehook")  # of what a callback raises
        printed = hook.start()
        self.addCleanup(hook.stop)
        self.addCleanup(printed.assert_not_called)

    def test_what_was_created_is_destroyed(self):
        """It is raised behind the call, which may have succeeded."""
        allocator, model, given = Interrupting("allocate", "release"), Model(), Input(2)
        with self.assertRaises(KeyboardInterrupt):
            Experts(self.library, CONFIG, allocator=allocator)
        self.assertEqual(allocator.held, {})
        allocator.calls = ()
        experts = Experts(self.library, CONFIG, allocator=allocator)
        held, allocator.calls = set(allocator.held), ("allocate", "release")
        with self.assertRaises(KeyboardInterrupt):
            experts.add_layer(*model.matrices())
        self.assertEqual(set(allocator.held), held)
        allocator.calls = ()
        layer = experts.add_layer(*model.matrices())
        layer.forward(given.tokens, *given.rows())
        del layer, experts
        gc.collect()
        self.assertEqual(allocator.held, {})

    def test_what_is_given_back(self):
        """A layer by the call behind the step in which it was given up, and then all."""
        allocator = Interrupting()
        experts = Experts(self.library, CONFIG, allocator=allocator)
        held, layer = set(allocator.held), experts.add_layer(*Model().matrices())
        self.assertGreater(set(allocator.held), held)
        with experts.lock:
            del layer
        allocator.calls = ("release",)
        with self.assertRaises(KeyboardInterrupt):
            experts.add_layer(*Model().matrices())
        self.assertEqual(set(allocator.held), held)
        with self.assertRaises(KeyboardInterrupt):
            experts.close()
        self.assertEqual(allocator.held, {})

    def close(self, experts, line):
        """Interrupted at that line of what it runs, and then once more; False where there is none."""
        lines = itertools.count()

        def trace(frame, event, _):
            if frame.f_code.co_filename not in FILES:
                return None
            if event == "line" and next(lines) == line:
                signal.raise_signal(signal.SIGUSR1)
            return trace

        try:
            sys.settrace(trace)
            experts.close()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
            experts.close()
        self.assertLessEqual(next(lines), line, "it was lost")
        return False

    def test_every_line_of_a_close(self):
        for line in itertools.count():
            allocator = Allocator()
            experts = Experts(self.library, CONFIG, allocator=allocator)
            layer = experts.add_layer(*Model().matrices())
            interrupted = self.close(experts, line)
            self.assertEqual((allocator.held, experts.made), ({}, {}), line)
            self.assertFalse(experts.dispatcher or experts.instance.handle, line)
            del layer
            if not interrupted:
                break
        self.assertGreater(line, 10)


if __name__ == "__main__":
    unittest.main()
