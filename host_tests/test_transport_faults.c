// plugin/transport_shm.c: whatever fails while windows open, on whichever rank, all ranks fail
// alike and nothing is left.

#include "host_tests/traces.h"

#include <signal.h>
#include <stddef.h>
#include <sys/resource.h>

#define WINDOW ((uint64_t)TRANSPORT_CONTROL_BYTES(RANKS) + 8192)

static const struct transport_ops *const shm = &transport_shm;

static void attempt(const struct rank *rank, struct outcome *outcome, uint64_t bytes)
{
    struct trial_windows opened;

    trial_open(shm, rank, (const uint64_t[]){WINDOW, bytes}, outcome, &opened);
    if (outcome->code == MOXIE_OK)
        for (int32_t peer = 0; peer < rank->bootstrap.ranks; peer++)
            shm->signal(opened.transport, opened.windows[1], peer, WORD_DISPATCH, 1);
    trial_close(shm, &opened);
}

static void take_part(struct rank *rank)
{
    struct trial *trial = rank->arg;
    int32_t mine = rank->bootstrap.rank;

    if (mine == trial->victim) calls_left = trial->call;
    attempt(rank, &trial->outcomes[mine], trial->bytes[mine]);
    trial->outcomes[mine].failed = calls_end();
}

static void nothing_is_left(int32_t files)
{
    ck_assert_int_eq(names_left(), 0);
    ck_assert_int_eq(windows_mapped(), 0);
    ck_assert_int_eq(counts_mapped(), 0);
    ck_assert_int_eq(files_open(), files);
}

START_TEST(every_failing_system_call_fails_all_ranks)
{
    struct trial *trial = trial_create(WINDOW);
    int32_t files = files_open();

    traces_start();
    trial->victim = _i;
    for (trial->call = 0; trial->call < CALLS_MAX; trial->call++) {
        trial_run(trial, take_part);
        nothing_is_left(files);
        if (!trial->outcomes[_i].failed) break;
        ck_assert_int_ne(trial->outcomes[_i].code, MOXIE_OK);
        // For want of descriptors, whatever else the call may fail for.
        ck_assert_msg(strstr(trial->outcomes[_i].text, "mount") == NULL &&
                          strstr(trial->outcomes[_i].text, "one user") == NULL,
                      "%s", trial->outcomes[_i].text);
        trial_alike(trial, trial->outcomes[_i].code, trial->outcomes[_i].rank);
    }
    ck_assert_int_gt(trial->call, 20);
    ck_assert_int_lt(trial->call, CALLS_MAX);
    ck_assert_int_eq(trial->outcomes[0].code, MOXIE_OK);
}
END_TEST

START_TEST(descriptors_that_ran_out_are_told)
{
    struct trial *trial = trial_create(WINDOW);
    struct rlimit limit, none;

    traces_start();
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    none = limit;
    none.rlim_cur = 0;
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &none), 0);
    trial_run(trial, take_part);
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    trial_alike(trial, MOXIE_E_UNAVAILABLE, 0);
    ck_assert_msg(strstr(trial->outcomes[0].text, "ulimit -n") != NULL, "%s",
                  trial->outcomes[0].text);
}
END_TEST

START_TEST(remedies_are_of_what_failed)
{
    ck_assert_ptr_nonnull(strstr(transport_remedy(EMFILE, "mount /proc"), "ulimit -n"));
    ck_assert_ptr_nonnull(strstr(transport_remedy(ENFILE, "mount /proc"), "fs.file-max"));
    ck_assert_str_eq(transport_remedy(ENOENT, "mount /proc"), "mount /proc");
}
END_TEST

