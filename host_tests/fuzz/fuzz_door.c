// abi/: every slot of every table, in front of rooms that record what reached them, called by a
// host that gets everything wrong: sizes, tails, reserved fields, pointers that are not there,
// handles that are dead.

#include "abi/decode.h"
#include "abi/entry.h"
#include "abi/layout.h"
#include "plugin/backends.h"
#include "plugin/runner.h"

#include "host_tests/fake/rooms.h"
#include "host_tests/fuzz/structs.h"

#include <string.h>

#define CODES_COUNT 14

// One call: what it takes and what it must answer.
struct attempt {
    struct fuzz_input *input;
    moxie_error *error;
    char *text; // of the error
    uint32_t text_bytes;
};

// ---- What a host passes ------------------------------------------------------------------------

static moxie_instance *take_instance(struct fuzz_input *input)
{
    uint32_t which = fuzz_below(input, 8);

    if (which == 7) return NULL;
    return which == 6 ? fuzz_place(0, 0) : fake_instances[which & 1];
}

static moxie_runner *take_runner(struct fuzz_input *input)
{
    uint32_t which = fuzz_below(input, 8);

    if (which == 7) return NULL;
    return which == 6 ? fuzz_place(0, 0) : fake_runners[which & 1];
}

static moxie_dispatcher *take_dispatcher(struct fuzz_input *input)
{
    uint32_t which = fuzz_below(input, 8);

    if (which == 7) return NULL;
    return which == 6 ? fuzz_place(0, 0) : fake_dispatchers[which & 1];
}

static moxie_error *take_error(struct attempt *attempt)
{
    struct fuzz_input *input = attempt->input;
    uint8_t form = fuzz_u8(input);
    uint32_t declared = sizeof(moxie_error);
    size_t there;
    moxie_error *error;

    if ((form & 0xc0) == 0xc0) return NULL;
    if ((form & 0x20) != 0) declared = fuzz_u32(input);
    // A struct_size that cannot be one is all that is read.
    there = declared >= V1_moxie_error && declared <= DECODE_BYTES_MAX ? declared : sizeof declared;
    error = fuzz_place(there, 0);
    memset(error, 0x5a, there);
    error->struct_size = declared;
    if (there == sizeof declared) return error;
    attempt->text_bytes = form & 0x1f;
    error->text_bytes = attempt->text_bytes;
    if ((form & 0x40) == 0 && attempt->text_bytes > 0)
        attempt->text = fuzz_place(attempt->text_bytes, 0);
    error->text = attempt->text;
    return error;
}

// ---- What must come back -----------------------------------------------------------------------

static void check_answer(const struct attempt *attempt, int32_t st)
{
    const moxie_error *error = attempt->error;

    PROPERTY(st >= MOXIE_OK && st < CODES_COUNT);
    if (error == NULL) return;
    if (error->struct_size < V1_moxie_error || error->struct_size > DECODE_BYTES_MAX) return;
    PROPERTY(error->code == st);
    PROPERTY(error->rank == -1);
    PROPERTY(error->text == attempt->text && error->text_bytes == attempt->text_bytes);
    if (attempt->text == NULL) return;
    PROPERTY(memchr(attempt->text, 0, attempt->text_bytes) != NULL);
    // One byte has room for the NUL alone.
    PROPERTY(st == MOXIE_OK ? attempt->text[0] == '\0'
                            : attempt->text[0] != '\0' || attempt->text_bytes == 1);
}

// What the rooms may rely on, see abi/decode.h.
static void check_rows(const moxie_rows *rows, const moxie_slab *slabs)
{
    PROPERTY(rows->struct_size == sizeof *rows && rows->slab_stride == sizeof *slabs);
    PROPERTY(rows->slabs_count >= 1 && rows->slabs_count <= MOXIE_RANKS_MAX);
    PROPERTY(rows->layout >= MOXIE_LAYOUT_STANDARD && rows->layout <= MOXIE_LAYOUT_EXPERT_MASKED);
    PROPERTY(rows->id_space >= MOXIE_IDS_GLOBAL && rows->id_space <= MOXIE_IDS_LOCAL);
    PROPERTY(rows->reserved0 == 0);
    for (uint32_t i = 0; i < rows->slabs_count; i++)
        PROPERTY(slabs[i].struct_size == sizeof *slabs && slabs[i].reserved0 == 0);
}

static void check_call(void)
{
    PROPERTY(fake.call.struct_size == sizeof fake.call && fake.call.reserved0 == 0);
    PROPERTY(fake.call.slot >= 0 && fake.call.slot < MOXIE_SLOTS_MAX && fake.call.layer >= 0);
}

