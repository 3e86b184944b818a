/* The transport's links, exchanges and programs without the interpreter; native_engine.py calls this, and
 * python_engine.py and python_link.py are its twin. Nothing here waits but in poll(2), where a cancel wakes it.
 *
 * A program arrives as a flat array of 64-bit numbers:
 *
 *     rounds; the most sends, receives and steps of a round; then for each round:
 *         sends, receives, steps                               (counts)
 *         for each send, then for each receive:                link, buffer, start, size
 *         for each step: kind, operation, dtype, sources,      and with sources + 1 regions, the target first:
 *                        for each region:                      buffer, start, size
 *
 * link and buffer are positions in the arrays that are given with it.
 */
#define _GNU_SOURCE
#include "core_link.h"
#include "core_reduce.h"

#include <limits.h>
#include <poll.h>
#include <time.h>

enum status { /* as native_link.py */
    FINISHED = 0,
    LOOK = 1,   /* let the interpreter handle signals, then go on */
    REDUCE = 2, /* the step is none that is compiled; do it, then go on */
    CANCELLED = -1,
    LOST = -2,
    NEWER = -3,
    MIXED_UP = -4,
    OBJECTED = -5,
    TIMED_OUT = -6,
    NO_MEMORY = -7,
};

enum step_kind { COPY, REDUCE_HERE, REDUCE_IN_PYTHON };

#define LOOK_MS 500                   /* how long a signal may wait for the interpreter when it came between two polls */
#define SEARCH_MS 50                  /* without any movement, after which an objection is searched for */
#define PIECE ((uint64_t)512 << 10)   /* of copies; between two of them a cancel is noticed */
#define READ_AT_ONCE ((uint64_t)2 << 20) /* by a reduction, of all its sources together; likewise */
#define EARLY ((uint64_t)64 << 10)    /* a reduction begins when that much of all its sources has arrived */
#define ALL_SOURCES 64                /* reductions of more begin when everything has arrived */

/* What ended an operation. */
struct failure {
    int32_t link; /* position; -1: none */
    int32_t lost; /* enum lost */
    int32_t error;
    uint32_t epoch;
    uint64_t want, tag, left;
    char text[OBJECTION_BYTES + 1];
};

struct region {
    uint8_t *data;
    uint64_t size;
};

struct receive {
    struct receive *next;
    struct region to;
    uint64_t got;
};

struct step {
    const int64_t *code; /* at its target's region */
    int kind, operation, dtype, sources;
    uint64_t done; /* bytes of the target */
    bool early;    /* may begin before the round's transfers are done */
};

/* What one link still has to do in this round. */
struct slot {
    struct part *sends, *last_send; /* from the first that is not done */
    struct receive *receives, *last_receive;
    bool can_send, can_receive; /* worth trying */
    bool deaf;    /* a frame of this epoch waits on it though nothing is expected yet, so it is not listened to */
    bool search;  /* an objection may be behind that frame */
};

struct op {
    const _Atomic int32_t *cancelled;
    int wake;
    uint32_t epoch;
    uint64_t tag;
    int64_t deadline_ns; /* CLOCK_MONOTONIC; 0: none */
    bool listens;        /* to links that it only sends on */
    int links, buffers;
    struct link **link;
    uint8_t **buffer;
    /* the round */
    const int64_t *code; /* of the next round */
    int64_t rounds_left;
    int receives_count;
    int steps, step; /* in the current round; the next one */
    bool moving;     /* its transfers are not done */
    int active;      /* slots that have something to do */
    struct slot *slots;
    struct part *parts;
    struct receive *receives;
    struct step *step_list;
    struct pollfd *polls;
    int *order;  /* active slots */
    int current; /* slot that was advanced last, for the failure */
};

/* ------------------------------------------------------------------ links */

struct link *elas_link_new(int fd) {
    struct link *link = calloc(1, sizeof *link);
    if (!link) return NULL;
    link->fd = fd;
    pthread_mutex_init(&link->lock, NULL);
    pthread_cond_init(&link->left, NULL);
    return link;
}

