// Whether a runner and a dispatcher meet, and have kernels for the formats asked of them. Nothing
// is assumed: each says in its tables what it produces or accepts, and every refusal names the
// nearest that works.

#include "plugin/validate.h"

#include "kernels/types.h"
#include "plugin/backends.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define NAMES_BYTES 256

// "a, b" of the backends of a kind on a device.
static void names_list(enum backend_kind kind, const char *device, char names[NAMES_BYTES])
{
    size_t length = 0;

    names[0] = '\0';
    for (uint32_t i = 0; i < backends_count && length < NAMES_BYTES; i++) {
        if (backends[i].kind != (int32_t)kind || strcmp(backends[i].device, device) != 0) continue;
        length += (size_t)snprintf(names + length, NAMES_BYTES - length, "%s%s",
                                   length == 0 ? "" : ", ", backends[i].name);
    }
    if (kind == BACKEND_RUNNER && length < NAMES_BYTES)
        (void)snprintf(names + length, NAMES_BYTES - length,
                       ", or " BACKEND_RUNNER_NONE " for the host's own");
}

// The word of `key` whose number is in `bits` and nearest to `number`: tables are ordered by width.
// Formats fall back to bf16 where that is one: it is what the other formats are by default.
static void nearest_word(enum config_key key, uint32_t bits, int32_t number,
                         char word[CONFIG_TEXT_BYTES])
{
    if (key == KEY_WEIGHT_FORMAT && (bits & BACKEND_BIT(FORMAT_BF16)) != 0) {
        config_word_text(key, FORMAT_BF16, word);
        return;
    }
    for (int32_t distance = 1; distance < 32; distance++) {
        for (int32_t sign = -1; sign <= 1; sign += 2) {
            int32_t other = number + sign * distance;

            if (other < 0 || other > 31 || (bits & BACKEND_BIT(other)) == 0) continue;
            config_word_text(key, other, word);
            if (word[0] != '\0') return;
        }
    }
    (void)snprintf(word, CONFIG_TEXT_BYTES, "nothing: this backend has none");
}

static void check_word(const struct config *config, const struct backend *backend,
                       enum config_key key, uint32_t bits, struct report *report)
{
    int32_t number = config_word(config, key);
    char word[CONFIG_TEXT_BYTES];

    if (!config_ok(config, key) || (bits & BACKEND_BIT(number)) != 0) return;
    nearest_word(key, bits, number, word);
    report_reason(report, MOXIE_E_UNSUPPORTED, key,
                  "%s has no kernel on %s for %s %s: set %s to %s", backend->name, backend->device,
                  config_name(key), config_str(config, key), config_name(key), word);
}

// The rows that a runner reads with these weights.
static uint32_t readable_rows(const struct config *config, const struct backend *runner)
{
    int32_t weights = config_word(config, KEY_WEIGHT_FORMAT);

    if (!runner->one_format || backend_operand_format(weights) == FORMAT_FP8)
        return runner->wire_formats;
    return runner->wire_formats & ~BACKEND_BIT(FORMAT_FP8_BLOCK128);
}

// The dispatched rows are what one side writes and the other reads.
static void check_wire(const struct config *config, const struct backend *runner,
                       const struct backend *dispatcher, struct report *report)
{
    static const int32_t formats[] = {FORMAT_AUTO, FORMAT_FP8_BLOCK128, FORMAT_NVFP4};
    int32_t format = formats[config_word(config, KEY_DISPATCH_FORMAT)];
    uint32_t readable = readable_rows(config, runner);
    char with[32 + CONFIG_TEXT_BYTES] = "";
    const struct backend *lacking;

    if (!config_ok(config, KEY_WEIGHT_FORMAT)) return; // which says what is readable
    if (format == FORMAT_AUTO) {
        format = config_word(config, KEY_INPUT_FORMAT);
        // Rows that no side takes are input_format's fault, which has been said.
        if ((runner->input_formats & dispatcher->input_formats & BACKEND_BIT(format)) == 0) return;
    }
    if ((readable & dispatcher->wire_formats & BACKEND_BIT(format)) != 0) return;
    lacking = (readable & BACKEND_BIT(format)) == 0 ? runner : dispatcher;
    if (lacking == runner)
        (void)snprintf(with, sizeof with, " with weight_format %s",
                       config_str(config, KEY_WEIGHT_FORMAT));
    report_reason(
        report, MOXIE_E_UNSUPPORTED, KEY_DISPATCH_FORMAT,
        "%s has no kernel on %s for rows of dispatch_format %s%s: set dispatch_format to %s",
        lacking->name, lacking->device, config_str(config, KEY_DISPATCH_FORMAT), with,
        config_word(config, KEY_DISPATCH_FORMAT) == DISPATCH_INPUT ? "fp8_block128" : "input");
}

