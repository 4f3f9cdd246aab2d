// NCCL's collectives beside the bench's own graphs, in turns with them: as many tokens, and rows of
// as many bytes. Each is a graph of 8, replayed as Moxie's is. An all-to-all carries a copy of a
// row for each of its experts, evenly over the ranks and the own one; an all-gather every row to
// every rank; a reduce-scatter a result row from every rank, summed.

#include "hosts/cli/bench_graph.h"
#include "hosts/cli/bench_wire.h"
#include "hosts/cli/nccl.h"

#include <stdlib.h>
#include <string.h>

enum kind { ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER };

struct collective {
    const char *name;
    enum kind kind;
    int of_results; // rows as they come back, else as they go
    unsigned ops;   // bits of enum bench_op
};

#define WITH_DISPATCH (1u << BENCH_LAYER | 1u << BENCH_DISPATCH | 1u << BENCH_BOTH)
#define WITH_COMBINE  (1u << BENCH_LAYER | 1u << BENCH_COMBINE | 1u << BENCH_BOTH)
#define COLLECTIVES   4

static const struct collective table[COLLECTIVES] = {
    {"dispatch_all_to_all", ALL_TO_ALL, 0, WITH_DISPATCH},
    {"dispatch_all_gather", ALL_GATHER, 0, WITH_DISPATCH},
    {"combine_all_to_all", ALL_TO_ALL, 1, WITH_COMBINE},
    {"combine_reduce_scatter", REDUCE_SCATTER, 1, WITH_COMBINE},
};

struct collectives {
    struct nccl nccl;
    void *comm;
    struct memory from, to;
    struct wire_rows row;
    void *graphs[COLLECTIVES];
    json_t *samples[COLLECTIVES]; // [time_us, spread_us] of each replay
    int64_t tokens;
    int next; // to be enqueued
};

static int is_wanted(const struct graphs *graphs, int index)
{
    return (table[index].ops >> graphs->job->op & 1) != 0;
}

static uint64_t row_bytes(const struct collectives *all, int index)
{
    return table[index].of_results ? all->row.result_bytes : all->row.dispatch_bytes;
}

// What a rank has for each rank, in bytes.
static uint64_t piece_bytes(const struct graphs *graphs, int64_t tokens, int index)
{
    int64_t ranks = graphs->rank->link->ranks;
    int64_t copies = tokens * graphs->job->shape.top_k;
    int64_t rows = table[index].kind == ALL_TO_ALL ? (copies + ranks - 1) / ranks : tokens;

    return (uint64_t)rows * row_bytes(graphs->collectives, index);
}

// ---- Calls -------------------------------------------------------------------------------------

static int all_to_all(const struct collectives *all, uint64_t bytes, int ranks, void *stream)
{
    const struct nccl *nccl = &all->nccl;
    int failed = nccl->group_start();

    for (int rank = 0; rank < ranks && failed == 0; rank++) {
        uint64_t at = (uint64_t)rank * bytes;

        failed = nccl->send(all->from.at + at, bytes, NCCL_UINT8, rank, all->comm, stream);
        if (failed == 0)
            failed = nccl->receive(all->to.at + at, bytes, NCCL_UINT8, rank, all->comm, stream);
    }
    return failed != 0 ? failed : nccl->group_end();
}

static int call_once(struct graphs *graphs, int index)
{
    struct collectives *all = graphs->collectives;
    uint64_t bytes = piece_bytes(graphs, all->tokens, index);
    void *stream = graphs->device->stream;
    int type = graphs->job->row_format == MOXIE_FORMAT_BF16 ? NCCL_BFLOAT16 : NCCL_FLOAT16;

    switch (table[index].kind) {
    case ALL_TO_ALL:
        return all_to_all(all, bytes, graphs->rank->link->ranks, stream);
    case ALL_GATHER:
        return all->nccl.all_gather(all->from.at, all->to.at, bytes, NCCL_UINT8, all->comm, stream);
    default:
        return all->nccl.reduce_scatter(all->from.at, all->to.at, bytes / sizeof(uint16_t), type,
                                        NCCL_SUM, all->comm, stream);
    }
}

