// plugin/transport_nvlink.c and transport_mail.c over a device whose memory is a descriptor's: what
// is written arrives, and whatever fails while windows open, on whichever rank, all ranks fail
// alike and nothing is left.

#include "host_tests/trial.h"
#include "plugin/device.h"
#include "plugin/transport_mail.h"

#include <stdio.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#define GRANULE   8192
#define WINDOW    ((uint64_t)TRANSPORT_CONTROL_BYTES(RANKS) + 5000)
#define CAPTURING 900 // what the device answers while a graph is captured
#define BROKEN    700 // after a failure of what was launched

static const struct transport_ops *const nvlink = &transport_nvlink;
static _Thread_local int32_t window_answer; // 0: a window is made
static _Atomic int32_t windows_mapped;

#define WRAP(type, name, parameters, arguments, failure)                                           \
    type __real_##name parameters;                                                                 \
    type __wrap_##name parameters;                                                                 \
    type __wrap_##name parameters                                                                  \
    {                                                                                              \
        return call_fails() ? failure : __real_##name arguments;                                   \
    }

WRAP(int, socket, (int domain, int type, int protocol), (domain, type, protocol), -1)
WRAP(int, bind, (int fd, const struct sockaddr *to, socklen_t bytes), (fd, to, bytes), -1)
WRAP(int, listen, (int fd, int count), (fd, count), -1)
WRAP(int, connect, (int fd, const struct sockaddr *to, socklen_t bytes), (fd, to, bytes), -1)
WRAP(ssize_t, sendmsg, (int fd, const struct msghdr *message, int flags), (fd, message, flags), -1)
WRAP(ssize_t, recvmsg, (int fd, struct msghdr *message, int flags), (fd, message, flags), -1)
WRAP(ssize_t, getrandom, (void *buffer, size_t bytes, unsigned flags), (buffer, bytes, flags), -1)
WRAP(void *, calloc, (size_t count, size_t bytes), (count, bytes), NULL)

// Where a stranger connects whenever a connection is taken; NULL: nowhere.
static const struct sockaddr_un *haunted;
static socklen_t haunted_bytes;

static void haunt(void)
{
    int stranger = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    ck_assert_int_eq(connect(stranger, (const struct sockaddr *)haunted, haunted_bytes), 0);
    ck_assert_int_eq(close(stranger), 0);
}

int __real_accept4(int fd, struct sockaddr *from, socklen_t *bytes, int flags);
int __wrap_accept4(int fd, struct sockaddr *from, socklen_t *bytes, int flags);
int __wrap_accept4(int fd, struct sockaddr *from, socklen_t *bytes, int flags)
{
    int connection = call_fails() ? -1 : __real_accept4(fd, from, bytes, flags);

    if (connection >= 0 && haunted != NULL) haunt();
    return connection;
}

// ---- the device --------------------------------------------------------------------------------

static int32_t window_map(int fd, uint64_t bytes, void **memory)
{
    if (call_fails()) return 1;
    *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (*memory == MAP_FAILED) return 1;
    windows_mapped++;
    return 0;
}

static int32_t window_make(uint64_t bytes, void **memory, int *fd)
{
    ck_assert_uint_eq(bytes % GRANULE, 0);
    if (window_answer != 0) return window_answer;
    if (call_fails()) return 1;
    *fd = memfd_create("window", MFD_CLOEXEC);
    ck_assert_int_eq(ftruncate(*fd, (off_t)bytes), 0);
    return window_map(*fd, bytes, memory);
}

static void window_unmap(void *memory, uint64_t bytes)
{
    ck_assert_int_eq(munmap(memory, bytes), 0);
    windows_mapped--;
}

static const char *error_text(int32_t code)
{
    return code == CAPTURING ? "capturing" : "the device says no";
}

static int32_t status(int32_t answer)
{
    if (answer == CAPTURING) return MOXIE_E_CAPTURING;
    if (answer == BROKEN) return MOXIE_E_DEVICE;
    return answer == 0 ? MOXIE_OK : MOXIE_E_MEMORY;
}

static int32_t synchronize(void)
{
    return BROKEN;
}

static const struct device_windows windows = {
    .granule_bytes = GRANULE, .make = window_make, .map = window_map, .unmap = window_unmap};
static const struct device device = {
    .windows = &windows, .synchronize = synchronize, .error_text = error_text, .status = status};

// ---- ranks -------------------------------------------------------------------------------------

