// The rule of receive layouts: rows handed to run() by hand, in every layout that the chosen runner
// says it takes; and the extension that makes them.

#include "hosts/cli/conform_stage.h"
#include "hosts/cli/fault.h"

#include <math.h>
#include <string.h>

#define CAP 6 // rows of a slab, more than are used

// One slab of rows, as received and as result. Rows lie as tokens do.
struct rows_room {
    int64_t rows_shape[3], weights_shape[2], counts_shape[1];
    int32_t counts[BASE_EXPERTS + 1];
    moxie_slab slabs[2];
    moxie_rows in, out;
};

static int is_by_expert(int32_t layout)
{
    return layout == MOXIE_LAYOUT_EXPERT_CONTIGUOUS || layout == MOXIE_LAYOUT_EXPERT_MASKED;
}

// How many rows of expert `expert` there are, in EXPERT_ layouts: some have none.
static int64_t rows_of(int64_t expert)
{
    return expert % 4 == 1 ? 0 : 1 + expert % 3;
}

// Which expert a row is for; -1: the row is not used.
static int64_t expert_of(int32_t layout, int64_t row)
{
    int64_t expert = 0;

    if (layout == MOXIE_LAYOUT_EXPERT_MASKED)
        return row % CAP < rows_of(row / CAP) ? row / CAP : -1;
    for (; expert < BASE_EXPERTS && row >= rows_of(expert); expert++)
        row -= rows_of(expert);
    return expert;
}

static int64_t count_rows(int32_t layout)
{
    int64_t count = 0;

    if (layout == MOXIE_LAYOUT_STANDARD) return CAP - 1;
    if (layout == MOXIE_LAYOUT_RANK_MAJOR) return CAP;
    if (layout == MOXIE_LAYOUT_EXPERT_MASKED) return BASE_EXPERTS * CAP;
    for (int64_t expert = 0; expert < BASE_EXPERTS; expert++)
        count += rows_of(expert);
    return count;
}

// Random rows, with what they must become in tokens->want.
static int make_rows(struct stage *stage, int32_t layout)
{
    struct tokens *tokens = &stage->tokens;
    int st = VERDICT_PASS;

    stage->tokens_spec.count = count_rows(layout);
    stage->tokens_spec.top_k = is_by_expert(layout) ? 1 : BASE_TOP_K;
    TRY(tokens_make(tokens, &stage->tokens_spec, stage->check));
    for (int64_t row = 0; row < tokens->spec.count; row++) {
        int used = layout != MOXIE_LAYOUT_RANK_MAJOR || row < CAP - 1;

        if (is_by_expert(layout)) tokens->experts[row] = expert_of(layout, row);
        if (is_by_expert(layout)) used = tokens->experts[row] >= 0;
        if (used) continue;
        // Rows past the count hold anything.
        for (int64_t i = 0; i < BASE_HIDDEN; i++)
            number_write(tokens->x, tokens->spec.x_format, row * BASE_HIDDEN + i, NAN);
        for (int64_t place = 0; place < tokens->spec.top_k; place++)
            tokens->experts[row * tokens->spec.top_k + place] = -1;
    }
    TRY(reference_compute(tokens, &stage->layer, stage->check));
out:
    return st;
}

static void describe_counts(struct rows_room *room, int32_t layout)
{
    int64_t count = 1;

    room->counts[0] = layout == MOXIE_LAYOUT_RANK_MAJOR ? CAP - 1 : 0;
    if (layout == MOXIE_LAYOUT_EXPERT_CONTIGUOUS) {
        count = BASE_EXPERTS + 1;
        for (int64_t expert = 0; expert < BASE_EXPERTS; expert++)
            room->counts[expert + 1] = room->counts[expert] + (int32_t)rows_of(expert);
    }
    if (layout == MOXIE_LAYOUT_EXPERT_MASKED) {
        count = BASE_EXPERTS;
        for (int64_t expert = 0; expert < BASE_EXPERTS; expert++)
            room->counts[expert] = (int32_t)rows_of(expert);
    }
    room->counts_shape[0] = count;
    if (layout == MOXIE_LAYOUT_STANDARD) return;
    room->in.counts = conform_tensor(room->counts, (moxie_dtype){MOXIE_DTYPE_INT, 32, 1}, 1,
                                     room->counts_shape, NULL);
}

static void describe_rows(const struct stage *stage, int32_t layout, int32_t id_space,
                          struct rows_room *room)
{
    const struct tokens *tokens = &stage->tokens;
    int masked = layout == MOXIE_LAYOUT_EXPERT_MASKED;
    moxie_slab *in = &room->slabs[0], *out = &room->slabs[1];

