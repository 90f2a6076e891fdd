// Products with quantised weights for processors with AVX2 and its products of bytes (VNNI).

#include "native.h"
#include "formats/formats.h"

INLINE vec from_halves(halves x) { return (vec)_mm256_cvtph_ps((__m128i)x); }

INLINE ivec widened_bytes(const uint8_t *at) {
    return (ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at));
}

INLINE uvec looked_up(const uint8_t *table, uvec codes) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)table);
    return (uvec)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), (__m256i)codes);
}

INLINE ivec dot_bytes(ivec sum, uvec codes, uvec inputs) {
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)inputs);
}

#include "arch/vnni.h"
