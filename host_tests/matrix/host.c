// A host of one generation of abi.h, for matrix.py, which runs it against plugins of every one.
//
//     matrix_host_GENERATION PLUGIN            every struct as this generation knows it
//     matrix_host_GENERATION PLUGIN tail NAME  the last byte of that struct is 1
//     matrix_host_GENERATION PLUGIN short NAME it says that it is 8 bytes shorter
//
// Prints one "word value" per line: the first step that failed ("end": none), its code and text,
// and what it saw of the plugin. Exits 1 when it could not do its part or a sum is wrong.

#include "abi.h"
#include "abi/loader.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HIDDEN     2
#define EXPERTS    2
#define TOKENS     2
#define PROBES_MAX 16
#define BUILD      "matrix-host (" GENERATION ")"
#define TENSOR_OF(array, code_, shape_)                                                            \
    {                                                                                              \
        .data = (array), .device = {MOXIE_DEVICE_CPU, 0},                                          \
        .ndim = sizeof(shape_) / sizeof(shape_)[0], .dtype = {(code_), 32, 1}, .shape = (shape_)   \
    }

// ---- One layer: both experts multiply silu(x) by x, expert 1 doubles the result ----

static int64_t w1_shape[] = {EXPERTS, 2 * HIDDEN, HIDDEN}, w2_shape[] = {EXPERTS, HIDDEN, HIDDEN};
static int64_t rows_shape[] = {TOKENS, HIDDEN}, choice_shape[] = {TOKENS, 1};
static int64_t logits_shape[] = {TOKENS, EXPERTS};
static float w1_values[] = {1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1};
static float w2_values[] = {1, 0, 0, 1, 2, 0, 0, 2};
static float x_values[] = {1, 2, 1, 2}, y_values[TOKENS * HIDDEN], choice_weights[] = {1, 1};
static float logits_values[] = {3, 1, 1, 3}, routed_weights[TOKENS];
static int32_t choices[] = {0, 1}, routed_ids[] = {-1, -1};

// Every struct that a host hands over, once.
static moxie_request request = {.struct_size = sizeof request,
                                .abi_min = MOXIE_ABI_VERSION,
                                .abi_max = MOXIE_ABI_VERSION,
                                .host_build = BUILD};
static moxie_matrix w1 = {.struct_size = sizeof w1,
                          .format = MOXIE_FORMAT_F32,
                          .order = MOXIE_ORDER_GATE_UP,
                          .values = TENSOR_OF(w1_values, MOXIE_DTYPE_FLOAT, w1_shape)};
static moxie_matrix w2 = {.struct_size = sizeof w2,
                          .format = MOXIE_FORMAT_F32,
                          .values = TENSOR_OF(w2_values, MOXIE_DTYPE_FLOAT, w2_shape)};
static moxie_weights weights = {.struct_size = sizeof weights, .w1 = &w1, .w2 = &w2};
static moxie_step step = {.struct_size = sizeof step, .tokens = TOKENS};
static moxie_batch batch = {.struct_size = sizeof batch,
                            .id_space = MOXIE_IDS_GLOBAL,
                            .x = TENSOR_OF(x_values, MOXIE_DTYPE_FLOAT, rows_shape),
                            .ids = TENSOR_OF(choices, MOXIE_DTYPE_INT, choice_shape),
                            .weights = TENSOR_OF(choice_weights, MOXIE_DTYPE_FLOAT, choice_shape),
                            .y = TENSOR_OF(y_values, MOXIE_DTYPE_FLOAT, rows_shape)};
static moxie_call call = {.struct_size = sizeof call};
static moxie_slab in_slab = {.struct_size = sizeof in_slab,
                             .rows = TENSOR_OF(x_values, MOXIE_DTYPE_FLOAT, rows_shape),
                             .ids = TENSOR_OF(choices, MOXIE_DTYPE_INT, choice_shape),
                             .weights = TENSOR_OF(choice_weights, MOXIE_DTYPE_FLOAT, choice_shape)};