static void check_batch(void)
{
    PROPERTY(fake.batch.struct_size == sizeof fake.batch && fake.batch.layer >= 0);
    PROPERTY(fake.batch.slot >= 0 && fake.batch.slot < MOXIE_SLOTS_MAX);
    PROPERTY(fake.batch.id_space >= MOXIE_IDS_GLOBAL && fake.batch.id_space <= MOXIE_IDS_LOCAL);
}

static int reached(void)
{
    return fake.trail[0] != '\0';
}

// ---- Slots -------------------------------------------------------------------------------------

static const moxie_api *table(void)
{
    moxie_request request = {
        .struct_size = sizeof request, .abi_min = MOXIE_ABI_VERSION, .abi_max = MOXIE_ABI_VERSION};
    const moxie_api *api = NULL;

    PROPERTY(moxie_get_api_v1(&request, &api, NULL) == MOXIE_OK && api != NULL);
    return api;
}

static int32_t try_request(struct attempt *attempt)
{
    struct fuzz_input *input = attempt->input;
    moxie_request *request = take_struct(input, sizeof(moxie_request));
    uint8_t form = fuzz_u8(input);
    const moxie_api *api = (const moxie_api *)(const void *)fake_instances;
    int32_t st;

    set_pointer(request, offsetof(moxie_request, host_build),
                (form & 1) != 0 ? fuzz_text(input, 255) : NULL);
    if ((form & 2) != 0)
        set_i32(request, offsetof(moxie_request, abi_min), (int32_t)MOXIE_ABI_VERSION);
    if ((form & 4) != 0)
        set_i32(request, offsetof(moxie_request, abi_max), (int32_t)MOXIE_ABI_VERSION);
    st = moxie_get_api_v1(request, (form & 8) != 0 ? NULL : &api, attempt->error);
    if ((form & 8) == 0) PROPERTY((st == MOXIE_OK) == (api != NULL));
    return st;
}

static int32_t try_probe(struct attempt *attempt)
{
    struct fuzz_input *input = attempt->input;
    uint32_t stride = fuzz_u8(input) + (uint32_t)sizeof(moxie_probe) - 32;
    const uint64_t drawn = fuzz_u8(input) & 7, capacity = drawn == 7 ? UINT64_MAX : drawn;
    const uint64_t filled = capacity < backends_count ? capacity : backends_count;
    uint64_t count = 99;
    unsigned char *entries = fuzz_place(filled * stride, 0);
    int32_t st;

    for (uint64_t i = 0; i < filled; i++) {
        uint8_t form = fuzz_u8(input);
        uint32_t declared = (form & 1) != 0 ? fuzz_u32(input) : (uint32_t)sizeof(moxie_probe);

        memset(entries + i * stride, 0, stride);
        memcpy(entries + i * stride, &declared, sizeof declared);
        if ((form & 2) != 0) entries[i * stride + stride - 1] = fuzz_u8(input);
    }
    st = table()->probe((moxie_probe *)(void *)entries, stride, capacity, &count, attempt->error);
    PROPERTY(count == (st == MOXIE_OK ? backends_count : 0));
    for (uint64_t i = 0; st == MOXIE_OK && i < filled; i++) {
        moxie_probe entry;

        memcpy(&entry, entries + i * stride, sizeof entry < stride ? sizeof entry : stride);
        PROPERTY(entry.name != NULL && entry.kind != NULL && entry.device != NULL);
    }
    return st;
}

static int32_t found_i64(void *ctx, const char *key, int64_t *value)
{
    (void)ctx;
    (void)key;
    *value = 1;
    return MOXIE_CONFIG_FOUND;
}

static int32_t found_f64(void *ctx, const char *key, double *value)
{
    (void)ctx;
    (void)key;
    *value = 1;
    return MOXIE_CONFIG_FOUND;
}

static int32_t found_str(void *ctx, const char *key, char *text, uint64_t capacity,
                         uint64_t *length)
{
    (void)ctx;
    (void)key;
    if (capacity > 0) text[0] = '\0';
    *length = 0;
    return MOXIE_CONFIG_FOUND;
}

static int32_t take_runner_info(void *ctx, const moxie_runner_info *info)
{
    (void)ctx;
    PROPERTY(info->struct_size == sizeof *info && info->api->struct_size == sizeof *info->api);
    return 0;
}

