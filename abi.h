// Moxie: Mixture-of-Experts runners and token dispatchers behind one C ABI.
//
// One shared object, libmoxie.so, exports one symbol: moxie_get_api_v1. An engine loads it, hands
// it callbacks for configuration, memory, log and bootstrap, and gets tables of functions back.
// This header reads top to bottom as the life of a host:
//
//   load -> probe -> open -> validate -> plan -> create -> step, step, step -> close
//
// Per-step calls allocate nothing, never wait for the device on the host (transport nccl may), and,
// where tagged capturable, launch the same operations every time, so that a CUDA graph of them can
// be replayed. Calls that launch need the CUDA device current that was at the first create. A call
// with bad input returns a code, having written nothing but NULL to out pointers. The library never
// prints, traps, exits or takes over 64 KiB of stack. Parameters are named where types say little.
//
// Rules of growth. Every struct but moxie_tensor starts with struct_size, set by whoever fills it
// to the size it was compiled with. Structs and tables grow at the end only. A reader takes any
// size from the first published one to 4096 bytes; a non-zero byte past what it knows is
// MOXIE_E_UNSUPPORTED, with the offset. Zero in a field means the documented default. Fields named
// reserved must be 0. Version 0.N: a change to an existing field, slot or meaning bumps N; unequal
// N refuse each other, and appends keep N. Versions: 0.1 first published, 0.1.1 appended to it.
//
// The comment of every slot closes with its tags, [thread, order, graph; owner; since]:
//   any         any thread, at any time   stream  enqueued on the given stream
//   serial      one call at a time per instance   init  may allocate; never beside a serial call
//   collective  every active rank makes the same call in the same order
//   capturable, eager   may, may not be captured into a CUDA graph
//   owner: who frees what the call hands out, and how; since: the version that added the slot

#ifndef MOXIE_ABI_H
#define MOXIE_ABI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MOXIE_VERSION_MAJOR 0
#define MOXIE_VERSION_MINOR 1
#define MOXIE_VERSION_PATCH 1
#define MOXIE_ABI(major, minor) (((uint32_t)(major) << 16) | (uint32_t)(minor))
#define MOXIE_ABI_VERSION MOXIE_ABI(MOXIE_VERSION_MAJOR, MOXIE_VERSION_MINOR)
#define MOXIE_RANKS_MAX 64  // ep_size
#define MOXIE_TOP_K_MAX 32
#define MOXIE_SLOTS_MAX 4   // forwards in flight

// ---- Status ------------------------------------------------------------------------------------
// Every fallible call returns one of these. Values are never reused.
#define MOXIE_OK 0
#define MOXIE_E_INVALID 1              // an argument breaks the contract; the text names it
#define MOXIE_E_UNSUPPORTED 2          // never works here: no such kernel, layout, extension, field
#define MOXIE_E_UNAVAILABLE 3          // would work, but not now or not on this machine
#define MOXIE_E_VERSION 4              // no common ABI version
#define MOXIE_E_CONFIG 5               // configuration refused; validate() lists every reason
#define MOXIE_E_CAPACITY 6             // more tokens than the plan holds; nothing was written
#define MOXIE_E_CAPTURING 7            // cannot be captured; the stream was not touched
#define MOXIE_E_COLLECTIVE_MISMATCH 8  // ranks differ in ABI, build, configuration or rows
#define MOXIE_E_TIMEOUT 9              // a bounded wait ended; no rank could be blamed
#define MOXIE_E_PEER 10                // a rank went silent, or moved on without this one
#define MOXIE_E_MEMORY 11              // an allocation failed; nothing is held
#define MOXIE_E_DEVICE 12              // the device or the operating system reported an error
#define MOXIE_E_INTERNAL 13            // our mistake; please report the text

// Where a failing call explains itself. May be NULL wherever a call takes one.
typedef struct moxie_error {
    uint32_t struct_size;
    int32_t code;         // the returned code
    int32_t rank;         // the rank to blame, where a collective failed; else -1
    uint32_t text_bytes;  // capacity of text
    char *text;           // the caller's, always NUL-terminated: what was seen, wanted, to change
} moxie_error;

// ---- Tensors and formats -----------------------------------------------------------------------
// Exactly DLPack's DLDevice, DLDataType and DLTensor, frozen for ever: a DLPack pointer passes as
// it is. shape and strides are [ndim], in elements; strides NULL means compact row-major. data NULL
// means "no tensor" wherever one is optional ("or none" below). Packed 4-bit values are uint8 with
// half the columns, the even element in the low nibble; e8m0 is uint8, and e4m3 may be.
#define MOXIE_DEVICE_CPU 1
#define MOXIE_DEVICE_CUDA 2
#define MOXIE_DTYPE_INT 0
#define MOXIE_DTYPE_UINT 1
#define MOXIE_DTYPE_FLOAT 2
#define MOXIE_DTYPE_BFLOAT 4
#define MOXIE_DTYPE_FLOAT8_E4M3FN 10

