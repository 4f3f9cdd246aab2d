// The extension moxie.expand/1: a row for every local expert of every row, and the sums back.

#include "host_tests/mock_plugin/mock.h"

#include <string.h>

// Rows of one source, by their ids.
struct source_slab {
    struct view rows, ids, weights;
};

struct expansion {
    const struct runner *runner;
    const moxie_rows *plain; // by ids
    struct source_slab sources[MOXIE_RANKS_MAX];
    struct view counts, map; // of plain
    int64_t cap;             // rows of a source
    int32_t masked;
    struct view rows, index; // by expert; where each row went
};

// ---- Checks ------------------------------------------------------------------------------------

static int32_t read_sides(const struct call *call, const moxie_rows *expanded,
                          const moxie_tensor *index, struct expansion *to)
{
    const struct limits *limits = &call->instance->limits;
    struct want rows = {"slabs.rows", TYPE_FLOATS, 2, {-1, limits->hidden, 0}, 0};
    struct want by_expert = {"expanded.slabs.rows", TYPE_FLOATS, 2, {-1, limits->hidden, 0}, 0};
    struct want places = {"row_index", TYPE_I32, 2, {0, limits->top_k, 0}, 0};
    int32_t st = MOXIE_OK;

    if (layout_is_by_expert(to->plain->layout) || !layout_is_by_expert(expanded->layout) ||
        expanded->slabs_count != 1)
        TRY(fail_with(&call->caller, MOXIE_E_INVALID,
                      "rows of layout %d, expanded rows of layout %d in %u slabs; want STANDARD or "
                      "RANK_MAJOR, and one slab of an EXPERT_ layout",
                      to->plain->layout, expanded->layout, expanded->slabs_count));
    to->masked = expanded->layout == MOXIE_LAYOUT_EXPERT_MASKED;
    if (to->masked) {
        by_expert.ndim = 3;
        memcpy(by_expert.shape, (int64_t[]){limits->experts_local, -1, limits->hidden},
               sizeof by_expert.shape);
    }
    TRY(view_read(&call->caller, &by_expert, &expanded->slabs->rows, &to->rows));
    for (uint32_t i = 0; i < to->plain->slabs_count; i++) {
        TRY(view_read(&call->caller, &rows, &to->plain->slabs[i].rows, &to->sources[i].rows));
        rows.shape[0] = to->cap = to->sources[0].rows.shape[0];
    }
    if (index == NULL) TRY(fail_with(&call->caller, MOXIE_E_INVALID, "row_index is NULL"));
    places.shape[0] = to->cap * to->plain->slabs_count;
    TRY(view_read(&call->caller, &places, index, &to->index));
out:
    return st;
}

// What only expand reads.
static int32_t read_choices_of(const struct call *call, struct expansion *to)
{
    const moxie_rows *in = to->plain;
    int32_t top_k = call->instance->limits.top_k;
    const struct want ids = {"in.slabs.ids", TYPE_IDS, 2, {to->cap, top_k, 0}, 0};
    const struct want weights = {"in.slabs.weights", TYPE_FLOATS, 2, {to->cap, top_k, 0}, 0};
    const struct want map = {"in.expert_map", TYPE_I32, 1, {-1, 0, 0}, 1};
    struct want counts = {"in.counts", TYPE_I32, 1, {in->slabs_count, 0, 0}, 0};
    int32_t st = MOXIE_OK;

    counts.optional = in->layout == MOXIE_LAYOUT_STANDARD;
    TRY(view_read(&call->caller, &counts, &in->counts, &to->counts));
    TRY(view_read(&call->caller, &map, &in->expert_map, &to->map));
    for (uint32_t i = 0; i < in->slabs_count; i++) {
        TRY(view_read(&call->caller, &ids, &in->slabs[i].ids, &to->sources[i].ids));
        TRY(view_read(&call->caller, &weights, &in->slabs[i].weights, &to->sources[i].weights));
    }
out:
    return st;
}

