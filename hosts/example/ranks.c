// A host of four ranks, a process each. Every rank has two of eight experts and tokens of its own,
// the first has none. After one forward the last rank dies, and the others go on without it.
//
//   example_ranks PATH/libmoxie.so
//
// Expert e is (e + 1) * silu(x) * x of every number x of a row.

#include <moxie/abi.h>
#include <moxie/loader.h>

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RANKS      4
#define HIDDEN     2
#define EXPERTS    8
#define OWN        (EXPERTS / RANKS)
#define TIMEOUT_MS 5000
#define WAIT_S     20
#define PART_BYTES 65536
#define SAID_BYTES 2048

static const int64_t rank_tokens[RANKS] = {0, 1, 2, 3};
static const int32_t chosen[RANKS][RANKS - 1] = {{0}, {7}, {0, 7}, {2, 4, 6}};

// Memory that all ranks share: how this engine's processes reach each other, and what they say.
struct board {
    atomic_int arrived; // of all calls of all_gather so far
    unsigned char parts[2][RANKS][PART_BYTES];
    char said[RANKS][SAID_BYTES];
};

struct rank {
    int index, gathered; // calls of all_gather so far
    struct board *board;
    const moxie_runner_api *runners;
    const moxie_dispatcher_api *dispatchers;
    moxie_library library;
    moxie_instance *instance;
    moxie_runner *runner;
    moxie_dispatcher *dispatcher;
    float w1[OWN][2 * HIDDEN][HIDDEN]; // [experts, gate rows then up rows, hidden]
    float w2[OWN][HIDDEN][HIDDEN];     // [experts, hidden, intermediate]
    float x[RANKS][HIDDEN], y[RANKS][HIDDEN], router_weights[RANKS];
    int32_t ids[RANKS];
    moxie_error error;
    char text[256];
};

static void say(struct rank *rank, const char *format, ...)
{
    char *said = rank->board->said[rank->index];
    size_t length = strlen(said);
    va_list arguments;

    va_start(arguments, format);
    (void)vsnprintf(said + length, SAID_BYTES - length, format, arguments);
    va_end(arguments);
}

// ---- The callbacks -----------------------------------------------------------------------------

// The same on all ranks, but for ep_rank; create compares them.
static int32_t get_i64(void *ctx, const char *key, int64_t *value)
{
    const struct rank *rank = ctx;
    const struct {
        const char *key;
        int64_t value;
    } settings[] = {
        {"hidden_size", HIDDEN},
        {"intermediate_size", HIDDEN},
        {"num_experts", EXPERTS},
        {"top_k", 1},
        {"tp_size", RANKS},
        {"dp_size", RANKS}, // every rank has tokens of its own
        {"ep_size", RANKS},
        {"ep_rank", rank->index},
        {"forward_tokens_max", RANKS},
        {"timeout_ms", TIMEOUT_MS},
        {"cpu_threads", 1},
    };

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
    const char *value = NULL;

    (void)ctx;
    if (strstr(key, "_format") != NULL && strcmp(key, "activation_format") != 0) value = "f32";
    if (strcmp(key, "dispatch_format") == 0) value = "input";
    if (strcmp(key, "dispatcher") == 0) value = "alltoall";
    if (value == NULL) return MOXIE_CONFIG_ABSENT;
    *length = strlen(value);
    if (capacity > 0) (void)snprintf(buffer, capacity, "%s", value);
    return MOXIE_CONFIG_FOUND;
}

// By a clock that nobody sets: a deadline of the time of day may come at once, or never.
static time_t now_s(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec;
}

// An engine has this already: torch.distributed, MPI, sockets. Of two calls one after the other
// each has parts of its own, since nobody is two calls ahead of anybody.
static int32_t all_gather(void *ctx, const void *send, void *recv, uint64_t bytes)
{
    struct rank *rank = ctx;
    struct board *board = rank->board;
    unsigned char(*parts)[PART_BYTES] = board->parts[rank->gathered++ % 2];
    const time_t deadline = now_s() + WAIT_S;
    const struct timespec pause = {0, 1000000};

    if (bytes > PART_BYTES) return 1;
    memcpy(parts[rank->index], send, bytes);
    atomic_fetch_add(&board->arrived, 1);
    while (atomic_load(&board->arrived) < RANKS * rank->gathered) {
        if (now_s() > deadline) return 1; // whoever is missing will not come
        (void)nanosleep(&pause, NULL);
    }
    for (int i = 0; i < RANKS; i++)
        memcpy((unsigned char *)recv + (size_t)i * bytes, parts[i], bytes);
    return 0;
}

static int32_t barrier(void *ctx)
{
    char nothing = 0, all[RANKS];

    return all_gather(ctx, &nothing, all, 1);
}

static int32_t register_runner(void *ctx, const moxie_runner_info *runner)
{
    struct rank *rank = ctx;

    if (strcmp(runner->device, "cpu") == 0) rank->runners = runner->api;
    return 0;
}

static int32_t register_dispatcher(void *ctx, const moxie_dispatcher_info *dispatcher)
{
    struct rank *rank = ctx;

    if (strcmp(dispatcher->name, "alltoall") == 0 && strcmp(dispatcher->device, "cpu") == 0)
        rank->dispatchers = dispatcher->api;
    return 0;
}

// ---- A rank ------------------------------------------------------------------------------------

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

