// dispatch_ll, sum_ll: a round of few rows over windows of device memory in two launches, where
// dispatch, await, await and sum are four. LL, low latency, is what NCCL calls it: rows travel as
// words of 16 bytes, 8 of a row and 8 of a tag, each of which arrives whole. Who waits looks at the
// words themselves, so that nothing has to be ordered behind them, which over NVLink takes longer
// than the words.
//
// A tag is a flag without FLAG_LL (flags.h): of one generation and epoch, and never used again.
// Flags are told and waited for, too, unordered: they say who is late, and that a peer has read.

#ifndef MOXIE_KERNELS_LL_H
#define MOXIE_KERNELS_LL_H

#include "kernels/combine.h"
#include "kernels/dispatch.h"
#include "kernels/flags.h"

#define LL_WORD_BYTES    16
#define LL_ROUTING_WORDS 32  // of a row
#define LL_PIECE_COLUMNS 256 // of a warp; a row has words for whole pieces
// Where both ways take the same, on H100s and H200s (kernels/README.md, ladder): flags and slabs
// take as long for one row as for a hundred. More ranks have not been timed.
#define LL_RANKS_MAX  4
#define LL_TOKENS     16  // of all ranks together, at most
#define LL_PIECES_MAX 128 // of all rows that may come

static inline int64_t ll_pieces(int32_t hidden)
{
    return ((int64_t)hidden + LL_PIECE_COLUMNS - 1) / LL_PIECE_COLUMNS;
}

// Rows of a rank, at most; 0: none go as words.
static inline int32_t ll_rows(int32_t ranks, int32_t hidden)
{
    const int64_t peers_pieces = (ranks - 1) * ll_pieces(hidden);
    int64_t rows = LL_TOKENS / ranks;

    if (ranks < 2 || ranks > LL_RANKS_MAX) return 0;
    if (rows * peers_pieces > LL_PIECES_MAX) rows = LL_PIECES_MAX / peers_pieces;
    return (int32_t)rows;
}

// Words of a row: piece by piece, of each first one of every lane's eight numbers.
static inline int64_t ll_number_words(int32_t hidden, int32_t format)
{
    const int64_t words = format == FORMAT_FP8_BLOCK128 ? 1 : format == FORMAT_F32 ? 4 : 2;

    return ll_pieces(hidden) * 32 * words;
}

// Words of one row, in this order: an id and a weight each, numbers, a piece's two scales each
// (fp8_block128). Before the first row of a source lies a word with its counts.
static inline int64_t ll_row_words(int32_t hidden, int32_t wire_format)
{
    return LL_ROUTING_WORDS + ll_number_words(hidden, wire_format) +
           (wire_format == FORMAT_FP8_BLOCK128 ? ll_pieces(hidden) : 0);
}

// Where rows become what slabs of dispatch are: those of source s at index s, or s - 1 from `rank`
// on, so many bytes apart.
struct ll_slab {
    unsigned char *rows;    // [rows_most, hidden] of wire_format
    unsigned char *scales;  // f32 [rows_most, groups], as row_slab.scales; fp8_block128 only
    unsigned char *ids;     // int32 [rows_most, top_k]
    unsigned char *weights; // f32 [rows_most, top_k]
    int64_t rows_slab_bytes, scales_slab_bytes, ids_slab_bytes, weights_slab_bytes;
    int32_t ids_by_rank; // 1: ids of source s are at index s
    int32_t reserved;
};

// What dispatch, signal, await and a copy of the rows do, where x has 16 bits. `sends` and
// `waits`, each 0 or 1, are its two halves, for launches of their own; their args are the same.
struct dispatch_ll_args {
    struct dispatch_args dispatch; // `to`: of a peer, rows is where words for it lie in its window,
                                   // with rows_most rows behind each other; the rest is not used
    struct await_args await;       // WORD_DISPATCH; with `peers`; counts from the words
    const void *words;             // own window: those of source s are at index s, or s - 1 from
                                   // `rank` on
    struct ll_slab in;
    int64_t words_stride_bytes;
    int32_t sends, waits;
};

// Where the results for one peer go. All NULL: the own rank, or one that is not active.
struct ll_results {
    const void *rows; // own memory [rows_most, hidden] of sum.format, 16-byte aligned
    void *words;      // in the peer's window, of this source
};

// What signal, await and sum do, with results for the peers out of own memory.
struct sum_ll_args {
    struct sum_args sum;            // `parts` is not used, y_earlier has no rows
    struct await_args await;        // WORD_COMBINE; with `peers`
    const struct ll_results *peers; // [ranks], host array
    const int32_t *counts;          // device [ranks]: rows that came from each, as await took them
    const void *words;              // own window, as dispatch_ll_args.words
    int64_t words_stride_bytes;
    int64_t rows_stride_bytes; // of ll_results.rows
    int32_t sends, waits;
};

#endif
