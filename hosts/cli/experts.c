// Loads a rank's experts.

#include "hosts/cli/experts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Of RAM on the way to a device: a layer is never in memory twice.
#define STAGING_BYTES ((uint64_t)8 << 20)

// A tensor that must be there, and which bytes of it go where.
struct piece {
    char name[2 * TENSOR_NAME_BYTES];
    enum word word;
    uint32_t ndim;
    int64_t shape[4];
    uint64_t first, bytes; // bytes 0: the whole tensor
};

struct loader {
    const struct expert_layout *layout;
    struct checkpoint *checkpoint;
    struct expert_range range;
    struct fault *fault;
    struct device *device;
    uint8_t *staging; // [STAGING_BYTES]; NULL where files are read into the device's memory
};

// The dtype of a format's values in a file.
static enum word value_word(int32_t format)
{
    switch (format) {
    case MOXIE_FORMAT_F32:
        return WORD_F32;
    case MOXIE_FORMAT_BF16:
        return WORD_BF16;
    case MOXIE_FORMAT_F16:
        return WORD_F16;
    case MOXIE_FORMAT_FP8_BLOCK128:
        return WORD_F8_E4M3;
    default:
        return WORD_U8;
    }
}

// Reads `bytes` of a tensor from byte `first` on to an address of the device.
static int read_to(const struct loader *loader, const struct located *located, uint64_t first,
                   uint64_t bytes, uint8_t *to)
{
    int st = EXIT_OK;

    if (loader->staging == NULL)
        return safetensors_read(located->file, located->tensor, first, bytes, to, loader->fault);
    for (uint64_t done = 0; done < bytes; done += STAGING_BYTES) {
        uint64_t part = bytes - done < STAGING_BYTES ? bytes - done : STAGING_BYTES;

        TRY(safetensors_read(located->file, located->tensor, first + done, part, loader->staging,
                             loader->fault));
        TRY(loader->device->table->copy_in(loader->device, to + done, loader->staging, part,
                                           loader->fault));
    }
out:
    return st;
}

// Finds the tensor and checks that it is what the layout says; reads when `to` is not NULL.
static int take(const struct loader *loader, const struct piece *piece, uint8_t *to)
{
    struct tensor wanted = {.word = piece->word, .ndim = piece->ndim};
    struct located located;
    char seen_text[128];
    char wanted_text[128];
    int st = checkpoint_find(loader->checkpoint, piece->name, &located, loader->fault);

    if (st != EXIT_OK) return st;
    memcpy(wanted.shape, piece->shape, sizeof piece->shape);
    if (located.tensor->word != piece->word || !tensor_same_shape(located.tensor, &wanted)) {
        tensor_print(located.tensor, seen_text, sizeof seen_text);
        tensor_print(&wanted, wanted_text, sizeof wanted_text);
        return fault_set(loader->fault, EXIT_TROUBLE,
                         "%s: tensor %s is %s; the sizes in the model's description want %s",
                         located.file->path, piece->name, seen_text, wanted_text);
    }
    if (to == NULL) return EXIT_OK;
    return read_to(loader, &located, piece->first,
                   piece->bytes != 0 ? piece->bytes : located.tensor->bytes, to);
}

// One projection of one expert: gate, up or down.
struct projection {
    int64_t expert;
    const char *name;
    int64_t outputs, inputs;
};

static struct piece projection_piece(const struct loader *loader,
                                     const struct projection *projection, const char *suffix,
                                     enum word word)
{
    struct piece piece = {.word = word, .ndim = 2, .shape = {projection->outputs, 0}};

    (void)snprintf(piece.name, sizeof piece.name, "%s%lld.%s%s", loader->layout->prefix,
                   (long long)projection->expert, projection->name, suffix);
    return piece;
}

// Where the parts of a projection go; all NULL: only check.
struct destination {
    uint8_t *values, *scales, *globals;
};

