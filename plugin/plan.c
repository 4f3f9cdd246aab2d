// The plan. Every buffer is pieces of rows of bytes: one piece per forward in flight, so that
// overlapping forwards share nothing. All layers of an instance share one pool.

#include "plugin/plan.h"

#include "kernels/cpu/cpu.h"
#include "kernels/layer.h"
#include "kernels/route.h"
#include "plugin/backends.h"
#include "plugin/transport.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#define SCALE_ALIGN_BYTES 16
#define PAGE_BYTES        4096               // what shared memory is aligned to at least
#define DEVICE_PAGE_BYTES ((int64_t)2 << 20) // a GPU's is aligned to and mapped in more

// What Moxie's part needs where the runner is the host's own.
#define EXPAND_BUFFERS                                                                             \
    (1u << BUFFER_EXPERT_OFFSET | 1u << BUFFER_PAIR_ROW | 1u << BUFFER_PAIR_WEIGHT |               \
     1u << BUFFER_ROW_PAIR | 1u << BUFFER_ROUTE_SCRATCH)

struct planner {
    struct plan *plan;
    const struct config *config;
    const struct bounds *bounds;
    struct report *report;
};

// One buffer before it is entered: `slots` pieces of rows x row_bytes. `columns_key` is what a
// row's size comes from.
struct request {
    enum buffer_id id;
    int32_t kind;
    const char *name;
    const char *why;
    int64_t pieces, rows, row_bytes;
    enum config_key columns_key;
};

// ---- Rows --------------------------------------------------------------------------------------

struct shape {
    int64_t tokens_max, forward_tokens_max, rows_cap, slabs;
};

static const struct backend *dispatcher_of(const struct config *config)
{
    return backend_find(BACKEND_DISPATCHER, config_str(config, KEY_DISPATCHER),
                        config_str(config, KEY_DEVICE));
}

static struct shape shape_of(const struct config *config, const struct bounds *bounds,
                             enum dispatcher_kind kind)
{
    int64_t ep_size = config_i64(config, KEY_EP_SIZE);
    struct shape shape = {.slabs = ep_size};

    if (kind == DISPATCHER_LOCAL) {
        // The host brings the tokens of all DP ranks, padded as it gathers them.
        shape.slabs = 1;
        shape.tokens_max = bounds->gather_rows;
        shape.forward_tokens_max = shape.tokens_max;
    } else if (kind == DISPATCHER_ALLGATHER) {
        shape.tokens_max = bounds->dispatch_required;
        shape.forward_tokens_max = shape.tokens_max;
    } else {
        shape.tokens_max = bounds->dispatch_tokens;
        shape.forward_tokens_max = bounds->dispatch_required;
    }
    shape.rows_cap = shape.tokens_max;
    return shape;
}

int64_t plan_rows_max(const struct config *config, const struct bounds *bounds)
{
    const struct backend *dispatcher = dispatcher_of(config);
    struct shape shape;
    int64_t rows;

    if (dispatcher == NULL) return -1;
    shape = shape_of(config, bounds, (enum dispatcher_kind)dispatcher->id);
    if (shape.rows_cap < 0 || !size_mul(shape.rows_cap, shape.slabs, &rows)) return -1;
    return rows;
}

// Bytes of a row of `columns` of a format, without its scales.
static int64_t row_bytes_of(int32_t format, int64_t columns)
{
    switch (format) {
    case FORMAT_F32:
        return columns * 4;
    case FORMAT_BF16:
    case FORMAT_F16:
        return columns * 2;
    case FORMAT_NVFP4:
        return ceil_div(columns, 2);
    default:
        return columns;
    }
}

static int64_t scale_bytes_of(int32_t format, int64_t columns)
{
    if (format == FORMAT_FP8_BLOCK128) return ceil_div(columns, 128) * 4;
    if (format == FORMAT_NVFP4) return 4 + ceil_div(columns, NVFP4_GROUP);
    return 0;
}

static int64_t pitch(int64_t bytes, int64_t align)
{
    return (bytes + align - 1) & ~(align - 1);
}

// ---- Limits ------------------------------------------------------------------------------------

