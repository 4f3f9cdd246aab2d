// The rooms that read tensors, with the kernels behind them: a small real layer on one rank, run
// with tensors of any shape, stride, type and alignment.

#include "plugin/dispatcher.h"
#include "plugin/forward.h"
#include "plugin/instance.h"
#include "plugin/routing.h"
#include "plugin/rows.h"
#include "plugin/runner.h"
#include "plugin/step.h"
#include "plugin/tensor.h"

#include "host_tests/fuzz/tensors.h"

#include <string.h>

#define HIDDEN       32
#define INTERMEDIATE 16
#define EXPERTS      4
#define TOP_K        2
#define TOKENS       8
#define LAYERS       2
#define SLABS_MAX    4

// ---- The layer ---------------------------------------------------------------------------------

static int32_t get_i64(void *ctx, const char *key, int64_t *value)
{
    static const struct {
        const char *key;
        int64_t value;
    } values[] = {
        {"hidden_size", HIDDEN}, {"intermediate_size", INTERMEDIATE}, {"num_experts", EXPERTS},
        {"top_k", TOP_K},        {"max_prefill_tokens", TOKENS},      {"num_layers", LAYERS},
        {"cpu_threads", 1},      {"capture_routed_experts", 1},       {"forwards_in_flight_max", 2},
    };

    (void)ctx;
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        if (strcmp(values[i].key, key) != 0) continue;
        *value = values[i].value;
        return MOXIE_CONFIG_FOUND;
    }
    return MOXIE_CONFIG_ABSENT;
}

static int32_t get_f64(void *ctx, const char *key, double *value)
{
    (void)ctx;
    (void)key;
    (void)value;
    return MOXIE_CONFIG_ABSENT;
}

static int32_t get_str(void *ctx, const char *key, char *text, uint64_t capacity, uint64_t *length)
{
    static const char f32[] = "f32";

    (void)ctx;
    if (strcmp(key, "weight_format") != 0 && strcmp(key, "output_format") != 0)
        return MOXIE_CONFIG_ABSENT;
    PROPERTY(capacity >= sizeof f32);
    memcpy(text, f32, sizeof f32);
    *length = sizeof f32 - 1;
    return MOXIE_CONFIG_FOUND;
}

struct layer {
    moxie_instance *instance;
    moxie_runner *runner;
    moxie_dispatcher *dispatcher;
};

static void layer_begin(struct layer *layer)
{
    static const struct registry nobody;
    static const moxie_host host = {
        .struct_size = sizeof host, .get_i64 = get_i64, .get_f64 = get_f64, .get_str = get_str};
    static float gate_up[EXPERTS * 2 * INTERMEDIATE * HIDDEN],
        down[EXPERTS * HIDDEN * INTERMEDIATE];
    static int64_t shapes[2][3] = {{EXPERTS, 2 * INTERMEDIATE, HIDDEN},
                                   {EXPERTS, HIDDEN, INTERMEDIATE}};
    moxie_matrix w1 = {.struct_size = sizeof w1,
                       .format = MOXIE_FORMAT_F32,
                       .order = MOXIE_ORDER_GATE_UP,
                       .values = tensor_make(gate_up, 3, shapes[0], NULL, 1u << MOXIE_FORMAT_F32)};
    moxie_matrix w2 = {.struct_size = sizeof w2,
                       .format = MOXIE_FORMAT_F32,
                       .values = tensor_make(down, 3, shapes[1], NULL, 1u << MOXIE_FORMAT_F32)};
    moxie_weights weights = {.struct_size = sizeof weights, .w1 = &w1, .w2 = &w2};

    for (size_t i = 0; i < sizeof gate_up / sizeof gate_up[0]; i++)
        gate_up[i] = (float)(i % 7) - 3.0f;
    for (size_t i = 0; i < sizeof down / sizeof down[0]; i++)
        down[i] = (float)(i % 5) - 2.0f;
    PROPERTY(instance_open(&host, &nobody, &layer->instance, NULL) == MOXIE_OK);
    PROPERTY(runner_create(layer->instance, 0, &weights, &layer->runner, NULL) == MOXIE_OK);
    PROPERTY(dispatcher_create(layer->instance, DISPATCHER_LOCAL, &layer->dispatcher, NULL) ==
             MOXIE_OK);
}

