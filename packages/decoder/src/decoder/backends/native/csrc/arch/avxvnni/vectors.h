// AVX2 with products of bytes and of words (VNNI).

#include "../avx2/vectors.h"
