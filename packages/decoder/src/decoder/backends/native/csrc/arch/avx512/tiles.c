// Products with quantised weights for processors with AVX-512 and its products of bytes (VNNI).

#include "native.h"
#include "formats/formats.h"

typedef struct {
    __m512i words[WORDS]; // unsigned codes of SIDE outputs, plus the centre
    __m512 scale, minimum;
    __m512 scales[2]; // whole numbers
} Weights;

INLINE __m512 halves_at(const uint8_t *at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }

INLINE __m512 bytes_at(const uint8_t *at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at)));
}

INLINE __m512 whole_at(const uint8_t *at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
}

INLINE __m512i low_bits(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }

// Codes of word w: `high` has their upper bits.
INLINE __m512i with_high(const int bits, const int w, __m512i code, __m512i high) {
    const int left = bits == 5 ? 4 - w : 4 - w % 4 * 2; // from where they are to the fifth bit
    const __m512i moved = left >= 0 ? _mm512_slli_epi16(high, left) : _mm512_srli_epi16(high, -left);
    // code | (moved & mask)
    return _mm512_ternarylogic_epi32(code, moved, _mm512_set1_epi8(bits == 5 ? 0x10 : 0x30), 0xf8);
}

INLINE __m512i from_table(const Layout l, __m512i code) {
    static const uint8_t values[2][16] = {{NONLINEAR_VALUES}, {VALUES_OF_FOUR_BITS}};
    const __m128i table = _mm_loadu_si128((const __m128i *)values[l.values == FLOATS_OF_FOUR_BITS]);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), code);
}

INLINE void read_words(const Layout l, const uint8_t *codes, Weights *to) {
    UNROLL(8)
    for (int w = 0; w < WORDS; w++) {
        __m512i code = _mm512_loadu_si512(codes + 64 * (l.bits == 8 ? w : w / 2));
        if (l.bits == 8) code = _mm512_xor_si512(code, _mm512_set1_epi8((char)0x80));
        else code = low_bits(w % 2 ? _mm512_srli_epi16(code, 4) : code);
        if (l.bits == 5 || l.bits == 6) {
            const uint8_t *high = codes + CODE_BYTES(4) + (l.bits == 6 ? 64 * (w / 4) : 0);
            code = with_high(l.bits, w, code, _mm512_loadu_si512(high));
        }
        to->words[w] = l.values ? from_table(l, code) : code;
    }
}

INLINE void read_weights(const Layout l, const uint8_t *block, const uint8_t *part, Weights *to) {
    to->scale = l.values == FLOATS_OF_FOUR_BITS
                    ? _mm512_castsi512_ps(
                          _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)block)), 16))
                    : halves_at(block);
    if (l.scales == 1) to->scale = _mm512_mul_ps(to->scale, bytes_at(part));
    if (l.scales == 2) to->scales[0] = whole_at(part), to->scales[1] = whole_at(part + SIDE);
    if (l.minimum) to->minimum = halves_at(block + 2 * SIDE);
    if (l.minima) to->minimum = _mm512_mul_ps(to->minimum, bytes_at(part + SIDE * l.scales));
    read_words(l, part + SIDE * (l.scales + l.minima), to);
}

INLINE __m512i broadcast(const void *at) {
    int32_t word;
    memcpy(&word, at, 4);
    return _mm512_set1_epi32(word);
}

// The exact sum of words [first, last), less their centre: `pairs` are sums of the inputs. Two sums wait less for their
// products than one would.
INLINE __m512i sum_of(
    const Layout l, const Weights *w, const Input *x, const int first, const int last, const int16_t *pairs) {
    __m512i even = _mm512_setzero_si512(), odd = even;
    if (l.shift != NONE) odd = _mm512_dpwssd_epi32(odd, _mm512_set1_epi16((short)-(1 << l.shift)), broadcast(pairs));
    UNROLL(8)
    for (int i = first; i < last; i += 2) {
        even = _mm512_dpbusd_epi32(even, w->words[i], broadcast(x->codes + 4 * i));
        odd = _mm512_dpbusd_epi32(odd, w->words[i + 1], broadcast(x->codes + 4 * i + 4));
    }
    return _mm512_add_epi32(even, odd);
}

// The exact sum of a part, rounded once: halves, and their products with a scale of a byte, are below 2^24.
INLINE __m512 whole_sum(const Layout l, const Weights *w, const Input *x) {
    if (l.scales < 2) return _mm512_cvtepi32_ps(sum_of(l, w, x, 0, WORDS, x->pairs[2]));
    const __m512i first = sum_of(l, w, x, 0, WORDS / 2, x->pairs[0]);
    const __m512i second = sum_of(l, w, x, WORDS / 2, WORDS, x->pairs[1]);
    const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(first), w->scales[0]);
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(second), w->scales[1], scaled);
}

INLINE void tile(const Layout l, const int parts, const uint8_t *panel, int64_t blocks, const Input *x, const int rows,
    float *sums) {
    const int part_bytes = PART_BYTES(l.bits, l.scales, l.minima), head = HEAD_BYTES(l.minimum);
    __m512 held[ROWS_HELD];
    for (int r = 0; r < rows; r++) held[r] = _mm512_setzero_ps();
    for (int64_t block = 0; block < blocks; block++, panel += head + parts * part_bytes)
        for (int p = 0; p < parts; p++, x += rows) {
            const uint8_t *part = panel + head + p * part_bytes;
            for (int at = 0; at < part_bytes; at += 64) _mm_prefetch((const char *)part + FETCHED + at, _MM_HINT_T1);
            Weights w;
            read_weights(l, panel, part, &w);
            for (int r = 0; r < rows; r++) {
                const Input *in = x + r;
                const __m512 whole = whole_sum(l, &w, in);
                held[r] = _mm512_fmadd_ps(whole, _mm512_mul_ps(w.scale, _mm512_set1_ps(in->step)), held[r]);
                if (l.minimum) held[r] = _mm512_fmadd_ps(w.minimum, _mm512_set1_ps(in->total), held[r]);
            }
        }
    for (int r = 0; r < rows; r++) _mm512_storeu_ps(sums + r * SIDE, held[r]);
}

#define TILE(name, number, inputs, ...)                                                                                \
    static void tile_##name(const uint8_t *panel, int64_t blocks, const Input *x, int rows, float *sums) {             \
        if (rows == 1) tile(LAYOUT_##name, inputs / PART, panel, blocks, x, 1, sums);                                  \
        else tile(LAYOUT_##name, inputs / PART, panel, blocks, x, rows, sums);                                         \
    }
EACH_FORMAT(TILE)

#define ENTRY(name, ...) tile_##name,
const Tile tile_table[FORMATS] = {EACH_FORMAT(ENTRY)};
