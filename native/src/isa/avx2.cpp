#define PERILUNE_ISA avx2
#include "simd/avx2.h"
#include "simd/avx2_dot.h"
#include "simd/avx2_blocks.h"

#include "kernels/table.h"
