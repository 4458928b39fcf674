"""Text from a decoder: prefill, decoding, its key-value cache, sampling, scores of given texts."""