// Before: nobody hears of the rank any more. After: all the others do, and may well go on.
START_TEST(every_failing_all_gather_leaves_nothing)
{
    struct trial *trial = trial_create(WINDOW);
    int32_t files = files_open();
    int32_t call, codes;
    struct rank all[HUB_RANKS_MAX];

    traces_start();
    for (call = 0; call < CALLS_MAX; call++) {
        ranks_init(all, RANKS, take_part, trial);
        all[1].fail_before = (_i & 1) != 0 ? NEVER : call;
        all[1].fail_after = (_i & 1) != 0 ? call : NEVER;
        if (_i < 2)
            ranks_as_threads(all, RANKS);
        else
            ck_assert_int_eq(ranks_as_processes(all, RANKS, 1), 0);
        ranks_fini(all);
        nothing_is_left(files);
        codes = trial_failures(trial);
        if (codes == 0) break;
        ck_assert_int_eq(trial->outcomes[1].code, MOXIE_E_PEER);
        ck_assert((_i & 1) != 0 || codes == RANKS);
    }
    ck_assert_int_eq(call, 7);
}
END_TEST

static const struct trial_size sizes[] = {
    {UINT64_MAX, MOXIE_E_MEMORY, 0},
    {UINT64_MAX, MOXIE_E_MEMORY, 1},
    {(uint64_t)1 << 63, MOXIE_E_MEMORY, 1},
    {INT64_MAX, MOXIE_E_MEMORY, 1},
    {(uint64_t)1 << 61, MOXIE_E_MEMORY, 0},
    {(uint64_t)1 << 50, MOXIE_E_MEMORY, 0},
    {0, MOXIE_E_INVALID, 1},
    {TRANSPORT_CONTROL_BYTES(RANKS) - 1, MOXIE_E_INVALID, 0},
    {WINDOW + 1, MOXIE_E_COLLECTIVE_MISMATCH, 1},
};

START_TEST(sizes_are_refused_in_words)
{
    struct trial *trial = trial_create(WINDOW);
    int32_t files = files_open();

    traces_start();
    trial_refuses(trial, &sizes[_i], take_part);
    nothing_is_left(files);
}
END_TEST

START_TEST(a_file_size_limit_is_no_signal)
{
    struct trial *trial = trial_create(WINDOW);
    struct rlimit limit = {65536, RLIM_INFINITY};

    traces_start();
    ck_assert_int_eq(getrlimit(RLIMIT_FSIZE, &limit), 0);
    limit.rlim_cur = 65536;
    ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
    for (int32_t r = 0; r < RANKS; r++)
        trial->bytes[r] = 65537;
    trial_run(trial, take_part);
    trial_alike(trial, MOXIE_E_MEMORY, 0);
    ck_assert_ptr_nonnull(strstr(trial->outcomes[2].text, "ulimit -f"));
}
END_TEST

static void flip(struct rank *rank, unsigned char *sent)
{
    const struct trial *trial = rank->arg;

    if (trial->at_call == NEVER || rank->calls - 1 == trial->at_call)
        sent[trial->offset] ^= (unsigned char)trial->flip;
}

// Of every message each byte in turn is another one.
static void take_part_repeatedly(struct rank *rank)
{
    struct trial *trial = rank->arg;
    struct trial mine = *trial;
    struct rank self = *rank;

    self.arg = &mine;
    self.bootstrap.ctx = &self;
    for (mine.at_call = 0; mine.at_call < 7; mine.at_call++)
        for (mine.offset = 0; mine.offset < 320; mine.offset++) {
            struct outcome *outcome = &mine.outcomes[rank->bootstrap.rank];

            self.calls = 0;
            attempt(&self, outcome, WINDOW);
            ck_assert_int_eq(windows_mapped(), 0);
            ck_assert(outcome->code == MOXIE_OK || strlen(outcome->text) > 0);
            trial->outcomes[rank->bootstrap.rank].failed += outcome->code != MOXIE_OK;
            ck_assert_int_eq(hub_barrier(rank), 0);
        }
}