static int32_t take_dispatcher_info(void *ctx, const moxie_dispatcher_info *info)
{
    (void)ctx;
    PROPERTY(info->struct_size == sizeof *info && info->api->struct_size == sizeof *info->api);
    return 0;
}

// Of the functions a host must have, those that the input names are missing.
static int32_t try_open(struct attempt *attempt)
{
    static const moxie_host right = {.get_i64 = found_i64,
                                     .get_f64 = found_f64,
                                     .get_str = found_str,
                                     .register_runner = take_runner_info,
                                     .register_dispatcher = take_dispatcher_info};
    static const moxie_host nothing;
    static const size_t functions[] = {
        offsetof(moxie_host, get_i64), offsetof(moxie_host, get_f64), offsetof(moxie_host, get_str),
        offsetof(moxie_host, register_runner), offsetof(moxie_host, register_dispatcher)};
    struct fuzz_input *input = attempt->input;
    moxie_host *host = take_struct(input, sizeof(moxie_host));
    uint8_t missing = fuzz_u8(input);
    moxie_instance *out = fuzz_place(0, 0);
    int32_t st;

    for (unsigned i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        const moxie_host *from = (missing >> i & 1) != 0 ? &nothing : &right;

        set_field(host, functions[i], (const unsigned char *)from + functions[i], sizeof(void *));
    }
    if ((missing & 32) == 0)
        set_i32(host, offsetof(moxie_host, abi_version), (int32_t)MOXIE_ABI_VERSION);
    st = table()->open(host, (missing & 64) != 0 ? NULL : &out, attempt->error);
    if ((missing & 64) == 0) PROPERTY((st == MOXIE_OK) == (out != NULL));
    if (!reached()) return st;
    PROPERTY(fake.host.struct_size == sizeof fake.host);
    PROPERTY(fake.host.get_i64 == found_i64 && fake.host.get_str == found_str);
    PROPERTY((fake.host.allocate == NULL) == (fake.host.release == NULL));
    PROPERTY((fake.host.all_gather == NULL) == (fake.host.barrier == NULL));
    return st;
}

// Structs that the library fills: never past the size that the caller declared.
static int32_t try_filled(struct attempt *attempt)
{
    struct fuzz_input *input = attempt->input;
    moxie_instance *instance = take_instance(input);
    int32_t st;

    memset(&fake.host, 0, sizeof fake.host);
    switch (fuzz_below(input, 3)) {
    case 0:
        attempt->error = NULL;
        return table()->config(instance, fuzz_u8(input) & 3,
                               take_struct(input, sizeof(moxie_config_entry)));
    case 1:
        st =
            table()->captured(instance, take_struct(input, sizeof(moxie_captured)), attempt->error);
        return st;
    default:
        return table()->stats(instance, take_struct(input, sizeof(moxie_stats)), attempt->error);
    }
}

static int32_t try_instance(struct attempt *attempt)
{
    struct fuzz_input *input = attempt->input;
    moxie_instance *instance = take_instance(input);
    const moxie_report *report = (const moxie_report *)(const void *)fake_instances;
    const moxie_plan *plan = (const moxie_plan *)(const void *)fake_instances;
    int32_t st;

    switch (fuzz_below(input, 5)) {
    case 0:
        attempt->error = fake.answer == MOXIE_OK ? attempt->error : NULL;
        st = table()->validate(instance, &report, attempt->error);
        PROPERTY((st == MOXIE_OK) == (report != NULL));
        return st;
    case 1:
        st = table()->plan(instance, &plan, attempt->error);
        PROPERTY((st == MOXIE_OK || (reached() && st == MOXIE_E_CONFIG)) == (plan != NULL));
        return st;
    case 2:
        return table()->suspend(instance, attempt->error);
    case 3:
        return table()->resume(instance, attempt->error);
    default:
        return table()->close(instance, attempt->error);
    }
}

static int32_t try_forward(struct attempt *attempt)
{
    struct fuzz_input *input = attempt->input;
    moxie_dispatcher *dispatcher = take_dispatcher(input);
    moxie_runner *runner = take_runner(input);
    int32_t st = table()->forward(dispatcher, runner, take_batch(input), attempt->error);

    if (!reached()) return st;
    check_batch();
    PROPERTY(runner_instance(runner) == dispatcher_instance(dispatcher));
    return st;
}