// What the two sides must agree on, whatever the formats.
static void check_traits(const struct backend *runner, const struct backend *dispatcher,
                         struct report *report)
{
    const moxie_traits *accepts = runner->traits;
    const moxie_traits *produces = dispatcher->traits;
    const char *what = NULL;
    char names[NAMES_BYTES];

    if (accepts == NULL) return; // the host meets what the dispatcher says it produces
    if ((accepts->layouts & produces->layouts) == 0)
        what = "share no row layout";
    else if ((accepts->id_spaces & produces->id_spaces) == 0)
        what = "share no meaning of expert ids";
    else if (accepts->weights_applied_by != produces->weights_applied_by)
        what = "disagree on who applies the router weights";
    else if (accepts->scaling_applied_by != produces->scaling_applied_by)
        what = "disagree on who applies routed_scaling_factor";
    if (what == NULL) return;
    names_list(BACKEND_DISPATCHER, dispatcher->device, names);
    report_reason(report, MOXIE_E_UNSUPPORTED, KEY_DISPATCHER,
                  "runner %s and dispatcher %s %s; others are %s: set dispatcher to auto",
                  runner->name, dispatcher->name, what, names);
}

// The device that has a backend of that name, where this one has not; NULL: none has.
static const char *device_of(enum backend_kind kind, const char *name)
{
    for (uint32_t i = 0; i < backends_count; i++)
        if (backends[i].kind == (int32_t)kind && strcmp(backends[i].name, name) == 0)
            return backends[i].device;
    return NULL;
}

static void refuse_name(const struct config *config, enum config_key key, enum backend_kind kind,
                        struct report *report)
{
    const char *device = config_str(config, KEY_DEVICE);
    const char *other = device_of(kind, config_str(config, key));
    char names[NAMES_BYTES], more[32] = "";

    names_list(kind, device, names);
    if (other != NULL) (void)snprintf(more, sizeof more, ", or device to %s", other);
    report_reason(report, MOXIE_E_UNSUPPORTED, key,
                  "%s '%s' is not registered for device %s, which has %s: set %s to auto%s",
                  config_name(key), config_str(config, key), device, names, config_name(key), more);
}

// A push dispatcher reduces over the EP ranks only; with one, the partial sums of the other tp
// ranks would be lost.
static void check_group(const struct config *config, const struct backend *dispatcher,
                        struct report *report)
{
    int64_t tp_size = config_i64(config, KEY_TP_SIZE);
    char other[64] = "";

    // The default that stands in for a refused value is not what the host said.
    if (!config_ok(config, KEY_EP_SIZE)) return;
    if (dispatcher->id == DISPATCHER_LOCAL || config_i64(config, KEY_EP_SIZE) > 1 || tp_size == 1)
        return;
    if (tp_size <= MOXIE_RANKS_MAX)
        (void)snprintf(other, sizeof other, ", or ep_size to %" PRId64, tp_size);
    report_reason(
        report, MOXIE_E_UNSUPPORTED, KEY_DISPATCHER,
        "dispatcher %s moves rows between EP ranks, and ep_size is 1 while tp_size is %" PRId64
        ": set dispatcher to local%s",
        dispatcher->name, tp_size, other);
}

