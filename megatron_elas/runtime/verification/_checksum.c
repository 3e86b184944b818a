/* Checksums of runs of 8-bit, 16-bit and 32-bit words; see checksum.py, which says what they are and has the same in Python. */
#include <stdint.h>
#include <string.h>

#include "../../several_processors.h"
#include "blocks.h"

/* Both: sum of word times weight, modulo 2^64. */
FOR_SEVERAL_PROCESSORS
static uint64_t weigh32(const uint32_t *words, const uint32_t *weights, int64_t count) {
    uint64_t low = 0, high = 0;
    int64_t pairs = count / 2;
    for (int64_t i = 0; i < pairs; i++) { /* in pairs, as vector units multiply 32-bit halves of 64-bit lanes */
        uint64_t word, weight;
        memcpy(&word, words + 2 * i, 8);
        memcpy(&weight, weights + 2 * i, 8);
        low += (word & UINT32_MAX) * (weight & UINT32_MAX);
        high += (word >> 32) * (weight >> 32);
    }
    return low + high + (count % 2 ? (uint64_t)words[count - 1] * weights[count - 1] : 0);
}

FOR_SEVERAL_PROCESSORS
static uint64_t weigh16(const uint16_t *words, const uint32_t *weights, int64_t count) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += (uint64_t)words[i] * weights[i];
    return sum;
}

FOR_SEVERAL_PROCESSORS
static uint64_t weigh8(const uint8_t *words, const uint32_t *weights, int64_t count) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += (uint64_t)words[i] * weights[i];
    return sum;
}

/* Words from ``start`` on, of ``width`` bytes each (1, 2 or 4), with a table of BLOCK weights. */
uint64_t elas_checksum(
    const void *words, int32_t width, int64_t count, const uint32_t *weights, uint64_t key, uint64_t start
) {
    uint64_t total = 0;
    for (int64_t done = 0; done < count;) {
        uint64_t at = start + (uint64_t)done, within = at % BLOCK;
        int64_t room = (int64_t)(BLOCK - within), part = count - done < room ? count - done : room;
        const char *place = (const char *)words + done * width;
        uint64_t sum = width == 4 ? weigh32((const uint32_t *)place, weights + within, part)
                     : width == 2 ? weigh16((const uint16_t *)place, weights + within, part)
                                  : weigh8((const uint8_t *)place, weights + within, part);
        total += block_factor(key, at / BLOCK) * sum;
        done += part;
    }
    return total;
}

/* The same for every range of ``size`` words of the row apart; ``sums`` has room for one per range that is touched. */
void elas_range_sums(
    const void *words, int32_t width, int64_t count, const uint32_t *weights, uint64_t key, uint64_t start,
    uint64_t size, uint64_t *sums
) {
    for (int64_t done = 0; done < count; sums++) {
        uint64_t at = start + (uint64_t)done;
        int64_t room = (int64_t)(size - at % size), part = count - done < room ? count - done : room;
        *sums = elas_checksum((const char *)words + done * width, width, part, weights, key, at);
        done += part;
    }
}
