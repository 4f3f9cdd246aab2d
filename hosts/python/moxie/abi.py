"""abi.h as ctypes, and how a call's failure becomes an exception.

The mirror is generated from abi.h. host.load() compares it, field by field, with the layout that
the library reports about itself, so that a mirror that is out of date is an error and not a crash.
"""

import _signal  # signal.getsignal looks every handler up in an enum: 15 times as long
import contextlib
import ctypes
import signal
import sys
import threading

# ---- The mirror --------------------------------------------------------------------------------

TYPES = {
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "f64": ctypes.c_double,
    "str": ctypes.c_char_p,
    "ptr": ctypes.c_void_p,
}


def type_of(word):
    """The ctypes type of "i32", of "*traits" (a pointer to moxie_traits) or of "**rows"."""
    if word.startswith("*"):
        return ctypes.POINTER(type_of(word[1:]))
    return TYPES[word]


def function(result, *parameters):
    """A slot's type; result None is void."""
    return ctypes.CFUNCTYPE(result and type_of(result), *map(type_of, parameters))


def mirror(name, *rows):
    """Defines moxie_<name>. A row is "type field field ..." or (field, type)."""
    fields = []
    for row in rows:
        if isinstance(row, str):
            word, *names = row.split()
            fields += [(field, type_of(word)) for field in names]
        else:
            fields.append(row)

    def init(self, **values):
        if fields[0][0] == "struct_size":
            values.setdefault("struct_size", ctypes.sizeof(type(self)))
        ctypes.Structure.__init__(self, **values)

    TYPES[name] = type(name, (ctypes.Structure,), {"_fields_": fields, "__init__": init})
    MIRROR["moxie_" + name] = TYPES[name]
    return TYPES[name]


MIRROR = {}

# ---- generated from abi.h by `python3 abi/ledger`; do not edit ----
VERSION_MAJOR = 0
VERSION_MINOR = 1
VERSION_PATCH = 1
RANKS_MAX = 64
TOP_K_MAX = 32
SLOTS_MAX = 4
OK = 0
E_INVALID = 1
E_UNSUPPORTED = 2
E_UNAVAILABLE = 3
E_VERSION = 4
E_CONFIG = 5
E_CAPACITY = 6
E_CAPTURING = 7
E_COLLECTIVE_MISMATCH = 8
E_TIMEOUT = 9
E_PEER = 10
E_MEMORY = 11
E_DEVICE = 12
E_INTERNAL = 13
DEVICE_CPU = 1
DEVICE_CUDA = 2
DTYPE_INT = 0
DTYPE_UINT = 1
DTYPE_FLOAT = 2
DTYPE_BFLOAT = 4
DTYPE_FLOAT8_E4M3FN = 10
FORMAT_AUTO = 0
FORMAT_F32 = 1
FORMAT_BF16 = 2
FORMAT_F16 = 3
FORMAT_FP8_TENSOR = 4
FORMAT_FP8_CHANNEL = 5
FORMAT_FP8_BLOCK128 = 6
FORMAT_INT4_G32 = 7
FORMAT_MXFP4 = 8
FORMAT_NVFP4 = 9
FORMAT_FP8 = 10
MEMORY_DEVICE = 1
MEMORY_SYMMETRIC = 2
MEMORY_PINNED = 3
MEMORY_HOST = 4
CONFIG_FOUND = 0
CONFIG_ABSENT = 1
CONFIG_WRONG_TYPE = 2
LOG_DEBUG = 0
LOG_INFO = 1
LOG_WARNING = 2
LOG_ERROR = 3
LOG_HOST_MISBEHAVING = 4
LOG_PLUGIN_MISBEHAVING = 5
THREAD_INIT = 1
THREAD_INSTANCE_SERIAL = 2
LAYOUT_STANDARD = 1
LAYOUT_RANK_MAJOR = 2
LAYOUT_EXPERT_CONTIGUOUS = 3
LAYOUT_EXPERT_MASKED = 4
IDS_GLOBAL = 1
IDS_PHYSICAL = 2
IDS_LOCAL = 3
BY_NOBODY = 0
BY_HOST = 1
BY_RUNNER = 2
BY_DISPATCHER = 3
GRAPH_EAGER_ONLY = 0
GRAPH_CAPTURABLE = 1
ORDER_PLAIN = 0
ORDER_GATE_UP = 1
ORDER_UP_GATE = 2
ORDER_INTERLEAVED = 3
ROWS_OUT = 0
ROWS_IN = 1
PADDING_NONE = 0
PADDING_MAX_LEN = 1
PADDING_SUM_LEN = 2
PHASE_MIXED = 0
PHASE_PREFILL = 1
PHASE_DECODE = 2
PHASE_IDLE = 3
ROUTING_EXTENSION = "moxie.routing/1"
SCORING_SOFTMAX = 1
SCORING_TOP_K_SOFTMAX = 2
SCORING_SIGMOID = 3
EXPAND_EXTENSION = "moxie.expand/1"

