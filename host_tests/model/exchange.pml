// The dispatch and combine flags of plugin/exchange_flags.c between 2 or 3 ranks, or with WORDS the words
// and flags of kernels/ll.h, for spin. check.sh runs it; docs/protocol.md explains it, and says what it
// leaves out.
//
// A cell of memory holds the stamp (generation, epoch) of what is in it. A rank is its stores and
// loads in order: each is a step of the search, and a rank may die or stop before any of them. That
// a load which sees a flag sees all that was stored before it is assumed: it is what release and
// acquire promise (signal_peer and read_word of transport_shm.c).
//
// The first block of names sets the size. Each name of the second breaks one rule, and the search
// must then find an error.

#ifndef R
#define R 2 // ranks, 2 or 3
#endif
#ifndef STEPS
#define STEPS 2 // layers that the host wants in each generation, per slot
#endif
#ifndef SLOTS
#define SLOTS 1 // forwards in flight, 1 or 2
#endif
#ifndef IDLE
#define IDLE 1 // 1: a rank may have no tokens
#endif
#ifndef FAILURES
#define FAILURES 1 // ranks that may die or stop
#endif
#ifndef WAKES
#define WAKES 1 // ranks that may go on after they stopped
#endif
#ifndef WORDS
#define WORDS 0 // 1: rows and results are words, and flags come before, between or behind them
#endif
#ifndef DEVICE
#define DEVICE WORDS // 1: launches dispatch, which do not look for later generations before they wait
#endif

// NO_DISPATCH_WAIT NO_COMBINE_WAIT ANY_GENERATION NO_CHECK_AT_SEND NO_CHECK_IN_WAIT
// GENERATION_BEFORE_ACTIVE FLAG_BEFORE_ROWS FLAG_BEFORE_RESULTS READ_MASKED SUM_MASKED ONE_SLAB
// ONE_WINDOW KEEP_EPOCH SILENT_WHEN_IDLE TELL_PEERS_ONLY NAME_FIRST_SILENT
// LEFT_OUT_LATER_ONLY, and with WORDS alone FLAG_IS_ENOUGH COUNT_IS_ENOUGH NO_COMBINE_FLAG

#define ALL       ((1 << R) - 1)
#define BIT(r)    (1 << (r))
#define HAS(s, r) ((s) >> (r) & 1)
#define LOWEST(s) ((s) & 1 -> 0 : ((s) & 2 -> 1 : 2))

// Peers in order of rank, as all loops of exchange.c go.
#define LOW  (me == 0 -> 1 : 0)
#define HIGH (me == R - 1 -> R - 2 : R - 1)
#if R == 3
#define EACH_PEER(step) step(LOW); step(HIGH)
#define SOME_PEER(test) (test(LOW) || test(HIGH))
#define PEERS_THAT(test) ((test(LOW)) * BIT(LOW) | (test(HIGH)) * BIT(HIGH))
#else
#define EACH_PEER(step) step(LOW)
#define SOME_PEER(test) (test(LOW))
#define PEERS_THAT(test) ((test(LOW)) * BIT(LOW))
#endif

// Cell AT(d, s) lies in rank d's window of this slot; rank s alone writes it, rank d alone reads it.
#define CELLS (SLOTS * R * R)
#ifdef ONE_WINDOW
#define AT(d, s) ((d) * R + (s))
#else
#define AT(d, s) ((slot * R + (d)) * R + (s))
#endif
#ifdef ONE_SLAB
#define SLAB(d, s) AT(d, 0) // `piece` without its source
#else
#define SLAB(d, s) AT(d, s)
#endif

#define WORD_DISPATCH   0
#define WORD_COMBINE    1
#define WORD_ACTIVE     2
#define WORD_GENERATION 3
#define WORD(w, d, s)   word[(w) * CELLS + AT(d, s)]

byte rows[CELLS];            // rows, scales, ids and weights of struct push_slab
byte counts[CELLS];          // its count: the stamp times two, and 1 when there are rows
byte results[CELLS];         // result rows: the stamp of the rows they were computed from
byte word[4 * CELLS];        // enum transport_word