void elas_link_free(struct link *link) {
    drop_parts(link);
    free(link->urgent);
    free(link->stash);
    pthread_mutex_destroy(&link->lock);
    pthread_cond_destroy(&link->left);
    free(link);
}

/* Why the link is lost: enum lost | errno << 8. 0: it is not. */
int elas_link_lost(const struct link *link) { return link->lost | link->error << 8; }

void elas_link_lose(struct link *link) { lose(link, LOST_BY_US, 0); }

static bool enter(struct link *link) {
    atomic_fetch_add(&link->users, 1);
    return !link->lost;
}

static void leave(struct link *link) {
    if (atomic_fetch_sub(&link->users, 1) > 1 || !link->lost) return;
    pthread_mutex_lock(&link->lock);
    pthread_cond_broadcast(&link->left);
    pthread_mutex_unlock(&link->lock);
}

/* Make it unusable, and return when nobody uses its descriptor any more: it may be closed then, and its number be given
 * to something else. Those who wait on it are woken by the end-of-file. */
void elas_link_close(struct link *link) {
    lose(link, LOST_BY_US, 0);
    pthread_mutex_lock(&link->lock);
    while (link->users) pthread_cond_wait(&link->left, &link->lock);
    drop_parts(link);
    free(link->urgent);
    link->urgent = NULL;
    link->fd = -1;
    pthread_mutex_unlock(&link->lock);
}

/* Forget queued frames and hold the rest of a half-sent one, as zeros, until elas_link_resume: then the peer has left
 * the epoch too and drops the frame, so zeros are never taken for data. */
void elas_link_cut(struct link *link) {
    pthread_mutex_lock(&link->lock);
    keep_half_frame_only(link, true);
    if (link->urgent) free(link->urgent);
    link->urgent = NULL;
    link->held = true;
    pthread_mutex_unlock(&link->lock);
}

void elas_link_resume(struct link *link) {
    pthread_mutex_lock(&link->lock);
    link->held = false;
    link->filled = 0;
    pthread_mutex_unlock(&link->lock);
}

/* Bytes that wait to be sent, headers included. */
uint64_t elas_link_queued(struct link *link) {
    pthread_mutex_lock(&link->lock);
    uint64_t bytes = link->urgent ? link->urgent->size : 0;
    for (struct part *part = link->first; part; part = part->next) {
        uint64_t left = part->size - part->gone, frames = left ? (left + MAX_PAYLOAD - 1) / MAX_PAYLOAD : 1;
        bytes += left + (part->raw ? 0 : frames * sizeof(struct header));
    }
    bytes -= link->sent;
    pthread_mutex_unlock(&link->lock);
    return bytes;
}

/* Nothing is queued that may be sent now. */
int elas_link_idle(struct link *link) {
    pthread_mutex_lock(&link->lock);
    bool idle = link->held || link->lost || (!link->first && !link->urgent);
    pthread_mutex_unlock(&link->lock);
    return idle;
}

/* Send queued frames. 1: there is nothing more to send for now. 0: when the socket is writable. -1: lost. */
int elas_link_pump(struct link *link) {
    enum pumped pumped = PUMPED_SOME;
    pthread_mutex_lock(&link->lock);
    bool idle = link->held || link->lost;
    for (int calls = 0; !idle && pumped == PUMPED_SOME && calls < 16; calls++) pumped = pump_once(link);
    pthread_mutex_unlock(&link->lock);
    if (idle || pumped == PUMPED_ALL) return 1;
    return pumped == PUMP_LOST ? -1 : 0;
}

/* Tell the peer that operations were mixed up, as soon as the frame under way is done. As elas_link_pump. */
int elas_link_object(struct link *link, uint32_t epoch, const char *text, uint64_t size) {
    struct part *part = owned_part(sizeof(struct header) + size);
    if (!part) return 1; /* then the peer has to find out by itself */
    struct header header = {MAGIC, epoch, OBJECTION, size};
    memcpy((uint8_t *)part->data, &header, sizeof header);
    memcpy((uint8_t *)part->data + sizeof header, text, size);
    part->raw = true;
    pthread_mutex_lock(&link->lock);
    bool unwanted = link->held || link->lost || link->urgent;
    if (!unwanted) link->urgent = part;
    pthread_mutex_unlock(&link->lock);
    if (unwanted) free(part);
    return unwanted ? 1 : elas_link_pump(link);
}