START_TEST(a_lying_peer_crashes_nobody)
{
    struct trial *trial = trial_create(WINDOW);
    struct rank all[HUB_RANKS_MAX];

    traces_start();
    trial->flip = _i == 0 ? 0xff : 0x01;
    ranks_init(all, 2, take_part_repeatedly, trial);
    all[1].tamper = flip;
    ck_assert_int_eq(ranks_as_processes(all, 2, 1), 0);
    ck_assert_int_gt(trial->outcomes[0].failed, 100);
    ck_assert_int_eq(trial->outcomes[0].failed, trial->outcomes[1].failed);
    ck_assert_int_eq(names_left(), 0);
    ranks_fini(all);
}
END_TEST

// The identity follows 24 bytes of head: the boot id at 24.
START_TEST(ranks_of_another_host_are_named)
{
    struct trial *trial = trial_create(WINDOW);
    struct rank all[HUB_RANKS_MAX];

    traces_start();
    trial->offset = 24;
    trial->flip = 1;
    ranks_init(all, RANKS, take_part, trial);
    all[2].tamper = flip;
    ranks_as_threads(all, RANKS);
    trial_alike(trial, MOXIE_E_UNAVAILABLE, 2);
    ck_assert_ptr_nonnull(strstr(trial->outcomes[0].text, "another host"));
    ranks_fini(all);
}
END_TEST

// The token, at 96, is where the name comes from: another /dev/shm looks the same.
START_TEST(ranks_that_do_not_see_the_memory_say_so)
{
    struct trial *trial = trial_create(WINDOW);
    int32_t files = files_open();
    struct rank all[HUB_RANKS_MAX];

    traces_start();
    trial->offset = 96;
    trial->flip = 1;
    ranks_init(all, RANKS, take_part, trial);
    all[2].tamper = flip;
    ck_assert_int_eq(ranks_as_processes(all, RANKS, 1), 0);
    trial_alike(trial, MOXIE_E_UNAVAILABLE, 2);
    ck_assert_ptr_nonnull(strstr(trial->outcomes[2].text, "--ipc=host"));
    nothing_is_left(files);
    ranks_fini(all);
}
END_TEST

// The pid, at 80, of rank 0.
static void pose_as_thread(struct rank *rank, unsigned char *sent)
{
    const struct trial *trial = rank->arg;

    memcpy(sent + 80, &trial->pid, sizeof trial->pid);
}

static void take_part_posing(struct rank *rank)
{
    struct trial *trial = rank->arg;

    if (rank->bootstrap.rank == 0) trial->pid = getpid();
    ck_assert_int_eq(hub_barrier(rank), 0);
    take_part(rank);
    ck_assert_int_eq(windows_mapped(), 0);
}

START_TEST(a_process_that_poses_as_a_thread_is_found_out)
{
    struct trial *trial = trial_create(WINDOW);
    struct rank all[HUB_RANKS_MAX];

    traces_start();
    ranks_init(all, RANKS, take_part_posing, trial);
    all[1].tamper = pose_as_thread;
    ck_assert_int_eq(ranks_as_processes(all, RANKS, 1), 0);
    trial_alike(trial, MOXIE_E_COLLECTIVE_MISMATCH, 1);
    ck_assert_ptr_nonnull(strstr(trial->outcomes[2].text, "not here"));
    ck_assert_int_eq(names_left(), 0);
    ranks_fini(all);
}
END_TEST

// The number of the file that threads are counted in, at 112: of no file, of another, of one that
// cannot be read, and of one that could be another window's.
static void name_another_file(struct rank *rank, unsigned char *sent)
{
    const struct trial *trial = rank->arg;
    const int64_t fd = trial->offset;

    if (rank->calls - 1 == 2) memcpy(sent + 112, &fd, sizeof fd);
}

// As large as what threads are counted in, and with one rank that is.
static int count_of_others(void)
{
    const uint32_t words[10] = {1};
    int fd = memfd_create("others", MFD_CLOEXEC);

    ck_assert_int_eq(write(fd, words, sizeof words), sizeof words);
    return fd;
}

