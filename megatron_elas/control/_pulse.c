/* A sign of life that needs no interpreter: a thread that writes the time into memory shared with the agent.
 *
 * It takes no lock of Python, so it goes on while the main thread holds the interpreter lock in a long call, and ends
 * with the process, or when the process is stopped or frozen.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static pthread_t thread;
static pid_t owner; /* a forked child has this memory, but not the thread */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static int stopping;
static void *memory;
static size_t memory_bytes;
static _Atomic int64_t *beat;
static int64_t period_ns;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void *run(void *unused) {
    (void)unused;
    pthread_mutex_lock(&mutex);
    while (!stopping) {
        int64_t now = now_ns(), next = now + period_ns;
        struct timespec until = {.tv_sec = next / 1000000000, .tv_nsec = next % 1000000000};
        atomic_store(beat, now);
        pthread_cond_timedwait(&changed, &mutex, &until);
    }
    atomic_store(beat, 0);
    pthread_mutex_unlock(&mutex);
    return NULL;
}

/* Write CLOCK_MONOTONIC, in nanoseconds, to the 64-bit word at `offset` of the file `fd` (of `bytes`), every `period`
 * nanoseconds. Gives 0, or an errno: EALREADY when this process does so already. */
int elas_pulse_start(int fd, int64_t bytes, int64_t offset, int64_t period) {
    if (owner == getpid()) return EALREADY;
    memory = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) return errno;
    memory_bytes = (size_t)bytes;
    beat = (_Atomic int64_t *)((char *)memory + offset);
    period_ns = period;
    stopping = 0;

    pthread_mutex_init(&mutex, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &attributes);
    pthread_condattr_destroy(&attributes);

    /* Signals are for Python's main thread. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&thread, NULL, run, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        munmap(memory, memory_bytes);
        return failed;
    }
    pthread_setname_np(thread, "elas-pulse");
    owner = getpid();
    return 0;
}

/* End the thread; the word is 0 then. Does nothing in a process that did not start it. */
void elas_pulse_stop(void) {
    if (owner != getpid()) return;
    pthread_mutex_lock(&mutex);
    stopping = 1;
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&mutex);
    pthread_join(thread, NULL);
    munmap(memory, memory_bytes);
    owner = 0;
}
