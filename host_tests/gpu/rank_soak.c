// A soak of the dispatchers of the GPU: ranks as processes, rank r on device r % count, run what a
// seed decides and check every row; in some runs a rank is killed, and the others must name it in
// time and go on without it.
//
//     rank_soak [--seconds S | --runs N] [--ranks R] [--seed X] [--kills K] [--timeout-ms T]
//
// Run i has the seed X + i and 2 to R ranks; in K of the runs ranks die, with T for timeout_ms.

#include "host_tests/gpu/soak.h"

#include "host_tests/gpu/gpu_layer.h"
#include "plugin/transport.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RUN_MS            60000 // and as many times timeout_ms as a run may see:
#define RUN_TIMEOUTS      24
#define PATIENT_MS        20000 // timeout_ms where nobody dies
#define GATHER_TIMEOUT_MS 20000
#define PROGRESS_NS       INT64_C(10000000000)

static struct {
    int64_t seconds, runs, kills, ranks, timeout_ms;
    uint64_t seed;
} options = {.runs = 20, .ranks = 4, .timeout_ms = 1500};

struct launch {
    struct soak_world world;
    pid_t pids[SOAK_RANKS_MAX];
    int32_t gone[SOAK_RANKS_MAX];
    int32_t failed;
};

static void *shared(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (memory == MAP_FAILED) {
        (void)fprintf(stderr, "rank_soak: no memory to share: %s\n", strerror(errno));
        exit(EXIT_FAILURE);
    }
    return memory;
}

// ---- the ranks of a run ------------------------------------------------------------------------

static void start(struct launch *launch)
{
    for (int32_t rank = 0; rank < launch->world.run.ranks; rank++) {
        pid_t parent = getpid(), pid = fork();

        if (pid == 0) {
            (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() != parent) _exit(EXIT_FAILURE);
            soak_live(&launch->world, rank);
            exit(EXIT_SUCCESS);
        }
        if (pid < 0) {
            launch->failed = 1;
            (void)snprintf(launch->world.board->complaint, sizeof launch->world.board->complaint,
                           "no process for rank %d: %s", rank, strerror(errno));
            launch->gone[rank] = 1;
        }
        launch->pids[rank] = pid;
    }
}

static void bury(struct launch *launch, int32_t rank, int status)
{
    struct board *board = launch->world.board;

    launch->gone[rank] = 1;
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && board->seats[rank].struck)
        atomic_fetch_add(&launch->world.tally->killed, 1);
    else if (!WIFEXITED(status) || WEXITSTATUS(status) != EXIT_SUCCESS)
        launch->failed = 1;
    if (launch->failed && atomic_fetch_add(&board->complaints, 1) == 0)
        (void)snprintf(board->complaint, sizeof board->complaint, "rank %d ended with status 0x%x",
                       rank, (unsigned)status);
    // Last: what a rank did before it ended is there when others learn that it has.
    atomic_fetch_or(&board->dead, 1u << rank);
}

// No rank is on its way to another generation, or in the middle of a forward.
static int is_settled(const struct launch *launch)
{
    struct board *board = launch->world.board;

    for (int32_t rank = 0; rank < launch->world.run.ranks; rank++) {
        const struct board_seat *seat = &board->seats[rank];

        if (!launch->gone[rank] &&
            (seat->stage != BOARD_FINISHED || seat->applied != board_lost_count(board)))
            return 0;
    }
    return 1;
}

static int32_t attend(struct launch *launch)
{
    int32_t living = 0;

    for (int32_t rank = 0; rank < launch->world.run.ranks; rank++) {
        int status;

        if (!launch->gone[rank] && waitpid(launch->pids[rank], &status, WNOHANG) != 0)
            bury(launch, rank, status);
        living += !launch->gone[rank];
    }
    return living;
}

static void kill_all(struct launch *launch)
{
    for (int32_t rank = 0; rank < launch->world.run.ranks; rank++) {
        int status;

        if (launch->gone[rank]) continue;
        (void)kill(launch->pids[rank], SIGKILL);
        (void)waitpid(launch->pids[rank], &status, 0);
    }
}