static int32_t wire_format_of(const struct config *config, enum dispatcher_kind kind)
{
    if (kind != DISPATCHER_LOCAL && config_i64(config, KEY_EP_SIZE) > 1) {
        switch (config_word(config, KEY_DISPATCH_FORMAT)) {
        case DISPATCH_FP8_BLOCK128:
            return FORMAT_FP8_BLOCK128;
        case DISPATCH_NVFP4:
            return FORMAT_NVFP4;
        default:
            break;
        }
    }
    return config_word(config, KEY_INPUT_FORMAT);
}

static void limits_formats(struct limits *limits, const struct config *config)
{
    const struct backend *runner = backend_find(BACKEND_RUNNER, config_str(config, KEY_RUNNER),
                                                config_str(config, KEY_DEVICE));

    limits->activation = config_word(config, KEY_ACTIVATION);
    limits->alpha = (float)config_f64(config, KEY_ACTIVATION_ALPHA);
    limits->beta = (float)config_f64(config, KEY_ACTIVATION_BETA);
    limits->limit = (float)config_f64(config, KEY_ACTIVATION_LIMIT);
    limits->scaling_factor = (float)config_f64(config, KEY_ROUTED_SCALING_FACTOR);
    limits->weight_format = config_word(config, KEY_WEIGHT_FORMAT);
    limits->operand_format = config_word(config, KEY_ACTIVATION_FORMAT);
    limits->input_format = config_word(config, KEY_INPUT_FORMAT);
    limits->output_format = config_word(config, KEY_OUTPUT_FORMAT);
    limits->wire_format = wire_format_of(config, (enum dispatcher_kind)limits->dispatcher);
    limits->row_bytes = pitch(row_bytes_of(limits->wire_format, limits->hidden), PLAN_ALIGN_BYTES);
    limits->scale_bytes =
        pitch(scale_bytes_of(limits->wire_format, limits->hidden), SCALE_ALIGN_BYTES);
    limits->id_bytes = (int64_t)limits->top_k * 4;
    limits->weight_bytes = (int64_t)limits->top_k * 4;
    limits->result_bytes =
        pitch(row_bytes_of(limits->output_format, limits->hidden), PLAN_ALIGN_BYTES);
    limits->computes = runner == NULL || runner->traits != NULL;
    if (!limits->computes) return; // nor is intermediate_size judged: it may pass 32 bits
    limits->intermediate = (int32_t)config_i64(config, KEY_INTERMEDIATE_SIZE);
    limits->mid_format = limits->pair_format = FORMAT_F32;
    if (runner != NULL && runner->one_format)
        limits->mid_format = limits->pair_format = limits->operand_format;
    if (runner != NULL && runner->one_format && backend_weight_bits(limits->weight_format) == 4)
        limits->x_woven_bytes = pitch(gemms_woven_bytes(limits->hidden), PLAN_ALIGN_BYTES);
    if (runner != NULL && runner->one_format && limits->operand_format == FORMAT_FP8) {
        limits->mid_format = limits->pair_format = FORMAT_BF16;
        limits->x_fp8_bytes = pitch(limits->hidden, PLAN_ALIGN_BYTES);
        limits->mid_fp8_bytes = pitch(limits->intermediate, PLAN_ALIGN_BYTES);
        limits->x_fp8_groups = (int32_t)ceil_div(limits->hidden, 128);
        limits->mid_fp8_groups = (int32_t)ceil_div(limits->intermediate, 128);
        limits->fp8_group_bytes = pitch(limits->pairs_max * 4, SCALE_ALIGN_BYTES);
    } else {
        limits->mid_bytes =
            pitch(row_bytes_of(limits->mid_format, limits->intermediate), PLAN_ALIGN_BYTES);
    }
    limits->pair_bytes = pitch(row_bytes_of(limits->pair_format, limits->hidden), PLAN_ALIGN_BYTES);
}

