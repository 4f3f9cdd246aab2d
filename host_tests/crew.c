// Ranks as threads over one golden layer.

#include "host_tests/crew.h"

#include "plugin/dispatcher.h"
#include "plugin/forward.h"

#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define GROUP_TIMEOUT_MS 60000

static void member_run(void *arg, int32_t index)
{
    struct crew *crew = arg;
    struct crew_member *member = calloc(1, sizeof *member);
    int64_t hidden = crew->layer.hidden;

    ck_assert_ptr_nonnull(member);
    member->crew = crew;
    member->index = index;
    member->first = layer_part_first(crew->layer.tokens, crew->ranks, index);
    member->tokens = crew->parts[index];
    member->y = crew->y + member->first * hidden;
    layer_rank_init(&member->rank, &crew->layer, crew->ranks > 1 ? crew->group : NULL, index);
    mock_set_i64(&member->rank.mock, "forward_tokens_max", crew->parts[0]);
    mock_set_str(&member->rank.mock, "dispatcher", crew->dispatcher);
    if (crew->configure != NULL) crew->configure(member);
    layer_batch_of(&crew->layer, member->first, member->tokens, member->y, &member->batch);
    member->step = (moxie_step){
        .struct_size = sizeof member->step, .tokens = member->tokens, .rank_tokens = crew->parts};
    layer_rank_open(&member->rank, &crew->layer);
    crew->scenario(member);
    layer_rank_close(&member->rank);
    free(member);
}

void crew_run(struct crew *crew)
{
    layer_open(&crew->layer, crew->layer_name);
    layer_parts(&crew->layer, crew->ranks, crew->parts);
    crew->y = layer_poisoned(&crew->layer);
    crew->group = mock_group_create(crew->ranks, GROUP_TIMEOUT_MS);
    mock_ranks_run(crew->ranks, member_run, crew);
    mock_group_destroy(crew->group);
}

void crew_fini(struct crew *crew)
{
    free(crew->y);
    layer_close(&crew->layer);
}

void crew_expect(const struct crew_member *member, int32_t answer, int32_t code, const char *text)
{
    ck_assert_msg(answer == code, "answer %d, want %d: %s", answer, code, member->rank.mock.text);
    if (text != NULL)
        ck_assert_msg(strstr(member->rank.mock.text, text) != NULL, "no \"%s\" in: %s", text,
                      member->rank.mock.text);
}

void crew_begin(struct crew_member *member)
{
    int32_t answer =
        dispatcher_begin_forward(member->rank.dispatcher, &member->step, &member->rank.mock.error);

    ck_assert_msg(answer == MOXIE_OK, "%s", member->rank.mock.text);
}

void crew_forward(struct crew_member *member)
{
    int32_t answer;

    crew_begin(member);
    answer = forward_run(member->rank.dispatcher, member->rank.runner, &member->batch.batch,
                         &member->rank.mock.error);
    ck_assert_msg(answer == MOXIE_OK, "%s", member->rank.mock.text);
}

// ---- what to compare with ----------------------------------------------------------------------

struct reference {
    int (*keep)(void *arg, int32_t id);
    void *arg;
    float *y;
};

static void reference_scenario(struct crew_member *member)
{
    const struct reference *reference = member->crew->arg;
    int64_t count = member->crew->layer.tokens * member->crew->layer.top_k;
    const int32_t *ids = member->batch.batch.ids.data;
    int32_t *kept = malloc((size_t)count * sizeof *kept);

    ck_assert_ptr_nonnull(kept);
    for (int64_t i = 0; i < count; i++)
        kept[i] = reference->keep(reference->arg, ids[i]) ? ids[i] : -1;
    member->batch.batch.ids.data = kept;
    crew_forward(member);
    free(kept);
}

void crew_reference(const char *layer_name, int (*keep)(void *arg, int32_t id), void *arg, float *y)
{
    struct reference reference = {.keep = keep, .arg = arg};
    struct crew crew = {.layer_name = layer_name,
                        .ranks = 1,
                        .dispatcher = "local",
                        .scenario = reference_scenario,
                        .arg = &reference};

    crew_run(&crew);
    memcpy(y, crew.y, (size_t)(crew.layer.tokens * crew.layer.hidden) * sizeof *y);
    crew_fini(&crew);
}

double crew_difference(const float *a, const float *b, int64_t count)
{
    double difference = 0, norm = 0;

    for (int64_t i = 0; i < count; i++) {
        difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += (double)b[i] * b[i];
    }
    return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}
