// Rounds without experts: dispatch, the owners' reduction of result rows that are there already,
// combine. The library's run() holds that reduction, so here it is done by fold of moxie.expand/1,
// which is the same kernel, and heeds what came from each rank as run() does. Rounds that are not
// timed, of the same routings, expand the received rows: that tells fold which rows to add up, and
// makes each expert the identity, so that the outputs can be checked.
//
// A dispatcher takes no dispatch without its combine, so no graph holds one half whose time could
// be told from that of another graph. The halves are timed by events inside the graph of whole
// rounds. What two events in a row are apart is measured beside it, and not subtracted.

#include "hosts/cli/bench_graph.h"

#include "hosts/cli/router.h"

#include <stdlib.h>
#include <string.h>

// Halves of a round begin at marks 0 and 1; at mark 2 it is over.
#define MARKS 3

struct rounds {
    const moxie_expand_api *expand;
    int64_t pairs; // at most, of all rows that come
    int sets;
    struct memory rows[BENCH_FORWARDS]; // of `sets`: [pairs, H]
    struct memory index[BENCH_FORWARDS];
    struct memory weights, counts;
    struct memory plain; // [rows of a source, H], all the same: what stands for quantised rows
    int64_t plain_rows;
    void *empty[2]; // events in a row
    void *marks[BENCH_FORWARDS][MARKS];
    int marking; // they go into the graph
};

// What a runner would have got and made, as the library wants it described.
struct expanded {
    int64_t rows_shape[2], weights_shape[1], counts_shape[1], index_shape[2];
    moxie_slab slab;
    moxie_rows rows;
    moxie_tensor index;
};

static int times_halves(const struct graphs *graphs)
{
    return graphs->job->op == BENCH_DISPATCH || graphs->job->op == BENCH_COMBINE;
}

// ---- Memory ------------------------------------------------------------------------------------

// As many sets of rows as fit: a set is read again only after all the others.
static int make_sets(struct graphs *graphs, struct fault *fault)
{
    struct rounds *rounds = graphs->rounds;
    struct device *device = graphs->device;
    uint64_t bytes = (uint64_t)rounds->pairs * bench_row_bytes(graphs->job);
    uint64_t available = 0;
    int st = EXIT_OK;

    TRY(device->table->free_bytes(device, &available, fault));
    available -= available / 8; // for what an allocator rounds up, and for NCCL
    do {
        TRY(memory_init(&rounds->rows[rounds->sets], device, bytes, "the result rows", fault));
        rounds->sets++;
    } while (rounds->sets < BENCH_FORWARDS && (uint64_t)(rounds->sets + 1) * bytes < available);
out:
    return st;
}

static int make_plain(struct graphs *graphs, struct fault *fault)
{
    struct rounds *rounds = graphs->rounds;
    struct device *device = graphs->device;
    uint64_t row_bytes = bench_row_bytes(graphs->job);
    struct memory row = {.bytes = row_bytes};
    int st = EXIT_OK;

    TRY(memory_init(&rounds->plain, device, (uint64_t)rounds->plain_rows * row_bytes,
                    "the plain rows", fault));
    row.at = rounds->plain.at;
    TRY(bench_fill_rows(&row, device, graphs->job->row_format, 5000, fault));
    for (uint64_t done = row_bytes; done < rounds->plain.bytes; done *= 2) {
        uint64_t left = rounds->plain.bytes - done;

        TRY(device->table->copy(device, rounds->plain.at + done, rounds->plain.at,
                                done < left ? done : left, fault));
    }
out:
    return st;
}

static int make_marks(struct graphs *graphs, struct fault *fault)
{
    struct rounds *rounds = graphs->rounds;
    struct device *device = graphs->device;
    int st = EXIT_OK;

    for (int i = 0; i < 2; i++)
        TRY(device->table->event_create(device, &rounds->empty[i], fault));
    for (int i = 0; i < BENCH_FORWARDS * MARKS; i++)
        TRY(device->table->event_create(device, &rounds->marks[i / MARKS][i % MARKS], fault));
out:
    return st;
}