/* Copy unless cancelled meanwhile. */
static bool copy_until_cancelled(const _Atomic int32_t *cancelled, uint8_t *to, const uint8_t *from, uint64_t size) {
    for (uint64_t at = 0; at < size; at += PIECE) {
        if (*cancelled) return false;
        memcpy(to + at, from + at, smaller(PIECE, size - at));
    }
    return true;
}

/* Send what the socket takes at once and queue a copy of the rest; the bytes are free afterwards.
 * 1: all went. 0: elas_link_pump when the socket is writable. Else an enum status. */
int elas_link_post(struct link *link, const _Atomic int32_t *cancelled, uint32_t epoch, uint64_t tag,
                   const uint8_t *data, uint64_t size) {
    struct part part = {.data = data, .size = size, .epoch = epoch, .tag = tag};
    int status = 1;
    enum pumped pumped;
    pthread_mutex_lock(&link->lock);
    do pumped = *cancelled ? PUMP_BLOCKED : pump_once(link);
    while (pumped == PUMPED_SOME);
    bool queued = pumped == PUMPED_ALL;
    if (queued) {
        append(link, &part);
        do pumped = *cancelled ? PUMP_BLOCKED : pump_once(link);
        while (pumped == PUMPED_SOME);
    }
    if (pumped == PUMP_LOST) {
        status = LOST;
        drop_parts(link);
    } else if (pumped != PUMPED_ALL) {
        struct part *rest = *cancelled ? NULL : owned_part(size - part.gone);
        if (rest && copy_until_cancelled(cancelled, (uint8_t *)rest->data, data + part.gone, size - part.gone)) {
            rest->epoch = epoch;
            rest->tag = tag;
            if (queued) { /* the only one, perhaps with its frame half sent */
                link->first = link->last = NULL;
            }
            append(link, rest);
            status = 0;
        } else {
            status = *cancelled ? CANCELLED : NO_MEMORY;
            free(rest);
            if (queued) {
                keep_half_frame_only(link, true);
                link->held = true;
            }
        }
    }
    pthread_mutex_unlock(&link->lock);
    return status;
}

/* ------------------------------------------------------------------ a round's transfers */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

static struct region region_at(const struct op *op, const int64_t *code) {
    return (struct region){op->buffer[code[0]] + code[1], code[2]};
}

/* How much of its target a step makes at one time. */
static uint64_t piece_of(const struct step *step) {
    uint64_t piece = READ_AT_ONCE / step->sources & ~(uint64_t)63;
    return piece > STAGE_BYTES ? piece : STAGE_BYTES;
}

static bool overlap(struct region a, struct region b) {
    return a.size && b.size && a.data < b.data + b.size && b.data < a.data + a.size;
}

static const int64_t *next_step(const int64_t *code, struct step *step) {
    *step = (struct step){code + 4, code[0], code[1], code[2], code[3], 0, false};
    return code + 4 + 3 * (code[3] + 1);
}

/* The receive that brings exactly this region. */
static struct receive *receive_of(struct op *op, int count, struct region region) {
    for (int at = 0; at < count; at++)
        if (op->receives[at].to.data == region.data && op->receives[at].to.size == region.size) return &op->receives[at];
    return NULL;
}

/* Whether a step may work on what has arrived while the rest of the round is under way: nothing that it reads or writes
 * is touched by anything else, but for the receives that bring its sources. */
