// plugin/digest.c: ranks as threads that differ, fail or stay away; each of them learns which one
// and why, and none waits for ever.

#include "plugin/digest.h"

#include "host_tests/mock_host.h"
#include "host_tests/said.h"
#include "host_tests/suite.h"

#include <stdio.h>
#include <string.h>

#define RANKS 4

struct rank {
    struct said said;
    int32_t answer;
};

// One comparison, in which `odd` is unlike the others: by a key, a status, or what it says of
// itself.
struct run {
    struct mock_group *group;
    int32_t odd;
    const char *key, *text; // text NULL: `number`
    int64_t number;
    const char *further[2];  // keys that are 1
    int32_t status;          // of `odd`
    int32_t own_rank, ranks; // of `odd`
    int32_t absent;          // `odd` does not come
    struct rank rank[RANKS];
};

static struct run run_of(int32_t odd)
{
    return (struct run){.odd = odd, .own_rank = odd, .ranks = RANKS};
}

static void body(void *arg, int32_t index)
{
    struct run *run = arg;
    struct rank *rank = &run->rank[index];
    struct mock_host *mock = calloc(1, sizeof *mock);
    struct config config;
    struct report report = {0};
    struct bootstrap bootstrap;
    int32_t status = MOXIE_OK;

    ck_assert_ptr_nonnull(mock);
    said_init(&rank->said);
    mock_host_init(mock);
    mock_host_join(mock, run->group, index);
    if (index == run->odd && run->key != NULL && run->text != NULL)
        mock_set_str(mock, run->key, run->text);
    else if (index == run->odd && run->key != NULL)
        mock_set_i64(mock, run->key, run->number);
    for (int32_t i = 0; index == run->odd && i < 2 && run->further[i] != NULL; i++)
        mock_set_i64(mock, run->further[i], 1);
    config_read(&config, &mock->host, &report);
    bootstrap = (struct bootstrap){.all_gather = mock->host.all_gather,
                                   .ctx = mock,
                                   .rank = index == run->odd ? run->own_rank : index,
                                   .ranks = index == run->odd ? run->ranks : RANKS};
    if (index == run->odd && run->status != MOXIE_OK)
        status = fail_with(&rank->said.error, run->status, "its own words");
    if (index != run->odd || !run->absent)
        rank->answer = digest_compare(&bootstrap, &config, status, &rank->said.error);
    report_fini(&report);
    mock_host_fini(mock);
    free(mock);
}

static void compare(struct run *run, int32_t timeout_ms)
{
    run->group = mock_group_create(RANKS, timeout_ms);
    mock_ranks_run(RANKS, body, run);
    mock_group_destroy(run->group);
}

// Every rank but the odd one answers `code`, blames it, and says both words.
static void check_others(struct run *run, int32_t code, const char *first, const char *second)
{
    char name[32];

    (void)snprintf(name, sizeof name, "%d", run->odd);
    for (int32_t i = 0; i < RANKS; i++) {
        if (i == run->odd) continue;
        ck_assert_int_eq(run->rank[i].said.error.rank, run->odd);
        SAID(&run->rank[i].said, code, run->rank[i].answer, name, first, second);
    }
}

START_TEST(equal_ranks_agree)
{
    struct run run = run_of(-1);

    compare(&run, 20000);
    for (int32_t i = 0; i < RANKS; i++)
        ACCEPTED(&run.rank[i].said, run.rank[i].answer);
}
END_TEST

START_TEST(a_key_that_differs_is_named)
{
    static const struct {
        const char *key, *text;
        int64_t number;
        const char *seen, *here;
    } keys[] = {
        {"hidden_size", NULL, 128, "hidden_size is 128", "64 here"},
        {"top_k", NULL, 1, "top_k is 1", "2 here"},
        {"weight_format", "mxfp4", 0, "weight_format is mxfp4", "bf16 here"},
        {"dispatcher", "allgather", 0, "dispatcher is allgather", "auto here"},
        {"timeout_ms", NULL, 5, "timeout_ms is 5", "30000 here"},
    };

    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        for (int32_t odd = 0; odd < RANKS; odd++) {
            struct run run = run_of(odd);

            run.key = keys[i].key;
            run.text = keys[i].text;
            run.number = keys[i].number;
            compare(&run, 20000);
            check_others(&run, MOXIE_E_COLLECTIVE_MISMATCH, keys[i].seen, keys[i].here);
            // The odd one cannot know that it is: it blames the first of the others.
            ck_assert_int_eq(run.rank[odd].said.error.rank, odd == 0 ? 1 : 0);
            SAID(&run.rank[odd].said, MOXIE_E_COLLECTIVE_MISMATCH, run.rank[odd].answer,
                 keys[i].key, "set it alike");
        }
    }
}
END_TEST