static int make_rounds(struct graphs *graphs, struct fault *fault)
{
    struct rounds *rounds = graphs->rounds;
    struct device *device = graphs->device;
    struct rank *rank = graphs->rank;
    const struct moxie_bounds *bounds = rank->instance.plan->bounds;
    const char *wire = instance_config(&rank->instance, "dispatch_format");
    int64_t top_k = graphs->job->shape.top_k;
    int st = EXIT_OK;

    rounds->expand = rank->instance.api->get_extension(MOXIE_EXPAND_EXTENSION);
    if (rounds->expand == NULL)
        TRY(fault_set(fault, EXIT_REFUSED,
                      "the library has no %s, which is how --op %s does without experts",
                      MOXIE_EXPAND_EXTENSION, bench_op_word(graphs->job->op)));
    rounds->plain_rows = bounds->dispatch_tokens;
    rounds->pairs = rank->link->ranks * bounds->dispatch_tokens * top_k;
    for (int i = 0; i < BENCH_FORWARDS; i++)
        TRY(memory_init(&rounds->index[i], device, (uint64_t)rounds->pairs * sizeof(int32_t),
                        "the places of rows", fault));
    TRY(memory_init(&rounds->weights, device, (uint64_t)rounds->pairs * sizeof(float),
                    "the weights of rows", fault));
    TRY(memory_init(&rounds->counts, device,
                    (uint64_t)(bounds->experts_local + 1) * sizeof(int32_t), "the counts", fault));
    if (strcmp(wire, "input") != 0) TRY(make_plain(graphs, fault));
    if (times_halves(graphs)) TRY(make_marks(graphs, fault));
    TRY(make_sets(graphs, fault));
out:
    return st;
}

int bench_rounds_open(struct graphs *graphs, struct fault *fault)
{
    if (graphs->job->op == BENCH_LAYER) return EXIT_OK;
    graphs->rounds = calloc(1, sizeof *graphs->rounds);
    if (graphs->rounds == NULL) return fault_set(fault, EXIT_TROUBLE, "out of memory");
    return make_rounds(graphs, fault);
}

void bench_rounds_close(struct graphs *graphs)
{
    struct rounds *rounds = graphs->rounds;
    struct device *device = graphs->device;

    if (rounds == NULL) return;
    for (int i = 0; i < BENCH_FORWARDS; i++) {
        memory_fini(&rounds->rows[i], device);
        memory_fini(&rounds->index[i], device);
    }
    memory_fini(&rounds->weights, device);
    memory_fini(&rounds->counts, device);
    memory_fini(&rounds->plain, device);
    for (int i = 0; i < 2; i++)
        device_event_destroy(device, rounds->empty[i]);
    for (int i = 0; i < BENCH_FORWARDS * MARKS; i++)
        device_event_destroy(device, rounds->marks[i / MARKS][i % MARKS]);
    free(rounds);
    graphs->rounds = NULL;
}

// ---- A round -----------------------------------------------------------------------------------

static const moxie_slab *slab_of(const moxie_rows *in, uint32_t index)
{
    return (const moxie_slab *)(const void *)((const char *)in->slabs + index * in->slab_stride);
}

// Rows that the slabs have room for, each as many as the fullest of this step.
static int64_t positions_of(const moxie_rows *in)
{
    int64_t most = 0;

    for (uint32_t i = 0; i < in->slabs_count; i++) {
        const moxie_slab *slab = slab_of(in, i);

        if (slab->rows.shape[0] > most) most = slab->rows.shape[0];
    }
    return in->slabs_count * most;
}

static void describe_expanded(const struct graphs *graphs, int forward, const moxie_rows *in,
                              struct expanded *to)
{
    const struct rounds *rounds = graphs->rounds;
    const struct bench_job *job = graphs->job;
    const moxie_device place = graphs->device->place;
    const moxie_dtype f32 = {MOXIE_DTYPE_FLOAT, 32, 1};
    const moxie_dtype i32 = {MOXIE_DTYPE_INT, 32, 1};

