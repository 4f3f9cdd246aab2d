// A small host: one layer of two experts on one rank. README.md shows main().
//
// Both experts multiply silu(x) by x; expert 1 doubles the result.

#include <moxie/abi.h>
#include <moxie/loader.h>

#include <stdio.h>
#include <string.h>

#define HIDDEN  2
#define EXPERTS 2
#define TOKENS  2

// What this engine keeps of the plugin.
struct engine {
    const moxie_runner_api *runners;
    const moxie_dispatcher_api *dispatchers;
};

// The engine's settings under the plugin's keys. A key that is absent takes its documented default.
static int32_t get_i64(void *ctx, const char *key, int64_t *value)
{
    static const struct {
        const char *key;
        int64_t value;
    } settings[] = {
        {"hidden_size", HIDDEN},        {"intermediate_size", HIDDEN},
        {"num_experts", EXPERTS},       {"top_k", 1},
        {"forward_tokens_max", TOKENS},
    };

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

// Weights, x and y are all f32 here.
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

static int32_t register_runner(void *ctx, const moxie_runner_info *runner)
{
    struct engine *engine = ctx;

    if (strcmp(runner->device, "cpu") == 0) engine->runners = runner->api;
    return 0;
}

static int32_t register_dispatcher(void *ctx, const moxie_dispatcher_info *dispatcher)
{
    struct engine *engine = ctx;

    if (strcmp(dispatcher->name, "local") == 0 && strcmp(dispatcher->device, "cpu") == 0)
        engine->dispatchers = dispatcher->api;
    return 0;
}

// One layer of this engine's model, and one batch for it. The plugin borrows all of it.
struct layer {
    float w1[EXPERTS][2 * HIDDEN][HIDDEN]; // [experts, gate rows then up rows, hidden]
    float w2[EXPERTS][HIDDEN][HIDDEN];     // [experts, hidden, intermediate]
    float x[TOKENS][HIDDEN];
    int32_t ids[TOKENS][1];
    float router_weights[TOKENS][1];
    float y[TOKENS][HIDDEN];
};

static moxie_tensor tensor(void *data, uint8_t code, int32_t ndim, int64_t *shape)
{
    return (moxie_tensor){.data = data,
                          .device = {MOXIE_DEVICE_CPU, 0},
                          .ndim = ndim,
                          .dtype = {code, 32, 1},
                          .shape = shape};
}

static moxie_matrix matrix(void *values, int32_t order, int64_t *shape)
{
    return (moxie_matrix){.struct_size = sizeof(moxie_matrix),
                          .format = MOXIE_FORMAT_F32,
                          .order = order,
                          .values = tensor(values, MOXIE_DTYPE_FLOAT, 3, shape)};
}

static moxie_batch batch_of(struct layer *layer)
{
    static int64_t rows[] = {TOKENS, HIDDEN};
    static int64_t choices[] = {TOKENS, 1};

    return (moxie_batch){
        .struct_size = sizeof(moxie_batch),
        .id_space = MOXIE_IDS_GLOBAL,
        .x = tensor(layer->x, MOXIE_DTYPE_FLOAT, 2, rows),
        .ids = tensor(layer->ids, MOXIE_DTYPE_INT, 2, choices),
        .weights = tensor(layer->router_weights, MOXIE_DTYPE_FLOAT, 2, choices),
        .y = tensor(layer->y, MOXIE_DTYPE_FLOAT, 2, rows),
    };
}

static moxie_host host_of(struct engine *engine)
{
    return (moxie_host){
        .struct_size = sizeof(moxie_host),
        .abi_version = MOXIE_ABI_VERSION,
        .ctx = engine,
        .name = "example 1.0",
        .get_i64 = get_i64,
        .get_f64 = get_f64,
        .get_str = get_str,
        .register_runner = register_runner,
        .register_dispatcher = register_dispatcher,
    };
}

int main(int argc, char **argv)
{
    struct layer layer = {
        .w1 = {{{1, 0}, {0, 1}, {1, 0}, {0, 1}}, {{1, 0}, {0, 1}, {1, 0}, {0, 1}}},
        .w2 = {{{1, 0}, {0, 1}}, {{2, 0}, {0, 2}}},
        .x = {{1, 2}, {1, 2}},
        .ids = {{0}, {1}},
        .router_weights = {{1}, {1}},
    };
    moxie_matrix w1 =
        matrix(layer.w1, MOXIE_ORDER_GATE_UP, (int64_t[]){EXPERTS, 2 * HIDDEN, HIDDEN});
    moxie_matrix w2 = matrix(layer.w2, MOXIE_ORDER_PLAIN, (int64_t[]){EXPERTS, HIDDEN, HIDDEN});
    moxie_weights weights = {.struct_size = sizeof weights, .w1 = &w1, .w2 = &w2};
    moxie_step step = {.struct_size = sizeof step, .tokens = TOKENS};
    moxie_batch batch = batch_of(&layer);
    char text[256] = "usage: example_host PATH/libmoxie.so";
    moxie_error error = {.struct_size = sizeof error, .text_bytes = sizeof text, .text = text};
    struct engine engine = {0};
    moxie_host host = host_of(&engine);
    moxie_library library = {0};
    moxie_instance *instance = NULL;
    moxie_runner *runner = NULL;
    moxie_dispatcher *dispatcher = NULL;
    int failed = argc != 2 || moxie_load(argv[1], host.name, &library, &error) ||
                 library.api->open(&host, &instance, &error) ||
                 engine.runners->create(instance, 0, &weights, &runner, &error) ||
                 engine.dispatchers->create(instance, &dispatcher, &error) ||
                 engine.dispatchers->begin_forward(dispatcher, &step, &error) ||
                 library.api->forward(dispatcher, runner, &batch, &error);

    for (int token = 0; token < TOKENS && !failed; token++)
        printf("token %d: %.4f %.4f\n", token, layer.y[token][0], layer.y[token][1]);
    if (failed) fprintf(stderr, "%s\n", text);
    if (dispatcher) engine.dispatchers->destroy(dispatcher);
    if (runner) engine.runners->destroy(runner);
    if (instance) library.api->close(instance, NULL);
    moxie_unload(&library);
    return failed;
}