typedef struct moxie_device {
    int32_t type, id;  // type: MOXIE_DEVICE_*; id: a GPU's CUDA ordinal, ignored for a CPU
} moxie_device;

typedef struct moxie_dtype {
    uint8_t code, bits;  // code: MOXIE_DTYPE_*
    uint16_t lanes;
} moxie_dtype;

typedef struct moxie_tensor {
    void *data;
    moxie_device device;
    int32_t ndim;
    moxie_dtype dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} moxie_tensor;

// Number formats of weights, activations and wire rows.
#define MOXIE_FORMAT_AUTO 0
#define MOXIE_FORMAT_F32 1
#define MOXIE_FORMAT_BF16 2
#define MOXIE_FORMAT_F16 3
#define MOXIE_FORMAT_FP8_TENSOR 4    // e4m3; scale f32 [E], or [E, 2] for gate then up
#define MOXIE_FORMAT_FP8_CHANNEL 5   // e4m3; scale f32 [E, N]
#define MOXIE_FORMAT_FP8_BLOCK128 6  // e4m3; weights: f32 per 128 x 128, rows: f32 per 1 x 128
#define MOXIE_FORMAT_INT4_G32 7      // nibble - 8; scale f32, bf16 or f16 per 32 of K
#define MOXIE_FORMAT_MXFP4 8         // e2m1; scale e8m0 per 32 of K
#define MOXIE_FORMAT_NVFP4 9         // e2m1; scale e4m3 per 16 of K, and f32 per tensor
#define MOXIE_FORMAT_FP8 10          // activations only: e4m3, scaled per 1 x 128

// ---- The host's side ---------------------------------------------------------------------------
#define MOXIE_MEMORY_DEVICE 1     // the runner's own memory; plain RAM when `device` is cpu
#define MOXIE_MEMORY_SYMMETRIC 2  // visible to peers; always made by the plugin
#define MOXIE_MEMORY_PINNED 3     // host, page-locked; the device writes to it at the same address
#define MOXIE_MEMORY_HOST 4

// One planned allocation, as the plugin asks the host's allocator for it.
typedef struct moxie_allocation {
    uint32_t struct_size;
    int32_t kind;           // MOXIE_MEMORY_DEVICE, _PINNED or _HOST
    uint64_t bytes, align;  // > 0; a power of two
    const char *name;       // the buffer's name in the plan
} moxie_allocation;

#define MOXIE_CONFIG_FOUND 0
#define MOXIE_CONFIG_ABSENT 1
#define MOXIE_CONFIG_WRONG_TYPE 2
#define MOXIE_LOG_DEBUG 0
#define MOXIE_LOG_INFO 1
#define MOXIE_LOG_WARNING 2
#define MOXIE_LOG_ERROR 3
#define MOXIE_LOG_HOST_MISBEHAVING 4    // the host broke the contract
#define MOXIE_LOG_PLUGIN_MISBEHAVING 5  // the plugin did

#define MOXIE_THREAD_INIT 1  // what thread_check is asked about: the tag of the slot being entered
#define MOXIE_THREAD_INSTANCE_SERIAL 2

typedef struct moxie_runner_info moxie_runner_info;
typedef struct moxie_dispatcher_info moxie_dispatcher_info;

