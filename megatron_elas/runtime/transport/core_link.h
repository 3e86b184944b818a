/* One link: what is half sent and half received on a stream socket. Included once, by _core.c.
 *
 * Sending is guarded by `lock`, because the thread of the posts may send too. Receiving is done by one thread at a
 * time, which is the caller's duty. The wire format is described in frame.py; python_link.py is the twin of this file.
 */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "frames are little-endian and are written here as they lie in memory; use the Python code"
#endif

#define MAGIC 0xE1A557F2u
#define MAX_PAYLOAD ((uint64_t)1 << 20)
#define OBJECTION UINT64_MAX /* tag of a frame that says that operations were mixed up */
#define OBJECTION_BYTES 1000
#define CHUNK ((uint64_t)256 << 10) /* bytes per system call; between two of them a cancel is noticed */
#define STAGE_BYTES 16384
#define AHEAD_BYTES 8192 /* parts up to this size are read through the stage, header and payload in one call */
#define STASH_BYTES ((uint64_t)4 << 20) /* more than a worker that fails can still send: half a frame and a full socket */
#define MAX_IOV 16

struct header {
    uint32_t magic, epoch;
    uint64_t tag, left;
};
_Static_assert(sizeof(struct header) == 24, "the header has no padding");

/* Bytes that wait to be sent: one directed transfer, or with `raw` bytes that are frames, or the rest of one, already.
 * An operation's parts lie in its own memory and point into the caller's buffers; `owned` ones are malloc'ed together
 * with their bytes. */
struct part {
    struct part *next;
    struct part *next_own; /* of the same operation, on the same link */
    const uint8_t *data;
    uint64_t size;
    uint64_t gone; /* payload bytes of the frames that are sent */
    uint64_t tag;
    uint32_t epoch;
    bool raw, owned, done, dropped;
};

enum lost { NOT_LOST, LOST_CLOSED, LOST_ERRNO, LOST_GARBAGE, LOST_BY_US };

struct link {
    int fd;
    _Atomic int lost;  /* enum lost: why it can be used no more */
    int error;         /* errno with LOST_ERRNO */
    _Atomic int users; /* operations that may touch the descriptor now */
    pthread_mutex_t lock;
    pthread_cond_t left; /* the last user of a lost link has left */
    /* sending */
    struct part *first, *last;
    struct part *urgent; /* an objection; goes out at the next frame's boundary */
    uint64_t sent;       /* bytes of the first part's current frame, header included, that the socket has taken */
    bool held;           /* cut, and not yet resumed: nothing may be sent */
    /* receiving */
    struct header header;
    unsigned have;    /* bytes of the header */
    uint64_t payload; /* of the current frame, and how many of its bytes are still to come */
    uint64_t missing;
    uint64_t filled; /* bytes of the current part that whole frames have brought */
    unsigned stage_start, stage_end;
    uint8_t *stash; /* what was read ahead in search of an objection; NULL: nothing. Comes after the stage */
    uint64_t stash_start, stash_end;
    char text[OBJECTION_BYTES + 1];
    uint8_t stage[STAGE_BYTES];
};

static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* Mark it lost and let the peer know by an end-of-file. The first reason stays. */
static void lose(struct link *link, enum lost why, int error) {
    int expected = NOT_LOST;
    if (why == LOST_ERRNO) link->error = error;
    if (atomic_compare_exchange_strong(&link->lost, &expected, why)) shutdown(link->fd, SHUT_RDWR);
}

/* ------------------------------------------------------------------ sending */

static void append(struct link *link, struct part *part) {
    part->next = NULL;
    if (link->first) link->last->next = part;
    else link->first = part;
    link->last = part;
}

static struct part *owned_part(uint64_t size) {
    struct part *part = malloc(sizeof *part + size);
    if (part) *part = (struct part){.data = (uint8_t *)(part + 1), .size = size, .owned = true};
    return part;
}

static struct header header_of(const struct part *part, uint64_t gone) {
    return (struct header){MAGIC, part->epoch, part->tag, part->size - gone};
}

/* Bytes of the frame that begins with payload byte `gone`, header included. */
static uint64_t frame_bytes(const struct part *part, uint64_t gone) {
    if (part->raw) return part->size;
    return sizeof(struct header) + smaller(part->size - gone, MAX_PAYLOAD);
}