static moxie_slab out_slab = {.struct_size = sizeof out_slab,
                              .rows = TENSOR_OF(y_values, MOXIE_DTYPE_FLOAT, rows_shape)};
static moxie_rows in = {.struct_size = sizeof in,
                        .layout = MOXIE_LAYOUT_STANDARD,
                        .id_space = MOXIE_IDS_GLOBAL,
                        .slabs_count = 1,
                        .slab_stride = sizeof in_slab,
                        .slabs = &in_slab};
static moxie_rows out = {.struct_size = sizeof out,
                         .layout = MOXIE_LAYOUT_STANDARD,
                         .id_space = MOXIE_IDS_GLOBAL,
                         .slabs_count = 1,
                         .slab_stride = sizeof out_slab,
                         .slabs = &out_slab};
static moxie_routing routing = {.struct_size = sizeof routing, .scoring = MOXIE_SCORING_SOFTMAX};
static moxie_probe probes[PROBES_MAX];
static moxie_config_entry entry = {.struct_size = sizeof entry};
static moxie_stats stats = {.struct_size = sizeof stats};
static moxie_captured captured = {.struct_size = sizeof captured};
static char text[1024];
static moxie_error error = {.struct_size = sizeof error, .text_bytes = sizeof text, .text = text};

// ---- The host's callbacks ----

static const moxie_runner_api *runs;
static const moxie_dispatcher_api *moves;
static moxie_library library;
static moxie_instance *instance;
static moxie_runner *runner;
static moxie_dispatcher *dispatcher;

static int32_t get_i64(void *ctx, const char *key, int64_t *value)
{
    static const struct {
        const char *key;
        int64_t value;
    } settings[] = {{"hidden_size", HIDDEN},        {"intermediate_size", HIDDEN},
                    {"num_experts", EXPERTS},       {"top_k", 1},
                    {"forward_tokens_max", TOKENS}, {"capture_routed_experts", 1}};

    (void)ctx;
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        if (strcmp(settings[i].key, key) != 0) continue;
        *value = settings[i].value;
        return MOXIE_CONFIG_FOUND;
    }
    return MOXIE_CONFIG_ABSENT;
}

static int32_t get_f64(void *ctx, const char *key, double *value)
{
    (void)ctx;
    (void)key;
    (void)value;
    return MOXIE_CONFIG_ABSENT;
}

static int32_t get_str(void *ctx, const char *key, char *buffer, uint64_t capacity,
                       uint64_t *length)
{
    (void)ctx;
    if (strcmp(key, "weight_format") != 0 && strcmp(key, "input_format") != 0 &&
        strcmp(key, "output_format") != 0)
        return MOXIE_CONFIG_ABSENT;
    *length = strlen("f32");
    if (capacity > 0) (void)snprintf(buffer, capacity, "f32");
    return MOXIE_CONFIG_FOUND;
}

static int32_t register_runner(void *ctx, const moxie_runner_info *info)
{
    (void)ctx;
    if (strcmp(info->name, "moxie_cpu") == 0) runs = info->api;
    return moxie_verify_runner(info, &error);
}

static int32_t register_dispatcher(void *ctx, const moxie_dispatcher_info *info)
{
    (void)ctx;
    if (strcmp(info->name, "local") == 0) moves = info->api;
    return moxie_verify_dispatcher(info, &error);
}

static moxie_host host = {.struct_size = sizeof host,
                          .abi_version = MOXIE_ABI_VERSION,
                          .name = BUILD,
                          .get_i64 = get_i64,
                          .get_f64 = get_f64,
                          .get_str = get_str,
                          .register_runner = register_runner,
                          .register_dispatcher = register_dispatcher};

// ---- Its life, step by step ----

