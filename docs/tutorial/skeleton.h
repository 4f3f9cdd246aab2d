// What every plugin needs and nobody writes twice: errors, structs of other versions, handles,
// configuration, verdict, plan and memory, tensors. Copy it, and change the table of keys.

#ifndef TUTORIAL_SKELETON_H
#define TUTORIAL_SKELETON_H

#include "abi.h"

#define TRY(call)                                                                                  \
    do {                                                                                           \
        st = (call);                                                                               \
        if (st != MOXIE_OK) goto out;                                                              \
    } while (0)
#define COUNT(array) (sizeof(array) / sizeof(array)[0])

// ---- 1. Errors: returns `code` -----------------------------------------------------------------

__attribute__((format(printf, 3, 4))) int32_t fail(moxie_error *error, int32_t code,
                                                   const char *format, ...);

// ---- 2. Structs from the host ------------------------------------------------------------------

// Copies a sized struct of a host that is older or newer. `bytes` is this build's size.
int32_t take(void *to, const void *from, uint32_t bytes, const char *what, moxie_error *error);
#define TAKE(to, from, what) TRY(take(&(to), from, sizeof(to), what, error))
// The way back, for structs that the host has us fill: all but its struct_size.
#define FILL(to, from) memcpy((char *)(to) + 4, (const char *)&(from) + 4, sizeof(from) - 4)

// ---- 3. Handles --------------------------------------------------------------------------------

// What every handle starts with. Those that live are in one list, so that another is refused.
struct object {
    struct object *next;
    struct instance *instance;
    enum kind { INSTANCE, RUN, DISPATCH } kind;
};

void enlist(struct object *object, struct instance *instance, enum kind kind);
// The living handle at `address`, or NULL; taken off the list when `drop`.
struct object *find(const void *address, enum kind kind, int drop);
// The first call of every slot that has a handle: it lives, and its thread may call. tag 0: any.
int32_t enter(const void *handle, enum kind kind, int32_t tag, struct object **object,
              moxie_error *error);

// ---- 4. Configuration --------------------------------------------------------------------------

// clang-format off
enum key {
    HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS, LAYERS, THREADS, ACTIVATION, WEIGHT_FORMAT,
    INPUT_FORMAT, OUTPUT_FORMAT, ACTIVATION_FORMAT, RUNNER, DISPATCHER, DEVICE, SCALING, TP_SIZE,
    DP_SIZE, EP_SIZE, EP_RANK, REDUNDANT, SHARED, IN_FLIGHT, ON_INPUT, CAPTURE, LOAD, KEYS
};

// clang-format on

const char *key_name(enum key key);
const char *key_type(enum key key);

struct instance {
    struct object object;
    moxie_host host;
    int64_t number[KEYS]; // of a str: which of its words
    double scaling;
    char printed[KEYS][32], messages[KEYS][96];
    int32_t found[KEYS];
    moxie_reason reasons[KEYS];
    moxie_report report;
    moxie_bounds bounds;
    moxie_buffer buffer;
    moxie_plan plan;
    float *scratch; // one row between the projections
    int users;      // runners and dispatchers
    moxie_stats stats;
};

// ---- 5. Verdict, plan, memory ------------------------------------------------------------------

// Asks the host everything, once.
void judge(struct instance *instance);
// The first runner or dispatcher takes the memory, the last one gives it back.
int32_t use(struct instance *instance, moxie_error *error);
void unuse(struct instance *instance);
// Of a runner or a dispatcher; both start with their object.
void destroy(const void *handle, enum kind kind);

// ---- 6. Tensors and numbers --------------------------------------------------------------------

enum type { F32 = 1, BF16 = 2, F16 = 4, I32 = 8, I64 = 16 };

struct view {
    unsigned char *data;
    enum type type;
    int64_t shape[3], stride[3], extent; // in bytes
};

struct wanted {
    const char *name;
    int types; // a set of enum type
    int ndim;
    int64_t shape[3]; // -1: any
};

int32_t view(struct view *to, const moxie_tensor *from, const struct wanted *wanted,
             moxie_error *error);
double number_at(const struct view *view, int64_t i, int64_t j, int64_t k);
int64_t id_at(const struct view *view, int64_t i, int64_t j);
void store(const struct view *view, int64_t i, int64_t j, float number);

// ---- 7. Between the files ----------------------------------------------------------------------

// Rows, checked: what run and dispatch both read.
struct job {
    struct view x, ids, weights, y, map, valid;
};

int32_t read_job(struct instance *instance, const moxie_slab *in, const moxie_slab *out,
                 const moxie_rows *rows, int64_t tokens, struct job *job, moxie_error *error);

extern const moxie_traits tutorial_traits;
extern const moxie_runner_info tutorial_runner;
extern const moxie_dispatcher_info tutorial_dispatcher;
int32_t tutorial_forward(moxie_dispatcher *, moxie_runner *, const moxie_batch *, moxie_error *);

#endif
