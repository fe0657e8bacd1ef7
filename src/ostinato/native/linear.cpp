// Few rows: activations in int8 per group of 32, VNNI or what comes closest.  See linear.h for the layout.
#include "linear_amx.h"

#include <type_traits>

using namespace ostinato;

namespace {

// d: scale of each group; s: d * sum of the codes, which the minimum multiplies.
void quantise_row(const float* y, int groups, int8_t* q, float* d, float* s) {
    for (int g = 0; g < groups; g++, y += GROUP, q += GROUP) {
        f32x16 a = load16(y), b = load16(y + 16);
        float top = top16(max16(abs16(a), abs16(b)));
        float inverse = top > 0 ? 127.0f / top : 0.0f;
        d[g] = top / 127.0f;
#ifdef OSTINATO_AVX512
        __m512i i = _mm512_cvtps_epi32((__m512)(a * inverse)), j = _mm512_cvtps_epi32((__m512)(b * inverse));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm512_cvtepi32_epi8(i));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16), _mm512_cvtepi32_epi8(j));
        s[g] = d[g] * float(_mm512_reduce_add_epi32(_mm512_add_epi32(i, j)));
#else
        int sum = 0;
        for (int k = 0; k < GROUP; k++) {
            int v = int(std::nearbyint(y[k] * inverse));
            q[k] = int8_t(v);
            sum += v;
        }
        s[g] = d[g] * float(sum);
#endif
    }
}

// ---- ROWS activation rows times one tile ----

template <int BITS, int ROWS>
INLINE void multiply(const uint8_t* w, int groups, const int8_t* q, const float* d, const float* s, f32x16* acc) {
    const int columns = groups * GROUP;
    for (int m = 0; m < ROWS; m++) acc[m] = f32x16{};
    for (int g = 0; g < groups; g++, w += group_bytes(BITS)) {
        // The hardware's prefetcher stops at every page of 4 KiB, and one core then waits for memory half its time.
        for (int line = 0; line < group_bytes(BITS); line += 64) __builtin_prefetch(w + AHEAD + line, 0, 2);
#ifdef OSTINATO_VNNI
        f32x16 scale = load_half16(w + BITS * 64), minimum = load_half16(w + BITS * 64 + 32);
        __m512i c[8];
        if (BITS == 4) {
            const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8(-16);
            for (int j = 0; j < 4; j++) {
                __m512i v = _mm512_loadu_si512(w + 64 * j);
                c[j] = _mm512_and_si512(v, low);
                c[j + 4] = _mm512_and_si512(v, high);  // 16 times the code
            }
        } else {
            for (int j = 0; j < 8; j++) c[j] = _mm512_loadu_si512(w + 64 * j);
        }
        for (int m = 0; m < ROWS; m++) {
            const int8_t* a = q + m * columns + g * GROUP;
            __m512i lo = _mm512_setzero_si512(), hi = _mm512_setzero_si512();
            for (int j = 0; j < 4; j++) {
                int32_t x0, x1;
                std::memcpy(&x0, a + 4 * j, 4);
                std::memcpy(&x1, a + 16 + 4 * j, 4);
                lo = _mm512_dpbusd_epi32(lo, c[j], _mm512_set1_epi32(x0));
                hi = _mm512_dpbusd_epi32(hi, c[j + 4], _mm512_set1_epi32(x1));
            }
            if (BITS == 4) hi = _mm512_srai_epi32(hi, 4);
            f32x16 dot = (f32x16)_mm512_cvtepi32_ps(_mm512_add_epi32(lo, hi));
            acc[m] += dot * (scale * d[m * groups + g]);
            acc[m] += minimum * s[m * groups + g];
        }
#elif defined(__AVX2__)
        // Products of half-bytes and int8, four columns at a time, add up in 16 bits without overflow:
        // 8 * 2 * 15 * 127 < 2^15. Codes of 8 bits go half by half.
        const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
        for (int m = 0; m < ROWS; m++) {
            const int8_t* a = q + m * columns + g * GROUP;
            alignas(32) int32_t dot[TILE];
            for (int r = 0; r < 2; r++) {
                __m256i lo = _mm256_setzero_si256(), hi = lo;
                for (int j = 0; j < BITS; j++) {
                    const __m256i c = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 64 * j + 32 * r));
                    int32_t x, y;
                    std::memcpy(&x, a + 4 * j, 4);
                    std::memcpy(&y, BITS == 4 ? a + 16 + 4 * j : a + 4 * j, 4);
                    lo = _mm256_add_epi16(lo, _mm256_maddubs_epi16(_mm256_and_si256(c, low), _mm256_set1_epi32(x)));
                    hi = _mm256_add_epi16(hi, _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(c, 4), low),
                                                                   _mm256_set1_epi32(y)));
                }
                lo = _mm256_madd_epi16(lo, ones);
                hi = _mm256_madd_epi16(hi, ones);
                if (BITS == 8) hi = _mm256_slli_epi32(hi, 4);
                _mm256_store_si256(reinterpret_cast<__m256i*>(dot + 8 * r), _mm256_add_epi32(lo, hi));
            }
            float* sum = reinterpret_cast<float*>(acc + m);
            for (int r = 0; r < TILE; r += 8) {
                const __m256 y = _mm256_cvtepi32_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(dot + r)));
                auto half = [&](int at) {
                    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w + BITS * 64 + at + 2 * r)));
                };
                __m256 t = _mm256_fmadd_ps(y, _mm256_mul_ps(half(0), _mm256_set1_ps(d[m * groups + g])),
                                           _mm256_loadu_ps(sum + r));
                t = _mm256_fmadd_ps(half(32), _mm256_set1_ps(s[m * groups + g]), t);
                _mm256_storeu_ps(sum + r, t);
            }
        }
