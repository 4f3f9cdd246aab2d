// The rule of the extension moxie.routing/1, against a router in double precision.

#include "hosts/cli/conform_stage.h"
#include "hosts/cli/fault.h"

#include <math.h>
#include <string.h>

#define TOKENS  6
#define EXPERTS 16
#define TOP_K   4

// One routing to compare.
struct routing_case {
    const char *what;
    int32_t scoring, renormalize, groups, groups_top;
    double epsilon, scaling;
    int bias;
};

struct routing_room {
    float logits[TOKENS * EXPERTS], bias[EXPERTS], weights[TOKENS * TOP_K];
    int32_t ids[TOKENS * TOP_K];
    int32_t want_ids[TOP_K];
    double want_weights[TOP_K];
};

// Scores of one token; NaN stays NaN.
static void score(const struct routing_case *c, const float *logits, double *scores)
{
    double most = -INFINITY, sum = 0;

    for (int i = 0; i < EXPERTS; i++)
        if (logits[i] > most) most = (double)logits[i];
    for (int i = 0; i < EXPERTS; i++)
        if (!isnan(logits[i])) sum += exp((double)logits[i] - most);
    for (int i = 0; i < EXPERTS; i++) {
        scores[i] = (double)logits[i];
        if (c->scoring == MOXIE_SCORING_SIGMOID) scores[i] = 1 / (1 + exp(-scores[i]));
        if (c->scoring == MOXIE_SCORING_SOFTMAX) scores[i] = exp(scores[i] - most) / sum;
    }
}

// The best number that is not taken, the lower index on a tie; -1 when all are NaN or taken.
static int best_of(const double *numbers, const int *taken, int count)
{
    int best = -1;

    for (int i = 0; i < count; i++)
        if (!taken[i] && !isnan(numbers[i]) && (best < 0 || numbers[i] > numbers[best])) best = i;
    return best;
}

// Takes the experts of all groups but the best out of the choice.
static void limit_groups(const struct routing_case *c, const double *choice, int *taken)
{
    double scores[EXPERTS] = {0};
    int kept[EXPERTS] = {0};
    int size = EXPERTS / c->groups;

    for (int group = 0; group < c->groups; group++) {
        int used[EXPERTS] = {0};
        int first = best_of(choice + group * size, used, size);
        int second = -1;

        if (first >= 0) used[first] = 1;
        second = best_of(choice + group * size, used, size);
        scores[group] = (first >= 0 ? choice[group * size + first] : -INFINITY) +
                        (second >= 0 ? choice[group * size + second] : 0);
    }
    for (int i = 0; i < c->groups_top; i++) {
        int group = best_of(scores, kept, c->groups);

        if (group >= 0) kept[group] = 1;
    }
    for (int i = 0; i < EXPERTS; i++)
        taken[i] = !kept[i / size];
}

static void route(const struct routing_case *c, const float *logits, struct routing_room *room)
{
    double scores[EXPERTS], choice[EXPERTS], sum = 0;
    int taken[EXPERTS] = {0};

    score(c, logits, scores);
    for (int i = 0; i < EXPERTS; i++)
        choice[i] = scores[i] + (c->bias ? (double)room->bias[i] : 0);
    if (c->groups > 1) limit_groups(c, choice, taken);
    for (int k = 0; k < TOP_K; k++) {
        int best = best_of(choice, taken, EXPERTS);

        room->want_ids[k] = best;
        room->want_weights[k] = best >= 0 ? scores[best] : 0;
        if (best >= 0) taken[best] = 1;
    }
    if (c->scoring == MOXIE_SCORING_TOP_K_SOFTMAX) {
        double most = room->want_weights[0], total = 0;

        for (int k = 1; k < TOP_K; k++)
            if (room->want_ids[k] >= 0) most = fmax(most, room->want_weights[k]);
        for (int k = 0; k < TOP_K; k++) {
            room->want_weights[k] = room->want_ids[k] >= 0 ? exp(room->want_weights[k] - most) : 0;
            total += room->want_weights[k];
        }
        for (int k = 0; k < TOP_K; k++)
            room->want_weights[k] /= total;
    }
    for (int k = 0; k < TOP_K; k++)
        sum += room->want_weights[k];
    for (int k = 0; k < TOP_K; k++)
        room->want_weights[k] *=
            (c->scaling == 0 ? 1 : c->scaling) / (c->renormalize ? sum + c->epsilon : 1);
}

// Random logits, with a tie, and a token of which only three are numbers.
static void fill(struct routing_room *room)
{
    struct dice dice = {.state = 99};

    for (int i = 0; i < TOKENS * EXPERTS; i++)
        room->logits[i] = (float)(4 * dice_real(&dice));
    for (int i = 0; i < EXPERTS; i++)
        room->bias[i] = (float)(0.3 * dice_real(&dice));
    room->logits[EXPERTS + 3] = room->logits[EXPERTS + 11] = 5;
    room->bias[11] = room->bias[3];
    room->logits[2 * EXPERTS + 7] = NAN;
    for (int i = 0; i < EXPERTS; i++)
        if (i % 6 != 0) room->logits[3 * EXPERTS + i] = NAN; // 0, 6 and 12 are left
}

