// plugin/exchange_flags.c: whom a wait names that ends without its flags, and what it takes of
// peers that have sent theirs. The transport and the clock are scripted, so no test takes time.

#include "plugin/exchange_flags.h"

#include "plugin/exchange_verdict.h"

#include "host_tests/suite.h"

#include <string.h>

#define RANKS      3
#define PEERS_MASK 0x7u
#define TIMEOUT_MS 40

// Words that a test sets, and peers that only wait.
struct transport {
    uint64_t words[WORD_COUNT][RANKS];
    uint64_t beating;     // ranks that are heard whenever this one wakes
    int32_t beats[RANKS]; // WORD_BEAT signals to each rank
    int64_t stopped_ns;   // how much too late the first wait ends, with nobody heard
    int64_t arrives_ns; // then, behind a look at the flags, all come while this one is stopped; 0:
                        // never
    int32_t arrives_behind; // enum flag_word of that look, at the last rank
    const struct window *beat_window;
};

static int64_t now_ns;

// Used: by nobody that an optimising linker sees.
int64_t __wrap_clock_ns(void);
__attribute__((used)) int64_t __wrap_clock_ns(void)
{
    return now_ns;
}

static uint64_t scripted_read(struct transport *transport, struct window *window, int32_t source,
                              enum flag_word word)
{
    const uint64_t seen = transport->words[word][source];

    ck_assert((word == WORD_BEAT) == (window == transport->beat_window));
    if ((int32_t)word == transport->arrives_behind && source == RANKS - 1 &&
        transport->arrives_ns != 0 && now_ns >= transport->arrives_ns) {
        now_ns += 3 * TIMEOUT_MS * INT64_C(1000000);
        transport->arrives_ns = 0;
        for (int32_t rank = 1; rank < RANKS; rank++)
            transport->words[WORD_DISPATCH][rank] = 1;
    }
    return seen;
}

static void scripted_signal(struct transport *transport, struct window *window, int32_t peer,
                            enum flag_word word, uint64_t value)
{
    ck_assert_ptr_eq(window, transport->beat_window);
    ck_assert_int_eq(word, WORD_BEAT);
    transport->beats[peer]++;
    ck_assert_uint_eq(value, (uint64_t)transport->beats[peer]);
}

static uint32_t scripted_ticket(struct transport *transport, struct window *window)
{
    (void)transport;
    (void)window;
    return 0;
}

static void scripted_wait(struct transport *transport, struct window *window, uint32_t ticket,
                          int64_t deadline_ns)
{
    (void)window;
    (void)ticket;
    if (transport->words[WORD_DISPATCH][1] == 0) ck_assert_int_gt(deadline_ns, now_ns);
    if (deadline_ns > now_ns) now_ns = deadline_ns + transport->stopped_ns;
    for (int32_t rank = 0; transport->stopped_ns == 0 && rank < RANKS; rank++)
        transport->words[WORD_BEAT][rank] += transport->beating >> rank & 1;
    transport->stopped_ns = 0;
}

static const struct transport_ops scripted = {.signal = scripted_signal,
                                              .read = scripted_read,
                                              .ticket = scripted_ticket,
                                              .wait = scripted_wait};

// Rank 0 of three waits for rows that nobody sends.
struct alone {
    moxie_instance instance;
    struct transport transport;
    struct window beat_window, window;
    struct exchange_group group;
    struct exchange slot;
    char text[512];
    moxie_error error;
};

static void alone_init(struct alone *alone)
{
    memset(alone, 0, sizeof *alone);
    alone->instance.plan.limits.ranks = RANKS;
    alone->instance.plan.limits.timeout_ms = TIMEOUT_MS;
    alone->transport.beat_window = &alone->beat_window;
    alone->group.instance = &alone->instance;
    alone->group.ops = &scripted;
    alone->group.transport = &alone->transport;
    alone->group.beat_window = &alone->beat_window;
    alone->group.active = PEERS_MASK;
    alone->slot.window = &alone->window;
    alone->slot.epoch = 1;
    alone->error = (moxie_error){
        .struct_size = sizeof alone->error, .text_bytes = sizeof alone->text, .text = alone->text};
}

static void expect(struct alone *alone, int32_t answer, int32_t code, int32_t rank,
                   const char *words)
{
    ck_assert_int_eq(answer, code);
    ck_assert_int_eq(alone->error.rank, rank);
    ck_assert_msg(strstr(alone->text, words) != NULL, "%s", alone->text);
}

