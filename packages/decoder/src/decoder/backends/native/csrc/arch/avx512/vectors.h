// AVX-512 (F, BW, DQ, VL) with products of bytes (VNNI), and of bfloat16 where the compiler is told so: 32 registers of
// 16 numbers. Masks need no call that would empty all registers.

#include <immintrin.h>

enum { LANES = 16, MOST_ROWS = 14, WIDE = 4 };
#define EACH_NUMBER_OF_ROWS(X, kind)                                                                                   \
    X(kind, 1, 1)                                                                                                      \
    X(kind, 2, 1)                                                                                                      \
    X(kind, 3, 1)                                                                                                      \
    X(kind, 4, 1)                                                                                                      \
    X(kind, 5, 1)                                                                                                      \
    X(kind, 6, 1)                                                                                                      \
    X(kind, 7, 1) X(kind, 8, 1) X(kind, 9, 1) X(kind, 10, 1) X(kind, 11, 1) X(kind, 12, 1) X(kind, 13, 1) X(kind, 14, 1)

#include "../types.h"

INLINE vec all_widened(halves x) { return (vec)((uvec)_mm512_cvtepu16_epi32((__m256i)x) << 16); }

INLINE halves rounded(vec x) { return (halves)_mm512_cvtepi32_epi16((__m512i)rounded_words(x)); }

INLINE __mmask16 mask_of(int64_t count) {
    return (__mmask16)_bzhi_u32(0xffff, count < LANES ? (uint32_t)count : LANES);
}

INLINE vec load(const void *from, int64_t at, int is_bf16, int64_t count) {
    if (is_bf16) return all_widened((halves)_mm256_maskz_loadu_epi16(mask_of(count), (const uint16_t *)from + at));
    return (vec)_mm512_maskz_loadu_ps(mask_of(count), (const float *)from + at);
}

INLINE void store(void *to, int64_t at, int is_bf16, vec x, int64_t count) {
    if (is_bf16) _mm256_mask_storeu_epi16((uint16_t *)to + at, mask_of(count), (__m256i)rounded(x));
    else _mm512_mask_storeu_ps((float *)to + at, mask_of(count), (__m512)x);
}

INLINE vec larger(vec x, vec y) { return (vec)_mm512_max_ps((__m512)x, (__m512)y); }

INLINE vec swapped(vec x, int step) {
    const __m512 y = (__m512)x;
    if (step == 8) return (vec)_mm512_shuffle_f32x4(y, y, 0x4e);
    if (step == 4) return (vec)_mm512_shuffle_f32x4(y, y, 0xb1);
    return (vec)(step == 2 ? _mm512_permute_ps(y, 0x4e) : _mm512_permute_ps(y, 0xb1));
}

