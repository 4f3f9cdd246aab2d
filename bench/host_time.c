// What a forward on a GPU costs the library's own code on the host: everything but what the CUDA
// runtime and the driver do, for which host_tests/fake stands in. Needs no GPU. One layer, one
// rank.
//
//   host_time TOKENS bf16|fp8 [CALLS]
//
// One JSON object: the median over 25 runs of CALLS forwards (default 20000), nanoseconds of one.

#include "abi.h"
#include "bench/measure.h"

#include <string.h>

#define HIDDEN       2048
#define INTERMEDIATE 768
#define EXPERTS      128
#define TOP_K        8
#define TOKENS_MAX   4096
#define RUNS         25

struct engine {
    const char *weight_format;
    const moxie_runner_api *runners;
    const moxie_dispatcher_api *dispatchers;
};

static int32_t get_i64(void *ctx, const char *key, int64_t *value)
{
    static const struct {
        const char *key;
        int64_t value;
    } settings[] = {
        {"hidden_size", HIDDEN}, {"intermediate_size", INTERMEDIATE}, {"num_experts", EXPERTS},
        {"top_k", TOP_K},        {"forward_tokens_max", TOKENS_MAX},
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
    (void)ctx, (void)key, (void)value;
    return MOXIE_CONFIG_ABSENT;
}

static int32_t get_str(void *ctx, const char *key, char *buffer, uint64_t capacity,
                       uint64_t *length)
{
    const struct engine *engine = ctx;
    const char *value = NULL;

    if (strcmp(key, "device") == 0) value = "sm_90";
    if (strcmp(key, "weight_format") == 0) value = engine->weight_format;
    if (value == NULL) return MOXIE_CONFIG_ABSENT;
    *length = strlen(value);
    if (capacity > 0) (void)snprintf(buffer, capacity, "%s", value);
    return MOXIE_CONFIG_FOUND;
}

static int32_t register_runner(void *ctx, const moxie_runner_info *runner)
{
    struct engine *engine = ctx;

    if (strcmp(runner->device, "sm_90") == 0) engine->runners = runner->api;
    return 0;
}

static int32_t register_dispatcher(void *ctx, const moxie_dispatcher_info *dispatcher)
{
    struct engine *engine = ctx;

    if (strcmp(dispatcher->name, "local") == 0 && strcmp(dispatcher->device, "sm_90") == 0)
        engine->dispatchers = dispatcher->api;
    return 0;
}

// On the GPU that is not there: nobody reads what lies at the address.
static moxie_tensor tensor(void *data, uint8_t code, uint8_t bits, int32_t ndim, int64_t *shape)
{
    return (moxie_tensor){.data = data,
                          .device = {MOXIE_DEVICE_CUDA, 0},
                          .ndim = ndim,
                          .dtype = {code, bits, 1},
                          .shape = shape};
}

static moxie_matrix matrix(int is_fp8, int32_t order, int64_t shape[3], int64_t scales_shape[3])
{
    const int64_t bytes = shape[0] * shape[1] * shape[2] * (is_fp8 ? 1 : 2);
    moxie_matrix made = {.struct_size = sizeof made, .order = order};

    made.format = is_fp8 ? MOXIE_FORMAT_FP8_BLOCK128 : MOXIE_FORMAT_BF16;
    made.values = is_fp8 ? tensor(allocate(bytes), MOXIE_DTYPE_FLOAT8_E4M3FN, 8, 3, shape)
                         : tensor(allocate(bytes), MOXIE_DTYPE_BFLOAT, 16, 3, shape);
    if (!is_fp8) return made;
    for (int32_t i = 0; i < 3; i++)
        scales_shape[i] = i == 0 ? shape[0] : (shape[i] + 127) / 128;
    made.scales = tensor(allocate(scales_shape[0] * scales_shape[1] * scales_shape[2] * 4),
                         MOXIE_DTYPE_FLOAT, 32, 3, scales_shape);
    return made;
}

// 0, or the code of what failed, which is in the error.
static int32_t measure(struct engine *engine, const moxie_batch *batch, int64_t tokens, long calls,
                       moxie_error *error)
{
    const moxie_request request = {.struct_size = sizeof request,
                                   .abi_min = MOXIE_ABI_VERSION,
                                   .abi_max = MOXIE_ABI_VERSION,
                                   .host_build = "host_time"};
    const moxie_host host = {.struct_size = sizeof host,
                             .abi_version = MOXIE_ABI_VERSION,
                             .ctx = engine,
                             .name = "host_time",
                             .get_i64 = get_i64,
                             .get_f64 = get_f64,
                             .get_str = get_str,
                             .register_runner = register_runner,
                             .register_dispatcher = register_dispatcher};
    const moxie_step step = {.struct_size = sizeof step, .tokens = tokens};
    const int is_fp8 = strcmp(engine->weight_format, "bf16") != 0;
    int64_t shapes[4][3] = {{EXPERTS, 2 * INTERMEDIATE, HIDDEN}, {EXPERTS, HIDDEN, INTERMEDIATE}};
    const moxie_matrix w1 = matrix(is_fp8, MOXIE_ORDER_GATE_UP, shapes[0], shapes[2]);
    const moxie_matrix w2 = matrix(is_fp8, MOXIE_ORDER_PLAIN, shapes[1], shapes[3]);
    const moxie_weights weights = {.struct_size = sizeof weights, .w1 = &w1, .w2 = &w2};
    const moxie_api *api = NULL;
    moxie_instance *instance = NULL;
    moxie_runner *runner = NULL;
    moxie_dispatcher *dispatcher = NULL;
    int64_t times[RUNS];
    int32_t st = moxie_get_api_v1(&request, &api, error);

    if (st == MOXIE_OK) st = api->open(&host, &instance, error);
    if (st == MOXIE_OK) st = engine->runners->create(instance, 0, &weights, &runner, error);
    if (st == MOXIE_OK) st = engine->dispatchers->create(instance, &dispatcher, error);
    if (st == MOXIE_OK) st = engine->dispatchers->begin_forward(dispatcher, &step, error);
    for (int32_t run = 0; run < RUNS; run++) {
        const int64_t start = now_ns();

        for (long call = 0; call < calls && st == MOXIE_OK; call++)
            st = api->forward(dispatcher, runner, batch, error);
        times[run] = (now_ns() - start) / calls;
    }
    if (st != MOXIE_OK) return st;
    sort_times(times, RUNS);
    (void)printf("{\"tokens\": %lld, \"weights\": \"%s\", \"least_ns\": %lld, \"ns\": %lld}\n",
                 (long long)tokens, engine->weight_format, (long long)times[0],
                 (long long)times[RUNS / 2]);
    return st;
}

int main(int argc, char **argv)
{
    const long long tokens = argc > 2 ? strtoll(argv[1], NULL, 10) : -1;
    const long calls = argc > 3 ? strtol(argv[3], NULL, 10) : 20000;
    struct engine engine = {.weight_format = "bf16"};
    int64_t rows[] = {tokens, HIDDEN}, choices[] = {tokens, TOP_K};
    char text[256] = "";
    moxie_error error = {.struct_size = sizeof error, .text_bytes = sizeof text, .text = text};
    moxie_batch batch = {.struct_size = sizeof batch, .id_space = MOXIE_IDS_GLOBAL};

    if (tokens < 1 || tokens > TOKENS_MAX || calls < 1 ||
        (strcmp(argv[2], "bf16") != 0 && strcmp(argv[2], "fp8") != 0)) {
        (void)fprintf(stderr, "usage: host_time TOKENS bf16|fp8 [CALLS]; 1 to %d tokens\n",
                      TOKENS_MAX);
        return 1;
    }
    if (strcmp(argv[2], "fp8") == 0) engine.weight_format = "fp8_block128";
    batch.x = tensor(allocate(tokens * HIDDEN * 2), MOXIE_DTYPE_BFLOAT, 16, 2, rows);
    batch.ids = tensor(allocate(tokens * TOP_K * 4), MOXIE_DTYPE_INT, 32, 2, choices);
    batch.weights = tensor(allocate(tokens * TOP_K * 4), MOXIE_DTYPE_FLOAT, 32, 2, choices);
    batch.y = tensor(allocate(tokens * HIDDEN * 2), MOXIE_DTYPE_BFLOAT, 16, 2, rows);
    if (measure(&engine, &batch, tokens, calls, &error) == MOXIE_OK) return 0;
    (void)fprintf(stderr, "host_time: %s\n", text);
    return 1;
}