// ---- Rows --------------------------------------------------------------------------------------

struct rows {
    moxie_rows rows;
    moxie_slab slabs[SLABS_MAX];
};

static void take_payload(struct maker *maker, moxie_slab *slab, int32_t layout, int64_t cap)
{
    static const enum type payloads[] = {BF16, F32, F16, E4M3, U8, U8};
    uint32_t which = fuzz_below(maker->input, 6);
    int masked = layout == MOXIE_LAYOUT_EXPERT_MASKED;
    int64_t rows[3] = {EXPERTS, cap, which == 5 ? HIDDEN / 2 : HIDDEN};
    int64_t scales[3] = {EXPERTS, cap, which == 5 ? 4 + HIDDEN / 16 : 1};

    slab->rows = take_tensor(maker, rows + !masked, 2 + masked, payloads[which]);
    slab->scales = which >= 3
                       ? take_tensor(maker, scales + !masked, 2 + masked, which == 5 ? U8 : F32)
                       : no_tensor();
}

static void take_slab(struct maker *maker, moxie_slab *slab, int32_t layout, int out)
{
    int64_t cap = 1 + fuzz_below(maker->input, TOKENS);
    int64_t places[3] = {cap, TOP_K, 0}, experts[2] = {EXPERTS, cap};
    int by_expert = layout >= MOXIE_LAYOUT_EXPERT_CONTIGUOUS;
    int masked = layout == MOXIE_LAYOUT_EXPERT_MASKED;
    static const enum type floats[] = {F32, BF16, F16};

    memset(slab, 0, sizeof *slab);
    slab->struct_size = sizeof *slab;
    if (by_expert) cap *= TOP_K;
    experts[1] = cap;
    take_payload(maker, slab, layout, cap);
    if (out && !by_expert) return;
    if (by_expert) {
        slab->weights = fuzz_u8(maker->input) < 32
                            ? no_tensor()
                            : take_tensor(maker, experts + !masked, 1 + masked, F32);
        return;
    }
    slab->ids = take_tensor(maker, places, 2, fuzz_u8(maker->input) < 128 ? I32 : I64);
    slab->weights = take_tensor(maker, places, 2, floats[fuzz_below(maker->input, 3)]);
}

static void take_rows(struct maker *maker, struct rows *rows, int out)
{
    struct fuzz_input *input = maker->input;
    uint8_t form = fuzz_u8(input);
    int32_t layout = MOXIE_LAYOUT_STANDARD + (form & 3);
    uint32_t count = layout == MOXIE_LAYOUT_RANK_MAJOR ? 1 + (form >> 2 & 3) : 1;
    int64_t counts = layout == MOXIE_LAYOUT_EXPERT_CONTIGUOUS ? EXPERTS + 1
                     : layout == MOXIE_LAYOUT_EXPERT_MASKED   ? EXPERTS
                                                              : count;
    int64_t map = fuzz_below(input, 8);

    rows->rows = (moxie_rows){.struct_size = sizeof rows->rows,
                              .layout = layout,
                              .id_space = MOXIE_IDS_GLOBAL + (form >> 4) % 3,
                              .slabs_count = count,
                              .slab_stride = sizeof(moxie_slab),
                              .slabs = rows->slabs};
    for (uint32_t i = 0; i < count; i++)
        take_slab(maker, &rows->slabs[i], layout, out);
    rows->rows.counts = (form & 0x80) != 0 ? no_tensor() : take_tensor(maker, &counts, 1, I32);
    rows->rows.expert_map = map == 0 ? no_tensor() : take_tensor(maker, &map, 1, I32);
}

// Every number that kernels will trust.
static void check_view(const struct rows_view *view, const struct limits *limits)
{
    PROPERTY(view->slabs_count >= 1 && view->slabs_count <= MOXIE_RANKS_MAX);
    PROPERTY(view->pairs_max >= 0 && view->pairs_max <= limits->pairs_max);
    PROPERTY(view->rows_cap >= 0 && view->rows_per_expert >= 0 && view->map_count >= 0);
    PROPERTY(view->by == ROUTE_BY_IDS || view->expert_counts != NULL);
    for (int32_t i = 0; i < view->slabs_count; i++) {
        const struct row_slab *slab = &view->slabs[i];

        PROPERTY(slab->cap >= 0 && slab->cap <= view->rows_cap);
        PROPERTY(slab->row_stride_bytes >= 0 && slab->id_stride_bytes >= 0);
        if (slab->cap == 0) continue;
        PROPERTY(slab->rows != NULL);
        PROPERTY(view->by != ROUTE_BY_IDS || (slab->ids != NULL && slab->weights != NULL));
        PROPERTY(view->by != ROUTE_BY_IDS || slab->id_bytes == 4 || slab->id_bytes == 8);
    }
}

