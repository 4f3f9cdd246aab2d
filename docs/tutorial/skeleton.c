// See skeleton.h.

#include "docs/tutorial/skeleton.h"

#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- 1. Errors ---------------------------------------------------------------------------------

int32_t fail(moxie_error *error, int32_t code, const char *format, ...)
{
    va_list args;

    if (error == NULL || error->struct_size < sizeof *error) return code;
    error->code = code;
    error->rank = -1;
    va_start(args, format);
    if (error->text != NULL && error->text_bytes > 0)
        (void)vsnprintf(error->text, error->text_bytes, format, args);
    va_end(args);
    return code;
}

// ---- 2. Structs from the host ------------------------------------------------------------------

int32_t take(void *to, const void *from, uint32_t bytes, const char *what, moxie_error *error)
{
    uint32_t declared = 0;

    if (from == NULL) return fail(error, MOXIE_E_INVALID, "%s is NULL", what);
    memcpy(&declared, from, sizeof declared);
    if (declared < bytes || declared > 4096)
        return fail(error, MOXIE_E_INVALID, "%s: struct_size %u; want %u", what, declared, bytes);
    for (uint32_t at = bytes; at < declared; at++)
        if (((const char *)from)[at] != 0)
            return fail(error, MOXIE_E_UNSUPPORTED, "%s: byte %u is not zero; I know %u bytes",
                        what, at, bytes);
    memcpy(to, from, bytes);
    return MOXIE_OK;
}
// ---- 3. Handles --------------------------------------------------------------------------------

static struct object *objects;
static pthread_mutex_t objects_lock = PTHREAD_MUTEX_INITIALIZER;

void enlist(struct object *object, struct instance *instance, enum kind kind)
{
    (void)pthread_mutex_lock(&objects_lock);
    *object = (struct object){objects, instance, kind};
    objects = object;
    (void)pthread_mutex_unlock(&objects_lock);
}

struct object *find(const void *address, enum kind kind, int drop)
{
    struct object **at = &objects, *found;

    (void)pthread_mutex_lock(&objects_lock);
    while (*at != NULL && (*at != address || (*at)->kind != kind))
        at = &(*at)->next;
    found = *at;
    if (found != NULL && drop) *at = found->next;
    (void)pthread_mutex_unlock(&objects_lock);
    return found;
}

static int32_t check_thread(const moxie_host *host, int32_t tag, moxie_error *error)
{
    static const char text[] = "called on a thread that the host's thread_check refuses";

    if (tag == 0 || host->thread_check == NULL || host->thread_check(host->ctx, tag) != 0)
        return MOXIE_OK;
    if (host->log != NULL)
        host->log(host->ctx, MOXIE_LOG_HOST_MISBEHAVING, "tutorial", text, sizeof text - 1);
    return fail(error, MOXIE_E_INVALID, "%s", text);
}

int32_t enter(const void *handle, enum kind kind, int32_t tag, struct object **object,
              moxie_error *error)
{
    *object = find(handle, kind, 0);
    if (*object == NULL) return fail(error, MOXIE_E_INVALID, "no living handle of this plugin");
    return check_thread(&(*object)->instance->host, tag, error);
}

// ---- 4. Configuration --------------------------------------------------------------------------

// clang-format off
// Everything this plugin asks for, with all that it can do: the rest becomes a reason.
static const struct {
    const char *name, *type, *words; // words: of a str, the last one is the default
    int64_t least, most, standard;   // of an i64
} keys[KEYS] = {
    [HIDDEN] = {"hidden_size", "i64", "", 1, 65536, 0},
    [INTERMEDIATE] = {"intermediate_size", "i64", "", 1, 65536, 0},
    [EXPERTS] = {"num_experts", "i64", "", 1, 65536, 0},
    [TOP_K] = {"top_k", "i64", "", 1, MOXIE_TOP_K_MAX, 0},
    [TOKENS] = {"forward_tokens_max", "i64", "", 1, 65536, 0},
    [LAYERS] = {"num_layers", "i64", "", 1, 65536, 1},
    [THREADS] = {"cpu_threads", "i64", "", 1, INT64_MAX, 1},
    [ACTIVATION] = {"activation", "str", "silu", 0, 0, 0},
    [WEIGHT_FORMAT] = {"weight_format", "str", "f32 bf16", 0, 0, 0},
    [INPUT_FORMAT] = {"input_format", "str", "f32 bf16", 0, 0, 0},
    [OUTPUT_FORMAT] = {"output_format", "str", "f32 bf16", 0, 0, 0},
    [ACTIVATION_FORMAT] = {"activation_format", "str", "auto f32", 0, 0, 0},
    [RUNNER] = {"runner", "str", "auto tutorial", 0, 0, 0},
    [DISPATCHER] = {"dispatcher", "str", "auto local", 0, 0, 0},
    [DEVICE] = {"device", "str", "cpu", 0, 0, 0},
    [SCALING] = {"routed_scaling_factor", "f64", "", 0, 0, 0},
    [TP_SIZE] = {"tp_size", "i64", "", 1, 1, 1},
    [DP_SIZE] = {"dp_size", "i64", "", 1, 1, 1},
    [EP_SIZE] = {"ep_size", "i64", "", 1, 1, 1},
    [EP_RANK] = {"ep_rank", "i64", "", 0, 0, 0},
    [REDUNDANT] = {"num_redundant_experts", "i64", "", 0, 0, 0},
    [SHARED] = {"num_fused_shared_experts", "i64", "", 0, 0, 0},
    [IN_FLIGHT] = {"forwards_in_flight_max", "i64", "", 1, 1, 1},
    [ON_INPUT] = {"apply_router_weight_on_input", "i64", "", 0, 0, 0},
    [CAPTURE] = {"capture_routed_experts", "i64", "", 0, 0, 0},
    [LOAD] = {"count_expert_load", "i64", "", 0, 0, 0},
};
// clang-format on