/* List what comes next, at most CHUNK bytes of payload in several frames. */
static int gather(const struct link *link, struct iovec *iov, struct header *headers) {
    const struct part *part = link->first;
    uint64_t gone = part->gone, sent = link->sent, bytes = 0;
    int count = 0;
    while (part && count + 2 <= MAX_IOV && bytes < CHUNK) {
        const uint8_t *payload = part->data + gone;
        uint64_t size = frame_bytes(part, gone);
        if (!part->raw) {
            size -= sizeof(struct header);
            if (sent < sizeof(struct header)) {
                headers[count] = header_of(part, gone);
                iov[count].iov_base = (uint8_t *)&headers[count] + sent;
                iov[count].iov_len = sizeof(struct header) - sent;
                count++;
                sent = 0;
            } else {
                sent -= sizeof(struct header);
            }
        }
        uint64_t rest = smaller(size - sent, CHUNK - bytes);
        if (rest) {
            iov[count].iov_base = (uint8_t *)payload + sent;
            iov[count].iov_len = rest;
            count++;
            bytes += rest;
        }
        if (sent + rest < size) break;
        gone += size;
        sent = 0;
        if (part->raw || gone == part->size) {
            part = part->next;
            gone = 0;
        }
    }
    return count;
}

static void pop(struct link *link) {
    struct part *part = link->first;
    link->first = part->next;
    part->done = true;
    if (part->owned) free(part);
}

/* Note that the socket has taken `bytes` more. */
static void account(struct link *link, uint64_t bytes) {
    while (bytes) {
        struct part *part = link->first;
        uint64_t whole = frame_bytes(part, part->gone), rest = whole - link->sent;
        if (bytes < rest) {
            link->sent += bytes;
            return;
        }
        bytes -= rest;
        link->sent = 0;
        part->gone += part->raw ? part->size : whole - sizeof(struct header);
        if (part->gone == part->size) pop(link);
    }
}

enum pumped { PUMPED_ALL, PUMPED_SOME, PUMP_BLOCKED, PUMP_LOST };

/* One system call's worth of sending. The lock is held. PUMPED_SOME: the socket would take more. */
static enum pumped pump_once(struct link *link) {
    if (link->lost) return PUMP_LOST;
    if (link->held) return PUMP_BLOCKED;
    if (link->urgent && !link->sent && !(link->first && link->first->raw)) { /* between two frames, also of one part */
        link->urgent->next = link->first;
        if (!link->first) link->last = link->urgent;
        link->first = link->urgent;
        link->urgent = NULL;
    }
    if (!link->first) return PUMPED_ALL;
    struct iovec iov[MAX_IOV];
    struct header headers[MAX_IOV];
    struct msghdr message = {.msg_iov = iov, .msg_iovlen = gather(link, iov, headers)};
    uint64_t offered = 0;
    for (size_t at = 0; at < message.msg_iovlen; at++) offered += iov[at].iov_len;
    ssize_t count = sendmsg(link->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count < 0) {
        if (errno == EINTR) return PUMPED_SOME;
        if (errno == EAGAIN || errno == EWOULDBLOCK) return PUMP_BLOCKED;
        lose(link, LOST_ERRNO, errno);
        return PUMP_LOST;
    }
    account(link, count);
    if (!link->first && !link->urgent) return PUMPED_ALL;
    return (uint64_t)count < offered ? PUMP_BLOCKED : PUMPED_SOME;
}

static void drop_parts(struct link *link) {
    while (link->first) {
        link->first->dropped = true;
        pop(link);
    }
}

/* Forget what is queued; no buffer is read any more. Of a frame that is half sent the rest is kept: its true bytes, or
 * with `zeros` its true header and zeros. Without memory for that the link is lost. */
static void keep_half_frame_only(struct link *link, bool zeros) {
    struct part *half = link->first, *rest = NULL;
    if (half && half->raw) { /* the rest of a frame that was cut before, or an objection: its bytes are its own */
        link->first = half->next;
        rest = half;
    } else if (half && link->sent) {
        uint64_t missing = frame_bytes(half, half->gone) - link->sent;
        rest = owned_part(missing);
        if (rest) {
            uint8_t *to = (uint8_t *)rest->data;
            struct header header = header_of(half, half->gone);
            uint64_t of_header = link->sent < sizeof header ? sizeof header - link->sent : 0;
            memcpy(to, (uint8_t *)&header + link->sent, of_header);
            if (zeros) memset(to + of_header, 0, missing - of_header);
            else memcpy(to + of_header, half->data + half->gone + link->sent + of_header - sizeof header,
                        missing - of_header);
            rest->raw = true;
            link->sent = 0;
        } else {
            lose(link, LOST_ERRNO, ENOMEM);
        }
    }
    drop_parts(link);
    if (rest) append(link, rest);
    else link->sent = 0;
}