    *room = (struct rows_room){.rows_shape = {tokens->spec.count, BASE_HIDDEN}};
    if (masked) memcpy(room->rows_shape, (int64_t[]){BASE_EXPERTS, CAP, BASE_HIDDEN}, 24);
    memcpy(room->weights_shape, (int64_t[]){tokens->spec.count, tokens->spec.top_k}, 16);
    if (masked) memcpy(room->weights_shape, (int64_t[]){BASE_EXPERTS, CAP}, 16);
    *in = (moxie_slab){.struct_size = sizeof *in, .rows = tokens->batch.x};
    *out = (moxie_slab){.struct_size = sizeof *out, .rows = tokens->batch.y};
    in->rows.shape = out->rows.shape = room->rows_shape;
    in->rows.ndim = out->rows.ndim = 2 + masked;
    in->weights = tokens->batch.weights;
    in->weights.shape = room->weights_shape;
    if (layout == MOXIE_LAYOUT_EXPERT_CONTIGUOUS) in->weights.ndim = 1;
    if (!is_by_expert(layout)) in->ids = tokens->batch.ids;
    room->in = (moxie_rows){.struct_size = sizeof room->in,
                            .layout = layout,
                            .id_space = id_space,
                            .slabs_count = 1,
                            .slab_stride = sizeof(moxie_slab),
                            .slabs = in};
    room->out = room->in;
    room->out.slabs = out;
    describe_counts(room, layout);
}

// Zeros where a result row is nobody's: what a runner leaves there is its own affair.
static void clear_unused(struct tokens *tokens)
{
    for (int64_t row = 0; row < tokens->spec.count; row++) {
        if (tokens->experts[row * tokens->spec.top_k] >= 0) continue;
        for (int64_t i = 0; i < BASE_HIDDEN; i++)
            number_write(tokens->y, tokens->spec.y_format, row * BASE_HIDDEN + i, 0);
    }
}

static int32_t lowest_space(uint32_t spaces)
{
    int32_t space = MOXIE_IDS_GLOBAL;

    while (space < MOXIE_IDS_LOCAL && (spaces >> space & 1) == 0)
        space++;
    return space;
}

static int check_layout(struct stage *stage, int32_t layout)
{
    static const char *const names[] = {"", "STANDARD", "RANK_MAJOR", "EXPERT_CONTIGUOUS",
                                        "EXPERT_MASKED"};
    struct engine *engine = &stage->engine;
    const moxie_call call = {.struct_size = sizeof call};
    struct rows_room room;
    int st = VERDICT_PASS;

    TRY(make_rows(stage, layout));
    for (int weighted = 1; weighted >= 0; weighted--) {
        if (!weighted && !is_by_expert(layout)) break;
        describe_rows(stage, layout, lowest_space(engine->runner_info->traits->id_spaces), &room);
        if (!weighted) {
            room.slabs[0].weights = (moxie_tensor){.data = NULL}; // none: weight 1
            for (int64_t i = 0; i < stage->tokens.spec.count; i++)
                stage->tokens.weights_exact[i] = 1;
            TRY(reference_compute(&stage->tokens, &stage->layer, stage->check));
        }
        tokens_poison(&stage->tokens);
        check_at(stage->check, "run of %s rows%s", names[layout],
                 weighted ? "" : " without weights");
        TRY(expect_status(stage->check,
                          engine->runner_info->api->run(engine->runners_made[0], &call, &room.in,
                                                        &room.out, engine_error(engine)),
                          MOXIE_OK, engine->text));
        clear_unused(&stage->tokens);
        TRY(tokens_compare(&stage->tokens, stage_tolerance(engine, stage->tokens.spec.y_format),
                           stage->check));
    }
out:
    return st;
}

int rule_receive_layouts(struct check *check)
{
    struct stage stage;
    const moxie_traits *traits = NULL;
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    traits = stage.engine.runner_info->traits;
    check_at(check, "traits of the runner");
    if ((traits->formats >> stage.base.input_format & 1) == 0)
        TRY(broken(check, "formats do not hold %s, the input_format that was accepted",
                   format_key(stage.base.input_format)));
    if (traits->weights_applied_by != MOXIE_BY_RUNNER)
        TRY(skipped(check, "the runner does not apply router weights"));
    for (int32_t layout = MOXIE_LAYOUT_STANDARD; layout <= MOXIE_LAYOUT_EXPERT_MASKED; layout++)
        if ((traits->layouts & MOXIE_LAYOUT_BIT(layout)) != 0) TRY(check_layout(&stage, layout));
out:
    stage_fini(&stage);
    return st;
}

// ---- moxie.expand/1 ----------------------------------------------------------------------------

// Room for the worst case of expand: every place of every row.
struct expanded {
    unsigned char rows[BASE_EXPERTS * BASE_TOKENS_MAX * BASE_TOP_K * BASE_HIDDEN * 4];
    unsigned char results[BASE_EXPERTS * BASE_TOKENS_MAX * BASE_TOP_K * BASE_HIDDEN * 4];
    float weights[BASE_EXPERTS * BASE_TOKENS_MAX * BASE_TOP_K];
    int32_t index[BASE_TOKENS_MAX * BASE_TOP_K];
    int32_t counts[BASE_EXPERTS + 1];
    int64_t rows_shape[3], weights_shape[2], index_shape[2], counts_shape[1];
    moxie_slab slabs[2];
    moxie_rows in, out; // what run reads and writes
};

