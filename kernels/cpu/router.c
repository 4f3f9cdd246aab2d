// router on the CPU: tokens in parallel, each in a few passes over its logits and no memory of its
// own. What competes is the logit itself, which orders like any score of it, unless a bias or
// groups make the score itself count.

#include "kernels/router.h"

#include "kernels/cpu/numbers.h"
#include "kernels/cpu/work.h"
#include "kernels/types.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>

#define GRAIN 8

// The best so far, best first.
struct best {
    double key[KERNEL_TOP_K_MAX];
    float logit[KERNEL_TOP_K_MAX];
    int32_t id[KERNEL_TOP_K_MAX];
    int32_t count;
};

struct token {
    const struct router_args *args;
    const unsigned char *logits;
    double largest; // logit
    double sum;     // of the exponentials of all logits
};

static float logit_of(const struct token *token, int32_t expert)
{
    return number_load(token->args->logits_format, token->logits, expert);
}

// exp(logit - largest), with infinities as their limits.
static double exponential(double logit, double largest)
{
    return logit == largest ? 1.0 : exp(logit - largest);
}

static void begin_softmax(struct token *token)
{
    token->largest = -INFINITY;
    token->sum = 0.0;
    for (int32_t i = 0; i < token->args->experts; i++) {
        double logit = (double)logit_of(token, i);

        if (logit > token->largest) token->largest = logit;
    }
    for (int32_t i = 0; i < token->args->experts; i++) {
        double logit = (double)logit_of(token, i);

        if (!isnan(logit)) token->sum += exponential(logit, token->largest);
    }
}

static double score_of(const struct token *token, double logit)
{
    if (token->args->scoring == SCORING_SOFTMAX)
        return exponential(logit, token->largest) / token->sum;
    if (token->args->scoring == SCORING_SIGMOID) return 1.0 / (1.0 + exp(-logit));
    return logit;
}

// What an expert competes with.
static double key_of(const struct token *token, int32_t expert)
{
    const struct router_args *args = token->args;
    double logit = (double)logit_of(token, expert);

    if (args->correction_bias != NULL)
        return score_of(token, logit) + (double)args->correction_bias[expert];
    return args->groups > 1 ? score_of(token, logit) : logit;
}

// The sum of a group's two best keys; -infinity without any.
static double group_key(const struct token *token, int32_t group)
{
    int32_t size = token->args->experts / token->args->groups;
    double first = -INFINITY, second = -INFINITY;

    for (int32_t expert = group * size; expert < (group + 1) * size; expert++) {
        double key = key_of(token, expert);

        if (key > first) {
            second = first;
            first = key;
        } else if (key > second) {
            second = key;
        }
    }
    return second > -INFINITY ? first + second : first;
}

// Which groups compete: those that fewer than groups_top others beat.
static void choose_groups(const struct token *token, bool chosen[ROUTER_GROUPS_MAX])
{
    int32_t groups = token->args->groups;
    double keys[ROUTER_GROUPS_MAX];

    for (int32_t group = 0; group < groups; group++)
        keys[group] = group_key(token, group);
    for (int32_t group = 0; group < groups; group++) {
        int32_t better = 0;

        for (int32_t other = 0; other < groups; other++)
            better += keys[other] > keys[group] || (keys[other] == keys[group] && other < group);
        chosen[group] = better < token->args->groups_top;
    }
}

// Keeps the top k. Experts come in ascending order, so that an equal key goes behind.
static void offer(struct best *best, int32_t top_k, double key, int32_t id, float logit)
{
    int32_t at = best->count;

    if (isnan(key) || (at == top_k && !(key > best->key[at - 1]))) return;
    if (at == top_k)
        at--;
    else
        best->count++;
    for (; at > 0 && key > best->key[at - 1]; at--) {
        best->key[at] = best->key[at - 1];
        best->id[at] = best->id[at - 1];
        best->logit[at] = best->logit[at - 1];
    }
    best->key[at] = key;
    best->id[at] = id;
    best->logit[at] = logit;
}

static void choose(const struct token *token, struct best *best)
{
    const struct router_args *args = token->args;
    int32_t groups = args->groups > 1 ? args->groups : 1;
    int32_t size = args->experts / groups;
    bool chosen[ROUTER_GROUPS_MAX] = {true};

    best->count = 0;
    if (groups > 1) choose_groups(token, chosen);
    for (int32_t expert = 0; expert < args->experts; expert++) {
        if (chosen[expert / size])
            offer(best, args->top_k, key_of(token, expert), expert, logit_of(token, expert));
    }
}

static void weigh(const struct token *token, const struct best *best, double *weights)
{
    const struct router_args *args = token->args;
    double largest = -INFINITY, sum = 0.0;

    for (int32_t t = 0; t < best->count; t++)
        if ((double)best->logit[t] > largest) largest = (double)best->logit[t];
    for (int32_t t = 0; t < best->count; t++) {
        double logit = (double)best->logit[t];

        weights[t] = args->scoring == SCORING_TOP_K_SOFTMAX ? exponential(logit, largest)
                                                            : score_of(token, logit);
        sum += weights[t];
    }
    // A softmax over the top k sums to 1 before it is divided: the epsilon counts in its shares.
    if (args->scoring == SCORING_TOP_K_SOFTMAX)
        sum += args->renormalize ? sum * args->renormalize_epsilon : 0.0;
    else
        sum = args->renormalize ? sum + args->renormalize_epsilon : 1.0;
    for (int32_t t = 0; t < best->count; t++)
        weights[t] = sum == 0.0 ? 0.0 : weights[t] / sum * args->scaling_factor;
}

static void route_token(const struct router_args *args, int64_t index)
{
    struct token token = {
        .args = args,
        .logits = (const unsigned char *)args->logits + index * args->logits_stride_bytes,
    };
    unsigned char *ids = (unsigned char *)args->ids + index * args->id_stride_bytes;
    unsigned char *out = (unsigned char *)args->weights + index * args->weight_stride_bytes;
    double weights[KERNEL_TOP_K_MAX];
    struct best best;

    if (args->scoring == SCORING_SOFTMAX) begin_softmax(&token);
    choose(&token, &best);
    weigh(&token, &best, weights);
    for (int32_t t = 0; t < args->top_k; t++) {
        int32_t id = t < best.count ? best.id[t] : -1;

        if (args->id_bytes == 8)
            ((int64_t *)(void *)ids)[t] = id;
        else
            ((int32_t *)(void *)ids)[t] = id;
        ((float *)(void *)out)[t] = t < best.count ? (float)weights[t] : 0.0f;
    }
}

static void router_body(struct work *work, unsigned char *scratch)
{
    const struct router_args *args = work->args;
    int64_t first, end;

    (void)scratch;
    while (work_next(work, &first, &end)) {
        for (int64_t token = first; token < end; token++)
            route_token(args, token);
    }
}

int32_t router_cpu(const struct router_args *args, void *stream)
{
    struct work work = {.body = router_body, .args = args, .items = args->tokens, .grain = GRAIN};

    if (args->top_k < 1 || args->top_k > KERNEL_TOP_K_MAX || args->experts < 1 ||
        args->groups > ROUTER_GROUPS_MAX || (args->groups > 1 && args->experts % args->groups != 0))
        return EINVAL;
    // An exponential costs about as much as 64 bytes.
    work_run(&work, stream, (int64_t)args->tokens * args->experts * 64);
    return 0;
}