    *to = (struct expanded){
        .rows_shape = {rounds->pairs, job->shape.hidden},
        .weights_shape = {rounds->pairs},
        .counts_shape = {graphs->rank->instance.plan->bounds->experts_local + 1},
        .index_shape = {positions_of(in), job->shape.top_k},
    };
    to->slab = (moxie_slab){
        .struct_size = sizeof to->slab,
        .rows = tensor_at(place, rounds->rows[forward % rounds->sets].at,
                          format_dtype(job->row_format), 2, to->rows_shape),
        .weights = tensor_at(place, rounds->weights.at, f32, 1, to->weights_shape),
    };
    to->rows = (moxie_rows){
        .struct_size = sizeof to->rows,
        .layout = MOXIE_LAYOUT_EXPERT_CONTIGUOUS,
        .id_space = MOXIE_IDS_LOCAL,
        .slabs_count = 1,
        .slab_stride = sizeof to->slab,
        .slabs = &to->slab,
        .counts = tensor_at(place, rounds->counts.at, i32, 1, to->counts_shape),
    };
    to->index = tensor_at(place, rounds->index[forward].at, i32, 2, to->index_shape);
}

// expand takes 16-bit rows of one format: quantised ones are stood for by plain ones.
static int expand(struct graphs *graphs, const moxie_rows *in, const struct expanded *to,
                  struct fault *fault)
{
    const struct rounds *rounds = graphs->rounds;
    moxie_slab slabs[BOOTSTRAP_RANKS_MAX];
    int64_t plain_shapes[BOOTSTRAP_RANKS_MAX][2];
    moxie_rows taken = *in;
    const moxie_call call = {.struct_size = sizeof call, .stream = graphs->device->stream};
    struct library_error error;
    int32_t status = MOXIE_OK;

    for (uint32_t i = 0; i < in->slabs_count; i++) {
        slabs[i] = *slab_of(in, i);
        if (slabs[i].rows.dtype.bits == 16) continue;
        plain_shapes[i][0] = slabs[i].rows.shape[0];
        plain_shapes[i][1] = graphs->job->shape.hidden;
        slabs[i].rows = tensor_at(graphs->device->place, rounds->plain.at,
                                  format_dtype(graphs->job->row_format), 2, plain_shapes[i]);
        slabs[i].scales = (moxie_tensor){.data = NULL};
    }
    taken.slabs = slabs;
    taken.slab_stride = sizeof slabs[0];
    status = rounds->expand->expand(graphs->set[0].runner, &call, &taken, &to->rows, &to->index,
                                    library_error(&error));
    if (status == MOXIE_OK) return EXIT_OK;
    return fault_from_status(fault, status, "expand", error.text);
}

static int fold(struct graphs *graphs, const struct expanded *from, const moxie_rows *out,
                struct fault *fault)
{
    const moxie_call call = {.struct_size = sizeof call, .stream = graphs->device->stream};
    struct library_error error;
    int32_t status = graphs->rounds->expand->fold(graphs->set[0].runner, &call, &from->rows,
                                                  &from->index, out, library_error(&error));

    if (status == MOXIE_OK) return EXIT_OK;
    return fault_from_status(fault, status, "fold", error.text);
}

static int mark(struct graphs *graphs, void *event, struct fault *fault)
{
    if (!graphs->rounds->marking) return EXIT_OK;
    return graphs->device->table->event_capture(graphs->device, event, fault);
}

static int check(int32_t status, const char *call, const struct library_error *error,
                 struct fault *fault)
{
    return status == MOXIE_OK ? EXIT_OK : fault_from_status(fault, status, call, error->text);
}