static int enqueue(struct graphs *graphs, struct fault *fault)
{
    struct collectives *all = graphs->collectives;
    int failed = 0;

    for (int i = 0; i < BENCH_FORWARDS && failed == 0; i++)
        failed = call_once(graphs, all->next);
    if (failed == 0) return EXIT_OK;
    return fault_set(fault, EXIT_TROUBLE, "NCCL, %s: %s", table[all->next].name,
                     all->nccl.error_string(failed));
}

// ---- Before the cells --------------------------------------------------------------------------

// 1 when no rank has a reason; else the first reason there is becomes everybody's.
static int agree(struct graphs *graphs, char *reason, uint64_t reason_bytes, int *agreed,
                 struct fault *fault)
{
    int ranks = graphs->rank->link->ranks;
    char *reasons = calloc((size_t)ranks, reason_bytes);
    int st = EXIT_OK;

    *agreed = 0;
    if (reasons == NULL) TRY(fault_set(fault, EXIT_TROUBLE, "out of memory"));
    TRY(rank_gather(graphs->rank, reason, reasons, reason_bytes, fault));
    *agreed = 1;
    for (int rank = ranks - 1; rank >= 0; rank--) {
        if (reasons[(uint64_t)rank * reason_bytes] == '\0') continue;
        (void)snprintf(reason, reason_bytes, "%s", reasons + (uint64_t)rank * reason_bytes);
        *agreed = 0;
    }
out:
    free(reasons);
    return st;
}

static int join(struct graphs *graphs, char *reason, uint64_t reason_bytes, struct fault *fault)
{
    struct collectives *all = graphs->collectives;
    const struct link *link = graphs->rank->link;
    struct nccl_id own = {.bytes = {0}};
    struct nccl_id ids[BOOTSTRAP_RANKS_MAX];
    int failed = link->rank == 0 ? all->nccl.get_id(&own) : 0;
    int agreed = 0;
    int st = EXIT_OK;

    if (failed != 0)
        (void)snprintf(reason, reason_bytes, "ncclGetUniqueId: %s", all->nccl.error_string(failed));
    TRY(agree(graphs, reason, reason_bytes, &agreed, fault));
    if (!agreed) goto out;
    TRY(rank_gather(graphs->rank, &own, ids, sizeof own, fault));
    failed = all->nccl.comm_create(&all->comm, link->ranks, ids[0], link->rank);
    if (failed != 0)
        (void)snprintf(reason, reason_bytes, "ncclCommInitRank: %s",
                       all->nccl.error_string(failed));
out:
    return st;
}

static int make_memory(struct graphs *graphs, struct fault *fault)
{
    struct collectives *all = graphs->collectives;
    uint64_t ranks = (uint64_t)graphs->rank->link->ranks;
    uint64_t most = 0;
    int st = EXIT_OK;

    for (int i = 0; i < COLLECTIVES; i++) {
        uint64_t bytes = ranks * piece_bytes(graphs, graphs->job->tokens_max, i);

        if (is_wanted(graphs, i) && bytes > most) most = bytes;
    }
    TRY(memory_init(&all->from, graphs->device, most, "NCCL's rows", fault));
    TRY(memory_init(&all->to, graphs->device, most, "NCCL's rows", fault));
    TRY(bench_fill_rows(&all->from, graphs->device, graphs->job->row_format, 6000, fault));
out:
    return st;
}

int bench_nccl_open(struct graphs *graphs, char *reason, uint64_t reason_bytes, struct fault *fault)
{
    const struct bench_job *job = graphs->job;
    struct collectives *all = NULL;
    int agreed = 0;
    int st = EXIT_OK;

    reason[0] = '\0';
    if (graphs->rank->link->ranks == 1) {
        (void)snprintf(reason, reason_bytes, "one rank has nobody to talk to");
        return EXIT_OK;
    }
    graphs->collectives = all = calloc(1, sizeof *all);
    if (all == NULL) return fault_set(fault, EXIT_TROUBLE, "out of memory");
    (void)nccl_load(&all->nccl, reason, reason_bytes);
    TRY(agree(graphs, reason, reason_bytes, &agreed, fault));
    if (agreed) TRY(join(graphs, reason, reason_bytes, fault));
    if (agreed) TRY(agree(graphs, reason, reason_bytes, &agreed, fault));
    if (agreed) {
        all->row = wire_rows_of(&job->shape, job->row_format,
                                instance_config(&graphs->rank->instance, "dispatch_format"));
        TRY(make_memory(graphs, fault));
    } else {
        free(all);
        graphs->collectives = NULL;
    }
out:
    return st;
}