static void describe_expanded(const struct stage *stage, int32_t layout, struct expanded *room)
{
    const struct tokens_spec *spec = &stage->tokens.spec;
    int masked = layout == MOXIE_LAYOUT_EXPERT_MASKED;
    int64_t places = spec->count * BASE_TOP_K;
    const moxie_dtype i32 = {MOXIE_DTYPE_INT, 32, 1};
    moxie_slab *slabs = room->slabs;

    memcpy(room->rows_shape, (int64_t[]){places, BASE_HIDDEN, 0}, 24);
    memcpy(room->weights_shape, (int64_t[]){places, 0}, 16);
    if (masked) {
        memcpy(room->rows_shape, (int64_t[]){BASE_EXPERTS, places, BASE_HIDDEN}, 24);
        memcpy(room->weights_shape, (int64_t[]){BASE_EXPERTS, places}, 16);
    }
    memcpy(room->index_shape, (int64_t[]){spec->count, BASE_TOP_K}, 16);
    room->counts_shape[0] = BASE_EXPERTS + !masked;
    for (int i = 0; i < 2; i++)
        slabs[i] = (moxie_slab){
            .struct_size = sizeof slabs[i],
            .rows = conform_tensor(i == 0 ? room->rows : room->results,
                                   dtype_of(i == 0 ? spec->x_format : spec->y_format), 2 + masked,
                                   room->rows_shape, NULL),
        };
    slabs[0].weights = conform_tensor(room->weights, dtype_of(MOXIE_FORMAT_F32), 1 + masked,
                                      room->weights_shape, NULL);
    room->in = (moxie_rows){
        .struct_size = sizeof room->in,
        .layout = layout,
        .id_space = MOXIE_IDS_LOCAL,
        .slabs_count = 1,
        .slab_stride = sizeof(moxie_slab),
        .slabs = &slabs[0],
        .counts = conform_tensor(room->counts, i32, 1, room->counts_shape, NULL),
    };
    room->out = room->in;
    room->out.slabs = &slabs[1];
}

static int check_expand(struct stage *stage, const moxie_expand_api *api, int32_t layout,
                        struct expanded *to)
{
    struct engine *engine = &stage->engine;
    struct check *check = stage->check;
    const moxie_call call = {.struct_size = sizeof call};
    moxie_runner *runner = engine->runners_made[0];
    struct rows_room from;
    moxie_tensor index;
    int st = VERDICT_PASS;

    describe_rows(stage, MOXIE_LAYOUT_STANDARD,
                  lowest_space(engine->runner_info->traits->id_spaces), &from);
    describe_expanded(stage, layout, to);
    index =
        conform_tensor(to->index, (moxie_dtype){MOXIE_DTYPE_INT, 32, 1}, 2, to->index_shape, NULL);
    tokens_poison(&stage->tokens);
    check_at(check, "expand to layout %d", layout);
    TRY(expect_status(check,
                      api->expand(runner, &call, &from.in, &to->in, &index, engine_error(engine)),
                      MOXIE_OK, engine->text));
    check_at(check, "run of what expand made, layout %d", layout);
    TRY(expect_status(
        check,
        engine->runner_info->api->run(runner, &call, &to->in, &to->out, engine_error(engine)),
        MOXIE_OK, engine->text));
    check_at(check, "fold from layout %d", layout);
    TRY(expect_status(check,
                      api->fold(runner, &call, &to->out, &index, &from.out, engine_error(engine)),
                      MOXIE_OK, engine->text));
    TRY(tokens_compare(&stage->tokens, stage_tolerance(engine, stage->tokens.spec.y_format),
                       check));
out:
    return st;
}

int rule_expand(struct check *check)
{
    static struct expanded room;
    struct stage stage;
    const moxie_expand_api *api = NULL;
    uint32_t layouts = 0;
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    check_at(check, "get_extension(\"" MOXIE_EXPAND_EXTENSION "\")");
    api = stage.engine.api->get_extension(MOXIE_EXPAND_EXTENSION);
    if (api == NULL) TRY(skipped(check, "is not offered"));
    if (api->struct_size < sizeof *api || api->expand == NULL || api->fold == NULL)
        TRY(broken(check, "the table is not complete"));
    layouts = stage.engine.runner_info->traits->layouts;
    TRY(reference_compute(&stage.tokens, &stage.layer, check));
    for (int32_t layout = MOXIE_LAYOUT_EXPERT_CONTIGUOUS; layout <= MOXIE_LAYOUT_EXPERT_MASKED;
         layout++)
        if ((layouts & MOXIE_LAYOUT_BIT(layout)) != 0)
            TRY(check_expand(&stage, api, layout, &room));
out:
    stage_fini(&stage);
    return st;
}
