// Products with quantised weights for processors with AVX2.

#include "native.h"
#include "formats/formats.h"

typedef struct {
    __m256i words[WORDS]; // unsigned codes of 8 outputs, plus the centre; sizes of signed ones where bits are 8
    __m256i signs[WORDS]; // these themselves
    __m256i scales[2];    // whole numbers, twice in 16 bits
    __m256 scale, minimum;
} Weights;

INLINE int is_signed(const Layout l) { return l.bits == 8 || l.values == NONLINEAR; }

INLINE __m256 halves_at(const uint8_t *at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)); }

INLINE __m256 bytes_at(const uint8_t *at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at)));
}

INLINE __m256i whole_at(const uint8_t *at) {
    const __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at));
    return _mm256_or_si256(_mm256_slli_epi32(wide, 16), _mm256_and_si256(wide, _mm256_set1_epi32(0xffff)));
}

INLINE __m256i low_bits(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }

// Codes of word w: `high` has their upper bits.
INLINE __m256i with_high(const int bits, const int w, __m256i code, __m256i high) {
    const int left = bits == 5 ? 4 - w : 4 - w % 4 * 2; // from where they are to the fifth bit
    const __m256i moved = left >= 0 ? _mm256_slli_epi16(high, left) : _mm256_srli_epi16(high, -left);
    return _mm256_or_si256(code, _mm256_and_si256(moved, _mm256_set1_epi8(bits == 5 ? 0x10 : 0x30)));
}

INLINE __m256i from_table(const Layout l, __m256i code) {
    static const uint8_t values[2][16] = {{NONLINEAR_VALUES}, {VALUES_OF_FOUR_BITS}};
    const __m128i table = _mm_loadu_si128((const __m128i *)values[l.values == FLOATS_OF_FOUR_BITS]);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), code);
}

// The codes of outputs 8 side to 8 side + 7 of a part.
INLINE void read_words(const Layout l, const uint8_t *codes, const int side, Weights *to) {
    UNROLL(8)
    for (int w = 0; w < WORDS; w++) {
        const uint8_t *at = codes + 64 * (l.bits == 8 ? w : w / 2) + 32 * side;
        __m256i code = _mm256_loadu_si256((const __m256i *)at);
        if (l.bits != 8) code = low_bits(w % 2 ? _mm256_srli_epi16(code, 4) : code);
        if (l.bits == 5 || l.bits == 6) {
            const uint8_t *high = codes + CODE_BYTES(4) + 32 * side + (l.bits == 6 ? 64 * (w / 4) : 0);
            code = with_high(l.bits, w, code, _mm256_loadu_si256((const __m256i *)high));
        }
        if (l.values) code = from_table(l, code);
        if (l.values == NONLINEAR) code = _mm256_xor_si256(code, _mm256_set1_epi8((char)0x80));
        to->signs[w] = code;
        to->words[w] = is_signed(l) ? _mm256_abs_epi8(code) : code;
    }
}

INLINE void read_weights(const Layout l, const uint8_t *block, const uint8_t *part, const int side, Weights *to) {
    to->scale = l.values == FLOATS_OF_FOUR_BITS
                    ? _mm256_castsi256_ps(_mm256_slli_epi32(
                          _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(block + 16 * side))), 16))
                    : halves_at(block + 16 * side);
    if (l.scales == 1) to->scale = _mm256_mul_ps(to->scale, bytes_at(part + 8 * side));
    if (l.scales == 2) to->scales[0] = whole_at(part + 8 * side), to->scales[1] = whole_at(part + SIDE + 8 * side);
    if (l.minimum) to->minimum = halves_at(block + 2 * SIDE + 16 * side);
    if (l.minima) to->minimum = _mm256_mul_ps(to->minimum, bytes_at(part + SIDE * l.scales + 8 * side));
    read_words(l, part + SIDE * (l.scales + l.minima), side, to);
}

INLINE __m256i broadcast(const void *at) {
    int32_t word;
    memcpy(&word, at, 4);
    return _mm256_set1_epi32(word);
}

// Words [first, last), added up in 16 bits. Sums may leave these for a while: less the centre they are within.
INLINE __m256i narrow_sum(const Weights *w, const Input *x, const int first, const int last) {
    __m256i sum = _mm256_maddubs_epi16(w->words[first], broadcast(x->codes + 4 * first));
    UNROLL(8)
    for (int i = first + 1; i < last; i++)
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w->words[i], broadcast(x->codes + 4 * i)));
    return sum;
}