static void limits_fill(struct limits *limits, const struct config *config,
                        const struct bounds *bounds, enum dispatcher_kind kind)
{
    struct shape shape = shape_of(config, bounds, kind);
    int64_t timeout_ms = config_i64(config, KEY_TIMEOUT_MS);
    int64_t threads = config_i64(config, KEY_CPU_THREADS); // judged where there is a pool

    limits->tokens_max = shape.tokens_max;
    limits->forward_tokens_max = shape.forward_tokens_max;
    limits->rows_cap = shape.rows_cap;
    limits->rows_max = shape.rows_cap * shape.slabs;
    limits->hidden = (int32_t)config_i64(config, KEY_HIDDEN_SIZE);
    limits->top_k = (int32_t)config_i64(config, KEY_TOP_K);
    limits->pairs_max = limits->rows_max * limits->top_k;
    limits->layers = (int32_t)config_i64(config, KEY_NUM_LAYERS);
    limits->physical_experts = (int32_t)bounds->physical_experts;
    limits->ranks = (int32_t)config_i64(config, KEY_EP_SIZE);
    limits->rank = (int32_t)config_i64(config, KEY_EP_RANK);
    limits->experts_first = experts_first(bounds->physical_experts, limits->ranks, limits->rank);
    limits->experts_local =
        (int32_t)(experts_first(bounds->physical_experts, limits->ranks, limits->rank + 1) -
                  limits->experts_first);
    limits->dp_size = (int32_t)config_i64(config, KEY_DP_SIZE);
    limits->attn_tp = (int32_t)bounds->attn_tp;
    limits->slots = (int32_t)config_i64(config, KEY_FORWARDS_IN_FLIGHT_MAX);
    limits->threads = threads < INT32_MAX ? (int32_t)threads : INT32_MAX;
    limits->dispatcher = (int32_t)kind;
    limits->weight_on_input = (int32_t)config_i64(config, KEY_APPLY_ROUTER_WEIGHT_ON_INPUT);
    limits->capture = (int32_t)config_i64(config, KEY_CAPTURE_ROUTED_EXPERTS);
    limits->expert_load = (int32_t)config_i64(config, KEY_COUNT_EXPERT_LOAD);
    // As many as the ranks that share a DP rank may bring when each pads its own share.
    limits->capture_tokens = limits->capture ? ceil_div(bounds->gather_rows, limits->dp_size) : 0;
    limits->timeout_ms = timeout_ms < INT32_MAX ? (int32_t)timeout_ms : INT32_MAX;
    limits->dispatch_sms = (int32_t)config_i64(config, KEY_DISPATCH_SMS);
    limits->staged = kind != DISPATCHER_LOCAL && limits->ranks > 1 &&
                     config_word(config, KEY_TRANSPORT) == TRANSPORT_NCCL;
    limits_formats(limits, config);
}

// ---- Buffers -----------------------------------------------------------------------------------

static uint64_t *total_of(struct plan *plan, int32_t kind)
{
    switch (kind) {
    case MOXIE_MEMORY_SYMMETRIC:
        return &plan->symmetric_bytes;
    case MOXIE_MEMORY_PINNED:
        return &plan->pinned_bytes;
    case MOXIE_MEMORY_HOST:
        return &plan->host_bytes;
    default:
        return &plan->device_bytes;
    }
}

static int on_cpu(const struct planner *planner)
{
    return config_word(planner->config, KEY_DEVICE) == DEVICE_WORD_CPU;
}

// Whether a buffer before has named this key: a plan begins without reasons against such.
static int is_named(const struct report *report, enum config_key key)
{
    for (uint64_t i = 0; i < report->reasons_count; i++)
        if (strcmp(report->reasons[i].key, config_name(key)) == 0) return 1;
    return 0;
}

// Says that a buffer's size passes 2^62, of each key once.
static void refuse_size(const struct planner *planner, const struct request *request)
{
    int64_t most = ((int64_t)1 << 52) / request->rows / request->pieces / 4;

    if (is_named(planner->report, request->columns_key)) return;
    report_reason(planner->report, MOXIE_E_CAPACITY, request->columns_key,
                  "%s: %" PRId64 " x %" PRId64 " rows of %" PRId64
                  " bytes pass 2^62: set %s to %" PRId64 " or less",
                  request->name, request->pieces, request->rows, request->row_bytes,
                  config_name(request->columns_key), most > INT32_MAX ? INT32_MAX : most);
}

