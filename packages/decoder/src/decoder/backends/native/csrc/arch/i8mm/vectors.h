// NEON with products of small matrices of bytes (i8mm).

#include "../neon/vectors.h"
