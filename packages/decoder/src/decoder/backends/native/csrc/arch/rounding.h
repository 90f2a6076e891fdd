// Rounding a part of the inputs with AVX2, which sets with AVX-512 have as well.

#ifndef ROUNDING_H
#define ROUNDING_H

INLINE void load_part(const void *x, int64_t at, int is_bf16, __m256 *to) {
    UNROLL(4)
    for (int i = 0; i < 4; i++) {
        if (!is_bf16) {
            to[i] = _mm256_loadu_ps((const float *)x + at + 8 * i);
            continue;
        }
        const __m128i narrow = _mm_loadu_si128((const __m128i *)((const uint16_t *)x + at + 8 * i));
        to[i] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
    }
}

// The largest absolute value. As whole numbers: what is no number is the largest.
INLINE float size_of_part(const __m256 *numbers) {
    const __m256i digits = _mm256_set1_epi32(0x7fffffff);
    __m256i most = _mm256_and_si256(_mm256_castps_si256(numbers[0]), digits);
    UNROLL(3)
    for (int i = 1; i < 4; i++)
        most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(numbers[i]), digits));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(four));
}

// The lowest bytes of whole numbers, in their order.
INLINE __m256i lowest_bytes(const __m256i *whole) {
    const __m256i low = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1,
        -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    __m256i all = _mm256_shuffle_epi8(whole[0], low);
    all = _mm256_or_si256(all, _mm256_bslli_epi128(_mm256_shuffle_epi8(whole[1], low), 4));
    all = _mm256_or_si256(all, _mm256_bslli_epi128(_mm256_shuffle_epi8(whole[2], low), 8));
    all = _mm256_or_si256(all, _mm256_bslli_epi128(_mm256_shuffle_epi8(whole[3], low), 12));
    return _mm256_permutevar8x32_epi32(all, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

INLINE void round_part(const void *x, int64_t at, int is_bf16, Input *to) {
    __m256 numbers[4];
    __m256i whole[4];
    load_part(x, at, is_bf16, numbers);
    float size = size_of_part(numbers);
    if (size < 1e-30f) size = 0; // its inverse would not be a number
    to->step = size / 127;
    const __m256 rate = _mm256_set1_ps(to->step > 0 ? 127 / size : 0);
    UNROLL(4)
    for (int i = 0; i < 4; i++) whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(numbers[i], rate));
    const __m256i codes = lowest_bytes(whole);
    _mm256_storeu_si256((__m256i *)to->codes, codes);
    // Sums in 16 bits: of those at places 0, 1 and at places 2, 3 of each word, and then of the words of a half.
    __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes);
    pairs = _mm256_add_epi16(pairs, _mm256_shuffle_epi32(pairs, 0x4e));
    pairs = _mm256_add_epi16(pairs, _mm256_shuffle_epi32(pairs, 0xb1));
    const __m128i first = _mm256_castsi256_si128(pairs), second = _mm256_extracti128_si256(pairs, 1);
    const __m128i both = _mm_add_epi16(first, second), halves = _mm_unpacklo_epi32(first, second);
    const __m128i sums = _mm_madd_epi16(_mm_unpacklo_epi64(halves, both), _mm_set1_epi16(1));
    to->sum = _mm_extract_epi32(sums, 2);
    to->total = to->step * (float)to->sum;
    _mm_storel_epi64((__m128i *)to->halves, sums);
    _mm_storel_epi64((__m128i *)to->pairs, halves);
    const int32_t whole_part = _mm_cvtsi128_si32(both);
    memcpy(to->pairs[2], &whole_part, 4);
}

#endif