static int run_round(struct graphs *graphs, int index, int prepares, struct fault *fault)
{
    const moxie_dispatcher_api *api = graphs->rank->dispatcher_info->api;
    moxie_dispatcher *dispatcher = graphs->rank->dispatcher;
    const struct forward forward = bench_forward(graphs, index);
    void **marks = graphs->rounds->marks[index];
    const moxie_rows *in = NULL;
    const moxie_rows *out = NULL;
    struct expanded expanded;
    struct rank_batch to;
    struct library_error error;
    int st = EXIT_OK;

    rank_describe(graphs->rank, &forward, &to);
    TRY(rank_begin(graphs->rank, &forward, fault));
    TRY(mark(graphs, marks[0], fault));
    TRY(check(api->dispatch_send(dispatcher, &to.batch, library_error(&error)), "dispatch_send",
              &error, fault));
    TRY(check(api->dispatch_recv(dispatcher, &to.batch, &in, &out, library_error(&error)),
              "dispatch_recv", &error, fault));
    TRY(mark(graphs, marks[1], fault));
    describe_expanded(graphs, index, in, &expanded);
    if (prepares) TRY(expand(graphs, in, &expanded, fault));
    TRY(fold(graphs, &expanded, out, fault));
    TRY(check(api->combine_send(dispatcher, &to.batch, library_error(&error)), "combine_send",
              &error, fault));
    TRY(check(api->combine_recv(dispatcher, &to.batch, library_error(&error)), "combine_recv",
              &error, fault));
    TRY(mark(graphs, marks[2], fault));
out:
    return st;
}

int bench_rounds_prepare(struct graphs *graphs, struct fault *fault)
{
    int st = EXIT_OK;

    for (int i = 0; i < BENCH_FORWARDS; i++)
        TRY(run_round(graphs, i, 1, fault));
out:
    return st;
}

int bench_rounds_run(struct graphs *graphs, struct fault *fault)
{
    struct rounds *rounds = graphs->rounds;
    int st = EXIT_OK;

    rounds->marking = times_halves(graphs);
    for (int i = 0; i < 2; i++)
        TRY(mark(graphs, rounds->empty[i], fault));
    for (int i = 0; i < BENCH_FORWARDS; i++)
        TRY(run_round(graphs, i, 0, fault));
out:
    rounds->marking = 0;
    return st;
}

int bench_rounds_time(struct graphs *graphs, double *time_us, double *event_us, struct fault *fault)
{
    struct rounds *rounds = graphs->rounds;
    struct device *device = graphs->device;
    int first = graphs->job->op == BENCH_COMBINE;
    double sum_us = 0;
    int st = EXIT_OK;

    if (rounds == NULL || !times_halves(graphs)) return EXIT_OK;
    TRY(device->table->elapsed_us(device, rounds->empty[0], rounds->empty[1], event_us, fault));
    for (int i = 0; i < BENCH_FORWARDS; i++) {
        double half_us = 0;

        TRY(device->table->elapsed_us(device, rounds->marks[i][first], rounds->marks[i][first + 1],
                                      &half_us, fault));
        sum_us += half_us;
    }
    *time_us = sum_us / BENCH_FORWARDS;
out:
    return st;
}

int bench_rounds_expect(const struct graphs *graphs, const uint8_t *x, const int32_t *experts,
                        double *y, struct fault *fault)
{
    const struct bench_job *job = graphs->job;
    const struct rounds *rounds = graphs->rounds;
    const struct moxie_bounds *bounds = graphs->rank->instance.plan->bounds;
    uint64_t hidden = (uint64_t)job->shape.hidden;
    uint8_t *narrow = malloc(hidden * sizeof(uint16_t));
    float *wide = malloc(2 * hidden * sizeof *wide);
    float *plain = wide != NULL ? wide + hidden : NULL;
    int64_t own = 0;
    int st = EXIT_OK;

    if (narrow == NULL || wide == NULL) TRY(fault_set(fault, EXIT_TROUBLE, "out of memory"));
    widen(x, job->row_format, hidden, wide);
    widen(x, job->row_format, hidden, plain);
    if (rounds->plain.at != NULL) {
        TRY(graphs->device->table->copy_out(graphs->device, narrow, rounds->plain.at,
                                            hidden * sizeof(uint16_t), fault));
        widen(narrow, job->row_format, hidden, plain);
    }
    for (int64_t k = 0; k < job->shape.top_k; k++)
        own += experts[k] >= bounds->expert_first &&
               experts[k] < bounds->expert_first + bounds->experts_local;
    for (uint64_t i = 0; i < hidden; i++)
        y[i] = (double)own * (double)wide[i] + (double)(job->shape.top_k - own) * (double)plain[i];
out:
    free(narrow);
    free(wide);
    return st;
}