Error = mirror("error", "u32 struct_size", "i32 code rank", "u32 text_bytes", "ptr text")
Device = mirror("device", "i32 type id")
Dtype = mirror("dtype", "u8 code bits", "u16 lanes")
Tensor = mirror("tensor", "ptr data", "device device", "i32 ndim", "dtype dtype",
                "*i64 shape strides", "u64 byte_offset")
Allocation = mirror("allocation", "u32 struct_size", "i32 kind", "u64 bytes align", "str name")
Traits = mirror("traits", "u32 struct_size layouts id_spaces",
                "i32 no_expert_id weights_applied_by scaling_applied_by output_is_reduced",
                "i32 reduction_group", "u32 formats", "i32 graph", "u32 row_align_bytes reserved0")
Matrix = mirror("matrix", "u32 struct_size", "i32 format order orientation",
                "tensor values scales global_scales bias", "i32 block_offset", "u32 reserved0")
Weights = mirror("weights", "u32 struct_size reserved0", "*matrix w1 w2")
Call = mirror("call", "u32 struct_size", "i32 slot layer", "u32 reserved0", "ptr stream")
Slab = mirror("slab", "u32 struct_size reserved0", "tensor rows scales ids weights")
Rows = mirror("rows", "u32 struct_size", "i32 layout id_space",
              "u32 slabs_count slab_stride reserved0", "*slab slabs", "tensor counts expert_map")
RunnerApi = mirror(
    "runner_api",
    "u32 struct_size reserved0",
    ("create", function("i32", "ptr", "i32", "*weights", "*ptr", "*error")),
    ("run", function("i32", "ptr", "*call", "*rows", "*rows", "*error")),
    ("weights_updated", function("i32", "ptr", "*i32", "u64", "*error")),
    ("destroy", function(None, "ptr")))
RunnerInfo = mirror("runner_info", "u32 struct_size reserved0", "str name device",
                    "*traits traits", "*runner_api api")
Step = mirror("step", "u32 struct_size", "i32 slot", "i64 tokens", "*i64 rank_tokens",
              "i32 padding phase", "*i32 tokens_valid", "i64 capture_row")
Batch = mirror("batch", "u32 struct_size", "i32 slot layer id_space",
               "tensor x ids weights y expert_map", "ptr stream")
DispatcherApi = mirror(
    "dispatcher_api",
    "u32 struct_size reserved0",
    ("create", function("i32", "ptr", "*ptr", "*error")),
    ("begin_forward", function("i32", "ptr", "*step", "*error")),
    ("dispatch", function("i32", "ptr", "*batch", "**rows", "**rows", "*error")),
    ("combine", function("i32", "ptr", "*batch", "*error")),
    ("dispatch_send", function("i32", "ptr", "*batch", "*error")),
    ("dispatch_recv", function("i32", "ptr", "*batch", "**rows", "**rows", "*error")),
    ("combine_send", function("i32", "ptr", "*batch", "*error")),
    ("combine_recv", function("i32", "ptr", "*batch", "*error")),
    ("poll_error", function("i32", "ptr", "*error")),
    ("set_active_ranks", function("i32", "ptr", "*u8", "*error")),
    ("destroy", function(None, "ptr")))
DispatcherInfo = mirror("dispatcher_info", "u32 struct_size reserved0", "str name device",
                        "*traits traits", "*dispatcher_api api")
Host = mirror(
    "host",
    "u32 struct_size abi_version",
    "ptr ctx",
    "str name",
    ("get_i64", function("i32", "ptr", "str", "*i64")),
    ("get_f64", function("i32", "ptr", "str", "*f64")),
    ("get_str", function("i32", "ptr", "str", "ptr", "u64", "*u64")),
    ("allocate", function("i32", "ptr", "*allocation", "*ptr")),
    ("release", function(None, "ptr", "*allocation", "ptr")),
    ("log", function(None, "ptr", "i32", "str", "str", "u64")),
    ("all_gather", function("i32", "ptr", "ptr", "ptr", "u64")),
    ("barrier", function("i32", "ptr")),
    ("register_runner", function("i32", "ptr", "*runner_info")),
    ("register_dispatcher", function("i32", "ptr", "*dispatcher_info")),
    "ptr communicator",
    ("parallel_for", function(None, "ptr", "u64", "ptr", "ptr")),
    ("thread_check", function("i32", "ptr", "i32")),
    ("get_extension", function("ptr", "ptr", "str")))
