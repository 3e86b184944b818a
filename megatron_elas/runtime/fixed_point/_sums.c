/* Gradients rounded to integers and added; see sums.py, which says what is computed and has the same in torch. */
#include <stdint.h>
#include <string.h>

#include "../../several_processors.h"

/* To a double below 2^51 its addition leaves a double whose low bits are the nearest integer, ties to even. */
#define ROUNDER 6755399441055744.0 /* 1.5 * 2^52 */

static inline uint64_t bits_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    return bits;
}

static inline int32_t magnitude_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits & INT32_MAX;
}

/* Unsigned, since what does not fit may wrap: it is noticed by ``largest``. */
static inline uint64_t term_of(float gradient, double scale) {
    return bits_of((double)gradient * scale + ROUNDER) - bits_of(ROUNDER);
}

FOR_SEVERAL_PROCESSORS
void elas_add_float32(
    const float *restrict gradients, uint64_t *restrict sums, int64_t count, double scale, int32_t *restrict largest
) {
    int32_t most = *largest;
    for (int64_t i = 0; i < count; i++) {
        int32_t magnitude = magnitude_of(gradients[i]);
        most = magnitude > most ? magnitude : most;
        sums[i] += term_of(gradients[i], scale);
    }
    *largest = most;
}

FOR_SEVERAL_PROCESSORS
void elas_add_bfloat16(
    const uint16_t *restrict gradients, uint64_t *restrict sums, int64_t count, double scale, int32_t *restrict largest
) {
    int32_t most = *largest;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)gradients[i] << 16;
        float gradient;
        memcpy(&gradient, &bits, 4);
        int32_t magnitude = (int32_t)(bits & INT32_MAX);
        most = magnitude > most ? magnitude : most;
        sums[i] += term_of(gradient, scale);
    }
    *largest = most;
}