// Enters a buffer whose pieces have `piece` bytes; 0 and a reason when its size passes 2^62.
static int piece_add(const struct planner *planner, const struct request *request, int64_t piece)
{
    struct plan *plan = planner->plan;
    int symmetric = request->kind == MOXIE_MEMORY_SYMMETRIC;
    int64_t align = on_cpu(planner) ? PAGE_BYTES : DEVICE_PAGE_BYTES;
    int64_t page = on_cpu(planner) ? TRANSPORT_PAGE_BYTES : DEVICE_PAGE_BYTES;
    int64_t granule = symmetric ? page : 1;
    uint64_t *total = total_of(plan, request->kind);
    int64_t bytes, mapped, sum;

    assert(plan->buffers_count < BUFFER_COUNT);
    if (!size_align(piece, request->pieces > 1 ? PLAN_ALIGN_BYTES : 1, &piece) ||
        !size_mul(piece, request->pieces, &bytes) || !size_align(piece, granule, &mapped) ||
        !size_mul(mapped, request->pieces, &mapped) || !size_add((int64_t)*total, mapped, &sum)) {
        refuse_size(planner, request);
        return 0;
    }
    plan->buffers[plan->buffers_count] = (moxie_buffer){
        .struct_size = sizeof(moxie_buffer),
        .kind = request->kind,
        .name = request->name,
        .bytes = (uint64_t)bytes,
        .bytes_mapped = (uint64_t)mapped,
        .align = symmetric ? (uint64_t)align : PLAN_ALIGN_BYTES,
        .why = request->why,
    };
    plan->buffer_ids[plan->buffers_count++] = (int32_t)request->id;
    plan->slot_bytes[request->id] = piece;
    *total = (uint64_t)sum;
    return 1;
}

static int buffer_add(const struct planner *planner, const struct request *request)
{
    int64_t piece;

    if (!size_mul(request->rows, request->row_bytes, &piece)) piece = INT64_MAX;
    return piece_add(planner, request, piece);
}

// Of the largest layer of few tokens that goes in one launch, those of other ranks among them.
static int64_t layer_choices(const struct limits *limits)
{
    const int matrices = limits->activation == ACTIVATION_RELU2 ? 2 : 3;
    const double expert_weights = (double)limits->hidden * limits->intermediate * matrices;
    const int64_t most = layer_tokens(expert_weights, limits->hidden,
                                      backend_weight_bits(limits->weight_format), limits->top_k);
    int64_t tokens = limits->ranks * (most < limits->rows_cap ? most : limits->rows_cap);

    if (tokens > LAYER_TOKENS) tokens = LAYER_TOKENS;
    if (tokens * limits->top_k > LAYER_POSITIONS) tokens = LAYER_POSITIONS / limits->top_k;
    return limits->top_k * tokens;
}

// Where the blocks that have half each of what has one scale meet.
static int64_t halves_places(const struct planner *planner)
{
    const struct limits *limits = &planner->plan->limits;

    if (on_cpu(planner) || limits->operand_format != FORMAT_FP8) return 0;
    if (limits->activation == ACTIVATION_RELU2) return 0; // one matrix, one tile
    return gemms_halves_places(limits->intermediate, limits->pairs_max);
}

