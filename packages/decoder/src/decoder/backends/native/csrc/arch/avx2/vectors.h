// AVX2 with fused products: 16 registers of 8 numbers.

#include <immintrin.h>

enum { LANES = 8, MOST_ROWS = 6, WIDE = 2 };
#define EACH_NUMBER_OF_ROWS(X, kind) X(kind, 1, 4) X(kind, 2, 2) X(kind, 3, 1) X(kind, 4, 1) X(kind, 5, 1) X(kind, 6, 1)

#include "../types.h"

INLINE vec all_widened(halves x) { return (vec)((uvec)_mm256_cvtepu16_epi32((__m128i)x) << 16); }

INLINE vec larger(vec x, vec y) { return (vec)_mm256_max_ps((__m256)x, (__m256)y); }

INLINE vec swapped(vec x, int step) {
    const __m256 y = (__m256)x;
    if (step == 4) return (vec)_mm256_permute2f128_ps(y, y, 1);
    return (vec)(step == 2 ? _mm256_permute_ps(y, 0x4e) : _mm256_permute_ps(y, 0xb1));
}

INLINE vec to_whole(vec x) { return (vec)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

INLINE ivec nearest(vec x) { return (ivec)_mm256_cvtps_epi32((__m256)x); }

INLINE vec fused(vec a, vec b, vec c) { return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }

INLINE int none(ivec where) { return _mm256_testz_si256((__m256i)where, (__m256i)where); }

// Of two rows, of four, and then of halves of vectors.
INLINE void transpose(vec *rows) {
    __m256 two[8], four[8];
    UNROLL(4)
    for (int i = 0; i < 8; i += 2) {
        two[i] = _mm256_unpacklo_ps((__m256)rows[i], (__m256)rows[i + 1]);
        two[i + 1] = _mm256_unpackhi_ps((__m256)rows[i], (__m256)rows[i + 1]);
    }
    UNROLL(4)
    for (int i = 0; i < 4; i++) {
        const __m256d a = (__m256d)two[i / 2 * 4 + i % 2], b = (__m256d)two[i / 2 * 4 + i % 2 + 2];
        four[i / 2 * 4 + i % 2 * 2] = (__m256)_mm256_unpacklo_pd(a, b);
        four[i / 2 * 4 + i % 2 * 2 + 1] = (__m256)_mm256_unpackhi_pd(a, b);
    }
    UNROLL(4)
    for (int i = 0; i < 4; i++) {
        rows[i] = (vec)_mm256_permute2f128_ps(four[i], four[4 + i], 0x20);
        rows[4 + i] = (vec)_mm256_permute2f128_ps(four[i], four[4 + i], 0x31);
    }
}

INLINE ivec dot_words(ivec sum, uvec a, uvec b) {
#if defined(__AVXVNNI__)
    return (ivec)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#else
    return (ivec)((uvec)sum + (uvec)_mm256_madd_epi16((__m256i)a, (__m256i)b));
#endif
}

INLINE void code_quads(const int8_t *a, const int8_t *b, const int8_t *c, const int8_t *d, uvec *out) {
    const __m128i first = _mm_loadu_si128((const __m128i *)a), second = _mm_loadu_si128((const __m128i *)b);
    const __m128i third = _mm_loadu_si128((const __m128i *)c), fourth = _mm_loadu_si128((const __m128i *)d);
    const __m128i ab = _mm_unpacklo_epi8(first, second), cd = _mm_unpacklo_epi8(third, fourth);
    const __m128i ab2 = _mm_unpackhi_epi8(first, second), cd2 = _mm_unpackhi_epi8(third, fourth);
    out[0] = (uvec)_mm256_set_m128i(_mm_unpackhi_epi16(ab, cd), _mm_unpacklo_epi16(ab, cd));
    out[1] = (uvec)_mm256_set_m128i(_mm_unpackhi_epi16(ab2, cd2), _mm_unpacklo_epi16(ab2, cd2));
}

#include "../without_masks.h"
