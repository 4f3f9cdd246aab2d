// Flags over NCCL. The kernels are those of device memory (exchange_device.c): signal writes the
// flag into the own staging, one exchange takes it to every peer together with the rows of the
// round and their count, or with the result rows, and await finds it there, in stream order, unless
// the ranks have made different calls. How many rows travel is the same on every rank and known
// when the round begins, so that a graph can hold it.
//
// Kernels keep no deadline here, because NCCL waits between them: they count where they are in
// pinned memory, and whoever asks for the failure looks at those counts and at the clock. When an
// exchange has been under way for timeout_ms, it is ended for all kernels that follow it first (the
// state lies in pinned memory, too), and then for NCCL.

#include "plugin/exchange_verdict.h"
#include "plugin/transport_nccl.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#define PIECES_MAX 6
// Exchanges that are launched and not done, before begin waits: fewer than the launches that a
// stream takes, because who waits for room there cannot look at the clock.
#define AHEAD_MAX 16

// One exchange that was seen under way.
struct sight {
    uint64_t begun;
    int64_t since_ns; // 0: none is
};

struct exchange_watch {
    pthread_mutex_t lock; // of NCCL, and of what is below
    struct sight sights[2][MOXIE_SLOTS_MAX];
    _Atomic uint64_t launched[MOXIE_SLOTS_MAX]; // not those in graphs
    _Atomic int32_t failed;                     // written last
    int32_t failed_rank;
    char failed_text[FAILURE_TEXT_BYTES];
};

static uint64_t mark_read(const uint64_t *mark)
{
    return __atomic_load_n(mark, __ATOMIC_ACQUIRE);
}

// Exchanges of all slots that are launched and not done, and those of graphs that are under way.
static uint64_t ahead(const struct exchange_group *group)
{
    const struct flag_report *report = group->report;
    uint64_t count = 0;

    for (int32_t i = 0; i < exchange_limits(group)->slots; i++) {
        uint64_t ended = mark_read(&report->ended[1][i]);

        count += mark_read(&report->begun[1][i]) - ended;
        count += atomic_load(&group->watch->launched[i]) - mark_read(&report->ended[0][i]);
    }
    return count;
}

// ---- failure -----------------------------------------------------------------------------------

// Where a failure is written before it is one.
static moxie_error watch_error(struct exchange_watch *watch)
{
    return (moxie_error){.struct_size = sizeof(moxie_error),
                         .rank = -1,
                         .text_bytes = sizeof watch->failed_text,
                         .text = watch->failed_text};
}

static int32_t say(const struct exchange_watch *watch, moxie_error *error)
{
    int32_t failed = atomic_load_explicit(&watch->failed, memory_order_acquire);

    if (failed == MOXIE_OK) return MOXIE_OK;
    return fail_rank(error, failed, watch->failed_rank, "%s", watch->failed_text);
}

// The first failure is the one that is told. Kernels that follow are told before NCCL lets them go.
static int32_t give_up(const struct exchange_group *group, int32_t code, const moxie_error *seen,
                       moxie_error *error)
{
    struct exchange_watch *watch = group->watch;

    if (atomic_load(&watch->failed) == MOXIE_OK) {
        watch->failed_rank = seen->rank;
        __atomic_store_n(&group->state->failed, 1, __ATOMIC_SEQ_CST);
        nccl_abort(group->transport);
        atomic_store_explicit(&watch->failed, code, memory_order_release);
    }
    return say(watch, error);
}

// An await found no flag of this epoch though its exchange was done, or other rows than this
// round's.
static int32_t say_verdict(const struct flag_verdict *verdict, const struct exchange_group *group,
                           moxie_error *error)
{
    if (verdict->kind == VERDICT_ROWS || verdict->kind == VERDICT_ROUND)
        return verdict_say(verdict, group, error);
    return fail_rank(error, MOXIE_E_PEER, verdict->rank,
                     "rank %d is not at epoch %" PRIu64
                     " as this rank is: the ranks have made different calls; every rank must make "
                     "the same calls in the same order; create the dispatchers anew",
                     verdict->rank, verdict->epoch);
}

// 1 when an exchange has been seen under way, and the same, since timeout_ms.
static int is_stuck(const struct exchange_group *group, struct sight *sight, uint64_t begun,
                    uint64_t ended)
{
    int64_t now_ns = clock_ns();

    if (begun == ended) {
        sight->since_ns = 0;
        return 0;
    }
    if (sight->since_ns == 0 || sight->begun != begun)
        *sight = (struct sight){.begun = begun, .since_ns = now_ns};
    return now_ns - sight->since_ns >= (int64_t)exchange_limits(group)->timeout_ms * 1000000;
}

