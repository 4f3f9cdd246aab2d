// What a launcher and its ranks share.

#include "host_tests/board.h"

#include "plugin/transport.h"

#include <check.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LOOK_US 200

struct board *board_create(int32_t ranks, int32_t timeout_ms)
{
    struct board *board =
        mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    ck_assert_ptr_ne(board, MAP_FAILED);
    ck_assert_int_le(ranks, BOARD_RANKS_MAX);
    board->ranks = ranks;
    board->timeout_ms = timeout_ms;
    return board;
}

void board_destroy(struct board *board)
{
    (void)munmap(board, sizeof *board);
}

// ---- all_gather --------------------------------------------------------------------------------

// Rounds alternate between two halves: whoever gives round n + 2 has seen everyone give n + 1, so
// everyone has read n.
void board_give(struct board *board, int32_t rank, const void *send, uint64_t bytes)
{
    struct board_seat *seat = &board->seats[rank];

    ck_assert_uint_le(bytes, BOARD_BYTES_MAX);
    // A rank whose last round failed has not seen everyone give, and some may still read there.
    if (board->broken) return;
    memcpy(board->gathered[seat->rounds & 1][rank], send, bytes);
    atomic_fetch_add(&seat->rounds, 1);
}

int32_t board_take(struct board *board, int32_t rank, void *recv, uint64_t bytes)
{
    uint64_t rounds = board->seats[rank].rounds;
    int64_t deadline_ns = clock_ns() + (int64_t)board->timeout_ms * 1000000;

    if (board->broken) return -1;
    for (int32_t r = 0; r < board->ranks; r++) {
        while (board->seats[r].rounds < rounds) {
            // Looked at in this order: what a rank gave before it died counts.
            int dead = board->dead >> r & 1 && board->seats[r].rounds < rounds;

            if (dead || clock_ns() > deadline_ns) board->broken = 1;
            if (board->broken) return -1;
            (void)usleep(LOOK_US);
        }
        memcpy((unsigned char *)recv + (uint64_t)r * bytes, board->gathered[~rounds & 1][r], bytes);
    }
    return 0;
}

// ---- the log -----------------------------------------------------------------------------------

static int32_t entries(uint64_t lost)
{
    int32_t count = 0;

    for (; lost != 0; lost >>= 4)
        count++;
    return count;
}

static int contains(uint64_t lost, int32_t rank)
{
    for (; lost != 0; lost >>= 4)
        if ((int32_t)(lost & 15) == rank + 1) return 1;
    return 0;
}

void board_lose(struct board *board, int32_t rank)
{
    uint64_t seen = board->lost;

    do
        if (contains(seen, rank)) return;
    while (!atomic_compare_exchange_weak(&board->lost, &seen,
                                         seen | (uint64_t)(rank + 1) << 4 * entries(seen)));
}

int32_t board_lost_count(struct board *board)
{
    return entries(board->lost);
}

int32_t board_lost_rank(struct board *board, int32_t index)
{
    return (int32_t)(board->lost >> 4 * index & 15) - 1;
}

int board_is_lost(struct board *board, int32_t rank)
{
    return contains(board->lost, rank);
}

void board_note_name(struct board *board, const char *name)
{
    int32_t at = atomic_fetch_add(&board->names_count, 1);

    ck_assert_int_lt(at, BOARD_NAMES_MAX);
    (void)snprintf(board->names[at], BOARD_NAME_BYTES, "%s", name);
}

_Noreturn void board_complain(struct board *board, int32_t rank, const char *format, ...)
{
    int length;
    va_list args;

    if (atomic_fetch_add(&board->complaints, 1) == 0) {
        length = snprintf(board->complaint, sizeof board->complaint, "on rank %d: ", rank);
        va_start(args, format);
        (void)vsnprintf(board->complaint + length, sizeof board->complaint - (size_t)length, format,
                        args);
        va_end(args);
    }
    _exit(EXIT_FAILURE);
}