const char *key_name(enum key key)
{
    return keys[key].name;
}

const char *key_type(enum key key)
{
    return keys[key].type;
}

// `most`: of an i64, what the others leave it.
static void refuse(struct instance *instance, enum key key, int64_t most)
{
    char seen[21], wanted[48] = "a finite number below 1e30";
    uint64_t i = instance->report.reasons_count++;

    instance->reasons[i] = (moxie_reason){sizeof(moxie_reason), MOXIE_E_CONFIG, "CONFIG",
                                          keys[key].name, instance->messages[i]};
    memcpy(seen, instance->printed[key], sizeof seen);
    seen[sizeof seen - 1] = '\0';
    if (keys[key].type[0] == 's')
        (void)snprintf(wanted, sizeof wanted, "one of '%s'", keys[key].words);
    else if (keys[key].type[0] == 'i')
        (void)snprintf(wanted, sizeof wanted, most == keys[key].least ? "%lld" : "%lld..%lld",
                       (long long)keys[key].least, (long long)most);
    (void)snprintf(instance->messages[i], sizeof instance->messages[i],
                   "cannot be '%s': set it to %s", seen, wanted);
}

// The place of `text` among "a b c", -1 when it is none of them; NULL means the last.
static int64_t find_word(const char *words, const char *text)
{
    int64_t place = 0;

    for (;; place++, words++) {
        size_t length = strcspn(words, " ");

        if (text == NULL ? words[length] == '\0'
                         : strlen(text) == length && memcmp(words, text, length) == 0)
            return place;
        words += length;
        if (*words == '\0') return -1;
    }
}

// One question to the host, its answer judged and printed.
static void read_key(struct instance *instance, enum key key)
{
    const moxie_host *host = &instance->host;
    int64_t *number = &instance->number[key];
    char text[32] = "";
    uint64_t length = 0;
    int32_t code = MOXIE_CONFIG_ABSENT;
    int good = 1;

    *number = keys[key].standard;
    (void)snprintf(text, sizeof text, "%s",
                   strrchr(keys[key].words, ' ') != NULL ? strrchr(keys[key].words, ' ') + 1
                                                         : keys[key].words);
    if (keys[key].type[0] == 's') {
        *number = find_word(keys[key].words, NULL);
        code = host->get_str(host->ctx, keys[key].name, text, sizeof text, &length);
        text[sizeof text - 1] = '\0';
        if (code == MOXIE_CONFIG_FOUND) *number = find_word(keys[key].words, text);
        good = length < sizeof text && *number >= 0;
        (void)snprintf(instance->printed[key], sizeof text, "%s", text);
    } else if (keys[key].type[0] == 'f') {
        code = host->get_f64(host->ctx, keys[key].name, &instance->scaling);
        good = isfinite(instance->scaling) && fabs(instance->scaling) < 1e30;
        (void)snprintf(instance->printed[key], sizeof text, "%.17g", instance->scaling);
    } else {
        code = host->get_i64(host->ctx, keys[key].name, number);
        good = *number >= keys[key].least && *number <= keys[key].most;
        (void)snprintf(instance->printed[key], sizeof text, "%lld", (long long)*number);
    }
    instance->found[key] = code != MOXIE_CONFIG_ABSENT;
    if (!good || (code != MOXIE_CONFIG_FOUND && code != MOXIE_CONFIG_ABSENT))
        refuse(instance, key, keys[key].most);
}

