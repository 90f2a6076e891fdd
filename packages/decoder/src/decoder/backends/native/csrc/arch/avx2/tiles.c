// Products with quantised weights for processors with AVX2.
//
// Unsigned codes of up to six bits are multiplied by signed inputs and added in pairs in 16 bits (maddubs). What the codes
// have too much, their centre, is taken from the sums, with the sums of the inputs. Products of eight bits would overflow:
// such codes, and inputs, are widened to 16 bits, those at even places of a word apart from those at odd ones.
//
// A part of SIDE outputs is read in pieces of four words, or of two that are widened, so that a piece's vectors stay in
// registers while all rows are multiplied, and an input that is read serves all outputs. Sums wait in memory.

#include "native.h"
#include "formats/formats.h"

enum { HALF = WORDS / 2 };

// Of SIDE outputs, 8 to a vector.
typedef struct {
    __m256i words[HALF][2]; // unsigned codes; of wide ones those at even and at odd places of two words
    __m256i scales[2];      // whole numbers, twice in 16 bits
} Piece;

typedef struct {
    __m256 scale[2], minimum[2];
} Shared;

// Two vectors for the SIDE outputs of a row.
typedef struct {
    __m256i of[2];
} Pair;

// Whether codes are signed ones of eight bits.
INLINE int is_wide(const Layout l) { return l.bits == 8 || l.values == NONLINEAR; }

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

// What codes of four bits stand for, plus the centre.
INLINE __m256i from_table(const Layout l, __m256i code) {
    static const uint8_t values[2][16] = {{NONLINEAR_VALUES}, {VALUES_OF_FOUR_BITS}};
    const __m128i table = _mm_loadu_si128((const __m128i *)values[l.values == FLOATS_OF_FOUR_BITS]);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), code);
}

// Word w of the outputs of one side.
INLINE __m256i word_at(const Layout l, const uint8_t *codes, const int w, const int side) {
    const uint8_t *at = codes + 64 * (l.bits == 8 ? w : w / 2) + 32 * side;
    __m256i code = _mm256_loadu_si256((const __m256i *)at);
    if (l.bits == 8) return code;
    code = low_bits(w % 2 ? _mm256_srli_epi16(code, 4) : code);
    if (l.bits == 5 || l.bits == 6) {
        const uint8_t *high = codes + CODE_BYTES(4) + 32 * side + (l.bits == 6 ? 64 * (w / 4) : 0);
        code = with_high(l.bits, w, code, _mm256_loadu_si256((const __m256i *)high));
    }
    return l.values ? from_table(l, code) : code;
}

INLINE void read_piece(const Layout l, const uint8_t *part, const int number, Piece *to) {
    const uint8_t *codes = part + SIDE * (l.scales + l.minima);
    UNROLL(2)
    for (int side = 0; side < 2; side++) {
        UNROLL(4)
        for (int n = 0; n < HALF; n++) {
            if (!is_wide(l)) {
                to->words[n][side] = word_at(l, codes, number * HALF + n, side);
                continue;
            }
            __m256i word = word_at(l, codes, number * HALF / 2 + n / 2, side);
            if (l.bits != 8) word = _mm256_xor_si256(word, _mm256_set1_epi8((char)0x80));
            to->words[n][side] = _mm256_srai_epi16(n % 2 ? word : _mm256_slli_epi16(word, 8), 8);
        }
        to->scales[side] = l.scales == 2 ? whole_at(part + SIDE * number + 8 * side) : _mm256_set1_epi16(1);
    }
}

INLINE void read_shared(const Layout l, const uint8_t *block, const uint8_t *part, Shared *to) {
    UNROLL(2)
    for (int side = 0; side < 2; side++) {
        const uint8_t *at = block + 16 * side;
        const __m128i bits = _mm_loadu_si128((const __m128i *)at);
        to->scale[side] = l.values == FLOATS_OF_FOUR_BITS
                              ? _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))
                              : halves_at(at);
        if (l.scales == 1) to->scale[side] = _mm256_mul_ps(to->scale[side], bytes_at(part + 8 * side));
        if (l.minimum) to->minimum[side] = halves_at(at + 2 * SIDE);
        if (l.minima) to->minimum[side] = _mm256_mul_ps(to->minimum[side], bytes_at(part + SIDE * l.scales + 8 * side));
    }
}

INLINE __m256i broadcast(const void *at) {
    int32_t word;
    memcpy(&word, at, 4);
    return _mm256_set1_epi32(word);
}

// Products of a piece, added up in 16 bits. Sums may leave these for a while: less the centre they are within.
INLINE Pair narrow_sums(const Piece *p, const int8_t *codes) {
    Pair sums;
    __m256i word = broadcast(codes);
    UNROLL(2)
    for (int side = 0; side < 2; side++) sums.of[side] = _mm256_maddubs_epi16(p->words[0][side], word);
    UNROLL(4)
    for (int w = 1; w < HALF; w++) {
        word = broadcast(codes + 4 * w);
        UNROLL(2)
        for (int side = 0; side < 2; side++)
            sums.of[side] = _mm256_add_epi16(sums.of[side], _mm256_maddubs_epi16(p->words[w][side], word));
    }
    return sums;
}

