// Bytes between ranks, and what the links of a GPU allow.

#ifndef MOXIE_HOSTS_CLI_BENCH_WIRE_H
#define MOXIE_HOSTS_CLI_BENCH_WIRE_H

#include "hosts/cli/bench.h"

// What leaves one H200 over all its links at best, as has been seen.
#define WIRE_BYTES_PER_S 350e9

// Bytes of one row as it goes, with its scales, ids and weights, and as its result comes back.
struct wire_rows {
    uint64_t dispatch_bytes, result_bytes;
};

// `dispatch_format`: the value of that key.
struct wire_rows wire_rows_of(const struct bench_shape *shape, int32_t row_format,
                              const char *dispatch_format);

// Bytes of `op` where so many rows go and so many results come back.
double wire_bytes(const struct wire_rows *row, int op, double rows, double results);

#endif
