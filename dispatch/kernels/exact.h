/* What cpu.c and decoder.c share: the fp32 steps of reference.py and decoder_reference.py that must round as they do there.
 *
 * Build without fused multiply-add (-ffp-contract=off): it would change the last bits of the floats.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

/* With fewer products than that, waking the other threads takes longer than the work. */
enum { MANY = 1 << 17 };
static const float ROW_LIMIT = 32639.0f, SMALLEST_SCALE = 0x1p-126f;
/* below 2^22, adding and taking away 1.5 * 2^23 rounds half to even */
static const float ROUNDER = 12582912.0f;

static inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* exp(t) in [-87, 88]; the argument is moved into it, NaN is taken for 0 there and must come back in what is done with it. */
static inline float exp_exact(float t) {
    t = t < -87.0f ? -87.0f : t > 88.0f ? 88.0f : t;
    t = t == t ? t : 0.0f;
    float n = (t * 1.4426950408889634f + ROUNDER) - ROUNDER;
    float r = (t - n * (355.0f / 512.0f)) - n * -2.1219444005469057e-4f;
    float series = (float)(1.0 / 5040);
    series = series * r + (float)(1.0 / 720);
    series = series * r + (float)(1.0 / 120);
    series = series * r + (float)(1.0 / 24);
    series = series * r + (float)(1.0 / 6);
    series = series * r + 0.5f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    return series * from_bits((uint32_t)((int32_t)n + 127) << 23);
}

static inline float silu(float x) { return x / (1.0f + exp_exact(-x)); }

/* The largest magnitude of a row as bits: so ordered, NaN above inf above every number, and none is lost. */
static inline uint32_t largest_bits(const float *x, int64_t K) {
    uint32_t largest = 0;
    for (int64_t k = 0; k < K; k++) {
        uint32_t bits = bits_of(x[k]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

static inline void quantize_row(const float *x, int64_t K, int16_t *values, float *scale) {
    uint32_t largest = largest_bits(x, K);
    if (largest >= 0x7f800000u) {
        *scale = NAN;
        memset(values, 0, (size_t)K * sizeof *values);
        return;
    }
    float s = from_bits(largest) / ROW_LIMIT;
    s = s < SMALLEST_SCALE ? SMALLEST_SCALE : s;
    *scale = s;
    for (int64_t k = 0; k < K; k++) values[k] = (int16_t)(int32_t)((x[k] / s + ROUNDER) - ROUNDER);
}
