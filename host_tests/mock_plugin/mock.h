// What the files of the mock plugin share: a second implementation of abi.h, slow, simple and
// strict. It knows that header and nothing else of this tree.

#ifndef MOXIE_MOCK_H
#define MOXIE_MOCK_H

#include "abi.h"
#include "host_tests/mock_plugin/fault.h"

#include <pthread.h>
#include <stdatomic.h>

#define TRY(call)                                                                                  \
    do {                                                                                           \
        st = (call);                                                                               \
        if (st != MOXIE_OK) goto out;                                                              \
    } while (0)

// ---- Who is told -------------------------------------------------------------------------------

// Where a failing call explains itself: the host's log and the call's error. Both may be NULL.
struct caller {
    const moxie_host *host;
    moxie_error *error;
};

// Forgets what the error held; NULL when it cannot be used.
moxie_error *error_begin(moxie_error *error);

// Every one of these returns `code`. MOXIE_E_INVALID is logged as HOST_MISBEHAVING.
__attribute__((format(printf, 3, 4))) int32_t fail_with(const struct caller *caller, int32_t code,
                                                        const char *format, ...);
__attribute__((format(printf, 4, 5))) int32_t fail_rank(const struct caller *caller, int32_t code,
                                                        int32_t rank, const char *format, ...);
__attribute__((format(printf, 3, 4))) void log_line(const moxie_host *host, int32_t severity,
                                                    const char *format, ...);

// ---- Structs and tensors that a host passes ----------------------------------------------------

struct shape {
    const char *name;
    uint32_t first_bytes; // in ABI 0.1
    uint32_t bytes;
    uint32_t reserved; // offset of a field that must be 0; 0: none
};

extern const struct shape shape_request, shape_host, shape_step, shape_batch, shape_call,
    shape_weights, shape_matrix, shape_rows, shape_slab, shape_probe, shape_config_entry,
    shape_stats, shape_captured, shape_routing;

// Copies a sized struct into one of this build's size, or says what is wrong with it.
int32_t struct_read(const struct caller *caller, const struct shape *shape, const char *what,
                    const void *from, void *to);
// The way back, for structs that the mock fills: as many bytes as the host has.
void struct_write(const struct shape *shape, const void *from, void *to);

// Element types, as a set.
#define TYPE_F32    1u
#define TYPE_BF16   2u
#define TYPE_F16    4u
#define TYPE_E4M3   8u
#define TYPE_U8     16u
#define TYPE_I32    32u
#define TYPE_I64    64u
#define TYPE_FLOATS (TYPE_F32 | TYPE_BF16 | TYPE_F16)
#define TYPE_IDS    (TYPE_I32 | TYPE_I64)

// A checked tensor of up to three dimensions. data NULL: none.
struct view {
    unsigned char *data;
    uint32_t type; // one of TYPE_*
    int32_t ndim;
    int64_t shape[3];
    int64_t stride_bytes[3];
};

struct want {
    const char *name;
    uint32_t types;
    int32_t ndim;
    int64_t shape[3]; // -1: any
    int32_t optional;
};

int32_t view_read(const struct caller *caller, const struct want *want, const moxie_tensor *tensor,
                  struct view *view);
int64_t view_bytes(const struct view *view); // from the first element to past the last
int view_overlap(const struct view *a, const struct view *b);
int view_rows_overlap(const struct view *view);
unsigned char *view_at(const struct view *view, int64_t i, int64_t j, int64_t k);
double view_number(const struct view *view, int64_t i, int64_t j, int64_t k);
int64_t view_integer(const struct view *view, int64_t i, int64_t j);

// ---- Numbers -----------------------------------------------------------------------------------

int64_t type_bytes(uint32_t type);
double number_load(uint32_t type, const unsigned char *at);
void number_store(uint32_t type, double value, unsigned char *at); // rounds to nearest even
double e2m1(int32_t nibble);
double e8m0(int32_t exponent);

// ---- Configuration -----------------------------------------------------------------------------

