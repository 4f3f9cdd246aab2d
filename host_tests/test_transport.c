// plugin/transport*.c: rows are there when their flag is, in both directions and for ranks of every
// kind; waits end.

#include "host_tests/traces.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/time.h>

#define SLAB_WORDS 96
#define SECOND_NS  ((int64_t)1000000000)

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define EPOCHS 300
#else
#define EPOCHS 3000
#endif

static const struct transport_ops *const shm = &transport_shm;

struct slab {
    uint64_t words[SLAB_WORDS];
};

static uint64_t window_bytes(int32_t ranks)
{
    return (uint64_t)TRANSPORT_CONTROL_BYTES(ranks) +
           (uint64_t)ranks * WORD_GENERATION * sizeof(struct slab);
}

// The slab of `source` in the window at `memory`.
static struct slab *slab_of(unsigned char *memory, int32_t ranks, int32_t source,
                            enum flag_word word)
{
    return (struct slab *)(void *)(memory + TRANSPORT_CONTROL_BYTES(ranks)) +
           (int32_t)word * ranks + source;
}

static uint64_t content(uint64_t epoch, int32_t source, int32_t destination, enum flag_word word,
                        uint64_t i)
{
    return (epoch * 64 + (uint64_t)source * 8 + (uint64_t)destination) * 0x9e3779b97f4a7c15u +
           (uint64_t)word + i;
}

// Writes my slab at every peer, then flags it.
static void push(struct transport *transport, struct window *window, const struct rank *rank,
                 uint64_t epoch, enum flag_word word)
{
    int32_t mine = rank->bootstrap.rank;

    for (int32_t peer = 0; peer < rank->bootstrap.ranks; peer++) {
        struct slab *slab = slab_of(window->peer[peer], rank->bootstrap.ranks, mine, word);

        for (uint64_t i = 0; i < SLAB_WORDS; i++)
            slab->words[i] = content(epoch, mine, peer, word, i);
        shm->signal(transport, window, peer, word, epoch);
    }
}

// 1 when every source has signalled `value` before the deadline.
static int await_all(struct transport *transport, struct window *window, int32_t ranks,
                     enum flag_word word, uint64_t value, int64_t deadline_ns)
{
    for (;;) {
        uint32_t seen = shm->ticket(transport, window);
        int32_t there = 0;

        for (int32_t source = 0; source < ranks; source++)
            there += shm->read(transport, window, source, word) >= value;
        if (there == ranks) return 1;
        if (clock_ns() >= deadline_ns) return 0;
        shm->wait(transport, window, seen, deadline_ns);
    }
}

static void pull(struct transport *transport, struct window *window, const struct rank *rank,
                 uint64_t epoch, enum flag_word word)
{
    int32_t ranks = rank->bootstrap.ranks;
    uint64_t wrong = 0;

    ck_assert(await_all(transport, window, ranks, word, epoch, clock_ns() + 60 * SECOND_NS));
    for (int32_t source = 0; source < ranks; source++) {
        const struct slab *slab = slab_of(window->base, ranks, source, word);

        for (uint64_t i = 0; i < SLAB_WORDS; i++)
            wrong += slab->words[i] != content(epoch, source, rank->bootstrap.rank, word, i);
    }
    ck_assert_uint_eq(wrong, 0);
}

static void open_one(const struct rank *rank, uint64_t bytes, struct transport **transport,
                     struct window **window)
{
    char text[256] = "";
    moxie_error error = {.struct_size = sizeof error, .text = text, .text_bytes = sizeof text};

    ck_assert_msg(shm->create(&rank->bootstrap, transport, &error) == MOXIE_OK, "%s", text);
    ck_assert_msg(shm->window_open(*transport, bytes, window, &error) == MOXIE_OK, "%s", text);
}

static void close_one(struct transport *transport, struct window *window)
{
    shm->window_close(transport, window);
    shm->destroy(transport);
}

