// Sleeping and waking of plugin/transport_shm.c: no signal is missed, so no wait sleeps to its
// deadline while its words are there. One rank waits for the words of two others. All accesses here
// are sequentially consistent in the C code, but for the store of a word (release) ahead of the
// bell, and its load (acquire) behind the ticket.
//
// Each of these names breaks one rule, and the search must then find a rank asleep for good:
// TICKET_AFTER_LOOK COUNT_AFTER_SLEEPING LOOK_BEFORE_RINGING SLEEP_WITHOUT_COMPARING

#define RINGERS 2

bool word[RINGERS]; // struct word_line
byte bell, waiters; // struct bell_line
bool asleep;        // in the kernel's queue of the futex `bell`

// signal_peer
proctype ringer(byte me)
{
    bool wanted;

    word[me] = true;
#ifdef LOOK_BEFORE_RINGING
    wanted = waiters != 0;
    bell++;
#else
    bell++;
    wanted = waiters != 0;
#endif
    if
    :: wanted -> asleep = false // futex_wake
    :: else -> skip
    fi
}

// exchange_wait of exchange_flags.c, with ticket and wait_until.
proctype waiter()
{
    byte seen, there;

    do
    :: true ->
        there = 0;
#ifndef TICKET_AFTER_LOOK
        seen = bell; // ticket
#endif
        there = there + word[0];
        there = there + word[1];
#ifdef TICKET_AFTER_LOOK
        seen = bell;
#endif
        if
        :: there == RINGERS -> break
        :: else -> skip
        fi;
#ifndef COUNT_AFTER_SLEEPING
        waiters++;
#endif
        // futex_wait: the kernel compares and sleeps in one step.
        atomic {
            if
#ifdef SLEEP_WITHOUT_COMPARING
            :: asleep = true
#else
            :: bell == seen -> asleep = true
            :: else -> skip
#endif
            fi
        };
#ifdef COUNT_AFTER_SLEEPING
        waiters++;
#endif
        !asleep;
        waiters--
    od
}

init
{
    atomic {
        run waiter();
        run ringer(0);
        run ringer(1)
    }
}
