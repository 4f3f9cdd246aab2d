// Bytes between ranks.

#include "hosts/cli/bench_wire.h"

#include <string.h>

struct wire_rows wire_rows_of(const struct bench_shape *shape, int32_t row_format,
                              const char *dispatch_format)
{
    uint64_t hidden = (uint64_t)shape->hidden;
    uint64_t plain = hidden * format_element_bytes(row_format);
    uint64_t payload = plain;

    if (strcmp(dispatch_format, "fp8_block128") == 0)
        payload = hidden + (hidden + 127) / 128 * sizeof(float);
    else if (strcmp(dispatch_format, "nvfp4") == 0)
        payload = hidden / 2 + sizeof(float) + hidden / 16;
    return (struct wire_rows){
        .dispatch_bytes = payload + (uint64_t)shape->top_k * (sizeof(int32_t) + sizeof(float)),
        .result_bytes = plain,
    };
}

double wire_bytes(const struct wire_rows *row, int op, double rows, double results)
{
    double bytes = 0;

    if (op != BENCH_COMBINE) bytes += rows * (double)row->dispatch_bytes;
    if (op != BENCH_DISPATCH) bytes += results * (double)row->result_bytes;
    return bytes;
}
