// moxie plan: every buffer of a configuration, and the bounds behind it.

#include "hosts/cli/commands.h"
#include "hosts/cli/config_command.h"
#include "hosts/cli/json_file.h"
#include "hosts/cli/table.h"
#include "hosts/cli/weights.h"

#include <stdlib.h>
#include <string.h>

static const char doc[] =
    "Prints every buffer that the configuration needs on one rank, and the token bounds behind it. "
    "Needs no GPU and no weights. If the configuration is refused, it prints the reasons and "
    "whatever bounds can be computed, and the exit code is 2.\v"
    "How much the weights of this rank's experts are, which the engine holds, stands below the "
    "total; in JSON it is weights_bytes. Both are left out with runner none, whose weights no key "
    "describes.\n\n"
    "CONFIG.json is one JSON object; `moxie info --keys` lists the keys. CONFIG.json "
    "overrides --model, and --set overrides both.\n\n"
    "Example:\n"
    "  moxie plan --model DIR --set max_prefill_tokens=8192";

static const char *kind_name(int32_t kind)
{
    static const char *const names[] = {
        [MOXIE_MEMORY_DEVICE] = "device",
        [MOXIE_MEMORY_SYMMETRIC] = "symmetric",
        [MOXIE_MEMORY_PINNED] = "pinned",
        [MOXIE_MEMORY_HOST] = "host",
    };
    int known = kind >= MOXIE_MEMORY_DEVICE && kind <= MOXIE_MEMORY_HOST;

    return known ? names[kind] : "unknown";
}

static const moxie_buffer *buffer_at(const moxie_plan *plan, uint64_t index)
{
    return (const moxie_buffer *)(const void *)((const char *)plan->buffers +
                                                index * plan->buffer_stride);
}

static int64_t number_of(const struct instance *instance, const char *key)
{
    return strtoll(instance_config(instance, key), NULL, 10);
}

// Whether the keys describe the engine's weights: those of its own runner may be anything.
static int weights_are_known(const struct instance *instance)
{
    return strcmp(instance_config(instance, "runner"), "none") != 0;
}

// Of this rank's experts in all layers, which the engine holds: as the plan's sizes imply them,
// without biases. 0 when nothing of that size can be.
static uint64_t weights_bytes_of(const struct instance *instance)
{
    const int gated = strcmp(instance_config(instance, "activation"), "relu2") != 0;
    const struct weights_shape like = {
        .format = format_from_word(instance_config(instance, "weight_format")),
        .order = gated ? MOXIE_ORDER_GATE_UP : MOXIE_ORDER_PLAIN,
        .experts = instance->plan->bounds->experts_local,
    };
    struct weights_shape w1, w2;
    uint64_t bytes = 0;

    weights_shapes(number_of(instance, "hidden_size"), number_of(instance, "intermediate_size"),
                   &like, &w1, &w2);
    return bytes_mul(weights_bytes_of_two(&w1, &w2), (uint64_t)number_of(instance, "num_layers"),
                     &bytes)
               ? bytes
               : 0;
}

static json_t *plan_document(const struct instance *instance, json_t *model)
{
    const moxie_plan *plan = instance->plan;
    json_t *buffers = json_array();
    json_t *weights =
        weights_are_known(instance) ? json_integer((json_int_t)weights_bytes_of(instance)) : NULL;

    for (uint64_t i = 0; i < plan->buffers_count; i++) {
        const moxie_buffer *buffer = buffer_at(plan, i);

        (void)json_array_append_new(
            buffers, json_pack("{s:s, s:s, s:I, s:I, s:I, s:s}", "name", buffer->name, "kind",
                               kind_name(buffer->kind), "bytes", (json_int_t)buffer->bytes,
                               "bytes_mapped", (json_int_t)buffer->bytes_mapped, "align",
                               (json_int_t)buffer->align, "why", buffer->why));
    }
    return json_pack("{s:b, s:O*, s:o, s:o, s:{s:I, s:I, s:I, s:I}, s:o*, s:o}", "ok", 1, "model",
                     model, "bounds", instance_bounds(instance), "buffers", buffers, "total_bytes",
                     "device", (json_int_t)plan->device_bytes, "symmetric",
                     (json_int_t)plan->symmetric_bytes, "pinned", (json_int_t)plan->pinned_bytes,
                     "host", (json_int_t)plan->host_bytes, "weights_bytes", weights, "warnings",
                     instance_warnings(instance));
}