// What an engine offers. Copied by open(); ctx and the functions must stay valid until close().
// Callbacks return: no exception, longjmp or cancellation leaves one. Required: the config getters,
// register_runner, register_dispatcher; all_gather, barrier when ep_size > 1. Others may be NULL.
typedef struct moxie_host {
    uint32_t struct_size;
    uint32_t abi_version;  // the version agreed in moxie_get_api_v1
    void *ctx;             // passed to every callback
    const char *name;      // "my-engine 1.2"; copied

    // Configuration: `key` is one of docs/configuration.md. Return MOXIE_CONFIG_*; on FOUND write
    // *value. A key of another type is WRONG_TYPE, never converted. [init, eager; host; 0.1]
    int32_t (*get_i64)(void *ctx, const char *key, int64_t *value);
    // As get_i64; an integer value counts as found. [init, eager; host; 0.1]
    int32_t (*get_f64)(void *ctx, const char *key, double *value);
    // Writes up to capacity - 1 bytes and a NUL, and the full length without the NUL to *length.
    // [init, eager; host; 0.1]
    int32_t (*get_str)(void *ctx, const char *key, char *text, uint64_t capacity, uint64_t *length);
    // Both or neither. Every planned buffer but the symmetric ones comes from here. Returns 0 and
    // *memory, or non-zero: the plugin fails with MOXIE_E_MEMORY. [init, eager; plugin; 0.1]
    int32_t (*allocate)(void *ctx, const moxie_allocation *request, void **memory);
    // `request` equals the one that made `memory`. [init, eager; host; 0.1]
    void (*release)(void *ctx, const moxie_allocation *request, void *memory);
    // One line without newline, valid during the call; from open() on. [any, eager; plugin; 0.1]
    void (*log)(void *ctx, int32_t severity, const char *component, const char *text,
                uint64_t length);

    // Bootstrap between the EP ranks, used while creating. all_gather sends `bytes` from every
    // rank; `recv` gets ep_size * bytes, in rank order. Both return 0, or non-zero when a rank
    // cannot be reached; they must not wait for ever. [init, collective, eager; plugin; 0.1]
    int32_t (*all_gather)(void *ctx, const void *send, void *recv, uint64_t bytes);
    // Returns once every rank has called. Reserved: unused. [init, collective, eager; host; 0.1]
    int32_t (*barrier)(void *ctx);

    // Hands over what this build offers, during open(). A non-zero answer fails open(). The tables
    // live as long as the library. [init, eager; plugin; 0.1]
    int32_t (*register_runner)(void *ctx, const moxie_runner_info *);
    // As register_runner. [init, eager; plugin; 0.1]
    int32_t (*register_dispatcher)(void *ctx, const moxie_dispatcher_info *);

    void *communicator;  // reserved: an ncclComm_t over the EP ranks, or NULL; not used yet
    // Runs task(arg, 0..tasks-1), in any order and on any threads, until all are done; at most
    // cpu_threads tasks. NULL: the plugin has so many threads. [serial, eager; plugin; 0.1]
    void (*parallel_for)(void *ctx, uint64_t tasks, void (*task)(void *arg, uint64_t i), void *arg);
    // Non-zero if the calling thread may enter a slot with this tag (MOXIE_THREAD_*). On zero the
    // call only returns MOXIE_E_INVALID and logs HOST_MISBEHAVING. [any, eager; host; 0.1]
    int32_t (*thread_check)(void *ctx, int32_t tag);
    // The host's extension ("vendor.name/1"), or NULL. Not asked yet. [any, eager; host; 0.1]
    const void *(*get_extension)(void *ctx, const char *name);
} moxie_host;

// ---- What runs where ---------------------------------------------------------------------------
// Receive layouts: what a dispatcher hands to a runner. H hidden, k top_k. Rows from a count on
// have no expert, whatever their ids say; STANDARD has counts int32 [1], or none: all are valid.
#define MOXIE_LAYOUT_STANDARD 1           // one slab [tokens, H] with ids and weights [tokens, k]
#define MOXIE_LAYOUT_RANK_MAJOR 2         // a slab [cap, H] per source rank, counts int32 [ranks]
#define MOXIE_LAYOUT_EXPERT_CONTIGUOUS 3  // one slab [rows, H], prefix sums int32 [experts + 1]
#define MOXIE_LAYOUT_EXPERT_MASKED 4      // one slab [experts, cap, H], counts int32 [experts]
#define MOXIE_LAYOUT_BIT(layout) (1u << (layout))

// What an expert id means. Every id outside the space is "no expert": skipped, contributing zero.
#define MOXIE_IDS_GLOBAL 1    // logical experts; without an expert_map, the physical one of that id
#define MOXIE_IDS_PHYSICAL 2  // 0..physical_experts-1: logical, then redundant, then shared
#define MOXIE_IDS_LOCAL 3     // 0..experts_local-1 of this rank

#define MOXIE_BY_NOBODY 0
#define MOXIE_BY_HOST 1
#define MOXIE_BY_RUNNER 2
#define MOXIE_BY_DISPATCHER 3
#define MOXIE_GRAPH_EAGER_ONLY 0
#define MOXIE_GRAPH_CAPTURABLE 1