// ---- Expand ------------------------------------------------------------------------------------

static unsigned char *place_at(const struct expansion *expansion, const struct view *view,
                               int64_t place)
{
    int64_t cap = expansion->rows.shape[1];

    if (!expansion->masked) return view_at(view, place, 0, 0);
    return view_at(view, place / cap, place % cap, 0);
}

static int64_t valid_rows(const struct expansion *expansion, uint32_t source)
{
    int64_t count = expansion->cap;

    if (expansion->counts.data != NULL) count = view_integer(&expansion->counts, source, 0);
    return count < 0 ? 0 : count > expansion->cap ? expansion->cap : count;
}

static void store_place(const struct expansion *expansion, int64_t row, int64_t k, int64_t place)
{
    *(int32_t *)(void *)view_at(&expansion->index, row, k, 0) = (int32_t)place;
}

// Copies every row of one expert, from place `first` on; returns the place behind the last.
static int64_t copy_expert(const struct expansion *expansion, int64_t expert, int64_t first,
                           const struct view *weights)
{
    const struct instance *instance = expansion->runner->instance;
    const moxie_rows *in = expansion->plain;
    int64_t row_bytes = instance->limits.hidden * type_bytes(expansion->rows.type);

    expert += instance->limits.expert_first;
    for (uint32_t i = 0; i < in->slabs_count; i++) {
        const struct source_slab *from = &expansion->sources[i];

        for (int64_t row = 0; row < valid_rows(expansion, i); row++) {
            for (int32_t k = 0; k < instance->limits.top_k; k++) {
                int64_t id = view_integer(&from->ids, row, k);

                if (physical_expert(instance, &expansion->map, in->id_space, id) != expert)
                    continue;
                memcpy(place_at(expansion, &expansion->rows, first),
                       view_at(&from->rows, row, 0, 0), (size_t)row_bytes);
                number_store(TYPE_F32, view_number(&from->weights, row, k, 0),
                             place_at(expansion, weights, first));
                store_place(expansion, i * expansion->cap + row, k, first++);
            }
        }
    }
    return first;
}

static int32_t expand_rows(const struct call *call, const struct expansion *expansion,
                           const moxie_rows *out)
{
    int64_t experts = call->instance->limits.experts_local, place = 0;
    int64_t cap = expansion->rows.shape[expansion->masked ? 1 : 0];
    int64_t most = expansion->index.shape[0] * expansion->index.shape[1];
    struct want want_weights = {"out.slabs.weights", TYPE_F32, 1, {cap, 0, 0}, 0};
    const struct want want_counts = {
        "out.counts", TYPE_I32, 1, {experts + !expansion->masked, 0, 0}, 0};
    struct view weights, counts;
    int32_t st = MOXIE_OK;

    if (expansion->masked)
        want_weights = (struct want){
            want_weights.name, TYPE_F32, 2, {experts, expansion->rows.shape[1], 0}, 0};
    TRY(view_read(&call->caller, &want_weights, &out->slabs->weights, &weights));
    TRY(view_read(&call->caller, &want_counts, &out->counts, &counts));
    for (uint32_t i = 0; i < expansion->plain->slabs_count; i++) {
        if (expansion->sources[i].rows.type != expansion->rows.type)
            TRY(fail_with(&call->caller, MOXIE_E_INVALID, "expand: out has rows of another dtype"));
    }
    if (cap < most)
        TRY(fail_with(&call->caller, MOXIE_E_CAPACITY,
                      "expand: out has %lld rows; the worst case is %lld", (long long)cap,
                      (long long)most));
    for (int64_t i = 0; i < most; i++)
        store_place(expansion, i / expansion->index.shape[1], i % expansion->index.shape[1], -1);
    for (int64_t expert = 0; expert < experts; expert++) {
        int64_t first = expansion->masked ? expert * cap : place;

        place = copy_expert(expansion, expert, first, &weights);
        *(int32_t *)(void *)view_at(&counts, expert, 0, 0) =
            (int32_t)(expansion->masked ? place - first : first);
    }
    if (!expansion->masked) *(int32_t *)(void *)view_at(&counts, experts, 0, 0) = (int32_t)place;
out:
    return st;
}