static int32_t try_route(struct attempt *attempt)
{
    struct fuzz_input *input = attempt->input;
    moxie_routing *routing = take_struct(input, sizeof(moxie_routing));
    uint8_t missing = fuzz_u8(input);
    const moxie_tensor *tensor = fuzz_place(sizeof(moxie_tensor), 0);
    int32_t st;

    if ((missing & 8) == 0) {
        set_i32(routing, offsetof(moxie_routing, scoring), (int32_t)fuzz_below(input, 5));
        set_i32(routing, offsetof(moxie_routing, renormalize), (int32_t)fuzz_below(input, 3));
    }
    st = routing_api.route(routing, (missing & 1) != 0 ? NULL : tensor,
                           (missing & 2) != 0 ? NULL : tensor, (missing & 4) != 0 ? NULL : tensor,
                           NULL, attempt->error);
    if (!reached()) return st;
    PROPERTY((missing & 7) == 0 && fake.routing.reserved0 == 0);
    PROPERTY(fake.routing.struct_size == sizeof fake.routing);
    PROPERTY(fake.routing.scoring >= MOXIE_SCORING_SOFTMAX &&
             fake.routing.scoring <= MOXIE_SCORING_SIGMOID);
    return st;
}

static int32_t try_runner_create(struct attempt *attempt)
{
    struct fuzz_input *input = attempt->input;
    moxie_weights *weights = take_struct(input, sizeof(moxie_weights));
    moxie_matrix *w1 = take_struct(input, sizeof(moxie_matrix));
    moxie_matrix *w2 = take_struct(input, sizeof(moxie_matrix));
    moxie_runner *out = fuzz_place(0, 0);
    int32_t st;

    if (fuzz_u8(input) < 192) {
        set_i32(weights, offsetof(moxie_weights, reserved0), 0);
        set_i32(w1, offsetof(moxie_matrix, reserved0), 0);
        set_i32(w2, offsetof(moxie_matrix, reserved0), 0);
    }
    set_pointer(weights, offsetof(moxie_weights, w1), w1);
    set_pointer(weights, offsetof(moxie_weights, w2), w2);
    st = runner_infos[0].api->create(take_instance(input), (int32_t)fuzz_u32(input), weights, &out,
                                     attempt->error);
    PROPERTY((st == MOXIE_OK) == (out != NULL));
    if (!reached()) return st;
    PROPERTY(fake.w1.struct_size == sizeof fake.w1 && fake.w2.struct_size == sizeof fake.w2);
    PROPERTY(fake.w1.reserved0 == 0 && fake.w2.reserved0 == 0);
    return st;
}

static int32_t try_run(struct attempt *attempt)
{
    struct fuzz_input *input = attempt->input;
    moxie_runner *runner = take_runner(input);
    uint32_t which = fuzz_below(input, 3);
    const moxie_tensor *index = fuzz_u8(input) == 0xff ? NULL : fuzz_place(0, 0);
    moxie_call *call = take_call(input);
    moxie_rows *in = take_rows(input);
    moxie_rows *out = take_rows(input);
    int32_t st;

    if (which == 0)
        st = runner_infos[0].api->run(runner, call, in, out, attempt->error);
    else if (which == 1)
        st = expand_api.expand(runner, call, in, out, index, attempt->error);
    else
        st = expand_api.fold(runner, call, in, index, out, attempt->error);
    if (!reached()) return st;
    check_call();
    check_rows(&fake.in, fake.in_slabs);
    check_rows(&fake.out, fake.out_slabs);
    PROPERTY(which == 0 || index != NULL);
    return st;
}

static int32_t try_runner(struct attempt *attempt)
{
    struct fuzz_input *input = attempt->input;
    moxie_runner *runner = take_runner(input);
    const int32_t *ids = fuzz_u8(input) < 128 ? NULL : fuzz_place(0, 0);
    uint64_t count = fuzz_u8(input);
    int32_t st;

    if (fuzz_u8(input) == 0xff) runner_infos[0].api->destroy(runner);
    fake.trail[0] = '\0';
    st = runner_infos[0].api->weights_updated(runner, ids, count, attempt->error);
    if (reached()) PROPERTY(fake.pointer == ids && fake.count == count);
    return st;
}

static const moxie_dispatcher_api *take_dispatcher_api(struct fuzz_input *input)
{
    return dispatcher_infos[fuzz_below(input, dispatcher_infos_count)].api;
}

