// The kernels of minmax8.cu.
#define ROUNDED(NAME, ROUNDING)            \
  ENTRY(quantize_##NAME##_1_##ROUNDING)    \
  ENTRY(quantize_##NAME##_4_##ROUNDING)    \
  ENTRY(write_codes_##NAME##_##ROUNDING)
#define SOURCED(NAME) ROUNDED(NAME, nearest) ROUNDED(NAME, stochastic) ENTRY(find_ranges_##NAME)
#define DECODED(NAME) ENTRY(dequantize_##NAME) ENTRY(dequantize_add_##NAME)

#define KERNELS                                                 \
  ENTRY(close_blocks) ENTRY(dequantize_reduce) \
  SOURCED(float32) SOURCED(float16) SOURCED(bfloat16) SOURCED(payloads) \
  DECODED(float32) DECODED(float16) DECODED(bfloat16)
