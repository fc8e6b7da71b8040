/* What a decoder layer does beside int8 products, as dispatch/kernels/decoder_reference.py defines it: the same bits.
 *
 * Every result belongs to one row and is computed from it by one sequence of operations, whatever rows are beside it.
 * Weights and caches are fp32 or, where `half` is set, bf16. Rows and results are fp32.
 */
#include "exact.h"
#include <stddef.h>

/* a vector is what one register holds: wider ones go through memory */
#ifdef __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
enum { SUMS = 64, PARTS = SUMS / LANES, KEYS = 64, ROWS = 4 };
typedef float vector __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t shorts __attribute__((vector_size(2 * LANES)));

static inline vector load(const void *data, int64_t at, int half) {
    vector x;
    if (half) {
        shorts raw;
        memcpy(&raw, (const uint16_t *)data + at, sizeof raw);
        words bits = __builtin_convertvector(raw, words) << 16;
        memcpy(&x, &bits, sizeof x);
    } else
        memcpy(&x, (const float *)data + at, sizeof x);
    return x;
}

static inline float load_one(const void *data, int64_t at, int half) {
    return half ? from_bits((uint32_t)((const uint16_t *)data)[at] << 16) : ((const float *)data)[at];
}

static inline void store_one(void *data, int64_t at, float x, int half) {
    if (half) /* x is a bf16 already */
        ((uint16_t *)data)[at] = (uint16_t)(bits_of(x) >> 16);
    else
        ((float *)data)[at] = x;
}

/* `count` (a constant where it is inlined) rows of x [.., K] times one weight row: SUMS running sums a row, then halved. */
static inline __attribute__((always_inline)) void dots(const float *x, const void *w, int64_t first, int64_t K, int half,
                                                       int count, float *out) {
    vector sums[ROWS][PARTS];
    int64_t k = 0;
    for (int i = 0; i < count; i++)
        for (int p = 0; p < PARTS; p++) sums[i][p] = (vector){0};
    for (; K - k >= SUMS; k += SUMS)
        for (int p = 0; p < PARTS; p++) {
            vector v = load(w, first + k + p * LANES, half);
            for (int i = 0; i < count; i++) sums[i][p] += load(x + i * K, k + p * LANES, 0) * v;
        }
    for (int i = 0; i < count; i++) {
        float lanes[SUMS];
        memcpy(lanes, sums[i], sizeof lanes);
        for (int64_t rest = k; rest < K; rest++) lanes[rest - k] += x[i * K + rest] * load_one(w, first + rest, half);
        for (int size = SUMS / 2; size; size /= 2)
            for (int j = 0; j < size; j++) lanes[j] += lanes[j + size];
        out[i] = lanes[0];
    }
}

static inline __attribute__((always_inline)) void columns(const float *x, const void *w, int64_t first, int64_t last, int64_t M,
                                                          int64_t N, int64_t K, int half, float *y) {
    for (int64_t n = first; n < last; n++)
        for (int64_t m = 0; m < M; m += ROWS) {
            float out[ROWS];
            int64_t count = M - m < ROWS ? M - m : ROWS;
            if (count == 1) dots(x + m * K, w, n * K, K, half, 1, out);
            if (count == 2) dots(x + m * K, w, n * K, K, half, 2, out);
            if (count == 3) dots(x + m * K, w, n * K, K, half, 3, out);
            if (count == 4) dots(x + m * K, w, n * K, K, half, 4, out);
            for (int64_t i = 0; i < count; i++) y[(m + i) * N + n] = out[i];
        }
}

/* y [M, N] of x [M, K] and w [N, K]. */
void float_linear(const float *x, const void *w, int64_t half, int64_t M, int64_t N, int64_t K, float *y) {
#pragma omp parallel for schedule(static) if (M * N * K > MANY)
    for (int64_t block = 0; block < (N + 15) / 16; block++) {
        int64_t last = block * 16 + 16 < N ? block * 16 + 16 : N;
        if (half)
            columns(x, w, block * 16, last, M, N, K, 1, y);
        else
            columns(x, w, block * 16, last, M, N, K, 0, y);
    }
}

/* out [M, H] of x [M, H] and weight [H]. */
void rms_norm(const float *x, const float *weight, float eps, int64_t M, int64_t H, float *out) {
#pragma omp parallel for schedule(static) if (M * H > MANY)
    for (int64_t m = 0; m < M; m++) {
        const float *row = x + m * H;
        uint32_t largest = largest_bits(row, H);
        float factor = NAN;
        if (largest < 0x7f800000u) {
            /* the row as whole numbers below 2^22, in steps of a power of two, whose squares add up exactly */
            uint32_t exponent = largest >> 23 < 22 ? 1 : (largest >> 23) - 21;
            float step = from_bits(exponent << 23), per_step = from_bits((254 - exponent) << 23);
            int64_t sum = 0;
            for (int64_t k = 0; k < H; k++) {
                int32_t value = (int32_t)((row[k] * per_step + ROUNDER) - ROUNDER);
                sum += (int64_t)value * value;
            }
            factor = 1.0f / sqrtf((float)sum / (float)H * step * step + eps);
        }
        for (int64_t k = 0; k < H; k++) out[m * H + k] = row[k] * factor * weight[k];
    }
}