// Of the numbers in the narrowest rows: the weights', or where those are the host's affair, of what
// is moved. A weight_format that the runner has no kernel for is taken for the one that is advised.
static int32_t narrowest_bits(const struct config *config, const struct backend *runner)
{
    int32_t weights = config_word(config, KEY_WEIGHT_FORMAT);
    int known = (BACKEND_BIT(weights) & runner->weight_formats) != 0;

    if (runner->traits != NULL) return backend_weight_bits(known ? weights : FORMAT_BF16);
    return validate_has_wire(config) &&
                   config_word(config, KEY_DISPATCH_FORMAT) == DISPATCH_FP8_BLOCK128
               ? 8
               : 16;
}

// Of the rows that are moved to the host's own runner, whose weights nobody here sees.
static void refuse_moved(const struct config *config, const struct backend *runner,
                         int64_t multiple, struct report *report)
{
    int64_t size = config_i64(config, KEY_HIDDEN_SIZE);
    int fp8 = narrowest_bits(config, runner) == 8;

    report_reason(report, MOXIE_E_UNSUPPORTED, KEY_HIDDEN_SIZE,
                  "rows on %s are moved 16 bytes at a time, which takes a hidden_size that is a "
                  "multiple of %" PRId64 "%s (pad rows with zeros), and it is %" PRId64
                  ": set hidden_size to %" PRId64 "%s",
                  runner->device, multiple, fp8 ? " with dispatch_format fp8_block128" : "", size,
                  ceil_div(size, multiple) * multiple,
                  fp8 && size % 8 == 0 ? ", or dispatch_format to input" : "");
}

static void check_multiple(const struct config *config, const struct backend *runner,
                           enum config_key key, struct report *report)
{
    int64_t size = config_i64(config, key);
    int64_t multiple = runner->row_multiple_bytes * 8 / narrowest_bits(config, runner);

    // Sizes past the columns that it takes are refused for that.
    if (multiple == 0 || !config_ok(config, key) || !config_ok(config, KEY_WEIGHT_FORMAT) ||
        size > runner->columns_max || size % multiple == 0)
        return;
    if (runner->traits == NULL) {
        refuse_moved(config, runner, multiple, report);
        return;
    }
    report_reason(report, MOXIE_E_UNSUPPORTED, key,
                  "%s on %s takes a %s that is a multiple of %" PRId64
                  " (pad the weights with zeros), and it is %" PRId64 ": set %s to %" PRId64,
                  runner->name, runner->device, config_name(key), multiple, size, config_name(key),
                  ceil_div(size, multiple) * multiple);
}

static void check_columns(const struct config *config, const struct backend *runner,
                          enum config_key key, struct report *report)
{
    int64_t size = config_i64(config, key);

    if (!config_ok(config, key) || size <= runner->columns_max) return;
    report_reason(report, MOXIE_E_UNSUPPORTED, key,
                  "%s on %s counts %s in 32 bits, and %s is %" PRId64 ": set %s to %d or less",
                  runner->name, runner->device,
                  runner->columns_max == INT32_MAX ? "columns" : "the bytes of a row",
                  config_name(key), size, config_name(key), runner->columns_max);
}

// Of a runner that multiplies rows of the weights' kind: 1, and a reason, when the key is of
// another. A weight_format that it has no kernel for is taken for the one that is advised.
static int check_one_format(const struct config *config, const struct backend *runner,
                            enum config_key key, struct report *report)
{
    int32_t weights = config_word(config, KEY_WEIGHT_FORMAT);
    int32_t wanted = backend_operand_format(weights);
    int known = (BACKEND_BIT(weights) & runner->weight_formats) != 0;
    char word[CONFIG_TEXT_BYTES], of[CONFIG_TEXT_BYTES];

    // Rows that come in 16 bits are quantised on the way.
    if (!runner->one_format || !config_ok(config, KEY_WEIGHT_FORMAT) ||
        (key == KEY_INPUT_FORMAT && wanted == FORMAT_FP8) || !config_ok(config, key) ||
        config_word(config, key) == wanted)
        return 0;
    config_word_text(key, wanted, word);
    config_word_text(KEY_WEIGHT_FORMAT, known ? weights : wanted, of);
    report_reason(report, MOXIE_E_UNSUPPORTED, key,
                  "%s on %s multiplies %s, and %s is %s while weight_format %s %s: set %s to %s",
                  runner->name, runner->device,
                  known && backend_weight_bits(weights) == 4 ? "weights of 4 bits by bf16 rows"
                                                             : "rows of the weights' kind",
                  config_name(key), config_str(config, key), known ? "is" : "is to be", of,
                  config_name(key), word);
    return 1;
}

