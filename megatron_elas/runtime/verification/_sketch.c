/* Sums of 32-bit floats under signs that follow from their places; see sketch.py, which says what they are and has the
   same in Python. */
#include <stdint.h>
#include <string.h>

#include "../../several_processors.h"

#define BLOCK 4096 /* as checksum.py */
#define LANES 8    /* sums that are made side by side */

/* As checksum.py's _mix. */
static uint64_t mix(uint64_t key, uint64_t block) {
    uint64_t x = key + block * UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return (x ^ (x >> 31)) | 1;
}

/* The sign of a value is turned where the highest bit of its weight is set. */
FOR_SEVERAL_PROCESSORS
static double add_signed(const uint32_t *words, const uint32_t *weights, int64_t count) {
    double sums[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            uint32_t bits = words[i + lane] ^ (weights[i + lane] & UINT32_C(0x80000000));
            float value;
            memcpy(&value, &bits, 4);
            sums[lane] += value;
        }
    for (; i < count; i++) {
        uint32_t bits = words[i] ^ (weights[i] & UINT32_C(0x80000000));
        float value;
        memcpy(&value, &bits, 4);
        sums[i % LANES] += value;
    }
    double total = 0;
    for (int lane = 0; lane < LANES; lane++)
        total += sums[lane];
    return total;
}

/* For every range of ``size`` values of the row; ``sums`` has room for one per range that is touched. */
void elas_signed_sums(
    const uint32_t *words, int64_t count, const uint32_t *weights, uint64_t key, uint64_t start, uint64_t size,
    double *sums
) {
    for (int64_t done = 0; done < count; sums++) {
        uint64_t first = start + (uint64_t)done;
        int64_t left = (int64_t)(size - first % size), end = done + (count - done < left ? count - done : left);
        *sums = 0;
        while (done < end) {
            uint64_t at = start + (uint64_t)done, within = at % BLOCK;
            int64_t room = (int64_t)(BLOCK - within), part = end - done < room ? end - done : room;
            double sum = add_signed(words + done, weights + within, part);
            *sums += mix(key, at / BLOCK) >> 63 ? -sum : sum;
            done += part;
        }
    }
}