// What a side produces (dispatcher) or accepts (runner). validate() matches the two.
typedef struct moxie_traits {
    uint32_t struct_size;
    uint32_t layouts, id_spaces;  // sets of MOXIE_LAYOUT_BIT(), of 1u << MOXIE_IDS_*
    int32_t no_expert_id;         // written for "no expert"; a runner accepts any id out of range
    // MOXIE_BY_*: who multiplies by the router weights, and who by the key routed_scaling_factor.
    int32_t weights_applied_by, scaling_applied_by;
    int32_t output_is_reduced;    // 1: y is complete on its rank; 0: the host sums over the group
    int32_t reduction_group;      // ranks that were, or are to be, summed over; 0: all tp_size
    uint32_t formats;             // set of 1u << MOXIE_FORMAT_*, of the rows
    int32_t graph;                // MOXIE_GRAPH_*
    uint32_t row_align_bytes, reserved0;  // alignment of every row
} moxie_traits;

// ---- Probe -------------------------------------------------------------------------------------
// How well one registered backend would run on this machine.
typedef struct moxie_probe {
    uint32_t struct_size;
    int32_t score;            // 0: cannot run; higher is better
    const char *name, *kind;  // "moxie_cpu", "alltoall"; "runner" or "dispatcher"
    const char *device;       // "cpu", "sm_90"
    char reason[160];         // always filled
} moxie_probe;

// ---- Configuration, verdict, plan --------------------------------------------------------------
// One key of the snapshot that open() took, after resolving `auto`.
typedef struct moxie_config_entry {
    uint32_t struct_size;
    int32_t found;           // 1: the host set it, 0: the default
    const char *key, *type;  // type: "i64", "f64" or "str"
    const char *value;       // printed; what `auto` became
    const char *help;        // one line
} moxie_config_entry;

typedef struct moxie_reason {
    uint32_t struct_size;
    int32_t code;         // MOXIE_E_*; MOXIE_OK for a warning
    const char *name;     // the code in words: "CONFIG", "UNSUPPORTED", "CAPACITY", "WARNING"
    const char *key;      // the configuration key to change
    const char *message;  // the values seen, and what to set instead
} moxie_reason;

// Everything that cannot work, at once. Owned by the instance.
typedef struct moxie_report {
    uint32_t struct_size, reason_stride;  // stride: bytes between two entries, here and below
    uint64_t reasons_count;  // 0: accepted
    const moxie_reason *reasons;
    uint64_t warnings_count;
    const moxie_reason *warnings;
} moxie_report;

// Tokens and rows, all 64-bit, all worst case. -1: not computable from a refused configuration.
typedef struct moxie_bounds {
    uint32_t struct_size, reserved0;
    int64_t forward_tokens;                      // one DP rank, one forward
    const char *dominant;                        // the key that forward_tokens came from
    int64_t prefill, decode;                     // the two bounds it is the maximum of
    int64_t dispatch_required, dispatch_tokens;  // tokens per source rank: one forward, one round
    int64_t allgather_rows, alltoall_rows;       // rows one rank may receive
    int64_t capture_rows;                        // of the routed-experts capture, without padding
    int64_t dispatch_call_tokens_max, forward_call_tokens_max;  // this rank's tokens in one call
    int64_t physical_experts, expert_first, experts_local;  // total; this rank's first and count
} moxie_bounds;

typedef struct moxie_buffer {
    uint32_t struct_size;
    int32_t kind;                  // MOXIE_MEMORY_*
    const char *name;
    uint64_t bytes, bytes_mapped;  // requested; taken, rounded up to the granules of its kind
    uint64_t align;
    const char *why;               // one line
} moxie_buffer;

typedef struct moxie_plan {  // owned by the instance
    uint32_t struct_size, buffer_stride;
    const moxie_bounds *bounds;
    uint64_t buffers_count;  // 0 when the configuration is refused
    const moxie_buffer *buffers;
    uint64_t device_bytes, symmetric_bytes, pinned_bytes, host_bytes;  // sums of bytes_mapped
} moxie_plan;

// ---- Weights -----------------------------------------------------------------------------------
#define MOXIE_ORDER_PLAIN 0        // w2, or a w1 without a gate
#define MOXIE_ORDER_GATE_UP 1      // rows 0..I-1 gate, I..2I-1 up
#define MOXIE_ORDER_UP_GATE 2
#define MOXIE_ORDER_INTERLEAVED 3  // row 2i gate, row 2i+1 up
#define MOXIE_ROWS_OUT 0  // values [E, N, K]: a row per output feature
#define MOXIE_ROWS_IN 1   // values [E, K, N]: a row per input feature; f32, bf16 and f16 only

