// Configuration, bounds, plan and verdict: tables of any keys and values, read through a host's
// callbacks. Whatever the host says, an instance opens and either says why not or has a plan whose
// numbers agree with each other.

#include "plugin/instance.h"

#include "host_tests/fuzz/fuzz.h"

#include <stdio.h>
#include <string.h>

enum form { FORM_ABSENT, FORM_I64, FORM_F64, FORM_STR };

struct value {
    enum form form;
    int32_t code; // what the getters answer instead, 0: what the form says
    int64_t i64;
    double f64;
    char text[CONFIG_TEXT_BYTES];
    uint64_t length; // what get_str claims
};

struct table {
    struct value values[KEY_COUNT];
    int32_t next; // the key that is probably asked for next
};

// ---- The host ----------------------------------------------------------------------------------

static const struct value *look_up(void *ctx, const char *key)
{
    struct table *table = ctx;

    for (int32_t i = 0; i < KEY_COUNT; i++) {
        int32_t at = (table->next + i) % KEY_COUNT;

        if (strcmp(config_name((enum config_key)at), key) != 0) continue;
        table->next = at + 1;
        return &table->values[at];
    }
    fuzz_broken("a key of the table of keys", __FILE__, __LINE__);
}

static int32_t answer(const struct value *value, enum form form)
{
    if (value->form == FORM_ABSENT) return MOXIE_CONFIG_ABSENT;
    if (value->code != 0) return value->code;
    return value->form == form ? MOXIE_CONFIG_FOUND : MOXIE_CONFIG_WRONG_TYPE;
}

// A host that does not answer FOUND may have written all the same.
static int32_t get_i64(void *ctx, const char *key, int64_t *to)
{
    const struct value *value = look_up(ctx, key);

    *to = value->i64;
    return answer(value, FORM_I64);
}

static int32_t get_f64(void *ctx, const char *key, double *to)
{
    const struct value *value = look_up(ctx, key);

    *to = value->f64;
    return answer(value, FORM_F64);
}

static int32_t get_str(void *ctx, const char *key, char *text, uint64_t capacity, uint64_t *length)
{
    const struct value *value = look_up(ctx, key);

    PROPERTY(capacity == CONFIG_TEXT_BYTES);
    memcpy(text, value->text, capacity);
    *length = value->length;
    return answer(value, FORM_STR);
}

// ---- Tables ------------------------------------------------------------------------------------

static void set_i64(struct table *table, enum config_key key, int64_t i64)
{
    table->values[key] = (struct value){.form = FORM_I64, .i64 = i64};
}

static void set_word(struct table *table, enum config_key key, int32_t number)
{
    struct value *value = &table->values[key];

    *value = (struct value){.form = FORM_STR};
    config_word_text(key, number, value->text);
    value->length = strlen(value->text);
}

// Something that works, so that one odd key is seen for itself.
static void table_begin(struct table *table, uint8_t base)
{
    memset(table, 0, sizeof *table);
    if ((base & 3) == 3) return;
    set_i64(table, KEY_HIDDEN_SIZE, 64);
    set_i64(table, KEY_INTERMEDIATE_SIZE, 96);
    set_i64(table, KEY_NUM_EXPERTS, 8);
    set_i64(table, KEY_TOP_K, 2);
    set_i64(table, KEY_MAX_PREFILL_TOKENS, 32);
    if ((base & 3) == 0) return;
    set_i64(table, KEY_DP_SIZE, 4);
    set_i64(table, KEY_TP_SIZE, 4);
    set_i64(table, KEY_EP_SIZE, 4);
    set_i64(table, KEY_EP_RANK, base >> 2 & 3);
    if ((base & 3) == 1) return;
    set_i64(table, KEY_FORWARDS_IN_FLIGHT_MAX, 2);
    set_i64(table, KEY_DISPATCH_ROUNDS_MAX, 4);
    set_i64(table, KEY_CAPTURE_ROUTED_EXPERTS, 1);
    set_word(table, KEY_DISPATCH_FORMAT, DISPATCH_FP8_BLOCK128);
}

