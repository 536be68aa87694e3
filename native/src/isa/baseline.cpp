#define PERILUNE_ISA baseline
#include "simd/baseline.h"

#include "kernels/table.h"
