// host_tests/mock_host.c: the tools of the other suites, checked before they judge anything.

#include "host_tests/mock_host.h"

#include "host_tests/suite.h"

#include <string.h>

START_TEST(getters_answer_by_type)
{
    struct mock_host mock;
    char text[8];
    uint64_t length = 0;
    int64_t i64 = -7;
    double f64 = -7;

    mock_host_init(&mock);
    mock_set_str(&mock, "device", "cpu");
    mock_set_f64(&mock, "factor", 2.5);
    ck_assert_int_eq(mock.host.get_i64(&mock, "top_k", &i64), MOXIE_CONFIG_FOUND);
    ck_assert_int_eq(i64, 2);
    ck_assert_int_eq(mock.host.get_i64(&mock, "factor", &i64), MOXIE_CONFIG_WRONG_TYPE);
    ck_assert_int_eq(mock.host.get_i64(&mock, "nothing", &i64), MOXIE_CONFIG_ABSENT);
    ck_assert_int_eq(mock.host.get_f64(&mock, "top_k", &f64), MOXIE_CONFIG_FOUND);
    ck_assert_double_eq(f64, 2.0);
    ck_assert_int_eq(mock.host.get_f64(&mock, "device", &f64), MOXIE_CONFIG_WRONG_TYPE);
    ck_assert_int_eq(mock.host.get_str(&mock, "device", text, 3, &length), MOXIE_CONFIG_FOUND);
    ck_assert_str_eq(text, "cp");
    ck_assert_uint_eq(length, 3);
    mock_unset(&mock, "device");
    ck_assert_int_eq(mock.host.get_str(&mock, "device", text, 3, &length), MOXIE_CONFIG_ABSENT);
    mock_set_code(&mock, "top_k", 77);
    ck_assert_int_eq(mock.host.get_i64(&mock, "top_k", &i64), 77);
    ck_assert_uint_eq(mock.reads, 8);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(memory_is_counted_and_poisoned)
{
    struct mock_host mock;
    moxie_allocation request = {.struct_size = sizeof request,
                                .kind = MOXIE_MEMORY_DEVICE,
                                .bytes = 100,
                                .align = 128,
                                .name = "mid"};
    void *memory = NULL;

    mock_host_init(&mock);
    ck_assert_int_eq(mock.host.allocate(&mock, &request, &memory), 0);
    ck_assert_uint_eq((uintptr_t)memory % 128, 0);
    ck_assert_int_eq(((unsigned char *)memory)[99], MOCK_POISON);
    ck_assert_uint_eq(mock.bytes_live, 100);
    mock.host.release(&mock, &request, memory);
    mock.allocate_fail_at = 2;
    ck_assert_int_ne(mock.host.allocate(&mock, &request, &memory), 0);
    ck_assert_ptr_null(memory);
    ck_assert_uint_eq(mock.allocate_calls, 2);
    ck_assert_uint_eq(mock.bytes_peak, 100);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(log_is_kept)
{
    struct mock_host mock;

    mock_host_init(&mock);
    mock.host.log(&mock, MOXIE_LOG_WARNING, "plan", "window of 3 slabs", 17);
    ck_assert(mock_logged(&mock, "WARNING plan: window of 3 slabs\n"));
    ck_assert(!mock_logged(&mock, "ERROR"));
    ck_assert_uint_eq(mock.log_lines, 1);
    mock_host_fini(&mock);
}
END_TEST

struct exchange {
    struct mock_group *group;
    int32_t rounds;
    int32_t absent; // this rank stays away
    int32_t wrong;  // this rank sends another size
    int32_t answers[4];
};

static void exchange_body(void *arg, int32_t rank)
{
    struct exchange *exchange = arg;
    struct mock_host mock;
    int32_t seen[8];

    if (rank == exchange->absent) return;
    mock_host_init(&mock);
    mock_host_join(&mock, exchange->group, rank);
    for (int32_t round = 0; round < exchange->rounds; round++) {
        int32_t mine[2] = {round * 100 + rank, rank};
        uint64_t bytes = rank == exchange->wrong ? 4 : sizeof mine;

        exchange->answers[rank] = mock.host.all_gather(&mock, mine, seen, bytes);
        if (exchange->answers[rank] != 0) break;
        for (int32_t i = 0; i < 4; i++) {
            if (seen[2 * i] != round * 100 + i || seen[2 * i + 1] != i) exchange->answers[rank] = 1;
        }
        exchange->answers[rank] |= mock.host.barrier(&mock);
    }
    mock_host_fini(&mock);
}

START_TEST(ranks_exchange)
{
    struct exchange exchange = {.rounds = 50, .absent = -1, .wrong = -1};

    exchange.group = mock_group_create(4, 20000);
    mock_ranks_run(4, exchange_body, &exchange);
    for (int32_t i = 0; i < 4; i++)
        ck_assert_int_eq(exchange.answers[i], 0);
    mock_group_destroy(exchange.group);
}
END_TEST

START_TEST(an_absent_rank_fails_the_others)
{
    struct exchange exchange = {.rounds = 1, .absent = 2, .wrong = -1};

    exchange.group = mock_group_create(4, 50);
    mock_ranks_run(4, exchange_body, &exchange);
    for (int32_t i = 0; i < 4; i++)
        ck_assert_int_eq(exchange.answers[i], i == 2 ? 0 : -1);
    mock_group_destroy(exchange.group);
}
END_TEST

START_TEST(another_size_fails_everyone)
{
    struct exchange exchange = {.rounds = 1, .absent = -1, .wrong = 1};

    exchange.group = mock_group_create(4, 20000);
    mock_ranks_run(4, exchange_body, &exchange);
    for (int32_t i = 0; i < 4; i++)
        ck_assert_int_eq(exchange.answers[i], -1);
    mock_group_destroy(exchange.group);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, getters_answer_by_type);
    tcase_add_test(tests, memory_is_counted_and_poisoned);
    tcase_add_test(tests, log_is_kept);
    tcase_add_test(tests, ranks_exchange);
    tcase_add_test(tests, an_absent_rank_fails_the_others);
    tcase_add_test(tests, another_size_fails_everyone);
}

SUITE_MAIN("mock_host", 60, add)
