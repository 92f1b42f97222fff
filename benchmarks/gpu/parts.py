"""The parts of the measurement of one GPU, and a description of each part."""

ONE_BIT = "one_bit"
PARTS = {
    "passes": "each kernel of an all-reduce by itself",
    "codecs": "encoding and decoding",
    "staged": "copies through the host's memory",
    "messages": "what a stage of a pipeline sends to the next one",
    "waiting": "what waiting kernels take of a product",
    "all_reduces": "all-reduces between two streams",
    ONE_BIT: "one bit a value, encoded by torch",
}