// One projection of every expert this rank owns: N outputs, K inputs. w1: N = 2I (I without a
// gate), K = H; w2: N = H, K = I. Scales by format: fp8_tensor [E] or [E, 2]; fp8_channel [E, N];
// fp8_block128 [E, rows, ceil(K/128)], rows = ceil(N/128), of a gated w1 ceil(I/128) for each half,
// I counted with block_offset (w1 rows, w2 K); int4_g32, mxfp4 [E, N, K/32]; nvfp4 [E, N, K/16].
// Halves of interleaved rows: gate, then up. The last dimension is compact; others may be strided.
typedef struct moxie_matrix {
    uint32_t struct_size;
    int32_t format, order, orientation;  // MOXIE_FORMAT_*, MOXIE_ORDER_*, MOXIE_ROWS_*
    moxie_tensor values, scales;
    moxie_tensor global_scales;  // nvfp4: f32 [E], or [E, 2] for gate then up
    moxie_tensor bias;           // f32, bf16 or f16 [E, N] in the order of the rows, or none
    int32_t block_offset;  // fp8_block128: units of block 0 that another shard owns; on a GPU 0
    uint32_t reserved0;
} moxie_matrix;

// Their data is borrowed until the runner is destroyed; structs and shapes are copied.
typedef struct moxie_weights {
    uint32_t struct_size, reserved0;
    const moxie_matrix *w1, *w2;  // gate and up; down
} moxie_weights;

// ---- A step ------------------------------------------------------------------------------------
#define MOXIE_PADDING_NONE 0     // as SUM_LEN
#define MOXIE_PADDING_MAX_LEN 1  // allgather: every rank moves as many rows as the fullest
#define MOXIE_PADDING_SUM_LEN 2  // every rank moves its own rows
#define MOXIE_PHASE_MIXED 0
#define MOXIE_PHASE_PREFILL 1
#define MOXIE_PHASE_DECODE 2
#define MOXIE_PHASE_IDLE 3

// What is about to run in all layers of one forward. Ranks agree on all but the local fields.
typedef struct moxie_step {
    uint32_t struct_size;
    int32_t slot;                // 0..forwards_in_flight_max-1; the host keeps its calls in order
    int64_t tokens;              // local: this rank's tokens, 0 is a normal call
    const int64_t *rank_tokens;  // [ep_size], unread by local; NULL: launches of the plan's size
    int32_t padding, phase;      // MOXIE_PADDING_*, MOXIE_PHASE_* (a hint, without effect so far)
    // Local, device memory: rows from *tokens_valid on are "no expert"; NULL: all are valid.
    // Re-read by every launch and every graph replay.
    const int32_t *tokens_valid;
    // Local: this step's first row among its DP rank's captured rows: tokens of that one's earlier
    int64_t capture_row;  // ranks are added to it. Dispatcher local: among all captured rows
} moxie_step;

// One layer of this rank. T: the step's tokens (0: data may be NULL). On `device`, rows compact.
typedef struct moxie_batch {
    uint32_t struct_size;
    int32_t slot, layer;      // layer: 0..num_layers-1, where captured ids go, whoever runs
    int32_t id_space;         // MOXIE_IDS_*, required: of ids, or of what expert_map makes of them
    moxie_tensor x;           // [T, H] input_format
    moxie_tensor ids;         // [T, k] int32 or int64
    moxie_tensor weights;     // [T, k] f32, bf16 or f16
    moxie_tensor y;           // [T, H] output_format; apart from x, in rounds from every input
    moxie_tensor expert_map;  // int32 [n]: what ids 0..n-1 stand for, others: no expert; or none
    void *stream;             // cudaStream_t; NULL on the CPU, where every call returns when done
} moxie_batch;

// Rows of one source. Every tensor's last dimension is compact; fp8 scales may lie in columns.
typedef struct moxie_slab {
    uint32_t struct_size, reserved0;
    moxie_tensor rows;     // [cap, H]; EXPERT_MASKED: [experts, cap, H] in one run, weights too
    moxie_tensor scales;   // fp8: f32 per 128 columns; nvfp4: bytes, an f32 a row, e4m3 per 16
    moxie_tensor ids;      // [cap, k]; none in EXPERT_ layouts
    moxie_tensor weights;  // [cap, k]; in EXPERT_ layouts [cap] ([experts, cap]), or none: weight 1
} moxie_slab;

// What a dispatcher received, or where a runner writes its result: the same slabs, the same order.
typedef struct moxie_rows {
    uint32_t struct_size;
    int32_t layout, id_space;           // MOXIE_LAYOUT_*, MOXIE_IDS_*
    uint32_t slabs_count, slab_stride, reserved0;  // stride: bytes between two slabs
    const moxie_slab *slabs;
    moxie_tensor counts;      // by layout; device memory. GPUs leave out MASKED rows past the plan
    moxie_tensor expert_map;  // as moxie_batch's
} moxie_rows;

