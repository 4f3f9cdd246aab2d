// Ranks as processes that are killed, or stopped and woken later, at instants that a seed decides:
// the survivors name the right rank in time, go on without it with the right rows, and nothing that
// a woken rank writes is read.
//
//     test_kills [--seed N] [--runs N]     run i uses seed N + i

#include "host_tests/crew.h"
#include "host_tests/mortal.h"
#include "host_tests/suite.h"
#include "plugin/plan.h"
#include "plugin/transport.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

struct run {
    struct world world;
    pid_t pids[BOARD_RANKS_MAX];
    int32_t gone[BOARD_RANKS_MAX];
    int64_t stopped_ns[BOARD_RANKS_MAX]; // 0: not stopped now
};

static struct tally *tally;
static uint64_t first_seed = 1;

// ---- the launcher ------------------------------------------------------------------------------

struct subset {
    const struct run *run;
    int32_t lost; // bit f: the rank of fate f is
};

static int is_kept(void *arg, int32_t id)
{
    const struct subset *subset = arg;
    const struct ordeal *ordeal = &subset->run->world.ordeal;

    for (int32_t f = 0; f < ordeal->fates_count; f++) {
        int32_t rank = ordeal->fates[f].rank;
        int64_t experts = subset->run->world.layer.experts;

        if ((subset->lost >> f & 1) && id >= experts_first(experts, ordeal->ranks, rank) &&
            id < experts_first(experts, ordeal->ranks, rank + 1))
            return 0;
    }
    return 1;
}

// In a process of its own: it has threads, and what is forked later must have none.
static void make_wants(struct run *run)
{
    size_t bytes = (size_t)run->world.count * SUBSETS * sizeof *run->world.wants;
    pid_t pid;
    int status;

    run->world.wants = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ck_assert_ptr_ne(run->world.wants, MAP_FAILED);
    pid = fork();
    ck_assert_int_ge(pid, 0);
    if (pid == 0) {
        for (int32_t lost = 0; lost < SUBSETS; lost++) {
            struct subset subset = {.run = run, .lost = lost};

            crew_reference(run->world.ordeal.layer, is_kept, &subset,
                           run->world.wants + lost * run->world.count);
        }
        exit(EXIT_SUCCESS);
    }
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS);
}

