// What a launcher and its ranks share when every rank is a process that may die at any instruction:
// an all_gather without a lock, the graves of the dead, and the log of ranks that were left out.

#ifndef MOXIE_HOST_TESTS_BOARD_H
#define MOXIE_HOST_TESTS_BOARD_H

#include <stdint.h>

#define BOARD_RANKS_MAX  8
#define BOARD_BYTES_MAX  16384 // one rank's part of an all_gather
#define BOARD_NAMES_MAX  64
#define BOARD_NAME_BYTES 64

enum board_stage {
    BOARD_STARTING,
    BOARD_RUNNING,
    BOARD_FINISHED, // every forward was right; waits for the others
    BOARD_LEFT      // found itself left out
};

struct board_seat {
    _Atomic uint64_t rounds;  // all_gathers that this rank's part has been given to
    _Atomic int32_t stage;    // enum board_stage
    _Atomic int32_t applied;  // entries of the log that it has passed to set_active_ranks
    _Atomic int32_t failures; // MOXIE_E_PEER seen
    _Atomic int32_t struck;   // its fate was about to strike
};

struct board {
    int32_t ranks;
    int32_t timeout_ms;       // of an all_gather
    _Atomic uint32_t dead;    // bit r: rank r has been buried
    _Atomic uint32_t broken;  // an all_gather has failed: so do all that come
    _Atomic uint64_t lost;    // the log: rank + 1 in 4 bits each, the first lost in the lowest
    _Atomic int32_t epilogue; // everybody may do the last forwards and leave
    _Atomic int32_t names_count;
    _Atomic int32_t complaints;
    char complaint[512];                           // the first
    char names[BOARD_NAMES_MAX][BOARD_NAME_BYTES]; // shared memory that was made
    struct board_seat seats[BOARD_RANKS_MAX];
    unsigned char gathered[2][BOARD_RANKS_MAX][BOARD_BYTES_MAX];
};

// In memory that forked processes share. Fails the test when there is none.
struct board *board_create(int32_t ranks, int32_t timeout_ms);
void board_destroy(struct board *board);

// The two halves of an all_gather: the rank's part becomes visible; waits for those of all. The
// second returns 0, or -1 when a rank died before it gave its part, or after timeout_ms.
void board_give(struct board *board, int32_t rank, const void *send, uint64_t bytes);
int32_t board_take(struct board *board, int32_t rank, void *recv, uint64_t bytes);

// Appends a rank to the log of lost ones, once.
void board_lose(struct board *board, int32_t rank);
int32_t board_lost_count(struct board *board);
// Entry `index` of the log: a rank.
int32_t board_lost_rank(struct board *board, int32_t index);
int board_is_lost(struct board *board, int32_t rank);

// Notes a name of shared memory.
void board_note_name(struct board *board, const char *name);

// For a rank whose test has failed: leaves the reason to the launcher, and ends the process.
_Noreturn void board_complain(struct board *board, int32_t rank, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