// As moxie_load asked, but with this host's own request.
static int32_t step_request(void)
{
    moxie_get_api_v1_fn get_api;
    void *symbol = dlsym(library.handle, "moxie_get_api_v1");
    const moxie_api *api;

    memcpy(&get_api, &symbol, sizeof get_api);
    return get_api(&request, &api, &error);
}

static int32_t step_probe(void)
{
    uint64_t count;

    for (int i = 1; i < PROBES_MAX; i++)
        probes[i].struct_size = sizeof probes[i];
    return library.api->probe(probes, sizeof probes[0], PROBES_MAX, &count, &error);
}

static int32_t step_open(void)
{
    return library.api->open(&host, &instance, &error);
}

static int32_t step_validate(void)
{
    const moxie_report *report;
    int32_t st = library.api->validate(instance, &report, &error);

    return st == MOXIE_OK && report->reasons_count > 0 ? MOXIE_E_CONFIG : st;
}

// The plan is walked by the plugin's stride.
static int32_t step_plan(void)
{
    const moxie_plan *plan;
    uint64_t sum = 0, wanted = 0;
    int32_t st = library.api->plan(instance, &plan, &error);

    if (st != MOXIE_OK) return st;
    for (uint64_t i = 0; i < plan->buffers_count; i++) {
        const char *at = (const char *)plan->buffers + i * plan->buffer_stride;

        sum += ((const moxie_buffer *)(const void *)at)->bytes_mapped;
    }
    wanted = plan->device_bytes + plan->symmetric_bytes + plan->pinned_bytes + plan->host_bytes;
    return sum == wanted && sum > 0 ? MOXIE_OK : MOXIE_E_INTERNAL;
}

static int32_t step_config(void)
{
    return library.api->config(instance, 0, &entry);
}

static int32_t step_create_runner(void)
{
    return runs->create(instance, 0, &weights, &runner, &error);
}

static int32_t step_create_dispatcher(void)
{
    return moves->create(instance, &dispatcher, &error);
}

static int32_t step_begin(void)
{
    return moves->begin_forward(dispatcher, &step, &error);
}

// The code, or INTERNAL when y is not as computed by hand.
static int32_t check_y(int32_t st)
{
    static const float wanted[] = {0.7310586f, 3.5231884f, 1.4621172f, 7.0463767f};

    for (int i = 0; i < TOKENS * HIDDEN && st == MOXIE_OK; i++)
        if (y_values[i] < wanted[i] - 1e-4f || y_values[i] > wanted[i] + 1e-4f)
            st = MOXIE_E_INTERNAL;
    memset(y_values, 0, sizeof y_values);
    return st;
}

static int32_t step_forward(void)
{
    return check_y(library.api->forward(dispatcher, runner, &batch, &error));
}

static int32_t step_run(void)
{
    return check_y(runs->run(runner, &call, &in, &out, &error));
}

static int32_t step_route(void)
{
    const moxie_routing_api *api = library.api->get_extension(MOXIE_ROUTING_EXTENSION);
    const moxie_tensor logits = TENSOR_OF(logits_values, MOXIE_DTYPE_FLOAT, logits_shape);
    const moxie_tensor ids = TENSOR_OF(routed_ids, MOXIE_DTYPE_INT, choice_shape);
    const moxie_tensor found = TENSOR_OF(routed_weights, MOXIE_DTYPE_FLOAT, choice_shape);
    int32_t st = api->route(&routing, &logits, &ids, &found, NULL, &error);

    return st == MOXIE_OK && (routed_ids[0] != 0 || routed_ids[1] != 1) ? MOXIE_E_INTERNAL : st;
}

static int32_t step_captured(void)
{
    return library.api->captured(instance, &captured, &error);
}

static int32_t step_stats(void)
{
    int32_t st = library.api->stats(instance, &stats, &error);

    return st == MOXIE_OK && stats.forwards != 1 ? MOXIE_E_INTERNAL : st;
}