// Gate and up are the row itself, and down is it times the expert's number.
static void fill(struct rank *rank)
{
    for (int own = 0; own < OWN; own++) {
        const int expert = rank->index * OWN + own;

        for (int i = 0; i < HIDDEN; i++) {
            rank->w1[own][i][i] = rank->w1[own][HIDDEN + i][i] = 1;
            rank->w2[own][i][i] = (float)expert + 1;
        }
    }
    for (int64_t token = 0; token < rank_tokens[rank->index]; token++) {
        rank->x[token][0] = 1;
        rank->x[token][1] = 2;
        rank->router_weights[token] = 1;
        rank->ids[token] = chosen[rank->index][token];
    }
}

static int start(struct rank *rank, const char *path)
{
    const moxie_host host = {.struct_size = sizeof host,
                             .abi_version = MOXIE_ABI_VERSION,
                             .ctx = rank,
                             .name = "example ranks 1.0",
                             .get_i64 = get_i64,
                             .get_f64 = get_f64,
                             .get_str = get_str,
                             .all_gather = all_gather,
                             .barrier = barrier,
                             .register_runner = register_runner,
                             .register_dispatcher = register_dispatcher};
    moxie_matrix w1 = matrix(rank->w1, MOXIE_ORDER_GATE_UP, (int64_t[]){OWN, 2 * HIDDEN, HIDDEN});
    moxie_matrix w2 = matrix(rank->w2, MOXIE_ORDER_PLAIN, (int64_t[]){OWN, HIDDEN, HIDDEN});
    const moxie_weights weights = {.struct_size = sizeof weights, .w1 = &w1, .w2 = &w2};
    moxie_error *error = &rank->error;

    fill(rank);
    return moxie_load(path, host.name, &rank->library, error) ||
           rank->library.api->open(&host, &rank->instance, error) ||
           rank->runners->create(rank->instance, 0, &weights, &rank->runner, error) ||
           rank->dispatchers->create(rank->instance, &rank->dispatcher, error);
}

// All ranks call it equally often, those without tokens too: others may want their experts.
static int32_t forward(struct rank *rank)
{
    int64_t tokens = rank_tokens[rank->index];
    int64_t rows[] = {tokens, HIDDEN}, choices[] = {tokens, 1};
    const moxie_step step = {
        .struct_size = sizeof step, .tokens = tokens, .rank_tokens = rank_tokens};
    const moxie_batch batch = {
        .struct_size = sizeof batch,
        .id_space = MOXIE_IDS_GLOBAL,
        .x = tensor(rank->x, MOXIE_DTYPE_FLOAT, 2, rows),
        .ids = tensor(rank->ids, MOXIE_DTYPE_INT, 2, choices),
        .weights = tensor(rank->router_weights, MOXIE_DTYPE_FLOAT, 2, choices),
        .y = tensor(rank->y, MOXIE_DTYPE_FLOAT, 2, rows),
    };
    int32_t answer = rank->dispatchers->begin_forward(rank->dispatcher, &step, &rank->error);

    if (answer == MOXIE_OK)
        answer = rank->library.api->forward(rank->dispatcher, rank->runner, &batch, &rank->error);
    if (answer != MOXIE_OK) return answer;
    say(rank, "rank %d:", rank->index);
    for (int64_t token = 0; token < tokens; token++)
        say(rank, " expert %d %.4f %.4f%s", rank->ids[token], rank->y[token][0], rank->y[token][1],
            token + 1 < tokens ? "," : "");
    say(rank, "%s\n", tokens == 0 ? " no tokens" : "");
    return MOXIE_OK;
}

// A failure names the rank to blame. Every survivor leaves out the same one.
static int go_on_without(struct rank *rank, int32_t answer)
{
    uint8_t active[RANKS];

    if (answer != MOXIE_E_PEER) return 1;
    say(rank, "rank %d: rank %d is gone\n", rank->index, rank->error.rank);
    for (int i = 0; i < RANKS; i++)
        active[i] = i != rank->error.rank;
    return rank->dispatchers->set_active_ranks(rank->dispatcher, active, &rank->error) ||
           forward(rank);
}

static int run(struct rank *rank, const char *path)
{
    int failed = start(rank, path) || forward(rank);

    if (!failed && rank->index == RANKS - 1) _exit(EXIT_SUCCESS); // without a word to the others
    failed = failed || go_on_without(rank, forward(rank));
    if (failed) say(rank, "rank %d: %s\n", rank->index, rank->text);
    if (rank->dispatcher) rank->dispatchers->destroy(rank->dispatcher);
    if (rank->runner) rank->runners->destroy(rank->runner);
    if (rank->instance) rank->library.api->close(rank->instance, NULL);
    moxie_unload(&rank->library);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

int main(int argc, char **argv)
{
    struct board *board =
        mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int failed = 0, status;

    if (argc != 2 || board == MAP_FAILED) {
        fprintf(stderr, "usage: example_ranks PATH/libmoxie.so\n");
        return EXIT_FAILURE;
    }
    for (int i = 0; i < RANKS; i++) {
        struct rank rank = {.index = i, .board = board};

        rank.error = (moxie_error){
            .struct_size = sizeof rank.error, .text_bytes = sizeof rank.text, .text = rank.text};
        switch (fork()) {
        case -1:
            return EXIT_FAILURE; // those that run wait for this one no longer than WAIT_S
        case 0:
            _exit(run(&rank, argv[1]));
        }
    }
    while (wait(&status) > 0)
        failed |= status;
    for (int i = 0; i < RANKS; i++)
        (void)fputs(board->said[i], stdout);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
