/* Sums of 32-bit floats under signs that follow from their places; see sketch.py, which says what they are and has the
   same in Python. */
#include <stdint.h>
#include <string.h>

#include "../../several_processors.h"
#include "blocks.h"

#define LANES 8 /* sums that are made side by side */

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
            *sums += block_factor(key, at / BLOCK) >> 63 ? -sum : sum;
            done += part;
        }
    }
}