static const struct {
    const char *name;
    int32_t (*walk)(void);
} steps[] = {{"request", step_request},
             {"probe", step_probe},
             {"open", step_open},
             {"validate", step_validate},
             {"plan", step_plan},
             {"config", step_config},
             {"runner.create", step_create_runner},
             {"dispatcher.create", step_create_dispatcher},
             {"begin_forward", step_begin},
             {"forward", step_forward},
             {"run", step_run},
             {"route", step_route},
             {"captured", step_captured},
             {"stats", step_stats}};

// ---- What the arguments change ----

static const struct {
    const char *name;
    void *at;
    uint32_t bytes;
} structs[] = {
    {"moxie_request", &request, sizeof request},
    {"moxie_error", &error, sizeof error},
    {"moxie_probe", &probes[0], sizeof probes[0]},
    {"moxie_host", &host, sizeof host},
    {"moxie_config_entry", &entry, sizeof entry},
    {"moxie_weights", &weights, sizeof weights},
    {"moxie_matrix", &w1, sizeof w1},
    {"moxie_step", &step, sizeof step},
    {"moxie_batch", &batch, sizeof batch},
    {"moxie_call", &call, sizeof call},
    {"moxie_rows", &in, sizeof in},
    {"moxie_slab", &in_slab, sizeof in_slab},
    {"moxie_routing", &routing, sizeof routing},
    {"moxie_captured", &captured, sizeof captured},
    {"moxie_stats", &stats, sizeof stats},
};

#define STRUCTS (sizeof structs / sizeof structs[0])

static int change(const char *what, const char *name)
{
    for (size_t i = 0; i < STRUCTS; i++) {
        const uint32_t shorter = structs[i].bytes - 8;

        if (strcmp(structs[i].name, name) != 0) continue;
        if (strcmp(what, "short") == 0) memcpy(structs[i].at, &shorter, sizeof shorter);
        if (strcmp(what, "tail") == 0) ((unsigned char *)structs[i].at)[structs[i].bytes - 1] = 1;
        return 1;
    }
    return 0;
}

// What this host sees of a slot that a later version appended.
static void print_later(void)
{
#ifdef MOXIE_LATER
    if (library.api->struct_size < offsetof(moxie_api, later) + sizeof library.api->later)
        (void)printf("later absent\n");
    else
        (void)printf("later %d\n", library.api->later());
#else
    (void)printf("later %s\n",
                 library.api->struct_size > sizeof *library.api ? "unseen" : "unknown");
#endif
}

static void let_go(void)
{
    if (dispatcher != NULL) moves->destroy(dispatcher);
    if (runner != NULL) runs->destroy(runner);
    if (instance != NULL && library.api->close(instance, NULL) != MOXIE_OK) exit(EXIT_FAILURE);
    moxie_unload(&library);
}

int main(int argc, char **argv)
{
    const char *place = "load";
    int32_t st;

    if (argc == 2 && strcmp(argv[1], "structs") == 0) {
        for (size_t i = 0; i < STRUCTS; i++)
            (void)printf("%s\n", structs[i].name);
        return EXIT_SUCCESS;
    }
    probes[0].struct_size = sizeof probes[0];
    if (argc != 2 && (argc != 4 || !change(argv[2], argv[3]))) return EXIT_FAILURE;
    st = moxie_load(argv[1], BUILD, &library, &error);
    if (st == MOXIE_OK) {
        (void)printf("plugin %s\n", library.api->build->version);
        print_later();
    }
    for (size_t i = 0; i < sizeof steps / sizeof steps[0] && st == MOXIE_OK; i++) {
        place = steps[i].name;
        st = steps[i].walk();
    }
    (void)printf("step %s\ncode %d\ntext %s\n", st == MOXIE_OK ? "end" : place, st, text);
    let_go();
    return st == MOXIE_E_INTERNAL ? EXIT_FAILURE : EXIT_SUCCESS;
}