static void expect_wait(struct alone *alone, int32_t code, int32_t rank, const char *words)
{
    expect(alone, exchange_wait(&alone->group, &alone->slot, WORD_DISPATCH, &alone->error), code,
           rank, words);
}

// ---- silence -----------------------------------------------------------------------------------

// Rank 1 waits as this one does: rank 2 is the one that is gone.
START_TEST(names_the_rank_that_all_wait_for)
{
    struct alone alone;

    alone_init(&alone);
    alone.transport.beating = 1u << 1;
    expect_wait(&alone, MOXIE_E_PEER, 2, "rank 2 sent no rows of epoch 1");
    ck_assert_int_ge(alone.transport.beats[1], 4);
    ck_assert_int_eq(alone.transport.beats[1], alone.transport.beats[2]);
    ck_assert_int_eq(alone.transport.beats[0], 0);
    // It may be alive.
    expect(&alone, MOXIE_E_PEER, MOXIE_E_PEER, 2, "it is gone (call set_active_ranks without it)");
    expect(&alone, MOXIE_E_PEER, MOXIE_E_PEER, 2, "a rank without tokens makes it too");
    expect(&alone, MOXIE_E_PEER, MOXIE_E_PEER, 2, "set timeout_ms higher");
}
END_TEST

// Heard in an earlier wait, not in this one.
START_TEST(names_a_rank_that_waits_no_more)
{
    struct alone alone;

    alone_init(&alone);
    alone.transport.words[WORD_BEAT][1] = 5;
    alone.instance.plan.limits.timeout_ms = 0;
    expect_wait(&alone, MOXIE_E_PEER, 1, "silent in all: 2");
    alone.instance.plan.limits.timeout_ms = TIMEOUT_MS;
    alone.transport.beating = 1u << 2;
    expect_wait(&alone, MOXIE_E_PEER, 1, "silent in all: 2");
}
END_TEST

START_TEST(names_nobody_when_all_wait)
{
    struct alone alone;

    alone_init(&alone);
    alone.transport.beating = 1u << 1 | 1u << 2;
    expect_wait(&alone, MOXIE_E_TIMEOUT, -1, "the ranks 0x6 sent no rows");
}
END_TEST

START_TEST(tells_no_rank_left_out_that_it_waits)
{
    struct alone alone;

    alone_init(&alone);
    alone.group.active = PEERS_MASK & ~(1u << 1);
    expect_wait(&alone, MOXIE_E_PEER, 2, "silent in all: 1");
    ck_assert_int_eq(alone.transport.beats[1], 0);
    ck_assert_int_ge(alone.transport.beats[2], 4);
}
END_TEST

// Stopped from its first sleep until long after its time: rank 1, which waits as well, is heard
// only now.
START_TEST(listens_on_after_it_was_stopped)
{
    struct alone alone;
    int64_t began_ns = now_ns;

    alone_init(&alone);
    alone.transport.beating = 1u << 1;
    alone.transport.stopped_ns = 10 * TIMEOUT_MS * INT64_C(1000000);
    expect_wait(&alone, MOXIE_E_PEER, 2, "rank 2 sent no rows of epoch 1");
    ck_assert_int_le(now_ns - began_ns, 11 * TIMEOUT_MS * INT64_C(1000000));
}
END_TEST

// Stopped behind its last look at the flags, at once or when it has looked at generations, while
// they come: it looks again.
START_TEST(a_flag_that_has_come_is_not_silence)
{
    struct alone alone;

    alone_init(&alone);
    alone.transport.arrives_behind = _i == 0 ? WORD_DISPATCH : WORD_GENERATION;
    alone.transport.arrives_ns = now_ns + TIMEOUT_MS * INT64_C(1000000) * 6 / 10;
    ck_assert_int_eq(exchange_wait(&alone.group, &alone.slot, WORD_DISPATCH, &alone.error),
                     MOXIE_OK);
}
END_TEST

// All have gone on, and have sent rows there: none of those is waited for here.
START_TEST(a_flag_of_a_later_generation_is_not_of_this_one)
{
    struct alone alone;

    alone_init(&alone);
    for (int32_t rank = 1; rank < RANKS; rank++) {
        alone.transport.words[WORD_DISPATCH][rank] = UINT64_C(1) << FLAG_EPOCH_BITS | 1;
        alone.transport.words[WORD_ACTIVE][rank] = PEERS_MASK;
        alone.transport.words[WORD_GENERATION][rank] = 1;
    }
    expect_wait(&alone, MOXIE_E_PEER, -1, "rank 1 has moved on to generation 1");
}
END_TEST