static int32_t expand(moxie_runner *handle, const moxie_call *given, const moxie_rows *given_in,
                      const moxie_rows *given_out, const moxie_tensor *row_index,
                      moxie_error *error)
{
    moxie_slab in_slabs[MOXIE_RANKS_MAX], out_slabs[MOXIE_RANKS_MAX];
    struct expansion expansion = {.cap = 0};
    moxie_rows in, out;
    struct call call;
    int32_t st = MOXIE_OK;

    TRY(call_enter(&call, handle, HANDLE_RUNNER, MOXIE_THREAD_INSTANCE_SERIAL, error));
    TRY(call_read(&call, given));
    TRY(rows_read(&call.caller, "in", given_in, &in, in_slabs));
    TRY(rows_read(&call.caller, "out", given_out, &out, out_slabs));
    expansion.runner = call.body;
    expansion.plain = &in;
    TRY(read_sides(&call, &out, row_index, &expansion));
    TRY(read_choices_of(&call, &expansion));
    TRY(expand_rows(&call, &expansion, &out));
out:
    if (st == MOXIE_E_CAPACITY) call.instance->stats.refused++;
    call_leave(&call);
    return st;
}

// ---- Fold --------------------------------------------------------------------------------------

static void fold_row(const struct expansion *expansion, int64_t row)
{
    const struct limits *limits = &expansion->runner->instance->limits;
    const struct view *to = &expansion->sources[row / expansion->cap].rows;
    int64_t places = expansion->rows.shape[0] * (expansion->masked ? expansion->rows.shape[1] : 1);
    int64_t element = type_bytes(expansion->rows.type);

    for (int64_t h = 0; h < limits->hidden; h++) {
        double sum = 0.0;

        for (int32_t k = HAS_FAULT(FAULT_HALF_FOLD) ? 1 : 0; k < limits->top_k; k++) {
            int64_t place = view_integer(&expansion->index, row, k);

            if (place < 0 || place >= places) continue;
            sum += number_load(expansion->rows.type,
                               place_at(expansion, &expansion->rows, place) + h * element);
        }
        number_store(to->type, sum, view_at(to, row % expansion->cap, h, 0));
    }
}

static int32_t fold(moxie_runner *handle, const moxie_call *given, const moxie_rows *given_expanded,
                    const moxie_tensor *row_index, const moxie_rows *given_out, moxie_error *error)
{
    moxie_slab expanded_slabs[MOXIE_RANKS_MAX], out_slabs[MOXIE_RANKS_MAX];
    struct expansion expansion = {.cap = 0};
    moxie_rows expanded, out;
    struct call call;
    int32_t st = MOXIE_OK;

    TRY(call_enter(&call, handle, HANDLE_RUNNER, MOXIE_THREAD_INSTANCE_SERIAL, error));
    TRY(call_read(&call, given));
    TRY(rows_read(&call.caller, "expanded", given_expanded, &expanded, expanded_slabs));
    TRY(rows_read(&call.caller, "out", given_out, &out, out_slabs));
    expansion.runner = call.body;
    expansion.plain = &out;
    TRY(read_sides(&call, &expanded, row_index, &expansion));
    for (uint32_t i = 0; i < out.slabs_count; i++) {
        if (view_rows_overlap(&expansion.sources[i].rows))
            TRY(fail_with(&call.caller, MOXIE_E_INVALID, "out.slabs[%u].rows: its rows overlap",
                          i));
    }
    for (int64_t row = 0; row < expansion.index.shape[0]; row++)
        fold_row(&expansion, row);
out:
    call_leave(&call);
    return st;
}

const moxie_expand_api expand_api = {
    .struct_size = sizeof(moxie_expand_api),
    .expand = expand,
    .fold = fold,
};
