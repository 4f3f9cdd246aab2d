"""hosts/python/moxie: the mirror of abi.h and a host, over the library named by MOXIE_PLUGIN."""

import asyncio
import copy
import ctypes
import gc
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "hosts" / "python"))

from moxie import abi, host, load, matrix, tensor  # noqa: E402

CONFIG = {
    "hidden_size": 2,
    "intermediate_size": 2,
    "num_experts": 2,
    "top_k": 1,
    "forward_tokens_max": 2,
    "weight_format": "f32",
    "input_format": "f32",
    "output_format": "f32",
}


def floats(*values):
    return (ctypes.c_float * len(values))(*values)


def at(array, shape, number="f32"):
    return tensor(ctypes.addressof(array), shape, number)


class Mirror(unittest.TestCase):
    def setUp(self):
        self.library = load(os.environ["MOXIE_PLUGIN"])
        self.layout = self.library.layout()

    def test_mirror_is_complete(self):
        seen = {(structure, field) for structure, field, _, _ in self.layout if field}
        mine = {
            (structure, field)
            for structure, mirrored in abi.MIRROR.items()
            for field, *_ in mirrored._fields_
        }
        self.assertEqual(mine, seen)
        for structure, field, _, size in self.layout:
            if not field:
                self.assertEqual(ctypes.sizeof(abi.MIRROR[structure]), size, structure)
        self.assertEqual(abi.layout_mismatches(self.layout), [])

    def test_every_moved_field_is_named(self):
        for index, (structure, field, offset, size) in enumerate(self.layout):
            if field:
                moved = list(self.layout)
                moved[index] = (structure, field, offset + 8, size)
                found = abi.layout_mismatches(moved, {structure: abi.MIRROR[structure]})
                self.assertEqual(len(found), 1)
                self.assertTrue(found[0].startswith(f"{structure}.{field}: "), found)

    def test_lost_field(self):
        lost = [row for row in self.layout if row[:2] != ("moxie_step", "phase")]
        self.assertIn("moxie_step.phase", abi.layout_mismatches(lost)[0])

    def test_structs_that_are_not_reported(self):
        """As of docs/tutorial's plugin: only what is reported can differ."""
        own = [row for row in self.layout if row[0] == "moxie_api"]
        self.assertEqual(abi.layout_mismatches(own), [])
        self.assertNotEqual(abi.layout_mismatches([(*own[1][:2], own[1][2] + 8, own[1][3])]), [])

    def test_digest(self):
        digest = 0xCBF29CE484222325
        for structure, field, offset, size in self.layout:
            row = structure.encode() + b"\0" + field.encode() + b"\0"
            row += offset.to_bytes(4, "little") + size.to_bytes(4, "little")
            for byte in row:
                digest = (digest ^ byte) * 0x100000001B3 % 2**64
        self.assertEqual(self.library.api.build.contents.layout_digest, digest)

    def test_constants(self):
        header = (ROOT / "abi.h").read_text()
        for name in ("OK", "E_INVALID", "E_UNSUPPORTED", "E_UNAVAILABLE", "E_VERSION", "E_CONFIG",
                     "FORMAT_F32", "ORDER_PLAIN", "ORDER_GATE_UP", "ORDER_UP_GATE",
                     "ORDER_INTERLEAVED", "IDS_GLOBAL"):
            value = re.search(rf"#define MOXIE_{name} (\d+)", header).group(1)
            self.assertEqual(getattr(abi, name), int(value), name)


