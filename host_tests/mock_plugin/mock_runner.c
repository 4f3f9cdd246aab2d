// The runner: for each row, for each of its experts, plain loops.

#include "host_tests/mock_plugin/mock.h"

#include <math.h>
#include <string.h>
#include <time.h>

// Rows of one source, checked.
struct slab {
    struct view rows, scales, ids, weights, results;
    int64_t cap;
    int32_t packed; // nvfp4 rows
};

struct job {
    const struct runner *runner;
    const moxie_rows *in;
    struct slab slabs[MOXIE_RANKS_MAX];
    struct view counts, map;
    int64_t rows; // of all slabs
    double *scratch;
    atomic_int done[TASKS];
};

// ---- Checks ------------------------------------------------------------------------------------

int layout_is_by_expert(int32_t layout)
{
    return layout == MOXIE_LAYOUT_EXPERT_CONTIGUOUS || layout == MOXIE_LAYOUT_EXPERT_MASKED;
}

// The shape of a slab's tensor: [cap, columns], for EXPERT_MASKED [experts, cap, columns].
static struct want want_rows(const struct job *job, const char *name, int64_t cap, int64_t columns)
{
    struct want want = {.name = name, .ndim = 2, .shape = {cap, columns, 0}};

    if (job->in->layout != MOXIE_LAYOUT_EXPERT_MASKED) return want;
    return (struct want){.name = name,
                         .ndim = 3,
                         .shape = {job->runner->instance->limits.experts_local, cap, columns}};
}

static int32_t read_payload(const struct call *call, const struct job *job, const moxie_slab *given,
                            struct slab *slab)
{
    int64_t hidden = call->instance->limits.hidden;
    struct want want = want_rows(job, "in.slabs.rows", -1, hidden);
    int32_t ndim = want.ndim;
    int32_t st = MOXIE_OK;

    want.types = TYPE_FLOATS | TYPE_E4M3;
    slab->packed = given->scales.data != NULL && given->rows.ndim == ndim &&
                   given->rows.shape != NULL && given->rows.shape[ndim - 1] * 2 == hidden;
    if (slab->packed) {
        want.shape[ndim - 1] = hidden / 2;
        want.types = TYPE_U8;
    }
    TRY(view_read(&call->caller, &want, &given->rows, &slab->rows));
    slab->cap = slab->rows.shape[ndim - 2];
    if (slab->rows.type != TYPE_E4M3 && !slab->packed) {
        if (given->scales.data != NULL)
            TRY(fail_with(&call->caller, MOXIE_E_INVALID,
                          "in.slabs.scales: rows of this format have none"));
        return MOXIE_OK;
    }
    want = want_rows(job, "in.slabs.scales", slab->cap,
                     slab->packed ? 4 + hidden / 16 : (hidden + 127) / 128);
    want.types = slab->packed ? TYPE_U8 : TYPE_F32;
    TRY(view_read(&call->caller, &want, &given->scales, &slab->scales));
out:
    return st;
}

static int32_t read_choices(const struct call *call, const struct job *job, const moxie_slab *given,
                            struct slab *slab)
{
    int32_t top_k = call->instance->limits.top_k;
    struct want ids = {"in.slabs.ids", TYPE_IDS, 2, {slab->cap, top_k, 0}, 0};
    struct want weights = {"in.slabs.weights", TYPE_FLOATS, 2, {slab->cap, top_k, 0}, 0};
    int32_t st = MOXIE_OK;

    if (layout_is_by_expert(job->in->layout)) {
        weights = want_rows(job, "in.slabs.weights", slab->cap, 0);
        weights.ndim--;
        weights.types = TYPE_FLOATS;
        weights.optional = 1;
    } else {
        TRY(view_read(&call->caller, &ids, &given->ids, &slab->ids));
    }
    TRY(view_read(&call->caller, &weights, &given->weights, &slab->weights));
    if (HAS_FAULT(FAULT_BF16_AS_F16) && slab->weights.type == TYPE_BF16)
        slab->weights.type = TYPE_F16;
out:
    return st;
}