// Every rank's byte in everybody's window, at the writer's place.
static void use(struct rank *rank, struct window *window)
{
    const int32_t own = rank->bootstrap.rank, ranks = rank->bootstrap.ranks;
    const uint64_t at = (uint64_t)TRANSPORT_CONTROL_BYTES(RANKS);

    ck_assert_ptr_eq(window->peer[own], window->base);
    ck_assert_uint_eq(window->bytes_mapped, (WINDOW + GRANULE - 1) / GRANULE * GRANULE);
    for (int32_t r = 0; r < ranks; r++)
        window->peer[r][at + (uint64_t)own] = (unsigned char)(10 * r + own + 1);
    ck_assert_int_eq(hub_barrier(rank), 0);
    for (int32_t r = 0; r < ranks; r++)
        ck_assert_int_eq(window->base[at + (uint64_t)r], 10 * own + r + 1);
    ck_assert_int_eq(hub_barrier(rank), 0);
}

static void take_part(struct rank *rank)
{
    struct trial *trial = rank->arg;
    int32_t mine = rank->bootstrap.rank;
    struct outcome *outcome = &trial->outcomes[mine];
    struct trial_windows opened;

    rank->bootstrap.device = &device;
    if (mine == trial->victim) calls_left = trial->call;
    window_answer = mine == trial->victim ? trial->window_answer : 0;
    trial_open(nvlink, rank, (const uint64_t[]){WINDOW, trial->bytes[mine]}, outcome, &opened);
    outcome->failed = calls_end();
    if (outcome->code == MOXIE_OK) use(rank, opened.windows[1]);
    trial_close(nvlink, &opened);
}

static void nothing_is_left(int32_t files)
{
    ck_assert_int_eq(windows_mapped, 0);
    ck_assert_int_eq(files_open(), files);
}

START_TEST(windows_are_everybodys)
{
    struct trial *trial = trial_create(WINDOW);
    int32_t files = files_open();
    struct rank all[HUB_RANKS_MAX];

    ranks_init(all, RANKS, take_part, trial);
    if (_i == 0)
        ranks_as_threads(all, RANKS);
    else
        ck_assert_int_eq(ranks_as_processes(all, RANKS, _i), 0);
    for (int32_t r = 0; r < RANKS; r++)
        ck_assert_msg(trial->outcomes[r].code == MOXIE_OK, "%s", trial->outcomes[r].text);
    nothing_is_left(files);
    ranks_fini(all);
}
END_TEST

START_TEST(every_failing_call_fails_all_ranks)
{
    struct trial *trial = trial_create(WINDOW);
    int32_t files = files_open();

    trial->victim = _i;
    for (trial->call = 0; trial->call < CALLS_MAX; trial->call++) {
        trial_run(trial, take_part);
        nothing_is_left(files);
        if (!trial->outcomes[_i].failed) break;
        // The accept that fails after the last letter is how the box is found empty.
        if (trial->outcomes[_i].code == MOXIE_OK) continue;
        trial_alike(trial, trial->outcomes[_i].code, trial->outcomes[_i].rank);
    }
    ck_assert_int_gt(trial->call, 30);
    ck_assert_int_lt(trial->call, CALLS_MAX);
    ck_assert_int_eq(trial->outcomes[0].code, MOXIE_OK);
}
END_TEST

// A step of one rank's own, once windows are open.
static void tell(struct rank *rank)
{
    struct trial *trial = rank->arg;
    struct outcome *outcome = &trial->outcomes[rank->bootstrap.rank];
    const int fails = rank->bootstrap.rank == trial->victim;
    char text[] = "no room for a report";
    const moxie_error seen = {
        .struct_size = sizeof seen, .rank = -1, .text_bytes = sizeof text, .text = text};
    struct trial_windows opened;
    moxie_error error = {
        .struct_size = sizeof error, .text = outcome->text, .text_bytes = TEXT_BYTES};

    rank->bootstrap.device = &device;
    trial_open(nvlink, rank, (const uint64_t[]){WINDOW, WINDOW}, outcome, &opened);
    if (outcome->code == MOXIE_OK)
        outcome->code =
            nvlink->agree(opened.transport, fails ? MOXIE_E_MEMORY : MOXIE_OK, &seen, &error);
    outcome->rank = error.rank;
    trial_close(nvlink, &opened);
}

START_TEST(one_step_that_fails_fails_all_ranks)
{
    struct trial *trial = trial_create(WINDOW);
    int32_t files = files_open();

    trial->victim = _i; // past the ranks: nobody
    trial_run(trial, tell);
    nothing_is_left(files);
    if (_i < RANKS)
        trial_alike(trial, MOXIE_E_MEMORY, _i);
    else
        ck_assert_int_eq(trial_failures(trial), 0);
}
END_TEST

