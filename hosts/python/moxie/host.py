"""A host in Python: a loaded library, and an instance of it for one configuration.

    with load("/opt/lib/libmoxie.so").open({"hidden_size": 2048, ...}) as instance:
        for reason in instance.reasons():
            print(reason)
"""

import collections
import ctypes
import logging
import os

from moxie.abi import (
    ABI_VERSION, CONFIG_ABSENT, CONFIG_FOUND, CONFIG_WRONG_TYPE, E_CONFIG, E_INTERNAL, E_INVALID,
    E_UNAVAILABLE, E_UNSUPPORTED, E_VERSION, OK, VERSION, VERSION_MAJOR, VERSION_MINOR, ConfigEntry,
    Host, MoxieError, Probe, Request, ask, check, entries, layout_mismatches, signals_wait,
    table_fault, type_of)

# Of MOXIE_LOG_*, in their order; what is an error there is raised, too.
LOG_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.INFO, logging.ERROR,
              logging.ERROR)
logger = logging.getLogger("moxie")


# As cmake/folders.cmake names it: before 1.0 a new minor number is a new ABI.
SONAME = f"libmoxie.so.{VERSION_MAJOR}" + (f".{VERSION_MINOR}" if VERSION_MAJOR == 0 else "")
ADVICE = "pass the path of a libmoxie.so, or set the variable MOXIE_PLUGIN to it"


class Library:
    """A loaded libmoxie, as load() gives it."""

    def __init__(self, path, host_build, advice=ADVICE):
        if not path:
            # dlopen gives the program itself for it.
            raise MoxieError(E_INVALID, -1, f'"" names no library: {advice}')
        self.path = path
        self.given_up = collections.deque()  # of Experts that ended while a graph was captured
        try:
            self.dll = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except (OSError, ValueError) as error:  # the second of a path with a zero in it
            raise MoxieError(E_UNAVAILABLE, -1,
                             f"{path} cannot be loaded ({error}): {advice}") from error
        entry = getattr(self.dll, "moxie_get_api_v1", None)
        if entry is None:
            raise MoxieError(E_UNSUPPORTED, -1, f"{path} has no symbol moxie_get_api_v1, so it is "
                             f"no Moxie plugin: {advice}")
        entry.argtypes = [type_of("*request"), type_of("**api"), type_of("*error")]
        entry.restype = ctypes.c_int32
        api = type_of("*api")()
        request = Request(abi_min=ABI_VERSION, abi_max=ABI_VERSION, host_build=host_build.encode())
        try:
            check(entry, ctypes.byref(request), ctypes.byref(api))
        except MoxieError as error:
            raise MoxieError(error.code, -1, f"{path}: {error.text}: {advice}") from error
        fault = table_fault(api, "close")
        if fault is not None:
            raise MoxieError(E_INTERNAL, -1, f"{path}: it answers OK, and its table moxie_api "
                             f"{fault}; the library is broken: {advice}")
        self.api = api.contents
        self._check_layout(advice)

    def _check_layout(self, advice):
        """Refuses a library whose structs are not those of the mirror."""
        if self.api.abi_version != ABI_VERSION:
            raise MoxieError(E_VERSION, -1, f"{self.path}: it answers with ABI "
                             f"{_numbers(self.api.abi_version)}, and asked was "
                             f"{_numbers(ABI_VERSION)}; the library is broken: {advice}")
        layout = self.layout()
        if not any(row[:2] == ("moxie_api", "") for row in layout):
            raise MoxieError(E_INTERNAL, -1, f"{self.path}: its layout() has {len(layout)} rows, "
                             "and none is of moxie_api, which is wanted to see that both are of "
                             f"one abi.h; the library is broken: {advice}")
        mismatches = layout_mismatches(layout)
        if mismatches:
            raise MoxieError(E_VERSION, -1, f"{self.path}: {len(mismatches)} fields lie elsewhere "
                             f"than in moxie for Python {VERSION}, first {mismatches[0]}; both "
                             f"have to be of one source: {advice}")

    @property
    def source_id(self):
        """The commit that the library was built from, or "unknown"."""
        return self.api.build.contents.source_id.decode()

    def layout(self):
        """[(structure, field, offset, size)] as the library was compiled."""
        fields, count, stride = type_of("*field")(), ctypes.c_uint64(), ctypes.c_uint32()
        self.api.layout(ctypes.byref(fields), ctypes.byref(count), ctypes.byref(stride))
        return [(row.structure.decode(), row.field.decode(), row.offset, row.size)
                for row in entries(fields, count.value, stride.value)]

    def probe(self):
        """[(name, kind, device, score, reason)] of every backend on this machine."""
        table = (Probe * 64)(*[Probe() for _ in range(64)])
        count = ctypes.c_uint64()
        check(self.api.probe, table, ctypes.sizeof(Probe), len(table), ctypes.byref(count))
        return [(row.name.decode(), row.kind.decode(), row.device.decode(), row.score,
                 row.reason.decode()) for row in table[:count.value]]

    def open(self, config, name="python", allocator=None, all_gather=None):
        """An instance for the configuration, a dict of the documented keys.

        `allocator` gives the planned buffers: allocate(kind, bytes, align) returns an address,
        release(address) takes it back. Without one the library allocates. all_gather(data) is what
        several ranks need (ep_size): called by each of them with as many bytes, it returns those of
        all, in the order of the ranks, as bytes or as a list or tuple with the bytes of each, or
        raises what keeps it from that, and never waits for ever.
        """
        return Instance(self, config, name, allocator, all_gather)


