#define PERILUNE_ISA avx512
#include "simd/avx512.h"
#include "simd/avx512_dot.h"
#include "simd/avx512_blocks.h"

#include "kernels/table.h"