static void supervise(struct launch *launch)
{
    struct board *board = launch->world.board;

    while (attend(launch) > 0 && !launch->failed && board->complaints == 0) {
        if (is_settled(launch)) board->epilogue = 1;
        if (clock_ns() > launch->world.deadline_ns) {
            launch->failed = 1;
            (void)snprintf(board->complaint, sizeof board->complaint, "it hangs");
        }
        (void)usleep(SOAK_LOOK_US);
    }
    if (board->complaints != 0) launch->failed = 1;
    kill_all(launch);
}

// ---- a run -------------------------------------------------------------------------------------

static int32_t open_files(void)
{
    DIR *folder = opendir("/proc/self/fd");
    int32_t count = 0;

    while (folder != NULL && readdir(folder) != NULL)
        count++;
    if (folder != NULL) (void)closedir(folder);
    return count;
}

static void check_rest(struct launch *launch, int32_t files)
{
    char *complaint = launch->world.board->complaint;
    size_t capacity = sizeof launch->world.board->complaint;
    int32_t struck = 0;

    if (launch->failed) return;
    for (int32_t rank = 0; rank < launch->world.run.ranks; rank++)
        struck += launch->world.board->seats[rank].struck;
    launch->failed = 1;
    if (waitpid(-1, NULL, WNOHANG) != -1 || errno != ECHILD)
        (void)snprintf(complaint, capacity, "a process was left behind");
    else if (open_files() != files)
        (void)snprintf(complaint, capacity, "%d descriptors were left open", open_files() - files);
    else if (struck == 0 && launch->world.run.fates_count > 0)
        (void)snprintf(complaint, capacity, "nobody was killed");
    else
        launch->failed = 0;
}

static void report(const struct launch *launch)
{
    const struct soak_run *run = &launch->world.run;
    char text[768];

    soak_run_text(run, text, sizeof text);
    (void)fprintf(stderr, "FAILED: %s\n    %s\n", launch->world.board->complaint, text);
    for (int32_t rank = 0; rank < run->ranks; rank++) {
        const struct soak_trace *trace = &launch->world.traces[rank];

        (void)fprintf(stderr, "    rank %d%s: %s (generation %d, forward %d)\n", rank,
                      launch->world.board->seats[rank].struck ? ", killed" : "",
                      trace->step != NULL ? trace->step : "not begun", trace->generation,
                      trace->forward);
    }
    (void)fprintf(stderr,
                  "    again: rank_soak --runs 1 --seed %llu --ranks %lld --kills %d "
                  "--timeout-ms %lld\n",
                  (unsigned long long)run->seed, (long long)options.ranks, run->fates_count > 0,
                  (long long)options.timeout_ms);
}

// 1: all was right.
static int one_run(uint64_t seed, int killed, struct soak_tally *tally)
{
    struct launch launch = {.world.tally = tally};
    struct soak_world *world = &launch.world;
    size_t trace_bytes = SOAK_RANKS_MAX * sizeof *world->traces;
    int32_t files = open_files(), timeout_ms = killed ? (int32_t)options.timeout_ms : PATIENT_MS;

    soak_run_draw(seed, (int32_t)options.ranks, killed, timeout_ms, &world->run);
    world->deadline_ns =
        clock_ns() + (RUN_MS + (killed ? RUN_TIMEOUTS * options.timeout_ms : 0)) * 1000000;
    world->board = board_create(world->run.ranks, GATHER_TIMEOUT_MS);
    world->traces = shared(trace_bytes);
    layer_open(&world->layer, world->run.layer);
    start(&launch);
    supervise(&launch);
    check_rest(&launch, files);
    atomic_fetch_add(&tally->runs, 1);
    for (int32_t i = 0; i < world->run.fates_count; i++)
        if (soak_in_create(&world->run.fates[i])) atomic_fetch_add(&tally->in_create, 1);
    if (launch.failed) report(&launch);
    layer_close(&world->layer);
    (void)munmap(world->traces, trace_bytes);
    board_destroy(world->board);
    return !launch.failed;
}

