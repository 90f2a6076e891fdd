// Partial loads and stores, and powers of two, for sets that have no instructions for them.

#ifndef WITHOUT_MASKS_H
#define WITHOUT_MASKS_H

INLINE halves rounded(vec x) { return __builtin_convertvector(rounded_words(x), halves); }

// Copies of a vector have a size that compilers know: of any other they make loops of bytes through memory.
INLINE vec load(const void *from, int64_t at, int is_bf16, int64_t count) {
    if (is_bf16) {
        halves x = {0};
        if (count >= LANES) memcpy(&x, (const uint16_t *)from + at, sizeof x);
        else memcpy(&x, (const uint16_t *)from + at, (size_t)count * 2);
        return all_widened(x);
    }
    vec x = {0};
    if (count >= LANES) memcpy(&x, (const float *)from + at, sizeof x);
    else memcpy(&x, (const float *)from + at, (size_t)count * 4);
    return x;
}

INLINE void store(void *to, int64_t at, int is_bf16, vec x, int64_t count) {
    if (is_bf16) {
        const halves y = rounded(x);
        if (count >= LANES) memcpy((uint16_t *)to + at, &y, sizeof y);
        else memcpy((uint16_t *)to + at, &y, (size_t)count * 2);
        return;
    }
    if (count >= LANES) memcpy((float *)to + at, &x, sizeof x);
    else memcpy((float *)to + at, &x, (size_t)count * 4);
}

INLINE vec times_power(vec x, vec n) {
    const ivec low = n < -126;
    return choose(low, (vec){0}, x * (vec)((__builtin_convertvector(choose(low, (vec){0}, n), ivec) + 127) << 23));
}

#if !defined(BF16_PAIRS_ELSEWHERE)
#include "without_bf16.h"
#endif

#endif
