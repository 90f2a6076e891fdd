// Pairs of whole numbers of 16 bits, for sets that leave them to the compiler.

#ifndef WORDS_H
#define WORDS_H

typedef int16_t code_vec __attribute__((vector_size(4 * LANES)));

INLINE ivec dot_words(ivec sum, uvec a, uvec b) {
    // Of each word the upper number, and the lower one.
    const ivec upper = ((ivec)a >> 16) * ((ivec)b >> 16), lower = ((ivec)(a << 16) >> 16) * ((ivec)(b << 16) >> 16);
    return (ivec)((uvec)sum + (uvec)upper + (uvec)lower);
}

INLINE uvec code_words(const int8_t *codes) {
    code_vec x;
    for (int i = 0; i < 2 * LANES; i++) x[i] = codes[i];
    return (uvec)x;
}

INLINE uvec code_pairs(const int8_t *a, const int8_t *b) {
    code_vec x;
    for (int i = 0; i < LANES; i++) x[2 * i] = a[i], x[2 * i + 1] = b[i];
    return (uvec)x;
}

#endif