def _numbers(version):
    return f"{version >> 16}.{version & 0xffff}"


def default_path():
    """That of MOXIE_PLUGIN in the environment, or else what the loader finds: the library by the
    name of this ABI, which is all that a package for users has, or libmoxie.so."""
    named = os.environ.get("MOXIE_PLUGIN")
    for name in () if named else (SONAME, "libmoxie.so"):
        try:
            ctypes.CDLL(name)
            return name
        except OSError:
            pass
    return named or SONAME


def load(path=None, host_build=f"moxie for Python {VERSION}", advice=ADVICE):
    """Loads a libmoxie, agrees on the ABI and checks the mirror.

    path: a str or a path-like; None is default_path(). advice: how whoever reads a refusal names
    another one.

    A file that does not serve is a MoxieError, whose text has the path, and whose code says why:

        E_INVALID      the path is empty
        E_UNAVAILABLE  the loader refuses it: there is no such file, it is no library, or something
                       that it needs is missing; the cause is what ctypes raised
        E_UNSUPPORTED  it lacks the symbol of a Moxie plugin
        E_VERSION      it speaks another ABI, or was compiled from another abi.h
        E_INTERNAL     its tables break the contract: one is NULL, too short or has a NULL in it
    """
    return Library(os.fsdecode(default_path() if path is None else path), host_build, advice)


class Libraries(dict):
    """Path -> the library there, loaded when it is asked for, once; MoxieError as of load."""

    def __init__(self, host_build, advice):
        super().__init__()
        self.host_build, self.advice = host_build, advice

    def __missing__(self, path):
        self[path] = load(path, self.host_build, self.advice)
        return self[path]


def _is_text(value):
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _registered_fault(info):
    """What is wrong with a pointer to a RunnerInfo or DispatcherInfo, in words, or None."""
    for table, last in ((info, "api"), (info and info.contents.api, "destroy")):
        fault = table_fault(table, last)
        if fault is not None:
            name = f" of {info.contents.name.decode()}" if table is not info else ""
            return f"moxie_{type(table)._type_.__name__}{name} {fault}"
    return None


