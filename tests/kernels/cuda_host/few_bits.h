// The kernels of few_bits.cu.
#define SIZED(NAME) \
  ENTRY(NAME##_64) ENTRY(NAME##_128) ENTRY(NAME##_256) ENTRY(NAME##_512) ENTRY(NAME##_1024) ENTRY(NAME##_2048)

#define KERNELS                                                     \
  SIZED(encode_levels1) SIZED(encode_levels2) ENTRY(decode_levels) \
  ENTRY(encode_minmax4) ENTRY(decode_minmax4) ENTRY(encode_topk) ENTRY(decode_topk)