Probe = mirror(
    "probe",
    "u32 struct_size",
    "i32 score",
    "str name kind device",
    ("reason", ctypes.c_char * 160))
ConfigEntry = mirror("config_entry", "u32 struct_size", "i32 found", "str key type value help")
Reason = mirror("reason", "u32 struct_size", "i32 code", "str name key message")
Report = mirror("report", "u32 struct_size reason_stride", "u64 reasons_count", "*reason reasons",
                "u64 warnings_count", "*reason warnings")
Bounds = mirror("bounds", "u32 struct_size reserved0", "i64 forward_tokens", "str dominant",
                "i64 prefill decode dispatch_required dispatch_tokens allgather_rows",
                "i64 alltoall_rows capture_rows dispatch_call_tokens_max forward_call_tokens_max",
                "i64 physical_experts expert_first experts_local")
Buffer = mirror("buffer", "u32 struct_size", "i32 kind", "str name",
                "u64 bytes bytes_mapped align", "str why")
Plan = mirror("plan", "u32 struct_size buffer_stride", "*bounds bounds", "u64 buffers_count",
              "*buffer buffers", "u64 device_bytes symmetric_bytes pinned_bytes host_bytes")
Build = mirror("build", "u32 struct_size abi_min abi_max reserved0",
               "str version source_id compiler cuda", "u64 layout_digest")
Field = mirror("field", "u32 struct_size offset size reserved0", "str structure field")
Stats = mirror("stats", "u32 struct_size reserved0",
               "u64 forwards rounds dispatches combines tokens rows_sent rows_received",
               "u64 refused peer_failures bytes_allocated")
Captured = mirror("captured", "u32 struct_size", "i32 dp_rank", "tensor ids load")
Api = mirror(
    "api",
    "u32 struct_size abi_version",
    "*build build",
    ("layout", function(None, "**field", "*u64", "*u32")),
    ("get_extension", function("ptr", "str")),
    ("probe", function("i32", "*probe", "u32", "u64", "*u64", "*error")),
    ("open", function("i32", "*host", "*ptr", "*error")),
    ("config", function("i32", "ptr", "u64", "*config_entry")),
    ("validate", function("i32", "ptr", "**report", "*error")),
    ("plan", function("i32", "ptr", "**plan", "*error")),
    ("forward", function("i32", "ptr", "ptr", "*batch", "*error")),
    ("captured", function("i32", "ptr", "*captured", "*error")),
    ("stats", function("i32", "ptr", "*stats", "*error")),
    ("suspend", function("i32", "ptr", "*error")),
    ("resume", function("i32", "ptr", "*error")),
    ("close", function("i32", "ptr", "*error")))
Request = mirror("request", "u32 struct_size abi_min abi_max reserved0", "str host_build")
Routing = mirror("routing", "u32 struct_size", "i32 scoring renormalize groups groups_top",
                 "u32 reserved0", "f64 renormalize_epsilon scaling_factor",
                 "tensor correction_bias")
RoutingApi = mirror(
    "routing_api",
    "u32 struct_size reserved0",
    ("route", function("i32", "*routing", "*tensor", "*tensor", "*tensor", "ptr", "*error")))
ExpandApi = mirror(
    "expand_api",
    "u32 struct_size reserved0",
    ("expand", function("i32", "ptr", "*call", "*rows", "*rows", "*tensor", "*error")),
    ("fold", function("i32", "ptr", "*call", "*rows", "*tensor", "*rows", "*error")))
# ---- end of what is generated ----

ABI_VERSION = VERSION_MAJOR << 16 | VERSION_MINOR
VERSION = f"{VERSION_MAJOR}.{VERSION_MINOR}.{VERSION_PATCH}"

# ---- Errors and layout -------------------------------------------------------------------------


CODES = {value: name for name, value in list(globals().items()) if name.startswith("E_")}


