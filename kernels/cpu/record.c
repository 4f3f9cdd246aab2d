// record on the CPU.

#include "kernels/record.h"

#include "kernels/cpu/ids.h"

int32_t record_cpu(const struct record_args *args, void *stream)
{
    int64_t valid = args->tokens;

    (void)stream;
    if (args->tokens_valid != NULL) valid = *args->tokens_valid - args->token_first;
    for (int32_t token = 0; token < args->tokens; token++) {
        const void *row = (const unsigned char *)args->ids + token * args->id_stride_bytes;
        int32_t *to = args->out + token * args->out_stride;

        for (int32_t k = 0; k < args->top_k; k++) {
            int64_t id = id_mapped(args->expert_map, args->map_count,
                                   id_read(row, k, args->id_bytes), 0, args->experts);

            to[k] = token < valid && id >= 0 ? (int32_t)id + args->expert_first : -1;
        }
    }
    return 0;
}
