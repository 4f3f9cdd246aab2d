// What `moxie bench` makes of the times that the ranks sent: quantiles, floors, a table and JSON.

#ifndef MOXIE_HOSTS_CLI_BENCH_REPORT_H
#define MOXIE_HOSTS_CLI_BENCH_REPORT_H

#include "hosts/cli/bench_wire.h"
#include "hosts/cli/machine.h"
#include "hosts/cli/options.h"

// What an H200 has been seen to reach: reading its memory, and multiplying bf16 of random numbers.
// fp8 is multiplied at twice the rate; 1369e12 has been seen.
#define BENCH_GPU_BYTES_PER_S     4.5e12
#define BENCH_GPU_FLOPS_PER_S     790e12
#define BENCH_GPU_FP8_FLOPS_PER_S 1580e12
// Below this the second-level cache of such a GPU still holds a good part of what comes again.
#define BENCH_GPU_REUSE_BYTES 180e6
// Above this the device was not the same before and after.
#define BENCH_DRIFT_MAX       0.03
#define BENCH_COLLECTIVES_MAX 4
#define BENCH_DELAY_US_MAX    1000.0

struct bench_options {
    struct rank_options rank;
    struct bench_shape shape;
    const char *shape_text;     // NULL until given
    int32_t format, row_format; // of the weights; of x and y
    int cells;
    int64_t tokens[BENCH_CELLS_MAX]; // per rank
    double seconds;                  // for each cell
    int op;                          // enum bench_op
    int replays;                     // of a graph, at least
    double skew, delay_us;           // 0: none
};

// One of NCCL's collectives beside a cell.
struct collective_times {
    char name[32];
    double median_us, p10_us, p90_us, spread_us;
    double bytes; // that leave a GPU
    int replays;
};

// One number of tokens. A repetition is one forward, or a graph of several.
struct cell {
    int repetitions;
    int bound_by_bytes;                                // in most repetitions
    double median_us, p10_us, p90_us, floor_us, share; // of one forward
    double touched_bytes;                              // of the weights, in one repetition
    double relative_error;                             // on a device with graphs
    double spread_us, event_us;
    double rows, sent_most, came_most; // that leave a rank; leave one; come to one
    double wire_floor_us, wire_gb_per_s, logical_gb_per_s;
    int collectives_count;
    struct collective_times collectives[BENCH_COLLECTIVES_MAX];
};

// A device with graphs; the rates before and after the cells.
struct bench_device {
    char name[96];
    int sets; // of weights in a graph
    double copy[2], fill[2];
    char no_nccl[256]; // why its collectives are not beside the cells; "": they are
};

struct bench_run {
    const struct bench_options *options;
    const moxie_build *build; // of the library
    int forwards;             // in a repetition: 1, or BENCH_FORWARDS of a graph
    struct anchors anchors;
    const char *dispatch_format; // of rows between ranks: the instance's
    struct wire_rows row;
    struct bench_device device;
    json_t *results[BENCH_CELLS_MAX]; // as rank 0 sent them
    struct cell cells[BENCH_CELLS_MAX];
    char runner[64], dispatcher[64];
};

// From the samples of the repetitions: [microseconds of one forward, spread, rows, ...].
int bench_fill_cell(struct bench_run *run, int index, const json_t *samples, struct fault *fault);
int bench_fill_collectives(struct bench_run *run, int index, const json_t *found,
                           struct fault *fault);

// owner: caller
json_t *bench_document(const struct bench_run *run);
void bench_print(const struct bench_run *run);

#endif