INLINE Pair added(Pair x, Pair y, const int bits) {
    UNROLL(2)
    for (int side = 0; side < 2; side++)
        x.of[side] = bits == 16 ? _mm256_add_epi16(x.of[side], y.of[side]) : _mm256_add_epi32(x.of[side], y.of[side]);
    return x;
}

INLINE Pair less_centre(Pair x, const int shift, const int16_t *pairs) {
    const __m256i centre = _mm256_slli_epi16(broadcast(pairs), shift);
    UNROLL(2)
    for (int side = 0; side < 2; side++) x.of[side] = _mm256_sub_epi16(x.of[side], centre);
    return x;
}

INLINE Pair scaled(Pair x, const Piece *p) {
    UNROLL(2)
    for (int side = 0; side < 2; side++) x.of[side] = _mm256_madd_epi16(x.of[side], p->scales[side]);
    return x;
}

// Inputs of a part in 16 bits, those at even places of a word before those at odd ones.
INLINE void widen(const Input *x, int16_t *to) {
    const __m128i even_first = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    UNROLL(2)
    for (int i = 0; i < PART; i += 16) {
        const __m128i codes = _mm_loadu_si128((const __m128i *)(x->codes + i));
        const __m256i wide = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(codes, even_first));
        _mm256_storeu_si256((__m256i *)(to + i), wide);
    }
}

// Add products of a piece of wide codes.
INLINE Pair wide_sums(const Piece *p, const int16_t *x, Pair sums) {
    UNROLL(4)
    for (int n = 0; n < HALF; n++) {
        const __m256i two = broadcast(x + 2 * n);
        UNROLL(2)
        for (int side = 0; side < 2; side++)
            sums.of[side] = _mm256_add_epi32(sums.of[side], _mm256_madd_epi16(p->words[n][side], two));
    }
    return sums;
}

// What a row's sums are behind piece `number` of a part, with those of the pieces before it `so_far`; exact behind the
// last one.
INLINE Pair behind_piece(
    const Layout l, const int number, const Piece *p, const Input *x, const int16_t *wide, const Pair *so_far) {
    if (is_wide(l)) {
        const __m256i zero = _mm256_setzero_si256();
        return wide_sums(p, wide + 2 * HALF * number, number ? *so_far : (Pair){{zero, zero}});
    }
    const Pair own = narrow_sums(p, x->codes + 4 * HALF * number);
    // Sums of both pieces leave 16 bits where codes have five and no centre is taken from them.
    if (l.scales == 2 || (l.bits == 5 && l.shift == NONE)) {
        const Pair whole = scaled(l.shift == NONE ? own : less_centre(own, l.shift, x->pairs[number]), p);
        return number ? added(whole, *so_far, 32) : whole;
    }
    if (!number) return own;
    const Pair both = added(own, *so_far, 16);
    return scaled(l.shift == NONE ? both : less_centre(both, l.shift, x->pairs[2]), p);
}

// What is known of a row: its sums, and those behind a piece of a part.
typedef struct {
    Pair waiting;
    __m256 sums[2];
} Row;

INLINE void tile(const Layout l, const int parts, const uint8_t *panel, int64_t blocks, const Input *x, const int rows,
    float *sums) {
    const int part_bytes = PART_BYTES(l.bits, l.scales, l.minima), head = HEAD_BYTES(l.minimum);
    const int pieces = is_wide(l) ? 4 : 2;
    Row row[ROWS_HELD];
    int16_t wide[ROWS_HELD][PART];
    for (int r = 0; r < rows; r++) row[r].sums[0] = row[r].sums[1] = _mm256_setzero_ps();
    for (int64_t block = 0; block < blocks; block++, panel += head + parts * part_bytes)
        for (int p = 0; p < parts; p++, x += rows) {
            const uint8_t *part = panel + head + p * part_bytes;
            fetch_ahead(part, part_bytes);
            Piece piece;
            Shared shared;
            for (int r = 0; is_wide(l) && r < rows; r++) widen(x + r, wide[r]);
            UNROLL(3)
            for (int number = 0; number + 1 < pieces; number++) {
                read_piece(l, part, number, &piece);
                UNROLL(2)
                for (int r = 0; r < rows; r++)
                    row[r].waiting = behind_piece(l, number, &piece, x + r, wide[r], &row[r].waiting);
            }
            read_piece(l, part, pieces - 1, &piece);
            read_shared(l, panel, part, &shared);
            UNROLL(2)
            for (int r = 0; r < rows; r++) {
                const Input *in = x + r;
                const Pair whole = behind_piece(l, pieces - 1, &piece, in, wide[r], &row[r].waiting);
                UNROLL(2)
                for (int side = 0; side < 2; side++) {
                    const __m256 scale = _mm256_mul_ps(shared.scale[side], _mm256_broadcast_ss(&in->step));
                    __m256 sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole.of[side]), scale, row[r].sums[side]);
                    if (l.minimum) sum = _mm256_fmadd_ps(shared.minimum[side], _mm256_broadcast_ss(&in->total), sum);
                    row[r].sums[side] = sum;
                }
            }
        }
    for (int r = 0; r < rows; r++)
        for (int side = 0; side < 2; side++) _mm256_storeu_ps(sums + r * SIDE + 8 * side, row[r].sums[side]);
}

#include "arch/table.h"
