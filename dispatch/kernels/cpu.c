/* W8A16 with exact integer sums, as dispatch/kernels/reference.py defines it: the same bits, for int8 weights read once.
 *
 * Bounds. |weight| <= 127 and |row value| <= 32768, so a product is below 2^22 and an int32 holds 516 of them. Of a
 * CHUNK of 4096 each of the 8 lanes gets 512; then they are spread into int64, so sums of any K stay exact.
 * Build without fused multiply-add (-ffp-contract=off): it would change the last bits of the floats.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

enum { CHUNK = 4096, ROWS = 4, PREFETCH = 3072, UNITS = 64, SMALL = 1 << 19, MANY = 1 << 22 };
/* With fewer weights than SMALL and fewer products than MANY, waking the other threads takes longer than the work. */
static const float ROW_LIMIT = 32639.0f, SMALLEST_SCALE = 0x1p-126f;

#if defined(__AVX512BW__)
enum { WIDE = 32 };
typedef __m512i vector;
static inline vector zeros(void) { return _mm512_setzero_si512(); }
static inline vector add(vector a, vector b) { return _mm512_add_epi32(a, b); }
static inline int64_t spread(vector lanes) {
    return _mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_cvtepi32_epi64(_mm512_castsi512_si256(lanes)),
                                                    _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(lanes, 1))));
}
static inline vector wide(const int8_t *w) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)w)); }
static inline vector add_products(vector sum, vector w, const int16_t *x) {
#ifdef __AVX512VNNI__
    return _mm512_dpwssd_epi32(sum, w, _mm512_loadu_si512(x));
#else
    return add(sum, _mm512_madd_epi16(w, _mm512_loadu_si512(x)));
#endif
}
#elif defined(__AVX2__)
enum { WIDE = 16 };
typedef __m256i vector;
static inline vector zeros(void) { return _mm256_setzero_si256(); }
static inline vector add(vector a, vector b) { return _mm256_add_epi32(a, b); }
static inline int64_t spread(vector lanes) {
    __m256i low = _mm256_cvtepi32_epi64(_mm256_castsi256_si128(lanes));
    __m256i high = _mm256_cvtepi32_epi64(_mm256_extracti128_si256(lanes, 1));
    __m256i sum = _mm256_add_epi64(low, high);
    return _mm256_extract_epi64(sum, 0) + _mm256_extract_epi64(sum, 1) + _mm256_extract_epi64(sum, 2) +
           _mm256_extract_epi64(sum, 3);
}
static inline vector wide(const int8_t *w) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)w)); }
static inline vector add_products(vector sum, vector w, const int16_t *x) {
    return add(sum, _mm256_madd_epi16(w, _mm256_loadu_si256((const __m256i *)x)));
}
#endif

/* One weight row [K] times one activation row. */
static int64_t dot(const int8_t *w, const int16_t *x, int64_t K) {
    int64_t sum = 0, k = 0;
#ifdef __AVX2__
    while (K - k >= 4 * WIDE) {
        int64_t end = K - k > CHUNK ? k + CHUNK : k + (K - k) / (4 * WIDE) * (4 * WIDE);
        vector a = zeros(), b = a, c = a, d = a;
        for (; k < end; k += 4 * WIDE) {
            _mm_prefetch((const char *)(w + k + PREFETCH), _MM_HINT_T1);
            if (WIDE == 32) _mm_prefetch((const char *)(w + k + PREFETCH + 64), _MM_HINT_T1);
            a = add_products(a, wide(w + k), x + k);
            b = add_products(b, wide(w + k + WIDE), x + k + WIDE);
            c = add_products(c, wide(w + k + 2 * WIDE), x + k + 2 * WIDE);
            d = add_products(d, wide(w + k + 3 * WIDE), x + k + 3 * WIDE);
        }
        sum += spread(add(add(a, b), add(c, d)));
    }
    if (K - k >= WIDE) {
        vector a = zeros();
        for (; K - k >= WIDE; k += WIDE) a = add_products(a, wide(w + k), x + k);
        sum += spread(a);
    }
#else
    while (K - k >= 512) {
        int32_t part = 0;
        for (int64_t end = k + 512; k < end; k++) part += (int32_t)w[k] * x[k];
        sum += part;
    }
#endif
    for (; k < K; k++) sum += (int32_t)w[k] * x[k];
    return sum;
}

