// Products with quantised weights for processors with AVX-512 and its products of bytes (VNNI).

#include "native.h"
#include "formats/formats.h"

INLINE vec from_halves(halves x) { return (vec)_mm512_cvtph_ps((__m256i)x); }

INLINE ivec widened_bytes(const uint8_t *at) {
    return (ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at));
}

INLINE uvec looked_up(const uint8_t *table, uvec codes) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)table);
    return (uvec)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), (__m512i)codes);
}

INLINE ivec dot_bytes(ivec sum, uvec codes, uvec inputs) {
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)inputs);
}

#include "arch/vnni.h"
