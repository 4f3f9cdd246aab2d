// One rank's share of a run or a bench: an opened instance, its runner and its dispatcher, in a
// process of its own.

#ifndef MOXIE_HOSTS_CLI_RANK_H
#define MOXIE_HOSTS_CLI_RANK_H

#include "hosts/cli/bench.h"
#include "hosts/cli/bootstrap.h"
#include "hosts/cli/instance.h"
#include "hosts/cli/weights.h"

struct rank {
    struct link *link;
    char plugin_path[PATH_MAX];
    struct plugin plugin;
    struct device device; // that of the runner
    struct instance instance;
    json_t *config;
    const moxie_runner_info *runner_info;
    const moxie_dispatcher_info *dispatcher_info;
    moxie_runner *runner;
    moxie_dispatcher *dispatcher;
};

// Loads the library, opens an instance with the job's "config" and its device. Do not move `rank`
// afterwards.
int rank_open(struct rank *rank, struct link *link, const json_t *job, struct fault *fault);
// Makes a runner of layer 0 in rank->runner.
int rank_create_runner(struct rank *rank, const struct weights *w1, const struct weights *w2,
                       struct fault *fault);
// Collective.
int rank_create_dispatcher(struct rank *rank, struct fault *fault);
// At the end of a function whose outcome is `st`, in this order, around the release of what the
// rank has on its device: the first gives back all that is the library's, the second closes the
// device. Both accept a zeroed or half-opened rank.
int rank_stop(struct rank *rank, int st, struct fault *fault);
int rank_finish(struct rank *rank, int st, struct fault *fault);

// The tensors of one forward of this rank, on its device; `rank_tokens` [ranks].
struct forward {
    const int64_t *rank_tokens;
    void *x, *ids, *weights, *y;
    int32_t x_format, y_format, id_bytes;
    int64_t hidden, top_k;
};

// The same as the library wants them. Do not move it.
struct rank_batch {
    int64_t x_shape[2], k_shape[2];
    moxie_batch batch;
};
void rank_describe(const struct rank *rank, const struct forward *forward,
                   struct rank_batch *batch);

// What comes before the layers of a forward. Collective.
int rank_begin(struct rank *rank, const struct forward *forward, struct fault *fault);
// In the order of the device's stream. Collective.
int rank_forward(struct rank *rank, const struct forward *forward, struct fault *fault);

// Microseconds from the start of one forward, entered by all ranks together, until it is done.
// Collective.
int rank_time_forward(struct rank *rank, const struct forward *forward, double *time_us,
                      struct fault *fault);
// `all` gets the `bytes` of every rank, in rank order. Collective.
int rank_gather(struct rank *rank, const void *own, void *all, uint64_t bytes, struct fault *fault);
// The largest value over all ranks. Collective.
int rank_max(struct rank *rank, double value, double *max, struct fault *fault);

// What a command does in a rank process. `job` is what the parent sent.
int run_rank(struct link *link, const json_t *job, struct fault *fault);
int bench_rank(struct link *link, const json_t *job, struct fault *fault);
// Its half for devices that have graphs.
int bench_graphs(struct rank *rank, const struct bench_job *job, struct fault *fault);

#endif