static void take_words(struct fuzz_input *input, enum config_key key, struct value *value)
{
    static const char *const names[] = {"auto",     "moxie_cpu", "local", "allgather",
                                        "alltoall", "none",      "",      "moxie_cuda"};

    value->form = FORM_STR;
    if (config_words(key)[0] != '\0')
        config_word_text(key, (int32_t)fuzz_below(input, FORMAT_COUNT), value->text);
    else
        (void)snprintf(value->text, sizeof value->text, "%s",
                       names[fuzz_below(input, sizeof names / sizeof names[0])]);
    value->length = strlen(value->text);
}

static void take_value(struct fuzz_input *input, enum config_key key, struct value *value)
{
    uint8_t form = fuzz_u8(input);
    uint64_t bytes;

    memset(value, 0, sizeof *value);
    switch (form & 7) {
    case 0:
    case 1:
        value->form = FORM_I64;
        value->i64 = fuzz_i64(input);
        break;
    case 2:
        value->form = FORM_I64;
        value->i64 = (int64_t)1 << fuzz_below(input, 63);
        break;
    case 3:
        value->form = FORM_F64;
        bytes = fuzz_u64(input);
        memcpy(&value->f64, &bytes, sizeof bytes);
        break;
    case 4:
    case 5:
        take_words(input, key, value);
        break;
    case 6:
        value->form = FORM_STR;
        fuzz_bytes(input, value->text, fuzz_u8(input) % (sizeof value->text + 1));
        value->length = strnlen(value->text, sizeof value->text);
        if ((form & 8) != 0) value->length = (uint64_t)fuzz_i64(input);
        break;
    default: // absent
        break;
    }
    if ((form & 0xf0) == 0xf0) value->code = (int32_t)fuzz_i64(input);
}

static void table_take(struct fuzz_input *input, struct table *table)
{
    table_begin(table, fuzz_u8(input));
    while (input->left > 0) {
        enum config_key key = (enum config_key)fuzz_below(input, KEY_COUNT);

        take_value(input, key, &table->values[key]);
    }
}

// ---- Properties --------------------------------------------------------------------------------

static int key_known(const char *key)
{
    for (int32_t i = 0; i < KEY_COUNT; i++)
        if (config_name((enum config_key)i) == key) return 1;
    return 0;
}

static void check_reasons(const moxie_reason *reasons, uint64_t count, int warnings)
{
    for (uint64_t i = 0; i < count; i++) {
        PROPERTY(reasons[i].struct_size == sizeof reasons[i] && key_known(reasons[i].key));
        PROPERTY((reasons[i].code == MOXIE_OK) == warnings);
        PROPERTY(reasons[i].name != NULL && reasons[i].message[0] != '\0');
    }
}

static void check_buffers(const moxie_instance *instance, const moxie_plan *plan)
{
    uint64_t sums[MOXIE_MEMORY_HOST + 1] = {0};

    PROPERTY(plan->buffers_count > 0 && plan->buffers_count <= BUFFER_COUNT);
    for (uint64_t i = 0; i < plan->buffers_count; i++) {
        const moxie_buffer *buffer = &plan->buffers[i];
        int32_t id = instance->plan.buffer_ids[i];

        PROPERTY(buffer->kind >= MOXIE_MEMORY_DEVICE && buffer->kind <= MOXIE_MEMORY_HOST);
        PROPERTY(buffer->bytes > 0 && buffer->bytes <= buffer->bytes_mapped);
        PROPERTY(buffer->align > 0 && (buffer->align & (buffer->align - 1)) == 0);
        PROPERTY(buffer->name[0] != '\0' && buffer->why[0] != '\0');
        PROPERTY(id >= 0 && id < BUFFER_COUNT && instance->plan.slot_bytes[id] > 0);
        PROPERTY((uint64_t)instance->plan.slot_bytes[id] <= buffer->bytes);
        for (uint64_t j = 0; j < i; j++)
            PROPERTY(instance->plan.buffer_ids[j] != id);
        PROPERTY(
            !__builtin_add_overflow(sums[buffer->kind], buffer->bytes_mapped, &sums[buffer->kind]));
    }
    PROPERTY(plan->device_bytes == sums[MOXIE_MEMORY_DEVICE]);
    PROPERTY(plan->symmetric_bytes == sums[MOXIE_MEMORY_SYMMETRIC]);
    PROPERTY(plan->pinned_bytes == sums[MOXIE_MEMORY_PINNED]);
    PROPERTY(plan->host_bytes == sums[MOXIE_MEMORY_HOST]);
    for (int32_t kind = MOXIE_MEMORY_DEVICE; kind <= MOXIE_MEMORY_HOST; kind++)
        PROPERTY(sums[kind] <= (uint64_t)1 << 62);
}