INLINE vec to_whole(vec x) {
    return (vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

INLINE ivec nearest(vec x) { return (ivec)_mm512_cvtps_epi32((__m512)x); }

INLINE vec times_power(vec x, vec n) { return (vec)_mm512_scalef_ps((__m512)x, (__m512)n); }

INLINE vec fused(vec a, vec b, vec c) { return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

INLINE int none(ivec where) { return !_mm512_test_epi32_mask((__m512i)where, (__m512i)where); }

// Of two rows, of four, and then of quarters of vectors, which have instructions of their own.
INLINE void transpose(vec *rows) {
    __m512 two[16], four[16];
    UNROLL(8)
    for (int i = 0; i < 16; i += 2) {
        two[i] = _mm512_unpacklo_ps((__m512)rows[i], (__m512)rows[i + 1]);
        two[i + 1] = _mm512_unpackhi_ps((__m512)rows[i], (__m512)rows[i + 1]);
    }
    UNROLL(8)
    for (int i = 0; i < 8; i++) {
        const __m512d a = (__m512d)two[i / 2 * 4 + i % 2], b = (__m512d)two[i / 2 * 4 + i % 2 + 2];
        four[i / 2 * 4 + i % 2 * 2] = (__m512)_mm512_unpacklo_pd(a, b);
        four[i / 2 * 4 + i % 2 * 2 + 1] = (__m512)_mm512_unpackhi_pd(a, b);
    }
    UNROLL(4)
    for (int i = 0; i < 4; i++) {
        const __m512 even = _mm512_shuffle_f32x4(four[i], four[4 + i], 0x88);
        const __m512 odd = _mm512_shuffle_f32x4(four[i], four[4 + i], 0xdd);
        const __m512 even2 = _mm512_shuffle_f32x4(four[8 + i], four[12 + i], 0x88);
        const __m512 odd2 = _mm512_shuffle_f32x4(four[8 + i], four[12 + i], 0xdd);
        rows[i] = (vec)_mm512_shuffle_f32x4(even, even2, 0x88);
        rows[4 + i] = (vec)_mm512_shuffle_f32x4(odd, odd2, 0x88);
        rows[8 + i] = (vec)_mm512_shuffle_f32x4(even, even2, 0xdd);
        rows[12 + i] = (vec)_mm512_shuffle_f32x4(odd, odd2, 0xdd);
    }
}

INLINE ivec dot_words(ivec sum, uvec a, uvec b) {
    return (ivec)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
}

INLINE void code_quads(const int8_t *a, const int8_t *b, const int8_t *c, const int8_t *d, uvec *out) {
    const __m512i first = _mm512_loadu_si512(a), second = _mm512_loadu_si512(b);
    const __m512i third = _mm512_loadu_si512(c), fourth = _mm512_loadu_si512(d);
    const __m512i ab = _mm512_unpacklo_epi8(first, second), cd = _mm512_unpacklo_epi8(third, fourth);
    const __m512i ab2 = _mm512_unpackhi_epi8(first, second), cd2 = _mm512_unpackhi_epi8(third, fourth);
    // Of each quarter of the numbers four, the next four, and so on: quarters then change places with fours.
    const __m512i q0 = _mm512_unpacklo_epi16(ab, cd), q1 = _mm512_unpackhi_epi16(ab, cd);
    const __m512i q2 = _mm512_unpacklo_epi16(ab2, cd2), q3 = _mm512_unpackhi_epi16(ab2, cd2);
    const __m512i low = _mm512_shuffle_i32x4(q0, q1, 0x44), low2 = _mm512_shuffle_i32x4(q2, q3, 0x44);
    const __m512i high = _mm512_shuffle_i32x4(q0, q1, 0xee), high2 = _mm512_shuffle_i32x4(q2, q3, 0xee);
    out[0] = (uvec)_mm512_shuffle_i32x4(low, low2, 0x88), out[1] = (uvec)_mm512_shuffle_i32x4(low, low2, 0xdd);
    out[2] = (uvec)_mm512_shuffle_i32x4(high, high2, 0x88), out[3] = (uvec)_mm512_shuffle_i32x4(high, high2, 0xdd);
}

#if defined(__AVX512BF16__)
enum { BF16_PAIRS_MULTIPLY = 1 };

INLINE vec dot_pairs(vec sum, uvec a, uvec b) { return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }

INLINE void narrowed_both(vec first, vec second, uint16_t *to) {
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    memcpy(to, &both, sizeof both);
}

INLINE void paired(__m512i a, __m512i b, uvec *out) {
    uvec low, high;
    for (uint32_t lane = 0; lane < LANES; lane++) {
        low[lane] = lane | (lane + 32) << 16;
        high[lane] = low[lane] + (LANES | LANES << 16);
    }
    out[0] = (uvec)_mm512_permutex2var_epi16(a, (__m512i)low, b);
    out[1] = (uvec)_mm512_permutex2var_epi16(a, (__m512i)high, b);
}

INLINE __mmask32 mask_of_halves(int64_t count) {
    return _bzhi_u32(~0u, count < 0 ? 0 : count < 32 ? (uint32_t)count : 32);
}

INLINE void pairs_of(const uint16_t *a, const uint16_t *b, int64_t count_a, int64_t count_b, uvec *pairs) {
    for (int i = 0; i < WIDE / 2; i++) {
        const __mmask32 of_a = mask_of_halves(count_a - 32 * i), of_b = mask_of_halves(count_b - 32 * i);
        paired(_mm512_maskz_loadu_epi16(of_a, a + 32 * i), _mm512_maskz_loadu_epi16(of_b, b + 32 * i), pairs + 2 * i);
    }
}
#else
#include "../without_bf16.h"
#endif
