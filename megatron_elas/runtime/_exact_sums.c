/* Sums of squares that are the same for any cut and order; see exact_sums.py, which has the same in Python. */
#include <stdint.h>
#include <string.h>

#include "../several_processors.h"

#define BLOCK 64 /* as spec/buckets.py has CUT */
#define LANES 8
#define LIMBS 20
#define LOWEST (-320)
#define LOW32 UINT64_C(0xFFFFFFFF)

/* A square of 24 bits is exact in a double, so it does not matter whether it is fused with the addition. */
FOR_SEVERAL_PROCESSORS
static void sum_blocks(const float *values, int64_t blocks, double *sums) {
    for (int64_t block = 0; block < blocks; block++, values += BLOCK) {
        double lanes[LANES];
        for (int lane = 0; lane < LANES; lane++)
            lanes[lane] = (double)values[lane] * (double)values[lane];
        for (int row = 1; row < BLOCK / LANES; row++)
            for (int lane = 0; lane < LANES; lane++) {
                double value = values[row * LANES + lane];
                lanes[lane] += value * value;
            }
        for (int width = LANES / 2; width > 0; width /= 2)
            for (int lane = 0; lane < width; lane++)
                lanes[lane] += lanes[lane + width];
        sums[block] = lanes[0];
    }
}

static void add(double sum, int64_t *row) {
    uint64_t bits;
    memcpy(&bits, &sum, 8);
    int exponent = (int)(bits >> 52 & 0x7FF);
    uint64_t mantissa = bits & ((UINT64_C(1) << 52) - 1);
    if (exponent == 0x7FF) {
        row[mantissa ? LIMBS : LIMBS + 1]++;
        return;
    }
    if (exponent == 0) /* zero: no square is as small as a subnormal double */
        return;
    mantissa |= UINT64_C(1) << 52;
    int position = exponent - 1075 - LOWEST;
    if (position < 0) { /* only zeros go: no square has bits below 2**-298 */
        mantissa >>= -position;
        position = 0;
    }
    uint64_t low = (mantissa & LOW32) << position % 32, high = (mantissa >> 32) << position % 32;
    int64_t *limb = row + position / 32;
    limb[0] += (int64_t)(low & LOW32);
    limb[1] += (int64_t)((low >> 32) + (high & LOW32));
    limb[2] += (int64_t)(high >> 32);
}

/* Add the squares of so many values, from the start of a block on, to a row of LIMBS + 2 numbers. */
void elas_add_squares(const float *values, int64_t count, int64_t *row) {
    enum { CHUNK = 64 };
    double sums[CHUNK];
    int64_t blocks = count / BLOCK;
    for (int64_t done = 0; done < blocks; done += CHUNK) {
        int64_t some = blocks - done < CHUNK ? blocks - done : CHUNK;
        sum_blocks(values + done * BLOCK, some, sums);
        for (int64_t i = 0; i < some; i++)
            add(sums[i], row);
    }
    if (count % BLOCK) {
        float last[BLOCK] = {0};
        memcpy(last, values + blocks * BLOCK, sizeof(float) * (size_t)(count % BLOCK));
        sum_blocks(last, 1, sums);
        add(sums[0], row);
    }
}
