/* The thread team.
 *
 * Who waits for whom: the caller publishes a stage as one 64-bit word (stage number, unit count, next unit) and takes
 * units like everyone else; it then waits until every unit that was taken is done. It never waits for a
 * *thread*: a helper that the system has put aside between two units costs nothing, and when it comes back it joins the
 * stage that is current by then. That matters on shared cores, where a barrier would wait a whole time slice.
 *
 *   caller:  publish -> take units -> wait until done == count -> next stage ...
 *   helper:  take a unit (fetch-and-add on the word); none left -> spin, yield until the word changes
 *
 * A unit number below the count, taken from the same word as the count, proves that the stage is still open, so
 * its function and argument are safe to read. Between forwards helpers spin some microseconds, then sleep.
 */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdint.h>

#include "tlt.h"

/* Tells the processor that its thread waits for another one. */
static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

#define SPIN_CLOSED 1500 /* pauses before a helper of a closed team sleeps: some 20 to 50 us */
#define SPIN_OPEN 2000   /* pauses within a forward before a thread starts yielding */

#define LOAD(x) __atomic_load_n(&(x), __ATOMIC_ACQUIRE)
#define STORE(x, v) __atomic_store_n(&(x), (v), __ATOMIC_RELEASE)
#define ADD(x, v) __atomic_fetch_add(&(x), (v), __ATOMIC_ACQ_REL)

/* The word: stage in the high 22 bits, count in 20, next unit in 22 (room for one vain try per thread). More units are
 * several stages. */
#define UNIT_BITS 22
#define COUNT_BITS 20
#define UNIT_OF(w) ((long)((w) & ((1ull << UNIT_BITS) - 1)))
#define COUNT_OF(w) ((long)(((w) >> UNIT_BITS) & ((1ull << COUNT_BITS) - 1)))
#define STAGE_OF(w) ((w) >> (UNIT_BITS + COUNT_BITS))
#define MOST_UNITS ((1l << COUNT_BITS) - 1) /* of a stage */

static pthread_mutex_t one_team = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static int helpers;      /* threads started */
static int team_size;    /* threads of the open team; 0 when closed */

/* Hot data, each on its own cache line. */
static uint64_t word __attribute__((aligned(64)));
static long done __attribute__((aligned(64)));
static struct {
    TltUnit unit;
    void *arg;
    long first; /* of the stage's units */
} stage __attribute__((aligned(64)));

static void take_units(void) {
    for (;;) {
        uint64_t w = ADD(word, 1);
        if (UNIT_OF(w) >= COUNT_OF(w)) return;
        stage.unit(stage.arg, stage.first + UNIT_OF(w));
        ADD(done, 1);
    }
}

static int must_sleep(int index) { return LOAD(team_size) <= index; }

static void *helper(void *arg) {
    const int index = (int)(intptr_t)arg;
    uint64_t seen = 0;
    for (int spin = 0;;) { /* counts up to where it is looked at: a wait may last for minutes */
        uint64_t w = LOAD(word);
        if (STAGE_OF(w) != STAGE_OF(seen) && !must_sleep(index)) {
            seen = w;
            spin = 0;
            if (UNIT_OF(w) < COUNT_OF(w)) take_units();
            continue;
        }
        if (!must_sleep(index)) {
            if (spin < SPIN_OPEN) relax(), spin++;
            else sched_yield();
        } else if (spin < SPIN_CLOSED) {
            relax();
            spin++;
        } else {
            pthread_mutex_lock(&lock);
            while (must_sleep(index)) pthread_cond_wait(&wake, &lock);
            pthread_mutex_unlock(&lock);
            spin = 0;
        }
    }
    return NULL;
}

static void grow(int wanted) {
    while (helpers < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, helper, (void *)(intptr_t)(helpers + 1))) return;
        pthread_detach(thread);
        helpers++;
    }
}

void tlt_team_open(int threads) {
    if (threads > TLT_MAX_THREADS) threads = TLT_MAX_THREADS;
    if (threads < 1) threads = 1;
    pthread_mutex_lock(&one_team);
    grow(threads - 1);
    if (threads > helpers + 1) threads = helpers + 1;
    pthread_mutex_lock(&lock);
    STORE(team_size, threads);
    pthread_mutex_unlock(&lock);
    if (threads > 1) pthread_cond_broadcast(&wake);
}

void tlt_team_close(void) {
    STORE(team_size, 0);
    pthread_mutex_unlock(&one_team);
}

/* One stage: the units first .. first + count - 1. */
static void run_stage(long first, long count, TltUnit unit, void *arg) {
    stage.unit = unit;
    stage.arg = arg;
    stage.first = first;
    STORE(done, 0);
    uint64_t next = STAGE_OF(LOAD(word)) + 1;
    STORE(word, next << (UNIT_BITS + COUNT_BITS) | (uint64_t)count << UNIT_BITS);
    take_units();
    for (int spin = 0; LOAD(done) != count;) {
        if (spin < SPIN_OPEN) relax(), spin++;
        else sched_yield();
    }
}

void tlt_parallel(long count, TltUnit unit, void *arg) {
    if (team_size == 1 || count == 1) {
        for (long i = 0; i < count; i++) unit(arg, i);
        return;
    }
    for (long first = 0; first < count; first += MOST_UNITS)
        run_stage(first, count - first < MOST_UNITS ? count - first : MOST_UNITS, unit, arg);
}