static void exchange(struct rank *rank)
{
    struct transport *transport;
    struct window *window;
    const uint64_t *epochs = rank->arg;

    open_one(rank, window_bytes(rank->bootstrap.ranks), &transport, &window);
    ck_assert_ptr_eq(window->peer[rank->bootstrap.rank], window->base);
    for (uint64_t epoch = 1; epoch <= *epochs; epoch++) {
        push(transport, window, rank, epoch, WORD_DISPATCH);
        pull(transport, window, rank, epoch, WORD_DISPATCH);
        push(transport, window, rank, epoch, WORD_COMBINE);
        pull(transport, window, rank, epoch, WORD_COMBINE);
    }
    close_one(transport, window);
}

// ranks; threads of one process, 0: all of them
static const int32_t teams[][2] = {{1, 0}, {2, 0}, {3, 0}, {7, 0}, {1, 1},
                                   {2, 1}, {3, 1}, {7, 1}, {3, 2}, {5, 3}};

START_TEST(rows_are_there_when_their_flag_is)
{
    int32_t ranks = teams[_i][0];
    int32_t threads = teams[_i][1];
    uint64_t epochs = ranks > 3 ? EPOCHS / 3 : EPOCHS;
    int32_t files = files_open();
    struct rank all[HUB_RANKS_MAX];

    traces_start();
    ranks_init(all, ranks, exchange, &epochs);
    if (threads == 0)
        ranks_as_threads(all, ranks);
    else
        ck_assert_int_eq(ranks_as_processes(all, ranks, threads), 0);
    ck_assert_uint_eq(atomic_load(&trace_names->count), (uint32_t)ranks);
    ck_assert_int_eq(names_left(), 0);
    ck_assert_int_eq(windows_mapped(), 0);
    ck_assert_int_eq(counts_mapped(), 0);
    ck_assert_int_eq(files_open(), files);
    ranks_fini(all);
}
END_TEST

// Ranks of one process see one address, and memory of a rank that closed lives on for the others.
static void close_in_turn(struct rank *rank)
{
    unsigned char **bases = rank->arg;
    int32_t mine = rank->bootstrap.rank;
    struct transport *transport;
    struct window *window;

    open_one(rank, window_bytes(rank->bootstrap.ranks), &transport, &window);
    bases[mine] = window->base;
    (void)hub_barrier(rank);
    for (int32_t peer = 0; peer < rank->bootstrap.ranks; peer++)
        ck_assert_ptr_eq(window->peer[peer], bases[peer]);
    for (int32_t turn = 0; turn < mine; turn++) {
        (void)hub_barrier(rank);
        push(transport, window, rank, (uint64_t)turn + 1, WORD_DISPATCH);
    }
    close_one(transport, window);
    for (int32_t turn = mine; turn < rank->bootstrap.ranks; turn++)
        (void)hub_barrier(rank);
}

START_TEST(threads_share_one_address_until_the_last_closes)
{
    unsigned char *bases[HUB_RANKS_MAX];
    struct rank all[HUB_RANKS_MAX];

    traces_start();
    ranks_init(all, 4, close_in_turn, bases);
    ranks_as_threads(all, 4);
    ck_assert_int_eq(windows_mapped(), 0);
    ranks_fini(all);
}
END_TEST

struct pair {
    struct transport *transport[2];
    struct window *window[2];
};

static void open_in_pair(struct rank *rank)
{
    struct pair *pair = rank->arg;
    int32_t mine = rank->bootstrap.rank;

    open_one(rank, window_bytes(2), &pair->transport[mine], &pair->window[mine]);
}