static int32_t try_step(struct attempt *attempt)
{
    struct fuzz_input *input = attempt->input;
    moxie_step *step = take_struct(input, sizeof(moxie_step));
    int32_t st;

    if (fuzz_u8(input) < 192) {
        set_i32(step, offsetof(moxie_step, slot), (int32_t)fuzz_below(input, 5));
        set_i32(step, offsetof(moxie_step, padding), (int32_t)fuzz_below(input, 4));
        set_i32(step, offsetof(moxie_step, phase), (int32_t)fuzz_below(input, 5));
    }
    st = take_dispatcher_api(input)->begin_forward(take_dispatcher(input), step, attempt->error);
    if (!reached()) return st;
    PROPERTY(fake.step.struct_size == sizeof fake.step && fake.step.tokens >= 0);
    PROPERTY(fake.step.slot >= 0 && fake.step.slot < MOXIE_SLOTS_MAX && fake.step.capture_row >= 0);
    PROPERTY(fake.step.padding >= 0 && fake.step.padding <= MOXIE_PADDING_SUM_LEN);
    PROPERTY(fake.step.phase >= 0 && fake.step.phase <= MOXIE_PHASE_IDLE);
    return st;
}

static int32_t try_batch(struct attempt *attempt)
{
    struct fuzz_input *input = attempt->input;
    const moxie_dispatcher_api *api = take_dispatcher_api(input);
    moxie_dispatcher *dispatcher = take_dispatcher(input);
    moxie_batch *batch = take_batch(input);
    uint32_t which = fuzz_below(input, 6);
    const moxie_rows *in = fuzz_place(0, 0), *out = in;
    const moxie_rows **in_at = fuzz_u8(input) == 0xff ? NULL : &in;
    const moxie_rows **out_at = fuzz_u8(input) == 0xff ? NULL : &out;
    int32_t st;

    switch (which) {
    case 0:
        st = api->dispatch_send(dispatcher, batch, attempt->error);
        break;
    case 1:
        st = api->combine_send(dispatcher, batch, attempt->error);
        break;
    case 2:
        st = api->combine_recv(dispatcher, batch, attempt->error);
        break;
    case 3:
        st = api->combine(dispatcher, batch, attempt->error);
        break;
    default:
        st = (which == 4 ? api->dispatch : api->dispatch_recv)(dispatcher, batch, in_at, out_at,
                                                               attempt->error);
        if (in_at != NULL && out_at != NULL)
            PROPERTY((st == MOXIE_OK) == (in != NULL) && (in != NULL) == (out != NULL));
        break;
    }
    if (reached()) check_batch();
    return st;
}

static int32_t try_dispatcher(struct attempt *attempt)
{
    struct fuzz_input *input = attempt->input;
    const moxie_dispatcher_api *api = take_dispatcher_api(input);
    moxie_dispatcher *dispatcher = take_dispatcher(input);
    moxie_dispatcher *out = fuzz_place(0, 0);
    const uint8_t *active;
    int32_t st;

    switch (fuzz_below(input, 4)) {
    case 0:
        st = api->create(take_instance(input), &out, attempt->error);
        PROPERTY((st == MOXIE_OK) == (out != NULL));
        return st;
    case 1:
        return api->poll_error(dispatcher, attempt->error);
    case 2:
        active = fuzz_u8(input) < 64 ? NULL : fuzz_place(0, 0);
        return api->set_active_ranks(dispatcher, active, attempt->error);
    default:
        attempt->error = NULL;
        api->destroy(dispatcher);
        return MOXIE_OK;
    }
}

static int32_t try_extension(struct attempt *attempt)
{
    const char *name = fuzz_u8(attempt->input) == 0xff ? NULL : fuzz_text(attempt->input, 32);
    const void *extension = table()->get_extension(name);

    attempt->error = NULL;
    PROPERTY(extension == NULL || extension == &routing_api || extension == &expand_api);
    return MOXIE_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int32_t (*const slots[])(struct attempt *) = {
        try_request, try_probe, try_open,          try_filled,    try_instance,
        try_forward, try_route, try_runner_create, try_run,       try_runner,
        try_step,    try_batch, try_dispatcher,    try_extension,
    };
    struct fuzz_input input = {data, size};
    struct attempt attempt = {.input = &input};
    uint8_t which, world;

    fuzz_reset();
    which = fuzz_u8(&input);
    world = fuzz_u8(&input);
    fake.trail[0] = '\0';
    fake.answer = world < 16 ? world % CODES_COUNT : MOXIE_OK;
    fake.thread_answer = (world & 0xf0) == 0x10 ? MOXIE_E_INVALID : MOXIE_OK;
    fake.dead = (world & 0xf0) == 0x20;
    attempt.error = take_error(&attempt);
    check_answer(&attempt, slots[which % (sizeof slots / sizeof slots[0])](&attempt));
    return 0;
}
