// Descriptors passed between the ranks of a host, each through a socket with a random name. Nobody
// waits here: ranks meet between posting and taking, so what was posted is there.

#ifndef MOXIE_PLUGIN_TRANSPORT_MAIL_H
#define MOXIE_PLUGIN_TRANSPORT_MAIL_H

#include "plugin/transport_meeting.h"

// A box that peers post into; its descriptor in *out. The name vanishes with it.
int32_t mail_open(const unsigned char token[MEETING_TOKEN_BYTES], int *out, moxie_error *error);

// Posts `fd` as rank `from` into the box of rank `to`, which has `token`.
int32_t mail_post(const unsigned char token[MEETING_TOKEN_BYTES], int32_t from, int32_t to, int fd,
                  moxie_error *error);

// Takes what every other rank has posted: fds[r], -1 for `own`. The caller closes them, after a
// failure too. MOXIE_E_PEER when a rank's is missing or what came is none.
int32_t mail_take(int box, int32_t own, int32_t ranks, int fds[MOXIE_RANKS_MAX],
                  moxie_error *error);

#endif