// ---- 5. Verdict and plan -----------------------------------------------------------------------

void judge(struct instance *instance)
{
    const int64_t *number = instance->number;
    int64_t tokens;

    instance->scaling = 1.0;
    for (int key = 0; key < KEYS; key++)
        read_key(instance, (enum key)key);
    if (instance->report.reasons_count == 0 && number[TOP_K] > number[EXPERTS])
        refuse(instance, TOP_K, number[EXPERTS]);
    // What `auto` became.
    (void)snprintf(instance->printed[RUNNER], sizeof instance->printed[0], "tutorial");
    (void)snprintf(instance->printed[DISPATCHER], sizeof instance->printed[0], "local");
    (void)snprintf(instance->printed[ACTIVATION_FORMAT], sizeof instance->printed[0], "f32");
    tokens = instance->report.reasons_count > 0 ? -1 : number[TOKENS];
    instance->report.struct_size = sizeof instance->report;
    instance->report.reason_stride = sizeof(moxie_reason);
    instance->report.reasons = instance->report.warnings = instance->reasons;
    instance->bounds = (moxie_bounds){.struct_size = sizeof(moxie_bounds),
                                      .forward_tokens = tokens,
                                      .dominant = "forward_tokens_max",
                                      .prefill = 0,
                                      .dispatch_required = tokens,
                                      .dispatch_tokens = tokens,
                                      .allgather_rows = tokens,
                                      .alltoall_rows = tokens,
                                      .capture_rows = tokens,
                                      .dispatch_call_tokens_max = tokens,
                                      .forward_call_tokens_max = tokens,
                                      .physical_experts = number[EXPERTS],
                                      .experts_local = number[EXPERTS]};
    instance->plan = (moxie_plan){.struct_size = sizeof(moxie_plan),
                                  .buffer_stride = sizeof(moxie_buffer),
                                  .bounds = &instance->bounds};
    if (tokens < 0) return;
    instance->buffer = (moxie_buffer){sizeof(moxie_buffer),
                                      MOXIE_MEMORY_DEVICE,
                                      "scratch",
                                      (uint64_t)(number[HIDDEN] + number[INTERMEDIATE]) * 4,
                                      (uint64_t)(number[HIDDEN] + number[INTERMEDIATE]) * 4,
                                      64,
                                      "the intermediate of one row, and its sum"};
    instance->plan.buffers_count = 1;
    instance->plan.buffers = &instance->buffer;
    instance->plan.device_bytes = instance->buffer.bytes_mapped;
}

static moxie_allocation request_of(const struct instance *instance)
{
    return (moxie_allocation){sizeof(moxie_allocation), instance->buffer.kind,
                              instance->buffer.bytes, instance->buffer.align,
                              instance->buffer.name};
}

// [init] slots of one instance may come from several threads at once.
static pthread_mutex_t users_lock = PTHREAD_MUTEX_INITIALIZER;

static int32_t take_memory(struct instance *instance, moxie_error *error)
{
    const moxie_host *host = &instance->host;
    const moxie_allocation request = request_of(instance);
    void *memory = NULL;

    if (host->allocate == NULL ? posix_memalign(&memory, request.align, request.bytes) != 0
                               : host->allocate(host->ctx, &request, &memory) != 0)
        return fail(error, MOXIE_E_MEMORY, "no memory for the scratch");
    instance->scratch = memory;
    instance->stats.bytes_allocated = instance->buffer.bytes;
    return MOXIE_OK;
}

int32_t use(struct instance *instance, moxie_error *error)
{
    int32_t st = MOXIE_OK;

    if (instance->report.reasons_count > 0)
        return fail(error, MOXIE_E_CONFIG, "%s %s", instance->reasons[0].key,
                    instance->reasons[0].message);
    (void)pthread_mutex_lock(&users_lock);
    if (instance->users == 0) st = take_memory(instance, error);
    instance->users += st == MOXIE_OK;
    (void)pthread_mutex_unlock(&users_lock);
    return st;
}

static void give_memory(struct instance *instance)
{
    const moxie_allocation request = request_of(instance);

    if (instance->host.release != NULL)
        instance->host.release(instance->host.ctx, &request, instance->scratch);
    else
        free(instance->scratch);
    instance->stats.bytes_allocated = 0;
}

void unuse(struct instance *instance)
{
    (void)pthread_mutex_lock(&users_lock);
    if (--instance->users == 0) give_memory(instance);
    (void)pthread_mutex_unlock(&users_lock);
}