static inline float bf16(float x) { /* to the nearest, half to even; NaN stays one */
    uint32_t bits = bits_of(x);
    return x != x ? x : from_bits((bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u);
}

/* Turns the q and k of qkv [T, (heads + 2 kv_heads) * D] to their positions, from *start on; q [T, heads * D], k into keys
 * [kv_heads, blocks, D, KEYS], v into values [kv_heads, blocks, KEYS, D]. cos and sin are [positions, D / 2]. */
void rotate_and_store(const float *qkv, const float *cosines, const float *sines, const int64_t *start, int64_t half, int64_t T,
                      int64_t heads, int64_t kv_heads, int64_t D, int64_t blocks, float *q, void *keys, void *values) {
    int64_t middle = D / 2;
    for (int64_t t = 0; t < T; t++) {
        int64_t position = *start + t;
        const float *c = cosines + position * middle, *s = sines + position * middle;
        const float *row = qkv + t * (heads + 2 * kv_heads) * D;
        for (int64_t h = 0; h < heads + kv_heads; h++, row += D) {
            float turned[2 * middle];
            for (int64_t d = 0; d < middle; d++) {
                turned[d] = row[d] * c[d] - row[d + middle] * s[d];
                turned[d + middle] = row[d + middle] * c[d] + row[d] * s[d];
            }
            if (half)
                for (int64_t d = 0; d < D; d++) turned[d] = bf16(turned[d]);
            if (h < heads) {
                memcpy(q + (t * heads + h) * D, turned, (size_t)D * sizeof *q);
                continue;
            }
            int64_t at = ((h - heads) * blocks + position / KEYS) * D * KEYS + position % KEYS;
            for (int64_t d = 0; d < D; d++) store_one(keys, at + d * KEYS, turned[d], (int)half);
        }
        for (int64_t h = 0; h < kv_heads; h++, row += D)
            for (int64_t d = 0; d < D; d++) store_one(values, (h * blocks * KEYS + position) * D + d, row[d], (int)half);
    }
}

/* One head of one row over `length` keys; acc holds D numbers, a multiple of LANES. */
static inline __attribute__((always_inline)) void attend(const float *q, const void *keys, const void *values, int64_t first,
                                                         int64_t length, int64_t D, float scale, int half, float *out) {
    vector acc[D / LANES];
    float largest = -INFINITY, total = 0.0f;
    for (int64_t d = 0; d < D / LANES; d++) acc[d] = (vector){0};
    for (int64_t begin = 0; begin < length; begin += KEYS) {
        int64_t block = first + begin * D, count = length - begin < KEYS ? length - begin : KEYS;
        vector sums[PARTS] = {0};
        for (int64_t d = 0; d < D; d++)
            for (int p = 0; p < PARTS; p++) sums[p] += q[d] * load(keys, block + d * KEYS + p * LANES, half);
        float scores[KEYS];
        memcpy(scores, sums, sizeof scores);
        for (int64_t i = 0; i < KEYS; i++) scores[i] *= scale;
        float seen = -INFINITY, best;
        int finite = 1;
        for (int64_t i = 0; i < count; i++) {
            seen = scores[i] > seen ? scores[i] : seen;
            finite &= scores[i] - scores[i] == 0.0f;
        }
        for (int64_t i = 0; i < KEYS; i++) scores[i] = i < count ? exp_exact(scores[i] - seen) : 0.0f;
        best = seen > largest ? seen : largest;
        float before = exp_exact(largest - best), now = exp_exact(seen - best);
        largest = best;
        /* places that hold zeros only need not be added */
        int64_t most = 1;
        while (most < count) most *= 2;
        for (int64_t d = 0; d < D / LANES; d++) {
            vector products[KEYS];
            for (int64_t i = 0; i < most; i++)
                products[i] = i < count ? scores[i] * load(values, block + i * D + d * LANES, half) : (vector){0};
            for (int64_t size = most / 2; size; size /= 2)
                for (int64_t i = 0; i < size; i++) products[i] += products[i + size];
            acc[d] = acc[d] * before + products[0] * now;
        }
        for (int64_t size = most / 2; size; size /= 2)
            for (int64_t i = 0; i < size; i++) scores[i] += scores[i + size];
        total = total * before + (finite ? scores[0] : NAN) * now;
    }
    for (int64_t d = 0; d < D / LANES; d++) acc[d] /= total;
    memcpy(out, acc, (size_t)D * sizeof *out);
}

/* out [T, heads * D] of q, row t over the keys up to position *start + t, block by block. */
void attention(const float *q, const void *keys, const void *values, const int64_t *start, int64_t half, int64_t T, int64_t heads,
               int64_t kv_heads, int64_t D, int64_t blocks, float scale, float *out) {
    int64_t size = blocks * KEYS * D;
#pragma omp parallel for schedule(dynamic, 1) if (4 * T * heads * (*start + T) * D > MANY)
    for (int64_t i = 0; i < T * heads; i++) {
        int64_t first = i % heads / (heads / kv_heads) * size, length = *start + i / heads + 1;
        const float *row = q + i * D;
        float *to = out + i * D;
        /* sizes known to the compiler keep the sums in registers */
        if (D == 128 && half)
            attend(row, keys, values, first, length, 128, scale, 1, to);
        else if (D == 128)
            attend(row, keys, values, first, length, 128, scale, 0, to);
        else if (D == 32 && half)
            attend(row, keys, values, first, length, 32, scale, 1, to);
        else if (D == 32)
            attend(row, keys, values, first, length, 32, scale, 0, to);
        else
            attend(row, keys, values, first, length, D, scale, (int)half, to);
    }
}

/* The top_k experts of logits [T, E], the best first and the lowest id first among equals, and their softmax probabilities. */
void route(const float *logits, int64_t T, int64_t E, int64_t top_k, int64_t normalize, int64_t *ids, float *weights) {
    for (int64_t t = 0; t < T; t++) {
        const float *row = logits + t * E;
        float largest = row[0], total = 0.0f, chosen = 0.0f;
        char taken[E];
        memset(taken, 0, (size_t)E);
        for (int64_t e = 0; e < E; e++) largest = row[e] > largest ? row[e] : largest;
        int64_t most = 1;
        while (most < E) most *= 2;
        float terms[most];
        for (int64_t e = 0; e < most; e++) terms[e] = e < E ? exp_exact(row[e] - largest) : 0.0f;
        for (int64_t size = most / 2; size; size /= 2)
            for (int64_t e = 0; e < size; e++) terms[e] += terms[e + size];
        total = terms[0];
        for (int64_t e = 0; e < E; e++) total += row[e] - row[e]; /* 0, or NaN from what is not finite */
        for (int64_t slot = 0; slot < top_k; slot++) {
            int64_t best = -1;
            for (int64_t e = 0; e < E; e++)
                if (!taken[e] && (best < 0 || row[e] > row[best])) best = e;
            taken[best] = 1;
            ids[t * top_k + slot] = best;
            weights[t * top_k + slot] = exp_exact(row[best] - largest) / total;
            chosen += weights[t * top_k + slot];
        }
        if (normalize)
            for (int64_t slot = 0; slot < top_k; slot++) weights[t * top_k + slot] /= chosen + 1e-20f;
    }
}

/* Floats of scratch that `float_experts` needs. */
int64_t float_experts_scratch(int64_t T, int64_t H, int64_t I, int64_t top_k) { return T * top_k * (3 * I + H); }

/* out [T, H] of x [T, H]: gate_up [E, 2 I, H], down [E, H, I]; the ids have been checked. */
void float_experts(const float *x, const void *gate_up, const void *down, const int64_t *ids, const float *routing, int64_t half,
                   int64_t T, int64_t H, int64_t I, int64_t top_k, float *out, float *scratch) {
    int64_t P = T * top_k, each = half ? 2 : 4;
    float *both = scratch, *h = both + P * 2 * I, *y = h + P * I;
#pragma omp parallel if (P * I * H > MANY)
    {
        /* a pair alone: its weights may be read again for another row with the same expert */
#pragma omp for schedule(dynamic, 1)
        for (int64_t p = 0; p < P; p++) {
            const char *first = (const char *)gate_up + ids[p] * 2 * I * H * each;
            const char *second = (const char *)down + ids[p] * H * I * each;
            for (int pass = 0; pass < 2; pass++) {
                const float *from = pass ? h + p * I : x + p / top_k * H;
                float *to = pass ? y + p * H : both + p * 2 * I;
                const char *w = pass ? second : first;
                int64_t N = pass ? H : 2 * I, K = pass ? I : H;
                if (half)
                    columns(from, w, 0, N, 1, N, K, 1, to);
                else
                    columns(from, w, 0, N, 1, N, K, 0, to);
                if (!pass)
                    for (int64_t n = 0; n < I; n++) h[p * I + n] = silu(to[n]) * to[I + n];
            }
            for (int64_t n = 0; n < H; n++) y[p * H + n] *= routing[p];
        }
#pragma omp for schedule(static)
        for (int64_t t = 0; t < T; t++)
            for (int64_t n = 0; n < H; n++) {
                float sum = 0.0f;
                for (int64_t j = 0; j < top_k; j++) sum += y[(t * top_k + j) * H + n];
                out[t * H + n] = sum;
            }
    }
}