static int compare(const struct routing_case *c, struct routing_room *room, struct check *check)
{
    for (int token = 0; token < TOKENS; token++) {
        // Groups that are short of numbers are left alone: the contract gives no order for them.
        if (token == 3 && c->groups > 1) continue;
        route(c, room->logits + token * EXPERTS, room);
        for (int k = 0; k < TOP_K; k++) {
            double off = (double)room->weights[token * TOP_K + k] - room->want_weights[k];

            if (room->ids[token * TOP_K + k] != room->want_ids[k])
                return broken(check, "token %d, place %d: expert %d, want %d", token, k,
                              room->ids[token * TOP_K + k], room->want_ids[k]);
            if (!(fabs(off) <= 1e-5 * fmax(1, fabs(room->want_weights[k]))))
                return broken(check, "token %d, place %d: weight %.7g, want %.7g", token, k,
                              (double)room->weights[token * TOP_K + k], room->want_weights[k]);
        }
    }
    return VERDICT_PASS;
}

static int check_case(struct engine *engine, const moxie_routing_api *api,
                      const struct routing_case *c, struct routing_room *room)
{
    int64_t logits_shape[2] = {TOKENS, EXPERTS}, shape[2] = {TOKENS, TOP_K}, bias[1] = {EXPERTS};
    const moxie_dtype f32 = dtype_of(MOXIE_FORMAT_F32), i32 = {MOXIE_DTYPE_INT, 32, 1};
    const moxie_tensor logits = conform_tensor(room->logits, f32, 2, logits_shape, NULL);
    const moxie_tensor ids = conform_tensor(room->ids, i32, 2, shape, NULL);
    const moxie_tensor weights = conform_tensor(room->weights, f32, 2, shape, NULL);
    moxie_routing routing = {
        .struct_size = sizeof routing,
        .scoring = c->scoring,
        .renormalize = c->renormalize,
        .groups = c->groups,
        .groups_top = c->groups_top,
        .renormalize_epsilon = c->epsilon,
        .scaling_factor = c->scaling,
    };
    int32_t status = MOXIE_OK;
    int st = VERDICT_PASS;

    if (c->bias) routing.correction_bias = conform_tensor(room->bias, f32, 1, bias, NULL);
    memset(room->ids, 0x5a, sizeof room->ids);
    memset(room->weights, 0xff, sizeof room->weights);
    check_at(engine->check, "route, %s", c->what);
    status = api->route(&routing, &logits, &ids, &weights, NULL, engine_error(engine));
    if (status == MOXIE_E_UNSUPPORTED) return VERDICT_PASS; // not every router has every scoring
    TRY(expect_status(engine->check, status, MOXIE_OK, engine->text));
    TRY(compare(c, room, engine->check));
    check_at(engine->check, "route without logits, %s", c->what);
    TRY(expect_status(engine->check,
                      api->route(&routing, NULL, &ids, &weights, NULL, engine_error(engine)),
                      MOXIE_E_INVALID, engine->text));
out:
    return st;
}

int rule_routing(struct check *check)
{
    static const struct routing_case cases[] = {
        {"softmax", MOXIE_SCORING_SOFTMAX, 0, 0, 0, 0, 0, 0},
        {"softmax, renormalized", MOXIE_SCORING_SOFTMAX, 1, 0, 0, 1e-20, 0, 0},
        {"softmax over the top k", MOXIE_SCORING_TOP_K_SOFTMAX, 0, 0, 0, 0, 0, 0},
        {"sigmoid, scaled by 2.5", MOXIE_SCORING_SIGMOID, 0, 0, 0, 0, 2.5, 0},
        {"sigmoid, biased, renormalized", MOXIE_SCORING_SIGMOID, 1, 1, 1, 1e-20, 0, 1},
        {"sigmoid, 2 of 4 groups", MOXIE_SCORING_SIGMOID, 1, 4, 2, 1e-20, 2.5, 1},
        {"softmax, 2 of 4 groups", MOXIE_SCORING_SOFTMAX, 0, 4, 2, 0, 0, 0},
    };
    struct engine engine;
    struct routing_room room;
    const moxie_routing_api *api = NULL;
    int st = VERDICT_PASS;

    TRY(engine_init(&engine, check));
    check_at(check, "get_extension(\"" MOXIE_ROUTING_EXTENSION "\")");
    api = engine.api->get_extension(MOXIE_ROUTING_EXTENSION);
    if (api == NULL) TRY(skipped(check, "is not offered"));
    if (api->struct_size < sizeof *api || api->route == NULL)
        TRY(broken(check, "the table is not complete"));
    fill(&room);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        TRY(check_case(&engine, api, &cases[i], &room));
out:
    engine_fini(&engine);
    return st;
}