// Otherwise a host would set one alike, start all ranks again, and hear of the next.
START_TEST(further_keys_that_differ_are_named)
{
    struct run run = run_of(1);

    run.key = "hidden_size";
    run.number = 128;
    run.further[0] = "top_k";
    run.further[1] = "num_experts";
    compare(&run, 20000);
    check_others(&run, MOXIE_E_COLLECTIVE_MISMATCH, "hidden_size is 128",
                 "set it alike on every rank; also num_experts, top_k");
    run.further[0] = run.further[1] = NULL;
    compare(&run, 20000);
    ck_assert_ptr_null(strstr(run.rank[0].said.text, "also"));
}
END_TEST

START_TEST(some_keys_may_differ)
{
    static const char *const keys[] = {"cpu_threads", "device_memory_budget_bytes"};

    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        struct run run = run_of(2);

        run.key = keys[i];
        run.number = 7;
        compare(&run, 20000);
        for (int32_t rank = 0; rank < RANKS; rank++)
            ACCEPTED(&run.rank[rank].said, run.rank[rank].answer);
    }
}
END_TEST

START_TEST(a_rank_that_failed_takes_all_along)
{
    static const int32_t codes[] = {MOXIE_E_MEMORY, MOXIE_E_CONFIG, MOXIE_E_INVALID};
    static const char *const names[] = {"MEMORY", "CONFIG", "INVALID"};

    for (int32_t odd = 0; odd < RANKS; odd++) {
        struct run run = run_of(odd);

        run.status = codes[odd % 3];
        compare(&run, 20000);
        check_others(&run, MOXIE_E_UNAVAILABLE, "failed with", names[odd % 3]);
        SAID(&run.rank[odd].said, codes[odd % 3], run.rank[odd].answer, "its own words");
    }
}
END_TEST

// Why it failed says more than that it failed.
START_TEST(a_key_explains_a_failure)
{
    struct run run = run_of(1);

    run.status = MOXIE_E_CONFIG;
    run.key = "ep_size";
    run.number = 2;
    compare(&run, 20000);
    check_others(&run, MOXIE_E_COLLECTIVE_MISMATCH, "ep_size is 2", "4 here");
    SAID(&run.rank[1].said, MOXIE_E_CONFIG, run.rank[1].answer, "its own words");
}
END_TEST

START_TEST(places_are_ep_ranks)
{
    struct run twice = run_of(3), beyond = run_of(1);

    twice.own_rank = 0;
    compare(&twice, 20000);
    check_others(&twice, MOXIE_E_COLLECTIVE_MISMATCH, "place 3 of all_gather holds ep_rank 0 of 4",
                 "want 3 of 4");
    beyond.own_rank = 9;
    compare(&beyond, 20000);
    check_others(&beyond, MOXIE_E_COLLECTIVE_MISMATCH, "place 1 of all_gather holds ep_rank 9 of 4",
                 "want 1 of 4");
}
END_TEST

// What all_gather brings is more, or less, than the rank's ep_size says.
START_TEST(numbers_of_ranks_differ)
{
    struct run fewer = run_of(0), more = run_of(2);

    fewer.ranks = 2;
    compare(&fewer, 20000);
    check_others(&fewer, MOXIE_E_COLLECTIVE_MISMATCH, "ep_rank 0 of 2", "want 0 of 4");
    SAID(&fewer.rank[0].said, MOXIE_E_COLLECTIVE_MISMATCH, fewer.rank[0].answer, "ep_rank 1 of 4",
         "want 1 of 2");
    more.ranks = 9;
    compare(&more, 20000);
    check_others(&more, MOXIE_E_COLLECTIVE_MISMATCH, "ep_rank 2 of 9", "want 2 of 4");
    SAID(&more.rank[2].said, MOXIE_E_COLLECTIVE_MISMATCH, more.rank[2].answer, "ep_rank 0 of 4",
         "want 0 of 9");
}
END_TEST

// A host whose all_gather exchanges the places of ranks 1 and 2.
static int32_t swapped(void *ctx, const void *send, void *recv, uint64_t bytes)
{
    unsigned char *first = (unsigned char *)recv + bytes, *second = first + bytes;
    struct mock_host *mock = ctx;
    int32_t answer = mock->host.all_gather(ctx, send, recv, bytes);

    for (uint64_t i = 0; answer == 0 && i < bytes; i++) {
        unsigned char byte = first[i];

        first[i] = second[i];
        second[i] = byte;
    }
    return answer;
}