static int runner_buffers(const struct planner *planner)
{
    const struct limits *limits = &planner->plan->limits;
    int64_t slots = limits->slots, choices = layer_choices(limits), halves = halves_places(planner);
    int64_t scratch_bytes = route_scratch_bytes(limits->pairs_max, limits->experts_local);
    const struct request requests[] = {
        {BUFFER_EXPERT_OFFSET, MOXIE_MEMORY_DEVICE, "expert_offset",
         "first pair of each local expert, int32", slots, (int64_t)limits->experts_local + 1, 4,
         KEY_NUM_EXPERTS},
        {BUFFER_GEMM_PROGRESS, MOXIE_MEMORY_DEVICE, "gemm_progress",
         "number of a launch of the GEMMs, tiles that blocks have begun, and ended of each expert, "
         "uint32",
         slots, (int64_t)limits->experts_local + GEMM_PROGRESS_WORDS, on_cpu(planner) ? 0 : 4,
         KEY_NUM_EXPERTS},
        {BUFFER_GEMM_HALVES, MOXIE_MEMORY_DEVICE, "gemm_halves",
         "halves of 128 numbers of mid_fp8 of few pairs, 16 bits, until a block has both", slots,
         halves, halves == 0 ? 0 : GEMMS_HALVES_PLACE_BYTES, KEY_INTERMEDIATE_SIZE},
        {BUFFER_LAYER_TURNS, MOXIE_MEMORY_DEVICE, "layer_turns",
         "turns that blocks took at whole layers of few tokens, uint64", slots, LAYER_TURNS,
         on_cpu(planner) ? 0 : 8, KEY_NUM_EXPERTS},
        {BUFFER_LAYER_MID, MOXIE_MEMORY_DEVICE, "layer_mid",
         "mid of whole layers of few tokens, 16 bits, of a launch and of the next", slots, choices,
         on_cpu(planner) || choices == 0 ? 0 : (int64_t)limits->intermediate * 2 * 2,
         KEY_INTERMEDIATE_SIZE},
        {BUFFER_PAIR_ROW, MOXIE_MEMORY_DEVICE, "pair_row",
         "row of each (row, local expert) pair, int32", slots, limits->pairs_max, 4, KEY_TOP_K},
        {BUFFER_PAIR_WEIGHT, MOXIE_MEMORY_DEVICE, "pair_weight", "router weight of each pair, f32",
         slots, limits->pairs_max, 4, KEY_TOP_K},
        {BUFFER_ROW_PAIR, MOXIE_MEMORY_DEVICE, "row_pair",
         "pair of each position in a row's top_k, int32", slots, limits->pairs_max, 4, KEY_TOP_K},
        {BUFFER_ROUTE_SCRATCH, MOXIE_MEMORY_DEVICE, "route_scratch",
         "what blocks that count pairs tell each other, int32", slots, 1,
         on_cpu(planner) || limits->computes ? 0 : scratch_bytes, KEY_TOP_K},
        {BUFFER_X_FP8, MOXIE_MEMORY_DEVICE, "x_fp8",
         "rows of all pairs as the first GEMM multiplies them, e4m3", slots, limits->pairs_max,
         limits->x_fp8_bytes, KEY_HIDDEN_SIZE},
        {BUFFER_X_SCALES, MOXIE_MEMORY_DEVICE, "x_scales", "their scales, f32 per 128 numbers",
         slots, limits->x_fp8_groups, limits->fp8_group_bytes, KEY_HIDDEN_SIZE},
        {BUFFER_X_WOVEN, MOXIE_MEMORY_DEVICE, "x_woven",
         "rows of x, or of all pairs, as weights of 4 bits are multiplied with them", slots,
         limits->pairs_max, limits->x_woven_bytes, KEY_HIDDEN_SIZE},
        {BUFFER_MID, MOXIE_MEMORY_DEVICE, "mid",
         "activations between the two GEMMs: intermediate_size numbers per pair", slots,
         limits->pairs_max, limits->mid_bytes, KEY_INTERMEDIATE_SIZE},
        {BUFFER_MID_FP8, MOXIE_MEMORY_DEVICE, "mid_fp8",
         "mid as the second GEMM multiplies it, e4m3", slots, limits->pairs_max,
         limits->mid_fp8_bytes, KEY_INTERMEDIATE_SIZE},
        {BUFFER_MID_SCALES, MOXIE_MEMORY_DEVICE, "mid_scales", "its scales, f32 per 128 numbers",
         slots, limits->mid_fp8_groups, limits->fp8_group_bytes, KEY_INTERMEDIATE_SIZE},
        {BUFFER_PAIR_OUT, MOXIE_MEMORY_DEVICE, "pair_out",
         "result of each pair before the sum: hidden_size numbers", slots, limits->pairs_max,
         limits->pair_bytes, KEY_HIDDEN_SIZE},
        // The last row: without CPU kernels there is nobody to use it.
        {BUFFER_CPU_SCRATCH, MOXIE_MEMORY_HOST, "cpu_scratch",
         "tiles of each of cpu_threads threads", limits->threads, 1, (int64_t)CPU_SCRATCH_BYTES,
         KEY_CPU_THREADS},
    };
    int fits = 1;

    for (size_t i = 0; i < sizeof requests / sizeof requests[0] - !on_cpu(planner); i++) {
        if (!limits->computes && (EXPAND_BUFFERS >> requests[i].id & 1) == 0) continue;
        if (requests[i].row_bytes > 0) fits &= buffer_add(planner, &requests[i]);
    }
    return fits;
}