/* ------------------------------------------------------------------ receiving */

enum received { PART_DONE, PART_MORE, RECEIVE_BLOCKED, RECEIVE_LOST, RECEIVE_NEWER, RECEIVE_MIXED_UP, RECEIVE_OBJECTION };

/* At most `size` bytes, from the stage or the socket; 0: nothing is there. -1: lost. With `ahead` more is read at once
 * and kept in the stage. */
static int64_t take(struct link *link, void *to, uint64_t size, bool ahead) {
    if (link->stage_start == link->stage_end && link->stash) {
        uint64_t count = smaller(size, link->stash_end - link->stash_start);
        memcpy(to, link->stash + link->stash_start, count);
        link->stash_start += count;
        if (link->stash_start == link->stash_end) {
            free(link->stash);
            link->stash = NULL;
        }
        return count;
    }
    if (link->stage_start == link->stage_end) {
        bool direct = !ahead || size >= STAGE_BYTES / 2;
        ssize_t count;
        do count = recv(link->fd, direct ? to : link->stage, direct ? smaller(size, CHUNK) : STAGE_BYTES, MSG_DONTWAIT);
        while (count < 0 && errno == EINTR);
        if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
        if (count <= 0) {
            if (count) lose(link, LOST_ERRNO, errno);
            else lose(link, LOST_CLOSED, 0);
            return -1;
        }
        if (direct) return count;
        link->stage_start = 0;
        link->stage_end = count;
    }
    uint64_t count = smaller(size, link->stage_end - link->stage_start);
    memcpy(to, link->stage + link->stage_start, count);
    link->stage_start += count;
    return count;
}

/* The header of the frame that is arriving. PART_MORE: it is there. */
static enum received take_header(struct link *link, bool ahead) {
    if (link->lost) return RECEIVE_LOST;
    while (link->have < sizeof link->header) {
        int64_t count = take(link, (uint8_t *)&link->header + link->have, sizeof link->header - link->have, ahead);
        if (count < 0) return RECEIVE_LOST;
        if (!count) return RECEIVE_BLOCKED;
        link->have += count;
        if (link->have == sizeof link->header) {
            if (link->header.magic != MAGIC ||
                (link->header.tag == OBJECTION && link->header.left > OBJECTION_BYTES)) {
                lose(link, LOST_GARBAGE, 0);
                return RECEIVE_LOST;
            }
            link->payload = link->missing = smaller(link->header.left, MAX_PAYLOAD);
        }
    }
    return PART_MORE;
}

/* Payload of a frame that nobody wants, or of an objection. One system call at most. */
static enum received take_aside(struct link *link, bool is_objection) {
    if (link->missing) {
        uint8_t sink[STAGE_BYTES];
        uint64_t size = smaller(link->missing, sizeof sink);
        uint8_t *to = is_objection ? (uint8_t *)link->text + link->payload - link->missing : sink;
        int64_t count = take(link, to, size, false);
        if (count < 0) return RECEIVE_LOST;
        if (!count) return RECEIVE_BLOCKED;
        link->missing -= count;
    }
    if (link->missing) return PART_MORE;
    if (is_objection) { /* stays the current frame: whoever reads on this link in this epoch hears it again */
        link->text[link->payload] = 0;
        return RECEIVE_OBJECTION;
    }
    link->have = 0;
    return PART_MORE;
}

/* Move what has arrived to a part's buffer; at most one system call for payload. Frames of older epochs are dropped;
 * the header of a newer one stays, for the operations of that epoch. `want` is the whole part. */
static enum received receive_some(struct link *link, uint32_t epoch, uint64_t tag, uint8_t *data, uint64_t want) {
    enum received state = take_header(link, want <= AHEAD_BYTES);
    if (state != PART_MORE) return state;
    const struct header *header = &link->header;
    if (header->epoch > epoch) return RECEIVE_NEWER;
    if (header->epoch < epoch) return take_aside(link, false);
    if (header->tag == OBJECTION) return take_aside(link, true);
    if (header->tag != tag || header->left != want - link->filled) return RECEIVE_MIXED_UP;
    if (link->missing) {
        uint8_t *to = data + link->filled + link->payload - link->missing;
        uint64_t asked = smaller(link->missing, CHUNK);
        bool staged = link->stage_start < link->stage_end || link->stash;
        int64_t count = take(link, to, asked, want <= AHEAD_BYTES);
        if (count < 0) return RECEIVE_LOST;
        if (!count) return RECEIVE_BLOCKED;
        link->missing -= count;
        if (link->missing) return (uint64_t)count < asked && !staged ? RECEIVE_BLOCKED : PART_MORE;
    }
    link->have = 0;
    if (header->left > link->payload) {
        link->filled += link->payload;
        return PART_MORE;
    }
    link->filled = 0;
    return PART_DONE;
}