START_TEST(threads_look_at_any_file_unharmed)
{
    struct trial *trial = trial_create(WINDOW);
    int pair[2];
    const int files[] = {-1,
                         1 << 20,
                         open("/proc/self/exe", O_RDONLY | O_CLOEXEC),
                         open("/dev/null", O_RDWR | O_CLOEXEC),
                         pipe(pair) == 0 ? pair[0] : -1,
                         count_of_others()};
    int32_t before = files_open();
    struct rank all[HUB_RANKS_MAX];

    traces_start();
    trial->offset = files[_i];
    ranks_init(all, RANKS, take_part, trial);
    all[1].tamper = name_another_file;
    ranks_as_threads(all, RANKS);
    trial_alike(trial, MOXIE_E_COLLECTIVE_MISMATCH, 1);
    ck_assert_ptr_nonnull(strstr(trial->outcomes[2].text, "not here"));
    nothing_is_left(before);
    ranks_fini(all);
}
END_TEST

static void die(struct rank *rank, unsigned char *sent)
{
    const struct trial *trial = rank->arg;

    (void)sent;
    if (rank->calls - 1 == trial->at_call) {
        (void)pthread_mutex_unlock(&rank->hub->mutex);
        (void)raise(SIGKILL);
    }
}

// Its own memory exists already when the rank dies; the others take the name away.
START_TEST(a_rank_killed_while_opening_leaves_no_name)
{
    struct trial *trial = trial_create(WINDOW);
    struct rank all[HUB_RANKS_MAX];

    traces_start();
    for (trial->at_call = 0; trial->at_call < 7; trial->at_call++) {
        ranks_init(all, RANKS, take_part, trial);
        all[0].hub->timeout_ms = 300;
        all[1].tamper = die;
        ck_assert_int_eq(ranks_as_processes(all, RANKS, 1), 1);
        ck_assert_int_eq(trial->outcomes[0].code, MOXIE_E_PEER);
        ck_assert_int_eq(trial->outcomes[2].code, MOXIE_E_PEER);
        ck_assert_int_eq(names_left(), 0);
        ranks_fini(all);
    }
}
END_TEST

START_TEST(a_bootstrap_must_make_sense)
{
    static const struct bootstrap bad[] = {
        {.all_gather = hub_all_gather, .rank = 0, .ranks = 0},
        {.all_gather = hub_all_gather, .rank = 0, .ranks = MOXIE_RANKS_MAX + 1},
        {.all_gather = hub_all_gather, .rank = -1, .ranks = 2},
        {.all_gather = hub_all_gather, .rank = 2, .ranks = 2},
        {.ranks = 2},
    };
    struct transport *transport;

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        ck_assert_int_eq(shm->create(&bad[i], &transport, NULL), MOXIE_E_INVALID);
        ck_assert_ptr_null(transport);
    }
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, every_failing_system_call_fails_all_ranks, 0, RANKS);
    tcase_add_test(tests, descriptors_that_ran_out_are_told);
    tcase_add_test(tests, remedies_are_of_what_failed);
    tcase_add_loop_test(tests, every_failing_all_gather_leaves_nothing, 0, 4);
    tcase_add_loop_test(tests, sizes_are_refused_in_words, 0, sizeof sizes / sizeof sizes[0]);
    tcase_add_test(tests, a_file_size_limit_is_no_signal);
    tcase_add_loop_test(tests, a_lying_peer_crashes_nobody, 0, 2);
    tcase_add_test(tests, ranks_of_another_host_are_named);
    tcase_add_test(tests, ranks_that_do_not_see_the_memory_say_so);
    tcase_add_test(tests, a_process_that_poses_as_a_thread_is_found_out);
    tcase_add_loop_test(tests, threads_look_at_any_file_unharmed, 0, 6);
    tcase_add_test(tests, a_rank_killed_while_opening_leaves_no_name);
    tcase_add_test(tests, a_bootstrap_must_make_sense);
}

SUITE_MAIN("transport_faults", 120, add)