class Instance:
    """One configuration and what lives on it. Close it, or use it in a with statement."""

    def __init__(self, library, config, name, allocator=None, all_gather=None):
        for key, value in config.items():
            if not isinstance(key, str):
                raise MoxieError(E_INVALID, -1, f"{key!r} is a {type(key).__name__} and no key of "
                                 "the configuration: want a str of docs/configuration.md")
            # Within a callback nobody would hear of it.
            if isinstance(value, str) and not _is_text(value):
                raise MoxieError(E_INVALID, -1, f"{key}: {value!r} is no UTF-8: take the lone "
                                 "surrogates out of it")
            if isinstance(value, int) and not -(2**63) <= value < 2**63:  # ctypes would cut it
                raise MoxieError(E_INVALID, -1, f"{key}: {value} has more than 64 bits: set it to "
                                 "one from -2**63 to 2**63 - 1", (key,))
        self.api, self.path = library.api, library.path
        self.config = config
        self.allocator, self.gather, self.raised = allocator, all_gather, None
        self.device = config.get("device") or "cpu"
        self.runners, self.dispatchers = {}, {}
        callbacks = {
            "get_i64": self._getter(int), "get_f64": self._getter(int, float),
            "get_str": self._get_str, "log": self._log,
            "register_runner": self._register(self.runners),
            "register_dispatcher": self._register(self.dispatchers)}
        if allocator is not None:
            callbacks.update(allocate=self._allocate, release=self._release)
        if all_gather is not None:
            callbacks.update(all_gather=self._all_gather, barrier=self._barrier)
        types = dict(Host._fields_)
        # ctypes callbacks live as long as they are referenced.
        self.callbacks = {slot: types[slot](call) for slot, call in callbacks.items()}
        self.host = Host(abi_version=ABI_VERSION, name=name.encode(), **self.callbacks)
        self.handle = ctypes.c_void_p()
        try:
            self.check(self.api.open, ctypes.byref(self.host), ctypes.byref(self.handle))
        except BaseException:  # of a signal, behind an open that succeeded
            self.close()
            raise

    def _getter(self, *types):
        def get(_, key, value):
            found = self.config.get(key.decode())
            if found is None:
                return CONFIG_ABSENT
            if not isinstance(found, types):
                return CONFIG_WRONG_TYPE
            value[0] = found
            return CONFIG_FOUND
        return get

    def _get_str(self, _, key, buffer, capacity, length):
        found = self.config.get(key.decode())
        if found is None:
            return CONFIG_ABSENT
        if not isinstance(found, str):
            return CONFIG_WRONG_TYPE
        encoded = found.encode()
        length[0] = len(encoded)
        if capacity > 0:
            cut = encoded[:capacity - 1] + b"\0"
            ctypes.memmove(buffer, cut, len(cut))
        return CONFIG_FOUND

    def _answer(self, call):
        """0, or 1 where the call raises: ctypes would print that and answer 0, which is success."""
        try:
            call()
            return 0
        except BaseException as error:  # whatever the host's own part raises, sys.exit too
            self.raised = error
            return 1

    def _allocate(self, _, request, memory):
        def allocate():
            wanted = request.contents
            memory[0] = self.allocator.allocate(wanted.kind, wanted.bytes, wanted.align)
        return self._answer(allocate)

    def _release(self, _, request, memory):
        self.allocator.release(memory)

    def _all_gather(self, _, send, receive, size):
        def gather():
            everybody = self.gather(ctypes.string_at(send, size))
            if isinstance(everybody, (list, tuple)):  # one of each rank, as all_gather_object has
                everybody = b"".join(everybody)
            everybody, ranks = bytes(everybody), self.config["ep_size"]
            if len(everybody) != ranks * size:
                raise MoxieError(E_INVALID, -1, f"all_gather returned {len(everybody)} bytes of "
                                 f"{ranks} ranks with {size} each; want those of all")
            ctypes.memmove(receive, everybody, len(everybody))
        return self._answer(gather)

    def _barrier(self, _):
        return self._answer(lambda: self.gather(b"\0"))

    def _log(self, _, severity, component, text, length):
        logger.log(LOG_LEVELS[severity], "%s: %s", component.decode(),
                   text[:length].decode(errors="replace"))

    def _register(self, table):
        def register(_, info):
            fault = _registered_fault(info)
            if fault is not None:
                self.raised = MoxieError(E_INTERNAL, -1, f"{self.path}: it registers what cannot "
                                         f"be used: {fault}; the library is broken: load another")
                return 1
            # A name may be registered once for each device.
            if info.contents.device.decode() == self.device:
                table[info.contents.name.decode()] = info.contents
            return 0
        return register

    def check(self, call, *arguments):
        """As abi.check; what the allocator raised meanwhile is the cause of the error. Of what the
        library did wrong meanwhile it has no words of its own."""
        self.raised = None
        try:
            check(call, *arguments)
        except MoxieError as error:
            raised, self.raised = self.raised, None  # whose traceback holds what it ran in
            if isinstance(raised, MoxieError) or not isinstance(raised, (Exception, type(None))):
                raise raised from error
            raise error from raised

    def snapshot(self):
        """{key: (type, value, found)} as the library read the configuration."""
        report = type_of("*report")()
        check(self.api.validate, self.handle, ctypes.byref(report))  # says whether it is open
        keys, entry = {}, ConfigEntry()
        while self.api.config(self.handle, len(keys), ctypes.byref(entry)) == OK:
            value = entry.value.decode(errors="replace")
            keys[entry.key.decode()] = (entry.type.decode(), value, bool(entry.found))
        return keys

    def reasons(self):
        """[(code name, key, message)] against the configuration; empty when it is accepted."""
        report = type_of("*report")()
        check(self.api.validate, self.handle, ctypes.byref(report))
        found = report.contents
        return [(row.name.decode(), row.key.decode(), row.message.decode())
                for row in entries(found.reasons, found.reasons_count, found.reason_stride)]

    def refuse(self):
        """Raises MoxieError with every reason against the configuration, if there is one."""
        reasons = {f"{key}: {message}": key for _, key, message in self.reasons()}
        if reasons:
            raise MoxieError(E_CONFIG, -1, "the configuration cannot work:\n  "
                             + "\n  ".join(reasons), dict.fromkeys(reasons.values()))

    def plan(self):
        """[(name, kind, bytes)] of every buffer; raises MoxieError for a refused configuration."""
        plan = type_of("*plan")()
        check(self.api.plan, self.handle, ctypes.byref(plan))
        found = plan.contents
        return [(row.name.decode(), row.kind, row.bytes)
                for row in entries(found.buffers, found.buffers_count, found.buffer_stride)]

    def close(self):
        """Refused while a runner or dispatcher lives."""
        with signals_wait():  # so that a handle is there as long as the instance
            if self.handle:
                ask(self.api.close, self.handle)
                self.handle = ctypes.c_void_p()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
