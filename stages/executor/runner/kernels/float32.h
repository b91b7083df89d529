// Numbers of cpu.c for float32 models: floats, without rounding in between.

typedef float number;

INLINE Floats load_wide(const number *p) { return load_floats(p); }

INLINE Floats load_wide_some(const number *p, Mask mask) { return load_floats_some(p, mask); }

INLINE void store_narrow(number *p, Floats v) { store_floats(p, v); }

INLINE void store_narrow_some(number *p, Mask mask, Floats v) { store_floats_some(p, mask, v); }

INLINE Floats rounded(Floats v) { return v; }

INLINE float wide(number v) { return v; }

#ifdef AVX2
#include "products_avx2.h"
#else
#include "products_float32.h"
#endif