static int32_t try_run(const struct layer *layer, struct maker *maker, moxie_error *error)
{
    struct rows in, out;
    struct rows_view view;
    struct out_view results;
    const struct limits *limits = &layer->instance->plan.limits;
    moxie_call call = {.struct_size = sizeof call,
                       .slot = (int32_t)fuzz_below(maker->input, 3),
                       .layer = (int32_t)fuzz_below(maker->input, 3)};
    int32_t st;

    take_rows(maker, &in, 0);
    take_rows(maker, &out, 1);
    st = rows_read(&in.rows, limits, (moxie_device){MOXIE_DEVICE_CPU, 0}, "", &view, error);
    if (st != MOXIE_OK) return st;
    check_view(&view, limits);
    st = rows_out(&out.rows, &view, limits, (moxie_device){MOXIE_DEVICE_CPU, 0}, &results, error);
    if (st != MOXIE_OK || maker->absent) return st;
    return runner_run(layer->runner, &call, &in.rows, &out.rows, error);
}

static int32_t try_expand(const struct layer *layer, struct maker *maker, moxie_error *error)
{
    struct rows in, out;
    struct rows_view view;
    int64_t places[2] = {1 + fuzz_below(maker->input, TOKENS), TOP_K};
    moxie_call call = {.struct_size = sizeof call};
    moxie_tensor index;
    int fold = fuzz_u8(maker->input) & 1;
    int32_t st;

    take_rows(maker, &in, 0);
    take_rows(maker, &out, 1);
    index = take_tensor(maker, places, 2, I32);
    if (maker->absent) {
        st = rows_read(&in.rows, &layer->instance->plan.limits, (moxie_device){MOXIE_DEVICE_CPU, 0},
                       "", &view, error);
        if (st == MOXIE_OK) check_view(&view, &layer->instance->plan.limits);
        return st;
    }
    if (fold) return runner_fold(layer->runner, &call, &in.rows, &index, &out.rows, error);
    return runner_expand(layer->runner, &call, &in.rows, &out.rows, &index, error);
}

// ---- Steps -------------------------------------------------------------------------------------

static moxie_step take_step(struct fuzz_input *input)
{
    moxie_step step = {.struct_size = sizeof step,
                       .slot = (int32_t)fuzz_below(input, 3),
                       .tokens =
                           fuzz_u8(input) < 192 ? fuzz_below(input, TOKENS + 2) : fuzz_i64(input),
                       .padding = (int32_t)fuzz_below(input, 4),
                       .phase = (int32_t)fuzz_below(input, 5),
                       .capture_row = fuzz_u8(input) < 128 ? 0 : fuzz_i64(input)};

    if (fuzz_u8(input) >= 128) step.tokens_valid = fuzz_taken(input, sizeof(int32_t));
    if (fuzz_u8(input) >= 128) step.rank_tokens = fuzz_taken(input, sizeof(int64_t));
    return step;
}

static moxie_batch take_batch(struct maker *maker, const moxie_step *step)
{
    struct fuzz_input *input = maker->input;
    int64_t tokens = step->tokens >= 0 && step->tokens <= TOKENS ? step->tokens : 1;
    int64_t rows[2] = {tokens, HIDDEN}, places[2] = {tokens, TOP_K}, map = fuzz_below(input, 8);
    static const enum type floats[] = {F32, BF16, F16};
    moxie_batch batch = {.struct_size = sizeof batch,
                         .slot = fuzz_u8(input) < 224 ? step->slot : 1,
                         .layer = (int32_t)fuzz_below(input, LAYERS + 1),
                         .id_space = (int32_t)fuzz_below(input, 5)};

    batch.x = take_tensor(maker, rows, 2, BF16);
    batch.ids = take_tensor(maker, places, 2, fuzz_u8(input) < 128 ? I32 : I64);
    batch.weights = take_tensor(maker, places, 2, floats[fuzz_below(input, 3)]);
    batch.y = take_tensor(maker, rows, 2, F32);
    if (fuzz_u8(input) == 0xff) batch.y.data = batch.x.data;
    if (map > 0) batch.expert_map = take_tensor(maker, &map, 1, I32);
    return batch;
}