static int32_t read_slab(const struct call *call, const struct job *job, const moxie_slab *in,
                         const moxie_slab *out, struct slab *slab)
{
    const struct limits *limits = &call->instance->limits;
    int32_t masked = job->in->layout == MOXIE_LAYOUT_EXPERT_MASKED;
    int64_t most =
        layout_is_by_expert(job->in->layout) ? limits->rows_max * limits->top_k : limits->rows_max;
    struct want want;
    int32_t st = MOXIE_OK;

    TRY(read_payload(call, job, in, slab));
    // Most places of a masked layout are empty, so its capacity is the host's affair.
    if (!masked && slab->cap > most && !HAS_FAULT(FAULT_LOST_ERROR))
        TRY(fail_with(&call->caller, MOXIE_E_CAPACITY,
                      "a slab of %lld rows; the plan holds %lld (%s)", (long long)slab->cap,
                      (long long)most, call->instance->bounds.dominant));
    TRY(read_choices(call, job, in, slab));
    want = want_rows(job, "out.slabs.rows", slab->cap, limits->hidden);
    want.types = TYPE_FLOATS;
    TRY(view_read(&call->caller, &want, &out->rows, &slab->results));
    if (view_rows_overlap(&slab->results))
        TRY(fail_with(&call->caller, MOXIE_E_INVALID, "out.slabs.rows: its rows overlap"));
out:
    return st;
}

static int32_t read_counts(const struct call *call, struct job *job)
{
    int64_t experts = call->instance->limits.experts_local;
    struct want want = {"in.counts", TYPE_I32, 1, {job->in->slabs_count, 0, 0}, 0};
    struct want map = {"in.expert_map", TYPE_I32, 1, {-1, 0, 0}, 1};
    int32_t st = MOXIE_OK;

    want.optional = job->in->layout == MOXIE_LAYOUT_STANDARD;
    if (job->in->layout == MOXIE_LAYOUT_EXPERT_CONTIGUOUS) want.shape[0] = experts + 1;
    if (job->in->layout == MOXIE_LAYOUT_EXPERT_MASKED) want.shape[0] = experts;
    TRY(view_read(&call->caller, &want, &job->in->counts, &job->counts));
    TRY(view_read(&call->caller, &map, &job->in->expert_map, &job->map));
out:
    return st;
}

// ---- One row -----------------------------------------------------------------------------------

// count of a slab or an expert; what no count can be is cut to what fits.
static int64_t count_at(const struct job *job, int64_t index, int64_t most)
{
    int64_t count = most;

    if (job->counts.data != NULL) count = view_integer(&job->counts, index, 0);
    return count < 0 ? 0 : count > most ? most : count;
}

static double load(const struct slab *slab, int64_t expert, int64_t row, int64_t column)
{
    int masked = slab->rows.ndim == 3;
    int64_t i = masked ? expert : row, j = masked ? row : column, k = masked ? column : 0;
    const unsigned char *scales;
    float of_the_row;
    int32_t both;

    if (slab->packed) {
        both = *view_at(&slab->rows, i, masked ? row : column / 2, masked ? column / 2 : 0);
        scales = view_at(&slab->scales, i, masked ? row : 0, 0);
        memcpy(&of_the_row, scales, sizeof of_the_row);
        return e2m1(column % 2 == 0 ? both & 15 : both >> 4) * (double)of_the_row *
               number_load(TYPE_E4M3, scales + 4 + column / 16);
    }
    if (slab->rows.type != TYPE_E4M3) return view_number(&slab->rows, i, j, k);
    return view_number(&slab->rows, i, j, k) *
           view_number(&slab->scales, i, masked ? row : column / 128, column / 128);
}

