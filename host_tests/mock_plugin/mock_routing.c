// The extension moxie.routing/1: a sort in double.

#include "host_tests/mock_plugin/mock.h"

#include <math.h>

#define EXPERTS_MAX 4096

// One token: what an expert scores, and for the choice.
struct token {
    double score[EXPERTS_MAX], choice[EXPERTS_MAX];
    int32_t open[EXPERTS_MAX]; // 0: no number, of a group that lost, or taken
};

struct route {
    moxie_routing rule;
    struct view logits, ids, weights, bias;
    int32_t experts, top_k, groups;
};

static int32_t route_read(const struct caller *caller, struct route *route,
                          const moxie_tensor *tensors[3])
{
    struct want logits = {"logits", TYPE_FLOATS, 2, {-1, -1, 0}, 0};
    struct want ids = {"ids", TYPE_IDS, 2, {-1, -1, 0}, 0};
    struct want weights = {"weights", TYPE_F32, 2, {-1, -1, 0}, 0};
    struct want bias = {"routing.correction_bias", TYPE_F32, 1, {-1, 0, 0}, 1};
    int32_t st = MOXIE_OK;

    TRY(view_read(caller, &logits, tensors[0], &route->logits));
    ids.shape[0] = weights.shape[0] = route->logits.shape[0];
    bias.shape[0] = route->logits.shape[1];
    TRY(view_read(caller, &ids, tensors[1], &route->ids));
    weights.shape[1] = route->ids.shape[1];
    TRY(view_read(caller, &weights, tensors[2], &route->weights));
    TRY(view_read(caller, &bias, &route->rule.correction_bias, &route->bias));
    if (route->logits.shape[1] > EXPERTS_MAX)
        TRY(fail_with(caller, MOXIE_E_UNSUPPORTED, "routing: more than %d experts", EXPERTS_MAX));
    route->experts = (int32_t)route->logits.shape[1];
    if (route->ids.shape[1] < 1 || route->ids.shape[1] > MOXIE_TOP_K_MAX ||
        route->ids.shape[1] > route->experts)
        TRY(fail_with(caller, MOXIE_E_INVALID, "routing: top-k %lld of %d experts",
                      (long long)route->ids.shape[1], route->experts));
    route->top_k = (int32_t)route->ids.shape[1];
out:
    return st;
}

static int32_t route_check(const struct caller *caller, struct route *route)
{
    const moxie_routing *rule = &route->rule;

    route->groups = rule->groups > 1 ? rule->groups : 1;
    if (rule->scoring < MOXIE_SCORING_SOFTMAX || rule->scoring > MOXIE_SCORING_SIGMOID)
        return fail_with(caller, MOXIE_E_INVALID, "routing.scoring is %d", rule->scoring);
    if (rule->renormalize < 0 || rule->renormalize > 1)
        return fail_with(caller, MOXIE_E_INVALID, "routing.renormalize is %d", rule->renormalize);
    if (rule->groups < 0 || route->experts % route->groups != 0)
        return fail_with(caller, MOXIE_E_INVALID, "routing.groups is %d of %d experts",
                         rule->groups, route->experts);
    if (route->groups > 1 &&
        (rule->groups_top < 1 || rule->groups_top > route->groups ||
         (int64_t)rule->groups_top * (route->experts / route->groups) < route->top_k))
        return fail_with(caller, MOXIE_E_INVALID, "routing.groups_top is %d", rule->groups_top);
    if (route->groups > 1 && rule->scoring == MOXIE_SCORING_TOP_K_SOFTMAX)
        return fail_with(caller, MOXIE_E_UNSUPPORTED, "routing: groups with a top-k softmax");
    if (!isfinite(rule->scaling_factor) || !isfinite(rule->renormalize_epsilon) ||
        rule->renormalize_epsilon < 0)
        return fail_with(caller, MOXIE_E_INVALID, "routing: a factor is no usable number");
    return MOXIE_OK;
}

static void score_token(const struct route *route, int64_t row, struct token *token)
{
    double most = -(double)INFINITY, sum = 0.0;

    for (int32_t i = 0; i < route->experts; i++) {
        token->score[i] = view_number(&route->logits, row, i, 0);
        token->open[i] = !isnan(token->score[i]);
        if (token->open[i] && token->score[i] > most) most = token->score[i];
    }
    for (int32_t i = 0; i < route->experts; i++) {
        if (!token->open[i]) continue;
        if (route->rule.scoring == MOXIE_SCORING_SIGMOID)
            token->score[i] = 1.0 / (1.0 + exp(-token->score[i]));
        if (route->rule.scoring == MOXIE_SCORING_SOFTMAX)
            token->score[i] =
                isinf(most) ? (double)(token->score[i] == most) : exp(token->score[i] - most);
        sum += token->score[i];
    }
    for (int32_t i = 0; i < route->experts; i++) {
        if (route->rule.scoring == MOXIE_SCORING_SOFTMAX) token->score[i] /= sum;
        token->choice[i] = token->score[i];
        if (route->bias.data != NULL) token->choice[i] += view_number(&route->bias, i, 0, 0);
        if (isnan(token->choice[i])) token->open[i] = 0;
    }
}