void destroy(const void *handle, enum kind kind)
{
    struct object *object;

    if (handle == NULL || enter(handle, kind, MOXIE_THREAD_INIT, &object, NULL) != MOXIE_OK) return;
    (void)find(handle, kind, 1);
    unuse(object->instance);
    free(object);
}

// ---- 6. Tensors and numbers --------------------------------------------------------------------

int32_t view(struct view *to, const moxie_tensor *from, const struct wanted *wanted,
             moxie_error *error)
{
    static const struct {
        uint8_t code, bits;
        enum type type;
    } dtypes[] = {{MOXIE_DTYPE_FLOAT, 32, F32},
                  {MOXIE_DTYPE_BFLOAT, 16, BF16},
                  {MOXIE_DTYPE_FLOAT, 16, F16},
                  {MOXIE_DTYPE_INT, 32, I32},
                  {MOXIE_DTYPE_INT, 64, I64}};
    int64_t bytes = from->dtype.bits / 8, compact = bytes;
    const int64_t *shape = wanted->shape;
    const char *name = wanted->name;
    int ndim = wanted->ndim;

    *to = (struct view){.extent = bytes};
    for (size_t i = 0; i < COUNT(dtypes); i++)
        if (from->dtype.code == dtypes[i].code && from->dtype.bits == dtypes[i].bits &&
            from->dtype.lanes == 1 && (wanted->types & (int)dtypes[i].type) != 0)
            to->type = dtypes[i].type;
    if (from->ndim != ndim || from->shape == NULL)
        return fail(error, MOXIE_E_INVALID, "%s: %d dimensions; want %d", name, from->ndim, ndim);
    for (int i = ndim - 1; i >= 0; i--) {
        int64_t size = from->shape[i], stride = from->strides ? from->strides[i] * bytes : compact;

        if (size < 0 || size > INT32_MAX || (shape[i] >= 0 && size != shape[i]) || stride < 0 ||
            stride > (int64_t)1 << 40)
            return fail(error, MOXIE_E_INVALID, "%s: dimension %d is %lld; want %lld", name, i,
                        (long long)size, (long long)shape[i]);
        to->shape[i] = size;
        to->stride[i] = stride;
        to->extent = size == 0 || to->extent == 0 ? 0 : to->extent + (size - 1) * stride;
        compact *= size > 0 ? size : 1;
    }
    if (to->type == 0 || (to->shape[ndim - 1] > 1 && to->stride[ndim - 1] != bytes))
        return fail(error, MOXIE_E_UNSUPPORTED, "%s: dtype or last stride", name);
    if (to->extent > 0 && (from->data == NULL || from->device.type != MOXIE_DEVICE_CPU))
        return fail(error, MOXIE_E_INVALID, "%s: no data in CPU memory", name);
    if (to->extent > 0) to->data = (unsigned char *)from->data + from->byte_offset;
    return MOXIE_OK;
}

double number_at(const struct view *view, int64_t i, int64_t j, int64_t k)
{
    const unsigned char *at =
        view->data + i * view->stride[0] + j * view->stride[1] + k * view->stride[2];
    uint32_t word = 0;
    float number;

    memcpy((unsigned char *)&word + (view->type == BF16 ? 2 : 0), at, view->type == F32 ? 4 : 2);
    if (view->type == F16)
        return ((word & 0x8000) != 0 ? -1.0 : 1.0) *
               ((word >> 10 & 31) == 0 ? ldexp(word & 1023, -24)
                                       : ldexp((word & 1023) | 1024, (int)(word >> 10 & 31) - 25));
    memcpy(&number, &word, sizeof number);
    return (double)number;
}

int64_t id_at(const struct view *view, int64_t i, int64_t j)
{
    const unsigned char *at = view->data + i * view->stride[0] + j * view->stride[1];
    int64_t wide = 0;
    int32_t narrow;

    memcpy(&wide, at, view->type == I64 ? sizeof wide : sizeof narrow);
    memcpy(&narrow, &wide, sizeof narrow);
    return view->type == I64 ? wide : narrow;
}

void store(const struct view *view, int64_t i, int64_t j, float number)
{
    uint32_t word;

    memcpy(&word, &number, sizeof word);
    if (view->type == BF16) // to the nearest even; a NaN stays one
        word = isnan(number) ? 0x7fc0 : (word + 0x7fff + (word >> 16 & 1)) >> 16;
    memcpy(view->data + i * view->stride[0] + j * view->stride[1], &word,
           view->type == F32 ? 4 : 2);
}