// In a child, whose allocator may long have taken the addresses of the windows.
static void close_copy(const struct pair *pair)
{
    const size_t bytes = pair->window[0]->bytes_mapped;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
    unsigned char *place = pair->window[0]->base;
    unsigned char *other;

    ck_assert_int_eq(windows_mapped(), 0);
    ck_assert_int_eq(counts_mapped(), 0);
    other = mmap(place, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    ck_assert_ptr_eq(other, place);
    close_one(pair->transport[0], pair->window[0]);
    memset(other, 1, bytes);
}

// It has nothing of the windows, and closes what it has copies of; its parent's threads go on with
// the memory.
START_TEST(a_forked_child_keeps_nothing_and_takes_nothing_away)
{
    struct rank all[HUB_RANKS_MAX];
    struct pair pair;
    int status;
    pid_t child;

    traces_start();
    ranks_init(all, 2, open_in_pair, &pair);
    ranks_as_threads(all, 2);
    child = fork();
    ck_assert_int_ge(child, 0);
    if (child == 0) {
        close_copy(&pair);
        _exit(EXIT_SUCCESS);
    }
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS);
    close_one(pair.transport[0], pair.window[0]);
    ck_assert_int_eq(windows_mapped(), 2);
    push(pair.transport[1], pair.window[1], &all[1], 1, WORD_DISPATCH);
    close_one(pair.transport[1], pair.window[1]);
    ck_assert_int_eq(windows_mapped(), 0);
    ck_assert_int_eq(counts_mapped(), 0);
    ranks_fini(all);
}
END_TEST

// Two threads of one process, and a peer that writes anything into the heads of their windows.
struct scribble {
    uint32_t word;
    _Atomic int32_t closed, done;
};

static void scribble(struct window *window, struct scribble *over)
{
    const int64_t end_ns = clock_ns() + 30 * SECOND_NS;

    while (!atomic_load(&over->done) && clock_ns() < end_ns)
        for (int32_t r = 0; r < 2; r++) {
            volatile uint32_t *head = (volatile uint32_t *)(void *)window->peer[r];

            for (size_t i = 0; i < TRANSPORT_LINE_BYTES / sizeof *head; i++)
                head[i] = over->word;
        }
}

// Rank 0 closes, and rank 1 goes on with both windows.
static void close_under_scribble(struct rank *rank)
{
    struct scribble *over = rank->arg;
    struct transport *transport;
    struct window *window;

    open_one(rank, window_bytes(rank->bootstrap.ranks), &transport, &window);
    (void)hub_barrier(rank);
    if (rank->bootstrap.rank == 2) {
        scribble(window, over);
        close_one(transport, window);
        return;
    }
    for (uint64_t epoch = 1; epoch <= 200; epoch++)
        push(transport, window, rank, epoch, WORD_DISPATCH);
    if (rank->bootstrap.rank == 1) {
        while (!atomic_load(&over->closed))
            clock_pause();
        ck_assert_int_eq(windows_mapped(), 3);
        push(transport, window, rank, 201, WORD_DISPATCH);
        shm->wait(transport, window, shm->ticket(transport, window), clock_ns() + SECOND_NS / 100);
    }
    close_one(transport, window);
    if (atomic_fetch_add(&over->closed, 1) == 0) return;
    ck_assert_int_eq(windows_mapped(), 0);
    ck_assert_int_eq(counts_mapped(), 0);
    atomic_store(&over->done, 1);
}

START_TEST(a_peer_takes_no_memory_from_threads)
{
    static const uint32_t words[] = {0, 1, 2, 3, UINT32_MAX};
    struct scribble *over = shared_memory(sizeof *over);
    struct rank all[HUB_RANKS_MAX];

    traces_start();
    over->word = words[_i];
    ranks_init(all, 3, close_under_scribble, over);
    ck_assert_int_eq(ranks_as_processes(all, 3, 2), 0);
    ranks_fini(all);
}
END_TEST

static void on_alarm(int number)
{
    (void)number;
}

// Larger than one system call allocates, under a timer that interrupts all the time.
START_TEST(windows_are_whole_and_zero)
{
    const struct itimerval often = {{0, 500}, {0, 500}}, never = {{0, 0}, {0, 0}};
    const uint64_t bytes = ((uint64_t)130 << 20) + 5;
    struct rank all[HUB_RANKS_MAX];
    struct transport *transport;
    struct window *window;
    uint64_t set = 0;

    traces_start();
    ranks_init(all, 1, NULL, NULL);
    (void)signal(SIGALRM, on_alarm);
    (void)setitimer(ITIMER_REAL, &often, NULL);
    open_one(&all[0], bytes, &transport, &window);
    (void)setitimer(ITIMER_REAL, &never, NULL);
    ck_assert_uint_eq(window->bytes, bytes);
    ck_assert_uint_ge(window->bytes_mapped, bytes);
    ck_assert_uint_eq(window->bytes_mapped % (uint64_t)sysconf(_SC_PAGESIZE), 0);
    for (uint64_t i = TRANSPORT_CONTROL_BYTES(1); i < window->bytes_mapped; i += 511)
        set += window->base[i] != 0;
    ck_assert_uint_eq(set, 0);
    window->base[window->bytes_mapped - 1] = 1;
    close_one(transport, window);
    ck_assert_int_eq(names_left(), 0);
    ranks_fini(all);
}
END_TEST