static void forget_cell(struct graphs *graphs)
{
    struct collectives *all = graphs->collectives;

    for (int i = 0; i < COLLECTIVES; i++) {
        device_graph_destroy(graphs->device, all->graphs[i]);
        json_decref(all->samples[i]);
        all->graphs[i] = NULL;
        all->samples[i] = NULL;
    }
}

void bench_nccl_close(struct graphs *graphs, int st)
{
    struct collectives *all = graphs->collectives;

    if (all == NULL) return;
    forget_cell(graphs);
    if (all->comm != NULL && st == EXIT_OK) (void)all->nccl.comm_destroy(all->comm);
    memory_fini(&all->from, graphs->device);
    memory_fini(&all->to, graphs->device);
    free(all);
    graphs->collectives = NULL;
}

// ---- A cell ------------------------------------------------------------------------------------

// Each first without a graph: NCCL connects peers when they first talk.
int bench_nccl_begin(struct graphs *graphs, int64_t tokens, struct fault *fault)
{
    struct collectives *all = graphs->collectives;
    int st = EXIT_OK;

    if (all == NULL) return EXIT_OK;
    all->tokens = tokens;
    for (int i = 0; i < COLLECTIVES; i++) {
        if (!is_wanted(graphs, i)) continue;
        all->next = i;
        all->samples[i] = json_array();
        TRY(enqueue(graphs, fault));
        TRY(graphs->device->table->synchronise(graphs->device, fault));
        TRY(bench_capture(graphs, enqueue, &all->graphs[i], fault));
    }
out:
    return st;
}

static int replay_one(struct graphs *graphs, int index, struct fault *fault)
{
    struct collectives *all = graphs->collectives;
    struct rank *rank = graphs->rank;
    double times_us[BOOTSTRAP_RANKS_MAX];
    double total_us = 0;
    double slowest_us = 0;
    double fastest_us = 0;
    int st = EXIT_OK;

    TRY(bench_replay_graph(graphs, all->graphs[index], all->graphs[index], &total_us, fault));
    TRY(rank_gather(rank, &total_us, times_us, sizeof total_us, fault));
    slowest_us = fastest_us = times_us[0];
    for (int i = 1; i < rank->link->ranks; i++) {
        if (times_us[i] > slowest_us) slowest_us = times_us[i];
        if (times_us[i] < fastest_us) fastest_us = times_us[i];
    }
    (void)json_array_append_new(all->samples[index],
                                json_pack("[f, f]", slowest_us / BENCH_FORWARDS,
                                          (slowest_us - fastest_us) / BENCH_FORWARDS));
out:
    return st;
}

int bench_nccl_replay(struct graphs *graphs, int backwards, struct fault *fault)
{
    int st = EXIT_OK;

    if (graphs->collectives == NULL) return EXIT_OK;
    for (int i = 0; i < COLLECTIVES; i++) {
        int index = backwards ? COLLECTIVES - 1 - i : i;

        if (is_wanted(graphs, index)) TRY(replay_one(graphs, index, fault));
    }
out:
    return st;
}

json_t *bench_nccl_end(struct graphs *graphs)
{
    struct collectives *all = graphs->collectives;
    json_t *found = NULL;

    if (all == NULL) return NULL;
    found = json_object();
    for (int i = 0; i < COLLECTIVES; i++) {
        double peers = graphs->rank->link->ranks - 1;

        if (!is_wanted(graphs, i)) continue;
        (void)json_object_set_new(found, table[i].name,
                                  json_pack("{s:O, s:f}", "samples", all->samples[i], "bytes",
                                            peers * (double)piece_bytes(graphs, all->tokens, i)));
    }
    forget_cell(graphs);
    return found;
}