static bool may_be_early(struct op *op, int sends, int receives, int at) {
    const struct step *step = &op->step_list[at];
    struct region target = region_at(op, step->code);
    if (step->kind != REDUCE_HERE || target.size < 2 * EARLY || step->sources < 2 || step->sources > ALL_SOURCES)
        return false;
    for (int k = 0; k < sends; k++) {
        struct region sent = {(uint8_t *)op->parts[k].data, op->parts[k].size};
        if (overlap(target, sent)) return false;
    }
    for (int k = 0; k < receives; k++) {
        struct region to = op->receives[k].to;
        bool is_source = false;
        for (int s = 1; s <= step->sources; s++) {
            struct region source = region_at(op, step->code + 3 * s);
            bool same = source.data == to.data && source.size == to.size;
            if (!same && overlap(source, to)) return false;
            is_source |= same;
        }
        bool same = target.data == to.data && target.size == to.size;
        if (overlap(target, to) && !(same && is_source)) return false;
    }
    for (int before = 0; before < at; before++) {
        const struct step *other = &op->step_list[before];
        for (int a = 0; a <= step->sources; a++)
            for (int b = 0; b <= other->sources; b++)
                if ((a == 0 || b == 0) && overlap(region_at(op, step->code + 3 * a), region_at(op, other->code + 3 * b)))
                    return false;
    }
    return true;
}

static void begin_round(struct op *op) {
    const int64_t *code = op->code;
    int sends = code[0], receives = op->receives_count = code[1];
    op->steps = code[2];
    op->step = 0;
    code += 3;
    memset(op->slots, 0, op->links * sizeof *op->slots);
    for (int at = 0; at < sends; at++, code += 4) {
        struct region from = region_at(op, code + 1);
        struct link *link = op->link[code[0]];
        struct part *part = &op->parts[at];
        *part = (struct part){.data = from.data, .size = from.size, .epoch = op->epoch, .tag = op->tag};
        pthread_mutex_lock(&link->lock);
        append(link, part);
        pthread_mutex_unlock(&link->lock);
        struct slot *slot = &op->slots[code[0]];
        if (slot->sends) slot->last_send->next_own = part;
        else slot->sends = part;
        slot->last_send = part;
    }
    for (int at = 0; at < receives; at++, code += 4) {
        struct slot *slot = &op->slots[code[0]];
        struct receive *receive = &op->receives[at];
        *receive = (struct receive){NULL, region_at(op, code + 1), 0};
        if (slot->receives) slot->last_receive->next = receive;
        else slot->receives = receive;
        slot->last_receive = receive;
    }
    for (int at = 0; at < op->steps; at++) code = next_step(code, &op->step_list[at]);
    for (int at = 0; at < op->steps; at++) op->step_list[at].early = may_be_early(op, sends, receives, at);
    op->active = 0;
    for (int at = 0; at < op->links; at++)
        if (op->slots[at].sends || op->slots[at].receives) {
            op->slots[at].can_send = op->slots[at].can_receive = true;
            op->order[op->active++] = at;
        }
    op->code = code;
    op->rounds_left--;
    op->moving = true;
}

/* ------------------------------------------------------------------ moving */

/* One system call of sending. */
static int advance_sends(struct op *op, int at) {
    struct slot *slot = &op->slots[at];
    struct link *link = op->link[at];
    bool dropped = false;
    pthread_mutex_lock(&link->lock);
    enum pumped pumped = pump_once(link);
    while (slot->sends && slot->sends->done) {
        dropped |= slot->sends->dropped;
        slot->sends = slot->sends->next_own;
    }
    pthread_mutex_unlock(&link->lock);
    if (pumped == PUMP_LOST) return LOST;
    if (dropped) return CANCELLED; /* another operation has failed on this link */
    slot->can_send = pumped == PUMPED_SOME;
    return FINISHED;
}

static int status_of(enum received state) {
    switch (state) {
    case RECEIVE_LOST: return LOST;
    case RECEIVE_NEWER: return NEWER;
    case RECEIVE_MIXED_UP: return MIXED_UP;
    case RECEIVE_OBJECTION: return OBJECTED;
    default: return FINISHED;
    }
}

/* All that is there of small parts, or one system call's worth of a large one. */
static int advance_receives(struct op *op, int at) {
    struct slot *slot = &op->slots[at];
    struct link *link = op->link[at];
    uint64_t bytes = 0;
    while (slot->receives) {
        struct receive *receive = slot->receives;
        enum received state = receive_some(link, op->epoch, op->tag, receive->to.data, receive->to.size);
        if (state == PART_DONE) {
            receive->got = receive->to.size;
            slot->receives = receive->next;
            bytes += receive->got;
            if (bytes >= CHUNK) return FINISHED; /* it can receive more, but a cancel must be noticed */
            continue;
        }
        receive->got = arrived(link, op->epoch);
        slot->can_receive = state == PART_MORE;
        return status_of(state);
    }
    return FINISHED;
}