// Each waits for the other with nothing but signals to wake it, at moments around the end of the
// other's spin.
static void ping(struct rank *rank)
{
    int32_t mine = rank->bootstrap.rank;
    struct transport *transport;
    struct window *window;
    volatile uint32_t idle;
    int32_t late = 0;

    open_one(rank, window_bytes(2), &transport, &window);
    for (uint64_t turn = 1; turn <= EPOCHS * 4; turn++) {
        for (idle = 0; idle < turn % 512 * 16; idle++)
            ;
        if ((turn & 1) == (uint64_t)mine)
            shm->signal(transport, window, 1 - mine, WORD_DISPATCH, turn);
        else
            while (shm->read(transport, window, 1 - mine, WORD_DISPATCH) < turn) {
                int64_t deadline_ns = clock_ns() + 30 * SECOND_NS;
                uint32_t seen = shm->ticket(transport, window);

                if (shm->read(transport, window, 1 - mine, WORD_DISPATCH) >= turn) break;
                shm->wait(transport, window, seen, deadline_ns);
                late += clock_ns() >= deadline_ns;
            }
    }
    ck_assert_int_eq(late, 0);
    close_one(transport, window);
}

START_TEST(no_wakeup_is_lost)
{
    struct rank all[HUB_RANKS_MAX];

    traces_start();
    ranks_init(all, 2, ping, NULL);
    if (_i == 0)
        ranks_as_threads(all, 2);
    else
        ck_assert_int_eq(ranks_as_processes(all, 2, 1), 0);
    ranks_fini(all);
}
END_TEST

// Rank 0 waits for what never comes, alone or with its bell ringing all the time.
static void wait_in_vain(struct rank *rank)
{
    const int *storm = rank->arg;
    struct transport *transport;
    struct window *window;
    int64_t deadline_ns;

    open_one(rank, window_bytes(2), &transport, &window);
    deadline_ns = clock_ns() + SECOND_NS / 5;
    if (rank->bootstrap.rank == 0) {
        ck_assert(!await_all(transport, window, 2, WORD_COMBINE, 7, deadline_ns));
        ck_assert_int_ge(clock_ns(), deadline_ns);
        ck_assert_int_lt(clock_ns(), deadline_ns + 20 * SECOND_NS);
        shm->wait(transport, window, shm->ticket(transport, window), INT64_MIN);
        shm->wait(transport, window, shm->ticket(transport, window), 0);
    } else {
        while (*storm && clock_ns() < deadline_ns + SECOND_NS / 10)
            shm->signal(transport, window, 0, WORD_DISPATCH, 1);
    }
    close_one(transport, window);
}

START_TEST(a_wait_ends_at_its_deadline)
{
    struct rank all[HUB_RANKS_MAX];

    traces_start();
    ranks_init(all, 2, wait_in_vain, &_i);
    ck_assert_int_eq(ranks_as_processes(all, 2, 1), 0);
    ranks_fini(all);
}
END_TEST

// Rank 1 dies between its rows and its flag, in the middle of an epoch.
static void die_on_the_way(struct rank *rank)
{
    struct transport *transport;
    struct window *window;
    int64_t deadline_ns;

    open_one(rank, window_bytes(3), &transport, &window);
    for (uint64_t epoch = 1; epoch <= 20; epoch++) {
        if (rank->bootstrap.rank == 1 && epoch == 20) {
            memset(slab_of(window->peer[0], 3, 1, WORD_DISPATCH), 0xff, sizeof(struct slab) / 2);
            (void)raise(SIGKILL);
        }
        push(transport, window, rank, epoch, WORD_DISPATCH);
        deadline_ns = clock_ns() + (epoch == 20 ? SECOND_NS / 5 : 60 * SECOND_NS);
        ck_assert_int_eq(await_all(transport, window, 3, WORD_DISPATCH, epoch, deadline_ns),
                         epoch < 20);
        if (epoch == 20) break;
        push(transport, window, rank, epoch, WORD_COMBINE);
        pull(transport, window, rank, epoch, WORD_COMBINE);
    }
    ck_assert_uint_eq(shm->read(transport, window, 1, WORD_DISPATCH), 19);
    push(transport, window, rank, 21, WORD_DISPATCH);
    close_one(transport, window);
    ck_assert_int_eq(windows_mapped(), 0);
}

