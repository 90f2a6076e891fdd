// The types of vectors, once LANES is known, and what sets without masks share.

#ifndef TYPES_H
#define TYPES_H

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef int16_t shorts __attribute__((vector_size(4 * LANES)));
typedef uint16_t ushorts __attribute__((vector_size(4 * LANES)));

INLINE vec choose(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }

// Of four codes in each word the first and the third, or the second and the fourth, as two numbers of 16 bits.
INLINE uvec odd_codes(uvec x) { return (uvec)((shorts)((ushorts)x << 8) >> 8); }

INLINE uvec even_codes(uvec x) { return (uvec)((shorts)x >> 8); }

// To the nearest bfloat16, ties to even, in the lower halves of words; NaN stays NaN.
INLINE uvec rounded_words(vec x) {
    const uvec bits = (uvec)x, up = bits + 0x7fff + (bits >> 16 & 1);
    const uvec nan = (uvec)((bits & 0x7fffffff) > 0x7f800000);
    return ((up & ~nan) | ((bits | 0x400000) & nan)) >> 16;
}

#endif