static void swapped_body(void *arg, int32_t index)
{
    struct run *run = arg;
    struct rank *rank = &run->rank[index];
    struct mock_host *mock = calloc(1, sizeof *mock);
    struct config config;
    struct report report = {0};
    struct bootstrap bootstrap = {
        .all_gather = swapped, .ctx = mock, .rank = index, .ranks = RANKS};

    ck_assert_ptr_nonnull(mock);
    said_init(&rank->said);
    mock_host_init(mock);
    mock_host_join(mock, run->group, index);
    config_read(&config, &mock->host, &report);
    rank->answer = digest_compare(&bootstrap, &config, MOXIE_OK, &rank->said.error);
    report_fini(&report);
    mock_host_fini(mock);
    free(mock);
}

START_TEST(swapped_places_are_told)
{
    struct run run = run_of(-1);

    run.group = mock_group_create(RANKS, 20000);
    mock_ranks_run(RANKS, swapped_body, &run);
    mock_group_destroy(run.group);
    for (int32_t i = 0; i < RANKS; i++) {
        ck_assert_int_eq(run.rank[i].said.error.rank, 1);
        SAID(&run.rank[i].said, MOXIE_E_COLLECTIVE_MISMATCH, run.rank[i].answer,
             "place 1 of all_gather holds ep_rank 2 of 4", "give every rank its own ep_rank");
    }
}
END_TEST

START_TEST(a_rank_that_stays_away_hangs_nobody)
{
    struct run run = run_of(2);

    run.absent = 1;
    compare(&run, 100);
    for (int32_t i = 0; i < RANKS; i++) {
        if (i == 2) continue;
        SAID(&run.rank[i].said, MOXIE_E_UNAVAILABLE, run.rank[i].answer, "all_gather failed");
    }
}
END_TEST

// ---- Peers that are another build --------------------------------------------------------------

// An all_gather that answers for three peers; the first 72 bytes of a message are the same in every
// version: ABI, bytes to come, status, rank, ranks, ready, build.
struct forger {
    int32_t word;   // of rank 1's head: which is replaced
    uint32_t value; // by what
    const char *build;
    const char *hidden_size; // what rank 1 says of that key
    uint64_t calls;
    uint64_t bytes[2];
    int32_t fewer;  // only this many places are filled
    uint64_t fails; // which call fails; 0: none
};

static int32_t forge(void *ctx, const void *send, void *recv, uint64_t bytes)
{
    struct forger *forger = ctx;

    if (forger->calls < 2) forger->bytes[forger->calls] = bytes;
    for (int32_t rank = 0; rank < RANKS - forger->fewer; rank++) {
        unsigned char *at = (unsigned char *)recv + (uint64_t)rank * bytes;

        memcpy(at, send, bytes);
        if (forger->calls > 0 && rank == 1 && forger->hidden_size != NULL)
            memcpy(at, forger->hidden_size, CONFIG_TEXT_BYTES);
        if (forger->calls > 0) continue;
        memcpy(at + 12, &rank, sizeof rank);
        if (rank == 1 && forger->word >= 0)
            memcpy(at + 4 * forger->word, &forger->value, sizeof forger->value);
        if (rank == 1 && forger->build != NULL) memcpy(at + 24, forger->build, 48);
    }
    return ++forger->calls == forger->fails;
}

static int32_t compare_forged(struct forger *forger, struct said *said)
{
    struct bootstrap bootstrap = {.all_gather = forge, .ctx = forger, .rank = 0, .ranks = RANKS};
    struct mock_host mock;
    struct config config;
    struct report report = {0};
    int32_t answer;

    said_init(said);
    mock_host_init(&mock);
    config_read(&config, &mock.host, &report);
    answer = digest_compare(&bootstrap, &config, MOXIE_OK, &said->error);
    report_fini(&report);
    mock_host_fini(&mock);
    return answer;
}

// Errors are for people and terminals.
START_TEST(what_a_peer_says_is_cleaned)
{
    static const char build[48] = "their\033[2J", key[CONFIG_TEXT_BYTES] = "6\n4\xff";
    char endless[CONFIG_TEXT_BYTES];
    struct forger forgers[] = {{.word = -1, .build = build},
                               {.word = -1, .hidden_size = key},
                               {.word = -1, .hidden_size = memset(endless, '7', sizeof endless)}};
    static const char *const texts[] = {
        "runs build their?[2J, this", "hidden_size is 6?4? on rank 1", "777 on rank 1 and 64 here"};
    struct said said;

    for (size_t i = 0; i < 3; i++)
        SAID(&said, MOXIE_E_COLLECTIVE_MISMATCH, compare_forged(&forgers[i], &said), texts[i]);
}
END_TEST

START_TEST(heads_have_a_size_for_ever)
{
    struct forger forger = {.word = -1};
    struct said said;

    ACCEPTED(&said, compare_forged(&forger, &said));
    ck_assert_uint_eq(forger.calls, 2);
    ck_assert_uint_eq(forger.bytes[0], 72);
}
END_TEST