enum key {
    KEY_HIDDEN_SIZE,
    KEY_INTERMEDIATE_SIZE,
    KEY_NUM_EXPERTS,
    KEY_TOP_K,
    KEY_NUM_LAYERS,
    KEY_NUM_REDUNDANT_EXPERTS,
    KEY_NUM_FUSED_SHARED_EXPERTS,
    KEY_ACTIVATION,
    KEY_ACTIVATION_ALPHA,
    KEY_ACTIVATION_BETA,
    KEY_ACTIVATION_LIMIT,
    KEY_WEIGHT_FORMAT,
    KEY_ACTIVATION_FORMAT,
    KEY_INPUT_FORMAT,
    KEY_OUTPUT_FORMAT,
    KEY_DISPATCH_FORMAT,
    KEY_RUNNER,
    KEY_DISPATCHER,
    KEY_DEVICE,
    KEY_TRANSPORT,
    KEY_CPU_THREADS,
    KEY_DP_SIZE,
    KEY_TP_SIZE,
    KEY_EP_SIZE,
    KEY_EP_RANK,
    KEY_MAX_PREFILL_TOKENS,
    KEY_CONTEXT_LENGTH,
    KEY_CHUNKED_PREFILL_SIZE,
    KEY_PIPELINE_DYNAMIC_CHUNKING,
    KEY_PREFILL_GRAPH_MAX_TOKENS,
    KEY_DISABLE_PREFILL_GRAPH,
    KEY_DECODE_GRAPH_MAX_BATCH,
    KEY_DISABLE_DECODE_GRAPH,
    KEY_MAX_RUNNING_REQUESTS,
    KEY_WARMUP_TOKENS_MAX,
    KEY_SPECULATIVE_ALGORITHM,
    KEY_SPECULATIVE_DRAFT_TOKENS,
    KEY_DISAGGREGATION_MODE,
    KEY_FORWARD_TOKENS_MAX,
    KEY_MAX_DISPATCH_TOKENS_PER_RANK,
    KEY_DISPATCH_ROUNDS_MAX,
    KEY_FORWARDS_IN_FLIGHT_MAX,
    KEY_ROUTED_SCALING_FACTOR,
    KEY_APPLY_ROUTER_WEIGHT_ON_INPUT,
    KEY_CAPTURE_ROUTED_EXPERTS,
    KEY_DETERMINISTIC,
    KEY_DEVICE_MEMORY_BUDGET_BYTES,
    KEY_TIMEOUT_MS,
    KEY_COUNT
};

// Positions in the words of their keys.
enum activation { SILU, GELU, GELU_TANH, SWIGLUOAI, RELU2 };
enum disaggregation { NOT_DISAGGREGATED, PREFILL_ONLY, DECODE_ONLY };
enum dispatcher_kind { DISPATCHER_LOCAL, DISPATCHER_ALLGATHER, DISPATCHER_ALLTOALL };

#define TEXT_BYTES 64 // of a string value, its NUL included

struct value {
    int64_t number; // of a string with words: which one, from 0
    double real;
    char text[TEXT_BYTES]; // strings only
    int32_t found;
    int32_t refused; // the default stands in
};

#define REASONS_MAX  64
#define REASON_BYTES 320

struct verdict {
    uint64_t count;
    moxie_reason reasons[REASONS_MAX];
    char messages[REASONS_MAX][REASON_BYTES];
};

struct instance;

const char *key_name(enum key key);
const char *key_type(enum key key);
const char *key_help(enum key key);
int key_is_per_rank(enum key key);

__attribute__((format(printf, 4, 5))) void verdict_add(struct verdict *verdict, int32_t code,
                                                       enum key key, const char *format, ...);
// Every answer that nobody can use is a reason, and one that breaks the getters' contract a line in
// the host's log too.
void config_read(const moxie_host *host, struct value values[KEY_COUNT], struct verdict *verdict);
void value_print(const struct value *value, enum key key, char text[TEXT_BYTES]);