// Every slab lies behind the one before it, inside the window.
static void check_window(const moxie_instance *instance)
{
    const struct window_layout *window = &instance->plan.window;
    int64_t peers = instance->plan.limits.ranks - 1;
    const int64_t starts[] = {window->rows,    window->scales, window->ids,        window->weights,
                              window->results, window->ll,     window->ll_results, window->bytes};
    const int64_t slabs[] = {window->rows_slab_bytes,      window->scales_slab_bytes,
                             window->ids_slab_bytes,       window->weights_slab_bytes,
                             window->results_slab_bytes,   window->ll_slab_bytes,
                             window->ll_results_slab_bytes};

    PROPERTY(window->counts > 0 && window->counts <= window->rows);
    for (int i = 0; i < 7; i++)
        PROPERTY(starts[i] + slabs[i] * peers == starts[i + 1]);
    PROPERTY(window->bytes <= instance->plan.slot_bytes[BUFFER_WINDOW]);
    PROPERTY(window->ll_rows >= 0 && window->ll_rows <= instance->plan.limits.rows_cap);
}

static void check_limits(const moxie_instance *instance)
{
    const struct limits *limits = &instance->plan.limits;
    const struct bounds *bounds = &instance->bounds;

    PROPERTY(limits->hidden >= 1 && limits->layers >= 1);
    PROPERTY(limits->computes ? limits->intermediate >= 1 : limits->intermediate == 0);
    PROPERTY(limits->top_k >= 1 && limits->top_k <= MOXIE_TOP_K_MAX);
    PROPERTY(limits->ranks >= 1 && limits->ranks <= MOXIE_RANKS_MAX);
    PROPERTY(limits->rank >= 0 && limits->rank < limits->ranks);
    PROPERTY(limits->slots >= 1 && limits->slots <= MOXIE_SLOTS_MAX && limits->threads >= 1);
    PROPERTY(limits->experts_first >= 0 && limits->experts_local >= 0);
    PROPERTY(limits->experts_first + limits->experts_local <= limits->physical_experts);
    PROPERTY(limits->tokens_max >= 1 && limits->forward_tokens_max >= 1);
    PROPERTY(limits->rows_cap == limits->tokens_max && limits->rows_cap <= limits->rows_max);
    PROPERTY(limits->pairs_max == limits->rows_max * limits->top_k);
    PROPERTY(limits->pairs_max <= INT32_MAX && limits->timeout_ms >= 1);
    PROPERTY(bounds->forward_tokens >= 1);
    PROPERTY(limits->row_bytes % 128 == 0 && limits->result_bytes % 128 == 0);
    if (limits->dispatcher != DISPATCHER_LOCAL) check_window(instance);
}

// What one call may bring is promised to the host.
static void check_calls(const struct limits *limits, const moxie_bounds *bounds)
{
    PROPERTY(bounds->dispatch_call_tokens_max >= 1 && bounds->forward_call_tokens_max >= 1);
    PROPERTY(bounds->dispatch_call_tokens_max <= limits->tokens_max);
    PROPERTY(bounds->dispatch_call_tokens_max <= limits->forward_tokens_max);
    PROPERTY(bounds->forward_call_tokens_max == limits->forward_tokens_max);
    PROPERTY(bounds->experts_local >= 0 && bounds->expert_first >= 0);
}