static void start(struct run *run)
{
    for (int32_t rank = 0; rank < run->world.ordeal.ranks; rank++) {
        pid_t pid = fork();

        ck_assert_int_ge(pid, 0);
        if (pid == 0) {
            (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
            mortal_live(&run->world, rank);
            exit(EXIT_SUCCESS);
        }
        run->pids[rank] = pid;
    }
}

// No rank but `except` is on its way to another generation, or in the middle of a forward.
static int is_settled(const struct run *run, int32_t except)
{
    for (int32_t rank = 0; rank < run->world.ordeal.ranks; rank++) {
        const struct board_seat *seat = &run->world.board->seats[rank];
        int finished =
            seat->stage == BOARD_FINISHED && seat->applied == board_lost_count(run->world.board);

        if (rank != except && !run->gone[rank] && !finished && seat->stage != BOARD_LEFT) return 0;
    }
    return 1;
}

static int is_wake_due(const struct run *run, const struct fate *fate)
{
    int64_t passed_ms = (clock_ns() - run->stopped_ns[fate->rank]) / 1000000;

    if (fate->wake == WAKE_LATE) return is_settled(run, fate->rank);
    if (fate->wake != WAKE_AMID) return passed_ms >= fate->wake_ms;
    for (int32_t rank = 0; rank < run->world.ordeal.ranks; rank++)
        if (run->world.board->seats[rank].applied > 0) return 1;
    return 0;
}

static void bury(struct run *run, int32_t rank, int status)
{
    const struct fate *fate = ordeal_fate(&run->world.ordeal, rank);
    int killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && fate != NULL &&
                 fate->signal == SIGKILL && run->world.board->seats[rank].struck;

    run->gone[rank] = 1;
    atomic_fetch_or(&run->world.board->dead, 1u << rank);
    if (killed) {
        atomic_fetch_add(&tally->killed, 1);
        return;
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS) return;
    if (atomic_fetch_add(&run->world.board->complaints, 1) == 0)
        (void)snprintf(run->world.board->complaint, sizeof run->world.board->complaint,
                       "rank %d ended with status 0x%x", rank, (unsigned)status);
}

// Looks after one rank. Returns 1 when it is gone.
static int attend(struct run *run, int32_t rank)
{
    const struct fate *fate = ordeal_fate(&run->world.ordeal, rank);
    int status;

    if (run->gone[rank]) return 1;
    if (waitpid(run->pids[rank], &status, WNOHANG | WUNTRACED) == run->pids[rank]) {
        if (!WIFSTOPPED(status)) {
            bury(run, rank, status);
            return 1;
        }
        run->stopped_ns[rank] = clock_ns();
        atomic_fetch_add(&tally->stopped, 1);
    }
    if (run->stopped_ns[rank] != 0 && is_wake_due(run, fate)) {
        run->stopped_ns[rank] = 0;
        (void)kill(run->pids[rank], SIGCONT);
    }
    return 0;
}

static void supervise(struct run *run)
{
    int64_t deadline_ns = clock_ns() + (int64_t)RUN_MS * 1000000;
    char text[512];
    int32_t gone;

    ordeal_text(&run->world.ordeal, text, sizeof text);
    do {
        gone = 0;
        for (int32_t rank = 0; rank < run->world.ordeal.ranks; rank++)
            gone += attend(run, rank);
        if (is_settled(run, -1)) run->world.board->epilogue = 1;
        if (run->world.board->complaints == 0 && clock_ns() < deadline_ns) {
            (void)usleep(LOOK_US);
            continue;
        }
        for (int32_t rank = 0; rank < run->world.ordeal.ranks; rank++)
            if (!run->gone[rank]) (void)kill(run->pids[rank], SIGKILL);
        ck_abort_msg("%s\n    %s", text,
                     run->world.board->complaint[0] != '\0' ? run->world.board->complaint
                                                            : "it hangs");
    } while (gone < run->world.ordeal.ranks);
}

static void check_run(struct run *run)
{
    const struct fate *fate = &run->world.ordeal.fates[0];
    int32_t struck = 0;
    char text[512];

    ordeal_text(&run->world.ordeal, text, sizeof text);
    for (int32_t i = 0; i < run->world.board->names_count; i++)
        ck_assert_msg(!mortal_is_left_behind(run->world.board->names[i]),
                      "%s\n    %s was left behind", text, run->world.board->names[i]);
    if (ordeal_in_create(&run->world.ordeal)) atomic_fetch_add(&tally->in_create, 1);
    for (int32_t rank = 0; rank < run->world.ordeal.ranks; rank++)
        struck += run->world.board->seats[rank].struck;
    ck_assert_msg(struck > 0, "%s\n    nothing happened", text);
    if (fate->wake == WAKE_HARMLESS)
        for (int32_t rank = 0; run->world.ordeal.fates_count == 1 && rank < run->world.ordeal.ranks;
             rank++)
            ck_assert_msg(run->world.board->seats[rank].failures == 0, "%s\n    rank %d failed",
                          text, rank);
    if (fate->wake == WAKE_HARMLESS) atomic_fetch_add(&tally->harmless, 1);
    for (int32_t rank = 0; rank < run->world.ordeal.ranks; rank++)
        if (run->world.board->seats[rank].stage == BOARD_LEFT)
            atomic_fetch_add(&tally->left_out, 1);
    atomic_fetch_add(&tally->runs, 1);
}

START_TEST(survivors_go_on)
{
    struct run run = {.world.tally = tally};

    ordeal_from(first_seed + (uint64_t)_i, &run.world.ordeal);
    run.world.board = board_create(run.world.ordeal.ranks, run.world.ordeal.gather_timeout_ms);
    layer_open(&run.world.layer, run.world.ordeal.layer);
    run.world.count = run.world.layer.tokens * run.world.layer.hidden;
    make_wants(&run);
    start(&run);
    supervise(&run);
    check_run(&run);
    (void)munmap(run.world.wants, (size_t)run.world.count * SUBSETS * sizeof *run.world.wants);
    layer_close(&run.world.layer);
    board_destroy(run.world.board);
}
END_TEST

static void print_tally(int64_t took_ns)
{
    printf("%lld runs from seed %llu in %.1f s: %lld ranks killed, %lld stopped (%lld woken in "
           "time, %lld left out), %lld runs struck in create, %lld verdicts, the slowest %lld ms "
           "past timeout_ms\n",
           (long long)tally->runs, (unsigned long long)first_seed, (double)took_ns / 1e9,
           (long long)tally->killed, (long long)tally->stopped, (long long)tally->harmless,
           (long long)tally->left_out, (long long)tally->in_create, (long long)tally->verdicts,
           (long long)tally->slowest_ms);
}

// test_kills [--seed N] [--runs N]
int main(int argc, char **argv)
{
    Suite *suite = suite_create("kills");
    TCase *tests = tcase_create("kills");
    SRunner *runner;
    int64_t began_ns = clock_ns();
    int failed, runs = 50;

    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--seed") == 0) first_seed = strtoull(argv[i + 1], NULL, 10);
        if (strcmp(argv[i], "--runs") == 0) runs = (int)strtol(argv[i + 1], NULL, 10);
    }
    tally = mmap(NULL, sizeof *tally, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (tally == MAP_FAILED) return EXIT_FAILURE;
    mortal_init();
    tcase_set_timeout(tests, 2e-3 * RUN_MS);
    tcase_add_loop_test(tests, survivors_go_on, 0, runs);
    suite_add_tcase(suite, tests);
    runner = srunner_create(suite);
    srunner_run_all(runner, CK_ENV);
    failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    print_tally(clock_ns() - began_ns);
    return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