START_TEST(every_failing_all_gather_leaves_nothing)
{
    struct trial *trial = trial_create(WINDOW);
    int32_t files = files_open();
    struct rank all[HUB_RANKS_MAX];
    int32_t call;

    // Join, and three meetings for each window.
    for (call = 0; call < 7; call++) {
        ranks_init(all, RANKS, take_part, trial);
        all[1].fail_before = call;
        ranks_as_threads(all, RANKS);
        ranks_fini(all);
        nothing_is_left(files);
        ck_assert_int_eq(trial_failures(trial), RANKS);
        ck_assert_int_eq(trial->outcomes[1].code, MOXIE_E_PEER);
    }
}
END_TEST

static const struct trial_size sizes[] = {
    {UINT64_MAX, MOXIE_E_INVALID, 0},
    {UINT64_MAX, MOXIE_E_INVALID, 1},
    {INT64_MAX, MOXIE_E_INVALID, 1},
    {0, MOXIE_E_INVALID, 1},
    {TRANSPORT_CONTROL_BYTES(RANKS) - 1, MOXIE_E_INVALID, 0},
    {WINDOW + 1, MOXIE_E_COLLECTIVE_MISMATCH, 1},
};

START_TEST(sizes_are_refused_in_words)
{
    struct trial *trial = trial_create(WINDOW);
    int32_t files = files_open();

    trial_refuses(trial, &sizes[_i], take_part);
    nothing_is_left(files);
}
END_TEST

START_TEST(no_window_while_a_graph_is_captured)
{
    struct trial *trial = trial_create(WINDOW);

    trial->window_answer = CAPTURING;
    trial_run(trial, take_part);
    trial_alike(trial, MOXIE_E_CAPTURING, 1);
    ck_assert_int_eq(windows_mapped, 0);
}
END_TEST

START_TEST(what_failed_before_is_no_want_of_memory)
{
    struct trial *trial = trial_create(WINDOW);

    trial->window_answer = BROKEN;
    trial_run(trial, take_part);
    trial_alike(trial, MOXIE_E_DEVICE, 1);
    ck_assert_ptr_nonnull(strstr(trial->outcomes[0].text, "launched before this may have failed"));
}
END_TEST

// ---- the box -----------------------------------------------------------------------------------

static const unsigned char token[MEETING_TOKEN_BYTES] = {7, 8, 9};

static socklen_t address_of_box(struct sockaddr_un *address)
{
    const char name[] = "\0moxie-07080900000000000000000000000000";

    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(address->sun_path, name, sizeof name - 1);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + sizeof name - 1);
}

// A letter of rank 1 with `count` descriptors.
static void post_many(int connection, size_t count)
{
    const struct {
        uint32_t magic;
        int32_t from;
    } letter = {0x4d584d31u, 1};
    struct iovec piece = {.iov_base = (void *)(uintptr_t)&letter, .iov_len = sizeof letter};
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {0};
    const struct msghdr message = {.msg_iov = &piece,
                                   .msg_iovlen = 1,
                                   .msg_control = control,
                                   .msg_controllen = CMSG_SPACE(count * sizeof(int))};
    struct cmsghdr *header = (struct cmsghdr *)(void *)control;

    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(count * sizeof(int));
    for (size_t i = 0; i < count; i++)
        memcpy(CMSG_DATA(header) + i * sizeof(int), &(int){STDERR_FILENO}, sizeof(int));
    ck_assert_int_eq(sendmsg(connection, &message, 0), (ssize_t)sizeof letter);
}

// What is advised is of what went wrong.
START_TEST(a_box_that_cannot_be_made_says_why)
{
    char text[TEXT_BYTES];
    moxie_error error = {.struct_size = sizeof error, .text = text, .text_bytes = sizeof text};
    struct rlimit before, none;
    int first, second;

    ck_assert_int_eq(mail_open(token, &first, NULL), MOXIE_OK);
    ck_assert_int_eq(mail_open(token, &second, &error), MOXIE_E_UNAVAILABLE);
    ck_assert_int_eq(second, -1);
    ck_assert_ptr_nonnull(strstr(text, "in use); allow Unix sockets with names of their own"));
    ck_assert_int_eq(close(first), 0);
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &before), 0);
    none = before;
    none.rlim_cur = 3;
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &none), 0);
    ck_assert_int_eq(mail_open(token, &first, &error), MOXIE_E_UNAVAILABLE);
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &before), 0);
    ck_assert_ptr_nonnull(strstr(text, "raise this process's limit of open files"));
}
END_TEST