// Sets of ranks, a bit each.
byte waits;     // inside exchange_wait, so heard by WORD_BEAT
byte gone;      // dead or stopped now
byte ever_gone; // at any time: whom a survivor may name
byte left_out;  // has been told that the others go on without it, and has left
byte resting;   // has nothing left to do

byte without[R]; // whom rank r has left out

byte failures, wakes;

#define STAMP (generation << 4 | epoch[slot]) // stamp()
#define IS_PEER(p) HAS(members, p)             // exchange_is_peer()

// The words that exchange_wait looks at: `awaited` is WORD_DISPATCH or WORD_COMBINE.
#define FLAG(p) WORD(awaited, me, p)
#ifdef ANY_GENERATION
#define REACHED(p) ((FLAG(p) & 15) >= epoch[slot])
#else
#define REACHED(p) (FLAG(p) >> 4 == generation && FLAG(p) >= STAMP)
#endif
#if WORDS
// A tag is the whole stamp, whatever has come before or come since.
#ifdef ANY_GENERATION
#define IS_NOW(tag) (((tag) & 15) == epoch[slot])
#else
#define IS_NOW(tag) ((tag) == STAMP)
#endif
#define COUNT(p) counts[SLAB(me, p)]
#ifdef COUNT_IS_ENOUGH
#define ROWS_HERE(p) IS_NOW(COUNT(p) >> 1)
#else
#define ROWS_HERE(p) (IS_NOW(COUNT(p) >> 1) && ((COUNT(p) & 1) == 0 || IS_NOW(rows[SLAB(me, p)])))
#endif
#define RESULTS_HERE(p) (!HAS(tokens, slot) || IS_NOW(results[SLAB(me, p)]))
#define WORDS_HERE(p) (awaited == WORD_DISPATCH -> ROWS_HERE(p) : RESULTS_HERE(p))
// The property: what is taken is of the awaited stamp.
#define ARE_RIGHT_ROWS(p) (COUNT(p) >> 1 == STAMP && ((COUNT(p) & 1) == 0 || rows[SLAB(me, p)] == STAMP))
#define ARE_RIGHT_RESULTS(p) (!HAS(tokens, slot) || results[SLAB(me, p)] == STAMP)
#define ARE_RIGHT(p) (!IS_PEER(p) || (awaited == WORD_DISPATCH -> ARE_RIGHT_ROWS(p) : ARE_RIGHT_RESULTS(p)))
#define TAKEN(p) (slot * R + (p))
#if defined(FLAG_IS_ENOUGH)
#define SILENT(p) (IS_PEER(p) && !REACHED(p))
#elif defined(NO_COMBINE_FLAG)
#define SILENT(p) (IS_PEER(p) && ((awaited == WORD_DISPATCH && !REACHED(p)) || !WORDS_HERE(p)))
#else
#define SILENT(p) (IS_PEER(p) && (!REACHED(p) || !WORDS_HERE(p)))
#endif
#elif defined(NO_DISPATCH_WAIT)
#define SILENT(p) (IS_PEER(p) && awaited != WORD_DISPATCH && !REACHED(p))
#elif defined(NO_COMBINE_WAIT)
#define SILENT(p) (IS_PEER(p) && awaited != WORD_COMBINE && !REACHED(p))
#else
#define SILENT(p) (IS_PEER(p) && !REACHED(p))
#endif

// What exchange_check_peers looks for.
#define WITHOUT_ME(p) \
    (IS_PEER(p) && WORD(WORD_ACTIVE, me, p) != 0 && !HAS(WORD(WORD_ACTIVE, me, p), me))
#define LATER(p) (IS_PEER(p) && WORD(WORD_GENERATION, me, p) > generation)
// In this generation, and told of other ranks: here, where all hosts pass the same, of fewer, which
// are of the next. The kernels do not look for it.
#if DEVICE
#define OTHER_RANKS(p) 0
#else
#define OTHER_RANKS(p) \
    (IS_PEER(p) && WORD(WORD_GENERATION, me, p) == generation && \
     WORD(WORD_ACTIVE, me, p) != 0 && WORD(WORD_ACTIVE, me, p) != members)
#endif
#ifdef LEFT_OUT_LATER_ONLY
#define MOVED_ON(p) LATER(p)
#else
#define MOVED_ON(p) (LATER(p) || WITHOUT_ME(p) || OTHER_RANKS(p))
#endif