static int take_scales(const struct loader *loader, const struct projection *projection,
                       int32_t format, const struct destination *to)
{
    struct piece piece;
    int st = EXIT_OK;

    if (format == MOXIE_FORMAT_FP8_BLOCK128) {
        piece = projection_piece(loader, projection, ".weight_scale_inv", WORD_F32);
        piece.shape[0] = (projection->outputs + 127) / 128;
        piece.shape[1] = (projection->inputs + 127) / 128;
        return take(loader, &piece, to->scales);
    }
    if (format != MOXIE_FORMAT_NVFP4) return EXIT_OK;
    piece = projection_piece(loader, projection, ".weight_scale", WORD_F8_E4M3);
    piece.shape[1] = projection->inputs / 16;
    TRY(take(loader, &piece, to->scales));
    piece = projection_piece(loader, projection, ".weight_scale_2", WORD_F32);
    piece.ndim = 0;
    TRY(take(loader, &piece, to->globals));
out:
    return st;
}

static int take_projection(const struct loader *loader, const struct projection *projection,
                           const struct destination *to)
{
    int32_t format = loader->layout->w1.format;
    struct piece piece = projection_piece(loader, projection, ".weight", value_word(format));
    int st = EXIT_OK;

    piece.shape[1] = format == MOXIE_FORMAT_NVFP4 ? projection->inputs / 2 : projection->inputs;
    TRY(take(loader, &piece, to->values));
    TRY(take_scales(loader, projection, format, to));
out:
    return st;
}

static uint8_t *part_of(const struct memory *memory, uint64_t bytes, int64_t local, int halves)
{
    if (memory->at == NULL) return NULL;
    return memory->at + (uint64_t)local * bytes + (uint64_t)halves * bytes / 2;
}

// The bytes of one expert in `weights`, shifted by `halves` halves of it.
static struct destination destination_of(const struct weights *weights, int64_t local, int halves)
{
    return (struct destination){
        .values = part_of(&weights->values, weights->value_bytes, local, halves),
        .scales = part_of(&weights->scales, weights->scale_bytes, local, halves),
        .globals = part_of(&weights->globals, weights->global_bytes, local, halves),
    };
}

// One expert: checked, and read when `experts` is not NULL.
static int take_expert(const struct loader *loader, int64_t expert, struct experts *experts)
{
    const struct expert_layout *layout = loader->layout;
    int64_t intermediate = layout->w2.inputs;
    int64_t hidden = layout->w1.inputs;
    const struct projection gate = {expert, layout->gate, intermediate, hidden};
    const struct projection up = {expert, layout->up, intermediate, hidden};
    const struct projection down = {expert, layout->down, hidden, intermediate};
    int64_t local = expert - loader->range.first;
    struct destination to[3] = {{NULL, NULL, NULL}};
    int st = EXIT_OK;

    if (experts != NULL) {
        to[0] = destination_of(&experts->w1, local, 0);
        to[1] = destination_of(&experts->w1, local, 1);
        to[2] = destination_of(&experts->w2, local, 0);
    }
    TRY(take_projection(loader, &gate, &to[0]));
    if (layout->up != NULL) TRY(take_projection(loader, &up, &to[1]));
    TRY(take_projection(loader, &down, &to[2]));
out:
    return st;
}

static struct piece fused_piece(const struct loader *loader, const char *name, const char *suffix,
                                const struct weights_shape *shape)
{
    struct piece piece = {.ndim = 3, .shape = {shape->experts, shape->outputs, shape->inputs}};

    (void)snprintf(piece.name, sizeof piece.name, "%s%s%s", loader->layout->prefix, name, suffix);
    return piece;
}

// Takes the range's slice of a tensor whose experts take `expert_bytes` each.
static int take_range(const struct loader *loader, struct piece *piece, uint64_t expert_bytes,
                      uint8_t *to)
{
    piece->first = (uint64_t)loader->range.first * expert_bytes;
    piece->bytes = (uint64_t)loader->range.count * expert_bytes;
    return take(loader, piece, to);
}