// What a push dispatcher keeps on its own device, per slot.
static int exchange_buffers(const struct planner *planner)
{
    const struct limits *limits = &planner->plan->limits;
    const int64_t slots = limits->slots, tokens = limits->tokens_max;
    const struct request requests[] = {
        {BUFFER_SEND_SLOT, MOXIE_MEMORY_DEVICE, "send_slot",
         "where each token went at each rank, int32", slots, tokens, (int64_t)limits->ranks * 4,
         KEY_EP_SIZE},
        {BUFFER_OWN_IDS, MOXIE_MEMORY_DEVICE, "own_ids",
         "physical expert ids of this rank's own tokens, int32", slots, tokens, limits->id_bytes,
         KEY_EP_SIZE},
        {BUFFER_OWN_WEIGHTS, MOXIE_MEMORY_DEVICE, "own_weights",
         "router weights of this rank's own tokens, f32", slots, tokens, limits->weight_bytes,
         KEY_EP_SIZE},
        {BUFFER_FEW_IDS, MOXIE_MEMORY_DEVICE, "few_ids",
         "rows from every rank, then their physical expert ids where they are few, int32", slots,
         KERNEL_RANKS_MAX + GEMMS_IDS_MAX, on_cpu(planner) ? 0 : 4, KEY_EP_SIZE},
    };
    int fits = 1;

    for (size_t i = 0; i < sizeof requests / sizeof requests[0]; i++) {
        if (requests[i].row_bytes > 0) fits &= buffer_add(planner, &requests[i]);
    }
    return fits;
}

static int window_buffer(const struct planner *planner)
{
    const struct limits *limits = &planner->plan->limits;
    struct window_layout *window = &planner->plan->window;
    struct request request = {
        .id = BUFFER_WINDOW,
        .kind = MOXIE_MEMORY_SYMMETRIC,
        .name = "window",
        .why = "rows from and results of every peer (ep_size - 1 slabs each), written by the peers",
        .pieces = limits->slots,
        .rows = limits->rows_max,
        .row_bytes = limits->row_bytes + limits->result_bytes,
        .columns_key = KEY_HIDDEN_SIZE,
    };

    if (limits->staged)
        request.why = "rows from and results of every peer (ep_size - 1 slabs each), as NCCL "
                      "receives them";
    return piece_add(planner, &request,
                     plan_window(window, limits, on_cpu(planner)) ? window->bytes : INT64_MAX);
}

static int staging_buffer(const struct planner *planner)
{
    const struct limits *limits = &planner->plan->limits;
    const struct request request = {
        .id = BUFFER_STAGING,
        .kind = MOXIE_MEMORY_DEVICE,
        .name = "staging",
        .why = "rows for and results of every peer, laid out as a window, until NCCL has sent them",
        .pieces = limits->slots,
        .rows = limits->rows_max,
        .row_bytes = limits->row_bytes + limits->result_bytes,
        .columns_key = KEY_HIDDEN_SIZE,
    };

    return !limits->staged || piece_add(planner, &request, planner->plan->window.bytes);
}

static int report_buffer(const struct planner *planner)
{
    const int staged = planner->plan->limits.staged;
    const struct request request = {
        .id = BUFFER_REPORT,
        .kind = MOXIE_MEMORY_PINNED,
        .name = "report",
        .why = "what waiting kernels tell the host: the first failure, and rows moved",
        .pieces = 1,
        .rows = 1,
        .row_bytes =
            (int64_t)(sizeof(struct flag_report) + (staged ? sizeof(struct flag_state) : 0)),
        .columns_key = KEY_EP_SIZE,
    };

    return on_cpu(planner) || buffer_add(planner, &request);
}