// What is assumed of time: timeout_ms is longer than a step and than the host takes between calls.
// So a deadline passes when a rank that is awaited is gone or has left, and none that is awaited is
// busy.
#define LOST(p) (SILENT(p) && HAS(gone | left_out, p))
#define BUSY(p) (SILENT(p) && !HAS(ever_gone, p) && !HAS(waits, p))
// Silent, and not heard to wait: give_up.
#ifdef NAME_FIRST_SILENT
#define MUTE(p) SILENT(p)
#else
#define MUTE(p) (SILENT(p) && (!HAS(waits, p) || HAS(gone, p)))
#endif

// ---- dispatch ----------------------------------------------------------------------------------

// exchange_check_peers, before anything is written. `told` is for the property alone: a rank
// that has been told of a later generation starts no dispatch.
inline check_peers()
{
    atomic {
        told = SOME_PEER(MOVED_ON);
        if
#ifndef NO_CHECK_AT_SEND
        :: told -> told = 0; goto moved_on
#endif
        :: else -> skip
        fi
    }
}

// The dispatch kernel, into one peer's window.
inline push(p)
{
    d_step {
        if
        :: IS_PEER(p) ->
            assert(!told);
            if
            :: HAS(tokens, slot) -> rows[SLAB(p, me)] = STAMP
            :: else -> skip
            fi;
            counts[SLAB(p, me)] = STAMP << 1 | HAS(tokens, slot)
        :: else -> skip
        fi
    }
}

// The same in words: a word says how many there are, and the words of rows, each when it will.
inline push_count(p)
{
    d_step {
        if
        :: IS_PEER(p) -> counts[SLAB(p, me)] = STAMP << 1 | HAS(tokens, slot)
        :: else -> skip
        fi
    }
}

inline push_rows(p)
{
    d_step {
        if
        :: IS_PEER(p) && HAS(tokens, slot) -> rows[SLAB(p, me)] = STAMP
        :: else -> skip
        fi
    }
}

// exchange_signal(WORD_DISPATCH)
inline flag_rows(p)
{
    d_step {
        if
#ifdef SILENT_WHEN_IDLE
        :: IS_PEER(p) && HAS(tokens, slot) ->
#else
        :: IS_PEER(p) ->
#endif
            WORD(WORD_DISPATCH, p, me) = STAMP
        :: else -> skip
        fi
    }
}

// exchange_dispatch_send
inline dispatch_send(which)
{
    d_step { slot = which; tokens = tokens & ~BIT(slot) };
#if !DEVICE
    check_peers();
#endif
    atomic {
        epoch[slot]++;
        if
        :: tokens = tokens | BIT(slot)
#if IDLE
        :: skip
#endif
        fi
    };
#if WORDS
    // So that a rank may die behind any of them.
    if
    :: EACH_PEER(flag_rows); EACH_PEER(push_count); EACH_PEER(push_rows)
    :: EACH_PEER(push_rows); EACH_PEER(flag_rows); EACH_PEER(push_count)
    :: EACH_PEER(push_count); EACH_PEER(push_rows); EACH_PEER(flag_rows)
    fi;
#elif defined(FLAG_BEFORE_ROWS)
    EACH_PEER(flag_rows);
    EACH_PEER(push);
#else
    EACH_PEER(push);
    EACH_PEER(flag_rows);
#endif
    told = 0
}

// exchange_wait: one peer after the other, where the C code looks until one look finds all of them.
// That passes whenever the C code does.
inline wait_peer(p)
{
    atomic {
        if
        :: !SILENT(p) ->
#if WORDS
            // Words are taken as they are seen: the moment after they may be others.
            assert(ARE_RIGHT(p));
            taken = (awaited == WORD_DISPATCH && IS_PEER(p) -> taken | (COUNT(p) & 1) << TAKEN(p) : taken)
#else
            skip
#endif
#ifndef NO_CHECK_IN_WAIT
        :: SILENT(p) && SOME_PEER(MOVED_ON) -> waits = waits & ~BIT(me); goto moved_on
#endif
#ifdef NO_CHECK_IN_WAIT
        :: SILENT(p) && SOME_PEER(LOST) && !SOME_PEER(BUSY) ->
#else
        :: SILENT(p) && SOME_PEER(LOST) && !SOME_PEER(BUSY) && !SOME_PEER(MOVED_ON) ->
            assert(!SOME_PEER(WITHOUT_ME));
#endif
            named = LOWEST(PEERS_THAT(MUTE));
            waits = waits & ~BIT(me);
            goto give_up
        fi
    }
}