// Whoever learns the name may connect; only whole letters of ranks count, one of each.
START_TEST(what_is_no_letter_is_passed_over)
{
    struct sockaddr_un address;
    socklen_t length = address_of_box(&address);
    int32_t files = files_open();
    int box, strangers[5], fds[MOXIE_RANKS_MAX], own = memfd_create("own", MFD_CLOEXEC);
    char text[TEXT_BYTES];
    moxie_error error = {.struct_size = sizeof error, .text = text, .text_bytes = sizeof text};

    ck_assert_int_eq(mail_open(token, &box, NULL), MOXIE_OK);
    for (int i = 0; i < 5; i++) {
        strangers[i] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        ck_assert_int_eq(connect(strangers[i], (struct sockaddr *)&address, length), 0);
    }
    ck_assert_int_eq(write(strangers[1], "letter", 6), 6);
    for (int i = 2; i < 5; i++)
        post_many(strangers[i], (size_t)i);
    ck_assert_int_eq(mail_post(token, 2, 0, own, NULL), MOXIE_OK);
    ck_assert_int_eq(mail_post(token, 2, 0, own, NULL), MOXIE_OK);  // a second one
    ck_assert_int_eq(mail_post(token, 0, 0, own, NULL), MOXIE_OK);  // from the box's own rank
    ck_assert_int_eq(mail_post(token, 3, 0, own, NULL), MOXIE_OK);  // from a rank that is none
    ck_assert_int_eq(mail_post(token, -1, 0, own, NULL), MOXIE_OK); // nor is this
    ck_assert_int_eq(mail_take(box, 0, 3, fds, &error), MOXIE_E_PEER);
    ck_assert_int_eq(error.rank, 1);
    ck_assert_int_ge(fds[2], 0);
    ck_assert_int_eq(close(fds[2]), 0);
    ck_assert_int_eq(mail_post(token, 1, 0, own, NULL), MOXIE_OK);
    ck_assert_int_eq(mail_take(box, 0, 2, fds, &error), MOXIE_OK);
    ck_assert_int_eq(close(fds[1]), 0);
    for (int i = 0; i < 5; i++)
        ck_assert_int_eq(close(strangers[i]), 0);
    ck_assert_int_eq(close(box), 0);
    ck_assert_int_eq(mail_post(token, 1, 0, own, &error), MOXIE_E_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(text, "network namespace"));
    ck_assert_int_eq(close(own), 0);
    ck_assert_int_eq(files_open(), files);
}
END_TEST

// The box is never empty, and a letter at the end of it is found.
START_TEST(who_connects_without_end_is_not_waited_for)
{
    struct sockaddr_un address;
    int32_t files = files_open();
    int box, fds[MOXIE_RANKS_MAX], own = memfd_create("own", MFD_CLOEXEC);

    haunted_bytes = address_of_box(&address);
    ck_assert_int_eq(mail_open(token, &box, NULL), MOXIE_OK);
    haunted = &address;
    for (int32_t i = 0; i < MOXIE_RANKS_MAX; i++)
        haunt();
    ck_assert_int_eq(mail_post(token, 1, 0, own, NULL), MOXIE_OK);
    ck_assert_int_eq(mail_take(box, 0, 2, fds, NULL), MOXIE_OK);
    haunted = NULL;
    ck_assert_int_eq(close(fds[1]), 0);
    ck_assert_int_eq(close(box), 0);
    ck_assert_int_eq(close(own), 0);
    ck_assert_int_eq(files_open(), files);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, windows_are_everybodys, 0, 3);
    tcase_add_loop_test(tests, every_failing_call_fails_all_ranks, 0, RANKS);
    tcase_add_loop_test(tests, one_step_that_fails_fails_all_ranks, 0, RANKS + 1);
    tcase_add_test(tests, every_failing_all_gather_leaves_nothing);
    tcase_add_loop_test(tests, sizes_are_refused_in_words, 0, sizeof sizes / sizeof sizes[0]);
    tcase_add_test(tests, no_window_while_a_graph_is_captured);
    tcase_add_test(tests, what_failed_before_is_no_want_of_memory);
    tcase_add_test(tests, a_box_that_cannot_be_made_says_why);
    tcase_add_test(tests, what_is_no_letter_is_passed_over);
    tcase_add_test(tests, who_connects_without_end_is_not_waited_for);
}

SUITE_MAIN("transport_nvlink", 120, add)