// The open expert of [first, end) with the best choice, the lower id in ties; -1: none.
static int32_t best_of(const struct token *token, int32_t first, int32_t end)
{
    int32_t best = -1;

    for (int32_t i = first; i < end; i++) {
        if (!token->open[i]) continue;
        if (best < 0 || token->choice[i] > token->choice[best] ||
            (HAS_FAULT(FAULT_TIE_TO_HIGHER) && token->choice[i] == token->choice[best]))
            best = i;
    }
    return best;
}

// The sum of a group's two best; -infinity when it has no number.
static double group_score(struct token *token, int32_t first, int32_t end)
{
    int32_t best = best_of(token, first, end), second;
    double sum;

    if (best < 0) return -(double)INFINITY;
    token->open[best] = 0;
    second = best_of(token, first, end);
    token->open[best] = 1;
    sum = token->choice[best];
    return second < 0 ? sum : sum + token->choice[second];
}

// Closes every expert of the groups that are not among the best.
static void close_groups(const struct route *route, struct token *token)
{
    int32_t size = route->experts / route->groups;
    double scores[EXPERTS_MAX];

    for (int32_t group = 0; group < route->groups; group++)
        scores[group] = group_score(token, group * size, (group + 1) * size);
    for (int32_t group = 0; group < route->groups; group++) {
        int32_t better = 0;

        for (int32_t other = 0; other < route->groups; other++)
            better +=
                scores[other] > scores[group] || (scores[other] == scores[group] && other < group);
        for (int32_t i = group * size; better >= route->rule.groups_top && i < (group + 1) * size;
             i++)
            token->open[i] = 0;
    }
}

static void store_id(const struct route *route, int64_t row, int32_t k, int32_t id)
{
    unsigned char *at = view_at(&route->ids, row, k, 0);

    if (route->ids.type == TYPE_I64)
        *(int64_t *)(void *)at = id;
    else
        *(int32_t *)(void *)at = id;
}

static void route_token(const struct route *route, int64_t row, struct token *token)
{
    double weights[MOXIE_TOP_K_MAX] = {0}, sum = 0.0, first = 0.0;
    double factor = route->rule.scaling_factor == 0.0 ? 1.0 : route->rule.scaling_factor;

    score_token(route, row, token);
    if (route->groups > 1) close_groups(route, token);
    for (int32_t k = 0; k < route->top_k; k++) {
        int32_t best = best_of(token, 0, route->experts);

        store_id(route, row, k, best);
        if (best < 0) continue;
        token->open[best] = 0;
        weights[k] = token->score[best];
        if (k == 0) first = weights[k];
        if (route->rule.scoring == MOXIE_SCORING_TOP_K_SOFTMAX)
            weights[k] = weights[k] == first ? 1.0 : exp(weights[k] - first);
        sum += weights[k];
    }
    for (int32_t k = 0; k < route->top_k; k++) {
        if (route->rule.scoring == MOXIE_SCORING_TOP_K_SOFTMAX && sum > 0.0) weights[k] /= sum;
        if (route->rule.renormalize && sum > 0.0)
            weights[k] /= (route->rule.scoring == MOXIE_SCORING_TOP_K_SOFTMAX ? 1.0 : sum) +
                          route->rule.renormalize_epsilon;
        number_store(TYPE_F32, factor * weights[k], view_at(&route->weights, row, k, 0));
    }
}

static int32_t route_rows(const moxie_routing *routing, const moxie_tensor *logits,
                          const moxie_tensor *ids, const moxie_tensor *weights, void *stream,
                          moxie_error *error)
{
    const struct caller caller = {.error = error_begin(error)};
    const moxie_tensor *tensors[3] = {logits, ids, weights};
    struct route route = {.groups = 1};
    struct token token;
    int32_t st = MOXIE_OK;

    TRY(struct_read(&caller, &shape_routing, "routing", routing, &route.rule));
    if (logits == NULL || ids == NULL || weights == NULL)
        TRY(fail_with(&caller, MOXIE_E_INVALID, "route: a tensor is NULL"));
    if (stream != NULL) TRY(fail_with(&caller, MOXIE_E_INVALID, "stream: want NULL on the CPU"));
    TRY(route_read(&caller, &route, tensors));
    TRY(route_check(&caller, &route));
    if (view_rows_overlap(&route.ids) || view_rows_overlap(&route.weights) ||
        view_overlap(&route.ids, &route.weights))
        TRY(fail_with(&caller, MOXIE_E_INVALID, "ids and weights overlap"));
    for (int64_t row = 0; row < route.logits.shape[0]; row++)
        route_token(&route, row, &token);
out:
    return st;
}

const moxie_routing_api routing_api = {
    .struct_size = sizeof(moxie_routing_api),
    .route = route_rows,
};
