// The hidden states of a run.

#include "hosts/cli/inputs.h"

#include <stdlib.h>
#include <string.h>

#define IDS_AT_ONCE 2048

static int32_t format_of(enum word word)
{
    switch (word) {
    case WORD_F32:
        return MOXIE_FORMAT_F32;
    case WORD_BF16:
        return MOXIE_FORMAT_BF16;
    case WORD_F16:
        return MOXIE_FORMAT_F16;
    default:
        return MOXIE_FORMAT_AUTO;
    }
}

// [tokens, columns] of one of two dtypes; an absent tensor passes.
static int check(const struct inputs *inputs, const struct tensor *tensor, int64_t columns,
                 const enum word words[2], struct fault *fault)
{
    char seen[128];

    if (tensor == NULL) return EXIT_OK;
    if (tensor->ndim == 2 && tensor->shape[0] == inputs->tokens && tensor->shape[1] == columns &&
        (tensor->word == words[0] || tensor->word == words[1]))
        return EXIT_OK;
    tensor_print(tensor, seen, sizeof seen);
    return fault_set(fault, EXIT_TROUBLE, "%s: tensor %s is %s; wanted is %s [%lld, %lld]",
                     inputs->file->path, tensor->name, seen, word_name(words[0]),
                     (long long)inputs->tokens, (long long)columns);
}

int inputs_describe(struct inputs *inputs, const struct safetensors *file,
                    const struct model *model, struct fault *fault)
{
    static const enum word ids_words[2] = {WORD_I32, WORD_I64};
    static const enum word f32_words[2] = {WORD_F32, WORD_F32};
    const struct tensor *x = safetensors_find(file, "hidden_states");
    char seen[128];
    int st = EXIT_OK;

    *inputs = (struct inputs){
        .file = file,
        .hidden_states = x,
        .topk_ids = safetensors_find(file, "topk_ids"),
        .topk_weights = safetensors_find(file, "topk_weights"),
        .routed_output = safetensors_find(file, "routed_output"),
    };
    if (x == NULL) TRY(fault_set(fault, EXIT_TROUBLE, "%s: no tensor hidden_states", file->path));
    inputs->format = format_of(x->word);
    if (x->ndim != 2 || x->shape[1] != model->hidden || inputs->format == MOXIE_FORMAT_AUTO) {
        tensor_print(x, seen, sizeof seen);
        TRY(fault_set(fault, EXIT_TROUBLE,
                      "%s: hidden_states is %s; wanted is BF16, F16 or F32 [tokens, %lld]",
                      file->path, seen, (long long)model->hidden));
    }
    inputs->tokens = x->shape[0];
    if ((inputs->topk_ids == NULL) != (inputs->topk_weights == NULL))
        TRY(fault_set(fault, EXIT_TROUBLE,
                      "%s: topk_ids and topk_weights come together; leave both out to route by the "
                      "model's router",
                      file->path));
    TRY(check(inputs, inputs->topk_ids, model->top_k, ids_words, fault));
    TRY(check(inputs, inputs->topk_weights, model->top_k, f32_words, fault));
    TRY(check(inputs, inputs->routed_output, model->hidden, f32_words, fault));
out:
    return st;
}

int inputs_count_no_expert(const struct inputs *inputs, int64_t experts, int64_t *count,
                           struct fault *fault)
{
    const struct tensor *ids = inputs->topk_ids;
    union {
        int32_t narrow[2 * IDS_AT_ONCE];
        int64_t wide[IDS_AT_ONCE];
    } chunk;
    uint64_t bytes = 0;
    int st = EXIT_OK;

    *count = 0;
    for (uint64_t done = 0; ids != NULL && done < ids->bytes; done += bytes) {
        bytes = ids->bytes - done < sizeof chunk ? ids->bytes - done : sizeof chunk;
        TRY(safetensors_read(inputs->file, ids, done, bytes, &chunk, fault));
        for (uint64_t i = 0; i < bytes / word_bytes(ids->word); i++) {
            int64_t id = ids->word == WORD_I64 ? chunk.wide[i] : chunk.narrow[i];

            *count += id < 0 || id >= experts;
        }
    }
out:
    return st;
}

struct token_range token_part(int64_t tokens, int64_t ranks, int64_t rank)
{
    int64_t least = tokens / ranks;
    int64_t longer = tokens % ranks;

    return (struct token_range){
        .first = rank * least + (rank < longer ? rank : longer),
        .count = least + (rank < longer ? 1 : 0),
    };
}

// Reads the rows of a range into new memory; only makes the memory when there is no tensor.
static int read_part(const struct inputs *inputs, const struct tensor *tensor,
                     struct token_range range, uint64_t row_bytes, void **out, struct fault *fault)
{
    uint64_t bytes = 0;

    *out = NULL;
    if (!bytes_mul((uint64_t)range.count, row_bytes, &bytes))
        return fault_set(fault, EXIT_TROUBLE, "%lld tokens are too many", (long long)range.count);
    *out = malloc(bytes + 1);
    if (*out == NULL) return fault_set(fault, EXIT_TROUBLE, "out of memory for the tokens");
    if (tensor == NULL) return EXIT_OK;
    return safetensors_read(inputs->file, tensor, (uint64_t)range.first * row_bytes, bytes, *out,
                            fault);
}

int rows_read(struct rows *rows, const struct inputs *inputs, struct token_range range,
              const struct model *model, struct fault *fault)
{
    uint64_t hidden_bytes = (uint64_t)model->hidden * format_element_bytes(inputs->format);
    uint64_t top_k = (uint64_t)model->top_k;
    uint64_t id_bytes = 4;
    void *x = NULL;
    void *ids = NULL;
    void *weights = NULL;
    int st = EXIT_OK;

    if (inputs->topk_ids != NULL) id_bytes = word_bytes(inputs->topk_ids->word);
    st = read_part(inputs, inputs->hidden_states, range, hidden_bytes, &x, fault);
    if (st == EXIT_OK)
        st = read_part(inputs, inputs->topk_ids, range, top_k * id_bytes, &ids, fault);
    if (st == EXIT_OK)
        st = read_part(inputs, inputs->topk_weights, range, top_k * 4, &weights, fault);
    *rows = (struct rows){
        .range = range, .x = x, .ids = ids, .weights = weights, .wide_ids = id_bytes == 8};
    if (st != EXIT_OK) rows_fini(rows);
    return st;
}

void rows_fini(struct rows *rows)
{
    free(rows->x);
    free(rows->ids);
    free(rows->weights);
    *rows = (struct rows){.x = NULL};
}
