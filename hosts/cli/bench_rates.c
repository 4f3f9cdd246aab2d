// What a device's driver reaches by itself: before the cells and after, so that a device that has
// changed meanwhile is seen.

#include "hosts/cli/bench_graph.h"
#include "hosts/cli/numbers.h"

#define ANCHOR_BYTES  ((uint64_t)1 << 30)
#define ANCHOR_PASSES 9

static int time_pass(struct graphs *graphs, struct memory halves[2], int copies, double *time_us,
                     struct fault *fault)
{
    struct device *device = graphs->device;
    int st = EXIT_OK;

    TRY(device->table->event_record(device, graphs->before, fault));
    if (copies)
        TRY(device->table->copy(device, halves[0].at, halves[1].at, halves[0].bytes, fault));
    else
        TRY(device->table->fill(device, halves[0].at, 0x3c, halves[0].bytes, fault));
    TRY(device->table->event_record(device, graphs->after, fault));
    TRY(device->table->synchronise(device, fault));
    TRY(device->table->elapsed_us(device, graphs->before, graphs->after, time_us, fault));
out:
    return st;
}

static int measure_rate(struct graphs *graphs, struct memory halves[2], int copies, double *rate,
                        struct fault *fault)
{
    double times_us[ANCHOR_PASSES];
    double bytes = (double)halves[0].bytes * (copies ? 2 : 1);
    int st = EXIT_OK;

    TRY(time_pass(graphs, halves, copies, &times_us[0], fault));
    for (int i = 0; i < ANCHOR_PASSES; i++)
        TRY(time_pass(graphs, halves, copies, &times_us[i], fault));
    numbers_sort(times_us, ANCHOR_PASSES);
    *rate = 1e6 * bytes / numbers_quantile(times_us, ANCHOR_PASSES, 0.5);
out:
    return st;
}

int bench_measure_rates(struct graphs *graphs, struct rates *rates, struct fault *fault)
{
    struct device *device = graphs->device;
    struct memory halves[2] = {{NULL, 0}, {NULL, 0}};
    uint64_t bytes = 0;
    int st = EXIT_OK;

    TRY(device->table->free_bytes(device, &bytes, fault));
    bytes = bytes / 8 < ANCHOR_BYTES ? bytes / 8 : ANCHOR_BYTES;
    TRY(memory_init(&halves[0], device, bytes, "the anchors", fault));
    TRY(memory_init(&halves[1], device, bytes, "the anchors", fault));
    TRY(bench_fill_rows(&halves[1], device, MOXIE_FORMAT_BF16, 4000, fault));
    TRY(measure_rate(graphs, halves, 1, &rates->copy, fault));
    TRY(measure_rate(graphs, halves, 0, &rates->fill, fault));
out:
    memory_fini(&halves[0], device);
    memory_fini(&halves[1], device);
    return st;
}