class Refusals(unittest.TestCase):
    def test_another_version(self):
        library = load(os.environ["MOXIE_PLUGIN"])
        request = abi.Request(abi_min=9 << 16, abi_max=9 << 16, host_build=b"python 9")
        api = abi.type_of("*api")()
        with self.assertRaises(abi.MoxieError) as caught:
            abi.check(library.dll.moxie_get_api_v1, ctypes.byref(request), ctypes.byref(api))
        self.assertEqual(caught.exception.code, abi.E_VERSION)
        self.assertIn("python 9", caught.exception.text)
        self.assertFalse(api)

    def refused(self, path, code, pattern):
        """By load, in a text that has the path, what was seen, and what to change."""
        with self.assertRaisesRegex(abi.MoxieError, f"(?s)^{re.escape(path)}[: ].*{pattern}.*: "
                                    "pass the path of a libmoxie.so, .*MOXIE_PLUGIN") as caught:
            load(path)
        self.assertEqual(caught.exception.code, code)
        return caught.exception

    def test_no_library(self):
        for path, seen, kind in (("/nowhere/libmoxie.so", "No such file", OSError),
                                 (__file__, "invalid ELF header", OSError),
                                 (str(ROOT), "cannot read file data", OSError),
                                 ("/nowhere/\0.so", "embedded null", ValueError)):
            with self.subTest(path):
                error = self.refused(path, abi.E_UNAVAILABLE, r"cannot be loaded \(.*" + seen)
                self.assertIsInstance(error.__cause__, kind)

    def test_library_of_another_version(self):
        path = os.environ["MOXIE_PLUGIN"]
        with mock.patch.object(host, "ABI_VERSION", 9 << 16):
            self.refused(path, abi.E_VERSION, r"no common ABI.*moxie for Python.*9\.0.*speaks 0\.")
        with mock.patch.object(host, "layout_mismatches", lambda _: ["moxie_step.phase: 8, 4"] * 3):
            self.refused(path, abi.E_VERSION, "3 fields lie elsewhere .* first moxie_step.phase")

    @unittest.skipUnless("MOXIE_BROKEN_PREFIX" in os.environ, "wants the libraries of fake/broken.c")
    def test_broken_libraries(self):
        """As abi/loader.c refuses them."""
        for number, code, seen in (
                (1, abi.E_VERSION, "moxie for Python"),
                (2, abi.E_INTERNAL, "answers OK, and its table moxie_api is NULL"),
                (3, abi.E_INTERNAL, "moxie_api has 64 bytes, at least 120 are wanted"),
                (4, abi.E_INTERNAL, "moxie_api has NULL for stats"),
                (5, abi.E_VERSION, "answers with ABI 0.9, and asked was 0.1"),
                (6, abi.E_INTERNAL, r"layout\(\) has 0 rows, and none is of moxie_api")):
            with self.subTest(seen):
                self.refused(f"{os.environ['MOXIE_BROKEN_PREFIX']}{number}.so", code, seen)
        load(os.environ["MOXIE_BROKEN_PREFIX"] + "8.so")  # which is only older

    @unittest.skipUnless("MOXIE_FAULT_PREFIX" in os.environ, "wants the libraries of mock_plugin/")
    def test_broken_tables_of_a_dispatcher(self):
        path = os.environ["MOXIE_FAULT_PREFIX"] + "null_dispatcher_slot.so"
        with self.assertRaisesRegex(abi.MoxieError, f"^{re.escape(path)}: .*moxie_dispatcher_api of "
                                    "local has NULL for poll_error; .*: load another") as caught:
            load(path).open(CONFIG)
        self.assertEqual(caught.exception.code, abi.E_INTERNAL)

    def test_path_of_the_environment(self):
        path = os.environ["MOXIE_PLUGIN"]
        self.assertEqual(load().path, path)
        self.assertEqual(load(pathlib.Path(path)).path, path)
        self.assertEqual(load(os.fsencode(path)).path, path)
        with mock.patch.dict(os.environ, MOXIE_PLUGIN="/nowhere/libmoxie.so"):
            with self.assertRaisesRegex(abi.MoxieError, "/nowhere/libmoxie.so cannot be loaded"):
                load()
            self.assertEqual(load(path).path, path)

    def test_path_that_the_loader_finds(self):
        """By the soname, or by libmoxie.so where there is none that serves."""
        code = "import moxie; print(moxie.load().path)"
        plugin = os.environ["MOXIE_PLUGIN"]
        for names, seen in (({host.SONAME: plugin}, f"{host.SONAME}\n"),
                            ({host.SONAME: plugin, "libmoxie.so": __file__}, f"{host.SONAME}\n"),
                            ({"libmoxie.so": plugin}, "libmoxie.so\n"),
                            ({host.SONAME: __file__, "libmoxie.so": plugin}, "libmoxie.so\n"),
                            ({host.SONAME: __file__}, f"{host.SONAME} cannot .*invalid ELF header"),
                            ({}, f"{host.SONAME} cannot .*No such file.*set the variable")):
            with self.subTest(names), tempfile.TemporaryDirectory() as folder:
                for name, target in names.items():
                    os.symlink(target, f"{folder}/{name}")
                env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path),
                       "LD_LIBRARY_PATH": folder}
                del env["MOXIE_PLUGIN"]
                ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                                     check=False, env=env)
                self.assertRegex(ran.stdout or ran.stderr, seen)

    def test_soname(self):
        found = pathlib.Path(os.environ["MOXIE_PLUGIN"]).with_name(host.SONAME)
        self.assertTrue(found.samefile(os.environ["MOXIE_PLUGIN"]))

    def test_errors_are_copied_whole(self):
        """As a pool of processes does with what its workers raise."""
        error = abi.MoxieError(abi.E_CONFIG, 3, "no such key", ("top_q",))
        for copied in (copy.copy(error), pickle.loads(pickle.dumps(error))):
            self.assertIs(type(copied), abi.MoxieError)
            self.assertEqual((copied.code, copied.rank, copied.text, copied.keys, str(copied)),
                             (abi.E_CONFIG, 3, "no such key", ("top_q",), str(error)))

    def test_codes_have_names(self):
        self.assertEqual(str(abi.MoxieError(abi.E_UNAVAILABLE, -1, "no")), "no (E_UNAVAILABLE)")
        self.assertEqual(str(abi.MoxieError(99, -1, "no")), "no (99)")  # of a later library

    def test_keys_of_ranks_need_no_torch(self):
        code = ("import sys; sys.modules['torch'] = None; from moxie.ranks import rank_keys; "
                "print(rank_keys(4, 3)['ep_rank'])")
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                             check=False,
                             env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        self.assertEqual((ran.stdout, ran.stderr), ("3\n", ""))

    def test_empty_path(self):
        with self.assertRaisesRegex(abi.MoxieError, '"" names no library: pass the path') as caught:
            load("")
        self.assertEqual(caught.exception.code, abi.E_INVALID)

    def test_no_plugin(self):
        self.refused("libc.so.6", abi.E_UNSUPPORTED, "no symbol moxie_get_api_v1, .*no Moxie plugin")

    def test_null_host(self):
        library = load(os.environ["MOXIE_PLUGIN"])
        with self.assertRaises(abi.MoxieError) as caught:
            abi.check(library.api.open, None, ctypes.byref(ctypes.c_void_p()))
        self.assertEqual(caught.exception.code, abi.E_INVALID)