/* A link that is only sent to may bring an objection, or the news of another epoch. */
static int listen_to(struct op *op, int at) {
    enum received state = hear(op->link[at], op->epoch, op->tag, !op->rounds_left);
    if (state == PART_DONE) op->slots[at].deaf = op->slots[at].search = true;
    return status_of(state);
}

/* Nothing has moved for a while: look for objections where nothing is read. */
static int search_all(struct op *op) {
    for (int k = 0; k < op->active; k++) {
        struct slot *slot = &op->slots[op->current = op->order[k]];
        enum received state = slot->search && !slot->receives ? PART_MORE : RECEIVE_BLOCKED;
        while (state == PART_MORE) state = search(op->link[op->current], op->epoch);
        if (state == PART_DONE) slot->search = false;
        if (status_of(state)) return status_of(state);
    }
    return FINISHED;
}

static int reduce_piece(struct op *op, struct step *step, uint64_t end) {
    const uint8_t *sources[ALL_SOURCES], **all = sources;
    if (step->sources > ALL_SOURCES && !(all = malloc(step->sources * sizeof *all))) return NO_MEMORY;
    uint64_t item = item_bytes[step->dtype];
    for (int s = 0; s < step->sources; s++) all[s] = region_at(op, step->code + 3 * (s + 1)).data + step->done;
    uint8_t *target = region_at(op, step->code).data + step->done;
    reductions[step->dtype][step->operation](all, step->sources, target, (end - step->done) / item);
    step->done = end;
    if (all != sources) free(all);
    return FINISHED;
}

/* Reduce what can be of the steps that may begin early, a piece of each. Tells whether there is more to do. */
static bool reduce_early(struct op *op) {
    bool more = false;
    for (int at = 0; at < op->steps; at++) {
        struct step *step = &op->step_list[at];
        if (!step->early) continue;
        uint64_t size = region_at(op, step->code).size, end = size;
        for (int s = 1; s <= step->sources; s++) {
            struct receive *receive = receive_of(op, op->receives_count, region_at(op, step->code + 3 * s));
            if (receive && receive->got < end) end = receive->got & ~(uint64_t)63;
        }
        if (end < step->done + EARLY && !(end == size && end > step->done)) continue;
        more |= end > step->done + piece_of(step);
        reduce_piece(op, step, smaller(end, step->done + piece_of(step)));
    }
    return more;
}

/* Wait until a link can do something, a cancel, the deadline, or a signal. */
static int wait_for_links(struct op *op) {
    int64_t timeout_ms = LOOK_MS;
    if (op->deadline_ns) {
        int64_t left_ns = op->deadline_ns - now_ns();
        if (left_ns <= 0) return TIMED_OUT;
        if (left_ns / 1000000 + 1 < timeout_ms) timeout_ms = left_ns / 1000000 + 1;
    }
    op->polls[0] = (struct pollfd){op->wake, POLLIN, 0};
    for (int k = 0; k < op->active; k++) {
        struct slot *slot = &op->slots[op->current = op->order[k]];
        if (!slot->receives && op->listens && !slot->deaf && has_read_ahead(op->link[op->current])) {
            int status = listen_to(op, op->current); /* poll tells nothing of that */
            if (status) return status;
        }
        short events = slot->sends ? POLLOUT : 0;
        if (slot->receives || (op->listens && !slot->deaf)) events |= POLLIN;
        else if (slot->search && timeout_ms > SEARCH_MS) timeout_ms = SEARCH_MS;
        op->polls[k + 1] = (struct pollfd){op->link[op->order[k]]->fd, events, 0};
    }
    int count = poll(op->polls, op->active + 1, timeout_ms);
    if (count <= 0) {
        int status = count ? FINISHED : search_all(op);
        if (status) return status;
        return op->deadline_ns && op->deadline_ns <= now_ns() ? TIMED_OUT : LOOK;
    }
    for (int k = 0; k < op->active; k++) {
        struct slot *slot = &op->slots[op->order[k]];
        short found = op->polls[k + 1].revents;
        slot->can_send = (found & ~POLLIN) != 0;
        slot->can_receive = (found & ~POLLOUT) != 0;
        if (slot->receives || !op->listens || !(found & POLLIN)) continue;
        op->current = op->order[k];
        int status = listen_to(op, op->order[k]);
        if (status) return status;
    }
    return FINISHED;
}