// ---- Verdict and plan --------------------------------------------------------------------------

enum buffer {
    BUFFER_SCRATCH,  // a row, its intermediate and its sum, per task
    BUFFER_OUTGOING, // this rank's rows, per slot
    BUFFER_RECEIVED, // every rank's rows, per slot
    BUFFER_RESULTS,  // what the experts made of them, per slot
    BUFFER_RETURNED, // every rank's results for one rank
    BUFFER_CAPTURE,
    BUFFER_COUNT
};

#define TASKS 8 // of one run

// The piece of one rank in BUFFER_OUTGOING and BUFFER_RECEIVED: count, rows, ids, weights.
struct block {
    int64_t rows, ids, weights; // offsets
    int64_t bytes;
};

// Numbers of an accepted configuration.
struct limits {
    int64_t hidden, intermediate, layers;
    int64_t expert_first, experts_local, physical_experts;
    int64_t call_tokens_max, forward_tokens_max; // this rank's, in one dispatch() and one forward()
    int64_t rows_max;                            // rows that one run() may see
    int64_t capture_tokens;                      // of one DP rank, padding too
    int64_t attn_tp;
    int32_t top_k, ranks, rank, dp_size, slots;
    int32_t dispatcher; // enum dispatcher_kind
    uint32_t input_type, output_type;
    struct block block;
};

void judge(struct instance *instance);

// ---- Handles -----------------------------------------------------------------------------------

enum handle_kind { HANDLE_INSTANCE, HANDLE_RUNNER, HANDLE_DISPATCHER };

struct instance {
    void *handle;
    moxie_host host;
    char host_name[TEXT_BYTES];
    struct value values[KEY_COUNT];
    char printed[KEY_COUNT][TEXT_BYTES];
    struct verdict verdict;
    moxie_report report;
    moxie_bounds bounds;
    moxie_plan plan;
    moxie_buffer buffers[BUFFER_COUNT];
    int32_t planned[BUFFER_COUNT]; // enum buffer of each
    struct limits limits;
    void *memory[BUFFER_COUNT];
    int64_t captured_shape[3], captured_strides[3];
    moxie_stats stats;
    int32_t users;           // runners and dispatchers that live
    atomic_int calls;        // -1: a serial call, above 0: init calls
    pthread_mutex_t in_init; // one init call at a time
};

// `owner` is the handle of the instance, NULL for an instance itself. Returns NULL without memory.
void *handle_make(enum handle_kind kind, void *body, const void *owner);
void handle_kill(const void *handle);

// One call of the host, from its first check to its last.
struct call {
    struct caller caller;
    struct instance *instance;
    void *body;      // of the handle
    int32_t entered; // MOXIE_THREAD_*, or 0
};

#define THREAD_ANY 0

// Checks the handle, the thread and that no other call is in its way.
int32_t call_enter(struct call *call, const void *handle, enum handle_kind kind, int32_t tag,
                   moxie_error *error);
void call_leave(struct call *call);

// ---- Memory ------------------------------------------------------------------------------------

// The first user allocates every planned buffer, the last one gives all back.
int32_t memory_take(const struct call *call);
void memory_drop(struct instance *instance);
int32_t instance_accepted(const struct call *call);
// Whether it takes no more hosts, as some faults will have it.
int library_is_spent(void);

// ---- Runner ------------------------------------------------------------------------------------

struct matrix {
    struct view values, scales, globals, bias;
    int64_t rows, columns; // N, K
    int64_t units;         // rows of one half
    int32_t format, order, rows_in, is_down;
    int32_t block_offset;
};

struct runner {
    struct instance *instance;
    struct matrix w1, w2;
    uint64_t digest; // of all numbers
    int32_t layer;
};

// x times the weights of one output, with its bias. Of a w1, `half` 0 is the gate and 1 the up
// projection; of a w2 there is half 0 alone.
double weights_dot(const struct matrix *matrix, int64_t expert, int32_t half, int64_t unit,
                   const double *x);