static int32_t look_at_marks(const struct exchange_group *group, moxie_error *error)
{
    for (int32_t slot = 0; slot < exchange_limits(group)->slots; slot++) {
        for (int32_t kind = 0; kind < 2; kind++) {
            // In this order: an exchange that ends meanwhile is not taken for one under way.
            uint64_t begun = mark_read(&group->report->begun[kind][slot]);
            uint64_t ended = mark_read(&group->report->ended[kind][slot]);

            if (!is_stuck(group, &group->watch->sights[kind][slot], begun, ended)) continue;
            return fail_with(error, MOXIE_E_TIMEOUT,
                             "the other ranks did not answer within timeout_ms = %d, and NCCL does "
                             "not say which; its communicator was aborted; create the dispatchers "
                             "anew, without the ranks that are gone",
                             exchange_limits(group)->timeout_ms);
        }
    }
    return MOXIE_OK;
}

// With the lock.
static int32_t look(const struct exchange_group *group, moxie_error *error)
{
    moxie_error seen = watch_error(group->watch);
    struct flag_verdict verdict = {.kind = VERDICT_NONE};
    int32_t st = say(group->watch, error);

    if (st != MOXIE_OK) return st;
    verdict.kind = __atomic_load_n(&group->report->verdict.kind, __ATOMIC_ACQUIRE);
    if (verdict.kind != VERDICT_NONE) {
        verdict = group->report->verdict;
        st = say_verdict(&verdict, group, &seen);
    }
    if (st == MOXIE_OK) st = nccl_check(group->transport, &seen);
    if (st == MOXIE_OK) st = look_at_marks(group, &seen);
    return st == MOXIE_OK ? MOXIE_OK : give_up(group, st, &seen, error);
}

// Whoever has the lock looks himself, and within timeout_ms.
static int32_t failure_nccl(const struct exchange_group *group, moxie_error *error)
{
    struct exchange_watch *watch = group->watch;
    int32_t st = MOXIE_OK;

    if (watch == NULL || group->report == NULL) return MOXIE_OK;
    if (atomic_load(&watch->failed) != MOXIE_OK) return say(watch, error);
    if (pthread_mutex_trylock(&watch->lock) != 0) return MOXIE_OK;
    st = look(group, error);
    (void)pthread_mutex_unlock(&watch->lock);
    return st;
}

// Waits until at most `most` exchanges are launched and not done, or one has failed, or for
// timeout_ms.
static int32_t wait_ahead(const struct exchange_group *group, uint64_t most, moxie_error *error)
{
    int64_t deadline_ns = clock_ns() + (int64_t)exchange_limits(group)->timeout_ms * 1000000;
    int32_t st = MOXIE_OK;

    while (ahead(group) > most && clock_ns() < deadline_ns) {
        TRY(failure_nccl(group, error));
        clock_pause();
    }
out:
    return st;
}

// ---- a layer -----------------------------------------------------------------------------------

static int32_t begin_nccl(struct exchange_group *group, struct exchange *slot, moxie_error *error)
{
    (void)slot;
    return wait_ahead(group, AHEAD_MAX, error);
}

// A piece of `section` for and from the peer of that index; `bytes` of it travel.
static struct nccl_piece slab(const struct window *window, int64_t section, int64_t slab_bytes,
                              int32_t index, int64_t bytes)
{
    int64_t at = section + index * slab_bytes;

    return (struct nccl_piece){
        .from = window->staging + at, .to = window->base + at, .bytes = bytes};
}

// The flag that signal wrote, once for all peers.
static struct nccl_piece flag(const struct window *window, const struct limits *limits,
                              enum flag_word word, int32_t peer)
{
    int64_t first = 1 + (int64_t)word * limits->ranks;

    return (struct nccl_piece){
        .from = window->staging + (first + limits->rank) * FLAG_LINE_BYTES,
        .to = window->base + (first + peer) * FLAG_LINE_BYTES,
        .bytes = (int64_t)sizeof(uint64_t),
    };
}

// What goes to and comes from one peer.
static int32_t pieces_of(const struct exchange_group *group, const struct exchange *slot,
                         enum flag_word word, int32_t peer, int64_t rows,
                         struct nccl_piece pieces[PIECES_MAX])
{
    const struct window_layout *w = &group->instance->plan.window;
    const struct limits *limits = exchange_limits(group);
    const struct window *window = slot->window;
    int32_t i = peer < limits->rank ? peer : peer - 1;
    int32_t count = 0;

    pieces[count++] = flag(window, limits, word, peer);
    if (word == WORD_COMBINE) {
        pieces[count++] =
            slab(window, w->results, w->results_slab_bytes, i, rows * limits->result_bytes);
    } else {
        pieces[count++] =
            slab(window, w->counts, FLAG_LINE_BYTES, i, (int64_t)sizeof(struct round_count));
        pieces[count++] = slab(window, w->rows, w->rows_slab_bytes, i, rows * limits->row_bytes);
        pieces[count++] =
            slab(window, w->scales, w->scales_slab_bytes, i, rows * limits->scale_bytes);
        pieces[count++] = slab(window, w->ids, w->ids_slab_bytes, i, rows * limits->id_bytes);
        pieces[count++] =
            slab(window, w->weights, w->weights_slab_bytes, i, rows * limits->weight_bytes);
    }
    for (int32_t piece = 0; piece < count; piece++)
        pieces[piece].peer = peer;
    return count;
}