static int dispatcher_buffers(const struct planner *planner)
{
    int fits;

    if (planner->plan->limits.dispatcher == DISPATCHER_LOCAL) return 1;
    fits = exchange_buffers(planner);
    fits &= window_buffer(planner);
    fits &= staging_buffer(planner);
    fits &= report_buffer(planner);
    return fits;
}

static int capture_buffer(const struct planner *planner)
{
    const struct limits *limits = &planner->plan->limits;
    struct request request = {
        .id = BUFFER_CAPTURE,
        .kind = MOXIE_MEMORY_DEVICE,
        .name = "capture",
        .why = "chosen expert ids, int32 [dp_size * forward_tokens and padding, num_layers, top_k]",
        .pieces = 1,
        .rows = limits->dp_size * limits->capture_tokens,
        .row_bytes = (int64_t)limits->layers * limits->top_k * 4,
        .columns_key = KEY_NUM_LAYERS,
    };

    return !limits->capture || buffer_add(planner, &request);
}

static int load_buffer(const struct planner *planner)
{
    const struct limits *limits = &planner->plan->limits;
    const struct request request = {
        .id = BUFFER_EXPERT_LOAD,
        .kind = MOXIE_MEMORY_DEVICE,
        .name = "expert_load",
        .why = "rows that each local expert has computed, int64 [num_layers, experts_local]",
        .pieces = 1,
        .rows = limits->layers,
        .row_bytes = (int64_t)limits->experts_local * 8,
        .columns_key = KEY_NUM_EXPERTS,
    };

    return !limits->expert_load || limits->experts_local == 0 || buffer_add(planner, &request);
}

// Whether all reasons so far are against keys that no size comes from, so that the plan is as it
// will be without them.
static int sizes_stand(const struct config *config, const struct report *report)
{
    static const enum config_key apart[] = {
        KEY_ACTIVATION_ALPHA, KEY_ACTIVATION_BETA, KEY_ACTIVATION_LIMIT, KEY_ROUTED_SCALING_FACTOR,
        KEY_APPLY_ROUTER_WEIGHT_ON_INPUT, KEY_DETERMINISTIC, KEY_DEVICE_MEMORY_BUDGET_BYTES,
        KEY_DISPATCH_SMS, KEY_TIMEOUT_MS,
        // The last, since on a GPU layer_mid may be larger without a gate.
        KEY_ACTIVATION};
    const size_t count =
        sizeof apart / sizeof apart[0] - (config_word(config, KEY_DEVICE) != DEVICE_WORD_CPU);

    for (uint64_t reason = 0; reason < report->reasons_count; reason++) {
        size_t i = 0;

        while (i < count && strcmp(report->reasons[reason].key, config_name(apart[i])) != 0)
            i++;
        if (i == count) return 0;
    }
    return 1;
}

void plan_make(struct plan *plan, const struct config *config, const struct bounds *bounds,
               struct report *report)
{
    const struct backend *dispatcher = dispatcher_of(config);
    struct planner planner = {plan, config, bounds, report};
    int64_t rows = plan_rows_max(config, bounds);
    int fits;

    memset(plan, 0, sizeof *plan);
    if (!sizes_stand(config, report) || dispatcher == NULL) return;
    if (rows < 1 || rows > INT32_MAX / config_i64(config, KEY_TOP_K)) return;
    limits_fill(&plan->limits, config, bounds, (enum dispatcher_kind)dispatcher->id);
    // All of them, whichever does not fit: every reason is told at once.
    fits = runner_buffers(&planner);
    fits &= dispatcher_buffers(&planner);
    fits &= capture_buffer(&planner);
    fits &= load_buffer(&planner);
    if (fits) return;
    plan->buffers_count = 0;
    plan->device_bytes = plan->symmetric_bytes = plan->pinned_bytes = plan->host_bytes = 0;
    memset(plan->slot_bytes, 0, sizeof plan->slot_bytes);
}