/* Bytes of the part that is being received, of those that have arrived. */
static uint64_t arrived(const struct link *link, uint32_t epoch) {
    bool current = link->have == sizeof link->header && link->header.epoch == epoch;
    return link->filled + (current ? link->payload - link->missing : 0);
}

/* Something has been read and is not handled yet: poll does not tell of it. */
static bool has_read_ahead(const struct link *link) {
    return link->stage_start < link->stage_end || link->stash || link->have == sizeof link->header;
}

/* Copy what comes `offset` bytes later, of what has been read ahead. */
static bool look_ahead(const struct link *link, uint64_t offset, void *to, uint64_t size) {
    uint64_t staged = link->stage_end - link->stage_start, stashed = link->stash_end - link->stash_start;
    if (offset + size > staged + stashed) return false;
    for (uint64_t at = 0; at < size; at++, offset++)
        ((uint8_t *)to)[at] = offset < staged ? link->stage[link->stage_start + offset]
                                              : link->stash[link->stash_start + offset - staged];
    return true;
}

/* Find an objection behind the current frame, in what has been read ahead. */
static bool objection_ahead(struct link *link, uint32_t epoch) {
    struct header header;
    for (uint64_t at = link->missing; look_ahead(link, at, &header, sizeof header);) {
        at += sizeof header;
        if (header.magic != MAGIC) return false; /* it is noticed when it is received */
        if (header.epoch == epoch && header.tag == OBJECTION && header.left <= OBJECTION_BYTES) {
            if (!look_ahead(link, at, link->text, header.left)) return false;
            link->text[header.left] = 0;
            return true;
        }
        at += smaller(header.left, MAX_PAYLOAD);
    }
    return false;
}

/* A frame that nobody expects yet is the current one: read on, into memory, in search of an objection behind it. Whoever
 * objects reads no more, so a worker that is blocked while sending to it would not be told otherwise. Done only when
 * nothing else has moved for a while: reading at once would let a worker send more that has not yet looked at what it
 * got. PART_DONE: that was all. */
static enum received search(struct link *link, uint32_t epoch) {
    if (objection_ahead(link, epoch)) return RECEIVE_OBJECTION;
    if (link->stash && link->stash_end == STASH_BYTES) return PART_DONE;
    uint8_t *stash = link->stash ? link->stash : malloc(STASH_BYTES);
    if (!stash) return PART_DONE;
    uint64_t end = link->stash ? link->stash_end : 0;
    ssize_t count;
    do count = recv(link->fd, stash + end, smaller(CHUNK, STASH_BYTES - end), MSG_DONTWAIT);
    while (count < 0 && errno == EINTR);
    if (count <= 0) {
        bool lost = !count || (errno != EAGAIN && errno != EWOULDBLOCK);
        if (lost) lose(link, count ? LOST_ERRNO : LOST_CLOSED, errno);
        if (!link->stash) free(stash);
        return lost ? RECEIVE_LOST : RECEIVE_BLOCKED;
    }
    if (!link->stash) link->stash_start = 0;
    link->stash = stash;
    link->stash_end = end + count;
    return PART_MORE;
}

/* Look at a link from which nothing is expected: for an objection, a newer epoch, a loss. RECEIVE_BLOCKED: nothing yet.
 * PART_DONE: a frame of this epoch waits. RECEIVE_MIXED_UP: it has the operation's own tag, and with `last` nothing more
 * is to come in this operation. */
static enum received hear(struct link *link, uint32_t epoch, uint64_t tag, bool last) {
    for (;;) {
        enum received state = take_header(link, false);
        if (state != PART_MORE) return state;
        const struct header *header = &link->header;
        if (header->epoch > epoch) return RECEIVE_NEWER;
        if (header->epoch == epoch && header->tag != OBJECTION)
            return header->tag == tag && last ? RECEIVE_MIXED_UP : PART_DONE;
        state = take_aside(link, header->epoch == epoch);
        if (state != PART_MORE) return state;
    }
}
