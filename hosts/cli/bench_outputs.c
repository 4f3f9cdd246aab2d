// Whether the forwards of a graph computed what they should. A rank has a part of the experts, so
// that the reference of a token is a sum over ranks, as the layer is: each rank computes what its
// experts make of the token that every rank checks.

#include "hosts/cli/bench_graph.h"

#include <stdlib.h>
#include <string.h>

// The last token of the last forward of each rank.
struct checked {
    uint8_t *x;       // [ranks, H] of row_format
    int32_t *experts; // [ranks, k]
    double *shares;   // [ranks, H] that this rank's experts make
    double *all;      // [ranks, ranks, H]: of every rank
};

static void checked_fini(struct checked *checked)
{
    free(checked->x);
    free(checked->experts);
    free(checked->shares);
    free(checked->all);
}

static int checked_init(struct checked *checked, const struct graphs *graphs, struct fault *fault)
{
    const struct bench_job *job = graphs->job;
    size_t ranks = (size_t)graphs->rank->link->ranks;
    size_t hidden = (size_t)job->shape.hidden;

    *checked = (struct checked){
        .x = malloc(ranks * bench_row_bytes(job)),
        .experts = malloc(ranks * (size_t)job->shape.top_k * sizeof(int32_t)),
        .shares = calloc(ranks * hidden, sizeof(double)),
        .all = malloc(ranks * ranks * hidden * sizeof(double)),
    };
    if (checked->x != NULL && checked->experts != NULL && checked->shares != NULL &&
        checked->all != NULL)
        return EXIT_OK;
    return fault_set(fault, EXIT_TROUBLE, "out of memory");
}

// The rows and experts of all ranks' tokens.
static int gather_tokens(struct graphs *graphs, int64_t tokens, struct checked *checked,
                         struct fault *fault)
{
    const struct bench_job *job = graphs->job;
    const int last = bench_last_forward();
    uint64_t row_bytes = bench_row_bytes(job);
    const int32_t *experts = bench_drawn(graphs, last) + (tokens - 1) * job->shape.top_k;
    uint8_t *x = malloc(row_bytes);
    int st = EXIT_OK;

    if (x == NULL) TRY(fault_set(fault, EXIT_TROUBLE, "out of memory"));
    TRY(graphs->device->table->copy_out(graphs->device, x,
                                        graphs->x[last].at + (uint64_t)(tokens - 1) * row_bytes,
                                        row_bytes, fault));
    TRY(rank_gather(graphs->rank, x, checked->x, row_bytes, fault));
    TRY(rank_gather(graphs->rank, experts, checked->experts,
                    (uint64_t)job->shape.top_k * sizeof *experts, fault));
out:
    free(x);
    return st;
}

static int compute_shares(struct graphs *graphs, struct checked *checked, struct fault *fault)
{
    const struct bench_job *job = graphs->job;
    const struct layer_set *set = &graphs->set[bench_last_forward() % graphs->sets];
    int st = EXIT_OK;

    for (int rank = 0; rank < graphs->rank->link->ranks; rank++) {
        const struct token token = {
            .w1 = &set->w1,
            .w2 = &set->w2,
            .x = checked->x + (uint64_t)rank * bench_row_bytes(job),
            .x_format = job->row_format,
            .experts = checked->experts + rank * job->shape.top_k,
            .top_k = job->shape.top_k,
            .expert_first = graphs->rank->instance.plan->bounds->expert_first,
        };

        TRY(bench_check_share(&token, checked->shares + rank * job->shape.hidden, fault));
    }
out:
    return st;
}

// This rank's token, of the shares of all ranks, in place of its own share.
static int add_shares(struct graphs *graphs, struct checked *checked, double **y,
                      struct fault *fault)
{
    int64_t hidden = graphs->job->shape.hidden;
    int ranks = graphs->rank->link->ranks;
    int64_t all = ranks * hidden;
    int st = EXIT_OK;

    *y = checked->shares + graphs->rank->link->rank * hidden;
    TRY(rank_gather(graphs->rank, checked->shares, checked->all, (uint64_t)all * sizeof **y,
                    fault));
    memset(*y, 0, (size_t)hidden * sizeof **y);
    for (int rank = 0; rank < ranks; rank++)
        for (int64_t i = 0; i < hidden; i++)
            (*y)[i] += checked->all[rank * all + graphs->rank->link->rank * hidden + i];
out:
    return st;
}

static int find_reference(struct graphs *graphs, int64_t tokens, struct checked *checked,
                          double **y, struct fault *fault)
{
    const struct bench_job *job = graphs->job;
    int own = graphs->rank->link->rank;
    int st = EXIT_OK;

    TRY(gather_tokens(graphs, tokens, checked, fault));
    if (graphs->rounds != NULL) {
        *y = checked->shares;
        TRY(bench_rounds_expect(graphs, checked->x + (uint64_t)own * bench_row_bytes(job),
                                checked->experts + own * job->shape.top_k, *y, fault));
    } else {
        TRY(compute_shares(graphs, checked, fault));
        TRY(add_shares(graphs, checked, y, fault));
    }
out:
    return st;
}

int bench_check_outputs(struct graphs *graphs, int64_t tokens, int all, struct fault *fault)
{
    int st = EXIT_OK;

    for (int i = 0; i < BENCH_FORWARDS; i++) {
        const struct output output = {&graphs->y[i], graphs->job->shape.hidden,
                                      graphs->job->row_format};

        TRY(bench_check_rows(graphs->device, &output, 0, all ? tokens : 1, fault));
        if (!all) TRY(bench_check_rows(graphs->device, &output, tokens - 1, 1, fault));
    }
out:
    return st;
}

int bench_check_numbers(struct graphs *graphs, int64_t tokens, double *relative_error,
                        struct fault *fault)
{
    const struct bench_job *job = graphs->job;
    const struct output output = {&graphs->y[bench_last_forward()], job->shape.hidden,
                                  job->row_format};
    // Rounds without experts quantise nothing that is checked.
    double error_max =
        bench_check_error_max(graphs->rounds != NULL ? job->row_format : job->format, &job->shape);
    struct checked checked = {.x = NULL};
    double *y = NULL;
    int st = EXIT_OK;

    TRY(checked_init(&checked, graphs, fault));
    TRY(find_reference(graphs, tokens, &checked, &y, fault));
    TRY(bench_check_row(graphs->device, &output, tokens - 1, y, relative_error, fault));
    // NaN is none: a layer whose output is zero would pass whatever it computes.
    if (!(*relative_error <= error_max))
        TRY(fault_set(fault, EXIT_TOLERANCE,
                      "%lld tokens: the last one's relative error is %.3e; at most %.0e is wanted",
                      (long long)tokens, *relative_error, error_max));
out:
    checked_fini(&checked);
    return st;
}