// One fused projection: checked, and read when `weights` is not NULL.
static int take_fused(const struct loader *loader, const char *name,
                      const struct weights_shape *shape, struct weights *weights)
{
    static const struct weights nothing = {.value_bytes = 0};
    const struct weights *to = weights != NULL ? weights : &nothing;
    int packed = shape->format == MOXIE_FORMAT_MXFP4;
    struct piece piece = fused_piece(loader, name, packed ? "_blocks" : "", shape);
    int st = EXIT_OK;

    piece.word = value_word(shape->format);
    if (shape->orientation == MOXIE_ROWS_IN) {
        piece.shape[1] = shape->inputs;
        piece.shape[2] = shape->outputs;
    }
    if (packed) {
        piece.ndim = 4;
        piece.shape[2] = shape->inputs / 32;
        piece.shape[3] = 16;
    }
    TRY(take_range(loader, &piece, to->value_bytes, to->values.at));
    if (packed) {
        piece = fused_piece(loader, name, "_scales", shape);
        piece.word = WORD_U8;
        piece.shape[2] = shape->inputs / 32;
        TRY(take_range(loader, &piece, to->scale_bytes, to->scales.at));
    }
    if (shape->bias_format != MOXIE_FORMAT_AUTO) {
        piece = fused_piece(loader, name, "_bias", shape);
        piece.word = value_word(shape->bias_format);
        piece.ndim = 2;
        TRY(take_range(loader, &piece, to->bias_bytes, to->biases.at));
    }
out:
    return st;
}

int experts_load(struct experts *experts, const struct expert_layout *layout,
                 struct checkpoint *checkpoint, struct expert_range range,
                 const struct load_target *target, struct fault *fault)
{
    struct loader loader = {layout, checkpoint, range, fault, target->device, NULL};
    struct weights_shape w1 = layout->w1;
    struct weights_shape w2 = layout->w2;
    int st = EXIT_OK;

    *experts = (struct experts){.w1 = {.value_bytes = 0}};
    if (range.first < 0 || range.count < 0 || range.first > layout->w1.experts - range.count)
        return fault_set(fault, EXIT_TROUBLE, "no experts %lld to %lld in a layer of %lld",
                         (long long)range.first, (long long)(range.first + range.count - 1),
                         (long long)layout->w1.experts);
    w1.experts = range.count;
    w2.experts = range.count;
    if (!target->device->table->direct) {
        loader.staging = malloc(STAGING_BYTES);
        if (loader.staging == NULL) TRY(fault_set(fault, EXIT_TROUBLE, "out of memory"));
    }
    TRY(weights_init(&experts->w1, target->device, &w1, fault));
    TRY(weights_init(&experts->w2, target->device, &w2, fault));
    if (layout->fused && range.count > 0) {
        TRY(take_fused(&loader, layout->gate, &layout->w1, &experts->w1));
        TRY(take_fused(&loader, layout->down, &layout->w2, &experts->w2));
    }
    for (int64_t i = 0; i < range.count && !layout->fused; i++) {
        TRY(take_expert(&loader, range.first + i, experts));
        if (target->report != NULL)
            target->report(target->ctx, (double)(i + 1) / (double)range.count);
    }
out:
    free(loader.staging);
    if (st != EXIT_OK) experts_fini(experts);
    return st;
}

void experts_fini(struct experts *experts)
{
    weights_fini(&experts->w1);
    weights_fini(&experts->w2);
}

// Those of a layer that has more of them than is said would not be loaded.
static int check_count(const struct loader *loader)
{
    const struct expert_layout *layout = loader->layout;
    const struct checkpoint *checkpoint = loader->checkpoint;
    const struct projection next = {.expert = layout->w1.experts, .name = layout->gate};
    const struct piece piece = projection_piece(loader, &next, ".weight", WORD_UNKNOWN);

    if (!checkpoint_has(checkpoint, piece.name)) return EXIT_OK;
    return fault_set(loader->fault, EXIT_TROUBLE,
                     "%s: tensor %s is there, and the model's description has %lld experts",
                     checkpoint->folder != NULL ? checkpoint->folder : checkpoint->files[0].path,
                     piece.name, (long long)layout->w1.experts);
}

int experts_check(const struct expert_layout *layout, struct checkpoint *checkpoint,
                  struct fault *fault)
{
    const struct loader loader = {layout, checkpoint, {0, 0}, fault, NULL, NULL};
    int st = EXIT_OK;

    if (layout->fused) {
        TRY(take_fused(&loader, layout->gate, &layout->w1, NULL));
        TRY(take_fused(&loader, layout->down, &layout->w2, NULL));
        return EXIT_OK;
    }
    TRY(take_expert(&loader, 0, NULL));
    TRY(take_expert(&loader, layout->w1.experts - 1, NULL));
    TRY(check_count(&loader));
out:
    return st;
}
