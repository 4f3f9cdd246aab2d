// What an exchange over NCCL asks of its transport beyond the table: one exchange with all peers in
// stream order, what became of earlier ones, and an end to those that wait for ever. Not from two
// threads at once.

#ifndef MOXIE_PLUGIN_TRANSPORT_NCCL_H
#define MOXIE_PLUGIN_TRANSPORT_NCCL_H

#include "plugin/transport.h"

// What goes to a peer, and what comes from it in the same place of its list. Device memory.
struct nccl_piece {
    const void *from;
    void *to;
    int64_t bytes; // of each
    int32_t peer;
};

// Launches all pieces as one exchange on `stream`, or into its graph. Every peer makes the same
// call, with pieces of the same sizes. Returns within timeout_ms; the exchange itself has no
// deadline. After an answer that is not MOXIE_OK the transport is only good for nccl_abort.
int32_t nccl_exchange(struct transport *transport, const struct nccl_piece *pieces,
                      int32_t pieces_count, void *stream, moxie_error *error);

// MOXIE_E_PEER when NCCL has seen an exchange fail.
int32_t nccl_check(struct transport *transport, moxie_error *error);

// Ends every exchange, launched or still to come; what they received means nothing. No-op when
// done.
void nccl_abort(struct transport *transport);

// After the last exchange has ended: lets what is still on its way arrive, within timeout_ms.
void nccl_finish(struct transport *transport);

#endif