INLINE __m256i less_centre(__m256i sum, const int shift, const int16_t *pairs) {
    return _mm256_sub_epi16(sum, _mm256_slli_epi16(broadcast(pairs), shift));
}

// The exact sums of a part for 8 outputs.
INLINE __m256i whole_sum(const Layout l, const Weights *w, const Input *x) {
    const __m256i ones = _mm256_set1_epi16(1);
    if (is_signed(l)) {
        __m256i sum = _mm256_setzero_si256();
        UNROLL(8)
        for (int i = 0; i < WORDS; i++) {
            const __m256i signed_x = _mm256_sign_epi8(broadcast(x->codes + 4 * i), w->signs[i]);
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w->words[i], signed_x), ones));
        }
        return sum;
    }
    if (l.scales == 2) {
        const __m256i first = less_centre(narrow_sum(w, x, 0, 4), l.shift, x->pairs[0]);
        const __m256i second = less_centre(narrow_sum(w, x, 4, 8), l.shift, x->pairs[1]);
        return _mm256_add_epi32(_mm256_madd_epi16(first, w->scales[0]), _mm256_madd_epi16(second, w->scales[1]));
    }
    const __m256i sum = narrow_sum(w, x, 0, WORDS);
    if (l.shift != NONE) return _mm256_madd_epi16(less_centre(sum, l.shift, x->pairs[2]), ones);
    if (l.bits == 4) return _mm256_madd_epi16(sum, ones);
    // Five bits without a centre: 16 is taken from the codes, so that sums stay within 16 bits, and given back.
    const __m256i back = _mm256_slli_epi32(broadcast(&x->sum), 4);
    return _mm256_add_epi32(_mm256_madd_epi16(less_centre(sum, 4, x->pairs[2]), ones), back);
}

INLINE void tile(const Layout l, const int parts, const uint8_t *panel, int64_t blocks, const Input *x, int64_t stride,
    const int rows, float *sums) {
    const int part_bytes = PART_BYTES(l.bits, l.scales, l.minima), head = HEAD_BYTES(l.minimum);
    __m256 held[ROWS_HELD][2];
    for (int r = 0; r < rows; r++) held[r][0] = held[r][1] = _mm256_setzero_ps();
    for (int64_t block = 0; block < blocks; block++, panel += head + parts * part_bytes)
        for (int p = 0; p < parts; p++, x++) {
            const uint8_t *part = panel + head + p * part_bytes;
            for (int at = 0; at < part_bytes; at += 64) _mm_prefetch((const char *)part + 2048 + at, _MM_HINT_NTA);
            UNROLL(2)
            for (int side = 0; side < 2; side++) {
                Weights w;
                read_weights(l, panel, part, side, &w);
                for (int r = 0; r < rows; r++) {
                    const Input *in = x + r * stride;
                    const __m256 whole = _mm256_cvtepi32_ps(whole_sum(l, &w, in));
                    __m256 sum =
                        _mm256_fmadd_ps(whole, _mm256_mul_ps(w.scale, _mm256_broadcast_ss(&in->step)), held[r][side]);
                    if (l.minimum) sum = _mm256_fmadd_ps(w.minimum, _mm256_broadcast_ss(&in->total), sum);
                    held[r][side] = sum;
                }
            }
        }
    for (int r = 0; r < rows; r++)
        for (int side = 0; side < 2; side++) _mm256_storeu_ps(sums + r * SIDE + 8 * side, held[r][side]);
}

#define TILE(name, number, inputs, ...)                                                                                \
    static void tile_##name(                                                                                           \
        const uint8_t *panel, int64_t blocks, const Input *x, int64_t stride, int rows, float *sums) {                 \
        if (rows == 1) tile(LAYOUT_##name, inputs / PART, panel, blocks, x, stride, 1, sums);                          \
        else tile(LAYOUT_##name, inputs / PART, panel, blocks, x, stride, rows, sums);                                 \
    }
EACH_FORMAT(TILE)

#define ENTRY(name, ...) tile_##name,
const Tile tile_table[FORMATS] = {EACH_FORMAT(ENTRY)};
