#define PERILUNE_ISA baseline
#include "simd/baseline.h"
#include "simd/baseline_dot.h"
#include "simd/baseline_blocks.h"

#include "kernels/table.h"