/* One weight row [K] times ROWS activation rows: each weight is converted once. */
static void dots(const int8_t *w, const int16_t *const *x, int64_t K, int64_t *sums) {
#ifdef __AVX2__
    int64_t k = 0;
    for (int i = 0; i < ROWS; i++) sums[i] = 0;
    while (K - k >= WIDE) {
        int64_t end = K - k > CHUNK ? k + CHUNK : k + (K - k) / WIDE * WIDE;
        vector a = zeros(), b = a, c = a, d = a;
        for (; k < end; k += WIDE) {
            if (k % 64 == 0) _mm_prefetch((const char *)(w + k + PREFETCH), _MM_HINT_T1);
            vector v = wide(w + k);
            a = add_products(a, v, x[0] + k);
            b = add_products(b, v, x[1] + k);
            c = add_products(c, v, x[2] + k);
            d = add_products(d, v, x[3] + k);
        }
        sums[0] += spread(a), sums[1] += spread(b), sums[2] += spread(c), sums[3] += spread(d);
    }
    for (; k < K; k++)
        for (int i = 0; i < ROWS; i++) sums[i] += (int32_t)w[k] * x[i][k];
#else
    for (int i = 0; i < ROWS; i++) sums[i] = dot(w, x[i], K);
#endif
}

/* One weight row times `count` rows of x, which start `stride` apart or, given `at`, at row at[i] / top_k. */
static void all_dots(const int8_t *w, const int16_t *x, int64_t K, const int64_t *at, int64_t top_k, int64_t count, int64_t *sums) {
    int64_t i = 0;
    for (; i + ROWS <= count; i += ROWS) {
        const int16_t *rows[ROWS];
        for (int j = 0; j < ROWS; j++) rows[j] = x + (at ? at[i + j] / top_k : i + j) * K;
        dots(w, rows, K, sums + i);
    }
    for (; i < count; i++) sums[i] = dot(w, x + (at ? at[i] / top_k : i) * K, K);
}