START_TEST(other_builds_are_refused_before_their_keys_are_read)
{
    static const char build[48] = "0123456789abcdef";
    static const char endless[48] = "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx";
    struct forger abi = {.word = 0, .value = MOXIE_ABI(7, 9)};
    struct forger keys = {.word = 1, .value = 64};
    struct forger other = {.word = -1, .build = build};
    struct forger cut = {.word = -1, .build = endless};
    struct said said;

    SAID(&said, MOXIE_E_COLLECTIVE_MISMATCH, compare_forged(&abi, &said), "rank 1 speaks ABI 7.9",
         "0.1");
    ck_assert_uint_eq(abi.calls, 1);
    SAID(&said, MOXIE_E_COLLECTIVE_MISMATCH, compare_forged(&keys, &said), "rank 1 runs build");
    ck_assert_uint_eq(keys.calls, 1);
    SAID(&said, MOXIE_E_COLLECTIVE_MISMATCH, compare_forged(&other, &said),
         "rank 1 runs build 0123456789abcdef", digest_source_id());
    ck_assert_int_eq(said.error.rank, 1);
    SAID(&said, MOXIE_E_COLLECTIVE_MISMATCH, compare_forged(&cut, &said), "build xxxx");
}
END_TEST

START_TEST(a_rank_without_memory_ends_it_for_all)
{
    struct forger forger = {.word = 5, .value = 0};
    struct said said;

    // It has nowhere to gather the keys, so nobody does.
    SAID(&said, MOXIE_E_UNAVAILABLE, compare_forged(&forger, &said), "rank 1 failed with MEMORY");
    ck_assert_uint_eq(forger.calls, 1);
    forger = (struct forger){.word = 2, .value = MOXIE_E_MEMORY};
    SAID(&said, MOXIE_E_UNAVAILABLE, compare_forged(&forger, &said), "rank 1 failed with MEMORY");
    forger = (struct forger){.word = 2, .value = 12345};
    SAID(&said, MOXIE_E_UNAVAILABLE, compare_forged(&forger, &said), "rank 1 failed with UNKNOWN");
}
END_TEST

// In the second call a peer that was there has gone.
START_TEST(a_peer_that_goes_is_a_peer)
{
    struct forger first = {.word = -1, .fails = 1}, second = {.word = -1, .fails = 2};
    struct said said;

    SAID(&said, MOXIE_E_UNAVAILABLE, compare_forged(&first, &said), "all_gather failed");
    SAID(&said, MOXIE_E_PEER, compare_forged(&second, &said), "all_gather failed");
    ck_assert_int_eq(said.error.rank, -1);
}
END_TEST

START_TEST(an_empty_place_is_told)
{
    struct forger forger = {.word = -1, .fewer = 1};
    struct said said;

    SAID(&said, MOXIE_E_COLLECTIVE_MISMATCH, compare_forged(&forger, &said), "nothing for rank 3",
         "ep_size 4");
    ck_assert_int_eq(said.error.rank, 3);
}
END_TEST

START_TEST(too_many_ranks_are_refused)
{
    struct bootstrap bootstrap = {.ranks = MOXIE_RANKS_MAX + 1};
    struct config config;
    struct said said;

    memset(&config, 0, sizeof config);
    said_init(&said);
    SAID(&said, MOXIE_E_INVALID, digest_compare(&bootstrap, &config, MOXIE_OK, &said.error),
         "ep_size is 65", "64");
    ck_assert_int_eq(digest_compare(&bootstrap, &config, MOXIE_E_CONFIG, NULL), MOXIE_E_CONFIG);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, equal_ranks_agree);
    tcase_add_test(tests, a_key_that_differs_is_named);
    tcase_add_test(tests, further_keys_that_differ_are_named);
    tcase_add_test(tests, some_keys_may_differ);
    tcase_add_test(tests, a_rank_that_failed_takes_all_along);
    tcase_add_test(tests, a_key_explains_a_failure);
    tcase_add_test(tests, places_are_ep_ranks);
    tcase_add_test(tests, numbers_of_ranks_differ);
    tcase_add_test(tests, swapped_places_are_told);
    tcase_add_test(tests, a_rank_that_stays_away_hangs_nobody);
    tcase_add_test(tests, what_a_peer_says_is_cleaned);
    tcase_add_test(tests, heads_have_a_size_for_ever);
    tcase_add_test(tests, other_builds_are_refused_before_their_keys_are_read);
    tcase_add_test(tests, a_rank_without_memory_ends_it_for_all);
    tcase_add_test(tests, a_peer_that_goes_is_a_peer);
    tcase_add_test(tests, an_empty_place_is_told);
    tcase_add_test(tests, too_many_ranks_are_refused);
}

SUITE_MAIN("digest", 60, add)