class Host(unittest.TestCase):
    def setUp(self):
        self.library = load(os.environ["MOXIE_PLUGIN"])

    def test_probe(self):
        for name, kind, device, _, reason in self.library.probe():
            self.assertIn(kind, ("runner", "dispatcher"))
            self.assertTrue(name and device and reason)

    def test_refused_configuration(self):
        with self.library.open({**CONFIG, "hidden_size": "two", "top_k": 2.5}) as instance:
            keys = [key for _, key, _ in instance.reasons()]
            self.assertIn("hidden_size", keys)
            self.assertIn("top_k", keys)
            with self.assertRaises(abi.MoxieError) as caught:
                instance.plan()
            self.assertEqual(caught.exception.code, abi.E_CONFIG)
            self.assertIn("refused for 2 reasons: ", caught.exception.text)
        with self.assertLogs("moxie", "INFO") as logs, \
                self.library.open({**CONFIG, "top_k": 0}) as instance:
            with self.assertRaisesRegex(abi.MoxieError, "refused for 1 reason: top_k: "):
                instance.plan()
        self.assertIn("INFO:moxie:config: refused for 1 reason; ", "".join(logs.output))

    def test_warnings_are_logged(self):
        with self.assertLogs("moxie", "WARNING") as logs, \
                self.library.open({**CONFIG, "dispatch_sms": 3}) as instance:
            instance.plan()
        self.assertIn("dispatch_sms", "".join(logs.output))

    def test_words_that_are_no_text(self):
        for key in ("runner", "activation"):
            with self.assertRaisesRegex(abi.MoxieError, f"{key}: .*udcff.* is no UTF-8") as caught:
                self.library.open({**CONFIG, key: "x\udcff"})
            self.assertEqual(caught.exception.code, abi.E_INVALID)

    def test_numbers_of_more_than_64_bits(self):
        for number in (2**63, -(2**63) - 1, 2**64 + 1):
            with self.assertRaisesRegex(abi.MoxieError, f"^top_k: {number} has more than 64 bits: "
                                        "set it to") as caught:
                self.library.open({**CONFIG, "top_k": number})
            self.assertEqual((caught.exception.code, caught.exception.keys),
                             (abi.E_INVALID, ("top_k",)))
        with self.library.open({**CONFIG, "top_k": 2**63 - 1}) as instance:
            self.assertIn("top_k", [key for _, key, _ in instance.reasons()])

    def test_a_signal_waits_for_the_call(self):
        """In a callback its exception would be nobody's, and the answer to the library any."""
        came = []

        def handle(number, _):
            came.append(number)
            raise InterruptedError

        class Interrupted(dict):
            def get(self, key, default=None):
                if key == "top_k":
                    signal.raise_signal(signal.SIGUSR1)
                    signal.raise_signal(signal.SIGUSR1)
                return super().get(key, default)

        before = signal.signal(signal.SIGUSR1, handle)
        self.addCleanup(signal.signal, signal.SIGUSR1, before)
        with mock.patch.object(sys, "unraisablehook") as printed:
            with self.assertRaises(InterruptedError):
                self.library.open(Interrupted(CONFIG))
        printed.assert_not_called()
        self.assertEqual(came, [signal.SIGUSR1])
        self.assertIs(signal.getsignal(signal.SIGUSR1), handle)

    def test_signals_that_others_handle_in_c(self):
        """And the flags: what Python's own signal() would put its own in the place of."""
        action = ctypes.CDLL(None).sigaction
        handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: None)
        given, seen = ctypes.create_string_buffer(256), ctypes.create_string_buffer(256)
        given[:8] = ctypes.cast(handler, ctypes.c_void_p).value.to_bytes(8, "little")
        given[136:140] = (0x10000000).to_bytes(4, "little")  # SA_RESTART, behind a mask of 128
        self.addCleanup(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, print))
        self.assertEqual(action(signal.SIGUSR1, given, None), 0)
        with self.library.open(CONFIG) as instance:
            instance.plan()
        action(signal.SIGUSR1, None, seen)
        self.assertEqual(seen[:8], given[:8])
        self.assertEqual(seen.raw[139] & 0x10, 0x10)

    def test_a_signal_is_told_once(self):
        """To whoever hears of it by a file descriptor, as asyncio does."""
        class Interrupted(dict):
            def get(self, key, default=None):
                if key == "top_k":
                    signal.raise_signal(signal.SIGUSR1)
                return super().get(key, default)

        async def open_one():
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, came.append, 1)
            self.library.open(Interrupted(CONFIG)).close()
            await asyncio.sleep(0.05)

        came = []
        asyncio.run(open_one())
        self.assertEqual(came, [1])

    def test_every_signal_is_handled(self):
        """Also those whose turn comes behind one that raises."""
        came = []

        def handle(number, frame):
            came.append((number, frame is not None))
            raise InterruptedError

        def both(_):
            for number in numbers:
                signal.raise_signal(number)
            return abi.OK

        numbers = signal.SIGUSR1, signal.SIGUSR2
        for number in numbers:
            self.addCleanup(signal.signal, number, signal.signal(number, handle))
        with self.assertRaises(InterruptedError):
            abi.check(both)
        self.assertEqual(came, [(number, True) for number in numbers])

    def test_closed(self):
        instance = self.library.open(CONFIG)
        instance.close()
        for call in (instance.reasons, instance.plan, instance.snapshot):
            with self.assertRaises(abi.MoxieError) as caught:
                call()
            self.assertEqual(caught.exception.code, abi.E_INVALID)

    def test_accepted_configuration(self):
        with self.library.open(CONFIG) as instance:
            gc.collect()  # callbacks outlive the call that made them
            self.assertEqual(instance.reasons(), [])
            self.assertTrue(all(size > 0 for _, _, size in instance.plan()))
            self.assertEqual(instance.snapshot()["hidden_size"], ("i64", "2", True))
            self.assertIn("moxie_cpu", instance.runners)
            self.assertEqual(set(instance.dispatchers), {"local", "allgather", "alltoall"})

    def test_what_ranks_ask_for(self):
        asked, given, found = [], {**CONFIG, "ep_size": 2}, ctypes.create_string_buffer(6)
        with self.library.open(given, all_gather=lambda data: asked.append(data) or b"abcdef") as one:
            self.assertEqual(one.host.barrier(None), 0)
            self.assertEqual(one.host.all_gather(None, b"abc", found, 3), 0)
            self.assertEqual((asked, found.raw), ([b"\0", b"abc"], b"abcdef"))
            self.assertEqual(one.host.all_gather(None, b"abcd", found, 4), 1)
            self.assertIn("6 bytes of 2 ranks with 4 each", one.raised.text)
        for parts in ([b"uvw", bytearray(b"xyz")], (memoryview(b"uvw"), b"xyz")):
            with self.library.open(given, all_gather=lambda data: parts) as one:
                self.assertEqual(one.host.all_gather(None, b"abc", found, 3), 0, one.raised)
                self.assertEqual(found.raw, b"uvwxyz")
                self.assertEqual(one.host.all_gather(None, b"abcd", found, 4), 1)
                self.assertIn("6 bytes of 2 ranks with 4 each", one.raised.text)
        with self.library.open(given, all_gather={}.__getitem__) as one:
            self.assertEqual(one.host.barrier(None), 1)
            self.assertIsInstance(one.raised, KeyError)

    def test_backends_of_another_device(self):
        with self.library.open({**CONFIG, "device": "cpu"}) as instance:
            table = {}
            register, known = instance._register(table), instance.dispatchers["local"]
            for device in (b"cpu", b"sm_90"):
                info = abi.DispatcherInfo(name=b"local", device=device, traits=known.traits,
                                          api=known.api)
                self.assertEqual(register(None, ctypes.pointer(info)), 0)
            self.assertEqual(table["local"].device, b"cpu")

    def test_backends_that_are_not_whole(self):
        """In a callback nobody would hear of what is raised."""
        with self.library.open(CONFIG) as instance:
            table, known = {}, instance.runners["moxie_cpu"]
            register = instance._register(table)
            whole = {"name": b"fast", "device": b"cpu", "traits": known.traits, "api": known.api}
            for change, seen in (({"api": None}, "moxie_runner_info has NULL for api"),
                                 ({"device": None}, "moxie_runner_info has NULL for device"),
                                 ({"struct_size": 8}, "moxie_runner_info has 8 bytes, at least 40"),
                                 ({"api": ctypes.pointer(abi.RunnerApi())},
                                  "moxie_runner_api of fast has NULL for create")):
                info = abi.RunnerInfo(**{**whole, **change})
                self.assertEqual(register(None, ctypes.pointer(info)), 1)
                self.assertIn(f": {seen}", instance.raised.text)
            self.assertEqual(register(None, abi.type_of("*runner_info")()), 1)
            self.assertIn("moxie_runner_info is NULL", instance.raised.text)
            self.assertEqual(table, {})

    def test_no_device(self):
        """None is a key that is not set, as of every other."""
        with self.library.open({**CONFIG, "device": None}) as instance:
            self.assertIn("moxie_cpu", instance.runners)

    def test_forward(self):
        """Both experts multiply silu(x) by x; expert 1 doubles the result."""
        square = [1, 0, 0, 1]
        values1, values2 = floats(*square * 4), floats(*square, *[2 * v for v in square])
        w1 = matrix(at(values1, (2, 4, 2)), "f32", abi.ORDER_GATE_UP)
        w2 = matrix(at(values2, (2, 2, 2)), "f32", abi.ORDER_PLAIN)
        weights = abi.Weights(w1=ctypes.pointer(w1), w2=ctypes.pointer(w2))
        x, y, chosen = floats(1, 2, 1, 2), floats(0, 0, 0, 0), floats(1, 1)
        ids = (ctypes.c_int32 * 2)(0, 1)
        batch = abi.Batch(id_space=abi.IDS_GLOBAL, x=at(x, (2, 2)), ids=at(ids, (2, 1), "i32"),
                          weights=at(chosen, (2, 1)), y=at(y, (2, 2)))
        step = abi.Step(tokens=2)
        runner, dispatcher = ctypes.c_void_p(), ctypes.c_void_p()
        with self.library.open(CONFIG) as instance:
            runs = instance.runners["moxie_cpu"].api.contents
            moves = instance.dispatchers["local"].api.contents
            abi.check(runs.create, instance.handle, 0, ctypes.byref(weights),
                      ctypes.byref(runner))
            abi.check(moves.create, instance.handle, ctypes.byref(dispatcher))
            abi.check(moves.begin_forward, dispatcher, ctypes.byref(step))
            abi.check(self.library.api.forward, dispatcher, runner, ctypes.byref(batch))
            with self.assertRaises(abi.MoxieError):
                instance.close()  # refused while they live
            moves.destroy(dispatcher)
            runs.destroy(runner)
        for seen, wanted in zip(y, (0.7310586, 3.5231884, 1.4621172, 7.0463767)):
            self.assertAlmostEqual(seen, wanted, places=5)


if __name__ == "__main__":
    unittest.main()