static void quantize_row(const float *x, int64_t K, int16_t *values, float *scale) {
    uint32_t largest = 0; /* as bits: so ordered, NaN above inf above every number, and none is lost */
    for (int64_t k = 0; k < K; k++) {
        uint32_t bits;
        memcpy(&bits, x + k, 4);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    float s;
    memcpy(&s, &largest, 4);
    if (largest >= 0x7f800000u) {
        *scale = NAN;
        memset(values, 0, (size_t)K * sizeof *values);
        return;
    }
    s = s / ROW_LIMIT;
    s = s < SMALLEST_SCALE ? SMALLEST_SCALE : s;
    *scale = s;
    /* below 2^22, adding and taking away 1.5 * 2^23 rounds half to even */
    for (int64_t k = 0; k < K; k++) values[k] = (int16_t)(int32_t)((x[k] / s + 12582912.0f) - 12582912.0f);
}

static inline float silu(float x) {
    float t = -x;
    t = t < -87.0f ? -87.0f : t > 88.0f ? 88.0f : t;
    t = t == t ? t : 0.0f; /* the division below brings the NaN back */
    float n = (t * 1.4426950408889634f + 12582912.0f) - 12582912.0f;
    float r = (t - n * (355.0f / 512.0f)) - n * -2.1219444005469057e-4f;
    float series = (float)(1.0 / 5040);
    series = series * r + (float)(1.0 / 720);
    series = series * r + (float)(1.0 / 120);
    series = series * r + (float)(1.0 / 24);
    series = series * r + (float)(1.0 / 6);
    series = series * r + 0.5f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return x / (1.0f + series * power);
}

/* int64 sums [M, N] of int16 rows [M, K] and int8 values [N, K]. */
void integer_matmul(const int16_t *x, const int8_t *w, int64_t M, int64_t N, int64_t K, int64_t *out) {
#pragma omp parallel for schedule(static) if (N * K > SMALL)
    for (int64_t n = 0; n < N; n++) {
        for (int64_t m = 0; m < M; m += ROWS) {
            int64_t sums[ROWS], count = M - m < ROWS ? M - m : ROWS;
            all_dots(w + n * K, x + m * K, K, 0, 1, count, sums);
            for (int64_t i = 0; i < count; i++) out[(m + i) * N + n] = sums[i];
        }
    }
}

/* y [M, N] of x [M, K]; scratch: M * K int16, then M floats. */
void linear(const float *x, const int8_t *w, const float *scales, int64_t M, int64_t N, int64_t K, float *y, void *scratch) {
    float *row_scales = scratch;
    int16_t *rows = (int16_t *)(row_scales + M);
#pragma omp parallel if (N * K > SMALL || M * N * K > MANY)
    {
#pragma omp for schedule(static)
        for (int64_t m = 0; m < M; m++) quantize_row(x + m * K, K, rows + m * K, row_scales + m);
#pragma omp for schedule(dynamic, 1)
        for (int64_t block = 0; block < (N + UNITS - 1) / UNITS; block++) {
            int64_t end = (block + 1) * UNITS < N ? (block + 1) * UNITS : N;
            for (int64_t n = block * UNITS; n < end; n++)
                for (int64_t m = 0; m < M; m += ROWS) {
                    int64_t sums[ROWS], count = M - m < ROWS ? M - m : ROWS;
                    all_dots(w + n * K, rows + m * K, K, 0, 1, count, sums);
                    for (int64_t i = 0; i < count; i++)
                        y[(m + i) * N + n] = (float)sums[i] * row_scales[m + i] * scales[n];
                }
        }
    }
}

/* Bytes of scratch that `experts` needs. */
int64_t experts_scratch(int64_t T, int64_t H, int64_t I, int64_t E, int64_t top_k) {
    int64_t P = T * top_k;
    return 8 * (P + E + 1 + P) + 4 * (T + P + P * H + P * I) + 2 * (T * H + P * I);
}

/* out [T, H] of x [T, H]; returns 0, or 1 + the first token whose ids are out of range or repeated. */
int64_t experts(const float *x, const int8_t *gate_up, const float *gate_up_scales, const int8_t *down, const float *down_scales,
                const int64_t *ids, const float *routing, int64_t T, int64_t H, int64_t I, int64_t E, int64_t top_k, float *out,
                void *scratch) {
    int64_t P = T * top_k;
    int64_t *pairs = scratch, *starts = pairs + P, *active = starts + E + 1;
    float *x_scales = (float *)(active + P), *h_scales = x_scales + T, *y = h_scales + P, *h = y + P * H;
    int16_t *rows = (int16_t *)(h + P * I), *h_rows = rows + T * H;

    /* pairs (token, slot) sorted by expert, and the experts that have any */
    memset(starts, 0, (size_t)(E + 1) * sizeof *starts);
    for (int64_t p = 0; p < P; p++) {
        if (ids[p] < 0 || ids[p] >= E) return 1 + p / top_k;
        for (int64_t q = p - p % top_k; q < p; q++)
            if (ids[q] == ids[p]) return 1 + p / top_k;
        starts[ids[p] + 1]++;
    }
    int64_t used = 0;
    for (int64_t e = 0; e < E; e++) {
        if (starts[e + 1]) active[used++] = e;
        starts[e + 1] += starts[e];
    }
    for (int64_t p = P; p-- > 0;) pairs[--starts[ids[p] + 1]] = p; /* now starts[e + 1] is where expert e begins */

    int64_t gate_blocks = (I + UNITS - 1) / UNITS, down_blocks = (H + UNITS - 1) / UNITS;
#pragma omp parallel if (used * I * H > SMALL || P * I * H > MANY)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < T; t++) quantize_row(x + t * H, H, rows + t * H, x_scales + t);
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < used * gate_blocks; item++) {
            int64_t e = active[item / gate_blocks], first = item % gate_blocks * UNITS;
            int64_t last = first + UNITS < I ? first + UNITS : I;
            int64_t start = starts[e + 1], end = e + 2 <= E ? starts[e + 2] : P;
            for (int half = 0; half < 2; half++) /* a block of gate rows, then the same of up: each read in one run */
                for (int64_t n = first; n < last; n++) {
                    int64_t row = e * 2 * I + half * I + n;
                    for (int64_t i = start; i < end; i += ROWS) {
                        int64_t sums[ROWS], count = end - i < ROWS ? end - i : ROWS;
                        all_dots(gate_up + row * H, rows, H, pairs + i, top_k, count, sums);
                        for (int64_t j = 0; j < count; j++) {
                            float value = (float)sums[j] * x_scales[pairs[i + j] / top_k] * gate_up_scales[row];
                            float *cell = h + (i + j) * I + n;
                            *cell = half ? *cell * value : silu(value);
                        }
                    }
                }
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < P; i++) quantize_row(h + i * I, I, h_rows + i * I, h_scales + i);
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < used * down_blocks; item++) {
            int64_t e = active[item / down_blocks], first = item % down_blocks * UNITS;
            int64_t last = first + UNITS < H ? first + UNITS : H;
            int64_t start = starts[e + 1], end = e + 2 <= E ? starts[e + 2] : P;
            for (int64_t n = first; n < last; n++) {
                int64_t row = e * H + n;
                for (int64_t i = start; i < end; i += ROWS) {
                    int64_t sums[ROWS], count = end - i < ROWS ? end - i : ROWS;
                    all_dots(down + row * I, h_rows + i * I, I, 0, 1, count, sums);
                    for (int64_t j = 0; j < count; j++)
                        y[pairs[i + j] * H + n] =
                            (float)sums[j] * h_scales[i + j] * down_scales[row] * routing[pairs[i + j]];
                }
            }
        }
#pragma omp for schedule(static)
        for (int64_t t = 0; t < T; t++)
            for (int64_t n = 0; n < H; n++) {
                float sum = 0.0f;
                for (int64_t j = 0; j < top_k; j++) sum += y[(t * top_k + j) * H + n];
                out[t * H + n] = sum;
            }
    }
    return 0;
}

/* Reads `bytes` once, as fast as this machine can: what the products' rates are measured against. */
int64_t read_once(const int64_t *data, int64_t bytes) {
    int64_t sum = 0, n = bytes / 8;
#pragma omp parallel for schedule(static) reduction(+ : sum)
    for (int64_t block = 0; block < n / 8; block++)
        for (int64_t i = 0; i < 8; i++) sum += data[block * 8 + i];
    return sum;
}