#else
        f32x16 scale = load_half16(w + BITS * 64), minimum = load_half16(w + BITS * 64 + 32);
        alignas(64) uint8_t codes[TILE * GROUP];
        unpack_group(w, BITS, codes);
        for (int m = 0; m < ROWS; m++) {
            const int8_t* a = q + m * columns + g * GROUP;
            i32x16 dot{};
            for (int j = 0; j < 8; j++) {
                const uint8_t* c = codes + 64 * j;
                int32_t t[16];
                for (int r = 0; r < 16; r++)
                    t[r] = c[4 * r] * a[4 * j] + c[4 * r + 1] * a[4 * j + 1] + c[4 * r + 2] * a[4 * j + 2] +
                           c[4 * r + 3] * a[4 * j + 3];
                dot += *reinterpret_cast<const i32x16_any*>(t);
            }
            acc[m] += __builtin_convertvector(dot, f32x16) * (scale * d[m * groups + g]);
            acc[m] += minimum * s[m * groups + g];
        }
#endif
    }
}

template <int BITS, class O>
void multiply_tiles(const Packed& w, int begin, int end, int rows, const int8_t* q, const float* d, const float* s,
                    const Output<O>& out) {
    const int groups = w.columns / GROUP;
    const int64_t bytes = int64_t(groups) * group_bytes(BITS);
    f32x16 acc[8];
    for (int t = begin; t < end; t++) {
        const uint8_t* tile = w.data + t * bytes;
        int m = 0;
#define OSTINATO_ROWS(R)                                                                            \
    for (; m + R <= rows; m += R) {                                                                 \
        multiply<BITS, R>(tile, groups, q + m * w.columns, d + m * groups, s + m * groups, acc);    \
        for (int i = 0; i < R; i++) out.write(m + i, t, acc[i]);                                    \
    }
        OSTINATO_ROWS(8)
        OSTINATO_ROWS(4)
        OSTINATO_ROWS(2)
        OSTINATO_ROWS(1)
#undef OSTINATO_ROWS
    }
}

template <class X, class O>
void linear(const Packed& w, const X* x, int64_t x_stride, int rows, const Output<O>& out, const float* norm, float eps,
            int activation, int threads) {
#ifdef OSTINATO_AMX
    if (amx_allowed && rows >= AMX_ROWS) {
        linear_amx(w, x, x_stride, rows, out, norm, eps, activation, threads);
        return;
    }
#endif
    const int columns = w.columns, groups = columns / GROUP;
    float* d = shared_scratch.get<float>(size_t(rows) * (2 * groups + columns / 4) + 16);
    float* s = d + size_t(rows) * groups;
    int8_t* q = reinterpret_cast<int8_t*>(s + size_t(rows) * groups);
    auto prepare = [&](int m) {
        float* y = row_scratch.get<float>(columns);
        prepare_row(x + m * x_stride, columns, norm, eps, activation, y);
        quantise_row(y, groups, q + size_t(m) * columns, d + m * groups, s + m * groups);
    };
    parallel_for(rows < 4 ? 1 : threads, rows, prepare);
    parallel_parts(int64_t(w.tiles) * columns < 2048 ? 1 : threads, w.tiles, [&](int64_t begin, int64_t end) {
        if (w.bits == 4)
            multiply_tiles<4>(w, int(begin), int(end), rows, q, d, s, out);
        else
            multiply_tiles<8>(w, int(begin), int(end), rows, q, d, s, out);
    });
}

}  // namespace

