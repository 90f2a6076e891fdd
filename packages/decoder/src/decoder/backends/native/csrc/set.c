// The functions of one instruction set, as library.c finds them.

#include "native.h"

#define STRING_(x) #x
#define STRING(x) STRING_(x)
#define FIELD(result, name, parameters, arguments) name,

PRIVATE const InstructionSet IN_SET(set) = {STRING(SET), BF16_PAIRS_MULTIPLY, PANEL, CHUNK, EACH_FUNCTION(FIELD)};