int32_t weights_read(const struct call *call, const moxie_weights *weights, struct runner *runner);
// Scales that are no number.
int32_t weights_check_expert(const struct call *call, const struct runner *runner, int64_t expert);
uint64_t weights_digest(const struct runner *runner);

// The EXPERT_ layouts.
int layout_is_by_expert(int32_t layout);
// Checks the numbers of a call to a runner.
int32_t call_read(const struct call *call, const moxie_call *given);
// A sized struct of rows with its slabs, which may lie further apart than this build's.
int32_t rows_read(const struct caller *caller, const char *what, const moxie_rows *given,
                  moxie_rows *rows, moxie_slab slabs[MOXIE_RANKS_MAX]);
int32_t runner_run(const struct call *call, const struct runner *runner, const moxie_rows *in,
                   const moxie_rows *out);

// ---- Dispatcher --------------------------------------------------------------------------------

enum slot_state { SLOT_IDLE, SLOT_BEGUN, SLOT_SENT, SLOT_RECEIVED, SLOT_RETURNED };

struct slot_dims {
    int64_t rows[2], row_strides[2], choices[2], results[2];
};

struct slot {
    int32_t state; // enum slot_state
    int32_t listed;
    moxie_step step;
    int64_t tokens_most; // of any rank
    int64_t capture_row;
    int64_t first, tokens; // this round's part
    const void *y;
    int32_t layer;
    int32_t counts[MOXIE_RANKS_MAX];
    int64_t counts_dim;
    moxie_rows in, out;
    moxie_slab in_slabs[MOXIE_RANKS_MAX], out_slabs[MOXIE_RANKS_MAX];
    struct slot_dims dims[MOXIE_RANKS_MAX];
    int64_t extents[5][2][2]; // `local`: shape and strides of each tensor of the batch
};

// A batch after its checks.
struct batch {
    moxie_batch given;
    struct view x, ids, weights, y, map;
};

struct dispatcher {
    struct instance *instance;
    int32_t kind; // enum dispatcher_kind
    _Atomic int32_t failed;
    char failed_text[160];
    struct slot slots[MOXIE_SLOTS_MAX];
};

int32_t dispatcher_send(const struct call *call, struct dispatcher *dispatcher,
                        const struct batch *batch, int64_t round);
int32_t dispatcher_receive(const struct call *call, struct dispatcher *dispatcher,
                           const struct batch *batch);
int32_t dispatcher_return(const struct call *call, struct dispatcher *dispatcher,
                          const struct batch *batch);
int32_t batch_read(const struct call *call, struct dispatcher *dispatcher, const moxie_batch *given,
                   enum slot_state state, struct batch *batch);

// Compares the ranks' configurations; every rank takes part with its status.
int32_t exchange_agree(const struct call *call, int32_t status);
// Every rank's outgoing block, in rank order.
int32_t exchange_rows(const struct call *call, int32_t slot);
// Every rank's results for each rank; adds up those for this one.
int32_t exchange_results(const struct call *call, int32_t slot, struct view *y, int64_t tokens);

void capture_record(struct instance *instance, const struct slot *slot, const struct batch *batch);
// The physical expert that a batch means by its id, or -1.
int64_t physical_expert(const struct instance *instance, const struct view *map, int32_t id_space,
                        int64_t id);

// ---- Tables ------------------------------------------------------------------------------------

extern const moxie_runner_info runner_info;
extern const moxie_dispatcher_info dispatcher_infos[3];
extern const moxie_routing_api routing_api;
extern const moxie_expand_api expand_api;
extern const moxie_field layout_fields[];
extern const uint64_t layout_fields_count;

uint64_t layout_digest(void);

int32_t slot_forward(moxie_dispatcher *, moxie_runner *, const moxie_batch *, moxie_error *);
int32_t slot_open(const moxie_host *, moxie_instance **, moxie_error *);
int32_t slot_close(moxie_instance *, moxie_error *);

#endif
