// How ranks meet while a transport or a window is made: rounds of the host's all_gather, each
// carrying how the rank's own step went, so that all ranks go on or all fail, with the same code,
// rank to blame and text.

#ifndef MOXIE_PLUGIN_TRANSPORT_MEETING_H
#define MOXIE_PLUGIN_TRANSPORT_MEETING_H

#include "plugin/transport.h"

#define MEETING_BOOT_ID_BYTES 40 // 36 characters, NUL
#define MEETING_TOKEN_BYTES   16
#define MEETING_ID_BYTES      128

// OFFER: the size and a random name, before anything exists. MADE: the own part is there. MAPPED:
// the peers' are mapped.
enum meeting_stage { STAGE_JOIN, STAGE_OFFER, STAGE_MADE, STAGE_MAPPED };

// Two ranks with the same identity are threads of one process.
struct meeting_identity {
    char boot_id[MEETING_BOOT_ID_BYTES];
    uint64_t pid_namespace[2]; // device and inode
    int64_t pid;
};

// What ranks tell each other. One shape for every stage: later stages repeat what earlier ones
// said.
struct meeting_message {
    uint32_t stage;  // of the sender's build, + enum meeting_stage
    int32_t rank;    // the sender's
    int32_t status;  // how the sender's own step went
    int32_t blame;   // the rank to blame for that, or -1 for the sender
    uint64_t window; // windows asked for since create, this one included
    struct meeting_identity identity;
    uint64_t bytes; // of a window, from STAGE_OFFER on; at STAGE_JOIN NCCL's version
    unsigned char token[MEETING_TOKEN_BYTES];
    int64_t tenancy_fd; // from STAGE_MADE on: the sender's, for ranks of its process
    uint64_t group;     // at STAGE_JOIN: the sender's control group that limits memory; 0: none
    unsigned char id[MEETING_ID_BYTES]; // from STAGE_OFFER on: of what rank 0 made for all to join
    char text[FAILURE_TEXT_BYTES];      // why status is what it is
};

_Static_assert(sizeof(struct meeting_message) == 128 + MEETING_ID_BYTES + FAILURE_TEXT_BYTES,
               "what is sent has no padding");

// One collective call under way.
struct meeting {
    const struct bootstrap *bootstrap;
    struct meeting_message mine;
    struct meeting_message all[MOXIE_RANKS_MAX];
    moxie_error local; // of the own step; writes into mine
    // Of every rank's window, once all are known.
    unsigned char tokens[MOXIE_RANKS_MAX][MEETING_TOKEN_BYTES];
};

// A meeting of this transport's ranks; `windows` is how many were asked for since create.
void meeting_init(struct meeting *meeting, const struct bootstrap *bootstrap,
                  const struct meeting_identity *identity, uint64_t windows);

// Tells everyone how the own step (`step`, its text in meeting->local) went, and answers how those
// of all ranks did.
int32_t meeting_meet(struct meeting *meeting, enum meeting_stage stage, int32_t step,
                     moxie_error *error);

// The first meeting of a transport whose ranks share one host, MOXIE_E_UNAVAILABLE naming one that
// is on another. `transport` is NULL where there was no memory for it. Afterwards `meeting` has all
// ranks' identities.
int32_t meeting_join(struct meeting *meeting, const struct bootstrap *bootstrap,
                     const struct transport *transport, moxie_error *error);

// Random bytes for a name.
int32_t meeting_token(unsigned char token[MEETING_TOKEN_BYTES], moxie_error *error);

// After STAGE_OFFER: fills meeting->tokens; MOXIE_E_COLLECTIVE_MISMATCH when sizes differ.
int32_t meeting_take_offers(struct meeting *meeting, moxie_error *error);

#endif
