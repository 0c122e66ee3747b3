/* The thread team.
 *
 * Who waits for whom: workers sleep on `wake` between tasks (after a short spin, so that back-to-back forwards
 * start quickly, and an idle engine burns no core). The caller publishes the task, bumps `epoch`, and works as
 * thread 0. A task ends when the caller has seen `running` fall to zero. Inside a task threads meet at a
 * barrier: they spin a little and then yield, because on a shared core the missing thread may need this one.
 */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include "tlt.h"

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() __asm__ __volatile__("" ::: "memory")
#endif

#define SPIN_IDLE 1500    /* pauses before an idle worker sleeps: some 20 to 50 us */
#define SPIN_BARRIER 2000 /* pauses before a waiting thread starts yielding */

#define LOAD(x) __atomic_load_n(&(x), __ATOMIC_ACQUIRE)
#define STORE(x, v) __atomic_store_n(&(x), (v), __ATOMIC_RELEASE)
#define ADD(x, v) __atomic_add_fetch(&(x), (v), __ATOMIC_ACQ_REL)

static pthread_mutex_t one_team = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static int workers;           /* threads started, without the caller */
static int registered_atfork; /* the fork handler is installed once */

/* Written by the caller, read by workers after they see a new epoch. */
static TltTask task_fn;
static void *task_arg;
static int team_size = 1;
static unsigned epoch __attribute__((aligned(64)));
static int running __attribute__((aligned(64)));

/* Hot counters on their own cache lines. */
static long next_unit __attribute__((aligned(64)));
static int arrived __attribute__((aligned(64)));
static unsigned generation __attribute__((aligned(64)));

void tlt_barrier(void) {
    int team = team_size;
    if (team == 1) {
        next_unit = 0;
        return;
    }
    unsigned mine = LOAD(generation);
    if (ADD(arrived, 1) == team) {
        STORE(arrived, 0);
        STORE(next_unit, 0);
        STORE(generation, mine + 1);
        return;
    }
    for (int spin = 0; LOAD(generation) == mine; spin++) {
        if (spin < SPIN_BARRIER) PAUSE();
        else sched_yield();
    }
}

long tlt_next_unit(void) {
    if (team_size == 1) return next_unit++;
    return __atomic_fetch_add(&next_unit, 1, __ATOMIC_RELAXED);
}

static unsigned wait_for_epoch(unsigned seen) {
    for (int spin = 0; spin < SPIN_IDLE; spin++) {
        unsigned now = LOAD(epoch);
        if (now != seen) return now;
        PAUSE();
    }
    pthread_mutex_lock(&lock);
    while (LOAD(epoch) == seen) pthread_cond_wait(&wake, &lock);
    pthread_mutex_unlock(&lock);
    return LOAD(epoch);
}

typedef struct {
    int thread;
    unsigned epoch;
} WorkerStart;

static WorkerStart starts[TLT_MAX_THREADS];

static void *worker(void *arg) {
    WorkerStart start = *(WorkerStart *)arg;
    unsigned seen = start.epoch;
    for (;;) {
        seen = wait_for_epoch(seen);
        /* Workers outside the team report too: the caller may not change the task while one still looks. */
        if (start.thread < team_size) task_fn(task_arg, start.thread, team_size);
        ADD(running, -1);
    }
    return NULL;
}

/* A forked child has no workers: start afresh there. */
static void after_fork_in_child(void) {
    pthread_mutex_init(&one_team, NULL);
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&wake, NULL);
    workers = 0;
    running = 0;
    arrived = 0;
}

static int grow(int wanted) {
    if (!registered_atfork) {
        pthread_atfork(NULL, NULL, after_fork_in_child);
        registered_atfork = 1;
    }
    while (workers < wanted) {
        pthread_t thread;
        pthread_attr_t attr;
        starts[workers] = (WorkerStart){workers + 1, epoch};
        pthread_attr_init(&attr);
        pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
        int failed = pthread_create(&thread, &attr, worker, &starts[workers]);
        pthread_attr_destroy(&attr);
        if (failed) break;
        workers++;
    }
    return workers < wanted ? workers : wanted;
}

void tlt_pool_run(TltTask task, void *arg, int threads) {
    if (threads > TLT_MAX_THREADS) threads = TLT_MAX_THREADS;
    pthread_mutex_lock(&one_team);
    int helpers = threads > 1 ? grow(threads - 1) : 0;
    next_unit = 0;
    team_size = helpers + 1;
    if (helpers > 0) {
        task_fn = task;
        task_arg = arg;
        STORE(running, workers);
        pthread_mutex_lock(&lock);
        ADD(epoch, 1);
        pthread_cond_broadcast(&wake);
        pthread_mutex_unlock(&lock);
    }
    task(arg, 0, team_size);
    if (helpers > 0) {
        for (int spin = 0; LOAD(running) != 0; spin++) {
            if (spin < SPIN_BARRIER) PAUSE();
            else sched_yield();
        }
    }
    team_size = 1;
    pthread_mutex_unlock(&one_team);
}