// ---- generations -------------------------------------------------------------------------------

// set_active_ranks with the ranks there are, on rank 1 alone: nobody is gone.
START_TEST(names_nobody_when_nobody_was_left_out)
{
    struct alone alone;

    alone_init(&alone);
    alone.transport.words[WORD_ACTIVE][1] = PEERS_MASK;
    alone.transport.words[WORD_GENERATION][1] = 1;
    expect_wait(&alone, MOXIE_E_PEER, -1, "rank 1 has moved on to generation 1 with the same");
    ck_assert_int_eq(alone.transport.beats[1], 0);
}
END_TEST

START_TEST(names_whom_the_others_left_out)
{
    struct alone alone;

    alone_init(&alone);
    alone.transport.words[WORD_ACTIVE][1] = PEERS_MASK & ~(1u << 2);
    alone.transport.words[WORD_GENERATION][1] = 1;
    expect_wait(&alone, MOXIE_E_PEER, 2, "rank 2 was left out by rank 1");
}
END_TEST

// Whatever generation the two are in: hosts that disagree may have counted differently. Told of the
// ranks but not yet of the generation is as good.
START_TEST(a_rank_left_out_hears_it_in_any_generation)
{
    struct alone alone;

    alone_init(&alone);
    alone.group.generation = 2;
    alone.transport.words[WORD_ACTIVE][1] = PEERS_MASK;
    alone.transport.words[WORD_GENERATION][1] = 2;
    alone.transport.words[WORD_ACTIVE][2] = PEERS_MASK & ~1u;
    alone.transport.words[WORD_GENERATION][2] = (uint64_t)_i;
    expect(&alone, exchange_check_peers(&alone.group, &alone.slot, &alone.error), MOXIE_E_PEER, 2,
           "rank 2 has left this rank out");
    expect_wait(&alone, MOXIE_E_PEER, 2, "goes on with the ranks 0x6");
    // What a rank says that is left out itself does not matter.
    alone.group.active = alone.transport.words[WORD_ACTIVE][1] = PEERS_MASK & ~(1u << 2);
    ck_assert_int_eq(exchange_check_peers(&alone.group, &alone.slot, &alone.error), MOXIE_OK);
}
END_TEST

// Rank 1's words, while this rank is in generation 2 and has left out rank 2.
START_TEST(masks_of_one_generation_agree)
{
    static const struct {
        uint64_t generation, active;
        int32_t code, rank;
        const char *words;
    } rows[] = {
        {2, 0x7, MOXIE_E_COLLECTIVE_MISMATCH, 1,
         "the ranks 0x7, this rank with 0x3, both in generation 2; pass one mask"},
        {2, 0x3, MOXIE_OK, 0, ""},
        {2, 0, MOXIE_OK, 0, ""},
        {1, 0x7, MOXIE_OK, 0, ""}, // it has yet to make this rank's last call
        {1, 0x3, MOXIE_OK, 0, ""}, // and is about to
        {0, 0, MOXIE_OK, 0, ""},
    };

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct alone alone;

        alone_init(&alone);
        alone.group.generation = 2;
        alone.group.active = 0x3;
        alone.transport.words[WORD_GENERATION][1] = rows[i].generation;
        alone.transport.words[WORD_ACTIVE][1] = rows[i].active;
        expect(&alone, exchange_check_peers(&alone.group, &alone.slot, &alone.error), rows[i].code,
               rows[i].rank, rows[i].words);
    }
}
END_TEST

// Told of the ranks, it may yet tell of the generation.
START_TEST(a_peer_with_fewer_ranks_is_followed)
{
    struct alone alone;

    alone_init(&alone);
    alone.group.generation = 2;
    alone.transport.words[WORD_GENERATION][1] = 2;
    alone.transport.words[WORD_ACTIVE][1] = 0x3;
    expect_wait(&alone, MOXIE_E_PEER, 2, "rank 2 was left out by rank 1, which is in generation 2");
    ck_assert_int_eq(alone.transport.beats[1], 0);
    alone.transport.words[WORD_GENERATION][1] = 1;
    ck_assert_int_eq(exchange_check_peers(&alone.group, &alone.slot, &alone.error), MOXIE_OK);
}
END_TEST

static uint64_t told[2]; // of rank 1: which ranks go on, and in which generation

static void telling_signal(struct transport *transport, struct window *window, int32_t peer,
                           enum flag_word word, uint64_t value)
{
    (void)transport;
    (void)window;
    if (peer != 1) return;
    if (word == WORD_GENERATION) ck_assert_uint_eq(told[0], PEERS_MASK & ~(1u << 2));
    told[word == WORD_GENERATION] = value;
}