class MoxieError(Exception):
    """A call that failed: its code, the rank to blame or -1, the library's text, and the keys of
    the configuration that it speaks of, where they are known."""

    def __init__(self, code, rank, text, keys=()):
        super().__init__(f"{text} ({CODES.get(code, code)})")
        self.code, self.rank, self.text, self.keys = code, rank, text, tuple(keys)

    def __reduce__(self):  # else a copy, or a process pool, would make it of the text alone
        return type(self), (self.code, self.rank, self.text, self.keys)


# As `signal` has them: their handlers in C and their flags, which it puts its own in the place of.
_SIGNALS = sorted(signal.valid_signals())
_sigaction = ctypes.CDLL(None).sigaction
_SIGACTION_BYTES = 256  # more than glibc's have


def _handle(came):
    frame = sys._getframe()
    with contextlib.ExitStack() as stack:  # all of them, whatever one raises
        for number, handler in reversed(came.items()):
            stack.callback(handler, number, frame)


def _put_off(number, handler, came, stack):
    """Until the stack ends a signal is only noted, and then all is as it was."""
    before = ctypes.create_string_buffer(_SIGACTION_BYTES)
    _sigaction(number, None, before)
    stack.callback(_sigaction, number, before, None)
    stack.callback(signal.signal, number, handler)
    signal.signal(number, lambda *_: came.setdefault(number, handler))


@contextlib.contextmanager
def signals_wait():
    """Handlers of signals run behind it. What they raise, as Ctrl-C does, would end whichever
    callback comes next: ctypes prints that, and what the library then has for an answer is any
    number, so that it would go on with another configuration. They are called, because a signal
    raised anew would be told again to who hears of it by set_wakeup_fd, as asyncio does."""
    came = {}
    with contextlib.ExitStack() as stack:
        stack.callback(_handle, came)
        if threading.current_thread() is threading.main_thread():  # handlers run in no other
            for number in _SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    _put_off(number, handler, came, stack)
        yield


def ask(call, *arguments):
    """Calls a slot whose last parameter is moxie_error *, and which asks the host for nothing;
    raises MoxieError when it fails."""
    text = ctypes.create_string_buffer(2048)
    error = Error(rank=-1, text_bytes=len(text), text=ctypes.addressof(text))
    code = call(*arguments, ctypes.byref(error))
    if code != OK:
        raise MoxieError(code, error.rank, text.value.decode(errors="replace"))


def check(call, *arguments):
    """The same of any slot: signals are handled when it has returned."""
    with signals_wait():
        ask(call, *arguments)


def entries(pointer, count, stride):
    """The entries of an array that the library walks by its own stride."""
    if count == 0 or not pointer:
        return
    address = ctypes.cast(pointer, ctypes.c_void_p).value
    for index in range(count):
        yield type(pointer.contents).from_address(address + index * stride)


def table_fault(table, last):
    """What is wrong with a table that a library hands out, in words that follow its name, or None.

    table: a pointer to it. last: the last field of its first published version. A slot that is
    within the table is never NULL.
    """
    if not table:
        return "is NULL"
    kind = type(table.contents)
    bytes_seen, bytes_wanted = table.contents.struct_size, _end(kind, last)
    if bytes_seen < bytes_wanted:
        return f"has {bytes_seen} bytes, at least {bytes_wanted} are wanted"
    held = ctypes.string_at(table, min(bytes_seen, ctypes.sizeof(kind)))
    for field, *_ in kind._fields_[2:]:  # behind two numbers there are only pointers
        at = getattr(kind, field).offset
        if _end(kind, field) <= len(held) and not any(held[at:_end(kind, field)]):
            return f"has NULL for {field}"
    return None


def _end(kind, field):
    place = getattr(kind, field)
    return place.offset + place.size


def layout_mismatches(report, structs=None):
    """Fields that lie elsewhere here than in `report`, a list of (structure, field, offset, size).

    The library may be older or newer by appended fields, so that whole structs may differ in size,
    and need not report every struct.
    """
    structs = MIRROR if structs is None else structs
    there = {(structure, field): (offset, size) for structure, field, offset, size in report}
    reported = {structure for structure, _ in there}
    found = []
    for structure, mirrored in structs.items():
        if structure not in reported:
            continue
        whole = there.get((structure, ""), (0, 0))[1]
        for field, *_ in mirrored._fields_:
            here = getattr(mirrored, field)
            seen = there.get((structure, field))
            if seen is None and here.offset >= whole > 0:
                continue
            if seen != (here.offset, here.size):
                found.append(f"{structure}.{field}: {here.offset}, {here.size} here, {seen} there")
    return found