static void check_budget(const moxie_instance *instance, const moxie_plan *plan)
{
    int64_t budget = config_i64(&instance->config, KEY_DEVICE_MEMORY_BUDGET_BYTES);

    if (budget > 0) PROPERTY(plan->device_bytes + plan->symmetric_bytes <= (uint64_t)budget);
}

static void check_instance(const moxie_instance *instance)
{
    char text[256];
    moxie_error error = {.struct_size = sizeof error, .text_bytes = sizeof text, .text = text};
    const moxie_report *report = NULL;
    const moxie_plan *plan = NULL;
    int32_t st;

    PROPERTY(instance_validate(instance, &report) == MOXIE_OK && report != NULL);
    check_reasons(report->reasons, report->reasons_count, 0);
    check_reasons(report->warnings, report->warnings_count, 1);
    st = instance_plan(instance, &plan, &error);
    PROPERTY(plan != NULL && plan->bounds->struct_size == sizeof *plan->bounds);
    PROPERTY(st == (report->reasons_count == 0 ? MOXIE_OK : MOXIE_E_CONFIG));
    if (st != MOXIE_OK) {
        PROPERTY(memchr(text, 0, sizeof text) != NULL && text[0] != '\0');
        PROPERTY(plan->buffers_count == 0 && plan->device_bytes == 0);
        return;
    }
    check_buffers(instance, plan);
    check_limits(instance);
    check_calls(&instance->plan.limits, plan->bounds);
    check_budget(instance, plan);
}

// The same table gives the same answer, and what the snapshot prints is text.
static void check_same(const moxie_instance *first, const moxie_instance *second)
{
    const moxie_plan *a = &first->public_plan, *b = &second->public_plan;

    PROPERTY(first->report.reasons_count == second->report.reasons_count);
    PROPERTY(first->report.warnings_count == second->report.warnings_count);
    for (uint64_t i = 0; i < first->report.reasons_count; i++)
        PROPERTY(strcmp(first->report.reasons[i].message, second->report.reasons[i].message) == 0);
    PROPERTY(memcmp(&first->public_bounds, &second->public_bounds, sizeof(moxie_bounds)) == 0);
    PROPERTY(a->buffers_count == b->buffers_count && a->device_bytes == b->device_bytes);
    PROPERTY(memcmp(&first->plan.limits, &second->plan.limits, sizeof(struct limits)) == 0);
    for (uint64_t i = 0; i < a->buffers_count; i++)
        PROPERTY(memcmp(&a->buffers[i], &b->buffers[i], sizeof(moxie_buffer)) == 0);
    for (uint64_t key = 0; key < KEY_COUNT; key++) {
        moxie_config_entry entry, other;

        PROPERTY(instance_config(first, key, &entry) == MOXIE_OK);
        PROPERTY(instance_config(second, key, &other) == MOXIE_OK);
        PROPERTY(strcmp(entry.value, other.value) == 0 && entry.found == other.found);
        PROPERTY(strlen(entry.value) < CONFIG_TEXT_BYTES);
    }
}

static moxie_instance *open_table(struct table *table)
{
    static const struct registry nobody;
    const moxie_host host = {.struct_size = sizeof host,
                             .ctx = table,
                             .get_i64 = get_i64,
                             .get_f64 = get_f64,
                             .get_str = get_str};
    moxie_instance *instance = NULL;

    PROPERTY(instance_open(&host, &nobody, &instance, NULL) == MOXIE_OK && instance != NULL);
    return instance;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input input = {data, size};
    static struct table table;
    moxie_instance *instance;
    uint8_t twice = fuzz_u8(&input);

    table_take(&input, &table);
    instance = open_table(&table);
    check_instance(instance);
    // Costs as much again, so not every input asks for it.
    if ((twice & 3) == 0) {
        moxie_instance *second = open_table(&table);

        check_same(instance, second);
        (void)instance_close(second, NULL);
    }
    (void)instance_close(instance, NULL);
    return 0;
}
