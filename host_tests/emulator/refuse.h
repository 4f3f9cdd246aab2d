// A launch that the emulated GPU refuses, as a driver does that is out of memory, or whose capture
// has become invalid.

#ifndef MOXIE_EMULATOR_REFUSE_H
#define MOXIE_EMULATOR_REFUSE_H

#ifdef __cplusplus
extern "C" {
#endif

// `after` more launches of this thread succeed, and those that follow answer `code`; 0: all
// succeed. With a code of captures, what refuses is captured in vain: its end answers so, too.
void emulator_refuse_launches(int after, int code);

#ifdef __cplusplus
}
#endif

#endif