typedef struct moxie_call {
    uint32_t struct_size;
    int32_t slot, layer;
    uint32_t reserved0;
    void *stream;
} moxie_call;

// ---- Runner ------------------------------------------------------------------------------------
typedef struct moxie_instance moxie_instance;
typedef struct moxie_runner moxie_runner;
typedef struct moxie_dispatcher moxie_dispatcher;

// The experts of one layer, with one out row for each in row: the weighted sum over this rank's
// experts in STANDARD and RANK_MAJOR, the weighted result of the row's expert in EXPERT_ layouts.
typedef struct moxie_runner_api {
    uint32_t struct_size, reserved0;
    // Checks and borrows the weights; load counts as `layer`'s. [init, eager; caller, destroy; 0.1]
    int32_t (*create)(moxie_instance *, int32_t layer, const moxie_weights *, moxie_runner **out,
                      moxie_error *);
    // Computes `in` into `out`, which may lie over it. [serial, stream, capturable; caller; 0.1]
    int32_t (*run)(moxie_runner *, const moxie_call *, const moxie_rows *in, const moxie_rows *out,
                   moxie_error *);
    // The host rewrote these local experts in place (NULL, 0: all). [serial, eager; caller; 0.1]
    int32_t (*weights_updated)(moxie_runner *, const int32_t *ids, uint64_t count, moxie_error *);
    // NULL is a no-op. Waits for what was launched. [init, eager; plugin; 0.1]
    void (*destroy)(moxie_runner *);
} moxie_runner_api;

struct moxie_runner_info {
    uint32_t struct_size, reserved0;
    const char *name, *device;  // "moxie_cpu" on "cpu", "sm_90"; the keys say which to create
    const moxie_traits *traits;
    const moxie_runner_api *api;
};

// ---- Dispatcher --------------------------------------------------------------------------------
// Moves rows to the ranks that own their experts, and back. Per slot: begin, then for each layer
// dispatch, run (of any runner: y is undefined without), combine of the same batch; else INVALID.
// After PEER, TIMEOUT, COLLECTIVE_MISMATCH y is zero, and calls fail so until set_active_ranks.
typedef struct moxie_dispatcher_api {
    uint32_t struct_size, reserved0;
    // Maps windows; build and keys must agree. [init, collective, eager; caller, destroy; 0.1]
    int32_t (*create)(moxie_instance *, moxie_dispatcher **out, moxie_error *);
    // Says how many tokens the slot's next layers have; refuses what exceeds the plan. Not needed
    // for a graph replay. [serial, collective, eager; caller; 0.1]
    int32_t (*begin_forward)(moxie_dispatcher *, const moxie_step *, moxie_error *);
    // dispatch_send then dispatch_recv. *in and *out belong to the dispatcher and hold until
    // combine: hand both to run() as is. [serial, collective, stream, capturable; plugin; 0.1]
    int32_t (*dispatch)(moxie_dispatcher *, const moxie_batch *, const moxie_rows **in,
                        const moxie_rows **out, moxie_error *);
    // combine_send then combine_recv: y is complete when traits.output_is_reduced.
    // [serial, collective, stream, capturable; caller; 0.1]
    int32_t (*combine)(moxie_dispatcher *, const moxie_batch *, moxie_error *);
    // The halves, for hosts that put work between them. This one pushes rows and flags, and waits
    // for nobody. [serial, collective, stream, capturable; caller; 0.1]
    int32_t (*dispatch_send)(moxie_dispatcher *, const moxie_batch *, moxie_error *);
    // Waits for every active rank's rows. [serial, collective, stream, capturable; plugin; 0.1]
    int32_t (*dispatch_recv)(moxie_dispatcher *, const moxie_batch *, const moxie_rows **in,
                             const moxie_rows **out, moxie_error *);
    // Pushes results and flags. [serial, collective, stream, capturable; caller; 0.1]
    int32_t (*combine_send)(moxie_dispatcher *, const moxie_batch *, moxie_error *);
    // Waits, sums over ranks in rank order. [serial, collective, stream, capturable; caller; 0.1]
    int32_t (*combine_recv)(moxie_dispatcher *, const moxie_batch *, moxie_error *);
    // The sticky failure of past work, or MOXIE_OK; waits for no peer. [any, eager; caller; 0.1]
    int32_t (*poll_error)(moxie_dispatcher *, moxie_error *);
    // On drained streams: clears the failure, and goes on without the ranks whose byte in
    // active[ep_size] is 0. Survivors pass one mask; dead ranks' experts contribute zero; a rank
    // left out gets MOXIE_E_PEER, returns only by create. [serial, collective, eager; caller; 0.1]
    int32_t (*set_active_ranks)(moxie_dispatcher *, const uint8_t *active, moxie_error *);
    // NULL is a no-op. Waits for no peer; on a GPU, timeout_ms at most. [init, eager; plugin; 0.1]
    void (*destroy)(moxie_dispatcher *);
} moxie_dispatcher_api;