static void print_bounds(FILE *stream, const struct instance *instance)
{
    json_t *bounds = instance_bounds(instance);
    const char *dominant = json_string_value(json_object_get(bounds, "dominant"));
    const char *name = NULL;
    json_t *value = NULL;

    json_object_foreach(bounds, name, value)
    {
        if (!json_is_integer(value)) continue;
        (void)fprintf(stream, "  %-17s %12lld", name, (long long)json_integer_value(value));
        if (dominant != NULL && json_object_get(bounds, "forward_tokens") == value)
            (void)fprintf(stream, "  from %s", dominant);
        (void)fputc('\n', stream);
    }
    json_decref(bounds);
}

static void print_plan(const struct instance *instance)
{
    static const char *const heading[] = {"buffer", "kind", "bytes", "mapped", "why"};
    const moxie_plan *plan = instance->plan;
    struct table table;
    char bytes[HUMAN_BYTES];
    char mapped[HUMAN_BYTES];

    (void)printf("Tokens and rows of one rank\n");
    print_bounds(stdout, instance);
    (void)printf("\nBuffers of one rank\n");
    table_init(&table, 5, 1u << 2 | 1u << 3, heading);
    for (uint64_t i = 0; i < plan->buffers_count; i++) {
        const moxie_buffer *buffer = buffer_at(plan, i);

        table_cell(&table, 0, "%s", buffer->name);
        table_cell(&table, 1, "%s", kind_name(buffer->kind));
        table_cell(&table, 2, "%s", human_bytes(buffer->bytes, bytes));
        table_cell(&table, 3, "%s", human_bytes(buffer->bytes_mapped, mapped));
        table_cell(&table, 4, "%s", buffer->why);
    }
    table_print(&table, 2);
    table_fini(&table);
    (void)printf("\nTotal: device %s", human_bytes(plan->device_bytes, bytes));
    (void)printf(", symmetric %s", human_bytes(plan->symmetric_bytes, bytes));
    (void)printf(", pinned %s", human_bytes(plan->pinned_bytes, bytes));
    (void)printf(", host %s\n", human_bytes(plan->host_bytes, bytes));
    if (!weights_are_known(instance)) return;
    (void)printf("Not in it: the engine's own weights of these experts, %s\n",
                 human_bytes(weights_bytes_of(instance), bytes));
}

static void print_warnings(const struct instance *instance)
{
    json_t *warnings = instance_warnings(instance);

    warnings_print(stderr, "moxie plan:", warnings);
    json_decref(warnings);
}

// A refusal: reasons, and what can be said nevertheless. A warning may be what explains it: a key
// that must be set, under a name that is not quite its own.
static int refuse(const struct instance *instance, int as_json, struct fault *fault)
{
    int st = EXIT_OK;

    if (!as_json) print_warnings(instance);
    st = instance_refuse(instance, as_json, 1, fault);
    if (!as_json && instance->plan != NULL && instance->plan->bounds != NULL) {
        (void)fprintf(stderr, "What can be computed nevertheless:\n");
        print_bounds(stderr, instance);
    }
    return st;
}

static int show(const struct instance *instance, json_t *model, int as_json, struct fault *fault)
{
    if (instance->report->reasons_count > 0) return refuse(instance, as_json, fault);
    if (as_json) return json_print(plan_document(instance, model), fault);
    print_plan(instance);
    print_warnings(instance);
    return EXIT_OK;
}

int command_plan(int argc, char **argv, struct fault *fault)
{
    static const struct config_command command = {doc, show};

    return config_command(argc, argv, &command, fault);
}