static int32_t try_step(const struct layer *layer, struct maker *maker, moxie_error *error)
{
    moxie_step step = take_step(maker->input);
    moxie_batch batch = take_batch(maker, &step);
    const struct limits *limits = &layer->instance->plan.limits;
    struct step_shape shape;
    int32_t st = step_check(layer->instance, 1, &step, &shape, error);

    if (st != MOXIE_OK) return st;
    PROPERTY(shape.tokens >= 0 && shape.tokens <= TOKENS && shape.tokens_most == shape.tokens);
    PROPERTY(shape.capture_row >= 0 &&
             shape.capture_row + shape.tokens <= limits->dp_size * limits->capture_tokens);
    st = step_check_batch(layer->instance, 1, shape.tokens, &batch, error);
    if (st != MOXIE_OK || maker->absent) return st;
    // y would end outside its bytes.
    if (batch.y.data == batch.x.data) return st;
    st = dispatcher_begin_forward(layer->dispatcher, &step, error);
    PROPERTY(st == MOXIE_OK);
    return forward_run(layer->dispatcher, layer->runner, &batch, error);
}

// ---- Routing -----------------------------------------------------------------------------------

static int32_t try_route(const struct layer *layer, struct maker *maker, moxie_error *error)
{
    struct fuzz_input *input = maker->input;
    static const enum type floats[] = {F32, BF16, F16};
    int64_t tokens = fuzz_below(input, TOKENS), experts = 1 + fuzz_below(input, 16);
    int64_t scores[2] = {tokens, experts}, places[2] = {tokens, 1 + fuzz_below(input, 8)};
    moxie_routing routing = {.struct_size = sizeof routing,
                             .scoring = 1 + (int32_t)fuzz_below(input, 4),
                             .renormalize = fuzz_u8(input) & 1,
                             .groups = (int32_t)fuzz_i64(input),
                             .groups_top = (int32_t)fuzz_i64(input)};
    moxie_tensor logits, ids, weights;

    (void)layer;
    if ((fuzz_u8(input) & 3) == 3) {
        fuzz_bytes(input, &routing.renormalize_epsilon, sizeof(double));
        fuzz_bytes(input, &routing.scaling_factor, sizeof(double));
    }
    if ((fuzz_u8(input) & 1) == 1) routing.correction_bias = take_tensor(maker, &experts, 1, F32);
    logits = take_tensor(maker, scores, 2, floats[fuzz_below(input, 3)]);
    ids = take_tensor(maker, places, 2, fuzz_u8(input) < 128 ? I32 : I64);
    weights = take_tensor(maker, places, 2, F32);
    if (maker->absent) {
        struct tensor_want want = {.name = "t", .shape = {-1, -1}, .ndim = 2, .device = {1, 0}};

        want.types = TENSOR_FORMATS_FLOAT;
        return tensor_check(&logits, &want, error);
    }
    return routing_route(&routing, &logits, &ids, &weights, NULL, error);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int32_t (*const attempts[])(const struct layer *, struct maker *,
                                       moxie_error *) = {try_run, try_expand, try_step, try_route};
    static struct layer layer;
    struct fuzz_input input = {data, size};
    struct maker maker = {.input = &input};
    char text[128] = "";
    moxie_error error = {.struct_size = sizeof error, .text_bytes = sizeof text, .text = text};
    int32_t st;

    if (layer.instance == NULL) layer_begin(&layer);
    fuzz_reset();
    st = attempts[fuzz_u8(&input) & 3](&layer, &maker, &error);
    PROPERTY(st >= MOXIE_OK && st <= MOXIE_E_INTERNAL && st != MOXIE_E_INTERNAL);
    PROPERTY(st == MOXIE_OK || (error.code == st && text[0] != '\0'));
    return 0;
}