/* Bring the round's transfers to their end. Everything is sent that can be before anything is received, so that peers
 * need not wait. */
static int move(struct op *op) {
    for (;;) {
        for (int k = 0; k < op->active; k++) {
            struct slot *slot = &op->slots[op->current = op->order[k]];
            int status = slot->sends && slot->can_send ? advance_sends(op, op->current) : FINISHED;
            if (status) return status;
        }
        for (int k = 0; k < op->active; k++) {
            struct slot *slot = &op->slots[op->current = op->order[k]];
            int status = slot->receives && slot->can_receive ? advance_receives(op, op->current) : FINISHED;
            if (status) return status;
        }
        bool again = reduce_early(op);
        int active = 0;
        for (int k = 0; k < op->active; k++) {
            struct slot *slot = &op->slots[op->order[k]];
            if (!slot->sends && !slot->receives) continue;
            again |= (slot->sends && slot->can_send) || (slot->receives && slot->can_receive);
            op->order[active++] = op->order[k];
        }
        op->active = active;
        if (!active) return FINISHED;
        if (*op->cancelled) return CANCELLED;
        if (again) {
            if (op->deadline_ns && op->deadline_ns <= now_ns()) return TIMED_OUT;
            continue;
        }
        int status = wait_for_links(op);
        if (*op->cancelled) return CANCELLED;
        if (status) return status;
    }
}

/* ------------------------------------------------------------------ what follows a round's transfers */

static int copy(struct op *op, struct step *step) {
    struct region target = region_at(op, step->code), source = region_at(op, step->code + 3);
    if (target.data == source.data) return FINISHED;
    return copy_until_cancelled(op->cancelled, target.data, source.data, target.size) ? FINISHED : CANCELLED;
}

static int reduce(struct op *op, struct step *step) {
    uint64_t size = region_at(op, step->code).size;
    while (step->done < size) {
        if (*op->cancelled) return CANCELLED;
        int status = reduce_piece(op, step, smaller(size, step->done + piece_of(step)));
        if (status) return status;
    }
    return FINISHED;
}

static int work(struct op *op, struct failure *failure) {
    for (;;) {
        if (op->moving) {
            int status = move(op);
            if (status) return status;
            op->moving = false;
        }
        while (op->step < op->steps) {
            struct step *step = &op->step_list[op->step];
            int status = FINISHED;
            if (step->kind == REDUCE_IN_PYTHON) {
                failure->want = step->operation; /* which of them */
                op->step++;
                return REDUCE;
            }
            if (step->kind == COPY || step->sources == 1) status = copy(op, step);
            else status = reduce(op, step);
            if (status) return status;
            op->step++;
        }
        if (!op->rounds_left) return FINISHED;
        if (*op->cancelled) return CANCELLED;
        begin_round(op);
    }
}

/* ------------------------------------------------------------------ operations */

/* Let go of the caller's buffers. With `true_bytes` half-sent frames are finished with what was to be sent. */
static void let_go(struct op *op, bool true_bytes) {
    for (int at = 0; at < op->links; at++) {
        if (!op->slots[at].sends) continue;
        struct link *link = op->link[at];
        if (!true_bytes) {
            elas_link_cut(link);
            continue;
        }
        pthread_mutex_lock(&link->lock);
        keep_half_frame_only(link, false);
        pthread_mutex_unlock(&link->lock);
    }
}

