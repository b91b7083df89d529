// What both dtypes' products with AVX-512 share: numbers are operands as they are.

enum { WIDENED = 0 };

INLINE Numbers load_operands(const Operand *p, int part, Lanes mask) { return load(p, part, mask); }

INLINE void store_operands(Operand *p, Floats v) { store_narrow(p, v); }

INLINE void lay_out_operands(const number *from, long count, Operand *to) {
    memcpy(to, from, count * sizeof(number));
}

INLINE const Operand *operands_of(const number *rows, long count, long k, Operand **rest) {
    (void)count, (void)k, (void)rest;
    return rows;
}