static double activate(const struct instance *instance, double gate, double up)
{
    double alpha = (double)(float)instance->values[KEY_ACTIVATION_ALPHA].real;
    double beta = (double)(float)instance->values[KEY_ACTIVATION_BETA].real;
    double limit = (double)(float)instance->values[KEY_ACTIVATION_LIMIT].real;
    int64_t kind = instance->values[KEY_ACTIVATION].number;

    if (HAS_FAULT(FAULT_GELU_BY_TANH) && kind == GELU) kind = GELU_TANH;
    switch (kind) {
    case GELU:
        return 0.5 * gate * (1.0 + erf(gate * M_SQRT1_2)) * up;
    case GELU_TANH:
        return 0.5 * gate *
               (1.0 + tanh(sqrt(2.0 / M_PI) * (gate + 0.044715 * gate * gate * gate))) * up;
    case SWIGLUOAI:
        if (limit > 0.0) {
            gate = gate > limit ? limit : gate;
            up = up > limit ? limit : up < -limit ? -limit : up;
        }
        return gate / (1.0 + exp(-alpha * gate)) * (up + beta);
    case RELU2:
        return gate > 0.0 ? gate * gate : gate == gate ? 0.0 : gate;
    default:
        return gate / (1.0 + exp(-gate)) * up;
    }
}

// Adds what one expert makes of x, times the router weight.
static void add_expert(const struct runner *runner, int64_t expert, double weight, double *x)
{
    const struct limits *limits = &runner->instance->limits;
    double *middle = x + limits->hidden, *sum = middle + limits->intermediate;
    int gated = runner->w1.rows != runner->w1.units;
    int on_input = runner->instance->values[KEY_APPLY_ROUTER_WEIGHT_ON_INPUT].number != 0;

    for (int64_t h = 0; h < limits->hidden && on_input; h++)
        x[h] *= weight;
    if (HAS_FAULT(FAULT_WEIGHT_TWICE)) on_input = 0;
    for (int64_t unit = 0; unit < limits->intermediate; unit++) {
        double gate = weights_dot(&runner->w1, expert, 0, unit, x);
        double up = gated ? weights_dot(&runner->w1, expert, 1, unit, x) : 1.0;

        middle[unit] = activate(runner->instance, gate, up);
    }
    for (int64_t h = 0; h < limits->hidden; h++)
        sum[h] += (on_input ? 1.0 : weight) * weights_dot(&runner->w2, expert, 0, h, middle);
}

// The local expert of an id, or -1.
static int64_t local_expert(const struct job *job, int64_t id)
{
    const struct limits *limits = &job->runner->instance->limits;
    int64_t expert = physical_expert(job->runner->instance, &job->map, job->in->id_space, id);

    if (HAS_FAULT(FAULT_LEAKING_ID) && id == limits->physical_experts)
        expert = limits->physical_experts - 1;
    if (HAS_FAULT(FAULT_NEGATIVE_ID) && id == -1) expert = limits->expert_first;
    if (HAS_FAULT(FAULT_LOST_PART) && limits->dispatcher == DISPATCHER_LOCAL && limits->rank > 0)
        return -1;
    expert -= limits->expert_first;
    return expert >= 0 && expert < limits->experts_local ? expert : -1;
}

// Another factor for each of three rows, which no tolerance sees.
static double drift(void)
{
    static atomic_int rows;

    return 1.0 + 2e-7 * (double)(atomic_fetch_add(&rows, 1) % 3);
}

static void store(const struct job *job, const struct slab *slab, int64_t expert, int64_t row,
                  const double *sum)
{
    const struct instance *instance = job->runner->instance;
    double scale = (double)(float)instance->values[KEY_ROUTED_SCALING_FACTOR].real;
    int masked = slab->results.ndim == 3;

    if (HAS_FAULT(FAULT_SCALES_TWICE)) scale *= scale;
    if (HAS_FAULT(FAULT_DRIFTS)) scale *= drift();
    for (int64_t h = 0; h < instance->limits.hidden; h++)
        number_store(slab->results.type, scale * sum[h],
                     masked ? view_at(&slab->results, expert, row, h)
                            : view_at(&slab->results, row, h, 0));
}

static void load_row(const struct job *job, const struct slab *slab, int64_t expert, int64_t row,
                     double *x)
{
    for (int64_t h = 0; h < job->runner->instance->limits.hidden; h++)
        x[h] = load(slab, expert, row, h);
}