/* What the interpreter needs to know for its error. */
static void describe(struct op *op, int status, struct failure *failure) {
    failure->link = -1;
    if (!op->links) return;
    struct slot *slot = &op->slots[op->current];
    struct link *link = op->link[op->current];
    failure->link = op->current;
    failure->lost = link->lost;
    failure->error = link->error;
    failure->epoch = link->header.epoch;
    failure->tag = link->header.tag;
    failure->left = link->header.left;
    failure->want = slot->receives ? slot->receives->to.size - link->filled : 0;
    if (status == OBJECTED) memcpy(failure->text, link->text, sizeof failure->text);
}

/* What an operation needs; laid out as native_engine.py packs it. */
struct arguments {
    const _Atomic int32_t *cancelled;
    int64_t wake, epoch;
    uint64_t tag;
    int64_t deadline_ns;
    int64_t listens;
    const int64_t *code;
    struct link **links;
    int64_t link_count;
    uint8_t **buffers;
    struct failure *failure;
    uint8_t *pending;
    struct op *made; /* what elas_go_on goes on with; NULL when it has ended, else elas_go_on or elas_abandon must follow */
};

/* Go on with an operation. It is freed, and no buffer is touched any more, unless LOOK or REDUCE is returned. `pending`
 * has room for one byte per link: with TIMED_OUT, 1 for those that were not done. */
int elas_go_on(struct arguments *call) {
    struct op *op = call->made;
    struct failure *failure = call->failure;
    int status = FINISHED;
    for (int at = 0; at < op->links; at++)
        if (!enter(op->link[at]) && !status) {
            op->current = at;
            status = LOST;
        }
    if (!status) status = work(op, failure);
    if (status == LOOK || status == REDUCE) {
        for (int at = 0; at < op->links; at++) leave(op->link[at]);
        return status;
    }
    if (status != FINISHED) {
        describe(op, status, failure);
        for (int at = 0; at < op->links; at++) call->pending[at] = op->slots[at].sends || op->slots[at].receives;
        let_go(op, status == MIXED_UP || status == OBJECTED || (status == CANCELLED && !op->listens));
    }
    for (int at = 0; at < op->links; at++) leave(op->link[at]);
    call->made = NULL;
    free(op);
    return status;
}

/* Give up an operation that waits for the interpreter. */
void elas_abandon(struct arguments *call) {
    let_go(call->made, false);
    free(call->made);
    call->made = NULL;
}

static void *carve(uint8_t **memory, size_t size) {
    void *piece = *memory;
    *memory += (size + 15) & ~(size_t)15;
    return piece;
}

/* Run a program. Code, links and buffers stay until it has ended. */
int elas_run(struct arguments *call) {
    if (*call->cancelled) return CANCELLED;
    const int64_t *code = call->code;
    size_t parts = code[1] * sizeof(struct part), receives = code[2] * sizeof(struct receive);
    size_t steps = code[3] * sizeof(struct step), slots = call->link_count * sizeof(struct slot);
    size_t polls = (call->link_count + 1) * sizeof(struct pollfd), order = call->link_count * sizeof(int);
    uint8_t *memory = malloc(sizeof(struct op) + parts + receives + steps + slots + polls + order + 7 * 16);
    if (!memory) {
        call->failure->link = -1;
        return NO_MEMORY;
    }
    struct op *op = carve(&memory, sizeof *op);
    *op = (struct op){.cancelled = call->cancelled, .wake = call->wake, .epoch = call->epoch, .tag = call->tag,
                      .deadline_ns = call->deadline_ns, .listens = call->listens, .links = call->link_count, .link = call->links,
                      .buffer = call->buffers, .code = code + 4, .rounds_left = code[0]};
    op->parts = carve(&memory, parts);
    op->receives = carve(&memory, receives);
    op->step_list = carve(&memory, steps);
    op->slots = carve(&memory, slots);
    op->polls = carve(&memory, polls);
    op->order = carve(&memory, order);
    memset(op->slots, 0, slots);
    call->made = op;
    return elas_go_on(call);
}

/* For tests of the reductions. */
void elas_reduce(int operation, int dtype, const uint8_t *const *sources, uint64_t n, uint8_t *target, uint64_t count) {
    reductions[dtype][operation](sources, n, target, count);
}