struct moxie_dispatcher_info {
    uint32_t struct_size, reserved0;
    const char *name, *device;  // "local", "allgather", "alltoall" on a device as above
    const moxie_traits *traits;
    const moxie_dispatcher_api *api;
};

// ---- The plugin's side -------------------------------------------------------------------------
// Who made this library. Lives as long as it does.
typedef struct moxie_build {
    uint32_t struct_size, abi_min, abi_max, reserved0;  // the range this library can speak
    const char *version;         // "0.1.0"
    const char *source_id;       // the commit it was built from, or "unknown"
    const char *compiler, *cuda; // cuda: the toolkit's version, or "none"
    uint64_t layout_digest;      // 64-bit FNV-1a of the rows of layout(), as docs/conform.md says
} moxie_build;

// One field of a public struct as this library was compiled, for mirrors in other languages.
typedef struct moxie_field {
    uint32_t struct_size, offset, size, reserved0;
    const char *structure, *field;  // "moxie_host", "ctx"; field "" gives the size of the whole
} moxie_field;

typedef struct moxie_stats {
    uint32_t struct_size, reserved0;
    uint64_t forwards, rounds;          // forward() calls, and rounds they took
    uint64_t dispatches, combines;
    uint64_t tokens;                    // rows of x that entered
    uint64_t rows_sent, rows_received;  // between ranks
    uint64_t refused, peer_failures;    // refused: calls that returned MOXIE_E_CAPACITY
    uint64_t bytes_allocated;           // planned memory held now, symmetric included
} moxie_stats;

// Device memory, or none: ids live as the dispatcher, load (hosts, create may zero it) as runners.
typedef struct moxie_captured {
    uint32_t struct_size;
    int32_t dp_rank;   // in: whose ids; unless local, none where other ranks have the tokens
    moxie_tensor ids;  // out: int32 physical [rows >= forward_tokens, num_layers, k], -1: no expert
    moxie_tensor load;  // out: int64 [num_layers, experts_local] rows run, or none [since 0.1.1]
} moxie_captured;

typedef struct moxie_api {
    uint32_t struct_size;
    uint32_t abi_version;  // the agreed version
    const moxie_build *build;

    // Points *fields at `*count` rows, `*stride` bytes apart. [any, eager; plugin; 0.1]
    void (*layout)(const moxie_field **fields, uint64_t *count, uint32_t *stride);
    // An extension's table ("moxie.routing/1"), or NULL. [any, eager; plugin; 0.1]
    const void *(*get_extension)(const char *name);
    // Fills up to `capacity` entries, `stride` bytes apart, each with its struct_size set by the
    // caller; *count is how many there are. May start the GPU's driver. [any, eager; caller; 0.1]
    int32_t (*probe)(moxie_probe *entries, uint32_t stride, uint64_t capacity, uint64_t *count,
                     moxie_error *);

    // Reads the configuration once, registers runners and dispatchers. A configuration that cannot
    // work still opens, so that validate can say why. [init, eager; caller, close; 0.1]
    int32_t (*open)(const moxie_host *, moxie_instance **out, moxie_error *);
    // Entry `index` of the snapshot, valid until close; INVALID past it. [any, eager; plugin; 0.1]
    int32_t (*config)(const moxie_instance *, uint64_t index, moxie_config_entry *);
    // Every reason that no refused key hides; no device, no weights. [any, eager; plugin; 0.1]
    int32_t (*validate)(const moxie_instance *, const moxie_report **, moxie_error *);
    // Every buffer; no device. If refused, E_CONFIG and bounds only. [any, eager; plugin; 0.1]
    int32_t (*plan)(const moxie_instance *, const moxie_plan **, moxie_error *);

    // dispatch, run and combine of one layer in as many rounds as the step needs; both handles must
    // be of this library and one instance. [serial, collective, stream, capturable; caller; 0.1]
    int32_t (*forward)(moxie_dispatcher *, moxie_runner *, const moxie_batch *, moxie_error *);
    // UNAVAILABLE without capture_routed_experts or count_expert_load. [serial, eager; plugin; 0.1]
    int32_t (*captured)(const moxie_instance *, moxie_captured *, moxie_error *);
    // Counters since open. [serial, eager; caller; 0.1]
    int32_t (*stats)(const moxie_instance *, moxie_stats *, moxie_error *);
    // Frees device memory but keeps its addresses; or UNSUPPORTED. [init, eager; caller; 0.1]
    int32_t (*suspend)(moxie_instance *, moxie_error *);
    // Takes that memory again; or UNSUPPORTED. [init, eager; caller; 0.1]
    int32_t (*resume)(moxie_instance *, moxie_error *);
    // MOXIE_E_INVALID while a runner or dispatcher of the instance lives; joins every thread.
    // NULL is a no-op. [init, eager; plugin; 0.1]
    int32_t (*close)(moxie_instance *, moxie_error *);
} moxie_api;