static int is_repeated(const struct slab *slab, int64_t row, int32_t k)
{
    int32_t first = 0;

    while (view_integer(&slab->ids, row, first) != view_integer(&slab->ids, row, k))
        first++;
    return first < k;
}

// A row of STANDARD or RANK_MAJOR.
static void compute_by_ids(const struct job *job, uint32_t source, int64_t row, double *x)
{
    const struct slab *slab = &job->slabs[source];
    const struct limits *limits = &job->runner->instance->limits;
    double *sum = x + limits->hidden + limits->intermediate;
    int valid = row < count_at(job, source, slab->cap);

    if (HAS_FAULT(FAULT_IGNORED_TOKENS_VALID)) valid = 1;
    // Rows past the count are the host's own in STANDARD, where they become zero.
    if (!valid && job->in->layout == MOXIE_LAYOUT_RANK_MAJOR) return;
    memset(sum, 0, (size_t)limits->hidden * sizeof *sum);
    for (int32_t k = 0; valid && k < limits->top_k; k++) {
        int64_t expert = local_expert(job, view_integer(&slab->ids, row, k));

        if (expert < 0 || (HAS_FAULT(FAULT_ONCE_EACH) && is_repeated(slab, row, k))) continue;
        load_row(job, slab, 0, row, x);
        add_expert(job->runner, expert, view_number(&slab->weights, row, k, 0), x);
    }
    store(job, slab, 0, row, sum);
}

// Place `place` of an EXPERT_ layout: its expert and row, or 0 when it is empty.
static int find_expert(const struct job *job, int64_t place, int64_t *expert, int64_t *row)
{
    const struct slab *slab = &job->slabs[0];
    int64_t experts = job->runner->instance->limits.experts_local;

    if (job->in->layout == MOXIE_LAYOUT_EXPERT_MASKED) {
        *expert = place / slab->cap;
        *row = place % slab->cap;
        return *row < count_at(job, *expert, slab->cap);
    }
    *row = place;
    for (*expert = 0; *expert < experts; (*expert)++) {
        if (place >= count_at(job, *expert, slab->cap) &&
            place < count_at(job, *expert + 1, slab->cap))
            return 1;
    }
    return 0;
}

static void compute_by_expert(const struct job *job, int64_t place, double *x)
{
    const struct slab *slab = &job->slabs[0];
    const struct limits *limits = &job->runner->instance->limits;
    double *sum = x + limits->hidden + limits->intermediate;
    double weight = HAS_FAULT(FAULT_WEIGHTLESS_ROWS) ? 0.0 : 1.0;
    int64_t expert, row;

    if (!find_expert(job, place, &expert, &row)) return;
    if (slab->weights.data != NULL)
        weight = slab->weights.ndim == 2 ? view_number(&slab->weights, expert, row, 0)
                                         : view_number(&slab->weights, row, 0, 0);
    memset(sum, 0, (size_t)limits->hidden * sizeof *sum);
    load_row(job, slab, expert, row, x);
    add_expert(job->runner, expert, weight, x);
    store(job, slab, expert, row, sum);
}

// ---- All rows ----------------------------------------------------------------------------------

static void run_task(void *arg, uint64_t task)
{
    struct job *job = arg;
    const struct limits *limits = &job->runner->instance->limits;
    int64_t row_numbers = 2 * limits->hidden + limits->intermediate;
    double *x = job->scratch + (int64_t)task * row_numbers;
    int64_t first = 0;

    if (task >= TASKS) return;
    (void)atomic_fetch_add(&job->done[task], 1);
    for (uint32_t source = 0; source < job->in->slabs_count; source++) {
        int64_t rows = job->rows / job->in->slabs_count;

        if (!layout_is_by_expert(job->in->layout)) rows = job->slabs[source].cap;
        for (int64_t row = 0; row < rows; row++) {
            if ((first + row) % TASKS != (int64_t)task) continue;
            if (layout_is_by_expert(job->in->layout))
                compute_by_expert(job, row, x);
            else
                compute_by_ids(job, source, row, x);
        }
        first += rows;
    }
}

