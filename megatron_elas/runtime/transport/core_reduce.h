/* Reductions of n sources in their order, in one pass. Included once, by _core.c.
 *
 * They give what communicator/reduction.py gives: 16-bit floats are summed and multiplied in fp32 and rounded once,
 * AVG divides at the end, integers wrap, a NaN stays one. Loops are plain, so that the compiler makes vector code of
 * them, for several kinds of processors where it can.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../../several_processors.h"

enum operation { SUM, AVG, MAX, MIN, PRODUCT, OPERATIONS };
enum dtype { FLOAT32, FLOAT64, BFLOAT16, FLOAT16, INT64, INT32, INT8, UINT8, DTYPES }; /* as program.py */

static const size_t item_bytes[DTYPES] = {4, 8, 2, 2, 8, 4, 1, 1};

#define BLOCK 1024 /* elements that are accumulated at one time: their sums stay in the nearest cache */

/* ------------------------------------------------------------------ 16-bit floats */

static inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float widen_bfloat16(uint16_t half) { return float_of_bits((uint32_t)half << 16); }

static inline uint16_t narrow_bfloat16(float value) {
    uint32_t bits = bits_of_float(value);
    uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16; /* to nearest, ties to even */
    return (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded;
}

static inline float widen_float16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = (uint32_t)(half & 0x7FFF) << 13;
    /* the exponent's bias grows by 112; infinities and NaNs by as much again, subnormals by one and a subtraction */
    uint32_t normal = rest + (112u << 23);
    uint32_t special = rest + (224u << 23);
    uint32_t subnormal = bits_of_float(float_of_bits(rest + (113u << 23)) - float_of_bits(113u << 23));
    uint32_t bits = rest >= (31u << 23) ? special : normal;
    bits = rest < (1u << 23) ? subnormal : bits;
    return float_of_bits(bits | sign);
}

static inline uint16_t narrow_float16(float value) {
    uint32_t bits = bits_of_float(value), sign = (bits >> 16) & 0x8000, rest = bits & 0x7FFFFFFF;
    uint32_t normal = (rest - (112u << 23) + 0xFFF + ((rest >> 13) & 1)) >> 13;
    /* adding one half puts the bits of a subnormal at the end of the sum, rounded by the adder */
    uint32_t subnormal = bits_of_float(float_of_bits(rest) + 0.5f) - bits_of_float(0.5f);
    uint32_t half = rest < (113u << 23) ? subnormal : normal;
    half = rest >= 0x477FF000 ? 0x7C00 : half; /* 65520 and above */
    half = rest > 0x7F800000 ? 0x7E00 : half;
    return half | sign;
}

/* ------------------------------------------------------------------ loops */

/* Elements as they lie in buffers of bytes, at any address. */
#define IN_BUFFER __attribute__((aligned(1), may_alias))
typedef float float32_t IN_BUFFER;
typedef double float64_t IN_BUFFER;
typedef uint16_t half_t IN_BUFFER;
typedef int64_t i64_t IN_BUFFER;
typedef uint64_t u64_t IN_BUFFER;
typedef int32_t i32_t IN_BUFFER;
typedef uint32_t u32_t IN_BUFFER;
typedef int8_t i8_t IN_BUFFER;
typedef uint8_t u8_t IN_BUFFER;

#define SAME(x) (x)
#define ADD(a, b) ((a) + (b))
#define MULTIPLY(a, b) ((a) * (b))
#define LARGER(a, b) ((a) > (b) ? (a) : (b))
#define LESSER(a, b) ((a) < (b) ? (a) : (b))
/* If either is a NaN the result is one. */
#define LARGER_FLOAT(a, b) ((a) != (a) || (a) > (b) ? (a) : (b))
#define LESSER_FLOAT(a, b) ((a) != (a) || (a) < (b) ? (a) : (b))

