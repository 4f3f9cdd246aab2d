// Where everything lies in a window of the push protocol.

#include "kernels/ll.h"
#include "plugin/plan.h"
#include "plugin/transport.h"

// So many slabs of one per peer at `*end`, which moves past them; 0 when a size passes 2^62.
static int slabs_place(const struct limits *limits, int64_t slab_bytes, int64_t *end,
                       int64_t *offset, int64_t *pitched_bytes)
{
    int64_t all;

    *offset = *end;
    return size_align(slab_bytes, PLAN_ALIGN_BYTES, pitched_bytes) &&
           size_mul(*pitched_bytes, limits->ranks - 1, &all) && size_add(*end, all, end);
}

static int rows_place(const struct limits *limits, int64_t row_bytes, int64_t *end, int64_t *offset,
                      int64_t *slab_bytes)
{
    return size_mul(limits->rows_cap, row_bytes, slab_bytes) &&
           slabs_place(limits, *slab_bytes, end, offset, slab_bytes);
}

// Words of few rows, where peers map windows of device memory.
static int words_place(struct window_layout *window, const struct limits *limits, int on_cpu,
                       int64_t *end)
{
    const int64_t row_words = ll_row_words(limits->hidden, limits->wire_format);
    const int64_t result_words = ll_number_words(limits->hidden, limits->output_format);
    int64_t rows = ll_rows(limits->ranks, limits->hidden);

    window->ll = window->ll_results = *end;
    if (rows > limits->rows_cap) rows = limits->rows_cap;
    if (on_cpu || rows == 0 || limits->staged || limits->hidden % 8 != 0 ||
        limits->input_format == FORMAT_F32)
        return 1;
    window->ll_rows = (int32_t)rows;
    return slabs_place(limits, (1 + rows * row_words) * LL_WORD_BYTES, end, &window->ll,
                       &window->ll_slab_bytes) &&
           slabs_place(limits, rows * result_words * LL_WORD_BYTES, end, &window->ll_results,
                       &window->ll_results_slab_bytes);
}

int plan_window(struct window_layout *window, const struct limits *limits, int on_cpu)
{
    int64_t end;

    if (!size_align(TRANSPORT_CONTROL_BYTES(limits->ranks), PLAN_ALIGN_BYTES, &window->counts) ||
        !size_align(window->counts + (int64_t)(limits->ranks - 1) * FLAG_LINE_BYTES,
                    PLAN_ALIGN_BYTES, &end))
        return 0;
    if (!on_cpu) {
        window->state = end;
        if (!size_align(end + (int64_t)sizeof(struct flag_state), PLAN_ALIGN_BYTES, &end)) return 0;
    }
    if (!rows_place(limits, limits->row_bytes, &end, &window->rows, &window->rows_slab_bytes) ||
        !rows_place(limits, limits->scale_bytes, &end, &window->scales,
                    &window->scales_slab_bytes) ||
        !rows_place(limits, limits->id_bytes, &end, &window->ids, &window->ids_slab_bytes) ||
        !rows_place(limits, limits->weight_bytes, &end, &window->weights,
                    &window->weights_slab_bytes) ||
        !rows_place(limits, limits->result_bytes, &end, &window->results,
                    &window->results_slab_bytes) ||
        !words_place(window, limits, on_cpu, &end))
        return 0;
    window->bytes = end;
    return 1;
}