inline exchange_wait(w)
{
    d_step { awaited = w; waits = waits | BIT(me) };
    EACH_PEER(wait_peer);
    d_step { awaited = 0; waits = waits & ~BIT(me) }
}

// exchange_dispatch_recv
inline dispatch_recv(which)
{
    slot = which;
    exchange_wait(WORD_DISPATCH)
}

// ---- experts -----------------------------------------------------------------------------------

// describe_peer, then route to combine (experts_run) on one peer's slab. A peer that has moved
// on may write the next generation's rows meanwhile: what is computed of them is stamped so, and
// the sum's assertion says that nobody takes it.
inline experts(p)
{
#ifdef READ_MASKED
    d_step {
        seen = counts[SLAB(me, p)];
#else
    d_step {
        seen = (IS_PEER(p) -> counts[SLAB(me, p)] : STAMP << 1);
#endif
        assert(seen >> 1 == STAMP || MOVED_ON(p));
        seen = seen & 1
    };
    if
    :: seen ->
        d_step {
            seen = rows[SLAB(me, p)];
            assert(IS_PEER(p) && (seen == STAMP || MOVED_ON(p)))
        };
#ifdef FLAG_BEFORE_RESULTS
        WORD(WORD_COMBINE, p, me) = STAMP;
#endif
        d_step { results[SLAB(p, me)] = seen; seen = 0 }
    :: else -> skip
    fi
}

// The same of words that have been taken.
inline return_words(p)
{
    d_step {
        if
        :: HAS(taken, TAKEN(p)) -> results[SLAB(p, me)] = STAMP; taken = taken & ~BIT(TAKEN(p))
        :: else -> skip
        fi
    }
}

// ---- combine -----------------------------------------------------------------------------------

// exchange_signal(WORD_COMBINE)
inline flag_results(p)
{
    d_step {
        if
        :: IS_PEER(p) -> WORD(WORD_COMBINE, p, me) = STAMP
        :: else -> skip
        fi
    }
}

// exchange_combine_send, behind the experts; sum_ll begins behind them, too
inline experts_and_combine_send()
{
#if WORDS
    if
    :: EACH_PEER(flag_results); EACH_PEER(return_words)
    :: EACH_PEER(return_words); EACH_PEER(flag_results)
    fi
#else
    EACH_PEER(experts);
    EACH_PEER(flag_results)
#endif
}

// The sum kernel over one peer's results.
inline sum(p)
{
    d_step {
        if
#ifdef SUM_MASKED
        :: HAS(tokens, slot) ->
#else
        :: IS_PEER(p) && HAS(tokens, slot) ->
#endif
            assert(results[SLAB(me, p)] == STAMP)
        :: else -> skip
        fi
    }
}

// exchange_combine_recv
inline combine_recv(which)
{
    slot = which;
    exchange_wait(WORD_COMBINE);
#if !WORDS
    EACH_PEER(sum)
#endif
}

// ---- failure -----------------------------------------------------------------------------------

// exchange_regroup, to one rank and slot; ranks that are left out are told too.
inline tell_rank(p, which)
{
    slot = which;
#ifdef TELL_PEERS_ONLY
    if
    :: IS_PEER(p) ->
#endif
#ifdef GENERATION_BEFORE_ACTIVE
    WORD(WORD_GENERATION, p, me) = generation;
    WORD(WORD_ACTIVE, p, me) = members
#else
    WORD(WORD_ACTIVE, p, me) = members;
    WORD(WORD_GENERATION, p, me) = generation
#endif
#ifdef TELL_PEERS_ONLY
    :: else -> skip
    fi
#endif
}

#define tell_rank_0(p) tell_rank(p, 0)
#define tell_rank_1(p) tell_rank(p, 1)

// ---- a rank, its host, and fate ----------------------------------------------------------------

proctype rank(byte me) provided (!HAS(gone, _pid - 1))
{
    byte generation, members = ALL;      // struct exchange_group
    byte epoch[SLOTS];                  // struct exchange
    byte tokens;                        // bit s: this rank has tokens in slot s
    byte slot, steps, awaited, seen, named, told; // working variables
#if WORDS
    byte taken;                         // bit TAKEN(p): p has rows here
#endif

layer:
    if
    :: steps < STEPS -> steps++
    :: else ->
        // The host comes back when there is work: here, when this rank has not heard all.
        resting = resting | BIT(me);
        atomic { SOME_PEER(MOVED_ON) -> resting = resting & ~BIT(me) }
    fi;
#if SLOTS == 2
    dispatch_send(0);
    dispatch_send(1);
    dispatch_recv(0);
    experts_and_combine_send();
    dispatch_recv(1);
    experts_and_combine_send();
    combine_recv(0);
    combine_recv(1);
#else
    dispatch_send(0);
    dispatch_recv(0);
    experts_and_combine_send();
    combine_recv(0);
#endif
    goto layer;

    // moved_on()
moved_on:
    atomic {
        if
        :: MOVED_ON(LOW) -> seen = LOW
        :: MOVED_ON(HIGH) -> seen = HIGH
        fi
    };
    d_step {
        told = WORD(WORD_ACTIVE, me, seen);
        // VERDICT_MASKS
        assert(!OTHER_RANKS(seen) || (told & ~members) == 0);
        seen = 0;
        if
        :: HAS(told, me) && (members & ~told) != 0 -> named = LOWEST(members & ~told)
        :: HAS(told, me) && (members & ~told) == 0 -> named = R // nobody: one more regroup behind
        :: else -> named = me
        fi;
        assert(named == R || HAS(ever_gone, named))
    };
    if
    :: named == me -> goto leave
    :: else -> goto regroup
    fi;

    // give_up(): MOXIE_E_PEER names a rank that is gone.
give_up:
    assert(HAS(ever_gone, named));
    told = members & ~BIT(named);

    // The host: set_active_ranks without the rank that was named, or with the ranks that a peer
    // goes on with; then exchange_regroup.
regroup:
    atomic {
        without[me] = without[me] | (members & ~told);
        members = told;
        generation++;
        told = 0;
        named = 0;
        awaited = 0;
        steps = 0;
        tokens = 0;
#if WORDS
        taken = 0;
#endif
#ifndef KEEP_EPOCH
        epoch[0] = 0;
#if SLOTS == 2
        epoch[1] = 0;
#endif
#endif
        slot = 0
    };
    EACH_PEER(tell_rank_0);
#if SLOTS == 2
    EACH_PEER(tell_rank_1);
#endif
    slot = 0;
    goto layer;

leave:
    // Only a rank that was gone is left out, and it learns so.
    atomic {
        assert(HAS(ever_gone, me));
        left_out = left_out | BIT(me)
    }
}

init
{
    byte victim;

    atomic {
        run rank(0);
        run rank(1);
#if R == 3
        run rank(2);
#endif
    };
    do
    :: failures < FAILURES -> // now, or never
        atomic {
            failures++;
            if
            :: !HAS(ever_gone, 0) -> victim = 0
            :: !HAS(ever_gone, 1) -> victim = 1
#if R == 3
            :: !HAS(ever_gone, 2) -> victim = 2
#endif
            :: victim = R
            fi;
            if
            :: victim < R -> gone = gone | BIT(victim); ever_gone = ever_gone | BIT(victim)
            :: else -> skip
            fi;
            victim = 0
        }
    :: wakes < WAKES && gone != 0 ->
        atomic {
            wakes++;
            if
            :: gone = gone & (gone - 1)
            :: skip
            fi
        }
    :: timeout ->
        // Nothing can happen any more: nobody is stuck, and who was left out knows it.
        assert((resting | left_out | gone) == ALL);
        assert(HAS(gone | left_out, 0) || (without[0] & ~gone & ~left_out) == 0);
        assert(HAS(gone | left_out, 1) || (without[1] & ~gone & ~left_out) == 0);
#if R == 3
        assert(HAS(gone | left_out, 2) || (without[2] & ~gone & ~left_out) == 0);
#endif
        break
    od
}
