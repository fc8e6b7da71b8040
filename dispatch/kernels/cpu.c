/* W8A16 with exact integer sums, as dispatch/kernels/reference.py defines it: the same bits, for int8 weights read once.
 *
 * Bounds. |weight| <= 127 and |row value| <= 32768, so a product is below 2^22 and an int32 holds 516 of them. Of a
 * CHUNK of 4096 each of the 8 lanes gets 512; then they are spread into int64, so sums of any K stay exact. The sum of a
 * whole SHORT row fits int32.
 */
#include "exact.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

enum { CHUNK = 4096, ROWS = 4, PREFETCH = 3072, UNITS = 64, SHORT = 512 };

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
/* The sums of four vectors, each of which fits int32. */
static inline __m128i fold(vector a, vector b, vector c, vector d) {
    vector ab = add(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    vector cd = add(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    vector all = add(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}
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
static inline __m128i fold(vector a, vector b, vector c, vector d) {
    vector all = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
    return _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}
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
#ifdef __AVX2__
static void dots(const int8_t *w, const int16_t *const *x, int64_t K, int64_t *sums) {
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
}
#endif

#ifdef __AVX2__
/* Four SHORT weight rows times `count` activation rows (a constant where it is inlined): sums [count][ROWS]. */
static inline __attribute__((always_inline)) void short_tile(const int8_t *w, const int16_t *const *x, int64_t K, int count,
                                                             int64_t *sums) {
    vector lanes[ROWS][ROWS];
    int64_t k = 0;
    for (int i = 0; i < count; i++)
        for (int n = 0; n < ROWS; n++) lanes[i][n] = zeros();
    for (; K - k >= WIDE; k += WIDE)
        for (int n = 0; n < ROWS; n++) {
            vector v = wide(w + n * K + k);
            for (int i = 0; i < count; i++) lanes[i][n] = add_products(lanes[i][n], v, x[i] + k);
        }
    for (int i = 0; i < count; i++) {
        _mm256_storeu_si256((__m256i *)(sums + i * ROWS),
                            _mm256_cvtepi32_epi64(fold(lanes[i][0], lanes[i][1], lanes[i][2], lanes[i][3])));
        for (int64_t rest = k; rest < K; rest++)
            for (int n = 0; n < ROWS; n++) sums[i * ROWS + n] += (int32_t)w[n * K + rest] * x[i][rest];
    }
}
#endif

/* `columns` weight rows (1, or ROWS of at most SHORT values) times `count` <= ROWS rows of x, which follow one another or,
 * given `at`, are rows at[i] / top_k: sums [count][ROWS]. */
static inline void tile(const int8_t *w, int64_t columns, const int16_t *x, int64_t K, const int64_t *at, int64_t top_k,
                        int64_t count, int64_t *sums) {
    const int16_t *rows[ROWS];
    for (int64_t i = 0; i < count; i++) rows[i] = x + (at ? at[i] / top_k : i) * K;
#ifdef __AVX2__
    if (columns == ROWS) {
        if (count == 1) short_tile(w, rows, K, 1, sums);
        if (count == 2) short_tile(w, rows, K, 2, sums);
        if (count == 3) short_tile(w, rows, K, 3, sums);
        if (count == 4) short_tile(w, rows, K, 4, sums);
        return;
    }
    if (count == ROWS) {
        int64_t of_rows[ROWS];
        dots(w, rows, K, of_rows);
        for (int i = 0; i < ROWS; i++) sums[i * ROWS] = of_rows[i];
        return;
    }
#endif
    for (int64_t n = 0; n < columns; n++)
        for (int64_t i = 0; i < count; i++) sums[i * ROWS + n] = dot(w + n * K, rows[i], K);
}

/* Weight rows to take at once, with `left` of them to go. */
static inline int64_t step(int64_t K, int64_t left) { return K <= SHORT && left >= ROWS ? ROWS : 1; }

/* int64 sums [M, N] of int16 rows [M, K] and int8 values [N, K]. */
void integer_matmul(const int16_t *x, const int8_t *w, int64_t M, int64_t N, int64_t K, int64_t *out) {
#pragma omp parallel for schedule(static) if (M * N * K > MANY)
    for (int64_t block = 0; block < (N + ROWS - 1) / ROWS; block++) {
        int64_t columns, end = (block + 1) * ROWS < N ? (block + 1) * ROWS : N;
        for (int64_t n = block * ROWS; n < end; n += columns) {
            columns = step(K, end - n);
            for (int64_t m = 0; m < M; m += ROWS) {
                int64_t sums[ROWS * ROWS], count = M - m < ROWS ? M - m : ROWS;
                tile(w + n * K, columns, x + m * K, K, 0, 1, count, sums);
                for (int64_t i = 0; i < count; i++)
                    for (int64_t c = 0; c < columns; c++) out[(m + i) * N + n + c] = sums[i * ROWS + c];
            }
        }
    }
}

/* y [M, N] of x [M, K]; parts 2: the channels' high digits, then the low ones, sum = 255 * high + low. */
static inline __attribute__((always_inline)) void product(const float *x, const int8_t *w, const float *scales, int64_t parts,
                                                          int64_t M, int64_t N, int64_t K, float *y, void *scratch) {
    float *row_scales = scratch;
    int16_t *rows = (int16_t *)(row_scales + M);
#pragma omp parallel if (parts * M * N * K > MANY)
    {
#pragma omp for schedule(static)
        for (int64_t m = 0; m < M; m++) quantize_row(x + m * K, K, rows + m * K, row_scales + m);
#pragma omp for schedule(dynamic, 1)
        for (int64_t block = 0; block < (N + UNITS - 1) / UNITS; block++) {
            int64_t columns, end = (block + 1) * UNITS < N ? (block + 1) * UNITS : N;
            for (int64_t n = block * UNITS; n < end; n += columns) {
                columns = step(K, end - n);
                for (int64_t m = 0; m < M; m += ROWS) {
                    int64_t sums[2 * ROWS * ROWS], count = M - m < ROWS ? M - m : ROWS;
                    for (int64_t part = 0; part < parts; part++)
                        tile(w + (part * N + n) * K, columns, rows + m * K, K, 0, 1, count, sums + part * ROWS * ROWS);
                    for (int64_t i = 0; i < count; i++)
                        for (int64_t c = 0; c < columns; c++) {
                            int64_t sum = sums[i * ROWS + c];
                            if (parts == 2) sum = 255 * sum + sums[(ROWS + i) * ROWS + c];
                            y[(m + i) * N + n + c] = (float)sum * row_scales[m + i] * scales[n + c];
                        }
                }
            }
        }
    }
}

/* y [M, N] of x [M, K] and int8 weights [N, K]; scratch: M floats, then M * K int16. */
void linear(const float *x, const int8_t *w, const float *scales, int64_t M, int64_t N, int64_t K, float *y, void *scratch) {
    product(x, w, scales, 1, M, N, K, y, scratch);
}

/* The same with int16 weights [2 N, K] in digits to the base 255. */
void linear16(const float *x, const int8_t *w, const float *scales, int64_t M, int64_t N, int64_t K, float *y, void *scratch) {
    product(x, w, scales, 2, M, N, K, y, scratch);
}

/* Bytes of scratch that `experts` needs. */
int64_t experts_scratch(int64_t T, int64_t H, int64_t I, int64_t E, int64_t top_k) {
    int64_t P = T * top_k;
    return 8 * (P + E + 1 + P) + 4 * (T + P + P * H + 2 * P * I) + 2 * (T * H + P * I);
}

/* out [T, H] of x [T, H]; returns 0, or 1 + the first token whose ids are out of range or repeated. */
int64_t experts(const float *x, const int8_t *gate_up, const float *gate_up_scales, const int8_t *down, const float *down_scales,
                const int64_t *ids, const float *routing, int64_t T, int64_t H, int64_t I, int64_t E, int64_t top_k, float *out,
                void *scratch) {
    int64_t P = T * top_k;
    int64_t *pairs = scratch, *starts = pairs + P, *active = starts + E + 1;
    float *x_scales = (float *)(active + P), *h_scales = x_scales + T, *y = h_scales + P, *h = y + P * H, *u = h + P * I;
    int16_t *rows = (int16_t *)(u + P * I), *h_rows = rows + T * H;

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
#pragma omp parallel if (P * I * H > MANY)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < T; t++) quantize_row(x + t * H, H, rows + t * H, x_scales + t);
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < used * gate_blocks; item++) {
            int64_t e = active[item / gate_blocks], first = item % gate_blocks * UNITS;
            int64_t last = first + UNITS < I ? first + UNITS : I;
            int64_t start = starts[e + 1], end = e + 2 <= E ? starts[e + 2] : P;
            int64_t columns;
            for (int half = 0; half < 2; half++) { /* a block of gate rows, then the same of up: each read in one run */
                float *to = half ? u : h;
                for (int64_t n = first; n < last; n += columns) {
                    int64_t row = e * 2 * I + half * I + n;
                    columns = step(H, last - n);
                    for (int64_t i = start; i < end; i += ROWS) {
                        int64_t sums[ROWS * ROWS], count = end - i < ROWS ? end - i : ROWS;
                        tile(gate_up + row * H, columns, rows, H, pairs + i, top_k, count, sums);
                        for (int64_t j = 0; j < count; j++) {
                            float scale = x_scales[pairs[i + j] / top_k];
                            for (int64_t c = 0; c < columns; c++)
                                to[(i + j) * I + n + c] = (float)sums[j * ROWS + c] * scale * gate_up_scales[row + c];
                        }
                    }
                }
            }
            for (int64_t i = start; i < end; i++)
                for (int64_t n = first; n < last; n++) h[i * I + n] = silu(h[i * I + n]) * u[i * I + n];
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < P; i++) quantize_row(h + i * I, I, h_rows + i * I, h_scales + i);
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < used * down_blocks; item++) {
            int64_t e = active[item / down_blocks], first = item % down_blocks * UNITS;
            int64_t last = first + UNITS < H ? first + UNITS : H;
            int64_t start = starts[e + 1], end = e + 2 <= E ? starts[e + 2] : P;
            int64_t columns;
            for (int64_t n = first; n < last; n += columns) {
                int64_t row = e * H + n;
                columns = step(I, last - n);
                for (int64_t i = start; i < end; i += ROWS) {
                    int64_t sums[ROWS * ROWS], count = end - i < ROWS ? end - i : ROWS;
                    tile(down + row * I, columns, h_rows + i * I, I, 0, 1, count, sums);
                    for (int64_t j = 0; j < count; j++)
                        for (int64_t c = 0; c < columns; c++)
                            y[pairs[i + j] * H + n + c] = (float)sums[j * ROWS + c] * h_scales[i + j] * down_scales[row + c] *
                                                          routing[pairs[i + j]];
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
