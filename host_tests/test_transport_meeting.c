// plugin/transport_meeting.c: what a rank makes of its peers' messages, in which they may write
// anything.

#include "plugin/transport_meeting.h"

#include "host_tests/said.h"
#include "host_tests/suite.h"

#include <string.h>

#define RANKS  2
#define WINDOW 3 // windows asked for so far

// Rank 0 of two; rank 1 answers what a test says.
struct pair {
    struct meeting_message answer; // of its status, blame, window and text
    struct bootstrap bootstrap;
    struct meeting meeting;
    struct said said;
};

static int32_t answer_gather(void *ctx, const void *send, void *recv, uint64_t bytes)
{
    const struct pair *pair = ctx;
    struct meeting_message *all = recv;

    ck_assert_uint_eq(bytes, sizeof all[0]);
    memcpy(&all[0], send, bytes);
    all[1] = all[0];
    all[1].rank = 1;
    all[1].status = pair->answer.status;
    all[1].blame = pair->answer.blame;
    all[1].window = pair->answer.window;
    memcpy(all[1].text, pair->answer.text, sizeof all[1].text);
    return 0;
}

static void pair_init(struct pair *pair)
{
    const struct meeting_identity nobody = {.pid = 0};

    memset(pair, 0, sizeof *pair);
    said_init(&pair->said);
    pair->bootstrap = (struct bootstrap){.all_gather = answer_gather, .ctx = pair, .ranks = RANKS};
    pair->answer.blame = -1;
    pair->answer.window = WINDOW;
    meeting_init(&pair->meeting, &pair->bootstrap, &nobody, WINDOW);
}

static int32_t failing_gather(void *ctx, const void *send, void *recv, uint64_t bytes)
{
    (void)ctx;
    (void)send;
    (void)recv;
    (void)bytes;
    return 7;
}

static int32_t meet(struct pair *pair)
{
    return meeting_meet(&pair->meeting, STAGE_MADE, MOXIE_OK, &pair->said.error);
}

// One that has asked for another number of windows is not met, at whatever stage it is.
START_TEST(ranks_open_windows_in_step)
{
    struct pair pair;

    pair_init(&pair);
    ACCEPTED(&pair.said, meet(&pair));
    pair.answer.window = WINDOW + 1;
    SAID(&pair.said, MOXIE_E_COLLECTIVE_MISMATCH, meet(&pair), "rank 1 is at another point");
    ck_assert_int_eq(pair.said.error.rank, 1);
}
END_TEST

// A host may well use it as an index. What is no rank's number blames the rank that says it.
START_TEST(whom_a_rank_blames_is_a_rank)
{
    static const struct {
        int32_t blame, rank;
    } rows[] = {{0, 0}, {1, 1}, {-1, 1}, {RANKS, 1}, {INT32_MAX, 1}, {INT32_MIN, 1}};
    struct pair pair;

    pair_init(&pair);
    pair.answer.status = MOXIE_E_MEMORY;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        pair.answer.blame = rows[i].blame;
        SAID(&pair.said, MOXIE_E_MEMORY, meet(&pair), "rank 1: ");
        ck_assert_int_eq(pair.said.error.rank, rows[i].rank);
    }
}
END_TEST

// It goes to logs and terminals, and need not end.
START_TEST(what_a_rank_says_is_printable)
{
    static const char words[] = "no\nroom \033[31m";
    struct pair pair;

    pair_init(&pair);
    pair.answer.status = MOXIE_E_MEMORY;
    memset(pair.answer.text, 0xff, sizeof pair.answer.text);
    memcpy(pair.answer.text, words, strlen(words));
    ck_assert_int_eq(meet(&pair), MOXIE_E_MEMORY);
    ck_assert_msg(strstr(pair.said.text, "rank 1: no?room ?[31m???") != NULL, "%s", pair.said.text);
    ck_assert_uint_eq(strlen(pair.said.text), strlen("rank 1: ") + FAILURE_TEXT_BYTES - 1);
}
END_TEST

// A step that named a peer failed because ranks leave, and that one may be as healthy as this.
START_TEST(a_failed_meeting_blames_no_peer)
{
    struct pair pair;
    int32_t step;

    pair_init(&pair);
    pair.bootstrap.all_gather = failing_gather;
    SAID(&pair.said, MOXIE_E_PEER, meet(&pair), "all_gather failed (7) between 2 ranks");
    for (int32_t blame = -1; blame < RANKS; blame++) {
        step = fail_rank(&pair.meeting.local, MOXIE_E_UNAVAILABLE, blame, "no window here");
        step = meeting_meet(&pair.meeting, STAGE_MAPPED, step, &pair.said.error);
        ck_assert_int_eq(pair.said.error.rank, blame == 1 ? -1 : blame);
        if (blame == 1)
            SAID(&pair.said, MOXIE_E_PEER, step, "all_gather failed (7)", "no window here");
        else
            SAID(&pair.said, MOXIE_E_UNAVAILABLE, step, "rank 0: no window here");
    }
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, ranks_open_windows_in_step);
    tcase_add_test(tests, whom_a_rank_blames_is_a_rank);
    tcase_add_test(tests, what_a_rank_says_is_printable);
    tcase_add_test(tests, a_failed_meeting_blames_no_peer);
}

SUITE_MAIN("transport_meeting", 10, add)
