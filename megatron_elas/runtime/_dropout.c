/* Dropout masks and their products; see dropout.py, which says what they are and has the same in Python. */
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_SEVERAL_PROCESSORS __attribute__((target_clones("default", "avx2", "arch=skylake-avx512")))
#else
#define FOR_SEVERAL_PROCESSORS
#endif

static inline uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * UINT32_C(0x85EBCA6B);
    x = (x ^ (x >> 13)) * UINT32_C(0xC2B2AE35);
    return x ^ (x >> 16);
}

/* 1: the element stays. */
FOR_SEVERAL_PROCESSORS
void elas_draw_mask(uint64_t key, uint32_t threshold, uint8_t *mask, int64_t count) {
    uint32_t low = (uint32_t)key, high = (uint32_t)(key >> 32);
    for (int64_t i = 0; i < count; i++)
        mask[i] = mix(mix((uint32_t)i + low) ^ high) >= threshold;
}

FOR_SEVERAL_PROCESSORS
void elas_apply_mask_fp32(const float *values, const uint8_t *mask, float scale, float *products, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        products[i] = values[i] * (mask[i] ? scale : 0.0f);
}

FOR_SEVERAL_PROCESSORS
void elas_apply_mask_bf16(const uint16_t *values, const uint8_t *mask, float scale, uint16_t *products, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        union {
            uint32_t bits;
            float number;
        } value = {.bits = (uint32_t)values[i] << 16};
        value.number *= mask[i] ? scale : 0.0f;
        /* To the nearest, ties to even; a NaN stays one. */
        uint32_t rounded = (value.bits + UINT32_C(0x7FFF) + ((value.bits >> 16) & 1)) >> 16;
        products[i] = (value.bits & UINT32_C(0x7FFFFFFF)) > UINT32_C(0x7F800000) ? UINT16_C(0x7FC0) : (uint16_t)rounded;
    }
}