// ---- Entry -------------------------------------------------------------------------------------
typedef struct moxie_request {
    uint32_t struct_size, abi_min, abi_max, reserved0;  // the range the host can speak
    const char *host_build;  // for the refusal's text: "my-engine 1.2 (abc123)"
} moxie_request;

// The one exported symbol. Picks the highest common version, or answers MOXIE_E_VERSION with both
// ranges and both builds. Pure, repeatable. *api lives with the library. [any, eager; plugin; 0.1]
#if defined(__GNUC__)
__attribute__((visibility("default")))
#endif
int32_t moxie_get_api_v1(const moxie_request *, const moxie_api **, moxie_error *);
typedef int32_t (*moxie_get_api_v1_fn)(const moxie_request *, const moxie_api **, moxie_error *);

// ---- Extension moxie.routing/1: from router logits to ids and weights --------------------------
#define MOXIE_ROUTING_EXTENSION "moxie.routing/1"
#define MOXIE_SCORING_SOFTMAX 1        // softmax over all experts, then the top k
#define MOXIE_SCORING_TOP_K_SOFTMAX 2  // the top k logits, softmax over those
#define MOXIE_SCORING_SIGMOID 3        // sigmoid of the logits, then the top k

// With more than one group, the best groups_top of `groups` equal groups of experts compete, a
// group scoring the sum of its two best (score + correction_bias). Not with TOP_K_SOFTMAX.
typedef struct moxie_routing {
    uint32_t struct_size;
    int32_t scoring;      // MOXIE_SCORING_*
    int32_t renormalize;  // 1: the k weights are divided by their sum plus renormalize_epsilon
    int32_t groups, groups_top;    // groups 0 or 1: none
    uint32_t reserved0;
    double renormalize_epsilon;
    double scaling_factor;         // of the weights; 0 means 1
    moxie_tensor correction_bias;  // f32 [experts], added to the score for the choice only, or none
} moxie_routing;

typedef struct moxie_routing_api {
    uint32_t struct_size, reserved0;
    // logits [T, experts] f32, bf16 or f16 -> ids int32 or int64 [T, k], weights f32 [T, k], the
    // best first, ties to the lower id. A NaN never wins; with fewer than k numbers the rest are -1
    // with weight 0. On the CPU so far: stream NULL. [any, stream, capturable; caller; 0.1]
    int32_t (*route)(const moxie_routing *, const moxie_tensor *logits, const moxie_tensor *ids,
                     const moxie_tensor *weights, void *stream, moxie_error *);
} moxie_routing_api;

// ---- Extension moxie.expand/1: RANK_MAJOR or STANDARD rows as EXPERT_ layouts, and back --------
#define MOXIE_EXPAND_EXTENSION "moxie.expand/1"
// With the key runner at `none`, create makes handles for these alone; their weights are NULL.
typedef struct moxie_expand_api {
    uint32_t struct_size, reserved0;
    // Copies each (row, local expert) of `in` to the caller's `out` (an EXPERT_ layout: rows, f32
    // weights, counts; apart from `in`); row_index int32 [slabs * cap, k] gets its row or -1. It,
    // weights and scales are compact. CAPACITY: too few. [serial, stream, capturable; caller; 0.1]
    int32_t (*expand)(moxie_runner *, const moxie_call *, const moxie_rows *in,
                      const moxie_rows *out, const moxie_tensor *row_index, moxie_error *);
    // Sums each row's expanded result rows in slot order, in fp32, into the layout expand read; run
    // has applied the weights that expand wrote. [serial, stream, capturable; caller; 0.1]
    int32_t (*fold)(moxie_runner *, const moxie_call *, const moxie_rows *expanded,
                    const moxie_tensor *row_index, const moxie_rows *out, moxie_error *);
} moxie_expand_api;

#ifdef __cplusplus
}
#endif

#endif  // MOXIE_ABI_H