// Of the physical experts that a rank owns.
static void check_experts(const struct config *config, const struct backend *runner,
                          struct report *report)
{
    int64_t ranks = config_i64(config, KEY_EP_SIZE);
    char before[128], after[48];

    if (runner->experts_max == 0 || !config_ok(config, KEY_EP_SIZE)) return;
    (void)snprintf(before, sizeof before, "%s on %s takes %d experts a rank, and", runner->name,
                   runner->device, runner->experts_max);
    (void)snprintf(after, sizeof after, "lie on %" PRId64 " ranks", ranks);
    (void)bounds_experts(config, runner->experts_max * ranks, before, after, report);
}

// What a runner's kernels cannot do beyond its formats.
static void check_runner(const struct config *config, const struct backend *runner,
                         struct report *report)
{
    check_multiple(config, runner, KEY_HIDDEN_SIZE, report);
    check_columns(config, runner, KEY_HIDDEN_SIZE, report);
    if (runner->traits != NULL) {
        check_multiple(config, runner, KEY_INTERMEDIATE_SIZE, report);
        check_columns(config, runner, KEY_INTERMEDIATE_SIZE, report);
    }
    check_experts(config, runner, report);
    check_word(config, runner, KEY_WEIGHT_FORMAT, runner->weight_formats, report);
    check_word(config, runner, KEY_ACTIVATION, runner->activations, report);
    if (!check_one_format(config, runner, KEY_ACTIVATION_FORMAT, report))
        check_word(config, runner, KEY_ACTIVATION_FORMAT, runner->activation_formats, report);
    if (runner->traits == NULL && config_i64(config, KEY_COUNT_EXPERT_LOAD) == 1)
        report_reason(
            report, MOXIE_E_UNSUPPORTED, KEY_COUNT_EXPERT_LOAD,
            "count_expert_load is 1, and what is counted is what Moxie's runner computes, "
            "while runner is %s: set count_expert_load to 0, or runner to auto",
            runner->name);
}

void validate_backends(const struct config *config, const struct backend *runner,
                       const struct backend *dispatcher, struct report *report)
{
    // Names are a device's: one that is no word takes none.
    const int named = config_ok(config, KEY_DEVICE);

    if (runner == NULL && named && config_ok(config, KEY_RUNNER))
        refuse_name(config, KEY_RUNNER, BACKEND_RUNNER, report);
    if (dispatcher == NULL && named && config_ok(config, KEY_DISPATCHER))
        refuse_name(config, KEY_DISPATCHER, BACKEND_DISPATCHER, report);
    // All else is judged by what the advice puts in a wrong name's place.
    if (runner == NULL) runner = validate_auto(config, BACKEND_RUNNER);
    if (dispatcher == NULL) dispatcher = validate_auto(config, BACKEND_DISPATCHER);
    if (runner != NULL) check_runner(config, runner, report);
    if (dispatcher != NULL) check_group(config, dispatcher, report);
    if (runner == NULL || dispatcher == NULL) return;
    if (!check_one_format(config, runner, KEY_INPUT_FORMAT, report))
        check_word(config,
                   (runner->input_formats & ~dispatcher->input_formats) == 0 ? runner : dispatcher,
                   KEY_INPUT_FORMAT, runner->input_formats & dispatcher->input_formats, report);
    check_word(config,
               (runner->output_formats & ~dispatcher->output_formats) == 0 ? runner : dispatcher,
               KEY_OUTPUT_FORMAT, runner->output_formats & dispatcher->output_formats, report);
    if (validate_has_wire(config)) check_wire(config, runner, dispatcher, report);
    check_traits(runner, dispatcher, report);
}
