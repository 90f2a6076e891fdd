// Pairs of whole numbers of 16 bits, for sets that leave them to the compiler.

#ifndef WORDS_H
#define WORDS_H

INLINE ivec dot_words(ivec sum, uvec a, uvec b) {
    // Of each word the upper number, and the lower one.
    const ivec upper = ((ivec)a >> 16) * ((ivec)b >> 16), lower = ((ivec)(a << 16) >> 16) * ((ivec)(b << 16) >> 16);
    return (ivec)((uvec)sum + (uvec)upper + (uvec)lower);
}

INLINE void code_quads(const int8_t *a, const int8_t *b, const int8_t *c, const int8_t *d, uvec *out) {
    for (int i = 0; i < WIDE * LANES; i++) {
        const int8_t four[4] = {a[i], b[i], c[i], d[i]};
        memcpy((char *)out + 4 * i, four, 4);
    }
}

#endif