START_TEST(a_killed_peer_holds_nobody)
{
    struct rank all[HUB_RANKS_MAX];

    traces_start();
    ranks_init(all, 3, die_on_the_way, NULL);
    ck_assert_int_eq(ranks_as_processes(all, 3, 1), 1);
    ck_assert_int_eq(names_left(), 0);
    ranks_fini(all);
}
END_TEST

START_TEST(one_rank_alone)
{
    const struct transport_ops *self = &transport_self;
    const struct bootstrap bootstrap = {.ranks = 1},
                           pair = {.all_gather = hub_all_gather, .ranks = 2};
    const uint64_t bytes = (uint64_t)TRANSPORT_CONTROL_BYTES(1) + 100;
    struct transport *transport;
    struct window *window;
    int64_t deadline_ns;
    uint32_t seen;

    ck_assert_int_eq(self->create(&pair, &transport, NULL), MOXIE_E_UNSUPPORTED);
    ck_assert_ptr_null(transport);
    ck_assert_int_eq(self->create(&bootstrap, &transport, NULL), MOXIE_OK);
    ck_assert_int_eq(self->window_open(transport, UINT64_MAX, &window, NULL), MOXIE_E_MEMORY);
    ck_assert_int_eq(self->window_open(transport, (uint64_t)1 << 60, &window, NULL),
                     MOXIE_E_MEMORY);
    ck_assert_int_eq(self->window_open(transport, 64, &window, NULL), MOXIE_E_INVALID);
    ck_assert_ptr_null(window);
    ck_assert_int_eq(self->window_open(transport, bytes, &window, NULL), MOXIE_OK);
    for (uint64_t i = 0; i < window->bytes_mapped; i++)
        ck_assert_int_eq(window->base[i], 0);
    ck_assert_ptr_eq(window->peer[0], window->base);
    seen = self->ticket(transport, window);
    deadline_ns = clock_ns() + SECOND_NS / 20;
    self->wait(transport, window, seen, deadline_ns);
    ck_assert_int_ge(clock_ns(), deadline_ns);
    self->signal(transport, window, 0, WORD_COMBINE, 9);
    ck_assert_uint_eq(self->read(transport, window, 0, WORD_COMBINE), 9);
    ck_assert_uint_eq(self->read(transport, window, 0, WORD_DISPATCH), 0);
    deadline_ns = clock_ns() + 100 * SECOND_NS;
    self->wait(transport, window, seen, deadline_ns);
    ck_assert_int_lt(clock_ns(), deadline_ns);
    self->window_close(transport, window);
    self->window_close(transport, NULL);
    self->destroy(transport);
    self->destroy(NULL);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, rows_are_there_when_their_flag_is, 0,
                        sizeof teams / sizeof teams[0]);
    tcase_add_test(tests, threads_share_one_address_until_the_last_closes);
    tcase_add_test(tests, a_forked_child_keeps_nothing_and_takes_nothing_away);
    tcase_add_loop_test(tests, a_peer_takes_no_memory_from_threads, 0, 5);
    tcase_add_test(tests, windows_are_whole_and_zero);
    tcase_add_loop_test(tests, no_wakeup_is_lost, 0, 2);
    tcase_add_loop_test(tests, a_wait_ends_at_its_deadline, 0, 2);
    tcase_add_test(tests, a_killed_peer_holds_nobody);
    tcase_add_test(tests, one_rank_alone);
}

SUITE_MAIN("transport", 120, add)