static int32_t run_tasks(const struct call *call, struct job *job)
{
    const moxie_host *host = &call->instance->host;

    if (host->parallel_for != NULL) {
        host->parallel_for(host->ctx, TASKS, run_task, job);
    } else {
        for (uint64_t task = 0; task < TASKS; task++)
            run_task(job, task);
    }
    for (int32_t task = 0; task < TASKS; task++) {
        int done = atomic_load(&job->done[task]);

        if (done != 1)
            return fail_with(&call->caller, MOXIE_E_INVALID,
                             "parallel_for returned after running task %d %d times", task, done);
    }
    return MOXIE_OK;
}

static int32_t read_job(const struct call *call, const moxie_rows *out, struct job *job)
{
    const moxie_rows *in = job->in;
    int32_t st = MOXIE_OK;

    if (out->layout != in->layout || out->slabs_count != in->slabs_count)
        TRY(fail_with(&call->caller, MOXIE_E_INVALID,
                      "out has layout %d with %u slabs, in %d with %u", out->layout,
                      out->slabs_count, in->layout, in->slabs_count));
    if (in->layout != MOXIE_LAYOUT_RANK_MAJOR && in->slabs_count != 1)
        TRY(fail_with(&call->caller, MOXIE_E_INVALID, "in: %u slabs; layout %d has one",
                      in->slabs_count, in->layout));
    for (uint32_t i = 0; i < in->slabs_count; i++) {
        TRY(read_slab(call, job, &in->slabs[i], &out->slabs[i], &job->slabs[i]));
        job->rows += job->slabs[i].cap;
    }
    if (in->layout == MOXIE_LAYOUT_EXPERT_MASKED)
        job->rows *= call->instance->limits.experts_local;
    else if (!layout_is_by_expert(in->layout) && job->rows > call->instance->limits.rows_max &&
             !HAS_FAULT(FAULT_LOST_ERROR))
        TRY(fail_with(&call->caller, MOXIE_E_CAPACITY, "%lld rows; the plan holds %lld (%s)",
                      (long long)job->rows, (long long)call->instance->limits.rows_max,
                      call->instance->bounds.dominant));
    TRY(read_counts(call, job));
out:
    return st;
}

static void misbehave(const struct call *call)
{
    const struct instance *instance = call->instance;
    const moxie_allocation request = {sizeof request, MOXIE_MEMORY_HOST, 64, 64, "scratch"};
    struct timespec nap = {.tv_sec = 1};
    void *memory = NULL;

    if (HAS_FAULT(FAULT_WRITE_PAST_PLAN))
        ((unsigned char *)instance->memory[BUFFER_SCRATCH])[instance->buffers[0].bytes] = 0;
    if (HAS_FAULT(FAULT_ALLOCATION_IN_FORWARD) && instance->host.allocate != NULL &&
        instance->host.allocate(instance->host.ctx, &request, &memory) == 0)
        instance->host.release(instance->host.ctx, &request, memory);
    while (HAS_FAULT(FAULT_HANG))
        (void)nanosleep(&nap, NULL);
}

int32_t runner_run(const struct call *call, const struct runner *runner, const moxie_rows *in,
                   const moxie_rows *out)
{
    struct job job = {
        .runner = runner, .in = in, .scratch = call->instance->memory[BUFFER_SCRATCH]};
    int32_t st = MOXIE_OK;

    misbehave(call);
    TRY(read_job(call, out, &job));
    if (weights_digest(runner) != runner->digest)
        TRY(fail_with(&call->caller, MOXIE_E_INVALID,
                      "run: weights have changed since create; call weights_updated"));
    TRY(run_tasks(call, &job));
out:
    if (st != MOXIE_OK && HAS_FAULT(FAULT_WRITE_ON_REFUSAL) && out->slabs[0].rows.data != NULL)
        *(unsigned char *)out->slabs[0].rows.data ^= 0x55;
    if (st == MOXIE_E_CAPACITY) call->instance->stats.refused++;
    return st;
}