// With the lock.
static int32_t exchange_all(struct exchange_group *group, struct exchange *slot,
                            const struct exchange_round *round, enum flag_word word,
                            moxie_error *error)
{
    struct nccl_piece pieces[MOXIE_RANKS_MAX * PIECES_MAX];
    moxie_error seen = watch_error(group->watch);
    int32_t count = 0;
    int32_t st = MOXIE_OK;

    TRY(look(group, error));
    for (int32_t rank = 0; rank < exchange_limits(group)->ranks; rank++) {
        if (rank != exchange_limits(group)->rank)
            count += pieces_of(group, slot, word, rank, round->rows_most, &pieces[count]);
    }
    TRY(exchange_flags_device.send(group, slot, round, word, error));
    st = nccl_exchange(group->transport, pieces, count, round->batch->stream, &seen);
    if (st != MOXIE_OK) st = give_up(group, st, &seen, error);
    if (!group->instance->device->is_capturing(round->batch->stream))
        atomic_fetch_add(&group->watch->launched[round->slot], 1);
out:
    return st;
}

static int32_t send_nccl(struct exchange_group *group, struct exchange *slot,
                         const struct exchange_round *round, enum flag_word word,
                         moxie_error *error)
{
    int32_t st;

    (void)pthread_mutex_lock(&group->watch->lock);
    st = exchange_all(group, slot, round, word, error);
    (void)pthread_mutex_unlock(&group->watch->lock);
    return st;
}

static int32_t wait_nccl(struct exchange_group *group, struct exchange *slot,
                         const struct exchange_round *round, enum flag_word word,
                         moxie_error *error)
{
    return exchange_flags_device.wait(group, slot, round, word, error);
}

static int32_t regroup_nccl(struct exchange_group *group, struct exchange *slots,
                            int32_t slots_count, uint64_t active, moxie_error *error)
{
    (void)group;
    (void)slots;
    (void)slots_count;
    (void)active;
    return fail_with(error, MOXIE_E_UNSUPPORTED,
                     "set_active_ranks: NCCL cannot go on without a rank; destroy the dispatchers, "
                     "and create them anew with the ranks that are left");
}

// ---- open and close ----------------------------------------------------------------------------

// An exchange of no results, which have no counts that anybody would look at, so that NCCL has
// connected all ranks, and taken its memory, before the first forward.
static int32_t connect_peers(struct exchange_group *group, struct exchange *slot,
                             moxie_error *error)
{
    const moxie_batch batch = {.struct_size = sizeof batch};
    const struct exchange_round round = {.batch = &batch};
    int32_t st = MOXIE_OK;

    TRY(send_nccl(group, slot, &round, WORD_COMBINE, error));
    TRY(wait_nccl(group, slot, &round, WORD_COMBINE, error));
    TRY(wait_ahead(group, 0, error));
    TRY(failure_nccl(group, error));
    if (ahead(group) != 0)
        st = fail_with(error, MOXIE_E_TIMEOUT,
                       "the ranks' first exchange over NCCL did not end within timeout_ms = %d",
                       exchange_limits(group)->timeout_ms);
out:
    return st;
}

static int32_t open_nccl(struct exchange_group *group, struct exchange *slots, int32_t slots_count,
                         moxie_error *error)
{
    int32_t st = MOXIE_OK;

    for (int32_t i = 0; i < slots_count; i++)
        slots[i].window->staging = memory_slot(&group->instance->memory, BUFFER_STAGING, i);
    group->watch = calloc(1, sizeof *group->watch);
    if (group->watch == NULL || pthread_mutex_init(&group->watch->lock, NULL) != 0) {
        free(group->watch);
        group->watch = NULL;
        TRY(fail_with(error, MOXIE_E_MEMORY, "no memory to watch NCCL with"));
    }
    TRY(exchange_flags_device.open(group, slots, slots_count, error));
    TRY(connect_peers(group, &slots[0], error));
out:
    return st;
}

// What is under way gets its time; NCCL is left in peace only if all of it is done.
static void close_nccl(struct exchange_group *group)
{
    const moxie_error late = {.rank = -1};

    if (group->watch == NULL) return;
    if (group->report != NULL) {
        if (wait_ahead(group, 0, NULL) == MOXIE_OK && ahead(group) == 0)
            nccl_finish(group->transport);
        else
            (void)give_up(group, MOXIE_E_TIMEOUT, &late, NULL);
    }
    exchange_flags_device.close(group);
    (void)pthread_mutex_destroy(&group->watch->lock);
    free(group->watch);
    group->watch = NULL;
}

const struct exchange_flags exchange_flags_nccl = {
    .open = open_nccl,
    .close = close_nccl,
    .begin = begin_nccl,
    .send = send_nccl,
    .wait = wait_nccl,
    .regroup = regroup_nccl,
    .failure = failure_nccl,
};