// ---- all of them -------------------------------------------------------------------------------

// The kills are spread over the runs; where nobody knows how many there will be, every other one.
static int is_killed(int64_t run)
{
    if (options.seconds > 0) return run % 2 == 0 && run / 2 < options.kills;
    return (run + 1) * options.kills / options.runs != run * options.kills / options.runs;
}

static void print_tally(const struct soak_tally *tally, int64_t took_ns)
{
    (void)fprintf(
        stderr,
        "%lld runs from seed %llu in %.0f s: %lld forwards of a rank checked, %lld graphs "
        "replayed %lld times, %lld ranks killed (%lld fates in create), %lld verdicts, "
        "the slowest after %lld ms\n",
        (long long)tally->runs, (unsigned long long)options.seed, (double)took_ns / 1e9,
        (long long)tally->forwards, (long long)tally->graphs, (long long)tally->replays,
        (long long)tally->killed, (long long)tally->in_create, (long long)tally->verdicts,
        (long long)tally->slowest_ms);
}

static int soak(void)
{
    struct soak_tally *tally = shared(sizeof *tally);
    int64_t began_ns = clock_ns(), told_ns = began_ns;
    int fine = 1;

    (void)fprintf(stderr, "rank_soak --seed %llu\n", (unsigned long long)options.seed);
    for (int64_t run = 0; fine; run++) {
        int64_t took_ns = clock_ns() - began_ns;

        if (options.seconds > 0 ? took_ns >= options.seconds * 1000000000 : run >= options.runs)
            break;
        fine = one_run(options.seed + (uint64_t)run, is_killed(run), tally);
        if (clock_ns() - told_ns < PROGRESS_NS) continue;
        told_ns = clock_ns();
        print_tally(tally, told_ns - began_ns);
    }
    print_tally(tally, clock_ns() - began_ns);
    (void)munmap(tally, sizeof *tally);
    return fine;
}

// A test of its own, without which nothing that the ranks share with suites can fail in words.
START_TEST(every_run_is_right)
{
    ck_assert(soak());
}
END_TEST

static int64_t *option_of(const char *word)
{
    if (strcmp(word, "--seconds") == 0) return &options.seconds;
    if (strcmp(word, "--runs") == 0) return &options.runs;
    if (strcmp(word, "--ranks") == 0) return &options.ranks;
    if (strcmp(word, "--kills") == 0) return &options.kills;
    if (strcmp(word, "--timeout-ms") == 0) return &options.timeout_ms;
    return NULL;
}

static int read_options(int argc, char **argv)
{
    options.seed = (uint64_t)time(NULL) % 1000000;
    for (int i = 1; i < argc; i += 2) {
        int64_t *option = option_of(argv[i]);
        char *end = NULL;
        long long value = i + 1 < argc ? strtoll(argv[i + 1], &end, 10) : -1;

        if (value < 0 || end == argv[i + 1] || *end != '\0') return 0;
        if (strcmp(argv[i], "--seed") == 0)
            options.seed = (uint64_t)value;
        else if (option != NULL)
            *option = value;
        else
            return 0;
    }
    return options.ranks >= 2 && options.ranks <= SOAK_RANKS_MAX && options.timeout_ms > 0 &&
           (options.seconds > 0 || options.runs > 0);
}

static void add(TCase *tests)
{
    // Each run has a deadline of its own.
    tcase_set_timeout(tests, 0);
    tcase_add_test(tests, every_run_is_right);
}

int main(int argc, char **argv)
{
    if (!read_options(argc, argv)) {
        (void)fprintf(stderr,
                      "usage: rank_soak [--seconds S | --runs N] [--ranks 2..%d] [--seed X] "
                      "[--kills K] [--timeout-ms T]\n",
                      SOAK_RANKS_MAX);
        return EXIT_FAILURE;
    }
    return gpu_suite("rank_soak", 1, add);
}