// A rank that reads the generation finds the ranks of it, or newer ones.
START_TEST(ranks_are_told_before_the_generation)
{
    const struct transport_ops telling = {.signal = telling_signal};
    struct alone alone;

    alone_init(&alone);
    alone.group.ops = &telling;
    memset(told, 0, sizeof told);
    exchange_regroup(&alone.group, &alone.slot, 1, PEERS_MASK & ~(1u << 2));
    ck_assert_uint_eq(told[1], 1);
    ck_assert_uint_eq(alone.slot.epoch, 0);
}
END_TEST

// ---- counts ------------------------------------------------------------------------------------

// A peer may write anything where its count is; and what is not moved is not counted.
START_TEST(a_negative_count_is_no_rows)
{
    const struct exchange_round round = {.tokens = 7, .rows_most = 8};
    unsigned char counts[(RANKS - 1) * FLAG_LINE_BYTES] = {0};
    struct alone alone;

    alone_init(&alone);
    alone.window.base = counts;
    alone.slot.counts = alone.slot.host_counts;
    for (int32_t rank = 1; rank < RANKS; rank++)
        alone.transport.words[WORD_DISPATCH][rank] = 1;
    ((struct round_count *)(void *)counts)->rows = 3;
    ((struct round_count *)(void *)(counts + FLAG_LINE_BYTES))->rows = -5;
    expect(&alone,
           exchange_flags_host.wait(&alone.group, &alone.slot, &round, WORD_DISPATCH, &alone.error),
           MOXIE_OK, 0, "");
    ck_assert_int_eq(alone.slot.host_counts[0], 7);
    ck_assert_int_eq(alone.slot.host_counts[1], 3);
    ck_assert_int_eq(alone.slot.host_counts[2], 0);
    ck_assert_uint_eq(alone.instance.stats.rows_received, 3);
}
END_TEST

// ---- texts -------------------------------------------------------------------------------------

// What is kept of a failure and told again is all of it, whatever the numbers are.
START_TEST(every_verdict_fits_where_it_is_kept)
{
    const struct flag_verdict verdict = {.kind = (uint32_t)_i,
                                         .rank = INT32_MIN,
                                         .told_rows = INT32_MIN,
                                         .epoch = UINT64_MAX,
                                         .generation = UINT64_MAX,
                                         .told_generation = UINT64_MAX,
                                         .told_active = UINT64_MAX >> 1,
                                         .silent = UINT64_MAX,
                                         .rows_most = INT32_MIN,
                                         .round = INT32_MIN,
                                         .told_round = INT32_MIN};
    char text[4 * FAILURE_TEXT_BYTES];
    struct alone alone;

    alone_init(&alone);
    alone.instance.plan.limits.timeout_ms = INT32_MIN;
    alone.group.active = UINT64_MAX;
    alone.error.text = text;
    alone.error.text_bytes = sizeof text;
    ck_assert_int_ne(verdict_say(&verdict, &alone.group, &alone.error), MOXIE_OK);
    ck_assert_msg(strlen(text) < FAILURE_TEXT_BYTES, "%zu: %s", strlen(text), text);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, names_the_rank_that_all_wait_for);
    tcase_add_test(tests, names_a_rank_that_waits_no_more);
    tcase_add_test(tests, names_nobody_when_all_wait);
    tcase_add_test(tests, tells_no_rank_left_out_that_it_waits);
    tcase_add_test(tests, listens_on_after_it_was_stopped);
    tcase_add_loop_test(tests, a_flag_that_has_come_is_not_silence, 0, 2);
    tcase_add_test(tests, a_flag_of_a_later_generation_is_not_of_this_one);
    tcase_add_test(tests, names_nobody_when_nobody_was_left_out);
    tcase_add_test(tests, names_whom_the_others_left_out);
    tcase_add_loop_test(tests, a_rank_left_out_hears_it_in_any_generation, 0, 4);
    tcase_add_test(tests, masks_of_one_generation_agree);
    tcase_add_test(tests, a_peer_with_fewer_ranks_is_followed);
    tcase_add_test(tests, ranks_are_told_before_the_generation);
    tcase_add_test(tests, a_negative_count_is_no_rows);
    tcase_add_loop_test(tests, every_verdict_fits_where_it_is_kept, VERDICT_LEFT_OUT,
                        VERDICT_MASKS + 1);
}

SUITE_MAIN("exchange_flags", 60, add)