EXPORT int64_t ostinato_packed_bytes(int32_t rows, int32_t columns, int32_t bits) {
    return int64_t((rows + TILE - 1) / TILE) * (columns / GROUP) * group_bytes(bits);
}

EXPORT void ostinato_pack(const uint8_t* codes, const float* scale, const float* minimum, int32_t rows, int32_t columns,
                          int32_t bits, uint8_t* data, int32_t threads) {
    const int groups = columns / GROUP, tiles = (rows + TILE - 1) / TILE;
    parallel_for(threads, tiles, [&](int64_t t) {
        for (int g = 0; g < groups; g++) {
            uint8_t* w = data + (int64_t(t) * groups + g) * group_bytes(bits);
            std::memset(w, 0, group_bytes(bits));
            for (int r = 0; r < TILE && t * TILE + r < rows; r++) {
                int64_t row = t * TILE + r;
                const uint8_t* c = codes + row * columns + g * GROUP;
                for (int k = 0; k < GROUP; k++) {
                    int at = k / 4 * 64 + 4 * r + k % 4;
                    if (bits == 8)
                        w[at] = c[k];
                    else
                        w[at % 256] |= uint8_t((c[k] & 15) << (k < 16 ? 0 : 4));
                }
                uint16_t h[2] = {float_to_half(scale[row * groups + g]), float_to_half(minimum[row * groups + g])};
                std::memcpy(w + bits * 64 + 2 * r, &h[0], 2);
                std::memcpy(w + bits * 64 + 32 + 2 * r, &h[1], 2);
            }
        }
    });
}

EXPORT void ostinato_dequantise(const Packed* packed, bf16* out, int64_t stride, int32_t threads) {
    const Packed& p = *packed;
    const int groups = p.columns / GROUP;
    parallel_for(threads, p.tiles, [&](int64_t t) {
        for (int g = 0; g < groups; g++) {
            const uint8_t* w = p.data + (int64_t(t) * groups + g) * group_bytes(p.bits);
            alignas(64) uint8_t codes[TILE * GROUP];
            alignas(64) float scale[16], minimum[16];
            unpack_group(w, p.bits, codes);
            store16(scale, load_half16(w + p.bits * 64));
            store16(minimum, load_half16(w + p.bits * 64 + 32));
            for (int r = 0; r < TILE && t * TILE + r < p.rows; r++) {
                float y[GROUP];
                for (int j = 0; j < 8; j++)
                    for (int i = 0; i < 4; i++) y[4 * j + i] = float(codes[64 * j + 4 * r + i]) * scale[r] + minimum[r];
                bf16* o = out + int64_t(t * TILE + r) * stride + g * GROUP;
                store16(o, load16(y));
                store16(o + 16, load16(y + 16));
            }
        }
    });
}

struct LinearCall {
    const Packed* weight;
    const void* x;
    void* out;
    const float* bias;
    const void* residual;
    const float* norm;
    int64_t x_stride, out_stride, residual_stride;
    int32_t rows, flags;  // 1 x is bf16, 2 out and residual are bf16; bits 4..7 the activation; bits 8.. the threads
    float eps;
};

EXPORT void ostinato_linear(const LinearCall* c) {
    auto typed = [&](auto* x, auto* out) {
        using O = std::remove_pointer_t<decltype(out)>;
        Output<O> o{out, c->out_stride, static_cast<const O*>(c->residual), c->residual_stride, c->bias, c->weight->rows};
        linear(*c->weight, x, c->x_stride, c->rows, o, c->norm, c->eps, (c->flags >> 4) & 15, c->flags >> 8);
    };
    auto with_x = [&](auto* x) {
        if (c->flags & 2)
            typed(x, static_cast<bf16*>(c->out));
        else
            typed(x, static_cast<float*>(c->out));
    };
    if (c->flags & 1)
        with_x(static_cast<const bf16*>(c->x));
    else
        with_x(static_cast<const float*>(c->x));
}