/* sums[] holds the result of the sources so far, in the type in which it is computed */
#define DEFINE_REDUCE(NAME, STORED, COMPUTED, WIDEN, NARROW, COMBINE, AVERAGE)                                        \
    FOR_SEVERAL_PROCESSORS static void NAME(const uint8_t *const *sources, size_t n, uint8_t *target, size_t count) { \
        COMPUTED sums[BLOCK];                                                                                         \
        for (size_t start = 0; start < count; start += BLOCK) {                                                       \
            size_t length = count - start < BLOCK ? count - start : BLOCK;                                            \
            const STORED *first = (const STORED *)sources[0] + start;                                                 \
            const STORED *second = (const STORED *)sources[1] + start;                                                \
            STORED *to = (STORED *)target + start;                                                                    \
            for (size_t i = 0; i < length; i++) {                                                                     \
                COMPUTED a = WIDEN(first[i]), b = WIDEN(second[i]);                                                   \
                sums[i] = COMBINE(a, b);                                                                              \
            }                                                                                                         \
            for (size_t at = 2; at < n; at++) {                                                                       \
                const STORED *next = (const STORED *)sources[at] + start;                                             \
                for (size_t i = 0; i < length; i++) {                                                                 \
                    COMPUTED a = sums[i], b = WIDEN(next[i]);                                                         \
                    sums[i] = COMBINE(a, b);                                                                          \
                }                                                                                                     \
            }                                                                                                         \
            if (AVERAGE)                                                                                              \
                for (size_t i = 0; i < length; i++) to[i] = NARROW(sums[i] / (COMPUTED)n);                            \
            else                                                                                                      \
                for (size_t i = 0; i < length; i++) to[i] = NARROW(sums[i]);                                          \
        }                                                                                                             \
    }

#define DEFINE_FLOAT(SUFFIX, STORED, COMPUTED, WIDEN, NARROW)                                    \
    DEFINE_REDUCE(sum_##SUFFIX, STORED, COMPUTED, WIDEN, NARROW, ADD, false)                     \
    DEFINE_REDUCE(average_##SUFFIX, STORED, COMPUTED, WIDEN, NARROW, ADD, true)                  \
    DEFINE_REDUCE(max_##SUFFIX, STORED, COMPUTED, WIDEN, NARROW, LARGER_FLOAT, false)            \
    DEFINE_REDUCE(min_##SUFFIX, STORED, COMPUTED, WIDEN, NARROW, LESSER_FLOAT, false)            \
    DEFINE_REDUCE(product_##SUFFIX, STORED, COMPUTED, WIDEN, NARROW, MULTIPLY, false)

/* Sums and products wrap as unsigned numbers do; in C an overflow of signed ones is undefined. */
#define DEFINE_INTEGER(SUFFIX, STORED, STORED_UNSIGNED, COMPUTED, UNSIGNED)                       \
    DEFINE_REDUCE(sum_##SUFFIX, STORED_UNSIGNED, UNSIGNED, SAME, SAME, ADD, false)               \
    DEFINE_REDUCE(max_##SUFFIX, STORED, COMPUTED, SAME, SAME, LARGER, false)                     \
    DEFINE_REDUCE(min_##SUFFIX, STORED, COMPUTED, SAME, SAME, LESSER, false)                     \
    DEFINE_REDUCE(product_##SUFFIX, STORED_UNSIGNED, UNSIGNED, SAME, SAME, MULTIPLY, false)

DEFINE_FLOAT(float32, float32_t, float, SAME, SAME)
DEFINE_FLOAT(float64, float64_t, double, SAME, SAME)
DEFINE_FLOAT(bfloat16, half_t, float, widen_bfloat16, narrow_bfloat16)
DEFINE_FLOAT(float16, half_t, float, widen_float16, narrow_float16)
DEFINE_INTEGER(int64, i64_t, u64_t, int64_t, uint64_t)
DEFINE_INTEGER(int32, i32_t, u32_t, int32_t, uint32_t)
DEFINE_INTEGER(int8, i8_t, u8_t, int8_t, uint8_t)
DEFINE_INTEGER(uint8, u8_t, u8_t, uint8_t, uint8_t)

typedef void reduction(const uint8_t *const *sources, size_t n, uint8_t *target, size_t count);

#define FLOAT_ROW(SUFFIX) {sum_##SUFFIX, average_##SUFFIX, max_##SUFFIX, min_##SUFFIX, product_##SUFFIX}
#define INTEGER_ROW(SUFFIX) {sum_##SUFFIX, NULL, max_##SUFFIX, min_##SUFFIX, product_##SUFFIX}

static reduction *const reductions[DTYPES][OPERATIONS] = {
    FLOAT_ROW(float32),  FLOAT_ROW(float64),   FLOAT_ROW(bfloat16), FLOAT_ROW(float16),
    INTEGER_ROW(int64),  INTEGER_ROW(int32),   INTEGER_ROW(int8),   INTEGER_ROW(uint8),
};
